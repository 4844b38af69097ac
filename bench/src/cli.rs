//! Owns the command line.
//!
//! Invariant: every option has a default that gives a meaningful run on one machine; an option of a
//! plan that is absent leaves the plan's file in force.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};

use crate::plan::{HeaderForm, SendMode};

/// Measures brokers that speak the RocketMQ protocol.
#[derive(Parser, Debug)]
#[command(name = "pinion-bench", version, about)]
pub struct Cli {
    /// Run although this is a debug build: for the program's own tests, whose figures nobody reads.
    #[arg(long, global = true, hide = true)]
    pub debug_build: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Send: by a schedule (--rate), with a fixed number in flight (--in-flight), or both in turn
    Produce(RunOptions),
    /// Send to and read from one topic, a little of each: from born to delivered
    Consume(RunOptions),
    /// Send and read at the same time, as fast as the plan says
    Mixed(RunOptions),
    /// Send and read the tail, first alone, then beside readers of old messages
    CatchUp(RunOptions),
    /// Find the sustainable rate, then measure shares of it
    Sweep(RunOptions),
    /// Ask a name server for routes, closed loop: the rate it answers
    Routes(RunOptions),
    /// Measure brokers in turns (A B A B …) and give ratios
    Compare(CompareOptions),
    /// Measure against a broker that parses and answers but stores nothing: the ceiling
    Null(NullOptions),
    /// Probe the disk under a directory
    Device(DeviceOptions),
    /// Read a topic from its start to its end, count it and check it
    Verify(VerifyOptions),
    /// Acknowledge and forget: the other end for learning what the generator itself can do
    Sink(SinkOptions),
}

/// What a plan's file may say, too.
#[derive(Args, Debug, Default, Clone, Serialize)]
pub struct PlanOptions {
    /// File with a plan (TOML); the options below win over it
    #[arg(long)]
    #[serde(skip)]
    pub plan: Option<PathBuf>,
    /// Name server address (127.0.0.1:9876)
    #[arg(long)]
    pub namesrv: Option<String>,
    /// Topic (bench)
    #[arg(long)]
    pub topic: Option<String>,
    /// Topics (1)
    #[arg(long)]
    pub topics: Option<usize>,
    /// Queues per topic and broker, should a topic have to be created (16)
    #[arg(long)]
    pub queues: Option<u32>,
    /// Form of the headers (json)
    #[arg(long, value_enum)]
    pub headers: Option<HeaderForm>,
    /// Pin the generator's thread to this CPU
    #[arg(long)]
    pub core: Option<usize>,
    /// Connections that send, spread over the brokers of the topics (64)
    #[arg(long)]
    pub connections: Option<usize>,
    /// Further connections that do nothing (0)
    #[arg(long)]
    pub idle_connections: Option<usize>,
    /// How messages are sent (async)
    #[arg(long, value_enum)]
    pub mode: Option<SendMode>,
    /// Messages of a batch (16)
    #[arg(long)]
    pub batch: Option<usize>,
    /// Bytes of a message body, at least 32 (1024)
    #[arg(long)]
    pub body_bytes: Option<usize>,
    /// Tag of the messages
    #[arg(long)]
    pub tag: Option<String>,
    /// Open loop: messages per second
    #[arg(long)]
    pub rate: Option<u64>,
    /// Closed loop: requests in flight, over all connections (2048 when there is no --rate)
    #[arg(long)]
    pub in_flight: Option<usize>,
    /// Seconds that are measured (10)
    #[arg(long)]
    pub duration_s: Option<f64>,
    /// Seconds before that, sent but not measured (5)
    #[arg(long)]
    pub warm_up_s: Option<f64>,
    /// Seconds to wait for the last answers (10)
    #[arg(long)]
    pub drain_s: Option<f64>,
    /// How the broker under test flushes: a label
    #[arg(long)]
    pub flush: Option<String>,
    /// Any other label
    #[arg(long)]
    pub label: Option<String>,
    /// Connections that read the tail (1)
    #[arg(long)]
    pub consumers: Option<usize>,
    /// Connections that read old messages in catch-up (4)
    #[arg(long)]
    pub cold_connections: Option<usize>,
    /// Bytes of old messages there are at least before catch-up measures (1 GiB)
    #[arg(long)]
    pub cold_bytes: Option<u64>,
    /// Directory on the store's disk, for the device probe just before the run
    #[arg(long)]
    pub store_dir: Option<PathBuf>,
    /// Shell command that prints the server's process ids, for its CPU time
    #[arg(long)]
    pub server_pids: Option<String>,
    /// CPUs given to the server: a label
    #[arg(long)]
    pub server_cores: Option<String>,
    /// File of marks that scripts append to: seconds since 1970, then the text
    #[arg(long)]
    pub marks_file: Option<PathBuf>,
    /// Do not look for every acknowledged message afterwards; the report says so
    #[arg(long)]
    #[serde(skip)]
    pub no_audit: bool,
}

