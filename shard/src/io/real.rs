//! The real file system behind [`Storage`], with O_DIRECT where it can be had.
//!
//! Invariant: data files are never read or written through the page cache unless the file system
//! refused O_DIRECT and the setting allows that; whether it happened can be asked.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::{BLOCK_BYTES, Entry, OpenMode, Space, Storage, StoreFile};
use crate::memory::AlignedBuffer;
use crate::runtime::sys;

/// Largest settings file that is read whole, in bytes.
pub const SMALL_FILE_BYTES_MAX: u64 = 1024 * 1024 * 1024;
/// How long [`Storage::settle`] waits for transfers of a dead process.
pub const SETTLE_WAIT: Duration = Duration::from_secs(10);
/// Bytes copied at a time for callers with unaligned memory.
const COPY_BYTES: usize = 1024 * 1024;

/// Whether O_DIRECT is a wish or a condition.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DirectMode {
    /// Use it where the file system can, go on without where it cannot.
    #[default]
    Auto,
    /// Refuse to open data files without it.
    Require,
}

/// The real file system.
#[derive(Clone, Debug)]
pub struct RealStorage {
    direct: DirectMode,
    fell_back: Arc<AtomicBool>,
}

impl RealStorage {
    /// A file system that treats O_DIRECT as told.
    #[must_use]
    pub fn new(direct: DirectMode) -> RealStorage {
        RealStorage {
            direct,
            fell_back: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Whether any data file had to be opened without O_DIRECT.
    #[must_use]
    pub fn fell_back_to_buffered(&self) -> bool {
        self.fell_back.load(Ordering::Relaxed)
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> io::Result<(File, bool)> {
        let refused = match options(mode, libc::O_DIRECT).open(path) {
            Ok(file) => match sys::direct_alignment(&file) {
                Ok(Some(need)) if need.offset_bytes as usize > BLOCK_BYTES => {
                    // CreateNew has made the file by now; it must not fail with EEXIST below.
                    if mode == OpenMode::CreateNew {
                        std::fs::remove_file(path)?;
                    }
                    io::Error::other(format!(
                        "direct transfers need {} byte blocks, more than {BLOCK_BYTES}",
                        need.offset_bytes
                    ))
                }
                _ => return Ok((file, true)),
            },
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => error,
            Err(error) => return Err(error),
        };
        if self.direct == DirectMode::Require {
            return Err(io::Error::new(
                refused.kind(),
                format!(
                    "O_DIRECT is refused for {}: {refused}; use ext4 or XFS, or set direct = auto",
                    path.display()
                ),
            ));
        }
        let file = match options(mode, 0).open(path) {
            // The refused O_DIRECT open may have created the file already (tmpfs on old kernels).
            Err(error)
                if mode == OpenMode::CreateNew
                    && error.kind() == io::ErrorKind::AlreadyExists
                    && std::fs::metadata(path).is_ok_and(|m| m.len() == 0) =>
            {
                options(OpenMode::ReadWrite, 0).open(path)?
            }
            other => other?,
        };
        self.fell_back.store(true, Ordering::Relaxed);
        Ok((file, false))
    }
}

fn options(mode: OpenMode, flags: i32) -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .mode(0o640)
        .custom_flags(flags | libc::O_CLOEXEC);
    match mode {
        OpenMode::Read => {}
        OpenMode::ReadWrite => {
            options.write(true);
        }
        OpenMode::CreateNew => {
            options.write(true).create_new(true);
        }
    }
    options
}

/// One open data file.
#[derive(Debug)]
pub struct RealFile {
    file: File,
    direct: bool,
}

impl RealFile {
    /// Whether it bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }
    /// The open file, for the drivers.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
    /// Flushes data and the metadata needed to read it.
    pub fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn is_aligned(memory: &[u8]) -> bool {
    (memory.as_ptr() as usize).is_multiple_of(BLOCK_BYTES)
        && memory.len().is_multiple_of(BLOCK_BYTES)
}

fn allocate_or_size(file: &File, bytes: u64, have: u64) -> io::Result<()> {
    match sys::allocate(file, 0, bytes) {
        // File systems without fallocate (some network ones): set the length at least.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            if have < bytes {
                file.set_len(bytes)
            } else {
                Ok(())
            }
        }
        other => other,
    }
}

fn read_some(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + done as u64) {
            Ok(0) => break,
            Ok(count) => {
                done += count;
                // A direct read that is short of a block ended at the end of the file.
                if !done.is_multiple_of(BLOCK_BYTES) {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

impl StoreFile for RealFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let offset_aligned = offset.is_multiple_of(BLOCK_BYTES as u64);
        if !self.direct || (offset_aligned && is_aligned(into)) {
            return read_some(&self.file, into, offset);
        }
        let mut copy = AlignedBuffer::new(
            into.len().saturating_add(BLOCK_BYTES).min(COPY_BYTES),
            false,
        )?;
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let skip = (at % BLOCK_BYTES as u64) as usize;
            let count = read_some(&self.file, &mut copy, at - skip as u64)?;
            let (Some(from), Some(target)) = (copy.get(skip..count), into.get_mut(done..)) else {
                break;
            };
            let part = from.len().min(target.len());
            if part == 0 {
                break;
            }
            for (to, byte) in target.iter_mut().zip(from) {
                *to = *byte;
            }
            done += part;
        }
        Ok(done)
    }

    fn write_all_at(&self, from: &[u8], offset: u64) -> io::Result<()> {
        let block = BLOCK_BYTES as u64;
        let aligned = offset.is_multiple_of(block) && from.len().is_multiple_of(BLOCK_BYTES);
        if !self.direct || (aligned && is_aligned(from)) {
            return self.file.write_all_at(from, offset);
        }
        if !aligned {
            // Rounding a write would change neighbouring bytes behind the caller's back.
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a direct write of {} bytes at {offset} is not in whole blocks",
                    from.len()
                ),
            ));
        }
        let mut copy = AlignedBuffer::new(from.len().min(COPY_BYTES), false)?;
        let mut at = offset;
        for part in from.chunks(COPY_BYTES) {
            copy.shorten(part.len());
            copy.copy_from_slice(part);
            self.file.write_all_at(&copy, at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        let have = self.len_bytes()?;
        if have >= bytes {
            // Holes inside are filled; the length stays.
            return allocate_or_size(&self.file, bytes, have);
        }
        // ext4 hands out all that is left before it fails; others would suffer meanwhile.
        let space = sys::space_of(&self.file)?;
        // A file system that keeps no count says 0 of 0.
        if space.total_bytes > 0 && space.available_bytes < bytes - have {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        allocate_or_size(&self.file, bytes, have).inspect_err(|_| {
            let _ = self.file.set_len(have);
        })
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }
}

impl Storage for RealStorage {
    type File = RealFile;

    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<RealFile> {
        let (file, direct) = self.open_direct(path, mode)?;
        if mode != OpenMode::Read {
            // A shared lock for `settle`: it lives as long as the open file, which a transfer in
            // flight keeps open even when its process is dead.
            let _ = file.try_lock_shared();
        }
        Ok(RealFile { file, direct })
    }

    fn settle(&self, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let deadline = Instant::now() + SETTLE_WAIT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(()),
                Err(std::fs::TryLockError::Error(error)) => {
                    // A file system without locks: nothing to wait for that could be seen.
                    return if error.kind() == io::ErrorKind::Unsupported {
                        Ok(())
                    } else {
                        Err(error)
                    };
                }
                Err(std::fs::TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(std::fs::TryLockError::WouldBlock) => {
                    return Err(io::Error::new(
                        io::ErrorKind::ResourceBusy,
                        format!(
                            "{} is still open for writing elsewhere after {} s: \
                             stop the other process",
                            path.display(),
                            SETTLE_WAIT.as_secs()
                        ),
                    ));
                }
            }
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::hard_link(from, to)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // Removed since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            entries.push(Entry {
                name,
                is_file: metadata.is_file(),
                bytes: metadata.len(),
            });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn create_dirs(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn read_file(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = File::open(path)?;
        let mut bytes = Vec::new();
        file.take(SMALL_FILE_BYTES_MAX + 1)
            .read_to_end(&mut bytes)?;
        if bytes.len() as u64 > SMALL_FILE_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "{} is larger than {SMALL_FILE_BYTES_MAX} bytes",
                    path.display()
                ),
            ));
        }
        Ok(bytes)
    }

    fn write_synced(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn write_file(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let temporary = temporary_path(path);
        self.write_synced(&temporary, bytes)?;
        std::fs::rename(&temporary, path)?;
        match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => self.sync_dir(dir),
            _ => self.sync_dir(Path::new(".")),
        }
    }

    fn space(&self, dir: &Path) -> io::Result<Space> {
        sys::space(dir)
    }

    fn modified_ms(&self, path: &Path) -> io::Result<i64> {
        let modified = std::fs::metadata(path)?.modified()?;
        Ok(match modified.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_millis()).unwrap_or(i64::MAX),
            Err(before) => -i64::try_from(before.duration().as_millis()).unwrap_or(i64::MAX),
        })
    }
}

