//! Owns the handle that a producer gets for a timed message and takes it back with.
//!
//! It is the base64 (URL alphabet, padded) of words between blanks: `v1`, topic, broker name, time
//! due in milliseconds, unique key. A broker may put more words behind them, which clients ignore.
//!
//! Invariant: what [`RecallHandle::encode`] writes, [`RecallHandle::decode`] reads back.

use crate::body::{base64_decode, base64_encode};

/// Longest handle that is read, in bytes.
pub const RECALL_HANDLE_BYTES_MAX: usize = 4096;

/// What a handle says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecallHandle {
    /// Topic.
    pub topic: String,
    /// Broker that keeps the message.
    pub broker: String,
    /// Time due in milliseconds, as it was written.
    pub due_ms: i64,
    /// Unique key of the message.
    pub unique_key: String,
    /// Physical offset at which it was stored, if the handle says it.
    pub offset: Option<i64>,
}

impl RecallHandle {
    /// The text for clients.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut words = format!(
            "v1 {} {} {} {}",
            self.topic, self.broker, self.due_ms, self.unique_key
        );
        if let Some(offset) = self.offset {
            words.push_str(&format!(" {offset}"));
        }
        base64_encode(words.as_bytes())
            .replace('+', "-")
            .replace('/', "_")
    }

    /// Reads what a client sent; nothing when it is not a handle.
    #[must_use]
    pub fn decode(text: &str) -> Option<Self> {
        if text.len() > RECALL_HANDLE_BYTES_MAX {
            return None;
        }
        let bytes = base64_decode(&text.replace('-', "+").replace('_', "/"))?;
        let words = String::from_utf8(bytes).ok()?;
        let mut words = words.split(' ');
        if words.next() != Some("v1") {
            return None;
        }
        let (topic, broker) = (words.next()?, words.next()?);
        let due_ms = words.next()?.parse().unwrap_or(-1);
        let unique_key = words.next().filter(|key| !key.is_empty())?;
        Some(Self {
            topic: topic.to_owned(),
            broker: broker.to_owned(),
            due_ms,
            unique_key: unique_key.to_owned(),
            offset: words.next().and_then(|word| word.parse().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(offset: Option<i64>) -> RecallHandle {
        RecallHandle {
            topic: "Topic?>".to_owned(),
            broker: "broker-a".to_owned(),
            due_ms: 1_700_000_000_123,
            unique_key: "7F00000100002A139A55".to_owned(),
            offset,
        }
    }

    #[test]
    fn handles_come_back_with_and_without_an_offset() {
        for offset in [None, Some(0), Some(1 << 60)] {
            let text = handle(offset).encode();
            assert!(!text.contains(['+', '/']), "{text}");
            assert_eq!(RecallHandle::decode(&text), Some(handle(offset)));
            assert_eq!(
                RecallHandle::decode(text.trim_end_matches('=')),
                Some(handle(offset))
            );
        }
    }

    #[test]
    fn what_another_broker_wrote_is_read() {
        // `v1 t b 5000 k`
        let found = RecallHandle::decode("djEgdCBiIDUwMDAgaw==").unwrap();
        assert_eq!((found.due_ms, found.offset), (5_000, None));
        assert_eq!((&*found.topic, &*found.unique_key), ("t", "k"));
    }

    #[test]
    fn nonsense_is_no_handle() {
        let long = "A".repeat(RECALL_HANDLE_BYTES_MAX + 4);
        let other = base64_encode(b"v2 t b 5000 k");
        let short = base64_encode(b"v1 t b 5000");
        for text in ["", "=", "v1 t b 5000 k", "\u{e9}", &long, &other, &short] {
            assert_eq!(RecallHandle::decode(text), None, "{text}");
        }
    }
}
