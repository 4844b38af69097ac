//! Sealing: turning the oldest part of the unit ring into run files, a little per turn.
//!
//! A mark says where a run will end. Once the log is on disk up to the oldest mark, the units in
//! front of it are sorted by queue in small steps on the shard's thread; the auxiliary thread
//! encodes and writes the file; the queues are told in small steps, too; then the slots are freed.
//!
//! Invariant: a run is written only when everything it speaks of is synced (P2, P8), and slots are
//! freed only when the run is durable and every queue knows of it. No turn does more than a bounded
//! part of this, however many queues a run has.

use std::collections::VecDeque;
use std::io;

use crate::error::StoreError;
use crate::io::{FileJob, JobOutcome, JobOutcomeOf};
use crate::queue::{Extent, QueueIndex, QueueTable};
use crate::run::{self, KeyEntry, RunContent, RunMeta, RunQueue};
use crate::runtime::{Driver, Now};
use crate::shard::{KEYS_HELD_MAX, Run, Shard, TokenKind};
use crate::units::{UNIT_BYTES, UnitRing};

/// Slots or queues handled per turn; bounds what sealing adds to one turn: about 50 µs, or 300 µs
/// where every slot is of another queue and each queue comes from memory.
pub const SEAL_SLOTS_PER_TURN: u64 = 2048;
/// Pause before a run that could not be written is tried again, in microseconds.
pub const RETRY_US: u64 = 1_000_000;
/// Keys that make a run, so that many keys per message do not fill the room for keys.
const RUN_KEYS: u64 = (KEYS_HELD_MAX / 4) as u64;

#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    sequence: u64,
    position: u64,
    keys: u64,
    events: u64,
}

/// What is done next of a build. The second and the last go through the queues, the others through
/// the slots.
enum Phase {
    Count,
    LayOut,
    Place,
    Release,
}

struct Build {
    from: Mark,
    mark: Mark,
    phase: Phase,
    /// Next slot.
    cursor: u64,
    /// Next of the touched queues.
    next_queue: usize,
    touched: Vec<QueueIndex>,
    queues: Vec<RunQueue>,
    /// The extents of `queues`, for the queues themselves.
    extents: Vec<Extent>,
    units_laid_out: u32,
    units: Vec<u8>,
    first_timestamp: i64,
    last_timestamp: i64,
}

/// A run that is being written, and then told to its queues.
struct Writing {
    mark: Mark,
    meta: RunMeta,
    touched: Vec<QueueIndex>,
    extents: Vec<Extent>,
    /// Whether the file is there and the queues are being told.
    is_durable: bool,
    /// Next of the touched queues.
    next_queue: usize,
}

/// The state of sealing.
#[derive(Default)]
pub struct Sealer {
    marks: VecDeque<Mark>,
    sealed: Mark,
    /// The newest mark, wherever it has got to.
    newest: Mark,
    build: Option<Build>,
    writing: Option<Writing>,
    seal_all: bool,
    /// When a run that could not be written is tried again; 0 when the last one was written.
    retry_at_us: u64,
}

impl Sealer {
    /// Starts behind what recovery found sealed.
    #[must_use]
    pub fn new(position: u64, sequence: u64) -> Self {
        let sealed = Mark {
            sequence,
            position,
            keys: 0,
            events: 0,
        };
        Self {
            sealed,
            newest: sealed,
            ..Self::default()
        }
    }

    /// Marks the end of a run in front of what is appended next.
    pub fn mark(&mut self, sequence: u64, position: u64, keys_held: usize, events_held: usize) {
        if position > self.newest.position {
            self.newest = Mark {
                sequence,
                position,
                keys: self.sealed.keys + keys_held as u64,
                events: self.sealed.events + events_held as u64,
            };
            self.marks.push_back(self.newest);
        }
    }

    /// Asks for a run that ends at the end of the log.
    pub fn seal_all(&mut self) {
        self.seal_all = true;
    }

    /// Position up to which runs cover the log.
    #[must_use]
    pub fn sealed_to(&self) -> u64 {
        self.sealed.position
    }

    /// Events written with runs so far, and those in front of the newest mark.
    pub(crate) fn event_counts(&self) -> (u64, u64) {
        (self.sealed.events, self.newest.events)
    }

    /// Whether not all queues know yet of the run that starts here.
    #[must_use]
    pub(crate) fn is_installing(&self, run_start: u64) -> bool {
        let writing = self.writing.as_ref();
        writing.is_some_and(|writing| writing.meta.start == run_start)
    }

