//! `pinion-bench`: a client that measures. It knows the protocol and nothing of the server's code.
//!
//! Invariant: a message is due at a time fixed before the run; however late the generator or the
//! server is, latency counts from there.

mod acks;
mod audit;
mod cli;
mod compare;
mod device;
mod error;
mod figures;
mod hlog;
mod link;
mod load;
mod machine;
mod measure;
mod null;
mod output;
mod plan;
mod plot;
mod progress;
mod readback;
mod readers;
mod report;
mod routes;
mod scenario;
mod session;
mod sides;
mod sink;
mod slots;
mod stamp;
mod sweep;
mod template;
mod topology;
mod verdict;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command, RunOptions};
use crate::error::BenchError;
use crate::output::RunDir;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::scenario::Scenario;

/// Exit status of a run that is no headline or has no figures.
const EXIT_NOT_QUOTABLE: u8 = 2;

fn main() -> ExitCode {
    let line = Cli::parse();
    if let Some(refusal) = verdict::build_refusal(cfg!(debug_assertions), line.debug_build) {
        eprintln!("pinion-bench: {refusal}");
        return ExitCode::FAILURE;
    }
    match run(&line.command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(EXIT_NOT_QUOTABLE),
        Err(error) => {
            eprintln!("pinion-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Does what was asked for; false when the figures cannot be quoted.
fn run(command: &Command) -> Result<bool, BenchError> {
    match command {
        Command::Produce(options) => measure(Scenario::Produce, options),
        Command::Consume(options) => measure(Scenario::Consume, options),
        Command::Mixed(options) => measure(Scenario::Mixed, options),
        Command::CatchUp(options) => measure(Scenario::CatchUp, options),
        Command::Sweep(options) => {
            let (plan, progress) = prepare(options)?;
            let dir = RunDir::create(options.out.as_deref(), "sweep")?;
            let summary = sweep::run(&plan, &progress, &dir)?;
            Ok(summary.sound && summary.refusals.is_empty())
        }
        Command::Routes(options) => {
            let (plan, progress) = prepare(options)?;
            let dir = RunDir::create(options.out.as_deref(), "routes")?;
            routes::run(&plan, &progress, &dir).map(|summary| summary.sound)
        }
        Command::Compare(options) => {
            let (plan, progress) = prepare(&options.run)?;
            compare::run(options, &plan, &progress)
        }
        Command::Null(options) => {
            let (plan, progress) = prepare(&options.run)?;
            null::run(options, &plan, &progress)
        }
        Command::Device(options) => device::run(options),
        Command::Verify(options) => verify::run(options),
        Command::Sink(options) => sink::run(options),
    }
}

/// Reads the plan, starts what draws, and only then pins this thread.
fn prepare(options: &RunOptions) -> Result<(Plan, Progress), BenchError> {
    let plan = Plan::load(&options.plan)?;
    let progress = Progress::start();
    machine::pin(plan.core)?;
    Ok((plan, progress))
}

fn measure(scenario: Scenario, options: &RunOptions) -> Result<bool, BenchError> {
    let (plan, progress) = prepare(options)?;
    let dir = RunDir::create(options.out.as_deref(), scenario.name())?;
    let summary = scenario::run(scenario, &plan, &progress, &dir)?;
    Ok(summary.sound && summary.refusals.is_empty())
}
