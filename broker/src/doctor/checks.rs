//! The checks: facts of the machine against what this broker needs, with the line that fixes each.
//!
//! Invariant: pure. The words of a check are the same whether it warns, refuses or is printed by
//! `doctor`, and name the value now, the value needed and what to write where.

use super::facts::Facts;
use super::kernel_text as text;
use crate::config::Config;
use crate::config::value::{BufferDir, Bytes, CoreList, Need};
use shard::maintain::{READY_BYTES, READY_SEGMENTS_MAX};

/// Oldest kernel with everything the runtime asks of a ring.
pub const KERNEL_MIN: (u32, u32) = (6, 1);

/// Locked for each core besides the write buffers: receive buffers, send buffers, rings.
pub const CORE_LOCKED_BYTES: u64 = 32 << 20;

/// Each write buffer's file has a header of one huge page.
pub const BUFFER_HEADER_BYTES: u64 = 2 << 20;

/// Open files beyond the connections: segments, queues, control files.
const OPEN_FILES_BESIDES: u64 = 1_024;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As needed.
    Good,
    /// Worth knowing; costs speed or room at most.
    Hint,
    /// Missing: the broker runs slower, or less is possible.
    Missing,
    /// The broker does not start.
    Refuses,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Hint => "hint",
            Self::Missing => "missing",
            Self::Refuses => "REFUSES",
        }
    }
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What is looked at; the setting's name where there is one.
    pub name: &'static str,
    /// How it came out.
    pub state: State,
    /// The value now.
    pub value: String,
    /// The value needed.
    pub need: String,
    /// What to write where; empty when nothing is to be done.
    pub fix: String,
}

impl Check {
    fn good(name: &'static str, value: impl Into<String>, need: impl Into<String>) -> Self {
        let (value, need) = (value.into(), need.into());
        Self {
            name,
            state: State::Good,
            value,
            need,
            fix: String::new(),
        }
    }

    fn bad(mut self, state: State, fix: impl Into<String>) -> Self {
        self.state = state;
        self.fix = fix.into();
        self
    }

    /// The check in one paragraph, for warnings and refusals.
    #[must_use]
    pub fn words(&self) -> String {
        let Self {
            name,
            value,
            need,
            fix,
            ..
        } = self;
        format!("{name}: {value}; needed: {need}. {fix}")
    }
}

/// Bytes that must be lockable for this configuration.
#[must_use]
pub fn locked_bytes_needed(config: &Config) -> u64 {
    let cores = u64::try_from(config.cores.0.len()).unwrap_or(1).max(1);
    let shard = config.buffer_bytes.0 + BUFFER_HEADER_BYTES + config.cold_bytes.0;
    shard
        .saturating_mul(config.shards)
        .saturating_add(cores * CORE_LOCKED_BYTES)
}

/// Bytes that the surviving buffers of this configuration take.
#[must_use]
pub fn buffer_bytes_needed(config: &Config) -> u64 {
    (config.buffer_bytes.0 + BUFFER_HEADER_BYTES).saturating_mul(config.shards)
}

/// All checks in the order they are printed.
#[must_use]
pub fn run(config: &Config, facts: &Facts) -> Vec<Check> {
    vec![
        kernel(facts),
        io_uring(facts),
        memlock(config, facts),
        direct(config, facts),
        pinning(config, facts),
        buffers(config, facts),
        sectors(facts),
        file_system(facts),
        disk_space(config, facts),
        disk_interrupts(config, facts),
        memory(config, facts),
        open_files(config, facts),
        clock(facts),
    ]
}

fn refused_or_missing(need: Need) -> State {
    if need == Need::Require {
        State::Refuses
    } else {
        State::Missing
    }
}

fn kernel(facts: &Facts) -> Check {
    let (major, minor) = KERNEL_MIN;
    let check = Check::good(
        "kernel",
        &facts.kernel,
        format!("Linux {major}.{minor} or newer"),
    );
    match text::kernel_version(&facts.kernel) {
        Some(version) if version >= KERNEL_MIN => check,
        _ => check.bad(
            State::Hint,
            "Boot a newer kernel; older ones lack ring features.",
        ),
    }
}

