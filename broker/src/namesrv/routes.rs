//! Owns what the name server knows: topics, broker groups and which brokers are alive.
//!
//! Invariants: every address in a group has exactly one entry in the live table and the other way
//! round; a queue entry names only a group that exists; a topic without queue entries does not
//! exist; nothing grows past its `*_MAX`. Time and connection ids come from the caller.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use thiserror::Error;

use self::spread::Spread;

pub use wire::body::{DataVersion, PERM_READ, PERM_WRITE};

/// Most topic names held.
pub const TOPICS_MAX: usize = 1_000_000;
/// Most (topic, broker group) pairs held.
pub const QUEUE_ENTRIES_MAX: usize = 4_000_000;
/// Most broker addresses held.
pub const BROKERS_MAX: usize = 4_096;
/// Longest topic name accepted from a broker; retry names of POP groups are the longest there are.
pub const TOPIC_NAME_BYTES_MAX: usize = 1_024;
/// Longest broker name, cluster name, zone name or address accepted.
pub const NAME_BYTES_MAX: usize = 255;
/// Silence after which a broker that named no time of its own is dropped.
pub const HEARTBEAT_TIMEOUT_DEFAULT_MS: i64 = 120_000;

/// The broker id that marks a master.
pub const MASTER_ID: i64 = 0;
/// Topics of this prefix show the members of a group as they are, never with an acting master.
const MEMBER_TOPIC_PREFIX: &str = "rmq_sys_SYNC_BROKER_MEMBER_";

/// True when `version` is the change right after `earlier`, so that nothing was missed between.
fn follows(version: DataVersion, earlier: DataVersion) -> bool {
    version.state_version == earlier.state_version
        && earlier.counter.checked_add(1) == Some(version.counter)
}

/// How many queues one broker group has of a topic, and what may be done with them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueData {
    /// Queues consumers read.
    pub read_queue_nums: i32,
    /// Queues producers write.
    pub write_queue_nums: i32,
    /// Permission bits: 4 read, 2 write, 1 inherit.
    pub perm: i32,
    /// Topic flags: 1 unit, 2 unit subscription.
    pub topic_sys_flag: i32,
    /// Whether the order of its messages matters, so that its queues must not move.
    pub ordered: bool,
}

/// One topic of a registration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopicRegistration {
    /// The topic's name.
    pub name: String,
    /// Its queues on the registering broker.
    pub queues: QueueData,
    /// When a send created it, in milliseconds; only brokers of this program say so.
    pub created_ms: Option<i64>,
}

/// What the topics of a registration are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TableKind {
    /// The broker does not say; only brokers of this program do.
    #[default]
    Unsaid,
    /// All topics of the broker.
    Whole,
    /// The changed ones.
    Part,
}

/// What a broker says about itself, whether it came in a frame or from the same process.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct BrokerRegistration {
    /// Cluster of the broker.
    pub cluster_name: String,
    /// Group name; master and slaves share it.
    pub broker_name: String,
    /// Address clients connect to.
    pub broker_address: String,
    /// Address slaves replicate from.
    pub ha_server_address: String,
    /// 0 for the master.
    pub broker_id: i64,
    /// Silence after which this broker is to be dropped.
    pub heartbeat_timeout_ms: Option<i64>,
    /// Whether a slave may stand in for a lost master; absent from brokers older than that.
    pub enable_acting_master: Option<bool>,
    /// Zone of the group.
    pub zone_name: Option<String>,
    /// Version of the whole topic table, even if only a part of it is sent.
    pub data_version: DataVersion,
    /// The topics sent: the whole table or the changed ones.
    pub topics: Vec<TopicRegistration>,
    /// Which of the two, if the broker says so.
    pub table: TableKind,
    /// Topics an administrator just deleted on the broker. Their routes stay until the name server
    /// itself is told to delete them; they are only not offered to other brokers any more.
    pub gone: Vec<String>,
    /// Static-topic mappings by topic, kept as the broker wrote them.
    pub mappings: Vec<(String, Value)>,
}

/// What a slave learns from its registration.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Registered {
    /// Address of the live master, empty for the master itself.
    pub master_address: String,
    /// Replication address of the live master, empty for the master itself.
    pub ha_server_address: String,
}

