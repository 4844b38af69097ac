//! Topics, groups, placement and settings.

use super::*;
use crate::control::creation::CREATIONS_MAX;
use crate::control::effects::PlacedTopic;

fn names(effects: &[Effect]) -> Vec<&'static str> {
    let name = |effect: &Effect| match effect {
        Effect::Reply { .. } => "reply",
        Effect::Push { .. } => "push",
        Effect::Save { name, .. } => name,
        Effect::SaveLater(_) => "later",
        Effect::TopicChanged(_) => "topic changed",
        Effect::TopicRemoved(_) => "topic removed",
        Effect::GroupChanged(_) => "group changed",
        Effect::GroupRemoved { .. } => "group removed",
        Effect::Register { .. } => "register",
        Effect::Redispatch { .. } => "redispatch",
        Effect::PulledChanged { pulled: true, .. } => "pulls",
        Effect::PulledChanged { .. } => "pops",
        _ => "other",
    };
    effects.iter().map(name).collect()
}

fn changed(effects: &[Effect]) -> Vec<&PlacedTopic> {
    let topics = effects.iter().filter_map(|effect| match effect {
        Effect::TopicChanged(topic) => Some(&**topic),
        _ => None,
    });
    topics.collect()
}

#[test]
fn a_start_announces_every_topic_and_group_after_saving_them() {
    let (control, effects) = Control::new(setup(config(), SavedTables::default())).unwrap();
    let told: Vec<&str> = changed(&effects)
        .iter()
        .map(|topic| topic.config.topic_name.as_str())
        .collect();
    for topic in [
        "TBW102",
        "SELF_TEST_TOPIC",
        "BenchmarkTest",
        "cluster-x",
        "broker-a",
        "OFFSET_MOVED_EVENT",
        "SCHEDULE_TOPIC_XXXX",
        "cluster-x_REPLY_TOPIC",
        "rmq_sys_REVIVE_LOG_cluster-x",
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "rmq_sys_wheel_timer",
    ] {
        assert!(told.contains(&topic), "{topic} in {told:?}");
    }
    assert_eq!(told.len(), control.counters().topics);
    let names = names(&effects);
    assert_eq!(
        &names[..3],
        ["placement.json", "topics.json", "subscriptionGroup.json"]
    );
    assert_eq!(
        names
            .iter()
            .filter(|name| **name == "group changed")
            .count(),
        8
    );
}

#[test]
fn a_topic_is_saved_then_told_then_registered_then_answered() {
    let mut harness = Harness::new();
    harness.create_topic("T", 6);
    assert_eq!(
        names(&harness.effects),
        [
            "placement.json",
            "topics.json",
            "topic changed",
            "register",
            "reply"
        ]
    );
    let topic = changed(&harness.effects)[0].clone();
    assert_eq!(topic.shards.len(), 6);
    let mut per_shard = [0; 4];
    topic
        .shards
        .iter()
        .for_each(|shard| per_shard[usize::from(*shard)] += 1);
    assert!(
        per_shard.iter().all(|queues| (1..=2).contains(queues)),
        "{per_shard:?}"
    );
    harness.create_topic("T", 6);
    assert_eq!(
        names(&harness.effects),
        ["reply"],
        "nothing new, nothing done"
    );
    harness.create_topic("T", 8);
    assert_eq!(changed(&harness.effects)[0].shards[..6], topic.shards[..]);
}

#[test]
fn a_restart_finds_topics_groups_and_places_as_they_were() {
    let mut harness = Harness::new();
    harness.create_topic("T", 5);
    let save = |effects: &[Effect], wanted: &str| {
        let found = effects.iter().find_map(|effect| match effect {
            Effect::Save { name, bytes } if *name == wanted => Some(bytes.clone()),
            _ => None,
        });
        found.unwrap()
    };
    let topics = save(&harness.effects, "topics.json");
    let placement = save(&harness.effects, "placement.json");
    let shards = changed(&harness.effects)[0].shards.clone();
    harness.create_group("g");
    let groups = save(&harness.effects, "subscriptionGroup.json");
    let saved = SavedTables {
        topics: Some(topics),
        groups: Some(groups),
        placement: Some(placement),
        modes: None,
    };
    let (control, effects) = Control::new(setup(config(), saved)).unwrap();
    let topic = changed(&effects)
        .into_iter()
        .find(|topic| topic.config.topic_name == "T");
    assert_eq!(topic.unwrap().shards, shards);
    assert!(control.groups.has("g"));
}

