//! A disk in memory that forgets like a real one.
//!
//! What was written but not flushed is kept apart, and a power loss keeps any subset of it, sector
//! by sector; the same holds for lengths and for names that were not synced with their directory.
//! A plan of faults makes chosen operations fail, stop short, hang, lie or cut the power.
//!
//! Invariant: everything is decided by the seed and the order of calls.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::real::temporary_path;
use super::{BLOCK_BYTES, Entry, OpenMode, Space, Storage, StoreFile};

mod file;

use self::file::Inode;
pub use self::file::SECTOR_BYTES;

/// Space of a simulated disk unless set otherwise, in bytes.
pub const CAPACITY_BYTES: u64 = 1 << 40;

/// A small deterministic source of random numbers.
#[derive(Clone, Debug)]
pub struct SimRandom(u64);

impl SimRandom {
    /// Starts from a seed.
    #[must_use]
    pub fn new(seed: u64) -> SimRandom {
        SimRandom(seed ^ 0x5851_f42d_4c95_7f2d)
    }
    /// The next number (splitmix64).
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below a bound (zero for a bound of zero).
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            0
        } else {
            self.next_u64() % bound
        }
    }
    /// True once in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    /// A number of a range, its end excluded.
    pub fn within(&mut self, range: &std::ops::Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }
}

/// The kinds of disk operations a fault can be planned for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// Reading a data file.
    Read,
    /// Writing a data file.
    Write,
    /// Flushing a data file.
    Flush,
    /// Opening an existing file.
    Open,
    /// Creating a file.
    Create,
    /// Renaming a file.
    Rename,
    /// Removing a file.
    Remove,
    /// Allocating space.
    Allocate,
    /// Cutting a file.
    Truncate,
    /// Syncing a directory.
    SyncDir,
}

/// What happens instead of the operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// It fails with this error number and changes nothing.
    Fail(i32),
    /// Half of it happens; a write reports an error, a read its short count.
    Short,
    /// It does not end before it is released (a blocking call fails with `TimedOut` instead).
    Hang,
    /// A write or flush reports success and does nothing; a read returns what was last flushed.
    Stale,
    /// The power goes: this and every later operation fails until the next power loss.
    PowerOff,
}

/// A planned fault.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Kind of operation.
    pub operation: Operation,
    /// Only for paths that contain this.
    pub path_contains: Option<String>,
    /// Matching operations to let pass first.
    pub skip: u64,
    /// Matching operations to hit then.
    pub times: u64,
    /// What happens.
    pub effect: Effect,
}

/// What a crash is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The process dies: what reached the kernel stays.
    Kill,
    /// The power goes: of what was not flushed any subset stays.
    PowerLoss,
}

/// A change of names that is not durable yet.
#[derive(Debug)]
enum NameChange {
    Link(PathBuf, u64),
    Unlink(PathBuf),
    Rename(PathBuf, PathBuf),
}

fn directory_of(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).to_path_buf()
}

impl NameChange {
    fn directory(&self) -> PathBuf {
        match self {
            NameChange::Link(path, _) | NameChange::Unlink(path) | NameChange::Rename(_, path) => {
                directory_of(path)
            }
        }
    }
    fn apply(&self, names: &mut BTreeMap<PathBuf, u64>) {
        match self {
            NameChange::Link(path, inode) => {
                names.insert(path.clone(), *inode);
            }
            NameChange::Unlink(path) => {
                names.remove(path);
            }
            NameChange::Rename(from, to) => {
                if let Some(inode) = names.remove(from) {
                    names.insert(to.clone(), inode);
                }
            }
        }
    }
}

#[derive(Debug)]
struct Disk {
    inodes: HashMap<u64, Inode>,
    next_inode: u64,
    names: BTreeMap<PathBuf, u64>,
    durable_names: BTreeMap<PathBuf, u64>,
    changes: Vec<NameChange>,
    directories: BTreeSet<PathBuf>,
    faults: Vec<Fault>,
    counts: BTreeMap<Operation, u64>,
    lying_flush: bool,
    read_only: bool,
    power_off: bool,
    epoch: u64,
    capacity_bytes: u64,
    now_ms: i64,
}

