//! One file of the simulated disk: what readers see, what is durable, and the writes in between.
//!
//! Invariant: a byte that was flushed after it landed survives every crash, unless it was
//! overwritten or cut later.

use std::collections::{BTreeMap, BTreeSet};

use super::SimRandom;

/// The unit that a torn write keeps or loses at the finest.
pub const SECTOR_BYTES: usize = 512;
/// Bytes of one page of the sparse content.
const PAGE_BYTES: u64 = 4096;
/// Unflushed bytes a device keeps before it writes the oldest by itself.
const CACHE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Sparse bytes; absent pages are zeros.
#[derive(Clone, Debug, Default)]
struct Pages(BTreeMap<u64, Box<[u8]>>);

impl Pages {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let start = (at % PAGE_BYTES) as usize;
            let part = rest.len().min(PAGE_BYTES as usize - start);
            let (now, later) = rest.split_at(part);
            if part == PAGE_BYTES as usize && now.iter().all(|byte| *byte == 0) {
                self.0.remove(&(at / PAGE_BYTES));
                at += part as u64;
                rest = later;
                continue;
            }
            let page = self
                .0
                .entry(at / PAGE_BYTES)
                .or_insert_with(|| vec![0; PAGE_BYTES as usize].into_boxed_slice());
            if let Some(target) = page.get_mut(start..start + part) {
                target.copy_from_slice(now);
            }
            at += part as u64;
            rest = later;
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let start = (at % PAGE_BYTES) as usize;
            let part = rest.len().min(PAGE_BYTES as usize - start);
            let (now, later) = rest.split_at_mut(part);
            match self
                .0
                .get(&(at / PAGE_BYTES))
                .and_then(|page| page.get(start..start + part))
            {
                Some(bytes) => now.copy_from_slice(bytes),
                None => now.fill(0),
            }
            at += part as u64;
            rest = later;
        }
    }

    fn cut(&mut self, len: u64) {
        self.0.retain(|page, _| page * PAGE_BYTES < len);
        let start = (len % PAGE_BYTES) as usize;
        if let Some(page) = self.0.get_mut(&(len / PAGE_BYTES))
            && let Some(tail) = page.get_mut(start..)
        {
            tail.fill(0);
        }
    }
}

#[derive(Debug)]
struct Pending {
    id: u64,
    offset: u64,
    bytes: Vec<u8>,
    /// Order of landing; 0 while under way.
    landed: u64,
}

/// One file.
#[derive(Debug)]
pub(super) struct Inode {
    current: Pages,
    current_len: u64,
    durable: Pages,
    durable_len: u64,
    /// Lengths since the last flush, with the landing mark at the time of the change.
    lengths: Vec<(u64, u64)>,
    pending: Vec<Pending>,
    next_id: u64,
    landings: u64,
    modified_ms: i64,
}

impl Inode {
    pub(super) fn new(now_ms: i64) -> Inode {
        Inode {
            current: Pages::default(),
            current_len: 0,
            durable: Pages::default(),
            durable_len: 0,
            lengths: Vec::new(),
            pending: Vec::new(),
            next_id: 1,
            landings: 0,
            modified_ms: now_ms,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.current_len
    }

    pub(super) fn modified_ms(&self) -> i64 {
        self.modified_ms
    }

    pub(super) fn set_len(&mut self, len: u64) {
        if len < self.current_len {
            self.current.cut(len);
            // Blocks given up do not come back with their bytes when the file grows again.
            for pending in self.pending.iter_mut().filter(|p| p.landed > 0) {
                pending
                    .bytes
                    .truncate(len.saturating_sub(pending.offset) as usize);
            }
            self.pending
                .retain(|p| p.landed == 0 || !p.bytes.is_empty());
        }
        self.current_len = len;
        self.landings += 1;
        self.lengths.push((self.landings, len));
    }

    pub(super) fn begin_write(&mut self, bytes: Vec<u8>, offset: u64) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.pending.push(Pending {
            id,
            offset,
            bytes,
            landed: 0,
        });
        id
    }

    pub(super) fn remix(&mut self, id: u64, bytes: &[u8], random: &mut SimRandom) {
        let Some(pending) = self.pending.iter_mut().find(|p| p.id == id) else {
            return;
        };
        for (old, new) in pending
            .bytes
            .chunks_mut(SECTOR_BYTES)
            .zip(bytes.chunks(SECTOR_BYTES))
        {
            if old != new && random.one_in(2) {
                old.copy_from_slice(new);
            }
        }
    }

    pub(super) fn land(&mut self, id: u64, half: bool, now_ms: i64) {
        let Some(place) = self
            .pending
            .iter()
            .position(|p| p.id == id && p.landed == 0)
        else {
            return;
        };
        let mut pending = self.pending.remove(place);
        if half {
            let keep = pending.bytes.len() / 2 / SECTOR_BYTES * SECTOR_BYTES;
            pending.bytes.truncate(keep);
        }
        self.landings += 1;
        pending.landed = self.landings;
        self.modified_ms = now_ms;
        self.current.write(pending.offset, &pending.bytes);
        let end = pending.offset + pending.bytes.len() as u64;
        if end > self.current_len {
            self.current_len = end;
            self.lengths.push((self.landings, end));
        }
        self.pending.push(pending);
        self.evict();
    }

