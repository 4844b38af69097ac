//! Run files: the queue units, keys and events of one contiguous range of the commit log.
//!
//! Runs follow each other without a hole; the end of the newest one is the checkpoint that
//! recovery starts from. They are derived data (P8): a run that is missing, damaged or longer than
//! the log is dropped with all newer ones, and the log is read again from where it started.
//!
//! Invariant: every block and section carries a CRC-32, that of a block over its place, too, so
//! that a whole block of another place is no whole block here; no run spans two segments, so that
//! retention drops runs whole.

use std::io;
use std::path::{Path, PathBuf};

use crate::io::{BLOCK_BYTES, OpenMode, Storage, StoreFile};
use crate::queue::Extent;
use crate::units::{UNIT_BYTES, Unit};

/// Units per 4 KiB block; the rest of the block holds its checksum.
pub const UNITS_PER_BLOCK: usize = 127;
/// Keys per 4 KiB block.
pub const KEYS_PER_BLOCK: usize = 255;
const KEY_BYTES: usize = 16;
/// `PNRUN001` is retired: its blocks did not know their places. Such a run is made again.
const MAGIC: &[u8; 8] = b"PNRUN002";
const HEADER_BYTES: usize = 96;

/// The 64-bit hash under which a key of a topic is indexed (FNV-1a over `topic # key`).
#[must_use]
pub fn key_hash(topic: &[u8], key: &[u8]) -> u64 {
    seeded_key_hash(key_seed(topic), key)
}

/// What the hashes of all keys of a topic have in common.
#[must_use]
pub fn key_seed(topic: &[u8]) -> u64 {
    seeded_key_hash(seeded_key_hash(0xcbf2_9ce4_8422_2325, topic), b"#")
}

/// The hash of a key of the topic with this seed.
#[must_use]
pub fn seeded_key_hash(seed: u64, key: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    key.iter().fold(seed, step)
}

/// A key occurrence.
pub type KeyEntry = (u64, i64);

/// One queue's part of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunQueue {
    /// Topic.
    pub topic: Box<str>,
    /// Queue id.
    pub queue_id: i32,
    /// Where its units are.
    pub extent: Extent,
}

/// What is kept of a run in memory, besides the extents in the queues.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RunMeta {
    /// First log position covered.
    pub start: u64,
    /// First position not covered.
    pub end: u64,
    /// Units.
    pub unit_count: u32,
    /// Keys.
    pub key_count: u32,
    /// Byte offset of the unit section.
    pub units_at: u64,
    /// Byte offset of the key section.
    pub keys_at: u64,
    /// Oldest store time in milliseconds.
    pub first_timestamp: i64,
    /// Newest store time in milliseconds.
    pub last_timestamp: i64,
    /// First hash of each key block.
    pub key_fences: Vec<u64>,
}

impl RunMeta {
    /// What [`encode`] found out, for the shard that keeps the metadata.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24 + self.key_fences.len() * 8);
        out.extend_from_slice(&self.unit_count.to_be_bytes());
        out.extend_from_slice(&self.key_count.to_be_bytes());
        out.extend_from_slice(&self.units_at.to_be_bytes());
        out.extend_from_slice(&self.keys_at.to_be_bytes());
        for fence in &self.key_fences {
            out.extend_from_slice(&fence.to_be_bytes());
        }
        out
    }

    /// This metadata, completed by [`RunMeta::to_bytes`] of the encoded run.
    #[must_use]
    pub fn completed_from(mut self, bytes: &[u8]) -> Self {
        let mut cursor = Cursor(bytes);
        self.unit_count = cursor.u32().unwrap_or_default();
        self.key_count = cursor.u32().unwrap_or_default();
        self.units_at = cursor.u64().unwrap_or_default();
        self.keys_at = cursor.u64().unwrap_or_default();
        while let Some(fence) = cursor.u64() {
            self.key_fences.push(fence);
        }
        self
    }
}

/// Everything a run file is made from.
#[derive(Default)]
pub struct RunContent {
    /// Range and times; sections and fences are filled in by [`encode`].
    pub meta: RunMeta,
    /// Shard.
    pub shard: u16,
    /// Queues.
    pub queues: Vec<RunQueue>,
    /// Encoded units in extent order.
    pub units: Vec<u8>,
    /// Keys in any order.
    pub keys: Vec<KeyEntry>,
    /// Events: position and stored form.
    pub events: Vec<(u64, Vec<u8>)>,
}

/// File name of a run.
#[must_use]
pub fn file_name(shard: u16, start: u64) -> String {
    format!("{}.run", crate::address::segment_name(shard, start))
}

