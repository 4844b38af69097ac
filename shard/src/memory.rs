//! Locked memory: the mirrored byte ring a shard writes its log from, and block-aligned buffers.
//!
//! Invariants: a [`LockedRing`] maps the same pages twice back to back, so every range of at most
//! its size is contiguous wherever it starts; its pages exist and are touched before `open`
//! returns, so no later access faults on missing memory or a full tmpfs; whoever needs the memory
//! past the ring (the kernel, a writer thread) holds the [`Mapping`], not a bare pointer.
#![allow(unsafe_code)]

mod aligned;
mod header;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::io::BLOCK_BYTES;
use crate::runtime::sys;

pub use self::aligned::AlignedBuffer;
pub use self::header::RingHeader;
use self::header::{FORMAT_VERSION, MAGIC};

/// Bytes of the mapped header page.
pub const HEADER_BYTES: usize = 4096;
/// Where the data starts in the backing file. A huge page, so that data can be huge-page backed
/// and so that hugetlbfs accepts the offset; the hole after the header costs nothing on tmpfs.
pub const DATA_OFFSET_BYTES: usize = 2 * 1024 * 1024;
/// Largest ring, in bytes.
pub const RING_BYTES_MAX: usize = 64 * 1024 * 1024 * 1024;

/// What went wrong with locked memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size cannot be mapped.
    #[error(
        "a ring of {bytes} bytes is not possible: use a multiple of 4096 (of the huge page size on \
         hugetlbfs) up to {RING_BYTES_MAX}"
    )]
    Size {
        /// The size asked for.
        bytes: usize,
    },
    /// A ring left behind by an earlier process has another size.
    #[error(
        "{path} holds a ring of {have} bytes but {need} are configured: open it with its own size, \
         replay it, remove it, then create the new one"
    )]
    SizeDiffers {
        /// The file.
        path: PathBuf,
        /// Its ring's size.
        have: usize,
        /// The size asked for.
        need: usize,
    },
    /// The file is not a ring, or one of another version.
    #[error("{path} is not a ring this version can read ({detail}): move it away or remove it")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What was found.
        detail: String,
    },
    /// Another process has the ring open.
    #[error("{path} is in use by another process: stop it first")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The system refused.
    #[error("{operation} of {bytes} bytes for {path} failed: {source}")]
    System {
        /// The operation.
        operation: &'static str,
        /// The file, or a name for anonymous memory.
        path: PathBuf,
        /// The size.
        bytes: usize,
        /// Why.
        source: io::Error,
    },
}

/// Locking was refused; the memory is usable but can be paged out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockRefused {
    /// The memlock limit in bytes.
    pub have: u64,
    /// Bytes that had to be locked.
    pub need: u64,
}

/// How a ring is opened.
#[derive(Clone, Debug)]
pub struct RingSpec {
    /// A file on tmpfs or hugetlbfs that outlives the process; `None` for anonymous memory.
    pub path: Option<PathBuf>,
    /// Size of the ring, a multiple of 4096.
    pub bytes: usize,
    /// Whether to lock the memory.
    pub lock: bool,
}

/// An opened ring.
#[derive(Debug)]
pub struct Opened {
    /// The ring.
    pub ring: LockedRing,
    /// Whether a formatted ring of this size was found.
    pub existed: bool,
    /// Whether the memory is locked (`Ok` also when locking was not asked for).
    pub locked: Result<(), LockRefused>,
}

/// The memory of a ring: header page and mirrored data. Unmapped when the last holder drops it.
#[derive(Debug)]
pub struct Mapping {
    header: NonNull<u8>,
    header_bytes: usize,
    data: NonNull<u8>,
    bytes: usize,
    reserved: NonNull<u8>,
    reserved_bytes: usize,
}

// SAFETY: the mapping is plain memory; all shared access goes through atomics (header) or through
// the borrow rules of the one `LockedRing` that owns the data, and through the kernel.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Start of the first mapping of the data.
    pub(crate) fn data_pointer(&self) -> *mut u8 {
        self.data.as_ptr()
    }
    /// A copy of a range of the data; `None` outside of it. The simulated disk reads through it.
    pub(crate) fn copy_out(&self, offset: usize, len: usize) -> Option<Vec<u8>> {
        offset.checked_add(len).filter(|end| *end <= self.bytes)?;
        let mut copy = vec![0; len];
        // SAFETY: the range was checked to lie inside the mapping; the target is fresh. A pointer
        // copy because the owner may hold the ring for writing, as it does beside real transfers.
        unsafe {
            self.data
                .as_ptr()
                .add(offset)
                .copy_to_nonoverlapping(copy.as_mut_ptr(), len)
        };
        Some(copy)
    }
    /// Bytes of the data (of one mapping).
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: both ranges were mapped by `map` and nothing refers to them any more: slices
        // borrow the ring, and other users hold the `Arc`.
        unsafe {
            libc::munmap(self.header.as_ptr().cast(), self.header_bytes);
            libc::munmap(self.reserved.as_ptr().cast(), self.reserved_bytes);
        }
    }
}

