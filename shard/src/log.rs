//! The commit log of one shard: the write buffer, the ordered stream of group writes, and the
//! watermarks.
//!
//! A record is encoded once, straight into the locked ring ([`Log::reserve`], [`Log::publish`]).
//! Groups of whole blocks go from the ring to the current segment; the last, partial block is
//! written only when the stream would otherwise idle or an acknowledgement waits for it.
//!
//! Invariants: `synced <= written <= submitted <= tail`; a block is never in two writes at once;
//! rewriting the tail block changes no byte in front of the old tail (so a tear between its old
//! and new content leaves earlier records whole); after one failed write or flush nothing is
//! submitted any more and no watermark moves (P1, P7).

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use crate::address;
use crate::error::Refusal;
use crate::io::BLOCK_BYTES;
use crate::memory::LockedRing;
use crate::runtime::{Driver, FileId, Now, RingId, RingWrite};

/// Smallest group written while nothing else is in flight, in bytes; beside others in flight a
/// group waits until it has four times as much, because larger writes cost less per byte.
pub const GROUP_BYTES_MIN: u64 = 64 * 1024;
/// Largest group under asynchronous flush, in bytes.
pub const GROUP_BYTES_MAX: u64 = 1024 * 1024;
/// Largest group when acknowledgements wait for it, in bytes.
pub const GROUP_BYTES_EAGER_MAX: u64 = 1024 * 1024;
/// Groups in flight under asynchronous flush.
pub const GROUPS_IN_FLIGHT_MAX: usize = 4;
/// How long bytes may linger in the ring before a partial group is written, in microseconds.
pub const LINGER_US: u64 = 5_000;
/// Blank record that fills the end of a segment: length and magic.
pub const BLANK_BYTES: u64 = 8;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// What an acknowledgement waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AckPoint {
    /// The record is complete in a buffer that outlives the process.
    Buffered,
    /// The write has completed.
    Written,
    /// The device has been flushed after the write.
    Synced,
}

/// One segment file.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Position of its first byte.
    pub start: u64,
    /// The open file.
    pub file: FileId,
    /// Its path, for messages and removal.
    pub path: PathBuf,
}

/// Fixed properties of a log.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Shard number.
    pub shard: u16,
    /// Directory of the segments.
    pub dir: PathBuf,
    /// Bytes per segment, a multiple of the block size.
    pub segment_bytes: u64,
    /// What acknowledgements wait for.
    pub ack: AckPoint,
    /// Interval of device flushes under asynchronous flush, in microseconds.
    pub flush_interval_us: u64,
}

/// Where recovery left the log.
pub struct LogState {
    /// Segments with records, oldest first; the last one is current.
    pub segments: VecDeque<Segment>,
    /// Prepared segments that follow.
    pub ready: VecDeque<Segment>,
    /// End of the log.
    pub tail: u64,
}

#[derive(Debug)]
struct Group {
    token: u64,
    start: u64,
    data_end: u64,
    after: u64,
    submitted_us: u64,
    done: bool,
}

#[derive(Debug)]
struct FlushRound {
    target: u64,
    remaining: usize,
    started_us: u64,
}

/// The log.
pub struct Log {
    config: LogConfig,
    ring: LockedRing,
    ring_id: Option<RingId>,
    pub(crate) segments: VecDeque<Segment>,
    pub(crate) ready: VecDeque<Segment>,
    tail: u64,
    submitted: u64,
    written: u64,
    synced: u64,
    gaps: VecDeque<(u64, u64)>,
    in_flight: VecDeque<Group>,
    flush_round: Option<FlushRound>,
    last_flush_us: u64,
    pending_since_us: u64,
    /// Range that the auxiliary thread is filling with zeros.
    pub(crate) zeroing: Option<(u64, u64)>,
    next_token: u64,
    poison: Option<String>,
    /// Why the next segment could not be prepared.
    pub(crate) prepare_error: Option<String>,
    flush_groups: u64,
    segments_opened: u64,
}

