//! Workloads drawn from seeds, with crashes at random moments.

use shard::AckPoint;
use shard::io::sim::{Crash, SimRandom};
use shard::runtime::Driver as _;

use super::world::{Draft, Setup, World};

/// Seeds per mode unless `SIM_SEEDS` says otherwise.
const SEEDS: u64 = 60;

fn seeds() -> u64 {
    std::env::var("SIM_SEEDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(SEEDS)
}

fn first_seed() -> u64 {
    std::env::var("SIM_FIRST")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1)
}

/// Prints the seed when a test fails under it.
struct Telling(u64, AckPoint);

impl Drop for Telling {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with SIM_FIRST={} SIM_SEEDS=1, {:?}", self.0, self.1);
        }
    }
}

fn size(random: &mut SimRandom, most: u64) -> usize {
    let bytes = match random.below(10) {
        0 => 1,
        1 => 4096 - 140 + random.below(40),
        2 => 4096 + random.below(9000),
        3 => most - random.below(200),
        4..6 => random.below(most),
        _ => random.below(1200),
    };
    bytes.clamp(1, most) as usize
}

fn draft(random: &mut SimRandom, most: u64) -> Draft {
    let level = 1 + random.below(3);
    let mut body = vec![0; size(random, most)];
    for byte in &mut body {
        *byte = random.next_u64() as u8;
    }
    body[0] = b'0' + level as u8;
    Draft {
        topic: format!("T{}", random.below(3)),
        queue_id: random.below(3) as i32,
        body,
        tag: ["a", "b"][random.below(2) as usize].to_owned(),
        keys: if random.one_in(3) {
            format!("k{} common", random.below(50))
        } else {
            String::new()
        },
        unique: String::new(),
    }
}

fn act(world: &mut World, most: u64) {
    let mut random = world.random.clone();
    match random.below(40) {
        0..24 => {
            let draft = draft(&mut random, most);
            world.append_patiently(&draft, 0);
        }
        24..27 => {
            // A batch.
            for _ in 0..2 + random.below(6) {
                let draft = draft(&mut random, 600);
                if world.append_patiently(&draft, 0).is_none() {
                    break;
                }
            }
        }
        27..30 => {
            let draft = draft(&mut random, 800);
            let level = i32::from(draft.body[0] - b'0');
            world.append_patiently(&draft, level);
        }
        30..34 => commit(world, &mut random),
        34 => world.remove(&format!("T{}", random.below(3))),
        35 => world.save_offsets(),
        36 => {
            let count = 1 + random.below(3) as usize;
            world.retain(count);
        }
        37 => world.run(50),
        38 => {
            let (topic, queue_id) = (format!("T{}", random.below(3)), random.below(3) as i32);
            world.read(&topic, queue_id);
        }
        _ => world.run(5),
    }
    world.random = random;
}

fn commit(world: &mut World, random: &mut SimRandom) {
    let (topic, queue_id) = (format!("T{}", random.below(3)), random.below(3) as i32);
    let shard = world.shard();
    let Some(queue) = shard.queues().find(&topic, queue_id) else {
        return;
    };
    let (min, readable) = shard.bounds(queue).unwrap();
    let offset = min + random.below(readable - min + 1);
    world.commit(
        &topic,
        &format!("g{}", random.below(2)),
        queue_id,
        offset as i64,
    );
}

fn setup(seed: u64, ack: AckPoint) -> Setup {
    let mut random = SimRandom::new(seed.wrapping_mul(77));
    let mut setup = Setup::new(seed, ack);
    setup.segment_bytes = [64, 128, 256][random.below(3) as usize] * 1024;
    setup.ring_bytes = [128, 256, 1024][random.below(3) as usize] * 1024;
    setup.run_units = [8, 64, 300][random.below(3) as usize];
    setup.run_log_bytes = [32, 100, 1000][random.below(3) as usize] * 1024;
    setup.cold_slots = 1 + random.below(6) as usize;
    setup
}

fn one(seed: u64, ack: AckPoint) {
    let _telling = Telling(seed, ack);
    let mut world = World::new(setup(seed, ack));
    let most =
        (world.setup.segment_bytes * 7 / 8).min(world.setup.ring_bytes as u64 / 2 - 9000) - 600;
    for _ in 0..4 {
        let actions = 10 + world.random.below(60);
        for _ in 0..actions {
            act(&mut world, most);
        }
        // Somewhere between two looks of the shard.
        if world.random.one_in(2) {
            let by_us = world.random.below(600);
            world.machine.advance_us(by_us);
        }
        let kind = if world.random.one_in(2) {
            Crash::Kill
        } else {
            Crash::PowerLoss
        };
        world.crash_and_check(kind);
        if world.random.one_in(4) {
            same_without_runs(&mut world);
        }
    }
    finish(&mut world);
}

/// P8: two starts see the same, and so does one without any derived file.
fn same_without_runs(world: &mut World) {
    world.settle_synced();
    let stopped = |world: &mut World| {
        world.crash(Crash::Kill);
        world.start();
        world.picture()
    };
    let first = stopped(world);
    world.settle_synced();
    world.crash(Crash::Kill);
    world.remove_runs();
    world.start();
    let second = world.picture();
    let strip = |text: &str| {
        // Delayed messages may have come due between the two starts.
        let lines = text.lines().filter(|line| !line.starts_with("end "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    for line in strip(&first) {
        let (name, _) = line.split_once("..").unwrap_or((&line, ""));
        assert!(
            second.contains(name),
            "seed {}: {name} of\n{first}\nin\n{second}",
            world.setup.seed
        );
    }
    world.check();
}

/// A clean stop leaves everything on disk, and every delayed message has come.
fn finish(world: &mut World) {
    for _ in 0..5_000 {
        world.step();
        if world.shard().delayed_pending().is_empty() {
            break;
        }
    }
    world.check();
    world.check_delivered();
    let live = world.live();
    live.shard.stop(live.now, &mut live.driver);
    for _ in 0..5_000 {
        if world.shard().is_drained() {
            break;
        }
        world.step();
    }
    assert!(
        world.shard().is_drained(),
        "seed {}: not drained",
        world.setup.seed
    );
    let live = world.live();
    live.driver.refresh_clock();
    let tail = live.shard.log().tail();
    world.crash(Crash::PowerLoss);
    world.start();
    assert_eq!(
        world.report.end, tail,
        "seed {}: a clean stop loses nothing",
        world.setup.seed
    );
    assert_eq!(
        world.report.records, 0,
        "runs cover everything after a clean stop"
    );
    world.check();
}

fn many(ack: AckPoint) {
    let (first, count) = (first_seed(), seeds());
    for seed in first..first + count {
        one(seed, ack);
    }
}

#[test]
fn buffered_acknowledgements_survive_kills_at_random_moments() {
    many(AckPoint::Buffered);
}

#[test]
fn written_acknowledgements_survive_kills_at_random_moments() {
    many(AckPoint::Written);
}

#[test]
fn synced_acknowledgements_survive_power_loss_at_random_moments() {
    many(AckPoint::Synced);
}