/// A byte ring mapped twice back to back, optionally in a file that outlives the process.
#[derive(Debug)]
pub struct LockedRing {
    mapping: Arc<Mapping>,
    /// Keeps the file lock.
    _file: File,
    path: Option<PathBuf>,
}

impl LockedRing {
    /// Opens or creates a ring.
    pub fn open(spec: RingSpec) -> Result<Opened, MemoryError> {
        let RingSpec { path, bytes, lock } = spec;
        let name = path
            .clone()
            .unwrap_or_else(|| PathBuf::from("(anonymous memory)"));
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) || bytes > RING_BYTES_MAX {
            return Err(MemoryError::Size { bytes });
        }
        let opened = match &path {
            Some(path) => open_file(path),
            None => sys::memory_file("pinion-ring"),
        };
        let file = opened.map_err(|source| MemoryError::System {
            operation: "opening",
            path: name,
            bytes,
            source,
        })?;
        LockedRing::open_on(file, path, bytes, lock)
    }

    /// Opens or creates a ring in an open file of memory. The simulator keeps such files across
    /// the crashes of what it simulates.
    pub(crate) fn open_on(
        file: File,
        path: Option<PathBuf>,
        bytes: usize,
        lock: bool,
    ) -> Result<Opened, MemoryError> {
        let name = path
            .clone()
            .unwrap_or_else(|| PathBuf::from("(anonymous memory)"));
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) || bytes > RING_BYTES_MAX {
            return Err(MemoryError::Size { bytes });
        }
        let system = |operation, source| MemoryError::System {
            operation,
            path: name.clone(),
            bytes,
            source,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(MemoryError::InUse { path: name });
            }
            Err(std::fs::TryLockError::Error(source)) => return Err(system("locking", source)),
        }
        let page_bytes = sys::huge_page_bytes(&file).map_err(|e| system("statfs", e))?;
        let header_bytes = page_bytes.unwrap_or(HEADER_BYTES as u64) as usize;
        if !bytes.is_multiple_of(header_bytes) || header_bytes > DATA_OFFSET_BYTES {
            return Err(MemoryError::Size { bytes });
        }
        let found = inspect(&file, &name, bytes)?;
        let end_bytes = (DATA_OFFSET_BYTES + bytes) as u64;
        if !found {
            // A file cut short by a crash during creation holds nothing; start from zeros.
            file.set_len(0).map_err(|e| system("emptying", e))?;
        }
        file.set_len(end_bytes).map_err(|e| system("sizing", e))?;
        if !found {
            let on_file_system = path.as_ref().and_then(|path| sys::space(path).ok());
            let in_memory = page_bytes
                .is_none()
                .then(sys::available_memory_bytes)
                .flatten();
            let on_file_system = on_file_system.map(|space| space.available_bytes);
            check_room(&name, bytes, header_bytes, on_file_system, in_memory)?;
        }
        // Reserving the pages now turns a full tmpfs into an error here instead of SIGBUS later.
        sys::allocate(&file, 0, header_bytes as u64).map_err(|e| system("reserving", e))?;
        sys::allocate(&file, DATA_OFFSET_BYTES as u64, bytes as u64)
            .map_err(|e| system("reserving", e))?;
        let mapping = map(&file, header_bytes, bytes).map_err(|e| system("mmap", e))?;
        touch(&mapping).map_err(|e| system("touching", e))?;
        let locked = if lock {
            lock_memory(mapping.data, bytes)
        } else {
            Ok(())
        };
        let ring = LockedRing {
            mapping: Arc::new(mapping),
            _file: file,
            path,
        };
        Ok(Opened {
            ring,
            existed: found,
            locked,
        })
    }

    /// Size of the ring that an earlier process left at a path, if there is a formatted one.
    pub fn existing_bytes(path: &Path) -> Result<Option<usize>, MemoryError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                let path = path.to_path_buf();
                return Err(MemoryError::System {
                    operation: "opening",
                    path,
                    bytes: 0,
                    source,
                });
            }
        };
        read_format(&file, path)
    }

    /// Writes a fresh header: identity, epoch, shard and size, all positions zero, and the magic
    /// number last, so that a kill in between leaves an unformatted ring.
    pub fn format(&self, store_id: [u8; 16], epoch: u64, shard: u32) {
        let header = self.header();
        header.unformat();
        header.set_store_id(store_id);
        header.set_epoch(epoch);
        header.set_shard(shard);
        header.set_bytes(self.bytes() as u64);
        header.set_base(0);
        header.set_published(0);
        header.set_written(0);
        header.finish_format();
    }

    /// The header page.
    #[must_use]
    pub fn header(&self) -> &RingHeader {
        const { assert!(size_of::<RingHeader>() <= HEADER_BYTES) };
        // SAFETY: the header mapping is page-aligned, at least HEADER_BYTES long, zero or
        // formatted, lives as long as `self.mapping`, and RingHeader consists of atomics only.
        unsafe { self.mapping.header.cast::<RingHeader>().as_ref() }
    }

    /// Bytes of the ring.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// Offset in the ring's memory of a position.
    #[must_use]
    pub fn memory_offset(&self, position: u64) -> usize {
        (position % self.mapping.bytes as u64) as usize
    }

    /// The bytes at a position, contiguous also across the end. A length over the ring's size is
    /// a programmer error; it yields the ring's size.
    #[must_use]
    pub fn slice(&self, position: u64, len: usize) -> &[u8] {
        debug_assert!(
            len <= self.bytes(),
            "slice of {len} bytes in a ring of {}",
            self.bytes()
        );
        let len = len.min(self.bytes());
        let offset = self.memory_offset(position);
        // SAFETY: offset < bytes and len <= bytes, so the range lies inside the 2 * bytes mapped;
        // writers in this process need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.mapping.data.as_ptr().add(offset), len) }
    }

    /// The same for writing.
    pub fn slice_mut(&mut self, position: u64, len: usize) -> &mut [u8] {
        debug_assert!(
            len <= self.bytes(),
            "slice of {len} bytes in a ring of {}",
            self.bytes()
        );
        let len = len.min(self.bytes());
        let offset = self.memory_offset(position);
        // SAFETY: as for `slice`; at most `bytes` long, so the range does not alias itself through
        // the mirror, and `&mut self` makes it the only one in this process.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.data.as_ptr().add(offset), len) }
    }

    /// The file behind the ring, if it outlives the process.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Removes the file; the memory stays usable until the ring is dropped.
    pub fn remove_file(&self) -> io::Result<()> {
        match &self.path {
            Some(path) => match std::fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            },
            None => Ok(()),
        }
    }

    /// The memory, for those who use it past the ring's life (kernel, writer thread, simulator).
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    // A link planted in a world-writable directory must not be followed.
    options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    options.open(path)
}

