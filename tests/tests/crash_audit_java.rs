//! The crash audit with the official Java client as the producer.
//!
//! Invariant: as in the audit with our own client: whatever the Java client was told is stored
//! stands at its place after the kill. Needs a JDK and the client's jars, which
//! `scripts/kits --prepare` puts under `target/interop`; `JAVA_CLIENT_LIB` names others.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use tests::audit::{Ledger, Sighting};
use tests::client::physical_offset;
use tests::payload::Random;
use tests::process::{BrokerProcess, repository};
use tests::{env_number, skipped, turn};

const TOPIC: &str = "crash_audit_java";
const BROKER_NAME: &str = "audited";
const QUEUES: i32 = 4;
const THREADS: u32 = 8;

/// The Java producer, told over its input when to send.
struct JavaProducer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl JavaProducer {
    fn start(broker: &BrokerProcess) -> Option<Self> {
        let chosen = std::env::var_os("JAVA_CLIENT_LIB").map(PathBuf::from);
        let default = repository().join("target/interop/java/target/rmq5/lib");
        let jars = chosen.unwrap_or(default);
        if !jars.is_dir() {
            let ci = std::env::var("CI").is_ok_and(|value| value == "true");
            assert!(!ci, "no Java client in {}", jars.display());
            skipped(&format!(
                "no Java client in {}; see scripts/kits",
                jars.display()
            ));
            return None;
        }
        let mut command = Command::new("java");
        command.arg("-Xmx256m").arg("-XX:TieredStopAtLevel=1");
        command.arg(format!("-Duser.home={}", broker.root().display()));
        command.arg("-cp").arg(format!("{}/*", jars.display()));
        command.arg(repository().join("tests/java/AuditProducer.java"));
        command
            .arg(format!("127.0.0.1:{}", broker.namesrv_port))
            .args([TOPIC, BROKER_NAME]);
        command.args([QUEUES.to_string(), THREADS.to_string()]);
        let errors = File::create(broker.root().join("java.txt")).expect("error file");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors);
        let mut child = command.spawn().expect("java");
        let input = child.stdin.take().expect("input");
        let output = BufReader::new(child.stdout.take().expect("output"));
        let mut producer = Self {
            child,
            input,
            output,
        };
        producer.read_until("READY");
        Some(producer)
    }

    fn say(&mut self, word: &str) {
        writeln!(self.input, "{word}").expect("the Java producer listens");
    }

    /// The acknowledgements printed before a line that says `end`.
    fn read_until(&mut self, end: &str) -> Vec<Sighting> {
        let mut seen = Vec::new();
        loop {
            let mut line = String::new();
            let count = self.output.read_line(&mut line).expect("a line");
            assert_ne!(count, 0, "the Java producer ended by itself");
            if line.trim() == end {
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
}

impl Drop for JavaProducer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
    let Some(mut producer) = JavaProducer::start(&broker) else {
        return;
    };
    let mut ledger = Ledger::default();
    let rounds = env_number("CRASH_ROUNDS", 5);
    for round in 0..rounds {
        producer.say("go");
        std::thread::sleep(Duration::from_millis(500 + random.below(1000)));
        broker.kill();
        producer.say("stop");
        let acknowledged = producer.read_until("DONE");
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
