//! Requests about one queue, answered by the shard that owns it: consumer offsets, bounds, times.
//!
//! Invariant: a committed offset is in the log before its answer leaves.

use shard::cold::Question;
use wire::codes::{request, response};
use wire::header::{ExtValue, Header, Reply, encode_reply};
use wire::requests::{QueryOffset, SearchOffset, UpdateOffset};

use super::directory::QueueHome;
use super::gather::{ColdAsk, Then};
use super::messages::ReplyTo;
use super::state::State;
use crate::control::effects::{OffsetSet, Origin};

impl State {
    /// Handles codes 14, 15, 29, 30, 31, 32 and 321.
    pub fn on_queue_request(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        let ext = &header.ext;
        let (topic, queue_id) = match (ext.need_str("topic"), ext.need_i32("queueId")) {
            (Ok(topic), Ok(queue_id)) => (topic, queue_id),
            (Err(error), _) | (_, Err(error)) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let Some(entry) = self.directory.topics.get(&*topic) else {
            if header.code == request::QUERY_CONSUME_QUEUE {
                return self.no_queue_units(reply, &topic, queue_id);
            }
            return self.no_topic(origin, reply, header.code, whole, &topic);
        };
        let home = usize::try_from(queue_id)
            .ok()
            .and_then(|id| entry.homes.get(id))
            .copied();
        let Some(home) = home else {
            return match header.code {
                request::GET_MAX_OFFSET | request::GET_MIN_OFFSET => self.answer_offset(reply, 0),
                request::QUERY_CONSUME_QUEUE => self.no_queue_units(reply, &topic, queue_id),
                _ => {
                    let bound = entry.homes.len();
                    let remark = format!("queueId {queue_id} of topic {topic}, bound {bound}");
                    self.answer(reply, response::INVALID_PARAMETER, Some(&remark));
                }
            };
        };
        if self.sent_on(home.shard, origin, reply, whole, None) {
            return;
        }
        let Some(local) = self.local_shard(home.shard) else {
            return;
        };
        match header.code {
            request::QUERY_CONSUMER_OFFSET => self.query_offset(reply, header, local, home),
            request::UPDATE_CONSUMER_OFFSET => {
                self.update_offset(origin, reply, header, (local, home), whole);
            }
            request::SEARCH_OFFSET_BY_TIMESTAMP => self.search_offset(reply, header, local, home),
            request::GET_EARLIEST_MSG_STORETIME => self.earliest_time(reply, local, home),
            request::QUERY_CONSUME_QUEUE => self.query_units(reply, header, local, home),
            code => {
                let bounds = self
                    .shards
                    .get(local)
                    .and_then(|l| l.shard.bounds(home.index));
                let (min, max) = bounds.unwrap_or((0, 0));
                let offset = if code == request::GET_MAX_OFFSET {
                    max
                } else {
                    min
                };
                self.answer_offset(reply, offset as i64);
            }
        }
    }

    fn no_topic(&mut self, origin: &Origin, reply: &ReplyTo, code: i32, whole: &[u8], topic: &str) {
        match code {
            request::GET_MAX_OFFSET | request::GET_MIN_OFFSET => self.answer_offset(reply, 0),
            request::QUERY_CONSUMER_OFFSET => {
                let remark =
                    format!("Not found, maybe this group consumer boot first: topic {topic}");
                self.answer(reply, response::QUERY_NOT_FOUND, Some(&remark));
            }
            _ => self.to_creation(origin, whole),
        }
    }

    fn answer_offset(&mut self, reply: &ReplyTo, offset: i64) {
        self.answer_number(reply, "offset", offset);
    }

    /// Answers with one number.
    pub fn answer_number(&mut self, reply: &ReplyTo, name: &str, value: i64) {
        if reply.oneway {
            return;
        }
        let mut frame = std::mem::take(&mut self.scratch.reply);
        frame.clear();
        let ext = [(name, ExtValue::Int(value))];
        let head = Reply {
            code: response::SUCCESS,
            opaque: reply.opaque,
            remark: None,
            ext: &ext,
        };
        encode_reply(&mut frame, reply.serialization, &head, &[]);
        self.deliver(reply.link, &frame);
        self.scratch.reply = frame;
    }

    fn query_offset(
        &mut self,
        reply: &ReplyTo,
        header: &Header<'_>,
        local: usize,
        home: QueueHome,
    ) {
        let query = match QueryOffset::decode(&header.ext) {
            Ok(query) => query,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let Some(shard) = self.shards.get(local).map(|local| &local.shard) else {
            return;
        };
        let stored = shard
            .offsets()
            .get(&query.topic, &query.consumer_group, query.queue_id);
        if let Some(entry) = stored
            && (entry.reset_to >= 0 || entry.offset >= 0)
        {
            let offset = if entry.reset_to >= 0 {
                entry.reset_to
            } else {
                entry.offset
            };
            return self.answer_offset(reply, offset);
        }
        // A new group reads a queue that still has its first message from the start, as RocketMQ
        // does while that message is in memory. Here a message is "in memory" as long as the
        // shard's write buffer holds it.
        let first_is_hot = shard.bounds(home.index).is_some_and(|(min, max)| {
            min == 0 && max > 0 && shard.holds_first_in_memory(home.index)
        });
        if query.set_zero_if_not_found != Some(false) && first_is_hot {
            return self.answer_offset(reply, 0);
        }
        let remark = "Not found, maybe this group consumer boot first";
        self.answer(reply, response::QUERY_NOT_FOUND, Some(remark));
    }

    fn update_offset(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        (local, home): (usize, QueueHome),
        whole: &[u8],
    ) {
        let update = match UpdateOffset::decode(&header.ext) {
            Ok(update) => update,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        if !self.directory.groups.contains_key(&*update.consumer_group) {
            return self.to_creation(origin, whole);
        }
        if update.commit_offset < 0 {
            let remark = format!("commitOffset {} is negative", update.commit_offset);
            return self.answer(reply, response::INVALID_PARAMETER, Some(&remark));
        }
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return;
        };
        let (topic, group) = (&*update.topic, &*update.consumer_group);
        let pending = shard.offsets().get(topic, group, update.queue_id);
        // A consumer of a topic that was deleted and made again still commits where it stood.
        let end = shard.bounds(home.index).map_or(0, |(_, end)| end as i64);
        let stale =
            update.commit_offset > end && self.directory.made_again.contains(&*update.topic);
        if stale || pending.is_some_and(|entry| entry.reset_to >= 0) {
            return self.answer(reply, response::SUCCESS, None);
        }
        let offset = update.commit_offset;
        match shard.commit_offset(self.now, topic, group, update.queue_id, offset) {
            Ok(end) => {
                if !reply.oneway {
                    let mut frame = Vec::with_capacity(128);
                    super::state::encode_plain(&mut frame, reply, response::SUCCESS, None);
                    self.reply_at(reply, local, end, &frame);
                }
            }
            Err(refusal) => self.refuse(reply, &refusal),
        }
    }

    fn search_offset(
        &mut self,
        reply: &ReplyTo,
        header: &Header<'_>,
        local: usize,
        home: QueueHome,
    ) {
        let search = match SearchOffset::decode(&header.ext) {
            Ok(search) => search,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let upper = search
            .boundary_type
            .as_deref()
            .is_some_and(|b| b.eq_ignore_ascii_case("upper"));
        let then = Then::AnswerOffset(*reply);
        self.find_offset(local, home.index, search.timestamp, !upper, then);
    }

    /// Finds an offset by store time and then does what `then` says.
    pub fn find_offset(
        &mut self,
        local: usize,
        queue: shard::queue::QueueIndex,
        timestamp: i64,
        lower: bool,
        then: Then,
    ) {
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return;
        };
        if let Some(offset) = shard.search_in_memory(queue, timestamp, lower) {
            return self.found_offset(then, offset);
        }
        let question = Question::Time {
            queue,
            timestamp,
            lower,
        };
        self.ask_cold(local, question, ColdAsk { then, local });
    }

    fn earliest_time(&mut self, reply: &ReplyTo, local: usize, home: QueueHome) {
        let time = self
            .shards
            .get(local)
            .map_or(-1, |l| l.shard.first_store_timestamp(home.index));
        self.answer_number(reply, "timestamp", time);
    }

    /// Sets offsets on this core's shards.
    pub fn on_set_offsets(&mut self, sets: &[OffsetSet], reset: bool) {
        for set in sets {
            let home = usize::try_from(set.queue_id).ok().and_then(|id| {
                self.directory
                    .topics
                    .get(&*set.topic)?
                    .homes
                    .get(id)
                    .copied()
            });
            let Some(local) = home.and_then(|home| self.local_shard(home.shard)) else {
                continue;
            };
            let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
                continue;
            };
            let (topic, group) = (&set.topic, &set.group);
            let offset = set.offset.unwrap_or(-1);
            if let Err(refusal) = shard.commit_offset(self.now, topic, group, set.queue_id, offset)
            {
                tracing::warn!(topic, group, queue_id = set.queue_id, %refusal, "offset not set");
                self.settling.note_lost();
            }
            if reset && offset >= 0 {
                shard.set_reset(topic, group, set.queue_id, offset);
            }
        }
    }
}
