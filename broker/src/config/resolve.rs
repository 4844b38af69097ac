//! Filling in what a configuration leaves open: names, addresses, paths, cores.
//!
//! Invariant: only facts handed in as [`Host`] are used, so that a test decides what machine it
//! runs on.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::address;
use super::layers::{ConfigError, FromEnvironment, Layered, Origin, Sources};
use super::value::{CoreList, FilePath, Name, Value as _};
use super::{BrokerKeys, Config, ENVIRONMENT_PREFIX, HealthPort, NamesrvConfig, NamesrvKeys};

/// What a configuration needs to know of the machine.
#[derive(Debug, Clone)]
pub struct Host {
    /// Host name, for `brokerName`.
    pub name: String,
    /// CPUs this process may run on, ascending.
    pub cores_allowed: Vec<usize>,
    /// Finds the own address: result and how it was found.
    pub detect_address: fn(&address::AddressList) -> (IpAddr, String),
    /// Home directory, for Java's default of `storePathRootDir`.
    pub home: PathBuf,
    /// Environment variables.
    pub environment: Vec<(String, String)>,
}

impl Host {
    /// Facts of this machine and process.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let home = std::env::var_os("HOME").map_or_else(|| PathBuf::from("."), PathBuf::from);
        Self {
            name: name.trim().to_owned(),
            cores_allowed: allowed_cores(),
            detect_address: address::detect_own,
            home,
            environment: std::env::vars_os()
                .filter_map(|(name, value)| name.into_string().ok().zip(value.into_string().ok()))
                .collect(),
        }
    }
}

/// CPUs this process may run on, as the kernel says.
#[must_use]
pub fn allowed_cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cores = line
        .and_then(|list| CoreList::parse(list.trim()))
        .unwrap_or_default()
        .0;
    if cores.is_empty() { vec![0] } else { cores }
}

impl Config {
    /// Reads and completes the settings of a broker.
    ///
    /// # Errors
    /// When the file cannot be read, a value is malformed, or values do not go together.
    pub fn load(sources: &Sources, host: &Host) -> Result<Self, ConfigError> {
        let mut config = Layered::<BrokerKeys>::read(sources, broker_variables)?;
        config.complete_paths(host);
        config.complete_names(host);
        config.complete_ports();
        config.complete_cores(host)?;
        let without_effect = config.note_without_effect();
        config.notes.extend(without_effect);
        Ok(config)
    }

    fn complete_paths(&mut self, host: &Host) {
        if self.keys.store_path_root.is_unset() {
            self.keys.store_path_root = FilePath(host.home.join("store"));
        }
        if self.keys.store_path_commit_log.is_unset() {
            let path = self.keys.store_path_root.as_path().join("commitlog");
            self.keys.store_path_commit_log = FilePath(path);
            self.derived("storePathCommitLog", "derived from storePathRootDir");
        }
        if let Some(path) = self.file().map(Path::to_owned) {
            self.keys.broker_config_path = FilePath(path);
            self.derived("brokerConfigPath", "the config file in use");
        }
    }

    fn complete_names(&mut self, host: &Host) {
        if self.keys.broker_name.0.is_empty() {
            let usable = Name::parse(&host.name).filter(|name| !name.0.is_empty());
            let name = usable.unwrap_or_else(|| Name("DEFAULT_BROKER".to_owned()));
            self.note_empty("brokerName", &format!("the host name {name}"));
            self.keys.broker_name = name;
            self.derived("brokerName", "derived from the host name");
        }
        if self.keys.broker_cluster_name.0.is_empty() {
            let name = BrokerKeys::default().broker_cluster_name;
            self.note_empty("brokerClusterName", &format!("the default {name}"));
            self.keys.broker_cluster_name = name;
            self.derived("brokerClusterName", "default");
        }
        if self.keys.broker_ip1.is_unset() {
            // A listener at one address is reached nowhere else.
            let bound = &self.keys.bind_address;
            let (told, how) = if bound.ip().is_some_and(|ip| ip.is_unspecified()) {
                let (ip, how) = (host.detect_address)(&self.keys.namesrv_addr);
                (address::Host::from_ip(ip), how)
            } else {
                (bound.clone(), "detected: bindAddress".to_owned())
            };
            self.keys.broker_ip1 = told;
            self.derived("brokerIP1", how);
        }
        if self.keys.broker_ip2.is_unset() {
            self.keys.broker_ip2 = self.keys.broker_ip1.clone();
            self.derived("brokerIP2", "derived from brokerIP1");
        }
    }

    /// Says that a key was set to nothing, and what counts instead.
    fn note_empty(&mut self, key: &str, instead: &str) {
        let origin = self.origin_of(key).filter(|_| self.is_set(key));
        if let Some(origin) = origin.map(ToString::to_string) {
            let note = format!("{origin}: {key} is empty; {instead} counts");
            self.notes.push(note);
        }
    }

    fn complete_ports(&mut self) {
        if self.keys.ha_listen_port == 0 {
            self.keys.ha_listen_port = self.keys.listen_port.wrapping_add(1);
            self.derived("haListenPort", "derived from listenPort");
        }
        if self.keys.metrics_host.is_unset() {
            self.keys.metrics_host = self.keys.bind_address.clone();
            self.derived("metricsPromExporterHost", "derived from bindAddress");
        }
    }

