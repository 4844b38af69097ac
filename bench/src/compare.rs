//! Owns the comparison of two brokers: the same plan against either in turns, and ratios.
//!
//! Invariant: a ratio is made within a round, of two runs that followed each other, and is told as
//! the median of all rounds with its range; a round without figures on both sides gives none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::{CompareOptions, Measure};
use crate::error::BenchError;
use crate::figures::{Spread, spread};
use crate::output::{self, RunDir};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::scenario::{self, Scenario, Summary};
use crate::sides::{self, Running, Side};
use crate::sweep;

/// Figures of one side in every round.
type Rounds = Vec<Summary>;

/// Runs `compare`; true when every run was sound.
pub fn run(options: &CompareOptions, plan: &Plan, progress: &Progress) -> Result<bool, BenchError> {
    let sides = sides::read(&options.sides)?;
    let dir = RunDir::create(options.run.out.as_deref(), "compare")?;
    let mut rounds: [Rounds; 2] = [Vec::new(), Vec::new()];
    for round in 1..=options.rounds.max(1) {
        for (side, summaries) in sides.iter().zip(&mut rounds) {
            let below = dir.below(&format!("round-{round}-{}", side.name))?;
            summaries.push(one(options.what, side, plan, progress, &below)?);
            // Written after every run: a comparison that is broken off leaves what it has.
            write(&dir, plan, &sides, options)?;
        }
        let table = write_table(&dir, plan, &sides, &rounds)?;
        println!("{table}");
    }
    Ok(rounds.iter().flatten().all(|summary| summary.sound))
}

fn one(
    what: Measure,
    side: &Side,
    plan: &Plan,
    progress: &Progress,
    dir: &RunDir,
) -> Result<Summary, BenchError> {
    let mut running = Running::start(side)?;
    let plan = Plan {
        namesrv: side.namesrv.clone(),
        label: format!("{} {}", side.name, plan.label).trim().to_owned(),
        server_pids: running.pids_command(),
        server_cores: side.cores.clone(),
        ..plan.clone()
    };
    let measured = match what {
        Measure::Produce => scenario::run(Scenario::Produce, &plan, progress, dir),
        Measure::Consume => scenario::run(Scenario::Consume, &plan, progress, dir),
        Measure::Mixed => scenario::run(Scenario::Mixed, &plan, progress, dir),
        Measure::CatchUp => scenario::run(Scenario::CatchUp, &plan, progress, dir),
        Measure::Sweep => sweep::run(&plan, progress, dir),
    };
    running.stop()?;
    measured
}

fn write(
    dir: &RunDir,
    plan: &Plan,
    sides: &[Side; 2],
    options: &CompareOptions,
) -> Result<(), BenchError> {
    let value = json!({
        "format": output::FORMAT,
        "command": "compare",
        "what": format!("{:?}", options.what).to_lowercase(),
        "rounds": options.rounds,
        "plan": plan,
        "sides": sides,
    });
    dir.write_json("plan.json", &value)
}

/// Every figure that both sides have in some round.
fn names(rounds: &[Rounds; 2]) -> BTreeSet<&String> {
    let [a, b] = rounds;
    let of = |rounds: &'_ Rounds| -> BTreeSet<String> {
        let figures = rounds.iter().flat_map(|summary| summary.figures.keys());
        figures.cloned().collect()
    };
    let theirs = of(b);
    let ours = a.iter().flat_map(|summary| summary.figures.keys());
    ours.filter(|name| theirs.contains(*name)).collect()
}

fn figures_of(rounds: &Rounds, name: &str) -> Vec<f64> {
    let figures = rounds
        .iter()
        .filter_map(|summary| summary.figures.get(name));
    figures.copied().collect()
}

/// Ratios of the first side to the second, within each round.
fn ratios(rounds: &[Rounds; 2], name: &str) -> Vec<f64> {
    let [a, b] = rounds;
    a.iter()
        .zip(b)
        .filter_map(|(a, b)| {
            let (ours, theirs) = (a.figures.get(name)?, b.figures.get(name)?);
            (*theirs != 0.0).then(|| ours / theirs)
        })
        .collect()
}

