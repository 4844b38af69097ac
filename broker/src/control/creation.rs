//! Owns topics and groups that come into being because somebody uses them.
//!
//! Invariant: a request comes back to the data path only after what it lacked exists, so that it is
//! never routed here twice for the same reason, and never more than [`CREATIONS_MAX`] times.

use std::sync::Arc;

use wire::body::{PERM_INHERIT, PERM_READ, PERM_WRITE, TopicConfig};
use wire::codes::request;
use wire::requests::{PullRequest, SendBack, SendRequest};

use super::answer::{Call, Outcome, Refusal, codes, reply, with_call};
use super::changes::Changes;
use super::effects::{Effect, Origin, PendingRequest};
use super::{Control, names};

/// Queues of a new topic when the client names no number.
const QUEUES_DEFAULT: i32 = 4;
/// How often one request may be routed again: a group, its retry topic and its dead-letter topic
/// may each be found missing in turn. More is a disagreement of this table with a core's, which
/// would go on for ever.
pub const CREATIONS_MAX: u8 = 8;

impl Control {
    /// A request of the data path names a topic or group the cores do not know. Creates it where
    /// the rules allow that and routes the request again, or answers why not.
    pub fn create_topic_for_send(
        &mut self,
        now_ms: i64,
        request: PendingRequest,
        effects: &mut Vec<Effect>,
    ) {
        let handled = with_call(now_ms, &request, |call| {
            let mut changes = Changes::default();
            let outcome = self.create_for(call, &mut changes);
            // A group is made again by the next who reads with it. A topic that a send makes is
            // told to name servers with its queues, so that its save comes first.
            changes.are_made_by_use = changes.topics.is_empty();
            let outcome = match self.publish(now_ms, changes, effects) {
                Ok(()) => outcome,
                Err(refusal) => Err(refusal),
            };
            let is_fine = outcome.is_ok();
            reply(call, outcome, effects);
            is_fine
        });
        if handled == Some(true) {
            effects.push(Effect::Redispatch {
                origin: Origin {
                    creations: request.origin.creations + 1,
                    ..request.origin
                },
                frame: request.frame,
            });
        }
    }

    /// `Ok(None)`: route the request again.
    fn create_for(&mut self, call: &Call<'_>, changes: &mut Changes) -> Outcome {
        if call.origin.creations >= CREATIONS_MAX {
            return Err(Refusal::error(format!(
                "request {} was routed {CREATIONS_MAX} times and still lacks a topic or a group",
                call.header.code
            )));
        }
        match call.header.code {
            request::SEND_MESSAGE
            | request::SEND_MESSAGE_V2
            | request::SEND_BATCH_MESSAGE
            | request::SEND_REPLY_MESSAGE
            | request::SEND_REPLY_MESSAGE_V2 => {
                let has_long_names = matches!(
                    call.header.code,
                    request::SEND_MESSAGE | request::SEND_REPLY_MESSAGE
                );
                let send = if has_long_names {
                    SendRequest::decode_long(&call.header.ext)?
                } else {
                    SendRequest::decode_short(&call.header.ext)?
                };
                let topic = send.topic.to_cow();
                let default_topic = send.default_topic.to_cow();
                self.create_for_send(
                    &topic,
                    &default_topic,
                    send.default_topic_queue_nums,
                    (send.unit_mode, call.now_ms),
                    changes,
                )
            }
            request::CONSUMER_SEND_MSG_BACK => {
                let back = SendBack::decode(&call.header.ext)?;
                let group = self.groups.get(&back.group).cloned();
                let group = group.ok_or_else(|| Refusal::no_group(&back.group))?;
                if self.topics.has(&names::retry_topic(&back.group)) {
                    return self.create_dead_letters(&back.group, changes);
                }
                self.need_retry_topic(&group, changes)?;
                Ok(None)
            }
            request::PULL_MESSAGE | request::LITE_PULL_MESSAGE => {
                let pull = PullRequest::decode(&call.header.ext)?;
                let (group, topic) = (pull.consumer_group.to_cow(), pull.topic.to_cow());
                self.check_for_consumer(Some(&group), &topic, changes)
            }
            _ => {
                let ext = &call.header.ext;
                let group = ext.str("consumerGroup").or_else(|| ext.str("group"));
                let topic = ext.need_str("topic")?;
                self.check_for_consumer(group.as_deref(), &topic, changes)
            }
        }
    }

    /// A consumer needs its group, which may be created, and a topic, which may not. An empty name
    /// is a name too: the cores look for it.
    fn check_for_consumer(
        &mut self,
        group: Option<&str>,
        topic: &str,
        changes: &mut Changes,
    ) -> Outcome {
        if let Some(group) = group {
            self.need_group(group, changes)?;
        }
        if self.topics.has(topic) {
            Ok(None)
        } else {
            Err(Refusal::no_topic(topic))
        }
    }

    fn create_for_send(
        &mut self,
        topic: &str,
        default_topic: &str,
        queues_wanted: i32,
        (is_unit, now_ms): (bool, i64),
        changes: &mut Changes,
    ) -> Outcome {
        names::check_topic(topic)?;
        if !names::is_sendable(topic) {
            return Err(Refusal::new(
                codes::NO_PERMISSION,
                format!("topic[{topic}] belongs to the broker, clients may not send to it"),
            ));
        }
        if let Some(group) = topic.strip_prefix(names::RETRY_PREFIX) {
            return self.create_for_retry(group, topic, changes);
        }
        if !self.topics.has(topic) {
            let mut config = self.inherited(topic, default_topic, queues_wanted)?;
            config.topic_sys_flag = i32::from(is_unit);
            self.put_topic(config, changes)?;
            self.topics.origins.created(topic, now_ms);
            tracing::info!(topic, queues = queues_wanted, "topic created by a send");
        }
        Ok(None)
    }

