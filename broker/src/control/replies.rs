//! Owns the way of a reply message to the client that sent the request.
//!
//! Invariant: the sender of a reply hears of success only after the requester has taken it.

use std::net::SocketAddr;

use wire::codes::request;
use wire::frame::Serialization;
use wire::header::{ExtValue, encode_request};
use wire::message::properties;
use wire::requests::SendRequest;

use super::Control;
use super::answer::{Call, Field, Outcome, Refusal};
use super::effects::Effect;
use super::relay_requests::asker;
use super::relays::Delivery;

/// Reads the header of a reply message and its properties, closed by a separator.
fn read<'a>(call: &Call<'a>) -> Result<(SendRequest<'a>, Vec<u8>), Refusal> {
    let sent = if call.header.code == request::SEND_REPLY_MESSAGE {
        SendRequest::decode_long(&call.header.ext)?
    } else {
        SendRequest::decode_short(&call.header.ext)?
    };
    let mut stored = Vec::new();
    if let Some(text) = sent.properties {
        text.append_to(&mut stored);
    }
    if properties::needs_separator(&stored) {
        stored.push(properties::ENTRY_SEPARATOR);
    }
    Ok((sent, stored))
}

impl Control {
    /// Codes 324 and 325.
    pub(super) fn push_reply(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let (sent, mut stored) = read(call)?;
        let Some(asked_by) = properties::get_str(&stored, properties::REPLY_TO_CLIENT) else {
            return Err(Refusal::error(format!(
                "reply message properties[{}] is null",
                properties::REPLY_TO_CLIENT
            )));
        };
        let asked_by = asked_by.to_owned();
        let Some(client) = self.clients.producer(&asked_by) else {
            return Err(Refusal::error(format!(
                "push reply message fail, channel of <{asked_by}> not found."
            )));
        };
        let (link, serialization) = (client.link, client.serialization);
        let name = properties::PUSH_REPLY_TIME;
        properties::append(&mut stored, name, &call.now_ms.to_string());
        let opaque = if call.header.is_oneway() {
            self.relays.opaque()
        } else {
            let delivery = self.delivery(asked_by, &sent);
            let asker = asker(call);
            self.relays.deliver(call.now_ms, link, asker, delivery)?
        };
        let frame = self.reply_frame(call, &sent, &stored, (serialization, opaque));
        effects.push(Effect::Push { to: link, frame });
        Ok(None)
    }

    /// What the sender of a reply hears of success.
    fn delivery(&self, client_id: String, sent: &SendRequest<'_>) -> Delivery {
        let fields = vec![
            ("MSG_REGION", Field::Text(self.config.region_id.0.clone())),
            ("TRACE_ON", Field::Text(self.config.trace_on.to_string())),
            // Clients need a place, but the message may not be stored.
            ("msgId", Field::Text("0".to_owned())),
            ("queueId", Field::Int(i64::from(sent.queue_id.max(0)))),
            ("queueOffset", Field::Int(0)),
        ];
        Delivery { client_id, fields }
    }

    /// The push (code 326) to the requester.
    fn reply_frame(
        &self,
        call: &Call<'_>,
        sent: &SendRequest<'_>,
        stored: &[u8],
        (serialization, opaque): (Serialization, i32),
    ) -> Vec<u8> {
        let peer = call.origin.peer;
        let born = SocketAddr::new(peer.ip().to_canonical(), peer.port()).to_string();
        let store = self.broker_address.to_string();
        let stored = String::from_utf8_lossy(stored);
        let (group, topic) = (sent.producer_group.to_cow(), sent.topic.to_cow());
        let default_topic = sent.default_topic.to_cow();
        let int = |number: i32| ExtValue::Int(i64::from(number));
        let ext = [
            ("bornHost", ExtValue::Str(&born)),
            ("bornTimestamp", ExtValue::Int(sent.born_timestamp)),
            ("defaultTopic", ExtValue::Str(&default_topic)),
            ("defaultTopicQueueNums", int(sent.default_topic_queue_nums)),
            ("flag", int(sent.flag)),
            ("producerGroup", ExtValue::Str(&group)),
            ("properties", ExtValue::Str(&stored)),
            ("queueId", int(sent.queue_id)),
            ("reconsumeTimes", int(sent.reconsume_times)),
            ("storeHost", ExtValue::Str(&store)),
            ("storeTimestamp", ExtValue::Int(call.now_ms)),
            ("sysFlag", int(sent.sys_flag)),
            ("topic", ExtValue::Str(&topic)),
            ("unitMode", ExtValue::Bool(sent.unit_mode)),
        ];
        let code = request::PUSH_REPLY_MESSAGE_TO_CLIENT;
        let mut frame = Vec::with_capacity(call.body.len() + stored.len() + 512);
        encode_request(
            &mut frame,
            serialization,
            code,
            opaque,
            false,
            &ext,
            call.body,
        );
        frame
    }
}
