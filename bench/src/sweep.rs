//! Owns the search for the rate a server sustains, and the steps up to it.
//!
//! Invariant: the criterion is fixed before the search and written down with its result; the search
//! ends after a bounded number of trials, and its result was itself seen to be sustained.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};
use wire::codes::request;

use crate::audit::Findings;
use crate::error::BenchError;
use crate::figures::quantile;
use crate::load::{Load, LoopResult, new_run};
use crate::output::{self, RunDir};
use crate::plan::{Pace, Plan, SweepPlan};
use crate::plot::{self, Series};
use crate::progress::Progress;
use crate::readback::read_back;
use crate::report::{LoopFigures, micros};
use crate::scenario::{Summary, idle_connections, loop_figures};
use crate::topology::Topology;
use crate::{hlog, machine};

/// Most trials of a search.
pub const TRIALS_MAX: usize = 24;
/// Share of the closed loop's rate that is tried first.
const FIRST_SHARE: f64 = 0.8;
/// By how much a rate is raised or lowered before both sides are known.
const STRIDE: f64 = 1.5;
/// Growth of the backlog over a window that is no growth: as a share, and in milliseconds of
/// traffic.
const BACKLOG_SHARE: f64 = 1.5;
const BACKLOG_MS: f64 = 5.0;
/// In flight of the closed loop that shows where to begin.
const PROBE_IN_FLIGHT: usize = 1_024;

/// What a trial showed.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Trial {
    /// Messages per second that were due.
    pub asked: u64,
    /// Messages per second acknowledged.
    pub achieved: f64,
    /// Messages that failed, in the whole trial.
    pub errors: u64,
    /// p99 of the latency.
    pub p99_ms: f64,
    /// Messages due and not answered at the ends of the seconds of the window.
    pub backlogs: Vec<u64>,
    /// Why the generator may have been the limit.
    pub refusals: Vec<String>,
    /// Why the rate was not sustained; empty if it was.
    pub objections: Vec<String>,
}

/// What gives trials.
pub trait Server {
    /// Asks for a rate for the time of a trial.
    fn ask(&mut self, rate: u64) -> Result<Trial, BenchError>;
}

/// Why a rate was not sustained; empty if it was.
pub fn objections(trial: &Trial, criterion: &SweepPlan) -> Vec<String> {
    let mut objections = Vec::new();
    let share = trial.achieved / trial.asked as f64;
    if share < criterion.achieved_share_min {
        objections.push(format!(
            "achieved {:.1} % of {} msg/s",
            100.0 * share,
            trial.asked
        ));
    }
    if trial.errors > 0 {
        objections.push(format!("{} errors", trial.errors));
    }
    if trial.p99_ms > criterion.p99_max_ms {
        objections.push(format!("p99 {:.1} ms", trial.p99_ms));
    }
    if backlog_grows(&trial.backlogs, trial.asked) {
        objections.push(format!("the backlog grows: {:?}", trial.backlogs));
    }
    objections
}

/// Whether the last third of the backlogs is clearly above the first third.
fn backlog_grows(backlogs: &[u64], rate: u64) -> bool {
    let third = backlogs.len() / 3;
    if third == 0 {
        return false;
    }
    let mean = |part: &[u64]| part.iter().sum::<u64>() as f64 / part.len().max(1) as f64;
    let first = mean(backlogs.get(..third).unwrap_or_default());
    let last = mean(backlogs.get(backlogs.len() - third..).unwrap_or_default());
    last > first * BACKLOG_SHARE + rate as f64 * BACKLOG_MS / 1e3
}

/// What a search came to.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Found {
    /// The highest rate seen to be sustained; none if none was.
    pub sustainable: Option<u64>,
    /// Whether the generator, not the server, stopped the search.
    pub generator_bound: bool,
    /// Every trial.
    pub trials: Vec<Trial>,
}

/// Looks for the highest sustained rate, beginning at `first`.
pub fn search(
    server: &mut impl Server,
    first: u64,
    criterion: &SweepPlan,
) -> Result<Found, BenchError> {
    let (mut good, mut bad): (Option<u64>, Option<u64>) = (None, None);
    let mut found = Found {
        sustainable: None,
        generator_bound: false,
        trials: Vec::new(),
    };
    let mut rate = first.max(1);
    while found.trials.len() < TRIALS_MAX {
        let mut trial = server.ask(rate)?;
        trial.objections = objections(&trial, criterion);
        // A rate that the generator cannot drive properly is as far as this search can see.
        let bound = !trial.refusals.is_empty();
        let sustained = trial.objections.is_empty() && !bound;
        if sustained {
            good = Some(rate);
        } else {
            bad = Some(rate);
            found.generator_bound = bound;
        }
        found.trials.push(trial);
        let next = next_rate(good, bad, rate, criterion.resolution);
        match next {
            Some(next) => rate = next,
            None => break,
        }
    }
    found.sustainable = good;
    Ok(found)
}

