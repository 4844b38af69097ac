//! Messages with a delivery time of their own: what their properties ask for, their recall handle,
//! and taking them back.
//!
//! Invariant: a time that cannot be kept is refused before anything is stored; a message that was
//! taken back in time is not delivered.

use shard::queue::QueueIndex;
use shard::{Appended, DUE_MS_MAX, NewMessage, Refusal};
use wire::codes::response;
use wire::header::{ExtValue, Header, Reply, encode_reply};
use wire::message::{RecallHandle, properties, tags};
use wire::requests::RecallMessage;

use super::messages::{PutOrder, ReplyTo};
use super::state::State;
use crate::control::effects::Origin;
use crate::control::names;

/// Tag of the messages that take others back, as Apache's broker stores them.
const RECALL_TAG: &str = "_RECALL_TAG_";

/// When a message is to be delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    /// At once: its time has passed.
    Now,
    /// At a time in milliseconds.
    At(i64),
}

/// Properties that ask for a time of delivery; the first one present counts.
pub(super) const TIME_PROPERTIES: [&str; 3] = [
    properties::TIMER_DELAY_SEC,
    properties::TIMER_DELAY_MS,
    properties::TIMER_DELIVER_MS,
];

/// Reads when a message is to be delivered; the error says what is wrong with it.
pub(super) fn due_of(stored: &[u8], now_ms: i64, delay_max_s: u64) -> Result<Due, String> {
    let found = TIME_PROPERTIES
        .iter()
        .find_map(|name| Some((*name, properties::get(stored, name)?)));
    let Some((name, value)) = found else {
        return Ok(Due::Now);
    };
    let text = String::from_utf8_lossy(value);
    let Ok(number) = text.parse::<i64>() else {
        return Err(format!(
            "timer message illegal: {name}={text} is not a number of 64 bits"
        ));
    };
    if number < 0 {
        return Err(format!(
            "timer message illegal: {name}={number} is negative"
        ));
    }
    let due_ms = match name {
        properties::TIMER_DELAY_SEC => number
            .checked_mul(1_000)
            .and_then(|ms| now_ms.checked_add(ms)),
        properties::TIMER_DELAY_MS => now_ms.checked_add(number),
        _ => Some(number),
    };
    let delay_max_ms = i64::try_from(delay_max_s.saturating_mul(1_000)).unwrap_or(i64::MAX);
    let latest_ms = now_ms.saturating_add(delay_max_ms).min(DUE_MS_MAX);
    match due_ms {
        Some(due_ms) if due_ms <= now_ms => {
            let deletes = properties::get(stored, properties::TIMER_DEL_UNIQKEY).is_some();
            if deletes {
                let remark = "takes a message back whose time has passed";
                return Err(format!("timer message illegal: {name}={number} {remark}"));
            }
            Ok(Due::Now)
        }
        Some(due_ms) if due_ms <= latest_ms => Ok(Due::At(due_ms)),
        _ => Err(format!(
            "timer message illegal: {name}={number} is further away than {delay_max_s} s \
             (timerMaxDelaySec)"
        )),
    }
}

/// When a half message that is committed now is to be delivered; `None` is at once. Its properties
/// were checked when it was sent, and what is relative counts from the commit.
pub(super) fn committed_due(stored: &[u8], now_ms: i64) -> Option<i64> {
    if properties::get(stored, properties::TIMER_OUT_MS).is_some() {
        return None;
    }
    match due_of(stored, now_ms, u64::MAX) {
        Ok(Due::At(due_ms)) => Some(due_ms),
        Ok(Due::Now) | Err(_) => None,
    }
}

impl State {
    /// The handle that takes a timed message back; none for retries.
    pub(super) fn recall_handle(
        &self,
        topic: &str,
        due_ms: i64,
        unique: &[u8],
        appended: &Appended,
    ) -> Option<String> {
        if topic.starts_with(names::RETRY_PREFIX) {
            return None;
        }
        let handle = RecallHandle {
            topic: topic.to_owned(),
            broker: self.config.broker_name.0.clone(),
            due_ms,
            unique_key: String::from_utf8_lossy(unique).into_owned(),
            offset: Some(appended.physical_offset),
        };
        Some(handle.encode())
    }

