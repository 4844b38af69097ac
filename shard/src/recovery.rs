//! Recovery: from the files and the surviving buffer to a shard that serves.
//!
//! Whatever the surviving buffer holds beyond the completed writes is written to the segments and
//! synced first. The run chain covers the log up to the checkpoint; from there records are read in
//! order. The space behind the end is cleared, so that nothing stale can be taken for a record
//! later.
//!
//! Invariant: recovery is idempotent: killed at any moment, it finds the same records again.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use wire::message::{MAGIC_BLANK, RecordView, peek_len};

use crate::address;
use crate::delay::{DelayLevels, SCHEDULE_TOPIC};
use crate::error::StoreError;
use crate::event::{EVENT_TOPIC, Event};
use crate::io::{BLOCK_BYTES, Storage, StoreFile};
use crate::log::{AckPoint, BLANK_BYTES, Log, LogConfig, LogState, Segment};
use crate::memory::LockedRing;
use crate::offsets::OffsetTable;
use crate::queue::QueueTable;
use crate::run::{self, KeyEntry, RunMeta};
use crate::runtime::Driver;
use crate::seal::{self, Sealer};
use crate::segments::{self, SegmentFile};
use crate::shard::{Run, Shard, ShardConfig, ShardParts};
use crate::units::{NO_SEQUENCE, Unit, UnitRing};

/// Bytes read at once while scanning.
pub const SCAN_BYTES: usize = 1024 * 1024;
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
    /// Offsets of the settings file; commits in the log at or behind `saved_position` win.
    pub saved_offsets: Vec<SavedOffset>,
    /// Log position at which the settings file was written.
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

/// A recovered shard that has not been opened for writing.
pub struct Recovered<S: Storage> {
    config: ShardConfig,
    segments: VecDeque<SegmentFile<S>>,
    ready: VecDeque<SegmentFile<S>>,
    runs: Vec<(RunMeta, S::File, PathBuf)>,
    tables: Tables,
    tail_block: Vec<u8>,
    sealed_to: u64,
    /// What was found.
    pub report: RecoveryReport,
}

struct Tables {
    units: UnitRing,
    queues: QueueTable,
    offsets: OffsetTable,
    delay: DelayLevels,
    keys: VecDeque<KeyEntry>,
    events: VecDeque<(u64, Vec<u8>)>,
    last_store_timestamp: i64,
}

impl Tables {
    fn new(config: &ShardConfig) -> Self {
        let mut queues = QueueTable::default();
        let delay = DelayLevels::new(&config.delay_levels_ms, &mut queues);
        Self {
            units: UnitRing::new(config.units_max),
            queues,
            offsets: OffsetTable::default(),
            delay,
            keys: VecDeque::with_capacity(config.units_max),
            events: VecDeque::with_capacity(4096),
            last_store_timestamp: 0,
        }
    }

    fn apply(&mut self, event: &Event, position: u64) {
        match event {
            Event::Offset { topic, group, queue_id, offset } => {
                self.offsets.replay(topic, group, *queue_id, *offset, position);
            }
            Event::DelayProgress { level, offset } => self.delay.replay(*level, *offset),
            Event::TopicRemoved { topic } => {
                self.queues.remove_topic(topic);
                self.offsets.remove_topic(topic);
            }
            Event::GroupRemoved { group } => self.offsets.remove_group(group),
        }
    }

    fn take_run(&mut self, run: &run::LoadedRun) {
        for (position, bytes) in &run.events {
            if let Some(event) = Event::decode(bytes) {
                self.apply(&event, *position);
            }
        }
        for entry in &run.queues {
            let Some(index) = self.queues.open(&entry.topic, entry.queue_id) else { continue };
            let Some(queue) = self.queues.get_mut(index) else { continue };
            if queue.extents.is_empty() {
                queue.min_offset = entry.extent.first_offset;
            }
            queue.extents.push(entry.extent);
            queue.next_offset = entry.extent.end_offset();
            queue.readable = queue.next_offset;
            queue.ring_first_offset = queue.next_offset;
            queue.last_store_timestamp = entry.extent.last_timestamp;
        }
        self.last_store_timestamp = self.last_store_timestamp.max(run.meta.last_timestamp);
    }