/// Why a registration was refused.
#[derive(Error, Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// A bound of the tables is reached.
    #[error("name server bound reached: {what} would exceed {bound}; remove unused ones first")]
    Bound {
        /// What there is too much of.
        what: &'static str,
        /// The bound.
        bound: usize,
    },
    /// A name or address is empty or too long.
    #[error("{what} of {bytes} bytes is not acceptable, expected 1 to {bytes_max} bytes")]
    Name {
        /// Which name.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The longest accepted.
        bytes_max: usize,
    },
}

/// A master and its slaves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BrokerGroup {
    /// Cluster of the group.
    pub cluster_name: String,
    /// Zone of the group, if it named one.
    pub zone_name: Option<String>,
    /// Whether a slave may stand in for the master.
    pub enable_acting_master: bool,
    /// Addresses by broker id.
    pub addresses: BTreeMap<i64, String>,
}

impl BrokerGroup {
    /// True when slaves are left but no master.
    fn without_master(&self) -> bool {
        !self.addresses.is_empty() && !self.addresses.contains_key(&MASTER_ID)
    }
}

/// What is known of one live broker address.
#[derive(Clone, Debug)]
struct LiveBroker {
    broker_name: Arc<str>,
    /// The connection it registered on; none for a broker in this process.
    connection: Option<u64>,
    last_seen_ms: i64,
    timeout_ms: i64,
    data_version: DataVersion,
    /// Whether all topics of `data_version` are known to be held. A registration may be a single
    /// changed topic, and nothing in it says so; only an unbroken chain of versions does.
    complete: bool,
    ha_server_address: String,
}

/// The queues of one topic, sorted by broker name, and its static mappings.
#[derive(Clone, Debug, Default)]
struct TopicEntry {
    queues: Vec<(Arc<str>, QueueData)>,
    mappings: BTreeMap<String, Value>,
}

impl TopicEntry {
    fn find(&self, broker_name: &str) -> Result<usize, usize> {
        self.queues
            .binary_search_by(|(name, _)| (**name).cmp(broker_name))
    }

    fn get(&self, broker_name: &str) -> Option<&QueueData> {
        self.find(broker_name)
            .ok()
            .and_then(|at| self.queues.get(at))
            .map(|(_, queues)| queues)
    }

    fn get_mut(&mut self, broker_name: &str) -> Option<&mut QueueData> {
        let at = self.find(broker_name).ok()?;
        self.queues.get_mut(at).map(|(_, queues)| queues)
    }

    /// Returns true when the pair is new.
    fn put(&mut self, broker_name: &Arc<str>, queues: QueueData) -> bool {
        match self.find(broker_name) {
            Ok(at) => {
                if let Some((_, held)) = self.queues.get_mut(at) {
                    *held = queues;
                }
                false
            }
            Err(at) => {
                self.queues.insert(at, (Arc::clone(broker_name), queues));
                true
            }
        }
    }

    /// Returns true when the pair was there.
    fn remove(&mut self, broker_name: &str) -> bool {
        self.mappings.remove(broker_name);
        match self.find(broker_name) {
            Ok(at) => {
                self.queues.remove(at);
                true
            }
            Err(_) => false,
        }
    }
}

/// The route of one topic as answered.
#[derive(Clone, Debug)]
pub struct Route {
    /// Broker groups that have the topic.
    pub groups: Vec<(Arc<str>, BrokerGroup)>,
    /// Queues by broker group.
    pub queues: Vec<(Arc<str>, QueueData)>,
    /// Static mappings by broker name.
    pub mappings: BTreeMap<String, Value>,
}

/// How an expired or closed broker left, for the log of the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expired {
    /// The connection to close, if the broker had one.
    pub connection: Option<u64>,
    /// Address of the broker.
    pub broker_address: String,
    /// Its group.
    pub broker_name: String,
}

/// All tables of the name server except the key-value configuration.
#[derive(Debug, Default)]
pub struct RouteTable {
    topics: BTreeMap<String, TopicEntry>,
    queue_entries: usize,
    groups: BTreeMap<Arc<str>, BrokerGroup>,
    /// By (cluster, address).
    live: BTreeMap<(String, String), LiveBroker>,
    /// Groups whose write permission is withheld from routes, see [`Self::set_isolated`].
    isolated: BTreeSet<String>,
    isolates_ordered: bool,
    /// Topics that brokers of a cluster follow each other with.
    spread: Spread,
    bound_hits: u64,
}

