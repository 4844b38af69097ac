//! Serving a pop from the queues of one shard.
//!
//! Invariant: messages are handed out only together with the record that says so; a queue whose
//! messages are being read from disk for a group is left alone by the group's other pops.

use shard::cold::{Answer, Question};
use shard::error::Refusal;
use shard::pop::{PopIndex, Taking};
use shard::queue::QueueIndex;
use shard::select::{PullLimits, Selection, Wanted};
use shard::units::Unit;
use wire::message::{RecordView, peek_len};

use super::super::deliveries::{HandedOut, group_of};
use super::super::gather::{ColdAsk, Then};
use super::super::state::State;
use super::answer::{Found, From, push_retry};
use super::order::PopOrder;
use super::receipt::{Kind, retry_topic};

/// Times one pop goes on in a queue behind messages that its filter passes over.
const SCANS_MAX: usize = 8;

/// A queue that may have a message.
#[derive(Clone, Debug)]
pub struct Candidate {
    kind: Kind,
    topic: Box<str>,
    queue_id: i32,
    queue: QueueIndex,
}

/// A pop that waits for the disk.
#[derive(Debug)]
pub struct ColdPop {
    order: Box<PopOrder>,
    local: usize,
    candidate: Candidate,
    index: PopIndex,
    offset: u64,
    fresh: bool,
}

/// What came of looking into a queue.
enum Look {
    /// Nothing more to get here.
    Done,
    /// The messages from an offset on are on disk.
    OnDisk {
        index: PopIndex,
        offset: u64,
        fresh: bool,
    },
    /// The store refuses the record.
    Refused(Refusal),
}

/// Messages chosen from one queue.
struct Chosen<'a> {
    index: PopIndex,
    start: u64,
    next: u64,
    fresh: bool,
    offsets: &'a [u64],
}

impl State {
    /// Looks for messages on a shard of this core.
    pub(super) fn serve_pop(&mut self, order: Box<PopOrder>, shard: u16) {
        let Some(local) = self.local_shard(shard) else {
            return self.go_on(order);
        };
        let candidates = self.candidates(&order, shard);
        if order.notify {
            let has = candidates
                .iter()
                .any(|c| self.has_message(&order, local, c));
            if has {
                return self.answer_notification(&order, true, false);
            }
            return self.nothing_here(order, local);
        }
        let mut found = Found {
            pop_ms: self.now.wall_ms,
            ..Found::default()
        };
        for candidate in candidates {
            let is_full = found.count >= order.most || found.bytes.len() >= self.hot.pull_bytes_max;
            if is_full {
                found.rest += self.rest_of(&order, local, &candidate);
                continue;
            }
            match self.look(&order, local, &candidate, &mut found) {
                Look::Done => {}
                Look::OnDisk { .. } if found.count > 0 => found.rest += 1,
                Look::OnDisk {
                    index,
                    offset,
                    fresh,
                } => {
                    return self.ask_disk_for_pop(ColdPop {
                        order,
                        local,
                        candidate,
                        index,
                        offset,
                        fresh,
                    });
                }
                Look::Refused(_) if found.count > 0 => break,
                Look::Refused(refusal) => {
                    self.refuse(&order.reply, &refusal);
                    return self.finish_pop(&order);
                }
            }
        }
        if found.count == 0 {
            return self.nothing_here(order, local);
        }
        self.answer_pop(&order, local, &found);
        if found.rest > 0 {
            self.wake_pops(local, &order.topic, &order.group, None);
        }
    }

    /// Queues on a shard that may have a message for an order, another one first each time.
    fn candidates(&self, order: &PopOrder, shard: u16) -> Vec<Candidate> {
        let mut normal = Vec::new();
        self.add_queues(&order.topic, Kind::Normal, shard, &mut normal);
        normal.retain(|queue| order.queue_id < 0 || queue.queue_id == order.queue_id);
        let count = normal.len().max(1);
        normal.rotate_left((order.turn as usize / 2) % count);
        if order.ordered {
            return normal;
        }
        let mut retry = Vec::new();
        for (kind, v2) in [(Kind::RetryV1, false), (Kind::RetryV2, true)] {
            let name = retry_topic(&order.topic, &order.group, v2);
            self.add_queues(&name, kind, shard, &mut retry);
        }
        let (mut first, mut second) = (normal, retry);
        if order.retry_first {
            std::mem::swap(&mut first, &mut second);
        }
        first.append(&mut second);
        first
    }

