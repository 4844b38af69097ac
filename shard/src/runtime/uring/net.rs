//! Sockets of the io_uring driver: listeners, connections, receiving and sending.
//!
//! Invariants: a connection's place is freed, with a new generation, only when nothing is in
//! flight on it, and `Closed` is the last completion it yields; at most one receive and one send
//! are in flight per connection.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, squeue, types};

use super::receive::{GROUP, ReceiveBuffers};
use super::ring::{Kind, Ring, UserData};
use super::{Completion, ConnectionId, ListenerId, ReceivedId, UringDriver, sys};
use crate::runtime::CloseReason;

/// Outgoing connections of one core at most, beside the accepted ones.
pub const OUTGOING_MAX: usize = 1024;
/// Pause before accepting again after a failure for want of descriptors or memory.
pub const ACCEPT_RETRY_US: u64 = 100_000;
/// Listeners of one core at most.
const LISTENERS_MAX: usize = 64;
/// Bytes of one send entry at most.
const SEND_BYTES_MAX: usize = 1 << 30;
/// How long to wait for an address that a killed process still holds.
const ADDRESS_WAIT: Duration = Duration::from_secs(2);
/// Index of connections that failed before they had a place.
const NO_PLACE: u32 = u32::MAX;

struct Listener {
    socket: Option<TcpListener>,
    address: SocketAddr,
    armed: bool,
    closing: bool,
}

#[derive(Default)]
struct Connection {
    generation: u32,
    in_use: bool,
    accepted: bool,
    socket: Option<OwnedFd>,
    /// The address being connected to; the kernel reads it, so it does not move.
    target: Option<Box<sys::RawAddress>>,
    receive_armed: bool,
    cancelling: bool,
    paused: bool,
    starving: bool,
    sending: Option<Sending>,
    closing: Option<CloseReason>,
}

struct Sending {
    buffer: Vec<u8>,
    sent: usize,
}

pub(super) struct Net {
    connections: Vec<Connection>,
    free: Vec<u32>,
    listeners: Vec<Listener>,
    starving: VecDeque<ConnectionId>,
    accepted: usize,
    connections_max: usize,
    failed: u32,
    pub(super) open: usize,
    pub(super) receive: ReceiveBuffers,
    pub(super) accept_retry_at_us: Option<u64>,
}

fn identify(generation: u32, index: u32) -> ConnectionId {
    ConnectionId((u64::from(generation) << 32) | u64::from(index))
}

impl Net {
    pub(super) fn new(
        ring: &Ring,
        receive_buffers: usize,
        receive_buffer_bytes: usize,
        connections_max: usize,
        lock: bool,
    ) -> io::Result<Net> {
        let receive = ReceiveBuffers::new(ring, receive_buffers, receive_buffer_bytes, lock)?;
        Ok(Net {
            connections: Vec::new(),
            free: Vec::new(),
            listeners: Vec::new(),
            starving: VecDeque::new(),
            accepted: 0,
            connections_max,
            failed: 0,
            open: 0,
            receive,
            accept_retry_at_us: None,
        })
    }

    pub(super) fn listener_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        let listener = self.listeners.get(listener.0 as usize)?;
        listener.socket.is_some().then_some(listener.address)
    }

    fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(id.0 as u32 as usize)?;
        (connection.in_use && u64::from(connection.generation) == id.0 >> 32).then_some(connection)
    }

    /// The connection an entry was for.
    fn find(&mut self, data: UserData) -> Option<(ConnectionId, &mut Connection)> {
        let connection = self.connections.get_mut(data.index() as usize)?;
        let current = connection.in_use && data.generation_matches(connection.generation);
        current.then(|| (identify(connection.generation, data.index()), connection))
    }

    fn occupy(&mut self, socket: OwnedFd, accepted: bool) -> ConnectionId {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.connections.push(Connection::default());
                (self.connections.len() - 1) as u32
            }
        };
        let mut generation = 1;
        if let Some(place) = self.connections.get_mut(index as usize) {
            generation = place.generation.wrapping_add(1).max(1);
            *place = Connection {
                generation,
                in_use: true,
                accepted,
                socket: Some(socket),
                ..Connection::default()
            };
        }
        self.open += 1;
        self.accepted += usize::from(accepted);
        identify(generation, index)
    }

    /// Leaks the buffers of sends the kernel has not let go of, rather than freeing memory it may
    /// still read.
    pub(super) fn keep_unfinished_buffers(&mut self) {
        for connection in &mut self.connections {
            if let Some(socket) = &connection.socket {
                sys::shut_down(socket);
            }
            if let Some(sending) = connection.sending.take() {
                std::mem::forget(sending.buffer);
            }
            if let Some(target) = connection.target.take() {
                std::mem::forget(target);
            }
        }
    }
}

