//! Owns the requests that move or copy the offsets of a group.
//!
//! Invariant: an offset set here lies inside its queue, and the answer names every offset set.

use std::collections::{BTreeMap, BTreeSet};

use wire::body::{ConsumerOffsetTable, ResetOffsetBody};
use wire::codes::request;
use wire::header::{ExtValue, LANGUAGE_CPP, encode_request};
use wire::requests::{CloneGroupOffset, ResetOffset};

use super::Control;
use super::answer::{Answer, Call, Outcome, Refusal, codes, now, to_json};
use super::effects::{Effect, OffsetSet};
use super::stats_requests::offsets;
use crate::core::report::{Report, ReportQuery};

/// Most resets by the client's own means that wait for their second step.
pub const HALF_RESETS_MAX: usize = 1_000;
/// Clients below this version do not know code 220 (V3_0_7_SNAPSHOT).
pub const RESET_VERSION_MIN: i32 = 28;

/// Asks the shards for the offsets of a reset.
fn search(
    call: &Call<'_>,
    asked: ResetOffset<'_>,
    queue_ids: Vec<i32>,
    effects: &mut Vec<Effect>,
) -> Outcome {
    effects.push(Effect::SearchOffsets {
        topic: asked.topic.into_owned(),
        queue_ids,
        timestamp: asked.timestamp,
        request: call.pending(),
    });
    Ok(None)
}

/// An offset found in a queue: queue id, offset, oldest and one past the newest offset.
pub type Found = (i32, i64, i64, i64);

impl Control {
    /// Code 222.
    pub(super) fn reset_offset(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = ResetOffset::decode(&call.header.ext)?;
        let config = &self.need_topic(&asked.topic)?.config;
        if !self.groups.has(&asked.group) {
            return Err(Refusal::no_group(&asked.group));
        }
        let all = 0..config.read_queue_nums;
        let queue_ids: Vec<i32> = match asked.queue_id.filter(|queue_id| *queue_id >= 0) {
            Some(queue_id) if all.contains(&queue_id) => vec![queue_id],
            Some(queue_id) => {
                return Err(Refusal::parameter(format!(
                    "queueId {queue_id} is not a queue of topic {}, which has {} to read",
                    asked.topic, config.read_queue_nums
                )));
            }
            None => all.collect(),
        };
        if self.reset_by_client && self.half_resets.len() < HALF_RESETS_MAX {
            let query = ReportQuery {
                topics: Some(vec![asked.topic.into_owned()]),
                group: Some(asked.group.into_owned()),
                offsets: true,
                ..ReportQuery::default()
            };
            return call.with_reports(query, effects);
        }
        search(call, asked, queue_ids, effects)
    }

    /// Code 222 with what the group has committed, which only the way over the clients needs.
    pub(super) fn reset_with_committed(
        &mut self,
        call: &Call<'_>,
        reports: &[Report],
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked = ResetOffset::decode(&call.header.ext)?;
        let config = &self.need_topic(&asked.topic)?.config;
        let queue_ids: Vec<i32> = (0..config.write_queue_nums).collect();
        let of_group = offsets(reports)
            .filter(|offset| offset.group == asked.group && offset.topic == asked.topic);
        let committed: BTreeMap<i32, i64> = of_group
            .map(|offset| (offset.queue_id, offset.offset))
            .collect();
        self.half_resets
            .insert((call.origin.link, call.header.opaque), committed);
        search(call, asked, queue_ids, effects)
    }

    /// Code 222 with the offsets found.
    pub(super) fn finish_reset(
        &mut self,
        call: &Call<'_>,
        found: &[Found],
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked = ResetOffset::decode(&call.header.ext)?;
        let committed = self
            .half_resets
            .remove(&(call.origin.link, call.header.opaque));
        if let Some(committed) = committed {
            return self.reset_by_clients(call, &asked, found, &committed, effects);
        }
        let has_one_queue = asked.queue_id.is_some_and(|queue_id| queue_id >= 0);
        let wanted = asked.offset.filter(|offset| has_one_queue && *offset != -1);
        let mut body = ResetOffsetBody::default();
        let mut sets = Vec::with_capacity(found.len());
        for &(queue_id, at_time, least, end) in found {
            let offset = match wanted {
                Some(offset) if !(least..=end + 1).contains(&offset) => {
                    return Err(Refusal::error(format!(
                        "offset {offset} lies outside queue {queue_id} of topic {}, which has \
                         {least} to {end}",
                        asked.topic
                    )));
                }
                Some(offset) => offset.min(end),
                None => at_time.clamp(least, end.max(least)),
            };
            sets.push(OffsetSet {
                group: asked.group.to_string(),
                topic: asked.topic.to_string(),
                queue_id,
                offset: Some(offset),
            });
            body.offset_table
                .0
                .insert(self.queue_of(&asked.topic, queue_id), offset);
        }
        if sets.is_empty() {
            return Err(Refusal::error(format!(
                "no queue of topic {} could be looked up, no offset was reset",
                asked.topic
            )));
        }
        tracing::info!(
            group = &*asked.group,
            topic = &*asked.topic,
            queues = sets.len(),
            "offset reset"
        );
        effects.push(Effect::ResetOffsets(sets));
        now(Answer::json(&body)?)
    }

