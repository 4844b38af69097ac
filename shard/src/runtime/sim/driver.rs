//! One core's driver on the simulated machine.
//!
//! Invariant: the same as the real driver's: `Closed` is a connection's last completion, a buffer
//! or slot on loan is not reused, a file is dropped when nothing is in flight on it.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::{
    Event, EventKind, Inner, Mail, SHARED_SLEEP_US_MAX, SLEEP_US_MAX, SimConfig, SimMachine,
};
use crate::io::FileJob;
use crate::io::sim::{Begun, Effect, SimFile, SimStorage};
use crate::memory::{LockedRing, Mapping};
use crate::runtime::{
    COLD_SLOT_BYTES, CloseReason, ColdRead, Completion, ConnectionId, Driver, FileId, ListenerId,
    Now, ReceivedId, RingId, RingWrite, SlotId,
};

struct OpenFile {
    file: SimFile,
    in_flight: u32,
    dropping: bool,
}

struct Connection {
    link: Option<(u64, usize)>,
    accepted: bool,
    paused: bool,
    /// Bytes that wait for a buffer or for the end of a pause.
    waiting: VecDeque<Vec<u8>>,
    /// The peer has closed; told when `waiting` is empty.
    ending: Option<CloseReason>,
    sending: Option<Vec<u8>>,
}

/// See the module.
pub struct SimDriver {
    machine: SimMachine,
    core: usize,
    life: u64,
    now: Now,
    ready: VecDeque<Completion>,
    files: Vec<Option<OpenFile>>,
    rings: Vec<Arc<Mapping>>,
    slots: Vec<Option<Vec<u8>>>,
    free_slots: Vec<u32>,
    received: Vec<Option<Vec<u8>>>,
    free_received: Vec<u16>,
    /// Ordered, so that what waits is served in a fixed order.
    connections: BTreeMap<ConnectionId, Connection>,
    next_connection: u64,
    listeners: Vec<Option<SocketAddr>>,
    connections_max: usize,
}

fn unknown(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{what} is not open here"),
    )
}

impl SimDriver {
    pub(super) fn new(
        machine: SimMachine,
        core: usize,
        life: u64,
        config: &SimConfig,
    ) -> SimDriver {
        let slots = config.cold_slots.max(1);
        let received = config.receive_buffers.clamp(1, usize::from(u16::MAX));
        SimDriver {
            machine,
            core,
            life,
            now: Now::default(),
            ready: VecDeque::new(),
            files: Vec::new(),
            rings: Vec::new(),
            slots: vec![None; slots],
            free_slots: (0..slots as u32).rev().collect(),
            received: vec![None; received],
            free_received: (0..received as u16).rev().collect(),
            connections: BTreeMap::new(),
            next_connection: 1,
            listeners: Vec::new(),
            connections_max: config.connections_max,
        }
    }

    /// The machine, while this driver lives.
    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> Option<T> {
        let mut inner = self.machine.lock();
        (inner.life == self.life).then(|| act(&mut inner))
    }

