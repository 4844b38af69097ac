//! What must be kept, and what must not come back: retention, removals, delays, offsets, files.

use std::path::Path;

use shard::cold::{Answer, Question};
use shard::event::EVENT_TOPIC;
use shard::io::Storage;
use shard::io::sim::Crash;
use shard::recovery::SavedOffset;
use shard::{AckPoint, Refusal, StoreError, TIMER_TOPIC, address};
use wire::message::{RecordView, properties};

use super::world::{Draft, LOG_DIR, RUN_DIR, Setup, World};

const MODES: [AckPoint; 3] = [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced];

fn fill(world: &mut World, topic: &str, segments: u64) {
    let until = world.shard().log().tail() + segments * world.setup.segment_bytes;
    let mut number = 0;
    while world.shard().log().tail() < until {
        number += 1;
        let body = format!("1 {number} {}", "y".repeat(1500));
        world
            .append_patiently(&Draft::new(topic, 0, body.as_bytes()), 0)
            .unwrap();
    }
    world.settle_synced();
    world.run(300);
}

fn next_offset(world: &mut World, topic: &str, queue_id: i32) -> u64 {
    let shard = world.shard();
    let index = shard.queues().find(topic, queue_id).expect("a queue");
    shard.queues().get(index).unwrap().next_offset
}

fn retain_until(world: &mut World, position: u64) {
    for _ in 0..100 {
        world.retain(1);
        world.run(200);
        if world.shard().log().min_position() >= position {
            return;
        }
    }
    panic!("retention never came to {position}");
}

#[test]
fn an_idle_queue_keeps_its_end_when_retention_takes_all_its_messages() {
    for ack in MODES {
        let mut world = World::new(Setup::new(1, ack));
        for _ in 0..7 {
            world
                .append_patiently(&Draft::new("idle", 2, b"1"), 0)
                .unwrap();
        }
        world.commit("idle", "g", 2, 5);
        fill(&mut world, "busy", 4);
        let boundary = 3 * world.setup.segment_bytes;
        retain_until(&mut world, boundary);
        world.crash_and_check(Crash::Kill);
        assert_eq!(next_offset(&mut world, "idle", 2), 7, "{ack:?}");
        // The note itself goes with its segment, and is made again before.
        fill(&mut world, "busy", 4);
        let boundary = world.segment_start(world.live.as_ref().unwrap().shard.log().tail() - 1);
        retain_until(&mut world, boundary);
        world.crash(Crash::Kill);
        world.remove_runs();
        world.start();
        assert_eq!(next_offset(&mut world, "idle", 2), 7, "{ack:?}");
        let appended = world
            .append_patiently(&Draft::new("idle", 2, b"1"), 0)
            .unwrap();
        assert_eq!(appended.queue_offset, 7);
        world.check();
    }
}

#[test]
fn retention_crashed_at_any_point_leaves_no_hole_in_the_row_of_segments() {
    for kind in [Crash::Kill, Crash::PowerLoss] {
        for at in 1..80 {
            let mut world = World::new(Setup::new(2, AckPoint::Written));
            fill(&mut world, "busy", 6);
            assert!(world.retain(5) >= 4);
            world.crash_at = Some((world.steps + at, kind));
            world.run(60);
            world.crash_at = None;
            world.crash_and_check(kind);
            fill(&mut world, "busy", 2);
            world.check();
        }
    }
}

#[test]
fn a_dropped_segment_is_recycled_and_its_old_records_never_come_back() {
    let mut world = World::new(Setup::new(3, AckPoint::Written));
    for round in 0..6 {
        fill(&mut world, "busy", 3);
        assert!(world.retain(2) == 2, "round {round}");
        world.run(200);
        let kind = if round % 2 == 0 {
            Crash::Kill
        } else {
            Crash::PowerLoss
        };
        world.crash_and_check(kind);
    }
    let leftovers = world
        .files(LOG_DIR)
        .into_iter()
        .filter(|file| file.name.len() != 20);
    assert_eq!(
        leftovers.count(),
        0,
        "a start removes what was on its way out"
    );
}

