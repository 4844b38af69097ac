//! Connections inside the process: between a driver and a test, or between two drivers.
//!
//! Invariant: bytes of one direction arrive in order and whole, and the end of a connection after
//! its last byte (unless it is reset).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;

use super::{CloseReason, ConnectionId, Event, EventKind, Inner, ListenerId, Mail, SimMachine};

/// First port given to listeners and clients that do not ask for one.
const FIRST_PORT: u16 = 20_000;

#[derive(Clone, Copy, Debug)]
enum Owner {
    /// A driver; the connection is `None` until it has taken the link.
    Core {
        core: usize,
        connection: Option<ConnectionId>,
    },
    /// A test.
    Test,
}

struct End {
    owner: Owner,
    open: bool,
    /// Whether the far end is known to be gone.
    over: bool,
    reading: bool,
    /// Arrived, for a test to take.
    inbox: Vec<u8>,
    /// Arrived, for an end that does not read now.
    waiting: VecDeque<Arrival>,
    /// When the last arrival here is due, to keep the order.
    last_due_us: u64,
    address: SocketAddr,
}

enum Arrival {
    Bytes(Vec<u8>),
    /// The last piece of a send has arrived; its sender is told.
    SendEnd,
    Close,
}

struct Link {
    ends: [End; 2],
}

impl Link {
    fn end(&mut self, end: usize) -> &mut End {
        let [first, second] = &mut self.ends;
        if end == 0 { first } else { second }
    }
}

pub(super) enum NetEvent {
    Arrive {
        link: u64,
        end: usize,
        arrival: ArrivalBox,
    },
    Connect {
        core: usize,
        connection: ConnectionId,
        target: SocketAddr,
    },
}

/// Keeps the arrival's own type private.
pub(super) struct ArrivalBox(Arrival);

enum Listening {
    Core { core: usize, listener: ListenerId },
    Test { waiting: VecDeque<u64> },
}

#[derive(Default)]
pub(super) struct Net {
    links: HashMap<u64, Link>,
    next_link: u64,
    next_port: u16,
    /// Several drivers may share a port; connections go round.
    listening: BTreeMap<SocketAddr, Vec<Listening>>,
    round: usize,
}

impl Net {
    /// Drivers are gone; tests keep theirs, closed.
    pub(super) fn crash(&mut self) {
        self.listening.retain(|_, list| {
            list.retain(|listening| matches!(listening, Listening::Test { .. }));
            !list.is_empty()
        });
        for link in self.links.values_mut() {
            for end in &mut link.ends {
                end.over = true;
                end.waiting.clear();
            }
        }
    }

    fn port(&mut self) -> u16 {
        self.next_port = self
            .next_port
            .checked_add(1)
            .filter(|p| *p > FIRST_PORT)
            .unwrap_or(FIRST_PORT);
        self.next_port
    }

    fn link(&mut self, owners: [Owner; 2], addresses: [SocketAddr; 2]) -> u64 {
        self.next_link += 1;
        let [first, second] = owners;
        let [first_address, second_address] = addresses;
        let end = |owner, address| End {
            owner,
            open: true,
            over: false,
            reading: true,
            inbox: Vec::new(),
            waiting: VecDeque::new(),
            last_due_us: 0,
            address,
        };
        let ends = [end(first, first_address), end(second, second_address)];
        self.links.insert(self.next_link, Link { ends });
        self.next_link
    }
}

impl Inner {
    pub(super) fn net_listen(
        &mut self,
        core: usize,
        listener: ListenerId,
        address: SocketAddr,
        share_port: bool,
    ) -> io::Result<SocketAddr> {
        let mut address = address;
        if address.port() == 0 {
            address.set_port(self.net.port());
        }
        let list = self.net.listening.entry(address).or_default();
        if !list.is_empty() && !share_port {
            return Err(io::Error::from(io::ErrorKind::AddrInUse));
        }
        list.push(Listening::Core { core, listener });
        Ok(address)
    }

    pub(super) fn net_close_listener(&mut self, core: usize, listener: ListenerId) {
        self.net.listening.retain(|_, list| {
            list.retain(|listening| match listening {
                Listening::Core {
                    core: of,
                    listener: id,
                } => *of != core || *id != listener,
                _ => true,
            });
            !list.is_empty()
        });
    }

    pub(super) fn net_connect(
        &mut self,
        core: usize,
        connection: ConnectionId,
        target: SocketAddr,
    ) {
        let range = self.config.net_us.clone();
        let after_us = self.random.within(&range);
        let event = NetEvent::Connect {
            core,
            connection,
            target,
        };
        self.schedule(
            after_us,
            Event {
                core,
                kind: EventKind::Net(event),
            },
        );
    }

