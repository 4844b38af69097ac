//! Delivery: records read ahead of their time, appended to their real queues when it comes.
//!
//! Invariant: messages leave strictly in the order of their keys, so that one claim says what is
//! done; a claim is made only when nothing that is not readable yet could fall under it.

use wire::message::{RecordView, properties};

use super::code::{SPAN_MS, append_number, span_start};
use super::stage::{Read, Record, Staged};
use super::window::Entry;
use super::{DELETIONS_MAX, Key, Origin, TIMER_TOKEN, Timers, deletion_hash, origin_field};
use crate::address;
use crate::cold::{Answer, Question};
use crate::error::Refusal;
use crate::event::Event;
use crate::half_ends::real_queue;
use crate::message::NewMessage;
use crate::runtime::{Driver, Now};
use crate::shard::Shard;

/// Messages delivered in one turn.
pub const DELIVERIES_PER_TURN: usize = 128;
/// How long before its time a message is staged, in milliseconds.
const LEAD_MS: i64 = 1_000;
/// Pause after a refused delivery, in microseconds.
const REFUSED_PAUSE_US: u64 = 5_000;
/// Pause before records are read again that the disk failed to read, in microseconds.
const READ_PAUSE_US: u64 = 500_000;
/// Attempts to read a record.
const ATTEMPTS_MAX: u8 = 8;

/// What became of a message whose time has come.
enum Outcome {
    Delivered,
    /// Nothing is left of it; a claim has to say so.
    Skipped,
    /// Nothing to say of it.
    Passed,
    /// Its record is still being read.
    Waits,
    Refused(Refusal),
}

impl Timers {
    /// Whether nothing waits, or may come, that a claim up to a key would wrongly call done.
    fn may_claim(&self, key: Key) -> bool {
        let staged = self.stage.first_key();
        let waiting = self.window.peek().map(|entry| entry.key);
        let waits = [staged, waiting].into_iter().flatten().any(|at| at <= key);
        !waits && key <= self.window.frontier() && !self.waits_for_unseen(key)
    }
}

impl Shard {
    /// Everything about timed messages that is due in this turn.
    pub(crate) fn timer_step<D: Driver>(&mut self, now: Now, driver: &mut D) {
        self.take_timer_answers(now);
        if self.stopping {
            return;
        }
        if self.timers.opened_ms == 0 {
            self.timers.opened_ms = now.wall_ms;
        }
        self.move_step(now);
        self.refill_step(now, driver);
        self.stage_next(now);
        self.read_staged(now);
        self.deliver_due(now);
        self.roll_step(now, driver);
    }

    /// When timed messages want a turn, in monotonic microseconds.
    pub(crate) fn timer_deadline_us(&self, now: Now) -> Option<u64> {
        if self.cold.has_timer_answer() {
            return Some(now.monotonic_us);
        }
        if self.stopping {
            return None;
        }
        let timers = &self.timers;
        let at_ms = |due_ms: i64| {
            let wait_ms = u64::try_from(due_ms - now.wall_ms).unwrap_or(0);
            now.monotonic_us + wait_ms.saturating_mul(1_000)
        };
        let first = timers
            .stage
            .items
            .front()
            .and_then(|item| match item.record {
                // The end of a read wakes the core.
                Record::Reading => None,
                Record::Wanted if !self.holds(&item.entry) => None,
                _ if timers.waits_for_unseen(item.entry.key) => Some(now.monotonic_us + 500),
                _ => Some(at_ms(item.entry.key.due_ms)),
            });
        let first = first.map(|at| at.max(timers.stage.paused_until_us));
        let look = timers
            .stage
            .next_look_ms()
            .filter(|_| timers.stage.len() > 0);
        let look = look.map(|ms| at_ms(ms).max(timers.stage.retry_read_us));
        let next = timers.window.peek().filter(|e| timers.stage.takes(e.key));
        let next = next.map(|entry| at_ms(entry.key.due_ms - LEAD_MS));
        let others = [
            self.move_deadline_us(now),
            self.refill_deadline_us(now),
            self.roll_deadline_us(now),
        ];
        [first, look, next]
            .into_iter()
            .chain(others)
            .flatten()
            .min()
    }

