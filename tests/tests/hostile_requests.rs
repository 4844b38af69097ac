//! Requests that can be read and ask for what no client may have: each gets a definite answer or a
//! closed connection, and the good send right after it succeeds.
//!
//! Invariant: no input of the table stops the broker, leaves a descriptor open, or makes it keep
//! more memory than [`MEMORY_BYTES_MAX`].

use std::io::ErrorKind;
use std::time::Duration;

use tests::client::{Client, code};
use tests::frame::{Encoding, Frame};
use tests::pop::{code as pop_code, now_ms};
use tests::process::{BrokerProcess, files_below};
use tests::{procfs, turn};

const TOPIC: &str = "hostile";
/// What the broker may have grown by when all is over.
const MEMORY_BYTES_MAX: u64 = 96 << 20;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const CONSUMER_SEND_MSG_BACK: i32 = 36;
const END_TRANSACTION: i32 = 37;
const UPDATE_BROKER_CONFIG: i32 = 25;
const QUERY_ASSIGNMENT: i32 = 400;

type Attack = (String, Frame);

fn named(what: &str, frame: Frame) -> Attack {
    (what.to_owned(), frame)
}

/// A request whose fields are changed in one place.
fn altered(
    kind: i32,
    mut fields: Vec<(&'static str, String)>,
    field: &'static str,
    value: impl Into<String>,
    body: &[u8],
) -> Frame {
    let value = value.into();
    for entry in fields.iter_mut().filter(|entry| entry.0 == field) {
        entry.1.clone_from(&value);
    }
    Frame::request(kind, &fields, body)
}

fn send_with(field: &'static str, value: impl Into<String>, body: &[u8]) -> Frame {
    let fields = vec![
        ("a", "hostile_producer".to_owned()),
        ("b", TOPIC.to_owned()),
        ("c", "TBW102".to_owned()),
        ("d", "4".to_owned()),
        ("e", "0".to_owned()),
        ("f", "0".to_owned()),
        ("g", "1700000000000".to_owned()),
        ("h", "0".to_owned()),
        ("i", String::new()),
        ("j", "0".to_owned()),
        ("k", "false".to_owned()),
        ("m", "false".to_owned()),
    ];
    altered(code::SEND_MESSAGE_V2, fields, field, value, body)
}

fn pull_with(field: &'static str, value: impl Into<String>) -> Frame {
    let fields = vec![
        ("consumerGroup", "hostile_reader".to_owned()),
        ("topic", TOPIC.to_owned()),
        ("queueId", "0".to_owned()),
        ("queueOffset", "0".to_owned()),
        ("maxMsgNums", "32".to_owned()),
        ("sysFlag", "4".to_owned()),
        ("commitOffset", "0".to_owned()),
        ("suspendTimeoutMillis", "0".to_owned()),
        ("subscription", "*".to_owned()),
        ("subVersion", "0".to_owned()),
        ("expressionType", "TAG".to_owned()),
    ];
    altered(code::PULL_MESSAGE, fields, field, value, b"")
}

fn pop_with(field: &'static str, value: impl Into<String>) -> Frame {
    let fields = vec![
        ("consumerGroup", "hostile_popper".to_owned()),
        ("topic", TOPIC.to_owned()),
        ("queueId", "-1".to_owned()),
        ("maxMsgNums", "32".to_owned()),
        ("invisibleTime", "60000".to_owned()),
        ("pollTime", "0".to_owned()),
        ("bornTime", now_ms().to_string()),
        ("initMode", "0".to_owned()),
        ("expType", "TAG".to_owned()),
        ("exp", "*".to_owned()),
        ("order", "false".to_owned()),
    ];
    altered(pop_code::POP_MESSAGE, fields, field, value, b"")
}

fn receipt_with(kind: i32, field: &'static str, value: impl Into<String>) -> Frame {
    let fields = vec![
        ("consumerGroup", "hostile_popper".to_owned()),
        ("topic", TOPIC.to_owned()),
        ("queueId", "0".to_owned()),
        ("offset", "0".to_owned()),
        ("invisibleTime", "60000".to_owned()),
        ("extraInfo", format!("0 {} 60000 0 0 b 0 0", now_ms())),
    ];
    altered(kind, fields, field, value, b"")
}

fn end_with(field: &'static str, value: impl Into<String>) -> Frame {
    let fields = vec![
        ("producerGroup", "hostile_producer".to_owned()),
        ("tranStateTableOffset", "0".to_owned()),
        ("commitLogOffset", "0".to_owned()),
        ("commitOrRollback", "8".to_owned()),
        ("fromTransactionCheck", "false".to_owned()),
        ("msgId", "U".to_owned()),
    ];
    altered(END_TRANSACTION, fields, field, value, b"")
}

/// One message of a batch with lengths of the caller's choice.
fn inner(total: i32, body_len: i32, body: &[u8], properties_len: i16) -> Vec<u8> {
    let mut bytes = total.to_be_bytes().to_vec();
    bytes.extend([0; 12]);
    bytes.extend(body_len.to_be_bytes());
    bytes.extend(body);
    bytes.extend(properties_len.to_be_bytes());
    bytes
}

fn topics() -> Vec<Attack> {
    let names = [
        "../../etc/passwd".to_owned(),
        "/../".to_owned(),
        "..".to_owned(),
        "a/b".to_owned(),
        "a\0b".to_owned(),
        "a\nb".to_owned(),
        "\u{1f4a3}".to_owned(),
        String::new(),
        "%RETRY%".to_owned(),
        "%DLQ%nobody".to_owned(),
        "rmq_sys_pinion_event".to_owned(),
        "SCHEDULE_TOPIC_XXXX".to_owned(),
        "x".repeat(128),
        "x".repeat(256),
        "x".repeat(33_000),
        "x".repeat(66_000),
    ];
    let sends = names.iter().map(|name| {
        let short: String = name.chars().take(30).collect();
        let what = format!("a send to {short:?} of {} bytes", name.len());
        (what, send_with("b", name.clone(), b"body"))
    });
    let creates = names.iter().map(|name| {
        let short: String = name.chars().take(30).collect();
        let fields = [
            ("topic", name.clone()),
            ("defaultTopic", "TBW102".to_owned()),
            ("readQueueNums", "1".to_owned()),
            ("writeQueueNums", "1".to_owned()),
            ("perm", "6".to_owned()),
            ("topicFilterType", "SINGLE_TAG".to_owned()),
            ("topicSysFlag", "0".to_owned()),
            ("order", "false".to_owned()),
        ];
        let what = format!("a topic {short:?} of {} bytes", name.len());
        let frame = Frame::request(code::UPDATE_AND_CREATE_TOPIC, &fields, b"");
        (what, frame)
    });
    sends.chain(creates).collect()
}

fn sends() -> Vec<Attack> {
    vec![
        named("a queue of minus two", send_with("e", "-2", b"b")),
        named("the largest queue id", send_with("e", "2147483647", b"b")),
        named(
            "a queue id beyond 32 bits",
            send_with("e", "99999999999", b"b"),
        ),
        named("a queue id of letters", send_with("e", "zero", b"b")),
        named("every system flag", send_with("f", "-1", b"b")),
        named("a compressed bomb", send_with("f", "1", &[0x78; 200_000])),
        named(
            "a time of birth before time",
            send_with("g", "-9223372036854775808", b"b"),
        ),
        named("retries without end", send_with("j", "2147483647", b"b")),
        named(
            "properties of 40,000 bytes",
            send_with("i", "p".repeat(40_000), b"b"),
        ),
        named(
            "properties that wrap 16 bits",
            send_with("i", "p".repeat(66_000), b"b"),
        ),
        named(
            "properties of separators",
            send_with("i", "\u{1}\u{2}".repeat(9_000), b"b"),
        ),
        named(
            "a delay level of a million",
            send_with("i", "DELAY\u{1}1000000\u{2}", b"b"),
        ),
        named(
            "a delay level below zero",
            send_with("i", "DELAY\u{1}-5\u{2}", b"b"),
        ),
        named(
            "a delay level of letters",
            send_with("i", "DELAY\u{1}soon\u{2}", b"b"),
        ),
        named(
            "a body over the limit",
            send_with("e", "0", &vec![1; 5 << 20]),
        ),
        named("no body", send_with("e", "0", b"")),
    ]
}

fn timers() -> Vec<Attack> {
    let wishes = [
        ("TIMER_DELIVER_MS", "9223372036854775807"),
        ("TIMER_DELIVER_MS", "-9223372036854775808"),
        ("TIMER_DELIVER_MS", "99999999999999999999"),
        ("TIMER_DELIVER_MS", "soon"),
        ("TIMER_DELIVER_MS", ""),
        ("TIMER_DELAY_SEC", "9223372036854775807"),
        ("TIMER_DELAY_SEC", "-1"),
        ("TIMER_DELAY_MS", "9223372036854775807"),
        ("TIMER_DELAY_MS", "1.5"),
        ("TIMER_DEL_UNIQKEY", "of nobody"),
        ("TIMER_DEL_UNIQKEY", ""),
    ];
    let sends = wishes.iter().map(|(key, value)| {
        let what = format!("a message with {key}={value:?}");
        let properties = format!("{key}\u{1}{value}\u{2}TIMER_DELIVER_MS\u{1}1\u{2}");
        let alone = format!("{key}\u{1}{value}\u{2}");
        let both = [
            (what.clone(), alone),
            (format!("{what} and a time"), properties),
        ];
        both.map(|(what, properties)| (what, send_with("i", properties, b"b")))
    });
    sends.flatten().collect()
}

fn batches() -> Vec<Attack> {
    let batch = |body: &[u8]| {
        let mut frame = send_with("m", "true", body);
        frame.code = code::SEND_BATCH_MESSAGE;
        frame
    };
    let many = inner(23, 1, b"x", 0).repeat(100_000);
    vec![
        named("an empty batch", batch(b"")),
        named("an inner length of zero", batch(&inner(0, 1, b"x", 0))),
        named(
            "an inner length of minus one",
            batch(&inner(-1, 1, b"x", 0)),
        ),
        named(
            "an inner length past the end",
            batch(&inner(1000, 1, b"x", 0)),
        ),
        named("an inner body of minus one", batch(&inner(23, -1, b"x", 0))),
        named(
            "an inner body past the end",
            batch(&inner(23, 1 << 30, b"x", 0)),
        ),
        named(
            "inner properties of minus one",
            batch(&inner(23, 1, b"x", -1)),
        ),
        named(
            "inner properties past the end",
            batch(&inner(23, 1, b"x", 32_000)),
        ),
        named("three bytes of a batch", batch(&[0, 0, 1])),
        named("a batch of 100,000", batch(&many)),
    ]
}

fn pulls() -> Vec<Attack> {
    let subscription = "a||".repeat(50_000);
    vec![
        named("a pull of minus one", pull_with("maxMsgNums", "-1")),
        named(
            "a pull of everything",
            pull_with("maxMsgNums", "2147483647"),
        ),
        named("a pull before the start", pull_with("queueOffset", "-1")),
        named(
            "a pull from the smallest",
            pull_with("queueOffset", "-9223372036854775808"),
        ),
        named(
            "a pull from the largest",
            pull_with("queueOffset", "9223372036854775807"),
        ),
        named("a pull from no queue", pull_with("queueId", "4096")),
        named(
            "a pull by an unknown language",
            pull_with("expressionType", "PERL"),
        ),
        named(
            "a subscription of 50,000 tags",
            pull_with("subscription", subscription),
        ),
        named(
            "a group with a path",
            pull_with("consumerGroup", "../../tmp/x"),
        ),
        named(
            "a group of 300 bytes",
            pull_with("consumerGroup", "g".repeat(300)),
        ),
        named(
            "a group of 70,000 bytes",
            pull_with("consumerGroup", "g".repeat(70_000)),
        ),
    ]
}

fn filters() -> Vec<Attack> {
    let pull = |expression: String| {
        let mut frame = pull_with("expressionType", "SQL92");
        let name = "subscription".to_owned();
        frame.fields.insert(name, expression);
        frame
    };
    let nested = format!("{}a = 1{}", "(".repeat(10_000), ")".repeat(10_000));
    vec![
        named("a filter that is none", pull("SELECT 1".to_owned())),
        named("a filter that never ends", pull("a = 'x".to_owned())),
        named("a filter that nests deeply", pull(nested)),
        named(
            "a filter that denies 20,000 times",
            pull("NOT ".repeat(20_000) + "a = 1"),
        ),
        named(
            "a filter of 10,000 parts",
            pull("a = 1 OR ".repeat(10_000) + "a = 1"),
        ),
        named(
            "a filter that divides by zero",
            pull("1 / 0 = 1".to_owned()),
        ),
        named(
            "a filter of the largest number",
            pull(format!("a = {}", "9".repeat(400))),
        ),
    ]
}

fn pops() -> Vec<Attack> {
    let ack = |field, value: &str| receipt_with(pop_code::ACK_MESSAGE, field, value);
    let keep = |field, value: &str| receipt_with(pop_code::CHANGE_INVISIBLE_TIME, field, value);
    let batch = |body: &str| Frame::request(pop_code::BATCH_ACK_MESSAGE, &[], body.as_bytes());
    let bits = |bits: Vec<i32>| {
        let body = serde_json::json!({
            "brokerName": "b",
            "acks": [{
                "c": "hostile_popper", "t": TOPIC, "r": "0", "so": i64::MAX, "q": 0, "rq": 0,
                "pt": 0, "it": 60_000, "b": bits,
            }],
        });
        batch(&body.to_string())
    };
    vec![
        named("a pop of minus one", pop_with("maxMsgNums", "-1")),
        named("a pop of everything", pop_with("maxMsgNums", "2147483647")),
        named("a pop from no queue", pop_with("queueId", "4096")),
        named("a pop that hides for ever", {
            pop_with("invisibleTime", i64::MAX.to_string())
        }),
        named(
            "a pop that hides from before",
            pop_with("invisibleTime", "-1"),
        ),
        named("a pop that waits below zero", pop_with("pollTime", "-1")),
        named("a pop born in the future", {
            pop_with("bornTime", i64::MAX.to_string())
        }),
        named("a pop of an unknown mode", pop_with("initMode", "77")),
        named(
            "a pop of 50,000 tags",
            pop_with("exp", "a||".repeat(50_000)),
        ),
        named("a pop by a path", pop_with("consumerGroup", "../../tmp/x")),
        named("an ordered pop of all queues", pop_with("order", "true")),
        named("a receipt of nothing", ack("extraInfo", "")),
        named("a receipt of one word", ack("extraInfo", "0")),
        named("a receipt of letters", ack("extraInfo", "a b c d e f g h")),
        named(
            "a receipt of the largest numbers",
            ack("extraInfo", &[i64::MAX.to_string().as_str(); 8].join(" ")),
        ),
        named(
            "a receipt of 10,000 words",
            ack("extraInfo", &"0 ".repeat(10_000)),
        ),
        named("a receipt that nobody got", ack("offset", "77")),
        named("an acknowledgement below zero", ack("offset", "-1")),
        named("an acknowledgement to no queue", ack("queueId", "-7")),
        named("a message kept for ever", {
            keep("invisibleTime", "9223372036854775807")
        }),
        named("a message kept since before", keep("invisibleTime", "-5")),
        named("a batch of acknowledgements of nothing", batch("{}")),
        named("a batch of acknowledgements, cut", batch("{\"acks\":[{")),
        named("bits beyond the end", bits(vec![255])),
        named("bits below zero", bits(vec![-1])),
        named("100,001 bytes of bits", bits(vec![255; 100_001])),
    ]
}

fn ends() -> Vec<Attack> {
    let assignment = |body: &str| Frame::request(QUERY_ASSIGNMENT, &[], body.as_bytes());
    let mode =
        |body: &str| Frame::request(pop_code::SET_MESSAGE_REQUEST_MODE, &[], body.as_bytes());
    vec![
        named("the end of a message that is none", {
            end_with("commitLogOffset", "1")
        }),
        named("an end before the start", end_with("commitLogOffset", "-1")),
        named("an end beyond the end", {
            end_with("commitLogOffset", "36028797018963000")
        }),
        named("an end of another half", {
            end_with("tranStateTableOffset", "9223372036854775807")
        }),
        named(
            "an end that decides nothing",
            end_with("commitOrRollback", "0"),
        ),
        named("an end of any kind", end_with("commitOrRollback", "-1")),
        named("an end by a group of 70,000 bytes", {
            end_with("producerGroup", "g".repeat(70_000))
        }),
        named("a half message without a group", {
            send_with("i", "TRAN_MSG\u{1}true\u{2}", b"b")
        }),
        named("an assignment of nothing", assignment("")),
        named("an assignment by a wish", {
            assignment("{\"topic\":7,\"strategyName\":[]}")
        }),
        named("a mode of a topic that is not there", {
            mode("{\"topic\":\"nowhere\",\"consumerGroup\":\"g\",\"mode\":\"POP\"}")
        }),
        named("a mode that is none", mode("{\"mode\":\"STEAL\"}")),
    ]
}

fn looks() -> Vec<Attack> {
    let queue = |field: &'static str, value: String| {
        let fields = vec![
            ("consumerGroup", "hostile_reader".to_owned()),
            ("topic", TOPIC.to_owned()),
            ("queueId", "0".to_owned()),
            ("commitOffset", "0".to_owned()),
        ];
        altered(code::UPDATE_CONSUMER_OFFSET, fields, field, value, b"")
    };
    let at = |kind: i32, offset: &str| {
        let fields = [
            ("topic", TOPIC.to_owned()),
            ("group", "hostile_reader".to_owned()),
            ("offset", offset.to_owned()),
            ("delayLevel", "2147483647".to_owned()),
        ];
        Frame::request(kind, &fields, b"")
    };
    let key = |key: String, most: &str| {
        let fields = [
            ("topic", TOPIC.to_owned()),
            ("key", key),
            ("maxNum", most.to_owned()),
            ("beginTimestamp", "9223372036854775807".to_owned()),
            ("endTimestamp", "-9223372036854775808".to_owned()),
        ];
        Frame::request(code::QUERY_MESSAGE, &fields, b"")
    };
    vec![
        named("a commit below zero", queue("commitOffset", "-5".into())),
        named(
            "a commit beyond the end",
            queue("commitOffset", i64::MAX.to_string()),
        ),
        named("a commit to no queue", queue("queueId", "77".into())),
        named("a send-back from before", at(CONSUMER_SEND_MSG_BACK, "-1")),
        named(
            "a send-back from nowhere",
            at(CONSUMER_SEND_MSG_BACK, "9223372036854775807"),
        ),
        named(
            "a look at a negative place",
            at(code::VIEW_MESSAGE_BY_ID, "-1"),
        ),
        named("a look between records", at(code::VIEW_MESSAGE_BY_ID, "1")),
        named(
            "a look beyond the end",
            at(code::VIEW_MESSAGE_BY_ID, "36028797018963000"),
        ),
        named("a key of 100,000 bytes", key("k".repeat(100_000), "32")),
        named("records by key without end", key("k".into(), "2147483647")),
    ]
}

