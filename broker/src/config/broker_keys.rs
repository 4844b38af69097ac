//! The settings of a broker: RocketMQ's names and defaults, and the project's own under `pinion.`.
//!
//! Invariant: a key that this table marks `Fixed` cannot be changed over the network.

use super::address::{AddressList, Host};
use super::java_only::BROKER_IGNORED;
use super::table::{settings_table, sized, within};
use super::value::{
    BrokerRole, BufferDir, Bytes, CoreList, DelayLevels, FilePath, FlushDiskType, Hours, LogPort,
    MessageRequestMode, MetricsExporter, Name, Need, TlsMode,
};

/// Smallest commit log segment; smaller ones would be all bookkeeping.
pub const SEGMENT_BYTES_MIN: u64 = 64 << 10;
/// Largest commit log segment: positions in it must fit the protocol's 32-bit fields.
pub const SEGMENT_BYTES_MAX: u64 = 2 << 30;
/// Largest frame that may be allowed: its length shares a word with the serialisation type.
pub const FRAME_BYTES_MAX: u64 = (1 << 24) - 1;
/// Most shards of a store.
pub const SHARDS_MAX: u64 = 256;
/// Smallest write buffer of a shard.
pub const BUFFER_BYTES_MIN: u64 = 4 << 20;
/// Largest write buffer of a shard.
pub const BUFFER_BYTES_MAX: u64 = 16 << 30;
/// Longest spinning before sleep; more costs other cores more than it saves.
pub const SPIN_US_MAX: u64 = 1_000;
/// Most queues of a topic that is created by sending to it.
pub const TOPIC_QUEUES_MAX: u64 = 65_535;

const fn name(text: String) -> Name {
    Name(text)
}

fn host_list_unset() -> AddressList {
    AddressList(Vec::new())
}

