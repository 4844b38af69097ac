//! Laying settings over each other: default, file, environment, command line.
//!
//! Invariant: every value knows where it came from, and a value that is not understood stops the
//! start with the place it stands at. Nothing is dropped in silence but what the list of Java-only
//! keys names.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::properties;
use super::table::{Fault, Table};

/// Prefix of environment variables that set a key: `PINION_CONF_brokerIP1`,
/// `PINION_CONF_pinion_shards`.
pub const ENVIRONMENT_PREFIX: &str = "PINION_CONF_";

/// Longest value that is shown in a message.
const SHOWN_CHARS_MAX: usize = 80;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The program's own default.
    Default,
    /// A line of a config file.
    File {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
    },
    /// An environment variable.
    Environment(String),
    /// A command line option.
    CommandLine(String),
    /// Worked out from the machine or from other values.
    Derived(String),
    /// A request of an administrator since the start.
    Administrator,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{} line {line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::CommandLine(option) => write!(f, "command line {option}"),
            Self::Derived(how) => f.write_str(how),
            Self::Administrator => f.write_str("changed by an administrator"),
        }
    }
}

/// Why a configuration was refused. The text is meant for the operator as it stands.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the config file {path}: {what}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        what: String,
    },
    /// The file is not properties text.
    #[error("{path} line {line}: {what}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Its line.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A value is malformed.
    #[error("{origin}: {key}={value} is not accepted; expected {expected}{hint}")]
    Value {
        /// Where the value stands.
        origin: Origin,
        /// The key as it was written.
        key: String,
        /// The value, shortened for showing.
        value: String,
        /// What a value looks like.
        expected: String,
        /// What the writer may have meant.
        hint: &'static str,
    },
    /// Values that do not go together.
    #[error("{0}")]
    Conflict(String),
}

/// One key with its value from a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The key.
    pub key: String,
    /// The value.
    pub value: String,
    /// The option it was given by.
    pub option: String,
}

/// Everything a configuration is read from, lowest layer first.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// Defaults of this way of starting: key, value and reason.
    pub defaults: Vec<(&'static str, String, String)>,
    /// The config file.
    pub file: Option<PathBuf>,
    /// Where changes are stored when there is no config file; read as one when it exists.
    pub stored: Option<PathBuf>,
    /// Environment variables.
    pub environment: Vec<(String, String)>,
    /// Command line options.
    pub command_line: Vec<Setting>,
}

/// A table of settings with the origin of each, and what could not be placed in it.
#[derive(Debug, Clone)]
pub struct Layered<T: Table> {
    /// The values.
    pub keys: T,
    origins: BTreeMap<&'static str, Origin>,
    /// Keys that mean nothing here, known from Java or unknown, kept for showing.
    others: BTreeMap<String, String>,
    pub(super) notes: Vec<String>,
    file: Option<PathBuf>,
    stored: Option<PathBuf>,
}

/// Key, value and name of a variable that sets a key.
pub(super) type FromEnvironment = (String, String, String);

impl<T: Table> Default for Layered<T> {
    fn default() -> Self {
        Self {
            keys: T::default(),
            origins: BTreeMap::new(),
            others: BTreeMap::new(),
            notes: Vec::new(),
            file: None,
            stored: None,
        }
    }
}

impl<T: Table> std::ops::Deref for Layered<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.keys
    }
}

impl<T: Table> Layered<T> {
    /// Reads all layers. `variables` says which environment variables set which keys.
    ///
    /// # Errors
    /// When the file cannot be read or a value is malformed.
    pub(super) fn read(
        sources: &Sources,
        variables: fn(&[(String, String)]) -> Vec<FromEnvironment>,
    ) -> Result<Self, ConfigError> {
        let mut layered = Self {
            stored: sources.stored.clone(),
            ..Self::default()
        };
        for (key, value, reason) in &sources.defaults {
            layered.set(key, value, Origin::Derived(reason.clone()))?;
        }
        let stored = sources.stored.as_ref().filter(|path| path.exists());
        if let Some(path) = sources.file.as_ref().or(stored) {
            layered.read_file(path)?;
        }
        for (key, value, name) in variables(&sources.environment) {
            layered.note_if_file_is_overruled(&key, &value, &name);
            layered.set(&key, &value, Origin::Environment(name))?;
        }
        for setting in &sources.command_line {
            let origin = Origin::CommandLine(setting.option.clone());
            layered.set(&setting.key, &setting.value, origin)?;
        }
        Ok(layered)
    }