    /// A send to a retry topic: the topic itself, or if that exists, the dead-letter topic.
    fn create_for_retry(&mut self, group: &str, topic: &str, changes: &mut Changes) -> Outcome {
        if self.topics.has(topic) {
            return self.create_dead_letters(group, changes);
        }
        if let Some(config) = self.groups.get(group).cloned() {
            self.need_retry_topic(&config, changes)?;
        }
        // Retry topics of POP name a topic behind the group, so that the group is not known here.
        if !self.topics.has(topic) {
            self.put_topic(TopicConfig::new(topic, 1, PERM_READ | PERM_WRITE), changes)?;
        }
        Ok(None)
    }

    fn create_dead_letters(&mut self, group: &str, changes: &mut Changes) -> Outcome {
        let topic = format!("{}{group}", names::DLQ_PREFIX);
        names::check_topic(&topic)?;
        if !self.topics.has(&topic) {
            self.put_topic(TopicConfig::new(topic, 1, PERM_READ | PERM_WRITE), changes)?;
        }
        Ok(None)
    }

    /// A shard needs a queue of its own in a retry or dead-letter topic, so that a message that was
    /// popped there can be moved to it in one step. The topic is made if need be.
    pub fn need_queue_on(
        &mut self,
        now_ms: i64,
        topic: &str,
        shard: u16,
        effects: &mut Vec<Effect>,
    ) {
        if let Err(refusal) = self.put_queue_on(now_ms, topic, shard, effects) {
            let remark = refusal.remark;
            tracing::warn!(
                topic,
                shard,
                remark,
                "no queue for messages to be tried again"
            );
        }
    }

    fn put_queue_on(
        &mut self,
        now_ms: i64,
        topic: &str,
        shard: u16,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        names::check_topic(topic)?;
        let config = match self.topics.get(topic) {
            Some(placed) => placed.config.clone(),
            None => TopicConfig::new(topic, 1, PERM_READ | PERM_WRITE),
        };
        let mut changes = Changes::default();
        self.topics.check_room(&config)?;
        let placed = match self.topics.has(topic) {
            true => self.topics.add_queue_on(topic, shard),
            false => Some(self.topics.insert_on(config, shard)),
        };
        self.recovered_topics.remove(topic);
        changes.topics.extend(placed);
        self.publish(now_ms, changes, effects)
    }

    /// A new topic made after the template the client names.
    fn inherited(
        &self,
        topic: &str,
        default_topic: &str,
        queues_wanted: i32,
    ) -> Result<TopicConfig, Refusal> {
        let template = self.topics.get(default_topic).map(Arc::clone);
        let is_off = default_topic == names::AUTO_CREATE_TOPIC && !self.config.auto_create_topic;
        let template =
            template.filter(|template| template.config.perm & PERM_INHERIT != 0 && !is_off);
        let Some(template) = template else {
            return Err(Refusal::new(
                codes::TOPIC_NOT_EXIST,
                format!(
                    "topic[{topic}] does not exist and cannot be created after {default_topic}: \
                     create it first, or set autoCreateTopicEnable=true"
                ),
            ));
        };
        let wanted = if queues_wanted > 0 {
            queues_wanted
        } else {
            QUEUES_DEFAULT
        };
        let queues = wanted.min(template.config.write_queue_nums).max(1);
        let mut config = TopicConfig::new(topic, queues, template.config.perm & !PERM_INHERIT);
        config.topic_filter_type = template.config.topic_filter_type;
        Ok(config)
    }

    /// The shard that the tables have a queue on.
    #[must_use]
    pub fn place_of(&self, topic: &str, queue_id: i32) -> Option<u16> {
        let placed = self.topics.get(topic)?;
        placed.shards.get(usize::try_from(queue_id).ok()?).copied()
    }

    /// The log holds a queue the tables do not know or have elsewhere (settings were lost): the
    /// queue is put where the log has it. Saved at the next tick.
    pub fn topic_recovered(
        &mut self,
        topic: &str,
        queue_id: i32,
        shard: u16,
        effects: &mut Vec<Effect>,
    ) {
        let is_legal = (0..super::topics::QUEUES_PER_TOPIC_MAX).contains(&queue_id);
        if !is_legal {
            tracing::error!(
                topic,
                queue_id,
                shard,
                "the log names an impossible queue, left out"
            );
            return;
        }
        let mut is_changed = false;
        if !self.topics.has(topic) {
            tracing::warn!(
                topic,
                "the log holds a topic whose settings are lost, made anew"
            );
            let config = TopicConfig::new(topic, queue_id + 1, PERM_READ | PERM_WRITE);
            if let Err(refusal) = self.topics.check_room(&config) {
                tracing::error!(topic, remark = refusal.remark, "topic not made anew");
                return;
            }
            self.topics.insert(config);
            self.recovered_topics.insert(topic.to_owned());
            is_changed = true;
        }
        is_changed |= self.topics.set_place(topic, queue_id, shard);
        let Some(placed) = self.topics.get(topic) else {
            return;
        };
        let mut config = placed.config.clone();
        if self.recovered_topics.contains(topic) && config.write_queue_nums <= queue_id {
            config.write_queue_nums = queue_id + 1;
            self.topics.insert(config);
            is_changed = true;
        }
        if is_changed {
            self.has_unsaved_topics = true;
            effects.extend(self.topics.get(topic).cloned().map(Effect::TopicChanged));
        }
    }
}
