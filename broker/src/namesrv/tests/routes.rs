//! What clients are told about topics.

use super::*;

#[test]
fn old_clients_get_bare_integer_keys_and_new_ones_quoted_keys() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    let rest = "\"brokerName\":\"broker-a\",\"cluster\":\"DefaultCluster\",\
                \"enableActingMaster\":false}],\"filterServerTable\":{},\"queueDatas\":[\
                {\"brokerName\":\"broker-a\",\"perm\":6,\"readQueueNums\":4,\"topicSysFlag\":0,\
                \"writeQueueNums\":4}]}";
    let bare = format!("{{\"brokerDatas\":[{{\"brokerAddrs\":{{0:\"10.0.0.1:10911\"}},{rest}");
    let quoted =
        format!("{{\"brokerDatas\":[{{\"brokerAddrs\":{{\"0\":\"10.0.0.1:10911\"}},{rest}");
    let code = request::GET_ROUTEINFO_BY_TOPIC;
    for version in [63, OLD, 399, 400] {
        assert_eq!(
            peer.call_as(9, version, code, &[("topic", "T")], &[]).body,
            bare,
            "{version}"
        );
    }
    for version in [401, 409, NEW] {
        assert_eq!(
            peer.call_as(9, version, code, &[("topic", "T")], &[]).body,
            quoted,
            "{version}"
        );
    }
    let ext = [("topic", "T"), ("acceptStandardJsonOnly", "true")];
    assert_eq!(peer.call_as(9, OLD, code, &ext, &[]).body, quoted);
}

#[test]
fn text_outside_ascii_is_escaped_only_in_standard_json() {
    let mut peer = Peer::new(NameServerConfig::default());
    let broker = Broker::master("brök", "10.0.0.1:10911", 1);
    peer.register(&broker, 1, &[("T", 6), ("U", 6)]);
    assert!(peer.route("T").body.contains("\"br\\u00F6k\""));
    let old = peer.call_as(
        9,
        OLD,
        request::GET_ROUTEINFO_BY_TOPIC,
        &[("topic", "T")],
        &[],
    );
    assert!(old.body.contains("\"brök\""));
}

#[test]
fn unknown_topic_is_answered_17_with_what_to_do() {
    let mut peer = Peer::new(NameServerConfig::default());
    let got = peer.route("nowhere");
    assert_eq!(got.code, 17);
    let remark = got.remark.unwrap();
    assert!(remark.starts_with("No topic route info in name server for the topic: nowhere"));
    assert!(remark.contains("create the topic"));
}

#[test]
fn missing_topic_field_is_refused_by_name() {
    let mut peer = Peer::new(NameServerConfig::default());
    let got = peer.call(request::GET_ROUTEINFO_BY_TOPIC, &[]);
    assert_eq!(got.code, 1);
    assert!(got.remark.unwrap().contains("topic"));
}

#[test]
fn order_configuration_is_in_the_route_only_when_enabled() {
    for enabled in [false, true] {
        let config = NameServerConfig {
            order_message_enable: enabled,
            ..Default::default()
        };
        let mut peer = Peer::new(config);
        peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
        let ext = [
            ("namespace", "ORDER_TOPIC_CONFIG"),
            ("key", "T"),
            ("value", "broker-a:4"),
        ];
        assert_eq!(peer.call(request::PUT_KV_CONFIG, &ext).code, 0);
        let body = peer.route("T").body;
        let expected =
            "\"filterServerTable\":{},\"orderTopicConf\":\"broker-a:4\",\"queueDatas\":[";
        assert_eq!(body.contains(expected), enabled, "{body}");
        assert!(!peer.route("U").body.contains("orderTopicConf"));
    }
}