    /// Moves what is due soon from the window to the stage.
    fn stage_next(&mut self, now: Now) {
        let timers = &mut self.timers;
        while let Some(next) = timers.window.peek().copied() {
            if next.key.due_ms > now.wall_ms + LEAD_MS || !timers.stage.takes(next.key) {
                return;
            }
            timers.window.pop();
            if next.key.position < timers.log.rolled_to {
                timers.counts.stale = timers.counts.stale.saturating_sub(1);
            } else {
                timers.stage.insert(next);
            }
        }
    }

    /// Whether the write buffer holds a message's record.
    fn holds(&self, entry: &Entry) -> bool {
        let held = self.log.in_ring(entry.key.position, entry.size as usize);
        held.is_some()
    }

    /// Log position from which on the write buffer keeps records for a while.
    fn safe_from(&self) -> u64 {
        self.log.ring_floor() + self.log.record_bytes_max() / 4
    }

    fn read_staged(&mut self, now: Now) {
        if self.timers.stage.items.is_empty() || now.monotonic_us < self.timers.stage.retry_read_us
        {
            return;
        }
        let safe_from = self.safe_from();
        let shard = self.config.number;
        for part in self.timers.stage.next_sweep(now.wall_ms, safe_from) {
            let units = part.iter().map(|entry| entry.unit(shard)).collect();
            let keys: Vec<Key> = part.iter().map(|entry| entry.key).collect();
            let stage = &mut self.timers.stage;
            let token = TIMER_TOKEN | stage.next_token;
            stage.next_token += 1;
            stage.reads.push(Read { token, keys });
            if !self.ask(token, Question::Records { units }) {
                let failed = Answer::Failed("too many reads wait".to_owned());
                self.on_timer_answer(now, token, failed);
            }
        }
    }

    fn take_timer_answers(&mut self, now: Now) {
        while let Some((token, answer)) = self.cold.next_timer_answer() {
            let taken = self.on_move_answer(now, token, &answer)
                || self.on_roll_answer(now, token, &answer);
            if !taken {
                self.on_timer_answer(now, token, answer);
            }
        }
    }

    fn on_timer_answer(&mut self, now: Now, token: u64, answer: Answer) {
        let shard = self.config.number;
        let stage = &mut self.timers.stage;
        let at = stage.reads.iter().position(|read| read.token == token);
        let Some(read) = at.map(|at| stage.reads.swap_remove(at)) else {
            return;
        };
        let mut records = match answer {
            Answer::Records(records) => {
                self.failures.timers.worked();
                records.into_iter().peekable()
            }
            Answer::Failed(reason) => {
                if let Some(times) = self.failures.timers.failed(now.monotonic_us) {
                    tracing::warn!(shard, times, reason, "timed messages not read; tried again");
                }
                stage.retry_read_us = now.monotonic_us + READ_PAUSE_US;
                for key in read.keys {
                    if let Some(item) = stage.find(key) {
                        item.attempts += 1;
                        let lost = item.attempts >= ATTEMPTS_MAX;
                        item.record = if lost { Record::Gone } else { Record::Wanted };
                    }
                }
                stage.want_read(now.wall_ms);
                return;
            }
            _ => return,
        };
        for key in read.keys {
            let wanted = address::physical(shard, key.position);
            let is_it = |record: &Vec<u8>| {
                RecordView::parse(record).is_ok_and(|view| view.physical_offset() == wanted)
            };
            let record = records.next_if(is_it);
            if let Some(item) = stage.find(key) {
                item.record = record.map_or(Record::Gone, Record::Ready);
            }
        }
    }

