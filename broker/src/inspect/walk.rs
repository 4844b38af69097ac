//! The walk: segments in order, records in order, and what lies between them.
//!
//! Invariant: a record counts only when it says itself that it stands where it was found and its
//! body passes its checksum; everything else is a problem with file and position, or the end of the
//! log.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use shard::address;
use wire::message::{MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RecordView, peek_len};

use super::PROBLEMS_SHOWN_MAX;

/// Bytes read at once.
const WINDOW_BYTES: usize = 4 << 20;

/// Largest record that is believed; larger ones cannot have come in by a frame.
const RECORD_BYTES_MAX: u64 = 64 << 20;

/// Where a record keeps its own physical offset.
const PHYSICAL_OFFSET_AT: usize = 28;

/// Bytes of a record that are needed to recognise it.
const RECOGNISE_BYTES: usize = PHYSICAL_OFFSET_AT + 8;

/// What to look at.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only this shard.
    pub shard: Option<u64>,
    /// Only queues and records of this topic.
    pub topic: Option<String>,
}

/// Told a line for each record.
pub type EachRecord<'a> = Option<&'a mut dyn FnMut(&str)>;

/// One segment file.
#[derive(Debug, Clone)]
pub struct SegmentReport {
    /// The file.
    pub path: PathBuf,
    /// Position of its first byte.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
    /// Whole records in it.
    pub records: u64,
    /// Bytes up to the end of its last record or blank.
    pub used: u64,
    /// Store time of its last record.
    pub last_store_timestamp: i64,
}

/// One queue as the log shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueReport {
    /// First offset seen.
    pub min_offset: i64,
    /// One past the last offset seen.
    pub next_offset: i64,
    /// Records.
    pub records: u64,
    /// Places where the next offset was not the one expected.
    pub jumps: u64,
}

/// What was found in a shard.
#[derive(Debug, Default)]
pub struct ShardReport {
    /// Its number.
    pub shard: u16,
    /// Size of a segment.
    pub segment_bytes: u64,
    /// Segments in order.
    pub segments: Vec<SegmentReport>,
    /// Whole records.
    pub records: u64,
    /// Bytes of them.
    pub record_bytes: u64,
    /// Physical offset of the first record.
    pub first: Option<i64>,
    /// Physical offset of the end of the log.
    pub end: Option<i64>,
    /// What stands at the end.
    pub end_reason: String,
    /// Queues by topic and id.
    pub queues: BTreeMap<(String, i32), QueueReport>,
    /// The first problems.
    pub problems: Vec<String>,
    /// How many there are.
    pub problem_count: usize,
}

impl ShardReport {
    fn problem(&mut self, words: String) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_SHOWN_MAX {
            self.problems.push(words);
        }
    }
}

/// Walks every shard of a commit log directory.
///
/// # Errors
/// When the directory or a segment cannot be read at all.
pub fn walk(dir: &Path, filter: &Filter, mut each: EachRecord<'_>) -> io::Result<Vec<ShardReport>> {
    let mut shards: BTreeMap<u16, Vec<(u64, PathBuf, u64)>> = BTreeMap::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some((shard, start)) = address::parse_segment_name(&name.to_string_lossy()) else {
            continue;
        };
        if filter.shard.is_none_or(|wanted| wanted == u64::from(shard)) {
            let bytes = entry.metadata()?.len();
            shards
                .entry(shard)
                .or_default()
                .push((start, entry.path(), bytes));
        }
    }
    let mut reports = Vec::new();
    for (shard, mut files) in shards {
        files.sort();
        let mut walker = Walker::new(shard, filter, &files);
        for (start, path, bytes) in files {
            walker.segment(start, &path, bytes, &mut each)?;
        }
        reports.push(walker.finish());
    }
    Ok(reports)
}

struct Walker<'a> {
    report: ShardReport,
    filter: &'a Filter,
    /// Where the next segment must start.
    expected_start: Option<u64>,
    /// Where the log ended, as long as nothing was found behind it.
    ended: Option<(u64, String)>,
}

/// What stands at a position.
enum Found {
    Record(u64),
    DamagedBody(u64, String),
    Blank,
    End(String),
}

