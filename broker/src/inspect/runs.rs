//! Run files: whether each is whole, whether they follow each other, and the checksum of every
//! record they know.
//!
//! Invariant: one run's units are in memory at a time.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use shard::address;
use shard::event::Event;
use shard::io::BLOCK_BYTES;
use shard::io::real::{DirectMode, RealStorage};
use shard::run::{self, KEYS_PER_BLOCK, LoadedRun, UNITS_PER_BLOCK};
use shard::units::Unit;

/// One run file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunReport {
    /// The file.
    pub path: PathBuf,
    /// First log position it covers.
    pub start: u64,
    /// First position it does not cover.
    pub end: u64,
    /// Queue units.
    pub units: u32,
    /// Keys.
    pub keys: u32,
    /// Internal records.
    pub events: usize,
    /// Queues.
    pub queues: usize,
    units_at: u64,
    /// Units that named a whole record.
    matched: u32,
    broken: bool,
}

/// The runs of a shard.
#[derive(Debug, Default)]
pub struct RunChain {
    /// Runs in order.
    pub runs: Vec<RunReport>,
    /// What is wrong with them.
    pub problems: Vec<String>,
    current: Option<usize>,
    units: Vec<Unit>,
}

impl RunChain {
    /// Reads and checks the run files of a shard whose log begins at `log_start`.
    ///
    /// # Errors
    /// When the directory cannot be listed.
    pub fn open(dir: &Path, shard: u16, log_start: u64) -> io::Result<Self> {
        let mut chain = Self::default();
        let mut files: Vec<(u64, PathBuf)> = Vec::new();
        if dir.is_dir() {
            for entry in std::fs::read_dir(dir)? {
                let entry = entry?;
                let name = entry.file_name();
                let name = name.to_string_lossy();
                let parsed = name
                    .strip_suffix(".run")
                    .and_then(address::parse_segment_name);
                if let Some((_, start)) = parsed.filter(|(number, _)| *number == shard) {
                    files.push((start, entry.path()));
                }
            }
        }
        files.sort();
        let mut expected = log_start;
        for (start, path) in files {
            if start < log_start {
                continue;
            }
            if start != expected {
                chain.problems.push(format!(
                    "{}: begins at {start}, but the run before it ends at {expected}",
                    path.display()
                ));
            }
            expected = chain.add(shard, start, path).unwrap_or(start);
        }
        Ok(chain)
    }

    /// Checks one file; returns where it ends.
    fn add(&mut self, shard: u16, start: u64, path: PathBuf) -> Option<u64> {
        let storage = RealStorage::new(DirectMode::Auto);
        let loaded = match run::load(&storage, &path, shard) {
            Ok((_, loaded)) => loaded,
            Err(error) => {
                self.problems.push(format!("{}: {error}", path.display()));
                return None;
            }
        };
        let meta = &loaded.meta;
        let mut report = RunReport {
            start: meta.start,
            end: meta.end,
            units: meta.unit_count,
            keys: meta.key_count,
            events: loaded.events.len(),
            queues: loaded.queues.len(),
            units_at: meta.units_at,
            matched: 0,
            broken: false,
            path,
        };
        let before = self.problems.len();
        if let Err(error) = self.check(shard, start, &report.path, &loaded) {
            self.problems
                .push(format!("{}: {error}", report.path.display()));
        }
        report.broken = self.problems.len() > before;
        let end = report.end;
        self.runs.push(report);
        Some(end)
    }