impl RouteTable {
    /// How often a bound refused something.
    pub fn bound_hits(&self) -> u64 {
        self.bound_hits
    }

    /// Numbers of topics, broker groups and live broker addresses.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.topics.len(), self.groups.len(), self.live.len())
    }

    /// Groups by name.
    pub fn groups(&self) -> impl Iterator<Item = (&str, &BrokerGroup)> {
        self.groups.iter().map(|(name, group)| (&**name, group))
    }

    /// One group.
    pub fn group(&self, broker_name: &str) -> Option<&BrokerGroup> {
        self.groups.get(broker_name)
    }

    /// Clusters and the groups in them.
    pub fn clusters(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut clusters: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, group) in &self.groups {
            clusters.entry(&group.cluster_name).or_default().push(name);
        }
        clusters
    }

    /// All topic names.
    pub fn topic_names(&self) -> impl Iterator<Item = &str> {
        self.topics.keys().map(String::as_str)
    }

    /// Topics with queues on a group of `cluster_name`.
    pub fn topics_of_cluster(&self, cluster_name: &str) -> Vec<&str> {
        self.topics_where(|name, _| {
            self.groups
                .get(name)
                .is_some_and(|group| group.cluster_name == cluster_name)
        })
    }

    /// Topics of which the flags of the first group satisfy `wanted`.
    pub fn topics_by_flag(&self, wanted: impl Fn(i32) -> bool) -> Vec<&str> {
        self.topics
            .iter()
            .filter(|(_, entry)| {
                entry
                    .queues
                    .first()
                    .is_some_and(|(_, queues)| wanted(queues.topic_sys_flag))
            })
            .map(|(name, _)| name.as_str())
            .collect()
    }

    fn topics_where(&self, wanted: impl Fn(&str, &QueueData) -> bool) -> Vec<&str> {
        self.topics
            .iter()
            .filter(|(_, entry)| {
                entry
                    .queues
                    .iter()
                    .any(|(name, queues)| wanted(name, queues))
            })
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// Withholds the write permission of these groups from every route answered from now on.
    ///
    /// The stored permissions stay as they are, so taking a group out of the set gives back exactly
    /// what its broker registered.
    pub fn set_isolated(&mut self, broker_names: BTreeSet<String>) {
        self.isolated = broker_names;
    }

    /// Also withholds it from topics whose order matters, whose queues otherwise stay.
    pub fn set_isolates_ordered(&mut self, isolates_ordered: bool) {
        self.isolates_ordered = isolates_ordered;
    }

    /// Groups whose write permission is withheld.
    pub fn isolated(&self) -> &BTreeSet<String> {
        &self.isolated
    }

    /// Whether isolation may act on this topic: a group that is not isolated takes its messages,
    /// so that a topic never loses its last writer, and no order would break.
    fn may_withhold(&self, entry: &TopicEntry) -> bool {
        let writes = |queues: &QueueData| queues.perm & PERM_WRITE != 0;
        !self.isolated.is_empty()
            && entry
                .queues
                .iter()
                .any(|(name, queues)| writes(queues) && !self.isolated.contains(&**name))
            && (self.isolates_ordered || !entry.queues.iter().any(|(_, queues)| queues.ordered))
    }

    /// The route of a topic, or none when no live group has it.
    pub fn route(&self, topic: &str, support_acting_master: bool) -> Option<Route> {
        let entry = self.topics.get(topic)?;
        let mut groups: Vec<(Arc<str>, BrokerGroup)> = Vec::with_capacity(entry.queues.len());
        let mut queues = Vec::with_capacity(entry.queues.len());
        // The one place where something other than the brokers' own registrations may change a
        // route: it acts when a route is answered and never touches the tables.
        let may_withhold = self.may_withhold(entry);
        for (name, stored) in &entry.queues {
            let Some(group) = self.groups.get(name) else {
                continue;
            };
            let mut group = group.clone();
            let acting = support_acting_master
                && group.enable_acting_master
                && stored.perm & PERM_WRITE == 0
                && group.without_master()
                && !topic.starts_with(MEMBER_TOPIC_PREFIX);
            if acting && let Some((_, address)) = group.addresses.pop_first() {
                group.addresses.insert(MASTER_ID, address);
            }
            groups.push((Arc::clone(name), group));
            let mut told = *stored;
            if may_withhold && self.isolated.contains(&**name) {
                told.perm &= !PERM_WRITE;
            }
            queues.push((Arc::clone(name), told));
        }
        let found = !groups.is_empty();
        found.then(|| Route {
            groups,
            queues,
            mappings: entry.mappings.clone(),
        })
    }

    /// Sets or clears the write permission of all topics of a group; returns how many there are.
    pub fn set_write_permission(&mut self, broker_name: &str, writeable: bool) -> i32 {
        let mut topics = 0;
        for entry in self.topics.values_mut() {
            if let Some(queues) = entry.get_mut(broker_name) {
                queues.perm = if writeable {
                    PERM_READ | PERM_WRITE
                } else {
                    queues.perm & !PERM_WRITE
                };
                topics += 1;
            }
        }
        topics
    }

    /// Forgets a topic, on all groups or on those of one cluster.
    pub fn delete_topic(&mut self, topic: &str, cluster_name: Option<&str>) {
        let Some(entry) = self.topics.get_mut(topic) else {
            return;
        };
        let before = entry.queues.len();
        if let Some(cluster_name) = cluster_name {
            let groups = &self.groups;
            let spread = &mut self.spread;
            entry.queues.retain(|(name, _)| {
                let stays = groups
                    .get(name)
                    .is_none_or(|group| group.cluster_name != cluster_name);
                if !stays {
                    spread.forget(topic, name);
                }
                stays
            });
        } else {
            for (name, _) in entry.queues.drain(..) {
                self.spread.forget(topic, &name);
            }
        }
        self.queue_entries -= before - entry.queues.len();
        if entry.queues.is_empty() {
            self.topics.remove(topic);
        }
    }

    /// Adds queues of a topic on groups that are registered; others are ignored.
    pub fn register_topic(
        &mut self,
        topic: &str,
        queues: &[(String, QueueData)],
    ) -> Result<(), Refusal> {
        check_name("topic", topic, TOPIC_NAME_BYTES_MAX)?;
        for (broker_name, queues) in queues {
            let Some((name, _)) = self.groups.get_key_value(broker_name.as_str()) else {
                continue;
            };
            let name = Arc::clone(name);
            self.check_room(&name, std::iter::once(topic))?;
            self.put_queues(topic, &name, *queues);
        }
        Ok(())
    }

    fn put_queues(&mut self, topic: &str, broker_name: &Arc<str>, queues: QueueData) {
        if let Some(entry) = self.topics.get_mut(topic) {
            self.queue_entries += usize::from(entry.put(broker_name, queues));
        } else {
            let mut entry = TopicEntry::default();
            self.queue_entries += usize::from(entry.put(broker_name, queues));
            self.topics.insert(topic.to_owned(), entry);
        }
    }

    /// Refuses before anything is changed if `topics` of a group would not fit.
    fn check_room<'a>(
        &mut self,
        broker_name: &str,
        topics: impl Iterator<Item = &'a str>,
    ) -> Result<(), Refusal> {
        let (mut new_topics, mut new_entries) = (0, 0);
        for topic in topics {
            check_name("topic", topic, TOPIC_NAME_BYTES_MAX)?;
            match self.topics.get(topic) {
                None => (new_topics, new_entries) = (new_topics + 1, new_entries + 1),
                Some(entry) if entry.get(broker_name).is_none() => new_entries += 1,
                Some(_) => {}
            }
        }
        self.check_bound("topics", self.topics.len() + new_topics, TOPICS_MAX)?;
        self.check_bound(
            "topic queues",
            self.queue_entries + new_entries,
            QUEUE_ENTRIES_MAX,
        )
    }

    fn check_bound(
        &mut self,
        what: &'static str,
        wanted: usize,
        bound: usize,
    ) -> Result<(), Refusal> {
        if wanted > bound {
            self.bound_hits += 1;
            return Err(Refusal::Bound { what, bound });
        }
        Ok(())
    }
}

/// Refuses names that are empty or too long.
fn check_name(what: &'static str, name: &str, bytes_max: usize) -> Result<(), Refusal> {
    if name.is_empty() || name.len() > bytes_max {
        return Err(Refusal::Name {
            what,
            bytes: name.len(),
            bytes_max,
        });
    }
    Ok(())
}

mod membership;
mod spread;
