//! Going back: offsets found by store time, and groups that an administrator sets back.
//!
//! Invariant: a time has exactly one answer for either boundary, wherever the messages stand; a
//! group goes on where it was told to, and what its members say meanwhile does not undo that.

use std::time::Duration;

use tests::client::{BatchItem, Client, answer};
use tests::payload::{self, Random};
use tests::process::BrokerProcess;
use tests::turn;

const TOPIC: &str = "rewind";
const GROUP: &str = "rewinders";
const RESET_OFFSET: i32 = 222;
const UPDATE_GROUP: i32 = 200;
const PULL_OFFSET_MOVED: i32 = 21;
const SYSTEM_ERROR: i32 = 1;

/// Several messages share a millisecond, and milliseconds without any lie between.
fn fill(client: &mut Client, random: &mut Random, rounds: u64) {
    for round in 0..rounds {
        let body = payload::body(round, 40);
        let item: BatchItem<'_> = (&body, &[]);
        let items = vec![item; 1 + random.below(4) as usize];
        client.send_batch(TOPIC, 0, &items, &[]).expect("send");
        std::thread::sleep(Duration::from_millis(random.below(5)));
    }
}

fn times(client: &mut Client) -> Vec<i64> {
    let records = client.read_queue(TOPIC, 0, 0).expect("read");
    records.iter().map(|r| r.store_timestamp_ms).collect()
}

/// Asks for every time around every message and compares with the plain list.
fn check_times(client: &mut Client, when: &str) {
    let times = times(client);
    assert!(times.is_sorted(), "{when}");
    let mut asked: Vec<i64> = times.iter().flat_map(|at| [at - 1, *at, at + 1]).collect();
    asked.extend([0, i64::MAX]);
    asked.sort_unstable();
    asked.dedup();
    for at in asked {
        let lower = times.partition_point(|time| *time < at);
        let upper = times.partition_point(|time| *time <= at).saturating_sub(1);
        for (boundary, wanted) in [("", lower), ("lower", lower), ("UPPER", upper)] {
            let found = client.search_boundary(TOPIC, 0, at, boundary);
            let found = found.expect("search");
            assert_eq!(found, wanted as i64, "{when}: {boundary} of {at}");
        }
    }
}

#[test]
fn a_time_is_found_to_the_millisecond_with_both_boundaries_in_memory_and_on_disk() {
    let _turn = turn();
    let mut random = Random::from_env();
    let mut broker = BrokerProcess::new("rewind-times");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for boundary in ["lower", "upper"] {
        let found = client.search_boundary(TOPIC, 0, 1, boundary);
        assert_eq!(found.expect("search"), 0, "an empty queue, {boundary}");
    }
    fill(&mut client, &mut random, 60);
    check_times(&mut client, "in memory");
    broker.stop();
    broker.start();
    check_times(&mut broker.client(), "on disk");
    fill(&mut broker.client(), &mut random, 60);
    check_times(&mut broker.client(), "on disk and in memory");
    broker.kill();
    broker.start();
    check_times(&mut broker.client(), "after a kill");
    broker.stop();
    broker.start();
    fill(&mut broker.client(), &mut random, 20);
    check_times(&mut broker.client(), "in several runs");
}

/// What an administrator's reset answers: code and body.
fn reset(client: &mut Client, more: &[(&str, String)]) -> (i32, String) {
    let mut fields = vec![
        ("topic", TOPIC.to_owned()),
        ("group", GROUP.to_owned()),
        ("isForce", "true".to_owned()),
    ];
    fields.extend_from_slice(more);
    let frame = client.call(RESET_OFFSET, &fields, b"").expect("reset");
    (frame.code, String::from_utf8(frame.body).expect("text"))
}

fn committed(client: &mut Client, queue: i32) -> Option<i64> {
    client.query_offset(GROUP, TOPIC, queue).expect("query")
}

#[test]
fn a_group_goes_on_where_an_administrator_put_it_whether_its_members_are_there_or_not() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("rewind-reset");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 2).expect("create topic");
    let group = format!("{{\"groupName\":\"{GROUP}\"}}");
    let made = client.call(UPDATE_GROUP, &[], group.as_bytes());
    assert_eq!(made.expect("group").code, answer::SUCCESS);
    for number in 0..40 {
        let body = payload::body(number, 40);
        let queue = (number % 2) as i32;
        client.send(TOPIC, queue, &body, &[]).expect("send");
        std::thread::sleep(Duration::from_millis(2));
    }
    client.heartbeat("c", GROUP, TOPIC).expect("heartbeat");
    for queue in 0..2 {
        client.commit(GROUP, TOPIC, queue, 20).expect("commit");
    }
    let from = times(&mut client)[5];
    let (code, body) = reset(&mut client, &[("timestamp", from.to_string())]);
    assert_eq!(code, 0, "{body}");
    // The second queue's message behind it was stored later.
    for (queue, offset) in [(0, 5), (1, 5)] {
        assert_eq!(committed(&mut client, queue), Some(offset));
        let told = format!("\"queueId\":{queue},\"topic\":\"{TOPIC}\"}}:{offset}");
        assert!(body.contains(&told), "{body}");
        // A member that knows nothing of it yet commits, and asks for more, where it was.
        client.commit(GROUP, TOPIC, queue, 20).expect("commit");
        assert_eq!(committed(&mut client, queue), Some(offset), "not undone");
        let pulled = client.pull_as(GROUP, TOPIC, queue, 20, 8).expect("pull");
        assert_eq!(
            (pulled.code, pulled.next_offset),
            (PULL_OFFSET_MOVED, offset)
        );
        let pulled = client.pull_as(GROUP, TOPIC, queue, offset, 8);
        let pulled = pulled.expect("pull");
        assert_eq!(pulled.code, answer::SUCCESS, "once only");
        assert_eq!(pulled.records[0].queue_offset, offset);
        client.commit(GROUP, TOPIC, queue, 13).expect("commit");
        assert_eq!(committed(&mut client, queue), Some(13), "it goes on");
    }
    drop(client);
    // Nobody is there, and the broker is killed behind the answer.
    let mut admin = broker.client();
    let one = |offset: i64| {
        [
            ("timestamp", "-1".to_owned()),
            ("queueId", "1".to_owned()),
            ("offset", offset.to_string()),
        ]
    };
    assert_eq!(reset(&mut admin, &one(99)).0, SYSTEM_ERROR);
    assert_eq!(reset(&mut admin, &one(2)).0, 0);
    broker.kill();
    broker.start();
    let mut client = broker.client();
    assert_eq!(committed(&mut client, 0), Some(13));
    assert_eq!(committed(&mut client, 1), Some(2));
    let to_end = [("timestamp", "-1".to_owned())];
    assert_eq!(reset(&mut client, &to_end).0, 0);
    assert_eq!(committed(&mut client, 0), Some(20));
}
