//! A part of a segment in memory, as the next start would see it: with what the write buffer holds
//! laid over it.
//!
//! Invariant: memory is bounded by the window, whatever the file's size. A store is larger than the
//! page cache, so that it is read past it: three times as fast, and nothing else is pushed out.

use std::io;
use std::path::Path;

use shard::io::real::{DirectMode, RealFile, RealStorage};
use shard::io::{OpenMode, Storage as _, StoreFile as _};

use super::buffers::Buffer;
use super::progress::Progress;

/// Bytes read at once.
pub const WINDOW_BYTES: usize = 4 << 20;

/// The window.
pub struct Window<'a> {
    file: RealFile,
    /// Length of the file.
    pub bytes: u64,
    segment_start: u64,
    over: Option<&'a Buffer>,
    /// Told of every read, with the bytes of the segments before this one.
    progress: (&'a Progress, u64),
    start: u64,
    buffer: Vec<u8>,
}

impl<'a> Window<'a> {
    /// Opens a segment that begins at a log position.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(
        path: &Path,
        bytes: u64,
        segment_start: u64,
        over: Option<&'a Buffer>,
        progress: (&'a Progress, u64),
    ) -> io::Result<Self> {
        Ok(Self {
            file: RealStorage::new(DirectMode::Auto).open(path, OpenMode::Read)?,
            bytes,
            segment_start,
            over,
            progress,
            start: 0,
            buffer: Vec::new(),
        })
    }

    /// Up to `len` bytes at a position of the file; fewer at its end.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn get(&mut self, at: u64, len: u64) -> io::Result<&[u8]> {
        let len = len.min(self.bytes.saturating_sub(at));
        let end = self.start + self.buffer.len() as u64;
        if at < self.start || at + len > end {
            let want = len
                .max(WINDOW_BYTES as u64)
                .min(self.bytes.saturating_sub(at));
            self.buffer
                .resize(usize::try_from(want).unwrap_or(WINDOW_BYTES), 0);
            let (progress, before) = self.progress;
            progress.at(before + at);
            let read = self.file.read_at(&mut self.buffer, at)?;
            if read < self.buffer.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(over) = self.over {
                over.lay_over(self.segment_start + at, &mut self.buffer);
            }
            self.start = at;
        }
        let from = usize::try_from(at - self.start).unwrap_or(usize::MAX);
        let to = from.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
        Ok(self.buffer.get(from..to).unwrap_or_default())
    }
}