#[test]
fn a_removed_topic_starts_anew_and_its_old_queues_take_nothing() {
    for ack in MODES {
        let mut world = World::new(Setup::new(4, ack));
        for _ in 0..9 {
            world
                .append_patiently(&Draft::new("T0", 0, b"1 old"), 0)
                .unwrap();
        }
        world.commit("T0", "g", 0, 4);
        let old = world.shard().queues().find("T0", 0).unwrap();
        world.remove("T0");
        let live = world.live();
        let message = shard::NewMessage {
            queue: old,
            flag: 0,
            sys_flag: 0,
            born_timestamp: 0,
            born_host: "127.0.0.1:1".parse().unwrap(),
            reconsume_times: 0,
            prepared_transaction_offset: 0,
            body: b"1",
            properties: &[],
            tags_code: 0,
            unique_key: None,
            keys: None,
        };
        let refused = live.shard.append(live.now, &message);
        assert_eq!(refused, Err(Refusal::NoQueue { shard: 3 }));
        let appended = world
            .append_patiently(&Draft::new("T0", 0, b"1 new"), 0)
            .unwrap();
        assert_eq!(appended.queue_offset, 0);
        world.settle();
        world.crash_and_check(Crash::Kill);
        assert_eq!(world.read("T0", 0).unwrap().1.len(), 1);
        assert!(world.shard().offsets().get("T0", "g", 0).is_none());
    }
}

#[test]
fn a_removal_that_a_crash_takes_back_takes_no_messages_along() {
    let mut world = World::new(Setup {
        run_units: 20,
        ..Setup::new(5, AckPoint::Buffered)
    });
    for _ in 0..19 {
        world
            .append_patiently(&Draft::new("T0", 0, b"1 message"), 0)
            .unwrap();
    }
    world.settle_synced();
    // The run ends in front of the removal, and is written while the removal is only in memory.
    world
        .append_patiently(&Draft::new("T1", 0, b"1 message"), 0)
        .unwrap();
    world.step();
    world.settle_synced();
    world.remove("T0");
    world.run(12);
    world.crash(Crash::PowerLoss);
    world.start();
    world.check();
    let picture = world.picture();
    world.crash(Crash::Kill);
    world.remove_runs();
    world.start();
    assert_eq!(world.picture(), picture, "runs and log tell the same");
}

#[test]
fn delayed_messages_of_a_removed_topic_do_not_reach_the_topic_made_anew() {
    let mut world = World::new(Setup::new(6, AckPoint::Written));
    world
        .append_patiently(&Draft::new("T0", 0, b"3 for the old topic"), 3)
        .unwrap();
    world.remove("T0");
    world
        .append_patiently(&Draft::new("T0", 0, b"3 for the new topic"), 3)
        .unwrap();
    world.settle();
    world.crash_and_check(Crash::Kill);
    world.run(1_000);
    let (_, found) = world.read("T0", 0).unwrap();
    let bodies: Vec<&[u8]> = found
        .iter()
        .map(|raw| RecordView::parse(raw).unwrap().body())
        .collect();
    assert_eq!(bodies, [&b"3 for the new topic"[..]]);
    assert_eq!(world.shard().counters().delayed_dropped, 1);
}

#[test]
fn a_delayed_message_is_delivered_after_a_start_to_a_queue_that_has_no_other() {
    for ack in MODES {
        let mut world = World::new(Setup::new(7, ack));
        world
            .append_patiently(&Draft::new("lonely", 5, b"2 wait"), 2)
            .unwrap();
        world.settle();
        world.machine.advance_us(500_000);
        world.crash_and_check(Crash::Kill);
        world.run(500);
        assert_eq!(world.read("lonely", 5).unwrap().1.len(), 1, "{ack:?}");
        assert!(world.shard().delayed_pending().is_empty());
    }
}

#[test]
fn delayed_messages_that_only_the_disk_holds_are_delivered_after_a_start() {
    let mut world = World::new(Setup::new(20, AckPoint::Written));
    for number in 0..300u32 {
        let body = format!("2 {number} {}", "d".repeat(300));
        let draft = Draft::new("T0", 0, body.as_bytes());
        world.append_patiently(&draft, 2).unwrap();
    }
    world.settle();
    world.crash_and_check(Crash::Kill);
    world.machine.advance_us(200_000);
    world.run(400);
    assert_eq!(next_offset(&mut world, "T0", 0), 300);
    world.check();
    world.check_delivered();
}

