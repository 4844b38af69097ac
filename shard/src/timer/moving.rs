//! Messages of a store from before the timer queue: they wait in a queue for each delay level and
//! are moved to the timer queue after the start.
//!
//! Invariant: how far a level has been moved is noted behind the copies in the log, so that none is
//! lost; a kill in between moves at most one batch again, as its delivery was repeated before.

use std::collections::BTreeMap;

use wire::message::{RecordView, peek_len, properties};

use super::code::append_number;
use super::{DUE_MS_MAX, LEVELS_MAX, TIMER_TOKEN};
use crate::address;
use crate::cold::{Answer, Question};
use crate::error::Refusal;
use crate::event::Event;
use crate::half_ends::real_queue;
use crate::message::NewMessage;
use crate::runtime::Now;
use crate::select::{PullLimits, Selection, Wanted};
use crate::shard::Shard;

/// Topic that delayed messages waited in, queue id = level - 1.
pub const SCHEDULE_TOPIC: &str = "SCHEDULE_TOPIC_XXXX";
/// Marks the cold jobs that read for moves.
const MOVE_TOKEN: u64 = TIMER_TOKEN | (1 << 60);
/// What is moved at once.
const BATCH: PullLimits = PullLimits {
    messages_max: 64,
    bytes_max: 1 << 20,
};
/// Pause after a refusal, in microseconds.
const REFUSED_PAUSE_US: u64 = 50_000;
/// Pause after a failed read, in microseconds.
const READ_PAUSE_US: u64 = 500_000;

/// How far the queues of levels have been moved.
#[derive(Default)]
pub(crate) struct Moving {
    /// Next offset by queue id: what the log says, then what is moved.
    next: BTreeMap<i32, u64>,
    /// Progress that is not in the log yet: queue id, next offset.
    owed: Option<(i32, u64)>,
    reading: Option<i32>,
    /// Whether nothing is left.
    ended: bool,
    moved: u64,
    paused_until_us: u64,
}

impl Moving {
    /// Takes the progress of a level from the log.
    pub(crate) fn replay(&mut self, level: i32, offset: i64) {
        self.next.insert(level - 1, offset.max(0) as u64);
    }
}

impl Shard {
    /// Whether delayed messages of an earlier form are still to be moved.
    pub(crate) fn has_old_levels(&self) -> bool {
        !self.timers.moving.ended
    }

    pub(super) fn move_deadline_us(&self, now: Now) -> Option<u64> {
        let moving = &self.timers.moving;
        let due = !moving.ended && moving.reading.is_none();
        due.then(|| moving.paused_until_us.max(now.monotonic_us))
    }

    pub(super) fn move_step(&mut self, now: Now) {
        let moving = &self.timers.moving;
        if moving.ended || moving.reading.is_some() || now.monotonic_us < moving.paused_until_us {
            return;
        }
        if let Some((queue_id, next)) = moving.owed {
            let event = Event::DelayProgress {
                level: queue_id + 1,
                offset: next as i64,
            };
            if self.append_event(now, &event).is_err() {
                self.timers.moving.paused_until_us = now.monotonic_us + REFUSED_PAUSE_US;
                return;
            }
            self.timers.moving.owed = None;
        }
        let Some((queue_id, question)) = self.next_to_move() else {
            let moving = &mut self.timers.moving;
            moving.ended = true;
            if moving.moved > 0 {
                let (shard, moved) = (self.config.number, moving.moved);
                tracing::info!(shard, moved, "delayed messages of an earlier form moved");
            }
            return;
        };
        let asked = self.ask(MOVE_TOKEN, question);
        let moving = &mut self.timers.moving;
        moving.reading = asked.then_some(queue_id);
        moving.paused_until_us = now.monotonic_us + REFUSED_PAUSE_US * u64::from(!asked);
    }

    /// The queue of a level in which something is left, and the read of its next messages.
    fn next_to_move(&mut self) -> Option<(i32, Question)> {
        for queue_id in 0..LEVELS_MAX as i32 {
            let Some(index) = self.queues.find(SCHEDULE_TOPIC, queue_id) else {
                continue;
            };
            let Some(queue) = self.queues.get(index) else {
                continue;
            };
            let next = self.timers.moving.next.entry(queue_id).or_default();
            // Progress may have been lost with the end of the log, or retention may have passed it.
            *next = (*next).clamp(queue.min_offset.min(queue.readable), queue.readable);
            if *next < queue.readable {
                let question = Question::Pull {
                    queue: index,
                    offset: *next as i64,
                    wanted: Wanted::All,
                    limits: BATCH,
                };
                return Some((queue_id, question));
            }
        }
        None
    }

