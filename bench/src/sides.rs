//! Owns servers that the harness starts and stops itself.
//!
//! Invariant: what was started is stopped, also when the run between failed; a server counts as
//! started when its name server knows a broker that takes connections.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::BenchError;
use crate::plan::Plan;
use crate::session::wait_for_broker;

/// Most sides of a comparison.
pub const SIDES_MAX: usize = 8;
/// How long a server may take to come up.
const START_TIME: Duration = Duration::from_secs(120);
/// How long a server may take to go.
const STOP_TIME: Duration = Duration::from_secs(60);

/// How a server is run.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Side {
    /// Its name in tables.
    pub name: String,
    /// Shell command that runs it in the foreground, or starts it when there is a `stop`.
    pub start: String,
    /// Shell command that stops it; without one the process of `start` gets SIGTERM.
    #[serde(default)]
    pub stop: Option<String>,
    /// Shell command that prints its process ids; without one and without a `stop` it is the
    /// process of `start`.
    #[serde(default)]
    pub pids: Option<String>,
    /// Its name server.
    pub namesrv: String,
    /// CPUs it is given; a label.
    #[serde(default)]
    pub cores: String,
    /// Fields of the plan that are different on this side.
    #[serde(default)]
    pub plan: Map<String, Value>,
}

impl Side {
    /// The plan as this side runs it.
    pub fn plan(&self, common: &Plan) -> Result<Plan, BenchError> {
        let wrong =
            |problem| BenchError::Option(format!("the plan of side {}: {problem}", self.name));
        let own = common.with(&self.plan).map_err(wrong)?;
        own.check().map_err(|error| wrong(error.to_string()))?;
        Ok(own)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SidesFile {
    side: Vec<Side>,
}

/// Reads the sides of a comparison.
pub fn read(path: &Path) -> Result<Vec<Side>, BenchError> {
    let text = fs::read_to_string(path)
        .map_err(BenchError::io(format!("read the sides {}", path.display())))?;
    parse(&text).map_err(|error| BenchError::Option(format!("{}: {error}", path.display())))
}

fn parse(text: &str) -> Result<Vec<Side>, String> {
    let file: SidesFile = toml::from_str(text).map_err(|error| error.to_string())?;
    let sides = file.side;
    if !(2..=SIDES_MAX).contains(&sides.len()) {
        let count = sides.len();
        return Err(format!("{count} sides and must be 2 to {SIDES_MAX}"));
    }
    let mut names = BTreeSet::new();
    if let Some(twice) = sides.iter().find(|side| !names.insert(&side.name)) {
        return Err(format!("two sides are called {}", twice.name));
    }
    Ok(sides)
}

/// A server that runs.
pub struct Running<'a> {
    side: &'a Side,
    child: Option<Child>,
}

impl<'a> Running<'a> {
    /// Starts it and waits until it is there.
    pub fn start(side: &'a Side) -> Result<Self, BenchError> {
        let mut command = Command::new("sh");
        command.args(["-c", &side.start]).stdin(Stdio::null());
        command.stdout(Stdio::null()).process_group(0);
        let mut child = command
            .spawn()
            .map_err(BenchError::io(format!("start {}", side.start)))?;
        let mut running = Self { side, child: None };
        if side.stop.is_some() {
            let status = child
                .wait()
                .map_err(BenchError::io(format!("wait for {}", side.start)))?;
            if !status.success() {
                running.stop()?;
                return Err(BenchError::Option(format!("{}: {status}", side.start)));
            }
        } else {
            running.child = Some(child);
        }
        let child = &mut running.child;
        let ended = || {
            let status = child.as_mut()?.try_wait().ok()??;
            let Side { name, start, .. } = side;
            Some(format!(
                "{name} ended before it was there ({status}); its start was `{start}`"
            ))
        };
        match wait_for_broker(&side.namesrv, START_TIME, ended) {
            Ok(()) => Ok(running),
            Err(error) => {
                // The first error is the one to tell.
                let _ = running.stop();
                Err(error)
            }
        }
    }

