//! Bodies are written as other RocketMQ programs write them and read back the same.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

use std::collections::BTreeMap;

use wire::body::*;

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

fn queue(queue_id: i32) -> MessageQueue {
    MessageQueue {
        broker_name: "b".into(),
        queue_id,
        topic: "T".into(),
    }
}

#[test]
fn queue_tables_have_objects_for_keys() {
    let offset = TopicOffset {
        last_update_timestamp: 1,
        max_offset: 9,
        min_offset: 0,
    };
    let stats = TopicStatsTable {
        offset_table: [(queue(0), offset)].into_iter().collect(),
        topic_put_tps: 0.0,
    };
    let written = to_json(&stats).unwrap();
    assert_eq!(
        text(written.clone()),
        "{\"offsetTable\":{{\"brokerName\":\"b\",\"queueId\":0,\"topic\":\"T\"}:\
         {\"lastUpdateTimestamp\":1,\"maxOffset\":9,\"minOffset\":0}},\"topicPutTps\":0.0}"
    );
    assert_eq!(from_json::<TopicStatsTable>(&written).unwrap(), stats);
    assert_eq!(to_standard_json(&stats).unwrap(), written);
}

#[test]
fn nested_queue_tables_are_written_and_read() {
    let wrapper = OffsetWrapper {
        broker_offset: 5,
        consumer_offset: 3,
        ..Default::default()
    };
    let odd = MessageQueue {
        broker_name: "quote\" and \\ \n".into(),
        queue_id: -1,
        topic: "主题".into(),
    };
    let stats = ConsumeStats {
        consume_tps: 1.5,
        offset_table: [(queue(1), wrapper), (odd, wrapper)].into_iter().collect(),
    };
    let list = ConsumeStatsList {
        broker_addr: Some("10.0.0.1:10911".into()),
        consume_stats_list: vec![BTreeMap::from([("group".to_owned(), vec![stats])])],
        total_diff: 2,
        total_inflight_diff: 0,
    };
    let written = to_json(&list).unwrap();
    assert_eq!(from_json::<ConsumeStatsList>(&written).unwrap(), list);
    let status = ConsumerStatusBody {
        consumer_table: Some(BTreeMap::from([(
            "c@1".to_owned(),
            [(queue(0), 7)].into_iter().collect(),
        )])),
        message_queue_table: None,
    };
    let written = to_json(&status).unwrap();
    assert_eq!(
        text(written.clone()),
        "{\"consumerTable\":{\"c@1\":{{\"brokerName\":\"b\",\"queueId\":0,\"topic\":\"T\"}:7}}}"
    );
    assert_eq!(from_json::<ConsumerStatusBody>(&written).unwrap(), status);
}

#[test]
fn names_that_look_like_objects_stay_names() {
    let table = [(queue(0), 7)].into_iter().collect();
    let status = ConsumerStatusBody {
        consumer_table: Some(BTreeMap::from([("{\"queueId\":1}".to_owned(), table)])),
        message_queue_table: None,
    };
    let written = to_json(&status).unwrap();
    assert!(text(written.clone()).starts_with("{\"consumerTable\":{\"{\\\"queueId\\\":1}\":{{"));
    assert_eq!(from_json::<ConsumerStatusBody>(&written).unwrap(), status);
    // A writer that knows nothing of object keys quotes them, and leaves no trace for the next.
    let quoted = serde_json::to_vec(&status).unwrap();
    assert_eq!(from_json::<ConsumerStatusBody>(&quoted).unwrap(), status);
    assert_eq!(
        text(to_json(&BTreeMap::from([("{", 1)])).unwrap()),
        "{\"{\":1}"
    );
}

#[test]
fn reset_offsets_have_a_list_form_for_cpp() {
    let body = ResetOffsetBody {
        offset_table: [(queue(0), 4)].into_iter().collect(),
    };
    assert_eq!(
        text(body.to_list_json().unwrap()),
        "{\"offsetTable\":[{\"brokerName\":\"b\",\"offset\":4,\"queueId\":0,\"topic\":\"T\"}]}"
    );
}

