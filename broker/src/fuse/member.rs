//! What the fuse knows of one member: its samples by source, its phase, its history.
//!
//! Invariant: everything held has a bound, and a member with no recent sample is not bad.

use std::collections::VecDeque;

use super::{FuseLimits, Sample};

/// Samples kept of each source.
const SAMPLES_MAX: usize = 128;
/// Transitions kept of each member.
pub const HISTORY_MAX: usize = 32;
/// Samples that [`Member::recent`] looks at.
const RECENT: usize = 3;
/// A failure counts as this, in microseconds: slower than any answer.
const FAILED_US: u64 = u64::MAX / 4;

/// Who saw a sample. Each source has runs of its own: good probes do not hide a report of a disk
/// that hangs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A probe that appended a message.
    Probe,
    /// The member's own report of its disk.
    Report,
}

/// Where a member stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    /// Takes part.
    #[default]
    Closed,
    /// Isolated.
    Open {
        /// From when, in the caller's milliseconds.
        since_ms: u64,
        /// Until when.
        until_ms: u64,
    },
    /// Takes part again, on trial.
    HalfOpen {
        /// From when.
        since_ms: u64,
    },
}

/// A change of phase.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transition {
    /// When, in the caller's milliseconds.
    pub at_ms: u64,
    /// The new phase.
    pub phase: Phase,
    /// Why.
    pub reason: String,
}

#[derive(Debug, Default)]
struct Samples {
    /// Time and microseconds.
    kept: VecDeque<(u64, u64)>,
    bad_run: u32,
}

impl Samples {
    fn recent(&self) -> Option<u64> {
        self.kept.iter().rev().take(RECENT).map(|(_, us)| *us).min()
    }

    fn p99_us(&self) -> Option<u64> {
        let mut sorted: Vec<u64> = self.kept.iter().map(|(_, us)| *us).collect();
        sorted.sort_unstable();
        let at = (sorted.len() * 99).div_ceil(100).checked_sub(1)?;
        sorted.get(at).copied()
    }
}

#[derive(Debug, Default)]
pub(super) struct Member {
    probes: Samples,
    reports: Samples,
    pub(super) phase: Phase,
    pub(super) spared: bool,
    pub(super) terms: u32,
    closed_at_ms: u64,
    pub(super) reason: String,
    pub(super) history: VecDeque<Transition>,
}

impl Member {
    pub(super) fn observe(
        &mut self,
        now_ms: u64,
        source: Source,
        sample: Sample,
        limits: &FuseLimits,
    ) {
        let (us, reason) = match sample {
            Sample::Took(us) => {
                let (ms, bound) = (us / 1000, limits.slow_ms);
                let text = match source {
                    Source::Probe => format!("append took {ms} ms, bound {bound} ms"),
                    Source::Report => format!("disk write waits {ms} ms, bound {bound} ms"),
                };
                (us.min(FAILED_US), text)
            }
            Sample::Failed(text) => (FAILED_US, text),
        };
        let bad = us > limits.slow_ms * 1000;
        let samples = match source {
            Source::Probe => &mut self.probes,
            Source::Report => &mut self.reports,
        };
        if samples.kept.len() == SAMPLES_MAX {
            samples.kept.pop_front();
        }
        samples.kept.push_back((now_ms, us));
        samples.bad_run = if bad { samples.bad_run + 1 } else { 0 };
        if bad {
            self.reason = reason;
        }
    }

    pub(super) fn forget_old(&mut self, now_ms: u64, window_ms: u64) {
        for samples in [&mut self.probes, &mut self.reports] {
            let old = |at: &(u64, u64)| at.0 + window_ms < now_ms;
            while samples.kept.front().is_some_and(old) {
                samples.kept.pop_front();
            }
            if samples.kept.is_empty() {
                samples.bad_run = 0;
            }
        }
    }

    /// The best of the last samples of the worse source: slow only if all of them were.
    pub(super) fn recent(&self) -> Option<u64> {
        self.probes.recent().max(self.reports.recent())
    }

    /// How slow it is: on trial the last sample counts, else what [`Self::recent`] says.
    pub(super) fn severity(&self) -> u64 {
        let last = |samples: &Samples| samples.kept.back().map(|(_, us)| *us);
        let severity = match self.phase {
            Phase::HalfOpen { .. } => last(&self.probes).max(last(&self.reports)),
            _ => self.recent(),
        };
        severity.unwrap_or(0)
    }

    pub(super) fn p99_us(&self) -> Option<u64> {
        self.probes.p99_us().max(self.reports.p99_us())
    }

    /// Whether its samples alone would isolate it; on trial one bad sample is enough.
    pub(super) fn is_bad(&self, limits: &FuseLimits) -> bool {
        let run = self.probes.bad_run.max(self.reports.bad_run);
        match self.phase {
            Phase::Closed => run >= limits.run,
            Phase::HalfOpen { .. } => run >= 1,
            Phase::Open { .. } => false,
        }
    }

    /// Ends a term or a trial that is over.
    pub(super) fn move_on(&mut self, now_ms: u64, limits: &FuseLimits) -> Option<Transition> {
        match self.phase {
            Phase::Open { until_ms, .. } if now_ms >= until_ms => {
                let phase = Phase::HalfOpen { since_ms: now_ms };
                Some(self.change(now_ms, phase, "the term is over".to_owned()))
            }
            Phase::HalfOpen { since_ms } if now_ms >= since_ms + limits.trial_ms => {
                let healthy = self.recent().is_some() && !self.is_bad(limits);
                healthy.then(|| {
                    self.closed_at_ms = now_ms;
                    self.change(now_ms, Phase::Closed, "healthy on trial".to_owned())
                })
            }
            Phase::Closed if self.terms > 0 && now_ms >= self.closed_at_ms + limits.forget_ms => {
                self.terms = 0;
                None
            }
            _ => None,
        }
    }

    pub(super) fn open(&mut self, now_ms: u64, limits: &FuseLimits) -> Transition {
        let term_ms = limits.term_ms << self.terms.min(limits.doublings_max);
        self.terms = self.terms.saturating_add(1);
        let phase = Phase::Open {
            since_ms: now_ms,
            until_ms: now_ms + term_ms,
        };
        self.change(now_ms, phase, self.reason.clone())
    }

    fn change(&mut self, at_ms: u64, phase: Phase, reason: String) -> Transition {
        let transition = Transition {
            at_ms,
            phase,
            reason,
        };
        self.phase = phase;
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(transition.clone());
        transition
    }
}
