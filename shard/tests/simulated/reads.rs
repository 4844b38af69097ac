//! Reading: pulls from disk, filters, keys, times, and damage that is found and never served.

use std::path::Path;

use shard::AckPoint;
use shard::cold::{Answer, KeyQuestion, Question};
use shard::io::sim::Crash;
use shard::select::{PullLimits, Selection, Wanted};
use wire::message::filter::Filter;
use wire::message::{RecordView, tags};

use super::world::{Draft, RUN_DIR, Setup, World};

const LIMITS: PullLimits = PullLimits {
    messages_max: 16,
    bytes_max: 1 << 20,
};

/// Messages over several runs and segments: two queues, two tags, some keys, time passing.
fn filled(setup: Setup, count: u32) -> World {
    let mut world = World::new(setup);
    for number in 0..count {
        let body = format!(
            "1 {number} {}",
            "b".repeat(400 + (number as usize * 37) % 900)
        );
        let draft = Draft {
            tag: if number % 3 == 0 { "red" } else { "green" }.to_owned(),
            keys: format!("n{number} all"),
            ..Draft::new("T0", (number % 2) as i32, body.as_bytes())
        };
        world.append_patiently(&draft, 0).unwrap();
        if number % 10 == 0 {
            world.run(4);
        }
    }
    world.settle_synced();
    world.run(400);
    world
}

#[test]
fn pulls_from_disk_see_the_same_as_pulls_from_memory() {
    for cold_slots in [1, 2, 16] {
        let setup = Setup {
            cold_slots,
            ..Setup::new(1, AckPoint::Written)
        };
        let mut world = filled(setup, 900);
        world.check();
        world.crash_and_check(Crash::Kill);
        assert!(world.shard().counters().cold_windows > 0);
    }
}

#[test]
fn a_tag_filter_passes_over_nothing_that_matches() {
    let mut world = filled(Setup::new(2, AckPoint::Written), 700);
    let code = tags::tags_code(Some("red"));
    let wanted: Vec<Vec<u8>> = world.model.queues()[&("T0".to_owned(), 1)]
        .iter()
        .filter(|message| String::from_utf8_lossy(&message.raw).contains("red"))
        .map(|message| message.raw.clone())
        .collect();
    let found = read_wanted(&mut world, &Wanted::Tags([code].into()));
    assert!(wanted == found, "{} of {}", found.len(), wanted.len());
}

