//! Owns the requests that are passed on to a client: running info, consume directly, offsets.
//!
//! Invariant: a request is passed on only to a member of the group it names.

use wire::codes::request;
use wire::header::{ExtValue, Header, encode_request};
use wire::message::ids::parse_offset_msg_id;
use wire::requests::{ConsumeDirectly, ConsumerRunning, ConsumerStatus};

use super::Control;
use super::answer::{Call, Outcome, Refusal, codes};
use super::clients::Client;
use super::effects::{ClientLink, Effect};
use super::relays::Asker;

/// Clients below this version do not know codes 307 and 309 (V3_1_8_SNAPSHOT).
pub const RELAY_VERSION_MIN: i32 = 62;

pub(super) fn asker(call: &Call<'_>) -> Asker {
    Asker {
        origin: call.origin,
        opaque: call.header.opaque,
        serialization: call.header.serialization,
    }
}

impl Control {
    fn need_client(&self, group: &str, client_id: &str) -> Result<&Client, Refusal> {
        let members = self.clients.group(group);
        let client = members.and_then(|members| match client_id.trim() {
            "" => members.clients().next(),
            id => members.client(id),
        });
        let Some(client) = client else {
            return Err(Refusal::error(format!(
                "The Consumer <{group}> <{client_id}> not online"
            )));
        };
        if client.version < RELAY_VERSION_MIN {
            return Err(Refusal::error(format!(
                "The Consumer <{group}> <{client_id}> of version {} is too old for this request",
                client.version
            )));
        }
        Ok(client)
    }

    /// Passes a request on with its own header fields and `more`.
    fn pass_on(
        &mut self,
        call: &Call<'_>,
        (group, client_id): (&str, &str),
        more: &[(&str, ExtValue<'_>)],
        body: &[u8],
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let client = self.need_client(group, client_id)?;
        let (link, serialization) = (client.link, client.serialization);
        let about = format!("The consumer <{group}> <{}>", client.client_id);
        let opaque = self.relays.forward(call.now_ms, link, asker(call), about)?;
        let own = call.header.ext.iter();
        let own: Vec<_> = own
            .map(|(name, value)| (name.to_cow(), value.to_cow()))
            .collect();
        let is_kept = |name: &str| more.iter().all(|(other, _)| *other != name);
        let own = own.iter().filter(|(name, _)| is_kept(name));
        let mut ext: Vec<(&str, ExtValue<'_>)> = own
            .map(|(name, value)| (&**name, ExtValue::Str(value)))
            .collect();
        ext.extend_from_slice(more);
        let mut frame = Vec::with_capacity(body.len() + 512);
        encode_request(
            &mut frame,
            serialization,
            call.header.code,
            opaque,
            false,
            &ext,
            body,
        );
        effects.push(Effect::Push { to: link, frame });
        Ok(None)
    }

    /// Code 307.
    pub(super) fn running_info(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = ConsumerRunning::decode(&call.header.ext)?;
        self.pass_on(
            call,
            (&asked.consumer_group, &asked.client_id),
            &[],
            call.body,
            effects,
        )
    }

    /// Code 309.
    pub(super) fn consume_directly(
        &mut self,
        call: &Call<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked = ConsumeDirectly::decode(&call.header.ext)?;
        let client_id = asked.client_id.as_deref().unwrap_or_default();
        self.need_client(&asked.consumer_group, client_id)?;
        let id = asked.msg_id.as_deref().unwrap_or_default();
        let (_, physical_offset) = parse_offset_msg_id(id.trim())
            .map_err(|error| Refusal::error(format!("msgId '{id}' is no offset id: {error}")))?;
        effects.push(Effect::ReadRecord {
            physical_offset,
            request: call.pending(),
        });
        Ok(None)
    }

    /// Code 309 with the message.
    pub(super) fn finish_consume_directly(
        &mut self,
        call: &Call<'_>,
        record: Option<&[u8]>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked = ConsumeDirectly::decode(&call.header.ext)?;
        let id = asked.msg_id.as_deref().unwrap_or_default();
        let Some(record) = record else {
            return Err(Refusal::error(format!(
                "message {id} is not on this broker"
            )));
        };
        let broker = self.broker_name().to_owned();
        let topic = asked
            .topic
            .as_deref()
            .and_then(|topic| self.topics.get(topic));
        let topic_flag = topic.map_or(0, |topic| i64::from(topic.config.topic_sys_flag));
        let group = self.groups.get(&asked.consumer_group);
        let group_flag = group.map_or(0, |group| i64::from(group.group_sys_flag));
        let more = [
            ("brokerName", ExtValue::Str(&broker)),
            ("topicSysFlag", ExtValue::Int(topic_flag)),
            ("groupSysFlag", ExtValue::Int(group_flag)),
        ];
        let client_id = asked.client_id.as_deref().unwrap_or_default();
        self.pass_on(
            call,
            (&asked.consumer_group, client_id),
            &more,
            record,
            effects,
        )
    }

    /// Code 223.
    pub(super) fn consumer_status(
        &mut self,
        call: &Call<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked = ConsumerStatus::decode(&call.header.ext)?;
        let wanted = asked.client_addr.as_deref().unwrap_or_default().trim();
        let members = self.clients.group(&asked.group).into_iter();
        let clients: Vec<&Client> = members
            .flat_map(|members| members.clients())
            .filter(|client| wanted.is_empty() || client.client_id == wanted)
            .collect();
        if clients.is_empty() {
            return Err(Refusal::new(
                codes::CONSUMER_NOT_ONLINE,
                format!(
                    "No Any Consumer online in the consumer group: [{}]",
                    asked.group
                ),
            ));
        }
        let links: Vec<(ClientLink, String)> = clients
            .iter()
            .map(|client| (client.link, client.client_id.clone()))
            .collect();
        let forms: Vec<_> = clients.iter().map(|client| client.serialization).collect();
        let opaques = self.relays.gather(call.now_ms, asker(call), &links)?;
        let ext = [
            ("topic", ExtValue::Str(&asked.topic)),
            ("group", ExtValue::Str(&asked.group)),
        ];
        for (((link, _), form), opaque) in links.iter().zip(forms).zip(opaques) {
            let mut frame = Vec::with_capacity(256);
            let code = request::GET_CONSUMER_STATUS_FROM_CLIENT;
            encode_request(&mut frame, form, code, opaque, false, &ext, &[]);
            effects.push(Effect::Push { to: *link, frame });
        }
        Ok(None)
    }

    /// A response frame from a client, to a request of this task.
    pub fn handle_client_answer(
        &mut self,
        _now_ms: i64,
        link: ClientLink,
        header: &Header<'_>,
        body: &[u8],
        effects: &mut Vec<Effect>,
    ) {
        let remark = header.remark.map(|remark| remark.to_cow());
        self.relays.answered(
            link,
            header.opaque,
            header.code,
            remark.as_deref(),
            body,
            effects,
        );
    }
}
