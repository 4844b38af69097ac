//! Reading the log in order: where its bytes come from, what stands at a position, and how far it
//! can be believed.
//!
//! Invariant: a record is believed when it stands where it says it stands, its body passes its
//! checksum, and an end mark (or the surviving buffer) vouches for it.

use wire::message::{MAGIC_BLANK, RecordView, peek_len};

use crate::address;
use crate::error::StoreError;
use crate::io::{BLOCK_BYTES, Storage, StoreFile};
use crate::log::BLANK_BYTES;
use crate::mark;
use crate::segments::SegmentFile;

/// Bytes read at once while scanning.
pub const SCAN_BYTES: usize = 1024 * 1024;

/// Where bytes of the log come from while scanning.
pub(crate) struct Source<'a, S: Storage> {
    pub(crate) segments: &'a [SegmentFile<S>],
    pub(crate) segment_bytes: u64,
    chunk: Vec<u8>,
    chunk_start: u64,
    chunk_len: usize,
}

impl<'a, S: Storage> Source<'a, S> {
    /// Nothing read yet.
    pub(crate) fn new(segments: &'a [SegmentFile<S>], segment_bytes: u64) -> Self {
        Self {
            segments,
            segment_bytes,
            chunk: Vec::new(),
            chunk_start: 0,
            chunk_len: 0,
        }
    }

    /// Forgets what has been read, because it is being changed.
    pub(crate) fn forget(&mut self) {
        self.chunk_len = 0;
    }

    /// The segment that holds a position.
    pub(crate) fn segment_of(&self, position: u64) -> Option<&'a SegmentFile<S>> {
        let first = self.segments.first()?.start;
        let index = position.checked_sub(first)? / self.segment_bytes;
        self.segments.get(usize::try_from(index).ok()?)
    }

    /// Up to `len` bytes at a position; fewer at the end of a segment's file.
    pub(crate) fn read(&mut self, position: u64, len: usize) -> Result<&[u8], StoreError> {
        let inside = position.checked_sub(self.chunk_start).map(|at| at as usize);
        let cached = inside.is_some_and(|at| at + len <= self.chunk_len);
        if !cached {
            self.fill(position, len)?;
        }
        let from = (position - self.chunk_start) as usize;
        let to = (from + len).min(self.chunk_len);
        Ok(self.chunk.get(from..to.max(from)).unwrap_or_default())
    }

    fn fill(&mut self, position: u64, len: usize) -> Result<(), StoreError> {
        let block = BLOCK_BYTES as u64;
        let start = position / block * block;
        let want = ((position - start) as usize + len)
            .max(SCAN_BYTES)
            .next_multiple_of(BLOCK_BYTES);
        self.chunk_start = start;
        self.chunk_len = 0;
        let Some(segment) = self.segment_of(position) else {
            return Ok(());
        };
        let room = segment.start + self.segment_bytes - start;
        let want = want.min(room as usize);
        let (path, offset) = (segment.path.clone(), start - segment.start);
        let mut chunk = std::mem::take(&mut self.chunk);
        chunk.resize(want.max(chunk.len()), 0);
        let target = chunk.get_mut(..want).unwrap_or_default();
        let result = self
            .segment_of(position)
            .map_or(Ok(0), |s| s.file.read_at(target, offset));
        self.chunk = chunk;
        self.chunk_len = result.map_err(|error| StoreError::file("read", path, error))?;
        Ok(())
    }
}

/// What stands at a position of the log.
pub(crate) enum Found<'a> {
    /// A whole record.
    Record(RecordView<'a>),
    /// The rest of the segment is blank; the log goes on there.
    Blank(u64),
    /// No record, and why.
    Nothing(String),
}

