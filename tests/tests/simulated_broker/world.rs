//! The broker's real cores on the simulated machine, and the crashes it is put through.
//!
//! Invariant: everything that happens follows from the seed; one thread does it all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use broker::cli::RunPlan;
use broker::config::value::Bytes;
use broker::config::{Config, HostFacts, Sources};
use broker::core::canary::Canary;
use broker::core::metrics::Metrics;
use broker::core::start::{self, Host};
use broker::core::state::CoreError;
use broker::core::threads;
use broker::core::turn::Core;
use broker::doctor::Granted;
use broker::health::Health;
use shard::ShardConfig;
use shard::io::Storage;
use shard::io::sim::{Crash, SimRandom};
use shard::memory::{LockedRing, Opened, RingSpec};
use shard::runtime::Driver;
use shard::runtime::sim::{SimConfig, SimDriver, SimMachine};
use tests::frame::{FRAME_BYTES_MAX, Frame};

use super::client::{Client, Role, Scene};
use super::history::History;

pub const BROKER: &str = "127.0.0.1:10911";
pub const LOG_DIR: &str = "/store/commitlog";
pub const RUN_DIR: &str = "/store/consumequeue";
/// Steps within which a healthy broker answers.
const ANSWER_STEPS_MAX: usize = 60_000;

/// What acknowledgements wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    Sync,
    Async,
    /// Asynchronous where no buffer outlives the process.
    AsyncAlone,
}

/// How a world is set up.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub flush: Flush,
    pub cores: usize,
    pub shards: usize,
    pub segment_bytes: u64,
    pub buffer_bytes: u64,
    pub run_units: u64,
    pub run_log_bytes: u64,
    pub piece_bytes_max: usize,
    pub cold_slots: usize,
    pub canary: Canary,
    pub clients: Vec<Role>,
}

impl Setup {
    /// A broker of its own for each seed.
    pub fn drawn(seed: u64, flush: Flush) -> Self {
        let mut random = SimRandom::new(seed.wrapping_mul(0x9e37));
        let mut pick = |choices: &[u64]| choices[random.below(choices.len() as u64) as usize];
        let clients = vec![
            Role::Producer { at_once: 1 },
            Role::Producer { at_once: 8 },
            Role::Tail,
            Role::Lagging,
            Role::Ordered { queue: 0 },
            Role::Retrying,
            Role::Admin,
        ];
        Self {
            seed,
            flush,
            cores: pick(&[1, 2, 3]) as usize,
            shards: pick(&[1, 2, 3]) as usize,
            segment_bytes: pick(&[64, 128, 256]) * 1024,
            buffer_bytes: pick(&[128, 256, 1024]) * 1024,
            run_units: pick(&[8, 64, 300]),
            run_log_bytes: pick(&[32, 100, 1000]) * 1024,
            piece_bytes_max: pick(&[300, 4_000, 65_536]) as usize,
            cold_slots: pick(&[1, 2, 16]) as usize,
            canary: Canary::None,
            clients,
        }
    }

    fn config(&self) -> Config {
        let host = HostFacts {
            name: "sim".to_owned(),
            cores_allowed: (0..self.cores).collect(),
            detect_address: |_| ("127.0.0.1".parse().unwrap(), String::new()),
            home: PathBuf::from("/"),
            environment: Vec::new(),
        };
        let flush = if self.flush == Flush::Sync {
            "SYNC_FLUSH"
        } else {
            "ASYNC_FLUSH"
        };
        let cores: Vec<String> = (0..self.cores).map(|core| core.to_string()).collect();
        let settings = [
            ("storePathRootDir", "/store".to_owned()),
            ("brokerName", "sim".to_owned()),
            ("brokerIP1", "127.0.0.1".to_owned()),
            ("bindAddress", "127.0.0.1".to_owned()),
            ("listenPort", "10911".to_owned()),
            ("flushDiskType", flush.to_owned()),
            ("flushIntervalCommitLog", "5".to_owned()),
            ("flushConsumerOffsetInterval", "1000".to_owned()),
            ("defaultTopicQueueNums", "2".to_owned()),
            ("pinion.shards", self.shards.to_string()),
            ("pinion.cores", cores.join(",")),
        ];
        let sources = Sources {
            defaults: settings
                .into_iter()
                .map(|(key, value)| (key, value, "simulated".to_owned()))
                .collect(),
            ..Sources::default()
        };
        let mut config = Config::load(&sources, &host).expect("settings");
        config.keys.segment_bytes = Bytes(self.segment_bytes);
        config.keys.buffer_bytes = Bytes(self.buffer_bytes);
        config
    }

    fn adjust(&self, config: &mut ShardConfig) {
        config.units_max = 2048;
        config.run_units = self.run_units;
        config.run_log_bytes = self.run_log_bytes;
        config.delay_levels_ms = vec![3, 8, 20, 20, 20, 20, 20, 20, 20, 20];
    }

