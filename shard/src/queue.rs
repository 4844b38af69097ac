//! The consume queues of a shard: what is kept in memory per queue.
//!
//! Invariant: per queue `min_offset <= readable <= next_offset`; offsets are handed out densely in
//! append order (P3) and become readable only behind the shard's watermark (P2). Units older than
//! the unit ring are in run files; `extents` says where, in ascending offset order without holes.

use std::collections::HashMap;

use crate::units::NO_SEQUENCE;

/// Index of a queue within its shard.
pub type QueueIndex = u32;

/// Queues one shard can have.
pub const QUEUES_MAX: usize = 4_000_000;

/// A piece of a queue inside one run file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Log position where the run starts; names the run.
    pub run_start: u64,
    /// First queue offset.
    pub first_offset: u64,
    /// Units.
    pub count: u32,
    /// Index of the first unit in the run's unit section.
    pub unit_index: u32,
    /// Store time of the first unit in milliseconds.
    pub first_timestamp: i64,
    /// Store time of the last unit in milliseconds.
    pub last_timestamp: i64,
}

impl Extent {
    /// One past the last offset.
    #[must_use]
    pub fn end_offset(&self) -> u64 {
        self.first_offset + u64::from(self.count)
    }
}

/// One queue. What an append and its dispatch touch comes first and fills one cache line, since
/// with very many queues every line is one from memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Queue {
    /// Topic.
    pub topic: Box<str>,
    /// What the hashes of all its keys have in common.
    pub key_seed: u64,
    /// Next offset to hand out.
    pub next_offset: u64,
    /// One past the newest readable offset.
    pub readable: u64,
    /// Newest slot in the unit ring.
    pub last_sequence: u64,
    /// Store time of the newest readable message in milliseconds.
    pub last_store_timestamp: i64,
    /// Queue id within the topic.
    pub queue_id: i32,
    /// First parked pull.
    pub parked_head: u32,
    /// Whether its topic was removed; nothing of it is kept then.
    pub removed: bool,
    /// Oldest kept offset.
    pub min_offset: u64,
    /// Offsets from here on are in the unit ring.
    pub ring_first_offset: u64,
    /// Older units.
    pub extents: Vec<Extent>,
    /// Log position behind the removal of its topic.
    pub removed_at: Option<u64>,
    /// Log position of the internal record that tells the queue's end, 0 without one.
    pub noted_at: u64,
    /// Scratch of the run builder: units seen in the run being built.
    pub run_count: u32,
    /// Scratch of the run builder: index of the next unit in the run being built.
    pub run_index: u32,
}

impl Queue {
    fn new(topic: &str, queue_id: i32) -> Self {
        Self {
            topic: topic.into(),
            queue_id,
            key_seed: crate::run::key_seed(topic.as_bytes()),
            next_offset: 0,
            readable: 0,
            min_offset: 0,
            last_sequence: NO_SEQUENCE,
            ring_first_offset: 0,
            extents: Vec::new(),
            last_store_timestamp: 0,
            removed: false,
            removed_at: None,
            noted_at: 0,
            parked_head: u32::MAX,
            run_count: 0,
            run_index: 0,
        }
    }

    /// The extent that holds an offset.
    #[must_use]
    pub fn extent_of(&self, offset: u64) -> Option<&Extent> {
        let at = self
            .extents
            .partition_point(|extent| extent.end_offset() <= offset);
        self.extents
            .get(at)
            .filter(|extent| extent.first_offset <= offset)
    }
}

/// All queues of a shard.
#[derive(Default)]
pub struct QueueTable {
    queues: Vec<Queue>,
    /// By topic, in the order of queue ids.
    by_name: HashMap<Box<str>, Vec<(i32, QueueIndex)>>,
}

impl QueueTable {
    /// The queue at an index.
    #[must_use]
    pub fn get(&self, index: QueueIndex) -> Option<&Queue> {
        self.queues.get(index as usize)
    }

    /// The queue at an index, to change it.
    pub fn get_mut(&mut self, index: QueueIndex) -> Option<&mut Queue> {
        self.queues.get_mut(index as usize)
    }

    /// Index of a live queue.
    #[must_use]
    pub fn find(&self, topic: &str, queue_id: i32) -> Option<QueueIndex> {
        let ids = self.by_name.get(topic)?;
        let at = ids.binary_search_by_key(&queue_id, |(id, _)| *id).ok()?;
        ids.get(at).map(|(_, index)| *index)
    }

    /// Index of a queue, created empty if need be; `None` at [`QUEUES_MAX`].
    pub fn open(&mut self, topic: &str, queue_id: i32) -> Option<QueueIndex> {
        if let Some(index) = self.find(topic, queue_id) {
            return Some(index);
        }
        if self.queues.len() >= QUEUES_MAX {
            return None;
        }
        let index = self.queues.len() as QueueIndex;
        self.queues.push(Queue::new(topic, queue_id));
        let ids = self.by_name.entry(topic.into()).or_default();
        // Nearly always the end: topics get their queues in order.
        let at = ids.partition_point(|(id, _)| *id < queue_id);
        ids.insert(at, (queue_id, index));
        Some(index)
    }