    /// Takes one scanned record; `Err` says why the log cannot go on here.
    fn take_record(&mut self, view: &RecordView<'_>, position: u64) -> Result<(), String> {
        let topic = std::str::from_utf8(view.topic()).map_err(|_| "topic is not UTF-8")?;
        self.last_store_timestamp = self.last_store_timestamp.max(view.store_timestamp());
        if topic == EVENT_TOPIC {
            let event = Event::decode(view.body()).ok_or("internal record damaged")?;
            self.apply(&event, position);
            self.events.push_back((position, view.body().to_vec()));
            return Ok(());
        }
        let index = self.queues.open(topic, view.queue_id()).ok_or("too many queues")?;
        let Some(queue) = self.queues.get_mut(index) else { return Ok(()) };
        let offset = view.queue_offset() as u64;
        if offset != queue.next_offset {
            if queue.next_offset != 0 || !queue.extents.is_empty() {
                tracing::error!(topic, queue_id = view.queue_id(), expected = queue.next_offset,
                    found = offset, position, "queue offset jumps in the log");
                queue.extents.clear();
            }
            queue.min_offset = offset;
            queue.ring_first_offset = offset;
            queue.last_sequence = NO_SEQUENCE;
        }
        let (mut tags_code, unique, keys) = Shard::tag_and_keys(view.properties());
        if topic == SCHEDULE_TOPIC {
            tags_code = self.delay.due_ms(view.queue_id(), view.store_timestamp());
        }
        let unit = Unit {
            physical_offset: view.physical_offset(),
            tags_code,
            store_timestamp: view.store_timestamp(),
            size: view.total_len() as u32,
            crc: crc32fast::hash(view.raw()),
        };
        let end = position + view.total_len() as u64;
        queue.last_sequence = self.units.append(unit, index, offset, end, queue.last_sequence);
        queue.next_offset = offset + 1;
        queue.readable = offset + 1;
        queue.last_store_timestamp = view.store_timestamp();
        self.units.dispatch_next(u64::MAX);
        let words = keys.into_iter().flat_map(|keys| keys.split(|byte| *byte == b' '));
        let words = words.filter(|word| !word.is_empty()).take(crate::shard::KEYS_PER_MESSAGE_MAX);
        for key in unique.into_iter().chain(words) {
            let hash = run::key_hash(topic.as_bytes(), key);
            self.keys.push_back((hash, view.physical_offset()));
        }
        Ok(())
    }
}

/// Where bytes of the log come from while scanning.
struct Source<'a, S: Storage> {
    segments: &'a [SegmentFile<S>],
    segment_bytes: u64,
    chunk: Vec<u8>,
    chunk_start: u64,
    chunk_len: usize,
}

impl<S: Storage> Source<'_, S> {
    fn segment_of(&self, position: u64) -> Option<&SegmentFile<S>> {
        let first = self.segments.first()?.start;
        let index = position.checked_sub(first)? / self.segment_bytes;
        self.segments.get(usize::try_from(index).ok()?)
    }

    /// Up to `len` bytes at a position; fewer at the end of a segment's file.
    fn read(&mut self, position: u64, len: usize) -> Result<&[u8], StoreError> {
        let inside = position.checked_sub(self.chunk_start).map(|at| at as usize);
        let cached = inside.is_some_and(|at| at + len <= self.chunk_len);
        if !cached {
            self.fill(position, len)?;
        }
        let from = (position - self.chunk_start) as usize;
        let to = (from + len).min(self.chunk_len);
        Ok(self.chunk.get(from..to.max(from)).unwrap_or_default())
    }

    fn fill(&mut self, position: u64, len: usize) -> Result<(), StoreError> {
        let block = BLOCK_BYTES as u64;
        let start = position / block * block;
        let want = ((position - start) as usize + len).max(SCAN_BYTES).next_multiple_of(BLOCK_BYTES);
        self.chunk_start = start;
        self.chunk_len = 0;
        let Some(segment) = self.segment_of(position) else { return Ok(()) };
        let room = segment.start + self.segment_bytes - start;
        let want = want.min(room as usize);
        let (path, offset) = (segment.path.clone(), start - segment.start);
        let mut chunk = std::mem::take(&mut self.chunk);
        chunk.resize(want.max(chunk.len()), 0);
        let target = chunk.get_mut(..want).unwrap_or_default();
        let result = self.segment_of(position).map_or(Ok(0), |s| s.file.read_at(target, offset));
        self.chunk = chunk;
        self.chunk_len = result.map_err(|error| StoreError::file("read", path, error))?;
        Ok(())
    }
}

/// What stands at a position of the log.
enum Found<'a> {
    Record(RecordView<'a>),
    Blank(u64),
    Nothing(String),
}