    /// A device with a full cache writes the oldest by itself.
    fn evict(&mut self) {
        let mut total: usize = self.pending.iter().map(|p| p.bytes.len()).sum();
        while total > CACHE_BYTES_MAX {
            let Some(place) = self.pending.iter().position(|p| p.landed > 0) else {
                return;
            };
            let pending = self.pending.remove(place);
            total -= pending.bytes.len();
            self.durable.write(pending.offset, &pending.bytes);
        }
    }

    /// What a flush that starts now makes durable.
    pub(super) fn flush_mark(&self) -> u64 {
        self.landings
    }

    pub(super) fn flush(&mut self, mark: u64) {
        let (before, after): (Vec<_>, Vec<_>) = std::mem::take(&mut self.lengths)
            .into_iter()
            .partition(|(at, _)| *at <= mark);
        self.lengths = after;
        // Cuts and writes in the order in which they happened.
        let mut cuts = before.into_iter().peekable();
        let mut kept = Vec::new();
        for pending in std::mem::take(&mut self.pending) {
            if pending.landed == 0 || pending.landed > mark {
                kept.push(pending);
                continue;
            }
            while let Some((_, len)) = cuts.next_if(|(at, _)| *at <= pending.landed) {
                self.set_durable_len(len);
            }
            self.durable.write(pending.offset, &pending.bytes);
        }
        for (_, len) in cuts {
            self.set_durable_len(len);
        }
        self.pending = kept;
    }

    fn set_durable_len(&mut self, len: u64) {
        if len < self.durable_len {
            self.durable.cut(len);
        }
        self.durable_len = len;
    }

    pub(super) fn read(&self, into: &mut [u8], offset: u64, stale: bool) -> usize {
        let count = self
            .current_len
            .saturating_sub(offset)
            .min(into.len() as u64) as usize;
        let pages = if stale { &self.durable } else { &self.current };
        if let Some(into) = into.get_mut(..count) {
            pages.read(offset, into);
        }
        count
    }

    /// The process was killed: each write under way has happened in whole or not at all.
    pub(super) fn finish_in_flight(&mut self, random: &mut SimRandom) {
        let ids: Vec<u64> = self
            .pending
            .iter()
            .filter(|p| p.landed == 0)
            .map(|p| p.id)
            .collect();
        for id in ids {
            if random.one_in(2) {
                let now_ms = self.modified_ms;
                self.land(id, false, now_ms);
            } else {
                self.pending.retain(|p| p.id != id);
            }
        }
    }

    /// The power went: any subset of what was not flushed is kept.
    pub(super) fn lose_power(&mut self, random: &mut SimRandom) {
        let kept = random.below(self.lengths.len() as u64 + 1) as usize;
        for (_, len) in std::mem::take(&mut self.lengths).into_iter().take(kept) {
            self.set_durable_len(len);
        }
        let pending = std::mem::take(&mut self.pending);
        let sector_bytes = if random.one_in(2) {
            SECTOR_BYTES as u64
        } else {
            PAGE_BYTES
        };
        let style = random.below(4);
        let last = random.below(pending.len() as u64 + 1) as usize;
        // For each sector the writes that hold it, in landing order.
        let mut sectors: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (number, write) in pending.iter().enumerate() {
            let end = write.offset + write.bytes.len() as u64;
            for sector in write.offset / sector_bytes..end.div_ceil(sector_bytes) {
                sectors.entry(sector).or_default().push(number);
            }
        }
        let mut torn: BTreeSet<usize> = BTreeSet::new();
        if style == 2 {
            torn.insert(last);
        }
        for (sector, writes) in sectors {
            let choice = match style {
                // Everything was lost, or everything had arrived.
                0 => None,
                1 => writes.last().copied(),
                // The first writes had arrived, one of them is torn.
                2 => writes
                    .iter()
                    .rev()
                    .copied()
                    .find(|n| *n < last || (torn.contains(n) && random.one_in(2))),
                // Any version of each sector, in any order.
                _ => {
                    let pick = random.below(writes.len() as u64 + 1) as usize;
                    writes.get(pick).copied()
                }
            };
            let Some(write) = choice.and_then(|number| pending.get(number)) else {
                continue;
            };
            let from = (sector * sector_bytes).max(write.offset);
            let to = ((sector + 1) * sector_bytes).min(write.offset + write.bytes.len() as u64);
            let range = (from - write.offset) as usize..(to - write.offset) as usize;
            if let Some(bytes) = write.bytes.get(range) {
                self.durable.write(from, bytes);
            }
        }
        self.durable.cut(self.durable_len);
        self.current = self.durable.clone();
        self.current_len = self.durable_len;
    }
}
