//! Owns heartbeats: how clients, their groups and their subscriptions become known and are told of
//! each other.
//!
//! Invariant: one bad group in a heartbeat never keeps the others of the same client from being
//! registered.

use std::collections::BTreeMap;

use wire::body::{
    CheckClientConfigBody, ConsumerData, EXPRESSION_TAG, HeartbeatData, MessageModel,
    SubscriptionData,
};
use wire::codes::request;
use wire::header::{ExtValue, encode_request};
use wire::requests::UnregisterClient;

use super::answer::{Answer, Call, Field, Outcome, Refusal, codes, need, now};
use super::changes::Changes;
use super::clients::{CLIENT_ID_BYTES_MAX, Client, GROUPS_PER_HEARTBEAT_MAX, GroupChange};
use super::effects::{ClientLink, Effect};
use super::members::{Membership, SUBSCRIPTIONS_PER_MEMBER_MAX};
use super::subscriptions::{Subscription, check_expression};
use super::{Control, names};

impl Control {
    /// Code 34.
    pub(super) fn heartbeat(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let beat: HeartbeatData = call.json()?;
        check_heartbeat(&beat)?;
        let mut changes = Changes::by_use();
        let mut moved = Vec::new();
        let mut failure = None;
        for consumer in beat.consumer_data_set {
            let client = Client::new(
                call.now_ms,
                call.origin,
                call.header,
                beat.client_id.clone(),
            );
            match self.consumer_beat(client, consumer, beat.without_sub, &mut changes) {
                Ok((change, wrong)) => {
                    moved.extend(change);
                    failure = wrong.or(failure);
                }
                Err(refusal) => failure = Some(refusal),
            }
        }
        for producer in beat.producer_data_set {
            let client = Client::new(
                call.now_ms,
                call.origin,
                call.header,
                beat.client_id.clone(),
            );
            let registered = names::check_producer_group(&producer.group_name)
                .and_then(|()| self.clients.register_producer(&producer.group_name, client));
            if let Err(refusal) = registered {
                failure = Some(refusal);
            }
        }
        self.publish(call.now_ms, changes, effects)?;
        let is_changed = moved.iter().any(|change| change.notify);
        self.tell_members(moved, effects);
        if let Some(refusal) = failure {
            let now_us = u64::try_from(call.now_ms).unwrap_or(0) * 1_000;
            if let Some(times) = self.beats_refused.failed(now_us) {
                tracing::warn!(
                    client = beat.client_id,
                    peer = %call.origin.peer,
                    remark = refusal.remark,
                    times,
                    "part of a heartbeat was not taken"
                );
            }
            return Err(refusal);
        }
        // A heartbeat of the first version always hears "true", as Apache's broker says it.
        let is_first_version = beat.heartbeat_fingerprint == 0;
        now(Answer::done()
            .with("IS_SUPPORT_HEART_BEAT_V2", Field::Bool(true))
            .with("IS_SUB_CHANGE", Field::Bool(is_first_version || is_changed)))
    }

    /// No change: the group is unknown and may not be created, which RocketMQ passes over in
    /// silence. With a wrong expression the member counts all the same, so that its group divides
    /// the queues rightly, but it is told.
    fn consumer_beat(
        &mut self,
        client: Client,
        consumer: ConsumerData,
        is_without_subscriptions: bool,
        changes: &mut Changes,
    ) -> Result<(Option<GroupChange>, Option<Refusal>), Refusal> {
        let group = consumer.group_name;
        names::check_group(&group)?;
        let config = match self.need_group(&group, changes) {
            Ok(config) => config,
            Err(refusal) if refusal.code == codes::SUBSCRIPTION_GROUP_NOT_EXIST => {
                tracing::debug!(group, "heartbeat of a group that does not exist");
                return Ok((None, None));
            }
            Err(refusal) => return Err(refusal),
        };
        self.need_retry_topic(&config, changes)?;
        let subscriptions = if is_without_subscriptions {
            None
        } else {
            Some(by_topic(&group, consumer.subscription_data_set)?)
        };
        let wrong = subscriptions
            .iter()
            .flat_map(BTreeMap::values)
            .find_map(|subscription| subscription.wrong.as_ref());
        let wrong = wrong.map(|wrong| {
            let remark = format!("group {group}: {}", wrong.reason);
            Refusal::new(codes::SUBSCRIPTION_PARSE_FAILED, remark)
        });
        let membership = Membership {
            consume_type: consumer.consume_type,
            message_model: consumer.message_model,
            consume_from_where: consumer.consume_from_where,
            subscriptions,
        };
        let change = self.clients.register_consumer(&group, client, membership)?;
        Ok((Some(change), wrong))
    }