fn look<'a, S: Storage>(
    source: &'a mut Source<'_, S>,
    shard: u16,
    position: u64,
) -> Result<Found<'a>, StoreError> {
    let Some(segment) = source.segment_of(position) else {
        return Ok(Found::Nothing("end of the last segment".to_owned()));
    };
    let left = segment.start + source.segment_bytes - position;
    let head = source.read(position, BLANK_BYTES as usize)?;
    let Some((size, magic)) = peek_len(head) else {
        return Ok(Found::Nothing("file ends".to_owned()));
    };
    let size = u64::from(size);
    if magic == MAGIC_BLANK && size == left {
        return Ok(Found::Blank(position + left));
    }
    if size == 0 && magic == 0 {
        return Ok(Found::Nothing("zeros".to_owned()));
    }
    if size > left {
        return Ok(Found::Nothing(format!("length {size} reaches over the segment")));
    }
    let bytes = source.read(position, size as usize)?;
    let view = match RecordView::parse(bytes) {
        Ok(view) => view,
        Err(error) => return Ok(Found::Nothing(format!("no whole record: {error}"))),
    };
    let expected = address::physical(shard, position);
    if view.physical_offset() != expected {
        let found = view.physical_offset();
        return Ok(Found::Nothing(format!("a record of physical offset {found}")));
    }
    if let Err(error) = view.check_body_crc() {
        return Ok(Found::Nothing(format!("body damaged: {error}")));
    }
    Ok(Found::Record(view))
}

/// Recovers one shard. Blocks; runs before the core serves.
pub fn recover<S: Storage>(
    storage: &S,
    setup: RecoverySetup<'_>,
) -> Result<Recovered<S>, StoreError> {
    let config = setup.config;
    let mut report = RecoveryReport::default();
    let files = segments::open_all(storage, &config, &mut report.repairs)?;
    report.replayed_bytes = segments::write_survivor(&files, &config, setup.survivor)?;
    let mut tables = Tables::new(&config);
    for saved in &setup.saved_offsets {
        let (topic, group) = (&saved.topic, &saved.group);
        tables.offsets.replay(topic, group, saved.queue_id, saved.offset, setup.saved_position);
    }
    let first = files.first().map_or(0, |segment| segment.start);
    let (mut runs, checkpoint) = load_runs(storage, &config, first, &files, &mut report)?;
    for (loaded, _, _) in &runs {
        tables.take_run(loaded);
    }
    let mut metas: Vec<(RunMeta, S::File, PathBuf)> =
        runs.drain(..).map(|(loaded, file, path)| (loaded.meta, file, path)).collect();
    let mut source = Source {
        segments: &files,
        segment_bytes: config.segment_bytes,
        chunk: Vec::new(),
        chunk_start: 0,
        chunk_len: 0,
    };
    report.scanned_from = checkpoint;
    let scan = Scan { storage, config: &config, progress: setup.progress };
    let sealed_to = scan.run(&mut source, &mut tables, &mut metas, checkpoint, &mut report)?;
    let end = report.end;
    let in_flight = setup.in_flight_bytes_max;
    let mut holds_record = |position| {
        Ok(matches!(look(&mut source, config.number, position)?, Found::Record(_)))
    };
    segments::check_rest(&config, &mut holds_record, &files, in_flight, &report)?;
    let tail_start = end / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    let tail_block = source.read(tail_start, (end - tail_start) as usize)?.to_vec();
    let (segments, ready) =
        segments::settle(storage, &config, files, end, in_flight, &mut report.repairs)?;
    (setup.progress)(1, 1);
    Ok(Recovered { config, segments, ready, runs: metas, tables, tail_block, sealed_to, report })
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
    let entries = storage.list(dir).map_err(|error| StoreError::file("list", dir, error))?;
    let mut starts: Vec<(u64, PathBuf)> = entries
        .iter()
        .filter_map(|entry| {
            let name = entry.name.strip_suffix(".run")?;
            let (shard, start) = address::parse_segment_name(name)?;
            (shard == config.number && entry.is_file).then(|| (start, dir.join(&entry.name)))
        })
        .collect();
    starts.sort();
    let log_end = segments.last().map_or(0, |segment| segment.start + config.segment_bytes);
    let mut loaded: LoadedRuns<S> = Vec::new();
    let mut expected = log_start;
    let mut trusted = true;
    for (start, path) in starts {
        if trusted && start == expected {
            match run::load(storage, &path, config.number) {
                Ok((file, run)) if run.meta.start == start && run.meta.end <= log_end => {
                    expected = run.meta.end;
                    loaded.push((run, file, path));
                    continue;
                }
                Ok(_) => report.repairs.push(format!("{}: does not fit the log", path.display())),
                Err(error) => report.repairs.push(format!("{}: {error}", path.display())),
            }
        }
        trusted &= start < log_start;
        report.runs_dropped += 1;
        storage.remove(&path).map_err(|error| StoreError::file("remove", &path, error))?;
    }
    report.runs = loaded.len();
    Ok((loaded, expected))
}