fn io_uring(facts: &Facts) -> Check {
    let need = "io_uring_setup, io_uring_enter and io_uring_register allowed";
    let Err(refusal) = &facts.io_uring else {
        return Check::good("io_uring", "allowed", need);
    };
    let disabled = facts.io_uring_disabled.filter(|level| *level > 0);
    let (value, fix) = match (disabled, refusal.errno) {
        (Some(level), _) => (
            format!("forbidden: kernel.io_uring_disabled = {level}"),
            "Run `sysctl -w kernel.io_uring_disabled=0` and put \
             `kernel.io_uring_disabled = 0` into /etc/sysctl.d/50-pinion.conf."
                .to_owned(),
        ),
        (None, Some(libc::ENOSYS | libc::EINVAL)) => (
            "not there, or without the operations this broker uses".to_owned(),
            "Boot Linux 6.1 or newer with CONFIG_IO_URING=y; in a container add \
             `--security-opt seccomp=docs/deploy/seccomp-pinion.json`."
                .to_owned(),
        ),
        (None, Some(libc::ENOMEM)) => (
            format!("refused: {}", refusal.words),
            "Unit file: `LimitMEMLOCK=infinity`. Container: `--ulimit memlock=-1:-1`.".to_owned(),
        ),
        _ => (
            format!(
                "forbidden: {} (no sysctl does it, so a seccomp filter does)",
                refusal.words
            ),
            "Container: `--security-opt seccomp=docs/deploy/seccomp-pinion.json` (or \
             `seccomp=unconfined`). Unit file: \
             `SystemCallFilter=@system-service io_uring_setup io_uring_enter io_uring_register`."
                .to_owned(),
        ),
    };
    // There is no other runtime yet, so this refuses whatever the settings say.
    Check::good("io_uring", value, need).bad(State::Refuses, fix)
}

fn memlock(config: &Config, facts: &Facts) -> Check {
    let bytes = locked_bytes_needed(config);
    let need = format!(
        "{bytes} bytes ({}) for {} shards on {} cores with pinion.bufferBytes={}",
        Bytes(bytes),
        config.shards,
        config.cores.0.len(),
        config.buffer_bytes.0
    );
    if facts.memlock_free {
        return Check::good("memlock", "not limited (CAP_IPC_LOCK)", need);
    }
    match facts.memlock_limit {
        Some(u64::MAX) => Check::good("memlock", "unlimited", need),
        Some(limit) if limit >= bytes => Check::good("memlock", format!("{limit} bytes"), need),
        limit => {
            let value = limit.map_or("unknown".to_owned(), |l| {
                format!("{l} bytes (RLIMIT_MEMLOCK)")
            });
            let kib = bytes.div_ceil(1024);
            let fix = format!(
                "Unit file: `LimitMEMLOCK=infinity`. Limits file \
                 /etc/security/limits.d/pinion.conf: `* - memlock {kib}` (then log in \
                 again). Container: `--ulimit memlock=-1:-1`. Or set pinion.bufferBytes lower."
            );
            Check::good("memlock", value, need).bad(refused_or_missing(config.memlock), fix)
        }
    }
}

fn direct(config: &Config, facts: &Facts) -> Check {
    let need = "a file system that takes O_DIRECT writes, such as ext4 or XFS";
    let kind = facts
        .file_system
        .as_ref()
        .map_or("unknown file system", |mount| mount.kind.as_str());
    let dir = facts.tried_dir.display();
    match &facts.direct {
        Ok(alignment) => {
            let stated = alignment.stated.map(|(memory, offset)| {
                format!(", alignment {memory} of memory and {offset} of offsets")
            });
            let value = format!("works in {dir} ({kind}{})", stated.unwrap_or_default());
            Check::good("direct", value, need)
        }
        Err(refusal) if refusal.errno == Some(libc::EINVAL) => {
            let value = format!("O_DIRECT refused in {dir} ({kind}): {}", refusal.words);
            let fix = "Put storePathRootDir (or --data) on ext4 or XFS, or mount one there: \
                       `mkfs.ext4 DEVICE && mount DEVICE DIR`.";
            Check::good("direct", value, need).bad(refused_or_missing(config.direct), fix)
        }
        Err(refusal) => {
            let value = format!(
                "nothing can be written in {dir} ({kind}): {}",
                refusal.words
            );
            let fix = "Give the broker's user write access to storePathRootDir (or --data): \
                       `chown USER DIR`.";
            Check::good("direct", value, need).bad(State::Refuses, fix)
        }
    }
}

