//! Four brokers under one name server, one of them stopped: the fuse takes it out of the write path
//! and gives it back (H02, H03).
//!
//! Invariant: with the settings out of the box a broker that does not answer is without write
//! permission in routes within three seconds, and has it again after the minute and its health.

use std::thread;
use std::time::{Duration, Instant};

use tests::cluster::Cluster;
use tests::process::eventually;
use tests::turn;

const TOPIC: &str = "fused";

#[test]
fn a_stopped_broker_of_four_leaves_the_write_path_within_three_seconds_and_comes_back() {
    let _turn = turn();
    let cluster = Cluster::start("fuse-four", TOPIC, 4, |_, _| {});
    thread::sleep(Duration::from_secs(3));
    assert_eq!(cluster.writable(), [true; 4], "health trips nothing");
    cluster.brokers[2].signal("STOP");
    let stopped = Instant::now();
    eventually("isolation", Duration::from_secs(3), || {
        cluster.writable() == [true, true, false, true]
    });
    println!("isolated after {:?}", stopped.elapsed());
    let said = cluster.fuse_of_namesrv();
    assert!(said.contains("broker-2  open"), "{said}");
    assert!(
        said.contains("why: append not answered in 900 ms"),
        "{said}"
    );
    cluster.brokers[2].signal("CONT");
    eventually("write permission again", Duration::from_secs(90), || {
        cluster.writable() == [true; 4]
    });
    let apart = stopped.elapsed();
    assert!(apart >= Duration::from_secs(60), "a minute: {apart:?}");
    let log = cluster.namesrv.output();
    assert_eq!(log.matches("fuse open").count(), 1, "one line each:\n{log}");
}

#[test]
fn of_two_brokers_none_is_isolated() {
    let _turn = turn();
    let cluster = Cluster::start("fuse-two", TOPIC, 2, |_, _| {});
    cluster.brokers[1].signal("STOP");
    thread::sleep(Duration::from_secs(4));
    assert_eq!(cluster.writable(), [true; 2]);
    let said = cluster.fuse_of_namesrv();
    assert!(said.contains("fewer than four brokers"), "{said}");
    cluster.brokers[1].signal("CONT");
}
