//! Owns what a loop counts while it runs.
//!
//! Invariant: a message belongs to the measured window by the time it was due, so that a stall
//! cannot push messages out of it; every second of the loop, warm-up included, has its own counts.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;

use crate::error::BenchError;
use crate::figures::{Sparse, Times, histogram, merge, record};
use crate::plan::Mark;
use crate::slots::InFlight;

/// Number of errors without an answer: the connection broke.
pub const CODE_CONNECTION: i32 = -1;
/// Number of errors without an answer: none came before the end.
pub const CODE_UNANSWERED: i32 = -2;
/// Number of errors without an answer: the message was due and never sent.
pub const CODE_UNSENT: i32 = -3;
const SECOND_NS: u64 = 1_000_000_000;

/// Errors of one code.
#[derive(Clone, Debug, Default)]
pub struct Failures {
    /// How many.
    pub count: u64,
    /// The words of the first one.
    pub remark: String,
}

/// One second of the loop.
#[derive(Clone, Debug, Default)]
pub struct Second {
    /// Messages whose acknowledgement arrived.
    pub acked: u64,
    /// Messages whose error answer arrived.
    pub failed: u64,
    /// Messages due and not answered at its end.
    pub backlog: u64,
    /// Messages read from the tail.
    pub delivered: u64,
    /// Old messages read.
    pub cold: u64,
    /// Times of the answers that arrived, in the order of [`Times::named`].
    pub times: [Sparse; 3],
    /// Times from born to delivered.
    pub end_to_end: Sparse,
}

/// Everything counted.
#[derive(Debug)]
pub struct Measures {
    links: Vec<Times<u32>>,
    second: Times<u64>,
    second_end_to_end: Histogram<u64>,
    now: Second,
    /// How late messages were by the generator's own fault.
    pub own_lateness: Histogram<u64>,
    /// From born to delivered.
    pub end_to_end: Histogram<u64>,
    /// Errors by code, over the whole loop.
    pub failures: BTreeMap<i32, Failures>,
    /// Seconds since the loop began, warm-up included.
    pub seconds: Vec<Second>,
    /// Messages sent, warm-up included.
    pub sent: u64,
    /// Messages answered, well or badly.
    pub answered: u64,
    /// Messages sent that were due in the window.
    pub window_sent: u64,
    /// Acknowledgements that arrived in the window.
    pub window_acked: u64,
    /// Errors that arrived in the window.
    pub window_failed: u64,
    /// Messages read from the tail in the window.
    pub window_delivered: u64,
    /// Old messages read in the window, and the bytes of their records.
    pub window_cold: (u64, u64),
    window_from_ns: u64,
    window_to_ns: u64,
}

impl Measures {
    /// Counts for a window in nanoseconds since the loop began.
    pub fn new(links: usize, window_from_ns: u64, window_to_ns: u64) -> Result<Self, BenchError> {
        Ok(Self {
            links: (0..links).map(|_| Times::new()).collect::<Result<_, _>>()?,
            second: Times::new()?,
            second_end_to_end: histogram()?,
            now: Second::default(),
            own_lateness: histogram()?,
            end_to_end: histogram()?,
            failures: BTreeMap::new(),
            seconds: Vec::new(),
            sent: 0,
            answered: 0,
            window_sent: 0,
            window_acked: 0,
            window_failed: 0,
            window_delivered: 0,
            window_cold: (0, 0),
            window_from_ns,
            window_to_ns,
        })
    }

    fn in_window(&self, at_ns: u64) -> bool {
        (self.window_from_ns..self.window_to_ns).contains(&at_ns)
    }

    /// A message was written; `held_back` if the server was the reason for its lateness.
    pub fn sent(&mut self, message: &InFlight, held_back: bool) {
        let late_ns = message.sent_ns.saturating_sub(message.due_ns);
        let count = u64::from(message.count);
        self.sent += count;
        record(&mut self.second.lateness, late_ns, count);
        if !self.in_window(message.due_ns) {
            return;
        }
        self.window_sent += count;
        if let Some(times) = self.links.get_mut(message.link) {
            record(&mut times.lateness, late_ns, message.count);
        }
        if !held_back {
            record(&mut self.own_lateness, late_ns, count);
        }
    }

