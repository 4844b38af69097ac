//! The pull path: from a request to records of the shard, or a parked request.
//!
//! Invariant: checks run in RocketMQ's order and the first failure is answered; a parked pull is
//! woken by the next readable message of its queue, so nothing is ever late by a polling interval.

use shard::cold::{Answer, Question};
use shard::select::{PullLimits, Selection, Wanted};
use wire::codes::response;
use wire::header::{ExtValue, Header, Reply, encode_reply_with};
use wire::message::sysflag;
use wire::requests::PullRequest;

use super::canary::Canary;
use super::deliveries::{HandedOut, group_of};
use super::messages::{MeshMessage, ReplyTo};
use super::pulls::{WaitingPull, WaitsFor};
use super::state::State;
use crate::control::effects::Origin;

/// Longest time a pull may wait, whatever the client asks, in milliseconds.
pub const SUSPEND_MS_MAX: i64 = 120_000;
/// Messages one pull gets at most (the client's own bound is usually 32).
pub const PULL_MESSAGES_MAX: i32 = 1024;

/// Why a pull is refused.
#[derive(Debug)]
pub(super) struct PullRefusal {
    /// Response code.
    pub code: i32,
    /// Remark.
    pub remark: String,
}

pub(super) fn refusal<T>(code: i32, remark: impl Into<String>) -> Result<T, PullRefusal> {
    Err(PullRefusal {
        code,
        remark: remark.into(),
    })
}

