//! A disk that fails, hangs, freezes or is full: what is refused, what goes on, what resumes.

use shard::cold::{Answer, Question};
use shard::io::sim::{Crash, Effect, Fault, Operation};
use shard::{AckPoint, Refusal};

use super::world::{Draft, LOG_DIR, RUN_DIR, Setup, World};

const MODES: [AckPoint; 3] = [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced];
const EIO: i32 = 5;

fn draft(number: u32) -> Draft {
    Draft::new(
        "T0",
        0,
        format!("1 message {number} {}", "x".repeat(2000)).as_bytes(),
    )
}

/// A world with some messages, all on the device.
fn filled(setup: Setup, count: u32) -> World {
    let mut world = World::new(setup);
    for number in 0..count {
        world.append_patiently(&draft(number), 0).unwrap();
    }
    world.settle_synced();
    world.run(200);
    world
}

fn plan(world: &World, operation: Operation, path: &str, times: u64, effect: Effect) {
    let path_contains = Some(path.to_owned());
    world.machine.storage().plan(Fault {
        operation,
        path_contains,
        skip: 0,
        times,
        effect,
    });
}

/// Appends until the shard is poisoned; checks that nothing is acknowledged from then on, that
/// reads go on, and that a start without the fault finds everything acknowledged.
fn check_poisoned(mut world: World, what: &str) {
    let before = world.model.acked;
    for number in 0..20 {
        let _ = world.append(&draft(1000 + number));
    }
    for _ in 0..2_000 {
        world.step();
        if world.shard().log().poison().is_some() {
            break;
        }
    }
    let reason = world
        .shard()
        .log()
        .poison()
        .unwrap_or_else(|| panic!("{what}: not poisoned"))
        .to_owned();
    assert!(
        reason.contains("commitlog") && reason.contains("errno"),
        "{what}: {reason}"
    );
    let (acked, watermark) = (world.model.acked, world.shard().watermark());
    assert!(acked >= before);
    world.machine.storage().clear_faults();
    world.run(300);
    assert_eq!(
        world.shard().watermark(),
        watermark,
        "{what}: the watermark moved"
    );
    match world.append(&draft(5)) {
        Err(Refusal::Poisoned { reason: told, .. }) => assert_eq!(told, reason),
        other => panic!("{what}: {other:?}"),
    }
    assert!(world.shard().refusing().is_some());
    let (first, found) = world.read("T0", 0).unwrap();
    let readable = found.len();
    assert_eq!(first, 0, "{what}");
    assert!(readable >= 60, "{what}: reads go on");
    let promised = world.promised(Crash::Kill);
    world.crash(Crash::Kill);
    world.start();
    assert!(
        world.report.end >= promised,
        "{what}: {} of {promised}",
        world.report.end
    );
    world.check();
    let (_, found) = world.read("T0", 0).unwrap();
    assert!(
        found.len() >= readable,
        "{what}: what was readable is still there"
    );
}

#[test]
fn a_failed_write_poisons_the_shard() {
    for ack in MODES {
        for effect in [Effect::Fail(EIO), Effect::Fail(28), Effect::Short] {
            let world = filled(Setup::new(1, ack), 60);
            plan(&world, Operation::Write, LOG_DIR, 1, effect);
            check_poisoned(world, &format!("{ack:?} {effect:?}"));
        }
    }
}

#[test]
fn a_failed_flush_poisons_the_shard() {
    for ack in MODES {
        let world = filled(Setup::new(2, ack), 60);
        plan(&world, Operation::Flush, LOG_DIR, 1, Effect::Fail(EIO));
        check_poisoned(world, &format!("{ack:?}"));
    }
}

#[test]
fn a_read_only_remount_poisons_the_shard_and_reads_go_on() {
    for ack in MODES {
        let mut world = filled(Setup::new(3, ack), 60);
        world.machine.storage().set_read_only(true);
        for number in 0..20 {
            let _ = world.append(&draft(number));
        }
        world.run(1_000);
        assert!(world.shard().log().poison().is_some(), "{ack:?}");
        assert!(world.read("T0", 0).unwrap().1.len() >= 60);
        world.machine.storage().set_read_only(false);
        world.crash_and_check(Crash::Kill);
    }
}

