//! The near future in memory: the pending timed messages up to a frontier, in order.
//!
//! Invariant: every pending message whose key is not behind the frontier is here (or staged for
//! delivery already), and never more than [`WINDOW_MAX`] of them; the rest is in unit ring and run
//! files only and is read when the frontier comes near.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::code::Code;
use super::progress::Key;
use crate::address;
use crate::units::Unit;

/// Messages held in memory, 32 bytes each.
pub const WINDOW_MAX: usize = 1 << 17;
/// What is kept when more come; the others are read again later.
const WINDOW_KEPT: usize = WINDOW_MAX / 2;

/// A pending message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) size: u32,
    pub(crate) crc: u32,
    pub(crate) level: u8,
    pub(crate) deletion: bool,
}

/// Bytes of the stored form of an entry, for what the auxiliary thread hands over.
pub(crate) const ENTRY_BYTES: usize = 26;

impl Entry {
    pub(crate) fn of(unit: &Unit) -> Self {
        let code = Code::from_tags_code(unit.tags_code);
        let position = address::split(unit.physical_offset).map_or(0, |(_, position)| position);
        let due_ms = code.due_ms;
        Self {
            key: Key { due_ms, position },
            size: unit.size,
            crc: unit.crc,
            level: code.level,
            deletion: code.deletion,
        }
    }

    /// The unit to read its record by.
    pub(crate) fn unit(&self, shard: u16) -> Unit {
        Unit {
            physical_offset: address::physical(shard, self.key.position),
            size: self.size,
            crc: self.crc,
            ..Unit::default()
        }
    }

    /// The key that progress must have reached before the entry is done. A deletion lasts as long
    /// as something may come that it takes back.
    pub(crate) fn done_at(&self) -> Key {
        if self.deletion {
            return Key {
                due_ms: self.key.due_ms + super::code::SPAN_MS,
                position: u64::MAX,
            };
        }
        self.key
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.key.due_ms.to_be_bytes());
        out.extend_from_slice(&self.key.position.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.crc.to_be_bytes());
        out.extend_from_slice(&[self.level, u8::from(self.deletion)]);
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            key: Key {
                due_ms: i64::from_be_bytes(*bytes.first_chunk()?),
                position: u64::from_be_bytes(*bytes.get(8..)?.first_chunk()?),
            },
            size: u32::from_be_bytes(*bytes.get(16..)?.first_chunk()?),
            crc: u32::from_be_bytes(*bytes.get(20..)?.first_chunk()?),
            level: *bytes.get(24)?,
            deletion: *bytes.get(25)? != 0,
        })
    }
}

/// The window.
pub(crate) struct Window {
    entries: BinaryHeap<Reverse<Entry>>,
    frontier: Key,
}

impl Default for Window {
    fn default() -> Self {
        Self {
            entries: BinaryHeap::new(),
            frontier: Key::FIRST,
        }
    }
}

impl Window {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Everything up to here is in memory.
    pub(crate) fn frontier(&self) -> Key {
        self.frontier
    }

    pub(crate) fn set_frontier(&mut self, frontier: Key) {
        self.frontier = frontier;
    }

    /// The next message.
    pub(crate) fn peek(&self) -> Option<&Entry> {
        self.entries.peek().map(|Reverse(entry)| entry)
    }

    pub(crate) fn pop(&mut self) -> Option<Entry> {
        self.entries.pop().map(|Reverse(entry)| entry)
    }

    /// Takes a message that is not behind the frontier. Returns how many had to be given up for
    /// it, the latest ones, in front of which the frontier now lies.
    pub(crate) fn push(&mut self, entry: Entry) -> usize {
        debug_assert!(entry.key <= self.frontier);
        if self.entries.len() < WINDOW_MAX {
            self.entries.push(Reverse(entry));
            return 0;
        }
        let mut entries = std::mem::take(&mut self.entries).into_vec();
        // Reversed entries: the smallest of them are the latest messages.
        let given_up = entries.len() - WINDOW_KEPT;
        let (_, last_kept, _) = entries.select_nth_unstable(given_up);
        self.frontier = last_kept.0.key;
        entries.drain(..given_up);
        self.entries = BinaryHeap::from(entries);
        if entry.key <= self.frontier {
            self.entries.push(Reverse(entry));
            given_up
        } else {
            given_up + 1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(due_ms: i64, position: u64) -> Entry {
        Entry {
            key: Key { due_ms, position },
            size: 100,
            crc: 1,
            level: 3,
            deletion: false,
        }
    }

    #[test]
    fn entries_come_back_from_their_stored_form() {
        let mut bytes = Vec::new();
        entry(77, 1 << 40).encode(&mut bytes);
        assert_eq!(bytes.len(), ENTRY_BYTES);
        assert_eq!(Entry::decode(&bytes), Some(entry(77, 1 << 40)));
    }

    #[test]
    fn a_full_window_keeps_the_nearest_and_says_up_to_where() {
        let mut window = Window::default();
        window.set_frontier(Key::LAST);
        let count = WINDOW_MAX as u64;
        for at in 0..count {
            let due_ms = (at.wrapping_mul(7919) % count) as i64;
            assert_eq!(window.push(entry(due_ms, at)), 0);
        }
        let given_up = window.push(entry(-1, count));
        assert_eq!(window.len() + given_up, WINDOW_MAX + 1);
        let frontier = window.frontier();
        let mut last = Key::FIRST;
        let mut expected = -1;
        while let Some(next) = window.pop() {
            assert!(next.key > last && next.key <= frontier);
            assert_eq!(next.key.due_ms, expected, "none in between is missing");
            (last, expected) = (next.key, expected + 1);
        }
        assert_eq!(last, frontier);
    }
}
