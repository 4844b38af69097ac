//! The header page of a ring that outlives its process.
//!
//! Invariant: the magic number is written last, so a header that has it is complete.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Version of the header's layout. Retired numbers are never reused.
pub(super) const FORMAT_VERSION: u32 = 1;
/// First eight bytes of a formatted header ("PINIONRB").
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"PINIONRB");

/// The first page of a ring's file. Every field is read and written atomically because a reader
/// of a killed process's ring shares it with nobody but its past.
#[repr(C)]
#[derive(Debug)]
pub struct RingHeader {
    magic: AtomicU64,
    version: AtomicU32,
    shard: AtomicU32,
    store_low: AtomicU64,
    store_high: AtomicU64,
    epoch: AtomicU64,
    bytes: AtomicU64,
    base: AtomicU64,
    gap_before_published: [AtomicU64; 8],
    published: AtomicU64,
    gap_before_written: [AtomicU64; 8],
    written: AtomicU64,
}

macro_rules! header_field {
    ($load:ident, $store:ident, $field:ident, $type:ty, $what:literal) => {
        #[doc = concat!("Loads ", $what, " (acquire).")]
        #[must_use]
        pub fn $load(&self) -> $type {
            self.$field.load(Ordering::Acquire)
        }
        #[doc = concat!("Stores ", $what, " (release).")]
        pub fn $store(&self, value: $type) {
            self.$field.store(value, Ordering::Release);
        }
    };
}

impl RingHeader {
    /// Whether the header has been formatted by this version.
    #[must_use]
    pub fn is_formatted(&self) -> bool {
        self.magic.load(Ordering::Acquire) == MAGIC
            && self.version.load(Ordering::Acquire) == FORMAT_VERSION
    }
    /// The first eight bytes.
    pub(super) fn magic(&self) -> u64 {
        self.magic.load(Ordering::Acquire)
    }
    /// Marks a header whose other fields are set as complete.
    pub(super) fn finish_format(&self) {
        self.version.store(FORMAT_VERSION, Ordering::Release);
        self.magic.store(MAGIC, Ordering::Release);
    }
    /// Forgets the format: the next open sees a fresh ring.
    pub fn unformat(&self) {
        self.magic.store(0, Ordering::Release);
    }
    /// The version of the layout.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version.load(Ordering::Acquire)
    }
    /// The identity of the store the ring belongs to.
    #[must_use]
    pub fn store_id(&self) -> [u8; 16] {
        let low = u128::from(self.store_low.load(Ordering::Acquire));
        let high = u128::from(self.store_high.load(Ordering::Acquire));
        (low | (high << 64)).to_le_bytes()
    }
    /// Sets the identity of the store.
    pub fn set_store_id(&self, id: [u8; 16]) {
        let value = u128::from_le_bytes(id);
        self.store_low.store(value as u64, Ordering::Release);
        self.store_high
            .store((value >> 64) as u64, Ordering::Release);
    }
    header_field!(epoch, set_epoch, epoch, u64, "the epoch of the store");
    header_field!(shard, set_shard, shard, u32, "the shard's number");
    header_field!(bytes, set_bytes, bytes, u64, "the size of the ring");
    header_field!(
        base,
        set_base,
        base,
        u64,
        "the position the ring starts to hold"
    );
    header_field!(
        published,
        set_published,
        published,
        u64,
        "the position up to which records are whole"
    );
    header_field!(
        written,
        set_written,
        written,
        u64,
        "the position up to which the log holds the bytes"
    );
}
