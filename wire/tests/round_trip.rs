//! What is written is read back the same, whatever the values.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

use std::net::SocketAddr;

use proptest::collection::vec;
use proptest::prelude::*;
use wire::frame::{FRAME_BYTES_MAX, Serialization, needed, split};
use wire::header::{ExtValue, Reply, decode, encode_reply, encode_request_as};
use wire::message::batch::{self, SubMessage};
use wire::message::{RecordFields, RecordView, ids, properties};

fn serialization() -> impl Strategy<Value = Serialization> {
    prop_oneof![Just(Serialization::Json), Just(Serialization::Binary)]
}

/// A value as it is given and as it must be read.
fn value() -> impl Strategy<Value = (Option<i64>, Option<bool>, String)> {
    prop_oneof![
        any::<String>().prop_map(|text| (None, None, text)),
        any::<i64>().prop_map(|number| (Some(number), None, number.to_string())),
        any::<bool>().prop_map(|flag| (None, Some(flag), flag.to_string())),
    ]
}

fn ext_value((number, flag, text): &(Option<i64>, Option<bool>, String)) -> ExtValue<'_> {
    match (number, flag) {
        (Some(number), _) => ExtValue::Int(*number),
        (_, Some(flag)) => ExtValue::Bool(*flag),
        _ => ExtValue::Str(text),
    }
}

