//! The command line: commands, options and their help.
//!
//! Invariant: an option that sets something becomes a setting of the same name in the top layer;
//! nothing is decided here that the config file could not decide.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// What the help says after the options.
const AFTER_HELP: &str = "\
Settings come from defaults, the config file, the environment (NAMESRV_ADDR, BROKER_NAME,
PINION_CONF_<key> with _ for .) and the command line, the later over the earlier;
--print-config shows each with its origin. PINION_LOG sets the log level (info).

Exit status: 0 after a clean stop, 1 when the start was refused or the run failed,
2 when the command line or a setting is malformed.";

/// Message broker and name server that speaks the RocketMQ protocol.
///
/// Without a command: name server and broker in one process, data in ./data.
#[derive(Debug, Parser)]
#[command(name = "pinion", version, args_conflicts_with_subcommands = true)]
#[command(after_help = AFTER_HELP)]
pub struct CommandLine {
    /// What to do.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the default command.
    #[command(flatten)]
    pub standalone: StandaloneArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Name server and broker in one process (the default)
    Standalone(StandaloneArgs),
    /// A broker alone; takes the options of mqbroker
    Broker(BrokerArgs),
    /// A name server alone; takes the options of mqnamesrv
    Namesrv(NamesrvArgs),
    /// Check this machine: each value, what is needed, and the line that fixes it
    Doctor(DoctorArgs),
    /// Walk a store that no broker has open: segments, records, checksums, gaps
    Inspect(InspectArgs),
    /// Answer sends and store nothing: what the benchmark measures its ceiling against
    #[command(hide = true)]
    Null(NullArgs),
    /// Show the fuse of a name server (which brokers are out of the write path, until when, why)
    /// or of a broker (which of its disks hang)
    Fuse(FuseArgs),
    /// Say where a message is, who got it, and why it waits
    Explain(ExplainArgs),
}

/// Options that set things of the machine and of the store.
#[derive(Debug, Default, Clone, Args)]
pub struct PlaceArgs {
    /// Shards of the store; 0: as many as cores. A store may grow and never has fewer than before
    #[arg(long, value_name = "N")]
    pub shards: Option<String>,
    /// CPUs to run on, such as 0,2-3 (all this process may use)
    #[arg(long, value_name = "LIST")]
    pub cores: Option<String>,
    /// Config file of RocketMQ's kind (broker.conf)
    #[arg(
        short,
        long = "config",
        visible_alias = "configFile",
        value_name = "FILE"
    )]
    pub config: Option<PathBuf>,
    /// Set one key, over everything else; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Options of `standalone`.
#[derive(Debug, Default, Args)]
pub struct StandaloneArgs {
    /// Directory of everything that is kept
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Port of the name server
    #[arg(long, value_name = "PORT", default_value_t = 9_876)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub namesrv_port: u16,
    /// Port of the broker (10911)
    #[arg(long, value_name = "PORT")]
    pub broker_port: Option<String>,
    /// Place
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Print every setting with its origin and stop
    #[arg(long)]
    pub print_config: bool,
}

/// Options of `broker`.
#[derive(Debug, Args)]
pub struct BrokerArgs {
    /// Directory of the store (storePathRootDir, ~/store)
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Name servers, such as 10.0.0.1:9876;10.0.0.2:9876
    #[arg(
        short,
        long = "namesrv",
        visible_alias = "namesrvAddr",
        value_name = "ADDRESSES"
    )]
    pub namesrv: Option<String>,
    /// Port of the broker (10911)
    #[arg(long, value_name = "PORT")]
    pub broker_port: Option<String>,
    /// Place
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Print every setting with its origin and stop
    #[arg(short = 'p', long, visible_alias = "printConfigItem")]
    pub print_config: bool,
    /// Print the settings that matter most and stop
    #[arg(short = 'm', long, visible_alias = "printImportantConfig")]
    pub print_important: bool,
}

