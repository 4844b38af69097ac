//! Internal records of POP: what was handed out, acknowledged, kept longer, moved on.
//!
//! Invariant: replaying the records of a log in order gives the table that wrote them; no record
//! speaks of a message that stands behind it in the log.

use wire::message::properties;

use crate::event::{Reader, put_text};

/// First kind of an internal record of POP.
pub const POP_KIND_FIRST: u8 = 15;
/// Last kind that is kept for POP.
pub const POP_KIND_LAST: u8 = 24;

const TAKEN: u8 = 15;
const ACKED: u8 = 16;
const CHANGED: u8 = 17;
const MOVED: u8 = 18;

/// Property of a copy that POP made: which message it is the copy of. The copy's record is at the
/// same time the note that the original is settled, so that a crash cannot part the two.
pub const POP_ORIGIN: &str = "PINION_POP_ORIGIN";

/// Value of the prepared transaction offset in the records of such copies. Clients can write
/// properties, but not this field, so that none can settle a message by sending one.
pub const POP_COPY_MARK: i64 = -0x50_4f50;

/// Offsets in one record.
pub const OFFSETS_PER_EVENT_MAX: usize = 65_535;

/// One queue as one consumer group pops it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct PopName {
    /// Topic.
    pub topic: String,
    /// Consumer group.
    pub group: String,
    /// Queue id.
    pub queue_id: i32,
}

/// One internal record of POP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PopEvent {
    /// Messages were handed out.
    Taken {
        /// Queue and group.
        name: PopName,
        /// Whether in order: they stay at the head of the queue until they are acknowledged.
        ordered: bool,
        /// Whether what was handed out in order before no longer counts.
        fresh: bool,
        /// When, in milliseconds.
        pop_ms: i64,
        /// For how long, in milliseconds.
        invisible_ms: i64,
        /// Where the next pop begins (where the group stands, when not in order).
        next_offset: i64,
        /// Attempt that may have them again (in order only).
        attempt: String,
        /// Their queue offsets.
        offsets: Vec<u64>,
    },
    /// Messages were acknowledged.
    Acked {
        /// Queue and group.
        name: PopName,
        /// When they had been handed out, in milliseconds.
        pop_ms: i64,
        /// Where the group stands now; -1 when that did not change.
        commit: i64,
        /// Their queue offsets.
        offsets: Vec<u64>,
    },
    /// A message stays invisible for another time.
    Changed {
        /// Queue and group.
        name: PopName,
        /// When it had been handed out, in milliseconds.
        pop_ms: i64,
        /// When it counts as handed out now, in milliseconds.
        new_pop_ms: i64,
        /// Until when it is invisible, in milliseconds.
        due_ms: i64,
        /// Its queue offset.
        offset: u64,
    },
    /// A message is settled without an acknowledgement: it has a copy in a retry or dead-letter
    /// topic, or retention has dropped it.
    Moved {
        /// Queue and group.
        name: PopName,
        /// When it had been handed out, in milliseconds.
        pop_ms: i64,
        /// Its queue offset.
        offset: u64,
        /// Where the group stands now; -1 when that did not change.
        commit: i64,
    },
}

fn put_name(out: &mut Vec<u8>, kind: u8, name: &PopName) {
    out.push(kind);
    out.extend_from_slice(&name.queue_id.to_be_bytes());
    put_text(out, &name.topic);
    put_text(out, &name.group);
}

fn put_offsets(out: &mut Vec<u8>, offsets: &[u64]) {
    let count = offsets.len().min(OFFSETS_PER_EVENT_MAX);
    out.extend_from_slice(&(count as u16).to_be_bytes());
    for offset in offsets.iter().take(count) {
        out.extend_from_slice(&offset.to_be_bytes());
    }
}

fn read_offsets(reader: &mut Reader<'_>) -> Option<Vec<u64>> {
    let count = u16::from_be_bytes(*reader.take(2)?.first_chunk()?);
    (0..count)
        .map(|_| reader.long().map(|offset| offset as u64))
        .collect()
}

impl PopEvent {
    /// Whether the kind of an internal record is one of POP's.
    #[must_use]
    pub fn is_kind(kind: u8) -> bool {
        (POP_KIND_FIRST..=POP_KIND_LAST).contains(&kind)
    }

    /// Queue and group it speaks of.
    #[must_use]
    pub fn name(&self) -> &PopName {
        match self {
            Self::Taken { name, .. }
            | Self::Acked { name, .. }
            | Self::Changed { name, .. }
            | Self::Moved { name, .. } => name,
        }
    }

