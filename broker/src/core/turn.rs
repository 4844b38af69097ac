//! The loop of one core: wait for the machine, handle what came, carry out what is due, send.
//!
//! Invariant: one turn does bounded work and ends with everything it produced on its way; the
//! core sleeps in the driver when nothing is due (no idle cost).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shard::runtime::{Completion, ConnectionId, Driver, ListenerId};
use wire::codes::response;
use wire::frame;
use wire::header::{self, ExtValue, Reply, encode_reply};

use super::connections::{Pressure, Purpose};
use super::jobs::JOB_TOKEN;
use super::messages::MeshMessage;
use super::replies::{Awaited, Waiting};
use super::state::State;

/// Mesh messages handled per turn; one may be a pack of frames.
const MESH_PER_TURN: usize = 256;
/// Times a shard is turned at most in one turn of the core.
const SHARD_TURNS_MAX: usize = 4;
/// How often idle connections are looked for, in microseconds.
const IDLE_SCAN_US: u64 = 10_000_000;
/// How soon a full mesh ring is tried again, in microseconds.
const MESH_RETRY_US: u64 = 100;

/// One core.
pub struct Core<D: Driver> {
    /// The machine.
    pub driver: D,
    /// Everything else.
    pub state: State,
    /// Listeners and what their connections are for.
    pub listeners: Vec<(ListenerId, Purpose)>,
    /// Set when the process is to stop.
    pub stop: Arc<AtomicBool>,
    /// Last look for idle connections.
    pub idle_scanned_us: u64,
    /// The shard that had the last turn to get a slot for a cold read.
    pub cold_turn: usize,
    /// When draining must end, once it began.
    pub drain_until_us: Option<u64>,
}

impl<D: Driver> Core<D> {
    /// Runs until the process stops and everything is on disk (or draining takes too long).
    pub fn run(&mut self) {
        loop {
            self.wait();
            self.turn();
            if self.stop.load(Ordering::Acquire) && self.drained() {
                break;
            }
        }
        for local in &mut self.state.shards {
            local.shard.finish();
        }
    }

    /// Sleeps until there is something to do.
    pub fn wait(&mut self) {
        let again = std::mem::take(&mut self.state.turn_again);
        let deadline = if again || self.state.mesh.has_pending() {
            Some(0)
        } else {
            self.deadline_us()
        };
        self.driver.wait(deadline);
    }

    /// One turn.
    pub fn turn(&mut self) {
        self.state.now = self.driver.now();
        while let Some(completion) = self.driver.next() {
            self.on_completion(completion);
        }
        self.drain_mesh();
        if self.stop.load(Ordering::Acquire) && self.drain_until_us.is_none() {
            self.begin_stop();
        }
        self.state.watch_disks();
        for index in 0..self.state.shards.len() {
            self.turn_shard(index);
        }
        self.share_cold_slots();
        self.state.settle_turn();
        self.state.expire_pulls();
        self.state.pop_turn();
        self.state.control_turn();
        self.state.name_server_turn();
        self.state.probe_turn(&mut self.driver);
        self.state.register_turn(&mut self.driver);
        self.state.start_jobs(&mut self.driver);
        self.state.retain_due(&mut self.driver);
        self.state.flush_mesh();
        self.flush_connections();
        self.state.metrics_turn();
        self.scan_idle();
    }

    /// Turns one shard until nothing that came of it appended more: what is acknowledged in a turn
    /// is readable, and on its way to disk, before the turn's answers leave.
    fn turn_shard(&mut self, index: usize) {
        for _ in 0..SHARD_TURNS_MAX {
            let Some(local) = self.state.shards.get_mut(index) else {
                return;
            };
            local.shard.turn(self.state.now, &mut self.driver);
            let tail = local.shard.log().tail();
            self.state.after_shard_turn(index);
            let moved = |local: &super::state::LocalShard| local.shard.log().tail() != tail;
            if !self.state.shards.get(index).is_some_and(moved) {
                return;
            }
        }
        self.state.turn_again = true;
    }

