//! Threads of the process: one per core, pinned, and the main thread that waits for signals.
//!
//! Invariant: the banner is printed when every core listens; the process ends with status 0 only
//! after every core has drained.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use shard::io::Storage;
use shard::io::real::{DirectMode, RealStorage};
use shard::maintain::ready_segments;
use shard::mesh::{BellReader, BellRinger, Mesh, MeshEnd};
use shard::recovery::Recovered;
use shard::runtime::Driver;
use shard::runtime::uring::{LogPort, UringConfig, UringDriver};
use shard::runtime::{COLD_SLOT_BYTES, sys};

use super::connections::Purpose;
use super::control_task::ControlTask;
use super::messages::{Change, MeshMessage};
use super::metrics::Metrics;
use super::namesrv_task::{KV_FILE, NameServerTask};
use super::outside::{
    broker_addresses, check_own_ports, dial_advertised, namesrv_addresses, start_exporter,
    start_health,
};
use super::registrar::{Identity, Registrar};
use super::resolver;
use super::start::{self, Host, OpenStore, RealHost};
use super::state::{CoreError, LocalShard, State, StateParts};
use super::store::{StoreIdentity, bytes_below};
use super::turn::Core;
use crate::cli::banner::{Banner, BrokerLines};
use crate::cli::{NamesrvPlan, RunPlan};
use crate::config::Config;
use crate::config::value::Need;
use crate::control::effects::Effect;
use crate::control::{Control, ControlSetup, SavedTables};
use crate::health::{Health, HealthServer, Phase};
use crate::namesrv::NameServer;
use crate::settings;

/// Lockable memory that a ring takes for each entry, generously: the entry, eight completions, and
/// what the kernel rounds up.
const RING_BYTES_PER_ENTRY: u64 = 512;

/// What a core thread needs.
pub struct Seed<S: Storage> {
    core: usize,
    cpu: Option<usize>,
    config: Arc<Config>,
    mesh: MeshEnd<MeshMessage>,
    bell: Option<BellReader>,
    shards: Vec<Recovered<S>>,
    homes: Arc<Vec<usize>>,
    storage: Option<S>,
    identity: Option<StoreIdentity>,
    buffer_dir: Option<std::path::PathBuf>,
    lock_memory: bool,
    store_host: SocketAddr,
    control: Option<(Control, Registrar, Vec<Effect>)>,
    changes: Vec<Change>,
    name_server: Option<(NameServer, std::path::PathBuf, Vec<SocketAddr>)>,
    broker_listen: Vec<SocketAddr>,
    stop: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
    null: bool,
}

/// How soon the watch for signals notices that the store is open, in milliseconds.
const START_WATCH_MS: i32 = 5;

