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
const REMOVING_SUFFIX: &str = ".removing";
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
    let entries = storage.list(dir).map_err(|error| StoreError::file("list", dir, error))?;
    let mut found: Vec<(u64, PathBuf, u64)> = Vec::new();
    for entry in entries {
        match address::parse_segment_name(&entry.name) {
            Some((shard, start)) if entry.is_file && shard == config.number => {
                found.push((start, dir.join(&entry.name), entry.bytes));
            }
            Some((_, _)) if entry.is_file => {}
            None if entry.is_file && entry.name.ends_with(REMOVING_SUFFIX) => {
                let path = dir.join(&entry.name);
                storage.remove(&path).map_err(|error| StoreError::file("remove", &path, error))?;
            }
            _ => repairs.push(format!("{}: not a segment, left alone", dir.join(&entry.name).display())),
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
                "segment {} does not start at a multiple of mapedFileSizeCommitLog={}: the store was \
                 made with another segment size; set mapedFileSizeCommitLog to that size",
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
        storage.settle(&path).map_err(|error| StoreError::file("settle", &path, error))?;
        let file = storage.open(&path, OpenMode::ReadWrite);
        let file = file.map_err(|error| StoreError::file("open", &path, error))?;
        files.push(SegmentFile { start, path, file, bytes });
    }
    Ok(files)
}

fn create<S: Storage>(
    storage: &S,
    config: &ShardConfig,
    start: u64,
) -> Result<SegmentFile<S>, StoreError> {
    let path = config.log_dir.join(address::segment_name(config.number, start));
    let file = storage.open(&path, OpenMode::CreateNew);
    let file = file.map_err(|error| StoreError::file("create", &path, error))?;
    file.allocate(config.segment_bytes)
        .map_err(|error| StoreError::file("allocate", &path, error))?;
    let segment = SegmentFile { start, path, file, bytes: config.segment_bytes };
    clear(&segment, 0, FIRST_ZERO_BYTES.min(config.segment_bytes))?;
    storage
        .sync_dir(&config.log_dir)
        .map_err(|error| StoreError::file("sync directory", &config.log_dir, error))?;
    Ok(segment)
}

/// Writes zeros over `from .. to` (offsets in the file) and syncs.
fn clear<S: Storage>(segment: &SegmentFile<S>, from: u64, to: u64) -> Result<(), StoreError> {
    let failed = |error| StoreError::file("clear", &segment.path, error);
    let block = BLOCK_BYTES as u64;
    let mut at = from;
    let inside = (from % block) as usize;
    if inside != 0 {
        let mut bytes = vec![0; BLOCK_BYTES];
        at = from - inside as u64;
        segment.file.read_at(&mut bytes, at).map_err(failed)?;
        bytes.get_mut(inside..).unwrap_or_default().fill(0);
        segment.file.write_all_at(&bytes, at).map_err(failed)?;
        at += block;
    }
    let zeros = vec![0; STEP_BYTES as usize];
    while at < to {
        let step = STEP_BYTES.min((to - at).next_multiple_of(block));
        let zeros = zeros.get(..step as usize).unwrap_or_default();
        segment.file.write_all_at(zeros, at).map_err(failed)?;
        at += step;
    }
    segment.file.sync().map_err(failed)
}