/// Whether a new ring fits into what is left on the file system and in memory: reserving more than
/// there is would take the machine's memory before it fails.
fn check_room(
    path: &Path,
    bytes: usize,
    header_bytes: usize,
    on_file_system: Option<u64>,
    in_memory: Option<u64>,
) -> Result<(), MemoryError> {
    let need = bytes as u64 + header_bytes as u64;
    for (left, place) in [
        (on_file_system, "on the file system"),
        (in_memory, "in memory"),
    ] {
        if let Some(left) = left.filter(|left| *left < need) {
            let text = format!("{left} bytes are left {place}");
            return Err(MemoryError::System {
                operation: "reserving",
                path: path.to_path_buf(),
                bytes,
                source: io::Error::new(io::ErrorKind::StorageFull, text),
            });
        }
    }
    Ok(())
}

/// Whether the file holds a formatted ring of `bytes`; an error when it holds something else.
fn inspect(file: &File, path: &Path, bytes: usize) -> Result<bool, MemoryError> {
    match read_format(file, path)? {
        None => Ok(false),
        Some(have) if have == bytes => Ok(true),
        Some(have) => Err(MemoryError::SizeDiffers {
            path: path.to_path_buf(),
            have,
            need: bytes,
        }),
    }
}

/// Reads magic, version and size straight from the file.
fn read_format(file: &File, path: &Path) -> Result<Option<usize>, MemoryError> {
    let foreign = |detail: String| MemoryError::Foreign {
        path: path.to_path_buf(),
        detail,
    };
    let length = file.metadata().map_err(|e| foreign(e.to_string()))?.len();
    if length < HEADER_BYTES as u64 {
        return Ok(None);
    }
    // hugetlbfs cannot be read with read(2) everywhere; a mapping works on both.
    let header_bytes = sys::huge_page_bytes(file)
        .ok()
        .flatten()
        .unwrap_or(HEADER_BYTES as u64) as usize;
    let header = map_range(file, 0, header_bytes, libc::PROT_READ)
        .map_err(|e| foreign(format!("mapping its header failed: {e}")))?;
    // SAFETY: the page was just mapped readable and is at least HEADER_BYTES long; the file's
    // length was checked, so reading it does not fault.
    let (magic, version, bytes) = unsafe {
        let header = header.cast::<RingHeader>().as_ref();
        (header.magic(), header.version(), header.bytes())
    };
    // SAFETY: mapped above, no reference is left.
    unsafe { libc::munmap(header.as_ptr().cast(), header_bytes) };
    if magic == 0 {
        return Ok(None);
    }
    if magic != MAGIC {
        return Err(foreign(format!("its first bytes are {magic:#018x}")));
    }
    if version != FORMAT_VERSION {
        return Err(foreign(format!(
            "format version {version}, expected {FORMAT_VERSION}"
        )));
    }
    let expected = bytes.checked_add(DATA_OFFSET_BYTES as u64);
    if bytes == 0 || bytes > RING_BYTES_MAX as u64 || expected != Some(length) {
        return Err(foreign(format!(
            "its header says {bytes} bytes, the file has {length}"
        )));
    }
    Ok(Some(bytes as usize))
}