fn block_down(position: u64) -> u64 {
    position & !(BLOCK - 1)
}

fn block_up(position: u64) -> u64 {
    (position + BLOCK - 1) & !(BLOCK - 1)
}

impl Log {
    /// Takes over a recovered log. The bytes of the tail block must be in the ring already.
    #[must_use]
    pub fn new(config: LogConfig, ring: LockedRing, state: LogState) -> Self {
        let tail = state.tail;
        let log = Self {
            config,
            ring,
            ring_id: None,
            segments: state.segments,
            ready: state.ready,
            tail,
            submitted: tail,
            written: tail,
            synced: tail,
            gaps: VecDeque::with_capacity(64),
            in_flight: VecDeque::with_capacity(GROUPS_IN_FLIGHT_MAX),
            flush_round: None,
            last_flush_us: 0,
            pending_since_us: 0,
            zeroing: None,
            next_token: 0,
            poison: None,
            prepare_error: None,
            flush_groups: 0,
            segments_opened: 0,
        };
        log.ring.header().set_base(block_down(tail));
        log.ring.header().set_written(tail);
        log.ring.header().set_published(tail);
        log
    }

    /// Registers the ring with the driver that will write from it.
    pub fn attach<D: Driver>(&mut self, driver: &mut D) -> io::Result<()> {
        self.ring_id = Some(driver.register_ring(&self.ring)?);
        Ok(())
    }

    /// Fixed properties.
    #[must_use]
    pub fn config(&self) -> &LogConfig {
        &self.config
    }

    /// End of the log.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Position up to which writes have completed.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Position up to which the device has been flushed.
    #[must_use]
    pub fn synced(&self) -> u64 {
        self.synced
    }

    /// Oldest kept position.
    #[must_use]
    pub fn min_position(&self) -> u64 {
        self.segments.front().map_or(self.tail, |segment| segment.start)
    }

    /// Position up to which acknowledgements may be sent and records be read.
    #[must_use]
    pub fn watermark(&self) -> u64 {
        match self.config.ack {
            AckPoint::Buffered => self.tail,
            AckPoint::Written => self.written,
            AckPoint::Synced => self.synced,
        }
    }

    /// Why the log takes nothing more, if it is poisoned.
    #[must_use]
    pub fn poison(&self) -> Option<&str> {
        self.poison.as_deref()
    }

    /// Group writes submitted so far.
    #[must_use]
    pub fn groups_submitted(&self) -> u64 {
        self.flush_groups
    }

    /// Age of the oldest group in flight, in microseconds.
    #[must_use]
    pub fn oldest_in_flight_us(&self, now: Now) -> u64 {
        let write = self.in_flight.front().map(|group| group.submitted_us);
        let flush = self.flush_round.as_ref().map(|round| round.started_us);
        let oldest = write.into_iter().chain(flush).min();
        oldest.map_or(0, |since| now.monotonic_us.saturating_sub(since))
    }

    /// Lowest position whose bytes the ring still holds.
    #[must_use]
    pub fn ring_floor(&self) -> u64 {
        let lapped = block_up(self.tail).saturating_sub(self.ring.bytes() as u64);
        lapped.max(self.ring.header().base())
    }

    /// Bytes of a record in the ring; `None` when it has been overwritten.
    #[must_use]
    pub fn in_ring(&self, position: u64, len: usize) -> Option<&[u8]> {
        if position < self.ring_floor() || position + len as u64 > self.tail {
            return None;
        }
        Some(self.ring.slice(position, len))
    }

    /// The segment that holds a position.
    #[must_use]
    pub fn segment_of(&self, position: u64) -> Option<&Segment> {
        let first = self.segments.front()?.start;
        let index = position.checked_sub(first)? / self.config.segment_bytes;
        self.segments.get(usize::try_from(index).ok()?)
    }

    fn segment_end(&self) -> u64 {
        self.segments.back().map_or(0, |segment| segment.start + self.config.segment_bytes)
    }

