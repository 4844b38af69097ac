//! Upkeep of a shard: segments prepared ahead, retention, and the watch on disk space.
//!
//! Everything here is a job for the auxiliary thread; the shard only decides and takes note.
//!
//! Invariants: zeros are never written to a range that the log may already be writing to; a segment
//! is recycled only after nothing can read it any more; segment names disappear oldest first, so
//! that a crash never leaves a hole in their row; the end of a queue whose last messages go is
//! durable in the log before they go (P3).

use std::io;
use std::path::{Path, PathBuf};

use crate::address;
use crate::error::Refusal;
use crate::event::Event;
use crate::io::{BLOCK_BYTES, FileJob, JobOutcome, JobOutcomeOf, Space, Storage};
use crate::log::Segment;
use crate::runtime::{Driver, Now};
use crate::segments::REMOVING_SUFFIX;
use crate::shard::{Shard, TokenKind};

/// How often the space of the file system is measured, in microseconds.
pub const SPACE_CHECK_US: u64 = 1_000_000;
/// Bytes of prepared segments kept ahead (at least one segment, at most [`READY_SEGMENTS_MAX`]).
pub const READY_BYTES: u64 = 64 * 1024 * 1024;
/// Prepared segments at most.
pub const READY_SEGMENTS_MAX: u64 = 8;
/// Zeros written per job, in bytes.
pub const ZERO_STEP_BYTES: u64 = 8 * 1024 * 1024;
/// Old segments kept for recycling.
pub const RECYCLED_SEGMENTS_MAX: usize = 2;
/// Queue ends in one internal record.
const ENDS_PER_EVENT_MAX: usize = 64;

/// Why and how much retention may drop.
#[derive(Clone, Copy, Debug)]
pub struct RetentionOrder {
    /// Drop segments whose newest message is older than this store time in milliseconds.
    pub expired_before_ms: i64,
    /// Drop the oldest segment even if it has not expired.
    pub force_oldest: bool,
    /// Segments to drop at most.
    pub segments_max: usize,
}

/// How many segments of a size a shard prepares ahead of its log.
#[must_use]
pub fn ready_segments(segment_bytes: u64) -> u64 {
    (READY_BYTES / segment_bytes.max(1)).clamp(1, READY_SEGMENTS_MAX)
}

/// The name of a segment on its way out; a start removes what it finds under such names.
fn removing_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(REMOVING_SUFFIX);
    PathBuf::from(name)
}

impl Shard {
    pub(crate) fn maintain<D: Driver>(&mut self, now: Now, driver: &mut D) {
        self.prepare_segment(driver);
        self.zero_step(driver);
        if !self.space_pending && now.monotonic_us >= self.space_checked_us + SPACE_CHECK_US {
            self.space_checked_us = now.monotonic_us;
            self.space_pending = true;
            let dir = self.config.log_dir.clone();
            driver.file_job(FileJob::Space { dir }, self.token(TokenKind::Space, 0));
        }
    }

    fn ready_target(&self) -> usize {
        ready_segments(self.config.segment_bytes) as usize
    }

    fn prepare_segment<D: Driver>(&mut self, driver: &mut D) {
        if self.preparing.is_some()
            || self.stopping
            || self.log.poison().is_some()
            || self.log.ready.len() >= self.ready_target()
            || self.prepare_waits
        {
            return;
        }
        let newest = self.log.ready.back().or(self.log.segments.back());
        let start = newest.map_or(0, |segment| segment.start + self.config.segment_bytes);
        let path = self
            .config
            .log_dir
            .join(address::segment_name(self.config.number, start));
        let recycled = self.recycled.pop();
        let fresh = recycled.is_none();
        let job = FileJob::PrepareSegment {
            path,
            recycled,
            bytes: self.config.segment_bytes,
            zero_first_bytes: 0,
        };
        self.preparing = Some((start, fresh));
        driver.file_job(job, self.token(TokenKind::Prepare, start & 0xff_ffff_ffff));
    }

