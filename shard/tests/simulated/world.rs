//! A shard with its machine, and the steps a broker would take with it.

use std::path::{Path, PathBuf};

use shard::cold::{Answer, Question};
use shard::event::EVENT_TOPIC;
use shard::half::HALF_TOPIC;
use shard::io::sim::{Crash, SimRandom};
use shard::io::{Entry, OpenMode, Storage, StoreFile};
use shard::maintain::RetentionOrder;
use shard::memory::LockedRing;
use shard::queue::QueueIndex;
use shard::recovery::{Recovered, RecoveryReport, RecoverySetup, SavedOffset, recover};
use shard::runtime::sim::{SimConfig, SimDriver, SimMachine};
use shard::runtime::{Driver, Now};
use shard::select::{PullLimits, Selection, Wanted};
use shard::{AckPoint, Appended, NewMessage, Refusal, Shard, ShardConfig, StoreError, TIMER_TOPIC};
use wire::message::{MAGIC_BLANK, RecordView, peek_len, properties, tags};

use super::model::{Model, What};

pub const LOG_DIR: &str = "/store/commitlog";
pub const RUN_DIR: &str = "/store/consumequeue";
const STORE_ID: [u8; 16] = *b"simulated store!";
const RING: &str = "ring";
pub const DELAYS_MS: [i64; 3] = [20, 60, 200];

/// How a shard is set up.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub ack: AckPoint,
    pub segment_bytes: u64,
    pub ring_bytes: usize,
    pub units_max: usize,
    pub run_units: u64,
    pub run_log_bytes: u64,
    pub cold_slots: usize,
    pub disk_stop_percent: u32,
}

impl Setup {
    pub fn new(seed: u64, ack: AckPoint) -> Self {
        Self {
            seed,
            ack,
            segment_bytes: 128 * 1024,
            ring_bytes: 256 * 1024,
            units_max: 1024,
            run_units: 64,
            run_log_bytes: 100 * 1024,
            cold_slots: 4,
            disk_stop_percent: 90,
        }
    }

    fn config(&self) -> ShardConfig {
        ShardConfig {
            number: 3,
            local: 1,
            log_dir: PathBuf::from(LOG_DIR),
            run_dir: PathBuf::from(RUN_DIR),
            segment_bytes: self.segment_bytes,
            units_max: self.units_max,
            run_units: self.run_units,
            run_log_bytes: self.run_log_bytes,
            parked_max: 64,
            delay_levels_ms: DELAYS_MS.to_vec(),
            store_host: "127.0.0.1:10911".parse().unwrap(),
            disk_stop_percent: self.disk_stop_percent,
        }
    }
}

/// A message as a test makes it.
#[derive(Clone, Debug)]
pub struct Draft {
    pub topic: String,
    pub queue_id: i32,
    pub body: Vec<u8>,
    pub tag: String,
    pub keys: String,
    pub unique: String,
}

/// When a message is to be delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    Now,
    Level(i32),
    /// At a time in milliseconds.
    At(i64),
    /// Not at all: the one with this draft's unique key, due at this time, is not wanted any more.
    TakeBack(i64),
}

impl Draft {
    pub fn new(topic: &str, queue_id: i32, body: &[u8]) -> Self {
        let (topic, body) = (topic.to_owned(), body.to_vec());
        Self {
            topic,
            queue_id,
            body,
            tag: "a".into(),
            keys: String::new(),
            unique: String::new(),
        }
    }
}

/// The running part: gone after a crash.
pub struct Live {
    pub driver: SimDriver,
    pub shard: Shard,
    pub now: Now,
    answers: Vec<(u64, Answer)>,
    next_token: u64,
}

