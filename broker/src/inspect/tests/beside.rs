//! Run files, write buffers, internal records and control files, whole and damaged.

use shard::event::{EVENT_TOPIC, Event};
use shard::memory::{LockedRing, RingSpec};
use shard::queue::Extent;
use shard::run::{RunContent, RunMeta, RunQueue, encode, file_name};
use shard::units::Unit;

use super::*;
use crate::core::store::buffer_path;

const RING_BYTES: usize = 4 << 20;

/// A run over the first segment of what [`Store::fill`] wrote.
fn seal(store: &Store, places: &[(PathBuf, usize, usize)]) -> PathBuf {
    let first: Vec<_> = places
        .iter()
        .filter(|(path, ..)| *path == store.path(0, 0))
        .collect();
    let bytes = fs::read(store.path(0, 0)).unwrap();
    let mut content = RunContent {
        meta: RunMeta {
            end: SEGMENT_BYTES as u64,
            ..RunMeta::default()
        },
        ..RunContent::default()
    };
    for queue_id in [0, 1] {
        let mine = first.iter().skip(queue_id).step_by(2);
        let before = content.units.len() / shard::units::UNIT_BYTES;
        for (_, at, len) in mine.clone() {
            let unit = Unit {
                physical_offset: physical(0, *at as u64),
                size: *len as u32,
                crc: walk::crc_of(&bytes[*at..at + len]),
                ..Unit::default()
            };
            unit.encode(&mut content.units);
            content.keys.push((7, unit.physical_offset));
        }
        content.queues.push(RunQueue {
            topic: "orders".into(),
            queue_id: queue_id as i32,
            extent: Extent {
                run_start: 0,
                first_offset: 0,
                count: mine.count() as u32,
                unit_index: before as u32,
                first_timestamp: 0,
                last_timestamp: 0,
            },
        });
    }
    let dir = store.dir.join("consumequeue");
    fs::create_dir_all(&dir).unwrap();
    let path = dir.join(file_name(0, 0));
    fs::write(&path, encode(content).0).unwrap();
    path
}

fn storage() -> shard::io::real::RealStorage {
    shard::io::real::RealStorage::new(shard::io::real::DirectMode::Auto)
}

fn facts(store: &Store) -> StoreFacts {
    StoreFacts::gather(&store.dir, &store.dir)
}

fn one(store: &Store, facts: &StoreFacts) -> ShardReport {
    let mut all = walk(
        &store.log(),
        facts,
        &Filter::default(),
        None,
        &Progress::default(),
    )
    .unwrap();
    assert_eq!(all.len(), 1);
    all.remove(0)
}

fn identity(store: &Store, clean: bool) -> StoreIdentity {
    let identity = StoreIdentity {
        store_id: format!("{:032x}", std::process::id()),
        epoch: 3,
        shards: 1,
        segment_bytes: SEGMENT_BYTES as u64,
        clean,
        buffer_dir: None,
    };
    fs::create_dir_all(store.dir.join("config")).unwrap();
    identity.save(&storage(), &store.dir).unwrap();
    identity
}

#[test]
fn a_run_lets_whole_records_be_checked() {
    let store = Store::new("run");
    let places = store.fill(0, 100);
    seal(&store, &places);
    let report = one(&store, &facts(&store));
    assert_eq!(report.problems, Vec::<String>::new());
    assert!(report.checked_by_run > 50, "{}", report.checked_by_run);
    assert_eq!(report.covered_to, SEGMENT_BYTES as u64);
    assert_eq!(report.runs.runs[0].keys, report.runs.runs[0].units);
    let text = show::shard_text(&report, &StoreFacts::default());
    assert!(text.contains("run 0 to 65536: "), "{text}");
}

#[test]
fn a_flipped_byte_outside_the_body_is_found_by_the_run() {
    let store = Store::new("run-flip");
    let places = store.fill(0, 100);
    seal(&store, &places);
    let (path, at, len) = &places[20];
    // The last byte belongs to the properties, which the body's checksum does not cover.
    change(path, at + len - 1, |bytes| bytes[0] ^= 1);
    let report = one(&store, &facts(&store));
    assert_eq!(report.problem_count, 1, "{:?}", report.problems);
    let words = format!(
        "{} at {at}: the record is not the one that was stored",
        path.display()
    );
    assert!(report.problems[0].contains(&words), "{:?}", report.problems);
}

