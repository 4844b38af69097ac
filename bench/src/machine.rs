//! Owns what the system tells about itself and about this thread.
//!
//! Invariant: everything here is a hint for the reader of a report; what cannot be read is left
//! out.

use std::fs;

use serde_json::{Value, json};

use crate::error::BenchError;

/// Pins the calling thread.
pub fn pin(core: Option<usize>) -> Result<(), BenchError> {
    let Some(core) = core else { return Ok(()) };
    if core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        return Ok(());
    }
    Err(BenchError::Option(format!(
        "core {core} cannot be pinned to; is it there and allowed?"
    )))
}

/// Nanoseconds this thread has waited for a CPU although it wanted to run.
pub fn run_delay_ns() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_ascii_whitespace()
        .nth(1)
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

/// What a reader needs to know about the machine.
pub fn describe() -> Value {
    let line = |path: &str| {
        fs::read_to_string(path)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let cpus = line("/proc/cpuinfo");
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches(['\t', ' ', ':']).to_owned());
    json!({
        "kernel": line("/proc/sys/kernel/osrelease"),
        "cpu": model,
        "cpus": cpus.lines().filter(|line| line.starts_with("processor")).count(),
        "load": line("/proc/loadavg"),
    })
}