    /// Whether the last attempt to write a run failed.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.retry_at_us != 0
    }
}

impl Build {
    fn new(from: Mark, mark: Mark) -> Self {
        let slots = (mark.sequence - from.sequence) as usize;
        Self {
            from,
            mark,
            phase: Phase::Count,
            cursor: from.sequence,
            next_queue: 0,
            touched: Vec::new(),
            queues: Vec::new(),
            extents: Vec::new(),
            units_laid_out: 0,
            units: vec![0; slots * UNIT_BYTES],
            first_timestamp: i64::MAX,
            last_timestamp: 0,
        }
    }

    /// One bounded step; `true` when the build is complete.
    fn step(&mut self, units: &UnitRing, queues: &mut QueueTable) -> bool {
        let to = self.mark.sequence.min(self.cursor + SEAL_SLOTS_PER_TURN);
        match self.phase {
            Phase::Count => {
                self.count(units, queues, to);
                if self.cursor == self.mark.sequence {
                    self.extents.reserve(self.touched.len());
                    self.phase = Phase::LayOut;
                }
                false
            }
            Phase::LayOut => {
                self.lay_out(queues);
                if self.next_queue == self.touched.len() {
                    self.units
                        .truncate(self.units_laid_out as usize * UNIT_BYTES);
                    (self.phase, self.cursor) = (Phase::Place, self.from.sequence);
                }
                false
            }
            Phase::Place => {
                self.place(units, queues, to);
                if self.cursor == self.mark.sequence {
                    (self.phase, self.next_queue) = (Phase::Release, 0);
                }
                false
            }
            Phase::Release => {
                self.release(queues);
                self.next_queue == self.touched.len()
            }
        }
    }

    fn count(&mut self, units: &UnitRing, queues: &mut QueueTable, to: u64) {
        let run_start = self.from.position;
        while self.cursor < to {
            let slot = units.get(self.cursor).copied();
            self.cursor += 1;
            let Some(slot) = slot else { continue };
            // A removal behind the range may yet be lost in a crash, and then the queue lives.
            let removed = |at: Option<u64>| at.is_some_and(|at| at <= self.mark.position);
            let queue = queues
                .get_mut(slot.queue)
                .filter(|q| !removed(q.removed_at));
            let Some(queue) = queue else { continue };
            let time = slot.unit.store_timestamp;
            self.first_timestamp = self.first_timestamp.min(time);
            self.last_timestamp = self.last_timestamp.max(time);
            if queue.run_count == 0 {
                queue.run_index = self.touched.len() as u32;
                self.touched.push(slot.queue);
                let extent = Extent {
                    run_start,
                    first_offset: slot.queue_offset,
                    count: 0,
                    unit_index: 0,
                    first_timestamp: time,
                    last_timestamp: time,
                };
                let (topic, queue_id) = (queue.topic.clone(), queue.queue_id);
                self.queues.push(RunQueue {
                    topic,
                    queue_id,
                    extent,
                });
            }
            queue.run_count += 1;
            if let Some(entry) = self.queues.get_mut(queue.run_index as usize) {
                entry.extent.count += 1;
                entry.extent.last_timestamp = time;
            }
        }
    }

    /// The end of this step through the queues.
    fn queues_to(&self) -> usize {
        let to = self.next_queue + SEAL_SLOTS_PER_TURN as usize;
        self.touched.len().min(to)
    }

    fn lay_out(&mut self, queues: &mut QueueTable) {
        let to = self.queues_to();
        let steps = self.next_queue..to;
        self.next_queue = to;
        for (at, entry) in steps
            .clone()
            .zip(self.queues.get_mut(steps).into_iter().flatten())
        {
            let next = self.units_laid_out;
            entry.extent.unit_index = next;
            let touched = self.touched.get(at);
            if let Some(queue) = touched.and_then(|index| queues.get_mut(*index)) {
                queue.run_index = next;
            }
            self.units_laid_out += entry.extent.count;
            self.extents.push(entry.extent);
        }
    }

    /// Takes the builder's marks off the queues.
    fn release(&mut self, queues: &mut QueueTable) {
        let to = self.queues_to();
        for index in self.touched.get(self.next_queue..to).into_iter().flatten() {
            if let Some(queue) = queues.get_mut(*index) {
                queue.run_count = 0;
            }
        }
        self.next_queue = to;
    }