    /// Tells cores the new subscriptions and members that they must divide the queues anew.
    pub(super) fn tell_members(&mut self, moved: Vec<GroupChange>, effects: &mut Vec<Effect>) {
        for change in moved {
            effects.extend(change.subscriptions.map(Effect::SubscriptionsChanged));
            if change.notify {
                self.notify_group(&change.group, effects);
            }
        }
    }

    /// Sends code 40 to every member of a group that shares its messages.
    fn notify_group(&mut self, group: &str, effects: &mut Vec<Effect>) {
        let wants = self
            .groups
            .get(group)
            .is_none_or(|g| g.notify_consumer_ids_changed_enable);
        if !wants || !self.config.notify_consumers_changed {
            return;
        }
        let Some(members) = self.clients.group(group) else {
            return;
        };
        if members.subscriptions().message_model == MessageModel::Broadcasting {
            return;
        }
        for client in members.clients() {
            let mut frame = Vec::with_capacity(192);
            let ext = [("consumerGroup", ExtValue::Str(group))];
            let opaque = self.relays.opaque();
            let code = request::NOTIFY_CONSUMER_IDS_CHANGED;
            encode_request(
                &mut frame,
                client.serialization,
                code,
                opaque,
                true,
                &ext,
                &[],
            );
            effects.push(Effect::Push {
                to: client.link,
                frame,
            });
        }
    }

    /// Code 35.
    pub(super) fn unregister(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = UnregisterClient::decode(&call.header.ext)?;
        let link = call.origin.link;
        if let Some(group) = asked
            .producer_group
            .as_deref()
            .filter(|group| !group.is_empty())
        {
            self.clients.unregister_producer(group, link);
        }
        if let Some(group) = asked
            .consumer_group
            .as_deref()
            .filter(|group| !group.is_empty())
        {
            let moved = self.clients.unregister_consumer(group, link);
            self.tell_members(moved.into_iter().collect(), effects);
        }
        now(Answer::done())
    }

    /// Code 46.
    pub(super) fn check_client_config(&self, call: &Call<'_>) -> Outcome {
        let asked: CheckClientConfigBody = call.json()?;
        let subscription = asked.subscription_data;
        if subscription.expression_type == EXPRESSION_TAG {
            return now(Answer::done());
        }
        if !self.config.property_filter {
            return Err(Refusal::error(format!(
                "The broker does not support consumer to filter message by {}",
                subscription.expression_type
            )));
        }
        match check_expression(&subscription) {
            Ok(()) => now(Answer::done()),
            Err(reason) => Err(Refusal::new(codes::SUBSCRIPTION_PARSE_FAILED, reason)),
        }
    }

    /// A connection is gone.
    pub fn connection_closed(&mut self, _now_ms: i64, link: ClientLink, effects: &mut Vec<Effect>) {
        let moved = self.clients.remove_link(link);
        self.tell_members(moved, effects);
        self.relays.closed(link, effects);
        self.half_resets.retain(|(asker, _), _| *asker != link);
    }
}

fn check_heartbeat(beat: &HeartbeatData) -> Result<(), Refusal> {
    need("clientID of the heartbeat", Some(&beat.client_id))?;
    if beat.client_id.len() > CLIENT_ID_BYTES_MAX {
        return Err(Refusal::parameter(format!(
            "clientID of the heartbeat has {} bytes, at most {CLIENT_ID_BYTES_MAX}",
            beat.client_id.len()
        )));
    }
    let groups = beat.consumer_data_set.len() + beat.producer_data_set.len();
    if groups > GROUPS_PER_HEARTBEAT_MAX {
        return Err(Refusal::parameter(format!(
            "the heartbeat names {groups} groups, at most {GROUPS_PER_HEARTBEAT_MAX}"
        )));
    }
    Ok(())
}

fn by_topic(
    group: &str,
    subscriptions: Vec<SubscriptionData>,
) -> Result<BTreeMap<String, Subscription>, Refusal> {
    if subscriptions.len() > SUBSCRIPTIONS_PER_MEMBER_MAX {
        return Err(Refusal::parameter(format!(
            "group {group} subscribes to {} topics, at most {SUBSCRIPTIONS_PER_MEMBER_MAX}",
            subscriptions.len()
        )));
    }
    let pairs = subscriptions
        .into_iter()
        .map(|data| (data.topic.clone(), Subscription::new(data)));
    Ok(pairs.collect())
}
