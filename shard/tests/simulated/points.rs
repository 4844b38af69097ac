//! A scripted workload, crashed at every single point of it, and recoveries crashed at every one of
//! their disk operations.

use shard::AckPoint;
use shard::io::sim::{Crash, Effect, Fault, Operation};

use super::world::{Draft, Setup, World};

const MODES: [AckPoint; 3] = [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced];
/// Every kind of disk operation that changes something.
const CHANGES: [Operation; 8] = [
    Operation::Write,
    Operation::Flush,
    Operation::Create,
    Operation::Rename,
    Operation::Remove,
    Operation::Allocate,
    Operation::Truncate,
    Operation::SyncDir,
];

fn setup(seed: u64, ack: AckPoint) -> Setup {
    Setup {
        segment_bytes: 64 * 1024,
        run_units: 10,
        run_log_bytes: 30_000,
        ..Setup::new(seed, ack)
    }
}

/// Sends, batches, delays, commits, a removed topic, rolls, runs and retention; ends early when the
/// world crashes.
fn script(world: &mut World) -> Option<()> {
    for round in 0..4u8 {
        for size in [1usize, 700, 4096, 12_000, 300] {
            let body = vec![b'1' + round % 3; size];
            world.append_patiently(&Draft::new("T0", i32::from(round % 2), &body), 0)?;
        }
        for part in 0..3u8 {
            world.append_patiently(&Draft::new("T1", 0, &[b'2', part, round]), 0)?;
        }
        world.append_patiently(&Draft::new("T2", 1, &[b'1', round]), 1)?;
        if !world.step() {
            return None;
        }
        world.commit("T0", "g", 0, i64::from(round));
        for _ in 0..6 {
            if !world.step() {
                return None;
            }
        }
        if round == 1 {
            world.remove("T1");
        }
        if round == 3 {
            world.retain(1);
        }
        world.append_patiently(&Draft::new("T0", 0, &[b'3'; 20_000]), 0)?;
    }
    for _ in 0..40 {
        if !world.step() {
            return None;
        }
    }
    Some(())
}

/// Runs the script and crashes it at its `at`-th point; `None` once it has fewer points.
fn crashed(seed: u64, ack: AckPoint, kind: Crash, at: u64) -> Option<World> {
    let mut world = World::new(setup(seed, ack));
    world.crash_at = Some((at, kind));
    if script(&mut world).is_some() {
        return None;
    }
    world.crash_at = None;
    Some(world)
}

fn every_point(ack: AckPoint, kind: Crash, seeds: u64) -> u64 {
    let mut crashes = 0;
    for seed in 1..=seeds {
        for at in 1.. {
            let Some(mut world) = crashed(seed, ack, kind, at) else {
                break;
            };
            world.crash_and_check(kind);
            // Life goes on with dense offsets.
            world
                .append_patiently(&Draft::new("T0", 0, b"1 after"), 0)
                .unwrap();
            world.check();
            crashes += 1;
        }
    }
    crashes
}

#[test]
fn a_kill_at_any_point_keeps_what_was_acknowledged() {
    for ack in MODES {
        let crashes = every_point(ack, Crash::Kill, 1);
        println!("{ack:?}: {crashes} kills");
        assert!(crashes > 100, "{crashes} points in the script");
    }
}

#[test]
fn a_power_loss_at_any_point_keeps_what_was_synced() {
    for ack in MODES {
        let crashes = every_point(ack, Crash::PowerLoss, 3);
        println!("{ack:?}: {crashes} power losses");
        assert!(crashes > 300, "{crashes} points in the script");
    }
}

/// Recovers with a disk that fails at the `skip`-th operation of a kind; `true` if it came so far.
fn broken_recovery(world: &mut World, operation: Operation, skip: u64, effect: Effect) -> bool {
    let storage = world.machine.storage();
    let before = storage.count(operation);
    storage.plan(Fault {
        operation,
        path_contains: None,
        skip,
        times: 1,
        effect,
    });
    // A run that cannot be written does not stop a recovery, so it may well succeed.
    let _ = world.recover();
    storage.clear_faults();
    storage.count(operation) - before > skip
}