fn host() -> impl Strategy<Value = SocketAddr> {
    any::<(std::net::IpAddr, u16)>().prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

proptest! {
    #[test]
    fn requests(
        serialization in serialization(),
        code in 0..i32::from(i16::MAX),
        opaque in any::<i32>(),
        flag in any::<i32>(),
        language in 0u8..14,
        version in 0..i32::from(i16::MAX),
        fields in vec((any::<String>(), value()), 0..60),
        body in vec(any::<u8>(), 0..100),
        rest in vec(any::<u8>(), 0..10),
    ) {
        let ext: Vec<_> =
            fields.iter().map(|(name, value)| (name.as_str(), ext_value(value))).collect();
        let mut bytes = b"before".to_vec();
        encode_request_as(
            &mut bytes, serialization, code, opaque, flag, language, version, &ext, &body,
        );
        let frame_bytes = bytes.len() - 6;
        bytes.extend_from_slice(&rest);
        let bytes = &bytes[6..];
        prop_assert_eq!(needed(&bytes[..4], FRAME_BYTES_MAX).unwrap(), Some(frame_bytes));
        for end in 0..frame_bytes {
            prop_assert!(split(&bytes[..end], FRAME_BYTES_MAX).unwrap().is_none());
        }
        let (frame, consumed) = split(bytes, FRAME_BYTES_MAX).unwrap().unwrap();
        prop_assert_eq!((consumed, frame.body), (frame_bytes, &body[..]));
        let header = decode(&frame).unwrap();
        prop_assert_eq!((header.code, header.opaque, header.flag), (code, opaque, flag));
        prop_assert_eq!((header.language, header.version), (language, version));
        let kept = fields.iter().filter(|(_, (_, _, text))| {
            serialization == Serialization::Json || !text.is_empty()
        });
        let expected: Vec<_> =
            kept.map(|(name, (_, _, text))| (name.clone(), text.clone())).collect();
        let found: Vec<_> =
            header.ext.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        prop_assert_eq!(&found, &expected);
        for (name, _) in found {
            let last = expected.iter().rev().find(|(known, _)| *known == name).unwrap();
            prop_assert!(header.ext.get(&name).unwrap().eq_str(&last.1));
            let mut appended = Vec::new();
            header.ext.get(&name).unwrap().append_to(&mut appended);
            prop_assert_eq!(appended, last.1.as_bytes());
        }
    }

    #[test]
    fn answers(
        serialization in serialization(),
        code in any::<i16>(),
        opaque in any::<i32>(),
        remark in any::<Option<String>>(),
        body in vec(any::<u8>(), 0..100),
    ) {
        let mut bytes = Vec::new();
        let reply = Reply { code: i32::from(code), opaque, remark: remark.as_deref(), ext: &[] };
        encode_reply(&mut bytes, serialization, &reply, &body);
        let (frame, _) = split(&bytes, FRAME_BYTES_MAX).unwrap().unwrap();
        let header = decode(&frame).unwrap();
        prop_assert!(header.is_response() && !header.is_oneway());
        prop_assert_eq!(header.code, i32::from(code));
        prop_assert_eq!(frame.body, &body[..]);
        let found = header.remark.map(|text| text.to_string());
        prop_assert_eq!(found.unwrap_or_default(), remark.unwrap_or_default());
    }

    #[test]
    fn records(
        numbers in any::<(i32, i32, i64, i64, i32, i64, i64, i32, i64)>(),
        born_host in host(),
        store_host in host(),
        body in vec(any::<u8>(), 0..300),
        topic in vec(any::<u8>(), 1..200),
        parts in vec(vec(any::<u8>(), 0..50), 0..4),
        slack in 0usize..10,
    ) {
        let (queue_id, flag, queue_offset, physical_offset, sys_flag, ..) = numbers;
        let (.., born, store, times, prepared) = numbers;
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let fields = RecordFields {
            queue_id, flag, queue_offset, physical_offset, sys_flag,
            born_timestamp: born, born_host, store_timestamp: store, store_host,
            reconsume_times: times, prepared_transaction_offset: prepared,
            body: &body, topic: &topic, properties: &parts,
        };
        let bytes = fields.encoded_len();
        prop_assert!(fields.encode(&mut vec![0; bytes - 1]).is_err());
        let mut out = vec![0xAA; bytes + slack];
        prop_assert_eq!(fields.encode(&mut out).unwrap(), bytes);
        prop_assert!(out[bytes..].iter().all(|byte| *byte == 0xAA));
        let view = RecordView::parse(&out).unwrap();
        view.check_body_crc().unwrap();
        prop_assert_eq!((view.queue_id(), view.flag()), (queue_id, flag));
        prop_assert_eq!(view.queue_offset(), queue_offset);
        prop_assert_eq!(view.physical_offset(), physical_offset);
        prop_assert_eq!(view.sys_flag() & !0x30, sys_flag & !0x30);
        prop_assert_eq!((view.born_timestamp(), view.store_timestamp()), (born, store));
        prop_assert_eq!((view.born_host(), view.store_host()), (born_host, store_host));
        prop_assert_eq!(view.reconsume_times(), times);
        prop_assert_eq!(view.prepared_transaction_offset(), prepared);
        prop_assert_eq!((view.body(), view.topic()), (&body[..], &topic[..]));
        prop_assert_eq!(view.properties(), parts.concat());
        prop_assert_eq!(view.total_len(), bytes);
    }

    #[test]
    fn properties_strings(entries in vec(("[^\u{1}\u{2}]{1,8}", "[^\u{1}\u{2}]{1,8}"), 0..20)) {
        let mut text = Vec::new();
        for (name, value) in &entries {
            properties::append(&mut text, name, value);
        }
        prop_assert!(!properties::needs_separator(&text));
        let found: Vec<_> = properties::iter(&text).collect();
        let expected: Vec<_> =
            entries.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())).collect();
        prop_assert_eq!(&found, &expected);
        if let Some((name, _)) = entries.first() {
            let last = entries.iter().rev().find(|(known, _)| known == name).unwrap();
            prop_assert_eq!(properties::get(&text, name), Some(last.1.as_bytes()));
            let rest = properties::remove(&text, &[name]);
            prop_assert_eq!(properties::get(&rest, name), None);
            let kept = entries.iter().filter(|(known, _)| known != name).count();
            prop_assert_eq!(properties::iter(&rest).count(), kept);
        }
    }

    #[test]
    fn batches(
        messages in vec((any::<i32>(), vec(any::<u8>(), 0..50), vec(any::<u8>(), 0..50)), 0..20),
    ) {
        let mut body = Vec::new();
        let messages: Vec<_> = messages.iter()
            .map(|(flag, body, properties)| SubMessage { flag: *flag, body, properties })
            .collect();
        for message in &messages {
            batch::append(&mut body, message).unwrap();
        }
        let found: Result<Vec<_>, _> = batch::iter(&body).collect();
        prop_assert_eq!(found.unwrap(), messages);
    }

    #[test]
    fn offset_ids(host in host(), offset in any::<i64>()) {
        let mut id = Vec::new();
        ids::offset_msg_id(&mut id, host, offset);
        let id = String::from_utf8(id).unwrap();
        prop_assert_eq!(id.len(), if host.is_ipv4() { 32 } else { 56 });
        prop_assert_eq!(ids::parse_offset_msg_id(&id).unwrap(), (host, offset));
        prop_assert_eq!(ids::parse_offset_msg_id(&id.to_lowercase()).unwrap(), (host, offset));
        prop_assert!(ids::parse_offset_msg_id(&id[1..]).is_err());
        prop_assert!(ids::parse_offset_msg_id(&id.replacen(|_: char| true, "x", 1)).is_err());
    }
}
