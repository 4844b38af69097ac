//! Owns rates and per-topic statistics, made of samples of the shards' running counters.
//!
//! Invariant: counters are only ever compared with earlier values of themselves, so a rate is never
//! negative and the number of samples kept per key is fixed.

use std::collections::{HashMap, VecDeque};

use crate::core::report::{Report, StoreReport};

/// Time between two samples in milliseconds.
pub const SAMPLE_INTERVAL_MS: i64 = 10_000;
/// Most keys (topics, or topics with groups) that statistics are kept of.
pub const STAT_KEYS_MAX: usize = 100_000;

const HOUR_POINT_MS: i64 = 600_000;
const DAY_POINT_MS: i64 = 3_600_000;
const MINUTE_POINTS: usize = 7;
const HOUR_POINTS: usize = 7;
const DAY_POINTS: usize = 25;
const TOTAL_POINTS: usize = 62;
const MS_PER_DAY: i64 = 86_400_000;

/// Sum, rate and average of one span.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// Increase over the span.
    pub sum: u64,
    /// Increase per second.
    pub tps: f64,
    /// Increase per message.
    pub average: f64,
}

/// The three spans RocketMQ shows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spans {
    /// Last minute.
    pub minute: Span,
    /// Last hour.
    pub hour: Span,
    /// Last day.
    pub day: Span,
}

/// What a statistic counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Messages.
    Messages,
    /// Bytes.
    Bytes,
}

#[derive(Clone, Copy, Debug, Default)]
struct Point {
    at_ms: i64,
    messages: u64,
    bytes: u64,
}

/// Samples of one key.
#[derive(Debug, Default)]
struct Series {
    minute: VecDeque<Point>,
    hour: VecDeque<Point>,
    day: VecDeque<Point>,
    latest: Point,
}

impl Series {
    fn starting_at(at_ms: i64) -> Self {
        let mut series = Self::default();
        series.record(Point {
            at_ms,
            messages: 0,
            bytes: 0,
        });
        series
    }

    fn record(&mut self, point: Point) {
        push_spaced(&mut self.minute, point, SAMPLE_INTERVAL_MS, MINUTE_POINTS);
        push_spaced(&mut self.hour, point, HOUR_POINT_MS, HOUR_POINTS);
        push_spaced(&mut self.day, point, DAY_POINT_MS, DAY_POINTS);
        self.latest = point;
    }

    fn spans(&self, measure: Measure) -> Spans {
        let span = |points: &VecDeque<Point>| span(points.front(), &self.latest, measure);
        Spans {
            minute: span(&self.minute),
            hour: span(&self.hour),
            day: span(&self.day),
        }
    }
}

/// Appends a point unless the last one is nearer than `spacing_ms` (less a tenth).
fn push_spaced(points: &mut VecDeque<Point>, point: Point, spacing_ms: i64, points_max: usize) {
    let is_due = points
        .back()
        .is_none_or(|last| point.at_ms - last.at_ms >= spacing_ms - spacing_ms / 10);
    if !is_due {
        return;
    }
    if points.len() >= points_max {
        points.pop_front();
    }
    points.push_back(point);
}

fn span(first: Option<&Point>, last: &Point, measure: Measure) -> Span {
    let Some(first) = first else {
        return Span::default();
    };
    let messages = last.messages.saturating_sub(first.messages);
    let sum = match measure {
        Measure::Messages => messages,
        Measure::Bytes => last.bytes.saturating_sub(first.bytes),
    };
    let elapsed_ms = last.at_ms - first.at_ms;
    let tps = if elapsed_ms > 0 {
        sum as f64 * 1000.0 / elapsed_ms as f64
    } else {
        0.0
    };
    let average = if messages > 0 {
        sum as f64 / messages as f64
    } else {
        0.0
    };
    Span { sum, tps, average }
}

/// Broker-wide counters at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Messages appended.
    pub put: u64,
    /// Messages handed out.
    pub got: u64,
    /// Pulls that found something.
    pub found: u64,
    /// Pulls that found nothing.
    pub missed: u64,
}

impl Totals {
    /// Adds up the shards of all reports.
    pub fn of(reports: &[Report]) -> Self {
        let mut totals = Self::default();
        for store in stores(reports) {
            totals.put += store.put_messages;
            totals.got += store.get_messages;
            totals.found += store.get_found;
            totals.missed += store.get_missed;
        }
        totals
    }
}

/// All shards of all reports.
pub fn stores(reports: &[Report]) -> impl Iterator<Item = &StoreReport> {
    reports.iter().flat_map(|report| &report.stores)
}

/// Totals at the day's beginnings.
#[derive(Clone, Copy, Debug, Default)]
pub struct DayMarks {
    day: i64,
    /// Totals when the day before began.
    pub yesterday_morning: Totals,
    /// Totals when this day began.
    pub today_morning: Totals,
}

