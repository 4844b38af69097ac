//! Copying pending messages forward, so that retention can drop the segment they stand in.
//!
//! Copies are made in log order and name their origin, so each says by itself that everything up
//! to there is copied or done. A segment whose pending messages make up more than half of it is
//! held instead: copying them would win nothing.
//!
//! Invariant: a segment is dropped only when nothing in it waits, and that is durable in the log.

use std::io;

use wire::message::{RecordView, properties};

use super::code::append_number;
use super::window::{ENTRY_BYTES, Entry};
use super::{Origin, TIMER_TOKEN, origin_field};
use crate::address;
use crate::cold::{Answer, Question};
use crate::error::Refusal;
use crate::event::Event;
use crate::io::JobOutcome;
use crate::message::NewMessage;
use crate::queue::Extent;
use crate::runtime::{Driver, Now};
use crate::shard::Shard;

/// Messages copied at once.
const COPIES_MAX: usize = 64;
/// Bytes of messages copied at once.
const COPY_BYTES_MAX: u64 = 2 * 1024 * 1024;
/// Pause after a refusal or a failed read, in microseconds.
const PAUSE_US: u64 = 50_000;
/// Pause before a segment that is held is looked at again, in microseconds.
const HOLD_US: u64 = 10_000_000;
/// Marks the cold jobs that read for copies.
const ROLL_TOKEN: u64 = TIMER_TOKEN | (1 << 61);

#[derive(Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Idle,
    /// The auxiliary thread looks for what is pending.
    Looking,
    /// Their records are being read.
    Reading,
    /// They are being appended; records by entry.
    Copying,
}

/// The state of copying.
#[derive(Default)]
pub(crate) struct Roll {
    /// Position in front of which everything is to be copied.
    target: Option<u64>,
    stage: Stage,
    entries: Vec<Entry>,
    records: Vec<Vec<u8>>,
    paused_until_us: u64,
    /// Bytes of pending messages that keep a segment.
    pub(super) held_bytes: u64,
}

impl Shard {
    /// Whether nothing in front of a position waits; if something does, it is copied forward, and
    /// the answer is another one later.
    pub(crate) fn timers_left_before(&mut self, position: u64) -> bool {
        if self.parts_before(position).next().is_none() {
            return false;
        }
        let target = self.timers.roll.target.unwrap_or(0);
        self.timers.roll.target = Some(target.max(position));
        true
    }

    /// Bytes of pending messages that keep retention from dropping a segment.
    #[must_use]
    pub fn timers_held_bytes(&self) -> u64 {
        self.timers.roll.held_bytes
    }

    pub(super) fn roll_deadline_us(&self, now: Now) -> Option<u64> {
        let roll = &self.timers.roll;
        let waits = roll.stage == Stage::Looking || roll.stage == Stage::Reading;
        let due = roll.target.is_some() && !waits;
        due.then(|| roll.paused_until_us.max(now.monotonic_us))
    }

    pub(super) fn roll_step<D: Driver>(&mut self, now: Now, driver: &mut D) {
        let roll = &self.timers.roll;
        let Some(target) = roll.target else { return };
        if now.monotonic_us < roll.paused_until_us {
            return;
        }
        match roll.stage {
            Stage::Idle => self.look(driver, target),
            Stage::Copying => self.copy_entries(now),
            Stage::Looking | Stage::Reading => {}
        }
    }

    fn look<D: Driver>(&mut self, driver: &mut D, target: u64) {
        let extents: Vec<Extent> = self.parts_before(target).copied().collect();
        if extents.is_empty() {
            (self.timers.roll.target, self.timers.roll.held_bytes) = (None, 0);
            return;
        }
        self.timers.roll.stage = Stage::Looking;
        self.read_pending(driver, &extents, (COPIES_MAX, COPY_BYTES_MAX));
    }

    /// Takes what the auxiliary thread found.
    pub(crate) fn on_roll_found(&mut self, now: Now, result: io::Result<JobOutcome>) {
        let shard = self.config.number;
        let roll = &mut self.timers.roll;
        roll.stage = Stage::Idle;
        let bytes = match result {
            Ok(JobOutcome::Bytes(bytes)) => bytes,
            Ok(_) => return,
            Err(error) => {
                tracing::warn!(shard, %error, "timed messages not copied forward yet");
                roll.paused_until_us = now.monotonic_us + HOLD_US;
                return;
            }
        };
        let Some((held, entries)) = bytes.split_first_chunk::<8>() else {
            return;
        };
        let held_bytes = u64::from_be_bytes(*held);
        roll.entries = entries
            .chunks_exact(ENTRY_BYTES)
            .filter_map(Entry::decode)
            .collect();
        if roll.entries.is_empty() {
            return self.roll_done(now);
        }
        roll.held_bytes = held_bytes;
        if held_bytes > self.config.segment_bytes / 2 {
            tracing::warn!(shard, held_bytes, "retention waits for timed messages");
            roll.paused_until_us = now.monotonic_us + HOLD_US;
            return;
        }
        let units = roll.entries.iter().map(|entry| entry.unit(shard)).collect();
        roll.stage = Stage::Reading;
        if !self.ask(ROLL_TOKEN, Question::Records { units }) {
            self.timers.roll.stage = Stage::Idle;
            self.timers.roll.paused_until_us = now.monotonic_us + PAUSE_US;
        }
    }

