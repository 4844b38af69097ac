//! Timed messages: delay levels and arbitrary delivery times.
//!
//! A timed message is stored in the shard's own queue of [`TIMER_TOPIC`], on the shard that owns
//! its real queue, with the time it is due in properties and unit. The units in ring and run files
//! are the index on disk; a bounded window holds those that are due next ([`window`]), is filled
//! again by the auxiliary thread ([`refill`]), and the records due within the next moments are read
//! ahead ([`deliver`]). Delivery is a local append to the real queue whose record names its origin,
//! so that the log itself tells what is done ([`progress`]). Retention copies pending messages
//! forward before it drops their segment ([`roll`]). What a store of an earlier form has waiting
//! comes to this queue after the start ([`moving`]).
//!
//! Invariants: nothing is delivered before its time by the clock, nor before its own
//! acknowledgement could be sent; every pending message is delivered exactly once in the log,
//! whenever the process is killed; memory does not grow with the number of pending messages.

mod code;
mod deliver;
mod lateness;
mod moving;
mod progress;
mod refill;
mod roll;
mod stage;
mod window;

use std::collections::{BTreeMap, HashMap, VecDeque};

use wire::message::{PROPERTIES_BYTES_MAX, RecordView, properties};

pub(crate) use self::code::code_of;
use self::code::{ADDED_BYTES_MAX, append_number, deletion_hash};
pub use self::code::{DUE_MS_MAX, LEVELS_MAX, TIMER_TOPIC};
pub use self::lateness::{LATENESS_BOUNDS_MS, Lateness};
use self::moving::Moving;
pub use self::moving::SCHEDULE_TOPIC;
pub(crate) use self::progress::{Key, Progress};
use self::refill::{Note, Refill};
use self::roll::Roll;
use self::stage::Stage;
pub use self::window::WINDOW_MAX;
use self::window::{Entry, Window};
use crate::address;
use crate::error::Refusal;
use crate::event::Event;
use crate::message::NewMessage;
use crate::queue::{QueueIndex, QueueTable};
use crate::runtime::Now;
use crate::shard::{Appended, Shard};
use crate::units::Unit;

/// Tokens of cold jobs that belong to timed messages.
pub(crate) const TIMER_TOKEN: u64 = 1 << 63;
/// Deletions that wait for what they take back; beyond that they are dropped and counted.
pub const DELETIONS_MAX: usize = 1 << 18;
/// Parts of a message's properties.
const PARTS_MAX: usize = 8;
/// Bytes of a record besides body, topic and properties, at most.
const RECORD_HEAD_BYTES_MAX: usize = 512;

/// What the log says of timed messages; recovery builds it, the shard goes on with it.
#[derive(Default)]
pub(crate) struct TimerLog {
    pub(crate) progress: Progress,
    /// Messages in front of this position have been delivered or copied forward.
    pub(crate) rolled_to: u64,
    /// Removed topics with the log position of the removal: what waited for them before is not
    /// delivered.
    removed: HashMap<Box<str>, u64>,
    /// Place of the newest claim among the shard's events, counted from the start of the process.
    claim_at: Option<u64>,
}

/// What a record says of the timed message it came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    Delivered(Key),
    Rolled(u64),
}

/// How a delivered or copied record names its origin: its physical offset with the sign bit set.
/// No transaction has a negative offset, and small negative numbers are no offset of a shard.
fn origin_field(shard: u16, position: u64) -> i64 {
    address::physical(shard, position) | i64::MIN
}

fn origin_of(view: &RecordView<'_>, shard: u16) -> Option<Origin> {
    let field = view.prepared_transaction_offset();
    if field >= 0 {
        return None;
    }
    let (of, position) = address::split(field & i64::MAX)?;
    if of != shard {
        return None;
    }
    if view.topic() == TIMER_TOPIC.as_bytes() {
        return Some(Origin::Rolled(position));
    }
    let due_ms = code_of(&[view.properties()]).due_ms;
    Some(Origin::Delivered(Key { due_ms, position }))
}

impl Origin {
    fn position(self) -> u64 {
        match self {
            Self::Delivered(key) => key.position,
            Self::Rolled(position) => position,
        }
    }

    fn event(self) -> Event {
        match self {
            Self::Delivered(key) => Event::TimerProgress {
                due_ms: key.due_ms,
                position: key.position,
            },
            Self::Rolled(position) => Event::TimersRolled { position },
        }
    }
}

impl TimerLog {
    /// Takes an event of the log, or one that stands for a record in a run.
    pub(crate) fn apply(&mut self, event: &Event, at: u64) {
        if matches!(event, Event::TimerProgress { .. }) {
            // What is noted behind it must not take a place in front of it: claims are replayed in
            // the order of the log.
            self.forget_claim();
        }
        self.take(event, at);
    }