fn shown(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or("–".to_owned(), |spread| {
        format!(
            "{:.digits$} ({:.digits$}–{:.digits$})",
            spread.median, spread.least, spread.greatest
        )
    })
}

fn write_table(
    dir: &RunDir,
    plan: &Plan,
    sides: &[Side; 2],
    rounds: &[Rounds; 2],
) -> Result<String, BenchError> {
    let [a, b] = sides;
    let [ours, theirs] = rounds;
    let mut table = format!(
        "# compare: {} and {}\n\n{}; {} rounds in turns; medians (ranges)\n\n| figure | {} | {} | \
         {} ÷ {} |\n|---|---|---|---|\n",
        a.name,
        b.name,
        output::title(plan),
        theirs.len(),
        a.name,
        b.name,
        a.name,
        b.name
    );
    let mut values = BTreeMap::new();
    for name in names(rounds) {
        let all = [
            spread(&figures_of(ours, name)),
            spread(&figures_of(theirs, name)),
            spread(&ratios(rounds, name)),
        ];
        let [own, other, ratio] = all;
        let digits = if own.is_some_and(|own| own.median < 100.0) {
            2
        } else {
            0
        };
        table.push_str(&format!(
            "| {name} | {} | {} | {} |\n",
            shown(own, digits),
            shown(other, digits),
            shown(ratio, 3)
        ));
        values.insert(
            name.clone(),
            json!({ "a": own, "b": other, "ratio": ratio }),
        );
    }
    for (side, rounds) in sides.iter().zip(rounds) {
        for (round, summary) in rounds.iter().enumerate() {
            table.push_str(&warnings(&side.name, round + 1, summary));
        }
    }
    dir.write("table.md", table.as_bytes())?;
    let value: Value = json!({ "a": a.name, "b": b.name, "figures": values });
    dir.write_json("compare.json", &value)?;
    Ok(table)
}

fn warnings(side: &str, round: usize, summary: &Summary) -> String {
    let mut out = String::new();
    if !summary.sound {
        out.push_str(&format!(
            "\n**{side}, round {round}: no figures, the audit failed.**\n"
        ));
    }
    for refusal in &summary.refusals {
        out.push_str(&format!(
            "\nNot a headline ({side}, round {round}): {refusal}\n"
        ));
    }
    out
}

/// The path of a program beside this one.
pub fn beside(name: &str) -> Result<std::path::PathBuf, BenchError> {
    let own = std::env::current_exe().map_err(BenchError::io("find this program's own file"))?;
    let path = own.parent().unwrap_or(Path::new(".")).join(name);
    if path.exists() {
        return Ok(path);
    }
    Err(BenchError::Option(format!(
        "{} is not there; build it with `cargo build --release -p pinion -p bench`",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(figures: &[f64]) -> Rounds {
        figures
            .iter()
            .map(|figure| Summary {
                figures: [("rate".to_owned(), *figure)].into(),
                sound: true,
                refusals: Vec::new(),
            })
            .collect()
    }

    #[test]
    fn ratios_are_made_within_a_round() {
        let both = [rounds(&[100.0, 10.0, 30.0]), rounds(&[50.0, 1.0, 10.0])];
        assert_eq!(ratios(&both, "rate"), [2.0, 10.0, 3.0]);
        assert_eq!(spread(&ratios(&both, "rate")).unwrap().median, 3.0);
    }

    #[test]
    fn a_round_without_figures_gives_no_ratio() {
        let mut both = [rounds(&[100.0, 10.0]), rounds(&[50.0, 5.0])];
        both[0][1].figures.clear();
        both[0][1].sound = false;
        assert_eq!(ratios(&both, "rate"), [2.0]);
        assert_eq!(names(&both).len(), 1);
        assert!(warnings("a", 2, &both[0][1]).contains("no figures"));
    }
}