    fn place(&mut self, units: &UnitRing, queues: &mut QueueTable, to: u64) {
        let mut encoded = Vec::with_capacity(UNIT_BYTES);
        while self.cursor < to {
            let slot = units.get(self.cursor).copied();
            self.cursor += 1;
            let Some(slot) = slot else { continue };
            let Some(queue) = queues.get_mut(slot.queue).filter(|q| q.run_count > 0) else {
                continue;
            };
            let at = queue.run_index as usize * UNIT_BYTES;
            queue.run_index += 1;
            encoded.clear();
            slot.unit.encode(&mut encoded);
            if let Some(target) = self.units.get_mut(at..at + UNIT_BYTES) {
                target.copy_from_slice(&encoded);
            }
        }
    }

    /// The content of the run, once complete.
    fn into_content(
        mut self,
        shard: u16,
        keys: &VecDeque<KeyEntry>,
        events: &VecDeque<(u64, Vec<u8>)>,
        newest_timestamp: i64,
    ) -> (RunContent, Vec<QueueIndex>, Vec<Extent>) {
        if self.queues.is_empty() {
            // Events only: as old as the newest record, so that retention keeps them long enough.
            (self.first_timestamp, self.last_timestamp) = (newest_timestamp, newest_timestamp);
        }
        let meta = RunMeta {
            start: self.from.position,
            end: self.mark.position,
            first_timestamp: self.first_timestamp,
            last_timestamp: self.last_timestamp,
            ..RunMeta::default()
        };
        let told = events
            .iter()
            .take((self.mark.events - self.from.events) as usize);
        let mut told: Vec<(u64, Vec<u8>)> = told.cloned().collect();
        crate::half::without_ended(&mut told, meta.start);
        let content = RunContent {
            meta,
            shard,
            queues: self.queues,
            units: self.units,
            keys: keys
                .iter()
                .take((self.mark.keys - self.from.keys) as usize)
                .copied()
                .collect(),
            events: told,
        };
        (content, self.touched, self.extents)
    }
}

/// Tells queues where their units went.
pub(crate) fn install(extents: &[Extent], touched: &[QueueIndex], queues: &mut QueueTable) {
    for (index, extent) in touched.iter().zip(extents) {
        let Some(queue) = queues.get_mut(*index).filter(|queue| !queue.removed) else {
            continue;
        };
        queue.extents.push(*extent);
        queue.ring_first_offset = extent.end_offset();
    }
}

/// The run of everything in the ring, at once; recovery uses it.
pub(crate) fn build_now(
    shard: u16,
    range: (u64, u64),
    units: &UnitRing,
    queues: &mut QueueTable,
    keys: &VecDeque<KeyEntry>,
    events: &VecDeque<(u64, Vec<u8>)>,
    newest_timestamp: i64,
) -> (RunContent, Vec<QueueIndex>, Vec<Extent>) {
    let from = Mark {
        sequence: units.freed(),
        position: range.0,
        keys: 0,
        events: 0,
    };
    let mark = Mark {
        sequence: units.appended(),
        position: range.1,
        keys: keys.len() as u64,
        events: events.len() as u64,
    };
    let mut build = Build::new(from, mark);
    while !build.step(units, queues) {}
    build.into_content(shard, keys, events, newest_timestamp)
}

impl Shard {
    pub(crate) fn seal_step<D: Driver>(&mut self, now: Now, driver: &mut D) {
        self.mark_if_due(now);
        self.install_step();
        if self.sealer.writing.is_some() || now.monotonic_us < self.sealer.retry_at_us {
            return;
        }
        if self.sealer.build.is_none() {
            self.start_build(now, driver);
        }
        let Some(mut build) = self.sealer.build.take() else {
            return;
        };
        if build.step(&self.units, &mut self.queues) {
            self.write_run(build, driver);
        } else {
            self.sealer.build = Some(build);
        }
    }

    /// When sealing wants another turn, in monotonic microseconds.
    pub(crate) fn seal_deadline_us(&self, now: Now) -> Option<u64> {
        let writing = self.sealer.writing.as_ref();
        let is_installing = writing.is_some_and(|writing| writing.is_durable);
        if self.sealer.build.is_some() || is_installing {
            return Some(now.monotonic_us);
        }
        let mark = self
            .sealer
            .marks
            .front()
            .filter(|_| self.sealer.writing.is_none())?;
        let ready = self.log.synced() >= mark.position;
        ready.then(|| self.sealer.retry_at_us.max(now.monotonic_us))
    }

