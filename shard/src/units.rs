//! The ring of recent queue units: one slot per record, in append order, for all queues of a shard.
//!
//! Slots are chained per queue (`previous`, and `skip` to the last offset divisible by
//! [`SKIP_OFFSETS`]), so that finding an offset from the newest one takes few steps and an append
//! costs one slot write, however many queues there are. Slots are freed in order, once a run file
//! holds them.
//!
//! Invariant: `freed <= dispatched <= appended`, and `appended - freed` never exceeds the capacity.

/// Distance of the offsets that `skip` links connect.
pub const SKIP_OFFSETS: u64 = 64;

/// No slot.
pub const NO_SEQUENCE: u64 = u64::MAX;

/// What a consume queue knows of one record, in memory and in run files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Unit {
    /// Physical offset of the record.
    pub physical_offset: i64,
    /// Tag hash; time due and kind for timed messages.
    pub tags_code: i64,
    /// Store time in milliseconds.
    pub store_timestamp: i64,
    /// Record length in bytes.
    pub size: u32,
    /// CRC-32 of the whole record.
    pub crc: u32,
}

/// Bytes of an encoded unit.
pub const UNIT_BYTES: usize = 32;

impl Unit {
    /// Appends the stored form (big-endian).
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.physical_offset.to_be_bytes());
        out.extend_from_slice(&self.tags_code.to_be_bytes());
        out.extend_from_slice(&self.store_timestamp.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.crc.to_be_bytes());
    }

    /// Reads the stored form.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            physical_offset: i64::from_be_bytes(*bytes.first_chunk()?),
            tags_code: i64::from_be_bytes(*bytes.get(8..)?.first_chunk()?),
            store_timestamp: i64::from_be_bytes(*bytes.get(16..)?.first_chunk()?),
            size: u32::from_be_bytes(*bytes.get(24..)?.first_chunk()?),
            crc: u32::from_be_bytes(*bytes.get(28..)?.first_chunk()?),
        })
    }
}

/// One slot of the ring.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The unit.
    pub unit: Unit,
    /// Offset in its queue.
    pub queue_offset: u64,
    /// Log position just behind the record.
    pub end: u64,
    /// Sequence of the queue's previous slot.
    pub previous: u64,
    /// Sequence of the queue's last slot whose offset divides by [`SKIP_OFFSETS`], before this one.
    pub skip: u64,
    /// Queue index.
    pub queue: u32,
}

const EMPTY: Slot = Slot {
    unit: Unit {
        physical_offset: 0,
        tags_code: 0,
        store_timestamp: 0,
        size: 0,
        crc: 0,
    },
    queue_offset: 0,
    end: 0,
    previous: NO_SEQUENCE,
    skip: NO_SEQUENCE,
    queue: 0,
};

/// The ring.
pub struct UnitRing {
    slots: Box<[Slot]>,
    mask: u64,
    appended: u64,
    dispatched: u64,
    freed: u64,
}

