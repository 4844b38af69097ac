//! Owns the requests about how far groups are: lag, time spans, who reads what.
//!
//! Invariant: a lag is never negative. An offset beyond the end of its queue (a commit that crossed
//! a deletion) counts as the end.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use wire::body::{
    ConsumeStats, ConsumeStatsList, ConsumeTimeSpanBody, GroupList, OffsetWrapper, QueueTimeSpan,
    TopicList,
};
use wire::requests::{BrokerConsumeStats, ConsumeStatsOf, GroupAndTopic, GroupName, TopicName};

use super::Control;
use super::answer::{Answer, Call, Outcome, need, now};
use super::effects::Effect;
use super::stats_requests::{Queues, offsets};
use crate::core::report::{OffsetReport, Report, ReportQuery};

/// Offsets of all groups by group, topic and queue id.
type Offsets<'a> = HashMap<(&'a str, &'a str, i32), &'a OffsetReport>;

fn index(reports: &[Report]) -> Offsets<'_> {
    let keyed = |o: &'_ OffsetReport| o.queue_id;
    offsets(reports)
        .map(|o| ((o.group.as_str(), o.topic.as_str(), keyed(o)), o))
        .collect()
}

fn topics_of<'a>(reports: &'a [Report], group: &str) -> BTreeSet<&'a str> {
    let of_group = offsets(reports).filter(|offset| offset.group == group);
    of_group.map(|offset| offset.topic.as_str()).collect()
}

/// Topics a request for statistics names: one, several joined by `;`, or none for all.
fn named_topics(asked: &ConsumeStatsOf<'_>) -> Option<Vec<String>> {
    let one = asked
        .topic
        .as_deref()
        .map(str::trim)
        .filter(|topic| !topic.is_empty());
    let list = asked
        .topic_list
        .as_deref()
        .unwrap_or_default()
        .split(';')
        .map(str::trim);
    let list = list.filter(|topic| !topic.is_empty());
    let topics: Vec<String> = one.into_iter().chain(list).map(str::to_owned).collect();
    if topics.is_empty() {
        None
    } else {
        Some(topics)
    }
}

impl Control {
    /// Code 208.
    pub(super) fn consume_stats(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = ConsumeStatsOf::decode(&call.header.ext)?;
        let topics = named_topics(&asked);
        let query = ReportQuery {
            topics,
            group: Some(asked.consumer_group.into_owned()),
            queues: true,
            offsets: true,
            store: false,
            store_times: true,
        };
        call.with_reports(query, effects)
    }

    /// Code 208 with its reports.
    pub(super) fn finish_consume_stats(&self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        let asked = ConsumeStatsOf::decode(&call.header.ext)?;
        let group = &*asked.consumer_group;
        let named = named_topics(&asked);
        let topics: BTreeSet<&str> = match &named {
            Some(topics) => topics.iter().map(String::as_str).collect(),
            None => topics_of(reports, group),
        };
        let (queues, committed) = (Queues::of(reports), index(reports));
        let mut all = ConsumeStats::default();
        for topic in topics {
            let stats = self.stats_of(group, topic, &queues, &committed);
            all.consume_tps += stats.consume_tps;
            all.offset_table.0.extend(stats.offset_table.0);
        }
        now(Answer::json(&all)?)
    }

    /// How far one group is in one topic. Empty for a topic the members do not subscribe to.
    fn stats_of(
        &self,
        group: &str,
        topic: &str,
        queues: &Queues<'_>,
        committed: &Offsets<'_>,
    ) -> ConsumeStats {
        let mut stats = ConsumeStats::default();
        let Some(placed) = self.topics.get(topic) else {
            return stats;
        };
        let members = self
            .clients
            .group(group)
            .map(|members| members.subscriptions());
        let is_retry = super::names::is_retry_topic(topic);
        let is_foreign = members.is_some_and(|members| {
            !is_retry
                && !members.subscriptions.is_empty()
                && !members.subscriptions.contains_key(topic)
        });
        if is_foreign {
            return stats;
        }
        for queue_id in 0..placed.config.read_queue_nums {
            let broker_offset = queues.max_offset(topic, queue_id);
            let offset = committed.get(&(group, topic, queue_id));
            let consumer_offset = offset
                .map_or(0, |offset| offset.consumed())
                .clamp(0, broker_offset);
            // Messages in flight are the difference of the two, for pull and pop alike.
            let pulled = offset.map_or(0, |offset| match offset.held_from {
                Some(_) => offset.handed_out(),
                None => offset.pull_offset,
            });
            let wrapper = OffsetWrapper {
                broker_offset,
                consumer_offset,
                last_timestamp: offset.map_or(0, |offset| offset.last_timestamp.max(0)),
                pull_offset: pulled.clamp(consumer_offset, broker_offset),
            };
            stats
                .offset_table
                .0
                .insert(self.queue_of(topic, queue_id), wrapper);
        }
        stats.consume_tps = self.stats.group_get_tps(topic, group);
        stats
    }