fn map_range(
    file: &File,
    offset: usize,
    bytes: usize,
    protection: libc::c_int,
) -> io::Result<NonNull<u8>> {
    // SAFETY: a fresh shared mapping at an address the kernel chooses touches nothing existing.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            protection,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset as libc::off_t,
        )
    };
    check_mapping(address)
}

fn check_mapping(address: *mut libc::c_void) -> io::Result<NonNull<u8>> {
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))
}

/// Maps the header, and the data twice into one reserved range that starts at a huge-page
/// boundary.
fn map(file: &File, header_bytes: usize, bytes: usize) -> io::Result<Mapping> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let header = map_range(file, 0, header_bytes, protection)?;
    let reserved_bytes = 2 * bytes + DATA_OFFSET_BYTES;
    // SAFETY: reserves address space only; nothing existing is touched.
    let reserved = check_mapping(unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            reserved_bytes,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    });
    let reserved = match reserved {
        Ok(reserved) => reserved,
        Err(error) => {
            // SAFETY: mapped above, not used.
            unsafe { libc::munmap(header.as_ptr().cast(), header_bytes) };
            return Err(error);
        }
    };
    let slack = reserved
        .as_ptr()
        .align_offset(DATA_OFFSET_BYTES)
        .min(DATA_OFFSET_BYTES);
    // SAFETY: the slack is less than the DATA_OFFSET_BYTES reserved in addition.
    let data = unsafe { reserved.add(slack) };
    // From here on the drop of `mapping` unmaps everything.
    let mapping = Mapping {
        header,
        header_bytes,
        data,
        bytes,
        reserved,
        reserved_bytes,
    };
    for copy in 0..2 {
        // SAFETY: both targets lie inside the range reserved above, which nobody else uses, so
        // MAP_FIXED replaces only our own placeholder.
        let address = unsafe {
            libc::mmap(
                data.as_ptr().add(copy * bytes).cast(),
                bytes,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                DATA_OFFSET_BYTES as libc::off_t,
            )
        };
        check_mapping(address)?;
    }
    Ok(mapping)
}

