//! Settings files on their way to disk, and what waits for them.
//!
//! A change that somebody ordered is saved before anybody hears of it: what follows its save waits,
//! so that a power cut takes back nothing that was told. A change that use alone made (a group that
//! somebody reads with) is made again by use, so that its save follows and nobody waits for a disk.
//!
//! Invariant: a file's contents are written in the order in which they came to be, so that a file
//! never falls behind one it had; what could not be written is tried again until it is, and until
//! then changes that need it are answered as failures.

use std::collections::{BTreeMap, BTreeSet};

use shard::repeated::Repeated;

use super::control_task::OFFSETS_FILE;
use super::jobs::CoreJob;
use super::settle::CONFIGURATION;
use super::state::State;
use crate::config::Persist;

/// Time until a save that failed is tried again, in microseconds.
const RETRY_US: u64 = 5_000_000;

/// Saves of the control task.
#[derive(Default)]
pub struct Saves {
    /// Whether a save is under way that the effects behind it wait for.
    is_awaited: bool,
    /// Saves under way that nobody waits for.
    under_way: usize,
    /// Files that are behind their tables on disk.
    behind: BTreeSet<&'static str>,
    /// When files that could not be written are tried again; 0 when none failed.
    retry_at_us: u64,
    /// Files whose last write failed, with the reason.
    failed: BTreeMap<&'static str, String>,
    /// Cores that did not store the last change told to shards.
    unsettled_cores: usize,
    failures: Repeated,
    offset_failures: Repeated,
}

impl Saves {
    /// Whether effects wait for a save.
    pub fn are_awaited(&self) -> bool {
        self.is_awaited
    }

    /// A save begins that the effects behind it wait for.
    pub fn begin_awaited(&mut self) {
        self.is_awaited = true;
    }

    /// What effects waited for has ended without a file: some cores may not have stored it.
    fn settled(&mut self, unsettled_cores: usize) {
        self.is_awaited = false;
        self.unsettled_cores = unsettled_cores;
    }

    /// Why a change that needs these files, or with `shards` the shards, may be lost.
    pub fn unkept(&self, names: &[&'static str], shards: bool) -> Option<String> {
        let mut failed = names
            .iter()
            .filter_map(|name| self.failed.get_key_value(name));
        if let Some((name, error)) = failed.next() {
            return Some(format!("disk: {name} not saved: {error}"));
        }
        let cores = self.unsettled_cores;
        (shards && cores > 0).then(|| {
            format!("disk: shards of {cores} cores did not store the change; a crash may undo it")
        })
    }

    /// A file is behind; nobody waits for it.
    pub fn note_behind(&mut self, name: &'static str) {
        self.behind.insert(name);
    }

    /// Whether a file is yet to be written; not one that the disk has refused.
    pub fn has_work(&self) -> bool {
        !self.behind.is_empty() && self.retry_at_us == 0
    }

    /// The files to write now. None while an awaited save is under way: older contents of the same
    /// files may wait behind it.
    fn take_behind(&mut self, now_us: u64) -> BTreeSet<&'static str> {
        if self.is_awaited || self.under_way > 0 || now_us < self.retry_at_us {
            return BTreeSet::new();
        }
        self.under_way = self.behind.len();
        std::mem::take(&mut self.behind)
    }

    /// Takes the end of a save.
    fn ended(
        &mut self,
        now_us: u64,
        (name, is_awaited): (&'static str, bool),
        result: Result<(), String>,
    ) {
        if is_awaited {
            self.is_awaited = false;
        } else {
            self.under_way = self.under_way.saturating_sub(1);
        }
        if result.is_ok() {
            self.failed.remove(name);
        }
        match result {
            Ok(()) if !self.behind.is_empty() => {}
            Ok(()) => {
                self.retry_at_us = 0;
                if let Some(times) = self.failures.worked() {
                    tracing::info!(name, times, "settings files can be saved again");
                }
            }
            Err(error) => {
                self.behind.insert(name);
                self.failed.insert(name, error.clone());
                self.retry_at_us = now_us + RETRY_US;
                if let Some(times) = self.failures.failed(now_us) {
                    tracing::error!(name, times, error, "settings file not saved; trying on");
                }
            }
        }
    }

    /// Takes the end of a change of the configuration file.
    fn persisted(&mut self, result: Result<(), String>) {
        self.is_awaited = false;
        match result {
            Ok(()) => {
                self.failed.remove(CONFIGURATION);
            }
            Err(error) => {
                tracing::error!(error, "configuration file not changed");
                self.failed.insert(CONFIGURATION, error);
            }
        }
    }

    /// Takes the end of a save of the offsets. Whether they are saved.
    fn offsets_ended(&mut self, now_us: u64, result: Result<(), String>) -> bool {
        match result {
            Ok(()) => {
                if let Some(times) = self.offset_failures.worked() {
                    tracing::info!(times, "consumer offsets can be saved again");
                }
                true
            }
            Err(error) => {
                if let Some(times) = self.offset_failures.failed(now_us) {
                    tracing::warn!(error, times, "consumer offsets not saved; the log has them");
                }
                false
            }
        }
    }
}

impl State {
    /// Gives a write that everything behind it waits for.
    pub(super) fn save_awaited(&mut self, name: &'static str, bytes: Vec<u8>) {
        if let Some(task) = &mut self.control {
            task.saves.begin_awaited();
        }
        let is_awaited = true;
        self.jobs.push(CoreJob::Save {
            name,
            bytes,
            is_awaited,
        });
    }

