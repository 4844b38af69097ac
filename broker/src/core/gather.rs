//! Questions to shards: those that need the disk, and those that one core asks all others.
//!
//! Invariant: every question is answered once, also when the disk fails; what was to happen with
//! the answer is kept here meanwhile.

use std::collections::HashMap;

use shard::Shard;
use shard::cold::{Answer, Question};
use wire::codes::response;
use wire::header::{Reply, encode_reply};

use super::back::BackOrder;
use super::messages::{Ask, MeshMessage, ReplyTo, Told};
use super::report::{OffsetReport, QueueReport, Report, ReportQuery, StoreReport};
use super::state::State;
use super::transactions::CommitOrder;
use crate::control::names::{HALF_TOPIC, TRANSACTION_GROUP};

/// Mark of the tokens of questions (pulls have none of the two top bits).
pub const ASK_TOKEN: u64 = 1 << 62;

/// What happens with an answer.
#[derive(Debug)]
pub enum Then {
    /// Answer a client with the offset.
    AnswerOffset(ReplyTo),
    /// Answer a client with the record.
    AnswerView(ReplyTo),
    /// Answer an administrator with units.
    AnswerUnits(Box<super::queue_units::UnitsAnswer>),
    /// Tell a gathering core the offset of a queue.
    TellOffset {
        /// Core.
        core: usize,
        /// Gathering.
        gather: u64,
        /// Queue id.
        queue_id: i32,
        /// Oldest offset.
        min: i64,
        /// End offset.
        max: i64,
    },
    /// Tell a gathering core the record.
    TellRecord {
        /// Core.
        core: usize,
        /// Gathering.
        gather: u64,
    },
    /// Tell a gathering core the records with a key.
    TellKey {
        /// Core.
        core: usize,
        /// Gathering.
        gather: u64,
    },
    /// Send the record back for retry.
    Back(Box<BackOrder>),
    /// Hand the messages out.
    Pop(Box<super::pop::ColdPop>),
    /// Move on a message that was not acknowledged.
    Revive(super::pop::Revival),
    /// Commit the record, a half message.
    Commit(Box<CommitOrder>),
}

/// A question waiting for the disk.
#[derive(Debug)]
pub struct ColdAsk {
    /// What happens with the answer.
    pub then: Then,
    /// Local shard.
    pub local: usize,
}

/// All questions waiting for the disk.
#[derive(Default)]
pub struct ColdAsks {
    asks: HashMap<u64, ColdAsk>,
    next: u64,
}

impl State {
    /// Asks a shard something that may need the disk.
    pub fn ask_cold(&mut self, local: usize, question: Question, ask: ColdAsk) {
        self.cold_asks.next += 1;
        let token = ASK_TOKEN | (self.cold_asks.next & (ASK_TOKEN - 1));
        let asked = self
            .shards
            .get_mut(local)
            .is_some_and(|l| l.shard.ask(token, question));
        if asked {
            self.cold_asks.asks.insert(token, ask);
        } else {
            let reason = "too many cold reads wait; try again".to_owned();
            self.then(ask.then, Answer::Failed(reason));
        }
    }

    /// Takes an answer of a shard.
    pub fn on_cold_answer(&mut self, token: u64, answer: Answer) {
        if token & ASK_TOKEN == 0 {
            return self.on_cold_pull(token, answer);
        }
        if let Some(ask) = self.cold_asks.asks.remove(&token) {
            self.then(ask.then, answer);
        }
    }

    /// Uses an offset that was found without the disk.
    pub fn found_offset(&mut self, then: Then, offset: i64) {
        self.then(then, Answer::Offset(offset));
    }

    /// Answers what needed a read of the disk that did not succeed.
    pub(super) fn answer_read_failed(&mut self, reply: &ReplyTo, reason: &str) {
        let remark = format!("disk: read failed: {reason}");
        self.answer(reply, response::SYSTEM_ERROR, Some(&remark));
    }

    fn then(&mut self, then: Then, answer: Answer) {
        match (then, answer) {
            (Then::AnswerOffset(reply), Answer::Offset(offset)) => {
                self.answer_number(&reply, "offset", offset);
            }
            (Then::AnswerOffset(reply) | Then::AnswerView(reply), Answer::Failed(reason)) => {
                self.answer_read_failed(&reply, &reason);
            }
            (Then::AnswerView(reply), Answer::Records(records)) => {
                self.answer_record(&reply, records.first());
            }
            (Then::AnswerOffset(reply) | Then::AnswerView(reply), _) => {
                let remark = "unexpected answer of the store";
                self.answer(&reply, response::SYSTEM_ERROR, Some(remark));
            }
            (Then::AnswerUnits(asked), Answer::Units(units)) => self.answer_units(*asked, &units),
            (Then::AnswerUnits(asked), Answer::Failed(reason)) => {
                self.refuse_units(&asked, &reason);
            }
            (Then::Back(order), answer) => self.on_back_record(*order, answer),
            (Then::Pop(cold), answer) => self.on_cold_pop_answer(*cold, answer),
            (Then::Revive(revival), answer) => self.on_revival_read(revival, answer),
            (Then::Commit(order), answer) => self.on_commit_record(*order, answer),
            (then, answer) => self.tell(then, answer),
        }
    }

