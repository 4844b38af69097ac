//! What is known of a message when it is explained: the facts a broker tells under its own request
//! code, and those gathered with the ordinary requests.
//!
//! Invariant: plain values; nothing here asks, judges or prints. What is not known is `None` or
//! empty, never a guess.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wire::body::{SubscriptionData, SubscriptionGroupConfig};
use wire::message::{RecordView, ids, properties};

/// What the shard of a queue tells of one message and one group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QueueFacts {
    /// The broker's clock in milliseconds.
    pub now_ms: i64,
    /// Shard of the queue.
    pub shard: u16,
    /// Oldest offset of the queue.
    pub min_offset: i64,
    /// One past the newest readable offset.
    pub max_offset: i64,
    /// Physical offset of the oldest record of the shard.
    pub log_min_offset: i64,
    /// One past the newest one.
    pub log_max_offset: i64,
    /// Up to where the device has it.
    pub log_synced_offset: i64,
    /// Whether answers wait for the device.
    pub sync_flush: bool,
    /// Why the shard takes no more messages, if so.
    pub refusing: Option<String>,
    /// The group's committed offset, -1 without one.
    pub committed: i64,
    /// Offset of the group's last pull, -1 when none was seen.
    pub pull_offset: i64,
    /// When that was, 0 when none was seen.
    pub pulled_ms: i64,
    /// Offset an administrator wants the group to go on at, -1 without one.
    pub reset_to: i64,
    /// Pulls of the group that wait in this queue for a message.
    pub pulls_waiting: usize,
    /// Pops of the group that wait at this shard for a message.
    pub pops_waiting: usize,
    /// Messages the group holds of this queue.
    pub held: usize,
    /// Who holds the message, if popped.
    pub holding: Option<HoldingFacts>,
    /// Until when the head of a queue popped in order waits for acknowledgements.
    pub blocked_until_ms: Option<i64>,
    /// The transaction whose half message this is.
    pub half: Option<HalfFacts>,
    /// Known deliveries to the group, oldest first.
    pub deliveries: Vec<DeliveryFacts>,
    /// How many there were in all.
    pub deliveries_count: usize,
    /// From when on no delivery is missing.
    pub deliveries_known_since_ms: i64,
}

/// A message in the hands of a consumer that popped it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HoldingFacts {
    /// Whether popped in order.
    pub ordered: bool,
    /// Whether acknowledged, but not yet those in front of it.
    pub acked: bool,
    /// When it was popped.
    pub pop_ms: i64,
    /// Until when it is invisible.
    pub due_ms: i64,
    /// How often it was popped in order before.
    pub count: i32,
}

/// A transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HalfFacts {
    /// How it stands.
    pub state: HalfState,
    /// Questions to its producers so far.
    pub checks: u32,
    /// Questions at most.
    pub checks_max: u32,
    /// Time of the last question, 0 without one.
    pub asked_ms: i64,
    /// Time of the next one; none while it is being prepared.
    pub due_ms: Option<i64>,
}

/// How a transaction stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HalfState {
    /// Undecided.
    Open,
    /// The final message is stored.
    Committed,
    /// Rolled back.
    RolledBack,
    /// Asked too often.
    GivenUp,
    /// Its topic is gone, or its record.
    Dropped,
    /// It ended too long ago to know how.
    #[default]
    Unknown,
}

/// Messages that a client got, the explained one among them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeliveryFacts {
    /// When the first of them left.
    pub first_ms: i64,
    /// When the last of them left.
    pub last_ms: i64,
    /// Address of the client.
    pub client: String,
    /// Whether popped.
    pub popped: bool,
}

/// What the control task of a broker tells of a queue and a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LockFacts {
    /// Client that has locked the queue.
    pub owner: Option<String>,
    /// When it renewed the lock.
    pub renewed_ms: i64,
    /// How long a lock lives without renewal.
    pub live_ms: i64,
}

/// A member of a consumer group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Client id.
    pub client_id: String,
    /// Its address.
    pub address: String,
}

/// What is known of the group on the message's broker.
#[derive(Clone, Debug, Default)]
pub struct GroupFacts {
    /// Name.
    pub name: String,
    /// Its settings; none when the broker does not know it.
    pub config: Option<SubscriptionGroupConfig>,
    /// Whether it may read the topic.
    pub may_read: bool,
    /// Members online.
    pub members: Vec<Member>,
    /// Whether each member gets everything.
    pub broadcast: bool,
    /// Subscriptions by topic.
    pub subscriptions: BTreeMap<String, SubscriptionData>,
    /// Members that subscribe differently, in words.
    pub conflicts: Vec<String>,
    /// The queue's lock.
    pub lock: LockFacts,
}

