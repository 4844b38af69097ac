//! The crash audit with the official Java client as the producer.
//!
//! Invariant: as in the audit with our own client: whatever the Java client was told is stored
//! stands at its place after the kill.

use std::time::Duration;

use tests::audit::{Ledger, Sighting};
use tests::client::physical_offset;
use tests::java::JavaProgram;
use tests::payload::Random;
use tests::process::{BrokerProcess, eventually};
use tests::{env_number, turn};

const TOPIC: &str = "crash_audit_java";
const BROKER_NAME: &str = "audited";
const QUEUES: i32 = 4;
const THREADS: u32 = 8;

/// The Java producer, told over its input when to send.
fn producer(broker: &BrokerProcess) -> Option<JavaProgram> {
    let (queues, threads) = (QUEUES.to_string(), THREADS.to_string());
    let arguments = [TOPIC, BROKER_NAME, &queues, &threads];
    JavaProgram::start(broker, "AuditProducer", &arguments)
}

/// The acknowledgements printed before DONE.
fn acknowledgements(producer: &mut JavaProgram) -> Vec<Sighting> {
    let mut seen = Vec::new();
    loop {
        let line = producer.line();
        if line == "DONE" {
            return seen;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["ACK", number, queue_id, queue_offset, message_id] = words[..] else {
            continue;
        };
        seen.push(Sighting {
            number: number.parse().expect("a number"),
            queue_id: queue_id.parse().expect("a queue"),
            queue_offset: queue_offset.parse().expect("an offset"),
            physical_offset: physical_offset(message_id),
        });
    }
}

/// Messages that can be read.
fn stored(broker: &BrokerProcess) -> i64 {
    let mut client = broker.client();
    (0..QUEUES)
        .map(|queue| client.max_offset(TOPIC, queue).expect("max offset"))
        .sum()
}

fn rounds_of_kills(name: &str, flush: &str, buffer: Option<&str>) {
    let _turn = turn();
    let mut random = Random::from_env();
    let mut broker = BrokerProcess::new(name);
    broker
        .set("flushDiskType", flush)
        .set("brokerName", BROKER_NAME);
    if let Some(directory) = buffer {
        broker.set("pinion.bufferDir", directory);
    }
    broker.start();
    broker
        .client()
        .create_topic(TOPIC, QUEUES)
        .expect("create topic");
    let Some(mut producer) = producer(&broker) else {
        return;
    };
    let mut ledger = Ledger::default();
    let rounds = env_number("CRASH_ROUNDS", 5);
    for round in 0..rounds {
        let stored_before = stored(&broker);
        producer.say("go");
        // On a busy machine a cold producer needs longer than the pause for its first message.
        eventually("the first message", Duration::from_secs(30), || {
            stored(&broker) > stored_before
        });
        std::thread::sleep(Duration::from_millis(500 + random.below(1000)));
        broker.kill();
        producer.say("stop");
        let acknowledged = acknowledgements(&mut producer);
        assert!(
            !acknowledged.is_empty(),
            "round {round}: nothing was acknowledged"
        );
        println!("{name}: round {round}, {} acknowledged", acknowledged.len());
        ledger.acknowledged += acknowledged.len() as u64;
        acknowledged.into_iter().for_each(|seen| ledger.note(seen));
        broker.start();
        let last = round + 1 == rounds;
        ledger.audit(&mut broker.client(), TOPIC, QUEUES, last);
        ledger.spot_check(&mut broker.client(), TOPIC, &mut random);
    }
    println!(
        "{name}: {rounds} kills, {} acknowledged, none lost",
        ledger.acknowledged
    );
    broker.stop();
}

#[test]
fn asynchronous_flush_with_a_surviving_buffer() {
    rounds_of_kills("java-async-buffer", "ASYNC_FLUSH", None);
}

#[test]
fn synchronous_flush_with_a_surviving_buffer() {
    rounds_of_kills("java-sync-buffer", "SYNC_FLUSH", None);
}

#[test]
fn asynchronous_flush_without_a_surviving_buffer() {
    rounds_of_kills("java-async-none", "ASYNC_FLUSH", Some("none"));
}

#[test]
fn synchronous_flush_without_a_surviving_buffer() {
    rounds_of_kills("java-sync-none", "SYNC_FLUSH", Some("none"));
}
