//! Malformed input is refused with an error that says what and where, and odd but legal input is
//! understood.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

use wire::body::{self, BodyError, lenient};
use wire::frame::{Frame, Serialization};
use wire::header::{EXT_FIELDS_MAX, FieldError, Header, HeaderError, decode};
use wire::message::batch::{self, BatchError, SubMessage};
use wire::message::{RecordError, RecordView, properties};
use wire::requests::{PullRequest, SendRequest};

fn json(text: &str) -> Result<Header<'_>, HeaderError> {
    bytes(text.as_bytes(), Serialization::Json)
}

fn bytes(header: &[u8], serialization: Serialization) -> Result<Header<'_>, HeaderError> {
    decode(&Frame {
        serialization,
        header,
        body: b"",
    })
}

#[test]
fn json_headers_may_be_written_in_any_legal_way() {
    let header = json(
        " {\"x\":[{\"y\":{}},[],1.5e3,\"\\\\\\\"\"] ,\"extFields\" : {\"n\":-3,\"b\":true,\
         \"z\":null,\
         \"\\u0061\":\"\\ud83d\\ude00\\u0001\\/\"},\"opaque\":\"7\",\"language\":9,\"code\":10,\
         \"remark\":null}\n",
    );
    let header = header.unwrap();
    assert_eq!((header.code, header.opaque, header.language), (10, 7, 9));
    assert!(header.remark.is_none());
    assert_eq!(header.ext.len(), 3);
    assert_eq!(header.ext.i32("n"), Ok(Some(-3)));
    assert_eq!(header.ext.bool("b"), Ok(Some(true)));
    assert!(header.ext.get("z").is_none());
    let text = header.ext.get("a").unwrap();
    assert!(text.eq_str("😀\u{1}/") && !text.eq_str("😀\u{1}") && text.as_plain().is_none());
    assert_eq!(text.to_cow(), "😀\u{1}/");
}

#[test]
fn missing_ext_fields_and_unknown_languages_are_fine() {
    let header = json("{\"code\":34,\"language\":\"COBOL\"}").unwrap();
    assert_eq!(
        (header.ext.len(), header.language),
        (0, wire::header::LANGUAGE_OTHER)
    );
    assert!(
        json("{\"code\":34,\"extFields\":null}")
            .unwrap()
            .ext
            .is_empty()
    );
}

#[test]
fn malformed_json_headers_are_refused() {
    let deep = format!("{{\"code\":1,\"x\":{}{}}}", "[".repeat(17), "]".repeat(17));
    for text in [
        "",
        "{",
        "{}",
        "[]",
        "{\"code\":1",
        "{\"code\":1}x",
        "{\"code\":1,}",
        "{\"code\":1 \"flag\":2}",
        "{\"code\":tru}",
        "{\"code\":1.5}",
        "{\"code\":99999999999}",
        "{\"code\":{}}",
        "{\"code\":1,\"extFields\":[]}",
        "{\"code\":1,\"extFields\":{\"a\":}}",
        "{\"code\":1,\"remark\":\"\\q\"}",
        "{\"code\":1,\"remark\":\"\\u12g4\"}",
        "{\"code\":1,\"remark\":\"\\u1",
        "{\"code\":1,\"remark\":\"",
        "{\"code\":01x}",
        deep.as_str(),
    ] {
        assert!(json(text).is_err(), "{text}");
    }
    let shallow = format!("{{\"code\":1,\"x\":{}{}}}", "[".repeat(16), "]".repeat(16));
    assert!(json(&shallow).is_ok());
    let error = bytes(b"{\"code\":1,\"remark\":\"\xff\"}", Serialization::Json).unwrap_err();
    assert_eq!(error, HeaderError::NotUtf8 { at: 20 });
}

#[test]
fn half_a_surrogate_pair_is_replaced() {
    let header = json("{\"code\":1,\"remark\":\"a\\ud83dz\\ude00\"}").unwrap();
    assert_eq!(header.remark.unwrap().to_cow(), "a\u{FFFD}z\u{FFFD}");
}

#[test]
fn ext_fields_spill_and_are_bounded() {
    let header = |count: usize| {
        let fields: Vec<_> = (0..count).map(|n| format!("\"k{n}\":\"v{n}\"")).collect();
        format!("{{\"code\":1,\"extFields\":{{{}}}}}", fields.join(","))
    };
    for count in [39, 40, 41, EXT_FIELDS_MAX] {
        let text = header(count);
        let header = json(&text).unwrap();
        assert_eq!(header.ext.len(), count);
        let last = format!("k{}", count - 1);
        assert_eq!(
            header.ext.str(&last).as_deref(),
            Some(format!("v{}", count - 1).as_str())
        );
    }
    assert_eq!(
        json(&header(EXT_FIELDS_MAX + 1)).unwrap_err(),
        HeaderError::TooManyFields
    );
}