    /// A message was acknowledged.
    pub fn acked(&mut self, message: &InFlight, now_ns: u64) {
        let count = u64::from(message.count);
        let latency_ns = now_ns.saturating_sub(message.due_ns);
        let service_ns = now_ns.saturating_sub(message.sent_ns);
        self.answered += count;
        self.now.acked += count;
        record(&mut self.second.latency, latency_ns, count);
        record(&mut self.second.service, service_ns, count);
        if self.in_window(message.due_ns)
            && let Some(times) = self.links.get_mut(message.link)
        {
            record(&mut times.latency, latency_ns, message.count);
            record(&mut times.service, service_ns, message.count);
        }
        if self.in_window(now_ns) {
            self.window_acked += count;
        }
    }

    /// A message failed.
    pub fn failed(&mut self, message: &InFlight, now_ns: u64, code: i32, remark: &str) {
        let count = u64::from(message.count);
        let failures = self.failures.entry(code).or_default();
        if failures.count == 0 {
            remark.clone_into(&mut failures.remark);
        }
        failures.count += count;
        self.answered += count;
        self.now.failed += count;
        if self.in_window(now_ns) {
            self.window_failed += count;
        }
    }

    /// A one-way message was written, and that is all there is to know.
    pub fn answered_by_nobody(&mut self, message: &InFlight) {
        let count = u64::from(message.count);
        self.answered += count;
        self.now.acked += count;
        if self.in_window(message.sent_ns) {
            self.window_acked += count;
        }
    }

    /// A message was delivered to a reader of the tail.
    pub fn delivered(&mut self, now_ns: u64, age_ns: u64) {
        self.now.delivered += 1;
        record(&mut self.second_end_to_end, age_ns, 1);
        if self.in_window(now_ns) {
            self.window_delivered += 1;
            record(&mut self.end_to_end, age_ns, 1);
        }
    }

    /// An old message was read.
    pub fn cold_read(&mut self, now_ns: u64, bytes: usize) {
        self.now.cold += 1;
        if self.in_window(now_ns) {
            self.window_cold.0 += 1;
            self.window_cold.1 += bytes as u64;
        }
    }

    /// Closes the seconds that are over; `due` is what the schedule asked for so far.
    pub fn tick(&mut self, now_ns: u64, due: u64) {
        while now_ns >= (self.seconds.len() as u64 + 1) * SECOND_NS {
            let mut second = std::mem::take(&mut self.now);
            second.backlog = due.saturating_sub(self.answered);
            second.times = self.second.named().map(|(_, times)| Sparse::of(times));
            second.end_to_end = Sparse::of(&self.second_end_to_end);
            self.second.clear();
            self.second_end_to_end.reset();
            self.seconds.push(second);
        }
    }

    /// Closes the last second, however short, if anything came in it.
    pub fn close(&mut self, now_ns: u64, due: u64) {
        self.tick(now_ns, due);
        if self.now.acked + self.now.failed > 0 {
            self.tick((self.seconds.len() as u64 + 1) * SECOND_NS, due);
        }
    }

    /// The times of the window, over all connections.
    pub fn merged(&self) -> Result<Times<u64>, BenchError> {
        let mut whole = Times::new()?;
        for link in &self.links {
            whole.merge(link);
        }
        Ok(whole)
    }

    /// Errors over all codes.
    pub fn failures_total(&self) -> u64 {
        self.failures.values().map(|failures| failures.count).sum()
    }

    /// Latencies between the marks of the loop, by whole seconds of the window: the last word of a
    /// mark holds until the next one.
    pub fn phases(&self, marks: &[Mark]) -> Result<Vec<(String, Histogram<u64>)>, BenchError> {
        let mut sorted: Vec<&Mark> = marks.iter().collect();
        sorted.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        let mut phases: Vec<(String, Histogram<u64>)> = Vec::new();
        for (number, mark) in sorted.iter().enumerate() {
            let next = sorted.get(number + 1);
            let end_s = next.map_or(self.window_to_ns as f64 / 1e9, |next| next.at_s);
            let mut whole = histogram()?;
            for (at, second) in self.seconds.iter().enumerate() {
                let (from_s, to_s) = (at as f64, at as f64 + 1.0);
                let inside = from_s >= mark.at_s && to_s <= end_s;
                let [latency, ..] = &second.times;
                if inside && from_s >= self.window_from_ns as f64 / 1e9 {
                    merge(&mut whole, &latency.histogram()?);
                }
            }
            phases.push((mark.text.clone(), whole));
        }
        Ok(phases)
    }