    /// Open connections.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.connections.len()
    }

    fn begin_on(&mut self, id: FileId) -> io::Result<SimFile> {
        match self.files.get_mut(id.0 as usize) {
            Some(Some(open)) if !open.dropping => {
                open.in_flight += 1;
                Ok(open.file.clone())
            }
            _ => Err(unknown("the file")),
        }
    }

    fn end_on(&mut self, id: FileId) {
        if let Some(Some(open)) = self.files.get_mut(id.0 as usize) {
            open.in_flight = open.in_flight.saturating_sub(1);
        }
        self.close_if_idle(id);
    }

    fn close_if_idle(&mut self, id: FileId) {
        if let Some(place) = self.files.get_mut(id.0 as usize) {
            place.take_if(|open| open.dropping && open.in_flight == 0);
        }
    }

    fn new_connection(&mut self, link: Option<(u64, usize)>, accepted: bool) -> ConnectionId {
        let id = ConnectionId(self.next_connection);
        self.next_connection += 1;
        self.connections.insert(
            id,
            Connection {
                link,
                accepted,
                paused: false,
                waiting: VecDeque::new(),
                ending: None,
                sending: None,
            },
        );
        id
    }

    fn start_write(&mut self, write: RingWrite) -> io::Result<()> {
        let memory = self
            .rings
            .get(write.ring.0 as usize)
            .cloned()
            .ok_or_else(|| unknown("the ring"))?;
        let bytes = memory
            .copy_out(write.ring_offset, write.len)
            .ok_or_else(|| unknown("that part of the ring"))?;
        let file = self.begin_on(write.file)?;
        let core = self.core;
        self.with(|inner| {
            let begun = file.begin_write(&bytes, write.file_offset);
            let (transfer, hangs) = match begun {
                Ok((begun, effect)) => {
                    let (Begun::Going(id) | Begun::Hanging(id)) = begun;
                    let half = effect == Some(Effect::Short);
                    (Ok((id, half)), matches!(begun, Begun::Hanging(_)))
                }
                Err(error) => (Err(error), false),
            };
            let kind = EventKind::Write {
                file,
                file_id: write.file,
                transfer,
                memory: Some(memory),
                ring_offset: write.ring_offset,
                len: write.len,
                flush: write.flush,
                token: write.token,
            };
            let range = inner.config.write_us.clone();
            inner.disk_event(&range, hangs, Event { core, kind });
        });
        Ok(())
    }

    fn start_cold_read(&mut self, read: ColdRead, slot: SlotId) -> io::Result<()> {
        if read.len > COLD_SLOT_BYTES {
            return Err(unknown("a slot that large"));
        }
        let file = self.begin_on(read.file)?;
        let core = self.core;
        self.with(|inner| {
            let effect = file.begin_read();
            let hangs = matches!(effect, Ok(Some(Effect::Hang)));
            let kind = EventKind::Read {
                file,
                file_id: read.file,
                effect,
                offset: read.file_offset,
                len: read.len,
                slot,
                token: read.token,
            };
            let range = inner.config.read_us.clone();
            inner.disk_event(&range, hangs, Event { core, kind });
        });
        Ok(())
    }

    /// Takes what the machine has for this core.
    fn collect(&mut self) {
        while let Some(Some(mail)) =
            self.with(|inner| inner.mail.get_mut(self.core).and_then(VecDeque::pop_front))
        {
            self.take(mail);
        }
        self.deliver_waiting();
    }

    fn take(&mut self, mail: Mail) {
        match mail {
            Mail::Written {
                file,
                wrote,
                token,
                result,
            } => {
                self.end_on(file);
                self.ready.push_back(if wrote {
                    Completion::Written { token, result }
                } else {
                    Completion::Flushed { token, result }
                });
            }
            Mail::Read {
                file,
                slot,
                mut bytes,
                token,
                result,
            } => {
                self.end_on(file);
                bytes.resize(COLD_SLOT_BYTES, 0);
                if let Some(place) = self.slots.get_mut(slot.0 as usize) {
                    *place = Some(bytes);
                }
                self.ready.push_back(Completion::ColdRead {
                    token,
                    slot,
                    result,
                });
            }
            Mail::Job { token, result } => {
                let result = result.map(|outcome| outcome.adopted(|file| self.adopt_file(file)));
                self.ready.push_back(Completion::Job { token, result });
            }
            mail => self.take_net(mail),
        }
    }

    fn take_net(&mut self, mail: Mail) {
        match mail {
            Mail::Accepted {
                listener,
                link,
                end,
                peer,
            } => {
                let accepted = self.connections.values().filter(|c| c.accepted).count();
                let open = self
                    .listeners
                    .get(listener.0 as usize)
                    .is_some_and(Option::is_some);
                if accepted >= self.connections_max || !open {
                    self.with(|inner| inner.net_close(link, end));
                    return;
                }
                let connection = self.new_connection(Some((link, end)), true);
                self.ready.push_back(Completion::Accepted {
                    listener,
                    connection,
                    peer,
                });
                self.with(|inner| inner.net_take(link, end, connection));
            }
            Mail::Connected {
                connection,
                link,
                end,
            } => {
                match self.connections.get_mut(&connection) {
                    Some(open) => {
                        open.link = Some((link, end));
                        self.ready.push_back(Completion::Connected { connection });
                        self.with(|inner| inner.net_take(link, end, connection));
                    }
                    // Closed while it was connecting.
                    None => {
                        self.with(|inner| inner.net_close(link, end));
                    }
                }
            }
            Mail::Data { connection, bytes } => {
                if let Some(open) = self.connections.get_mut(&connection) {
                    open.waiting.push_back(bytes);
                }
            }
            Mail::Sent { connection } => {
                let sending = self
                    .connections
                    .get_mut(&connection)
                    .and_then(|c| c.sending.take());
                if let Some(buffer) = sending {
                    self.ready.push_back(Completion::Sent {
                        connection,
                        buffer,
                        result: Ok(()),
                    });
                }
            }
            Mail::Closed { connection, reason } => {
                if let Some(open) = self.connections.get_mut(&connection) {
                    open.ending = Some(reason);
                }
            }
            _ => {}
        }
    }

    /// Hands out waiting bytes as far as there are buffers, and the ends behind them.
    fn deliver_waiting(&mut self) {
        let ids: Vec<ConnectionId> = self
            .connections
            .iter()
            .filter(|(_, c)| !c.waiting.is_empty() || c.ending.is_some())
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            while let Some(open) = self.connections.get_mut(&id) {
                let reset = matches!(open.ending, Some(CloseReason::Error(_)));
                if reset || (open.waiting.is_empty() && open.ending.is_some()) {
                    let reason = open.ending.take().unwrap_or(CloseReason::Peer);
                    self.finish(id, reason);
                    break;
                }
                if open.paused || open.waiting.is_empty() {
                    break;
                }
                let Some(buffer) = self.free_received.pop() else {
                    return;
                };
                let bytes = open.waiting.pop_front();
                if let Some(place) = self.received.get_mut(usize::from(buffer)) {
                    *place = bytes;
                }
                let buffer = ReceivedId(buffer);
                self.ready.push_back(Completion::Received {
                    connection: id,
                    buffer,
                });
            }
        }
    }

    fn finish(&mut self, connection: ConnectionId, reason: CloseReason) {
        let Some(open) = self.connections.remove(&connection) else {
            return;
        };
        if let Some((link, end)) = open.link {
            self.with(|inner| inner.net_close(link, end));
        }
        if let Some(buffer) = open.sending {
            let result = Err(io::Error::from(io::ErrorKind::ConnectionAborted));
            self.ready.push_back(Completion::Sent {
                connection,
                buffer,
                result,
            });
        }
        self.ready
            .push_back(Completion::Closed { connection, reason });
    }
}

