//! Owns the ways of loading a broker with one plan: sends alone, sends and readers, sends beside
//! readers of old messages.
//!
//! Invariant: every loop of a scenario runs with the same connections and numbering, and one audit
//! covers all of them.

use std::collections::BTreeMap;
use std::net::TcpStream;

use hdrhistogram::Histogram;
use wire::codes::request;

use crate::error::BenchError;
use crate::figures::{QUANTILES, quantile};
use crate::load::{Load, LoopResult, new_run};
use crate::machine;
use crate::output::{Outcome, RunDir};
use crate::plan::{Pace, Plan, SendMode};
use crate::progress::Progress;
use crate::readback::read_back;
use crate::readers::{Readers, Role};
use crate::report::LoopFigures;
use crate::topology::Topology;

/// Rate of `consume` when the plan names none: low enough that nothing queues.
const CONSUME_RATE: u64 = 1_000;
/// In flight while old messages are made.
const FILL_IN_FLIGHT: usize = 512;
/// Seconds of one step of that.
const FILL_STEP_S: f64 = 2.0;
/// Steps that may add nothing.
const FILL_IDLE_STEPS_MAX: u32 = 5;

/// What is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scenario {
    /// Sends alone.
    Produce,
    /// A few sends, and a reader.
    Consume,
    /// Sends and readers.
    Mixed,
    /// Sends and readers, alone and beside readers of old messages.
    CatchUp,
}

impl Scenario {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Produce => "produce",
            Self::Consume => "consume",
            Self::Mixed => "mixed",
            Self::CatchUp => "catch-up",
        }
    }
}

/// The figures that are compared, by name, and whether they may be.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Figures.
    pub figures: BTreeMap<String, f64>,
    /// Whether the audit passed.
    pub sound: bool,
    /// Why they are no headline.
    pub refusals: Vec<String>,
    /// What the user waits for in each loop, by name: from due to delivered where something was
    /// read, to acknowledged elsewhere.
    pub times: BTreeMap<String, Histogram<u64>>,
}

/// Opens connections that will do nothing.
pub fn idle_connections(plan: &Plan, topology: &Topology) -> Result<Vec<TcpStream>, BenchError> {
    let brokers = topology.brokers.len().max(1);
    let open = |number: usize| {
        let address = topology.address(number % brokers);
        TcpStream::connect(address).map_err(BenchError::io(format!("connect to {address}")))
    };
    (0..plan.idle_connections).map(open).collect()
}

/// Runs a scenario, writes its directory and prints its table.
pub fn run(
    scenario: Scenario,
    plan: &Plan,
    progress: &Progress,
    dir: &RunDir,
) -> Result<Summary, BenchError> {
    let server = machine::pids(plan.server_pids.as_deref())?;
    dir.write_environment(plan, &server)?;
    let outcome = measure(scenario, plan, progress)?;
    let table = outcome.write(plan, dir)?;
    println!("{table}");
    summary(&outcome)
}

/// Runs a scenario.
pub fn measure(
    scenario: Scenario,
    plan: &Plan,
    progress: &Progress,
) -> Result<Outcome, BenchError> {
    let mut plan = plan.clone();
    if scenario == Scenario::Consume && plan.rate.is_none() && plan.in_flight.is_none() {
        plan.rate = Some(CONSUME_RATE);
    }
    let topology = Topology::find(&plan)?;
    let old = (scenario == Scenario::CatchUp)
        .then(|| old_messages(&plan, progress))
        .transpose()?;
    let _idle = idle_connections(&plan, &topology)?;
    let run = new_run();
    let mut load = Load::new(&plan, &topology, progress, run)?;
    let ends = if plan.audit || scenario != Scenario::Produce {
        topology.offsets(&plan, request::GET_MAX_OFFSET)?
    } else {
        Vec::new()
    };
    if plan.audit {
        load.begin_audit(&ends);
    }
    load.connect()?;
    if scenario != Scenario::Produce && plan.consumers > 0 {
        let ranges: Vec<(i64, i64)> = ends.iter().map(|end| (*end, i64::MAX)).collect();
        let token = load.next_token();
        let tail = Role::Tail;
        let readers = Readers::new(&plan, &topology, tail, plan.consumers, token, &ranges)?;
        load.add_readers(Role::Tail, readers)?;
    }
    let mut loops = Vec::new();
    for pace in plan.loops() {
        let result = load.run(pace, plan.warm_up_s, plan.duration_s)?;
        loops.push((pace.name().to_owned(), result));
        let Some((old_topology, ranges)) = &old else {
            continue;
        };
        let token = load.next_token();
        let (cold, count) = (Role::Cold, plan.cold_connections);
        let readers = Readers::new(&plan, old_topology, cold, count, token, ranges)?;
        load.add_readers(cold, readers)?;
        let result = load.run(pace, plan.warm_up_s, plan.duration_s)?;
        loops.push((format!("{}-beside-catch-up", pace.name()), result));
        load.remove_readers(cold);
    }
    let faults = reader_faults(&load);
    let audit = load.audit.take();
    drop(load);
    let findings = audit
        .map(|audit| read_back(&plan, &topology, audit))
        .transpose()?;
    Ok(Outcome {
        what: scenario.name(),
        run,
        loops,
        findings,
        faults,
    })
}

