//! Times of a shard in fixed histograms with two buckets per power of two: append to answer since
//! the start, and log writes of the last seconds.
//!
//! Invariant: recording is one addition to a counter; nothing is allocated.

const BUCKETS: usize = 64;
/// [`RecentLatency`] looks back this far at least, and twice as far at most, in microseconds.
const WINDOW_US: u64 = 5_000_000;

/// A histogram of microseconds.
#[derive(Clone, Debug)]
pub struct Latency {
    counts: [u64; BUCKETS],
    total: u64,
    max_us: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self {
            counts: [0; BUCKETS],
            total: 0,
            max_us: 0,
        }
    }
}

impl Latency {
    fn bucket(us: u64) -> usize {
        if us < 2 {
            return us as usize;
        }
        let exponent = 63 - us.leading_zeros() as usize;
        let half = (us >> (exponent - 1)) & 1;
        (exponent * 2 + half as usize).min(BUCKETS - 1)
    }

    fn upper_us(bucket: usize) -> u64 {
        if bucket < 2 {
            return bucket as u64;
        }
        let (exponent, half) = (bucket / 2, bucket % 2);
        (1 << exponent) + ((half as u64 + 1) << (exponent - 1)) - 1
    }

    /// Records one time.
    pub fn record(&mut self, us: u64) {
        if let Some(count) = self.counts.get_mut(Self::bucket(us)) {
            *count += 1;
        }
        self.total += 1;
        self.max_us = self.max_us.max(us);
    }

    /// Longest time seen in microseconds.
    #[must_use]
    pub fn max_us(&self) -> u64 {
        self.max_us
    }

    /// Upper bound in microseconds of the bucket that holds a quantile (0 ..= 1).
    #[must_use]
    pub fn quantile_us(&self, quantile: f64) -> u64 {
        let target = (self.total as f64 * quantile).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= target && target > 0 {
                return Self::upper_us(bucket).min(self.max_us);
            }
        }
        self.max_us
    }

    fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.total += other.total;
        self.max_us = self.max_us.max(other.max_us);
    }
}

/// The same over the last seconds only.
#[derive(Clone, Debug, Default)]
pub struct RecentLatency {
    current: Latency,
    before: Latency,
    since_us: u64,
}

impl RecentLatency {
    /// Records one time.
    pub fn record(&mut self, now_us: u64, us: u64) {
        if now_us >= self.since_us + WINDOW_US {
            let is_next = now_us < self.since_us + 2 * WINDOW_US;
            let current = std::mem::take(&mut self.current);
            self.before = if is_next { current } else { Latency::default() };
            self.since_us = now_us;
        }
        self.current.record(us);
    }

    /// Upper bound in microseconds of the bucket that holds a quantile (0 ..= 1); 0 without times.
    #[must_use]
    pub fn quantile_us(&self, now_us: u64, quantile: f64) -> u64 {
        if now_us >= self.since_us + 2 * WINDOW_US {
            return 0;
        }
        let mut all = self.current.clone();
        all.add(&self.before);
        all.quantile_us(quantile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_half_a_power_of_two() {
        let mut latency = Latency::default();
        for us in 1..=1000 {
            latency.record(us);
        }
        let p50 = latency.quantile_us(0.5);
        assert!((500..=767).contains(&p50), "{p50}");
        assert!((990..=1000).contains(&latency.quantile_us(0.99)));
        assert_eq!(latency.max_us(), 1000);
        assert_eq!(Latency::default().quantile_us(0.99), 0);
    }

    #[test]
    fn recent_times_are_forgotten_after_two_windows_at_most() {
        let mut recent = RecentLatency::default();
        recent.record(1_000_000, 400_000);
        for step in 0..200 {
            recent.record(2_000_000 + step * 10_000, 100);
        }
        assert_eq!(recent.quantile_us(4_000_000, 1.0), 400_000);
        assert!(recent.quantile_us(4_000_000, 0.99) < 200, "one of 201");
        recent.record(6_100_000, 100);
        assert_eq!(recent.quantile_us(6_100_000, 1.0), 400_000);
        recent.record(11_200_000, 100);
        assert_eq!(recent.quantile_us(11_200_000, 1.0), 100);
        assert_eq!(recent.quantile_us(21_300_000, 1.0), 0, "silence");
    }
}
