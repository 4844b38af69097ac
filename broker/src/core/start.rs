//! From a run plan to running cores: recover the shards, open what they need, start the threads.
//!
//! Invariant: the store's epoch is saved between recovery and the formatting of new buffers, and
//! nothing listens before every shard is open.

use std::path::{Path, PathBuf};

use shard::address;
use shard::io::Storage;
use shard::io::real::RealStorage;
use shard::memory::{LockedRing, Opened, RingSpec};
use shard::recovery::{Recovered, RecoverySetup, SavedOffset, recover};
use shard::runtime::uring::LogPort;
use shard::{AckPoint, ShardConfig};

use super::control_task::OFFSETS_FILE;
use super::state::CoreError;
use super::store::{StoreIdentity, buffer_path};
use crate::cli::RunPlan;
use crate::config::Config;
use crate::config::value::{self, FlushDiskType};
use crate::health::Health;
use crate::settings;

/// Slots of recent queue units per shard.
const UNITS_MAX: usize = 1 << 18;
/// Units that make a run.
const RUN_UNITS: u64 = 1 << 16;
/// Log bytes that make a run: what recovery reads at most after a kill.
const RUN_LOG_BYTES: u64 = 128 << 20;

/// The store of this process, recovered.
pub struct OpenStore<S: Storage> {
    /// Identity.
    pub identity: StoreIdentity,
    /// Shards the store had before, when it is not new.
    pub had_shards: Option<u16>,
    /// Shards by number.
    pub shards: Vec<Recovered<S>>,
    /// The files.
    pub storage: S,
    /// Root directory.
    pub root: PathBuf,
    /// Directory of surviving buffers.
    pub buffer_dir: Option<PathBuf>,
    /// Keeps the store locked; a simulated one needs no lock.
    pub lock: Option<std::fs::File>,
}

/// What a start needs of the machine besides its file system.
pub trait Host: Sync {
    /// The write buffer that a process left behind at a path, whoever made it.
    fn survivor(&self, path: PathBuf) -> Option<LockedRing>;
    /// A write buffer for this process; without a path it dies with it.
    ///
    /// # Errors
    /// When the memory cannot be had.
    fn open_buffer(&self, spec: RingSpec) -> Result<Opened, CoreError>;
    /// Wall clock in milliseconds.
    fn wall_ms(&self) -> i64;
    /// Whether shards are recovered one after the other, so that a simulation is the same each
    /// time.
    fn in_order(&self) -> bool;
}

/// The machine every real broker runs on.
pub struct RealHost;

impl Host for RealHost {
    fn survivor(&self, path: PathBuf) -> Option<LockedRing> {
        let bytes = LockedRing::existing_bytes(&path).ok().flatten()?;
        let spec = RingSpec {
            path: Some(path),
            bytes,
            lock: false,
        };
        let opened = LockedRing::open(spec).ok()?;
        opened.existed.then_some(opened.ring)
    }

    fn open_buffer(&self, spec: RingSpec) -> Result<Opened, CoreError> {
        if let Some(path) = &spec.path
            && LockedRing::existing_bytes(path)
                .ok()
                .flatten()
                .is_some_and(|had| had != spec.bytes)
        {
            // It has been written out by recovery; this process wants another size.
            let _ = std::fs::remove_file(path);
        }
        LockedRing::open(spec).map_err(|error| CoreError::Other(error.to_string()))
    }

    fn wall_ms(&self) -> i64 {
        shard::runtime::sys::wall_ms()
    }

    fn in_order(&self) -> bool {
        false
    }
}

/// Address that is stored with records and told in message ids.
pub fn store_host(config: &Config) -> Result<std::net::SocketAddr, CoreError> {
    let (host, port) = (&config.broker_ip1, config.listen_port);
    let resolved = host.resolve(port).map_err(|source| CoreError::Machine {
        what: format!("brokerIP1={}: cannot be resolved", host.as_str()),
        source,
    })?;
    resolved
        .first()
        .copied()
        .ok_or_else(|| CoreError::Other(format!("brokerIP1={}: has no address", host.as_str())))
}

fn shard_config(
    config: &Config,
    number: u16,
    segment_bytes: u64,
    host: std::net::SocketAddr,
) -> ShardConfig {
    let root = config.store_path_root.as_path();
    let levels = config.message_delay_levels.delays_ms();
    ShardConfig {
        number,
        local: 0,
        log_dir: config.store_path_commit_log.as_path().to_path_buf(),
        run_dir: root.join("consumequeue"),
        segment_bytes,
        units_max: UNITS_MAX,
        run_units: RUN_UNITS,
        run_log_bytes: RUN_LOG_BYTES,
        parked_max: config.parked_pulls_max as usize,
        delay_levels_ms: levels
            .iter()
            .map(|ms| i64::try_from(*ms).unwrap_or(i64::MAX))
            .collect(),
        store_host: host,
        disk_stop_percent: config.disk_warning_percent,
    }
}

