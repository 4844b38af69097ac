//! Owns what the system tells about itself, about this thread and about the server's processes.
//!
//! Invariant: everything here is a fact for the reader of a report; what cannot be read is left
//! out, never guessed.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::error::BenchError;

/// Nanoseconds of a tick of `/proc/<pid>/stat`: 100 a second on every Linux there is.
const TICK_NS: u64 = 10_000_000;

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

/// Nanoseconds since 1970.
pub fn wall_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

/// CPU times.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct CpuReading {
    /// Of this thread.
    pub own_ns: u64,
    /// This thread's wait for a CPU although it wanted to run.
    pub delay_ns: u64,
    /// Of the server's processes, if they are known.
    pub server_ns: Option<u64>,
}

impl CpuReading {
    /// What was spent so far.
    pub fn now(server: &[u32]) -> Self {
        let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let mut numbers = text
            .split_ascii_whitespace()
            .map(|number| number.parse().unwrap_or(0));
        Self {
            own_ns: numbers.next().unwrap_or(0),
            delay_ns: numbers.next().unwrap_or(0),
            server_ns: (!server.is_empty())
                .then(|| server.iter().filter_map(|pid| process_ns(*pid)).sum()),
        }
    }

    /// What was spent since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        let server = self.server_ns.zip(earlier.server_ns);
        Self {
            own_ns: self.own_ns.saturating_sub(earlier.own_ns),
            delay_ns: self.delay_ns.saturating_sub(earlier.delay_ns),
            server_ns: server.map(|(now, before)| now.saturating_sub(before)),
        }
    }
}

fn process_ns(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat_ticks(&text).map(|ticks| ticks * TICK_NS)
}

/// User and system ticks of a line of `/proc/<pid>/stat`; the name in it may hold anything.
fn stat_ticks(text: &str) -> Option<u64> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Process ids that a shell command prints.
pub fn pids(command: Option<&str>) -> Result<Vec<u32>, BenchError> {
    let Some(command) = command else {
        return Ok(Vec::new());
    };
    let failed = || format!("ask for the server's process ids: {command}");
    let output = Command::new("sh")
        .args(["-c", command])
        .output()
        .map_err(BenchError::io(failed()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text
        .split_ascii_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect())
}

fn line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

/// CPUs a process may use.
fn cpus_allowed(status: &str) -> Option<String> {
    let text = fs::read_to_string(status).ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .map(|list| list.trim().to_owned())
}

/// The commit of the working tree this runs in, with a plus when it was changed.
fn commit() -> Option<String> {
    let git = |words: &[&str]| {
        let output = Command::new("git").args(words).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() {
        commit
    } else {
        format!("{commit}+")
    })
}

/// File system type and mount point of a path.
pub fn file_system(path: &Path) -> Option<(String, String)> {
    let path = fs::canonicalize(path).ok()?;
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut found: Option<(String, String)> = None;
    for line in mounts.lines() {
        let mut fields = line.split(' ');
        let (Some(_), Some(point), Some(kind)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let deeper = found
            .as_ref()
            .is_none_or(|(_, known)| point.len() >= known.len());
        if path.starts_with(point) && deeper {
            found = Some((kind.to_owned(), point.to_owned()));
        }
    }
    found
}

/// What a reader needs to know about the machine and the two sides.
pub fn describe(server: &[u32]) -> Value {
    let cpus = line("/proc/cpuinfo");
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches(['\t', ' ', ':']).to_owned());
    let servers: Vec<Value> = server
        .iter()
        .map(|pid| {
            json!({
                "pid": pid,
                "command": line(&format!("/proc/{pid}/comm")),
                "cpus": cpus_allowed(&format!("/proc/{pid}/status")),
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": commit(),
        "kernel": line("/proc/sys/kernel/osrelease"),
        "cpu": model,
        "cpus": cpus.lines().filter(|line| line.starts_with("processor")).count(),
        "load": line("/proc/loadavg"),
        "generator_cpus": cpus_allowed("/proc/thread-self/status"),
        "servers": servers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_whatever_the_process_is_called() {
        let text = "7 (a) b (c) S 1 7 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 3 0 9 0 0";
        assert_eq!(stat_ticks(text), Some(200));
        assert_eq!(stat_ticks("7 nonsense"), None);
    }

    #[test]
    fn times_are_told_as_differences() {
        let now = CpuReading {
            own_ns: 10,
            delay_ns: 5,
            server_ns: Some(7),
        };
        let before = CpuReading {
            own_ns: 4,
            delay_ns: 5,
            server_ns: Some(2),
        };
        let spent = now.since(&before);
        assert_eq!(
            (spent.own_ns, spent.delay_ns, spent.server_ns),
            (6, 0, Some(5))
        );
        assert!(CpuReading::now(&[]).server_ns.is_none());
        assert!(CpuReading::now(&[std::process::id()]).server_ns.is_some());
    }

    #[test]
    fn the_file_system_of_a_path_is_that_of_the_deepest_mount() {
        let (kind, point) = file_system(Path::new("/proc/self")).unwrap();
        assert_eq!((kind.as_str(), point.as_str()), ("proc", "/proc"));
    }
}