/// Everything.
pub struct World {
    pub machine: SimMachine,
    pub setup: Setup,
    pub model: Model,
    pub live: Option<Live>,
    pub random: SimRandom,
    pub saved: (Vec<SavedOffset>, u64),
    pub report: RecoveryReport,
    /// Steps taken, and the step at which the world is to crash.
    pub steps: u64,
    pub crash_at: Option<(u64, Crash)>,
    epoch: u64,
    followed: u64,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let config = SimConfig {
            seed: setup.seed,
            cold_slots: setup.cold_slots,
            ..SimConfig::default()
        };
        let machine = SimMachine::new(config);
        for dir in [LOG_DIR, RUN_DIR] {
            machine.storage().create_dirs(Path::new(dir)).unwrap();
        }
        let mut world = Self {
            machine,
            model: Model::default(),
            live: None,
            random: SimRandom::new(setup.seed ^ 0xabcd),
            saved: (Vec::new(), 0),
            report: RecoveryReport::default(),
            steps: 0,
            crash_at: None,
            epoch: 1,
            followed: 0,
            setup,
        };
        world.start();
        world
    }

    /// Recovers, as a start of the process does up to the point where it serves.
    pub fn recover(&mut self) -> Result<Recovered<shard::io::sim::SimStorage>, StoreError> {
        let survivor = (self.setup.ack == AckPoint::Buffered)
            .then(|| self.open_ring())
            .filter(|ring| {
                let header = ring.header();
                header.store_id() == STORE_ID
                    && header.epoch() == self.epoch
                    && header.is_formatted()
            });
        let setup = RecoverySetup {
            config: self.setup.config(),
            survivor: survivor.as_ref(),
            in_flight_bytes_max: self.setup.ring_bytes as u64,
            saved_offsets: self.saved.0.clone(),
            saved_position: self.saved.1,
            progress: &|_, _| {},
        };
        let mut recovered = recover(&self.machine.storage(), setup)?;
        recovered.set_local(1);
        self.report = recovered.report.clone();
        Ok(recovered)
    }

    fn open_ring(&self) -> LockedRing {
        self.machine
            .open_ring(RING, self.setup.ring_bytes)
            .unwrap()
            .ring
    }

    /// Opens a recovered shard; the model forgets what the crash took.
    pub fn open(&mut self, recovered: Recovered<shard::io::sim::SimStorage>) {
        self.epoch += 1;
        let ring = self.open_ring();
        ring.format(STORE_ID, self.epoch, 3);
        let mut driver = self.machine.driver();
        driver.refresh_clock();
        let end = recovered.end();
        let shard = recovered
            .open(&mut driver, ring, self.setup.ack, 5_000)
            .unwrap();
        let now = driver.now();
        self.live = Some(Live {
            driver,
            shard,
            now,
            answers: Vec::new(),
            next_token: 1,
        });
        self.model.cut(end);
        self.followed = end;
        self.model.recovered = end;
        self.model.acked = end;
    }

    pub fn start(&mut self) {
        let recovered = self
            .recover()
            .unwrap_or_else(|error| panic!("seed {}: {error}", self.setup.seed));
        self.open(recovered);
    }

    pub fn live(&mut self) -> &mut Live {
        self.live.as_mut().expect("the world runs")
    }

    pub fn shard(&mut self) -> &mut Shard {
        &mut self.live().shard
    }

    /// Crashes and checks that the promises of the mode allow what is left. Does not start again.
    pub fn crash(&mut self, kind: Crash) {
        self.live = None;
        self.machine.crash(kind);
        if kind == Crash::PowerLoss {
            self.machine.remove_ring(RING);
        }
    }

    /// The position that must survive a crash of this kind.
    pub fn promised(&self, kind: Crash) -> u64 {
        match (kind, self.setup.ack) {
            (Crash::Kill, _) | (_, AckPoint::Synced) => self.model.acked.max(self.model.recovered),
            _ => self.model.recovered,
        }
    }

    /// Crashes, starts again and checks everything.
    pub fn crash_and_check(&mut self, kind: Crash) {
        let promised = self.promised(kind);
        self.crash(kind);
        self.start();
        let end = self.report.end;
        assert!(
            end >= promised,
            "{kind:?} in {:?}: the log ends at {end} of {promised} promised ({})",
            self.setup.ack,
            self.report.stopped_by
        );
        self.check();
    }

    /// One turn of the core's loop. `false` once the world has crashed where it was asked to.
    pub fn step(&mut self) -> bool {
        for half in 0..2 {
            self.steps += 1;
            if self.crash_at.is_some_and(|(at, _)| self.steps >= at) {
                return false;
            }
            if half == 0 {
                let live = self.live();
                let soon = live.now.monotonic_us + 1_000;
                let deadline = live
                    .shard
                    .deadline_us(live.now)
                    .map_or(soon, |at| at.min(soon));
                live.driver.wait(Some(deadline));
            }
        }
        self.turn();
        true
    }

    fn turn(&mut self) {
        let live = self.live.as_mut().expect("the world runs");
        live.now = live.driver.now();
        while let Some(completion) = live.driver.next() {
            let back = live
                .shard
                .on_completion(live.now, &mut live.driver, completion);
            assert!(
                back.is_none(),
                "every completion belongs to the shard: {back:?}"
            );
        }
        live.shard.turn(live.now, &mut live.driver);
        live.shard.take_answers(&mut live.answers);
        let watermark = live.shard.watermark();
        assert!(watermark <= live.shard.log().tail());
        if live.shard.log().poison().is_none() {
            self.model.acked = self.model.acked.max(watermark);
        } else {
            assert!(watermark <= self.model.acked.max(watermark));
        }
        self.note_deliveries();
    }

    pub fn run(&mut self, turns: usize) {
        for _ in 0..turns {
            if !self.step() {
                return;
            }
        }
    }

    /// Until everything appended so far is acknowledged.
    pub fn settle(&mut self) {
        for _ in 0..20_000 {
            // A step at least: what is acknowledged becomes readable in the next turn.
            if !self.step() {
                return;
            }
            let shard = self.shard();
            if shard.watermark() >= shard.log().tail() {
                return;
            }
        }
        panic!("acknowledgements never came");
    }

    /// Until everything appended so far is on the device.
    pub fn settle_synced(&mut self) {
        for _ in 0..20_000 {
            let shard = self.shard();
            if shard.log().synced() >= shard.log().tail() || !self.step() {
                return;
            }
        }
        panic!("the log is never synced");
    }

    /// Follows the log to its tail and takes note of what the shard appended by itself: delayed
    /// messages that came due.
    pub fn note_deliveries(&mut self) {
        let log = self.live.as_ref().expect("the world runs").shard.log();
        while self.followed < log.tail() {
            let at = self.followed;
            let (size, magic) = peek_len(log.in_ring(at, 8).expect("just written")).unwrap();
            self.followed += u64::from(size);
            if magic == MAGIC_BLANK {
                continue;
            }
            let raw = log
                .in_ring(at, size as usize)
                .expect("just written")
                .to_vec();
            let view = RecordView::parse(&raw).unwrap();
            if self.model.knows(self.followed) {
                continue;
            }
            if view.topic() == EVENT_TOPIC.as_bytes() {
                let commit = super::pop::commit_in(view.body());
                commit
                    .into_iter()
                    .for_each(|what| self.model.push(self.followed, what));
                continue;
            }
            if view.prepared_transaction_offset() == shard::pop::POP_COPY_MARK {
                let topic = String::from_utf8(view.topic().to_vec()).unwrap();
                let (queue_id, offset) = (view.queue_id(), view.queue_offset());
                let what = What::Message {
                    topic,
                    queue_id,
                    offset,
                    raw,
                };
                self.model.push(self.followed, what);
                continue;
            }
            let topic = String::from_utf8(view.topic().to_vec()).unwrap();
            // Transactions have tests of their own.
            if topic != HALF_TOPIC && view.prepared_transaction_offset() <= 0 {
                assert!(view.prepared_transaction_offset() < 0, "names its origin");
                check_delivery(&view, &topic);
            }
            let (queue_id, offset) = (view.queue_id(), view.queue_offset());
            self.model.push(
                self.followed,
                What::Message {
                    topic,
                    queue_id,
                    offset,
                    raw,
                },
            );
        }
    }

    /// Appends a message. Refusals are handed back.
    pub fn append(&mut self, draft: &Draft) -> Result<Appended, Refusal> {
        self.append_at(draft, 0)
    }

    /// Appends a message that is delivered after its level's delay; level 0 is at once.
    pub fn append_at(&mut self, draft: &Draft, level: i32) -> Result<Appended, Refusal> {
        let when = if level > 0 {
            When::Level(level)
        } else {
            When::Now
        };
        self.append_when(draft, when)
    }

    /// Appends a message to be delivered at some time.
    pub fn append_when(&mut self, draft: &Draft, when: When) -> Result<Appended, Refusal> {
        let live = self.live.as_mut().expect("the world runs");
        let queue = live.shard.open_queue(&draft.topic, draft.queue_id).unwrap();
        let mut stored = Vec::new();
        properties::append(&mut stored, properties::TAGS, &draft.tag);
        if !draft.keys.is_empty() {
            properties::append(&mut stored, properties::KEYS, &draft.keys);
        }
        if !draft.unique.is_empty() {
            properties::append(&mut stored, properties::UNIQ_KEY, &draft.unique);
        }
        match when {
            When::Level(level) => {
                properties::append(&mut stored, properties::DELAY, &level.to_string());
            }
            When::TakeBack(_) => {
                let key = format!("{}+{}", draft.topic, draft.unique);
                properties::append(&mut stored, properties::TIMER_DEL_UNIQKEY, &key);
            }
            When::Now | When::At(_) => {}
        }
        let message = NewMessage {
            queue,
            flag: 7,
            sys_flag: 0,
            born_timestamp: live.now.wall_ms,
            born_host: "10.0.0.9:4711".parse().unwrap(),
            reconsume_times: 0,
            prepared_transaction_offset: 0,
            body: &draft.body,
            properties: &[&stored],
            tags_code: tags::tags_code(Some(&draft.tag)),
            unique_key: None,
            keys: (!draft.keys.is_empty()).then_some(draft.keys.as_bytes()),
        };
        let appended = match when {
            When::Now => live.shard.append(live.now, &message)?,
            When::Level(level) => live.shard.append_delayed(live.now, message, level)?,
            When::At(at) | When::TakeBack(at) => live.shard.append_timed(live.now, message, at)?,
        };
        let (_, at) = shard::address::split(appended.physical_offset).unwrap();
        let len = (appended.end - at) as usize;
        let raw = live
            .shard
            .log()
            .in_ring(at, len)
            .expect("just written")
            .to_vec();
        let (topic, queue_id) = if when == When::Now {
            (draft.topic.clone(), draft.queue_id)
        } else {
            (TIMER_TOPIC.to_owned(), 0)
        };
        let what = What::Message {
            topic,
            queue_id,
            offset: appended.queue_offset,
            raw,
        };
        self.model.push(appended.end, what);
        if self.setup.ack == AckPoint::Buffered {
            self.model.acked = self.model.acked.max(appended.end);
        }
        Ok(appended)
    }

    /// Appends, waiting through refusals that pass by themselves. `None` after a crash.
    pub fn append_patiently(&mut self, draft: &Draft, level: i32) -> Option<Appended> {
        let when = if level > 0 {
            When::Level(level)
        } else {
            When::Now
        };
        self.append_when_patiently(draft, when)
    }

    /// The same for any time.
    pub fn append_when_patiently(&mut self, draft: &Draft, when: When) -> Option<Appended> {
        for _ in 0..20_000 {
            match self.append_when(draft, when) {
                Ok(appended) => return Some(appended),
                Err(
                    Refusal::BufferFull { .. }
                    | Refusal::SegmentMissing { .. }
                    | Refusal::UnitsFull { .. }
                    | Refusal::DiskFull { .. },
                ) => {}
                Err(refusal) => panic!("{refusal}"),
            }
            if !self.step() {
                return None;
            }
        }
        panic!("refused without end");
    }

    pub fn commit(&mut self, topic: &str, group: &str, queue_id: i32, offset: i64) {
        let live = self.live.as_mut().expect("the world runs");
        let known = live
            .shard
            .offsets()
            .get(topic, group, queue_id)
            .map(|entry| entry.offset);
        let Ok(end) = live
            .shard
            .commit_offset(live.now, topic, group, queue_id, offset)
        else {
            return;
        };
        if known != Some(offset) {
            let (topic, group) = (topic.to_owned(), group.to_owned());
            self.model.push(
                end,
                What::Commit {
                    topic,
                    group,
                    queue_id,
                    offset,
                },
            );
        }
    }

    pub fn remove(&mut self, topic: &str) {
        let live = self.live.as_mut().expect("the world runs");
        if let Ok(end) = live.shard.remove_topic(live.now, topic) {
            self.model.push(
                end,
                What::Remove {
                    topic: topic.to_owned(),
                },
            );
        }
    }

    /// Saves the offsets as the settings file does.
    pub fn save_offsets(&mut self) {
        let live = self.live.as_mut().expect("the world runs");
        let offsets = live
            .shard
            .offsets()
            .iter()
            .map(|(topic, group, entry)| SavedOffset {
                topic: topic.into(),
                group: group.into(),
                queue_id: entry.queue_id,
                offset: entry.offset,
            });
        self.saved = (offsets.collect(), live.shard.log().tail());
    }

    /// Drops the oldest segment, whatever its age.
    pub fn retain(&mut self, segments_max: usize) -> usize {
        self.save_offsets();
        let live = self.live.as_mut().expect("the world runs");
        let order = RetentionOrder {
            expired_before_ms: i64::MAX,
            force_oldest: false,
            segments_max,
        };
        let first = live.shard.log().min_position();
        let count = live.shard.retain(&mut live.driver, order);
        if count > 0 {
            let boundary = first + count as u64 * self.setup.segment_bytes;
            self.model.dropped_before = self.model.dropped_before.max(boundary);
        }
        count
    }

    /// Asks a cold job and waits for its answer. `None` after a crash.
    pub fn ask(&mut self, question: Question) -> Option<Answer> {
        let live = self.live();
        let token = live.next_token;
        live.next_token += 1;
        assert!(live.shard.ask(token, question));
        for _ in 0..20_000 {
            if !self.step() {
                return None;
            }
            let answers = &mut self.live().answers;
            if let Some(at) = answers.iter().position(|(of, _)| *of == token) {
                return Some(answers.swap_remove(at).1);
            }
        }
        panic!("no answer");
    }

    /// One pull: the records and the next offset. `None` after a crash.
    pub fn pull(
        &mut self,
        queue: QueueIndex,
        offset: i64,
        wanted: &Wanted,
    ) -> Option<(Selection, Vec<Vec<u8>>)> {
        let limits = PullLimits {
            messages_max: 16,
            bytes_max: 64 * 1024,
        };
        let (mut scratch, mut units, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        let shard = self.shard();
        let selection = shard.select(queue, offset, wanted, limits, &mut scratch, &mut units);
        let chosen = matches!(selection, Selection::Chosen { .. });
        if chosen && shard.all_in_ring(&units) {
            shard.copy_from_ring(&units, &mut bytes);
            return Some((selection, split(&bytes)));
        }
        if !chosen && selection != Selection::OnDisk {
            return Some((selection, Vec::new()));
        }
        let wanted = wanted.clone();
        match self.ask(Question::Pull {
            queue,
            offset,
            wanted,
            limits,
        })? {
            Answer::Pull {
                selection,
                bytes,
                messages,
            } => {
                let records = split(&bytes);
                assert_eq!(records.len(), messages);
                Some((selection, records))
            }
            other => panic!("{other:?}"),
        }
    }

    /// Reads a queue from its first to its last readable message; tells the first offset too.
    /// `None` after a crash.
    pub fn read(&mut self, topic: &str, queue_id: i32) -> Option<(u64, Vec<Vec<u8>>)> {
        let Some(queue) = self.shard().queues().find(topic, queue_id) else {
            return Some((0, Vec::new()));
        };
        let (mut min, readable) = self.shard().bounds(queue).unwrap();
        let mut all = Vec::new();
        let mut next = min;
        while next < readable {
            let (selection, records) = self.pull(queue, next as i64, &Wanted::All)?;
            let min_now = self.shard().bounds(queue).unwrap().0;
            if min_now > min {
                // Retention dropped messages meanwhile.
                (min, next) = (min_now, min_now);
                all.clear();
                continue;
            }
            let Selection::Chosen { next_offset } = selection else {
                panic!("{topic} {queue_id} at {next} of {min}..{readable}: {selection:?}");
            };
            assert_eq!(
                records.len() as u64,
                next_offset - next,
                "{topic} {queue_id} at {next}"
            );
            next = next_offset;
            all.extend(records);
        }
        Some((min, all))
    }

    pub fn files(&self, dir: &str) -> Vec<Entry> {
        self.machine.storage().list(Path::new(dir)).unwrap()
    }

    /// The bytes of all segments in order.
    pub fn log_bytes(&self) -> Vec<u8> {
        let names = self.files(LOG_DIR).into_iter().map(|entry| entry.name);
        let read = |name| {
            self.machine
                .storage()
                .read_file(&Path::new(LOG_DIR).join(name))
                .unwrap()
        };
        names.flat_map(read).collect()
    }

    /// Changes bytes of the oldest segment behind everybody's back.
    pub fn overwrite_log(&self, offset: u64, bytes: &[u8]) {
        let name = &self.files(LOG_DIR)[0].name;
        self.overwrite(&Path::new(LOG_DIR).join(name), offset, bytes);
    }

    /// Changes bytes of the log at a position behind everybody's back, keeping the rest.
    pub fn overwrite_bytes(&self, position: u64, bytes: &[u8]) {
        let start = self.segment_start(position);
        let path = Path::new(LOG_DIR).join(shard::address::segment_name(3, start));
        let file = self.machine.storage().read_file(&path).unwrap();
        let (from, inside) = ((position - start) / 4096 * 4096, (position - start) % 4096);
        let mut block = file[from as usize..from as usize + 8192].to_vec();
        block[inside as usize..inside as usize + bytes.len()].copy_from_slice(bytes);
        self.overwrite(&path, from, &block);
    }

    /// Turns over the bits of one byte of the log behind everybody's back.
    pub fn flip_byte(&self, position: u64) {
        let start = self.segment_start(position);
        let path = Path::new(LOG_DIR).join(shard::address::segment_name(3, start));
        let file = self.machine.storage().read_file(&path).unwrap();
        self.overwrite_bytes(position, &[!file[(position - start) as usize]]);
    }

    /// Answers nobody has asked for through [`World::ask`].
    pub fn unclaimed_answers(&mut self) -> usize {
        self.live().answers.len()
    }

    /// Start of the segment that holds a position.
    pub fn segment_start(&self, position: u64) -> u64 {
        position / self.setup.segment_bytes * self.setup.segment_bytes
    }

    /// Changes bytes of a file behind everybody's back.
    pub fn overwrite(&self, path: &Path, offset: u64, bytes: &[u8]) {
        let file = self
            .machine
            .storage()
            .open(path, OpenMode::ReadWrite)
            .unwrap();
        let start = offset / 4096 * 4096;
        let inside = (offset - start) as usize;
        let mut blocks = vec![0; (inside + bytes.len()).next_multiple_of(4096)];
        file.read_at(&mut blocks, start).unwrap();
        blocks[inside..inside + bytes.len()].copy_from_slice(bytes);
        file.write_all_at(&blocks, start).unwrap();
        file.sync().unwrap();
    }

    pub fn remove_runs(&self) {
        for entry in self.files(RUN_DIR) {
            self.machine
                .storage()
                .remove(&Path::new(RUN_DIR).join(entry.name))
                .unwrap();
        }
    }
}

