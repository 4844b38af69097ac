//! The io_uring driver: one ring per core for sockets, disk, timers and bells.
//!
//! The ring is set up for one submitting thread with deferred task work, so a driver must be
//! created on the thread that uses it. Sockets live in [`net`], files in [`disk`], receive buffers
//! in [`receive`], the ring itself in [`ring`].
//!
//! Invariants: memory and files named in a submitted entry stay alive until its completion has
//! been seen; a place in a table is reused only when nothing is in flight for it.

mod disk;
mod net;
mod receive;
mod ring;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use self::disk::Disk;
use self::net::Net;
use self::ring::{Kind, Ring, UserData};
use super::{
    ColdRead, Completion, ConnectionId, Driver, FileId, ListenerId, Now, ReceivedId, RingId,
    RingWrite, SlotId, sys,
};
use crate::io::FileJob;
use crate::io::real::{DirectMode, RealFile, RealStorage};
use crate::memory::{LockRefused, LockedRing};
use crate::mesh::{BellReader, bell};

pub use self::disk::{COLD_SLOTS_MAX, FILES_MAX, RINGS_MAX};
pub use self::net::{ACCEPT_RETRY_US, OUTGOING_MAX};
pub use self::receive::RECEIVE_BUFFERS_MAX;
pub use super::jobs::{REMOVE_STEP_BYTES, REMOVING_SUFFIX, ZERO_STEP_BYTES};

/// Longest sleep of one wait, in microseconds; bounds the harm of any lost event.
pub const SLEEP_US_MAX: u64 = 1_000_000;

/// Which way log writes take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogPort {
    /// `WRITE_FIXED`, then `FSYNC`, through the ring.
    Uring,
    /// A thread with blocking `pwrite` and `fdatasync`.
    Thread,
}

/// Settings of a driver.
#[derive(Debug)]
pub struct UringConfig {
    /// Number of the core, for the names of its helper threads.
    pub core: usize,
    /// Submission entries (rounded up to a power of two); the completion queue has eight times as
    /// many.
    pub entries: u32,
    /// Bytes of one receive buffer.
    pub receive_buffer_bytes: usize,
    /// Receive buffers (rounded up to a power of two).
    pub receive_buffers: usize,
    /// Cold-read slots.
    pub cold_slots: usize,
    /// Accepted connections at most; more are closed at once.
    pub connections_max: usize,
    /// The way of log writes.
    pub log_port: LogPort,
    /// The bell other cores ring; a private one if none.
    pub bell: Option<BellReader>,
    /// How long to spin before sleeping, in microseconds.
    pub spin_us: u64,
    /// Whether to lock receive buffers and cold slots.
    pub lock_memory: bool,
    /// The files.
    pub storage: RealStorage,
}

impl Default for UringConfig {
    fn default() -> UringConfig {
        UringConfig {
            core: 0,
            entries: 1024,
            receive_buffer_bytes: 64 * 1024,
            receive_buffers: 64,
            cold_slots: 16,
            connections_max: 10_000,
            log_port: LogPort::Uring,
            bell: None,
            spin_us: 0,
            lock_memory: false,
            storage: RealStorage::new(DirectMode::Auto),
        }
    }
}

/// What a driver has counted since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DriverCounters {
    /// Connections closed at accept because `connections_max` were open.
    pub connections_refused: u64,
    /// Accepts that failed for want of descriptors or memory.
    pub accept_failures: u64,
    /// Receives that ended because every buffer was on loan.
    pub receive_starved: u64,
    /// Cold reads put off because every slot was on loan.
    pub cold_slots_exhausted: u64,
    /// Entries that had to wait because the submission queue stayed full.
    pub submissions_delayed: u64,
    /// Waits that slept.
    pub sleeps: u64,
    /// Sends continued after a short one.
    pub short_sends: u64,
}

/// One core's machine on io_uring.
pub struct UringDriver {
    // The ring is dropped first: after that the kernel starts nothing new on the memory below.
    ring: Ring,
    net: Net,
    disk: Disk,
    bell: BellReader,
    ready: VecDeque<Completion>,
    now: Now,
    spin_us: u64,
    counters: DriverCounters,
    batch: Vec<io_uring::cqueue::Entry>,
    bell_armed: bool,
}

