//! A shard: one log with its queues, offsets, runs and readers, owned by one core.
//!
//! The append path is [`Shard::append`]: room in the ring, one encoding of the record straight into
//! it, one slot in the unit ring. [`Shard::turn`] then moves the watermark on: it submits groups,
//! makes records readable behind the watermark ([`Shard::dispatch`]) and wakes parked pulls.
//!
//! Invariant: nothing is readable, and no run is written, beyond the watermark (P2); all methods
//! are synchronous and none blocks (P4).

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;

use wire::message::{RecordError, RecordFields};

use crate::address;
use crate::cold::ColdReads;
use crate::counters::ShardCounters;
use crate::error::Refusal;
use crate::event::{EVENT_TOPIC, Event, encode_offset};
use crate::half::HalfTable;
use crate::half_checks::Halves;
use crate::io::Space;
use crate::log::Log;
use crate::message::NewMessage;
use crate::offsets::{Clamped, OffsetTable};
use crate::parked::Parked;
use crate::pop::{PopCounters, PopTable};
use crate::queue::{QueueIndex, QueueTable};
use crate::rebuild::Rebuilds;
use crate::repeated::Repeated;
use crate::run::{KeyEntry, RunMeta, seeded_key_hash};
use crate::runtime::{Completion, Driver, FileId, Now};
use crate::seal::Sealer;
use crate::timer::Timers;
use crate::units::{NO_SEQUENCE, Unit, UnitRing};

/// Keys of one message that are indexed.
pub const KEYS_PER_MESSAGE_MAX: usize = 64;
/// Keys not yet in a run that one shard holds.
pub const KEYS_HELD_MAX: usize = 1 << 20;
/// Woken pulls that fit without growing.
const OUTBOX_RESERVED: usize = 1024;

/// Bit position of the shard's number within its core in a driver token.
pub const TOKEN_SHARD_SHIFT: u32 = 48;
const TOKEN_KIND_SHIFT: u32 = 40;

/// What a driver token of a shard stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum TokenKind {
    Log = 0,
    Window = 1,
    Prepare = 2,
    Zero = 3,
    Run = 4,
    Discard = 5,
    Space = 6,
    Retire = 7,
    Rebuild = 8,
    Timers = 9,
    Roll = 10,
}

/// Fixed properties of a shard.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Shard number in the broker.
    pub number: u16,
    /// Number within its core; goes into driver tokens.
    pub local: u16,
    /// Directory of the segments.
    pub log_dir: PathBuf,
    /// Directory of the runs.
    pub run_dir: PathBuf,
    /// Bytes per segment.
    pub segment_bytes: u64,
    /// Slots of the unit ring.
    pub units_max: usize,
    /// Units that make a run.
    pub run_units: u64,
    /// Log bytes that make a run.
    pub run_log_bytes: u64,
    /// Parked pulls at most.
    pub parked_max: usize,
    /// Delays of the levels in milliseconds; level `i + 1` at index `i`.
    pub delay_levels_ms: Vec<i64>,
    /// Address stored with every record.
    pub store_host: SocketAddr,
    /// File system use in percent at which writing stops.
    pub disk_stop_percent: u32,
}

/// Where a message went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Appended {
    /// Physical offset.
    pub physical_offset: i64,
    /// Offset in its queue.
    pub queue_offset: i64,
    /// The answer may be sent once [`Shard::watermark`] has reached this.
    pub end: u64,
    /// Store time in milliseconds.
    pub store_timestamp: i64,
}

/// What goes on failing while a disk is full, read-only or broken, said once and then rarely.
#[derive(Default)]
pub(crate) struct Failures {
    pub(crate) prepare: Repeated,
    pub(crate) run: Repeated,
    pub(crate) rebuild: Repeated,
    pub(crate) timers: Repeated,
    pub(crate) retention: Repeated,
}

pub(crate) struct Run {
    pub(crate) meta: RunMeta,
    pub(crate) file: FileId,
    pub(crate) path: PathBuf,
}

