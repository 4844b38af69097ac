//! Blocking file access behind a trait, so that recovery, settings files and the auxiliary thread
//! run the same code over the real file system and over the simulated disk.
//!
//! Invariant: nothing here is called on a shard's thread once it serves; there the
//! [`crate::runtime`] seam is used.

use std::io;
use std::path::{Path, PathBuf};

pub mod real;
pub mod sim;

/// Alignment of every direct transfer (offset, length and memory), in bytes.
pub const BLOCK_BYTES: usize = 4096;

/// How a file is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenMode {
    /// Existing file, reading only.
    Read,
    /// Existing file, reading and writing.
    ReadWrite,
    /// New file; an existing one is an error.
    CreateNew,
}

/// One open file. Offsets, lengths and memory are block-aligned.
pub trait StoreFile: Send + Sync + 'static {
    /// Reads at an offset; returns bytes read, short only at the end of the file.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all bytes at an offset.
    fn write_all_at(&self, from: &[u8], offset: u64) -> io::Result<()>;
    /// Flushes data and the metadata needed to read it to the device.
    fn sync(&self) -> io::Result<()>;
    /// Length in bytes.
    fn len_bytes(&self) -> io::Result<u64>;
    /// Sets the length, allocating the space (ENOSPC is reported here).
    fn allocate(&self, bytes: u64) -> io::Result<()>;
    /// Cuts the file.
    fn truncate(&self, bytes: u64) -> io::Result<()>;
}

/// Space of the file system below a path.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Space {
    /// Total bytes.
    pub total_bytes: u64,
    /// Bytes an unprivileged writer may still use.
    pub available_bytes: u64,
}

/// An entry of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// File name.
    pub name: String,
    /// Whether it is a regular file.
    pub is_file: bool,
    /// Length in bytes.
    pub bytes: u64,
}

/// A file system. `direct` files bypass the page cache where the file system can.
pub trait Storage: Clone + Send + Sync + 'static {
    /// Its files.
    type File: StoreFile;
    /// Opens a data file (O_DIRECT unless the file system refuses it and `direct` is `auto`).
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Self::File>;
    /// Waits until nobody has a file open for writing any more. A killed process's transfers can
    /// still be on their way to the device after it is gone; recovery calls this before it reads
    /// or writes a file that such a process may have been writing.
    fn settle(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Ok(())
    }
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Renames a file, replacing the target.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a second name.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Lists a directory.
    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>>;
    /// Creates a directory and its parents.
    fn create_dirs(&self, dir: &Path) -> io::Result<()>;
    /// Makes creations, renames and removals in a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Reads a small file whole (settings; buffered).
    fn read_file(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Writes a small file whole, in place, and syncs it; its name is not synced.
    fn write_synced(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Writes a small file durably: to `path.tmp`, sync, rename, sync of the directory.
    fn write_file(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Space left.
    fn space(&self, dir: &Path) -> io::Result<Space>;
    /// Milliseconds since the epoch of the last modification.
    fn modified_ms(&self, path: &Path) -> io::Result<i64>;
}

/// A blocking call that runs on the auxiliary thread.
pub type BlockingCall<S> = Box<dyn FnOnce(&S) -> io::Result<JobOutcomeOf<S>> + Send>;

/// Work for the auxiliary thread of the disk port.
pub enum FileJob<S: Storage> {
    /// Creates (or reuses by renaming `recycled`) a segment file of `bytes` at `path` and returns
    /// it open. A new file is allocated in full, its first `zero_first_bytes` written with zeros.
    PrepareSegment {
        /// Target path.
        path: PathBuf,
        /// An old segment file to rename instead of creating one.
        recycled: Option<PathBuf>,
        /// Length of the file.
        bytes: u64,
        /// Bytes to write with zeros before returning.
        zero_first_bytes: u64,
    },
    /// Writes zeros to a range of a file in small steps.
    Zero {
        /// The file.
        path: PathBuf,
        /// First byte.
        from: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Opens an existing file for reading and writing.
    Open {
        /// Path.
        path: PathBuf,
    },
    /// Removes a file in small steps (cutting it from the end) so that no writer stalls.
    Remove {
        /// Path.
        path: PathBuf,
    },
    /// Writes a file of blocks with O_DIRECT: `path.tmp`, sync, rename, sync of the directory; the
    /// new file is returned open.
    WriteBlocks {
        /// Target path.
        path: PathBuf,
        /// Content, padded to whole blocks by the job.
        bytes: Vec<u8>,
    },
    /// Measures the space left.
    Space {
        /// Any path on the file system.
        dir: PathBuf,
    },
    /// Anything else that blocks; the broker's settings files use it.
    Call(BlockingCall<S>),
}

/// Outcome of a [`FileJob`], with the file still in the hands of the storage.
pub enum JobOutcomeOf<S: Storage> {
    /// Done, nothing to hand over.
    Done,
    /// An open file; the driver adopts it and reports [`JobOutcome::File`].
    File(S::File),
    /// An open file and something about it.
    FileWith(S::File, Vec<u8>),
    /// Space left.
    Space(Space),
    /// Bytes read.
    Bytes(Vec<u8>),
}

impl<S: Storage> JobOutcomeOf<S> {
    /// Hands the file, if there is one, to a driver's table.
    pub(crate) fn adopted(
        self,
        adopt: impl FnOnce(S::File) -> crate::runtime::FileId,
    ) -> JobOutcome {
        match self {
            JobOutcomeOf::Done => JobOutcome::Done,
            JobOutcomeOf::File(file) => JobOutcome::File(adopt(file)),
            JobOutcomeOf::FileWith(file, bytes) => JobOutcome::FileWith(adopt(file), bytes),
            JobOutcomeOf::Space(space) => JobOutcome::Space(space),
            JobOutcomeOf::Bytes(bytes) => JobOutcome::Bytes(bytes),
        }
    }
}

/// Outcome of a [`FileJob`] as the core sees it.
#[derive(Debug)]
pub enum JobOutcome {
    /// Done, nothing to hand over.
    Done,
    /// An open file, adopted by the driver.
    File(crate::runtime::FileId),
    /// An open file, adopted by the driver, and something about it.
    FileWith(crate::runtime::FileId, Vec<u8>),
    /// Space left.
    Space(Space),
    /// Bytes read.
    Bytes(Vec<u8>),
}
