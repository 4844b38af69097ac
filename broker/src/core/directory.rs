//! One core's copy of what the control task knows: topics with the homes of their queues, groups,
//! subscriptions.
//!
//! Invariant: only changes sent by the control task alter it, so all copies agree up to messages
//! still on their way.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use shard::queue::QueueIndex;
use wire::body::{SubscriptionGroupConfig, TopicConfig};

use crate::control::effects::PlacedTopic;
use crate::control::subscriptions::GroupSubscriptions;

/// No local queue.
pub const NO_QUEUE: QueueIndex = QueueIndex::MAX;

/// Most groups per topic of which it is remembered when they were last told.
const PULLING_GROUPS_MAX: usize = 1_024;
/// Most groups of a topic for which passed over messages are counted.
pub const PASSED_GROUPS_MAX: usize = 1_024;
/// How often the control task is told that a group still pulls from a topic, in milliseconds.
const PULLING_TOLD_MS: i64 = 60_000;
/// Queues looked at for one whose disk does not hang.
const QUEUES_TRIED_MAX: u32 = 64;

/// Where a queue lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueHome {
    /// Shard.
    pub shard: u16,
    /// Index in the shard if the shard is on this core, else [`NO_QUEUE`].
    pub index: QueueIndex,
}

/// Counters of a topic's queues on this core.
#[derive(Clone, Copy, Default, Debug)]
pub struct TopicCounters {
    /// Messages.
    pub messages: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A topic as the data path sees it.
#[derive(Debug)]
pub struct TopicEntry {
    /// Configuration.
    pub config: TopicConfig,
    /// Homes by queue id.
    pub homes: Vec<QueueHome>,
    /// Messages put here.
    pub put: TopicCounters,
    /// Messages got here, by group.
    pub got: Vec<(Box<str>, TopicCounters)>,
    /// Messages that filters passed over, by group and queue id.
    pub passed: Vec<(Box<str>, Vec<u64>)>,
    /// When the control task was last told that a group pulls from here, in milliseconds.
    pulling: Vec<(Box<str>, i64)>,
    /// Queue the next send without a queue goes to.
    pub next_queue: u32,
}

impl TopicEntry {
    /// Whether the control task is to be told that a group pulls from here.
    pub fn is_pull_news(&mut self, group: &str, now_ms: i64) -> bool {
        match self.pulling.iter_mut().find(|(name, _)| &**name == group) {
            Some((_, told_ms)) => {
                let is_due = now_ms - *told_ms >= PULLING_TOLD_MS;
                if is_due {
                    *told_ms = now_ms;
                }
                is_due
            }
            None => {
                if self.pulling.len() >= PULLING_GROUPS_MAX {
                    self.pulling
                        .retain(|(_, told_ms)| now_ms - *told_ms < PULLING_TOLD_MS);
                }
                let has_room = self.pulling.len() < PULLING_GROUPS_MAX;
                if has_room {
                    self.pulling.push((group.into(), now_ms));
                }
                has_room
            }
        }
    }

    /// The queue of a send that names none: the next one, if its shard is not one to be avoided.
    pub fn choose_queue(&mut self, avoid: impl Fn(u16) -> bool) -> i32 {
        let queues = self.config.write_queue_nums.max(1) as u32;
        let next = self.next_queue.wrapping_add(1);
        let mut tried = (0..queues.min(QUEUES_TRIED_MAX)).map(|step| next.wrapping_add(step));
        let good = tried.find(|queue| {
            let home = self.homes.get((queue % queues) as usize);
            !home.is_some_and(|home| avoid(home.shard))
        });
        self.next_queue = good.unwrap_or(next);
        (self.next_queue % queues) as i32
    }

    /// Counts messages that a group's filter passed over; at most
    /// [`PASSED_GROUPS_MAX`] groups are told apart.
    pub fn count_passed(&mut self, group: &str, queue_id: i32, messages: u64) {
        let known = self.passed.iter().position(|(name, _)| &**name == group);
        let at = match known {
            Some(at) => at,
            None if self.passed.len() >= PASSED_GROUPS_MAX => return,
            None => {
                self.passed.push((group.into(), vec![0; self.homes.len()]));
                self.passed.len() - 1
            }
        };
        let Some((_, queues)) = self.passed.get_mut(at) else {
            return;
        };
        let queue = usize::try_from(queue_id).unwrap_or(usize::MAX);
        if queue >= queues.len() && queue < self.homes.len() {
            queues.resize(self.homes.len(), 0);
        }
        if let Some(passed) = queues.get_mut(queue) {
            *passed += messages;
        }
    }

