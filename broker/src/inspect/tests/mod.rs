//! What a walk says of stores that are whole and of stores that are not.

mod beside;

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use shard::address::{physical, segment_name};
use wire::message::{MAGIC_BLANK, RecordFields};

use super::walk::*;
use super::*;

const SEGMENT_BYTES: usize = 64 << 10;

struct Store {
    dir: PathBuf,
}

impl Store {
    fn new(name: &str) -> Self {
        let exe = std::env::current_exe().unwrap();
        let dir = exe
            .parent()
            .unwrap()
            .join(format!("inspect-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("commitlog")).unwrap();
        Self { dir }
    }

    fn log(&self) -> PathBuf {
        self.dir.join("commitlog")
    }

    /// Writes segments with `records` records for each of two queues; returns their places.
    fn fill(&self, shard: u16, records: i64) -> Vec<(PathBuf, usize, usize)> {
        let mut places = Vec::new();
        let (mut start, mut segment) = (0_usize, vec![0; SEGMENT_BYTES]);
        let mut at = 0;
        for number in 0..records * 2 {
            let position = (start + at) as u64;
            let mut bytes = record(shard, position, (number % 2) as i32, number / 2);
            if at + bytes.len() + 8 > SEGMENT_BYTES {
                let left = u32::try_from(SEGMENT_BYTES - at).unwrap();
                segment[at..at + 4].copy_from_slice(&left.to_be_bytes());
                segment[at + 4..at + 8].copy_from_slice(&MAGIC_BLANK.to_be_bytes());
                self.write(shard, start, &segment);
                start += SEGMENT_BYTES;
                segment = vec![0; SEGMENT_BYTES];
                at = 0;
                bytes = record(shard, start as u64, (number % 2) as i32, number / 2);
            }
            segment[at..at + bytes.len()].copy_from_slice(&bytes);
            places.push((self.path(shard, start), at, bytes.len()));
            at += bytes.len();
        }
        self.write(shard, start, &segment);
        places
    }

    fn path(&self, shard: u16, start: usize) -> PathBuf {
        self.log().join(segment_name(shard, start as u64))
    }

    fn write(&self, shard: u16, start: usize, bytes: &[u8]) {
        fs::write(self.path(shard, start), bytes).unwrap();
    }

    fn walked(&self) -> Vec<ShardReport> {
        walk(
            &self.log(),
            &StoreFacts::default(),
            &Filter::default(),
            None,
            &Progress::default(),
        )
        .unwrap()
    }

    fn one(&self) -> ShardReport {
        let mut all = self.walked();
        assert_eq!(all.len(), 1);
        all.remove(0)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn record(shard: u16, position: u64, queue_id: i32, queue_offset: i64) -> Vec<u8> {
    record_of(
        b"orders",
        shard,
        position,
        (queue_id, queue_offset),
        &[7; 900],
    )
}

fn record_of(
    topic: &[u8],
    shard: u16,
    position: u64,
    (queue_id, queue_offset): (i32, i64),
    body: &[u8],
) -> Vec<u8> {
    let fields = RecordFields {
        queue_id,
        flag: 0,
        queue_offset,
        physical_offset: physical(shard, position),
        sys_flag: 0,
        born_timestamp: 1,
        born_host: ([127, 0, 0, 1], 1).into(),
        store_timestamp: 1_000 + queue_offset,
        store_host: ([127, 0, 0, 1], 2).into(),
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body,
        topic,
        properties: &[b"KEYS\x01k\x02"],
    };
    let mut out = vec![0; fields.encoded_len()];
    fields.encode(&mut out).unwrap();
    out
}

fn change(path: &Path, at: usize, change: impl FnOnce(&mut [u8])) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes[at..]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_whole_store_has_no_problem_and_dense_queues() {
    let store = Store::new("whole");
    store.fill(0, 100);
    store.fill(3, 10);
    let reports = store.walked();
    assert_eq!(
        reports
            .iter()
            .map(|r| (r.shard, r.records))
            .collect::<Vec<_>>(),
        [(0, 200), (3, 20)]
    );
    for report in &reports {
        assert_eq!(report.problems, Vec::<String>::new());
        assert_eq!(report.end_reason, "zeros");
    }
    assert!(reports[0].segments.len() > 2);
    let expected = QueueReport {
        min_offset: 0,
        next_offset: 100,
        records: 100,
        jumps: 0,
        removed: false,
    };
    assert_eq!(reports[0].queues[&("orders".to_owned(), 1)], expected);
    assert_eq!(reports[1].first, Some(physical(3, 0)));
    let text = show::shard_text(&reports[0], &StoreFacts::default());
    assert!(
        text.contains("queue orders 1: offsets 0 to 100, 100 records\n"),
        "{text}"
    );
}

#[test]
fn a_flipped_byte_costs_one_record_and_names_it() {
    let store = Store::new("flip");
    let places = store.fill(0, 100);
    let (path, at, len) = &places[50];
    change(path, at + len / 2, |bytes| bytes[0] ^= 1);
    let report = store.one();
    assert_eq!(report.records, 199);
    // The damaged record, and the offset its queue lacks now.
    assert_eq!(report.problem_count, 2, "{:?}", report.problems);
    assert!(
        report.problems[0].contains("orders 0 offset 25"),
        "{:?}",
        report.problems
    );
    assert!(
        report.problems[1].contains("from offset 25 to 26"),
        "{:?}",
        report.problems
    );
}

#[test]
fn zeros_in_the_middle_are_a_gap_with_its_length() {
    let store = Store::new("zeros");
    let places = store.fill(0, 100);
    let (path, at, len) = &places[10];
    let bytes_lost = len + places[11].2;
    change(path, *at, |bytes| bytes[..bytes_lost].fill(0));
    let report = store.one();
    assert_eq!(report.records, 198);
    let words = format!("at {at}: {bytes_lost} bytes that are no record (zeros)");
    assert!(report.problems[0].contains(&words), "{:?}", report.problems);
}

#[test]
fn a_record_anywhere_behind_the_end_is_found_however_many_zeros_are_in_front() {
    let store = Store::new("stray");
    let bytes = 192 << 10;
    let searched_at_once = 64 << 10;
    let mut reach = vec![8, 1000, bytes - 2000];
    reach.extend((0..40).map(|less| searched_at_once + 1 - less));
    for at in reach {
        let stray = record(0, at as u64, 0, 0);
        let mut segment = vec![0; bytes];
        segment[at..at + stray.len()].copy_from_slice(&stray);
        store.write(0, 0, &segment);
        let report = store.one();
        let words = format!("at 0: {at} bytes that are no record (zeros)");
        assert!(report.problems[0].contains(&words), "{:?}", report.problems);
        assert_eq!(report.records, 1, "at {at}");
    }
}

#[test]
fn a_walk_that_takes_long_says_how_far_it_is_and_a_short_one_does_not() {
    thread_local! {
        static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }
    let store = Store::new("progress");
    store.fill(0, 200);
    let (facts, filter) = (StoreFacts::default(), Filter::default());
    let say = |line: &str| SAID.with_borrow_mut(|said| said.push(line.to_owned()));
    for (every, lines) in [(std::time::Duration::ZERO, 7), (progress::EVERY, 0)] {
        SAID.take();
        let progress = Progress::told(every, say);
        walk(&store.log(), &facts, &filter, None, &progress).unwrap();
        let said = SAID.take();
        assert_eq!(said.len(), lines, "{said:?}");
        let expected = said
            .get(1)
            .is_none_or(|line| line.contains("of 448 KiB read (14 %)"));
        assert!(expected, "{said:?}");
    }
}

#[test]
fn a_missing_segment_is_named() {
    let store = Store::new("missing");
    store.fill(0, 200);
    fs::remove_file(store.path(0, SEGMENT_BYTES)).unwrap();
    let report = store.one();
    assert!(
        report.problems[0].contains("the segment before it ends at"),
        "{:?}",
        report.problems
    );
}

#[test]
fn a_segment_emptied_in_the_middle_is_not_the_end() {
    let store = Store::new("emptied");
    store.fill(0, 200);
    store.write(0, SEGMENT_BYTES, &vec![0; SEGMENT_BYTES]);
    let report = store.one();
    assert!(
        report
            .problems
            .iter()
            .any(|p| p.contains("although the log ended at"))
    );
    assert_eq!(report.end_reason, "zeros");
}

#[test]
fn an_odd_sized_last_segment_and_records_of_another_place_are_told() {
    let store = Store::new("odd");
    store.fill(0, 100);
    let last = store.one().segments.last().unwrap().start as usize + SEGMENT_BYTES;
    // A recycled file holds records that stand somewhere else.
    store.write(0, last, &record(0, 0, 0, 0));
    let report = store.one();
    assert_eq!(report.records, 200);
    assert_eq!(report.problem_count, 1, "{:?}", report.problems);
    assert!(report.problems[0].contains("instead of 65536"));
}

#[test]
fn filters_and_record_lines_work() {
    let store = Store::new("filter");
    store.fill(0, 5);
    let facts = StoreFacts::default();
    let mut lines = Vec::new();
    let mut each = |line: &str| lines.push(line.to_owned());
    let none = Filter {
        topic: Some("other".into()),
        ..Filter::default()
    };
    assert!(
        walk(
            &store.log(),
            &facts,
            &none,
            Some(&mut each),
            &Progress::default()
        )
        .unwrap()[0]
            .queues
            .is_empty()
    );
    let all = Filter {
        shard: Some(0),
        topic: Some("orders".into()),
    };
    walk(
        &store.log(),
        &facts,
        &all,
        Some(&mut each),
        &Progress::default(),
    )
    .unwrap();
    assert_eq!(lines.len(), 10);
    assert!(lines[0].contains("orders 0 offset 0 size"), "{}", lines[0]);
    let other = Filter {
        shard: Some(1),
        ..Filter::default()
    };
    assert!(
        walk(&store.log(), &facts, &other, None, &Progress::default())
            .unwrap()
            .is_empty()
    );
}