#[test]
fn a_topic_config_and_the_table_of_all_topics_are_answered() {
    let mut harness = Harness::new();
    harness.create_topic("T", 4);
    let one = harness.ask(request::GET_TOPIC_CONFIG, &[("topic", "T")], "");
    assert_eq!(
        one.text(),
        "{\"attributes\":{},\"order\":false,\"perm\":6,\"readQueueNums\":4,\
         \"topicFilterType\":\"SINGLE_TAG\",\"topicName\":\"T\",\"topicSysFlag\":0,\
         \"writeQueueNums\":4}"
    );
    let all = harness.ask(request::GET_ALL_TOPIC_CONFIG, &[], "");
    assert_eq!(all.json()["topicConfigTable"]["T"]["writeQueueNums"], 4);
    assert!(all.json()["dataVersion"]["counter"].as_i64().unwrap() > 0);
    assert_eq!(
        all.field("totalTopicNum"),
        harness.control.counters().topics.to_string()
    );
    let page = [("topicSeq", "2"), ("maxTopicNum", "3")];
    let page = harness.ask(request::GET_ALL_TOPIC_CONFIG, &page, "");
    assert_eq!(
        page.json()["topicConfigTable"].as_object().unwrap().len(),
        3
    );
    let none = harness.ask(request::GET_TOPIC_CONFIG, &[("topic", "nosuch")], "");
    assert_eq!(none.code, 17);
}

#[test]
fn attributes_are_stored_changed_and_refused() {
    let mut harness = Harness::new();
    assert_eq!(harness.update_topic("F", 2, "+message.type=FIFO").code, 0);
    let config = harness.ask(request::GET_TOPIC_CONFIG, &[("topic", "F")], "");
    assert_eq!(config.json()["attributes"]["message.type"], "FIFO");
    assert_eq!(harness.update_topic("F", 2, "+message.type=NORMAL").code, 0);
    let config = harness.ask(request::GET_TOPIC_CONFIG, &[("topic", "F")], "");
    assert_eq!(config.json()["attributes"]["message.type"], "NORMAL");
    assert_ne!(harness.update_topic("B", 1, "+no.such.attribute=x").code, 0);
    assert_eq!(
        harness
            .ask(request::GET_TOPIC_CONFIG, &[("topic", "B")], "")
            .code,
        17
    );
}

#[test]
fn names_and_counts_out_of_bounds_are_refused_by_field_and_limit() {
    let mut harness = Harness::new();
    for (topic, queues, word) in [
        ("", 4, "topic"),
        ("with space", 4, "illegal character"),
        ("T", 70_000, "65535"),
        ("T", -1, "readQueueNums"),
        ("TBW102", 4, "belongs to the broker"),
        ("rmq_sys_mine", 4, "belongs to the broker"),
        ("cluster-x", 4, "belongs to the broker"),
    ] {
        let reply = harness.update_topic(topic, queues, "");
        assert_eq!(reply.code, 29, "{topic}");
        assert!(reply.remark.contains(word), "{topic}: {}", reply.remark);
        assert_eq!(names(&harness.effects), ["reply"]);
    }
    let body = r#"{"groupName":"a b"}"#;
    let reply = harness.ask(request::UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, &[], body);
    assert!(
        reply.code == 29 && reply.remark.contains("group"),
        "{}",
        reply.remark
    );
}

#[test]
fn a_list_of_topics_is_taken_whole_or_not_at_all() {
    let mut harness = Harness::new();
    let bad = r#"{"topicConfigList":[{"topicName":"A"},{"topicName":"B B"}]}"#;
    assert_eq!(
        harness
            .ask(request::UPDATE_AND_CREATE_TOPIC_LIST, &[], bad)
            .code,
        29
    );
    assert_eq!(
        harness
            .ask(request::GET_TOPIC_CONFIG, &[("topic", "A")], "")
            .code,
        17
    );
    let good = r#"{"topicConfigList":[{"topicName":"A"},{"topicName":"B"}]}"#;
    assert_eq!(
        harness
            .ask(request::UPDATE_AND_CREATE_TOPIC_LIST, &[], good)
            .code,
        0
    );
    assert_eq!(changed(&harness.effects).len(), 2);
    assert_eq!(
        names(&harness.effects)
            .iter()
            .filter(|name| **name == "topics.json")
            .count(),
        1
    );
}

