//! What a shard counts.
//!
//! Invariant: counters only grow while the process runs.

/// Counters of a shard since the start of the process.
#[derive(Clone, Copy, Default, Debug)]
pub struct ShardCounters {
    /// Messages appended.
    pub put_messages: u64,
    /// Bytes appended.
    pub put_bytes: u64,
    /// Appends refused.
    pub put_refused: u64,
    /// Timed messages delivered.
    pub delayed_delivered: u64,
    /// Timed messages dropped because their topic is gone.
    pub delayed_dropped: u64,
    /// Timed messages taken back before their time.
    pub timers_deleted: u64,
    /// Timed messages copied forward, so that retention can drop their segment.
    pub timers_rolled: u64,
    /// Timed messages whose record was found damaged.
    pub timers_lost: u64,
    /// Deletions of timed messages dropped at their bound.
    pub deletions_dropped: u64,
    /// Half messages stored.
    pub halves_stored: u64,
    /// Half messages refused because too many transactions are open.
    pub halves_refused: u64,
    /// Transactions committed.
    pub halves_committed: u64,
    /// Transactions rolled back.
    pub halves_rolled_back: u64,
    /// Questions to producers about open transactions.
    pub halves_checked: u64,
    /// Transactions given up, their messages kept for people to decide.
    pub halves_given_up: u64,
    /// Half messages dropped because their topic is gone or their record is damaged.
    pub halves_dropped: u64,
    /// Records found damaged when read.
    pub damaged_records: u64,
    /// Cold windows read from disk.
    pub cold_windows: u64,
    /// Segments prepared.
    pub segments_prepared: u64,
    /// Segments dropped by retention.
    pub segments_dropped: u64,
}
