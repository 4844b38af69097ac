//! Two brokers under one name server: topics made by a send come to both, deleted ones stay away,
//! and a name server that comes back empty learns both again (H22, H25).
//!
//! Invariant: with the periods the broker has out of the box, whatever a send creates on one broker
//! is on the other within one registration period, with as many queues.

use std::thread;
use std::time::{Duration, Instant};

use tests::client::{Client, code};
use tests::frame::Frame;
use tests::process::{BrokerProcess, eventually, local};
use tests::turn;

const PERIOD: Duration = Duration::from_secs(30);

struct Cluster {
    namesrv: BrokerProcess,
    brokers: Vec<BrokerProcess>,
}

impl Cluster {
    fn start(name: &str) -> Self {
        let mut namesrv = BrokerProcess::new(&format!("{name}-namesrv"));
        namesrv.start_namesrv();
        let mut cluster = Self {
            namesrv,
            brokers: Vec::new(),
        };
        cluster.add(&format!("{name}-a"), "a", &[]);
        cluster.add(&format!("{name}-b"), "b", &[]);
        cluster
    }

    fn add(&mut self, directory: &str, name: &str, settings: &[(&str, &str)]) {
        let mut broker = BrokerProcess::new(directory);
        for (key, value) in settings {
            broker.set(key, value);
        }
        self.launch(&mut broker, name);
        self.brokers.push(broker);
    }

    fn launch(&self, broker: &mut BrokerProcess, name: &str) {
        broker.launch_broker(name, self.namesrv.namesrv_port);
        // The route may be that of the process before, and without automatic creation there is no
        // TBW102 to look for: the broker itself has to answer.
        let port = format!(":{}\"", broker.broker_port);
        let address = local(broker.broker_port);
        eventually("the broker's registration", Duration::from_secs(20), || {
            let answers = Client::connect(address)
                .and_then(|mut client| client.max_offset("SELF_TEST_TOPIC", 0))
                .is_ok();
            let route = self.asking().route("SELF_TEST_TOPIC").expect("route");
            answers && route.is_some_and(|route| route.contains(&port))
        });
    }

    fn asking(&self) -> Client {
        Client::connect(local(self.namesrv.namesrv_port)).expect("connect to the name server")
    }

    fn holders(&self, topic: &str) -> Vec<bool> {
        let route = self.asking().route(topic).expect("route");
        let route = route.unwrap_or_default();
        let ports = self.brokers.iter().map(|broker| broker.broker_port);
        ports
            .map(|port| route.contains(&format!(":{port}\"")))
            .collect()
    }

    fn wait_on_both(&self, topic: &str) {
        eventually(&format!("{topic} on both"), PERIOD, || {
            self.holders(topic) == [true, true]
        });
    }

    fn delete_everywhere(&self, topic: &str) {
        for broker in &self.brokers {
            broker.client().delete_topic(topic).expect("delete");
        }
        let fields = [("topic", topic.to_owned())];
        let frame = self
            .asking()
            .call(code::DELETE_TOPIC_IN_NAMESRV, &fields, b"");
        frame.and_then(Frame::success).expect("delete the route");
    }
}

/// What a client that knows all queues of the route does: round and round.
fn send_round_robin(cluster: &Cluster, topic: &str, messages: usize) -> Vec<usize> {
    let holders = cluster.holders(topic);
    let mut clients: Vec<(usize, Client)> = holders
        .iter()
        .enumerate()
        .filter(|(_, has)| **has)
        .map(|(at, _)| (at, cluster.brokers[at].client()))
        .collect();
    let mut counts = vec![0; holders.len()];
    for number in 0..messages {
        let place = number % (clients.len() * 4);
        let count = clients.len();
        let (at, client) = &mut clients[place % count];
        let queue = (place / count) as i32;
        client
            .send(topic, queue, b"one of many", &[])
            .expect("send");
        counts[*at] += 1;
    }
    counts
}

#[test]
fn one_message_brings_its_topic_to_both_brokers_and_sending_goes_on_without_the_first() {
    let _turn = turn();
    let mut cluster = Cluster::start("spread");
    let began = Instant::now();
    let mut first = cluster.brokers[0].client();
    first.send("made", 0, b"one message", &[]).expect("send");
    cluster.wait_on_both("made");
    println!("on both after {:?}", began.elapsed());
    let counts = send_round_robin(&cluster, "made", 1_000);
    for count in &counts {
        assert!((450..=550).contains(count), "spread evenly: {counts:?}");
    }
    let kept = (0..4).map(|queue| cluster.brokers[1].client().max_offset("made", queue));
    let kept: i64 = kept.map(|offset| offset.expect("a queue")).sum();
    assert_eq!(kept as usize, counts[1], "four queues there too");
    cluster.brokers[0].stop();
    eventually("the first broker out of the route", PERIOD, || {
        cluster.holders("made") == [false, true]
    });
    assert_eq!(send_round_robin(&cluster, "made", 100), [0, 100]);
}

