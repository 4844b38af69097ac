//! How a group stands to a message that is in a queue it could read: got, passed over, or waiting,
//! and then why.
//!
//! Invariant: pure, and "never" is said only where the broker's record of deliveries reaches back
//! to the message.

use wire::body::{PERM_READ, SubscriptionData};
use wire::message::filter::Filter;
use wire::message::properties;
use wire::message::tags::tags_code;

use super::facts::{Copy, Facts, GroupFacts, QueueFacts};
use super::judge::{Kind, Verdict, verdict};
use super::topics::{span, time};
use crate::control::subscriptions::Subscription;

/// A group that asked within this time still reads, in milliseconds: pulls wait up to 30 s, and are
/// repeated at once.
const ASKS_MS_MAX: i64 = 60_000;

/// How the group and the message of a queue stand to one another.
struct Case<'a> {
    facts: &'a Facts,
    copy: &'a Copy,
    group: &'a GroupFacts,
    queue: QueueFacts,
    /// Whether the message stands in a topic of the group's own.
    retried: bool,
}

/// Judges.
pub(super) fn judge(facts: &Facts, copy: &Copy, group: &GroupFacts, retried: bool) -> Verdict {
    let unknown = QueueFacts {
        committed: -1,
        pull_offset: -1,
        reset_to: -1,
        min_offset: 0,
        max_offset: i64::MAX,
        deliveries_known_since_ms: i64::MAX,
        ..QueueFacts::default()
    };
    let case = Case {
        facts,
        copy,
        group,
        queue: copy.queue.clone().unwrap_or(unknown),
        retried,
    };
    let found = case
        .held()
        .or_else(|| case.done())
        .or_else(|| case.not_readable())
        .or_else(|| case.not_reading())
        .or_else(|| case.filtered())
        .or_else(|| case.delivered())
        .or_else(|| case.not_asked())
        .unwrap_or_else(|| case.in_line());
    case.with_details(found)
}