fn pinning(config: &Config, facts: &Facts) -> Check {
    let used = &config.cores;
    let quota = facts
        .cpu_quota
        .map(|q| format!(", quota {}.{:02} CPUs", q / 100, q % 100));
    let value = format!(
        "uses CPU {used}; may use {} of {} on the host{}",
        CoreList(facts.cores_allowed.clone()),
        facts.cores_host,
        quota.unwrap_or_default()
    );
    let need = "one whole CPU for each thread that runs shards";
    if let Err(refusal) = &facts.pinning {
        let value = format!("{value}; {}", refusal.words);
        let fix = "Container: allow sched_setaffinity and give `--cpuset-cpus`. Unit file: \
                   `AllowedCPUs=` or `CPUAffinity=` with these CPUs.";
        return Check::good("pinning", value, need).bad(refused_or_missing(config.pinning), fix);
    }
    let cores = u64::try_from(used.0.len()).unwrap_or(u64::MAX);
    if facts
        .cpu_quota
        .is_some_and(|quota| quota < cores.saturating_mul(100))
    {
        let fix = "The quota stops pinned threads in mid-work: use `--cpuset-cpus` or \
                   `AllowedCPUs=` instead of `--cpus` or `CPUQuota=`, or set pinion.cores \
                   to fewer CPUs.";
        return Check::good("pinning", value, need).bad(State::Hint, fix);
    }
    Check::good("pinning", value, need)
}

fn buffers(config: &Config, facts: &Facts) -> Check {
    let place = &facts.buffers;
    let bytes = buffer_bytes_needed(config);
    let need = format!("{bytes} bytes ({}) that outlive the process", Bytes(bytes));
    let dir = place.dir.display();
    let (explicit, state) = match config.buffer_dir {
        BufferDir::None => {
            let value = "none: ASYNC_FLUSH acks wait for the write, as pinion.bufferDir=none says";
            return Check::good("bufferDir", value, need);
        }
        BufferDir::Path(_) => (true, State::Refuses),
        BufferDir::Auto => (false, State::Missing),
    };
    let without = "Without it ASYNC_FLUSH acks wait for the write: as safe, slower.";
    if let Err(refusal) = &place.writable {
        let value = format!("{dir}: {}", refusal.words);
        let fix = format!(
            "Give the broker's user write access there, or set pinion.bufferDir. {without}"
        );
        return Check::good("bufferDir", value, need).bad(state, fix);
    }
    let kind = place.kind.as_deref().unwrap_or("unknown");
    if !matches!(kind, "tmpfs" | "hugetlbfs") {
        let value = format!("{dir} is {kind}, not memory");
        let fix = format!("Name a tmpfs or hugetlbfs directory in pinion.bufferDir. {without}");
        return Check::good("bufferDir", value, need).bad(state, fix);
    }
    let free = place
        .space
        .map_or(0, |(free, _)| free)
        .saturating_add(place.used_by_us);
    if free < bytes {
        let value = format!("{free} bytes ({}) free in {dir}", Bytes(free));
        let size_mib = place
            .space
            .map_or(0, |(_, total)| total)
            .saturating_add(bytes - free)
            .div_ceil(1 << 20);
        let fix = format!(
            "Run `mount -o remount,size={size_mib}M {dir}`; container: `--shm-size {size_mib}m`. \
             Or set pinion.bufferBytes lower. {without}"
        );
        return Check::good("bufferDir", value, need).bad(state, fix);
    }
    if facts.in_container && !explicit {
        let value = format!("{dir} ends with this container");
        let fix = format!(
            "Mount a memory directory of the host, as in \
             `--mount type=bind,src=/dev/shm/pinion,dst=/buffers`, and set \
             pinion.bufferDir=/buffers. {without}"
        );
        return Check::good("bufferDir", value, need).bad(state, fix);
    }
    Check::good(
        "bufferDir",
        format!("{dir} ({kind}), {} free", Bytes(free)),
        need,
    )
}

fn sectors(facts: &Facts) -> Check {
    let need = "sectors of at most 4096 bytes";
    let disk = facts.disk.as_ref();
    let Some((logical, physical)) = disk.and_then(|disk| disk.sectors) else {
        return Check::good(
            "sectors",
            "unknown (no disk of its own below the data)",
            need,
        );
    };
    let name = disk.map_or("", |disk| disk.name.as_str());
    let cache = disk
        .and_then(|disk| disk.cache.as_deref())
        .unwrap_or("unknown");
    let value = format!("{name}: {logical} logical, {physical} physical, cache {cache}");
    let check = Check::good("sectors", value, need);
    if logical > 4_096 {
        return check.bad(
            State::Hint,
            "Reformat the name space with 4096-byte sectors.",
        );
    }
    check
}

fn file_system(facts: &Facts) -> Check {
    let need = "ext4 or XFS without online discard";
    let Some(mount) = &facts.file_system else {
        return Check::good("file system", "unknown", need);
    };
    let value = format!("{} at {}", mount.kind, mount.point);
    if mount.options.split(',').any(|option| option == "discard") {
        let fix = format!(
            "Removing segments stalls writers: `mount -o remount,nodiscard {}`, weekly fstrim.",
            mount.point
        );
        return Check::good(
            "file system",
            format!("{value}, mounted with discard"),
            need,
        )
        .bad(State::Hint, fix);
    }
    let check = Check::good("file system", value, need);
    if matches!(mount.kind.as_str(), "ext4" | "xfs") {
        return check;
    }
    check.bad(
        State::Hint,
        "The durability of this one is not tested; ext4 and XFS are.",
    )
}