    /// Gives a change of the configuration file that everything behind it waits for.
    pub(super) fn persist_awaited(&mut self, persist: Persist) {
        if let Some(task) = &mut self.control {
            task.saves.begin_awaited();
        }
        self.jobs.push(CoreJob::Persist(persist));
    }

    /// Takes the end of a change of the configuration file. A change that failed is in force and
    /// not tried again: whoever ordered it is told.
    pub(super) fn on_persisted(&mut self, result: Result<(), String>) {
        let Some(task) = &mut self.control else {
            return;
        };
        task.saves.persisted(result);
        self.run_effects();
    }

    /// All shards have what they were told, but for those of some cores.
    pub(super) fn on_settled(&mut self, unsettled_cores: usize) {
        if let Some(task) = &mut self.control {
            task.saves.settled(unsettled_cores);
        }
        self.run_effects();
    }

    /// Gives the writes of the files that are behind.
    pub(super) fn save_behind(&mut self) {
        let now_us = self.now.monotonic_us;
        let Some(task) = &mut self.control else {
            return;
        };
        for name in task.saves.take_behind(now_us) {
            let is_awaited = false;
            match task.control.file_text(name) {
                Ok(bytes) => self.jobs.push(CoreJob::Save {
                    name,
                    bytes,
                    is_awaited,
                }),
                Err(refusal) => {
                    let failed = Err(refusal.remark);
                    task.saves.ended(now_us, (name, is_awaited), failed);
                }
            }
        }
    }

    /// Takes the end of a settings write.
    pub fn on_saved(&mut self, name: &'static str, is_awaited: bool, result: Result<(), String>) {
        let now_us = self.now.monotonic_us;
        let Some(task) = &mut self.control else {
            return;
        };
        if name == OFFSETS_FILE {
            let is_saved = task.saves.offsets_ended(now_us, result);
            return task.offsets_written(is_saved);
        }
        task.saves.ended(now_us, (name, is_awaited), result);
        self.run_effects();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(saves: &mut Saves, now_us: u64) -> Vec<&'static str> {
        saves.take_behind(now_us).into_iter().collect()
    }

    #[test]
    fn places_are_written_before_the_topics_that_need_them() {
        let mut saves = Saves::default();
        saves.note_behind("topics.json");
        saves.note_behind("placement.json");
        assert_eq!(taken(&mut saves, 0), ["placement.json", "topics.json"]);
    }

    #[test]
    fn nothing_overtakes_an_awaited_save_and_a_write_is_under_way_once() {
        let mut saves = Saves::default();
        saves.begin_awaited();
        saves.note_behind("subscriptionGroup.json");
        assert!(taken(&mut saves, 0).is_empty());
        saves.ended(0, ("topics.json", true), Ok(()));
        assert_eq!(taken(&mut saves, 0), ["subscriptionGroup.json"]);
        saves.note_behind("subscriptionGroup.json");
        assert!(taken(&mut saves, 0).is_empty(), "one at a time");
        saves.ended(0, ("subscriptionGroup.json", false), Ok(()));
        assert_eq!(taken(&mut saves, 0), ["subscriptionGroup.json"]);
    }

    #[test]
    fn what_the_disk_refused_is_written_later_awaited_or_not() {
        let mut saves = Saves::default();
        saves.begin_awaited();
        saves.ended(7, ("topics.json", true), Err("read-only".into()));
        assert!(!saves.are_awaited() && !saves.has_work());
        assert!(taken(&mut saves, RETRY_US).is_empty());
        assert_eq!(taken(&mut saves, RETRY_US + 7), ["topics.json"]);
        saves.ended(RETRY_US + 7, ("topics.json", false), Ok(()));
        assert!(taken(&mut saves, 2 * RETRY_US).is_empty());
    }

    #[test]
    fn a_change_whose_file_was_not_saved_is_a_failure_until_the_file_is() {
        let mut saves = Saves::default();
        saves.begin_awaited();
        saves.ended(7, ("topics.json", true), Err("no space".into()));
        let why = saves.unkept(&["placement.json", "topics.json"], false);
        assert_eq!(why.unwrap(), "disk: topics.json not saved: no space");
        assert_eq!(saves.unkept(&["placement.json"], true), None);
        saves.ended(8, ("topics.json", false), Ok(()));
        assert_eq!(saves.unkept(&["topics.json"], true), None);
    }

    #[test]
    fn a_change_that_shards_did_not_store_is_a_failure_and_the_next_is_judged_by_itself() {
        let mut saves = Saves::default();
        saves.begin_awaited();
        saves.settled(1);
        assert!(!saves.are_awaited());
        let why = saves.unkept(&[], true).unwrap();
        assert!(why.starts_with("disk: shards of 1 cores"), "{why}");
        assert_eq!(saves.unkept(&["topics.json"], false), None);
        saves.begin_awaited();
        saves.settled(0);
        assert_eq!(saves.unkept(&[], true), None);
    }
}
