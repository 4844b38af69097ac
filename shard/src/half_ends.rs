//! Storing half messages and ending their transactions.
//!
//! Invariant: a transaction ends with exactly one record (the final message, an internal record,
//! or the copy for those who have to decide by hand), so that a crash leaves it either open or
//! ended, and a second end finds it ended (P1).

use wire::message::{RecordView, properties, sysflag};

use crate::address;
use crate::error::Refusal;
use crate::event::Event;
use crate::half::{
    GIVE_UP_TOPIC, HALF_TOPIC, HalfEnd, HalfLimits, OpenHalf, group_hash, immunity_ms,
};
use crate::message::NewMessage;
use crate::runtime::Now;
use crate::shard::{Appended, Shard};

/// What an end led to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The transaction ended now; the answer may be sent once the watermark has reached this.
    Now(HalfEnd, u64),
    /// It had ended before, with the same meaning of the position.
    Before(HalfEnd, u64),
    /// No open transaction is there, and none that ended lately.
    Unknown,
}

/// Properties of a message that name its real queue.
pub(crate) fn real_queue(stored: &[u8]) -> Option<(&str, i32)> {
    let topic = properties::get_str(stored, properties::REAL_TOPIC)?;
    let queue_id = properties::get_str(stored, properties::REAL_QUEUE_ID)?;
    Some((topic, queue_id.parse().ok()?))
}

impl Shard {
    /// Sets when and how often producers of open transactions are asked.
    pub fn set_half_limits(&mut self, now: Now, limits: HalfLimits) {
        if self.halves.table.limits() != Some(limits) {
            self.halves.table.set_limits(now, limits);
        }
    }

    /// Appends a half message. Its properties must name the real topic and queue, which live on
    /// this shard, and the producer group.
    pub fn append_half(
        &mut self,
        now: Now,
        mut message: NewMessage<'_>,
    ) -> Result<Appended, Refusal> {
        let shard = self.config.number;
        let (open, bound) = (self.halves.table.len(), self.halves.table.bound());
        if open >= bound {
            self.counters.halves_refused += 1;
            return Err(Refusal::TransactionsFull {
                shard,
                open: open as u64,
                bound: bound as u64,
            });
        }
        let queue = self.open_queue(HALF_TOPIC, i32::from(shard));
        message.queue = queue.ok_or(Refusal::NoQueue { shard })?;
        message.sys_flag =
            sysflag::with_transaction_type(message.sys_flag, sysflag::TRANSACTION_NONE);
        if self.log.tail() == 0 {
            // Offset 0 in a final message means none, so that no half message may stand there.
            let halves = Vec::new();
            let at_ms = now.wall_ms;
            self.append_event(now, &Event::HalfChecked { at_ms, halves })?;
        }
        let find = |name| {
            let mut parts = message.properties.iter().rev();
            parts.find_map(|part| properties::get(part, name))
        };
        let group = group_hash(find(properties::PRODUCER_GROUP).unwrap_or_default());
        let mut wish = Vec::new();
        if let Some(text) = find(properties::CHECK_IMMUNITY_TIME_IN_SECONDS) {
            let text = std::str::from_utf8(text).unwrap_or_default();
            properties::append(&mut wish, properties::CHECK_IMMUNITY_TIME_IN_SECONDS, text);
        }
        let appended = self.append(now, &message)?;
        let position = address::split(appended.physical_offset).map_or(0, |(_, at)| at);
        let event = Event::HalfOpened {
            queue_offset: appended.queue_offset as u64,
            size: (appended.end - position) as u32,
            stored_ms: appended.store_timestamp,
            immunity_ms: immunity_ms(&wish),
            group_hash: group,
        };
        self.tell_half(position, &event);
        self.halves.table.apply(&event, position);
        self.counters.halves_stored += 1;
        Ok(appended)
    }

    /// Puts what a record says of a transaction among the internal records of the next run.
    fn tell_half(&mut self, position: u64, event: &Event) {
        let mut bytes = Vec::with_capacity(40);
        event.encode(&mut bytes);
        self.events.push_back((position, bytes));
    }

    /// An open half message.
    #[must_use]
    pub fn half(&self, position: u64) -> Option<&OpenHalf> {
        self.halves.table.get(position)
    }

    /// How a transaction ended that is not open; only lately ended ones are known.
    #[must_use]
    pub fn half_ended(&self, position: u64) -> Ended {
        match self.halves.table.ended(position) {
            Some((how, end)) => Ended::Before(how, end),
            None => Ended::Unknown,
        }
    }

    /// Open transactions, and the store time of the oldest in milliseconds.
    #[must_use]
    pub fn halves_open(&self) -> (u64, Option<i64>) {
        let table = &self.halves.table;
        let oldest = table.oldest().map(|(_, half)| half.stored_ms);
        (table.len() as u64, oldest)
    }

    /// Offset of the oldest open half message in the queue of half messages, or that queue's end.
    #[must_use]
    pub fn halves_done_to(&self) -> u64 {
        if let Some((_, half)) = self.halves.table.oldest() {
            return half.queue_offset;
        }
        let queue = self.queues.find(HALF_TOPIC, i32::from(self.config.number));
        queue
            .and_then(|queue| self.queues.get(queue))
            .map_or(0, |queue| queue.readable)
    }

