//! What senders notice when a disk of their cluster hangs: nothing (H02, H03). Disks are loop
//! devices of the test's own (needs root); senders do as RocketMQ's synchronous ones do, with
//! routes as old as those of a client that asked just before the trouble.
//!
//! Invariant: with the settings out of the box no send of a client that retries fails, whether one
//! disk of the cluster hangs or all are equally slow. `FUSE_ROUNDS` freezes more often.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::client::{Client, answer};
use tests::cluster::Cluster;
use tests::disk::LoopDisk;
use tests::process::{BrokerProcess, eventually};
use tests::{StopAtEnd, env_number, payload, turn};

const TOPIC: &str = "fuse_sends";
const DISK_BYTES: u64 = 2 << 30;
/// What clients have for a send with all its attempts.
const SEND_TIMEOUT: Duration = Duration::from_secs(3);
const ATTEMPTS: usize = 3;
/// Enough that some come to every broker while others wait.
const SENDERS: usize = 16;
/// From then on after the freeze the sick broker has to refuse.
const REFUSES_WITHIN: Duration = Duration::from_millis(300);
/// Longest answer then, of any broker; the machine may be busy with other tests.
const AT_ONCE: Duration = Duration::from_millis(500);

/// One send with all its attempts.
#[derive(Debug)]
struct Done {
    started: Instant,
    took: Duration,
    attempts: usize,
    error: Option<String>,
}

/// A synchronous sender: another broker for each attempt, all within the timeout.
struct Sender<'a> {
    brokers: &'a [BrokerProcess],
    links: Vec<Option<Client>>,
    next: usize,
    number: u64,
}

impl<'a> Sender<'a> {
    fn new(brokers: &'a [BrokerProcess], number: usize) -> Self {
        Self {
            brokers,
            links: brokers.iter().map(|_| None).collect(),
            next: number,
            number: number as u64 * 1_000_000,
        }
    }

    fn send(&mut self) -> Done {
        let started = Instant::now();
        self.number += 1;
        let body = payload::body(self.number, 500);
        let (mut attempts, mut error) = (0, None);
        while attempts < ATTEMPTS && started.elapsed() < SEND_TIMEOUT {
            attempts += 1;
            error = self.attempt(&body, started).err();
            if error.is_none() {
                break;
            }
        }
        let took = started.elapsed();
        Done {
            started,
            took,
            attempts,
            error,
        }
    }

    fn attempt(&mut self, body: &[u8], started: Instant) -> Result<(), String> {
        self.next = (self.next + 1) % self.brokers.len();
        let name = format!("broker-{}", self.next);
        let rest = SEND_TIMEOUT.saturating_sub(started.elapsed());
        let mut client = match self.links[self.next].take() {
            Some(client) => client,
            None => self.brokers[self.next]
                .try_client()
                .map_err(|error| format!("{name}: {error}"))?,
        };
        let rest = rest.max(Duration::from_millis(1));
        let limited = client.socket().set_read_timeout(Some(rest));
        limited.expect("a timeout");
        let frame = client
            .start_send(TOPIC, (self.number % 4) as i32, body, &[])
            .and_then(|opaque| client.finish(opaque))
            .map_err(|error| format!("{name}: {error}"))?;
        self.links[self.next] = Some(client);
        if frame.code == answer::SUCCESS {
            return Ok(());
        }
        let remark = frame.remark.unwrap_or_default();
        if frame.code != answer::SERVICE_NOT_AVAILABLE {
            // Old clients give up on other codes.
            panic!("{name} answered {}: {remark}", frame.code);
        }
        Err(format!("{name}: {remark}"))
    }
}

/// Lets senders send while `trouble` goes on; gives all their sends.
fn send_during(cluster: &Cluster, trouble: impl FnOnce()) -> Vec<Done> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let senders = (0..SENDERS).map(|number| {
            let (stop, brokers) = (&stop, &cluster.brokers);
            scope.spawn(move || {
                let mut sender = Sender::new(brokers, number);
                let mut done = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    done.push(sender.send());
                    thread::sleep(Duration::from_millis(5));
                }
                done
            })
        });
        let senders: Vec<_> = senders.collect();
        let end = StopAtEnd(&stop);
        thread::sleep(Duration::from_millis(500));
        trouble();
        thread::sleep(Duration::from_millis(500));
        drop(end);
        let done = senders.into_iter().map(|one| one.join().expect("a sender"));
        done.flatten().collect()
    })
}

