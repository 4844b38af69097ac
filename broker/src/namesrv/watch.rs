//! Owns the name server's side of the fuse: whom to probe, what is decided, and how it is shown.
//!
//! Invariant: only masters are members; the decision changes routes when they are answered and
//! nothing else. Times of the fuse are the caller's monotonic milliseconds, so that a step of the
//! clock isolates nobody.

use std::net::SocketAddr;

use serde_json::json;

use super::{Answer, MASTER_ID, NameServer};
use crate::fuse::{Fuse, FuseLimits, MemberView, Phase, Sample, Source, Transition};

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

    /// Decides who is isolated from now on and logs each change.
    pub fn watch(&mut self, now_ms: u64) {
        self.fuse.decide(now_ms);
        let changes = self.fuse.take_transitions();
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

    /// The fuse, for metrics.
    pub fn fuse(&self) -> &Fuse {
        &self.fuse
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
