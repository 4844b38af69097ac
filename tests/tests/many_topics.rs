//! More topics than one registration holds reach the name server, also after a restart (H23).
//!
//! Invariant: the name server knows every topic, and one more topic costs one more small message.

use std::time::Duration;

use tests::client::Client;
use tests::process::{BrokerProcess, eventually};
use tests::turn;

const UPDATE_AND_CREATE_TOPIC_LIST: i32 = 18;
const GET_ALL_TOPIC_LIST_FROM_NAMESERVER: i32 = 206;
const TOPICS: usize = 9_000;
const LIMIT: Duration = Duration::from_secs(60);

fn create(client: &mut Client) {
    let topics: Vec<_> = (0..TOPICS)
        .map(|number| {
            serde_json::json!({
                "topicName": format!("many_{number}"), "readQueueNums": 4, "writeQueueNums": 4,
                "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": false,
            })
        })
        .collect();
    let body = serde_json::json!({ "topicConfigList": topics }).to_string();
    let answer = client.call(UPDATE_AND_CREATE_TOPIC_LIST, &[], body.as_bytes());
    answer.and_then(|answer| answer.success()).expect("created");
}

/// How many of the topics the name server knows.
fn known(broker: &BrokerProcess) -> usize {
    let answer = broker
        .namesrv()
        .call(GET_ALL_TOPIC_LIST_FROM_NAMESERVER, &[], b"")
        .expect("the list of topics");
    let list: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
    let names = list["topicList"].as_array().into_iter().flatten();
    let names = names.filter_map(|name| name.as_str());
    names.filter(|name| name.starts_with("many_")).count()
}

#[test]
fn more_topics_than_one_registration_holds_are_all_resolvable() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("many-topics");
    broker.start();
    create(&mut broker.client());
    eventually("all topics known", LIMIT, || known(&broker) == TOPICS);
    broker.stop();
    broker.start();
    eventually("all topics known again", LIMIT, || known(&broker) == TOPICS);
    broker
        .client()
        .create_topic("many_more", 4)
        .expect("create");
    eventually("one more", Duration::from_secs(10), || {
        known(&broker) == TOPICS + 1
    });
    let route = broker.namesrv().route("many_4321").expect("route");
    assert!(route.is_some_and(|route| route.contains("\"readQueueNums\":4")));
}
