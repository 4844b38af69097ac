//! Everything one core owns besides its machine.
//!
//! Invariant: handlers change only this state and queue what has to leave (frames, messages,
//! driver orders); the turn of the loop carries it out. So handlers never wait.

use std::collections::VecDeque;
use std::sync::Arc;

use shard::mesh::MeshEnd;
use shard::queue::QueueIndex;
use shard::runtime::Now;
use shard::{Refusal, Shard, StoreError};
use wire::codes::response;
use wire::header::{Header, Reply, SendAnswer, encode_reply};

use super::connections::Connections;
use super::control_task::ControlTask;
use super::directory::{Directory, NO_QUEUE};
use super::frames::Frames;
use super::messages::{MeshMessage, ReplyTo};
use super::namesrv_task::NameServerTask;
use super::pulls::PullTable;
use super::replies::WaitingReplies;
use crate::config::Config;
use crate::control::effects::{ClientLink, Origin};

/// Messages (packs of frames count as one) that wait for room in the mesh ring to one core; beyond
/// it requests are refused. Packs are 64 KiB, so this is up to 256 MiB.
pub const MESH_WAITING_MAX: usize = 4_096;

/// Counters of a core.
#[derive(Clone, Copy, Default, Debug)]
pub struct CoreCounters {
    /// Frames taken.
    pub frames: u64,
    /// Malformed frames, each of which closed its connection.
    pub malformed: u64,
    /// Requests sent on to another core.
    pub forwarded: u64,
    /// Requests refused because the mesh was full.
    pub mesh_refused: u64,
    /// Pulls refused because too many were parked.
    pub park_refused: u64,
    /// Connections closed because they did not read.
    pub slow_closed: u64,
    /// Pulls that found messages.
    pub get_found: u64,
    /// Pulls that found none.
    pub get_missed: u64,
    /// Messages handed out.
    pub get_messages: u64,
    /// Bytes handed out.
    pub get_bytes: u64,
}

/// A shard with what waits for it.
pub struct LocalShard {
    /// The shard.
    pub shard: Shard,
    /// Answers waiting for its watermark.
    pub replies: WaitingReplies,
    /// Sends waiting for room in its buffer.
    pub held: super::held::HeldSends,
    /// Append-to-answer times of this shard.
    pub latency: shard::latency::Latency,
}

/// Settings of the data path that cost too much to look up per request.
#[derive(Clone, Debug)]
pub struct HotSettings {
    /// Largest body in bytes.
    pub message_bytes_max: usize,
    /// Largest frame in bytes.
    pub frame_bytes_max: usize,
    /// Broker permission.
    pub permission: i32,
    /// Properties added to every single message.
    pub added_properties: Vec<u8>,
    /// Answers of sends, as far as they are all the same.
    pub send_answer: SendAnswer,
    /// Messages per pull from memory.
    pub pull_messages_max: usize,
    /// Bytes per pull from memory.
    pub pull_bytes_max: usize,
    /// Whether long polling is on.
    pub long_polling: bool,
    /// Whether reply messages are stored.
    pub store_replies: bool,
    /// Whether SQL92 expressions are taken.
    pub property_filter: bool,
    /// Wait of a pull without long polling, in milliseconds.
    pub short_polling_ms: u64,
    /// Wait for a flush before code 10, in microseconds.
    pub sync_flush_timeout_us: u64,
    /// How long a send may be held when the write buffer is full, in microseconds.
    pub send_wait_us: u64,
    /// Age of a log write at which its disk hangs, in microseconds; 0 for never.
    pub fuse_shard_us: u64,
}

