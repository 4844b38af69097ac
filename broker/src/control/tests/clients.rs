//! Heartbeats, membership, subscriptions, locks, assignment.

use super::*;
use crate::control::subscriptions::GroupSubscriptions;

fn told(effects: &[Effect]) -> Vec<&GroupSubscriptions> {
    let told = effects.iter().filter_map(|effect| match effect {
        Effect::SubscriptionsChanged(group) => Some(&**group),
        _ => None,
    });
    told.collect()
}

fn notified(harness: &Harness) -> Vec<u64> {
    let code = request::NOTIFY_CONSUMER_IDS_CHANGED;
    let pushes = harness.pushes();
    pushes
        .iter()
        .filter(|(_, push, _)| push.code == code)
        .map(|(to, ..)| *to)
        .collect()
}

#[test]
fn a_heartbeat_makes_group_retry_topic_and_membership_and_hears_what_the_broker_can() {
    let mut harness = Harness::new();
    let reply = harness.beat(1, "c1", "g", "T", "TagA || TagB");
    assert_eq!(reply.code, 0, "{}", reply.remark);
    assert_eq!(reply.field("IS_SUPPORT_HEART_BEAT_V2"), "true");
    assert_eq!(reply.field("IS_SUB_CHANGE"), "true");
    assert!(harness.control.groups.has("g"));
    assert!(harness.control.topics.has("%RETRY%g"));
    let group = told(&harness.effects)[0].clone();
    assert!(group.online && !group.is_broadcast());
    assert_eq!(group.subscriptions.len(), 2);
    let hash = i64::from(wire::message::tags::java_hash("TagB"));
    assert!(group.of(link(1), "T").unwrap().wants_tag(hash));
    assert!(!group.of(link(1), "T").unwrap().wants_tag(1));
    assert_eq!(notified(&harness), [1]);
    harness.beat(1, "c1", "g", "T", "TagA || TagB");
    assert_eq!(
        harness.effects.len(),
        1,
        "a repeated heartbeat changes nothing"
    );
}