impl Case<'_> {
    fn offset(&self) -> i64 {
        self.copy.queue_offset
    }

    fn time(&self, at_ms: i64) -> String {
        time(at_ms, self.facts.now_ms)
    }

    fn subscription(&self) -> Option<&SubscriptionData> {
        self.group.subscriptions.get(&self.facts.topic)
    }

    /// Whether every delivery of the message is on record.
    fn is_recorded(&self) -> bool {
        self.queue.deliveries_known_since_ms <= self.copy.store_ms
    }

    /// In a consumer's hands by POP, or acknowledged out of turn.
    fn held(&self) -> Option<Verdict> {
        let held = self.queue.holding?;
        let since = self.time(held.pop_ms);
        if held.acked {
            let why = format!(
                "group {} acknowledged it; its place in the queue moves on when those in front of \
                 it are acknowledged, too",
                self.group.name
            );
            return Some(verdict(Kind::Consumed, why));
        }
        let order = if held.ordered { " in order" } else { "" };
        let (until, who) = (self.time(held.due_ms), self.last_client());
        let why = if held.due_ms > self.facts.now_ms {
            format!(
                "it was popped{order}{who} at {since} and is not acknowledged: nobody else gets it \
                 until {until}"
            )
        } else {
            format!(
                "it was popped{order}{who} at {since} and not acknowledged in time (until \
                 {until}); it comes again now"
            )
        };
        Some(verdict(Kind::Invisible, why))
    }

    /// Who got it last, as part of a sentence.
    fn last_client(&self) -> String {
        let last = self.queue.deliveries.last();
        last.map_or_else(String::new, |last| {
            format!(" by {}", self.client(&last.client))
        })
    }

    /// A client's address, with its id where it is still a member.
    fn client(&self, address: &str) -> String {
        let member = self.group.members.iter().find(|m| m.address == address);
        match member {
            Some(member) => format!("{} ({address})", member.client_id),
            None => address.to_owned(),
        }
    }

    /// The group's offset is behind it already.
    fn done(&self) -> Option<Verdict> {
        let queue = &self.queue;
        let goes_back = (0..=self.offset()).contains(&queue.reset_to);
        if queue.committed <= self.offset() || goes_back {
            return None;
        }
        let (name, at) = (&self.group.name, queue.committed);
        if let Some(verdict) = self.filtered() {
            return Some(verdict);
        }
        if queue.deliveries_count == 0 && self.is_recorded() {
            let why = format!(
                "group {name} stands at {at}, behind it, but never got it: its offset was set \
                 there, or it began there"
            );
            return Some(verdict(Kind::Skipped, why));
        }
        let why = format!(
            "group {name} is done with it: it stands at offset {at}{}",
            self.last_got()
        );
        Some(verdict(Kind::Consumed, why))
    }

    fn last_got(&self) -> String {
        match self.queue.deliveries.last() {
            Some(last) => format!(
                ", delivered to {} at {}",
                self.client(&last.client),
                self.time(last.last_ms)
            ),
            None => "; to whom it was delivered is not recorded any more".to_owned(),
        }
    }

    fn not_readable(&self) -> Option<Verdict> {
        let end = self.queue.max_offset;
        (self.offset() >= end).then(|| {
            let why = format!(
                "it is stored, but not readable yet: the queue is readable up to {end}, and what \
                 could be lost in a crash is shown to nobody"
            );
            verdict(Kind::NotReadable, why)
        })
    }

    /// Reasons for which the group reads nothing here.
    fn not_reading(&self) -> Option<Verdict> {
        let (name, topic) = (&self.group.name, &self.facts.topic);
        let readers = self.readers();
        if let Some(config) = &self.group.config
            && !config.consume_enable
        {
            let why = format!("group {name} is paused: consumeEnable is false");
            return Some(verdict(Kind::Paused, why));
        }
        if !self.group.may_read {
            let why =
                format!("group {name} may not read topic {topic}: an administrator forbade it");
            return Some(verdict(Kind::Paused, why));
        }
        if self
            .facts
            .topic_perm
            .is_some_and(|perm| perm & PERM_READ == 0)
        {
            let why = format!("topic {topic} may not be read now (its permission lacks 4)");
            return Some(verdict(Kind::Paused, why));
        }
        if self.group.members.is_empty() {
            if self.is_asking() {
                // It reads without having announced itself.
                return None;
            }
            return Some(if self.group.config.is_none() && self.queue.committed < 0 {
                let why = format!("the broker knows no group {name}{readers}");
                verdict(Kind::NoGroup, why)
            } else if self.queue.committed < 0 && self.queue.pull_offset < 0 && !self.retried {
                let why =
                    format!("group {name} has no member online and never read this queue{readers}");
                verdict(Kind::NoMember, why)
            } else {
                let why = format!("no member of group {name} is online{}", self.lag());
                verdict(Kind::NoMember, why)
            });
        }
        if self.subscription().is_none() && !self.retried && !self.is_asking() {
            let taken: Vec<&str> = self
                .group
                .subscriptions
                .keys()
                .map(String::as_str)
                .collect();
            let why = format!(
                "group {name} does not subscribe to topic {topic}, only to {}{readers}",
                taken.join(", ")
            );
            return Some(verdict(Kind::WrongGroup, why));
        }
        self.group.broadcast.then(|| {
            let why = format!(
                "group {name} reads by broadcast: each member gets every message and keeps its own \
                 offset, which the broker does not know"
            );
            verdict(Kind::Broadcast, why)
        })
    }

    fn readers(&self) -> String {
        let name = &self.group.name;
        let others = self.facts.readers.iter().filter(|reader| *reader != name);
        let others: Vec<&str> = others.map(String::as_str).collect();
        if others.is_empty() {
            "; no other group reads the topic".to_owned()
        } else {
            format!("; groups that read the topic: {}", others.join(", "))
        }
    }

    /// The group's expression does not take the message.
    fn filtered(&self) -> Option<Verdict> {
        if self.retried {
            return None;
        }
        let data = self.subscription()?;
        let subscription = Subscription::new(data.clone());
        let (name, text) = (&self.group.name, &data.sub_string);
        if let Some(wrong) = &subscription.wrong {
            let why = format!(
                "the expression of group {name} is wrong, so it reads nothing: {}",
                wrong.reason
            );
            return Some(verdict(Kind::Filtered, why));
        }
        let stored = &self.copy.properties;
        let tag = properties::get_str(stored, properties::TAGS);
        if subscription.is_tag() {
            if data.class_filter_mode || subscription.wants_tag(tags_code(tag)) {
                return None;
            }
            let has = tag.map_or("no tag".to_owned(), |tag| format!("tag {tag}"));
            let why = format!("filtered: group {name} takes tags \"{text}\", and it has {has}");
            return Some(verdict(Kind::Filtered, why));
        }
        let filter = Filter::compile(text).ok()?;
        if filter.matches(stored) {
            return None;
        }
        let why = format!(
            "filtered: group {name} takes {} \"{text}\", which is not true of its properties ({})",
            data.expression_type,
            shown(stored)
        );
        Some(verdict(Kind::Filtered, why))
    }

    /// A client has it and has not acknowledged it.
    fn delivered(&self) -> Option<Verdict> {
        let queue = &self.queue;
        let (name, at) = (&self.group.name, queue.committed);
        if let Some(last) = queue.deliveries.last() {
            let why = format!(
                "{} got it at {} and has not acknowledged it: group {name} stands at {}",
                self.client(&last.client),
                self.time(last.last_ms),
                if at < 0 {
                    "no offset yet".to_owned()
                } else {
                    format!("offset {at}")
                }
            );
            return Some(verdict(Kind::Delivered, why));
        }
        (queue.pull_offset > self.offset()).then(|| {
            let why = format!(
                "group {name} got it (its last pull, at {}, asked from {} on) and has not \
                 acknowledged it; to whom is not recorded any more",
                self.time(queue.pulled_ms),
                queue.pull_offset
            );
            verdict(Kind::Delivered, why)
        })
    }

    /// Whether the group asks for messages of the queue.
    fn is_asking(&self) -> bool {
        let queue = &self.queue;
        let asked_lately = self.facts.now_ms - queue.pulled_ms < ASKS_MS_MAX;
        queue.pulls_waiting > 0 || queue.pops_waiting > 0 || asked_lately
    }

    fn not_asked(&self) -> Option<Verdict> {
        let (name, queue) = (&self.group.name, &self.queue);
        if let Some(until) = queue
            .blocked_until_ms
            .filter(|until| *until > self.facts.now_ms)
        {
            let why = format!(
                "the queue is popped in order, and {} messages in front of it are not \
                 acknowledged; they come again at {}",
                queue.held,
                self.time(until)
            );
            return Some(verdict(Kind::Blocked, why));
        }
        if let Some(owner) = &self.group.lock.owner {
            let is_member = self.group.members.iter().any(|m| m.client_id == *owner);
            if !is_member || !self.is_asking() {
                let until = self.group.lock.renewed_ms + self.group.lock.live_ms;
                let who = if is_member {
                    "does not ask for messages"
                } else {
                    "is no member of it now"
                };
                let why = format!(
                    "its queue is locked for group {name} by {owner}, who {who}; the lock ends at \
                     {} unless renewed",
                    self.time(until)
                );
                return Some(verdict(Kind::Locked, why));
            }
        }
        if self.is_asking() || self.copy.queue.is_none() {
            return None;
        }
        let asked = match queue.pulled_ms {
            0 => "since the broker started".to_owned(),
            at => format!("since {}", self.time(at)),
        };
        let why = format!(
            "group {name} has {} online, but none has asked for messages of this queue {asked}: \
             paused, busy with what it has, or the queue is given to nobody{}",
            members(self.group.members.len()),
            self.lag()
        );
        Some(verdict(Kind::NotAsked, why))
    }

    fn lag(&self) -> String {
        let from = self.queue.committed.max(self.queue.min_offset);
        match self.offset() - from {
            0 => String::new(),
            1 => "; 1 message is in front of it".to_owned(),
            ahead if ahead > 0 => format!("; {ahead} messages are in front of it"),
            _ => String::new(),
        }
    }

    fn in_line(&self) -> Verdict {
        let name = &self.group.name;
        let from = self.queue.committed.max(self.queue.pull_offset);
        let ahead = self.offset() - from.max(self.queue.min_offset);
        if ahead > 0 {
            let why = format!(
                "the queue lags: group {name} stands at offset {}, {ahead} messages in front of it",
                from.max(self.queue.min_offset)
            );
            return verdict(Kind::Lags, why);
        }
        let why =
            format!("nothing holds it up: it is the next one group {name} gets of this queue");
        verdict(Kind::OnItsWay, why)
    }

    fn with_details(&self, mut found: Verdict) -> Verdict {
        let details = &mut found.details;
        let (queue, name) = (&self.queue, &self.group.name);
        if self.copy.queue.is_some() {
            details.push(self.deliveries(found.kind == Kind::Filtered));
            let committed = match queue.committed {
                ..0 => "no committed offset".to_owned(),
                at => format!("committed offset {at}"),
            };
            details.push(format!(
                "group {name} in this queue: {committed}, queue {} to {}, {} pulls and {} pops \
                 waiting, {} messages held",
                queue.min_offset,
                queue.max_offset,
                queue.pulls_waiting,
                queue.pops_waiting,
                queue.held
            ));
        }
        let shown = self.group.members.iter().take(8);
        let shown: Vec<String> = shown
            .map(|m| format!("{} ({})", m.client_id, m.address))
            .collect();
        if !shown.is_empty() {
            details.push(format!(
                "{} of group {name}: {}",
                members(self.group.members.len()),
                shown.join(", ")
            ));
        }
        if let Some(owner) = self
            .group
            .lock
            .owner
            .as_ref()
            .filter(|_| found.kind != Kind::Locked)
        {
            details.push(format!("the queue is locked by {owner}"));
        }
        let conflicts = self.group.conflicts.iter();
        details.extend(conflicts.map(|text| format!("members subscribe differently: {text}")));
        found
    }

    fn deliveries(&self, passed_over: bool) -> String {
        let queue = &self.queue;
        let name = &self.group.name;
        let since = self.time(queue.deliveries_known_since_ms);
        if queue.deliveries.is_empty() && self.is_recorded() {
            return format!("never delivered to group {name}");
        }
        if queue.deliveries.is_empty() {
            return format!(
                "deliveries to group {name} before {since} are not recorded any more, since then \
                 there was none"
            );
        }
        let told = queue.deliveries.iter().map(|delivery| {
            let how = if delivery.popped {
                "popped by"
            } else {
                "pulled by"
            };
            let width = delivery.last_ms - delivery.first_ms;
            let within = if width > 0 {
                format!(" within {}", span(width))
            } else {
                String::new()
            };
            let client = self.client(&delivery.client);
            format!("{how} {client} at {}{within}", self.time(delivery.first_ms))
        });
        let told: Vec<String> = told.collect();
        let before = if self.is_recorded() {
            String::new()
        } else {
            format!(" (those before {since} are not recorded any more)")
        };
        let count = queue.deliveries_count;
        let times = if count == 1 {
            "once".to_owned()
        } else {
            format!("{count} times")
        };
        let what = if passed_over {
            "passed over, or delivered by an earlier expression, in pulls of"
        } else {
            "delivered to"
        };
        format!("{what} group {name} {times}{before}: {}", told.join("; "))
    }
}

fn members(count: usize) -> String {
    match count {
        1 => "1 member".to_owned(),
        count => format!("{count} members"),
    }
}

/// Properties of the user, for people.
fn shown(stored: &[u8]) -> String {
    const OF_THE_SYSTEM: [&str; 8] = [
        properties::UNIQ_KEY,
        properties::WAIT,
        properties::MSG_REGION,
        properties::TRACE_ON,
        properties::CLUSTER,
        properties::MIN_OFFSET,
        properties::MAX_OFFSET,
        properties::INSTANCE_ID,
    ];
    let all = properties::iter(stored);
    let all = all.map(|(name, value)| {
        (
            String::from_utf8_lossy(name),
            String::from_utf8_lossy(value),
        )
    });
    let own = all.filter(|(name, _)| !OF_THE_SYSTEM.contains(&&**name));
    let own: Vec<String> = own.map(|(name, value)| format!("{name}={value}")).collect();
    if own.is_empty() {
        "none of its own".to_owned()
    } else {
        own.join(", ")
    }
}
