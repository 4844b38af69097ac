//! Whole cores on a machine that costs nothing, with one topic and connections to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pinion::config::Config;
use pinion::control::effects::PlacedTopic;
use pinion::core::connections::Purpose;
use pinion::core::messages::{Change, MeshMessage};
use pinion::core::metrics::Metrics;
use pinion::core::state::{LocalShard, State, StateParts};
use pinion::core::turn::Core;
use pinion::health::Health;
use shard::AckPoint;
use shard::mesh::{Mesh, MeshEnd};
use shard::runtime::{ConnectionId, Driver as _};
use wire::body::{SubscriptionGroupConfig, TopicConfig};
use wire::codes::request;
use wire::frame::Serialization;
use wire::header::{ExtValue, encode_request};

use crate::null::{self, NullDriver};

pub const TOPIC: &str = "speed2048";
pub const GROUP: &str = "readers";
pub const CONNECTIONS: u64 = 4;

/// The request of one send of 1 KiB, as a Java producer would make it.
pub fn send_frame(serialization: Serialization, queue_id: i64) -> Vec<u8> {
    let properties = "UNIQ_KEY\u{1}7F0000010B3A18B4AAC20000000004D2\u{2}WAIT\u{1}true\u{2}";
    let ext = [
        ("a", ExtValue::Str("bench-producer")),
        ("b", ExtValue::Str(TOPIC)),
        ("c", ExtValue::Str("TBW102")),
        ("d", ExtValue::Int(4)),
        ("e", ExtValue::Int(queue_id)),
        ("f", ExtValue::Int(0)),
        ("g", ExtValue::Int(1_790_000_000_000)),
        ("h", ExtValue::Int(0)),
        ("i", ExtValue::Str(properties)),
        ("j", ExtValue::Int(0)),
        ("k", ExtValue::Bool(false)),
        ("m", ExtValue::Bool(false)),
    ];
    let mut out = Vec::new();
    let code = request::SEND_MESSAGE_V2;
    encode_request(
        &mut out,
        serialization,
        code,
        1_234_567,
        false,
        &ext,
        &[b'x'; 1024],
    );
    out
}

/// A pull of up to 32 messages that may wait.
pub fn pull_frame(queue_id: i64, offset: i64) -> Vec<u8> {
    let ext = [
        ("consumerGroup", ExtValue::Str(GROUP)),
        ("topic", ExtValue::Str(TOPIC)),
        ("queueId", ExtValue::Int(queue_id)),
        ("queueOffset", ExtValue::Int(offset)),
        ("maxMsgNums", ExtValue::Int(32)),
        ("sysFlag", ExtValue::Int(6)),
        ("commitOffset", ExtValue::Int(0)),
        ("suspendTimeoutMillis", ExtValue::Int(15_000)),
        ("subscription", ExtValue::Str("*")),
        ("subVersion", ExtValue::Int(1_790_000_000_000)),
        ("expressionType", ExtValue::Str("TAG")),
        ("maxMsgBytes", ExtValue::Int(i64::from(i32::MAX))),
    ];
    let mut out = Vec::new();
    let json = Serialization::Json;
    encode_request(&mut out, json, request::PULL_MESSAGE, 7, false, &ext, &[]);
    out
}

fn topic(queues: i32) -> Change {
    let config = TopicConfig {
        topic_name: TOPIC.to_owned(),
        read_queue_nums: queues,
        write_queue_nums: queues,
        ..TopicConfig::default()
    };
    let shards = vec![0; queues as usize];
    Change::Topic(Arc::new(PlacedTopic { config, shards }))
}

fn group() -> Change {
    let config = SubscriptionGroupConfig {
        group_name: GROUP.to_owned(),
        ..SubscriptionGroupConfig::default()
    };
    Change::Group(Arc::new(config))
}

fn core(
    number: usize,
    mesh: MeshEnd<MeshMessage>,
    home: usize,
    ack: AckPoint,
    queues: i32,
) -> Core<NullDriver> {
    let mut driver = NullDriver::new();
    let mut shards = Vec::new();
    if number == home {
        shards.push(LocalShard {
            shard: null::open(ack, &mut driver),
            replies: Default::default(),
            held: Default::default(),
            latency: Default::default(),
        });
    }
    let config = Config::default();
    let metrics = Metrics::new(&config, Arc::new(Health::default()));
    let mut state = State::new(StateParts {
        core: number,
        config: Arc::new(config),
        mesh,
        homes: Arc::new(vec![home]),
        shards,
        store_host: SocketAddr::from(([127, 0, 0, 1], 10911)),
        metrics: Arc::new(metrics),
    });
    state.now = driver.now();
    state.on_change(topic(queues));
    state.on_change(group());
    for connection in 0..CONNECTIONS {
        let peer = SocketAddr::from(([127, 0, 0, 1], 40_000));
        let id = ConnectionId(1 << 32 | connection);
        state
            .net
            .insert(id, Purpose::Broker, peer, state.now.monotonic_us);
    }
    Core {
        idle_scanned_us: state.now.monotonic_us,
        cold_turn: 0,
        driver,
        state,
        listeners: Vec::new(),
        stop: Arc::new(AtomicBool::new(false)),
        drain_until_us: None,
    }
}

/// One core that has everything.
pub fn alone(ack: AckPoint, queues: i32) -> Core<NullDriver> {
    let mut ends = Mesh::build(1, 64).unwrap();
    core(0, ends.pop().unwrap(), 0, ack, queues)
}

/// A core with connections and another one with the shard.
pub fn pair(ack: AckPoint, queues: i32) -> (Core<NullDriver>, Core<NullDriver>) {
    let mut ends = Mesh::build(2, 4096).unwrap();
    let second = core(1, ends.pop().unwrap(), 1, ack, queues);
    (core(0, ends.pop().unwrap(), 1, ack, queues), second)
}

/// The id of a connection.
pub fn connection(number: u64) -> ConnectionId {
    ConnectionId(1 << 32 | number)
}

/// One turn as the core's loop takes it.
pub fn turn(core: &mut Core<NullDriver>) {
    core.driver.wait(None);
    core.turn();
}
