//! How brokers come, change and go.

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::*;
use crate::namesrv::{BrokerRegistration, DataVersion, QueueData, TopicRegistration};

/// The start of the body an Apache 5.x broker sends, integer keys bare where it has any.
const APACHE_BODY: &str = r#"{"filterServerList":[],
"topicConfigSerializeWrapper":{"dataVersion":{"counter":2,"stateVersion":0,
"timestamp":1726300000000},"mappingDataVersion":{"counter":0,"stateVersion":0,
"timestamp":1726300000000},"topicConfigTable":{"TBW102":{"attributes":{},"order":false,"perm":7,
"readQueueNums":8,"topicFilterType":"SINGLE_TAG","topicName":"TBW102","topicSysFlag":0,
"writeQueueNums":8},"broker-a":{"attributes":{},"order":false,"perm":7,"readQueueNums":1,
"topicFilterType":"SINGLE_TAG","topicName":"broker-a","topicSysFlag":0,"writeQueueNums":1}},
"topicQueueMappingDetailMap":{"S":{"bname":"broker-a","currIdMap":{0:0},"dirty":false,"epoch":1,
"hostedQueues":{0:[]},"topic":"S","totalQueues":1}},"topicQueueMappingInfoMap":{}}}"#;

fn version(counter: i64) -> Vec<u8> {
    format!("{{\"counter\":{counter},\"stateVersion\":0,\"timestamp\":1700000000000}}").into_bytes()
}

/// The compressed form: version, topics as text lines, filter servers, mappings.
fn compressed_body(counter: i64, lines: &[&str]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut chunk = |bytes: &[u8]| {
        plain.extend_from_slice(&(bytes.len() as i32).to_be_bytes());
        plain.extend_from_slice(bytes);
    };
    chunk(&version(counter));
    let mut table = (lines.len() as i32).to_be_bytes().to_vec();
    for line in lines {
        table.extend_from_slice(&(line.len() as i32).to_be_bytes());
        table.extend_from_slice(line.as_bytes());
    }
    plain.extend_from_slice(&table);
    plain.extend_from_slice(&2_i32.to_be_bytes());
    plain.extend_from_slice(b"[]");
    plain.extend_from_slice(&0_i32.to_be_bytes());
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&plain).unwrap();
    encoder.finish().unwrap()
}

fn changed(peer: &mut Peer, broker: &Broker, counter: i64) -> String {
    let code = request::QUERY_DATA_VERSION;
    let got = peer.call_as(
        broker.connection,
        NEW,
        code,
        &broker.ext(),
        &version(counter),
    );
    assert_eq!(got.code, 0);
    got.ext["changed"].clone()
}

#[test]
fn apache_registration_body_is_read() {
    let mut peer = Peer::new(NameServerConfig::default());
    let code = request::REGISTER_BROKER;
    let got = peer.call_as(1, NEW, code, &a().ext(), APACHE_BODY.as_bytes());
    assert_eq!((got.code, got.body.as_str()), (0, ""));
    assert!(got.ext.is_empty(), "a master learns nothing: {got:?}");
    assert_eq!(peer.perm("TBW102"), 7);
    let clusters = peer.call(request::GET_BROKER_CLUSTER_INFO, &[]).body;
    assert_eq!(
        clusters,
        "{\"brokerAddrTable\":{\"broker-a\":{\"brokerAddrs\":{0:\"10.0.0.1:10911\"},\"brokerName\":\
         \"broker-a\",\"cluster\":\"DefaultCluster\",\"enableActingMaster\":false}},\
         \"clusterAddrTable\":{\"DefaultCluster\":[\"broker-a\"]}}"
    );
}

#[test]
fn body_of_a_very_old_broker_is_the_bare_table() {
    let mut peer = Peer::new(NameServerConfig::default());
    let body = br#"{"dataVersion":{"counter":1,"timestamp":5},"topicConfigTable":{"T":{"perm":6,
"readQueueNums":4,"topicName":"T","writeQueueNums":4},"U":{"perm":6,"readQueueNums":4,
"topicName":"U","writeQueueNums":4}}}"#;
    assert_eq!(
        peer.call_as(1, 30, request::REGISTER_BROKER, &a().ext(), body)
            .code,
        0
    );
    assert!(peer.has("T") && peer.has("U"));
}

