//! The fuse under made and random histories.

use proptest::prelude::*;

use super::*;

const STEP_MS: u64 = 300;

struct Cluster {
    fuse: Fuse,
    now_ms: u64,
    names: Vec<String>,
}

impl Cluster {
    fn of(members: usize) -> Self {
        let names: Vec<String> = (0..members).map(|n| format!("broker-{n}")).collect();
        let mut fuse = Fuse::new(FuseLimits::default());
        fuse.set_members(names.iter().map(String::as_str));
        Self {
            fuse,
            now_ms: 1_000,
            names,
        }
    }

    /// One sample of each member, then a decision.
    fn step(&mut self, sample_of: impl Fn(usize) -> Sample) {
        for (index, name) in self.names.iter().enumerate() {
            self.fuse
                .observe(self.now_ms, name, Source::Probe, sample_of(index));
        }
        self.fuse.decide(self.now_ms);
        self.now_ms += STEP_MS;
    }

    fn run(&mut self, ms: u64, sample_of: impl Fn(usize) -> Sample) {
        let end_ms = self.now_ms + ms;
        while self.now_ms < end_ms {
            self.step(&sample_of);
        }
    }

    fn isolated(&self) -> Vec<&str> {
        self.fuse.isolated().collect()
    }
}

fn fast() -> Sample {
    Sample::Took(800)
}

fn slow() -> Sample {
    Sample::Took(900_000)
}

fn failed() -> Sample {
    Sample::Failed("no answer in 600 ms".to_owned())
}

/// Members below `sick` are slow, the others healthy.
fn first_sick(sick: usize) -> impl Fn(usize) -> Sample {
    move |index| if index < sick { slow() } else { fast() }
}

#[test]
fn one_slow_of_four_is_isolated_after_a_run_and_back_after_exactly_a_minute() {
    let mut cluster = Cluster::of(4);
    cluster.run(5_000, |_| fast());
    cluster.step(first_sick(1));
    cluster.step(first_sick(1));
    assert_eq!(cluster.isolated(), [""; 0], "two samples are no run");
    let opened_ms = cluster.now_ms;
    cluster.step(first_sick(1));
    assert_eq!(cluster.isolated(), ["broker-0"]);
    while !cluster.isolated().is_empty() {
        cluster.step(|_| fast());
    }
    let closed_ms = cluster.now_ms - STEP_MS;
    assert_eq!(closed_ms - opened_ms, 60_000);
    cluster.run(11_000, |_| fast());
    let phases: Vec<Phase> = cluster.fuse.members().map(|member| member.phase).collect();
    assert_eq!(phases, [Phase::Closed; 4]);
}

#[test]
fn one_outlier_or_none_at_all_isolates_nobody() {
    let mut cluster = Cluster::of(10);
    for round in 0..200 {
        cluster.step(|index| {
            if index == round % 10 {
                failed()
            } else {
                fast()
            }
        });
        assert!(cluster.isolated().is_empty());
    }
    cluster.now_ms += 600_000;
    cluster.fuse.decide(cluster.now_ms);
    assert!(cluster.isolated().is_empty());
}

#[test]
fn clusters_of_three_and_fewer_isolate_nobody() {
    for members in 0..=3 {
        let mut cluster = Cluster::of(members);
        cluster.run(30_000, |index| if index == 0 { failed() } else { fast() });
        assert!(cluster.isolated().is_empty(), "{members} members");
    }
}

#[test]
fn at_most_thirty_percent_go_and_the_worst_go_first() {
    let mut cluster = Cluster::of(7);
    cluster.run(10_000, |index| match index {
        0 => slow(),
        1 => failed(),
        2 => Sample::Took(2_000_000),
        3 => slow(),
        _ => fast(),
    });
    assert_eq!(cluster.isolated(), ["broker-1", "broker-2"]);
    let spared: Vec<&str> = cluster
        .fuse
        .members()
        .filter(|member| member.spared)
        .map(|member| member.name)
        .collect();
    assert_eq!(spared, ["broker-0", "broker-3"]);

    let mut cluster = Cluster::of(4);
    cluster.run(10_000, first_sick(2));
    assert_eq!(cluster.isolated(), ["broker-0"]);
}

