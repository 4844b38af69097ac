//! The control task on the first core: runs the control state machine and carries out its effects.
//!
//! Effects are done in order. While a settings file is being written that they wait for
//! (`core/saves.rs`), everything behind it waits, except what has nothing to do with it.
//!
//! Invariant: only this core changes shared tables; other cores hear of it by message.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use wire::codes::{private, request, response};
use wire::frame;
use wire::header::{self, ExtValue, Reply, encode_reply};
use wire::message::RecordView;
use wire::requests::QueryMessage;

use super::jobs::CoreJob;
use super::messages::{Ask, Change, MeshMessage, ReplyTo, Told};
use super::registrar::Registrar;
use super::report::{OffsetReport, Report, ReportQuery};
use super::saves::Saves;
use super::settle::{files_of, tie_answers};
use super::state::State;
use crate::control::Control;
use crate::control::effects::{
    ClientLink, Effect, Origin, PendingRequest, append, is_independent, may_pass,
};

/// How often the control task looks at the clock, in microseconds.
pub const TICK_US: u64 = 1_000_000;
/// How long a gathering may take before what came in is used, in microseconds.
const GATHER_US_MAX: u64 = 4_000_000;
/// File of committed offsets.
pub const OFFSETS_FILE: &str = "consumerOffset.json";

/// What happens with what the cores told.
enum GatherThen {
    Finish(PendingRequest),
    Search(PendingRequest),
    Record(PendingRequest),
    Sample,
    SaveOffsets,
    Key(ReplyTo, usize),
    Settled,
}

struct Gather {
    missing: usize,
    since_us: u64,
    reports: Vec<Report>,
    found: Vec<(i32, i64, i64, i64)>,
    records: Vec<Vec<u8>>,
    /// Cores that could not store what they were told.
    unsafe_cores: usize,
    then: GatherThen,
}

/// The control task.
pub struct ControlTask {
    /// Its state machine.
    pub control: Control,
    /// Registration with name servers.
    pub registrar: Registrar,
    effects: VecDeque<Effect>,
    pub(super) saves: Saves,
    gathers: HashMap<u64, Gather>,
    next_gather: u64,
    last_tick_us: u64,
    last_offsets_us: u64,
    saved_offsets: Vec<u8>,
    saving_offsets: bool,
}

impl ControlTask {
    /// Wraps a control state machine with the effects of its start.
    #[must_use]
    pub fn new(control: Control, registrar: Registrar, effects: Vec<Effect>) -> Self {
        Self {
            control,
            registrar,
            effects: effects.into(),
            saves: Saves::default(),
            gathers: HashMap::new(),
            next_gather: 0,
            last_tick_us: 0,
            last_offsets_us: 0,
            saved_offsets: Vec::new(),
            saving_offsets: false,
        }
    }

    /// The offsets were written, or could not be.
    pub(super) fn offsets_written(&mut self, is_saved: bool) {
        self.saving_offsets = false;
        if !is_saved {
            self.saved_offsets.clear();
        }
    }

    /// Whether everything that was decided is on its way to disk.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.effects.is_empty() && !self.saves.has_work()
    }
}

impl State {
    /// Carries out the effects of the control task's start.
    pub fn begin_control(&mut self) {
        self.run_effects();
    }

    /// Runs `act` on the control state machine and then its effects.
    pub(super) fn with_control(&mut self, act: impl FnOnce(&mut Control, i64, &mut Vec<Effect>)) {
        self.with_control_passing(None, act);
    }

    /// The same; its effects may pass those that wait for a save, if these have nothing to do with
    /// them nor with the topics and groups that are `named`. None: they never pass.
    fn with_control_passing(
        &mut self,
        named: Option<&[String]>,
        act: impl FnOnce(&mut Control, i64, &mut Vec<Effect>),
    ) {
        self.with_change(&[], named, act);
    }