struct Scan<'a, S: Storage> {
    storage: &'a S,
    config: &'a ShardConfig,
    progress: &'a dyn Fn(u64, u64),
}

impl<S: Storage> Scan<'_, S> {
    /// Reads records from the checkpoint to the end of the log; returns how far runs cover it.
    fn run(
        &self,
        source: &mut Source<'_, S>,
        tables: &mut Tables,
        metas: &mut Vec<(RunMeta, S::File, PathBuf)>,
        checkpoint: u64,
        report: &mut RecoveryReport,
    ) -> Result<u64, StoreError> {
        let (mut position, mut sealed_to) = (checkpoint, checkpoint);
        let mut told = 0;
        let total = source.segments.last().map_or(0, |s| s.start + source.segment_bytes);
        loop {
            let rolled = position > sealed_to && position.is_multiple_of(self.config.segment_bytes);
            let full = position - sealed_to >= self.config.run_log_bytes
                || tables.units.held() >= self.config.run_units;
            if rolled || full {
                self.seal(source, tables, metas, (sealed_to, position))?;
                sealed_to = position;
            }
            if position - told >= 16 * SCAN_BYTES as u64 {
                told = position;
                (self.progress)(position - checkpoint, total - checkpoint);
            }
            match look(source, self.config.number, position)? {
                Found::Record(view) => {
                    let len = view.total_len() as u64;
                    if let Err(reason) = tables.take_record(&view, position) {
                        report.stopped_by = reason;
                        break;
                    }
                    report.records += 1;
                    position += len;
                }
                Found::Blank(next) => position = next,
                Found::Nothing(reason) => {
                    report.stopped_by = reason;
                    break;
                }
            }
        }
        report.end = position;
        Ok(sealed_to)
    }

    fn seal(
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
        let (content, touched) = seal::build_now(
            number,
            range,
            &tables.units,
            &mut tables.queues,
            &tables.keys,
            &tables.events,
        );
        let content_queues = content.queues.clone();
        let path = self.config.run_dir.join(run::file_name(number, range.0));
        let (bytes, meta) = run::encode(content);
        let file = run::write(self.storage, &path, &bytes)
            .map_err(|error| StoreError::file("write run", &path, error))?;
        seal::install(&content_queues, &touched, &mut tables.queues);
        tables.keys.clear();
        tables.events.clear();
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

    /// Queues that the log knows, as (topic, queue id).
    pub fn queues(&self) -> impl Iterator<Item = (&str, i32)> {
        self.tables.queues.iter().map(|(_, queue)| (&*queue.topic, queue.queue_id))
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
        ring.slice_mut(tail_start, self.tail_block.len()).copy_from_slice(&self.tail_block);
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
        let state = LogState { segments: adopt(self.segments), ready: adopt(self.ready), tail };
        let log_config = LogConfig {
            shard: config.number,
            dir: config.log_dir.clone(),
            segment_bytes: config.segment_bytes,
            ack,
            flush_interval_us,
        };
        let mut runs = BTreeMap::new();
        for (meta, file, path) in self.runs {
            let file = driver.adopt_file(file);
            runs.insert(meta.start, Run { meta, file, path });
        }
        let mut log = Log::new(log_config, ring, state);
        log.attach(driver)
            .map_err(|error| StoreError::file("register buffer for", &config.log_dir, error))?;
        let sealer = Sealer::new(self.sealed_to, self.tables.units.freed());
        let fresh = tail == 0;
        let mut shard = Shard::assemble(ShardParts {
            config,
            log,
            units: self.tables.units,
            queues: self.tables.queues,
            offsets: self.tables.offsets,
            delay: self.tables.delay,
            keys: self.tables.keys,
            events: self.tables.events,
            runs,
            sealer,
            last_store_timestamp: self.tables.last_store_timestamp,
        });
        if fresh {
            shard.zero_next = Some(FIRST_ZERO_BYTES);
        }
        Ok(shard)
    }
}
