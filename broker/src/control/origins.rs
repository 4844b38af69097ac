//! Owns what is remembered of topics besides their settings: which ones a send created, and which
//! ones an administrator deleted.
//!
//! Topics a send created are offered to the other brokers of the cluster by the name server. A
//! topic is deleted broker by broker, so that an offer may come after it was deleted here: one made
//! before the deletion is not taken.
//!
//! Invariant: a topic is never remembered as both, and at most [`REMOVED_MAX`] deleted ones are
//! kept, the oldest forgotten first.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::changes::Changes;
use super::effects::Effect;
use super::{Control, names};
use crate::namesrv::offer::{Offer, read_offers};
use wire::body::{PERM_READ, PERM_WRITE, TopicConfig};

/// Most deleted topics remembered.
pub const REMOVED_MAX: usize = 4_096;

/// Times by topic, in milliseconds; part of `placement.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Origins {
    /// When a send created the topic.
    created_by_send: BTreeMap<String, i64>,
    /// When an administrator deleted it.
    removed: BTreeMap<String, i64>,
}

impl Origins {
    /// When a send created a topic, if one did and no administrator changed it since.
    pub fn created_ms(&self, topic: &str) -> Option<i64> {
        self.created_by_send.get(topic).copied()
    }

    /// A send created a topic.
    pub fn created(&mut self, topic: &str, created_ms: i64) {
        self.removed.remove(topic);
        self.created_by_send.insert(topic.to_owned(), created_ms);
    }

    /// An administrator created or changed a topic. Returns whether it counted as created by a
    /// send.
    pub fn administered(&mut self, topic: &str) -> bool {
        self.removed.remove(topic);
        self.created_by_send.remove(topic).is_some()
    }

    /// An administrator deleted a topic, which need not have been here.
    pub fn removed(&mut self, topic: &str, now_ms: i64) {
        self.created_by_send.remove(topic);
        self.removed.insert(topic.to_owned(), now_ms);
        if self.removed.len() > REMOVED_MAX {
            let oldest = self
                .removed
                .iter()
                .min_by_key(|(_, removed_ms)| **removed_ms);
            if let Some(oldest) = oldest.map(|(topic, _)| topic.clone()) {
                self.removed.remove(&oldest);
            }
        }
    }

    /// A topic is gone for another reason.
    pub fn forget_created(&mut self, topic: &str) {
        self.created_by_send.remove(topic);
    }

    /// Keeps marks only of topics that are there.
    pub fn keep(&mut self, has: impl Fn(&str) -> bool) {
        self.created_by_send.retain(|topic, _| has(topic));
    }

    /// Whether a topic was created after it was last deleted here.
    pub fn admits(&self, topic: &str, created_ms: i64) -> bool {
        self.removed
            .get(topic)
            .is_none_or(|removed_ms| *removed_ms < created_ms)
    }
}

impl Control {
    /// A name server offers topics that sends created on other brokers of the cluster.
    pub fn take_offers(&mut self, now_ms: i64, text: &str, effects: &mut Vec<Effect>) {
        if !self.config.auto_create_topic || text.is_empty() {
            return;
        }
        let mut changes = Changes::default();
        for offer in read_offers(text) {
            if !self.is_acceptable(&offer) {
                continue;
            }
            let mut config = TopicConfig::new(offer.topic, 1, PERM_READ | PERM_WRITE);
            config.read_queue_nums = offer.read_queue_nums;
            config.write_queue_nums = offer.write_queue_nums;
            config.topic_sys_flag = offer.topic_sys_flag;
            let topic = config.topic_name.clone();
            match self.put_topic(config, &mut changes) {
                Ok(()) => self.topics.origins.created(&topic, offer.created_ms),
                Err(refusal) => {
                    tracing::warn!(topic, remark = refusal.remark, "offered topic not created");
                }
            }
        }
        if changes.topics.is_empty() {
            return;
        }
        tracing::info!(
            topics = changes.topics.len(),
            "topics created that sends created on other brokers of the cluster"
        );
        if let Err(refusal) = self.publish(now_ms, changes, effects) {
            tracing::error!(remark = refusal.remark, "offered topics not saved");
        }
    }

    fn is_acceptable(&self, offer: &Offer) -> bool {
        let topic = offer.topic.as_str();
        let is_plain = names::check_topic(topic).is_ok()
            && names::is_sendable(topic)
            && !names::is_retry_topic(topic)
            && !names::is_dlq_topic(topic)
            && !self.is_system_topic(topic);
        is_plain && !self.topics.has(topic) && self.topics.origins.admits(topic, offer.created_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deletion_outlasts_offers_made_before_it_and_nothing_else() {
        let mut origins = Origins::default();
        assert!(origins.admits("T", 0));
        origins.created("T", 100);
        origins.removed("T", 200);
        assert_eq!(origins.created_ms("T"), None);
        assert!(!origins.admits("T", 100) && !origins.admits("T", 200));
        assert!(origins.admits("T", 201), "created again elsewhere");
        origins.created("T", 150);
        assert!(origins.admits("T", 100), "created again here");
        origins.removed("T", 300);
        assert!(!origins.administered("T"), "it was gone");
        assert!(origins.admits("T", 1), "created by an administrator");
    }

    #[test]
    fn the_oldest_deletions_are_forgotten_at_the_bound() {
        let mut origins = Origins::default();
        for number in 0..=REMOVED_MAX {
            origins.removed(&format!("T{number}"), 1_000 + number as i64);
        }
        assert!(origins.admits("T0", 1));
        assert!(!origins.admits("T1", 1));
        assert_eq!(origins.removed.len(), REMOVED_MAX);
    }
}
