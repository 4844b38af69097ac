//! Owns what the cross-process suites share: a blocking RocketMQ client, a decoder of stored
//! records, a harness around the `pinion` program, and the audit of what it acknowledged.
//!
//! Invariant: nothing here uses code of the broker. The frames and records are read and written by
//! an implementation of their own, so a mistake made on both sides of `wire` cannot hide.

pub mod audit;
pub mod client;
pub mod cluster;
pub mod disk;
pub mod frame;
pub mod java;
pub mod network;
pub mod payload;
pub mod pop;
pub mod process;
pub mod procfs;
pub mod record;
pub mod source;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

static TURN: Mutex<()> = Mutex::new(());

/// Lets one test of a binary run at a time: several brokers on two cores would disturb the timing
/// that many of these tests assert.
pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets a flag when it goes out of scope, so that threads that look at it end also when the test
/// fails.
#[derive(Debug)]
pub struct StopAtEnd<'a>(pub &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A number from the environment, for suites whose length is a choice (`CRASH_ROUNDS` and such).
pub fn env_number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => default,
    }
}

/// Says loudly that a test did not run and why; with `CI=true` that fails it.
pub fn skipped(why: &str) {
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    assert!(!ci, "cannot run here, and CI=true skips nothing: {why}");
    eprintln!("\n*** SKIPPED: {why} ***\n");
}

/// Whether this process is root, which mounting and freezing file systems need.
pub fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"))
}
