//! Owns the command line.
//!
//! Invariant: every option has a default that gives a meaningful run on one machine.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use wire::frame::Serialization;

/// Measures brokers that speak the RocketMQ protocol.
#[derive(Parser, Debug)]
#[command(name = "pinion-bench", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Send messages by a schedule (with --rate) or with a fixed number in flight (without).
    Produce(ProduceOptions),
    /// Read a topic from its start to its end, count it and check it.
    Consume(ConsumeOptions),
    /// Acknowledge and forget: the other end for learning what the generator itself can do.
    Sink(SinkOptions),
}

/// How headers are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum HeaderForm {
    /// JSON headers, which most clients use.
    Json,
    /// Binary headers (ROCKETMQ).
    Binary,
}

impl HeaderForm {
    /// The protocol's name of it.
    pub fn serialization(self) -> Serialization {
        match self {
            Self::Json => Serialization::Json,
            Self::Binary => Serialization::Binary,
        }
    }
}

/// Where the topic is.
#[derive(Args, Debug)]
pub struct TopicOptions {
    /// Name server address.
    #[arg(long, default_value = "127.0.0.1:9876")]
    pub namesrv: String,
    /// Topic.
    #[arg(long, default_value = "bench")]
    pub topic: String,
    /// Queues per broker of the topic, should it have to be created.
    #[arg(long, default_value_t = 16)]
    pub queues: u32,
    /// Form of the headers.
    #[arg(long, value_enum, default_value_t = HeaderForm::Json)]
    pub headers: HeaderForm,
    /// Pin the generator's thread to this core.
    #[arg(long)]
    pub core: Option<usize>,
}

/// Options of `produce`.
#[derive(Args, Debug)]
pub struct ProduceOptions {
    /// Where the topic is.
    #[command(flatten)]
    pub topic: TopicOptions,
    /// Connections, spread over the brokers of the topic.
    #[arg(long, default_value_t = 64)]
    pub connections: usize,
    /// Most messages without an answer, over all connections.
    #[arg(long, default_value_t = 2048)]
    pub in_flight: usize,
    /// Bytes of a message body, at least 24.
    #[arg(long, default_value_t = 1024)]
    pub body_bytes: usize,
    /// Seconds that are measured.
    #[arg(long, default_value_t = 10.0)]
    pub duration_s: f64,
    /// Seconds before that, sent but not measured.
    #[arg(long, default_value_t = 5.0)]
    pub warm_up_s: f64,
    /// Messages per second of the schedule; absent for a closed loop.
    #[arg(long)]
    pub rate: Option<u64>,
    /// Seconds to wait for the last answers.
    #[arg(long, default_value_t = 10.0)]
    pub drain_s: f64,
    /// How the broker under test flushes; only a label in the report.
    #[arg(long, default_value = "unknown")]
    pub flush: String,
    /// Any other label for the report.
    #[arg(long, default_value = "")]
    pub label: String,
    /// Where the report goes.
    #[arg(long, default_value = "run.json")]
    pub out: PathBuf,
}

/// Options of `consume`.
#[derive(Args, Debug)]
pub struct ConsumeOptions {
    /// Where the topic is.
    #[command(flatten)]
    pub topic: TopicOptions,
    /// Consumer group of the pulls; no offset is committed.
    #[arg(long, default_value = "bench-reader")]
    pub group: String,
    /// Report of a `produce` run: every message acknowledged in it must be found.
    #[arg(long)]
    pub run: Option<PathBuf>,
    /// Messages asked for at once.
    #[arg(long, default_value_t = 32)]
    pub batch: i32,
}

/// Options of `sink`.
#[derive(Args, Debug)]
pub struct SinkOptions {
    /// Address to listen on, as name server and as broker.
    #[arg(long, default_value = "127.0.0.1:29999")]
    pub listen: String,
    /// Queues it claims to have of every topic.
    #[arg(long, default_value_t = 16)]
    pub queues: u32,
    /// Pin the thread to this core.
    #[arg(long)]
    pub core: Option<usize>,
}