impl UnitRing {
    /// A ring of `capacity` slots, rounded up to a power of two and touched.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.next_power_of_two().max(64);
        let slots = vec![EMPTY; capacity].into_boxed_slice();
        Self {
            mask: capacity as u64 - 1,
            slots,
            appended: 0,
            dispatched: 0,
            freed: 0,
        }
    }

    /// Slots the ring has.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.mask + 1
    }

    /// Slots in use.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.appended - self.freed
    }

    /// Whether `count` more slots fit.
    #[must_use]
    pub fn has_room(&self, count: u64) -> bool {
        self.held() + count <= self.capacity()
    }

    /// Sequence of the next slot to be appended.
    #[must_use]
    pub fn appended(&self) -> u64 {
        self.appended
    }

    /// Sequence of the first slot still held.
    #[must_use]
    pub fn freed(&self) -> u64 {
        self.freed
    }

    /// The slot with this sequence, if it is still held.
    #[must_use]
    pub fn get(&self, sequence: u64) -> Option<&Slot> {
        if sequence < self.freed || sequence >= self.appended {
            return None;
        }
        self.slots.get((sequence & self.mask) as usize)
    }

    /// Appends a slot. `last` is the newest slot of the same queue. Returns its sequence; the
    /// caller has checked [`UnitRing::has_room`].
    pub fn append(
        &mut self,
        unit: Unit,
        queue: u32,
        queue_offset: u64,
        end: u64,
        last: u64,
    ) -> u64 {
        debug_assert!(self.has_room(1));
        let skip = match self.get(last) {
            Some(slot) if slot.queue_offset.is_multiple_of(SKIP_OFFSETS) => last,
            Some(slot) => slot.skip,
            None => NO_SEQUENCE,
        };
        let previous = if last != NO_SEQUENCE && last >= self.freed {
            last
        } else {
            NO_SEQUENCE
        };
        let sequence = self.appended;
        if let Some(slot) = self.slots.get_mut((sequence & self.mask) as usize) {
            *slot = Slot {
                unit,
                queue_offset,
                end,
                previous,
                skip,
                queue,
            };
        }
        self.appended += 1;
        sequence
    }

    /// The next slot whose record ends at or before `watermark`, moved past.
    pub fn dispatch_next(&mut self, watermark: u64) -> Option<&Slot> {
        if self.dispatched >= self.appended {
            return None;
        }
        let place = (self.dispatched & self.mask) as usize;
        let slot = self.slots.get(place).filter(|slot| slot.end <= watermark)?;
        self.dispatched += 1;
        Some(slot)
    }

    /// Frees every slot before `sequence`.
    pub fn free_to(&mut self, sequence: u64) {
        debug_assert!(sequence <= self.dispatched);
        self.freed = self.freed.max(sequence.min(self.dispatched));
    }

    /// Finds the slot of `queue_offset`, walking back from `from` (a slot of the same queue with
    /// an offset at or above it). `None` when it is not held any more.
    #[must_use]
    pub fn seek(&self, from: u64, queue_offset: u64) -> Option<u64> {
        let mut sequence = from;
        loop {
            let slot = self.get(sequence)?;
            if slot.queue_offset == queue_offset {
                return Some(sequence);
            }
            if slot.queue_offset < queue_offset {
                return None;
            }
            sequence = match self.get(slot.skip) {
                Some(target) if target.queue_offset >= queue_offset => slot.skip,
                _ => slot.previous,
            };
        }
    }

    /// Collects the units of offsets `first ..= last` (both held) into `out` in offset order.
    /// `from` is a slot of the same queue at or above `last`.
    pub fn collect(&self, from: u64, first: u64, last: u64, out: &mut Vec<Unit>) -> bool {
        let Some(mut sequence) = self.seek(from, last) else {
            return false;
        };
        let start = out.len();
        loop {
            let Some(slot) = self.get(sequence) else {
                return false;
            };
            out.push(slot.unit);
            if slot.queue_offset == first {
                break;
            }
            sequence = slot.previous;
        }
        if let Some(added) = out.get_mut(start..) {
            added.reverse();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(n: i64) -> Unit {
        Unit {
            physical_offset: n,
            tags_code: n * 3,
            store_timestamp: n,
            size: 100,
            crc: 7,
        }
    }

    #[test]
    fn units_come_back_from_their_stored_form() {
        let mut bytes = Vec::new();
        unit(77).encode(&mut bytes);
        assert_eq!(bytes.len(), UNIT_BYTES);
        assert_eq!(Unit::decode(&bytes), Some(unit(77)));
        assert_eq!(Unit::decode(&bytes[..31]), None);
    }

    #[test]
    fn every_held_offset_of_interleaved_queues_is_found() {
        let mut ring = UnitRing::new(4096);
        let mut last = [NO_SEQUENCE; 3];
        let mut next = [0u64; 3];
        for i in 0..4000u64 {
            let queue = (i * i % 3) as usize;
            let sequence = ring.append(
                unit(i as i64),
                queue as u32,
                next[queue],
                i + 1,
                last[queue],
            );
            last[queue] = sequence;
            next[queue] += 1;
        }
        for queue in 0..3 {
            for offset in 0..next[queue] {
                let found = ring.seek(last[queue], offset).unwrap();
                let slot = ring.get(found).unwrap();
                assert_eq!((slot.queue as usize, slot.queue_offset), (queue, offset));
            }
        }
    }

    #[test]
    fn seeking_takes_few_steps() {
        let mut ring = UnitRing::new(1 << 16);
        let mut last = NO_SEQUENCE;
        for i in 0..60_000u64 {
            last = ring.append(unit(i as i64), 0, i, i + 1, last);
        }
        let mut out = Vec::new();
        assert!(ring.collect(last, 10, 41, &mut out));
        let offsets: Vec<i64> = out.iter().map(|u| u.physical_offset).collect();
        assert_eq!(offsets, (10..=41).collect::<Vec<i64>>());
    }

    #[test]
    fn freed_slots_are_not_found_and_their_room_is_reused() {
        let mut ring = UnitRing::new(64);
        let mut last = NO_SEQUENCE;
        for i in 0..64u64 {
            last = ring.append(unit(i as i64), 0, i, i + 1, last);
        }
        assert!(!ring.has_room(1));
        while ring.dispatch_next(32).is_some() {}
        ring.free_to(32);
        assert!(ring.has_room(32));
        for i in 64..96u64 {
            last = ring.append(unit(i as i64), 0, i, i + 1, last);
        }
        assert_eq!(ring.seek(last, 31), None);
        assert!(ring.seek(last, 32).is_some());
        let mut out = Vec::new();
        assert!(ring.collect(last, 32, 95, &mut out));
        assert_eq!(out.len(), 64);
    }

    #[test]
    fn nothing_is_dispatched_beyond_the_watermark() {
        let mut ring = UnitRing::new(64);
        ring.append(unit(0), 0, 0, 100, NO_SEQUENCE);
        ring.append(unit(1), 0, 1, 200, 0);
        assert!(ring.dispatch_next(99).is_none());
        assert!(ring.dispatch_next(100).is_some());
        assert!(ring.dispatch_next(199).is_none());
        assert!(ring.dispatch_next(200).is_some());
    }
}
