//! Owns a server that acknowledges and forgets: what the generator itself can do, measured.
//!
//! Invariant: every send is answered with success, in order; nothing is kept, so figures against it
//! are the ceiling of the generator and of the machine's loopback, never of a broker.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use wire::codes::{request, response};
use wire::frame::{FRAME_BYTES_MAX, split};
use wire::header::{ExtValue, Header, Reply, decode, encode_reply};

use crate::cli::SinkOptions;
use crate::error::BenchError;
use crate::machine;
use crate::session::resolve;

const LISTENER: Token = Token(usize::MAX);
const IN_BYTES: usize = 1 << 20;
/// Most connections.
const CONNECTIONS_MAX: usize = 4_096;

struct Peer {
    stream: TcpStream,
    input: Vec<u8>,
    filled: usize,
    out: Vec<u8>,
}

struct Sink {
    poll: Poll,
    listener: TcpListener,
    peers: Vec<Option<Peer>>,
    route: Vec<u8>,
}

/// Runs `sink` until it is killed.
pub fn run(options: &SinkOptions) -> Result<bool, BenchError> {
    machine::pin(options.core)?;
    let address = resolve(&options.listen)?;
    let failed = || format!("listen on {address}");
    let mut listener = TcpListener::bind(address).map_err(BenchError::io(failed()))?;
    let poll = Poll::new().map_err(BenchError::io("create a poller"))?;
    poll.registry()
        .register(&mut listener, LISTENER, Interest::READABLE)
        .map_err(BenchError::io(failed()))?;
    println!("sink on {address}: name server and broker in one; acknowledges and forgets");
    let route = route_body(address, options.queues);
    let mut sink = Sink {
        poll,
        listener,
        peers: Vec::new(),
        route,
    };
    let mut events = Events::with_capacity(1_024);
    loop {
        match sink.poll.poll(&mut events, None) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            result => result.map_err(BenchError::io("wait for sockets"))?,
        }
        for event in &events {
            if event.token() == LISTENER {
                sink.accept();
            } else {
                sink.serve(event.token().0);
            }
        }
    }
}

fn route_body(address: SocketAddr, queues: u32) -> Vec<u8> {
    format!(
        "{{\"brokerDatas\":[{{\"brokerAddrs\":{{\"0\":\"{address}\"}},\"brokerName\":\"sink\",\
         \"cluster\":\"sink\",\"enableActingMaster\":false}}],\"filterServerTable\":{{}},\
         \"queueDatas\":[{{\"brokerName\":\"sink\",\"perm\":6,\"readQueueNums\":{queues},\
         \"topicSysFlag\":0,\"writeQueueNums\":{queues}}}]}}"
    )
    .into_bytes()
}

impl Sink {
    fn accept(&mut self) {
        while let Ok((mut stream, _)) = self.listener.accept() {
            let free = self
                .peers
                .iter()
                .position(Option::is_none)
                .unwrap_or(self.peers.len());
            let interest = Interest::READABLE | Interest::WRITABLE;
            let ready = free < CONNECTIONS_MAX
                && stream.set_nodelay(true).is_ok()
                && self
                    .poll
                    .registry()
                    .register(&mut stream, Token(free), interest)
                    .is_ok();
            if !ready {
                continue;
            }
            let peer = Some(Peer {
                stream,
                input: vec![0; IN_BYTES],
                filled: 0,
                out: Vec::new(),
            });
            match self.peers.get_mut(free) {
                Some(slot) => *slot = peer,
                None => self.peers.push(peer),
            }
        }
    }

    fn serve(&mut self, at: usize) {
        let Some(slot) = self.peers.get_mut(at) else {
            return;
        };
        if let Some(peer) = slot
            && !peer.serve(&self.route)
        {
            *slot = None;
        }
    }
}

impl Peer {
    /// Reads, answers and writes what can be; false when the connection is over.
    fn serve(&mut self, route: &[u8]) -> bool {
        loop {
            if self.filled == self.input.len() {
                self.input.resize(self.input.len() * 2, 0);
            }
            let room = self.input.get_mut(self.filled..).unwrap_or_default();
            let room_bytes = room.len();
            match self.stream.read(room) {
                Ok(0) => return false,
                Ok(bytes) => {
                    self.filled += bytes;
                    if !self.answer(route) {
                        return false;
                    }
                    if bytes < room_bytes {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        self.flush()
    }

    fn answer(&mut self, route: &[u8]) -> bool {
        let mut at = 0;
        loop {
            let rest = self.input.get(at..self.filled).unwrap_or_default();
            let Ok(split) = split(rest, FRAME_BYTES_MAX) else {
                return false;
            };
            let Some((frame, consumed)) = split else {
                break;
            };
            let Ok(header) = decode(&frame) else {
                return false;
            };
            reply(&header, route, &mut self.out);
            at += consumed;
        }
        self.input.copy_within(at..self.filled, 0);
        self.filled -= at;
        true
    }

    fn flush(&mut self) -> bool {
        let mut written = 0;
        while written < self.out.len() {
            match self
                .stream
                .write(self.out.get(written..).unwrap_or_default())
            {
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        self.out.drain(..written);
        true
    }
}

fn reply(header: &Header<'_>, route: &[u8], out: &mut Vec<u8>) {
    let sent = [
        ("msgId", ExtValue::Str("7F00000100002A9F0000000000000000")),
        ("queueId", ExtValue::Int(0)),
        ("queueOffset", ExtValue::Int(0)),
        ("MSG_REGION", ExtValue::Str("DefaultRegion")),
        ("TRACE_ON", ExtValue::Str("true")),
    ];
    let (code, ext, body): (_, &[_], &[_]) = match header.code {
        request::SEND_MESSAGE_V2 => (response::SUCCESS, &sent, &[]),
        request::GET_ROUTEINFO_BY_TOPIC => (response::SUCCESS, &[], route),
        _ => (response::REQUEST_CODE_NOT_SUPPORTED, &[], &[]),
    };
    let reply = Reply {
        code,
        opaque: header.opaque,
        remark: None,
        ext,
    };
    encode_reply(out, header.serialization, &reply, body);
}