    fn on_prepared(&mut self, now: Now, result: io::Result<JobOutcome>) {
        let Some((start, fresh)) = self.preparing.take() else {
            return;
        };
        let path = self
            .config
            .log_dir
            .join(address::segment_name(self.config.number, start));
        match result {
            Ok(JobOutcome::File(file)) => {
                self.prepare_worked();
                self.counters.segments_prepared += 1;
                self.log.ready.push_back(Segment { start, file, path });
                if fresh && self.zero_next.is_none() {
                    self.zero_next = Some(start);
                }
            }
            Ok(_) => {}
            Err(error) => {
                // Tried again once the space has been measured again.
                let reason = format!("{}: {error}", path.display());
                if let Some(times) = self.failures.prepare.failed(now.monotonic_us) {
                    let shard = self.config.number;
                    tracing::error!(shard, times, "cannot prepare segment {reason}; trying on");
                }
                self.log.prepare_error = Some(reason);
                self.prepare_waits = true;
            }
        }
    }

    fn prepare_worked(&mut self) {
        self.log.prepare_error = None;
        if let Some(times) = self.failures.prepare.worked() {
            let shard = self.config.number;
            tracing::info!(shard, times, "segments can be prepared again");
        }
    }

    /// Writes zeros ahead of the log, one step at a time, at a distance the log cannot cover while
    /// a step lasts; should it do so all the same, the log waits for the step.
    fn zero_step<D: Driver>(&mut self, driver: &mut D) {
        if self.log.zeroing.is_some() || self.stopping {
            return;
        }
        let Some(next) = self.zero_next else { return };
        let floor = (self.log.tail() + 2 * ZERO_STEP_BYTES).next_multiple_of(BLOCK_BYTES as u64);
        let next = next.max(floor);
        let segment = self
            .log
            .segments
            .back()
            .into_iter()
            .chain(&self.log.ready)
            .find(|segment| {
                segment.start <= next && next < segment.start + self.config.segment_bytes
            });
        let Some(segment) = segment else {
            self.zero_next = None;
            return;
        };
        let end = (next + ZERO_STEP_BYTES).min(segment.start + self.config.segment_bytes);
        let job = FileJob::Zero {
            path: segment.path.clone(),
            from: next - segment.start,
            bytes: end - next,
        };
        self.log.zeroing = Some((next, end));
        self.zero_next = Some(end);
        driver.file_job(job, self.token(TokenKind::Zero, 0));
    }

    /// Takes the end of a file job.
    pub(crate) fn on_job<D: Driver>(
        &mut self,
        now: Now,
        driver: &mut D,
        kind: u8,
        _number: u64,
        result: io::Result<JobOutcome>,
    ) {
        if kind == TokenKind::Prepare as u8 {
            self.on_prepared(now, result);
        } else if kind == TokenKind::Zero as u8 {
            if let Err(error) = result {
                tracing::warn!(shard = self.config.number, %error, "zeros not written ahead");
                self.zero_next = None;
            }
            self.log.zeroing = None;
        } else if kind == TokenKind::Run as u8 {
            self.on_run_written(now, result);
        } else if kind == TokenKind::Discard as u8 {
            self.discards_in_flight -= 1;
            if let Err(error) = result {
                tracing::warn!(shard = self.config.number, %error, "old file not removed");
            }
        } else if kind == TokenKind::Retire as u8 {
            self.on_retired(driver, result);
        } else if kind == TokenKind::Rebuild as u8 {
            self.on_rebuilt(now, driver, result);
        } else if kind == TokenKind::Space as u8 {
            self.on_space(result);
        } else if kind == TokenKind::Timers as u8 {
            self.on_timers_scanned(now, driver, result);
        } else if kind == TokenKind::Roll as u8 {
            self.on_roll_found(now, result);
        }
    }

