//! Cold reads: answers that need bytes from disk.
//!
//! A job advances as far as the loaded windows allow, then waits for one more window. Windows are
//! slots of the driver's own pool, so cold readers use their own memory and at most
//! [`LOADS_IN_FLIGHT_MAX`] places in the disk's queue (P6). A window stays loaded until its slot is
//! needed, which is the read-ahead of a consumer that catches up.
//!
//! Invariant: every record is checked against the CRC in its unit (or its own structure where no
//! unit is known) before it is handed out; a damaged one is left out, counted and logged.

mod lookup;
mod windows;

pub use lookup::KeyQuestion;

use std::collections::VecDeque;

use wire::message::{MAGIC_V1, MAGIC_V2, RecordView, peek_len};

use crate::address;
use crate::event::EVENT_TOPIC;
use crate::half_checks::HALF_TOKEN;
use crate::io::BLOCK_BYTES;
use crate::queue::QueueIndex;
use crate::runtime::{COLD_SLOT_BYTES, Driver, FileId, SlotId};
use crate::select::{PullLimits, Selection, Wanted};
use crate::shard::Shard;
use crate::timer::TIMER_TOKEN;
use crate::units::Unit;

/// Jobs that may hold on to windows at once; others wait their turn.
pub const JOBS_ACTIVE_MAX: usize = 8;
/// Jobs one shard holds; beyond that a question is refused.
pub const JOBS_MAX: usize = 16_384;
/// Bytes of records one pull with a filter looks at, so that one that matches little does not keep
/// others from the disk.
pub const FILTERED_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Records a job looks at before others have their turn.
const RECORDS_PER_TURN: usize = 256;
/// Records a look-up by key looks at; beyond that it answers with what it has found.
pub const KEY_RECORDS_MAX: usize = 200_000;
/// Window loads in flight per shard.
pub const LOADS_IN_FLIGHT_MAX: usize = 4;

const WINDOW: u64 = COLD_SLOT_BYTES as u64;

/// What a cold job is to find out.
#[derive(Clone, Debug)]
pub enum Question {
    /// The messages of a pull.
    Pull {
        /// Queue.
        queue: QueueIndex,
        /// First offset.
        offset: i64,
        /// Messages wanted.
        wanted: Wanted,
        /// Limits.
        limits: PullLimits,
    },
    /// The record at a physical offset of this shard.
    Record {
        /// Physical offset.
        physical_offset: i64,
    },
    /// These records, in order, those that are whole.
    Records {
        /// Their units.
        units: Vec<Unit>,
    },
    /// Units of a queue, as many as one look finds.
    Units {
        /// Queue.
        queue: QueueIndex,
        /// First offset.
        offset: i64,
        /// Units at most.
        units_max: usize,
    },
    /// Records with a key, newest first.
    Key(KeyQuestion),
    /// An offset by store time.
    Time {
        /// Queue.
        queue: QueueIndex,
        /// Store time in milliseconds.
        timestamp: i64,
        /// Lower boundary, else upper.
        lower: bool,
    },
}

/// Answer of a cold job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Of a pull: what was chosen and the records.
    Pull {
        /// The selection.
        selection: Selection,
        /// Records as stored, concatenated.
        bytes: Vec<u8>,
        /// How many.
        messages: usize,
    },
    /// Records as stored, one by one; of [`Question::Record`] none or one.
    Records(Vec<Vec<u8>>),
    /// An offset.
    Offset(i64),
    /// Units; none where the offset has no message.
    Units(Vec<Unit>),
    /// The disk failed to read.
    Failed(String),
}

enum Stage {
    Begin,
    Units {
        units: Vec<Unit>,
        selection: Selection,
    },
    Copy {
        units: VecDeque<Unit>,
        partial: Vec<u8>,
        selection: Selection,
    },
    KeyBlocks {
        next: usize,
        in_run: Vec<i64>,
    },
    Search {
        low: i64,
        high: i64,
        first: i64,
    },
}

struct Job {
    token: u64,
    question: Question,
    stage: Stage,
    records: Vec<Vec<u8>>,
    /// Bytes of `records`.
    bytes: usize,
    /// Runs whose keys are still to be looked at, oldest first.
    key_runs: Vec<u64>,
    /// Records looked at so far.
    looked_at: usize,
    waits_for: Option<u64>,
    /// Whether it waits for the window of that load, or only for a place among the loads.
    waits_for_place: bool,
    /// Whether it found every slot of the driver taken.
    lacks_slot: bool,
    failed: Option<String>,
}

struct Window {
    file: FileId,
    index: u64,
    slot: SlotId,
    valid: usize,
    used: u64,
}

