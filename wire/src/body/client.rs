//! Owns the bodies producers and consumers send: heartbeats, subscriptions, acknowledgements.
//!
//! Invariant: numbers may come as strings and enums as positions, as C++ clients write them.

use serde::{Deserialize, Deserializer, Serialize};

use super::queue::MessageQueue;
use super::scalar::{flag, java_enum, number, numbers, or_default};

java_enum! {
    /// How a consumer gets its messages.
    ConsumeType, default ConsumePassively {
        ConsumeActively = "CONSUME_ACTIVELY",
        ConsumePassively = "CONSUME_PASSIVELY",
        ConsumePop = "CONSUME_POP",
    }
}

java_enum! {
    /// Whether the members of a group share the messages.
    MessageModel, default Clustering {
        Broadcasting = "BROADCASTING",
        Clustering = "CLUSTERING",
    }
}

java_enum! {
    /// Where a new group begins.
    ConsumeFromWhere, default LastOffset {
        LastOffset = "CONSUME_FROM_LAST_OFFSET",
        LastOffsetAndFromMinWhenBootFirst = "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
        MinOffset = "CONSUME_FROM_MIN_OFFSET",
        MaxOffset = "CONSUME_FROM_MAX_OFFSET",
        FirstOffset = "CONSUME_FROM_FIRST_OFFSET",
        Timestamp = "CONSUME_FROM_TIMESTAMP",
    }
}

/// Expression type of a tag subscription.
pub const EXPRESSION_TAG: &str = "TAG";
/// Expression type of a SQL92 subscription.
pub const EXPRESSION_SQL92: &str = "SQL92";

fn expression_tag() -> String {
    EXPRESSION_TAG.to_owned()
}

fn expression_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let given = Option::<String>::deserialize(deserializer)?;
    Ok(given
        .filter(|given| !given.is_empty())
        .unwrap_or_else(expression_tag))
}

/// Body of code 34.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HeartbeatData {
    /// Id of the client.
    #[serde(rename = "clientID", deserialize_with = "or_default")]
    pub client_id: String,
    /// Consumer groups of the client.
    #[serde(deserialize_with = "or_default")]
    pub consumer_data_set: Vec<ConsumerData>,
    /// Fingerprint of the subscriptions; 0 in a heartbeat of the first version.
    #[serde(deserialize_with = "number")]
    pub heartbeat_fingerprint: i32,
    /// Producer groups of the client.
    #[serde(deserialize_with = "or_default")]
    pub producer_data_set: Vec<ProducerData>,
    /// Whether the subscriptions are left out because they did not change.
    #[serde(alias = "isWithoutSub", deserialize_with = "flag")]
    pub without_sub: bool,
}

/// A producer group in a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProducerData {
    /// Name of the group.
    #[serde(deserialize_with = "or_default")]
    pub group_name: String,
}

/// A consumer group in a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumerData {
    /// Where a new group begins.
    pub consume_from_where: ConsumeFromWhere,
    /// How the consumer gets its messages.
    pub consume_type: ConsumeType,
    /// Name of the group.
    #[serde(deserialize_with = "or_default")]
    pub group_name: String,
    /// Whether the members share the messages.
    pub message_model: MessageModel,
    /// What the group subscribes to.
    #[serde(deserialize_with = "or_default")]
    pub subscription_data_set: Vec<SubscriptionData>,
    /// Unit mode.
    #[serde(deserialize_with = "flag")]
    pub unit_mode: bool,
}

/// A subscription to a topic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SubscriptionData {
    /// Class filter, not supported by anybody any more.
    #[serde(deserialize_with = "flag")]
    pub class_filter_mode: bool,
    /// Hashes of the tags, as the client computed them.
    #[serde(deserialize_with = "numbers")]
    pub code_set: Vec<i64>,
    /// [`EXPRESSION_TAG`] or [`EXPRESSION_SQL92`].
    #[serde(deserialize_with = "expression_type")]
    pub expression_type: String,
    /// The expression.
    #[serde(deserialize_with = "or_default")]
    pub sub_string: String,
    /// Time of the subscription; newer replaces older.
    #[serde(deserialize_with = "number")]
    pub sub_version: i64,
    /// Tags.
    #[serde(deserialize_with = "or_default")]
    pub tags_set: Vec<String>,
    /// Topic.
    #[serde(deserialize_with = "or_default")]
    pub topic: String,
}

impl Default for SubscriptionData {
    fn default() -> Self {
        Self {
            class_filter_mode: false,
            code_set: Vec::new(),
            expression_type: expression_tag(),
            sub_string: String::new(),
            sub_version: 0,
            tags_set: Vec::new(),
            topic: String::new(),
        }
    }
}

/// Body of code 46.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckClientConfigBody {
    /// Id of the client.
    #[serde(deserialize_with = "or_default")]
    pub client_id: String,
    /// Consumer group.
    #[serde(deserialize_with = "or_default")]
    pub group: String,
    /// Namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The subscription to check.
    #[serde(deserialize_with = "or_default")]
    pub subscription_data: SubscriptionData,
}

/// Answer to code 38.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumerListBody {
    /// Ids of the members.
    #[serde(deserialize_with = "or_default")]
    pub consumer_id_list: Vec<String>,
}

