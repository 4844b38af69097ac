//! Registration of this broker with its name servers.
//!
//! Each name server has one connection. A new connection gets the whole table at once, a change
//! only what changed, and every period the whole table again.
//!
//! Invariant: whatever a name server forgot, it knows again one second after it is reachable.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use shard::runtime::{ConnectionId, Driver};
use wire::body::{DataVersion, RegisterBrokerBody, TopicConfig, TopicConfigTable, to_json};
use wire::codes::request;
use wire::frame::Serialization;
use wire::header::{ExtValue, Header, encode_request};

use super::connections::Purpose;
use super::state::State;

/// Pause before a name server is dialled again, in microseconds.
const RETRY_US: u64 = 1_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    Down { retry_at_us: u64 },
    Dialling(u64),
    Up(u64),
}

struct Server {
    name: String,
    addresses: Vec<SocketAddr>,
    next_address: usize,
    link: Link,
    registered_at_us: u64,
    full: bool,
    told_down: bool,
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
    identity: Identity,
    servers: Vec<Server>,
    changed: BTreeSet<String>,
    all: bool,
    opaque: i32,
    dirty: bool,
}

impl Registrar {
    /// Registers with these name servers, given by name and resolved addresses.
    #[must_use]
    pub fn new(identity: Identity, servers: Vec<(String, Vec<SocketAddr>)>) -> Self {
        let servers = servers.into_iter().map(|(name, addresses)| Server {
            name,
            addresses,
            next_address: 0,
            link: Link::Down { retry_at_us: 0 },
            registered_at_us: 0,
            full: true,
            told_down: false,
        });
        Self {
            identity,
            servers: servers.collect(),
            changed: BTreeSet::new(),
            all: false,
            opaque: 0,
            dirty: false,
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
            Link::Up(_) => Some(server.registered_at_us + period_us),
        });
        due.min()
    }

    fn register_frame(
        &mut self,
        version: DataVersion,
        topics: BTreeMap<String, TopicConfig>,
    ) -> Vec<u8> {
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
        self.opaque = self.opaque.wrapping_add(1) & i32::MAX;
        let identity = &self.identity;
        let ext = [
            ("brokerName", ExtValue::Str(&identity.broker_name)),
            ("brokerAddr", ExtValue::Str(&identity.broker_address)),
            ("clusterName", ExtValue::Str(&identity.cluster_name)),
            ("haServerAddr", ExtValue::Str(&identity.ha_address)),
            ("brokerId", ExtValue::Int(identity.broker_id)),
            ("enableActingMaster", ExtValue::Bool(false)),
            ("compressed", ExtValue::Bool(false)),
            ("bodyCrc32", ExtValue::Int(i64::from(crc))),
        ];
        let mut frame = Vec::with_capacity(body.len() + 512);
        let code = request::REGISTER_BROKER;
        encode_request(&mut frame, Serialization::Json, code, self.opaque, false, &ext, &body);
        frame
    }

    fn unregister_frame(&mut self) -> Vec<u8> {
        self.opaque = self.opaque.wrapping_add(1) & i32::MAX;
        let identity = &self.identity;
        let ext = [
            ("brokerName", ExtValue::Str(&identity.broker_name)),
            ("brokerAddr", ExtValue::Str(&identity.broker_address)),
            ("clusterName", ExtValue::Str(&identity.cluster_name)),
            ("brokerId", ExtValue::Int(identity.broker_id)),
        ];
        let mut frame = Vec::new();
        let code = request::UNREGISTER_BROKER;
        encode_request(&mut frame, Serialization::Json, code, self.opaque, false, &ext, &[]);
        frame
    }
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
        let stopping = self.stopping;
        let Some(task) = self.control.as_deref_mut() else { return };
        let registrar = &mut task.registrar;
        for (index, server) in registrar.servers.iter_mut().enumerate() {
            if let Link::Down { retry_at_us } = server.link
                && now_us >= retry_at_us
                && !stopping
            {
                let count = server.addresses.len().max(1);
                let Some(address) = server.addresses.get(server.next_address % count) else {
                    continue;
                };
                server.next_address += 1;
                let id = driver.connect(*address);
                server.link = Link::Dialling(id.0);
                self.net.insert(id, Purpose::Registration(index), *address, now_us);
            }
        }
        let due: Vec<(u64, bool)> = registrar
            .servers
            .iter_mut()
            .filter_map(|server| {
                let Link::Up(connection) = server.link else { return None };
                let full = server.full || now_us >= server.registered_at_us + period_us;
                if !(full || registrar.dirty) {
                    return None;
                }
                let full = full || registrar.all;
                if full {
                    server.registered_at_us = now_us;
                    server.full = false;
                }
                Some((connection, full))
            })
            .collect();
        let changed = std::mem::take(&mut registrar.changed);
        (registrar.all, registrar.dirty) = (false, false);
        if due.is_empty() {
            return;
        }
        let (version, topics) = task.control.registration_topics();
        for (connection, full) in due {
            let topics = if full {
                topics.clone()
            } else {
                changed.iter().filter_map(|name| topics.get_key_value(name)).map(owned).collect()
            };
            let frame = task.registrar.register_frame(version, topics);
            if let Some(out) = self.net.output(connection) {
                out.extend_from_slice(&frame);
            }
        }
    }

    /// A connection to a name server is up.
    pub fn registration_up(&mut self, index: usize, connection: ConnectionId) {
        let server = self.control.as_mut().and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server {
            server.link = Link::Up(connection.0);
            server.full = true;
            if std::mem::take(&mut server.told_down) {
                tracing::info!(name_server = server.name, "name server reached again");
            }
        }
    }

    /// A connection to a name server is gone or could not be made.
    pub fn registration_down(&mut self, index: usize) {
        let retry_at_us = self.now.monotonic_us + RETRY_US;
        let server = self.control.as_mut().and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server {
            server.link = Link::Down { retry_at_us };
            if !std::mem::replace(&mut server.told_down, true) {
                tracing::warn!(name_server = server.name, "name server not reachable, dialling on");
            }
        }
    }

    /// A name server answered a registration.
    pub fn on_registration_answer(&mut self, index: usize, header: &Header<'_>, _body: &[u8]) {
        if !header.is_response() || header.code == 0 {
            return;
        }
        let remark = header.remark.map(|text| text.to_cow().into_owned()).unwrap_or_default();
        let retry_us = self.now.monotonic_us;
        let server = self.control.as_mut().and_then(|task| task.registrar.servers.get_mut(index));
        if let Some(server) = server {
            let (name, code) = (&server.name, header.code);
            tracing::warn!(name_server = name, code, remark, "registration refused");
            // What was refused may have been a part: send the whole table, after a pause.
            let period_us = self.config.register_period_ms * 1000;
            server.registered_at_us = (retry_us + RETRY_US).saturating_sub(period_us);
        }
    }

    /// Takes this broker out of all routes.
    pub fn unregister(&mut self) {
        let Some(task) = self.control.as_deref_mut() else { return };
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

fn owned((name, topic): (&String, &TopicConfig)) -> (String, TopicConfig) {
    (name.clone(), topic.clone())
}