fn make_dirs<S: Storage>(storage: &S, config: &Config, root: &Path) -> Result<(), CoreError> {
    let dirs = [
        root.to_path_buf(),
        root.join("config"),
        config.store_path_commit_log.as_path().to_path_buf(),
        root.join("consumequeue"),
    ];
    dirs.iter().try_for_each(|dir| {
        let made = storage.create_dirs(dir);
        made.map_err(|source| CoreError::Machine {
            what: format!("creating {}", dir.display()),
            source,
        })
    })
}

/// Opens and recovers the store. `adjust` has the last word on how shards are set up.
pub fn open_store<S: Storage>(
    plan: &RunPlan,
    storage: S,
    machine: &dyn Host,
    health: &Health,
    adjust: &(dyn Fn(&mut ShardConfig) + Sync),
) -> Result<OpenStore<S>, CoreError> {
    let config = &plan.config;
    let root = config.store_path_root.as_path().to_path_buf();
    make_dirs(&storage, config, &root)?;
    let wanted = u16::try_from(config.shards).unwrap_or(1).max(1);
    let segment_bytes = config.segment_bytes.0;
    let (identity, had_shards) =
        StoreIdentity::load_or_new(&storage, &root, wanted, segment_bytes)?;
    say_shards(had_shards, wanted);
    if had_shards.is_some() && identity.segment_bytes != segment_bytes {
        let (has, asked) = (identity.segment_bytes, segment_bytes);
        tracing::warn!(
            has,
            asked,
            "the store keeps its segment size (mapedFileSizeCommitLog)"
        );
    }
    let host = store_host(config)?;
    let (offsets, positions) = load_offsets(&storage, &root)?;
    let buffer_dir = plan.granted.buffer_dir.clone();
    let job = RecoveryJob {
        config,
        storage: &storage,
        identity: &identity,
        buffer_dir: buffer_dir.as_deref(),
        offsets: &offsets,
        positions: &positions,
        host,
        health,
        machine,
        adjust,
    };
    let shards = job.run_all()?;
    Ok(OpenStore {
        identity,
        had_shards,
        shards,
        storage,
        root,
        buffer_dir,
        lock: None,
    })
}

/// Says when a store has another number of shards than before, or than was asked for.
fn say_shards(had: Option<u16>, asked: u16) {
    match had {
        Some(had) if had < asked => tracing::info!(
            had,
            now = asked,
            "the store gets more shards and keeps them; queues stay where they are, new ones spread"
        ),
        Some(has) if has > asked => tracing::warn!(
            has,
            asked,
            "the store has more shards than asked for; it keeps them"
        ),
        _ => {}
    }
}

struct RecoveryJob<'a, S> {
    config: &'a Config,
    storage: &'a S,
    identity: &'a StoreIdentity,
    buffer_dir: Option<&'a Path>,
    offsets: &'a [SavedOffset],
    positions: &'a [(u16, u64)],
    host: std::net::SocketAddr,
    health: &'a Health,
    machine: &'a dyn Host,
    adjust: &'a (dyn Fn(&mut ShardConfig) + Sync),
}

impl<S: Storage> RecoveryJob<'_, S> {
    /// Recovers all shards side by side.
    fn run_all(&self) -> Result<Vec<Recovered<S>>, CoreError> {
        if self.machine.in_order() {
            return (0..self.identity.shards)
                .map(|number| self.run_one(number))
                .collect();
        }
        let results: Vec<Result<Recovered<S>, CoreError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.identity.shards)
                .map(|number| scope.spawn(move || self.run_one(number)))
                .collect();
            let joined = threads.into_iter().map(|thread| {
                let panicked = || CoreError::Other("recovery of a shard ended early".to_owned());
                thread.join().unwrap_or_else(|_| Err(panicked()))
            });
            joined.collect()
        });
        results.into_iter().collect()
    }

    fn run_one(&self, number: u16) -> Result<Recovered<S>, CoreError> {
        let segment_bytes = self.identity.segment_bytes;
        // The buffer lies where the last start had it, wherever this one is told to have it.
        let last_dir = self.identity.buffer_dir.as_deref();
        let mut dirs = last_dir.into_iter().chain(self.buffer_dir);
        let survivor = dirs.find_map(|dir| self.survivor(dir, number));
        let told = std::cell::Cell::new((0u64, 0u64));
        let progress = |done: u64, total: u64| {
            let (done_before, total_before) = told.get();
            self.health
                .add_recovery_total(total.saturating_sub(total_before));
            self.health
                .add_recovery_done(done.saturating_sub(done_before));
            told.set((done.max(done_before), total.max(total_before)));
        };
        let clean = self.identity.clean && survivor.is_none();
        let mut config = shard_config(self.config, number, segment_bytes, self.host);
        (self.adjust)(&mut config);
        let setup = RecoverySetup {
            config,
            survivor: survivor.as_ref(),
            in_flight_bytes_max: if clean { 0 } else { self.config.buffer_bytes.0 },
            saved_offsets: self.offsets.to_vec(),
            saved_position: self
                .positions
                .iter()
                .find(|(shard, _)| *shard == number)
                .map_or(0, |(_, position)| *position),
            progress: &progress,
        };
        let recovered = recover(self.storage, setup)?;
        let report = &recovered.report;
        for repair in &report.repairs {
            tracing::warn!(shard = number, "repaired: {repair}");
        }
        if report.records > 0 || report.replayed_bytes > 0 {
            tracing::info!(
                shard = number,
                records = report.records,
                from = report.scanned_from,
                end = report.end,
                from_buffer_bytes = report.replayed_bytes,
                runs = report.runs,
                stopped_by = report.stopped_by,
                "log recovered"
            );
        }
        Ok(recovered)
    }

    /// The write buffer the last process left, if it belongs to this store and its last start.
    fn survivor(&self, dir: &Path, number: u16) -> Option<LockedRing> {
        let ring = self
            .machine
            .survivor(buffer_path(dir, self.identity, number))?;
        let header = ring.header();
        let ours = header.store_id() == self.identity.id()
            && header.epoch() == self.identity.epoch
            && header.shard() == u32::from(number);
        if !ours {
            tracing::warn!(
                shard = number,
                "a write buffer of another start was found and left out"
            );
        }
        ours.then_some(ring)
    }
}

