//! The store's identity: which store a buffer belongs to, how many shards it has, whether it was
//! closed cleanly.
//!
//! Invariant: the epoch grows with every start, after recovery and before a new buffer is
//! formatted, so that a buffer counts only for the very next start.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shard::io::Storage;

use super::state::CoreError;
use crate::settings;

/// File of the identity below `config/`.
pub const STORE_FILE: &str = "store.json";

/// The identity as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreIdentity {
    /// Random identity, 32 hexadecimal digits.
    pub store_id: String,
    /// Starts so far.
    pub epoch: u64,
    /// Shards.
    pub shards: u16,
    /// Bytes per segment.
    pub segment_bytes: u64,
    /// Whether the last process wrote everything out.
    pub clean: bool,
    /// Directory of the write buffers of the last start that outlive the process.
    #[serde(default)]
    pub buffer_dir: Option<PathBuf>,
}

impl StoreIdentity {
    /// The identity in binary.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        u128::from_str_radix(&self.store_id, 16)
            .unwrap_or(0)
            .to_be_bytes()
    }

    /// Reads the identity, or makes one for a new store; with the number of shards the store had.
    pub fn load_or_new<S: Storage>(
        storage: &S,
        root: &Path,
        shards: u16,
        segment_bytes: u64,
    ) -> Result<(Self, Option<u16>), CoreError> {
        let dir = root.join("config");
        let loaded = settings::load_on(storage, &dir, STORE_FILE);
        let loaded = loaded.map_err(|error| CoreError::Other(error.to_string()))?;
        if let Some(loaded) = loaded {
            let mut found: Self = serde_json::from_slice(&loaded.bytes).map_err(|error| {
                CoreError::Other(format!("{}: {error}", dir.join(STORE_FILE).display()))
            })?;
            let had = found.shards;
            found.shards = had.max(shards);
            return Ok((found, Some(had)));
        }
        let id = random_id().map_err(|source| CoreError::Machine {
            what: "reading /dev/urandom".to_owned(),
            source,
        })?;
        let fresh = Self {
            store_id: format!("{id:032x}"),
            epoch: 0,
            shards,
            segment_bytes,
            clean: true,
            buffer_dir: None,
        };
        Ok((fresh, None))
    }

    /// Saves the identity.
    pub fn save<S: Storage>(&self, storage: &S, root: &Path) -> Result<(), CoreError> {
        let bytes =
            serde_json::to_vec(self).map_err(|error| CoreError::Other(error.to_string()))?;
        settings::save_on(storage, &root.join("config"), STORE_FILE, &bytes)
            .map(|_| ())
            .map_err(|error| CoreError::Other(error.to_string()))
    }
}

fn random_id() -> io::Result<u128> {
    use std::io::Read as _;
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_be_bytes(bytes))
}

/// Holds the store for this process alone.
pub fn lock(root: &Path) -> Result<File, CoreError> {
    let path = root.join("lock");
    let failed = |source| CoreError::Machine {
        what: format!("locking {}", path.display()),
        source,
    };
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path);
    let file = file.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(CoreError::Other(format!(
            "the store {} is in use by another process; stop it, or set storePathRootDir (--data) \
             to another directory",
            root.display()
        ))),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// File of a shard's write buffer in a directory that outlives the process.
#[must_use]
pub fn buffer_path(dir: &Path, identity: &StoreIdentity, shard: u16) -> PathBuf {
    dir.join(format!("pinion-{}-{shard}", identity.store_id))
}

/// Bytes of all files below a directory.
#[must_use]
pub fn bytes_below(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(found) if found.is_dir() => bytes_below(&entry.path()),
            Ok(found) => {
                use std::os::unix::fs::MetadataExt as _;
                found.blocks() * 512
            }
            Err(_) => 0,
        })
        .sum()
}
