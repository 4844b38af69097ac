//! Owns the properties string: `name 0x01 value 0x02`, again and again.
//!
//! Invariant: entries without a name or without a value are not there, as for every other
//! implementation; where a name occurs twice the last one counts. The closing 0x02 may be missing.

use memchr::{memchr, memchr_iter};

/// Stands between name and value.
pub const NAME_VALUE_SEPARATOR: u8 = 1;
/// Stands behind every entry.
pub const ENTRY_SEPARATOR: u8 = 2;
/// Properties with this prefix are not stored.
pub const TRANSIENT_PREFIX: &str = "__RMQ.TRANSIENT.";

/// Defines the names of properties that mean something to a broker or client.
macro_rules! names {
    ($($name:ident = $text:literal,)*) => {
        $(
            #[doc = concat!("Property `", $text, "`.")]
            pub const $name: &str = $text;
        )*
    };
}

names! {
    KEYS = "KEYS",
    TAGS = "TAGS",
    WAIT = "WAIT",
    DELAY = "DELAY",
    RETRY_TOPIC = "RETRY_TOPIC",
    REAL_TOPIC = "REAL_TOPIC",
    REAL_QUEUE_ID = "REAL_QID",
    TRANSACTION_PREPARED = "TRAN_MSG",
    PRODUCER_GROUP = "PGROUP",
    MIN_OFFSET = "MIN_OFFSET",
    MAX_OFFSET = "MAX_OFFSET",
    BUYER_ID = "BUYER_ID",
    ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID",
    TRANSFER_FLAG = "TRANSFER_FLAG",
    CORRECTION_FLAG = "CORRECTION_FLAG",
    MQ2_FLAG = "MQ2_FLAG",
    RECONSUME_TIME = "RECONSUME_TIME",
    MSG_REGION = "MSG_REGION",
    TRACE_ON = "TRACE_ON",
    UNIQ_KEY = "UNIQ_KEY",
    EXTEND_UNIQ_INFO = "EXTEND_UNIQ_INFO",
    MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES",
    CONSUME_START_TIME = "CONSUME_START_TIME",
    INNER_NUM = "INNER_NUM",
    INNER_BASE = "INNER_BASE",
    DUP_INFO = "DUP_INFO",
    CHECK_IMMUNITY_TIME_IN_SECONDS = "CHECK_IMMUNITY_TIME_IN_SECONDS",
    TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET",
    TRANSACTION_ID = "__transactionId__",
    TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES",
    INSTANCE_ID = "INSTANCE_ID",
    CORRELATION_ID = "CORRELATION_ID",
    REPLY_TO_CLIENT = "REPLY_TO_CLIENT",
    TTL = "TTL",
    ARRIVE_TIME = "ARRIVE_TIME",
    PUSH_REPLY_TIME = "PUSH_REPLY_TIME",
    CLUSTER = "CLUSTER",
    MSG_TYPE = "MSG_TYPE",
    POP_CK = "POP_CK",
    POP_CK_OFFSET = "POP_CK_OFFSET",
    FIRST_POP_TIME = "1ST_POP_TIME",
    SHARDING_KEY = "__SHARDINGKEY",
    FORWARD_QUEUE_ID = "PROPERTY_FORWARD_QUEUE_ID",
    REDIRECT = "REDIRECT",
    INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH",
    INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET",
    TRACE_CONTEXT = "TRACE_CONTEXT",
    TIMER_DELAY_SEC = "TIMER_DELAY_SEC",
    TIMER_DELAY_MS = "TIMER_DELAY_MS",
    TIMER_DELIVER_MS = "TIMER_DELIVER_MS",
    TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS",
    TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS",
    TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES",
    TIMER_OUT_MS = "TIMER_OUT_MS",
    TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY",
    TIMER_DELAY_LEVEL = "TIMER_DELAY_LEVEL",
    BORN_HOST = "__BORNHOST",
    BORN_TIMESTAMP = "BORN_TIMESTAMP",
    CRC32 = "__CRC32#",
    DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC",
    DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID",
}

/// Splits one entry; nothing when it lacks a name or a value.
fn split_entry(entry: &[u8]) -> Option<(&[u8], &[u8])> {
    let (name, value) = entry.split_at_checked(memchr(NAME_VALUE_SEPARATOR, entry)?)?;
    let value = value.get(1..)?;
    if name.is_empty() || value.is_empty() {
        None
    } else {
        Some((name, value))
    }
}

/// Names and values in order.
pub fn iter(properties: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let mut start = 0;
    let ends = memchr_iter(ENTRY_SEPARATOR, properties).chain([properties.len()]);
    ends.filter_map(move |end| {
        let entry = properties.get(start..end).unwrap_or_default();
        start = end + 1;
        split_entry(entry)
    })
}

/// The value of a property.
pub fn get<'a>(properties: &'a [u8], name: &str) -> Option<&'a [u8]> {
    iter(properties)
        .filter(|(found, _)| *found == name.as_bytes())
        .map(|(_, value)| value)
        .last()
}

/// The value of a property as text; nothing when it is not UTF-8.
pub fn get_str<'a>(properties: &'a [u8], name: &str) -> Option<&'a str> {
    get(properties, name).and_then(|value| std::str::from_utf8(value).ok())
}

/// Appends a property. An empty value is not written, because readers would drop the entry.
pub fn append(out: &mut Vec<u8>, name: &str, value: &str) {
    append_bytes(out, name.as_bytes(), value.as_bytes());
}

fn append_bytes(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    if name.is_empty() || value.is_empty() {
        return;
    }
    out.extend_from_slice(name);
    out.push(NAME_VALUE_SEPARATOR);
    out.extend_from_slice(value);
    out.push(ENTRY_SEPARATOR);
}

/// A new properties string without the properties of these names.
pub fn remove(properties: &[u8], names: &[&str]) -> Vec<u8> {
    let mut out = Vec::with_capacity(properties.len() + 1);
    for (name, value) in iter(properties) {
        if !names.iter().any(|removed| removed.as_bytes() == name) {
            append_bytes(&mut out, name, value);
        }
    }
    out
}

/// Whether a separator must go between this string and an entry appended to it.
pub fn needs_separator(properties: &[u8]) -> bool {
    properties
        .last()
        .is_some_and(|last| *last != ENTRY_SEPARATOR)
}