/// The next rate to try; none when the limit is known exactly enough.
fn next_rate(good: Option<u64>, bad: Option<u64>, last: u64, resolution: f64) -> Option<u64> {
    let next = match (good, bad) {
        (Some(good), Some(bad)) => {
            if bad.saturating_sub(good) as f64 <= good as f64 * resolution {
                return None;
            }
            good.midpoint(bad)
        }
        (Some(good), None) => (good as f64 * STRIDE) as u64 + 1,
        (None, _) => (last as f64 / STRIDE) as u64,
    };
    (next > 0 && next != last).then_some(next)
}

/// A broker under trial.
struct Broker<'a, 'b> {
    plan: &'a Plan,
    topology: &'a Topology,
    load: &'b mut Load<'a>,
    findings: Findings,
}

impl Broker<'_, '_> {
    /// One loop with an audit of its own.
    fn audited(
        &mut self,
        pace: Pace,
        warm_up_s: f64,
        duration_s: f64,
    ) -> Result<LoopResult, BenchError> {
        if self.plan.audit {
            let ends = self.topology.offsets(self.plan, request::GET_MAX_OFFSET)?;
            self.load.begin_audit(&ends);
        }
        let result = self.load.run(pace, warm_up_s, duration_s)?;
        if let Some(audit) = self.load.audit.take() {
            let found = read_back(self.plan, self.topology, audit)?;
            let sound = found.sound();
            add(&mut self.findings, found);
            if !sound {
                return Err(BenchError::Option(output::audit_line(
                    Some(&self.findings),
                    &[],
                )));
            }
        }
        Ok(result)
    }
}

fn add(whole: &mut Findings, part: Findings) {
    whole.acked += part.acked;
    whole.found += part.found;
    whole.lost += part.lost;
    whole.doubled += part.doubled;
    whole.reordered += part.reordered;
    whole.damaged += part.damaged;
    whole.unacked_stored += part.unacked_stored;
    whole.foreign += part.foreign;
    whole.incomplete = whole.incomplete.take().or(part.incomplete);
    whole.examples.extend(part.examples);
}

impl Server for Broker<'_, '_> {
    fn ask(&mut self, rate: u64) -> Result<Trial, BenchError> {
        let trial_s = self.plan.sweep.trial_s;
        let warm_up_s = trial_s / 5.0;
        let result = self.audited(Pace::Open(rate), warm_up_s, trial_s)?;
        let latency = result.measures.merged()?.latency;
        Ok(Trial {
            asked: rate,
            achieved: result.achieved(),
            errors: result.measures.failures_total(),
            p99_ms: latency.value_at_quantile(0.99) as f64 / 1e6,
            backlogs: result.measures.window_backlogs(),
            refusals: result.generator.refusals(),
            objections: Vec::new(),
        })
    }
}

/// Runs `sweep`.
pub fn run(plan: &Plan, progress: &Progress, dir: &RunDir) -> Result<Summary, BenchError> {
    let server = machine::pids(plan.server_pids.as_deref())?;
    dir.write_environment(plan, &server)?;
    let topology = Topology::find(plan)?;
    let _idle = idle_connections(plan, &topology)?;
    let run = new_run();
    let mut load = Load::new(plan, &topology, progress, run)?;
    load.connect()?;
    let mut broker = Broker {
        plan,
        topology: &topology,
        load: &mut load,
        findings: Findings::default(),
    };
    let in_flight = plan.in_flight.unwrap_or(PROBE_IN_FLIGHT);
    let closed = broker.audited(Pace::Closed(in_flight), plan.warm_up_s, plan.sweep.trial_s)?;
    let first = plan
        .sweep
        .first_rate
        .unwrap_or((closed.achieved() * FIRST_SHARE) as u64);
    let found = search(&mut broker, first, &plan.sweep)?;
    let mut steps = Vec::new();
    for percent in &plan.sweep.steps_percent {
        let Some(whole) = found.sustainable else {
            break;
        };
        let rate = (whole * u64::from(*percent) / 100).max(1);
        let result = broker.audited(Pace::Open(rate), plan.warm_up_s, plan.duration_s)?;
        let label = format!("{percent} % of {whole} msg/s");
        let log = hlog::encode(&label, result.started, &result.measures.seconds)?;
        dir.write(&format!("step-{percent:03}.hlog"), &log)?;
        steps.push((*percent, result));
    }
    let findings = plan.audit.then(|| broker.findings.clone());
    write(plan, dir, run, &found, &closed, &steps, findings.as_ref())
}

