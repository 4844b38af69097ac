//! What shards tell the control task when it has to answer for the whole broker.
//!
//! Invariant: a report is a copy; nothing in it is shared with the shard that made it.

/// What a control request wants to know from every shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportQuery {
    /// Only these topics; `None` = all.
    pub topics: Option<Vec<String>>,
    /// Only offsets of this group; `None` = all groups.
    pub group: Option<String>,
    /// Whether queues are wanted.
    pub queues: bool,
    /// Whether consumer offsets are wanted.
    pub offsets: bool,
    /// Whether store figures are wanted.
    pub store: bool,
    /// Whether the store time of each queue's oldest message and of each group's last consumed
    /// message is wanted (costs reads).
    pub store_times: bool,
}

/// One queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueReport {
    /// Topic name.
    pub topic: String,
    /// Queue id.
    pub queue_id: i32,
    /// Owning shard.
    pub shard: u16,
    /// Oldest readable offset.
    pub min_offset: i64,
    /// One past the newest readable offset.
    pub max_offset: i64,
    /// Store time of the oldest readable message in milliseconds, -1 without one.
    pub first_store_timestamp: i64,
    /// Store time of the newest readable message in milliseconds, 0 without one.
    pub last_store_timestamp: i64,
}

/// One committed consumer offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffsetReport {
    /// Consumer group.
    pub group: String,
    /// Topic.
    pub topic: String,
    /// Queue id.
    pub queue_id: i32,
    /// Committed offset.
    pub offset: i64,
    /// Next offset of the last pull, -1 when none was seen since the start.
    pub pull_offset: i64,
    /// Store time in milliseconds of the message before the committed offset, 0 when unknown.
    pub last_timestamp: i64,
    /// Messages popped and not acknowledged.
    pub in_flight: i64,
    /// Offset of the oldest of them; nothing when there is none.
    pub held_from: Option<i64>,
    /// When the message held longest was popped, in milliseconds; 0 without one.
    pub held_since_ms: i64,
}

impl OffsetReport {
    /// Up to where everything is consumed: the committed offset, or the oldest message that was
    /// popped and is not acknowledged.
    #[must_use]
    pub fn consumed(&self) -> i64 {
        self.held_from.unwrap_or(self.offset).min(self.offset)
    }

    /// Up to where messages were handed out.
    #[must_use]
    pub fn handed_out(&self) -> i64 {
        let held = self.held_from.map_or(0, |from| from + self.in_flight);
        self.pull_offset.max(self.offset).max(held)
    }
}

/// Store figures of one shard. Counters run from the start of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreReport {
    /// Shard number.
    pub shard: u16,
    /// Lowest kept physical offset.
    pub log_min_offset: i64,
    /// One past the highest physical offset.
    pub log_max_offset: i64,
    /// Bytes appended but not yet flushed to the device.
    pub flush_behind_bytes: i64,
    /// Store time of the oldest message in milliseconds, -1 without one.
    pub earliest_store_timestamp: i64,
    /// Messages appended.
    pub put_messages: u64,
    /// Bytes appended (records).
    pub put_bytes: u64,
    /// Appends refused.
    pub put_refused: u64,
    /// Longest append-to-ack time in microseconds.
    pub put_latency_max_us: u64,
    /// 99th percentile of the append-to-ack time in microseconds.
    pub put_latency_p99_us: u64,
    /// 99.9th percentile of the append-to-ack time in microseconds.
    pub put_latency_p999_us: u64,
    /// Messages handed to consumers.
    pub get_messages: u64,
    /// Pulls that found something.
    pub get_found: u64,
    /// Pulls that found nothing.
    pub get_missed: u64,
    /// Bytes handed to consumers.
    pub get_bytes: u64,
    /// Pulls parked now.
    pub parked_pulls: u64,
    /// Directory of the log.
    pub log_dir: String,
    /// Size of the file system of the log in bytes, 0 before it was first measured.
    pub disk_total_bytes: u64,
    /// Bytes of it that are free.
    pub disk_free_bytes: u64,
    /// Reason the shard refuses writes, if it does.
    pub refusing: Option<String>,
    /// Delayed messages not yet delivered, by level (level 0 has a time of its
    /// own) and count.
    pub delayed: Vec<(i32, u64)>,
    /// Open transactions.
    pub transactions_open: u64,
    /// Store time of the oldest open half message in milliseconds, 0 without one.
    pub transaction_oldest_ms: i64,
    /// Figures of timed messages.
    pub timers: shard::TimerReport,
    /// Bytes of timed messages that keep retention from dropping a segment.
    pub timers_held_bytes: u64,
    /// Messages put per topic since the start: (topic, messages, bytes).
    pub topic_put: Vec<(String, u64, u64)>,
    /// Messages got per (topic, group) since the start: (topic, group, messages, bytes).
    pub group_get: Vec<(String, String, u64, u64)>,
    /// Messages passed over by filters since the start: (topic, group, queue id, messages).
    pub group_passed: Vec<(String, String, i32, u64)>,
}

/// Everything one core reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Reporting core.
    pub core: usize,
    /// Queues of its shards.
    pub queues: Vec<QueueReport>,
    /// Consumer offsets of its shards.
    pub offsets: Vec<OffsetReport>,
    /// Its shards.
    pub stores: Vec<StoreReport>,
}
