//! Owns what a run is asked to do: a file (TOML), the command line over it, and the bounds of both.
//!
//! Invariant: a plan that passed [`Plan::check`] can be run; every key of a file is known, and what
//! the command line says wins over the file, which wins over the defaults.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use wire::frame::Serialization;

use crate::cli::PlanOptions;
use crate::error::BenchError;
use crate::slots::IN_FLIGHT_MAX;
use crate::stamp::STAMP_BYTES;

/// Most connections of each kind.
pub const CONNECTIONS_MAX: usize = 8_192;
/// Largest body.
pub const BODY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Most queues, over all topics.
pub const QUEUES_MAX: usize = 200_000;
/// Most messages of a batch.
pub const BATCH_MAX: usize = 1_024;
/// Highest rate.
pub const RATE_MAX: u64 = 1_000_000_000;
/// Longest time of anything.
pub const SECONDS_MAX: f64 = 86_400.0;
/// Most connections without traffic.
pub const IDLE_CONNECTIONS_MAX: usize = 50_000;

/// How headers are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeaderForm {
    /// JSON headers, which most clients use.
    #[default]
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

/// How messages are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SendMode {
    /// Several in flight on a connection.
    #[default]
    Async,
    /// One in flight on each connection.
    Sync,
    /// Without an answer.
    OneWay,
    /// Several messages in a request.
    Batch,
}

/// When a rate counts as sustained, and how it is looked for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SweepPlan {
    /// Share of the asked rate that must be achieved.
    pub achieved_share_min: f64,
    /// Highest p99 of the latency, in milliseconds.
    pub p99_max_ms: f64,
    /// Seconds of each trial of the search.
    pub trial_s: f64,
    /// The search ends when it is known this exactly.
    pub resolution: f64,
    /// First rate tried; absent: eight tenths of what a closed loop reaches.
    pub first_rate: Option<u64>,
    /// Shares of the sustainable rate that are measured, in percent.
    pub steps_percent: Vec<u32>,
}

impl Default for SweepPlan {
    fn default() -> Self {
        Self {
            achieved_share_min: 0.99,
            p99_max_ms: 100.0,
            trial_s: 5.0,
            resolution: 0.05,
            first_rate: None,
            steps_percent: (1..=10).map(|tenth| tenth * 10).collect(),
        }
    }
}

/// Something done to the machine during a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// Seconds since the run began, warm-up included.
    pub at_s: f64,
    /// What.
    pub text: String,
}

/// A plan.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plan {
    /// Name server address.
    pub namesrv: String,
    /// Topic; with several topics the start of their names.
    pub topic: String,
    /// Topics.
    pub topics: usize,
    /// Queues per topic and broker, should a topic have to be created.
    pub queues: u32,
    /// Form of the headers.
    pub headers: HeaderForm,
    /// CPU of the generator's thread.
    pub core: Option<usize>,
    /// Connections that send.
    pub connections: usize,
    /// Further connections that do nothing.
    pub idle_connections: usize,
    /// How messages are sent.
    pub mode: SendMode,
    /// Messages of a batch.
    pub batch: usize,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Whether messages have a key.
    pub keys: bool,
    /// Tag of the messages, if any.
    pub tag: String,
    /// Further properties of the messages.
    pub properties: BTreeMap<String, String>,
    /// Open loop: messages per second.
    pub rate: Option<u64>,
    /// Closed loop: requests in flight, over all connections.
    pub in_flight: Option<usize>,
    /// Seconds that are measured.
    pub duration_s: f64,
    /// Seconds before that, sent but not measured.
    pub warm_up_s: f64,
    /// Seconds to wait for the last answers.
    pub drain_s: f64,
    /// How the broker under test flushes; a label, since a client cannot see it.
    pub flush: String,
    /// Any other label.
    pub label: String,
    /// Connections that read the tail (`consume`, `mixed`, `catch-up`).
    pub consumers: usize,
    /// Connections that read old messages (`catch-up`).
    pub cold_connections: usize,
    /// Bytes of old messages that are there at least before `catch-up` measures.
    pub cold_bytes: u64,
    /// Messages asked for in a pull.
    pub pull_batch: u32,
    /// Consumer group of the pulls; no offset is committed.
    pub group: String,
    /// Whether every acknowledged message is looked for after the run.
    pub audit: bool,
    /// Directory on the store's disk, for the device probe just before the run.
    pub store_dir: Option<PathBuf>,
    /// Shell command that prints the process ids of the server, for its CPU time.
    pub server_pids: Option<String>,
    /// CPUs given to the server; a label.
    pub server_cores: String,
    /// What was done to the machine when.
    pub marks: Vec<Mark>,
    /// File to which scripts append such marks while it runs: seconds since 1970, then the text.
    pub marks_file: Option<PathBuf>,
    /// How a sustainable rate is looked for.
    pub sweep: SweepPlan,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            namesrv: "127.0.0.1:9876".to_owned(),
            topic: "bench".to_owned(),
            topics: 1,
            queues: 16,
            headers: HeaderForm::Json,
            core: None,
            connections: 64,
            idle_connections: 0,
            mode: SendMode::Async,
            batch: 16,
            body_bytes: 1_024,
            keys: false,
            tag: String::new(),
            properties: BTreeMap::new(),
            rate: None,
            in_flight: None,
            duration_s: 10.0,
            warm_up_s: 5.0,
            drain_s: 10.0,
            flush: "unknown".to_owned(),
            label: String::new(),
            consumers: 1,
            cold_connections: 4,
            cold_bytes: 1 << 30,
            pull_batch: 32,
            group: "bench-reader".to_owned(),
            audit: true,
            store_dir: None,
            server_pids: None,
            server_cores: "unknown".to_owned(),
            marks: Vec::new(),
            marks_file: None,
            sweep: SweepPlan::default(),
        }
    }
}