/// Options of `namesrv`.
#[derive(Debug, Args)]
pub struct NamesrvArgs {
    /// Config file of RocketMQ's kind (namesrv.conf)
    #[arg(
        short,
        long = "config",
        visible_alias = "configFile",
        value_name = "FILE"
    )]
    pub config: Option<PathBuf>,
    /// Port (9876); without a port: print every setting and stop
    #[arg(short, long, value_name = "PORT", num_args = 0..=1)]
    pub port: Option<Option<String>>,
    /// Directory of the key-value settings
    #[arg(long, value_name = "DIR", default_value = "./data")]
    pub data: PathBuf,
    /// CPUs to run on (one of those this process may use)
    #[arg(long, value_name = "LIST")]
    pub cores: Option<String>,
    /// Set one key, over everything else; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Ignored; name servers do not know each other
    #[arg(short, long = "namesrv", value_name = "ADDRESSES", hide = true)]
    pub namesrv: Option<String>,
    /// Print every setting with its origin and stop
    #[arg(long, visible_alias = "printConfigItem")]
    pub print_config: bool,
}

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Directory the store is or would be in
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Place
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Options of `inspect`.
#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    /// Directory of the store
    #[arg(long, value_name = "DIR", default_value = "./data")]
    pub data: PathBuf,
    /// Only this shard
    #[arg(long, value_name = "N")]
    pub shard: Option<u64>,
    /// Only this topic
    #[arg(long, value_name = "NAME")]
    pub topic: Option<String>,
    /// Print a line for each record
    #[arg(long)]
    pub records: bool,
    /// Directory of write buffers that outlive the process (/dev/shm)
    #[arg(long, value_name = "DIR")]
    pub buffer_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `null`.
#[derive(Debug, Clone, Args)]
pub struct NullArgs {
    /// Port of the broker
    #[arg(long, value_name = "PORT", default_value_t = 10_911)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Port of the name server
    #[arg(long, value_name = "PORT", default_value_t = 9_876)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub namesrv_port: u16,
    /// CPUs to run on, one shard on each (all this process may use)
    #[arg(long, value_name = "LIST")]
    pub cores: Option<String>,
}

impl NullArgs {
    /// Where topics and groups are kept while it runs.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        std::env::temp_dir().join(format!("pinion-null-{}", std::process::id()))
    }
}

/// Options of `fuse`.
#[derive(Debug, Clone, Args)]
pub struct FuseArgs {
    /// Name server to ask
    #[arg(short, long = "namesrv", value_name = "HOST:PORT")]
    #[arg(default_value = "127.0.0.1:9876")]
    pub namesrv: String,
    /// Broker to ask instead
    #[arg(short, long = "broker", value_name = "HOST:PORT")]
    pub broker: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `explain`.
#[derive(Debug, Clone, Default, Args)]
#[command(group = clap::ArgGroup::new("message").required(true).args(["id", "key", "queue"]))]
pub struct ExplainArgs {
    /// Name servers to ask, the first that answers
    #[arg(short, long = "namesrv", value_name = "HOST:PORT")]
    #[arg(default_value = "127.0.0.1:9876")]
    pub namesrv: String,
    /// Topic; needed but for an offset id
    #[arg(short, long, value_name = "NAME")]
    pub topic: Option<String>,
    /// Consumer group that should get the message
    #[arg(short, long, value_name = "NAME")]
    pub group: Option<String>,
    /// Message id: the offset id of the broker, or the unique key of the client
    #[arg(long, value_name = "ID")]
    pub id: Option<String>,
    /// Key of the message
    #[arg(long, value_name = "KEY", requires = "topic")]
    pub key: Option<String>,
    /// Queue of the message, with --offset
    #[arg(long, value_name = "N", requires_all = ["offset", "topic"])]
    pub queue: Option<i32>,
    /// Its offset in the queue
    #[arg(long, value_name = "N", requires = "queue")]
    pub offset: Option<i64>,
    /// Broker of the queue, where several have the topic
    #[arg(long, value_name = "NAME")]
    pub broker: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
