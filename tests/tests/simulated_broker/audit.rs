//! What must hold after a start: everything promised is there, once, unchanged, without a hole, and
//! the broker works.

use std::collections::{BTreeMap, BTreeSet};

use shard::io::sim::Crash;
use tests::client::{answer, code, pulled, sent};
use tests::frame::Frame;
use tests::record::{Record, decode_all};

use super::client::{DOOMED, QUEUES, TOPICS, create_topic, query_by_key};
use super::history::{Fate, Topic, number_of};
use super::world::World;

fn queue_fields(topic: &str, queue: i32) -> Vec<(&'static str, String)> {
    vec![
        ("consumerGroup", "auditor".to_owned()),
        ("topic", topic.to_owned()),
        ("queueId", queue.to_string()),
    ]
}

impl World {
    /// Starts again after a crash and checks every promise.
    pub fn start_and_check(&mut self, kind: Crash) {
        if self.random.one_in(4) {
            self.recover_twice();
        }
        self.start()
            .unwrap_or_else(|error| panic!("no start after {kind:?}: {error}"));
        self.audit();
        if self.random.one_in(6) {
            // P8: without anything derived the same is found.
            self.crash(Crash::Kill);
            self.remove_runs();
            self.start().expect("a start without run files");
            self.audit();
        }
    }

    /// Reads everything and compares it with what was told.
    pub fn audit(&mut self) {
        let topics = self.audit_topics();
        let mut ends = BTreeMap::new();
        let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
        let names = TOPICS.iter().copied().chain([DOOMED]);
        for topic in names.filter(|topic| topics.contains_key(*topic)) {
            for queue in 0..topics[topic] {
                let records = self.read_queue(topic, queue);
                ends.insert((topic.to_owned(), queue), records.len() as i64);
                for record in records {
                    *seen.entry(number_of(&record.body)).or_default() += 1;
                }
            }
        }
        self.audit_queues(&ends, &seen);
        self.audit_commits(&ends);
        self.audit_keys();
        self.history.rebase(&self.ends);
        self.progress();
    }

    /// Topics whose creation or deletion was answered are as answered. Returns all with queues.
    fn audit_topics(&mut self) -> BTreeMap<String, i32> {
        let answer = self.call(Frame::request(21, &[], b""));
        assert_eq!(answer.code, 0, "{:?}", answer.remark);
        let body: serde_json::Value = serde_json::from_slice(&answer.body).expect("a table");
        let table = body["topicConfigTable"].as_object().expect("a table");
        let found: BTreeMap<String, i32> = table
            .iter()
            .map(|(name, config)| {
                let queues = config["readQueueNums"].as_i64().expect("a number");
                (name.clone(), queues as i32)
            })
            .collect();
        for (name, state) in &self.history.topics {
            match state {
                Topic::Exists(queues) => {
                    assert_eq!(
                        found.get(name),
                        Some(queues),
                        "topic {name} was acknowledged with {queues} queues"
                    );
                }
                Topic::Gone => assert!(
                    !found.contains_key(name),
                    "topic {name} was deleted and is back"
                ),
                Topic::Unknown => {}
            }
        }
        found
    }

    /// All records of a queue; offsets follow one another from 0.
    fn read_queue(&mut self, topic: &str, queue: i32) -> Vec<Record> {
        let mut records: Vec<Record> = Vec::new();
        loop {
            let mut fields = queue_fields(topic, queue);
            fields.extend([
                ("queueOffset", records.len().to_string()),
                ("maxMsgNums", "32".to_owned()),
                ("sysFlag", "4".to_owned()),
                ("commitOffset", "0".to_owned()),
                ("suspendTimeoutMillis", "0".to_owned()),
                ("subscription", "*".to_owned()),
                ("subVersion", "0".to_owned()),
                ("expressionType", "TAG".to_owned()),
            ]);
            let answer = self.call(Frame::request(code::PULL_MESSAGE, &fields, b""));
            let answer = pulled(answer).expect("an answer to a pull");
            assert_eq!(answer.min_offset, 0, "{topic}/{queue}: nothing was dropped");
            if answer.records.is_empty() {
                assert!(
                    answer.max_offset <= records.len() as i64,
                    "{topic}/{queue}: nothing at {}, yet {answer:?}",
                    records.len()
                );
                return records;
            }
            for record in answer.records {
                let place = (record.queue_offset, record.queue_id);
                assert_eq!(
                    place,
                    (records.len() as i64, queue),
                    "{topic}: dense offsets"
                );
                self.history.read(topic, &record);
                records.push(record);
            }
        }
    }

    fn audit_queues(&mut self, ends: &BTreeMap<(String, i32), i64>, seen: &BTreeMap<usize, usize>) {
        for (key, known) in &self.history.queues {
            let Some((last, what)) = known.last_key_value() else {
                continue;
            };
            if key.0.starts_with('%') || self.history.topics.get(&key.0) == Some(&Topic::Unknown) {
                continue;
            }
            let end = ends.get(key).copied().unwrap_or(0);
            assert!(
                *last < end,
                "{key:?} ends at {end}: lost what stood at {last} ({what:?})"
            );
        }
        for (number, message) in self.history.messages.iter().enumerate() {
            let times = seen.get(&number).copied().unwrap_or(0);
            if message.fate == Fate::Acked && message.promised && !message.delayed {
                assert_eq!(times, 1, "message {number} was acknowledged: {message:?}");
            }
            assert!(
                times <= 1 || message.delayed,
                "message {number} stands {times} times: {message:?}"
            );
        }
    }

