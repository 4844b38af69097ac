//! How long a start takes after a kill, and that a recovery that is killed gets on (H06).
//!
//! Invariant: an undisturbed start reads the tail of a log, however long it is; a start that has to
//! make everything again goes on where the one before was killed; from its first second a start
//! tells its progress, and is ready only when it serves. `RECOVERY_MIB` is the size of the larger
//! store (4096 for the case as it was reported), a quarter of it that of the smaller one.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use tests::audit::{Ledger, Load};
use tests::client::Client;
use tests::process::{BrokerProcess, files_below, probe};
use tests::{env_number, payload, turn};

const TOPIC: &str = "recovery";
const BODY_BYTES: usize = 60_000;
/// Messages in one batch: below 4 MiB, the largest body.
const BATCH: u64 = 64;
const KILLS: u32 = 6;
/// What two starts may differ by for reasons that are not their stores.
const NOISE: Duration = Duration::from_millis(500);
const FIRST_SECOND: Duration = Duration::from_secs(1);

fn larger_mib() -> u64 {
    env_number("RECOVERY_MIB", 512)
}

/// A broker that was killed under load, with about so much in its store.
fn killed(name: &str, mib: u64) -> (BrokerProcess, Ledger) {
    let mut broker = BrokerProcess::new(name);
    let segment = if mib >= 1024 { 64 << 20 } else { 16 << 20 };
    broker.set("mappedFileSizeCommitLog", &u64::to_string(&segment));
    broker.arguments(&["--shards", "1"]).start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 4).expect("create topic");
    fill(&mut client, mib);
    let mut ledger = Ledger::default();
    let load = Load::new("recovery_load");
    client
        .create_topic(&load.topic, load.queues)
        .expect("topic");
    let pause = Duration::from_millis(500);
    assert!(ledger.load_and_kill(&mut broker, &load, pause) > 0);
    (broker, ledger)
}