/// The simulated disk.
#[derive(Clone, Debug)]
pub struct SimStorage(Arc<Mutex<Disk>>);

/// One open file of it.
#[derive(Clone, Debug)]
pub struct SimFile {
    disk: SimStorage,
    inode: u64,
    epoch: u64,
    path: PathBuf,
    writable: bool,
}

impl Default for SimStorage {
    fn default() -> SimStorage {
        SimStorage::new()
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl SimStorage {
    /// An empty disk.
    #[must_use]
    pub fn new() -> SimStorage {
        SimStorage(Arc::new(Mutex::new(Disk {
            inodes: HashMap::new(),
            next_inode: 1,
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            changes: Vec::new(),
            directories: BTreeSet::new(),
            faults: Vec::new(),
            counts: BTreeMap::new(),
            lying_flush: false,
            read_only: false,
            power_off: false,
            epoch: 0,
            capacity_bytes: CAPACITY_BYTES,
            now_ms: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plans a fault.
    pub fn plan(&self, fault: Fault) {
        self.lock().faults.push(fault);
    }
    /// Forgets all planned faults.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }
    /// Operations of a kind so far, for choosing where to put a fault.
    #[must_use]
    pub fn count(&self, operation: Operation) -> u64 {
        self.lock().counts.get(&operation).copied().unwrap_or(0)
    }
    /// Makes flushes report success without flushing.
    pub fn set_lying_flush(&self, lying: bool) {
        self.lock().lying_flush = lying;
    }
    /// Remounts read-only (or back).
    pub fn set_read_only(&self, read_only: bool) {
        self.lock().read_only = read_only;
    }
    /// Sets the space there is.
    pub fn set_capacity_bytes(&self, bytes: u64) {
        self.lock().capacity_bytes = bytes;
    }
    /// Sets the time files are stamped with.
    pub fn set_time_ms(&self, now_ms: i64) {
        self.lock().now_ms = now_ms;
    }

    /// Crashes the machine. Open files of before must not be used any more.
    pub fn crash(&self, kind: Crash, random: &mut SimRandom) {
        let mut disk = self.lock();
        let disk = &mut *disk;
        disk.power_off = false;
        disk.epoch += 1;
        if kind == Crash::Kill {
            // In the order of numbers: the hash map's own order is not deterministic.
            let numbers: BTreeSet<u64> = disk.inodes.keys().copied().collect();
            for number in numbers {
                // A transfer the kernel had begun is carried out; one it had not is gone.
                if let Some(inode) = disk.inodes.get_mut(&number) {
                    inode.finish_in_flight(random);
                }
            }
            return;
        }
        // Per directory a prefix of its changes has reached the disk.
        let mut by_directory: BTreeMap<PathBuf, Vec<&NameChange>> = BTreeMap::new();
        for change in &disk.changes {
            by_directory
                .entry(change.directory())
                .or_default()
                .push(change);
        }
        for changes in by_directory.values() {
            let kept = random.below(changes.len() as u64 + 1) as usize;
            for change in changes.iter().take(kept) {
                change.apply(&mut disk.durable_names);
            }
        }
        disk.changes.clear();
        disk.names = disk.durable_names.clone();
        let linked: BTreeSet<u64> = disk.names.values().copied().collect();
        disk.inodes.retain(|number, _| linked.contains(number));
        for number in linked {
            if let Some(inode) = disk.inodes.get_mut(&number) {
                inode.lose_power(random);
            }
        }
    }
}

impl Disk {
    /// Counts an operation and looks up what the plan says about it.
    fn begin(&mut self, operation: Operation, path: &Path) -> io::Result<Option<Effect>> {
        *self.counts.entry(operation).or_default() += 1;
        if self.power_off {
            return Err(io::Error::other("the power is off"));
        }
        let modifies = !matches!(operation, Operation::Read | Operation::Open);
        if modifies && self.read_only && operation != Operation::Flush {
            return Err(errno(libc::EROFS));
        }
        let text = path.to_string_lossy();
        for fault in &mut self.faults {
            let matches = fault.operation == operation
                && fault
                    .path_contains
                    .as_ref()
                    .is_none_or(|part| text.contains(part.as_str()));
            if !matches || fault.times == 0 {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
                continue;
            }
            fault.times -= 1;
            let effect = fault.effect;
            return match effect {
                Effect::Fail(number) => Err(errno(number)),
                Effect::PowerOff => {
                    self.power_off = true;
                    Err(io::Error::other("the power went"))
                }
                effect => Ok(Some(effect)),
            };
        }
        Ok(None)
    }

    /// The same for calls that block: they cannot hang without end.
    fn begin_blocking(&mut self, operation: Operation, path: &Path) -> io::Result<Option<Effect>> {
        match self.begin(operation, path)? {
            Some(Effect::Hang) => Err(io::Error::from(io::ErrorKind::TimedOut)),
            effect => Ok(effect),
        }
    }

    fn change(&mut self, change: NameChange) {
        change.apply(&mut self.names);
        self.changes.push(change);
    }

    fn inode(&mut self, number: u64) -> io::Result<&mut Inode> {
        self.inodes
            .get_mut(&number)
            .ok_or_else(|| errno(libc::EBADF))
    }

    fn used_bytes(&self) -> u64 {
        self.inodes.values().map(Inode::len).sum()
    }

    fn check_growth(&mut self, number: u64, end: u64) -> io::Result<()> {
        let have = self.inode(number)?.len();
        if end > have && self.used_bytes() + (end - have) > self.capacity_bytes {
            return Err(errno(libc::ENOSPC));
        }
        Ok(())
    }
}

fn check_aligned(len: usize, offset: u64) -> io::Result<()> {
    if len.is_multiple_of(BLOCK_BYTES) && offset.is_multiple_of(BLOCK_BYTES as u64) {
        Ok(())
    } else {
        Err(errno(libc::EINVAL))
    }
}

/// A transfer as the simulated driver sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begun {
    /// It goes on: complete it with this.
    Going(u64),
    /// It hangs until released; then it goes on.
    Hanging(u64),
}

impl SimFile {
    /// The disk, if this file is of its present life.
    fn lock(&self) -> io::Result<MutexGuard<'_, Disk>> {
        let disk = self.disk.lock();
        if disk.epoch == self.epoch {
            Ok(disk)
        } else {
            Err(errno(libc::EBADF))
        }
    }

    /// Starts a write whose bytes may or may not have landed at a crash.
    pub(crate) fn begin_write(
        &self,
        bytes: &[u8],
        offset: u64,
    ) -> io::Result<(Begun, Option<Effect>)> {
        let mut disk = self.lock()?;
        check_aligned(bytes.len(), offset)?;
        if !self.writable {
            return Err(errno(libc::EBADF));
        }
        let effect = disk.begin(Operation::Write, &self.path)?;
        disk.check_growth(self.inode, offset + bytes.len() as u64)?;
        let lost = effect == Some(Effect::Stale);
        let inode = disk.inode(self.inode)?;
        let id = if lost {
            0
        } else {
            inode.begin_write(bytes.to_vec(), offset)
        };
        let begun = if effect == Some(Effect::Hang) {
            Begun::Hanging(id)
        } else {
            Begun::Going(id)
        };
        Ok((begun, effect))
    }

    /// Offers the memory's present bytes to a write under way: each sector may be taken from then
    /// or from now, as with a device that reads while the owner writes.
    pub(crate) fn remix(&self, id: u64, bytes: &[u8], random: &mut SimRandom) {
        if let Ok(mut disk) = self.lock()
            && let Ok(inode) = disk.inode(self.inode)
        {
            inode.remix(id, bytes, random);
        }
    }

    /// Lands a write; `half` cuts it.
    pub(crate) fn end_write(&self, id: u64, half: bool) -> io::Result<()> {
        let mut disk = self.lock()?;
        if disk.power_off {
            return Err(io::Error::other("the power is off"));
        }
        let now_ms = disk.now_ms;
        disk.inode(self.inode)?.land(id, half, now_ms);
        if half {
            Err(io::Error::from(io::ErrorKind::WriteZero))
        } else {
            Ok(())
        }
    }

    /// Starts a flush of what has landed by now.
    pub(crate) fn begin_flush(&self) -> io::Result<(Begun, Option<Effect>)> {
        let mut disk = self.lock()?;
        let effect = disk.begin(Operation::Flush, &self.path)?;
        let lying = disk.lying_flush || effect == Some(Effect::Stale);
        let mark = disk.inode(self.inode)?.flush_mark();
        let mark = if lying { 0 } else { mark };
        let begun = if effect == Some(Effect::Hang) {
            Begun::Hanging(mark)
        } else {
            Begun::Going(mark)
        };
        Ok((begun, effect))
    }

    /// Ends a flush: what had landed at its start is durable.
    pub(crate) fn end_flush(&self, mark: u64) -> io::Result<()> {
        let mut disk = self.lock()?;
        if disk.power_off {
            return Err(io::Error::other("the power is off"));
        }
        disk.inode(self.inode)?.flush(mark);
        Ok(())
    }

    /// Whether a read hangs, or how it goes.
    pub(crate) fn begin_read(&self) -> io::Result<Option<Effect>> {
        self.lock()?.begin(Operation::Read, &self.path)
    }

    /// Reads after [`SimFile::begin_read`].
    pub(crate) fn end_read(
        &self,
        into: &mut [u8],
        offset: u64,
        effect: Option<Effect>,
    ) -> io::Result<usize> {
        let mut disk = self.lock()?;
        if disk.power_off {
            return Err(io::Error::other("the power is off"));
        }
        let inode = disk.inode(self.inode)?;
        let wanted = match effect {
            Some(Effect::Short) => into.len() / 2 / BLOCK_BYTES * BLOCK_BYTES,
            _ => into.len(),
        };
        let into = into.get_mut(..wanted).unwrap_or_default();
        Ok(inode.read(into, offset, effect == Some(Effect::Stale)))
    }
}

impl StoreFile for SimFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let effect = match self.begin_read()? {
            Some(Effect::Hang) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
            effect => effect,
        };
        self.end_read(into, offset, effect)
    }

    fn write_all_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        match self.begin_write(from, offset)? {
            (Begun::Hanging(_), _) => Err(io::Error::from(io::ErrorKind::TimedOut)),
            (Begun::Going(id), effect) => self.end_write(id, effect == Some(Effect::Short)),
        }
    }

    fn sync(&self) -> io::Result<()> {
        match self.begin_flush()? {
            (Begun::Hanging(_), _) => Err(io::Error::from(io::ErrorKind::TimedOut)),
            (Begun::Going(mark), _) => self.end_flush(mark),
        }
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.lock()?.inode(self.inode)?.len())
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        let mut disk = self.lock()?;
        disk.begin_blocking(Operation::Allocate, &self.path)?;
        disk.check_growth(self.inode, bytes)?;
        let inode = disk.inode(self.inode)?;
        if inode.len() < bytes {
            inode.set_len(bytes);
        }
        Ok(())
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        let mut disk = self.lock()?;
        disk.begin_blocking(Operation::Truncate, &self.path)?;
        disk.inode(self.inode)?.set_len(bytes);
        Ok(())
    }
}

impl Storage for SimStorage {
    type File = SimFile;

    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<SimFile> {
        let mut disk = self.lock();
        let exists = disk.names.get(path).copied();
        let inode = if mode == OpenMode::CreateNew {
            disk.begin_blocking(Operation::Create, path)?;
            if exists.is_some() {
                return Err(errno(libc::EEXIST));
            }
            let parent = directory_of(path);
            if !disk.directories.contains(&parent) && !parent.as_os_str().is_empty() {
                return Err(errno(libc::ENOENT));
            }
            let number = disk.next_inode;
            disk.next_inode += 1;
            let now_ms = disk.now_ms;
            disk.inodes.insert(number, Inode::new(now_ms));
            disk.change(NameChange::Link(path.to_path_buf(), number));
            number
        } else {
            disk.begin_blocking(Operation::Open, path)?;
            if mode == OpenMode::ReadWrite && disk.read_only {
                return Err(errno(libc::EROFS));
            }
            exists.ok_or_else(|| errno(libc::ENOENT))?
        };
        Ok(SimFile {
            disk: self.clone(),
            inode,
            epoch: disk.epoch,
            path: path.to_path_buf(),
            writable: mode != OpenMode::Read,
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.lock();
        disk.begin_blocking(Operation::Remove, path)?;
        if !disk.names.contains_key(path) {
            return Err(errno(libc::ENOENT));
        }
        disk.change(NameChange::Unlink(path.to_path_buf()));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut disk = self.lock();
        disk.begin_blocking(Operation::Rename, from)?;
        if !disk.names.contains_key(from) {
            return Err(errno(libc::ENOENT));
        }
        disk.change(NameChange::Rename(from.to_path_buf(), to.to_path_buf()));
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut disk = self.lock();
        disk.begin_blocking(Operation::Create, to)?;
        let number = disk.names.get(from).copied();
        let number = number.ok_or_else(|| errno(libc::ENOENT))?;
        if disk.names.contains_key(to) {
            return Err(errno(libc::EEXIST));
        }
        disk.change(NameChange::Link(to.to_path_buf(), number));
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        let disk = self.lock();
        let mut entries = Vec::new();
        if !disk.directories.contains(dir) {
            return Err(errno(libc::ENOENT));
        }
        let name_of = |path: &Path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default()
                .to_owned()
        };
        for (path, inode) in &disk.names {
            if path.parent() == Some(dir) {
                let bytes = disk.inodes.get(inode).map_or(0, Inode::len);
                entries.push(Entry {
                    name: name_of(path),
                    is_file: true,
                    bytes,
                });
            }
        }
        for path in disk
            .directories
            .iter()
            .filter(|path| path.parent() == Some(dir))
        {
            entries.push(Entry {
                name: name_of(path),
                is_file: false,
                bytes: 4096,
            });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn create_dirs(&self, dir: &Path) -> io::Result<()> {
        let mut disk = self.lock();
        if disk.power_off {
            return Err(io::Error::other("the power is off"));
        }
        // Directories are durable at once: losing a whole store at its birth shows nothing.
        for ancestor in dir.ancestors() {
            disk.directories.insert(ancestor.to_path_buf());
        }
        Ok(())
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let mut disk = self.lock();
        let disk = &mut *disk;
        let effect = disk.begin_blocking(Operation::SyncDir, dir)?;
        if disk.lying_flush || effect == Some(Effect::Stale) {
            return Ok(());
        }
        let changes = std::mem::take(&mut disk.changes);
        for change in changes {
            if change.directory() == dir {
                change.apply(&mut disk.durable_names);
            } else {
                disk.changes.push(change);
            }
        }
        Ok(())
    }

    fn read_file(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = self.open(path, OpenMode::Read)?;
        let mut bytes = vec![0; file.len_bytes()? as usize];
        let count = file.read_at(&mut bytes, 0)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    fn write_synced(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        match self.remove(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = self.open(path, OpenMode::CreateNew)?;
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        file.write_all_at(&padded, 0)?;
        file.truncate(bytes.len() as u64)?;
        file.sync()
    }

    fn write_file(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let temporary = temporary_path(path);
        self.write_synced(&temporary, bytes)?;
        self.rename(&temporary, path)?;
        self.sync_dir(&directory_of(path))
    }

    fn space(&self, _dir: &Path) -> io::Result<Space> {
        let disk = self.lock();
        let left = disk.capacity_bytes.saturating_sub(disk.used_bytes());
        Ok(Space {
            total_bytes: disk.capacity_bytes,
            available_bytes: left,
        })
    }

    fn modified_ms(&self, path: &Path) -> io::Result<i64> {
        let disk = self.lock();
        let number = disk.names.get(path).ok_or_else(|| errno(libc::ENOENT))?;
        Ok(disk.inodes.get(number).map_or(0, Inode::modified_ms))
    }
}
