//! Transactions on the data path: half messages in, ends of transactions, questions out.
//!
//! Invariant: a half message and everything that ends it stay on the shard of the real queue, which
//! the offset in an end names; an answer leaves only behind the record that it tells of, also when
//! it repeats an earlier one (P1).

use shard::half::{HalfEnd, HalfLimits, OPEN_MAX, group_hash};
use shard::half_checks::HalfCheck;
use shard::half_ends::Ended;
use shard::{Refusal, address};
use wire::codes::response;
use wire::header::Header;
use wire::message::{RecordView, properties, sysflag};
use wire::requests::{EndTransaction, SendRequest};

use shard::cold::{Answer, Question};

use super::gather::{ColdAsk, Then};
use super::messages::{MeshMessage, ReplyTo};
use super::send::{Target, Wishes};
use super::state::{State, encode_plain};
use super::timed::committed_due;
use crate::config::Config;
use crate::control::effects::Origin;
use crate::control::transactions::CheckBack;

/// A commit that waits for the half message.
#[derive(Debug)]
pub struct CommitOrder {
    origin: Origin,
    reply: ReplyTo,
    frame: Vec<u8>,
    local: usize,
}

/// When and how often producers are asked.
fn limits(config: &Config) -> HalfLimits {
    let ms = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    HalfLimits {
        immunity_ms: ms(config.transaction_timeout_ms),
        interval_ms: ms(config.transaction_check_interval_ms),
        checks_max: config.transaction_check_max,
        open_max: OPEN_MAX,
    }
}

impl State {
    /// Tells the shards of this core when producers are asked.
    pub fn set_half_limits(&mut self) {
        let limits = limits(&self.config);
        for local in &mut self.shards {
            local.shard.set_half_limits(self.now, limits);
        }
    }

    /// Stores a half message; its properties are in the scratch.
    pub(super) fn append_half(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        request: &SendRequest<'_>,
        body: &[u8],
        target: &Target,
        found: &Wishes,
    ) -> Result<(), Refusal> {
        if let Some((code, remark)) = self.refuse_half(found) {
            self.answer(reply, code, Some(remark));
            return Ok(());
        }
        let stored = &mut self.scratch.properties;
        let Some(local) = self.shards.get_mut(target.local) else {
            return Ok(());
        };
        target.name_in(stored, &local.shard);
        if properties::get(stored, properties::PRODUCER_GROUP).is_none() {
            let group = request.producer_group.to_cow();
            properties::append(stored, properties::PRODUCER_GROUP, &group);
        }
        let parts: [&[u8]; 2] = [stored, &self.hot.added_properties];
        let message = target.message(origin, request, found, body, &parts);
        let appended = local.shard.append_half(self.now, message)?;
        self.finish_single(reply, target, &appended, found, None);
        Ok(())
    }

    fn refuse_half(&self, found: &Wishes) -> Option<(i32, &'static str)> {
        if self.config.reject_transactions {
            let remark = "sending transactional messages is forbidden (rejectTransactionMessage)";
            return Some((response::NO_PERMISSION, remark));
        }
        if !found.transaction {
            let remark = "the system flag says half message, the property TRAN_MSG does not";
            return Some((response::MESSAGE_ILLEGAL, remark));
        }
        let deletes = properties::TIMER_DEL_UNIQKEY;
        if found.timer && properties::get(&self.scratch.properties, deletes).is_some() {
            let remark = "a half message takes no other message back (TIMER_DEL_UNIQKEY)";
            return Some((response::MESSAGE_ILLEGAL, remark));
        }
        None
    }

    /// Handles the end of a transaction (code 37).
    pub fn on_end_transaction(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
    ) {
        let end = match EndTransaction::decode(&header.ext) {
            Ok(end) => end,
            Err(error) => {
                return self.answer(reply, response::SYSTEM_ERROR, Some(&error.to_string()));
            }
        };
        let offset = end.commit_log_offset;
        let Some(local) = self.shard_of_offset(offset, origin, reply, whole) else {
            return;
        };
        if self.must_wait_behind_others(local) {
            return self.hold(local, origin, reply, whole, 0, None);
        }
        let wanted = match end.commit_or_rollback {
            sysflag::TRANSACTION_COMMIT => HalfEnd::Committed,
            sysflag::TRANSACTION_ROLLBACK => HalfEnd::RolledBack,
            // Undecided yet: it is asked about again.
            0 => return self.answer(reply, response::SUCCESS, None),
            other => {
                let remark = format!("commitOrRollback is {other}, must be 8, 12 or 0");
                return self.answer(reply, response::SYSTEM_ERROR, Some(&remark));
            }
        };
        let position = address::split(offset).map_or(0, |(_, position)| position);
        if let Err((code, remark)) = self.check_end(local, position, &end) {
            return self.answer(reply, code, Some(&remark));
        }
        let order = CommitOrder {
            origin: *origin,
            reply: *reply,
            frame: Vec::new(),
            local,
        };
        if wanted == HalfEnd::Committed {
            return self.commit(order, position, whole);
        }
        let Some(shard) = self.shards.get_mut(local) else {
            return;
        };
        match shard.shard.roll_back_half(self.now, position) {
            Ok(ended) => self.answer_end(reply, local, wanted, ended, offset),
            Err(refusal) => self.hold(local, origin, reply, whole, 0, Some(refusal)),
        }
    }

