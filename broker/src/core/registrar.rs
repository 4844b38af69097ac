//! Registration of this broker with its name servers.
//!
//! Each name server has one connection. A new connection gets the whole table at once, a change
//! only what changed, and every period the whole table again. A name server of this program is also
//! asked every few seconds for topics that sends created on other brokers of the cluster, and told
//! of disks that hang; how it is told apart and what is said is in `namesrv::offer`. Whether there
//! are other brokers is found out in `core/peers.rs`.
//!
//! A table of more than [`REGISTRATION_TOPICS_MAX`] topics goes in several registrations, the next
//! one when the name server has answered the one before. A name server takes changed topics only
//! with a version it does not know, so that upon a new connection each of them but the last says a
//! version of its own, which no table ever has.
//!
//! Invariant: whatever a name server forgot, it knows again one second after it is reachable.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::mpsc::Receiver;

use shard::repeated::Repeated;
use shard::runtime::{ConnectionId, Driver};
use wire::body::{DataVersion, RegisterBrokerBody, TopicConfig, TopicConfigTable, to_json};
use wire::codes::request;
use wire::frame::Serialization;
use wire::header::{ExtValue, Header, encode_request};

use super::connections::Purpose;
use super::resolver::Found;
use super::state::State;
use crate::namesrv::offer::{
    ASK_FIELD, DISK_FIELD, GONE_FIELD, OFFER_FIELD, TABLE_FIELD, TABLE_PART, TABLE_WHOLE,
};

/// Topics in one registration at most: their JSON stays far below a frame's 16 MiB, and making it
/// does not hold the core for long.
pub const REGISTRATION_TOPICS_MAX: usize = 4_000;
/// How often a name server that knows offers is asked for them, in microseconds.
const ASK_US: u64 = 3_000_000;
/// Pause before a name server is dialled again, in microseconds.
const RETRY_US: u64 = 1_000_000;
/// How often to see whether the address of a name server has been found by now.
const LOOK_US: u64 = 50_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Down { retry_at_us: u64 },
    Dialling(u64),
    Up(u64),
}

pub(super) struct Server {
    name: String,
    addresses: Vec<SocketAddr>,
    next_address: usize,
    pub(super) link: Link,
    registered_at_us: u64,
    full: bool,
    told_down: bool,
    /// Whether it answered with offers once on this connection.
    pub(super) knows_offers: bool,
    pub(super) peers: super::peers::Peers,
    asked_at_us: u64,
    refusals: Repeated,
    /// What is left to be sent of a table in several registrations.
    rest: Option<Rest>,
}

/// A name server that has to be told something.
struct Due {
    index: usize,
    connection: u64,
    /// Whether of all topics, not only of those that changed.
    full: bool,
    /// Whether it has to take topics that it may know otherwise.
    renews: bool,
}

/// The rest of a table that is being sent.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Rest {
    /// Name of the last topic that was sent.
    after: String,
    /// Registrations that are left.
    left: usize,
    /// Whether the name server has to take topics it may know otherwise.
    renews: bool,
    /// Whether the one before was answered.
    due: bool,
}

impl Server {
    fn ask_at_us(&self) -> Option<u64> {
        let is_asked = self.knows_offers && matches!(self.link, Link::Up(_));
        is_asked.then_some(self.asked_at_us + ASK_US)
    }
}

/// What the broker says of itself.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Broker name.
    pub broker_name: String,
    /// Cluster name.
    pub cluster_name: String,
    /// Broker id, 0 for the master.
    pub broker_id: i64,
    /// `host:port` told to clients.
    pub broker_address: String,
    /// `host:port` for replication.
    pub ha_address: String,
}

/// The registrations.
pub struct Registrar {
    pub(super) identity: Identity,
    pub(super) servers: Vec<Server>,
    changed: BTreeSet<String>,
    all: bool,
    opaque: i32,
    dirty: bool,
    /// The newest version told with the whole table or a part of it.
    told_version: Option<DataVersion>,
    /// Addresses of servers, as they are found out.
    found: Receiver<Found>,
}