    /// Copies the record of an open half message that the write buffer still holds.
    pub fn half_in_ring(&self, position: u64, out: &mut Vec<u8>) -> bool {
        out.clear();
        let record = self.halves.table.get(position).and_then(|half| {
            let size = half.size as usize;
            self.log.in_ring(position, size)
        });
        out.extend_from_slice(record.unwrap_or_default());
        record.is_some()
    }

    /// Stores the final message of a half message, whose record this is: to be delivered at once,
    /// after its delay level, or else at a time in milliseconds.
    pub fn commit_half(
        &mut self,
        now: Now,
        record: &[u8],
        due_ms: Option<i64>,
    ) -> Result<Ended, Refusal> {
        let Ok(view) = RecordView::parse(record) else {
            return Ok(Ended::Unknown);
        };
        let position = address::split(view.physical_offset()).map_or(0, |(_, at)| at);
        if self.half(position).is_none() {
            return Ok(self.half_ended(position));
        }
        let stored = view.properties();
        let target = real_queue(stored)
            .filter(|(topic, _)| !self.timers.log.is_removed_since(topic, position))
            .and_then(|(topic, queue_id)| self.open_queue(topic, queue_id));
        let Some(queue) = target else {
            tracing::warn!(
                shard = self.config.number,
                offset = view.physical_offset(),
                "half message dropped at its commit: its topic is gone"
            );
            return self.end_half(now, position, HalfEnd::Dropped);
        };
        let message = NewMessage {
            properties: &[stored],
            ..final_message(&view, queue)
        };
        let delay = properties::get_str(stored, properties::DELAY);
        let level: i32 = delay.and_then(|text| text.parse().ok()).unwrap_or(0);
        let appended = match due_ms {
            _ if level > 0 => self.append_delayed(now, message, level)?,
            Some(due_ms) => self.append_timed(now, message, due_ms)?,
            None => self.append(now, &message)?,
        };
        self.note_end(position, HalfEnd::Committed, &appended);
        self.counters.halves_committed += 1;
        Ok(Ended::Now(HalfEnd::Committed, appended.end))
    }

    /// Ends a transaction without its message.
    pub fn roll_back_half(&mut self, now: Now, position: u64) -> Result<Ended, Refusal> {
        if self.half(position).is_none() {
            return Ok(self.half_ended(position));
        }
        self.end_half(now, position, HalfEnd::RolledBack)
    }

    /// Ends a transaction with an internal record.
    pub(crate) fn end_half(
        &mut self,
        now: Now,
        position: u64,
        how: HalfEnd,
    ) -> Result<Ended, Refusal> {
        let event = Event::HalfEnded {
            half: position,
            how: how as u8,
        };
        let end = self.append_event(now, &event)?;
        self.halves.table.end(position, how, end);
        match how {
            HalfEnd::RolledBack => self.counters.halves_rolled_back += 1,
            _ => self.counters.halves_dropped += 1,
        }
        Ok(Ended::Now(how, end))
    }

    /// Copies a half message to where people have to decide.
    pub(crate) fn give_up_half(&mut self, now: Now, view: &RecordView<'_>) -> Result<(), Refusal> {
        let shard = self.config.number;
        let position = address::split(view.physical_offset()).map_or(0, |(_, at)| at);
        let queue = self.open_queue(GIVE_UP_TOPIC, i32::from(shard));
        let queue = queue.ok_or(Refusal::NoQueue { shard })?;
        let message = NewMessage {
            sys_flag: view.sys_flag(),
            properties: &[view.properties()],
            ..final_message(view, queue)
        };
        let appended = self.append_for_retention(now, &message)?;
        self.note_end(position, HalfEnd::GivenUp, &appended);
        self.counters.halves_given_up += 1;
        tracing::warn!(
            shard,
            offset = view.physical_offset(),
            topic = properties::get_str(view.properties(), properties::REAL_TOPIC),
            id = properties::get_str(view.properties(), properties::UNIQ_KEY),
            "undecided transaction given up, its message is in {GIVE_UP_TOPIC}"
        );
        Ok(())
    }

    fn note_end(&mut self, half: u64, how: HalfEnd, appended: &Appended) {
        let position = address::split(appended.physical_offset).map_or(0, |(_, at)| at);
        let event = Event::HalfEnded {
            half,
            how: how as u8,
        };
        self.tell_half(position, &event);
        self.halves.table.end(half, how, appended.end);
    }
}

/// The message that a half message becomes; its properties are still missing.
fn final_message<'a>(view: &RecordView<'a>, queue: u32) -> NewMessage<'a> {
    NewMessage {
        sys_flag: sysflag::with_transaction_type(view.sys_flag(), sysflag::TRANSACTION_COMMIT),
        prepared_transaction_offset: view.physical_offset(),
        ..NewMessage::of_record(view, queue, view.properties())
    }
}
