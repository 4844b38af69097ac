//! Owns the plain reading of topics: every queue from its first offset to its last, each record
//! checked.
//!
//! Invariant: what is reported as sound was seen: dense offsets and sound checksums.

use std::collections::BTreeMap;
use std::time::Instant;

use wire::codes::request;

use crate::cli::VerifyOptions;
use crate::error::BenchError;
use crate::machine;
use crate::plan::Plan;
use crate::readers::{STALL, read_to_end};
use crate::stamp::Stamp;
use crate::topology::Topology;

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
}

/// What was read.
#[derive(Debug, Default)]
struct Tally {
    foreign: u64,
    bad_checksums: u64,
    runs: BTreeMap<u64, Seen>,
}

/// Runs `verify`; true when everything found is sound.
pub fn run(options: &VerifyOptions) -> Result<bool, BenchError> {
    let plan = Plan::load(&options.plan)?;
    machine::pin(plan.core)?;
    let topology = Topology::find(&plan)?;
    let begins = topology.offsets(&plan, request::GET_MIN_OFFSET)?;
    let ends = topology.offsets(&plan, request::GET_MAX_OFFSET)?;
    let ranges: Vec<(i64, i64)> = begins.into_iter().zip(ends).collect();
    let mut tally = Tally::default();
    let begun = Instant::now();
    let (is_whole, counts) = read_to_end(&plan, &topology, &ranges, |_, record| {
        tally.bad_checksums += u64::from(record.check_body_crc().is_err());
        match Stamp::read(record.body()) {
            Some(stamp) => tally.runs.entry(stamp.run).or_default().add(stamp.sequence),
            None => tally.foreign += 1,
        }
    })?;
    let seconds = begun.elapsed().as_secs_f64().max(1e-9);
    println!(
        "read {} messages, {:.1} MB of records in {seconds:.2} s: {:.0} msg/s",
        counts.messages,
        counts.bytes as f64 / 1e6,
        counts.messages as f64 / seconds,
    );
    println!(
        "foreign {}, bad checksums {}, unreadable {}, offset gaps {}",
        tally.foreign, tally.bad_checksums, counts.damaged, counts.gaps
    );
    for (run, seen) in &tally.runs {
        println!(
            "run {run:016X}: {} distinct, {} repeated",
            seen.distinct, seen.repeated
        );
    }
    if !is_whole {
        println!(
            "nothing came for {} s; refused pulls by code: {:?}",
            STALL.as_secs(),
            counts.refused
        );
    }
    Ok(is_whole && tally.bad_checksums + counts.damaged + counts.gaps == 0)
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
    }
}