impl Driver for SimDriver {
    type Storage = SimStorage;

    fn now(&self) -> Now {
        self.now
    }

    fn refresh_clock(&mut self) -> Now {
        self.now = self.machine.now();
        self.now
    }

    fn listen(&mut self, address: SocketAddr, share_port: bool) -> io::Result<ListenerId> {
        let id = ListenerId(self.listeners.len() as u32);
        let core = self.core;
        let bound = self
            .with(|inner| inner.net_listen(core, id, address, share_port))
            .ok_or_else(|| io::Error::other("the machine has crashed"))??;
        self.listeners.push(Some(bound));
        Ok(id)
    }

    fn listener_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.listeners.get(listener.0 as usize).copied().flatten()
    }

    fn close_listener(&mut self, listener: ListenerId) {
        if let Some(place) = self.listeners.get_mut(listener.0 as usize) {
            *place = None;
        }
        let core = self.core;
        self.with(|inner| inner.net_close_listener(core, listener));
    }

    fn connect(&mut self, address: SocketAddr) -> ConnectionId {
        let id = self.new_connection(None, false);
        let core = self.core;
        self.with(|inner| inner.net_connect(core, id, address));
        id
    }

    fn send(&mut self, connection: ConnectionId, buffer: Vec<u8>) {
        let refused = match self.connections.get(&connection) {
            Some(open) if open.sending.is_some() => Some(io::ErrorKind::InvalidInput),
            Some(open) if open.link.is_some() => None,
            _ => Some(io::ErrorKind::NotConnected),
        };
        if refused.is_some() || buffer.is_empty() {
            let result = refused.map_or(Ok(()), |kind| Err(io::Error::from(kind)));
            self.ready.push_back(Completion::Sent {
                connection,
                buffer,
                result,
            });
            return;
        }
        let link = self.connections.get(&connection).and_then(|open| open.link);
        if let Some((link, end)) = link {
            self.with(|inner| inner.net_send(link, end, &buffer, true));
        }
        if let Some(open) = self.connections.get_mut(&connection) {
            open.sending = Some(buffer);
        }
    }

    fn pause_receiving(&mut self, connection: ConnectionId, pause: bool) {
        if let Some(open) = self.connections.get_mut(&connection) {
            open.paused = pause;
        }
    }

    fn close(&mut self, connection: ConnectionId) {
        self.finish(connection, CloseReason::Local);
    }

    fn received(&self, buffer: ReceivedId) -> &[u8] {
        self.received
            .get(usize::from(buffer.0))
            .and_then(Option::as_deref)
            .unwrap_or_default()
    }

    fn release_received(&mut self, buffer: ReceivedId) {
        if let Some(place) = self.received.get_mut(usize::from(buffer.0)) {
            let was_lent = place.take().is_some();
            debug_assert!(was_lent, "receive buffer {} was not on loan", buffer.0);
            if was_lent {
                self.free_received.push(buffer.0);
            }
        }
    }

    fn adopt_file(&mut self, file: SimFile) -> FileId {
        // Numbers are not reused, so that the use of a dropped one shows.
        self.files.push(Some(OpenFile {
            file,
            in_flight: 0,
            dropping: false,
        }));
        FileId((self.files.len() - 1) as u32)
    }

    fn drop_file(&mut self, file: FileId) {
        if let Some(Some(open)) = self.files.get_mut(file.0 as usize) {
            open.dropping = true;
            self.close_if_idle(file);
        }
    }

    fn register_ring(&mut self, ring: &LockedRing) -> io::Result<RingId> {
        self.rings.push(Arc::clone(ring.mapping()));
        Ok(RingId((self.rings.len() - 1) as u32))
    }

    fn write(&mut self, write: RingWrite) {
        if let Err(error) = self.start_write(write) {
            let result = Err(error);
            self.ready.push_back(Completion::Written {
                token: write.token,
                result,
            });
        }
    }

    fn flush(&mut self, file: FileId, token: u64) {
        match self.begin_on(file) {
            Ok(open) => {
                let core = self.core;
                self.with(|inner| inner.start_flush(core, open, file, false, token));
            }
            Err(error) => {
                self.ready.push_back(Completion::Flushed {
                    token,
                    result: Err(error),
                });
            }
        }
    }

    fn cold_read(&mut self, read: ColdRead) -> bool {
        let Some(index) = self.free_slots.pop() else {
            return false;
        };
        let slot = SlotId(index);
        if let Err(error) = self.start_cold_read(read, slot) {
            if let Some(place) = self.slots.get_mut(index as usize) {
                *place = Some(Vec::new());
            }
            let (token, result) = (read.token, Err(error));
            self.ready.push_back(Completion::ColdRead {
                token,
                slot,
                result,
            });
        }
        true
    }

    fn slot(&self, slot: SlotId) -> &[u8] {
        self.slots
            .get(slot.0 as usize)
            .and_then(Option::as_deref)
            .unwrap_or_default()
    }

    fn release_slot(&mut self, slot: SlotId) {
        if let Some(place) = self.slots.get_mut(slot.0 as usize) {
            let was_lent = place.take().is_some();
            debug_assert!(was_lent, "cold slot {} was not on loan", slot.0);
            if was_lent {
                self.free_slots.push(slot.0);
            }
        }
    }

    fn file_job(&mut self, job: FileJob<SimStorage>, token: u64) {
        let core = self.core;
        self.with(|inner| {
            let range = inner.config.job_us.clone();
            let event = Event {
                core,
                kind: EventKind::Job { job, token },
            };
            inner.disk_event(&range, false, event);
        });
    }

    fn wait(&mut self, deadline_us: Option<u64>) {
        // A turn costs time, or a loop with something to do each turn would stop the clock.
        let turn = self.with(|inner| (inner.now_us + 1 + inner.random.below(3), inner.drivers > 1));
        let Some((turn_us, shared)) = turn else {
            self.ready.clear();
            return;
        };
        self.machine.run_until(turn_us);
        self.collect();
        let sleep_us = if shared {
            SHARED_SLEEP_US_MAX
        } else {
            SLEEP_US_MAX
        };
        let latest_us = turn_us + sleep_us;
        let until_us = deadline_us.unwrap_or(latest_us).min(latest_us);
        while self.ready.is_empty() {
            let next = self.with(|inner| {
                (
                    inner.now_us,
                    inner.queue.first_key_value().map(|(key, _)| key.0),
                )
            });
            let Some((now_us, next_us)) = next else { break };
            if now_us >= until_us {
                break;
            }
            self.machine
                .run_until(next_us.unwrap_or(until_us).min(until_us));
            self.collect();
        }
        self.refresh_clock();
    }

    fn next(&mut self) -> Option<Completion> {
        self.ready.pop_front()
    }
}

impl Drop for SimDriver {
    fn drop(&mut self) {
        self.with(|inner| inner.drivers = inner.drivers.saturating_sub(1));
    }
}
