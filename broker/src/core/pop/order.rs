//! From a POP or NOTIFICATION request to an order that can visit shards.
//!
//! Invariant: checks run in RocketMQ's order and the first failure is answered; an order owns all
//! it needs, so that it can travel between cores.

use std::net::SocketAddr;

use shard::select::Wanted;
use wire::codes::{request, response};
use wire::header::Header;
use wire::requests::{Notification, PopMessage as PopRequest};

use super::super::directory::TopicEntry;
use super::super::messages::{MeshMessage, ReplyTo};
use super::super::state::State;
use super::PopMessage;
use super::receipt::retry_topic;
use crate::control::effects::Origin;

/// Messages one request gets at most.
pub const POP_MESSAGES_MAX: i32 = 32;
/// Longest time a request may wait, in milliseconds.
pub const POLL_MS_MAX: i64 = 120_000;
/// Longest invisible time, in milliseconds (RocketMQ's clients ask for at most 3 days).
pub const INVISIBLE_MS_MAX: i64 = 7 * 86_400_000;
/// How much later than its waiting time a request may come, in milliseconds.
const LATE_MS_MAX: i64 = 500;
/// How much earlier than the client expects a waiting request is answered, in milliseconds.
const ANSWER_EARLY_MS: i64 = 50;

/// A request for messages on its way through shards.
#[derive(Clone, Debug)]
pub struct PopOrder {
    /// Who is answered.
    pub reply: ReplyTo,
    /// Address of the client.
    pub client: SocketAddr,
    /// Consumer group.
    pub group: Box<str>,
    /// Topic.
    pub topic: Box<str>,
    /// Queue id, -1 for all.
    pub queue_id: i32,
    /// Messages wanted at most.
    pub most: usize,
    /// For how long messages are handed out, in milliseconds.
    pub invisible_ms: i64,
    /// Whether a new group begins at the end of a queue.
    pub from_end: bool,
    /// Whether in order.
    pub ordered: bool,
    /// Attempt that may have the same messages again.
    pub attempt: Box<str>,
    /// Messages wanted.
    pub wanted: Wanted,
    /// Whether only asked if there are messages.
    pub notify: bool,
    /// Whether retry topics come first this time.
    pub retry_first: bool,
    /// Where to begin among queues.
    pub turn: u64,
    /// Monotonic time at which it is answered without messages, in microseconds.
    pub deadline_us: u64,
    /// Number under which it is parked, 0 while it was not.
    pub token: u64,
    /// Core at which it is parked.
    pub coordinator: u16,
    /// Shards to visit.
    pub left: Vec<u16>,
}

type Refused = (i32, String);

fn refuse<T>(code: i32, remark: impl Into<String>) -> Result<T, Refused> {
    Err((code, remark.into()))
}

impl State {
    /// Handles POP_MESSAGE and NOTIFICATION.
    pub fn on_pop(&mut self, origin: &Origin, reply: &ReplyTo, header: &Header<'_>, whole: &[u8]) {
        if usize::from(origin.link.core) != self.core {
            // It waits at the core of its connection, which knows whether the client is there.
            let core = usize::from(origin.link.core);
            return self.forward_frame(core, origin, reply, whole, None);
        }
        let mut order = match self.pop_order(reply, origin.peer, header) {
            Ok(order) => order,
            Err((code, remark)) => return self.answer(reply, code, Some(&remark)),
        };
        let known = self.directory.topics.contains_key(&*order.topic)
            && self.directory.groups.contains_key(&*order.group);
        if !known {
            return self.to_creation(origin, whole);
        }
        if let Err((code, remark)) = self.check_pop(&order) {
            return self.answer(reply, code, Some(&remark));
        }
        self.note_pull_only(&order.group, &order.topic);
        order.left = self.shards_of_pop(&order);
        self.go_on(Box::new(order));
    }

    fn pop_order(
        &mut self,
        reply: &ReplyTo,
        client: SocketAddr,
        header: &Header<'_>,
    ) -> Result<PopOrder, Refused> {
        let refused = |error: wire::header::FieldError| (response::SYSTEM_ERROR, error.to_string());
        self.pop.turn = self.pop.turn.wrapping_add(1);
        let turn = self.pop.turn;
        let mut order = PopOrder {
            reply: *reply,
            client,
            group: "".into(),
            topic: "".into(),
            queue_id: -1,
            most: 1,
            invisible_ms: 0,
            from_end: false,
            ordered: false,
            attempt: "".into(),
            wanted: Wanted::All,
            notify: header.code == request::NOTIFICATION,
            retry_first: turn.is_multiple_of(5),
            turn,
            deadline_us: 0,
            token: 0,
            coordinator: self.core as u16,
            left: Vec::new(),
        };
        let (born_ms, poll_ms);
        if order.notify {
            let asked = Notification::decode(&header.ext).map_err(refused)?;
            order.group = asked.consumer_group.into();
            order.topic = asked.topic.into();
            order.queue_id = asked.queue_id;
            order.ordered = asked.order.unwrap_or(false);
            order.attempt = asked.attempt_id.unwrap_or_default().into();
            (born_ms, poll_ms) = (asked.born_time, asked.poll_time);
        } else {
            let asked = PopRequest::decode(&header.ext).map_err(refused)?;
            if let Some(expression) = asked.exp.as_deref().filter(|text| !text.is_empty()) {
                let wanted = self.wanted_by(asked.exp_type.as_deref(), expression);
                order.wanted = wanted.map_err(|refused| (refused.code, refused.remark))?;
            }
            if asked.max_msg_nums > POP_MESSAGES_MAX {
                let remark = format!(
                    "maxMsgNums {}, bound {POP_MESSAGES_MAX}",
                    asked.max_msg_nums
                );
                return refuse(response::INVALID_PARAMETER, remark);
            }
            order.most = asked.max_msg_nums.max(1) as usize;
            order.group = asked.consumer_group.into();
            order.topic = asked.topic.into();
            order.queue_id = asked.queue_id;
            order.invisible_ms = asked.invisible_time.clamp(0, INVISIBLE_MS_MAX);
            order.from_end = asked.init_mode == 1;
            order.ordered = asked.order.unwrap_or(false);
            order.attempt = asked.attempt_id.unwrap_or_default().into();
            (born_ms, poll_ms) = (asked.born_time, asked.poll_time);
        }
        order.deadline_us = self.pop_deadline_us(order.notify, born_ms, poll_ms)?;
        Ok(order)
    }