    /// Shell command that prints its process ids.
    pub fn pids_command(&self) -> Option<String> {
        let own = self
            .child
            .as_ref()
            .map(|child| format!("echo {}", child.id()));
        self.side.pids.clone().or(own)
    }

    /// Stops it and waits until it is gone.
    pub fn stop(&mut self) -> Result<(), BenchError> {
        if let Some(stop) = &self.side.stop {
            let status = Command::new("sh")
                .args(["-c", stop])
                .stdout(Stdio::null())
                .status()
                .map_err(BenchError::io(format!("run {stop}")))?;
            if !status.success() {
                return Err(BenchError::Option(format!("{stop}: {status}")));
            }
        }
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        let group = format!("-{}", child.id());
        // Every process of the group is asked to go; the wait tells whether they did.
        let _ = Command::new("kill").args(["-TERM", "--", &group]).status();
        let deadline = Instant::now() + STOP_TIME;
        loop {
            let ended = child
                .try_wait()
                .map_err(BenchError::io(format!("wait for {}", self.side.name)))?;
            if ended.is_some() {
                return Ok(());
            }
            if Instant::now() > deadline {
                let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
                let _ = child.wait();
                return Err(BenchError::Option(format!(
                    "{} did not end within {} s of SIGTERM and was killed",
                    self.side.name,
                    STOP_TIME.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.child.is_some() {
            // The way out of a failed run; that failure is being told already.
            let _ = self.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"
        [[side]]
        name = "a"
        start = "sleep 60"
        namesrv = "127.0.0.1:1"
        [[side]]
        name = "b"
        start = "true"
        stop = "true"
        pids = "echo 1 2"
        namesrv = "127.0.0.1:2"
    "#;

    fn two(text: &str) -> [Side; 2] {
        parse(text).unwrap().try_into().unwrap()
    }

    #[test]
    fn sides_with_names_of_their_own_are_read() {
        let [a, b] = two(TWO);
        assert_eq!((a.name.as_str(), a.stop), ("a", None));
        assert_eq!(b.pids.as_deref(), Some("echo 1 2"));
        assert!(parse(&TWO.replace("\"b\"", "\"a\"")).is_err());
        assert!(parse("side = []").is_err());
        assert!(
            parse(&TWO.replace("pids", "pidz"))
                .unwrap_err()
                .contains("pidz")
        );
    }

    #[test]
    fn a_server_that_ends_at_once_is_told_and_not_waited_for() {
        let side = Side {
            name: "a".to_owned(),
            start: "exit 3".to_owned(),
            namesrv: "127.0.0.1:1".to_owned(),
            ..Side::default()
        };
        let begun = Instant::now();
        let error = Running::start(&side).err().unwrap().to_string();
        assert!(error.contains("a ended before it was there"), "{error}");
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(begun.elapsed() < START_TIME / 2);
    }

    #[test]
    fn a_side_may_have_fields_of_the_plan_for_itself() {
        let [_, b] = two(&format!("{TWO}\nplan = {{ queues = 7 }}"));
        let common = Plan::default();
        let own = b.plan(&common).unwrap();
        assert_eq!(
            own,
            Plan {
                queues: 7,
                ..common
            }
        );
        for wrong in ["queuez = 7", "queues = 0", "queues = 'x'"] {
            let [_, b] = two(&format!("{TWO}\nplan = {{ {wrong} }}"));
            let error = b.plan(&Plan::default()).unwrap_err().to_string();
            assert!(error.contains("the plan of side b"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_server_in_the_foreground_is_stopped() {
        let [a, _] = two(TWO);
        let child = Command::new("sh")
            .args(["-c", &a.start])
            .process_group(0)
            .spawn()
            .unwrap();
        let mut running = Running {
            side: &a,
            child: Some(child),
        };
        let pid = running.pids_command().unwrap();
        assert!(pid.starts_with("echo "));
        running.stop().unwrap();
        assert!(running.child.is_none());
    }
}
