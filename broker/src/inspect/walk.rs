//! The walk: segments in order, records in order, and what lies between them.
//!
//! Invariant: a record counts only when it says itself that it stands where it was found, its body
//! passes its checksum and, where a run knows it, all of it does; everything else is a problem with
//! file and position, the end of the log, or what a killed process leaves behind its end.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use shard::address;
use shard::event::{EVENT_TOPIC, Event};
use shard::mark;
use wire::message::{MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RecordView, peek_len};

use super::buffers::Found as FoundBuffer;
use super::progress::Progress;
use super::runs::RunChain;
use super::window::Window;
use super::{PROBLEMS_SHOWN_MAX, StoreFacts};

/// Largest record that is believed; larger ones cannot have come in by a frame.
const RECORD_BYTES_MAX: u64 = 64 << 20;

/// Where a record keeps its own physical offset.
const PHYSICAL_OFFSET_AT: usize = 28;

/// Bytes that are searched for a record at once. Most of what is searched are zeros written ahead
/// of the log, which are passed over by the whole.
const SEARCH_BYTES: u64 = 64 << 10;

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
    /// Whether the topic was removed behind the last record, so that offsets begin again.
    pub removed: bool,
}

/// Internal records of a shard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventReport {
    /// Consumer offsets committed.
    pub offsets: u64,
    /// Progress of timed messages.
    pub delay_progress: u64,
    /// What happened to popped messages.
    pub pop: u64,
    /// Topics and groups removed.
    pub removals: u64,
    /// Checksums over the records in front of them.
    pub end_marks: u64,
    /// Ends of queues noted down by retention.
    pub queue_ends: u64,
    /// Roll-backs and questions of transactions.
    pub transactions: u64,
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
    /// Internal records.
    pub events: EventReport,
    /// Records checked whole, against the checksum in their run.
    pub checked_by_run: u64,
    /// Records checked whole, by the end mark behind them.
    pub checked_by_mark: u64,
    /// Run files.
    pub runs: RunChain,
    /// Position up to which runs cover the log.
    pub covered_to: u64,
    /// What a start would repair, and what it would leave out.
    pub notes: Vec<String>,
    /// The first problems.
    pub problems: Vec<String>,
    /// How many there are.
    pub problem_count: usize,
}

impl ShardReport {
    /// Adds a problem.
    pub fn problem(&mut self, words: String) {
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
pub fn walk(
    dir: &Path,
    facts: &StoreFacts,
    filter: &Filter,
    mut each: EachRecord<'_>,
    progress: &Progress,
) -> io::Result<Vec<ShardReport>> {
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
    let sizes = shards.values().flatten().map(|(_, _, bytes)| *bytes);
    progress.begin(sizes.sum());
    let mut before = 0;
    let mut reports = Vec::new();
    for (shard, mut files) in shards {
        files.sort();
        let mut walker = Walker::new(shard, facts, filter, &files)?;
        let last = files.len().saturating_sub(1);
        for (number, (start, path, bytes)) in files.into_iter().enumerate() {
            let buffer = facts.buffer(shard).and_then(FoundBuffer::ours);
            let mut window = Window::open(&path, bytes, start, buffer, (progress, before))?;
            before += bytes;
            walker.segment(&mut window, (start, &path), number == last, &mut each)?;
        }
        reports.push(walker.finish());
    }
    Ok(reports)
}

struct Walker<'a> {
    report: ShardReport,
    facts: &'a StoreFacts,
    filter: &'a Filter,
    /// Where the next segment must start.
    expected_start: Option<u64>,
    /// Where the log ended, as long as nothing was found behind it.
    ended: Option<(u64, String)>,
    /// Position and checksum of the records since the last end mark.
    span: Vec<(u64, u32)>,
    /// Problems there were when the span began.
    span_problems: usize,
    /// Set when what lies behind the end is left from a killed process.
    stopped: bool,
}

/// What stands at a position.
enum Found {
    Record(u64),
    DamagedBody(u64, String),
    Blank,
    End(String),
}

impl<'a> Walker<'a> {
    fn new(
        shard: u16,
        facts: &'a StoreFacts,
        filter: &'a Filter,
        files: &[(u64, PathBuf, u64)],
    ) -> io::Result<Self> {
        let largest = files.iter().map(|(_, _, bytes)| *bytes).max().unwrap_or(0);
        let segment_bytes = facts.segment_bytes.unwrap_or(largest);
        let log_start = files.first().map_or(0, |(start, ..)| *start);
        let runs = match &facts.run_dir {
            Some(dir) => RunChain::open(dir, shard, log_start)?,
            None => RunChain::default(),
        };
        let report = ShardReport {
            shard,
            segment_bytes,
            covered_to: runs.covered_to(log_start),
            runs,
            ..ShardReport::default()
        };
        Ok(Self {
            report,
            facts,
            filter,
            expected_start: None,
            ended: None,
            span: Vec::new(),
            span_problems: 0,
            stopped: false,
        })
    }