impl UringDriver {
    /// Creates the driver on the calling thread, which must be the one that uses it.
    pub fn new(config: UringConfig) -> io::Result<UringDriver> {
        let bell = match config.bell {
            Some(bell) => bell,
            None => bell()?.1,
        };
        let ring = Ring::new(config.entries)?;
        let net = Net::new(
            &ring,
            config.receive_buffers,
            config.receive_buffer_bytes,
            config.connections_max,
            config.lock_memory,
        )?;
        let disk = Disk::new(
            &ring,
            disk::DiskConfig {
                core: config.core,
                storage: config.storage,
                log_port: config.log_port,
                cold_slots: config.cold_slots,
                lock_memory: config.lock_memory,
                ringer: bell.ringer(),
            },
        )?;
        let mut driver = UringDriver {
            ring,
            net,
            disk,
            bell,
            ready: VecDeque::with_capacity(1024),
            now: Now::default(),
            spin_us: config.spin_us,
            counters: DriverCounters::default(),
            batch: Vec::with_capacity(1024),
            bell_armed: false,
        };
        driver.refresh_clock();
        Ok(driver)
    }

    /// What has been counted.
    #[must_use]
    pub fn counters(&self) -> DriverCounters {
        DriverCounters {
            submissions_delayed: self.ring.delayed,
            ..self.counters
        }
    }

