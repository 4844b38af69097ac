//! Owns the name server: a state machine that answers route requests from what brokers register.
//!
//! Invariant: no I/O, no clock, no thread. The caller passes time and connection ids in and takes
//! out replies, content to save and connections to close. It never names the storage engine.

mod answers;
mod config;
mod handlers;
mod kv;
pub mod offer;
mod registration;
mod routes;
#[cfg(test)]
mod tests;
pub mod watch;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use thiserror::Error;
use wire::codes::{private, request, response};
use wire::frame::FRAME_BYTES_MAX;
use wire::header::{ExtValue, Header, Reply, encode_reply};

pub use config::{ConfigError, NameServerConfig, PROPERTIES_BYTES_MAX};
pub use kv::{KV_BYTES_MAX, KV_KEY_BYTES_MAX, KvError};
pub use registration::INFLATED_BYTES_MAX;
pub use routes::{
    BROKERS_MAX, BrokerGroup, BrokerRegistration, DataVersion, HEARTBEAT_TIMEOUT_DEFAULT_MS,
    MASTER_ID, NAME_BYTES_MAX, PERM_READ, PERM_WRITE, QUEUE_ENTRIES_MAX, QueueData, Refusal,
    Registered, Route, RouteTable, TOPIC_NAME_BYTES_MAX, TOPICS_MAX, TableKind, TopicRegistration,
};

use crate::fuse::Fuse;
use kv::KvStore;
use offer::DiskReport;

/// Room left in a reply frame for its header.
const REPLY_HEADER_BYTES_MAX: usize = 64 * 1024;

/// Why the name server could not start.
#[derive(Error, Debug)]
pub enum NameServerError {
    /// The saved key-value configuration is damaged.
    #[error(transparent)]
    Kv(#[from] KvError),
}

/// The answer to one request, before it is encoded.
#[derive(Debug)]
struct Answer {
    code: i32,
    remark: Option<String>,
    ext: Vec<(&'static str, ExtText)>,
    body: Vec<u8>,
}

/// An owned header value.
#[derive(Debug)]
enum ExtText {
    Text(String),
    Number(i64),
    Flag(bool),
}

impl ExtText {
    fn borrow(&self) -> ExtValue<'_> {
        match self {
            Self::Text(text) => ExtValue::Str(text),
            Self::Number(number) => ExtValue::Int(*number),
            Self::Flag(flag) => ExtValue::Bool(*flag),
        }
    }
}

impl Answer {
    fn success() -> Self {
        Self::body(Vec::new())
    }

    fn body(body: Vec<u8>) -> Self {
        Self {
            code: response::SUCCESS,
            remark: None,
            ext: Vec::new(),
            body,
        }
    }

    fn error(code: i32, remark: impl Into<String>) -> Self {
        Self {
            code,
            remark: Some(remark.into()),
            ext: Vec::new(),
            body: Vec::new(),
        }
    }

    /// Everything that is the caller's fault and has no code of its own.
    fn refused(error: impl std::fmt::Display) -> Self {
        Self::error(response::SYSTEM_ERROR, error.to_string())
    }

    fn with(mut self, name: &'static str, value: ExtText) -> Self {
        self.ext.push((name, value));
        self
    }
}

/// The name server.
#[derive(Debug)]
pub struct NameServer {
    config: NameServerConfig,
    started_ms: i64,
    next_scan_ms: i64,
    table: RouteTable,
    kv: KvStore,
    config_changed: bool,
    connections_to_close: Vec<u64>,
    refusals: u64,
    refusal_said_ms: i64,
    fuse: Fuse,
    fuse_transitions: u64,
    /// Reports of disks since the last [`Self::observe_reports`].
    reports: Vec<(String, DiskReport)>,
    /// Waits for disks that were reported of late, by broker: when, and how long.
    disk_waits: BTreeMap<String, (i64, u64)>,
}

impl NameServer {
    /// Starts with the configuration and the content saved earlier, if there is any.
    pub fn new(
        config: NameServerConfig,
        saved_kv: Option<&[u8]>,
        now_ms: i64,
    ) -> Result<Self, NameServerError> {
        Ok(Self {
            config,
            started_ms: now_ms,
            next_scan_ms: now_ms,
            table: RouteTable::default(),
            kv: KvStore::load(saved_kv)?,
            config_changed: false,
            connections_to_close: Vec::new(),
            refusals: 0,
            refusal_said_ms: i64::MIN,
            fuse: Fuse::default(),
            fuse_transitions: 0,
            reports: Vec::new(),
            disk_waits: BTreeMap::new(),
        })
    }

