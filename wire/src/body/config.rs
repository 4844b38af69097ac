//! Owns the tables a broker keeps in files and replicas ask for: offsets and request modes.
//!
//! Invariant: queue ids and delay levels are keys without quotes, as Apache writes them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::client::SetMessageRequestModeBody;
use super::scalar::or_default;
use super::topic::DataVersion;

/// File `consumerOffset.json` and answer to code 43.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumerOffsetTable {
    /// Version of the table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_version: Option<DataVersion>,
    /// Offsets by `topic@group` and queue id.
    #[serde(deserialize_with = "or_default")]
    pub offset_table: BTreeMap<String, BTreeMap<i32, i64>>,
}

/// File `delayOffset.json` and answer to code 45.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DelayOffsetTable {
    /// Version of the table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_version: Option<DataVersion>,
    /// Offsets by delay level.
    #[serde(deserialize_with = "or_default")]
    pub offset_table: BTreeMap<i32, i64>,
}

/// File `messageRequestMode.json` and answer to code 402.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MessageRequestModeTable {
    /// Modes by topic and group.
    #[serde(deserialize_with = "or_default")]
    pub message_request_mode_map: BTreeMap<String, BTreeMap<String, SetMessageRequestModeBody>>,
}

/// File `kvConfig.json` of a name server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KVConfigTable {
    /// Values by namespace and key.
    #[serde(deserialize_with = "or_default")]
    pub config_table: BTreeMap<String, BTreeMap<String, String>>,
}

/// Answer to code 308.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CorrectionOffsetBody {
    /// Offsets by queue id.
    #[serde(deserialize_with = "or_default")]
    pub correction_offsets: BTreeMap<i32, i64>,
}
