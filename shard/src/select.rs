//! Choosing what a pull gets: which units match, and copying records that the ring still holds.
//!
//! Invariant: only offsets below `readable` are looked at, and a selection names the next offset so
//! that no offset is ever passed over unseen.

use wire::message::filter::Filter;

use crate::queue::QueueIndex;
use crate::shard::Shard;
use crate::units::Unit;

/// Units one selection looks at, at most (RocketMQ: max(16000 bytes, 20 × maxMsgNums) of 20-byte
/// units).
pub const SCAN_UNITS_MAX: u64 = 800;

/// Which messages a reader wants.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// All of them.
    All,
    /// Those whose tag hash is one of these.
    Tags(Box<[i64]>),
    /// Those whose properties match.
    Matching(Filter),
}

impl Wanted {
    /// Whether the unit alone does not rule the message out.
    #[must_use]
    pub fn takes_unit(&self, unit: &Unit) -> bool {
        match self {
            Self::Tags(hashes) => hashes.contains(&unit.tags_code),
            Self::All | Self::Matching(_) => true,
        }
    }

    /// Whether the record, whose unit was taken, is wanted.
    #[must_use]
    pub fn takes_record(&self, record: &[u8]) -> bool {
        match self {
            Self::Matching(filter) => filter.matches_record(record),
            Self::All | Self::Tags(_) => true,
        }
    }
}

/// How much a reader takes at once.
#[derive(Clone, Copy, Debug)]
pub struct PullLimits {
    /// Messages at most.
    pub messages_max: usize,
    /// Bytes at most; the first message is always taken.
    pub bytes_max: usize,
}

/// What a selection found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Selection {
    /// Units were chosen; the next pull starts at `next_offset`.
    Chosen {
        /// Next offset.
        next_offset: u64,
    },
    /// Looked at some units, none matched.
    NoneMatched {
        /// Next offset.
        next_offset: u64,
    },
    /// Nothing readable at the offset yet, which is the queue's end.
    AtEnd,
    /// The offset lies beyond the end.
    TooLarge,
    /// The offset lies before the oldest kept message.
    TooSmall,
    /// The queue has no readable message at all.
    Empty,
    /// The units are in a run file; ask a cold job.
    OnDisk,
    /// No such queue.
    NoQueue,
}

/// Takes units in order until a limit is met. Returns the next offset.
pub(crate) fn choose(
    scanned: &[Unit],
    first_offset: u64,
    wanted: &Wanted,
    limits: PullLimits,
    out: &mut Vec<Unit>,
) -> u64 {
    let mut bytes = 0;
    let mut next = first_offset;
    for unit in scanned {
        if wanted.takes_unit(unit) {
            let size = unit.size as usize;
            let full = out.len() >= limits.messages_max || bytes + size > limits.bytes_max;
            if full && !out.is_empty() {
                return next;
            }
            bytes += size;
            out.push(*unit);
        }
        next += 1;
    }
    next
}

impl Shard {
    /// Oldest kept and one past the newest readable offset of a queue.
    #[must_use]
    pub fn bounds(&self, queue: QueueIndex) -> Option<(u64, u64)> {
        self.queues
            .get(queue)
            .filter(|q| !q.removed)
            .map(|q| (q.min_offset, q.readable))
    }

    /// Chooses the units of a pull; `scratch` and `out` are cleared first. A filter needs the
    /// records: those that have left the write buffer are for a cold job.
    pub fn select(
        &self,
        index: QueueIndex,
        offset: i64,
        wanted: &Wanted,
        limits: PullLimits,
        scratch: &mut Vec<Unit>,
        out: &mut Vec<Unit>,
    ) -> Selection {
        scratch.clear();
        out.clear();
        let Some(queue) = self.queues.get(index).filter(|queue| !queue.removed) else {
            return Selection::NoQueue;
        };
        if queue.readable == 0 || queue.readable == queue.min_offset {
            return if offset == queue.readable as i64 {
                Selection::AtEnd
            } else {
                Selection::Empty
            };
        }
        if offset < queue.min_offset as i64 {
            return Selection::TooSmall;
        }
        let offset = offset as u64;
        if offset == queue.readable {
            return Selection::AtEnd;
        }
        if offset > queue.readable {
            return Selection::TooLarge;
        }
        if offset < queue.ring_first_offset {
            return Selection::OnDisk;
        }
        let count = match wanted {
            Wanted::All => limits.messages_max as u64,
            _ => SCAN_UNITS_MAX.max(limits.messages_max as u64),
        };
        let last = queue.readable.min(offset.saturating_add(count.max(1))) - 1;
        if !self
            .units
            .collect(self.newest_slot(index), offset, last, scratch)
        {
            return Selection::OnDisk;
        }
        if let Wanted::Matching(filter) = wanted {
            return self.match_in_ring(scratch, offset, filter, limits, out);
        }
        let next_offset = choose(scratch, offset, wanted, limits, out);
        if out.is_empty() {
            Selection::NoneMatched { next_offset }
        } else {
            Selection::Chosen { next_offset }
        }
    }

