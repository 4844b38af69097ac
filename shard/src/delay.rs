//! Delay levels: messages that become visible some time after they were sent.
//!
//! A delayed message is stored in this shard's own queue of its level (topic
//! `SCHEDULE_TOPIC_XXXX`, queue id = level - 1) with the delivery time as tag code. Delivery is a
//! local append to the real queue, followed by a progress event for the batch.
//!
//! Invariant: a level delivers in schedule order and never before the time; after a kill at most
//! the batch being delivered is delivered again.

use std::collections::HashMap;

use wire::message::{RecordView, properties};

use crate::cold::{Answer, Question};
use crate::error::Refusal;
use crate::event::Event;
use crate::message::NewMessage;
use crate::queue::QueueIndex;
use crate::runtime::Now;
use crate::select::{PullLimits, Selection, Wanted};
use crate::shard::{Appended, Shard};
use crate::units::Unit;

/// RocketMQ's topic of delayed messages.
pub const SCHEDULE_TOPIC: &str = "SCHEDULE_TOPIC_XXXX";
/// Levels a broker can have.
pub const LEVELS_MAX: usize = 64;
/// Messages one level delivers per turn.
pub const DELIVERIES_PER_TURN: usize = 32;
/// Pause after a refused delivery, in milliseconds.
const REFUSED_PAUSE_MS: i64 = 100;
/// Tokens of cold jobs that belong to delay levels.
pub(crate) const DELAY_TOKEN: u64 = 1 << 63;

struct Level {
    delay_ms: i64,
    queue: QueueIndex,
    delivered: u64,
    next_due_ms: i64,
    reading: bool,
}

/// All levels of a shard.
#[derive(Default)]
pub struct DelayLevels {
    levels: Vec<Level>,
    /// Removed topics with the log position of the removal: what was delayed for them before is
    /// not delivered.
    removed: HashMap<Box<str>, u64>,
    scratch: Vec<Unit>,
    units: Vec<Unit>,
    bytes: Vec<u8>,
}

impl DelayLevels {
    pub(crate) fn new(delays_ms: &[i64], queues: &mut crate::queue::QueueTable) -> Self {
        let levels = delays_ms
            .iter()
            .take(LEVELS_MAX)
            .enumerate()
            .filter_map(|(index, delay)| {
                let queue = queues.open(SCHEDULE_TOPIC, index as i32)?;
                Some(Level {
                    delay_ms: *delay,
                    queue,
                    delivered: 0,
                    next_due_ms: 0,
                    reading: false,
                })
            });
        Self {
            levels: levels.collect(),
            ..Self::default()
        }
    }

    /// Delivery time of a delayed message stored at a time.
    pub(crate) fn due_ms(&self, queue_id: i32, store_timestamp: i64) -> i64 {
        let level = usize::try_from(queue_id)
            .ok()
            .and_then(|index| self.levels.get(index));
        store_timestamp + level.map_or(0, |level| level.delay_ms)
    }

    /// Takes note of a removed topic.
    pub(crate) fn note_removed(&mut self, topic: &str, position: u64) {
        self.removed.insert(topic.into(), position);
    }

    /// Forgets removals in front of the oldest message.
    pub(crate) fn forget_removed_before(&mut self, position: u64) {
        self.removed.retain(|_, at| *at >= position);
    }

    /// Whether a topic was removed behind a log position.
    pub(crate) fn is_removed_since(&self, topic: &str, position: u64) -> bool {
        self.removed.get(topic).is_some_and(|at| *at > position)
    }

    pub(crate) fn replay(&mut self, level: i32, offset: i64) {
        let index = usize::try_from(level - 1).ok();
        if let Some(level) = index.and_then(|index| self.levels.get_mut(index)) {
            level.delivered = offset.max(0) as u64;
        }
    }
}

impl Shard {
    /// Appends a message to be delivered after its level's delay (levels above the last count as
    /// the last). Its properties must name the real topic and queue, which live on this shard.
    pub fn append_delayed(
        &mut self,
        now: Now,
        mut message: NewMessage<'_>,
        level: i32,
    ) -> Result<Appended, Refusal> {
        let last = self.delay.levels.len().max(1);
        let index = usize::try_from(level).unwrap_or(1).clamp(1, last) - 1;
        let Some((queue, delay_ms)) = self
            .delay
            .levels
            .get(index)
            .map(|level| (level.queue, level.delay_ms))
        else {
            return Err(Refusal::Stopping {
                shard: self.config.number,
            });
        };
        message.queue = queue;
        message.tags_code = now.wall_ms.max(self.last_store_timestamp) + delay_ms;
        let appended = self.append(now, &message)?;
        if let Some(level) = self.delay.levels.get_mut(index) {
            level.next_due_ms = level.next_due_ms.min(message.tags_code);
        }
        Ok(appended)
    }