    /// Counts messages handed to a group.
    pub fn count_got(&mut self, group: &str, messages: u64, bytes: u64) {
        let at = match self.got.iter().position(|(name, _)| &**name == group) {
            Some(at) => at,
            None => {
                self.got.push((group.into(), TopicCounters::default()));
                self.got.len() - 1
            }
        };
        if let Some((_, counters)) = self.got.get_mut(at) {
            counters.messages += messages;
            counters.bytes += bytes;
        }
    }
}

/// A table by name. Looked at for every message, so its hash is a fast one with a random seed.
pub type ByName<V> = HashMap<Box<str>, V, foldhash::fast::RandomState>;

/// One core's tables.
#[derive(Default)]
pub struct Directory {
    /// Topics by name.
    pub topics: ByName<TopicEntry>,
    /// Groups by name.
    pub groups: ByName<Arc<SubscriptionGroupConfig>>,
    /// Subscriptions by group.
    pub subscriptions: ByName<Arc<GroupSubscriptions>>,
    /// Topics that were removed since the start; some may have been made again.
    pub made_again: HashSet<Box<str>>,
    /// Topics that groups are set to pull, not to pop, by group.
    pub pulled: HashMap<Box<str>, HashSet<Box<str>>>,
    /// Forbidden bits by group and topic.
    pub forbidden: ByName<Arc<BTreeMap<String, i32>>>,
}

/// Removed topics that are remembered.
pub const MADE_AGAIN_MAX: usize = 100_000;

impl Directory {
    /// Forgets a topic.
    pub fn remove_topic(&mut self, topic: &str) {
        self.topics.remove(topic);
        if self.made_again.len() < MADE_AGAIN_MAX {
            self.made_again.insert(topic.into());
        }
    }

    /// Takes note of how a group reads a topic.
    pub fn set_pulled(&mut self, group: &str, topic: &str, pulled: bool) {
        if pulled {
            let topics = self.pulled.entry(group.into()).or_default();
            topics.insert(topic.into());
        } else if let Some(topics) = self.pulled.get_mut(group) {
            topics.remove(topic);
            if topics.is_empty() {
                self.pulled.remove(group);
            }
        }
    }

    /// Whether a group is set to pull a topic.
    #[must_use]
    pub fn is_pulled(&self, group: &str, topic: &str) -> bool {
        let topics = self.pulled.get(group);
        topics.is_some_and(|topics| topics.contains(topic))
    }

    /// Takes a new or changed topic; `open` opens local queues.
    pub fn put_topic(
        &mut self,
        placed: &PlacedTopic,
        mut open: impl FnMut(u16, &str, i32) -> QueueIndex,
    ) {
        let name = placed.config.topic_name.as_str();
        let homes = placed
            .shards
            .iter()
            .enumerate()
            .map(|(queue_id, shard)| QueueHome {
                shard: *shard,
                index: open(*shard, name, queue_id as i32),
            });
        let homes: Vec<QueueHome> = homes.collect();
        match self.topics.get_mut(name) {
            Some(entry) => {
                entry.config = placed.config.clone();
                entry.homes = homes;
            }
            None => {
                let entry = TopicEntry {
                    config: placed.config.clone(),
                    homes,
                    put: TopicCounters::default(),
                    got: Vec::new(),
                    passed: Vec::new(),
                    pulling: Vec::new(),
                    next_queue: 0,
                };
                self.topics.insert(name.into(), entry);
            }
        }
    }

    /// Whether a group may read a topic.
    #[must_use]
    pub fn may_read(&self, group: &str, topic: &str) -> bool {
        let bits = self
            .forbidden
            .get(group)
            .and_then(|topics| topics.get(topic));
        bits.is_none_or(|bits| bits & wire::body::PERM_READ == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sends_that_name_no_queue_avoid_shards_whose_disk_hangs() {
        let config = TopicConfig {
            topic_name: "T".to_owned(),
            write_queue_nums: 6,
            read_queue_nums: 6,
            ..TopicConfig::default()
        };
        let placed = PlacedTopic {
            config,
            shards: vec![0, 1, 2, 0, 1, 2],
        };
        let mut directory = Directory::default();
        directory.put_topic(&placed, |_, _, _| NO_QUEUE);
        let entry = directory.topics.get_mut("T").expect("the topic");
        let mut chosen = |hang: &[u16]| -> Vec<i32> {
            let mut next = || entry.choose_queue(|shard| hang.contains(&shard));
            (0..6).map(|_| next()).collect()
        };
        assert_eq!(chosen(&[]), [1, 2, 3, 4, 5, 0]);
        assert_eq!(chosen(&[1]), [2, 3, 5, 0, 2, 3]);
        let mut all = chosen(&[0, 1, 2]);
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4, 5], "nothing to choose");
    }
}