    /// Takes messages to move; `false` when the answer is for somebody else.
    pub(super) fn on_move_answer(&mut self, now: Now, token: u64, answer: &Answer) -> bool {
        if token != MOVE_TOKEN {
            return false;
        }
        let Some(queue_id) = self.timers.moving.reading.take() else {
            return true;
        };
        match answer {
            Answer::Pull {
                selection: Selection::NoneMatched { next_offset },
                ..
            } => self.note_moved(queue_id, *next_offset),
            Answer::Pull {
                selection: Selection::Chosen { next_offset },
                bytes,
                ..
            } => self.move_records(now, queue_id, bytes, *next_offset),
            Answer::Failed(reason) => {
                self.timers.moving.paused_until_us = now.monotonic_us + READ_PAUSE_US;
                if let Some(times) = self.failures.timers.failed(now.monotonic_us) {
                    let shard = self.config.number;
                    tracing::warn!(shard, times, reason, "delayed messages not moved yet");
                }
            }
            _ => self.timers.moving.paused_until_us = now.monotonic_us + READ_PAUSE_US,
        }
        true
    }

    fn note_moved(&mut self, queue_id: i32, next: u64) {
        let moving = &mut self.timers.moving;
        moving.next.insert(queue_id, next);
        moving.owed = Some((queue_id, next));
    }

    fn move_records(&mut self, now: Now, queue_id: i32, mut bytes: &[u8], next_offset: u64) {
        while let Some((size, _)) = peek_len(bytes) {
            let Some((record, rest)) = bytes.split_at_checked(size as usize) else {
                break;
            };
            bytes = rest;
            let Ok(view) = RecordView::parse(record) else {
                break;
            };
            if let Err(refusal) = self.move_one(now, queue_id, &view) {
                tracing::debug!(shard = self.config.number, %refusal, "moving waits");
                self.timers.moving.paused_until_us = now.monotonic_us + REFUSED_PAUSE_US;
                return;
            }
            self.note_moved(queue_id, view.queue_offset() as u64 + 1);
        }
        self.note_moved(queue_id, next_offset);
    }

    fn move_one(&mut self, now: Now, queue_id: i32, view: &RecordView<'_>) -> Result<(), Refusal> {
        let stored = view.properties();
        let at = address::split(view.physical_offset()).map_or(0, |(_, at)| at);
        let topic = real_queue(stored).map(|(topic, _)| topic);
        if topic.is_none_or(|topic| self.timers.log.is_removed_since(topic, at)) {
            self.counters.delayed_dropped += 1;
            tracing::warn!(topic, "delayed message dropped: no such topic any more");
            return Ok(());
        }
        let delay_ms = self.timers.level_delay_ms(queue_id + 1).unwrap_or(0);
        let due_ms = view.store_timestamp().saturating_add(delay_ms);
        let mut added = std::mem::take(&mut self.timers.added);
        added.clear();
        let due_ms = due_ms.clamp(0, DUE_MS_MAX);
        append_number(&mut added, properties::TIMER_OUT_MS, due_ms);
        let parts: [&[u8]; 2] = [stored, &added];
        let code = super::code_of(&parts);
        let message = NewMessage {
            properties: &parts,
            tags_code: code.to_tags_code(),
            ..NewMessage::of_record(view, self.timers.queue, stored)
        };
        // Retention waits for it, so that a full disk must not keep it.
        let appended = self.append_for_retention(now, &message);
        self.timers.added = added;
        match appended {
            Ok(appended) => {
                let offset = appended.queue_offset as u64;
                self.timers.note_appended(offset, code.due_ms);
                self.timers.moving.moved += 1;
                Ok(())
            }
            Err(refusal @ Refusal::TooLarge { .. }) => {
                self.counters.delayed_dropped += 1;
                tracing::error!(topic, %refusal, "delayed message dropped");
                Ok(())
            }
            Err(refusal) => Err(refusal),
        }
    }
}
