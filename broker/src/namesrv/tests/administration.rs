//! What administrators ask for and change.

use super::*;
use crate::namesrv::{KV_BYTES_MAX, NameServerError};

fn two_brokers() -> Peer {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 4)]);
    peer.register(&b(), 1, &[("T", 6), ("V", 6)]);
    peer
}

#[test]
fn wipe_clears_write_everywhere_and_the_next_changed_registration_restores_it() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("I", 7), ("R", 4)]);
    let got = peer.call(
        request::WIPE_WRITE_PERM_OF_BROKER,
        &[("brokerName", "broker-a")],
    );
    assert_eq!(got.ext["wipeTopicCount"], "3");
    assert_eq!((peer.perm("T"), peer.perm("I"), peer.perm("R")), (4, 5, 4));
    peer.register(&a(), 1, &[("T", 6), ("I", 7), ("R", 4)]);
    assert_eq!(
        peer.perm("T"),
        4,
        "an unchanged registration does not undo it"
    );
    peer.register(&a(), 2, &[("T", 6), ("I", 7), ("R", 4)]);
    assert_eq!((peer.perm("T"), peer.perm("I"), peer.perm("R")), (6, 7, 4));
}

#[test]
fn add_write_permission_sets_read_and_write() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("R", 4)]);
    peer.call(
        request::WIPE_WRITE_PERM_OF_BROKER,
        &[("brokerName", "broker-a")],
    );
    let got = peer.call(
        request::ADD_WRITE_PERM_OF_BROKER,
        &[("brokerName", "broker-a")],
    );
    assert_eq!(got.ext["addTopicCount"], "2");
    assert_eq!((peer.perm("T"), peer.perm("R")), (6, 6));
    let got = peer.call(
        request::ADD_WRITE_PERM_OF_BROKER,
        &[("brokerName", "nobody")],
    );
    assert_eq!((got.code, got.ext["addTopicCount"].as_str()), (0, "0"));
}

#[test]
fn topic_lists_by_everything_cluster_and_system() {
    let mut peer = two_brokers();
    let all = peer
        .call(request::GET_ALL_TOPIC_LIST_FROM_NAMESERVER, &[])
        .body;
    assert_eq!(all, "{\"topicList\":[\"T\",\"U\",\"V\"]}");
    let code = request::GET_TOPICS_BY_CLUSTER;
    assert_eq!(peer.call(code, &[("cluster", "DefaultCluster")]).body, all);
    assert_eq!(
        peer.call(code, &[("cluster", "other")]).body,
        "{\"topicList\":[]}"
    );
    assert_eq!(
        peer.call(request::GET_SYSTEM_TOPIC_LIST_FROM_NS, &[]).body,
        "{\"brokerAddr\":\"10.0.0.1:10911\",\"topicList\":[\"DefaultCluster\",\"broker-a\",\
         \"broker-b\"]}"
    );
    assert_eq!(
        peer.call(request::GET_UNIT_TOPIC_LIST, &[]).body,
        "{\"topicList\":[]}"
    );
}

#[test]
fn unit_lists_follow_the_topic_flags() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    for (topic, flags) in [("unit", 1), ("sub", 2), ("both", 3)] {
        let body = format!(
            "{{\"queueDatas\":[{{\"brokerName\":\"broker-a\",\"perm\":6,\"readQueueNums\":1,\
             \"topicSysFlag\":{flags},\"writeQueueNums\":1}}]}}"
        );
        let code = request::REGISTER_TOPIC_IN_NAMESRV;
        assert_eq!(
            peer.call_as(1, NEW, code, &[("topic", topic)], body.as_bytes())
                .code,
            0
        );
    }
    let mut list = |code| peer.call(code, &[]).body;
    assert_eq!(
        list(request::GET_UNIT_TOPIC_LIST),
        "{\"topicList\":[\"both\",\"unit\"]}"
    );
    assert_eq!(
        list(request::GET_HAS_UNIT_SUB_TOPIC_LIST),
        "{\"topicList\":[\"both\",\"sub\"]}"
    );
    let code = request::GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST;
    assert_eq!(list(code), "{\"topicList\":[\"sub\"]}");
}

#[test]
fn disabled_lists_are_refused() {
    let config = NameServerConfig {
        enable_all_topic_list: false,
        enable_topic_list: false,
        ..Default::default()
    };
    let mut peer = Peer::new(config);
    for code in [206, 224, 311, 312, 313] {
        let got = peer.call(code, &[("cluster", "c")]);
        assert_eq!(
            (got.code, got.remark.as_deref()),
            (1, Some("disable")),
            "{code}"
        );
    }
}

