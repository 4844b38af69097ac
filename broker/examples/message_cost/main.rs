//! What a message costs, in instructions: headers, the append, answers, the mesh, a whole core.
//!
//! Each case runs under valgrind twice, once twice as long as the other; the difference divided by
//! the messages is the cost of one, whatever the start took. Instructions do not depend on how busy
//! the machine is, so the file `limits` can hold them to a bound.
//!
//!     cargo run --release -p pinion --example message_cost
//!
//! measures and fails above a limit. Behind `--`: a word runs the cases whose name has it, `--save`
//! makes what is measured the limit, `--time` gives nanoseconds without valgrind.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a bench"
)]

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

mod cases;
#[path = "../../../shard/tests/support/null.rs"]
mod null;
mod rig;

/// Messages before the first that counts.
const WARM: u64 = 4_000;
/// Messages of the shorter run.
const COUNT: u64 = 4_000;
/// What `--save` leaves above the measured count, in percent: seeds of hash tables differ.
const MARGIN_PERCENT: u64 = 4;

fn limits_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/message_cost/limits")
}

/// Limits by name of the case.
fn limits() -> Vec<(String, u64)> {
    let text = std::fs::read_to_string(limits_path()).unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, limit) = line.split_once(' ').expect("a name and a number");
            (name.to_owned(), limit.trim().parse().expect("a number"))
        })
        .collect()
}

/// Instructions of a whole run of a case.
fn instructions(case: &str, count: u64) -> u64 {
    let exe = std::env::current_exe().expect("own path");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(exe)
        .args(["--run", case, &count.to_string()])
        .output()
        .expect("valgrind can be started (Debian: valgrind)");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case} under valgrind: {text}");
    let collected = text
        .lines()
        .find_map(|line| line.split_once("Collected : "))
        .expect("valgrind tells what it collected");
    collected.1.trim().parse().expect("a number")
}

fn measure(case: &str) -> u64 {
    let (short, long) = (instructions(case, COUNT), instructions(case, 2 * COUNT));
    long.saturating_sub(short).div_ceil(COUNT)
}

fn save(measured: &[(&str, u64)]) {
    let mut all = limits();
    for (name, cost) in measured {
        let limit = cost + (cost * MARGIN_PERCENT).div_ceil(100);
        match all.iter_mut().find(|(known, _)| known == name) {
            Some(entry) => entry.1 = limit,
            None => all.push(((*name).to_owned(), limit)),
        }
    }
    all.retain(|(name, _)| cases::NAMES.contains(&name.as_str()));
    all.sort_by_key(|(name, _)| cases::NAMES.iter().position(|known| known == name));
    let mut text = String::from(
        "# Most instructions a message may cost, checked by scripts/test.\n\
         # Lower them after an improvement: \
         cargo run --release -p pinion --example message_cost -- --save\n\
         # Raise them only with the reason in the commit that does.\n",
    );
    for (name, limit) in &all {
        let _ = writeln!(text, "{name} {limit}");
    }
    std::fs::write(limits_path(), text).expect("limits can be written");
}

fn time(case: &str) {
    // The best of several: others use the machine, too.
    let best = (0..20).map(|_| {
        let mut run = cases::prepare(case);
        run(WARM);
        let start = Instant::now();
        run(COUNT * 4);
        start.elapsed().as_nanos() as f64 / (COUNT * 4) as f64
    });
    let best = best.fold(f64::INFINITY, f64::min);
    println!("{case:24} {best:9.1} ns");
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, case, count] = args.as_slice()
        && flag == "--run"
    {
        let mut run = cases::prepare(case);
        run(WARM);
        run(count.parse().expect("a count"));
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<&String> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    let is_wanted = |name: &&str| wanted.is_empty() || wanted.iter().any(|w| name.contains(*w));
    let names: Vec<&str> = cases::NAMES.iter().copied().filter(is_wanted).collect();
    if args.iter().any(|arg| arg == "--time") {
        names.into_iter().for_each(time);
        return ExitCode::SUCCESS;
    }
    let limits = limits();
    let mut measured = Vec::new();
    let mut over = 0;
    for name in names {
        let cost = measure(name);
        measured.push((name, cost));
        let limit = limits.iter().find(|(known, _)| known == name);
        let verdict = match limit {
            Some((_, limit)) if cost > *limit => {
                over += 1;
                format!("limit {limit}: TOO MUCH")
            }
            Some((_, limit)) => format!("limit {limit}"),
            None => "no limit yet".to_owned(),
        };
        println!("{name:24} {cost:8} instructions   {verdict}");
    }
    if args.iter().any(|arg| arg == "--save") {
        save(&measured);
    } else if over > 0 {
        eprintln!("{over} cases cost more than broker/examples/message_cost/limits allows");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
