//! Owns what a run leaves behind: the table on the screen and the file.
//!
//! Invariant: both say the same, and both say so when the generator spoiled the run.

use std::fs;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::cli::{HeaderForm, ProduceOptions};
use crate::error::BenchError;
use crate::measure::{CODE_CONNECTION, CODE_UNANSWERED, FAILED_KEPT_MAX, Generator, Measures};
use crate::session::BrokerQueues;

/// Version of the file; raised when a field changes its meaning.
const FORMAT: u32 = 1;
const QUANTILES: [(&str, f64); 5] = [
    ("p50", 0.5),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p99.9", 0.999),
    ("p99.99", 0.9999),
];

/// A finished run.
pub struct Report<'a> {
    /// How it was asked for.
    pub options: &'a ProduceOptions,
    /// Where it went.
    pub brokers: &'a [BrokerQueues],
    /// What was counted.
    pub measures: &'a Measures,
    /// How the generator fared.
    pub generator: Generator,
    /// Its number.
    pub run: u64,
    /// Messages sent, warm-up included.
    pub sent_total: u64,
    /// What it ran on.
    pub environment: Value,
}

impl Report<'_> {
    fn achieved_rate(&self) -> f64 {
        self.measures.window_acked as f64 / self.options.duration_s
    }

    fn rows(&self) -> [(&'static str, &Histogram<u64>); 3] {
        [
            ("latency", &self.measures.latency),
            ("service", &self.measures.service),
            ("lateness", &self.measures.lateness),
        ]
    }

    /// The table.
    pub fn print(&self) {
        let options = self.options;
        let loop_kind = match options.rate {
            Some(rate) => format!("open loop, {rate} msg/s wanted"),
            None => "closed loop".to_owned(),
        };
        println!(
            "produce {} | {loop_kind} | {} connections, {} in flight | {} B bodies | flush {} {}",
            options.topic.topic,
            options.connections,
            options.in_flight,
            options.body_bytes,
            options.flush,
            options.label,
        );
        println!(
            "{:<10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "µs", "min", "p50", "p90", "p99", "p99.9", "p99.99", "max"
        );
        for (name, histogram) in self.rows() {
            print!("{name:<10}{:>10}", micros(histogram.min()));
            for (_, quantile) in QUANTILES {
                print!("{:>10}", micros(histogram.value_at_quantile(quantile)));
            }
            println!("{:>10}", micros(histogram.max()));
        }
        let measures = self.measures;
        println!(
            "achieved {:.0} msg/s, {:.1} MB/s of bodies | sent {} (window {}), acked in window {}",
            self.achieved_rate(),
            self.achieved_rate() * options.body_bytes as f64 / 1e6,
            self.sent_total,
            measures.window_sent,
            measures.window_acked,
        );
        for (code, failures) in &measures.failures {
            println!(
                "error {}: {} x, first: {}",
                code_name(*code),
                failures.count,
                failures.remark
            );
        }
        let generator = self.generator;
        println!(
            "generator: {:.0} % busy, {:.2} % without CPU, {:.3} % of sends late by its own fault",
            100.0 * generator.busy_share,
            100.0 * generator.delay_share,
            100.0 * generator.late_share,
        );
        for complaint in generator.complaints() {
            println!("NOT TRUSTWORTHY: {complaint}");
        }
    }

    /// The file.
    pub fn write(&self) -> Result<(), BenchError> {
        let path = &self.options.out;
        let failed = || format!("write {}", path.display());
        let text = serde_json::to_vec(&self.value())
            .map_err(|error| BenchError::io(failed())(error.into()))?;
        fs::write(path, text).map_err(BenchError::io(failed()))
    }

    fn value(&self) -> Value {
        let measures = self.measures;
        let histograms: serde_json::Map<String, Value> = self
            .rows()
            .into_iter()
            .map(|(name, histogram)| (name.to_owned(), histogram_value(histogram)))
            .collect();
        let errors: serde_json::Map<String, Value> = measures
            .failures
            .iter()
            .map(|(code, failures)| {
                let value = json!({ "count": failures.count, "first": failures.remark });
                (code_name(*code), value)
            })
            .collect();
        let seconds: Vec<Value> = measures
            .seconds
            .iter()
            .map(|second| json!([second.acked, second.failed, second.latency_max_ns]))
            .collect();
        json!({
            "format": FORMAT,
            "command": "produce",
            "run": format!("{:016X}", self.run),
            "options": self.options_value(),
            "brokers": self.brokers.iter().map(|broker| json!({
                "name": broker.name, "address": broker.address, "queues": broker.write_queues,
            })).collect::<Vec<_>>(),
            "environment": self.environment,
            "achieved_rate": self.achieved_rate(),
            "sent_total": self.sent_total,
            "window_sent": measures.window_sent,
            "window_acked": measures.window_acked,
            "errors": errors,
            "failed_sequences": measures.failed_sequences,
            "failed_sequences_complete":
                measures.failures_total() <= FAILED_KEPT_MAX as u64,
            "generator": {
                "busy_share": self.generator.busy_share,
                "delay_share": self.generator.delay_share,
                "late_share": self.generator.late_share,
                "trustworthy": self.generator.complaints().is_empty(),
                "complaints": self.generator.complaints(),
            },
            "histograms_ns": histograms,
            "seconds_acked_failed_latency_max_ns": seconds,
        })
    }

    fn options_value(&self) -> Value {
        let options = self.options;
        json!({
            "namesrv": options.topic.namesrv,
            "topic": options.topic.topic,
            "headers": if options.topic.headers == HeaderForm::Json { "json" } else { "binary" },
            "core": options.topic.core,
            "connections": options.connections,
            "in_flight": options.in_flight,
            "body_bytes": options.body_bytes,
            "duration_s": options.duration_s,
            "warm_up_s": options.warm_up_s,
            "rate": options.rate,
            "flush": options.flush,
            "label": options.label,
        })
    }
}

/// Quantiles for the reader, counts for later comparisons: `[value, count]` without empty ones.
fn histogram_value(histogram: &Histogram<u64>) -> Value {
    let mut value = json!({
        "count": histogram.len(), "min": histogram.min(), "mean": histogram.mean(),
        "max": histogram.max(),
    });
    if let Value::Object(fields) = &mut value {
        for (name, quantile) in QUANTILES {
            fields.insert(
                name.to_owned(),
                histogram.value_at_quantile(quantile).into(),
            );
        }
        let counts: Vec<Value> = histogram
            .iter_recorded()
            .map(|entry| json!([entry.value_iterated_to(), entry.count_at_value()]))
            .collect();
        fields.insert("counts".to_owned(), counts.into());
    }
    value
}

fn micros(nanoseconds: u64) -> String {
    let micros = nanoseconds as f64 / 1e3;
    if micros < 1_000.0 {
        format!("{micros:.1}")
    } else {
        format!("{micros:.0}")
    }
}

fn code_name(code: i32) -> String {
    match code {
        CODE_CONNECTION => "connection".to_owned(),
        CODE_UNANSWERED => "unanswered".to_owned(),
        code => code.to_string(),
    }
}
