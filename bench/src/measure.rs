//! Owns what a run counts and the verdict on the generator itself.
//!
//! Invariant: a message belongs to the measured window by the time it was due, so that a stall
//! cannot push messages out of it.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;

use crate::error::BenchError;
use crate::slots::InFlight;

/// Longest time a histogram tells apart.
const LATENCY_NS_MAX: u64 = 120_000_000_000;
/// Most numbers of failed messages kept for the check of a later read.
pub const FAILED_KEPT_MAX: usize = 100_000;
/// Number of errors without an answer: the connection broke.
pub const CODE_CONNECTION: i32 = -1;
/// Number of errors without an answer: none came before the end.
pub const CODE_UNANSWERED: i32 = -2;

/// Lateness above which a send counts as late.
const LATE_NS: u64 = 1_000_000;
/// Share of sends late by the generator's own fault that spoils a run.
const LATE_SHARE_MAX: f64 = 0.01;
/// Share of time without a CPU that spoils a run.
const DELAY_SHARE_MAX: f64 = 0.05;
/// Share of time at work above which the generator may be the limit.
const BUSY_SHARE_MAX: f64 = 0.95;

/// Errors of one code.
#[derive(Clone, Debug, Default)]
pub struct Failures {
    /// How many.
    pub count: u64,
    /// The words of the first one.
    pub remark: String,
}

/// One second of the run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Second {
    /// Acknowledgements that arrived.
    pub acked: u64,
    /// Error answers that arrived.
    pub failed: u64,
    /// The longest latency among them.
    pub latency_max_ns: u64,
}

/// Everything counted.
#[derive(Debug)]
pub struct Measures {
    /// From the time a message was due.
    pub latency: Histogram<u64>,
    /// From the time it was handed to its connection.
    pub service: Histogram<u64>,
    /// How late it was handed over.
    pub lateness: Histogram<u64>,
    /// Errors by code, over the whole run.
    pub failures: BTreeMap<i32, Failures>,
    /// Numbers of the messages that failed, the first [`FAILED_KEPT_MAX`] of them.
    pub failed_sequences: Vec<u64>,
    /// Seconds since the run began, warm-up included.
    pub seconds: Vec<Second>,
    /// Messages sent that were due in the window.
    pub window_sent: u64,
    /// Acknowledgements that arrived in the window.
    pub window_acked: u64,
    /// Of the sends in the window, those late by the generator's own fault.
    pub late_by_generator: u64,
    window_from_ns: u64,
    window_to_ns: u64,
}

impl Measures {
    /// Counts for a window in nanoseconds since the run began.
    pub fn new(window_from_ns: u64, window_to_ns: u64) -> Result<Self, BenchError> {
        let histogram = || {
            Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)
                .map_err(|error| BenchError::Option(format!("histogram: {error}")))
        };
        Ok(Self {
            latency: histogram()?,
            service: histogram()?,
            lateness: histogram()?,
            failures: BTreeMap::new(),
            failed_sequences: Vec::new(),
            seconds: vec![Second::default(); (window_to_ns / 1_000_000_000) as usize + 1],
            window_sent: 0,
            window_acked: 0,
            late_by_generator: 0,
            window_from_ns,
            window_to_ns,
        })
    }

    fn in_window(&self, at_ns: u64) -> bool {
        (self.window_from_ns..self.window_to_ns).contains(&at_ns)
    }

    /// A message was handed over; `held_back` if the server was the reason for its lateness.
    pub fn sent(&mut self, due_ns: u64, sent_ns: u64, held_back: bool) {
        if !self.in_window(due_ns) {
            return;
        }
        let late_ns = sent_ns.saturating_sub(due_ns);
        self.window_sent += 1;
        self.lateness.saturating_record(late_ns);
        self.late_by_generator += u64::from(late_ns > LATE_NS && !held_back);
    }

    /// A message was acknowledged.
    pub fn acked(&mut self, message: &InFlight, now_ns: u64) {
        let latency_ns = now_ns.saturating_sub(message.due_ns);
        if self.in_window(message.due_ns) {
            self.latency.saturating_record(latency_ns);
            self.service
                .saturating_record(now_ns.saturating_sub(message.sent_ns));
        }
        self.window_acked += u64::from(self.in_window(now_ns));
        if let Some(second) = self.second(now_ns) {
            second.acked += 1;
            second.latency_max_ns = second.latency_max_ns.max(latency_ns);
        }
    }

    /// A message failed.
    pub fn failed(&mut self, message: &InFlight, now_ns: u64, code: i32, remark: &str) {
        let failures = self.failures.entry(code).or_default();
        if failures.count == 0 {
            remark.clone_into(&mut failures.remark);
        }
        failures.count += 1;
        if self.failed_sequences.len() < FAILED_KEPT_MAX {
            self.failed_sequences.push(message.sequence);
        }
        if let Some(second) = self.second(now_ns) {
            second.failed += 1;
        }
    }

    fn second(&mut self, now_ns: u64) -> Option<&mut Second> {
        self.seconds.get_mut((now_ns / 1_000_000_000) as usize)
    }

    /// Errors over all codes.
    pub fn failures_total(&self) -> u64 {
        self.failures.values().map(|failures| failures.count).sum()
    }
}

