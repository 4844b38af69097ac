//! The whole broker under attack: the real cores, dispatch and handlers on a simulated machine,
//! with clients that speak real frames, crashed at every point and in every way a disk allows.
//!
//! `SIM_CRASHES=100000 cargo test -p tests --test simulated_broker` goes on for longer; a failure
//! prints its seed, and `SIM_FIRST=seed SIM_CRASHES=1` runs that one again.

mod audit;
mod client;
mod history;
mod world;

use broker::core::canary::Canary;
use shard::io::sim::{Crash, Effect, Fault, Operation, SimRandom};
use tests::env_number;

use self::client::Role;
use self::world::{Flush, Setup, World};

const FLUSHES: [Flush; 3] = [Flush::Sync, Flush::Async, Flush::AsyncAlone];
/// Lives of one world.
const LIVES: u64 = 6;

/// Prints the seed when a test fails under it.
struct Telling(u64, Flush);

impl Drop for Telling {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "failed with SIM_FIRST={} SIM_CRASHES=1, {:?}",
                self.0, self.1
            );
        }
    }
}

/// Seeds that failed once; each found a fault that is mended.
const FIXED_SEEDS: [u64; 2] = [1_754_009_944_420_635, 1_754_011_471_359_500];

fn kind(random: &mut SimRandom) -> Crash {
    if random.one_in(2) {
        Crash::Kill
    } else {
        Crash::PowerLoss
    }
}

/// A fault somewhere in the next life.
fn plan_fault(world: &mut World) -> bool {
    let random = &mut world.random;
    if !random.one_in(3) {
        return false;
    }
    let (operation, effects): (Operation, &[Effect]) = match random.below(8) {
        0 | 1 => (
            Operation::Write,
            &[
                Effect::Fail(5),
                Effect::Fail(28),
                Effect::Short,
                Effect::Hang,
            ],
        ),
        2 => (Operation::Flush, &[Effect::Fail(5), Effect::Hang]),
        3 | 4 => (
            Operation::Read,
            &[Effect::Fail(5), Effect::Short, Effect::Hang, Effect::Stale],
        ),
        5 => (Operation::Create, &[Effect::Fail(28), Effect::Fail(30)]),
        6 => (Operation::Allocate, &[Effect::Fail(28)]),
        _ => (Operation::Rename, &[Effect::Fail(5), Effect::PowerOff]),
    };
    let effect = effects[random.below(effects.len() as u64) as usize];
    let fault = Fault {
        operation,
        path_contains: None,
        skip: random.below(40),
        times: 1 + random.below(3),
        effect,
    };
    if std::env::var_os("SIM_TALK").is_some() {
        println!("{fault:?}");
    }
    world.machine.storage().plan(fault);
    true
}

/// One world through several crashes; returns the crashes, its trace and the lives with a fault.
fn lives(seed: u64, flush: Flush) -> (u64, u64, u64) {
    let _telling = Telling(seed, flush);
    live(World::new(Setup::drawn(seed, flush)))
}

fn live(mut world: World) -> (u64, u64, u64) {
    let mut faults = 0;
    for _ in 0..LIVES {
        faults += u64::from(plan_fault(&mut world));
        let steps = 60 + world.random.below(900);
        world.run(steps);
        if world.random.one_in(2) {
            let by_us = world.random.below(600);
            world.machine.advance_us(by_us);
        }
        let kind = kind(&mut world.random);
        world.crash(kind);
        world.start_and_check(kind);
    }
    world.audit_late();
    (world.crashes, world.trace.0, faults)
}