/// One shard.
pub struct Shard {
    pub(crate) config: ShardConfig,
    pub(crate) log: Log,
    pub(crate) units: UnitRing,
    pub(crate) queues: QueueTable,
    pub(crate) offsets: OffsetTable,
    pub(crate) pop: PopTable,
    pub(crate) pop_counters: PopCounters,
    pub(crate) halves: Halves,
    pub(crate) timers: Timers,
    pub(crate) keys: VecDeque<KeyEntry>,
    pub(crate) events: VecDeque<(u64, Vec<u8>)>,
    pub(crate) runs: BTreeMap<u64, Run>,
    pub(crate) sealer: Sealer,
    pub(crate) parked: Parked,
    pub(crate) woken: Vec<u64>,
    pub(crate) cold: ColdReads,
    pub(crate) recycled: Vec<PathBuf>,
    pub(crate) preparing: Option<(u64, bool)>,
    pub(crate) zero_next: Option<u64>,
    pub(crate) discards_in_flight: usize,
    pub(crate) rebuilds: Rebuilds,
    /// Dropped segments whose names are being taken out of the row.
    pub(crate) retiring: Vec<PathBuf>,
    /// Retention that waits for the ends it noted down: drop before the first position once the
    /// log is synced to the second.
    pub(crate) dropping: Option<(u64, u64)>,
    pub(crate) disk_used_percent: u32,
    pub(crate) space: Space,
    pub(crate) space_checked_us: u64,
    pub(crate) space_pending: bool,
    /// Whether no segment is prepared before the space has been measured again.
    pub(crate) prepare_waits: bool,
    pub(crate) failures: Failures,
    pub(crate) stopping: bool,
    pub(crate) counters: ShardCounters,
    pub(crate) last_store_timestamp: i64,
    event_scratch: Vec<u8>,
}

/// What recovery hands to [`Shard::assemble`].
pub(crate) struct ShardParts {
    pub(crate) config: ShardConfig,
    pub(crate) log: Log,
    pub(crate) units: UnitRing,
    pub(crate) queues: QueueTable,
    pub(crate) offsets: OffsetTable,
    pub(crate) pop: PopTable,
    pub(crate) halves: HalfTable,
    pub(crate) timers: Timers,
    pub(crate) keys: VecDeque<KeyEntry>,
    pub(crate) events: VecDeque<(u64, Vec<u8>)>,
    pub(crate) runs: BTreeMap<u64, Run>,
    pub(crate) sealer: Sealer,
    pub(crate) last_store_timestamp: i64,
}

/// Takes the keys of a message into the index.
fn index_keys(keys: &mut VecDeque<KeyEntry>, seed: u64, message: &NewMessage<'_>, at: i64) {
    if let Some(key) = message.unique_key {
        keys.push_back((seeded_key_hash(seed, key), at));
    }
    if message.keys.is_none() {
        return;
    }
    let words = message.keys.into_iter();
    let words = words.flat_map(|keys| keys.split(|byte| *byte == b' '));
    let words = words.filter(|word| !word.is_empty());
    for key in words.take(KEYS_PER_MESSAGE_MAX) {
        keys.push_back((seeded_key_hash(seed, key), at));
    }
}

fn too_long(error: &RecordError, bytes: usize) -> Refusal {
    match error {
        RecordError::TooLong {
            bytes, bytes_max, ..
        } => Refusal::TooLarge {
            bytes: *bytes as u64,
            bound: *bytes_max as u64,
        },
        _ => Refusal::TooLarge {
            bytes: bytes as u64,
            bound: u64::from(u32::MAX >> 1),
        },
    }
}

impl Shard {
    pub(crate) fn assemble(parts: ShardParts) -> Self {
        Self {
            parked: Parked::new(parts.config.parked_max),
            config: parts.config,
            log: parts.log,
            units: parts.units,
            queues: parts.queues,
            offsets: parts.offsets,
            pop: parts.pop,
            pop_counters: PopCounters::default(),
            halves: Halves::new(parts.halves),
            timers: parts.timers,
            keys: parts.keys,
            events: parts.events,
            runs: parts.runs,
            sealer: parts.sealer,
            woken: Vec::with_capacity(OUTBOX_RESERVED),
            cold: ColdReads::default(),
            recycled: Vec::new(),
            preparing: None,
            zero_next: None,
            discards_in_flight: 0,
            rebuilds: Rebuilds::default(),
            retiring: Vec::new(),
            dropping: None,
            disk_used_percent: 0,
            space: Space::default(),
            space_checked_us: 0,
            space_pending: false,
            prepare_waits: false,
            failures: Failures::default(),
            stopping: false,
            counters: ShardCounters::default(),
            last_store_timestamp: parts.last_store_timestamp,
            event_scratch: Vec::with_capacity(1024),
        }
    }

