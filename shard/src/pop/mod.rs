//! POP: messages that a shard's consumers hold one by one, instead of an offset for each queue.
//!
//! The table ([`PopTable`]) is a pure state machine. This module ties it to the log: what is handed
//! out, acknowledged, changed or moved is an internal record first and a change of the table then,
//! so that a start rebuilds the table from the log.
//!
//! Invariant: the table never says anything that no record says, and a copy in a retry topic is one
//! record together with the note that the original is settled.

mod block;
mod compact;
mod due;
mod event;
mod table;
#[cfg(test)]
mod tests;

use wire::message::properties;

pub use block::BLOCK_MESSAGES_MAX;
pub use compact::compact;
pub use event::{
    OFFSETS_PER_EVENT_MAX, POP_COPY_MARK, POP_KIND_FIRST, POP_KIND_LAST, POP_ORIGIN, PopEvent,
    PopName,
};
pub use table::{
    AckState, Due, DueMessage, Holding, IN_FLIGHT_MAX, IN_FLIGHT_PER_QUEUE_MAX, POP_QUEUES_MAX,
    PopFigures, PopIndex, PopTable, Taking,
};

use crate::error::Refusal;
use crate::event::Event;
use crate::message::NewMessage;
use crate::runtime::Now;
use crate::shard::{Appended, Shard};

/// Counters of POP since the start of the process.
#[derive(Clone, Copy, Default, Debug)]
pub struct PopCounters {
    /// Messages handed out.
    pub taken: u64,
    /// Messages acknowledged.
    pub acked: u64,
    /// Acknowledgements whose message was no longer held under their receipt.
    pub ack_missed: u64,
    /// Times that a message was kept longer.
    pub changed: u64,
    /// Messages moved to a retry topic.
    pub revived: u64,
    /// Messages moved to a dead-letter topic.
    pub dead: u64,
    /// Messages that retention dropped while they were held.
    pub dropped: u64,
    /// Pops that got less because the bound on held messages was hit.
    pub bound_hit: u64,
}

impl Shard {
    /// The messages that consumers hold.
    #[must_use]
    pub fn pop(&self) -> &PopTable {
        &self.pop
    }

    /// Counters of POP.
    #[must_use]
    pub fn pop_counters(&self) -> PopCounters {
        self.pop_counters
    }

    /// To count what only the caller sees.
    pub fn pop_counters_mut(&mut self) -> &mut PopCounters {
        &mut self.pop_counters
    }

    /// Index of a queue and group, opened if need be; `None` at [`POP_QUEUES_MAX`].
    pub fn pop_open(&mut self, topic: &str, group: &str, queue_id: i32) -> Option<PopIndex> {
        self.pop.open(topic, group, queue_id)
    }

    fn pop_name(&self, index: PopIndex) -> PopName {
        self.pop
            .queue(index)
            .map(|queue| queue.name.clone())
            .unwrap_or_default()
    }

    /// Notes where a group stands, in memory, as a record at `end` says.
    fn pop_stands(&mut self, name: &PopName, offset: i64, end: u64) {
        let entry = self.offsets.entry(&name.topic, &name.group, name.queue_id);
        if let Some(entry) = entry {
            entry.offset = offset;
            entry.position = end;
        }
    }

    /// Hands messages out. Returns the position that must be reached before they may leave.
    pub fn pop_take(
        &mut self,
        now: Now,
        index: PopIndex,
        taking: &Taking<'_>,
    ) -> Result<u64, Refusal> {
        let name = self.pop_name(index);
        let next_offset = taking.next_offset as i64;
        let event = PopEvent::Taken {
            name: name.clone(),
            ordered: taking.ordered,
            fresh: taking.fresh,
            pop_ms: taking.pop_ms,
            invisible_ms: taking.invisible_ms,
            next_offset,
            attempt: taking.attempt.to_owned(),
            offsets: taking.offsets.to_vec(),
        };
        let end = self.append_event(now, &Event::Pop(event))?;
        self.pop.take(index, taking);
        if !taking.ordered {
            self.pop_stands(&name, next_offset, end);
        }
        self.pop_counters.taken += taking.offsets.len() as u64;
        Ok(end)
    }

    /// Settles messages held under a receipt. Returns how many were, and the position that must be
    /// reached before it may be answered.
    pub fn pop_ack(
        &mut self,
        now: Now,
        index: PopIndex,
        pop_ms: i64,
        offsets: &[u64],
    ) -> Result<(usize, u64), Refusal> {
        let held = offsets.iter().copied();
        let mut held: Vec<u64> = held
            .filter(|offset| self.pop.state(index, *offset, pop_ms) == AckState::Held)
            .collect();
        held.dedup();
        self.pop_counters.ack_missed += (offsets.len() - held.len()) as u64;
        if held.is_empty() {
            // What is repeated may not be answered ahead of what it repeats.
            return Ok((0, self.log.tail()));
        }
        let name = self.pop_name(index);
        let commit = self.pop_commit(&name, self.pop.stands_at(index, pop_ms, &held));
        let event = PopEvent::Acked {
            name: name.clone(),
            pop_ms,
            commit,
            offsets: held.clone(),
        };
        let end = self.append_event(now, &Event::Pop(event))?;
        for offset in &held {
            self.pop.ack(index, *offset, pop_ms);
        }
        if commit >= 0 {
            self.pop_stands(&name, commit, end);
        }
        self.pop_counters.acked += held.len() as u64;
        Ok((held.len(), end))
    }