    /// Tells a gathering core what a shard answered.
    fn tell(&mut self, then: Then, answer: Answer) {
        let records = match &answer {
            Answer::Records(records) => records.clone(),
            _ => Vec::new(),
        };
        let (core, gather, told) = match then {
            Then::TellOffset {
                core,
                gather,
                queue_id,
                min,
                max,
            } => {
                let offset = if let Answer::Offset(offset) = answer {
                    offset
                } else {
                    min
                };
                (core, gather, Told::Offset(queue_id, offset, min, max))
            }
            Then::TellRecord { core, gather } => {
                (core, gather, Told::Record(records.into_iter().next()))
            }
            Then::TellKey { core, gather } => (core, gather, Told::Records(records)),
            _ => return,
        };
        self.send_to(core, MeshMessage::Told { gather, told });
    }

    fn answer_record(&mut self, reply: &ReplyTo, record: Option<&Vec<u8>>) {
        let Some(record) = record else {
            let remark = "can not find message by the offset";
            return self.answer(reply, response::SYSTEM_ERROR, Some(remark));
        };
        let mut frame = Vec::with_capacity(record.len() + 256);
        let head = Reply {
            code: response::SUCCESS,
            opaque: reply.opaque,
            remark: None,
            ext: &[],
        };
        encode_reply(&mut frame, reply.serialization, &head, record);
        self.deliver(reply.link, &frame);
    }

    /// Answers another core's question.
    pub fn on_ask(&mut self, from: usize, gather: u64, ask: Ask) {
        match ask {
            Ask::Report(query) => {
                let told = Told::Report(Box::new(self.report(&query)));
                self.send_to(from, MeshMessage::Told { gather, told });
            }
            Ask::Offset {
                topic,
                queue_id,
                timestamp,
            } => {
                let home = usize::try_from(queue_id)
                    .ok()
                    .and_then(|id| self.directory.topics.get(&*topic)?.homes.get(id).copied());
                let local = home.and_then(|home| self.local_shard(home.shard));
                let (Some(home), Some(local)) = (home, local) else {
                    let told = Told::Offset(queue_id, 0, 0, 0);
                    return self.send_to(from, MeshMessage::Told { gather, told });
                };
                let bounds = self
                    .shards
                    .get(local)
                    .and_then(|l| l.shard.bounds(home.index));
                let (min, max) = bounds.map_or((0, 0), |(min, max)| (min as i64, max as i64));
                let then = Then::TellOffset {
                    core: from,
                    gather,
                    queue_id,
                    min,
                    max,
                };
                if timestamp < 0 {
                    return self.found_offset(then, max);
                }
                self.find_offset(local, home.index, timestamp, true, then);
            }
            Ask::Settle => self.on_settle(from, gather),
            Ask::Record { physical_offset } => {
                let shard = shard::address::split(physical_offset).map(|(shard, _)| shard);
                let then = Then::TellRecord { core: from, gather };
                match shard.and_then(|shard| self.local_shard(shard)) {
                    Some(local) => {
                        let question = Question::Record { physical_offset };
                        self.ask_cold(local, question, ColdAsk { then, local });
                    }
                    None => self.then(then, Answer::Records(Vec::new())),
                }
            }
            Ask::Key(query) => {
                for local in 0..self.shards.len() {
                    let question = Question::Key((*query).clone());
                    let then = Then::TellKey { core: from, gather };
                    self.ask_cold(local, question, ColdAsk { then, local });
                }
            }
        }
    }

    /// Whether a queue lives on a shard. At start every shard is given all saved offsets; only
    /// those of its own queues count.
    fn lives_on(&self, topic: &str, queue_id: i32, shard: u16) -> bool {
        let entry = self.directory.topics.get(topic);
        let home = usize::try_from(queue_id)
            .ok()
            .and_then(|id| entry?.homes.get(id));
        home.is_some_and(|home| home.shard == shard)
    }

    /// What this core's shards have to tell.
    fn report(&self, query: &ReportQuery) -> Report {
        let mut report = Report {
            core: self.core,
            ..Report::default()
        };
        for local in &self.shards {
            if query.queues {
                report.queues.extend(queue_reports(&local.shard, query));
            }
            if query.offsets {
                self.report_offsets(&local.shard, query, &mut report.offsets);
            }
            if query.store {
                report.stores.push(store_report(local));
            }
        }
        if query.store
            && let Some(first) = report.stores.first_mut()
        {
            self.report_counters(first);
        }
        report
    }