#[test]
fn routes_quote_broker_ids_only_when_asked() {
    let broker = BrokerData {
        broker_addrs: BTreeMap::from([(0, "1.1.1.1:1".to_owned()), (1, "1.1.1.2:1".to_owned())]),
        broker_name: "b".into(),
        cluster: "C".into(),
        ..BrokerData::default()
    };
    let info = ClusterInfo {
        broker_addr_table: BTreeMap::from([("b".to_owned(), broker)]),
        cluster_addr_table: BTreeMap::from([("C".to_owned(), vec!["b".to_owned()])]),
    };
    let bare = info.to_json(false).unwrap();
    let quoted = info.to_json(true).unwrap();
    assert_eq!(
        text(bare.clone()),
        "{\"brokerAddrTable\":{\"b\":{\"brokerAddrs\":{0:\"1.1.1.1:1\",1:\"1.1.1.2:1\"},\
         \"brokerName\":\"b\",\"cluster\":\"C\",\"enableActingMaster\":false}},\
         \"clusterAddrTable\":{\"C\":[\"b\"]}}"
    );
    assert_eq!(
        text(quoted.clone()),
        text(bare.clone())
            .replace("{0:", "{\"0\":")
            .replace(",1:", ",\"1\":")
    );
    assert_eq!(from_json::<ClusterInfo>(&bare).unwrap(), info);
    assert_eq!(from_json::<ClusterInfo>(&quoted).unwrap(), info);
}

#[test]
fn consumer_offsets_have_bare_integer_keys() {
    let table = ConsumerOffsetTable {
        data_version: None,
        offset_table: BTreeMap::from([("T@G".to_owned(), BTreeMap::from([(0, 5), (10, 6)]))]),
    };
    let written = to_json(&table).unwrap();
    assert_eq!(
        text(written.clone()),
        "{\"offsetTable\":{\"T@G\":{0:5,10:6}}}"
    );
    assert_eq!(from_json::<ConsumerOffsetTable>(&written).unwrap(), table);
}

#[test]
fn keys_with_escapes_are_quoted_like_any_string() {
    let table = KVTable {
        table: BTreeMap::from([("\"{\\\n".to_owned(), "\u{1}\"".to_owned())]),
    };
    let written = to_json(&table).unwrap();
    assert_eq!(
        text(written.clone()),
        "{\"table\":{\"\\\"{\\\\\\n\":\"\\u0001\\\"\"}}"
    );
    assert_eq!(from_json::<KVTable>(&written).unwrap(), table);
    let empty = KVTable {
        table: BTreeMap::from([(String::new(), String::new())]),
    };
    assert_eq!(text(to_json(&empty).unwrap()), "{\"table\":{\"\":\"\"}}");
}

#[test]
fn heartbeats_of_cpp_clients_are_read() {
    let body =
        b"{\"clientID\":\"c\",\"consumerDataSet\":[{\"consumeFromWhere\":4,\"consumeType\":1,\
        \"groupName\":\"G\",\"messageModel\":0,\"subscriptionDataSet\":[{\"subString\":\"*\",\
        \"subVersion\":\"1796031518188\",\"topic\":\"T\"}]}],\"producerDataSet\":null}\n";
    let data: HeartbeatData = from_json(body).unwrap();
    let group = &data.consumer_data_set[0];
    assert_eq!(group.consume_from_where, ConsumeFromWhere::FirstOffset);
    assert_eq!(group.consume_type, ConsumeType::ConsumePassively);
    assert_eq!(group.message_model, MessageModel::Broadcasting);
    let subscription = &group.subscription_data_set[0];
    assert_eq!(subscription.sub_version, 1_796_031_518_188);
    assert_eq!(subscription.expression_type, EXPRESSION_TAG);
    assert!(data.producer_data_set.is_empty());
}

