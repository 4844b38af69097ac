//! Segment files at start-up: opening them, repairing the last one, clearing what lies behind the
//! end of the log.
//!
//! Invariant: nothing in front of the end of the log is ever changed here, and a file whose wrong
//! length or content would lose messages in the middle of the log stops the start.

use std::collections::VecDeque;
use std::path::PathBuf;

use crate::address;
use crate::error::StoreError;
use crate::io::{BLOCK_BYTES, OpenMode, Storage, StoreFile};
use crate::memory::LockedRing;
use crate::recovery::{FIRST_ZERO_BYTES, RecoveryReport};
use crate::shard::ShardConfig;

/// Ending of files whose removal was under way.
pub(crate) const REMOVING_SUFFIX: &str = ".removing";
const STEP_BYTES: u64 = 1024 * 1024;

/// One segment file found at start.
pub struct SegmentFile<S: Storage> {
    /// Position of its first byte.
    pub start: u64,
    /// Path.
    pub path: PathBuf,
    /// The open file.
    pub file: S::File,
    /// Its length when found.
    pub bytes: u64,
}

/// Opens all segments of a shard in order; makes the first one of a new store.
pub(crate) fn open_all<S: Storage>(
    storage: &S,
    config: &ShardConfig,
    repairs: &mut Vec<String>,
) -> Result<Vec<SegmentFile<S>>, StoreError> {
    let dir = &config.log_dir;
    let entries = storage
        .list(dir)
        .map_err(|error| StoreError::file("list", dir, error))?;
    let mut found: Vec<(u64, PathBuf, u64)> = Vec::new();
    for entry in entries {
        match address::parse_segment_name(&entry.name) {
            Some((shard, start)) if entry.is_file && shard == config.number => {
                found.push((start, dir.join(&entry.name), entry.bytes));
            }
            Some((_, _)) if entry.is_file => {}
            None if entry.is_file && entry.name.ends_with(REMOVING_SUFFIX) => {
                let path = dir.join(&entry.name);
                storage
                    .remove(&path)
                    .map_err(|error| StoreError::file("remove", &path, error))?;
            }
            _ => repairs.push(format!(
                "{}: not a segment, left alone",
                dir.join(&entry.name).display()
            )),
        }
    }
    found.sort();
    if found.is_empty() {
        return Ok(vec![create(storage, config, 0)?]);
    }
    let mut files = Vec::new();
    let mut expected = found.first().map_or(0, |(start, ..)| *start);
    for (start, path, bytes) in found {
        if start % config.segment_bytes != 0 {
            return Err(StoreError::Setting(format!(
                "segment {} does not start at a multiple of mapedFileSizeCommitLog={}: the store \
                 was made with another segment size; set mapedFileSizeCommitLog to that size",
                path.display(),
                config.segment_bytes
            )));
        }
        if start != expected {
            return Err(StoreError::DamagedMiddle {
                at: address::physical(config.number, expected),
                reason: "the segment file that belongs before this one is missing".to_owned(),
                to: address::physical(config.number, start + bytes),
                path,
            });
        }
        expected = start + config.segment_bytes;
        // Writes of a killed process may still be on their way to the file.
        storage
            .settle(&path)
            .map_err(|error| StoreError::file("settle", &path, error))?;
        let file = storage.open(&path, OpenMode::ReadWrite);
        let file = file.map_err(|error| StoreError::file("open", &path, error))?;
        files.push(SegmentFile {
            start,
            path,
            file,
            bytes,
        });
    }
    Ok(files)
}

fn create<S: Storage>(
    storage: &S,
    config: &ShardConfig,
    start: u64,
) -> Result<SegmentFile<S>, StoreError> {
    let path = config
        .log_dir
        .join(address::segment_name(config.number, start));
    let file = storage.open(&path, OpenMode::CreateNew);
    let file = file.map_err(|error| StoreError::file("create", &path, error))?;
    file.allocate(config.segment_bytes)
        .map_err(|error| StoreError::file("allocate", &path, error))?;
    let segment = SegmentFile::<S> {
        start,
        path,
        file,
        bytes: config.segment_bytes,
    };
    let failed = |error| StoreError::file("write zeros to", &segment.path, error);
    let zeros = vec![0; STEP_BYTES.min(config.segment_bytes) as usize];
    let ahead = FIRST_ZERO_BYTES.min(config.segment_bytes);
    for at in (0..ahead).step_by(zeros.len()) {
        let step = (ahead - at).min(zeros.len() as u64) as usize;
        let zeros = zeros.get(..step).unwrap_or_default();
        segment.file.write_all_at(zeros, at).map_err(failed)?;
    }
    sync(&segment)?;
    storage
        .sync_dir(&config.log_dir)
        .map_err(|error| StoreError::file("sync directory", &config.log_dir, error))?;
    Ok(segment)
}