    /// The same for a request that needs some files.
    fn with_change(
        &mut self,
        files: &[&'static str],
        named: Option<&[String]>,
        act: impl FnOnce(&mut Control, i64, &mut Vec<Effect>),
    ) {
        let now_ms = self.now.wall_ms;
        let Some(task) = &mut self.control else {
            return;
        };
        let mut effects = Vec::new();
        act(&mut task.control, now_ms, &mut effects);
        let effects = tie_answers(effects, files);
        let passes = task.saves.are_awaited()
            && named.is_some_and(|named| may_pass(&task.effects, &effects, named));
        if passes {
            for effect in effects {
                self.run_effect(effect);
            }
            return;
        }
        append(&mut task.effects, effects);
        self.run_effects();
    }

    /// A request for the control task.
    pub fn control_request(&mut self, origin: &Origin, whole: &[u8]) {
        let Ok(Some((frame, _))) = frame::split(whole, frame::FRAME_BYTES_MAX) else {
            return;
        };
        let Ok(header) = header::decode(&frame) else {
            return;
        };
        let reply = self.reply_to(origin, &header);
        if header.code == request::QUERY_MESSAGE {
            return self.query_by_key(&reply, &header);
        }
        if header.code == private::FUSE_STATE {
            return self.answer_fuse_state(&reply);
        }
        if self.control.is_none() {
            let remark = format!(" request type {} not supported", header.code);
            return self.answer(&reply, response::REQUEST_CODE_NOT_SUPPORTED, Some(&remark));
        }
        let named = is_independent(header.code).then_some(&[][..]);
        self.with_change(files_of(header.code), named, |control, now_ms, effects| {
            control.handle(now_ms, origin, &header, whole, frame.body, effects);
        });
    }

    /// A request whose topic or group has to be created.
    pub fn control_create(&mut self, origin: Origin, frame: Vec<u8>) {
        let named = names_in(&frame);
        self.with_control_passing(Some(&named), |control, now_ms, effects| {
            control.create_topic_for_send(now_ms, PendingRequest { origin, frame }, effects);
        });
    }

    /// A client's answer to a request of the broker.
    pub fn control_client_answer(&mut self, link: ClientLink, whole: &[u8]) {
        let Ok(Some((frame, _))) = frame::split(whole, frame::FRAME_BYTES_MAX) else {
            return;
        };
        let Ok(header) = header::decode(&frame) else {
            return;
        };
        self.with_control_passing(Some(&[]), |control, now_ms, effects| {
            control.handle_client_answer(now_ms, link, &header, frame.body, effects);
        });
    }

    /// A client connection is gone.
    pub fn control_closed(&mut self, link: ClientLink) {
        self.with_control_passing(Some(&[]), |control, now_ms, effects| {
            control.connection_closed(now_ms, link, effects);
        });
    }

    /// Work of the control task that is due.
    pub fn control_turn(&mut self) {
        let now_us = self.now.monotonic_us;
        let interval_us = self.config.offset_save_interval_ms * 1000;
        let Some(task) = &mut self.control else {
            return;
        };
        if now_us < task.last_tick_us + TICK_US {
            return;
        }
        task.last_tick_us = now_us;
        let offsets_due = now_us >= task.last_offsets_us + interval_us && !task.saving_offsets;
        let late: Vec<u64> = task
            .gathers
            .iter()
            .filter(|(_, gather)| now_us > gather.since_us + GATHER_US_MAX)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.finish_gather(id);
        }
        self.with_control_passing(Some(&[]), |control, now_ms, effects| {
            control.tick(now_ms, effects);
        });
        self.save_behind();
        if offsets_due {
            self.save_offsets();
        }
        self.retention_turn();
    }

    /// Asks for all offsets, to write them into the settings file.
    pub fn save_offsets(&mut self) {
        let now_us = self.now.monotonic_us;
        let Some(task) = &mut self.control else {
            return;
        };
        task.last_offsets_us = now_us;
        task.saving_offsets = true;
        let query = ReportQuery {
            offsets: true,
            store: true,
            ..ReportQuery::default()
        };
        self.gather(Ask::Report(Arc::new(query)), None, GatherThen::SaveOffsets);
    }

    pub(super) fn run_effects(&mut self) {
        loop {
            let task = self.control.as_mut();
            let Some(task) = task.filter(|task| !task.saves.are_awaited()) else {
                return;
            };
            let Some(effect) = task.effects.pop_front() else {
                break;
            };
            self.run_effect(effect);
        }
        self.save_behind();
    }

    /// Tells every core of a changed table; gives other effects back.
    fn announce(&mut self, effect: Effect) -> Option<Effect> {
        let change = match effect {
            Effect::TopicChanged(topic) => Change::Topic(topic),
            Effect::TopicRemoved(topic) => Change::TopicRemoved(topic),
            Effect::GroupChanged(group) => Change::Group(group),
            Effect::GroupRemoved { group, offsets } => Change::GroupRemoved(group, offsets),
            Effect::ForbiddenChanged { group, topics } => Change::Forbidden(group, topics),
            Effect::SubscriptionsChanged(members) => Change::Subscriptions(members),
            Effect::PulledChanged {
                group,
                topic,
                pulled,
            } => Change::Pulled(group, topic, pulled),
            other => return Some(other),
        };
        self.broadcast(change);
        None
    }

