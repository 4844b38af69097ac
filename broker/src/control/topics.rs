//! Owns the table of topics with the place of each of their queues.
//!
//! Invariant: every queue of every topic has exactly one shard, which never changes while the topic
//! exists, and the numbers of topics and queues stay within their bounds.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use wire::body::{DataVersion, TopicConfig, TopicConfigTable};

use super::ControlError;
use super::answer::{Refusal, to_json};
use super::effects::PlacedTopic;
use super::origins::Origins;
use super::placement::{Load, SavedPlacement};

/// Most topics of a broker.
pub const TOPICS_MAX: usize = 200_000;
/// Most queues of one topic.
pub const QUEUES_PER_TOPIC_MAX: i32 = 65_535;
/// Most queues of a broker.
pub const QUEUES_MAX: u64 = 2_000_000;
/// File of the topics.
pub const TOPICS_FILE: &str = "topics.json";
/// File of the places of queues.
pub const PLACEMENT_FILE: &str = "placement.json";

/// A topic with its parts of the files, so that saving one change does not write all topics anew.
#[derive(Debug)]
struct Entry {
    placed: Arc<PlacedTopic>,
    config_text: Vec<u8>,
    places_text: Vec<u8>,
}

/// All topics.
#[derive(Debug)]
pub struct TopicTable {
    topics: BTreeMap<Arc<str>, Entry>,
    version: DataVersion,
    load: Load,
    shards: u16,
    /// How topics came and went; saved with the places.
    pub origins: Origins,
}

/// The larger queue count of a topic.
pub fn queue_count(config: &TopicConfig) -> i32 {
    config.read_queue_nums.max(config.write_queue_nums)
}

/// Checks counts and permission of a topic.
pub fn check_counts(config: &TopicConfig) -> Result<(), Refusal> {
    for (field, count) in [
        ("readQueueNums", config.read_queue_nums),
        ("writeQueueNums", config.write_queue_nums),
    ] {
        if !(0..=QUEUES_PER_TOPIC_MAX).contains(&count) {
            return Err(Refusal::parameter(format!(
                "{field} of topic {} is {count}, must be 0 to {QUEUES_PER_TOPIC_MAX}",
                config.topic_name
            )));
        }
    }
    if queue_count(config) == 0 {
        return Err(Refusal::parameter(format!(
            "topic {} would have no queue: readQueueNums and writeQueueNums are both 0",
            config.topic_name
        )));
    }
    if !(0..=7).contains(&config.perm) {
        return Err(Refusal::parameter(format!(
            "perm of topic {} is {}, must be a sum of 4 (read), 2 (write) and 1 (inherit)",
            config.topic_name, config.perm
        )));
    }
    Ok(())
}

impl TopicTable {
    /// Reads the saved tables.
    pub fn load(
        shards: u16,
        topics: Option<&[u8]>,
        placement: Option<&[u8]>,
    ) -> Result<Self, ControlError> {
        let saved: TopicConfigTable = read(TOPICS_FILE, topics)?.unwrap_or_default();
        let mut placement: SavedPlacement = read(PLACEMENT_FILE, placement)?.unwrap_or_default();
        let mut table = Self {
            topics: BTreeMap::new(),
            version: saved.data_version,
            load: Load::new(shards),
            shards,
            origins: std::mem::take(&mut placement.origins),
        };
        let mut unplaced = Vec::new();
        for (name, mut config) in saved.topic_config_table {
            config.topic_name.clone_from(&name);
            if let Err(refusal) = check_counts(&config) {
                return Err(ControlError::Content {
                    file: TOPICS_FILE,
                    what: refusal.remark,
                });
            }
            let places = placement.topics.remove(&name).unwrap_or_default();
            for shard in &places {
                if !table.load.has(*shard) {
                    return Err(ControlError::ShardMissing {
                        topic: name,
                        shard: *shard,
                        shards,
                    });
                }
                table.load.add(*shard);
            }
            if (places.len() as i64) < i64::from(queue_count(&config)) {
                unplaced.push(config.clone());
            }
            table.put(PlacedTopic {
                config,
                shards: places,
            });
        }
        for config in unplaced {
            table.insert(config);
        }
        let topics = &table.topics;
        table.origins.keep(|topic| topics.contains_key(topic));
        Ok(table)
    }

