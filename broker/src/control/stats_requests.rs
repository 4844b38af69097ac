//! Owns the requests about topics' offsets and the broker's statistics.
//!
//! Invariant: every queue of a topic is in the answer, also those nothing was ever written to.

use std::collections::HashMap;

use wire::body::{BrokerStatsData, BrokerStatsItem, MessageQueue, TopicOffset, TopicStatsTable};
use wire::requests::{TopicName, ViewStats};

use super::Control;
use super::answer::{Answer, Call, Outcome, Refusal, now};
use super::effects::{Effect, PlacedTopic};
use super::stats::Span;
use super::topics::queue_count;
use crate::core::report::{OffsetReport, QueueReport, Report, ReportQuery};

/// Queues of the reports by topic and queue id.
pub struct Queues<'a>(HashMap<(&'a str, i32), &'a QueueReport>);

impl<'a> Queues<'a> {
    /// Indexes the queues of all reports.
    pub fn of(reports: &'a [Report]) -> Self {
        let queues = reports.iter().flat_map(|report| &report.queues);
        Self(
            queues
                .map(|queue| ((queue.topic.as_str(), queue.queue_id), queue))
                .collect(),
        )
    }

    /// A queue, unless nothing was ever written to it.
    pub fn get(&self, topic: &str, queue_id: i32) -> Option<&'a QueueReport> {
        self.0.get(&(topic, queue_id)).copied()
    }

    /// One past the newest offset.
    pub fn max_offset(&self, topic: &str, queue_id: i32) -> i64 {
        self.get(topic, queue_id)
            .map_or(0, |queue| queue.max_offset.max(0))
    }
}

/// All offsets of the reports.
pub fn offsets(reports: &[Report]) -> impl Iterator<Item = &OffsetReport> {
    reports.iter().flat_map(|report| &report.offsets)
}

impl Control {
    /// A queue of this broker.
    pub(super) fn queue_of(&self, topic: &str, queue_id: i32) -> MessageQueue {
        MessageQueue {
            broker_name: self.broker_name().to_owned(),
            queue_id,
            topic: topic.to_owned(),
        }
    }

    pub(super) fn need_topic(&self, topic: &str) -> Result<&PlacedTopic, Refusal> {
        self.topics
            .get(topic)
            .map(|topic| &**topic)
            .ok_or_else(|| Refusal::no_topic(topic))
    }

    /// Code 202.
    pub(super) fn topic_stats(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = TopicName::decode(&call.header.ext)?;
        self.need_topic(&asked.topic)?;
        let query = ReportQuery {
            topics: Some(vec![asked.topic.into_owned()]),
            queues: true,
            store_times: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 202 with its reports.
    pub(super) fn finish_topic_stats(&self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        let asked = TopicName::decode(&call.header.ext)?;
        let topic = &*asked.topic;
        let config = &self.need_topic(topic)?.config;
        let queues = Queues::of(reports);
        let offset = |queue_id| {
            let found = queues.get(topic, queue_id);
            found.map_or_else(TopicOffset::default, |queue| TopicOffset {
                last_update_timestamp: queue.last_store_timestamp.max(0),
                max_offset: queue.max_offset.max(0),
                min_offset: queue.min_offset.max(0),
            })
        };
        let all = 0..queue_count(config);
        let table = TopicStatsTable {
            offset_table: all
                .map(|id| (self.queue_of(topic, id), offset(id)))
                .collect(),
            topic_put_tps: self.stats.topic_put_tps(topic),
        };
        now(Answer::json(&table)?)
    }

    /// Code 315.
    pub(super) fn view_stats(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        ViewStats::decode(&call.header.ext)?;
        let query = ReportQuery {
            store: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 315 with its reports.
    pub(super) fn finish_view_stats(&mut self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        let asked = ViewStats::decode(&call.header.ext)?;
        self.stats.record(call.now_ms, reports);
        let Some(spans) = self.stats.view(&asked.stats_name, &asked.stats_key) else {
            return Err(Refusal::error(format!(
                "The stats <{}> <{}> not exist",
                asked.stats_name, asked.stats_key
            )));
        };
        let item = |span: Span| BrokerStatsItem {
            avgpt: span.average,
            sum: i64::try_from(span.sum).unwrap_or(i64::MAX),
            tps: span.tps,
        };
        now(Answer::json(&BrokerStatsData {
            stats_day: item(spans.day),
            stats_hour: item(spans.hour),
            stats_minute: item(spans.minute),
        })?)
    }
}
