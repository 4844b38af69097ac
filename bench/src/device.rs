//! Owns the probe of a disk: what the store's device gives one writer and one reader.
//!
//! Invariant: the file is written whole before it is measured, since a flush costs more on blocks
//! never written; direct I/O is used where the file system has it, and the report says when not.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::DeviceOptions;
use crate::error::BenchError;
use crate::figures::{histogram, quantile, record};
use crate::machine;
use crate::output::RunDir;
use crate::report::micros;

/// `O_DIRECT` of Linux on x86-64, and on arm64, where it has another number.
const O_DIRECT: i32 = if cfg!(target_arch = "aarch64") {
    0x1_0000
} else {
    0x4000
};
/// Alignment of buffers, offsets and lengths that every device takes.
const ALIGNMENT: usize = 4_096;
/// Bytes written ahead of the measurements at once.
const FILL_BYTES: usize = 1 << 20;
/// Size and time of the probe before a run.
const QUICK_BYTES: u64 = 64 << 20;
const QUICK_SECONDS: f64 = 0.3;
/// Least size of the file.
const BYTES_MIN: u64 = 16 << 20;

/// What is done to the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    Write,
    WriteAndSync,
    Read,
}

/// One test.
#[derive(Clone, Copy, Debug)]
struct Test {
    name: &'static str,
    work: Work,
    block: usize,
    /// Threads, each with one request in flight.
    depth: usize,
    /// Time between two requests, in milliseconds: a machine that sleeps between them wakes late.
    pause_ms: u64,
}

/// Every test, in order.
const TESTS: [Test; 9] = [
    test("append 4 KiB", Work::Write, 4 << 10, 1),
    test("append 4 KiB + sync", Work::WriteAndSync, 4 << 10, 1),
    Test {
        pause_ms: 5,
        ..test(
            "append 4 KiB, 5 ms apart, + sync",
            Work::WriteAndSync,
            4 << 10,
            1,
        )
    },
    test("append 64 KiB + sync", Work::WriteAndSync, 64 << 10, 1),
    test("append 256 KiB + sync", Work::WriteAndSync, 256 << 10, 1),
    test("append 256 KiB", Work::Write, 256 << 10, 1),
    test("append 256 KiB, 4 at once", Work::Write, 256 << 10, 4),
    test("read 256 KiB, 4 at once", Work::Read, 256 << 10, 4),
    test("read 1 MiB", Work::Read, 1 << 20, 1),
];

const fn test(name: &'static str, work: Work, block: usize, depth: usize) -> Test {
    Test {
        name,
        work,
        block,
        depth,
        pause_ms: 0,
    }
}

/// What a test found.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Found {
    name: &'static str,
    operations: u64,
    mb_per_s: f64,
    p50_us: f64,
    p99_us: Option<f64>,
    p999_us: Option<f64>,
    max_us: f64,
    /// Of writes that are flushed: the flush alone.
    sync_p50_us: Option<f64>,
}

/// A buffer whose used part is aligned.
struct Aligned {
    bytes: Vec<u8>,
    at: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut noise = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        let bytes: Vec<u8> = (0..len + ALIGNMENT).map(|_| noise()).collect();
        let at = bytes.as_ptr().align_offset(ALIGNMENT);
        Self { bytes, at, len }
    }

    fn used(&mut self) -> &mut [u8] {
        self.bytes
            .get_mut(self.at..self.at + self.len)
            .unwrap_or_default()
    }
}

/// The file, removed in the end.
struct Scratch {
    path: std::path::PathBuf,
    file: File,
    bytes: u64,
    direct: bool,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays behind is named so that it can be told what it is.
        let _ = fs::remove_file(&self.path);
    }
}

impl Scratch {
    fn create(dir: &Path, bytes: u64) -> io::Result<Self> {
        let path = dir.join(format!("pinion-bench-device-{}", std::process::id()));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let direct = options.clone().custom_flags(O_DIRECT).open(&path);
        let (file, direct) = match direct {
            Ok(file) => (file, true),
            Err(_) => (options.open(&path)?, false),
        };
        let scratch = Self {
            path,
            file,
            bytes: bytes / FILL_BYTES as u64 * FILL_BYTES as u64,
            direct,
        };
        let mut buffer = Aligned::new(FILL_BYTES);
        for at in (0..scratch.bytes).step_by(FILL_BYTES) {
            scratch.file.write_all_at(buffer.used(), at)?;
        }
        scratch.file.sync_data()?;
        Ok(scratch)
    }

