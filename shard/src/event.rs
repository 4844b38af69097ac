//! Internal records: consumer offsets, delivery progress, removals, queue ends and end marks live
//! in the commit log itself.
//!
//! An event is stored as an ordinary record of [`EVENT_TOPIC`] that belongs to no queue. So it is
//! exactly as durable as the messages around it, needs no second journal, and recovery meets it in
//! order. Run files repeat the events of their log range.
//!
//! Invariant: the kind numbers below are never reused.

use crate::pop::PopEvent;

/// Topic of internal records. Clients can neither send to it nor read it.
pub const EVENT_TOPIC: &str = "rmq_sys_pinion_event";

/// One internal record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A consumer group committed an offset; `-1` forgets it.
    Offset {
        /// Topic.
        topic: String,
        /// Consumer group.
        group: String,
        /// Queue id.
        queue_id: i32,
        /// Committed offset.
        offset: i64,
    },
    /// Delayed messages that a store of an earlier form had waiting by level have been delivered or
    /// moved to the timer queue up to an offset.
    DelayProgress {
        /// Level, from 1.
        level: i32,
        /// Next offset of its queue.
        offset: i64,
    },
    /// A topic was removed: its queues and the offsets on it are gone.
    TopicRemoved {
        /// Topic.
        topic: String,
    },
    /// All offsets of a group were removed.
    GroupRemoved {
        /// Consumer group.
        group: String,
    },
    /// The checksum over all records from a log position up to this one.
    EndMark {
        /// Position of the first record.
        from: u64,
        /// Checksum over the records' checksums.
        hash: u64,
    },
    /// Ends of queues whose last messages retention is about to drop.
    QueueEnds {
        /// Topic, queue id and next offset.
        queues: Vec<(String, i32, u64)>,
    },
    /// Something happened to messages that were popped.
    Pop(PopEvent),
    /// A half message was stored. Only run files have this: the log has the message itself.
    HalfOpened {
        /// Offset in the queue of half messages.
        queue_offset: u64,
        /// Record length in bytes.
        size: u32,
        /// Store time in milliseconds.
        stored_ms: i64,
        /// How long the producer asked not to be asked, in milliseconds; -1 leaves it to the
        /// broker.
        immunity_ms: i64,
        /// Hash of the producer group.
        group_hash: u64,
    },
    /// The transaction of a half message ended. Only for roll-backs and dropped ones the log has
    /// this; a commit and giving up are told by the message they store.
    HalfEnded {
        /// Log position of the half message.
        half: u64,
        /// How it ended, as [`HalfEnd`](crate::half::HalfEnd) numbers it.
        how: u8,
    },
    /// Producers are being asked about these half messages.
    HalfChecked {
        /// Time in milliseconds.
        at_ms: i64,
        /// Log positions of the half messages.
        halves: Vec<u64>,
    },
    /// Timed messages in front of this record are done up to a time and place. Runs have it for
    /// delivered records too, which say it by naming their origin.
    TimerProgress {
        /// Time due in milliseconds.
        due_ms: i64,
        /// Log position of the message that was due then.
        position: u64,
    },
    /// Timed messages up to a log position are done or copied forward. Runs have it for copies
    /// too, which name their origin.
    TimersRolled {
        /// Log position.
        position: u64,
    },
}

const OFFSET: u8 = 1;
const DELAY_PROGRESS: u8 = 2;
const TOPIC_REMOVED: u8 = 3;
const GROUP_REMOVED: u8 = 4;
const END_MARK: u8 = 5;
const QUEUE_ENDS: u8 = 6;
/// Kind of [`Event::HalfOpened`].
pub(crate) const HALF_OPENED: u8 = 7;
/// Kind of [`Event::HalfEnded`].
pub(crate) const HALF_ENDED: u8 = 8;
const HALF_CHECKED: u8 = 9;
const TIMER_PROGRESS: u8 = 10;
const TIMERS_ROLLED: u8 = 11;

/// Bytes of the stored form of an end mark.
pub const END_MARK_BYTES: usize = 17;

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    let len = text.len().min(usize::from(u16::MAX)) as u16;
    out.extend_from_slice(&len.to_be_bytes());
    out.extend(text.bytes().take(usize::from(len)));
}

