//! A broker that breaks its promises on purpose, so that the suites which look for that are seen to
//! find it.
//!
//! Invariant: in a release build nothing here can be switched on: the answer of [`Canary::is`] is a
//! constant there.

use shard::Appended;
use shard::queue::Queue;

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Canary {
    /// Nothing.
    #[default]
    None,
    /// Answers leave before their message is safe.
    AckEarly,
    /// Messages are acknowledged and thrown away.
    Drop,
    /// Records leave in the wrong order.
    Reorder,
}

impl Canary {
    /// What `PINION_CANARY` asks for; nothing in a release build.
    #[must_use]
    pub fn from_environment() -> Self {
        if !cfg!(debug_assertions) {
            return Self::None;
        }
        match std::env::var("PINION_CANARY").as_deref() {
            Ok("ack-early") => Self::AckEarly,
            Ok("drop") => Self::Drop,
            Ok("reorder") => Self::Reorder,
            _ => Self::None,
        }
    }

    /// Whether this is to be done wrong.
    #[must_use]
    pub fn is(self, what: Self) -> bool {
        cfg!(debug_assertions) && self == what
    }

    /// Whether a message is to be thrown away: one in sixteen.
    #[must_use]
    pub fn drops(self, body: &[u8]) -> bool {
        self.is(Self::Drop) && body.len().is_multiple_of(16)
    }
}

/// What is told of a message that was thrown away.
#[must_use]
pub fn thrown_away(queue: Option<&Queue>) -> Appended {
    Appended {
        physical_offset: 0,
        queue_offset: queue.map_or(0, |queue| queue.next_offset as i64),
        end: 0,
        store_timestamp: 0,
    }
}
