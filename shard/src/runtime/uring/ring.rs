//! The ring itself: set-up, submission that never loses an entry, waiting, user data.
//!
//! Invariant: an entry given to [`Ring::push`] reaches the kernel in order, if need be after
//! waiting in a backlog for room.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

/// Fewest submission entries of one ring.
const ENTRIES_MIN: u32 = 8;
/// Most submission entries of one ring.
const ENTRIES_MAX: u32 = 4096;
/// How long the end of a driver waits for the kernel to let go.
const CANCEL_WAIT: Duration = Duration::from_secs(2);

/// What an entry was for. Retired numbers are not reused within a running ring, so they may change
/// between versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Kind {
    Accept = 1,
    Receive = 2,
    Send = 3,
    Connect = 4,
    Cancel = 5,
    Bell = 6,
    Write = 7,
    WriteFlush = 8,
    ColdRead = 9,
}

/// 8 bits of kind, 24 of generation, 32 of index.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct UserData(pub(super) u64);

impl UserData {
    pub(super) fn new(kind: Kind, generation: u32, index: u32) -> UserData {
        let generation = u64::from(generation & 0x00ff_ffff);
        UserData((u64::from(kind as u8) << 56) | (generation << 32) | u64::from(index))
    }
    pub(super) fn kind(self) -> Option<Kind> {
        Some(match (self.0 >> 56) as u8 {
            1 => Kind::Accept,
            2 => Kind::Receive,
            3 => Kind::Send,
            4 => Kind::Connect,
            5 => Kind::Cancel,
            6 => Kind::Bell,
            7 => Kind::Write,
            8 => Kind::WriteFlush,
            9 => Kind::ColdRead,
            _ => return None,
        })
    }
    pub(super) fn generation_matches(self, generation: u32) -> bool {
        (self.0 >> 32) as u32 & 0x00ff_ffff == generation & 0x00ff_ffff
    }
    pub(super) fn index(self) -> u32 {
        self.0 as u32
    }
}

pub(super) struct Ring {
    pub(super) uring: IoUring,
    backlog: VecDeque<squeue::Entry>,
    pub(super) delayed: u64,
    pub(super) flags_text: &'static str,
}

impl Ring {
    /// A ring of this many entries, or of fewer where lockable memory does not reach: rings count
    /// against that limit, and a small one only means more system calls.
    pub(super) fn new(entries: u32) -> io::Result<Ring> {
        let mut entries = entries.clamp(ENTRIES_MIN, ENTRIES_MAX).next_power_of_two();
        loop {
            match Ring::of_size(entries) {
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOMEM) && entries > ENTRIES_MIN =>
                {
                    entries /= 2;
                }
                made => return made,
            }
        }
    }

    fn of_size(entries: u32) -> io::Result<Ring> {
        let mut last = io::Error::from(io::ErrorKind::Unsupported);
        for (attempt, flags_text) in [
            "single issuer, deferred task work",
            "cooperative task work",
            "none",
        ]
        .into_iter()
        .enumerate()
        {
            let mut builder = IoUring::builder();
            builder
                .dontfork()
                .setup_clamp()
                .setup_cqsize(entries * 8)
                .setup_submit_all();
            match attempt {
                0 => {
                    builder
                        .setup_single_issuer()
                        .setup_defer_taskrun()
                        .setup_coop_taskrun();
                    builder.setup_taskrun_flag();
                }
                1 => {
                    builder.setup_coop_taskrun().setup_taskrun_flag();
                }
                _ => {}
            }
            match builder.build(entries) {
                Ok(uring) => {
                    return Ok(Ring {
                        uring,
                        backlog: VecDeque::new(),
                        delayed: 0,
                        flags_text,
                    });
                }
                Err(error) => last = error,
            }
            if last.raw_os_error() != Some(libc::EINVAL) {
                break;
            }
        }
        Err(last)
    }

    /// Queues an entry; submits what is queued when the queue is full.
    pub(super) fn push(&mut self, entry: squeue::Entry) {
        if !self.backlog.is_empty() || !self.try_push(&entry) {
            self.backlog.push_back(entry);
            self.delayed += 1;
            let _ = self.uring.submit();
            self.move_backlog();
        }
    }

    fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: whoever builds an entry keeps its memory and descriptors alive until its
        // completion has been seen (invariant of the driver).
        unsafe { self.uring.submission().push(entry).is_ok() }
    }

    fn move_backlog(&mut self) {
        while let Some(entry) = self.backlog.pop_front() {
            if !self.try_push(&entry) {
                self.backlog.push_front(entry);
                return;
            }
        }
    }

    /// Whether completions wait or the kernel has work to do on this thread.
    pub(super) fn has_work(&mut self) -> bool {
        self.uring.submission().taskrun() || !self.uring.completion().is_empty()
    }

    /// Submits everything and waits for `want` completions for up to a time.
    pub(super) fn enter(&mut self, want: usize, timeout_us: Option<u64>) {
        self.move_backlog();
        if want == 0 {
            let submission = self.uring.submission();
            let idle = submission.is_empty() && !submission.taskrun() && !submission.cq_overflow();
            drop(submission);
            if !idle {
                // Errors (EBUSY on a full completion queue, EINTR) leave the entries queued; the
                // caller reaps and comes again.
                let _ = self.uring.submit();
            }
            return;
        }
        let timeout = Timespec::from(Duration::from_micros(timeout_us.unwrap_or(0)));
        let arguments = SubmitArgs::new().timespec(&timeout);
        let _ = self.uring.submitter().submit_with_args(want, &arguments);
        // More entries than the queue holds: the rest goes now.
        if !self.backlog.is_empty() {
            self.move_backlog();
            let _ = self.uring.submit();
        }
    }

    /// Copies the waiting completions.
    pub(super) fn take_completions(&mut self, into: &mut Vec<cqueue::Entry>) {
        into.extend(self.uring.completion());
    }

    /// Cancels all that is in flight and waits (bounded) until it is quiet.
    pub(super) fn cancel_everything(&mut self) {
        self.backlog.clear();
        let entry = opcode::AsyncCancel2::new(io_uring::types::CancelBuilder::any().all())
            .build()
            .user_data(UserData::new(Kind::Cancel, 0, 0).0);
        if !self.try_push(&entry) {
            let _ = self.uring.submit();
            self.try_push(&entry);
        }
        let deadline = Instant::now() + CANCEL_WAIT;
        while Instant::now() < deadline {
            let timeout = Timespec::from(Duration::from_millis(20));
            let arguments = SubmitArgs::new().timespec(&timeout);
            let quiet = match self.uring.submitter().submit_with_args(1, &arguments) {
                Ok(_) => false,
                // On another thread than the ring's own nothing can be done here.
                Err(error) => error.raw_os_error() != Some(libc::EINTR),
            };
            let count = self.uring.completion().count();
            if quiet && count == 0 {
                return;
            }
        }
    }
}
