//! The store of `pinion null`: counts messages instead of storing them.
//!
//! Invariant: a message takes the same way as into a shard up to the append, and its answer the
//! same way back, so that what is measured against it is the cost of everything but storing.

use shard::Appended;

/// Counts what would have been stored.
#[derive(Debug, Default)]
pub struct NullStore {
    messages: i64,
    bytes: i64,
}

impl NullStore {
    /// Takes a message; its answer may leave at once.
    pub fn take(&mut self, body_bytes: usize, now_ms: i64) -> Appended {
        let appended = Appended {
            physical_offset: self.bytes,
            queue_offset: self.messages,
            end: 0,
            store_timestamp: now_ms,
        };
        self.messages += 1;
        self.bytes += body_bytes as i64;
        appended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_gets_offsets_of_its_own_and_waits_for_nothing() {
        let mut null = NullStore::default();
        let first = null.take(100, 7);
        let second = null.take(1, 8);
        assert_eq!((first.queue_offset, first.physical_offset), (0, 0));
        assert_eq!((second.queue_offset, second.physical_offset), (1, 100));
        assert_eq!((first.end, second.end), (0, 0));
    }
}