    fn audit_commits(&mut self, ends: &BTreeMap<(String, i32), i64>) {
        let commits: Vec<_> = self.history.commits.clone().into_iter().collect();
        for ((group, key), commit) in commits {
            let mut fields = queue_fields(&key.0, key.1);
            fields[0].1.clone_from(&group);
            fields.push(("setZeroIfNotFound", "false".to_owned()));
            let frame = self.call(Frame::request(code::QUERY_CONSUMER_OFFSET, &fields, b""));
            let end = ends.get(&key).copied().unwrap_or(0);
            let found = (frame.code == 0).then(|| frame.number("offset").unwrap());
            if let Some(offset) = found {
                assert!(offset <= end, "{group} {key:?}: {offset} is beyond {end}");
            }
            if let Some(acked) = commit.acked {
                let offset = found.unwrap_or(-1);
                assert!(
                    offset == acked || (offset > acked && commit.maybe.contains(&offset)),
                    "{group} {key:?}: committed {acked}, now {offset}"
                );
            }
            let entry = self.history.commits.entry((group, key)).or_default();
            entry.acked = found.filter(|offset| *offset > 0).or(commit.acked);
            entry.durable = true;
            entry.maybe.clear();
        }
    }

    /// Some promised messages are found by their key, and nothing else is.
    fn audit_keys(&mut self) {
        let promised: Vec<usize> = self
            .history
            .messages
            .iter()
            .enumerate()
            .filter(|(_, m)| m.promised && m.fate == Fate::Acked && !m.delayed)
            .map(|(number, _)| number)
            .collect();
        if promised.is_empty() {
            return;
        }
        for _ in 0..3 {
            let number = promised[self.random.below(promised.len() as u64) as usize];
            let message = self.history.messages[number].clone();
            let answer = self.call(query_by_key(&message.topic, &message.key));
            assert_eq!(
                answer.code, 0,
                "message {number} is not found by its key: {:?}",
                answer.remark
            );
            let records = decode_all(&answer.body).expect("records");
            assert_eq!(records.len(), 1, "one message has the key {}", message.key);
            assert!(records[0].body == message.body);
        }
    }

    /// After faults stop every queue takes messages again, and hands them out.
    pub fn progress(&mut self) {
        for topic in TOPICS {
            let created = self.call(create_topic(topic, QUEUES));
            assert_eq!(created.code, 0, "{:?}", created.remark);
            self.history
                .topics
                .insert(topic.to_owned(), Topic::Exists(QUEUES));
            let number = self.history.new_message(topic, Some(0), 40, false);
            let body = self.history.messages[number].body.clone();
            let key = self.history.messages[number].key.clone();
            let fields = [
                ("producerGroup", "auditor".to_owned()),
                ("topic", topic.to_owned()),
                ("defaultTopic", "TBW102".to_owned()),
                ("defaultTopicQueueNums", "2".to_owned()),
                ("queueId", "0".to_owned()),
                ("sysFlag", "0".to_owned()),
                ("bornTimestamp", "1700000000000".to_owned()),
                ("flag", "0".to_owned()),
                (
                    "properties",
                    format!("KEYS\u{1}{key}\u{2}UNIQ_KEY\u{1}A{number:030}\u{2}"),
                ),
                ("reconsumeTimes", "0".to_owned()),
                ("unitMode", "false".to_owned()),
                ("batch", "false".to_owned()),
            ];
            let frame = self.call(Frame::request(code::SEND_MESSAGE, &fields, &body));
            let done = sent(frame).expect("a send after the faults have stopped");
            let physical = tests::client::physical_offset(done.message_id());
            self.history
                .acked(number, 0, done.queue_offset, Some(physical));
        }
        let max = self.call(Frame::request(
            code::GET_MAX_OFFSET,
            &queue_fields("T0", 0),
            b"",
        ));
        assert_eq!(max.code, answer::SUCCESS);
        let floor = self.history.floor("T0", 0);
        assert!(
            max.number("offset").unwrap() >= floor,
            "what is acknowledged is readable"
        );
    }

    /// Delayed messages and send-backs that were acknowledged arrive in the end.
    pub fn audit_late(&mut self) {
        let mut missing = self.late_missing();
        for _ in 0..400 {
            if missing.is_empty() {
                return;
            }
            self.machine.advance_us(5_000);
            for _ in 0..10 * self.cores.len() {
                self.step();
            }
            missing = self.late_missing();
        }
        panic!("acknowledged and never delivered: {missing:?}");
    }

    fn late_missing(&mut self) -> Vec<String> {
        let mut wanted: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
        for (number, message) in self.history.messages.iter().enumerate() {
            if message.delayed && message.promised && message.fate == Fate::Acked {
                wanted
                    .entry(message.topic.clone())
                    .or_default()
                    .insert(number);
            }
        }
        for (group, number, promised) in &self.history.backs {
            if *promised {
                wanted
                    .entry(format!("%RETRY%{group}"))
                    .or_default()
                    .insert(*number);
            }
        }
        let mut missing = Vec::new();
        for (topic, numbers) in wanted {
            let queues = if topic.starts_with('%') { 1 } else { QUEUES };
            let mut found = BTreeSet::new();
            for queue in 0..queues {
                let records = self.read_queue(&topic, queue);
                found.extend(records.iter().map(|record| number_of(&record.body)));
            }
            missing.extend(numbers.difference(&found).map(|n| format!("{topic}: {n}")));
        }
        missing
    }
}