/// Writes the stored form of an offset commit without building an [`Event`].
pub fn encode_offset(out: &mut Vec<u8>, topic: &str, group: &str, queue_id: i32, offset: i64) {
    out.push(OFFSET);
    out.extend_from_slice(&queue_id.to_be_bytes());
    out.extend_from_slice(&offset.to_be_bytes());
    put_text(out, topic);
    put_text(out, group);
}

/// The stored form of an end mark, without building an [`Event`].
#[must_use]
pub fn encode_end_mark(from: u64, hash: u64) -> [u8; END_MARK_BYTES] {
    let mut out = [0; END_MARK_BYTES];
    let (kind, rest) = out.split_at_mut(1);
    let (first, second) = rest.split_at_mut(8);
    kind.copy_from_slice(&[END_MARK]);
    first.copy_from_slice(&from.to_be_bytes());
    second.copy_from_slice(&hash.to_be_bytes());
    out
}

pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn int(&mut self) -> Option<i32> {
        Some(i32::from_be_bytes(*self.take(4)?.first_chunk()?))
    }

    pub(crate) fn long(&mut self) -> Option<i64> {
        Some(i64::from_be_bytes(*self.take(8)?.first_chunk()?))
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        let len = u16::from_be_bytes(*self.take(2)?.first_chunk()?);
        String::from_utf8(self.take(usize::from(len))?.to_vec()).ok()
    }
}

