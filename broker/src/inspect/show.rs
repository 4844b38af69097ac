//! What was found, as text for people and as JSON for programs.
//!
//! Invariant: both say the same; every number that is in one is in the other.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::buffers::Found;
use super::walk::{EventReport, ShardReport};
use super::{Findings, PROBLEMS_SHOWN_MAX, StoreFacts};
use crate::config::value::Bytes;

/// The text.
pub fn text(findings: &Findings) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    if let Some(identity) = &findings.facts.identity {
        let closed = if identity.clean {
            "closed cleanly"
        } else {
            "not closed cleanly"
        };
        let _ = writeln!(
            out,
            "store {}: id {}, start {}, {} shards, {closed}",
            findings.root.display(),
            identity.store_id,
            identity.epoch,
            identity.shards
        );
    }
    for shard in &findings.shards {
        out.push_str(&shard_text(shard, &findings.facts));
    }
    for file in &findings.control {
        let generation = file
            .generation
            .map_or("none is whole".to_owned(), |number| number.to_string());
        let (name, bytes) = (&file.name, file.bytes);
        let _ = writeln!(
            out,
            "control file {name}: generation {generation}, {bytes} bytes"
        );
        if let Some(problem) = &file.problem {
            let _ = writeln!(out, "  PROBLEM {problem}");
        }
    }
    let records: u64 = findings.shards.iter().map(|shard| shard.records).sum();
    let _ = writeln!(
        out,
        "{} shards, {records} records, {} problems",
        findings.shards.len(),
        findings.problems()
    );
    out
}

/// What is printed of a shard.
pub fn shard_text(shard: &ShardReport, facts: &StoreFacts) -> String {
    let mut out = format!(
        "shard {}: {} segments of {}, {} records of {} bytes\n",
        shard.shard,
        shard.segments.len(),
        Bytes(shard.segment_bytes),
        shard.records,
        shard.record_bytes
    );
    if let (Some(first), Some(end)) = (shard.first, shard.end) {
        let reason = &shard.end_reason;
        let _ = writeln!(out, "  physical offsets {first} to {end} ({reason})");
    }
    for segment in &shard.segments {
        let name = segment
            .path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        let newest = match segment.last_store_timestamp {
            0 => "no message".to_owned(),
            stored => format!("newest stored at {stored} ms"),
        };
        let _ = writeln!(
            out,
            "  segment {name}: {} bytes, {} records, {} bytes used, {newest}",
            segment.bytes, segment.records, segment.used
        );
    }
    for run in &shard.runs.runs {
        let _ = writeln!(
            out,
            "  run {} to {}: {} units of {} queues, {} keys, {} events",
            run.start, run.end, run.units, run.queues, run.keys, run.events
        );
    }
    let _ = writeln!(
        out,
        "  runs cover the log to {}; records checked whole: {} by runs, {} by end marks",
        shard.covered_to, shard.checked_by_run, shard.checked_by_mark
    );
    events_text(&shard.events, &mut out);
    buffer_text(shard.shard, facts, &mut out);
    for ((topic, queue_id), queue) in &shard.queues {
        let jumps = if queue.jumps == 0 {
            String::new()
        } else {
            format!(", {} jumps", queue.jumps)
        };
        let removed = if queue.removed { ", removed since" } else { "" };
        let _ = writeln!(
            out,
            "  queue {topic} {queue_id}: offsets {} to {}, {} records{jumps}{removed}",
            queue.min_offset, queue.next_offset, queue.records
        );
    }
    for note in &shard.notes {
        let _ = writeln!(out, "  note {note}");
    }
    for problem in shard.problems.iter().take(PROBLEMS_SHOWN_MAX) {
        let _ = writeln!(out, "  PROBLEM {problem}");
    }
    if shard.problem_count > shard.problems.len().min(PROBLEMS_SHOWN_MAX) {
        let _ = writeln!(out, "  … {} problems in all", shard.problem_count);
    }
    out
}

