//! Half messages: which transactions of a shard are open, and when their producers are to be asked.
//!
//! A half message is a record of [`HALF_TOPIC`] on the shard of its real queue. A commit is the
//! final message itself, whose prepared transaction offset names the half message; a roll-back is
//! an internal record. So what is open follows from the log alone, and a transaction ends exactly
//! when the one record that ends it is there. Run files repeat both, so that a start does not read
//! old log.
//!
//! Invariant: the table holds exactly the half messages of the log that nothing in the log ends;
//! `due` holds each of them at most once, with the time that its entry names.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use wire::message::{RecordView, properties};

use crate::address;
use crate::event::{Event, HALF_ENDED, HALF_OPENED};
use crate::runtime::Now;

/// RocketMQ's topic of half messages; queue `n` of it is that of shard `n`.
pub const HALF_TOPIC: &str = "RMQ_SYS_TRANS_HALF_TOPIC";
/// RocketMQ's topic of half messages whose producers were asked too often; queue `n` of it is that
/// of shard `n`.
pub const GIVE_UP_TOPIC: &str = "TRANS_CHECK_MAX_TIME_TOPIC";
/// Open transactions of one shard; more half messages are refused.
pub const OPEN_MAX: usize = 262_144;
/// Ends of transactions that one shard remembers to answer repeated ends rightly.
pub const ENDED_KEPT_MAX: usize = 65_536;
/// How long producers may take to come back after a start before they are asked, in milliseconds,
/// unless the check interval is shorter.
pub const START_GRACE_MS: i64 = 30_000;
/// Longest wish not to be asked that counts, in milliseconds; what is longer counts as this.
const IMMUNITY_MS_MAX: i64 = 366 * 24 * 3_600_000;

/// How a transaction ended. The numbers are stored and never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum HalfEnd {
    /// The final message is stored.
    Committed = 1,
    /// Rolled back.
    RolledBack = 2,
    /// Copied to [`GIVE_UP_TOPIC`].
    GivenUp = 3,
    /// Its topic is gone, or its record is damaged.
    Dropped = 4,
}

impl HalfEnd {
    pub(crate) fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Committed,
            2 => Self::RolledBack,
            3 => Self::GivenUp,
            4 => Self::Dropped,
            _ => return None,
        })
    }
}

/// When and how often producers are asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HalfLimits {
    /// Age at which they are asked first, in milliseconds.
    pub immunity_ms: i64,
    /// Time from one question to the next, in milliseconds.
    pub interval_ms: i64,
    /// Questions, until a half message goes to [`GIVE_UP_TOPIC`].
    pub checks_max: u32,
    /// Open transactions at most; never more than [`OPEN_MAX`].
    pub open_max: usize,
}

/// An open half message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenHalf {
    /// Offset in the queue of half messages.
    pub queue_offset: u64,
    /// Record length in bytes.
    pub size: u32,
    /// Store time in milliseconds.
    pub stored_ms: i64,
    /// How long its producer asked not to be asked, in milliseconds; -1 leaves it to the broker.
    pub immunity_ms: i64,
    /// Hash of the producer group, see [`group_hash`].
    pub group_hash: u64,
    /// Questions so far.
    pub checks: u32,
    /// Time of the last question in milliseconds, 0 without one.
    pub asked_ms: i64,
    /// Time of the next question in milliseconds; none while its record is being read.
    pub due_ms: Option<i64>,
}

/// The hash under which producer groups are compared.
#[must_use]
pub fn group_hash(group: &[u8]) -> u64 {
    crate::run::key_hash(&[], group)
}