/// Byte offset in the file and byte offset in the block of a unit.
#[must_use]
pub fn unit_place(units_at: u64, index: u64) -> (u64, usize) {
    let block = index / UNITS_PER_BLOCK as u64;
    let inside = (index % UNITS_PER_BLOCK as u64) as usize * UNIT_BYTES;
    (units_at + block * BLOCK_BYTES as u64, inside)
}

/// Checksum of what stands in a block and of where the block stands.
fn block_crc(content: &[u8], run_start: u64, at: u64) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(content);
    crc.update(&run_start.to_be_bytes());
    crc.update(&at.to_be_bytes());
    crc.finalize()
}

fn put_block(out: &mut Vec<u8>, content: &[u8], run_start: u64) {
    let start = out.len();
    out.extend_from_slice(content);
    out.resize(start + BLOCK_BYTES - 4, 0);
    let crc = block_crc(
        out.get(start..).unwrap_or_default(),
        run_start,
        start as u64,
    );
    out.extend_from_slice(&crc.to_be_bytes());
}

/// Whether a 4 KiB block of the unit or key section is whole, and the one that belongs `at` this
/// byte of the run that starts at this log position.
#[must_use]
pub fn block_is_whole(block: &[u8], run_start: u64, at: u64) -> bool {
    let Some((content, crc)) = block.split_last_chunk::<4>() else {
        return false;
    };
    block_crc(content, run_start, at) == u32::from_be_bytes(*crc)
}

fn pad(out: &mut Vec<u8>) -> u64 {
    out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
    out.len() as u64
}

/// Encodes a run file and completes its metadata. Sorting the keys is the costly part; this runs
/// on the auxiliary thread.
#[must_use]
pub fn encode(mut content: RunContent) -> (Vec<u8>, RunMeta) {
    content.keys.sort_unstable();
    let mut meta = content.meta;
    meta.unit_count = (content.units.len() / UNIT_BYTES) as u32;
    meta.key_count = content.keys.len() as u32;
    meta.key_fences = content
        .keys
        .chunks(KEYS_PER_BLOCK)
        .filter_map(|c| c.first())
        .map(|(h, _)| *h)
        .collect();
    let mut directory = Vec::new();
    for queue in &content.queues {
        let topic = queue.topic.as_bytes();
        directory.extend_from_slice(&(topic.len() as u16).to_be_bytes());
        directory.extend_from_slice(topic);
        directory.extend_from_slice(&queue.queue_id.to_be_bytes());
        let extent = &queue.extent;
        directory.extend_from_slice(&extent.first_offset.to_be_bytes());
        directory.extend_from_slice(&extent.count.to_be_bytes());
        directory.extend_from_slice(&extent.unit_index.to_be_bytes());
        directory.extend_from_slice(&extent.first_timestamp.to_be_bytes());
        directory.extend_from_slice(&extent.last_timestamp.to_be_bytes());
    }
    for fence in &meta.key_fences {
        directory.extend_from_slice(&fence.to_be_bytes());
    }
    let mut events = Vec::new();
    for (position, event) in &crate::pop::compact(content.events) {
        events.extend_from_slice(&position.to_be_bytes());
        events.extend_from_slice(&(event.len() as u32).to_be_bytes());
        events.extend_from_slice(event);
    }
    let mut out = vec![0; BLOCK_BYTES];
    out.extend_from_slice(&directory);
    let events_at = out.len() as u64;
    out.extend_from_slice(&events);
    meta.units_at = pad(&mut out);
    for chunk in content.units.chunks(UNITS_PER_BLOCK * UNIT_BYTES) {
        put_block(&mut out, chunk, meta.start);
    }
    meta.keys_at = out.len() as u64;
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    for chunk in content.keys.chunks(KEYS_PER_BLOCK) {
        block.clear();
        for (hash, offset) in chunk {
            block.extend_from_slice(&hash.to_be_bytes());
            block.extend_from_slice(&offset.to_be_bytes());
        }
        put_block(&mut out, &block, meta.start);
    }
    let crcs = (crc32fast::hash(&directory), crc32fast::hash(&events));
    let counts = (
        content.queues.len() as u32,
        directory.len() as u32,
        events.len() as u32,
    );
    let header = encode_header(&meta, content.shard, counts, events_at, crcs);
    if let Some(target) = out.get_mut(..header.len()) {
        target.copy_from_slice(&header);
    }
    (out, meta)
}

