//! Committed consumer offsets of the queues of a shard.
//!
//! A commit is an event in the log before it is answered, so a kill loses none that was
//! acknowledged; the settings file and the runs only shorten recovery.
//!
//! Invariant: an entry remembers the log position of its commit, and a later position always wins.

use std::collections::HashMap;

use crate::queue::QueueTable;

/// Consumer offsets one shard keeps.
pub const OFFSETS_MAX: usize = 8_000_000;

/// One committed offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OffsetEntry {
    /// Queue id.
    pub queue_id: i32,
    /// Committed offset, -1 when only pulls have been seen.
    pub offset: i64,
    /// Log position of the commit.
    pub position: u64,
    /// Next offset of the last pull, -1 when none was seen.
    pub pull_offset: i64,
    /// When the last pull or pop looked here, in milliseconds; 0 when none was seen.
    pub pulled_ms: i64,
    /// Offset a reset wants the next pull to start at, -1 without one.
    pub reset_to: i64,
}

/// An offset that was taken back to the end of its queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Clamped {
    /// Topic.
    pub topic: Box<str>,
    /// Consumer group.
    pub group: Box<str>,
    /// Queue id.
    pub queue_id: i32,
    /// The offset now.
    pub offset: i64,
}

impl Clamped {
    fn new(topic: &str, group: &str, entry: &OffsetEntry) -> Self {
        Self {
            topic: topic.into(),
            group: group.into(),
            queue_id: entry.queue_id,
            offset: entry.offset,
        }
    }
}

type ByTopic = HashMap<Box<str>, Vec<OffsetEntry>>;

/// All offsets of a shard.
#[derive(Default)]
pub struct OffsetTable {
    groups: HashMap<Box<str>, ByTopic>,
    held: usize,
}

impl OffsetTable {
    /// The entry of a group on a queue.
    #[must_use]
    pub fn get(&self, topic: &str, group: &str, queue_id: i32) -> Option<&OffsetEntry> {
        self.groups
            .get(group)?
            .get(topic)?
            .iter()
            .find(|entry| entry.queue_id == queue_id)
    }

    /// The entry of a group on a queue, made if need be; `None` at [`OFFSETS_MAX`].
    pub fn entry(&mut self, topic: &str, group: &str, queue_id: i32) -> Option<&mut OffsetEntry> {
        if !self.groups.contains_key(group) {
            self.groups.insert(group.into(), HashMap::new());
        }
        let topics = self.groups.get_mut(group)?;
        if !topics.contains_key(topic) {
            topics.insert(topic.into(), Vec::new());
        }
        let entries = topics.get_mut(topic)?;
        let at = match entries.iter().position(|entry| entry.queue_id == queue_id) {
            Some(at) => at,
            None if self.held >= OFFSETS_MAX => return None,
            None => {
                self.held += 1;
                entries.push(OffsetEntry {
                    queue_id,
                    offset: -1,
                    position: 0,
                    pull_offset: -1,
                    pulled_ms: 0,
                    reset_to: -1,
                });
                entries.len() - 1
            }
        };
        entries.get_mut(at)
    }

    /// Takes a commit met in the log, a run or the settings file.
    pub fn replay(&mut self, topic: &str, group: &str, queue_id: i32, offset: i64, position: u64) {
        if let Some(entry) = self.entry(topic, group, queue_id)
            && position >= entry.position
        {
            entry.offset = offset;
            entry.position = position;
        }
    }

    /// Takes every commit back to its queue's end that lies beyond it (the messages it speaks of
    /// were lost with the power). Returns which.
    pub fn clamp(&mut self, queues: &QueueTable) -> Vec<Clamped> {
        let mut clamped = Vec::new();
        for (group, topics) in &mut self.groups {
            for (topic, entries) in topics.iter_mut() {
                for entry in entries {
                    let queue = queues.find(topic, entry.queue_id);
                    let queue = queue.and_then(|at| queues.get(at));
                    let end = queue.map_or(i64::MAX, |queue| queue.next_offset as i64);
                    if entry.offset > end {
                        entry.offset = end;
                        clamped.push(Clamped::new(topic, group, entry));
                    }
                }
            }
        }
        clamped
    }

    /// The same for a queue that has no message yet.
    pub fn clamp_new(&mut self, topic: &str, queue_id: i32) -> Vec<Clamped> {
        let mut clamped = Vec::new();
        for (group, topics) in &mut self.groups {
            let entries = topics.get_mut(topic).into_iter().flatten();
            for entry in entries.filter(|entry| entry.queue_id == queue_id && entry.offset > 0) {
                entry.offset = 0;
                clamped.push(Clamped::new(topic, group, entry));
            }
        }
        clamped
    }

    /// Forgets a topic's offsets.
    pub fn remove_topic(&mut self, topic: &str) {
        for topics in self.groups.values_mut() {
            if let Some(entries) = topics.remove(topic) {
                self.held -= entries.len();
            }
        }
        self.groups.retain(|_, topics| !topics.is_empty());
    }

    /// Forgets a group's offsets.
    pub fn remove_group(&mut self, group: &str) {
        if let Some(topics) = self.groups.remove(group) {
            self.held -= topics.values().map(Vec::len).sum::<usize>();
        }
    }

    /// All entries as `(topic, group, entry)`.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, &OffsetEntry)> {
        self.groups.iter().flat_map(|(group, topics)| {
            topics.iter().flat_map(move |(topic, entries)| {
                entries.iter().map(move |entry| (&**topic, &**group, entry))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_commit_wins_whatever_the_order_of_replay() {
        let mut table = OffsetTable::default();
        table.replay("T", "g", 0, 50, 900);
        table.replay("T", "g", 0, 70, 100);
        assert_eq!(table.get("T", "g", 0).unwrap().offset, 50);
        table.replay("T", "g", 0, 20, 901);
        assert_eq!(table.get("T", "g", 0).unwrap().offset, 20);
    }

    #[test]
    fn removing_a_topic_forgets_its_offsets_in_every_group() {
        let mut table = OffsetTable::default();
        table.replay("T", "g", 0, 5, 1);
        table.replay("T", "h", 0, 6, 1);
        table.replay("U", "g", 0, 7, 1);
        table.remove_topic("T");
        assert!(table.get("T", "g", 0).is_none());
        assert!(table.get("T", "h", 0).is_none());
        assert_eq!(table.get("U", "g", 0).unwrap().offset, 7);
        assert_eq!(table.iter().count(), 1);
    }
}
