//! The test vectors of the protocol notes, byte for byte.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{ExtValue, Reply, decode, encode_reply, encode_request};
use wire::message::{RecordFields, RecordView, ids, properties};

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b' ').collect();
    let pairs = digits.chunks_exact(2);
    pairs
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// The binary request of the notes, with the total length its own 33 bytes of header demand.
#[test]
fn binary_route_request() {
    let mut out = Vec::new();
    let ext = [("topic", ExtValue::Str("T"))];
    encode_request(&mut out, Serialization::Binary, 105, 1, false, &ext, b"");
    let expected = unhex(
        "00000025 01000021 0069 00 01df 00000001 00000000 00000000 0000000c 0005 746f706963 \
         00000001 54",
    );
    assert_eq!(out, expected);
}

#[test]
fn json_route_request() {
    let mut out = Vec::new();
    let ext = [("topic", ExtValue::Str("T"))];
    encode_request(&mut out, Serialization::Json, 105, 1, false, &ext, b"");
    let mut expected = unhex("0000007f 0000007b");
    expected.extend_from_slice(
        b"{\"code\":105,\"extFields\":{\"topic\":\"T\"},\"flag\":0,\"language\":\"JAVA\",\
          \"opaque\":1,\"serializeTypeCurrentRPC\":\"JSON\",\"version\":479}",
    );
    assert_eq!(out, expected);
}

#[test]
fn json_answer_has_the_form_of_apache() {
    let mut out = Vec::new();
    let ext = [
        ("queueId", ExtValue::Int(2)),
        ("TRACE_ON", ExtValue::Bool(true)),
    ];
    let reply = Reply {
        code: 0,
        opaque: 7,
        remark: Some("a\n\u{1}b"),
        ext: &ext,
    };
    encode_reply(&mut out, Serialization::Json, &reply, b"xy");
    let header = b"{\"code\":0,\"extFields\":{\"queueId\":\"2\",\"TRACE_ON\":\"true\"},\"flag\":1,\
                   \"language\":\"JAVA\",\"opaque\":7,\"remark\":\"a\\n\\u0001b\",\
                   \"serializeTypeCurrentRPC\":\"JSON\",\"version\":479}";
    assert_eq!(&out[8..out.len() - 2], header);
    out.clear();
    let bare = Reply {
        code: 19,
        opaque: -1,
        remark: None,
        ext: &[],
    };
    encode_reply(&mut out, Serialization::Json, &bare, b"");
    let header = b"{\"code\":19,\"flag\":1,\"language\":\"JAVA\",\"opaque\":-1,\
                   \"serializeTypeCurrentRPC\":\"JSON\",\"version\":479}";
    assert_eq!(&out[8..], header);
}

fn hello() -> RecordFields<'static> {
    RecordFields {
        queue_id: 0,
        flag: 0,
        queue_offset: 5,
        physical_offset: 1024,
        sys_flag: 0,
        born_timestamp: 1_700_000_000_000,
        born_host: "127.0.0.1:50000".parse().unwrap(),
        store_timestamp: 1_700_000_000_001,
        store_host: "127.0.0.1:10911".parse().unwrap(),
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body: b"hello",
        topic: b"T",
        properties: &[b"TAGS\x01", b"A\x02"],
    }
}

#[test]
fn record_of_version_one() {
    let expected = unhex(
        "00000068 daa320a7 3610a686 00000000 00000000 0000000000000005 0000000000000400 00000000 \
         0000018bcfe56800 7f0000010000c350 0000018bcfe56801 7f00000100002a9f 00000000 \
         0000000000000000 00000005 68656c6c6f 01 54 0007 54414753014102",
    );
    let mut out = vec![0xEE; 110];
    assert_eq!(hello().encode(&mut out).unwrap(), 104);
    assert_eq!(&out[..104], expected);
    assert_eq!(&out[104..], [0xEE; 6]);
    let record = RecordView::parse(&out).unwrap();
    assert_eq!((record.total_len(), record.raw()), (104, &expected[..]));
    record.check_body_crc().unwrap();
    assert_eq!(
        properties::get(record.properties(), "TAGS"),
        Some(&b"A"[..])
    );
}

#[test]
fn offset_id_of_the_record() {
    let mut id = Vec::new();
    ids::offset_msg_id(&mut id, hello().store_host, hello().physical_offset);
    assert_eq!(id, b"7F00000100002A9F0000000000000400");
}

#[test]
fn long_topics_use_version_two_and_short_ones_never() {
    for (topic_bytes, magic) in [
        (127, wire::message::MAGIC_V1),
        (128, wire::message::MAGIC_V2),
    ] {
        let topic = vec![b't'; topic_bytes];
        let fields = RecordFields {
            topic: &topic,
            ..hello()
        };
        let mut out = vec![0; fields.encoded_len()];
        fields.encode(&mut out).unwrap();
        let record = RecordView::parse(&out).unwrap();
        assert_eq!((record.magic(), record.topic()), (magic, &topic[..]));
    }
}

#[test]
fn binary_codes_are_cut_to_sixteen_bits() {
    let mut out = Vec::new();
    encode_request(&mut out, Serialization::Binary, 200_050, 1, true, &[], b"");
    let (frame, _) = split(&out, FRAME_BYTES_MAX).unwrap().unwrap();
    let header = decode(&frame).unwrap();
    assert_eq!(header.code, 3442);
    assert!(header.is_oneway() && !header.is_response());
}