/// What is sent of the topics.
struct Sent {
    kind: &'static str,
    version: DataVersion,
    topics: BTreeMap<String, TopicConfig>,
    gone: Vec<String>,
}

impl Registrar {
    /// Registers with these name servers, whose addresses are told by number.
    #[must_use]
    pub fn new(identity: Identity, names: Vec<String>, found: Receiver<Found>) -> Self {
        let servers = names.into_iter().map(|name| Server {
            name,
            addresses: Vec::new(),
            next_address: 0,
            link: Link::Down { retry_at_us: 0 },
            registered_at_us: 0,
            full: true,
            told_down: false,
            knows_offers: false,
            peers: super::peers::Peers::default(),
            asked_at_us: 0,
            refusals: Repeated::default(),
            rest: None,
        });
        Self {
            identity,
            servers: servers.collect(),
            changed: BTreeSet::new(),
            all: false,
            opaque: 0,
            dirty: false,
            told_version: None,
            found,
        }
    }

    /// Takes over what has been found out of addresses since.
    fn take_found(&mut self) {
        while let Ok((index, addresses)) = self.found.try_recv() {
            if let Some(server) = self.servers.get_mut(index) {
                server.addresses = addresses;
                server.next_address = 0;
            }
        }
    }

    /// Wants a registration now; of these topics, or of all.
    pub fn want(&mut self, topics: Vec<String>) {
        self.dirty = true;
        if topics.is_empty() {
            self.all = true;
        }
        self.changed.extend(topics);
    }

    /// When something is due next, in monotonic microseconds.
    #[must_use]
    pub fn deadline_us(&self, period_us: u64) -> Option<u64> {
        if self.dirty {
            return Some(0);
        }
        let due = self.servers.iter().filter_map(|server| match server.link {
            Link::Down { retry_at_us } => Some(retry_at_us),
            Link::Dialling(_) => None,
            Link::Up(_) if server.full => Some(0),
            Link::Up(_) if server.rest.as_ref().is_some_and(|rest| rest.due) => Some(0),
            Link::Up(_) => Some(server.registered_at_us + period_us),
        });
        let asks = self.servers.iter().filter_map(Server::ask_at_us);
        due.chain(asks).min()
    }

    /// Name servers that have to be told now, and the topics that changed.
    fn take_due(&mut self, now_us: u64, period_us: u64) -> (Vec<Due>, BTreeSet<String>) {
        let (all, dirty) = (self.all, self.dirty);
        let mut due = Vec::new();
        for (index, server) in self.servers.iter_mut().enumerate() {
            let Link::Up(connection) = server.link else {
                continue;
            };
            let is_time = server.full || now_us >= server.registered_at_us + period_us;
            if !(is_time || dirty) {
                continue;
            }
            let (full, renews) = (is_time || all, server.full || all);
            if full {
                server.registered_at_us = now_us;
                server.full = false;
            }
            due.push(Due {
                index,
                connection,
                full,
                renews,
            });
        }
        (self.all, self.dirty) = (false, false);
        (due, std::mem::take(&mut self.changed))
    }

    /// Begins to send a whole table in several registrations, unless that is under way.
    fn begin_rest(&mut self, due: &Due, topics: usize) {
        let Some(server) = self.servers.get_mut(due.index) else {
            return;
        };
        if server.rest.is_none() || due.renews {
            server.rest = Some(Rest {
                after: String::new(),
                left: topics.div_ceil(REGISTRATION_TOPICS_MAX),
                renews: due.renews,
                due: true,
            });
        }
    }