impl UringDriver {
    pub(super) fn start_listening(
        &mut self,
        address: SocketAddr,
        share_port: bool,
    ) -> io::Result<ListenerId> {
        if self.net.listeners.len() >= LISTENERS_MAX {
            return Err(io::Error::other(format!(
                "more than {LISTENERS_MAX} listeners"
            )));
        }
        let deadline = Instant::now() + ADDRESS_WAIT;
        // A killed process's ring is torn down asynchronously and keeps its port for a while.
        let socket = loop {
            match sys::tcp_listener(address, share_port) {
                Err(error)
                    if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => break other?,
            }
        };
        let address = socket.local_addr()?;
        let id = self.net.listeners.len() as u32;
        self.net.listeners.push(Listener {
            socket: Some(socket),
            address,
            armed: false,
            closing: false,
        });
        self.arm_accept(id);
        Ok(ListenerId(id))
    }

    fn arm_accept(&mut self, index: u32) {
        let Some(listener) = self.net.listeners.get_mut(index as usize) else {
            return;
        };
        let Some(socket) = &listener.socket else {
            return;
        };
        if listener.armed || listener.closing {
            return;
        }
        let entry = opcode::AcceptMulti::new(types::Fd(socket.as_raw_fd()))
            .flags(libc::SOCK_CLOEXEC)
            .build()
            .user_data(UserData::new(Kind::Accept, 0, index).0);
        listener.armed = true;
        self.ring.push(entry);
    }

    pub(super) fn stop_listening(&mut self, id: ListenerId) {
        let Some(listener) = self.net.listeners.get_mut(id.0 as usize) else {
            return;
        };
        listener.closing = true;
        if listener.armed {
            let target = UserData::new(Kind::Accept, 0, id.0);
            self.ring.push(cancel(target));
        } else {
            listener.socket = None;
        }
    }

    pub(super) fn on_accept(&mut self, index: u32, result: i32, flags: u32) {
        let closing = match self.net.listeners.get_mut(index as usize) {
            Some(listener) => {
                if !cqueue::more(flags) {
                    listener.armed = false;
                    if listener.closing {
                        listener.socket = None;
                    }
                }
                listener.closing
            }
            None => true,
        };
        match sys::own_accepted(result) {
            Some(socket) if !closing => self.admit(ListenerId(index), socket),
            Some(_) => {}
            None if closing => {}
            None => {
                // ECONNABORTED and the like concern one connection; the rest means "not now".
                let resource = matches!(
                    -result,
                    libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM
                );
                if resource {
                    self.counters.accept_failures += 1;
                    let at = sys::monotonic_us().saturating_add(ACCEPT_RETRY_US);
                    self.net.accept_retry_at_us.get_or_insert(at);
                    return;
                }
            }
        }
        if !closing && !cqueue::more(flags) {
            self.arm_accept(index);
        }
    }

    pub(super) fn retry_accepts(&mut self) {
        match self.net.accept_retry_at_us {
            Some(at) if sys::monotonic_us() >= at => {}
            _ => return,
        }
        self.net.accept_retry_at_us = None;
        for index in 0..self.net.listeners.len() as u32 {
            self.arm_accept(index);
        }
    }

    fn admit(&mut self, listener: ListenerId, socket: OwnedFd) {
        if self.net.accepted >= self.net.connections_max {
            self.counters.connections_refused += 1;
            return;
        }
        // A peer that is gone already has no address; dropping the socket closes it.
        let Ok(peer) = sys::peer_address(&socket) else {
            return;
        };
        let _ = sys::set_no_delay(&socket);
        let connection = self.net.occupy(socket, true);
        self.ready.push_back(Completion::Accepted {
            listener,
            connection,
            peer,
        });
        self.arm_receive(connection);
    }

    pub(super) fn start_connecting(&mut self, address: SocketAddr) -> ConnectionId {
        let outgoing = self.net.open.saturating_sub(self.net.accepted);
        let socket = if outgoing >= OUTGOING_MAX {
            Err(io::Error::other(format!(
                "more than {OUTGOING_MAX} outgoing connections"
            )))
        } else {
            sys::tcp_socket(address)
        };
        let socket = match socket {
            Ok(socket) => socket,
            Err(error) => {
                self.net.failed = self.net.failed.wrapping_add(1);
                let connection = identify(self.net.failed, NO_PLACE);
                let reason = CloseReason::Error(error);
                self.ready
                    .push_back(Completion::Closed { connection, reason });
                return connection;
            }
        };
        let _ = sys::set_no_delay(&socket);
        let descriptor = socket.as_raw_fd();
        let id = self.net.occupy(socket, false);
        let target = Box::new(sys::RawAddress::new(address));
        let entry =
            opcode::Connect::new(types::Fd(descriptor), target.pointer(), target.bytes()).build();
        if let Some(connection) = self.net.get(id) {
            connection.target = Some(target);
        }
        self.ring
            .push(entry.user_data(data_of(Kind::Connect, id).0));
        id
    }

