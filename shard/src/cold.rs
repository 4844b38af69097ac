//! Cold reads: answers that need bytes from disk.
//!
//! A job advances as far as the loaded windows allow, then waits for one more window. Windows are
//! slots of the driver's own pool, so cold readers use their own memory and at most
//! [`LOADS_IN_FLIGHT_MAX`] places in the disk's queue (P6). A window stays loaded until its slot is
//! needed, which is the read-ahead of a consumer that catches up.
//!
//! Invariant: every record is checked against the CRC in its unit (or its own structure where no
//! unit is known) before it is handed out; a damaged one is left out, counted and logged.

use std::collections::VecDeque;
use std::io;

use wire::message::{RecordView, peek_len};

use crate::address;
use crate::queue::QueueIndex;
use crate::runtime::{COLD_SLOT_BYTES, ColdRead, Driver, FileId, SlotId};
use crate::select::{PullLimits, Selection};
use crate::shard::{Shard, TokenKind};
use crate::units::Unit;

/// Jobs that may hold on to windows at once; others wait their turn.
pub const JOBS_ACTIVE_MAX: usize = 8;
/// Jobs one shard holds; beyond that a question is refused.
pub const JOBS_MAX: usize = 16_384;
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
        /// Tag hashes wanted.
        codes: Option<Box<[i64]>>,
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
    /// Records with a key.
    Key {
        /// Hash of topic and key.
        hash: u64,
        /// Only records stored at or after this time in milliseconds.
        from_ms: i64,
        /// Only records stored at or before this time in milliseconds.
        to_ms: i64,
        /// Candidates to look at, newest first.
        candidates_max: usize,
    },
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
    /// The disk failed to read.
    Failed(String),
}

enum Stage {
    Begin,
    Units { units: Vec<Unit>, selection: Selection },
    Copy { units: VecDeque<Unit>, partial: Vec<u8>, selection: Selection },
    KeyBlocks { runs: Vec<u64>, found: Vec<i64> },
    Search { low: i64, high: i64, first: i64 },
}

struct Job {
    token: u64,
    question: Question,
    stage: Stage,
    records: Vec<Vec<u8>>,
    waits_for: Option<u64>,
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
    dropped: bool,
}

/// A window a job needs.
#[derive(Clone, Copy)]
struct Need {
    file: FileId,
    index: u64,
    valid: usize,
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
    answers: Vec<(u64, Answer)>,
}

enum Step {
    Done(Answer),
    Need(Need),
}

impl Shard {
    /// Starts a cold job; `false` at [`JOBS_MAX`].
    pub fn ask(&mut self, token: u64, question: Question) -> bool {
        if self.cold.active.len() + self.cold.waiting.len() >= JOBS_MAX {
            return false;
        }
        self.cold.waiting.push_back(Job {
            token,
            question,
            stage: Stage::Begin,
            records: Vec::new(),
            waits_for: None,
            failed: None,
        });
        true
    }

    /// Moves finished answers to `out`.
    pub fn take_answers(&mut self, out: &mut Vec<(u64, Answer)>) {
        out.append(&mut self.cold.answers);
    }

    pub(crate) fn give_back_answers(&mut self, answers: Vec<(u64, Answer)>) {
        debug_assert!(self.cold.answers.is_empty());
        self.cold.answers = answers;
    }

