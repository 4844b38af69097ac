//! A disk that turns read-only under the broker, and one with sectors of 4 KiB (needs root for a
//! disk of the test's own).
//!
//! Invariant: what was acknowledged is there after the repair, whatever the disk did; a shard whose
//! writes fail refuses sends and goes on with reads, and says which file, which error and which
//! part of the log it is about.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::audit::{Ledger, Load, Sighting};
use tests::client::{answer, physical_offset, sent};
use tests::disk::LoopDisk;
use tests::process::{BrokerProcess, eventually, probe};
use tests::{StopAtEnd, payload, turn};

const TOPIC: &str = "broken_disk";
const QUEUES: i32 = 4;
const DISK_BYTES: u64 = 4 << 30;
/// Time of sending before and after the fault.
const BEFORE: Duration = Duration::from_secs(2);
const AFTER: Duration = Duration::from_secs(4);
/// EROFS.
const READ_ONLY: &str = "errno 30";

/// What one send came to.
struct Answer {
    at: Instant,
    /// Why not, or the place it got.
    came: Result<Sighting, (i32, String)>,
}

/// Sends to one queue until told to stop.
fn pour(broker: &BrokerProcess, queue: i32, stop: &AtomicBool, numbers: &AtomicU64) -> Vec<Answer> {
    let mut client = broker.client();
    let mut answers = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let body = payload::body(number, 1024);
        let opaque = client.start_send(TOPIC, queue, &body, &[]).expect("start");
        let frame = client.finish(opaque).expect("an answer, not silence");
        let at = Instant::now();
        let came = if frame.code == answer::SUCCESS {
            let sent = sent(frame).expect("a send answer");
            Ok(Sighting {
                number,
                queue_id: sent.queue_id,
                queue_offset: sent.queue_offset,
                physical_offset: physical_offset(sent.message_id()),
            })
        } else {
            thread::sleep(Duration::from_millis(5));
            Err((frame.code, frame.remark.unwrap_or_default()))
        };
        answers.push(Answer { at, came });
    }
    answers
}

/// Four producers, a disk that turns read-only, `kill -9`, a repair, and an audit. `limit`: from
/// when on after the fault no send may succeed.
fn read_only_under_load(name: &str, flush: &str, limit: Duration) {
    let _turn = turn();
    let mut broker = BrokerProcess::new(name);
    let Some(mut disk) = LoopDisk::under(&mut broker, DISK_BYTES) else {
        return;
    };
    broker.set("flushDiskType", flush).start();
    broker
        .client()
        .create_topic(TOPIC, QUEUES)
        .expect("create topic");
    let (stop, numbers, all) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::default());
    let broken = thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for queue in 0..QUEUES {
            let (broker, stop, numbers, all) = (&broker, &stop, &numbers, &all);
            scope.spawn(move || {
                let answers = pour(broker, queue, stop, numbers);
                let mut all: std::sync::MutexGuard<'_, Vec<Answer>> = all.lock().expect("answers");
                all.extend(answers);
            });
        }
        thread::sleep(BEFORE);
        disk.turn_read_only();
        let broken = Instant::now();
        thread::sleep(AFTER);
        let mut reader = broker.client();
        for queue in 0..QUEUES {
            let pulled = reader.pull(TOPIC, queue, 0, 32).expect("reads go on");
            assert!(!pulled.records.is_empty(), "reads go on: {pulled:?}");
        }
        broken
    });
    let mut ledger = Ledger::default();
    let mut refused = 0;
    for Answer { at, came } in all.into_inner().expect("answers") {
        match came {
            Ok(seen) => {
                let late = at.saturating_duration_since(broken);
                assert!(late < limit, "acknowledged {late:?} after the fault");
                ledger.note(seen);
            }
            Err((code, remark)) => {
                assert_eq!(code, answer::SERVICE_NOT_AVAILABLE, "{remark}");
                if at > broken + limit {
                    assert!(remark.contains(READ_ONLY), "{remark}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 100, "only {refused} refused after the fault");
    assert!(!ledger.is_empty(), "nothing acknowledged before it");
    is_said(&broker);
    broker.kill();
    disk.repair();
    broker.start();
    ledger.audit(&mut broker.client(), TOPIC, QUEUES, true);
    let sends = || {
        broker
            .client()
            .send(TOPIC, 0, &payload::body(1 << 40, 100), &[])
    };
    eventually("sends go on", Duration::from_secs(10), || sends().is_ok());
    broker.stop();
}

/// The log names file, error and offsets once for each shard, and the metrics show it.
fn is_said(broker: &BrokerProcess) {
    let output = broker.output();
    let told: Vec<&str> = output
        .lines()
        .filter(|line| line.contains("acknowledges nothing more"))
        .collect();
    assert!(!told.is_empty(), "{output}");
    for line in told {
        let whole = ["commitlog/", READ_ONLY, "physical offsets"];
        assert!(whole.iter().all(|part| line.contains(part)), "{line}");
    }
    let (_, page) = probe(broker.broker_port + 3, "/metrics").expect("metrics");
    let shown = page
        .lines()
        .any(|line| line.starts_with("pinion_shard_poisoned") && line.ends_with(" 1"));
    assert!(shown, "{page}");
}

#[test]
fn synchronous_sends_to_a_disk_gone_read_only_are_refused_and_acknowledged_ones_are_kept() {
    read_only_under_load("read-only-sync", "SYNC_FLUSH", Duration::from_secs(1));
}

#[test]
fn asynchronous_sends_to_a_disk_gone_read_only_are_refused_and_acknowledged_ones_are_kept() {
    read_only_under_load(
        "read-only-async",
        "ASYNC_FLUSH",
        Duration::from_millis(1_500),
    );
}

#[test]
fn a_disk_with_sectors_of_4_kib_keeps_what_is_acknowledged_across_kills() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("sectors");
    let Some(_disk) = LoopDisk::with_sectors(&mut broker, DISK_BYTES, 4096) else {
        return;
    };
    broker.set("flushDiskType", "SYNC_FLUSH").start();
    broker
        .client()
        .create_topic(TOPIC, QUEUES)
        .expect("create topic");
    let mut load = Load::new(TOPIC);
    load.queues = QUEUES;
    let mut ledger = Ledger::default();
    for _ in 0..3 {
        ledger.load_and_kill(&mut broker, &load, Duration::from_millis(700));
        broker.start();
        ledger.audit(&mut broker.client(), TOPIC, QUEUES, true);
    }
    assert!(ledger.acknowledged > 100, "{}", ledger.acknowledged);
    broker.stop();
}
