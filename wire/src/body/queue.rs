//! Owns the message queue as a value and as a key, and the tables keyed by it.
//!
//! Invariant: a table is written with its keys as objects, the only form Java accepts.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::{Error as _, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::BodyError;
use super::scalar::{number, or_default};
use super::writer::as_object_key;

/// A queue of a topic on a broker.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MessageQueue {
    /// Name of the broker.
    #[serde(deserialize_with = "or_default")]
    pub broker_name: String,
    /// Queue id.
    #[serde(deserialize_with = "number")]
    pub queue_id: i32,
    /// Topic.
    #[serde(deserialize_with = "or_default")]
    pub topic: String,
}

/// A table keyed by queue. Write it with [`super::to_json`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueTable<V>(pub BTreeMap<MessageQueue, V>);

impl<V> Default for QueueTable<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V> FromIterator<(MessageQueue, V)> for QueueTable<V> {
    fn from_iter<I: IntoIterator<Item = (MessageQueue, V)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl<V: Serialize> Serialize for QueueTable<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (queue, value) in &self.0 {
            let key = serde_json::to_string(queue).map_err(S::Error::custom)?;
            as_object_key(|| map.serialize_key(&key))?;
            map.serialize_value(value)?;
        }
        map.end()
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for QueueTable<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TableVisitor(PhantomData))
    }
}

struct TableVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for TableVisitor<V> {
    type Value = QueueTable<V>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a table keyed by message queue")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut table = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, V>()? {
            let queue = serde_json::from_str(&key)
                .map_err(|error| A::Error::custom(format!("key is no message queue: {error}")))?;
            table.insert(queue, value);
        }
        Ok(QueueTable(table))
    }
}

/// Offsets of a group in a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OffsetWrapper {
    /// End of the queue.
    #[serde(deserialize_with = "number")]
    pub broker_offset: i64,
    /// What the group has committed.
    #[serde(deserialize_with = "number")]
    pub consumer_offset: i64,
    /// Store time of the last message consumed.
    #[serde(deserialize_with = "number")]
    pub last_timestamp: i64,
    /// What the group has pulled.
    #[serde(deserialize_with = "number")]
    pub pull_offset: i64,
}

/// Answer to code 208.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumeStats {
    /// Messages consumed per second.
    pub consume_tps: f64,
    /// Offsets per queue.
    #[serde(deserialize_with = "or_default")]
    pub offset_table: QueueTable<OffsetWrapper>,
}

/// Answer to code 317.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumeStatsList {
    /// Address of the broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broker_addr: Option<String>,
    /// Statistics of each group.
    #[serde(deserialize_with = "or_default")]
    pub consume_stats_list: Vec<BTreeMap<String, Vec<ConsumeStats>>>,
    /// Sum of all lags.
    #[serde(deserialize_with = "number")]
    pub total_diff: i64,
    /// Sum of what is pulled but not committed.
    #[serde(deserialize_with = "number")]
    pub total_inflight_diff: i64,
}

/// Offsets of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopicOffset {
    /// Store time of the last message.
    #[serde(deserialize_with = "number")]
    pub last_update_timestamp: i64,
    /// One past the last message.
    #[serde(deserialize_with = "number")]
    pub max_offset: i64,
    /// The first message.
    #[serde(deserialize_with = "number")]
    pub min_offset: i64,
}

/// Answer to code 202.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopicStatsTable {
    /// Offsets per queue.
    #[serde(deserialize_with = "or_default")]
    pub offset_table: QueueTable<TopicOffset>,
    /// Messages stored per second.
    pub topic_put_tps: f64,
}

/// Body of code 220 and answer to code 222.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ResetOffsetBody {
    /// New offset per queue.
    #[serde(deserialize_with = "or_default")]
    pub offset_table: QueueTable<i64>,
}

impl ResetOffsetBody {
    /// The list form that C++ clients read.
    pub fn to_list_json(&self) -> Result<Vec<u8>, BodyError> {
        let entry = |(queue, offset): (&MessageQueue, &i64)| QueueOffset {
            broker_name: queue.broker_name.clone(),
            offset: *offset,
            queue_id: queue.queue_id,
            topic: queue.topic.clone(),
        };
        let offset_table = self.offset_table.0.iter().map(entry).collect();
        super::to_json(&ResetOffsetList { offset_table })
    }
}

/// A queue with an offset, the entry of the list form.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct QueueOffset {
    broker_name: String,
    offset: i64,
    queue_id: i32,
    topic: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResetOffsetList {
    offset_table: Vec<QueueOffset>,
}

/// Answers to codes 221 and 223.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumerStatusBody {
    /// Offsets per client and queue (code 223).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumer_table: Option<BTreeMap<String, QueueTable<i64>>>,
    /// Offsets per queue (code 221).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_queue_table: Option<QueueTable<i64>>,
}

/// Time span of a queue in the answer to code 303.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QueueTimeSpan {
    /// Store time of the last message consumed.
    #[serde(deserialize_with = "number")]
    pub consume_time_stamp: i64,
    /// How far the group is behind in time.
    #[serde(deserialize_with = "number")]
    pub delay_time: i64,
    /// Store time of the last message.
    #[serde(deserialize_with = "number")]
    pub max_time_stamp: i64,
    /// The queue.
    pub message_queue: MessageQueue,
    /// Store time of the first message.
    #[serde(deserialize_with = "number")]
    pub min_time_stamp: i64,
}

/// Answer to code 303.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsumeTimeSpanBody {
    /// Span of each queue.
    #[serde(deserialize_with = "or_default")]
    pub consume_time_span_set: Vec<QueueTimeSpan>,
}
