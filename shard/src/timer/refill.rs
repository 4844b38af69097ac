//! Filling the window again: the nearest pending messages behind its frontier, from the units in
//! run files and unit ring.
//!
//! The auxiliary thread goes through the units of the timer queue and keeps the nearest that fit;
//! what has come meanwhile is looked at when it is done. The first scan, which counts everything
//! too, is part of recovery, so that a start delays nothing that is due.
//!
//! Invariant: the frontier moves only when everything in front of it has been looked at.

use std::collections::BinaryHeap;
use std::io;
use std::path::PathBuf;

use super::progress::{Key, Progress};
use super::window::{ENTRY_BYTES, Entry, WINDOW_MAX};
use super::{LEVELS_MAX, Timers};
use crate::io::{BLOCK_BYTES, FileJob, JobOutcome, JobOutcomeOf, OpenMode, Storage, StoreFile};
use crate::queue::{Extent, QueueTable};
use crate::run::{self, UNITS_PER_BLOCK};
use crate::runtime::{Driver, Now};
use crate::shard::{Shard, TokenKind};
use crate::units::Unit;

/// The window is filled again when it holds fewer.
const REFILL_BELOW: usize = WINDOW_MAX / 4;
/// Pause after a scan that failed, in microseconds.
const RETRY_US: u64 = 500_000;
/// Blocks of a run file read at once.
const READ_BLOCKS: usize = 64;
/// Units taken from the unit ring at once.
const RING_UNITS: u64 = 4096;

/// First and last key among the units of one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Note {
    pub(super) first: Key,
    /// Progress that has reached this has done them all.
    pub(super) last: Key,
}

/// One scan under way.
struct Scan {
    floor: Key,
    /// Queue offset up to which units have been looked at.
    scanned_to: u64,
    loaded: Vec<Entry>,
    cut: Key,
    found: u64,
    by_level: [u64; LEVELS_MAX + 1],
    void: bool,
}

/// The state of filling.
#[derive(Default)]
pub(crate) struct Refill {
    scan: Option<Box<Scan>>,
    retry_at_us: u64,
}

impl Refill {
    /// The frontier has moved back: what is being looked for would leave a hole.
    pub(super) fn void(&mut self) {
        if let Some(scan) = &mut self.scan {
            scan.void = true;
        }
    }
}

/// The units of one run that are to be looked at.
struct Part {
    run_start: u64,
    path: PathBuf,
    units_at: u64,
    extent: Extent,
    first: Option<Key>,
}

/// What the auxiliary thread is to do.
struct Order {
    parts: Vec<Part>,
    progress: Progress,
    rolled_to: u64,
    floor: Key,
    room: usize,
}

/// What it found.
struct Found {
    damaged: Option<u64>,
    notes: Vec<(u64, Note)>,
    count: u64,
    by_level: [u64; LEVELS_MAX + 1],
    cut: Key,
    entries: BinaryHeap<Entry>,
}

fn put_key(out: &mut Vec<u8>, key: Key) {
    out.extend_from_slice(&key.due_ms.to_be_bytes());
    out.extend_from_slice(&key.position.to_be_bytes());
}

struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn long(&mut self) -> Option<u64> {
        let (head, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_be_bytes(*head))
    }

    fn key(&mut self) -> Option<Key> {
        let due_ms = self.long()? as i64;
        let position = self.long()?;
        Some(Key { due_ms, position })
    }
}

impl Found {
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(1024 + self.entries.len() * ENTRY_BYTES);
        out.extend_from_slice(&self.damaged.map_or(u64::MAX, |start| start).to_be_bytes());
        out.extend_from_slice(&(self.notes.len() as u64).to_be_bytes());
        for (start, note) in &self.notes {
            out.extend_from_slice(&start.to_be_bytes());
            put_key(&mut out, note.first);
            put_key(&mut out, note.last);
        }
        out.extend_from_slice(&self.count.to_be_bytes());
        for count in self.by_level {
            out.extend_from_slice(&count.to_be_bytes());
        }
        put_key(&mut out, self.cut);
        for entry in &self.entries {
            entry.encode(&mut out);
        }
        out
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut cursor = Cursor(bytes);
        let damaged = Some(cursor.long()?).filter(|start| *start != u64::MAX);
        let mut notes = Vec::new();
        for _ in 0..cursor.long()? {
            let start = cursor.long()?;
            let (first, last) = (cursor.key()?, cursor.key()?);
            notes.push((start, Note { first, last }));
        }
        let count = cursor.long()?;
        let mut by_level = [0; LEVELS_MAX + 1];
        for level in &mut by_level {
            *level = cursor.long()?;
        }
        let cut = cursor.key()?;
        let entries = cursor.0.chunks_exact(ENTRY_BYTES);
        Some(Self {
            damaged,
            notes,
            count,
            by_level,
            cut,
            entries: entries.filter_map(Entry::decode).collect(),
        })
    }
}