    /// Delayed messages not yet delivered, as (level, count).
    #[must_use]
    pub fn delayed_pending(&self) -> Vec<(i32, u64)> {
        let levels = self.delay.levels.iter().enumerate();
        levels
            .map(|(index, level)| {
                let next = self
                    .queues
                    .get(level.queue)
                    .map_or(0, |queue| queue.readable);
                (index as i32 + 1, next.saturating_sub(level.delivered))
            })
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    pub(crate) fn delay_deadline_us(&self, now: Now) -> Option<u64> {
        let pending = self.delay.levels.iter().filter(|level| {
            !level.reading
                && self
                    .queues
                    .get(level.queue)
                    .is_some_and(|q| q.readable > level.delivered)
        });
        if self.cold.has_delay_answer() {
            return Some(now.monotonic_us);
        }
        let due = pending.map(|level| level.next_due_ms).min()?;
        let wait_ms = u64::try_from(due - now.wall_ms).unwrap_or(0);
        Some(now.monotonic_us + wait_ms * 1000)
    }

    pub(crate) fn deliver_due(&mut self, now: Now) {
        self.take_delay_answers(now);
        if self.stopping {
            return;
        }
        for index in 0..self.delay.levels.len() {
            let Some(level) = self.delay.levels.get(index) else {
                return;
            };
            let readable = self
                .queues
                .get(level.queue)
                .map_or(0, |queue| queue.readable);
            if !level.reading && level.delivered != readable && now.wall_ms >= level.next_due_ms {
                self.deliver_level(now, index);
            }
        }
    }

    fn deliver_level(&mut self, now: Now, index: usize) {
        let Some((queue, delivered)) = self
            .delay
            .levels
            .get(index)
            .map(|level| (level.queue, level.delivered))
        else {
            return;
        };
        let limits = PullLimits {
            messages_max: DELIVERIES_PER_TURN,
            bytes_max: 256 * 1024,
        };
        let mut scratch = std::mem::take(&mut self.delay.scratch);
        let mut units = std::mem::take(&mut self.delay.units);
        let offset = delivered as i64;
        let selection = self.select(
            queue,
            offset,
            &Wanted::All,
            limits,
            &mut scratch,
            &mut units,
        );
        let in_ring = matches!(selection, Selection::Chosen { .. }) && self.all_in_ring(&units);
        let due_ms = units.first().map_or(0, |unit| unit.tags_code);
        let mut bytes = std::mem::take(&mut self.delay.bytes);
        bytes.clear();
        if in_ring && due_ms <= now.wall_ms {
            self.copy_from_ring(&units, &mut bytes);
        }
        (self.delay.scratch, self.delay.units) = (scratch, units);
        match selection {
            _ if in_ring && due_ms > now.wall_ms => self.set_next_due(index, due_ms),
            _ if in_ring => self.deliver_records(now, index, &bytes),
            Selection::Chosen { .. } | Selection::OnDisk => {
                let question = Question::Pull {
                    queue,
                    offset,
                    wanted: Wanted::All,
                    limits,
                };
                let reading = self.ask(DELAY_TOKEN | index as u64, question);
                if let Some(level) = self.delay.levels.get_mut(index) {
                    level.reading = reading;
                }
            }
            Selection::TooSmall | Selection::TooLarge | Selection::Empty => {
                self.pull_into_range(index, delivered);
            }
            _ => {}
        }
        self.delay.bytes = bytes;
    }

    /// Moves a progress that lies outside its queue back into it (the log lost its end, or
    /// retention passed it).
    fn pull_into_range(&mut self, index: usize, from: u64) {
        let Some(level) = self.delay.levels.get_mut(index) else {
            return;
        };
        let Some(queue) = self.queues.get(level.queue) else {
            return;
        };
        level.delivered = from.clamp(queue.min_offset, queue.readable);
        level.next_due_ms = 0;
        tracing::warn!(
            shard = self.config.number,
            level = index + 1,
            from,
            to = level.delivered,
            "delivery progress of a delay level moved into its queue"
        );
    }

    fn set_next_due(&mut self, index: usize, due_ms: i64) {
        if let Some(level) = self.delay.levels.get_mut(index) {
            level.next_due_ms = due_ms;
        }
    }

    fn take_delay_answers(&mut self, now: Now) {
        while let Some((token, answer)) = self.cold.next_delay_answer() {
            self.on_delay_answer(now, (token & !DELAY_TOKEN) as usize, answer);
        }
    }

    fn on_delay_answer(&mut self, now: Now, index: usize, answer: Answer) {
        let Some(level) = self.delay.levels.get_mut(index) else {
            return;
        };
        level.reading = false;
        if matches!(answer, Answer::Pull { .. }) {
            self.failures.delay.worked();
        }
        match answer {
            Answer::Pull {
                selection: Selection::NoneMatched { next_offset },
                ..
            } => {
                level.delivered = next_offset;
            }
            Answer::Pull {
                selection: Selection::Chosen { next_offset },
                bytes,
                messages,
            } => {
                if messages == 0 {
                    level.delivered = next_offset;
                } else {
                    self.deliver_records(now, index, &bytes);
                }
            }
            Answer::Failed(reason) => {
                level.next_due_ms = now.wall_ms + REFUSED_PAUSE_MS;
                if let Some(times) = self.failures.delay.failed(now.monotonic_us) {
                    tracing::warn!(
                        shard = self.config.number,
                        level = index + 1,
                        times,
                        reason,
                        "delayed messages not read"
                    );
                }
            }
            _ => level.next_due_ms = now.wall_ms + REFUSED_PAUSE_MS,
        }
    }

    /// Delivers records of a level in order as far as they are due.
    fn deliver_records(&mut self, now: Now, index: usize, mut bytes: &[u8]) {
        let Some(before) = self.delay.levels.get(index).map(|level| level.delivered) else {
            return;
        };
        let mut delivered = before;
        let mut next_due_ms = 0;
        while let Some((size, _)) = wire::message::peek_len(bytes) {
            let Some((record, rest)) = bytes.split_at_checked(size as usize) else {
                break;
            };
            bytes = rest;
            let Ok(view) = RecordView::parse(record) else {
                break;
            };
            let due = self.delay.due_ms(index as i32, view.store_timestamp());
            if due > now.wall_ms {
                next_due_ms = due;
                break;
            }
            if let Err(refusal) = self.deliver(now, &view) {
                tracing::debug!(shard = self.config.number, %refusal, "delivery waits");
                next_due_ms = now.wall_ms + REFUSED_PAUSE_MS;
                break;
            }
            delivered = view.queue_offset() as u64 + 1;
        }
        if let Some(level) = self.delay.levels.get_mut(index) {
            level.delivered = delivered;
            level.next_due_ms = next_due_ms;
        }
        if delivered > before {
            let event = Event::DelayProgress {
                level: index as i32 + 1,
                offset: delivered as i64,
            };
            if let Err(refusal) = self.append_event(now, &event) {
                tracing::debug!(shard = self.config.number, %refusal, "progress not stored");
            }
        }
    }

    fn deliver(&mut self, now: Now, view: &RecordView<'_>) -> Result<(), Refusal> {
        let stored = view.properties();
        let topic = properties::get_str(stored, properties::REAL_TOPIC);
        let queue_id = properties::get_str(stored, properties::REAL_QUEUE_ID)
            .and_then(|text| text.parse::<i32>().ok());
        let stored_at = crate::address::split(view.physical_offset()).map_or(0, |(_, at)| at);
        let target = topic
            .zip(queue_id)
            .filter(|(topic, _)| !self.delay.is_removed_since(topic, stored_at));
        // Right after a start the queue may not have been opened yet.
        let queue = target.and_then(|(topic, id)| self.open_queue(topic, id));
        let Some(queue) = queue else {
            self.counters.delayed_dropped += 1;
            tracing::warn!(
                shard = self.config.number,
                topic,
                queue_id,
                "delayed message dropped: no such queue any more"
            );
            return Ok(());
        };
        let message = NewMessage {
            properties: &[stored],
            ..NewMessage::of_record(view, queue, stored)
        };
        self.append(now, &message)?;
        self.counters.delayed_delivered += 1;
        Ok(())
    }
}
