//! Recovery: from the files and the surviving buffer to a shard that serves.
//!
//! Whatever the surviving buffer holds beyond the completed writes is written to the segments and
//! synced first. The run chain covers the log up to the checkpoint; from there records are read in
//! order, as far as end marks or the surviving buffer vouch for them. The space behind the end is
//! cleared, so that nothing stale can be taken for a record later.
//!
//! Invariants: recovery is idempotent: killed at any moment, it finds the same records again; what
//! it hands over is synced and ends with an end mark, so the next start believes it too.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use crate::address;
use crate::error::StoreError;
use crate::event::encode_end_mark;
use crate::io::{BLOCK_BYTES, Storage, StoreFile};
use crate::log::{AckPoint, BLANK_BYTES, Log, LogConfig, LogState, Segment, UNSYNCED_BYTES_MAX};
use crate::mark::{self, MARK_BYTES_MAX};
use crate::memory::LockedRing;
use crate::offsets::Clamped;
use crate::replay::Tables;
use crate::run::{self, RunMeta};
use crate::runtime::Driver;
pub use crate::scan::SCAN_BYTES;
use crate::scan::{Found, Source, look, next_span};
use crate::seal::{self, Sealer};
use crate::segments::{self, SegmentFile};
use crate::shard::{Run, Shard, ShardConfig, ShardParts};

/// Zeros written ahead in the first segment of a new store, in bytes.
pub const FIRST_ZERO_BYTES: u64 = 32 * 1024 * 1024;

/// A committed offset from the settings file.
#[derive(Clone, Debug)]
pub struct SavedOffset {
    /// Topic.
    pub topic: String,
    /// Group.
    pub group: String,
    /// Queue id.
    pub queue_id: i32,
    /// Offset.
    pub offset: i64,
}

/// What recovery starts from.
pub struct RecoverySetup<'a> {
    /// The shard.
    pub config: ShardConfig,
    /// The surviving buffer of the last process, if it belongs to this store and epoch.
    pub survivor: Option<&'a LockedRing>,
    /// Bytes that may have been in flight at a crash (size of the write buffer).
    pub in_flight_bytes_max: u64,
    /// Offsets of the settings file. They stand for commits whose segments retention has dropped;
    /// any commit that the log still holds wins.
    pub saved_offsets: Vec<SavedOffset>,
    /// Log position at which the settings file was written; only told in the report, because a
    /// power loss may have taken the log's end from under it.
    pub saved_position: u64,
    /// Told bytes scanned and bytes to scan.
    pub progress: &'a dyn Fn(u64, u64),
}

/// What recovery found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Where the scan began (the checkpoint).
    pub scanned_from: u64,
    /// End of the log.
    pub end: u64,
    /// Records scanned.
    pub records: u64,
    /// Bytes taken from the surviving buffer and written to the log.
    pub replayed_bytes: u64,
    /// Runs loaded.
    pub runs: usize,
    /// Runs dropped because they could not be trusted.
    pub runs_dropped: usize,
    /// Why the scan ended where it did.
    pub stopped_by: String,
    /// What was repaired, in words.
    pub repairs: Vec<String>,
}

impl RecoveryReport {
    fn note_saved_position(&mut self, position: u64) {
        let end = self.end;
        if position > end {
            self.repairs.push(format!(
                "the log ends at {end}, the offsets in the settings file were saved at {position}: \
                 commits in between are as the file has them"
            ));
        }
    }
}

/// A recovered shard that has not been opened for writing.
pub struct Recovered<S: Storage> {
    config: ShardConfig,
    segments: VecDeque<SegmentFile<S>>,
    ready: VecDeque<SegmentFile<S>>,
    runs: Vec<(RunMeta, S::File, PathBuf)>,
    tables: Tables,
    tail_block: Vec<u8>,
    sealed: Sealed,
    clamped: Vec<Clamped>,
    /// What was found.
    pub report: RecoveryReport,
}