/// Looks at a position of the log.
pub(crate) fn look<'a, S: Storage>(
    source: &'a mut Source<'_, S>,
    shard: u16,
    position: u64,
) -> Result<Found<'a>, StoreError> {
    let Some(segment) = source.segment_of(position) else {
        return Ok(Found::Nothing("end of the last segment".to_owned()));
    };
    let left = segment.start + source.segment_bytes - position;
    let head = source.read(position, BLANK_BYTES as usize)?;
    let Some((size, magic)) = peek_len(head) else {
        return Ok(Found::Nothing("file ends".to_owned()));
    };
    let size = u64::from(size);
    if magic == MAGIC_BLANK && size == left {
        return Ok(Found::Blank(position + left));
    }
    if size == 0 && magic == 0 {
        return Ok(Found::Nothing("zeros".to_owned()));
    }
    if size > left {
        return Ok(Found::Nothing(format!(
            "length {size} reaches over the segment"
        )));
    }
    let bytes = source.read(position, size as usize)?;
    let view = match RecordView::parse(bytes) {
        Ok(view) => view,
        Err(error) => return Ok(Found::Nothing(format!("no whole record: {error}"))),
    };
    let expected = address::physical(shard, position);
    if view.physical_offset() != expected {
        let found = view.physical_offset();
        return Ok(Found::Nothing(format!(
            "a record of physical offset {found}"
        )));
    }
    if let Err(error) = view.check_body_crc() {
        return Ok(Found::Nothing(format!("body damaged: {error}")));
    }
    Ok(Found::Record(view))
}

/// Records that stand and fall together.
pub(crate) struct Span {
    /// End of what can be believed.
    pub(crate) end: u64,
    /// Why the log ends there, if it does.
    pub(crate) stopped_by: Option<String>,
    /// Checksum for the mark that is missing behind believed records, if one is missing.
    pub(crate) unmarked: Option<u64>,
}

#[derive(Clone, Copy)]
struct Seen {
    position: u64,
    end: u64,
    crc: u32,
}

/// Follows the log from `start`, where a span begins, up to the next end mark. Records in front of
/// `vouched` are believed without one.
pub(crate) fn next_span<S: Storage>(
    source: &mut Source<'_, S>,
    shard: u16,
    start: u64,
    vouched: u64,
) -> Result<Span, StoreError> {
    let mut seen: Vec<Seen> = Vec::new();
    let mut at = start;
    let stopped_by = loop {
        match look(source, shard, at)? {
            Found::Blank(next) => {
                at = next;
                if seen.is_empty() {
                    return Ok(Span {
                        end: at,
                        stopped_by: None,
                        unmarked: None,
                    });
                }
            }
            Found::Record(view) => {
                let end = at + view.total_len() as u64;
                if let Some((from, hash)) = mark::read(&view) {
                    if proves(&seen, start, from, hash) {
                        return Ok(Span {
                            end,
                            stopped_by: None,
                            unmarked: None,
                        });
                    }
                    if end > vouched {
                        break format!("the end mark at {at} does not fit the records before it");
                    }
                }
                seen.push(Seen {
                    position: at,
                    end,
                    crc: crc32fast::hash(view.raw()),
                });
                at = end;
            }
            Found::Nothing(reason) => break reason,
        }
    };
    let believed = seen.partition_point(|record| record.end <= vouched);
    let believed = seen.get(..believed).unwrap_or_default();
    let hash = believed
        .iter()
        .fold(0, |hash, record| mark::mix(hash, record.crc));
    Ok(Span {
        end: believed.last().map_or(start, |record| record.end),
        stopped_by: Some(stopped_by),
        unmarked: (!believed.is_empty()).then_some(hash),
    })
}

/// Whether a mark over `from ..` agrees with the records seen since `start`.
fn proves(seen: &[Seen], start: u64, from: u64, hash: u64) -> bool {
    let covered = seen.iter().filter(|record| record.position >= from);
    // A mark that reaches back over the start covers what an earlier start has believed already.
    from < start || covered.fold(0, |hash, record| mark::mix(hash, record.crc)) == hash
}