    fn run(&self, test: Test, seconds: f64) -> Result<Found, BenchError> {
        let begun = Instant::now();
        let until = begun + Duration::from_secs_f64(seconds);
        let parts: Vec<Result<Part, BenchError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..test.depth)
                .map(|number| scope.spawn(move || self.run_part(test, number, until)))
                .collect();
            let ended = || BenchError::Option("a thread of the probe ended early".to_owned());
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(ended())))
                .collect()
        });
        let elapsed_s = begun.elapsed().as_secs_f64();
        let mut whole = Part::new()?;
        for part in parts {
            let part = part?;
            let failed = |error: hdrhistogram::errors::AdditionError| {
                BenchError::Option(format!("histogram: {error}"))
            };
            whole.times.add(&part.times).map_err(failed)?;
            whole.syncs.add(&part.syncs).map_err(failed)?;
        }
        let us = |value: u64| value as f64 / 1e3;
        let times = &whole.times;
        Ok(Found {
            name: test.name,
            operations: times.len(),
            mb_per_s: times.len() as f64 * test.block as f64 / 1e6 / elapsed_s,
            p50_us: us(times.value_at_quantile(0.5)),
            p99_us: quantile(times, 0.99).map(us),
            p999_us: quantile(times, 0.999).map(us),
            max_us: us(times.max()),
            sync_p50_us: (!whole.syncs.is_empty()).then(|| us(whole.syncs.value_at_quantile(0.5))),
        })
    }

    /// One thread's requests: every so many-th block from its own on, round and round.
    fn run_part(&self, test: Test, number: usize, until: Instant) -> Result<Part, BenchError> {
        let mut buffer = Aligned::new(test.block);
        let mut part = Part::new()?;
        let step = (test.block * test.depth) as u64;
        let first = (test.block * number) as u64;
        let mut at = first;
        // At least one, so that there is a figure however slow the disk is.
        while part.times.is_empty() || Instant::now() < until {
            if at + test.block as u64 > self.bytes {
                at = first;
            }
            let begun = Instant::now();
            self.one(test, buffer.used(), at, &mut part)
                .map_err(BenchError::io(format!(
                    "{} at {at} of {}",
                    test.name,
                    self.path.display()
                )))?;
            record(&mut part.times, begun.elapsed().as_nanos() as u64, 1);
            at += step;
            if test.pause_ms > 0 {
                std::thread::sleep(Duration::from_millis(test.pause_ms));
            }
        }
        Ok(part)
    }

    fn one(&self, test: Test, buffer: &mut [u8], at: u64, part: &mut Part) -> io::Result<()> {
        match test.work {
            Work::Read => self.file.read_exact_at(buffer, at),
            Work::Write => self.file.write_all_at(buffer, at),
            Work::WriteAndSync => {
                self.file.write_all_at(buffer, at)?;
                let begun = Instant::now();
                self.file.sync_data()?;
                record(&mut part.syncs, begun.elapsed().as_nanos() as u64, 1);
                Ok(())
            }
        }
    }
}

struct Part {
    times: Histogram<u64>,
    syncs: Histogram<u64>,
}

impl Part {
    fn new() -> Result<Self, BenchError> {
        Ok(Self {
            times: histogram()?,
            syncs: histogram()?,
        })
    }
}

fn probe(dir: &Path, bytes: u64, seconds: f64) -> Result<(bool, Vec<Found>), BenchError> {
    let scratch = Scratch::create(dir, bytes.max(BYTES_MIN)).map_err(BenchError::io(format!(
        "make a file of {bytes} bytes in {}",
        dir.display()
    )))?;
    let found: Result<Vec<_>, _> = TESTS
        .iter()
        .map(|test| scratch.run(*test, seconds))
        .collect();
    Ok((scratch.direct, found?))
}

/// The probe just before a run.
pub fn quick(dir: &Path) -> Result<Value, BenchError> {
    let (direct, found) = probe(dir, QUICK_BYTES, QUICK_SECONDS)?;
    Ok(json!({ "dir": dir, "direct": direct, "tests": found }))
}

/// Runs `device`.
pub fn run(options: &DeviceOptions) -> Result<bool, BenchError> {
    let (direct, found) = probe(&options.dir, options.bytes, options.seconds)?;
    let dir = RunDir::create(options.out.as_deref(), "device")?;
    let mut table = format!(
        "# device: {}, {}\n\n| µs | p50 | p99 | p99.9 | max | flush p50 | MB/s | operations |\n\
         |---|---|---|---|---|---|---|---|\n",
        options.dir.display(),
        if direct {
            "direct I/O"
        } else {
            "**buffered: the file system refuses direct I/O**"
        }
    );
    let text = |value: Option<f64>| value.map_or("–".to_owned(), |us| micros((us * 1e3) as u64));
    for test in &found {
        table.push_str(&format!(
            "| {} | {} | {} | {} | {} | {} | {:.0} | {} |\n",
            test.name,
            text(Some(test.p50_us)),
            text(test.p99_us),
            text(test.p999_us),
            text(Some(test.max_us)),
            text(test.sync_p50_us),
            test.mb_per_s,
            test.operations
        ));
    }
    println!("{table}");
    dir.write("table.md", table.as_bytes())?;
    let value = json!({
        "dir": options.dir,
        "file_system": machine::file_system(&options.dir),
        "direct": direct,
        "bytes": options.bytes,
        "tests": found,
    });
    dir.write_json("device.json", &value)?;
    dir.write_json("env.json", &machine::describe(&[]))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned() {
        let mut buffer = Aligned::new(8_192);
        let used = buffer.used();
        assert_eq!((used.as_ptr() as usize % ALIGNMENT, used.len()), (0, 8_192));
    }

    #[test]
    fn every_test_gives_figures_and_leaves_no_file() {
        let dir = std::env::current_exe()
            .unwrap()
            .parent()
            .unwrap()
            .to_owned();
        let (_, found) = probe(&dir, BYTES_MIN, 0.02).unwrap();
        assert_eq!(found.len(), TESTS.len());
        for test in &found {
            assert!(test.operations > 0 && test.mb_per_s > 0.0, "{test:?}");
            assert_eq!(
                test.sync_p50_us.is_some(),
                test.name.ends_with("sync"),
                "{test:?}"
            );
        }
        let left = fs::read_dir(&dir).unwrap().flatten();
        let own = format!("pinion-bench-device-{}", std::process::id());
        assert!(!left.into_iter().any(|entry| entry.file_name() == *own));
    }
}