/// What the internal records say of a stored record: that it opens or ends a transaction.
pub(crate) fn told_by(view: &RecordView<'_>, shard: u16) -> Option<Event> {
    if view.topic() == HALF_TOPIC.as_bytes() {
        let stored = view.properties();
        return Some(Event::HalfOpened {
            queue_offset: view.queue_offset() as u64,
            size: view.total_len() as u32,
            stored_ms: view.store_timestamp(),
            immunity_ms: immunity_ms(stored),
            group_hash: group_hash(
                properties::get(stored, properties::PRODUCER_GROUP).unwrap_or_default(),
            ),
        });
    }
    if view.prepared_transaction_offset() <= 0 {
        return None;
    }
    let (named, half) = address::split(view.prepared_transaction_offset())?;
    let how = if view.topic() == GIVE_UP_TOPIC.as_bytes() {
        HalfEnd::GivenUp
    } else {
        HalfEnd::Committed
    };
    (named == shard).then_some(Event::HalfEnded {
        half,
        how: how as u8,
    })
}

/// The wish of a producer in its own unit, seconds; -1 without a usable one.
pub(crate) fn immunity_ms(stored: &[u8]) -> i64 {
    let wish = properties::get_str(stored, properties::CHECK_IMMUNITY_TIME_IN_SECONDS);
    let seconds = wish.and_then(|text| text.trim().parse::<i64>().ok());
    match seconds {
        Some(seconds) if seconds >= 0 => seconds.saturating_mul(1000).min(IMMUNITY_MS_MAX),
        _ => -1,
    }
}

/// The transactions of a shard.
#[derive(Default)]
pub(crate) struct HalfTable {
    open: BTreeMap<u64, OpenHalf>,
    due: BTreeSet<(i64, u64)>,
    ended: HashMap<u64, (HalfEnd, u64)>,
    ended_order: VecDeque<u64>,
    limits: Option<HalfLimits>,
    /// Nobody is asked before this time, in milliseconds.
    grace_until_ms: i64,
}

impl HalfTable {
    pub(crate) fn get(&self, position: u64) -> Option<&OpenHalf> {
        self.open.get(&position)
    }

    /// How a transaction ended, with the log position behind the record that says so.
    pub(crate) fn ended(&self, position: u64) -> Option<(HalfEnd, u64)> {
        self.ended.get(&position).copied()
    }