impl Event {
    /// Appends the stored form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Offset {
                topic,
                group,
                queue_id,
                offset,
            } => {
                encode_offset(out, topic, group, *queue_id, *offset);
            }
            Self::DelayProgress { level, offset } => {
                out.push(DELAY_PROGRESS);
                out.extend_from_slice(&level.to_be_bytes());
                out.extend_from_slice(&offset.to_be_bytes());
            }
            Self::TopicRemoved { topic } => {
                out.push(TOPIC_REMOVED);
                put_text(out, topic);
            }
            Self::GroupRemoved { group } => {
                out.push(GROUP_REMOVED);
                put_text(out, group);
            }
            Self::EndMark { from, hash } => out.extend_from_slice(&encode_end_mark(*from, *hash)),
            Self::QueueEnds { queues } => {
                out.push(QUEUE_ENDS);
                for (topic, queue_id, next_offset) in queues {
                    put_text(out, topic);
                    out.extend_from_slice(&queue_id.to_be_bytes());
                    out.extend_from_slice(&next_offset.to_be_bytes());
                }
            }
            Self::Pop(event) => event.encode(out),
            Self::HalfOpened { .. } | Self::HalfEnded { .. } | Self::HalfChecked { .. } => {
                self.encode_half(out);
            }
            Self::TimerProgress { due_ms, position } => {
                out.push(TIMER_PROGRESS);
                out.extend_from_slice(&due_ms.to_be_bytes());
                out.extend_from_slice(&position.to_be_bytes());
            }
            Self::TimersRolled { position } => {
                out.push(TIMERS_ROLLED);
                out.extend_from_slice(&position.to_be_bytes());
            }
        }
    }

    fn encode_half(&self, out: &mut Vec<u8>) {
        match self {
            Self::HalfOpened {
                queue_offset,
                size,
                stored_ms,
                immunity_ms,
                group_hash,
            } => {
                out.push(HALF_OPENED);
                out.extend_from_slice(&queue_offset.to_be_bytes());
                out.extend_from_slice(&size.to_be_bytes());
                out.extend_from_slice(&stored_ms.to_be_bytes());
                out.extend_from_slice(&immunity_ms.to_be_bytes());
                out.extend_from_slice(&group_hash.to_be_bytes());
            }
            Self::HalfEnded { half, how } => {
                out.push(HALF_ENDED);
                out.extend_from_slice(&half.to_be_bytes());
                out.push(*how);
            }
            Self::HalfChecked { at_ms, halves } => {
                out.push(HALF_CHECKED);
                out.extend_from_slice(&at_ms.to_be_bytes());
                for half in halves {
                    out.extend_from_slice(&half.to_be_bytes());
                }
            }
            _ => {}
        }
    }

    /// Reads the stored form; `None` when it is damaged or of an unknown kind.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let mut reader = Reader(rest);
        let event = match *kind {
            OFFSET => {
                let queue_id = reader.int()?;
                let offset = reader.long()?;
                let topic = reader.text()?;
                Self::Offset {
                    topic,
                    group: reader.text()?,
                    queue_id,
                    offset,
                }
            }
            DELAY_PROGRESS => Self::DelayProgress {
                level: reader.int()?,
                offset: reader.long()?,
            },
            TOPIC_REMOVED => Self::TopicRemoved {
                topic: reader.text()?,
            },
            GROUP_REMOVED => Self::GroupRemoved {
                group: reader.text()?,
            },
            END_MARK => Self::EndMark {
                from: reader.long()? as u64,
                hash: reader.long()? as u64,
            },
            QUEUE_ENDS => {
                let mut queues = Vec::new();
                while !reader.0.is_empty() {
                    queues.push((reader.text()?, reader.int()?, reader.long()? as u64));
                }
                Self::QueueEnds { queues }
            }
            kind if PopEvent::is_kind(kind) => Self::Pop(PopEvent::read(kind, &mut reader)?),
            HALF_OPENED => Self::HalfOpened {
                queue_offset: reader.long()? as u64,
                size: reader.int()? as u32,
                stored_ms: reader.long()?,
                immunity_ms: reader.long()?,
                group_hash: reader.long()? as u64,
            },
            HALF_ENDED => Self::HalfEnded {
                half: reader.long()? as u64,
                how: *reader.take(1)?.first()?,
            },
            HALF_CHECKED => {
                let at_ms = reader.long()?;
                let mut halves = Vec::with_capacity(reader.0.len() / 8);
                while !reader.0.is_empty() {
                    halves.push(reader.long()? as u64);
                }
                Self::HalfChecked { at_ms, halves }
            }
            TIMER_PROGRESS => Self::TimerProgress {
                due_ms: reader.long()?,
                position: reader.long()? as u64,
            },
            TIMERS_ROLLED => Self::TimersRolled {
                position: reader.long()? as u64,
            },
            _ => return None,
        };
        reader.0.is_empty().then_some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_back_from_their_stored_form() {
        let events = [
            Event::Offset {
                topic: "T".into(),
                group: "g".into(),
                queue_id: 3,
                offset: 1 << 40,
            },
            Event::DelayProgress {
                level: 18,
                offset: 7,
            },
            Event::TimerProgress {
                due_ms: 1 << 42,
                position: 7,
            },
            Event::TimersRolled { position: 1 << 40 },
            Event::TopicRemoved { topic: "T".into() },
            Event::GroupRemoved { group: "g".into() },
            Event::EndMark {
                from: 1 << 50,
                hash: u64::MAX,
            },
            Event::HalfOpened {
                queue_offset: 9,
                size: 300,
                stored_ms: 1 << 41,
                immunity_ms: -1,
                group_hash: u64::MAX,
            },
            Event::HalfEnded {
                half: 1 << 40,
                how: 2,
            },
        ];
        for event in events {
            let mut bytes = Vec::new();
            event.encode(&mut bytes);
            assert_eq!(Event::decode(&bytes), Some(event));
            for cut in 0..bytes.len() {
                assert_eq!(Event::decode(&bytes[..cut]), None);
            }
        }
    }

    #[test]
    fn checks_come_back_from_their_stored_form() {
        for halves in [vec![], vec![0, 1 << 54]] {
            let at_ms = 7;
            let event = Event::HalfChecked { at_ms, halves };
            let mut bytes = Vec::new();
            event.encode(&mut bytes);
            assert_eq!(Event::decode(&bytes), Some(event));
            assert_eq!(Event::decode(&bytes[..bytes.len() - 1]), None);
        }
    }

    #[test]
    fn queue_ends_come_back_from_their_stored_form() {
        let queues = vec![("T".to_owned(), 0, 7), ("U".to_owned(), -1, 1 << 40)];
        let event = Event::QueueEnds { queues };
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        assert_eq!(Event::decode(&bytes), Some(event));
        assert_eq!(Event::decode(&bytes[..bytes.len() - 1]), None);
    }
}
