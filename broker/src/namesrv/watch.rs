//! Owns the name server's side of the fuse: whom to probe, what is decided, and how it is shown.
//!
//! Invariant: only masters are members; the decision changes routes when they are answered and
//! nothing else. Times of the fuse are the caller's monotonic milliseconds, so that a step of the
//! clock isolates nobody.

use std::net::SocketAddr;

use serde_json::json;
use wire::header::Ext;

use super::offer::{DISK_FIELD, DiskReport};
use super::{Answer, BROKERS_MAX, MASTER_ID, NameServer};
use crate::fuse::{Fuse, FuseLimits, MemberView, Phase, Sample, Source, Transition};

/// For how long a reported wait for a disk counts in comparisons, in milliseconds: a few reports.
const OF_LATE_MS: i64 = 2_000;
/// How many times longer a broker's disk hangs than that of another that is better off.
const BETTER_FACTOR: u64 = 3;

fn is_of_late(now_ms: i64, at_ms: i64) -> bool {
    (0..OF_LATE_MS).contains(&(now_ms - at_ms))
}

/// A broker to be probed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProbeTarget {
    /// Its name, which is also the name of a topic it has.
    pub broker_name: String,
    /// Address of its master.
    pub address: SocketAddr,
}

impl NameServer {
    /// Masters to probe; none while too few brokers are there for one to be isolated, so that small
    /// clusters pay nothing. Masters registered under a host name are left out: looking names up
    /// would block.
    pub fn probe_targets(&mut self) -> Vec<ProbeTarget> {
        self.follow_settings();
        let masters = self.table.groups().filter_map(|(name, group)| {
            let address = group.addresses.get(&MASTER_ID)?.parse().ok()?;
            Some(ProbeTarget {
                broker_name: name.to_owned(),
                address,
            })
        });
        let masters: Vec<ProbeTarget> = masters.collect();
        let masters = if self.config.fuse_enable {
            masters
        } else {
            Vec::new()
        };
        self.fuse
            .set_members(masters.iter().map(|target| target.broker_name.as_str()));
        if self.fuse.isolated_max() > 0 {
            masters
        } else {
            Vec::new()
        }
    }

    fn follow_settings(&mut self) {
        let slow_ms = self.config.fuse_slow_ms;
        if self.fuse.limits().slow_ms != slow_ms {
            self.fuse = Fuse::new(FuseLimits {
                slow_ms,
                ..FuseLimits::default()
            });
        }
        self.table
            .set_isolates_ordered(self.config.fuse_ordered_topics);
    }

    /// Takes what a probe found.
    pub fn observe_probe(&mut self, now_ms: u64, broker_name: &str, sample: Sample) {
        self.fuse
            .observe(now_ms, broker_name, Source::Probe, sample);
    }

    /// Keeps what a master says of its disks until the caller names the time.
    pub(super) fn take_report(
        &mut self,
        now_ms: i64,
        ext: &Ext<'_>,
        broker_name: &str,
        broker_id: i64,
    ) {
        let report = ext.str(DISK_FIELD);
        if let Some(report) = report.as_deref().and_then(DiskReport::read)
            && broker_id == MASTER_ID
            && self.reports.len() < BROKERS_MAX
        {
            self.reports.push((broker_name.to_owned(), report));
            self.note_disk_wait(now_ms, broker_name, report.waits_ms);
        }
    }

    /// Keeps the longest wait of late, so that a disk whose every write is slow counts as slow in
    /// between, too.
    fn note_disk_wait(&mut self, now_ms: i64, broker_name: &str, waits_ms: u64) {
        if waits_ms > self.disk_wait_of(now_ms, broker_name) {
            self.disk_waits
                .insert(broker_name.to_owned(), (now_ms, waits_ms));
            let waits = &mut self.disk_waits;
            waits.retain(|_, (at_ms, _)| is_of_late(now_ms, *at_ms));
        }
    }

    fn disk_wait_of(&self, now_ms: i64, broker_name: &str) -> u64 {
        let noted = self.disk_waits.get(broker_name);
        let noted = noted.filter(|(at_ms, _)| is_of_late(now_ms, *at_ms));
        noted.map_or(0, |(_, waits_ms)| *waits_ms)
    }