fn disk_space(config: &Config, facts: &Facts) -> Check {
    let ahead = (READY_BYTES / config.segment_bytes.0.max(1)).clamp(1, READY_SEGMENTS_MAX);
    let each = config.segment_bytes.0.saturating_mul(1 + ahead);
    let bytes = each.saturating_mul(config.shards);
    let need = format!(
        "{} for the first segments of {} shards (mappedFileSizeCommitLog={})",
        Bytes(bytes),
        config.shards,
        config.segment_bytes.0
    );
    let Some(free) = facts.disk_free else {
        return Check::good("disk space", "unknown", need);
    };
    let check = Check::good("disk space", format!("{} free", Bytes(free)), need);
    if free >= bytes {
        return check;
    }
    check.bad(
        State::Hint,
        "Free some, move storePathRootDir, or set mappedFileSizeCommitLog lower.",
    )
}

fn disk_interrupts(config: &Config, facts: &Facts) -> Check {
    let need = "the disk's interrupt on a CPU that runs shards";
    let cpus = facts
        .disk
        .as_ref()
        .map(|disk| disk.interrupt_cpus.as_slice())
        .unwrap_or_default();
    let Some(first) = cpus.first() else {
        return Check::good("disk interrupt", "unknown", need);
    };
    let value = format!("taken by CPU {}", CoreList(cpus.to_vec()));
    if cpus.iter().any(|cpu| config.cores.0.contains(cpu)) {
        return Check::good("disk interrupt", format!("mostly CPU {first}"), need);
    }
    let fix = format!(
        "Add CPU {first} to pinion.cores, or move the interrupt (/proc/irq/N/smp_affinity_list)."
    );
    Check::good("disk interrupt", value, need).bad(State::Hint, fix)
}

fn memory(config: &Config, facts: &Facts) -> Check {
    let bytes = locked_bytes_needed(config);
    let need = format!("{} of buffers and as much again for the rest", Bytes(bytes));
    let Some(limit) = facts.memory_limit else {
        return Check::good("memory", "unknown", need);
    };
    let check = Check::good("memory", format!("{} may be used", Bytes(limit)), need);
    if limit >= bytes.saturating_mul(2) {
        return check;
    }
    check.bad(
        State::Hint,
        "Set pinion.bufferBytes lower, or allow more (`MemoryMax=`, `--memory`).",
    )
}

fn open_files(config: &Config, facts: &Facts) -> Check {
    let files = u64::from(config.connections_max) + OPEN_FILES_BESIDES;
    let need = format!(
        "{files} for pinion.connectionsMax={}",
        config.connections_max
    );
    let Some(limit) = facts.open_files else {
        return Check::good("open files", "unknown", need);
    };
    let check = Check::good("open files", limit.to_string(), need);
    if limit >= files {
        return check;
    }
    let fix = format!(
        "Unit file: `LimitNOFILE={files}`. Container: `--ulimit nofile={files}`. Or set \
         pinion.connectionsMax lower."
    );
    check.bad(State::Hint, fix)
}

fn clock(facts: &Facts) -> Check {
    let need = "a clock read without entering the kernel (tsc, kvm-clock, arch_sys_counter)";
    let Some(clock) = &facts.clock else {
        return Check::good("clock", "unknown", need);
    };
    let check = Check::good("clock", clock, need);
    if matches!(clock.as_str(), "hpet" | "acpi_pm" | "jiffies" | "pit") {
        return check.bad(
            State::Hint,
            "Boot with `clocksource=tsc tsc=reliable` if the CPU allows it.",
        );
    }
    check
}

/// The checks as a table, fixes below their lines.
#[must_use]
pub fn table(checks: &[Check]) -> String {
    let width =
        |of: fn(&Check) -> usize, least: usize| checks.iter().map(of).max().unwrap_or(0).max(least);
    let names = width(|check| check.name.len(), 5);
    let mut out = format!("{:names$}  {:7}  value and need\n", "check", "state");
    for check in checks {
        let Check {
            name,
            state,
            value,
            need,
            fix,
        } = check;
        out.push_str(&format!("{name:names$}  {:7}  {value}\n", state.word()));
        out.push_str(&format!("{:names$}  {:7}  need: {need}\n", "", ""));
        if !fix.is_empty() {
            out.push_str(&format!("{:names$}  {:7}  fix:  {fix}\n", "", ""));
        }
    }
    out
}
