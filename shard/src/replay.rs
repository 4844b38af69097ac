//! The tables of a shard, made again from runs and records.
//!
//! Invariant: everything in them follows from what was read, in the order of the log; the events
//! kept for the next run are those of the records, and what other records say in their place.

use std::collections::VecDeque;
use std::path::PathBuf;

use wire::message::RecordView;

use crate::event::{EVENT_TOPIC, Event};
use crate::half::{self, HalfTable};
use crate::io::Storage;
use crate::offsets::OffsetTable;
use crate::pop::{PopEvent, PopTable};
use crate::queue::QueueTable;
use crate::rebuild::index_record;
use crate::run::{self, KeyEntry, RunMeta};
use crate::shard::ShardConfig;
use crate::timer::Timers;
use crate::units::{NO_SEQUENCE, UnitRing};

/// What a shard knows besides its log.
pub(crate) struct Tables {
    pub(crate) shard: u16,
    pub(crate) units: UnitRing,
    pub(crate) queues: QueueTable,
    pub(crate) offsets: OffsetTable,
    pub(crate) pop: PopTable,
    pub(crate) halves: HalfTable,
    pub(crate) timers: Timers,
    pub(crate) keys: VecDeque<KeyEntry>,
    pub(crate) events: VecDeque<(u64, Vec<u8>)>,
    /// Of those, how many belong to runs that are owed.
    pub(crate) events_marked: u64,
    pub(crate) last_store_timestamp: i64,
}

impl Tables {
    pub(crate) fn new(config: &ShardConfig) -> Self {
        let mut queues = QueueTable::default();
        let timers = Timers::new(&config.delay_levels_ms, &mut queues);
        Self {
            shard: config.number,
            units: UnitRing::new(config.units_max),
            queues,
            offsets: OffsetTable::default(),
            pop: PopTable::default(),
            halves: HalfTable::default(),
            timers,
            keys: VecDeque::with_capacity(config.units_max),
            events: VecDeque::with_capacity(4096),
            events_marked: 0,
            last_store_timestamp: 0,
        }
    }

    fn apply(&mut self, event: &Event, position: u64) {
        match event {
            Event::Offset {
                topic,
                group,
                queue_id,
                offset,
            } => {
                self.offsets
                    .replay(topic, group, *queue_id, *offset, position);
            }
            Event::TopicRemoved { topic } => {
                self.queues.remove_topic(topic, position);
                self.offsets.remove_topic(topic);
                self.pop.remove_topic(topic);
                self.timers.log.apply(event, position);
            }
            Event::GroupRemoved { group } => {
                self.offsets.remove_group(group);
                self.pop.remove_group(group);
            }
            Event::Pop(event) => self.apply_pop(event, position),
            Event::QueueEnds { queues } => {
                for (topic, queue_id, next_offset) in queues {
                    self.queues
                        .replay_end(topic, *queue_id, *next_offset, position);
                }
            }
            Event::TimerProgress { .. } | Event::TimersRolled { .. } => {
                self.timers.log.apply(event, position);
            }
            Event::DelayProgress { level, offset } => self.timers.moving.replay(*level, *offset),
            Event::EndMark { .. } => {}
            Event::HalfOpened { .. } | Event::HalfEnded { .. } | Event::HalfChecked { .. } => {
                self.halves.apply(event, position);
            }
        }
    }

    fn apply_pop(&mut self, event: &PopEvent, position: u64) {
        if let Some(offset) = self.pop.replay(event) {
            let name = event.name();
            let (topic, group, queue_id) = (&name.topic, &name.group, name.queue_id);
            self.offsets
                .replay(topic, group, queue_id, offset, position);
        }
    }