#[test]
fn every_member_is_told_when_members_come_and_go() {
    let mut harness = Harness::new();
    harness.beat(1, "c1", "g", "T", "*");
    harness.beat(2, "c2", "g", "T", "*");
    assert_eq!(notified(&harness), [1, 2]);
    let list = harness.ask(
        request::GET_CONSUMER_LIST_BY_GROUP,
        &[("consumerGroup", "g")],
        "",
    );
    assert_eq!(list.text(), r#"{"consumerIdList":["c1","c2"]}"#);
    let leave = [
        ("clientID", "c2"),
        ("consumerGroup", "g"),
        ("producerGroup", "p_g"),
    ];
    assert_eq!(
        harness
            .send(2, request::UNREGISTER_CLIENT, &leave, "")
            .unwrap()
            .code,
        0
    );
    assert_eq!(notified(&harness), [1]);
    harness.effects.clear();
    let mut effects = Vec::new();
    harness
        .control
        .connection_closed(NOW, link(1), &mut effects);
    let group = told(&effects)[0];
    assert!(!group.online && group.subscriptions.is_empty());
    let list = harness.ask(
        request::GET_CONSUMER_LIST_BY_GROUP,
        &[("consumerGroup", "g")],
        "",
    );
    assert_eq!(list.code, 1);
    assert_eq!(harness.control.counters().registrations, 0);
    assert_eq!(harness.control.counters().connections, 0);
}

#[test]
fn connections_are_shown_with_id_language_version_and_subscriptions() {
    let mut harness = Harness::new();
    harness.beat(1, "c1", "g", "T", "TagA || TagB");
    let code = request::GET_CONSUMER_CONNECTION_LIST;
    let shown = harness.ask(code, &[("consumerGroup", "g")], "").json();
    let connection = &shown["connectionSet"][0];
    assert_eq!(connection["clientId"], "c1");
    assert_eq!(connection["clientAddr"], "127.0.0.1:40001");
    assert_eq!(
        (
            connection["language"].as_str(),
            connection["version"].as_i64()
        ),
        (Some("JAVA"), Some(479))
    );
    assert_eq!(shown["consumeType"], "CONSUME_PASSIVELY");
    assert_eq!(shown["messageModel"], "CLUSTERING");
    assert_eq!(shown["consumeFromWhere"], "CONSUME_FROM_FIRST_OFFSET");
    assert_eq!(shown["subscriptionTable"]["T"]["subString"], "TagA || TagB");
    assert_eq!(
        shown["subscriptionTable"]["T"]["tagsSet"],
        serde_json::json!(["TagA", "TagB"])
    );
    assert!(shown["subscriptionTable"]["%RETRY%g"].is_object());
    assert!(shown.get("subscriptionConflicts").is_none());
    assert_eq!(harness.ask(code, &[("consumerGroup", "x")], "").code, 206);
    let code = request::GET_PRODUCER_CONNECTION_LIST;
    let shown = harness.ask(code, &[("producerGroup", "p_g")], "").json();
    assert_eq!(shown["connectionSet"][0]["clientId"], "c1");
    assert_eq!(harness.ask(code, &[("producerGroup", "x")], "").code, 1);
    let all = harness.ask(request::GET_ALL_PRODUCER_INFO, &[], "").json();
    assert_eq!(all["data"]["p_g"][0]["clientId"], "c1");
}

#[test]
fn members_that_subscribe_differently_are_named_once_and_served_each_by_its_own_filter() {
    let mut harness = Harness::new();
    harness.beat_version(1, "c1", "g", "T", "TagA", 10);
    harness.beat_version(2, "c2", "g", "T", "*", 20);
    assert_eq!(harness.control.counters().conflicts, 1);
    let group = told(&harness.effects)[0].clone();
    let (tag_a, tag_b) = (
        i64::from(wire::message::tags::java_hash("TagA")),
        i64::from(wire::message::tags::java_hash("TagB")),
    );
    assert!(group.of(link(2), "T").unwrap().wants_tag(tag_b));
    assert!(group.of(link(1), "T").unwrap().wants_tag(tag_a));
    assert!(!group.of(link(1), "T").unwrap().wants_tag(tag_b));
    for _ in 0..3 {
        harness.beat_version(1, "c1", "g", "T", "TagA", 10);
        harness.beat_version(2, "c2", "g", "T", "*", 20);
        assert!(told(&harness.effects).is_empty(), "no flapping");
    }
    assert_eq!(harness.control.counters().conflicts, 1, "said once");
    let code = request::GET_CONSUMER_CONNECTION_LIST;
    let shown = harness.ask(code, &[("consumerGroup", "g")], "").json();
    assert_eq!(
        shown["subscriptionConflicts"],
        serde_json::json!([{
            "clientA": "c2", "clientB": "c1",
            "expressionA": "*", "expressionB": "TagA", "topic": "T"
        }])
    );
    harness.beat_version(1, "c1", "g", "T", "*", 30);
    let shown = harness.ask(code, &[("consumerGroup", "g")], "").json();
    assert!(shown.get("subscriptionConflicts").is_none(), "settled");
}

/// A heartbeat with an SQL92 subscription to T.
fn beat_sql(harness: &mut Harness, expression: &str, version: i64) -> Reply {
    let body = format!(
        r#"{{"clientID":"c","consumerDataSet":[{{"groupName":"g",
        "consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING","subscriptionDataSet":[
        {{"topic":"T","subString":"{expression}","subVersion":{version},
          "expressionType":"SQL92"}}]}}]}}"#
    );
    harness.send(1, request::HEART_BEAT, &[], &body).unwrap()
}

