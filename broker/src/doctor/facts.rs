//! Asking the machine: one look at everything the checks need, without leaving anything behind.
//!
//! Invariant: nothing is changed on the machine. The one file that is written to try direct writes
//! has no name by the time it is written, so that a killed look leaves nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use shard::runtime::sys;

use super::kernel_text as text;
use crate::config::Config;
use crate::config::value::{BufferDir, CoreList, Value as _};

/// Alignment of the trial write: the largest block size a disk has today.
const TRIAL_BYTES: usize = 4_096;

/// The process identifier name space a machine starts with. Another number means a container.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Where buffers go that outlive the process, unless a setting says otherwise.
pub const DEFAULT_BUFFER_DIR: &str = "/dev/shm";

/// What the checks look at.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Kernel release.
    pub kernel: String,
    /// Whether a ring can be made, or why not.
    pub io_uring: Result<(), Refusal>,
    /// `kernel.io_uring_disabled`, where the kernel has it.
    pub io_uring_disabled: Option<u8>,
    /// Limit on locked memory in bytes; `u64::MAX` for none.
    pub memlock_limit: Option<u64>,
    /// Whether that limit does not bind this process.
    pub memlock_free: bool,
    /// Whether a direct write worked in the data directory, or why not.
    pub direct: Result<Alignment, Refusal>,
    /// The directory of the trial: the data directory or the nearest above it that exists.
    pub tried_dir: PathBuf,
    /// File system there, with its options.
    pub file_system: Option<text::Mount>,
    /// Disk below it.
    pub disk: Option<Disk>,
    /// Bytes free there.
    pub disk_free: Option<u64>,
    /// CPUs this process may use.
    pub cores_allowed: Vec<usize>,
    /// CPUs the machine has.
    pub cores_host: usize,
    /// CPU time allowed, in hundredths of a CPU.
    pub cpu_quota: Option<u64>,
    /// Whether a thread can be pinned, or why not.
    pub pinning: Result<(), Refusal>,
    /// Memory this process may use.
    pub memory_limit: Option<u64>,
    /// Clock source.
    pub clock: Option<String>,
    /// Where surviving buffers would lie.
    pub buffers: BufferPlace,
    /// Whether the process runs in a container.
    pub in_container: bool,
    /// Open files allowed.
    pub open_files: Option<u64>,
}

/// The system's answer to a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Error number, where there is one.
    pub errno: Option<i32>,
    /// In words.
    pub words: String,
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self {
            errno: error.raw_os_error(),
            words: error.to_string(),
        }
    }
}

/// Alignment that direct transfers need, as far as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Alignment {
    /// Of memory and of offsets, in bytes.
    pub stated: Option<(u32, u32)>,
}

/// The disk below the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Name, such as `nvme0n1`.
    pub name: String,
    /// Logical and physical sector.
    pub sectors: Option<(u32, u32)>,
    /// CPUs that take its interrupts, most first.
    pub interrupt_cpus: Vec<usize>,
    /// `write back` when it has a volatile cache.
    pub cache: Option<String>,
}

/// A place for buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferPlace {
    /// The directory.
    pub dir: PathBuf,
    /// Type of file system there.
    pub kind: Option<String>,
    /// Bytes free there, of bytes in all.
    pub space: Option<(u64, u64)>,
    /// Bytes that buffers of an earlier run take there already.
    pub used_by_us: u64,
    /// Whether a file can be made there, or why not.
    pub writable: Result<(), Refusal>,
}

/// Trials that the runtime does for the checks.
#[derive(Clone, Copy)]
pub struct Trials {
    /// Makes and drops a ring.
    pub io_uring: fn() -> io::Result<()>,
}

impl Facts {
    /// Looks at this machine for a broker with this configuration.
    #[must_use]
    pub fn gather(config: &Config, trials: &Trials) -> Self {
        let mounts = read("/proc/self/mountinfo");
        let limits = read("/proc/self/limits");
        let tried_dir = nearest_existing(config.store_path_commit_log.as_path());
        let buffer_dir = match &config.buffer_dir {
            BufferDir::Path(path) => path.clone(),
            _ => PathBuf::from(DEFAULT_BUFFER_DIR),
        };
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            io_uring: (trials.io_uring)().map_err(Refusal::from),
            io_uring_disabled: read("/proc/sys/kernel/io_uring_disabled")
                .trim()
                .parse()
                .ok(),
            memlock_limit: text::limit_of(&limits, "Max locked memory"),
            memlock_free: text::may_lock_beyond_limit(&read("/proc/self/status")),
            direct: try_direct_write(&tried_dir).map_err(Refusal::from),
            file_system: text::mount_of(&mounts, &tried_dir.to_string_lossy()),
            disk: disk_below(&tried_dir),
            disk_free: sys::space(&tried_dir)
                .ok()
                .map(|space| space.available_bytes),
            tried_dir,
            cores_allowed: crate::config::allowed_cores(),
            cores_host: host_cores(),
            cpu_quota: cpu_quota(),
            pinning: try_pinning(&config.cores.0),
            memory_limit: memory_limit(),
            clock: Some(read(
                "/sys/devices/system/clocksource/clocksource0/current_clocksource",
            ))
            .map(|clock| clock.trim().to_owned())
            .filter(|clock| !clock.is_empty()),
            buffers: buffer_place(&mounts, buffer_dir),
            in_container: is_in_container(),
            open_files: text::limit_of(&limits, "Max open files"),
        }
    }
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn host_cores() -> usize {
    let online = read("/sys/devices/system/cpu/online");
    CoreList::parse(online.trim()).map_or(0, |cores| cores.0.len())
}

