//! Asking producers about open transactions, and giving up those that nobody decides.
//!
//! A half message that is due is read (from the write buffer or from disk) and handed to the
//! broker, which asks a producer of its group. That it was asked is an internal record, so that the
//! count survives a kill. What was asked about often enough is copied to a topic of its own.
//!
//! Invariants: one step does bounded work; a question is handed out only when the record that
//! counts it is stored; retention never drops an open half message unless the disk leaves it no
//! other way, and says so then.

use wire::message::RecordView;

use crate::address;
use crate::cold::{Answer, Question};
use crate::error::Refusal;
use crate::event::Event;
use crate::half::{HalfEnd, HalfTable};
use crate::runtime::Now;
use crate::shard::Shard;
use crate::timer::TIMER_TOKEN;

/// Tokens of cold jobs that belong to half messages.
pub(crate) const HALF_TOKEN: u64 = TIMER_TOKEN | (1 << 62);
/// Half messages that one step takes up.
pub const CHECKS_PER_STEP_MAX: usize = 64;
/// Bytes of half messages that one step hands out, but for the first.
pub const CHECK_BYTES_PER_STEP_MAX: usize = 256 * 1024;
/// Time from one step to the next, in microseconds, so that producers are not flooded.
pub const CHECK_STEP_US: u64 = 10_000;
/// Pause before a half message is tried again that could not be read or given up, in milliseconds.
const AGAIN_MS: i64 = 200;

/// A question to a producer group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HalfCheck {
    /// The half message as stored.
    pub record: Vec<u8>,
    /// Which question about it this is, from 1.
    pub number: u32,
}

/// The transactions of a shard with what is under way about them.
#[derive(Default)]
pub(crate) struct Halves {
    pub(crate) table: HalfTable,
    /// Questions for the broker to ask.
    outbox: Vec<HalfCheck>,
    outbox_bytes: usize,
    /// Log positions of those in the outbox that no internal record counts yet.
    uncounted: Vec<u64>,
    reading: usize,
    next_step_us: u64,
    /// Half messages in front of the second position are given up, because retention wants their
    /// segments; those in front of the first have been taken up.
    giving_up: (u64, u64),
    /// Why the last half message could not be given up.
    refusal: Option<Refusal>,
    record: Vec<u8>,
}

impl Halves {
    pub(crate) fn new(table: HalfTable) -> Self {
        Self {
            table,
            ..Self::default()
        }
    }

    fn has_work(&self, now: Now) -> bool {
        let due = self.table.first_due();
        due.is_some_and(|(due_ms, _)| due_ms <= now.wall_ms) || self.giving_up.0 < self.giving_up.1
    }
}

impl Shard {
    /// Whether there are questions for [`Shard::take_half_checks`].
    #[must_use]
    pub fn has_half_checks(&self) -> bool {
        !self.halves.outbox.is_empty()
    }

    /// Moves questions to `out`.
    pub fn take_half_checks(&mut self, out: &mut Vec<HalfCheck>) {
        out.append(&mut self.halves.outbox);
        self.halves.outbox_bytes = 0;
    }

    pub(crate) fn halves_deadline_us(&self, now: Now) -> Option<u64> {
        if self.cold.has_half_answer() {
            return Some(now.monotonic_us);
        }
        if self.halves.giving_up.0 < self.halves.giving_up.1 {
            return Some(self.halves.next_step_us);
        }
        let (due_ms, _) = self.halves.table.first_due()?;
        let wait_ms = u64::try_from(due_ms - now.wall_ms).unwrap_or(0);
        Some((now.monotonic_us + wait_ms * 1000).max(self.halves.next_step_us))
    }

    /// Takes up half messages that are due.
    pub(crate) fn check_halves(&mut self, now: Now) {
        let answered = self.cold.has_half_answer();
        let steps = now.monotonic_us >= self.halves.next_step_us && self.halves.has_work(now);
        if self.stopping || !(answered || steps) {
            return;
        }
        while let Some((token, answer)) = self.cold.next_half_answer() {
            self.on_half_answer(now, token & !HALF_TOKEN, answer);
        }
        if steps {
            self.halves.next_step_us = now.monotonic_us + CHECK_STEP_US;
            self.take_up_unwanted(now);
            self.take_up_due(now);
        }
        self.count_checks(now);
    }

    /// Takes up half messages that stand in the way of retention.
    fn take_up_unwanted(&mut self, now: Now) {
        let (from, to) = self.halves.giving_up;
        if from >= to {
            return;
        }
        let in_the_way = self.halves.table.from(from);
        let in_the_way = in_the_way.take_while(|(position, _)| *position < to);
        let taken: Vec<(u64, bool)> = in_the_way
            .map(|(position, half)| (position, half.due_ms.is_some()))
            .take(CHECKS_PER_STEP_MAX)
            .collect();
        let last = taken.last().map_or(to, |(position, _)| position + 1);
        self.halves.giving_up.0 = if taken.len() < CHECKS_PER_STEP_MAX {
            to
        } else {
            last
        };
        // Those being read are given up when their record is there.
        for (position, _) in taken.iter().filter(|(_, waits)| *waits) {
            self.take_up(now, *position);
        }
    }

    fn take_up_due(&mut self, now: Now) {
        for _ in 0..CHECKS_PER_STEP_MAX {
            let full = self.halves.outbox_bytes >= CHECK_BYTES_PER_STEP_MAX
                || self.halves.reading >= CHECKS_PER_STEP_MAX;
            match self.halves.table.first_due() {
                Some((due_ms, position)) if due_ms <= now.wall_ms && !full => {
                    self.take_up(now, position);
                }
                _ => return,
            }
        }
    }

