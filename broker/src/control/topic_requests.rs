//! Owns the requests about topics: create, change, delete, list.
//!
//! Invariant: a list of topics is taken whole or not at all.

use std::sync::Arc;

use wire::body::{TopicConfig, TopicConfigList, TopicFilterType, TopicList};
use wire::requests::{AllTopicConfig, CreateTopic, DeleteTopic, TopicName};

use super::answer::{Answer, Call, Field, Outcome, Refusal, need, now};
use super::attributes::{self, Attributes, MESSAGE_TYPE};
use super::changes::Changes;
use super::effects::Effect;
use super::{Control, names};

/// Most topics or groups in one page of a table.
pub const PAGE_ENTRIES_MAX: usize = 2_000;
/// Most topics or groups in one request.
pub const LIST_ENTRIES_MAX: usize = 10_000;

/// Entries of a page: all of them unless the caller pages.
///
/// Callers stop when they have all but one entry, so that a page that would leave one takes it in.
pub fn page(first: Option<i32>, most: Option<i32>, total: usize) -> (usize, usize) {
    let (Some(first), Some(most)) = (first, most) else {
        return (0, total);
    };
    let first = usize::try_from(first).unwrap_or(0);
    let count = usize::try_from(most)
        .unwrap_or(0)
        .clamp(1, PAGE_ENTRIES_MAX);
    let left = total.saturating_sub(first);
    (first, if left == count + 1 { left } else { count })
}

impl Control {
    /// Code 17.
    pub(super) fn update_topic(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = CreateTopic::decode(&call.header.ext)?;
        let filter = asked.topic_filter_type.as_deref().unwrap_or_default();
        let config = TopicConfig {
            topic_name: asked.topic.into_owned(),
            read_queue_nums: asked.read_queue_nums,
            write_queue_nums: asked.write_queue_nums,
            perm: asked.perm,
            topic_filter_type: TopicFilterType::from_name(filter).unwrap_or_default(),
            topic_sys_flag: asked.topic_sys_flag.unwrap_or(0),
            order: asked.order.unwrap_or(false),
            attributes: attributes::parse(asked.attributes.as_deref().unwrap_or_default())?,
        };
        self.update_topics(call.now_ms, vec![config], effects)
    }

    /// Code 18.
    pub(super) fn update_topic_list(
        &mut self,
        call: &Call<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let list: TopicConfigList = call.json()?;
        if list.topic_config_list.len() > LIST_ENTRIES_MAX {
            return Err(Refusal::parameter(format!(
                "topicConfigList has {} topics, at most {LIST_ENTRIES_MAX} in one request",
                list.topic_config_list.len()
            )));
        }
        self.update_topics(call.now_ms, list.topic_config_list, effects)
    }

    /// In each config the attributes are changes (`+key`, `-key`).
    fn update_topics(
        &mut self,
        now_ms: i64,
        configs: Vec<TopicConfig>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let mut checked = Vec::with_capacity(configs.len());
        for config in configs {
            checked.push(self.checked_topic(config)?);
        }
        let mut changes = Changes::default();
        let mut outcome = now(Answer::done());
        for config in checked {
            self.note_administered(&config.topic_name, &mut changes);
            // The bound may be passed only now, by the topics before in the list.
            if let Err(refusal) = self.put_topic(config, &mut changes) {
                outcome = Err(refusal);
                break;
            }
        }
        self.publish(now_ms, changes, effects)?;
        outcome
    }

    /// What an administrator touched is spread over the cluster by him alone.
    fn note_administered(&mut self, topic: &str, changes: &mut Changes) {
        if self.topics.origins.administered(topic) {
            changes.topics.extend(self.topics.get(topic).cloned());
        }
    }