/// How far runs cover the log.
#[derive(Default)]
struct Sealed {
    to: u64,
    /// Ends of runs that could not be written now (the disk may be full), as [`Sealer::mark`] takes
    /// them; the shard writes them later.
    owed: Vec<(u64, u64, usize, usize)>,
}

impl Sealed {
    /// Where the next run begins.
    fn next(&self) -> u64 {
        self.owed
            .last()
            .map_or(self.to, |(_, position, ..)| *position)
    }
}

/// Recovers one shard. Blocks; runs before the core serves.
pub fn recover<S: Storage>(
    storage: &S,
    setup: RecoverySetup<'_>,
) -> Result<Recovered<S>, StoreError> {
    let config = setup.config;
    let mut report = RecoveryReport::default();
    let mut files = segments::open_all(storage, &config, &mut report.repairs)?;
    report.replayed_bytes = segments::write_survivor(&mut files, &config, setup.survivor)?;
    // It vouches for all it has published: those records were whole before they were.
    let vouched = setup.survivor.map_or(0, |ring| ring.header().published());
    let mut tables = Tables::new(&config);
    for saved in &setup.saved_offsets {
        let (queue_id, offset) = (saved.queue_id, saved.offset);
        let table = &mut tables.offsets;
        table.replay(&saved.topic, &saved.group, queue_id, offset, 0);
    }
    let first = files.first().map_or(0, |segment| segment.start);
    let (mut runs, checkpoint) = load_runs(storage, &config, first, &files, &mut report)?;
    for (loaded, _, _) in &runs {
        tables.take_run(loaded);
    }
    let metas = runs.drain(..);
    let mut metas = metas
        .map(|(loaded, file, path)| (loaded.meta, file, path))
        .collect();
    let mut source = Source::new(&files, config.segment_bytes);
    report.scanned_from = checkpoint;
    let scan = Scan {
        storage,
        config: &config,
        progress: setup.progress,
        vouched,
    };
    let sealed = scan.run(&mut source, &mut tables, &mut metas, &mut report)?;
    let end = report.end;
    tables.scan_timers(storage, &metas);
    let clamped = tables.offsets.clamp(&tables.queues);
    report.note_saved_position(setup.saved_position);
    let in_flight = match setup.in_flight_bytes_max {
        0 => 0,
        bytes => bytes + UNSYNCED_BYTES_MAX,
    };
    let mut holds_record = |position| {
        let found = look(&mut source, config.number, position)?;
        Ok(matches!(found, Found::Record(_)))
    };
    segments::check_rest(&config, &mut holds_record, &files, in_flight, &report)?;
    let tail_start = end / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    let tail_block = source
        .read(tail_start, (end - tail_start) as usize)?
        .to_vec();
    let ends = segments::Ends {
        log: end,
        synced: checkpoint,
        clear: end.saturating_add(in_flight),
    };
    let (segments, ready) = segments::settle(storage, &config, files, ends, &mut report.repairs)?;
    (setup.progress)(1, 1);
    Ok(Recovered {
        config,
        segments,
        ready,
        runs: metas,
        tables,
        tail_block,
        sealed,
        clamped,
        report,
    })
}

type LoadedRuns<S> = Vec<(run::LoadedRun, <S as Storage>::File, PathBuf)>;

