//! A disk that hangs and comes back: `fsfreeze` on a loop device of the test's own (needs root).
//!
//! Invariant: under SYNC_FLUSH nothing is acknowledged while the disk hangs; under ASYNC_FLUSH
//! sends go on until the buffer is full and are then refused in so many words; after the thaw all
//! goes on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::audit::{Ledger, Sighting};
use tests::client::{Client, answer, code, physical_offset, pulled, sent};
use tests::disk::LoopDisk;
use tests::frame::Frame;
use tests::process::{BrokerProcess, eventually};
use tests::{StopAtEnd, payload, turn};

const TOPIC: &str = "frozen";
const DISK_BYTES: u64 = 4 << 30;
const FROZEN: Duration = Duration::from_secs(2);
const BODY_BYTES: usize = 64 << 10;

/// A broker whose store lies on a loop disk; none where that cannot be had.
fn on_loop_disk(name: &str, flush: &str) -> Option<(BrokerProcess, LoopDisk)> {
    let mut broker = BrokerProcess::new(name);
    let disk = LoopDisk::under(&mut broker, DISK_BYTES)?;
    broker.set("flushDiskType", flush);
    Some((broker, disk))
}

#[test]
fn synchronous_sends_wait_for_the_thaw() {
    let _turn = turn();
    let Some((mut broker, mut disk)) = on_loop_disk("frozen-sync", "SYNC_FLUSH") else {
        return;
    };
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..20 {
        client
            .send(TOPIC, 0, &payload::body(number, 1000), &[])
            .expect("send");
    }
    let mut reader = broker.client();
    assert_eq!(reader.read_queue(TOPIC, 0, 0).expect("read").len(), 20);
    disk.freeze();
    let opaque = client
        .start_send(TOPIC, 0, &payload::body(20, 1000), &[])
        .expect("start");
    let frozen = Instant::now();
    let answered = thread::scope(|scope| {
        let waiting = scope.spawn(|| (client.finish(opaque), Instant::now()));
        while frozen.elapsed() < FROZEN {
            let pulled = reader.pull(TOPIC, 0, 0, 32).expect("reads go on");
            assert_eq!(pulled.max_offset, 20, "unsynced messages are not readable");
            thread::sleep(Duration::from_millis(50));
        }
        disk.thaw();
        let thawed = Instant::now();
        let (frame, answered) = waiting.join().expect("waiter");
        let frame = frame.expect("an answer");
        // A refusal is allowed at any time; an acknowledgement only after the thaw.
        assert!(
            frame.code != answer::SUCCESS || answered >= thawed,
            "acknowledged while frozen"
        );
        frame.code == answer::SUCCESS
    });
    let expected = if answered { 21 } else { 20 };
    let sent = client
        .send(TOPIC, 0, &payload::body(21, 1000), &[])
        .expect("goes on by itself");
    assert!(sent.queue_offset >= expected, "{sent:?} after {expected}");
    broker.kill();
}

/// Sends as fast as it can for `time`; returns acknowledgements and refusals with their delays.
fn pour(broker: &BrokerProcess, time: Duration, first: u64) -> (Vec<Sighting>, Vec<String>) {
    let mut client = broker.client();
    let started = Instant::now();
    let (mut acknowledged, mut refused) = (Vec::new(), Vec::new());
    for number in first.. {
        if started.elapsed() > time {
            break;
        }
        let asked = Instant::now();
        let body = payload::body(number, BODY_BYTES);
        let opaque = client
            .start_send(TOPIC, 0, &body, &[])
            .expect("the connection stays");
        let frame = client.finish(opaque).expect("an answer, not silence");
        let text = frame.remark.clone().unwrap_or_default();
        if frame.code == answer::SUCCESS {
            let sent = sent(frame).expect("a send answer");
            acknowledged.push(Sighting {
                number,
                queue_id: sent.queue_id,
                queue_offset: sent.queue_offset,
                physical_offset: physical_offset(sent.message_id()),
            });
        } else {
            assert_eq!(frame.code, answer::SERVICE_NOT_AVAILABLE, "{text}");
            refused.push(format!("{text} after {:?}", asked.elapsed()));
            thread::sleep(Duration::from_millis(2));
        }
    }
    (acknowledged, refused)
}