    /// Takes units in order whose records match, as far as the write buffer holds the records.
    fn match_in_ring(
        &self,
        scanned: &[Unit],
        first_offset: u64,
        filter: &Filter,
        limits: PullLimits,
        out: &mut Vec<Unit>,
    ) -> Selection {
        let (mut next_offset, mut bytes) = (first_offset, 0);
        for unit in scanned {
            let size = unit.size as usize;
            let record = crate::address::split(unit.physical_offset)
                .and_then(|(_, position)| self.log.in_ring(position, size));
            let Some(record) = record else {
                if next_offset == first_offset {
                    return Selection::OnDisk;
                }
                break;
            };
            if filter.matches_record(record) {
                let full = out.len() >= limits.messages_max || bytes + size > limits.bytes_max;
                if full && !out.is_empty() {
                    break;
                }
                bytes += size;
                out.push(*unit);
            }
            next_offset += 1;
        }
        if out.is_empty() {
            Selection::NoneMatched { next_offset }
        } else {
            Selection::Chosen { next_offset }
        }
    }

    /// Whether the ring holds all these records.
    #[must_use]
    pub fn all_in_ring(&self, units: &[Unit]) -> bool {
        units.iter().all(|unit| {
            crate::address::split(unit.physical_offset)
                .is_some_and(|(_, position)| position >= self.log.ring_floor())
        })
    }

    /// Appends these records, all in the ring, to `out` as they are stored.
    pub fn copy_from_ring(&self, units: &[Unit], out: &mut Vec<u8>) {
        for unit in units {
            let record = crate::address::split(unit.physical_offset)
                .and_then(|(_, position)| self.log.in_ring(position, unit.size as usize));
            if let Some(record) = record {
                out.extend_from_slice(record);
            }
        }
    }

    /// First offset whose store time is at or after `timestamp` (`lower`), or last offset whose
    /// store time is at or before it. Answers from memory; `None` asks for a cold job.
    #[must_use]
    pub fn search_in_memory(&self, index: QueueIndex, timestamp: i64, lower: bool) -> Option<i64> {
        let queue = self.queues.get(index)?;
        let (min, end) = (queue.min_offset as i64, queue.readable as i64);
        if min == end {
            return Some(end);
        }
        if timestamp > queue.last_store_timestamp {
            return Some(if lower { end } else { end - 1 });
        }
        let ring_first = queue.ring_first_offset.max(queue.min_offset) as i64;
        let time_at = |offset: i64| {
            let sequence = self.units.seek(queue.last_sequence, offset as u64)?;
            Some(self.units.get(sequence)?.unit.store_timestamp)
        };
        if ring_first < end {
            let first_time = time_at(ring_first)?;
            let answer_in_ring = if lower {
                timestamp > first_time
            } else {
                timestamp >= first_time
            };
            if answer_in_ring || ring_first == min {
                return self.bisect(ring_first, end, timestamp, lower, &time_at);
            }
        }
        None
    }

    fn bisect(
        &self,
        first: i64,
        end: i64,
        timestamp: i64,
        lower: bool,
        time_at: &dyn Fn(i64) -> Option<i64>,
    ) -> Option<i64> {
        // Smallest offset with time >= timestamp (lower) or > timestamp (upper).
        let (mut low, mut high) = (first, end);
        while low < high {
            let middle = low + (high - low) / 2;
            let time = time_at(middle)?;
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
        Some(if lower { low } else { (low - 1).max(first) })
    }

    /// Whether the write buffer still holds the oldest message of a queue.
    #[must_use]
    pub fn holds_first_in_memory(&self, index: QueueIndex) -> bool {
        let Some(queue) = self.queues.get(index) else {
            return false;
        };
        if queue.ring_first_offset > queue.min_offset || queue.readable == queue.min_offset {
            return false;
        }
        let first = self.units.seek(queue.last_sequence, queue.min_offset);
        let unit = first
            .and_then(|sequence| self.units.get(sequence))
            .map(|slot| slot.unit);
        unit.is_some_and(|unit| self.all_in_ring(&[unit]))
    }

    /// Store time of the oldest message of a queue in milliseconds, -1 without one.
    #[must_use]
    pub fn first_store_timestamp(&self, index: QueueIndex) -> i64 {
        let Some(queue) = self.queues.get(index) else {
            return -1;
        };
        if queue.readable == queue.min_offset {
            return -1;
        }
        if let Some(extent) = queue.extents.first() {
            return extent.first_timestamp;
        }
        let first = self.units.seek(queue.last_sequence, queue.min_offset);
        first
            .and_then(|at| self.units.get(at))
            .map_or(-1, |slot| slot.unit.store_timestamp)
    }

    /// Store time of a message in milliseconds, if memory tells it.
    #[must_use]
    pub fn store_timestamp_in_memory(&self, index: QueueIndex, offset: u64) -> Option<i64> {
        let queue = self.queues.get(index)?;
        if let Some(extent) = queue.extent_of(offset) {
            // Between the ends of an extent the time is not exact; its end is close enough for
            // the reports that ask.
            let last = offset + 1 == extent.end_offset();
            return Some(if last {
                extent.last_timestamp
            } else {
                extent.first_timestamp
            });
        }
        let at = self.units.seek(queue.last_sequence, offset)?;
        Some(self.units.get(at)?.unit.store_timestamp)
    }

    /// Store time of the shard's oldest message in milliseconds, -1 without one.
    #[must_use]
    pub fn earliest_store_timestamp(&self) -> i64 {
        if let Some(run) = self.runs.values().find(|run| run.meta.unit_count > 0) {
            return run.meta.first_timestamp;
        }
        self.units
            .get(self.units.freed())
            .map_or(-1, |slot| slot.unit.store_timestamp)
    }
}