    /// Code 317.
    pub(super) fn broker_consume_stats(
        &self,
        call: &Call<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        BrokerConsumeStats::decode(&call.header.ext)?;
        let query = ReportQuery {
            queues: true,
            offsets: true,
            store_times: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 317 with its reports.
    pub(super) fn finish_broker_consume_stats(
        &self,
        call: &Call<'_>,
        reports: &[Report],
    ) -> Outcome {
        let asked = BrokerConsumeStats::decode(&call.header.ext)?;
        let (queues, committed) = (Queues::of(reports), index(reports));
        let mut topics: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for offset in offsets(reports) {
            topics
                .entry(&offset.group)
                .or_default()
                .insert(&offset.topic);
        }
        let mut list = ConsumeStatsList {
            broker_addr: Some(self.broker_address.to_string()),
            ..ConsumeStatsList::default()
        };
        for (group, _) in self.groups.iter() {
            let mut of_group = Vec::new();
            for topic in topics.get(&**group).into_iter().flatten() {
                let is_order = self
                    .topics
                    .get(topic)
                    .is_some_and(|placed| placed.config.order);
                if asked.is_order && !is_order {
                    continue;
                }
                let stats = self.stats_of(group, topic, &queues, &committed);
                for wrapper in stats.offset_table.0.values() {
                    list.total_diff += wrapper.broker_offset - wrapper.consumer_offset;
                    list.total_inflight_diff += wrapper.pull_offset - wrapper.consumer_offset;
                }
                of_group.push(stats);
            }
            list.consume_stats_list
                .push(BTreeMap::from([(group.to_string(), of_group)]));
        }
        now(Answer::json(&list)?)
    }

    /// Code 303.
    pub(super) fn consume_time_span(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = GroupAndTopic::decode(&call.header.ext)?;
        let topic = need("topic", asked.topic.as_deref())?.to_owned();
        self.need_topic(&topic)?;
        let query = ReportQuery {
            topics: Some(vec![topic]),
            group: Some(asked.group.into_owned()),
            queues: true,
            offsets: true,
            store: false,
            store_times: true,
        };
        call.with_reports(query, effects)
    }

    /// Code 303 with its reports.
    pub(super) fn finish_consume_time_span(&self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        let asked = GroupAndTopic::decode(&call.header.ext)?;
        let topic = need("topic", asked.topic.as_deref())?;
        let config = &self.need_topic(topic)?.config;
        let (queues, committed) = (Queues::of(reports), index(reports));
        let mut body = ConsumeTimeSpanBody::default();
        for queue_id in 0..config.write_queue_nums {
            let queue = queues.get(topic, queue_id);
            let offset = committed.get(&(&*asked.group, topic, queue_id));
            let first = queue.map_or(-1, |queue| queue.first_store_timestamp);
            let consumed = offset.filter(|offset| offset.offset > 0);
            let consume_time_stamp = consumed.map_or(first, |offset| offset.last_timestamp);
            let end = queues.max_offset(topic, queue_id);
            let is_behind = offset.map_or(0, |offset| offset.offset) < end;
            let delay = if is_behind && consume_time_stamp > 0 {
                (call.now_ms - consume_time_stamp).max(0)
            } else {
                0
            };
            body.consume_time_span_set.push(QueueTimeSpan {
                consume_time_stamp,
                delay_time: delay,
                max_time_stamp: queue.map_or(-1, |queue| queue.last_store_timestamp),
                message_queue: self.queue_of(topic, queue_id),
                min_time_stamp: first,
            });
        }
        now(Answer::json(&body)?)
    }

    /// Code 300.
    pub(super) fn who_consumes(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = TopicName::decode(&call.header.ext)?;
        let topics = Some(vec![asked.topic.into_owned()]);
        let query = ReportQuery {
            topics,
            offsets: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 300 with its reports: groups online and groups with offsets.
    pub(super) fn finish_who_consumes(&self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        let asked = TopicName::decode(&call.header.ext)?;
        let mut groups = self.clients.groups_reading(&asked.topic);
        let stored = offsets(reports).filter(|offset| offset.topic == asked.topic);
        groups.extend(stored.map(|offset| offset.group.clone()));
        now(Answer::json(&GroupList {
            group_list: groups.into_iter().collect(),
        })?)
    }

    /// Code 343.
    pub(super) fn topics_of_group(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = GroupName::decode(&call.header.ext)?;
        let group = Some(asked.group.into_owned());
        let query = ReportQuery {
            group,
            offsets: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 343 with its reports.
    pub(super) fn finish_topics_of_group(&self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        let asked = GroupName::decode(&call.header.ext)?;
        let mut topics = topics_of(reports, &asked.group);
        if let Some(members) = self.clients.group(&asked.group) {
            topics.extend(
                members
                    .subscriptions()
                    .subscriptions
                    .keys()
                    .map(String::as_str),
            );
        }
        now(Answer::json(&TopicList {
            broker_addr: Some(self.broker_address.to_string()),
            topic_list: topics.into_iter().map(str::to_owned).collect(),
        })?)
    }
}