#[test]
fn malformed_binary_headers_are_refused() {
    let mut good = Vec::new();
    let ext = [("k", wire::header::ExtValue::Str("v"))];
    wire::header::encode_request(&mut good, Serialization::Binary, 1, 2, false, &ext, b"");
    let good = &good[8..];
    assert!(bytes(good, Serialization::Binary).is_ok());
    for end in 0..good.len() {
        assert!(
            bytes(&good[..end], Serialization::Binary).is_err(),
            "cut at {end}"
        );
    }
    let mut longer = good.to_vec();
    longer.push(0);
    let error = bytes(&longer, Serialization::Binary).unwrap_err();
    assert_eq!(
        error,
        HeaderError::Trailing {
            at: good.len(),
            bytes: 1
        }
    );
    for at in 0..good.len() {
        let mut changed = good.to_vec();
        changed[at] = 0xFF;
        drop(bytes(&changed, Serialization::Binary));
    }
    let mut negative = good.to_vec();
    negative[13] = 0x80;
    assert!(matches!(
        bytes(&negative, Serialization::Binary),
        Err(HeaderError::Length {
            field: "remark",
            ..
        })
    ));
}

#[test]
fn field_errors_name_field_value_and_expectation() {
    let long = "x".repeat(100);
    let text = format!("{{\"code\":11,\"extFields\":{{\"queueId\":\"{long}\",\"m\":\"maybe\"}}}}");
    let header = json(&text).unwrap();
    let error = header.ext.need_i32("queueId").unwrap_err().to_string();
    let cut = "x".repeat(64);
    assert_eq!(
        error,
        format!("header field queueId is \"{cut}\", expected a 32-bit integer")
    );
    let error = header.ext.need_bool("m").unwrap_err().to_string();
    assert_eq!(
        error,
        "header field m is \"maybe\", expected true, false, 1 or 0"
    );
    let error = header.ext.need_i64("offset").unwrap_err().to_string();
    assert_eq!(
        error,
        "header field offset is missing, expected a 64-bit integer"
    );
    let error = PullRequest::decode(&header.ext).unwrap_err();
    assert_eq!(error, FieldError::missing("consumerGroup", "a string"));
}

#[test]
fn send_booleans_may_be_digits_and_names_may_hold_escapes() {
    let header = json(
        "{\"code\":10,\"extFields\":{\"producerGroup\":\"P\",\"top\\u0069c\":\"T\",\
         \"defaultTopic\":\"TBW102\",\"defaultTopicQueueNums\":4,\"queueId\":1,\"sysFlag\":0,\
         \"bornTimestamp\":\"1\",\"flag\":0,\"batch\":\"1\",\"unitMode\":\"0\"}}",
    );
    let header = header.unwrap();
    let send = SendRequest::decode_long(&header.ext).unwrap();
    assert!(send.batch && !send.unit_mode && send.topic.eq_str("T"));
    assert_eq!((send.reconsume_times, send.max_reconsume_times), (0, None));
}

#[test]
fn batch_lengths_are_checked() {
    let mut body = Vec::new();
    for text in [b"one", b"two"] {
        batch::append(
            &mut body,
            &SubMessage {
                flag: 1,
                body: text,
                properties: b"",
            },
        )
        .unwrap();
    }
    let second = body.len() / 2;
    let first_error = |body: &[u8]| batch::iter(body).find_map(Result::err);
    assert_eq!(first_error(&body), None);
    for length in [0, -1, 3, i32::MAX, i32::MIN] {
        let mut bad = body.clone();
        bad[second..second + 4].copy_from_slice(&length.to_be_bytes());
        let Some(BatchError::Length {
            index: 1, offset, ..
        }) = first_error(&bad)
        else {
            panic!("length {length}: {:?}", first_error(&bad));
        };
        assert_eq!(offset, second);
    }
    for (at, length) in [(16, -1i32), (16, 4), (16, i32::MAX)] {
        let mut bad = body.clone();
        bad[at..at + 4].copy_from_slice(&length.to_be_bytes());
        assert!(first_error(&bad).is_some(), "body length {length}");
    }
    let mut bad = body.clone();
    bad[16..20].copy_from_slice(&2i32.to_be_bytes());
    assert!(first_error(&bad).is_some());
    for end in 1..body.len() {
        if end != second {
            assert!(first_error(&body[..end]).is_some(), "cut at {end}");
        }
    }
}

