//! Last segments of any size, and kills around the roll from one segment to the next (H05).
//!
//! Invariant: an odd end of the log never keeps the broker from starting and never costs a message;
//! an odd middle stops it with the file's name.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tests::audit::{Ledger, Load};
use tests::payload::{self, Random};
use tests::process::BrokerProcess;
use tests::{env_number, turn};

const TOPIC: &str = "segment_tails";
const SEGMENT_BYTES: u64 = 1 << 20;

fn broker(name: &str) -> BrokerProcess {
    let mut broker = BrokerProcess::new(name);
    broker.set("mappedFileSizeCommitLog", &SEGMENT_BYTES.to_string());
    broker.arguments(&["--shards", "1"]);
    broker
}

/// The name of the segment that would follow this one.
fn following(segment: &Path) -> PathBuf {
    let name = segment
        .file_name()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    let start: u64 = name.parse().expect("twenty digits");
    segment.with_file_name(format!("{:020}", start + SEGMENT_BYTES))
}

/// A stopped store of several segments with 600 messages in it.
fn filled(name: &str) -> BrokerProcess {
    let mut broker = broker(name);
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..600 {
        client
            .send(TOPIC, 0, &payload::body(number, 8000), &[])
            .expect("send");
    }
    broker.stop();
    assert!(broker.segments().len() >= 4, "{:?}", broker.segments());
    broker
}

fn check_and_go_on(broker: &mut BrokerProcess, count: u64, what: &str) {
    let mut client = broker.client();
    let records = client.read_queue(TOPIC, 0, 0).expect("read");
    let numbers: Vec<_> = records
        .iter()
        .map(|record| payload::number(&record.body))
        .collect();
    assert_eq!(numbers, (0..count).map(Some).collect::<Vec<_>>(), "{what}");
    let sent = client
        .send(TOPIC, 0, &payload::body(count, 8000), &[])
        .expect("send");
    assert_eq!(sent.queue_offset as u64, count, "{what}");
}

#[test]
fn a_last_segment_of_any_size_is_repaired() {
    let _turn = turn();
    let mut broker = filled("tails");
    let mut count = 600;
    for size in [0, 1, 4096, SEGMENT_BYTES - 1] {
        let last = broker.segments().pop().expect("a segment");
        let made = following(&last);
        fs::write(&made, vec![0; size as usize]).expect("hand-made segment");
        let what = format!("a last segment of {size} bytes");
        broker.start();
        check_and_go_on(&mut broker, count, &what);
        count += 1;
        let name = made
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let output = broker.output();
        let said = output
            .lines()
            .any(|line| line.contains("repaired") && line.contains(&name));
        assert!(said, "{what}: no word of a repair in:\n{output}");
        broker.stop();
        broker.start();
        check_and_go_on(&mut broker, count, &what);
        count += 1;
        broker.stop();
    }
}

#[test]
fn a_last_segment_full_of_other_bytes_adds_nothing() {
    let _turn = turn();
    let mut broker = filled("tail-noise");
    let last = broker.segments().pop().expect("a segment");
    let mut random = Random::from_env();
    let noise: Vec<u8> = (0..SEGMENT_BYTES).map(|_| random.word() as u8).collect();
    fs::write(following(&last), noise).expect("hand-made segment");
    broker.start();
    check_and_go_on(&mut broker, 600, "noise");
    broker.kill();
    broker.start();
    check_and_go_on(&mut broker, 601, "noise and a kill");
    broker.stop();
}

#[test]
fn an_odd_segment_in_the_middle_stops_the_start_by_name() {
    let _turn = turn();
    for size in [0, 1, 4096, SEGMENT_BYTES - 1] {
        let mut broker = filled("middle");
        let middle = broker.segments()[1].clone();
        let file = fs::OpenOptions::new()
            .write(true)
            .open(&middle)
            .expect("segment");
        file.set_len(size).expect("cut");
        broker.launch();
        let status = broker.wait_end(Duration::from_secs(10));
        let name = middle
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        assert_ne!(status.code(), Some(0), "{size} bytes");
        let output = broker.output();
        for word in [name.as_str(), "physical offset", "at stake"] {
            assert!(output.contains(word), "{size}: {word} is not in:\n{output}");
        }
    }
}

#[test]
fn kills_around_the_roll_lose_nothing() {
    let _turn = turn();
    let mut random = Random::from_env();
    let mut broker = broker("rolls");
    let mut load = Load::new(TOPIC);
    load.body_bytes_max = 16_384;
    let mut ledger = Ledger::default();
    // Fifty as it was reported.
    for round in 0..env_number("ROLL_ROUNDS", 8) {
        broker.start();
        let mut client = broker.client();
        if round == 0 {
            client
                .create_topic(TOPIC, load.queues)
                .expect("create topic");
        }
        ledger.audit(&mut client, TOPIC, load.queues, false);
        let pause = Duration::from_millis(20 + random.below(200));
        ledger.load_and_kill(&mut broker, &load, pause);
    }
    broker.start();
    ledger.audit(&mut broker.client(), TOPIC, load.queues, true);
    assert!(
        broker.segments().len() > 2,
        "no roll was crossed: {:?}",
        broker.segments()
    );
}