fn write(
    plan: &Plan,
    dir: &RunDir,
    run: u64,
    found: &Found,
    closed: &LoopResult,
    steps: &[(u32, LoopResult)],
    findings: Option<&Findings>,
) -> Result<Summary, BenchError> {
    let mut table = format!("# sweep: {}\n\n", output::title(plan));
    table.push_str(&output::audit_line(findings, &[]));
    table.push_str(&criterion_text(&plan.sweep));
    table.push_str(&match found.sustainable {
        Some(rate) => format!("**Sustainable: {rate} msg/s**"),
        None => "**No sustainable rate found**".to_owned(),
    });
    table.push_str(if found.generator_bound {
        ", limited by the generator: the server may do more.\n\n"
    } else {
        ".\n\n"
    });
    table.push_str(&step_table(steps)?);
    table.push('\n');
    table.push_str(&LoopFigures::of(closed)?.section(plan, closed.pace.name()));
    println!("{table}");
    dir.write("table.md", table.as_bytes())?;
    plot::over_rate(
        &dir.file("curve.svg"),
        &output::title(plan),
        &rate_series(steps)?,
    )?;
    let mut values = Vec::new();
    for (percent, result) in steps {
        let mut value = LoopFigures::of(result)?.value();
        if let Value::Object(fields) = &mut value {
            fields.insert("percent".to_owned(), json!(percent));
        }
        values.push(value);
    }
    let value = json!({
        "format": output::FORMAT,
        "command": "sweep",
        "run": format!("{run:016X}"),
        "plan": plan,
        "criterion": plan.sweep,
        "found": found,
        "closed": LoopFigures::of(closed)?.value(),
        "steps": values,
        "audit": findings,
    });
    dir.write_json("run.json", &value)?;
    let mut figures = BTreeMap::new();
    if let Some(rate) = found.sustainable {
        figures.insert("sustainable msg/s".to_owned(), rate as f64);
    }
    loop_figures("closed", closed, &mut figures)?;
    let mut refusals = Vec::new();
    for (percent, result) in steps {
        refusals.extend(loop_figures(&format!("{percent} %"), result, &mut figures)?);
    }
    if found.generator_bound {
        refusals.push("the generator limited the search".to_owned());
    }
    Ok(Summary {
        figures,
        sound: true,
        refusals,
        times: BTreeMap::new(),
    })
}

/// The criterion in words.
fn criterion_text(criterion: &SweepPlan) -> String {
    format!(
        "A rate is sustained when at least {:.1} % of it is acknowledged, nothing fails, the p99 \
         of the latency is at most {} ms, and the backlog does not grow (its last third at most {} \
         times its first and {} ms of traffic). Known to {:.1} %; trials of {} s.\n\n",
        100.0 * criterion.achieved_share_min,
        criterion.p99_max_ms,
        BACKLOG_SHARE,
        BACKLOG_MS,
        100.0 * criterion.resolution,
        criterion.trial_s,
    )
}

fn step_table(steps: &[(u32, LoopResult)]) -> Result<String, BenchError> {
    let mut out = "| share | asked | achieved | p50 µs | p99 µs | p99.9 µs | p99.99 µs | max µs | \
                   errors | headline |\n|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for (percent, result) in steps {
        let latency = result.measures.merged()?.latency;
        let at = |share: f64| quantile(&latency, share).map_or("–".to_owned(), micros);
        let asked = match result.pace {
            Pace::Open(rate) => rate,
            Pace::Closed(_) => 0,
        };
        let refusals = result.generator.refusals();
        let quoted = if refusals.is_empty() {
            "yes".to_owned()
        } else {
            format!("no: {}", refusals.join("; "))
        };
        out.push_str(&format!(
            "| {percent} % | {asked} | {:.0} | {} | {} | {} | {} | {} | {} | {quoted} |\n",
            result.achieved(),
            at(0.5),
            at(0.99),
            at(0.999),
            at(0.999_9),
            micros(latency.max()),
            result.measures.failures_total(),
        ));
    }
    Ok(out)
}