/// The write buffer of a shard for this process.
pub fn open_ring(
    machine: &dyn Host,
    config: &Config,
    identity: &StoreIdentity,
    buffer_dir: Option<&Path>,
    number: u16,
    lock: bool,
) -> Result<LockedRing, CoreError> {
    let bytes = config.buffer_bytes.0 as usize;
    let path = buffer_dir.map(|dir| buffer_path(dir, identity, number));
    let opened = machine.open_buffer(RingSpec { path, bytes, lock })?;
    opened
        .ring
        .format(identity.id(), identity.epoch, u32::from(number));
    Ok(opened.ring)
}

/// What acknowledgements wait for.
#[must_use]
pub fn ack_point(config: &Config, survives: bool) -> AckPoint {
    match (config.flush_disk_type, survives) {
        (FlushDiskType::SyncFlush, _) => AckPoint::Synced,
        (FlushDiskType::AsyncFlush, true) => AckPoint::Buffered,
        (FlushDiskType::AsyncFlush, false) => AckPoint::Written,
    }
}

/// The way of log writes, with the reason.
pub fn choose_log_port(config: &Config, storage: &RealStorage, dir: &Path) -> (LogPort, String) {
    match config.log_port {
        value::LogPort::Uring => (LogPort::Uring, "io_uring (pinion.logPort)".to_owned()),
        value::LogPort::Thread => (LogPort::Thread, "writer thread (pinion.logPort)".to_owned()),
        value::LogPort::Auto => match shard::runtime::probe::probe_log_port(storage, dir) {
            Ok(probe) => (probe.choice, probe.to_string()),
            Err(error) => (
                LogPort::Thread,
                format!("writer thread (probe failed: {error})"),
            ),
        },
    }
}

type SavedOffsets = (Vec<SavedOffset>, Vec<(u16, u64)>);

/// Reads `consumerOffset.json`: offsets, and the log position of each shard it was written at.
fn load_offsets<S: Storage>(storage: &S, root: &Path) -> Result<SavedOffsets, CoreError> {
    let loaded = settings::load_on(storage, &root.join("config"), OFFSETS_FILE);
    let loaded = loaded.map_err(|error| CoreError::Other(error.to_string()))?;
    let Some(loaded) = loaded else {
        return Ok((Vec::new(), Vec::new()));
    };
    let damaged = |what: String| CoreError::Other(format!("config/{OFFSETS_FILE}: {what}"));
    let text = wire::body::lenient::to_standard_json(&loaded.bytes)
        .map_err(|error| damaged(error.to_string()))?;
    let parsed: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let mut offsets = Vec::new();
    let tables = parsed
        .get("offsetTable")
        .and_then(serde_json::Value::as_object);
    for (key, queues) in tables.into_iter().flatten() {
        let Some((topic, group)) = key.split_once('@') else {
            continue;
        };
        for (queue_id, offset) in queues.as_object().into_iter().flatten() {
            if let (Ok(queue_id), Some(offset)) = (queue_id.parse(), offset.as_i64()) {
                let (topic, group) = (topic.to_owned(), group.to_owned());
                offsets.push(SavedOffset {
                    topic,
                    group,
                    queue_id,
                    offset,
                });
            }
        }
    }
    let positions = parsed
        .get("logPositions")
        .and_then(serde_json::Value::as_object);
    let positions = positions
        .into_iter()
        .flatten()
        .filter_map(|(shard, offset)| {
            let (_, position) = address::split(offset.as_i64()?)?;
            Some((shard.parse().ok()?, position))
        });
    Ok((offsets, positions.collect()))
}
