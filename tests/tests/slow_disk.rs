//! A broker whose disk hangs among others whose disks do not: `fsfreeze` on a loop device of the
//! test's own (needs root). H02, H03.
//!
//! Invariant: with the settings out of the box such a broker refuses sends at once, in so many
//! words and with a code that every client takes elsewhere, serves again by itself, and leaves the
//! write path of routes by its own report; a broker that is alone lets sends wait.

use std::thread;
use std::time::{Duration, Instant};

use tests::client::answer;
use tests::cluster::Cluster;
use tests::disk::LoopDisk;
use tests::frame::Frame;
use tests::process::{BrokerProcess, eventually, probe};
use tests::{payload, turn};

const TOPIC: &str = "slow_disk";
const DISK_BYTES: u64 = 2 << 30;
/// Time within which a sick broker has to refuse.
const REFUSES_WITHIN: Duration = Duration::from_millis(300);
const FROZEN: Duration = Duration::from_millis(1_500);
/// Time after which a send that waits is given back, with some for the answer.
const GIVEN_BACK_WITHIN: Duration = Duration::from_millis(1_250);
/// An answer that waits for no disk.
const AT_ONCE: Duration = Duration::from_millis(200);

/// A send during the freeze: when it was asked after the freeze, how long its answer took.
struct Tried {
    asked: Duration,
    took: Duration,
    frame: Frame,
}

fn try_one(broker: &BrokerProcess, frozen: Instant, number: u64) -> Tried {
    let mut client = broker.client();
    let body = payload::body(number, 1_000);
    let asked = frozen.elapsed();
    let opaque = client.start_send(TOPIC, 0, &body, &[]).expect("start");
    let frame = client.finish(opaque).expect("an answer, not silence");
    let took = frozen.elapsed() - asked;
    Tried { asked, took, frame }
}

/// Sends every 25 ms while the disk hangs, each on a connection of its own, and thaws it.
fn try_while_frozen(broker: &BrokerProcess, disk: &mut LoopDisk) -> (Vec<Tried>, Duration) {
    thread::scope(|scope| {
        disk.freeze();
        let frozen = Instant::now();
        let mut threads = Vec::new();
        let mut numbers = 1_000..;
        while frozen.elapsed() < FROZEN {
            let number = numbers.next().unwrap_or_default();
            threads.push(scope.spawn(move || try_one(broker, frozen, number)));
            thread::sleep(Duration::from_millis(25));
        }
        let thawed = frozen.elapsed();
        disk.thaw();
        let tried = threads.into_iter().map(|one| one.join().expect("a send"));
        (tried.collect(), thawed)
    })
}

fn soon<T>(what: &str, ask: impl FnOnce() -> std::io::Result<T>) -> T {
    let asked = Instant::now();
    let got = ask().unwrap_or_else(|error| panic!("{what}: {error}"));
    let took = asked.elapsed();
    assert!(took < AT_ONCE, "{what}: after {took:?}");
    got
}

/// Those that were stored have to be as many as were taken or given back.
fn check_refusals(tried: &[Tried]) -> usize {
    let (mut refused, mut given_back) = (0, 0);
    for one in tried {
        let (asked, took) = (one.asked, one.took);
        let text = one.frame.remark.clone().unwrap_or_default();
        assert_eq!(one.frame.code, answer::SERVICE_NOT_AVAILABLE, "{text}");
        let is_given_back = text.contains("may come twice");
        if is_given_back {
            given_back += 1;
            assert!(asked < REFUSES_WITHIN, "still taken after {asked:?}");
            assert!(asked + took < GIVEN_BACK_WITHIN, "{asked:?} and {took:?}");
        } else {
            refused += 1;
            assert!(
                took < AT_ONCE,
                "asked after {asked:?}, refused after {took:?}"
            );
        }
        for word in ["disk hangs", "shard 0", "ms", "limit 200 ms"] {
            assert!(text.contains(word), "{word} is not in: {text}");
        }
    }
    println!(
        "of {} {refused} refused, {given_back} given back",
        tried.len()
    );
    assert!(
        refused * 2 > tried.len(),
        "{refused} of {} refused",
        tried.len()
    );
    given_back
}

#[test]
fn a_broker_with_a_hanging_disk_refuses_at_once_and_serves_again_by_itself() {
    let _turn = turn();
    let mut disk = None;
    let mut cluster = Cluster::start("slow-two", TOPIC, 2, |number, broker| {
        broker.set("flushDiskType", "SYNC_FLUSH");
        if number == 0 {
            disk = LoopDisk::under(broker, DISK_BYTES);
        }
    });
    let Some(mut disk) = disk else { return };
    hangs_and_works_again(&cluster, &mut disk);
    cluster.brokers[0].kill();
}

