//! From the command line to what is run.
//!
//! Invariant: a plan is complete and checked: its settings are whole, and nothing was made on disk
//! for it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::args::{BrokerArgs, DoctorArgs, NamesrvArgs, NullArgs, PlaceArgs, StandaloneArgs};
use crate::config::{Config, ConfigError, HostFacts, NamesrvConfig, Setting, Sources};
use crate::doctor::Granted;
use crate::namesrv::NameServerConfig;

/// What one process runs.
#[derive(Debug, Clone)]
pub struct RunPlan {
    /// Settings of the broker. Cores count for a name server alone, too.
    pub config: Config,
    /// The name server, when one runs here.
    pub namesrv: Option<NamesrvPlan>,
    /// Whether a broker runs here.
    pub broker: bool,
    /// What the machine grants.
    pub granted: Granted,
    /// When the process began, for the banner.
    pub began: Instant,
    /// Whether messages are answered and forgotten (`pinion null`).
    pub null: bool,
}

/// The name server of a process.
#[derive(Debug, Clone)]
pub struct NamesrvPlan {
    /// Its settings.
    pub config: NamesrvConfig,
    /// Directory of its files.
    pub data: PathBuf,
}

impl NamesrvPlan {
    /// Settings in the form the name server takes.
    #[must_use]
    pub fn server_config(&self) -> NameServerConfig {
        let keys = &self.config.keys;
        let mut server = NameServerConfig {
            listen_port: keys.listen_port,
            order_message_enable: keys.order_message,
            enable_all_topic_list: keys.enable_all_topic_list,
            enable_topic_list: keys.enable_topic_list,
            delete_topic_with_broker_registration: keys.delete_unregistered_topics,
            return_order_topic_config_to_broker: keys.return_order_config,
            support_acting_master: keys.support_acting_master,
            need_wait_for_service: keys.wait_for_service,
            wait_seconds_for_service: keys.wait_for_service_s,
            scan_not_active_broker_interval_ms: keys.scan_interval_ms,
            fuse_enable: keys.fuse,
            fuse_slow_ms: keys.fuse_slow_ms,
            fuse_ordered_topics: keys.fuse_ordered_topics,
            ..NameServerConfig::default()
        };
        // Paths stay out: what is saved with them would name the old place after a move.
        let black_list = format!("{};bindAddress;listenPort", keys.config_black_list);
        server
            .extras
            .insert("configBlackList".to_owned(), black_list);
        server
    }

    /// File of the key-value settings.
    #[must_use]
    pub fn kv_path(&self) -> &Path {
        self.config.kv_config_path.as_path()
    }

    /// File that changed settings are written into.
    #[must_use]
    pub fn properties_path(&self) -> &Path {
        self.config.config_store_path.as_path()
    }
}

/// Settings read for a run, before the machine was asked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Of the broker.
    pub config: Config,
    /// Of the name server.
    pub namesrv: Option<NamesrvPlan>,
    /// Whether a broker runs.
    pub broker: bool,
}

/// Directory of a store that is named nowhere.
const DEFAULT_DATA: &str = "./data";

/// What a broker that stores nothing is told: a store of the least size that leaves nothing behind.
const NULL_SETTINGS: [&str; 8] = [
    "brokerIP1=127.0.0.1",
    "brokerName=null",
    "mappedFileSizeCommitLog=8388608",
    "pinion.bufferBytes=16777216",
    "pinion.bufferDir=none",
    "diskMaxUsedSpaceRatio=98",
    "diskSpaceCleanForciblyRatio=99",
    "diskSpaceWarningLevelRatio=99",
];

/// Name of the file that keeps changes of administrators when no config file was named.
const STORED_NAME: &str = "broker.properties";

impl Settings {
    /// Reads what `standalone` needs.
    ///
    /// # Errors
    /// When a setting is malformed.
    pub fn standalone(args: &StandaloneArgs, host: &HostFacts) -> Result<Self, ConfigError> {
        let mut sources = broker_sources(&args.place, args.data.as_deref(), host)?;
        let data = args
            .data
            .clone()
            .unwrap_or_else(|| PathBuf::from(DEFAULT_DATA));
        sources.defaults = vec![
            (
                "storePathRootDir",
                DEFAULT_DATA.to_owned(),
                "default of standalone".to_owned(),
            ),
            (
                "namesrvAddr",
                format!("127.0.0.1:{}", args.namesrv_port),
                "the name server in this process".to_owned(),
            ),
        ];
        sources.stored = Some(data.join("config").join(STORED_NAME));
        push_option(
            &mut sources,
            "listenPort",
            args.broker_port.as_deref(),
            "--broker-port",
        );
        let config = Config::load(&sources, host)?;
        config.check_promises()?;
        let names = config.store_path_root.as_path().join("namesrv");
        let port = args.namesrv_port.to_string();
        let namesrv = Sources {
            stored: Some(names.join("namesrv.properties")),
            command_line: vec![setting("listenPort", &port, "--namesrv-port")],
            ..Sources::default()
        };
        let namesrv = NamesrvPlan {
            config: NamesrvConfig::load(&namesrv, &names)?,
            data: names,
        };
        Ok(Self {
            config,
            namesrv: Some(namesrv),
            broker: true,
        })
    }

