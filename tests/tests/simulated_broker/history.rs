//! What the clients of a simulation were told: the facts that every later answer must agree with.
//!
//! Invariant: a fact enters only when an answer carried it, and leaves only by a deletion that was
//! asked for or by a crash that the flush mode allows to take it.

use std::collections::{BTreeMap, BTreeSet};

use shard::io::sim::SimRandom;
use tests::record::Record;

/// What became of a message as far as its sender knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// Under way, or its answer was lost.
    Unknown,
    /// Acknowledged.
    Acked,
    /// Refused before it was stored.
    Refused,
    /// Its topic was deleted.
    Deleted,
}

/// One message that was sent.
#[derive(Clone, Debug)]
pub struct Message {
    pub topic: String,
    pub queue: Option<i32>,
    pub body: Vec<u8>,
    pub key: String,
    pub delayed: bool,
    pub fate: Fate,
    /// Whether a crash of the kind at hand must leave it.
    pub promised: bool,
}

/// What is known to stand at an offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    pub number: usize,
    /// Not known before somebody has read it, when it is one of a batch.
    pub physical: Option<i64>,
    pub durable: bool,
}

/// Offsets a group committed to one queue.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    pub acked: Option<i64>,
    pub durable: bool,
    pub maybe: Vec<i64>,
}

/// What is known of a topic that an administrator made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Topic {
    Exists(i32),
    Gone,
    Unknown,
}

pub type QueueKey = (String, i32);

/// Everything.
#[derive(Default)]
pub struct History {
    pub messages: Vec<Message>,
    pub queues: BTreeMap<QueueKey, BTreeMap<i64, Known>>,
    pub commits: BTreeMap<(String, QueueKey), Commit>,
    pub topics: BTreeMap<String, Topic>,
    /// Topics with a change under way that nobody waits for any more.
    pub in_doubt: BTreeSet<String>,
    /// Messages sent back by a group, acknowledged: group, number, promised.
    pub backs: Vec<(String, usize, bool)>,
    /// Whether acknowledged means synced.
    pub synced: bool,
    pub acked: u64,
    pub read: u64,
    pub refused: u64,
}

/// The body of a message: its number, then bytes that depend on it alone.
pub fn body_of(number: usize, len: usize) -> Vec<u8> {
    let mut body = format!("{number}:").into_bytes();
    let mut random = SimRandom::new(number as u64);
    while body.len() < len {
        body.push(random.next_u64() as u8);
    }
    body
}

/// The number of the message a body belongs to.
pub fn number_of(body: &[u8]) -> usize {
    let text: Vec<u8> = body
        .iter()
        .copied()
        .take_while(|byte| *byte != b':')
        .collect();
    let text = String::from_utf8(text).expect("a body begins with its number");
    text.parse().expect("a body begins with its number")
}

impl History {
    /// A message about to be sent.
    pub fn new_message(
        &mut self,
        topic: &str,
        queue: Option<i32>,
        len: usize,
        delayed: bool,
    ) -> usize {
        let number = self.messages.len();
        self.messages.push(Message {
            topic: topic.to_owned(),
            queue,
            body: body_of(number, len),
            key: format!("key{number}"),
            delayed,
            fate: Fate::Unknown,
            promised: false,
        });
        number
    }

    /// The lowest offset an acknowledgement of a message sent now may name.
    pub fn floor(&self, topic: &str, queue: i32) -> i64 {
        let queue = self.queues.get(&(topic.to_owned(), queue));
        queue
            .and_then(|known| known.last_key_value())
            .map_or(0, |(offset, _)| offset + 1)
    }

    /// A message was acknowledged at an offset.
    pub fn acked(&mut self, number: usize, queue: i32, offset: i64, physical: Option<i64>) {
        let synced = self.synced;
        let message = &mut self.messages[number];
        if message.fate == Fate::Deleted {
            return;
        }
        message.fate = Fate::Acked;
        message.promised = true;
        self.acked += 1;
        if message.delayed {
            return;
        }
        if let Some(asked) = message.queue {
            assert_eq!(queue, asked, "message {number} went to another queue");
        }
        let key = (message.topic.clone(), queue);
        let known = Known {
            number,
            physical,
            durable: synced,
        };
        self.note(key, offset, known);
    }