#[test]
fn delayed_messages_survive_retention_of_their_progress() {
    let mut world = World::new(Setup::new(8, AckPoint::Written));
    for _ in 0..5 {
        world
            .append_patiently(&Draft::new("T0", 0, b"1 early"), 1)
            .unwrap();
    }
    world.run(300);
    fill(&mut world, "busy", 3);
    let tail = world.shard().log().tail();
    world
        .append_patiently(&Draft::new("T0", 0, b"3 late"), 3)
        .unwrap();
    let boundary = world.segment_start(tail);
    retain_until(&mut world, boundary);
    world.crash_and_check(Crash::Kill);
    world.run(1_000);
    assert_eq!(
        next_offset(&mut world, "T0", 0),
        6,
        "nothing is delivered twice"
    );
    assert_eq!(next_offset(&mut world, TIMER_TOPIC, 0), 6);
    world.check();
}

#[test]
fn later_commits_win_over_a_settings_file_saved_beyond_the_end_of_the_log() {
    let mut world = World::new(Setup::new(9, AckPoint::Written));
    for _ in 0..20 {
        world
            .append_patiently(&Draft::new("T0", 0, b"1"), 0)
            .unwrap();
    }
    world.settle_synced();
    let commit = |world: &mut World, offset| {
        world.commit("T0", "g", 0, offset);
        world.settle();
    };
    commit(&mut world, 3);
    // As after a power loss that took the end of the log, but not the file.
    let saved = |topic: &str, offset| SavedOffset {
        topic: topic.into(),
        group: "g".into(),
        queue_id: 0,
        offset,
    };
    world.saved = (vec![saved("T0", 50), saved("other", 4)], 1 << 40);
    world.crash_and_check(Crash::Kill);
    let offset_of = |world: &mut World, topic: &str| {
        world
            .shard()
            .offsets()
            .get(topic, "g", 0)
            .map(|entry| entry.offset)
    };
    assert_eq!(offset_of(&mut world, "T0"), Some(3), "the log knows better");
    commit(&mut world, 5);
    world.crash_and_check(Crash::Kill);
    assert_eq!(offset_of(&mut world, "T0"), Some(5));
    // A queue that comes up empty has nothing that could have been consumed.
    world.shard().open_queue("other", 0).unwrap();
    assert_eq!(offset_of(&mut world, "other"), Some(0));
}

#[test]
fn a_committed_offset_never_lies_beyond_the_end_of_its_queue() {
    let mut world = World::new(Setup::new(10, AckPoint::Written));
    for _ in 0..4 {
        world
            .append_patiently(&Draft::new("T0", 0, b"1"), 0)
            .unwrap();
    }
    world.settle_synced();
    let (topic, group) = ("T0".to_owned(), "g".to_owned());
    world.saved = (
        vec![SavedOffset {
            topic,
            group,
            queue_id: 0,
            offset: 100,
        }],
        0,
    );
    world.crash_and_check(Crash::PowerLoss);
    let offset_of = |world: &mut World| world.shard().offsets().get("T0", "g", 0).unwrap().offset;
    assert_eq!(offset_of(&mut world), 4);
    // Nor do new messages count as consumed after another start with the same old file.
    for _ in 0..5 {
        world
            .append_patiently(&Draft::new("T0", 0, b"1"), 0)
            .unwrap();
    }
    world.settle();
    world.crash_and_check(Crash::Kill);
    assert_eq!(offset_of(&mut world), 4);
}

#[test]
fn internal_records_are_never_handed_out_nor_taken_in() {
    let mut world = World::new(Setup::new(11, AckPoint::Written));
    world
        .append_patiently(&Draft::new("T0", 0, b"1"), 0)
        .unwrap();
    world.settle();
    let at = world.shard().log().tail();
    world.commit("T0", "g", 0, 1);
    world.settle();
    assert!(world.shard().log().tail() > at);
    let ask = |world: &mut World, position| {
        let physical_offset = address::physical(3, position);
        world.ask(Question::Record { physical_offset }).unwrap()
    };
    assert_eq!(
        ask(&mut world, at),
        Answer::Records(Vec::new()),
        "an internal record"
    );
    let Answer::Records(found) = ask(&mut world, 0) else {
        panic!("the message")
    };
    assert_eq!(found.len(), 1);
    assert_eq!(world.shard().open_queue(EVENT_TOPIC, 0), None);
    for odd in [1, 7, 91, at + 1, at + 100, u64::from(u32::MAX)] {
        assert_eq!(
            ask(&mut world, odd),
            Answer::Records(Vec::new()),
            "at {odd}"
        );
    }
}