#[test]
fn compressed_registration_is_read_whatever_the_header_says() {
    for flag in ["true", "false"] {
        let mut peer = Peer::new(NameServerConfig::default());
        let lines = ["T 8 4 6 SINGLE_TAG {\"a b\":\"c d\"}", "U 1 1 4 SINGLE_TAG"];
        let body = compressed_body(3, &lines);
        let mut ext = a().ext();
        ext.retain(|(name, _)| *name != "compressed");
        ext.push(("compressed", flag));
        let got = peer.call_as(1, NEW, request::REGISTER_BROKER, &ext, &body);
        assert_eq!(got.code, 0, "{got:?}");
        assert!(
            peer.route("T")
                .body
                .contains("\"readQueueNums\":8,\"topicSysFlag\":0,\"writeQueueNums\":4")
        );
        assert_eq!(peer.perm("U"), 4);
    }
}

#[test]
fn damaged_bodies_are_refused_and_change_nothing() {
    let mut peer = Peer::new(NameServerConfig::default());
    let whole = compressed_body(3, &["T 8 4 6 SINGLE_TAG", "U 1 1 4 SINGLE_TAG"]);
    let cut = whole[..whole.len() / 2].to_vec();
    let bad_line = compressed_body(3, &["T eight 4 6 SINGLE_TAG", "U 1 1 4 SINGLE_TAG"]);
    let bad_count = {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&(-1_i32).to_be_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    for body in [
        cut,
        bad_line,
        bad_count,
        b"{\"topicConfig".to_vec(),
        b"[]".to_vec(),
    ] {
        let got = peer.call_as(1, NEW, request::REGISTER_BROKER, &a().ext(), &body);
        assert_eq!(got.code, 1, "{got:?}");
        assert!(got.remark.is_some());
    }
    assert_eq!(peer.server.table().sizes(), (0, 0, 0));
}

#[test]
fn inflation_is_bounded() {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    let zeros = vec![0_u8; 1 << 20];
    for _ in 0..=(crate::namesrv::INFLATED_BYTES_MAX >> 20) {
        encoder.write_all(&zeros).unwrap();
    }
    let bomb = encoder.finish().unwrap();
    let mut peer = Peer::new(NameServerConfig::default());
    let got = peer.call_as(1, NEW, request::REGISTER_BROKER, &a().ext(), &bomb);
    assert_eq!(got.code, 1);
    assert!(got.remark.unwrap().contains("inflates past"));
}

#[test]
fn checksum_is_over_the_body_as_sent_and_zero_means_none() {
    let mut peer = Peer::new(NameServerConfig::default());
    let body = register_body(1, &[("T", 6), ("U", 6)]);
    let mut crc = flate2::Crc::new();
    crc.update(&body);
    let right = (crc.sum() & 0x7FFF_FFFF).to_string();
    let wrong = ((crc.sum() & 0x7FFF_FFFF) ^ 1).to_string();
    for (value, code) in [(wrong.as_str(), 1), (right.as_str(), 0)] {
        let mut ext = a().ext();
        ext.retain(|(name, _)| *name != "bodyCrc32");
        ext.push(("bodyCrc32", value));
        let got = peer.call_as(1, NEW, request::REGISTER_BROKER, &ext, &body);
        assert_eq!(got.code, code);
        assert_eq!(
            got.remark.is_some_and(|r| r.starts_with("crc32 not match")),
            code == 1
        );
    }
}

#[test]
fn single_topic_after_name_server_restart_does_not_hide_the_others() {
    let mut peer = Peer::new(NameServerConfig::default());
    assert_eq!(peer.register(&a(), 8, &[("created", 6)]).code, 0);
    assert!(
        peer.has("created"),
        "the topic just created can be used at once"
    );
    assert_eq!(
        changed(&mut peer, &a(), 8),
        "true",
        "the broker is asked for its whole table"
    );
    // The periodic registration of the whole table carries the version we already hold.
    peer.register(&a(), 8, &[("created", 6), ("T", 6), ("U", 6)]);
    assert!(peer.has("created") && peer.has("T") && peer.has("U"));
    assert_eq!(changed(&mut peer, &a(), 8), "false");
}

#[test]
fn several_changed_topics_after_restart_do_not_pass_for_the_whole_table() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 8, &[("x", 6), ("y", 6)]);
    assert_eq!(changed(&mut peer, &a(), 8), "true");
    peer.register(&a(), 8, &[("x", 6), ("y", 6), ("T", 6)]);
    assert!(peer.has("T"));
    assert_eq!(changed(&mut peer, &a(), 8), "false");
}

