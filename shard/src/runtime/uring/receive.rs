//! The receive buffers: a pool the kernel takes from by itself when data arrives.
//!
//! Invariant: a buffer belongs either to the kernel (its entry lies in the shared ring) or to the
//! core (`lent`), never to both.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::BufRingEntry;

use super::ReceivedId;
use super::ring::Ring;
use crate::memory::{AlignedBuffer, LockRefused};

/// Most receive buffers of one core.
pub const RECEIVE_BUFFERS_MAX: usize = 16 * 1024;
/// Largest receive buffer in bytes.
const RECEIVE_BUFFER_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The buffer group used.
pub(super) const GROUP: u16 = 0;

pub(super) struct ReceiveBuffers {
    entries: AlignedBuffer,
    memory: AlignedBuffer,
    buffer_bytes: usize,
    count: u16,
    tail: u16,
    /// Received bytes of each lent buffer; `None` while the kernel owns it.
    lent: Vec<Option<usize>>,
    lent_count: usize,
}

impl ReceiveBuffers {
    pub(super) fn new(
        ring: &Ring,
        count: usize,
        buffer_bytes: usize,
        lock: bool,
    ) -> io::Result<ReceiveBuffers> {
        let count = count.clamp(1, RECEIVE_BUFFERS_MAX).next_power_of_two();
        let buffer_bytes = buffer_bytes.clamp(4096, RECEIVE_BUFFER_BYTES_MAX);
        let entries = AlignedBuffer::new(count * size_of::<BufRingEntry>(), lock)?;
        let memory = AlignedBuffer::new(count * buffer_bytes, lock)?;
        // SAFETY: `entries` is page-aligned and long enough for `count` entries; the driver drops
        // its ring before this struct.
        unsafe {
            ring.uring.submitter().register_buf_ring_with_flags(
                entries.pointer() as u64,
                count as u16,
                GROUP,
                0,
            )?;
        }
        let mut buffers = ReceiveBuffers {
            entries,
            memory,
            buffer_bytes,
            count: count as u16,
            tail: 0,
            lent: vec![Some(0); count],
            lent_count: count,
        };
        for id in 0..count as u16 {
            buffers.give_back(ReceivedId(id));
        }
        Ok(buffers)
    }

    pub(super) fn locked(&self) -> Result<(), LockRefused> {
        self.memory.locked()
    }

    /// Notes that the kernel filled a buffer; `false` if it is not one of ours.
    pub(super) fn lend(&mut self, id: u16, bytes: usize) -> bool {
        match self.lent.get_mut(usize::from(id)) {
            Some(place) => {
                if place.replace(bytes.min(self.buffer_bytes)).is_none() {
                    self.lent_count += 1;
                }
                true
            }
            None => false,
        }
    }

    /// Whether the kernel has none left.
    pub(super) fn is_exhausted(&self) -> bool {
        self.lent_count >= self.lent.len()
    }

    pub(super) fn bytes_of(&self, id: ReceivedId) -> &[u8] {
        let index = usize::from(id.0);
        let Some(Some(bytes)) = self.lent.get(index) else {
            return &[];
        };
        let start = index * self.buffer_bytes;
        self.memory.get(start..start + bytes).unwrap_or_default()
    }

    /// Gives a buffer to the kernel; `false` if it was not lent.
    pub(super) fn give_back(&mut self, id: ReceivedId) -> bool {
        let index = usize::from(id.0);
        let Some(place) = self.lent.get_mut(index) else {
            return false;
        };
        if place.take().is_none() {
            return false;
        }
        self.lent_count -= 1;
        let slot = usize::from(self.tail & (self.count - 1));
        // SAFETY: slot < count, and `entries` holds `count` of them; the kernel reads an entry only
        // after the tail has moved past it, below. The buffer lies inside `memory`.
        unsafe {
            let base = self.entries.pointer().cast::<BufRingEntry>();
            let entry = &mut *base.add(slot);
            entry.set_addr(self.memory.pointer().add(index * self.buffer_bytes) as u64);
            entry.set_len(self.buffer_bytes as u32);
            entry.set_bid(id.0);
            self.tail = self.tail.wrapping_add(1);
            let tail = BufRingEntry::tail(base.cast_const()).cast::<AtomicU16>();
            (*tail).store(self.tail, Ordering::Release);
        }
        true
    }
}
