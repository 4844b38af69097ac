//! The send path: from a request to a record in the shard's ring and an answer behind its
//! watermark.
//!
//! Read it in this order: [`State::on_send`] finds the queue and its home, [`State::append_single`]
//! puts the message into the ring, [`State::finish_send`] lets the answer go as soon as the shard's
//! watermark allows it.
//!
//! Invariant: whatever is refused was not stored, and whatever is acknowledged is as durable as the
//! flush mode promises (P1).

use shard::queue::QueueIndex;
use shard::{Appended, NewMessage, Refusal, Shard};
use wire::codes::{request, response};
use wire::header::{FieldError, Header, SendAnswerFields};
use wire::message::{PROPERTIES_BYTES_MAX, batch, ids, properties, sysflag, tags};
use wire::requests::SendRequest;

use super::canary::{self, Canary};
use super::directory::QueueHome;
use super::messages::ReplyTo;
use super::replies::Awaited;
use super::state::State;
use super::timed::{Due, TIME_PROPERTIES, due_of};
use crate::control::effects::Origin;
use crate::control::names;

/// What the properties of a message ask the broker for.
#[derive(Clone, Copy, Default)]
pub(super) struct Wishes {
    delay_level: i32,
    pub(super) tags_code: i64,
    pub(super) transaction: bool,
    pub(super) timer: bool,
    /// Whether it was delivered at a time of its own before; then it is not again.
    timed_out: bool,
    due_ms: Option<i64>,
    pub(super) unique: Option<(usize, usize)>,
    pub(super) keys: Option<(usize, usize)>,
}

/// A request and where it goes.
pub(super) struct Target {
    pub(super) local: usize,
    pub(super) queue: QueueIndex,
    pub(super) queue_id: i32,
    /// Whether a retry ended among the dead letters: its delay does not count any more.
    dead: bool,
}

impl Target {
    /// Names the real queue in the properties of a message that first stands elsewhere.
    pub(super) fn name_in(&self, stored: &mut Vec<u8>, shard: &Shard) {
        let queue = shard.queues().get(self.queue);
        let topic = queue.map_or("", |queue| &*queue.topic);
        properties::append(stored, properties::REAL_TOPIC, topic);
        let queue_id = self.queue_id.to_string();
        properties::append(stored, properties::REAL_QUEUE_ID, &queue_id);
    }

    /// The message of a request; what was found stands in the first part of its properties.
    pub(super) fn message<'a>(
        &self,
        origin: &Origin,
        request: &SendRequest<'_>,
        found: &Wishes,
        body: &'a [u8],
        parts: &'a [&'a [u8]],
    ) -> NewMessage<'a> {
        let stored = parts.first().copied().unwrap_or_default();
        NewMessage {
            queue: self.queue,
            flag: request.flag,
            sys_flag: request.sys_flag,
            born_timestamp: request.born_timestamp,
            born_host: origin.peer,
            reconsume_times: request.reconsume_times,
            prepared_transaction_offset: 0,
            body,
            properties: parts,
            tags_code: found.tags_code,
            unique_key: found.unique.map(|place| cut(place, stored)),
            keys: found.keys.map(|place| cut(place, stored)),
        }
    }
}

fn place(stored: &[u8], value: &[u8]) -> (usize, usize) {
    (
        value.as_ptr() as usize - stored.as_ptr() as usize,
        value.len(),
    )
}

fn cut((at, len): (usize, usize), stored: &[u8]) -> &[u8] {
    stored.get(at..at + len).unwrap_or_default()
}

/// Reads what matters out of a property string, in one pass.
fn wishes(stored: &[u8]) -> Wishes {
    let mut found = Wishes::default();
    for (name, value) in properties::iter(stored) {
        match name {
            b"TAGS" => found.tags_code = tags::tags_code(std::str::from_utf8(value).ok()),
            b"KEYS" => found.keys = Some(place(stored, value)),
            b"UNIQ_KEY" => found.unique = Some(place(stored, value)),
            b"DELAY" => {
                let level = std::str::from_utf8(value)
                    .ok()
                    .and_then(|text| text.parse().ok());
                found.delay_level = level.unwrap_or(0);
            }
            b"TRAN_MSG" => found.transaction = value == b"true",
            b"TIMER_DELAY_SEC" | b"TIMER_DELAY_MS" | b"TIMER_DELIVER_MS" => found.timer = true,
            b"TIMER_OUT_MS" => found.timed_out = true,
            _ => {}
        }
    }
    found
}

