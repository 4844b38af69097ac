//! Settings that RocketMQ knows and this version does not act on.
//!
//! Invariant: a setting whose absence would let somebody in, or lose what its writer thinks is kept
//! twice, stops the start; the others are named once, so that nobody believes they act.

use super::Config;
use super::layers::ConfigError;
use super::table::Table as _;
use super::value::{BrokerRole, TlsMode};

/// Keys that are read, checked, shown and without effect.
const WITHOUT_EFFECT: [&str; 33] = [
    "serverSocketBacklog",
    "serverSocketSndBufSize",
    "serverSocketRcvBufSize",
    "registerBrokerTimeoutMills",
    "brokerHeartbeatInterval",
    "brokerNotActiveTimeoutMillis",
    "filterSupportRetry",
    "timerPrecisionMs",
    "waitTimeMillsInPullQueue",
    "waitTimeMillsInTransactionQueue",
    "waitTimeMillsInAckQueue",
    "slaveReadEnable",
    "osPageCacheBusyTimeOutMills",
    "maxTransferBytesOnMessageInDisk",
    "maxTransferCountOnMessageInDisk",
    "accessMessageInMemoryMaxRatio",
    "pullBatchMaxMessageCount",
    "mappedFileSizeConsumeQueue",
    "slaveTimeout",
    "flushCommitLogLeastPages",
    "flushCommitLogThoroughInterval",
    "messageIndexEnable",
    "maxHashSlotNum",
    "maxIndexNum",
    "enabledAppendPropCRC",
    "totalReplicas",
    "haMaxGapNotInSync",
    "haMaxTimeSlaveNotCatchup",
    "metricsGrpcExporterTarget",
    "metricsInDelta",
    "checkCRCOnRecover",
    "minInSyncReplicas",
    "controllerAddr",
];

/// What is asked for, and what to do instead.
type Promise = (&'static str, &'static str);

const ACCESS: Promise = (
    "access control",
    "Take the line out and let only trusted machines reach the ports (firewall, private network)",
);
const TLS: Promise = (
    "TLS",
    "Take the line out and protect the ports by other means (a tunnel, a proxy, a private network)",
);
const REPLICA: Promise = (
    "replication",
    "Set brokerRole=ASYNC_MASTER with brokerId=0 and a brokerName of its own to run another \
     master; the messages of a master are kept on its own disk only. For a replica of an Apache \
     broker, run Apache's",
);
const COPIES: Promise = (
    "replication",
    "Take the line out only if messages may be kept on this broker's disk alone; \
     flushDiskType=SYNC_FLUSH makes them survive a power cut there",
);
const CONTROLLER: Promise = (
    "a controller",
    "Take the line out; the broker is a master for as long as it runs, and nobody takes its place",
);

impl Config {
    /// Refuses what this version cannot promise.
    ///
    /// # Errors
    /// When access control, TLS or replicas are asked for.
    pub fn check_promises(&self) -> Result<(), ConfigError> {
        let promises = [
            ("aclEnable", self.acl_enable, ACCESS),
            ("authenticationEnabled", self.authentication, ACCESS),
            ("authorizationEnabled", self.authorization, ACCESS),
            ("tls.server.mode", self.tls_mode == TlsMode::Enforcing, TLS),
            ("brokerRole", self.broker_role == BrokerRole::Slave, REPLICA),
            ("inSyncReplicas", self.in_sync_replicas > 1, COPIES),
            ("allAckInSyncStateSet", self.all_ack_in_sync, COPIES),
            ("enableControllerMode", self.controller_mode, CONTROLLER),
        ];
        let Some((key, _, (what, advice))) = promises.into_iter().find(|(_, asked, _)| *asked)
        else {
            return Ok(());
        };
        let value = self.keys.text_of(key).unwrap_or_default();
        let origin = self
            .origin_of(key)
            .map(ToString::to_string)
            .unwrap_or_default();
        Err(ConfigError::Conflict(format!(
            "{origin}: {key}={value} asks for {what}, which this version does not have; the broker \
             does not start rather than run without it. {advice}"
        )))
    }

    /// The keys that were set and have no effect, in a sentence.
    #[must_use]
    pub fn note_without_effect(&self) -> Option<String> {
        let set: Vec<&str> = WITHOUT_EFFECT
            .into_iter()
            .filter(|key| self.is_set(key))
            .collect();
        (!set.is_empty()).then(|| {
            format!(
                "accepted, but without effect in this version: {}",
                set.join(", ")
            )
        })
    }
}
