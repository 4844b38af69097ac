//! `pinion inspect`: walking a store that no broker has open, and saying what is whole and what is
//! not.
//!
//! Invariant: nothing of the store is changed, and the memory it takes grows with the number of
//! queues, not with the size of the store.

pub mod buffers;
pub mod control_files;
pub mod progress;
pub mod runs;
mod show;
pub mod walk;
mod window;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cli::args::InspectArgs;
use crate::cli::{EXIT_FAILED, EXIT_MALFORMED, complain, say};
use crate::config::BrokerKeys;
use crate::core::store::{STORE_FILE, StoreIdentity};
use crate::doctor::facts::DEFAULT_BUFFER_DIR;
use crate::settings;
use control_files::ControlReport;
use progress::Progress;
use shard::log::UNSYNCED_BYTES_MAX;
use walk::{Filter, ShardReport};

/// Problems printed for each shard; the count is always complete.
pub const PROBLEMS_SHOWN_MAX: usize = 50;

/// What is known of the store besides its segments.
#[derive(Debug, Default)]
pub struct StoreFacts {
    /// The identity, when its file is there and whole.
    pub identity: Option<StoreIdentity>,
    /// Whether the last process was killed before it had written everything out.
    pub is_unclean: bool,
    /// Size of a segment, as the store was made with.
    pub segment_bytes: Option<u64>,
    /// Directory of the run files.
    pub run_dir: Option<PathBuf>,
    /// Write buffers by shard.
    pub buffers: BTreeMap<u16, buffers::Found>,
}

impl StoreFacts {
    /// Reads what lies beside the segments.
    #[must_use]
    pub fn gather(root: &Path, buffer_dir: &Path) -> Self {
        let run_dir = Some(root.join("consumequeue")).filter(|dir| dir.is_dir());
        let loaded = settings::load(&root.join("config"), STORE_FILE)
            .ok()
            .flatten();
        let identity: Option<StoreIdentity> =
            loaded.and_then(|loaded| serde_json::from_slice(&loaded.bytes).ok());
        let Some(identity) = identity else {
            return Self {
                run_dir,
                ..Self::default()
            };
        };
        let buffers =
            (0..identity.shards).map(|shard| (shard, buffers::look(buffer_dir, &identity, shard)));
        Self {
            is_unclean: !identity.clean,
            segment_bytes: Some(identity.segment_bytes),
            run_dir,
            buffers: buffers.collect(),
            identity: Some(identity),
        }
    }

    fn buffer(&self, shard: u16) -> Option<&buffers::Found> {
        self.buffers.get(&shard)
    }

    /// Bytes behind the end of the log that a killed process may have left: what was in its write
    /// buffer, and what the device had not been told to keep.
    fn in_flight_bytes(&self, shard: u16) -> u64 {
        let buffer = self.buffer(shard).and_then(buffers::Found::ours);
        let held = buffer.map_or_else(
            || BrokerKeys::default().buffer_bytes.0,
            |buffer| buffer.bytes,
        );
        held + UNSYNCED_BYTES_MAX
    }
}

/// Everything that was found.
pub struct Findings {
    /// Directory of the store.
    pub root: PathBuf,
    /// What lies beside the segments.
    pub facts: StoreFacts,
    /// Shards.
    pub shards: Vec<ShardReport>,
    /// Control files.
    pub control: Vec<ControlReport>,
}

impl Findings {
    /// Problems in all.
    #[must_use]
    pub fn problems(&self) -> usize {
        let shards: usize = self.shards.iter().map(|shard| shard.problem_count).sum();
        shards
            + self
                .control
                .iter()
                .filter(|file| file.problem.is_some())
                .count()
    }
}

/// Walks the store and prints what it found. Status 0: all whole; 1: damage; 2: no store there, or
/// one in use.
#[must_use]
pub fn run(args: &InspectArgs) -> ExitCode {
    let (root, log_dir) = places(&args.data);
    if is_in_use(&root) {
        complain(&format!(
            "pinion: the store {} is in use; stop the broker first, or copy the store",
            root.display()
        ));
        return ExitCode::from(EXIT_MALFORMED);
    }
    let filter = Filter {
        shard: args.shard,
        topic: args.topic.clone(),
    };
    let mut print_record = |line: &str| say(line);
    let each: walk::EachRecord<'_> = if args.records && !args.json {
        Some(&mut print_record)
    } else {
        None
    };
    let default_dir = PathBuf::from(DEFAULT_BUFFER_DIR);
    let facts = StoreFacts::gather(&root, args.buffer_dir.as_ref().unwrap_or(&default_dir));
    let progress = Progress::told(progress::EVERY, complain);
    match walk::walk(&log_dir, &facts, &filter, each, &progress) {
        Ok(shards) if shards.is_empty() => {
            complain(&format!(
                "pinion: no segment of a commit log in {}",
                log_dir.display()
            ));
            ExitCode::from(EXIT_MALFORMED)
        }
        Ok(shards) => {
            let control = control_files::look(&root.join("config"));
            let findings = Findings {
                root,
                facts,
                shards,
                control,
            };
            if args.json {
                say(&show::json(&findings));
            } else {
                say(&show::text(&findings));
            }
            ExitCode::from(if findings.problems() > 0 {
                EXIT_FAILED
            } else {
                0
            })
        }
        Err(error) => {
            complain(&format!(
                "pinion: cannot read {}: {error}",
                log_dir.display()
            ));
            ExitCode::from(EXIT_MALFORMED)
        }
    }
}

/// Root of the store and directory of its log. The log's directory itself is taken, too.
fn places(data: &Path) -> (PathBuf, PathBuf) {
    let inner = data.join("commitlog");
    if inner.is_dir() {
        return (data.to_owned(), inner);
    }
    let root = data.parent().unwrap_or(data);
    (root.to_owned(), data.to_owned())
}

fn is_in_use(root: &Path) -> bool {
    let Ok(file) = File::open(root.join("lock")) else {
        return false;
    };
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
}
