//! Owns the choice of a shard for every new queue.
//!
//! Invariant: a queue keeps its shard as long as its topic exists, also while the topic has fewer
//! queues than before; the load counts every placed queue exactly once.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::origins::Origins;

/// The content of `placement.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SavedPlacement {
    /// How many shards the store had when this was written.
    pub shards: u16,
    /// Shard of each queue, by topic; index = queue id.
    pub topics: BTreeMap<String, Vec<u16>>,
    /// What is remembered of topics besides their settings.
    pub origins: Origins,
}

/// Queues per shard.
#[derive(Debug)]
pub struct Load {
    queues: Vec<u32>,
}

impl Load {
    /// No queues on `shards` shards (at least one).
    pub fn new(shards: u16) -> Self {
        Self {
            queues: vec![0; usize::from(shards.max(1))],
        }
    }

    /// Whether a shard exists.
    pub fn has(&self, shard: u16) -> bool {
        usize::from(shard) < self.queues.len()
    }

    /// Counts a queue that has its place already.
    pub fn add(&mut self, shard: u16) {
        if let Some(count) = self.queues.get_mut(usize::from(shard)) {
            *count += 1;
        }
    }

    /// Forgets a queue.
    pub fn remove(&mut self, shard: u16) {
        if let Some(count) = self.queues.get_mut(usize::from(shard)) {
            *count = count.saturating_sub(1);
        }
    }

    /// Places a queue on the shard with the fewest queues, the lowest such number.
    pub fn place(&mut self) -> u16 {
        let least = self
            .queues
            .iter()
            .enumerate()
            .min_by_key(|(_, count)| **count);
        let shard = least
            .and_then(|(shard, _)| u16::try_from(shard).ok())
            .unwrap_or(0);
        self.add(shard);
        shard
    }

    /// Queues in all.
    pub fn total(&self) -> u64 {
        self.queues.iter().map(|count| u64::from(*count)).sum()
    }

    /// Queues of each shard.
    pub fn by_shard(&self) -> &[u32] {
        &self.queues
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_go_where_the_fewest_are() {
        let mut load = Load::new(3);
        load.add(0);
        load.add(0);
        load.add(2);
        let placed: Vec<u16> = (0..6).map(|_| load.place()).collect();
        assert_eq!(placed, [1, 1, 2, 0, 1, 2]);
        assert_eq!(load.by_shard(), [3, 3, 3]);
        load.remove(1);
        assert_eq!(load.place(), 1);
    }

    #[test]
    fn every_shard_is_within_one_queue_of_the_others() {
        let mut load = Load::new(7);
        for _ in 0..1000 {
            load.place();
        }
        let (least, most) = (load.by_shard().iter().min(), load.by_shard().iter().max());
        assert!(most.unwrap() - least.unwrap() <= 1);
        assert_eq!(load.total(), 1000);
    }
}
