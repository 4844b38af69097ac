//! The program's entry: reads the command line, checks settings and machine, and runs what was
//! asked for.
//!
//! Invariant: nothing is made on disk and nothing is bound before settings and machine passed their
//! checks, and every way out has a text for the operator and an exit status.

pub mod args;
pub mod banner;
mod fuse;
pub mod plan;

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser as _;

use crate::config::HostFacts;
use crate::config::table::Table as _;
use crate::doctor;
use args::{Command, CommandLine};
pub use plan::{NamesrvPlan, RunPlan, Settings};

/// Exit status when the start was refused or the run failed.
pub const EXIT_FAILED: u8 = 1;

/// Exit status when the command line or a setting is malformed.
pub const EXIT_MALFORMED: u8 = 2;

/// Settings that `-m` prints, as RocketMQ chooses them.
const IMPORTANT_KEYS: [&str; 24] = [
    "namesrvAddr",
    "brokerIP1",
    "brokerIP2",
    "brokerName",
    "brokerClusterName",
    "brokerId",
    "autoCreateTopicEnable",
    "autoCreateSubscriptionGroup",
    "rejectTransactionMessage",
    "transactionTimeOut",
    "transactionCheckMax",
    "transactionCheckInterval",
    "listenPort",
    "storePathRootDir",
    "storePathCommitLog",
    "mappedFileSizeCommitLog",
    "flushIntervalCommitLog",
    "deleteWhen",
    "fileReservedTime",
    "maxMessageSize",
    "diskMaxUsedSpaceRatio",
    "brokerRole",
    "flushDiskType",
    "haListenPort",
];

/// Runs the program with the process's own command line.
#[must_use]
pub fn main() -> ExitCode {
    let began = Instant::now();
    let line = match CommandLine::try_parse_from(words(std::env::args_os())) {
        Ok(line) => line,
        Err(error) => {
            // Help and version come this way too, and go to stdout with status 0.
            let _ = error.print();
            let status = if error.use_stderr() {
                EXIT_MALFORMED
            } else {
                0
            };
            return ExitCode::from(status);
        }
    };
    run(line, began)
}

/// The command line with the command that the program's own name stands for: RocketMQ's scripts and
/// images call `mqbroker` and `mqnamesrv`.
fn words(mut line: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let program = line.next().unwrap_or_default();
    let name = Path::new(&program)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let command = match name.as_str() {
        "mqbroker" => Some("broker"),
        "mqnamesrv" => Some("namesrv"),
        _ => None,
    };
    let mut words = vec![program];
    words.extend(command.map(OsString::from));
    words.extend(line);
    words
}

fn run(line: CommandLine, began: Instant) -> ExitCode {
    let host = HostFacts::of_this_machine();
    let command = line.command.unwrap_or(Command::Standalone(line.standalone));
    let (settings, print) = match &command {
        Command::Standalone(args) => (
            Settings::standalone(args, &host),
            if args.print_config {
                Print::All
            } else {
                Print::No
            },
        ),
        Command::Broker(args) => {
            let print = match (args.print_config, args.print_important) {
                (true, _) => Print::All,
                (_, true) => Print::Important,
                _ => Print::No,
            };
            (Settings::broker(args, &host), print)
        }
        Command::Namesrv(args) => {
            let print = args.print_config || args.port == Some(None);
            (
                Settings::namesrv(args, &host),
                if print { Print::All } else { Print::No },
            )
        }
        Command::Doctor(args) => (Settings::doctor(args, &host), Print::No),
        Command::Inspect(args) => return crate::inspect::run(args),
        Command::Null(args) => (Settings::null(args, &host), Print::No),
        Command::Fuse(args) => return fuse::run(args),
        Command::Explain(args) => return crate::explain::run(args),
    };
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => {
            complain(&format!("pinion: {error}"));
            return ExitCode::from(EXIT_MALFORMED);
        }
    };
    if matches!(command, Command::Doctor(_)) {
        return examine(&settings);
    }
    if print != Print::No {
        settings
            .notes()
            .for_each(|note| complain(&format!("warning: {note}")));
        say(&printed(&settings, print));
        return ExitCode::SUCCESS;
    }
    let Command::Null(args) = &command else {
        return start(settings, began, false);
    };
    let status = start(settings, began, true);
    // Nothing in it is of use to anybody, so a failure to remove it is no failure of the run.
    let _ = std::fs::remove_dir_all(args.data());
    status
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Print {
    No,
    Important,
    All,
}

fn printed(settings: &Settings, print: Print) -> String {
    let mut out = String::new();
    if settings.broker {
        match print {
            Print::Important => {
                for key in IMPORTANT_KEYS {
                    let value = settings.config.text_of(key).unwrap_or_default();
                    out.push_str(&format!("{key}={value}\n"));
                }
            }
            _ => out.push_str(&settings.config.to_printed_text()),
        }
    }
    if let Some(namesrv) = &settings.namesrv {
        out.push_str("# name server\n");
        out.push_str(&namesrv.config.to_printed_text());
    }
    out
}

fn examine(settings: &Settings) -> ExitCode {
    let checks = doctor::examine(&settings.config);
    say(&doctor::checks::table(&checks));
    let refuses = checks
        .iter()
        .any(|check| check.state == doctor::checks::State::Refuses);
    ExitCode::from(if refuses { EXIT_FAILED } else { 0 })
}

fn start(settings: Settings, began: Instant, null: bool) -> ExitCode {
    init_log();
    for note in settings.notes() {
        tracing::warn!("{note}");
    }
    let checked = if settings.broker {
        doctor::check_start(&settings.config)
    } else {
        doctor::check_start_of_name_server(&settings.config)
    };
    let granted = match checked {
        Ok(granted) => granted,
        Err(refused) => {
            complain(&format!("pinion: {refused}"));
            return ExitCode::from(EXIT_FAILED);
        }
    };
    let Settings {
        config,
        namesrv,
        broker,
    } = settings;
    match crate::core::run(RunPlan {
        config,
        namesrv,
        broker,
        granted,
        began,
        null,
    }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("pinion: {error}"));
            ExitCode::from(EXIT_FAILED)
        }
    }
}

fn init_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("PINION_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    // A second start in one process (a test) keeps the first log.
    let _ = tracing_subscriber::fmt()
        // A line that cannot be written is lost; saying so would end the process when the disk
        // behind stderr is full.
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_ansi(colours)
        .with_target(false)
        .with_writer(std::io::stderr)
        .try_init();
}

/// Prints to stdout. A reader that went away is no reason to fail.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints a line to stderr.
pub fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