impl<'a> Walker<'a> {
    fn new(shard: u16, filter: &'a Filter, files: &[(u64, PathBuf, u64)]) -> Self {
        let segment_bytes = files.iter().map(|(_, _, bytes)| *bytes).max().unwrap_or(0);
        let report = ShardReport {
            shard,
            segment_bytes,
            ..ShardReport::default()
        };
        Self {
            report,
            filter,
            expected_start: None,
            ended: None,
        }
    }

    fn segment(
        &mut self,
        start: u64,
        path: &Path,
        bytes: u64,
        each: &mut EachRecord<'_>,
    ) -> io::Result<()> {
        let shown = path.display();
        if let Some(expected) = self.expected_start.filter(|expected| *expected != start) {
            self.report.problem(format!(
                "{shown}: begins at {start}, but the segment before it ends at {expected}"
            ));
        }
        let segment_bytes = self.report.segment_bytes;
        if bytes != segment_bytes {
            self.report
                .problem(format!("{shown}: {bytes} bytes instead of {segment_bytes}"));
        }
        self.expected_start = Some(start + segment_bytes);
        let mut window = Window {
            file: File::open(path)?,
            bytes,
            start: 0,
            buffer: Vec::new(),
        };
        let mut segment = SegmentReport {
            path: path.to_owned(),
            start,
            bytes,
            records: 0,
            used: 0,
            last_store_timestamp: 0,
        };
        let mut at = 0;
        while at < bytes {
            match self.look(&mut window, start, at)? {
                Found::Record(len) => {
                    self.record(&mut window, &mut segment, at, len, each)?;
                    at += len;
                    segment.used = at;
                }
                Found::DamagedBody(len, reason) => {
                    self.report.problem(format!("{shown} at {at}: {reason}"));
                    at += len;
                    segment.used = at;
                }
                Found::Blank => {
                    at = bytes;
                    segment.used = at;
                }
                Found::End(reason) => match self.next_record(&mut window, start, at + 1)? {
                    Some(next) => {
                        self.report.problem(format!(
                            "{shown} at {at}: {} bytes that are no record ({reason})",
                            next - at
                        ));
                        at = next;
                    }
                    None => {
                        if self.ended.is_none() {
                            self.ended = Some((start + at, reason));
                        }
                        break;
                    }
                },
            }
        }
        self.report.segments.push(segment);
        Ok(())
    }

    fn look(&self, window: &mut Window, start: u64, at: u64) -> io::Result<Found> {
        let left = self.report.segment_bytes.saturating_sub(at);
        let Some((size, magic)) = peek_len(window.get(at, 8)?) else {
            return Ok(Found::End("the file ends".to_owned()));
        };
        let size = u64::from(size);
        if magic == MAGIC_BLANK && size == left {
            return Ok(Found::Blank);
        }
        if size == 0 && magic == 0 {
            return Ok(Found::End("zeros".to_owned()));
        }
        if size > left || size > RECORD_BYTES_MAX {
            return Ok(Found::End(format!(
                "length {size} reaches over the segment"
            )));
        }
        let view = match RecordView::parse(window.get(at, size)?) {
            Ok(view) => view,
            Err(error) => return Ok(Found::End(error.to_string())),
        };
        let expected = address::physical(self.report.shard, start + at);
        if view.physical_offset() != expected {
            return Ok(Found::End(format!(
                "a record of {}",
                view.physical_offset()
            )));
        }
        Ok(match view.check_body_crc() {
            Ok(()) => Found::Record(size),
            Err(error) => {
                let topic = String::from_utf8_lossy(view.topic()).into_owned();
                let (queue, offset) = (view.queue_id(), view.queue_offset());
                Found::DamagedBody(size, format!("{topic} {queue} offset {offset}: {error}"))
            }
        })
    }

