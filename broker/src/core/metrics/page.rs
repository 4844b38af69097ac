//! The page of `/metrics`: families of series in Prometheus' text form.
//!
//! Invariant: a family has one head; every line carries the common labels; what clients can make
//! more of has a bound.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Figure, NAMED_SERIES_MAX, Sample};
use crate::control::names;

/// Series that come from the control task's reports.
pub(super) fn sampled(sample: &Sample, page: &mut Page<'_>) {
    let counters = &sample.counters;
    let broker = [
        (
            "rocketmq_broker_permission",
            "2 write, 4 read, 6 both.",
            u64::from(sample.permission),
        ),
        ("rocketmq_topic_number", "Topics.", counters.topics as u64),
        (
            "rocketmq_consumer_group_number",
            "Consumer groups.",
            counters.groups as u64,
        ),
        (
            "pinion_client_registrations",
            "Registrations of clients.",
            counters.registrations as u64,
        ),
        (
            "pinion_queue_locks",
            "Queues locked by ordered consumers.",
            counters.locks as u64,
        ),
    ];
    for (name, help, value) in broker {
        page.add(name, "gauge", help, "", value);
    }
    let help = "How often a bound was met; the request was refused or the connection closed.";
    let bound = "bound=\"control\"";
    page.add(
        "pinion_bound_hits_total",
        "counter",
        help,
        bound,
        counters.bound_hits,
    );
    reserve_time(sample, page);
    messages_in(sample, page);
    messages_out(sample, page);
    filtered(sample, page);
    conflicts(sample, page);
    delayed(sample, page);
    timers(sample, page);
    lag(sample, page);
}

fn reserve_time(sample: &Sample, page: &mut Page<'_>) {
    let stores = sample.reports.iter().flat_map(|report| &report.stores);
    let oldest = stores
        .map(|store| store.earliest_store_timestamp)
        .filter(|ms| *ms > 0)
        .min();
    let age_ms = oldest.map_or(0, |ms| sample.at_ms.saturating_sub(ms));
    let medium = "storage_type=\"local\",storage_medium=\"disk\"";
    let help = "Age of the oldest message, in milliseconds.";
    let age_ms = u64::try_from(age_ms).unwrap_or(0);
    page.add(
        "rocketmq_storage_message_reserve_time",
        "gauge",
        help,
        medium,
        age_ms,
    );
}

fn messages_in(sample: &Sample, page: &mut Page<'_>) {
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for store in sample.reports.iter().flat_map(|report| &report.stores) {
        for (topic, messages, bytes) in &store.topic_put {
            let sum = sums.entry(topic).or_default();
            sum.0 += messages;
            sum.1 += bytes;
        }
    }
    for (topic, (messages, bytes)) in sums {
        let labels = format!(
            "topic=\"{}\",message_type=\"normal\",is_system=\"{}\"",
            escaped(topic),
            names::is_system_topic(topic)
        );
        let help = "Messages sent to a topic.";
        page.named(
            "rocketmq_messages_in_total",
            "counter",
            help,
            &labels,
            messages,
        );
        let help = "Bytes of bodies sent to a topic.";
        page.named(
            "rocketmq_throughput_in_total",
            "counter",
            help,
            &labels,
            bytes,
        );
    }
}

/// Labels of a consumer group on a topic.
fn group_labels(topic: &str, group: &str) -> String {
    let system = names::is_system_topic(topic) || names::SYSTEM_GROUPS.contains(&group);
    format!(
        "topic=\"{}\",consumer_group=\"{}\",is_system=\"{system}\",is_retry=\"{}\"",
        escaped(topic),
        escaped(group),
        topic.starts_with(names::RETRY_PREFIX)
    )
}

fn messages_out(sample: &Sample, page: &mut Page<'_>) {
    let mut sums: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for store in sample.reports.iter().flat_map(|report| &report.stores) {
        for (topic, group, messages, bytes) in &store.group_get {
            let sum = sums.entry((topic, group)).or_default();
            sum.0 += messages;
            sum.1 += bytes;
        }
    }
    for ((topic, group), (messages, bytes)) in sums {
        let labels = group_labels(topic, group);
        let help = "Messages handed to a group.";
        page.named(
            "rocketmq_messages_out_total",
            "counter",
            help,
            &labels,
            messages,
        );
        let help = "Bytes handed to a group.";
        page.named(
            "rocketmq_throughput_out_total",
            "counter",
            help,
            &labels,
            bytes,
        );
    }
}