    fn read_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = read_text(path)?;
        let entries = properties::parse(&text).map_err(|fault| ConfigError::Syntax {
            path: path.to_owned(),
            line: fault.line,
            what: fault.what,
        })?;
        self.file = Some(path.to_owned());
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        for entry in entries {
            let name = T::info(&entry.key)
                .map_or(entry.key.as_str(), |info| info.name)
                .to_owned();
            if let Some(first) = seen.insert(name, entry.line) {
                self.notes.push(format!(
                    "{} line {}: {} was set on line {first} already; the later line counts",
                    path.display(),
                    entry.line,
                    entry.key
                ));
            }
            let origin = Origin::File {
                path: path.to_owned(),
                line: entry.line,
            };
            self.set(&entry.key, &entry.value, origin)?;
        }
        Ok(())
    }

    fn note_if_file_is_overruled(&mut self, key: &str, value: &str, variable: &str) {
        let Some(Origin::File { path, line }) = self.origin_of(key) else {
            return;
        };
        if self.keys.text_of(key).is_none_or(|now| now == value) {
            return;
        }
        let place = format!("{} line {line}", path.display());
        self.notes
            .push(format!("environment {variable} overrules {key} of {place}"));
    }

    /// Sets a key, whatever layer it comes from.
    ///
    /// # Errors
    /// When the value is malformed.
    pub fn set(&mut self, key: &str, value: &str, origin: Origin) -> Result<(), ConfigError> {
        let Some(info) = T::info(key) else {
            if !T::IGNORED.contains(&key) {
                self.notes.push(unknown_key_note::<T>(key, &origin));
            }
            self.others.insert(key.to_owned(), value.to_owned());
            return Ok(());
        };
        let outcome = if has_comment(value) {
            Err(Fault::Expected(info.expected.to_owned()))
        } else {
            self.keys.set_text(info.name, value)
        };
        match outcome {
            Ok(()) => {
                self.origins.insert(info.name, origin);
                Ok(())
            }
            Err(Fault::UnknownKey) => Ok(()),
            Err(Fault::Expected(expected)) => Err(ConfigError::Value {
                origin,
                key: key.to_owned(),
                value: shown(value),
                hint: hint_for(value, &expected),
                expected,
            }),
        }
    }

    /// Notes the origin of a value that was worked out.
    pub(super) fn derived(&mut self, key: &str, how: impl Into<String>) {
        if let Some(info) = T::info(key) {
            self.origins.insert(info.name, Origin::Derived(how.into()));
        }
    }

    /// Keeps a key that has no meaning here.
    pub(super) fn keep_other(&mut self, key: &str, value: &str) {
        self.others.insert(key.to_owned(), value.to_owned());
    }

    /// Where the value of `key` came from.
    #[must_use]
    pub fn origin_of(&self, key: &str) -> Option<&Origin> {
        let info = T::info(key)?;
        Some(self.origins.get(info.name).unwrap_or(&Origin::Default))
    }

    /// Whether `key` was set by anyone.
    #[must_use]
    pub fn is_set(&self, key: &str) -> bool {
        self.origin_of(key)
            .is_some_and(|origin| *origin != Origin::Default)
    }

    /// What should be said once at start: unknown keys, doubles, overruled lines.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The config file in use.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The file that changes of an administrator are written into.
    #[must_use]
    pub fn file_for_changes(&self) -> Option<&Path> {
        self.file.as_deref().or(self.stored.as_deref())
    }

    /// Effective settings as the Java tools read them: one escaped `key=value` for each.
    #[must_use]
    pub fn to_properties_text(&self) -> String {
        let mut out = String::new();
        for info in T::KEYS {
            let value = self.keys.text_of(info.name).unwrap_or_default();
            properties::push_entry(
                &mut out,
                info.name,
                if is_secret(info.name) { "" } else { &value },
            );
        }
        for (key, value) in &self.others {
            properties::push_entry(&mut out, key, value);
        }
        out
    }

    /// Effective settings with the origin of each, for `--print-config`.
    #[must_use]
    pub fn to_printed_text(&self) -> String {
        let mut out = String::new();
        for info in T::KEYS {
            let value = self.keys.text_of(info.name).unwrap_or_default();
            let value = if is_secret(info.name) && !value.is_empty() {
                "(hidden)"
            } else {
                &value
            };
            let origin = self.origins.get(info.name).unwrap_or(&Origin::Default);
            out.push_str(&format!("{}={value}  # {origin}\n", info.name));
        }
        for (key, value) in &self.others {
            out.push_str(&format!("{key}={value}  # has no meaning here\n"));
        }
        out
    }
}

