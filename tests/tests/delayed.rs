//! Delay levels across kills and damage (H12).
//!
//! Invariant: a delayed message arrives once, not before its time and at most a second after it, or
//! after the start that follows a kill.

use std::time::{Duration, Instant};

use tests::client::Client;
use tests::process::{BrokerProcess, eventually};
use tests::{payload, turn};

const TOPIC: &str = "delayed";
const LEVEL_ONE: Duration = Duration::from_secs(1);
const LATE: Duration = Duration::from_secs(1);

fn arrived(client: &mut Client) -> Vec<u64> {
    let records = client.read_queue(TOPIC, 0, 0).expect("read");
    records
        .iter()
        .map(|record| payload::number(&record.body).expect("a body"))
        .collect()
}

fn send_delayed(client: &mut Client, number: u64, level: &str) -> Instant {
    let asked = Instant::now();
    client
        .send(TOPIC, 0, &payload::body(number, 60), &[("DELAY", level)])
        .expect("send");
    asked
}

#[test]
fn a_delayed_message_comes_in_its_second() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("delayed");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..5 {
        let asked = send_delayed(&mut client, number, "1");
        while arrived(&mut client).len() as u64 <= number {
            assert!(
                asked.elapsed() < LEVEL_ONE + LATE,
                "late after {:?}",
                asked.elapsed()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let waited = asked.elapsed();
        assert!(
            waited >= LEVEL_ONE - Duration::from_millis(5),
            "early after {waited:?}"
        );
    }
    let record = &client.read_queue(TOPIC, 0, 0).expect("read")[0];
    assert_eq!((record.topic.as_str(), record.queue_id), (TOPIC, 0));
}

#[test]
fn delayed_messages_pending_at_a_kill_come_once_after_it() {
    let _turn = turn();
    for flush in ["ASYNC_FLUSH", "SYNC_FLUSH"] {
        let mut broker = BrokerProcess::new(&format!("delayed-{flush}"));
        broker.set("flushDiskType", flush).start();
        let mut client = broker.client();
        client.create_topic(TOPIC, 1).expect("create topic");
        for number in 0..300 {
            // Levels 1 and 2: one second and five.
            send_delayed(&mut client, number, if number % 2 == 0 { "1" } else { "2" });
        }
        std::thread::sleep(Duration::from_millis(900));
        for _ in 0..3 {
            broker.kill();
            broker.start();
            std::thread::sleep(Duration::from_millis(300));
        }
        let mut client = broker.client();
        let restarted = Instant::now();
        while arrived(&mut client).len() < 300 {
            let count = arrived(&mut client).len();
            assert!(
                restarted.elapsed() < Duration::from_secs(8),
                "only {count} of 300 under {flush}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(500));
        let mut numbers = arrived(&mut client);
        let total = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers, (0..300).collect::<Vec<_>>());
        assert_eq!(total, 300, "{} came twice under {flush}", total - 300);
    }
}

/// Four levels, the last of which is four seconds.
fn with_short_levels(name: &str) -> BrokerProcess {
    let mut broker = BrokerProcess::new(name);
    broker.set("messageDelayLevel", "1s 2s 3s 4s 8s");
    broker.set("flushDiskType", "ASYNC_FLUSH");
    broker.set("mappedFileSizeCommitLog", &(1 << 20).to_string());
    broker.arguments(&["--shards", "1"]);
    broker
}

/// Sends one more message of levels 1 and 4 and requires each in its second.
fn new_ones_come_in_time(client: &mut Client, first: u64) {
    let asked = [(first, "1", 1), (first + 1, "4", 4)]
        .map(|(number, level, due_s)| (number, send_delayed(client, number, level), due_s));
    for (number, asked, due_s) in asked {
        let due = Duration::from_secs(due_s);
        while !arrived(client).contains(&number) {
            let waited = asked.elapsed();
            assert!(waited < due + LATE, "{number} is late after {waited:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let waited = asked.elapsed();
        assert!(
            waited >= due - Duration::from_millis(5),
            "early after {waited:?}"
        );
    }
}

/// Zeroes the last bytes of the log, which may stand in several segments.
fn zero_the_end_of_the_log(broker: &BrokerProcess, bytes: usize) {
    let mut left = bytes;
    for segment in broker.segments().iter().rev() {
        let mut content = std::fs::read(segment).expect("segment");
        let end = content
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |at| at + 1);
        let from = end.saturating_sub(left);
        content[from..end].fill(0);
        std::fs::write(segment, content).expect("segment");
        left -= end - from;
        if left == 0 {
            return;
        }
    }
    panic!("the log is shorter than {bytes} bytes");
}

#[test]
fn delayed_messages_go_on_after_the_end_of_the_log_is_lost() {
    let _turn = turn();
    let mut broker = with_short_levels("delayed-cut");
    // One segment, so that what is lost is not what a run was written of.
    broker.set("mappedFileSizeCommitLog", &(64 << 20).to_string());
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    // Steady traffic of both levels, for longer than the longer one waits.
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < Duration::from_secs(6) {
        let body = payload::body(count, 4_000);
        let level = if count % 2 == 0 { "1" } else { "4" };
        client
            .send(TOPIC, 0, &body, &[("DELAY", level)])
            .expect("send");
        count += 1;
        std::thread::sleep(Duration::from_millis(4));
    }
    let before = arrived(&mut client);
    assert!(
        before.len() > 100,
        "only {} of {count} arrived",
        before.len()
    );
    broker.kill();
    // As after a power cut: neither the last writes nor the write buffer.
    let _ = std::fs::remove_dir_all(broker.buffer_directory());
    zero_the_end_of_the_log(&broker, 1 << 20);
    broker.start();
    let mut client = broker.client();
    new_ones_come_in_time(&mut client, 1_000_000);
    let mut times = std::collections::BTreeMap::new();
    for number in arrived(&mut client) {
        *times.entry(number).or_insert(0) += 1;
    }
    let most = times.values().max().copied().unwrap_or(0);
    assert!(most <= 1, "a message stands there {most} times");
    assert!(times.len() > 50, "{} messages are left", times.len());
    broker.stop();
}

#[test]
fn delayed_messages_whose_neighbours_are_gone_come_all_the_same() {
    let _turn = turn();
    let mut broker = with_short_levels("delayed-oldest");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..600 {
        let body = payload::body(number, 8_000);
        client
            .send(TOPIC, 0, &body, &[("DELAY", "5")])
            .expect("send");
    }
    assert_eq!(arrived(&mut client).len(), 0, "sent within the delay");
    broker.stop();
    // The oldest segments go, as retention would take them, with messages not yet delivered.
    for segment in &broker.segments()[..2] {
        std::fs::remove_file(segment).expect("remove");
    }
    broker.start();
    let mut client = broker.client();
    eventually("what is left", Duration::from_secs(15), || {
        arrived(&mut client).last() == Some(&599)
    });
    let numbers = arrived(&mut client);
    let first = numbers[0];
    assert!((200..400).contains(&first), "the first one left is {first}");
    assert_eq!(numbers, (first..600).collect::<Vec<_>>(), "each once");
    new_ones_come_in_time(&mut client, 1_000_000);
    broker.stop();
}