fn removed(harness: &Harness) -> Vec<String> {
    let topics = harness.effects.iter().filter_map(|effect| match effect {
        Effect::TopicRemoved(topic) => Some(topic.to_string()),
        _ => None,
    });
    topics.collect()
}

#[test]
fn shards_are_told_of_a_deletion_again_when_it_is_ordered_again() {
    let mut harness = Harness::new();
    harness.create_topic("T", 1);
    for _ in 0..2 {
        harness.ask(request::DELETE_TOPIC_IN_BROKER, &[("topic", "T")], "");
        assert_eq!(removed(&harness), ["T"]);
    }
}

#[test]
fn a_deleted_topic_takes_its_pop_retry_topics_along() {
    let mut harness = Harness::new();
    harness.create_group("g");
    for topic in ["T", "%RETRY%g_T", "%RETRY%g+T", "%RETRY%g"] {
        harness.create_topic(topic, 1);
    }
    assert_eq!(
        harness
            .ask(request::DELETE_TOPIC_IN_BROKER, &[("topic", "T")], "")
            .code,
        0
    );
    assert_eq!(removed(&harness), ["%RETRY%g_T", "%RETRY%g+T", "T"]);
    assert_eq!(
        harness
            .ask(request::GET_TOPIC_CONFIG, &[("topic", "T")], "")
            .code,
        17
    );
    assert_eq!(
        harness
            .ask(request::GET_TOPIC_CONFIG, &[("topic", "%RETRY%g")], "")
            .code,
        0
    );
    let system = harness.ask(request::DELETE_TOPIC_IN_BROKER, &[("topic", "TBW102")], "");
    assert_eq!(system.code, 29);
    assert_eq!(
        harness
            .ask(request::DELETE_TOPIC_IN_BROKER, &[("topic", " ")], "")
            .code,
        29
    );
}

#[test]
fn a_group_is_created_changed_listed_and_deleted() {
    let mut harness = Harness::new();
    harness.create_group("g");
    let body = r#"{"groupName":"g","consumeEnable":false,"retryMaxTimes":3}"#;
    assert_eq!(
        harness
            .ask(request::UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, &[], body)
            .code,
        0
    );
    assert_eq!(
        names(&harness.effects),
        ["subscriptionGroup.json", "group changed", "reply"]
    );
    let all = harness.ask(request::GET_ALL_SUBSCRIPTIONGROUP_CONFIG, &[], "");
    assert_eq!(
        all.json()["subscriptionGroupTable"]["g"]["retryMaxTimes"],
        3
    );
    assert_eq!(all.field("totalGroupNum"), "9");
    let one = harness.ask(request::GET_SUBSCRIPTIONGROUP_CONFIG, &[("group", "g")], "");
    assert_eq!(one.json()["consumeEnable"], false);
    for field in ["cleanOffset", "removeOffset"] {
        harness.create_group("g");
        let fields = [("groupName", "g"), (field, "true")];
        assert_eq!(
            harness
                .ask(request::DELETE_SUBSCRIPTIONGROUP, &fields, "")
                .code,
            0
        );
        assert!(
            harness
                .effects
                .iter()
                .any(|effect| matches!(effect, Effect::GroupRemoved { offsets: true, .. })),
            "{field}"
        );
    }
    let none = harness.ask(request::GET_SUBSCRIPTIONGROUP_CONFIG, &[("group", "g")], "");
    assert_eq!(none.code, 26);
}

#[test]
fn a_topic_can_be_forbidden_to_a_group_and_allowed_again() {
    let mut harness = Harness::new();
    harness.create_group("g");
    let code = request::UPDATE_AND_GET_GROUP_FORBIDDEN;
    let reply = harness.ask(
        code,
        &[("group", "g"), ("topic", "T"), ("readable", "false")],
        "",
    );
    assert_eq!(
        reply.text(),
        r#"{"group":"g","readable":false,"topic":"T"}"#
    );
    assert!(harness.effects.iter().any(|effect| matches!(
        effect,
        Effect::ForbiddenChanged { topics, .. } if topics["T"] == 4
    )));
    let reply = harness.ask(code, &[("group", "g"), ("topic", "T")], "");
    assert_eq!(reply.json()["readable"], false);
}

