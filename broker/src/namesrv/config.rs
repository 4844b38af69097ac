//! Owns the settings of the name server and their text form, `key=value` lines under RocketMQ's
//! keys.
//!
//! Invariant: an update is applied as a whole or not at all, and never touches a blacklisted key.

use std::collections::BTreeMap;

use thiserror::Error;

/// Longest properties text accepted from the network.
pub const PROPERTIES_BYTES_MAX: usize = 64 * 1024;
/// Bounds of `pinion.fuseSlowMs`.
pub const FUSE_SLOW_MS: std::ops::RangeInclusive<u64> = 10..=60_000;
/// Keys that can never be changed over the network.
const BLACK_LIST: [&str; 3] = ["configBlackList", "configStorePath", "kvConfigPath"];

/// Settings of the name server, named as RocketMQ names them.
#[derive(Clone, Debug)]
pub struct NameServerConfig {
    /// `listenPort`
    pub listen_port: u16,
    /// `orderMessageEnable`: put the order configuration of a topic into its route.
    pub order_message_enable: bool,
    /// `enableAllTopicList`: answer the list of all topics.
    pub enable_all_topic_list: bool,
    /// `enableTopicList`: answer the lists of topics by cluster and by unit.
    pub enable_topic_list: bool,
    /// `deleteTopicWithBrokerRegistration`: drop what a whole registration does not name any more.
    pub delete_topic_with_broker_registration: bool,
    /// `returnOrderTopicConfigToBroker`: answer registrations with the order configuration.
    pub return_order_topic_config_to_broker: bool,
    /// `supportActingMaster`: show the smallest slave as master where a group allows it.
    pub support_acting_master: bool,
    /// `needWaitForService`: refuse routes for a while after start, until brokers had time to
    /// register.
    pub need_wait_for_service: bool,
    /// `waitSecondsForService`: how long.
    pub wait_seconds_for_service: u64,
    /// `scanNotActiveBrokerInterval`: time between two looks for silent brokers.
    pub scan_not_active_broker_interval_ms: u64,
    /// `pinion.fuseEnable`: probe brokers and take slow ones out of the write path.
    pub fuse_enable: bool,
    /// `pinion.fuseSlowMs`: an append that takes longer counts against its broker.
    pub fuse_slow_ms: u64,
    /// `pinion.fuseOrderedTopics`: act on topics whose order matters, too.
    pub fuse_ordered_topics: bool,
    /// Further properties shown to administrators, such as paths. Only keys present here can be
    /// changed by them, besides the ones above.
    pub extras: BTreeMap<String, String>,
}

impl Default for NameServerConfig {
    fn default() -> Self {
        Self {
            listen_port: 9876,
            order_message_enable: false,
            enable_all_topic_list: true,
            enable_topic_list: true,
            delete_topic_with_broker_registration: false,
            return_order_topic_config_to_broker: true,
            support_acting_master: false,
            need_wait_for_service: false,
            wait_seconds_for_service: 45,
            scan_not_active_broker_interval_ms: 5_000,
            fuse_enable: true,
            fuse_slow_ms: 500,
            fuse_ordered_topics: false,
            extras: BTreeMap::new(),
        }
    }
}