    /// Takes the reports that came since the last call. A disk that hangs is decided upon at once.
    pub fn observe_reports(&mut self, now_ms: u64) {
        let mut is_bad = false;
        for (broker_name, report) in std::mem::take(&mut self.reports) {
            is_bad |= report.waits_ms > self.fuse.limits().slow_ms;
            let sample = Sample::Took(report.waits_ms.saturating_mul(1_000));
            self.fuse
                .observe(now_ms, &broker_name, Source::Report, sample);
        }
        if is_bad {
            self.watch(now_ms);
        }
    }

    /// Decides who is isolated from now on and logs each change.
    pub fn watch(&mut self, now_ms: u64) {
        self.fuse.decide(now_ms);
        let changes = self.fuse.take_transitions();
        self.fuse_transitions += changes.len() as u64;
        for (broker, change) in &changes {
            log(broker, change);
        }
        if !changes.is_empty() || self.fuse.isolated().count() != self.table.isolated().len() {
            let names = self.fuse.isolated().map(str::to_owned).collect();
            self.table.set_isolated(names);
        }
    }

    /// The state of the fuse, for `pinion fuse`.
    pub(super) fn fuse_state(&self) -> Answer {
        let members: Vec<_> = self.fuse.members().map(shown).collect();
        let limits = self.fuse.limits();
        let state = json!({
            "enabled": self.config.fuse_enable,
            "slowMs": limits.slow_ms,
            "isolatedMax": self.fuse.isolated_max(),
            "isolated": self.table.isolated(),
            "members": members,
        });
        Answer::body(state.to_string().into_bytes())
    }

    /// Brokers isolated now, and changes of the fuse's mind since the start.
    #[must_use]
    pub fn fuse_figures(&self) -> (u64, u64) {
        let isolated = self.fuse.isolated().count() as u64;
        (isolated, self.fuse_transitions)
    }

    /// Masters of a cluster besides one broker that could take its messages: not isolated, and
    /// their disks do not hang about as long as its own. Where all are slow alike, nobody has
    /// others.
    pub(super) fn peers_of(&self, now_ms: i64, cluster_name: &str, broker_name: &str) -> i64 {
        let own_ms = self.disk_wait_of(now_ms, broker_name);
        let is_better = |name: &str| match self.disk_wait_of(now_ms, name) {
            0 => true,
            waits_ms => waits_ms.saturating_mul(BETTER_FACTOR) < own_ms,
        };
        let peers = self.table.groups().filter(|(name, group)| {
            *name != broker_name
                && group.cluster_name == cluster_name
                && group.addresses.contains_key(&MASTER_ID)
                && !self.table.isolated().contains(*name)
                && is_better(name)
        });
        peers.count() as i64
    }
}

fn shown(member: MemberView<'_>) -> serde_json::Value {
    let until_ms = match member.phase {
        Phase::Open { until_ms, .. } => Some(until_ms),
        _ => None,
    };
    let history = member.history.iter();
    let history: Vec<_> = history
        .map(|change| {
            let (phase, reason) = (phase_name(change.phase), &change.reason);
            json!({"atMs": change.at_ms, "state": phase, "reason": reason})
        })
        .collect();
    json!({
        "broker": member.name,
        "state": phase_name(member.phase),
        "untilMs": until_ms,
        "p99Us": member.p99_us,
        "spared": member.spared,
        "terms": member.terms,
        "reason": member.reason,
        "history": history,
    })
}

/// The word for a phase.
#[must_use]
pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Closed => "closed",
        Phase::Open { .. } => "open",
        Phase::HalfOpen { .. } => "half-open",
    }
}

fn log(broker: &str, change: &Transition) {
    let reason = change.reason.as_str();
    match change.phase {
        Phase::Open { since_ms, until_ms } => {
            let seconds = (until_ms - since_ms) / 1000;
            tracing::warn!(
                broker,
                seconds,
                reason,
                "fuse open: broker out of the write path"
            );
        }
        Phase::HalfOpen { .. } => tracing::info!(broker, reason, "fuse half-open: broker on trial"),
        Phase::Closed => tracing::info!(broker, reason, "fuse closed: broker takes part again"),
    }
}
