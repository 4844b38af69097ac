//! The message that arrives around the moment its reader begins to wait (H10).
//!
//! Invariant: whether the message is stored before, while or after the pull is parked, the answer
//! follows within a bound that is far below any polling interval.

use std::thread;
use std::time::{Duration, Instant};

use tests::client::{answer, pulled};
use tests::payload::{self, Random};
use tests::process::BrokerProcess;
use tests::{env_number, turn};

const TOPIC: &str = "long_poll";
const LATE: Duration = Duration::from_millis(200);
const PARK: Duration = Duration::from_secs(15);

#[test]
fn no_message_is_late_however_close_to_the_parking_it_comes() {
    let _turn = turn();
    let rounds = env_number("POLL_ROUNDS", 2000);
    let mut random = Random::from_env();
    let mut broker = BrokerProcess::new("long-poll");
    broker.start();
    let mut producer = broker.client();
    producer.create_topic(TOPIC, 4).expect("create topic");
    let mut reader = broker.client();
    let mut next = [0_i64; 4];
    let mut worst = Duration::ZERO;
    for round in 0..rounds {
        let queue = (round % 4) as usize;
        let offset = next[queue];
        let body = payload::body(round, 100);
        let pause = Duration::from_micros(random.below(3000));
        let send_first = random.below(2) == 0;
        let (taken, stored) = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                if !send_first {
                    thread::sleep(pause);
                }
                producer
                    .send(TOPIC, queue as i32, &body, &[])
                    .expect("send");
                Instant::now()
            });
            if send_first {
                // From well before the message is stored to just after.
                thread::sleep(pause / 20);
            }
            let opaque = reader
                .start_pull(TOPIC, queue as i32, offset, 32, PARK)
                .expect("pull");
            let taken = pulled(reader.finish(opaque).expect("an answer")).expect("pull answer");
            ((taken, Instant::now()), sending.join().expect("producer"))
        });
        let (taken, arrived) = taken;
        assert_eq!(taken.code, answer::SUCCESS, "round {round}: {taken:?}");
        assert_eq!(payload::number(&taken.records[0].body), Some(round));
        next[queue] = taken.next_offset;
        worst = worst.max(arrived.saturating_duration_since(stored));
    }
    println!("long poll: worst delay after the acknowledgement {worst:?} in {rounds} rounds");
    assert!(worst < LATE, "a message came {worst:?} late");
}

#[test]
fn a_parked_pull_ends_when_its_time_is_over() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("long-poll-end");
    broker.start();
    let mut reader = broker.client();
    reader.create_topic(TOPIC, 1).expect("create topic");
    let wait = Duration::from_millis(1500);
    let asked = Instant::now();
    let opaque = reader.start_pull(TOPIC, 0, 0, 32, wait).expect("pull");
    let other = reader
        .max_offset(TOPIC, 0)
        .expect("other requests pass the parked one");
    assert_eq!(other, 0);
    assert!(
        asked.elapsed() < Duration::from_millis(500),
        "{:?}",
        asked.elapsed()
    );
    let answer_late = pulled(reader.finish(opaque).expect("an answer")).expect("pull answer");
    let waited = asked.elapsed();
    assert_eq!(answer_late.code, answer::PULL_NOT_FOUND);
    assert!(
        waited >= wait - Duration::from_millis(100),
        "answered after {waited:?}"
    );
    assert!(
        waited < wait + Duration::from_secs(6),
        "answered after {waited:?}"
    );
}

#[test]
fn a_thousand_parked_pulls_wake_for_their_own_queue_only() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("long-poll-many");
    broker.start();
    let mut producer = broker.client();
    producer.create_topic(TOPIC, 4).expect("create topic");
    let mut readers: Vec<_> = (0..50).map(|_| broker.client()).collect();
    let mut parked = Vec::new();
    for reader in &mut readers {
        let start = |queue| reader.start_pull(TOPIC, queue, 0, 1, PARK).expect("pull");
        parked.push((0..20).map(|at| at % 4).map(start).collect::<Vec<_>>());
    }
    thread::sleep(Duration::from_millis(300));
    producer
        .send(TOPIC, 2, &payload::body(7, 100), &[])
        .expect("send");
    let stored = Instant::now();
    for (reader, parked) in readers.iter_mut().zip(&parked) {
        for opaque in parked.iter().skip(2).step_by(4) {
            let taken = pulled(reader.finish(*opaque).expect("an answer")).expect("pull answer");
            assert_eq!(payload::number(&taken.records[0].body), Some(7));
        }
    }
    assert!(
        stored.elapsed() < Duration::from_secs(1),
        "all woken after {:?}",
        stored.elapsed()
    );
    broker.stop();
}