    fn register_frame(&mut self, asks: bool, disk: &str, sent: Sent) -> Vec<u8> {
        let Sent {
            kind,
            version,
            topics,
            gone,
        } = sent;
        let table = TopicConfigTable {
            data_version: version,
            mapping_data_version: Some(DataVersion::default()),
            topic_config_table: topics,
            topic_queue_mapping_detail_map: Some(BTreeMap::new()),
            topic_queue_mapping_info_map: Some(BTreeMap::new()),
        };
        let body = RegisterBrokerBody {
            filter_server_list: Vec::new(),
            topic_config_serialize_wrapper: table,
        };
        let body = to_json(&body).unwrap_or_default();
        let crc = crc_of(&body);
        let opaque = self.next_opaque();
        let identity = &self.identity;
        let gone = gone.join(",");
        let ext = [
            ("brokerName", ExtValue::Str(&identity.broker_name)),
            ("brokerAddr", ExtValue::Str(&identity.broker_address)),
            ("clusterName", ExtValue::Str(&identity.cluster_name)),
            ("haServerAddr", ExtValue::Str(&identity.ha_address)),
            ("brokerId", ExtValue::Int(identity.broker_id)),
            ("enableActingMaster", ExtValue::Bool(false)),
            ("compressed", ExtValue::Bool(false)),
            ("bodyCrc32", ExtValue::Int(i64::from(crc))),
            (TABLE_FIELD, ExtValue::Str(kind)),
            (GONE_FIELD, ExtValue::Str(&gone)),
            (ASK_FIELD, ExtValue::Bool(asks)),
            (DISK_FIELD, ExtValue::Str(disk)),
        ];
        request_frame(request::REGISTER_BROKER, opaque, &ext, &body)
    }

    /// The number of the next request.
    pub(super) fn next_opaque(&mut self) -> i32 {
        self.opaque = self.opaque.wrapping_add(1) & i32::MAX;
        self.opaque
    }

    /// A sign of life that tells of disks, and asks for offers if so.
    pub(super) fn heartbeat_frame(&mut self, asks: bool, disk: &str) -> Vec<u8> {
        let opaque = self.next_opaque();
        let identity = &self.identity;
        let ext = [
            ("clusterName", ExtValue::Str(&identity.cluster_name)),
            ("brokerAddr", ExtValue::Str(&identity.broker_address)),
            ("brokerName", ExtValue::Str(&identity.broker_name)),
            ("brokerId", ExtValue::Int(identity.broker_id)),
            (ASK_FIELD, ExtValue::Bool(asks)),
            (DISK_FIELD, ExtValue::Str(disk)),
        ];
        request_frame(request::BROKER_HEARTBEAT, opaque, &ext, &[])
    }

    fn unregister_frame(&mut self) -> Vec<u8> {
        let opaque = self.next_opaque();
        let identity = &self.identity;
        let ext = [
            ("brokerName", ExtValue::Str(&identity.broker_name)),
            ("brokerAddr", ExtValue::Str(&identity.broker_address)),
            ("clusterName", ExtValue::Str(&identity.cluster_name)),
            ("brokerId", ExtValue::Int(identity.broker_id)),
        ];
        request_frame(request::UNREGISTER_BROKER, opaque, &ext, &[])
    }
}