/// Everything of queue 1 of T0 that is wanted, read to its end.
fn read_wanted(world: &mut World, wanted: &Wanted) -> Vec<Vec<u8>> {
    let queue = world.shard().queues().find("T0", 1).unwrap();
    let (mut next, mut found) = (0, Vec::new());
    loop {
        let (selection, records) = world.pull(queue, next, wanted).unwrap();
        found.extend(records);
        match selection {
            Selection::Chosen { next_offset } | Selection::NoneMatched { next_offset } => {
                assert!(next_offset as i64 > next);
                next = next_offset as i64;
            }
            Selection::AtEnd => return found,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_property_filter_reads_exactly_what_matches_from_disk_and_memory() {
    let mut world = filled(Setup::new(2, AckPoint::Written), 700);
    let all = read_wanted(&mut world, &Wanted::All);
    for expression in [
        "TAGS = 'red'",
        "TAGS IS NULL OR TAGS <> 'red'",
        "nothing = 1",
        "TRUE",
    ] {
        let filter = Filter::compile(expression).unwrap();
        let matching = all.iter().filter(|record| filter.matches_record(record));
        let wanted: Vec<Vec<u8>> = matching.cloned().collect();
        let found = read_wanted(&mut world, &Wanted::Matching(filter));
        assert!(
            wanted == found,
            "{expression}: {} of {}",
            found.len(),
            wanted.len()
        );
        let some = !wanted.is_empty() && (wanted.len() < all.len() || expression == "TRUE");
        assert!(
            some || expression == "nothing = 1",
            "{expression}: {}",
            wanted.len()
        );
    }
}

fn by_key(world: &mut World, key: &str, records_max: usize) -> Vec<Vec<u8>> {
    by_key_and_time(world, key, records_max, (0, i64::MAX))
}

fn by_key_and_time(
    world: &mut World,
    key: &str,
    records_max: usize,
    (from_ms, to_ms): (i64, i64),
) -> Vec<Vec<u8>> {
    let question = Question::Key(KeyQuestion {
        topic: "T0".to_owned(),
        key: key.to_owned(),
        unique: false,
        from_ms,
        to_ms,
        records_max,
    });
    match world.ask(question).unwrap() {
        Answer::Records(records) => records,
        other => panic!("{other:?}"),
    }
}

#[test]
fn keys_find_their_messages_in_memory_and_on_disk() {
    for cold_slots in [1, 4] {
        let mut world = filled(
            Setup {
                cold_slots,
                ..Setup::new(3, AckPoint::Written)
            },
            600,
        );
        for start in 0..2 {
            for number in [0, 1, 77, 300, 598, 599] {
                let found = by_key(&mut world, &format!("n{number}"), 8);
                assert_eq!(found.len(), 1, "n{number}");
                let body = RecordView::parse(&found[0]).unwrap().body().to_vec();
                assert!(body.starts_with(format!("1 {number} ").as_bytes()));
            }
            assert_eq!(by_key(&mut world, "all", 10_000).len(), 600);
            assert_eq!(by_key(&mut world, "all", 10).len(), 10);
            assert!(by_key(&mut world, "nobody", 8).is_empty());
            if start == 0 {
                world.crash_and_check(Crash::Kill);
            }
        }
    }
}

#[test]
fn one_key_over_many_blocks_is_found_with_a_single_slot() {
    let mut setup = Setup {
        cold_slots: 1,
        ..Setup::new(4, AckPoint::Written)
    };
    (setup.segment_bytes, setup.ring_bytes) = (8 << 20, 2 << 20);
    (setup.units_max, setup.run_units, setup.run_log_bytes) = (1 << 16, 30_000, 1 << 30);
    let mut world = World::new(setup);
    let draft = Draft {
        keys: "same".into(),
        ..Draft::new("T0", 0, b"1")
    };
    for _ in 0..30_000 {
        world.append_patiently(&draft, 0).unwrap();
    }
    world.settle_synced();
    world.run(400);
    assert_eq!(by_key(&mut world, "same", 40_000).len(), 30_000);
}

/// A run is told to more queues than one turn takes: in between some read from it and some do not.
#[test]
fn queues_and_keys_are_whole_while_a_run_is_told_to_them() {
    const QUEUES: i32 = 5_000;
    let mut setup = Setup::new(6, AckPoint::Written);
    (setup.segment_bytes, setup.ring_bytes) = (8 << 20, 2 << 20);
    (setup.units_max, setup.run_units, setup.run_log_bytes) = (1 << 14, QUEUES as u64, 1 << 30);
    let mut world = World::new(setup);
    for queue in 0..QUEUES {
        let draft = Draft {
            keys: "all".into(),
            ..Draft::new("T0", queue, b"1")
        };
        world.append_patiently(&draft, 0).unwrap();
    }
    let runs = |world: &World| world.files(super::world::RUN_DIR).len();
    let before = runs(&world);
    for turn in 0..200 {
        world.run(1);
        let queue = turn * 977 % QUEUES;
        let readable = world.shard().queues().find("T0", queue).unwrap();
        if world.shard().bounds(readable).unwrap().1 == 1 {
            assert_eq!(world.read("T0", queue).unwrap().1.len(), 1, "turn {turn}");
        }
    }
    world.settle_synced();
    for _ in 0..12 {
        world.run(1);
        assert_eq!(by_key(&mut world, "all", 10_000).len(), QUEUES as usize);
    }
    for queue in 0..QUEUES {
        assert_eq!(world.read("T0", queue).unwrap().1.len(), 1, "queue {queue}");
    }
    assert!(runs(&world) > before, "no run was written");
}

#[test]
fn a_search_by_time_agrees_with_the_store_times() {
    let mut world = filled(Setup::new(5, AckPoint::Written), 500);
    for start in 0..2 {
        let all = world.model.queues()[&("T0".to_owned(), 0)].clone();
        let queue = world.shard().queues().find("T0", 0).unwrap();
        let times: Vec<i64> = all.iter().map(|message| message.stored_ms()).collect();
        let (first, last) = (times[0], times[times.len() - 1]);
        let mut asked: Vec<i64> = times.iter().copied().step_by(17).collect();
        asked.extend([first - 1, first, last, last + 1, last + 1000]);
        for timestamp in asked {
            for lower in [true, false] {
                let found = match world.shard().search_in_memory(queue, timestamp, lower) {
                    Some(offset) => offset,
                    None => match world
                        .ask(Question::Time {
                            queue,
                            timestamp,
                            lower,
                        })
                        .unwrap()
                    {
                        Answer::Offset(offset) => offset,
                        other => panic!("{other:?}"),
                    },
                };
                let wanted = if lower {
                    times.partition_point(|time| *time < timestamp) as i64
                } else {
                    (times.partition_point(|time| *time <= timestamp) as i64 - 1).max(0)
                };
                assert_eq!(
                    found, wanted,
                    "{timestamp} of {first}..{last}, lower {lower}"
                );
            }
        }
        if start == 0 {
            world.crash_and_check(Crash::Kill);
        }
    }
}

#[test]
fn a_damaged_queue_index_is_made_again_and_nothing_is_passed_over() {
    let mut world = filled(Setup::new(6, AckPoint::Written), 600);
    let runs = world.files(RUN_DIR);
    for run in runs.iter().take(3) {
        // The first block behind header and directory, or another one if there is none.
        let path = Path::new(RUN_DIR).join(&run.name);
        world.overwrite(&path, run.bytes / 4096 / 2 * 4096, &[0x55; 4096]);
    }
    let queue = world.shard().queues().find("T0", 0).unwrap();
    let mut failures = 0;
    let mut next = 0;
    while next < 300 {
        let question = Question::Pull {
            queue,
            offset: next,
            wanted: Wanted::All,
            limits: LIMITS,
        };
        match world.ask(question).unwrap() {
            Answer::Pull {
                selection: Selection::Chosen { next_offset },
                messages,
                ..
            } => {
                assert_eq!(messages as i64, next_offset as i64 - next);
                next = next_offset as i64;
            }
            Answer::Failed(reason) => {
                assert!(reason.contains("made again"), "{reason}");
                failures += 1;
                assert!(failures < 50, "it is never made again");
                world.run(50);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(failures > 0, "the damage was met");
    assert!(world.shard().counters().damaged_records > 0);
    for number in [1, 60, 100, 599] {
        let mut found = by_key(&mut world, &format!("n{number}"), 8);
        for _ in 0..5 {
            if found.is_empty() {
                world.run(100);
                found = by_key(&mut world, &format!("n{number}"), 8);
            }
        }
        assert_eq!(found.len(), 1, "n{number}");
    }
    world.check();
    world.crash_and_check(Crash::PowerLoss);
}

#[test]
fn a_damaged_record_is_left_out_and_its_neighbours_are_served() {
    let mut world = filled(Setup::new(7, AckPoint::Written), 600);
    let messages = world.model.queues()[&("T0".to_owned(), 0)].clone();
    let (victim, len) = (&messages[5], messages[5].raw.len() as u64);
    // In its properties, which no checksum of RocketMQ's covers.
    world.overwrite_bytes(victim.position + len - 3, b"!");
    let queue = world.shard().queues().find("T0", 0).unwrap();
    let question = Question::Pull {
        queue,
        offset: 0,
        wanted: Wanted::All,
        limits: LIMITS,
    };
    let Answer::Pull {
        bytes,
        messages: count,
        ..
    } = world.ask(question).unwrap()
    else {
        panic!()
    };
    assert_eq!(count, 15);
    let offsets: Vec<i64> = super::world::split(&bytes)
        .iter()
        .map(|raw| RecordView::parse(raw).unwrap().queue_offset())
        .collect();
    assert_eq!(
        offsets,
        (0..16).filter(|offset| *offset != 5).collect::<Vec<i64>>()
    );
    assert_eq!(world.shard().counters().damaged_records, 1);
}

#[test]
fn a_cut_run_file_fails_its_readers_instead_of_keeping_them_busy() {
    use shard::io::{OpenMode, Storage, StoreFile};
    let mut world = filled(Setup::new(8, AckPoint::Written), 600);
    let run = world.files(RUN_DIR)[0].name.clone();
    let file = world
        .machine
        .storage()
        .open(&Path::new(RUN_DIR).join(run), OpenMode::ReadWrite);
    file.unwrap().truncate(4096).unwrap();
    let queue = world.shard().queues().find("T0", 0).unwrap();
    let before = world.shard().counters().cold_windows;
    let question = Question::Pull {
        queue,
        offset: 0,
        wanted: Wanted::All,
        limits: LIMITS,
    };
    let answer = world.ask(question).unwrap();
    assert!(matches!(answer, Answer::Failed(_)), "{answer:?}");
    assert!(world.shard().counters().cold_windows < before + 5);
}

#[test]
fn many_readers_share_few_slots_and_all_get_their_answers() {
    let mut world = filled(
        Setup {
            cold_slots: 1,
            ..Setup::new(9, AckPoint::Written)
        },
        600,
    );
    let queue = world.shard().queues().find("T0", 1).unwrap();
    for token in 0..40 {
        let offset = (token as i64 * 7) % 200;
        let question = Question::Pull {
            queue,
            offset,
            wanted: Wanted::All,
            limits: LIMITS,
        };
        assert!(world.shard().ask(1_000 + token, question));
    }
    let question = Question::Pull {
        queue,
        offset: 0,
        wanted: Wanted::All,
        limits: LIMITS,
    };
    let last = world.ask(question).unwrap();
    assert!(
        matches!(last, Answer::Pull { messages: 16, .. }),
        "{last:?}"
    );
    world.run(200);
    assert_eq!(world.unclaimed_answers(), 40);
}

#[test]
fn a_key_of_many_messages_is_found_within_any_bounds_of_time() {
    let mut world = filled(Setup::new(4, AckPoint::Written), 600);
    let time = |record: &Vec<u8>| RecordView::parse(record).unwrap().store_timestamp();
    let all = by_key(&mut world, "all", 10_000);
    assert_eq!(all.len(), 600);
    assert!(
        all.windows(2).all(|pair| time(&pair[0]) >= time(&pair[1])),
        "newest first"
    );
    let (first, last) = (time(&all[599]), time(&all[0]));
    for (from_ms, to_ms) in [
        (first, first),
        (last, last),
        (first, (first + last) / 2),
        ((first + last) / 2, last),
        (first + (last - first) / 3, first + (last - first) / 2),
    ] {
        let inside = all
            .iter()
            .filter(|record| (from_ms..=to_ms).contains(&time(record)));
        let wanted: Vec<&Vec<u8>> = inside.take(8).collect();
        let found = by_key_and_time(&mut world, "all", 8, (from_ms, to_ms));
        assert!(wanted.iter().copied().eq(&found), "{from_ms}..={to_ms}");
        assert!(!found.is_empty());
    }
    for nothing in [
        (0, first - 1),
        (last + 1, i64::MAX),
        (last, first - 1),
        (i64::MIN, 0),
    ] {
        assert!(by_key_and_time(&mut world, "all", 8, nothing).is_empty());
    }
}
