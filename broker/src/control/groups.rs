//! Owns the table of consumer groups and of the topics a group may not read.
//!
//! Invariant: a group's name is legal and their number stays within [`GROUPS_MAX`].

use std::collections::BTreeMap;
use std::sync::Arc;

use wire::body::{DataVersion, SubscriptionGroupConfig, SubscriptionGroupTable};

use super::ControlError;
use super::answer::{Refusal, to_json};
use super::topics::{member, push_members, read};

/// Most groups of a broker.
pub const GROUPS_MAX: usize = 200_000;
/// Most queues of a group's retry topic.
pub const RETRY_QUEUES_MAX: i32 = 1_024;
/// File of the groups.
pub const GROUPS_FILE: &str = "subscriptionGroup.json";
/// Bit of a forbidden-table entry that says: may not read.
pub const FORBIDDEN_READ: i32 = 1 << 2;

/// Bits of what is forbidden, by topic.
pub type Forbidden = BTreeMap<String, i32>;

/// A group with its part of the file, so that saving one change does not write all groups anew.
#[derive(Debug)]
struct Entry {
    config: Arc<SubscriptionGroupConfig>,
    text: Vec<u8>,
}

impl Entry {
    fn new(config: SubscriptionGroupConfig) -> Self {
        Self {
            text: member(&config.group_name, &config),
            config: Arc::new(config),
        }
    }
}

/// All groups.
#[derive(Debug)]
pub struct GroupTable {
    groups: BTreeMap<Arc<str>, Entry>,
    forbidden: BTreeMap<String, Forbidden>,
    version: DataVersion,
}

/// Checks the numbers of a group.
pub fn check_numbers(config: &SubscriptionGroupConfig) -> Result<(), Refusal> {
    let queues = config.retry_queue_nums;
    if !(0..=RETRY_QUEUES_MAX).contains(&queues) {
        return Err(Refusal::parameter(format!(
            "retryQueueNums of group {} is {queues}, must be 0 to {RETRY_QUEUES_MAX}",
            config.group_name
        )));
    }
    Ok(())
}

impl GroupTable {
    /// Reads the saved table.
    pub fn load(bytes: Option<&[u8]>) -> Result<Self, ControlError> {
        let saved: SubscriptionGroupTable = read(GROUPS_FILE, bytes)?.unwrap_or_default();
        let mut groups = BTreeMap::new();
        for (name, mut config) in saved.subscription_group_table {
            config.group_name.clone_from(&name);
            if let Err(refusal) = check_numbers(&config) {
                return Err(ControlError::Content {
                    file: GROUPS_FILE,
                    what: refusal.remark,
                });
            }
            groups.insert(Arc::from(name), Entry::new(config));
        }
        Ok(Self {
            groups,
            forbidden: saved.forbidden_table,
            version: saved.data_version,
        })
    }

    /// A group.
    pub fn get(&self, group: &str) -> Option<&Arc<SubscriptionGroupConfig>> {
        self.groups.get(group).map(|entry| &entry.config)
    }

    /// Whether a group exists.
    pub fn has(&self, group: &str) -> bool {
        self.groups.contains_key(group)
    }

    /// All groups in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<SubscriptionGroupConfig>)> {
        self.groups
            .iter()
            .map(|(name, entry)| (name, &entry.config))
    }

    /// Number of groups.
    pub fn count(&self) -> usize {
        self.groups.len()
    }

    /// Version of the table.
    pub fn version(&self) -> &DataVersion {
        &self.version
    }

    /// Checks whether one more group fits.
    pub fn check_room(&self, group: &str) -> Result<(), Refusal> {
        if self.has(group) || self.groups.len() < GROUPS_MAX {
            return Ok(());
        }
        Err(Refusal::error(format!(
            "group {group} not created: the broker has {GROUPS_MAX} groups, its limit; delete some"
        )))
    }

    /// Creates or changes a group. The version does not move.
    pub fn insert(&mut self, config: SubscriptionGroupConfig) {
        self.groups
            .insert(Arc::from(config.group_name.as_str()), Entry::new(config));
    }

    /// Removes a group.
    pub fn remove(&mut self, group: &str) -> Option<Arc<str>> {
        self.forbidden.remove(group);
        self.groups.remove_entry(group).map(|(name, _)| name)
    }

    /// What each group may not do.
    pub fn forbidden(&self) -> &BTreeMap<String, Forbidden> {
        &self.forbidden
    }

    /// Allows or forbids a group to read a topic.
    pub fn set_readable(&mut self, group: &str, topic: &str, is_readable: bool) {
        let topics = self.forbidden.entry(group.to_owned()).or_default();
        let bits = topics.entry(topic.to_owned()).or_default();
        *bits = if is_readable {
            *bits & !FORBIDDEN_READ
        } else {
            *bits | FORBIDDEN_READ
        };
        topics.retain(|_, bits| *bits != 0);
        if topics.is_empty() {
            self.forbidden.remove(group);
        }
    }

    /// Whether a group may read a topic as far as the forbidden table says.
    pub fn is_readable(&self, group: &str, topic: &str) -> bool {
        let bits = self
            .forbidden
            .get(group)
            .and_then(|topics| topics.get(topic));
        bits.is_none_or(|bits| bits & FORBIDDEN_READ == 0)
    }

    /// Moves the version on.
    pub fn bump(&mut self, now_ms: i64) {
        self.version = self.version.next(now_ms);
    }

    /// Content of [`GROUPS_FILE`].
    pub fn text(&self) -> Result<Vec<u8>, Refusal> {
        self.page(0, usize::MAX)
    }

    /// The same JSON with `count` groups from number `first` on.
    pub fn page(&self, first: usize, count: usize) -> Result<Vec<u8>, Refusal> {
        let mut out = b"{\"dataVersion\":".to_vec();
        out.extend_from_slice(&to_json(&self.version)?);
        out.extend_from_slice(b",\"forbiddenTable\":");
        out.extend_from_slice(&to_json(&self.forbidden)?);
        out.extend_from_slice(b",\"subscriptionGroupTable\":{");
        let page = self.groups.values().skip(first).take(count);
        push_members(&mut out, page.map(|entry| entry.text.as_slice()));
        out.extend_from_slice(b"}}");
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_groups_come_back_the_same() {
        let mut one = GroupTable::load(None).unwrap();
        one.insert(SubscriptionGroupConfig::new("g"));
        one.set_readable("g", "T", false);
        one.bump(5);
        let two = GroupTable::load(Some(&one.text().unwrap())).unwrap();
        assert!(two.iter().eq(one.iter()));
        assert!(!two.is_readable("g", "T"));
        assert!(two.is_readable("g", "U"));
        assert_eq!(two.version().counter, 1);
    }

    #[test]
    fn a_forbidden_topic_can_be_allowed_again_and_leaves_nothing() {
        let mut table = GroupTable::load(None).unwrap();
        table.set_readable("g", "T", false);
        table.set_readable("g", "T", true);
        assert!(table.is_readable("g", "T"));
        assert!(table.forbidden().is_empty());
    }

    #[test]
    fn a_damaged_file_is_named() {
        let error = GroupTable::load(Some(b"{\"subscriptionGroupTable\":[")).unwrap_err();
        assert!(error.to_string().contains(GROUPS_FILE), "{error}");
    }
}