/// Makes every page present and writable in both mappings, in huge pages where the system can.
fn touch(mapping: &Mapping) -> io::Result<()> {
    let data = mapping.data.as_ptr();
    // SAFETY: advice on memory mapped by us; a refusal changes nothing and is ignored.
    unsafe { libc::madvise(data.cast(), 2 * mapping.bytes, libc::MADV_HUGEPAGE) };
    for copy in 0..2 {
        // SAFETY: inside the mapping; populating keeps the contents.
        let result = unsafe {
            libc::madvise(
                data.add(copy * mapping.bytes).cast(),
                mapping.bytes,
                libc::MADV_POPULATE_WRITE,
            )
        };
        if result == 0 {
            continue;
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
        // Kernels before 5.14: fault each page by a write that keeps its contents.
        for page in (0..mapping.bytes).step_by(BLOCK_BYTES) {
            // SAFETY: inside the mapping; nobody else uses the ring yet.
            unsafe {
                let byte = data.add(copy * mapping.bytes + page);
                byte.write_volatile(byte.read_volatile());
            }
        }
    }
    Ok(())
}

fn lock_memory(start: NonNull<u8>, bytes: usize) -> Result<(), LockRefused> {
    // SAFETY: the range is mapped by the caller; locking changes no contents.
    if unsafe { libc::mlock(start.as_ptr().cast(), bytes) } == 0 {
        return Ok(());
    }
    Err(LockRefused {
        have: sys::memlock_limit_bytes(),
        need: bytes as u64,
    })
}

/// An anonymous file in memory.
pub(crate) fn file_from_descriptor(descriptor: libc::c_int) -> io::Result<File> {
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::test_dir;

    fn spec(path: Option<PathBuf>, bytes: usize) -> RingSpec {
        RingSpec {
            path,
            bytes,
            lock: true,
        }
    }

    #[test]
    fn every_range_is_contiguous_across_the_end() {
        let mut ring = LockedRing::open(spec(None, 8192)).unwrap().ring;
        for start in [0u64, 1, 4095, 8191, 8192, 12_345, u64::MAX - 3] {
            let bytes: Vec<u8> = (0..8192u32).map(|i| (i as u8) ^ start as u8).collect();
            ring.slice_mut(start, 8192).copy_from_slice(&bytes);
            assert!(ring.slice(start, 8192) == bytes);
            let offset = ring.memory_offset(start);
            assert_eq!(offset as u64, start % 8192);
            assert_eq!(ring.slice(0, 8192)[offset], bytes[0]);
        }
    }

    #[test]
    fn a_ring_in_a_file_survives_being_dropped() {
        let dir = test_dir("ring");
        let path = dir.join("shard-0.ring");
        let opened = LockedRing::open(spec(Some(path.clone()), 65536)).unwrap();
        assert!(!opened.existed);
        let mut ring = opened.ring;
        assert!(!ring.header().is_formatted());
        ring.format([7; 16], 3, 5);
        ring.header().set_base(1000);
        ring.header().set_published(70_000);
        ring.header().set_written(4096);
        ring.slice_mut(65_530, 12).copy_from_slice(b"hello, world");
        drop(ring);
        assert_eq!(LockedRing::existing_bytes(&path).unwrap(), Some(65536));
        let opened = LockedRing::open(spec(Some(path.clone()), 65536)).unwrap();
        assert!(opened.existed);
        let header = opened.ring.header();
        assert_eq!(
            (header.store_id(), header.epoch(), header.shard()),
            ([7; 16], 3, 5)
        );
        assert_eq!(
            (header.base(), header.published(), header.written()),
            (1000, 70_000, 4096)
        );
        assert_eq!(opened.ring.slice(65_530, 12), b"hello, world");
        opened.ring.remove_file().unwrap();
        assert!(!path.exists());
        opened.ring.remove_file().unwrap();
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn another_size_another_format_and_another_user_are_refused() {
        let dir = test_dir("ring-refused");
        let path = dir.join("ring");
        assert_eq!(LockedRing::existing_bytes(&path).unwrap(), None);
        let ring = LockedRing::open(spec(Some(path.clone()), 8192))
            .unwrap()
            .ring;
        ring.format([1; 16], 1, 0);
        let second = LockedRing::open(spec(Some(path.clone()), 8192));
        assert!(
            matches!(second, Err(MemoryError::InUse { .. })),
            "{second:?}"
        );
        drop(ring);
        let other = LockedRing::open(spec(Some(path.clone()), 4096));
        assert!(
            matches!(other, Err(MemoryError::SizeDiffers { have: 8192, .. })),
            "{other:?}"
        );
        std::fs::write(&path, vec![0x55; 10_000]).unwrap();
        let foreign = LockedRing::open(spec(Some(path.clone()), 8192));
        assert!(
            matches!(foreign, Err(MemoryError::Foreign { .. })),
            "{foreign:?}"
        );
        // What a crash while creating leaves behind is taken over.
        std::fs::write(&path, vec![0; 5000]).unwrap();
        assert!(
            !LockedRing::open(spec(Some(path.clone()), 8192))
                .unwrap()
                .existed
        );
        for bytes in [0, 1, 4097, usize::MAX - 4095] {
            let refused = LockedRing::open(spec(None, bytes));
            assert!(
                matches!(refused, Err(MemoryError::Size { .. })),
                "{refused:?}"
            );
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn more_than_the_memory_left_is_refused_before_anything_is_reserved() {
        let refused = check_room(Path::new("x"), 100, 4096, Some(99), None).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "reserving of 100 bytes for x failed: 99 bytes are left on the file system"
        );
        assert!(check_room(Path::new("x"), 100, 4096, Some(5000), Some(99)).is_err());
        assert!(check_room(Path::new("x"), 100, 4096, Some(5000), Some(5000)).is_ok());
        assert!(check_room(Path::new("x"), 100, 4096, None, None).is_ok());
    }
}
