//! Owns the header of a send: codes 10 and 324 with long names, 310, 320 and 325 with letters.
//!
//! Invariant: one walk over the ext fields, no allocation unless a field is wrong.

use crate::header::{Ext, FieldError, Text};

use super::pull::{flag_or, int, int_or, long, need};

/// The header of a send request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendRequest<'a> {
    /// Producer group.
    pub producer_group: Text<'a>,
    /// Topic.
    pub topic: Text<'a>,
    /// Template topic for automatic creation.
    pub default_topic: Text<'a>,
    /// Queues wished for a created topic.
    pub default_topic_queue_nums: i32,
    /// Queue id; -1 lets the broker choose.
    pub queue_id: i32,
    /// System flags, see `message::sysflag`.
    pub sys_flag: i32,
    /// When the message was made, in milliseconds since 1970.
    pub born_timestamp: i64,
    /// Flag of the user.
    pub flag: i32,
    /// Properties string.
    pub properties: Option<Text<'a>>,
    /// How often the message was consumed again.
    pub reconsume_times: i32,
    /// Unit mode.
    pub unit_mode: bool,
    /// Bound of consumption attempts.
    pub max_reconsume_times: Option<i32>,
    /// Whether the body is a batch.
    pub batch: bool,
}

/// Long names in the order of [`LETTERS`].
const LONG_NAMES: [&str; 13] = [
    "producerGroup",
    "topic",
    "defaultTopic",
    "defaultTopicQueueNums",
    "queueId",
    "sysFlag",
    "bornTimestamp",
    "flag",
    "properties",
    "reconsumeTimes",
    "unitMode",
    "maxReconsumeTimes",
    "batch",
];

/// The one-letter names.
const LETTERS: [&str; 13] = [
    "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m",
];

/// Position of a long name.
fn long_position(name: &[u8]) -> Option<usize> {
    Some(match name {
        b"producerGroup" => 0,
        b"topic" => 1,
        b"defaultTopic" => 2,
        b"defaultTopicQueueNums" => 3,
        b"queueId" => 4,
        b"sysFlag" => 5,
        b"bornTimestamp" => 6,
        b"flag" => 7,
        b"properties" => 8,
        b"reconsumeTimes" => 9,
        b"unitMode" => 10,
        b"maxReconsumeTimes" => 11,
        b"batch" => 12,
        _ => return None,
    })
}

/// Position of a letter.
fn short_position(name: &[u8]) -> Option<usize> {
    match name {
        [letter @ b'a'..=b'm'] => Some(usize::from(letter - b'a')),
        _ => None,
    }
}

impl<'a> SendRequest<'a> {
    /// Reads the header with long names (codes 10 and 324).
    pub fn decode_long(ext: &Ext<'a>) -> Result<Self, FieldError> {
        Self::decode(ext, &LONG_NAMES, long_position)
    }

    /// Reads the header with one-letter names (codes 310, 320 and 325).
    pub fn decode_short(ext: &Ext<'a>) -> Result<Self, FieldError> {
        Self::decode(ext, &LETTERS, short_position)
    }

    fn decode(
        ext: &Ext<'a>,
        names: &[&'static str; 13],
        position: impl Fn(&[u8]) -> Option<usize>,
    ) -> Result<Self, FieldError> {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m] = ext.named(names, position);
        let [na, nb, nc, nd, ne, nf, ng, nh, _, nj, nk, nl, nm] = *names;
        Ok(Self {
            producer_group: need(na, a)?,
            topic: need(nb, b)?,
            default_topic: need(nc, c)?,
            default_topic_queue_nums: int(nd, d)?,
            queue_id: int(ne, e)?,
            sys_flag: int(nf, f)?,
            born_timestamp: long(ng, g)?,
            flag: int(nh, h)?,
            properties: i,
            reconsume_times: int_or(nj, j)?.unwrap_or(0),
            unit_mode: flag_or(nk, k)?.unwrap_or(false),
            max_reconsume_times: int_or(nl, l)?,
            batch: flag_or(nm, m)?.unwrap_or(false),
        })
    }
}