    fn add_queues(&self, topic: &str, kind: Kind, shard: u16, out: &mut Vec<Candidate>) {
        let Some(entry) = self.directory.topics.get(topic) else {
            return;
        };
        let read = entry.config.read_queue_nums.max(0) as usize;
        for (id, home) in entry.homes.iter().enumerate().take(read) {
            if home.shard == shard {
                out.push(Candidate {
                    kind,
                    topic: topic.into(),
                    queue_id: id as i32,
                    queue: home.index,
                });
            }
        }
    }

    /// Where a group stands in a queue, -1 when nowhere yet.
    fn stands(&self, order: &PopOrder, local: usize, candidate: &Candidate) -> i64 {
        let shard = self.shards.get(local).map(|local| &local.shard);
        let entry = shard.and_then(|shard| {
            shard
                .offsets()
                .get(&candidate.topic, &order.group, candidate.queue_id)
        });
        entry.map_or(-1, |entry| entry.offset)
    }

    fn rest_of(&self, order: &PopOrder, local: usize, candidate: &Candidate) -> i64 {
        let shard = self.shards.get(local).map(|local| &local.shard);
        let bounds = shard.and_then(|shard| shard.bounds(candidate.queue));
        let end = bounds.map_or(0, |(_, end)| end as i64);
        if self.is_blocked(order, local, candidate) {
            return 0;
        }
        (end - self.stands(order, local, candidate).max(0)).max(0)
    }

    fn is_blocked(&self, order: &PopOrder, local: usize, candidate: &Candidate) -> bool {
        let Some(shard) = self.shards.get(local).map(|local| &local.shard) else {
            return true;
        };
        let (topic, group) = (&candidate.topic, &order.group);
        let index = shard.pop().find(topic, group, candidate.queue_id);
        index.is_some_and(|index| {
            let attempt = if order.ordered { &*order.attempt } else { "" };
            shard.pop().blocked(index, attempt, self.now.wall_ms)
        })
    }

    fn has_message(&self, order: &PopOrder, local: usize, candidate: &Candidate) -> bool {
        let shard = self.shards.get(local).map(|local| &local.shard);
        let bounds = shard.and_then(|shard| shard.bounds(candidate.queue));
        let Some((min, end)) = bounds.filter(|(min, end)| min < end) else {
            return false;
        };
        let stands = self.stands(order, local, candidate).max(min as i64);
        stands < end as i64 && !self.is_blocked(order, local, candidate)
    }