    /// Where a group that reads in order stands now, unless an administrator wants it elsewhere.
    fn pop_commit(&self, name: &PopName, stands: Option<u64>) -> i64 {
        let entry = self.offsets.get(&name.topic, &name.group, name.queue_id);
        let is_reset = entry.is_some_and(|entry| entry.reset_to >= 0);
        stands
            .filter(|_| !is_reset)
            .map_or(-1, |offset| offset as i64)
    }

    /// Keeps a message held under a receipt invisible until another time. `None`: it is not held.
    pub fn pop_change(
        &mut self,
        now: Now,
        index: PopIndex,
        (offset, pop_ms): (u64, i64),
        (new_pop_ms, due_ms): (i64, i64),
    ) -> Result<Option<u64>, Refusal> {
        if self.pop.state(index, offset, pop_ms) == AckState::Gone {
            self.pop_counters.ack_missed += 1;
            return Ok(None);
        }
        let event = PopEvent::Changed {
            name: self.pop_name(index),
            pop_ms,
            new_pop_ms,
            due_ms,
            offset,
        };
        let end = self.append_event(now, &Event::Pop(event))?;
        self.pop
            .change(index, (offset, pop_ms), (new_pop_ms, due_ms));
        self.pop_counters.changed += 1;
        Ok(Some(end))
    }

    /// The next thing whose time is up.
    pub fn pop_next_due(&mut self, now: Now) -> Option<Due> {
        self.pop.next_due(now.wall_ms)
    }

    /// A message whose time is up could not be moved on: try again at a time.
    pub fn pop_postpone(&mut self, message: &DueMessage, until_ms: i64, failed: bool) {
        self.pop.postpone(message, until_ms, failed);
    }

    /// Puts a copy of a held message into a queue of this shard and settles the original, in one
    /// record. `None`: it is not held any more. The properties must not carry [`POP_ORIGIN`].
    pub fn pop_move(
        &mut self,
        now: Now,
        message: &DueMessage,
        copy: NewMessage<'_>,
    ) -> Result<Option<Appended>, Refusal> {
        let (index, offset, pop_ms) = (message.queue, message.offset, message.pop_ms);
        if self.pop.state(index, offset, pop_ms) == AckState::Gone {
            return Ok(None);
        }
        let name = self.pop_name(index);
        let commit = self.pop_commit(&name, self.pop.stands_at(index, pop_ms, &[offset]));
        let mut mark = Vec::with_capacity(128);
        let text = PopEvent::origin(&name, (pop_ms, offset, commit));
        properties::append(&mut mark, POP_ORIGIN, &text);
        let mut parts: Vec<&[u8]> = copy.properties.to_vec();
        parts.push(&mark);
        let copy = NewMessage {
            prepared_transaction_offset: POP_COPY_MARK,
            properties: &parts,
            ..copy
        };
        let appended = self.append(now, &copy)?;
        let event = PopEvent::Moved {
            name: name.clone(),
            pop_ms,
            offset,
            commit,
        };
        let at = crate::address::split(appended.physical_offset).map_or(0, |(_, at)| at);
        let mut bytes = Vec::with_capacity(128);
        event.encode(&mut bytes);
        self.events.push_back((at, bytes));
        self.pop.ack(index, offset, pop_ms);
        if commit >= 0 {
            self.pop_stands(&name, commit, appended.end);
        }
        Ok(Some(appended))
    }

    /// Settles a held message that retention has dropped.
    pub fn pop_drop(&mut self, now: Now, message: &DueMessage) -> Result<(), Refusal> {
        let (index, offset, pop_ms) = (message.queue, message.offset, message.pop_ms);
        if self.pop.state(index, offset, pop_ms) == AckState::Gone {
            return Ok(());
        }
        let name = self.pop_name(index);
        let commit = self.pop_commit(&name, self.pop.stands_at(index, pop_ms, &[offset]));
        let event = PopEvent::Moved {
            name: name.clone(),
            pop_ms,
            offset,
            commit,
        };
        let end = self.append_event(now, &Event::Pop(event))?;
        self.pop.ack(index, offset, pop_ms);
        if commit >= 0 {
            self.pop_stands(&name, commit, end);
        }
        self.pop_counters.dropped += 1;
        Ok(())
    }

    /// When something held is due, in monotonic microseconds.
    #[must_use]
    pub fn pop_deadline_us(&self, now: Now) -> Option<u64> {
        if self.stopping || self.log.poison().is_some() {
            return None;
        }
        let due_ms = self.pop.next_due_ms()?;
        let wait_ms = u64::try_from(due_ms - now.wall_ms).unwrap_or(0);
        Some(now.monotonic_us + wait_ms * 1000)
    }
}
