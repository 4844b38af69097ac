//! Owns the questions to producers about open transactions: who is asked, and what they are sent.
//!
//! Invariant: each question goes to one live producer of the group, in turn, or is counted as
//! unasked; the shard asks again after its interval.

use wire::codes::request;
use wire::header::{ExtValue, encode_request};
use wire::message::{RecordFields, RecordView, ids, properties};

use super::Control;
use super::effects::Effect;

/// A question about a half message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckBack {
    /// Producer group.
    pub group: String,
    /// Real topic.
    pub topic: String,
    /// Unique key of the message.
    pub unique_key: String,
    /// Id made of the offset of the half message.
    pub offset_id: String,
    /// Offset in the queue of half messages.
    pub queue_offset: i64,
    /// Physical offset of the half message.
    pub physical_offset: i64,
    /// The message under its real topic and queue, as a record.
    pub record: Vec<u8>,
}

impl CheckBack {
    /// The question about a half message as stored; `number` counts the questions about it from 1.
    pub fn new(half: &[u8], number: u32) -> Option<Self> {
        let view = RecordView::parse(half).ok()?;
        let stored = view.properties();
        let text = |name| properties::get_str(stored, name);
        let topic = text(properties::REAL_TOPIC)?;
        let queue_id = text(properties::REAL_QUEUE_ID)?.parse().ok()?;
        let mut told = stored.to_vec();
        if properties::needs_separator(&told) {
            told.push(properties::ENTRY_SEPARATOR);
        }
        let times = number.to_string();
        properties::append(&mut told, properties::TRANSACTION_CHECK_TIMES, &times);
        let parts = [&*told];
        let fields = RecordFields {
            queue_id,
            prepared_transaction_offset: 0,
            ..view.fields(topic.as_bytes(), &parts)
        };
        let mut record = vec![0; fields.encoded_len()];
        if fields.encode(&mut record).is_err() {
            // No room for the count among the properties.
            record = vec![0; fields.encoded_len() - told.len() + stored.len()];
            let fields = RecordFields {
                properties: &[stored],
                ..fields
            };
            fields.encode(&mut record).ok()?;
        }
        let mut offset_id = Vec::new();
        ids::offset_msg_id(&mut offset_id, view.store_host(), view.physical_offset());
        Some(Self {
            group: text(properties::PRODUCER_GROUP)?.to_owned(),
            topic: topic.to_owned(),
            unique_key: text(properties::UNIQ_KEY).unwrap_or_default().to_owned(),
            offset_id: String::from_utf8(offset_id).unwrap_or_default(),
            queue_offset: view.queue_offset(),
            physical_offset: view.physical_offset(),
            record,
        })
    }
}

/// Questions since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckCounters {
    /// Sent to a producer.
    pub asked: u64,
    /// Not sent, because no producer of the group was there.
    pub unasked: u64,
}

impl Control {
    /// Asks a producer about a half message (code 39).
    pub fn check_back(&mut self, check: &CheckBack, effects: &mut Vec<Effect>) {
        let producers = self.clients.producers_of(&check.group);
        let count = producers.map_or(0, |producers| producers.len()) as u64;
        let turn = self.checks.asked.checked_rem(count).unwrap_or(0) as usize;
        let Some(client) = producers.and_then(|all| all.values().nth(turn)) else {
            self.checks.unasked += 1;
            tracing::debug!(
                group = check.group,
                topic = check.topic,
                "nobody to ask about a transaction"
            );
            return;
        };
        let ext = [
            ("topic", ExtValue::Str(&check.topic)),
            ("tranStateTableOffset", ExtValue::Int(check.queue_offset)),
            ("commitLogOffset", ExtValue::Int(check.physical_offset)),
            ("msgId", ExtValue::Str(&check.unique_key)),
            ("transactionId", ExtValue::Str(&check.unique_key)),
            ("offsetMsgId", ExtValue::Str(&check.offset_id)),
            ("bname", ExtValue::Str(&self.config.broker_name.0)),
        ];
        let opaque = self.relays.opaque();
        let mut frame = Vec::with_capacity(check.record.len() + 512);
        encode_request(
            &mut frame,
            client.serialization,
            request::CHECK_TRANSACTION_STATE,
            opaque,
            true,
            &ext,
            &check.record,
        );
        self.checks.asked += 1;
        let to = client.link;
        effects.push(Effect::Push { to, frame });
    }
}
