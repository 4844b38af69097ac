//! A part of a segment in memory, as the next start would see it: with what the write buffer holds
//! laid over it.
//!
//! Invariant: memory is bounded by the window, whatever the file's size.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::buffers::Buffer;

/// Bytes read at once.
pub const WINDOW_BYTES: usize = 4 << 20;

/// The window.
pub struct Window<'a> {
    file: File,
    /// Length of the file.
    pub bytes: u64,
    segment_start: u64,
    over: Option<&'a Buffer>,
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
    ) -> io::Result<Self> {
        Ok(Self {
            file: File::open(path)?,
            bytes,
            segment_start,
            over,
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
            self.file.read_exact_at(&mut self.buffer, at)?;
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
