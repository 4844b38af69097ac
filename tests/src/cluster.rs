//! Owns a name server with several brokers, each a process of its own.
//!
//! Invariant: the brokers are called `broker-0`, `broker-1` …, and each has the same topic.

use std::process::Command;
use std::time::Duration;

use crate::client::Client;
use crate::process::{BrokerProcess, eventually, local, program};

/// A cluster under test.
#[derive(Debug)]
pub struct Cluster {
    /// Its name server.
    pub namesrv: BrokerProcess,
    /// Its brokers.
    pub brokers: Vec<BrokerProcess>,
    topic: String,
}

impl Cluster {
    /// Starts so many brokers with one shard each; `prepare` has the last word on their settings.
    pub fn start(
        name: &str,
        topic: &str,
        size: usize,
        mut prepare: impl FnMut(usize, &mut BrokerProcess),
    ) -> Self {
        let mut namesrv = BrokerProcess::new(&format!("{name}-namesrv"));
        namesrv.start_namesrv();
        let brokers = (0..size).map(|number| {
            let mut broker = BrokerProcess::new(&format!("{name}-{number}"));
            broker.set("pinion.shards", "1");
            prepare(number, &mut broker);
            broker.launch_broker(&format!("broker-{number}"), namesrv.namesrv_port);
            broker
        });
        let mut brokers: Vec<BrokerProcess> = brokers.collect();
        for broker in &mut brokers {
            broker.wait_ready();
            broker.client().create_topic(topic, 4).expect("topic");
        }
        let cluster = Self {
            namesrv,
            brokers,
            topic: topic.to_owned(),
        };
        eventually("all writable", Duration::from_secs(20), || {
            cluster.writable() == vec![true; size]
        });
        cluster
    }

    /// Whether the topic may be written on each broker, as the name server tells clients.
    pub fn writable(&self) -> Vec<bool> {
        let address = local(self.namesrv.namesrv_port);
        let route = Client::connect(address)
            .expect("name server")
            .route(&self.topic);
        let route = route.expect("route").unwrap_or_default();
        let queues = route.split("\"queueDatas\":").nth(1).unwrap_or_default();
        let has = |number: usize| {
            let name = format!("\"broker-{number}\"");
            let data = queues.split('{').find(|data| data.contains(&name));
            data.is_some_and(|data| data.contains("\"perm\":6"))
        };
        (0..self.brokers.len()).map(has).collect()
    }

    /// What `pinion fuse` says of the name server.
    pub fn fuse_of_namesrv(&self) -> String {
        said_by_the_tool("-n", self.namesrv.namesrv_port)
    }

    /// What `pinion fuse` says of a broker.
    pub fn fuse_of(&self, number: usize) -> String {
        said_by_the_tool("-b", self.brokers[number].broker_port)
    }

    /// Waits until every broker knows that there are others.
    pub fn wait_for_peers(&self) {
        for number in 0..self.brokers.len() {
            eventually("other brokers known", Duration::from_secs(10), || {
                self.fuse_of(number).contains("other brokers take them")
            });
        }
    }
}

fn said_by_the_tool(option: &str, port: u16) -> String {
    let address = format!("127.0.0.1:{port}");
    let output = Command::new(program())
        .args(["fuse", option, &address])
        .output();
    let output = output.expect("pinion fuse");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
