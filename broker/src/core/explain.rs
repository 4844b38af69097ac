//! What only a shard knows of a message: where its group stands, who got it, who holds it, how its
//! transaction stands. `pinion explain` asks for it (code 900002).
//!
//! Invariant: asking changes nothing, and creates neither topic nor group.

use shard::address;
use shard::half::HalfEnd;
use shard::half_ends::Ended;
use shard::queue::QueueIndex;
use shard::{AckPoint, Shard};
use wire::codes::response;
use wire::header::{FieldError, Header, Reply, encode_reply};

use super::deliveries::{Delivery, group_of};
use super::messages::ReplyTo;
use super::state::State;
use crate::control::effects::Origin;
use crate::control::names::HALF_TOPIC;
use crate::explain::facts::{DeliveryFacts, HalfFacts, HalfState, HoldingFacts, QueueFacts};

/// A question about one message.
struct Question {
    topic: String,
    queue_id: i32,
    queue_offset: i64,
    /// -1: the queue tells the shard.
    physical_offset: i64,
    group: String,
}

impl Question {
    fn of(header: &Header<'_>) -> Result<Self, FieldError> {
        let ext = &header.ext;
        Ok(Self {
            topic: ext.str("topic").unwrap_or_default().into_owned(),
            queue_id: ext.i32("queueId")?.unwrap_or(-1),
            queue_offset: ext.i64("queueOffset")?.unwrap_or(-1),
            physical_offset: ext.i64("physicalOffset")?.unwrap_or(-1),
            group: ext.str("consumerGroup").unwrap_or_default().into_owned(),
        })
    }
}

impl State {
    /// Handles code 900002: about a queue here, about its lock at the control task.
    pub fn on_explain(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        if header.ext.get("lock").is_some() {
            return self.to_control(origin, whole);
        }
        let asked = match Question::of(header) {
            Ok(asked) => asked,
            Err(error) => {
                return self.answer(reply, response::INVALID_PARAMETER, Some(&error.to_string()));
            }
        };
        let local = if asked.physical_offset >= 0 {
            self.shard_of_offset(asked.physical_offset, origin, reply, whole)
        } else {
            self.shard_of_queue(&asked, origin, reply, whole)
        };
        let Some(local) = local else {
            return;
        };
        let facts = self.queue_facts(local, &asked);
        let body = match serde_json::to_vec(&facts) {
            Ok(body) => body,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let head = Reply {
            code: response::SUCCESS,
            opaque: reply.opaque,
            remark: None,
            ext: &[],
        };
        let mut frame = Vec::with_capacity(body.len() + 256);
        encode_reply(&mut frame, reply.serialization, &head, &body);
        self.deliver(reply.link, &frame);
    }

    /// The local shard of a queue; `None`: already taken care of.
    fn shard_of_queue(
        &mut self,
        asked: &Question,
        origin: &Origin,
        reply: &ReplyTo,
        whole: &[u8],
    ) -> Option<usize> {
        let home = usize::try_from(asked.queue_id)
            .ok()
            .and_then(|id| self.directory.topics.get(&*asked.topic)?.homes.get(id));
        let Some(shard) = home.map(|home| home.shard) else {
            let remark = format!(
                "queue {} of topic {} is not here",
                asked.queue_id, asked.topic
            );
            self.answer(reply, response::TOPIC_NOT_EXIST, Some(&remark));
            return None;
        };
        if self.sent_on(shard, origin, reply, whole, None) {
            return None;
        }
        self.local_shard(shard)
    }

    fn queue_facts(&self, local: usize, asked: &Question) -> QueueFacts {
        let Some(shard) = self.shards.get(local).map(|local| &local.shard) else {
            return QueueFacts::default();
        };
        let (log, number) = (shard.log(), shard.number());
        let physical = |position| address::physical(number, position);
        let mut facts = QueueFacts {
            now_ms: self.now.wall_ms,
            shard: number,
            log_min_offset: physical(log.min_position()),
            log_max_offset: physical(log.tail()),
            log_synced_offset: physical(log.synced()),
            sync_flush: log.config().ack == AckPoint::Synced,
            refusing: shard.refusing(),
            committed: -1,
            pull_offset: -1,
            reset_to: -1,
            deliveries_known_since_ms: self.deliveries.known_since_ms(),
            ..QueueFacts::default()
        };
        if asked.topic == HALF_TOPIC {
            facts.half = address::split(asked.physical_offset).map(|(_, position)| {
                half_facts(shard, position, self.config.transaction_check_max)
            });
        }
        let Some(queue) = shard.queues().find(&asked.topic, asked.queue_id) else {
            return facts;
        };
        let (min, max) = shard.bounds(queue).unwrap_or((0, 0));
        facts.min_offset = min as i64;
        facts.max_offset = max as i64;
        if !asked.group.is_empty() {
            self.group_at(local, queue, asked, &mut facts);
        }
        facts
    }

    /// How a group stands to a message of a queue.
    fn group_at(&self, local: usize, queue: QueueIndex, asked: &Question, facts: &mut QueueFacts) {
        let Some(shard) = self.shards.get(local).map(|local| &local.shard) else {
            return;
        };
        let (topic, group, id) = (&*asked.topic, &*asked.group, asked.queue_id);
        if let Some(entry) = shard.offsets().get(topic, group, id) {
            facts.committed = entry.offset;
            facts.pull_offset = entry.pull_offset;
            facts.pulled_ms = entry.pulled_ms;
            facts.reset_to = entry.reset_to;
        }
        let waits = |token: &u64| self.pulls.get(*token).is_some_and(|p| &*p.group == group);
        facts.pulls_waiting = shard.parked_on(queue).filter(waits).count();
        facts.pops_waiting = self.pops_waiting(local, topic, group);
        let Ok(offset) = u64::try_from(asked.queue_offset) else {
            return;
        };
        let table = shard.pop();
        if let Some(index) = table.find(topic, group, id) {
            facts.held = table.figures(index).in_flight;
            facts.blocked_until_ms = table.blocked_until_ms(index);
            facts.holding = table.holding(index, offset).map(|held| HoldingFacts {
                ordered: held.ordered,
                acked: held.acked,
                pop_ms: held.pop_ms,
                due_ms: held.due_ms,
                count: held.count,
            });
        }
        let of_queue = (shard.number(), queue);
        let (found, all) = self.deliveries.of(of_queue, group_of(group), offset);
        facts.deliveries = found.iter().map(delivery_facts).collect();
        facts.deliveries_count = all;
    }
}

fn delivery_facts(delivery: &Delivery) -> DeliveryFacts {
    DeliveryFacts {
        first_ms: delivery.first_ms,
        last_ms: delivery.first_ms + i64::from(delivery.span_ms),
        client: delivery.client().to_string(),
        popped: delivery.popped,
    }
}

fn half_facts(shard: &Shard, position: u64, checks_max: u32) -> HalfFacts {
    if let Some(half) = shard.half(position) {
        return HalfFacts {
            state: HalfState::Open,
            checks: half.checks,
            checks_max,
            asked_ms: half.asked_ms,
            due_ms: half.due_ms,
        };
    }
    let state = match shard.half_ended(position) {
        Ended::Now(how, _) | Ended::Before(how, _) => match how {
            HalfEnd::Committed => HalfState::Committed,
            HalfEnd::RolledBack => HalfState::RolledBack,
            HalfEnd::GivenUp => HalfState::GivenUp,
            HalfEnd::Dropped => HalfState::Dropped,
        },
        Ended::Unknown => HalfState::Unknown,
    };
    HalfFacts {
        state,
        checks_max,
        ..HalfFacts::default()
    }
}
