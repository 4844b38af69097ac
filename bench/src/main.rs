//! `pinion-bench`: a client that measures. It knows the protocol and nothing of the server's code.
//!
//! Invariant: a message is due at a time fixed before the run; however late the generator or the
//! server is, latency counts from there.

mod cli;
mod consume;
mod error;
mod link;
mod machine;
mod measure;
mod produce;
mod report;
mod session;
mod sink;
mod slots;
mod stamp;
mod template;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let result = match cli::Cli::parse().command {
        cli::Command::Produce(options) => produce::run(&options),
        cli::Command::Consume(options) => consume::run(&options),
        cli::Command::Sink(options) => sink::run(&options),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(2),
        Err(error) => {
            eprintln!("pinion-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
