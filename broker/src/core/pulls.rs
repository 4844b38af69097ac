//! Pulls that cannot be answered at once: parked ones that wait for messages, cold ones that wait
//! for the disk.
//!
//! Invariant: every pull in the table is answered exactly once: woken, read, timed out or refused.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use shard::parked::ParkId;
use shard::queue::QueueIndex;
use shard::select::{PullLimits, Wanted};

use super::messages::ReplyTo;

/// What a pull waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitsFor {
    /// A message.
    Message(ParkId),
    /// The disk.
    Disk,
}

/// One waiting pull.
#[derive(Clone, Debug)]
pub struct WaitingPull {
    /// Who is answered.
    pub reply: ReplyTo,
    /// Consumer group.
    pub group: Box<str>,
    /// Local shard.
    pub local: usize,
    /// Queue.
    pub queue: QueueIndex,
    /// Offset to read from.
    pub offset: i64,
    /// Messages wanted.
    pub wanted: Wanted,
    /// Limits.
    pub limits: PullLimits,
    /// Monotonic time at which it is answered without messages, in microseconds.
    pub deadline_us: u64,
    /// Whether it may wait for messages.
    pub suspend: bool,
    /// What it waits for.
    pub waits_for: WaitsFor,
    /// Group's system flag, for the answer.
    pub group_sys_flag: i32,
    /// Topic's system flag, for the answer.
    pub topic_sys_flag: i32,
    /// Preferred broker of the group, for the answer.
    pub suggested_broker: i64,
}

struct Slot {
    generation: u32,
    pull: Option<WaitingPull>,
}

/// All waiting pulls of a core.
#[derive(Default)]
pub struct PullTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
    deadlines: BinaryHeap<Reverse<(u64, u64)>>,
}

impl PullTable {
    /// The token the next insertion will have.
    fn next(&mut self) -> (u32, u32) {
        match self.free.pop() {
            Some(index) => {
                let generation = self
                    .slots
                    .get(index as usize)
                    .map_or(0, |slot| slot.generation);
                (index, generation)
            }
            None => {
                self.slots.push(Slot {
                    generation: 0,
                    pull: None,
                });
                (self.slots.len() as u32 - 1, 0)
            }
        }
    }

    /// Adds a pull; `make` gets its token and may refuse.
    pub fn insert(&mut self, make: impl FnOnce(u64) -> Option<WaitingPull>) -> bool {
        let (index, generation) = self.next();
        let token = u64::from(generation & 0x3fff_ffff) << 32 | u64::from(index);
        let Some(pull) = make(token) else {
            self.free.push(index);
            return false;
        };
        self.deadlines.push(Reverse((pull.deadline_us, token)));
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.pull = Some(pull);
        }
        true
    }

    /// Takes a pull out; `None` if it has been answered already.
    pub fn take(&mut self, token: u64) -> Option<WaitingPull> {
        let index = token as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if u64::from(slot.generation & 0x3fff_ffff) != token >> 32 {
            return None;
        }
        let pull = slot.pull.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Some(pull)
    }

    /// The next pull whose time is up.
    pub fn expired(&mut self, now_us: u64) -> Option<u64> {
        let Reverse((deadline, token)) = *self.deadlines.peek()?;
        if deadline > now_us {
            return None;
        }
        self.deadlines.pop();
        Some(token)
    }

    /// The earliest time a pull is up, in monotonic microseconds. May be one answered already.
    #[must_use]
    pub fn deadline_us(&self) -> Option<u64> {
        self.deadlines
            .peek()
            .map(|Reverse((deadline, _))| *deadline)
    }

    /// What a pull waits for.
    #[must_use]
    pub fn waits_for(&self, token: u64) -> Option<WaitsFor> {
        let slot = self.slots.get(token as u32 as usize)?;
        (u64::from(slot.generation & 0x3fff_ffff) == token >> 32)
            .then(|| slot.pull.as_ref().map(|pull| pull.waits_for))?
    }
}