#[test]
fn topic_registered_directly_needs_a_known_broker() {
    let mut peer = two_brokers();
    let body = br#"{"brokerDatas":[{"brokerAddrs":{0:"x"},"brokerName":"broker-b"}],
"queueDatas":[{"brokerName":"nobody","perm":6,"readQueueNums":2,"topicSysFlag":0,
"writeQueueNums":2},{"brokerName":"broker-b","perm":6,"readQueueNums":2,"topicSysFlag":0,
"writeQueueNums":2}]}"#;
    let code = request::REGISTER_TOPIC_IN_NAMESRV;
    assert_eq!(
        peer.call_as(2, NEW, code, &[("topic", "single")], body)
            .code,
        0
    );
    let route = peer.route("single").body;
    assert!(
        route.contains("broker-b") && !route.contains("nobody"),
        "{route}"
    );
}

#[test]
fn topic_is_deleted_everywhere_or_in_one_cluster() {
    let mut peer = two_brokers();
    let mut other = Broker::master("broker-c", "10.0.0.3:10911", 3).ext();
    other.retain(|(name, _)| *name != "clusterName");
    other.push(("clusterName", "C2"));
    let body = register_body(1, &[("T", 6), ("X", 6)]);
    assert_eq!(
        peer.call_as(3, NEW, request::REGISTER_BROKER, &other, &body)
            .code,
        0
    );
    let code = request::DELETE_TOPIC_IN_NAMESRV;
    assert_eq!(
        peer.call(code, &[("topic", "T"), ("clusterName", "nowhere")])
            .code,
        0
    );
    assert!(peer.route("T").body.contains("broker-a"));
    peer.call(code, &[("topic", "T"), ("clusterName", "DefaultCluster")]);
    let route = peer.route("T").body;
    assert!(
        route.contains("broker-c") && !route.contains("broker-a"),
        "{route}"
    );
    peer.call(code, &[("topic", "T")]);
    assert!(!peer.has("T"));
    assert_eq!(peer.call(code, &[("topic", "T")]).code, 0);
}

#[test]
fn member_group_is_told_and_empty_when_unknown() {
    let mut peer = two_brokers();
    let code = request::GET_BROKER_MEMBER_GROUP;
    let ext = [
        ("clusterName", "DefaultCluster"),
        ("brokerName", "broker-a"),
    ];
    assert_eq!(
        peer.call(code, &ext).body,
        "{\"brokerMemberGroup\":{\"brokerAddrs\":{0:\"10.0.0.1:10911\"},\"brokerName\":\
         \"broker-a\",\"cluster\":\"DefaultCluster\"}}"
    );
    let ext = [("clusterName", "DefaultCluster"), ("brokerName", "x")];
    assert!(peer.call(code, &ext).body.contains("\"brokerAddrs\":{},"));
}