    fn check_ring(&self, end: u64, now: Now) -> Result<(), Refusal> {
        let bytes = self.ring.bytes() as u64;
        if block_up(end) - block_down(self.written) <= bytes {
            return Ok(());
        }
        Err(Refusal::BufferFull {
            shard: self.config.shard,
            held_bytes: self.tail - self.written,
            bound_bytes: bytes,
            oldest_ms: self.oldest_in_flight_us(now) / 1000,
        })
    }

    /// Whether `bytes` more fit the ring, were they appended without a roll.
    pub fn check_room(&self, bytes: u64, now: Now) -> Result<(), Refusal> {
        if let Some(reason) = &self.poison {
            return Err(Refusal::Poisoned { shard: self.config.shard, reason: reason.clone() });
        }
        if self.tail + bytes + BLANK_BYTES > self.segment_end() && self.ready.is_empty() {
            return Err(self.segment_missing(self.segment_end()));
        }
        self.check_ring(self.tail + bytes, now)
    }

    fn segment_missing(&self, position: u64) -> Refusal {
        let reason = self.prepare_error.clone();
        Refusal::SegmentMissing {
            shard: self.config.shard,
            position,
            reason: reason.unwrap_or_else(|| "still being prepared".to_owned()),
        }
    }

    /// Segments opened so far; grows by one with every roll.
    #[must_use]
    pub fn segments_opened(&self) -> u64 {
        self.segments_opened
    }

    /// Makes room for a record of `len` bytes and returns its position. Rolls to the next segment
    /// when the current one is full. A refusal changes nothing.
    pub fn reserve(&mut self, len: u64, now: Now) -> Result<u64, Refusal> {
        if let Some(reason) = &self.poison {
            return Err(Refusal::Poisoned { shard: self.config.shard, reason: reason.clone() });
        }
        let bound = self.config.segment_bytes - BLANK_BYTES;
        if len > bound || len > self.ring.bytes() as u64 / 2 {
            let bound = bound.min(self.ring.bytes() as u64 / 2);
            return Err(Refusal::TooLarge { bytes: len, bound });
        }
        let segment_end = self.segment_end();
        if self.tail + len + BLANK_BYTES <= segment_end {
            self.check_ring(self.tail + len, now)?;
            return Ok(self.tail);
        }
        self.check_ring(segment_end + len, now)?;
        self.roll(segment_end, now)?;
        Ok(self.tail)
    }

    /// Closes the current segment with a blank record and moves on to the prepared one.
    fn roll(&mut self, segment_end: u64, now: Now) -> Result<(), Refusal> {
        let Some(next) = self.ready.pop_front() else {
            return Err(self.segment_missing(segment_end));
        };
        debug_assert_eq!(next.start, segment_end);
        let left = (segment_end - self.tail) as u32;
        let blank = self.ring.slice_mut(self.tail, BLANK_BYTES as usize);
        let (size, magic) = blank.split_at_mut(4);
        size.copy_from_slice(&left.to_be_bytes());
        magic.copy_from_slice(&wire::message::MAGIC_BLANK.to_be_bytes());
        self.gaps.push_back((self.tail + BLANK_BYTES, segment_end));
        self.tail = segment_end;
        self.segments.push_back(next);
        self.segments_opened += 1;
        self.mark_pending(now);
        self.ring.header().set_published(self.tail);
        Ok(())
    }

    /// The reserved bytes, to encode the record into.
    pub fn reserved(&mut self, position: u64, len: usize) -> &mut [u8] {
        debug_assert_eq!(position, self.tail);
        self.ring.slice_mut(position, len)
    }

    /// Makes the record at the tail part of the log.
    pub fn publish(&mut self, len: u64, now: Now) {
        self.tail += len;
        self.mark_pending(now);
        self.ring.header().set_published(self.tail);
    }

    fn mark_pending(&mut self, now: Now) {
        if self.pending_since_us == 0 {
            self.pending_since_us = now.monotonic_us.max(1);
        }
    }

    fn eager(&self) -> bool {
        self.config.ack != AckPoint::Buffered
    }