#[test]
fn a_record_is_not_found_by_its_offset_before_its_acknowledgement() {
    let mut world = World::new(Setup::new(12, AckPoint::Synced));
    world
        .append_patiently(&Draft::new("T0", 0, b"1"), 0)
        .unwrap();
    world.settle();
    world.machine.set_frozen(true);
    let appended = world
        .append(&Draft {
            keys: "k".into(),
            ..Draft::new("T0", 0, b"1 new")
        })
        .unwrap();
    let question = Question::Record {
        physical_offset: appended.physical_offset,
    };
    assert_eq!(
        world.ask(question.clone()),
        Some(Answer::Records(Vec::new()))
    );
    let by_key = Question::Key(shard::cold::KeyQuestion {
        topic: "T0".into(),
        key: "k".into(),
        unique: false,
        from_ms: 0,
        to_ms: i64::MAX,
        records_max: 9,
    });
    assert_eq!(world.ask(by_key.clone()), Some(Answer::Records(Vec::new())));
    world.machine.set_frozen(false);
    world.settle();
    assert!(matches!(world.ask(question), Some(Answer::Records(found)) if found.len() == 1));
    assert!(matches!(world.ask(by_key), Some(Answer::Records(found)) if found.len() == 1));
}

fn set_len(world: &World, path: &Path, bytes: u64) {
    use shard::io::{OpenMode, StoreFile};
    let file = world
        .machine
        .storage()
        .open(path, OpenMode::ReadWrite)
        .unwrap();
    file.truncate(bytes).unwrap();
    file.sync().unwrap();
}

#[test]
fn a_middle_segment_of_an_odd_length_stops_the_start_by_name() {
    for with_runs in [true, false] {
        for bytes in [0, 1, 4096, 128 * 1024 - 1] {
            let mut world = World::new(Setup::new(13, AckPoint::Written));
            fill(&mut world, "busy", 4);
            world.crash(Crash::Kill);
            if !with_runs {
                world.remove_runs();
            }
            let name = address::segment_name(3, world.setup.segment_bytes);
            set_len(&world, &Path::new(LOG_DIR).join(&name), bytes);
            match world.recover() {
                Err(StoreError::MiddleSegment {
                    path, bytes: found, ..
                }) => {
                    assert!(path.ends_with(&name), "{path:?}");
                    assert_eq!(found, bytes);
                }
                Err(other) => panic!("{bytes} bytes: {other}"),
                Ok(_) => panic!("{bytes} bytes: started"),
            }
        }
    }
}

#[test]
fn a_last_segment_of_any_length_is_made_whole_and_keeps_its_records() {
    let full = 128 * 1024;
    for bytes in [0, 1, 4095, 4096, 5000, 20_000, full - 1, full] {
        let mut world = World::new(Setup {
            segment_bytes: full,
            ..Setup::new(14, AckPoint::Written)
        });
        for number in 0..12 {
            let body = format!("1 {number} {}", "z".repeat(700));
            world
                .append_patiently(&Draft::new("T0", 0, body.as_bytes()), 0)
                .unwrap();
        }
        world.settle_synced();
        world.crash(Crash::Kill);
        let path = Path::new(LOG_DIR).join(address::segment_name(3, 0));
        set_len(&world, &path, bytes);
        world.start();
        let (end, model) = (world.report.end, world.model.clone());
        let whole = model.queues().values().next().map_or(0, Vec::len);
        assert_eq!(world.read("T0", 0).unwrap().1.len(), whole, "{bytes} bytes");
        assert!(end <= bytes.max(200), "{bytes} bytes, end {end}");
        world
            .append_patiently(&Draft::new("T0", 0, b"1 more"), 0)
            .unwrap();
        world.settle_synced();
        world.crash_and_check(Crash::PowerLoss);
        assert_eq!(world.read("T0", 0).unwrap().1.len(), whole + 1);
    }
}

#[test]
fn a_missing_segment_that_the_write_buffer_has_messages_for_stops_the_start() {
    let mut world = World::new(Setup::new(15, AckPoint::Buffered));
    fill(&mut world, "busy", 1);
    world.machine.set_frozen(true);
    while world.append(&Draft::new("T0", 0, &[b'1'; 3000])).is_ok() {}
    world.crash(Crash::Kill);
    for file in world.files(LOG_DIR).iter().skip(1) {
        world
            .machine
            .storage()
            .remove(&Path::new(LOG_DIR).join(&file.name))
            .unwrap();
    }
    assert!(matches!(
        world.recover(),
        Err(StoreError::DamagedMiddle { .. })
    ));
}

