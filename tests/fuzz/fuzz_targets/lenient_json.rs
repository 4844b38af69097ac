//! The JSON dialect never panics; what comes out is read again without change, and bodies of any
//! type are read or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::body::{self, lenient::to_standard_json};

fuzz_target!(|data: &[u8]| {
    if let Ok(standard) = to_standard_json(data) {
        let again = to_standard_json(&standard).expect("standard JSON");
        assert_eq!(again, standard);
    }
    drop(body::from_json::<body::HeartbeatData>(data));
    drop(body::from_json::<body::TopicRouteData>(data));
    drop(body::from_json::<body::BatchAckBody>(data));
    drop(body::from_json::<body::RegisterBrokerBody>(data));
    drop(body::RegisterBrokerBody::decode_inflated(data, true));
    if let Ok(table) = body::from_json::<body::ResetOffsetBody>(data) {
        let written = body::to_json(&table).expect("a table just read");
        assert_eq!(
            body::from_json::<body::ResetOffsetBody>(&written).expect("just written"),
            table
        );
    }
});