    /// A record was read.
    pub fn read(&mut self, topic: &str, record: &Record) {
        self.read += 1;
        let number = number_of(&record.body);
        let message = self.messages.get(number).expect("a message that was sent");
        assert!(
            message.body == record.body,
            "message {number} came back changed"
        );
        let retried = topic.starts_with('%');
        if !retried {
            assert_eq!(
                message.topic, topic,
                "message {number} stands in another topic"
            );
            if let Some(queue) = message.queue {
                assert_eq!(queue, record.queue_id, "message {number} in another queue");
            }
        }
        assert_ne!(
            message.fate,
            Fate::Refused,
            "message {number} was refused, yet it is stored"
        );
        assert_ne!(
            message.fate,
            Fate::Deleted,
            "message {number} outlived its topic"
        );
        let known = Known {
            number,
            physical: Some(record.physical_offset),
            durable: self.synced,
        };
        self.note(
            (topic.to_owned(), record.queue_id),
            record.queue_offset,
            known,
        );
    }

    fn note(&mut self, key: QueueKey, offset: i64, known: Known) {
        if self.topics.get(&key.0) == Some(&Topic::Unknown) {
            return;
        }
        let queue = self.queues.entry(key.clone()).or_default();
        match queue.get_mut(&offset) {
            None => {
                queue.insert(offset, known);
            }
            Some(before) => {
                let same_place = before.physical.is_none()
                    || known.physical.is_none()
                    || before.physical == known.physical;
                let delayed = |known: &Known| self.messages[known.number].delayed;
                assert!(
                    before.number == known.number && same_place,
                    "{key:?} offset {offset} held {before:?} (delayed: {}), now {known:?} \
                     (delayed: {})",
                    delayed(before),
                    delayed(&known)
                );
                before.physical = before.physical.or(known.physical);
                before.durable |= known.durable;
            }
        }
    }

    /// A deletion was asked for: nothing of the topic is promised any more.
    pub fn deleting(&mut self, topic: &str) {
        self.topics.insert(topic.to_owned(), Topic::Unknown);
        self.queues.retain(|(name, _), _| name != topic);
        self.commits.retain(|(_, (name, _)), _| name != topic);
        for message in self.messages.iter_mut().filter(|m| m.topic == topic) {
            message.promised = false;
        }
    }

    /// A topic is gone. A send that nobody waits for any more may still come and make it again.
    pub fn deleted(&mut self, topic: &str) {
        let mut state = Topic::Gone;
        for message in self.messages.iter_mut().filter(|m| m.topic == topic) {
            match message.fate {
                Fate::Acked => message.fate = Fate::Deleted,
                Fate::Unknown => state = Topic::Unknown,
                Fate::Refused | Fate::Deleted => {}
            }
        }
        self.set_topic(topic, state);
    }

    /// A topic was made.
    pub fn created(&mut self, topic: &str, queues: i32) {
        self.set_topic(topic, Topic::Exists(queues));
    }

    fn set_topic(&mut self, topic: &str, state: Topic) {
        let in_doubt = self.in_doubt.contains(topic);
        let state = if in_doubt { Topic::Unknown } else { state };
        self.topics.insert(topic.to_owned(), state);
    }

    /// A crash that may take what was not synced: everything else stops being promised.
    pub fn power_lost(&mut self) {
        if self.synced {
            return;
        }
        for queue in self.queues.values_mut() {
            queue.retain(|_, known| known.durable);
        }
        let left: BTreeSet<usize> = self
            .queues
            .values()
            .flat_map(|queue| queue.values().map(|known| known.number))
            .collect();
        for (number, message) in self.messages.iter_mut().enumerate() {
            message.promised = message.promised && left.contains(&number);
        }
        for commit in self.commits.values_mut() {
            if !commit.durable {
                *commit = Commit::default();
            }
        }
        self.backs.clear();
        // A removal is a record of the log like any other.
        for state in self.topics.values_mut() {
            if *state == Topic::Gone {
                *state = Topic::Unknown;
            }
        }
        for message in &mut self.messages {
            if message.fate == Fate::Deleted {
                message.fate = Fate::Unknown;
            }
        }
    }

    /// Recovery syncs everything it finds: what stands before the end it found cannot be taken back
    /// any more.
    pub fn rebase(&mut self, ends: &BTreeMap<u16, u64>) {
        let is_synced = |physical: i64| {
            let (shard, position) = shard::address::split(physical).expect("an offset");
            ends.get(&shard).is_some_and(|end| position < *end)
        };
        for known in self.queues.values_mut().flat_map(BTreeMap::values_mut) {
            if known.physical.is_some_and(is_synced) {
                known.durable = true;
                self.messages[known.number].promised = true;
            }
        }
    }
}
