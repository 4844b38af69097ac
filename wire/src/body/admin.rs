//! Owns the bodies admin tools read: connections, statistics, replication state.
//!
//! Invariant: what a broker only relays (a consumer's running info) is passed through untouched.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::client::{ConsumeFromWhere, ConsumeType, MessageModel, SubscriptionData};
use super::scalar::{flag, number, or_default, text};

/// A connection of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Connection {
    /// Address of the client.
    #[serde(deserialize_with = "or_default")]
    pub client_addr: String,
    /// Id of the client.
    #[serde(deserialize_with = "or_default")]
    pub client_id: String,
    /// Name of its language.
    #[serde(deserialize_with = "text")]
    pub language: String,
    /// Version ordinal of the client.
    #[serde(deserialize_with = "number")]
    pub version: i32,
}

/// Answer to code 203.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumerConnection {
    /// Connections of the members.
    #[serde(deserialize_with = "or_default")]
    pub connection_set: Vec<Connection>,
    /// Where a new group begins.
    pub consume_from_where: ConsumeFromWhere,
    /// How the group gets its messages.
    pub consume_type: ConsumeType,
    /// Whether the members share the messages.
    pub message_model: MessageModel,
    /// Subscriptions by topic.
    #[serde(deserialize_with = "or_default")]
    pub subscription_table: BTreeMap<String, SubscriptionData>,
}

/// Answer to code 204.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProducerConnection {
    /// Connections of the producers.
    #[serde(deserialize_with = "or_default")]
    pub connection_set: Vec<Connection>,
}

/// A producer in the answer to code 328.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProducerInfo {
    /// Id of the client.
    #[serde(deserialize_with = "or_default")]
    pub client_id: String,
    /// Name of its language.
    #[serde(deserialize_with = "text")]
    pub language: String,
    /// Time of the last heartbeat.
    #[serde(deserialize_with = "number")]
    pub last_update_timestamp: i64,
    /// Address of the client.
    #[serde(rename = "remoteIP", deserialize_with = "or_default")]
    pub remote_ip: String,
    /// Version ordinal of the client.
    #[serde(deserialize_with = "number")]
    pub version: i32,
}

/// Answer to code 328.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProducerTableInfo {
    /// Producers by group.
    #[serde(deserialize_with = "or_default")]
    pub data: BTreeMap<String, Vec<ProducerInfo>>,
}

/// A consumer's running info (code 307), relayed as the JSON text the client sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsumerRunningInfo(pub Vec<u8>);

/// Answer to code 309.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumeMessageDirectlyResult {
    /// Whether the listener commits by itself.
    #[serde(deserialize_with = "flag")]
    pub auto_commit: bool,
    /// `CR_SUCCESS` and others.
    #[serde(deserialize_with = "or_default")]
    pub consume_result: String,
    /// Whether the listener is orderly.
    #[serde(deserialize_with = "flag")]
    pub order: bool,
    /// Text of an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
    /// Time taken.
    #[serde(deserialize_with = "number")]
    pub spent_time_mills: i64,
}

/// Statistics over a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BrokerStatsItem {
    /// Average per call.
    pub avgpt: f64,
    /// Sum.
    #[serde(deserialize_with = "number")]
    pub sum: i64,
    /// Per second.
    pub tps: f64,
}

/// Answer to code 315.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BrokerStatsData {
    /// The last day.
    pub stats_day: BrokerStatsItem,
    /// The last hour.
    pub stats_hour: BrokerStatsItem,
    /// The last minute.
    pub stats_minute: BrokerStatsItem,
}

/// A unit of a consume queue in the answer to code 321.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumeQueueData {
    /// Bits of compiled filters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bit_map: Option<String>,
    /// Whether the group's filter accepts the message.
    #[serde(deserialize_with = "flag")]
    pub eval: bool,
    /// Extended unit, passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extend_data_json: Option<String>,
    /// Text about the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub msg: Option<String>,
    /// Offset in the log.
    #[serde(deserialize_with = "number")]
    pub physic_offset: i64,
    /// Size of the record.
    #[serde(deserialize_with = "number")]
    pub physic_size: i32,
    /// Code of the tags.
    #[serde(deserialize_with = "number")]
    pub tags_code: i64,
}

/// Answer to code 321.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QueryConsumeQueueBody {
    /// Filter of the group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter_data: Option<String>,
    /// One past the last unit.
    #[serde(deserialize_with = "number")]
    pub max_queue_index: i64,
    /// The first unit.
    #[serde(deserialize_with = "number")]
    pub min_queue_index: i64,
    /// Units.
    #[serde(deserialize_with = "or_default")]
    pub queue_data: Vec<ConsumeQueueData>,
    /// Subscription of the group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subscription_data: Option<SubscriptionData>,
}

/// A replica in the answer to code 907.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HAConnectionRuntimeInfo {
    /// Address of the replica.
    #[serde(deserialize_with = "or_default")]
    pub addr: String,
    /// How far it is behind.
    #[serde(deserialize_with = "number")]
    pub diff: i64,
    /// Whether it counts as in sync.
    #[serde(deserialize_with = "flag")]
    pub in_sync: bool,
    /// What it has acknowledged.
    #[serde(deserialize_with = "number")]
    pub slave_ack_offset: i64,
    /// Where sending is.
    #[serde(deserialize_with = "number")]
    pub transfer_from_where: i64,
    /// Bytes sent per second.
    #[serde(deserialize_with = "number")]
    pub transferred_byte_in_second: i64,
}

/// Answer to code 907.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HARuntimeInfo {
    /// State of a replica's connection to its master, passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ha_client_runtime_info: Option<Value>,
    /// Connected replicas.
    #[serde(deserialize_with = "or_default")]
    pub ha_connection_info: Vec<HAConnectionRuntimeInfo>,
    /// Replicas in sync.
    #[serde(deserialize_with = "number")]
    pub in_sync_slave_nums: i32,
    /// Whether this broker is the master.
    #[serde(deserialize_with = "flag")]
    pub master: bool,
    /// End of the master's log.
    #[serde(deserialize_with = "number")]
    pub master_commit_log_max_offset: i64,
}
