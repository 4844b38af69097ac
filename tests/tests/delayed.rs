//! Delay levels across kills and damage (H12).
//!
//! Invariant: a delayed message arrives once, not before its time and at most a second after it, or
//! after the start that follows a kill.

use std::time::{Duration, Instant};

use tests::client::Client;
use tests::process::{BrokerProcess, eventually, files_below};
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

#[test]
fn progress_that_lies_outside_the_log_is_moved_back_into_it() {
    let _turn = turn();
    for progress in ["9999999", "-5"] {
        let mut broker = BrokerProcess::new("delayed-progress");
        broker.start();
        let mut client = broker.client();
        client.create_topic(TOPIC, 1).expect("create topic");
        send_delayed(&mut client, 0, "1");
        eventually("the first message", LEVEL_ONE + LATE, || {
            arrived(&mut client).len() == 1
        });
        broker.stop();
        let named = |path: &std::path::PathBuf| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().contains("delayOffset"))
        };
        for file in files_below(&broker.data())
            .iter()
            .filter(|path| named(path))
        {
            let levels: Vec<_> = (1..=18)
                .map(|level| format!("{level}:{progress}"))
                .collect();
            let text = format!("{{\"offsetTable\":{{{}}}}}", levels.join(","));
            std::fs::write(file, text).expect("write");
        }
        broker.start();
        let mut client = broker.client();
        let asked = send_delayed(&mut client, 1, "1");
        eventually("the new message", LEVEL_ONE + LATE, || {
            arrived(&mut client).contains(&1)
        });
        assert!(asked.elapsed() >= LEVEL_ONE - Duration::from_millis(5));
        let old = arrived(&mut client)
            .iter()
            .filter(|number| **number == 0)
            .count();
        assert!(
            (1..=2).contains(&old),
            "the first message stands there {old} times"
        );
        broker.stop();
    }
}
