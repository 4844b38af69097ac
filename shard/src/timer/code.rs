//! What the properties of a timed message say, and what its unit repeats of them.
//!
//! Invariant: a unit's code and the stored properties tell the same, so that recovery, run files
//! and the running shard order messages alike.

use wire::message::properties::{self, ENTRY_SEPARATOR, NAME_VALUE_SEPARATOR};

/// Topic that timed messages wait in; every shard has its own queue 0 of it.
pub const TIMER_TOPIC: &str = "rmq_sys_wheel_timer";
/// Latest time a message can be due at, in milliseconds (the year 10889).
pub const DUE_MS_MAX: i64 = (1 << DUE_BITS) - 1;
/// Delay levels a broker can have.
pub const LEVELS_MAX: usize = 64;
/// A deletion takes back a message that is due in the same span of time, as Apache's wheel does.
pub(crate) const SPAN_MS: i64 = 1_000;
/// Bytes that a delivered message's properties may have more than the stored ones.
pub(crate) const ADDED_BYTES_MAX: usize = 160;

const DUE_BITS: u32 = 48;
const LEVEL_SHIFT: u32 = 48;
const DELETION: i64 = 1 << 56;

/// What a unit of the timer queue tells in the place of a tag hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Code {
    /// When the message is due. A deletion counts as due in front of all it can take back.
    pub(crate) due_ms: i64,
    /// Delay level, 0 for a message with a time of its own.
    pub(crate) level: u8,
    /// Whether it only takes another message back.
    pub(crate) deletion: bool,
}

impl Code {
    pub(crate) fn to_tags_code(self) -> i64 {
        let flag = if self.deletion { DELETION } else { 0 };
        self.due_ms.clamp(0, DUE_MS_MAX) | (i64::from(self.level) << LEVEL_SHIFT) | flag
    }

    pub(crate) fn from_tags_code(code: i64) -> Self {
        Self {
            due_ms: code & DUE_MS_MAX,
            level: (code >> LEVEL_SHIFT) as u8,
            deletion: code & DELETION != 0,
        }
    }
}

/// Start of the span that a time lies in; the span's end belongs to it, its start does not.
pub(crate) fn span_start(due_ms: i64) -> i64 {
    (due_ms - 1).div_euclid(SPAN_MS) * SPAN_MS
}

/// The code of a message of the timer topic, from its properties in parts.
pub(crate) fn code_of(parts: &[&[u8]]) -> Code {
    let (mut due_ms, mut level, mut deletion) = (0, 0, false);
    for (name, value) in parts.iter().flat_map(|part| properties::iter(part)) {
        let number = || std::str::from_utf8(value).ok()?.parse::<i64>().ok();
        match name {
            b"TIMER_OUT_MS" => due_ms = number().unwrap_or(0).clamp(0, DUE_MS_MAX),
            b"DELAY" => level = number().unwrap_or(0).clamp(0, LEVELS_MAX as i64) as u8,
            b"TIMER_DEL_UNIQKEY" => deletion = true,
            _ => {}
        }
    }
    deletion &= level == 0;
    if deletion {
        due_ms = span_start(due_ms).max(0);
    }
    Code {
        due_ms,
        level,
        deletion,
    }
}

/// Hash of the value of `TIMER_DEL_UNIQKEY` that takes a message back: topic, `+`, unique key.
pub(crate) fn deletion_hash(parts: &[&[u8]]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in parts.iter().flat_map(|part| part.iter()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

/// Appends a property with a number, without an allocation once `out` is warm.
pub(crate) fn append_number(out: &mut Vec<u8>, name: &str, value: i64) {
    use std::io::Write as _;
    out.extend_from_slice(name.as_bytes());
    out.push(NAME_VALUE_SEPARATOR);
    // Writing to a vector does not fail.
    let _ = write!(out, "{value}");
    out.push(ENTRY_SEPARATOR);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, value) in pairs {
            properties::append(&mut out, name, value);
        }
        out
    }

    #[test]
    fn codes_come_back_from_their_unit() {
        for (due_ms, level, deletion) in [(0, 0, false), (1 << 41, 18, false), (77_000, 0, true)] {
            let code = Code {
                due_ms,
                level,
                deletion,
            };
            assert_eq!(Code::from_tags_code(code.to_tags_code()), code);
        }
    }

    #[test]
    fn a_deletion_is_due_in_front_of_everything_in_its_span() {
        for (due_ms, start) in [
            (5_000, 4_000),
            (5_001, 5_000),
            (5_999, 5_000),
            (6_000, 5_000),
        ] {
            assert_eq!(span_start(due_ms), start, "{due_ms}");
            assert!(start < due_ms && due_ms <= start + SPAN_MS);
        }
        let deletion = stored(&[("TIMER_OUT_MS", "6000"), ("TIMER_DEL_UNIQKEY", "T+k")]);
        let code = code_of(&[&deletion]);
        assert_eq!((code.due_ms, code.deletion), (5_000, true));
    }

    #[test]
    fn the_last_of_two_times_counts_and_nonsense_is_due_at_once() {
        let twice = stored(&[
            ("TIMER_OUT_MS", "1"),
            ("TIMER_OUT_MS", "9"),
            ("DELAY", "99"),
        ]);
        assert_eq!(
            (code_of(&[&twice]).due_ms, code_of(&[&twice]).level),
            (9, 64)
        );
        for text in ["", "-4", "x", "99999999999999999999"] {
            let code = code_of(&[&stored(&[("TIMER_OUT_MS", text)])]);
            assert_eq!(code.due_ms, 0, "{text}");
        }
    }
}
