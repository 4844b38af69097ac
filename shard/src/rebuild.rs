//! Making a damaged run file again from the log, while the shard serves.
//!
//! The shard keeps the directory of every run in memory (its queues' extents), so the new file has
//! the same layout and readers only change the file they read.
//!
//! Invariant: the log is only read, and the old file stays in use until the new one is durable.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use wire::message::RecordView;

use crate::address;
use crate::event::{EVENT_TOPIC, Event};
use crate::half;
use crate::io::{FileJob, JobOutcome, JobOutcomeOf, OpenMode, Storage};
use crate::message::tag_and_keys;
use crate::pop::PopEvent;
use crate::queue::Extent;
use crate::run::{self, KeyEntry, RunContent, RunMeta, RunQueue, key_hash};
use crate::runtime::{Driver, Now};
use crate::scan::{Found, Source, look};
use crate::segments::SegmentFile;
use crate::shard::{KEYS_PER_MESSAGE_MAX, Shard, TokenKind};
use crate::timer::{TIMER_TOPIC, TimerLog, code_of};
use crate::units::{UNIT_BYTES, Unit};

/// Pause before a run is made again once more, in microseconds.
const RETRY_US: u64 = 10_000_000;

/// Runs to be made again.
#[derive(Default)]
pub(crate) struct Rebuilds {
    wanted: std::collections::BTreeSet<u64>,
    under_way: Option<(u64, RunMeta)>,
    retry_at_us: u64,
}

impl Rebuilds {
    /// Asks for a run.
    pub(crate) fn want(&mut self, start: u64) {
        if self
            .under_way
            .as_ref()
            .is_none_or(|(under_way, _)| *under_way != start)
        {
            self.wanted.insert(start);
        }
    }

    /// When there is a run to begin with, in monotonic microseconds.
    pub(crate) fn deadline_us(&self, now: Now) -> Option<u64> {
        let waits = self.under_way.is_none() && !self.wanted.is_empty();
        waits.then(|| self.retry_at_us.max(now.monotonic_us))
    }
}

/// The unit, and the keys to be indexed, of a stored record.
pub(crate) fn index_record(view: &RecordView<'_>, mut key: impl FnMut(KeyEntry)) -> Unit {
    let (mut tags_code, unique, keys) = tag_and_keys(view.properties());
    if view.topic() == TIMER_TOPIC.as_bytes() {
        tags_code = code_of(&[view.properties()]).to_tags_code();
    }
    let words = keys
        .into_iter()
        .flat_map(|keys| keys.split(|byte| *byte == b' '));
    let words = words
        .filter(|word| !word.is_empty())
        .take(KEYS_PER_MESSAGE_MAX);
    for word in unique.into_iter().chain(words) {
        key((key_hash(view.topic(), word), view.physical_offset()));
    }
    Unit {
        physical_offset: view.physical_offset(),
        tags_code,
        store_timestamp: view.store_timestamp(),
        size: view.total_len() as u32,
        crc: crc32fast::hash(view.raw()),
    }
}

/// Internal records of the range, and what its other records say in their place.
#[derive(Default)]
struct Told {
    timers: TimerLog,
    events: VecDeque<(u64, Vec<u8>)>,
}

impl Told {
    fn take(&mut self, view: &RecordView<'_>, shard: u16, position: u64) {
        if view.topic() == EVENT_TOPIC.as_bytes() {
            match Event::decode(view.body()) {
                None | Some(Event::EndMark { .. }) => {}
                Some(event) => {
                    self.timers.apply(&event, position);
                    self.events.push_back((position, view.body().to_vec()));
                }
            }
            return;
        }
        if let Some(event) = self.timers.take_record(view, position) {
            let events = &mut self.events;
            self.timers.note(events, (0, 0), position, &event);
        }
        let mark = view.prepared_transaction_offset();
        let moved = PopEvent::of_copy(mark, view.properties()).map(Event::Pop);
        for event in moved.into_iter().chain(half::told_by(view, shard)) {
            let mut bytes = Vec::new();
            event.encode(&mut bytes);
            self.events.push_back((position, bytes));
        }
    }
}

/// What the job needs to know.
struct Order {
    shard: u16,
    segment_path: PathBuf,
    segment_start: u64,
    segment_bytes: u64,
    meta: RunMeta,
    queues: Vec<RunQueue>,
}