fn encode_header(
    meta: &RunMeta,
    shard: u16,
    (queues, directory_bytes, event_bytes): (u32, u32, u32),
    events_at: u64,
    (directory_crc, events_crc): (u32, u32),
) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES + 4);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&u32::from(shard).to_be_bytes());
    for value in [
        queues,
        meta.unit_count,
        meta.key_count,
        directory_bytes,
        event_bytes,
    ] {
        header.extend_from_slice(&value.to_be_bytes());
    }
    for value in [meta.start, meta.end, events_at, meta.units_at, meta.keys_at] {
        header.extend_from_slice(&value.to_be_bytes());
    }
    header.extend_from_slice(&meta.first_timestamp.to_be_bytes());
    header.extend_from_slice(&meta.last_timestamp.to_be_bytes());
    header.extend_from_slice(&directory_crc.to_be_bytes());
    header.extend_from_slice(&events_crc.to_be_bytes());
    debug_assert_eq!(header.len(), HEADER_BYTES);
    let crc = crc32fast::hash(&header);
    header.extend_from_slice(&crc.to_be_bytes());
    header
}

/// A run file that has been read and checked.
pub struct LoadedRun {
    /// Metadata.
    pub meta: RunMeta,
    /// Queues.
    pub queues: Vec<RunQueue>,
    /// Events: position and stored form.
    pub events: Vec<(u64, Vec<u8>)>,
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }
    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(*self.take(2)?.first_chunk()?))
    }
    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(*self.take(4)?.first_chunk()?))
    }
    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(*self.take(8)?.first_chunk()?))
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("run file: {what}"))
}

struct RunHeader {
    shard: u32,
    queues: u32,
    directory_bytes: u32,
    event_bytes: u32,
    events_at: u64,
    directory_crc: u32,
    events_crc: u32,
    meta: RunMeta,
}

fn decode_header(block: &[u8]) -> Option<RunHeader> {
    let (content, rest) = block.split_at_checked(HEADER_BYTES)?;
    let crc = u32::from_be_bytes(*rest.first_chunk()?);
    if !content.starts_with(MAGIC) || crc32fast::hash(content) != crc {
        return None;
    }
    let mut cursor = Cursor(content.get(8..)?);
    let shard = cursor.u32()?;
    let queues = cursor.u32()?;
    let unit_count = cursor.u32()?;
    let key_count = cursor.u32()?;
    let directory_bytes = cursor.u32()?;
    let event_bytes = cursor.u32()?;
    let start = cursor.u64()?;
    let end = cursor.u64()?;
    let events_at = cursor.u64()?;
    let units_at = cursor.u64()?;
    let keys_at = cursor.u64()?;
    let first_timestamp = cursor.u64()? as i64;
    let last_timestamp = cursor.u64()? as i64;
    let directory_crc = cursor.u32()?;
    let events_crc = cursor.u32()?;
    let meta = RunMeta {
        start,
        end,
        unit_count,
        key_count,
        units_at,
        keys_at,
        first_timestamp,
        last_timestamp,
        key_fences: Vec::new(),
    };
    Some(RunHeader {
        shard,
        queues,
        directory_bytes,
        event_bytes,
        events_at,
        directory_crc,
        events_crc,
        meta,
    })
}

fn decode_directory(bytes: &[u8], count: u32, run_start: u64) -> Option<(Vec<RunQueue>, Vec<u64>)> {
    let mut cursor = Cursor(bytes);
    let mut queues = Vec::new();
    for _ in 0..count {
        let len = cursor.u16()?;
        let topic = std::str::from_utf8(cursor.take(usize::from(len))?).ok()?;
        let queue_id = cursor.u32()? as i32;
        let first_offset = cursor.u64()?;
        let count = cursor.u32()?;
        let unit_index = cursor.u32()?;
        let first_timestamp = cursor.u64()? as i64;
        let last_timestamp = cursor.u64()? as i64;
        let extent = Extent {
            run_start,
            first_offset,
            count,
            unit_index,
            first_timestamp,
            last_timestamp,
        };
        queues.push(RunQueue {
            topic: topic.into(),
            queue_id,
            extent,
        });
    }
    let mut fences = Vec::with_capacity(cursor.0.len() / 8);
    while !cursor.0.is_empty() {
        fences.push(cursor.u64()?);
    }
    Some((queues, fences))
}

fn decode_events(bytes: &[u8]) -> Option<Vec<(u64, Vec<u8>)>> {
    let mut cursor = Cursor(bytes);
    let mut events = Vec::new();
    while !cursor.0.is_empty() {
        let position = cursor.u64()?;
        let len = cursor.u32()? as usize;
        events.push((position, cursor.take(len)?.to_vec()));
    }
    Some(events)
}