impl PlanOptions {
    /// The fields of a plan that the command line sets.
    pub fn fields(&self) -> Value {
        let mut fields = serde_json::to_value(self).unwrap_or_default();
        if let (true, Value::Object(map)) = (self.no_audit, &mut fields) {
            map.insert("audit".to_owned(), json!(false));
        }
        fields
    }
}

/// Options of everything that runs a plan.
#[derive(Args, Debug, Clone)]
pub struct RunOptions {
    /// The plan
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Directory of the reports (bench-runs/<what>-<time>)
    #[arg(long)]
    pub out: Option<PathBuf>,
}

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Measure {
    /// `produce`
    Produce,
    /// `sweep`: the sustainable rate
    Sweep,
    /// `consume`
    Consume,
    /// `mixed`
    Mixed,
    /// `catch-up`
    CatchUp,
    /// `routes`
    Routes,
}

/// Options of `compare`.
#[derive(Args, Debug)]
pub struct CompareOptions {
    /// The plan of every run
    #[command(flatten)]
    pub run: RunOptions,
    /// File that says how the sides are started and stopped
    #[arg(long)]
    pub sides: PathBuf,
    /// Rounds, each of one run of every side
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// What is measured
    #[arg(long, value_enum, default_value_t = Measure::Produce)]
    pub what: Measure,
}

/// Options of `null`.
#[derive(Args, Debug)]
pub struct NullOptions {
    /// The plan
    #[command(flatten)]
    pub run: RunOptions,
    /// CPUs of the null broker
    #[arg(long, default_value = "0")]
    pub null_cores: String,
    /// Port of the null broker; its name server takes the one above
    #[arg(long, default_value_t = 29_911)]
    pub null_port: u16,
}

/// Options of `device`.
#[derive(Args, Debug)]
pub struct DeviceOptions {
    /// Directory on the disk
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// Size of the file that is written and read
    #[arg(long, default_value_t = 256 << 20)]
    pub bytes: u64,
    /// Seconds of each test
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Directory of the reports (bench-runs/device-<time>)
    #[arg(long)]
    pub out: Option<PathBuf>,
}

/// Options of `verify`.
#[derive(Args, Debug)]
pub struct VerifyOptions {
    /// The topic
    #[command(flatten)]
    pub plan: PlanOptions,
}

/// Options of `sink`.
#[derive(Args, Debug)]
pub struct SinkOptions {
    /// Address to listen on, as name server and as broker
    #[arg(long, default_value = "127.0.0.1:29999")]
    pub listen: String,
    /// Queues it claims to have of every topic
    #[arg(long, default_value_t = 16)]
    pub queues: u32,
    /// Pin the thread to this CPU
    #[arg(long)]
    pub core: Option<usize>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_names_every_command() {
        Cli::command().debug_assert();
        let help = Cli::command().render_long_help().to_string();
        for word in [
            "produce", "consume", "mixed", "catch-up", "sweep", "routes", "compare", "null",
            "device",
        ] {
            assert!(help.contains(word), "{word}");
        }
    }
}