#[test]
fn what_an_administrator_makes_stays_where_he_made_it() {
    let _turn = turn();
    let cluster = Cluster::start("by-hand");
    let mut first = cluster.brokers[0].client();
    first.create_topic("by_hand", 4).expect("create");
    first
        .send("made_later", 0, b"a mark in time", &[])
        .expect("send");
    cluster.wait_on_both("made_later");
    assert_eq!(cluster.holders("by_hand"), [true, false]);
}

#[test]
fn a_deleted_topic_stays_deleted_and_a_new_one_of_its_name_is_spread_again() {
    let _turn = turn();
    let cluster = Cluster::start("deleted");
    let mut first = cluster.brokers[0].client();
    // Deleted while an offer of it may be under way, and once it is everywhere.
    for (round, wait_ms) in [0, 500, 1_500, 2_900].into_iter().enumerate() {
        let topic = format!("early_{round}");
        first.send(&topic, 0, b"short-lived", &[]).expect("send");
        thread::sleep(Duration::from_millis(wait_ms));
        cluster.delete_everywhere(&topic);
    }
    first.send("late", 0, b"short-lived", &[]).expect("send");
    cluster.wait_on_both("late");
    cluster.delete_everywhere("late");
    thread::sleep(PERIOD + Duration::from_secs(5));
    for topic in ["early_0", "early_1", "early_2", "early_3", "late"] {
        assert_eq!(cluster.holders(topic), [false, false], "{topic} stays away");
    }
    let mut second = cluster.brokers[1].client();
    second.send("late", 0, b"again", &[]).expect("send");
    cluster.wait_on_both("late");
}

#[test]
fn a_broker_that_joins_later_gets_what_sends_made_and_one_without_auto_create_does_not() {
    let _turn = turn();
    let mut cluster = Cluster::start("joins");
    let mut first = cluster.brokers[0].client();
    let names: Vec<String> = (0..1_200).map(|number| format!("made_{number}")).collect();
    for name in &names {
        first.send(name, 0, b"first", &[]).expect("send");
    }
    eventually("all on the second broker", PERIOD, || {
        cluster.holders(&names[0]) == [true, true] && cluster.holders(&names[1_199])[1]
    });
    cluster.add("joins-c", "c", &[]);
    cluster.add("joins-d", "d", &[("autoCreateTopicEnable", "false")]);
    eventually("all on the third broker", PERIOD, || {
        let last = names.iter().rev().step_by(100);
        last.into_iter().all(|name| cluster.holders(name)[2])
    });
    for name in names.iter().step_by(100) {
        assert_eq!(cluster.holders(name), [true, true, true, false], "{name}");
    }
    // All of them come back the same after a restart.
    let mut third = cluster.brokers.swap_remove(2);
    third.kill();
    cluster.launch(&mut third, "c");
    let offset = third.client().max_offset(&names[0], 0);
    assert_eq!(offset.expect("the topic"), 0);
}

#[test]
fn a_name_server_that_comes_back_empty_knows_both_brokers_and_offers_on() {
    let _turn = turn();
    let mut cluster = Cluster::start("comeback");
    let mut first = cluster.brokers[0].client();
    first.send("before", 0, b"before", &[]).expect("send");
    cluster.wait_on_both("before");
    for at in 0..200 {
        let broker = &cluster.brokers[at % 2];
        let topic = format!("on_one_{at}");
        broker.client().create_topic(&topic, 2).expect("create");
    }
    cluster.namesrv.kill();
    cluster.namesrv.start_namesrv();
    let restarted = Instant::now();
    first.send("after", 0, b"after", &[]).expect("send");
    for at in 0..200 {
        let mut expected = [false, false];
        expected[at % 2] = true;
        while cluster.holders(&format!("on_one_{at}")) != expected {
            let waited = restarted.elapsed();
            assert!(
                waited < Duration::from_secs(5),
                "on_one_{at} after {waited:?}"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
    assert_eq!(cluster.holders("before"), [true, true]);
    cluster.wait_on_both("after");
}
