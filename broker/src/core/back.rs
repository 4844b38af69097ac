//! Send-back: a consumer could not handle a message, so it comes again later, or goes to the dead
//! letters.
//!
//! Invariant: the original record is read on its own shard, the copy is appended on the shard of
//! the retry queue, and the consumer is answered only behind that shard's watermark.

use shard::NewMessage;
use shard::cold::{Answer, Question};
use wire::codes::response;
use wire::header::Header;
use wire::message::{RecordView, ids, properties};
use wire::requests::{SendBack, ViewMessage};

use super::gather::{ColdAsk, Then};
use super::messages::{MeshMessage, PutOrder, ReplyTo};
use super::state::{State, encode_plain};
use super::timed::deletion_due;
use crate::control::effects::Origin;
use crate::control::names;

/// First client version whose `maxReconsumeTimes` counts (V3_4_9).
const OWN_LIMIT_VERSION: i32 = 121;

/// A send-back that waits for the original record.
#[derive(Debug)]
pub struct BackOrder {
    origin: Origin,
    reply: ReplyTo,
    frame: Vec<u8>,
    group: String,
    delay_level: i32,
    most: i32,
    retry_queues: i32,
}

impl State {
    /// Handles a send-back (code 36).
    pub fn on_send_back(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        let back = match SendBack::decode(&header.ext) {
            Ok(back) => back,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let retry = names::retry_topic(&back.group);
        let Some(config) = self.directory.groups.get(&*back.group).cloned() else {
            return self.to_creation(origin, whole);
        };
        if config.retry_queue_nums <= 0 {
            return self.answer(reply, response::SUCCESS, None);
        }
        if !self.directory.topics.contains_key(&*retry) {
            return self.to_creation(origin, whole);
        }
        if self.hot.permission & wire::body::PERM_WRITE == 0 {
            let remark = "this broker takes no messages (brokerPermission)";
            return self.answer(reply, response::NO_PERMISSION, Some(remark));
        }
        let Some(local) = self.shard_of_offset(back.offset, origin, reply, whole) else {
            return;
        };
        let own_limit = back
            .max_reconsume_times
            .filter(|_| header.version >= OWN_LIMIT_VERSION);
        let order = BackOrder {
            origin: *origin,
            reply: *reply,
            frame: whole.to_vec(),
            group: back.group.to_string(),
            delay_level: back.delay_level,
            most: own_limit.unwrap_or(config.retry_max_times),
            retry_queues: config.retry_queue_nums,
        };
        let question = Question::Record {
            physical_offset: back.offset,
        };
        let then = Then::Back(Box::new(order));
        self.ask_cold(local, question, ColdAsk { then, local });
    }

    /// Goes on with a send-back once the original is there.
    pub fn on_back_record(&mut self, order: BackOrder, answer: Answer) {
        let record = match answer {
            Answer::Records(records) => records.into_iter().next(),
            Answer::Failed(reason) => return self.answer_read_failed(&order.reply, &reason),
            _ => None,
        };
        let view = record
            .as_deref()
            .and_then(|record| RecordView::parse(record).ok());
        let Some(view) = view else {
            let remark = "look message by offset failed: it is not, or no longer, in the log";
            return self.answer(&order.reply, response::SYSTEM_ERROR, Some(remark));
        };
        let dead = order.delay_level < 0 || view.reconsume_times() >= order.most;
        let topic = if dead {
            format!("{}{}", names::DLQ_PREFIX, order.group)
        } else {
            names::retry_topic(&order.group)
        };
        let Some(entry) = self.directory.topics.get(&*topic) else {
            return self.to_creation(&order.origin, &order.frame);
        };
        if entry.config.perm & wire::body::PERM_WRITE == 0 {
            let remark = format!("the topic[{topic}] sending message is forbidden");
            return self.answer(&order.reply, response::NO_PERMISSION, Some(&remark));
        }
        let delay_level = match (dead, order.delay_level) {
            (true, _) => 0,
            (false, 0) => 3 + view.reconsume_times(),
            (false, level) => level,
        };
        let queues = if dead { 1 } else { order.retry_queues.max(1) };
        let queues = queues.min(entry.homes.len().max(1) as i32);
        let queue_id = (self.now.monotonic_us % queues as u64) as i32;
        let put = PutOrder {
            properties: back_properties(&view, dead, delay_level),
            topic,
            queue_id,
            flag: view.flag(),
            sys_flag: view.sys_flag(),
            born_timestamp: view.born_timestamp(),
            born_host: view.born_host(),
            reconsume_times: view.reconsume_times() + 1,
            body: view.body().to_vec(),
            delay_level,
            reply: order.reply,
        };
        self.on_put(put);
    }

    /// Stores a message of the broker's own making, on the core of its queue.
    pub fn on_put(&mut self, order: PutOrder) {
        let home = usize::try_from(order.queue_id).ok().and_then(|id| {
            self.directory
                .topics
                .get(&*order.topic)?
                .homes
                .get(id)
                .copied()
        });
        let Some(home) = home else {
            let remark = format!(
                "queueId {} of topic {} does not exist",
                order.queue_id, order.topic
            );
            return self.answer(&order.reply, response::SYSTEM_ERROR, Some(&remark));
        };
        let Some(local) = self.local_shard(home.shard) else {
            let reply = order.reply;
            let core = self.home_of(home.shard).unwrap_or(self.core);
            if core != self.core {
                self.forward(core, &reply, MeshMessage::Put(Box::new(order)));
            }
            return;
        };
        let stored = order.properties;
        let tags = properties::get_str(&stored, properties::TAGS);
        let message = NewMessage {
            queue: home.index,
            flag: order.flag,
            sys_flag: order.sys_flag,
            born_timestamp: order.born_timestamp,
            born_host: order.born_host,
            reconsume_times: order.reconsume_times,
            prepared_transaction_offset: 0,
            body: &order.body,
            properties: &[&stored],
            tags_code: wire::message::tags::tags_code(tags),
            unique_key: properties::get(&stored, properties::UNIQ_KEY),
            keys: properties::get(&stored, properties::KEYS),
        };
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return;
        };
        let appended = match deletion_due(&stored) {
            _ if order.delay_level > 0 => {
                shard.append_delayed(self.now, message, order.delay_level)
            }
            Some(due_ms) => shard.append_timed(self.now, message, due_ms),
            None => shard.append(self.now, &message),
        };
        match appended {
            Ok(appended) if !order.reply.oneway => {
                let mut frame = Vec::with_capacity(128);
                encode_plain(&mut frame, &order.reply, response::SUCCESS, None);
                self.reply_at(&order.reply, local, appended.end, &frame);
            }
            Ok(_) => {}
            Err(refusal) => self.refuse(&order.reply, &refusal),
        }
    }

