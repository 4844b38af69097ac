//! Acknowledgements and longer invisible times.
//!
//! Invariant: an acknowledgement is answered with success only when the message was held under the
//! receipt or its receipt is still in time (then it was acknowledged before); never when the
//! message may be given to somebody else.

use wire::codes::response;
use wire::header::{ExtValue, Header, Reply, encode_reply};
use wire::requests::{AckMessage, ChangeInvisibleTime};

use shard::pop::PopIndex;

use super::super::directory::QueueHome;
use super::super::messages::ReplyTo;
use super::super::state::{State, encode_plain};
use super::order::INVISIBLE_MS_MAX;
use super::receipt::{ORDERED_REVIVE_QUEUE, Receipt, normal_topic};
use crate::control::effects::Origin;

/// Why an acknowledgement is too late.
const TOO_LATE: &str = "the invisible time of this receipt is over: the message is given again";

/// A message as a request names it.
pub(super) struct Named<'a> {
    pub(super) topic: &'a str,
    pub(super) group: &'a str,
    pub(super) queue_id: i32,
}

impl State {
    /// The home of a named queue, or code and remark of the answer.
    pub(super) fn home_of_named(&self, named: &Named<'_>) -> Result<QueueHome, (i32, String)> {
        let topic = named.topic;
        let Some(entry) = self.directory.topics.get(topic) else {
            let remark = format!("topic[{topic}] not exist");
            return Err((response::TOPIC_NOT_EXIST, remark));
        };
        let home = usize::try_from(named.queue_id)
            .ok()
            .and_then(|id| entry.homes.get(id));
        let bound = entry.homes.len();
        home.copied().ok_or_else(|| {
            let remark = format!("queueId {} of topic {topic}, bound {bound}", named.queue_id);
            (response::MESSAGE_ILLEGAL, remark)
        })
    }

    fn has_offset(&self, local: usize, home: QueueHome, offset: i64) -> bool {
        let bounds = self
            .shards
            .get(local)
            .and_then(|local| local.shard.bounds(home.index));
        bounds.is_some_and(|(min, end)| (min as i64..end as i64).contains(&offset))
    }

    fn pop_index(&self, local: usize, named: &Named<'_>) -> Option<PopIndex> {
        let table = self.shards.get(local)?.shard.pop();
        table.find(named.topic, named.group, named.queue_id)
    }

    /// The shard of this core that has the message, given by offset and receipt, and the receipt.
    /// None: the request went to another core, or was refused.
    fn held_here(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        whole: &[u8],
        named: &Named<'_>,
        (offset, extra_info): (i64, &str),
    ) -> Option<(usize, Receipt)> {
        let home = match self.home_of_named(named) {
            Ok(home) => home,
            Err((code, remark)) => {
                self.answer(reply, code, Some(&remark));
                return None;
            }
        };
        if self.sent_on(home.shard, origin, reply, whole, None) {
            return None;
        }
        let local = self.local_shard(home.shard)?;
        let Some(receipt) = Receipt::parse(extra_info) else {
            let remark = format!("extraInfo {extra_info:?} is no receipt");
            self.answer(reply, response::MESSAGE_ILLEGAL, Some(&remark));
            return None;
        };
        if !self.has_offset(local, home, offset) {
            let remark = format!("offset {offset} is not in the queue");
            self.answer(reply, response::NO_MESSAGE, Some(&remark));
            return None;
        }
        Some((local, receipt))
    }