/// Copies what the surviving buffer holds beyond the completed writes to the segments. The bytes
/// are exactly those that group writes would have put there; the scan that follows checks them.
pub(crate) fn write_survivor<S: Storage>(
    files: &[SegmentFile<S>],
    config: &ShardConfig,
    ring: Option<&LockedRing>,
) -> Result<u64, StoreError> {
    let Some(ring) = ring else { return Ok(0) };
    let block = BLOCK_BYTES as u64;
    let published = ring.header().published();
    let mut at = ring.header().written() / block * block;
    let first = files.first().map_or(0, |segment| segment.start);
    while at < published {
        let index = at.checked_sub(first).map(|inside| inside / config.segment_bytes);
        let Some(segment) = index.and_then(|index| files.get(usize::try_from(index).ok()?)) else {
            break;
        };
        let segment_end = segment.start + config.segment_bytes;
        let end = published.next_multiple_of(block).min(segment_end).min(at + STEP_BYTES);
        let mut bytes = ring.slice(at, (end - at) as usize).to_vec();
        if end > published {
            bytes.get_mut((published - at) as usize..).unwrap_or_default().fill(0);
        }
        segment
            .file
            .write_all_at(&bytes, at - segment.start)
            .map_err(|error| StoreError::file("write", &segment.path, error))?;
        at = end;
        if at >= published || at == segment_end {
            segment.file.sync().map_err(|error| StoreError::file("flush", &segment.path, error))?;
        }
    }
    Ok(published.saturating_sub(ring.header().written()))
}

/// Refuses to start when messages behind the end of the log would be lost: a segment that starts
/// with a record too far behind the end to be a remnant of writes in flight at a crash.
pub(crate) fn check_rest<S: Storage>(
    config: &ShardConfig,
    holds_record: &mut dyn FnMut(u64) -> Result<bool, StoreError>,
    files: &[SegmentFile<S>],
    in_flight_bytes_max: u64,
    report: &RecoveryReport,
) -> Result<(), StoreError> {
    let end = report.end;
    for segment in files.iter().rev() {
        if segment.start <= end.saturating_add(in_flight_bytes_max) {
            break;
        }
        if holds_record(segment.start)? {
            let at = files.iter().find(|file| file.start + config.segment_bytes > end);
            let to = address::physical(config.number, segment.start + segment.bytes);
            let from = address::physical(config.number, end);
            return Err(match at {
                Some(file) if file.bytes != config.segment_bytes => StoreError::MiddleSegment {
                    path: file.path.clone(),
                    bytes: file.bytes,
                    expected: config.segment_bytes,
                    from,
                    to,
                },
                other => StoreError::DamagedMiddle {
                    path: other.map_or_else(|| config.log_dir.clone(), |file| file.path.clone()),
                    at: from,
                    reason: report.stopped_by.clone(),
                    to,
                },
            });
        }
    }
    Ok(())
}

/// Splits the files into those with records and prepared ones, repairs lengths and clears the
/// space in which remnants of writes in flight may stand.
pub(crate) fn settle<S: Storage>(
    storage: &S,
    config: &ShardConfig,
    files: Vec<SegmentFile<S>>,
    end: u64,
    in_flight_bytes_max: u64,
    repairs: &mut Vec<String>,
) -> Result<(VecDeque<SegmentFile<S>>, VecDeque<SegmentFile<S>>), StoreError> {
    let (mut segments, mut ready) = (VecDeque::new(), VecDeque::new());
    let mut broken = false;
    for mut segment in files {
        let segment_end = segment.start + config.segment_bytes;
        let clear_to = end.saturating_add(in_flight_bytes_max);
        if segment_end <= end {
            segments.push_back(segment);
            continue;
        }
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
            repairs.push(format!("{path}: had {bytes} bytes, extended to {}", config.segment_bytes));
            let sized = segment.file.truncate(segment.bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64);
            sized
                .and_then(|()| segment.file.allocate(config.segment_bytes))
                .map_err(|error| StoreError::file("extend", &segment.path, error))?;
            segment.bytes = config.segment_bytes;
        }
        let from = end.max(segment.start);
        if clear_to > from {
            clear(&segment, from - segment.start, clear_to.min(segment_end) - segment.start)?;
        }
        if current {
            segments.push_back(segment);
        } else {
            ready.push_back(segment);
        }
    }
    let have = segments.back().map_or(0, |segment| segment.start + config.segment_bytes);
    if segments.is_empty() || have <= end {
        segments.push_back(create(storage, config, end)?);
    }
    Ok((segments, ready))
}