    fn record(
        &mut self,
        window: &mut Window,
        segment: &mut SegmentReport,
        at: u64,
        len: u64,
        each: &mut EachRecord<'_>,
    ) -> io::Result<()> {
        if let Some((end, reason)) = self.ended.take() {
            let shown = segment.path.display();
            self.report.problem(format!(
                "{shown} at {at}: a record, although the log ended at {end} ({reason})"
            ));
        }
        let Ok(view) = RecordView::parse(window.get(at, len)?) else {
            return Ok(());
        };
        let physical = view.physical_offset();
        self.report.records += 1;
        self.report.record_bytes += len;
        self.report.first.get_or_insert(physical);
        self.report.end = physical.checked_add_unsigned(len);
        segment.records += 1;
        segment.last_store_timestamp = view.store_timestamp();
        let topic = String::from_utf8_lossy(view.topic());
        if self
            .filter
            .topic
            .as_ref()
            .is_some_and(|wanted| *wanted != topic)
        {
            return Ok(());
        }
        if let Some(each) = each {
            each(&format!(
                "{physical} {topic} {} offset {} size {len} body {} stored {} ms\n",
                view.queue_id(),
                view.queue_offset(),
                view.body().len(),
                view.store_timestamp()
            ));
        }
        let (key, offset) = ((topic.into_owned(), view.queue_id()), view.queue_offset());
        let known = self.report.queues.contains_key(&key);
        let queue = self.report.queues.entry(key.clone()).or_default();
        let expected = queue.next_offset;
        if !known {
            queue.min_offset = offset;
        }
        queue.records += 1;
        queue.next_offset = offset + 1;
        if known && offset != expected {
            queue.jumps += 1;
            let words = format!(
                "{} at {at}: queue {} {} goes from offset {expected} to {offset}",
                segment.path.display(),
                key.0,
                key.1
            );
            self.report.problem(words);
        }
        Ok(())
    }

    /// The next place in the segment where a whole record says that it stands there.
    fn next_record(&self, window: &mut Window, start: u64, from: u64) -> io::Result<Option<u64>> {
        let mut at = from;
        while at + RECOGNISE_BYTES as u64 <= window.bytes {
            let bytes = window.get(at, WINDOW_BYTES as u64 / 2)?;
            let places = bytes.windows(RECOGNISE_BYTES).enumerate();
            let place =
                places
                    .filter(|(_, head)| looks_like_record(head))
                    .find(|(inside, head)| {
                        let physical =
                            address::physical(self.report.shard, start + at + *inside as u64);
                        head.get(PHYSICAL_OFFSET_AT..) == Some(&physical.to_be_bytes()[..])
                    });
            let searched = (bytes.len() - RECOGNISE_BYTES + 1) as u64;
            let Some((inside, _)) = place else {
                at += searched;
                continue;
            };
            let candidate = at + inside as u64;
            if matches!(
                self.look(window, start, candidate)?,
                Found::Record(_) | Found::DamagedBody(..)
            ) {
                return Ok(Some(candidate));
            }
            at = candidate + 1;
        }
        Ok(None)
    }

    fn finish(mut self) -> ShardReport {
        self.report.end_reason = match self.ended {
            Some((position, reason)) => {
                self.report.end = Some(address::physical(self.report.shard, position));
                reason
            }
            None => "the last segment is full".to_owned(),
        };
        self.report
    }
}

fn looks_like_record(head: &[u8]) -> bool {
    let magic = peek_len(head).map(|(_, magic)| magic);
    matches!(magic, Some(MAGIC_V1 | MAGIC_V2))
}

/// A part of a file in memory.
struct Window {
    file: File,
    bytes: u64,
    start: u64,
    buffer: Vec<u8>,
}

impl Window {
    /// Up to `len` bytes at a position; fewer at the end of the file.
    fn get(&mut self, at: u64, len: u64) -> io::Result<&[u8]> {
        let len = len.min(self.bytes.saturating_sub(at));
        let end = self.start + self.buffer.len() as u64;
        if at < self.start || at + len > end {
            let want = len
                .max(WINDOW_BYTES as u64)
                .min(self.bytes.saturating_sub(at));
            self.buffer
                .resize(usize::try_from(want).unwrap_or(WINDOW_BYTES), 0);
            self.file.read_exact_at(&mut self.buffer, at)?;
            self.start = at;
        }
        let from = usize::try_from(at - self.start).unwrap_or(usize::MAX);
        let to = from.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
        Ok(self.buffer.get(from..to).unwrap_or_default())
    }
}