/// Loads the run chain that starts at the oldest segment; drops what does not fit.
fn load_runs<S: Storage>(
    storage: &S,
    config: &ShardConfig,
    log_start: u64,
    segments: &[SegmentFile<S>],
    report: &mut RecoveryReport,
) -> Result<(LoadedRuns<S>, u64), StoreError> {
    let dir = &config.run_dir;
    let entries = storage
        .list(dir)
        .map_err(|error| StoreError::file("list", dir, error))?;
    let mut starts: Vec<(u64, PathBuf)> = Vec::new();
    for entry in entries {
        let path = dir.join(&entry.name);
        let (run, ending) = entry.name.split_once(".run").unwrap_or((&entry.name, "?"));
        match address::parse_segment_name(run) {
            Some((shard, start)) if entry.is_file && shard == config.number => match ending {
                "" => starts.push((start, path)),
                ".tmp" | segments::REMOVING_SUFFIX => {
                    let removed = storage.remove(&path);
                    removed.map_err(|error| StoreError::file("remove", &path, error))?;
                }
                _ => report
                    .repairs
                    .push(format!("{}: not a run, left alone", path.display())),
            },
            Some(_) if entry.is_file => {}
            _ => report
                .repairs
                .push(format!("{}: not a run, left alone", path.display())),
        }
    }
    starts.sort();
    let mut loaded: LoadedRuns<S> = Vec::new();
    let mut expected = log_start;
    let mut trusted = true;
    for (start, path) in starts {
        if trusted && start == expected {
            match run::load(storage, &path, config.number) {
                Ok((file, run)) if fits_log(&run.meta, start, config, segments) => {
                    expected = run.meta.end;
                    loaded.push((run, file, path));
                    continue;
                }
                Ok(_) => report
                    .repairs
                    .push(format!("{}: does not fit the log", path.display())),
                Err(error) => report.repairs.push(format!("{}: {error}", path.display())),
            }
        }
        trusted &= start < log_start;
        report.runs_dropped += 1;
        storage
            .remove(&path)
            .map_err(|error| StoreError::file("remove", &path, error))?;
    }
    report.runs = loaded.len();
    Ok((loaded, expected))
}

/// Whether a run covers a range of one segment from `start` on.
fn fits_log<S: Storage>(
    meta: &RunMeta,
    start: u64,
    config: &ShardConfig,
    segments: &[SegmentFile<S>],
) -> bool {
    let holds = |segment: &&SegmentFile<S>| {
        segment.start <= start && start < segment.start + config.segment_bytes
    };
    let Some(segment) = segments.iter().find(holds) else {
        return false;
    };
    meta.start == start
        && meta.end > start
        && meta.end <= segment.start + config.segment_bytes
        && (meta.end == segment.start + config.segment_bytes
            || meta.end <= segment.start + segment.bytes)
}

struct Scan<'a, S: Storage> {
    storage: &'a S,
    config: &'a ShardConfig,
    progress: &'a dyn Fn(u64, u64),
    /// Position up to which the surviving buffer vouches for records.
    vouched: u64,
}

