//! One core's copy of what the control task knows: topics with the homes of their queues, groups,
//! subscriptions.
//!
//! Invariant: only changes sent by the control task alter it, so all copies agree up to messages
//! still on their way.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use shard::queue::QueueIndex;
use wire::body::{SubscriptionGroupConfig, TopicConfig};

use crate::control::effects::PlacedTopic;
use crate::control::subscriptions::GroupSubscriptions;

/// No local queue.
pub const NO_QUEUE: QueueIndex = QueueIndex::MAX;

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
    /// Queue the next send without a queue goes to.
    pub next_queue: u32,
}

impl TopicEntry {
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

/// One core's tables.
#[derive(Default)]
pub struct Directory {
    /// Topics by name.
    pub topics: HashMap<Box<str>, TopicEntry>,
    /// Groups by name.
    pub groups: HashMap<Box<str>, Arc<SubscriptionGroupConfig>>,
    /// Subscriptions by group.
    pub subscriptions: HashMap<Box<str>, Arc<GroupSubscriptions>>,
    /// Forbidden bits by group and topic.
    pub forbidden: HashMap<Box<str>, Arc<BTreeMap<String, i32>>>,
}

impl Directory {
    /// Takes a new or changed topic; `open` opens local queues.
    pub fn put_topic(
        &mut self,
        placed: &PlacedTopic,
        mut open: impl FnMut(u16, &str, i32) -> QueueIndex,
    ) {
        let name = placed.config.topic_name.as_str();
        let homes = placed.shards.iter().enumerate().map(|(queue_id, shard)| QueueHome {
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
                    next_queue: 0,
                };
                self.topics.insert(name.into(), entry);
            }
        }
    }

    /// Whether a group may read a topic.
    #[must_use]
    pub fn may_read(&self, group: &str, topic: &str) -> bool {
        let bits = self.forbidden.get(group).and_then(|topics| topics.get(topic));
        bits.is_none_or(|bits| bits & wire::body::PERM_READ == 0)
    }
}
