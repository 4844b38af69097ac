//! Comparing what a shard shows with the model.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use shard::TIMER_TOPIC;
use wire::message::{RecordView, properties};

use super::model::{Commits, Op, Stored, What};
use super::world::World;

/// Whether something takes back the timed message with this unique key.
fn deletes(op: &Op, unique: &str) -> bool {
    let What::Message { raw, .. } = &op.what else {
        return false;
    };
    let view = RecordView::parse(raw).unwrap();
    properties::get_str(view.properties(), properties::TIMER_DEL_UNIQKEY)
        .is_some_and(|key| key.ends_with(&format!("+{unique}")))
}

impl World {
    /// Compares everything readable with the model.
    pub fn check(&mut self) {
        self.settle();
        let seed = self.setup.seed;
        let queues = self.model.queues();
        let dropped_before = self.model.dropped_before;
        let names: Vec<(String, i32)> = self
            .shard()
            .queues()
            .iter()
            .filter(|(_, queue)| queue.next_offset > 0)
            .map(|(_, queue)| (queue.topic.to_string(), queue.queue_id))
            .collect();
        for name in &names {
            assert!(
                queues.contains_key(name),
                "seed {seed}: {name:?} is nobody's queue"
            );
        }
        for ((topic, queue_id), wanted) in &queues {
            let what = format!("seed {seed}: {topic} {queue_id}");
            let index = self.shard().queues().find(topic, *queue_id);
            let index = index.unwrap_or_else(|| {
                let first = wanted
                    .iter()
                    .map(|message| message.position)
                    .collect::<Vec<_>>();
                panic!(
                    "{what} is gone, messages at {first:?}, dropped before {dropped_before}, {:?}",
                    self.report
                )
            });
            let Some((min, found)) = self.read(topic, *queue_id) else {
                return;
            };
            let readable = self.shard().queues().get(index).unwrap().readable;
            let kept = wanted
                .iter()
                .find(|message| message.position >= dropped_before);
            let first = kept.map_or(wanted.len() as i64, |message| message.offset);
            assert!(
                min as i64 <= first,
                "{what}: begins at {min}, {first} must be there"
            );
            let wanted: &[Stored] = &wanted[min as usize..];
            let at = wanted
                .iter()
                .map(|message| message.position)
                .collect::<Vec<_>>();
            assert!(
                readable >= min + wanted.len() as u64,
                "{what}: {readable} readable, messages at {at:?}, {:?}",
                self.report
            );
            assert!(
                found.len() >= wanted.len(),
                "{what}: {} of {}",
                found.len(),
                wanted.len()
            );
            for (message, raw) in wanted.iter().zip(&found) {
                assert_eq!(&message.raw, raw, "{what} at {}", message.offset);
            }
        }
        self.check_commits();
        self.check_once();
    }

    /// Every timed message whose topic was not removed since, and that was not taken back, has come
    /// once.
    pub fn check_delivered(&mut self) {
        let seed = self.setup.seed;
        assert_eq!(self.shard().delayed_pending(), Vec::new(), "seed {seed}");
        let origins = self.check_once();
        let ops = self.model.ops.clone();
        for (at, op) in ops.iter().enumerate() {
            let What::Message { topic, raw, .. } = &op.what else {
                continue;
            };
            if topic != TIMER_TOPIC {
                continue;
            }
            let view = RecordView::parse(raw).unwrap();
            let stored = view.properties();
            let real = properties::get_str(stored, properties::REAL_TOPIC).unwrap();
            let removed = ops[at..]
                .iter()
                .any(|later| matches!(&later.what, What::Remove { topic } if topic == real));
            let is_deletion = properties::get(stored, properties::TIMER_DEL_UNIQKEY).is_some();
            let unique = properties::get_str(stored, properties::UNIQ_KEY);
            let taken_back = unique.is_some_and(|unique| ops.iter().any(|op| deletes(op, unique)));
            assert!(
                removed || is_deletion || taken_back || origins.contains(&view.physical_offset()),
                "seed {seed}: delayed at {} never came",
                op.end
            );
        }
    }

    /// No timed message has been delivered, or copied forward, twice. Returns the physical offsets
    /// of those that were.
    pub fn check_once(&self) -> BTreeSet<i64> {
        let mut origins = BTreeSet::new();
        for op in &self.model.ops {
            let What::Message { topic, raw, .. } = &op.what else {
                continue;
            };
            let view = RecordView::parse(raw).unwrap();
            let origin = view.prepared_transaction_offset();
            let named = shard::address::split(origin & i64::MAX).filter(|_| origin < 0);
            // Copies of popped messages have a mark that is no offset of this shard.
            if named.is_some_and(|(shard, _)| shard == 3) {
                let origin = origin & i64::MAX;
                let fresh = origins.insert(origin);
                let seed = self.setup.seed;
                assert!(fresh, "seed {seed}: {origin} of {topic} came twice");
            }
        }
        origins
    }

    fn check_commits(&mut self) {
        let seed = self.setup.seed;
        let commits: Commits = self.model.commits();
        let (saved, dropped_before) = (self.saved.0.clone(), self.model.dropped_before);
        for ((topic, group, queue_id), (offset, end)) in &commits {
            let found = self
                .shard()
                .offsets()
                .get(topic, group, *queue_id)
                .map(|entry| entry.offset);
            let in_file = saved.iter().find(|saved| {
                saved.topic == *topic && saved.group == *group && saved.queue_id == *queue_id
            });
            let queue = self.shard().queues().find(topic, *queue_id);
            let queue = queue.and_then(|index| self.shard().queues().get(index));
            let most = queue.map_or(i64::MAX, |queue| queue.next_offset as i64);
            let in_file = in_file.map(|saved| saved.offset.min(most));
            let old = *end <= dropped_before && found == in_file;
            assert!(
                found == Some(*offset) || old,
                "seed {seed}: {group} on {topic} {queue_id}: {found:?}, committed {offset} at \
                 {end}, \
                 dropped before {dropped_before}, in the file {in_file:?} of {}, {:?}",
                self.saved.1,
                self.report
            );
        }
        for (topic, group, entry) in self.shard().offsets().iter() {
            let key = (topic.to_owned(), group.to_owned(), entry.queue_id);
            let known =
                commits.contains_key(&key) || saved.iter().any(|saved| saved.group == group);
            assert!(
                known || entry.offset < 0,
                "seed {seed}: {key:?} was never committed"
            );
        }
    }

    /// Everything that can be seen of the shard, for comparing two starts.
    pub fn picture(&mut self) -> String {
        let mut names: Vec<(String, i32)> = self
            .shard()
            .queues()
            .iter()
            .map(|(_, q)| (q.topic.to_string(), q.queue_id))
            .collect();
        names.sort();
        let mut text = format!("end {}\n", self.report.end);
        for (topic, queue_id) in names {
            let (_, records) = self.read(&topic, queue_id).unwrap();
            let shard = self.shard();
            let index = shard.queues().find(&topic, queue_id).unwrap();
            let (min, readable) = shard.bounds(index).unwrap();
            let crc = crc32fast::hash(&records.concat());
            writeln!(text, "{topic} {queue_id}: {min}..{readable} {crc:08x}").unwrap();
        }
        let mut offsets: Vec<String> = self
            .shard()
            .offsets()
            .iter()
            .map(|(topic, group, e)| format!("{topic} {group} {} {}\n", e.queue_id, e.offset))
            .collect();
        offsets.sort();
        text + &offsets.concat()
    }
}