    /// The driver has given the link its connection.
    pub(super) fn net_take(&mut self, link: u64, end: usize, id: ConnectionId) {
        if let Some(link) = self.net.links.get_mut(&link)
            && let Owner::Core { connection, .. } = &mut link.end(end).owner
        {
            *connection = Some(id);
        }
        self.net_flush_waiting(link, end);
    }

    /// Sends bytes from an end; with `tell`, the sender learns when the last of them arrived.
    pub(super) fn net_send(&mut self, link: u64, from: usize, bytes: &[u8], tell: bool) {
        let piece_max = self.config.piece_bytes_max.max(1) as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = (1 + self.random.below(piece_max)).min(rest.len() as u64) as usize;
            let (piece, later) = rest.split_at(len);
            self.net_schedule(link, 1 - from, Arrival::Bytes(piece.to_vec()));
            rest = later;
        }
        if tell {
            self.net_schedule(link, 1 - from, Arrival::SendEnd);
        }
    }

    fn net_schedule(&mut self, link: u64, to: usize, arrival: Arrival) {
        let range = self.config.net_us.clone();
        let wanted = self.now_us + self.random.within(&range);
        let Some(found) = self.net.links.get_mut(&link) else {
            return;
        };
        let end = found.end(to);
        let due = wanted.max(end.last_due_us + 1);
        end.last_due_us = due;
        let after_us = due - self.now_us;
        let event = NetEvent::Arrive {
            link,
            end: to,
            arrival: ArrivalBox(arrival),
        };
        self.schedule(
            after_us,
            Event {
                core: 0,
                kind: EventKind::Net(event),
            },
        );
    }

    /// Closes one end; the other learns it after the bytes under way.
    pub(super) fn net_close(&mut self, link: u64, end: usize) {
        let Some(found) = self.net.links.get_mut(&link) else {
            return;
        };
        if std::mem::replace(&mut found.end(end).open, false) {
            found.end(end).waiting.clear();
            self.net_schedule(link, 1 - end, Arrival::Close);
        }
    }

    pub(super) fn on_net(&mut self, event: NetEvent) {
        match event {
            NetEvent::Connect {
                core,
                connection,
                target,
            } => {
                self.on_connect(core, connection, target);
            }
            NetEvent::Arrive { link, end, arrival } => {
                if let Some(found) = self.net.links.get_mut(&link) {
                    found.end(end).waiting.push_back(arrival.0);
                }
                self.net_flush_waiting(link, end);
            }
        }
    }

    fn on_connect(&mut self, core: usize, connection: ConnectionId, target: SocketAddr) {
        let source = SocketAddr::new(target.ip(), self.net.port());
        let owner = Owner::Core {
            core,
            connection: Some(connection),
        };
        match self.open_link(owner, source, target) {
            Some(link) => self.send_mail(
                core,
                Mail::Connected {
                    connection,
                    link,
                    end: 0,
                },
            ),
            None => {
                let error = io::Error::from_raw_os_error(libc::ECONNREFUSED);
                let reason = CloseReason::Error(error);
                self.send_mail(core, Mail::Closed { connection, reason });
            }
        }
    }

    /// Links an owner with whoever listens.
    fn open_link(&mut self, owner: Owner, source: SocketAddr, target: SocketAddr) -> Option<u64> {
        let round = self.net.round;
        self.net.round += 1;
        let list = self.net.listening.get(&target)?;
        let index = round % list.len().max(1);
        let other = match list.get(index)? {
            Listening::Core { core, .. } => Owner::Core {
                core: *core,
                connection: None,
            },
            Listening::Test { .. } => Owner::Test,
        };
        let link = self.net.link([owner, other], [source, target]);
        let accepted = match self.net.listening.get_mut(&target)?.get_mut(index)? {
            Listening::Core { core, listener } => Some((*core, *listener)),
            Listening::Test { waiting } => {
                waiting.push_back(link);
                None
            }
        };
        if let Some((core, listener)) = accepted {
            self.send_mail(
                core,
                Mail::Accepted {
                    listener,
                    link,
                    end: 1,
                    peer: source,
                },
            );
        }
        Some(link)
    }

    /// Hands an end what has arrived for it, as far as it reads.
    fn net_flush_waiting(&mut self, link_id: u64, to: usize) {
        while let Some(link) = self.net.links.get_mut(&link_id) {
            let sender = link.end(1 - to).owner;
            let end = link.end(to);
            let taken = !matches!(
                end.owner,
                Owner::Core {
                    connection: None,
                    ..
                }
            );
            if !end.reading || !taken {
                return;
            }
            let Some(arrival) = end.waiting.pop_front() else {
                return;
            };
            match (arrival, end.owner) {
                (Arrival::Bytes(bytes), _) if !end.open || end.over => drop(bytes),
                (Arrival::Bytes(bytes), Owner::Test) => end.inbox.extend_from_slice(&bytes),
                (Arrival::Bytes(bytes), Owner::Core { core, connection }) => {
                    if let Some(connection) = connection {
                        self.send_mail(core, Mail::Data { connection, bytes });
                    }
                }
                (Arrival::SendEnd, _) => {
                    if let Owner::Core {
                        core,
                        connection: Some(connection),
                    } = sender
                    {
                        self.send_mail(core, Mail::Sent { connection });
                    }
                }
                (Arrival::Close, owner) => {
                    end.over = true;
                    let was_open = end.open;
                    if let (
                        Owner::Core {
                            core,
                            connection: Some(connection),
                        },
                        true,
                    ) = (owner, was_open)
                    {
                        let reason = CloseReason::Peer;
                        self.send_mail(core, Mail::Closed { connection, reason });
                    }
                }
            }
        }
    }
}

