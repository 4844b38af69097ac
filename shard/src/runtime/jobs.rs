//! What each file job does, over any storage: the auxiliary thread and the simulator run this.
//!
//! Invariant: no step works on more than a bounded piece, so whoever runs the steps decides what
//! happens between them.

use std::io;
use std::path::{Path, PathBuf};

use crate::io::real::temporary_path;
use crate::io::{BLOCK_BYTES, FileJob, JobOutcomeOf, OpenMode, Storage, StoreFile};
use crate::memory::AlignedBuffer;

/// Bytes zeroed between two looks for short jobs.
pub const ZERO_STEP_BYTES: usize = 1024 * 1024;
/// Bytes cut from the end of a file between two looks for short jobs.
pub const REMOVE_STEP_BYTES: u64 = 16 * 1024 * 1024;
/// Ending of the names of files that are being removed.
pub const REMOVING_SUFFIX: &str = ".removing";
/// A job that proceeds in steps.
pub(super) enum Steps<S: Storage> {
    Zero {
        file: S::File,
        at: u64,
        end: u64,
        directory: Option<PathBuf>,
        hand_over: bool,
    },
    Remove {
        file: S::File,
        path: PathBuf,
        left: u64,
    },
}

/// What a job turned into.
pub(super) enum Begun<S: Storage> {
    Finished(JobOutcomeOf<S>),
    Stepwise(Steps<S>),
}

/// Adds operation and path to an error, keeping its kind. The number is kept in the text.
fn at(path: &Path, operation: &str, error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("{operation} {}: {error}", path.display()),
    )
}

/// The name a file is removed under; a start-up removes what it finds under such names.
fn doomed_path(path: &Path) -> PathBuf {
    if path
        .as_os_str()
        .as_encoded_bytes()
        .ends_with(REMOVING_SUFFIX.as_bytes())
    {
        return path.to_path_buf();
    }
    let mut name = path.as_os_str().to_os_string();
    name.push(REMOVING_SUFFIX);
    PathBuf::from(name)
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Carries a short job out, or begins a long one.
pub(super) fn begin<S: Storage>(storage: &S, job: FileJob<S>) -> io::Result<Begun<S>> {
    let finished = match job {
        FileJob::PrepareSegment {
            path,
            recycled,
            bytes,
            zero_first_bytes,
        } => {
            let file = prepare(storage, &path, recycled.as_deref(), bytes)
                .map_err(|e| at(&path, "preparing", e))?;
            return Ok(Begun::Stepwise(Steps::Zero {
                file,
                at: 0,
                end: zero_first_bytes.min(bytes),
                directory: Some(directory_of(&path).to_path_buf()),
                hand_over: true,
            }));
        }
        FileJob::Zero { path, from, bytes } => {
            let file = storage
                .open(&path, OpenMode::ReadWrite)
                .map_err(|e| at(&path, "opening for zeroing", e))?;
            let end = from.saturating_add(bytes);
            return Ok(Begun::Stepwise(Steps::Zero {
                file,
                at: from,
                end,
                directory: None,
                hand_over: false,
            }));
        }
        FileJob::Remove { path } => {
            let file = match storage.open(&path, OpenMode::ReadWrite) {
                Ok(file) => file,
                // Already gone is what was asked for.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(Begun::Finished(JobOutcomeOf::Done));
                }
                Err(error) => return Err(at(&path, "opening for removal", error)),
            };
            let left = file.len_bytes()?;
            // Under its own name a half-cut file could be taken for a damaged one after a crash.
            let doomed = doomed_path(&path);
            if doomed != path {
                storage
                    .rename(&path, &doomed)
                    .map_err(|e| at(&path, "renaming", e))?;
                storage.sync_dir(directory_of(&doomed))?;
            }
            return Ok(Begun::Stepwise(Steps::Remove {
                file,
                path: doomed,
                left,
            }));
        }
        FileJob::Open { path } => JobOutcomeOf::File(
            storage
                .open(&path, OpenMode::ReadWrite)
                .map_err(|e| at(&path, "opening", e))?,
        ),
        FileJob::WriteBlocks { path, bytes } => JobOutcomeOf::File(
            write_blocks(storage, &path, &bytes).map_err(|e| at(&path, "writing", e))?,
        ),
        FileJob::Space { dir } => {
            JobOutcomeOf::Space(storage.space(&dir).map_err(|e| at(&dir, "measuring", e))?)
        }
        FileJob::Call(call) => call(storage)?,
    };
    Ok(Begun::Finished(finished))
}

