//! The settings of a name server: RocketMQ's names and defaults.
//!
//! Invariant: a key that this table marks `Fixed` cannot be changed over the network.

use super::address::Host;
use super::java_only::NAMESRV_IGNORED;
use super::table::{settings_table, within};
use super::value::FilePath;

settings_table! {
    /// Every setting of a name server that has a meaning here.
    pub struct NamesrvKeys ignoring NAMESRV_IGNORED;

    /// Port for clients and brokers.
    "listenPort" => listen_port: u16 = 9_876, Fixed, |port| within(u64::from(*port), 1, 65_535);
    /// Address the listener is bound to.
    "bindAddress" => bind_address: Host = Host::from_ip([0, 0, 0, 0].into()), Fixed;
    /// Home directory in the sense of the Java program.
    "rocketmqHome" => rocketmq_home: FilePath = FilePath::default(), Fixed;
    /// File of the key-value settings; kvConfig.json in the data directory when not set.
    "kvConfigPath" => kv_config_path: FilePath = FilePath::default(), Fixed;
    /// File these settings are stored in.
    "configStorePath" => config_store_path: FilePath = FilePath::default(), Fixed;
    /// Name of the environment in old clients.
    "productEnvName" => product_env_name: String = "center".to_owned(), Live;
    /// Behaves as a test cluster.
    "clusterTest" => cluster_test: bool = false, Start;
    /// Adds the order settings to routes.
    "orderMessageEnable" => order_message: bool = false, Live;
    /// Answers a broker's registration with the order settings.
    "returnOrderTopicConfigToBroker" => return_order_config: bool = true, Live;
    /// Time between two searches for silent brokers.
    "scanNotActiveBrokerInterval" => scan_interval_ms: u64 = 5_000, Start,
        |ms| within(*ms, 100, 600_000);
    /// Lets a replica act for its lost master.
    "supportActingMaster" => support_acting_master: bool = false, Live;
    /// Answers the list of all topics.
    "enableAllTopicList" => enable_all_topic_list: bool = true, Live;
    /// Answers lists of topics.
    "enableTopicList" => enable_topic_list: bool = true, Live;
    /// Tells brokers when the lowest id of their group changes.
    "notifyMinBrokerIdChanged" => notify_min_broker_id: bool = false, Live;
    /// Runs a controller too.
    "enableControllerInNamesrv" => controller_in_namesrv: bool = false, Start;
    /// Answers routes only after waitSecondsForService.
    "needWaitForService" => wait_for_service: bool = false, Live;
    /// Time brokers have to register before routes are answered.
    "waitSecondsForService" => wait_for_service_s: u64 = 45, Live;
    /// Removes a topic that a registration no longer names.
    "deleteTopicWithBrokerRegistration" => delete_unregistered_topics: bool = false, Live;
    /// Keys that nobody may change over the network, besides the ones fixed anyway.
    "configBlackList" => config_black_list: String =
        "configBlackList;configStorePath;kvConfigPath".to_owned(), Fixed;
    /// Probes brokers and takes slow ones out of the write path (the fuse).
    "pinion.fuseEnable" => fuse: bool = true, Live;
    /// An append that takes longer counts against its broker, in milliseconds.
    "pinion.fuseSlowMs" => fuse_slow_ms: u64 = 500, Live, |ms| within(*ms, 10, 60_000);
    /// Lets the fuse act on topics whose order matters.
    "pinion.fuseOrderedTopics" => fuse_ordered_topics: bool = false, Live;
    /// Connections at once.
    "pinion.connectionsMax" => connections_max: u32 = 20_000, Start,
        |n| within(u64::from(*n), 1, 10_000_000);
}