fn fill(client: &mut Client, mib: u64) {
    let body = payload::body(7, BODY_BYTES);
    let batch = vec![(body.as_slice(), &[][..]); BATCH as usize];
    for number in 0..(mib << 20) / (BODY_BYTES as u64 * BATCH) {
        let queue = (number % 4) as i32;
        // A full write buffer refuses for a moment while the disk is slower than this.
        while let Err(refused) = client.send_batch(TOPIC, queue, &batch, &[]) {
            assert!(refused.to_string().contains("code 14"), "{refused}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Starts, and measures until clients are served.
fn timed_start(broker: &mut BrokerProcess) -> Duration {
    let began = Instant::now();
    broker.start();
    began.elapsed()
}

fn check(broker: &BrokerProcess, ledger: &mut Ledger) {
    ledger.audit(&mut broker.client(), "recovery_load", 4, true);
}

#[test]
fn a_start_after_a_kill_reads_the_tail_however_large_the_store_is() {
    let _turn = turn();
    let mut times = Vec::new();
    for mib in [larger_mib() / 4, larger_mib()] {
        let (mut broker, mut ledger) = killed("recovery-size", mib);
        let took = timed_start(&mut broker);
        println!("{mib} MiB: started in {took:?} after a kill");
        check(&broker, &mut ledger);
        broker.stop();
        times.push(took);
    }
    let most = times[0].mul_f64(1.5) + NOISE;
    assert!(times[1] <= most, "{times:?}");
}

/// Follows a start on the health port until it is killed after `limit`, or serves.
fn watch(broker: &mut BrokerProcess, limit: Duration) -> Seen {
    let port = broker.broker_port + 3;
    let began = Instant::now();
    let mut seen = Seen::default();
    broker.launch();
    while began.elapsed() < limit {
        assert!(broker.ended().is_none(), "it said:\n{}", broker.output());
        let ready = probe(port, "/ready");
        if let Some((200, _)) = ready {
            seen.ready_after = Some(began.elapsed());
            return seen;
        }
        assert!(
            ready.is_none_or(|(status, _)| status == 503),
            "ready or not, nothing else"
        );
        if let Some((status, body)) = probe(port, "/live") {
            assert_eq!(status, 200, "{body}");
            seen.first_answer.get_or_insert(began.elapsed());
            let json: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            let percent = json["percent"].as_u64().expect("a percentage");
            let eta = json.get("etaSeconds").expect("the seconds left");
            if json["state"] == "recovering" && percent > 0 && percent < 100 {
                assert!(eta.is_u64(), "{body}");
                seen.percents.push(percent);
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
    seen
}

/// Starts, and asks it to stop as soon as it says that it recovers.
fn sigterm_ends_a_recovery(broker: &mut BrokerProcess) {
    let port = broker.broker_port + 3;
    broker.launch();
    let recovering = || probe(port, "/live").is_some_and(|(_, body)| body.contains("recovering"));
    while !recovering() {
        assert!(probe(port, "/ready").is_none_or(|(status, _)| status == 503));
        thread::sleep(Duration::from_millis(1));
    }
    let began = Instant::now();
    broker.stop();
    let took = began.elapsed();
    assert!(took < FIRST_SECOND, "SIGTERM took {took:?}");
    let said = broker.output();
    assert!(said.contains("stopping during recovery"), "{said}");
}

#[derive(Debug, Default)]
struct Seen {
    first_answer: Option<Duration>,
    percents: Vec<u64>,
    ready_after: Option<Duration>,
}

/// Takes everything away that a start can make again, so that it has to read the whole log.
fn forget_runs(broker: &BrokerProcess) {
    let runs = files_below(&broker.data().join("consumequeue"));
    assert!(
        !runs.is_empty(),
        "no run files in {}",
        broker.data().display()
    );
    runs.iter()
        .for_each(|run| fs::remove_file(run).expect("remove"));
}

#[test]
fn a_recovery_that_is_killed_again_and_again_goes_on_where_it_was() {
    let _turn = turn();
    let (mut broker, mut ledger) = killed("recovery-killed", larger_mib());
    // What a start costs that has nothing to read, and one that reads everything.
    let bare = timed_start(&mut broker);
    broker.kill();
    forget_runs(&broker);
    let undisturbed = timed_start(&mut broker);
    check(&broker, &mut ledger);
    broker.kill();
    println!("a start takes {bare:?}, and {undisturbed:?} when it reads everything");
    forget_runs(&broker);
    sigterm_ends_a_recovery(&mut broker);
    // Six of these are enough for all of it, if nothing is read twice.
    let each = bare + undisturbed.saturating_sub(bare) / 3;
    let (mut total, mut percents) = (Duration::ZERO, Vec::new());
    for round in 0..KILLS {
        let began = Instant::now();
        let seen = watch(&mut broker, each);
        broker.kill();
        total += began.elapsed();
        percents.extend(seen.percents);
        if seen.ready_after.is_some() {
            println!("done in round {round}");
        }
        let first = seen.first_answer.or(seen.ready_after);
        assert!(
            first.is_none_or(|at| at < FIRST_SECOND),
            "the first answer after {first:?}"
        );
    }
    let began = Instant::now();
    let seen = watch(&mut broker, Duration::from_secs(600));
    total += began.elapsed();
    assert!(seen.ready_after.is_some(), "{seen:?}");
    broker.wait_ready();
    check(&broker, &mut ledger);
    let last = seen.ready_after.unwrap_or_default();
    percents.dedup();
    println!("{KILLS} kills: {total:?} in all, the last start {last:?}, percentages {percents:?}");
    assert!(
        last <= bare + NOISE,
        "{last:?} although all was read before"
    );
    assert!(!percents.is_empty(), "no progress was told");
    // Each try also pays for a bare start, which has nothing to do with the log.
    let most = undisturbed * 2 + (bare + NOISE) * KILLS;
    assert!(
        total <= most,
        "{total:?} in all, {undisturbed:?} undisturbed"
    );
    broker.stop();
}