#[test]
fn an_over_long_batch_is_refused() {
    let mut body = Vec::new();
    for _ in 0..=batch::SUB_MESSAGES_MAX {
        batch::append(
            &mut body,
            &SubMessage {
                flag: 0,
                body: b"",
                properties: b"",
            },
        )
        .unwrap();
    }
    assert_eq!(
        batch::iter(&body).find_map(Result::err),
        Some(BatchError::TooMany)
    );
}

#[test]
fn records_with_any_broken_length_are_refused() {
    let fields = wire::message::RecordFields {
        queue_id: 1,
        flag: 0,
        queue_offset: 2,
        physical_offset: 3,
        sys_flag: 0,
        born_timestamp: 4,
        born_host: "10.0.0.1:1".parse().unwrap(),
        store_timestamp: 5,
        store_host: "[2001:db8::1]:2".parse().unwrap(),
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body: b"body",
        topic: b"topic",
        properties: &[b"a\x01b\x02"],
    };
    let mut good = vec![0; fields.encoded_len()];
    fields.encode(&mut good).unwrap();
    assert!(RecordView::parse(&good).is_ok());
    for end in 0..good.len() {
        assert!(RecordView::parse(&good[..end]).is_err(), "cut at {end}");
    }
    let body_at = 84 + 12;
    for at in [3, 7, 39, body_at + 3, body_at + 8, body_at + 8 + 6 + 1] {
        for change in [1u8, 0x10, 0x80] {
            let mut bad = good.clone();
            bad[at] ^= change;
            let is_flag = at == 39 && change & 0x30 == 0;
            assert_eq!(
                RecordView::parse(&bad).is_err(),
                !is_flag,
                "byte {at} ^ {change:#x}"
            );
        }
    }
    let mut bad = good.clone();
    bad[body_at + 5] ^= 1;
    let record = RecordView::parse(&bad).unwrap();
    assert!(matches!(
        record.check_body_crc(),
        Err(RecordError::BodyCrc { .. })
    ));
    let mut blank = vec![0; 64];
    blank[3] = 64;
    blank[4..8].copy_from_slice(&wire::message::MAGIC_BLANK.to_be_bytes());
    assert_eq!(
        RecordView::parse(&blank).unwrap_err(),
        RecordError::Blank(64)
    );
}

#[test]
fn properties_drop_what_others_drop() {
    let text = b"a\x011\x02bad\x02\x01novalue\x02novalue\x01\x02c\x01x\x01y\x02a\x012";
    let entries: Vec<_> = properties::iter(text).collect();
    let expected: [(&[u8], &[u8]); 3] = [(b"a", b"1"), (b"c", b"x\x01y"), (b"a", b"2")];
    assert_eq!(entries, expected);
    assert_eq!(properties::get(text, "a"), Some(&b"2"[..]));
    assert!(properties::needs_separator(text) && !properties::needs_separator(b""));
    assert_eq!(properties::remove(text, &["a"]), b"c\x01x\x01y\x02");
}

#[test]
fn the_dialect_becomes_standard_json() {
    let standard = |text: &str| {
        let standard = lenient::to_standard_json(text.as_bytes());
        standard.map(|bytes| String::from_utf8(bytes).unwrap())
    };
    assert_eq!(
        standard("{ 0 : \"a:1\" , -1:{x_1:[ 1 , null]} }").unwrap(),
        "{\"0\":\"a:1\",\"-1\":{\"x_1\":[1,null]}}"
    );
    assert_eq!(
        standard("{{\"brokerName\":\"b\\\"c\",\"queueId\":0}:{\"n\":1}}").unwrap(),
        "{\"{\\\"brokerName\\\":\\\"b\\\\\\\"c\\\",\\\"queueId\\\":0}\":{\"n\":1}}"
    );
    for text in [
        "",
        "{",
        "{:1}",
        "{1}",
        "[1,]x",
        "{{{1:2}:3}:4}",
        "{\"a\":1,}",
        "\"a",
        "{a:}",
    ] {
        assert!(standard(text).is_err(), "{text}");
    }
    let deep = "[".repeat(100_000);
    assert!(matches!(
        standard(&deep),
        Err(BodyError::Malformed { at: 65, .. })
    ));
}

#[test]
fn bodies_of_another_shape_say_what_was_expected() {
    let error = body::from_json::<body::HeartbeatData>(b"{\"clientID\":[1]}").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("body is not a HeartbeatData: "),
        "{error}"
    );
}
