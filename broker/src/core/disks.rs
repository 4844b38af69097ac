//! The disks under this core's shards: which of them hang, what that does to sends, who is told.
//!
//! A send to a shard whose disk hangs is refused at once where the cluster has other brokers for
//! it; a broker that is alone lets it wait, because nobody else could take it. Sends that are
//! stored already wait for the disk a moment longer and are then given back, so that their clients
//! have time left for another broker; what they stored may come twice then. Everything but sends
//! goes on.
//!
//! Every core knows which shards hang, for sends that name no queue; the first core tells the name
//! servers.
//!
//! Invariant: a healthy disk costs a send one comparison; what is refused was not stored, and what
//! was stored and given back is said to be.

use std::collections::VecDeque;

use serde_json::json;
use shard::{AckPoint, Refusal};
use wire::codes::response;
use wire::header::{Reply, encode_reply};

use super::messages::{MeshMessage, ReplyTo};
use super::state::{LocalShard, State};
use crate::fuse::disk::{DiskChange, DiskFuse, DiskWait};
use crate::namesrv::offer::DiskReport;

/// How often name servers are told of a disk that hangs, in microseconds: as often as they probe.
const REPORT_US: u64 = 300_000;
/// Shortest time between two lines that tell whether there are other brokers, in microseconds.
const PEERS_TELL_US: u64 = 10_000_000;
/// Changes kept for operators.
const HISTORY_MAX: usize = 32;

/// What cores tell each other of disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskNews {
    /// The oldest write to a shard's disk waits since a time in monotonic microseconds, which is
    /// too long, or the disk works again.
    Shard {
        /// Shard.
        shard: u16,
        /// Since when; none: it works again.
        since_us: Option<u64>,
        /// How long the oldest write waits or had waited, in milliseconds.
        age_ms: u64,
    },
    /// Whether the cluster has other brokers that take messages.
    Peers(bool),
}

#[derive(Debug, Default)]
struct LocalDisk {
    fuse: DiskFuse,
    refused: u64,
    given_back: u64,
    /// Since when the write hangs whose sends were given back.
    gave_back_us: Option<u64>,
}

impl LocalDisk {
    /// When sends that wait for it have to be given back.
    fn gives_back_at_us(&self, limit_us: u64) -> Option<u64> {
        if self.gave_back_us == self.fuse.hangs_since_us() {
            return None;
        }
        self.fuse.gives_back_at_us(limit_us)
    }
}

/// What is known of the disk of a shard of this core.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalFigures {
    /// Whether it hangs.
    pub hangs: bool,
    /// Sends refused for it.
    pub refused: u64,
    /// Sends given back that were stored.
    pub given_back: u64,
    /// Times it began or ended to hang.
    pub transitions: u64,
}

/// What a core knows of disks.
#[derive(Debug, Default)]
pub struct Disks {
    local: Vec<LocalDisk>,
    is_local_slow: bool,
    /// Before this time no disk that works can be found to hang.
    look_at_us: u64,
    /// Shards of the whole broker that hang, and since when.
    slow: Vec<(u16, u64)>,
    has_peers: bool,
    peers_told_us: Option<u64>,
    is_report_due: bool,
    reported_us: u64,
    /// Time, shard, whether it hangs from then on, how long the oldest write waited.
    history: VecDeque<(i64, u16, bool, u64)>,
}

fn wait_of(local: &LocalShard) -> DiskWait {
    let log = local.shard.log();
    DiskWait {
        write_since_us: log.oldest_write_since_us(),
        flush_since_us: log.oldest_flush_since_us(),
    }
}