/// All statistics.
#[derive(Debug)]
pub struct Stats {
    totals: VecDeque<(i64, Totals)>,
    topic_put: HashMap<String, Series>,
    group_get: HashMap<String, Series>,
    broker_put: Series,
    broker_get: Series,
    last_sample_ms: i64,
    /// Totals at the beginnings of the last days (UTC).
    pub days: DayMarks,
    /// How often a key was left out because [`STAT_KEYS_MAX`] were kept.
    pub bound_hits: u64,
}

impl Stats {
    /// Statistics of a process that started at `boot_ms`.
    pub fn new(boot_ms: i64) -> Self {
        Self {
            totals: VecDeque::from([(boot_ms, Totals::default())]),
            topic_put: HashMap::new(),
            group_get: HashMap::new(),
            broker_put: Series::starting_at(boot_ms),
            broker_get: Series::starting_at(boot_ms),
            last_sample_ms: boot_ms,
            days: DayMarks {
                day: boot_ms.div_euclid(MS_PER_DAY),
                ..DayMarks::default()
            },
            bound_hits: 0,
        }
    }

    /// Whether the next sample is due.
    pub fn is_due(&self, now_ms: i64) -> bool {
        now_ms - self.last_sample_ms >= SAMPLE_INTERVAL_MS
    }

    /// Takes in a report of every shard.
    pub fn record(&mut self, now_ms: i64, reports: &[Report]) {
        let totals = Totals::of(reports);
        let day = now_ms.div_euclid(MS_PER_DAY);
        if day != self.days.day {
            let yesterday_morning = self.days.today_morning;
            self.days = DayMarks {
                day,
                yesterday_morning,
                today_morning: totals,
            };
        }
        let mut put = HashMap::new();
        let mut got = HashMap::new();
        let (mut put_bytes, mut got_bytes) = (0, 0);
        for store in stores(reports) {
            put_bytes += store.put_bytes;
            got_bytes += store.get_bytes;
            for (topic, messages, bytes) in &store.topic_put {
                add(&mut put, topic.clone(), *messages, *bytes);
            }
            for (topic, group, messages, bytes) in &store.group_get {
                add(&mut got, format!("{topic}@{group}"), *messages, *bytes);
            }
        }
        let before_ms = self.last_sample_ms.min(now_ms);
        self.bound_hits += record_all(&mut self.topic_put, put, now_ms, before_ms);
        self.bound_hits += record_all(&mut self.group_get, got, now_ms, before_ms);
        self.broker_put.record(Point {
            at_ms: now_ms,
            messages: totals.put,
            bytes: put_bytes,
        });
        self.broker_get.record(Point {
            at_ms: now_ms,
            messages: totals.got,
            bytes: got_bytes,
        });
        if self.is_due(now_ms) {
            self.last_sample_ms = now_ms;
            if self.totals.len() >= TOTAL_POINTS {
                self.totals.pop_front();
            }
            self.totals.push_back((now_ms, totals));
        }
    }

    /// Figures by RocketMQ's statistics names; `None` for a name or key nothing is known of.
    pub fn view(&self, name: &str, key: &str) -> Option<Spans> {
        let (series, measure) = match name {
            "TOPIC_PUT_NUMS" => (self.topic_put.get(key)?, Measure::Messages),
            "TOPIC_PUT_SIZE" => (self.topic_put.get(key)?, Measure::Bytes),
            "GROUP_GET_NUMS" => (self.group_get.get(key)?, Measure::Messages),
            "GROUP_GET_SIZE" => (self.group_get.get(key)?, Measure::Bytes),
            "BROKER_PUT_NUMS" => (&self.broker_put, Measure::Messages),
            "BROKER_GET_NUMS" => (&self.broker_get, Measure::Messages),
            _ => return None,
        };
        Some(series.spans(measure))
    }

    /// Messages put to a topic per second in the last minute.
    pub fn topic_put_tps(&self, topic: &str) -> f64 {
        self.view("TOPIC_PUT_NUMS", topic)
            .map_or(0.0, |spans| spans.minute.tps)
    }

    /// Messages a group got of a topic per second in the last minute.
    pub fn group_get_tps(&self, topic: &str, group: &str) -> f64 {
        let key = format!("{topic}@{group}");
        self.view("GROUP_GET_NUMS", &key)
            .map_or(0.0, |spans| spans.minute.tps)
    }

