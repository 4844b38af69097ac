//! Owns the reading run: every queue from its first offset to its last, each record checked.
//!
//! Invariant: what is reported as complete was seen: dense offsets, sound checksums, and every
//! message of the given run that was acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;

use serde_json::Value;
use wire::codes::{request, response};
use wire::header::ExtValue;
use wire::message::RecordView;

use crate::cli::ConsumeOptions;
use crate::error::BenchError;
use crate::machine;
use crate::session::{BrokerQueues, Session, find_topic};
use crate::stamp::Stamp;

/// Flag of a pull that brings its own subscription.
const PULL_WITH_SUBSCRIPTION: i64 = 4;
/// Pulls in a row that may bring nothing below the end of a queue.
const EMPTY_PULLS_MAX: u32 = 1_000;

/// Numbers of one run that were seen.
#[derive(Debug, Default)]
struct Seen {
    bits: Vec<u64>,
    distinct: u64,
    repeated: u64,
}

impl Seen {
    fn add(&mut self, sequence: u64) {
        let (word, bit) = ((sequence / 64) as usize, 1_u64 << (sequence % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        if let Some(bits) = self.bits.get_mut(word) {
            self.distinct += u64::from(*bits & bit == 0);
            self.repeated += u64::from(*bits & bit != 0);
            *bits |= bit;
        }
    }

    fn has(&self, sequence: u64) -> bool {
        let bit = 1_u64 << (sequence % 64);
        self.bits
            .get((sequence / 64) as usize)
            .is_some_and(|bits| bits & bit != 0)
    }
}

/// What was read.
#[derive(Debug, Default)]
struct Tally {
    messages: u64,
    bytes: u64,
    foreign: u64,
    bad_checksums: u64,
    offset_gaps: u64,
    runs: BTreeMap<u64, Seen>,
}

/// Runs `consume`; true when everything found is sound and nothing is missing.
pub fn run(options: &ConsumeOptions) -> Result<bool, BenchError> {
    machine::pin(options.topic.core)?;
    let brokers = find_topic(&options.topic)?;
    let begun = Instant::now();
    let mut tally = Tally::default();
    for broker in &brokers {
        read_broker(options, broker, &mut tally)?;
    }
    let seconds = begun.elapsed().as_secs_f64().max(1e-9);
    println!(
        "read {} messages, {:.1} MB of records in {seconds:.2} s: {:.0} msg/s",
        tally.messages,
        tally.bytes as f64 / 1e6,
        tally.messages as f64 / seconds,
    );
    println!(
        "foreign {}, bad checksums {}, offset gaps {}",
        tally.foreign, tally.bad_checksums, tally.offset_gaps
    );
    for (run, seen) in &tally.runs {
        println!(
            "run {run:016X}: {} distinct, {} repeated",
            seen.distinct, seen.repeated
        );
    }
    let mut sound = tally.bad_checksums == 0 && tally.offset_gaps == 0;
    if let Some(path) = &options.run {
        sound &= compare(path, &tally)?;
    }
    Ok(sound)
}

fn read_broker(
    options: &ConsumeOptions,
    broker: &BrokerQueues,
    tally: &mut Tally,
) -> Result<(), BenchError> {
    let mut session = Session::connect(&broker.address, options.topic.headers.serialization())?;
    for queue_id in 0..broker.read_queues {
        read_queue(options, &mut session, queue_id, tally)?;
    }
    Ok(())
}

fn read_queue(
    options: &ConsumeOptions,
    session: &mut Session,
    queue_id: i32,
    tally: &mut Tally,
) -> Result<(), BenchError> {
    let place = [
        ("topic", ExtValue::Str(&options.topic.topic)),
        ("queueId", ExtValue::Int(queue_id.into())),
    ];
    let answer = session.need("first offset", request::GET_MIN_OFFSET, &place, &[])?;
    let mut offset = session.number(&answer, "offset")?;
    let answer = session.need("last offset", request::GET_MAX_OFFSET, &place, &[])?;
    let end = session.number(&answer, "offset")?;
    let mut empty_pulls = 0;
    while offset < end {
        let ext = [
            ("consumerGroup", ExtValue::Str(&options.group)),
            ("topic", ExtValue::Str(&options.topic.topic)),
            ("queueId", ExtValue::Int(queue_id.into())),
            ("queueOffset", ExtValue::Int(offset)),
            ("maxMsgNums", ExtValue::Int(options.batch.into())),
            ("sysFlag", ExtValue::Int(PULL_WITH_SUBSCRIPTION)),
            ("commitOffset", ExtValue::Int(0)),
            ("suspendTimeoutMillis", ExtValue::Int(0)),
            ("subscription", ExtValue::Str("*")),
            ("subVersion", ExtValue::Int(0)),
            ("expressionType", ExtValue::Str("TAG")),
        ];
        let answer = session.call(request::PULL_MESSAGE, &ext, &[])?;
        match answer.code {
            response::SUCCESS => {
                empty_pulls = 0;
                offset = tally.take(&answer.body, offset)?;
            }
            response::PULL_NOT_FOUND
            | response::PULL_RETRY_IMMEDIATELY
            | response::PULL_OFFSET_MOVED => {
                let next = session.number(&answer, "nextBeginOffset")?;
                tally.offset_gaps += next.abs_diff(offset);
                offset = next;
                empty_pulls += 1;
                if empty_pulls > EMPTY_PULLS_MAX {
                    return Err(BenchError::Option(format!(
                        "queue {queue_id} ends at {end} but nothing comes from offset {offset} on"
                    )));
                }
            }
            code => {
                return Err(BenchError::Option(format!(
                    "pull of queue {queue_id} at {offset}: code {code}: {}",
                    answer.remark
                )));
            }
        }
    }
    Ok(())
}

impl Tally {
    /// Checks the records of one answer; returns the offset after them.
    fn take(&mut self, mut records: &[u8], mut offset: i64) -> Result<i64, BenchError> {
        while !records.is_empty() {
            let record = RecordView::parse(records)
                .map_err(|error| BenchError::protocol("the broker", error))?;
            self.messages += 1;
            self.bytes += record.total_len() as u64;
            self.offset_gaps += u64::from(record.queue_offset() != offset);
            self.bad_checksums += u64::from(record.check_body_crc().is_err());
            match Stamp::read(record.body()) {
                Some(stamp) => self.runs.entry(stamp.run).or_default().add(stamp.sequence),
                None => self.foreign += 1,
            }
            offset = record.queue_offset() + 1;
            records = records.get(record.total_len()..).unwrap_or_default();
        }
        Ok(offset)
    }
}

/// Looks for every message of a run that was acknowledged.
fn compare(path: &Path, tally: &Tally) -> Result<bool, BenchError> {
    let unusable = |what: &str| BenchError::Option(format!("{}: {what}", path.display()));
    let text = fs::read(path).map_err(BenchError::io(format!("read {}", path.display())))?;
    let report: Value =
        serde_json::from_slice(&text).map_err(|error| unusable(&error.to_string()))?;
    let run = report.get("run").and_then(Value::as_str);
    let run = run.and_then(|run| u64::from_str_radix(run, 16).ok());
    let sent = report.get("sent_total").and_then(Value::as_u64);
    let failed = report.get("failed_sequences").and_then(Value::as_array);
    let (Some(run), Some(sent), Some(failed)) = (run, sent, failed) else {
        return Err(unusable("is not the report of a produce run"));
    };
    if report.get("failed_sequences_complete") != Some(&Value::Bool(true)) {
        return Err(unusable(
            "so many messages failed that it does not list them all",
        ));
    }
    let failed: BTreeSet<u64> = failed.iter().filter_map(Value::as_u64).collect();
    let none = Seen::default();
    let seen = tally.runs.get(&run).unwrap_or(&none);
    let missing: Vec<u64> = (0..sent)
        .filter(|sequence| !failed.contains(sequence) && !seen.has(*sequence))
        .collect();
    let acked = sent - failed.len() as u64;
    println!(
        "run {run:016X}: {acked} acknowledged, {} of them missing",
        missing.len()
    );
    if let Some(first) = missing.first() {
        println!("first missing: message {first}");
    }
    Ok(missing.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seen_numbers_are_told_apart_from_repeated_ones() {
        let mut seen = Seen::default();
        for sequence in [0, 63, 64, 1_000, 64] {
            seen.add(sequence);
        }
        assert_eq!((seen.distinct, seen.repeated), (4, 1));
        assert!(seen.has(1_000) && !seen.has(999) && !seen.has(1 << 40));
    }
}
