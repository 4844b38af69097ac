//! Changing settings while running, and writing the change into the config file.
//!
//! Invariant: a change is applied whole or not at all, and a key that could open or break the
//! broker (ports, paths, access, buffers) is never changed over the network.

use std::path::PathBuf;

use super::layers::{Layered, Origin, closest_key};
use super::properties;
use super::table::{Effect, KeyInfo, Table};
use super::{BrokerKeys, Config, NamesrvConfig, NamesrvKeys};
use crate::settings;

/// Most changes in one request.
pub const CHANGES_MAX: usize = 256;

/// Why a change was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// The key may not be changed over the network; answered with `NO_PERMISSION`.
    #[error("{key} cannot be changed while running; set it in the config file and restart")]
    NoPermission {
        /// The key.
        key: String,
    },
    /// The key is not known.
    #[error("unknown key {key}{hint}")]
    UnknownKey {
        /// The key.
        key: String,
        /// The nearest known key.
        hint: String,
    },
    /// The value is malformed.
    #[error("{key}={value} is not accepted; expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What a value looks like.
        expected: String,
    },
    /// The request is not properties text, or too long.
    #[error("the changes are malformed: {0}")]
    Malformed(String),
}

/// One change that was applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// The key.
    pub key: String,
    /// Value before.
    pub before: String,
    /// Value now.
    pub now: String,
    /// When it acts.
    pub effect: Effect,
}

/// Changes on their way into the config file. Writing blocks, so it belongs on a helper thread.
#[derive(Debug, Clone)]
pub struct Persist {
    path: PathBuf,
    changes: Vec<(String, String)>,
}

impl Persist {
    /// The file that is written.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Writes the changes: comments and order of the file stay, the file is replaced whole.
    ///
    /// # Errors
    /// When the file cannot be read or replaced.
    pub fn write(&self) -> std::io::Result<()> {
        let text = match std::fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let out = properties::rewrite(&text, &self.changes).map_err(|fault| {
            std::io::Error::other(format!("line {}: {}", fault.line, fault.what))
        })?;
        settings::replace_file(&self.path, out.as_bytes())
    }
}

impl Config {
    /// Changes one key.
    ///
    /// # Errors
    /// When the key is fixed or unknown, or the value malformed.
    pub fn update(&mut self, key: &str, value: &str) -> Result<Changed, UpdateError> {
        let black_list = self.keys.config_black_list.clone();
        update_one(self, &black_list, key, value)
    }

    /// Changes all keys of a properties text, or none.
    ///
    /// # Errors
    /// As [`Config::update`], for the first key that is refused.
    pub fn update_all(&mut self, text: &str) -> Result<Vec<Changed>, UpdateError> {
        let black_list = self.keys.config_black_list.clone();
        update_all::<BrokerKeys>(self, &black_list, text)
    }
}

impl NamesrvConfig {
    /// Changes all keys of a properties text, or none.
    ///
    /// # Errors
    /// When a key is fixed or unknown, or a value malformed.
    pub fn update_all(&mut self, text: &str) -> Result<Vec<Changed>, UpdateError> {
        let black_list = self.keys.config_black_list.clone();
        update_all::<NamesrvKeys>(self, &black_list, text)
    }
}

impl<T: Table> Layered<T> {
    /// The changes as a job that writes them into the config file; nothing when there is no file to
    /// write.
    #[must_use]
    pub fn persist(&self, changed: &[Changed]) -> Option<Persist> {
        let path = self.file_for_changes()?.to_owned();
        let changes = changed
            .iter()
            .map(|c| (c.key.clone(), c.now.clone()))
            .collect();
        Some(Persist { path, changes })
    }
}

fn update_all<T: Table>(
    config: &mut Layered<T>,
    black_list: &str,
    text: &str,
) -> Result<Vec<Changed>, UpdateError> {
    let entries = properties::parse(text)
        .map_err(|fault| UpdateError::Malformed(format!("line {}: {}", fault.line, fault.what)))?;
    if entries.len() > CHANGES_MAX {
        let what = format!("{} keys, at most {CHANGES_MAX} at once", entries.len());
        return Err(UpdateError::Malformed(what));
    }
    let mut trial = config.clone();
    let mut changed = Vec::with_capacity(entries.len());
    for entry in &entries {
        changed.push(update_one(
            &mut trial,
            black_list,
            &entry.key,
            &entry.value,
        )?);
    }
    *config = trial;
    Ok(changed)
}

fn update_one<T: Table>(
    config: &mut Layered<T>,
    black_list: &str,
    key: &str,
    value: &str,
) -> Result<Changed, UpdateError> {
    let listed = |name: &str| black_list.split(';').any(|listed| listed.trim() == name);
    if listed(key) {
        return Err(UpdateError::NoPermission {
            key: key.to_owned(),
        });
    }
    let Some(info) = T::info(key) else {
        return update_other(config, key, value);
    };
    if info.effect == Effect::Fixed || listed(info.name) {
        return Err(UpdateError::NoPermission {
            key: key.to_owned(),
        });
    }
    let before = config.keys.text_of(info.name).unwrap_or_default();
    match config.set(info.name, value, Origin::Administrator) {
        Ok(()) => Ok(change_of(config, info, before)),
        Err(super::ConfigError::Value {
            expected, value, ..
        }) => Err(UpdateError::Value {
            key: key.to_owned(),
            value,
            expected,
        }),
        Err(other) => Err(UpdateError::Malformed(other.to_string())),
    }
}

fn change_of<T: Table>(config: &Layered<T>, info: &KeyInfo, before: String) -> Changed {
    let now = config.keys.text_of(info.name).unwrap_or_default();
    Changed {
        key: info.name.to_owned(),
        before,
        now,
        effect: info.effect,
    }
}

/// Keys of the Java program are taken as Java would, so that its tools see no failure.
fn update_other<T: Table>(
    config: &mut Layered<T>,
    key: &str,
    value: &str,
) -> Result<Changed, UpdateError> {
    if T::IGNORED.contains(&key) {
        config.keep_other(key, value);
        let (key, now) = (key.to_owned(), value.to_owned());
        return Ok(Changed {
            key,
            before: String::new(),
            now,
            effect: Effect::Start,
        });
    }
    let near = closest_key::<T>(key).map(|near| format!("; did you mean {near}?"));
    Err(UpdateError::UnknownKey {
        key: key.to_owned(),
        hint: near.unwrap_or_default(),
    })
}