    fn run_effect(&mut self, effect: Effect) {
        let Some(effect) = self.announce(effect) else {
            return;
        };
        match effect {
            Effect::Reply { to, frame } | Effect::Push { to, frame } => self.deliver(to, &frame),
            Effect::ReplyIfKept(reply) => self.answer_if_kept(&reply),
            Effect::Settle => self.settle(),
            Effect::Save { name, bytes } => self.save_awaited(name, bytes),
            Effect::SaveLater(name) => {
                if let Some(task) = &mut self.control {
                    task.saves.note_behind(name);
                }
            }
            Effect::SetOffsets(sets) => self.set_offsets(sets, false),
            Effect::ResetOffsets(sets) => self.set_offsets(sets, true),
            Effect::ConfigChanged { config, persist } => {
                self.broadcast(Change::Config(config));
                if let Some(persist) = persist {
                    self.persist_awaited(persist);
                }
            }
            Effect::Sample(mut query) => {
                let lag = self.wants_lag();
                (query.queues, query.offsets) = (query.queues || lag, query.offsets || lag);
                self.gather(Ask::Report(Arc::new(query)), None, GatherThen::Sample);
            }
            Effect::Redispatch { origin, frame } => self.on_whole_frame(&origin, &frame, None),
            Effect::Register { topics } => {
                if let Some(task) = &mut self.control {
                    task.registrar.want(topics);
                }
            }
            Effect::NeedReports { query, request } => {
                let then = GatherThen::Finish(*request);
                self.gather(Ask::Report(Arc::new(query)), None, then);
            }
            Effect::SearchOffsets {
                topic,
                queue_ids,
                timestamp,
                request,
            } => {
                self.search(&topic, queue_ids, timestamp, *request);
            }
            Effect::ReadRecord {
                physical_offset,
                request,
            } => {
                self.gather_record(physical_offset, *request);
            }
            Effect::CleanExpired => {
                for core in 0..self.mesh.cores() {
                    self.send_to(core, MeshMessage::CleanExpired);
                }
            }
            // Announced already.
            Effect::TopicChanged(_)
            | Effect::TopicRemoved(_)
            | Effect::GroupChanged(_)
            | Effect::GroupRemoved { .. }
            | Effect::ForbiddenChanged { .. }
            | Effect::SubscriptionsChanged(_)
            | Effect::PulledChanged { .. } => {}
        }
    }

    fn gather_record(&mut self, physical_offset: i64, request: PendingRequest) {
        let shard = shard::address::split(physical_offset).map(|(shard, _)| shard);
        let core = shard
            .and_then(|shard| self.home_of(shard))
            .unwrap_or(self.core);
        let then = GatherThen::Record(request);
        self.gather(Ask::Record { physical_offset }, Some(core), then);
    }

    /// Tells every core, this one first.
    fn broadcast(&mut self, change: Change) {
        self.send_to(self.core, MeshMessage::Change(change.clone()));
        for core in (0..self.mesh.cores())
            .filter(|core| *core != self.core)
            .collect::<Vec<_>>()
        {
            self.send_to(core, MeshMessage::Change(change.clone()));
        }
    }

    fn set_offsets(&mut self, sets: Vec<crate::control::effects::OffsetSet>, reset: bool) {
        let sets = Arc::new(sets);
        for core in 0..self.mesh.cores() {
            self.send_to(
                core,
                MeshMessage::SetOffsets {
                    sets: sets.clone(),
                    reset,
                },
            );
        }
    }

    /// Waits with everything behind until all shards have what they were told so far.
    fn settle(&mut self) {
        if let Some(task) = &mut self.control {
            task.saves.begin_awaited();
            self.gather(Ask::Settle, None, GatherThen::Settled);
        }
    }

    /// Asks one core, or all.
    fn gather(&mut self, ask: Ask, only: Option<usize>, then: GatherThen) {
        let cores: Vec<usize> = only.map_or_else(|| (0..self.mesh.cores()).collect(), |c| vec![c]);
        let missing = match &ask {
            Ask::Key(_) => self.homes.len(),
            _ => cores.len(),
        };
        let id = self.open_gather(missing, then);
        for core in cores {
            self.send_to(
                core,
                MeshMessage::Ask {
                    gather: id,
                    ask: ask.clone(),
                },
            );
        }
    }

