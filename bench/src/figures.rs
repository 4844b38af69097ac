//! Owns the arithmetic of the histograms: what is recorded, how parts are merged, what may be
//! read out of them.
//!
//! Invariant: parts are merged count by count, never averaged, and a percentile is told only where
//! enough samples lie beyond it.

use hdrhistogram::{Counter, Histogram};

use crate::error::BenchError;

/// Shortest time told apart.
pub const LOWEST_NS: u64 = 1_000;
/// Longest time told apart; what is longer counts as this and is counted besides.
pub const HIGHEST_NS: u64 = 60_000_000_000;
/// Significant digits.
pub const DIGITS: u8 = 3;
/// What a histogram can hold before it first grows; short runs on many connections stay small.
const FIRST_HIGHEST_NS: u64 = 2_000_000;
/// Samples that must lie beyond a percentile for it to be told.
pub const SAMPLES_BEYOND_MIN: f64 = 10.0;
/// Percentiles that are told, with their names.
pub const QUANTILES: [(&str, f64); 6] = [
    ("p50", 0.5),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p99.9", 0.999),
    ("p99.99", 0.999_9),
    ("p99.999", 0.999_99),
];

/// An empty histogram that grows up to [`HIGHEST_NS`].
pub fn histogram<T: Counter>() -> Result<Histogram<T>, BenchError> {
    let mut histogram = Histogram::new_with_bounds(LOWEST_NS, FIRST_HIGHEST_NS, DIGITS)
        .map_err(|error| BenchError::Option(format!("histogram: {error}")))?;
    histogram.auto(true);
    Ok(histogram)
}

/// Records times of one value.
pub fn record<T: Counter>(histogram: &mut Histogram<T>, nanoseconds: u64, count: T) {
    // Within the bounds the only failure is a growth that the memory has no room for.
    let _ = histogram.record_n(nanoseconds.min(HIGHEST_NS), count);
}

/// Adds every count of one histogram to another.
pub fn merge<T: Counter>(into: &mut Histogram<u64>, from: &Histogram<T>) {
    for step in from.iter_recorded() {
        let count = step.count_at_value().to_u64().unwrap_or(u64::MAX);
        record(into, step.value_iterated_to(), count);
    }
}

/// The three times of a message, for one connection, one second or a whole run.
#[derive(Clone, Debug)]
pub struct Times<T: Counter> {
    /// From the moment it was due to its acknowledgement.
    pub latency: Histogram<T>,
    /// From the moment it was written to its acknowledgement.
    pub service: Histogram<T>,
    /// From the moment it was due to the moment it was written.
    pub lateness: Histogram<T>,
}

impl<T: Counter> Times<T> {
    /// Nothing recorded.
    pub fn new() -> Result<Self, BenchError> {
        Ok(Self {
            latency: histogram()?,
            service: histogram()?,
            lateness: histogram()?,
        })
    }

    /// Forgets everything, keeping the room.
    pub fn clear(&mut self) {
        self.latency.reset();
        self.service.reset();
        self.lateness.reset();
    }

    /// Name and histogram of each.
    pub fn named(&self) -> [(&'static str, &Histogram<T>); 3] {
        [
            ("latency", &self.latency),
            ("service", &self.service),
            ("lateness", &self.lateness),
        ]
    }
}

impl Times<u64> {
    /// Adds those of a part.
    pub fn merge<T: Counter>(&mut self, part: &Times<T>) {
        merge(&mut self.latency, &part.latency);
        merge(&mut self.service, &part.service);
        merge(&mut self.lateness, &part.lateness);
    }
}

/// The value of a percentile, or none when too few samples lie beyond it.
pub fn quantile<T: Counter>(histogram: &Histogram<T>, quantile: f64) -> Option<u64> {
    let beyond = histogram.len() as f64 * (1.0 - quantile);
    // The subtraction is not exact; a ten-thousandth of a sample is no sample.
    (beyond + 1e-4 >= SAMPLES_BEYOND_MIN).then(|| histogram.value_at_quantile(quantile))
}

/// What a histogram keeps when its room is needed: values and their counts.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Sparse(Vec<(u64, u64)>);

impl Sparse {
    /// Takes the counts out.
    pub fn of<T: Counter>(histogram: &Histogram<T>) -> Self {
        let steps = histogram.iter_recorded();
        let steps = steps.map(|step| {
            let count = step.count_at_value().to_u64().unwrap_or(u64::MAX);
            (step.value_iterated_to(), count)
        });
        Self(steps.collect())
    }

