//! Transactions across kills: decided ones are delivered once or never, undecided ones asked about.
//!
//! Invariant: what a consumer of the real topic sees is exactly what was committed. `CRASH_ROUNDS`
//! sets the rounds of kills, `TEST_SEED` repeats a run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tests::client::{Client, Sent, answer, code, physical_offset, sent};
use tests::frame::{FLAG_ONEWAY, Frame};
use tests::payload::Random;
use tests::pop::now_ms;
use tests::process::{BrokerProcess, eventually};
use tests::record::{decode_all, encode_properties};
use tests::{env_number, payload, turn};

const TOPIC: &str = "transactions";
const GROUP: &str = "transaction_producers";
const QUEUES: i32 = 4;
const HALF_TOPIC: &str = "RMQ_SYS_TRANS_HALF_TOPIC";
const GIVE_UP_TOPIC: &str = "TRANS_CHECK_MAX_TIME_TOPIC";
const END_TRANSACTION: i32 = 37;
const CHECK_TRANSACTION_STATE: i32 = 39;
const COMMIT: i32 = 8;
const ROLL_BACK: i32 = 12;
const ILLEGAL_OPERATION: i32 = 604;

fn broker(name: &str, settings: &[(&str, &str)]) -> BrokerProcess {
    let mut broker = BrokerProcess::new(name);
    for (key, value) in settings {
        broker.set(key, value);
    }
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    broker
}

fn half_fields(number: u64, more: &[(&str, &str)]) -> Vec<(&'static str, String)> {
    let unique = format!("U{number}");
    let mut properties = vec![
        ("TRAN_MSG", "true"),
        ("PGROUP", GROUP),
        ("UNIQ_KEY", &*unique),
    ];
    properties.extend(more);
    let queue = number as i32 % QUEUES;
    vec![
        ("producerGroup", GROUP.to_owned()),
        ("topic", TOPIC.to_owned()),
        ("defaultTopic", "TBW102".to_owned()),
        ("defaultTopicQueueNums", "4".to_owned()),
        ("queueId", queue.to_string()),
        ("sysFlag", "4".to_owned()),
        ("bornTimestamp", "1700000000000".to_owned()),
        ("flag", "3".to_owned()),
        ("properties", encode_properties(&properties)),
    ]
}

fn begin(client: &mut Client, number: u64, more: &[(&str, &str)]) -> std::io::Result<Sent> {
    let body = payload::body(number, 80);
    let fields = half_fields(number, more);
    let frame = client.call(code::SEND_MESSAGE, &fields, &body)?;
    assert_eq!(frame.text("transactionId")?, format!("U{number}"));
    sent(frame)
}

fn end_fields(half: &Sent, decision: i32, checked: bool) -> Vec<(&'static str, String)> {
    vec![
        ("producerGroup", GROUP.to_owned()),
        ("tranStateTableOffset", half.queue_offset.to_string()),
        (
            "commitLogOffset",
            physical_offset(half.message_id()).to_string(),
        ),
        ("commitOrRollback", decision.to_string()),
        ("fromTransactionCheck", checked.to_string()),
        ("msgId", "U".to_owned()),
    ]
}

fn end(client: &mut Client, half: &Sent, decision: i32) -> std::io::Result<Frame> {
    client.call(END_TRANSACTION, &end_fields(half, decision, false), b"")
}

/// The way real clients end transactions.
fn end_oneway(client: &mut Client, half: &Sent, decision: i32, checked: bool) {
    let mut frame = Frame::request(END_TRANSACTION, &end_fields(half, decision, checked), b"");
    frame.flag |= FLAG_ONEWAY;
    client.start(frame).expect("one-way end");
}

fn register(client: &mut Client, id: &str) {
    let body = serde_json::json!({
        "clientID": id,
        "producerDataSet": [{ "groupName": GROUP }],
        "consumerDataSet": [],
    });
    let beat = client.call(code::HEART_BEAT, &[], body.to_string().as_bytes());
    beat.and_then(Frame::success).expect("heartbeat");
}