    fn open_gather(&mut self, missing: usize, then: GatherThen) -> u64 {
        let since_us = self.now.monotonic_us;
        let Some(task) = &mut self.control else {
            return 0;
        };
        task.next_gather += 1;
        let id = task.next_gather;
        let (reports, found, records) = (Vec::new(), Vec::new(), Vec::new());
        task.gathers.insert(
            id,
            Gather {
                missing,
                since_us,
                reports,
                found,
                records,
                unsafe_cores: 0,
                then,
            },
        );
        id
    }

    fn search(&mut self, topic: &str, ids: Vec<i32>, timestamp: i64, request: PendingRequest) {
        let asks: Vec<(usize, Ask)> = ids
            .into_iter()
            .map(|queue_id| {
                let home = usize::try_from(queue_id)
                    .ok()
                    .and_then(|id| self.directory.topics.get(topic)?.homes.get(id).copied());
                let core = home
                    .and_then(|home| self.home_of(home.shard))
                    .unwrap_or(self.core);
                (
                    core,
                    Ask::Offset {
                        topic: topic.to_owned(),
                        queue_id,
                        timestamp,
                    },
                )
            })
            .collect();
        let id = self.open_gather(asks.len(), GatherThen::Search(request));
        if asks.is_empty() {
            return self.finish_gather(id);
        }
        for (core, ask) in asks {
            self.send_to(core, MeshMessage::Ask { gather: id, ask });
        }
    }

    /// Takes what a core told.
    pub fn on_told(&mut self, id: u64, told: Told) {
        let Some(gather) = self
            .control
            .as_mut()
            .and_then(|task| task.gathers.get_mut(&id))
        else {
            return;
        };
        match told {
            Told::Report(report) => gather.reports.push(*report),
            Told::Offset(queue_id, offset, min, max) => {
                gather.found.push((queue_id, offset, min, max));
            }
            Told::Record(record) => gather.records.extend(record),
            Told::Records(records) => gather.records.extend(records),
            Told::Settled(is_safe) => gather.unsafe_cores += usize::from(!is_safe),
        }
        gather.missing = gather.missing.saturating_sub(1);
        if gather.missing == 0 {
            self.finish_gather(id);
        }
    }

    fn finish_gather(&mut self, id: u64) {
        let Some(gather) = self
            .control
            .as_mut()
            .and_then(|task| task.gathers.remove(&id))
        else {
            return;
        };
        let (reports, found, records) = (gather.reports, gather.found, gather.records);
        match gather.then {
            GatherThen::Finish(request) => {
                let named = code_in(&request.frame).is_some_and(is_independent);
                let named = named.then_some(&[][..]);
                self.with_control_passing(named, |control, now_ms, effects| {
                    control.finish(now_ms, request, reports, effects);
                });
            }
            GatherThen::Search(request) => self.with_control(|control, now_ms, effects| {
                control.finish_search(now_ms, request, found, effects);
            }),
            GatherThen::Record(request) => self.with_control(|control, now_ms, effects| {
                control.finish_record(now_ms, request, records.into_iter().next(), effects);
            }),
            GatherThen::Sample => {
                self.with_control(|control, now_ms, _| control.take_sample(now_ms, &reports));
                self.publish_sample(reports);
            }
            GatherThen::SaveOffsets => self.write_offsets(&reports),
            GatherThen::Key(reply, most) => self.answer_by_key(&reply, records, most),
            GatherThen::Settled => self.on_settled(gather.missing + gather.unsafe_cores),
        }
    }

