//! Four brokers under one name server, one of them stopped: the fuse takes it out of the write path
//! and gives it back (H02, H03).
//!
//! Invariant: with the settings out of the box a broker that does not answer is without write
//! permission in routes within three seconds, and has it again after the minute and its health.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tests::client::Client;
use tests::process::{BrokerProcess, eventually, local, program};
use tests::turn;

const TOPIC: &str = "fused";

struct Cluster {
    namesrv: BrokerProcess,
    brokers: Vec<BrokerProcess>,
}

fn cluster(name: &str, size: usize) -> Cluster {
    let mut namesrv = BrokerProcess::new(&format!("{name}-namesrv"));
    namesrv.start_namesrv();
    let brokers = (0..size).map(|number| {
        let mut broker = BrokerProcess::new(&format!("{name}-{number}"));
        broker.set("pinion.shards", "1");
        broker.launch_broker(&format!("broker-{number}"), namesrv.namesrv_port);
        broker.wait_ready();
        broker.client().create_topic(TOPIC, 4).expect("topic");
        broker
    });
    let brokers = brokers.collect();
    Cluster { namesrv, brokers }
}

impl Cluster {
    /// Brokers whose queues of the topic may be written, by number.
    fn writable(&self) -> Vec<bool> {
        let address = local(self.namesrv.namesrv_port);
        let route = Client::connect(address).expect("name server").route(TOPIC);
        let route = route.expect("route").unwrap_or_default();
        let queues = route.split("\"queueDatas\":").nth(1).unwrap_or_default();
        let has = |number: usize| {
            let name = format!("\"broker-{number}\"");
            let data = queues.split('{').find(|data| data.contains(&name));
            data.is_some_and(|data| data.contains("\"perm\":6"))
        };
        (0..self.brokers.len()).map(has).collect()
    }

    fn said_by_the_tool(&self) -> String {
        let address = format!("127.0.0.1:{}", self.namesrv.namesrv_port);
        let output = Command::new(program())
            .args(["fuse", "-n", &address])
            .output();
        let output = output.expect("pinion fuse");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

#[test]
fn a_stopped_broker_of_four_leaves_the_write_path_within_three_seconds_and_comes_back() {
    let _turn = turn();
    let cluster = cluster("fuse-four", 4);
    eventually("all writable", Duration::from_secs(20), || {
        cluster.writable() == [true; 4]
    });
    thread::sleep(Duration::from_secs(3));
    assert_eq!(cluster.writable(), [true; 4], "health trips nothing");
    cluster.brokers[2].signal("STOP");
    let stopped = Instant::now();
    eventually("isolation", Duration::from_secs(3), || {
        cluster.writable() == [true, true, false, true]
    });
    println!("isolated after {:?}", stopped.elapsed());
    let said = cluster.said_by_the_tool();
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
    let cluster = cluster("fuse-two", 2);
    cluster.brokers[1].signal("STOP");
    thread::sleep(Duration::from_secs(4));
    assert_eq!(cluster.writable(), [true; 2]);
    let said = cluster.said_by_the_tool();
    assert!(said.contains("fewer than four brokers"), "{said}");
    cluster.brokers[1].signal("CONT");
}
