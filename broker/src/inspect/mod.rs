//! `pinion inspect`: walking a store that no broker has open, and saying what is whole and what is
//! not.
//!
//! Invariant: nothing is written, and the memory it takes grows with the number of queues, not with
//! the size of the store.

pub mod walk;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::args::InspectArgs;
use crate::cli::{EXIT_FAILED, EXIT_MALFORMED, complain, say};
use crate::config::value::Bytes;
use walk::{Filter, ShardReport};

/// Problems printed for each shard; the count is always complete.
pub const PROBLEMS_SHOWN_MAX: usize = 50;

/// Walks the store and prints what it found. Status 0: all whole; 1: damage; 2: no store there.
#[must_use]
pub fn run(args: &InspectArgs) -> ExitCode {
    let dir = log_dir(args);
    let filter = Filter {
        shard: args.shard,
        topic: args.topic.clone(),
    };
    let mut print_record = |line: &str| say(line);
    let each: walk::EachRecord<'_> = if args.records {
        Some(&mut print_record)
    } else {
        None
    };
    match walk::walk(&dir, &filter, each) {
        Ok(shards) if shards.is_empty() => {
            complain(&format!(
                "pinion: no segment of a commit log in {}",
                dir.display()
            ));
            ExitCode::from(EXIT_MALFORMED)
        }
        Ok(shards) => {
            for shard in &shards {
                say(&text_of(shard));
            }
            let problems: usize = shards.iter().map(|shard| shard.problem_count).sum();
            let records: u64 = shards.iter().map(|shard| shard.records).sum();
            say(&format!(
                "{} shards, {records} records, {problems} problems\n",
                shards.len()
            ));
            ExitCode::from(if problems > 0 { EXIT_FAILED } else { 0 })
        }
        Err(error) => {
            complain(&format!("pinion: cannot read {}: {error}", dir.display()));
            ExitCode::from(EXIT_MALFORMED)
        }
    }
}

/// The log lies in `commitlog` of the store; the directory itself is taken, too.
fn log_dir(args: &InspectArgs) -> PathBuf {
    let inner = args.data.join("commitlog");
    if inner.is_dir() {
        inner
    } else {
        args.data.clone()
    }
}

/// What is printed of a shard.
fn text_of(shard: &ShardReport) -> String {
    let mut out = format!(
        "shard {}: {} segments of {}, {} records of {} bytes\n",
        shard.shard,
        shard.segments.len(),
        Bytes(shard.segment_bytes),
        shard.records,
        shard.record_bytes
    );
    if let (Some(first), Some(end)) = (shard.first, shard.end) {
        out.push_str(&format!(
            "  physical offsets {first} to {end} ({})\n",
            shard.end_reason
        ));
    }
    for segment in &shard.segments {
        let name = segment
            .path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        out.push_str(&format!(
            "  segment {name}: {} bytes, {} records, {} bytes used, last stored at {} ms\n",
            segment.bytes, segment.records, segment.used, segment.last_store_timestamp
        ));
    }
    for ((topic, queue_id), queue) in &shard.queues {
        out.push_str(&format!(
            "  queue {topic} {queue_id}: offsets {} to {}, {} records{}\n",
            queue.min_offset,
            queue.next_offset,
            queue.records,
            if queue.jumps == 0 {
                String::new()
            } else {
                format!(", {} jumps", queue.jumps)
            }
        ));
    }
    for problem in shard.problems.iter().take(PROBLEMS_SHOWN_MAX) {
        out.push_str(&format!("  PROBLEM {problem}\n"));
    }
    if shard.problem_count > shard.problems.len().min(PROBLEMS_SHOWN_MAX) {
        out.push_str(&format!("  … {} problems in all\n", shard.problem_count));
    }
    out
}