    /// Monotonic time at which [`Log::pump`] wants to run again, in microseconds.
    #[must_use]
    pub fn deadline_us(&self) -> Option<u64> {
        if self.poison.is_some() {
            return None;
        }
        let linger = (self.tail > self.submitted && self.in_flight.is_empty())
            .then(|| self.pending_since_us + LINGER_US);
        let flush = (self.synced < self.written && self.flush_round.is_none())
            .then(|| self.last_flush_us + self.config.flush_interval_us);
        linger.into_iter().chain(flush).min()
    }

    /// Submits what is due: group writes, and device flushes under asynchronous flush.
    pub fn pump<D: Driver>(&mut self, now: Now, driver: &mut D, token_base: u64) {
        if self.poison.is_some() {
            return;
        }
        while let Some((start, data_end, after)) = self.next_group(now) {
            self.submit(start, data_end, after, now, driver, token_base);
        }
        self.flush_if_due(now, driver, token_base);
    }

    /// The next group to write as `(start, data end, position after it)`, if one is due.
    fn next_group(&self, now: Now) -> Option<(u64, u64, u64)> {
        let depth = if self.eager() { 1 } else { GROUPS_IN_FLIGHT_MAX };
        if self.tail == self.submitted || self.in_flight.len() >= depth {
            return None;
        }
        if !self.submitted.is_multiple_of(BLOCK) && !self.in_flight.is_empty() {
            return None;
        }
        let start = block_down(self.submitted);
        let gap = self.gaps.front().copied();
        let limit = gap.map_or(self.tail, |(from, _)| from);
        let group_max = if self.eager() { GROUP_BYTES_EAGER_MAX } else { GROUP_BYTES_MAX };
        let ring_room = self.ring.bytes() as u64 - self.ring.memory_offset(start) as u64;
        let mut data_end = limit.min(start + group_max).min(start + ring_room);
        let at_gap = gap.is_some() && data_end == limit;
        if !self.eager() && !at_gap {
            let whole = block_down(data_end);
            let lingered = now.monotonic_us >= self.pending_since_us + LINGER_US;
            let others = if self.in_flight.is_empty() { 1 } else { 4 };
            if whole >= start + GROUP_BYTES_MIN * others {
                data_end = whole;
            } else if !(lingered && self.in_flight.is_empty()) {
                return None;
            }
        }
        if self.zeroing.is_some_and(|(from, to)| start < to && block_up(data_end) > from) {
            return None;
        }
        let after = if at_gap { gap.map_or(data_end, |(_, to)| to) } else { data_end };
        Some((start, data_end, after))
    }

    fn submit<D: Driver>(
        &mut self,
        start: u64,
        data_end: u64,
        after: u64,
        now: Now,
        driver: &mut D,
        token_base: u64,
    ) {
        let (Some(ring), Some(segment)) = (self.ring_id, self.segment_of(start)) else { return };
        let (file, file_offset) = (segment.file, start - segment.start);
        let end = block_up(data_end);
        if data_end == self.tail && end > data_end {
            // Nothing of an older lap may stand behind the tail on disk.
            self.ring.slice_mut(data_end, (end - data_end) as usize).fill(0);
        }
        if self.gaps.front().is_some_and(|(from, _)| *from == data_end) {
            self.gaps.pop_front();
        }
        let token = self.next_token;
        self.next_token += 1;
        driver.write(RingWrite {
            ring,
            ring_offset: self.ring.memory_offset(start),
            len: (end - start) as usize,
            file,
            file_offset,
            flush: self.config.ack == AckPoint::Synced,
            token: token_base | token,
        });
        self.flush_groups += 1;
        self.in_flight.push_back(Group {
            token,
            start,
            data_end,
            after,
            submitted_us: now.monotonic_us,
            done: false,
        });
        self.submitted = after;
        self.pending_since_us =
            if self.tail > self.submitted { now.monotonic_us.max(1) } else { 0 };
    }

