//! One core's engine: the runtime seam, locked buffers, segments, group commit, recovery, queues,
//! the key index, reads, timers and the mesh between cores.
//!
//! It knows nothing of sockets' protocols and request codes: callers append records, read them
//! back and ask for watermarks.

pub mod address;
pub mod cold;
mod counters;
pub mod error;
pub mod event;
pub mod half;
pub mod half_checks;
pub mod half_ends;
pub mod io;
pub mod latency;
pub mod log;
pub mod maintain;
pub mod mark;
pub mod memory;
pub mod mesh;
mod message;
pub mod offsets;
pub mod parked;
pub mod pop;
pub mod queue;
mod rebuild;
pub mod recovery;
pub mod repeated;
mod replay;
pub mod run;
pub mod runtime;
mod scan;
mod seal;
mod segments;
pub mod select;
mod shard;
mod timer;
pub mod units;

pub use counters::ShardCounters;
pub use error::{Refusal, StoreError};
pub use log::AckPoint;
pub use message::NewMessage;
pub use shard::{Appended, Shard, ShardConfig, TOKEN_SHARD_SHIFT};
pub use timer::{
    DUE_MS_MAX, LATENESS_BOUNDS_MS, LEVELS_MAX, Lateness, SCHEDULE_TOPIC, TIMER_TOPIC, TimerReport,
    WINDOW_MAX,
};