impl Disks {
    /// For a core with so many shards.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        Self {
            local: (0..shards).map(|_| LocalDisk::default()).collect(),
            ..Self::default()
        }
    }

    /// Whether sends to some shard of this core are refused instead of waiting.
    #[inline]
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.is_local_slow && self.has_peers
    }

    /// Whether the cluster has other brokers that take messages.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.has_peers
    }

    /// Whether the disk of a shard of this broker hangs.
    #[must_use]
    pub fn is_slow(&self, shard: u16) -> bool {
        self.slow.iter().any(|(slow, _)| *slow == shard)
    }

    /// Figures of a shard of this core.
    #[must_use]
    pub fn figures(&self, local: usize) -> LocalFigures {
        let disk = self.local.get(local);
        disk.map_or(LocalFigures::default(), |disk| LocalFigures {
            hangs: disk.fuse.hangs_since_us().is_some(),
            refused: disk.refused,
            given_back: disk.given_back,
            transitions: disk.fuse.transitions(),
        })
    }

    /// When a disk has to be looked at again, in monotonic microseconds.
    #[must_use]
    pub fn deadline_us(&self, shards: &[LocalShard], limit_us: u64) -> Option<u64> {
        let disks = self.local.iter().zip(shards);
        let looks =
            disks.filter_map(|(disk, local)| disk.fuse.deadline_us(wait_of(local), limit_us));
        let looks = looks.min();
        if !self.refuses() {
            return looks;
        }
        let disks = self.local.iter();
        let gives_back = disks.filter_map(|disk| disk.gives_back_at_us(limit_us));
        looks.into_iter().chain(gives_back).min()
    }

    /// When name servers have to be told next, on the first core.
    #[must_use]
    pub fn report_deadline_us(&self) -> Option<u64> {
        if self.is_report_due {
            return Some(0);
        }
        (!self.slow.is_empty()).then(|| self.reported_us + REPORT_US)
    }

    /// What name servers are told.
    #[must_use]
    pub fn report(&self, now_us: u64) -> DiskReport {
        let oldest = self.slow.iter().min_by_key(|(_, since_us)| *since_us);
        oldest.map_or(DiskReport::default(), |(shard, since_us)| DiskReport {
            waits_ms: now_us.saturating_sub(*since_us) / 1000,
            shard: *shard,
        })
    }

    /// Whether name servers have to be told now.
    pub fn take_report_due(&mut self, now_us: u64) -> bool {
        let is_due = self.report_deadline_us().is_some_and(|at| now_us >= at);
        if is_due {
            self.is_report_due = false;
            self.reported_us = now_us;
        }
        is_due
    }

    fn note(&mut self, wall_ms: i64, shard: u16, since_us: Option<u64>, age_ms: u64) {
        let (was_slow, hangs) = (self.is_slow(shard), since_us.is_some());
        self.slow.retain(|(slow, _)| *slow != shard);
        self.slow.extend(since_us.map(|since_us| (shard, since_us)));
        if was_slow == hangs {
            return;
        }
        self.is_report_due = true;
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back((wall_ms, shard, hangs, age_ms));
    }
}

impl State {
    /// Looks at the disks of this core's shards and tells what changed.
    pub fn watch_disks(&mut self) {
        let (now_us, limit_us) = (self.now.monotonic_us, self.hot.fuse_shard_us);
        // A write that has begun since the last look has its whole time before it.
        if now_us < self.disks.look_at_us && !self.disks.is_local_slow {
            return;
        }
        let (mut is_slow, mut look_at_us) = (false, now_us + limit_us);
        for index in 0..self.shards.len() {
            let local = self.shards.get(index);
            let (Some(local), Some(disk)) = (local, self.disks.local.get_mut(index)) else {
                continue;
            };
            let wait = wait_of(local);
            let change = disk.fuse.look(now_us, wait, limit_us);
            let due_us = disk.fuse.deadline_us(wait, limit_us);
            look_at_us = look_at_us.min(due_us.unwrap_or(u64::MAX));
            is_slow |= disk.fuse.hangs_since_us().is_some();
            if let Some(change) = change {
                let (shard, transitions) = (local.shard.number(), disk.fuse.transitions());
                self.on_disk_change(shard, change, transitions);
            }
        }
        self.disks.is_local_slow = is_slow;
        self.disks.look_at_us = look_at_us;
        if self.disks.refuses() {
            self.give_back_sends();
        }
    }

    /// Answers the sends that have waited too long for a disk that hangs.
    fn give_back_sends(&mut self) {
        let (now_us, limit_us) = (self.now.monotonic_us, self.hot.fuse_shard_us);
        for index in 0..self.shards.len() {
            let (Some(local), Some(disk)) =
                (self.shards.get_mut(index), self.disks.local.get_mut(index))
            else {
                continue;
            };
            let at_us = disk.gives_back_at_us(limit_us);
            if at_us.is_none_or(|at_us| now_us < at_us) {
                continue;
            }
            disk.gave_back_us = disk.fuse.hangs_since_us();
            let mut sends = Vec::new();
            local.replies.give_back(|to| sends.push(*to));
            disk.given_back += sends.len() as u64;
            let Some(refusal) = self.hanging(index) else {
                continue;
            };
            let remark = format!("{refusal}; the message is in the log and may come twice");
            for to in sends {
                self.answer(&to, response::SERVICE_NOT_AVAILABLE, Some(&remark));
            }
        }
    }

    fn on_disk_change(&mut self, shard: u16, change: DiskChange, transitions: u64) {
        let (age_ms, since_us) = (change.age_ms, change.hangs_since_us);
        let limit_ms = self.hot.fuse_shard_us / 1000;
        if change.is_told && since_us.is_some() {
            let refuses = self.disks.has_peers;
            tracing::warn!(shard, age_ms, limit_ms, refuses, transitions, "disk hangs");
        } else if change.is_told {
            tracing::info!(shard, age_ms, transitions, "disk works again");
        }
        self.tell_disk_news(DiskNews::Shard {
            shard,
            since_us,
            age_ms,
        });
    }