impl Order {
    fn is_pending(&self, entry: &Entry) -> bool {
        let position = entry.key.position;
        position >= self.rolled_to
            && entry.key > self.floor
            && !self.progress.covers(position, entry.done_at())
    }

    fn run<S: Storage>(mut self, storage: &S) -> io::Result<Found> {
        let mut found = Found {
            damaged: None,
            notes: Vec::new(),
            count: 0,
            by_level: [0; LEVELS_MAX + 1],
            cut: Key::LAST,
            entries: BinaryHeap::new(),
        };
        // Those nothing is known of first: they must be looked at in any case.
        self.parts.sort_by_key(|part| part.first);
        let parts = std::mem::take(&mut self.parts);
        for part in &parts {
            let full = found.entries.len() >= self.room;
            let behind = part.first > found.entries.peek().map(|entry| entry.key);
            if full && part.first.is_some() && behind {
                found.cut = found.entries.peek().map_or(found.cut, |entry| entry.key);
                break;
            }
            if !self.take_part(storage, part, &mut found)? {
                found.damaged = Some(part.run_start);
                break;
            }
        }
        Ok(found)
    }

    /// Goes through one run; `false` when it is damaged.
    fn take_part<S: Storage>(
        &self,
        storage: &S,
        part: &Part,
        found: &mut Found,
    ) -> io::Result<bool> {
        let mut note = Note {
            first: Key::LAST,
            last: Key::FIRST,
        };
        let whole = each_unit(storage, part, |unit| {
            let entry = Entry::of(unit);
            note.first = note.first.min(entry.key);
            note.last = note.last.max(entry.done_at());
            if self.is_pending(&entry) {
                self.keep(entry, found);
            }
        })?;
        found.notes.push((part.run_start, note));
        Ok(whole)
    }

    fn keep(&self, entry: Entry, found: &mut Found) {
        found.count += 1;
        if let Some(count) = found.by_level.get_mut(usize::from(entry.level)) {
            *count += 1;
        }
        if found.entries.len() < self.room {
            found.entries.push(entry);
            return;
        }
        if let Some(mut last) = found.entries.peek_mut()
            && entry.key < last.key
        {
            *last = entry;
        }
        found.cut = found.entries.peek().map_or(Key::FIRST, |last| last.key);
    }
}

/// Hands over the units of a run in order; `false` when a block is damaged.
fn each_unit<S: Storage>(
    storage: &S,
    part: &Part,
    mut take: impl FnMut(&Unit),
) -> io::Result<bool> {
    let file = storage.open(&part.path, OpenMode::Read)?;
    let mut index = u64::from(part.extent.unit_index);
    let end = index + u64::from(part.extent.count);
    let (mut bytes, mut units) = (vec![0; READ_BLOCKS * BLOCK_BYTES], Vec::new());
    while index < end {
        let (at, _) = run::unit_place(part.units_at, index);
        let read = file.read_at(&mut bytes, at)?;
        let blocks = bytes.get(..read).unwrap_or_default();
        if blocks.len() < BLOCK_BYTES {
            return Ok(false);
        }
        let places = (at..).step_by(BLOCK_BYTES);
        for (block, at) in blocks.chunks_exact(BLOCK_BYTES).zip(places) {
            if index >= end {
                break;
            }
            if !run::block_is_whole(block, part.extent.run_start, at) {
                return Ok(false);
            }
            let first = (index % UNITS_PER_BLOCK as u64) as usize;
            let count = (UNITS_PER_BLOCK - first).min((end - index) as usize);
            units.clear();
            run::units_in_block(block, first, count, &mut units);
            units.iter().for_each(&mut take);
            index += count as u64;
        }
    }
    Ok(true)
}

impl Scan {
    fn new(floor: Key) -> Self {
        Self {
            floor,
            scanned_to: 0,
            loaded: Vec::new(),
            cut: Key::LAST,
            found: 0,
            by_level: [0; LEVELS_MAX + 1],
            void: false,
        }
    }

    fn take(&mut self, found: Found) {
        self.found += found.count;
        self.cut = self.cut.min(found.cut);
        self.loaded.extend(found.entries);
        for (sum, count) in self.by_level.iter_mut().zip(found.by_level) {
            *sum += count;
        }
    }
}