fn check_none_failed(done: &[Done]) {
    let longest = done.iter().map(|one| one.took).max().unwrap_or_default();
    let again = done.iter().filter(|one| one.attempts > 1).count();
    println!(
        "{} sends, {again} more than once, longest {longest:?}",
        done.len()
    );
    let failed: Vec<&Done> = done.iter().filter(|one| one.error.is_some()).collect();
    assert!(
        failed.is_empty(),
        "{} of {}: {failed:?}",
        failed.len(),
        done.len()
    );
    assert!(done.len() > 50, "{} sends", done.len());
}

/// A cluster under SYNC_FLUSH whose first `sick` brokers have disks that can be frozen.
fn cluster(name: &str, size: usize, sick: usize) -> Option<(Cluster, Vec<LoopDisk>)> {
    let mut disks = Vec::new();
    let cluster = Cluster::start(name, TOPIC, size, |number, broker| {
        broker.set("flushDiskType", "SYNC_FLUSH");
        if number < sick {
            disks.extend(LoopDisk::under(broker, DISK_BYTES));
        }
    });
    if disks.len() < sick {
        return None;
    }
    cluster.wait_for_peers();
    Some((cluster, disks))
}

fn end(mut cluster: Cluster) {
    for broker in &mut cluster.brokers {
        broker.kill();
    }
}

#[test]
fn one_hanging_disk_of_four_fails_no_send_and_leaves_the_routes() {
    let _turn = turn();
    let Some((cluster, mut disks)) = cluster("sends-four", 4, 1) else {
        return;
    };
    for round in 0..env_number("FUSE_ROUNDS", 1) {
        let mut frozen = Instant::now();
        let done = send_during(&cluster, || {
            disks[0].freeze();
            frozen = Instant::now();
            eventually("isolation", Duration::from_secs(3), || {
                cluster.writable() == [false, true, true, true]
            });
            println!("isolated {:?} after the freeze", frozen.elapsed());
            thread::sleep(Duration::from_millis(3_500).saturating_sub(frozen.elapsed()));
            disks[0].thaw();
            eventually("serves again", Duration::from_secs(1), || {
                cluster.fuse_of(0).contains("shard 0  works")
            });
        });
        check_none_failed(&done);
        let later = done
            .iter()
            .filter(|one| one.started > frozen + REFUSES_WITHIN);
        let longest = later.map(|one| one.took).max().unwrap_or_default();
        assert!(longest < AT_ONCE, "round {round}: {longest:?}");
        if round + 1 < env_number("FUSE_ROUNDS", 1) {
            eventually("write permission again", Duration::from_secs(600), || {
                cluster.writable() == [true; 4]
            });
        }
    }
    end(cluster);
}

#[test]
fn one_hanging_disk_of_two_fails_no_send_and_isolates_nobody() {
    let _turn = turn();
    let Some((cluster, mut disks)) = cluster("sends-two", 2, 1) else {
        return;
    };
    for round in 0..env_number("FUSE_ROUNDS", 2) {
        let done = send_during(&cluster, || {
            disks[0].freeze();
            thread::sleep(Duration::from_millis(if round % 2 == 0 {
                3_500
            } else {
                700
            }));
            assert_eq!(cluster.writable(), [true; 2]);
            disks[0].thaw();
        });
        check_none_failed(&done);
    }
    assert_eq!(cluster.writable(), [true; 2]);
    end(cluster);
}

fn at_once(disks: &mut [LoopDisk], what: fn(&mut LoopDisk)) {
    thread::scope(|scope| {
        for disk in disks {
            scope.spawn(move || what(disk));
        }
    });
}

#[test]
fn disks_that_are_all_slow_alike_fail_no_send() {
    let _turn = turn();
    let Some((cluster, mut disks)) = cluster("sends-alike", 2, 2) else {
        return;
    };
    let done = send_during(&cluster, || {
        for _ in 0..12 {
            at_once(&mut disks, LoopDisk::freeze);
            thread::sleep(Duration::from_millis(350));
            at_once(&mut disks, LoopDisk::thaw);
            thread::sleep(Duration::from_millis(50));
        }
    });
    check_none_failed(&done);
    for number in 0..2 {
        println!("{}", cluster.fuse_of(number));
    }
    end(cluster);
}
