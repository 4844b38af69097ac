//! What the fuse does to routes, and what it leaves alone.

use wire::codes::private;

use super::*;
use crate::fuse::Sample;

const BROKERS: [(&str, &str); 4] = [
    ("broker-a", "10.0.0.1:10911"),
    ("broker-b", "10.0.0.2:10911"),
    ("broker-c", "10.0.0.3:10911"),
    ("broker-d", "10.0.0.4:10911"),
];

fn cluster(config: NameServerConfig) -> Peer {
    let mut peer = Peer::new(config);
    for (at, (name, address)) in BROKERS.into_iter().enumerate() {
        let broker = Broker::master(name, address, at as u64 + 1);
        let mut topics = vec![("T", 6), ("R", 4)];
        if name == "broker-a" {
            topics.push(("only-a", 6));
        }
        let body = register_body(1, &topics);
        let body = String::from_utf8(body).unwrap();
        let fifo = "\"attributes\":{\"message.type\":\"FIFO\"}";
        let ordered = register_body(1, &[("F", 6)]);
        let ordered = String::from_utf8(ordered).unwrap();
        let ordered = ordered.replace("\"attributes\":{}", fifo);
        let topic = ordered.split("\"topicConfigTable\":{").nth(1).unwrap();
        let topic = topic.split("},\"topicQueueMapping").next().unwrap();
        let body = body.replace(
            "\"topicConfigTable\":{",
            &format!("\"topicConfigTable\":{{{topic},"),
        );
        peer.call_as(
            broker.connection,
            NEW,
            request::REGISTER_BROKER,
            &broker.ext(),
            body.as_bytes(),
        );
    }
    peer
}

fn probe_all(peer: &mut Peer, now_ms: u64, sick: &[&str]) {
    for target in peer.server.probe_targets() {
        let sample = if sick.contains(&target.broker_name.as_str()) {
            Sample::Failed("append answered code 14: disk".to_owned())
        } else {
            Sample::Took(700)
        };
        peer.server
            .observe_probe(now_ms, &target.broker_name, sample);
    }
    peer.server.watch(now_ms);
}

fn permissions(peer: &mut Peer, topic: &str) -> Vec<i64> {
    let route: Value = serde_json::from_str(&peer.route(topic).body).unwrap();
    let queues = route["queueDatas"].as_array().unwrap();
    queues
        .iter()
        .map(|queue| queue["perm"].as_i64().unwrap())
        .collect()
}

#[test]
fn a_sick_broker_loses_write_in_routes_and_nothing_else() {
    let mut peer = cluster(NameServerConfig::default());
    for round in 0..3 {
        probe_all(&mut peer, 1_000 + round * 300, &["broker-a"]);
    }
    assert_eq!(permissions(&mut peer, "T"), [4, 6, 6, 6]);
    assert_eq!(permissions(&mut peer, "R"), [4, 4, 4, 4]);
    assert_eq!(permissions(&mut peer, "only-a"), [6], "its last writer");
    assert_eq!(permissions(&mut peer, "F"), [6; 4], "order matters");
    for round in 0..210 {
        probe_all(&mut peer, 2_000 + round * 300, &[]);
    }
    assert_eq!(permissions(&mut peer, "T"), [6; 4]);
}

#[test]
fn ordered_topics_are_isolated_only_when_configured() {
    let mut peer = cluster(NameServerConfig {
        fuse_ordered_topics: true,
        ..NameServerConfig::default()
    });
    for round in 0..3 {
        probe_all(&mut peer, 1_000 + round * 300, &["broker-b"]);
    }
    assert_eq!(permissions(&mut peer, "F"), [6, 4, 6, 6]);
}

#[test]
fn nobody_is_probed_in_a_cluster_too_small_or_with_the_fuse_off() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6), ("U", 6)]);
    peer.register(&b(), 1, &[("T", 6), ("U", 6)]);
    assert_eq!(peer.server.probe_targets(), []);
    let mut peer = cluster(NameServerConfig {
        fuse_enable: false,
        ..NameServerConfig::default()
    });
    assert_eq!(peer.server.probe_targets(), []);
}

#[test]
fn switching_the_fuse_off_gives_write_back() {
    let mut peer = cluster(NameServerConfig::default());
    for round in 0..3 {
        probe_all(&mut peer, 1_000 + round * 300, &["broker-a"]);
    }
    assert_eq!(permissions(&mut peer, "T"), [4, 6, 6, 6]);
    let off = b"pinion.fuseEnable=false";
    let code = request::UPDATE_NAMESRV_CONFIG;
    assert_eq!(peer.call_as(9, NEW, code, &[], off).code, 0);
    probe_all(&mut peer, 2_000, &[]);
    assert_eq!(permissions(&mut peer, "T"), [6; 4]);
}

#[test]
fn the_state_names_broker_reason_and_history() {
    let mut peer = cluster(NameServerConfig::default());
    for round in 0..3 {
        probe_all(&mut peer, 1_000 + round * 300, &["broker-c"]);
    }
    let got = peer.call(private::FUSE_STATE, &[]);
    let state: Value = serde_json::from_str(&got.body).unwrap();
    assert_eq!(state["isolated"], json!(["broker-c"]));
    assert_eq!(state["isolatedMax"], 1);
    let member = &state["members"][2];
    assert_eq!(member["state"], "open");
    assert_eq!(member["reason"], "append answered code 14: disk");
    assert_eq!(member["history"][0]["state"], "open");
    assert_eq!(member["untilMs"], 61_600);
}
