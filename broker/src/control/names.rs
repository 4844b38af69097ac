//! Owns the rules for names (topics, groups) and the list of names the broker keeps for itself.
//!
//! Invariant: a name that passed here fits the one-byte and two-byte length fields of the stored
//! record and can be a key of every control file.

use super::answer::{Refusal, codes};

/// Longest topic name in bytes.
pub const TOPIC_NAME_BYTES_MAX: usize = 127;
/// Longest name of a retry or dead-letter topic in bytes.
pub const RETRY_TOPIC_NAME_BYTES_MAX: usize = 255;
/// Longest group name in bytes.
pub const GROUP_NAME_BYTES_MAX: usize = 120;

/// Prefix of retry topics.
pub const RETRY_PREFIX: &str = "%RETRY%";
/// Prefix of dead-letter topics.
pub const DLQ_PREFIX: &str = "%DLQ%";
/// Prefix of the broker's own topics.
pub const SYSTEM_PREFIX: &str = "rmq_sys_";

/// Template of automatically created topics.
pub const AUTO_CREATE_TOPIC: &str = "TBW102";
/// Topic that clients test themselves with.
pub const SELF_TEST_TOPIC: &str = "SELF_TEST_TOPIC";
/// Topic of the benchmark tools.
pub const BENCHMARK_TOPIC: &str = "BenchmarkTest";
/// Topic of moved-offset events.
pub const OFFSET_MOVED_TOPIC: &str = "OFFSET_MOVED_EVENT";
/// Topic that delayed messages wait in.
pub const SCHEDULE_TOPIC: &str = "SCHEDULE_TOPIC_XXXX";
/// Topic of message traces.
pub const TRACE_TOPIC: &str = "RMQ_SYS_TRACE_TOPIC";
/// Topic of half messages.
pub const HALF_TOPIC: &str = "RMQ_SYS_TRANS_HALF_TOPIC";
/// Group under which the progress of transactions is told.
pub const TRANSACTION_GROUP: &str = "CID_RMQ_SYS_TRANS";
/// Topic that marks half messages as finished.
pub const OP_HALF_TOPIC: &str = "RMQ_SYS_TRANS_OP_HALF_TOPIC";
/// Topic of half messages checked too often.
pub const CHECK_MAX_TOPIC: &str = "TRANS_CHECK_MAX_TIME_TOPIC";
/// Topic of timed messages.
pub const TIMER_TOPIC: &str = "rmq_sys_wheel_timer";

/// Topics with fixed names that nobody may delete or redefine.
const SYSTEM_TOPICS: [&str; 10] = [
    AUTO_CREATE_TOPIC,
    SCHEDULE_TOPIC,
    BENCHMARK_TOPIC,
    HALF_TOPIC,
    TRACE_TOPIC,
    OP_HALF_TOPIC,
    CHECK_MAX_TOPIC,
    SELF_TEST_TOPIC,
    OFFSET_MOVED_TOPIC,
    TIMER_TOPIC,
];

/// Topics that clients may not send to.
const NOT_SENDABLE_TOPICS: [&str; 7] = [
    TIMER_TOPIC,
    SCHEDULE_TOPIC,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    CHECK_MAX_TOPIC,
    SELF_TEST_TOPIC,
    OFFSET_MOVED_TOPIC,
];

/// Groups the broker creates for tools and for itself.
pub const SYSTEM_GROUPS: [&str; 8] = [
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    TRANSACTION_GROUP,
];

/// Whether a topic is one of the broker's own, whatever cluster it is in.
pub fn is_system_topic(topic: &str) -> bool {
    SYSTEM_TOPICS.contains(&topic) || topic.starts_with(SYSTEM_PREFIX)
}

/// Whether clients may send to a topic.
pub fn is_sendable(topic: &str) -> bool {
    !NOT_SENDABLE_TOPICS.contains(&topic)
}

/// Whether a topic is the retry topic of some group.
pub fn is_retry_topic(topic: &str) -> bool {
    topic.starts_with(RETRY_PREFIX)
}

/// Whether a topic is the dead-letter topic of some group.
pub fn is_dlq_topic(topic: &str) -> bool {
    topic.starts_with(DLQ_PREFIX)
}

/// The retry topic of a group.
pub fn retry_topic(group: &str) -> String {
    format!("{RETRY_PREFIX}{group}")
}

/// Checks a topic name.
pub fn check_topic(topic: &str) -> Result<(), Refusal> {
    let is_derived = is_retry_topic(topic) || is_dlq_topic(topic);
    if is_derived {
        // The newer retry topics of POP have a plus between group and topic.
        return check_name(
            "topic",
            topic,
            RETRY_TOPIC_NAME_BYTES_MAX,
            &['_', '-', '%', '|', '+'],
        );
    }
    check_name("topic", topic, TOPIC_NAME_BYTES_MAX, &['_', '-', '%', '|'])
}

/// Checks a group name.
pub fn check_group(group: &str) -> Result<(), Refusal> {
    check_name("group", group, GROUP_NAME_BYTES_MAX, &['_', '-', '%', '|'])
}

/// Checks the name of a producer group, which is no key of any file.
pub fn check_producer_group(group: &str) -> Result<(), Refusal> {
    if group.trim().is_empty() || group.len() > RETRY_TOPIC_NAME_BYTES_MAX {
        return refuse(format!(
            "the producer group has {} bytes, must have 1 to {RETRY_TOPIC_NAME_BYTES_MAX}",
            group.len()
        ));
    }
    Ok(())
}

fn check_name(field: &str, name: &str, bytes_max: usize, signs: &[char]) -> Result<(), Refusal> {
    if name.trim().is_empty() {
        return refuse(format!("the specified {field} is blank: give it a name"));
    }
    if name.len() > bytes_max {
        return refuse(format!(
            "the specified {field} is longer than {field} max length {bytes_max}: it has {} bytes",
            name.len()
        ));
    }
    let is_legal = |c: char| c.is_ascii_alphanumeric() || signs.contains(&c);
    match name.chars().find(|&c| !is_legal(c)) {
        Some(c) => refuse(format!(
            "the specified {field} '{name}' contains the illegal character '{}': allowed are \
             letters, digits, _ - % and |",
            c.escape_default()
        )),
        None => Ok(()),
    }
}

fn refuse(remark: String) -> Result<(), Refusal> {
    Err(Refusal::new(codes::INVALID_PARAMETER, remark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_every_legal_character_pass() {
        assert!(check_topic("Abc_9-%|z").is_ok());
        assert!(check_group("Abc_9-%|z").is_ok());
        assert!(check_topic(&"t".repeat(TOPIC_NAME_BYTES_MAX)).is_ok());
        assert!(check_topic(&format!("%RETRY%{}", "g".repeat(200))).is_ok());
        assert!(check_topic("%RETRY%g+T").is_ok() && check_topic("g+T").is_err());
    }

    #[test]
    fn a_refused_name_is_told_its_field_and_limit() {
        let long = check_topic(&"t".repeat(128)).unwrap_err();
        assert_eq!(long.code, 29);
        assert!(
            long.remark.contains("topic") && long.remark.contains("127"),
            "{}",
            long.remark
        );
        let long = check_group(&"g".repeat(121)).unwrap_err();
        assert!(
            long.remark.contains("group") && long.remark.contains("120"),
            "{}",
            long.remark
        );
        for bad in ["", "  ", "a b", "a/b", "ü", "a\nb", "a.b"] {
            assert!(check_topic(bad).is_err(), "{bad:?}");
        }
    }
}