    fn segment(
        &mut self,
        window: &mut Window<'_>,
        (start, path): (u64, &Path),
        is_last: bool,
        each: &mut EachRecord<'_>,
    ) -> io::Result<()> {
        let bytes = window.bytes;
        self.check_place(start, path, bytes, is_last);
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
            match self.look(window, start, at)? {
                Found::Record(..) | Found::DamagedBody(..) if !self.goes_on(path, start, at) => {
                    break;
                }
                Found::Record(len) => {
                    self.record(window, &mut segment, at, len, each)?;
                    at += len;
                    segment.used = at;
                }
                Found::DamagedBody(len, reason) => {
                    let shown = path.display();
                    self.report.problem(format!("{shown} at {at}: {reason}"));
                    at += len;
                    segment.used = at;
                }
                Found::Blank => {
                    at = bytes;
                    segment.used = at;
                }
                Found::End(reason) => match self.behind(window, path, start, at, reason)? {
                    Some(next) => at = next,
                    None => break,
                },
            }
        }
        self.report.segments.push(segment);
        Ok(())
    }

    fn check_place(&mut self, start: u64, path: &Path, bytes: u64, is_last: bool) {
        let shown = path.display();
        if let Some(expected) = self.expected_start.filter(|expected| *expected != start) {
            self.report.problem(format!(
                "{shown}: begins at {start}, but the segment before it ends at {expected}"
            ));
        }
        let segment_bytes = self.report.segment_bytes;
        if bytes != segment_bytes {
            let words = format!("{shown}: {bytes} bytes instead of {segment_bytes}");
            if is_last && self.facts.is_unclean {
                self.report
                    .notes
                    .push(format!("{words}; the next start repairs it"));
            } else {
                self.report.problem(words);
            }
        }
        self.expected_start = Some(start + segment_bytes);
    }

    /// What lies behind a place that is no record: where to go on, or nothing when the log ends.
    fn behind(
        &mut self,
        window: &mut Window<'_>,
        path: &Path,
        start: u64,
        at: u64,
        reason: String,
    ) -> io::Result<Option<u64>> {
        if let Some(next) = self.next_record(window, start, at + 1)? {
            if self.ended.is_some() || self.stopped || !self.is_remnant(start + at, start + next) {
                let (shown, bytes) = (path.display(), next - at);
                self.report.problem(format!(
                    "{shown} at {at}: {bytes} bytes that are no record ({reason})"
                ));
                return Ok(Some(next));
            }
            self.note_remnant(path, at, next, &reason);
            self.stopped = true;
        }
        self.ended.get_or_insert((start + at, reason));
        Ok(None)
    }

    /// Whether a record at `next` may be left from writes that were in flight at a kill, with the
    /// log ending at `end`: then the next start clears it.
    fn is_remnant(&self, end: u64, next: u64) -> bool {
        let reach = self.facts.in_flight_bytes(self.report.shard);
        self.facts.is_unclean && end >= self.report.covered_to && next <= end.saturating_add(reach)
    }

