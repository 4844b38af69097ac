//! Every captured frame is cut and decoded to the fields its capture states.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use wire::body;
use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{Header, decode, language_code};
use wire::message::{RecordView, batch};
use wire::requests::{PullRequest, SendRequest};

/// One captured frame with what is known about it.
struct Case {
    name: String,
    known: Value,
    bytes: Vec<u8>,
}

fn cases() -> Vec<Case> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let list: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for (index, known) in list.into_iter().enumerate() {
            let name = format!("{} [{index}]", path.file_name().unwrap().to_string_lossy());
            let bytes = unhex(known["frame_hex"].as_str().unwrap());
            cases.push(Case { name, known, bytes });
        }
    }
    assert!(cases.len() >= 60, "only {} captured frames", cases.len());
    cases
}

fn unhex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks_exact(2);
    pairs
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// Calls `check` with every case, its header and its body.
fn for_each(check: impl Fn(&Case, &Header<'_>, &[u8])) {
    for case in cases() {
        let split = split(&case.bytes, FRAME_BYTES_MAX).unwrap();
        let (frame, consumed) = split.unwrap_or_else(|| panic!("{}: incomplete", case.name));
        assert_eq!(consumed, case.bytes.len(), "{}", case.name);
        let header = decode(&frame).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        check(&case, &header, frame.body);
    }
}

fn scalar_text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

#[test]
fn headers_have_the_fields_the_capture_states() {
    for_each(|case, header, body| {
        let (name, known) = (&case.name, &case.known);
        assert_eq!(
            i64::from(header.code),
            known["code"].as_i64().unwrap(),
            "{name}"
        );
        assert_eq!(
            i64::from(header.opaque),
            known["opaque"].as_i64().unwrap(),
            "{name}"
        );
        assert_eq!(
            i64::from(header.flag),
            known["flag"].as_i64().unwrap(),
            "{name}"
        );
        assert_eq!(
            i64::from(header.version),
            known["version"].as_i64().unwrap(),
            "{name}"
        );
        let language = language_code(known["language"].as_str().unwrap());
        assert_eq!(header.language, language, "{name}");
        let is_json = known["serialization"] == "JSON";
        assert_eq!(
            header.serialization == Serialization::Json,
            is_json,
            "{name}"
        );
        assert_eq!(
            body.len() as u64,
            known["body_len"].as_u64().unwrap(),
            "{name}"
        );
        let remark = header
            .remark
            .map(|remark| remark.to_string())
            .unwrap_or_default();
        assert_eq!(
            remark,
            known["remark"].as_str().unwrap_or_default(),
            "{name}"
        );
        assert_eq!(header.is_response(), known["kind"] == "response", "{name}");
        assert_eq!(header.is_oneway(), known["kind"] == "oneway", "{name}");
    });
}

#[test]
fn ext_fields_have_the_values_the_capture_states() {
    for_each(|case, header, _| {
        let mut expected = BTreeMap::new();
        for (name, value) in case.known["ext_fields"].as_object().unwrap() {
            let is_absent = header.serialization == Serialization::Binary && value == "";
            if !value.is_null() && !is_absent {
                expected.insert(name.clone(), scalar_text(value));
            }
        }
        let fields = header
            .ext
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()));
        assert_eq!(
            fields.collect::<BTreeMap<_, _>>(),
            expected,
            "{}",
            case.name
        );
        for (name, value) in &expected {
            assert_eq!(
                header.ext.str(name).as_deref(),
                Some(value.as_str()),
                "{}",
                case.name
            );
        }
    });
}

#[test]
fn send_and_pull_requests_decode_typed() {
    for_each(|case, header, body| {
        let name = &case.name;
        if header.is_response() {
            return;
        }
        let (send, topic_name) = match header.code {
            10 | 324 => (SendRequest::decode_long(&header.ext), "topic"),
            310 | 320 | 325 => (SendRequest::decode_short(&header.ext), "b"),
            11 | 361 => {
                let pull = PullRequest::decode(&header.ext);
                let pull = pull.unwrap_or_else(|error| panic!("{name}: {error}"));
                let offset = scalar_text(&case.known["ext_fields"]["queueOffset"]);
                assert_eq!(pull.queue_offset.to_string(), offset, "{name}");
                return;
            }
            _ => return,
        };
        let send = send.unwrap_or_else(|error| panic!("{name}: {error}"));
        let topic = case.known["ext_fields"][topic_name].as_str().unwrap();
        assert!(send.topic.eq_str(topic), "{name}");
        if header.code == 320 {
            for message in batch::iter(body) {
                message.unwrap_or_else(|error| panic!("{name}: {error}"));
            }
        }
    });
}

