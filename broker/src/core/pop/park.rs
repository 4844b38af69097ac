//! Pops that wait: parked at the core of their connection, watched for at the shards.
//!
//! A shard that had nothing for a parked order notes a watch and rings a bell at the order's core
//! once a message may be there: one watch for each message, so that not all consumers run for one.
//! Whoever is not there any more passes the bell on.
//!
//! Invariant: between looking at a shard and watching it nothing can arrive there, and a wake that
//! finds no order wakes the next; so no message lies while somebody waits for it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use shard::parked::ParkId;
use shard::queue::QueueIndex;
use wire::codes::response;
use wire::header::Header;
use wire::requests::PollingInfo;

use super::super::messages::{MeshMessage, ReplyTo};
use super::super::state::State;
use super::order::PopOrder;
use super::receipt::normal_topic;
use super::{PopMessage, Watched};
use crate::control::effects::Origin;

/// Requests parked at one core.
pub const POPS_PARKED_MAX: usize = 100_000;
/// Mark of the tokens under which bells wait for messages.
pub const BELL_TOKEN: u64 = 1 << 62;

/// Topic, group and queue for which requests wait.
type Key = (Box<str>, Box<str>, i32);

enum Place {
    /// On its way through shards.
    Travels,
    /// Waiting.
    Waits(Box<PopOrder>),
}

struct Entry {
    place: Place,
    key: Key,
    /// Shards that rang while it was on its way.
    rung: Vec<Watched>,
}

/// Requests parked at a core.
#[derive(Default)]
pub struct Parked {
    entries: HashMap<u64, Entry>,
    counts: HashMap<Key, usize>,
    deadlines: BinaryHeap<Reverse<(u64, u64)>>,
    next: u64,
}

impl Parked {
    /// How many.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// When the first is up, in monotonic microseconds.
    pub fn deadline_us(&self) -> Option<u64> {
        self.deadlines
            .peek()
            .map(|Reverse((deadline, _))| *deadline)
    }

    /// Room for one more, or at which bound it failed.
    fn admit(&mut self, order: &mut PopOrder, per_key_max: usize) -> bool {
        let key = (order.topic.clone(), order.group.clone(), order.queue_id);
        let of_key = self.counts.get(&key).copied().unwrap_or(0);
        if self.entries.len() >= POPS_PARKED_MAX || of_key >= per_key_max {
            return false;
        }
        self.next += 1;
        order.token = self.next;
        self.counts.insert(key.clone(), of_key + 1);
        self.deadlines
            .push(Reverse((order.deadline_us, order.token)));
        let entry = Entry {
            place: Place::Travels,
            key,
            rung: Vec::new(),
        };
        self.entries.insert(order.token, entry);
        true
    }

    fn remove(&mut self, token: u64) -> Option<Entry> {
        let entry = self.entries.remove(&token)?;
        if let Some(count) = self.counts.get_mut(&entry.key) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&entry.key);
            }
        }
        Some(entry)
    }

    /// Takes a waiting order out to send it on its way.
    fn depart(&mut self, token: u64) -> Option<Box<PopOrder>> {
        let entry = self.entries.get_mut(&token)?;
        match std::mem::replace(&mut entry.place, Place::Travels) {
            Place::Waits(order) => Some(order),
            Place::Travels => None,
        }
    }
}

#[derive(Clone, Copy)]
struct Watcher {
    core: u16,
    token: u64,
    queue_id: i32,
    deadline_us: u64,
}

#[derive(Default)]
struct TopicWatch {
    groups: HashMap<Box<str>, VecDeque<Watcher>>,
    /// Queues of the topic and the first of them on the shard, when bells were hung up in them.
    armed: Option<(usize, QueueIndex)>,
}

struct Bell {
    local: usize,
    topic: Box<str>,
    queue: QueueIndex,
    queue_id: i32,
    hangs: Option<ParkId>,
}

/// Watches at the shards of a core.
#[derive(Default)]
pub struct Watches {
    topics: HashMap<(usize, Box<str>), TopicWatch>,
    bells: Vec<Bell>,
    bell_of: HashMap<(usize, QueueIndex), u32>,
}

impl State {
    /// An order has found nothing anywhere: it waits, or is answered.
    pub(super) fn park_pop(&mut self, mut order: Box<PopOrder>) {
        if self.now.monotonic_us >= order.deadline_us || self.stopping {
            self.pop_done(order.token);
            return self.answer_pop_empty(&order, response::POLLING_TIMEOUT);
        }
        if order.token == 0 {
            let per_key_max = self.config.pop_parked_max as usize;
            if !self.pop.parked.admit(&mut order, per_key_max) {
                self.pop.counters.park_refused += 1;
                return self.answer_pop_empty(&order, response::POLLING_FULL);
            }
            // Once more, and watching this time.
            order.left = self.shards_of_pop(&order);
            return self.go_on(order);
        }
        let Some(entry) = self.pop.parked.entries.get_mut(&order.token) else {
            return;
        };
        if entry.rung.is_empty() {
            entry.place = Place::Waits(order);
        } else {
            let rung = std::mem::take(&mut entry.rung);
            order.left = rung.into_iter().map(|watched| watched.shard).collect();
            self.go_on(order);
        }
    }

