//! POP: consumers take messages one by one and acknowledge each, instead of moving an offset.
//!
//! The table of what is held and its records are the shard's (`shard::pop`); here is what the
//! protocol makes of it. A request becomes a [`order::PopOrder`] that visits the shards of its
//! topic until one has a message (`serve`), and waits at the core of its connection when none has
//! (`park`). What is not acknowledged in time is copied to a retry or dead-letter topic on the
//! same shard (`revive`).
//!
//! Invariant: whatever is handed out, acknowledged or moved is in the log before an answer says so.

mod ack;
mod answer;
mod batch;
mod order;
mod park;
mod receipt;
mod revive;
mod serve;

use std::collections::{HashMap, HashSet, VecDeque};

use shard::pop::PopIndex;
use shard::queue::QueueIndex;

pub use batch::is_part;
pub use order::PopOrder;
pub use park::BELL_TOKEN;
pub use revive::Revival;
pub use serve::ColdPop;

use super::state::State;
use park::{Parked, Watches};

/// Wakes carried out in one go.
const WAKES_PER_TURN_MAX: usize = 4_096;

/// What cores tell each other about POP.
#[derive(Debug)]
pub enum PopMessage {
    /// Look for messages on a shard of the receiver.
    Serve(Box<PopOrder>, u16),
    /// No shard had a message: wait.
    Park(Box<PopOrder>),
    /// A parked request was answered.
    Done(u64),
    /// There may be a message for a parked request.
    Wake(u64, Box<Watched>),
    /// Nobody waits under the number of a wake: wake the next.
    Next(Box<Watched>),
    /// The control task is asked for a queue of a topic on a shard.
    NeedQueue(Box<str>, u16),
}

/// Where a parked request waits for a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Watched {
    /// Shard.
    pub shard: u16,
    /// Topic.
    pub topic: Box<str>,
    /// Consumer group.
    pub group: Box<str>,
}

/// Counters of POP on one core.
#[derive(Clone, Copy, Default, Debug)]
pub struct PopCoreCounters {
    /// Requests that found messages.
    pub found: u64,
    /// Requests that were answered without messages.
    pub missed: u64,
    /// Requests refused because too many are parked.
    pub park_refused: u64,
}

/// A retry message that is not readable yet.
#[derive(Debug)]
struct RetryWake {
    local: usize,
    queue: QueueIndex,
    offset: u64,
    watched: Watched,
}

/// What one core keeps for POP.
#[derive(Default)]
pub struct PopState {
    parked: Parked,
    watches: Watches,
    /// Queues whose messages are being read from disk, by local shard.
    busy: HashSet<(usize, PopIndex)>,
    retry_wakes: Vec<RetryWake>,
    /// Wakes for orders of this core.
    wakes: VecDeque<PopMessage>,
    parts: batch::Parts,
    /// When the control task was asked for a queue, by topic, in monotonic microseconds.
    asked: HashMap<Box<str>, u64>,
    /// Cold reads of messages whose time is up.
    reviving: usize,
    /// Counts requests, to turn through queues and shards.
    turn: u64,
    /// When backlogs of retry topics were last looked for, in monotonic microseconds.
    drained_us: u64,
    /// Counters.
    pub counters: PopCoreCounters,
}

impl PopState {
    /// Requests parked at this core.
    #[must_use]
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// When a parked request is up, in monotonic microseconds.
    #[must_use]
    pub fn deadline_us(&self) -> Option<u64> {
        self.parked.deadline_us()
    }
}

impl State {
    /// Takes what another core tells about POP.
    pub fn on_pop_message(&mut self, message: PopMessage) {
        match message {
            PopMessage::Serve(order, shard) => self.serve_pop(order, shard),
            PopMessage::Park(order) => self.park_pop(order),
            PopMessage::Done(token) => self.pop_done(token),
            PopMessage::Wake(token, watched) => self.pop_wake(token, *watched),
            PopMessage::Next(watched) => {
                if let Some(local) = self.local_shard(watched.shard) {
                    self.wake_pops(local, &watched.topic, &watched.group, None);
                }
            }
            PopMessage::NeedQueue(topic, shard) => {
                self.with_control(|control, now_ms, effects| {
                    control.need_queue_on(now_ms, &topic, shard, effects);
                });
            }
        }
    }

    /// Work of POP that a shard's turn made possible.
    pub fn pop_after_shard_turn(&mut self, local: usize) {
        self.revive_due(local);
        self.wake_retries();
        self.run_wakes();
    }

    /// Carries out wakes of this core's orders, and those that come of them.
    fn run_wakes(&mut self) {
        for _ in 0..WAKES_PER_TURN_MAX {
            match self.pop.wakes.pop_front() {
                Some(wake) => self.on_pop_message(wake),
                None => return,
            }
        }
        self.turn_again = true;
    }

    /// Work of POP that is due on this core.
    pub fn pop_turn(&mut self) {
        self.drain_for_pull();
        self.expire_pops();
        self.turn_again |= !self.pop.wakes.is_empty();
    }
}