    /// The largest body that fits a segment and half a buffer.
    pub fn body_bytes_max(&self) -> usize {
        let most = (self.segment_bytes * 7 / 8).min(self.buffer_bytes / 2 - 9000) - 1200;
        most.min(40_000) as usize
    }
}

/// What the machine gives a start.
struct SimHost(SimMachine);

impl Host for SimHost {
    fn survivor(&self, path: PathBuf) -> Option<LockedRing> {
        let name = path.to_string_lossy().into_owned();
        let bytes = self.0.ring_bytes(&name)?;
        let opened = self
            .0
            .open_ring(&name, bytes)
            .expect("a ring that is there");
        opened.existed.then_some(opened.ring)
    }

    fn open_buffer(&self, spec: RingSpec) -> Result<Opened, CoreError> {
        let opened = match &spec.path {
            Some(path) => self.0.open_ring(&path.to_string_lossy(), spec.bytes),
            None => LockedRing::open(spec),
        };
        opened.map_err(|error| CoreError::Other(error.to_string()))
    }

    fn wall_ms(&self) -> i64 {
        self.0.now().wall_ms
    }

    fn in_order(&self) -> bool {
        true
    }
}

/// Everything that was sent and received, as one number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trace(pub u64);

impl Trace {
    pub fn note(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

/// Everything.
pub struct World {
    pub setup: Setup,
    pub machine: SimMachine,
    pub cores: Vec<Core<SimDriver>>,
    pub history: History,
    pub clients: Vec<Client>,
    pub random: SimRandom,
    pub trace: Trace,
    pub steps: u64,
    /// The step at which the world is to crash.
    pub crash_at: Option<u64>,
    pub crashes: u64,
    /// Where recovery found the end of each shard's log.
    pub ends: BTreeMap<u16, u64>,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let machine = SimMachine::new(SimConfig {
            seed: setup.seed,
            piece_bytes_max: setup.piece_bytes_max,
            cold_slots: setup.cold_slots,
            ..SimConfig::default()
        });
        let clients = setup.clients.iter().enumerate();
        let clients = clients
            .map(|(number, role)| Client::new(number, role.clone(), setup.seed))
            .collect();
        let mut world = Self {
            machine,
            cores: Vec::new(),
            history: History {
                synced: setup.flush == Flush::Sync,
                ..History::default()
            },
            clients,
            random: SimRandom::new(setup.seed ^ 0xb20e),
            trace: Trace(0xcbf2_9ce4_8422_2325),
            steps: 0,
            crash_at: None,
            crashes: 0,
            ends: BTreeMap::new(),
            setup,
        };
        world.start().expect("the first start");
        world
    }

    fn plan(&self) -> RunPlan {
        RunPlan {
            config: self.setup.config(),
            namesrv: None,
            broker: true,
            null: false,
            granted: Granted {
                direct: true,
                memlock: false,
                pinning: false,
                buffer_dir: (self.setup.flush != Flush::AsyncAlone).then(|| "/buffers".into()),
                interrupt_cpus: Vec::new(),
                warnings: Vec::new(),
            },
            began: Instant::now(),
        }
    }

    fn recover(
        &self,
        plan: &RunPlan,
    ) -> Result<start::OpenStore<shard::io::sim::SimStorage>, String> {
        let (host, health) = (SimHost(self.machine.clone()), Health::default());
        let setup = self.setup.clone();
        let adjust = move |config: &mut ShardConfig| setup.adjust(config);
        let storage = self.machine.storage();
        start::open_store(plan, storage, &host, &health, &adjust).map_err(|error| error.to_string())
    }

    /// Starts the broker as a process does: recovery, control tables, cores.
    pub fn start(&mut self) -> Result<(), String> {
        let plan = self.plan();
        let store = self.recover(&plan)?;
        let ends = store.shards.iter();
        self.ends = ends.map(|shard| (shard.number(), shard.end())).collect();
        if std::env::var_os("SIM_TALK").is_some() {
            for shard in &store.shards {
                println!("{:?}", shard.report);
            }
        }
        let host = SimHost(self.machine.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let metrics = Arc::new(Metrics::new(&plan.config, Arc::new(Health::default())));
        let listen = vec![BROKER.parse().unwrap()];
        let (seeds, _, _) = threads::seeds(&plan, Some(store), listen, &stop, &metrics, &host)
            .map_err(|error| error.to_string())?;
        for seed in seeds {
            let mut driver = self.machine.driver();
            driver.refresh_clock();
            let opened = threads::open_on(seed, driver, &host);
            let mut core = opened.map_err(|error| error.to_string())?;
            core.state.canary = self.setup.canary;
            self.cores.push(core);
        }
        Ok(())
    }

    /// One step of one core; `false` once the world has reached the point where it is to crash.
    pub fn step(&mut self) -> bool {
        let index = self.random.below(self.cores.len() as u64) as usize;
        if self.is_over() {
            return false;
        }
        self.cores[index].wait();
        if self.is_over() {
            return false;
        }
        self.cores[index].turn();
        true
    }

    fn is_over(&mut self) -> bool {
        self.steps += 1;
        self.crash_at.is_some_and(|at| self.steps >= at)
    }

    /// Lets cores and clients run.
    pub fn run(&mut self, steps: u64) -> bool {
        for _ in 0..steps {
            if !self.step() {
                return false;
            }
            let mut clients = std::mem::take(&mut self.clients);
            let mut scene = Scene {
                machine: &self.machine,
                body_bytes_max: self.setup.body_bytes_max(),
                history: &mut self.history,
                trace: &mut self.trace,
            };
            let first = self.random.below(clients.len() as u64 + 1) as usize;
            if let Some(client) = clients.get_mut(first) {
                client.turn(&mut scene);
            }
            self.clients = clients;
            if self.random.one_in(40) {
                // Nobody looks for a while.
                let by_us = self.random.below(1500);
                self.machine.advance_us(by_us);
            }
        }
        true
    }

    /// The broker is gone, and so is what the crash takes.
    pub fn crash(&mut self, kind: Crash) {
        self.crashes += 1;
        self.crash_at = None;
        if std::env::var_os("SIM_TALK").is_some() {
            let now = self.machine.now().monotonic_us;
            println!(
                "{kind:?} at {now} us, {} messages, setup {:?}",
                self.history.messages.len(),
                self.setup
            );
        }
        for client in &mut self.clients {
            client.cut_off();
        }
        self.history.in_doubt.clear();
        self.machine.crash(kind);
        self.cores.clear();
        let storage = self.machine.storage();
        storage.clear_faults();
        storage.set_read_only(false);
        if kind == Crash::PowerLoss {
            self.history.power_lost();
        }
        self.trace
            .note(&self.machine.now().monotonic_us.to_be_bytes());
    }

    /// Every byte of every segment.
    fn log_bytes(&self) -> Vec<(String, Vec<u8>)> {
        let storage = self.machine.storage();
        let entries = storage.list(Path::new(LOG_DIR)).unwrap_or_default();
        entries
            .into_iter()
            .filter(|entry| entry.is_file)
            .map(|entry| {
                let path = Path::new(LOG_DIR).join(&entry.name);
                (entry.name, storage.read_file(&path).unwrap())
            })
            .collect()
    }

    /// Two recoveries in a row leave the same bytes.
    pub fn recover_twice(&mut self) {
        let plan = self.plan();
        self.recover(&plan).expect("the first recovery");
        let first = self.log_bytes();
        self.machine.crash(Crash::Kill);
        self.recover(&plan).expect("the second recovery");
        assert!(
            first == self.log_bytes(),
            "the second recovery changed the log"
        );
        self.machine.crash(Crash::Kill);
    }

    /// Everything derived from the log.
    pub fn remove_runs(&mut self) {
        let storage = self.machine.storage();
        for entry in storage.list(Path::new(RUN_DIR)).unwrap_or_default() {
            storage
                .remove(&Path::new(RUN_DIR).join(entry.name))
                .unwrap();
        }
    }

    /// A request and its answer; a broker that never answers fails the test.
    pub fn call(&mut self, frame: Frame) -> Frame {
        let mut peer = None;
        let mut input: Vec<u8> = Vec::new();
        let mut frame = frame;
        frame.opaque = 7;
        for _ in 0..ANSWER_STEPS_MAX {
            if peer.is_none() {
                peer = self.machine.connect(BROKER.parse().unwrap()).ok();
                if let Some(peer) = &peer {
                    let bytes = frame.encode();
                    self.trace.note(&bytes);
                    peer.send(&bytes);
                }
            }
            self.step();
            let Some(open) = &peer else { continue };
            input.extend(open.received());
            let Some(prefix) = input.first_chunk::<4>() else {
                assert!(!open.is_closed(), "the broker closed the connection");
                continue;
            };
            let total = u32::from_be_bytes(*prefix) as usize + 4;
            assert!(total <= FRAME_BYTES_MAX);
            if input.len() >= total {
                self.trace.note(&input[..total]);
                let answer = Frame::decode(&input[4..total]).expect("a frame that can be read");
                open.close();
                return answer;
            }
        }
        for core in &self.cores {
            let state = &core.state;
            println!(
                "core {}: {:?}, {:?}",
                state.core, state.settling, state.counters
            );
            for local in &state.shards {
                let (log, number) = (local.shard.log(), local.shard.number());
                println!(
                    "shard {number}: tail {} watermark {} poison {:?} held {} {:?}",
                    log.tail(),
                    local.shard.watermark(),
                    log.poison(),
                    local.held.len(),
                    local.shard.counters()
                );
            }
        }
        println!("hung operations: {}", self.machine.held());
        panic!("no answer to {frame:?}: the broker starves");
    }
}
