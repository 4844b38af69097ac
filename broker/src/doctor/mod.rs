//! What the machine gives and what the broker needs: the checks of `pinion doctor`, and the same
//! ones before every start.
//!
//! Invariant: a start that is refused is refused before anything is made or registered, with the
//! words that `doctor` prints and the line that fixes it.

pub mod checks;
pub mod facts;
pub mod kernel_text;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;

use crate::config::Config;
use crate::config::value::BufferDir;
use checks::{Check, State};
use facts::{Facts, Trials};
use shard::runtime::probe::probe_io_uring;

/// What a start goes on with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// Writes go past the page cache.
    pub direct: bool,
    /// Buffers are locked.
    pub memlock: bool,
    /// Threads are pinned.
    pub pinning: bool,
    /// Directory of buffers that outlive the process; nothing when acks wait for the write.
    pub buffer_dir: Option<PathBuf>,
    /// CPUs that take the disk's interrupts, most first.
    pub interrupt_cpus: Vec<usize>,
    /// What is missing, to be said once.
    pub warnings: Vec<String>,
}

/// Why the broker does not start. The text is for the operator as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartRefused {
    /// One paragraph for each check that refuses.
    pub reasons: Vec<String>,
}

impl fmt::Display for StartRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the broker does not start here:")?;
        for reason in &self.reasons {
            write!(f, "\n  {reason}")?;
        }
        f.write_str("\n`pinion doctor` shows every check.")
    }
}

impl std::error::Error for StartRefused {}

/// Trials of this build.
#[must_use]
pub fn trials() -> Trials {
    Trials {
        io_uring: || probe_io_uring().map_err(|refused| refused.error),
    }
}

/// The checks before a start. Nothing is made and nothing is left behind.
///
/// # Errors
/// When a check refuses.
pub fn check_start(config: &Config) -> Result<Granted, StartRefused> {
    decide(config, &Facts::gather(config, &trials()))
}

/// All checks for this configuration.
#[must_use]
pub fn examine(config: &Config) -> Vec<Check> {
    checks::run(config, &Facts::gather(config, &trials()))
}

fn decide(config: &Config, facts: &Facts) -> Result<Granted, StartRefused> {
    let checks = checks::run(config, facts);
    let reasons: Vec<String> = checks
        .iter()
        .filter(|c| c.state == State::Refuses)
        .map(Check::words)
        .collect();
    if !reasons.is_empty() {
        return Err(StartRefused { reasons });
    }
    let got = |name: &str| {
        checks
            .iter()
            .any(|c| c.name == name && c.state < State::Missing)
    };
    let wants_buffers = config.buffer_dir != BufferDir::None;
    let buffer_dir = (wants_buffers && got("bufferDir")).then(|| facts.buffers.dir.clone());
    let disk = facts.disk.as_ref();
    Ok(Granted {
        direct: got("direct"),
        memlock: got("memlock"),
        pinning: got("pinning"),
        buffer_dir,
        interrupt_cpus: disk
            .map(|disk| disk.interrupt_cpus.clone())
            .unwrap_or_default(),
        warnings: checks
            .iter()
            .filter(|c| c.state == State::Missing)
            .map(Check::words)
            .collect(),
    })
}

/// The checks before the start of a name server alone, which keeps nothing in buffers and hardly
/// writes.
///
/// # Errors
/// When rings are forbidden, or pinning is required and refused.
pub fn check_start_of_name_server(config: &Config) -> Result<Granted, StartRefused> {
    let facts = Facts::gather(config, &trials());
    let mut checks = checks::run(config, &facts);
    checks.retain(|check| matches!(check.name, "io_uring" | "pinning"));
    let (refusing, rest): (Vec<Check>, Vec<Check>) = checks
        .into_iter()
        .partition(|check| check.state == State::Refuses);
    if !refusing.is_empty() {
        return Err(StartRefused {
            reasons: refusing.iter().map(Check::words).collect(),
        });
    }
    let missing = |check: &&Check| check.state == State::Missing;
    Ok(Granted {
        direct: false,
        memlock: false,
        pinning: !rest
            .iter()
            .any(|check| check.name == "pinning" && check.state == State::Missing),
        buffer_dir: None,
        interrupt_cpus: Vec::new(),
        warnings: rest.iter().filter(missing).map(Check::words).collect(),
    })
}
