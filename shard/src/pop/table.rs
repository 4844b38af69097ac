//! The table of messages that consumers hold: which, since when, until when.
//!
//! A pure state machine: time is passed in and nothing is read or written. The shard keeps one
//! table, changes it only together with a record in its log, and rebuilds it from those records.
//!
//! Invariant: a message is held at most once for each group; what is taken leaves the table only
//! when it is acknowledged, moved on, or its topic or group is removed. Hence no message is lost,
//! and none has two holders at a time.

use std::collections::HashMap;

use super::block::{Block, BlockEntry};
use super::due::DueHeap;
use super::event::{PopEvent, PopName};

/// Messages that one shard's consumers hold.
pub const IN_FLIGHT_MAX: usize = 1 << 20;
/// Messages that one group holds of one queue.
pub const IN_FLIGHT_PER_QUEUE_MAX: usize = 1 << 18;
/// Queues with groups of which the table knows.
pub const POP_QUEUES_MAX: usize = 1 << 20;

/// Index of a queue and group in the table.
pub type PopIndex = u32;

const NONE: u32 = u32::MAX;
/// Offset of a slot that stands for a queue's block.
const BLOCK: u64 = u64::MAX;

#[derive(Clone, Copy)]
struct Flight {
    queue: PopIndex,
    offset: u64,
    pop_ms: i64,
    due_ms: i64,
    /// Failed attempts to move it on.
    tries: u8,
    previous: u32,
    next: u32,
}

/// One queue as one group pops it.
pub struct PopQueue {
    /// Names.
    pub name: PopName,
    held: usize,
    oldest: u32,
    newest: u32,
    block: Option<Box<Block>>,
}

/// A message whose time is up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DueMessage {
    /// Queue and group.
    pub queue: PopIndex,
    /// Queue offset.
    pub offset: u64,
    /// When it was handed out, in milliseconds.
    pub pop_ms: i64,
    /// Failed attempts to move it on.
    pub tries: u8,
    /// How often it was handed out in order, but for the first time; 0 otherwise.
    pub count: i32,
}

/// Something whose time is up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Due {
    /// A message was not acknowledged in time.
    Message(DueMessage),
    /// A queue that is read in order may be read again.
    Unblocked(PopIndex),
}

/// What became of an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AckState {
    /// The message is held under this receipt.
    Held,
    /// It is not, or not any more.
    Gone,
}

/// A message that a consumer holds, or one acknowledged out of turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    /// Whether it was handed out in order.
    pub ordered: bool,
    /// Whether it is acknowledged, and only those in front of it are not.
    pub acked: bool,
    /// When it was handed out, in milliseconds.
    pub pop_ms: i64,
    /// Until when it is invisible, in milliseconds.
    pub due_ms: i64,
    /// How often it was handed out in order before.
    pub count: i32,
}

/// What was handed out.
#[derive(Clone, Copy, Debug)]
pub struct Taking<'a> {
    /// Whether in order.
    pub ordered: bool,
    /// Whether what was handed out in order before no longer counts.
    pub fresh: bool,
    /// When, in milliseconds.
    pub pop_ms: i64,
    /// For how long, in milliseconds.
    pub invisible_ms: i64,
    /// Where the queue goes on.
    pub next_offset: u64,
    /// Attempt that may have them again.
    pub attempt: &'a str,
    /// Queue offsets.
    pub offsets: &'a [u64],
}

/// What a report says of one queue and group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PopFigures {
    /// Messages held.
    pub in_flight: usize,
    /// Offset of the oldest of them.
    pub oldest_offset: Option<u64>,
    /// When the oldest was handed out, in milliseconds.
    pub oldest_pop_ms: Option<i64>,
}

type ByTopic = HashMap<Box<str>, Vec<(i32, PopIndex)>>;

/// The table.
#[derive(Default)]
pub struct PopTable {
    queues: Vec<PopQueue>,
    by_group: HashMap<Box<str>, ByTopic>,
    flights: Vec<Flight>,
    free: Vec<u32>,
    index: HashMap<(PopIndex, u64), u32>,
    due: DueHeap,
    held: usize,
}

impl PopTable {
    /// Index of a queue and group, if anything of it was ever held.
    #[must_use]
    pub fn find(&self, topic: &str, group: &str, queue_id: i32) -> Option<PopIndex> {
        let queues = self.by_group.get(group)?.get(topic)?;
        let found = queues.iter().find(|(id, _)| *id == queue_id);
        found.map(|(_, index)| *index)
    }

