//! A topic deleted and created again under its name (H09), as a consumer that stays up sees it.
//!
//! Invariant: every new message reaches the consumer and no backlog is ever negative.

use std::time::{Duration, Instant};

use tests::client::{Client, answer};
use tests::process::BrokerProcess;
use tests::{payload, turn};

const TOPIC: &str = "recreated";
const GROUP: &str = "recreated_group";
const QUEUES: i32 = 2;

fn no_negative_backlog(client: &mut Client, when: &str) {
    for queue in 0..QUEUES {
        let Ok(end) = client.max_offset(TOPIC, queue) else {
            continue;
        };
        let Ok(Some(committed)) = client.query_offset(GROUP, TOPIC, queue) else {
            continue;
        };
        assert!(
            committed <= end,
            "{when}: committed {committed} of {end} in queue {queue}"
        );
    }
}

#[test]
fn everything_sent_after_the_creation_arrives_and_no_backlog_is_negative() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("recreated");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    client.heartbeat("c", GROUP, TOPIC).expect("heartbeat");
    for number in 0..2000 {
        let queue = (number % 2) as i32;
        client
            .send(TOPIC, queue, &payload::body(number, 50), &[])
            .expect("send");
    }
    for queue in 0..QUEUES {
        client.commit(GROUP, TOPIC, queue, 1000).expect("commit");
    }
    client.delete_topic(TOPIC).expect("delete");
    no_negative_backlog(&mut client, "after the deletion");
    let _ = client.commit(GROUP, TOPIC, 0, 1000);
    client.create_topic(TOPIC, QUEUES).expect("create again");
    no_negative_backlog(&mut client, "after the creation");
    // The consumer does not know yet and commits what it had.
    let _ = client.commit(GROUP, TOPIC, 0, 1000);
    no_negative_backlog(&mut client, "after a stale commit");
    for number in 5000..5500 {
        let queue = (number % 2) as i32;
        client
            .send(TOPIC, queue, &payload::body(number, 50), &[])
            .expect("send");
        if number % 50 == 0 {
            no_negative_backlog(&mut client, "while sending");
        }
    }
    let mut found = Vec::new();
    for queue in 0..QUEUES {
        let mut next = 1000;
        let started = Instant::now();
        while found.len() < 250 * (queue as usize + 1) {
            let pulled = client.pull(TOPIC, queue, next, 32).expect("pull");
            found.extend(
                pulled
                    .records
                    .iter()
                    .filter_map(|r| payload::number(&r.body)),
            );
            assert!(
                pulled.code == answer::SUCCESS || pulled.next_offset != next,
                "{pulled:?}"
            );
            next = pulled.next_offset;
            assert!(
                started.elapsed() < Duration::from_secs(5),
                "{} arrived",
                found.len()
            );
        }
    }
    found.sort_unstable();
    assert_eq!(found, (5000..5500).collect::<Vec<_>>());
    broker.kill();
    broker.start();
    no_negative_backlog(&mut broker.client(), "after a kill");
    assert_eq!(
        broker.client().read_queue(TOPIC, 0, 0).expect("read").len(),
        250
    );
}
