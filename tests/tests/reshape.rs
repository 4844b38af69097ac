//! A store written with four shards opens on other numbers of cores with equal content.
//!
//! Invariant: shards belong to the store, cores to the start; no record moves or changes.

use std::collections::BTreeMap;

use tests::process::BrokerProcess;
use tests::{payload, procfs, turn};

const TOPIC: &str = "reshape";
const QUEUES: i32 = 8;

type Content = BTreeMap<i32, Vec<(i64, Option<u64>)>>;

fn content(broker: &BrokerProcess) -> Content {
    let mut client = broker.client();
    let mut content = Content::new();
    for queue in 0..QUEUES {
        let records = client.read_queue(TOPIC, queue, 0).expect("read");
        let places = records
            .iter()
            .map(|r| (r.physical_offset, payload::number(&r.body)));
        content.insert(queue, places.collect());
    }
    content
}

fn shards_in(content: &Content) -> usize {
    // The shard number sits in the top bits of the physical offset.
    let first = content.values().filter_map(|places| places.first());
    let mut shards: Vec<i64> = first.map(|(offset, _)| offset >> 48).collect();
    shards.sort_unstable();
    shards.dedup();
    shards.len()
}

#[test]
fn the_same_store_serves_on_one_two_and_all_cores() {
    let _turn = turn();
    let cpus: Vec<String> = procfs::own_cpus().iter().map(ToString::to_string).collect();
    let mut broker = BrokerProcess::new("reshape");
    broker.arguments(&["--shards", "4"]).start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    let mut number = 0;
    for _ in 0..200 {
        for queue in 0..QUEUES {
            client
                .send(TOPIC, queue, &payload::body(number, 500), &[])
                .expect("send");
            number += 1;
        }
    }
    let mut expected = content(&broker);
    assert_eq!(
        shards_in(&expected),
        4,
        "eight queues spread over the four shards"
    );
    let lists = [
        cpus[..1].join(","),
        cpus[..cpus.len().min(2)].join(","),
        cpus.join(","),
    ];
    for (at, list) in lists.iter().enumerate() {
        if at % 2 == 0 {
            broker.stop()
        } else {
            broker.kill()
        }
        broker.arguments(&["--cores", list]).start();
        assert_eq!(content(&broker), expected, "on cores {list}");
        let mut client = broker.client();
        for queue in 0..QUEUES {
            let sent = client
                .send(TOPIC, queue, &payload::body(number, 500), &[])
                .expect("send");
            assert_eq!(sent.queue_offset as usize, expected[&queue].len());
            number += 1;
        }
        let now = content(&broker);
        for queue in 0..QUEUES {
            let known = &expected[&queue];
            assert_eq!(
                &now[&queue][..known.len()],
                &known[..],
                "queue {queue} on cores {list}"
            );
            assert_eq!(now[&queue].len(), known.len() + 1);
        }
        expected = now;
    }
    broker.stop();
}

/// Starts with so many shards asked for and requires these words.
fn started_with(broker: &mut BrokerProcess, shards: &str, words: &[&str]) {
    broker.arguments(&["--shards", shards]).start();
    let output = broker.output();
    for word in words {
        assert!(output.contains(word), "no {word:?} in:\n{output}");
    }
}

#[test]
fn another_number_of_shards_is_said_and_loses_nothing() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("reshape-number");
    started_with(&mut broker, "4", &["4 shards\n"]);
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    for queue in 0..QUEUES {
        client
            .send(TOPIC, queue, &payload::body(queue as u64, 500), &[])
            .expect("send");
    }
    let expected = content(&broker);
    broker.stop();
    let fewer = ["more shards than asked for", "4 shards (1 asked for"];
    started_with(&mut broker, "1", &fewer);
    assert_eq!(content(&broker), expected);
    broker.stop();
    let more = ["gets more shards", "had=4 now=5", "5 shards (4 before)"];
    started_with(&mut broker, "5", &more);
    assert_eq!(content(&broker), expected);
    broker.stop();
    started_with(&mut broker, "5", &["5 shards\n"]);
    assert_eq!(content(&broker), expected);
    broker.stop();
}