    /// Forgets the queues of a topic, whose removal stands in the log in front of `position`.
    /// Their slots in the unit ring stay, marked as removed.
    pub fn remove_topic(&mut self, topic: &str, position: u64) -> Vec<QueueIndex> {
        let removed: Vec<QueueIndex> = self
            .by_name
            .remove(topic)
            .unwrap_or_default()
            .into_iter()
            .map(|(_, i)| i)
            .collect();
        for index in &removed {
            if let Some(queue) = self.queues.get_mut(*index as usize) {
                queue.removed = true;
                queue.removed_at = Some(position);
                queue.extents = Vec::new();
            }
        }
        removed
    }

    /// Live queues with their indexes.
    pub fn iter(&self) -> impl Iterator<Item = (QueueIndex, &Queue)> {
        self.queues
            .iter()
            .enumerate()
            .filter(|(_, queue)| !queue.removed)
            .map(|(index, queue)| (index as QueueIndex, queue))
    }

    /// Live queues of one topic.
    pub fn of_topic(&self, topic: &str) -> impl Iterator<Item = (QueueIndex, &Queue)> {
        let ids = self
            .by_name
            .get(topic)
            .map(Vec::as_slice)
            .unwrap_or_default();
        ids.iter()
            .filter_map(|(_, index)| Some((*index, self.queues.get(*index as usize)?)))
    }

    /// Live queues that had messages, have none at or behind `position`, and whose end no internal
    /// record at or behind it tells.
    #[must_use]
    pub fn emptied_before(&self, position: u64) -> Vec<QueueIndex> {
        let emptied = self.iter().filter(|(_, queue)| {
            queue.next_offset > 0
                && queue.noted_at < position
                && queue.ring_first_offset == queue.next_offset
                && queue
                    .extents
                    .last()
                    .is_none_or(|extent| extent.run_start < position)
        });
        emptied.map(|(index, _)| index).collect()
    }

    /// Takes a queue's end as an internal record at `noted_at` tells it.
    pub fn replay_end(&mut self, topic: &str, queue_id: i32, next_offset: u64, noted_at: u64) {
        let Some(index) = self.open(topic, queue_id) else {
            return;
        };
        let Some(queue) = self.get_mut(index) else {
            return;
        };
        queue.noted_at = noted_at;
        if queue.next_offset < next_offset && queue.extents.is_empty() {
            queue.next_offset = next_offset;
            queue.readable = next_offset;
            queue.min_offset = next_offset;
            queue.ring_first_offset = next_offset;
        }
    }

    /// Drops extents of runs that start before `position` and moves the minima behind them.
    pub fn drop_before(&mut self, position: u64) {
        for queue in &mut self.queues {
            let gone = queue
                .extents
                .partition_point(|extent| extent.run_start < position);
            if gone == 0 {
                continue;
            }
            queue.extents.drain(..gone);
            queue.min_offset = match queue.extents.first() {
                Some(extent) => extent.first_offset,
                None => queue.ring_first_offset,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(run_start: u64, first_offset: u64, count: u32) -> Extent {
        Extent {
            run_start,
            first_offset,
            count,
            unit_index: 0,
            first_timestamp: 0,
            last_timestamp: 0,
        }
    }

    #[test]
    fn a_removed_topic_starts_anew_at_zero() {
        let mut table = QueueTable::default();
        let first = table.open("T", 0).unwrap();
        table.get_mut(first).unwrap().next_offset = 9;
        assert_eq!(table.remove_topic("T", 1), vec![first]);
        assert_eq!(table.find("T", 0), None);
        let second = table.open("T", 0).unwrap();
        assert_ne!(first, second);
        assert_eq!(table.get(second).unwrap().next_offset, 0);
    }

    #[test]
    fn queues_of_a_topic_are_found_in_whatever_order_they_came() {
        let mut table = QueueTable::default();
        for id in [5, 1, 9, 0, 7, 3] {
            table.open("T", id).unwrap();
        }
        for id in [0, 1, 3, 5, 7, 9] {
            let index = table.find("T", id).unwrap();
            assert_eq!(table.get(index).unwrap().queue_id, id);
            assert_eq!(table.open("T", id), Some(index));
        }
        assert_eq!(table.find("T", 2), None);
        assert_eq!(table.of_topic("T").count(), 6);
        assert!(size_of::<Queue>() <= 192, "{}", size_of::<Queue>());
    }

    #[test]
    fn extents_are_found_by_offset_and_dropped_by_run() {
        let mut table = QueueTable::default();
        let index = table.open("T", 3).unwrap();
        let queue = table.get_mut(index).unwrap();
        queue.extents = vec![extent(0, 0, 10), extent(100, 10, 5), extent(200, 15, 1)];
        queue.ring_first_offset = 16;
        assert_eq!(queue.extent_of(9).unwrap().run_start, 0);
        assert_eq!(queue.extent_of(10).unwrap().run_start, 100);
        assert_eq!(queue.extent_of(15).unwrap().run_start, 200);
        assert!(queue.extent_of(16).is_none());
        table.drop_before(200);
        assert_eq!(table.get(index).unwrap().min_offset, 15);
        table.drop_before(300);
        assert_eq!(table.get(index).unwrap().min_offset, 16);
    }
}
