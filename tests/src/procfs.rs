//! Owns the reading of `/proc` about a running broker.
//!
//! Invariant: a file that vanished between listing and reading is passed over; anything else that
//! cannot be read fails the test.

use std::fs;
use std::path::{Path, PathBuf};

/// The open flag of direct I/O, as `/proc/PID/fdinfo` shows it on this architecture.
#[cfg(target_arch = "x86_64")]
pub const O_DIRECT: u32 = 0o40000;
/// The open flag of direct I/O, as `/proc/PID/fdinfo` shows it on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub const O_DIRECT: u32 = 0o200_000;

/// An open file of a process.
#[derive(Debug)]
pub struct OpenFile {
    /// What the descriptor points to.
    pub path: PathBuf,
    /// The flags it was opened with.
    pub flags: u32,
}

/// A thread of a process.
#[derive(Debug)]
pub struct Thread {
    /// Its name.
    pub name: String,
    /// The CPUs it may run on.
    pub cpus_allowed: Vec<usize>,
}

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The value of a line such as `VmLck:     1024 kB` of a status file.
pub fn status_field(status: &str, name: &str) -> String {
    let mut lines = status.lines().filter_map(|line| line.split_once(':'));
    let found = lines.find(|(key, _)| *key == name);
    let (_, value) = found.unwrap_or_else(|| panic!("no {name} in status"));
    value.trim().to_owned()
}

/// Locked memory of a process in bytes.
pub fn locked_bytes(pid: u32) -> u64 {
    kilobytes(pid, "VmLck")
}

/// Bytes the process has given to disks so far.
pub fn written_bytes(pid: u32) -> u64 {
    let text = read(format!("/proc/{pid}/io"));
    let value = status_field(&text, "write_bytes");
    value.parse().expect("a number")
}

/// Resident memory of a process in bytes.
pub fn resident_bytes(pid: u32) -> u64 {
    kilobytes(pid, "VmRSS")
}

fn kilobytes(pid: u32, name: &str) -> u64 {
    let value = status_field(&read(format!("/proc/{pid}/status")), name);
    let number = value
        .split_whitespace()
        .next()
        .and_then(|text| text.parse::<u64>().ok());
    number.unwrap_or_else(|| panic!("{name}: {value}")) * 1024
}

/// Processor time used so far, user and system, in clock ticks of 10 ms.
pub fn cpu_ticks(pid: u32) -> u64 {
    let stat = read(format!("/proc/{pid}/stat"));
    let (_, rest) = stat
        .rsplit_once(')')
        .unwrap_or_else(|| panic!("stat: {stat}"));
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |at: usize| {
        fields[at]
            .parse::<u64>()
            .unwrap_or_else(|_| panic!("stat: {stat}"))
    };
    number(11) + number(12)
}

/// The files a process has open.
pub fn open_files(pid: u32) -> Vec<OpenFile> {
    let mut files = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("fd directory")
        .flatten()
    {
        let number = entry.file_name().into_string().expect("a number");
        let Ok(path) = fs::read_link(entry.path()) else {
            continue;
        };
        let Ok(info) = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")) else {
            continue;
        };
        let flags = u32::from_str_radix(&status_field(&info, "flags"), 8).expect("octal flags");
        files.push(OpenFile { path, flags });
    }
    files
}

/// How many sockets a process has open; segments come and go beside them.
pub fn open_sockets(pid: u32) -> usize {
    open_files(pid)
        .iter()
        .filter(|file| file.path.to_string_lossy().starts_with("socket:"))
        .count()
}

/// The lines of the memory map of a process.
pub fn maps(pid: u32) -> Vec<String> {
    read(format!("/proc/{pid}/maps"))
        .lines()
        .map(str::to_owned)
        .collect()
}

/// The threads of a process.
pub fn threads(pid: u32) -> Vec<Thread> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))
        .expect("task directory")
        .flatten()
    {
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else {
            continue;
        };
        let name = status_field(&status, "Name");
        let cpus_allowed = cpu_list(&status_field(&status, "Cpus_allowed_list"));
        threads.push(Thread { name, cpus_allowed });
    }
    threads
}

/// Reads a list such as `0,2-4`.
pub fn cpu_list(text: &str) -> Vec<usize> {
    let number = |text: &str| text.trim().parse::<usize>().expect("a CPU number");
    let ranges = text.split(',').filter(|range| !range.trim().is_empty());
    let ranges = ranges.map(|range| range.split_once('-').unwrap_or((range, range)));
    ranges
        .flat_map(|(first, last)| number(first)..=number(last))
        .collect()
}

/// The CPUs this test process may run on.
pub fn own_cpus() -> Vec<usize> {
    cpu_list(&status_field(
        &read("/proc/self/status"),
        "Cpus_allowed_list",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_with_ranges_are_read() {
        assert_eq!(cpu_list("0,2-4"), [0, 2, 3, 4]);
        assert_eq!(cpu_list("7"), [7]);
    }
}
