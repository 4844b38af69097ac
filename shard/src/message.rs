//! A message on its way into a queue.
//!
//! Invariant: it borrows everything; nothing is copied before the record is encoded into the write
//! buffer.

use std::net::SocketAddr;

use wire::message::{RecordFields, RecordView, properties, tags};

use crate::queue::QueueIndex;

/// A message to append.
pub struct NewMessage<'a> {
    /// Target queue.
    pub queue: QueueIndex,
    /// User flag.
    pub flag: i32,
    /// System flag, without the host bits.
    pub sys_flag: i32,
    /// Time of birth in milliseconds, from the client.
    pub born_timestamp: i64,
    /// Where it was born.
    pub born_host: SocketAddr,
    /// Deliveries so far.
    pub reconsume_times: i32,
    /// Physical offset of the half message it commits, else 0. Negative numbers are the shard's
    /// own: they name the message that a copy comes from.
    pub prepared_transaction_offset: i64,
    /// Body as stored.
    pub body: &'a [u8],
    /// Properties in parts.
    pub properties: &'a [&'a [u8]],
    /// Tag hash.
    pub tags_code: i64,
    /// Unique key, for the index.
    pub unique_key: Option<&'a [u8]>,
    /// Other keys separated by spaces, for the index.
    pub keys: Option<&'a [u8]>,
}

impl<'a> NewMessage<'a> {
    /// The record of this message in its queue; its physical offset is still missing.
    pub(crate) fn fields(
        &self,
        topic: &'a str,
        (queue_id, queue_offset): (i32, u64),
        store_timestamp: i64,
        store_host: SocketAddr,
    ) -> RecordFields<'a> {
        RecordFields {
            queue_id,
            flag: self.flag,
            queue_offset: queue_offset as i64,
            physical_offset: 0,
            sys_flag: self.sys_flag,
            born_timestamp: self.born_timestamp,
            born_host: self.born_host,
            store_timestamp,
            store_host,
            reconsume_times: self.reconsume_times,
            prepared_transaction_offset: self.prepared_transaction_offset,
            body: self.body,
            topic: topic.as_bytes(),
            properties: self.properties,
        }
    }

    /// A stored record again, in another queue: its properties are still missing, what is looked
    /// for is that of `stored`, and it commits nothing.
    #[must_use]
    pub fn of_record(view: &RecordView<'a>, queue: QueueIndex, stored: &'a [u8]) -> Self {
        let (tags_code, unique_key, keys) = tag_and_keys(stored);
        Self {
            queue,
            flag: view.flag(),
            sys_flag: view.sys_flag(),
            born_timestamp: view.born_timestamp(),
            born_host: view.born_host(),
            reconsume_times: view.reconsume_times(),
            prepared_transaction_offset: 0,
            body: view.body(),
            properties: &[],
            tags_code,
            unique_key,
            keys,
        }
    }
}

/// Tag hash, unique key and other keys of stored properties.
pub(crate) fn tag_and_keys(stored: &[u8]) -> (i64, Option<&[u8]>, Option<&[u8]>) {
    let tags_code = tags::tags_code(properties::get_str(stored, properties::TAGS));
    let unique = properties::get(stored, properties::UNIQ_KEY);
    (tags_code, unique, properties::get(stored, properties::KEYS))
}
