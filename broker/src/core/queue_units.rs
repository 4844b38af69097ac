//! The units of a queue as an administrator looks at them (code 321).
//!
//! Invariant: asking creates neither a topic nor a group, and one answer has at most
//! [`UNITS_PER_ANSWER_MAX`] units.

use shard::cold::Question;
use shard::units::Unit;
use wire::body::{ConsumeQueueData, QueryConsumeQueueBody};
use wire::codes::response;
use wire::header::{Header, Reply, encode_reply};
use wire::requests::QueryConsumeQueue;

use super::directory::QueueHome;
use super::gather::{ColdAsk, Then};
use super::messages::ReplyTo;
use super::state::State;

/// Units in one answer at most, whatever is asked for.
pub const UNITS_PER_ANSWER_MAX: i32 = 1_024;

/// An answer that still lacks the units.
#[derive(Debug)]
pub struct UnitsAnswer {
    reply: ReplyTo,
    index: i64,
    queue: String,
    body: QueryConsumeQueueBody,
}

impl State {
    /// Answers that a queue does not exist, as RocketMQ does.
    pub fn no_queue_units(&mut self, reply: &ReplyTo, topic: &str, queue_id: i32) {
        let remark = format!("{queue_id}@{topic} is not exist!");
        self.answer(reply, response::SYSTEM_ERROR, Some(&remark));
    }

    /// Handles code 321 where the queue lives.
    pub fn query_units(
        &mut self,
        reply: &ReplyTo,
        header: &Header<'_>,
        local: usize,
        home: QueueHome,
    ) {
        let query = match QueryConsumeQueue::decode(&header.ext) {
            Ok(query) => query,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let shard = self.shards.get(local).map(|local| &local.shard);
        let Some((min, max)) = shard.and_then(|shard| shard.bounds(home.index)) else {
            return self.no_queue_units(reply, &query.topic, query.queue_id);
        };
        let mut answer = UnitsAnswer {
            reply: *reply,
            index: query.index,
            queue: format!("{}@{}", query.queue_id, query.topic),
            body: QueryConsumeQueueBody {
                min_queue_index: min as i64,
                max_queue_index: max as i64,
                ..QueryConsumeQueueBody::default()
            },
        };
        if let Some(group) = query.consumer_group.as_deref() {
            let members = self.directory.subscriptions.get(group);
            let subscription = members.and_then(|members| members.subscriptions.get(&*query.topic));
            answer.body.filter_data = Some(match subscription {
                Some(_) => "null".to_owned(),
                None => format!("{group}@{} is not online!", query.topic),
            });
            answer.body.subscription_data = subscription.map(|found| found.data.clone());
        }
        let units_max = query.count.clamp(0, UNITS_PER_ANSWER_MAX) as usize;
        let question = Question::Units {
            queue: home.index,
            offset: query.index,
            units_max,
        };
        let then = Then::AnswerUnits(Box::new(answer));
        self.ask_cold(local, question, ColdAsk { then, local });
    }

    /// Answers code 321 with the units found.
    pub fn answer_units(&mut self, mut answer: UnitsAnswer, units: &[Unit]) {
        let to = answer.reply;
        let remark = format!("Index {} of {} is not exist!", answer.index, answer.queue);
        let data = units.iter().map(|unit| ConsumeQueueData {
            physic_offset: unit.physical_offset,
            physic_size: i32::try_from(unit.size).unwrap_or(i32::MAX),
            tags_code: unit.tags_code,
            ..ConsumeQueueData::default()
        });
        answer.body.queue_data = data.collect();
        let body = match wire::body::to_json(&answer.body) {
            Ok(_) if units.is_empty() => Vec::new(),
            Ok(body) => body,
            Err(error) => {
                return self.answer(&to, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let head = Reply {
            code: response::SUCCESS,
            opaque: to.opaque,
            remark: units.is_empty().then_some(remark.as_str()),
            ext: &[],
        };
        let mut frame = Vec::with_capacity(body.len() + 256);
        encode_reply(&mut frame, to.serialization, &head, &body);
        self.deliver(to.link, &frame);
    }

    /// The disk failed to tell the units.
    pub fn refuse_units(&mut self, answer: &UnitsAnswer, reason: &str) {
        let remark = format!("disk: read failed: {reason}");
        self.answer(&answer.reply, response::SYSTEM_ERROR, Some(&remark));
    }
}
