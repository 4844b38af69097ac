//! Owns how a change of the tables becomes durable and known.
//!
//! Invariant: saves come before announcements, and for new queues the placement is saved before the
//! topics, so that a saved topic always has its places.

use std::collections::BTreeMap;
use std::sync::Arc;

use wire::body::{SubscriptionGroupConfig, TopicConfig};

use super::Control;
use super::answer::{Refusal, to_json};
use super::effects::{Effect, PlacedTopic};
use super::groups::GROUPS_FILE;
use super::names;
use super::start::MODES_FILE;
use super::topics::{PLACEMENT_FILE, TOPICS_FILE};

/// What changed in one request.
#[derive(Debug, Default)]
pub struct Changes {
    /// New or changed topics.
    pub topics: Vec<Arc<PlacedTopic>>,
    /// Topics that are gone.
    pub removed_topics: Vec<Arc<str>>,
    /// New or changed groups.
    pub groups: Vec<Arc<SubscriptionGroupConfig>>,
    /// Groups that are gone, and whether their offsets go too.
    pub removed_groups: Vec<(Arc<str>, bool)>,
    /// Whether the group table changed in another way.
    pub has_other_group_change: bool,
    /// Whether only what is remembered of topics changed.
    pub has_other_topic_change: bool,
    /// Whether use alone made the changes and makes them again should they be lost, so that nobody
    /// has to wait for their save.
    pub are_made_by_use: bool,
}

impl Changes {
    /// For changes that use alone makes.
    pub fn by_use() -> Self {
        Self {
            are_made_by_use: true,
            ..Self::default()
        }
    }

    fn has_topics(&self) -> bool {
        !self.topics.is_empty() || !self.removed_topics.is_empty() || self.has_other_topic_change
    }

    fn has_groups(&self) -> bool {
        !self.groups.is_empty() || !self.removed_groups.is_empty() || self.has_other_group_change
    }
}

impl Control {
    /// Saves and announces changes that were made to the tables.
    pub(super) fn publish(
        &mut self,
        now_ms: i64,
        changes: Changes,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        if changes.has_topics() {
            self.topics.bump(now_ms);
            if changes.are_made_by_use {
                effects.extend([PLACEMENT_FILE, TOPICS_FILE].map(Effect::SaveLater));
            } else {
                self.save_topics(effects)?;
            }
        }
        if changes.has_groups() {
            self.groups.bump(now_ms);
            effects.push(if changes.are_made_by_use {
                Effect::SaveLater(GROUPS_FILE)
            } else {
                Effect::Save {
                    name: GROUPS_FILE,
                    bytes: self.groups.text()?,
                }
            });
        }
        let removed: Vec<String> = changes
            .removed_topics
            .iter()
            .map(|n| n.to_string())
            .collect();
        effects.extend(changes.removed_topics.into_iter().map(Effect::TopicRemoved));
        for (group, offsets) in changes.removed_groups {
            effects.push(Effect::GroupRemoved { group, offsets });
        }
        let changed = changes.topics.iter().map(|topic| &topic.config.topic_name);
        // A name server hears of deletions too, so that it does not offer the topic to others.
        let told: Vec<String> = changed.cloned().chain(removed).collect();
        effects.extend(changes.topics.into_iter().map(Effect::TopicChanged));
        effects.extend(changes.groups.into_iter().map(Effect::GroupChanged));
        if !told.is_empty() {
            effects.push(Effect::Register { topics: told });
        }
        Ok(())
    }

    /// The content a control file should have.
    pub fn file_text(&self, name: &str) -> Result<Vec<u8>, Refusal> {
        match name {
            PLACEMENT_FILE => Ok(self.topics.placement_text()),
            TOPICS_FILE => self.topics.topics_text(),
            GROUPS_FILE => self.groups.text(),
            MODES_FILE => to_json(&self.modes),
            _ => Err(Refusal::error(format!("{name} is no control file"))),
        }
    }

    pub(super) fn save_topics(&mut self, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        self.has_unsaved_topics = false;
        let bytes = self.topics.placement_text();
        effects.push(Effect::Save {
            name: PLACEMENT_FILE,
            bytes,
        });
        effects.push(Effect::Save {
            name: TOPICS_FILE,
            bytes: self.topics.topics_text()?,
        });
        Ok(())
    }

    pub(super) fn forbidden_effect(&self, group: &str) -> Effect {
        let topics = self
            .groups
            .forbidden()
            .get(group)
            .cloned()
            .unwrap_or_else(BTreeMap::new);
        Effect::ForbiddenChanged {
            group: Arc::from(group),
            topics: Arc::new(topics),
        }
    }

    /// Creates or changes a topic in the table.
    pub(super) fn put_topic(
        &mut self,
        config: TopicConfig,
        changes: &mut Changes,
    ) -> Result<(), Refusal> {
        self.topics.check_room(&config)?;
        if self
            .topics
            .get(&config.topic_name)
            .is_none_or(|topic| topic.config != config)
        {
            self.recovered_topics.remove(&config.topic_name);
            changes.topics.push(self.topics.insert(config));
        }
        Ok(())
    }

    /// Creates or changes a group in the table.
    pub(super) fn put_group(
        &mut self,
        config: SubscriptionGroupConfig,
        changes: &mut Changes,
    ) -> Result<(), Refusal> {
        names::check_group(&config.group_name)?;
        super::groups::check_numbers(&config)?;
        self.groups.check_room(&config.group_name)?;
        if self
            .groups
            .get(&config.group_name)
            .is_some_and(|known| **known == config)
        {
            return Ok(());
        }
        let name = config.group_name.clone();
        self.groups.insert(config);
        changes.groups.extend(self.groups.get(&name).cloned());
        Ok(())
    }

    /// The group, created with default settings where that is allowed.
    pub(super) fn need_group(
        &mut self,
        group: &str,
        changes: &mut Changes,
    ) -> Result<Arc<SubscriptionGroupConfig>, Refusal> {
        if let Some(config) = self.groups.get(group) {
            return Ok(Arc::clone(config));
        }
        if !self.config.auto_create_group {
            return Err(Refusal::no_group(group));
        }
        self.put_group(SubscriptionGroupConfig::new(group), changes)?;
        self.groups
            .get(group)
            .cloned()
            .ok_or_else(|| Refusal::no_group(group))
    }

    /// Creates the retry topic of a group unless it exists.
    pub(super) fn need_retry_topic(
        &mut self,
        group: &SubscriptionGroupConfig,
        changes: &mut Changes,
    ) -> Result<(), Refusal> {
        let topic = names::retry_topic(&group.group_name);
        if self.topics.has(&topic) || group.retry_queue_nums <= 0 {
            return Ok(());
        }
        let perm = wire::body::PERM_READ | wire::body::PERM_WRITE;
        self.put_topic(
            TopicConfig::new(topic, group.retry_queue_nums, perm),
            changes,
        )
    }
}