#[test]
fn a_missed_change_is_noticed_by_the_gap_in_versions() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 4, &[("T", 6)]);
    peer.register(&a(), 4, &[("T", 6)]);
    peer.register(&a(), 5, &[("five", 6)]);
    assert_eq!(
        changed(&mut peer, &a(), 5),
        "false",
        "version 5 follows 4: nothing is missing"
    );
    peer.register(&a(), 7, &[("seven", 6)]);
    assert_eq!(
        changed(&mut peer, &a(), 7),
        "true",
        "version 6 was lost on the way"
    );
    peer.register(&a(), 7, &[("T", 6), ("five", 6), ("six", 6), ("seven", 6)]);
    assert!(peer.has("six"));
}

#[test]
fn a_changed_version_updates_topics_and_an_equal_one_does_not() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    peer.register(&a(), 1, &[("T", 4), ("U", 6)]);
    assert_eq!(peer.perm("T"), 6);
    peer.register(&a(), 2, &[("T", 4), ("U", 6)]);
    assert_eq!(peer.perm("T"), 4);
}

#[test]
fn topics_vanish_by_registration_only_when_told_to_and_only_by_a_whole_table() {
    for enabled in [false, true] {
        let config = NameServerConfig {
            delete_topic_with_broker_registration: enabled,
            ..Default::default()
        };
        let mut peer = Peer::new(config);
        peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
        peer.register(&a(), 2, &[("V", 6)]);
        assert!(
            peer.has("T") && peer.has("U") && peer.has("V"),
            "a part takes nothing away"
        );
        peer.register(&a(), 2, &[("T", 6), ("V", 6)]);
        assert!(peer.has("T") && peer.has("V"));
        assert_eq!(peer.has("U"), !enabled);
    }
}

#[test]
fn slaves_learn_their_master_and_do_not_change_topics() {
    let mut peer = Peer::new(NameServerConfig::default());
    let slave = Broker {
        id: "1",
        address: "10.0.0.9:10911",
        connection: 9,
        ..a()
    };
    assert!(
        peer.register(&slave, 1, &[("T", 6), ("U", 6)])
            .ext
            .is_empty()
    );
    assert!(
        !peer.has("T"),
        "a slave that does not act as master brings no topics"
    );
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    let got = peer.register(&slave, 2, &[("T", 4), ("W", 6)]);
    assert_eq!(got.ext["masterAddr"], "10.0.0.1:10911");
    assert_eq!(got.ext["haServerAddr"], "10.0.0.1:10912");
    assert_eq!(peer.perm("T"), 6);
    assert!(!peer.has("W"));
}

#[test]
fn an_address_that_changes_its_id_leaves_the_old_one() {
    let mut peer = Peer::new(NameServerConfig::default());
    let slave = Broker { id: "1", ..a() };
    peer.register(&slave, 1, &[("T", 6), ("U", 6)]);
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    assert!(
        peer.route("T")
            .body
            .contains("\"brokerAddrs\":{\"0\":\"10.0.0.1:10911\"}")
    );
}

#[test]
fn a_deposed_master_cannot_take_the_id_back() {
    let mut peer = Peer::new(NameServerConfig::default());
    let body = |state: i64| {
        String::from_utf8(register_body(1, &[("T", 6), ("U", 6)]))
            .unwrap()
            .replace("\"stateVersion\":0", &format!("\"stateVersion\":{state}"))
            .into_bytes()
    };
    let code = request::REGISTER_BROKER;
    let newer = Broker {
        address: "10.0.0.7:10911",
        connection: 7,
        ..a()
    };
    peer.call_as(7, NEW, code, &newer.ext(), &body(2));
    assert_eq!(peer.call_as(1, NEW, code, &a().ext(), &body(1)).code, 0);
    assert!(peer.route("T").body.contains("10.0.0.7:10911"));
    peer.call_as(1, NEW, code, &a().ext(), &body(2));
    assert!(peer.route("T").body.contains("10.0.0.1:10911"));
    assert_eq!(peer.server.table().sizes().2, 1);
}

#[test]
fn a_broker_leaves_when_it_unregisters_or_its_connection_closes() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    peer.register(&b(), 1, &[("T", 6), ("V", 6)]);
    let code = request::UNREGISTER_BROKER;
    assert_eq!(peer.call_as(2, NEW, code, &b().ext(), &[]).code, 0);
    assert!(peer.has("T") && !peer.has("V"));
    peer.server.connection_closed(0, 999);
    assert!(peer.has("T"));
    peer.server.connection_closed(0, 1);
    assert!(!peer.has("T"));
    assert_eq!(peer.server.table().sizes(), (0, 0, 0));
}

#[test]
fn the_close_of_an_abandoned_connection_does_not_drop_a_broker_that_came_back() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    let again = Broker {
        connection: 50,
        ..a()
    };
    peer.register(&again, 1, &[("T", 6), ("U", 6)]);
    peer.server.connection_closed(0, 1);
    assert!(peer.has("T"));
}

