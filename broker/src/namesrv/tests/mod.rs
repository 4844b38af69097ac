//! Behaviour of the name server as peers see it: frames in, frames out.

mod administration;
mod registration;
mod routes;
mod spread;
mod watch;

use std::net::SocketAddr;

use serde_json::{Value, json};
use wire::codes::request;
use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{ExtValue, decode, encode_request_as};

use super::{NameServer, NameServerConfig};

/// Version of the Go client and of Java clients before 4.9.4.
const OLD: i32 = 317;
/// Version of a current Java client.
const NEW: i32 = 513;

/// A decoded answer.
#[derive(Debug, PartialEq)]
struct Got {
    code: i32,
    remark: Option<String>,
    ext: std::collections::BTreeMap<String, String>,
    body: String,
}

struct Peer {
    server: NameServer,
    now_ms: i64,
}

impl Peer {
    fn new(config: NameServerConfig) -> Self {
        Self {
            server: NameServer::new(config, None, 0).unwrap(),
            now_ms: 0,
        }
    }

    fn call_as(
        &mut self,
        connection: u64,
        version: i32,
        code: i32,
        ext: &[(&str, &str)],
        body: &[u8],
    ) -> Got {
        let out = self.raw(connection, version, code, 0, ext, body);
        let (frame, consumed) = split(&out, FRAME_BYTES_MAX).unwrap().unwrap();
        assert_eq!(consumed, out.len(), "one reply");
        let header = decode(&frame).unwrap();
        assert!(header.is_response());
        assert_eq!(header.opaque, 77);
        Got {
            code: header.code,
            remark: header.remark.map(|text| text.to_string()),
            ext: header
                .ext
                .iter()
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect(),
            body: String::from_utf8(frame.body.to_vec()).unwrap(),
        }
    }

    fn raw(
        &mut self,
        connection: u64,
        version: i32,
        code: i32,
        flag: i32,
        ext: &[(&str, &str)],
        body: &[u8],
    ) -> Vec<u8> {
        let ext: Vec<_> = ext.iter().map(|(k, v)| (*k, ExtValue::Str(v))).collect();
        let mut input = Vec::new();
        let json = Serialization::Json;
        encode_request_as(&mut input, json, code, 77, flag, 0, version, &ext, body);
        let (frame, _) = split(&input, FRAME_BYTES_MAX).unwrap().unwrap();
        let header = decode(&frame).unwrap();
        let peer: SocketAddr = "127.0.0.1:50000".parse().unwrap();
        let mut out = Vec::new();
        self.server
            .handle(self.now_ms, connection, peer, &header, frame.body, &mut out);
        out
    }

    fn call(&mut self, code: i32, ext: &[(&str, &str)]) -> Got {
        self.call_as(1_000, NEW, code, ext, &[])
    }

    fn register(&mut self, broker: &Broker, counter: i64, topics: &[(&str, i32)]) -> Got {
        let body = register_body(counter, topics);
        self.call_as(
            broker.connection,
            NEW,
            request::REGISTER_BROKER,
            &broker.ext(),
            &body,
        )
    }

    fn route(&mut self, topic: &str) -> Got {
        self.call(request::GET_ROUTEINFO_BY_TOPIC, &[("topic", topic)])
    }

    fn has(&mut self, topic: &str) -> bool {
        self.route(topic).code == 0
    }

    fn perm(&mut self, topic: &str) -> i64 {
        let route: Value = serde_json::from_str(&self.route(topic).body).unwrap();
        route["queueDatas"][0]["perm"].as_i64().unwrap()
    }
}

#[derive(Clone)]
struct Broker {
    name: &'static str,
    id: &'static str,
    address: &'static str,
    connection: u64,
    extra: Vec<(&'static str, &'static str)>,
}

impl Broker {
    fn master(name: &'static str, address: &'static str, connection: u64) -> Self {
        Self {
            name,
            id: "0",
            address,
            connection,
            extra: Vec::new(),
        }
    }

    fn ext(&self) -> Vec<(&'static str, &'static str)> {
        let mut ext = vec![
            ("brokerName", self.name),
            ("brokerAddr", self.address),
            ("clusterName", "DefaultCluster"),
            ("haServerAddr", "10.0.0.1:10912"),
            ("brokerId", self.id),
            ("compressed", "false"),
            ("bodyCrc32", "0"),
        ];
        ext.extend(&self.extra);
        ext
    }
}

fn a() -> Broker {
    Broker::master("broker-a", "10.0.0.1:10911", 1)
}

fn b() -> Broker {
    Broker::master("broker-b", "10.0.0.2:10911", 2)
}

/// A registration body in the shape of 5.x; topics come with their permission.
fn register_body(counter: i64, topics: &[(&str, i32)]) -> Vec<u8> {
    let table: serde_json::Map<String, Value> = topics
        .iter()
        .map(|(name, perm)| {
            let topic = json!({
                "attributes": {}, "order": false, "perm": perm, "readQueueNums": 4,
                "topicFilterType": "SINGLE_TAG", "topicName": name, "topicSysFlag": 0,
                "writeQueueNums": 4,
            });
            ((*name).to_owned(), topic)
        })
        .collect();
    let version =
        json!({"counter": counter, "stateVersion": 0, "timestamp": 1_700_000_000_000_i64});
    let body = json!({
        "filterServerList": [],
        "topicConfigSerializeWrapper": {
            "dataVersion": version, "mappingDataVersion": version, "topicConfigTable": table,
            "topicQueueMappingDetailMap": {}, "topicQueueMappingInfoMap": {},
        },
    });
    serde_json::to_vec(&body).unwrap()
}