#[test]
fn a_wrong_expression_is_refused_with_its_place_but_its_member_counts() {
    let mut harness = Harness::new();
    let reply = beat_sql(&mut harness, "a > AND", 1);
    assert_eq!(reply.code, 23);
    assert!(
        reply.remark.contains("line 1, column 5"),
        "{}",
        reply.remark
    );
    let group = told(&harness.effects)[0].clone();
    let wrong = group.of(link(1), "T").unwrap().wrong.clone().unwrap();
    assert!(group.online && !wrong.had_filter, "{wrong:?}");
    assert_eq!(beat_sql(&mut harness, "a > 1", 2).code, 0);
    let group = told(&harness.effects)[0].clone();
    assert_eq!(group.of(link(1), "T").unwrap().wrong, None);
    for _ in 0..2 {
        assert_eq!(beat_sql(&mut harness, "a >", 3).code, 23);
    }
    let group = harness
        .control
        .clients
        .group("g")
        .unwrap()
        .subscriptions()
        .clone();
    let wrong = group.of(link(1), "T").unwrap().wrong.clone().unwrap();
    assert!(wrong.had_filter, "the group had a right one before");
}

#[test]
fn an_expression_is_checked_before_it_is_used() {
    let mut harness = Harness::new();
    let mut check = |kind: &str, expression: &str| {
        let body = format!(
            r#"{{"clientId":"c","group":"g","subscriptionData":{{"topic":"T",
            "subString":"{expression}","expressionType":"{kind}"}}}}"#
        );
        harness.ask(request::CHECK_CLIENT_CONFIG, &[], &body)
    };
    assert_eq!(check("SQL92", "a between 0 and 3").code, 0);
    assert_eq!(check("TAG", "A || B").code, 0);
    let wrong = check("SQL92", "a between 3 and 0");
    assert_eq!(wrong.code, 23);
    assert!(wrong.remark.contains("column 11"), "{}", wrong.remark);
    assert_eq!(check("XPATH", "//a").code, 23);
    assert_eq!(check("SQL92", "").code, 23);
}

#[test]
fn a_second_version_heartbeat_without_subscriptions_keeps_them() {
    let mut harness = Harness::new();
    harness.beat(1, "c1", "g", "T", "*");
    let body = r#"{"clientID":"c1","heartbeatFingerprint":5,"isWithoutSub":true,"consumerDataSet":[
        {"groupName":"g","consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING",
        "consumeFromWhere":"CONSUME_FROM_FIRST_OFFSET","subscriptionDataSet":[]}]}"#;
    let reply = harness.send(1, request::HEART_BEAT, &[], body).unwrap();
    assert_eq!(reply.field("IS_SUB_CHANGE"), "false");
    assert!(told(&harness.effects).is_empty());
    let reply = harness.send(2, request::HEART_BEAT, &[], body).unwrap();
    assert_eq!(
        reply.field("IS_SUB_CHANGE"),
        "true",
        "an unknown connection must send them all"
    );
}

#[test]
fn broadcasting_members_are_not_told_of_each_other() {
    let mut harness = Harness::new();
    let body = r#"{"clientID":"c1","consumerDataSet":[{"groupName":"g",
        "messageModel":"BROADCASTING","consumeType":"CONSUME_PASSIVELY",
        "subscriptionDataSet":[{"topic":"T","subString":"*"}]}]}"#;
    harness.send(1, request::HEART_BEAT, &[], body).unwrap();
    assert!(told(&harness.effects)[0].is_broadcast());
    assert!(notified(&harness).is_empty());
}

#[test]
fn a_silent_client_is_taken_out_after_two_minutes() {
    let mut harness = Harness::new();
    harness.beat(1, "c1", "g", "T", "*");
    harness.now_ms = NOW + 60_000;
    harness.beat(2, "c2", "g", "T", "*");
    let mut effects = Vec::new();
    harness.control.tick(NOW + 119_000, &mut effects);
    assert!(told(&effects).is_empty());
    harness.control.tick(NOW + 130_000, &mut effects);
    harness.effects = effects;
    assert_eq!(notified(&harness), [2]);
    assert_eq!(harness.control.counters().connections, 1);
}

