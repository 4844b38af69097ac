//! How late timed messages are delivered, counted in buckets.

/// Upper bounds of the buckets in milliseconds; the last bucket has none.
pub const LATENESS_BOUNDS_MS: [i64; 11] = [1, 5, 10, 25, 50, 100, 250, 500, 1_000, 5_000, 60_000];

/// A histogram since the start of the process. What came due while no process ran counts from its
/// start.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Lateness {
    /// Messages in each bucket.
    pub counts: [u64; LATENESS_BOUNDS_MS.len() + 1],
    /// Sum in milliseconds.
    pub sum_ms: u64,
    /// Longest in milliseconds.
    pub max_ms: u64,
}

impl Lateness {
    pub(super) fn record(&mut self, late_ms: i64) {
        let at = LATENESS_BOUNDS_MS.partition_point(|bound| *bound < late_ms);
        if let Some(count) = self.counts.get_mut(at) {
            *count += 1;
        }
        let late_ms = u64::try_from(late_ms).unwrap_or(0);
        self.sum_ms += late_ms;
        self.max_ms = self.max_ms.max(late_ms);
    }

    /// Messages counted.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Adds another shard's.
    pub fn merge(&mut self, other: &Self) {
        for (mine, others) in self.counts.iter_mut().zip(other.counts) {
            *mine += others;
        }
        self.sum_ms += other.sum_ms;
        self.max_ms = self.max_ms.max(other.max_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_belong_to_their_buckets() {
        let mut lateness = Lateness::default();
        for late_ms in [-3, 0, 1, 2, 100, 101, 1 << 40] {
            lateness.record(late_ms);
        }
        assert_eq!(lateness.counts, [3, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]);
        assert_eq!((lateness.total(), lateness.max_ms), (7, 1 << 40));
    }
}
