//! Receipts, and the texts in answers from which clients make them.
//!
//! Invariant: what a receipt says is what the record of the pop says; the forms are RocketMQ's.

use std::fmt::Write as _;

use crate::control::names::RETRY_PREFIX;

/// Revive queue id of receipts of ordered pops.
pub const ORDERED_REVIVE_QUEUE: i64 = 999;

/// Whether a topic is one with retry messages of POP, as it is marked in answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub enum Kind {
    /// The topic itself.
    Normal = 0,
    /// Group and topic joined by `_`.
    RetryV1 = 1,
    /// Group and topic joined by `+`.
    RetryV2 = 2,
}

/// The retry topic of a topic for a group.
pub fn retry_topic(topic: &str, group: &str, v2: bool) -> String {
    let separator = if v2 { '+' } else { '_' };
    format!("{RETRY_PREFIX}{group}{separator}{topic}")
}

/// The topic itself, of a topic or its retry topic for a group.
pub fn normal_topic<'a>(topic: &'a str, group: &str) -> &'a str {
    let rest = topic
        .strip_prefix(RETRY_PREFIX)
        .and_then(|rest| rest.strip_prefix(group));
    let rest = rest.and_then(|rest| rest.strip_prefix('_').or_else(|| rest.strip_prefix('+')));
    rest.unwrap_or(topic)
}

/// What a consumer gives back with an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    /// When the message was handed out, in milliseconds.
    pub pop_ms: i64,
    /// For how long, in milliseconds.
    pub invisible_ms: i64,
    /// Revive queue id; only told back.
    pub revive_queue: i64,
}

impl Receipt {
    /// Reads a receipt.
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ').skip(1);
        Some(Self {
            pop_ms: words.next()?.parse().ok()?,
            invisible_ms: words.next()?.parse().ok()?,
            revive_queue: words.next()?.parse().ok()?,
        })
    }

    /// Whether its time is over.
    pub fn is_over(&self, now_ms: i64) -> bool {
        self.pop_ms.saturating_add(self.invisible_ms) <= now_ms
    }
}

/// The texts of an answer that tell where its messages are from.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct OffsetInfo {
    /// First offset looked at, by queue.
    pub start: String,
    /// Offsets of the messages, by queue.
    pub messages: String,
    /// How often ordered messages were handed out before.
    pub order_counts: String,
}

fn next(out: &mut String) {
    if !out.is_empty() {
        out.push(';');
    }
}

impl OffsetInfo {
    /// Adds the messages of a queue.
    pub fn add(&mut self, kind: Kind, queue_id: i32, start: u64, offsets: &[u64]) {
        let mark = kind as u8;
        next(&mut self.start);
        let _ = write!(self.start, "{mark} {queue_id} {start}");
        next(&mut self.messages);
        let _ = write!(self.messages, "{mark} {queue_id} ");
        for (index, offset) in offsets.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(self.messages, "{comma}{offset}");
        }
    }

    /// Adds how often messages of a queue were handed out before.
    pub fn add_counts(&mut self, queue_id: i32, counts: &[(u64, i32)]) {
        let mark = Kind::Normal as u8;
        let least = counts.iter().map(|(_, count)| *count).min().unwrap_or(0);
        for (offset, count) in counts.iter().filter(|(_, count)| *count > 0) {
            next(&mut self.order_counts);
            let _ = write!(self.order_counts, "{mark} qo{queue_id}%{offset} {count}");
        }
        next(&mut self.order_counts);
        let _ = write!(self.order_counts, "{mark} {queue_id} {least}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_is_read_with_and_without_the_offset_behind_it() {
        let receipt = Receipt::parse("7 1000 60000 3 0 broker-a 2 9").unwrap();
        assert_eq!((receipt.pop_ms, receipt.invisible_ms), (1000, 60_000));
        assert_eq!(Receipt::parse("7 1000 60000 3 0 broker-a 2"), Some(receipt));
        assert!(receipt.is_over(61_000) && !receipt.is_over(60_999));
        for bad in ["", "7", "7 x 1 2", "7 1 2"] {
            assert_eq!(Receipt::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn retry_topics_lead_back_to_their_topic() {
        for v2 in [false, true] {
            assert_eq!(normal_topic(&retry_topic("T_a", "g_1", v2), "g_1"), "T_a");
        }
        assert_eq!(normal_topic("T", "g"), "T");
        assert_eq!(normal_topic("%RETRY%g", "g"), "%RETRY%g");
    }

    #[test]
    fn texts_of_an_answer_have_the_form_clients_read() {
        let mut info = OffsetInfo::default();
        info.add(Kind::Normal, 3, 7, &[7, 9]);
        info.add(Kind::RetryV1, 0, 0, &[0]);
        assert_eq!(info.start, "0 3 7;1 0 0");
        assert_eq!(info.messages, "0 3 7,9;1 0 0");
        info.add_counts(3, &[(7, 2), (9, 0)]);
        assert_eq!(info.order_counts, "0 qo3%7 2;0 3 0");
    }
}