fn topic_of(count: &str) -> Frame {
    let fields = [
        ("topic", "hostile_queues".to_owned()),
        ("defaultTopic", "TBW102".to_owned()),
        ("readQueueNums", count.to_owned()),
        ("writeQueueNums", count.to_owned()),
        ("perm", "255".to_owned()),
        ("topicFilterType", "SINGLE_TAG".to_owned()),
        ("topicSysFlag", "0".to_owned()),
        ("order", "false".to_owned()),
    ];
    Frame::request(code::UPDATE_AND_CREATE_TOPIC, &fields, b"")
}

fn others() -> Vec<Attack> {
    let plain = |kind: i32, body: &[u8]| Frame::request(kind, &[], body);
    let deep = "[".repeat(100_000);
    let groups: String = (0..10_000)
        .map(|n| format!("{{\"groupName\":\"p{n}\"}},"))
        .collect();
    let flood = format!(
        "{{\"clientID\":\"flood\",\"producerDataSet\":[{}],\"consumerDataSet\":[]}}",
        groups.trim_end_matches(',')
    );
    let names: Vec<String> = (0..100_000).map(|n| format!("f{n}")).collect();
    let fields: Vec<(&str, String)> = names.iter().map(|n| (&**n, String::new())).collect();
    vec![
        named("a code below zero", plain(-1, b"")),
        named("a code of nobody", plain(29_999, b"")),
        named(
            "100,000 fields",
            Frame::request(code::GET_ROUTE, &fields, b""),
        ),
        named("no field at all", plain(code::SEND_MESSAGE_V2, b"body")),
        named("a pull without fields", plain(code::PULL_MESSAGE, b"")),
        named(
            "a heartbeat that is no JSON",
            plain(code::HEART_BEAT, b"\xff\xfe\x00"),
        ),
        named("a heartbeat of nothing", plain(code::HEART_BEAT, b"{}")),
        named(
            "a heartbeat that nests deeply",
            plain(code::HEART_BEAT, deep.as_bytes()),
        ),
        named(
            "a heartbeat of 10,000 groups",
            plain(code::HEART_BEAT, flood.as_bytes()),
        ),
        named(
            "locks that are no JSON",
            plain(code::LOCK_QUEUES, b"{\"mqSet\":7}"),
        ),
        named(
            "locks that nest deeply",
            plain(code::LOCK_QUEUES, deep.as_bytes()),
        ),
        named(
            "settings that move the store",
            plain(UPDATE_BROKER_CONFIG, b"storePathRootDir=/etc\n"),
        ),
        named(
            "settings of garbage",
            plain(UPDATE_BROKER_CONFIG, &[0xff; 5_000]),
        ),
        named("a topic with no queues", topic_of("0")),
        named("a topic with minus one queues", topic_of("-1")),
        named("a topic with two billion queues", topic_of("2147483647")),
        named("a deletion of a path", {
            let fields = [("topic", "../../data".to_owned())];
            Frame::request(code::DELETE_TOPIC_IN_BROKER, &fields, b"")
        }),
    ]
}

