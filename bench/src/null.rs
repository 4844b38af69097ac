//! Owns the measurement of the ceiling: the plan against a broker that stores nothing.
//!
//! Invariant: the broker is `pinion null` from beside this program, so network code and dispatch
//! are those that are measured otherwise; nothing is audited, since nothing is there, and the
//! report says so.

use crate::cli::NullOptions;
use crate::compare::beside;
use crate::error::BenchError;
use crate::output::RunDir;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::scenario::{self, Scenario};
use crate::sides::{Running, Side};

/// Runs `null`.
pub fn run(options: &NullOptions, plan: &Plan, progress: &Progress) -> Result<bool, BenchError> {
    let program = beside("pinion")?;
    let port = options.null_port;
    let side = Side {
        name: "null".to_owned(),
        start: format!(
            "exec '{}' null --port {port} --namesrv-port {} --cores {}",
            program.display(),
            port.saturating_add(1),
            options.null_cores
        ),
        stop: None,
        pids: None,
        namesrv: format!("127.0.0.1:{}", port.saturating_add(1)),
        cores: options.null_cores.clone(),
        plan: serde_json::Map::new(),
    };
    let mut running = Running::start(&side)?;
    let plan = Plan {
        namesrv: side.namesrv.clone(),
        audit: false,
        flush: "none".to_owned(),
        label: format!("null broker {}", plan.label).trim().to_owned(),
        server_pids: running.pids_command(),
        server_cores: side.cores.clone(),
        ..plan.clone()
    };
    let dir = RunDir::create(options.run.out.as_deref(), "null")?;
    let measured = scenario::run(Scenario::Produce, &plan, progress, &dir);
    running.stop()?;
    measured.map(|summary| summary.refusals.is_empty())
}
