//! From bytes of a connection to the handler of a request, and from messages of other cores.
//!
//! Invariant: a malformed frame closes only its own connection; a request that can be read is
//! always answered, unless it is one-way.

use shard::address;
use shard::runtime::ConnectionId;
use wire::codes::{private, request, response};
use wire::frame::{self, Frame};
use wire::header::{self, Header};

use super::connections::Purpose;
use super::messages::{Change, MeshMessage, ReplyTo};
use super::settle::Removal;
use super::state::State;
use crate::control::effects::Origin;

/// How often malformed frames are logged, in microseconds.
const MALFORMED_LOG_US: u64 = 1_000_000;

impl State {
    /// Takes bytes that arrived on a connection.
    pub fn on_bytes(&mut self, id: ConnectionId, bytes: &[u8]) {
        let Some(connection) = self.net.get_mut(id.0) else {
            return;
        };
        connection.active_us = self.now.monotonic_us;
        if connection.closing {
            return;
        }
        let mut rest = bytes;
        if !connection.input.is_empty() {
            let mut input = std::mem::take(&mut connection.input);
            let taken = self.complete(id, &mut input, bytes);
            rest = bytes.get(taken..).unwrap_or_default();
            if let Some(connection) = self.net.get_mut(id.0) {
                connection.input = input;
                if !connection.input.is_empty() || connection.closing {
                    return;
                }
            }
        }
        let used = self.take_frames(id, rest);
        let rest = rest.get(used..).unwrap_or_default();
        if let Some(connection) = self.net.get_mut(id.0).filter(|_| !rest.is_empty()) {
            connection.input.extend_from_slice(rest);
        }
    }

    /// Completes the frame whose beginning is in `input`, and handles it. Returns how many of the
    /// bytes belong to it; all that follow can be read where they are.
    fn complete(&mut self, id: ConnectionId, input: &mut Vec<u8>, bytes: &[u8]) -> usize {
        let mut taken = 0;
        loop {
            let bytes_max = self.hot.frame_bytes_max;
            // A length that is wrong is found again, and said, by `take_frames`.
            let wanted = match frame::needed(input, bytes_max) {
                Ok(Some(whole)) if input.len() >= frame::PREFIX_BYTES => whole,
                Ok(_) => frame::PREFIX_BYTES,
                Err(_) => input.len(),
            };
            let missing = wanted.saturating_sub(input.len());
            if missing == 0 {
                let used = self.take_frames(id, input);
                input.drain(..used.min(input.len()));
                return taken;
            }
            let rest = bytes.get(taken..).unwrap_or_default();
            let part = rest.get(..missing.min(rest.len())).unwrap_or_default();
            if part.is_empty() {
                return taken;
            }
            input.extend_from_slice(part);
            taken += part.len();
        }
    }

    /// Handles whole frames; returns the bytes they took.
    fn take_frames(&mut self, id: ConnectionId, bytes: &[u8]) -> usize {
        let mut used = 0;
        let Some((purpose, peer)) = self.net.get(id.0).map(|c| (c.purpose, c.peer)) else {
            return bytes.len();
        };
        let origin = Origin {
            link: self.link(id.0),
            peer,
            creations: 0,
        };
        loop {
            let rest = bytes.get(used..).unwrap_or_default();
            match frame::split(rest, self.hot.frame_bytes_max) {
                Ok(Some((frame, len))) => {
                    let whole = rest.get(..len).unwrap_or_default();
                    used += len;
                    self.counters.frames += 1;
                    if let Err(error) = self.on_frame(&origin, purpose, whole, &frame) {
                        self.malformed(id, peer, &error.to_string());
                        return bytes.len();
                    }
                }
                Ok(None) => return used,
                Err(error) => {
                    self.malformed(id, peer, &error.to_string());
                    return bytes.len();
                }
            }
        }
    }

    fn malformed(&mut self, id: ConnectionId, peer: std::net::SocketAddr, reason: &str) {
        self.counters.malformed += 1;
        self.to_close.push(id.0);
        if let Some(connection) = self.net.get_mut(id.0) {
            connection.closing = true;
        }
        if self.now.monotonic_us >= self.malformed_logged_us + MALFORMED_LOG_US {
            self.malformed_logged_us = self.now.monotonic_us;
            let total = self.counters.malformed;
            tracing::warn!(%peer, reason, total, "malformed frame, connection closed");
        }
    }