    /// Delivers what is due, in order.
    fn deliver_due(&mut self, now: Now) {
        if now.monotonic_us < self.timers.stage.paused_until_us {
            return;
        }
        let mut skipped = self.timers.stage.owed.take();
        for _ in 0..DELIVERIES_PER_TURN {
            let Some(key) = self.timers.stage.first_key() else {
                break;
            };
            if key.due_ms > now.wall_ms || self.timers.waits_for_unseen(key) {
                break;
            }
            let Some(item) = self.timers.stage.take_first() else {
                break;
            };
            match self.finish_staged(now, &item) {
                Outcome::Delivered => skipped = None,
                Outcome::Skipped => {
                    self.timers.counts.done(item.entry.level);
                    skipped = Some(key);
                }
                Outcome::Passed => {}
                Outcome::Waits => {
                    if matches!(item.record, Record::Wanted) {
                        self.timers.stage.want_read(now.wall_ms);
                    }
                    self.timers.stage.put_back(item);
                    break;
                }
                Outcome::Refused(refusal) => {
                    tracing::debug!(shard = self.config.number, %refusal, "delivery waits");
                    self.timers.stage.paused_until_us = now.monotonic_us + REFUSED_PAUSE_US;
                    self.timers.stage.put_back(item);
                    break;
                }
            }
        }
        self.expire_deletions(now);
        if let Some(key) = skipped {
            self.claim(now, key);
        }
    }

    /// Says in the log that everything up to a key is done, where no delivered record says it.
    fn claim(&mut self, now: Now, key: Key) {
        if !self.timers.may_claim(key) {
            return;
        }
        let event = Event::TimerProgress {
            due_ms: key.due_ms,
            position: key.position,
        };
        let before = self.events.len();
        match self.append_event(now, &event) {
            Ok(_) => {
                let at = self.events.get(before).map_or(0, |(at, _)| *at);
                self.timers.log.apply(&event, at);
            }
            Err(refusal) => {
                tracing::debug!(shard = self.config.number, %refusal, "progress not stored");
                self.timers.stage.owed = Some(key);
            }
        }
    }

    fn finish_staged(&mut self, now: Now, item: &Staged) -> Outcome {
        let entry = item.entry;
        if entry.key.position < self.timers.log.rolled_to {
            self.timers.counts.stale = self.timers.counts.stale.saturating_sub(1);
            return Outcome::Passed;
        }
        let mut copy = std::mem::take(&mut self.timers.bytes);
        copy.clear();
        let record = match &item.record {
            Record::Ready(bytes) => Some(bytes.as_slice()),
            Record::Gone => None,
            Record::Wanted | Record::Reading => {
                let held = self.log.in_ring(entry.key.position, entry.size as usize);
                let Some(held) = held else {
                    self.timers.bytes = copy;
                    return Outcome::Waits;
                };
                copy.extend_from_slice(held);
                Some(copy.as_slice())
            }
        };
        let view = record.and_then(|record| RecordView::parse(record).ok());
        let outcome = match view {
            Some(view) if entry.deletion => self.take_deletion(&view, &entry),
            Some(view) if self.is_taken_back(&view, &entry) => {
                self.counters.timers_deleted += 1;
                Outcome::Skipped
            }
            Some(view) => self.deliver(now, &view, &entry),
            None => {
                self.counters.timers_lost += 1;
                let offset = address::physical(self.config.number, entry.key.position);
                tracing::error!(
                    offset,
                    due_ms = entry.key.due_ms,
                    "timed message lost: damaged"
                );
                Outcome::Skipped
            }
        };
        self.timers.bytes = copy;
        outcome
    }

    fn take_deletion(&mut self, view: &RecordView<'_>, entry: &Entry) -> Outcome {
        self.timers.counts.done(entry.level);
        let key = properties::get(view.properties(), properties::TIMER_DEL_UNIQKEY);
        let from_ms = self.timers.deletions_from_ms.min(entry.key.due_ms);
        let deletions = &mut self.timers.deletions;
        if deletions.len() >= DELETIONS_MAX {
            self.counters.deletions_dropped += 1;
            tracing::warn!(bound = DELETIONS_MAX, "deletion of a timed message dropped");
        } else if let Some(key) = key {
            deletions.insert(deletion_hash(&[key]), entry.key.due_ms);
            self.timers.deletions_from_ms = from_ms;
        }
        Outcome::Passed
    }

