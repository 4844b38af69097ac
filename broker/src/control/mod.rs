//! Owns the control task: the one writer of topics, groups, placement, the client registry, queue
//! locks and the broker's settings.
//!
//! Invariant: it is a pure state machine. Time is passed in and everything to be done outside is
//! returned as an [`effects::Effect`], in order; a change is saved before it is told to anybody.

pub mod answer;
mod assignment;
mod attributes;
mod broker_requests;
mod changes;
pub mod clients;
mod connection_requests;
mod consume_stats;
mod creation;
mod dispatch;
pub mod effects;
mod explain_requests;
mod group_requests;
pub mod groups;
mod heartbeat;
pub mod locks;
pub mod members;
pub mod names;
mod offset_requests;
pub mod origins;
pub mod placement;
mod relay_requests;
pub mod relays;
mod replies;
mod runtime_info;
mod start;
pub mod stats;
mod stats_requests;
pub mod subscriptions;
mod topic_requests;
pub mod topics;
pub mod transactions;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use wire::body::{DataVersion, MessageRequestModeTable, TopicConfig};

use self::clients::Clients;
use self::effects::{ClientLink, PlacedTopic};
use self::groups::GroupTable;
use self::locks::Locks;
use self::relays::Relays;
use self::stats::Stats;
use self::topics::TopicTable;
use crate::config::Config;
use crate::namesrv::offer::CREATED_ATTRIBUTE;

pub use self::start::{ControlSetup, SavedTables};

/// Why the control task cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A control file is damaged.
    #[error("config/{file} is damaged: {what}; restore it from an earlier generation")]
    Content {
        /// Name of the file.
        file: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// A queue is placed on a shard the store does not have.
    #[error(
        "a queue of topic {topic} is placed on shard {shard}, but the store has {shards} shards; \
         set pinion.shards to at least the number the store was made with"
    )]
    ShardMissing {
        /// The topic.
        topic: String,
        /// Its shard.
        shard: u16,
        /// Shards there are.
        shards: u16,
    },
    /// A table cannot be written.
    #[error("a control table cannot be written: {0}")]
    Write(String),
}

/// The control task.
#[derive(Debug)]
pub struct Control {
    config: Config,
    broker_address: SocketAddr,
    boot_ms: i64,
    topics: TopicTable,
    groups: GroupTable,
    clients: Clients,
    locks: Locks,
    modes: MessageRequestModeTable,
    relays: Relays,
    stats: Stats,
    /// Questions about open transactions.
    checks: transactions::CheckCounters,
    /// Topics of the broker's own, in this cluster and on this broker.
    system_topics: BTreeSet<String>,
    /// Topics whose settings were lost and are being made anew from the log.
    recovered_topics: BTreeSet<String>,
    /// Whether recovered topics wait for being saved.
    has_unsaved_topics: bool,
    /// Offsets of a reset by the client's own means that waits for its second step.
    half_resets: HashMap<(ClientLink, i32), BTreeMap<i32, i64>>,
    last_sweep_ms: i64,
    /// Heartbeats not taken as a whole.
    beats_refused: shard::repeated::Repeated,
    /// Resets offsets by telling the clients (code 220) instead of on the server.
    pub reset_by_client: bool,
}

/// Counters of the control task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlCounters {
    /// Topics kept.
    pub topics: usize,
    /// Groups kept.
    pub groups: usize,
    /// Registrations of clients kept.
    pub registrations: usize,
    /// Connections with a registration.
    pub connections: usize,
    /// Queue locks held.
    pub locks: usize,
    /// Requests on their way to clients.
    pub relays: usize,
    /// Subscription conflicts seen.
    pub conflicts: u64,
    /// How often any bound of the control task was hit.
    pub bound_hits: u64,
}

impl Control {
    /// The topics as the name servers are told them: with this broker's permission applied.
    pub fn registration_topics(&self) -> BTreeMap<String, TopicConfig> {
        self.topics
            .iter()
            .map(|topic| self.registered(topic))
            .collect()
    }

    /// The next of them after a name, at most so many.
    pub fn registration_topics_after(
        &self,
        name: &str,
        most: usize,
    ) -> BTreeMap<String, TopicConfig> {
        let next = self.topics.after(name).take(most);
        next.map(|topic| self.registered(topic)).collect()
    }

    /// Version of the topics.
    pub fn topics_version(&self) -> DataVersion {
        *self.topics.version()
    }

    /// How many topics there are.
    pub fn topics_count(&self) -> usize {
        self.topics.count()
    }

    /// The same of some topics only, and the names among them that are not topics any more.
    pub fn registration_part(
        &self,
        names: &BTreeSet<String>,
    ) -> (BTreeMap<String, TopicConfig>, Vec<String>) {
        let (has, gone): (Vec<&String>, Vec<&String>) =
            names.iter().partition(|name| self.topics.has(name));
        let topics = has.into_iter().filter_map(|name| self.topics.get(name));
        (
            topics.map(|topic| self.registered(topic)).collect(),
            gone.into_iter().cloned().collect(),
        )
    }

    fn registered(&self, topic: &PlacedTopic) -> (String, TopicConfig) {
        let permission = i32::try_from(self.config.broker_permission).unwrap_or(6);
        let mut config = topic.config.clone();
        // The inherit bit is no right of clients, so that the broker's permission leaves it.
        config.perm &= permission | wire::body::PERM_INHERIT;
        let name = config.topic_name.clone();
        if let Some(created_ms) = self.topics.origins.created_ms(&name) {
            let attribute = CREATED_ATTRIBUTE.to_owned();
            config.attributes.insert(attribute, created_ms.to_string());
        }
        (name, config)
    }

    /// Moves the version of the topics on if a name server was already told this one with other
    /// topics: it would take no change under a version it knows.
    pub fn renew_version(&mut self, now_ms: i64, told: Option<DataVersion>) {
        if told == Some(*self.topics.version()) {
            self.topics.bump(now_ms);
        }
    }

    /// Whether topics offered by a name server would be created.
    pub fn takes_offers(&self) -> bool {
        self.config.auto_create_topic
    }

    /// Counters for metrics.
    pub fn counters(&self) -> ControlCounters {
        ControlCounters {
            topics: self.topics.count(),
            groups: self.groups.count(),
            registrations: self.clients.registrations(),
            connections: self.clients.connections(),
            locks: self.locks.held(),
            relays: self.relays.under_way(),
            conflicts: self.clients.conflicts,
            bound_hits: self.clients.bound_hits
                + self.locks.bound_hits
                + self.relays.bound_hits
                + self.stats.bound_hits,
        }
    }

    /// Members of groups that subscribe differently now.
    pub fn conflicts(&self) -> Vec<(Arc<str>, members::Conflict)> {
        self.clients.conflicts_now()
    }

    /// Settings in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Remembers that a group pulled from a topic with a subscription of its own instead of one
    /// from a heartbeat.
    pub fn note_pull_only(&mut self, now_ms: i64, group: &str, topic: &str) {
        self.clients.note_pull_only(now_ms, group, topic);
    }

    fn broker_name(&self) -> &str {
        &self.config.broker_name.0
    }

    fn is_system_topic(&self, topic: &str) -> bool {
        self.system_topics.contains(topic) || names::is_system_topic(topic)
    }
}