#[test]
fn zone_filter_keeps_the_zone_and_groups_without_master() {
    let mut peer = Peer::new(NameServerConfig::default());
    let zoned = |mut broker: Broker, zone| {
        broker.extra.push(("__ZONE_NAME", zone));
        broker
    };
    peer.register(&zoned(a(), "east"), 1, &[("T", 6), ("U", 6)]);
    peer.register(&zoned(b(), "west"), 1, &[("T", 6), ("U", 6)]);
    let mut slave = zoned(Broker::master("broker-c", "10.0.0.3:10911", 3), "west");
    slave.id = "1";
    slave.extra.push(("enableActingMaster", "true"));
    peer.register(&slave, 1, &[("T", 6), ("U", 6)]);
    let ext = [
        ("topic", "T"),
        ("__ZONE_MODE", "true"),
        ("__ZONE_NAME", "EAST"),
    ];
    let got = peer.call(request::GET_ROUTEINFO_BY_TOPIC, &ext);
    assert!(
        got.body.contains("\"brokerAddrs\":{0:\"10.0.0.1:10911\"}"),
        "{}",
        got.body
    );
    assert!(got.body.contains("\"zoneName\":\"east\""));
    assert!(!got.body.contains("broker-b"));
    assert!(got.body.contains("broker-c"));
    let ext = [
        ("topic", "T"),
        ("__ZONE_MODE", "false"),
        ("__ZONE_NAME", "east"),
    ];
    assert!(
        peer.call(request::GET_ROUTEINFO_BY_TOPIC, &ext)
            .body
            .contains("broker-b")
    );
}

#[test]
fn routes_wait_after_start_only_when_told_to() {
    let config = NameServerConfig {
        need_wait_for_service: true,
        wait_seconds_for_service: 45,
        ..Default::default()
    };
    let mut peer = Peer::new(config);
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    peer.now_ms = 44_999;
    assert_eq!(peer.route("T").code, 1);
    peer.now_ms = 45_000;
    assert_eq!(peer.route("T").code, 0);
}

#[test]
fn acting_master_is_the_smallest_slave_when_supported_and_not_writeable() {
    for supported in [false, true] {
        let config = NameServerConfig {
            support_acting_master: supported,
            ..Default::default()
        };
        let mut peer = Peer::new(config);
        let acting = |id, address, connection| Broker {
            name: "broker-a",
            id,
            address,
            connection,
            extra: vec![("enableActingMaster", "true")],
        };
        peer.register(&acting("0", "m:1", 1), 1, &[("T", 6), ("U", 6)]);
        peer.register(&acting("1", "s:1", 2), 1, &[("T", 6), ("U", 6)]);
        peer.register(&acting("2", "s:2", 3), 1, &[("T", 6), ("U", 6)]);
        assert_eq!(peer.perm("T"), 6);
        peer.server.connection_closed(0, 1);
        assert_eq!(
            peer.perm("T"),
            4,
            "a group without a master is not writeable"
        );
        let body = peer.route("T").body;
        let expected = if supported {
            "{\"0\":\"s:1\",\"2\":\"s:2\"}"
        } else {
            "{\"1\":\"s:1\",\"2\":\"s:2\"}"
        };
        assert!(body.contains(expected), "{body}");
    }
}

#[test]
fn static_mappings_come_back_in_both_spellings() {
    let mut peer = Peer::new(NameServerConfig::default());
    let mut body = String::from_utf8(register_body(1, &[("T", 6), ("U", 6)])).unwrap();
    body = body.replace(
        "\"topicQueueMappingInfoMap\":{}",
        "\"topicQueueMappingInfoMap\":{\"T\":{\"bname\":\"broker-a\",\"currIdMap\":{0:0,1:1},\
         \"dirty\":false,\"epoch\":5,\"scope\":\"global\",\"topic\":\"T\",\"totalQueues\":2}}",
    );
    let code = request::REGISTER_BROKER;
    assert_eq!(
        peer.call_as(1, NEW, code, &a().ext(), body.as_bytes()).code,
        0
    );
    let quoted = ",\"topicQueueMappingByBroker\":{\"broker-a\":{\"bname\":\"broker-a\",\
                  \"currIdMap\":{\"0\":0,\"1\":1},\"dirty\":false,\"epoch\":5,\"scope\":\"global\",\
                  \"topic\":\"T\",\"totalQueues\":2}}}";
    assert!(
        peer.route("T").body.ends_with(quoted),
        "{}",
        peer.route("T").body
    );
    let old = peer.call_as(
        9,
        OLD,
        request::GET_ROUTEINFO_BY_TOPIC,
        &[("topic", "T")],
        &[],
    );
    assert!(old.body.contains("\"currIdMap\":{0:0,1:1}"), "{}", old.body);
    assert!(!peer.route("U").body.contains("topicQueueMappingByBroker"));
}