/// A test's end of a connection.
#[derive(Clone)]
pub struct SimPeer {
    machine: SimMachine,
    link: u64,
    end: usize,
}

impl SimPeer {
    /// Sends bytes.
    pub fn send(&self, bytes: &[u8]) {
        self.machine
            .lock()
            .net_send(self.link, self.end, bytes, false);
    }
    /// Takes what has arrived.
    #[must_use]
    pub fn received(&self) -> Vec<u8> {
        let mut inner = self.machine.lock();
        let link = inner.net.links.get_mut(&self.link);
        link.map(|link| std::mem::take(&mut link.end(self.end).inbox))
            .unwrap_or_default()
    }
    /// Whether the other side has closed it (or crashed).
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let mut inner = self.machine.lock();
        inner
            .net
            .links
            .get_mut(&self.link)
            .is_none_or(|link| link.end(self.end).over)
    }
    /// Closes it.
    pub fn close(&self) {
        self.machine.lock().net_close(self.link, self.end);
    }
    /// Closes it without waiting for bytes under way; the other side sees a reset.
    pub fn reset(&self) {
        let mut inner = self.machine.lock();
        let Some(link) = inner.net.links.get_mut(&self.link) else {
            return;
        };
        link.end(self.end).open = false;
        let other = link.end(1 - self.end);
        other.waiting.clear();
        other.over = true;
        if let Owner::Core {
            core,
            connection: Some(connection),
        } = other.owner
        {
            let error = io::Error::from_raw_os_error(libc::ECONNRESET);
            let reason = CloseReason::Error(error);
            inner.send_mail(core, Mail::Closed { connection, reason });
        }
    }
    /// Stops reading (sends of the other side do not end) or goes on.
    pub fn set_reading(&self, reading: bool) {
        let mut inner = self.machine.lock();
        if let Some(link) = inner.net.links.get_mut(&self.link) {
            link.end(self.end).reading = reading;
        }
        inner.net_flush_waiting(self.link, self.end);
    }
    /// The address of this end.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        let mut inner = self.machine.lock();
        inner
            .net
            .links
            .get_mut(&self.link)
            .map(|link| link.end(self.end).address)
    }
}

/// A test that listens.
pub struct SimListener {
    machine: SimMachine,
    address: SocketAddr,
}

impl SimListener {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
    /// The next connection.
    #[must_use]
    pub fn accept(&self) -> Option<SimPeer> {
        let mut inner = self.machine.lock();
        let list = inner.net.listening.get_mut(&self.address)?;
        let link = list.iter_mut().find_map(|listening| match listening {
            Listening::Test { waiting } => waiting.pop_front(),
            Listening::Core { .. } => None,
        })?;
        Some(SimPeer {
            machine: self.machine.clone(),
            link,
            end: 1,
        })
    }
}

impl SimMachine {
    /// Connects a test to a driver's listener.
    pub fn connect(&self, target: SocketAddr) -> io::Result<SimPeer> {
        let mut inner = self.lock();
        let source = SocketAddr::new(target.ip(), inner.net.port());
        let link = inner
            .open_link(Owner::Test, source, target)
            .ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionRefused))?;
        Ok(SimPeer {
            machine: self.clone(),
            link,
            end: 0,
        })
    }

    /// Makes a test listen for drivers' connections.
    pub fn listen(&self, address: SocketAddr) -> io::Result<SimListener> {
        let mut inner = self.lock();
        let mut address = address;
        if address.port() == 0 {
            address.set_port(inner.net.port());
        }
        let list = inner.net.listening.entry(address).or_default();
        if !list.is_empty() {
            return Err(io::Error::from(io::ErrorKind::AddrInUse));
        }
        list.push(Listening::Test {
            waiting: VecDeque::new(),
        });
        Ok(SimListener {
            machine: self.clone(),
            address,
        })
    }
}
