//! Owns the reading back of a run: every queue from where it ended before the run to where it ends
//! now.
//!
//! Invariant: it happens outside the measured window, and ends with a finding whatever the broker
//! does: a queue that stops giving records ends the audit as incomplete, which is a fault.

use wire::codes::request;

use crate::audit::{Audit, Findings};
use crate::error::BenchError;
use crate::plan::Plan;
use crate::readers::{STALL, read_to_end};
use crate::topology::Topology;

/// Reads everything back and tells what was found.
pub fn read_back(
    plan: &Plan,
    topology: &Topology,
    mut audit: Audit,
) -> Result<Findings, BenchError> {
    let ends = topology.offsets(plan, request::GET_MAX_OFFSET)?;
    let ranges: Vec<(i64, i64)> = ends
        .iter()
        .enumerate()
        .map(|(queue, end)| {
            let (begin, acked_end) = audit.range(queue);
            (begin, acked_end.max(*end))
        })
        .collect();
    let (is_whole, counts) = read_to_end(plan, topology, &ranges, |queue, record| {
        audit.read(queue, record);
    })?;
    if !is_whole {
        audit.broke_off(&format!(
            "reading back brought nothing for {} s (refused pulls by code: {:?})",
            STALL.as_secs(),
            counts.refused
        ));
    }
    Ok(audit.finish())
}
