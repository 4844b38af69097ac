//! Answers to pops.
//!
//! Invariant: messages leave as they are stored, but for those of retry topics, which carry the
//! name of their topic and their receipt, because clients do not know the retry topic.

use wire::codes::response;
use wire::header::{ExtValue, Reply, encode_reply_with};
use wire::message::{RecordFields, RecordView, properties};

use shard::pop::POP_ORIGIN;

use super::super::state::State;
use super::order::PopOrder;
use super::receipt::{Kind, ORDERED_REVIVE_QUEUE, OffsetInfo};

/// Messages gathered for an answer.
#[derive(Default)]
pub struct Found {
    /// Records.
    pub bytes: Vec<u8>,
    /// How many.
    pub count: usize,
    /// Where they are from.
    pub info: OffsetInfo,
    /// Position to be reached before they may leave.
    pub end: u64,
    /// Messages left behind in the queues looked at.
    pub rest: i64,
    /// When they were handed out, in milliseconds.
    pub pop_ms: i64,
}

/// Where a record of a retry topic is from, for its receipt.
pub struct From<'a> {
    /// Which retry topic.
    pub kind: Kind,
    /// The topic itself.
    pub topic: &'a str,
    /// First offset looked at.
    pub start: u64,
    /// When it is handed out, in milliseconds.
    pub pop_ms: i64,
    /// For how long, in milliseconds.
    pub invisible_ms: i64,
    /// This broker.
    pub broker: &'a str,
}

/// Appends a record of a retry topic as a message of its topic.
pub fn push_retry(out: &mut Vec<u8>, view: &RecordView<'_>, from: &From<'_>) {
    let mut stored = properties::remove(view.properties(), &[POP_ORIGIN, properties::POP_CK]);
    let receipt = format!(
        "{} {} {} 0 {} {} {} {}",
        from.start,
        from.pop_ms,
        from.invisible_ms,
        from.kind as u8,
        from.broker,
        view.queue_id(),
        view.queue_offset()
    );
    properties::append(&mut stored, properties::POP_CK, &receipt);
    let parts = [&*stored];
    let fields = RecordFields {
        prepared_transaction_offset: 0,
        ..view.fields(from.topic.as_bytes(), &parts)
    };
    let at = out.len();
    out.resize(at + fields.encoded_len(), 0);
    let target = out.get_mut(at..).unwrap_or_default();
    if fields.encode(target).is_err() {
        // Longer than a record may be: then as it is stored, without the receipt.
        out.truncate(at);
        out.extend_from_slice(view.raw());
    }
}

impl State {
    /// Answers a pop with messages, once what was noted of them is as durable as promised.
    pub(super) fn answer_pop(&mut self, order: &PopOrder, local: usize, found: &Found) {
        self.pop.counters.found += 1;
        self.counters.get_found += 1;
        self.counters.get_messages += found.count as u64;
        self.counters.get_bytes += found.bytes.len() as u64;
        if let Some(entry) = self.directory.topics.get_mut(&*order.topic) {
            let bytes = found.bytes.len() as u64;
            entry.count_got(&order.group, found.count as u64, bytes);
        }
        let revive_queue = if order.ordered {
            ORDERED_REVIVE_QUEUE
        } else {
            0
        };
        let ext = [
            ("invisibleTime", ExtValue::Int(order.invisible_ms)),
            ("msgOffsetInfo", ExtValue::Str(&found.info.messages)),
            ("popTime", ExtValue::Int(found.pop_ms)),
            ("restNum", ExtValue::Int(found.rest.max(0))),
            ("reviveQid", ExtValue::Int(revive_queue)),
            ("startOffsetInfo", ExtValue::Str(&found.info.start)),
            ("orderCountInfo", ExtValue::Str(&found.info.order_counts)),
        ];
        let fields = ext.get(..ext.len() - usize::from(!order.ordered));
        let reply = Reply {
            code: response::SUCCESS,
            opaque: order.reply.opaque,
            remark: Some("FOUND"),
            ext: fields.unwrap_or(&ext),
        };
        let mut frame = std::mem::take(&mut self.scratch.reply);
        frame.clear();
        encode_reply_with(&mut frame, order.reply.serialization, &reply, |out| {
            out.extend_from_slice(&found.bytes);
        });
        self.reply_at(&order.reply, local, found.end, &frame);
        self.scratch.reply = frame;
        self.finish_pop(order);
    }

    /// Answers a pop that got nothing.
    pub(super) fn answer_pop_empty(&mut self, order: &PopOrder, code: i32) {
        self.pop.counters.missed += 1;
        self.counters.get_missed += 1;
        if order.notify {
            return self.answer_notification(order, false, code == response::POLLING_FULL);
        }
        let revive_queue = if order.ordered {
            ORDERED_REVIVE_QUEUE
        } else {
            0
        };
        let ext = [
            ("invisibleTime", ExtValue::Int(order.invisible_ms)),
            ("popTime", ExtValue::Int(self.now.wall_ms)),
            ("restNum", ExtValue::Int(0)),
            ("reviveQid", ExtValue::Int(revive_queue)),
        ];
        let reply = Reply {
            code,
            opaque: order.reply.opaque,
            remark: Some("NO_MESSAGE_IN_QUEUE"),
            ext: &ext,
        };
        let mut frame = Vec::with_capacity(256);
        encode_reply_with(&mut frame, order.reply.serialization, &reply, |_| {});
        self.deliver(order.reply.link, &frame);
    }

    /// Answers whether there are messages.
    pub(super) fn answer_notification(&mut self, order: &PopOrder, has: bool, full: bool) {
        let ext = [
            ("hasMsg", ExtValue::Bool(has)),
            ("pollingFull", ExtValue::Bool(full)),
        ];
        let reply = Reply {
            code: response::SUCCESS,
            opaque: order.reply.opaque,
            remark: None,
            ext: &ext,
        };
        let mut frame = Vec::with_capacity(128);
        encode_reply_with(&mut frame, order.reply.serialization, &reply, |_| {});
        self.deliver(order.reply.link, &frame);
        self.finish_pop(order);
    }
}