    fn on_space(&mut self, result: io::Result<JobOutcome>) {
        self.space_pending = false;
        self.prepare_waits = false;
        if let Ok(JobOutcome::Space(space)) = result {
            self.space = space;
            let used = space.total_bytes.saturating_sub(space.available_bytes);
            let percent = used
                .saturating_mul(100)
                .checked_div(space.total_bytes)
                .unwrap_or(0);
            let before = std::mem::replace(&mut self.disk_used_percent, percent as u32);
            let stop = self.config.disk_stop_percent;
            if (before >= stop) != (self.disk_used_percent >= stop) {
                let refuses = self.disk_used_percent >= stop;
                let shard = self.config.number;
                tracing::warn!(shard, percent, stop, refuses, "disk mark passed");
            }
        }
    }

    /// Use of the file system in percent, as last measured.
    #[must_use]
    pub fn disk_used_percent(&self) -> u32 {
        self.disk_used_percent
    }

    /// Space of the file system of the log, as last measured; zeros before the first time.
    #[must_use]
    pub fn space(&self) -> Space {
        self.space
    }

    /// Directory of the log.
    #[must_use]
    pub fn log_dir(&self) -> &Path {
        &self.config.log_dir
    }

    /// Drops old segments with their runs, once what has to be remembered of them is durable.
    /// Returns how many are dropped.
    pub fn retain<D: Driver>(&mut self, driver: &mut D, order: RetentionOrder) -> usize {
        if self.dropping.is_some() || !self.retiring.is_empty() || self.has_old_levels() {
            return 0;
        }
        let mut ends = Vec::new();
        for segment in &self.log.segments {
            let end = segment.start + self.config.segment_bytes;
            let settled = self.sealer.sealed_to().min(self.log.synced());
            if ends.len() >= order.segments_max || end > settled {
                break;
            }
            let newest = self
                .runs
                .range(segment.start..end)
                .map(|(_, r)| r.meta.last_timestamp);
            let expired = newest.max().unwrap_or(0) < order.expired_before_ms;
            let forced = order.force_oldest && ends.is_empty();
            if !(expired || forced) {
                break;
            }
            ends.push(end);
        }
        let free = ends.iter().position(|end| self.timers_left_before(*end));
        let count = free.unwrap_or(ends.len());
        let last = count.checked_sub(1).and_then(|at| ends.get(at));
        let Some(position) = last.copied() else {
            return 0;
        };
        if self.halves_hold_back(position, order.force_oldest) {
            return 0;
        }
        match self.note_ends(driver.now(), position) {
            Ok(durable_at) => {
                self.failures.retention.worked();
                self.dropping = Some((position, durable_at));
                self.retention_step(driver);
                count
            }
            Err(refusal) => {
                if let Some(times) = self.failures.retention.failed(driver.now().monotonic_us) {
                    let shard = self.config.number;
                    tracing::warn!(shard, times, %refusal,
                        "retention waits: it cannot note down queue ends");
                }
                0
            }
        }
    }

    /// Puts the ends of queues into the log that have no message behind `position`. Returns the
    /// position up to which the log must be synced before the messages may go.
    fn note_ends(&mut self, now: Now, position: u64) -> Result<u64, Refusal> {
        let emptied = self.queues.emptied_before(position);
        for part in emptied.chunks(ENDS_PER_EVENT_MAX) {
            let ends = part.iter().filter_map(|index| {
                let queue = self.queues.get(*index)?;
                Some((queue.topic.to_string(), queue.queue_id, queue.next_offset))
            });
            let event = Event::QueueEnds {
                queues: ends.collect(),
            };
            let noted_at = self.append_event(now, &event)?;
            for index in part {
                if let Some(queue) = self.queues.get_mut(*index) {
                    queue.noted_at = noted_at;
                }
            }
        }
        // Removals of topics count too: queues of removed topics are not noted down.
        self.log.append_mark(now);
        Ok(self.log.tail())
    }