    /// Appends the stored form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Taken {
                name,
                ordered,
                fresh,
                pop_ms,
                invisible_ms,
                next_offset,
                attempt,
                offsets,
            } => {
                put_name(out, TAKEN, name);
                out.push(u8::from(*ordered) | u8::from(*fresh) << 1);
                for number in [pop_ms, invisible_ms, next_offset] {
                    out.extend_from_slice(&number.to_be_bytes());
                }
                put_text(out, attempt);
                put_offsets(out, offsets);
            }
            Self::Acked {
                name,
                pop_ms,
                commit,
                offsets,
            } => {
                put_name(out, ACKED, name);
                out.extend_from_slice(&pop_ms.to_be_bytes());
                out.extend_from_slice(&commit.to_be_bytes());
                put_offsets(out, offsets);
            }
            Self::Changed {
                name,
                pop_ms,
                new_pop_ms,
                due_ms,
                offset,
            } => {
                put_name(out, CHANGED, name);
                for number in [*pop_ms, *new_pop_ms, *due_ms, *offset as i64] {
                    out.extend_from_slice(&number.to_be_bytes());
                }
            }
            Self::Moved {
                name,
                pop_ms,
                offset,
                commit,
            } => {
                put_name(out, MOVED, name);
                for number in [*pop_ms, *offset as i64, *commit] {
                    out.extend_from_slice(&number.to_be_bytes());
                }
            }
        }
    }

    pub(crate) fn read(kind: u8, reader: &mut Reader<'_>) -> Option<Self> {
        let queue_id = reader.int()?;
        let topic = reader.text()?;
        let group = reader.text()?;
        let name = PopName {
            topic,
            group,
            queue_id,
        };
        Some(match kind {
            TAKEN => {
                let flags = *reader.take(1)?.first()?;
                Self::Taken {
                    name,
                    ordered: flags & 1 != 0,
                    fresh: flags & 2 != 0,
                    pop_ms: reader.long()?,
                    invisible_ms: reader.long()?,
                    next_offset: reader.long()?,
                    attempt: reader.text()?,
                    offsets: read_offsets(reader)?,
                }
            }
            ACKED => Self::Acked {
                name,
                pop_ms: reader.long()?,
                commit: reader.long()?,
                offsets: read_offsets(reader)?,
            },
            CHANGED => Self::Changed {
                name,
                pop_ms: reader.long()?,
                new_pop_ms: reader.long()?,
                due_ms: reader.long()?,
                offset: reader.long()? as u64,
            },
            MOVED => Self::Moved {
                name,
                pop_ms: reader.long()?,
                offset: reader.long()? as u64,
                commit: reader.long()?,
            },
            _ => return None,
        })
    }

    /// The value of [`POP_ORIGIN`] that says a copy's record settles a message.
    #[must_use]
    pub fn origin(name: &PopName, (pop_ms, offset, commit): (i64, u64, i64)) -> String {
        let (group, topic, queue_id) = (&name.group, &name.topic, name.queue_id);
        format!("{group} {topic} {queue_id} {offset} {pop_ms} {commit}")
    }

    /// What the record of a copy settles, as its mark and properties tell.
    #[must_use]
    pub fn of_copy(mark: i64, stored: &[u8]) -> Option<Self> {
        if mark != POP_COPY_MARK {
            return None;
        }
        let mut words = properties::get_str(stored, POP_ORIGIN)?.split(' ');
        let group = words.next()?.to_owned();
        let topic = words.next()?.to_owned();
        let queue_id = words.next()?.parse().ok()?;
        Some(Self::Moved {
            name: PopName {
                topic,
                group,
                queue_id,
            },
            offset: words.next()?.parse().ok()?,
            pop_ms: words.next()?.parse().ok()?,
            commit: words.next()?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;

    fn name() -> PopName {
        PopName {
            topic: "%RETRY%g_T".into(),
            group: "g".into(),
            queue_id: 3,
        }
    }

    #[test]
    fn records_of_pop_come_back_from_their_stored_form() {
        let events = [
            PopEvent::Taken {
                name: name(),
                ordered: true,
                fresh: false,
                pop_ms: 1,
                invisible_ms: 2,
                next_offset: 3,
                attempt: "a-1".into(),
                offsets: vec![7, 1 << 40],
            },
            PopEvent::Acked {
                name: name(),
                pop_ms: 9,
                commit: -1,
                offsets: vec![5],
            },
            PopEvent::Changed {
                name: name(),
                pop_ms: 1,
                new_pop_ms: 2,
                due_ms: 3,
                offset: 4,
            },
            PopEvent::Moved {
                name: name(),
                pop_ms: 1,
                offset: 2,
                commit: 3,
            },
        ];
        for event in events {
            let mut bytes = Vec::new();
            event.encode(&mut bytes);
            assert_eq!(Event::decode(&bytes), Some(Event::Pop(event)));
            for cut in 0..bytes.len() {
                assert_eq!(Event::decode(&bytes[..cut]), None);
            }
        }
    }

    #[test]
    fn a_copy_tells_what_it_settles() {
        let mut stored = Vec::new();
        properties::append(&mut stored, "TAGS", "A");
        let text = PopEvent::origin(&name(), (77, 12, -1));
        properties::append(&mut stored, POP_ORIGIN, &text);
        let moved = PopEvent::Moved {
            name: name(),
            pop_ms: 77,
            offset: 12,
            commit: -1,
        };
        assert_eq!(PopEvent::of_copy(POP_COPY_MARK, &stored), Some(moved));
        assert_eq!(PopEvent::of_copy(0, &stored), None);
        assert_eq!(PopEvent::of_copy(POP_COPY_MARK, b"TAGS\x01A\x02"), None);
    }
}
