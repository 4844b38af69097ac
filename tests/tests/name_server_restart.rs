//! A name server that comes back empty, and topics that only one broker has seen (H22, H25).
//!
//! Invariant: every topic has its route again within five seconds of the restart, whatever is
//! created meanwhile, and senders with cached routes notice nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::client::Client;
use tests::process::{BrokerProcess, eventually, local};
use tests::{StopAtEnd, env_number, payload, turn};

const TOPICS: usize = 200;
/// Topics that are sent to all the while.
const BUSY_TOPICS: u64 = 20;
const ROUTE_WAIT: Duration = Duration::from_secs(5);
/// How long after a restart a topic is created, in seconds.
const CREATED_AFTER_S: [u64; 3] = [1, 5, 10];

fn start_broker(broker: &mut BrokerProcess, namesrv_port: u16, name: &str) {
    broker.set("registerNameServerPeriod", "10000");
    broker.launch_broker(name, namesrv_port).wait_ready();
}

fn topic(number: usize) -> String {
    format!("restart_{number}")
}

/// Waits for the routes of these topics, the newest first.
fn all_found(namesrv: &BrokerProcess, topics: usize, since: Instant) {
    let mut asking = Client::connect(local(namesrv.namesrv_port)).expect("connect");
    for at in (0..topics).rev() {
        while asking.route(&topic(at)).expect("route").is_none() {
            let (waited, name) = (since.elapsed(), topic(at));
            assert!(waited < ROUTE_WAIT, "no route of {name} after {waited:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Sends to the busy topics over a route it has once learnt, until it is told to stop.
fn send_on(mut client: Client, stop: &AtomicBool, sent: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        let number = sent.load(Ordering::Relaxed);
        let busy = topic((number % BUSY_TOPICS) as usize);
        let body = payload::body(number, 50);
        client
            .send(&busy, 0, &body, &[])
            .expect("a sender with a cached route notices nothing");
        sent.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn all_topics_are_back_within_five_seconds_of_a_restart() {
    let _turn = turn();
    let mut namesrv = BrokerProcess::new("restart-namesrv");
    let mut broker = BrokerProcess::new("restart-broker");
    namesrv.start_namesrv();
    start_broker(&mut broker, namesrv.namesrv_port, "a");
    let mut client = broker.client();
    (0..TOPICS).for_each(|at| client.create_topic(&topic(at), 2).expect("create topic"));
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| send_on(broker.client(), &stop, &sent));
        for round in 0..env_number("NAMESRV_ROUNDS", 3) as usize {
            namesrv.kill();
            thread::sleep(Duration::from_millis(200));
            namesrv.start_namesrv();
            let restarted = Instant::now();
            let topics = TOPICS + round;
            let create = Duration::from_secs(CREATED_AFTER_S[round % 3]);
            thread::scope(|scope| {
                // In the first rounds the creation falls into the time in which all come back.
                scope.spawn(|| all_found(&namesrv, topics, restarted));
                thread::sleep(create);
                let newest = topic(topics);
                client.create_topic(&newest, 2).expect("create topic");
            });
            all_found(&namesrv, topics + 1, Instant::now());
        }
    });
    let sent = sent.load(Ordering::Relaxed);
    assert!(sent > BUSY_TOPICS, "{sent} sends, none failed");
}

#[test]
fn a_topic_made_by_one_message_comes_to_every_broker() {
    let _turn = turn();
    let mut namesrv = BrokerProcess::new("both-namesrv");
    namesrv.start_namesrv();
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