    fn take(&mut self, event: &Event, at: u64) {
        match event {
            Event::TimerProgress { due_ms, position } => {
                let (due_ms, position) = (*due_ms, *position);
                self.progress.advance(at, Key { due_ms, position });
            }
            Event::TimersRolled { position } => {
                self.rolled_to = self.rolled_to.max(position + 1);
            }
            Event::TopicRemoved { topic } => {
                self.removed.insert(topic.as_str().into(), at);
            }
            _ => {}
        }
    }

    /// What a record that was read at a position says, as the event that stands for it in runs.
    pub(crate) fn take_record(&mut self, view: &RecordView<'_>, at: u64) -> Option<Event> {
        let shard = address::split(view.physical_offset()).map_or(0, |(shard, _)| shard);
        let origin = origin_of(view, shard).filter(|origin| origin.position() < at)?;
        let event = origin.event();
        self.take(&event, at);
        Some(event)
    }

    /// Puts an event that stands for a record among the others. A claim takes the place of the one
    /// before if it says more and both belong to the same run (`events_before` counts those that
    /// are gone, `floor` is where the newest run's begin).
    pub(crate) fn note(
        &mut self,
        events: &mut VecDeque<(u64, Vec<u8>)>,
        (events_before, floor): (u64, u64),
        at: u64,
        event: &Event,
    ) {
        let last = self
            .claim_at
            .filter(|place| *place >= floor)
            .and_then(|place| events.get_mut((place - events_before) as usize));
        if let Some((last_at, bytes)) = last
            && replaces(event, &Event::decode(bytes))
        {
            *last_at = at;
            bytes.clear();
            event.encode(bytes);
            return;
        }
        let mut bytes = Vec::with_capacity(20);
        event.encode(&mut bytes);
        self.claim_at = Some(events_before + events.len() as u64);
        events.push_back((at, bytes));
    }

    /// The next claim is noted by itself: those before have been written, or one of the log came in
    /// between.
    pub(crate) fn forget_claim(&mut self) {
        self.claim_at = None;
    }

    /// Forgets removals in front of the oldest message.
    pub(crate) fn forget_removed_before(&mut self, position: u64) {
        self.removed.retain(|_, at| *at >= position);
    }

    /// Whether a topic was removed behind a log position.
    pub(crate) fn is_removed_since(&self, topic: &str, position: u64) -> bool {
        self.removed.get(topic).is_some_and(|at| *at > position)
    }

    /// Whether a message is neither delivered nor copied forward.
    fn is_pending(&self, entry: &Entry) -> bool {
        let position = entry.key.position;
        position >= self.rolled_to && !self.progress.covers(position, entry.done_at())
    }
}

/// Whether a claim says all that an older one says.
fn replaces(event: &Event, older: &Option<Event>) -> bool {
    match (event, older) {
        (
            Event::TimerProgress { due_ms, position },
            Some(Event::TimerProgress {
                due_ms: old_ms,
                position: old,
            }),
        ) => (due_ms, position) >= (old_ms, old),
        (Event::TimersRolled { .. }, Some(Event::TimersRolled { .. })) => true,
        _ => false,
    }
}

/// What is counted of pending messages.
struct Counts {
    /// Whether everything has been counted since the start.
    complete: bool,
    /// Behind the frontier.
    far: u64,
    /// In the window, but copied forward.
    stale: u64,
    /// By delay level; level 0 has a time of its own.
    by_level: [u64; LEVELS_MAX + 1],
}

impl Counts {
    fn level(&mut self, level: u8) -> &mut u64 {
        let last = LEVELS_MAX.min(usize::from(level));
        let [first, rest @ ..] = &mut self.by_level;
        match last.checked_sub(1).and_then(|at| rest.get_mut(at)) {
            Some(count) => count,
            None => first,
        }
    }

    fn done(&mut self, level: u8) {
        let count = self.level(level);
        *count = count.saturating_sub(1);
    }
}

/// The timed messages of a shard.
pub(crate) struct Timers {
    pub(crate) log: TimerLog,
    pub(crate) queue: QueueIndex,
    levels_ms: Vec<i64>,
    /// Appended, but not readable yet: queue offsets with times due, both rising.
    unseen: VecDeque<(u64, i64)>,
    window: Window,
    stage: Stage,
    refill: Refill,
    roll: Roll,
    pub(crate) moving: Moving,
    /// What is known of the units in each run.
    notes: BTreeMap<u64, Note>,
    /// Hashes of what is taken back, with the start of the span it is due in.
    deletions: HashMap<u64, i64>,
    /// Earliest of those spans.
    deletions_from_ms: i64,
    counts: Counts,
    lateness: Lateness,
    /// When the shard was opened, in milliseconds; 0 before its first turn.
    opened_ms: i64,
    added: Vec<u8>,
    bytes: Vec<u8>,
}