/// Body of codes 41 and 42.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LockBatchRequest {
    /// Id of the client.
    #[serde(deserialize_with = "or_default")]
    pub client_id: String,
    /// Consumer group.
    #[serde(deserialize_with = "or_default")]
    pub consumer_group: String,
    /// Queues to lock or unlock.
    #[serde(deserialize_with = "or_default")]
    pub mq_set: Vec<MessageQueue>,
    /// Whether other brokers of the group must not be asked.
    #[serde(deserialize_with = "flag")]
    pub only_this_broker: bool,
}

/// Answer to code 41.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LockBatchResponse {
    /// Queues the client holds now.
    #[serde(rename = "lockOKMQSet", deserialize_with = "or_default")]
    pub lock_ok_mq_set: Vec<MessageQueue>,
}

/// Body of code 400.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QueryAssignmentRequest {
    /// Id of the client.
    #[serde(deserialize_with = "or_default")]
    pub client_id: String,
    /// Consumer group.
    #[serde(deserialize_with = "or_default")]
    pub consumer_group: String,
    /// Whether the members share the messages.
    pub message_model: MessageModel,
    /// Name of the allocation strategy.
    #[serde(deserialize_with = "or_default")]
    pub strategy_name: String,
    /// Topic.
    #[serde(deserialize_with = "or_default")]
    pub topic: String,
}

java_enum! {
    /// Whether a group pulls or pops.
    MessageRequestMode, default Pull {
        Pull = "PULL",
        Pop = "POP",
    }
}

/// Answer to code 400. Absent tells the client to keep what it has, empty to give everything up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QueryAssignmentResponse {
    /// Queues of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_queue_assignments: Option<Vec<MessageQueueAssignment>>,
}

/// A queue given to a client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MessageQueueAssignment {
    /// Further properties.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attachments: Option<std::collections::BTreeMap<String, String>>,
    /// The queue; id -1 stands for all queues of the broker.
    pub message_queue: MessageQueue,
    /// How to get its messages.
    pub mode: MessageRequestMode,
}

/// Body of code 401.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SetMessageRequestModeBody {
    /// Consumer group.
    #[serde(deserialize_with = "or_default")]
    pub consumer_group: String,
    /// Pull or pop.
    pub mode: MessageRequestMode,
    /// Queues shared by how many clients in pop mode.
    #[serde(deserialize_with = "number")]
    pub pop_share_queue_num: i32,
    /// Topic.
    #[serde(deserialize_with = "or_default")]
    pub topic: String,
}

/// Body of code 200151.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BatchAckBody {
    /// What is acknowledged.
    #[serde(deserialize_with = "or_default")]
    pub acks: Vec<BatchAck>,
    /// Name of the broker.
    #[serde(deserialize_with = "or_default")]
    pub broker_name: String,
}

/// Acknowledgements of one pop of a queue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BatchAck {
    /// Bit n stands for the message at start offset + n; little-endian bytes.
    #[serde(
        rename = "b",
        deserialize_with = "bit_set",
        serialize_with = "bit_set_text"
    )]
    pub bit_set: Vec<u8>,
    /// Consumer group.
    #[serde(rename = "c", deserialize_with = "or_default")]
    pub consumer_group: String,
    /// Invisible time.
    #[serde(rename = "it", deserialize_with = "number")]
    pub invisible_time: i64,
    /// Pop time.
    #[serde(rename = "pt", deserialize_with = "number")]
    pub pop_time: i64,
    /// Queue id.
    #[serde(rename = "q", deserialize_with = "number")]
    pub queue_id: i32,
    /// `1` for a retry topic, `2` for its second form, `0` otherwise.
    #[serde(rename = "r", deserialize_with = "super::scalar::text")]
    pub retry: String,
    /// Revive queue id.
    #[serde(rename = "rq", deserialize_with = "number")]
    pub revive_queue_id: i32,
    /// Start offset of the pop.
    #[serde(rename = "so", deserialize_with = "number")]
    pub start_offset: i64,
    /// Topic.
    #[serde(rename = "t", deserialize_with = "or_default")]
    pub topic: String,
}

/// Reads a bit set from base64 text or from a list of bytes; Rust clients send the latter.
fn bit_set<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    use serde::de::Error;
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Text(String),
        Bytes(Vec<i16>),
    }
    match Option::<Form>::deserialize(deserializer)? {
        None => Ok(Vec::new()),
        Some(Form::Text(text)) => {
            base64_decode(&text).ok_or_else(|| D::Error::custom("bit set is not base64"))
        }
        // Java's bytes are signed, others' are not; both name the same eight bits.
        Some(Form::Bytes(bytes)) => Ok(bytes.into_iter().map(|byte| byte as u8).collect()),
    }
}

fn bit_set_text<S: serde::Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&base64_encode(bytes))
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Reads base64 with or without padding.
pub(crate) fn base64_decode(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=');
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    let (mut held, mut held_bits) = (0u32, 0u32);
    for byte in text.bytes() {
        let value = BASE64.iter().position(|known| *known == byte)?;
        held = (held << 6 | value as u32) & 0xFFFF;
        held_bits += 6;
        if held_bits >= 8 {
            held_bits -= 8;
            bytes.push((held >> held_bits) as u8);
        }
    }
    Some(bytes)
}

/// Writes base64 with padding.
pub(crate) fn base64_encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let group = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let index = (group >> (18 - 6 * place)) & 0x3F;
            let digit = BASE64.get(index as usize).copied().unwrap_or(b'=');
            let is_padding = place > chunk.len() as u32;
            text.push(if is_padding { '=' } else { char::from(digit) });
        }
    }
    text
}