/// Writes zeros over `from .. to` (offsets in the file) wherever something else stands.
fn clear<S: Storage>(segment: &SegmentFile<S>, from: u64, to: u64) -> Result<(), StoreError> {
    let block = BLOCK_BYTES as u64;
    let inside = from % block;
    if inside != 0 {
        patch(segment, from, &vec![0; (block - inside) as usize])?;
    }
    let mut at = from.next_multiple_of(block);
    let failed = |error| StoreError::file("clear", &segment.path, error);
    let zeros = vec![0; STEP_BYTES as usize];
    let mut found = vec![0; STEP_BYTES as usize];
    while at < to {
        let step = STEP_BYTES.min((to - at).next_multiple_of(block)) as usize;
        let found = found.get_mut(..step).unwrap_or_default();
        let count = segment.file.read_at(found, at).map_err(failed)?;
        if found
            .get(..count)
            .unwrap_or_default()
            .iter()
            .any(|byte| *byte != 0)
        {
            let zeros = zeros.get(..step).unwrap_or_default();
            segment.file.write_all_at(zeros, at).map_err(failed)?;
        }
        at += step as u64;
    }
    Ok(())
}

/// Overwrites some bytes of a file, by whole blocks.
pub(crate) fn patch<S: Storage>(
    segment: &SegmentFile<S>,
    offset: u64,
    bytes: &[u8],
) -> Result<(), StoreError> {
    let failed = |error| StoreError::file("overwrite a part of", &segment.path, error);
    let start = offset / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    let inside = (offset - start) as usize;
    let mut blocks = vec![0; (inside + bytes.len()).next_multiple_of(BLOCK_BYTES)];
    segment.file.read_at(&mut blocks, start).map_err(failed)?;
    if let Some(target) = blocks.get_mut(inside..inside + bytes.len()) {
        target.copy_from_slice(bytes);
    }
    segment.file.write_all_at(&blocks, start).map_err(failed)
}

fn sync<S: Storage>(segment: &SegmentFile<S>) -> Result<(), StoreError> {
    segment
        .file
        .sync()
        .map_err(|error| StoreError::file("flush", &segment.path, error))
}

/// Copies what the surviving buffer holds beyond the completed writes to the segments. The bytes
/// are exactly those that group writes would have put there; the scan that follows checks them.
pub(crate) fn write_survivor<S: Storage>(
    files: &mut [SegmentFile<S>],
    config: &ShardConfig,
    ring: Option<&LockedRing>,
) -> Result<u64, StoreError> {
    let Some(ring) = ring else { return Ok(0) };
    let block = BLOCK_BYTES as u64;
    let published = ring.header().published();
    let mut at = ring.header().written() / block * block;
    let first = files.first().map_or(0, |segment| segment.start);
    while at < published {
        let index = at
            .checked_sub(first)
            .map(|inside| inside / config.segment_bytes);
        let index = index.and_then(|index| usize::try_from(index).ok());
        let Some(segment) = index.and_then(|index| files.get_mut(index)) else {
            return Err(StoreError::DamagedMiddle {
                path: config.log_dir.join(address::segment_name(
                    config.number,
                    at / config.segment_bytes * config.segment_bytes,
                )),
                at: address::physical(config.number, at),
                reason: "the segment is missing, and the write buffer holds messages for it".into(),
                to: address::physical(config.number, published),
            });
        };
        let segment_end = segment.start + config.segment_bytes;
        let end = published
            .next_multiple_of(block)
            .min(segment_end)
            .min(at + STEP_BYTES);
        let mut bytes = ring.slice(at, (end - at) as usize).to_vec();
        if end > published {
            bytes
                .get_mut((published - at) as usize..)
                .unwrap_or_default()
                .fill(0);
        }
        segment
            .file
            .write_all_at(&bytes, at - segment.start)
            .map_err(|error| StoreError::file("write", &segment.path, error))?;
        segment.bytes = segment.bytes.max(end - segment.start);
        at = end;
        if at >= published || at == segment_end {
            sync(segment)?;
        }
    }
    Ok(published.saturating_sub(ring.header().written()))
}