    /// A topic.
    pub fn get(&self, topic: &str) -> Option<&Arc<PlacedTopic>> {
        self.topics.get(topic).map(|entry| &entry.placed)
    }

    /// Whether a topic exists.
    pub fn has(&self, topic: &str) -> bool {
        self.topics.contains_key(topic)
    }

    /// All topics in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<PlacedTopic>> {
        self.topics.values().map(|entry| &entry.placed)
    }

    /// Topics whose names come after one, in order.
    pub fn after(&self, name: &str) -> impl Iterator<Item = &Arc<PlacedTopic>> {
        let rest = (std::ops::Bound::Excluded(name), std::ops::Bound::Unbounded);
        let rest = self.topics.range::<str, _>(rest);
        rest.map(|(_, entry)| &entry.placed)
    }

    /// Number of topics.
    pub fn count(&self) -> usize {
        self.topics.len()
    }

    /// Version of the table.
    pub fn version(&self) -> &DataVersion {
        &self.version
    }

    /// Queues of each shard.
    pub fn load_by_shard(&self) -> &[u32] {
        self.load.by_shard()
    }

    /// Checks whether a topic of this shape fits the bounds.
    pub fn check_room(&self, config: &TopicConfig) -> Result<(), Refusal> {
        check_counts(config)?;
        let placed = self
            .get(&config.topic_name)
            .map_or(0, |topic| topic.shards.len() as u64);
        if !self.has(&config.topic_name) && self.topics.len() >= TOPICS_MAX {
            return Err(Refusal::error(format!(
                "topic {} not created: the broker has {TOPICS_MAX} topics, its limit; delete some",
                config.topic_name
            )));
        }
        let more = (queue_count(config) as u64).saturating_sub(placed);
        if self.load.total() + more > QUEUES_MAX {
            return Err(Refusal::error(format!(
                "topic {} not changed: the broker has {} queues, {more} more would pass its limit \
                 of {QUEUES_MAX}; delete topics or use fewer queues",
                config.topic_name,
                self.load.total()
            )));
        }
        Ok(())
    }

    /// Creates or changes a topic; new queues get their places. The version does not move.
    pub fn insert(&mut self, config: TopicConfig) -> Arc<PlacedTopic> {
        let mut shards = match self.get(&config.topic_name) {
            Some(topic) => topic.shards.clone(),
            None => Vec::new(),
        };
        while (shards.len() as i64) < i64::from(queue_count(&config)) {
            shards.push(self.load.place());
        }
        self.put(PlacedTopic { config, shards })
    }

    /// Creates a topic of one queue, which is on a shard.
    pub fn insert_on(&mut self, config: TopicConfig, shard: u16) -> Arc<PlacedTopic> {
        if !self.load.has(shard) || self.has(&config.topic_name) || queue_count(&config) != 1 {
            return self.insert(config);
        }
        self.load.add(shard);
        let shards = vec![shard];
        self.put(PlacedTopic { config, shards })
    }

    /// Gives a topic a queue on a shard, behind those it has. `None`: it has one there already.
    pub fn add_queue_on(&mut self, topic: &str, shard: u16) -> Option<Arc<PlacedTopic>> {
        let known = self.get(topic).filter(|_| self.load.has(shard))?;
        if known.shards.contains(&shard) {
            return None;
        }
        let mut changed = PlacedTopic::clone(known);
        let config = &mut changed.config;
        // Places of queues that a topic had once stay theirs.
        let count = i32::try_from(changed.shards.len()).ok()? + 1;
        (config.read_queue_nums, config.write_queue_nums) = (count, count);
        changed.shards.push(shard);
        self.load.add(shard);
        Some(self.put(changed))
    }

    fn put(&mut self, placed: PlacedTopic) -> Arc<PlacedTopic> {
        let name: Arc<str> = Arc::from(placed.config.topic_name.as_str());
        let entry = Entry {
            config_text: member(&name, &placed.config),
            places_text: member(&name, &placed.shards),
            placed: Arc::new(placed),
        };
        let placed = Arc::clone(&entry.placed);
        self.topics.insert(name, entry);
        placed
    }

    /// Removes a topic and frees its places.
    pub fn remove(&mut self, topic: &str) -> Option<Arc<str>> {
        let (name, entry) = self.topics.remove_entry(topic)?;
        for shard in &entry.placed.shards {
            self.load.remove(*shard);
        }
        self.origins.forget_created(topic);
        Some(name)
    }

    /// Puts a queue where the log has it. Queues in front of it that have no place get one.
    /// Returns whether anything changed.
    pub fn set_place(&mut self, topic: &str, queue_id: i32, shard: u16) -> bool {
        let Ok(queue) = usize::try_from(queue_id) else {
            return false;
        };
        let is_legal = queue_id < QUEUES_PER_TOPIC_MAX && self.load.has(shard);
        let Some(placed) = self.get(topic).filter(|_| is_legal) else {
            return false;
        };
        if placed.shards.get(queue) == Some(&shard) {
            return false;
        }
        let mut changed = PlacedTopic::clone(placed);
        while changed.shards.len() <= queue {
            changed.shards.push(self.load.place());
        }
        if let Some(place) = changed.shards.get_mut(queue) {
            self.load.remove(*place);
            self.load.add(shard);
            *place = shard;
        }
        let count = queue_id + 1;
        changed.config.read_queue_nums = changed.config.read_queue_nums.max(count);
        self.put(changed);
        true
    }

    /// Moves the version on.
    pub fn bump(&mut self, now_ms: i64) {
        self.version = self.version.next(now_ms);
    }

    /// Sets the version, for changes that are not in the table itself.
    pub fn set_version(&mut self, version: DataVersion) {
        self.version = version;
    }

    /// Content of [`TOPICS_FILE`].
    pub fn topics_text(&self) -> Result<Vec<u8>, Refusal> {
        self.page(0, usize::MAX)
    }

    /// The same JSON with `count` topics from number `first` on.
    pub fn page(&self, first: usize, count: usize) -> Result<Vec<u8>, Refusal> {
        let mut out = b"{\"dataVersion\":".to_vec();
        out.extend_from_slice(&to_json(&self.version)?);
        out.extend_from_slice(b",\"topicConfigTable\":{");
        let page = self.topics.values().skip(first).take(count);
        push_members(&mut out, page.map(|entry| entry.config_text.as_slice()));
        out.extend_from_slice(b"}}");
        Ok(out)
    }

    /// Content of [`PLACEMENT_FILE`].
    pub fn placement_text(&self) -> Vec<u8> {
        let mut out = format!("{{\"shards\":{},\"topics\":{{", self.shards).into_bytes();
        push_members(
            &mut out,
            self.topics
                .values()
                .map(|entry| entry.places_text.as_slice()),
        );
        out.extend_from_slice(b"},");
        out.extend_from_slice(&member("origins", &self.origins));
        out.push(b'}');
        out
    }
}