    fn mark_if_due(&mut self, now: Now) {
        let last = self.sealer.newest;
        let units = self.units.appended() - last.sequence;
        let bytes = self.log.tail() - last.position;
        let keys = self.sealer.sealed.keys + self.keys.len() as u64 - last.keys;
        let due = units >= self.config.run_units
            || bytes >= self.config.run_log_bytes
            || keys >= RUN_KEYS;
        if due || (self.sealer.seal_all && bytes > 0) {
            self.log.append_mark(now);
            let (sequence, position) = (self.units.appended(), self.log.tail());
            self.sealer
                .mark(sequence, position, self.keys.len(), self.events.len());
        }
    }

    fn start_build<D: Driver>(&mut self, now: Now, driver: &mut D) {
        let Some(mark) = self.sealer.marks.front().copied() else {
            return;
        };
        if self.log.synced() < mark.position {
            let base = self.token(TokenKind::Log, 0);
            if self.log.written() >= mark.position {
                self.log.start_flush(now, driver, base);
            }
            return;
        }
        self.sealer.marks.pop_front();
        self.sealer.build = Some(Build::new(self.sealer.sealed, mark));
    }

    fn write_run<D: Driver>(&mut self, build: Build, driver: &mut D) {
        let mark = build.mark;
        let (content, touched, extents) = build.into_content(
            self.config.number,
            &self.keys,
            &self.events,
            self.last_store_timestamp,
        );
        let meta = content.meta.clone();
        let path = self
            .config
            .run_dir
            .join(run::file_name(self.config.number, meta.start));
        let target = path.clone();
        let job = FileJob::Call(Box::new(move |storage: &D::Storage| {
            let (bytes, meta) = run::encode(content);
            let file = run::write(storage, &target, &bytes)?;
            Ok(JobOutcomeOf::FileWith(file, meta.to_bytes()))
        }));
        driver.file_job(job, self.token(TokenKind::Run, 0));
        self.sealer.writing = Some(Writing {
            mark,
            meta,
            touched,
            extents,
            is_durable: false,
            next_queue: 0,
        });
    }

    pub(crate) fn on_run_written(&mut self, now: Now, result: io::Result<JobOutcome>) {
        let Some(mut writing) = self.sealer.writing.take() else {
            return;
        };
        let (mark, meta) = (writing.mark, writing.meta.clone());
        let path = self
            .config
            .run_dir
            .join(run::file_name(self.config.number, meta.start));
        let (file, meta) = match result {
            Ok(JobOutcome::FileWith(file, bytes)) => (file, meta.completed_from(&bytes)),
            Ok(_) => return,
            Err(source) => {
                // The log is untouched, and the units stay in the ring until the file is there;
                // appends are refused once the ring is full.
                let error = StoreError::file("write run", path, source);
                if let Some(times) = self.failures.run.failed(now.monotonic_us) {
                    let shard = self.config.number;
                    tracing::error!(shard, times, %error, "tried again every second");
                }
                self.sealer.marks.push_front(mark);
                self.sealer.retry_at_us = (now.monotonic_us + RETRY_US).max(1);
                return;
            }
        };
        self.sealer.retry_at_us = 0;
        if let Some(times) = self.failures.run.worked() {
            tracing::info!(
                shard = self.config.number,
                times,
                "runs can be written again"
            );
        }
        // From here on keys and events are looked up in the run, and offsets of each queue as soon
        // as it knows of it.
        let sealed = self.sealer.sealed;
        self.keys
            .drain(..((mark.keys - sealed.keys) as usize).min(self.keys.len()));
        self.events
            .drain(..((mark.events - sealed.events) as usize).min(self.events.len()));
        (self.sealer.sealed.keys, self.sealer.sealed.events) = (mark.keys, mark.events);
        self.runs.insert(meta.start, Run { meta, file, path });
        writing.is_durable = true;
        self.sealer.writing = Some(writing);
    }

    /// Tells some more queues of the run that was written; when all know, frees the slots.
    fn install_step(&mut self) {
        let Some(writing) = self
            .sealer
            .writing
            .as_mut()
            .filter(|writing| writing.is_durable)
        else {
            return;
        };
        let to = writing.next_queue + SEAL_SLOTS_PER_TURN as usize;
        let part = writing.next_queue..to.min(writing.touched.len());
        writing.next_queue = part.end;
        install(
            writing.extents.get(part.clone()).unwrap_or_default(),
            writing.touched.get(part).unwrap_or_default(),
            &mut self.queues,
        );
        if writing.next_queue == writing.touched.len() {
            self.units.free_to(writing.mark.sequence);
            self.sealer.sealed = writing.mark;
            self.sealer.writing = None;
        }
    }
}