/// Numbers of the messages that stand in a topic, how often.
fn arrived(client: &mut Client, topic: &str, queues: i32) -> BTreeMap<u64, usize> {
    let mut found = BTreeMap::new();
    for queue in 0..queues {
        for record in client.read_queue(topic, queue, 0).expect("read") {
            let number = payload::number(&record.body).expect("a body");
            *found.entry(number).or_default() += 1;
        }
    }
    found
}

fn once(numbers: impl IntoIterator<Item = u64>) -> BTreeMap<u64, usize> {
    numbers.into_iter().map(|number| (number, 1)).collect()
}

/// A question of the broker: the number of the message, and where its half message stands.
fn question(client: &mut Client) -> (u64, Sent) {
    let frame = loop {
        let frame = client.next_pushed().expect("a question");
        if frame.code == CHECK_TRANSACTION_STATE {
            break frame;
        }
    };
    let records = decode_all(&frame.body).expect("a record");
    let record = &records[0];
    let number = payload::number(&record.body).expect("a body");
    assert_eq!(record.topic, TOPIC);
    assert_eq!(record.queue_id, number as i32 % QUEUES);
    assert_eq!(
        frame.text("transactionId").expect("id"),
        format!("U{number}")
    );
    assert_eq!(frame.text("msgId").expect("id"), format!("U{number}"));
    assert!(frame.flag & FLAG_ONEWAY != 0);
    let half = Sent {
        message_ids: vec![frame.text("offsetMsgId").expect("id").to_owned()],
        queue_id: 0,
        queue_offset: frame.number("tranStateTableOffset").expect("offset"),
    };
    let offset = frame.number("commitLogOffset").expect("offset");
    assert_eq!(offset, physical_offset(half.message_id()));
    (number, half)
}

#[test]
fn only_a_commit_shows_a_message_and_repeated_ends_change_nothing() {
    let _turn = turn();
    let broker = broker("tx-ends", &[]);
    let mut client = broker.client();
    let halves: Vec<Sent> = (0..3)
        .map(|number| begin(&mut client, number, &[]).expect("half message"))
        .collect();
    assert_eq!(arrived(&mut client, TOPIC, QUEUES), once([]));
    assert_eq!(end(&mut client, &halves[0], COMMIT).expect("end").code, 0);
    assert_eq!(
        end(&mut client, &halves[1], ROLL_BACK).expect("end").code,
        0
    );
    assert_eq!(end(&mut client, &halves[2], 0).expect("end").code, 0);
    assert_eq!(arrived(&mut client, TOPIC, QUEUES), once([0]));
    for (half, decision, wanted) in [
        (0, COMMIT, 0),
        (0, ROLL_BACK, 1),
        (1, ROLL_BACK, 0),
        (1, COMMIT, 1),
    ] {
        let again = end(&mut client, &halves[half], decision).expect("end");
        assert_eq!(again.code, wanted, "{again:?}");
        assert!(
            again
                .remark
                .as_deref()
                .is_some_and(|text| text.contains("already"))
        );
    }
    let record = &client.read_queue(TOPIC, 0, 0).expect("read")[0];
    assert_eq!(record.sys_flag & 12, COMMIT);
    assert_eq!(record.property("UNIQ_KEY"), "U0");
    assert_eq!(record.property("PGROUP"), GROUP);
    let wrong = Sent {
        queue_offset: 77,
        ..halves[2].clone()
    };
    assert_eq!(end(&mut client, &wrong, COMMIT).expect("end").code, 1);
    let mut fields = end_fields(&halves[2], COMMIT, false);
    fields[0].1 = "others".to_owned();
    let frame = client.call(END_TRANSACTION, &fields, b"").expect("end");
    assert_eq!(frame.code, 1, "a transaction of another group");
    let nowhere = ("commitLogOffset", "999999".to_owned());
    let mut fields = end_fields(&halves[2], COMMIT, false);
    fields[2] = nowhere;
    let frame = client.call(END_TRANSACTION, &fields, b"").expect("end");
    assert_eq!(frame.code, 1, "no half message there");
    end_oneway(&mut client, &halves[2], COMMIT, false);
    eventually("the one-way commit", Duration::from_secs(5), || {
        arrived(&mut client, TOPIC, QUEUES) == once([0, 2])
    });
}