fn resize<F: StoreFile>(file: &F, bytes: u64) -> io::Result<()> {
    let have = file.len_bytes()?;
    if have > bytes {
        file.truncate(bytes)
    } else if have < bytes {
        file.allocate(bytes)
    } else {
        Ok(())
    }
}

fn prepare<S: Storage>(
    storage: &S,
    path: &Path,
    recycled: Option<&Path>,
    bytes: u64,
) -> io::Result<S::File> {
    if let Some(old) = recycled {
        let file = storage.open(old, OpenMode::ReadWrite)?;
        resize(&file, bytes)?;
        storage.rename(old, path)?;
        if directory_of(old) != directory_of(path) {
            storage.sync_dir(directory_of(old))?;
        }
        return Ok(file);
    }
    let file = match storage.open(path, OpenMode::CreateNew) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            // Left by an attempt that failed after creating it.
            let file = storage.open(path, OpenMode::ReadWrite)?;
            resize(&file, bytes)?;
            return Ok(file);
        }
        created => created?,
    };
    if let Err(error) = file.allocate(bytes) {
        // Without the space the empty file is of no use and would be in the way of a retry.
        drop(file);
        let _ = storage.remove(path);
        return Err(error);
    }
    Ok(file)
}

/// Carries out one step of a long job.
pub(super) fn step<S: Storage>(
    storage: &S,
    steps: Steps<S>,
    zeros: &mut Option<AlignedBuffer>,
) -> io::Result<Begun<S>> {
    match steps {
        Steps::Zero {
            file,
            at,
            end,
            directory,
            hand_over,
        } => {
            if at < end {
                let buffer = match zeros {
                    Some(buffer) => buffer,
                    None => zeros.insert(AlignedBuffer::new(ZERO_STEP_BYTES, false)?),
                };
                let len = (end - at).min(ZERO_STEP_BYTES as u64) as usize;
                // Whole blocks: the end of a direct file is a multiple of the block.
                let len = len.next_multiple_of(BLOCK_BYTES);
                file.write_all_at(buffer.get(..len).unwrap_or_default(), at)?;
                let at = at + len as u64;
                return Ok(Begun::Stepwise(Steps::Zero {
                    file,
                    at,
                    end,
                    directory,
                    hand_over,
                }));
            }
            file.sync()?;
            if let Some(directory) = directory {
                storage.sync_dir(&directory)?;
            }
            let outcome = if hand_over {
                JobOutcomeOf::File(file)
            } else {
                JobOutcomeOf::Done
            };
            Ok(Begun::Finished(outcome))
        }
        Steps::Remove { file, path, left } => {
            if left > 0 {
                let left = left.saturating_sub(REMOVE_STEP_BYTES);
                file.truncate(left)?;
                return Ok(Begun::Stepwise(Steps::Remove { file, path, left }));
            }
            drop(file);
            match storage.remove(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            storage.sync_dir(directory_of(&path))?;
            Ok(Begun::Finished(JobOutcomeOf::Done))
        }
    }
}

fn write_blocks<S: Storage>(storage: &S, path: &Path, bytes: &[u8]) -> io::Result<S::File> {
    let temporary = temporary_path(path);
    match storage.remove(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = storage.open(&temporary, OpenMode::CreateNew)?;
    file.allocate(bytes.len().next_multiple_of(BLOCK_BYTES) as u64)?;
    let mut buffer = AlignedBuffer::new(bytes.len().min(ZERO_STEP_BYTES), false)?;
    let mut offset = 0;
    for part in bytes.chunks(ZERO_STEP_BYTES) {
        buffer.shorten(part.len().next_multiple_of(BLOCK_BYTES));
        buffer.fill(0);
        for (to, byte) in buffer.iter_mut().zip(part) {
            *to = *byte;
        }
        file.write_all_at(&buffer, offset)?;
        offset += buffer.len() as u64;
    }
    file.sync()?;
    storage.rename(&temporary, path)?;
    storage.sync_dir(directory_of(path))?;
    Ok(file)
}
