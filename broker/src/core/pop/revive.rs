//! Messages that were not acknowledged in time.
//!
//! Each goes into a queue of its retry topic on the same shard, or of the dead-letter topic when it
//! was delivered often enough. The copy and the note that the original is settled are one record,
//! so that a crash neither loses nor doubles it. Where a group now pulls the topic instead, the
//! copies go where its consumers find them: the group's own retry topic.
//!
//! Invariant: a message stays held until its copy is in the log.

use shard::NewMessage;
use shard::cold::{Answer, Question};
use shard::error::Refusal;
use shard::pop::{Due, DueMessage, PopIndex, PopName, Taking};
use shard::queue::{Queue, QueueIndex};
use shard::select::{PullLimits, Selection, Wanted};
use wire::message::{RecordView, ids, properties};

use super::super::gather::{ColdAsk, Then};
use super::super::messages::MeshMessage;
use super::super::state::State;
use super::receipt::{normal_topic, retry_topic};
use super::serve::views;
use super::{PopMessage, RetryWake, Watched};
use crate::control::names::{DLQ_PREFIX, is_retry_topic, retry_topic as group_retry_topic};

/// Messages of one shard that are moved on per turn.
pub const REVIVALS_PER_TURN_MAX: usize = 64;
/// Messages of one core that are read from disk to be moved on.
pub const REVIVALS_READING_MAX: usize = 32;
/// Deliveries when the group says nothing.
const DELIVERIES_MAX: i32 = 16;
/// Pauses after failed attempts to move a message on, in milliseconds.
const PAUSES_MS: [i64; 7] = [100, 1_000, 5_000, 10_000, 20_000, 30_000, 60_000];
/// Pause while a queue for copies is made, in milliseconds.
const QUEUE_PAUSE_MS: i64 = 50;
/// How often the control task is asked for the same queue, in microseconds.
const ASK_AGAIN_US: u64 = 2_000_000;
/// How often the backlog of groups that pull now is looked for, in microseconds.
const DRAIN_US: u64 = 1_000_000;

/// A message whose time is up and that is being read from disk.
#[derive(Debug)]
pub struct Revival {
    local: usize,
    message: DueMessage,
}

/// Where a copy goes.
struct Target {
    queue_id: i32,
    queue: QueueIndex,
    dead: bool,
    /// Whether it is the group's own retry topic, which consumers pull.
    pulled: bool,
}