    /// Until when a request made at a time waits, unless it came too late.
    fn pop_deadline_us(&self, notify: bool, born_ms: i64, poll_ms: i64) -> Result<u64, Refused> {
        let late_ms = if born_ms == 0 {
            0
        } else {
            self.now.wall_ms.saturating_sub(born_ms)
        };
        if !notify && late_ms.saturating_sub(poll_ms) > LATE_MS_MAX {
            let remark = format!("the pop came {late_ms} ms after it was sent, it waits {poll_ms}");
            return refuse(response::POLLING_TIMEOUT, remark);
        }
        let wait_ms = poll_ms.saturating_sub(late_ms.max(0)) - ANSWER_EARLY_MS;
        let wait_ms = wait_ms.clamp(0, POLL_MS_MAX) as u64;
        Ok(self.now.monotonic_us + wait_ms * 1000)
    }

    fn check_pop(&self, order: &PopOrder) -> Result<(), Refused> {
        let (topic, group) = (&*order.topic, &*order.group);
        if self.hot.permission & wire::body::PERM_READ == 0 {
            let remark = "this broker serves no pops (brokerPermission)";
            return refuse(response::NO_PERMISSION, remark);
        }
        let Some(entry) = self.directory.topics.get(topic) else {
            return refuse(
                response::TOPIC_NOT_EXIST,
                format!("topic[{topic}] not exist"),
            );
        };
        if entry.config.perm & wire::body::PERM_READ == 0 {
            let remark = format!("the topic[{topic}] popping message is forbidden");
            return refuse(response::NO_PERMISSION, remark);
        }
        let bound = entry.config.read_queue_nums;
        if order.queue_id >= bound {
            let remark = format!("queueId {} of topic {topic}, bound {bound}", order.queue_id);
            return refuse(response::INVALID_PARAMETER, remark);
        }
        let config = self.directory.groups.get(group);
        if !config.is_none_or(|config| config.consume_enable) {
            let remark = format!("subscription group no permission, {group}");
            return refuse(response::NO_PERMISSION, remark);
        }
        if !self.directory.may_read(group, topic) {
            let remark = format!("group {group} may not read topic {topic}");
            return refuse(response::NO_PERMISSION, remark);
        }
        Ok(())
    }

    /// Retry topics of a group and topic that exist.
    pub(super) fn retry_entries(&self, order: &PopOrder) -> impl Iterator<Item = &TopicEntry> {
        let wanted = !order.ordered;
        let names = [false, true].map(|v2| retry_topic(&order.topic, &order.group, v2));
        let entries = names.map(|name| self.directory.topics.get(&*name));
        entries.into_iter().flatten().filter(move |_| wanted)
    }

    /// Shards that may have a message for an order, another one first each time.
    pub(super) fn shards_of_pop(&self, order: &PopOrder) -> Vec<u16> {
        let mut shards: Vec<u16> = Vec::new();
        let mut add = |shard: u16| {
            if !shards.contains(&shard) {
                shards.push(shard);
            }
        };
        let entry = self.directory.topics.get(&*order.topic);
        for (id, home) in entry
            .iter()
            .flat_map(|entry| entry.homes.iter().enumerate())
        {
            if order.queue_id < 0 || order.queue_id as usize == id {
                add(home.shard);
            }
        }
        let retries = self.retry_entries(order);
        retries
            .flat_map(|e| &e.homes)
            .for_each(|home| add(home.shard));
        let count = shards.len().max(1);
        shards.rotate_left(order.turn as usize % count);
        shards
    }

    /// Sends an order to the next shard, or back to wait.
    pub(super) fn go_on(&mut self, mut order: Box<PopOrder>) {
        let Some(shard) = order.left.pop() else {
            let core = usize::from(order.coordinator);
            return self.send_to(core, MeshMessage::Pop(PopMessage::Park(order)));
        };
        let Some(core) = self.home_of(shard) else {
            return self.go_on(order);
        };
        let (reply, is_parked) = (order.reply, order.token != 0);
        let message = MeshMessage::Pop(PopMessage::Serve(order, shard));
        if is_parked {
            // Parked orders have a bound of their own, and must come back.
            self.send_to(core, message);
        } else {
            self.forward(core, &reply, message);
        }
    }
}