    /// Whether an end fits the half message it names, if that is still open.
    fn check_end(
        &self,
        local: usize,
        position: u64,
        end: &EndTransaction<'_>,
    ) -> Result<(), (i32, String)> {
        let shard = self.shards.get(local).map(|local| &local.shard);
        let Some(half) = shard.and_then(|shard| shard.half(position)) else {
            return Ok(());
        };
        let wrong = |what: &str| Err((response::SYSTEM_ERROR, what.to_owned()));
        if half.group_hash != group_hash(end.producer_group.as_bytes()) {
            return wrong("The producer group wrong");
        }
        if half.queue_offset as i64 != end.tran_state_table_offset {
            return wrong("The transaction state table offset wrong");
        }
        let age_ms = self.now.wall_ms.saturating_sub(half.stored_ms);
        let asked = end.from_transaction_check == Some(true);
        if !asked && half.immunity_ms >= 0 && age_ms > half.immunity_ms {
            let remark = format!(
                "the transaction is {age_ms} ms old, more than its CHECK_IMMUNITY_TIME_IN_SECONDS: \
                 only the answer to a check ends it"
            );
            return Err((response::ILLEGAL_OPERATION, remark));
        }
        Ok(())
    }

    /// Commits from the write buffer, or asks the disk for the half message first.
    fn commit(&mut self, mut order: CommitOrder, position: u64, whole: &[u8]) {
        let local = order.local;
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return;
        };
        let number = shard.number();
        let physical_offset = address::physical(number, position);
        if shard.half(position).is_none() {
            let ended = shard.half_ended(position);
            let (reply, wanted) = (order.reply, HalfEnd::Committed);
            return self.answer_end(&reply, local, wanted, ended, physical_offset);
        }
        let mut record = std::mem::take(&mut self.scratch.half);
        if shard.half_in_ring(position, &mut record) {
            self.commit_record(&order, &record, whole);
        } else {
            order.frame = whole.to_vec();
            let then = Then::Commit(Box::new(order));
            let question = Question::Record { physical_offset };
            self.ask_cold(local, question, ColdAsk { then, local });
        }
        self.scratch.half = record;
    }

    /// Goes on with a commit once the half message is there.
    pub fn on_commit_record(&mut self, mut order: CommitOrder, answer: Answer) {
        let record = match answer {
            Answer::Records(records) => records.into_iter().next(),
            Answer::Failed(reason) => return self.answer_read_failed(&order.reply, &reason),
            _ => None,
        };
        let Some(record) = record else {
            let remark = "Find prepared transaction message failed: its record is damaged or gone";
            return self.answer(&order.reply, response::SYSTEM_ERROR, Some(remark));
        };
        let frame = std::mem::take(&mut order.frame);
        self.commit_record(&order, &record, &frame);
    }

    fn commit_record(&mut self, order: &CommitOrder, record: &[u8], whole: &[u8]) {
        let local = order.local;
        let view = RecordView::parse(record).ok();
        let due_ms = view.and_then(|view| committed_due(view.properties(), self.now.wall_ms));
        let Some(shard) = self.shards.get_mut(local) else {
            return;
        };
        match shard.shard.commit_half(self.now, record, due_ms) {
            Ok(ended) => {
                if let (Ended::Now(HalfEnd::Committed, _), Some(view)) = (ended, &view) {
                    self.count_commit(view);
                }
                let offset = view.map_or(0, |view| view.physical_offset());
                self.answer_end(&order.reply, local, HalfEnd::Committed, ended, offset);
            }
            Err(refusal) => {
                let (origin, reply) = (order.origin, order.reply);
                self.hold(local, &origin, &reply, whole, 0, Some(refusal));
            }
        }
    }

    fn count_commit(&mut self, view: &RecordView<'_>) {
        let topic = properties::get_str(view.properties(), properties::REAL_TOPIC);
        if let Some(entry) = topic.and_then(|topic| self.directory.topics.get_mut(topic)) {
            entry.put.messages += 1;
            entry.put.bytes += view.body().len() as u64;
        }
    }

    fn answer_end(
        &mut self,
        reply: &ReplyTo,
        local: usize,
        wanted: HalfEnd,
        ended: Ended,
        offset: i64,
    ) {
        let (how, end, again) = match ended {
            Ended::Now(how, end) => (how, end, ""),
            Ended::Before(how, end) => (how, end, "already "),
            Ended::Unknown => {
                let remark = format!(
                    "Find prepared transaction message failed: no transaction is open at offset \
                     {offset}, it ended long ago or there was none"
                );
                return self.answer(reply, response::SYSTEM_ERROR, Some(&remark));
            }
        };
        let what = match how {
            HalfEnd::Committed => "committed",
            HalfEnd::RolledBack => "rolled back",
            HalfEnd::GivenUp => "given up, its message is in TRANS_CHECK_MAX_TIME_TOPIC",
            HalfEnd::Dropped => "dropped, its topic is gone or its record was damaged",
        };
        if reply.oneway {
            return;
        }
        let told = format!("the transaction at offset {offset} was {again}{what}");
        let (code, remark) = match how {
            _ if how == wanted && again.is_empty() => (response::SUCCESS, None),
            _ if how == wanted => (response::SUCCESS, Some(told.as_str())),
            HalfEnd::Dropped => (response::TOPIC_NOT_EXIST, Some(told.as_str())),
            _ => (response::SYSTEM_ERROR, Some(told.as_str())),
        };
        let mut frame = Vec::with_capacity(128);
        encode_plain(&mut frame, reply, code, remark);
        self.reply_at(reply, local, end, &frame);
    }

    /// Sends the questions of a shard to the control task, which knows the producers.
    pub fn send_half_checks(&mut self, index: usize) {
        let mut checks = Vec::new();
        if let Some(local) = self.shards.get_mut(index) {
            local.shard.take_half_checks(&mut checks);
        }
        for HalfCheck { record, number } in checks {
            if let Some(check) = CheckBack::new(&record, number) {
                self.send_to(0, MeshMessage::CheckBack(Box::new(check)));
            }
        }
    }
}
