//! Owns the requests about who is connected, and queue locks.
//!
//! Invariant: a group without members is answered with RocketMQ's code for that, never with an
//! empty list that tools take for a member.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Serialize;
use wire::body::{
    Connection, ConsumerConnection, ConsumerListBody, LockBatchRequest, LockBatchResponse,
    ProducerConnection, ProducerInfo, ProducerTableInfo, QuerySubscriptionBody,
};
use wire::header::language_name;
use wire::requests::{ConsumerList, GroupAndTopic, ProducerList};

use super::Control;
use super::answer::{Answer, Call, Outcome, Refusal, codes, need, now};
use super::clients::Client;
use super::names;

/// Most queues in one request for locks.
pub const LOCKS_PER_REQUEST_MAX: usize = 65_536;

/// Answer to code 203 with what other brokers do not tell: which members disagree.
#[derive(Serialize)]
struct ConsumerConnectionWithConflicts {
    #[serde(flatten)]
    connection: ConsumerConnection,
    #[serde(
        rename = "subscriptionConflicts",
        skip_serializing_if = "Vec::is_empty"
    )]
    conflicts: Vec<ConflictBody>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ConflictBody {
    client_a: String,
    client_b: String,
    expression_a: String,
    expression_b: String,
    topic: String,
}

/// The address of a client as tools show it; one that came over an IPv6 socket from IPv4 as IPv4.
fn address(client: &Client) -> String {
    SocketAddr::new(client.peer.ip().to_canonical(), client.peer.port()).to_string()
}

fn connection(client: &Client) -> Connection {
    Connection {
        client_addr: address(client),
        client_id: client.client_id.clone(),
        language: language_name(client.language).to_owned(),
        version: client.version,
    }
}

impl Control {
    /// Code 38.
    pub(super) fn consumer_list(&self, call: &Call<'_>) -> Outcome {
        let asked = ConsumerList::decode(&call.header.ext)?;
        let Some(members) = self.clients.group(&asked.consumer_group) else {
            return Err(Refusal::error(format!(
                "no consumer for this group, {}",
                asked.consumer_group
            )));
        };
        let ids = members
            .client_ids()
            .into_iter()
            .map(str::to_owned)
            .collect();
        now(Answer::json(&ConsumerListBody {
            consumer_id_list: ids,
        })?)
    }

    /// Code 203.
    pub(super) fn consumer_connections(&self, call: &Call<'_>) -> Outcome {
        let asked = ConsumerList::decode(&call.header.ext)?;
        let Some(members) = self.clients.group(&asked.consumer_group) else {
            return Err(Refusal::new(
                codes::CONSUMER_NOT_ONLINE,
                format!("the consumer group[{}] not online", asked.consumer_group),
            ));
        };
        let group = members.subscriptions();
        let table = group.subscriptions.iter();
        let body = ConsumerConnectionWithConflicts {
            connection: ConsumerConnection {
                connection_set: members.clients().map(connection).collect(),
                consume_from_where: group.consume_from_where,
                consume_type: group.consume_type,
                message_model: group.message_model,
                subscription_table: table.map(|(t, s)| (t.clone(), s.data.clone())).collect(),
            },
            conflicts: members
                .conflicts()
                .iter()
                .map(|conflict| ConflictBody {
                    client_a: conflict.client_a.clone(),
                    client_b: conflict.client_b.clone(),
                    expression_a: conflict.expression_a.clone(),
                    expression_b: conflict.expression_b.clone(),
                    topic: conflict.topic.clone(),
                })
                .collect(),
        };
        now(Answer::json(&body)?)
    }

    /// Code 204.
    pub(super) fn producer_connections(&self, call: &Call<'_>) -> Outcome {
        let asked = ProducerList::decode(&call.header.ext)?;
        let Some(members) = self.clients.producers_of(&asked.producer_group) else {
            return Err(Refusal::error(format!(
                "the producer group[{}] not exist",
                asked.producer_group
            )));
        };
        let connection_set = members.values().map(connection).collect();
        now(Answer::json(&ProducerConnection { connection_set })?)
    }

    /// Code 328.
    pub(super) fn all_producers(&self) -> Outcome {
        let info = |client: &Client| ProducerInfo {
            client_id: client.client_id.clone(),
            language: language_name(client.language).to_owned(),
            last_update_timestamp: client.seen_ms,
            remote_ip: address(client),
            version: client.version,
        };
        let groups = self.clients.producers();
        let data: BTreeMap<String, Vec<ProducerInfo>> = groups
            .map(|(group, members)| (group.to_string(), members.values().map(info).collect()))
            .collect();
        now(Answer::json(&ProducerTableInfo { data })?)
    }

    /// Code 345.
    pub(super) fn subscription_of(&self, call: &Call<'_>) -> Outcome {
        let asked = GroupAndTopic::decode(&call.header.ext)?;
        let topic = need("topic", asked.topic.as_deref())?.to_owned();
        let group = asked.group.into_owned();
        let members = self.clients.group(&group);
        let subscription = members.and_then(|m| m.subscriptions().subscriptions.get(&topic));
        let subscription_data = subscription.map(|subscription| subscription.data.clone());
        now(Answer::json(&QuerySubscriptionBody {
            group,
            subscription_data,
            topic,
        })?)
    }

    fn lock_request(&self, call: &Call<'_>) -> Result<LockBatchRequest, Refusal> {
        let asked: LockBatchRequest = call.json()?;
        names::check_group(&asked.consumer_group)?;
        need("clientId", Some(&asked.client_id))?;
        if asked.mq_set.len() > LOCKS_PER_REQUEST_MAX {
            return Err(Refusal::parameter(format!(
                "mqSet has {} queues, at most {LOCKS_PER_REQUEST_MAX}",
                asked.mq_set.len()
            )));
        }
        Ok(asked)
    }

    /// Code 41.
    pub(super) fn lock_queues(&mut self, call: &Call<'_>) -> Outcome {
        let asked = self.lock_request(call)?;
        let (group, client) = (&asked.consumer_group, &asked.client_id);
        let granted = self.locks.lock(call.now_ms, group, client, asked.mq_set);
        now(Answer::json(&LockBatchResponse {
            lock_ok_mq_set: granted,
        })?)
    }

    /// Code 42.
    pub(super) fn unlock_queues(&mut self, call: &Call<'_>) -> Outcome {
        let asked = self.lock_request(call)?;
        self.locks
            .unlock(&asked.consumer_group, &asked.client_id, &asked.mq_set);
        now(Answer::done())
    }
}