    /// A shard that found no slot for a cold read gets one that a neighbour has. Those that found
    /// none take turns, so that neither of two waits for the other and none is passed over.
    fn share_cold_slots(&mut self) {
        let shards = &mut self.state.shards;
        let count = shards.len();
        if count < 2 {
            return;
        }
        let mut after = (1..=count).map(|step| (self.cold_turn + step) % count);
        let next = after.find(|index| {
            let local = shards.get(*index);
            local.is_some_and(|local| local.shard.lacks_cold_slot())
        });
        for (index, local) in shards.iter_mut().enumerate() {
            let waits = next.is_some_and(|next| next != index);
            self.state.turn_again |= local.shard.share_cold_slots(&mut self.driver, waits);
        }
        self.cold_turn = next.unwrap_or(self.cold_turn);
    }

    fn drain_mesh(&mut self) {
        let mut messages = std::mem::take(&mut self.state.inbox);
        self.state.mesh.drain(
            |from, message| messages.push((from, message)),
            MESH_PER_TURN,
        );
        for (from, message) in messages.drain(..) {
            self.state.on_message(from, message);
        }
        self.state.inbox = messages;
    }

    fn on_completion(&mut self, completion: Completion) {
        match completion {
            Completion::Received { connection, buffer } => {
                let bytes = self.driver.received(buffer);
                self.state.on_bytes(connection, bytes);
                self.driver.release_received(buffer);
            }
            Completion::Sent {
                connection,
                buffer,
                result,
            } => {
                if result.is_err() {
                    self.state.to_close.push(connection.0);
                }
                let now_us = self.state.now.monotonic_us;
                let pressure = self.state.net.sent(connection.0, buffer, now_us);
                if pressure == Pressure::Resume {
                    self.driver.pause_receiving(connection, false);
                }
            }
            Completion::Accepted {
                listener,
                connection,
                peer,
            } => {
                let purpose = self.listeners.iter().find(|(id, _)| *id == listener);
                let purpose = purpose.map_or(Purpose::Broker, |(_, purpose)| *purpose);
                let now_us = self.state.now.monotonic_us;
                self.state.net.insert(connection, purpose, peer, now_us);
            }
            Completion::Connected { connection } => {
                let purpose = self.state.net.get(connection.0).map(|found| found.purpose);
                match purpose {
                    Some(Purpose::Registration(index)) => {
                        self.state.registration_up(index, connection);
                    }
                    Some(Purpose::Probe(number)) => self.state.probe_up(number, connection),
                    _ => {}
                }
            }
            Completion::Closed { connection, .. } => self.state.on_closed(connection),
            other => self.on_disk_completion(other),
        }
    }

    /// What the disk or a helper thread has finished goes to the shard that asked for it.
    fn on_disk_completion(&mut self, completion: Completion) {
        let mut completion = completion;
        for local in &mut self.state.shards {
            let now = self.state.now;
            match local.shard.on_completion(now, &mut self.driver, completion) {
                Some(back) => completion = back,
                None => return,
            }
        }
        if let Completion::Job { token, result } = completion
            && token == JOB_TOKEN
        {
            self.state
                .on_job(result.map(|_| ()).map_err(|error| error.to_string()));
        }
    }

    fn flush_connections(&mut self) {
        let driver = &mut self.driver;
        let mut presses = Vec::new();
        self.state.net.flush(
            |connection, bytes| driver.send(connection, bytes),
            |connection, pressure| presses.push((connection, pressure)),
        );
        for (connection, pressure) in presses {
            match pressure {
                Pressure::Pause => self.driver.pause_receiving(connection, true),
                Pressure::Close => {
                    self.state.counters.slow_closed += 1;
                    self.driver.close(connection);
                }
                _ => {}
            }
        }
        for connection in std::mem::take(&mut self.state.to_close) {
            self.driver.close(ConnectionId(connection));
        }
    }