    /// Drops what retention has chosen, when its notes are durable.
    pub(crate) fn retention_step<D: Driver>(&mut self, driver: &mut D) {
        if let Some((position, durable_at)) = self.dropping
            && self.log.synced() >= durable_at
        {
            self.dropping = None;
            self.drop_before(driver, position);
        }
    }

    fn drop_before<D: Driver>(&mut self, driver: &mut D, position: u64) {
        let lost = self.unconsumed_before(position);
        self.queues.drop_before(position);
        self.timers.log.forget_removed_before(position);
        self.forget_timer_notes_before(position);
        self.drop_halves_before(position);
        for segment in self.log.drop_before(position) {
            let (shard, path) = (self.config.number, segment.path.display());
            self.counters.segments_dropped += 1;
            tracing::info!(shard, %path, "segment dropped");
            self.forget_windows(driver, segment.file);
            driver.drop_file(segment.file);
            self.retiring.push(segment.path);
        }
        self.retire(driver);
        // Behind the segments: runs that are left over alone are dropped by the next start.
        let kept = self.runs.split_off(&position);
        for (_, run) in std::mem::replace(&mut self.runs, kept) {
            self.forget_windows(driver, run.file);
            driver.drop_file(run.file);
            self.discard(driver, run.path);
        }
        for (topic, group, queue_id, from, to) in lost {
            tracing::warn!(
                topic,
                group,
                queue_id,
                from,
                to,
                "retention dropped unconsumed messages"
            );
        }
    }

    /// Takes the dropped segments out of the row of segment names, oldest first.
    fn retire<D: Driver>(&mut self, driver: &mut D) {
        let paths = self.retiring.clone();
        let dir = self.config.log_dir.clone();
        self.discards_in_flight += 1;
        let job = FileJob::Call(Box::new(move |storage: &D::Storage| {
            for path in paths {
                storage.rename(&path, &removing_path(&path))?;
                storage.sync_dir(&dir)?;
            }
            Ok(JobOutcomeOf::Done)
        }));
        driver.file_job(job, self.token(TokenKind::Retire, 0));
    }

    fn on_retired<D: Driver>(&mut self, driver: &mut D, result: io::Result<JobOutcome>) {
        self.discards_in_flight -= 1;
        let retired = std::mem::take(&mut self.retiring);
        if let Err(error) = result {
            let shard = self.config.number;
            tracing::warn!(shard, %error, "old segments stay until the next start");
            return;
        }
        for path in retired.iter().map(|path| removing_path(path)) {
            if self.recycled.len() < RECYCLED_SEGMENTS_MAX {
                self.recycled.push(path);
            } else {
                self.discard(driver, path);
            }
        }
    }

    pub(crate) fn discard<D: Driver>(&mut self, driver: &mut D, path: PathBuf) {
        self.discards_in_flight += 1;
        driver.file_job(FileJob::Remove { path }, self.token(TokenKind::Discard, 0));
    }

    /// Offsets that committed groups have not reached and that dropping `..position` loses.
    fn unconsumed_before(&self, position: u64) -> Vec<(String, String, i32, i64, i64)> {
        let mut lost = Vec::new();
        for (topic, group, entry) in self.offsets.iter() {
            let Some(index) = self.queues.find(topic, entry.queue_id) else {
                continue;
            };
            let Some(queue) = self.queues.get(index) else {
                continue;
            };
            let gone = queue
                .extents
                .partition_point(|extent| extent.run_start < position);
            let Some(last) = gone.checked_sub(1).and_then(|at| queue.extents.get(at)) else {
                continue;
            };
            let end = last.end_offset() as i64;
            if entry.offset >= 0 && entry.offset < end {
                lost.push((
                    topic.into(),
                    group.into(),
                    entry.queue_id,
                    entry.offset,
                    end,
                ));
            }
        }
        lost
    }
}
