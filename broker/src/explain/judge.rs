//! From facts to a verdict: where the message is, and why it waits there.
//!
//! Invariant: pure. The first reason that holds is the verdict, in the order in which a message
//! would meet them; everything else that is known is told behind it.

use serde::Serialize;
use wire::message::properties;

use super::facts::{Copy, Facts, HalfFacts, HalfState, Missing};
use super::topics::{self, span, time};
use super::waits;
use crate::control::names::{CHECK_MAX_TOPIC, HALF_TOPIC};

/// How long after its due time a message may be on its way before that is odd, in milliseconds.
const DUE_LATE_MS: i64 = 5_000;

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// No record of it is or was here.
    NeverArrived,
    /// Retention dropped it.
    Expired,
    /// Nobody decided its transaction yet.
    Undecided,
    /// Its transaction was rolled back.
    RolledBack,
    /// Its producers were asked too often.
    GivenUp,
    /// Its time has not come.
    NotYetDue,
    /// The group could not handle it and waits for the next attempt.
    WaitsForRetry,
    /// The group gave it up.
    Dead,
    /// It is stored; no group was named.
    Stored,
    /// The broker does not know the group.
    NoGroup,
    /// The group does not read the topic.
    WrongGroup,
    /// The group reads nothing of the topic now.
    Paused,
    /// No member of the group is online.
    NoMember,
    /// The group's expression does not take it.
    Filtered,
    /// Each member reads for itself.
    Broadcast,
    /// A client popped it and did not acknowledge it.
    Invisible,
    /// A client got it and did not acknowledge it.
    Delivered,
    /// The group is done with it.
    Consumed,
    /// The group went past it without getting it.
    Skipped,
    /// Somebody who does not ask has locked its queue.
    Locked,
    /// Its queue is popped in order, and what is in front of it is not acknowledged.
    Blocked,
    /// Nobody asks for messages of its queue.
    NotAsked,
    /// Others are in front of it.
    Lags,
    /// It is stored, but its answer could not be sent yet.
    NotReadable,
    /// Nothing holds it up.
    OnItsWay,
}

/// What is said of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Verdict {
    /// What became of it.
    pub kind: Kind,
    /// Why, in one sentence.
    pub why: String,
    /// What else is known, in order.
    pub details: Vec<String>,
}

pub(super) fn verdict(kind: Kind, why: impl Into<String>) -> Verdict {
    Verdict {
        kind,
        why: why.into(),
        details: Vec::new(),
    }
}

/// Judges.
#[must_use]
pub fn judge(facts: &Facts) -> Verdict {
    let Some(newest) = facts.copies.last() else {
        let mut verdict = missing(facts);
        verdict.details.extend(notes(facts));
        return verdict;
    };
    let mut verdict = stage(facts, newest);
    let mut details: Vec<String> = Vec::new();
    for (at, copy) in facts.copies.iter().enumerate() {
        details.push(stored(facts, copy, at));
    }
    details.extend(durable(newest));
    details.append(&mut verdict.details);
    details.extend(notes(facts));
    verdict.details = details;
    verdict
}

/// What the topic of the newest copy tells.
fn stage(facts: &Facts, copy: &Copy) -> Verdict {
    if topics::is_dead(&copy.topic) {
        let why = format!(
            "it is a dead letter: the group gave it up after {} and it stands in {}, queue {}, \
             offset {}",
            attempts(copy.reconsume_times),
            copy.topic,
            copy.queue_id,
            copy.queue_offset
        );
        return verdict(Kind::Dead, why);
    }
    if copy.topic == HALF_TOPIC {
        let half = copy.queue.as_ref().and_then(|queue| queue.half.as_ref());
        return half_message(facts, copy, half);
    }
    if copy.topic == CHECK_MAX_TOPIC {
        let why = format!(
            "its producers were asked too often how its transaction ends; it was given up and \
             stands in {CHECK_MAX_TOPIC}"
        );
        return verdict(Kind::GivenUp, why);
    }
    if topics::is_timed(&copy.topic) {
        return timed(facts, copy);
    }
    let retried = topics::is_retry(&copy.topic);
    match &facts.group {
        Some(group) => waits::judge(facts, copy, group, retried),
        None => verdict(
            Kind::Stored,
            format!(
                "it is stored in topic {}, queue {}, offset {}; name a group (-g) to see whether \
                 that has it",
                copy.topic, copy.queue_id, copy.queue_offset
            ),
        ),
    }
}

fn attempts(reconsume_times: i32) -> String {
    match reconsume_times {
        1 => "1 attempt".to_owned(),
        times => format!("{times} attempts"),
    }
}