    /// Shard number in the broker.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.config.number
    }

    /// Position up to which answers may be sent.
    #[must_use]
    pub fn watermark(&self) -> u64 {
        self.log.watermark()
    }

    /// The log, to read its positions.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The queues.
    #[must_use]
    pub fn queues(&self) -> &QueueTable {
        &self.queues
    }

    /// The offsets.
    #[must_use]
    pub fn offsets(&self) -> &OffsetTable {
        &self.offsets
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> ShardCounters {
        self.counters
    }

    /// Pulls parked now.
    #[must_use]
    pub fn parked_held(&self) -> usize {
        self.parked.held()
    }

    /// Why the shard refuses appends now, if it does.
    #[must_use]
    pub fn refusing(&self) -> Option<String> {
        if let Some(reason) = self.log.poison() {
            return Some(reason.to_owned());
        }
        self.check_disk().err().map(|refusal| refusal.to_string())
    }

    /// Index of a queue, created empty if need be; `None` at the bound, and for the topic of
    /// internal records, which has no queues.
    pub fn open_queue(&mut self, topic: &str, queue_id: i32) -> Option<QueueIndex> {
        if topic == EVENT_TOPIC {
            return None;
        }
        let known = self.queues.find(topic, queue_id);
        if known.is_none() {
            let clamped = self.offsets.clamp_new(topic, queue_id);
            self.restate(&clamped);
        }
        known.or_else(|| self.queues.open(topic, queue_id))
    }

    pub(crate) fn token(&self, kind: TokenKind, number: u64) -> u64 {
        (u64::from(self.config.local) << TOKEN_SHARD_SHIFT)
            | ((kind as u64) << TOKEN_KIND_SHIFT)
            | number
    }

    fn check_disk(&self) -> Result<(), Refusal> {
        if self.disk_used_percent >= self.config.disk_stop_percent {
            return Err(Refusal::DiskFull {
                used_percent: self.disk_used_percent,
                limit_percent: self.config.disk_stop_percent,
            });
        }
        Ok(())
    }

    /// Whether a batch of `count` records with `bytes` in all can be appended now.
    pub fn check_room(&self, count: u64, bytes: u64, now: Now) -> Result<(), Refusal> {
        self.check_disk()?;
        self.check_tables(count)?;
        self.log.check_room(bytes, now)
    }

    /// The same, but for the disk and the room in the log.
    fn check_tables(&self, count: u64) -> Result<(), Refusal> {
        if self.stopping {
            return Err(Refusal::Stopping {
                shard: self.config.number,
            });
        }
        if !self.units.has_room(count) || self.keys.len() >= KEYS_HELD_MAX {
            return Err(Refusal::UnitsFull {
                shard: self.config.number,
                held: self.units.held(),
                bound: self.units.capacity(),
            });
        }
        Ok(())
    }

    /// Appends a message to its queue. A refusal changes nothing.
    pub fn append(&mut self, now: Now, message: &NewMessage<'_>) -> Result<Appended, Refusal> {
        let result = self.append_checked(now, message);
        if result.is_err() {
            self.counters.put_refused += 1;
        }
        result
    }

    /// Appends a message that makes room: retention may go on only when it is stored, so that a
    /// full file system is no reason to refuse it.
    pub(crate) fn append_for_retention(
        &mut self,
        now: Now,
        message: &NewMessage<'_>,
    ) -> Result<Appended, Refusal> {
        self.check_tables(1)?;
        self.append_unchecked(now, message)
    }

    fn append_checked(&mut self, now: Now, message: &NewMessage<'_>) -> Result<Appended, Refusal> {
        self.check_disk()?;
        self.check_tables(1)?;
        self.append_unchecked(now, message)
    }

    fn append_unchecked(
        &mut self,
        now: Now,
        message: &NewMessage<'_>,
    ) -> Result<Appended, Refusal> {
        let shard = self.config.number;
        let queue = self.queues.get_mut(message.queue);
        let Some(queue) = queue.filter(|queue| !queue.removed) else {
            return Err(Refusal::NoQueue { shard });
        };
        let store_timestamp = now.wall_ms.max(self.last_store_timestamp);
        let place = (queue.queue_id, queue.next_offset);
        let host = self.config.store_host;
        let mut fields = message.fields(&queue.topic, place, store_timestamp, host);
        let len = fields.encoded_len();
        let segment_before = self.log.segments_opened();
        let position = self.log.reserve(len as u64, now)?;
        if segment_before != self.log.segments_opened() {
            // A run must not span two segments, whatever becomes of this record.
            self.sealer.mark(
                self.units.appended(),
                position,
                self.keys.len(),
                self.events.len(),
            );
        }
        fields.physical_offset = address::physical(shard, position);
        let target = self.log.reserved(position, len);
        if let Err(error) = fields.encode(target) {
            return Err(too_long(&error, len));
        }
        let crc = crc32fast::hash(target);
        let end = position + len as u64;
        let unit = Unit {
            physical_offset: fields.physical_offset,
            tags_code: message.tags_code,
            store_timestamp,
            size: len as u32,
            crc,
        };
        let queue_offset = queue.next_offset;
        let last = queue.last_sequence;
        queue.last_sequence = self
            .units
            .append(unit, message.queue, queue_offset, end, last);
        queue.next_offset += 1;
        index_keys(
            &mut self.keys,
            queue.key_seed,
            message,
            fields.physical_offset,
        );
        self.log.publish(len as u64, crc, now);
        self.last_store_timestamp = store_timestamp;
        self.counters.put_messages += 1;
        self.counters.put_bytes += len as u64;
        Ok(Appended {
            physical_offset: unit.physical_offset,
            queue_offset: queue_offset as i64,
            end,
            store_timestamp,
        })
    }

    /// Appends an internal record; returns the position that must be reached before it is durable.
    pub fn append_event(&mut self, now: Now, event: &Event) -> Result<u64, Refusal> {
        let mut bytes = std::mem::take(&mut self.event_scratch);
        bytes.clear();
        event.encode(&mut bytes);
        let result = self.append_event_bytes(now, &bytes);
        self.event_scratch = bytes;
        result
    }

    fn append_event_bytes(&mut self, now: Now, bytes: &[u8]) -> Result<u64, Refusal> {
        let fields = RecordFields {
            queue_id: 0,
            flag: 0,
            queue_offset: 0,
            physical_offset: 0,
            sys_flag: 0,
            born_timestamp: now.wall_ms,
            born_host: self.config.store_host,
            store_timestamp: now.wall_ms.max(self.last_store_timestamp),
            store_host: self.config.store_host,
            reconsume_times: 0,
            prepared_transaction_offset: 0,
            body: bytes,
            topic: EVENT_TOPIC.as_bytes(),
            properties: &[],
        };
        let len = fields.encoded_len();
        let segment_before = self.log.segments_opened();
        let position = self.log.reserve_internal(len as u64, now)?;
        if segment_before != self.log.segments_opened() {
            self.sealer.mark(
                self.units.appended(),
                position,
                self.keys.len(),
                self.events.len(),
            );
        }
        let fields = RecordFields {
            physical_offset: address::physical(self.config.number, position),
            ..fields
        };
        let target = self.log.reserved(position, len);
        if let Err(error) = fields.encode(target) {
            return Err(too_long(&error, len));
        }
        let crc = crc32fast::hash(target);
        self.events.push_back((position, bytes.to_vec()));
        self.log.publish(len as u64, crc, now);
        Ok(position + len as u64)
    }

    /// Commits a consumer offset: into the log when it changed. Returns the position after which
    /// it may be answered.
    pub fn commit_offset(
        &mut self,
        now: Now,
        topic: &str,
        group: &str,
        queue_id: i32,
        offset: i64,
    ) -> Result<u64, Refusal> {
        let Some(entry) = self.offsets.entry(topic, group, queue_id) else {
            return Err(Refusal::OffsetsFull {
                shard: self.config.number,
                bound: crate::offsets::OFFSETS_MAX as u64,
            });
        };
        if entry.offset == offset {
            // An answer may not run ahead of the commit that it repeats.
            return Ok(entry.position);
        }
        let mut bytes = std::mem::take(&mut self.event_scratch);
        bytes.clear();
        encode_offset(&mut bytes, topic, group, queue_id, offset);
        let result = self.append_event_bytes(now, &bytes);
        self.event_scratch = bytes;
        let end = result?;
        if let Some(entry) = self.offsets.entry(topic, group, queue_id) {
            entry.offset = offset;
            entry.position = end;
        }
        Ok(end)
    }

    /// Puts offsets into the log that were taken back to their queues' ends, in front of whatever
    /// lengthens those queues: else an old settings file would count new messages as consumed
    /// after another crash.
    pub(crate) fn restate(&mut self, clamped: &[Clamped]) {
        let now = Now {
            monotonic_us: 1,
            wall_ms: self.last_store_timestamp,
        };
        for entry in clamped {
            let mut bytes = Vec::new();
            let (topic, group) = (&entry.topic, &entry.group);
            encode_offset(&mut bytes, topic, group, entry.queue_id, entry.offset);
            if let Err(refusal) = self.append_event_bytes(now, &bytes) {
                let shard = self.config.number;
                tracing::warn!(shard, topic = &**topic, group = &**group, %refusal,
                    "a committed offset beyond the end of its queue is not corrected in the log");
            }
        }
    }

    /// Remembers where the last pull of a group stood.
    pub fn note_pull(
        &mut self,
        now: Now,
        topic: &str,
        group: &str,
        queue_id: i32,
        next_offset: i64,
    ) {
        if let Some(entry) = self.offsets.entry(topic, group, queue_id) {
            entry.pulled_ms = now.wall_ms;
            entry.pull_offset = next_offset;
        }
    }

    /// Remembers when a group last looked for messages of a queue by popping.
    pub fn note_pop(&mut self, now: Now, topic: &str, group: &str, queue_id: i32) {
        if let Some(entry) = self.offsets.entry(topic, group, queue_id) {
            entry.pulled_ms = now.wall_ms;
        }
    }

    /// Makes the next pull of a group start at an offset (a reset by an administrator).
    pub fn set_reset(&mut self, topic: &str, group: &str, queue_id: i32, offset: i64) {
        if let Some(entry) = self.offsets.entry(topic, group, queue_id) {
            entry.reset_to = offset;
        }
    }

    /// Takes a pending reset.
    pub fn take_reset(&mut self, topic: &str, group: &str, queue_id: i32) -> Option<i64> {
        let pending = self.offsets.get(topic, group, queue_id)?.reset_to;
        if pending < 0 {
            return None;
        }
        self.offsets.entry(topic, group, queue_id)?.reset_to = -1;
        Some(pending)
    }

    /// Removes the queues of a topic and the offsets on it.
    pub fn remove_topic(&mut self, now: Now, topic: &str) -> Result<u64, Refusal> {
        let event = Event::TopicRemoved {
            topic: topic.to_owned(),
        };
        let end = self.append_event(now, &event)?;
        self.timers.log.apply(&event, end);
        for index in self.queues.remove_topic(topic, end) {
            self.parked.wake(&mut self.queues, index, &mut self.woken);
        }
        self.offsets.remove_topic(topic);
        self.pop.remove_topic(topic);
        Ok(end)
    }

    /// Removes the offsets of a group.
    pub fn remove_group(&mut self, now: Now, group: &str) -> Result<u64, Refusal> {
        let end = self.append_event(
            now,
            &Event::GroupRemoved {
                group: group.to_owned(),
            },
        )?;
        self.offsets.remove_group(group);
        self.pop.remove_group(group);
        Ok(end)
    }

    /// Parks a pull on a queue; `None` at the bound.
    pub fn park(&mut self, queue: QueueIndex, token: u64) -> Option<crate::parked::ParkId> {
        self.parked.park(&mut self.queues, queue, token)
    }

    /// Takes a parked pull back; `false` if it was woken already.
    pub fn unpark(&mut self, id: crate::parked::ParkId, token: u64) -> bool {
        self.parked.unpark(&mut self.queues, id, token)
    }

    /// Pulls parked on a queue.
    pub fn parked_on(&self, queue: QueueIndex) -> impl Iterator<Item = u64> + '_ {
        self.parked.on(&self.queues, queue)
    }

    /// Moves the tokens of woken pulls to `out`.
    pub fn take_woken(&mut self, out: &mut Vec<u64>) {
        out.append(&mut self.woken);
    }

    /// Makes records behind the watermark readable and wakes the pulls that waited for them.
    pub fn dispatch(&mut self) {
        let watermark = self.log.watermark();
        while let Some(slot) = self.units.dispatch_next(watermark) {
            let index = slot.queue;
            if index == self.timers.queue {
                self.timers.on_readable(&slot.unit, slot.queue_offset);
            }
            let Some(queue) = self.queues.get_mut(index) else {
                continue;
            };
            queue.readable = slot.queue_offset + 1;
            queue.last_store_timestamp = slot.unit.store_timestamp;
            let waiting = queue.parked_head != u32::MAX;
            if waiting {
                self.parked.wake(&mut self.queues, index, &mut self.woken);
            }
        }
    }

    /// One turn of the core's loop: everything that is due now.
    pub fn turn<D: Driver>(&mut self, now: Now, driver: &mut D) {
        self.timer_step(now, driver);
        self.check_halves(now);
        let base = self.token(TokenKind::Log, 0);
        self.log.pump(now, driver, base);
        self.dispatch();
        self.seal_step(now, driver);
        self.retention_step(driver);
        self.rebuild_step(now, driver);
        self.maintain(now, driver);
        self.run_cold_jobs(driver);
    }

    /// When [`Shard::turn`] wants to run again at the latest, in monotonic microseconds.
    #[must_use]
    pub fn deadline_us(&self, now: Now) -> Option<u64> {
        let work = self.seal_deadline_us(now);
        let retry = self.cold_wants_retry().then_some(now.monotonic_us + 1000);
        let rebuild = self.rebuilds.deadline_us(now);
        let space = Some(self.space_checked_us + crate::maintain::SPACE_CHECK_US);
        let log = self.log.deadline_us();
        let timers = self.timer_deadline_us(now);
        let pop = self.pop_deadline_us(now);
        let halves = self.halves_deadline_us(now);
        [work, retry, rebuild, space, log, timers, pop, halves]
            .into_iter()
            .flatten()
            .min()
    }

    /// Takes a completion whose token belongs to this shard; gives others back.
    pub fn on_completion<D: Driver>(
        &mut self,
        now: Now,
        driver: &mut D,
        completion: Completion,
    ) -> Option<Completion> {
        let token = match &completion {
            Completion::Written { token, .. }
            | Completion::Flushed { token, .. }
            | Completion::ColdRead { token, .. }
            | Completion::Job { token, .. } => *token,
            _ => return Some(completion),
        };
        if token >> TOKEN_SHARD_SHIFT != u64::from(self.config.local) {
            return Some(completion);
        }
        let number = token & ((1 << TOKEN_KIND_SHIFT) - 1);
        let kind = (token >> TOKEN_KIND_SHIFT) as u8;
        match completion {
            Completion::Written { result, .. } => self.log.on_written(now, number, result),
            Completion::Flushed { result, .. } => self.log.on_flushed(result),
            Completion::ColdRead { slot, result, .. } => {
                self.on_window(driver, number, slot, result);
            }
            Completion::Job { result, .. } => self.on_job(now, driver, kind, number, result),
            other => return Some(other),
        }
        None
    }

    /// Refuses appends from now on and starts to write everything out.
    pub fn stop<D: Driver>(&mut self, now: Now, driver: &mut D) {
        self.stopping = true;
        self.sealer.seal_all();
        let base = self.token(TokenKind::Log, 0);
        self.log.start_flush(now, driver, base);
    }

    /// Whether [`Shard::stop`] was called.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Whether everything is on disk after [`Shard::stop`].
    #[must_use]
    pub fn is_drained(&self) -> bool {
        // Runs that cannot be written are no reason to stay: they are made again at the next start.
        let sealed = self.sealer.sealed_to() >= self.log.tail()
            || self.log.poison().is_some()
            || self.sealer.is_failing();
        self.log.is_drained() && sealed && self.discards_in_flight == 0
    }

    /// Removes the surviving buffer after a clean stop.
    pub fn finish(&mut self) {
        self.log.remove_buffer();
    }

    /// The newest slot of a queue, if its units are in the ring.
    pub(crate) fn newest_slot(&self, queue: QueueIndex) -> u64 {
        self.queues
            .get(queue)
            .map_or(NO_SEQUENCE, |queue| queue.last_sequence)
    }
}
