//! Append-to-answer times of a shard: a fixed histogram with two buckets per power of two.
//!
//! Invariant: recording is one addition to a counter; nothing is allocated.

const BUCKETS: usize = 64;

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
}