/// When a waiting message is due, as far as that is known.
pub(super) fn due_ms(facts: &Facts, copy: &Copy) -> Option<i64> {
    if topics::has_own_time(copy) {
        return copy.number(properties::TIMER_OUT_MS);
    }
    let level = copy.number(properties::DELAY)?;
    let last = facts.delays_ms.len() as i64;
    let at = usize::try_from(level.clamp(1, last.max(1)) - 1).ok()?;
    Some(copy.store_ms + facts.delays_ms.get(at)?)
}

fn timed(facts: &Facts, copy: &Copy) -> Verdict {
    let target = topics::target(copy);
    let retried = topics::is_retry(target);
    let Some(due_ms) = due_ms(facts, copy) else {
        return verdict(
            Kind::NotYetDue,
            format!(
                "it waits for its time in {}, which is not known",
                copy.topic
            ),
        );
    };
    let when = time(due_ms, facts.now_ms);
    if due_ms + DUE_LATE_MS < facts.now_ms {
        let why = format!(
            "it was due at {when}, but no copy of it stands in {target}: it was taken back, its \
             topic was removed meanwhile, or the copy is expired"
        );
        return verdict(Kind::Expired, why);
    }
    if retried {
        let why = format!(
            "the group could not handle it ({} so far); the next one is at {when}",
            attempts(copy.reconsume_times)
        );
        return verdict(Kind::WaitsForRetry, why);
    }
    let why = match copy.number(properties::DELAY) {
        Some(level) => format!("it is not yet due: delay level {level}, it comes at {when}"),
        None => format!("it is not yet due: it comes at {when}"),
    };
    verdict(Kind::NotYetDue, why)
}

fn half_message(facts: &Facts, copy: &Copy, half: Option<&HalfFacts>) -> Verdict {
    let producers = copy.property(properties::PRODUCER_GROUP).unwrap_or("?");
    let age = span((facts.now_ms - copy.store_ms).max(0));
    let Some(half) = half else {
        let why = format!("only its half message is here, of producer group {producers}");
        return verdict(Kind::Undecided, why);
    };
    match half.state {
        HalfState::Open => {
            let mut why = format!(
                "its transaction is undecided since {age}: producer group {producers} neither \
                 committed nor rolled back"
            );
            if half.checks > 0 {
                let asked = time(half.asked_ms, facts.now_ms);
                why.push_str(&format!(", asked {} times, last at {asked}", half.checks));
            }
            let mut open = verdict(Kind::Undecided, why);
            if let Some(due_ms) = half.due_ms {
                open.details.push(format!(
                    "the producer group is asked next at {}; after {} questions it is given up",
                    time(due_ms, facts.now_ms),
                    half.checks_max
                ));
            }
            open
        }
        HalfState::RolledBack => verdict(
            Kind::RolledBack,
            format!("its transaction was rolled back by producer group {producers}"),
        ),
        HalfState::GivenUp => verdict(
            Kind::GivenUp,
            format!(
                "its transaction was given up after {} questions",
                half.checks_max
            ),
        ),
        HalfState::Committed => verdict(
            Kind::Expired,
            "its transaction was committed, but the final message is not there any more",
        ),
        HalfState::Dropped => verdict(
            Kind::Expired,
            "its transaction was dropped together with its topic or its segment",
        ),
        HalfState::Unknown => verdict(
            Kind::RolledBack,
            "its transaction ended long ago and no final message is there: it was rolled back, or \
             the final message is expired",
        ),
    }
}

fn missing(facts: &Facts) -> Verdict {
    let topic = &facts.topic;
    match &facts.missing {
        Missing::NoTopic => verdict(
            Kind::NeverArrived,
            format!(
                "no broker has the topic {}: is its name right, and was it ever created?",
                facts.asked.topic.as_deref().unwrap_or(topic)
            ),
        ),
        Missing::NoQueue { queues } => verdict(
            Kind::NeverArrived,
            format!("topic {topic} has no such queue, only {queues} on a broker"),
        ),
        Missing::NoOffset {
            offset,
            min,
            max,
            committed,
        } => no_offset(*offset, *min, *max, *committed),
        Missing::NoPlace { min: ..0, .. } => verdict(
            Kind::NeverArrived,
            "the broker has no log that holds the place in the id: it is not one of this broker",
        ),
        Missing::NoPlace { offset, min, max } if offset < min => verdict(
            Kind::Expired,
            format!(
                "it is expired: its place {offset} is in front of the log, which begins at {min}"
            ),
        ),
        Missing::NoPlace { offset, max, .. } if offset >= max => verdict(
            Kind::NeverArrived,
            format!("nothing was ever stored at its place {offset}: the log ends at {max}"),
        ),
        Missing::NoPlace { offset, .. } => verdict(
            Kind::NeverArrived,
            format!("no record begins at its place {offset}: the id is not one of this broker"),
        ),
        Missing::NoBroker { address } => verdict(
            Kind::NeverArrived,
            format!("the id names the broker {address}, which the name server does not know"),
        ),
        Missing::NoKey => no_key(facts),
    }
}