/// How the generator spent the window.
#[derive(Clone, Copy, Debug, Default)]
pub struct Generator {
    /// Share of time at work.
    pub busy_share: f64,
    /// Whether being at work all the time means anything: a schedule keeps the thread spinning.
    pub can_idle: bool,
    /// Share of time it wanted to run and had no CPU.
    pub delay_share: f64,
    /// Share of sends late by its own fault.
    pub late_share: f64,
}

impl Generator {
    /// Why the figures say more about the generator than about the server; empty if they do not.
    pub fn complaints(&self) -> Vec<String> {
        let percent = |share: f64| 100.0 * share;
        let mut complaints = Vec::new();
        if self.late_share > LATE_SHARE_MAX {
            complaints.push(format!(
                "{:.2} % of the sends were over 1 ms late although the server held nothing back",
                percent(self.late_share)
            ));
        }
        if self.delay_share > DELAY_SHARE_MAX {
            complaints.push(format!(
                "the generator waited for a CPU {:.1} % of the time; give it one of its own",
                percent(self.delay_share)
            ));
        }
        if self.can_idle && self.busy_share > BUSY_SHARE_MAX {
            complaints.push(format!(
                "the generator was at work {:.1} % of the time and may be the limit",
                percent(self.busy_share)
            ));
        }
        complaints
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(due_ns: u64, sent_ns: u64) -> InFlight {
        InFlight {
            due_ns,
            sent_ns,
            ..InFlight::default()
        }
    }

    #[test]
    fn latency_counts_from_the_due_time_and_service_from_the_send() {
        let mut measures = Measures::new(0, 10_000_000_000).unwrap();
        measures.acked(&message(1_000_000, 5_000_000), 6_000_000);
        assert!(measures.latency.max() >= 5_000_000);
        assert!(measures.service.max() < 1_100_000);
    }

    #[test]
    fn a_message_due_in_the_window_counts_however_late_its_answer_is() {
        let mut measures = Measures::new(1_000, 2_000).unwrap();
        measures.acked(&message(999, 999), 1_500);
        assert_eq!((measures.latency.len(), measures.window_acked), (0, 1));
        measures.acked(&message(1_999, 1_999), 9_000_000);
        assert_eq!((measures.latency.len(), measures.window_acked), (1, 1));
    }

    #[test]
    fn lateness_is_the_generators_fault_only_when_nothing_held_it_back() {
        let mut measures = Measures::new(0, 10_000_000_000).unwrap();
        measures.sent(0, 5_000_000, true);
        measures.sent(0, 5_000_000, false);
        measures.sent(0, 500_000, false);
        assert_eq!((measures.window_sent, measures.late_by_generator), (3, 1));
        let late = Generator {
            late_share: 0.02,
            ..Generator::default()
        };
        assert_eq!(late.complaints().len(), 1);
        assert!(Generator::default().complaints().is_empty());
    }
}