#[test]
fn one_bad_group_in_a_heartbeat_does_not_keep_the_others_out() {
    let mut harness = Harness::new();
    let body = r#"{"clientID":"c1","consumerDataSet":[{"groupName":"bad group"},{"groupName":"good",
        "subscriptionDataSet":[{"topic":"T","subString":"*"}]}]}"#;
    let reply = harness.send(1, request::HEART_BEAT, &[], body).unwrap();
    assert_eq!(reply.code, 29);
    assert!(reply.remark.contains("bad group"), "{}", reply.remark);
    let list = harness.ask(
        request::GET_CONSUMER_LIST_BY_GROUP,
        &[("consumerGroup", "good")],
        "",
    );
    assert_eq!(list.code, 0);
}

#[test]
fn groups_are_not_created_by_heartbeats_where_that_is_off() {
    let mut config = config();
    config.keys.auto_create_group = false;
    let mut harness = Harness::with(config);
    assert_eq!(harness.beat(1, "c1", "g", "T", "*").code, 0);
    assert!(!harness.control.groups.has("g"));
    assert!(told(&harness.effects).is_empty());
}

#[test]
fn filters_other_than_tags_are_refused_while_they_are_off() {
    let mut config = config();
    config.keys.property_filter = false;
    let mut harness = Harness::with(config);
    let body = |kind: &str| {
        format!(
            r#"{{"clientId":"c","group":"g","subscriptionData":
            {{"topic":"T","subString":"a > 1","expressionType":"{kind}"}}}}"#
        )
    };
    assert_eq!(
        harness
            .ask(request::CHECK_CLIENT_CONFIG, &[], &body("TAG"))
            .code,
        0
    );
    let reply = harness.ask(request::CHECK_CLIENT_CONFIG, &[], &body("SQL92"));
    assert_eq!(reply.code, 1);
    assert!(reply.remark.contains("SQL92"), "{}", reply.remark);
}

#[test]
fn a_queue_is_locked_for_one_client_at_a_time() {
    let mut harness = Harness::new();
    let body = |client: &str| {
        format!(
            r#"{{"clientId":"{client}","consumerGroup":"g","mqSet":[
            {{"brokerName":"broker-a","queueId":0,"topic":"T"}}]}}"#
        )
    };
    let granted = r#"{"lockOKMQSet":[{"brokerName":"broker-a","queueId":0,"topic":"T"}]}"#;
    assert_eq!(
        harness.ask(request::LOCK_BATCH_MQ, &[], &body("a")).text(),
        granted
    );
    let refused = harness.ask(request::LOCK_BATCH_MQ, &[], &body("b"));
    assert_eq!(
        (refused.code, refused.text().as_str()),
        (0, r#"{"lockOKMQSet":[]}"#)
    );
    assert_eq!(
        harness.ask(request::UNLOCK_BATCH_MQ, &[], &body("a")).code,
        0
    );
    assert_eq!(
        harness.ask(request::LOCK_BATCH_MQ, &[], &body("b")).text(),
        granted
    );
}

#[test]
fn queues_are_divided_by_the_broker_where_clients_ask_for_it() {
    let mut harness = Harness::new();
    harness.create_topic("T", 4);
    harness.beat(1, "c1", "g", "T", "*");
    harness.beat(2, "c2", "g", "T", "*");
    let mut ask = |client: &str, topic: &str| {
        let body = format!(
            r#"{{"topic":"{topic}","consumerGroup":"g","clientId":"{client}",
            "strategyName":"AVG","messageModel":"CLUSTERING"}}"#
        );
        harness.ask(request::QUERY_ASSIGNMENT, &[], &body).json()
    };
    let first = ask("c1", "T");
    let assignments = first["messageQueueAssignments"].as_array().unwrap();
    let ids: Vec<i64> = assignments
        .iter()
        .map(|a| a["messageQueue"]["queueId"].as_i64().unwrap())
        .collect();
    assert_eq!(ids, [0, 1]);
    assert_eq!(assignments[0]["mode"], "PULL");
    let second = ask("c2", "T");
    assert_eq!(
        second["messageQueueAssignments"][0]["messageQueue"]["queueId"],
        2
    );
    assert!(ask("c1", "nosuch").get("messageQueueAssignments").is_none());
}
