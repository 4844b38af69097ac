//! Owns the comparison of brokers: a plan against each in turns, and ratios to the last of them.
//!
//! Invariant: a ratio is made within a round, of runs that followed each other, and is told as the
//! median of all rounds with its range; a round without figures on both sides gives none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::cli::{CompareOptions, Measure};
use crate::error::BenchError;
use crate::figures::{self, Spread, spread};
use crate::output::{self, RunDir};
use crate::plan::Plan;
use crate::plot;
use crate::progress::Progress;
use crate::routes;
use crate::scenario::{self, Scenario, Summary};
use crate::sides::{self, Running, Side};
use crate::sweep;

/// Figures of one side in every round.
type Rounds = Vec<Summary>;
/// A side's name and its times.
type Curve = (String, Histogram<u64>);

/// Runs `compare`; true when every run was sound.
pub fn run(options: &CompareOptions, plan: &Plan, progress: &Progress) -> Result<bool, BenchError> {
    let sides = sides::read(&options.sides)?;
    // Before anything is started: a mistake in the last side's plan would show after minutes.
    let plans = sides.iter().map(|side| side.plan(plan));
    let plans: Vec<Plan> = plans.collect::<Result<_, _>>()?;
    let dir = RunDir::create(options.run.out.as_deref(), "compare")?;
    let mut rounds: Vec<Rounds> = vec![Vec::new(); sides.len()];
    for round in 1..=options.rounds.max(1) {
        for ((side, own), summaries) in sides.iter().zip(&plans).zip(&mut rounds) {
            let below = dir.below(&format!("round-{round}-{}", side.name))?;
            summaries.push(one(options.what, side, own, progress, &below)?);
            // Written after every run: a comparison that is broken off leaves what it has.
            write(&dir, plan, &sides, options)?;
        }
        let table = write_table(&dir, plan, &sides, &rounds)?;
        println!("{table}");
        write_curves(&dir, plan, &sides, &rounds)?;
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
        Measure::Routes => routes::run(&plan, progress, dir),
        Measure::Sweep => sweep::run(&plan, progress, dir),
    };
    running.stop()?;
    measured
}

