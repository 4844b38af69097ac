//! Owns one measured connection: bytes out, answers in, without blocking.
//!
//! Invariant: bytes leave in the order they were appended; an answer is handed over exactly once;
//! after an error the connection is closed and keeps nothing of the past.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use wire::frame::{FRAME_BYTES_MAX, split};
use wire::header::{Header, decode};

use crate::error::BenchError;

/// Bytes waiting for the socket above which nothing more is put on a connection.
const OUT_BYTES_MAX: usize = 1 << 20;
/// Room for answers at first; grown for a larger frame.
const IN_BYTES: usize = 16 * 1024;

/// One connection.
#[derive(Debug)]
pub struct Link {
    /// Which broker it leads to.
    pub broker: usize,
    address: SocketAddr,
    token: Token,
    stream: Option<TcpStream>,
    writable: bool,
    input: Vec<u8>,
    filled: usize,
    /// Where frames are appended; [`Self::flush`] sends them.
    pub out: Vec<u8>,
    out_at: usize,
    /// Requests without an answer.
    pub in_flight: usize,
    /// Most of them.
    pub in_flight_max: usize,
}

impl Link {
    /// A connection to be opened.
    pub fn new(broker: usize, address: SocketAddr, token: Token) -> Self {
        Self {
            broker,
            address,
            token,
            stream: None,
            writable: false,
            input: vec![0; IN_BYTES],
            filled: 0,
            out: Vec::new(),
            out_at: 0,
            in_flight: 0,
            in_flight_max: usize::MAX,
        }
    }

    /// Begins to connect; the first writable event ends it.
    pub fn open(&mut self, registry: &Registry) -> Result<(), BenchError> {
        let address = self.address;
        let failed = move || format!("connect to {address}");
        let mut stream = TcpStream::connect(address).map_err(BenchError::io(failed()))?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        registry
            .register(&mut stream, self.token, interest)
            .map_err(BenchError::io(failed()))?;
        self.stream = Some(stream);
        Ok(())
    }

    /// Forgets the connection and all that was under way on it.
    pub fn close(&mut self, registry: &Registry) {
        if let Some(mut stream) = self.stream.take() {
            // The descriptor is about to be closed, which takes it out of the poller in any case.
            let _ = registry.deregister(&mut stream);
        }
        self.writable = false;
        self.filled = 0;
        self.in_flight = 0;
        self.out.clear();
        self.out_at = 0;
    }

    /// Whether there is a connection, open or opening.
    pub fn is_open(&self) -> bool {
        self.stream.is_some()
    }

    /// Whether the connection is there.
    pub fn is_connected(&self) -> bool {
        self.stream.is_some() && self.writable
    }

    /// Whether bytes still wait for the socket.
    pub fn has_unsent(&self) -> bool {
        self.stream.is_some() && self.out_at < self.out.len()
    }

    /// Whether a frame may be appended now.
    pub fn takes_more(&self) -> bool {
        self.stream.is_some()
            && self.writable
            && self.in_flight < self.in_flight_max
            && self.out.len() - self.out_at < OUT_BYTES_MAX
    }

    /// The socket may take bytes again, or the connection is there.
    pub fn now_writable(&mut self) -> std::io::Result<()> {
        if let Some(stream) = &self.stream {
            if let Some(error) = stream.take_error()? {
                return Err(error);
            }
            if !self.writable {
                stream.set_nodelay(true)?;
            }
            self.writable = true;
        }
        Ok(())
    }

    /// Sends what the socket takes.
    pub fn flush(&mut self) -> std::io::Result<()> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        while self.writable && self.out_at < self.out.len() {
            match stream.write(self.out.get(self.out_at..).unwrap_or_default()) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => self.out_at += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.out_at == self.out.len() {
            self.out.clear();
            self.out_at = 0;
        } else if self.out_at > OUT_BYTES_MAX / 2 {
            self.out.drain(..self.out_at);
            self.out_at = 0;
        }
        Ok(())
    }

    /// Reads what is there and hands over every whole answer. `before` runs after each read, which
    /// is when the answers of that read count as arrived.
    pub fn receive(
        &mut self,
        mut before: impl FnMut(),
        mut answer: impl FnMut(&Header<'_>, &[u8]),
    ) -> Result<(), BenchError> {
        let address = self.address;
        loop {
            if self.filled == self.input.len() {
                self.input.resize(self.input.len() * 2, 0);
            }
            let Some(stream) = &mut self.stream else {
                return Ok(());
            };
            let room = self.input.get_mut(self.filled..).unwrap_or_default();
            let room_bytes = room.len();
            let bytes = match stream.read(room) {
                Ok(0) => {
                    return Err(BenchError::protocol(
                        &address.to_string(),
                        "it closed the connection",
                    ));
                }
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(BenchError::io(format!("read from {address}"))(error)),
            };
            before();
            self.filled += bytes;
            self.hand_over(&mut answer)?;
            // A short read of a stream socket means that it is drained.
            if bytes < room_bytes {
                return Ok(());
            }
        }
    }

    fn hand_over(&mut self, answer: &mut impl FnMut(&Header<'_>, &[u8])) -> Result<(), BenchError> {
        let address = self.address;
        let unreadable = |problem: String| BenchError::protocol(&address.to_string(), problem);
        let mut at = 0;
        loop {
            let rest = self.input.get(at..self.filled).unwrap_or_default();
            let split =
                split(rest, FRAME_BYTES_MAX).map_err(|error| unreadable(error.to_string()))?;
            let Some((frame, consumed)) = split else {
                break;
            };
            let header = decode(&frame).map_err(|error| unreadable(error.to_string()))?;
            if header.is_response() {
                answer(&header, frame.body);
            }
            at += consumed;
        }
        if at > 0 {
            self.input.copy_within(at..self.filled, 0);
            self.filled -= at;
        }
        Ok(())
    }
}