impl Timers {
    /// The first scan, at the end of recovery; [`Shard::end_first_scan`] ends it. What it cannot
    /// read is left to the scan of the running shard.
    pub(crate) fn scan_at_start<S: Storage>(
        &mut self,
        storage: &S,
        queues: &QueueTable,
        run_of: impl Fn(u64) -> Option<(PathBuf, u64)>,
    ) {
        let Some(queue) = queues.get(self.queue) else {
            return;
        };
        let parts = queue.extents.iter().filter_map(|extent| {
            let (path, units_at) = run_of(extent.run_start)?;
            Some(Part {
                run_start: extent.run_start,
                path,
                units_at,
                extent: *extent,
                first: None,
            })
        });
        let order = Order {
            parts: parts.collect(),
            progress: self.log.progress.clone(),
            rolled_to: self.log.rolled_to,
            floor: Key::FIRST,
            room: WINDOW_MAX / 2,
        };
        match order.run(storage) {
            Ok(found) if found.damaged.is_none() => {
                let mut scan = Scan::new(Key::FIRST);
                self.notes.extend(found.notes.iter().copied());
                scan.take(found);
                scan.scanned_to = queue.ring_first_offset;
                self.refill.scan = Some(Box::new(scan));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "index of timed messages not read; tried again"),
        }
    }

    fn wants_refill(&self) -> bool {
        let held = self.window.len() + self.stage.len();
        !self.counts.complete || (held < REFILL_BELOW && self.window.frontier() < Key::LAST)
    }
}

impl Shard {
    pub(super) fn refill_deadline_us(&self, now: Now) -> Option<u64> {
        let refill = &self.timers.refill;
        let wanted = refill.scan.is_none() && self.timers.wants_refill();
        wanted.then(|| refill.retry_at_us.max(now.monotonic_us))
    }

    pub(super) fn refill_step<D: Driver>(&mut self, now: Now, driver: &mut D) {
        let refill = &self.timers.refill;
        let busy = refill.scan.is_some() || now.monotonic_us < refill.retry_at_us;
        if busy || !self.timers.wants_refill() {
            return;
        }
        let floor = self.timers.window.frontier();
        self.timers.refill.scan = Some(Box::new(Scan::new(floor)));
        self.scan_more(now, driver);
    }

    /// Looks at the run files that have not been looked at, or ends the scan.
    fn scan_more<D: Driver>(&mut self, now: Now, driver: &mut D) {
        let timers = &self.timers;
        let Some(scan) = &timers.refill.scan else {
            return;
        };
        let Some(queue) = self.queues.get(timers.queue) else {
            return;
        };
        let (floor, scanned_to) = (scan.floor, scan.scanned_to);
        let parts = queue.extents.iter().filter_map(|extent| {
            let note = timers.notes.get(&extent.run_start);
            let run = self.runs.get(&extent.run_start)?;
            let beyond = note.is_none_or(|note| note.last > floor);
            let wanted = extent.end_offset() > scanned_to && beyond;
            wanted.then(|| Part {
                run_start: extent.run_start,
                path: run.path.clone(),
                units_at: run.meta.units_at,
                extent: *extent,
                first: note.map(|note| note.first),
            })
        });
        let parts: Vec<Part> = parts
            .filter(|part| !self.is_run_done(part.run_start))
            .collect();
        let next = queue.ring_first_offset;
        let order = Order {
            progress: timers.log.progress.clone(),
            rolled_to: timers.log.rolled_to,
            floor,
            room: ((WINDOW_MAX - timers.window.len()) / 2).max(1),
            parts,
        };
        if let Some(scan) = &mut self.timers.refill.scan {
            scan.scanned_to = next;
        }
        if order.parts.is_empty() {
            return self.end_scan(now);
        }
        let job = FileJob::Call(Box::new(move |storage: &D::Storage| {
            Ok(JobOutcomeOf::Bytes(order.run(storage)?.to_bytes()))
        }));
        driver.file_job(job, self.token(TokenKind::Timers, 0));
    }