impl State {
    /// Handles what is due on a shard.
    pub(super) fn revive_due(&mut self, local: usize) {
        for _ in 0..REVIVALS_PER_TURN_MAX {
            let now = self.now;
            let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
                return;
            };
            if shard.is_stopping() || shard.log().poison().is_some() {
                return;
            }
            match shard.pop_next_due(now) {
                None => return,
                Some(Due::Unblocked(index)) => {
                    let name = shard.pop().queue(index).map(|queue| queue.name.clone());
                    if let Some(name) = name {
                        self.bury_exhausted(local, index, &name.group);
                        self.wake_pops(local, &name.topic, &name.group, None);
                    }
                }
                Some(Due::Message(message)) => self.revive(local, message),
            }
        }
        self.turn_again = true;
    }

    /// Messages read in order do not block their queue for ever: what was delivered often enough
    /// becomes a dead letter.
    fn bury_exhausted(&mut self, local: usize, index: PopIndex, group: &str) {
        let most = self.deliveries_max(group);
        let exhausted = self
            .shards
            .get(local)
            .map(|local| local.shard.pop().exhausted(index, most));
        for message in exhausted.unwrap_or_default() {
            self.revive(local, message);
        }
    }

    fn deliveries_max(&self, group: &str) -> i32 {
        let config = self.directory.groups.get(group);
        config.map_or(DELIVERIES_MAX, |config| config.retry_max_times.max(0))
    }

    fn postpone(&mut self, local: usize, message: &DueMessage, pause_ms: i64, failed: bool) {
        let until_ms = self.now.wall_ms + pause_ms;
        if let Some(local) = self.shards.get_mut(local) {
            local.shard.pop_postpone(message, until_ms, failed);
        }
    }

    fn postpone_failed(&mut self, local: usize, message: &DueMessage) {
        let pause = PAUSES_MS.get(usize::from(message.tries));
        let pause_ms = pause.or(PAUSES_MS.last()).copied().unwrap_or(1_000);
        self.postpone(local, message, pause_ms, true);
    }

    fn revive(&mut self, local: usize, message: DueMessage) {
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return;
        };
        let Some(name) = shard.pop().queue(message.queue).map(|queue| &queue.name) else {
            return;
        };
        let Some(queue) = shard.queues().find(&name.topic, name.queue_id) else {
            return self.drop_held(local, &message);
        };
        let offset = message.offset as i64;
        let limits = PullLimits {
            messages_max: 1,
            bytes_max: 1,
        };
        let (scanned, chosen) = (&mut self.scratch.scanned, &mut self.scratch.chosen);
        match shard.select(queue, offset, &Wanted::All, limits, scanned, chosen) {
            Selection::Chosen { .. } if shard.all_in_ring(chosen) => {
                let mut record = Vec::new();
                shard.copy_from_ring(chosen, &mut record);
                self.revive_record(local, &message, &record);
            }
            Selection::Chosen { .. } | Selection::OnDisk => {
                if self.pop.reviving >= REVIVALS_READING_MAX {
                    return self.postpone(local, &message, 20, false);
                }
                self.pop.reviving += 1;
                let question = Question::Pull {
                    queue,
                    offset,
                    wanted: Wanted::All,
                    limits,
                };
                let then = Then::Revive(Revival { local, message });
                self.ask_cold(local, question, ColdAsk { then, local });
            }
            Selection::TooSmall | Selection::Empty | Selection::NoQueue => {
                self.drop_held(local, &message);
            }
            _ => self.postpone_failed(local, &message),
        }
    }

    /// Retention has dropped the message while it was held.
    fn drop_held(&mut self, local: usize, message: &DueMessage) {
        let now = self.now;
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return;
        };
        let name = shard.pop().queue(message.queue).map(|q| q.name.clone());
        let dropped = shard.pop_drop(now, message);
        let PopName {
            topic,
            group,
            queue_id,
        } = name.unwrap_or_default();
        let offset = message.offset;
        tracing::warn!(
            topic,
            group,
            queue_id,
            offset,
            "retention dropped a message that was popped and not acknowledged"
        );
        if dropped.is_err() {
            self.postpone_failed(local, message);
        }
    }

    /// Goes on with a message that was read from disk.
    pub fn on_revival_read(&mut self, revival: Revival, answer: Answer) {
        self.pop.reviving = self.pop.reviving.saturating_sub(1);
        let Revival { local, message } = revival;
        match answer {
            Answer::Pull {
                selection: Selection::Chosen { .. },
                bytes,
                messages: 1..,
            } => self.revive_record(local, &message, &bytes),
            Answer::Pull {
                selection: Selection::TooSmall | Selection::Empty | Selection::NoQueue,
                ..
            } => self.drop_held(local, &message),
            _ => self.postpone_failed(local, &message),
        }
    }

    fn revive_record(&mut self, local: usize, message: &DueMessage, record: &[u8]) {
        let view = views(record).next();
        let view = view.filter(|view| view.queue_offset() as u64 == message.offset);
        let Some(shard) = self.shards.get(local).map(|local| &local.shard) else {
            return;
        };
        let name = shard.pop().queue(message.queue).map(|q| q.name.clone());
        let (Some(view), Some(name)) = (view, name) else {
            return self.postpone_failed(local, message);
        };
        let number = shard.number();
        let Some(target) = self.target_of(&name, number, (&view, message.count)) else {
            return self.postpone(local, message, QUEUE_PAUSE_MS, false);
        };
        match self.move_on(local, message, &name, &target, &view) {
            Ok(()) => {}
            Err(refusal) => {
                tracing::debug!(topic = name.topic, %refusal, "a popped message waits to be moved");
                self.postpone_failed(local, message);
            }
        }
    }

    /// The queue for the copy of a message; `None` while it is being made.
    fn target_of(
        &mut self,
        name: &PopName,
        shard: u16,
        (view, count): (&RecordView<'_>, i32),
    ) -> Option<Target> {
        let delivered = view.reconsume_times().max(count);
        let dead = delivered >= self.deliveries_max(&name.group);
        let normal = normal_topic(&name.topic, &name.group);
        let pulled = !dead && self.directory.is_pulled(&name.group, normal);
        let topic = if dead {
            format!("{DLQ_PREFIX}{}", name.group)
        } else if pulled {
            group_retry_topic(&name.group)
        } else if is_retry_topic(&name.topic) {
            name.topic.clone()
        } else {
            retry_topic(normal, &name.group, self.config.retry_topic_v2)
        };
        let homes = self.directory.topics.get(&*topic).map(|entry| &entry.homes);
        let own = homes.and_then(|homes| homes.iter().position(|home| home.shard == shard));
        if let Some((id, home)) = own.and_then(|id| Some((id, homes?.get(id)?))) {
            return Some(Target {
                queue_id: id as i32,
                queue: home.index,
                dead,
                pulled,
            });
        }
        self.ask_for_queue(&topic, shard);
        None
    }

    fn ask_for_queue(&mut self, topic: &str, shard: u16) {
        let now_us = self.now.monotonic_us;
        let asked = &mut self.pop.asked;
        asked.retain(|_, asked_us| now_us < *asked_us + ASK_AGAIN_US);
        let key = format!("{shard} {topic}");
        if asked.insert(key.into(), now_us).is_none() {
            let need = PopMessage::NeedQueue(topic.into(), shard);
            self.send_to(0, MeshMessage::Pop(need));
        }
    }

    fn move_on(
        &mut self,
        local: usize,
        message: &DueMessage,
        name: &PopName,
        target: &Target,
        view: &RecordView<'_>,
    ) -> Result<(), Refusal> {
        let normal = normal_topic(&name.topic, &name.group).to_owned();
        let stored = copy_properties(view, message.pop_ms, &normal, target);
        let copy = NewMessage {
            reconsume_times: view.reconsume_times().max(message.count) + 1,
            properties: &[&stored],
            ..NewMessage::of_record(view, target.queue, &stored)
        };
        let now = self.now;
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return Ok(());
        };
        let Some(appended) = shard.pop_move(now, message, copy)? else {
            return Ok(());
        };
        let counters = shard.pop_counters_mut();
        counters.revived += u64::from(!target.dead);
        counters.dead += u64::from(target.dead);
        let number = shard.number();
        if target.dead {
            let (group, queue_id) = (&name.group, target.queue_id);
            tracing::info!(
                group,
                topic = normal,
                queue_id,
                "popped message is a dead letter"
            );
        } else {
            self.pop.retry_wakes.push(RetryWake {
                local,
                queue: target.queue,
                offset: appended.queue_offset as u64,
                watched: Watched {
                    shard: number,
                    topic: normal.into(),
                    group: name.group.as_str().into(),
                },
            });
        }
        Ok(())
    }

    /// Wakes pops for retry messages that became readable.
    pub(super) fn wake_retries(&mut self) {
        if self.pop.retry_wakes.is_empty() {
            return;
        }
        let mut wakes = std::mem::take(&mut self.pop.retry_wakes);
        wakes.retain(|wake| {
            let shard = self.shards.get(wake.local).map(|local| &local.shard);
            let queue = shard.and_then(|shard| shard.queues().get(wake.queue));
            let waits = |queue: &Queue| !queue.removed && queue.readable <= wake.offset;
            if queue.is_some_and(waits) {
                return true;
            }
            let watched = &wake.watched;
            self.wake_pops(wake.local, &watched.topic, &watched.group, None);
            false
        });
        wakes.append(&mut self.pop.retry_wakes);
        self.pop.retry_wakes = wakes;
    }

    /// Groups that pull a topic now do not read its retry topics of POP: what waits there is taken
    /// for no time at all and so moved to where they do.
    pub(super) fn drain_for_pull(&mut self) {
        let now_us = self.now.monotonic_us;
        if self.directory.pulled.is_empty() || now_us < self.pop.drained_us + DRAIN_US {
            return;
        }
        self.pop.drained_us = now_us;
        let pulled = self.directory.pulled.iter();
        let pairs =
            pulled.flat_map(|(group, topics)| topics.iter().map(move |topic| (group, topic)));
        let names = pairs.flat_map(|(group, topic)| {
            [false, true].map(|v2| (group.clone(), retry_topic(topic, group, v2)))
        });
        let names: Vec<(Box<str>, String)> = names
            .filter(|(_, retry)| self.directory.topics.contains_key(retry.as_str()))
            .collect();
        for (group, retry) in names {
            self.drain_retry_topic(&group, &retry);
        }
    }

    fn drain_retry_topic(&mut self, group: &str, retry: &str) {
        let now = self.now;
        let Some(entry) = self.directory.topics.get(retry) else {
            return;
        };
        for (id, home) in entry.homes.iter().enumerate() {
            let numbers = self.shards.iter();
            let own = numbers
                .map(|local| local.shard.number())
                .position(|n| n == home.shard);
            let Some(shard) = own.and_then(|at| self.shards.get_mut(at)) else {
                continue;
            };
            let (shard, queue_id) = (&mut shard.shard, id as i32);
            let Some((min, end)) = shard.bounds(home.index) else {
                continue;
            };
            let stands = shard.offsets().get(retry, group, queue_id);
            let stands = stands.map_or(0, |entry| entry.offset.max(0)) as u64;
            let from = stands.max(min);
            let to = end.min(from + REVIVALS_PER_TURN_MAX as u64);
            let Some(index) = shard.pop_open(retry, group, queue_id).filter(|_| from < to) else {
                continue;
            };
            let offsets: Vec<u64> = (from..to)
                .filter(|offset| !shard.pop().is_taken(index, *offset))
                .collect();
            let taking = Taking {
                ordered: false,
                fresh: false,
                pop_ms: now.wall_ms,
                invisible_ms: 0,
                next_offset: to,
                attempt: "",
                offsets: &offsets,
            };
            if let Err(refusal) = shard.pop_take(now, index, &taking) {
                tracing::debug!(retry, group, %refusal, "retry messages of POP not moved yet");
            }
        }
    }
}