#[test]
fn absent_settings_take_the_defaults_of_apache() {
    let group: SubscriptionGroupConfig = from_json(b"{\"groupName\":\"G\"}").unwrap();
    assert_eq!(group, SubscriptionGroupConfig::new("G"));
    assert_eq!(
        (group.retry_max_times, group.consume_timeout_minute),
        (16, 15)
    );
    assert!(group.consume_enable && group.notify_consumer_ids_changed_enable);
    let topic: TopicConfig = from_json(b"{\"topicName\":\"T\",\"topicFilterType\":1}").unwrap();
    assert_eq!(
        (topic.read_queue_nums, topic.write_queue_nums, topic.perm),
        (16, 16, 6)
    );
    assert_eq!(topic.topic_filter_type, TopicFilterType::MultiTag);
}

#[test]
fn data_versions_are_ordered_by_state_then_counter_then_time() {
    let version = |state_version, counter, timestamp| DataVersion {
        counter,
        state_version,
        timestamp,
    };
    assert!(version(1, 0, 0) > version(0, 9, 9));
    assert!(version(0, 2, 0) > version(0, 1, 9));
    assert_eq!(version(0, 1, 5).next(8), version(0, 2, 8));
}

#[test]
fn registrations_pass_through_the_binary_form() {
    let mut topic = TopicConfig::new("T", 4, 6);
    topic
        .attributes
        .insert("message.type".into(), "FIFO".into());
    let table = TopicConfigTable {
        data_version: DataVersion {
            counter: 3,
            state_version: 0,
            timestamp: 1_700_000_000_000,
        },
        topic_config_table: BTreeMap::from([
            ("T".to_owned(), topic),
            ("U".to_owned(), TopicConfig::new("U", 1, 4)),
        ]),
        ..TopicConfigTable::default()
    };
    let body = RegisterBrokerBody {
        filter_server_list: Vec::new(),
        topic_config_serialize_wrapper: table,
    };
    let binary = body.encode_inflated(false).unwrap();
    assert_eq!(
        RegisterBrokerBody::decode_inflated(&binary, false).unwrap(),
        body
    );
    for end in 0..binary.len() {
        assert!(
            RegisterBrokerBody::decode_inflated(&binary[..end], false).is_err(),
            "cut at {end}"
        );
    }
    let mut huge = binary.clone();
    huge[..4].copy_from_slice(&i32::MAX.to_be_bytes());
    assert!(RegisterBrokerBody::decode_inflated(&huge, false).is_err());
    let plain = to_json(&body).unwrap();
    assert_eq!(from_json::<RegisterBrokerBody>(&plain).unwrap(), body);
}

#[test]
fn batch_acks_are_read_with_base64_or_bytes() {
    let json = |bits: &str| format!("{{\"acks\":[{{\"b\":{bits},\"r\":1,\"q\":2}}]}}");
    for bits in ["\"BQE=\"", "\"BQE\"", "[5,1]"] {
        let body: BatchAckBody = from_json(json(bits).as_bytes()).unwrap();
        assert_eq!(body.acks[0].bit_set, [5, 1], "{bits}");
        assert_eq!(
            (body.acks[0].retry.as_str(), body.acks[0].queue_id),
            ("1", 2)
        );
        let again: BatchAckBody = from_json(&to_json(&body).unwrap()).unwrap();
        assert_eq!(again, body);
    }
    assert!(from_json::<BatchAckBody>(json("\"*\"").as_bytes()).is_err());
}

#[test]
fn tag_hashes_of_go_clients_are_quoted_and_read() {
    let body = br#"{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[
        {"topic":"T","subString":"A || C","tagsSet":["A","C"],"codeSet":["65","67"],
         "subVersion":1,"expressionType":"TAG"}]}]}"#;
    let heartbeat: HeartbeatData = from_json(body).unwrap();
    let subscription = &heartbeat.consumer_data_set[0].subscription_data_set[0];
    assert_eq!(subscription.code_set, [65, 67]);
}