/// Runs what the plan says until a signal comes.
///
/// # Errors
/// When something cannot be opened, bound or recovered.
pub fn run(plan: RunPlan) -> Result<(), CoreError> {
    for warning in &plan.granted.warnings {
        tracing::warn!("{warning}");
    }
    let signals =
        sys::SignalWaiter::new().map_err(|source| machine("waiting for signals", source))?;
    let _ = sys::raise_open_files_limit();
    let health = Arc::new(Health::default());
    health.set_phase(Phase::Recovering);
    let metrics = Arc::new(Metrics::new(&plan.config, health.clone()));
    let listen = check_first(&plan)?;
    let server = start_health(&plan, &health, &metrics)?;
    let _exporter = start_exporter(&plan, &health, &metrics)?;
    let (store, signals) = if plan.broker {
        let watch = StartWatch::over(signals)?;
        let store = open_store(&plan, &health)?;
        (Some(store), watch.end()?)
    } else {
        (None, signals)
    };
    let stop = Arc::new(AtomicBool::new(false));
    let (log_port, why) = log_port(&plan, store.as_ref());
    let lines = store.as_ref().map(|store| broker_lines(&plan, store, &why));
    let (seeds, ringers, identity) = seeds(&plan, store, listen, &stop, &metrics, &RealHost)?;
    let (ready, became_ready) = mpsc::channel();
    let mut threads = Vec::new();
    for seed in seeds {
        let ready = ready.clone();
        let name = format!("core-{}", seed.core);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || run_core(seed, log_port, &ready));
        threads.push(thread.map_err(|source| machine("starting a core thread", source))?);
    }
    drop(ready);
    let started = threads.iter().try_for_each(|_| {
        became_ready
            .recv()
            .unwrap_or_else(|_| Err(CoreError::Other("a core ended early".to_owned())))
    });
    if let Err(error) = started {
        halt(&stop, &ringers, threads);
        return Err(error);
    }
    health.set_phase(Phase::Serving);
    print_banner(&plan, server.as_ref(), lines);
    if plan.broker {
        dial_advertised(&plan.config);
    }
    wait_for_signal(&signals, &threads);
    health.set_phase(Phase::Draining);
    tracing::info!("stopping: requests in flight are finished first");
    let clean = halt(&stop, &ringers, threads);
    if let Some((mut identity, root, lock)) = identity {
        identity.clean = clean;
        identity.save(&storage_of(&plan.config), &root)?;
        drop(lock);
    }
    if clean {
        Ok(())
    } else {
        Err(CoreError::Other(
            "a core ended early, see the log".to_owned(),
        ))
    }
}

/// Refuses what can be known before a store is made, or one is recovered for minutes. Returns where
/// the broker listens.
fn check_first(plan: &RunPlan) -> Result<Vec<SocketAddr>, CoreError> {
    check_own_ports(plan)?;
    let mut listen = Vec::new();
    if plan.broker {
        listen = broker_addresses(&plan.config)?;
        start::store_host(&plan.config)?;
    }
    if let Some(plan) = &plan.namesrv {
        namesrv_addresses(plan)?;
        saved_name_server(plan)?;
    }
    Ok(listen)
}

/// The file system of a real broker.
fn storage_of(config: &Config) -> RealStorage {
    RealStorage::new(match config.direct {
        Need::Require => DirectMode::Require,
        Need::Auto => DirectMode::Auto,
    })
}

/// Locks the store and recovers it.
fn open_store(plan: &RunPlan, health: &Health) -> Result<OpenStore<RealStorage>, CoreError> {
    let storage = storage_of(&plan.config);
    let root = plan.config.store_path_root.as_path();
    storage
        .create_dirs(root)
        .map_err(|source| machine(&format!("creating {}", root.display()), source))?;
    let lock = super::store::lock(root)?;
    let mut store = start::open_store(plan, storage, &RealHost, health, &|_| {})?;
    store.lock = Some(lock);
    Ok(store)
}

/// The way of log writes, with the reason.
fn log_port(plan: &RunPlan, store: Option<&OpenStore<RealStorage>>) -> (LogPort, String) {
    store.map_or((LogPort::Thread, String::new()), |store| {
        let log_dir = plan.config.store_path_commit_log.as_path();
        start::choose_log_port(&plan.config, &store.storage, log_dir)
    })
}

pub(super) fn machine(what: &str, source: std::io::Error) -> CoreError {
    CoreError::Machine {
        what: what.to_owned(),
        source,
    }
}

/// Watches for signals while a store is opened, which may take minutes and has nothing in flight.
struct StartWatch {
    over: mpsc::Sender<()>,
    thread: JoinHandle<sys::SignalWaiter>,
}

impl StartWatch {
    fn over(signals: sys::SignalWaiter) -> Result<Self, CoreError> {
        let (over, is_over) = mpsc::channel();
        let watch = move || {
            while is_over.try_recv() == Err(mpsc::TryRecvError::Empty) {
                if let Ok(Some(_)) = signals.wait(START_WATCH_MS) {
                    tracing::info!("stopping during recovery; the next start goes on from here");
                    std::process::exit(0);
                }
            }
            signals
        };
        let thread = std::thread::Builder::new()
            .name("start-watch".to_owned())
            .spawn(watch)
            .map_err(|source| machine("starting the watch for signals", source))?;
        Ok(Self { over, thread })
    }

