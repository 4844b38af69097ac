//! The simulated machine: virtual time, a disk that forgets, sockets in the process.
//!
//! A [`SimMachine`] holds everything that survives a crash of the code under test: the disk, the
//! surviving rings, the test's ends of connections. [`SimMachine::driver`] makes a driver that runs
//! the same code as the real one. One thread runs it all: time moves when a driver waits (or by
//! [`SimMachine::advance_us`]), and every latency, order and tear comes from the seed.
//!
//! Invariant: two runs with the same seed and the same calls are the same.

mod driver;
mod net;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::net::{Net, NetEvent};
use super::jobs::{self, Begun as BegunJob, Steps};
use super::{CloseReason, ConnectionId, FileId, ListenerId, Now, SlotId, sys};
use crate::io::sim::{Crash, Effect, SimFile, SimRandom, SimStorage};
use crate::io::{FileJob, JobOutcomeOf};
use crate::memory::{AlignedBuffer, LockedRing, Mapping, MemoryError, Opened};

pub use self::driver::SimDriver;
pub use self::net::{SimListener, SimPeer};

/// Wall clock at virtual time zero, in milliseconds.
pub const WALL_START_MS: i64 = 1_700_000_000_000;
/// Longest sleep of one wait when nothing is due, in microseconds.
pub const SLEEP_US_MAX: u64 = 1_000_000;
/// The same while several drivers share the machine, so that none sleeps through another's work.
pub const SHARED_SLEEP_US_MAX: u64 = 50;

/// How the machine behaves.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// Time of a write.
    pub write_us: Range<u64>,
    /// Time of a flush.
    pub flush_us: Range<u64>,
    /// Time of a cold read.
    pub read_us: Range<u64>,
    /// Time of a step of a file job.
    pub job_us: Range<u64>,
    /// Time of a piece on the network.
    pub net_us: Range<u64>,
    /// One in this many disk operations takes fifty times as long; 0 for none.
    pub slow_one_in: u64,
    /// Largest piece the network delivers at once.
    pub piece_bytes_max: usize,
    /// Receive buffers of a driver.
    pub receive_buffers: usize,
    /// Cold slots of a driver.
    pub cold_slots: usize,
    /// Accepted connections of a driver.
    pub connections_max: usize,
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            seed: 1,
            write_us: 60..300,
            flush_us: 40..200,
            read_us: 60..250,
            job_us: 50..500,
            net_us: 10..60,
            slow_one_in: 50,
            piece_bytes_max: 64 * 1024,
            receive_buffers: 64,
            cold_slots: 16,
            connections_max: 10_000,
        }
    }
}

/// Something that will happen.
enum EventKind {
    Write {
        file: SimFile,
        file_id: FileId,
        /// The write under way in the disk and whether it is cut; or the error it ends in.
        transfer: io::Result<(u64, bool)>,
        memory: Option<Arc<Mapping>>,
        ring_offset: usize,
        len: usize,
        flush: bool,
        token: u64,
    },
    Flush {
        file: SimFile,
        file_id: FileId,
        mark: io::Result<u64>,
        wrote: bool,
        token: u64,
    },
    Read {
        file: SimFile,
        file_id: FileId,
        effect: io::Result<Option<Effect>>,
        offset: u64,
        len: usize,
        slot: SlotId,
        token: u64,
    },
    Job {
        job: FileJob<SimStorage>,
        token: u64,
    },
    JobStep {
        steps: Steps<SimStorage>,
        token: u64,
    },
    Net(NetEvent),
}

struct Event {
    core: usize,
    kind: EventKind,
}