    /// Answers one request by appending a reply frame to `out`, or nothing if it is one-way.
    pub fn handle(
        &mut self,
        now_ms: i64,
        connection: u64,
        peer: SocketAddr,
        header: &Header<'_>,
        body: &[u8],
        out: &mut Vec<u8>,
    ) {
        if header.is_response() {
            return;
        }
        let mut answer = self.answer(now_ms, connection, peer, header, body);
        if header.is_oneway() {
            return;
        }
        if answer.body.len() > FRAME_BYTES_MAX - REPLY_HEADER_BYTES_MAX {
            let bytes = answer.body.len();
            answer = Answer::refused(format!(
                "the answer of {bytes} bytes is larger than a frame may be; ask for less at once"
            ));
        }
        let ext: Vec<(&str, ExtValue<'_>)> = answer
            .ext
            .iter()
            .map(|(name, value)| (*name, value.borrow()))
            .collect();
        let reply = Reply {
            code: answer.code,
            opaque: header.opaque,
            remark: answer.remark.as_deref(),
            ext: &ext,
        };
        encode_reply(out, header.serialization, &reply, &answer.body);
    }

    fn answer(
        &mut self,
        now_ms: i64,
        connection: u64,
        peer: SocketAddr,
        header: &Header<'_>,
        body: &[u8],
    ) -> Answer {
        let ext = &header.ext;
        let answer = match header.code {
            request::GET_ROUTEINFO_BY_TOPIC => self.route_of(now_ms, header.version, ext),
            request::REGISTER_BROKER => {
                self.register_broker(now_ms, connection, peer, header, body)
            }
            request::UNREGISTER_BROKER => self.unregister_broker(ext),
            request::BROKER_HEARTBEAT => self.broker_heartbeat(now_ms, ext),
            request::QUERY_DATA_VERSION => self.query_data_version(now_ms, ext, body),
            request::REGISTER_TOPIC_IN_NAMESRV => self.register_topic(ext, body),
            request::GET_BROKER_CLUSTER_INFO => {
                Ok(Answer::body(answers::cluster_body(&self.table)))
            }
            request::GET_BROKER_MEMBER_GROUP => self.member_group(ext),
            request::WIPE_WRITE_PERM_OF_BROKER => self.write_permission(ext, false),
            request::ADD_WRITE_PERM_OF_BROKER => self.write_permission(ext, true),
            request::GET_ALL_TOPIC_LIST_FROM_NAMESERVER => Ok(self.all_topics()),
            request::DELETE_TOPIC_IN_NAMESRV => self.delete_topic(ext),
            request::GET_KVLIST_BY_NAMESPACE => self.kv_list(ext),
            request::PUT_KV_CONFIG => self.kv_put(ext),
            request::GET_KV_CONFIG => self.kv_get(ext),
            request::DELETE_KV_CONFIG => self.kv_delete(ext),
            request::GET_TOPICS_BY_CLUSTER => self.topics_by_cluster(ext),
            request::GET_SYSTEM_TOPIC_LIST_FROM_NS => {
                Ok(Answer::body(answers::system_topic_list_body(&self.table)))
            }
            request::GET_UNIT_TOPIC_LIST => Ok(self.topics_by_flag(handlers::is_unit)),
            request::GET_HAS_UNIT_SUB_TOPIC_LIST => {
                Ok(self.topics_by_flag(handlers::has_unit_subscription))
            }
            request::GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST => Ok(self.topics_by_flag(|flags| {
                handlers::has_unit_subscription(flags) && !handlers::is_unit(flags)
            })),
            request::UPDATE_NAMESRV_CONFIG => Ok(self.update_config(body)),
            request::GET_NAMESRV_CONFIG => {
                Ok(Answer::body(self.config.properties_text().into_bytes()))
            }
            private::FUSE_STATE => Ok(self.fuse_state()),
            code => Ok(Answer::error(
                response::REQUEST_CODE_NOT_SUPPORTED,
                format!("request type {code} not supported"),
            )),
        };
        answer.unwrap_or_else(Answer::refused)
    }

    /// A connection is gone, and with it every broker that registered on it.
    pub fn connection_closed(&mut self, _now_ms: i64, connection: u64) {
        for broker in self.table.connection_closed(connection) {
            tracing::info!(
                broker = broker.broker_name,
                address = broker.broker_address,
                "broker left: its connection closed"
            );
        }
    }

    /// Looks for silent brokers, at most once per `scanNotActiveBrokerInterval`.
    pub fn tick(&mut self, now_ms: i64) {
        if now_ms < self.next_scan_ms {
            return;
        }
        let interval_ms = i64::try_from(self.config.scan_not_active_broker_interval_ms);
        self.next_scan_ms = now_ms.saturating_add(interval_ms.unwrap_or(i64::MAX));
        for broker in self.table.expire(now_ms) {
            tracing::warn!(
                broker = broker.broker_name,
                address = broker.broker_address,
                "broker dropped: no registration or heartbeat within its timeout"
            );
            self.connections_to_close.extend(broker.connection);
        }
    }

    /// Connections of brokers dropped by [`Self::tick`]; the caller closes them, so that a broker
    /// that was only slow notices and registers again.
    pub fn take_connections_to_close(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.connections_to_close)
    }

    /// Content of `kvConfig.json`, if it changed since the last call.
    pub fn take_kv_to_save(&mut self) -> Option<Vec<u8>> {
        self.kv.take_to_save()
    }

    /// Properties to save, if they changed since the last call.
    pub fn take_properties_to_save(&mut self) -> Option<String> {
        std::mem::take(&mut self.config_changed).then(|| self.config.properties_text())
    }

    /// Registers the broker of this process by the rules of code 103. It stays until it is
    /// unregistered, because it cannot be silent while the name server is alive.
    pub fn register_local(
        &mut self,
        now_ms: i64,
        registration: &BrokerRegistration,
    ) -> Result<Registered, Refusal> {
        self.register(now_ms, None, registration)
    }

    /// Takes the broker of this process out again.
    pub fn unregister_local(&mut self, registration: &BrokerRegistration) {
        self.table.unregister(
            &registration.cluster_name,
            &registration.broker_name,
            &registration.broker_address,
        );
    }

    /// The tables, for metrics and for a broker in the same process.
    pub fn table(&self) -> &RouteTable {
        &self.table
    }

    /// The settings in force.
    pub fn config(&self) -> &NameServerConfig {
        &self.config
    }
}
