//! Owns the configuration of consumer groups.
//!
//! Invariant: defaults are those of Apache RocketMQ.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client::SubscriptionData;
use super::scalar::{flag, number, or_default};
use super::topic::DataVersion;

/// Consumptions of a message again before it is a dead letter.
pub const RETRY_TIMES_MAX_DEFAULT: i32 = 16;
/// Minutes a client may take to consume a message.
pub const CONSUME_TIMEOUT_MINUTES_DEFAULT: i32 = 15;

/// Configuration of a consumer group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SubscriptionGroupConfig {
    /// Attributes.
    #[serde(deserialize_with = "or_default")]
    pub attributes: BTreeMap<String, String>,
    /// Broker to read from.
    #[serde(deserialize_with = "number")]
    pub broker_id: i64,
    /// Whether members may consume by broadcast.
    #[serde(deserialize_with = "flag")]
    pub consume_broadcast_enable: bool,
    /// Whether the group may consume.
    #[serde(deserialize_with = "flag")]
    pub consume_enable: bool,
    /// Whether the group may begin at the first message.
    #[serde(deserialize_with = "flag")]
    pub consume_from_min_enable: bool,
    /// Whether the group consumes in order.
    #[serde(deserialize_with = "flag")]
    pub consume_message_orderly: bool,
    /// Minutes a client may take to consume a message.
    #[serde(deserialize_with = "number")]
    pub consume_timeout_minute: i32,
    /// Name.
    #[serde(deserialize_with = "or_default")]
    pub group_name: String,
    /// Delays between consumptions, passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_retry_policy: Option<Value>,
    /// Flags.
    #[serde(deserialize_with = "number")]
    pub group_sys_flag: i32,
    /// Whether members are told when other members come and go.
    #[serde(deserialize_with = "flag")]
    pub notify_consumer_ids_changed_enable: bool,
    /// Consumptions of a message again before it is a dead letter.
    #[serde(deserialize_with = "number")]
    pub retry_max_times: i32,
    /// Queues of the retry topic.
    #[serde(deserialize_with = "number")]
    pub retry_queue_nums: i32,
    /// Subscriptions configured on the server, passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subscription_data_set: Option<Value>,
    /// Broker to read from when consumption is slow.
    #[serde(deserialize_with = "number")]
    pub which_broker_when_consume_slowly: i64,
}

impl Default for SubscriptionGroupConfig {
    fn default() -> Self {
        Self {
            attributes: BTreeMap::new(),
            broker_id: 0,
            consume_broadcast_enable: true,
            consume_enable: true,
            consume_from_min_enable: true,
            consume_message_orderly: false,
            consume_timeout_minute: CONSUME_TIMEOUT_MINUTES_DEFAULT,
            group_name: String::new(),
            group_retry_policy: Some(json!({"type": "CUSTOMIZED"})),
            group_sys_flag: 0,
            notify_consumer_ids_changed_enable: true,
            retry_max_times: RETRY_TIMES_MAX_DEFAULT,
            retry_queue_nums: 1,
            subscription_data_set: None,
            which_broker_when_consume_slowly: 1,
        }
    }
}

impl SubscriptionGroupConfig {
    /// A group with default settings.
    pub fn new(group_name: impl Into<String>) -> Self {
        Self {
            group_name: group_name.into(),
            ..Self::default()
        }
    }
}

/// The group table: answer to code 201 and file `subscriptionGroup.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SubscriptionGroupTable {
    /// Version of the table.
    #[serde(deserialize_with = "or_default")]
    pub data_version: DataVersion,
    /// Topics a group may not read.
    #[serde(deserialize_with = "or_default")]
    pub forbidden_table: BTreeMap<String, BTreeMap<String, i32>>,
    /// Groups by name.
    #[serde(deserialize_with = "or_default")]
    pub subscription_group_table: BTreeMap<String, SubscriptionGroupConfig>,
}

/// Body of code 225.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SubscriptionGroupList {
    /// Groups to create or change.
    #[serde(deserialize_with = "or_default")]
    pub group_config_list: Vec<SubscriptionGroupConfig>,
}

/// Answer to code 300.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GroupList {
    /// Names.
    #[serde(deserialize_with = "or_default")]
    pub group_list: Vec<String>,
}

/// Answer to code 345.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QuerySubscriptionBody {
    /// Consumer group.
    #[serde(deserialize_with = "or_default")]
    pub group: String,
    /// Its subscription to the topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subscription_data: Option<SubscriptionData>,
    /// Topic.
    #[serde(deserialize_with = "or_default")]
    pub topic: String,
}

/// Answer to code 353.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GroupForbiddenBody {
    /// Consumer group.
    #[serde(deserialize_with = "or_default")]
    pub group: String,
    /// Whether the group may read the topic.
    #[serde(deserialize_with = "flag")]
    pub readable: bool,
    /// Topic.
    #[serde(deserialize_with = "or_default")]
    pub topic: String,
}