    fn on_frame(
        &mut self,
        origin: &Origin,
        purpose: Purpose,
        whole: &[u8],
        frame: &Frame<'_>,
    ) -> Result<(), header::HeaderError> {
        let header = header::decode(frame)?;
        match purpose {
            Purpose::NameServer => self.on_name_server_request(origin, &header, frame.body),
            Purpose::Registration(index) => self.on_registration_answer(index, &header, frame.body),
            Purpose::Probe(number) => self.on_probe_answer(number, &header),
            Purpose::Broker if header.is_response() => {
                let (link, frame) = (origin.link, whole.to_vec());
                self.send_to(0, MeshMessage::ClientAnswer { link, frame });
            }
            Purpose::Broker => self.on_request(origin, &header, whole, frame.body, None),
        }
        Ok(())
    }

    /// Handles a request, or sends it to the core that has to. `queue_id` is a queue chosen for a
    /// send on the way here.
    pub fn on_request(
        &mut self,
        origin: &Origin,
        header: &Header<'_>,
        whole: &[u8],
        body: &[u8],
        queue_id: Option<i32>,
    ) {
        let reply = self.reply_to(origin, header);
        match header.code {
            request::SEND_MESSAGE | request::SEND_MESSAGE_V2 | request::SEND_BATCH_MESSAGE => {
                self.on_send(origin, &reply, header, whole, body, queue_id);
            }
            request::SEND_REPLY_MESSAGE | request::SEND_REPLY_MESSAGE_V2 => {
                self.on_send_reply(origin, &reply, header, whole, body, queue_id);
            }
            request::PULL_MESSAGE | request::LITE_PULL_MESSAGE => {
                self.on_pull(origin, &reply, header, whole);
            }
            request::QUERY_CONSUMER_OFFSET
            | request::UPDATE_CONSUMER_OFFSET
            | request::GET_MAX_OFFSET
            | request::GET_MIN_OFFSET
            | request::SEARCH_OFFSET_BY_TIMESTAMP
            | request::GET_EARLIEST_MSG_STORETIME
            | request::QUERY_CONSUME_QUEUE => {
                self.on_queue_request(origin, &reply, header, whole);
            }
            request::RECALL_MESSAGE => self.on_recall(origin, &reply, header, whole),
            request::POP_MESSAGE | request::NOTIFICATION => {
                self.on_pop(origin, &reply, header, whole);
            }
            request::ACK_MESSAGE => self.on_pop_ack(origin, &reply, header, whole),
            request::BATCH_ACK_MESSAGE => self.on_batch_ack(origin, &reply, whole, body),
            request::CHANGE_MESSAGE_INVISIBLETIME => {
                self.on_pop_change(origin, &reply, header, whole);
            }
            request::POLLING_INFO => self.on_polling_info(origin, &reply, header, whole),
            request::CONSUMER_SEND_MSG_BACK => self.on_send_back(origin, &reply, header, whole),
            request::END_TRANSACTION => self.on_end_transaction(origin, &reply, header, whole),
            private::EXPLAIN => self.on_explain(origin, &reply, header, whole),
            request::VIEW_MESSAGE_BY_ID => self.on_view(origin, &reply, header, whole),
            _ => self.to_control(origin, whole),
        }
    }

    /// Sends a request to the control task.
    pub fn to_control(&mut self, origin: &Origin, whole: &[u8]) {
        let (origin, frame) = (*origin, whole.to_vec());
        self.send_to(0, MeshMessage::Control { origin, frame });
    }

    /// Asks the control task to create what a request lacks and to route it again.
    pub fn to_creation(&mut self, origin: &Origin, whole: &[u8]) {
        let (origin, frame) = (*origin, whole.to_vec());
        self.send_to(0, MeshMessage::Create { origin, frame });
    }

    /// Sends a request to the core of a shard. `false` when the shard is on this core.
    pub fn sent_on(
        &mut self,
        shard: u16,
        origin: &Origin,
        reply: &ReplyTo,
        whole: &[u8],
        queue_id: Option<i32>,
    ) -> bool {
        match self.home_of(shard) {
            Some(core) if core == self.core => false,
            Some(core) => {
                self.forward_frame(core, origin, reply, whole, queue_id);
                true
            }
            None => {
                let remark = format!("this broker has no shard {shard}");
                self.answer(reply, response::SYSTEM_ERROR, Some(&remark));
                true
            }
        }
    }