fn send_to<'a>(topic: &'a str, queues: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("a", "p"),
        ("b", topic),
        ("c", "TBW102"),
        ("d", queues),
        ("e", "0"),
        ("f", "0"),
        ("g", "1"),
        ("h", "0"),
    ]
}

fn create_by(harness: &mut Harness, code: i32, fields: &[(&str, &str)]) -> Option<Reply> {
    let pending = harness.pending(code, fields);
    harness.effects.clear();
    let mut effects = Vec::new();
    harness
        .control
        .create_topic_for_send(NOW, pending, &mut effects);
    harness.effects = effects;
    harness.reply()
}

#[test]
fn nobody_waits_for_the_save_of_a_group_that_use_makes() {
    let mut harness = Harness::new();
    harness.create_topic("T", 1);
    let fields = [
        ("consumerGroup", "reader"),
        ("topic", "T"),
        ("queueId", "0"),
        ("commitOffset", "1"),
    ];
    let reply = create_by(&mut harness, request::UPDATE_CONSUMER_OFFSET, &fields);
    assert!(reply.is_none(), "{reply:?}");
    let done = ["later", "group changed", "redispatch"];
    assert_eq!(names(&harness.effects), done);
    let file = harness.control.file_text("subscriptionGroup.json").unwrap();
    assert!(String::from_utf8(file).unwrap().contains("\"reader\""));
    harness.create_group("ordered");
    assert_eq!(names(&harness.effects)[0], "subscriptionGroup.json");
}

#[test]
fn a_send_to_an_unknown_topic_creates_it_and_goes_back() {
    let mut harness = Harness::new();
    let reply = create_by(
        &mut harness,
        request::SEND_MESSAGE_V2,
        &send_to("auto", "4"),
    );
    assert!(reply.is_none());
    assert_eq!(
        names(&harness.effects),
        [
            "placement.json",
            "topics.json",
            "topic changed",
            "register",
            "redispatch"
        ]
    );
    let topic = &changed(&harness.effects)[0].config;
    assert_eq!(
        (topic.read_queue_nums, topic.write_queue_nums, topic.perm),
        (4, 4, 6)
    );
    create_by(
        &mut harness,
        request::SEND_MESSAGE_V2,
        &send_to("many", "99"),
    );
    assert_eq!(
        changed(&harness.effects)[0].config.write_queue_nums,
        8,
        "as TBW102 has"
    );
    create_by(
        &mut harness,
        request::SEND_MESSAGE_V2,
        &send_to("auto", "4"),
    );
    assert_eq!(names(&harness.effects), ["redispatch"], "it exists by now");
}

#[test]
fn where_automatic_creation_is_off_a_send_is_answered_17() {
    let mut config = config();
    config.keys.auto_create_topic = false;
    let mut harness = Harness::with(config);
    let reply = create_by(
        &mut harness,
        request::SEND_MESSAGE_V2,
        &send_to("auto", "4"),
    )
    .unwrap();
    assert_eq!(reply.code, 17);
    assert!(
        reply.remark.contains("autoCreateTopicEnable"),
        "{}",
        reply.remark
    );
    assert_eq!(names(&harness.effects), ["reply"]);
    let mut harness = Harness::new();
    for (topic, code) in [("RMQ_SYS_TRANS_HALF_TOPIC", 16), ("a b", 29)] {
        let reply = create_by(&mut harness, request::SEND_MESSAGE_V2, &send_to(topic, "4"));
        assert_eq!(reply.unwrap().code, code);
    }
}

#[test]
fn messages_sent_back_get_their_retry_topic_and_then_their_dead_letter_topic() {
    let mut harness = Harness::new();
    let back = [("offset", "1"), ("group", "g"), ("delayLevel", "0")];
    let reply = create_by(&mut harness, request::CONSUMER_SEND_MSG_BACK, &back);
    assert_eq!(reply.unwrap().code, 26);
    harness.create_group("g");
    create_by(&mut harness, request::CONSUMER_SEND_MSG_BACK, &back);
    assert_eq!(changed(&harness.effects)[0].config.topic_name, "%RETRY%g");
    create_by(&mut harness, request::CONSUMER_SEND_MSG_BACK, &back);
    let dead = &changed(&harness.effects)[0].config;
    assert_eq!(
        (dead.topic_name.as_str(), dead.write_queue_nums, dead.perm),
        ("%DLQ%g", 1, 6)
    );
}