fn write(
    dir: &RunDir,
    plan: &Plan,
    sides: &[Side],
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

/// The times of one loop on every side, each merged over its rounds.
fn merged(sides: &[Side], rounds: &[Rounds], name: &str) -> Result<Vec<Curve>, BenchError> {
    let each = sides.iter().zip(rounds).map(|(side, rounds)| {
        let mut all = figures::histogram()?;
        for times in rounds.iter().filter_map(|round| round.times.get(name)) {
            figures::merge(&mut all, times);
        }
        Ok((side.name.clone(), all))
    });
    each.collect()
}

/// One picture for each loop: the curves of all sides in it.
fn write_curves(
    dir: &RunDir,
    plan: &Plan,
    sides: &[Side],
    rounds: &[Rounds],
) -> Result<(), BenchError> {
    let all = rounds.iter().flatten();
    let names: BTreeSet<&String> = all.flat_map(|round| round.times.keys()).collect();
    for name in names {
        let curves = merged(sides, rounds, name)?;
        let rows: Vec<_> = curves
            .iter()
            .filter(|(_, times)| !times.is_empty())
            .map(|(side, times)| (side.clone(), times))
            .collect();
        let title = format!("{name}: {}", output::title(plan));
        plot::percentiles(&dir.file(&format!("{name}-curve.svg")), &title, &rows)?;
    }
    Ok(())
}

/// Every figure that all sides have in some round.
fn names(rounds: &[Rounds]) -> BTreeSet<&String> {
    let mut each = rounds
        .iter()
        .map(|of| of.iter().flat_map(|summary| summary.figures.keys()));
    let first: BTreeSet<&String> = each.next().into_iter().flatten().collect();
    each.fold(first, |all, others| {
        let others: BTreeSet<&String> = others.collect();
        all.intersection(&others).copied().collect()
    })
}

fn figures_of(rounds: &Rounds, name: &str) -> Vec<f64> {
    let figures = rounds
        .iter()
        .filter_map(|summary| summary.figures.get(name));
    figures.copied().collect()
}

/// Ratios of one side to another, within each round.
fn ratios(of: &Rounds, to: &Rounds, name: &str) -> Vec<f64> {
    of.iter()
        .zip(to)
        .filter_map(|(of, to)| {
            let (of, to) = (of.figures.get(name)?, to.figures.get(name)?);
            (*to != 0.0).then(|| of / to)
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
    sides: &[Side],
    rounds: &[Rounds],
) -> Result<String, BenchError> {
    let all: Vec<&str> = sides.iter().map(|side| side.name.as_str()).collect();
    let Some((base, others)) = all.split_last() else {
        return Ok(String::new());
    };
    let ratio_names: Vec<String> = others.iter().map(|of| format!("{of} ÷ {base}")).collect();
    let columns = all.len() + ratio_names.len() + 1;
    let own_plans: String = sides
        .iter()
        .filter(|side| !side.plan.is_empty())
        .map(|side| format!("; {} with {}", side.name, Value::Object(side.plan.clone())))
        .collect();
    let mut table = format!(
        "# compare: {}\n\n{}{own_plans}; {} rounds in turns; medians (ranges)\n\n\
         | figure | {} | {} |\n{}|\n",
        all.join(", "),
        output::title(plan),
        rounds.last().map_or(0, Vec::len),
        all.join(" | "),
        ratio_names.join(" | "),
        "|---".repeat(columns),
    );
    let mut values = BTreeMap::new();
    for name in names(rounds) {
        let each: Vec<Option<Spread>> = rounds
            .iter()
            .map(|of| spread(&figures_of(of, name)))
            .collect();
        let ratio: Vec<Option<Spread>> = match rounds.split_last() {
            Some((to, of)) => of.iter().map(|of| spread(&ratios(of, to, name))).collect(),
            None => Vec::new(),
        };
        let small = each
            .first()
            .copied()
            .flatten()
            .is_some_and(|own| own.median < 100.0);
        let digits = if small { 2 } else { 0 };
        let figures = each.iter().map(|figure| shown(*figure, digits));
        let cells: Vec<String> = figures
            .chain(ratio.iter().map(|ratio| shown(*ratio, 3)))
            .collect();
        table.push_str(&format!("| {name} | {} |\n", cells.join(" | ")));
        values.insert(name.clone(), json!({ "sides": each, "ratios": ratio }));
    }
    for (side, rounds) in sides.iter().zip(rounds) {
        for (round, summary) in rounds.iter().enumerate() {
            table.push_str(&warnings(&side.name, round + 1, summary));
        }
    }
    dir.write("table.md", table.as_bytes())?;
    let value: Value = json!({ "sides": all, "figures": values });
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
                ..Summary::default()
            })
            .collect()
    }

    #[test]
    fn ratios_are_made_within_a_round() {
        let [of, to] = [rounds(&[100.0, 10.0, 30.0]), rounds(&[50.0, 1.0, 10.0])];
        assert_eq!(ratios(&of, &to, "rate"), [2.0, 10.0, 3.0]);
        assert_eq!(spread(&ratios(&of, &to, "rate")).unwrap().median, 3.0);
    }

    #[test]
    fn a_curve_holds_the_samples_of_all_rounds_of_its_side() {
        let mut both = [rounds(&[1.0, 2.0]), rounds(&[3.0, 4.0])];
        for (side, of) in both.iter_mut().enumerate() {
            for (round, summary) in of.iter_mut().enumerate() {
                let mut times = figures::histogram().unwrap();
                times
                    .record_n(1_000_000 * (1 + side as u64), 10 + round as u64)
                    .unwrap();
                summary.times.insert("open".to_owned(), times);
            }
        }
        let sides = ["a", "b"].map(|name| Side {
            name: name.to_owned(),
            ..Side::default()
        });
        let curves = merged(&sides, &both, "open").unwrap();
        let seen = curves.iter().map(|(name, all)| (name.as_str(), all.len()));
        assert_eq!(seen.collect::<Vec<_>>(), [("a", 21), ("b", 21)]);
    }

    #[test]
    fn a_round_without_figures_gives_no_ratio() {
        let mut both = [rounds(&[100.0, 10.0]), rounds(&[50.0, 5.0])];
        both[0][1].figures.clear();
        both[0][1].sound = false;
        assert_eq!(ratios(&both[0], &both[1], "rate"), [2.0]);
        assert_eq!(names(&both).len(), 1);
        assert!(warnings("a", 2, &both[0][1]).contains("no figures"));
    }
}