    /// Rates over 10, 60 and 600 seconds in RocketMQ's text form "x y z".
    pub fn rates(&self, now_ms: i64, now: &Totals, of: impl Fn(&Totals) -> u64) -> String {
        let rate = |seconds: i64| {
            let from_ms = now_ms - seconds * 1000;
            let start = self
                .totals
                .iter()
                .rev()
                .find(|(at_ms, _)| *at_ms <= from_ms);
            let Some((at_ms, then)) = start.or_else(|| self.totals.front()) else {
                return 0.0;
            };
            let elapsed_ms = (now_ms - at_ms).max(1);
            of(now).saturating_sub(of(then)) as f64 * 1000.0 / elapsed_ms as f64
        };
        format!("{} {} {}", rate(10), rate(60), rate(600))
    }

    /// Forgets a deleted topic.
    pub fn forget_topic(&mut self, topic: &str) {
        self.topic_put.remove(topic);
        let prefix = format!("{topic}@");
        self.group_get.retain(|key, _| !key.starts_with(&prefix));
    }

    /// Forgets a deleted group.
    pub fn forget_group(&mut self, group: &str) {
        let suffix = format!("@{group}");
        self.group_get.retain(|key, _| !key.ends_with(&suffix));
    }
}

fn add(sums: &mut HashMap<String, (u64, u64)>, key: String, messages: u64, bytes: u64) {
    let sum = sums.entry(key).or_default();
    sum.0 += messages;
    sum.1 += bytes;
}

/// Returns how many keys were left out.
fn record_all(
    all: &mut HashMap<String, Series>,
    sums: HashMap<String, (u64, u64)>,
    now_ms: i64,
    before_ms: i64,
) -> u64 {
    let mut left_out = 0;
    for (key, (messages, bytes)) in sums {
        let point = Point {
            at_ms: now_ms,
            messages,
            bytes,
        };
        if let Some(series) = all.get_mut(&key) {
            series.record(point);
        } else if all.len() < STAT_KEYS_MAX {
            let mut series = Series::starting_at(before_ms);
            series.record(point);
            all.insert(key, series);
        } else {
            left_out += 1;
        }
    }
    left_out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(put: u64, topic_put: u64) -> Vec<Report> {
        let store = StoreReport {
            put_messages: put,
            topic_put: vec![("T".into(), topic_put, topic_put * 100)],
            ..StoreReport::default()
        };
        vec![Report {
            stores: vec![store],
            ..Report::default()
        }]
    }

    #[test]
    fn rates_come_from_the_samples_of_their_span() {
        let mut stats = Stats::new(0);
        for second in (10..=700).step_by(10) {
            stats.record(second * 1000, &report(second as u64 * 5, second as u64));
        }
        let now = Totals {
            put: 700 * 5 + 100,
            ..Totals::default()
        };
        let text = stats.rates(710_000, &now, |totals| totals.put);
        let rates: Vec<f64> = text.split(' ').map(|rate| rate.parse().unwrap()).collect();
        assert_eq!(rates.len(), 3);
        assert!((rates[0] - 10.0).abs() < 0.01, "{text}");
        assert!(rates[1] > 5.0 && rates[1] < 6.0, "{text}");
        assert!(rates[2] > 5.0 && rates[2] < 5.2, "{text}");
    }

    #[test]
    fn a_topic_is_known_after_its_first_message_and_unknown_before() {
        let mut stats = Stats::new(0);
        assert!(stats.view("TOPIC_PUT_NUMS", "T").is_none());
        stats.record(4_000, &report(3, 3));
        let spans = stats.view("TOPIC_PUT_NUMS", "T").unwrap();
        assert_eq!((spans.minute.sum, spans.day.sum), (3, 3));
        let spans = stats.view("TOPIC_PUT_SIZE", "T").unwrap();
        assert_eq!((spans.day.sum, spans.day.average), (300, 100.0));
        stats.forget_topic("T");
        assert!(stats.view("TOPIC_PUT_NUMS", "T").is_none());
    }

    #[test]
    fn the_minute_forgets_what_is_older_and_counters_that_fall_give_no_negative_rate() {
        let mut stats = Stats::new(0);
        stats.record(10_000, &report(600, 600));
        for tick in 2..=20 {
            stats.record(tick * 10_000, &report(600, 600));
        }
        let spans = stats.view("TOPIC_PUT_NUMS", "T").unwrap();
        assert_eq!((spans.minute.sum, spans.hour.sum), (0, 600));
        stats.record(210_000, &report(1, 1));
        assert_eq!(stats.view("TOPIC_PUT_NUMS", "T").unwrap().minute.sum, 0);
    }

    #[test]
    fn the_day_marks_move_at_midnight() {
        let mut stats = Stats::new(MS_PER_DAY - 5_000);
        stats.record(MS_PER_DAY + 5_000, &report(7, 7));
        assert_eq!(stats.days.today_morning.put, 7);
        stats.record(2 * MS_PER_DAY + 5_000, &report(9, 9));
        assert_eq!(stats.days.yesterday_morning.put, 7);
        assert_eq!(stats.days.today_morning.put, 9);
    }
}