/// Messages of a batch and the log bytes they take at most, or what is wrong with it.
fn measure_batch(body: &[u8]) -> Result<(u64, u64), String> {
    let (mut count, mut bytes) = (0, 0);
    for message in batch::iter(body) {
        let message = message.map_err(|error| error.to_string())?;
        if message.properties.len() > PROPERTIES_BYTES_MAX {
            return Err(format!(
                "message {count} of the batch: properties over {PROPERTIES_BYTES_MAX} bytes"
            ));
        }
        let found = wishes(message.properties);
        let is_timed = found.delay_level > 0 || (found.timer && !found.timed_out);
        if is_timed || found.transaction {
            return Err(format!(
                "message {count} of the batch is delayed or a half message; send it alone"
            ));
        }
        count += 1;
        bytes += (message.body.len() + message.properties.len() + 512) as u64;
    }
    if count == 0 {
        Err("the batch is empty".to_owned())
    } else {
        Ok((count, bytes))
    }
}

fn is_prepared(request: &SendRequest<'_>) -> bool {
    sysflag::transaction_type(request.sys_flag) == sysflag::TRANSACTION_PREPARED
}

fn decode<'a>(header: &Header<'a>) -> Result<SendRequest<'a>, FieldError> {
    if matches!(
        header.code,
        request::SEND_MESSAGE | request::SEND_REPLY_MESSAGE
    ) {
        SendRequest::decode_long(&header.ext)
    } else {
        SendRequest::decode_short(&header.ext)
    }
}