    fn scan_idle(&mut self) {
        let now_us = self.state.now.monotonic_us;
        if now_us < self.idle_scanned_us + IDLE_SCAN_US {
            return;
        }
        self.idle_scanned_us = now_us;
        self.state.net.shrink_idle(now_us - IDLE_SCAN_US);
        let idle_us = u64::from(self.state.config.connection_idle_max_s) * 1_000_000;
        let idle = self.state.net.iter().filter(|(_, connection)| {
            connection.purpose != Purpose::Registration(0)
                && now_us > connection.active_us + idle_us
        });
        let idle: Vec<u64> = idle.map(|(id, _)| id).collect();
        for connection in idle {
            self.driver.close(ConnectionId(connection));
        }
    }

    fn deadline_us(&self) -> Option<u64> {
        let state = &self.state;
        let now = state.now;
        let second = (state.control.is_some() || state.name_server.is_some())
            .then_some(now.monotonic_us + 1_000_000);
        let period_us = state.config.register_period_ms * 1000;
        let registrar = state
            .control
            .as_ref()
            .and_then(|task| task.registrar.deadline_us(period_us));
        let probes = state
            .name_server
            .as_ref()
            .and_then(|task| task.prober.deadline_us());
        let mesh = state
            .mesh_is_behind()
            .then_some(now.monotonic_us + MESH_RETRY_US);
        let idle = Some(self.idle_scanned_us + IDLE_SCAN_US);
        let drain = self.drain_until_us.map(|_| now.monotonic_us + 2_000);
        let all = [
            self.shards_deadline_us(),
            second,
            registrar,
            probes,
            mesh,
            idle,
            drain,
            state.pulls.deadline_us(),
            state.pop.deadline_us(),
        ];
        all.into_iter().flatten().min()
    }

    /// When something is due for a shard, its disk or those who wait for it.
    fn shards_deadline_us(&self) -> Option<u64> {
        let state = &self.state;
        let shards = state.shards.iter();
        let own = shards
            .clone()
            .filter_map(|local| local.shard.deadline_us(state.now))
            .min();
        let flush = shards
            .clone()
            .filter_map(|local| local.replies.front())
            .map(|waiting| waiting.since_us + state.hot.sync_flush_timeout_us)
            .min();
        let held = shards
            .filter_map(|local| local.held.deadline_us(state.hot.send_wait_us))
            .min();
        let limit_us = state.hot.fuse_shard_us;
        let disks = state.disks.deadline_us(&state.shards, limit_us);
        let reports = state.control.as_ref();
        let reports = reports.and_then(|_| state.disks.report_deadline_us());
        [own, flush, held, disks, reports]
            .into_iter()
            .flatten()
            .min()
    }

    fn begin_stop(&mut self) {
        let drain_us = self.state.config.drain_ms * 1000;
        self.drain_until_us = Some(self.state.now.monotonic_us + drain_us);
        self.state.stopping = true;
        self.state.unregister();
        self.state.save_offsets();
        for (listener, _) in std::mem::take(&mut self.listeners) {
            self.driver.close_listener(listener);
        }
        for local in &mut self.state.shards {
            local.shard.stop(self.state.now, &mut self.driver);
        }
    }

    fn drained(&mut self) -> bool {
        let Some(until) = self.drain_until_us else {
            return false;
        };
        let base_done = self
            .state
            .shards
            .iter()
            .all(|local| local.replies.is_empty() && local.shard.is_drained());
        let control = self.state.control.as_ref();
        let settled = self.state.jobs.is_idle() && control.is_none_or(|task| task.is_settled());
        if base_done && settled && !self.state.net.has_unsent() {
            return true;
        }
        for local in &mut self.state.shards {
            local.shard.stop(self.state.now, &mut self.driver);
        }
        self.state.now.monotonic_us > until
    }
}

