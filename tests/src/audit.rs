//! Owns the ledger of the crash suites: which message stands at which place of which queue, by what
//! was acknowledged and by what was read.
//!
//! Invariant: a place once taken, by an acknowledgement or by a read, keeps its message for ever;
//! the ledger fails the test at the first contradiction.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::client::{Client, physical_offset, sent};
use crate::payload;
use crate::process::BrokerProcess;

/// Requests one producer keeps in flight.
const IN_FLIGHT: usize = 16;

/// One acknowledgement, or one record that a reader saw.
#[derive(Clone, Copy, Debug)]
pub struct Sighting {
    /// The number in the body.
    pub number: u64,
    /// The queue.
    pub queue_id: i32,
    /// The place in the queue.
    pub queue_offset: i64,
    /// The place in the log.
    pub physical_offset: i64,
}

/// What is known of a topic.
#[derive(Debug, Default)]
pub struct Ledger {
    places: BTreeMap<(i32, i64), Sighting>,
    numbers: HashMap<u64, (i32, i64)>,
    audited: BTreeMap<i32, i64>,
    /// How many acknowledgements were taken in.
    pub acknowledged: u64,
    /// How many records only a reader saw before the kill.
    pub read_only: u64,
}

impl Ledger {
    /// Takes in an acknowledgement or a record.
    pub fn note(&mut self, seen: Sighting) {
        let place = (seen.queue_id, seen.queue_offset);
        if let Some(known) = self.places.insert(place, seen) {
            assert_eq!(known.number, seen.number, "place {place:?} was used twice");
            assert_eq!(
                known.physical_offset, seen.physical_offset,
                "place {place:?} moved"
            );
        }
        if let Some(known) = self.numbers.insert(seen.number, place) {
            assert_eq!(known, place, "message {} stands at two places", seen.number);
        }
    }

    /// Reads what is new since the last audit, or everything, and compares.
    pub fn audit(&mut self, client: &mut Client, topic: &str, queues: i32, everything: bool) {
        for queue_id in 0..queues {
            let known = self.audited.get(&queue_id).copied().unwrap_or(0);
            let from = if everything { 0 } else { known };
            let records = client
                .read_queue(topic, queue_id, from)
                .expect("reading the queue");
            let end = from + records.len() as i64;
            for record in &records {
                let number = payload::number(&record.body);
                let number = number.unwrap_or_else(|| {
                    panic!(
                        "queue {queue_id} offset {}: a body nobody sent",
                        record.queue_offset
                    )
                });
                assert_eq!((record.topic.as_str(), record.queue_id), (topic, queue_id));
                self.note(Sighting {
                    number,
                    queue_id,
                    queue_offset: record.queue_offset,
                    physical_offset: record.physical_offset,
                });
            }
            let beyond = self.places.range((queue_id, end)..(queue_id + 1, 0)).next();
            if let Some((place, lost)) = beyond {
                panic!(
                    "message {} at {place:?} is lost; the queue ends at {end}",
                    lost.number
                );
            }
            assert!(end >= known, "queue {queue_id} fell from {known} to {end}");
            self.audited.insert(queue_id, end);
        }
    }

    /// Looks a few places up by their physical offset alone.
    pub fn spot_check(&self, client: &mut Client, topic: &str, random: &mut payload::Random) {
        for _ in 0..20.min(self.places.len()) {
            let at = random.below(self.places.len() as u64) as usize;
            let Some(seen) = self.places.values().nth(at) else {
                return;
            };
            let record = client
                .view(topic, seen.physical_offset)
                .expect("view by physical offset");
            assert_eq!(payload::number(&record.body), Some(seen.number), "{seen:?}");
        }
    }

    /// Runs a load for a while, kills the broker under it and takes in what was acknowledged and
    /// what was read. Returns how many acknowledgements there were.
    pub fn load_and_kill(
        &mut self,
        broker: &mut BrokerProcess,
        load: &Load,
        pause: Duration,
    ) -> usize {
        let (acknowledged, read) = load.run(
            || broker.client(),
            || {
                thread::sleep(pause);
                broker.signal("KILL");
            },
        );
        broker.kill();
        let count = acknowledged.len();
        self.acknowledged += count as u64;
        self.read_only += read.len() as u64;
        let seen = acknowledged.into_iter().chain(read);
        seen.for_each(|seen| self.note(seen));
        count
    }