/// The name a file is written under before it is renamed.
#[must_use]
pub fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(".tmp");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::test_dir;

    #[test]
    fn unaligned_memory_and_unaligned_reads_go_through_a_copy() {
        let dir = test_dir("real");
        let storage = RealStorage::new(DirectMode::Require);
        let file = storage
            .open(&dir.join("file"), OpenMode::CreateNew)
            .unwrap();
        assert!(file.is_direct());
        let content: Vec<u8> = (0..3 * 1024 * 1024 + 8192u32)
            .map(|i| (i % 253) as u8)
            .collect();
        let mut shifted = vec![0u8];
        shifted.extend_from_slice(&content);
        file.write_all_at(&shifted[1..], 4096).unwrap();
        file.sync().unwrap();
        assert_eq!(file.len_bytes().unwrap(), content.len() as u64 + 4096);
        let mut got = vec![0u8; content.len() + 100];
        assert_eq!(file.read_at(&mut got, 4096).unwrap(), content.len());
        assert!(got[..content.len()] == content);
        let mut few = [0u8; 11];
        assert_eq!(file.read_at(&mut few, 4096 + 777).unwrap(), 11);
        assert_eq!(few, content[777..788]);
        assert_eq!(file.read_at(&mut few, 1 << 30).unwrap(), 0);
        let refused = file.write_all_at(&[1; 100], 0).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        assert!(file.write_all_at(&[1; 4096], 5).is_err());
        assert!(!storage.fell_back_to_buffered());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn allocation_says_when_there_is_no_room() {
        let dir = test_dir("room");
        let storage = RealStorage::new(DirectMode::Auto);
        let file = storage
            .open(&dir.join("file"), OpenMode::CreateNew)
            .unwrap();
        // Far beyond the largest file any file system has: nothing is handed out first.
        let refused = file.allocate(1 << 62).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert_eq!(file.len_bytes().unwrap(), 0);
        file.allocate(1 << 20).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 1 << 20);
        file.truncate(4096).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 4096);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn small_files_are_replaced_whole_and_listed() {
        let dir = test_dir("small");
        let storage = RealStorage::new(DirectMode::Auto);
        storage.create_dirs(&dir.join("a/b")).unwrap();
        let path = dir.join("settings.json");
        storage.write_file(&path, b"one").unwrap();
        storage.write_file(&path, b"two!").unwrap();
        assert_eq!(storage.read_file(&path).unwrap(), b"two!");
        let expected = [("a", false), ("settings.json", true)];
        let entries = storage.list(&dir).unwrap();
        let got: Vec<_> = entries
            .iter()
            .map(|e| (e.name.as_str(), e.is_file))
            .collect();
        assert_eq!(got, expected);
        assert!(storage.modified_ms(&path).unwrap() > 1_600_000_000_000);
        storage.rename(&path, &dir.join("x")).unwrap();
        storage.remove(&dir.join("x")).unwrap();
        assert_eq!(
            storage.read_file(&path).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        std::fs::remove_dir_all(dir).unwrap();
    }
}