impl HotSettings {
    /// Takes them from the configuration.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut added = Vec::new();
        let region = config.region_id.0.clone();
        let trace = if config.trace_on { "true" } else { "false" };
        use wire::message::properties::{CLUSTER, MSG_REGION, TRACE_ON, append};
        append(&mut added, MSG_REGION, &region);
        append(&mut added, TRACE_ON, trace);
        append(&mut added, CLUSTER, &config.broker_cluster_name.0);
        Self {
            message_bytes_max: config.message_bytes_max.0 as usize,
            frame_bytes_max: config.frame_bytes_max.0 as usize,
            permission: config.broker_permission as i32,
            added_properties: added,
            send_answer: SendAnswer::new(&region, config.trace_on),
            pull_messages_max: config.pull_messages_memory_max as usize,
            pull_bytes_max: config.pull_bytes_memory_max.0 as usize,
            long_polling: config.long_polling,
            property_filter: config.property_filter,
            store_replies: config.store_replies,
            short_polling_ms: config.short_polling_ms,
            sync_flush_timeout_us: config.sync_flush_timeout_ms * 1000,
            fuse_shard_us: config.fuse_shard_ms * 1000,
            send_wait_us: if config.fast_failure {
                config.send_wait_max_ms * 1000
            } else {
                5_000_000
            },
        }
    }
}

/// Buffers reused by handlers.
#[derive(Default)]
pub struct Scratch {
    /// Properties of the message in hand.
    pub properties: Vec<u8>,
    /// Answer in hand.
    pub reply: Vec<u8>,
    /// Units scanned.
    pub scanned: Vec<shard::units::Unit>,
    /// Units chosen.
    pub chosen: Vec<shard::units::Unit>,
    /// Tag hashes.
    pub codes: Vec<i64>,
    /// Half message in hand.
    pub half: Vec<u8>,
    /// Message ids.
    pub ids: Vec<u8>,
    /// Woken pulls.
    pub woken: Vec<u64>,
    /// Cold answers.
    pub answers: Vec<(u64, shard::cold::Answer)>,
}

/// One core's state.
pub struct State {
    /// Number of this core.
    pub core: usize,
    /// Time of this turn.
    pub now: Now,
    /// Settings in force.
    pub config: Arc<Config>,
    /// Settings of the data path.
    pub hot: HotSettings,
    /// Connections.
    pub net: Connections,
    /// Shards of this core.
    pub shards: Vec<LocalShard>,
    /// Core of each shard of the broker.
    pub homes: Arc<Vec<usize>>,
    /// Topics, groups, subscriptions.
    pub directory: Directory,
    /// Compiled expressions.
    pub filters: super::filters::FilterCache,
    /// Which disks hang.
    pub disks: super::disks::Disks,
    /// Parked and cold pulls.
    pub pulls: PullTable,
    /// POP.
    pub pop: super::pop::PopState,
    /// What was handed out lately.
    pub deliveries: super::deliveries::Deliveries,
    /// Ring ends to the other cores.
    pub mesh: MeshEnd<MeshMessage>,
    /// Messages waiting for room in a ring, by target core.
    pub waiting: Vec<VecDeque<MeshMessage>>,
    /// The control task, on the first core.
    pub control: Option<Box<ControlTask>>,
    /// The name server, if this core runs one.
    pub name_server: Option<Box<NameServerTask>>,
    /// Counters.
    pub counters: CoreCounters,
    /// Reused buffers.
    pub scratch: Scratch,
    /// Address stored with records and told in ids.
    pub store_host: std::net::SocketAddr,
    /// Whether the process is stopping.
    pub stopping: bool,
    /// Time of the last log line about malformed frames, in monotonic microseconds.
    pub malformed_logged_us: u64,
    /// Whether a shard has work left that this turn did not finish.
    pub turn_again: bool,
    /// Connections to close.
    pub to_close: Vec<u64>,
    /// Questions to shards of this core that need the disk.
    pub cold_asks: super::gather::ColdAsks,
    /// What is done wrong on purpose, in tests of the tests.
    pub canary: super::canary::Canary,
    /// Changes of the control task that shards have not stored yet.
    pub settling: super::settle::Settling,
    /// Blocking jobs given to the auxiliary thread.
    pub jobs: super::jobs::Jobs,
    /// Messages of other cores in hand.
    pub inbox: Vec<(usize, MeshMessage)>,
    /// Retention.
    pub retention: super::retention::RetentionState,
    /// Where figures for `/metrics` go.
    pub metrics: Arc<super::metrics::Metrics>,
    /// Last time they were published, in monotonic microseconds.
    pub published_us: u64,
    /// Takes messages instead of the shards, in `pinion null`.
    pub null: Option<super::null::NullStore>,
}