/// What a driver finds when it looks.
enum Mail {
    Written {
        file: FileId,
        wrote: bool,
        token: u64,
        result: io::Result<()>,
    },
    Read {
        file: FileId,
        slot: SlotId,
        bytes: Vec<u8>,
        token: u64,
        result: io::Result<usize>,
    },
    Job {
        token: u64,
        result: io::Result<JobOutcomeOf<SimStorage>>,
    },
    Accepted {
        listener: ListenerId,
        link: u64,
        end: usize,
        peer: std::net::SocketAddr,
    },
    Connected {
        connection: ConnectionId,
        link: u64,
        end: usize,
    },
    Data {
        connection: ConnectionId,
        bytes: Vec<u8>,
    },
    Sent {
        connection: ConnectionId,
    },
    Closed {
        connection: ConnectionId,
        reason: CloseReason,
    },
}

struct Inner {
    config: SimConfig,
    now_us: u64,
    wall_shift_ms: i64,
    random: SimRandom,
    /// Grows with each crash; drivers of an older one are dead.
    life: u64,
    queue: BTreeMap<(u64, u64), Event>,
    next_event: u64,
    frozen: bool,
    held: Vec<Event>,
    mail: Vec<VecDeque<Mail>>,
    drivers: usize,
    net: Net,
    rings: HashMap<String, File>,
    zeros: Option<AlignedBuffer>,
}

/// The simulated machine; clones are handles to the same one.
#[derive(Clone)]
pub struct SimMachine {
    inner: Arc<Mutex<Inner>>,
    storage: SimStorage,
}

impl SimMachine {
    /// A machine with an empty disk.
    #[must_use]
    pub fn new(config: SimConfig) -> SimMachine {
        let random = SimRandom::new(config.seed);
        let inner = Inner {
            config,
            now_us: 1_000_000,
            wall_shift_ms: 0,
            random,
            life: 0,
            queue: BTreeMap::new(),
            next_event: 0,
            frozen: false,
            held: Vec::new(),
            mail: Vec::new(),
            drivers: 0,
            net: Net::default(),
            rings: HashMap::new(),
            zeros: None,
        };
        let machine = SimMachine {
            inner: Arc::new(Mutex::new(inner)),
            storage: SimStorage::new(),
        };
        machine.storage.set_time_ms(WALL_START_MS);
        machine
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A driver for one more core.
    #[must_use]
    pub fn driver(&self) -> SimDriver {
        let mut inner = self.lock();
        inner.drivers += 1;
        inner.mail.push(VecDeque::new());
        let core = inner.mail.len() - 1;
        SimDriver::new(self.clone(), core, inner.life, &inner.config)
    }

    /// The disk: faults, space, lies.
    #[must_use]
    pub fn storage(&self) -> SimStorage {
        self.storage.clone()
    }

    /// The clocks.
    #[must_use]
    pub fn now(&self) -> Now {
        self.lock().now()
    }

    /// Shifts the wall clock (not the monotonic one), as an administrator or NTP does.
    pub fn shift_wall_ms(&self, by_ms: i64) {
        self.lock().wall_shift_ms += by_ms;
    }

    /// Lets time pass; everything that falls due happens.
    pub fn advance_us(&self, by_us: u64) {
        let until = self.lock().now_us.saturating_add(by_us);
        self.run_until(until);
    }

    /// Runs until something more has happened; `false` when nothing is going to.
    pub fn step(&self) -> bool {
        let next = self.lock().queue.first_key_value().map(|(key, _)| key.0);
        let Some(at) = next else { return false };
        self.run_until(at);
        true
    }

    /// Freezes the disk (nothing it was asked for ends) or thaws it.
    pub fn set_frozen(&self, frozen: bool) {
        self.lock().frozen = frozen;
        if !frozen {
            self.release_held();
        }
    }

    /// Lets operations that hang by a planned fault go on; returns how many.
    pub fn release_held(&self) -> usize {
        let mut inner = self.lock();
        let held = std::mem::take(&mut inner.held);
        let count = held.len();
        for event in held {
            inner.schedule(1, event);
        }
        count
    }

    /// Disk operations that hang now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.lock().held.len()
    }