struct Load {
    number: u64,
    file: FileId,
    index: u64,
    valid: usize,
    /// Bytes of the window that a job cannot go on without.
    least: usize,
    dropped: bool,
}

/// A window a job needs.
#[derive(Clone, Copy)]
struct Need {
    file: FileId,
    index: u64,
    valid: usize,
    least: usize,
}

/// Why a job cannot go on now, or at all.
enum Halt {
    Need(Need),
    /// Nothing is missing, but others want their turn.
    Later,
    Failed(String),
}

/// State of the cold reads of a shard.
#[derive(Default)]
pub struct ColdReads {
    active: Vec<Job>,
    waiting: VecDeque<Job>,
    windows: Vec<Window>,
    loads: Vec<Load>,
    next_load: u64,
    tick: u64,
    /// Whether a neighbour of the same core found every slot taken.
    neighbour_waits: bool,
    answers: Vec<(u64, Answer)>,
    timer_answers: Vec<(u64, Answer)>,
    half_answers: Vec<(u64, Answer)>,
}

enum Step {
    Done(Answer),
    Need(Need),
    Later,
}

impl Job {
    fn is_answered(&self, query: &KeyQuestion) -> bool {
        self.records.len() >= query.records_max || self.looked_at > KEY_RECORDS_MAX
    }

    /// Whether older runs may hold more records with the key.
    fn has_more_runs(&self) -> bool {
        match &self.question {
            Question::Key(query) => !self.is_answered(query) && !self.key_runs.is_empty(),
            _ => false,
        }
    }

    /// Whether a record is one that was asked for.
    fn is_wanted(&self, record: &[u8]) -> bool {
        match &self.question {
            Question::Pull { wanted, .. } => wanted.takes_record(record),
            Question::Key(query) => query.takes(record),
            _ => true,
        }
    }

    /// Whether a record is one too many. Only filters and keys do not tell beforehand how many
    /// there will be.
    fn is_full(&self, record: &[u8]) -> bool {
        let (wanted, limits) = match &self.question {
            Question::Pull { wanted, limits, .. } => (wanted, limits),
            Question::Key(query) => return self.is_answered(query),
            _ => return false,
        };
        let has_room = self.records.len() < limits.messages_max
            && self.bytes + record.len() <= limits.bytes_max;
        matches!(wanted, Wanted::Matching(_))
            && !has_room
            && !self.records.is_empty()
            && wanted.takes_record(record)
    }
}

/// What units are looked at for a pull: with a filter all of a stretch, else those wanted.
fn candidates(wanted: Wanted, limits: PullLimits) -> (Wanted, PullLimits) {
    match wanted {
        Wanted::Matching(_) => {
            let all = PullLimits {
                messages_max: crate::select::SCAN_UNITS_MAX as usize,
                bytes_max: FILTERED_BYTES_MAX,
            };
            (Wanted::All, all)
        }
        other => (other, limits),
    }
}

/// A selection without its last units, which follow each other.
fn before(selection: Selection, units: usize) -> Selection {
    match selection {
        Selection::Chosen { next_offset } => Selection::Chosen {
            next_offset: next_offset - units as u64,
        },
        other => other,
    }
}

impl ColdReads {
    fn answer(&mut self, token: u64, answer: Answer) {
        if token & TIMER_TOKEN == 0 {
            self.answers.push((token, answer));
        } else if token & HALF_TOKEN == HALF_TOKEN {
            self.half_answers.push((token, answer));
        } else {
            self.timer_answers.push((token, answer));
        }
    }

    /// Whether there is an answer about a half message to take.
    pub(crate) fn has_half_answer(&self) -> bool {
        !self.half_answers.is_empty()
    }

    /// An answer about a half message, which producers are to be asked about.
    pub(crate) fn next_half_answer(&mut self) -> Option<(u64, Answer)> {
        self.half_answers.pop()
    }

    /// Whether timed messages have an answer to take.
    pub(crate) fn has_timer_answer(&self) -> bool {
        !self.timer_answers.is_empty()
    }

    /// An answer that timed messages of this shard have asked for.
    pub(crate) fn next_timer_answer(&mut self) -> Option<(u64, Answer)> {
        self.timer_answers.pop()
    }
}