    /// Gives the signals back.
    fn end(self) -> Result<sys::SignalWaiter, CoreError> {
        drop(self.over);
        let ended = self.thread.join();
        ended.map_err(|_| CoreError::Other("the watch for signals ended early".to_owned()))
    }
}

fn wait_for_signal(signals: &sys::SignalWaiter, threads: &[JoinHandle<bool>]) {
    loop {
        match signals.wait(1000) {
            Ok(Some(_)) => return,
            Ok(None) if threads.iter().any(JoinHandle::is_finished) => return,
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "waiting for signals failed");
                return;
            }
        }
    }
}

/// Stops all cores; `true` when every one drained.
fn halt(stop: &AtomicBool, ringers: &[BellRinger], threads: Vec<JoinHandle<bool>>) -> bool {
    stop.store(true, Ordering::Release);
    for ringer in ringers {
        ringer.ring();
    }
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap_or(false))
        .fold(true, |a, b| a & b)
}

type Held = Option<(StoreIdentity, std::path::PathBuf, Option<std::fs::File>)>;
type Seeds<S> = (Vec<Seed<S>>, Vec<BellRinger>, Held);

/// Divides everything among the cores.
///
/// # Errors
/// When a file cannot be read or written or an address is none.
pub fn seeds<S: Storage>(
    plan: &RunPlan,
    store: Option<OpenStore<S>>,
    broker_listen: Vec<SocketAddr>,
    stop: &Arc<AtomicBool>,
    metrics: &Arc<Metrics>,
    host: &dyn Host,
) -> Result<Seeds<S>, CoreError> {
    let config = Arc::new(plan.config.clone());
    let shards = store.as_ref().map_or(0, |store| store.shards.len());
    let cpus = core_cpus(plan, shards.max(1));
    let ends = Mesh::build(cpus.len(), config.mesh_slots as usize);
    let mut ends = ends.map_err(|source| machine("building the mesh", source))?;
    let mut bells: Vec<Option<BellReader>> = ends.iter_mut().map(MeshEnd::take_bell).collect();
    let ringers = bells.iter().flatten().map(BellReader::ringer).collect();
    metrics.set_cores(cpus.len(), shards);
    let homes: Arc<Vec<usize>> = Arc::new((0..shards).map(|shard| shard % cpus.len()).collect());
    let mut name_server = plan.namesrv.as_ref().map(name_server).transpose()?;
    let store_host = if plan.broker {
        start::store_host(&config)?
    } else {
        SocketAddr::from(([127, 0, 0, 1], 0))
    };
    let mut parts = match store {
        Some(store) => divide_store(
            &config,
            store,
            host.wall_ms(),
            store_host,
            &homes,
            cpus.len(),
        )?,
        None => StoreParts::without(cpus.len()),
    };
    let mut seeds = Vec::new();
    for (core, cpu) in cpus.iter().enumerate().rev() {
        let (Some(mesh), bell) = (ends.pop(), bells.pop().flatten()) else {
            break;
        };
        seeds.push(Seed {
            core,
            cpu: plan.granted.pinning.then_some(*cpu),
            config: config.clone(),
            mesh,
            bell,
            shards: parts.shards.pop().unwrap_or_default(),
            homes: homes.clone(),
            storage: parts.storage.clone(),
            identity: parts.held.as_ref().map(|(identity, ..)| identity.clone()),
            buffer_dir: parts.buffer_dir.clone(),
            lock_memory: plan.granted.memlock,
            store_host,
            control: if core == 0 {
                parts.control.take()
            } else {
                None
            },
            changes: parts.changes.clone(),
            name_server: if core == 0 { name_server.take() } else { None },
            broker_listen: broker_listen.clone(),
            stop: stop.clone(),
            metrics: metrics.clone(),
            null: plan.null,
        });
    }
    Ok((seeds, ringers, parts.held))
}

