//! Looking messages up by key: equal hashes (H19), bounds of time, unique keys.
//!
//! Invariant: a key finds its own messages of its own topic and of the time asked for, all of them.

use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::Duration;

use tests::client::Client;
use tests::process::BrokerProcess;
use tests::record::{Record, decode_all};
use tests::turn;

const QUERY_MESSAGE: i32 = 12;
const QUERY_NOT_FOUND: i32 = 22;
const COLLIDING: usize = 1_000;

fn query(
    client: &mut Client,
    (topic, key): (&str, &str),
    most: usize,
    (begin_ms, end_ms): (i64, i64),
) -> Vec<Record> {
    let fields = [
        ("topic", topic.to_owned()),
        ("key", key.to_owned()),
        ("maxNum", most.to_string()),
        ("beginTimestamp", begin_ms.to_string()),
        ("endTimestamp", end_ms.to_string()),
    ];
    let answer = client.call(QUERY_MESSAGE, &fields, b"").expect("query");
    match answer.code {
        0 => decode_all(&answer.body).expect("records"),
        QUERY_NOT_FOUND => Vec::new(),
        other => panic!("{topic}#{key}: code {other}"),
    }
}

/// Keys that Java's string hash cannot tell apart.
fn colliding(number: usize) -> String {
    (0..10)
        .map(|bit| if number >> bit & 1 == 1 { "Aa" } else { "BB" })
        .collect()
}

#[test]
fn keys_with_equal_hashes_find_their_own_messages_only() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("look-up");
    broker.start();
    let mut client = broker.client();
    for topic in ["AaTopic", "BBTopic"] {
        client.create_topic(topic, 1).expect("create topic");
    }
    let send = |client: &mut Client, topic: &str, key: &str, body: &str| {
        let sent = client.send(topic, 0, body.as_bytes(), &[("KEYS", key)]);
        let sent = sent.expect("send");
        client.view_at(topic, &sent).store_timestamp_ms
    };
    send(&mut client, "AaTopic", "Aa", "1");
    send(&mut client, "BBTopic", "BB", "2");
    for number in 0..COLLIDING {
        let keys = format!("{} all", colliding(number));
        send(&mut client, "AaTopic", &keys, &number.to_string());
    }
    sleep(Duration::from_millis(20));
    let late = send(&mut client, "AaTopic", "all late", "late");
    for start in 0..2 {
        let any = (0, i64::MAX);
        assert!(query(&mut client, ("AaTopic", "BB"), 32, any).is_empty());
        assert!(query(&mut client, ("BBTopic", "Aa"), 32, any).is_empty());
        assert_eq!(query(&mut client, ("BBTopic", "BB"), 32, any).len(), 1);
        for number in (0..COLLIDING).step_by(37) {
            let found = query(&mut client, ("AaTopic", &colliding(number)), 32, any);
            assert_eq!(found.len(), 1, "key {number} after {start} restarts");
            assert_eq!(found[0].body, number.to_string().as_bytes());
        }
        let newest = query(&mut client, ("AaTopic", "all"), 10, any);
        assert_eq!(newest.len(), 10);
        assert_eq!(newest[9].body, b"late", "the newest ones, oldest first");
        let before = query(&mut client, ("AaTopic", "all"), 64, (0, late - 1));
        let bodies: BTreeSet<Vec<u8>> = before.into_iter().map(|record| record.body).collect();
        assert_eq!(
            bodies.len(),
            64,
            "later ones do not use up the number asked for"
        );
        assert!(!bodies.contains(b"late".as_slice()));
        for (begin_ms, end_ms) in [(late, late), (late, i64::MAX)] {
            let found = query(&mut client, ("AaTopic", "all"), 64, (begin_ms, end_ms));
            assert_eq!(found.len(), 1, "{begin_ms}..={end_ms}");
        }
        for nothing in [(late + 1, i64::MAX), (late, late - 1), (i64::MIN, 0)] {
            assert!(query(&mut client, ("AaTopic", "all"), 64, nothing).is_empty());
        }
        if start == 0 {
            broker.stop();
            broker.start();
            client = broker.client();
        }
    }
}
