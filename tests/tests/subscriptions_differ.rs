//! Members of one consumer group that subscribe differently, as every rolling change of a filter
//! has them for a while.
//!
//! Invariant: the disagreement is named at once, in the log, in the metrics and to administrators,
//! and each member is handed what its own filter lets through.

use std::time::Duration;

use tests::client::{Client, pulled};
use tests::process::{BrokerProcess, eventually, probe};
use tests::record::Record;
use tests::turn;

const TOPIC: &str = "rolling";
const GROUP: &str = "rolling_group";
const PULL_MESSAGE: i32 = 11;
const GET_CONSUMER_CONNECTION_LIST: i32 = 203;
const MESSAGES: usize = 40;

/// A pull as clients make it: what is wanted is known from the heartbeat.
fn pull(client: &mut Client, offset: i64) -> (Vec<Record>, i64) {
    let fields = [
        ("consumerGroup", GROUP.to_owned()),
        ("topic", TOPIC.to_owned()),
        ("queueId", "0".to_owned()),
        ("queueOffset", offset.to_string()),
        ("maxMsgNums", "32".to_owned()),
        ("sysFlag", "0".to_owned()),
        ("commitOffset", "0".to_owned()),
        ("suspendTimeoutMillis", "0".to_owned()),
        ("subVersion", "1".to_owned()),
    ];
    let frame = client.call(PULL_MESSAGE, &fields, b"").expect("pull");
    let pulled = pulled(frame).expect("an answer to a pull");
    (pulled.records, pulled.next_offset)
}

/// The tags a member is handed of the whole queue.
fn tags(client: &mut Client) -> Vec<String> {
    let (mut tags, mut offset) = (Vec::new(), 0);
    while offset < MESSAGES as i64 {
        let (records, next) = pull(client, offset);
        tags.extend(
            records
                .iter()
                .map(|record| record.property("TAGS").to_owned()),
        );
        assert!(next > offset, "goes on from {offset}");
        offset = next;
    }
    tags
}

#[test]
fn members_that_subscribe_differently_are_named_and_each_gets_what_it_asked_for() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("differ");
    broker.start();
    let [mut narrow, mut wide] = [broker.client(), broker.client()];
    narrow.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..MESSAGES {
        let tag = ["TagA", "TagB"][number % 2];
        narrow.send(TOPIC, 0, b"b", &[("TAGS", tag)]).expect("send");
    }
    let first = (TOPIC, "TagA");
    narrow
        .subscribe("narrow@1", GROUP, first)
        .expect("heartbeat");
    wide.subscribe("wide@1", GROUP, (TOPIC, "*"))
        .expect("heartbeat");
    assert_eq!(tags(&mut narrow), vec!["TagA"; MESSAGES / 2]);
    assert_eq!(tags(&mut wide).len(), MESSAGES);

    let names = [GROUP, TOPIC, "narrow@1", "wide@1", "TagA"];
    let has_all = |text: &str| names.iter().all(|name| text.contains(name));
    assert!(broker.output().lines().any(has_all), "{}", broker.output());
    let fields = [("consumerGroup", GROUP.to_owned())];
    let asked = wide.call(GET_CONSUMER_CONNECTION_LIST, &fields, b"");
    let body = asked.expect("an answer").success().expect("members").body;
    let text = String::from_utf8_lossy(&body).into_owned();
    let told = text.contains("subscriptionConflicts");
    assert!(
        told && names[1..].iter().all(|name| text.contains(name)),
        "{text}"
    );
    eventually("it is in the metrics", Duration::from_secs(15), || {
        let page = probe(broker.broker_port + 3, "/metrics");
        page.is_some_and(|(_, page)| {
            page.lines()
                .any(|line| line.contains(GROUP) && line.contains("TagA"))
        })
    });

    // When both ask for the same again, nothing is left of it.
    let both = wide.subscribe("wide@1", GROUP, first);
    both.expect("heartbeat");
    let asked = narrow.call(GET_CONSUMER_CONNECTION_LIST, &fields, b"");
    let body = asked.expect("an answer").success().expect("members").body;
    let text = String::from_utf8_lossy(&body).into_owned();
    assert!(!text.contains("subscriptionConflicts"), "{text}");
}
