//! Owns topic configuration, data versions and lists of topics.
//!
//! Invariant: defaults are those of Apache RocketMQ.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::scalar::{flag, java_enum, number, or_default};

/// Permission bit: messages may be read.
pub const PERM_READ: i32 = 4;
/// Permission bit: messages may be written.
pub const PERM_WRITE: i32 = 2;
/// Permission bit: topics may be created from this one.
pub const PERM_INHERIT: i32 = 1;
/// Queues of a topic when nobody says otherwise.
pub const QUEUE_NUMS_DEFAULT: i32 = 16;

java_enum! {
    /// Whether messages of a topic have one tag or several.
    TopicFilterType, default SingleTag {
        SingleTag = "SINGLE_TAG",
        MultiTag = "MULTI_TAG",
    }
}

/// Configuration of a topic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopicConfig {
    /// Attributes such as `message.type`.
    #[serde(deserialize_with = "or_default")]
    pub attributes: BTreeMap<String, String>,
    /// Whether it is an order topic.
    #[serde(deserialize_with = "flag")]
    pub order: bool,
    /// Permission bits.
    #[serde(deserialize_with = "number")]
    pub perm: i32,
    /// Queues that are read.
    #[serde(deserialize_with = "number")]
    pub read_queue_nums: i32,
    /// One tag or several.
    pub topic_filter_type: TopicFilterType,
    /// Name.
    #[serde(deserialize_with = "or_default")]
    pub topic_name: String,
    /// Topic flags: 1 unit, 2 unit subscription.
    #[serde(deserialize_with = "number")]
    pub topic_sys_flag: i32,
    /// Queues that are written.
    #[serde(deserialize_with = "number")]
    pub write_queue_nums: i32,
}

impl Default for TopicConfig {
    fn default() -> Self {
        Self {
            attributes: BTreeMap::new(),
            order: false,
            perm: PERM_READ | PERM_WRITE,
            read_queue_nums: QUEUE_NUMS_DEFAULT,
            topic_filter_type: TopicFilterType::SingleTag,
            topic_name: String::new(),
            topic_sys_flag: 0,
            write_queue_nums: QUEUE_NUMS_DEFAULT,
        }
    }
}

impl TopicConfig {
    /// A topic with so many queues to read and to write.
    pub fn new(topic_name: impl Into<String>, queue_nums: i32, perm: i32) -> Self {
        Self {
            topic_name: topic_name.into(),
            read_queue_nums: queue_nums,
            write_queue_nums: queue_nums,
            perm,
            ..Self::default()
        }
    }
}

/// Version of a table; ordered by state version, counter, timestamp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DataVersion {
    /// Goes up with every change.
    #[serde(deserialize_with = "number")]
    pub counter: i64,
    /// Goes up with every change of master under a controller.
    #[serde(deserialize_with = "number")]
    pub state_version: i64,
    /// Time of the last change.
    #[serde(deserialize_with = "number")]
    pub timestamp: i64,
}

impl DataVersion {
    /// The version after a change at a time.
    pub fn next(self, now_ms: i64) -> Self {
        Self {
            counter: self.counter.wrapping_add(1),
            timestamp: now_ms,
            ..self
        }
    }
}

impl Ord for DataVersion {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |version: &Self| (version.state_version, version.counter, version.timestamp);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for DataVersion {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The topic table: answer to code 21, file `topics.json`, part of a registration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopicConfigTable {
    /// Version of the table.
    #[serde(deserialize_with = "or_default")]
    pub data_version: DataVersion,
    /// Version of the mappings of static topics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapping_data_version: Option<DataVersion>,
    /// Topics by name.
    #[serde(deserialize_with = "or_default")]
    pub topic_config_table: BTreeMap<String, TopicConfig>,
    /// Mappings of static topics, passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic_queue_mapping_detail_map: Option<BTreeMap<String, Value>>,
    /// Mappings of static topics in short form, passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic_queue_mapping_info_map: Option<BTreeMap<String, Value>>,
}

/// Body of code 18.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopicConfigList {
    /// Topics to create or change.
    #[serde(deserialize_with = "or_default")]
    pub topic_config_list: Vec<TopicConfig>,
}

/// A list of topics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopicList {
    /// Address of a broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broker_addr: Option<String>,
    /// Names.
    #[serde(deserialize_with = "or_default")]
    pub topic_list: Vec<String>,
}

/// A table of strings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KVTable {
    /// The entries.
    #[serde(deserialize_with = "or_default")]
    pub table: BTreeMap<String, String>,
}