    pub(crate) fn take_run(&mut self, run: &run::LoadedRun) {
        for (position, bytes) in &run.events {
            if let Some(event) = Event::decode(bytes) {
                self.apply(&event, *position);
            }
        }
        for entry in &run.queues {
            let Some(index) = self.queues.open(&entry.topic, entry.queue_id) else {
                continue;
            };
            let Some(queue) = self.queues.get_mut(index) else {
                continue;
            };
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

    /// Finds the timed messages that are due next, so that a start delays none of them.
    pub(crate) fn scan_timers<S: Storage>(
        &mut self,
        storage: &S,
        metas: &[(RunMeta, S::File, PathBuf)],
    ) {
        let run_of = |start: u64| {
            let at = metas.binary_search_by_key(&start, |(meta, ..)| meta.start);
            let (meta, _, path) = metas.get(at.ok()?)?;
            Some((path.clone(), meta.units_at))
        };
        self.timers.scan_at_start(storage, &self.queues, run_of);
    }

    /// Takes one scanned record; `Err` says why the log cannot go on here.
    pub(crate) fn take_record(
        &mut self,
        view: &RecordView<'_>,
        position: u64,
    ) -> Result<(), String> {
        let topic = std::str::from_utf8(view.topic()).map_err(|_| "topic is not UTF-8")?;
        self.last_store_timestamp = self.last_store_timestamp.max(view.store_timestamp());
        if topic == EVENT_TOPIC {
            match Event::decode(view.body()) {
                Some(Event::EndMark { .. }) => {}
                Some(event) => {
                    self.apply(&event, position);
                    self.events.push_back((position, view.body().to_vec()));
                }
                // Its checksum is right, so another version wrote it. Nothing else is lost by it.
                None => tracing::warn!(position, "internal record of an unknown kind left out"),
            }
            return Ok(());
        }
        if let Some(event) = half::told_by(view, self.shard) {
            self.halves.apply(&event, position);
            self.keep_event(position, |bytes| event.encode(bytes));
        }
        let index = self
            .queues
            .open(topic, view.queue_id())
            .ok_or("too many queues")?;
        let Some(queue) = self.queues.get_mut(index) else {
            return Ok(());
        };
        let offset = view.queue_offset() as u64;
        if offset != queue.next_offset {
            if queue.next_offset != 0 || !queue.extents.is_empty() {
                tracing::error!(
                    topic,
                    queue_id = view.queue_id(),
                    expected = queue.next_offset,
                    found = offset,
                    position,
                    "queue offset jumps in the log"
                );
                queue.extents.clear();
            }
            queue.min_offset = offset;
            queue.ring_first_offset = offset;
            queue.last_sequence = NO_SEQUENCE;
        }
        let keys = &mut self.keys;
        let unit = index_record(view, |key| keys.push_back(key));
        if let Some(event) = self.timers.log.take_record(view, position) {
            let counts = (0, self.events_marked);
            let log = &mut self.timers.log;
            log.note(&mut self.events, counts, position, &event);
        }
        let end = position + view.total_len() as u64;
        queue.last_sequence = self
            .units
            .append(unit, index, offset, end, queue.last_sequence);
        queue.next_offset = offset + 1;
        queue.readable = offset + 1;
        queue.last_store_timestamp = view.store_timestamp();
        self.units.dispatch_next(u64::MAX);
        let mark = view.prepared_transaction_offset();
        if let Some(moved) = PopEvent::of_copy(mark, view.properties()) {
            self.apply_pop(&moved, position);
            self.keep_event(position, |bytes| moved.encode(bytes));
        }
        Ok(())
    }

    /// Keeps what a record says for the next run.
    fn keep_event(&mut self, position: u64, encode: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = Vec::new();
        encode(&mut bytes);
        self.events.push_back((position, bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mark;

    fn config() -> ShardConfig {
        ShardConfig {
            number: 0,
            local: 0,
            log_dir: PathBuf::new(),
            run_dir: PathBuf::new(),
            segment_bytes: 1 << 20,
            units_max: 64,
            run_units: 64,
            run_log_bytes: 1 << 20,
            parked_max: 1,
            delay_levels_ms: Vec::new(),
            store_host: "127.0.0.1:10911".parse().unwrap(),
            disk_stop_percent: 90,
        }
    }

    #[test]
    fn an_internal_record_of_a_later_version_does_not_end_the_log() {
        let mut tables = Tables::new(&config());
        for (body, kept) in [
            (vec![200, 1, 2, 3], 0),
            (vec![], 0),
            (vec![4, 0, 1, b'g'], 1),
        ] {
            let fields = mark::fields(&body, 0, 5, config().store_host);
            let mut record = vec![0; fields.encoded_len()];
            fields.encode(&mut record).unwrap();
            let view = RecordView::parse(&record).unwrap();
            assert_eq!(tables.take_record(&view, 0), Ok(()));
            assert_eq!(tables.events.len(), kept, "{body:?}");
        }
    }
}