    /// The ring flags the kernel granted, for reports.
    #[must_use]
    pub fn ring_flags(&self) -> &'static str {
        self.ring.flags_text
    }

    /// Whether receive buffers and cold slots are locked as asked.
    pub fn locked(&self) -> Result<(), LockRefused> {
        self.net.receive.locked().and(self.disk.slots_locked())
    }

    /// Whether a registered ring's writes use the kernel's registered buffers.
    #[must_use]
    pub fn ring_is_fixed(&self, ring: RingId) -> bool {
        self.disk.ring_is_fixed(ring)
    }

    /// Open connections (accepted and outgoing).
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.net.open
    }

    fn arm_bell(&mut self) {
        let entry = io_uring::opcode::PollAdd::new(
            io_uring::types::Fd(self.bell.descriptor()),
            libc::POLLIN as u32,
        )
        .multi(true)
        .build()
        .user_data(UserData::new(Kind::Bell, 0, 0).0);
        self.ring.push(entry);
        self.bell_armed = true;
    }

    /// Moves what the kernel and the helper threads have finished into `ready`.
    fn reap(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        loop {
            batch.clear();
            self.ring.take_completions(&mut batch);
            if batch.is_empty() {
                break;
            }
            for entry in &batch {
                self.dispatch(entry);
            }
        }
        self.batch = batch;
        self.disk.collect_outcomes(&mut self.ready);
    }

    fn dispatch(&mut self, entry: &io_uring::cqueue::Entry) {
        let data = UserData(entry.user_data());
        let (result, flags) = (entry.result(), entry.flags());
        match data.kind() {
            Some(Kind::Bell) => {
                // The counter is not read: each ring wakes the poll anew, and a re-armed poll on a
                // counter above zero costs one empty turn.
                if !io_uring::cqueue::more(flags) {
                    self.bell_armed = false;
                }
            }
            Some(Kind::Accept) => self.on_accept(data.index(), result, flags),
            Some(Kind::Receive) => self.on_receive(data, result, flags),
            Some(Kind::Send) => self.on_send(data, result),
            Some(Kind::Connect) => self.on_connect(data, result),
            Some(Kind::Write) => {
                self.disk
                    .on_write(&mut self.ring, data.index(), result, &mut self.ready);
            }
            Some(Kind::WriteFlush) => {
                self.disk
                    .on_write_flush(data.index(), result, &mut self.ready);
            }
            Some(Kind::ColdRead) => self
                .disk
                .on_cold_read(data.index(), result, &mut self.ready),
            Some(Kind::Cancel) | None => {}
        }
    }

    /// Spins until something is there or the time is up.
    fn spin(&mut self, until_us: u64) -> bool {
        loop {
            if self.bell.was_rung() || self.ring.has_work() {
                return true;
            }
            if sys::monotonic_us() >= until_us {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    fn submit_now(&mut self) {
        self.ring.enter(0, None);
        self.reap();
        // A submission that completed at once may have made task work only now.
        if self.ready.is_empty() && self.ring.has_work() {
            self.ring.enter(0, None);
            self.reap();
        }
    }
}

impl Driver for UringDriver {
    type Storage = RealStorage;

    fn now(&self) -> Now {
        self.now
    }

    fn refresh_clock(&mut self) -> Now {
        self.now = Now {
            monotonic_us: sys::monotonic_us(),
            wall_ms: sys::wall_ms(),
        };
        self.now
    }

    fn listen(&mut self, address: SocketAddr, share_port: bool) -> io::Result<ListenerId> {
        self.start_listening(address, share_port)
    }
    fn listener_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.net.listener_address(listener)
    }
    fn close_listener(&mut self, listener: ListenerId) {
        self.stop_listening(listener);
    }
    fn connect(&mut self, address: SocketAddr) -> ConnectionId {
        self.start_connecting(address)
    }
    fn send(&mut self, connection: ConnectionId, buffer: Vec<u8>) {
        self.start_send(connection, buffer);
    }
    fn pause_receiving(&mut self, connection: ConnectionId, pause: bool) {
        self.set_paused(connection, pause);
    }
    fn close(&mut self, connection: ConnectionId) {
        self.close_connection(connection);
    }
    fn received(&self, buffer: ReceivedId) -> &[u8] {
        self.net.receive.bytes_of(buffer)
    }
    fn release_received(&mut self, buffer: ReceivedId) {
        self.release_receive_buffer(buffer);
    }

    fn adopt_file(&mut self, file: RealFile) -> FileId {
        self.disk.adopt(file)
    }
    fn drop_file(&mut self, file: FileId) {
        self.disk.drop_file(file);
    }
    fn register_ring(&mut self, ring: &LockedRing) -> io::Result<RingId> {
        self.disk.register_ring(&self.ring, ring)
    }
    fn write(&mut self, write: RingWrite) {
        self.disk.write(&mut self.ring, write, &mut self.ready);
    }
    fn flush(&mut self, file: FileId, token: u64) {
        self.disk
            .flush(&mut self.ring, file, token, &mut self.ready);
    }
    fn cold_read(&mut self, read: ColdRead) -> bool {
        let taken = self.disk.cold_read(&mut self.ring, read, &mut self.ready);
        if !taken {
            self.counters.cold_slots_exhausted += 1;
        }
        taken
    }
    fn slot(&self, slot: SlotId) -> &[u8] {
        self.disk.slot(slot)
    }
    fn release_slot(&mut self, slot: SlotId) {
        self.disk.release_slot(slot);
    }
    fn file_job(&mut self, job: FileJob<RealStorage>, token: u64) {
        self.disk.file_job(job, token);
    }

    fn wait(&mut self, deadline_us: Option<u64>) {
        if !self.bell_armed {
            self.arm_bell();
        }
        self.retry_accepts();
        self.disk.collect_outcomes(&mut self.ready);
        let now_us = sys::monotonic_us();
        let latest_us = now_us.saturating_add(SLEEP_US_MAX);
        let deadline_us = deadline_us.unwrap_or(latest_us).min(latest_us);
        let deadline_us = self
            .net
            .accept_retry_at_us
            .map_or(deadline_us, |at| at.min(deadline_us));
        let must_not_sleep = !self.ready.is_empty() || deadline_us <= now_us;
        // Spinning would keep the kernel's worker that completes disk writes from this CPU.
        let spin_us = if self.disk.writes_under_way() {
            0
        } else {
            self.spin_us
        };
        if must_not_sleep {
            self.submit_now();
        } else {
            if spin_us > 0 {
                self.submit_now();
            }
            let found = !self.ready.is_empty()
                || (spin_us > 0 && self.spin((now_us + spin_us).min(deadline_us)));
            if found || !self.bell.try_sleep() {
                self.submit_now();
            } else {
                self.counters.sleeps += 1;
                self.ring
                    .enter(1, Some(deadline_us.saturating_sub(sys::monotonic_us())));
                self.reap();
            }
        }
        // From here on a bell counts for the next wait; what was rung before is visible now.
        self.bell.awake();
        self.disk.collect_outcomes(&mut self.ready);
        self.refresh_clock();
    }

    fn next(&mut self) -> Option<Completion> {
        self.ready.pop_front()
    }
}

impl Drop for UringDriver {
    fn drop(&mut self) {
        // Sockets and transfers still under way use memory of this struct: end them first.
        self.ring.cancel_everything();
        self.net.keep_unfinished_buffers();
    }
}