impl Shard {
    /// Starts a cold job; `false` at [`JOBS_MAX`]. Tokens with the highest bit set are the shard's
    /// own.
    pub fn ask(&mut self, token: u64, question: Question) -> bool {
        if self.cold.active.len() + self.cold.waiting.len() >= JOBS_MAX {
            return false;
        }
        let job = Job {
            token,
            question,
            stage: Stage::Begin,
            records: Vec::new(),
            bytes: 0,
            key_runs: Vec::new(),
            looked_at: 0,
            waits_for: None,
            waits_for_place: false,
            lacks_slot: false,
            failed: None,
        };
        if token & HALF_TOKEN == TIMER_TOKEN {
            // A handful, with a time to keep: readers of old data can wait for them.
            self.cold.waiting.push_front(job);
        } else {
            self.cold.waiting.push_back(job);
        }
        true
    }

    /// Moves finished answers to `out`, but for those that timed messages have asked for.
    pub fn take_answers(&mut self, out: &mut Vec<(u64, Answer)>) {
        out.append(&mut self.cold.answers);
    }

    pub(crate) fn run_cold_jobs<D: Driver>(&mut self, driver: &mut D) {
        loop {
            while self.cold.active.len() < JOBS_ACTIVE_MAX {
                let Some(job) = self.cold.waiting.pop_front() else {
                    break;
                };
                self.cold.active.push(job);
            }
            let mut finished = false;
            let mut index = 0;
            while index < self.cold.active.len() {
                if self
                    .cold
                    .active
                    .get(index)
                    .is_some_and(|job| job.waits_for.is_some())
                {
                    index += 1;
                    continue;
                }
                let mut job = self.cold.active.swap_remove(index);
                match self.advance(&mut job, driver) {
                    Step::Done(answer) => {
                        self.cold.answer(job.token, answer);
                        finished = true;
                    }
                    waits => {
                        if let Step::Need(need) = waits {
                            self.load(&mut job, need, driver);
                        }
                        self.cold.active.push(job);
                        let last = self.cold.active.len() - 1;
                        self.cold.active.swap(index, last);
                        index += 1;
                    }
                }
            }
            if !finished || self.cold.waiting.is_empty() {
                return;
            }
        }
    }

    /// Whether some job found every slot taken.
    #[must_use]
    pub fn lacks_cold_slot(&self) -> bool {
        self.cold.active.iter().any(|job| job.lacks_slot)
    }

    /// Whether some job has nothing to wait for and wants to go on soon.
    pub(crate) fn cold_wants_retry(&self) -> bool {
        self.cold.active.iter().any(|job| job.waits_for.is_none())
    }

    fn advance<D: Driver>(&mut self, job: &mut Job, driver: &D) -> Step {
        if let Some(reason) = job.failed.take() {
            return Step::Done(Answer::Failed(reason));
        }
        loop {
            let stage = std::mem::replace(&mut job.stage, Stage::Begin);
            let result = match stage {
                Stage::Begin => self.begin(job, driver),
                Stage::Units { units, selection } => {
                    job.stage = Stage::Copy {
                        units: units.into(),
                        partial: Vec::new(),
                        selection,
                    };
                    Ok(None)
                }
                Stage::Copy {
                    units,
                    partial,
                    selection,
                } => self.copy(job, units, partial, selection, driver),
                Stage::KeyBlocks { next, in_run } => self.key_blocks(job, next, in_run, driver),
                Stage::Search { low, high, first } => self.search(job, low, high, first, driver),
            };
            match result {
                Ok(Some(answer)) => return Step::Done(answer),
                Ok(None) => {}
                Err(Halt::Need(need)) => return Step::Need(need),
                Err(Halt::Later) => return Step::Later,
                Err(Halt::Failed(reason)) => return Step::Done(Answer::Failed(reason)),
            }
        }
    }

    fn begin<D: Driver>(&mut self, job: &mut Job, driver: &D) -> Result<Option<Answer>, Halt> {
        match job.question.clone() {
            Question::Pull {
                queue,
                offset,
                wanted,
                limits,
            } => {
                let (mut scratch, mut units) = (Vec::new(), Vec::new());
                let (wanted, limits) = candidates(wanted, limits);
                let mut selection =
                    self.select(queue, offset, &wanted, limits, &mut scratch, &mut units);
                if selection == Selection::OnDisk {
                    selection =
                        self.select_on_disk(queue, offset, &wanted, limits, driver, &mut units)?;
                }
                job.stage = Stage::Units { units, selection };
            }
            Question::Record { physical_offset } => {
                let unit = Unit {
                    physical_offset,
                    ..Unit::default()
                };
                job.stage = Stage::Units {
                    units: vec![unit],
                    selection: Selection::Empty,
                };
            }
            Question::Records { units } => {
                job.stage = Stage::Units {
                    units,
                    selection: Selection::Empty,
                };
            }
            Question::Units {
                queue,
                offset,
                units_max,
            } => {
                let units = self.find_units(queue, offset, units_max, driver)?;
                return Ok(Some(Answer::Units(units)));
            }
            Question::Key(query) => self.recent_keys(job, &query),
            Question::Time {
                queue,
                timestamp,
                lower,
            } => {
                if let Some(offset) = self.search_in_memory(queue, timestamp, lower) {
                    return Ok(Some(Answer::Offset(offset)));
                }
                let (low, high) = self.extent_for_time(queue, timestamp, lower);
                job.stage = Stage::Search {
                    low,
                    high,
                    first: low,
                };
            }
        }
        Ok(None)
    }