fn attacks() -> Vec<Attack> {
    let kinds = [
        topics(),
        sends(),
        timers(),
        batches(),
        pulls(),
        filters(),
        pops(),
        ends(),
        looks(),
        others(),
    ];
    kinds.concat()
}

fn good_send(client: &mut Client) {
    let sent = client.send(TOPIC, 0, b"good", &[]).expect("a good send");
    let pulled = client.pull(TOPIC, 0, sent.queue_offset, 1);
    assert_eq!(pulled.expect("a good pull").records[0].body, b"good");
}

#[test]
fn every_hostile_request_is_answered_and_the_next_good_send_succeeds() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("hostile-requests");
    broker.start();
    let mut good = broker.client();
    good.create_topic(TOPIC, 1).expect("create topic");
    good_send(&mut good);
    let attacks = attacks();
    let (memory, files) = (
        procfs::resident_bytes(broker.pid()),
        procfs::open_files(broker.pid()).len(),
    );
    let mut silent = Vec::new();
    for (what, attack) in &attacks {
        for encoding in [Encoding::Json, Encoding::Binary] {
            // Lengths of fields and codes are shorter in this form; what does not fit is no frame.
            let fits = attack.fields.values().all(|value| value.len() < 32_000)
                && i16::try_from(attack.code).is_ok();
            if encoding == Encoding::Binary && !fits {
                continue;
            }
            let mut client = broker.client().with_encoding(encoding);
            let timeout = client.socket().set_read_timeout(Some(ANSWER_TIMEOUT));
            timeout.expect("timeout");
            match client.start(attack.clone()).and_then(|n| client.finish(n)) {
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    silent.push(format!("{what} ({encoding:?})"));
                }
                // A closed connection is an answer, too.
                Err(_) => {}
            }
            good_send(&mut good);
        }
        assert_eq!(broker.ended(), None, "{what}: {}", broker.output());
    }
    assert!(silent.is_empty(), "never answered: {silent:#?}");
    good_send(&mut broker.client());
    let outside = files_below(broker.root());
    let escaped = outside.iter().filter(|path| {
        let name = path.to_string_lossy();
        name.contains("passwd") || name.contains("hostile_queues")
    });
    assert_eq!(escaped.count(), 0, "a name became a path");
    let (memory_after, files_after) = (
        procfs::resident_bytes(broker.pid()),
        procfs::open_files(broker.pid()).len(),
    );
    assert!(
        memory_after < memory + MEMORY_BYTES_MAX,
        "{memory} bytes before, {memory_after} after"
    );
    assert!(
        files_after <= files + 8,
        "{files} descriptors before, {files_after} after"
    );
    println!("{} distinct inputs", attacks.len());
    broker.stop();
}