#[test]
fn nothing_is_acknowledged_while_a_write_or_flush_hangs() {
    for (ack, operation) in [
        (AckPoint::Written, Operation::Write),
        (AckPoint::Synced, Operation::Write),
        (AckPoint::Synced, Operation::Flush),
    ] {
        let mut world = filled(Setup::new(4, ack), 60);
        plan(&world, operation, LOG_DIR, 1, Effect::Hang);
        let watermark = world.shard().watermark();
        let appended = world.append(&draft(1)).unwrap();
        world.run(2_000);
        assert_eq!(world.machine.held(), 1, "the fault was met");
        assert_eq!(
            world.shard().watermark(),
            watermark,
            "{ack:?} {operation:?}"
        );
        let (_, found) = world.read("T0", 0).unwrap();
        assert_eq!(
            found.len(),
            60,
            "nothing is readable before its acknowledgement"
        );
        assert_eq!(world.machine.release_held(), 1);
        world.settle();
        assert!(world.shard().watermark() >= appended.end);
        world.check();
    }
}

#[test]
fn a_frozen_disk_is_absorbed_up_to_the_buffer_and_sends_resume_by_themselves() {
    let mut world = filled(Setup::new(5, AckPoint::Buffered), 10);
    world.machine.set_frozen(true);
    let mut acked = 0u32;
    let refusal = loop {
        match world.append(&draft(acked)) {
            Ok(_) => acked += 1,
            Err(refusal) => break refusal,
        }
        world.step();
        assert!(acked < 10_000, "the buffer has a bound");
    };
    assert!(acked > 40, "{acked} sends were absorbed");
    let text = refusal.to_string();
    assert!(matches!(refusal, Refusal::BufferFull { .. }), "{text}");
    assert!(text.contains("bufferBytes"), "{text}");
    for _ in 0..50 {
        world.step();
        assert!(world.append(&draft(0)).is_err(), "still frozen");
    }
    world.machine.set_frozen(false);
    world.append_patiently(&draft(1), 0).unwrap();
    world.settle_synced();
    world.check();
    world.crash_and_check(Crash::Kill);
}

#[test]
fn a_frozen_disk_gives_no_synced_acknowledgement_before_the_thaw() {
    let mut world = filled(Setup::new(6, AckPoint::Synced), 10);
    world.machine.set_frozen(true);
    let watermark = world.shard().watermark();
    for number in 0..10 {
        world.append(&draft(number)).unwrap();
    }
    world.run(500);
    assert_eq!(world.shard().watermark(), watermark);
    world.machine.set_frozen(false);
    world.settle();
    assert!(world.shard().watermark() > watermark);
    world.check();
}

#[test]
fn a_kill_while_the_disk_is_frozen_loses_nothing_buffered() {
    let mut world = filled(Setup::new(7, AckPoint::Buffered), 10);
    world.machine.set_frozen(true);
    for number in 0..40 {
        world.append(&draft(number)).unwrap();
    }
    world.run(20);
    world.crash_and_check(Crash::Kill);
    assert!(world.report.replayed_bytes > 40 * 2000);
    let (_, found) = world.read("T0", 0).unwrap();
    assert_eq!(found.len(), 50);
}

#[test]
fn a_full_disk_refuses_by_name_and_sends_resume_when_space_returns() {
    for (ack, stop) in MODES.into_iter().flat_map(|ack| [(ack, 90), (ack, 101)]) {
        let mut world = filled(
            Setup {
                disk_stop_percent: stop,
                ..Setup::new(8, ack)
            },
            10,
        );
        let storage = world.machine.storage();
        storage.set_capacity_bytes(1); // Nothing can grow any more.
        let mut refused = None;
        for number in 0..3_000 {
            if let Err(refusal) = world.append(&draft(number))
                && !matches!(refusal, Refusal::BufferFull { .. })
            {
                refused = Some(refusal);
                break;
            }
            world.step();
        }
        let refused = refused.expect("the prepared segments were used up");
        match &refused {
            Refusal::DiskFull { limit_percent, .. } => assert_eq!(*limit_percent, stop),
            Refusal::SegmentMissing { reason, .. } => {
                assert!(reason.contains("os error 28"), "{ack:?}: {refused}");
            }
            other => panic!("{ack:?}: {other}"),
        }
        world.run(3_000);
        assert!(world.append(&draft(0)).is_err(), "{ack:?}: still full");
        assert!(
            world.shard().log().poison().is_none(),
            "{ack:?}: a full disk is no lost write"
        );
        storage.set_capacity_bytes(1 << 40);
        world.append_patiently(&draft(1), 0).unwrap();
        world.settle_synced();
        world.check();
        world.crash_and_check(Crash::PowerLoss);
    }
}

