//! Owns what a loop is told as: rows of a table and fields of a file.
//!
//! Invariant: both say the same, and both say first whether the figures may be quoted.

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use crate::error::BenchError;
use crate::figures::{QUANTILES, quantile};
use crate::load::{LoopResult, since_epoch_ns};
use crate::measure::{CODE_CONNECTION, CODE_UNANSWERED, CODE_UNSENT};
use crate::plan::{Pace, Plan};

/// A loop with its merged histograms.
#[derive(Debug)]
pub struct LoopFigures<'a> {
    /// What was counted.
    pub result: &'a LoopResult,
    /// Kinds of times that were recorded.
    pub rows: Vec<(&'static str, Histogram<u64>)>,
}

impl<'a> LoopFigures<'a> {
    /// Merges the connections of a loop.
    pub fn of(result: &'a LoopResult) -> Result<Self, BenchError> {
        let times = result.measures.merged()?;
        let end_to_end = result.measures.end_to_end.clone();
        let rows = [
            ("latency", times.latency),
            ("service", times.service),
            ("lateness", times.lateness),
            ("end-to-end", end_to_end),
        ];
        let rows = rows
            .into_iter()
            .filter(|(_, row)| !row.is_empty())
            .collect();
        Ok(Self { result, rows })
    }

    /// The histogram of a kind.
    pub fn row(&self, kind: &str) -> Option<&Histogram<u64>> {
        let mut rows = self.rows.iter();
        rows.find(|(name, _)| *name == kind).map(|(_, row)| row)
    }

    /// Why this is no headline; empty if it is one.
    pub fn refusals(&self) -> Vec<String> {
        let mut refusals = self.result.generator.refusals();
        if matches!(self.result.pace, Pace::Closed(_)) {
            refusals.push(
                "a closed loop waits for the server and hides its stalls; quote open loops"
                    .to_owned(),
            );
        }
        refusals
    }

    /// The section of the table; `name` tells loops of the same pace apart.
    pub fn section(&self, plan: &Plan, name: &str) -> String {
        let result = self.result;
        let measures = &result.measures;
        let mut out = format!("## {}", capital(&result.pace.label()));
        if name != result.pace.name() {
            out.push_str(&format!(" ({})", name.replace('-', " ")));
        }
        out.push_str("\n\n");
        match self.refusals().as_slice() {
            [] => out.push_str("May be quoted.\n\n"),
            refusals => {
                for refusal in refusals {
                    out.push_str(&format!("**Not a headline:** {refusal}.\n\n"));
                }
            }
        }
        out.push_str(&table_head());
        for (name, row) in &self.rows {
            out.push_str(&table_row(name, row));
        }
        let asked = match result.pace {
            Pace::Open(rate) => format!("asked {rate} msg/s, "),
            Pace::Closed(_) => String::new(),
        };
        let achieved = result.achieved();
        out.push_str(&format!(
            "\n{asked}achieved {achieved:.0} msg/s, {:.1} MB/s of bodies; {} sent, {} \
             acknowledged, {} failed in {} s.\n",
            achieved * plan.body_bytes as f64 / 1e6,
            measures.window_sent,
            measures.window_acked,
            measures.window_failed,
            result.duration_s,
        ));
        for (code, failures) in &measures.failures {
            let (code, count) = (code_name(*code), failures.count);
            out.push_str(&format!(
                "Error {code}: {count}, first: {}\n",
                failures.remark
            ));
        }
        if measures.window_delivered > 0 {
            let delivered = measures.window_delivered as f64 / result.duration_s;
            out.push_str(&format!("Delivered {delivered:.0} msg/s.\n"));
        }
        let (cold, cold_bytes) = measures.window_cold;
        if cold > 0 {
            out.push_str(&format!(
                "Old messages read: {:.0} msg/s, {:.1} MB/s of records.\n",
                cold as f64 / result.duration_s,
                cold_bytes as f64 / 1e6 / result.duration_s,
            ));
        }
        out.push_str(&self.generator_line());
        out
    }

    fn generator_line(&self) -> String {
        let result = self.result;
        let generator = &result.generator;
        let server = result.server_cpu_us.map_or(String::new(), |micros| {
            format!(" Server: {micros:.3} µs of CPU a message.")
        });
        let limit = generator
            .lateness_limit_ns()
            .map_or(String::new(), |limit| {
                format!(
                    ", lateness p99 {:.1} µs of {:.1} µs",
                    generator.lateness_p99_ns as f64 / 1e3,
                    limit / 1e3
                )
            });
        format!(
            "Generator: at work {:.1} % of the time, {:.2} % without a CPU{limit}, {:.3} µs of CPU \
             a message (spinning included).{server}\n\n",
            100.0 * generator.busy_share,
            100.0 * generator.delay_share,
            result.generator_cpu_us,
        )
    }