/// A member of a JSON object. What is written here are plain structs and lists, which cannot fail.
pub fn member<T: Serialize>(name: &str, value: &T) -> Vec<u8> {
    let mut out = serde_json::to_vec(name).unwrap_or_default();
    out.push(b':');
    match to_json(value) {
        Ok(text) => out.extend_from_slice(&text),
        Err(_) => out.extend_from_slice(b"null"),
    }
    out
}

/// Appends members with commas between them.
pub fn push_members<'a>(out: &mut Vec<u8>, members: impl Iterator<Item = &'a [u8]>) {
    for (index, member) in members.enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(member);
    }
}

/// Reads a saved table.
pub fn read<T: serde::de::DeserializeOwned>(
    file: &'static str,
    bytes: Option<&[u8]>,
) -> Result<Option<T>, ControlError> {
    let Some(bytes) = bytes.filter(|bytes| !bytes.trim_ascii().is_empty()) else {
        return Ok(None);
    };
    match wire::body::from_json(bytes) {
        Ok(value) => Ok(Some(value)),
        Err(error) => Err(ControlError::Content {
            file,
            what: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(shards: u16) -> TopicTable {
        TopicTable::load(shards, None, None).unwrap()
    }

    #[test]
    fn a_topic_spreads_over_shards_and_keeps_places_when_it_shrinks_and_grows() {
        let mut table = table(3);
        let first = table.insert(TopicConfig::new("T", 6, 6)).shards.clone();
        assert_eq!(first, [0, 1, 2, 0, 1, 2]);
        table.insert(TopicConfig::new("U", 1, 6));
        assert_eq!(table.insert(TopicConfig::new("T", 2, 6)).shards, first);
        assert_eq!(
            table.insert(TopicConfig::new("T", 8, 6)).shards,
            [0, 1, 2, 0, 1, 2, 1, 2]
        );
    }

    #[test]
    fn saved_tables_come_back_the_same() {
        let mut one = table(4);
        one.insert(TopicConfig::new("T", 5, 6));
        one.insert(TopicConfig::new("%RETRY%g", 1, 6));
        one.bump(77);
        let (topics, placement) = (one.topics_text().unwrap(), one.placement_text());
        let two = TopicTable::load(4, Some(&topics), Some(&placement)).unwrap();
        assert!(two.iter().eq(one.iter()));
        assert_eq!(two.version().counter, 1);
        assert_eq!(two.load_by_shard(), one.load_by_shard());
    }

    #[test]
    fn topics_of_an_apache_broker_are_read_and_placed() {
        let text = br#"{"dataVersion":{"counter":7,"stateVersion":0,"timestamp":1},
            "topicConfigTable":{"T":{"order":false,"perm":6,"readQueueNums":3,
            "topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":2}}}"#;
        let table = TopicTable::load(2, Some(text), None).unwrap();
        assert_eq!(table.get("T").unwrap().shards, [0, 1, 0]);
        assert_eq!(table.version().counter, 7);
    }

    #[test]
    fn a_place_on_a_shard_that_is_gone_is_refused_at_load() {
        let mut one = table(4);
        one.insert(TopicConfig::new("T", 4, 6));
        let (topics, placement) = (one.topics_text().unwrap(), one.placement_text());
        let error = TopicTable::load(2, Some(&topics), Some(&placement)).unwrap_err();
        assert!(error.to_string().contains("shard 2"), "{error}");
    }

    #[test]
    fn bounds_are_refused_with_field_and_limit() {
        let table = table(1);
        for (config, word) in [
            (TopicConfig::new("T", 65_536, 6), "65535"),
            (TopicConfig::new("T", -1, 6), "readQueueNums"),
            (TopicConfig::new("T", 0, 6), "no queue"),
            (TopicConfig::new("T", 1, 8), "perm"),
        ] {
            let refusal = table.check_room(&config).unwrap_err();
            assert!(refusal.remark.contains(word), "{}", refusal.remark);
            assert_eq!(refusal.code, 29);
        }
    }

    #[test]
    fn a_shard_that_asks_gets_one_queue_of_a_topic_behind_the_others() {
        let mut table = table(3);
        let first = table.insert_on(TopicConfig::new("%RETRY%g_T", 1, 6), 2);
        assert_eq!(first.shards, [2]);
        assert!(table.add_queue_on("%RETRY%g_T", 2).is_none(), "it has one");
        let more = table.add_queue_on("%RETRY%g_T", 0).unwrap();
        assert_eq!(more.shards, [2, 0]);
        let counts = (more.config.read_queue_nums, more.config.write_queue_nums);
        assert_eq!(counts, (2, 2));
        assert!(
            table.add_queue_on("%RETRY%g_T", 9).is_none(),
            "no such shard"
        );
        assert!(table.add_queue_on("unknown", 0).is_none());
        assert_eq!(table.load_by_shard(), [1, 0, 1]);
    }

    #[test]
    fn the_log_decides_where_a_queue_is() {
        let mut table = table(3);
        table.insert(TopicConfig::new("T", 2, 6));
        assert!(table.set_place("T", 0, 2));
        assert!(!table.set_place("T", 0, 2));
        assert!(table.set_place("T", 3, 0));
        let topic = table.get("T").unwrap();
        assert_eq!(topic.shards[0], 2);
        assert_eq!((topic.shards.len(), topic.shards[3]), (4, 0));
        assert_eq!(topic.config.read_queue_nums, 4);
        assert_eq!(table.load_by_shard().iter().sum::<u32>(), 4);
        assert!(!table.set_place("T", 0, 9), "no such shard");
    }
}
