//! What the fuse does to routes, and what it leaves alone.

use wire::codes::private;

use super::*;
use crate::fuse::Sample;
use crate::namesrv::offer;

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

/// A sign of life with what the broker says of its disks.
fn report(peer: &mut Peer, broker: &Broker, id: &str, disk: &str) -> Got {
    let ext = [
        ("clusterName", "DefaultCluster"),
        ("brokerAddr", broker.address),
        ("brokerName", broker.name),
        ("brokerId", id),
        (offer::DISK_FIELD, disk),
    ];
    let code = request::BROKER_HEARTBEAT;
    peer.call_as(broker.connection, NEW, code, &ext, &[])
}

/// One round of reports: the two named ones wait so long, the others not at all.
fn report_all(peer: &mut Peer, now_ms: u64, waits_ms: &[(&str, u64)]) {
    for (at, (name, address)) in BROKERS.into_iter().enumerate() {
        let broker = Broker::master(name, address, at as u64 + 1);
        let waits = waits_ms.iter().find(|(sick, _)| *sick == name);
        let disk = format!("{} 0", waits.map_or(0, |(_, ms)| *ms));
        assert_eq!(report(peer, &broker, "0", &disk).code, 0);
    }
    peer.server.observe_reports(now_ms);
}

#[test]
fn reports_of_a_hanging_disk_isolate_its_broker_without_a_probe() {
    let mut peer = cluster(NameServerConfig::default());
    assert_eq!(peer.server.probe_targets().len(), 4);
    for round in 0..4 {
        assert_eq!(permissions(&mut peer, "T"), [6; 4], "round {round}");
        let waits_ms = 500 + round * 300;
        report_all(&mut peer, 1_000 + round * 300, &[("broker-b", waits_ms)]);
    }
    assert_eq!(permissions(&mut peer, "T"), [6, 4, 6, 6]);
    assert_eq!(peer.server.fuse_figures(), (1, 1));
    let got = peer.call(private::FUSE_STATE, &[]);
    let state: Value = serde_json::from_str(&got.body).unwrap();
    let reason = &state["members"][1]["reason"];
    assert_eq!(reason, "disk write waits 1400 ms, bound 500 ms");
}

#[test]
fn a_disk_that_works_in_between_and_a_replicas_disk_isolate_nobody() {
    let mut peer = cluster(NameServerConfig::default());
    peer.server.probe_targets();
    for round in 0..20 {
        let waits_ms = if round % 3 == 2 { 0 } else { 900 };
        report_all(&mut peer, 1_000 + round * 300, &[("broker-b", waits_ms)]);
        let replica = Broker::master("broker-c", "10.0.0.9:10911", 9);
        report(&mut peer, &replica, "1", "30000 0");
        peer.server.observe_reports(1_000 + round * 300);
    }
    assert_eq!(permissions(&mut peer, "T"), [6; 4]);
}

#[test]
fn name_servers_decide_the_same_by_the_same_reports_whenever_these_come() {
    let mut isolated = Vec::new();
    for late_ms in [0, 170] {
        let mut peer = cluster(NameServerConfig::default());
        peer.server.probe_targets();
        for round in 0..5 {
            let sick = [
                ("broker-a", 600 + round * 300),
                ("broker-d", 600 + round * 300),
            ];
            report_all(&mut peer, 1_000 + late_ms + round * 300, &sick);
        }
        isolated.push(permissions(&mut peer, "T"));
    }
    assert_eq!(isolated, [[4, 6, 6, 6], [4, 6, 6, 6]], "one of four may go");
}

#[test]
fn brokers_of_this_program_hear_how_many_others_take_messages() {
    let mut peer = Peer::new(NameServerConfig::default());
    let peers = |got: &Got| got.ext.get(offer::PEERS_FIELD).cloned();
    assert_eq!(
        peers(&peer.register(&a(), 1, &[("T", 6)])),
        None,
        "Apache's"
    );
    assert_eq!(
        peers(&report(&mut peer, &a(), "0", "0 0")),
        Some("0".to_owned())
    );
    peer.register(&b(), 1, &[("T", 6)]);
    let elsewhere = [("clusterName", "Elsewhere")];
    let mut other = Broker::master("broker-x", "10.0.0.8:10911", 8);
    other.extra.extend(elsewhere);
    peer.register(&other, 1, &[("T", 6)]);
    let mut replica = Broker::master("broker-y", "10.0.0.9:10911", 9);
    replica.id = "1";
    peer.register(&replica, 1, &[("T", 6)]);
    assert_eq!(
        peers(&report(&mut peer, &a(), "0", "0 0")),
        Some("1".to_owned())
    );
}

#[test]
fn a_broker_whose_disk_hangs_as_long_is_no_other_to_send_to() {
    let mut peer = Peer::new(NameServerConfig::default());
    peer.register(&a(), 1, &[("T", 6)]);
    peer.register(&b(), 1, &[("T", 6)]);
    let mut peers_at = |now_ms: i64, broker: &Broker, disk: &str| {
        peer.now_ms = now_ms;
        let got = report(&mut peer, broker, "0", disk);
        got.ext.get(offer::PEERS_FIELD).cloned().unwrap_or_default()
    };
    let now_ms = 1_000_000;
    assert_eq!(peers_at(now_ms, &a(), "250 0"), "1", "b is well");
    assert_eq!(peers_at(now_ms + 10, &b(), "250 0"), "0", "a is not");
    assert_eq!(
        peers_at(now_ms + 300, &a(), "0 0"),
        "0",
        "b was slow of late"
    );
    assert_eq!(
        peers_at(now_ms + 320, &a(), "900 0"),
        "1",
        "b is better off"
    );
    assert_eq!(peers_at(now_ms + 330, &b(), "300 0"), "0", "a is worse off");
    assert_eq!(peers_at(now_ms + 2_500, &a(), "0 0"), "1", "that is over");
}
