//! Answers that wait for a shard's watermark.
//!
//! An answer is encoded when the message is appended; its bytes wait in one queue per shard, in log
//! order, and leave when the watermark passes the message's end.
//!
//! Invariant: answers leave in log order, each exactly once, and never before their message is as
//! durable as the flush mode promises (P1).

use std::collections::VecDeque;

use super::messages::ReplyTo;

/// One waiting answer.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Log position that must be reached.
    pub end: u64,
    /// Where it goes.
    pub to: ReplyTo,
    /// Bytes of the encoded answer.
    pub len: usize,
    /// Monotonic time of the append in microseconds.
    pub since_us: u64,
}

/// The waiting answers of one shard.
#[derive(Default)]
pub struct WaitingReplies {
    waiting: VecDeque<Waiting>,
    bytes: VecDeque<u8>,
}

impl WaitingReplies {
    /// Adds an answer; `encoded` is its frame.
    pub fn push(&mut self, end: u64, to: ReplyTo, since_us: u64, encoded: &[u8]) {
        self.bytes.extend(encoded);
        self.waiting.push_back(Waiting {
            end,
            to,
            len: encoded.len(),
            since_us,
        });
    }

    /// Answers waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The oldest answer.
    #[must_use]
    pub fn front(&self) -> Option<&Waiting> {
        self.waiting.front()
    }

    /// Takes the oldest answer if `due` says so; its frame is appended to `out`.
    pub fn take(
        &mut self,
        due: impl FnOnce(&Waiting) -> bool,
        out: &mut Vec<u8>,
    ) -> Option<Waiting> {
        if !due(self.waiting.front()?) {
            return None;
        }
        let waiting = self.waiting.pop_front()?;
        let (first, second) = self.bytes.as_slices();
        let from_first = waiting.len.min(first.len());
        out.extend_from_slice(first.get(..from_first).unwrap_or_default());
        out.extend_from_slice(second.get(..waiting.len - from_first).unwrap_or_default());
        self.bytes.drain(..waiting.len);
        Some(waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::effects::ClientLink;
    use wire::frame::Serialization;

    fn to(opaque: i32) -> ReplyTo {
        let link = ClientLink {
            core: 0,
            connection: 1,
        };
        ReplyTo {
            link,
            opaque,
            serialization: Serialization::Json,
            oneway: false,
        }
    }

    #[test]
    fn no_answer_leaves_before_its_end_is_reached() {
        let mut replies = WaitingReplies::default();
        replies.push(100, to(1), 0, b"one");
        replies.push(200, to(2), 0, b"three");
        let mut out = Vec::new();
        assert!(
            replies
                .take(|waiting| waiting.end <= 99, &mut out)
                .is_none()
        );
        assert_eq!(
            replies
                .take(|waiting| waiting.end <= 100, &mut out)
                .unwrap()
                .to
                .opaque,
            1
        );
        assert!(
            replies
                .take(|waiting| waiting.end <= 100, &mut out)
                .is_none()
        );
        assert_eq!(
            replies
                .take(|waiting| waiting.end <= 200, &mut out)
                .unwrap()
                .to
                .opaque,
            2
        );
        assert_eq!(out, b"onethree");
        assert!(replies.is_empty());
    }
}
