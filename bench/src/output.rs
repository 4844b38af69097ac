//! Owns the directory that a run leaves behind.
//!
//! Invariant: a run whose audit failed leaves the reason and no figures; everything else in the
//! directory belongs to the same run.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::audit::Findings;
use crate::error::BenchError;
use crate::load::{LoopResult, since_epoch_ns};
use crate::plan::{Mark, Plan};
use crate::report::{LoopFigures, phase_table, phase_values};
use crate::{device, hlog, machine, plot};

/// Version of `run.json`; raised when a field changes its meaning.
pub const FORMAT: u32 = 2;
/// Where runs go that are told no place.
const DEFAULT_PLACE: &str = "bench-runs";

/// The directory.
#[derive(Clone, Debug)]
pub struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// Makes it; `what` names the run when nobody named a directory.
    pub fn create(out: Option<&Path>, what: &str) -> Result<Self, BenchError> {
        let seconds = machine::wall_ns() / 1_000_000_000;
        let path = out.map_or_else(
            || Path::new(DEFAULT_PLACE).join(format!("{what}-{seconds}")),
            Path::to_path_buf,
        );
        fs::create_dir_all(&path).map_err(BenchError::io(format!("create {}", path.display())))?;
        Ok(Self { path })
    }

    /// A directory below it.
    pub fn below(&self, name: &str) -> Result<Self, BenchError> {
        Self::create(Some(&self.path.join(name)), name)
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), BenchError> {
        let path = self.file(name);
        fs::write(&path, bytes).map_err(BenchError::io(format!("write {}", path.display())))
    }

    /// Writes a file of JSON.
    pub fn write_json(&self, name: &str, value: &Value) -> Result<(), BenchError> {
        let text = serde_json::to_vec_pretty(value)
            .map_err(|error| BenchError::Option(format!("{name}: {error}")))?;
        self.write(name, &text)
    }

    /// Writes `env.json`: the machine, both sides, and the disk just before the run.
    pub fn write_environment(&self, plan: &Plan, server: &[u32]) -> Result<Value, BenchError> {
        let mut environment = machine::describe(server);
        let disk = plan.store_dir.as_deref().map(device::quick).transpose()?;
        let file_system = plan.store_dir.as_deref().and_then(machine::file_system);
        if let Value::Object(fields) = &mut environment {
            fields.insert("server_cores".to_owned(), json!(plan.server_cores));
            fields.insert("generator_core".to_owned(), json!(plan.core));
            fields.insert("flush".to_owned(), json!(plan.flush));
            fields.insert("file_system".to_owned(), json!(file_system));
            fields.insert("device".to_owned(), json!(disk));
        }
        self.write_json("env.json", &environment)?;
        Ok(environment)
    }
}

/// A finished run of one scenario.
#[derive(Debug)]
pub struct Outcome {
    /// What was run.
    pub what: &'static str,
    /// Number of the run.
    pub run: u64,
    /// Its loops, with their names.
    pub loops: Vec<(String, LoopResult)>,
    /// What the audit found; none when it was switched off.
    pub findings: Option<Findings>,
    /// Faults besides those of the audit.
    pub faults: Vec<String>,
}

impl Outcome {
    /// Whether there may be figures.
    pub fn sound(&self) -> bool {
        self.faults.is_empty() && self.findings.as_ref().is_none_or(Findings::sound)
    }

    /// Writes everything but the environment; returns the table.
    pub fn write(&self, plan: &Plan, dir: &RunDir) -> Result<String, BenchError> {
        let mut table = format!("# {}: {}\n\n", self.what, title(plan));
        let mut loops = Vec::new();
        table.push_str(&audit_line(self.findings.as_ref(), &self.faults));
        if self.sound() {
            for (name, result) in &self.loops {
                let figures = LoopFigures::of(result)?;
                table.push_str(&figures.section(plan, name));
                let marks = marks_of(plan, result)?;
                let phases = result.measures.phases(&marks)?;
                table.push_str(&phase_table(&phases));
                let mut value = figures.value();
                if let Value::Object(fields) = &mut value {
                    fields.insert("name".to_owned(), json!(name));
                    fields.insert("phases".to_owned(), json!(phase_values(&phases)));
                }
                loops.push(value);
                self.write_loop(plan, dir, name, &figures, &marks)?;
            }
        }
        dir.write("table.md", table.as_bytes())?;
        let value = json!({
            "format": FORMAT,
            "command": self.what,
            "run": format!("{:016X}", self.run),
            "plan": plan,
            "sound": self.sound(),
            "faults": self.faults,
            "audit": self.findings,
            "loops": self.sound().then_some(loops),
        });
        dir.write_json("run.json", &value)?;
        Ok(table)
    }