#[test]
fn nothing_acknowledged_is_lost_in_crashes_at_random_moments() {
    let wanted = env_number("SIM_CRASHES", 2_000);
    let fresh = std::time::UNIX_EPOCH
        .elapsed()
        .map_or(1, |time| time.as_nanos() as u64 >> 10);
    let first = env_number("SIM_FIRST", fresh);
    println!("SIM_FIRST={first}");
    let (mut crashes, mut faults) = (0, 0);
    for seed in first.. {
        for flush in FLUSHES {
            let (more, _, hit) = lives(seed, flush);
            crashes += more;
            faults += hit;
        }
        if crashes >= wanted {
            break;
        }
    }
    println!("{crashes} crashes, {faults} lives with a planned fault, from SIM_FIRST={first}");
    assert!(wanted < 100 || faults > 0, "no fault was injected");
}

#[test]
fn seeds_that_failed_once_pass() {
    for seed in FIXED_SEEDS {
        for flush in FLUSHES {
            lives(seed, flush);
        }
    }
}

/// Slots for cold reads are shared by the shards of a core, and each keeps what it has read.
#[test]
fn a_shard_that_keeps_every_cold_slot_does_not_starve_its_neighbour() {
    let mut setup = Setup::drawn(2, Flush::Async);
    (setup.cores, setup.shards, setup.cold_slots) = (1, 3, 1);
    let mut world = World::new(setup);
    world.run(1500);
    world.crash(Crash::Kill);
    world.start().expect("a start");
    world.audit();
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 1..=4 {
        for flush in FLUSHES {
            let (first, second) = (lives(seed, flush), lives(seed, flush));
            assert_eq!(first, second, "seed {seed}, {flush:?}");
        }
    }
    assert_ne!(lives(1, Flush::Sync).1, lives(2, Flush::Sync).1);
}

/// A small workload, crashed at its `at`-th point; `None` once it has fewer points.
fn crashed(flush: Flush, at: u64) -> Option<World> {
    let mut setup = Setup::drawn(3, flush);
    setup.cores = 2;
    setup.shards = 2;
    setup.segment_bytes = 64 * 1024;
    setup.run_units = 8;
    setup.piece_bytes_max = 65_536;
    setup.clients = vec![
        Role::Producer { at_once: 4 },
        Role::Ordered { queue: 0 },
        Role::Admin,
    ];
    let mut world = World::new(setup);
    world.crash_at = Some(world.steps + at);
    (!world.run(260)).then_some(world)
}

/// How many of some seeds find what is wrong with a world.
fn found(wrong: impl Fn(&mut Setup), lies: bool) -> usize {
    let find = |seed| {
        let mut setup = Setup::drawn(seed, Flush::Sync);
        wrong(&mut setup);
        let world = World::new(setup);
        world.machine.storage().set_lying_flush(lies);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| live(world))).is_err()
    };
    (1..=6).filter(|seed| find(*seed)).count()
}

/// A suite that does not notice a broken promise proves nothing.
#[test]
fn a_broker_that_breaks_a_promise_is_found() {
    assert_eq!(found(|_| {}, false), 0, "a broker that keeps them");
    for canary in [Canary::AckEarly, Canary::Drop, Canary::Reorder] {
        let times = found(|setup| setup.canary = canary, false);
        println!("{canary:?}: found by {times} of 6 seeds");
        assert!(times > 0, "nothing noticed {canary:?}");
    }
}

/// Nobody can promise anything on a device that says "flushed" and is not: the audit must see it.
#[test]
fn a_device_that_lies_about_flushes_is_found_out() {
    let times = found(|_| {}, true);
    println!("found by {times} of 6 seeds");
    assert!(times > 0, "lying flushes went unnoticed");
}

#[test]
fn every_point_of_a_small_workload_can_be_crashed() {
    let every = env_number("SIM_POINT_STEP", 3).max(1);
    let mut crashes = 0;
    for flush in FLUSHES {
        for kind in [Crash::Kill, Crash::PowerLoss] {
            for at in (1..).step_by(every as usize) {
                let Some(mut world) = crashed(flush, at) else {
                    break;
                };
                let _telling = Telling(at, flush);
                world.crash(kind);
                world.start_and_check(kind);
                crashes += 1;
            }
        }
    }
    println!("{crashes} crash points");
    assert!(crashes * every > 1_500, "only {crashes} points");
}