/// A timed message comes to its own topic, and not before its time.
fn check_delivery(view: &RecordView<'_>, topic: &str) {
    if topic == TIMER_TOPIC {
        return;
    }
    let real = properties::get_str(view.properties(), properties::REAL_TOPIC);
    assert_eq!(real, Some(topic), "delivered to its own topic");
    let due = properties::get_str(view.properties(), properties::TIMER_OUT_MS);
    let due: i64 = due.unwrap().parse().unwrap();
    let early = due - view.store_timestamp();
    assert!(early <= 0, "delivered {early} ms early");
    let left = properties::get_str(view.properties(), properties::TIMER_DEQUEUE_MS);
    let left: i64 = left.map_or(due, |text| text.parse().unwrap());
    assert!(left >= due, "left {} ms before its time", due - left);
    let level = i64::from(view.body()[0]) - 48;
    if (1..4).contains(&level) {
        let delay = DELAYS_MS[level as usize - 1];
        let age = view.store_timestamp() - view.born_timestamp();
        assert!(age >= delay, "level {level} delivered after {age} ms");
    }
}

/// Cuts concatenated records.
pub fn split(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    while let Some((size, _)) = wire::message::peek_len(bytes) {
        let (record, rest) = bytes.split_at(size as usize);
        records.push(record.to_vec());
        bytes = rest;
    }
    records
}