/// Requests in flight of a closed loop that nobody asked for otherwise.
const IN_FLIGHT_DEFAULT: usize = 2_048;

impl Plan {
    /// Reads the file, if one is named, and lays the command line over it.
    pub fn load(options: &PlanOptions) -> Result<Self, BenchError> {
        let mut text = String::new();
        if let Some(path) = &options.plan {
            let reading = BenchError::io(format!("read the plan {}", path.display()));
            text = fs::read_to_string(path).map_err(reading)?;
        }
        let plan =
            Self::merged(&text, options.fields()).map_err(|problem| match &options.plan {
                Some(path) => BenchError::Option(format!("{}: {problem}", path.display())),
                None => BenchError::Option(problem),
            })?;
        plan.check()?;
        Ok(plan)
    }

    /// A file's text with fields laid over it.
    pub fn merged(text: &str, over: Value) -> Result<Self, String> {
        // Read as a plan first: complaints about a file name the line.
        let _: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        let fields = toml::from_str(text).map_err(|error| error.to_string())?;
        let over = serde_json::from_value(over).map_err(|error| error.to_string())?;
        Self::of_fields(fields, over).map_err(|error| error.to_string())
    }

    /// The plan with other values for some of its fields.
    pub fn with(&self, over: &Map<String, Value>) -> Result<Self, String> {
        serde_json::to_value(self)
            .and_then(serde_json::from_value)
            .and_then(|fields| Self::of_fields(fields, over.clone()))
            .map_err(|error| error.to_string())
    }

    /// Fields with others laid over them; one that is null leaves what is there.
    fn of_fields(
        mut fields: Map<String, Value>,
        over: Map<String, Value>,
    ) -> Result<Self, serde_json::Error> {
        fields.extend(over.into_iter().filter(|(_, value)| !value.is_null()));
        serde_json::from_value(Value::Object(fields))
    }