    /// The local shard that holds a physical offset, after sending the request on if it is not
    /// here. `None`: already taken care of.
    pub fn shard_of_offset(
        &mut self,
        physical_offset: i64,
        origin: &Origin,
        reply: &ReplyTo,
        whole: &[u8],
    ) -> Option<usize> {
        let Some((shard, _)) = address::split(physical_offset) else {
            let remark = format!("offset {physical_offset} is negative");
            self.answer(reply, response::SYSTEM_ERROR, Some(&remark));
            return None;
        };
        if self.sent_on(shard, origin, reply, whole, None) {
            return None;
        }
        self.local_shard(shard)
    }

    /// Takes a message of another core (or of this one).
    pub fn on_message(&mut self, from: usize, message: MeshMessage) {
        match message {
            MeshMessage::Requests(frames) => {
                for ((origin, queue_id), frame) in frames.iter() {
                    self.on_whole_frame(origin, frame, *queue_id);
                }
            }
            MeshMessage::Control { origin, frame } => self.control_request(&origin, &frame),
            MeshMessage::Create { origin, frame } => self.control_create(origin, frame),
            MeshMessage::ClientAnswer { link, frame } => self.control_client_answer(link, &frame),
            MeshMessage::Deliver(frames) => {
                for (connection, frame) in frames.iter() {
                    if let Some(out) = self.net.output(*connection) {
                        out.extend_from_slice(frame);
                    } else if super::pop::is_part(*connection) {
                        self.on_part_answered(*connection, frame);
                    }
                }
            }
            MeshMessage::Closed(link) => self.control_closed(link),
            MeshMessage::Pulling { group, topic } => {
                self.with_control(|control, now_ms, _| {
                    control.note_pull_only(now_ms, &group, &topic);
                });
            }
            MeshMessage::Change(change) => self.on_change(change),
            MeshMessage::Pop(message) => self.on_pop_message(message),
            MeshMessage::CheckBack(check) => {
                self.with_control(|control, _, effects| control.check_back(&check, effects));
            }
            MeshMessage::Put(order) => self.on_put(*order),
            MeshMessage::SetOffsets { sets, reset } => self.on_set_offsets(&sets, reset),
            MeshMessage::Ask { gather, ask } => self.on_ask(from, gather, ask),
            MeshMessage::Told { gather, told } => self.on_told(gather, told),
            MeshMessage::Disk(news) => self.on_disk_news(news),
            MeshMessage::CleanExpired => self.clean_expired_now(),
        }
    }

    /// Handles a request that came as a whole frame from another core.
    pub fn on_whole_frame(&mut self, origin: &Origin, whole: &[u8], queue_id: Option<i32>) {
        let Ok(Some((frame, _))) = frame::split(whole, frame::FRAME_BYTES_MAX) else {
            return;
        };
        let Ok(header) = header::decode(&frame) else {
            return;
        };
        self.on_request(origin, &header, whole, frame.body, queue_id);
    }

    /// Takes a change of shared tables.
    pub fn on_change(&mut self, change: Change) {
        match change {
            Change::Topic(placed) => {
                self.forget_removal(&Removal::Topic(placed.config.topic_name.as_str().into()));
                let shards = &mut self.shards;
                let homes = &self.homes;
                let core = self.core;
                self.directory.put_topic(&placed, |shard, topic, id| {
                    if homes.get(usize::from(shard)) == Some(&core) {
                        State::open_local(shards, shard, topic, id)
                    } else {
                        super::directory::NO_QUEUE
                    }
                });
            }
            Change::TopicRemoved(topic) => {
                self.directory.remove_topic(&topic);
                self.remove_on_shards(&Removal::Topic(topic));
            }
            Change::Group(group) => {
                self.forget_removal(&Removal::Group(group.group_name.as_str().into()));
                self.directory
                    .groups
                    .insert(group.group_name.as_str().into(), group);
            }
            Change::GroupRemoved(group, offsets) => {
                self.directory.groups.remove(&*group);
                if offsets {
                    self.remove_on_shards(&Removal::Group(group));
                }
            }
            Change::Forbidden(group, topics) => {
                self.directory.forbidden.insert((*group).into(), topics);
            }
            Change::Subscriptions(subscriptions) => {
                let group = (*subscriptions.group).into();
                self.directory.subscriptions.insert(group, subscriptions);
            }
            Change::Pulled(group, topic, pulled) => {
                self.directory.set_pulled(&group, &topic, pulled);
            }
            Change::Config(config) => {
                self.hot = super::state::HotSettings::new(&config);
                self.config = config;
                self.set_half_limits();
            }
        }
    }
}