impl State {
    /// Handles a pull (codes 11, 361).
    pub fn on_pull(&mut self, origin: &Origin, reply: &ReplyTo, header: &Header<'_>, whole: &[u8]) {
        let request = match PullRequest::decode(&header.ext) {
            Ok(request) => request,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let (topic, group) = (request.topic.to_cow(), request.consumer_group.to_cow());
        let known = self.directory.topics.contains_key(&*topic)
            && self.directory.groups.contains_key(&*group);
        if !known {
            return self.to_creation(origin, whole);
        }
        let home = match self.check_pull(&request, &topic, &group) {
            Ok(home) => home,
            Err(refused) => return self.answer(reply, refused.code, Some(&refused.remark)),
        };
        if self.sent_on(home.shard, origin, reply, whole, None) {
            return;
        }
        let Some(local) = self.local_shard(home.shard) else {
            return;
        };
        let wanted = match self.wanted(origin.link, &request, &topic, &group) {
            Ok(wanted) => wanted,
            Err(refused) => return self.answer(reply, refused.code, Some(&refused.remark)),
        };
        if request.sys_flag & sysflag::PULL_SUBSCRIPTION != 0 {
            self.note_pull_only(&group, &topic);
        }
        let (group_sys_flag, suggested_broker) = self
            .directory
            .groups
            .get(&*group)
            .map_or((0, 0), |config| (config.group_sys_flag, config.broker_id));
        let topic_sys_flag = self
            .directory
            .topics
            .get(&*topic)
            .map_or(0, |entry| entry.config.topic_sys_flag);
        let mut pull = WaitingPull {
            reply: *reply,
            client: origin.peer,
            group: (*group).into(),
            local,
            queue: home.index,
            offset: request.queue_offset,
            wanted,
            limits: self.pull_limits(&request),
            deadline_us: self.pull_deadline_us(&request),
            suspend: request.sys_flag & sysflag::PULL_SUSPEND != 0,
            waits_for: WaitsFor::Disk,
            group_sys_flag,
            topic_sys_flag,
            suggested_broker,
        };
        self.commit_with_pull(&request, &topic, &group, (local, home.index));
        let reset = self
            .shards
            .get_mut(local)
            .and_then(|local| local.shard.take_reset(&topic, &group, request.queue_id));
        if let Some(offset) = reset {
            pull.offset = offset;
            return self.answer_pull(&pull, response::PULL_OFFSET_MOVED, offset, "OFFSET_RESET");
        }
        self.try_pull(pull);
    }

    fn check_pull(
        &self,
        request: &PullRequest<'_>,
        topic: &str,
        group: &str,
    ) -> Result<super::directory::QueueHome, PullRefusal> {
        if self.hot.permission & wire::body::PERM_READ == 0 {
            return refusal(
                response::NO_PERMISSION,
                "this broker serves no pulls (brokerPermission)",
            );
        }
        let enabled = self
            .directory
            .groups
            .get(group)
            .is_none_or(|config| config.consume_enable);
        if !enabled {
            return refusal(
                response::NO_PERMISSION,
                format!("subscription group no permission, {group}: consumeEnable is false"),
            );
        }
        let Some(entry) = self.directory.topics.get(topic) else {
            return refusal(
                response::TOPIC_NOT_EXIST,
                format!("topic[{topic}] not exist"),
            );
        };
        if entry.config.perm & wire::body::PERM_READ == 0 {
            let remark = format!("the topic[{topic}] pulling message is forbidden");
            return refusal(response::NO_PERMISSION, remark);
        }
        if !self.directory.may_read(group, topic) {
            let remark = format!("group {group} may not read topic {topic}");
            return refusal(response::NO_PERMISSION, remark);
        }
        let bound = entry.config.read_queue_nums;
        let home = usize::try_from(request.queue_id)
            .ok()
            .filter(|_| request.queue_id < bound);
        match home.and_then(|id| entry.homes.get(id)) {
            Some(home) => Ok(*home),
            None => refusal(
                response::INVALID_PARAMETER,
                format!(
                    "queueId {} of topic {topic}, bound {bound}",
                    request.queue_id
                ),
            ),
        }
    }

    fn pull_limits(&self, request: &PullRequest<'_>) -> PullLimits {
        PullLimits {
            messages_max: (request.max_msg_nums.clamp(1, PULL_MESSAGES_MAX) as usize)
                .min(self.hot.pull_messages_max.max(1)),
            bytes_max: self.hot.pull_bytes_max,
        }
    }

    fn pull_deadline_us(&self, request: &PullRequest<'_>) -> u64 {
        let wait_ms = if self.hot.long_polling {
            request.suspend_timeout_millis.clamp(0, SUSPEND_MS_MAX) as u64
        } else {
            self.hot.short_polling_ms
        };
        self.now.monotonic_us + wait_ms * 1000
    }

    fn commit_with_pull(
        &mut self,
        request: &PullRequest<'_>,
        topic: &str,
        group: &str,
        (local, queue): (usize, shard::queue::QueueIndex),
    ) {
        let Some(local) = self.shards.get_mut(local) else {
            return;
        };
        let commits = request.sys_flag & sysflag::PULL_COMMIT_OFFSET != 0;
        let end = local.shard.bounds(queue).map_or(0, |(_, end)| end as i64);
        if commits && (0..=end).contains(&request.commit_offset) {
            let (id, offset) = (request.queue_id, request.commit_offset);
            let result = local
                .shard
                .commit_offset(self.now, topic, group, id, offset);
            if let Err(refusal) = result {
                tracing::debug!(topic, group, id, %refusal, "offset of a pull not stored");
            }
        }
        local.shard.note_pull(
            self.now,
            topic,
            group,
            request.queue_id,
            request.queue_offset,
        );
    }

    /// Answers a pull with what is there, asks the disk for it, or parks it.
    fn try_pull(&mut self, mut pull: WaitingPull) {
        let Some(local) = self.shards.get_mut(pull.local) else {
            return;
        };
        let selection = local.shard.select(
            pull.queue,
            pull.offset,
            &pull.wanted,
            pull.limits,
            &mut self.scratch.scanned,
            &mut self.scratch.chosen,
        );
        match selection {
            Selection::Chosen { next_offset } if local.shard.all_in_ring(&self.scratch.chosen) => {
                let chosen = self.scratch.chosen.len();
                self.count_passed(&pull, next_offset, chosen);
                self.note_delivery(&pull, next_offset);
                self.answer_from_ring(&pull, next_offset);
            }
            Selection::Chosen { .. } | Selection::OnDisk => self.ask_disk(pull),
            Selection::NoneMatched { next_offset } => {
                self.count_passed(&pull, next_offset, 0);
                pull.offset = next_offset as i64;
                self.try_again(pull);
            }
            Selection::AtEnd if pull.suspend && pull.deadline_us > self.now.monotonic_us => {
                self.park(pull);
            }
            Selection::AtEnd => {
                let offset = pull.offset;
                self.answer_pull(
                    &pull,
                    response::PULL_NOT_FOUND,
                    offset,
                    "OFFSET_OVERFLOW_ONE",
                );
            }
            other => self.answer_out_of_range(&pull, other),
        }
    }

    /// Goes on behind messages that did not match: at the end of the queue it parks, in between it
    /// tells the client to come again, so that one pull never holds the core for long.
    fn try_again(&mut self, pull: WaitingPull) {
        let bounds = self
            .shards
            .get(pull.local)
            .and_then(|local| local.shard.bounds(pull.queue));
        let at_end = bounds.is_some_and(|(_, end)| pull.offset as u64 >= end);
        if at_end && pull.suspend && pull.deadline_us > self.now.monotonic_us {
            self.park(pull);
        } else {
            let offset = pull.offset;
            self.answer_pull(
                &pull,
                response::PULL_RETRY_IMMEDIATELY,
                offset,
                "NO_MATCHED_MESSAGE",
            );
        }
    }

    fn answer_out_of_range(&mut self, pull: &WaitingPull, selection: Selection) {
        let bounds = self
            .shards
            .get(pull.local)
            .and_then(|local| local.shard.bounds(pull.queue));
        let (min, max) = bounds.unwrap_or((0, 0));
        let moved = response::PULL_OFFSET_MOVED;
        match selection {
            Selection::TooSmall => self.answer_pull(pull, moved, min as i64, "OFFSET_TOO_SMALL"),
            Selection::TooLarge if self.was_made_again(pull) => {
                self.answer_pull(pull, moved, min as i64, "OFFSET_OVERFLOW_BADLY");
            }
            Selection::TooLarge => {
                self.answer_pull(pull, moved, max as i64, "OFFSET_OVERFLOW_BADLY")
            }
            _ if pull.offset > max as i64 && self.was_made_again(pull) => {
                self.answer_pull(pull, moved, min as i64, "NO_MESSAGE_IN_QUEUE");
            }
            _ if pull.offset != max as i64 => {
                self.answer_pull(pull, moved, max as i64, "NO_MESSAGE_IN_QUEUE");
            }
            _ => {
                let not_found = response::PULL_NOT_FOUND;
                self.answer_pull(pull, not_found, max as i64, "NO_MESSAGE_IN_QUEUE");
            }
        }
    }

    /// Whether the pull is for a topic that was deleted and made again while this process ran. A
    /// consumer that stands beyond its end must begin at the start, or it would miss messages.
    fn was_made_again(&self, pull: &WaitingPull) -> bool {
        let queue = self
            .shards
            .get(pull.local)
            .and_then(|local| local.shard.queues().get(pull.queue));
        queue.is_some_and(|queue| self.directory.made_again.contains(&*queue.topic))
    }

    fn park(&mut self, pull: WaitingPull) {
        let Some(local) = self.shards.get_mut(pull.local) else {
            return;
        };
        let queue = pull.queue;
        let parked = self.pulls.insert(pull, |token| {
            local.shard.park(queue, token).map(WaitsFor::Message)
        });
        if let Err(pull) = parked {
            self.counters.park_refused += 1;
            let offset = pull.offset;
            self.answer_pull(
                &pull,
                response::PULL_NOT_FOUND,
                offset,
                "too many parked pulls",
            );
        }
    }

    fn ask_disk(&mut self, pull: WaitingPull) {
        let Some(local) = self.shards.get_mut(pull.local) else {
            return;
        };
        let question = Question::Pull {
            queue: pull.queue,
            offset: pull.offset,
            wanted: pull.wanted.clone(),
            limits: pull.limits,
        };
        let asked = self.pulls.insert(pull, |token| {
            let taken = local.shard.ask(token, question);
            taken.then_some(WaitsFor::Disk)
        });
        if let Err(pull) = asked {
            let remark = "disk: too many cold reads wait; try again";
            self.answer(&pull.reply, response::SYSTEM_BUSY, Some(remark));
        }
    }

    /// Takes the disk's answer to a pull.
    pub fn on_cold_pull(&mut self, token: u64, answer: Answer) {
        let Some(pull) = self.pulls.take(token) else {
            return;
        };
        match answer {
            Answer::Pull {
                selection: Selection::Chosen { next_offset },
                bytes,
                messages,
            } => {
                if messages == 0 {
                    // Every chosen record was damaged: go on behind them.
                    let code = response::PULL_RETRY_IMMEDIATELY;
                    return self.answer_pull(
                        &pull,
                        code,
                        next_offset as i64,
                        "MESSAGE_WAS_REMOVING",
                    );
                }
                self.count_passed(&pull, next_offset, messages);
                self.count_found(&pull, messages as u64, bytes.len() as u64);
                self.note_delivery(&pull, next_offset);
                self.answer_found(&pull, next_offset, |out| out.extend_from_slice(&bytes));
            }
            Answer::Pull {
                selection: Selection::NoneMatched { next_offset },
                ..
            } => {
                self.count_passed(&pull, next_offset, 0);
                let mut pull = pull;
                pull.offset = next_offset as i64;
                pull.deadline_us = self.now.monotonic_us;
                self.try_again(pull);
            }
            Answer::Pull { selection, .. } => self.answer_out_of_range(&pull, selection),
            Answer::Failed(reason) => self.answer_read_failed(&pull.reply, &reason),
            _ => self.answer(
                &pull.reply,
                response::SYSTEM_ERROR,
                Some("unexpected answer"),
            ),
        }
    }

    /// Runs a pull again whose queue has a new message.
    pub fn on_woken(&mut self, token: u64) {
        if token & super::pop::BELL_TOKEN != 0 {
            return self.on_pop_bell(token);
        }
        if let Some(pull) = self.pulls.take(token) {
            self.try_pull(pull);
        }
    }

    /// Answers pulls whose time is up.
    pub fn expire_pulls(&mut self) {
        while let Some(token) = self.pulls.expired(self.now.monotonic_us) {
            let Some(WaitsFor::Message(park)) = self.pulls.waits_for(token) else {
                continue;
            };
            let Some(pull) = self.pulls.take(token) else {
                continue;
            };
            if let Some(local) = self.shards.get_mut(pull.local) {
                local.shard.unpark(park, token);
            }
            let offset = pull.offset;
            self.answer_pull(
                &pull,
                response::PULL_NOT_FOUND,
                offset,
                "OFFSET_OVERFLOW_ONE",
            );
        }
    }

    fn answer_from_ring(&mut self, pull: &WaitingPull, next_offset: u64) {
        let mut units = std::mem::take(&mut self.scratch.chosen);
        if self.canary.is(Canary::Reorder) {
            units.reverse();
        }
        let bytes: u64 = units.iter().map(|unit| u64::from(unit.size)).sum();
        self.count_found(pull, units.len() as u64, bytes);
        let mut frame = std::mem::take(&mut self.scratch.reply);
        frame.clear();
        if let Some(local) = self.shards.get(pull.local) {
            encode_found(
                &mut frame,
                pull,
                next_offset,
                local.shard.bounds(pull.queue),
                |out| {
                    local.shard.copy_from_ring(&units, out);
                },
            );
        }
        self.deliver(pull.reply.link, &frame);
        self.scratch.reply = frame;
        self.scratch.chosen = units;
    }

    fn answer_found(
        &mut self,
        pull: &WaitingPull,
        next_offset: u64,
        body: impl FnOnce(&mut Vec<u8>),
    ) {
        let bounds = self
            .shards
            .get(pull.local)
            .and_then(|local| local.shard.bounds(pull.queue));
        let mut frame = std::mem::take(&mut self.scratch.reply);
        frame.clear();
        encode_found(&mut frame, pull, next_offset, bounds, body);
        self.deliver(pull.reply.link, &frame);
        self.scratch.reply = frame;
    }

    /// Counts what a filter has passed over up to an offset.
    fn count_passed(&mut self, pull: &WaitingPull, next_offset: u64, taken: usize) {
        let looked_at = next_offset.saturating_sub(pull.offset as u64);
        let passed = looked_at.saturating_sub(taken as u64);
        if passed == 0 || pull.wanted == Wanted::All {
            return;
        }
        let queue = self
            .shards
            .get(pull.local)
            .and_then(|local| local.shard.queues().get(pull.queue));
        if let Some(queue) = queue
            && let Some(entry) = self.directory.topics.get_mut(&*queue.topic)
        {
            entry.count_passed(&pull.group, queue.queue_id, passed);
        }
    }

    /// Takes note of who gets messages.
    fn note_delivery(&mut self, pull: &WaitingPull, next_offset: u64) {
        let Some(shard) = self.shards.get(pull.local).map(|local| &local.shard) else {
            return;
        };
        let first = pull.offset.max(0) as u64;
        let out = HandedOut {
            shard: shard.number(),
            queue: pull.queue,
            group: group_of(&pull.group),
            first,
            count: next_offset.saturating_sub(first) as u32,
            client: pull.client,
            popped: false,
        };
        self.deliveries.note(self.now.wall_ms, out);
    }

    fn count_found(&mut self, pull: &WaitingPull, messages: u64, bytes: u64) {
        self.counters.get_found += 1;
        self.counters.get_messages += messages;
        self.counters.get_bytes += bytes;
        let queue = self
            .shards
            .get(pull.local)
            .and_then(|local| local.shard.queues().get(pull.queue));
        if let Some(entry) = queue.and_then(|queue| self.directory.topics.get_mut(&*queue.topic)) {
            entry.count_got(&pull.group, messages, bytes);
        }
    }

    fn answer_pull(&mut self, pull: &WaitingPull, code: i32, next_offset: i64, status: &str) {
        self.counters.get_missed += 1;
        let bounds = self
            .shards
            .get(pull.local)
            .and_then(|local| local.shard.bounds(pull.queue));
        let mut frame = std::mem::take(&mut self.scratch.reply);
        frame.clear();
        encode_pull(
            &mut frame,
            pull,
            (code, next_offset, Some(status)),
            bounds,
            |_| {},
        );
        self.deliver(pull.reply.link, &frame);
        self.scratch.reply = frame;
    }

    /// Tells the control task now and then that a group reads a topic without a subscription.
    pub fn note_pull_only(&mut self, group: &str, topic: &str) {
        let now_ms = self.now.wall_ms;
        let entry = self.directory.topics.get_mut(topic);
        if entry.is_some_and(|entry| entry.is_pull_news(group, now_ms)) {
            let (group, topic) = (group.into(), topic.into());
            self.send_to(0, MeshMessage::Pulling { group, topic });
        }
    }
}

fn encode_found(
    frame: &mut Vec<u8>,
    pull: &WaitingPull,
    next_offset: u64,
    bounds: Option<(u64, u64)>,
    body: impl FnOnce(&mut Vec<u8>),
) {
    let found = (response::SUCCESS, next_offset as i64, Some("FOUND"));
    encode_pull(frame, pull, found, bounds, body);
}

fn encode_pull(
    frame: &mut Vec<u8>,
    pull: &WaitingPull,
    (code, next_offset, status): (i32, i64, Option<&str>),
    bounds: Option<(u64, u64)>,
    body: impl FnOnce(&mut Vec<u8>),
) {
    let (min, max) = bounds.unwrap_or((0, 0));
    let ext = [
        (
            "groupSysFlag",
            ExtValue::Int(i64::from(pull.group_sys_flag)),
        ),
        ("maxOffset", ExtValue::Int(max as i64)),
        ("minOffset", ExtValue::Int(min as i64)),
        ("nextBeginOffset", ExtValue::Int(next_offset)),
        ("suggestWhichBrokerId", ExtValue::Int(pull.suggested_broker)),
        (
            "topicSysFlag",
            ExtValue::Int(i64::from(pull.topic_sys_flag)),
        ),
    ];
    let reply = Reply {
        code,
        opaque: pull.reply.opaque,
        remark: status,
        ext: &ext,
    };
    encode_reply_with(frame, pull.reply.serialization, &reply, body);
}