#[test]
fn asynchronous_sends_go_on_to_the_bound_and_are_then_refused() {
    let _turn = turn();
    let Some((mut broker, mut disk)) = on_loop_disk("frozen-async", "ASYNC_FLUSH") else {
        return;
    };
    broker.start();
    broker
        .client()
        .create_topic(TOPIC, 1)
        .expect("create topic");
    let mut ledger = Ledger::default();
    // A loop disk may be slower than the sender, so refusals are allowed before the freeze, too.
    let (before, _) = pour(&broker, Duration::from_millis(300), 0);
    assert!(!before.is_empty(), "nothing acknowledged by a healthy disk");
    // Let what is buffered reach the disk, so that the freeze meets an empty buffer.
    thread::sleep(Duration::from_secs(1));
    disk.freeze();
    let (during, refused) = pour(&broker, FROZEN, 1_000_000);
    assert!(
        during.len() >= 16,
        "only {} acknowledged while frozen",
        during.len()
    );
    assert!(
        !refused.is_empty(),
        "{} MiB taken without a bound",
        (during.len() * BODY_BYTES) >> 20
    );
    assert!(
        refused[0].to_lowercase().contains("disk"),
        "the refusal names the cause: {refused:?}"
    );
    disk.thaw();
    let (after, _) = pour(&broker, Duration::from_millis(500), 2_000_000);
    assert!(!after.is_empty(), "nothing acknowledged after the thaw");
    before
        .into_iter()
        .chain(during)
        .chain(after)
        .for_each(|seen| ledger.note(seen));
    ledger.audit(&mut broker.client(), TOPIC, 1, true);
    broker.kill();
    broker.start();
    ledger.audit(&mut broker.client(), TOPIC, 1, true);
    broker.stop();
}

/// H18: whatever the disk does, an acknowledged offset can be pulled at once.
#[test]
fn a_message_is_readable_the_moment_it_is_acknowledged() {
    let _turn = turn();
    let Some((mut broker, mut disk)) = on_loop_disk("frozen-read", "ASYNC_FLUSH") else {
        return;
    };
    broker.set("mappedFileSizeCommitLog", &(1 << 20).to_string());
    broker.start();
    broker
        .client()
        .create_topic(TOPIC, 8)
        .expect("create topic");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let end = StopAtEnd(&stop);
        for queue in 0..8 {
            let (broker, stop) = (&broker, &stop);
            scope.spawn(move || {
                let mut client = broker.client();
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let body = payload::body(number, 2000);
                    let opaque = client.start_send(TOPIC, queue, &body, &[]).expect("start");
                    let frame = client.finish(opaque).expect("an answer");
                    if frame.code != answer::SUCCESS {
                        thread::sleep(Duration::from_millis(5));
                        continue;
                    }
                    let offset = sent(frame).expect("send answer").queue_offset;
                    let wait = Duration::ZERO;
                    let opaque = client
                        .start_pull(TOPIC, queue, offset, 1, wait)
                        .expect("start");
                    let pulled = pulled(client.finish(opaque).expect("answer")).expect("pull");
                    assert_eq!(
                        pulled.code,
                        answer::SUCCESS,
                        "queue {queue} offset {offset}"
                    );
                    assert_eq!(
                        pulled.records[0].body, body,
                        "queue {queue} offset {offset}"
                    );
                }
            });
        }
        for _ in 0..2 {
            thread::sleep(Duration::from_secs(1));
            disk.freeze();
            thread::sleep(FROZEN);
            disk.thaw();
        }
        thread::sleep(Duration::from_millis(500));
        drop(end);
    });
    let mut client = broker.client();
    for queue in 0..8 {
        let records = client.read_queue(TOPIC, queue, 0).expect("no hole");
        let end = client.max_offset(TOPIC, queue).expect("the end");
        assert_eq!(records.len() as i64, end, "queue {queue}");
    }
    let segments = broker.segments().len();
    assert!(
        segments > 4,
        "{segments} segments: hardly a roll was crossed"
    );
    assert!(!broker.output().contains("panicked"), "{}", broker.output());
    broker.stop();
}

/// Requires an answer soon, whatever the disk does.
fn soon(what: &str, ask: impl FnOnce() -> std::io::Result<()>) {
    let asked = Instant::now();
    ask().unwrap_or_else(|error| panic!("{what}: {error}"));
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(1), "{what}: after {took:?}");
}