    /// Where a pop begins in a queue: at a reset, where the group stands, or where a new group
    /// begins. `None`: nothing is there.
    fn begin(
        &mut self,
        order: &PopOrder,
        local: usize,
        candidate: &Candidate,
    ) -> Result<Option<(u64, bool)>, Refusal> {
        let stands = self.stands(order, local, candidate);
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return Ok(None);
        };
        let Some((min, end)) = shard.bounds(candidate.queue) else {
            return Ok(None);
        };
        let (topic, group, queue_id) = (&*candidate.topic, &*order.group, candidate.queue_id);
        let reset = shard.take_reset(topic, group, queue_id);
        let wanted = match (reset, stands) {
            (Some(offset), _) => offset.max(0) as u64,
            (None, 0..) => stands as u64,
            (None, _) if !order.from_end || candidate.kind != Kind::Normal => min,
            (None, _) if min == 0 && shard.holds_first_in_memory(candidate.queue) => 0,
            (None, _) => end.saturating_sub(1).max(min),
        };
        let offset = wanted.clamp(min, end);
        if stands != offset as i64 {
            shard.commit_offset(self.now, topic, group, queue_id, offset as i64)?;
        }
        shard.note_pop(self.now, topic, group, queue_id);
        Ok((offset < end).then_some((offset, reset.is_some())))
    }

    /// Takes messages of a queue as long as they are in memory.
    fn look(
        &mut self,
        order: &PopOrder,
        local: usize,
        candidate: &Candidate,
        found: &mut Found,
    ) -> Look {
        let (mut offset, fresh) = match self.begin(order, local, candidate) {
            Ok(Some(begin)) => begin,
            Ok(None) => return Look::Done,
            Err(refusal) => return Look::Refused(refusal),
        };
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return Look::Done;
        };
        let (topic, group) = (&candidate.topic, &order.group);
        let Some(index) = shard.pop_open(topic, group, candidate.queue_id) else {
            shard.pop_counters_mut().bound_hit += 1;
            return Look::Done;
        };
        let attempt = if order.ordered { &*order.attempt } else { "" };
        let blocked = !fresh && shard.pop().blocked(index, attempt, self.now.wall_ms);
        if blocked || self.pop.busy.contains(&(local, index)) {
            return Look::Done;
        }
        for _ in 0..SCANS_MAX {
            match self.scan(order, local, candidate, (index, offset, fresh), found) {
                Ok(Scan::Next(next)) => offset = next,
                Ok(Scan::Done) => return Look::Done,
                Ok(Scan::OnDisk) => {
                    return Look::OnDisk {
                        index,
                        offset,
                        fresh,
                    };
                }
                Err(refusal) => return Look::Refused(refusal),
            }
        }
        found.rest += 1;
        Look::Done
    }

    /// Looks at one piece of a queue.
    fn scan(
        &mut self,
        order: &PopOrder,
        local: usize,
        candidate: &Candidate,
        (index, offset, fresh): (PopIndex, u64, bool),
        found: &mut Found,
    ) -> Result<Scan, Refusal> {
        let limits = self.pop_limits(order, local, index, found);
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return Ok(Scan::Done);
        };
        if limits.messages_max == 0 {
            shard.pop_counters_mut().bound_hit += 1;
            return Ok(Scan::Done);
        }
        let wanted = wanted_of(order, candidate);
        let (scanned, chosen) = (&mut self.scratch.scanned, &mut self.scratch.chosen);
        let at = offset as i64;
        let selection = shard.select(candidate.queue, at, wanted, limits, scanned, chosen);
        let next = match selection {
            Selection::Chosen { next_offset } if shard.all_in_ring(chosen) => next_offset,
            Selection::Chosen { .. } | Selection::OnDisk => return Ok(Scan::OnDisk),
            Selection::NoneMatched { next_offset } => next_offset,
            _ => return Ok(Scan::Done),
        };
        let mut offsets = Vec::with_capacity(chosen.len());
        let table = shard.pop();
        offsets_of(scanned, offset, chosen, &mut offsets);
        drop_taken(chosen, &mut offsets, |offset| {
            !(fresh && order.ordered) && table.is_taken(index, offset)
        });
        let units = std::mem::take(chosen);
        let taken = Chosen {
            index,
            start: offset,
            next,
            fresh,
            offsets: &offsets,
        };
        let result = self.hand_out(order, local, candidate, &taken, found);
        if let (Ok(()), Some(local)) = (&result, self.shards.get(local)) {
            let mut bytes = std::mem::take(&mut found.bytes);
            if candidate.kind == Kind::Normal {
                local.shard.copy_from_ring(&units, &mut bytes);
            } else {
                let mut records = Vec::new();
                local.shard.copy_from_ring(&units, &mut records);
                self.push_retries(
                    order,
                    candidate,
                    (offset, found.pop_ms),
                    &records,
                    &mut bytes,
                );
            }
            found.bytes = bytes;
        }
        self.scratch.chosen = units;
        result.map(|()| match offsets.is_empty() {
            true => Scan::Next(next),
            false => Scan::Done,
        })
    }

    fn pop_limits(
        &self,
        order: &PopOrder,
        local: usize,
        index: PopIndex,
        found: &Found,
    ) -> PullLimits {
        let room = self
            .shards
            .get(local)
            .map_or(0, |local| local.shard.pop().room(index));
        let most = self.hot.pull_bytes_max;
        PullLimits {
            messages_max: room.min(order.most.saturating_sub(found.count)),
            bytes_max: most.saturating_sub(found.bytes.len()),
        }
    }

    /// Notes messages as handed out and where they are from.
    fn hand_out(
        &mut self,
        order: &PopOrder,
        local: usize,
        candidate: &Candidate,
        chosen: &Chosen<'_>,
        found: &mut Found,
    ) -> Result<(), Refusal> {
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return Ok(());
        };
        let (topic, group, queue_id) = (&*candidate.topic, &*order.group, candidate.queue_id);
        let end = shard.bounds(candidate.queue).map_or(0, |(_, end)| end);
        if chosen.offsets.is_empty() {
            let next = chosen.next as i64;
            shard.commit_offset(self.now, topic, group, queue_id, next)?;
            return Ok(());
        }
        let taking = Taking {
            ordered: order.ordered,
            fresh: chosen.fresh,
            pop_ms: found.pop_ms,
            invisible_ms: order.invisible_ms,
            next_offset: chosen.next,
            attempt: &order.attempt,
            offsets: chosen.offsets,
        };
        let durable_at = shard.pop_take(self.now, chosen.index, &taking)?;
        let out = HandedOut {
            shard: shard.number(),
            queue: candidate.queue,
            group: group_of(group),
            first: 0,
            count: 0,
            client: order.client,
            popped: true,
        };
        self.deliveries
            .note_each(self.now.wall_ms, out, chosen.offsets);
        found.end = found.end.max(durable_at);
        found.count += chosen.offsets.len();
        found.rest += end.saturating_sub(chosen.next) as i64;
        let info = &mut found.info;
        info.add(candidate.kind, queue_id, chosen.start, chosen.offsets);
        if order.ordered {
            let count = |offset: &u64| (*offset, shard.pop().order_count(chosen.index, *offset));
            let counts: Vec<(u64, i32)> = chosen.offsets.iter().map(count).collect();
            info.add_counts(queue_id, &counts);
        }
        Ok(())
    }

    fn push_retries(
        &self,
        order: &PopOrder,
        candidate: &Candidate,
        (start, pop_ms): (u64, i64),
        records: &[u8],
        out: &mut Vec<u8>,
    ) {
        let from = From {
            kind: candidate.kind,
            topic: &order.topic,
            start,
            pop_ms,
            invisible_ms: order.invisible_ms,
            broker: &self.config.broker_name.0,
        };
        for view in views(records) {
            push_retry(out, &view, &from);
        }
    }

    /// A shard has nothing for an order: it watches there if it is parked, and goes on.
    fn nothing_here(&mut self, order: Box<PopOrder>, local: usize) {
        if order.token != 0 {
            self.watch(&order, local);
        }
        self.go_on(order);
    }

    fn ask_disk_for_pop(&mut self, cold: ColdPop) {
        let limits = self.pop_limits(&cold.order, cold.local, cold.index, &Found::default());
        let question = Question::Pull {
            queue: cold.candidate.queue,
            offset: cold.offset as i64,
            wanted: wanted_of(&cold.order, &cold.candidate).clone(),
            limits: PullLimits {
                messages_max: limits.messages_max.max(1),
                ..limits
            },
        };
        self.pop.busy.insert((cold.local, cold.index));
        let local = cold.local;
        let then = Then::Pop(Box::new(cold));
        self.ask_cold(local, question, ColdAsk { then, local });
    }

    /// Goes on with a pop once the disk has answered.
    pub fn on_cold_pop_answer(&mut self, cold: ColdPop, answer: Answer) {
        self.pop.busy.remove(&(cold.local, cold.index));
        let local = cold.local;
        let Some(shard) = self.shards.get(local).map(|local| local.shard.number()) else {
            return;
        };
        let (topic, group) = (cold.order.topic.clone(), cold.order.group.clone());
        let stands = self.stands(&cold.order, local, &cold.candidate);
        let blocked = !cold.fresh && self.is_blocked(&cold.order, local, &cold.candidate);
        let moved = stands != cold.offset as i64 || blocked;
        match answer {
            Answer::Failed(reason) => {
                self.answer_read_failed(&cold.order.reply, &reason);
                self.finish_pop(&cold.order);
            }
            Answer::Pull {
                selection: Selection::Chosen { next_offset },
                bytes,
                ..
            } if !moved => self.take_cold(cold, next_offset, &bytes),
            Answer::Pull {
                selection: Selection::NoneMatched { next_offset },
                ..
            } if !moved => {
                let name = &cold.candidate;
                let (id, next) = (name.queue_id, next_offset as i64);
                let now = self.now;
                let committed = self.shards.get_mut(local).map(|local| {
                    local
                        .shard
                        .commit_offset(now, &name.topic, &group, id, next)
                });
                match committed {
                    Some(Err(refusal)) => {
                        self.refuse(&cold.order.reply, &refusal);
                        self.finish_pop(&cold.order);
                    }
                    _ => self.serve_pop(cold.order, shard),
                }
            }
            _ => self.serve_pop(cold.order, shard),
        }
        self.wake_pops(local, &topic, &group, None);
    }

    fn take_cold(&mut self, cold: ColdPop, next: u64, bytes: &[u8]) {
        let (local, index) = (cold.local, cold.index);
        let Some(shard) = self.shards.get(local).map(|local| &local.shard) else {
            return;
        };
        let (number, table) = (shard.number(), shard.pop());
        let ordered = cold.order.ordered;
        let room = table.room(index);
        let mut records: Vec<RecordView<'_>> = views(bytes).collect();
        let mut next = next;
        records.retain(|view| {
            (cold.fresh && ordered) || !table.is_taken(index, view.queue_offset() as u64)
        });
        if let Some(first_left) = records.get(room) {
            next = first_left.queue_offset() as u64;
            records.truncate(room);
        }
        let offsets: Vec<u64> = records.iter().map(|v| v.queue_offset() as u64).collect();
        let mut found = Found {
            pop_ms: self.now.wall_ms,
            ..Found::default()
        };
        let chosen = Chosen {
            index,
            start: cold.offset,
            next,
            fresh: cold.fresh,
            offsets: &offsets,
        };
        let result = self.hand_out(&cold.order, local, &cold.candidate, &chosen, &mut found);
        if let Err(refusal) = result {
            self.refuse(&cold.order.reply, &refusal);
            return self.finish_pop(&cold.order);
        }
        if offsets.is_empty() {
            return self.serve_pop(cold.order, number);
        }
        for view in &records {
            if cold.candidate.kind == Kind::Normal {
                found.bytes.extend_from_slice(view.raw());
            } else {
                let from = (cold.offset, found.pop_ms);
                let (order, candidate) = (&cold.order, &cold.candidate);
                self.push_retries(order, candidate, from, view.raw(), &mut found.bytes);
            }
        }
        self.answer_pop(&cold.order, local, &found);
    }
}

