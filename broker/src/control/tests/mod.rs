//! Owns the harness of the control task's tests: a broker's control task without a broker.
//!
//! Invariant: every request goes through the wire form, as it would come from a client.

mod clients;
mod offsets;
mod origins;
mod relays;
mod tables;
mod transactions;

use std::net::SocketAddr;

use serde_json::Value;
use wire::codes::request;
use wire::frame::{self, FRAME_BYTES_MAX, Serialization};
use wire::header::{self, ExtValue, encode_reply, encode_request_as};

use super::effects::{ClientLink, Effect, Origin, PendingRequest};
use super::{Control, ControlSetup, SavedTables};
use crate::config::Config;
use crate::config::value::Name;
use crate::core::report::{OffsetReport, QueueReport, Report, StoreReport};

const NOW: i64 = 1_800_000_000_000;

/// An answer, decoded.
#[derive(Debug)]
struct Reply {
    code: i32,
    remark: String,
    fields: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    fn field(&self, name: &str) -> &str {
        let found = self.fields.iter().find(|(field, _)| field == name);
        &found
            .unwrap_or_else(|| panic!("no field {name} in {:?}", self.fields))
            .1
    }
}

fn decode(bytes: &[u8]) -> (Reply, i32) {
    let (cut, used) = frame::split(bytes, FRAME_BYTES_MAX).unwrap().unwrap();
    assert_eq!(used, bytes.len());
    let header = header::decode(&cut).unwrap();
    let fields = header
        .ext
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()));
    let reply = Reply {
        code: header.code,
        remark: header
            .remark
            .map(|remark| remark.to_string())
            .unwrap_or_default(),
        fields: fields.collect(),
        body: cut.body.to_vec(),
    };
    (reply, header.opaque)
}

struct Harness {
    control: Control,
    now_ms: i64,
    effects: Vec<Effect>,
}

fn link(connection: u64) -> ClientLink {
    ClientLink {
        core: 0,
        connection,
    }
}

fn origin(connection: u64) -> Origin {
    let peer = SocketAddr::from(([127, 0, 0, 1], 40_000 + connection as u16));
    Origin {
        link: link(connection),
        peer,
        creations: 0,
    }
}

fn config() -> Config {
    let mut config = Config::default();
    config.keys.broker_name = Name("broker-a".into());
    config.keys.broker_cluster_name = Name("cluster-x".into());
    config
}

fn setup(config: Config, saved: SavedTables) -> ControlSetup {
    ControlSetup {
        shards: 4,
        config,
        saved,
        broker_address: SocketAddr::from(([10, 0, 0, 1], 10_911)),
        now_ms: NOW,
        boot_ms: NOW,
    }
}