    fn report_offsets(&self, shard: &Shard, query: &ReportQuery, out: &mut Vec<OffsetReport>) {
        let group = query.group.as_deref();
        self.report_half_progress(shard, query, out);
        for (topic, name, entry) in shard.offsets().iter() {
            let elsewhere = !self.lives_on(topic, entry.queue_id, shard.number());
            let asked = wants(query, topic) && group.is_none_or(|group| group == name);
            let is_own = topic == HALF_TOPIC && name == TRANSACTION_GROUP;
            if !asked || is_own || entry.offset < 0 || elsewhere {
                continue;
            }
            let last_timestamp = shard.queues().find(topic, entry.queue_id).and_then(|at| {
                let before = u64::try_from(entry.offset - 1).ok()?;
                shard.store_timestamp_in_memory(at, before)
            });
            let held = shard.pop().find(topic, name, entry.queue_id);
            let held = held.map(|at| shard.pop().figures(at)).unwrap_or_default();
            out.push(OffsetReport {
                group: name.to_owned(),
                topic: topic.to_owned(),
                queue_id: entry.queue_id,
                offset: entry.offset,
                pull_offset: entry.pull_offset,
                last_timestamp: last_timestamp.unwrap_or(0),
                in_flight: held.in_flight as i64,
                held_from: held.oldest_offset.map(|offset| offset as i64),
                held_since_ms: held.oldest_pop_ms.unwrap_or(0),
            });
        }
    }

    /// How far transactions are done, told as RocketMQ tells it: as the offset of its own group.
    fn report_half_progress(
        &self,
        shard: &Shard,
        query: &ReportQuery,
        out: &mut Vec<OffsetReport>,
    ) {
        let group = query.group.as_deref();
        let asked = group.is_none_or(|group| group == TRANSACTION_GROUP);
        let queue_id = i32::from(shard.number());
        if !asked
            || !wants(query, HALF_TOPIC)
            || shard.queues().find(HALF_TOPIC, queue_id).is_none()
        {
            return;
        }
        out.push(OffsetReport {
            group: TRANSACTION_GROUP.to_owned(),
            topic: HALF_TOPIC.to_owned(),
            queue_id,
            offset: shard.halves_done_to() as i64,
            pull_offset: -1,
            last_timestamp: 0,
            in_flight: 0,
            held_from: None,
            held_since_ms: 0,
        });
    }

    /// Counters that are kept per core go with its first shard.
    fn report_counters(&self, first: &mut StoreReport) {
        first.get_messages = self.counters.get_messages;
        first.get_found = self.counters.get_found;
        first.get_missed = self.counters.get_missed;
        first.get_bytes = self.counters.get_bytes;
        for (topic, entry) in &self.directory.topics {
            if entry.put.messages > 0 {
                let put = (topic.to_string(), entry.put.messages, entry.put.bytes);
                first.topic_put.push(put);
            }
            for (group, got) in &entry.got {
                let (topic, group) = (topic.to_string(), group.to_string());
                first
                    .group_get
                    .push((topic, group, got.messages, got.bytes));
            }
            for (group, queues) in &entry.passed {
                let some = queues.iter().enumerate().filter(|(_, passed)| **passed > 0);
                first.group_passed.extend(some.map(|(queue_id, passed)| {
                    let (topic, group) = (topic.to_string(), group.to_string());
                    (topic, group, queue_id as i32, *passed)
                }));
            }
        }
    }
}

fn wants(query: &ReportQuery, topic: &str) -> bool {
    let topics = query.topics.as_ref();
    topics.is_none_or(|topics| topics.iter().any(|name| name == topic))
}

fn queue_reports<'a>(
    shard: &'a Shard,
    query: &'a ReportQuery,
) -> impl Iterator<Item = QueueReport> + 'a {
    let queues = shard.queues().iter();
    queues
        .filter(|(_, queue)| wants(query, &queue.topic))
        .map(|(index, queue)| QueueReport {
            topic: queue.topic.to_string(),
            queue_id: queue.queue_id,
            shard: shard.number(),
            min_offset: queue.min_offset as i64,
            max_offset: queue.readable as i64,
            first_store_timestamp: shard.first_store_timestamp(index),
            last_store_timestamp: queue.last_store_timestamp,
        })
}

fn store_report(local: &super::state::LocalShard) -> StoreReport {
    let shard = &local.shard;
    let (log, counters, number) = (shard.log(), shard.counters(), shard.number());
    let physical = |position| shard::address::physical(number, position);
    let space = shard.space();
    let (transactions_open, transaction_oldest_ms) = shard.halves_open();
    StoreReport {
        shard: number,
        log_dir: shard.log_dir().display().to_string(),
        disk_total_bytes: space.total_bytes,
        disk_free_bytes: space.available_bytes,
        log_min_offset: physical(log.min_position()),
        log_max_offset: physical(log.tail()),
        flush_behind_bytes: (log.tail() - log.synced()) as i64,
        earliest_store_timestamp: shard.earliest_store_timestamp(),
        put_messages: counters.put_messages,
        put_bytes: counters.put_bytes,
        put_refused: counters.put_refused,
        put_latency_max_us: local.latency.max_us(),
        put_latency_p99_us: local.latency.quantile_us(0.99),
        put_latency_p999_us: local.latency.quantile_us(0.999),
        parked_pulls: shard.parked_held() as u64,
        refusing: shard.refusing(),
        delayed: shard.delayed_pending(),
        transactions_open,
        transaction_oldest_ms: transaction_oldest_ms.unwrap_or(0),
        timers: shard.timer_report(),
        timers_held_bytes: shard.timers_held_bytes(),
        ..StoreReport::default()
    }
}
