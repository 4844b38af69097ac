//! Which topics the copies of one message stand in, what they belong to, and texts of times.
//!
//! Invariant: pure functions of names and stored properties.

use std::time::{SystemTime, UNIX_EPOCH};

use wire::message::properties;

use super::facts::Copy;
use crate::control::names::{
    CHECK_MAX_TOPIC, DLQ_PREFIX, HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC,
};

/// Topics that messages wait in before they reach their own.
pub const WAITING_TOPICS: [&str; 4] = [SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, CHECK_MAX_TOPIC];
const DAY_MS: i64 = 86_400_000;

/// Topics a group gets messages of a topic again from, and the one it gives them up to.
pub fn of_group(topic: &str, group: Option<&str>) -> Vec<String> {
    let Some(group) = group else {
        return Vec::new();
    };
    vec![
        format!("{RETRY_PREFIX}{group}"),
        format!("{RETRY_PREFIX}{group}_{topic}"),
        format!("{RETRY_PREFIX}{group}+{topic}"),
        format!("{DLQ_PREFIX}{group}"),
    ]
}

/// Whether messages wait for a time in a topic.
pub fn is_timed(topic: &str) -> bool {
    topic == SCHEDULE_TOPIC || topic == TIMER_TOPIC
}

/// Whether a waiting message says itself when it is due. One that waits for a delay level may still
/// have the time of an earlier delivery.
pub fn has_own_time(copy: &Copy) -> bool {
    copy.topic == TIMER_TOPIC && copy.number(properties::TIMER_OUT_MS).is_some()
}

/// Whether messages come again in a topic.
pub fn is_retry(topic: &str) -> bool {
    topic.starts_with(RETRY_PREFIX)
}

/// Whether a topic holds what a group gave up.
pub fn is_dead(topic: &str) -> bool {
    topic.starts_with(DLQ_PREFIX)
}

/// Where a copy goes: its topic, or the one it waits for.
pub fn target(copy: &Copy) -> &str {
    if WAITING_TOPICS.contains(&&*copy.topic) {
        copy.property(properties::REAL_TOPIC).unwrap_or(&copy.topic)
    } else {
        &copy.topic
    }
}

/// The topic a message was sent to.
pub fn own_topic(copy: &Copy, group: Option<&str>) -> String {
    let target = target(copy);
    if !is_retry(target) && !is_dead(target) {
        return target.to_owned();
    }
    if let Some(topic) = copy.property(properties::RETRY_TOPIC) {
        return topic.to_owned();
    }
    // The retry topics of POP are named by group and topic.
    let rest = target.strip_prefix(RETRY_PREFIX);
    let rest = rest.and_then(|rest| rest.strip_prefix(group?));
    let rest = rest.and_then(|rest| rest.strip_prefix(['_', '+']));
    rest.unwrap_or(target).to_owned()
}

/// Whether a record found by its key is a copy of a message of the topic, and of the group's.
pub fn belongs(copy: &Copy, topic: &str, group: Option<&str>) -> bool {
    let target = target(copy);
    target == topic || of_group(topic, group).iter().any(|name| name == target)
}

/// When a unique key says that it was made: it has the milliseconds since the start of a month.
pub fn made_ms(id: &str, now_ms: i64) -> Option<i64> {
    let time = match id.len() {
        32 => id.get(20..28),
        56 => id.get(44..52),
        _ => None,
    };
    let since = i64::from_str_radix(time?, 16).ok()?;
    if !(0..32 * DAY_MS).contains(&since) {
        return None;
    }
    let (year, month, _) = date(now_ms.div_euclid(DAY_MS));
    let this = days(year, month) * DAY_MS + since;
    // Clients count in their own time zone.
    if this <= now_ms + DAY_MS {
        return Some(this);
    }
    let (year, month) = if month == 1 {
        (year - 1, 12)
    } else {
        (year, month - 1)
    };
    Some(days(year, month) * DAY_MS + since)
}

/// Days from 1970 to the first of a month.
fn days(year: i64, month: i64) -> i64 {
    // March is the first month, so that the day of leap years is the last of its year.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let leaps = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    year * 365 + leaps + (153 * month + 2) / 5 - 719_468
}

/// Year, month and day of a number of days since 1970.
fn date(day: i64) -> (i64, i64, i64) {
    let (mut year, mut month) = (1970 + day.div_euclid(366), 12);
    while days(year + 1, 1) <= day {
        year += 1;
    }
    while days(year, month) > day {
        month -= 1;
    }
    (year, month, day - days(year, month) + 1)
}

/// Now, in milliseconds.
pub fn clock_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as i64)
}

/// A time as text, with how long ago or ahead it is.
pub fn time(at_ms: i64, now_ms: i64) -> String {
    let (year, month, day) = date(at_ms.div_euclid(DAY_MS));
    let rest = at_ms.rem_euclid(DAY_MS);
    let (hour, minute) = (rest / 3_600_000, rest / 60_000 % 60);
    let (second, milli) = (rest / 1_000 % 60, rest % 1_000);
    let away = if at_ms <= now_ms {
        format!("{} ago", span(now_ms - at_ms))
    } else {
        format!("in {}", span(at_ms - now_ms))
    };
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{milli:03}Z ({away})")
}

/// A span of time as text.
pub fn span(ms: i64) -> String {
    match ms {
        ..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        7_200_000..172_800_000 => format!("{} h", ms / 3_600_000),
        _ => format!("{} days", ms / DAY_MS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_as_dates_with_their_distance() {
        let now = 1_709_251_199_999;
        assert_eq!(
            time(now - 500, now),
            "2024-02-29 23:59:59.499Z (500 ms ago)"
        );
        assert_eq!(
            time(now + 90_001, now),
            "2024-03-01 00:01:30.000Z (in 90.0 s)"
        );
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(-1), (1969, 12, 31));
        for day in 0..40_000 {
            let (year, month, of_month) = date(day);
            assert_eq!(days(year, month) + of_month - 1, day);
            assert!((1..=31).contains(&of_month) && (1..=12).contains(&month));
        }
    }

    #[test]
    fn unique_keys_tell_when_they_were_made() {
        let now = 1_709_251_199_999;
        let key = |since: i64| format!("7F0000010B3A18B4AAC2{since:08X}04D2");
        let this_month = 1_706_745_600_000;
        assert_eq!(
            made_ms(&key(86_400_000), now),
            Some(this_month + 86_400_000)
        );
        let late = 30 * DAY_MS + DAY_MS / 2;
        assert_eq!(
            made_ms(&key(late), this_month + DAY_MS),
            Some(1_704_067_200_000 + late)
        );
        assert_eq!(made_ms("U1", now), None);
    }
}