fn no_offset(offset: i64, min: i64, max: i64, committed: i64) -> Verdict {
    if offset >= max {
        let why =
            format!("it has not arrived: the queue ends at {max}, offset {offset} is to come");
        return verdict(Kind::NeverArrived, why);
    }
    let mut gone = verdict(
        Kind::Expired,
        format!("it is expired: offset {offset} is in front of the oldest one kept, {min}"),
    );
    if committed >= 0 {
        gone.details.push(if committed > offset {
            format!("the group was done with it: it stands at {committed}")
        } else {
            format!("the group had not consumed it: it stands at {committed}")
        });
    }
    gone
}

fn no_key(facts: &Facts) -> Verdict {
    let topic = &facts.topic;
    let made = facts.key_made_ms;
    let earliest = facts.earliest_ms.unwrap_or(0);
    if let Some(made_ms) = made.filter(|made_ms| *made_ms < earliest) {
        let why = format!(
            "it is probably expired: its id says that it was made at about {}, and the oldest \
             message of topic {topic} is of {}",
            time(made_ms, facts.now_ms),
            time(earliest, facts.now_ms)
        );
        return verdict(Kind::Expired, why);
    }
    let mut never = verdict(
        Kind::NeverArrived,
        format!("no message of topic {topic} has it: it never arrived, or under another topic"),
    );
    if let Some(made_ms) = made {
        never.details.push(format!(
            "its id says that it was made at about {}; the send failed, is still under way, or \
             went elsewhere",
            time(made_ms, facts.now_ms)
        ));
    }
    if let Some(earliest_ms) = facts.earliest_ms {
        never.details.push(format!(
            "the oldest message of the topic is of {}",
            time(earliest_ms, facts.now_ms)
        ));
    }
    never
}

/// Where and when a copy was stored.
fn stored(facts: &Facts, copy: &Copy, at: usize) -> String {
    let what = if topics::is_dead(&copy.topic) {
        "given up to the dead letters"
    } else if copy.topic == HALF_TOPIC {
        "stored as half message"
    } else if copy.topic == CHECK_MAX_TOPIC {
        "given up to those who decide by hand"
    } else if topics::is_timed(&copy.topic) && topics::is_retry(topics::target(copy)) {
        "sent back by the consumer, to come again later"
    } else if topics::is_timed(&copy.topic) {
        "stored until its time comes"
    } else if topics::is_retry(&copy.topic) {
        "put in line again for the group"
    } else if at > 0 && copy.prepared_offset > 0 {
        "committed"
    } else if at > 0 {
        "put into its queue"
    } else {
        "stored"
    };
    let mut text = format!(
        "{what} at {}: topic {}, queue {}, offset {}, on {} (id {}",
        time(copy.store_ms, facts.now_ms),
        copy.topic,
        copy.queue_id,
        copy.queue_offset,
        copy.broker,
        copy.offset_id,
    );
    if let Some(unique) = copy.property(properties::UNIQ_KEY).filter(|_| at == 0) {
        text.push_str(&format!(", unique key {unique}"));
    }
    text.push(')');
    if at == 0 {
        let tag = copy
            .property(properties::TAGS)
            .map(|tag| format!(", tag {tag}"));
        text.push_str(&format!(
            ", made at {} by {}{}",
            time(copy.born_ms, facts.now_ms),
            copy.born_host,
            tag.unwrap_or_default()
        ));
    }
    text
}

/// How safe the newest copy is.
fn durable(copy: &Copy) -> Option<String> {
    let queue = copy.queue.as_ref()?;
    let end = copy.physical_offset + copy.bytes as i64;
    let mut text = if end <= queue.log_synced_offset && queue.sync_flush {
        "durable before its sender was answered: the device has it".to_owned()
    } else if end <= queue.log_synced_offset {
        "durable: the device has it; its sender was answered earlier, once it survived the process"
            .to_owned()
    } else if queue.sync_flush {
        "not durable yet: the device does not have it, and its sender waits".to_owned()
    } else {
        "survives the process, but not a power loss yet: the device does not have it".to_owned()
    };
    if let Some(reason) = &queue.refusing {
        text.push_str(&format!("; the shard takes no more messages: {reason}"));
    }
    Some(text)
}

/// What must be said in any case.
fn notes(facts: &Facts) -> Vec<String> {
    let mut notes = Vec::new();
    if !facts.others.is_empty() {
        notes.push(format!(
            "{} other messages have the same key, this is the newest; the others: {}",
            facts.others.len(),
            facts.others.join(", ")
        ));
    }
    let is_apache = facts.copies.last().is_some_and(|copy| copy.queue.is_none());
    if is_apache {
        notes.push(
            "its broker does not tell what only Pinion knows: deliveries, pops, locks, transactions"
                .to_owned(),
        );
    }
    notes.extend(facts.silent.iter().map(|text| format!("not asked: {text}")));
    notes
}
