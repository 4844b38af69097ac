//! Looking up on disk: messages by key, offsets by store time.
//!
//! Invariant: each step needs one window at a time and keeps what it has seen, so that any number
//! of slots is enough.

use super::{Answer, Halt, Job, Question, Stage};
use crate::io::BLOCK_BYTES;
use crate::queue::QueueIndex;
use crate::runtime::Driver;
use crate::select::Selection;
use crate::shard::Shard;
use crate::units::Unit;

impl Shard {
    /// Candidates that are not in a run yet, and the runs to look into.
    pub(super) fn recent_keys(&self, hash: u64, from_ms: i64, to_ms: i64) -> Stage {
        let recent = self.keys.iter().rev().filter(|(key, _)| *key == hash);
        let found = recent.map(|(_, offset)| *offset).collect();
        let runs = self
            .runs
            .values()
            .filter(|run| run.meta.first_timestamp <= to_ms && run.meta.last_timestamp >= from_ms);
        let runs = runs.map(|run| run.meta.start).collect();
        Stage::KeyBlocks {
            runs,
            next: 0,
            in_run: Vec::new(),
            found,
        }
    }

    /// Collects candidates from the key blocks of runs, newest run first.
    pub(super) fn key_blocks<D: Driver>(
        &mut self,
        job: &mut Job,
        (mut runs, mut next, mut in_run, mut found): (Vec<u64>, usize, Vec<i64>, Vec<i64>),
        driver: &D,
    ) -> Result<Option<Answer>, Halt> {
        let Question::Key {
            hash,
            candidates_max,
            ..
        } = job.question
        else {
            return Ok(None);
        };
        while let Some((start, run)) = runs.last().and_then(|run| self.runs.get_key_value(run)) {
            let start = *start;
            let fences = &run.meta.key_fences;
            // Equal hashes may begin in the block before the first fence that is not smaller.
            let first = fences
                .partition_point(|fence| *fence < hash)
                .saturating_sub(1);
            let last = fences.partition_point(|fence| *fence <= hash);
            let (file, keys_at) = (run.file, run.meta.keys_at);
            for block in first.max(next)..last {
                let at = keys_at + (block * BLOCK_BYTES) as u64;
                let bytes = match self.loaded(driver, file, at, u64::MAX) {
                    Ok(bytes) => bytes,
                    Err(halt) => {
                        // What has been seen is kept, so that one window at a time is enough.
                        job.stage = Stage::KeyBlocks {
                            runs,
                            next: block,
                            in_run,
                            found,
                        };
                        return Err(halt);
                    }
                };
                let block = bytes.get(..BLOCK_BYTES).unwrap_or_default();
                if crate::run::block_is_whole(block) {
                    crate::run::keys_in_block(block, hash, &mut in_run);
                } else {
                    self.damaged_run(start, at);
                }
            }
            found.extend(std::mem::take(&mut in_run).into_iter().rev());
            next = 0;
            runs.pop();
            if found.len() >= candidates_max {
                break;
            }
        }
        found.truncate(candidates_max);
        let units = found.into_iter().map(|offset| Unit {
            physical_offset: offset,
            ..Unit::default()
        });
        job.stage = Stage::Units {
            units: units.collect(),
            selection: Selection::Empty,
        };
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
