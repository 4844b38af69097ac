//! Owns when a failure that repeats itself is said in the log.
//!
//! Invariant: the first failure is said at once, the same again at most once in
//! [`SAY_AGAIN_US`] and with how often it came, and its end once.

/// Time between two lines about a failure that goes on, in microseconds.
pub const SAY_AGAIN_US: u64 = 60_000_000;

/// A failure that may repeat itself.
#[derive(Clone, Copy, Default, Debug)]
pub struct Repeated {
    times: u64,
    said_at_us: u64,
}

impl Repeated {
    /// It failed. How often by now, when that is to be said.
    pub fn failed(&mut self, now_us: u64) -> Option<u64> {
        self.times += 1;
        let is_due = self.times == 1 || now_us >= self.said_at_us + SAY_AGAIN_US;
        if is_due {
            self.said_at_us = now_us;
        }
        is_due.then_some(self.times)
    }

    /// It worked. How often it had failed before, when it had.
    pub fn worked(&mut self) -> Option<u64> {
        let times = std::mem::take(&mut self.times);
        (times > 0).then_some(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_said_at_once_then_once_a_minute_and_its_end_once() {
        let mut failure = Repeated::default();
        let said: Vec<(u64, u64)> = (0..=120)
            .filter_map(|second| Some((second, failure.failed(second * 1_000_000)?)))
            .collect();
        assert_eq!(said, [(0, 1), (60, 61), (120, 121)]);
        assert_eq!(failure.worked(), Some(121));
        assert_eq!(failure.worked(), None);
        assert_eq!(
            failure.failed(121_000_000),
            Some(1),
            "a new failure is news"
        );
    }
}