    /// Handles a recall (code 370).
    pub fn on_recall(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        let request = match RecallMessage::decode(&header.ext) {
            Ok(request) => request,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let handle = match self.check_recall(&request) {
            Ok(handle) => handle,
            Err((code, remark)) => {
                let remark = format!("recall failed, {remark}");
                return self.answer(reply, code, Some(&remark));
            }
        };
        let group = request.producer_group.as_deref().unwrap_or_default();
        let stored = deletion_properties(&handle, group, self.now.wall_ms);
        // The shard that has the message knows best; without its place all shards of the topic are
        // told, this core's first.
        let homes = self.shards_of(&handle.topic);
        let told: Vec<(u16, i32, QueueIndex)> = match handle.offset {
            Some(offset) => {
                let Some(local) = self.shard_of_offset(offset, origin, reply, whole) else {
                    return;
                };
                let shard = self.shards.get(local).map(|local| &local.shard);
                if shard.is_some_and(|shard| shard.is_timer_done(offset, handle.due_ms)) {
                    let remark = "recall failed, the message has been delivered or taken back";
                    return self.answer(reply, response::ILLEGAL_OPERATION, Some(remark));
                }
                let number = shard.map(shard::Shard::number);
                homes
                    .into_iter()
                    .filter(|(of, ..)| Some(*of) == number)
                    .collect()
            }
            None => homes,
        };
        let here = |(shard, ..): &(u16, i32, QueueIndex)| self.home_of(*shard) == Some(self.core);
        let (mine, others): (Vec<_>, Vec<_>) = told.into_iter().partition(here);
        if mine.is_empty() {
            match others.first() {
                Some((shard, ..)) => {
                    self.sent_on(*shard, origin, reply, whole, None);
                }
                None => {
                    let remark = "recall failed, no queue of the topic is where the message is";
                    self.answer(reply, response::ILLEGAL_OPERATION, Some(remark));
                }
            }
            return;
        }
        for (_, queue_id, _) in &others {
            self.on_put(deletion_order(
                &handle.topic,
                *queue_id,
                &stored,
                origin,
                reply,
            ));
        }
        self.append_recall(origin, reply, &handle, &stored, &mine);
    }

    fn append_recall(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        handle: &RecallHandle,
        stored: &[u8],
        mine: &[(u16, i32, QueueIndex)],
    ) {
        let mut last = None;
        for (shard, _, queue) in mine {
            let Some(local) = self.local_shard(*shard) else {
                continue;
            };
            let parts = [stored];
            let message = deletion_message(*queue, origin, &parts, self.now.wall_ms);
            match self.append_timed_at(local, message, handle.due_ms) {
                Ok(appended) => last = Some((local, appended.end)),
                Err(refusal) => return self.refuse(reply, &refusal),
            }
        }
        let Some((local, end)) = last.filter(|_| !reply.oneway) else {
            return;
        };
        let mut frame = Vec::with_capacity(256);
        let ext = [
            ("MSG_REGION", ExtValue::Str(&self.config.region_id.0)),
            ("msgId", ExtValue::Str(&handle.unique_key)),
        ];
        let head = Reply {
            code: response::SUCCESS,
            opaque: reply.opaque,
            remark: None,
            ext: &ext,
        };
        encode_reply(&mut frame, reply.serialization, &head, &[]);
        self.reply_at(reply, local, end, &frame);
    }

    fn check_recall(&self, request: &RecallMessage<'_>) -> Result<RecallHandle, (i32, String)> {
        let config = &self.config;
        if !config.recall_enable {
            let remark = "operation is forbidden (recallMessageEnable=false)".to_owned();
            return Err((response::NO_PERMISSION, remark));
        }
        if self.hot.permission & wire::body::PERM_WRITE == 0 {
            let remark = "this broker takes no messages (brokerPermission)".to_owned();
            return Err((response::SERVICE_NOT_AVAILABLE, remark));
        }
        if !config.timer_enable {
            let remark = "timer messages are switched off (timerWheelEnable=false)".to_owned();
            return Err((response::SYSTEM_ERROR, remark));
        }
        if !self.directory.topics.contains_key(&*request.topic) {
            let remark = format!("the topic[{}] not exist", request.topic);
            return Err((response::TOPIC_NOT_EXIST, remark));
        }
        let illegal = |remark: &str| (response::ILLEGAL_OPERATION, remark.to_owned());
        let handle = RecallHandle::decode(&request.recall_handle)
            .ok_or_else(|| illegal("recall handle is invalid"))?;
        if handle.topic != *request.topic {
            return Err(illegal("topic not match"));
        }
        if handle.broker != config.broker_name.0 {
            return Err(illegal("the message is on another broker"));
        }
        let left_ms = handle.due_ms.saturating_sub(self.now.wall_ms);
        let most_ms = config.timer_delay_max_s.saturating_mul(1_000);
        if left_ms <= 0 || u64::try_from(left_ms).is_ok_and(|left| left > most_ms) {
            return Err(illegal(
                "timestamp invalid: the time has passed or is too far away",
            ));
        }
        Ok(handle)
    }

    /// One queue of a topic on each shard that has some: shard, queue id, index there.
    fn shards_of(&self, topic: &str) -> Vec<(u16, i32, QueueIndex)> {
        let mut found: Vec<(u16, i32, QueueIndex)> = Vec::new();
        let Some(entry) = self.directory.topics.get(topic) else {
            return found;
        };
        for (queue_id, home) in entry.homes.iter().enumerate() {
            if !found.iter().any(|(shard, ..)| *shard == home.shard) {
                found.push((home.shard, queue_id as i32, home.index));
            }
        }
        found
    }

    fn append_timed_at(
        &mut self,
        local: usize,
        message: NewMessage<'_>,
        due_ms: i64,
    ) -> Result<Appended, Refusal> {
        let now = self.now;
        let Some(local) = self.shards.get_mut(local) else {
            return Err(Refusal::NoQueue { shard: 0 });
        };
        local.shard.append_timed(now, message, due_ms)
    }

    /// A producer took a message back by a message of its own, which is stored on one shard; the
    /// others that have queues of the topic are told.
    pub(super) fn spread_deletion(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        stored: &[u8],
        due_ms: i64,
        stored_on: u16,
    ) {
        let key = properties::get_str(stored, properties::TIMER_DEL_UNIQKEY).map(str::to_owned);
        let Some((topic, unique_key)) = key.as_deref().and_then(|key| key.rsplit_once('+')) else {
            return;
        };
        let handle = RecallHandle {
            topic: topic.to_owned(),
            broker: String::new(),
            due_ms,
            unique_key: unique_key.to_owned(),
            offset: None,
        };
        let stored = deletion_properties(&handle, "", self.now.wall_ms);
        for (shard, queue_id, _) in self.shards_of(topic) {
            if shard != stored_on {
                self.on_put(deletion_order(topic, queue_id, &stored, origin, reply));
            }
        }
    }
}

fn deletion_properties(handle: &RecallHandle, group: &str, now_ms: i64) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    let key = format!("{}+{}", handle.topic, handle.unique_key);
    properties::append(&mut out, properties::TAGS, RECALL_TAG);
    properties::append(&mut out, properties::TIMER_DEL_UNIQKEY, &key);
    properties::append(&mut out, properties::UNIQ_KEY, &handle.unique_key);
    let (due, born) = (handle.due_ms.to_string(), now_ms.to_string());
    properties::append(&mut out, properties::TIMER_DELIVER_MS, &due);
    properties::append(&mut out, properties::BORN_TIMESTAMP, &born);
    properties::append(&mut out, properties::PRODUCER_GROUP, group);
    out
}