/// Figures of timed messages.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct TimerReport {
    /// Messages that wait for their time, once all have been counted since the start.
    pub pending: u64,
    /// Whether all have been counted.
    pub complete: bool,
    /// Of those, in memory.
    pub in_window: u64,
    /// When the next message is due in milliseconds; 0 without one.
    pub next_due_ms: i64,
    /// How late messages were delivered.
    pub lateness: Lateness,
}

impl Timers {
    pub(crate) fn new(levels_ms: &[i64], queues: &mut QueueTable) -> Self {
        Self {
            log: TimerLog::default(),
            queue: queues.open(TIMER_TOPIC, 0).unwrap_or(QueueIndex::MAX),
            levels_ms: levels_ms.iter().copied().take(LEVELS_MAX).collect(),
            unseen: VecDeque::with_capacity(1024),
            window: Window::default(),
            stage: Stage::default(),
            refill: Refill::default(),
            roll: Roll::default(),
            moving: Moving::default(),
            notes: BTreeMap::new(),
            deletions: HashMap::new(),
            deletions_from_ms: i64::MAX,
            counts: Counts {
                complete: false,
                far: 0,
                stale: 0,
                by_level: [0; LEVELS_MAX + 1],
            },
            lateness: Lateness::default(),
            opened_ms: 0,
            added: Vec::with_capacity(512),
            bytes: Vec::with_capacity(4096),
        }
    }

    fn level_delay_ms(&self, level: i32) -> Option<i64> {
        let last = self.levels_ms.len().max(1);
        let at = usize::try_from(level).unwrap_or(1).clamp(1, last) - 1;
        self.levels_ms.get(at).copied()
    }

    fn note_appended(&mut self, queue_offset: u64, due_ms: i64) {
        while self.unseen.back().is_some_and(|(_, due)| *due >= due_ms) {
            self.unseen.pop_back();
        }
        self.unseen.push_back((queue_offset, due_ms));
    }

    /// Takes a message that has become readable.
    pub(crate) fn on_readable(&mut self, unit: &Unit, queue_offset: u64) {
        while self
            .unseen
            .front()
            .is_some_and(|(of, _)| *of <= queue_offset)
        {
            self.unseen.pop_front();
        }
        let entry = Entry::of(unit);
        if self.counts.complete {
            *self.counts.level(entry.level) += 1;
        }
        if entry.key <= self.window.frontier() {
            self.put(entry);
        } else {
            self.counts.far += 1;
        }
    }

    /// Puts a message into the window.
    fn put(&mut self, entry: Entry) {
        let given_up = self.window.push(entry);
        if given_up > 0 {
            self.counts.far += given_up as u64;
            self.refill.void();
        }
    }

    /// Whether a message that is readable in front of everything due at `key` may still come.
    fn waits_for_unseen(&self, key: Key) -> bool {
        self.unseen
            .front()
            .is_some_and(|(_, due_ms)| *due_ms <= key.due_ms)
    }

    fn pending(&self) -> u64 {
        let held = (self.window.len() + self.stage.len()) as u64;
        (self.counts.far + held).saturating_sub(self.counts.stale)
    }
}

impl Shard {
    /// Appends a message to be delivered after its level's delay (levels above the last count as
    /// the last). Its queue is the real one.
    pub fn append_delayed(
        &mut self,
        now: Now,
        message: NewMessage<'_>,
        level: i32,
    ) -> Result<Appended, Refusal> {
        let Some(delay_ms) = self.timers.level_delay_ms(level) else {
            return self.append(now, &message);
        };
        let stored_ms = now.wall_ms.max(self.last_store_timestamp);
        self.append_timed(now, message, stored_ms.saturating_add(delay_ms))
    }

    /// Appends a message to be delivered at a time, in milliseconds. Its queue is the real one.
    pub fn append_timed(
        &mut self,
        now: Now,
        message: NewMessage<'_>,
        due_ms: i64,
    ) -> Result<Appended, Refusal> {
        let real = self.queues.get(message.queue);
        let Some(real) = real.filter(|queue| !queue.removed) else {
            let shard = self.config.number;
            return Err(Refusal::NoQueue { shard });
        };
        let mut added = std::mem::take(&mut self.timers.added);
        added.clear();
        properties::append(&mut added, properties::REAL_TOPIC, &real.topic);
        append_number(&mut added, properties::REAL_QUEUE_ID, real.queue_id.into());
        append_number(
            &mut added,
            properties::TIMER_OUT_MS,
            due_ms.clamp(0, DUE_MS_MAX),
        );
        let topic_bytes = real.topic.len();
        let result = self.append_timer_record(now, message, &added, topic_bytes);
        self.timers.added = added;
        result
    }