    pub(super) fn on_connect(&mut self, data: UserData, result: i32) {
        let Some((id, connection)) = self.net.find(data) else {
            return;
        };
        connection.target = None;
        if connection.closing.is_some() {
            self.finish_if_idle(id);
        } else if result < 0 {
            self.begin_close(
                id,
                CloseReason::Error(io::Error::from_raw_os_error(-result)),
            );
        } else {
            self.ready
                .push_back(Completion::Connected { connection: id });
            self.arm_receive(id);
        }
    }

    fn arm_receive(&mut self, id: ConnectionId) {
        let Some(connection) = self.net.get(id) else {
            return;
        };
        let blocked = connection.receive_armed
            || connection.paused
            || connection.closing.is_some()
            || connection.target.is_some();
        let Some(socket) = &connection.socket else {
            return;
        };
        if blocked {
            return;
        }
        let entry = opcode::RecvMulti::new(types::Fd(socket.as_raw_fd()), GROUP).build();
        connection.receive_armed = true;
        connection.cancelling = false;
        connection.starving = false;
        self.ring
            .push(entry.user_data(data_of(Kind::Receive, id).0));
    }

    pub(super) fn on_receive(&mut self, data: UserData, result: i32, flags: u32) {
        let buffer = cqueue::buffer_select(flags);
        if let Some(buffer) = buffer {
            self.net
                .receive
                .lend(buffer, usize::try_from(result).unwrap_or(0));
        }
        let ended = !cqueue::more(flags);
        let Some((id, connection)) = self.net.find(data) else {
            self.recycle(buffer);
            return;
        };
        if ended {
            connection.receive_armed = false;
        }
        if connection.closing.is_some() {
            self.recycle(buffer);
            self.finish_if_idle(id);
            return;
        }
        match (result, buffer) {
            (1.., Some(buffer)) => {
                let buffer = ReceivedId(buffer);
                self.ready.push_back(Completion::Received {
                    connection: id,
                    buffer,
                });
                if ended {
                    self.arm_receive(id);
                }
            }
            (0.., buffer) => {
                self.recycle(buffer);
                self.begin_close(id, CloseReason::Peer);
            }
            (error, buffer) => {
                self.recycle(buffer);
                self.on_receive_error(id, -error);
            }
        }
    }

    fn on_receive_error(&mut self, id: ConnectionId, error: i32) {
        match error {
            libc::ENOBUFS => {
                self.counters.receive_starved += 1;
                if self.net.receive.is_exhausted() {
                    let Some(connection) = self.net.get(id) else {
                        return;
                    };
                    if !connection.paused && !connection.starving {
                        connection.starving = true;
                        self.net.starving.push_back(id);
                    }
                } else {
                    // Buffers came back between the failure and now; no release will tell us.
                    self.arm_receive(id);
                }
            }
            // Ended by a pause; a resume since then finds it unarmed here.
            libc::ECANCELED | libc::EINTR | libc::EAGAIN => self.arm_receive(id),
            error => {
                self.begin_close(id, CloseReason::Error(io::Error::from_raw_os_error(error)));
            }
        }
    }

    fn recycle(&mut self, buffer: Option<u16>) {
        if let Some(buffer) = buffer {
            self.release_receive_buffer(ReceivedId(buffer));
        }
    }

    pub(super) fn release_receive_buffer(&mut self, buffer: ReceivedId) {
        if !self.net.receive.give_back(buffer) {
            debug_assert!(false, "receive buffer {} was not on loan", buffer.0);
            return;
        }
        // One buffer back, one connection that waits for one.
        while let Some(id) = self.net.starving.pop_front() {
            let waits = self.net.get(id).is_some_and(|c| c.starving && !c.paused);
            if waits {
                self.arm_receive(id);
                return;
            }
        }
    }

    pub(super) fn set_paused(&mut self, id: ConnectionId, pause: bool) {
        let Some(connection) = self.net.get(id) else {
            return;
        };
        connection.paused = pause;
        if !pause {
            self.arm_receive(id);
        } else if connection.receive_armed && !connection.cancelling {
            connection.cancelling = true;
            self.ring.push(cancel(data_of(Kind::Receive, id)));
        } else {
            connection.starving = false;
        }
    }

