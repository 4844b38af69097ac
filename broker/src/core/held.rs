//! Sends held back for a moment while a shard's write buffer is full.
//!
//! A disk that is merely busy makes room within milliseconds; refusing at once would send clients
//! away for nothing. So a send waits here at most `waitTimeMillsInSendQueue`, in order, and is then
//! refused with a code that every client retries on another broker; at once when the disk hangs and
//! there are other brokers.
//!
//! Invariant: sends to a shard are appended in the order they came, and what is held is bounded by
//! [`HELD_BYTES_MAX`]; beyond it sends are refused at once (P5).

use std::collections::VecDeque;

use shard::Refusal;

use super::messages::ReplyTo;
use super::state::State;
use crate::control::effects::Origin;

/// Bytes of held requests per shard.
pub const HELD_BYTES_MAX: usize = 16 * 1024 * 1024;

/// One held send.
struct Held {
    origin: Origin,
    reply: ReplyTo,
    frame: Vec<u8>,
    queue_id: i32,
    since_us: u64,
}

/// The held sends of one shard.
#[derive(Default)]
pub struct HeldSends {
    sends: VecDeque<Held>,
    bytes: usize,
    replaying: bool,
    refusal: Option<Refusal>,
}

impl HeldSends {
    /// When the oldest held send must be answered, in monotonic microseconds.
    #[must_use]
    pub fn deadline_us(&self, wait_us: u64) -> Option<u64> {
        self.sends.front().map(|held| held.since_us + wait_us)
    }

    /// Sends held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sends.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sends.is_empty()
    }
}

/// Whether waiting can help.
fn passes_by_itself(refusal: &Refusal) -> bool {
    matches!(
        refusal,
        Refusal::BufferFull { .. } | Refusal::UnitsFull { .. } | Refusal::SegmentMissing { .. }
    )
}

impl State {
    /// Whether earlier sends to this shard are held, so that a new one has to wait behind them.
    pub fn must_wait_behind_others(&self, local: usize) -> bool {
        let held = self.shards.get(local).map(|local| &local.held);
        held.is_some_and(|held| !held.sends.is_empty() && !held.replaying)
    }

    /// Holds a send that was refused (or has to wait behind others), or answers the refusal.
    pub fn hold(
        &mut self,
        local: usize,
        origin: &Origin,
        reply: &ReplyTo,
        whole: &[u8],
        queue_id: i32,
        refusal: Option<Refusal>,
    ) {
        let since_us = self.now.monotonic_us;
        let Some(shard) = self.shards.get_mut(local) else {
            return;
        };
        let held = &mut shard.held;
        if held.replaying && refusal.as_ref().is_some_and(passes_by_itself) {
            // Still no room: the replay puts it back where it was.
            held.refusal = refusal;
            return;
        }
        let helps = refusal.as_ref().is_none_or(passes_by_itself);
        let hangs = if helps { self.disk_hangs(local) } else { None };
        let Some(shard) = self.shards.get_mut(local) else {
            return;
        };
        let held = &mut shard.held;
        let has_room = held.bytes + whole.len() <= HELD_BYTES_MAX;
        if helps && hangs.is_none() && self.hot.send_wait_us > 0 && has_room {
            held.bytes += whole.len();
            held.refusal = refusal.or(held.refusal.take());
            let frame = whole.to_vec();
            let (origin, reply) = (*origin, *reply);
            held.sends.push_back(Held {
                origin,
                reply,
                frame,
                queue_id,
                since_us,
            });
            return;
        }
        let refusal = refusal.or_else(|| held.refusal.clone()).or(hangs);
        let refusal = refusal.unwrap_or(Refusal::Stopping {
            shard: shard.shard.number(),
        });
        self.refuse(reply, &refusal);
    }

    /// Appends held sends as far as there is room now, and refuses those that waited too long.
    pub fn replay_held(&mut self, local: usize) {
        loop {
            let now_us = self.now.monotonic_us;
            let wait_us = self.hot.send_wait_us;
            let Some(shard) = self.shards.get_mut(local) else {
                return;
            };
            let Some(held) = shard.held.sends.pop_front() else {
                return;
            };
            shard.held.refusal = None;
            shard.held.replaying = true;
            self.on_whole_frame(&held.origin, &held.frame, Some(held.queue_id));
            let Some(shard) = self.shards.get_mut(local) else {
                return;
            };
            shard.held.replaying = false;
            let Some(refusal) = shard.held.refusal.clone() else {
                shard.held.bytes -= held.frame.len();
                continue;
            };
            let is_over = now_us >= held.since_us + wait_us;
            let gives_up = is_over || self.disk_hangs(local).is_some();
            let Some(shard) = self.shards.get_mut(local) else {
                return;
            };
            if !gives_up {
                shard.held.sends.push_front(held);
                return;
            }
            shard.held.bytes -= held.frame.len();
            self.refuse(&held.reply, &refusal);
        }
    }
}