/// Properties of the copy.
fn copy_properties(view: &RecordView<'_>, pop_ms: i64, normal: &str, target: &Target) -> Vec<u8> {
    use properties::{
        DLQ_ORIGIN_MESSAGE_ID, DLQ_ORIGIN_TOPIC, FIRST_POP_TIME, ORIGIN_MESSAGE_ID, POP_CK,
        RETRY_TOPIC,
    };
    let old = view.properties();
    let mut stored = properties::remove(old, &[shard::pop::POP_ORIGIN, POP_CK]);
    if properties::get(old, FIRST_POP_TIME).is_none() {
        properties::append(&mut stored, FIRST_POP_TIME, &pop_ms.to_string());
    }
    let mut id = Vec::new();
    ids::offset_msg_id(&mut id, view.store_host(), view.physical_offset());
    let id = String::from_utf8(id).unwrap_or_default();
    let first_id = properties::get_str(old, ORIGIN_MESSAGE_ID).unwrap_or(&id);
    if properties::get(old, ORIGIN_MESSAGE_ID).is_none() {
        properties::append(&mut stored, ORIGIN_MESSAGE_ID, first_id);
    }
    // Consumers that pull a group's retry topic, and readers of dead letters, ask for the topic.
    if (target.dead || target.pulled) && properties::get(old, RETRY_TOPIC).is_none() {
        properties::append(&mut stored, RETRY_TOPIC, normal);
    }
    if target.dead {
        properties::append(&mut stored, DLQ_ORIGIN_TOPIC, normal);
        properties::append(&mut stored, DLQ_ORIGIN_MESSAGE_ID, first_id);
    }
    stored
}