/// CPUs of the cores: no more than there are shards; the disk's interrupt CPU first.
fn core_cpus(plan: &RunPlan, shards: usize) -> Vec<usize> {
    let mut cpus = plan.config.cores.0.clone();
    if cpus.is_empty() {
        cpus.push(0);
    }
    cpus.truncate(shards);
    cpus
}

struct StoreParts<S: Storage> {
    shards: Vec<Vec<Recovered<S>>>,
    storage: Option<S>,
    held: Held,
    buffer_dir: Option<std::path::PathBuf>,
    control: Option<(Control, Registrar, Vec<Effect>)>,
    changes: Vec<Change>,
}

impl<S: Storage> StoreParts<S> {
    fn without(cores: usize) -> Self {
        Self {
            shards: (0..cores).map(|_| Vec::new()).collect(),
            storage: None,
            held: None,
            buffer_dir: None,
            control: None,
            changes: Vec::new(),
        }
    }
}

fn divide_store<S: Storage>(
    config: &Config,
    store: OpenStore<S>,
    now_ms: i64,
    host: SocketAddr,
    homes: &[usize],
    cores: usize,
) -> Result<StoreParts<S>, CoreError> {
    let OpenStore {
        mut identity,
        had_shards: _,
        shards,
        storage,
        root,
        buffer_dir,
        lock,
    } = store;
    // What may refuse the start comes before what it leaves behind.
    let (files, at) = ((&storage, root.as_path()), (host, now_ms));
    let (control, effects) = control(config, &identity, files, at, &shards)?;
    let registrar = registrar(config)?;
    identity.epoch += 1;
    identity.clean = false;
    let last_dir = std::mem::replace(&mut identity.buffer_dir, buffer_dir.clone());
    identity.save(&storage, &root)?;
    if let Some(dir) = last_dir.filter(|dir| Some(dir) != buffer_dir.as_ref()) {
        // Recovery has written these buffers out; nobody else knows of them any more.
        for number in 0..identity.shards {
            let _ = std::fs::remove_file(super::store::buffer_path(&dir, &identity, number));
        }
    }
    let (changes, effects) = settle_first_effects((&storage, &root), effects)?;
    let mut divided: Vec<Vec<Recovered<S>>> = (0..cores).map(|_| Vec::new()).collect();
    for (number, shard) in shards.into_iter().enumerate() {
        let core = homes.get(number).copied().unwrap_or(0);
        if let Some(part) = divided.get_mut(core) {
            part.push(shard);
        }
    }
    Ok(StoreParts {
        shards: divided,
        storage: Some(storage),
        held: Some((identity, root, lock)),
        buffer_dir,
        control: Some((control, registrar, effects)),
        changes,
    })
}

fn control<S: Storage>(
    config: &Config,
    identity: &StoreIdentity,
    (storage, root): (&S, &std::path::Path),
    (host, now_ms): (SocketAddr, i64),
    shards: &[Recovered<S>],
) -> Result<(Control, Vec<Effect>), CoreError> {
    let dir = root.join("config");
    let load = |name: &str| match settings::load_on(storage, &dir, name) {
        Ok(loaded) => Ok(loaded.map(|loaded| loaded.bytes)),
        Err(error) => Err(CoreError::Other(error.to_string())),
    };
    let saved = SavedTables {
        topics: load("topics.json")?,
        groups: load("subscriptionGroup.json")?,
        placement: load("placement.json")?,
        modes: load("messageRequestMode.json")?,
    };
    let setup = ControlSetup {
        shards: identity.shards,
        config: config.clone(),
        saved,
        broker_address: host,
        now_ms,
        boot_ms: now_ms,
    };
    let (mut control, mut effects) =
        Control::new(setup).map_err(|error| CoreError::Other(error.to_string()))?;
    place_recovered(&mut control, shards, &mut effects);
    Ok((control, effects))
}