    /// The same, opened if need be; `None` at [`POP_QUEUES_MAX`].
    pub fn open(&mut self, topic: &str, group: &str, queue_id: i32) -> Option<PopIndex> {
        if let Some(index) = self.find(topic, group, queue_id) {
            return Some(index);
        }
        if self.queues.len() >= POP_QUEUES_MAX {
            return None;
        }
        let index = self.queues.len() as PopIndex;
        self.queues.push(PopQueue {
            name: PopName {
                topic: topic.to_owned(),
                group: group.to_owned(),
                queue_id,
            },
            held: 0,
            oldest: NONE,
            newest: NONE,
            block: None,
        });
        let topics = self.by_group.entry(group.into()).or_default();
        let queues = topics.entry(topic.into()).or_default();
        queues.push((queue_id, index));
        Some(index)
    }

    /// A queue and group.
    #[must_use]
    pub fn queue(&self, index: PopIndex) -> Option<&PopQueue> {
        self.queues.get(index as usize)
    }

    /// Messages held in all.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held
    }

    /// How many more messages a group may hold of a queue.
    #[must_use]
    pub fn room(&self, index: PopIndex) -> usize {
        let of_queue = self.queue(index).map_or(0, |queue| queue.held);
        let of_queue = IN_FLIGHT_PER_QUEUE_MAX.saturating_sub(of_queue);
        of_queue.min(IN_FLIGHT_MAX.saturating_sub(self.held))
    }

    /// Whether a group holds a message, or has acknowledged it out of turn.
    #[must_use]
    pub fn is_taken(&self, index: PopIndex, offset: u64) -> bool {
        let Some(queue) = self.queue(index) else {
            return false;
        };
        let block = queue.block.as_ref().filter(|block| block.open() > 0);
        let in_block = block.and_then(|block| block.entry(offset));
        if in_block.is_some_and(|entry| entry.acked) {
            return true;
        }
        queue.held > 0 && self.index.contains_key(&(index, offset))
    }

    /// Until when a queue that is read in order waits for acknowledgements, unless for the
    /// attempt that has its messages.
    #[must_use]
    pub fn blocked(&self, index: PopIndex, attempt: &str, now_ms: i64) -> bool {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        block.is_some_and(|block| {
            let same = !attempt.is_empty() && &*block.attempt == attempt;
            !same && block.blocked_until().is_some_and(|until| until > now_ms)
        })
    }

    /// How often a message was handed out in order before.
    #[must_use]
    pub fn order_count(&self, index: PopIndex, offset: u64) -> i32 {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        block
            .and_then(|block| block.entry(offset))
            .map_or(0, |entry| entry.count)
    }

    fn slot(&mut self, flight: Flight) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                if let Some(place) = self.flights.get_mut(slot as usize) {
                    *place = flight;
                }
                slot
            }
            None => {
                self.flights.push(flight);
                self.flights.len() as u32 - 1
            }
        }
    }

    /// Takes note of messages that are handed out. What is handed out without order ends a block
    /// that was handed out in order; its messages must be free by then.
    pub fn take(&mut self, index: PopIndex, taking: &Taking<'_>) {
        let due_ms = taking.pop_ms.saturating_add(taking.invisible_ms);
        if taking.ordered {
            return self.take_ordered(index, taking, due_ms);
        }
        self.forget_block(index);
        for offset in taking.offsets {
            self.remove(index, *offset);
            self.insert(index, *offset, taking.pop_ms, due_ms);
        }
    }

    fn insert(&mut self, index: PopIndex, offset: u64, pop_ms: i64, due_ms: i64) {
        let Some(previous) = self.queue(index).map(|queue| queue.newest) else {
            return;
        };
        let slot = self.slot(Flight {
            queue: index,
            offset,
            pop_ms,
            due_ms,
            tries: 0,
            previous,
            next: NONE,
        });
        if let Some(before) = self.flights.get_mut(previous as usize) {
            before.next = slot;
        }
        if let Some(queue) = self.queues.get_mut(index as usize) {
            queue.newest = slot;
            if queue.oldest == NONE {
                queue.oldest = slot;
            }
            queue.held += 1;
        }
        self.index.insert((index, offset), slot);
        self.due.set(slot, due_ms);
        self.held += 1;
    }

    fn take_ordered(&mut self, index: PopIndex, taking: &Taking<'_>, due_ms: i64) {
        let Some(queue) = self.queues.get_mut(index as usize) else {
            return;
        };
        let before = queue.block.take().unwrap_or_else(|| {
            Box::new(Block {
                timer: NONE,
                ..Block::default()
            })
        });
        let (open, timer) = (before.open(), before.timer);
        let before = match taking.fresh {
            true => Box::new(Block {
                timer,
                ..Block::default()
            }),
            false => before,
        };
        let how = (taking.attempt, taking.pop_ms, due_ms);
        let mut block = before.again(how, taking.offsets, taking.next_offset);
        let now_open = block.open();
        if block.timer == NONE {
            block.timer = self.slot(Flight {
                queue: index,
                offset: BLOCK,
                pop_ms: 0,
                due_ms: 0,
                tries: 0,
                previous: NONE,
                next: NONE,
            });
        }
        self.held = self.held + now_open - open;
        let timer = block.timer;
        if let Some(queue) = self.queues.get_mut(index as usize) {
            queue.held = queue.held + now_open - open;
            queue.block = Some(Box::new(block));
        }
        self.set_timer(index, timer);
    }

    /// The due time of a queue's block follows its messages.
    fn set_timer(&mut self, index: PopIndex, timer: u32) {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        match block.and_then(|block| block.blocked_until()) {
            Some(until) => self.due.set(timer, until),
            None => self.due.remove(timer),
        }
    }

    fn remove(&mut self, index: PopIndex, offset: u64) -> bool {
        let Some(slot) = self.index.remove(&(index, offset)) else {
            return false;
        };
        let Some(flight) = self.flights.get(slot as usize).copied() else {
            return false;
        };
        if let Some(previous) = self.flights.get_mut(flight.previous as usize) {
            previous.next = flight.next;
        }
        if let Some(next) = self.flights.get_mut(flight.next as usize) {
            next.previous = flight.previous;
        }
        if let Some(queue) = self.queues.get_mut(index as usize) {
            if queue.oldest == slot {
                queue.oldest = flight.next;
            }
            if queue.newest == slot {
                queue.newest = flight.previous;
            }
            queue.held -= 1;
        }
        self.due.remove(slot);
        self.free.push(slot);
        self.held -= 1;
        true
    }

    fn flight(&self, index: PopIndex, offset: u64) -> Option<(u32, &Flight)> {
        let slot = *self.index.get(&(index, offset))?;
        Some((slot, self.flights.get(slot as usize)?))
    }

    /// Whether a message is held under a receipt.
    #[must_use]
    pub fn state(&self, index: PopIndex, offset: u64, pop_ms: i64) -> AckState {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        let in_block = block.filter(|block| block.pop_ms == pop_ms);
        let in_block = in_block.and_then(|block| block.entry(offset));
        let flight = self.flight(index, offset);
        let held = in_block.is_some_and(|entry| !entry.acked)
            || flight.is_some_and(|(_, flight)| flight.pop_ms == pop_ms);
        if held { AckState::Held } else { AckState::Gone }
    }

    /// Settles a message held under a receipt. `false`: it is not.
    pub fn ack(&mut self, index: PopIndex, offset: u64, pop_ms: i64) -> bool {
        if self.state(index, offset, pop_ms) == AckState::Gone {
            return false;
        }
        if self.remove(index, offset) {
            return true;
        }
        let Some(queue) = self.queues.get_mut(index as usize) else {
            return false;
        };
        let Some(block) = queue.block.as_mut() else {
            return false;
        };
        let timer = block.timer;
        if let Some(entry) = block.entry_mut(offset) {
            entry.acked = true;
        }
        queue.held -= 1;
        self.held -= 1;
        self.set_timer(index, timer);
        true
    }

    /// Where a group that reads in order would stand once these messages were acknowledged.
    #[must_use]
    pub fn stands_at(&self, index: PopIndex, pop_ms: i64, acked: &[u64]) -> Option<u64> {
        let block = self.queue(index)?.block.as_ref()?;
        if block.pop_ms != pop_ms {
            return None;
        }
        let is_open = |entry: &&BlockEntry| !entry.acked && !acked.contains(&entry.offset);
        let open = block.entries.iter().find(is_open);
        let stands = open.map_or(block.end, |entry| entry.offset);
        (stands != block.stands_at()).then_some(stands)
    }

    /// Gives a message held under a receipt another due time. `false`: it is not.
    pub fn change(
        &mut self,
        index: PopIndex,
        (offset, pop_ms): (u64, i64),
        (new_pop_ms, due_ms): (i64, i64),
    ) -> bool {
        if self.state(index, offset, pop_ms) == AckState::Gone {
            return false;
        }
        if let Some(slot) = self.index.get(&(index, offset)).copied() {
            if let Some(flight) = self.flights.get_mut(slot as usize) {
                flight.pop_ms = new_pop_ms;
                flight.due_ms = due_ms;
                flight.tries = 0;
            }
            self.due.set(slot, due_ms);
            return true;
        }
        let queue = self.queues.get_mut(index as usize);
        let Some(block) = queue.and_then(|queue| queue.block.as_mut()) else {
            return false;
        };
        let timer = block.timer;
        if let Some(entry) = block.entry_mut(offset) {
            entry.due_ms = due_ms;
        }
        self.set_timer(index, timer);
        true
    }

    /// Whether a message is handed out in order.
    #[must_use]
    pub fn is_ordered(&self, index: PopIndex, offset: u64) -> bool {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        block.is_some_and(|block| block.entry(offset).is_some())
    }

    /// What the table says of one message.
    #[must_use]
    pub fn holding(&self, index: PopIndex, offset: u64) -> Option<Holding> {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        if let Some((block, entry)) = block.and_then(|block| Some((block, block.entry(offset)?))) {
            return Some(Holding {
                ordered: true,
                acked: entry.acked,
                pop_ms: block.pop_ms,
                due_ms: entry.due_ms,
                count: entry.count,
            });
        }
        self.flight(index, offset).map(|(_, flight)| Holding {
            ordered: false,
            acked: false,
            pop_ms: flight.pop_ms,
            due_ms: flight.due_ms,
            count: 0,
        })
    }

    /// Until when the head of a queue read in order waits for acknowledgements, in milliseconds.
    #[must_use]
    pub fn blocked_until_ms(&self, index: PopIndex) -> Option<i64> {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        block.and_then(|block| block.blocked_until())
    }

    /// The next thing whose time is up. A message stays held, but is not due again until it is
    /// postponed.
    pub fn next_due(&mut self, now_ms: i64) -> Option<Due> {
        let (due_ms, slot) = self.due.first()?;
        if due_ms > now_ms {
            return None;
        }
        self.due.remove(slot);
        let flight = self.flights.get(slot as usize)?;
        Some(if flight.offset == BLOCK {
            Due::Unblocked(flight.queue)
        } else {
            Due::Message(DueMessage {
                queue: flight.queue,
                offset: flight.offset,
                pop_ms: flight.pop_ms,
                tries: flight.tries,
                count: 0,
            })
        })
    }

    /// Messages of a queue's block that were handed out in order so often that they are not to be
    /// handed out again.
    #[must_use]
    pub fn exhausted(&self, index: PopIndex, count_max: i32) -> Vec<DueMessage> {
        let block = self.queue(index).and_then(|queue| queue.block.as_ref());
        let Some(block) = block else {
            return Vec::new();
        };
        let entries = block.entries.iter();
        let entries = entries.filter(|entry| !entry.acked && entry.count >= count_max);
        let message = |entry: &BlockEntry| DueMessage {
            queue: index,
            offset: entry.offset,
            pop_ms: block.pop_ms,
            tries: 0,
            count: entry.count,
        };
        entries.map(message).collect()
    }

    /// When something is due next, in milliseconds.
    #[must_use]
    pub fn next_due_ms(&self) -> Option<i64> {
        self.due.first().map(|(due_ms, _)| due_ms)
    }

    /// A message whose time is up could not be moved on: try again at a time.
    pub fn postpone(&mut self, message: &DueMessage, until_ms: i64, failed: bool) {
        let Some((slot, flight)) = self.flight(message.queue, message.offset) else {
            return;
        };
        if flight.pop_ms != message.pop_ms {
            return;
        }
        if let Some(flight) = self.flights.get_mut(slot as usize).filter(|_| failed) {
            flight.tries = flight.tries.saturating_add(1);
        }
        self.due.set(slot, until_ms);
    }

    /// Figures of one queue and group.
    #[must_use]
    pub fn figures(&self, index: PopIndex) -> PopFigures {
        let Some(queue) = self.queue(index) else {
            return PopFigures::default();
        };
        let oldest = self.flights.get(queue.oldest as usize);
        let block = queue.block.as_ref().filter(|block| block.open() > 0);
        let offsets = [
            oldest.map(|flight| flight.offset),
            block.map(|block| block.stands_at()),
        ];
        let times = [
            oldest.map(|flight| flight.pop_ms),
            block.map(|block| block.pop_ms),
        ];
        PopFigures {
            in_flight: queue.held,
            oldest_offset: offsets.into_iter().flatten().min(),
            oldest_pop_ms: times.into_iter().flatten().min(),
        }
    }

    /// Every queue and group that holds messages.
    pub fn iter(&self) -> impl Iterator<Item = (PopIndex, &PopQueue)> {
        let queues = self.queues.iter().enumerate();
        queues
            .filter(|(_, queue)| queue.held > 0)
            .map(|(index, queue)| (index as PopIndex, queue))
    }

    fn forget_block(&mut self, index: PopIndex) {
        let block = self.queues.get_mut(index as usize).and_then(|queue| {
            let block = queue.block.take()?;
            queue.held -= block.open();
            Some(block)
        });
        if let Some(block) = block {
            self.held -= block.open();
            self.due.remove(block.timer);
            self.free.push(block.timer);
        }
    }

    fn forget(&mut self, index: PopIndex) {
        self.forget_block(index);
        while let Some(slot) = self.queue(index).map(|queue| queue.oldest) {
            let Some(offset) = self.flights.get(slot as usize).map(|flight| flight.offset) else {
                return;
            };
            self.remove(index, offset);
        }
    }

    /// Forgets a topic.
    pub fn remove_topic(&mut self, topic: &str) {
        let of_groups = self.by_group.values();
        let of_groups = of_groups.filter_map(|topics| topics.get(topic));
        let found: Vec<PopIndex> = of_groups.flatten().map(|(_, index)| *index).collect();
        found.into_iter().for_each(|index| self.forget(index));
    }

    /// Forgets a group.
    pub fn remove_group(&mut self, group: &str) {
        let topics = self.by_group.get(group).into_iter();
        let queues = topics.flat_map(|topics| topics.values().flatten());
        let found: Vec<PopIndex> = queues.map(|(_, index)| *index).collect();
        found.into_iter().for_each(|index| self.forget(index));
    }

    /// Takes a record met in the log or a run. Returns where the group stands now, if it moved.
    pub fn replay(&mut self, event: &PopEvent) -> Option<i64> {
        match event {
            PopEvent::Taken {
                name,
                ordered,
                fresh,
                pop_ms,
                invisible_ms,
                next_offset,
                attempt,
                offsets,
            } => {
                let index = self.open(&name.topic, &name.group, name.queue_id)?;
                let taking = Taking {
                    ordered: *ordered,
                    fresh: *fresh,
                    pop_ms: *pop_ms,
                    invisible_ms: *invisible_ms,
                    next_offset: (*next_offset).max(0) as u64,
                    attempt,
                    offsets,
                };
                self.take(index, &taking);
                (!ordered).then_some(*next_offset)
            }
            PopEvent::Acked {
                name,
                pop_ms,
                commit,
                offsets,
            } => {
                let index = self.find(&name.topic, &name.group, name.queue_id);
                for offset in offsets.iter().filter(|_| index.is_some()) {
                    self.ack(index?, *offset, *pop_ms);
                }
                (*commit >= 0).then_some(*commit)
            }
            PopEvent::Changed {
                name,
                pop_ms,
                new_pop_ms,
                due_ms,
                offset,
            } => {
                let index = self.find(&name.topic, &name.group, name.queue_id)?;
                self.change(index, (*offset, *pop_ms), (*new_pop_ms, *due_ms));
                None
            }
            PopEvent::Moved {
                name,
                pop_ms,
                offset,
                commit,
            } => {
                let index = self.find(&name.topic, &name.group, name.queue_id);
                if let Some(index) = index {
                    self.ack(index, *offset, *pop_ms);
                }
                (*commit >= 0).then_some(*commit)
            }
        }
    }
}
