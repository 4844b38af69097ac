//! Questions to the machine before serving: is there io_uring, which way log writes should take,
//! which CPUs there are and which of them takes the disk's interrupts.
//!
//! Invariant: nothing here changes the machine beyond a small file that is removed again, and
//! every answer carries the figures it rests on.
#![allow(unsafe_code)]

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use super::sys;
use super::uring::LogPort;
use crate::io::real::{RealFile, RealStorage};
use crate::io::{OpenMode, Storage, StoreFile};
use crate::memory::AlignedBuffer;

/// Time the log port probe may take.
pub const PROBE_BUDGET: Duration = Duration::from_millis(150);
/// Time it takes at most on a disk so slow that the budget holds too few writes.
pub const PROBE_BUDGET_MAX: Duration = Duration::from_secs(1);
/// Writes of each kind at most.
pub const PROBE_ROUNDS_MAX: usize = 48;
/// Writes of each kind at least, whatever the time.
const PROBE_ROUNDS_MIN: usize = 8;
/// Bytes of one probe write.
const PROBE_WRITE_BYTES: usize = 64 * 1024;
/// Bytes of the probe file.
const PROBE_FILE_BYTES: usize = 1024 * 1024;
/// Name of the probe file; start-up may remove one a killed process left.
pub const PROBE_FILE_NAME: &str = "log-port.probe";

/// Why io_uring cannot be used, with what would help.
#[derive(Debug, thiserror::Error)]
#[error("io_uring is not available: {error} (kernel.io_uring_disabled = {sysctl}); {advice}")]
pub struct UringRefused {
    /// The kernel's answer.
    pub error: io::Error,
    /// The sysctl's value, or "absent".
    pub sysctl: String,
    /// What to do.
    pub advice: &'static str,
}

/// Whether io_uring can be used here.
pub fn probe_io_uring() -> Result<(), UringRefused> {
    let error = match try_io_uring() {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    let sysctl = fs::read_to_string("/proc/sys/kernel/io_uring_disabled")
        .map_or_else(|_| "absent".to_owned(), |value| value.trim().to_owned());
    let advice = match (error.raw_os_error(), sysctl.as_str()) {
        (_, "1" | "2") => "run `sysctl kernel.io_uring_disabled=0`",
        (Some(libc::EPERM), _) => {
            "a seccomp filter forbids it: in a container, allow io_uring_setup, io_uring_enter and \
             io_uring_register"
        }
        (Some(libc::ENOMEM), _) => "raise the memlock limit, for example LimitMEMLOCK=infinity",
        (Some(libc::ENOSYS | libc::EINVAL), _) => "a kernel of version 6.1 or later is needed",
        _ => "see the kernel log",
    };
    Err(UringRefused {
        error,
        sysctl,
        advice,
    })
}

fn try_io_uring() -> io::Result<()> {
    let uring: IoUring = IoUring::builder().setup_cqsize(64).build(8)?;
    let mut probe = io_uring::Probe::new();
    uring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::AcceptMulti::CODE,
        opcode::RecvMulti::CODE,
        opcode::Send::CODE,
        opcode::Connect::CODE,
        opcode::PollAdd::CODE,
        opcode::WriteFixed::CODE,
        opcode::ReadFixed::CODE,
        opcode::Fsync::CODE,
        opcode::AsyncCancel::CODE,
        // Came with 6.0, as multishot receive did.
        opcode::SendZc::CODE,
    ];
    if needed.iter().all(|code| probe.is_supported(*code)) && uring.params().is_feature_ext_arg() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
}

/// Write and flush times of one way, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortFigures {
    /// Writes measured.
    pub rounds: usize,
    /// Median.
    pub p50_us: u64,
    /// 99th percentile (the worst of fewer than a hundred).
    pub p99_us: u64,
}

/// The choice and what it rests on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogPortProbe {
    /// The way to take.
    pub choice: LogPort,
    /// Through the ring.
    pub uring: PortFigures,
    /// Through a thread.
    pub thread: PortFigures,
}

impl fmt::Display for LogPortProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let choice = match self.choice {
            LogPort::Uring => "io_uring",
            LogPort::Thread => "writer thread",
        };
        write!(
            f,
            "{choice}: 64 KiB write and flush p50/p99 us: io_uring {}/{}, thread {}/{} ({} rounds)",
            self.uring.p50_us,
            self.uring.p99_us,
            self.thread.p50_us,
            self.thread.p99_us,
            self.uring.rounds.min(self.thread.rounds),
        )
    }
}