impl Order {
    fn content<S: Storage>(self, storage: &S) -> io::Result<RunContent> {
        let file = storage.open(&self.segment_path, OpenMode::Read)?;
        let (start, path) = (self.segment_start, self.segment_path.clone());
        let segments = [SegmentFile::<S> {
            start,
            path,
            file,
            bytes: self.segment_bytes,
        }];
        let mut source = Source::new(&segments, self.segment_bytes);
        let mut content = RunContent {
            units: vec![0; self.meta.unit_count as usize * UNIT_BYTES],
            shard: self.shard,
            ..RunContent::default()
        };
        let mut position = self.meta.start;
        let mut told = Told::default();
        while position < self.meta.end {
            match look(&mut source, self.shard, position).map_err(io::Error::other)? {
                Found::Record(view) => {
                    told.take(&view, self.shard, position);
                    self.take(&view, &mut content);
                    position += view.total_len() as u64;
                }
                Found::Blank(next) => position = next,
                Found::Nothing(reason) => {
                    let at = address::physical(self.shard, position);
                    let text = format!("the log is damaged at {at} too: {reason}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
            }
        }
        content.events = told.events.into();
        (content.meta, content.queues) = (self.meta, self.queues);
        Ok(content)
    }

    fn take(&self, view: &RecordView<'_>, content: &mut RunContent) {
        if view.topic() == EVENT_TOPIC.as_bytes() {
            return;
        }
        let keys = &mut content.keys;
        let unit = index_record(view, |key| keys.push(key));
        let offset = view.queue_offset() as u64;
        let place = self.queues.iter().find(|queue| {
            queue.topic.as_bytes() == view.topic()
                && queue.queue_id == view.queue_id()
                && (queue.extent.first_offset..queue.extent.end_offset()).contains(&offset)
        });
        let Some(place) = place else { return };
        let index = u64::from(place.extent.unit_index) + offset - place.extent.first_offset;
        let at = index as usize * UNIT_BYTES;
        let mut encoded = Vec::with_capacity(UNIT_BYTES);
        unit.encode(&mut encoded);
        if let Some(target) = content.units.get_mut(at..at + UNIT_BYTES) {
            target.copy_from_slice(&encoded);
        }
    }
}

impl Shard {
    /// Starts to make a run again that a reader found damaged.
    pub(crate) fn rebuild_step<D: Driver>(&mut self, now: Now, driver: &mut D) {
        if self.rebuilds.under_way.is_some() || now.monotonic_us < self.rebuilds.retry_at_us {
            return;
        }
        let Some(start) = self.rebuilds.wanted.pop_first() else {
            return;
        };
        if self.sealer.is_installing(start) {
            // The queues make up the directory of the new file: all of them must know of it.
            self.rebuilds.wanted.insert(start);
            return;
        }
        let Some(run) = self.runs.get(&start) else {
            return;
        };
        let Some(segment) = self.log.segment_of(start) else {
            return;
        };
        let extent_of = |extents: &[Extent]| {
            extents
                .iter()
                .find(|extent| extent.run_start == start)
                .copied()
        };
        let queues = self.queues.iter().filter_map(|(_, queue)| {
            let extent = extent_of(&queue.extents)?;
            Some(RunQueue {
                topic: queue.topic.clone(),
                queue_id: queue.queue_id,
                extent,
            })
        });
        let meta = RunMeta {
            key_fences: Vec::new(),
            ..run.meta.clone()
        };
        let order = Order {
            shard: self.config.number,
            segment_path: segment.path.clone(),
            segment_start: segment.start,
            segment_bytes: self.config.segment_bytes,
            meta: meta.clone(),
            queues: queues.collect(),
        };
        let target = run.path.clone();
        let job = FileJob::Call(Box::new(move |storage: &D::Storage| {
            let (bytes, meta) = run::encode(order.content(storage)?);
            let file = run::write(storage, &target, &bytes)?;
            Ok(JobOutcomeOf::FileWith(file, meta.to_bytes()))
        }));
        self.rebuilds.under_way = Some((start, meta));
        driver.file_job(job, self.token(TokenKind::Rebuild, 0));
    }

    pub(crate) fn on_rebuilt<D: Driver>(
        &mut self,
        now: Now,
        driver: &mut D,
        result: io::Result<JobOutcome>,
    ) {
        let Some((start, meta)) = self.rebuilds.under_way.take() else {
            return;
        };
        let shard = self.config.number;
        match result {
            Ok(JobOutcome::FileWith(file, bytes)) => {
                let Some(run) = self.runs.get_mut(&start) else {
                    // Retention took the run in the meantime, under the same name.
                    driver.drop_file(file);
                    let path = self.config.run_dir.join(run::file_name(shard, start));
                    self.discard(driver, path);
                    return;
                };
                self.failures.rebuild.worked();
                run.meta = meta.completed_from(&bytes);
                let old = std::mem::replace(&mut run.file, file);
                tracing::warn!(shard, path = %run.path.display(), "queue index made again");
                self.forget_windows(driver, old);
                driver.drop_file(old);
            }
            Ok(_) => {}
            Err(error) => {
                self.rebuilds.retry_at_us = now.monotonic_us + RETRY_US;
                if let Some(times) = self.failures.rebuild.failed(now.monotonic_us) {
                    tracing::error!(shard, start, times, %error, "queue index not made again");
                }
            }
        }
    }
}
