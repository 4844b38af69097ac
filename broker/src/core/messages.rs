//! What cores tell each other.
//!
//! Invariant: a message owns all it speaks of; shared tables are immutable (`Arc`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use shard::cold::KeyQuestion;
use wire::body::SubscriptionGroupConfig;
use wire::frame::Serialization;

use super::disks::DiskNews;
use super::frames::Frames;
use super::report::{Report, ReportQuery};
use crate::config::Config;
use crate::control::effects::{ClientLink, OffsetSet, Origin, PlacedTopic};
use crate::control::subscriptions::GroupSubscriptions;
use crate::control::transactions::CheckBack;

/// How to answer one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplyTo {
    /// Connection of the client.
    pub link: ClientLink,
    /// Number of the request.
    pub opaque: i32,
    /// Serialization of the request, used for the answer too.
    pub serialization: Serialization,
    /// Whether no answer is wanted.
    pub oneway: bool,
}

/// A stored message that is put into another queue (send-back, dead letters).
#[derive(Clone, Debug)]
pub struct PutOrder {
    /// Target topic.
    pub topic: String,
    /// Target queue.
    pub queue_id: i32,
    /// User flag.
    pub flag: i32,
    /// System flag.
    pub sys_flag: i32,
    /// Birth time in milliseconds.
    pub born_timestamp: i64,
    /// Birth host.
    pub born_host: SocketAddr,
    /// Deliveries so far.
    pub reconsume_times: i32,
    /// Body as stored.
    pub body: Vec<u8>,
    /// Properties.
    pub properties: Vec<u8>,
    /// Delay level, 0 for none.
    pub delay_level: i32,
    /// Who is answered.
    pub reply: ReplyTo,
}

/// A change every core must know.
#[derive(Clone, Debug)]
pub enum Change {
    /// A topic is new or different.
    Topic(Arc<PlacedTopic>),
    /// A topic is gone.
    TopicRemoved(Arc<str>),
    /// A group is new or different.
    Group(Arc<SubscriptionGroupConfig>),
    /// A group is gone, with its offsets if so.
    GroupRemoved(Arc<str>, bool),
    /// What a group may not do, by topic.
    Forbidden(Arc<str>, Arc<BTreeMap<String, i32>>),
    /// Subscriptions of a group.
    Subscriptions(Arc<GroupSubscriptions>),
    /// Whether an administrator wants a group to pull a topic instead of popping it: group, topic.
    Pulled(Arc<str>, Arc<str>, bool),
    /// Settings.
    Config(Arc<Config>),
}

/// A question of the control task to the shards of another core.
#[derive(Clone, Debug)]
pub enum Ask {
    /// A report.
    Report(Arc<ReportQuery>),
    /// The offset of a queue by store time (-1: its end).
    Offset {
        /// Topic.
        topic: String,
        /// Queue id.
        queue_id: i32,
        /// Store time in milliseconds.
        timestamp: i64,
    },
    /// The record at a physical offset.
    Record {
        /// Physical offset.
        physical_offset: i64,
    },
    /// Records by key.
    Key(Arc<KeyQuestion>),
    /// Whether everything told so far is as durable as the flush mode promises.
    Settle,
}

/// The answer of one core to an [`Ask`].
#[derive(Clone, Debug)]
pub enum Told {
    /// A report.
    Report(Box<Report>),
    /// `(queue id, found, min, max)`.
    Offset(i32, i64, i64, i64),
    /// A record, if there is one.
    Record(Option<Vec<u8>>),
    /// Records by key.
    Records(Vec<Vec<u8>>),
    /// Whether it is; a shard whose disk failed cannot make it so.
    Settled(bool),
}

/// One message between cores.
#[derive(Debug)]
pub enum MeshMessage {
    /// Requests for the receiver's queues: who asked, and the queue chosen on the way for a send.
    Requests(Frames<(Origin, Option<i32>)>),
    /// A request for the control task.
    Control {
        /// Who asked.
        origin: Origin,
        /// Whole frame.
        frame: Vec<u8>,
    },
    /// A request whose topic or group has to be created first.
    Create {
        /// Who asked.
        origin: Origin,
        /// Whole frame.
        frame: Vec<u8>,
    },
    /// An answer frame of a client to a request of the broker.
    ClientAnswer {
        /// Connection.
        link: ClientLink,
        /// Whole frame.
        frame: Vec<u8>,
    },
    /// Frames for connections of the receiver.
    Deliver(Frames<u64>),
    /// A client connection is gone.
    Closed(ClientLink),
    /// A group pulls from a topic with a subscription of its own.
    Pulling {
        /// Consumer group.
        group: Box<str>,
        /// Topic.
        topic: Box<str>,
    },
    /// A change of shared tables.
    Change(Change),
    /// About POP.
    Pop(super::pop::PopMessage),
    /// A question to a producer about an open transaction.
    CheckBack(Box<CheckBack>),
    /// A message to store.
    Put(Box<PutOrder>),
    /// Set offsets; with `reset`, the next pull starts there.
    SetOffsets {
        /// The offsets.
        sets: Arc<Vec<OffsetSet>>,
        /// Whether the next pull is moved too.
        reset: bool,
    },
    /// A question.
    Ask {
        /// Gathering it belongs to.
        gather: u64,
        /// The question.
        ask: Ask,
    },
    /// An answer.
    Told {
        /// Gathering it belongs to.
        gather: u64,
        /// The answer.
        told: Told,
    },
    /// A disk hangs or works again, or other brokers came or went.
    Disk(DiskNews),
    /// Drop expired segments now.
    CleanExpired,
}