/// Measures both ways in turn on a small file in a directory of the store.
pub fn probe_log_port(storage: &RealStorage, dir: &Path) -> io::Result<LogPortProbe> {
    let path = dir.join(PROBE_FILE_NAME);
    match storage.remove(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = storage.open(&path, OpenMode::CreateNew)?;
    let measured = measure(file);
    storage.remove(&path)?;
    measured
}

fn measure(file: RealFile) -> io::Result<LogPortProbe> {
    let started = Instant::now();
    file.allocate(PROBE_FILE_BYTES as u64)?;
    file.write_all_at(&AlignedBuffer::new(PROBE_FILE_BYTES, false)?, 0)?;
    file.sync()?;
    let file = Arc::new(file);
    let mut uring = IoUring::new(8)?;
    let source = AlignedBuffer::new(PROBE_WRITE_BYTES, false)?;
    let (orders, thread_orders) = mpsc::channel::<u64>();
    let (thread_answers, answers) = mpsc::channel();
    let thread_file = Arc::clone(&file);
    let thread = std::thread::Builder::new()
        .name("disk-probe".to_owned())
        .spawn(move || {
            let Ok(source) = AlignedBuffer::new(PROBE_WRITE_BYTES, false) else {
                return;
            };
            while let Ok(offset) = thread_orders.recv() {
                let result = thread_file
                    .write_all_at(&source, offset)
                    .and_then(|()| thread_file.sync());
                if thread_answers.send(result).is_err() {
                    return;
                }
            }
        })?;
    let (mut by_uring, mut by_thread) = (Vec::new(), Vec::new());
    for round in 0..PROBE_ROUNDS_MAX {
        let elapsed = started.elapsed();
        let enough = round >= PROBE_ROUNDS_MIN && elapsed >= PROBE_BUDGET;
        if enough || (round >= 2 && elapsed >= PROBE_BUDGET_MAX) {
            break;
        }
        let offset = (round * PROBE_WRITE_BYTES % PROBE_FILE_BYTES) as u64;
        let before = Instant::now();
        write_by_uring(&mut uring, &file, &source, offset)?;
        by_uring.push(before.elapsed().as_micros() as u64);
        let before = Instant::now();
        let gone = || io::Error::other("the probe's thread ended");
        orders.send(offset).map_err(|_| gone())?;
        answers.recv().map_err(|_| gone())??;
        by_thread.push(before.elapsed().as_micros() as u64);
    }
    drop(orders);
    let _ = thread.join();
    let (uring, thread) = (figures(by_uring), figures(by_thread));
    let choice = if thread.p99_us < uring.p99_us {
        LogPort::Thread
    } else {
        LogPort::Uring
    };
    Ok(LogPortProbe {
        choice,
        uring,
        thread,
    })
}

fn write_by_uring(
    uring: &mut IoUring,
    file: &RealFile,
    source: &AlignedBuffer,
    offset: u64,
) -> io::Result<()> {
    let descriptor = types::Fd(file.file().as_raw_fd());
    let write = opcode::Write::new(descriptor, source.as_ptr(), source.len() as u32)
        .offset(offset)
        .build();
    let flush = opcode::Fsync::new(descriptor)
        .flags(types::FsyncFlags::DATASYNC)
        .build();
    for (entry, expected) in [(write, source.len() as i32), (flush, 0)] {
        // SAFETY: file and source are borrowed for the call, and their completion is awaited
        // below before it returns.
        if unsafe { uring.submission().push(&entry) }.is_err() {
            return Err(io::Error::other("the probe's ring is full"));
        }
        let result = loop {
            match uring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            if let Some(entry) = uring.completion().next() {
                break entry.result();
            }
        };
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        if result != expected {
            return Err(io::Error::from(io::ErrorKind::WriteZero));
        }
    }
    Ok(())
}

fn figures(mut times_us: Vec<u64>) -> PortFigures {
    times_us.sort_unstable();
    let at = |permille: usize| {
        let last = times_us.len().saturating_sub(1);
        times_us
            .get((times_us.len() * permille / 1000).min(last))
            .copied()
            .unwrap_or(0)
    };
    PortFigures {
        rounds: times_us.len(),
        p50_us: at(500),
        p99_us: at(990),
    }
}

/// Pins the calling thread to the n-th CPU it may use and returns that CPU's number.
pub fn pin_to_core(core: usize) -> io::Result<usize> {
    let cpus = sys::process_cpus();
    let Some(cpu) = cpus.get(core) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "core {core} does not exist: {} CPUs are allowed here",
                cpus.len()
            ),
        ));
    };
    sys::pin_to_cpu(*cpu)?;
    Ok(*cpu)
}