    fn check(&mut self, shard: u16, start: u64, path: &Path, loaded: &LoadedRun) -> io::Result<()> {
        let (meta, shown) = (&loaded.meta, path.display());
        if meta.start != start || meta.end < meta.start {
            let (from, to) = (meta.start, meta.end);
            self.problems.push(format!(
                "{shown}: covers {from} to {to}, not what its name says"
            ));
        }
        let listed: u64 = loaded
            .queues
            .iter()
            .map(|queue| u64::from(queue.extent.count))
            .sum();
        if listed != u64::from(meta.unit_count) {
            let units = meta.unit_count;
            self.problems.push(format!(
                "{shown}: its queues list {listed} units, there are {units}"
            ));
        }
        for (position, bytes) in &loaded.events {
            if Event::decode(bytes).is_none() {
                self.problems.push(format!(
                    "{shown}: the event of position {position} is damaged"
                ));
            }
        }
        let file = File::open(path)?;
        let unit_blocks = (meta.unit_count as usize).div_ceil(UNITS_PER_BLOCK);
        each_block(&file, meta.units_at, unit_blocks, |at, block| {
            if !run::block_is_whole(block, meta.start, at) {
                self.problems
                    .push(format!("{shown} at {at}: a block of units is damaged"));
            }
        })?;
        let key_blocks = (meta.key_count as usize).div_ceil(KEYS_PER_BLOCK);
        let inside = address::physical(shard, meta.start)..address::physical(shard, meta.end);
        let mut left = meta.key_count as usize;
        each_block(&file, meta.keys_at, key_blocks, |at, block| {
            if !run::block_is_whole(block, meta.start, at) {
                self.problems
                    .push(format!("{shown} at {at}: a block of keys is damaged"));
            } else if keys(block)
                .take(left)
                .any(|offset| !inside.contains(&offset))
            {
                self.problems.push(format!(
                    "{shown} at {at}: a key of a record outside the run"
                ));
            }
            left = left.saturating_sub(KEYS_PER_BLOCK);
        })
    }

    /// Position up to which the runs cover the log without a hole.
    #[must_use]
    pub fn covered_to(&self, log_start: u64) -> u64 {
        let mut end = log_start;
        for run in &self.runs {
            if run.start != end || run.broken {
                break;
            }
            end = run.end;
        }
        end
    }

    /// What the runs know of the record at a position. Positions must not go back by a run.
    pub fn unit_of(&mut self, position: u64, physical_offset: i64) -> Option<Unit> {
        let index = self.runs.partition_point(|run| run.end <= position);
        let run = self.runs.get(index).filter(|run| run.start <= position)?;
        if self.current != Some(index) {
            self.units = read_units(run).unwrap_or_default();
            self.units.sort_unstable_by_key(|unit| unit.physical_offset);
            self.current = Some(index);
        }
        let at = self
            .units
            .binary_search_by_key(&physical_offset, |unit| unit.physical_offset)
            .ok()?;
        if let Some(run) = self.runs.get_mut(index) {
            run.matched += 1;
        }
        self.units.get(at).copied()
    }

    /// To be called after the walk: units that named nothing.
    pub fn finish(&mut self) {
        for run in self
            .runs
            .iter()
            .filter(|run| !run.broken && run.matched < run.units)
        {
            self.problems.push(format!(
                "{}: {} of {} units name no whole record",
                run.path.display(),
                run.units - run.matched,
                run.units
            ));
        }
    }
}

fn keys(block: &[u8]) -> impl Iterator<Item = i64> {
    let entries = block.chunks_exact(16).take(KEYS_PER_BLOCK);
    entries.filter_map(|entry| {
        entry
            .last_chunk::<8>()
            .map(|bytes| i64::from_be_bytes(*bytes))
    })
}

fn each_block(
    file: &File,
    from: u64,
    blocks: usize,
    mut each: impl FnMut(u64, &[u8]),
) -> io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    for number in 0..blocks {
        let at = from + (number * BLOCK_BYTES) as u64;
        file.read_exact_at(&mut block, at)?;
        each(at, &block);
    }
    Ok(())
}

fn read_units(run: &RunReport) -> io::Result<Vec<Unit>> {
    let file = File::open(&run.path)?;
    let (mut units, mut left) = (Vec::new(), run.units as usize);
    let blocks = left.div_ceil(UNITS_PER_BLOCK);
    each_block(&file, run.units_at, blocks, |at, block| {
        let here = left.min(UNITS_PER_BLOCK);
        if run::block_is_whole(block, run.start, at) {
            run::units_in_block(block, 0, here, &mut units);
        }
        left -= here;
    })?;
    Ok(units)
}
