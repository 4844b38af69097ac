//! Questions about open transactions, and where half messages live.

use wire::codes::request;
use wire::message::{RecordFields, RecordView, properties};

use super::*;
use crate::control::transactions::CheckBack;

fn half() -> Vec<u8> {
    let mut stored = Vec::new();
    for (name, value) in [
        (properties::PRODUCER_GROUP, "pg"),
        (properties::UNIQ_KEY, "U1"),
        (properties::REAL_TOPIC, "T"),
        (properties::REAL_QUEUE_ID, "2"),
    ] {
        properties::append(&mut stored, name, value);
    }
    let host = SocketAddr::from(([10, 0, 0, 1], 10_911));
    let fields = RecordFields {
        queue_id: 0,
        flag: 5,
        queue_offset: 11,
        physical_offset: 4_096,
        sys_flag: 0,
        born_timestamp: NOW,
        born_host: host,
        store_timestamp: NOW,
        store_host: host,
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body: b"body",
        topic: b"RMQ_SYS_TRANS_HALF_TOPIC",
        properties: &[&stored],
    };
    let mut record = vec![0; fields.encoded_len()];
    fields.encode(&mut record).unwrap();
    record
}

#[test]
fn producers_of_the_group_are_asked_in_turn_with_the_message_under_its_own_topic() {
    let mut harness = Harness::new();
    let check = CheckBack::new(&half(), 2).unwrap();
    let body = r#"{"clientID":"c","producerDataSet":[{"groupName":"pg"}],"consumerDataSet":[]}"#;
    for connection in [1, 2] {
        harness.send(connection, request::HEART_BEAT, &[], body);
    }
    let mut asked = Vec::new();
    for _ in 0..4 {
        let mut effects = Vec::new();
        harness.control.check_back(&check, &mut effects);
        let [Effect::Push { to, frame }] = &effects[..] else {
            panic!("{effects:?}");
        };
        asked.push(to.connection);
        let (question, _) = decode(frame);
        assert_eq!(question.code, request::CHECK_TRANSACTION_STATE);
        assert_eq!(question.field("tranStateTableOffset"), "11");
        assert_eq!(question.field("commitLogOffset"), "4096");
        assert_eq!(question.field("transactionId"), "U1");
        assert_eq!(question.field("bname"), "broker-a");
        let view = RecordView::parse(&question.body).unwrap();
        assert_eq!((view.topic(), view.queue_id()), (&b"T"[..], 2));
        let times = properties::get_str(view.properties(), "TRANSACTION_CHECK_TIMES");
        assert_eq!((view.body(), times), (&b"body"[..], Some("2")));
    }
    assert_eq!(asked, [1, 2, 1, 2]);
}

#[test]
fn a_group_without_producers_is_not_asked_but_counted() {
    let mut harness = Harness::new();
    let mut effects = Vec::new();
    let check = CheckBack::new(&half(), 1).unwrap();
    harness.control.check_back(&check, &mut effects);
    assert!(effects.is_empty());
    assert_eq!(harness.control.checks.unasked, 1);
}

#[test]
fn every_shard_has_a_queue_for_its_half_messages_and_for_those_given_up() {
    let first = setup(config(), SavedTables::default());
    let (mut control, _) = Control::new(first).unwrap();
    let topics = ["RMQ_SYS_TRANS_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"];
    for topic in topics {
        assert_eq!(control.topics.get(topic).unwrap().shards, [0, 1, 2, 3]);
    }
    let mut more = setup(config(), SavedTables::default());
    more.saved.topics = Some(control.topics.topics_text().unwrap());
    more.saved.placement = Some(control.topics.placement_text());
    more.shards = 5;
    (control, _) = Control::new(more).unwrap();
    for topic in topics {
        let placed = control.topics.get(topic).unwrap();
        assert_eq!(placed.shards, [0, 1, 2, 3, 4]);
        assert_eq!(placed.config.read_queue_nums, 5);
    }
}