    /// How many places are known.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nothing is known yet.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

/// A load of producers and one reader on a topic, until told to stop or cut off by a kill.
#[derive(Debug)]
pub struct Load {
    /// The topic.
    pub topic: String,
    /// Its number of queues.
    pub queues: i32,
    /// Largest body.
    pub body_bytes_max: u64,
    /// How many producers.
    pub producers: u64,
    /// The next message number.
    pub numbers: AtomicU64,
    /// Tells producers and reader to end.
    pub stop: AtomicBool,
}

impl Load {
    /// A load of four producers with bodies up to 4 KiB on four queues.
    pub fn new(topic: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            queues: 4,
            body_bytes_max: 4096,
            producers: 4,
            numbers: AtomicU64::new(1),
            stop: AtomicBool::new(false),
        }
    }

    /// Runs the load while `until` runs; returns what was acknowledged and what was read.
    pub fn run(
        &self,
        connect: impl Fn() -> Client + Sync,
        until: impl FnOnce(),
    ) -> (Vec<Sighting>, Vec<Sighting>) {
        self.stop.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            let produce = |seed| {
                let client = connect();
                move || self.produce(client, seed)
            };
            let producers: Vec<_> = (0..self.producers)
                .map(|seed| scope.spawn(produce(seed)))
                .collect();
            let client = connect();
            let reader = scope.spawn(move || self.read(client));
            until();
            self.stop.store(true, Ordering::Relaxed);
            let acknowledged = producers
                .into_iter()
                .map(|thread| thread.join().expect("producer"));
            (
                acknowledged.flatten().collect(),
                reader.join().expect("reader"),
            )
        })
    }

    fn produce(&self, mut client: Client, seed: u64) -> Vec<Sighting> {
        let mut acknowledged = Vec::new();
        let mut random = payload::Random::new(seed * 7919 + self.numbers.load(Ordering::Relaxed));
        let mut waiting = std::collections::VecDeque::new();
        loop {
            let full = waiting.len() >= IN_FLIGHT || self.stop.load(Ordering::Relaxed);
            if full {
                let Some((opaque, number)) = waiting.pop_front() else {
                    return acknowledged;
                };
                let Ok(answer) = client.finish(opaque) else {
                    return acknowledged;
                };
                // A definite refusal is an answer as well; only acknowledgements count.
                let Ok(sent) = sent(answer) else { continue };
                acknowledged.push(Sighting {
                    number,
                    queue_id: sent.queue_id,
                    queue_offset: sent.queue_offset,
                    physical_offset: physical_offset(sent.message_id()),
                });
                continue;
            }
            let number = self.numbers.fetch_add(1, Ordering::Relaxed);
            let body = payload::body(number, 16 + random.below(self.body_bytes_max - 16) as usize);
            let queue = random.below(self.queues as u64) as i32;
            match client.start_send(&self.topic, queue, &body, &[]) {
                Ok(opaque) => waiting.push_back((opaque, number)),
                Err(_) => self.stop.store(true, Ordering::Relaxed),
            }
        }
    }

    fn read(&self, mut client: Client) -> Vec<Sighting> {
        let mut seen = Vec::new();
        let mut next = vec![None; self.queues as usize];
        while !self.stop.load(Ordering::Relaxed) {
            for (queue_id, next) in next.iter_mut().enumerate() {
                let queue_id = queue_id as i32;
                let from = match *next {
                    Some(offset) => offset,
                    None => match client.max_offset(&self.topic, queue_id) {
                        Ok(offset) => offset,
                        Err(_) => return seen,
                    },
                };
                let Ok(pulled) = client.pull(&self.topic, queue_id, from, 32) else {
                    return seen;
                };
                *next = Some(from + pulled.records.len() as i64);
                seen.extend(pulled.records.iter().map(|record| Sighting {
                    number: payload::number(&record.body).expect("a body somebody sent"),
                    queue_id,
                    queue_offset: record.queue_offset,
                    physical_offset: record.physical_offset,
                }));
            }
            thread::sleep(Duration::from_millis(1));
        }
        seen
    }
}