#[test]
fn a_record_changed_outside_its_body_is_taken_by_no_start() {
    // Each byte of the header, the topic and the properties, which the body's checksum misses.
    let draft = Draft::new("T0", 0, &[b'1'; 300]);
    let mut missed = 0;
    for at in 0..160 {
        let mut world = World::new(Setup::new(21, AckPoint::Synced));
        world.append_patiently(&draft, 0).unwrap();
        world.settle();
        let second = world.append_patiently(&draft, 0).unwrap();
        world.settle();
        world.crash(Crash::Kill);
        let position = address::split(second.physical_offset).unwrap().1;
        let len = second.end - position;
        let at = if at < 88 { at } else { len - (at - 87) };
        world.flip_byte(position + at);
        world.start();
        let wanted = world.model.queues()[&("T0".to_owned(), 0)].clone();
        let (_, found) = world.read("T0", 0).unwrap();
        assert_eq!(found[0], wanted[0].raw);
        if found.len() > 1 {
            missed += 1;
        }
    }
    assert_eq!(missed, 0, "changed records were served");
}

#[test]
fn leftovers_are_removed_and_foreign_files_left_alone() {
    let mut world = World::new(Setup::new(16, AckPoint::Written));
    fill(&mut world, "busy", 2);
    let storage = world.machine.storage();
    let run = shard::run::file_name(3, 0);
    let segment = address::segment_name(3, 0);
    let gone = [
        Path::new(RUN_DIR).join(format!("{run}.tmp")),
        Path::new(RUN_DIR).join(format!("{run}.removing")),
        Path::new(LOG_DIR).join(format!("{segment}.removing")),
    ];
    let stay = [
        Path::new(RUN_DIR).join("notes.txt"),
        Path::new(RUN_DIR).join("x.run"),
        Path::new(LOG_DIR).join("README"),
        Path::new(LOG_DIR).join(address::segment_name(4, 0)),
        Path::new(RUN_DIR).join(shard::run::file_name(4, 0)),
    ];
    for path in gone.iter().chain(&stay) {
        storage.write_file(path, b"something").unwrap();
    }
    storage
        .create_dirs(&Path::new(LOG_DIR).join(address::segment_name(3, 1 << 30)))
        .unwrap();
    world.crash_and_check(Crash::Kill);
    let there = |path: &Path| storage.read_file(path).is_ok();
    assert!(gone.iter().all(|path| !there(path)));
    assert!(stay.iter().all(|path| there(path)));
    assert!(
        world
            .report
            .repairs
            .iter()
            .any(|text| text.contains("README"))
    );
}

#[test]
fn many_keys_per_message_do_not_fill_the_room_for_keys() {
    let setup = Setup {
        segment_bytes: 16 << 20,
        ring_bytes: 4 << 20,
        units_max: 1 << 16,
        run_units: 1 << 16,
        run_log_bytes: 1 << 40,
        ..Setup::new(18, AckPoint::Buffered)
    };
    let mut world = World::new(setup);
    let keys: Vec<String> = (0..64).map(|key| format!("k{key}")).collect();
    let draft = Draft {
        keys: keys.join(" "),
        ..Draft::new("T0", 0, b"1")
    };
    for _ in 0..((1 << 18) / 64) {
        world.append_patiently(&draft, 0).unwrap();
    }
    world.settle_synced();
    world.run(200);
    assert_eq!(world.files(RUN_DIR).len(), 1, "keys alone make a run");
}

#[test]
fn a_delayed_message_keeps_its_properties_and_names_its_queue() {
    let mut world = World::new(Setup::new(19, AckPoint::Written));
    let draft = Draft {
        tag: "blue".into(),
        keys: "one two".into(),
        ..Draft::new("T0", 1, b"1 x")
    };
    world.append_patiently(&draft, 1).unwrap();
    world.run(300);
    let (_, found) = world.read("T0", 1).unwrap();
    let view = RecordView::parse(&found[0]).unwrap();
    assert_eq!(
        properties::get_str(view.properties(), properties::TAGS),
        Some("blue")
    );
    assert_eq!(
        properties::get_str(view.properties(), properties::KEYS),
        Some("one two")
    );
}