#[test]
fn nobody_is_isolated_when_all_are_equally_slow_or_all_fail() {
    for sample in [slow(), failed()] {
        let mut cluster = Cluster::of(8);
        cluster.run(120_000, |_| sample.clone());
        assert!(cluster.isolated().is_empty(), "{sample:?}");
    }
    // Seven slow ones of eight are told from the fast one, and the share holds.
    let mut cluster = Cluster::of(8);
    cluster.run(10_000, first_sick(7));
    assert!(cluster.isolated().len() <= 2);
}

#[test]
fn a_flapping_member_waits_longer_each_time_but_never_for_ever() {
    let mut cluster = Cluster::of(4);
    let mut terms = Vec::new();
    for _ in 0..6 {
        cluster.run(3_000, first_sick(1));
        let began_ms = cluster.now_ms;
        while !cluster.isolated().is_empty() {
            cluster.step(|_| fast());
        }
        terms.push((cluster.now_ms - began_ms) / 60_000);
        cluster.run(12_000, |_| fast());
    }
    assert_eq!(
        terms,
        [0, 1, 3, 7, 7, 7],
        "whole minutes beyond the run itself"
    );
    cluster.run(700_000, |_| fast());
    cluster.run(1_500, first_sick(1));
    let view = cluster.fuse.members().next().unwrap();
    let Phase::Open { since_ms, until_ms } = view.phase else {
        panic!("it is isolated again: {view:?}");
    };
    assert_eq!(until_ms - since_ms, 60_000, "health makes forget");
}

#[test]
fn a_member_still_sick_at_the_end_of_its_term_stays_out() {
    let mut cluster = Cluster::of(4);
    cluster.run(59_000, first_sick(1));
    let mut changes = cluster.fuse.take_transitions().len();
    assert_eq!(changes, 1);
    cluster.run(10_000, first_sick(1));
    assert_eq!(cluster.isolated(), ["broker-0"]);
    changes = cluster.fuse.take_transitions().len();
    assert_eq!(changes, 2, "half open and open again");
}

#[test]
fn reports_of_a_hanging_disk_are_not_hidden_by_good_probes() {
    let mut cluster = Cluster::of(4);
    for _ in 0..5 {
        let (now_ms, report) = (cluster.now_ms, Sample::Took(1_500_000));
        cluster
            .fuse
            .observe(now_ms, "broker-2", Source::Report, report);
        cluster.step(|_| fast());
    }
    assert_eq!(cluster.isolated(), ["broker-2"]);
    let view = cluster.fuse.members().nth(2).unwrap();
    assert_eq!(view.reason, "disk write waits 1500 ms, bound 500 ms");
}

#[test]
fn members_that_left_count_no_more_and_strangers_never() {
    let mut cluster = Cluster::of(4);
    cluster.run(3_000, first_sick(1));
    cluster
        .fuse
        .set_members(["broker-1", "broker-2"].into_iter());
    assert!(cluster.isolated().is_empty());
    cluster.fuse.observe(1, "stranger", Source::Probe, failed());
    assert_eq!(cluster.fuse.members().count(), 2);
}

proptest! {
    /// Whatever is seen: the share holds, first terms last a minute, every opening has a reason.
    #[test]
    fn random_histories_keep_the_share_and_the_minute(
        members in 1usize..14,
        steps in prop::collection::vec(prop::collection::vec(0u64..2_000_000, 14), 1..400),
        failing in prop::collection::vec(0usize..14, 0..6),
    ) {
        let mut cluster = Cluster::of(members);
        for step in &steps {
            cluster.step(|index| {
                let us = step[index];
                if failing.contains(&index) && us % 3 > 0 { failed() } else { Sample::Took(us) }
            });
            let isolated = cluster.isolated().len();
            prop_assert!(isolated <= members * 3 / 10, "{isolated} of {members}");
        }
        let mut opened = BTreeMap::new();
        for (name, change) in cluster.fuse.take_transitions() {
            prop_assert!(!change.reason.is_empty());
            if let Phase::Open { since_ms, until_ms } = change.phase {
                let first = opened.insert(name, ()).is_none();
                let term_ms = until_ms - since_ms;
                prop_assert!(!first || term_ms == 60_000);
                prop_assert!((60_000..=480_000).contains(&term_ms));
            }
        }
    }
}
