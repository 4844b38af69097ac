//! The units of a queue as `mqadmin queryCq` shows them (code 321).
//!
//! Invariant: each unit names place, size and tags of the message at its offset, whether the shard
//! has it in memory or in a run file, and asking makes neither topic nor group.

use serde_json::Value;
use tests::client::{Client, code, physical_offset};
use tests::process::BrokerProcess;
use tests::{payload, turn};

const TOPIC: &str = "queue_units";

fn ask(
    client: &mut Client,
    topic: &str,
    queue: i32,
    index: i64,
    group: &str,
) -> tests::frame::Frame {
    let mut fields = vec![
        ("topic", topic.to_owned()),
        ("queueId", queue.to_string()),
        ("index", index.to_string()),
        ("count", "10".to_owned()),
    ];
    if !group.is_empty() {
        fields.push(("consumerGroup", group.to_owned()));
    }
    client
        .call(code::QUERY_CONSUME_QUEUE, &fields, b"")
        .expect("an answer")
}

/// Java's hash of a string of this alphabet.
fn java_hash(text: &str) -> i64 {
    let step = |hash: i32, byte: u8| hash.wrapping_mul(31).wrapping_add(i32::from(byte));
    i64::from(text.bytes().fold(0, step))
}

#[test]
fn units_name_their_messages_before_and_after_a_restart() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("queue-units");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 2).expect("create topic");
    let mut places = Vec::new();
    for number in 0..30 {
        let tag = format!("Tag{}", number % 3);
        let body = payload::body(number, 100);
        let sent = client
            .send(TOPIC, 1, &body, &[("TAGS", &tag)])
            .expect("send");
        places.push((physical_offset(sent.message_id()), java_hash(&tag)));
    }
    client.heartbeat("c", "online", TOPIC).expect("heartbeat");
    for restarted in [false, true] {
        if restarted {
            broker.stop();
            broker.start();
            client = broker.client();
        }
        let answer = ask(&mut client, TOPIC, 1, 5, "").success().expect("units");
        let body: Value = serde_json::from_slice(&answer.body).expect("JSON");
        assert_eq!(
            (&body["minQueueIndex"], &body["maxQueueIndex"]),
            (&0.into(), &30.into())
        );
        let units = body["queueData"].as_array().expect("units");
        assert_eq!(units.len(), 10, "{body}");
        for (unit, (place, tag)) in units.iter().zip(&places[5..]) {
            assert_eq!(unit["physicOffset"], *place, "restarted: {restarted}");
            assert_eq!(unit["tagsCode"], *tag);
            assert!(unit["physicSize"].as_i64() > Some(100), "{unit}");
        }
    }
    broker.stop();
}

#[test]
fn what_is_not_there_is_said_and_nothing_is_made() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("queue-units-none");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for (topic, queue) in [("no_such_topic", 0), (TOPIC, 7), (TOPIC, -1)] {
        let answer = ask(&mut client, topic, queue, 0, "stranger");
        assert_ne!(answer.code, 0, "{topic}/{queue}");
        assert!(
            answer
                .remark
                .is_some_and(|text| text.contains("is not exist"))
        );
    }
    let beyond = ask(&mut client, TOPIC, 0, 99, "stranger")
        .success()
        .expect("a remark");
    assert!(beyond.body.is_empty() && beyond.remark.is_some());
    client.send(TOPIC, 0, b"one", &[]).expect("send");
    let answer = ask(&mut client, TOPIC, 0, 0, "stranger")
        .success()
        .expect("units");
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    assert!(
        text.contains("stranger@queue_units is not online!"),
        "{text}"
    );
    let groups = client.call(code::GET_ALL_GROUPS, &[], b"").expect("groups");
    assert!(!String::from_utf8_lossy(&groups.body).contains("stranger"));
    assert_eq!(
        broker.namesrv().route("no_such_topic").expect("route"),
        None
    );
    broker.stop();
}