/// What filters passed over, and members of a group that filter differently.
fn filtered(sample: &Sample, page: &mut Page<'_>) {
    let mut sums: BTreeMap<(&str, &str, i32), u64> = BTreeMap::new();
    for store in sample.reports.iter().flat_map(|report| &report.stores) {
        for (topic, group, queue_id, messages) in &store.group_passed {
            *sums.entry((topic, group, *queue_id)).or_default() += messages;
        }
    }
    for ((topic, group, queue_id), messages) in sums {
        let labels = format!("{},queue_id=\"{queue_id}\"", group_labels(topic, group));
        let help = "Messages that a group's filter passed over.";
        let name = "pinion_messages_filtered_total";
        page.named(name, "counter", help, &labels, messages);
    }
}

fn conflicts(sample: &Sample, page: &mut Page<'_>) {
    let help = "Members of one group found to subscribe differently.";
    let seen = sample.counters.conflicts;
    let name = "pinion_subscription_conflicts_total";
    page.add(name, "counter", help, "", seen);
    for (group, conflict) in &sample.conflicts {
        let labels = format!(
            "topic=\"{}\",consumer_group=\"{}\",client_a=\"{}\",expression_a=\"{}\",\
             client_b=\"{}\",expression_b=\"{}\"",
            escaped(&conflict.topic),
            escaped(group),
            escaped(&conflict.client_a),
            escaped(&conflict.expression_a),
            escaped(&conflict.client_b),
            escaped(&conflict.expression_b)
        );
        let help = "Two members of a group that subscribe differently now.";
        page.named("pinion_subscription_conflict", "gauge", help, &labels, 1);
    }
}

fn delayed(sample: &Sample, page: &mut Page<'_>) {
    let mut levels: BTreeMap<i32, u64> = BTreeMap::new();
    for store in sample.reports.iter().flat_map(|report| &report.stores) {
        for (level, count) in &store.delayed {
            *levels.entry(*level).or_default() += count;
        }
    }
    for (level, count) in levels {
        let labels = format!("level=\"{level}\"");
        let help = "Delayed messages not yet delivered.";
        page.add("pinion_delayed_messages", "gauge", help, &labels, count);
    }
}

/// Timed messages of all shards together.
fn timers(sample: &Sample, page: &mut Page<'_>) {
    let mut lateness = shard::Lateness::default();
    let (mut pending, mut next_ms, mut held_bytes) = (0, i64::MAX, 0);
    for store in sample.reports.iter().flat_map(|report| &report.stores) {
        pending += store.timers.pending;
        held_bytes += store.timers_held_bytes;
        lateness.merge(&store.timers.lateness);
        if store.timers.next_due_ms > 0 {
            next_ms = next_ms.min(store.timers.next_due_ms);
        }
    }
    let late_ms = sample.at_ms.saturating_sub(next_ms).max(0);
    let gauges = [
        (
            "pinion_timers_pending",
            "Timed messages that wait.",
            pending,
        ),
        (
            "pinion_timers_overdue_ms",
            "How long the next timed message has been due.",
            u64::try_from(late_ms).unwrap_or(0),
        ),
        (
            "pinion_timers_held_bytes",
            "Bytes of timed messages that keep retention from dropping a segment.",
            held_bytes,
        ),
        (
            "pinion_timer_late_max_ms",
            "Latest delivery of a timed message since the start.",
            lateness.max_ms,
        ),
    ];
    for (name, help, value) in gauges {
        page.add(name, "gauge", help, "", value);
    }
    let bounds = shard::LATENESS_BOUNDS_MS.iter().map(ToString::to_string);
    let mut sum = 0;
    for (count, bound) in lateness
        .counts
        .iter()
        .zip(bounds.chain(["+Inf".to_owned()]))
    {
        sum += count;
        let labels = format!("late_ms=\"{bound}\"");
        let help = "Timed messages delivered at most this late.";
        page.add(
            "pinion_timer_deliveries_total",
            "counter",
            help,
            &labels,
            sum,
        );
    }
}