    /// An order was answered, wherever it was.
    pub(super) fn finish_pop(&mut self, order: &PopOrder) {
        if order.token != 0 {
            let core = usize::from(order.coordinator);
            self.send_to(core, MeshMessage::Pop(PopMessage::Done(order.token)));
        }
    }

    pub(super) fn pop_done(&mut self, token: u64) {
        let Some(entry) = self.pop.parked.remove(token) else {
            return;
        };
        for watched in entry.rung {
            self.pass_bell_on(watched);
        }
    }

    fn pass_bell_on(&mut self, watched: Watched) {
        if let Some(core) = self.home_of(watched.shard) {
            let next = PopMessage::Next(Box::new(watched));
            if core == self.core {
                self.pop.wakes.push_back(next);
            } else {
                self.send_to(core, MeshMessage::Pop(next));
            }
        }
    }

    /// There may be a message for a parked order.
    pub(super) fn pop_wake(&mut self, token: u64, watched: Watched) {
        let Some(entry) = self.pop.parked.entries.get_mut(&token) else {
            return self.pass_bell_on(watched);
        };
        if matches!(entry.place, Place::Travels) {
            if !entry.rung.contains(&watched) {
                entry.rung.push(watched);
            }
            return;
        }
        let Some(mut order) = self.pop.parked.depart(token) else {
            return;
        };
        if self.net.get(order.reply.link.connection).is_none() {
            // The client is gone: its place is free, and somebody else may have the message.
            self.pop.parked.remove(token);
            return self.pass_bell_on(watched);
        }
        order.left = vec![watched.shard];
        order.turn = order.turn.wrapping_add(1);
        self.go_on(order);
    }

    /// Answers parked orders whose time is up.
    pub(super) fn expire_pops(&mut self) {
        let now_us = self.now.monotonic_us;
        while let Some(Reverse((deadline_us, token))) = self.pop.parked.deadlines.peek().copied() {
            if deadline_us > now_us {
                return;
            }
            self.pop.parked.deadlines.pop();
            // One on its way is answered when it comes back.
            let Some(order) = self.pop.parked.depart(token) else {
                continue;
            };
            self.pop.parked.remove(token);
            self.answer_pop_empty(&order, response::POLLING_TIMEOUT);
        }
    }

    /// Watches a shard for a parked order.
    pub(super) fn watch(&mut self, order: &PopOrder, local: usize) {
        let now_us = self.now.monotonic_us;
        let key = (local, order.topic.clone());
        let watch = self.pop.watches.topics.entry(key).or_default();
        if !watch.groups.contains_key(&order.group) {
            watch.groups.insert(order.group.clone(), VecDeque::new());
        }
        if let Some(watchers) = watch.groups.get_mut(&order.group) {
            while watchers.front().is_some_and(|w| w.deadline_us <= now_us) {
                watchers.pop_front();
            }
            watchers.push_back(Watcher {
                core: order.coordinator,
                token: order.token,
                queue_id: order.queue_id,
                deadline_us: order.deadline_us,
            });
        }
        let armed = watch.armed;
        let shape = self.shape_of(local, &order.topic);
        if armed.is_none() || armed != shape {
            let hung = self.hang_bells(local, &order.topic);
            let key = (local, order.topic.clone());
            if let Some(watch) = self.pop.watches.topics.get_mut(&key) {
                watch.armed = shape.filter(|_| hung);
            }
        }
    }

    /// Orders of a group that watch a topic at a shard of this core.
    pub fn pops_waiting(&self, local: usize, topic: &str, group: &str) -> usize {
        let topic = normal_topic(topic, group);
        let watch = self.pop.watches.topics.get(&(local, topic.into()));
        let watchers = watch.and_then(|watch| watch.groups.get(group));
        let now_us = self.now.monotonic_us;
        let waits = |watcher: &&Watcher| watcher.deadline_us > now_us;
        watchers.map_or(0, |watchers| watchers.iter().filter(waits).count())
    }

    /// What tells that a topic has other queues than before.
    fn shape_of(&self, local: usize, topic: &str) -> Option<(usize, QueueIndex)> {
        let number = self.shards.get(local)?.shard.number();
        let homes = &self.directory.topics.get(topic)?.homes;
        let first = homes.iter().find(|home| home.shard == number);
        Some((
            homes.len(),
            first.map_or(QueueIndex::MAX, |home| home.index),
        ))
    }

