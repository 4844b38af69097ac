//! Connections of one core: bytes in, frames out of them, bytes out.
//!
//! Frames are read straight out of the driver's receive buffer; only the rest of a frame that is
//! not complete is copied. Answers collect in `out` and leave in one send per turn.
//!
//! Invariant: at most one send per connection is under way, and a connection whose peer does not
//! read is paused at [`OUT_BYTES_PAUSE`] and closed at [`OUT_BYTES_MAX`] (P5).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::SocketAddr;

use shard::runtime::ConnectionId;

/// Unsent bytes at which receiving from a connection stops.
pub const OUT_BYTES_PAUSE: usize = 8 * 1024 * 1024;
/// Unsent bytes at which a connection is closed.
pub const OUT_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Capacity of an output buffer that is kept for reuse.
const KEPT_BYTES: usize = 1024 * 1024;

/// Hashes connection ids. The driver makes them, so nobody can choose ones that collide.
#[derive(Clone, Copy, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // The table looks at the low bits and the highest seven.
        let mixed = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A client or tool on a broker port.
    Broker,
    /// A client or broker on the name server port.
    NameServer,
    /// This broker's connection to name server `n`.
    Registration(usize),
    /// The name server's connection to a broker it probes.
    Probe(usize),
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    /// What it is for.
    pub purpose: Purpose,
    /// Remote address.
    pub peer: SocketAddr,
    /// Beginning of a frame that is not complete.
    pub input: Vec<u8>,
    /// Frames to send.
    pub out: Vec<u8>,
    /// Buffer of the last finished send.
    spare: Vec<u8>,
    /// Whether a send is under way.
    pub sending: bool,
    /// Whether it is in the list of connections with output.
    pub listed: bool,
    /// Whether receiving is paused.
    pub paused: bool,
    /// Whether it is being closed.
    pub closing: bool,
    /// Monotonic time of the last byte in or out, in microseconds.
    pub active_us: u64,
}

/// All connections of a core.
#[derive(Default)]
pub struct Connections {
    all: HashMap<u64, Connection, BuildHasherDefault<IdHasher>>,
    with_output: Vec<u64>,
}

/// What has to be done with a connection after output was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pressure {
    /// Nothing.
    None,
    /// Stop receiving from it.
    Pause,
    /// Receive again.
    Resume,
    /// Close it.
    Close,
}

impl Connections {
    /// Takes a new connection.
    pub fn insert(&mut self, id: ConnectionId, purpose: Purpose, peer: SocketAddr, now_us: u64) {
        let connection = Connection {
            purpose,
            peer,
            input: Vec::new(),
            out: Vec::new(),
            spare: Vec::new(),
            sending: false,
            listed: false,
            paused: false,
            closing: false,
            active_us: now_us,
        };
        self.all.insert(id.0, connection);
    }

    /// One connection.
    pub fn get(&self, id: u64) -> Option<&Connection> {
        self.all.get(&id)
    }

    /// One connection, to change it.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut Connection> {
        self.all.get_mut(&id)
    }

    /// Forgets a connection.
    pub fn remove(&mut self, id: u64) -> Option<Connection> {
        self.all.remove(&id)
    }

    /// Connections held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All connections.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Connection)> {
        self.all.iter().map(|(id, connection)| (*id, connection))
    }

    /// The output buffer of a connection, listed for the next flush; `None` if it is gone.
    pub fn output(&mut self, id: u64) -> Option<&mut Vec<u8>> {
        let connection = self
            .all
            .get_mut(&id)
            .filter(|connection| !connection.closing)?;
        if !connection.listed {
            connection.listed = true;
            self.with_output.push(id);
        }
        Some(&mut connection.out)
    }

    /// Hands every pending output to `send` and says what else is to be done.
    pub fn flush(
        &mut self,
        mut send: impl FnMut(ConnectionId, Vec<u8>),
        mut press: impl FnMut(ConnectionId, Pressure),
    ) {
        let listed = std::mem::take(&mut self.with_output);
        for id in &listed {
            let Some(connection) = self.all.get_mut(id) else {
                continue;
            };
            connection.listed = false;
            let unsent = connection.out.len();
            if !connection.sending && unsent > 0 {
                connection.sending = true;
                let next = std::mem::take(&mut connection.spare);
                send(
                    ConnectionId(*id),
                    std::mem::replace(&mut connection.out, next),
                );
            } else if unsent > OUT_BYTES_MAX {
                connection.closing = true;
                press(ConnectionId(*id), Pressure::Close);
            } else if unsent > OUT_BYTES_PAUSE && !connection.paused {
                connection.paused = true;
                press(ConnectionId(*id), Pressure::Pause);
            }
        }
        let mut listed = listed;
        listed.clear();
        if self.with_output.is_empty() {
            self.with_output = listed;
        }
    }

    /// Takes the buffer of a finished send back.
    pub fn sent(&mut self, id: u64, mut buffer: Vec<u8>, now_us: u64) -> Pressure {
        let Some(connection) = self.all.get_mut(&id) else {
            return Pressure::None;
        };
        connection.sending = false;
        connection.active_us = now_us;
        buffer.clear();
        if buffer.capacity() <= KEPT_BYTES {
            connection.spare = buffer;
        }
        if !connection.out.is_empty() && !connection.listed {
            connection.listed = true;
            self.with_output.push(id);
        }
        if connection.paused && connection.out.len() <= OUT_BYTES_PAUSE / 2 {
            connection.paused = false;
            return Pressure::Resume;
        }
        Pressure::None
    }

    /// Frees the buffers of connections that have been silent since `before_us`, so that an idle
    /// connection costs its table entry only.
    pub fn shrink_idle(&mut self, before_us: u64) {
        for connection in self.all.values_mut() {
            let is_idle = connection.active_us < before_us && !connection.sending;
            if is_idle && connection.input.is_empty() && connection.out.is_empty() {
                connection.input = Vec::new();
                connection.out = Vec::new();
                connection.spare = Vec::new();
            }
        }
    }

    /// Whether some output has not left yet.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        self.all
            .values()
            .any(|connection| connection.sending || !connection.out.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: u64 = 1 << 32;

    fn connections() -> Connections {
        let mut connections = Connections::default();
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        connections.insert(ConnectionId(ID), Purpose::Broker, peer, 0);
        connections
    }

    #[test]
    fn an_idle_connection_keeps_no_buffer_and_a_busy_one_keeps_its_bytes() {
        let mut connections = connections();
        connections.output(ID).unwrap().extend([7; 5000]);
        connections.shrink_idle(u64::MAX);
        assert_eq!(connections.get(ID).unwrap().out, [7; 5000]);
        let mut sent = Vec::new();
        connections.flush(|_, buffer| sent = buffer, |_, _| {});
        connections.shrink_idle(u64::MAX);
        connections.sent(ID, sent, 10);
        assert!(connections.get(ID).unwrap().spare.capacity() >= 5000);
        connections.shrink_idle(10);
        assert!(connections.get(ID).unwrap().spare.capacity() >= 5000);
        connections.shrink_idle(11);
        let idle = connections.get(ID).unwrap();
        let kept = idle.spare.capacity() + idle.out.capacity() + idle.input.capacity();
        assert_eq!(kept, 0);
    }

    #[test]
    fn ids_that_follow_each_other_do_not_share_their_low_bits() {
        let low: std::collections::HashSet<u64> = (0..4096)
            .map(|index| {
                let mut hasher = IdHasher::default();
                hasher.write_u64(ID | index);
                hasher.finish() & 0xffff
            })
            .collect();
        assert!(low.len() > 3900, "{}", low.len());
    }
}
