//! A shard on a machine that costs nothing: its disk ends every write at the next look.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;

use shard::io::sim::{SimFile, SimStorage};
use shard::io::{FileJob, Storage};
use shard::memory::{LockedRing, RingSpec};
use shard::recovery::{RecoverySetup, recover};
use shard::runtime::sim::{SimConfig, SimMachine};
use shard::runtime::{
    ColdRead, Completion, ConnectionId, Driver, FileId, ListenerId, Now, ReceivedId, RingId,
    RingWrite, SlotId,
};
use shard::{AckPoint, Shard, ShardConfig};

/// A driver whose disk ends every write at the next look, without memory of its own, and whose
/// network takes everything at once.
pub struct NullDriver {
    now: Now,
    files: u32,
    done: [Option<(u64, bool)>; 64],
    arriving: VecDeque<(ConnectionId, u16)>,
    bytes: Vec<Vec<u8>>,
    sent: VecDeque<(ConnectionId, Vec<u8>)>,
    /// Bytes sent in all.
    pub sent_bytes: u64,
}

impl NullDriver {
    pub fn new() -> Self {
        let now = Now {
            monotonic_us: 1_000_000,
            wall_ms: 1_700_000_000_000,
        };
        Self {
            now,
            files: 0,
            done: [None; 64],
            arriving: VecDeque::with_capacity(64),
            bytes: Vec::new(),
            sent: VecDeque::with_capacity(64),
            sent_bytes: 0,
        }
    }

    /// Keeps bytes that can arrive again and again; returns their name.
    #[allow(dead_code, reason = "not every user of this machine has a network")]
    pub fn keep(&mut self, bytes: Vec<u8>) -> u16 {
        self.bytes.push(bytes);
        (self.bytes.len() - 1) as u16
    }

    /// Lets kept bytes arrive on a connection.
    #[allow(dead_code, reason = "not every user of this machine has a network")]
    pub fn arrive(&mut self, connection: ConnectionId, bytes: u16) {
        self.arriving.push_back((connection, bytes));
    }

    fn end(&mut self, token: u64, is_write: bool) {
        let place = self
            .done
            .iter_mut()
            .find(|place| place.is_none())
            .expect("room");
        *place = Some((token, is_write));
    }
}

impl Driver for NullDriver {
    type Storage = SimStorage;

    fn now(&self) -> Now {
        self.now
    }
    fn refresh_clock(&mut self) -> Now {
        self.now
    }
    fn listen(&mut self, _: SocketAddr, _: bool) -> std::io::Result<ListenerId> {
        Err(std::io::Error::other("no network"))
    }
    fn listener_address(&self, _: ListenerId) -> Option<SocketAddr> {
        None
    }
    fn close_listener(&mut self, _: ListenerId) {}
    fn connect(&mut self, _: SocketAddr) -> ConnectionId {
        ConnectionId(0)
    }
    fn send(&mut self, connection: ConnectionId, buffer: Vec<u8>) {
        self.sent_bytes += buffer.len() as u64;
        self.sent.push_back((connection, buffer));
    }
    fn pause_receiving(&mut self, _: ConnectionId, _: bool) {}
    fn close(&mut self, _: ConnectionId) {}
    fn received(&self, buffer: ReceivedId) -> &[u8] {
        &self.bytes[usize::from(buffer.0)]
    }
    fn release_received(&mut self, _: ReceivedId) {}
    fn adopt_file(&mut self, _: SimFile) -> FileId {
        self.files += 1;
        FileId(self.files)
    }
    fn drop_file(&mut self, _: FileId) {}
    fn register_ring(&mut self, _: &LockedRing) -> std::io::Result<RingId> {
        Ok(RingId(0))
    }
    fn write(&mut self, write: RingWrite) {
        self.end(write.token, true);
    }
    fn flush(&mut self, _: FileId, token: u64) {
        self.end(token, false);
    }
    fn cold_read(&mut self, _: ColdRead) -> bool {
        false
    }
    fn slot(&self, _: SlotId) -> &[u8] {
        &[]
    }
    fn release_slot(&mut self, _: SlotId) {}
    fn file_job(&mut self, _: FileJob<SimStorage>, _: u64) {}
    fn wait(&mut self, _: Option<u64>) {
        self.now.monotonic_us += 50;
        self.now.wall_ms = 1_700_000_000_000 + (self.now.monotonic_us / 1000) as i64;
    }
    fn next(&mut self) -> Option<Completion> {
        if let Some((connection, buffer)) = self.sent.pop_front() {
            return Some(Completion::Sent {
                connection,
                buffer,
                result: Ok(()),
            });
        }
        if let Some((connection, bytes)) = self.arriving.pop_front() {
            return Some(Completion::Received {
                connection,
                buffer: ReceivedId(bytes),
            });
        }
        let (token, is_write) = self.done.iter_mut().find_map(Option::take)?;
        Some(if is_write {
            Completion::Written {
                token,
                result: Ok(()),
            }
        } else {
            Completion::Flushed {
                token,
                result: Ok(()),
            }
        })
    }
}

pub const UNITS_MAX: usize = 1 << 18;

fn recovered<D: Driver<Storage = SimStorage>>(
    storage: &SimStorage,
    driver: &mut D,
    ack: AckPoint,
) -> Shard {
    let config = ShardConfig {
        number: 0,
        local: 0,
        log_dir: PathBuf::from("/log"),
        run_dir: PathBuf::from("/runs"),
        segment_bytes: 1 << 30,
        units_max: UNITS_MAX,
        run_units: UNITS_MAX as u64,
        run_log_bytes: 1 << 40,
        parked_max: 16,
        delay_levels_ms: vec![1000],
        store_host: "127.0.0.1:10911".parse().unwrap(),
        disk_stop_percent: 90,
    };
    let setup = RecoverySetup {
        config,
        survivor: None,
        in_flight_bytes_max: 0,
        saved_offsets: Vec::new(),
        saved_position: 0,
        progress: &|_, _| {},
    };
    let recovered = recover(storage, setup).unwrap();
    let spec = RingSpec {
        path: None,
        bytes: 16 << 20,
        lock: false,
    };
    let ring = LockedRing::open(spec).unwrap().ring;
    ring.format([7; 16], 1, 0);
    recovered.open(driver, ring, ack, 5_000).unwrap()
}

/// A shard on a store that has been in use, so that nothing is left to be prepared.
pub fn open(ack: AckPoint, driver: &mut NullDriver) -> Shard {
    let machine = SimMachine::new(SimConfig::default());
    let storage = machine.storage();
    for dir in ["/log", "/runs"] {
        storage.create_dirs(dir.as_ref()).unwrap();
    }
    let mut first = machine.driver();
    let mut shard = recovered(&storage, &mut first, AckPoint::Written);
    first.refresh_clock();
    shard.commit_offset(first.now(), "T", "g", 0, 0).unwrap();
    while shard.watermark() < shard.log().tail() {
        shard.turn(first.now(), &mut first);
        first.wait(None);
        while let Some(completion) = first.next() {
            shard.on_completion(first.now(), &mut first, completion);
        }
    }
    recovered(&storage, driver, ack)
}