    /// How many may be open.
    pub(crate) fn bound(&self) -> usize {
        let limits = self.limits;
        limits.map_or(OPEN_MAX, |limits| limits.open_max.min(OPEN_MAX))
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn oldest(&self) -> Option<(u64, &OpenHalf)> {
        self.open.iter().next().map(|(at, half)| (*at, half))
    }

    /// Open half messages from a position on.
    pub(crate) fn from(&self, position: u64) -> impl Iterator<Item = (u64, &OpenHalf)> {
        self.open.range(position..).map(|(at, half)| (*at, half))
    }

    pub(crate) fn limits(&self) -> Option<HalfLimits> {
        self.limits
    }

    /// Sets the limits and, with them, the times of all questions.
    pub(crate) fn set_limits(&mut self, now: Now, limits: HalfLimits) {
        if self.limits.is_none() {
            self.grace_until_ms = now.wall_ms + limits.interval_ms.clamp(0, START_GRACE_MS);
        }
        self.limits = Some(limits);
        let positions: Vec<u64> = self.open.keys().copied().collect();
        for position in positions {
            if self
                .open
                .get(&position)
                .is_some_and(|half| half.due_ms.is_some())
            {
                self.set_regular_due(position);
            }
        }
    }

    /// Applies what an internal record at a position says.
    pub(crate) fn apply(&mut self, event: &Event, position: u64) {
        match event {
            Event::HalfOpened {
                queue_offset,
                size,
                stored_ms,
                immunity_ms,
                group_hash,
            } => {
                let half = OpenHalf {
                    queue_offset: *queue_offset,
                    size: *size,
                    stored_ms: *stored_ms,
                    immunity_ms: *immunity_ms,
                    group_hash: *group_hash,
                    checks: 0,
                    asked_ms: 0,
                    due_ms: None,
                };
                self.open.insert(position, half);
                self.set_regular_due(position);
            }
            Event::HalfEnded { half, how } => {
                if let Some(how) = HalfEnd::from_number(*how) {
                    self.end(*half, how, position);
                }
            }
            Event::HalfChecked { at_ms, halves } => {
                for half in halves {
                    self.checked(*half, *at_ms);
                }
            }
            _ => {}
        }
    }

    /// Takes note of an end; nothing when the half message is not open.
    pub(crate) fn end(&mut self, position: u64, how: HalfEnd, told_at: u64) {
        let Some(half) = self.open.remove(&position) else {
            return;
        };
        if let Some(due_ms) = half.due_ms {
            self.due.remove(&(due_ms, position));
        }
        if self.ended_order.len() >= ENDED_KEPT_MAX
            && let Some(oldest) = self.ended_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
        self.ended.insert(position, (how, told_at));
        self.ended_order.push_back(position);
    }

    /// Takes note of a question.
    pub(crate) fn checked(&mut self, position: u64, at_ms: i64) {
        if let Some(half) = self.open.get_mut(&position) {
            half.checks += 1;
            half.asked_ms = at_ms;
            self.set_regular_due(position);
        }
    }

    fn set_regular_due(&mut self, position: u64) {
        // Without limits nobody is asked; setting them sets all times.
        let limits = self.limits.unwrap_or(HalfLimits {
            immunity_ms: 0,
            interval_ms: 0,
            checks_max: 0,
            open_max: OPEN_MAX,
        });
        let Some(half) = self.open.get(&position) else {
            return;
        };
        let due_ms = if half.asked_ms > 0 {
            half.asked_ms.saturating_add(limits.interval_ms)
        } else if half.immunity_ms >= 0 {
            half.stored_ms.saturating_add(half.immunity_ms)
        } else {
            half.stored_ms.saturating_add(limits.immunity_ms)
        };
        self.set_due(position, due_ms.max(self.grace_until_ms));
    }

    /// Sets the time of the next question.
    pub(crate) fn set_due(&mut self, position: u64, due_ms: i64) {
        let Some(half) = self.open.get_mut(&position) else {
            return;
        };
        if let Some(before) = half.due_ms.replace(due_ms) {
            self.due.remove(&(before, position));
        }
        self.due.insert((due_ms, position));
    }

    /// Takes a half message out of the row of questions, because its record is being read.
    pub(crate) fn take_due(&mut self, position: u64) {
        if let Some(half) = self.open.get_mut(&position)
            && let Some(before) = half.due_ms.take()
        {
            self.due.remove(&(before, position));
        }
    }

    /// The first half message in the row of questions, with its time.
    pub(crate) fn first_due(&self) -> Option<(i64, u64)> {
        self.limits?;
        self.due.first().copied()
    }

    /// Forgets what stands in front of a position; returns how many were open.
    pub(crate) fn drop_before(&mut self, position: u64) -> usize {
        let mut dropped = 0;
        while let Some((at, _)) = self.oldest().filter(|(at, _)| *at < position) {
            self.end(at, HalfEnd::Dropped, position);
            dropped += 1;
        }
        dropped
    }
}

/// The internal records of a run without the transactions that begin and end in it, which nobody
/// has to hear of at a start.
pub(crate) fn without_ended(events: &mut Vec<(u64, Vec<u8>)>, run_start: u64) {
    let ended_half = |bytes: &[u8]| match bytes.split_first() {
        Some((&HALF_ENDED, rest)) => rest.first_chunk().map(|half| u64::from_be_bytes(*half)),
        _ => None,
    };
    let ended = events.iter().filter_map(|(_, bytes)| ended_half(bytes));
    let ended: std::collections::HashSet<u64> = ended.filter(|half| *half >= run_start).collect();
    if ended.is_empty() {
        return;
    }
    events.retain(|(position, bytes)| match bytes.first() {
        Some(&HALF_OPENED) => !ended.contains(position),
        Some(&HALF_ENDED) => ended_half(bytes).is_none_or(|half| !ended.contains(&half)),
        _ => true,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(queue_offset: u64, stored_ms: i64, immunity_ms: i64) -> Event {
        Event::HalfOpened {
            queue_offset,
            size: 100,
            stored_ms,
            immunity_ms,
            group_hash: 5,
        }
    }

    fn ended(half: u64) -> Event {
        let how = HalfEnd::RolledBack as u8;
        Event::HalfEnded { half, how }
    }

    fn at(wall_ms: i64) -> Now {
        Now {
            monotonic_us: 1,
            wall_ms,
        }
    }

    const LIMITS: HalfLimits = HalfLimits {
        immunity_ms: 6_000,
        interval_ms: 30_000,
        checks_max: 15,
        open_max: OPEN_MAX,
    };

    #[test]
    fn the_first_question_comes_after_the_immunity_time_and_the_next_after_the_interval() {
        let mut table = HalfTable::default();
        table.apply(&opened(0, 1_000, -1), 100);
        assert_eq!(table.first_due(), None, "without limits nobody is asked");
        table.set_limits(at(-50_000), LIMITS);
        table.apply(&opened(1, 1_000, 2_000), 200);
        assert_eq!(table.first_due(), Some((3_000, 200)));
        table.checked(200, 3_500);
        assert_eq!(table.first_due(), Some((7_000, 100)));
        table.end(100, HalfEnd::Committed, 300);
        assert_eq!(table.first_due(), Some((33_500, 200)));
        assert_eq!(table.ended(100), Some((HalfEnd::Committed, 300)));
    }

    #[test]
    fn after_a_start_producers_have_time_to_come_back() {
        let mut table = HalfTable::default();
        table.apply(&opened(0, 1_000, -1), 100);
        table.set_limits(at(100_000), LIMITS);
        assert_eq!(table.first_due(), Some((130_000, 100)));
        let short = HalfLimits {
            interval_ms: 500,
            ..LIMITS
        };
        let mut table = HalfTable::default();
        table.apply(&opened(0, 1_000, -1), 100);
        table.set_limits(at(100_000), short);
        assert_eq!(table.first_due(), Some((100_500, 100)));
    }

    #[test]
    fn an_end_counts_once_and_the_memory_of_ends_is_bounded() {
        let mut table = HalfTable::default();
        for half in 0..ENDED_KEPT_MAX as u64 + 10 {
            table.apply(&opened(half, 0, -1), half);
            table.end(half, HalfEnd::RolledBack, half);
            table.end(half, HalfEnd::Committed, half);
        }
        assert_eq!(table.ended.len(), ENDED_KEPT_MAX);
        assert_eq!(table.ended(9), None);
        assert_eq!(
            table.ended(10).map(|(how, _)| how),
            Some(HalfEnd::RolledBack)
        );
        assert!(table.due.is_empty());
    }

    #[test]
    fn a_run_tells_only_transactions_that_reach_beyond_it() {
        let bytes = |event: &Event| {
            let mut out = Vec::new();
            event.encode(&mut out);
            out
        };
        let removed = Event::TopicRemoved { topic: "T".into() };
        let mut events = vec![
            (100, bytes(&opened(0, 0, -1))),
            (110, bytes(&opened(1, 0, -1))),
            (120, bytes(&removed)),
            (130, bytes(&ended(100))),
            (140, bytes(&ended(50))),
        ];
        without_ended(&mut events, 100);
        let kept: Vec<u64> = events.iter().map(|(position, _)| *position).collect();
        assert_eq!(kept, [110, 120, 140]);
    }

    #[test]
    fn only_a_usable_wish_counts() {
        let wish = |text: &str| {
            let mut stored = Vec::new();
            properties::append(
                &mut stored,
                properties::CHECK_IMMUNITY_TIME_IN_SECONDS,
                text,
            );
            immunity_ms(&stored)
        };
        assert_eq!((wish("0"), wish("12"), wish("-1")), (0, 12_000, -1));
        assert_eq!((wish("soon"), wish("")), (-1, -1));
        assert_eq!(wish("9223372036854775807"), IMMUNITY_MS_MAX);
    }
}