    /// Units from an offset on, wherever they are.
    fn find_units<D: Driver>(
        &mut self,
        queue: QueueIndex,
        offset: i64,
        units_max: usize,
        driver: &D,
    ) -> Result<Vec<Unit>, Halt> {
        let limits = PullLimits {
            messages_max: units_max,
            bytes_max: usize::MAX,
        };
        let (mut scratch, mut units) = (Vec::new(), Vec::new());
        let selection = self.select(
            queue,
            offset,
            &Wanted::All,
            limits,
            &mut scratch,
            &mut units,
        );
        if selection == Selection::OnDisk {
            units = self.disk_units(queue, offset, units_max as u64, driver)?;
        }
        units.truncate(units_max);
        Ok(units)
    }

    /// Chooses units of a run file, from one window of it.
    fn select_on_disk<D: Driver>(
        &mut self,
        queue: QueueIndex,
        offset: i64,
        wanted: &Wanted,
        limits: PullLimits,
        driver: &D,
        out: &mut Vec<Unit>,
    ) -> Result<Selection, Halt> {
        let count = match wanted {
            Wanted::All => limits.messages_max as u64,
            _ => crate::select::SCAN_UNITS_MAX,
        };
        let scanned = self.disk_units(queue, offset, count.max(1), driver)?;
        if scanned.is_empty() {
            // Retention has taken the units in the meantime.
            let min_offset = self.queues.get(queue).map_or(0, |queue| queue.min_offset);
            let next_offset = min_offset.max(offset as u64 + 1);
            return Ok(Selection::NoneMatched { next_offset });
        }
        let next_offset = crate::select::choose(&scanned, offset as u64, wanted, limits, out);
        Ok(if out.is_empty() {
            Selection::NoneMatched { next_offset }
        } else {
            Selection::Chosen { next_offset }
        })
    }

    /// Units from an offset on that lie in the same window of the same run file.
    fn disk_units<D: Driver>(
        &mut self,
        queue: QueueIndex,
        offset: i64,
        count: u64,
        driver: &D,
    ) -> Result<Vec<Unit>, Halt> {
        let mut units = Vec::new();
        let extent = self
            .queues
            .get(queue)
            .and_then(|queue| queue.extent_of(offset as u64));
        let Some(extent) = extent.copied() else {
            return Ok(units);
        };
        let Some(run) = self.runs.get(&extent.run_start) else {
            return Ok(units);
        };
        let (file, units_at) = (run.file, run.meta.units_at);
        let mut index = u64::from(extent.unit_index) + (offset as u64 - extent.first_offset);
        let end = (u64::from(extent.unit_index) + u64::from(extent.count)).min(index + count);
        while index < end {
            let (at, inside) = crate::run::unit_place(units_at, index);
            let bytes = match self.loaded(driver, file, at, u64::MAX) {
                Ok(bytes) => bytes,
                Err(halt) if units.is_empty() => return Err(halt),
                Err(_) => break,
            };
            let block = bytes.get(..BLOCK_BYTES).unwrap_or_default();
            if !crate::run::block_is_whole(block, extent.run_start, at) {
                let reason = self.damaged_run(extent.run_start, at);
                if units.is_empty() {
                    return Err(Halt::Failed(reason));
                }
                break;
            }
            let first = inside / crate::units::UNIT_BYTES;
            let take = (crate::run::UNITS_PER_BLOCK - first).min((end - index) as usize);
            crate::run::units_in_block(block, first, take, &mut units);
            index += take as u64;
        }
        Ok(units)
    }

    /// Counts and tells a damaged block of a run file. Its messages are whole, so they are not
    /// passed over; the run is made again from the log.
    pub(crate) fn damaged_run(&mut self, start: u64, at: u64) -> String {
        self.counters.damaged_records += 1;
        let path = self
            .runs
            .get(&start)
            .map(|run| run.path.display().to_string());
        let path = path.unwrap_or_default();
        tracing::error!(shard = self.config.number, path, at, "queue index damaged");
        self.rebuilds.want(start);
        format!("{path} is damaged at {at}; it is being made again from the log")
    }

