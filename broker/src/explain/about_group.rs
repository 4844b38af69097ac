//! The second half of gathering: what the broker of the message knows of topic and group.
//!
//! Invariant: as in `gather`, it only asks, and what is not answered stays unknown.

use serde::Deserialize;
use wire::body::{
    ConsumerConnection, GroupForbiddenBody, GroupList, MessageModel, SubscriptionGroupConfig,
    TopicConfig,
};
use wire::codes::{private, request};

use super::facts::{Copy, GroupFacts, LockFacts, Member};
use super::gather::{Broker, Gather};
use super::topics;
use crate::config::value::{DelayLevels, Value as _};

/// What Pinion adds to the answer about members.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Conflicts {
    subscription_conflicts: Vec<ConflictBody>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ConflictBody {
    client_a: String,
    client_b: String,
    expression_a: String,
    expression_b: String,
    topic: String,
}

/// Asks the broker where the message is now, or all brokers of the topic when it is nowhere.
pub(super) fn add(gather: &mut Gather<'_>) {
    let newest = gather.facts.copies.last().cloned();
    let brokers = match &newest {
        Some(copy) => vec![gather.broker_of(copy)],
        None => gather.topic_brokers(),
    };
    for broker in &brokers {
        about_topic(gather, broker);
    }
    if let (Some(copy), Some(broker)) = (&newest, brokers.first()) {
        delays(gather, broker, copy);
    }
    let Some(name) = gather.facts.asked.group.clone() else {
        return;
    };
    let mut group = GroupFacts {
        name,
        may_read: true,
        ..GroupFacts::default()
    };
    for broker in &brokers {
        about_group(gather, broker, &mut group);
    }
    if let (Some(copy), Some(broker)) = (&newest, brokers.first()) {
        let queue = copy.queue_id.to_string();
        let fields = [
            ("lock", "true"),
            ("consumerGroup", &*group.name),
            ("topic", &*copy.topic),
            ("queueId", &*queue),
        ];
        let told = gather.ask(broker, private::EXPLAIN, &fields);
        let lock = told.and_then(|told| told.json::<LockFacts>());
        group.lock = lock.unwrap_or_default();
    }
    gather.facts.group = Some(group);
}

fn about_topic(gather: &mut Gather<'_>, broker: &Broker) {
    let topic = gather.facts.topic.clone();
    let fields = [("topic", &*topic)];
    let told = gather.ask(broker, request::GET_TOPIC_CONFIG, &fields);
    if let Some(config) = told.and_then(|told| told.json::<TopicConfig>()) {
        let perm = gather.facts.topic_perm.unwrap_or(0) | config.perm;
        gather.facts.topic_perm = Some(perm);
        if gather.facts.copies.is_empty() {
            earliest(gather, broker, config.read_queue_nums);
        }
    }
    let told = gather.ask(broker, request::QUERY_TOPIC_CONSUME_BY_WHO, &fields);
    let readers = told.and_then(|told| told.json::<GroupList>());
    for reader in readers.unwrap_or_default().group_list {
        if !gather.facts.readers.contains(&reader) {
            gather.facts.readers.push(reader);
        }
    }
}

/// Queues whose oldest message is asked for.
const QUEUES_ASKED_MAX: i32 = 16;

fn earliest(gather: &mut Gather<'_>, broker: &Broker, queues: i32) {
    let topic = gather.facts.topic.clone();
    for queue in 0..queues.min(QUEUES_ASKED_MAX) {
        let id = queue.to_string();
        let fields = [("topic", &*topic), ("queueId", &*id)];
        let told = gather.ask(broker, request::GET_EARLIEST_MSG_STORETIME, &fields);
        let time = told.and_then(|told| told.number("timestamp"));
        if let Some(time) = time.filter(|time| *time > 0) {
            let known = gather.facts.earliest_ms.unwrap_or(i64::MAX);
            gather.facts.earliest_ms = Some(known.min(time));
        }
    }
}

/// The delays of the broker's levels, where the message waits for one.
fn delays(gather: &mut Gather<'_>, broker: &Broker, copy: &Copy) {
    if topics::has_own_time(copy) || !topics::is_timed(&copy.topic) {
        return;
    }
    let told = gather.ask(broker, request::GET_BROKER_CONFIG, &[]);
    let body = told.map(|told| told.body).unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.trim().strip_prefix("messageDelayLevel="));
    let levels = line.and_then(|line| DelayLevels::parse(line.trim()));
    let levels = levels.unwrap_or_else(DelayLevels::standard);
    let delays = levels.delays_ms().iter().map(|delay| *delay as i64);
    gather.facts.delays_ms = delays.collect();
}

fn about_group(gather: &mut Gather<'_>, broker: &Broker, group: &mut GroupFacts) {
    let (topic, name) = (gather.facts.topic.clone(), group.name.clone());
    let told = gather.ask(
        broker,
        request::GET_SUBSCRIPTIONGROUP_CONFIG,
        &[("group", &name)],
    );
    if let Some(config) = told.and_then(|told| told.json::<SubscriptionGroupConfig>()) {
        group.config = Some(config);
    }
    let fields = [("group", &*name), ("topic", &*topic)];
    let told = gather.ask(broker, request::UPDATE_AND_GET_GROUP_FORBIDDEN, &fields);
    if let Some(body) = told.and_then(|told| told.json::<GroupForbiddenBody>()) {
        group.may_read &= body.readable;
    }
    let fields = [("consumerGroup", &*name)];
    let Some(told) = gather.ask(broker, request::GET_CONSUMER_CONNECTION_LIST, &fields) else {
        return;
    };
    let Some(online) = told.json::<ConsumerConnection>() else {
        return;
    };
    group.broadcast |= online.message_model == MessageModel::Broadcasting;
    group.subscriptions.extend(online.subscription_table);
    for connection in online.connection_set {
        let member = Member {
            client_id: connection.client_id,
            address: connection.client_addr,
        };
        if !group.members.contains(&member) {
            group.members.push(member);
        }
    }
    let conflicts = told.json::<Conflicts>().unwrap_or_default();
    let conflicts = conflicts.subscription_conflicts.into_iter();
    group.conflicts.extend(conflicts.map(|conflict| {
        let ConflictBody {
            client_a,
            client_b,
            expression_a,
            expression_b,
            topic,
        } = conflict;
        format!("{topic}: {client_a} takes \"{expression_a}\", {client_b} takes \"{expression_b}\"")
    }));
}