    fn write_loop(
        &self,
        plan: &Plan,
        dir: &RunDir,
        name: &str,
        figures: &LoopFigures<'_>,
        marks: &[Mark],
    ) -> Result<(), BenchError> {
        let result = figures.result;
        let label = format!("{} {}: {}", self.what, name, title(plan));
        let log = hlog::encode(&label, result.started, &result.measures.seconds)?;
        dir.write(&format!("{name}.hlog"), &log)?;
        let path = dir.file(&format!("{name}-timeline.svg"));
        plot::timeline(&path, &label, &result.measures.seconds, marks)?;
        let rows: Vec<_> = figures
            .rows
            .iter()
            .map(|(name, row)| ((*name).to_owned(), row))
            .collect();
        plot::percentiles(&dir.file(&format!("{name}-curve.svg")), &label, &rows)
    }
}

/// The words about the audit that open a table.
pub fn audit_line(findings: Option<&Findings>, faults: &[String]) -> String {
    let mut out = String::new();
    match findings {
        None => out.push_str("Not audited: nobody looked whether the messages are there.\n\n"),
        Some(found) if found.sound() => out.push_str(&format!(
            "Audited: all {} acknowledged messages are at their offsets with their bodies.\n\n",
            found.acked
        )),
        Some(found) => {
            out.push_str(&format!(
                "**No figures: of {} acknowledged messages {} lost, {} doubled, {} reordered, {} \
                 damaged.**\n\n",
                found.acked, found.lost, found.doubled, found.reordered, found.damaged
            ));
            for example in found.examples.iter().chain(&found.incomplete) {
                out.push_str(&format!("- {example}\n"));
            }
        }
    }
    for fault in faults {
        out.push_str(&format!("**No figures: {fault}.**\n\n"));
    }
    out
}

/// What a plan is, in a line.
pub fn title(plan: &Plan) -> String {
    let mode = serde_json::to_value(plan.mode).unwrap_or_default();
    let mode = mode.as_str().unwrap_or_default().to_owned();
    format!(
        "{} {mode} sends of {} B on {} connections to {} topics × {} queues, flush {}",
        plan.label, plan.body_bytes, plan.connections, plan.topics, plan.queues, plan.flush
    )
    .trim_start()
    .to_owned()
}

/// The plan's marks, and those that scripts wrote while the loop ran.
fn marks_of(plan: &Plan, result: &LoopResult) -> Result<Vec<Mark>, BenchError> {
    let mut marks = plan.marks.clone();
    if let Some(path) = plan.marks_file.as_ref().filter(|path| path.exists()) {
        let text = fs::read_to_string(path)
            .map_err(BenchError::io(format!("read the marks {}", path.display())))?;
        let started_s = since_epoch_ns(result.started) as f64 / 1e9;
        marks.extend(parse_marks(&text, started_s));
    }
    let end_s = result.warm_up_s + result.duration_s;
    marks.retain(|mark| (0.0..=end_s).contains(&mark.at_s));
    Ok(marks)
}

fn parse_marks(text: &str, started_s: f64) -> Vec<Mark> {
    let marks = text.lines().filter_map(|line| {
        let (seconds, words) = line.split_once(' ')?;
        let at_s = seconds.parse::<f64>().ok()? - started_s;
        let text = words.trim().to_owned();
        Some(Mark { at_s, text })
    });
    marks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_audit_is_told_instead_of_figures() {
        let findings = Findings {
            acked: 10,
            lost: 1,
            examples: vec!["offset 7".to_owned()],
            ..Findings::default()
        };
        let outcome = Outcome {
            what: "produce",
            run: 1,
            loops: Vec::new(),
            findings: Some(findings),
            faults: Vec::new(),
        };
        assert!(!outcome.sound());
        let line = audit_line(outcome.findings.as_ref(), &[]);
        assert!(line.contains("No figures") && line.contains("offset 7"));
        let gap = Outcome {
            findings: Some(Findings::default()),
            faults: vec!["a gap".to_owned()],
            ..outcome
        };
        assert!(!gap.sound());
    }

    #[test]
    fn marks_of_scripts_are_told_from_the_start_of_the_loop() {
        let marks = parse_marks("1000.5 writes\nnonsense\n1003 reads a lot\n", 1_000.0);
        assert_eq!(marks.len(), 2);
        assert_eq!((marks[0].at_s, marks[0].text.as_str()), (0.5, "writes"));
        assert_eq!(marks[1].text, "reads a lot");
    }
}