    fn note_remnant(&mut self, path: &Path, at: u64, next: u64, reason: &str) {
        self.report.notes.push(format!(
            "{} at {at}: the log ends here ({reason}); what stands behind it, from {next} on, \
             was in flight when the process was killed, and the next start clears it",
            path.display()
        ));
    }

    /// Whether a record that was found counts: not when the log has ended before it and it is a
    /// remnant.
    fn goes_on(&mut self, path: &Path, start: u64, at: u64) -> bool {
        if self.stopped {
            return false;
        }
        let Some((end, reason)) = self.ended.take() else {
            return true;
        };
        if self.is_remnant(end, start + at) {
            self.report.notes.push(format!(
                "{} at {at}: a record behind the end of the log, left from a kill; the next start \
                 clears it",
                path.display()
            ));
            self.stopped = true;
            self.ended = Some((end, reason));
            return false;
        }
        self.report.problem(format!(
            "{} at {at}: a record, although the log ended at {end} ({reason})",
            path.display()
        ));
        true
    }

    fn look(&self, window: &mut Window<'_>, start: u64, at: u64) -> io::Result<Found> {
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
        window: &mut Window<'_>,
        segment: &mut SegmentReport,
        at: u64,
        len: u64,
        each: &mut EachRecord<'_>,
    ) -> io::Result<()> {
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
        let place = format!("{} at {at}", segment.path.display());
        let (position, crc) = (segment.start + at, crc_of(view.raw()));
        self.check_whole(&view, position, crc, &place);
        let topic = String::from_utf8_lossy(view.topic());
        let event = (topic == EVENT_TOPIC).then(|| Event::decode(view.body()));
        if let Some(Some(Event::EndMark { from, hash })) = event {
            self.end_mark(from, hash, &place);
            return Ok(());
        }
        self.span.push((position, crc));
        if let Some(event) = event {
            self.event(event, &place);
            return Ok(());
        }
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
        let key = (topic.into_owned(), view.queue_id());
        self.queue_record(key, view.queue_offset(), &place);
        Ok(())
    }

    /// Checks the whole record where a run file has its checksum.
    fn check_whole(&mut self, view: &RecordView<'_>, position: u64, crc: u32, place: &str) {
        let physical = view.physical_offset();
        let Some(unit) = self.report.runs.unit_of(position, physical) else {
            return;
        };
        self.report.checked_by_run += 1;
        if unit.size as usize != view.total_len() || unit.crc != crc {
            self.report.problem(format!(
                "{place}: the record is not the one that was stored: {} bytes with CRC {crc:08x}, \
                 its run knows {} bytes with CRC {:08x}",
                view.total_len(),
                unit.size,
                unit.crc
            ));
        }
    }

    /// Checks the records in front of an end mark.
    fn end_mark(&mut self, from: u64, hash: u64, place: &str) {
        let span = std::mem::take(&mut self.span);
        let before = std::mem::replace(&mut self.span_problems, self.report.problem_count);
        self.report.events.end_marks += 1;
        if before != self.report.problem_count {
            // Something in the span was told already, and the mark cannot fit.
            return;
        }
        let mine = span.iter().filter(|(position, _)| *position >= from);
        let own = mine.clone().fold(0, |hash, (_, crc)| mark::mix(hash, *crc));
        if own == hash {
            self.report.checked_by_mark += mine.count() as u64;
            return;
        }
        let from = address::physical(self.report.shard, from);
        self.report.problem(format!(
            "{place}: the records from physical offset {from} up to here are not the ones that \
             were stored: their end mark says {hash:016x}, they make {own:016x}"
        ));
        self.span_problems = self.report.problem_count;
    }