fn pull_fields<'a>(group: &'a str, topic: &'a str) -> [(&'a str, &'a str); 9] {
    [
        ("consumerGroup", group),
        ("topic", topic),
        ("queueId", "0"),
        ("queueOffset", "0"),
        ("maxMsgNums", "1"),
        ("sysFlag", "0"),
        ("commitOffset", "0"),
        ("suspendTimeoutMillis", "0"),
        ("subVersion", "0"),
    ]
}

#[test]
fn an_empty_group_is_refused_like_a_blank_one() {
    let mut harness = Harness::new();
    harness.create_topic("T", 1);
    let commit = |group| {
        [
            ("consumerGroup", group),
            ("topic", "T"),
            ("queueId", "0"),
            ("commitOffset", "1"),
        ]
    };
    for group in ["", " "] {
        let reply = create_by(
            &mut harness,
            request::PULL_MESSAGE,
            &pull_fields(group, "T"),
        );
        assert_eq!(reply.unwrap().code, 29);
        let code = request::UPDATE_CONSUMER_OFFSET;
        let reply = create_by(&mut harness, code, &commit(group));
        assert_eq!(reply.unwrap().code, 29);
    }
}

#[test]
fn a_request_that_lacks_something_again_and_again_is_refused_in_the_end() {
    let mut harness = Harness::new();
    harness.create_topic("T", 1);
    let mut pending = harness.pending(request::PULL_MESSAGE, &pull_fields("g", "T"));
    for round in 1..=CREATIONS_MAX {
        let mut effects = Vec::new();
        harness
            .control
            .create_topic_for_send(NOW, pending, &mut effects);
        let Some(Effect::Redispatch { origin, frame }) = effects.pop() else {
            panic!("not routed again in round {round}");
        };
        assert_eq!(origin.creations, round);
        pending = PendingRequest { origin, frame };
    }
    harness.effects.clear();
    harness
        .control
        .create_topic_for_send(NOW, pending, &mut harness.effects);
    assert_eq!(harness.reply().unwrap().code, 1);
    assert!(!names(&harness.effects).contains(&"redispatch"));
}

#[test]
fn a_pull_creates_its_group_but_never_a_topic() {
    let mut harness = Harness::new();
    let pull = |topic| pull_fields("new", topic);
    let reply = create_by(&mut harness, request::PULL_MESSAGE, &pull("nosuch"));
    assert_eq!(reply.unwrap().code, 17);
    assert!(harness.control.groups.has("new"));
    harness.create_topic("T", 1);
    assert!(create_by(&mut harness, request::PULL_MESSAGE, &pull("T")).is_none());
    assert_eq!(names(&harness.effects), ["redispatch"]);
    let mut config = config();
    config.keys.auto_create_group = false;
    let mut harness = Harness::with(config);
    let reply = create_by(&mut harness, request::PULL_MESSAGE, &pull("nosuch"));
    assert_eq!(reply.unwrap().code, 26);
}

#[test]
fn a_queue_the_log_knows_is_put_where_the_log_has_it_and_saved_at_the_next_tick() {
    let mut harness = Harness::new();
    let mut effects = Vec::new();
    harness.control.topic_recovered("lost", 2, 3, &mut effects);
    harness.control.topic_recovered("lost", 0, 3, &mut effects);
    harness.control.topic_recovered("lost", 0, 3, &mut effects);
    harness.control.topic_recovered("lost", 4, 1, &mut effects);
    let last = changed(&effects).pop().unwrap();
    assert_eq!(
        (last.config.read_queue_nums, last.config.write_queue_nums),
        (5, 5)
    );
    assert_eq!((last.shards[0], last.shards[2], last.shards[4]), (3, 3, 1));
    assert_eq!(names(&effects).len(), 3, "the repetition changed nothing");
    let mut effects = Vec::new();
    harness.control.tick(NOW + 1, &mut effects);
    assert_eq!(names(&effects)[..2], ["placement.json", "topics.json"]);
}

#[test]
fn registration_shows_topics_with_the_brokers_permission() {
    let mut harness = Harness::new();
    harness.create_topic("T", 1);
    let before = harness.control.topics_version();
    let topics = harness.control.registration_topics();
    assert_eq!((topics["T"].perm, topics["TBW102"].perm), (6, 7));
    let reply = harness.ask(request::UPDATE_BROKER_CONFIG, &[], "brokerPermission=4\n");
    assert_eq!(reply.code, 0, "{}", reply.remark);
    assert!(
        harness
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Register { .. }))
    );
    let after = harness.control.topics_version();
    let topics = harness.control.registration_topics();
    assert_eq!((topics["T"].perm, topics["TBW102"].perm), (4, 5));
    assert!(after > before);
}

