//! Batches of acknowledgements, which may be for queues on several shards.
//!
//! A batch is cut into one request for each shard; their answers come back to the core that cut it
//! under a number that no connection has, and the last one lets the answer go.
//!
//! Invariant: a batch is answered once, after all its parts are as durable as promised.

use std::collections::{BTreeMap, HashMap};

use wire::body::{BatchAck, BatchAckBody, from_json, to_json};
use wire::codes::{request, response};
use wire::frame;
use wire::header::{self, encode_request};

use super::super::messages::ReplyTo;
use super::super::state::{State, encode_plain};
use super::ack::Named;
use super::receipt::retry_topic;
use crate::control::effects::{ClientLink, Origin};

/// Batches whose parts one core waits for.
pub const BATCHES_MAX: usize = 65_536;
/// Messages in one batch.
pub const BATCH_OFFSETS_MAX: usize = 65_536;
/// Numbers from here on stand for batches; connections have smaller ones.
const PART_CONNECTION: u64 = 0xffff << 48;

struct Waiting {
    reply: ReplyTo,
    missing: usize,
    code: i32,
    remark: Option<String>,
}

/// Batches whose parts are on their way.
#[derive(Default)]
pub struct Parts {
    waiting: HashMap<u64, Waiting>,
    next: u64,
}

/// Whether a number stands for a batch.
#[must_use]
pub fn is_part(connection: u64) -> bool {
    connection >= PART_CONNECTION
}

/// The topic that an acknowledgement means.
fn real_topic(ack: &BatchAck) -> String {
    match ack.retry.as_str() {
        "1" => retry_topic(&ack.topic, &ack.consumer_group, false),
        "2" => retry_topic(&ack.topic, &ack.consumer_group, true),
        _ => ack.topic.clone(),
    }
}

fn offsets_of(ack: &BatchAck) -> Vec<u64> {
    let start = ack.start_offset.max(0) as u64;
    let bytes = ack.bit_set.iter().enumerate();
    let bits = bytes.flat_map(|(at, byte)| (0..8).map(move |bit| (at * 8 + bit, byte >> bit & 1)));
    let set = bits.filter(|(_, is_set)| *is_set == 1);
    set.map(|(bit, _)| start + bit as u64)
        .take(BATCH_OFFSETS_MAX)
        .collect()
}

impl State {
    /// Handles BATCH_ACK_MESSAGE.
    pub fn on_batch_ack(&mut self, origin: &Origin, reply: &ReplyTo, whole: &[u8], body: &[u8]) {
        let acks = match from_json::<BatchAckBody>(body) {
            Ok(batch) if !batch.acks.is_empty() => batch.acks,
            Ok(_) => {
                let remark = "the batch of acknowledgements is empty";
                return self.answer(reply, response::NO_MESSAGE, Some(remark));
            }
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let mut by_shard: BTreeMap<u16, Vec<BatchAck>> = BTreeMap::new();
        for ack in acks {
            let topic = real_topic(&ack);
            let named = Named {
                topic: &topic,
                group: &ack.consumer_group,
                queue_id: ack.queue_id,
            };
            match self.home_of_named(&named) {
                Ok(home) => by_shard.entry(home.shard).or_default().push(ack),
                Err((code, remark)) => return self.answer(reply, code, Some(&remark)),
            }
        }
        if by_shard.len() > 1 {
            return self.cut_batch(origin, reply, by_shard);
        }
        let Some((shard, acks)) = by_shard.pop_first() else {
            return;
        };
        if self.sent_on(shard, origin, reply, whole, None) {
            return;
        }
        if let Some(local) = self.local_shard(shard) {
            self.ack_batch(reply, local, &acks);
        }
    }

    fn ack_batch(&mut self, reply: &ReplyTo, local: usize, acks: &[BatchAck]) {
        let mut end = 0;
        let mut late = 0;
        for ack in acks {
            let topic = real_topic(ack);
            let named = Named {
                topic: &topic,
                group: &ack.consumer_group,
                queue_id: ack.queue_id,
            };
            let offsets = offsets_of(ack);
            match self.ack_held(local, &named, ack.pop_time, &offsets) {
                Ok((held, at)) => {
                    end = end.max(at);
                    let due_ms = ack.pop_time.saturating_add(ack.invisible_time);
                    if due_ms <= self.now.wall_ms {
                        late += offsets.len() - held;
                    }
                }
                Err(refusal) => return self.refuse(reply, &refusal),
            }
        }
        let remark = (late > 0).then(|| format!("{late} receipts came too late"));
        let mut frame = Vec::with_capacity(128);
        encode_plain(&mut frame, reply, response::SUCCESS, remark.as_deref());
        self.reply_unless_oneway(reply, local, end, &frame);
    }

    /// Sends each shard its part.
    fn cut_batch(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        by_shard: BTreeMap<u16, Vec<BatchAck>>,
    ) {
        if self.pop.parts.waiting.len() >= BATCHES_MAX {
            let remark = format!("{BATCHES_MAX} batches of acknowledgements wait, the bound");
            return self.answer(reply, response::SERVICE_NOT_AVAILABLE, Some(&remark));
        }
        self.pop.parts.next = (self.pop.parts.next + 1) & 0xffff_ffff;
        let connection = PART_CONNECTION | self.pop.parts.next;
        let waiting = Waiting {
            reply: *reply,
            missing: by_shard.len(),
            code: response::SUCCESS,
            remark: None,
        };
        self.pop.parts.waiting.insert(connection, waiting);
        let link = ClientLink {
            core: self.core as u16,
            connection,
        };
        let origin = Origin { link, ..*origin };
        let part_reply = ReplyTo {
            link,
            oneway: false,
            ..*reply
        };
        for (shard, acks) in by_shard {
            let body = BatchAckBody {
                acks,
                ..BatchAckBody::default()
            };
            let Ok(body) = to_json(&body) else { continue };
            let mut frame = Vec::with_capacity(body.len() + 256);
            let code = request::BATCH_ACK_MESSAGE;
            let serialization = wire::frame::Serialization::Json;
            encode_request(&mut frame, serialization, code, 0, false, &[], &body);
            let Some(core) = self.home_of(shard) else {
                continue;
            };
            self.forward_frame(core, &origin, &part_reply, &frame, None);
        }
    }

    /// A part of a batch was answered.
    pub fn on_part_answered(&mut self, connection: u64, whole: &[u8]) {
        let Some(waiting) = self.pop.parts.waiting.get_mut(&connection) else {
            return;
        };
        waiting.missing = waiting.missing.saturating_sub(1);
        let frame = frame::split(whole, frame::FRAME_BYTES_MAX).ok().flatten();
        let header = frame.and_then(|(frame, _)| header::decode(&frame).ok());
        if let Some(header) = header {
            if header.code != response::SUCCESS {
                waiting.code = header.code;
            }
            let remark = header.remark.map(|remark| remark.to_cow().into_owned());
            waiting.remark = remark.or(waiting.remark.take());
        }
        if waiting.missing > 0 {
            return;
        }
        if let Some(done) = self.pop.parts.waiting.remove(&connection) {
            self.answer(&done.reply, done.code, done.remark.as_deref());
        }
    }
}
