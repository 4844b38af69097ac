//! Owns the `.hlog` of a loop: the standard interval log of HdrHistogram, one line for each second
//! and kind of time.
//!
//! Invariant: seconds follow each other from the start of the loop, warm-up included; kinds are
//! told apart by tags, and values are nanoseconds.

use std::time::{Duration, SystemTime};

use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};

use crate::error::BenchError;
use crate::measure::Second;

/// Names of the kinds of [`Second::times`].
const KINDS: [&str; 3] = ["latency", "service", "lateness"];
const END_TO_END: &str = "end-to-end";
/// Maxima in the lines are milliseconds, as is the custom.
const MAX_DIVISOR: f64 = 1e6;
const SECOND: Duration = Duration::from_secs(1);

/// The whole log.
pub fn encode(label: &str, started: SystemTime, seconds: &[Second]) -> Result<Vec<u8>, BenchError> {
    let failed = |error: String| BenchError::Option(format!("interval log: {error}"));
    let mut out = Vec::new();
    let mut serializer = V2DeflateSerializer::new();
    let mut builder = IntervalLogWriterBuilder::new();
    builder
        .add_comment(&format!("pinion-bench {}", env!("CARGO_PKG_VERSION")))
        .add_comment(&label.replace('\n', " "))
        .add_comment("values in nanoseconds, maxima of the lines in milliseconds")
        .with_start_time(started)
        .with_base_time(started)
        .with_max_value_divisor(MAX_DIVISOR);
    let mut writer = builder
        .begin_log_with(&mut out, &mut serializer)
        .map_err(|error| failed(error.to_string()))?;
    for (number, second) in seconds.iter().enumerate() {
        let start = SECOND * number as u32;
        let kinds = KINDS.iter().copied().zip(&second.times);
        for (kind, times) in kinds.chain([(END_TO_END, &second.end_to_end)]) {
            if times.is_empty() {
                continue;
            }
            let histogram = times.histogram()?;
            writer
                .write_histogram(&histogram, start, SECOND, Tag::new(kind))
                .map_err(|error| failed(format!("{error:?}")))?;
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use hdrhistogram::Histogram;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::*;
    use crate::figures::{Sparse, histogram, record};

    #[test]
    fn a_reader_of_the_format_finds_every_second_again() {
        let second = |nanoseconds: u64| {
            let mut times = histogram::<u64>().unwrap();
            record(&mut times, nanoseconds, 7);
            Second {
                times: [Sparse::of(&times), Sparse::default(), Sparse::default()],
                ..Second::default()
            }
        };
        let seconds = [second(80_000), second(3_000_000), Second::default()];
        let log = encode("a label", SystemTime::UNIX_EPOCH, &seconds).unwrap();
        let text = String::from_utf8(log.clone()).unwrap();
        assert!(
            text.starts_with('#') && text.contains("[StartTime:"),
            "{text}"
        );
        let mut found = Vec::new();
        for entry in IntervalLogIterator::new(&log) {
            let LogEntry::Interval(interval) = entry.unwrap() else {
                continue;
            };
            assert_eq!(interval.tag().unwrap().as_str(), "latency");
            let bytes = unbase64(interval.encoded_histogram());
            let histogram: Histogram<u64> = Deserializer::new()
                .deserialize(&mut bytes.as_slice())
                .unwrap();
            found.push((interval.start_timestamp().as_secs(), histogram));
        }
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].0, found[1].0), (0, 1));
        assert_eq!(found[1].1.len(), 7);
        assert!(found[1].1.equivalent(found[1].1.max(), 3_000_000));
    }

    fn unbase64(text: &str) -> Vec<u8> {
        let value = |byte: u8| match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        let digits = text.bytes().filter(|byte| *byte != b'=');
        let (mut bits, mut count, mut out) = (0_u32, 0, Vec::new());
        for digit in digits {
            bits = bits << 6 | u32::from(value(digit));
            count += 6;
            if count >= 8 {
                count -= 8;
                out.push((bits >> count) as u8);
            }
        }
        out
    }
}