    fn is_taken_back(&self, view: &RecordView<'_>, entry: &Entry) -> bool {
        if self.timers.deletions.is_empty() || entry.level > 0 {
            return false;
        }
        let stored = view.properties();
        let topic = properties::get(stored, properties::REAL_TOPIC).unwrap_or_default();
        let unique = properties::get(stored, properties::UNIQ_KEY).unwrap_or_default();
        let hash = deletion_hash(&[topic, b"+", unique]);
        self.timers.deletions.get(&hash) == Some(&span_start(entry.key.due_ms))
    }

    /// Forgets deletions once everything they could take back is done.
    fn expire_deletions(&mut self, now: Now) {
        let timers = &mut self.timers;
        let start = timers.deletions_from_ms;
        let end = Key {
            due_ms: start.saturating_add(SPAN_MS),
            position: u64::MAX,
        };
        if now.wall_ms > end.due_ms && timers.may_claim(end) {
            timers.deletions.retain(|_, of| *of > start);
            let spans = timers.deletions.values();
            timers.deletions_from_ms = spans.min().copied().unwrap_or(i64::MAX);
            self.claim(now, end);
        }
    }

    fn deliver(&mut self, now: Now, view: &RecordView<'_>, entry: &Entry) -> Outcome {
        let stored = view.properties();
        let real = real_queue(stored);
        let (topic, queue_id) = real.unzip();
        let log = &self.timers.log;
        let target = real.filter(|(topic, _)| !log.is_removed_since(topic, entry.key.position));
        // Right after a start the queue may not have been opened yet.
        let queue = target.and_then(|(topic, id)| self.open_queue(topic, id));
        let Some(queue) = queue else {
            self.counters.delayed_dropped += 1;
            tracing::warn!(
                topic,
                queue_id,
                "timed message dropped: no such queue any more"
            );
            return Outcome::Skipped;
        };
        let mut added = std::mem::take(&mut self.timers.added);
        added.clear();
        if entry.level == 0 {
            use properties::{TIMER_DEQUEUE_MS, TIMER_ENQUEUE_MS};
            if properties::get(stored, TIMER_ENQUEUE_MS).is_none() {
                append_number(&mut added, TIMER_ENQUEUE_MS, view.store_timestamp());
            }
            append_number(&mut added, TIMER_DEQUEUE_MS, now.wall_ms);
        }
        let message = NewMessage {
            prepared_transaction_offset: origin_field(self.config.number, entry.key.position),
            properties: &[stored, &added],
            ..NewMessage::of_record(view, queue, stored)
        };
        // What waits keeps retention from making room, so that a full disk must not keep it.
        let appended = if self.timers_held_bytes() > 0 {
            self.append_for_retention(now, &message)
        } else {
            self.append(now, &message)
        };
        self.timers.added = added;
        match appended {
            Ok(appended) => {
                let at = address::split(appended.physical_offset).map_or(0, |(_, at)| at);
                self.note_claim(Origin::Delivered(entry.key), at);
                self.note_delivered(now, entry);
                Outcome::Delivered
            }
            Err(refusal @ (Refusal::NoQueue { .. } | Refusal::TooLarge { .. })) => {
                self.counters.delayed_dropped += 1;
                tracing::error!(topic, queue_id, %refusal, "timed message dropped");
                Outcome::Skipped
            }
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    fn note_delivered(&mut self, now: Now, entry: &Entry) {
        self.counters.delayed_delivered += 1;
        let timers = &mut self.timers;
        timers.counts.done(entry.level);
        let since_ms = entry.key.due_ms.max(timers.opened_ms);
        timers.lateness.record(now.wall_ms - since_ms);
    }
}
