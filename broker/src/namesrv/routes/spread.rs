//! Owns which topics came into being because somebody sent to them, and which broker group of their
//! cluster lacks them.
//!
//! A topic is offered to a group when another group of the cluster has it marked and writeable, and
//! none that tells marks has it without one: what an administrator created or changed anywhere is
//! left alone.
//!
//! Invariant: a mark stands only beside a queue entry of the same topic and group, so that marks
//! are bounded as those are.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::{Arc, BrokerRegistration, MASTER_ID, PERM_READ, PERM_WRITE, RouteTable, TableKind};
use crate::namesrv::offer::{OFFER_BYTES_MAX, OFFER_TOPICS_MAX, Offer};

/// How far one group has been told what it lacks.
#[derive(Clone, Debug, Default)]
struct Pass {
    /// The last topic told; nothing while no pass is under way.
    after: Option<String>,
    /// The generation the last pass began with; nothing before the first.
    generation: Option<u64>,
}

/// Marks of all topics.
#[derive(Debug, Default)]
pub(super) struct Spread {
    /// When a send created the topic, by topic and group.
    marks: BTreeMap<String, BTreeMap<Arc<str>, i64>>,
    /// Groups that tell marks.
    passes: BTreeMap<Arc<str>, Pass>,
    /// Goes up with every new mark.
    generation: u64,
}

impl Spread {
    fn set(&mut self, topic: &str, name: &Arc<str>, created_ms: Option<i64>) {
        match created_ms {
            Some(created_ms) => {
                let marks = match self.marks.get_mut(topic) {
                    Some(marks) => marks,
                    None => self.marks.entry(topic.to_owned()).or_default(),
                };
                if marks.insert(Arc::clone(name), created_ms) != Some(created_ms) {
                    self.generation += 1;
                }
            }
            None => self.forget(topic, name),
        }
    }

    /// A group has no mark of a topic any more.
    pub(super) fn forget(&mut self, topic: &str, broker_name: &str) {
        if let Some(marks) = self.marks.get_mut(topic) {
            marks.remove(broker_name);
            if marks.is_empty() {
                self.marks.remove(topic);
            }
        }
    }

    /// A group is gone.
    pub(super) fn forget_group(&mut self, broker_name: &str) {
        self.passes.remove(broker_name);
        self.marks.retain(|_, marks| {
            marks.remove(broker_name);
            !marks.is_empty()
        });
    }
}

impl RouteTable {
    /// Takes what a registration says of marks; call it after its topics were taken.
    pub(super) fn take_marks(&mut self, name: &Arc<str>, registration: &BrokerRegistration) {
        if registration.broker_id != MASTER_ID || registration.table == TableKind::Unsaid {
            return;
        }
        for topic in &registration.topics {
            let has_topic = self
                .topics
                .get(&topic.name)
                .is_some_and(|entry| entry.get(name).is_some());
            let created_ms = topic.created_ms.filter(|_| has_topic);
            self.spread.set(&topic.name, name, created_ms);
        }
        for topic in &registration.gone {
            self.spread.forget(topic, name);
        }
        let pass = self.spread.passes.entry(Arc::clone(name)).or_default();
        if registration.table == TableKind::Whole && pass.after.is_none() {
            // What was told before may not have been created, so everything is looked at again.
            pass.generation = None;
        }
    }

    /// Marked topics of the cluster that a group lacks: the next ones of a pass over all, as many
    /// as fit into one answer. Nothing is looked at while there is nothing new, nor, unless it
    /// `begins` one, when no pass is under way.
    pub fn offers_for(
        &mut self,
        cluster_name: &str,
        broker_name: &str,
        begins: bool,
    ) -> Vec<Offer> {
        let generation = self.spread.generation;
        let Some(pass) = self.spread.passes.get(broker_name) else {
            return Vec::new();
        };
        if pass.after.is_none() && (!begins || pass.generation == Some(generation)) {
            return Vec::new();
        }
        let begun = match &pass.after {
            Some(_) => pass.generation,
            None => Some(generation),
        };
        let from = pass.after.as_deref().unwrap_or_default();
        let (mut offers, mut bytes, mut after) = (Vec::new(), 0, None);
        let rest = (Bound::Excluded(from), Bound::Unbounded);
        for (topic, marks) in self.spread.marks.range::<str, _>(rest) {
            let Some(offer) = self.offer(topic, marks, cluster_name, broker_name) else {
                continue;
            };
            bytes += topic.len() + 64;
            offers.push(offer);
            if offers.len() >= OFFER_TOPICS_MAX || bytes >= OFFER_BYTES_MAX {
                after = Some(topic.clone());
                break;
            }
        }
        if let Some(pass) = self.spread.passes.get_mut(broker_name) {
            pass.generation = begun;
            pass.after = after;
        }
        offers
    }

    fn offer(
        &self,
        topic: &str,
        marks: &BTreeMap<Arc<str>, i64>,
        cluster_name: &str,
        broker_name: &str,
    ) -> Option<Offer> {
        let entry = self.topics.get(topic)?;
        if entry.get(broker_name).is_some() {
            return None;
        }
        let mut newest: Option<Offer> = None;
        for (name, queues) in &entry.queues {
            let group = self.groups.get(name);
            if group.is_none_or(|group| group.cluster_name != cluster_name) {
                continue;
            }
            let Some(created_ms) = marks.get(name).copied() else {
                if self.spread.passes.contains_key(name) {
                    return None;
                }
                continue;
            };
            let usable = PERM_READ | PERM_WRITE;
            let is_newer = newest
                .as_ref()
                .is_none_or(|offer| offer.created_ms < created_ms);
            if queues.perm & usable == usable && is_newer {
                newest = Some(Offer {
                    topic: topic.to_owned(),
                    read_queue_nums: queues.read_queue_nums,
                    write_queue_nums: queues.write_queue_nums,
                    topic_sys_flag: queues.topic_sys_flag,
                    created_ms,
                });
            }
        }
        newest
    }
}
