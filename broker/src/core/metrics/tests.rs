//! What the page says, and that making it costs the cores nothing.

use super::*;
use crate::core::report::{OffsetReport, QueueReport, StoreReport};

fn metrics(labels: &str) -> Metrics {
    let mut config = Config::default();
    for (key, value) in [("brokerName", "b-1"), ("metricsLabel", labels)] {
        config
            .set(key, value, crate::config::Origin::Default)
            .unwrap();
    }
    Metrics::new(&config, Arc::new(Health::default()))
}

fn sample() -> Sample {
    let store = |messages| StoreReport {
        topic_put: vec![("T".into(), messages, messages * 10)],
        group_get: vec![("T".into(), "g".into(), messages, messages * 10)],
        group_passed: vec![("T".into(), "g".into(), 2, messages)],
        earliest_store_timestamp: 400,
        ..StoreReport::default()
    };
    let queue = QueueReport {
        topic: "T".into(),
        queue_id: 0,
        shard: 0,
        min_offset: 0,
        max_offset: 100,
        first_store_timestamp: 0,
        last_store_timestamp: 0,
    };
    let offset = OffsetReport {
        group: "g".into(),
        topic: "T".into(),
        queue_id: 0,
        offset: 60,
        pull_offset: 90,
        last_timestamp: 0,
        ..OffsetReport::default()
    };
    let first = Report {
        stores: vec![store(3)],
        queues: vec![queue],
        offsets: vec![offset],
        ..Report::default()
    };
    let second = Report {
        core: 1,
        stores: vec![store(4)],
        ..Report::default()
    };
    let conflict = Conflict {
        topic: "T".into(),
        client_a: "c1".into(),
        expression_a: "TagA".into(),
        client_b: "c2".into(),
        expression_b: "y = \"x\"".into(),
    };
    let counters = ControlCounters {
        topics: 9,
        ..ControlCounters::default()
    };
    Sample {
        reports: vec![first, second],
        counters,
        conflicts: vec![("g".into(), conflict)],
        permission: 6,
        at_ms: 1_000,
    }
}

#[test]
fn the_page_tells_the_phase_before_any_core_runs() {
    let text = metrics("").text();
    assert!(text.contains("pinion_phase{cluster=\"DefaultCluster\",node_type=\"broker\","));
    assert!(text.contains("phase=\"starting\"} 1\n"), "{text}");
    assert!(!text.contains("rocketmq_topic_number"), "{text}");
}

#[test]
fn every_family_has_one_head_and_every_line_the_common_labels() {
    let metrics = metrics("zone:a,bad name:x,rack:\"7\"");
    metrics.set_cores(2, 3);
    metrics.take_sample(sample());
    let text = metrics.text();
    let common = "{cluster=\"DefaultCluster\",node_type=\"broker\",node_id=\"b-1\",\
                  zone=\"a\",rack=\"\\\"7\\\"\"";
    let mut heads = std::collections::HashSet::new();
    for line in text.lines() {
        match line.strip_prefix("# TYPE ") {
            Some(head) => assert!(heads.insert(head.to_owned()), "{head} twice"),
            None if line.starts_with('#') => {}
            None => {
                let (name, rest) = line.split_at(line.find('{').unwrap());
                assert!(rest.starts_with(common), "{line}");
                let kinds = ["counter", "gauge"];
                assert!(
                    kinds
                        .iter()
                        .any(|kind| heads.contains(&format!("{name} {kind}")))
                );
            }
        }
    }
    assert!(text.contains("core=\"1\",bound=\"mesh\"} 0\n"), "{text}");
    assert!(
        text.contains("shard=\"2\",quantile=\"0.99\"} 0\n"),
        "{text}"
    );
}

#[test]
fn topics_and_groups_are_summed_over_the_cores() {
    let metrics = metrics("");
    metrics.take_sample(sample());
    let text = metrics.text();
    let value = |start: &str, label: &str| {
        let line = text
            .lines()
            .find(|line| line.starts_with(start) && line.contains(label));
        line.and_then(|line| line.rsplit_once(' '))
            .map(|(_, value)| value.to_owned())
    };
    let expect = [
        (
            "rocketmq_messages_in_total{",
            "topic=\"T\",message_type=\"normal\"",
            "7",
        ),
        ("rocketmq_throughput_in_total{", "is_system=\"false\"", "70"),
        (
            "rocketmq_messages_out_total{",
            "topic=\"T\",consumer_group=\"g\"",
            "7",
        ),
        (
            "rocketmq_consumer_lag_messages{",
            "is_retry=\"false\"",
            "40",
        ),
        (
            "rocketmq_consumer_inflight_messages{",
            "consumer_group=\"g\"",
            "30",
        ),
        (
            "rocketmq_consumer_ready_messages{",
            "consumer_group=\"g\"",
            "10",
        ),
        (
            "rocketmq_storage_message_reserve_time{",
            "storage_type=\"local\"",
            "600",
        ),
        ("rocketmq_topic_number{", "node_id", "9"),
        ("rocketmq_broker_permission{", "node_id", "6"),
    ];
    for (start, label, wanted) in expect {
        assert_eq!(
            value(start, label).as_deref(),
            Some(wanted),
            "{start} in {text}"
        );
    }
}

#[test]
fn a_page_in_the_making_costs_a_sample_and_no_wait() {
    let metrics = metrics("");
    let held = metrics.sample.lock().unwrap();
    metrics.take_sample(sample());
    drop(held);
    assert!(!metrics.text().contains("rocketmq_topic_number"));
}

#[test]
fn too_many_names_are_left_out_and_counted() {
    let mut page = Page::new("");
    for number in 0..NAMED_SERIES_MAX + 3 {
        page.named("n", "gauge", "", &format!("topic=\"{number}\""), 1);
    }
    let text = page.finish();
    assert!(text.contains("pinion_metrics_left_out{} 3\n"));
}

#[test]
fn lag_is_asked_for_only_while_somebody_looks() {
    let metrics = metrics("");
    assert!(!metrics.is_looked_at(sys::monotonic_us()));
    let _ = metrics.text();
    assert!(metrics.is_looked_at(sys::monotonic_us()));
    assert!(!metrics.is_looked_at(sys::monotonic_us() + 2 * WANTED_US));
}