    fn event(&mut self, event: Option<Event>, place: &str) {
        let events = &mut self.report.events;
        match event {
            Some(Event::QueueEnds { queues }) => events.queue_ends += queues.len() as u64,
            Some(Event::EndMark { .. }) => {}
            Some(Event::Offset { .. }) => events.offsets += 1,
            Some(Event::Pop(_)) => events.pop += 1,
            Some(
                Event::HalfOpened { .. } | Event::HalfEnded { .. } | Event::HalfChecked { .. },
            ) => events.transactions += 1,
            Some(
                Event::DelayProgress { .. }
                | Event::TimerProgress { .. }
                | Event::TimersRolled { .. },
            ) => {
                events.delay_progress += 1;
            }
            Some(Event::GroupRemoved { .. }) => events.removals += 1,
            Some(Event::TopicRemoved { topic }) => {
                events.removals += 1;
                let queues = self.report.queues.iter_mut();
                for (_, queue) in queues.filter(|((name, _), _)| *name == topic) {
                    queue.removed = true;
                }
            }
            None => self
                .report
                .problem(format!("{place}: an internal record of an unknown kind")),
        }
    }

    fn queue_record(&mut self, key: (String, i32), offset: i64, place: &str) {
        let known = self.report.queues.contains_key(&key);
        let queue = self.report.queues.entry(key.clone()).or_default();
        let begins = !known || std::mem::take(&mut queue.removed);
        let expected = queue.next_offset;
        if begins {
            queue.min_offset = offset;
        }
        queue.records += 1;
        queue.next_offset = offset + 1;
        if !begins && offset != expected {
            queue.jumps += 1;
            let words = format!(
                "{place}: queue {} {} goes from offset {expected} to {offset}",
                key.0, key.1
            );
            self.report.problem(words);
        }
    }

    /// The next place in the segment where a whole record says that it stands there.
    fn next_record(
        &self,
        window: &mut Window<'_>,
        start: u64,
        from: u64,
    ) -> io::Result<Option<u64>> {
        let mut at = from;
        while at + RECOGNISE_BYTES as u64 <= window.bytes {
            let bytes = window.get(at, SEARCH_BYTES)?;
            let Some(zeros) = leading_zeros(bytes) else {
                at += (bytes.len() - RECOGNISE_BYTES + 1) as u64;
                continue;
            };
            // The zeros in front may be the first bytes of a record's length.
            let places = bytes.windows(RECOGNISE_BYTES).enumerate();
            let places = places.skip(zeros.saturating_sub(size_of::<u32>()));
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
        let buffer = self
            .facts
            .buffer(self.report.shard)
            .and_then(FoundBuffer::ours);
        let vouched = buffer.map_or(0, |buffer| buffer.published);
        let unmarked = self
            .span
            .iter()
            .filter(|(position, _)| *position >= vouched);
        if let Some((first, _)) = unmarked.clone().next().filter(|_| self.facts.is_unclean) {
            let first = address::physical(self.report.shard, *first);
            self.report.notes.push(format!(
                "{} records from physical offset {first} on have no end mark behind them: they \
                 were in flight when the process was killed, and the next start leaves them out",
                unmarked.count()
            ));
        }
        self.report.runs.finish();
        for words in std::mem::take(&mut self.report.runs.problems) {
            self.report.problem(words);
        }
        match self.facts.buffer(self.report.shard) {
            Some(FoundBuffer::Damaged(path, why)) => {
                self.report.problem(format!("{}: {why}", path.display()));
            }
            Some(FoundBuffer::LeftOut(path, why)) => {
                let words = format!("{}: {why}; a start leaves it out", path.display());
                self.report.notes.push(words);
            }
            _ => {}
        }
        self.report
    }
}

/// CRC-32 of a whole record, as run files keep it.
pub fn crc_of(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// How many zeros there are in front; `None` when there is nothing else.
fn leading_zeros(bytes: &[u8]) -> Option<usize> {
    const STEP: usize = 64;
    let is_zero = |step: &[u8]| step.iter().fold(0, |all, byte| all | byte) == 0;
    let whole = bytes.chunks(STEP).take_while(|step| is_zero(step)).count() * STEP;
    let rest = bytes.get(whole..)?;
    Some(whole + rest.iter().position(|byte| *byte != 0)?)
}

fn looks_like_record(head: &[u8]) -> bool {
    let magic = peek_len(head).map(|(_, magic)| magic);
    matches!(magic, Some(MAGIC_V1 | MAGIC_V2))
}
