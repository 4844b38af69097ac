//! Kill -9 under load, again and again, with an audit of every acknowledgement.
//!
//! Invariant: whatever was acknowledged or read before a kill stands at its place after it, with
//! the same body; offsets are dense and no place is used twice. `CRASH_ROUNDS` sets the rounds for
//! each of the four set-ups, `TEST_SEED` repeats a run.

use std::time::Duration;

use tests::audit::{Ledger, Load};
use tests::payload::Random;
use tests::process::BrokerProcess;
use tests::{env_number, turn};

const TOPIC: &str = "crash_audit";

fn rounds_of_kills(name: &str, flush: &str, buffer: Option<&str>) {
    let _turn = turn();
    let rounds = env_number("CRASH_ROUNDS", 10);
    let mut random = Random::from_env();
    let mut broker = BrokerProcess::new(name);
    broker.set("flushDiskType", flush);
    if let Some(directory) = buffer {
        broker.set("pinion.bufferDir", directory);
    }
    let load = Load::new(TOPIC);
    let mut ledger = Ledger::default();
    for round in 0..rounds {
        broker.start();
        let mut client = broker.client();
        if round == 0 {
            client
                .create_topic(TOPIC, load.queues)
                .expect("create topic");
        }
        ledger.audit(&mut client, TOPIC, load.queues, false);
        ledger.spot_check(&mut client, TOPIC, &mut random);
        let pause = Duration::from_millis(100 + random.below(900));
        let acknowledged = ledger.load_and_kill(&mut broker, &load, pause);
        assert!(acknowledged > 0, "round {round}: nothing was acknowledged");
    }
    broker.start();
    ledger.audit(&mut broker.client(), TOPIC, load.queues, true);
    println!(
        "{name}: {rounds} kills, {} acknowledged, {} read before a kill, {} places audited",
        ledger.acknowledged,
        ledger.read_only,
        ledger.len()
    );
    broker.stop();
    broker.start();
    ledger.audit(&mut broker.client(), TOPIC, load.queues, true);
}

#[test]
fn asynchronous_flush_with_a_surviving_buffer() {
    rounds_of_kills("crash-async-buffer", "ASYNC_FLUSH", None);
}

#[test]
fn synchronous_flush_with_a_surviving_buffer() {
    rounds_of_kills("crash-sync-buffer", "SYNC_FLUSH", None);
}

#[test]
fn asynchronous_flush_without_a_surviving_buffer() {
    rounds_of_kills("crash-async-none", "ASYNC_FLUSH", Some("none"));
}

#[test]
fn synchronous_flush_without_a_surviving_buffer() {
    rounds_of_kills("crash-sync-none", "SYNC_FLUSH", Some("none"));
}

/// A machine that lost its power comes back without shared memory: SYNC_FLUSH must not need it.
#[test]
fn synchronous_flush_needs_no_buffer_at_the_next_start() {
    let _turn = turn();
    let mut random = Random::from_env();
    let mut broker = BrokerProcess::new("crash-buffer-lost");
    broker.set("flushDiskType", "SYNC_FLUSH").start();
    let load = Load::new(TOPIC);
    let mut ledger = Ledger::default();
    broker
        .client()
        .create_topic(TOPIC, load.queues)
        .expect("create topic");
    for _ in 0..env_number("CRASH_ROUNDS", 10).div_ceil(3) {
        let pause = Duration::from_millis(100 + random.below(400));
        let (acknowledged, _) = load.run(|| broker.client(), || std::thread::sleep(pause));
        acknowledged.into_iter().for_each(|seen| ledger.note(seen));
        broker.kill();
        std::fs::remove_dir_all(broker.buffer_directory()).expect("the buffer is there");
        broker.start();
        ledger.audit(&mut broker.client(), TOPIC, load.queues, true);
    }
}