    fn complete_cores(&mut self, host: &Host) -> Result<(), ConfigError> {
        let allowed = &host.cores_allowed;
        let asked = &self.keys.cores.0;
        if asked.is_empty() {
            self.keys.cores = CoreList(allowed.clone());
            self.derived("pinion.cores", "all this process may use");
        } else if let Some(core) = asked.iter().find(|core| !allowed.contains(core)) {
            let origin = self.origin_of("pinion.cores").unwrap_or(&Origin::Default);
            return Err(ConfigError::Conflict(format!(
                "{origin}: pinion.cores names CPU {core}, but this process may run on {} only; \
                 choose from these or widen the cpuset (CPUQuota/AllowedCPUs=, --cpuset-cpus)",
                CoreList(allowed.clone())
            )));
        }
        if self.keys.shards == 0 {
            self.keys.shards = u64::try_from(self.keys.cores.0.len()).unwrap_or(1).max(1);
            self.derived("pinion.shards", "as many as cores");
        }
        Ok(())
    }

    /// The second port clients of the VIP channel use: `listenPort` - 2, where there is one.
    #[must_use]
    pub fn vip_port(&self) -> Option<u16> {
        self.keys
            .listen_port
            .checked_sub(2)
            .filter(|port| *port > 0)
    }

    /// `host:port` told to clients, IPv6 in brackets.
    #[must_use]
    pub fn advertised(&self) -> String {
        self.keys.broker_ip1.with_port(self.keys.listen_port)
    }

    /// Port of the health answers, with whether it was asked for.
    #[must_use]
    pub fn health_port(&self) -> Option<(u16, bool)> {
        match self.keys.health_port {
            HealthPort::Off => None,
            HealthPort::Port(port) => Some((port, true)),
            HealthPort::Auto => self
                .keys
                .listen_port
                .checked_add(3)
                .map(|port| (port, false)),
        }
    }

    /// Disk use in percent above which old segments go at any hour, in the bounds RocketMQ puts it.
    #[must_use]
    pub fn disk_used_max_percent_bounded(&self) -> u32 {
        self.keys.disk_used_max_percent.clamp(10, 95)
    }

    /// Directory of the control files.
    #[must_use]
    pub fn control_dir(&self) -> PathBuf {
        self.keys.store_path_root.as_path().join("config")
    }
}

impl NamesrvConfig {
    /// Reads and completes the settings of a name server, which keeps its files under `data`.
    ///
    /// # Errors
    /// When the file cannot be read or a value is malformed.
    pub fn load(sources: &Sources, data: &Path) -> Result<Self, ConfigError> {
        let mut config = Layered::<NamesrvKeys>::read(sources, prefixed_variables)?;
        if config.keys.kv_config_path.is_unset() {
            config.keys.kv_config_path = FilePath(data.join("kvConfig.json"));
            config.derived("kvConfigPath", "derived from the data directory");
        }
        if config.keys.config_store_path.is_unset() {
            let path = config.file_for_changes().map(Path::to_owned);
            config.keys.config_store_path =
                FilePath(path.unwrap_or_else(|| data.join("namesrv.properties")));
            config.derived("configStorePath", "derived from the data directory");
        }
        Ok(config)
    }
}

/// Variables that set keys: the ones RocketMQ's images and its operator use, then ours.
fn broker_variables(environment: &[(String, String)]) -> Vec<FromEnvironment> {
    const NAMES: [(&str, &str); 5] = [
        ("NAMESRV_ADDR", "namesrvAddr"),
        ("ROCKETMQ_HOME", "rocketmqHome"),
        ("BROKER_CLUSTER_NAME", "brokerClusterName"),
        ("BROKER_NAME", "brokerName"),
        ("BROKER_ID", "brokerId"),
    ];
    let find = |name: &str| {
        environment
            .iter()
            .find(|(n, v)| n == name && !v.is_empty())
            .map(|(_, v)| v.as_str())
    };
    let mut found = Vec::new();
    for (variable, key) in NAMES {
        if let Some(value) = find(variable) {
            found.push((key.to_owned(), value.trim().to_owned(), variable.to_owned()));
        }
    }
    // The operator gives the mode of the whole group and lets each broker work out its part.
    if let Some(mode) = find("REPLICATION_MODE") {
        let is_master = find("BROKER_ID").is_none_or(|id| id.trim() == "0");
        let role = match (is_master, mode.trim()) {
            (false, _) => "SLAVE",
            (true, "SYNC") => "SYNC_MASTER",
            (true, "ASYNC") => "ASYNC_MASTER",
            (true, other) => other,
        };
        found.push((
            "brokerRole".into(),
            role.to_owned(),
            "REPLICATION_MODE".into(),
        ));
    }
    found.extend(prefixed_variables(environment));
    found
}

fn prefixed_variables(environment: &[(String, String)]) -> Vec<FromEnvironment> {
    let ours = environment.iter().filter_map(|(name, value)| {
        let key = name.strip_prefix(ENVIRONMENT_PREFIX)?;
        Some((key.replace('_', "."), value.trim().to_owned(), name.clone()))
    });
    ours.collect()
}