/// Refuses to start when messages behind the end of the log would be lost: a segment of a wrong
/// length in front of one with messages (no crash does that), or one that starts with a record too
/// far behind the end to be a remnant of writes in flight at a crash.
pub(crate) fn check_rest<S: Storage>(
    config: &ShardConfig,
    holds_record: &mut dyn FnMut(u64) -> Result<bool, StoreError>,
    files: &[SegmentFile<S>],
    in_flight_bytes_max: u64,
    report: &RecoveryReport,
) -> Result<(), StoreError> {
    let end = report.end;
    let odd = files
        .iter()
        .position(|file| file.bytes != config.segment_bytes);
    for (index, segment) in files.iter().enumerate().rev() {
        let behind_odd = odd.is_some_and(|odd| odd < index);
        let reachable = segment.start <= end.saturating_add(in_flight_bytes_max);
        if (reachable && !behind_odd) || !holds_record(segment.start)? {
            continue;
        }
        let to = address::physical(config.number, segment.start + segment.bytes);
        let from = address::physical(config.number, end);
        if let Some(file) = odd.and_then(|odd| files.get(odd)).filter(|_| behind_odd) {
            return Err(StoreError::MiddleSegment {
                path: file.path.clone(),
                bytes: file.bytes,
                expected: config.segment_bytes,
                from: from.min(address::physical(config.number, file.start + file.bytes)),
                to,
            });
        }
        let at = files
            .iter()
            .find(|file| file.start + config.segment_bytes > end);
        return Err(StoreError::DamagedMiddle {
            path: at.map_or_else(|| config.log_dir.clone(), |file| file.path.clone()),
            at: from,
            reason: report.stopped_by.clone(),
            to,
        });
    }
    Ok(())
}

/// Positions that [`settle`] needs.
#[derive(Clone, Copy)]
pub(crate) struct Ends {
    /// End of the log.
    pub(crate) log: u64,
    /// Everything in front of this is synced already.
    pub(crate) synced: u64,
    /// Remnants of lost writes may stand in front of this.
    pub(crate) clear: u64,
}

/// Segments with records, and prepared ones behind them.
pub(crate) type Settled<S> = (VecDeque<SegmentFile<S>>, VecDeque<SegmentFile<S>>);

/// Splits the files into those with records and prepared ones, repairs lengths, clears the space in
/// which remnants of writes in flight may stand, and syncs whatever the log will count as synced.
pub(crate) fn settle<S: Storage>(
    storage: &S,
    config: &ShardConfig,
    files: Vec<SegmentFile<S>>,
    ends: Ends,
    repairs: &mut Vec<String>,
) -> Result<Settled<S>, StoreError> {
    let end = ends.log;
    let (mut segments, mut ready) = (VecDeque::new(), VecDeque::new());
    let mut broken = false;
    for mut segment in files {
        let segment_end = segment.start + config.segment_bytes;
        let current = segment.start <= end;
        let whole = segment.bytes == config.segment_bytes;
        if !current && (broken || !whole) {
            broken = true;
            repairs.push(format!("{}: incomplete, removed", segment.path.display()));
            let removed = storage.remove(&segment.path);
            removed.map_err(|error| StoreError::file("remove", &segment.path, error))?;
            continue;
        }
        if !whole {
            let (path, bytes) = (segment.path.display(), segment.bytes);
            repairs.push(format!(
                "{path}: had {bytes} bytes, extended to {}",
                config.segment_bytes
            ));
            segment
                .file
                .allocate(config.segment_bytes)
                .map_err(|error| StoreError::file("extend", &segment.path, error))?;
            segment.bytes = config.segment_bytes;
        }
        let (from, to) = (end.max(segment.start), ends.clear.min(segment_end));
        if to > from {
            clear(&segment, from - segment.start, to - segment.start)?;
        }
        if segment_end > ends.synced {
            sync(&segment)?;
        }
        if current {
            segments.push_back(segment);
        } else {
            ready.push_back(segment);
        }
    }
    let have = segments
        .back()
        .map_or(0, |segment| segment.start + config.segment_bytes);
    if segments.is_empty() || have <= end {
        segments.push_back(create(storage, config, end)?);
    }
    Ok((segments, ready))
}
