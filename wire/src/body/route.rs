//! Owns routes and the shape of the cluster, as a name server tells them.
//!
//! Invariant: broker ids are keys without quotes for old clients, and there is no white space,
//! because the Go client cuts the address table apart as text.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::BodyError;
use super::scalar::{flag, number, or_default};

/// Clients of this version and later get standard JSON without asking.
pub const STANDARD_JSON_VERSION_MIN: i32 = 401;

/// Broker id of the master.
pub const MASTER_ID: i64 = 0;

/// Queues of a topic on a broker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QueueData {
    /// Name of the broker.
    #[serde(deserialize_with = "or_default")]
    pub broker_name: String,
    /// Permission bits.
    #[serde(deserialize_with = "number")]
    pub perm: i32,
    /// Queues that are read.
    #[serde(deserialize_with = "number")]
    pub read_queue_nums: i32,
    /// Topic flags.
    #[serde(deserialize_with = "number")]
    pub topic_sys_flag: i32,
    /// Queues that are written.
    #[serde(deserialize_with = "number")]
    pub write_queue_nums: i32,
}

/// A broker and its replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BrokerData {
    /// Addresses by broker id.
    #[serde(deserialize_with = "or_default")]
    pub broker_addrs: BTreeMap<i64, String>,
    /// Name of the broker.
    #[serde(deserialize_with = "or_default")]
    pub broker_name: String,
    /// Name of the cluster.
    #[serde(deserialize_with = "or_default")]
    pub cluster: String,
    /// Whether the smallest replica may act as master.
    #[serde(deserialize_with = "flag")]
    pub enable_acting_master: bool,
    /// Name of the zone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone_name: Option<String>,
}

/// Answer to code 105.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopicRouteData {
    /// Brokers that have the topic.
    #[serde(deserialize_with = "or_default")]
    pub broker_datas: Vec<BrokerData>,
    /// Filter servers by broker address.
    #[serde(deserialize_with = "or_default")]
    pub filter_server_table: BTreeMap<String, Vec<String>>,
    /// Configuration of an order topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order_topic_conf: Option<String>,
    /// Queues per broker.
    #[serde(deserialize_with = "or_default")]
    pub queue_datas: Vec<QueueData>,
    /// Mappings of a static topic, passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic_queue_mapping_by_broker: Option<BTreeMap<String, Value>>,
}

impl TopicRouteData {
    /// Writes the route, broker ids quoted when `standard_json`.
    pub fn to_json(&self, standard_json: bool) -> Result<Vec<u8>, BodyError> {
        super::writer::write(self, standard_json)
    }
}

/// Answer to code 106.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterInfo {
    /// Brokers by name.
    #[serde(deserialize_with = "or_default")]
    pub broker_addr_table: BTreeMap<String, BrokerData>,
    /// Names of brokers by cluster.
    #[serde(deserialize_with = "or_default")]
    pub cluster_addr_table: BTreeMap<String, Vec<String>>,
}

impl ClusterInfo {
    /// Writes the cluster, broker ids quoted when `standard_json`; Apache never quotes them here.
    pub fn to_json(&self, standard_json: bool) -> Result<Vec<u8>, BodyError> {
        super::writer::write(self, standard_json)
    }
}

/// Answer to code 901.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BrokerMemberGroupBody {
    /// The group.
    #[serde(deserialize_with = "or_default")]
    pub broker_member_group: BrokerMemberGroup,
}

/// The replicas of a broker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BrokerMemberGroup {
    /// Addresses by broker id.
    #[serde(deserialize_with = "or_default")]
    pub broker_addrs: BTreeMap<i64, String>,
    /// Name of the broker.
    #[serde(deserialize_with = "or_default")]
    pub broker_name: String,
    /// Name of the cluster.
    #[serde(deserialize_with = "or_default")]
    pub cluster: String,
}