    /// Backlogs at the ends of the whole seconds of the window.
    pub fn window_backlogs(&self) -> Vec<u64> {
        let ends = self.seconds.iter().enumerate();
        let inside = ends.filter(|(at, _)| {
            let end_ns = (*at as u64 + 1) * SECOND_NS;
            end_ns > self.window_from_ns && end_ns <= self.window_to_ns
        });
        inside.map(|(_, second)| second.backlog).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(link: usize, due_ns: u64, sent_ns: u64) -> InFlight {
        InFlight {
            due_ns,
            sent_ns,
            link,
            count: 1,
            ..InFlight::default()
        }
    }

    #[test]
    fn latency_counts_from_the_due_time_and_service_from_the_write() {
        let mut measures = Measures::new(1, 0, 10 * SECOND_NS).unwrap();
        measures.sent(&message(0, 1_000_000, 5_000_000), false);
        measures.acked(&message(0, 1_000_000, 5_000_000), 6_000_000);
        let times = measures.merged().unwrap();
        assert!(times.latency.equivalent(times.latency.max(), 5_000_000));
        assert!(times.service.equivalent(times.service.max(), 1_000_000));
        assert!(times.lateness.equivalent(times.lateness.max(), 4_000_000));
    }

    #[test]
    fn a_message_due_in_the_window_counts_however_late_its_answer_is() {
        let mut measures = Measures::new(1, 1_000, 2_000).unwrap();
        measures.acked(&message(0, 999, 999), 1_500);
        let counts = |measures: &Measures| {
            let latency = measures.merged().unwrap().latency;
            (latency.len(), measures.window_acked)
        };
        assert_eq!(counts(&measures), (0, 1));
        measures.acked(&message(0, 1_999, 1_999), 9_000_000);
        assert_eq!(counts(&measures), (1, 1));
    }

    #[test]
    fn connections_are_merged_and_a_batch_counts_its_messages() {
        let mut measures = Measures::new(2, 0, SECOND_NS).unwrap();
        let mut batch = message(1, 0, 0);
        batch.count = 16;
        measures.acked(&batch, 50_000_000);
        measures.acked(&message(0, 0, 0), 100_000);
        let latency = measures.merged().unwrap().latency;
        assert_eq!((latency.len(), measures.answered), (17, 17));
        assert!(latency.equivalent(latency.value_at_quantile(0.5), 50_000_000));
    }

    #[test]
    fn lateness_is_the_generators_own_only_when_nothing_held_it_back() {
        let mut measures = Measures::new(1, 0, SECOND_NS).unwrap();
        measures.sent(&message(0, 0, 5_000_000), true);
        measures.sent(&message(0, 0, 500_000), false);
        assert_eq!(measures.own_lateness.len(), 1);
        assert_eq!(measures.merged().unwrap().lateness.len(), 2);
    }

    #[test]
    fn phases_hold_the_whole_seconds_between_two_marks() {
        let mut measures = Measures::new(1, 0, 6 * SECOND_NS).unwrap();
        for second in 0..6 {
            let due_ns = second * SECOND_NS;
            measures.acked(
                &message(0, due_ns, due_ns),
                due_ns + (second + 1) * 1_000_000,
            );
            measures.tick((second + 1) * SECOND_NS, 0);
        }
        let mark = |at_s: f64, text: &str| Mark {
            at_s,
            text: text.to_owned(),
        };
        let phases = measures
            .phases(&[mark(3.5, "late"), mark(1.0, "early")])
            .unwrap();
        let told: Vec<(&str, u64)> = phases
            .iter()
            .map(|(text, row)| (text.as_str(), row.len()))
            .collect();
        // Second 3 belongs to both and so to neither.
        assert_eq!(told, [("early", 2), ("late", 2)]);
        assert!(phases[1].1.equivalent(phases[1].1.max(), 6_000_000));
    }

    #[test]
    fn every_second_has_its_own_counts_and_backlog() {
        let mut measures = Measures::new(1, 0, 3 * SECOND_NS).unwrap();
        measures.acked(&message(0, 0, 0), 1_000_000);
        measures.tick(2 * SECOND_NS + 1, 5);
        measures.acked(&message(0, 0, 0), 2 * SECOND_NS + 2);
        measures.failed(&message(0, 0, 0), 2 * SECOND_NS + 3, 14, "busy");
        measures.tick(3 * SECOND_NS, 8);
        measures.close(3 * SECOND_NS + 1, 8);
        let acked: Vec<u64> = measures.seconds.iter().map(|second| second.acked).collect();
        assert_eq!(acked, [1, 0, 1]);
        assert_eq!(measures.window_backlogs(), [4, 4, 5]);
        assert_eq!(measures.seconds[2].failed, 1);
        assert!(measures.seconds[1].times[0].is_empty());
        let last = measures.seconds[2].times[0].histogram().unwrap();
        assert_eq!(last.len(), 1);
    }
}