#[test]
fn damage_in_a_run_names_its_block() {
    let store = Store::new("run-block");
    let places = store.fill(0, 100);
    let run = seal(&store, &places);
    change(&run, 4096 * 2 + 100, |bytes| bytes[0] ^= 1);
    let report = one(&store, &facts(&store));
    let words = format!("{} at 8192: a block of units is damaged", run.display());
    assert_eq!(report.problems, [words]);
    assert_eq!(report.covered_to, 0);
    change(&run, 20, |bytes| bytes[0] ^= 1);
    let report = one(&store, &facts(&store));
    assert!(
        report.problems[0].contains("header damaged"),
        "{:?}",
        report.problems
    );
}

#[test]
fn a_run_that_knows_more_than_the_log_is_told() {
    let store = Store::new("run-more");
    let places = store.fill(0, 100);
    let run = seal(&store, &places);
    let (path, at, len) = places
        .iter()
        .rfind(|place| place.0 == store.path(0, 0))
        .unwrap();
    change(path, *at, |bytes| bytes[..*len].fill(0));
    let report = one(&store, &facts(&store));
    let words = format!("{}: 1 of ", run.display());
    assert!(
        report.problems.iter().any(|p| p.contains(&words)),
        "{:?}",
        report.problems
    );
}

#[test]
fn what_the_buffer_holds_counts_as_the_log() {
    let store = Store::new("buffer");
    let places = store.fill(0, 20);
    let identity = identity(&store, false);
    let spec = RingSpec {
        path: Some(buffer_path(&store.dir, &identity, 0)),
        bytes: RING_BYTES,
        lock: false,
    };
    let mut ring = LockedRing::open(spec).unwrap().ring;
    ring.format(identity.id(), identity.epoch, 0);
    let (_, at, len) = &places[35];
    let written = places[30].1 as u64;
    let from = written as usize / 4096 * 4096;
    let bytes = fs::read(store.path(0, 0)).unwrap();
    ring.slice_mut(from as u64, at + len - from)
        .copy_from_slice(&bytes[from..at + len]);
    ring.header().set_written(written);
    ring.header().set_published((at + len) as u64);
    drop(ring);
    // The disk never got what was in flight.
    change(&store.path(0, 0), places[30].1, |bytes| bytes.fill(0));
    let facts = facts(&store);
    let report = one(&store, &facts);
    assert_eq!(
        (report.records, report.problem_count),
        (36, 0),
        "{:?}",
        report.problems
    );
    let text = show::shard_text(&report, &facts);
    assert!(text.contains("bytes the next start writes"), "{text}");
    drop(facts);
    // Of an earlier start it is left out.
    let later = StoreIdentity {
        epoch: 4,
        ..identity
    };
    later.save(&storage(), &store.dir).unwrap();
    let report = one(&store, &self::facts(&store));
    assert_eq!(report.records, 30);
    let words = "of start 3, the last one was 4";
    assert!(
        report.notes.iter().any(|note| note.contains(words)),
        "{:?}",
        report.notes
    );
}

#[test]
fn what_a_kill_left_behind_the_end_is_no_damage_and_the_same_hole_in_a_closed_store_is() {
    let store = Store::new("remnant");
    let places = store.fill(0, 20);
    let (path, at, len) = &places[10];
    change(path, *at, |bytes| bytes[..*len].fill(0));
    identity(&store, false);
    let report = one(&store, &facts(&store));
    assert_eq!(
        (report.records, report.problem_count),
        (10, 0),
        "{:?}",
        report.problems
    );
    let unmarked = "10 records from physical offset 0 on have no end mark";
    assert!(report.notes[1].contains(unmarked), "{:?}", report.notes);
    assert!(
        report.notes[0].contains("the next start clears it"),
        "{:?}",
        report.notes
    );
    identity(&store, true);
    let report = one(&store, &facts(&store));
    assert!(report.problem_count > 0);
    assert!(
        report.problems[0].contains(&format!("at {at}: ")),
        "{:?}",
        report.problems
    );
}

#[test]
fn internal_records_are_no_queue_and_a_removed_topic_begins_again() {
    let store = Store::new("events");
    let mut segment = vec![0; SEGMENT_BYTES];
    let mut at = 0;
    let mut put = |topic: &[u8], offset: i64, body: &[u8]| {
        let bytes = record_of(topic, 0, at as u64, (0, offset), body);
        segment[at..at + bytes.len()].copy_from_slice(&bytes);
        at += bytes.len();
    };
    let event = |event: Event| {
        let mut body = Vec::new();
        event.encode(&mut body);
        body
    };
    let topic = "orders".to_owned();
    let group = "g".to_owned();
    put(b"orders", 0, b"a");
    put(b"orders", 1, b"b");
    let commit = Event::Offset {
        topic: topic.clone(),
        group,
        queue_id: 0,
        offset: 2,
    };
    put(EVENT_TOPIC.as_bytes(), 0, &event(commit.clone()));
    put(EVENT_TOPIC.as_bytes(), 0, &event(commit));
    put(
        EVENT_TOPIC.as_bytes(),
        0,
        &event(Event::TopicRemoved { topic }),
    );
    put(b"orders", 0, b"c");
    store.write(0, 0, &segment);
    let report = one(&store, &StoreFacts::default());
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!((report.events.offsets, report.events.removals), (2, 1));
    assert_eq!(report.queues.len(), 1);
    assert_eq!(report.queues[&("orders".to_owned(), 0)].next_offset, 1);
}