    /// Hangs up a bell in every queue of a topic on a shard that has none. `false`: not in all.
    fn hang_bells(&mut self, local: usize, topic: &str) -> bool {
        let Some(number) = self.shards.get(local).map(|local| local.shard.number()) else {
            return false;
        };
        let Some(entry) = self.directory.topics.get(topic) else {
            return false;
        };
        let mut all = true;
        for (id, home) in entry.homes.iter().enumerate() {
            if home.shard != number {
                continue;
            }
            let watches = &mut self.pop.watches;
            let known = watches.bell_of.get(&(local, home.index)).copied();
            let bell = known.unwrap_or_else(|| {
                watches.bells.push(Bell {
                    local,
                    topic: topic.into(),
                    queue: home.index,
                    queue_id: id as i32,
                    hangs: None,
                });
                let bell = watches.bells.len() as u32 - 1;
                watches.bell_of.insert((local, home.index), bell);
                bell
            });
            let Some(place) = watches.bells.get_mut(bell as usize) else {
                continue;
            };
            if let Some(local) = self.shards.get_mut(local).filter(|_| place.hangs.is_none()) {
                place.hangs = local.shard.park(home.index, BELL_TOKEN | u64::from(bell));
                all &= place.hangs.is_some();
            }
        }
        all
    }

    /// A queue has a new message and its bell rang.
    pub fn on_pop_bell(&mut self, token: u64) {
        let number = (token & !BELL_TOKEN) as usize;
        let Some(bell) = self.pop.watches.bells.get_mut(number) else {
            return;
        };
        bell.hangs = None;
        let (local, queue, queue_id) = (bell.local, bell.queue, bell.queue_id);
        let topic = bell.topic.clone();
        let key = (local, topic.clone());
        let Some(watch) = self.pop.watches.topics.get(&key) else {
            return;
        };
        let groups: Vec<Box<str>> = watch.groups.keys().cloned().collect();
        for group in groups {
            self.wake_pops(local, &topic, &group, Some(queue_id));
        }
        let Some(watch) = self.pop.watches.topics.get_mut(&key) else {
            return;
        };
        watch.groups.retain(|_, watchers| !watchers.is_empty());
        if watch.groups.is_empty() {
            self.pop.watches.topics.remove(&key);
            return;
        }
        let entry = self.directory.topics.get(&*topic);
        let home = entry.and_then(|entry| entry.homes.get(queue_id as usize));
        let is_there = home.is_some_and(|home| home.index == queue);
        let bell = self.pop.watches.bells.get_mut(number);
        if let (Some(bell), Some(local), true) = (bell, self.shards.get_mut(local), is_there)
            && bell.hangs.is_none()
        {
            bell.hangs = local.shard.park(queue, token);
        } else if let Some(watch) = self.pop.watches.topics.get_mut(&key) {
            // The topic was made again: its new queues have no bells yet.
            watch.armed = None;
        }
    }

    /// Wakes one order of a group that waits for a topic (for a queue of it).
    pub(super) fn wake_pops(
        &mut self,
        local: usize,
        topic: &str,
        group: &str,
        queue_id: Option<i32>,
    ) {
        let Some(shard) = self.shards.get(local).map(|local| local.shard.number()) else {
            return;
        };
        let now_us = self.now.monotonic_us;
        let watch = self.pop.watches.topics.get_mut(&(local, topic.into()));
        let Some(watchers) = watch.and_then(|watch| watch.groups.get_mut(group)) else {
            return;
        };
        watchers.retain(|watcher| watcher.deadline_us > now_us);
        let fits = |watcher: &Watcher| {
            queue_id.is_none_or(|id| watcher.queue_id < 0 || watcher.queue_id == id)
        };
        let Some(watcher) = watchers
            .iter()
            .position(fits)
            .and_then(|at| watchers.remove(at))
        else {
            return;
        };
        let watched = Box::new(Watched {
            shard,
            topic: topic.into(),
            group: group.into(),
        });
        let wake = PopMessage::Wake(watcher.token, watched);
        if usize::from(watcher.core) == self.core {
            // Not at once: orders that wake each other would otherwise pile up on the stack.
            self.pop.wakes.push_back(wake);
        } else {
            self.send_to(usize::from(watcher.core), MeshMessage::Pop(wake));
        }
    }

    /// Handles POLLING_INFO: how many requests wait.
    pub fn on_polling_info(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        let asked = match PollingInfo::decode(&header.ext) {
            Ok(asked) => asked,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let Some(entry) = self.directory.topics.get(&*asked.topic) else {
            let remark = format!("topic[{}] not exist", asked.topic);
            return self.answer(reply, response::TOPIC_NOT_EXIST, Some(&remark));
        };
        // A parked order watches every shard of its topic, so that any of them can count.
        let home = entry.homes.get(asked.queue_id.max(0) as usize);
        let Some(home) = home.copied() else {
            let remark = format!("queueId {} of topic {}", asked.queue_id, asked.topic);
            return self.answer(reply, response::INVALID_PARAMETER, Some(&remark));
        };
        if self.sent_on(home.shard, origin, reply, whole, None) {
            return;
        }
        let Some(local) = self.local_shard(home.shard) else {
            return;
        };
        let now_us = self.now.monotonic_us;
        let key = (local, asked.topic.as_ref().into());
        let watch = self.pop.watches.topics.get(&key);
        let watchers = watch.and_then(|watch| watch.groups.get(&*asked.consumer_group));
        let waiting = watchers
            .into_iter()
            .flatten()
            .filter(|watcher| watcher.queue_id == asked.queue_id && watcher.deadline_us > now_us);
        let count = waiting.count() as i64;
        self.answer_number(reply, "pollingNum", count);
    }
}
