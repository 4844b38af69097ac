//! Parked pulls: who waits for the next message of which queue.
//!
//! A parked pull is a number of the caller's; the shard only keeps it in its queue's list and hands
//! it back once a message becomes readable there.
//!
//! Invariant: an entry is in exactly one list, its queue's or the free list.

use crate::queue::{QueueIndex, QueueTable};

/// Handle of a parked pull.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParkId(u32);

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Entry {
    token: u64,
    queue: QueueIndex,
    previous: u32,
    next: u32,
    used: bool,
}

/// All parked pulls of a shard.
pub struct Parked {
    entries: Vec<Entry>,
    free: u32,
    held: usize,
    bound: usize,
}

impl Parked {
    /// Room for at most `bound` parked pulls.
    #[must_use]
    pub fn new(bound: usize) -> Self {
        Self {
            entries: Vec::new(),
            free: NONE,
            held: 0,
            bound,
        }
    }

    /// Pulls parked now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held
    }

    /// Parks `token` on a queue; `None` at the bound.
    pub fn park(
        &mut self,
        queues: &mut QueueTable,
        queue: QueueIndex,
        token: u64,
    ) -> Option<ParkId> {
        if self.held >= self.bound {
            return None;
        }
        let head = queues.get(queue)?.parked_head;
        let entry = Entry {
            token,
            queue,
            previous: NONE,
            next: head,
            used: true,
        };
        let id = if self.free == NONE {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        } else {
            let id = self.free;
            let slot = self.entries.get_mut(id as usize)?;
            self.free = slot.next;
            *slot = entry;
            id
        };
        if let Some(first) = self.entries.get_mut(head as usize) {
            first.previous = id;
        }
        queues.get_mut(queue)?.parked_head = id;
        self.held += 1;
        Some(ParkId(id))
    }

    /// Takes a parked pull back; `false` if it had been woken already.
    pub fn unpark(&mut self, queues: &mut QueueTable, id: ParkId, token: u64) -> bool {
        let Some(entry) = self.entries.get(id.0 as usize).copied() else {
            return false;
        };
        if !entry.used || entry.token != token {
            return false;
        }
        if let Some(previous) = self.entries.get_mut(entry.previous as usize) {
            previous.next = entry.next;
        } else if let Some(queue) = queues.get_mut(entry.queue) {
            queue.parked_head = entry.next;
        }
        if let Some(next) = self.entries.get_mut(entry.next as usize) {
            next.previous = entry.previous;
        }
        self.release(id.0);
        true
    }

    /// Pulls parked on a queue.
    pub fn on<'a>(
        &'a self,
        queues: &QueueTable,
        queue: QueueIndex,
    ) -> impl Iterator<Item = u64> + 'a {
        let mut id = queues.get(queue).map_or(NONE, |queue| queue.parked_head);
        std::iter::from_fn(move || {
            let entry = self.entries.get(id as usize)?;
            id = entry.next;
            Some(entry.token)
        })
    }

    /// Takes every pull parked on a queue.
    pub fn wake(&mut self, queues: &mut QueueTable, queue: QueueIndex, woken: &mut Vec<u64>) {
        let Some(queue) = queues.get_mut(queue) else {
            return;
        };
        let mut id = std::mem::replace(&mut queue.parked_head, NONE);
        while let Some(entry) = self.entries.get(id as usize).copied() {
            woken.push(entry.token);
            self.release(id);
            id = entry.next;
        }
    }

    fn release(&mut self, id: u32) {
        let free = self.free;
        if let Some(entry) = self.entries.get_mut(id as usize) {
            entry.used = false;
            entry.next = free;
            self.free = id;
            self.held -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waking_a_queue_takes_exactly_its_pulls() {
        let mut queues = QueueTable::default();
        let (a, b) = (queues.open("T", 0).unwrap(), queues.open("T", 1).unwrap());
        let mut parked = Parked::new(4);
        let first = parked.park(&mut queues, a, 1).unwrap();
        parked.park(&mut queues, b, 2).unwrap();
        parked.park(&mut queues, a, 3).unwrap();
        parked.park(&mut queues, a, 4).unwrap();
        assert!(parked.park(&mut queues, a, 5).is_none(), "bound");
        assert!(parked.unpark(&mut queues, first, 1));
        assert!(!parked.unpark(&mut queues, first, 1));
        let mut woken = Vec::new();
        parked.wake(&mut queues, a, &mut woken);
        woken.sort_unstable();
        assert_eq!(woken, vec![3, 4]);
        assert_eq!(parked.held(), 1);
        woken.clear();
        parked.wake(&mut queues, b, &mut woken);
        assert_eq!(woken, vec![2]);
        assert_eq!(parked.held(), 0);
    }
}