    /// Nothing in front of the target waits: says so in the log.
    fn roll_done(&mut self, now: Now) {
        let Some(target) = self.timers.roll.target else {
            return;
        };
        let runs = self.runs.range(..target);
        let end = runs.map(|(_, run)| run.meta.end).max().unwrap_or(target);
        let position = end.min(target) - 1;
        match self.append_event(now, &Event::TimersRolled { position }) {
            Ok(_) => {
                let log = &mut self.timers.log;
                log.rolled_to = log.rolled_to.max(position + 1);
                self.timers.roll.target = None;
                self.timers.roll.held_bytes = 0;
            }
            Err(_) => self.timers.roll.paused_until_us = now.monotonic_us + PAUSE_US,
        }
    }

    /// Takes the records to copy; `false` when the answer is for somebody else.
    pub(super) fn on_roll_answer(&mut self, now: Now, token: u64, answer: &Answer) -> bool {
        if token != ROLL_TOKEN {
            return false;
        }
        let roll = &mut self.timers.roll;
        if let Answer::Records(records) = answer {
            roll.records.clone_from(records);
            roll.stage = Stage::Copying;
        } else {
            roll.stage = Stage::Idle;
            roll.paused_until_us = now.monotonic_us + HOLD_US;
        }
        true
    }

    fn copy_entries(&mut self, now: Now) {
        let shard = self.config.number;
        let entries = std::mem::take(&mut self.timers.roll.entries);
        let records = std::mem::take(&mut self.timers.roll.records);
        let mut views = records
            .iter()
            .filter_map(|record| RecordView::parse(record).ok())
            .peekable();
        self.timers.roll.stage = Stage::Idle;
        for entry in &entries {
            let wanted = address::physical(shard, entry.key.position);
            let view = views.next_if(|view| view.physical_offset() == wanted);
            if !self.timers.log.is_pending(entry) {
                continue;
            }
            let Some(view) = view else {
                self.counters.timers_lost += 1;
                tracing::error!(offset = wanted, "timed message lost: damaged");
                if self.pass_over(now, entry).is_err() {
                    return;
                }
                continue;
            };
            if let Err(refusal) = self.copy_one(now, &view, entry) {
                tracing::debug!(shard, %refusal, "timed messages wait to be copied forward");
                self.timers.roll.paused_until_us = now.monotonic_us + PAUSE_US;
                return;
            }
        }
    }

    /// Says in the log that a message needs no copy.
    fn pass_over(&mut self, now: Now, entry: &Entry) -> Result<(), Refusal> {
        let position = entry.key.position;
        self.append_event(now, &Event::TimersRolled { position })?;
        let log = &mut self.timers.log;
        log.rolled_to = log.rolled_to.max(position + 1);
        self.note_rolled(entry);
        Ok(())
    }

    /// The original counts no longer.
    fn note_rolled(&mut self, entry: &Entry) {
        let timers = &mut self.timers;
        timers.counts.done(entry.level);
        if entry.key <= timers.window.frontier() {
            timers.counts.stale += 1;
        } else {
            timers.counts.far = timers.counts.far.saturating_sub(1);
        }
    }

    fn copy_one(&mut self, now: Now, view: &RecordView<'_>, entry: &Entry) -> Result<(), Refusal> {
        use properties::{REAL_TOPIC, TIMER_ENQUEUE_MS, TIMER_ROLL_TIMES};
        let stored = view.properties();
        let topic = properties::get_str(stored, REAL_TOPIC).unwrap_or_default();
        if self.timers.log.is_removed_since(topic, entry.key.position) {
            self.counters.delayed_dropped += 1;
            return self.pass_over(now, entry);
        }
        let mut added = std::mem::take(&mut self.timers.added);
        added.clear();
        if properties::get(stored, TIMER_ENQUEUE_MS).is_none() {
            append_number(&mut added, TIMER_ENQUEUE_MS, view.store_timestamp());
        }
        let times = properties::get_str(stored, TIMER_ROLL_TIMES);
        let times = times.and_then(|text| text.parse::<i64>().ok()).unwrap_or(0);
        let kept = properties::remove(stored, &[TIMER_ROLL_TIMES]);
        append_number(&mut added, TIMER_ROLL_TIMES, times.saturating_add(1));
        let parts: [&[u8]; 2] = [&kept, &added];
        let code = super::code_of(&parts);
        let message = NewMessage {
            prepared_transaction_offset: origin_field(self.config.number, entry.key.position),
            properties: &parts,
            tags_code: code.to_tags_code(),
            ..NewMessage::of_record(view, self.timers.queue, stored)
        };
        let appended = self.append_for_retention(now, &message);
        self.timers.added = added;
        let appended = appended?;
        let at = address::split(appended.physical_offset).map_or(0, |(_, at)| at);
        let offset = appended.queue_offset as u64;
        self.timers.note_appended(offset, code.due_ms);
        self.note_claim(Origin::Rolled(entry.key.position), at);
        self.note_rolled(entry);
        self.counters.timers_rolled += 1;
        Ok(())
    }
}