#[test]
fn control_files_tell_their_generation_and_their_damage() {
    let store = Store::new("control");
    let dir = store.dir.join("config");
    for generation in 1..=3 {
        let text = format!("{{\"dataVersion\":{generation}}}");
        settings::save(&dir, "topics.json", text.as_bytes()).unwrap();
    }
    let files = control_files::look(&dir);
    assert_eq!((files.len(), files[0].generation), (1, Some(3)));
    assert_eq!(files[0].problem, None);
    fs::write(dir.join("topics.json"), b"{").unwrap();
    let files = control_files::look(&dir);
    assert_eq!(files[0].generation, Some(2));
    assert!(
        files[0]
            .problem
            .as_ref()
            .unwrap()
            .contains("topics.json is damaged")
    );
    for name in ["topics.json.1", "topics.json.2"] {
        fs::write(dir.join(name), b"").unwrap();
    }
    let files = control_files::look(&dir);
    assert_eq!(files[0].generation, None);
    assert!(files[0].problem.as_ref().unwrap().contains("no generation"));
}

#[test]
fn json_and_status_say_what_the_text_says() {
    let store = Store::new("json");
    let places = store.fill(0, 100);
    identity(&store, true);
    let args = |json| InspectArgs {
        data: store.dir.clone(),
        shard: None,
        topic: None,
        records: false,
        buffer_dir: Some(store.dir.clone()),
        json,
    };
    assert_eq!(run(&args(true)), ExitCode::SUCCESS);
    let (path, at, len) = &places[50];
    change(path, at + len / 2, |bytes| bytes[0] ^= 1);
    assert_eq!(run(&args(false)), ExitCode::from(EXIT_FAILED));
    let facts = facts(&store);
    let shards = walk(
        &store.log(),
        &facts,
        &Filter::default(),
        None,
        &Progress::default(),
    )
    .unwrap();
    let findings = Findings {
        root: store.dir.clone(),
        control: control_files::look(&store.dir.join("config")),
        facts,
        shards,
    };
    let value: serde_json::Value = serde_json::from_str(&show::json(&findings)).unwrap();
    assert_eq!(value["problems"], 2);
    assert_eq!(value["shards"][0]["records"], 199);
    assert_eq!(value["shards"][0]["queues"][0]["topic"], "orders");
    assert_eq!(value["controlFiles"][0]["generation"], 1);
    assert!(show::text(&findings).contains("199 records, 2 problems\n"));
}

#[test]
fn a_store_in_use_is_not_walked() {
    let store = Store::new("in-use");
    store.fill(0, 3);
    let lock = crate::core::store::lock(&store.dir).unwrap();
    assert!(is_in_use(&store.dir));
    drop(lock);
    assert!(!is_in_use(&store.dir));
}

#[test]
fn an_end_mark_vouches_for_whole_records_and_tells_when_one_was_changed() {
    let store = Store::new("marks");
    let mut segment = vec![0; SEGMENT_BYTES];
    let (mut at, mut hash, mut from) = (0, 0, 0);
    for number in 0..6 {
        let bytes = record(0, at as u64, 0, number);
        segment[at..at + bytes.len()].copy_from_slice(&bytes);
        at += bytes.len();
        hash = shard::mark::mix(hash, walk::crc_of(&bytes));
        if number % 3 == 2 {
            let body = shard::event::encode_end_mark(from, hash);
            let bytes = record_of(EVENT_TOPIC.as_bytes(), 0, at as u64, (0, 0), &body);
            segment[at..at + bytes.len()].copy_from_slice(&bytes);
            at += bytes.len();
            (hash, from) = (0, at as u64);
        }
    }
    store.write(0, 0, &segment);
    let report = one(&store, &StoreFacts::default());
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!((report.checked_by_mark, report.events.end_marks), (6, 2));
    // The flag of the first message: no checksum but the mark's covers it.
    change(&store.path(0, 0), 16, |bytes| bytes[0] ^= 1);
    let report = one(&store, &StoreFacts::default());
    let counts = (report.problem_count, report.checked_by_mark);
    assert_eq!(counts, (1, 3), "{:?}", report.problems);
    let words = "from physical offset 0 up to here";
    assert!(report.problems[0].contains(words), "{:?}", report.problems);
}