/// What came of one piece of a queue.
enum Scan {
    Next(u64),
    Done,
    OnDisk,
}

/// Queue offsets of the chosen among the scanned units.
fn offsets_of(scanned: &[Unit], first: u64, chosen: &[Unit], out: &mut Vec<u64>) {
    let mut wanted = chosen.iter().peekable();
    for (at, unit) in scanned.iter().enumerate() {
        let is_next = wanted
            .peek()
            .is_some_and(|next| next.physical_offset == unit.physical_offset);
        if is_next {
            wanted.next();
            out.push(first + at as u64);
        }
    }
}

fn drop_taken(chosen: &mut Vec<Unit>, offsets: &mut Vec<u64>, held: impl Fn(u64) -> bool) {
    if !offsets.iter().any(|offset| held(*offset)) {
        return;
    }
    let mut at = offsets.iter();
    chosen.retain(|_| at.next().is_some_and(|offset| !held(*offset)));
    offsets.retain(|offset| !held(*offset));
}

/// What is wanted of a queue: what comes back to a group was wanted by it before.
fn wanted_of<'a>(order: &'a PopOrder, candidate: &Candidate) -> &'a Wanted {
    if candidate.kind == Kind::Normal {
        &order.wanted
    } else {
        &Wanted::All
    }
}

/// The records in a buffer.
pub(super) fn views(mut bytes: &[u8]) -> impl Iterator<Item = RecordView<'_>> {
    std::iter::from_fn(move || {
        let (size, _) = peek_len(bytes)?;
        let (record, rest) = bytes.split_at_checked(size as usize)?;
        bytes = rest;
        RecordView::parse(record).ok()
    })
}
