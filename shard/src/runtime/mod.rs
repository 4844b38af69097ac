//! The seam between a core and the machine: one [`Driver`] per core.
//!
//! Everything a core asks of the outside (sockets, disk, clock, bells from other cores) goes
//! through this trait, and everything that comes back is a [`Completion`] taken by
//! [`Driver::next`]. There are no callbacks and no futures: state is changed by synchronous code
//! between two calls of [`Driver::wait`]. The io_uring driver lives in [`uring`]; the simulator
//! implements the same trait over virtual time.
//!
//! Invariant: no method but [`Driver::wait`] blocks, and `wait` sleeps at most until its deadline.

use std::io;
use std::net::SocketAddr;

use crate::io::{FileJob, JobOutcome, Storage};
use crate::memory::LockedRing;

/// A connection of this core. Never reused while completions for it can still arrive: the high
/// half is a generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// A listening socket of this core.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ListenerId(pub u32);

/// A file that has been handed to the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct FileId(pub u32);

/// A locked ring that has been registered with the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RingId(pub u32);

/// A receive buffer on loan from the driver; give it back with [`Driver::release_received`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ReceivedId(pub u16);

/// A cold-read buffer on loan from the driver; give it back with [`Driver::release_slot`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotId(pub u32);

/// Bytes in one cold-read slot (and so the largest single cold read).
pub const COLD_SLOT_BYTES: usize = 256 * 1024;

/// The two clocks of a core, sampled together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Now {
    /// Monotonic time in microseconds since an arbitrary start.
    pub monotonic_us: u64,
    /// Wall clock in milliseconds since the epoch, as RocketMQ time stamps want it.
    pub wall_ms: i64,
}

/// One write of a group from a registered locked ring. Source and target are block-aligned.
#[derive(Clone, Copy, Debug)]
pub struct RingWrite {
    /// Where the bytes are.
    pub ring: RingId,
    /// Byte offset inside the ring's memory (0 .. ring bytes); the write never wraps.
    pub ring_offset: usize,
    /// Bytes to write, a multiple of the block size.
    pub len: usize,
    /// Target file, opened with O_DIRECT where possible.
    pub file: FileId,
    /// Offset in the target file.
    pub file_offset: u64,
    /// Whether the device must be flushed before the completion.
    pub flush: bool,
    /// Returned in [`Completion::Written`].
    pub token: u64,
}

/// One cold read into a slot of the driver's pool.
#[derive(Clone, Copy, Debug)]
pub struct ColdRead {
    /// Source file.
    pub file: FileId,
    /// Block-aligned offset.
    pub file_offset: u64,
    /// Block-aligned length, at most [`COLD_SLOT_BYTES`].
    pub len: usize,
    /// Returned in [`Completion::ColdRead`].
    pub token: u64,
}

/// Why a connection ended.
#[derive(Debug)]
pub enum CloseReason {
    /// The peer closed it.
    Peer,
    /// This side asked for it.
    Local,
    /// The socket failed.
    Error(io::Error),
}

/// What came back from the machine.
#[derive(Debug)]
pub enum Completion {
    /// A listener accepted a connection; receiving has been armed already.
    Accepted {
        /// The listener.
        listener: ListenerId,
        /// The new connection.
        connection: ConnectionId,
        /// Its remote address.
        peer: SocketAddr,
    },
    /// An outgoing connection is up; receiving has been armed already.
    Connected {
        /// The connection.
        connection: ConnectionId,
    },
    /// Bytes arrived; read them with [`Driver::received`], then release the buffer.
    Received {
        /// The connection.
        connection: ConnectionId,
        /// The loaned buffer.
        buffer: ReceivedId,
    },
    /// A whole send is finished (short sends were continued by the driver).
    Sent {
        /// The connection.
        connection: ConnectionId,
        /// The buffer given to [`Driver::send`], for reuse; its length is kept.
        buffer: Vec<u8>,
        /// Whether all bytes left.
        result: io::Result<()>,
    },
    /// The connection is gone; nothing else arrives for it after this.
    Closed {
        /// The connection.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
    },
    /// A [`RingWrite`] ended. A short write has been turned into an error.
    Written {
        /// Token of the write.
        token: u64,
        /// Outcome.
        result: io::Result<()>,
    },
    /// A flush without a write ended.
    Flushed {
        /// Token of the flush.
        token: u64,
        /// Outcome.
        result: io::Result<()>,
    },
    /// A [`ColdRead`] ended.
    ColdRead {
        /// Token of the read.
        token: u64,
        /// The slot that holds the bytes; must be released also after an error.
        slot: SlotId,
        /// Bytes read (may be short at the end of a file).
        result: io::Result<usize>,
    },
    /// A file job ended on the auxiliary thread.
    Job {
        /// Token of the job.
        token: u64,
        /// Outcome.
        result: io::Result<JobOutcome>,
    },
}

