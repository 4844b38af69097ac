//! Answers that wait for a shard's watermark.
//!
//! An answer is encoded when the message is appended; its bytes wait in one queue per shard, in log
//! order, and leave when the watermark passes the message's end.
//!
//! Invariant: answers leave in log order, each exactly once, and never before their message is as
//! durable as the flush mode promises (P1). Answers of sends that are given back never leave.

use std::collections::VecDeque;

use super::messages::ReplyTo;

/// Whose answer it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Awaited {
    /// That of a send: its client can send to another broker.
    Send,
    /// That of anything else, which only this broker can do.
    Other,
    /// Nobody's any more: the send was given back.
    GivenBack,
}

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
    /// Whose it is.
    pub awaited: Awaited,
}

/// Bytes of answers gone that are let lie in front of those that wait.
const GONE_BYTES_MAX: usize = 256 * 1024;

/// The waiting answers of one shard.
#[derive(Default)]
pub struct WaitingReplies {
    waiting: VecDeque<Waiting>,
    /// Frames one behind the other; those before `gone` have left.
    bytes: Vec<u8>,
    gone: usize,
}

impl WaitingReplies {
    /// Adds an answer; `encode` appends its frame.
    pub fn push(
        &mut self,
        end: u64,
        to: ReplyTo,
        since_us: u64,
        awaited: Awaited,
        encode: impl FnOnce(&mut Vec<u8>),
    ) {
        if self.waiting.is_empty() || self.gone > GONE_BYTES_MAX.max(self.bytes.len() / 2) {
            self.bytes.drain(..self.gone);
            self.gone = 0;
        }
        let start = self.bytes.len();
        encode(&mut self.bytes);
        self.waiting.push_back(Waiting {
            end,
            to,
            len: self.bytes.len() - start,
            since_us,
            awaited,
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

    /// Gives back the sends that wait: `give` answers them otherwise.
    pub fn give_back(&mut self, mut give: impl FnMut(&ReplyTo)) {
        let sends = self.waiting.iter_mut();
        for waiting in sends.filter(|waiting| waiting.awaited == Awaited::Send) {
            waiting.awaited = Awaited::GivenBack;
            give(&waiting.to);
        }
    }

    /// Takes the oldest answer, with its frame, if `due` says so.
    pub fn take(&mut self, due: impl FnOnce(&Waiting) -> bool) -> Option<(Waiting, &[u8])> {
        if !due(self.waiting.front()?) {
            return None;
        }
        let waiting = self.waiting.pop_front()?;
        let start = self.gone;
        self.gone += waiting.len;
        let frame = self.bytes.get(start..self.gone).unwrap_or_default();
        Some((waiting, frame))
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

    fn push(replies: &mut WaitingReplies, end: u64, opaque: i32, frame: &[u8]) {
        replies.push(end, to(opaque), 0, Awaited::Send, |out| {
            out.extend_from_slice(frame);
        });
    }

    #[test]
    fn no_answer_leaves_before_its_end_is_reached() {
        let mut replies = WaitingReplies::default();
        push(&mut replies, 100, 1, b"one");
        push(&mut replies, 200, 2, b"three");
        assert!(replies.take(|waiting| waiting.end <= 99).is_none());
        let (waiting, frame) = replies.take(|waiting| waiting.end <= 100).unwrap();
        assert_eq!((waiting.to.opaque, frame), (1, &b"one"[..]));
        assert!(replies.take(|waiting| waiting.end <= 100).is_none());
        let (waiting, frame) = replies.take(|waiting| waiting.end <= 200).unwrap();
        assert_eq!((waiting.to.opaque, frame), (2, &b"three"[..]));
        assert!(replies.is_empty());
    }

    #[test]
    fn only_sends_are_given_back_and_only_once() {
        let mut replies = WaitingReplies::default();
        push(&mut replies, 100, 1, b"send");
        replies.push(200, to(2), 0, Awaited::Other, |out| out.extend(b"offset"));
        push(&mut replies, 300, 3, b"send");
        let mut given = Vec::new();
        replies.give_back(|to| given.push(to.opaque));
        replies.give_back(|to| given.push(to.opaque));
        assert_eq!(given, [1, 3]);
        let mut left = Vec::new();
        while let Some((waiting, frame)) = replies.take(|_| true) {
            left.push((waiting.awaited, frame.to_vec()));
        }
        let other = left
            .iter()
            .filter(|(awaited, _)| *awaited != Awaited::GivenBack);
        let other: Vec<_> = other.map(|(_, frame)| &frame[..]).collect();
        assert_eq!(other, [b"offset"], "in their places");
    }

    #[test]
    fn frames_stay_their_own_while_others_come_and_go() {
        let mut replies = WaitingReplies::default();
        let frame = |number: i32| vec![number as u8; 1000 + number as usize % 7];
        let mut next = 0;
        for number in 0..5_000 {
            push(&mut replies, number as u64, number, &frame(number));
            // Two come for each that goes at first, then the other way round.
            let due = if number < 1_000 { number % 2 } else { 2 };
            for _ in 0..due {
                if let Some((waiting, bytes)) = replies.take(|_| true) {
                    assert_eq!((waiting.to.opaque, bytes), (next, &frame(next)[..]));
                    next += 1;
                }
            }
        }
        assert!(next > 4_900);
        assert!(
            replies.bytes.len() < 4 * GONE_BYTES_MAX,
            "what has left is freed"
        );
    }
}
