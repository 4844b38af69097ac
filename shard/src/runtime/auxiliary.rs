//! The auxiliary thread of a driver: everything about files that blocks and is not a log write.
//!
//! Invariant: long jobs (zeroing, removing) proceed in steps and let every short job that arrives
//! meanwhile go first, so that a segment that is needed now never waits for one that is prepared
//! ahead.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::jobs::{Begun, Steps, begin, step};
use super::worker::{Desk, Port};
use crate::io::real::{RealFile, RealStorage};
use crate::io::{FileJob, JobOutcomeOf};
use crate::memory::AlignedBuffer;
use crate::mesh::BellRinger;

/// Pause after each cut, so that the file system's work for it does not pile up.
const REMOVE_PAUSE: Duration = Duration::from_millis(2);

/// What the core asks for.
pub(super) enum AuxiliaryCommand {
    /// A job with its token.
    Job(FileJob<RealStorage>, u64),
    /// Close a file (the last close of a large file can take a third of a second).
    Close(Arc<RealFile>),
}

/// What became of it; nothing for a close.
pub(super) type AuxiliaryOutcome = Option<(u64, io::Result<JobOutcomeOf<RealStorage>>)>;
/// The core's side of the thread.
pub(super) type AuxiliaryPort = Port<AuxiliaryCommand, AuxiliaryOutcome>;

/// Starts the thread `disk-aux-N`.
pub(super) fn start(
    core: usize,
    storage: RealStorage,
    ringer: BellRinger,
) -> io::Result<AuxiliaryPort> {
    Port::start(format!("disk-aux-{core}"), ringer, move |desk| {
        serve(desk, &storage)
    })
}

fn serve(mut desk: Desk<AuxiliaryCommand, AuxiliaryOutcome>, storage: &RealStorage) {
    let mut stepwise: VecDeque<(u64, Steps<RealStorage>)> = VecDeque::new();
    let mut zeros: Option<AlignedBuffer> = None;
    loop {
        let command = if stepwise.is_empty() {
            desk.next()
        } else {
            desk.try_next()
        };
        match command {
            Some(AuxiliaryCommand::Job(job, token)) => match begin(storage, job) {
                Ok(Begun::Finished(outcome)) => desk.report(Some((token, Ok(outcome)))),
                Ok(Begun::Stepwise(steps)) => stepwise.push_back((token, steps)),
                Err(error) => desk.report(Some((token, Err(error)))),
            },
            Some(AuxiliaryCommand::Close(file)) => {
                drop(file);
                desk.report(None);
            }
            None => {
                let Some((token, steps)) = stepwise.pop_front() else {
                    return;
                };
                if desk.is_abandoned() {
                    // Half-zeroed and half-removed files are found and finished by the next start.
                    return;
                }
                match step(storage, steps, &mut zeros) {
                    Ok(Begun::Finished(outcome)) => desk.report(Some((token, Ok(outcome)))),
                    // Round robin: two long jobs share the thread.
                    Ok(Begun::Stepwise(steps)) => {
                        if matches!(steps, Steps::Remove { .. }) {
                            std::thread::sleep(REMOVE_PAUSE);
                        }
                        stepwise.push_back((token, steps));
                    }
                    Err(error) => desk.report(Some((token, Err(error)))),
                }
            }
        }
    }
}