fn nearest_existing(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let existing = absolute.ancestors().find(|ancestor| ancestor.is_dir());
    let found = existing.unwrap_or_else(|| Path::new("/"));
    fs::canonicalize(found).unwrap_or_else(|_| found.to_owned())
}

/// Writes one aligned block past the page cache into a file without a name.
fn try_direct_write(dir: &Path) -> io::Result<Alignment> {
    let path = dir.join(format!(".pinion-trial-{}", std::process::id()));
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    // Also after a refusal: some file systems make the file before they refuse the flag.
    let removed = fs::remove_file(&path);
    let mut file = opened?;
    removed?;
    let space = vec![0_u8; 2 * TRIAL_BYTES];
    let start = space.as_ptr().align_offset(TRIAL_BYTES);
    let block = space.get(start..start + TRIAL_BYTES).unwrap_or_default();
    file.write_all(block)?;
    let stated = sys::direct_alignment(&file)?;
    Ok(Alignment {
        stated: stated.map(|s| (s.memory_bytes, s.offset_bytes)),
    })
}

fn try_pinning(cores: &[usize]) -> Result<(), Refusal> {
    let cores = cores.to_vec();
    let trial = move || {
        for core in cores {
            if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
                let words = format!("the system refused to pin a thread to CPU {core}");
                return Err(Refusal { errno: None, words });
            }
        }
        Ok(())
    };
    // On a thread of its own, which takes the pinning with it when it ends.
    let thread = std::thread::Builder::new()
        .name("pinning-trial".to_owned())
        .spawn(trial);
    let outcome = thread.map_err(Refusal::from)?.join();
    outcome.unwrap_or_else(|_| {
        Err(Refusal {
            errno: None,
            words: "the trial thread died".to_owned(),
        })
    })
}

fn disk_below(dir: &Path) -> Option<Disk> {
    let device = fs::metadata(dir).ok()?.dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    let sys_path = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let (name, prefixes) = text::disk_of(&sys_path.to_string_lossy())?;
    let queue = |file: &str| {
        read(format!("/sys/block/{name}/queue/{file}"))
            .trim()
            .to_owned()
    };
    let number = |file: &str| queue(file).parse::<u32>().ok();
    let sectors = number("logical_block_size").zip(number("physical_block_size"));
    let cache = Some(queue("write_cache")).filter(|cache| !cache.is_empty());
    let interrupt_cpus = text::interrupt_cpus(&read("/proc/interrupts"), &prefixes);
    Some(Disk {
        name,
        sectors,
        interrupt_cpus,
        cache,
    })
}

fn buffer_place(mounts: &str, dir: PathBuf) -> BufferPlace {
    let shown = fs::canonicalize(&dir).unwrap_or_else(|_| dir.clone());
    let kind = text::mount_of(mounts, &shown.to_string_lossy()).map(|mount| mount.kind);
    let space = sys::space(&dir)
        .ok()
        .map(|space| (space.available_bytes, space.total_bytes));
    let trial = dir.join(format!(".pinion-trial-{}", std::process::id()));
    let writable = File::create_new(&trial).and_then(|_| fs::remove_file(&trial));
    BufferPlace {
        space,
        kind,
        used_by_us: buffers_in(&dir),
        writable: writable.map_err(Into::into),
        dir,
    }
}

/// Bytes of files in `dir` whose names begin with the project's own.
fn buffers_in(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else {
        return 0;
    };
    let ours = entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with("pinion"));
    ours.filter_map(|entry| Some(entry.metadata().ok()?.blocks() * 512))
        .sum()
}

fn is_in_container() -> bool {
    let own = fs::read_link("/proc/self/ns/pid").ok();
    own.is_some_and(|link| link.as_os_str() != FIRST_PID_NAMESPACE)
}

fn cpu_quota() -> Option<u64> {
    let cgroup = read("/proc/self/cgroup");
    let unified = text::cgroup_path(&cgroup, "")
        .unwrap_or("/")
        .trim_start_matches('/');
    if let Some(quota) = text::quota_of(&read(
        Path::new("/sys/fs/cgroup").join(unified).join("cpu.max"),
    )) {
        return Some(quota);
    }
    let own = text::cgroup_path(&cgroup, "cpu")?.trim_start_matches('/');
    let dir = Path::new("/sys/fs/cgroup/cpu").join(own);
    let quota = read(dir.join("cpu.cfs_quota_us"));
    let period = read(dir.join("cpu.cfs_period_us"));
    text::quota_of(&format!("{} {}", quota.trim(), period.trim()))
}

/// The smallest of the machine's memory and the limits of the cgroup.
fn memory_limit() -> Option<u64> {
    let meminfo = read("/proc/meminfo");
    let total = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let total_kib = total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    let cgroup = read("/proc/self/cgroup");
    let unified = text::cgroup_path(&cgroup, "")
        .unwrap_or("/")
        .trim_start_matches('/');
    let own = text::cgroup_path(&cgroup, "memory")
        .unwrap_or("/")
        .trim_start_matches('/');
    let files = [
        Path::new("/sys/fs/cgroup").join(unified).join("memory.max"),
        Path::new("/sys/fs/cgroup/memory")
            .join(own)
            .join("memory.limit_in_bytes"),
        PathBuf::from("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ];
    let limits = files
        .iter()
        .filter_map(|file| read(file).trim().parse::<u64>().ok());
    limits.chain(total_kib.map(|kib| kib * 1024)).min()
}
