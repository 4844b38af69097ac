//! The online fuse: which brokers stay out of the write path, until when, and why.
//!
//! A member is isolated when it is slow or fails in a row **and** is much slower than the others.
//! Isolation is decided from samples alone: probes that pass through the append path, and what
//! brokers report of their own disks.
//!
//! Invariants: no I/O, no clock, no runtime; never more than [`SHARE_PERCENT_MAX`] percent of the
//! members are isolated, the worst first; a first isolation lasts exactly [`FuseLimits::term_ms`];
//! nobody is isolated when all are equally slow; no back-off is for ever.

pub mod disk;
mod member;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use member::Member;
pub use member::{HISTORY_MAX, Phase, Source, Transition};

/// Most members that may be isolated at the same time, in percent of all, rounded down.
pub const SHARE_PERCENT_MAX: usize = 30;
/// Transitions kept until the caller takes them.
const UNTAKEN_MAX: usize = 1_024;

/// What the fuse decides by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FuseLimits {
    /// A sample above this is bad, in milliseconds.
    pub slow_ms: u64,
    /// Bad samples in a row that make a member sick: one outlier never does.
    pub run: u32,
    /// How many times slower than the faster quarter of the others a sick member is.
    pub factor: u64,
    /// First isolation, in milliseconds.
    pub term_ms: u64,
    /// Largest number of doublings of the term for a member that flaps.
    pub doublings_max: u32,
    /// Health that makes a member's earlier isolations forgotten, in milliseconds.
    pub forget_ms: u64,
    /// Trial after a term, with write permission but one bad sample from the next term.
    pub trial_ms: u64,
    /// Age beyond which a sample says nothing any more, in milliseconds.
    pub window_ms: u64,
}

impl Default for FuseLimits {
    fn default() -> Self {
        Self {
            slow_ms: 500,
            run: 3,
            factor: 3,
            term_ms: 60_000,
            doublings_max: 3,
            forget_ms: 600_000,
            trial_ms: 10_000,
            window_ms: 10_000,
        }
    }
}

/// What was seen of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sample {
    /// It answered, after this many microseconds; or its oldest write waits that long.
    Took(u64),
    /// It refused, reset or did not answer in time.
    Failed(String),
}

/// A member as shown to operators.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Closed, open or on trial.
    pub phase: Phase,
    /// Slowest source's 99th percentile over the window, in microseconds; none without samples.
    pub p99_us: Option<u64>,
    /// Whether it deserves isolation and stays because the share is used up.
    pub spared: bool,
    /// Isolations that still lengthen the next one.
    pub terms: u32,
    /// What was last wrong with it.
    pub reason: &'a str,
    /// The last transitions, oldest first.
    pub history: &'a VecDeque<Transition>,
}

/// The fuse over a set of members.
#[derive(Debug, Default)]
pub struct Fuse {
    limits: FuseLimits,
    members: BTreeMap<String, Member>,
    untaken: VecDeque<(String, Transition)>,
}

impl Fuse {
    /// A fuse without members.
    #[must_use]
    pub fn new(limits: FuseLimits) -> Self {
        Self {
            limits,
            members: BTreeMap::new(),
            untaken: VecDeque::new(),
        }
    }

    /// What it decides by.
    #[must_use]
    pub fn limits(&self) -> &FuseLimits {
        &self.limits
    }

    /// Sets who belongs to the cluster; what is known of those that stay is kept.
    pub fn set_members<'a>(&mut self, names: impl Iterator<Item = &'a str>) {
        let mut kept = BTreeMap::new();
        for name in names {
            let known = self.members.remove(name);
            kept.insert(name.to_owned(), known.unwrap_or_default());
        }
        self.members = kept;
    }

    /// Most members that may be isolated now.
    #[must_use]
    pub fn isolated_max(&self) -> usize {
        self.members.len() * SHARE_PERCENT_MAX / 100
    }

    /// Takes a sample of a member; one of a stranger is ignored.
    pub fn observe(&mut self, now_ms: u64, name: &str, source: Source, sample: Sample) {
        if let Some(member) = self.members.get_mut(name) {
            member.observe(now_ms, source, sample, &self.limits);
        }
    }

    /// Ends terms and trials that are over and begins new ones.
    pub fn decide(&mut self, now_ms: u64) {
        for (name, member) in &mut self.members {
            member.forget_old(now_ms, self.limits.window_ms);
            if let Some(transition) = member.move_on(now_ms, &self.limits) {
                note(&mut self.untaken, name, transition);
            }
        }
        let mut sick = self.sick();
        // The worst first; the name decides between equals, so that name servers that saw the same
        // decide the same.
        sick.sort_by(|(a, worse), (b, other)| other.cmp(worse).then_with(|| a.cmp(b)));
        let room = self.isolated_max().saturating_sub(self.isolated().count());
        for (place, (name, _)) in sick.iter().enumerate() {
            let Some(member) = self.members.get_mut(name) else {
                continue;
            };
            member.spared = place >= room;
            if !member.spared {
                let transition = member.open(now_ms, &self.limits);
                note(&mut self.untaken, name, transition);
            }
        }
    }

    /// Members that deserve isolation and are not isolated, with how slow they are.
    fn sick(&mut self) -> Vec<(String, u64)> {
        let mut recent: Vec<u64> = self.members.values().filter_map(Member::recent).collect();
        recent.sort_unstable();
        let mut sick = Vec::new();
        for (name, member) in &mut self.members {
            member.spared = false;
            let (true, Some(own)) = (member.is_bad(&self.limits), member.recent()) else {
                continue;
            };
            let severity = member.severity();
            let others = faster_quarter(&recent, own);
            if others.is_some_and(|others| severity / self.limits.factor > others) {
                sick.push((name.clone(), severity));
            }
        }
        sick
    }

    /// Members without write permission now.
    pub fn isolated(&self) -> impl Iterator<Item = &str> {
        let open = |member: &Member| matches!(member.phase, Phase::Open { .. });
        self.members
            .iter()
            .filter(move |(_, member)| open(member))
            .map(|(name, _)| name.as_str())
    }

    /// What changed since the last call, oldest first.
    pub fn take_transitions(&mut self) -> VecDeque<(String, Transition)> {
        std::mem::take(&mut self.untaken)
    }

    /// All members, for operators.
    pub fn members(&self) -> impl Iterator<Item = MemberView<'_>> {
        self.members.iter().map(|(name, member)| MemberView {
            name,
            phase: member.phase,
            p99_us: member.p99_us(),
            spared: member.spared,
            terms: member.terms,
            reason: &member.reason,
            history: &member.history,
        })
    }
}

fn note(untaken: &mut VecDeque<(String, Transition)>, name: &str, transition: Transition) {
    if untaken.len() == UNTAKEN_MAX {
        untaken.pop_front();
    }
    untaken.push_back((name.to_owned(), transition));
}

/// The value of the faster quarter of the members other than one of `own`; none without others.
/// With a quarter as the measure even three sick ones of four are told from the healthy one.
fn faster_quarter(sorted: &[u64], own: u64) -> Option<u64> {
    let others = sorted.len().checked_sub(1)?;
    let at = others.checked_sub(1)? / 4;
    let left_out = sorted.partition_point(|value| *value < own);
    sorted.get(at + usize::from(left_out <= at)).copied()
}