#[test]
fn retention_makes_room_on_a_full_disk_and_sends_resume() {
    let mut setup = Setup {
        disk_stop_percent: 101,
        ..Setup::new(12, AckPoint::Written)
    };
    setup.run_units = 16;
    let mut world = filled(setup, 200);
    world
        .append_patiently(&Draft::new("idle", 0, b"1"), 0)
        .unwrap();
    for number in 0..200 {
        world.append_patiently(&draft(number), 0).unwrap();
    }
    world.settle_synced();
    world.run(200);
    world.machine.storage().set_capacity_bytes(1);
    while world.append(&draft(1)).is_ok() {
        world.settle();
    }
    assert!(
        world.retain(3) > 0,
        "the notes of retention have their own room"
    );
    world.append_patiently(&draft(2), 0).unwrap();
    for number in 0..60 {
        world.append_patiently(&draft(number), 0).unwrap();
    }
    world.check();
    world.crash_and_check(Crash::Kill);
}

#[test]
fn a_segment_whose_preparation_failed_half_way_is_prepared_again() {
    for operation in [
        Operation::Allocate,
        Operation::Flush,
        Operation::SyncDir,
        Operation::Create,
    ] {
        let mut world = filled(Setup::new(9, AckPoint::Written), 10);
        // The failing file is the next segment that is prepared.
        let ready = world.files(LOG_DIR).len() as u64;
        let next = shard::address::segment_name(3, ready * world.setup.segment_bytes);
        let path = if operation == Operation::SyncDir {
            LOG_DIR.to_owned()
        } else {
            next
        };
        plan(&world, operation, &path, 1, Effect::Fail(EIO));
        for number in 0..900 {
            world.append_patiently(&draft(number), 0).unwrap();
        }
        world.settle_synced();
        assert!(world.shard().log().poison().is_none(), "{operation:?}");
        world.check();
        world.crash_and_check(Crash::PowerLoss);
    }
}

#[test]
fn runs_that_cannot_be_written_are_tried_again_and_units_are_bounded_meanwhile() {
    let mut setup = Setup::new(10, AckPoint::Written);
    (setup.units_max, setup.run_units) = (128, 32);
    let mut world = World::new(setup);
    plan(
        &world,
        Operation::Create,
        RUN_DIR,
        u64::MAX,
        Effect::Fail(28),
    );
    let small = Draft::new("T0", 1, b"1");
    let mut refused = None;
    for _ in 0..2_000 {
        if let Err(refusal) = world.append(&small) {
            refused = Some(refusal);
            break;
        }
        world.step();
    }
    assert!(
        matches!(refused, Some(Refusal::UnitsFull { bound: 128, .. })),
        "{refused:?}"
    );
    world.check();
    world.machine.storage().clear_faults();
    for _ in 0..500 {
        world.append_patiently(&small, 0).unwrap();
    }
    world.check();
    world.crash_and_check(Crash::Kill);
    assert!(world.report.runs > 3);
}

#[test]
fn a_failed_cold_read_fails_its_own_question_only() {
    let mut world = filled(Setup::new(11, AckPoint::Written), 400);
    let queue = world.shard().queues().find("T0", 0).unwrap();
    plan(&world, Operation::Read, LOG_DIR, 1, Effect::Fail(EIO));
    let limits = shard::select::PullLimits {
        messages_max: 4,
        bytes_max: 1 << 20,
    };
    let question = |offset| Question::Pull {
        queue,
        offset,
        wanted: shard::select::Wanted::All,
        limits,
    };
    let first = world.ask(question(0)).unwrap();
    assert!(
        matches!(&first, Answer::Failed(reason) if reason.contains("os error 5")),
        "{first:?}"
    );
    let second = world.ask(question(0)).unwrap();
    assert!(
        matches!(second, Answer::Pull { messages: 4, .. }),
        "{second:?}"
    );
    world.check();
}