/// Puts queues where the log has them. Two shards hold the same queue when one could not store the
/// removal of its topic, which was made anew elsewhere: the queue stays where it was made last.
fn place_recovered<S: Storage>(
    control: &mut Control,
    shards: &[Recovered<S>],
    effects: &mut Vec<Effect>,
) {
    let holds = |shard: u16, topic: &str, queue_id| {
        let found = shards.get(usize::from(shard));
        found.is_some_and(|found| found.holds(topic, queue_id))
    };
    let own = [shard::TIMER_TOPIC, shard::SCHEDULE_TOPIC];
    for (number, shard) in (0_u16..).zip(shards) {
        for (topic, queue_id) in shard.queues().filter(|(topic, _)| !own.contains(topic)) {
            let place = control.place_of(topic, queue_id);
            if let Some(place) = place.filter(|place| *place != number)
                && holds(place, topic, queue_id)
            {
                tracing::warn!(
                    topic,
                    queue_id,
                    shard = number,
                    place,
                    "left out: messages of a topic that was deleted and made anew elsewhere"
                );
                continue;
            }
            control.topic_recovered(topic, queue_id, number, effects);
        }
    }
}

/// Does what the control task wants done at its start before anybody listens: its tables are saved
/// here, and every core gets its topics and groups with its seed. Requests are never answered from
/// tables that are still empty.
fn settle_first_effects<S: Storage>(
    (storage, root): (&S, &std::path::Path),
    effects: Vec<Effect>,
) -> Result<(Vec<Change>, Vec<Effect>), CoreError> {
    let (mut changes, mut later) = (Vec::new(), Vec::new());
    for effect in effects {
        match effect {
            Effect::Save { name, bytes } => {
                settings::save_on(storage, &root.join("config"), name, &bytes)
                    .map_err(|error| CoreError::Other(error.to_string()))?;
            }
            Effect::TopicChanged(topic) => changes.push(Change::Topic(topic)),
            Effect::GroupChanged(group) => changes.push(Change::Group(group)),
            Effect::ForbiddenChanged { group, topics } => {
                changes.push(Change::Forbidden(group, topics));
            }
            other => later.push(other),
        }
    }
    Ok((changes, later))
}

fn registrar(config: &Config) -> Result<Registrar, CoreError> {
    let identity = Identity {
        broker_name: config.broker_name.0.clone(),
        cluster_name: config.broker_cluster_name.0.clone(),
        broker_id: config.broker_id as i64,
        broker_address: config.broker_ip1.with_port(config.listen_port),
        ha_address: config.broker_ip2.with_port(config.ha_listen_port),
    };
    let servers = &config.namesrv_addr.0;
    let found = resolver::follow(servers)
        .map_err(|source| machine("looking up the addresses of namesrvAddr", source))?;
    let names = servers.iter().map(ToString::to_string).collect();
    Ok(Registrar::new(identity, names, found))
}

fn name_server(
    plan: &NamesrvPlan,
) -> Result<(NameServer, std::path::PathBuf, Vec<SocketAddr>), CoreError> {
    std::fs::create_dir_all(&plan.data)
        .map_err(|source| machine(&format!("creating {}", plan.data.display()), source))?;
    let server = saved_name_server(plan)?;
    Ok((server, plan.data.clone(), namesrv_addresses(plan)?))
}

/// The name server as its files have it.
fn saved_name_server(plan: &NamesrvPlan) -> Result<NameServer, CoreError> {
    let path = plan.data.join(KV_FILE);
    let kv = match std::fs::read(&path) {
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(source) => return Err(machine("reading the name server's kvConfig.json", source)),
    };
    NameServer::new(plan.server_config(), kv.as_deref(), sys::wall_ms())
        .map_err(|error| CoreError::Other(format!("{}: {error}", path.display())))
}

