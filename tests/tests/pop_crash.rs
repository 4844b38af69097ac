//! Kill -9 under POP load, again and again, with an audit of every delivery.
//!
//! Invariant: what was acknowledged with an answer never comes again; what was not comes again, but
//! not before its invisible time is over; in the end everything that was sent is acknowledged.
//! `CRASH_ROUNDS` sets the rounds for each set-up, `TEST_SEED` repeats a run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::client::Client;
use tests::payload::{self, Random};
use tests::pop::Pop;
use tests::process::BrokerProcess;
use tests::{env_number, turn};

const TOPIC: &str = "pop_crash";
const GROUP: &str = "pop_crash_group";
const QUEUES: i32 = 4;
const INVISIBLE_MS: i64 = 1_500;

#[derive(Default)]
struct Ledger {
    /// Numbers whose send was answered.
    sent: BTreeSet<u64>,
    /// Numbers whose acknowledgement was answered.
    acked: BTreeSet<u64>,
    /// Numbers whose acknowledgement was sent, answered or not.
    tried: BTreeSet<u64>,
    /// Until when the last holder has each number.
    held_until: BTreeMap<u64, i64>,
    deliveries: u64,
    again: u64,
}

impl Ledger {
    fn delivered(&mut self, number: u64, receipt: &str) {
        assert!(
            !self.acked.contains(&number),
            "{number} came again after its acknowledgement"
        );
        let words: Vec<i64> = receipt
            .split(' ')
            .skip(1)
            .take(2)
            .map(|word| word.parse().expect("a number in a receipt"))
            .collect();
        let (pop_ms, until_ms) = (words[0], words[0] + words[1]);
        if let Some(before) = self.held_until.insert(number, until_ms) {
            assert!(
                pop_ms >= before,
                "{number} has two holders: {pop_ms} of {before}"
            );
            self.again += 1;
        }
        self.deliveries += 1;
    }
}