fn hangs_and_works_again(cluster: &Cluster, disk: &mut LoopDisk) {
    cluster.wait_for_peers();
    let (sick, healthy) = (&cluster.brokers[0], &cluster.brokers[1]);
    let mut client = sick.client();
    for number in 0..20 {
        let body = payload::body(number, 1_000);
        client.send(TOPIC, 0, &body, &[]).expect("send");
    }
    client.commit("readers", TOPIC, 0, 7).expect("commit");
    let (tried, _) = thread::scope(|scope| {
        let beside = scope.spawn(|| {
            thread::sleep(REFUSES_WITHIN * 2);
            let mut client = sick.client();
            let pulled = soon("a tail read", || client.pull(TOPIC, 0, 0, 32));
            assert_eq!(pulled.records.len(), 20);
            let committed = soon("an offset", || client.query_offset("readers", TOPIC, 0));
            assert_eq!(committed, Some(7));
            let asked = Instant::now();
            let other = healthy.client().send(TOPIC, 0, b"x", &[]);
            other.expect("the other broker goes on");
            assert!(asked.elapsed() < FROZEN / 2, "{:?}", asked.elapsed());
        });
        let tried = try_while_frozen(sick, disk);
        beside.join().expect("what goes on beside it");
        tried
    });
    let given_back = check_refusals(&tried);
    let thawed = Instant::now();
    eventually("sends are taken again", Duration::from_secs(1), || {
        client.send(TOPIC, 0, b"again", &[]).is_ok()
    });
    println!("serves again {:?} after the thaw", thawed.elapsed());
    let stored = client.read_queue(TOPIC, 0, 0).expect("no hole").len();
    assert_eq!(
        stored,
        20 + given_back + 1,
        "what is refused is not stored, what is given back is"
    );
    assert_eq!(cluster.writable(), [true; 2], "of two nobody is isolated");
    check_what_it_says(&cluster.fuse_of(0), sick);
}

/// Words, lines and figures about a disk that hung and works again.
fn check_what_it_says(fuse: &str, sick: &BrokerProcess) {
    assert!(fuse.contains("shard 0  works"), "{fuse}");
    assert!(fuse.contains("shard 0 works again"), "{fuse}");
    let log = sick.output();
    let lines = |words: &str| log.matches(words).count();
    let hangs = lines("disk hangs");
    assert!((1..=2).contains(&hangs), "{log}");
    assert_eq!(lines("disk works again"), hangs, "{log}");
    eventually("figures", Duration::from_secs(3), || {
        let page = probe(sick.broker_port + 3, "/metrics");
        let (_, page) = page.unwrap_or_default();
        let lines: Vec<&str> = page.lines().collect();
        let has = |name: &str, end: &str| {
            let line = lines.iter().find(|line| line.starts_with(name));
            line.is_some_and(|line| line.ends_with(end))
        };
        !has("pinion_shard_disk_transitions_total", " 0")
            && has("pinion_shard_disk_hangs", " 0")
            && !has("pinion_shard_disk_refusals_total", " 0")
            && !has("pinion_shard_disk_given_back_total", " 0")
    });
}

#[test]
fn a_broker_that_is_alone_lets_sends_wait_for_its_disk() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("slow-alone");
    let Some(mut disk) = LoopDisk::under(&mut broker, DISK_BYTES) else {
        return;
    };
    broker.set("flushDiskType", "SYNC_FLUSH").start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("topic");
    client.send(TOPIC, 0, b"before", &[]).expect("send");
    let (tried, thawed) = try_while_frozen(&broker, &mut disk);
    for one in &tried {
        let remark = &one.frame.remark;
        assert_eq!(
            one.frame.code,
            answer::SUCCESS,
            "{:?}: {remark:?}",
            one.asked
        );
        assert!(one.asked + one.took >= thawed, "acknowledged while frozen");
    }
    broker.stop();
}

#[test]
fn a_broker_of_four_leaves_the_routes_by_its_own_report() {
    let _turn = turn();
    let mut disk = None;
    // Under ASYNC_FLUSH probes succeed as long as the write buffer has room.
    let mut cluster = Cluster::start("slow-four", TOPIC, 4, |number, broker| {
        if number == 2 {
            disk = LoopDisk::under(broker, DISK_BYTES);
        }
    });
    let Some(mut disk) = disk else { return };
    cluster.wait_for_peers();
    let mut client = cluster.brokers[2].client();
    disk.freeze();
    let frozen = Instant::now();
    eventually("isolation", Duration::from_secs(3), || {
        client
            .send(TOPIC, 0, b"taken", &[])
            .expect("taken while there is room");
        cluster.writable() == [true, true, false, true]
    });
    println!("isolated {:?} after the freeze", frozen.elapsed());
    let said = cluster.fuse_of_namesrv();
    assert!(said.contains("broker-2  open"), "{said}");
    assert!(said.contains("why: disk write waits"), "{said}");
    let said = cluster.fuse_of(2);
    assert!(said.contains("shard 0  hangs since"), "{said}");
    disk.thaw();
    eventually("the disk works", Duration::from_secs(2), || {
        cluster.fuse_of(2).contains("shard 0  works")
    });
    cluster.brokers[2].kill();
}
