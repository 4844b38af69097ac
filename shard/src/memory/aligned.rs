//! Block-aligned buffers of their own mapping.
//!
//! Invariant: a buffer's memory is page-aligned, zero at first and touched; shortening changes
//! what is visible, never what is mapped.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::{LockRefused, RING_BYTES_MAX, check_mapping, lock_memory};
use crate::io::BLOCK_BYTES;

/// Block-aligned zeroed memory of its own mapping: for direct transfers outside the ring.
#[derive(Debug)]
pub struct AlignedBuffer {
    start: NonNull<u8>,
    bytes: usize,
    mapped_bytes: usize,
    locked: Result<(), LockRefused>,
}

// SAFETY: it owns its memory like a Vec.
unsafe impl Send for AlignedBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// Maps at least `bytes` of zeros (rounded up to whole blocks), touched, locked if asked.
    pub fn new(bytes: usize, lock: bool) -> io::Result<AlignedBuffer> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(BLOCK_BYTES)
            .filter(|bytes| *bytes <= RING_BYTES_MAX)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: a fresh private mapping at an address the kernel chooses.
        let start = check_mapping(unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        })?;
        let locked = if lock {
            lock_memory(start, bytes)
        } else {
            Ok(())
        };
        Ok(AlignedBuffer {
            start,
            bytes,
            mapped_bytes: bytes,
            locked,
        })
    }

    /// Whether locking worked (`Ok` also when it was not asked for).
    pub fn locked(&self) -> Result<(), LockRefused> {
        self.locked
    }

    /// Shortens the visible part; the memory stays.
    pub fn shorten(&mut self, bytes: usize) {
        self.bytes = bytes.min(self.mapped_bytes);
    }

    /// The start of the memory, for the kernel.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes are mapped at `start` for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; pages under a running direct transfer are
        // pinned by the kernel and outlive the mapping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aligned_buffer_is_aligned_zeroed_and_can_be_shortened() {
        let mut buffer = AlignedBuffer::new(5000, true).unwrap();
        assert_eq!(
            (buffer.len(), buffer.as_ptr() as usize % BLOCK_BYTES),
            (8192, 0)
        );
        assert!(buffer.iter().all(|byte| *byte == 0));
        buffer.fill(1);
        buffer.shorten(10);
        assert_eq!(buffer.len(), 10);
        buffer.shorten(9000);
        assert_eq!(buffer.len(), 8192);
        assert!(AlignedBuffer::new(usize::MAX, false).is_err());
    }
}