    /// Handles a look-up by physical offset (code 33).
    pub fn on_view(&mut self, origin: &Origin, reply: &ReplyTo, header: &Header<'_>, whole: &[u8]) {
        let view = match ViewMessage::decode(&header.ext) {
            Ok(view) => view,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let Some(local) = self.shard_of_offset(view.offset, origin, reply, whole) else {
            return;
        };
        let question = Question::Record {
            physical_offset: view.offset,
        };
        self.ask_cold(
            local,
            question,
            ColdAsk {
                then: Then::AnswerView(*reply),
                local,
            },
        );
    }
}

/// Properties of the copy: where the message came from, first and last, and its delay.
fn back_properties(view: &RecordView<'_>, dead: bool, delay_level: i32) -> Vec<u8> {
    use properties::{
        DELAY, DLQ_ORIGIN_MESSAGE_ID, DLQ_ORIGIN_TOPIC, ORIGIN_MESSAGE_ID, REAL_QUEUE_ID,
        REAL_TOPIC, RETRY_TOPIC, WAIT,
    };
    let old = view.properties();
    let mut stored = properties::remove(old, &[DELAY, REAL_TOPIC, REAL_QUEUE_ID, WAIT]);
    if properties::needs_separator(&stored) {
        stored.push(properties::ENTRY_SEPARATOR);
    }
    let original_topic = std::str::from_utf8(view.topic()).unwrap_or_default();
    let mut id = Vec::new();
    ids::offset_msg_id(&mut id, view.store_host(), view.physical_offset());
    let id = String::from_utf8(id).unwrap_or_default();
    let first_topic = properties::get_str(old, RETRY_TOPIC).unwrap_or(original_topic);
    let first_id = properties::get_str(old, ORIGIN_MESSAGE_ID).unwrap_or(&id);
    if properties::get(old, RETRY_TOPIC).is_none() {
        properties::append(&mut stored, RETRY_TOPIC, first_topic);
    }
    if properties::get(old, ORIGIN_MESSAGE_ID).is_none() {
        properties::append(&mut stored, ORIGIN_MESSAGE_ID, first_id);
    }
    properties::append(&mut stored, WAIT, "false");
    if dead {
        properties::append(&mut stored, DLQ_ORIGIN_TOPIC, first_topic);
        properties::append(&mut stored, DLQ_ORIGIN_MESSAGE_ID, first_id);
    } else {
        properties::append(&mut stored, DELAY, &delay_level.to_string());
    }
    stored
}