    fn tell_disk_news(&mut self, news: DiskNews) {
        for core in 0..self.mesh.cores() {
            self.send_to(core, MeshMessage::Disk(news));
        }
    }

    /// Takes what a core has found out, or the first core heard from name servers.
    pub fn on_disk_news(&mut self, news: DiskNews) {
        match news {
            DiskNews::Shard {
                shard,
                since_us,
                age_ms,
            } => self.disks.note(self.now.wall_ms, shard, since_us, age_ms),
            DiskNews::Peers(has_peers) => {
                self.disks.has_peers = has_peers;
                // What was let wait while this broker was alone may be given back now.
                for disk in &mut self.disks.local {
                    disk.gave_back_us = None;
                }
            }
        }
    }

    /// Takes note whether name servers know other brokers of the cluster that take messages.
    pub fn set_peers(&mut self, has_peers: bool) {
        if self.disks.has_peers != has_peers {
            let does = if has_peers {
                "sends to a disk that hangs are refused: other brokers take them"
            } else {
                "sends to a disk that hangs wait: no other broker could take them"
            };
            // Disks that are slow everywhere make it change often.
            let now_us = self.now.monotonic_us;
            let told_us = self.disks.peers_told_us;
            if told_us.is_none_or(|told_us| now_us >= told_us + PEERS_TELL_US) {
                self.disks.peers_told_us = Some(now_us);
                tracing::info!("{does}");
            }
            self.tell_disk_news(DiskNews::Peers(has_peers));
        }
    }

    /// Why a send to a shard is refused without waiting for its disk, if it is. A one-way send is
    /// taken: its sender would not hear of the refusal. Under ASYNC_FLUSH nothing waits.
    pub fn hanging_disk(&mut self, local: usize, reply: &ReplyTo) -> Option<Refusal> {
        let shard = &self.shards.get(local)?.shard;
        if reply.oneway || shard.log().config().ack == AckPoint::Buffered {
            return None;
        }
        self.disk_hangs(local)
    }

    /// The refusal of a send that could only wait for a disk that hangs, counted; none when the
    /// disk does not, or when this broker is alone.
    pub fn disk_hangs(&mut self, local: usize) -> Option<Refusal> {
        if !self.disks.refuses() {
            return None;
        }
        let refusal = self.hanging(local)?;
        self.disks.local.get_mut(local)?.refused += 1;
        Some(refusal)
    }

    fn hanging(&self, local: usize) -> Option<Refusal> {
        let since_us = self.disks.local.get(local)?.fuse.hangs_since_us()?;
        Some(Refusal::DiskHangs {
            shard: self.shards.get(local)?.shard.number(),
            age_ms: self.now.monotonic_us.saturating_sub(since_us) / 1000,
            limit_ms: self.hot.fuse_shard_us / 1000,
        })
    }

    /// Answers `pinion fuse` on the first core.
    pub fn answer_fuse_state(&mut self, reply: &ReplyTo) {
        let now_us = self.now.monotonic_us;
        let shards = self.metrics.disk_figures().into_iter().enumerate();
        let shards = shards.map(|(number, figures)| {
            let slow = self.disks.slow.iter();
            let mut slow = slow.filter(|(shard, _)| usize::from(*shard) == number);
            let waits_ms = slow
                .next()
                .map(|(_, since)| now_us.saturating_sub(*since) / 1000);
            json!({
                "shard": number,
                "hangs": waits_ms.is_some(),
                "waitsMs": waits_ms.unwrap_or(0),
                "writeP99Us": figures.write_p99_us,
                "refused": figures.refused,
                "givenBack": figures.given_back,
                "transitions": figures.transitions,
            })
        });
        let history = self.disks.history.iter();
        let history = history.map(|(at_ms, shard, hangs, age_ms)| {
            json!({"atMs": at_ms, "shard": shard, "hangs": hangs, "waitedMs": age_ms})
        });
        let state = json!({
            "broker": self.config.broker_name.0,
            "limitMs": self.hot.fuse_shard_us / 1000,
            "hasPeers": self.disks.has_peers,
            "shards": shards.collect::<Vec<_>>(),
            "history": history.collect::<Vec<_>>(),
        });
        let head = Reply {
            code: response::SUCCESS,
            opaque: reply.opaque,
            remark: None,
            ext: &[],
        };
        let mut frame = Vec::new();
        let body = state.to_string().into_bytes();
        encode_reply(&mut frame, reply.serialization, &head, &body);
        self.deliver(reply.link, &frame);
    }
}
