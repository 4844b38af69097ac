//! Control files: which generations there are and whether the newest is whole.
//!
//! Invariant: what a start would read is what is judged.

use std::collections::BTreeSet;
use std::path::Path;

use crate::settings;

/// One control file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlReport {
    /// Its name.
    pub name: String,
    /// Generation a start would read; nothing when none is whole.
    pub generation: Option<u64>,
    /// Bytes of it.
    pub bytes: usize,
    /// What is wrong.
    pub problem: Option<String>,
}

/// Every control file of a directory.
#[must_use]
pub fn look(dir: &Path) -> Vec<ControlReport> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // Only files kept in generations have a list of checksums.
        let base = name.strip_suffix(".sum").or(name.strip_suffix(".sum2"));
        names.extend(base.map(str::to_owned));
        if name.ends_with(".json") {
            names.insert(name);
        }
    }
    names.into_iter().map(|name| one(dir, name)).collect()
}

fn one(dir: &Path, name: String) -> ControlReport {
    match settings::load(dir, &name) {
        Ok(Some(loaded)) => ControlReport {
            generation: Some(loaded.generation),
            bytes: loaded.bytes.len(),
            problem: loaded.fallback,
            name,
        },
        Ok(None) => ControlReport {
            name,
            generation: None,
            bytes: 0,
            problem: None,
        },
        Err(error) => ControlReport {
            name,
            generation: None,
            bytes: 0,
            problem: Some(error.to_string()),
        },
    }
}
