//! Statistics, lag, resets: what needs reports of the shards.

use super::*;

#[test]
fn topic_stats_have_every_queue_with_object_keys() {
    let mut harness = Harness::new();
    harness.create_topic("T", 2);
    let reports = report(vec![queue_report("T", 0, 3)], vec![]);
    let code = request::GET_TOPIC_STATS_INFO;
    let reply = harness.ask_with(code, &[("topic", "T")], reports);
    let text = reply.text();
    assert!(
        text.starts_with(&format!(
            "{{\"offsetTable\":{{{{\"brokerName\":\"broker-a\",\"queueId\":0,\"topic\":\"T\"}}:\
             {{\"lastUpdateTimestamp\":{},\"maxOffset\":3,\"minOffset\":0}},\
             {{\"brokerName\":\"broker-a\",\"queueId\":1,\"topic\":\"T\"}}:\
             {{\"lastUpdateTimestamp\":0,\"maxOffset\":0,\"minOffset\":0}}}}",
            NOW - 10
        )),
        "{text}"
    );
    assert_eq!(harness.ask(code, &[("topic", "nosuch")], "").code, 17);
}

#[test]
fn lag_is_shown_by_queue_and_never_negative() {
    let mut harness = Harness::new();
    harness.create_topic("T", 3);
    let reports = report(
        vec![
            queue_report("T", 0, 10),
            queue_report("T", 1, 16),
            queue_report("T", 2, 5),
        ],
        vec![
            offset_report("g", "T", 0, 10),
            offset_report("g", "T", 1, 10),
            offset_report("g", "T", 2, 10_000),
        ],
    );
    for fields in [
        vec![("consumerGroup", "g"), ("topic", "T")],
        vec![("consumerGroup", "g")],
    ] {
        let reply = harness.ask_with(request::GET_CONSUME_STATS, &fields, reports.clone());
        let stats: wire::body::ConsumeStats = wire::body::from_json(&reply.body).unwrap();
        let lag: Vec<i64> = stats
            .offset_table
            .0
            .values()
            .map(|wrapper| wrapper.broker_offset - wrapper.consumer_offset)
            .collect();
        assert_eq!(lag, [0, 6, 0]);
    }
    let unknown = [("consumerGroup", "nosuch")];
    let reply = harness.ask_with(request::GET_CONSUME_STATS, &unknown, report(vec![], vec![]));
    assert_eq!(reply.text(), r#"{"consumeTps":0.0,"offsetTable":{}}"#);
}

#[test]
fn the_lag_of_all_groups_is_summed_up() {
    let mut harness = Harness::new();
    harness.create_topic("T", 1);
    harness.create_group("g");
    let reports = report(
        vec![queue_report("T", 0, 10)],
        vec![offset_report("g", "T", 0, 4)],
    );
    let fields = [("isOrder", "false")];
    let reply = harness.ask_with(request::GET_BROKER_CONSUME_STATS, &fields, reports);
    let list: wire::body::ConsumeStatsList = wire::body::from_json(&reply.body).unwrap();
    assert_eq!(list.total_diff, 6);
    assert_eq!(list.broker_addr.as_deref(), Some("10.0.0.1:10911"));
    assert!(
        list.consume_stats_list
            .iter()
            .any(|groups| groups.contains_key("g"))
    );
}

#[test]
fn who_reads_a_topic_is_those_online_and_those_with_offsets() {
    let mut harness = Harness::new();
    harness.beat(2, "c", "online", "T", "*");
    harness.control.note_pull_only(NOW, "puller", "T");
    let reports = || report(vec![], vec![offset_report("stored", "T", 0, 4)]);
    let reply = harness.ask_with(
        request::QUERY_TOPIC_CONSUME_BY_WHO,
        &[("topic", "T")],
        reports(),
    );
    assert_eq!(
        reply.text(),
        r#"{"groupList":["online","puller","stored"]}"#
    );
    let fields = [("group", "stored")];
    let reply = harness.ask_with(request::QUERY_TOPICS_BY_CONSUMER, &fields, reports());
    assert_eq!(reply.json()["topicList"], serde_json::json!(["T"]));
    let fields = [("group", "online"), ("topic", "T")];
    let reply = harness.ask(request::QUERY_SUBSCRIPTION_BY_CONSUMER, &fields, "");
    assert_eq!(reply.json()["subscriptionData"]["topic"], "T");
}

#[test]
fn time_spans_have_every_queue() {
    let mut harness = Harness::new();
    harness.create_topic("T", 2);
    let reports = report(
        vec![queue_report("T", 0, 10), queue_report("T", 1, 0)],
        vec![offset_report("g", "T", 0, 4)],
    );
    let fields = [("topic", "T"), ("group", "g")];
    let reply = harness
        .ask_with(request::QUERY_CONSUME_TIME_SPAN, &fields, reports)
        .json();
    let spans = reply["consumeTimeSpanSet"].as_array().unwrap();
    assert_eq!(spans.len(), 2);
    assert_eq!(spans[0]["minTimeStamp"], NOW - 5_000);
    assert_eq!(spans[0]["consumeTimeStamp"], NOW - 1_000);
    assert_eq!(spans[0]["delayTime"], 1_000);
    assert_eq!(spans[1]["delayTime"], 0);
}

fn search(
    harness: &mut Harness,
    fields: &[(&str, &str)],
    found: Vec<(i32, i64, i64, i64)>,
) -> Reply {
    let reply = harness.send(1, request::INVOKE_BROKER_TO_RESET_OFFSET, fields, "");
    if let Some(reply) = reply {
        return reply;
    }
    let request = harness.effects.drain(..).find_map(|effect| match effect {
        Effect::SearchOffsets { request, .. } => Some(*request),
        _ => None,
    });
    let mut effects = Vec::new();
    harness
        .control
        .finish_search(NOW, request.unwrap(), found, &mut effects);
    harness.effects = effects;
    harness.reply().unwrap()
}

#[test]
fn offsets_are_reset_by_time_on_the_server_and_told() {
    let mut harness = Harness::new();
    harness.create_topic("T", 2);
    harness.create_group("g");
    let fields = [
        ("topic", "T"),
        ("group", "g"),
        ("timestamp", "5"),
        ("isForce", "true"),
    ];
    let reply = search(&mut harness, &fields, vec![(0, 4, 0, 10), (1, 0, 0, 0)]);
    assert_eq!(
        reply.text(),
        "{\"offsetTable\":{{\"brokerName\":\"broker-a\",\"queueId\":0,\"topic\":\"T\"}:4,\
         {\"brokerName\":\"broker-a\",\"queueId\":1,\"topic\":\"T\"}:0}}"
    );
    assert!(matches!(&harness.effects[0], Effect::ResetOffsets(sets)
        if sets.len() == 2 && sets[0].offset == Some(4)));
}

#[test]
fn an_offset_outside_the_queue_is_refused() {
    let mut harness = Harness::new();
    harness.create_topic("T", 2);
    harness.create_group("g");
    let with = |offset, queue| {
        [
            ("topic", "T"),
            ("group", "g"),
            ("timestamp", "-1"),
            ("queueId", queue),
            ("offset", offset),
        ]
    };
    let reply = search(&mut harness, &with("12", "0"), vec![(0, 10, 2, 10)]);
    assert_eq!(reply.code, 1);
    assert!(
        reply.remark.contains("12") && reply.remark.contains("10"),
        "{}",
        reply.remark
    );
    let reply = search(&mut harness, &with("1", "0"), vec![(0, 10, 2, 10)]);
    assert_eq!(reply.code, 1);
    assert_eq!(
        search(&mut harness, &with("5", "0"), vec![(0, 10, 2, 10)]).code,
        0
    );
    assert_eq!(search(&mut harness, &with("5", "7"), vec![]).code, 29);
    let unknown = [("topic", "X"), ("group", "g"), ("timestamp", "-1")];
    assert_eq!(search(&mut harness, &unknown, vec![]).code, 17);
    let unknown = [("topic", "T"), ("group", "x"), ("timestamp", "-1")];
    assert_eq!(search(&mut harness, &unknown, vec![]).code, 26);
}

#[test]
fn the_old_way_of_a_reset_goes_over_the_clients() {
    let mut harness = Harness::new();
    harness.control.reset_by_client = true;
    harness.create_topic("T", 2);
    harness.create_group("g");
    let fields = [
        ("topic", "T"),
        ("group", "g"),
        ("timestamp", "5"),
        ("isForce", "false"),
    ];
    let reset = |harness: &mut Harness| {
        harness.send(1, request::INVOKE_BROKER_TO_RESET_OFFSET, &fields, "");
        let Some(Effect::NeedReports { request, .. }) = harness.effects.pop() else {
            panic!("reports are needed")
        };
        let committed = vec![offset_report("g", "T", 0, 3), offset_report("g", "T", 1, 9)];
        let mut effects = Vec::new();
        harness
            .control
            .finish(NOW, *request, report(vec![], committed), &mut effects);
        let Some(Effect::SearchOffsets { request, .. }) = effects.pop() else {
            panic!("offsets are looked up")
        };
        harness.control.finish_search(
            NOW,
            *request,
            vec![(0, 5, 0, 9), (1, 5, 0, 9)],
            &mut effects,
        );
        harness.effects = effects;
        harness.reply().unwrap()
    };
    assert_eq!(reset(&mut harness).code, 206);
    harness.beat(2, "c", "g", "T", "*");
    let reply = reset(&mut harness);
    let body: wire::body::ResetOffsetBody = wire::body::from_json(&reply.body).unwrap();
    let offsets: Vec<i64> = body.offset_table.0.values().copied().collect();
    assert_eq!(offsets, [3, 5], "not forced: never forward");
    let pushes = harness.pushes();
    assert_eq!(
        (pushes[0].0, pushes[0].1.code),
        (2, request::RESET_CONSUMER_CLIENT_OFFSET)
    );
    assert_eq!(pushes[0].1.body, reply.body);
}

#[test]
fn offsets_are_copied_to_another_group_and_listed() {
    let mut harness = Harness::new();
    harness.create_topic("T", 2);
    let reports = || report(vec![], vec![offset_report("a", "T", 1, 7)]);
    let fields = [
        ("srcGroup", "a"),
        ("destGroup", "b"),
        ("topic", "T"),
        ("offline", "true"),
    ];
    assert_eq!(
        harness
            .ask_with(request::CLONE_GROUP_OFFSET, &fields, reports())
            .code,
        0
    );
    assert!(matches!(&harness.effects[0], Effect::SetOffsets(sets)
        if sets[0].group == "b" && sets[0].queue_id == 1 && sets[0].offset == Some(7)));
    let reply = harness.ask_with(request::GET_ALL_CONSUMER_OFFSET, &[], reports());
    assert_eq!(reply.text(), r#"{"offsetTable":{"T@a":{1:7}}}"#);
    let reply = harness.ask_with(
        request::GET_ALL_CONSUMER_OFFSET,
        &[],
        report(vec![], vec![]),
    );
    assert_eq!(reply.code, 1);
}

/// Keys of code 28 that mqadmin or the dashboard read.
const RUNTIME_KEYS: &str = "\
    brokerVersionDesc brokerVersion brokerActive bootTimestamp runtime \
    startAcceptSendRequestTimeStamp putTps getTotalTps getTransferredTps getFoundTps \
    getMissTps msgPutTotalTodayNow msgGetTotalTodayNow msgPutTotalTodayMorning \
    msgPutTotalYesterdayMorning msgGetTotalTodayMorning msgGetTotalYesterdayMorning \
    sendThreadPoolQueueSize sendThreadPoolQueueCapacity pullThreadPoolQueueSize \
    pullThreadPoolQueueCapacity litePullThreadPoolQueueSize queryThreadPoolQueueSize \
    ackThreadPoolQueueSize EndTransactionQueueSize EndTransactionThreadPoolQueueCapacity \
    dispatchBehindBytes pageCacheLockTimeMills commitLogMinOffset commitLogMaxOffset \
    commitLogDiskRatio consumeQueueDiskRatio earliestMessageTimeStamp \
    putMessageDistributeTime dispatchMaxBuffer sendThreadPoolQueueHeadWaitTimeMills \
    pullThreadPoolQueueHeadWaitTimeMills putMessageSizeTotal putMessageTimesTotal \
    putMessageAverageSize putMessageFailedTimes putMessageEntireTimeMax \
    getMessageEntireTimeMax putLatency99 putLatency999 remainHowManyDataToFlush \
    remainHowManyDataToCommit remainTransientStoreBufferNumbs commitLogDirCapacity \
    timerReadBehind timerOffsetBehind timerCongestNum timerEnqueueTps timerDequeueTps";

#[test]
fn runtime_info_has_every_key_the_tools_read() {
    let mut harness = Harness::new();
    let store = StoreReport {
        put_messages: 50,
        put_bytes: 5_000,
        log_max_offset: 5_000,
        log_dir: "log".into(),
        disk_total_bytes: 1 << 40,
        disk_free_bytes: 3 << 38,
        ..StoreReport::default()
    };
    let reports = vec![Report {
        stores: vec![store],
        ..Report::default()
    }];
    harness.now_ms = NOW + 61_000;
    let reply = harness
        .ask_with(request::GET_BROKER_RUNTIME_INFO, &[], reports)
        .json();
    let table = reply["table"].as_object().unwrap();
    for key in RUNTIME_KEYS.split(' ') {
        assert!(
            table.get(key).is_some_and(Value::is_string),
            "{key} is missing or no text"
        );
    }
    assert_eq!(table["msgPutTotalTodayNow"], "50");
    assert_eq!(table["commitLogMaxOffset"], "5000");
    assert_eq!(table["commitLogDiskRatio"], "0.25");
    assert_eq!(table["commitLogDiskRatio_log"], "0.25");
    assert_eq!(
        table["commitLogDirCapacity"],
        "Total : 1.0 TiB, Free : 768.0 GiB."
    );
    assert_eq!(
        table["runtime"],
        "[ 0 days, 0 hours, 1 minutes, 1 seconds ]"
    );
    let rates: Vec<f64> = table["putTps"]
        .as_str()
        .unwrap()
        .split(' ')
        .map(|rate| rate.parse().unwrap())
        .collect();
    assert!(
        rates.len() == 3 && rates.iter().all(|rate| *rate > 0.0),
        "{rates:?}"
    );
}

#[test]
fn statistics_of_a_topic_are_there_with_its_first_message() {
    let mut harness = Harness::new();
    let fields = [("statsName", "TOPIC_PUT_NUMS"), ("statsKey", "T")];
    let code = request::VIEW_BROKER_STATS_DATA;
    let reports = |messages| {
        let topic_put = vec![("T".to_owned(), messages, 100)];
        let topic_put = if messages > 0 { topic_put } else { vec![] };
        let store = StoreReport {
            put_messages: messages,
            topic_put,
            ..StoreReport::default()
        };
        vec![Report {
            stores: vec![store],
            ..Report::default()
        }]
    };
    assert_eq!(harness.ask_with(code, &fields, reports(0)).code, 1);
    harness.now_ms = NOW + 1_000;
    let reply = harness.ask_with(code, &fields, reports(50)).json();
    assert_eq!(reply["statsDay"]["sum"], 50);
    assert_eq!(reply["statsMinute"]["sum"], 50);
    let mut effects = Vec::new();
    harness.control.tick(NOW + 11_000, &mut effects);
    assert!(matches!(&effects[0], Effect::Sample(query) if query.store));
}
