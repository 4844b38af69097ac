//! Owns the message as RocketMQ stores it: the record, its properties, batches, ids and tags.
//!
//! Invariant: what [`RecordView`] accepts is whole, every inner length adding up to the total, and
//! what [`RecordFields`] writes is accepted by it.

pub mod batch;
pub mod filter;
pub mod ids;
pub mod properties;
mod recall;
mod record;
pub mod sysflag;
pub mod tags;

pub use recall::{RECALL_HANDLE_BYTES_MAX, RecallHandle};
pub use record::{
    BODY_BYTES_MAX, MAGIC_BLANK, MAGIC_V1, MAGIC_V2, PROPERTIES_BYTES_MAX, RECORD_BYTES_MIN,
    RecordError, RecordFields, RecordView, TOPIC_BYTES_MAX, body_crc, peek_len,
};
