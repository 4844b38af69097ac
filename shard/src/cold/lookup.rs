//! Looking up on disk: messages by key, offsets by store time.
//!
//! Invariant: each step needs one window at a time and keeps what it has seen, so that any number
//! of slots is enough.

use wire::message::{RecordView, properties};

use super::{Answer, Halt, Job, Question, Stage};
use crate::io::BLOCK_BYTES;
use crate::queue::QueueIndex;
use crate::run::key_hash;
use crate::runtime::Driver;
use crate::select::Selection;
use crate::shard::Shard;
use crate::units::Unit;

/// A look-up by key.
#[derive(Clone, Debug)]
pub struct KeyQuestion {
    /// Topic.
    pub topic: String,
    /// Key.
    pub key: String,
    /// Whether only unique keys count.
    pub unique: bool,
    /// Only records stored at or after this time in milliseconds.
    pub from_ms: i64,
    /// Only records stored at or before this time in milliseconds.
    pub to_ms: i64,
    /// Records wanted at most.
    pub records_max: usize,
}

impl KeyQuestion {
    /// Whether a record is of the topic and the time and really has the key; its hash alone proves
    /// nothing.
    #[must_use]
    pub fn takes(&self, record: &[u8]) -> bool {
        let Ok(view) = RecordView::parse(record) else {
            return false;
        };
        let in_time = (self.from_ms..=self.to_ms).contains(&view.store_timestamp());
        if !in_time || view.topic() != self.topic.as_bytes() {
            return false;
        }
        let stored = view.properties();
        let key = self.key.as_bytes();
        if properties::get(stored, properties::UNIQ_KEY) == Some(key) {
            return true;
        }
        let keys = properties::get(stored, properties::KEYS).unwrap_or_default();
        !self.unique && keys.split(|byte| *byte == b' ').any(|word| word == key)
    }

    fn hash(&self) -> u64 {
        key_hash(self.topic.as_bytes(), self.key.as_bytes())
    }
}

/// Candidates by their places, to be read and looked at.
fn to_be_read(places: impl Iterator<Item = i64>) -> Stage {
    let units = places.map(|physical_offset| Unit {
        physical_offset,
        ..Unit::default()
    });
    Stage::Units {
        units: units.collect(),
        selection: Selection::Empty,
    }
}

impl Shard {
    /// Begins with the candidates that are not in a run yet, and notes the runs to look into.
    pub(super) fn recent_keys(&self, job: &mut Job, query: &KeyQuestion) {
        let hash = query.hash();
        let runs = self.runs.values().filter(|run| {
            run.meta.first_timestamp <= query.to_ms && run.meta.last_timestamp >= query.from_ms
        });
        job.key_runs = runs.map(|run| run.meta.start).collect();
        let recent = self.keys.iter().rev().filter(|(key, _)| *key == hash);
        job.stage = to_be_read(recent.map(|(_, offset)| *offset));
    }

    /// Collects the candidates of the newest run that is left. The next run's turn comes when they
    /// have been read and were not enough.
    pub(super) fn key_blocks<D: Driver>(
        &mut self,
        job: &mut Job,
        next: usize,
        mut in_run: Vec<i64>,
        driver: &D,
    ) -> Result<Option<Answer>, Halt> {
        let Question::Key(query) = &job.question else {
            return Ok(None);
        };
        let hash = query.hash();
        let newest = job.key_runs.last().and_then(|run| self.runs.get(run));
        if let Some(run) = newest {
            let (start, file, keys_at) = (run.meta.start, run.file, run.meta.keys_at);
            let fences = &run.meta.key_fences;
            // Equal hashes may begin in the block before the first fence that is not smaller.
            let first = fences
                .partition_point(|fence| *fence < hash)
                .saturating_sub(1);
            let last = fences.partition_point(|fence| *fence <= hash);
            for block in first.max(next)..last {
                let at = keys_at + (block * BLOCK_BYTES) as u64;
                let bytes = match self.loaded(driver, file, at, u64::MAX) {
                    Ok(bytes) => bytes,
                    Err(halt) => {
                        // What has been seen is kept, so that one window at a time is enough.
                        let next = block;
                        job.stage = Stage::KeyBlocks { next, in_run };
                        return Err(halt);
                    }
                };
                let block = bytes.get(..BLOCK_BYTES).unwrap_or_default();
                if crate::run::block_is_whole(block, start, at) {
                    crate::run::keys_in_block(block, hash, &mut in_run);
                } else {
                    self.damaged_run(start, at);
                }
            }
        }
        job.key_runs.pop();
        job.stage = to_be_read(in_run.into_iter().rev());
        Ok(None)
    }

    /// Offsets between which the answer to a question of time lies on disk.
    pub(super) fn extent_for_time(
        &self,
        queue: QueueIndex,
        timestamp: i64,
        lower: bool,
    ) -> (i64, i64) {
        let Some(queue) = self.queues.get(queue) else {
            return (0, 0);
        };
        let at = queue.extents.partition_point(|extent| {
            if lower {
                extent.last_timestamp < timestamp
            } else {
                extent.last_timestamp <= timestamp
            }
        });
        match queue.extents.get(at) {
            Some(extent) => (extent.first_offset as i64, extent.end_offset() as i64),
            None => (
                queue.ring_first_offset as i64,
                queue.ring_first_offset as i64,
            ),
        }
    }

    /// Bisects by store time over units on disk.
    pub(super) fn search<D: Driver>(
        &mut self,
        job: &mut Job,
        mut low: i64,
        mut high: i64,
        first: i64,
        driver: &D,
    ) -> Result<Option<Answer>, Halt> {
        let Question::Time {
            queue,
            timestamp,
            lower,
        } = job.question
        else {
            return Ok(None);
        };
        while low < high {
            let middle = low + (high - low) / 2;
            let units = match self.disk_units(queue, middle, 1, driver) {
                Ok(units) => units,
                Err(halt) => {
                    job.stage = Stage::Search { low, high, first };
                    return Err(halt);
                }
            };
            let time = units.first().map_or(i64::MAX, |unit| unit.store_timestamp);
            if if lower {
                time < timestamp
            } else {
                time <= timestamp
            } {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let min = self
            .queues
            .get(queue)
            .map_or(0, |queue| queue.min_offset as i64);
        Ok(Some(Answer::Offset(if lower {
            low
        } else {
            (low - 1).max(min)
        })))
    }
}