    /// Reads what `null` needs; its tables are in a directory of their own that nobody keeps.
    ///
    /// # Errors
    /// When a setting is malformed.
    pub fn null(args: &NullArgs, host: &HostFacts) -> Result<Self, ConfigError> {
        let set = NULL_SETTINGS.map(str::to_owned).to_vec();
        let standalone = StandaloneArgs {
            data: Some(args.data()),
            namesrv_port: args.namesrv_port,
            broker_port: Some(args.port.to_string()),
            place: PlaceArgs {
                shards: None,
                cores: args.cores.clone(),
                config: None,
                set,
            },
            print_config: false,
        };
        Self::standalone(&standalone, host)
    }

    /// Reads what `broker` needs.
    ///
    /// # Errors
    /// When a setting is malformed.
    pub fn broker(args: &BrokerArgs, host: &HostFacts) -> Result<Self, ConfigError> {
        let mut sources = broker_sources(&args.place, args.data.as_deref(), host)?;
        push_option(&mut sources, "namesrvAddr", args.namesrv.as_deref(), "-n");
        push_option(
            &mut sources,
            "listenPort",
            args.broker_port.as_deref(),
            "--broker-port",
        );
        if let (None, Some(data)) = (&sources.file, &args.data) {
            sources.stored = Some(data.join("config").join(STORED_NAME));
        }
        let config = Config::load(&sources, host)?;
        config.check_promises()?;
        Ok(Self {
            config,
            namesrv: None,
            broker: true,
        })
    }

    /// Reads what `namesrv` needs.
    ///
    /// # Errors
    /// When a setting is malformed.
    pub fn namesrv(args: &NamesrvArgs, host: &HostFacts) -> Result<Self, ConfigError> {
        let data = args.data.join("namesrv");
        let mut sources = Sources {
            file: args.config.clone(),
            stored: Some(data.join("namesrv.properties")),
            environment: host.environment.clone(),
            ..Sources::default()
        };
        for text in &args.set {
            sources.command_line.push(key_value(text)?);
        }
        let port = args.port.as_ref().and_then(Option::as_deref);
        push_option(&mut sources, "listenPort", port, "-p");
        let namesrv = NamesrvPlan {
            config: NamesrvConfig::load(&sources, &data)?,
            data,
        };
        // One thread is plenty: a name server answers from memory.
        let first = host.cores_allowed.first().copied().unwrap_or(0).to_string();
        let cores = args.cores.as_deref().unwrap_or(&first);
        let own = Sources {
            command_line: vec![setting("pinion.cores", cores, "--cores")],
            ..Sources::default()
        };
        Ok(Self {
            config: Config::load(&own, host)?,
            namesrv: Some(namesrv),
            broker: false,
        })
    }

    /// Reads what `doctor` needs.
    ///
    /// # Errors
    /// When a setting is malformed.
    pub fn doctor(args: &DoctorArgs, host: &HostFacts) -> Result<Self, ConfigError> {
        let mut sources = broker_sources(&args.place, args.data.as_deref(), host)?;
        let reason = "default of standalone".to_owned();
        sources.defaults = vec![("storePathRootDir", DEFAULT_DATA.to_owned(), reason)];
        Ok(Self {
            config: Config::load(&sources, host)?,
            namesrv: None,
            broker: true,
        })
    }

    /// What is to be said once at start.
    pub fn notes(&self) -> impl Iterator<Item = &String> {
        let namesrv = self.namesrv.iter().flat_map(|plan| plan.config.notes());
        self.config.notes().iter().chain(namesrv)
    }
}

fn broker_sources(
    place: &PlaceArgs,
    data: Option<&Path>,
    host: &HostFacts,
) -> Result<Sources, ConfigError> {
    let mut sources = Sources {
        file: place.config.clone(),
        environment: host.environment.clone(),
        ..Sources::default()
    };
    for text in &place.set {
        sources.command_line.push(key_value(text)?);
    }
    if let Some(data) = data {
        let commit_log = data.join("commitlog");
        let pairs = [
            ("storePathRootDir", data),
            ("storePathCommitLog", commit_log.as_path()),
        ];
        for (key, path) in pairs {
            // `--data` moves the whole store, but for a log that has a `--set` of its own.
            let log_is_set = |given: &Setting| given.key == key && key == "storePathCommitLog";
            if sources.command_line.iter().any(log_is_set) {
                continue;
            }
            sources
                .command_line
                .push(setting(key, &path.to_string_lossy(), "--data"));
        }
    }
    push_option(
        &mut sources,
        "pinion.shards",
        place.shards.as_deref(),
        "--shards",
    );
    push_option(
        &mut sources,
        "pinion.cores",
        place.cores.as_deref(),
        "--cores",
    );
    Ok(sources)
}

fn setting(key: &str, value: &str, option: &str) -> Setting {
    Setting {
        key: key.to_owned(),
        value: value.to_owned(),
        option: option.to_owned(),
    }
}

fn push_option(sources: &mut Sources, key: &str, value: Option<&str>, option: &str) {
    if let Some(value) = value {
        sources.command_line.push(setting(key, value, option));
    }
}

fn key_value(text: &str) -> Result<Setting, ConfigError> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok(setting(key.trim(), value.trim(), "--set"))
        }
        _ => Err(ConfigError::Conflict(format!(
            "command line --set: {text} is not KEY=VALUE"
        ))),
    }
}