#[test]
fn a_crash_at_any_operation_of_a_recovery_changes_nothing() {
    let mut crashes = 0;
    for ack in MODES {
        for (kind, effect) in [
            (Crash::Kill, Effect::Fail(5)),
            (Crash::PowerLoss, Effect::PowerOff),
        ] {
            for operation in CHANGES {
                for skip in 0.. {
                    let at = 60 + skip * 7 % 90;
                    let mut world = crashed(5, ack, kind, at).expect("the script is longer");
                    let promised = world.promised(kind);
                    world.crash(kind);
                    if !broken_recovery(&mut world, operation, skip, effect) {
                        break;
                    }
                    world.crash(kind);
                    world.start();
                    let (end, why) = (world.report.end, world.report.stopped_by.clone());
                    assert!(
                        end >= promised,
                        "{ack:?} {operation:?} {skip}: {end} of {promised} ({why})"
                    );
                    world.check();
                    crashes += 1;
                }
            }
        }
    }
    println!("{crashes} recoveries broken off");
    assert!(crashes > 60, "only {crashes} recoveries were broken off");
}

#[test]
fn two_starts_in_a_row_leave_the_same_bytes() {
    for ack in MODES {
        for at in [40, 70, 100] {
            let mut world = crashed(9, ack, Crash::Kill, at).expect("the script is longer");
            world.crash(Crash::Kill);
            world.recover().unwrap();
            let (first, end) = (world.log_bytes(), world.report.end);
            world.crash(Crash::Kill);
            world.recover().unwrap();
            assert_eq!(world.report.end, end, "{ack:?} at {at}");
            assert!(
                first == world.log_bytes(),
                "{ack:?} at {at}: the second start changed the log"
            );
        }
    }
}

/// Decision 7: the block with the log's tail is rewritten; a tear at any byte of it leaves what was
/// acknowledged before.
#[test]
fn a_tear_at_any_byte_of_the_tail_block_leaves_earlier_messages_whole() {
    let before = tail_block_of(&[b"1 first message", b"1 second message"]);
    let after = tail_block_of(&[b"1 first message", b"1 second message", &[b'1'; 900]]);
    assert_ne!(before, after);
    for tear in 0..=before.len() {
        for newest_first in [false, true] {
            let mut world = World::new(setup(1, AckPoint::Synced));
            for body in [&b"1 first message"[..], b"1 second message"] {
                world
                    .append_patiently(&Draft::new("T0", 0, body), 0)
                    .unwrap();
                world.settle();
            }
            let acked = world.model.acked;
            world.crash(Crash::Kill);
            let (mut torn, other) = if newest_first {
                (after.clone(), &before)
            } else {
                (before.clone(), &after)
            };
            torn[tear..].copy_from_slice(&other[tear..]);
            world.overwrite_log(0, &torn);
            world.start();
            assert!(
                world.report.end >= acked,
                "torn at {tear}: {}",
                world.report.stopped_by
            );
            let (first, found) = world.read("T0", 0).unwrap();
            assert_eq!(first, 0);
            assert!(found.len() >= 2, "torn at {tear}: {} messages", found.len());
            for (message, raw) in world.model.queues()[&("T0".to_owned(), 0)]
                .iter()
                .zip(&found)
            {
                assert_eq!(&message.raw, raw, "torn at {tear}");
            }
            if let Some(third) = found.get(2) {
                assert!(
                    third.windows(900).any(|part| part == [b'1'; 900]),
                    "torn at {tear}: a mix"
                );
            }
        }
    }
}

fn tail_block_of(bodies: &[&[u8]]) -> Vec<u8> {
    let mut world = World::new(setup(1, AckPoint::Synced));
    for body in bodies {
        world
            .append_patiently(&Draft::new("T0", 0, body), 0)
            .unwrap();
        world.settle();
    }
    world.log_bytes()[..4096].to_vec()
}