#[test]
fn settings_are_read_changed_and_refused() {
    let mut harness = Harness::new();
    let read = |harness: &mut Harness| harness.ask(request::GET_BROKER_CONFIG, &[], "").text();
    assert!(read(&mut harness).contains("waitTimeMillsInSendQueue=200\n"));
    let code = request::UPDATE_BROKER_CONFIG;
    assert_eq!(
        harness
            .ask(code, &[], "waitTimeMillsInSendQueue=1234\n")
            .code,
        0
    );
    assert!(harness.effects.iter().any(|effect| matches!(
        effect,
        Effect::ConfigChanged { config, .. } if config.send_wait_max_ms == 1234
    )));
    assert!(read(&mut harness).contains("waitTimeMillsInSendQueue=1234\n"));
    assert_eq!(harness.ask(code, &[], "listenPort=1\n").code, 16);
    let reply = harness.ask(
        code,
        &[],
        "waitTimeMillsInSendQueue=5\nfileReservedTime=x\n",
    );
    assert_eq!(reply.code, 29);
    assert!(
        read(&mut harness).contains("waitTimeMillsInSendQueue=1234\n"),
        "all or nothing"
    );
}

#[test]
fn system_topics_are_listed_and_modes_are_stored() {
    let mut harness = Harness::new();
    let list = harness
        .ask(request::GET_SYSTEM_TOPIC_LIST_FROM_BROKER, &[], "")
        .json();
    assert!(
        list["topicList"]
            .as_array()
            .unwrap()
            .iter()
            .any(|topic| topic == "TBW102")
    );
    harness.create_topic("T", 1);
    harness.create_group("g");
    let body = r#"{"topic":"T","consumerGroup":"g","mode":"POP","popShareQueueNum":0}"#;
    assert_eq!(
        harness
            .ask(request::SET_MESSAGE_REQUEST_MODE, &[], body)
            .code,
        0
    );
    assert_eq!(
        names(&harness.effects),
        ["messageRequestMode.json", "pops", "reply"]
    );
    let all = harness
        .ask(request::GET_ALL_MESSAGE_REQUEST_MODE, &[], "")
        .json();
    assert_eq!(all["messageRequestModeMap"]["T"]["g"]["mode"], "POP");
    for (body, code) in [
        (
            r#"{"topic":"%RETRY%g","consumerGroup":"g","mode":"POP"}"#,
            16,
        ),
        (r#"{"topic":"X","consumerGroup":"g","mode":"POP"}"#, 17),
        (r#"{"topic":"T","consumerGroup":"x","mode":"POP"}"#, 26),
    ] {
        assert_eq!(
            harness
                .ask(request::SET_MESSAGE_REQUEST_MODE, &[], body)
                .code,
            code
        );
    }
}

#[test]
fn unknown_codes_and_features_that_are_off_are_answered() {
    let mut harness = Harness::new();
    for code in [13, 22, 47, 209, 301, 513, 99_999] {
        let reply = harness.ask(code, &[], "");
        assert_eq!(reply.code, 3);
        assert_eq!(reply.remark, format!(" request type {code} not supported"));
    }
    assert_eq!(harness.ask(request::GET_BROKER_HA_STATUS, &[], "").code, 1);
    assert_eq!(harness.ask(request::AUTH_LIST_USER, &[], "").code, 1);
    let mode = |value| [("READ_AHEAD_MODE", value)];
    assert_eq!(
        harness
            .ask(request::SET_COMMITLOG_READ_MODE, &mode("1"), "")
            .code,
        0
    );
    assert_eq!(
        harness
            .ask(request::SET_COMMITLOG_READ_MODE, &mode("7"), "")
            .code,
        29
    );
}

#[test]
fn a_one_way_request_is_done_and_not_answered() {
    let mut harness = Harness::new();
    let mut bytes = Vec::new();
    let ext = [("topic", ExtValue::Str("T"))];
    header::encode_request(&mut bytes, Serialization::Json, 351, 9, true, &ext, &[]);
    assert!(harness.send_frame(1, &bytes).is_none());
    assert!(harness.effects.is_empty());
}