#[test]
fn undecided_transactions_are_asked_about_and_given_up_at_last() {
    let _turn = turn();
    let settings = [
        ("transactionTimeOut", "300"),
        ("transactionCheckInterval", "400"),
        ("transactionCheckMax", "3"),
    ];
    let broker = broker("tx-checks", &settings);
    let mut client = broker.client();
    let mut producers = [broker.client(), broker.client()];
    for (index, producer) in producers.iter_mut().enumerate() {
        register(producer, &format!("producer-{index}"));
    }
    let begun = Instant::now();
    for number in 0..4 {
        begin(&mut client, number, &[]).expect("half message");
    }
    let patient = [("CHECK_IMMUNITY_TIME_IN_SECONDS", "1")];
    let patient = begin(&mut client, 4, &patient).expect("half message");
    // Two producers are asked in turn; the first commits one and rolls one back.
    let mut asked: BTreeMap<u64, u32> = BTreeMap::new();
    while asked.values().sum::<u32>() < 4 {
        for producer in &mut producers {
            let (number, half) = question(producer);
            *asked.entry(number).or_default() += 1;
            match number {
                0 => end_oneway(producer, &half, COMMIT, true),
                1 => end_oneway(producer, &half, ROLL_BACK, true),
                _ => end_oneway(producer, &half, 0, true),
            }
        }
    }
    assert_eq!(asked.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(begun.elapsed() >= Duration::from_millis(300));
    std::thread::sleep(Duration::from_millis(1_100).saturating_sub(begun.elapsed()));
    let late = end(&mut client, &patient, COMMIT).expect("end");
    assert_eq!(
        late.code, ILLEGAL_OPERATION,
        "too late but for an answer to a check"
    );
    eventually("giving up", Duration::from_secs(10), || {
        let shards = 2;
        arrived(&mut client, GIVE_UP_TOPIC, shards).len() == 3
    });
    assert_eq!(arrived(&mut client, TOPIC, QUEUES), once([0]));
    let gone = client.call(END_TRANSACTION, &end_fields(&patient, COMMIT, true), b"");
    let gone = gone.expect("end");
    assert_eq!(gone.code, 1);
    assert!(gone.remark.unwrap_or_default().contains(GIVE_UP_TOPIC));
}

#[test]
fn a_batch_and_a_half_finished_half_message_are_refused() {
    let _turn = turn();
    let mut broker = broker("tx-refused", &[]);
    let mut client = broker.client();
    let properties: &[(&str, &str)] = &[("TRAN_MSG", "true")];
    let batch = client.send_batch(TOPIC, 0, &[(b"x", properties)], &[]);
    assert!(batch.is_err(), "{batch:?}");
    broker.stop();
    broker.set("rejectTransactionMessage", "true").start();
    let mut client = broker.client();
    let refused = begin(&mut client, 0, &[]);
    assert!(refused.is_err(), "{refused:?}");
    client
        .send(TOPIC, 0, b"plain", &[])
        .expect("a plain message");
}

#[test]
fn a_message_sent_back_for_a_later_try_is_no_half_message() {
    let _turn = turn();
    let broker = broker("tx-retry", &[]);
    let mut client = broker.client();
    let mut fields = half_fields(0, &[("DELAY", "1")]);
    fields.push(("reconsumeTimes", "1".to_owned()));
    let body = payload::body(0, 80);
    let frame = client.call(code::SEND_MESSAGE, &fields, &body);
    frame.and_then(Frame::success).expect("send");
    eventually("the delayed message", Duration::from_secs(5), || {
        arrived(&mut client, TOPIC, QUEUES) == once([0])
    });
}

/// What is relative counts from the commit, as with Apache's broker.
#[test]
fn committed_messages_keep_their_delays_and_times_across_kills() {
    let _turn = turn();
    let mut broker = broker("tx-timed", &[]);
    let mut client = broker.client();
    let in_five = (now_ms() + 5_000).to_string();
    let wishes = [
        ("DELAY", "1"),
        ("TIMER_DELAY_SEC", "2"),
        ("TIMER_DELIVER_MS", &*in_five),
        ("TIMER_DELIVER_MS", "1000"),
    ];
    let begun = wishes.iter().zip(0..);
    let halves: Vec<Sent> = begun
        .map(|(wish, number)| begin(&mut client, number, &[*wish]).expect("half message"))
        .collect();
    for wish in [("TIMER_DELAY_SEC", "999999"), ("TIMER_DELAY_MS", "soon")] {
        assert!(begin(&mut client, 9, &[wish]).is_err(), "{wish:?}");
    }
    let deletes = [("TIMER_DELAY_SEC", "1"), ("TIMER_DEL_UNIQKEY", "t+k")];
    assert!(begin(&mut client, 9, &deletes).is_err());
    std::thread::sleep(Duration::from_millis(1_200));
    let committed = now_ms();
    for half in &halves {
        assert_eq!(end(&mut client, half, COMMIT).expect("end").code, 0);
    }
    assert_eq!(arrived(&mut client, TOPIC, QUEUES), once([3]));
    broker.kill();
    broker.start();
    let mut client = broker.client();
    let again = end(&mut client, &halves[1], ROLL_BACK).expect("end");
    assert_eq!(again.code, 1, "{again:?}");
    eventually("all four", Duration::from_secs(15), || {
        arrived(&mut client, TOPIC, QUEUES) == once(0..4)
    });
    let earliest = [
        committed + 1_000,
        committed + 2_000,
        in_five.parse().expect("a number"),
        committed,
    ];
    for (queue, earliest) in earliest.into_iter().enumerate() {
        let record = &client.read_queue(TOPIC, queue as i32, 0).expect("read")[0];
        let early = earliest - record.store_timestamp_ms;
        assert!(early <= 0, "{queue}: early by {early} ms");
        assert_eq!(record.sys_flag & 12, COMMIT);
        assert_eq!(record.property("UNIQ_KEY"), format!("U{queue}"));
    }
    broker.kill();
    broker.start();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(arrived(&mut broker.client(), TOPIC, QUEUES), once(0..4));
}

/// What a producer knows of a transaction.
struct Known {
    half: Sent,
    /// The decision it sent, and whether that was answered.
    decision: Option<(i32, bool)>,
}

/// Begins and ends transactions until the broker dies.
fn work(client: &mut Client, known: &mut BTreeMap<u64, Known>, next: &mut u64, seed: &mut Random) {
    loop {
        let number = *next;
        *next += 1;
        let Ok(half) = begin(client, number, &[]) else {
            return;
        };
        let decision = [Some(COMMIT), Some(ROLL_BACK), None][number as usize % 3];
        known.insert(
            number,
            Known {
                half: half.clone(),
                decision: decision.map(|decision| (decision, false)),
            },
        );
        let Some(decision) = decision else { continue };
        let Ok(frame) = end(client, &half, decision) else {
            return;
        };
        assert_eq!(frame.code, answer::SUCCESS, "{frame:?}");
        if let Some(known) = known.get_mut(&number) {
            known.decision = Some((decision, true));
        }
        if seed.below(4) == 0 {
            // The same again: still one message.
            if end(client, &half, decision).is_err() {
                return;
            }
        }
    }
}

fn rounds_of_kills(name: &str, flush: &str) {
    let _turn = turn();
    let settings = [
        ("flushDiskType", flush),
        ("transactionTimeOut", "3600000"),
        ("transactionCheckInterval", "1000"),
    ];
    let mut broker = broker(name, &settings);
    let mut random = Random::from_env();
    let (mut known, mut next) = (BTreeMap::new(), 0);
    for _ in 0..env_number("CRASH_ROUNDS", 6) {
        let pause = Duration::from_millis(100 + random.below(500));
        std::thread::scope(|scope| {
            let mut client = broker.client();
            let (known, next, random) = (&mut known, &mut next, &mut random);
            let worker = scope.spawn(move || work(&mut client, known, next, random));
            std::thread::sleep(pause);
            broker.signal("KILL");
            worker.join().expect("worker");
        });
        broker.kill();
        broker.start();
        let found = arrived(&mut broker.client(), TOPIC, QUEUES);
        for (number, known) in &known {
            let times = found.get(number).copied().unwrap_or(0);
            match known.decision {
                Some((COMMIT, true)) => assert_eq!(times, 1, "{number} was committed"),
                Some((COMMIT, false)) => assert!(times <= 1, "{number}"),
                _ => assert_eq!(times, 0, "{number} was not committed"),
            }
        }
    }
    settle_the_rest(&mut broker, &known);
}

/// Every transaction whose end was not answered is asked about or ended; none else is.
fn settle_the_rest(broker: &mut BrokerProcess, known: &BTreeMap<u64, Known>) {
    broker.stop();
    broker.set("transactionTimeOut", "100").start();
    let mut producer = broker.client();
    register(&mut producer, "producer");
    let before = arrived(&mut broker.client(), TOPIC, QUEUES);
    let undecided: Vec<u64> = known
        .iter()
        .filter(|(_, known)| known.decision.is_none())
        .map(|(number, _)| *number)
        .collect();
    let mut client = broker.client();
    let mut left: Vec<u64> = undecided.clone();
    let mut committed = Vec::new();
    while !left.is_empty() {
        let (number, half) = question(&mut producer);
        if let Some(known) = known.get(&number) {
            let open = known.decision.is_none_or(|(_, answered)| !answered);
            assert!(open, "asked about {number}, which is decided");
            let (asked, begun) = (half.message_id(), known.half.message_id());
            assert_eq!(physical_offset(asked), physical_offset(begun));
        }
        end_oneway(&mut producer, &half, COMMIT, true);
        if !committed.contains(&number) && !before.contains_key(&number) {
            committed.push(number);
        }
        left.retain(|other| *other != number);
    }
    eventually("the late commits", Duration::from_secs(10), || {
        let found = arrived(&mut client, TOPIC, QUEUES);
        committed.iter().all(|number| found.get(number) == Some(&1))
    });
    let found = arrived(&mut client, TOPIC, QUEUES);
    assert!(found.values().all(|times| *times == 1), "each once");
    println!(
        "{} transactions, {} undecided, {} delivered",
        known.len(),
        undecided.len(),
        found.len()
    );
}

#[test]
fn kills_while_transactions_are_open_asynchronous_flush() {
    rounds_of_kills("tx-crash-async", "ASYNC_FLUSH");
}

#[test]
fn kills_while_transactions_are_open_synchronous_flush() {
    rounds_of_kills("tx-crash-sync", "SYNC_FLUSH");
}

#[test]
fn half_messages_can_be_looked_at_under_their_own_topic() {
    let _turn = turn();
    let broker = broker("tx-topic", &[]);
    let mut client = broker.client();
    for number in 0..6 {
        begin(&mut client, number, &[]).expect("half message");
    }
    let halves = arrived(&mut client, HALF_TOPIC, 2);
    assert_eq!(halves, once(0..6));
}