#[test]
fn key_values_survive_a_restart() {
    let mut peer = Peer::new(NameServerConfig::default());
    assert!(peer.server.take_kv_to_save().is_none());
    let ext = [("namespace", "n"), ("key", "k"), ("value", "v=1;\"q\"")];
    assert_eq!(peer.call(request::PUT_KV_CONFIG, &ext).code, 0);
    let saved = peer.server.take_kv_to_save().unwrap();
    assert_eq!(saved, br#"{"configTable":{"n":{"k":"v=1;\"q\""}}}"#);
    assert!(peer.server.take_kv_to_save().is_none(), "offered once");
    let server = NameServer::new(NameServerConfig::default(), Some(&saved), 0).unwrap();
    let mut peer = Peer { server, now_ms: 0 };
    let got = peer.call(request::GET_KV_CONFIG, &[("namespace", "n"), ("key", "k")]);
    assert_eq!((got.code, got.ext["value"].as_str()), (0, "v=1;\"q\""));
    let list = peer.call(request::GET_KVLIST_BY_NAMESPACE, &[("namespace", "n")]);
    assert_eq!(list.body, r#"{"table":{"k":"v=1;\"q\""}}"#);
    peer.call(
        request::DELETE_KV_CONFIG,
        &[("namespace", "n"), ("key", "k")],
    );
    let got = peer.call(request::GET_KV_CONFIG, &[("namespace", "n"), ("key", "k")]);
    assert_eq!(got.code, 22);
    assert_eq!(
        peer.server.take_kv_to_save().unwrap(),
        br#"{"configTable":{"n":{}}}"#
    );
    let got = peer.call(request::GET_KVLIST_BY_NAMESPACE, &[("namespace", "m")]);
    assert_eq!(
        (got.code, got.remark.as_deref()),
        (22, Some("No config item, Namespace: m"))
    );
}

#[test]
fn key_value_requests_without_their_fields_are_refused() {
    let mut peer = Peer::new(NameServerConfig::default());
    assert_eq!(
        peer.call(request::PUT_KV_CONFIG, &[("namespace", "n"), ("key", "k")])
            .code,
        1
    );
    assert_eq!(
        peer.call(request::DELETE_KV_CONFIG, &[("namespace", "n")])
            .code,
        1
    );
    assert!(peer.server.take_kv_to_save().is_none());
}

#[test]
fn key_values_are_bounded_and_replacing_frees_the_old_value() {
    let mut peer = Peer::new(NameServerConfig::default());
    let big = "x".repeat(KV_BYTES_MAX / 2);
    let put = |peer: &mut Peer, key: &str| {
        let mut kv = std::mem::take(&mut peer.server.kv);
        let result = kv.put("n", key, &big);
        peer.server.kv = kv;
        result.is_ok()
    };
    assert!(put(&mut peer, "a"));
    assert!(put(&mut peer, "a"), "the same key takes no more room");
    assert!(!put(&mut peer, "b"));
    peer.call(
        request::DELETE_KV_CONFIG,
        &[("namespace", "n"), ("key", "a")],
    );
    assert!(put(&mut peer, "b"));
    assert_eq!(
        peer.call(
            request::PUT_KV_CONFIG,
            &[
                ("namespace", "n"),
                ("key", &"k".repeat(2_000)),
                ("value", "v"),
            ]
        )
        .code,
        1
    );
}

#[test]
fn a_damaged_key_value_file_stops_the_start() {
    let error = NameServer::new(NameServerConfig::default(), Some(b"{\"configTable\":"), 0);
    assert!(matches!(error, Err(NameServerError::Kv(_))));
    assert!(NameServer::new(NameServerConfig::default(), Some(b" \n"), 0).is_ok());
}

#[test]
fn settings_are_shown_changed_and_saved() {
    let mut config = NameServerConfig::default();
    config
        .extras
        .insert("kvConfigPath".into(), "/data/kvConfig.json".into());
    let mut peer = Peer::new(config);
    let shown = peer.call(request::GET_NAMESRV_CONFIG, &[]).body;
    assert!(shown.contains("listenPort=9876\n"), "{shown}");
    assert!(shown.contains("kvConfigPath=/data/kvConfig.json\n"));
    assert!(peer.server.take_properties_to_save().is_none());
    let update = |peer: &mut Peer, text: &str| {
        peer.call_as(9, NEW, request::UPDATE_NAMESRV_CONFIG, &[], text.as_bytes())
    };
    assert_eq!(
        update(&mut peer, "# c\nenableTopicList=false\nnoSuchKey=1\n").code,
        0
    );
    assert!(!peer.server.config().enable_topic_list);
    let saved = peer.server.take_properties_to_save().unwrap();
    assert!(saved.contains("enableTopicList=false\n") && !saved.contains("noSuchKey"));
    let got = update(
        &mut peer,
        "enableTopicList=true\nkvConfigPath=/etc/passwd\n",
    );
    assert_eq!(got.code, 16);
    assert!(
        !peer.server.config().enable_topic_list,
        "nothing is applied"
    );
    assert_eq!(update(&mut peer, "orderMessageEnable=perhaps\n").code, 1);
    assert_eq!(update(&mut peer, "no equals sign").code, 1);
    assert!(peer.server.take_properties_to_save().is_none());
}

#[test]
fn unknown_codes_are_answered_3_and_one_way_requests_are_not_answered() {
    let mut peer = two_brokers();
    let got = peer.call(9_999, &[]);
    assert_eq!(got.code, 3);
    assert_eq!(
        got.remark.as_deref(),
        Some("request type 9999 not supported")
    );
    let ext = [("brokerName", "broker-a")];
    let code = request::WIPE_WRITE_PERM_OF_BROKER;
    assert!(peer.raw(9, NEW, code, 2, &ext, &[]).is_empty());
    assert_eq!(peer.perm("U"), 4);
    assert!(
        peer.raw(9, NEW, code, 1, &ext, &[]).is_empty(),
        "a response is nobody's request"
    );
}