    fn query_by_key(&mut self, reply: &ReplyTo, header: &header::Header<'_>) {
        let query = match QueryMessage::decode(&header.ext) {
            Ok(query) => query,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let unique = query.unique_key_query.unwrap_or(false);
        let bound = if unique {
            32
        } else {
            self.config.query_messages_max as i32
        };
        let records_max = query.max_num.clamp(1, bound.max(1)) as usize;
        let ask = shard::cold::KeyQuestion {
            topic: query.topic.to_string(),
            key: query.key.to_string(),
            unique,
            from_ms: query.begin_timestamp,
            to_ms: query.end_timestamp,
            records_max,
        };
        self.gather(
            Ask::Key(Arc::new(ask)),
            None,
            GatherThen::Key(*reply, records_max),
        );
    }

    fn answer_by_key(&mut self, reply: &ReplyTo, mut records: Vec<Vec<u8>>, most: usize) {
        if records.is_empty() {
            let remark = "can not find message, maybe time range not correct";
            return self.answer(reply, response::QUERY_NOT_FOUND, Some(remark));
        }
        // The newest ones, but told oldest first, as RocketMQ does.
        records.sort_by_cached_key(|record| {
            let view = RecordView::parse(record);
            view.map_or((0, 0), |view| {
                (view.store_timestamp(), view.physical_offset())
            })
        });
        records.drain(..records.len().saturating_sub(most));
        let last = records
            .last()
            .and_then(|record| RecordView::parse(record).ok());
        let (time, offset) = last.map_or((0, 0), |view| {
            (view.store_timestamp(), view.physical_offset())
        });
        let ext = [
            ("indexLastUpdatePhyoffset", ExtValue::Int(offset)),
            ("indexLastUpdateTimestamp", ExtValue::Int(time)),
        ];
        let head = Reply {
            code: response::SUCCESS,
            opaque: reply.opaque,
            remark: None,
            ext: &ext,
        };
        let mut frame = Vec::new();
        encode_reply(&mut frame, reply.serialization, &head, &records.concat());
        self.deliver(reply.link, &frame);
    }

    fn write_offsets(&mut self, reports: &[Report]) {
        let Some(task) = &mut self.control else {
            return;
        };
        let mut offsets: Vec<&OffsetReport> = reports.iter().flat_map(|r| &r.offsets).collect();
        offsets.sort_by(|a, b| {
            (&a.topic, &a.group, a.queue_id).cmp(&(&b.topic, &b.group, b.queue_id))
        });
        let table = offsets_json(&offsets);
        if table == task.saved_offsets || reports.len() < self.mesh.cores() {
            task.saving_offsets = false;
            return;
        }
        let positions: BTreeMap<u16, i64> = reports
            .iter()
            .flat_map(|report| &report.stores)
            .map(|store| (store.shard, store.log_max_offset))
            .collect();
        let mut bytes = table.clone();
        bytes.pop();
        bytes.extend_from_slice(b",\"logPositions\":{");
        for (index, (shard, position)) in positions.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            bytes.extend_from_slice(format!("{comma}{shard}:{position}").as_bytes());
        }
        bytes.extend_from_slice(b"}}");
        task.saved_offsets = table;
        self.jobs.push(CoreJob::Save {
            name: OFFSETS_FILE,
            bytes,
            is_awaited: false,
        });
    }
}

/// The values of a request's header fields: among them are the topic and the group it names.
fn names_in(whole: &[u8]) -> Vec<String> {
    let Ok(Some((frame, _))) = frame::split(whole, frame::FRAME_BYTES_MAX) else {
        return Vec::new();
    };
    let Ok(header) = header::decode(&frame) else {
        return Vec::new();
    };
    let values = header.ext.iter().map(|(_, value)| value.to_string());
    values.collect()
}

/// The code of a request.
fn code_in(whole: &[u8]) -> Option<i32> {
    let (frame, _) = frame::split(whole, frame::FRAME_BYTES_MAX).ok()??;
    Some(header::decode(&frame).ok()?.code)
}

/// RocketMQ's `consumerOffset.json`, integer keys unquoted.
fn offsets_json(offsets: &[&OffsetReport]) -> Vec<u8> {
    let mut out = String::from("{\"offsetTable\":{");
    let mut last: Option<(&str, &str)> = None;
    for report in offsets {
        let key = (report.topic.as_str(), report.group.as_str());
        if last == Some(key) {
            out.push(',');
        } else {
            if last.is_some() {
                out.push_str("},");
            }
            let name = serde_json::Value::from(format!("{}@{}", key.0, key.1));
            out.push_str(&name.to_string());
            out.push_str(":{");
            last = Some(key);
        }
        out.push_str(&format!("{}:{}", report.queue_id, report.offset));
    }
    if last.is_some() {
        out.push('}');
    }
    out.push_str("}}");
    out.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(topic: &str, group: &str, queue_id: i32, offset: i64) -> OffsetReport {
        let (topic, group) = (topic.to_owned(), group.to_owned());
        OffsetReport {
            group,
            topic,
            queue_id,
            offset,
            pull_offset: -1,
            last_timestamp: 0,
            ..OffsetReport::default()
        }
    }

    #[test]
    fn offsets_are_written_in_rocketmqs_shape() {
        let (a, b, c) = (
            report("T", "g", 0, 5),
            report("T", "g", 1, 6),
            report("U", "h", 0, 7),
        );
        let text = String::from_utf8(offsets_json(&[&a, &b, &c])).unwrap();
        assert_eq!(text, r#"{"offsetTable":{"T@g":{0:5,1:6},"U@h":{0:7}}}"#);
        assert_eq!(offsets_json(&[]), br#"{"offsetTable":{}}"#);
    }
}