    /// Whether it can be run.
    pub fn check(&self) -> Result<(), BenchError> {
        let within = |name: &str, value: usize, least: usize, most: usize| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(BenchError::Option(format!(
                "{name} is {value} and must be {least} to {most}"
            )))
        };
        within("body_bytes", self.body_bytes, STAMP_BYTES, BODY_BYTES_MAX)?;
        within("connections", self.connections, 1, CONNECTIONS_MAX)?;
        within("consumers", self.consumers, 0, CONNECTIONS_MAX)?;
        within(
            "cold_connections",
            self.cold_connections,
            1,
            CONNECTIONS_MAX,
        )?;
        within(
            "idle_connections",
            self.idle_connections,
            0,
            IDLE_CONNECTIONS_MAX,
        )?;
        within("topics", self.topics, 1, QUEUES_MAX)?;
        within("queues", self.queues as usize, 1, QUEUES_MAX)?;
        let queues = self.topics * self.queues as usize;
        within("topics × queues", queues, 1, QUEUES_MAX)?;
        within("batch", self.batch, 1, BATCH_MAX)?;
        within("pull_batch", self.pull_batch as usize, 1, BATCH_MAX)?;
        if let Some(in_flight) = self.in_flight {
            within("in_flight", in_flight, 1, IN_FLIGHT_MAX)?;
        }
        if let Some(rate) = self.rate {
            within("rate", rate as usize, 1, RATE_MAX as usize)?;
        }
        let times = [
            ("duration_s", self.duration_s, 0.1),
            ("warm_up_s", self.warm_up_s, 0.0),
            ("drain_s", self.drain_s, 0.0),
            ("sweep.trial_s", self.sweep.trial_s, 0.1),
        ];
        for (name, seconds, least) in times {
            if !(least..=SECONDS_MAX).contains(&seconds) {
                return Err(BenchError::Option(format!(
                    "{name} is {seconds} and must be {least} to {SECONDS_MAX}"
                )));
            }
        }
        let share = self.sweep.achieved_share_min;
        if !(0.5..=1.0).contains(&share) || !(0.001..=0.5).contains(&self.sweep.resolution) {
            return Err(BenchError::Option(
                "sweep.achieved_share_min must be 0.5 to 1, sweep.resolution 0.001 to 0.5"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// The loops to run: the open one, the closed one, or both.
    pub fn loops(&self) -> Vec<Pace> {
        let open = self.rate.map(Pace::Open);
        let closed = self.in_flight.map(Pace::Closed);
        let mut loops: Vec<Pace> = open.into_iter().chain(closed).collect();
        if loops.is_empty() {
            loops.push(Pace::Closed(IN_FLIGHT_DEFAULT));
        }
        loops
    }

    /// Messages of one request.
    pub fn messages_per_request(&self) -> u64 {
        if self.mode == SendMode::Batch {
            self.batch as u64
        } else {
            1
        }
    }

    /// Names of the topics.
    pub fn topic_names(&self) -> Vec<String> {
        if self.topics == 1 {
            return vec![self.topic.clone()];
        }
        let name = |number| format!("{}-{number:06}", self.topic);
        (0..self.topics).map(name).collect()
    }
}

/// What decides when the next message goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// A schedule of this many messages per second.
    Open(u64),
    /// This many requests in flight.
    Closed(usize),
}

impl Pace {
    /// Its label in reports.
    pub fn label(self) -> String {
        match self {
            Self::Open(rate) => format!("open loop, {rate} msg/s asked"),
            Self::Closed(k) => format!("closed loop, {k} in flight"),
        }
    }

    /// Its name in file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open(_) => "open",
            Self::Closed(_) => "closed",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    const WHOLE: &str = r#"
        namesrv = "10.0.0.1:9876"
        topics = 3
        queues = 8
        mode = "batch"
        batch = 4
        body_bytes = 512
        keys = true
        tag = "red"
        rate = 5000
        in_flight = 64
        warm_up_s = 1
        flush = "SYNC_FLUSH"
        [properties]
        colour = "blue"
        [[marks]]
        at_s = 3.5
        text = "neighbour writes"
        [sweep]
        p99_max_ms = 20
        steps_percent = [50, 100]
    "#;

    #[test]
    fn a_file_is_laid_over_the_defaults() {
        let plan = Plan::merged(WHOLE, json!({})).unwrap();
        assert_eq!(
            (plan.mode, plan.batch, plan.body_bytes),
            (SendMode::Batch, 4, 512)
        );
        assert_eq!((plan.connections, plan.duration_s), (64, 10.0));
        assert_eq!(plan.properties["colour"], "blue");
        assert_eq!(plan.marks[0].text, "neighbour writes");
        assert_eq!(plan.sweep.steps_percent, [50, 100]);
        assert_eq!(plan.sweep.achieved_share_min, 0.99);
        assert_eq!(plan.loops(), [Pace::Open(5_000), Pace::Closed(64)]);
        assert_eq!(
            plan.topic_names(),
            ["bench-000000", "bench-000001", "bench-000002"]
        );
        plan.check().unwrap();
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_only_where_it_says_something() {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            plan: PlanOptions,
        }
        let line = [
            "x",
            "--rate",
            "7",
            "--mode",
            "one-way",
            "--no-audit",
            "--topic",
            "T",
        ];
        let line = Line::try_parse_from(line).unwrap();
        let plan = Plan::merged(WHOLE, line.plan.fields()).unwrap();
        assert_eq!((plan.rate, plan.mode), (Some(7), SendMode::OneWay));
        assert_eq!((plan.topic.as_str(), plan.audit), ("T", false));
        assert_eq!((plan.in_flight, plan.tag.as_str()), (Some(64), "red"));
        let line = Line::try_parse_from(["x"]).unwrap();
        let plan = Plan::merged(WHOLE, line.plan.fields()).unwrap();
        assert!(plan.audit);
        assert_eq!(plan, Plan::merged(WHOLE, json!({})).unwrap());
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let error = Plan::merged("rate = 5\nrates = 6\n", json!({})).unwrap_err();
        assert!(
            error.contains("rates") && error.contains("line 2"),
            "{error}"
        );
        assert!(Plan::merged("mode = \"fast\"", json!({})).is_err());
        assert!(Plan::merged("rate = -1", json!({})).is_err());
    }

    #[test]
    fn what_cannot_be_run_is_refused() {
        for text in [
            "body_bytes = 8",
            "connections = 0",
            "rate = 0",
            "in_flight = 100000",
            "topics = 1000\nqueues = 1000",
            "duration_s = 0",
            "warm_up_s = -1",
            "batch = 0",
            "[sweep]\nachieved_share_min = 0.1",
        ] {
            let plan = Plan::merged(text, json!({})).unwrap();
            assert!(plan.check().is_err(), "{text}");
        }
        assert_eq!(Plan::default().loops(), [Pace::Closed(2_048)]);
        Plan::default().check().unwrap();
    }
}