/// How far groups are behind: from the ends of queues and the offsets on them.
fn lag(sample: &Sample, page: &mut Page<'_>) {
    let queues = sample.reports.iter().flat_map(|report| &report.queues);
    let ends: BTreeMap<(&str, i32), i64> = queues
        .map(|queue| ((queue.topic.as_str(), queue.queue_id), queue.max_offset))
        .collect();
    let mut sums: BTreeMap<(&str, &str), (u64, u64, u64)> = BTreeMap::new();
    for offset in sample.reports.iter().flat_map(|report| &report.offsets) {
        let key = (offset.topic.as_str(), offset.queue_id);
        let Some(end) = ends.get(&key).copied() else {
            continue;
        };
        let (consumed, pulled) = (offset.consumed(), offset.handed_out());
        let behind = |from: i64, to: i64| u64::try_from(to.saturating_sub(from)).unwrap_or(0);
        let sum = sums.entry((&offset.topic, &offset.group)).or_default();
        sum.0 += behind(consumed, end);
        // In between may be acknowledged ones, where messages are popped one by one.
        sum.1 += match offset.held_from {
            Some(_) => behind(0, offset.in_flight),
            None => behind(consumed, pulled),
        };
        sum.2 += behind(pulled, end);
    }
    held(sample, page);
    for ((topic, group), (lag, in_flight, ready)) in sums {
        let labels = group_labels(topic, group);
        let series = [
            (
                "rocketmq_consumer_lag_messages",
                "Messages a group has not committed.",
                lag,
            ),
            (
                "rocketmq_consumer_inflight_messages",
                "Messages pulled, not committed.",
                in_flight,
            ),
            (
                "rocketmq_consumer_ready_messages",
                "Messages not pulled yet.",
                ready,
            ),
        ];
        for (name, help, value) in series {
            page.named(name, "gauge", help, &labels, value);
        }
    }
}

/// How long groups have held the oldest message they popped.
fn held(sample: &Sample, page: &mut Page<'_>) {
    let mut oldest: BTreeMap<(&str, &str), i64> = BTreeMap::new();
    let offsets = sample.reports.iter().flat_map(|report| &report.offsets);
    for offset in offsets.filter(|offset| offset.held_since_ms > 0) {
        let since = oldest.entry((&offset.topic, &offset.group));
        let since = since.or_insert(offset.held_since_ms);
        *since = (*since).min(offset.held_since_ms);
    }
    for ((topic, group), since_ms) in oldest {
        let labels = group_labels(topic, group);
        let age_ms = u64::try_from(sample.at_ms.saturating_sub(since_ms)).unwrap_or(0);
        let name = "pinion_pop_oldest_unacked_ms";
        let help = "Time since the oldest unacknowledged message was popped, in milliseconds.";
        page.named(name, "gauge", help, &labels, age_ms);
    }
}

struct Family {
    kind: &'static str,
    help: &'static str,
    lines: String,
}

/// The page while it is made.
pub(super) struct Page<'a> {
    labels: &'a str,
    families: BTreeMap<&'static str, Family>,
    named: usize,
    left_out: u64,
}

impl<'a> Page<'a> {
    pub(super) fn new(labels: &'a str) -> Self {
        Self {
            labels,
            families: BTreeMap::new(),
            named: 0,
            left_out: 0,
        }
    }

    pub(super) fn add(
        &mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
        labels: &str,
        value: u64,
    ) {
        let family = self.families.entry(name).or_insert_with(|| Family {
            kind,
            help: help.trim(),
            lines: String::new(),
        });
        let comma = if labels.is_empty() { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = writeln!(
            family.lines,
            "{name}{{{}{comma}{labels}}} {value}",
            self.labels
        );
    }

    /// Adds a series that clients can make more of.
    pub(super) fn named(
        &mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
        labels: &str,
        value: u64,
    ) {
        if self.named >= NAMED_SERIES_MAX {
            self.left_out += 1;
            return;
        }
        self.named += 1;
        self.add(name, kind, help, labels, value);
    }

    pub(super) fn add_all(&mut self, figures: &[Figure], place: &str) {
        for (metric, kind, help, value) in figures {
            let (name, own) = metric.split_once('{').unwrap_or((metric, ""));
            let own = own.trim_end_matches('}');
            let comma = if own.is_empty() { "" } else { "," };
            self.add(name, kind, help, &format!("{place}{comma}{own}"), *value);
        }
    }

    pub(super) fn finish(mut self) -> String {
        let help = "Series left out because the page would be too long.";
        self.add("pinion_metrics_left_out", "gauge", help, "", self.left_out);
        let mut out = String::new();
        for (name, family) in &self.families {
            let Family { kind, help, lines } = family;
            let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
        }
        out
    }
}

/// A label's value with what would end it made harmless.
pub(super) fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

pub(super) fn is_label_name(name: &str) -> bool {
    let first = name.bytes().next();
    first.is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}