impl<S: Storage> Scan<'_, S> {
    /// Reads records from the checkpoint to the end of the log; returns how far runs cover it.
    fn run(
        &self,
        source: &mut Source<'_, S>,
        tables: &mut Tables,
        metas: &mut Vec<(RunMeta, S::File, PathBuf)>,
        report: &mut RecoveryReport,
    ) -> Result<Sealed, StoreError> {
        let checkpoint = report.scanned_from;
        let mut position = checkpoint;
        let mut sealed = Sealed {
            to: checkpoint,
            owed: Vec::new(),
        };
        let mut told = 0;
        let total = source
            .segments
            .last()
            .map_or(0, |s| s.start + source.segment_bytes);
        loop {
            let from = sealed.next();
            let rolled = position > from && position.is_multiple_of(self.config.segment_bytes);
            let owed = sealed
                .owed
                .last()
                .map_or(tables.units.freed(), |(sequence, ..)| *sequence);
            let full = position - from >= self.config.run_log_bytes
                || tables.units.appended() - owed >= self.config.run_units;
            if rolled || full {
                self.seal(source, tables, metas, &mut sealed, position)?;
            }
            if position - told >= 16 * SCAN_BYTES as u64 {
                told = position;
                (self.progress)(position - checkpoint, total - checkpoint);
            }
            let span = next_span(source, self.config.number, position, self.vouched)?;
            self.take_span(source, tables, (position, span.end), report)?;
            let from = std::mem::replace(&mut position, span.end);
            if let Some(reason) = span.stopped_by {
                report.stopped_by = reason;
                if let Some(hash) = span.unmarked {
                    position = self.append_mark(source, tables, (from, position), hash)?;
                }
                break;
            }
        }
        report.end = position;
        Ok(sealed)
    }

    /// Takes the believed records of a range.
    fn take_span(
        &self,
        source: &mut Source<'_, S>,
        tables: &mut Tables,
        (mut position, end): (u64, u64),
        report: &mut RecoveryReport,
    ) -> Result<(), StoreError> {
        let number = self.config.number;
        while position < end {
            match look(source, number, position)? {
                Found::Record(view) => {
                    let at = address::physical(number, position);
                    tables.take_record(&view, position).map_err(|reason| {
                        StoreError::Setting(format!(
                            "the message at physical offset {at}: {reason}"
                        ))
                    })?;
                    report.records += 1;
                    position += view.total_len() as u64;
                }
                Found::Blank(next) => position = next,
                Found::Nothing(reason) => {
                    return Err(StoreError::DamagedMiddle {
                        path: self.config.log_dir.clone(),
                        at: address::physical(number, position),
                        reason: format!("read differently the second time: {reason}"),
                        to: address::physical(number, end),
                    });
                }
            }
        }
        Ok(())
    }

    /// Sets the end mark that the last process could not set any more. Returns the log's new end.
    fn append_mark(
        &self,
        source: &mut Source<'_, S>,
        tables: &Tables,
        (from, end): (u64, u64),
        hash: u64,
    ) -> Result<u64, StoreError> {
        let config = self.config;
        let Some(segment) = source.segment_of(end) else {
            return Ok(end);
        };
        if end + MARK_BYTES_MAX + BLANK_BYTES > segment.start + config.segment_bytes {
            return Ok(end);
        }
        let body = encode_end_mark(from, hash);
        let physical = address::physical(config.number, end);
        let time = tables.last_store_timestamp;
        let fields = mark::fields(&body, physical, time, config.store_host);
        let mut record = vec![0; fields.encoded_len()];
        if fields.encode(&mut record).is_err() {
            return Ok(end);
        }
        segments::patch(segment, end - segment.start, &record)?;
        source.forget();
        Ok(end + record.len() as u64)
    }

    /// Writes the run that ends at `end`. Without room for it on disk it is owed, as long as memory
    /// holds what it is made of.
    fn seal(
        &self,
        source: &Source<'_, S>,
        tables: &mut Tables,
        metas: &mut Vec<(RunMeta, S::File, PathBuf)>,
        sealed: &mut Sealed,
        end: u64,
    ) -> Result<(), StoreError> {
        let mut failure = None;
        if sealed.owed.is_empty() {
            match self.write_run(source, tables, metas, (sealed.to, end)) {
                Ok(()) => {
                    sealed.to = end;
                    return Ok(());
                }
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = &failure {
            tracing::error!(shard = self.config.number, %error, "the queue index is written later");
        }
        if !tables.units.has_room(self.config.run_units) {
            let what = "no room to write the queue index, and too much of it for memory: make room";
            return Err(failure.unwrap_or_else(|| {
                StoreError::Setting(format!("{}: {what}", self.config.run_dir.display()))
            }));
        }
        let (keys, events) = (tables.keys.len(), tables.events.len());
        tables.events_marked = events as u64;
        sealed
            .owed
            .push((tables.units.appended(), end, keys, events));
        Ok(())
    }

    fn write_run(
        &self,
        source: &Source<'_, S>,
        tables: &mut Tables,
        metas: &mut Vec<(RunMeta, S::File, PathBuf)>,
        range: (u64, u64),
    ) -> Result<(), StoreError> {
        if let Some(segment) = source.segment_of(range.0) {
            let synced = segment.file.sync();
            synced.map_err(|error| StoreError::file("flush", &segment.path, error))?;
        }
        let number = self.config.number;
        let (content, touched, extents) = seal::build_now(
            number,
            range,
            &tables.units,
            &mut tables.queues,
            &tables.keys,
            &tables.events,
            tables.last_store_timestamp,
        );
        let path = self.config.run_dir.join(run::file_name(number, range.0));
        let (bytes, meta) = run::encode(content);
        let file = run::write(self.storage, &path, &bytes)
            .map_err(|error| StoreError::file("write run", &path, error))?;
        seal::install(&extents, &touched, &mut tables.queues);
        tables.keys.clear();
        tables.events.clear();
        tables.events_marked = 0;
        tables.timers.log.forget_claim();
        let appended = tables.units.appended();
        tables.units.free_to(appended);
        metas.push((meta, file, path));
        Ok(())
    }
}

impl<S: Storage> Recovered<S> {
    /// Number of the shard in the broker.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.config.number
    }

    /// Sets the number of the shard within its core.
    pub fn set_local(&mut self, local: u16) {
        self.config.local = local;
    }

    /// End of the log.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.report.end
    }

    /// Whether the log has something of a queue.
    #[must_use]
    pub fn holds(&self, topic: &str, queue_id: i32) -> bool {
        self.tables.queues.find(topic, queue_id).is_some()
    }

    /// Queues that the log knows, as (topic, queue id).
    pub fn queues(&self) -> impl Iterator<Item = (&str, i32)> {
        self.tables
            .queues
            .iter()
            .map(|(_, queue)| (&*queue.topic, queue.queue_id))
    }

    /// Opens the shard on a driver, with a freshly formatted ring of this process.
    pub fn open<D: Driver<Storage = S>>(
        self,
        driver: &mut D,
        mut ring: LockedRing,
        ack: AckPoint,
        flush_interval_us: u64,
    ) -> Result<Shard, StoreError> {
        let config = self.config;
        let tail = self.report.end;
        let tail_start = tail / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        ring.slice_mut(tail_start, self.tail_block.len())
            .copy_from_slice(&self.tail_block);
        let mut adopt = |files: VecDeque<SegmentFile<S>>| -> VecDeque<Segment> {
            files
                .into_iter()
                .map(|file| Segment {
                    start: file.start,
                    path: file.path,
                    file: driver.adopt_file(file.file),
                })
                .collect()
        };
        let state = LogState {
            segments: adopt(self.segments),
            ready: adopt(self.ready),
            tail,
        };
        let log_config = LogConfig {
            shard: config.number,
            dir: config.log_dir.clone(),
            segment_bytes: config.segment_bytes,
            ack,
            flush_interval_us,
            store_host: config.store_host,
        };
        let mut runs = BTreeMap::new();
        for (meta, file, path) in self.runs {
            let file = driver.adopt_file(file);
            runs.insert(meta.start, Run { meta, file, path });
        }
        let mut log = Log::new(log_config, ring, state);
        log.attach(driver)
            .map_err(|error| StoreError::file("register buffer for", &config.log_dir, error))?;
        let mut sealer = Sealer::new(self.sealed.to, self.tables.units.freed());
        for (sequence, position, keys, events) in self.sealed.owed {
            sealer.mark(sequence, position, keys, events);
        }
        let fresh = tail == 0;
        let mut shard = Shard::assemble(ShardParts {
            config,
            log,
            units: self.tables.units,
            queues: self.tables.queues,
            offsets: self.tables.offsets,
            pop: self.tables.pop,
            halves: self.tables.halves,
            timers: self.tables.timers,
            keys: self.tables.keys,
            events: self.tables.events,
            runs,
            sealer,
            last_store_timestamp: self.tables.last_store_timestamp,
        });
        shard.restate(&self.clamped);
        shard.end_first_scan();
        if fresh {
            shard.zero_next = Some(FIRST_ZERO_BYTES);
        }
        Ok(shard)
    }
}