    /// Tells every member the new offsets; the members take them up and commit them.
    fn reset_by_clients(
        &mut self,
        call: &Call<'_>,
        asked: &ResetOffset<'_>,
        found: &[Found],
        committed: &BTreeMap<i32, i64>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let is_force = asked.is_force.unwrap_or(true);
        let mut body = ResetOffsetBody::default();
        for &(queue_id, at_time, ..) in found {
            let at_time = at_time.max(0);
            let has = committed.get(&queue_id).copied();
            let offset = has
                .filter(|has| !is_force && at_time >= *has)
                .unwrap_or(at_time);
            body.offset_table
                .0
                .insert(self.queue_of(&asked.topic, queue_id), offset);
        }
        let Some(members) = self.clients.group(&asked.group) else {
            return Err(Refusal::new(
                codes::CONSUMER_NOT_ONLINE,
                format!(
                    "Consumer not online, so can not reset offset, Group: {}",
                    asked.group
                ),
            ));
        };
        if let Some(old) = members
            .clients()
            .find(|client| client.version < RESET_VERSION_MIN)
        {
            return Err(Refusal::error(format!(
                "client {} of version {} does not know how to reset offsets",
                old.client_id, old.version
            )));
        }
        let ext = [
            ("topic", ExtValue::Str(&asked.topic)),
            ("group", ExtValue::Str(&asked.group)),
            ("timestamp", ExtValue::Int(asked.timestamp)),
            ("isForce", ExtValue::Bool(is_force)),
        ];
        let pushed = if call.header.language == LANGUAGE_CPP {
            body.to_list_json()
                .map_err(|error| Refusal::error(error.to_string()))?
        } else {
            to_json(&body)?
        };
        for client in members.clients() {
            let opaque = self.relays.opaque();
            let mut frame = Vec::with_capacity(pushed.len() + 256);
            let code = request::RESET_CONSUMER_CLIENT_OFFSET;
            encode_request(
                &mut frame,
                client.serialization,
                code,
                opaque,
                true,
                &ext,
                &pushed,
            );
            effects.push(Effect::Push {
                to: client.link,
                frame,
            });
        }
        now(Answer::json(&body)?)
    }

    /// Code 314.
    pub(super) fn clone_offsets(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = CloneGroupOffset::decode(&call.header.ext)?;
        let topic = Some(asked.topic.trim().to_owned()).filter(|topic| !topic.is_empty());
        let query = ReportQuery {
            topics: topic.map(|topic| vec![topic]),
            group: Some(asked.src_group.into_owned()),
            offsets: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 314 with its reports.
    pub(super) fn finish_clone_offsets(
        &self,
        call: &Call<'_>,
        reports: &[Report],
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked = CloneGroupOffset::decode(&call.header.ext)?;
        let members = self
            .clients
            .group(&asked.src_group)
            .map(|members| members.subscriptions());
        let only_online = asked.offline == Some(false);
        let is_cloned = |topic: &str| {
            let is_named = asked.topic.trim().is_empty() || asked.topic == topic;
            let is_read = members.is_none_or(|members| members.subscriptions.contains_key(topic));
            is_named && self.topics.has(topic) && (is_read || !only_online)
        };
        let mut sets = Vec::new();
        let of_group = offsets(reports).filter(|offset| offset.group == asked.src_group);
        for offset in of_group.filter(|offset| is_cloned(&offset.topic)) {
            sets.push(OffsetSet {
                group: asked.dest_group.to_string(),
                topic: offset.topic.clone(),
                queue_id: offset.queue_id,
                offset: Some(offset.offset),
            });
        }
        if !sets.is_empty() {
            effects.push(Effect::SetOffsets(sets));
        }
        now(Answer::done())
    }

    /// Code 43.
    pub(super) fn all_offsets(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let query = ReportQuery {
            offsets: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 43 with its reports.
    pub(super) fn finish_all_offsets(&self, reports: &[Report]) -> Outcome {
        let mut table = ConsumerOffsetTable::default();
        for offset in offsets(reports) {
            let key = format!("{}@{}", offset.topic, offset.group);
            table
                .offset_table
                .entry(key)
                .or_default()
                .insert(offset.queue_id, offset.offset);
        }
        if table.offset_table.is_empty() {
            return Err(Refusal::error(
                "no consumer offsets are stored on this broker",
            ));
        }
        now(Answer::json(&table)?)
    }

    /// Code 308: the least offset of other groups at queues where the compared group is ahead.
    pub(super) fn correction_offset(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = wire::requests::CorrectionOffset::decode(&call.header.ext)?;
        let topics = Some(vec![asked.topic.into_owned()]);
        let query = ReportQuery {
            topics,
            offsets: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 308 with its reports.
    pub(super) fn finish_correction_offset(&self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        let asked = wire::requests::CorrectionOffset::decode(&call.header.ext)?;
        let filtered: BTreeSet<&str> = asked
            .filter_groups
            .as_deref()
            .unwrap_or_default()
            .split(',')
            .map(str::trim)
            .collect();
        let mut least: BTreeMap<i32, i64> = BTreeMap::new();
        let mut compared: BTreeMap<i32, i64> = BTreeMap::new();
        for offset in offsets(reports).filter(|offset| offset.topic == asked.topic) {
            if offset.group == asked.compare_group {
                compared.insert(offset.queue_id, offset.offset);
            } else if !filtered.contains(offset.group.as_str()) {
                let slot = least.entry(offset.queue_id).or_insert(offset.offset);
                *slot = (*slot).min(offset.offset);
            }
        }
        if !compared.is_empty() {
            least.retain(|queue_id, offset| {
                compared.get(queue_id).is_some_and(|has| *offset < *has)
            });
        }
        now(Answer::json(&wire::body::CorrectionOffsetBody {
            correction_offsets: least,
        })?)
    }
}