    /// The fields of the file.
    pub fn value(&self) -> Value {
        let result = self.result;
        let measures = &result.measures;
        let errors: Map<String, Value> = measures
            .failures
            .iter()
            .map(|(code, failures)| {
                let value = json!({ "count": failures.count, "first": failures.remark });
                (code_name(*code), value)
            })
            .collect();
        let rows: Map<String, Value> = self
            .rows
            .iter()
            .map(|(name, row)| ((*name).to_owned(), row_value(row)))
            .collect();
        let asked = match result.pace {
            Pace::Open(rate) => Some(rate),
            Pace::Closed(_) => None,
        };
        json!({
            "loop": result.pace.name(),
            "pace": result.pace,
            "headline": self.refusals().is_empty(),
            "refusals": self.refusals(),
            "started_ns": since_epoch_ns(result.started),
            "warm_up_s": result.warm_up_s,
            "duration_s": result.duration_s,
            "asked_rate": asked,
            "achieved_rate": result.achieved(),
            "window_sent": measures.window_sent,
            "window_acked": measures.window_acked,
            "window_failed": measures.window_failed,
            "errors": errors,
            "delivered_rate": measures.window_delivered as f64 / result.duration_s,
            "cold_rate": measures.window_cold.0 as f64 / result.duration_s,
            "cold_bytes_per_s": measures.window_cold.1 as f64 / result.duration_s,
            "times_ns": rows,
            "generator": result.generator,
            "generator_cpu_us": result.generator_cpu_us,
            "server_cpu_us": result.server_cpu_us,
            "seconds": self.seconds(),
        })
    }

    fn seconds(&self) -> Vec<Value> {
        let seconds = self.result.measures.seconds.iter();
        seconds
            .map(|second| {
                let [latency, ..] = &second.times;
                let latency = latency.histogram().ok();
                json!({
                    "acked": second.acked,
                    "failed": second.failed,
                    "backlog": second.backlog,
                    "delivered": second.delivered,
                    "cold": second.cold,
                    "latency_ns": latency.filter(|row| !row.is_empty()).map(|row| row_value(&row)),
                })
            })
            .collect()
    }
}

/// The table of the phases between marks; empty without marks.
pub fn phase_table(phases: &[(String, Histogram<u64>)]) -> String {
    if phases.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "Latency by phase, by second of the answer:\n\n{}",
        table_head()
    );
    for (name, row) in phases {
        out.push_str(&table_row(name, row));
    }
    out.push('\n');
    out
}

/// The fields of the phases.
pub fn phase_values(phases: &[(String, Histogram<u64>)]) -> Vec<Value> {
    let values = phases
        .iter()
        .map(|(name, row)| json!({ "phase": name, "latency_ns": row_value(row) }));
    values.collect()
}

fn table_head() -> String {
    let mut out = "| µs | min |".to_owned();
    for (name, _) in QUANTILES {
        out.push_str(&format!(" {name} |"));
    }
    out.push_str(" max | samples |\n|---|---|");
    out.push_str(&"---|".repeat(QUANTILES.len() + 2));
    out.push('\n');
    out
}

fn table_row(name: &str, row: &Histogram<u64>) -> String {
    let mut out = format!("| {name} | {} |", micros(row.min()));
    for (_, share) in QUANTILES {
        let value = quantile(row, share).map_or("–".to_owned(), micros);
        out.push_str(&format!(" {value} |"));
    }
    out.push_str(&format!(" {} | {} |\n", micros(row.max()), row.len()));
    out
}

fn row_value(row: &Histogram<u64>) -> Value {
    let mut fields = Map::new();
    fields.insert("count".to_owned(), row.len().into());
    fields.insert("min".to_owned(), row.min().into());
    fields.insert("max".to_owned(), row.max().into());
    for (name, share) in QUANTILES {
        if let Some(value) = quantile(row, share) {
            fields.insert(name.to_owned(), value.into());
        }
    }
    Value::Object(fields)
}

/// Nanoseconds as microseconds, with a decimal where it says something.
pub fn micros(nanoseconds: u64) -> String {
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
        CODE_UNSENT => "unsent".to_owned(),
        code => code.to_string(),
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{histogram, record};

    #[test]
    fn percentiles_without_samples_beyond_them_are_not_told() {
        let mut row = histogram::<u64>().unwrap();
        record(&mut row, 80_000, 2_000);
        let text = table_row("latency", &row);
        assert_eq!(text.matches('–').count(), 3, "{text}");
        let value = row_value(&row);
        assert!(value.get("p99").is_some() && value.get("p99.9").is_none());
    }
}