settings_table! {
    /// Every setting of a broker that has a meaning here.
    pub struct BrokerKeys ignoring BROKER_IGNORED;

    // Identity and network.
    /// Cluster the broker belongs to.
    "brokerClusterName" => broker_cluster_name: Name = name("DefaultCluster".to_owned()), Start;
    /// Name of the master and its replicas together; the host name when not set.
    "brokerName" => broker_name: Name = Name::default(), Start;
    /// 0 for a master, another number for a replica.
    "brokerId" => broker_id: u64 = 0, Start;
    /// Name servers to register with.
    "namesrvAddr" => namesrv_addr: AddressList = host_list_unset(), Start;
    /// Address told to clients; detected when not set.
    "brokerIP1" => broker_ip1: Host = Host::default(), Start;
    /// Address told to replicas; brokerIP1 when not set.
    "brokerIP2" => broker_ip2: Host = Host::default(), Start;
    /// Port for clients.
    "listenPort" => listen_port: u16 = 10_911, Fixed, |port| within(u64::from(*port), 1, 65_535);
    /// Address the listeners are bound to.
    "bindAddress" => bind_address: Host = Host::from_ip([0, 0, 0, 0].into()), Fixed;
    /// Port for replicas; listenPort + 1 when 0.
    "haListenPort" => ha_listen_port: u16 = 0, Fixed;
    /// What clients may do here: 2 write, 4 read, 6 both, 0 neither.
    "brokerPermission" => broker_permission: u32 = 6, Live, |perm| {
        let known = matches!(perm, 0 | 2 | 4 | 6);
        known.then_some(()).ok_or_else(|| "0, 2 (write), 4 (read) or 6 (both)".to_owned())
    };
    /// A connection without traffic for so long is closed.
    "serverChannelMaxIdleTimeSeconds" => connection_idle_max_s: u32 = 120, Start,
        |s| within(u64::from(*s), 1, 86_400);
    /// Connections waiting to be accepted.
    "serverSocketBacklog" => socket_backlog: u32 = 1_024, Start,
        |n| within(u64::from(*n), 1, 65_535);
    /// Send buffer of a socket; the system's choice when 0.
    "serverSocketSndBufSize" => socket_send_bytes: Bytes = Bytes(0), Start;
    /// Receive buffer of a socket; the system's choice when 0.
    "serverSocketRcvBufSize" => socket_receive_bytes: Bytes = Bytes(0), Start;
    /// Time between registrations with the name servers.
    "registerNameServerPeriod" => register_period_ms: u64 = 30_000, Live,
        |ms| within(*ms, 1_000, 60_000);
    /// Limit of one call to a name server.
    "registerBrokerTimeoutMills" => register_timeout_ms: u64 = 24_000, Live,
        |ms| within(*ms, 100, 600_000);
    /// Time between heartbeats to the name servers.
    "brokerHeartbeatInterval" => heartbeat_interval_ms: u64 = 1_000, Live,
        |ms| within(*ms, 100, 60_000);
    /// A broker silent for so long is taken out of the routes.
    "brokerNotActiveTimeoutMillis" => not_active_timeout_ms: u64 = 10_000, Start;
    /// Region written into traces.
    "regionId" => region_id: Name = name("DefaultRegion".to_owned()), Start;
    /// Lets the broker write a message trace.
    "traceOn" => trace_on: bool = true, Live;
    /// Home directory in the sense of the Java program.
    "rocketmqHome" => rocketmq_home: FilePath = FilePath::default(), Fixed;

    // Topics and groups.
    /// Creates a topic when a message is sent to it.
    "autoCreateTopicEnable" => auto_create_topic: bool = true, Live;
    /// Creates a consumer group when a consumer appears.
    "autoCreateSubscriptionGroup" => auto_create_group: bool = true, Live;
    /// Most queues of a topic created by sending.
    "defaultTopicQueueNums" => default_topic_queues: u32 = 8, Live,
        |n| within(u64::from(*n), 1, TOPIC_QUEUES_MAX);
    /// Keeps a topic with the cluster's name.
    "clusterTopicEnable" => cluster_topic: bool = true, Start;
    /// Keeps a topic with the broker's name.
    "brokerTopicEnable" => broker_topic: bool = true, Start;
    /// Keeps a topic of its own for traces.
    "traceTopicEnable" => trace_topic: bool = false, Start;
    /// Name of the trace topic.
    "msgTraceTopicName" => trace_topic_name: Name = name("RMQ_SYS_TRACE_TOPIC".to_owned()), Start;
    /// Stores reply messages besides pushing them to the requester.
    "storeReplyMessageEnable" => store_replies: bool = true, Live;
    /// Allows SQL92 filters.
    "enablePropertyFilter" => property_filter: bool = true, Live;
    /// Applies SQL92 filters to retry topics too.
    "filterSupportRetry" => filter_retry: bool = false, Live;
    /// Tells consumers at once when their group changes.
    "notifyConsumerIdsChangedEnable" => notify_consumers_changed: bool = true, Live;
    /// Largest message with its properties.
    "maxMessageSize" => message_bytes_max: Bytes = Bytes(4 << 20), Live,
        |size| within(size.0, 1, FRAME_BYTES_MAX);

    // Transactions, delay, POP.
    /// Refuses transaction messages.
    "rejectTransactionMessage" => reject_transactions: bool = false, Live;
    /// Age at which an undecided transaction is asked about.
    "transactionTimeOut" => transaction_timeout_ms: u64 = 6_000, Live;
    /// How often an undecided transaction is asked about.
    "transactionCheckMax" => transaction_check_max: u32 = 15, Live;
    /// Time between two rounds of asking.
    "transactionCheckInterval" => transaction_check_interval_ms: u64 = 30_000, Live,
        |ms| within(*ms, 100, 86_400_000);
    /// Delays of the delay levels.
    "messageDelayLevel" => message_delay_levels: DelayLevels = DelayLevels::standard(), Start;
    /// Allows messages with a delivery time of their own.
    "timerWheelEnable" => timer_enable: bool = true, Live;
    /// Furthest delivery time.
    "timerMaxDelaySec" => timer_delay_max_s: u64 = 259_200, Live;
    /// Lets producers take back messages whose time has not come.
    "recallMessageEnable" => recall_enable: bool = false, Live;
    /// Grain of delivery times.
    "timerPrecisionMs" => timer_precision_ms: u64 = 1_000, Start, |ms| within(*ms, 1, 60_000);
    /// Queues of the topic that brings unacknowledged POP messages back.
    "reviveQueueNum" => revive_queues: u32 = 8, Start,
        |n| within(u64::from(*n), 1, TOPIC_QUEUES_MAX);
    /// Most parked POP requests of one queue.
    "popPollingSize" => pop_parked_max: u32 = 1_024, Live;
    /// Names POP retry topics the way that cannot clash.
    "enableRetryTopicV2" => retry_topic_v2: bool = false, Start;
    /// How consumers take messages when a topic says nothing.
    "defaultMessageRequestMode" => message_request_mode: MessageRequestMode =
        MessageRequestMode::Pull, Live;

    // Flow control.
    /// Refuses sends that waited too long.
    "brokerFastFailureEnable" => fast_failure: bool = true, Live;
    /// Longest wait of a send.
    "waitTimeMillsInSendQueue" => send_wait_max_ms: u64 = 200, Live;
    /// Longest wait of a pull that is not parked.
    "waitTimeMillsInPullQueue" => pull_wait_max_ms: u64 = 5_000, Live;
    /// Longest wait of a transaction's end.
    "waitTimeMillsInTransactionQueue" => transaction_wait_max_ms: u64 = 3_000, Live;
    /// Longest wait of an acknowledgement.
    "waitTimeMillsInAckQueue" => ack_wait_max_ms: u64 = 3_000, Live;
    /// Sends waiting at once.
    "sendThreadPoolQueueCapacity" => sends_waiting_max: u32 = 10_000, Start,
        |n| within(u64::from(*n), 1, 10_000_000);
    /// Pulls waiting at once.
    "pullThreadPoolQueueCapacity" => pulls_waiting_max: u32 = 100_000, Start,
        |n| within(u64::from(*n), 1, 10_000_000);
    /// Parks a pull that finds nothing until a message comes.
    "longPollingEnable" => long_polling: bool = true, Live;
    /// How long a pull is parked when long polling is off.
    "shortPollingTimeMills" => short_polling_ms: u64 = 1_000, Live;
    /// Serves reads from a replica.
    "slaveReadEnable" => slave_read: bool = false, Live;
    /// Age of a waiting append at which the broker calls itself busy.
    "osPageCacheBusyTimeOutMills" => append_busy_timeout_ms: u64 = 1_000, Live;
    /// Most bytes of one pull answer from memory.
    "maxTransferBytesOnMessageInMemory" => pull_bytes_memory_max: Bytes = Bytes(256 << 10), Live;
    /// Most messages of one pull answer from memory.
    "maxTransferCountOnMessageInMemory" => pull_messages_memory_max: u32 = 32, Live;
    /// Most bytes of one pull answer from disk.
    "maxTransferBytesOnMessageInDisk" => pull_bytes_disk_max: Bytes = Bytes(64 << 10), Live;
    /// Most messages of one pull answer from disk.
    "maxTransferCountOnMessageInDisk" => pull_messages_disk_max: u32 = 8, Live;
    /// Share of memory that counts as recent messages.
    "accessMessageInMemoryMaxRatio" => memory_ratio_percent: u32 = 40, Live;
    /// Most messages of one batch pull.
    "pullBatchMaxMessageCount" => pull_batch_messages_max: u32 = 160, Live;

    // Storage.
    /// Directory of everything the broker keeps.
    "storePathRootDir" => store_path_root: FilePath = FilePath::default(), Fixed;
    /// Directory of the commit log; storePathRootDir/commitlog when not set.
    "storePathCommitLog" => store_path_commit_log: FilePath = FilePath::default(), Fixed;
    /// Size of a commit log segment.
    "mappedFileSizeCommitLog" | "mapedFileSizeCommitLog" =>
        segment_bytes: Bytes = Bytes(1 << 30), Start,
        |size| sized(size.0, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX, 4_096);
    /// Size of a consume queue file; decides nothing here but the size of exports.
    "mappedFileSizeConsumeQueue" | "mapedFileSizeConsumeQueue" => queue_file_bytes: Bytes =
        Bytes(6_000_000), Start;
    /// When a message counts as stored.
    "flushDiskType" => flush_disk_type: FlushDiskType = FlushDiskType::AsyncFlush, Start;
    /// Part among the replicas.
    "brokerRole" => broker_role: BrokerRole = BrokerRole::AsyncMaster, Start;
    /// Longest wait for a flush before the sender is told.
    "syncFlushTimeout" => sync_flush_timeout_ms: u64 = 5_000, Live, |ms| within(*ms, 1, 600_000);
    /// Longest wait for replicas before the sender is told.
    "slaveTimeout" => slave_timeout_ms: u64 = 3_000, Live, |ms| within(*ms, 1, 600_000);
    /// Longest time that acknowledged bytes stay unflushed under ASYNC_FLUSH.
    "flushIntervalCommitLog" => flush_interval_ms: u64 = 500, Live, |ms| within(*ms, 1, 600_000);
    /// Pages that make an early flush worth it.
    "flushCommitLogLeastPages" => flush_least_pages: u32 = 4, Live;
    /// Time after which a flush happens whatever the amount.
    "flushCommitLogThoroughInterval" => flush_thorough_interval_ms: u64 = 10_000, Live;
    /// Hours at which old segments are removed.
    "deleteWhen" => delete_when: Hours = Hours(vec![4]), Live;
    /// Age at which a segment may be removed.
    "fileReservedTime" => file_reserved_h: u64 = 72, Live;
    /// Disk use above which old segments are removed at any hour, in percent.
    "diskMaxUsedSpaceRatio" => disk_used_max_percent: u32 = 75, Live,
        |p| within(u64::from(*p), 1, 100);
    /// Disk use above which sends are refused, in percent.
    "diskSpaceWarningLevelRatio" => disk_warning_percent: u32 = 90, Live,
        |p| within(u64::from(*p), 1, 100);
    /// Disk use above which segments younger than fileReservedTime are removed, in percent.
    "diskSpaceCleanForciblyRatio" => disk_clean_forcibly_percent: u32 = 85, Live,
        |p| within(u64::from(*p), 1, 100);
    /// Allows removal of segments younger than fileReservedTime when the disk fills.
    "cleanFileForciblyEnable" => clean_forcibly: bool = true, Live;
    /// Keeps an index of message keys.
    "messageIndexEnable" => message_index: bool = true, Start;
    /// Slots of a key index.
    "maxHashSlotNum" => index_slots_max: u32 = 5_000_000, Start;
    /// Entries of a key index.
    "maxIndexNum" => index_entries_max: u32 = 20_000_000, Start;
    /// Most messages of one query by key.
    "maxMsgsNumBatch" => query_messages_max: u32 = 64, Live;
    /// Checks the checksum of every record on recovery.
    "checkCRCOnRecover" => check_crc_on_recover: bool = true, Start;
    /// Adds a checksum of each record to its properties.
    "enabledAppendPropCRC" => append_property_crc: bool = false, Start;
    /// Time between two savings of consumer offsets, besides their journal.
    "flushConsumerOffsetInterval" => offset_save_interval_ms: u64 = 5_000, Live,
        |ms| within(*ms, 10, 600_000);

    // Replication and controller.
    /// Replicas in all.
    "totalReplicas" => total_replicas: u32 = 1, Start;
    /// Replicas that must have a message under SYNC_MASTER, the master among them.
    "inSyncReplicas" => in_sync_replicas: u32 = 1, Live;
    /// Fewest replicas that may stand in for inSyncReplicas.
    "minInSyncReplicas" => min_in_sync_replicas: u32 = 1, Live;
    /// Waits for every replica that is in step.
    "allAckInSyncStateSet" => all_ack_in_sync: bool = false, Live;
    /// A replica further behind is not in step.
    "haMaxGapNotInSync" => ha_gap_bytes_max: Bytes = Bytes(256 << 20), Live;
    /// A replica not caught up for so long is not in step.
    "haMaxTimeSlaveNotCatchup" => ha_not_caught_up_ms_max: u64 = 15_000, Live;
    /// Lets a controller choose the master.
    "enableControllerMode" => controller_mode: bool = false, Start;
    /// Controllers.
    "controllerAddr" => controller_addr: AddressList = host_list_unset(), Start;

    // Access.
    /// First form of access control.
    "aclEnable" => acl_enable: bool = false, Fixed;
    /// Checks who a client is.
    "authenticationEnabled" => authentication: bool = false, Fixed;
    /// Checks what a client may do.
    "authorizationEnabled" => authorization: bool = false, Fixed;
    /// First user, as JSON.
    "initAuthenticationUser" => init_user: String = String::new(), Fixed;
    /// Credentials of the broker's own calls, as JSON.
    "innerClientAuthenticationCredentials" => inner_credentials: String = String::new(), Fixed;
    /// Directory of users and rights.
    "authConfigPath" => auth_config_path: FilePath = FilePath::default(), Fixed;
    /// TLS on the listening ports.
    "tls.server.mode" => tls_mode: TlsMode = TlsMode::Permissive, Fixed;
    /// Keys that nobody may change over the network, besides the ones fixed anyway.
    "configBlackList" => config_black_list: String =
        "configBlackList;brokerConfigPath".to_owned(), Fixed;
    /// The config file.
    "brokerConfigPath" => broker_config_path: FilePath = FilePath::default(), Fixed;

    // Metrics.
    /// Where metrics go.
    "metricsExporterType" => metrics_exporter: MetricsExporter = MetricsExporter::Disable, Start;
    /// Port of the Prometheus page under PROM.
    "metricsPromExporterPort" => metrics_port: u16 = 5_557, Start;
    /// Address the Prometheus page is bound to; bindAddress when not set.
    "metricsPromExporterHost" => metrics_host: Host = Host::default(), Start;
    /// OpenTelemetry collector under OTLP_GRPC.
    "metricsGrpcExporterTarget" => metrics_target: String = String::new(), Start;
    /// Labels added to every series, as key:value pairs.
    "metricsLabel" => metrics_label: String = String::new(), Start;
    /// Counters as differences instead of totals.
    "metricsInDelta" => metrics_in_delta: bool = false, Start;

    // Own keys.
    /// Shards of the store; as many as cores when 0. A store keeps the shards it has.
    "pinion.shards" => shards: u64 = 0, Fixed, |n| within(*n, 0, SHARDS_MAX);
    /// CPUs the shards run on; all the process may use when auto.
    "pinion.cores" => cores: CoreList = CoreList::default(), Fixed;
    /// Write buffer of each shard.
    "pinion.bufferBytes" => buffer_bytes: Bytes = Bytes(64 << 20), Fixed,
        |size| sized(size.0, BUFFER_BYTES_MIN, BUFFER_BYTES_MAX, 2 << 20);
    /// Where the write buffers lie that outlive the process.
    "pinion.bufferDir" => buffer_dir: BufferDir = BufferDir::Auto, Fixed;
    /// Buffers of each core for reads of older data.
    "pinion.coldBytes" => cold_bytes: Bytes = Bytes(16 << 20), Fixed, |size| {
        let fits = (1 << 20..=BUFFER_BYTES_MAX).contains(&size.0) && size.0.is_multiple_of(4_096);
        if fits { Ok(()) } else { Err("a multiple of 4096 from 1MiB to 16GiB".to_owned()) }
    };
    /// Writes past the page cache.
    "pinion.direct" => direct: Need = Need::Auto, Fixed;
    /// Memory that is never paged out.
    "pinion.memlock" => memlock: Need = Need::Auto, Fixed;
    /// One thread for each core.
    "pinion.pinning" => pinning: Need = Need::Auto, Fixed;
    /// How log writes reach the disk.
    "pinion.logPort" => log_port: LogPort = LogPort::Auto, Fixed;
    /// Spinning before a core sleeps.
    "pinion.spinUs" => spin_us: u64 = 0, Start, |us| within(*us, 0, SPIN_US_MAX);
    /// Connections at once.
    "pinion.connectionsMax" => connections_max: u32 = 20_000, Start,
        |n| within(u64::from(*n), 1, 10_000_000);
    /// Parked pulls at once.
    "pinion.parkedPullsMax" => parked_pulls_max: u32 = 200_000, Start,
        |n| within(u64::from(*n), 1, 100_000_000);
    /// Largest frame.
    "pinion.frameBytesMax" => frame_bytes_max: Bytes = Bytes(FRAME_BYTES_MAX), Start,
        |size| within(size.0, 4_096, FRAME_BYTES_MAX);
    /// Slots of a ring between two cores.
    "pinion.meshSlots" => mesh_slots: u32 = 4_096, Start, |n| within(u64::from(*n), 64, 1 << 20);
    /// Age of a log write, in milliseconds, at which sends go elsewhere; 0 lets them wait.
    "pinion.fuseShardMs" => fuse_shard_ms: u64 = 200, Live, |ms| within(*ms, 0, 60_000);
    /// Longest wait for requests in flight at the end.
    "pinion.drainMs" => drain_ms: u64 = 5_000, Live, |ms| within(*ms, 0, 600_000);
    /// Port of /live, /ready and /metrics; 0 closes it, auto is listenPort + 3.
    "pinion.healthPort" => health_port: HealthPort = HealthPort::Auto, Fixed;
    /// Address the health port is bound to.
    "pinion.healthAddress" => health_address: Host = Host::from_ip([127, 0, 0, 1].into()), Fixed;
}

/// Port of the health answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthPort {
    /// Derived from listenPort; when taken, the broker runs without.
    Auto,
    /// Closed.
    Off,
    /// This one; when taken, the broker does not start.
    Port(u16),
}

impl super::value::Value for HealthPort {
    const EXPECTED: &'static str = "auto, 0 (closed) or a port from 1 to 65535";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            digits => digits.parse().ok().map(|port| {
                if port == 0 {
                    Self::Off
                } else {
                    Self::Port(port)
                }
            }),
        }
    }
    fn text(&self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::Off => "0".to_owned(),
            Self::Port(port) => port.to_string(),
        }
    }
}