/// What the state of a core is made of.
pub struct StateParts {
    /// Number of the core.
    pub core: usize,
    /// Settings in force.
    pub config: Arc<Config>,
    /// Ring ends to the other cores.
    pub mesh: MeshEnd<MeshMessage>,
    /// Core of each shard of the broker.
    pub homes: Arc<Vec<usize>>,
    /// Shards of this core.
    pub shards: Vec<LocalShard>,
    /// Address stored with records and told in ids.
    pub store_host: std::net::SocketAddr,
    /// Where figures go.
    pub metrics: Arc<super::metrics::Metrics>,
}

impl State {
    /// A core without connections, tables and tasks.
    #[must_use]
    pub fn new(parts: StateParts) -> Self {
        Self {
            core: parts.core,
            now: Now::default(),
            hot: HotSettings::new(&parts.config),
            net: Connections::default(),
            disks: super::disks::Disks::new(parts.shards.len()),
            shards: parts.shards,
            homes: parts.homes,
            directory: Directory::default(),
            filters: super::filters::FilterCache::default(),
            pulls: PullTable::default(),
            pop: super::pop::PopState::default(),
            deliveries: super::deliveries::Deliveries::new(0),
            waiting: (0..parts.mesh.cores()).map(|_| VecDeque::new()).collect(),
            mesh: parts.mesh,
            control: None,
            name_server: None,
            counters: CoreCounters::default(),
            scratch: Scratch::default(),
            store_host: parts.store_host,
            stopping: false,
            malformed_logged_us: 0,
            turn_again: false,
            to_close: Vec::new(),
            cold_asks: super::gather::ColdAsks::default(),
            canary: super::canary::Canary::default(),
            settling: super::settle::Settling::default(),
            jobs: super::jobs::Jobs::default(),
            inbox: Vec::new(),
            retention: super::retention::RetentionState::default(),
            metrics: parts.metrics,
            published_us: 0,
            null: None,
            config: parts.config,
        }
    }

    /// The link of a connection of this core.
    #[must_use]
    pub fn link(&self, connection: u64) -> ClientLink {
        ClientLink {
            core: self.core as u16,
            connection,
        }
    }

    /// How to answer a request.
    #[must_use]
    pub fn reply_to(&self, origin: &Origin, header: &Header<'_>) -> ReplyTo {
        ReplyTo {
            link: origin.link,
            opaque: header.opaque,
            serialization: header.serialization,
            oneway: header.is_oneway(),
        }
    }

    /// Position of a shard among this core's, if it is one of them.
    #[must_use]
    pub fn local_shard(&self, shard: u16) -> Option<usize> {
        self.shards
            .iter()
            .position(|local| local.shard.number() == shard)
    }

    /// Core of a shard.
    #[must_use]
    pub fn home_of(&self, shard: u16) -> Option<usize> {
        self.homes.get(usize::from(shard)).copied()
    }

    /// Queues a message for a core; delivers it at once when it is this one.
    pub fn send_to(&mut self, core: usize, message: MeshMessage) {
        if core == self.core {
            self.on_message(core, message);
        } else if let Some(waiting) = self.waiting.get_mut(core) {
            waiting.push_back(message);
        }
    }

    /// Sends a message on to the core that has to answer it.
    pub fn forward(&mut self, core: usize, reply: &ReplyTo, message: MeshMessage) {
        if self.may_forward(core, reply) {
            self.counters.forwarded += u64::from(core != self.core);
            self.send_to(core, message);
        }
    }

    /// Sends a request on to a core, in one pack with those before it.
    pub fn forward_frame(
        &mut self,
        core: usize,
        origin: &Origin,
        reply: &ReplyTo,
        whole: &[u8],
        queue_id: Option<i32>,
    ) {
        if !self.may_forward(core, reply) {
            return;
        }
        self.counters.forwarded += u64::from(core != self.core);
        let mut item = (*origin, queue_id);
        let last = self.waiting.get_mut(core).and_then(VecDeque::back_mut);
        if let Some(MeshMessage::Requests(frames)) = last {
            match frames.push(item, whole) {
                Ok(()) => return,
                Err(back) => item = back,
            }
        }
        self.send_to(core, MeshMessage::Requests(Frames::one(item, whole)));
    }

