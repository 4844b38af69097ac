//! End marks: what proves that the records in front of them are whole.
//!
//! A stored record has a checksum of its body only. So the log carries internal records that hold a
//! checksum over all records since the mark before; a crash may have torn whatever stands behind
//! the last mark, and recovery takes none of it (unless the surviving buffer vouches for it).
//!
//! Invariant: every record that can be acknowledged as written or synced is followed by a mark that
//! is written or synced too; a mark never spans two segments, and run files end at marks.

use std::collections::VecDeque;
use std::net::SocketAddr;

use wire::message::{RecordFields, RecordView};

use crate::event::{EVENT_TOPIC, Event};

/// Bytes of the largest mark (with IPv6 addresses).
pub(crate) const MARK_BYTES_MAX: u64 = 192;
/// A mark is set at least this often, in log bytes.
pub(crate) const MARK_EVERY_BYTES: u64 = 128 * 1024;
/// Marks whose positions are kept without growing; one per [`MARK_EVERY_BYTES`] of the buffer.
const ENDS_RESERVED: usize = 4096;

/// Adds the checksum of one record to that of a mark.
#[must_use]
pub fn mix(hash: u64, crc: u32) -> u64 {
    (hash.rotate_left(5) ^ u64::from(crc)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The record of a mark; `body` is its encoded event.
pub(crate) fn fields<'a>(
    body: &'a [u8],
    physical_offset: i64,
    store_timestamp: i64,
    store_host: SocketAddr,
) -> RecordFields<'a> {
    RecordFields {
        queue_id: 0,
        flag: 0,
        queue_offset: 0,
        physical_offset,
        sys_flag: 0,
        born_timestamp: store_timestamp,
        born_host: store_host,
        store_timestamp,
        store_host,
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body,
        topic: EVENT_TOPIC.as_bytes(),
        properties: &[],
    }
}

/// Where the range of a mark begins and its checksum, if the record is a mark.
pub(crate) fn read(view: &RecordView<'_>) -> Option<(u64, u64)> {
    if view.topic() != EVENT_TOPIC.as_bytes() {
        return None;
    }
    match Event::decode(view.body())? {
        Event::EndMark { from, hash } => Some((from, hash)),
        _ => None,
    }
}

/// The marks of a log that is written.
pub(crate) struct Marks {
    from: u64,
    hash: u64,
    open: bool,
    ends: VecDeque<u64>,
}

impl Marks {
    /// Everything in front of `position` counts as marked.
    pub(crate) fn new(position: u64) -> Self {
        let ends = VecDeque::with_capacity(ENDS_RESERVED);
        Self {
            from: position,
            hash: 0,
            open: false,
            ends,
        }
    }

    /// Takes note of a record.
    pub(crate) fn note(&mut self, crc: u32) {
        self.hash = mix(self.hash, crc);
        self.open = true;
    }

    /// Whether records stand behind the last mark.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Where the range of the next mark begins.
    pub(crate) fn from(&self) -> u64 {
        self.from
    }

    /// Checksum for the next mark.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// A mark that ends at `end` was set.
    pub(crate) fn close(&mut self, end: u64) {
        (self.from, self.hash, self.open) = (end, 0, false);
        self.ends.push_back(end);
    }

    /// The last mark that ends at or before `position`, if there is a new one.
    pub(crate) fn reached(&mut self, position: u64) -> Option<u64> {
        let mut last = None;
        while self.ends.front().is_some_and(|end| *end <= position) {
            last = self.ends.pop_front();
        }
        last
    }
}