fn deletion_message<'a>(
    queue: QueueIndex,
    origin: &Origin,
    properties: &'a [&'a [u8]],
    now_ms: i64,
) -> NewMessage<'a> {
    NewMessage {
        queue,
        flag: 0,
        sys_flag: 0,
        born_timestamp: now_ms,
        born_host: origin.peer,
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body: b"0",
        properties,
        tags_code: tags::tags_code(Some(RECALL_TAG)),
        unique_key: None,
        keys: None,
    }
}

fn deletion_order(
    topic: &str,
    queue_id: i32,
    stored: &[u8],
    origin: &Origin,
    reply: &ReplyTo,
) -> PutOrder {
    PutOrder {
        topic: topic.to_owned(),
        queue_id,
        flag: 0,
        sys_flag: 0,
        born_timestamp: 0,
        born_host: origin.peer,
        reconsume_times: 0,
        body: b"0".to_vec(),
        properties: stored.to_vec(),
        delay_level: 0,
        reply: ReplyTo {
            oneway: true,
            ..*reply
        },
    }
}

/// When a message of the broker's own making that takes another one back is due.
pub(super) fn deletion_due(stored: &[u8]) -> Option<i64> {
    properties::get(stored, properties::TIMER_DEL_UNIQKEY)?;
    let due_ms = properties::get_str(stored, properties::TIMER_DELIVER_MS)?;
    due_ms.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: i64 = 1_700_000_000_000;
    const MAX_S: u64 = 259_200;

    fn due(pairs: &[(&str, &str)]) -> Result<Due, String> {
        let mut stored = Vec::new();
        for (name, value) in pairs {
            properties::append(&mut stored, name, value);
        }
        due_of(&stored, NOW_MS, MAX_S)
    }

    #[test]
    fn times_are_read_and_the_first_property_counts() {
        let at = |ms| Ok(Due::At(NOW_MS + ms));
        assert_eq!(due(&[("TIMER_DELAY_SEC", "7")]), at(7_000));
        assert_eq!(due(&[("TIMER_DELAY_MS", "7")]), at(7));
        assert_eq!(due(&[("TIMER_DELIVER_MS", "1700000000900")]), at(900));
        let all = [
            ("TIMER_DELIVER_MS", "1700000000001"),
            ("TIMER_DELAY_MS", "2"),
            ("TIMER_DELAY_SEC", "3"),
        ];
        assert_eq!(due(&all), at(3_000));
        assert_eq!(due(&all[..2]), at(2));
        assert_eq!(due(&[("TIMER_DELAY_SEC", "259200")]), at(259_200_000));
    }

    #[test]
    fn a_time_that_has_passed_is_now() {
        for pair in [
            ("TIMER_DELAY_SEC", "0"),
            ("TIMER_DELAY_MS", "0"),
            ("TIMER_DELIVER_MS", "1"),
        ] {
            assert_eq!(due(&[pair]), Ok(Due::Now), "{pair:?}");
            assert!(
                due(&[pair, ("TIMER_DEL_UNIQKEY", "t+k")]).is_err(),
                "nothing to take back"
            );
        }
    }

    #[test]
    fn what_cannot_be_kept_is_refused_by_name() {
        let most = i64::MAX.to_string();
        for (name, value) in [
            ("TIMER_DELAY_SEC", "-1"),
            ("TIMER_DELAY_MS", "-1"),
            ("TIMER_DELIVER_MS", "-1"),
            ("TIMER_DELAY_SEC", "abc"),
            ("TIMER_DELAY_MS", "1.5"),
            ("TIMER_DELIVER_MS", "99999999999999999999"),
            ("TIMER_DELAY_SEC", &most),
            ("TIMER_DELAY_SEC", "9223372036854775"),
            ("TIMER_DELAY_MS", &most),
            ("TIMER_DELIVER_MS", &most),
            ("TIMER_DELAY_SEC", "259201"),
            ("TIMER_DELAY_MS", "259200001"),
        ] {
            let refused = due(&[(name, value)]).unwrap_err();
            assert!(
                refused.contains(name) && refused.contains(value),
                "{refused}"
            );
        }
        let mut stored = Vec::new();
        properties::append(&mut stored, "TIMER_DELAY_SEC", &most);
        assert!(
            due_of(&stored, NOW_MS, u64::MAX).is_err(),
            "no bound is endless"
        );
    }
}