fn is_secret(key: &str) -> bool {
    matches!(
        key,
        "initAuthenticationUser" | "innerClientAuthenticationCredentials"
    )
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    let fault = |what: String| ConfigError::Read {
        path: path.to_owned(),
        what,
    };
    let file = std::fs::File::open(path).map_err(|error| fault(error.to_string()))?;
    let mut bytes = Vec::new();
    let limit = properties::CONFIG_FILE_BYTES_MAX;
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| fault(error.to_string()))?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > limit {
        return Err(fault(format!(
            "longer than {limit} bytes; is this the right file?"
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error
            .as_bytes()
            .get(..error.utf8_error().valid_up_to())
            .unwrap_or_default();
        let line = valid.iter().filter(|byte| **byte == b'\n').count() + 1;
        fault(format!(
            "line {line} is not UTF-8; write other characters as \\uXXXX"
        ))
    })
}

/// A blank and a comment sign inside a value: Java would take both as part of the value.
fn has_comment(value: &str) -> bool {
    let after_blank = value
        .split_whitespace()
        .skip(1)
        .any(|word| word.starts_with('#'));
    after_blank || value.starts_with('#')
}

/// What is probably wrong, unless blanks belong into such values.
fn hint_for(value: &str, expected: &str) -> &'static str {
    if has_comment(value) || value.contains('#') {
        "; a comment needs a line of its own"
    } else if value.contains(|c: char| c.is_whitespace())
        && !expected.contains("separated by blanks")
    {
        "; there is a blank in it"
    } else if value.starts_with(['"', '\'']) {
        "; values stand without quotes"
    } else {
        ""
    }
}

fn shown(value: &str) -> String {
    if value.chars().count() <= SHOWN_CHARS_MAX {
        return value.to_owned();
    }
    value
        .chars()
        .take(SHOWN_CHARS_MAX)
        .chain("…".chars())
        .collect()
}

fn unknown_key_note<T: Table>(key: &str, origin: &Origin) -> String {
    let key = shown(key);
    match closest_key::<T>(&key) {
        Some(near) => format!("{origin}: unknown key {key} has no effect; did you mean {near}?"),
        None => format!("{origin}: unknown key {key} has no effect"),
    }
}

/// The known key with the fewest differing letters, if it is near enough to be a slip.
#[must_use]
pub fn closest_key<T: Table>(key: &str) -> Option<&'static str> {
    let names = T::KEYS
        .iter()
        .flat_map(|info| info.aliases.iter().chain([&info.name]).copied());
    let lower = key.to_ascii_lowercase();
    let allowed = 1 + key.len() / 5;
    names
        .map(|name| (differing_letters(&lower, &name.to_ascii_lowercase()), name))
        .min()
        .filter(|(distance, _)| *distance <= allowed)
        .map(|(_, name)| name)
}

fn differing_letters(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut next = Vec::with_capacity(row.len());
        let mut left = i + 1;
        next.push(left);
        for ((to, diagonal), above) in b.iter().zip(&row).zip(row.iter().skip(1)) {
            let cost = diagonal + usize::from(from != *to);
            left = cost.min(above + 1).min(left + 1);
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(a.len())
}