    /// Opens a ring that survives [`Crash::Kill`] but not [`Crash::PowerLoss`].
    pub fn open_ring(&self, name: &str, bytes: usize) -> Result<Opened, MemoryError> {
        let system = |source| MemoryError::System {
            operation: "memfd_create",
            path: name.into(),
            bytes,
            source,
        };
        let mut inner = self.lock();
        let file = match inner.rings.get(name) {
            Some(file) => file.try_clone().map_err(system)?,
            None => {
                let file = sys::memory_file("pinion-sim-ring").map_err(system)?;
                let copy = file.try_clone().map_err(system)?;
                inner.rings.insert(name.to_owned(), file);
                copy
            }
        };
        LockedRing::open_on(file, None, bytes, false)
    }

    /// Bytes of a ring that survived, if there is one.
    #[must_use]
    pub fn ring_bytes(&self, name: &str) -> Option<usize> {
        let inner = self.lock();
        let len = inner.rings.get(name)?.metadata().ok()?.len();
        usize::try_from(len)
            .ok()?
            .checked_sub(crate::memory::DATA_OFFSET_BYTES)
    }

    /// Removes a surviving ring.
    pub fn remove_ring(&self, name: &str) {
        self.lock().rings.remove(name);
    }

    /// Crashes: every driver of before is dead (it answers nothing and does nothing), connections
    /// are gone, and of the disk that remains which the kind of crash and the seed leave.
    pub fn crash(&self, kind: Crash) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.life += 1;
        inner.frozen = false;
        inner.drivers = 0;
        let queued = std::mem::take(&mut inner.queue).into_values();
        let under_way: Vec<Event> = queued.chain(std::mem::take(&mut inner.held)).collect();
        for event in &under_way {
            // The device may have read the memory at any time up to now.
            if let EventKind::Write {
                file,
                transfer: Ok((id, _)),
                memory,
                ring_offset,
                len,
                ..
            } = &event.kind
                && let Some(bytes) = memory.as_ref().and_then(|m| m.copy_out(*ring_offset, *len))
            {
                file.remix(*id, &bytes, &mut inner.random);
            }
        }
        for mail in &mut inner.mail {
            mail.clear();
        }
        inner.net.crash();
        if kind == Crash::PowerLoss {
            inner.rings.clear();
        }
        self.storage.crash(kind, &mut inner.random);
    }

    /// Runs everything due up to a time and sets the clock to it.
    fn run_until(&self, until_us: u64) {
        loop {
            let mut inner = self.lock();
            let due = inner
                .queue
                .first_entry()
                .filter(|entry| entry.key().0 <= until_us);
            let Some(entry) = due else {
                inner.now_us = inner.now_us.max(until_us);
                let wall_ms = inner.now().wall_ms;
                drop(inner);
                self.storage.set_time_ms(wall_ms);
                return;
            };
            let ((at, _), event) = entry.remove_entry();
            inner.now_us = inner.now_us.max(at);
            self.happen(inner, event);
        }
    }

    fn happen(&self, mut inner: MutexGuard<'_, Inner>, event: Event) {
        let core = event.core;
        let is_net = matches!(event.kind, EventKind::Net(_));
        if inner.frozen && !is_net {
            inner.held.push(event);
            return;
        }
        match event.kind {
            EventKind::Job { job, token } => {
                // A job may call anything, so the machine must not be locked meanwhile.
                drop(inner);
                let begun = jobs::begin(&self.storage, job);
                self.lock().after_job(core, token, begun);
            }
            EventKind::JobStep { steps, token } => {
                let mut zeros = inner.zeros.take();
                drop(inner);
                let begun = jobs::step(&self.storage, steps, &mut zeros);
                let mut inner = self.lock();
                inner.zeros = zeros;
                inner.after_job(core, token, begun);
            }
            EventKind::Net(event) => inner.on_net(event),
            kind => inner.on_disk(core, kind),
        }
    }
}

impl Inner {
    fn now(&self) -> Now {
        Now {
            monotonic_us: self.now_us,
            wall_ms: WALL_START_MS + (self.now_us / 1000) as i64 + self.wall_shift_ms,
        }
    }