fn broker_lines(plan: &RunPlan, store: &OpenStore<RealStorage>, log_port: &str) -> BrokerLines {
    let (config, identity) = (&plan.config, &store.identity);
    let origin = config.origin_of("brokerIP1").map(ToString::to_string);
    BrokerLines {
        name: config.broker_name.0.clone(),
        cluster: config.broker_cluster_name.0.clone(),
        id: config.broker_id,
        listen: config.bind_address.with_port(config.listen_port),
        advertised: config.broker_ip1.with_port(config.listen_port),
        advertised_origin: origin.unwrap_or_default(),
        name_servers: crate::config::value::Value::text(&config.namesrv_addr),
        shards: u64::from(identity.shards),
        shards_had: store.had_shards.map(u64::from),
        shards_asked: config.shards,
        flush: config.flush_disk_type.to_string(),
        direct: plan.granted.direct,
        memlock: plan.granted.memlock,
        buffer_bytes: config.buffer_bytes.0 * u64::from(identity.shards),
        pinning: plan.granted.pinning,
        log_port: log_port.to_owned(),
        buffer_dir: store.buffer_dir.clone(),
        store: std::path::absolute(&store.root).unwrap_or_else(|_| store.root.clone()),
        store_bytes: bytes_below(&store.root),
        store_ahead_bytes: u64::from(identity.shards)
            * ready_segments(identity.segment_bytes)
            * identity.segment_bytes,
    }
}

fn print_banner(plan: &RunPlan, server: Option<&HealthServer>, lines: Option<BrokerLines>) {
    use std::io::Write as _;
    let config = &plan.config;
    let namesrv = plan
        .namesrv
        .as_ref()
        .map(|plan| plan.config.bind_address.with_port(plan.config.listen_port));
    let banner = Banner {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        namesrv,
        broker: lines,
        cores: config.cores.clone(),
        cores_host: std::thread::available_parallelism().map_or(1, usize::from),
        config_file: config.file().map(std::path::Path::to_path_buf),
        health: server.map(|server| server.address().to_string()),
        start_ms: plan.began.elapsed().as_millis(),
    };
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(banner.text().as_bytes());
    let _ = out.flush();
}

/// The body of a core thread; `true` when it drained.
fn run_core(
    seed: Seed<RealStorage>,
    log_port: LogPort,
    ready: &mpsc::Sender<Result<(), CoreError>>,
) -> bool {
    match open_core(seed, log_port) {
        Ok(mut core) => {
            let _ = ready.send(Ok(()));
            core.run();
            true
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            false
        }
    }
}

fn open_core(
    mut seed: Seed<RealStorage>,
    log_port: LogPort,
) -> Result<Core<UringDriver>, CoreError> {
    if let Some(cpu) = seed.cpu {
        sys::pin_to_cpu(cpu).map_err(|source| machine(&format!("pinning to CPU {cpu}"), source))?;
    }
    let config = seed.config.clone();
    let driver = UringDriver::new(UringConfig {
        core: seed.core,
        entries: ring_entries(seed.lock_memory, seed.mesh.cores()),
        cold_slots: (config.cold_bytes.0 as usize / COLD_SLOT_BYTES).max(4),
        connections_max: config.connections_max as usize,
        log_port,
        bell: seed.bell.take(),
        spin_us: config.spin_us,
        lock_memory: seed.lock_memory,
        storage: seed.storage.clone().unwrap_or_else(|| storage_of(&config)),
        ..UringConfig::default()
    })
    .map_err(no_ring)?;
    open_on(seed, driver, &RealHost)
}

