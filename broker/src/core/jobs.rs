//! Blocking jobs of a core that run on the auxiliary thread: settings files, changes of the
//! configuration file.
//!
//! Invariant: jobs of one core run in the order they were given.

use std::io;
use std::path::PathBuf;

use shard::io::{FileJob, JobOutcomeOf};
use shard::runtime::Driver;

use super::state::State;
use crate::config::Persist;

/// Token of core jobs: no shard has this local number.
pub const JOB_TOKEN: u64 = 0xffff << shard::TOKEN_SHARD_SHIFT;

/// One job.
#[derive(Debug)]
pub enum CoreJob {
    /// Save a control file in generations.
    Save {
        /// File name.
        name: &'static str,
        /// Content.
        bytes: Vec<u8>,
        /// Whether something waits for its end.
        is_awaited: bool,
    },
    /// Change the configuration file.
    Persist(Persist),
    /// Save a file of the name server.
    NameServerFile {
        /// Path.
        path: PathBuf,
        /// Content.
        bytes: Vec<u8>,
    },
}

/// Jobs given and not yet ended.
#[derive(Default)]
pub struct Jobs {
    given: Vec<CoreJob>,
    running: std::collections::VecDeque<Running>,
}

/// What is done when a job ends.
enum Running {
    /// A control file is saved: which, and whether something waits for it.
    Save(&'static str, bool),
    /// The configuration file is changed; answers wait for it.
    Persist,
    /// Nothing waits for it.
    Other,
}

impl Jobs {
    /// Gives a job.
    pub fn push(&mut self, job: CoreJob) {
        self.given.push(job);
    }

    /// Whether nothing is given or running.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.given.is_empty() && self.running.is_empty()
    }
}

impl State {
    /// Hands given jobs to the auxiliary thread.
    pub fn start_jobs<D: Driver>(&mut self, driver: &mut D) {
        for job in std::mem::take(&mut self.jobs.given) {
            let running = match &job {
                CoreJob::Save {
                    name, is_awaited, ..
                } => Running::Save(name, *is_awaited),
                CoreJob::Persist(_) => Running::Persist,
                CoreJob::NameServerFile { .. } => Running::Other,
            };
            let dir = self.config.store_path_root.as_path().join("config");
            let call: FileJob<D::Storage> = FileJob::Call(Box::new(move |on| run(on, job, &dir)));
            self.jobs.running.push_back(running);
            driver.file_job(call, JOB_TOKEN);
        }
    }

    /// Takes the end of a job.
    pub fn on_job(&mut self, result: Result<(), String>) {
        let Some(running) = self.jobs.running.pop_front() else {
            return;
        };
        match running {
            Running::Save(name, is_awaited) => self.on_saved(name, is_awaited, result),
            Running::Persist => self.on_persisted(result),
            Running::Other => {
                if let Err(error) = result {
                    tracing::error!(error, "file not saved");
                }
            }
        }
    }
}

fn run<S: shard::io::Storage>(
    storage: &S,
    job: CoreJob,
    dir: &std::path::Path,
) -> io::Result<JobOutcomeOf<S>> {
    match job {
        CoreJob::Save { name, bytes, .. } => {
            let saved = crate::settings::save_on(storage, dir, name, &bytes);
            saved.map_err(io::Error::other)?;
        }
        CoreJob::Persist(persist) => persist.write().map_err(io::Error::other)?,
        CoreJob::NameServerFile { path, bytes } => crate::settings::replace_file(&path, &bytes)?,
    }
    Ok(JobOutcomeOf::Done)
}