/// Why an update of the settings was refused.
#[derive(Error, Clone, PartialEq, Eq, Debug)]
pub enum ConfigError {
    /// A key must not be changed over the network.
    #[error("Can not update config in black list: {0}")]
    BlackListed(String),
    /// A value does not have the type of its key.
    #[error("value {value:?} of {key} is not valid, expected {expected}; nothing was changed")]
    Invalid {
        /// The key.
        key: String,
        /// The value given.
        value: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// The text is not a list of properties.
    #[error("properties text is not readable: {0}")]
    Unreadable(&'static str),
}

impl NameServerConfig {
    /// All settings as `key=value` lines, sorted by key.
    pub fn properties_text(&self) -> String {
        let mut all = self.extras.clone();
        let mut set = |key: &str, value: String| all.insert(key.to_owned(), value);
        set("listenPort", self.listen_port.to_string());
        set("orderMessageEnable", self.order_message_enable.to_string());
        set("enableAllTopicList", self.enable_all_topic_list.to_string());
        set("enableTopicList", self.enable_topic_list.to_string());
        let delete = self.delete_topic_with_broker_registration;
        set("deleteTopicWithBrokerRegistration", delete.to_string());
        let order = self.return_order_topic_config_to_broker;
        set("returnOrderTopicConfigToBroker", order.to_string());
        set(
            "supportActingMaster",
            self.support_acting_master.to_string(),
        );
        set("needWaitForService", self.need_wait_for_service.to_string());
        set(
            "waitSecondsForService",
            self.wait_seconds_for_service.to_string(),
        );
        set("pinion.fuseEnable", self.fuse_enable.to_string());
        set("pinion.fuseSlowMs", self.fuse_slow_ms.to_string());
        let ordered = self.fuse_ordered_topics;
        set("pinion.fuseOrderedTopics", ordered.to_string());
        let interval_ms = self.scan_not_active_broker_interval_ms;
        set("scanNotActiveBrokerInterval", interval_ms.to_string());
        let mut text = String::new();
        for (key, value) in all {
            text.push_str(&key);
            text.push('=');
            text.push_str(&value.replace('\\', "\\\\").replace('\n', "\\n"));
            text.push('\n');
        }
        text
    }

    /// Applies `key=value` lines. Unknown keys are ignored, as RocketMQ does.
    pub fn update(&mut self, text: &str) -> Result<(), ConfigError> {
        let properties = parse_properties(text)?;
        let extra_black_list = self
            .extras
            .get("configBlackList")
            .cloned()
            .unwrap_or_default();
        for key in properties.keys() {
            let listed = extra_black_list
                .split(';')
                .any(|listed| listed.trim() == key);
            if listed || BLACK_LIST.contains(&key.as_str()) {
                return Err(ConfigError::BlackListed(key.clone()));
            }
        }
        let mut updated = self.clone();
        for (key, value) in &properties {
            updated.set(key, value)?;
        }
        *self = updated;
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        match key {
            "listenPort" => self.listen_port = number(key, value)?,
            "orderMessageEnable" => self.order_message_enable = flag(key, value)?,
            "enableAllTopicList" => self.enable_all_topic_list = flag(key, value)?,
            "enableTopicList" => self.enable_topic_list = flag(key, value)?,
            "deleteTopicWithBrokerRegistration" => {
                self.delete_topic_with_broker_registration = flag(key, value)?;
            }
            "returnOrderTopicConfigToBroker" => {
                self.return_order_topic_config_to_broker = flag(key, value)?;
            }
            "supportActingMaster" => self.support_acting_master = flag(key, value)?,
            "needWaitForService" => self.need_wait_for_service = flag(key, value)?,
            "waitSecondsForService" => self.wait_seconds_for_service = number(key, value)?,
            "scanNotActiveBrokerInterval" => {
                self.scan_not_active_broker_interval_ms = number(key, value)?;
            }
            "pinion.fuseEnable" => self.fuse_enable = flag(key, value)?,
            "pinion.fuseSlowMs" => {
                self.fuse_slow_ms = number(key, value)?;
                if !FUSE_SLOW_MS.contains(&self.fuse_slow_ms) {
                    return Err(invalid(key, value, "10 to 60000"));
                }
            }
            "pinion.fuseOrderedTopics" => self.fuse_ordered_topics = flag(key, value)?,
            _ => {
                if let Some(extra) = self.extras.get_mut(key) {
                    value.clone_into(extra);
                }
            }
        }
        Ok(())
    }
}

fn flag(key: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        _ if value.eq_ignore_ascii_case("true") => Ok(true),
        _ if value.eq_ignore_ascii_case("false") => Ok(false),
        _ => Err(invalid(key, value, "true or false")),
    }
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, ConfigError> {
    value
        .parse()
        .map_err(|_| invalid(key, value, "a number in range"))
}

fn invalid(key: &str, value: &str, expected: &'static str) -> ConfigError {
    ConfigError::Invalid {
        key: key.to_owned(),
        value: value.to_owned(),
        expected,
    }
}

/// Reads the subset of Java properties that RocketMQ tools send: one `key=value` per line,
/// comments, blank lines and backslash escapes inside values.
fn parse_properties(text: &str) -> Result<BTreeMap<String, String>, ConfigError> {
    if text.len() > PROPERTIES_BYTES_MAX {
        return Err(ConfigError::Unreadable("it is too long"));
    }
    let mut properties = BTreeMap::new();
    for line in text.lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', '!']) {
            continue;
        }
        let (key, value) = line
            .split_once('=')
            .or_else(|| line.split_once(':'))
            .ok_or(ConfigError::Unreadable("a line has no '='"))?;
        properties.insert(key.trim().to_owned(), unescape(value.trim()));
    }
    Ok(properties)
}

fn unescape(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            text.push(character);
            continue;
        }
        match characters.next() {
            Some('n') => text.push('\n'),
            Some('t') => text.push('\t'),
            Some(other) => text.push(other),
            None => {}
        }
    }
    text
}
