//! Owns the start of the control task: reading the saved tables and creating what must exist.
//!
//! Invariant: a topic or group that exists is never changed by a start.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;

use wire::body::{
    MessageRequestModeTable, PERM_INHERIT, PERM_READ, PERM_WRITE, SubscriptionGroupConfig,
    TopicConfig,
};

use super::changes::Changes;
use super::clients::Clients;
use super::effects::Effect;
use super::groups::GroupTable;
use super::locks::Locks;
use super::names;
use super::relays::Relays;
use super::stats::Stats;
use super::topics::{TopicTable, read};
use super::{Control, ControlError};
use crate::config::Config;

/// File of the request modes.
pub const MODES_FILE: &str = "messageRequestMode.json";

/// Queues of the benchmark topic.
const BENCHMARK_QUEUES: i32 = 1_024;
/// Queues of the topic with the cluster's name.
const CLUSTER_QUEUES: i32 = 16;

/// Content of the control files, where they exist.
#[derive(Clone, Debug, Default)]
pub struct SavedTables {
    /// `topics.json`.
    pub topics: Option<Vec<u8>>,
    /// `subscriptionGroup.json`.
    pub groups: Option<Vec<u8>>,
    /// `placement.json`.
    pub placement: Option<Vec<u8>>,
    /// `messageRequestMode.json`.
    pub modes: Option<Vec<u8>>,
}

/// What the control task starts with.
#[derive(Debug)]
pub struct ControlSetup {
    /// Shards of the store.
    pub shards: u16,
    /// Settings.
    pub config: Config,
    /// Saved tables.
    pub saved: SavedTables,
    /// Address clients are told.
    pub broker_address: SocketAddr,
    /// Time now in milliseconds.
    pub now_ms: i64,
    /// Start of the process in milliseconds.
    pub boot_ms: i64,
}

impl Control {
    /// Reads the saved tables and creates what must exist.
    ///
    /// The effects save the tables and tell every core every topic and group.
    ///
    /// # Errors
    /// When a saved table is damaged or names a shard that is not there.
    pub fn new(setup: ControlSetup) -> Result<(Self, Vec<Effect>), ControlError> {
        let saved = &setup.saved;
        let modes: Option<MessageRequestModeTable> = read(MODES_FILE, saved.modes.as_deref())?;
        let system_topics = system_topics(&setup.config);
        let mut control = Self {
            topics: TopicTable::load(
                setup.shards,
                saved.topics.as_deref(),
                saved.placement.as_deref(),
            )?,
            groups: GroupTable::load(saved.groups.as_deref())?,
            clients: Clients::default(),
            locks: Locks::default(),
            modes: modes.unwrap_or_default(),
            relays: Relays::default(),
            stats: Stats::new(setup.boot_ms),
            checks: super::transactions::CheckCounters::default(),
            system_topics: system_topics
                .iter()
                .map(|topic| topic.topic_name.clone())
                .collect(),
            recovered_topics: BTreeSet::new(),
            has_unsaved_topics: false,
            half_resets: HashMap::new(),
            last_sweep_ms: setup.now_ms,
            beats_refused: shard::repeated::Repeated::default(),
            reset_by_client: false,
            config: setup.config,
            broker_address: setup.broker_address,
            boot_ms: setup.boot_ms,
        };
        for topic in system_topics {
            if !control.topics.has(&topic.topic_name) {
                control.topics.insert(topic);
            }
        }
        control.place_transaction_topics(setup.shards);
        for group in names::SYSTEM_GROUPS {
            if !control.groups.has(group) {
                control.groups.insert(SubscriptionGroupConfig::new(group));
            }
        }
        let effects = control.announce_all(setup.now_ms)?;
        Ok((control, effects))
    }

    /// Each shard has a queue of its own for its half messages, and one for those given up.
    fn place_transaction_topics(&mut self, shards: u16) {
        for topic in [names::HALF_TOPIC, names::CHECK_MAX_TOPIC] {
            let count = i32::from(shards);
            let read_write = PERM_READ | PERM_WRITE;
            let known = self.topics.get(topic).map(|placed| placed.config.clone());
            let mut config = known.unwrap_or_else(|| TopicConfig::new(topic, count, read_write));
            config.read_queue_nums = config.read_queue_nums.max(count);
            config.write_queue_nums = config.write_queue_nums.max(count);
            self.topics.insert(config);
            for shard in 0..shards {
                self.topics.set_place(topic, i32::from(shard), shard);
            }
        }
    }

    fn announce_all(&mut self, now_ms: i64) -> Result<Vec<Effect>, ControlError> {
        let changes = Changes {
            topics: self.topics.iter().cloned().collect(),
            groups: self.groups.iter().map(|(_, group)| group.clone()).collect(),
            ..Changes::default()
        };
        let mut effects = Vec::new();
        self.publish(now_ms, changes, &mut effects)
            .map_err(|refusal| ControlError::Write(refusal.remark))?;
        // The registration at start tells everything anyway.
        effects.retain(|effect| !matches!(effect, Effect::Register { .. }));
        for group in self.groups.forbidden().keys() {
            effects.push(self.forbidden_effect(group));
        }
        effects.extend(self.pulled_effects());
        Ok(effects)
    }
}

/// The broker's own topics as they are created.
fn system_topics(config: &Config) -> Vec<TopicConfig> {
    let read_write = PERM_READ | PERM_WRITE;
    let (cluster, broker) = (&config.broker_cluster_name.0, &config.broker_name.0);
    let named = |is_usable: bool| PERM_INHERIT | if is_usable { read_write } else { 0 };
    let queues = |count: u32| i32::try_from(count).unwrap_or(1);
    let levels = i32::try_from(config.message_delay_levels.delays_ms().len())
        .unwrap_or(18)
        .max(1);
    let one = |name: &str| TopicConfig::new(name, 1, read_write);
    let mut topics = vec![
        one(names::SELF_TEST_TOPIC),
        TopicConfig::new(names::BENCHMARK_TOPIC, BENCHMARK_QUEUES, read_write),
        TopicConfig::new(cluster, CLUSTER_QUEUES, named(config.cluster_topic)),
        TopicConfig::new(broker, 1, named(config.broker_topic)),
        one(names::OFFSET_MOVED_TOPIC),
        TopicConfig::new(names::SCHEDULE_TOPIC, levels, read_write),
        one(&format!("{cluster}_REPLY_TOPIC")),
        TopicConfig::new(
            format!("{}REVIVE_LOG_{cluster}", names::SYSTEM_PREFIX),
            queues(config.revive_queues),
            read_write,
        ),
        one(&format!(
            "{}SYNC_BROKER_MEMBER_{broker}",
            names::SYSTEM_PREFIX
        )),
        one(names::OP_HALF_TOPIC),
    ];
    if config.auto_create_topic {
        let count = queues(config.default_topic_queues);
        topics.push(TopicConfig::new(
            names::AUTO_CREATE_TOPIC,
            count,
            read_write | PERM_INHERIT,
        ));
    }
    if config.trace_topic {
        topics.push(one(&config.trace_topic_name.0));
    }
    if config.timer_enable {
        topics.push(one(names::TIMER_TOPIC));
    }
    topics
}