    pub(crate) fn run_cold_jobs<D: Driver>(&mut self, driver: &mut D) {
        loop {
            while self.cold.active.len() < JOBS_ACTIVE_MAX {
                let Some(job) = self.cold.waiting.pop_front() else { break };
                self.cold.active.push(job);
            }
            let mut finished = false;
            let mut index = 0;
            while index < self.cold.active.len() {
                if self.cold.active.get(index).is_some_and(|job| job.waits_for.is_some()) {
                    index += 1;
                    continue;
                }
                let mut job = self.cold.active.swap_remove(index);
                match self.advance(&mut job, driver) {
                    Step::Done(answer) => {
                        self.cold.answers.push((job.token, answer));
                        finished = true;
                    }
                    Step::Need(need) => {
                        self.load(&mut job, need, driver);
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

    /// Whether some job found every slot taken and wants to try again soon.
    pub(crate) fn cold_wants_retry(&self) -> bool {
        self.cold.active.iter().any(|job| job.waits_for.is_none())
    }

    fn load<D: Driver>(&mut self, job: &mut Job, need: Need, driver: &mut D) {
        let under_way = self.cold.loads.iter().find(|load| {
            load.file == need.file && load.index == need.index && !load.dropped
                && load.valid >= need.valid
        });
        if let Some(load) = under_way {
            job.waits_for = Some(load.number);
            return;
        }
        if self.cold.loads.len() >= LOADS_IN_FLIGHT_MAX {
            // Any load that ends lets this job try again.
            job.waits_for = self.cold.loads.first().map(|load| load.number);
            return;
        }
        let stale = self.cold.windows.iter().position(|window| {
            window.file == need.file && window.index == need.index
        });
        if let Some(at) = stale {
            let window = self.cold.windows.swap_remove(at);
            driver.release_slot(window.slot);
        }
        let number = self.cold.next_load;
        let read = ColdRead {
            file: need.file,
            file_offset: need.index * WINDOW,
            len: COLD_SLOT_BYTES,
            token: self.token(TokenKind::Window, number),
        };
        if !driver.cold_read(read) {
            self.evict(driver);
            if !driver.cold_read(read) {
                return;
            }
        }
        self.cold.next_load += 1;
        self.counters.cold_windows += 1;
        let (file, index, valid) = (need.file, need.index, need.valid);
        self.cold.loads.push(Load { number, file, index, valid, dropped: false });
        job.waits_for = Some(number);
    }

    fn evict<D: Driver>(&mut self, driver: &mut D) {
        let oldest = self.cold.windows.iter().enumerate().min_by_key(|(_, window)| window.used);
        if let Some(at) = oldest.map(|(at, _)| at) {
            let window = self.cold.windows.swap_remove(at);
            driver.release_slot(window.slot);
        }
    }

    pub(crate) fn on_window<D: Driver>(
        &mut self,
        driver: &mut D,
        number: u64,
        slot: SlotId,
        result: io::Result<usize>,
    ) {
        let at = self.cold.loads.iter().position(|load| load.number == number);
        let Some(load) = at.map(|at| self.cold.loads.swap_remove(at)) else {
            driver.release_slot(slot);
            return;
        };
        let failure = match &result {
            Ok(bytes) if *bytes < load.valid && load.valid < COLD_SLOT_BYTES => {
                Some(format!("short read: {bytes} of {} bytes", load.valid))
            }
            Ok(0) => Some("read behind the end of the file".to_owned()),
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        for job in &mut self.cold.active {
            if job.waits_for == Some(number) {
                job.waits_for = None;
                job.failed.clone_from(&failure);
            }
        }
        match result {
            Ok(bytes) if !load.dropped => {
                self.cold.tick += 1;
                let (file, index, used) = (load.file, load.index, self.cold.tick);
                let valid = load.valid.min(bytes);
                self.cold.windows.push(Window { file, index, slot, valid, used });
            }
            _ => driver.release_slot(slot),
        }
    }

    /// Forgets windows of a file that is about to be dropped.
    pub(crate) fn forget_windows<D: Driver>(&mut self, driver: &mut D, file: FileId) {
        let windows = &mut self.cold.windows;
        while let Some(at) = windows.iter().position(|window| window.file == file) {
            let window = windows.swap_remove(at);
            driver.release_slot(window.slot);
        }
        for load in &mut self.cold.loads {
            load.dropped |= load.file == file;
        }
    }

    /// The loaded bytes from an offset of a file to the end of its window, or what is needed.
    /// `limit` is the first byte of the file that is not valid on disk.
    fn loaded<'d, D: Driver>(
        &mut self,
        driver: &'d D,
        file: FileId,
        offset: u64,
        limit: u64,
    ) -> Result<&'d [u8], Need> {
        let (index, inside) = (offset / WINDOW, (offset % WINDOW) as usize);
        let valid = limit.saturating_sub(index * WINDOW).min(WINDOW) as usize;
        self.cold.tick += 1;
        let tick = self.cold.tick;
        let window = self.cold.windows.iter_mut().find(|window| {
            window.file == file && window.index == index && window.valid > inside
        });
        match window {
            Some(window) => {
                window.used = tick;
                Ok(driver.slot(window.slot).get(inside..window.valid).unwrap_or_default())
            }
            None => Err(Need { file, index, valid }),
        }
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
                    job.stage = Stage::Copy { units: units.into(), partial: Vec::new(), selection };
                    Ok(None)
                }
                Stage::Copy { units, partial, selection } => {
                    self.copy(job, units, partial, selection, driver)
                }
                Stage::KeyBlocks { runs, found } => self.key_blocks(job, runs, found, driver),
                Stage::Search { low, high, first } => self.search(job, low, high, first, driver),
            };
            match result {
                Ok(Some(answer)) => return Step::Done(answer),
                Ok(None) => {}
                Err(need) => return Step::Need(need),
            }
        }
    }

    fn begin<D: Driver>(&mut self, job: &mut Job, driver: &D) -> Result<Option<Answer>, Need> {
        match job.question.clone() {
            Question::Pull { queue, offset, codes, limits } => {
                let (mut scratch, mut units) = (Vec::new(), Vec::new());
                let codes = codes.as_deref();
                let mut selection =
                    self.select(queue, offset, codes, limits, &mut scratch, &mut units);
                if selection == Selection::OnDisk {
                    selection =
                        self.select_on_disk(queue, offset, codes, limits, driver, &mut units)?;
                }
                job.stage = Stage::Units { units, selection };
            }
            Question::Record { physical_offset } => {
                let unit = Unit { physical_offset, ..Unit::default() };
                job.stage = Stage::Units { units: vec![unit], selection: Selection::Empty };
            }
            Question::Records { units } => {
                job.stage = Stage::Units { units, selection: Selection::Empty };
            }
            Question::Key { hash, from_ms, to_ms, .. } => {
                let recent = self.keys.iter().rev().filter(|(key, _)| *key == hash);
                let found = recent.map(|(_, offset)| *offset).collect();
                let runs = self.runs.values().filter(|run| {
                    run.meta.first_timestamp <= to_ms && run.meta.last_timestamp >= from_ms
                });
                let runs = runs.map(|run| run.meta.start).collect();
                job.stage = Stage::KeyBlocks { runs, found };
            }
            Question::Time { queue, timestamp, lower } => {
                if let Some(offset) = self.search_in_memory(queue, timestamp, lower) {
                    return Ok(Some(Answer::Offset(offset)));
                }
                let (low, high) = self.extent_for_time(queue, timestamp, lower);
                job.stage = Stage::Search { low, high, first: low };
            }
        }
        Ok(None)
    }

    /// Chooses units of a run file, from one window of it.
    fn select_on_disk<D: Driver>(
        &mut self,
        queue: QueueIndex,
        offset: i64,
        codes: Option<&[i64]>,
        limits: PullLimits,
        driver: &D,
        out: &mut Vec<Unit>,
    ) -> Result<Selection, Need> {
        let count = match codes {
            None => limits.messages_max as u64,
            Some(_) => crate::select::SCAN_UNITS_MAX,
        };
        let scanned = self.disk_units(queue, offset, count.max(1), driver)?;
        if scanned.is_empty() {
            // The units are gone or damaged: step over one offset rather than stand still.
            let next_offset = offset as u64 + 1;
            return Ok(Selection::NoneMatched { next_offset });
        }
        let next_offset = crate::select::choose(&scanned, offset as u64, codes, limits, out);
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
    ) -> Result<Vec<Unit>, Need> {
        let mut units = Vec::new();
        let extent = self.queues.get(queue).and_then(|queue| queue.extent_of(offset as u64));
        let Some(extent) = extent.copied() else { return Ok(units) };
        let Some(run) = self.runs.get(&extent.run_start) else { return Ok(units) };
        let (file, units_at) = (run.file, run.meta.units_at);
        let mut index = u64::from(extent.unit_index) + (offset as u64 - extent.first_offset);
        let end = (u64::from(extent.unit_index) + u64::from(extent.count)).min(index + count);
        while index < end {
            let (at, inside) = crate::run::unit_place(units_at, index);
            let bytes = match self.loaded(driver, file, at, u64::MAX) {
                Ok(bytes) => bytes,
                Err(need) if units.is_empty() => return Err(need),
                Err(_) => break,
            };
            let Some(block) = bytes.get(..crate::io::BLOCK_BYTES) else { break };
            if !crate::run::block_is_whole(block) {
                self.counters.damaged_records += 1;
                tracing::error!(shard = self.config.number, run = extent.run_start, at,
                    "queue units damaged; stop the broker and delete the consumequeue directory to rebuild");
                break;
            }
            let first = inside / crate::units::UNIT_BYTES;
            let take = (crate::run::UNITS_PER_BLOCK - first).min((end - index) as usize);
            crate::run::units_in_block(block, first, take, &mut units);
            index += take as u64;
        }
        Ok(units)
    }

    fn copy<D: Driver>(
        &mut self,
        job: &mut Job,
        mut units: VecDeque<Unit>,
        mut partial: Vec<u8>,
        selection: Selection,
        driver: &D,
    ) -> Result<Option<Answer>, Need> {
        while let Some(unit) = units.front().copied() {
            match self.copy_record(&unit, &mut partial, driver) {
                Ok(whole) => {
                    units.pop_front();
                    let record = std::mem::take(&mut partial);
                    if whole {
                        job.records.push(record);
                    }
                }
                Err(need) => {
                    job.stage = Stage::Copy { units, partial, selection };
                    return Err(need);
                }
            }
        }
        let records = std::mem::take(&mut job.records);
        Ok(Some(match &job.question {
            Question::Pull { .. } => {
                let messages = records.len();
                Answer::Pull { selection, bytes: records.concat(), messages }
            }
            Question::Key { from_ms, to_ms, .. } => {
                let wanted = |record: &Vec<u8>| {
                    RecordView::parse(record)
                        .is_ok_and(|view| (*from_ms..=*to_ms).contains(&view.store_timestamp()))
                };
                Answer::Records(records.into_iter().filter(wanted).collect())
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
    ) -> Result<bool, Need> {
        let Some((shard, position)) = address::split(unit.physical_offset) else { return Ok(false) };
        if shard != self.config.number || position >= self.log.watermark() {
            return Ok(false);
        }
        let mut size = unit.size as usize;
        loop {
            if size == 0 && partial.len() >= 8 {
                size = peek_len(partial).map_or(0, |(size, _)| size as usize);
                if size == 0 {
                    return Ok(false);
                }
            }
            if size > 0 && partial.len() >= size {
                partial.truncate(size);
                return Ok(self.check_record(unit, partial));
            }
            let at = position + partial.len() as u64;
            let want = if size > 0 { size - partial.len() } else { 8 - partial.len() };
            if let Some(bytes) = self.log.in_ring(at, want) {
                partial.extend_from_slice(bytes);
                continue;
            }
            let Some(segment) = self.log.segment_of(at) else { return Ok(false) };
            let (file, offset) = (segment.file, at - segment.start);
            let limit = self.log.written().saturating_sub(segment.start);
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
                view.physical_offset() == unit.physical_offset && view.check_body_crc().is_ok()
            })
        };
        if !sound && unit.size > 0 {
            self.counters.damaged_records += 1;
            let offset = unit.physical_offset;
            tracing::error!(shard = self.config.number, offset, size = unit.size,
                "record damaged on disk, left out; `pinion inspect` tells more");
        }
        sound
    }

    fn key_blocks<D: Driver>(
        &mut self,
        job: &mut Job,
        mut runs: Vec<u64>,
        mut found: Vec<i64>,
        driver: &D,
    ) -> Result<Option<Answer>, Need> {
        let Question::Key { hash, candidates_max, .. } = job.question else { return Ok(None) };
        while let Some(run) = runs.last().and_then(|start| self.runs.get(start)) {
            let fences = &run.meta.key_fences;
            // Equal hashes may begin in the block before the first fence that is not smaller.
            let first = fences.partition_point(|fence| *fence < hash).saturating_sub(1);
            let last = fences.partition_point(|fence| *fence <= hash);
            let (file, keys_at) = (run.file, run.meta.keys_at);
            let mut in_run = Vec::new();
            for block in first..last {
                let at = keys_at + (block * crate::io::BLOCK_BYTES) as u64;
                let bytes = match self.loaded(driver, file, at, u64::MAX) {
                    Ok(bytes) => bytes,
                    Err(need) => {
                        job.stage = Stage::KeyBlocks { runs, found };
                        return Err(need);
                    }
                };
                let block = bytes.get(..crate::io::BLOCK_BYTES).unwrap_or_default();
                if crate::run::block_is_whole(block) {
                    crate::run::keys_in_block(block, hash, &mut in_run);
                }
            }
            found.extend(in_run.into_iter().rev());
            runs.pop();
            if found.len() >= candidates_max {
                break;
            }
        }
        found.truncate(candidates_max);
        let units = found.into_iter().map(|offset| Unit { physical_offset: offset, ..Unit::default() });
        job.stage = Stage::Units { units: units.collect(), selection: Selection::Empty };
        Ok(None)
    }

    fn extent_for_time(&self, queue: QueueIndex, timestamp: i64, lower: bool) -> (i64, i64) {
        let Some(queue) = self.queues.get(queue) else { return (0, 0) };
        let at = queue.extents.partition_point(|extent| {
            if lower { extent.last_timestamp < timestamp } else { extent.last_timestamp <= timestamp }
        });
        match queue.extents.get(at) {
            Some(extent) => (extent.first_offset as i64, extent.end_offset() as i64),
            None => (queue.ring_first_offset as i64, queue.ring_first_offset as i64),
        }
    }

    fn search<D: Driver>(
        &mut self,
        job: &mut Job,
        mut low: i64,
        mut high: i64,
        first: i64,
        driver: &D,
    ) -> Result<Option<Answer>, Need> {
        let Question::Time { queue, timestamp, lower } = job.question else { return Ok(None) };
        while low < high {
            let middle = low + (high - low) / 2;
            let units = match self.disk_units(queue, middle, 1, driver) {
                Ok(units) => units,
                Err(need) => {
                    job.stage = Stage::Search { low, high, first };
                    return Err(need);
                }
            };
            let time = units.first().map_or(i64::MAX, |unit| unit.store_timestamp);
            if if lower { time < timestamp } else { time <= timestamp } {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let min = self.queues.get(queue).map_or(0, |queue| queue.min_offset as i64);
        Ok(Some(Answer::Offset(if lower { low } else { (low - 1).max(min) })))
    }
}