#[test]
fn a_silent_broker_expires_and_heartbeats_keep_it() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    let mut short = b();
    short.extra.push(("heartbeatTimeoutMillis", "10000"));
    peer.register(&short, 1, &[("V", 6), ("W", 6)]);
    peer.now_ms = 9_000;
    assert_eq!(peer.call(request::BROKER_HEARTBEAT, &short.ext()).code, 0);
    peer.server.tick(18_000);
    assert!(peer.has("V"));
    peer.server.tick(22_999);
    assert!(peer.has("V"), "the next scan is not due");
    peer.server.tick(23_000);
    assert!(!peer.has("V") && peer.has("T"));
    assert_eq!(peer.server.take_connections_to_close(), [2]);
    peer.server.tick(120_000);
    assert!(peer.has("T"));
    peer.server.tick(125_001);
    assert!(!peer.has("T"));
    assert_eq!(peer.call(request::BROKER_HEARTBEAT, &a().ext()).code, 0);
    assert!(
        !peer.has("T"),
        "a heartbeat does not replace a registration"
    );
}

#[test]
fn the_broker_of_the_same_process_never_expires() {
    let mut peer = Peer::new(NameServerConfig::default());
    let queues = QueueData {
        read_queue_nums: 8,
        write_queue_nums: 8,
        perm: 6,
        topic_sys_flag: 0,
        ordered: false,
    };
    let registration = BrokerRegistration {
        cluster_name: "C".into(),
        broker_name: "local".into(),
        broker_address: "127.0.0.1:10911".into(),
        data_version: DataVersion {
            counter: 1,
            ..DataVersion::default()
        },
        topics: vec![TopicRegistration {
            name: "T".into(),
            queues,
            created_ms: None,
        }],
        ..BrokerRegistration::default()
    };
    peer.server.register_local(0, &registration).unwrap();
    peer.server.tick(i64::MAX / 2);
    assert!(peer.has("T"));
    peer.server.unregister_local(&registration);
    assert!(!peer.has("T"));
}

#[test]
fn order_configuration_is_returned_to_brokers() {
    let mut peer = Peer::new(NameServerConfig::default());
    let ext = [
        ("namespace", "ORDER_TOPIC_CONFIG"),
        ("key", "T"),
        ("value", "broker-a:4"),
    ];
    peer.call(request::PUT_KV_CONFIG, &ext);
    let got = peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    assert_eq!(got.body, "{\"table\":{\"T\":\"broker-a:4\"}}");
}

#[test]
fn data_version_is_compared_and_told() {
    let mut peer = Peer::new(NameServerConfig::default());
    assert_eq!(changed(&mut peer, &a(), 1), "true");
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    let got = peer.call_as(1, NEW, request::QUERY_DATA_VERSION, &a().ext(), &version(2));
    assert_eq!(got.ext["changed"], "true");
    assert_eq!(
        got.body,
        "{\"counter\":1,\"stateVersion\":0,\"timestamp\":1700000000000}"
    );
    assert_eq!(changed(&mut peer, &a(), 1), "false");
}

#[test]
fn names_out_of_bounds_are_refused_as_a_whole() {
    let mut peer = Peer::new(NameServerConfig::default());
    let long = "t".repeat(crate::namesrv::TOPIC_NAME_BYTES_MAX + 1);
    let got = peer.register(&a(), 1, &[("T", 6), (&long, 6)]);
    assert_eq!(got.code, 1);
    assert!(!peer.has("T"));
    let nameless = Broker { name: "", ..a() };
    assert_eq!(peer.register(&nameless, 1, &[("T", 6), ("U", 6)]).code, 1);
    assert_eq!(peer.server.table().sizes(), (0, 0, 0));
}

#[test]
fn brokers_beyond_the_bound_are_refused_and_counted() {
    let mut peer = Peer::new(NameServerConfig::default());
    let mut registration = BrokerRegistration {
        cluster_name: "C".into(),
        broker_name: "n".into(),
        ..BrokerRegistration::default()
    };
    for id in 0..crate::namesrv::BROKERS_MAX as i64 {
        registration.broker_id = id;
        registration.broker_address = format!("h:{id}");
        peer.server.register_local(0, &registration).unwrap();
    }
    peer.server.register_local(0, &registration).unwrap();
    registration.broker_id = -5;
    registration.broker_address = "h:new".into();
    let error = peer.server.register_local(0, &registration).unwrap_err();
    assert!(error.to_string().contains("brokers"), "{error}");
    assert_eq!(peer.server.table().bound_hits(), 1);
}