/// One core's machine.
pub trait Driver {
    /// The files of this machine.
    type Storage: Storage;

    /// The clocks as sampled at the last [`Driver::wait`] or [`Driver::refresh_clock`].
    fn now(&self) -> Now;
    /// Samples the clocks again.
    fn refresh_clock(&mut self) -> Now;

    /// Opens a listener (SO_REUSEADDR, SO_REUSEPORT among the cores of this process only is the
    /// caller's business) and arms accepting.
    fn listen(&mut self, address: SocketAddr, share_port: bool) -> io::Result<ListenerId>;
    /// The address a listener is bound to.
    fn listener_address(&self, listener: ListenerId) -> Option<SocketAddr>;
    /// Stops accepting.
    fn close_listener(&mut self, listener: ListenerId);
    /// Starts connecting; ends in `Connected` or `Closed`.
    fn connect(&mut self, address: SocketAddr) -> ConnectionId;
    /// Sends a buffer. At most one send per connection may be under way.
    fn send(&mut self, connection: ConnectionId, buffer: Vec<u8>);
    /// Stops (true) or resumes (false) receiving, for back-pressure.
    fn pause_receiving(&mut self, connection: ConnectionId, pause: bool);
    /// Closes a connection; `Closed` follows.
    fn close(&mut self, connection: ConnectionId);
    /// Bytes of a loaned receive buffer.
    fn received(&self, buffer: ReceivedId) -> &[u8];
    /// Gives a receive buffer back.
    fn release_received(&mut self, buffer: ReceivedId);

    /// Hands an open file to the driver.
    fn adopt_file(&mut self, file: <Self::Storage as Storage>::File) -> FileId;
    /// Closes a file once nothing is in flight on it. Closing happens away from this thread.
    fn drop_file(&mut self, file: FileId);
    /// Registers a locked ring for writes.
    fn register_ring(&mut self, ring: &LockedRing) -> io::Result<RingId>;
    /// Queues a group write.
    fn write(&mut self, write: RingWrite);
    /// Queues a device flush of a file.
    fn flush(&mut self, file: FileId, token: u64);
    /// Queues a cold read; `false` when every slot is on loan (try again after a release).
    fn cold_read(&mut self, read: ColdRead) -> bool;
    /// Bytes of a loaned slot (its whole length; valid up to the completed count).
    fn slot(&self, slot: SlotId) -> &[u8];
    /// Gives a slot back.
    fn release_slot(&mut self, slot: SlotId);
    /// Runs a blocking file job on the auxiliary thread.
    fn file_job(&mut self, job: FileJob<Self::Storage>, token: u64);

    /// Submits what is queued and sleeps until a completion, a bell or the deadline (monotonic
    /// microseconds; `None` = no deadline). Returns at once when completions are pending.
    fn wait(&mut self, deadline_us: Option<u64>);
    /// The next completion, if any.
    fn next(&mut self) -> Option<Completion>;
}

mod auxiliary;
mod jobs;
pub mod probe;
pub mod sim;
pub mod sys;
pub mod uring;
mod worker;
mod writer;

/// A fresh directory below the build's own, on a real file system.
#[cfg(test)]
pub(crate) fn test_dir(name: &str) -> std::path::PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let exe = std::env::current_exe().unwrap();
    let dir = exe
        .parent()
        .unwrap()
        .join("scratch")
        .join(format!("{name}-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}