fn frame_of(code: i32, fields: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let ext: Vec<(&str, ExtValue<'_>)> = fields
        .iter()
        .map(|(name, value)| (*name, ExtValue::Str(value)))
        .collect();
    let mut out = Vec::new();
    encode_request_as(
        &mut out,
        Serialization::Json,
        code,
        7,
        0,
        0,
        479,
        &ext,
        body,
    );
    out
}

impl Harness {
    fn new() -> Self {
        Self::with(config())
    }

    fn with(config: Config) -> Self {
        let (control, _) = Control::new(setup(config, SavedTables::default())).unwrap();
        Self {
            control,
            now_ms: NOW,
            effects: Vec::new(),
        }
    }

    /// Sends a request; the effects are kept, an answer is returned if there is one.
    fn send(
        &mut self,
        connection: u64,
        code: i32,
        fields: &[(&str, &str)],
        body: &str,
    ) -> Option<Reply> {
        let bytes = frame_of(code, fields, body.as_bytes());
        self.send_frame(connection, &bytes)
    }

    fn send_frame(&mut self, connection: u64, bytes: &[u8]) -> Option<Reply> {
        let (cut, _) = frame::split(bytes, FRAME_BYTES_MAX).unwrap().unwrap();
        let header = header::decode(&cut).unwrap();
        self.effects.clear();
        let origin = origin(connection);
        self.control.handle(
            self.now_ms,
            &origin,
            &header,
            bytes,
            cut.body,
            &mut self.effects,
        );
        self.reply()
    }

    /// Sends a request that must be answered at once.
    fn ask(&mut self, code: i32, fields: &[(&str, &str)], body: &str) -> Reply {
        self.send(1, code, fields, body).expect("an answer")
    }

    /// Sends a request that needs reports, and answers the need.
    fn ask_with(&mut self, code: i32, fields: &[(&str, &str)], reports: Vec<Report>) -> Reply {
        assert!(
            self.send(1, code, fields, "").is_none(),
            "no answer before the reports"
        );
        let pending = self.effects.drain(..).find_map(|effect| match effect {
            Effect::NeedReports { request, .. } => Some(*request),
            _ => None,
        });
        let mut effects = Vec::new();
        self.control
            .finish(self.now_ms, pending.unwrap(), reports, &mut effects);
        self.effects = effects;
        self.reply().expect("an answer after the reports")
    }

    /// The only answer among the effects.
    fn reply(&self) -> Option<Reply> {
        let mut replies = self.effects.iter().filter_map(|effect| match effect {
            Effect::Reply { frame, .. } => Some(decode(frame).0),
            _ => None,
        });
        let first = replies.next();
        assert!(replies.next().is_none(), "one answer only");
        first
    }

    /// Frames sent to clients: connection, code, opaque, body.
    fn pushes(&self) -> Vec<(u64, Reply, i32)> {
        let pushes = self.effects.iter().filter_map(|effect| match effect {
            Effect::Push { to, frame } => {
                let (push, opaque) = decode(frame);
                Some((to.connection, push, opaque))
            }
            _ => None,
        });
        pushes.collect()
    }

    fn create_topic(&mut self, topic: &str, queues: i32) {
        let reply = self.update_topic(topic, queues, "");
        assert_eq!(reply.code, 0, "{}", reply.remark);
    }

    fn update_topic(&mut self, topic: &str, queues: i32, attributes: &str) -> Reply {
        let queues = queues.to_string();
        let fields = [
            ("topic", topic),
            ("defaultTopic", "TBW102"),
            ("readQueueNums", &queues),
            ("writeQueueNums", &queues),
            ("perm", "6"),
            ("topicFilterType", "SINGLE_TAG"),
            ("topicSysFlag", "0"),
            ("order", "false"),
            ("attributes", attributes),
        ];
        self.ask(request::UPDATE_AND_CREATE_TOPIC, &fields, "")
    }

    fn create_group(&mut self, group: &str) {
        let body = format!("{{\"groupName\":\"{group}\"}}");
        assert_eq!(
            self.ask(request::UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, &[], &body)
                .code,
            0
        );
    }

    /// A heartbeat of a consumer that subscribes `topic` with a tag expression.
    fn beat(
        &mut self,
        connection: u64,
        client: &str,
        group: &str,
        topic: &str,
        tags: &str,
    ) -> Reply {
        self.beat_version(connection, client, group, topic, tags, connection as i64)
    }

    fn beat_version(
        &mut self,
        connection: u64,
        client: &str,
        group: &str,
        topic: &str,
        tags: &str,
        version: i64,
    ) -> Reply {
        let body = format!(
            r#"{{"clientID":"{client}","producerDataSet":[{{"groupName":"p_{group}"}}],
            "consumerDataSet":[{{"groupName":"{group}","consumeType":"CONSUME_PASSIVELY",
            "messageModel":"CLUSTERING","consumeFromWhere":"CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet":[
            {{"topic":"{topic}","subString":"{tags}","tagsSet":[],"codeSet":[],
              "subVersion":{version},"expressionType":"TAG"}},
            {{"topic":"%RETRY%{group}","subString":"*","subVersion":1}}],"unitMode":false}}]}}"#
        );
        self.send(connection, request::HEART_BEAT, &[], &body)
            .expect("an answer")
    }

    fn pending(&self, code: i32, fields: &[(&str, &str)]) -> PendingRequest {
        PendingRequest {
            origin: origin(1),
            frame: frame_of(code, fields, b"body"),
        }
    }
}

fn queue_report(topic: &str, queue_id: i32, max_offset: i64) -> QueueReport {
    QueueReport {
        topic: topic.into(),
        queue_id,
        shard: 0,
        min_offset: 0,
        max_offset,
        first_store_timestamp: if max_offset > 0 { NOW - 5_000 } else { -1 },
        last_store_timestamp: if max_offset > 0 { NOW - 10 } else { 0 },
    }
}

fn offset_report(group: &str, topic: &str, queue_id: i32, offset: i64) -> OffsetReport {
    OffsetReport {
        group: group.into(),
        topic: topic.into(),
        queue_id,
        offset,
        pull_offset: -1,
        last_timestamp: NOW - 1_000,
        ..OffsetReport::default()
    }
}

fn report(queues: Vec<QueueReport>, offsets: Vec<OffsetReport>) -> Vec<Report> {
    vec![Report {
        core: 0,
        queues,
        offsets,
        stores: vec![StoreReport::default()],
    }]
}

/// A client's answer to a request that was passed on to it.
fn client_answer(opaque: i32, code: i32, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let reply = header::Reply {
        code,
        opaque,
        remark: None,
        ext: &[],
    };
    encode_reply(&mut out, Serialization::Json, &reply, body);
    out
}