/// Opens everything a core has on its machine.
///
/// # Errors
/// When a shard or a listener cannot be opened.
pub fn open_on<D: Driver>(
    mut seed: Seed<D::Storage>,
    mut driver: D,
    host: &dyn Host,
) -> Result<Core<D>, CoreError> {
    let config = seed.config.clone();
    let mut shards = Vec::new();
    for (local, mut recovered) in std::mem::take(&mut seed.shards).into_iter().enumerate() {
        recovered.set_local(local as u16);
        shards.push(open_shard(&seed, host, &mut driver, recovered)?);
    }
    let changes = std::mem::take(&mut seed.changes);
    let mut listeners = Vec::new();
    for address in &seed.broker_listen {
        let listener = driver
            .listen(*address, true)
            .map_err(|source| CoreError::Listen {
                address: *address,
                key: "listenPort",
                source,
            })?;
        listeners.push((listener, Purpose::Broker));
    }
    if let Some((_, _, addresses)) = &seed.name_server {
        for address in addresses {
            let listener = driver
                .listen(*address, false)
                .map_err(|source| CoreError::Listen {
                    address: *address,
                    key: "--namesrv-port",
                    source,
                })?;
            listeners.push((listener, Purpose::NameServer));
        }
    }
    let stop = seed.stop.clone();
    let now = driver.refresh_clock();
    let mut state = new_state(seed, config, shards);
    state.now = now;
    state.deliveries.begin(now.wall_ms);
    for change in changes {
        state.on_change(change);
    }
    state.set_half_limits();
    state.begin_control();
    Ok(Core {
        driver,
        state,
        listeners,
        stop,
        idle_scanned_us: now.monotonic_us,
        cold_turn: 0,
        drain_until_us: None,
    })
}

/// Entries of a core's ring. Where not all memory may be locked, the rings of all cores together
/// must still fit the limit, because the kernel counts them, too.
fn ring_entries(lock_memory: bool, cores: usize) -> u32 {
    let whole = UringConfig::default().entries;
    if lock_memory {
        return whole;
    }
    let share = sys::memlock_limit_bytes() / cores.max(1) as u64 / RING_BYTES_PER_ENTRY;
    let share = u32::try_from(share).unwrap_or(whole).clamp(16, whole);
    if share.is_power_of_two() {
        share
    } else {
        share.next_power_of_two() / 2
    }
}

fn no_ring(source: std::io::Error) -> CoreError {
    if source.kind() != std::io::ErrorKind::OutOfMemory {
        return machine("setting up io_uring", source);
    }
    let limit = sys::memlock_limit_bytes();
    CoreError::Other(format!(
        "setting up io_uring: {source}. Rings count against the limit on lockable memory, which is \
         {limit} bytes (RLIMIT_MEMLOCK) here. Unit file: `LimitMEMLOCK=infinity`; container: \
         `--ulimit memlock=-1:-1`; or use fewer cores (pinion.cores)"
    ))
}

fn open_shard<D: Driver>(
    seed: &Seed<D::Storage>,
    host: &dyn Host,
    driver: &mut D,
    recovered: Recovered<D::Storage>,
) -> Result<LocalShard, CoreError> {
    let config = &seed.config;
    let Some(identity) = &seed.identity else {
        return Err(CoreError::Other("a shard without a store".to_owned()));
    };
    let number = recovered.number();
    let dir = seed.buffer_dir.as_deref();
    let ring = start::open_ring(host, config, identity, dir, number, seed.lock_memory)?;
    let ack = start::ack_point(config, dir.is_some());
    let shard = recovered.open(driver, ring, ack, config.flush_interval_ms * 1000)?;
    Ok(LocalShard {
        shard,
        replies: super::replies::WaitingReplies::default(),
        held: super::held::HeldSends::default(),
        latency: shard::latency::Latency::default(),
    })
}

fn new_state<S: Storage>(seed: Seed<S>, config: Arc<Config>, shards: Vec<LocalShard>) -> State {
    let mut state = State::new(StateParts {
        core: seed.core,
        config,
        mesh: seed.mesh,
        homes: seed.homes,
        shards,
        store_host: seed.store_host,
        metrics: seed.metrics,
    });
    state.control = seed.control.map(|(control, registrar, effects)| {
        Box::new(ControlTask::new(control, registrar, effects))
    });
    state.name_server = seed
        .name_server
        .map(|(server, dir, _)| Box::new(NameServerTask::new(server, dir)));
    state.canary = super::canary::Canary::from_environment();
    state.null = seed.null.then(super::null::NullStore::default);
    state
}