    /// Takes what the auxiliary thread found.
    pub(crate) fn on_timers_scanned<D: Driver>(
        &mut self,
        now: Now,
        driver: &mut D,
        result: io::Result<JobOutcome>,
    ) {
        let shard = self.config.number;
        let found = match result {
            Ok(JobOutcome::Bytes(bytes)) => Found::from_bytes(&bytes),
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(shard, %error, "index of timed messages not read; tried again");
                None
            }
        };
        let refill = &mut self.timers.refill;
        let damaged = found.as_ref().and_then(|found| found.damaged);
        let (Some(scan), Some(found), None) = (&mut refill.scan, found, damaged) else {
            refill.scan = None;
            refill.retry_at_us = now.monotonic_us + RETRY_US;
            if let Some(start) = damaged {
                self.damaged_run(start, 0);
            }
            return;
        };
        self.timers.notes.extend(found.notes.iter().copied());
        scan.take(found);
        self.scan_more(now, driver);
    }

    /// Ends the scan that recovery began.
    pub(crate) fn end_first_scan(&mut self) {
        if self.timers.refill.scan.is_some() {
            self.end_scan(Now {
                monotonic_us: 0,
                wall_ms: 0,
            });
        }
    }

    /// Takes the units in the ring and moves the frontier.
    fn end_scan(&mut self, now: Now) {
        let Some(mut scan) = self.timers.refill.scan.take() else {
            return;
        };
        if scan.void {
            self.timers.refill.retry_at_us = now.monotonic_us + RETRY_US;
            return;
        }
        self.scan_ring(&mut scan);
        let timers = &mut self.timers;
        let cut = scan.cut;
        scan.loaded.retain(|entry| entry.key <= cut);
        let loaded = scan.loaded.len() as u64;
        if timers.counts.complete {
            timers.counts.far = timers.counts.far.saturating_sub(loaded);
        } else {
            timers.counts.complete = true;
            timers.counts.far = scan.found - loaded;
            timers.counts.by_level = scan.by_level;
        }
        if cut == Key::LAST {
            timers.counts.far = 0;
        }
        timers.window.set_frontier(cut);
        for entry in scan.loaded {
            // The frontier moves back when more come than fit.
            if entry.key <= timers.window.frontier() {
                timers.put(entry);
            } else {
                timers.counts.far += 1;
            }
        }
    }

    fn scan_ring(&mut self, scan: &mut Scan) {
        let Some(queue) = self.queues.get(self.timers.queue) else {
            return;
        };
        let (mut next, end) = (scan.scanned_to, queue.readable);
        let newest = queue.last_sequence;
        let mut units = Vec::with_capacity(RING_UNITS as usize);
        while next < end {
            let last = (next + RING_UNITS).min(end) - 1;
            units.clear();
            if !self.units.collect(newest, next, last, &mut units) {
                debug_assert!(false, "units are in the ring from {next} on");
                return;
            }
            for entry in units.iter().map(Entry::of) {
                if entry.key > scan.floor && self.timers.log.is_pending(&entry) {
                    scan.found += 1;
                    if let Some(count) = scan.by_level.get_mut(usize::from(entry.level)) {
                        *count += 1;
                    }
                    if entry.key <= scan.cut {
                        scan.loaded.push(entry);
                    }
                }
            }
            next = last + 1;
        }
    }

    /// Whether nothing in a run waits any more.
    pub(super) fn is_run_done(&self, run_start: u64) -> bool {
        let Some(run) = self.runs.get(&run_start) else {
            return true;
        };
        let log = &self.timers.log;
        let note = self.timers.notes.get(&run_start);
        let last = run.meta.end.saturating_sub(1);
        log.rolled_to >= run.meta.end
            || note.is_some_and(|note| log.progress.covers(last, note.last))
    }

    /// The parts of the timer queue in front of a position in which something waits.
    pub(super) fn parts_before<'a>(
        &'a self,
        position: u64,
    ) -> impl Iterator<Item = &'a Extent> + 'a {
        let extents = self.queues.get(self.timers.queue).map(|q| q.extents.iter());
        extents
            .into_iter()
            .flatten()
            .filter(move |extent| extent.run_start < position)
            .filter(|extent| !self.is_run_done(extent.run_start))
    }

    /// Forgets what was known of dropped runs.
    pub(crate) fn forget_timer_notes_before(&mut self, position: u64) {
        self.timers.notes = self.timers.notes.split_off(&position);
    }

    /// Reads the first pending messages of some runs in log order, and how many bytes all take.
    pub(super) fn read_pending<D: Driver>(
        &mut self,
        driver: &mut D,
        extents: &[Extent],
        (count_max, bytes_max): (usize, u64),
    ) {
        let parts = extents.iter().filter_map(|extent| {
            let run = self.runs.get(&extent.run_start)?;
            Some(Part {
                run_start: extent.run_start,
                path: run.path.clone(),
                units_at: run.meta.units_at,
                extent: *extent,
                first: None,
            })
        });
        let parts: Vec<Part> = parts.collect();
        let order = Order {
            progress: self.timers.log.progress.clone(),
            rolled_to: self.timers.log.rolled_to,
            floor: Key::FIRST,
            room: count_max,
            parts: Vec::new(),
        };
        let job = FileJob::Call(Box::new(move |storage: &D::Storage| {
            let mut pending = Vec::new();
            let mut bytes = 0u64;
            for part in &parts {
                let whole = each_unit(storage, part, |unit| {
                    let entry = Entry::of(unit);
                    if order.is_pending(&entry) {
                        if pending.is_empty() || (pending.len() < order.room && bytes < bytes_max) {
                            pending.push(entry);
                        }
                        bytes += u64::from(entry.size);
                    }
                })?;
                if !whole {
                    let text = format!("{} is damaged", part.path.display());
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
            }
            let mut out = bytes.to_be_bytes().to_vec();
            pending.iter().for_each(|entry| entry.encode(&mut out));
            Ok(JobOutcomeOf::Bytes(out))
        }));
        driver.file_job(job, self.token(TokenKind::Roll, 0));
    }
}