fn events_text(events: &EventReport, out: &mut String) {
    let _ = writeln!(
        out,
        "  internal records: {} offsets, {} of timed messages, {} of POP, {} removals, \
         {} end marks, {} queue ends, {} of transactions",
        events.offsets,
        events.delay_progress,
        events.pop,
        events.removals,
        events.end_marks,
        events.queue_ends,
        events.transactions
    );
}

fn buffer_text(shard: u16, facts: &StoreFacts, out: &mut String) {
    let Some(buffer) = facts.buffer(shard).and_then(Found::ours) else {
        return;
    };
    let _ = writeln!(
        out,
        "  write buffer {}: {}, log has it to {}, whole to {}: {} bytes the next start writes",
        buffer.path.display(),
        Bytes(buffer.bytes),
        buffer.written,
        buffer.published,
        buffer.published - buffer.written
    );
}

/// The JSON, in one line.
pub fn json(findings: &Findings) -> String {
    let identity = findings.facts.identity.as_ref();
    let shards: Vec<Value> = findings
        .shards
        .iter()
        .map(|shard| shard_json(shard, &findings.facts))
        .collect();
    let control = findings.control.iter().map(|file| {
        json!({
            "name": file.name,
            "generation": file.generation,
            "bytes": file.bytes,
            "problem": file.problem,
        })
    });
    let whole = json!({
        "store": findings.root.display().to_string(),
        "storeId": identity.map(|identity| &identity.store_id),
        "start": identity.map(|identity| identity.epoch),
        "clean": identity.map(|identity| identity.clean),
        "shards": shards,
        "controlFiles": control.collect::<Vec<Value>>(),
        "problems": findings.problems(),
    });
    format!("{whole}\n")
}

fn shard_json(shard: &ShardReport, facts: &StoreFacts) -> Value {
    let segments = shard.segments.iter().map(|segment| {
        json!({
            "file": segment.path.display().to_string(),
            "start": segment.start,
            "bytes": segment.bytes,
            "records": segment.records,
            "usedBytes": segment.used,
            "lastStoreTimestamp": segment.last_store_timestamp,
        })
    });
    let runs = shard.runs.runs.iter().map(|run| {
        json!({
            "file": run.path.display().to_string(),
            "start": run.start,
            "end": run.end,
            "units": run.units,
            "queues": run.queues,
            "keys": run.keys,
            "events": run.events,
        })
    });
    let queues = shard.queues.iter().map(|((topic, queue_id), queue)| {
        json!({
            "topic": topic,
            "queueId": queue_id,
            "minOffset": queue.min_offset,
            "nextOffset": queue.next_offset,
            "records": queue.records,
            "jumps": queue.jumps,
            "removed": queue.removed,
        })
    });
    let buffer = buffer_json(shard.shard, facts);
    json!({
        "shard": shard.shard,
        "segmentBytes": shard.segment_bytes,
        "records": shard.records,
        "recordBytes": shard.record_bytes,
        "first": shard.first,
        "end": shard.end,
        "endReason": shard.end_reason,
        "segments": segments.collect::<Vec<Value>>(),
        "runs": runs.collect::<Vec<Value>>(),
        "coveredTo": shard.covered_to,
        "checkedByRun": shard.checked_by_run,
        "checkedByMark": shard.checked_by_mark,
        "events": {
            "offsets": shard.events.offsets,
            "delayProgress": shard.events.delay_progress,
            "pop": shard.events.pop,
            "removals": shard.events.removals,
            "endMarks": shard.events.end_marks,
            "queueEnds": shard.events.queue_ends,
            "transactions": shard.events.transactions,
        },
        "buffer": buffer,
        "queues": queues.collect::<Vec<Value>>(),
        "notes": shard.notes,
        "problems": shard.problems,
        "problemCount": shard.problem_count,
    })
}

fn buffer_json(shard: u16, facts: &StoreFacts) -> Option<Value> {
    let buffer = facts.buffer(shard).and_then(Found::ours)?;
    Some(json!({
        "file": buffer.path.display().to_string(),
        "bytes": buffer.bytes,
        "written": buffer.written,
        "whole": buffer.published,
    }))
}
