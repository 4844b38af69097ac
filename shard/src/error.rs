//! The shard's errors: refusals that a client hears of, and operating errors of start and store.
//!
//! Invariant: a refusal changed nothing; an error of a write or flush poisons the shard and is
//! then the reason of every later refusal.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why an append was not done. The text becomes the remark of the answer.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum Refusal {
    /// The write buffer holds as much unwritten data as it can.
    #[error(
        "disk behind: shard {shard} holds {held_bytes} bytes not yet written, bound {bound_bytes} \
         (pinion.bufferBytes); oldest waits {oldest_ms} ms"
    )]
    BufferFull {
        /// Shard.
        shard: u16,
        /// Bytes held.
        held_bytes: u64,
        /// Size of the buffer.
        bound_bytes: u64,
        /// Age of the oldest unwritten group in milliseconds.
        oldest_ms: u64,
    },
    /// The disk hangs, and other brokers of the cluster take messages.
    #[error(
        "disk hangs: the oldest log write of shard {shard} waits {age_ms} ms, limit {limit_ms} ms \
         (pinion.fuseShardMs); try another broker"
    )]
    DiskHangs {
        /// Shard.
        shard: u16,
        /// Age of the oldest write or flush in milliseconds.
        age_ms: u64,
        /// Limit in milliseconds.
        limit_ms: u64,
    },
    /// The queue index of recent messages is not written yet.
    #[error("disk behind: shard {shard} holds {held} queue units not yet written, bound {bound}")]
    UnitsFull {
        /// Shard.
        shard: u16,
        /// Units held.
        held: u64,
        /// Bound.
        bound: u64,
    },
    /// The table of committed offsets is full.
    #[error("shard {shard} keeps {bound} committed offsets, which is its bound")]
    OffsetsFull {
        /// Shard.
        shard: u16,
        /// Bound.
        bound: u64,
    },
    /// The table of open transactions is full.
    #[error(
        "shard {shard} has {open} open transactions, bound {bound}: end some, or let \
         transactionCheckMax give them up"
    )]
    TransactionsFull {
        /// Shard.
        shard: u16,
        /// Open transactions.
        open: u64,
        /// Bound.
        bound: u64,
    },
    /// No prepared segment to roll into.
    #[error("disk: shard {shard} has no prepared segment for position {position}: {reason}")]
    SegmentMissing {
        /// Shard.
        shard: u16,
        /// Start of the missing segment.
        position: u64,
        /// Why it is not there.
        reason: String,
    },
    /// A write or flush failed earlier.
    #[error("disk: shard {shard} acknowledges nothing more: {reason}")]
    Poisoned {
        /// Shard.
        shard: u16,
        /// The failed operation.
        reason: String,
    },
    /// The file system is above its mark.
    #[error(
        "disk full: {used_percent} % of the file system is used, writing stops at {limit_percent} %"
    )]
    DiskFull {
        /// Used.
        used_percent: u32,
        /// Mark.
        limit_percent: u32,
    },
    /// The record does not fit a segment.
    #[error("record of {bytes} bytes does not fit: bound {bound} bytes")]
    TooLarge {
        /// Record length.
        bytes: u64,
        /// Bound.
        bound: u64,
    },
    /// The queue's topic has been removed.
    #[error("shard {shard}: the topic of this queue has been removed")]
    NoQueue {
        /// Shard.
        shard: u16,
    },
    /// The shard is stopping.
    #[error("shard {shard} is stopping")]
    Stopping {
        /// Shard.
        shard: u16,
    },
}

/// An operating error of the store.
#[derive(Debug, Error)]
pub enum StoreError {
    /// A file operation failed.
    #[error("{operation} {path}: {source}")]
    File {
        /// What was done.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A segment in the middle of the log has a wrong length or content.
    #[error(
        "segment {path} has {bytes} bytes instead of {expected}, and newer segments hold messages: \
         the physical offsets from {from} to {to} are at stake. Restore the file from a copy, or \
         move it and all newer segments away to start without them"
    )]
    MiddleSegment {
        /// File.
        path: PathBuf,
        /// Length found.
        bytes: u64,
        /// Length expected.
        expected: u64,
        /// First physical offset at stake.
        from: i64,
        /// End of the range.
        to: i64,
    },
    /// The log ends inside a segment although later segments hold messages.
    #[error(
        "the log is damaged at physical offset {at} in {path} ({reason}), and newer segments hold \
         messages up to {to}. Restore the file from a copy, or move it and all newer segments away"
    )]
    DamagedMiddle {
        /// File.
        path: PathBuf,
        /// Physical offset of the damage.
        at: i64,
        /// What is wrong.
        reason: String,
        /// End of the newer messages.
        to: i64,
    },
    /// A setting cannot work.
    #[error("{0}")]
    Setting(String),
}

impl StoreError {
    /// Wraps a file error.
    pub fn file(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File {
            operation,
            path: path.into(),
            source,
        }
    }
}