    fn checked_topic(&self, mut config: TopicConfig) -> Result<TopicConfig, Refusal> {
        names::check_topic(&config.topic_name)?;
        if self.is_system_topic(&config.topic_name) {
            return Err(Refusal::parameter(format!(
                "the topic[{}] belongs to the broker and cannot be changed",
                config.topic_name
            )));
        }
        let changes: &Attributes = &config.attributes;
        if changes
            .get(&format!("+{MESSAGE_TYPE}"))
            .is_some_and(|kind| kind == "MIXED")
        {
            return Err(Refusal::parameter(
                "attribute message.type cannot be MIXED: mixed topics are not enabled here",
            ));
        }
        let current = self.topics.get(&config.topic_name);
        let current = current.map(|topic| &topic.config.attributes);
        config.attributes = attributes::alter(current, changes)?;
        self.topics.check_room(&config)?;
        Ok(config)
    }

    /// Code 215.
    pub(super) fn delete_topic(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = DeleteTopic::decode(&call.header.ext)?;
        let topic = need("topic", Some(&asked.topic))?;
        if self.is_system_topic(topic) {
            return Err(Refusal::parameter(format!(
                "the topic[{topic}] belongs to the broker and cannot be deleted"
            )));
        }
        let mut changes = Changes::default();
        // Retry topics of POP carry the topic's name behind the group's.
        let of_group = |group: &Arc<str>| {
            [
                format!("%RETRY%{group}_{topic}"),
                format!("%RETRY%{group}+{topic}"),
            ]
        };
        let derived: Vec<String> = self
            .groups
            .iter()
            .flat_map(|(name, _)| of_group(name))
            .collect();
        for name in derived.iter().map(String::as_str).chain([topic]) {
            if let Some(removed) = self.topics.remove(name) {
                self.stats.forget_topic(name);
                self.recovered_topics.remove(name);
                changes.removed_topics.push(removed);
            }
        }
        if !changes.removed_topics.iter().any(|name| **name == *topic) {
            // Shards may still have it: they were told once and could not store it.
            effects.push(Effect::TopicRemoved(topic.into()));
        }
        // Also one that is not here: an offer of a name server may be under way.
        self.topics.origins.removed(topic, call.now_ms);
        changes.has_other_topic_change = true;
        tracing::info!(
            topic,
            removed = changes.removed_topics.len(),
            "topic deleted"
        );
        self.publish(call.now_ms, changes, effects)?;
        now(Answer::done())
    }

    /// Code 21.
    pub(super) fn all_topics(&self, call: &Call<'_>) -> Outcome {
        let asked = AllTopicConfig::decode(&call.header.ext)?;
        let total = self.topics.count();
        let (first, count) = page(asked.topic_seq, asked.max_topic_num, total);
        let body = self.topics.page(first, count)?;
        now(Answer::body(body).with("totalTopicNum", Field::Int(total as i64)))
    }

    /// Code 351.
    pub(super) fn topic_config(&self, call: &Call<'_>) -> Outcome {
        let asked = TopicName::decode(&call.header.ext)?;
        match self.topics.get(&asked.topic) {
            Some(topic) => now(Answer::json(&topic.config)?),
            None => Err(Refusal::no_topic(&asked.topic)),
        }
    }

    /// Code 305.
    pub(super) fn system_topic_list(&self) -> Outcome {
        let mut topics: Vec<String> = self.system_topics.iter().cloned().collect();
        topics.extend([names::TRACE_TOPIC, names::CHECK_MAX_TOPIC].map(str::to_owned));
        topics.sort_unstable();
        topics.dedup();
        let broker_addr = Some(self.broker_address.to_string());
        now(Answer::json(&TopicList {
            broker_addr,
            topic_list: topics,
        })?)
    }
}

#[cfg(test)]
mod tests {
    use super::page;

    #[test]
    fn pages_leave_no_single_entry_behind() {
        assert_eq!(page(None, None, 5_000), (0, 5_000));
        assert_eq!(page(Some(0), Some(9_999), 5_000), (0, 2_000));
        assert_eq!(page(Some(0), Some(10), 11), (0, 11));
        assert_eq!(page(Some(10), Some(10), 22), (10, 10));
        assert_eq!(page(Some(0), Some(0), 22), (0, 1));
        assert_eq!(page(Some(-5), Some(10), 5), (0, 10));
    }
}