    /// Puts them back into a histogram.
    pub fn histogram(&self) -> Result<Histogram<u64>, BenchError> {
        let mut whole = histogram()?;
        for (value, count) in &self.0 {
            record(&mut whole, *value, *count);
        }
        Ok(whole)
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The median and the ends of a row of figures.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub struct Spread {
    /// The least.
    pub least: f64,
    /// The middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The greatest.
    pub greatest: f64,
}

/// The spread of some figures; none of none.
pub fn spread(figures: &[f64]) -> Option<Spread> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    let median = if sorted.len().is_multiple_of(2) {
        (sorted.get(middle - 1)? + upper) / 2.0
    } else {
        upper
    };
    Some(Spread {
        least: *sorted.first()?,
        median,
        greatest: *sorted.last()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_percentiles_are_those_of_all_samples_and_no_average() {
        let mut quick = histogram::<u32>().unwrap();
        let mut slow = histogram::<u32>().unwrap();
        record(&mut quick, 100_000, 990);
        record(&mut slow, 50_000_000, 10);
        let mut whole = histogram().unwrap();
        merge(&mut whole, &quick);
        merge(&mut whole, &slow);
        assert_eq!(whole.len(), 1_000);
        assert!(whole.equivalent(quantile(&whole, 0.99).unwrap(), 100_000));
        assert!(whole.equivalent(whole.value_at_quantile(0.995), 50_000_000));
    }

    #[test]
    fn values_keep_three_digits_from_a_microsecond_to_a_minute() {
        for value in [1_000, 66_000, 2_345_000, 1_234_000_000, 59_900_000_000] {
            let mut one = histogram::<u64>().unwrap();
            record(&mut one, value, 1);
            let error = one.max().abs_diff(value) as f64;
            assert!(error <= (value as f64 / 1_000.0).max(1_000.0), "{value}");
        }
        let mut over = histogram::<u64>().unwrap();
        record(&mut over, 3 * HIGHEST_NS, 1);
        assert_eq!(over.len(), 1);
        assert!(over.max() < HIGHEST_NS + HIGHEST_NS / 500);
    }

    #[test]
    fn a_percentile_is_told_only_with_ten_samples_beyond_it() {
        let mut some = histogram::<u64>().unwrap();
        record(&mut some, 1_000_000, 9_999);
        assert!(quantile(&some, 0.99).is_some());
        assert_eq!(quantile(&some, 0.999), None);
        record(&mut some, 1_000_000, 1);
        assert!(quantile(&some, 0.999).is_some());
        assert_eq!(quantile(&some, 0.999_9), None);
    }

    #[test]
    fn counts_taken_out_and_put_back_are_the_same() {
        let mut before = histogram::<u32>().unwrap();
        for value in 1..5_000_u64 {
            record(&mut before, value * 7_919, 3);
        }
        let after = Sparse::of(&before).histogram().unwrap();
        assert_eq!(after.len(), before.len());
        assert_eq!(Sparse::of(&after), Sparse::of(&before));
    }

    #[test]
    fn the_spread_names_the_middle_and_the_ends() {
        let odd = spread(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.least, odd.median, odd.greatest), (1.0, 2.0, 3.0));
        assert_eq!(spread(&[1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(spread(&[]), None);
    }
}
