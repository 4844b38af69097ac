//! A named helper thread of a driver with bounded queues in both directions.
//!
//! Invariant: the core never blocks on the thread (commands beyond the queue wait in a backlog on
//! the core's side), and the thread never blocks on the core: outcomes have a place each, because
//! no more commands are under way than the queue of outcomes holds.

use std::collections::VecDeque;
use std::io;
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::sys;
use crate::mesh::BellRinger;

/// Commands under way on one helper thread at most; more wait in the backlog.
pub(super) const COMMANDS_MAX: usize = 256;
/// How long the end of a driver waits for a helper thread that is stuck in the disk.
const STOP_WAIT: Duration = Duration::from_secs(5);

/// The core's side.
pub(super) struct Port<C, O> {
    commands: Option<rtrb::Producer<C>>,
    outcomes: rtrb::Consumer<O>,
    backlog: VecDeque<C>,
    under_way: usize,
    thread: Option<JoinHandle<()>>,
}

/// The thread's side.
pub(super) struct Desk<C, O> {
    commands: rtrb::Consumer<C>,
    outcomes: rtrb::Producer<O>,
    ringer: BellRinger,
}

impl<C: Send + 'static, O: Send + 'static> Port<C, O> {
    /// Starts the thread. Every command must lead to exactly one outcome.
    pub(super) fn start(
        name: String,
        ringer: BellRinger,
        body: impl FnOnce(Desk<C, O>) + Send + 'static,
    ) -> io::Result<Port<C, O>> {
        let (commands, thread_commands) = rtrb::RingBuffer::new(COMMANDS_MAX);
        let (thread_outcomes, outcomes) = rtrb::RingBuffer::new(COMMANDS_MAX);
        let desk = Desk {
            commands: thread_commands,
            outcomes: thread_outcomes,
            ringer,
        };
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // Not on the core's own CPU if there is another; failing that, it still works.
            let _ = sys::unpin();
            body(desk);
        })?;
        Ok(Port {
            commands: Some(commands),
            outcomes,
            backlog: VecDeque::with_capacity(COMMANDS_MAX),
            under_way: 0,
            thread: Some(thread),
        })
    }

    /// Hands a command over.
    pub(super) fn submit(&mut self, command: C) {
        self.backlog.push_back(command);
        self.pump();
    }

    fn pump(&mut self) {
        let Some(commands) = &mut self.commands else {
            return;
        };
        let mut pushed = false;
        while self.under_way < COMMANDS_MAX {
            let Some(command) = self.backlog.pop_front() else {
                break;
            };
            match commands.push(command) {
                Ok(()) => {
                    self.under_way += 1;
                    pushed = true;
                }
                Err(rtrb::PushError::Full(command)) => {
                    self.backlog.push_front(command);
                    break;
                }
            }
        }
        if pushed {
            self.thread().inspect(|thread| thread.unpark());
        }
    }

    fn thread(&self) -> Option<&Thread> {
        self.thread.as_ref().map(JoinHandle::thread)
    }

    /// Takes an outcome.
    pub(super) fn take(&mut self) -> Option<O> {
        let outcome = self.outcomes.pop().ok()?;
        self.under_way = self.under_way.saturating_sub(1);
        self.pump();
        Some(outcome)
    }
}

impl<C, O> Drop for Port<C, O> {
    fn drop(&mut self) {
        // Closing the queue is the signal to stop after the commands that are in it.
        self.commands = None;
        let Some(thread) = self.thread.take() else {
            return;
        };
        thread.thread().unpark();
        let deadline = Instant::now() + STOP_WAIT;
        while !thread.is_finished() {
            if Instant::now() > deadline {
                tracing::warn!(
                    thread = thread.thread().name(),
                    "left behind: it is stuck in the disk"
                );
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = thread.join();
    }
}

impl<C, O> Desk<C, O> {
    /// The next command if one waits.
    pub(super) fn try_next(&mut self) -> Option<C> {
        self.commands.pop().ok()
    }

    /// The next command; waits for it. `None` when the driver is gone.
    pub(super) fn next(&mut self) -> Option<C> {
        loop {
            if let Ok(command) = self.commands.pop() {
                return Some(command);
            }
            if self.commands.is_abandoned() {
                // What was pushed before the end is still served.
                return self.commands.pop().ok();
            }
            // An unpark since the pop above makes this return at once.
            std::thread::park();
        }
    }

    /// Whether the driver is gone.
    pub(super) fn is_abandoned(&self) -> bool {
        self.commands.is_abandoned()
    }

    /// Reports an outcome and wakes the core.
    pub(super) fn report(&mut self, outcome: O) {
        let mut outcome = outcome;
        while let Err(rtrb::PushError::Full(back)) = self.outcomes.push(outcome) {
            // Only when the driver is gone and nobody takes outcomes any more.
            if self.outcomes.is_abandoned() {
                return;
            }
            outcome = back;
            std::thread::yield_now();
        }
        self.ringer.ring();
    }
}