fn reader_faults(load: &Load<'_>) -> Vec<String> {
    let mut faults = Vec::new();
    for (role, readers) in &load.readers {
        let counts = &readers.counts;
        if counts.gaps + counts.damaged > 0 {
            faults.push(format!(
                "{role:?} readers saw {} offsets skipped or repeated and {} damaged records",
                counts.gaps, counts.damaged
            ));
        }
    }
    faults
}

/// Makes sure that there are old messages, in a topic of their own.
fn old_messages(
    plan: &Plan,
    progress: &Progress,
) -> Result<(Topology, Vec<(i64, i64)>), BenchError> {
    let old = Plan {
        topic: format!("{}-old", plan.topic),
        topics: 1,
        audit: false,
        mode: SendMode::Async,
        label: "making old messages".to_owned(),
        ..plan.clone()
    };
    let topology = Topology::find(&old)?;
    let ranges = || -> Result<Vec<(i64, i64)>, BenchError> {
        let begins = topology.offsets(&old, request::GET_MIN_OFFSET)?;
        let ends = topology.offsets(&old, request::GET_MAX_OFFSET)?;
        Ok(begins.into_iter().zip(ends).collect())
    };
    let bytes = |ranges: &[(i64, i64)]| {
        let messages: i64 = ranges.iter().map(|(begin, end)| end - begin).sum();
        messages.unsigned_abs() * old.body_bytes as u64
    };
    let mut there = ranges()?;
    let mut load = Load::new(&old, &topology, progress, new_run())?;
    if bytes(&there) < old.cold_bytes {
        load.connect()?;
    }
    let mut idle_steps = 0;
    while bytes(&there) < old.cold_bytes && idle_steps < FILL_IDLE_STEPS_MAX {
        let before = bytes(&there);
        load.run(Pace::Closed(FILL_IN_FLIGHT), 0.0, FILL_STEP_S)?;
        there = ranges()?;
        idle_steps = if bytes(&there) > before {
            0
        } else {
            idle_steps + 1
        };
    }
    drop(load);
    Ok((topology, there))
}

/// The figures of a loop that are compared.
pub fn loop_figures(
    name: &str,
    result: &LoopResult,
    into: &mut BTreeMap<String, f64>,
) -> Result<Vec<String>, BenchError> {
    let figures = LoopFigures::of(result)?;
    into.insert(format!("{name} achieved msg/s"), result.achieved());
    for kind in ["latency", "end-to-end"] {
        let Some(row) = figures.row(kind) else {
            continue;
        };
        for (quantile_name, share) in QUANTILES {
            if let Some(value) = quantile(row, share) {
                let name = format!("{name} {kind} {quantile_name} µs");
                into.insert(name, value as f64 / 1e3);
            }
        }
        into.insert(format!("{name} {kind} max µs"), row.max() as f64 / 1e3);
    }
    let cold_bytes = result.measures.window_cold.1 as f64;
    if cold_bytes > 0.0 {
        let name = format!("{name} old messages MB/s");
        into.insert(name, cold_bytes / 1e6 / result.duration_s);
    }
    if let Some(micros) = result.server_cpu_us {
        into.insert(format!("{name} server CPU µs/msg"), micros);
    }
    Ok(figures.result.generator.refusals())
}

fn summary(outcome: &Outcome) -> Result<Summary, BenchError> {
    let mut summary = Summary {
        sound: outcome.sound(),
        ..Summary::default()
    };
    for (name, result) in &outcome.loops {
        let refusals = loop_figures(name, result, &mut summary.figures)?;
        summary.refusals.extend(refusals);
        let figures = LoopFigures::of(result)?;
        let row = figures.row("end-to-end").or(figures.row("latency"));
        let row = row.map(|row| (name.clone(), row.clone()));
        summary.times.extend(row);
    }
    if !summary.sound {
        summary.figures.clear();
        summary.times.clear();
    }
    Ok(summary)
}