/// One stored copy of the message: as it was sent, as it waits, comes again, or is dead.
#[derive(Clone, Debug, Default)]
pub struct Copy {
    /// Name of the broker.
    pub broker: String,
    /// Address of the broker.
    pub address: String,
    /// Topic it stands in.
    pub topic: String,
    /// Queue it stands in.
    pub queue_id: i32,
    /// Its offset there.
    pub queue_offset: i64,
    /// Its place in the log.
    pub physical_offset: i64,
    /// Bytes of the record.
    pub bytes: usize,
    /// When it was stored.
    pub store_ms: i64,
    /// When it was made.
    pub born_ms: i64,
    /// Where it was made.
    pub born_host: String,
    /// Its offset id.
    pub offset_id: String,
    /// How often it came again.
    pub reconsume_times: i32,
    /// Half message that this one completes, 0 without one.
    pub prepared_offset: i64,
    /// Properties as stored.
    pub properties: Vec<u8>,
    /// What the shard tells; none from a broker that is not Pinion.
    pub queue: Option<QueueFacts>,
}

impl Copy {
    /// Takes what a stored record says.
    #[must_use]
    pub fn of(view: &RecordView<'_>, broker: &str, address: &str) -> Self {
        let mut id = Vec::new();
        ids::offset_msg_id(&mut id, view.store_host(), view.physical_offset());
        Self {
            broker: broker.to_owned(),
            address: address.to_owned(),
            topic: String::from_utf8_lossy(view.topic()).into_owned(),
            queue_id: view.queue_id(),
            queue_offset: view.queue_offset(),
            physical_offset: view.physical_offset(),
            bytes: view.total_len(),
            store_ms: view.store_timestamp(),
            born_ms: view.born_timestamp(),
            born_host: view.born_host().to_string(),
            offset_id: String::from_utf8_lossy(&id).into_owned(),
            reconsume_times: view.reconsume_times(),
            prepared_offset: view.prepared_transaction_offset(),
            properties: view.properties().to_vec(),
            queue: None,
        }
    }

    /// A property.
    #[must_use]
    pub fn property(&self, name: &str) -> Option<&str> {
        properties::get_str(&self.properties, name)
    }

    /// A property that is a number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<i64> {
        self.property(name)?.trim().parse().ok()
    }
}

/// What was asked about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// In words.
    pub what: String,
    /// Topic, if it was named.
    pub topic: Option<String>,
    /// Consumer group, if one was named.
    pub group: Option<String>,
}

/// Why no record was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// No broker has the topic.
    NoTopic,
    /// The topic has fewer queues.
    NoQueue {
        /// Its queues.
        queues: i32,
    },
    /// The offset is not, or no longer, in the queue.
    NoOffset {
        /// The offset.
        offset: i64,
        /// Oldest offset.
        min: i64,
        /// One past the newest.
        max: i64,
        /// Where the group stands, -1 without an offset.
        committed: i64,
    },
    /// The physical offset is not, or no longer, in the log.
    NoPlace {
        /// The physical offset.
        offset: i64,
        /// Oldest of the shard.
        min: i64,
        /// One past the newest.
        max: i64,
    },
    /// No record of the topic has the key.
    #[default]
    NoKey,
    /// An offset id of a broker that the name server does not know.
    NoBroker {
        /// Its address.
        address: String,
    },
}

/// Everything known of one message.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// What was asked about.
    pub asked: Asked,
    /// The topic the message was sent to.
    pub topic: String,
    /// Now, by the broker's clock where it told it.
    pub now_ms: i64,
    /// Copies, oldest first; the last one is where the message is now.
    pub copies: Vec<Copy>,
    /// Why there is none.
    pub missing: Missing,
    /// Store time of the oldest message of the topic, where known.
    pub earliest_ms: Option<i64>,
    /// When the unique key was made, as far as it tells.
    pub key_made_ms: Option<i64>,
    /// Permission bits of the topic.
    pub topic_perm: Option<i32>,
    /// Groups that read the topic.
    pub readers: Vec<String>,
    /// The group, if one was named.
    pub group: Option<GroupFacts>,
    /// Delays of the levels, in milliseconds.
    pub delays_ms: Vec<i64>,
    /// Unique keys of other messages with the same key.
    pub others: Vec<String>,
    /// Brokers that did not answer, with the reason.
    pub silent: Vec<String>,
}