impl State {
    /// Handles a send (codes 10, 310, 320).
    pub fn on_send(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
        body: &[u8],
        chosen: Option<i32>,
    ) {
        let request = match decode(header) {
            Ok(request) => request,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let named = request.topic.to_cow();
        let dead_letters = self.dead_letter_topic(&named, &request);
        let topic = dead_letters.as_deref().unwrap_or(&named);
        let wanted = if dead_letters.is_some() {
            0
        } else {
            chosen.unwrap_or(request.queue_id)
        };
        if !names::is_sendable(topic) {
            return self.to_creation(origin, whole);
        }
        let is_batch = header.code == request::SEND_BATCH_MESSAGE || request.batch;
        if let Err((code, remark)) = self.check_send(&request, topic, body, is_batch) {
            return self.answer(reply, code, Some(&remark));
        }
        let (queue_id, home) = match self.choose_queue(topic, wanted) {
            Some(Ok(found)) => found,
            Some(Err(remark)) => {
                return self.answer(reply, response::INVALID_PARAMETER, Some(&remark));
            }
            None => return self.to_creation(origin, whole),
        };
        if self.sent_on(home.shard, origin, reply, whole, Some(queue_id)) {
            return;
        }
        let Some(local) = self.local_shard(home.shard) else {
            return;
        };
        if self.disks.refuses()
            && let Some(refusal) = self.hanging_disk(local, reply)
        {
            return self.refuse(reply, &refusal);
        }
        if self.must_wait_behind_others(local) {
            return self.hold(local, origin, reply, whole, queue_id, None);
        }
        let target = Target {
            local,
            queue: home.index,
            queue_id,
            dead: dead_letters.is_some(),
        };
        let refused = if is_batch {
            self.append_batch(origin, reply, &request, body, &target)
        } else {
            self.append_single(origin, reply, &request, body, &target)
        };
        if let Err(refusal) = refused {
            self.hold(local, origin, reply, whole, queue_id, Some(refusal));
        }
    }

    /// A send to a retry topic that has used up its deliveries goes to the dead letters.
    fn dead_letter_topic(&self, topic: &str, request: &SendRequest<'_>) -> Option<String> {
        let group = topic.strip_prefix(names::RETRY_PREFIX)?;
        let config = self.directory.groups.get(group)?;
        let most = request
            .max_reconsume_times
            .unwrap_or(config.retry_max_times);
        (request.reconsume_times > most).then(|| format!("{}{group}", names::DLQ_PREFIX))
    }

    fn check_send(
        &self,
        request: &SendRequest<'_>,
        topic: &str,
        body: &[u8],
        is_batch: bool,
    ) -> Result<(), (i32, String)> {
        let illegal = |remark: String| Err((response::MESSAGE_ILLEGAL, remark));
        if self.hot.permission & wire::body::PERM_WRITE == 0 {
            let remark = "this broker takes no messages (brokerPermission)".to_owned();
            return Err((response::NO_PERMISSION, remark));
        }
        let most = self.hot.message_bytes_max;
        if body.len() > most {
            return illegal(format!(
                "body of {} bytes, bound {most} (maxMessageSize)",
                body.len()
            ));
        }
        let properties_bytes = request.properties.map_or(0, |text| text.bytes_max());
        if properties_bytes > PROPERTIES_BYTES_MAX * 6 {
            return illegal(format!("properties over {PROPERTIES_BYTES_MAX} bytes"));
        }
        if is_batch && topic.starts_with(names::RETRY_PREFIX) {
            return illegal("a batch cannot be sent to a retry topic".to_owned());
        }
        if is_batch && is_prepared(request) {
            return illegal("a batch cannot be a half message".to_owned());
        }
        Ok(())
    }

    /// The queue a message goes to, and its home; `None` when there is no such topic.
    fn choose_queue(
        &mut self,
        topic: &str,
        wanted: i32,
    ) -> Option<Result<(i32, QueueHome), String>> {
        let entry = self.directory.topics.get_mut(topic)?;
        let bound = entry
            .config
            .write_queue_nums
            .max(entry.config.read_queue_nums);
        if wanted >= bound {
            let remark = format!("queueId {wanted} of topic {topic}, bound {bound}");
            return Some(Err(remark));
        }
        let queue_id = if wanted >= 0 {
            wanted
        } else {
            entry.choose_queue(|shard| self.disks.is_slow(shard))
        };
        Some(match entry.homes.get(queue_id as usize) {
            Some(home) => Ok((queue_id, *home)),
            None => Err(format!("queueId {queue_id} of topic {topic} has no home")),
        })
    }

    /// Puts the properties of a single message into the scratch; the error is what is illegal.
    fn prepare_properties(
        &mut self,
        request: &SendRequest<'_>,
        dead: bool,
    ) -> Result<Wishes, (i32, String)> {
        let illegal = |remark: String| (response::MESSAGE_ILLEGAL, remark);
        let stored = &mut self.scratch.properties;
        stored.clear();
        if let Some(text) = request.properties {
            text.append_to(stored);
        }
        if stored.len() > PROPERTIES_BYTES_MAX {
            let bytes = stored.len();
            return Err(illegal(format!(
                "properties of {bytes} bytes, bound {PROPERTIES_BYTES_MAX}"
            )));
        }
        if properties::needs_separator(stored) {
            stored.push(properties::ENTRY_SEPARATOR);
        }
        let mut found = wishes(stored);
        if found.timer || (dead && found.delay_level > 0) {
            found = self.settle_times(found, dead)?;
        }
        let stored = &mut self.scratch.properties;
        if found.unique.is_none() {
            let unique = super::unique::append_unique_key(stored, self.store_host, self.now);
            found.unique = Some(unique);
        }
        Ok(found)
    }

    /// Decides when a message of the scratch is delivered: a delay level goes before a time of its
    /// own, and neither counts for dead letters or what had its time before.
    fn settle_times(&mut self, mut found: Wishes, dead: bool) -> Result<Wishes, (i32, String)> {
        let stored = &mut self.scratch.properties;
        if dead || found.delay_level > 0 {
            *stored = properties::remove(stored, &TIME_PROPERTIES);
            if dead {
                *stored = properties::remove(stored, &[properties::DELAY]);
            }
            return Ok(wishes(stored));
        }
        if found.timed_out {
            return Ok(found);
        }
        if !self.config.timer_enable {
            let remark = "timer messages are switched off (timerWheelEnable=false)".to_owned();
            return Err((response::SYSTEM_ERROR, remark));
        }
        let due = due_of(stored, self.now.wall_ms, self.config.timer_delay_max_s);
        if let Due::At(due_ms) = due.map_err(|remark| (response::MESSAGE_ILLEGAL, remark))? {
            found.due_ms = Some(due_ms);
        }
        Ok(found)
    }

    fn append_single(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        request: &SendRequest<'_>,
        body: &[u8],
        target: &Target,
    ) -> Result<(), Refusal> {
        let found = match self.prepare_properties(request, target.dead) {
            Ok(found) => found,
            Err((code, remark)) => {
                self.answer(reply, code, Some(&remark));
                return Ok(());
            }
        };
        // What a consumer sends back for a later try is no half message any more.
        let comes_again = request.reconsume_times > 0 && (found.delay_level > 0 || target.dead);
        if (found.transaction || is_prepared(request)) && !comes_again {
            return self.append_half(origin, reply, request, body, target, &found);
        }
        let stored = &mut self.scratch.properties;
        let Some(shard) = self
            .shards
            .get_mut(target.local)
            .map(|local| &mut local.shard)
        else {
            return Ok(());
        };
        let parts: [&[u8]; 2] = [stored, &self.hot.added_properties];
        let message = target.message(origin, request, &found, body, &parts);
        let appended = match (&mut self.null, found.due_ms) {
            (Some(null), _) => null.take(body.len(), self.now.wall_ms),
            (None, _) if self.canary.drops(body) => {
                canary::thrown_away(shard.queues().get(target.queue))
            }
            (None, Some(due_ms)) => shard.append_timed(self.now, message, due_ms)?,
            (None, None) if found.delay_level > 0 => {
                shard.append_delayed(self.now, message, found.delay_level)?
            }
            (None, None) => shard.append(self.now, &message)?,
        };
        self.count_put(target, 1, body.len());
        let handle = found.due_ms.and_then(|due_ms| {
            self.after_timed(origin, reply, target, (&found, due_ms), &appended)
        });
        self.finish_single(reply, target, &appended, &found, handle.as_deref());
        Ok(())
    }

    /// Answers a single message, whose properties are in the scratch.
    pub(super) fn finish_single(
        &mut self,
        reply: &ReplyTo,
        target: &Target,
        appended: &Appended,
        found: &Wishes,
        recall_handle: Option<&str>,
    ) {
        let ids = &mut self.scratch.ids;
        ids.clear();
        ids::offset_msg_id(ids, self.store_host, appended.physical_offset);
        let unique = Some(found.unique.unwrap_or_default());
        self.finish_send(reply, target, appended, unique, recall_handle);
    }

    /// What a timed message needs besides being stored; returns its recall handle.
    fn after_timed(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        target: &Target,
        (found, due_ms): (&Wishes, i64),
        appended: &Appended,
    ) -> Option<String> {
        let shard = &self.shards.get(target.local)?.shard;
        let number = shard.number();
        let topic = shard.queues().get(target.queue)?.topic.to_string();
        let stored = std::mem::take(&mut self.scratch.properties);
        if properties::get(&stored, properties::TIMER_DEL_UNIQKEY).is_some() {
            self.spread_deletion(origin, reply, &stored, due_ms, number);
        }
        let unique = cut(found.unique.unwrap_or_default(), &stored);
        let handle = self.recall_handle(&topic, due_ms, unique, appended);
        self.scratch.properties = stored;
        handle
    }

    fn append_batch(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        request: &SendRequest<'_>,
        body: &[u8],
        target: &Target,
    ) -> Result<(), Refusal> {
        let (count, bytes) = match measure_batch(body) {
            Ok(found) => found,
            Err(problem) => {
                self.answer(reply, response::MESSAGE_ILLEGAL, Some(&problem));
                return Ok(());
            }
        };
        let Some(local) = self.shards.get_mut(target.local) else {
            return Ok(());
        };
        local.shard.check_room(count, bytes, self.now)?;
        self.scratch.ids.clear();
        let mut first: Option<Appended> = None;
        let mut end = 0;
        for message in batch::iter(body).flatten() {
            let found = wishes(message.properties);
            let parts = [message.properties];
            let new = NewMessage {
                flag: message.flag,
                ..target.message(origin, request, &found, message.body, &parts)
            };
            let appended = match &mut self.null {
                Some(null) => Ok(null.take(message.body.len(), self.now.wall_ms)),
                None => local.shard.append(self.now, &new),
            };
            match appended {
                Ok(appended) => {
                    if first.is_some() {
                        self.scratch.ids.push(b',');
                    }
                    let host = self.store_host;
                    ids::offset_msg_id(&mut self.scratch.ids, host, appended.physical_offset);
                    end = appended.end;
                    first.get_or_insert(appended);
                }
                Err(refusal) => {
                    // Room was checked for all, so this is the end of a segment that is not there.
                    self.refuse(reply, &refusal);
                    return Ok(());
                }
            }
        }
        if let Some(first) = first {
            self.count_put(target, count, body.len());
            self.scratch.properties.clear();
            self.finish_send(reply, target, &Appended { end, ..first }, None, None);
        }
        Ok(())
    }

    fn count_put(&mut self, target: &Target, messages: u64, bytes: usize) {
        let queue = self
            .shards
            .get(target.local)
            .and_then(|local| local.shard.queues().get(target.queue));
        if let Some(entry) = queue.and_then(|queue| self.directory.topics.get_mut(&*queue.topic)) {
            entry.put.messages += messages;
            entry.put.bytes += bytes as u64;
        }
    }

    /// Encodes the answer of a send; it leaves now or when the watermark has passed the message.
    /// The message ids are in the id scratch, the unique key in the property scratch.
    fn finish_send(
        &mut self,
        reply: &ReplyTo,
        target: &Target,
        appended: &Appended,
        unique: Option<(usize, usize)>,
        recall_handle: Option<&str>,
    ) {
        if reply.oneway {
            return;
        }
        let unique = unique.map_or(&[] as &[u8], |place| cut(place, &self.scratch.properties));
        let fields = SendAnswerFields {
            opaque: reply.opaque,
            message_ids: &self.scratch.ids,
            queue_id: target.queue_id,
            queue_offset: appended.queue_offset,
            transaction_id: std::str::from_utf8(unique).unwrap_or_default(),
            recall_handle: recall_handle.unwrap_or_default(),
        };
        let answer = &self.hot.send_answer;
        let encode = |out: &mut Vec<u8>| answer.encode(out, reply.serialization, &fields);
        let Some(shard) = self.shards.get_mut(target.local) else {
            return;
        };
        let is_safe = shard.shard.watermark() >= appended.end || self.canary.is(Canary::AckEarly);
        if !shard.replies.is_empty() || !is_safe {
            let now_us = self.now.monotonic_us;
            shard
                .replies
                .push(appended.end, *reply, now_us, Awaited::Send, encode);
            return;
        }
        shard.latency.record(1);
        if usize::from(reply.link.core) == self.core {
            if let Some(out) = self.net.output(reply.link.connection) {
                encode(out);
            }
            return;
        }
        let mut frame = std::mem::take(&mut self.scratch.reply);
        frame.clear();
        self.hot
            .send_answer
            .encode(&mut frame, reply.serialization, &fields);
        self.deliver(reply.link, &frame);
        self.scratch.reply = frame;
    }

    /// Lets an encoded answer go once the shard's watermark reaches `end`.
    pub fn reply_at(&mut self, reply: &ReplyTo, local: usize, end: u64, frame: &[u8]) {
        let now_us = self.now.monotonic_us;
        let Some(shard) = self.shards.get_mut(local) else {
            return;
        };
        let is_safe = shard.shard.watermark() >= end || self.canary.is(Canary::AckEarly);
        if shard.replies.is_empty() && is_safe {
            shard.latency.record(1);
            self.deliver(reply.link, frame);
        } else {
            let encode = |out: &mut Vec<u8>| out.extend_from_slice(frame);
            shard
                .replies
                .push(end, *reply, now_us, Awaited::Other, encode);
        }
    }
}
