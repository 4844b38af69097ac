//! Write buffers that a process left behind: whose they are, and what they hold that the log does
//! not have yet.
//!
//! Invariant: a buffer counts only when it belongs to the store's last start, as recovery has it;
//! its content is not changed.

use std::path::{Path, PathBuf};

use shard::io::BLOCK_BYTES;
use shard::memory::{LockedRing, RingSpec};

use crate::core::store::{StoreIdentity, buffer_path};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A buffer of the last start.
#[derive(Debug)]
pub struct Buffer {
    ring: LockedRing,
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Position up to which the log has it.
    pub written: u64,
    /// Position up to which it is whole.
    pub published: u64,
}

/// What was found in a shard's place.
#[derive(Debug)]
pub enum Found {
    /// No file.
    Nothing,
    /// One that the next start takes.
    Ours(Buffer),
    /// One that the next start leaves out, and why.
    LeftOut(PathBuf, String),
    /// One that cannot be read or contradicts itself.
    Damaged(PathBuf, String),
}

impl Found {
    /// The buffer, if it counts.
    #[must_use]
    pub fn ours(&self) -> Option<&Buffer> {
        match self {
            Self::Ours(buffer) => Some(buffer),
            _ => None,
        }
    }
}

/// Looks for the buffer of a shard.
#[must_use]
pub fn look(dir: &Path, identity: &StoreIdentity, shard: u16) -> Found {
    let path = buffer_path(dir, identity, shard);
    let bytes = match LockedRing::existing_bytes(&path) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Found::Nothing,
        Err(error) => return Found::Damaged(path, error.to_string()),
    };
    let spec = RingSpec {
        path: Some(path.clone()),
        bytes,
        lock: false,
    };
    let ring = match LockedRing::open(spec) {
        Ok(opened) => opened.ring,
        Err(error) => return Found::Damaged(path, error.to_string()),
    };
    let header = ring.header();
    if header.store_id() != identity.id() || header.shard() != u32::from(shard) {
        return Found::LeftOut(path, "of another store or shard".to_owned());
    }
    if header.epoch() != identity.epoch {
        let (has, wants) = (header.epoch(), identity.epoch);
        return Found::LeftOut(path, format!("of start {has}, the last one was {wants}"));
    }
    let (written, published, bytes) = (header.written(), header.published(), bytes as u64);
    let held = published.checked_sub(written / BLOCK * BLOCK);
    if written > published || held.is_none_or(|held| held > bytes) {
        let words = format!("says written to {written} and whole to {published}");
        return Found::Damaged(path, words);
    }
    Found::Ours(Buffer {
        ring,
        path,
        bytes,
        written,
        published,
    })
}

impl Buffer {
    /// Puts what the next start would write over bytes that were read at a log position.
    pub fn lay_over(&self, position: u64, bytes: &mut [u8]) {
        let end = position + bytes.len() as u64;
        let from = (self.written / BLOCK * BLOCK).max(position);
        let to = self.published.next_multiple_of(BLOCK).min(end);
        if from >= to || self.written == self.published {
            return;
        }
        let whole_to = self.published.clamp(from, to);
        let place = |at: u64| (at - position) as usize;
        if let Some(target) = bytes.get_mut(place(from)..place(whole_to)) {
            target.copy_from_slice(self.ring.slice(from, place(whole_to) - place(from)));
        }
        if let Some(rest) = bytes.get_mut(place(whole_to)..place(to)) {
            rest.fill(0);
        }
    }
}