/// Pops and acknowledges a part; ends with the connection.
fn consume(mut client: Client, ledger: &Mutex<Ledger>, seed: u64, part: u64, stop: &AtomicBool) {
    let mut random = Random::new(seed);
    while !stop.load(Ordering::Relaxed) {
        let most = 1 + random.below(32) as i32;
        let asked = Pop::of(GROUP, TOPIC)
            .most(most)
            .invisible(INVISIBLE_MS)
            .waiting(500);
        let Ok(answer) = client.pop(&asked) else {
            return;
        };
        for message in answer.messages {
            let number = payload::number(&message.record.body).expect("a body of this test");
            ledger
                .lock()
                .expect("ledger")
                .delivered(number, &message.receipt);
            if random.below(100) >= part {
                continue;
            }
            ledger.lock().expect("ledger").tried.insert(number);
            match client.ack(&message) {
                Ok(0) => {
                    ledger.lock().expect("ledger").acked.insert(number);
                }
                // Too late, on a busy machine: it comes again.
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}

fn produce(mut client: Client, ledger: &Mutex<Ledger>, next: &AtomicU64, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let body = payload::body(number, 200);
        match client.send(TOPIC, (number % QUEUES as u64) as i32, &body, &[]) {
            Ok(_) => {
                ledger.lock().expect("ledger").sent.insert(number);
            }
            Err(_) => return,
        }
    }
}

fn run(broker: &mut BrokerProcess, ledger: &Mutex<Ledger>, next: &AtomicU64, random: &mut Random) {
    let pause = Duration::from_millis(500 + random.below(1_500));
    let stop = AtomicBool::new(false);
    let seeds: Vec<u64> = (0..3).map(|_| random.word()).collect();
    thread::scope(|scope| {
        for seed in seeds {
            let client = broker.client();
            let stop = &stop;
            scope.spawn(move || consume(client, ledger, seed, 50, stop));
        }
        let client = broker.client();
        let stop_sending = &stop;
        scope.spawn(move || produce(client, ledger, next, stop_sending));
        thread::sleep(pause);
        broker.signal("KILL");
        stop.store(true, Ordering::Relaxed);
    });
    broker.kill();
}

fn begin(broker: &mut BrokerProcess) {
    broker.start();
    let created = broker.client().create_topic(TOPIC, QUEUES);
    created.expect("create topic");
    let group = format!("{{\"groupName\":\"{GROUP}\",\"retryMaxTimes\":1000}}");
    let frame = broker.client().call(200, &[], group.as_bytes());
    assert_eq!(frame.expect("group").code, 0);
}

/// Where the group stands in each queue.
fn offsets(broker: &BrokerProcess) -> Vec<i64> {
    let mut client = broker.client();
    let offset = |queue| client.query_offset(GROUP, TOPIC, queue).expect("offset");
    (0..QUEUES)
        .map(offset)
        .map(|offset| offset.unwrap_or(0))
        .collect()
}

/// Acknowledges everything that still comes, and checks that nothing is missing.
fn finish(broker: &BrokerProcess, ledger: Mutex<Ledger>, what: &str) -> Ledger {
    let stop = AtomicBool::new(false);
    let until = Instant::now() + Duration::from_secs(60);
    // An acknowledgement that a kill cut off may have been taken or not.
    let missing = |ledger: &Ledger| -> Vec<u64> {
        let open = ledger.sent.difference(&ledger.acked);
        open.filter(|number| !ledger.tried.contains(number))
            .copied()
            .collect()
    };
    thread::scope(|scope| {
        for seed in 0..3 {
            let client = broker.client();
            let (ledger, stop) = (&ledger, &stop);
            scope.spawn(move || consume(client, ledger, seed, 100, stop));
        }
        loop {
            thread::sleep(Duration::from_millis(300));
            let none = missing(&ledger.lock().expect("ledger")).is_empty();
            if none || Instant::now() > until {
                stop.store(true, Ordering::Relaxed);
                break;
            }
        }
    });
    let ledger = ledger.into_inner().expect("ledger");
    let missing = missing(&ledger);
    assert!(
        missing.is_empty(),
        "{} messages never came: {missing:?}",
        missing.len()
    );
    assert!(ledger.again > 0, "nothing came a second time");
    println!(
        "{what}: {} sent, {} acknowledged, {} deliveries, {} of them again",
        ledger.sent.len(),
        ledger.acked.len(),
        ledger.deliveries,
        ledger.again
    );
    ledger
}

fn rounds_of_kills(name: &str, flush: &str) {
    let _turn = turn();
    let rounds = env_number("CRASH_ROUNDS", 5);
    let mut random = Random::from_env();
    let mut broker = BrokerProcess::new(name);
    broker.set("flushDiskType", flush);
    broker.set("pinion.shards", "2");
    let ledger = Mutex::new(Ledger::default());
    let next = AtomicU64::new(0);
    begin(&mut broker);
    for _ in 0..rounds {
        let before = offsets(&broker);
        run(&mut broker, &ledger, &next, &mut random);
        broker.start();
        for (queue, (old, new)) in before.iter().zip(offsets(&broker)).enumerate() {
            assert!(
                new >= *old,
                "queue {queue}: the group fell from {old} to {new}"
            );
        }
    }
    let ledger = finish(&broker, ledger, &format!("{name}, {rounds} kills"));
    broker.stop();
    broker.start();
    let asked = Pop::of(GROUP, TOPIC).waiting(2_000);
    for late in broker.client().pop(&asked).expect("pop").messages {
        let number = payload::number(&late.record.body).expect("a body of this test");
        assert!(
            !ledger.acked.contains(&number),
            "{number} comes again after a stop"
        );
    }
    broker.stop();
}

/// A third of the consumers' acknowledgements are left out at random; nothing vanishes (H15).
#[test]
fn whatever_part_is_acknowledged_the_rest_comes_again() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("pop-partial");
    broker.set("pinion.shards", "2");
    begin(&mut broker);
    let (ledger, next) = (Mutex::new(Ledger::default()), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for seed in 1..4 {
            let client = broker.client();
            let (ledger, stop) = (&ledger, &stop);
            scope.spawn(move || consume(client, ledger, seed, 66, stop));
        }
        let client = broker.client();
        let (ledger, next, stop) = (&ledger, &next, &stop);
        scope.spawn(move || produce(client, ledger, next, stop));
        thread::sleep(Duration::from_secs(env_number("POP_SECONDS", 6)));
        stop.store(true, Ordering::Relaxed);
    });
    finish(&broker, ledger, "pop-partial");
    broker.stop();
}

#[test]
fn asynchronous_flush_with_a_surviving_buffer() {
    rounds_of_kills("pop-crash-async", "ASYNC_FLUSH");
}

#[test]
fn synchronous_flush() {
    rounds_of_kills("pop-crash-sync", "SYNC_FLUSH");
}
