//! Messages handed out in order: the head of a queue until all of it is acknowledged.
//!
//! Invariant: offsets ascend, and what is acknowledged is not handed out again, even when
//! something in front of it is.

/// Messages in one block, handed out or acknowledged out of turn.
pub const BLOCK_MESSAGES_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockEntry {
    pub(super) offset: u64,
    pub(super) acked: bool,
    /// Until when it is invisible, in milliseconds.
    pub(super) due_ms: i64,
    /// How often it was handed out before.
    pub(super) count: i32,
}

/// The block of one queue and group.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Block {
    pub(super) attempt: Box<str>,
    pub(super) pop_ms: i64,
    pub(super) entries: Vec<BlockEntry>,
    /// Where the queue goes on behind it.
    pub(super) end: u64,
    /// Item that stands for it among the due times.
    pub(super) timer: u32,
}

impl Block {
    /// Until when the queue waits for acknowledgements; `None` when there are none to wait for.
    pub(super) fn blocked_until(&self) -> Option<i64> {
        let open = self.entries.iter().filter(|entry| !entry.acked);
        open.map(|entry| entry.due_ms).max()
    }

    pub(super) fn entry(&self, offset: u64) -> Option<&BlockEntry> {
        let at = self.entries.binary_search_by_key(&offset, |e| e.offset);
        at.ok().and_then(|at| self.entries.get(at))
    }

    pub(super) fn entry_mut(&mut self, offset: u64) -> Option<&mut BlockEntry> {
        let at = self.entries.binary_search_by_key(&offset, |e| e.offset);
        at.ok().and_then(|at| self.entries.get_mut(at))
    }

    /// Where the group stands: at the first message that is not acknowledged.
    pub(super) fn stands_at(&self) -> u64 {
        let open = self.entries.iter().find(|entry| !entry.acked);
        open.map_or(self.end, |entry| entry.offset)
    }

    /// Messages that are not acknowledged.
    pub(super) fn open(&self) -> usize {
        self.entries.iter().filter(|entry| !entry.acked).count()
    }

    /// The block after its messages were handed out again, perhaps with others.
    pub(super) fn again(
        &self,
        (attempt, pop_ms, due_ms): (&str, i64, i64),
        offsets: &[u64],
        end: u64,
    ) -> Self {
        let first = offsets.first().copied().unwrap_or(end);
        let kept = self.entries.iter().filter(|e| e.acked && e.offset >= first);
        let mut entries: Vec<BlockEntry> = kept.copied().collect();
        for offset in offsets {
            let before = self.entry(*offset);
            entries.push(BlockEntry {
                offset: *offset,
                acked: false,
                due_ms,
                count: before.map_or(0, |entry| entry.count.saturating_add(1)),
            });
        }
        entries.sort_unstable_by_key(|entry| entry.offset);
        entries.dedup_by_key(|entry| entry.offset);
        let last = entries.last().map_or(end, |entry| entry.offset + 1);
        Self {
            attempt: attempt.into(),
            pop_ms,
            entries,
            end: end.max(last),
            timer: self.timer,
        }
    }
}