    pub(super) fn start_send(&mut self, id: ConnectionId, buffer: Vec<u8>) {
        let refused = match self.net.get(id) {
            Some(connection) if connection.sending.is_some() => {
                debug_assert!(false, "two sends on one connection");
                Some(io::ErrorKind::InvalidInput)
            }
            Some(connection) if connection.closing.is_none() && connection.target.is_none() => None,
            _ => Some(io::ErrorKind::NotConnected),
        };
        if refused.is_some() || buffer.is_empty() {
            let result = refused.map_or(Ok(()), |kind| Err(io::Error::from(kind)));
            self.ready.push_back(Completion::Sent {
                connection: id,
                buffer,
                result,
            });
            return;
        }
        if let Some(connection) = self.net.get(id) {
            connection.sending = Some(Sending { buffer, sent: 0 });
        }
        self.push_send(id);
    }

    fn push_send(&mut self, id: ConnectionId) {
        let Some(connection) = self.net.get(id) else {
            return;
        };
        let (Some(socket), Some(sending)) = (&connection.socket, &connection.sending) else {
            return;
        };
        let rest = sending.buffer.get(sending.sent..).unwrap_or_default();
        let len = rest.len().min(SEND_BYTES_MAX) as u32;
        let entry = opcode::Send::new(types::Fd(socket.as_raw_fd()), rest.as_ptr(), len)
            .flags(libc::MSG_NOSIGNAL)
            .build()
            .user_data(data_of(Kind::Send, id).0);
        self.ring.push(entry);
    }

    pub(super) fn on_send(&mut self, data: UserData, result: i32) {
        let Some((id, connection)) = self.net.find(data) else {
            return;
        };
        let Some(sending) = &mut connection.sending else {
            return;
        };
        let mut error = None;
        match result {
            1.. => sending.sent += result as usize,
            0 => error = Some(io::Error::from(io::ErrorKind::WriteZero)),
            _ if -result == libc::EINTR || -result == libc::EAGAIN => {}
            _ => error = Some(io::Error::from_raw_os_error(-result)),
        }
        let complete = sending.sent >= sending.buffer.len();
        if error.is_none() && !complete && connection.closing.is_none() {
            self.counters.short_sends += 1;
            self.push_send(id);
            return;
        }
        if error.is_none() && !complete {
            error = Some(io::Error::from(io::ErrorKind::ConnectionAborted));
        }
        let Some(Sending { buffer, .. }) = connection.sending.take() else {
            return;
        };
        let failed = error.as_ref().map(|error| {
            error
                .raw_os_error()
                .map_or(io::Error::from(error.kind()), io::Error::from_raw_os_error)
        });
        let result = error.map_or(Ok(()), Err);
        self.ready.push_back(Completion::Sent {
            connection: id,
            buffer,
            result,
        });
        match failed {
            Some(error) => self.begin_close(id, CloseReason::Error(error)),
            None => self.finish_if_idle(id),
        }
    }

    pub(super) fn close_connection(&mut self, id: ConnectionId) {
        self.begin_close(id, CloseReason::Local);
    }

    fn begin_close(&mut self, id: ConnectionId, reason: CloseReason) {
        let Some(connection) = self.net.get(id) else {
            return;
        };
        if connection.closing.is_none() {
            connection.closing = Some(reason);
            if let Some(socket) = &connection.socket {
                // Ends the receive and a send that waits for room.
                sys::shut_down(socket);
            }
            let connecting = connection.target.is_some();
            let receiving = connection.receive_armed && !connection.cancelling;
            if receiving {
                self.ring.push(cancel(data_of(Kind::Receive, id)));
            }
            if connecting {
                self.ring.push(cancel(data_of(Kind::Connect, id)));
            }
        }
        self.finish_if_idle(id);
    }

    fn finish_if_idle(&mut self, id: ConnectionId) {
        let Some(connection) = self.net.get(id) else {
            return;
        };
        let busy =
            connection.receive_armed || connection.sending.is_some() || connection.target.is_some();
        if busy || connection.closing.is_none() {
            return;
        }
        let Some(reason) = connection.closing.take() else {
            return;
        };
        connection.socket = None;
        connection.in_use = false;
        let accepted = connection.accepted;
        self.net.open -= 1;
        self.net.accepted -= usize::from(accepted);
        self.net.free.push(id.0 as u32);
        self.ready.push_back(Completion::Closed {
            connection: id,
            reason,
        });
    }
}

fn data_of(kind: Kind, id: ConnectionId) -> UserData {
    UserData::new(kind, (id.0 >> 32) as u32, id.0 as u32)
}

fn cancel(target: UserData) -> squeue::Entry {
    opcode::AsyncCancel::new(target.0)
        .build()
        .user_data(UserData::new(Kind::Cancel, 0, 0).0)
}