/// A request of the broker to a name server.
pub(super) fn request_frame(
    code: i32,
    opaque: i32,
    ext: &[(&str, ExtValue<'_>)],
    body: &[u8],
) -> Vec<u8> {
    let mut frame = Vec::with_capacity(body.len() + 512);
    encode_request(
        &mut frame,
        Serialization::Json,
        code,
        opaque,
        false,
        ext,
        body,
    );
    frame
}

/// CRC-32 of a registration body as RocketMQ checks it.
fn crc_of(body: &[u8]) -> u32 {
    wire::message::body_crc(body)
}

impl State {
    /// Dials name servers and sends registrations that are due.
    pub fn register_turn<D: Driver>(&mut self, driver: &mut D) {
        let now_us = self.now.monotonic_us;
        let period_us = self.config.register_period_ms * 1000;
        if !self.stopping {
            self.dial_name_servers(driver);
        }
        self.report_disks();
        let Some(task) = self.control.as_deref_mut() else {
            return;
        };
        let (due, changed) = task.registrar.take_due(now_us, period_us);
        if due.is_empty() {
            self.send_rests();
            return self.ask_for_offers();
        }
        let disk = self.disks.report(now_us).text();
        if !changed.is_empty() {
            task.control
                .renew_version(self.now.wall_ms, task.registrar.told_version);
        }
        let asks = task.registrar.identity.broker_id == 0 && task.control.takes_offers();
        for due in due {
            let version = task.control.topics_version();
            task.registrar.told_version = Some(version);
            let (part, gone) = task.control.registration_part(&changed);
            let count = task.control.topics_count();
            let is_split = due.full && count > REGISTRATION_TOPICS_MAX;
            if is_split {
                task.registrar.begin_rest(&due, count);
                if changed.is_empty() {
                    continue;
                }
            }
            let (kind, topics) = if due.full && !is_split {
                (TABLE_WHOLE, task.control.registration_topics())
            } else {
                (TABLE_PART, part)
            };
            let sent = Sent {
                kind,
                version,
                topics,
                gone,
            };
            let frame = task.registrar.register_frame(asks, &disk, sent);
            if let Some(out) = self.net.output(due.connection) {
                out.extend_from_slice(&frame);
            }
        }
        self.send_rests();
        self.ask_for_offers();
    }

    /// Sends the next registration of each table that goes in several.
    fn send_rests(&mut self) {
        let Some(task) = self.control.as_deref_mut() else {
            return;
        };
        let asks = task.registrar.identity.broker_id == 0 && task.control.takes_offers();
        for index in 0..task.registrar.servers.len() {
            let Some(server) = task.registrar.servers.get_mut(index) else {
                continue;
            };
            let (Link::Up(connection), Some(mut rest)) = (server.link, server.rest.clone()) else {
                continue;
            };
            if !rest.due {
                continue;
            }
            let most = REGISTRATION_TOPICS_MAX;
            let topics = task.control.registration_topics_after(&rest.after, most);
            let mut version = task.control.topics_version();
            rest.left = rest.left.saturating_sub(1);
            let is_last = topics.len() < most;
            match topics.last_key_value() {
                Some((name, _)) if !is_last => {
                    if rest.renews {
                        version.counter = -1 - rest.left as i64;
                    }
                    rest.after.clone_from(name);
                    rest.due = false;
                    server.rest = Some(rest);
                }
                _ => server.rest = None,
            }
            let sent = Sent {
                kind: TABLE_PART,
                version,
                topics,
                gone: Vec::new(),
            };
            let disk = self.disks.report(self.now.monotonic_us).text();
            let frame = task.registrar.register_frame(asks, &disk, sent);
            if let Some(out) = self.net.output(connection) {
                out.extend_from_slice(&frame);
            }
        }
    }

    fn dial_name_servers<D: Driver>(&mut self, driver: &mut D) {
        let now_us = self.now.monotonic_us;
        let Some(task) = self.control.as_deref_mut() else {
            return;
        };
        task.registrar.take_found();
        for (index, server) in task.registrar.servers.iter_mut().enumerate() {
            if let Link::Down { retry_at_us } = server.link
                && now_us >= retry_at_us
            {
                let count = server.addresses.len().max(1);
                let Some(address) = server.addresses.get(server.next_address % count) else {
                    let retry_at_us = now_us + LOOK_US;
                    server.link = Link::Down { retry_at_us };
                    continue;
                };
                server.next_address += 1;
                let id = driver.connect(*address);
                server.link = Link::Dialling(id.0);
                self.net
                    .insert(id, Purpose::Registration(index), *address, now_us);
            }
        }
    }

    /// Asks name servers that know offers, when it is time.
    fn ask_for_offers(&mut self) {
        let now_us = self.now.monotonic_us;
        let Some(task) = self.control.as_deref_mut() else {
            return;
        };
        let is_master = task.registrar.identity.broker_id == 0;
        let mut due = Vec::new();
        for server in &mut task.registrar.servers {
            if let Link::Up(connection) = server.link
                && server.ask_at_us().is_some_and(|at_us| at_us <= now_us)
            {
                server.asked_at_us = now_us;
                due.push(connection);
            }
        }
        let asks = is_master && task.control.takes_offers();
        if due.is_empty() {
            return;
        }
        let disk = self.disks.report(now_us).text();
        for connection in due {
            let frame = task.registrar.heartbeat_frame(asks, &disk);
            if let Some(out) = self.net.output(connection) {
                out.extend_from_slice(&frame);
            }
        }
    }

    /// A connection to a name server is up.
    pub fn registration_up(&mut self, index: usize, connection: ConnectionId) {
        let server = self
            .control
            .as_mut()
            .and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server {
            server.link = Link::Up(connection.0);
            server.full = true;
            server.rest = None;
            if std::mem::take(&mut server.told_down) {
                tracing::info!(name_server = server.name, "name server reached again");
            }
        }
    }

    /// A connection to a name server is gone or could not be made.
    pub fn registration_down(&mut self, index: usize) {
        let retry_at_us = self.now.monotonic_us + RETRY_US;
        let server = self
            .control
            .as_mut()
            .and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server {
            server.link = Link::Down { retry_at_us };
            server.knows_offers = false;
            server.peers.connection_lost();
            if !std::mem::replace(&mut server.told_down, true) {
                tracing::warn!(
                    name_server = server.name,
                    "name server not reachable, dialling on"
                );
            }
        }
    }

    /// A name server answered a registration.
    pub fn on_registration_answer(&mut self, index: usize, header: &Header<'_>, body: &[u8]) {
        if !header.is_response() || self.on_cluster(index, header, body) {
            return;
        }
        if header.code == 0 {
            self.registration_taken(index);
            let server = self
                .control
                .as_mut()
                .and_then(|task| task.registrar.servers.get_mut(index));
            if let Some(rest) = server.and_then(|server| server.rest.as_mut()) {
                rest.due = true;
            }
            self.count_peers(index, header);
            return self.take_offers(index, header);
        }
        let remark = header
            .remark
            .map(|text| text.to_cow().into_owned())
            .unwrap_or_default();
        let retry_us = self.now.monotonic_us;
        let server = self
            .control
            .as_mut()
            .and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server {
            if let Some(times) = server.refusals.failed(retry_us) {
                let (name, code) = (&server.name, header.code);
                tracing::warn!(
                    name_server = name,
                    code,
                    remark,
                    times,
                    "registration refused"
                );
            }
            // What was refused may have been a part: send the whole table, after a pause.
            let period_us = self.config.register_period_ms * 1000;
            server.registered_at_us = (retry_us + RETRY_US).saturating_sub(period_us);
            server.rest = None;
        }
    }

    fn registration_taken(&mut self, index: usize) {
        let task = self.control.as_mut();
        let server = task.and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server
            && let Some(times) = server.refusals.worked()
        {
            let name = &server.name;
            tracing::info!(name_server = name, times, "registration taken again");
        }
    }

    fn take_offers(&mut self, index: usize, header: &Header<'_>) {
        let Some(offers) = header.ext.str(OFFER_FIELD) else {
            return;
        };
        let now_us = self.now.monotonic_us;
        let server = self
            .control
            .as_mut()
            .and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server
            && !std::mem::replace(&mut server.knows_offers, true)
        {
            server.asked_at_us = now_us;
        }
        if !offers.is_empty() {
            self.with_control(|control, now_ms, effects| {
                control.take_offers(now_ms, &offers, effects);
            });
        }
    }

    /// Takes this broker out of all routes.
    pub fn unregister(&mut self) {
        let Some(task) = self.control.as_deref_mut() else {
            return;
        };
        let frame = task.registrar.unregister_frame();
        for server in &task.registrar.servers {
            if let Link::Up(connection) = server.link
                && let Some(out) = self.net.output(connection)
            {
                out.extend_from_slice(&frame);
            }
        }
    }
}