impl State {
    /// Work that a shard's turn made possible: woken pulls, disk answers, released answers.
    pub fn after_shard_turn(&mut self, index: usize) {
        let mut woken = std::mem::take(&mut self.scratch.woken);
        let mut answers = std::mem::take(&mut self.scratch.answers);
        if let Some(local) = self.shards.get_mut(index) {
            local.shard.take_woken(&mut woken);
            local.shard.take_answers(&mut answers);
        }
        self.release_replies(index);
        self.replay_held(index);
        for token in woken.drain(..) {
            self.on_woken(token);
        }
        for (token, answer) in answers.drain(..) {
            self.on_cold_answer(token, answer);
        }
        self.scratch.woken = woken;
        self.scratch.answers = answers;
        self.pop_after_shard_turn(index);
        let checks = |local: &super::state::LocalShard| local.shard.has_half_checks();
        if self.shards.get(index).is_some_and(checks) {
            self.send_half_checks(index);
        }
    }

    /// Lets answers go whose messages the watermark has passed.
    fn release_replies(&mut self, index: usize) {
        let now_us = self.now.monotonic_us;
        let timeout_us = self.hot.sync_flush_timeout_us;
        let Some(local) = self.shards.get_mut(index) else {
            return;
        };
        if local.replies.is_empty() {
            return;
        }
        let mut replies = std::mem::take(&mut local.replies);
        let watermark = local.shard.watermark();
        let poison = local.shard.log().poison().map(str::to_owned);
        loop {
            let mut passed = false;
            let taken = replies.take(|waiting| {
                passed = waiting.end <= watermark;
                passed || poison.is_some() || now_us > waiting.since_us + timeout_us
            });
            let Some((waiting, frame)) = taken else { break };
            if waiting.awaited == Awaited::GivenBack {
                continue;
            }
            if passed {
                if let Some(local) = self.shards.get_mut(index) {
                    let waited_us = now_us.saturating_sub(waiting.since_us);
                    local.latency.record(waited_us);
                }
                self.deliver(waiting.to.link, frame);
            } else if let Some(reason) = &poison {
                let remark = format!("disk: {reason}");
                self.answer(&waiting.to, response::SERVICE_NOT_AVAILABLE, Some(&remark));
            } else {
                self.answer_flush_timeout(&waiting, frame);
            }
        }
        // Delivering an answer adds none, so nothing was put in its place meanwhile.
        if let Some(local) = self.shards.get_mut(index) {
            debug_assert!(local.replies.is_empty());
            local.replies = replies;
        }
    }

    /// The flush takes too long: the message is in the log, but not known to be on disk.
    fn answer_flush_timeout(&mut self, waiting: &Waiting, encoded: &[u8]) {
        let Ok(Some((parsed, _))) = frame::split(encoded, frame::FRAME_BYTES_MAX) else {
            return;
        };
        let Ok(head) = header::decode(&parsed) else {
            return;
        };
        let fields: Vec<(String, String)> = head
            .ext
            .iter()
            .map(|(name, value)| (name.to_cow().into_owned(), value.to_cow().into_owned()))
            .collect();
        let ext: Vec<(&str, ExtValue<'_>)> = fields
            .iter()
            .map(|(name, value)| (name.as_str(), ExtValue::Str(value)))
            .collect();
        let remark = "disk: the flush takes longer than syncFlushTimeout";
        let reply = Reply {
            code: response::FLUSH_DISK_TIMEOUT,
            opaque: waiting.to.opaque,
            remark: Some(remark),
            ext: &ext,
        };
        let mut out = Vec::with_capacity(encoded.len() + 128);
        encode_reply(&mut out, waiting.to.serialization, &reply, &[]);
        self.deliver(waiting.to.link, &out);
    }

    /// A connection is gone.
    pub fn on_closed(&mut self, id: ConnectionId) {
        let Some(connection) = self.net.remove(id.0) else {
            return;
        };
        match connection.purpose {
            Purpose::Registration(index) => self.registration_down(index),
            Purpose::Probe(number) => self.probe_down(number, id),
            Purpose::NameServer => {
                let now_ms = self.now.wall_ms;
                if let Some(task) = &mut self.name_server {
                    task.server.connection_closed(now_ms, id.0);
                }
            }
            Purpose::Broker => {
                let link = self.link(id.0);
                self.send_to(0, MeshMessage::Closed(link));
            }
        }
    }
}