    fn append_timer_record(
        &mut self,
        now: Now,
        message: NewMessage<'_>,
        added: &[u8],
        topic_bytes: usize,
    ) -> Result<Appended, Refusal> {
        let mut parts: [&[u8]; PARTS_MAX] = [&[]; PARTS_MAX];
        debug_assert!(message.properties.len() < PARTS_MAX);
        let given = message.properties.iter().take(PARTS_MAX - 1);
        for (part, given) in parts.iter_mut().zip(given.chain([&added])) {
            *part = given;
        }
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        // What is delivered must fit too, whatever it says besides.
        let (bytes, bound) = (bytes + ADDED_BYTES_MAX, PROPERTIES_BYTES_MAX);
        if bytes > bound {
            let (bytes, bound) = (bytes as u64, bound as u64);
            return Err(Refusal::TooLarge { bytes, bound });
        }
        let whole = bytes + message.body.len() + topic_bytes + RECORD_HEAD_BYTES_MAX;
        let (bytes, bound) = (whole as u64, self.log.record_bytes_max());
        if bytes > bound {
            return Err(Refusal::TooLarge { bytes, bound });
        }
        let code = code_of(&parts);
        let message = NewMessage {
            queue: self.timers.queue,
            properties: &parts,
            tags_code: code.to_tags_code(),
            ..message
        };
        let appended = self.append(now, &message)?;
        self.timers
            .note_appended(appended.queue_offset as u64, code.due_ms);
        Ok(appended)
    }

    /// Delayed messages not yet delivered, as (level, count); level 0 has a time of its own.
    #[must_use]
    pub fn delayed_pending(&self) -> Vec<(i32, u64)> {
        let last = self.timers.levels_ms.len().max(1);
        let mut found: BTreeMap<i32, u64> = BTreeMap::new();
        for (level, count) in self.timers.counts.by_level.iter().enumerate() {
            if *count > 0 {
                *found.entry(level.min(last) as i32).or_default() += count;
            }
        }
        found.into_iter().collect()
    }

    /// Figures of timed messages.
    #[must_use]
    pub fn timer_report(&self) -> TimerReport {
        let timers = &self.timers;
        let next = [
            timers.stage.first_key(),
            timers.window.peek().map(|e| e.key),
        ];
        let next = next.into_iter().flatten().min();
        TimerReport {
            pending: timers.pending(),
            complete: timers.counts.complete,
            in_window: timers.window.len() as u64,
            next_due_ms: next.map_or(0, |key| key.due_ms),
            lateness: timers.lateness,
        }
    }

    /// Whether a timed message has been delivered, dropped or taken back already, as far as its
    /// place and time tell.
    #[must_use]
    pub fn is_timer_done(&self, physical_offset: i64, due_ms: i64) -> bool {
        let Some((shard, position)) = address::split(physical_offset) else {
            return false;
        };
        let key = Key { due_ms, position };
        shard == self.config.number && self.timers.log.progress.covers(position, key)
    }

    /// Puts the claim of a record that was just appended among the events of the run to be.
    fn note_claim(&mut self, origin: Origin, at: u64) {
        let event = origin.event();
        let log = &mut self.timers.log;
        log.take(&event, at);
        let counts = self.sealer.event_counts();
        log.note(&mut self.events, counts, at, &event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_is_noted_behind_one_of_the_log_is_replayed_behind_it() {
        let (mut log, mut events) = (TimerLog::default(), VecDeque::new());
        for (at, due_ms, is_of_the_log) in [
            (100, 1, false),
            (200, 5, true),
            (300, 6, false),
            (400, 7, false),
            (500, 3, false),
        ] {
            let position = at / 2;
            let event = Event::TimerProgress { due_ms, position };
            if is_of_the_log {
                log.apply(&event, at);
                let mut bytes = Vec::new();
                event.encode(&mut bytes);
                events.push_back((at, bytes));
            } else {
                log.take(&event, at);
                log.note(&mut events, (0, 0), at, &event);
            }
        }
        let places: Vec<u64> = events.iter().map(|(at, _)| *at).collect();
        assert_eq!(places, [100, 200, 400, 500]);
        let mut replayed = TimerLog::default();
        for (at, bytes) in &events {
            replayed.apply(&Event::decode(bytes).unwrap(), *at);
        }
        assert_eq!(replayed.progress, log.progress);
    }
}
