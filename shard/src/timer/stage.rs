//! What is due within the next moments, with the records read ahead.
//!
//! Messages that are due after each other may stand anywhere in the log. So their records are not
//! read one by one as they are staged: once the first of them is due within half of the lead, all
//! that are staged are read in one sweep, in log order, by a few cold reads side by side.
//!
//! Invariant: items are in the order of delivery, and everything in the window is behind the first
//! of them.

use std::collections::VecDeque;

use super::progress::Key;
use super::window::Entry;

/// Messages staged at most, but for those that come in front of all others.
pub(super) const STAGED_MAX: usize = 16_384;
/// Bytes of their records at most.
pub(super) const STAGED_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Reads under way at once.
pub(super) const READS_MAX: usize = 4;
/// Records of one read at least, while there are enough.
const READ_RECORDS_MIN: usize = 64;
/// How long before its time a record is read at the latest, in milliseconds.
const READ_LEAD_MS: i64 = 500;
/// How often messages in the write buffer are looked at, in milliseconds; it may give them up.
const LOOK_MS: i64 = 100;

/// What is known of a record.
pub(super) enum Record {
    /// Still to be read, or in the write buffer.
    Wanted,
    Reading,
    Ready(Vec<u8>),
    /// Damaged on disk.
    Gone,
}

pub(super) struct Staged {
    pub(super) entry: Entry,
    pub(super) record: Record,
    pub(super) attempts: u8,
}

/// A cold job that reads records of staged messages.
pub(super) struct Read {
    pub(super) token: u64,
    pub(super) keys: Vec<Key>,
}

/// The staged messages.
#[derive(Default)]
pub(crate) struct Stage {
    pub(super) items: VecDeque<Staged>,
    bytes: usize,
    pub(super) reads: Vec<Read>,
    pub(super) next_token: u64,
    /// No delivery before this time, after a refusal.
    pub(super) paused_until_us: u64,
    /// No read before this time, after a failed one.
    pub(super) retry_read_us: u64,
    /// When the next record may have to be read, in milliseconds; only if `reads_wanted`.
    read_at_ms: i64,
    reads_wanted: bool,
    /// A claim that could not be stored yet.
    pub(super) owed: Option<Key>,
}

impl Stage {
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn first_key(&self) -> Option<Key> {
        self.items.front().map(|item| item.entry.key)
    }

    /// Whether this message may be staged now. One that comes first always may, because nothing
    /// else can leave before it.
    pub(super) fn takes(&self, key: Key) -> bool {
        let first = self.first_key().is_none_or(|first| key < first);
        first || (self.items.len() < STAGED_MAX && self.bytes < STAGED_BYTES_MAX)
    }

    pub(super) fn insert(&mut self, entry: Entry) {
        self.bytes += entry.size as usize;
        self.want_read(entry.key.due_ms - READ_LEAD_MS);
        let item = Staged {
            entry,
            record: Record::Wanted,
            attempts: 0,
        };
        let at = self
            .items
            .partition_point(|other| other.entry.key < entry.key);
        self.items.insert(at, item);
    }

    pub(super) fn take_first(&mut self) -> Option<Staged> {
        let item = self.items.pop_front()?;
        self.bytes -= item.entry.size as usize;
        Some(item)
    }

    pub(super) fn put_back(&mut self, item: Staged) {
        self.bytes += item.entry.size as usize;
        self.items.push_front(item);
    }

    pub(super) fn find(&mut self, key: Key) -> Option<&mut Staged> {
        let at = self
            .items
            .binary_search_by_key(&key, |item| item.entry.key)
            .ok()?;
        self.items.get_mut(at)
    }

    /// Looks at what is to be read at this time, or earlier.
    pub(super) fn want_read(&mut self, at_ms: i64) {
        if !self.reads_wanted || at_ms < self.read_at_ms {
            (self.reads_wanted, self.read_at_ms) = (true, at_ms);
        }
    }

    /// When records may have to be read, in milliseconds; `None` while as many reads as may be are
    /// under way, whose end brings the next look.
    pub(super) fn next_look_ms(&self) -> Option<i64> {
        let may = self.reads_wanted && self.reads.len() < READS_MAX;
        may.then_some(self.read_at_ms)
    }

    /// The records of the next sweep in log order, part by part: those that must come from disk
    /// because they stand in front of `safe_from` in the log, where the write buffer has given them
    /// up or soon will.
    pub(super) fn next_sweep(&mut self, now_ms: i64, safe_from: u64) -> Vec<Vec<Entry>> {
        let free = READS_MAX.saturating_sub(self.reads.len());
        if free == 0 || !self.reads_wanted || now_ms < self.read_at_ms {
            return Vec::new();
        }
        self.reads_wanted = false;
        let (mut first_ms, mut buffered) = (i64::MAX, false);
        let mut chosen = Vec::new();
        for item in &self.items {
            if matches!(item.record, Record::Wanted) {
                if item.entry.key.position < safe_from {
                    first_ms = first_ms.min(item.entry.key.due_ms);
                    chosen.push(item.entry);
                } else {
                    buffered = true;
                }
            }
        }
        if buffered {
            self.want_read(now_ms + LOOK_MS);
        }
        if first_ms > now_ms + READ_LEAD_MS {
            if first_ms < i64::MAX {
                self.want_read(first_ms - READ_LEAD_MS);
            }
            return Vec::new();
        }
        for entry in &chosen {
            if let Some(item) = self.find(entry.key) {
                item.record = Record::Reading;
            }
        }
        chosen.sort_unstable_by_key(|entry| entry.key.position);
        let part = chosen.len().div_ceil(free).max(READ_RECORDS_MIN);
        chosen.chunks(part).map(<[Entry]>::to_vec).collect()
    }
}