    fn flush_if_due<D: Driver>(&mut self, now: Now, driver: &mut D, token_base: u64) {
        let due = self.synced < self.written
            && self.flush_round.is_none()
            && self.config.ack != AckPoint::Synced
            && now.monotonic_us >= self.last_flush_us + self.config.flush_interval_us;
        if due {
            self.start_flush(now, driver, token_base);
        }
    }

    /// Starts flushing everything written so far.
    pub fn start_flush<D: Driver>(&mut self, now: Now, driver: &mut D, token_base: u64) {
        if self.poison.is_some() || self.flush_round.is_some() || self.synced >= self.written {
            return;
        }
        let (from, target) = (self.synced, self.written);
        let bytes = self.config.segment_bytes;
        let mut remaining = 0;
        for segment in &self.segments {
            if segment.start < target && segment.start + bytes > from {
                let token = self.next_token;
                self.next_token += 1;
                driver.flush(segment.file, token_base | token);
                remaining += 1;
            }
        }
        self.last_flush_us = now.monotonic_us;
        self.flush_round = Some(FlushRound { target, remaining, started_us: now.monotonic_us });
    }

    /// Takes the completion of a group write.
    pub fn on_written(&mut self, token: u64, result: io::Result<()>) {
        if let Err(error) = result {
            let range = self.in_flight.iter().find(|group| group.token == token);
            let (start, end) = range.map_or((0, 0), |group| (group.start, group.data_end));
            self.poison_with("write", start, end, &error);
            return;
        }
        if let Some(group) = self.in_flight.iter_mut().find(|group| group.token == token) {
            group.done = true;
        }
        while self.in_flight.front().is_some_and(|group| group.done) {
            if let Some(group) = self.in_flight.pop_front() {
                self.written = group.after;
            }
        }
        if self.poison.is_some() {
            return;
        }
        self.ring.header().set_written(self.written);
        if self.config.ack == AckPoint::Synced {
            self.synced = self.written;
        }
    }

    /// Takes the completion of a device flush.
    pub fn on_flushed(&mut self, result: io::Result<()>) {
        let Some(round) = &mut self.flush_round else { return };
        round.remaining = round.remaining.saturating_sub(1);
        let (done, target) = (round.remaining == 0, round.target);
        if let Err(error) = result {
            self.poison_with("flush", self.synced, target, &error);
            return;
        }
        if done {
            self.flush_round = None;
            if self.poison.is_none() {
                self.synced = self.synced.max(target);
            }
        }
    }

    fn poison_with(&mut self, operation: &str, start: u64, end: u64, error: &io::Error) {
        if self.poison.is_some() {
            return;
        }
        let shard = self.config.shard;
        let path = self.segment_of(start).map(|segment| segment.path.display().to_string());
        let reason = format!(
            "{operation} of {} failed: {error} (errno {}), physical offsets {} to {}",
            path.as_deref().unwrap_or("a segment"),
            error.raw_os_error().unwrap_or(0),
            address::physical(shard, start),
            address::physical(shard, end),
        );
        tracing::error!(shard, "{reason}; the shard acknowledges nothing more, reads go on");
        self.poison = Some(reason);
    }

    /// Drops the oldest segments that end at or before `position`; returns them for recycling.
    pub fn drop_before(&mut self, position: u64) -> Vec<Segment> {
        let mut dropped = Vec::new();
        while self.segments.len() > 1 {
            let end = self.segments.front().map_or(0, |s| s.start + self.config.segment_bytes);
            if end > position.min(self.synced) {
                break;
            }
            dropped.extend(self.segments.pop_front());
        }
        dropped
    }

    /// Whether everything appended has been written and flushed.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.poison.is_some() || (self.synced == self.tail && self.in_flight.is_empty())
    }

    /// Removes the surviving buffer after a clean stop.
    pub fn remove_buffer(&mut self) {
        if self.poison.is_none() && self.is_drained() {
            if let Err(error) = self.ring.remove_file() {
                tracing::warn!(shard = self.config.shard, %error, "the write buffer's file stays");
            }
        }
    }
}
