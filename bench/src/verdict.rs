//! Owns the rules by which a run may be quoted.
//!
//! Invariant: a run whose generator was, or may have been, the bottleneck is never a headline; the
//! rules look at the generator only, so that a slow server cannot hide behind them.

use serde::Serialize;

/// Share of the interval between two messages of a connection that the p99 of the lateness may
/// reach.
pub const LATENESS_SHARE_MAX: f64 = 0.10;
/// Lateness that no interval, however long, excuses.
pub const LATENESS_NS_MAX: f64 = 1_000_000.0;
/// Share of time at work up to which the generator's core counts as free enough.
pub const BUSY_SHARE_MAX: f64 = 0.85;
/// Share of time without a CPU that spoils a run.
pub const DELAY_SHARE_MAX: f64 = 0.05;

/// How the generator fared in the window.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Generator {
    /// Share of time at work; spinning until the next message is due is no work.
    pub busy_share: f64,
    /// Share of time on a CPU, spinning included.
    pub cpu_share: f64,
    /// Share of time it wanted to run and had no CPU.
    pub delay_share: f64,
    /// p99 of the lateness that was its own fault.
    pub lateness_p99_ns: u64,
    /// Time between two messages of one connection; none in a closed loop.
    pub interval_ns: Option<f64>,
}

impl Generator {
    /// Lateness up to which a schedule counts as kept.
    pub fn lateness_limit_ns(&self) -> Option<f64> {
        self.interval_ns
            .map(|interval| (interval * LATENESS_SHARE_MAX).min(LATENESS_NS_MAX))
    }

    /// Why the figures say more about the generator than about the server; empty if they do not.
    pub fn refusals(&self) -> Vec<String> {
        let percent = |share: f64| 100.0 * share;
        let mut refusals = Vec::new();
        if let Some(limit) = self.lateness_limit_ns()
            && self.lateness_p99_ns as f64 > limit
        {
            refusals.push(format!(
                "lateness p99 is {:.1} µs, limit {:.1} µs (10 % of a connection's interval, 1 ms \
                 at most)",
                self.lateness_p99_ns as f64 / 1e3,
                limit / 1e3
            ));
        }
        if self.busy_share > BUSY_SHARE_MAX {
            refusals.push(format!(
                "the generator's core was at work {:.1} % of the time, limit {:.0} %",
                percent(self.busy_share),
                percent(BUSY_SHARE_MAX)
            ));
        }
        if self.delay_share > DELAY_SHARE_MAX {
            refusals.push(format!(
                "the generator waited for a CPU {:.1} % of the time, limit {:.0} %; give it one of \
                 its own",
                percent(self.delay_share),
                percent(DELAY_SHARE_MAX)
            ));
        }
        refusals
    }
}

/// Why this build may not measure; none if it may.
pub fn build_refusal(is_debug: bool, allowed: bool) -> Option<&'static str> {
    (is_debug && !allowed).then_some(
        "this is a debug build, whose figures mean nothing: build it with `cargo build --release \
         -p bench` and run target/release/pinion-bench",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: Generator = Generator {
        busy_share: 0.5,
        cpu_share: 1.0,
        delay_share: 0.0,
        lateness_p99_ns: 9_000,
        interval_ns: Some(100_000.0),
    };

    #[test]
    fn a_generator_with_time_to_spare_may_be_quoted() {
        assert!(FREE.refusals().is_empty());
        assert!(Generator::default().refusals().is_empty());
    }

    #[test]
    fn lateness_over_a_tenth_of_the_interval_is_refused() {
        let late = Generator {
            lateness_p99_ns: 10_001,
            ..FREE
        };
        assert_eq!(late.refusals().len(), 1);
        let closed = Generator {
            interval_ns: None,
            ..late
        };
        assert!(closed.refusals().is_empty());
    }

    #[test]
    fn no_interval_excuses_a_millisecond() {
        let rare = Generator {
            lateness_p99_ns: 1_100_000,
            interval_ns: Some(1e9),
            ..FREE
        };
        assert_eq!(rare.refusals().len(), 1);
    }

    #[test]
    fn a_busy_core_and_a_core_shared_with_others_are_refused() {
        let busy = Generator {
            busy_share: 0.851,
            ..FREE
        };
        assert!(busy.refusals()[0].contains("85.1 %"));
        let waiting = Generator {
            delay_share: 0.06,
            ..FREE
        };
        assert_eq!(waiting.refusals().len(), 1);
        let all = Generator {
            busy_share: 0.9,
            delay_share: 0.06,
            lateness_p99_ns: 50_000,
            ..FREE
        };
        assert_eq!(all.refusals().len(), 3);
    }

    #[test]
    fn debug_builds_are_refused_unless_a_test_says_otherwise() {
        assert!(build_refusal(true, false).is_some());
        assert!(build_refusal(true, true).is_none());
        assert!(build_refusal(false, false).is_none());
    }
}