fn rate_series(steps: &[(u32, LoopResult)]) -> Result<Vec<Series>, BenchError> {
    let names = [
        ("p50", 0.5),
        ("p99", 0.99),
        ("p99.9", 0.999),
        ("p99.99", 0.999_9),
    ];
    let mut series: Vec<Series> = names
        .iter()
        .map(|(name, _)| Series {
            name: (*name).to_owned(),
            points: Vec::new(),
        })
        .collect();
    for (_, result) in steps {
        let latency = result.measures.merged()?.latency;
        for ((_, share), one) in names.iter().zip(&mut series) {
            if let Some(value) = quantile(&latency, *share) {
                one.points.push((result.achieved(), value as f64 / 1e6));
            }
        }
    }
    Ok(series)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that takes `most` messages a second; what is more waits.
    struct Model {
        most: f64,
        /// Above this the generator cannot keep its schedule.
        drivable: u64,
        fails_above: u64,
        asked: Vec<u64>,
    }

    impl Model {
        fn taking(most: f64) -> Self {
            Self {
                most,
                drivable: u64::MAX,
                fails_above: u64::MAX,
                asked: Vec::new(),
            }
        }
    }

    impl Server for Model {
        fn ask(&mut self, rate: u64) -> Result<Trial, BenchError> {
            self.asked.push(rate);
            let over = (rate as f64 - self.most).max(0.0);
            let utilisation = (rate as f64 / self.most).min(0.999);
            Ok(Trial {
                asked: rate,
                achieved: (rate as f64).min(self.most),
                errors: u64::from(rate > self.fails_above),
                p99_ms: if over > 0.0 {
                    1_000.0
                } else {
                    0.2 / (1.0 - utilisation)
                },
                backlogs: (1..=6)
                    .map(|second| (over * f64::from(second)) as u64)
                    .collect(),
                refusals: (rate > self.drivable)
                    .then(|| "late".to_owned())
                    .into_iter()
                    .collect(),
                objections: Vec::new(),
            })
        }
    }

    #[test]
    fn the_limit_of_a_server_is_found_from_below_and_from_above() {
        for first in [500, 9_000, 400_000] {
            let mut model = Model::taking(30_000.0);
            let found = search(&mut model, first, &SweepPlan::default()).unwrap();
            let rate = found.sustainable.unwrap() as f64;
            assert!((28_000.0..=30_000.0).contains(&rate), "{first}: {rate}");
            assert!(!found.generator_bound);
            assert!(found.trials.len() <= TRIALS_MAX);
            let best = found.trials.iter().find(|trial| trial.asked as f64 == rate);
            assert!(best.unwrap().objections.is_empty());
        }
    }

    #[test]
    fn a_generator_that_cannot_keep_up_is_named_as_the_limit() {
        let mut model = Model::taking(1e6);
        model.drivable = 100_000;
        let found = search(&mut model, 50_000, &SweepPlan::default()).unwrap();
        let rate = found.sustainable.unwrap();
        assert!((95_000..=100_000).contains(&rate), "{rate}");
        assert!(found.generator_bound);
    }

    #[test]
    fn errors_bound_a_rate_like_anything_else() {
        let mut model = Model::taking(1e6);
        model.fails_above = 10_000;
        let found = search(&mut model, 1_000, &SweepPlan::default()).unwrap();
        assert!((9_500..=10_000).contains(&found.sustainable.unwrap()));
        assert!(!found.generator_bound);
    }

    #[test]
    fn a_server_that_takes_nothing_ends_the_search() {
        let mut model = Model::taking(1e6);
        model.fails_above = 0;
        let found = search(&mut model, 100_000, &SweepPlan::default()).unwrap();
        assert_eq!(found.sustainable, None);
        assert!(found.trials.len() <= TRIALS_MAX);
    }

    #[test]
    fn each_condition_objects_by_itself() {
        let good = Trial {
            asked: 1_000,
            achieved: 995.0,
            errors: 0,
            p99_ms: 5.0,
            backlogs: vec![3, 4, 2, 5, 3, 4],
            refusals: Vec::new(),
            objections: Vec::new(),
        };
        let criterion = SweepPlan::default();
        let objected = |change: fn(&mut Trial)| {
            let mut trial = good.clone();
            change(&mut trial);
            objections(&trial, &criterion).len()
        };
        assert_eq!(objected(|_| {}), 0);
        assert_eq!(objected(|trial| trial.achieved = 989.0), 1);
        assert_eq!(objected(|trial| trial.errors = 1), 1);
        assert_eq!(objected(|trial| trial.p99_ms = 101.0), 1);
        assert_eq!(
            objected(|trial| trial.backlogs = vec![1, 5, 9, 12, 16, 20]),
            1
        );
    }
}