    fn schedule(&mut self, after_us: u64, event: Event) {
        self.next_event += 1;
        self.queue
            .insert((self.now_us + after_us.max(1), self.next_event), event);
    }

    fn disk_time_us(&mut self, range: &Range<u64>) -> u64 {
        let time_us = self.random.within(range);
        let slow = self.config.slow_one_in > 0 && self.random.one_in(self.config.slow_one_in);
        if slow { time_us * 50 } else { time_us }
    }

    /// Schedules a disk operation, or keeps it when it hangs.
    fn disk_event(&mut self, range: &Range<u64>, hangs: bool, event: Event) {
        let time_us = self.disk_time_us(range);
        if hangs {
            self.held.push(event)
        } else {
            self.schedule(time_us, event)
        }
    }

    fn send_mail(&mut self, core: usize, mail: Mail) {
        if let Some(queue) = self.mail.get_mut(core) {
            queue.push_back(mail);
        }
    }

    fn send_written(
        &mut self,
        core: usize,
        file: FileId,
        wrote: bool,
        token: u64,
        result: io::Result<()>,
    ) {
        let mail = Mail::Written {
            file,
            wrote,
            token,
            result,
        };
        self.send_mail(core, mail);
    }

    fn after_job(&mut self, core: usize, token: u64, begun: io::Result<BegunJob<SimStorage>>) {
        let result = match begun {
            Ok(BegunJob::Stepwise(steps)) => {
                let range = self.config.job_us.clone();
                let time_us = self.disk_time_us(&range);
                self.schedule(
                    time_us,
                    Event {
                        core,
                        kind: EventKind::JobStep { steps, token },
                    },
                );
                return;
            }
            Ok(BegunJob::Finished(outcome)) => Ok(outcome),
            Err(error) => Err(error),
        };
        self.send_mail(core, Mail::Job { token, result });
    }

    fn on_disk(&mut self, core: usize, kind: EventKind) {
        match kind {
            EventKind::Write {
                file,
                file_id,
                transfer,
                memory,
                ring_offset,
                len,
                flush,
                token,
            } => {
                let result = transfer.and_then(|(id, half)| {
                    if let Some(bytes) = memory.and_then(|m| m.copy_out(ring_offset, len)) {
                        file.remix(id, &bytes, &mut self.random);
                    }
                    file.end_write(id, half)
                });
                if result.is_ok() && flush {
                    self.start_flush(core, file, file_id, true, token);
                    return;
                }
                self.send_written(core, file_id, true, token, result);
            }
            EventKind::Flush {
                file,
                file_id,
                mark,
                wrote,
                token,
            } => {
                let result = mark.and_then(|mark| file.end_flush(mark));
                self.send_written(core, file_id, wrote, token, result);
            }
            EventKind::Read {
                file,
                file_id,
                effect,
                offset,
                len,
                slot,
                token,
            } => {
                let mut bytes = vec![0; len];
                let result = effect.and_then(|effect| file.end_read(&mut bytes, offset, effect));
                self.send_mail(
                    core,
                    Mail::Read {
                        file: file_id,
                        slot,
                        bytes,
                        token,
                        result,
                    },
                );
            }
            EventKind::Job { .. } | EventKind::JobStep { .. } | EventKind::Net(_) => {}
        }
    }

    fn start_flush(
        &mut self,
        core: usize,
        file: SimFile,
        file_id: FileId,
        wrote: bool,
        token: u64,
    ) {
        use crate::io::sim::Begun;
        let (mark, hangs) = match file.begin_flush() {
            Ok((Begun::Going(mark), _)) => (Ok(mark), false),
            Ok((Begun::Hanging(mark), _)) => (Ok(mark), true),
            Err(error) => (Err(error), false),
        };
        let range = self.config.flush_us.clone();
        let kind = EventKind::Flush {
            file,
            file_id,
            mark,
            wrote,
            token,
        };
        self.disk_event(&range, hangs, Event { core, kind });
    }
}
