//! How far a walk has come, for whoever waits for it.
//!
//! Invariant: a walk that is soon over says nothing of itself; a long one never is silent for long.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::config::value::Bytes;

/// Time between two lines, and before the first.
pub const EVERY: Duration = Duration::from_secs(2);

/// Takes a line.
type Say = fn(&str);

/// The walk so far.
#[derive(Debug, Default)]
pub struct Progress {
    /// Time between two lines and who takes them; nobody by default.
    told: Option<(Duration, Say)>,
    /// Bytes in all.
    total: Cell<u64>,
    /// When the last line was said; at first, when the walk began.
    last: Cell<Option<Instant>>,
}

impl Progress {
    /// A progress that is told.
    #[must_use]
    pub fn told(every: Duration, say: Say) -> Self {
        Self {
            told: Some((every, say)),
            ..Self::default()
        }
    }

    /// A walk over so many bytes begins.
    pub fn begin(&self, total: u64) {
        self.total.set(total);
        self.last.set(Some(Instant::now()));
    }

    /// So many of them are behind it.
    pub fn at(&self, done: u64) {
        let (Some((every, say)), Some(last)) = (self.told, self.last.get()) else {
            return;
        };
        if last.elapsed() < every {
            return;
        }
        self.last.set(Some(Instant::now()));
        let total = self.total.get();
        let percent = done.saturating_mul(100) / total.max(1);
        let (done, total) = (Bytes(done), Bytes(total));
        say(&format!("pinion: {done} of {total} read ({percent} %)"));
    }
}