    fn copy<D: Driver>(
        &mut self,
        job: &mut Job,
        mut units: VecDeque<Unit>,
        mut partial: Vec<u8>,
        mut selection: Selection,
        driver: &D,
    ) -> Result<Option<Answer>, Halt> {
        let turn_end = job.looked_at + RECORDS_PER_TURN;
        while let Some(unit) = units.front().copied() {
            if job.looked_at >= turn_end {
                job.stage = Stage::Copy {
                    units,
                    partial,
                    selection,
                };
                return Err(Halt::Later);
            }
            match self.copy_record(&unit, &mut partial, driver) {
                Ok(true) => {
                    job.looked_at += 1;
                    if job.is_full(&partial) {
                        selection = before(selection, units.len());
                        break;
                    }
                    units.pop_front();
                    if job.is_wanted(&partial) {
                        job.bytes += partial.len();
                        job.records.push(std::mem::take(&mut partial));
                    }
                    partial.clear();
                }
                Ok(false) => {
                    units.pop_front();
                    partial.clear();
                }
                Err(halt) => {
                    job.stage = Stage::Copy {
                        units,
                        partial,
                        selection,
                    };
                    return Err(halt);
                }
            }
        }
        if job.has_more_runs() {
            let (next, in_run) = (0, Vec::new());
            job.stage = Stage::KeyBlocks { next, in_run };
            return Ok(None);
        }
        let records = std::mem::take(&mut job.records);
        Ok(Some(match &job.question {
            Question::Pull { wanted, .. } => {
                let messages = records.len();
                let is_filtered = matches!(wanted, Wanted::Matching(_));
                Answer::Pull {
                    selection: match selection {
                        Selection::Chosen { next_offset } if is_filtered && messages == 0 => {
                            Selection::NoneMatched { next_offset }
                        }
                        other => other,
                    },
                    bytes: records.concat(),
                    messages,
                }
            }
            _ => Answer::Records(records),
        }))
    }

    /// Completes one record in `partial`; `Ok(false)` when it is gone or damaged.
    fn copy_record<D: Driver>(
        &mut self,
        unit: &Unit,
        partial: &mut Vec<u8>,
        driver: &D,
    ) -> Result<bool, Halt> {
        let Some((shard, position)) = address::split(unit.physical_offset) else {
            return Ok(false);
        };
        let readable = self.log.watermark().saturating_sub(position);
        if shard != self.config.number || readable == 0 {
            return Ok(false);
        }
        let mut size = unit.size as usize;
        loop {
            if size == 0 && partial.len() >= 8 {
                let Some((length, MAGIC_V1 | MAGIC_V2)) = peek_len(partial) else {
                    return Ok(false);
                };
                size = length as usize;
                // Whoever asks for any offset may not make this read without bound.
                if length == 0 || u64::from(length) > self.log.record_bytes_max() {
                    return Ok(false);
                }
            }
            if size as u64 > readable {
                return Ok(false);
            }
            if size > 0 && partial.len() >= size {
                partial.truncate(size);
                return Ok(self.check_record(unit, partial));
            }
            let at = position + partial.len() as u64;
            let want = if size > 0 {
                size - partial.len()
            } else {
                8 - partial.len()
            };
            if let Some(bytes) = self.log.in_ring(at, want) {
                partial.extend_from_slice(bytes);
                continue;
            }
            let Some(segment) = self.log.segment_of(at) else {
                return Ok(false);
            };
            let (file, offset) = (segment.file, at - segment.start);
            let limit = self.log.written().saturating_sub(segment.start);
            let limit = limit.min(self.config.segment_bytes);
            if offset >= limit {
                return Ok(false);
            }
            let bytes = self.loaded(driver, file, offset, limit)?;
            partial.extend_from_slice(bytes.get(..want).unwrap_or(bytes));
        }
    }

    fn check_record(&mut self, unit: &Unit, record: &[u8]) -> bool {
        let sound = if unit.size > 0 {
            crc32fast::hash(record) == unit.crc
        } else {
            RecordView::parse(record).is_ok_and(|view| {
                view.physical_offset() == unit.physical_offset
                    && view.check_body_crc().is_ok()
                    && view.topic() != EVENT_TOPIC.as_bytes()
            })
        };
        if !sound && unit.size > 0 {
            self.counters.damaged_records += 1;
            let offset = unit.physical_offset;
            tracing::error!(
                shard = self.config.number,
                offset,
                size = unit.size,
                "record damaged on disk, left out; `pinion inspect` tells more"
            );
        }
        sound
    }
}
