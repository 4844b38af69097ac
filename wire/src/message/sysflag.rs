//! Owns the bits of a message's system flag, and those of pull and topic flags.
//!
//! Invariant: the host bits of a stored record tell the width of its addresses.

/// The body is compressed.
pub const COMPRESSED: i32 = 1;
/// The message has several tags.
pub const MULTI_TAGS: i32 = 1 << 1;
/// Mask of the transaction type.
pub const TRANSACTION_MASK: i32 = 3 << 2;
/// Transaction type: none.
pub const TRANSACTION_NONE: i32 = 0;
/// Transaction type: prepared (half message).
pub const TRANSACTION_PREPARED: i32 = 1 << 2;
/// Transaction type: commit.
pub const TRANSACTION_COMMIT: i32 = 2 << 2;
/// Transaction type: roll-back.
pub const TRANSACTION_ROLLBACK: i32 = 3 << 2;
/// The born host is an IPv6 address.
pub const BORN_HOST_V6: i32 = 1 << 4;
/// The store host is an IPv6 address.
pub const STORE_HOST_V6: i32 = 1 << 5;
/// A batch the consumer has to unwrap.
pub const NEED_UNWRAP: i32 = 1 << 6;
/// An inner batch.
pub const INNER_BATCH: i32 = 1 << 7;
/// Mask of the compression type.
pub const COMPRESSION_MASK: i32 = 7 << 8;
/// Compression by LZ4.
pub const COMPRESSION_LZ4: i32 = 1 << 8;
/// Compression by ZSTD.
pub const COMPRESSION_ZSTD: i32 = 2 << 8;
/// Compression by ZLIB; older clients leave the type at 0 and mean ZLIB.
pub const COMPRESSION_ZLIB: i32 = 3 << 8;

/// Pull flag: the request commits an offset.
pub const PULL_COMMIT_OFFSET: i32 = 1;
/// Pull flag: the request may wait for messages.
pub const PULL_SUSPEND: i32 = 1 << 1;
/// Pull flag: the request carries a subscription.
pub const PULL_SUBSCRIPTION: i32 = 1 << 2;
/// Pull flag: class filter.
pub const PULL_CLASS_FILTER: i32 = 1 << 3;
/// Pull flag: sent by a lite pull consumer.
pub const PULL_LITE: i32 = 1 << 4;

/// The transaction type of a system flag.
pub const fn transaction_type(sys_flag: i32) -> i32 {
    sys_flag & TRANSACTION_MASK
}

/// The system flag with its transaction type replaced.
pub const fn with_transaction_type(sys_flag: i32, transaction: i32) -> i32 {
    (sys_flag & !TRANSACTION_MASK) | (transaction & TRANSACTION_MASK)
}