/// What consumers and senders need of a broker that serves from memory.
fn new_group_and_old_topic(broker: &BrokerProcess, group: &str, number: u64) {
    let mut client = broker.client();
    soon("a heartbeat", || {
        client.heartbeat("c", group, TOPIC).map(drop)
    });
    soon("a send", || {
        let body = payload::body(number, 1000);
        client.send(TOPIC, 0, &body, &[]).map(drop)
    });
    soon("the first pull of a group", || {
        let pulled = client.pull_as(group, TOPIC, 0, 0, 32)?;
        assert!(!pulled.records.is_empty(), "{pulled:?}");
        Ok(())
    });
    soon("a commit", || client.commit(group, TOPIC, 0, 1));
    soon("the members", || {
        let fields = [("consumerGroup", group.to_owned())];
        let answer = client
            .call(code::GET_CONSUMER_LIST, &fields, b"")?
            .success()?;
        assert!(String::from_utf8_lossy(&answer.body).contains("\"c\""));
        Ok(())
    });
    soon("the status", || client.runtime_info().map(drop));
}

/// Asks for a topic that another connection is ordering: "not known" is right until the order has
/// arrived, and then no answer is, before the disk has the topic.
fn asks_until_it_must_wait(broker: &BrokerProcess, topic: &str) -> (Client, i32) {
    for _ in 0..50 {
        let mut asking = broker.client();
        let fields = [("topic", topic.to_owned())];
        let question = Frame::request(code::GET_TOPIC_CONFIG, &fields, b"");
        let question = asking.start(question).expect("start");
        let little = Some(Duration::from_millis(200));
        asking.socket().set_read_timeout(little).expect("timeout");
        match asking.finish(question) {
            Err(_) => return (asking, question),
            Ok(early) => assert_eq!(early.code, answer::TOPIC_NOT_EXIST, "told too early"),
        }
    }
    panic!("the order for {topic} never arrived");
}

#[test]
fn new_groups_are_served_while_the_disk_hangs_and_administrators_wait() {
    let _turn = turn();
    let Some((mut broker, mut disk)) = on_loop_disk("frozen-groups", "ASYNC_FLUSH") else {
        return;
    };
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    client
        .send(TOPIC, 0, &payload::body(0, 1000), &[])
        .expect("send");
    disk.freeze();
    new_group_and_old_topic(&broker, "made_while_frozen", 1);
    // A pull alone makes a group, too.
    soon("the first pull of a group nobody announced", || {
        broker
            .client()
            .pull_as("only_pulls", TOPIC, 0, 0, 32)
            .map(drop)
    });
    let mut administrator = broker.client();
    let fields = [
        ("topic", "ordered".to_owned()),
        ("readQueueNums", "2".to_owned()),
        ("writeQueueNums", "2".to_owned()),
        ("perm", "6".to_owned()),
    ];
    let order = Frame::request(code::UPDATE_AND_CREATE_TOPIC, &fields, b"");
    let ordered = administrator.start(order).expect("start");
    let (mut asking, question) = asks_until_it_must_wait(&broker, "ordered");
    new_group_and_old_topic(&broker, "made_behind_an_order", 2);
    for (waiting, opaque, what) in [
        (&mut administrator, ordered, "the order"),
        (&mut asking, question, "who asks for it"),
    ] {
        let little = Some(Duration::from_millis(200));
        waiting.socket().set_read_timeout(little).expect("timeout");
        let early = waiting.finish(opaque);
        assert!(early.is_err(), "{what} is answered before the disk has it");
        let much = Some(Duration::from_secs(20));
        waiting.socket().set_read_timeout(much).expect("timeout");
    }
    disk.thaw();
    let done = administrator.finish(ordered).expect("an answer");
    done.success().expect("created after the thaw");
    let told = asking.finish(question).expect("an answer");
    told.success().expect("known after the thaw");
    eventually("the groups are saved", Duration::from_secs(10), || {
        let file = broker.data().join("config/subscriptionGroup.json");
        let text = std::fs::read_to_string(file).unwrap_or_default();
        ["made_while_frozen", "only_pulls", "made_behind_an_order"]
            .iter()
            .all(|group| text.contains(&format!("\"{group}\"")))
    });
    broker.kill();
    broker.start();
    let topic = broker.namesrv().route("ordered").expect("route");
    assert!(topic.is_some(), "the ordered topic is there after a kill");
    broker.stop();
}