    /// Gets the record of a half message, to go on with it.
    fn take_up(&mut self, now: Now, position: u64) {
        let Some(size) = self.half(position).map(|half| u64::from(half.size)) else {
            return;
        };
        if position + size > self.watermark() {
            return self.halves.table.set_due(position, now.wall_ms + AGAIN_MS);
        }
        let mut record = std::mem::take(&mut self.halves.record);
        let held = self.half_in_ring(position, &mut record);
        if held {
            self.halves.table.take_due(position);
            self.on_half_record(now, position, &record);
        }
        self.halves.record = record;
        if held {
            return;
        }
        let physical_offset = address::physical(self.config.number, position);
        let question = Question::Record { physical_offset };
        if self.ask(HALF_TOKEN | position, question) {
            self.halves.table.take_due(position);
            self.halves.reading += 1;
        } else {
            self.halves.table.set_due(position, now.wall_ms + AGAIN_MS);
        }
    }

    fn on_half_answer(&mut self, now: Now, position: u64, answer: Answer) {
        self.halves.reading = self.halves.reading.saturating_sub(1);
        if self.half(position).is_none() {
            return;
        }
        let shard = self.config.number;
        match answer {
            Answer::Records(records) => match records.first() {
                Some(record) => self.on_half_record(now, position, record),
                None => {
                    let offset = address::physical(shard, position);
                    tracing::error!(
                        shard,
                        offset,
                        "half message damaged, its transaction is over"
                    );
                    if self.end_half(now, position, HalfEnd::Dropped).is_err() {
                        self.halves.table.set_due(position, now.wall_ms + AGAIN_MS);
                    }
                }
            },
            Answer::Failed(reason) => {
                tracing::warn!(shard, reason, "half message not read");
                self.halves.table.set_due(position, now.wall_ms + AGAIN_MS);
            }
            _ => self.halves.table.set_due(position, now.wall_ms + AGAIN_MS),
        }
    }

    /// Asks about a half message, or gives it up.
    fn on_half_record(&mut self, now: Now, position: u64, record: &[u8]) {
        let checks = self.half(position).map_or(0, |half| half.checks);
        let most = self
            .halves
            .table
            .limits()
            .map_or(0, |limits| limits.checks_max);
        if checks < most && position >= self.halves.giving_up.1 {
            self.halves.outbox_bytes += record.len();
            self.halves.outbox.push(HalfCheck {
                record: record.to_vec(),
                number: checks + 1,
            });
            self.halves.uncounted.push(position);
            return;
        }
        let Ok(view) = RecordView::parse(record) else {
            return;
        };
        match self.give_up_half(now, &view) {
            Ok(()) => self.halves.refusal = None,
            Err(refusal) => {
                let shard = self.config.number;
                tracing::debug!(shard, %refusal, "giving up a transaction waits");
                self.halves.refusal = Some(refusal);
                self.halves.table.set_due(position, now.wall_ms + AGAIN_MS);
            }
        }
    }

    /// Stores that questions are asked; without room for that they are asked later.
    fn count_checks(&mut self, now: Now) {
        let asked = std::mem::take(&mut self.halves.uncounted);
        if asked.is_empty() {
            return;
        }
        let at_ms = now.wall_ms;
        let event = Event::HalfChecked {
            at_ms,
            halves: asked,
        };
        match self.append_event(now, &event) {
            Ok(_) => {
                let Event::HalfChecked { halves, .. } = event else {
                    return;
                };
                for position in &halves {
                    self.halves.table.checked(*position, at_ms);
                }
                self.counters.halves_checked += halves.len() as u64;
            }
            Err(refusal) => {
                let Event::HalfChecked { halves, .. } = event else {
                    return;
                };
                tracing::debug!(shard = self.config.number, %refusal, "questions wait");
                let keep = self.halves.outbox.len().saturating_sub(halves.len());
                self.halves.outbox.truncate(keep);
                for position in &halves {
                    self.halves.table.set_due(*position, now.wall_ms + AGAIN_MS);
                }
            }
        }
    }

    /// Whether retention up to a position has to wait for open half messages to be given up, which
    /// begins with this.
    pub(crate) fn halves_hold_back(&mut self, position: u64, is_forced: bool) -> bool {
        let Some((oldest, _)) = self.halves.table.oldest().filter(|(at, _)| *at < position) else {
            return false;
        };
        let shard = self.config.number;
        let no_room = matches!(
            self.halves.refusal,
            Some(
                Refusal::SegmentMissing { .. }
                    | Refusal::DiskFull { .. }
                    | Refusal::Poisoned { .. }
            )
        );
        if is_forced && no_room {
            return false;
        }
        if self.halves.giving_up.1 < position {
            tracing::warn!(
                shard,
                oldest = address::physical(shard, oldest),
                "retention reaches open transactions, they are given up first"
            );
            self.halves.giving_up = (oldest, position);
        }
        true
    }

    pub(crate) fn drop_halves_before(&mut self, position: u64) {
        let dropped = self.halves.table.drop_before(position);
        if dropped > 0 {
            self.counters.halves_dropped += dropped as u64;
            tracing::error!(
                shard = self.config.number,
                dropped,
                "retention dropped open transactions, the disk had no room to keep their messages"
            );
        }
    }
}