    /// Whether there is room on the way to a core; the request is refused if not.
    fn may_forward(&mut self, core: usize, reply: &ReplyTo) -> bool {
        let held = self.waiting.get(core).map_or(0, VecDeque::len);
        if core == self.core || held < MESH_WAITING_MAX {
            return true;
        }
        self.counters.mesh_refused += 1;
        let remark = format!(
            "mesh: {held} messages wait for core {core}, bound {MESH_WAITING_MAX}; \
             try another broker"
        );
        self.answer(reply, response::SERVICE_NOT_AVAILABLE, Some(&remark));
        false
    }

    /// Moves waiting messages into the rings and rings the bells.
    pub fn flush_mesh(&mut self) {
        for (core, waiting) in self.waiting.iter_mut().enumerate() {
            while let Some(message) = waiting.pop_front() {
                if let Err(back) = self.mesh.push(core, message) {
                    waiting.push_front(back);
                    break;
                }
            }
        }
        self.mesh.ring_bells();
    }

    /// Whether messages wait for room in a ring.
    #[must_use]
    pub fn mesh_is_behind(&self) -> bool {
        self.waiting.iter().any(|waiting| !waiting.is_empty())
    }

    /// Gives a whole frame to a connection, here or on another core.
    pub fn deliver(&mut self, link: ClientLink, frame: &[u8]) {
        if usize::from(link.core) == self.core {
            if let Some(out) = self.net.output(link.connection) {
                out.extend_from_slice(frame);
            } else if super::pop::is_part(link.connection) {
                self.on_part_answered(link.connection, frame);
            }
            return;
        }
        let core = usize::from(link.core);
        let last = self.waiting.get_mut(core).and_then(VecDeque::back_mut);
        if let Some(MeshMessage::Deliver(frames)) = last
            && frames.push(link.connection, frame).is_ok()
        {
            return;
        }
        let frames = Frames::one(link.connection, frame);
        self.send_to(core, MeshMessage::Deliver(frames));
    }

    /// Answers without fields or body.
    pub fn answer(&mut self, to: &ReplyTo, code: i32, remark: Option<&str>) {
        if to.oneway {
            return;
        }
        let mut frame = std::mem::take(&mut self.scratch.reply);
        frame.clear();
        encode_plain(&mut frame, to, code, remark);
        self.deliver(to.link, &frame);
        self.scratch.reply = frame;
    }

    /// Answers a refusal of the store.
    pub fn refuse(&mut self, to: &ReplyTo, refusal: &Refusal) {
        let code = match refusal {
            Refusal::TooLarge { .. } => response::MESSAGE_ILLEGAL,
            _ => response::SERVICE_NOT_AVAILABLE,
        };
        self.answer(to, code, Some(&refusal.to_string()));
    }

    /// Opens a queue on a shard of this core.
    pub fn open_local(shards: &mut [LocalShard], shard: u16, topic: &str, id: i32) -> QueueIndex {
        let local = shards
            .iter_mut()
            .find(|local| local.shard.number() == shard);
        local
            .and_then(|local| local.shard.open_queue(topic, id))
            .unwrap_or(NO_QUEUE)
    }
}

/// Encodes an answer without fields or body.
pub fn encode_plain(out: &mut Vec<u8>, to: &ReplyTo, code: i32, remark: Option<&str>) {
    let reply = Reply {
        code,
        opaque: to.opaque,
        remark,
        ext: &[],
    };
    encode_reply(out, to.serialization, &reply, &[]);
}

/// Why a core cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A listener.
    #[error(
        "cannot listen on {address}: {source}. Is another broker or name server running? Set {key} \
         to a free port"
    )]
    Listen {
        /// Address.
        address: std::net::SocketAddr,
        /// Setting that names the port.
        key: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Two parts of the process want the same port.
    #[error("{first} and {second} are the same; change one of the two settings")]
    OwnPorts {
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// Something else of the machine.
    #[error("{what}: {source}")]
    Machine {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Control tables, settings files.
    #[error("{0}")]
    Other(String),
}