/// The CPUs this process may use.
#[must_use]
pub fn allowed_cores() -> &'static [usize] {
    sys::process_cpus()
}

/// The CPU that has taken most interrupts of the disk below a path, if it can be found out.
#[must_use]
pub fn disk_interrupt_cpu(path: &Path) -> Option<usize> {
    let disk = disk_name(path)?;
    let interrupts = fs::read_to_string("/proc/interrupts").ok()?;
    busiest_cpu(&interrupts, &interrupt_prefix(&disk))
}

/// Name of the whole disk (not the partition) a path lies on.
#[must_use]
pub fn disk_name(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    let link = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let whole = if link.join("partition").exists() {
        link.parent()?
    } else {
        &link
    };
    whole.file_name()?.to_str().map(str::to_owned)
}

/// How the disk's interrupts are called in /proc/interrupts.
fn interrupt_prefix(disk: &str) -> String {
    // nvme0n1 -> nvme0q1, nvme0q2, …
    if let Some(controller) = disk
        .strip_prefix("nvme")
        .and_then(|rest| rest.split('n').next())
    {
        return format!("nvme{controller}q");
    }
    // vda -> the name of its virtio device, virtio3-req.0.
    let device = fs::canonicalize(format!("/sys/block/{disk}/device")).ok();
    let name = device
        .as_deref()
        .and_then(Path::file_name)
        .and_then(|name| name.to_str());
    match name {
        Some(name) if name.starts_with("virtio") => format!("{name}-"),
        _ => disk.to_owned(),
    }
}

fn busiest_cpu(interrupts: &str, prefix: &str) -> Option<usize> {
    let mut lines = interrupts.lines();
    let columns: Vec<usize> = lines
        .next()?
        .split_whitespace()
        .filter_map(|name| name.strip_prefix("CPU")?.parse().ok())
        .collect();
    let mut totals = vec![0u64; columns.len()];
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        // The configuration interrupt of a virtio device is not the data path.
        let ours = words
            .iter()
            .any(|word| word.starts_with(prefix) && !word.ends_with("-config"));
        if ours {
            for (total, count) in totals.iter_mut().zip(words.iter().skip(1)) {
                *total += count.parse::<u64>().unwrap_or(0);
            }
        }
    }
    let (column, most) = totals.iter().enumerate().max_by_key(|(_, total)| **total)?;
    if *most == 0 {
        None
    } else {
        columns.get(column).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_io_uring() {
        probe_io_uring().unwrap();
    }

    #[test]
    fn the_busiest_column_of_the_disk_is_found() {
        let text = "           CPU0       CPU2\n 1:  9  9  x  timer\n \
                    24:  0  0  PCI virtio3-config\n \
                    25:  5  800  PCI virtio3-req.0\n 26: 99999 0 PCI virtio4-req.0\n";
        assert_eq!(busiest_cpu(text, "virtio3-"), Some(2));
        assert_eq!(busiest_cpu(text, "virtio9-"), None);
        assert_eq!(interrupt_prefix("nvme0n1"), "nvme0q");
    }

    #[test]
    fn percentiles_of_few_values_are_values() {
        let got = figures(vec![30, 10, 20]);
        assert_eq!((got.rounds, got.p50_us, got.p99_us), (3, 20, 30));
        assert_eq!(figures(vec![]), PortFigures::default());
    }

    #[test]
    fn the_log_port_probe_answers_within_its_budget_and_leaves_nothing() {
        let dir = crate::runtime::test_dir("probe");
        let storage = RealStorage::new(crate::io::real::DirectMode::Auto);
        let probe = probe_log_port(&storage, &dir).unwrap();
        assert!(probe.uring.rounds >= 2, "{probe}");
        assert!(probe.thread.p50_us > 0 && probe.uring.p50_us > 0, "{probe}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        fs::remove_dir_all(&dir).unwrap();
    }
}
