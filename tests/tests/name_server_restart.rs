//! A name server that comes back empty, and topics that only one broker has seen (H22, H25).
//!
//! Invariant: every topic has its route again within five seconds of the restart, whatever is
//! created meanwhile, and senders with cached routes notice nothing.

use std::thread;
use std::time::{Duration, Instant};

use tests::client::Client;
use tests::process::{BrokerProcess, eventually, local};
use tests::{env_number, payload, turn};

const TOPICS: usize = 200;
const ROUTE_WAIT: Duration = Duration::from_secs(5);

fn start_namesrv(namesrv: &mut BrokerProcess) {
    let port = namesrv.namesrv_port.to_string();
    let data = namesrv.data().display().to_string();
    let words = ["namesrv", "--data", &data, "--port", &port];
    namesrv.launch_as(&words.map(str::to_owned));
    let address = local(namesrv.namesrv_port);
    eventually("the name server", Duration::from_secs(5), || {
        Client::connect(address)
            .and_then(|mut client| client.route("none"))
            .is_ok()
    });
}

fn start_broker(broker: &mut BrokerProcess, namesrv_port: u16, name: &str) {
    let store = broker.data().display().to_string();
    let port = broker.broker_port.to_string();
    broker.set("brokerName", name).set("listenPort", &port);
    broker
        .set("storePathRootDir", &store)
        .set("registerNameServerPeriod", "10000");
    let configuration = broker.configuration().display().to_string();
    let namesrv = format!("127.0.0.1:{namesrv_port}");
    broker.launch_as(&["broker", "-c", &configuration, "-n", &namesrv].map(str::to_owned));
    broker.namesrv_port = namesrv_port;
    broker.wait_ready();
}

fn topic(number: usize) -> String {
    format!("restart_{number}")
}

#[test]
fn all_topics_are_back_within_five_seconds_of_a_restart() {
    let _turn = turn();
    let mut namesrv = BrokerProcess::new("restart-namesrv");
    let mut broker = BrokerProcess::new("restart-broker");
    start_namesrv(&mut namesrv);
    start_broker(&mut broker, namesrv.namesrv_port, "a");
    let mut client = broker.client();
    (0..TOPICS).for_each(|at| client.create_topic(&topic(at), 2).expect("create topic"));
    for round in 0..env_number("NAMESRV_ROUNDS", 3) {
        namesrv.kill();
        client
            .send(&topic(1), 0, &payload::body(round, 50), &[])
            .expect("send without it");
        start_namesrv(&mut namesrv);
        let restarted = Instant::now();
        thread::sleep(Duration::from_secs(round % 3));
        let newest = TOPICS + round as usize;
        client
            .create_topic(&topic(newest), 2)
            .expect("create topic");
        let mut asking = Client::connect(local(namesrv.namesrv_port)).expect("connect");
        for at in (0..=newest).rev() {
            while asking.route(&topic(at)).expect("route").is_none() {
                let waited = restarted.elapsed();
                assert!(
                    waited < ROUTE_WAIT,
                    "no route of {} after {waited:?}",
                    topic(at)
                );
                thread::sleep(Duration::from_millis(20));
            }
        }
        client
            .send(&topic(1), 1, &payload::body(round, 50), &[])
            .expect("send with it");
    }
}

#[test]
fn a_topic_made_by_one_message_comes_to_every_broker() {
    let _turn = turn();
    let mut namesrv = BrokerProcess::new("both-namesrv");
    start_namesrv(&mut namesrv);
    let mut brokers = [BrokerProcess::new("both-a"), BrokerProcess::new("both-b")];
    for (broker, name) in brokers.iter_mut().zip(["a", "b"]) {
        start_broker(broker, namesrv.namesrv_port, name);
    }
    brokers[0]
        .client()
        .send("made_on_a", 0, b"one message", &[])
        .expect("send");
    let mut asking = Client::connect(local(namesrv.namesrv_port)).expect("connect");
    let ports = [brokers[0].broker_port, brokers[1].broker_port];
    eventually("a route with both brokers", Duration::from_secs(12), || {
        let route = asking
            .route("made_on_a")
            .expect("route")
            .unwrap_or_default();
        ports
            .iter()
            .all(|port| route.contains(&format!(":{port}\"")))
    });
    brokers[1]
        .client()
        .send("made_on_a", 0, b"another", &[])
        .expect("send");
}
