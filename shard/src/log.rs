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
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::address;
use crate::error::Refusal;
use crate::event::encode_end_mark;
use crate::io::BLOCK_BYTES;
use crate::latency::RecentLatency;
use crate::mark::{self, MARK_BYTES_MAX, MARK_EVERY_BYTES, Marks};
use crate::memory::LockedRing;
use crate::runtime::{Driver, FileId, Now, RingId, RingWrite};

/// Smallest group under asynchronous flush while nothing else is in flight, in bytes; beside others
/// in flight a group waits until it has twice as much. Nobody waits for these writes, and each
/// costs 50 to 60 us of CPU whatever its size, which is a third of a core at 64 KiB.
pub const GROUP_BYTES_MIN: u64 = 256 * 1024;
/// Largest group under asynchronous flush, in bytes.
pub const GROUP_BYTES_MAX: u64 = 1024 * 1024;
/// Largest group when acknowledgements wait for it, in bytes.
pub const GROUP_BYTES_EAGER_MAX: u64 = 1024 * 1024;
/// Groups in flight under asynchronous flush.
pub const GROUPS_IN_FLIGHT_MAX: usize = 4;
/// How long bytes may linger in the ring before a partial group is written, in microseconds.
pub const LINGER_US: u64 = 5_000;
/// Bytes that may be written but not flushed, besides a whole write buffer. Recovery has to look
/// for remnants of lost writes this far behind the end of the log.
pub const UNSYNCED_BYTES_MAX: u64 = 192 * 1024 * 1024;
/// Blank record that fills the end of a segment: length and magic.
pub const BLANK_BYTES: u64 = 8;
/// End of a segment that messages leave to internal records while no next segment is ready, so
/// that retention can note down what it drops even on a full disk.
const EVENT_ROOM_BYTES: u64 = 64 * 1024;

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
    /// Address stored with internal records.
    pub store_host: SocketAddr,
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
    marks: Marks,
    /// Last end mark that is written.
    marked: u64,
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
    write_times: RecentLatency,
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
            marks: Marks::new(tail),
            marked: tail,
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
            write_times: RecentLatency::default(),
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
        self.segments
            .front()
            .map_or(self.tail, |segment| segment.start)
    }

    /// Position up to which acknowledgements may be sent and records be read.
    #[must_use]
    pub fn watermark(&self) -> u64 {
        match self.config.ack {
            AckPoint::Buffered => self.tail,
            // Under `Synced` a group counts as written once it is synced.
            AckPoint::Written | AckPoint::Synced => self.marked,
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

    /// Times of the last seconds' group writes, with the flush where acknowledgements wait for it.
    #[must_use]
    pub fn write_times(&self) -> &RecentLatency {
        &self.write_times
    }

    /// Since when the oldest group write is on its way, or due and kept back because its segment is
    /// still being filled with zeros; in monotonic microseconds.
    #[must_use]
    pub fn oldest_write_since_us(&self) -> Option<u64> {
        if self.poison.is_some() {
            return None;
        }
        let kept_back = self.tail > self.submitted && self.in_flight.is_empty();
        let kept_back = kept_back.then(|| self.pending_since_us + LINGER_US);
        let oldest = self.in_flight.front().map(|group| group.submitted_us);
        oldest.or(kept_back)
    }

    /// Since when a device flush that no acknowledgement waits for is on its way.
    #[must_use]
    pub fn oldest_flush_since_us(&self) -> Option<u64> {
        let round = self.flush_round.as_ref();
        round
            .filter(|_| self.poison.is_none())
            .map(|round| round.started_us)
    }

    /// Age of the oldest group or flush in flight, in microseconds.
    #[must_use]
    pub fn oldest_in_flight_us(&self, now: Now) -> u64 {
        let write = self.oldest_write_since_us().into_iter();
        let oldest = write.chain(self.oldest_flush_since_us()).min();
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
        self.segments
            .back()
            .map_or(0, |segment| segment.start + self.config.segment_bytes)
    }

    fn check_ring(&self, end: u64, now: Now) -> Result<(), Refusal> {
        let bytes = self.ring.bytes() as u64;
        let end = end + MARK_BYTES_MAX;
        let unwritten = block_up(end) - block_down(self.written);
        let unsynced = block_up(end) - block_down(self.synced);
        let (held_bytes, bound_bytes) = if unwritten > bytes {
            (self.tail - self.written, bytes)
        } else if unsynced > bytes + UNSYNCED_BYTES_MAX {
            (self.tail - self.synced, bytes + UNSYNCED_BYTES_MAX)
        } else {
            return Ok(());
        };
        Err(Refusal::BufferFull {
            shard: self.config.shard,
            held_bytes,
            bound_bytes,
            oldest_ms: self.oldest_in_flight_us(now) / 1000,
        })
    }

    /// Largest record that can be appended: it must fit a segment, and twice (with what a roll
    /// leaves blank) the ring.
    #[must_use]
    pub fn record_bytes_max(&self) -> u64 {
        let in_segment =
            self.config.segment_bytes - BLANK_BYTES - MARK_BYTES_MAX - self.event_room();
        let in_ring = (self.ring.bytes() as u64 / 2).saturating_sub(2 * BLOCK);
        in_segment.min(in_ring)
    }

    fn event_room(&self) -> u64 {
        EVENT_ROOM_BYTES.min(self.config.segment_bytes / 16)
    }

    fn check_poison(&self) -> Result<(), Refusal> {
        match &self.poison {
            Some(reason) => Err(Refusal::Poisoned {
                shard: self.config.shard,
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Where a message of `len` bytes has to end in the current segment, while `ready` segments
    /// are left.
    fn message_limit(&self, ready: usize) -> u64 {
        let room = if ready == 0 { self.event_room() } else { 0 };
        self.internal_limit() - room
    }

    fn internal_limit(&self) -> u64 {
        self.segment_end() - BLANK_BYTES - MARK_BYTES_MAX
    }

    /// Whether `bytes` more, in several records, can be appended without a refusal in between.
    pub fn check_room(&self, bytes: u64, now: Now) -> Result<(), Refusal> {
        self.check_poison()?;
        if self.tail + bytes <= self.message_limit(self.ready.len()) {
            return self.check_ring(self.tail + bytes, now);
        }
        // Each roll may leave up to half a segment blank when records are that large.
        let half = self.config.segment_bytes / 2;
        let rolls = 1 + bytes / half;
        if (self.ready.len() as u64) < rolls {
            return Err(self.segment_missing(self.segment_end()));
        }
        self.check_ring(self.segment_end() + bytes + (rolls - 1) * half, now)
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
        let limit = self.message_limit(self.ready.len());
        self.reserve_within(len, limit, now)
    }

    /// The same for an internal record, which may use the room that messages leave.
    pub fn reserve_internal(&mut self, len: u64, now: Now) -> Result<u64, Refusal> {
        self.reserve_within(len, self.internal_limit(), now)
    }

    fn reserve_within(&mut self, len: u64, limit: u64, now: Now) -> Result<u64, Refusal> {
        self.check_poison()?;
        let bound = self.record_bytes_max();
        if len > bound {
            return Err(Refusal::TooLarge { bytes: len, bound });
        }
        let segment_end = self.segment_end();
        if self.tail + len <= limit {
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
        self.append_mark(now);
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

    /// Makes the record at the tail, whose CRC-32 is `crc`, part of the log.
    pub fn publish(&mut self, len: u64, crc: u32, now: Now) {
        self.tail += len;
        self.mark_pending(now);
        self.ring.header().set_published(self.tail);
        self.marks.note(crc);
        if self.tail - self.marks.from() >= MARK_EVERY_BYTES {
            self.append_mark(now);
        }
    }

    /// Sets an end mark behind the last record, unless one stands there. Every reservation leaves
    /// room for it.
    pub(crate) fn append_mark(&mut self, now: Now) {
        if !self.marks.is_open() || self.poison.is_some() {
            return;
        }
        let body = encode_end_mark(self.marks.from(), self.marks.hash());
        let physical = address::physical(self.config.shard, self.tail);
        let fields = mark::fields(&body, physical, now.wall_ms, self.config.store_host);
        let len = fields.encoded_len() as u64;
        debug_assert!(len <= MARK_BYTES_MAX);
        if self.tail + len + BLANK_BYTES > self.segment_end() {
            return;
        }
        if fields
            .encode(self.ring.slice_mut(self.tail, len as usize))
            .is_ok()
        {
            self.tail += len;
            self.marks.close(self.tail);
            self.mark_pending(now);
            self.ring.header().set_published(self.tail);
        }
    }

    /// Whether the next group would end behind an unmarked record.
    fn mark_due(&self, now: Now) -> bool {
        let lingered = now.monotonic_us >= self.pending_since_us + LINGER_US;
        self.in_flight.is_empty() && self.marks.is_open() && (self.eager() || lingered)
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
        let flush =
            (self.synced < self.written && self.flush_round.is_none()).then(|| self.flush_at_us());
        linger.into_iter().chain(flush).min()
    }

    /// Submits what is due: group writes, and device flushes under asynchronous flush.
    pub fn pump<D: Driver>(&mut self, now: Now, driver: &mut D, token_base: u64) {
        if self.poison.is_some() {
            return;
        }
        if self.mark_due(now) {
            self.append_mark(now);
        }
        while let Some((start, data_end, after)) = self.next_group(now) {
            self.submit(start, data_end, after, now, driver, token_base);
        }
        self.flush_if_due(now, driver, token_base);
    }

    /// The next group to write as `(start, data end, position after it)`, if one is due.
    fn next_group(&self, now: Now) -> Option<(u64, u64, u64)> {
        let depth = if self.eager() {
            1
        } else {
            GROUPS_IN_FLIGHT_MAX
        };
        if self.tail == self.submitted || self.in_flight.len() >= depth {
            return None;
        }
        if !self.submitted.is_multiple_of(BLOCK) && !self.in_flight.is_empty() {
            return None;
        }
        let start = block_down(self.submitted);
        let gap = self.gaps.front().copied();
        let limit = gap.map_or(self.tail, |(from, _)| from);
        let group_max = if self.eager() {
            GROUP_BYTES_EAGER_MAX
        } else {
            GROUP_BYTES_MAX
        };
        let ring_room = self.ring.bytes() as u64 - self.ring.memory_offset(start) as u64;
        let mut data_end = limit.min(start + group_max).min(start + ring_room);
        let at_gap = gap.is_some() && data_end == limit;
        if !self.eager() && !at_gap {
            let whole = block_down(data_end);
            let lingered = now.monotonic_us >= self.pending_since_us + LINGER_US;
            let others = if self.in_flight.is_empty() { 1 } else { 2 };
            let least = GROUP_BYTES_MIN.min(self.ring.bytes() as u64 / 8) * others;
            // What ends at the end of the ring cannot become larger.
            if whole >= start + least || whole == start + ring_room {
                data_end = whole;
            } else if !(lingered && self.in_flight.is_empty()) {
                return None;
            }
        }
        if self
            .zeroing
            .is_some_and(|(from, to)| start < to && block_up(data_end) > from)
        {
            return None;
        }
        let after = if at_gap {
            gap.map_or(data_end, |(_, to)| to)
        } else {
            data_end
        };
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
        let (Some(ring), Some(segment)) = (self.ring_id, self.segment_of(start)) else {
            return;
        };
        let (file, file_offset) = (segment.file, start - segment.start);
        let end = block_up(data_end);
        if data_end == self.tail && end > data_end {
            // Nothing of an older lap may stand behind the tail on disk.
            self.ring
                .slice_mut(data_end, (end - data_end) as usize)
                .fill(0);
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
        self.pending_since_us = if self.tail > self.submitted {
            now.monotonic_us.max(1)
        } else {
            0
        };
    }

    /// When the next device flush is due: at the interval, or at once when much is unflushed.
    fn flush_at_us(&self) -> u64 {
        if self.written - self.synced >= UNSYNCED_BYTES_MAX / 2 {
            return 0;
        }
        self.last_flush_us + self.config.flush_interval_us
    }

    fn flush_if_due<D: Driver>(&mut self, now: Now, driver: &mut D, token_base: u64) {
        let due = self.synced < self.written
            && self.flush_round.is_none()
            && self.config.ack != AckPoint::Synced
            && now.monotonic_us >= self.flush_at_us();
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
        self.flush_round = Some(FlushRound {
            target,
            remaining,
            started_us: now.monotonic_us,
        });
    }

    /// Takes the completion of a group write.
    pub fn on_written(&mut self, now: Now, token: u64, result: io::Result<()>) {
        if self.poison.is_some() {
            return;
        }
        if let Err(error) = result {
            let range = self.in_flight.iter().find(|group| group.token == token);
            let (start, end) = range.map_or((0, 0), |group| (group.start, group.data_end));
            self.poison_with("write", start, end, &error);
            return;
        }
        if let Some(group) = self.in_flight.iter_mut().find(|group| group.token == token) {
            group.done = true;
            let took_us = now.monotonic_us.saturating_sub(group.submitted_us);
            self.write_times.record(now.monotonic_us, took_us);
        }
        while self.in_flight.front().is_some_and(|group| group.done) {
            if let Some(group) = self.in_flight.pop_front() {
                self.written = group.after;
            }
        }
        self.ring.header().set_written(self.written);
        self.marked = self.marks.reached(self.written).unwrap_or(self.marked);
        if self.config.ack == AckPoint::Synced {
            self.synced = self.written;
        }
    }

    /// Takes the completion of a device flush.
    pub fn on_flushed(&mut self, result: io::Result<()>) {
        let Some(round) = &mut self.flush_round else {
            return;
        };
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
        let path = self
            .segment_of(start)
            .map(|segment| segment.path.display().to_string());
        let reason = format!(
            "{operation} of {} failed: {error} (errno {}), physical offsets {} to {}",
            path.as_deref().unwrap_or("a segment"),
            error.raw_os_error().unwrap_or(0),
            address::physical(shard, start),
            address::physical(shard, end),
        );
        tracing::error!(
            shard,
            "{reason}; the shard acknowledges nothing more, reads go on"
        );
        self.poison = Some(reason);
    }

    /// Drops the oldest segments that end at or before `position`; returns them for recycling.
    pub fn drop_before(&mut self, position: u64) -> Vec<Segment> {
        let mut dropped = Vec::new();
        while self.segments.len() > 1 {
            let end = self
                .segments
                .front()
                .map_or(0, |s| s.start + self.config.segment_bytes);
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
        if self.poison.is_none()
            && self.is_drained()
            && let Err(error) = self.ring.remove_file()
        {
            tracing::warn!(shard = self.config.shard, %error, "the write buffer's file stays");
        }
    }
}
