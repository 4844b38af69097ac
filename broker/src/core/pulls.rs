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
    /// Address of the client.
    pub client: std::net::SocketAddr,
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
    /// Deadline and token of every pull that has one; of pulls answered before it, too, until there
    /// are more of them than of the others.
    deadlines: BinaryHeap<Reverse<(u64, u64)>>,
}

/// Deadlines of answered pulls that are kept at least.
const STALE_DEADLINES_KEPT: usize = 1024;

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

    /// Adds a pull; `begin` gets its token and says what it waits for, or refuses. A refused pull
    /// comes back.
    pub fn insert(
        &mut self,
        mut pull: WaitingPull,
        begin: impl FnOnce(u64) -> Option<WaitsFor>,
    ) -> Result<(), Box<WaitingPull>> {
        let (index, generation) = self.next();
        let token = u64::from(generation & 0x3fff_ffff) << 32 | u64::from(index);
        let Some(waits_for) = begin(token) else {
            self.free.push(index);
            return Err(Box::new(pull));
        };
        pull.waits_for = waits_for;
        if matches!(waits_for, WaitsFor::Message(_)) {
            self.drop_stale_deadlines();
            self.deadlines.push(Reverse((pull.deadline_us, token)));
        }
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.pull = Some(pull);
        }
        Ok(())
    }

    /// Forgets deadlines of answered pulls when they outnumber the waiting ones.
    fn drop_stale_deadlines(&mut self) {
        let waiting = self.slots.len() - self.free.len();
        if self.deadlines.len() < STALE_DEADLINES_KEPT + 2 * waiting {
            return;
        }
        let mut deadlines = std::mem::take(&mut self.deadlines);
        deadlines.retain(|Reverse((_, token))| self.waits_for(*token).is_some());
        self.deadlines = deadlines;
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

    /// A pull that waits.
    #[must_use]
    pub fn get(&self, token: u64) -> Option<&WaitingPull> {
        let slot = self.slots.get(token as u32 as usize)?;
        let current = u64::from(slot.generation & 0x3fff_ffff) == token >> 32;
        slot.pull.as_ref().filter(|_| current)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::effects::ClientLink;
    use wire::frame::Serialization;

    fn pull(deadline_us: u64) -> WaitingPull {
        WaitingPull {
            reply: ReplyTo {
                link: ClientLink {
                    core: 0,
                    connection: 1,
                },
                opaque: 1,
                serialization: Serialization::Json,
                oneway: false,
            },
            client: "127.0.0.1:1".parse().unwrap(),
            group: "g".into(),
            local: 0,
            queue: 0,
            offset: 0,
            wanted: Wanted::All,
            limits: PullLimits {
                messages_max: 1,
                bytes_max: 1,
            },
            deadline_us,
            suspend: true,
            waits_for: WaitsFor::Disk,
            group_sys_flag: 0,
            topic_sys_flag: 0,
            suggested_broker: 0,
        }
    }

    fn parked() -> WaitsFor {
        let mut queues = shard::queue::QueueTable::default();
        let queue = queues.open("T", 0).unwrap();
        let mut parked = shard::parked::Parked::new(1);
        WaitsFor::Message(parked.park(&mut queues, queue, 1).unwrap())
    }

    #[test]
    fn answered_pulls_leave_no_growing_trace() {
        let mut table = PullTable::default();
        let wait = parked();
        for round in 0..100_000 {
            let mut token = 0;
            let waits_for = if round % 2 == 0 { wait } else { WaitsFor::Disk };
            let begin = |given| {
                token = given;
                Some(waits_for)
            };
            table.insert(pull(1_000_000 + round), begin).unwrap();
            assert!(table.take(token).is_some());
        }
        assert!(table.deadlines.len() <= STALE_DEADLINES_KEPT + 2);
        assert_eq!(table.slots.len(), 1);
    }

    #[test]
    fn waiting_pulls_expire_in_order_whatever_is_forgotten() {
        let mut table = PullTable::default();
        let wait = parked();
        let mut kept = Vec::new();
        for round in 0..10_000_u64 {
            let mut token = 0;
            let begin = |given| {
                token = given;
                Some(wait)
            };
            table.insert(pull(20_000 - round), begin).unwrap();
            if round % 100 == 0 {
                kept.push(token);
            } else {
                table.take(token);
            }
        }
        let mut expired = Vec::new();
        while let Some(token) = table.expired(u64::MAX) {
            if table.waits_for(token).is_some() {
                expired.push(token);
            }
        }
        kept.reverse();
        assert_eq!(expired, kept);
        assert!(table.insert(pull(1), |_| None).is_err());
    }
}
