//! Owns the key-value configuration by namespace and its file format.
//!
//! Invariant: the sum of all names, keys and values stays within [`KV_BYTES_MAX`], and every change
//! is offered to the caller for saving exactly once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most bytes of namespaces, keys and values together.
pub const KV_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Longest namespace or key.
pub const KV_KEY_BYTES_MAX: usize = 1_024;

/// Why the configuration could not be read or changed.
#[derive(Error, Debug)]
pub enum KvError {
    /// The saved file is not the expected JSON.
    #[error("saved key-value configuration is not readable, repair or remove the file: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// The bound is reached.
    #[error(
        "key-value configuration would take {bytes} bytes, the bound is {KV_BYTES_MAX}; \
         delete unused keys first"
    )]
    Full {
        /// Bytes it would take.
        bytes: usize,
    },
    /// A namespace or key is too long.
    #[error("namespace or key of {bytes} bytes is longer than {KV_KEY_BYTES_MAX}")]
    KeyTooLong {
        /// Its length.
        bytes: usize,
    },
}

/// The file as RocketMQ writes it.
#[derive(Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "camelCase")]
struct KvFile {
    #[serde(default)]
    config_table: BTreeMap<String, BTreeMap<String, String>>,
}

/// The key-value configuration.
#[derive(Debug, Default)]
pub struct KvStore {
    file: KvFile,
    bytes: usize,
    changed: bool,
}

impl KvStore {
    /// Reads a saved configuration; no or empty content is an empty one.
    pub fn load(saved: Option<&[u8]>) -> Result<Self, KvError> {
        let Some(saved) = saved.filter(|saved| !saved.trim_ascii().is_empty()) else {
            return Ok(Self::default());
        };
        let file: KvFile = serde_json::from_slice(saved)?;
        let bytes = file
            .config_table
            .iter()
            .map(|(namespace, table)| {
                namespace.len() + table.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>()
            })
            .sum();
        Ok(Self {
            file,
            bytes,
            changed: false,
        })
    }

    /// Sets a value.
    pub fn put(&mut self, namespace: &str, key: &str, value: &str) -> Result<(), KvError> {
        let longest = namespace.len().max(key.len());
        if longest > KV_KEY_BYTES_MAX {
            return Err(KvError::KeyTooLong { bytes: longest });
        }
        let old = self
            .get(namespace, key)
            .map_or(0, |old| key.len() + old.len());
        let new_namespace = if self.namespace(namespace).is_none() {
            namespace.len()
        } else {
            0
        };
        let bytes = self.bytes - old + key.len() + value.len() + new_namespace;
        if bytes > KV_BYTES_MAX {
            return Err(KvError::Full { bytes });
        }
        self.bytes = bytes;
        let table = self
            .file
            .config_table
            .entry(namespace.to_owned())
            .or_default();
        table.insert(key.to_owned(), value.to_owned());
        self.changed = true;
        Ok(())
    }

    /// Removes a value; a namespace that becomes empty stays, as it does with Apache.
    pub fn delete(&mut self, namespace: &str, key: &str) {
        if let Some(table) = self.file.config_table.get_mut(namespace)
            && let Some(old) = table.remove(key)
        {
            self.bytes -= key.len() + old.len();
            self.changed = true;
        }
    }

    /// One value.
    pub fn get(&self, namespace: &str, key: &str) -> Option<&str> {
        self.namespace(namespace)?.get(key).map(String::as_str)
    }

    /// All values of a namespace.
    pub fn namespace(&self, namespace: &str) -> Option<&BTreeMap<String, String>> {
        self.file.config_table.get(namespace)
    }

    /// The file to save, if something changed since the last call.
    pub fn take_to_save(&mut self) -> Option<Vec<u8>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        // Maps of strings always serialise; an empty file would lose data, so rather save nothing.
        serde_json::to_vec(&self.file).ok()
    }
}