/// Reads a run file's header, directory and events. Unit and key blocks are checked when read.
pub fn load<S: Storage>(storage: &S, path: &Path, shard: u16) -> io::Result<(S::File, LoadedRun)> {
    let file = storage.open(path, OpenMode::Read)?;
    let mut block = vec![0; BLOCK_BYTES];
    if file.read_at(&mut block, 0)? < BLOCK_BYTES {
        return Err(damaged("shorter than its header"));
    }
    let header = decode_header(&block).ok_or_else(|| damaged("header damaged"))?;
    let key_blocks = (header.meta.key_count as usize).div_ceil(KEYS_PER_BLOCK) as u64;
    let bytes = header.meta.keys_at + key_blocks * BLOCK_BYTES as u64;
    if header.shard != u32::from(shard) || file.len_bytes()? < bytes {
        return Err(damaged("of another shard, or cut"));
    }
    let body_bytes = (header.meta.units_at as usize).saturating_sub(BLOCK_BYTES);
    let mut body = vec![0; body_bytes];
    if file.read_at(&mut body, BLOCK_BYTES as u64)? < body_bytes {
        return Err(damaged("directory cut"));
    }
    let directory = body.get(..header.directory_bytes as usize);
    let directory = directory.ok_or_else(|| damaged("directory cut"))?;
    let events_from = (header.events_at as usize).saturating_sub(BLOCK_BYTES);
    let events = body.get(events_from..events_from + header.event_bytes as usize);
    let events = events.ok_or_else(|| damaged("events cut"))?;
    if crc32fast::hash(directory) != header.directory_crc
        || crc32fast::hash(events) != header.events_crc
    {
        return Err(damaged("directory or events damaged"));
    }
    let mut meta = header.meta;
    let (queues, fences) = decode_directory(directory, header.queues, meta.start)
        .ok_or_else(|| damaged("directory"))?;
    meta.key_fences = fences;
    let events = decode_events(events).ok_or_else(|| damaged("events"))?;
    Ok((
        file,
        LoadedRun {
            meta,
            queues,
            events,
        },
    ))
}

/// Writes a run file durably and opens it.
pub fn write<S: Storage>(storage: &S, path: &Path, bytes: &[u8]) -> io::Result<S::File> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    match storage.remove(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = storage.open(&temporary, OpenMode::CreateNew)?;
    file.write_all_at(bytes, 0)?;
    file.sync()?;
    storage.rename(&temporary, path)?;
    if let Some(dir) = path.parent() {
        storage.sync_dir(dir)?;
    }
    Ok(file)
}

/// Decodes the units `from .. from + count` (indexes within the block) of a whole unit block.
pub fn units_in_block(block: &[u8], from: usize, count: usize, out: &mut Vec<Unit>) {
    for index in from..(from + count).min(UNITS_PER_BLOCK) {
        let at = index * UNIT_BYTES;
        out.extend(block.get(at..at + UNIT_BYTES).and_then(Unit::decode));
    }
}

/// Appends the physical offsets that a whole key block holds for a hash.
pub fn keys_in_block(block: &[u8], hash: u64, out: &mut Vec<i64>) {
    let content = block.get(..KEYS_PER_BLOCK * KEY_BYTES).unwrap_or_default();
    for entry in content.chunks_exact(KEY_BYTES) {
        let (Some(a), Some(b)) = (entry.first_chunk::<8>(), entry.last_chunk::<8>()) else {
            return;
        };
        let offset = i64::from_be_bytes(*b);
        // Unused entries are zero twice; a real key may sit at physical offset 0.
        if u64::from_be_bytes(*a) == hash && (hash != 0 || offset != 0) {
            out.push(offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of units of a run, each with its place.
    fn unit_blocks(start: u64) -> Vec<(u64, Vec<u8>)> {
        let content = RunContent {
            meta: RunMeta {
                start,
                end: start + 1,
                ..RunMeta::default()
            },
            shard: 0,
            queues: Vec::new(),
            units: vec![7; 3 * UNITS_PER_BLOCK * UNIT_BYTES],
            keys: Vec::new(),
            events: Vec::new(),
        };
        let (bytes, meta) = encode(content);
        let blocks = bytes.get(meta.units_at as usize..).unwrap();
        let places = (meta.units_at..).step_by(BLOCK_BYTES);
        let blocks = blocks.chunks_exact(BLOCK_BYTES).map(<[u8]>::to_vec);
        places.zip(blocks).collect()
    }

    #[test]
    fn a_block_is_whole_at_its_own_place_only() {
        let blocks = unit_blocks(100);
        assert_eq!(blocks.len(), 3);
        for (at, _) in &blocks {
            for (place, block) in &blocks {
                assert_eq!(block_is_whole(block, 100, *at), at == place);
                assert!(!block_is_whole(block, 101, *at), "of another run");
            }
        }
    }
}