    /// Handles ACK_MESSAGE.
    pub fn on_pop_ack(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        let ack = match AckMessage::decode(&header.ext) {
            Ok(ack) => ack,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let named = Named {
            topic: &ack.topic,
            group: &ack.consumer_group,
            queue_id: ack.queue_id,
        };
        let message = (ack.offset, &*ack.extra_info);
        let Some((local, receipt)) = self.held_here(origin, reply, whole, &named, message) else {
            return;
        };
        match self.ack_held(local, &named, receipt.pop_ms, &[ack.offset as u64]) {
            Ok((0, _)) if receipt.is_over(self.now.wall_ms) => {
                self.answer(reply, response::NO_MESSAGE, Some(TOO_LATE));
            }
            Ok((_, end)) => {
                let mut frame = Vec::with_capacity(128);
                encode_plain(&mut frame, reply, response::SUCCESS, None);
                self.reply_unless_oneway(reply, local, end, &frame);
            }
            Err(refusal) => self.refuse(reply, &refusal),
        }
    }

    pub(super) fn reply_unless_oneway(
        &mut self,
        reply: &ReplyTo,
        local: usize,
        end: u64,
        frame: &[u8],
    ) {
        if !reply.oneway {
            self.reply_at(reply, local, end, frame);
        }
    }

    /// Settles messages held under a receipt; returns how many, and where that stands in the log.
    pub(super) fn ack_held(
        &mut self,
        local: usize,
        named: &Named<'_>,
        pop_ms: i64,
        offsets: &[u64],
    ) -> Result<(usize, u64), shard::Refusal> {
        let index = self.pop_index(local, named);
        let (now, now_ms) = (self.now, self.now.wall_ms);
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return Ok((0, 0));
        };
        let Some(index) = index else {
            return Ok((0, shard.log().tail()));
        };
        let first = offsets.first().copied().unwrap_or(0);
        let ordered = shard.pop().is_ordered(index, first);
        let acked = shard.pop_ack(now, index, pop_ms, offsets)?;
        if ordered && acked.0 > 0 && !shard.pop().blocked(index, "", now_ms) {
            self.wake_pops(
                local,
                normal_topic(named.topic, named.group),
                named.group,
                None,
            );
        }
        Ok(acked)
    }

    /// Handles CHANGE_MESSAGE_INVISIBLETIME.
    pub fn on_pop_change(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        let change = match ChangeInvisibleTime::decode(&header.ext) {
            Ok(change) => change,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let named = Named {
            topic: &change.topic,
            group: &change.consumer_group,
            queue_id: change.queue_id,
        };
        let message = (change.offset, &*change.extra_info);
        let Some((local, receipt)) = self.held_here(origin, reply, whole, &named, message) else {
            return;
        };
        let invisible_ms = change.invisible_time.clamp(0, INVISIBLE_MS_MAX);
        self.change_held(
            reply,
            local,
            &named,
            (change.offset as u64, receipt),
            invisible_ms,
        );
    }

    fn change_held(
        &mut self,
        reply: &ReplyTo,
        local: usize,
        named: &Named<'_>,
        (offset, receipt): (u64, Receipt),
        invisible_ms: i64,
    ) {
        let index = self.pop_index(local, named);
        let now = self.now;
        let ordered = receipt.revive_queue == ORDERED_REVIVE_QUEUE;
        // In order the receipt stays the same, else the change makes a new one. Receipts differ by
        // their pop time alone, so that a change in the millisecond of the pop needs the next one.
        let (pop_ms, due_ms) = if ordered {
            (receipt.pop_ms, now.wall_ms + invisible_ms)
        } else {
            let pop_ms = now.wall_ms.max(receipt.pop_ms.saturating_add(1));
            (pop_ms, pop_ms.saturating_add(invisible_ms))
        };
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return;
        };
        let changed = index.map_or(Ok(None), |index| {
            shard.pop_change(now, index, (offset, receipt.pop_ms), (pop_ms, due_ms))
        });
        let end = match changed {
            Ok(Some(end)) => end,
            Ok(None) => return self.answer(reply, response::NO_MESSAGE, Some(TOO_LATE)),
            Err(refusal) => return self.refuse(reply, &refusal),
        };
        let ext = [
            ("invisibleTime", ExtValue::Int(due_ms - pop_ms)),
            ("popTime", ExtValue::Int(pop_ms)),
            ("reviveQid", ExtValue::Int(receipt.revive_queue)),
        ];
        let head = Reply {
            code: response::SUCCESS,
            opaque: reply.opaque,
            remark: None,
            ext: &ext,
        };
        let mut frame = Vec::with_capacity(128);
        encode_reply(&mut frame, reply.serialization, &head, &[]);
        self.reply_unless_oneway(reply, local, end, &frame);
    }
}