#[test]
fn records_in_pull_answers_are_whole_and_encode_to_the_same_bytes() {
    let count = std::cell::Cell::new(0);
    for_each(|case, header, body| {
        let request = case.known["request_code"].as_i64();
        if !header.is_response() || !matches!(request, Some(11 | 33 | 361 | 200_050)) {
            return;
        }
        let mut rest = body;
        while !rest.is_empty() {
            let record = RecordView::parse(rest);
            let record = record.unwrap_or_else(|error| panic!("{}: {error}", case.name));
            record.check_body_crc().unwrap();
            let mut again = vec![0; record.total_len()];
            let fields = wire::message::RecordFields {
                queue_id: record.queue_id(),
                flag: record.flag(),
                queue_offset: record.queue_offset(),
                physical_offset: record.physical_offset(),
                sys_flag: record.sys_flag(),
                born_timestamp: record.born_timestamp(),
                born_host: record.born_host(),
                store_timestamp: record.store_timestamp(),
                store_host: record.store_host(),
                reconsume_times: record.reconsume_times(),
                prepared_transaction_offset: record.prepared_transaction_offset(),
                body: record.body(),
                topic: record.topic(),
                properties: &[record.properties()],
            };
            assert_eq!(fields.encode(&mut again).unwrap(), record.total_len());
            assert_eq!(again, record.raw(), "{}", case.name);
            rest = &rest[record.total_len()..];
            count.set(count.get() + 1);
        }
    });
    assert!(count.get() > 0, "no captured record was seen");
}

fn read<T: serde::de::DeserializeOwned>(name: &str, bytes: &[u8]) -> T {
    body::from_json(bytes).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn json_bodies_are_read_as_their_types() {
    for_each(|case, header, bytes| {
        if !bytes.starts_with(b"{") {
            return;
        }
        let name = &case.name;
        let request = case.known["request_code"].as_i64().unwrap();
        match (request, header.is_response()) {
            (34, false) => {
                let data: body::HeartbeatData = read(name, bytes);
                assert!(!data.client_id.is_empty(), "{name}");
                for group in data.consumer_data_set {
                    assert!(!group.group_name.is_empty(), "{name}");
                    assert_eq!(
                        group.message_model,
                        body::MessageModel::Clustering,
                        "{name}"
                    );
                    assert!(
                        group.subscription_data_set[0].sub_version > 1_700_000_000,
                        "{name}"
                    );
                }
            }
            (38, true) => {
                let list: body::ConsumerListBody = read(name, bytes);
                assert_eq!(body::to_json(&list).unwrap(), bytes, "{name}");
            }
            (42, false) => {
                let lock: body::LockBatchRequest = read(name, bytes);
                assert_eq!(lock.mq_set.len(), 4, "{name}");
            }
            (46, false) => {
                let check: body::CheckClientConfigBody = read(name, bytes);
                assert_eq!(check.subscription_data.expression_type, "SQL92", "{name}");
                assert_eq!(body::to_json(&check).unwrap(), bytes, "{name}");
            }
            (105, true) => {
                let route: body::TopicRouteData = read(name, bytes);
                let is_quoted = bytes.windows(4).any(|window| window == b"{\"0\"");
                let written = route.to_json(is_quoted).unwrap();
                assert_eq!(
                    String::from_utf8_lossy(&written),
                    String::from_utf8_lossy(bytes)
                );
            }
            (400, true) => {
                let answer: body::QueryAssignmentResponse = read(name, bytes);
                assert_eq!(body::to_json(&answer).unwrap(), bytes, "{name}");
            }
            (400, false) => {
                let query: body::QueryAssignmentRequest = read(name, bytes);
                assert_eq!(body::to_json(&query).unwrap(), bytes, "{name}");
            }
            (200_151, false) => {
                let acks: body::BatchAckBody = read(name, bytes);
                assert_eq!(acks.acks[0].bit_set[0], 1, "{name}");
            }
            (code, _) => panic!("{name}: no type was named for the body of {code}"),
        }
    });
}
