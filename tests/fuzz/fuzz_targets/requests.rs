//! Reading typed headers from any ext fields never panics. The first byte chooses the form.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::frame::{Frame, Serialization};
use wire::header::decode;
use wire::requests::*;

macro_rules! decode_all {
    ($ext:expr, $($request:ident)*) => {
        $(drop($request::decode($ext));)*
    };
}

fuzz_target!(|data: &[u8]| {
    let Some((first, header)) = data.split_first() else {
        return;
    };
    let serialization = if first & 1 == 0 {
        Serialization::Json
    } else {
        Serialization::Binary
    };
    let Ok(header) = decode(&Frame {
        serialization,
        header,
        body: b"",
    }) else {
        return;
    };
    let ext = &header.ext;
    drop(SendRequest::decode_long(ext));
    drop(SendRequest::decode_short(ext));
    decode_all!(ext, PullRequest SendBack EndTransaction RecallMessage QueryOffset UpdateOffset
        MaxOffset MinOffset SearchOffset EarliestStoreTime ViewMessage QueryMessage
        UnregisterClient ConsumerList PopMessage AckMessage ChangeInvisibleTime Notification
        PollingInfo PeekMessage CheckTransactionState CreateTopic DeleteTopic AllTopicConfig
        AllGroupConfig DeleteGroup GroupName ConsumeStatsOf ResetOffset ConsumerRunning
        QueryConsumeQueue RouteOf RegisterBroker BrokerIdentity BrokerHeartbeat KvEntry);
});
