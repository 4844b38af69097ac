//! Owns the registry of connected producers and consumers.
//!
//! Invariant: a connection is listed under exactly the groups its own table names, so that closing
//! it leaves nothing behind; the number of registrations stays within [`REGISTRATIONS_MAX`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use wire::frame::Serialization;

use super::answer::Refusal;
use super::effects::{ClientLink, Origin};
use super::members::{Conflict, ConsumerGroup, Membership};
use super::subscriptions::GroupSubscriptions;

/// Most registrations (one per connection and group).
pub const REGISTRATIONS_MAX: usize = 500_000;
/// Most groups in one heartbeat.
pub const GROUPS_PER_HEARTBEAT_MAX: usize = 4_096;
/// A client that is silent for so long is taken for gone, in milliseconds.
pub const CLIENT_SILENCE_MS: i64 = 120_000;
/// How long the subscription of a consumer that only pulls is remembered, in milliseconds.
pub const PULL_ONLY_MS: i64 = 600_000;
/// Most subscriptions of consumers that only pull.
pub const PULL_ONLY_MAX: usize = 100_000;
/// Most conflicts between members told at once.
pub const CONFLICTS_TOLD_MAX: usize = 1_000;
/// Longest client id in bytes.
pub const CLIENT_ID_BYTES_MAX: usize = 1_024;

/// A client as one connection shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Client {
    /// Connection.
    pub link: ClientLink,
    /// Remote address.
    pub peer: SocketAddr,
    /// Id the client gave itself.
    pub client_id: String,
    /// Language code.
    pub language: u8,
    /// Version ordinal.
    pub version: i32,
    /// How it writes headers.
    pub serialization: Serialization,
    /// Time of the last heartbeat in milliseconds.
    pub seen_ms: i64,
}

#[derive(Debug, Default)]
struct LinkGroups {
    consumers: BTreeSet<Arc<str>>,
    producers: BTreeSet<Arc<str>>,
}

/// What a change of members means for a consumer group.
#[derive(Debug)]
pub struct GroupChange {
    /// The group.
    pub group: Arc<str>,
    /// Whether members or topics changed, so that members must divide the queues anew.
    pub notify: bool,
    /// New subscriptions, if they changed.
    pub subscriptions: Option<Arc<GroupSubscriptions>>,
}

/// All clients.
#[derive(Debug, Default)]
pub struct Clients {
    consumers: HashMap<Arc<str>, ConsumerGroup>,
    producers: BTreeMap<Arc<str>, BTreeMap<ClientLink, Client>>,
    links: HashMap<ClientLink, LinkGroups>,
    /// The connection over which a producer of that id was heard of last.
    producer_ids: HashMap<String, ClientLink>,
    pull_only: HashMap<(String, String), i64>,
    registrations: usize,
    /// How often a registration was refused because [`REGISTRATIONS_MAX`] were kept.
    pub bound_hits: u64,
    /// How many subscription conflicts were seen between members of one group.
    pub conflicts: u64,
}

impl Clients {
    /// A consumer group with members.
    pub fn group(&self, group: &str) -> Option<&ConsumerGroup> {
        self.consumers.get(group)
    }

    /// All consumer groups with members.
    pub fn groups(&self) -> impl Iterator<Item = (&Arc<str>, &ConsumerGroup)> {
        self.consumers.iter()
    }

    /// Members of groups that subscribe differently now, at most [`CONFLICTS_TOLD_MAX`].
    pub fn conflicts_now(&self) -> Vec<(Arc<str>, Conflict)> {
        let all = self.consumers.iter().flat_map(|(group, members)| {
            let conflicts = members.conflicts().iter();
            conflicts.map(|conflict| (Arc::clone(group), conflict.clone()))
        });
        all.take(CONFLICTS_TOLD_MAX).collect()
    }

    /// Producers of a group.
    pub fn producers_of(&self, group: &str) -> Option<&BTreeMap<ClientLink, Client>> {
        self.producers.get(group)
    }

    /// A producer by its client id.
    pub fn producer(&self, client_id: &str) -> Option<&Client> {
        let link = self.producer_ids.get(client_id)?;
        let group = self.links.get(link)?.producers.first()?;
        self.producers.get(group)?.get(link)
    }

    /// All producer groups.
    pub fn producers(&self) -> impl Iterator<Item = (&Arc<str>, &BTreeMap<ClientLink, Client>)> {
        self.producers.iter()
    }

    /// Registrations kept.
    pub fn registrations(&self) -> usize {
        self.registrations
    }

    /// Connections with at least one registration.
    pub fn connections(&self) -> usize {
        self.links.len()
    }

    fn take_room(&mut self) -> Result<(), Refusal> {
        if self.registrations >= REGISTRATIONS_MAX {
            self.bound_hits += 1;
            return Err(Refusal::error(format!(
                "client not registered: {REGISTRATIONS_MAX} registrations are kept, the limit"
            )));
        }
        self.registrations += 1;
        Ok(())
    }

    /// Registers a producer or renews its registration.
    pub fn register_producer(&mut self, group: &str, client: Client) -> Result<(), Refusal> {
        self.take_producer(group, client.clone())?;
        if self.producer_ids.get(&client.client_id) != Some(&client.link) {
            self.producer_ids.insert(client.client_id, client.link);
        }
        Ok(())
    }

    fn take_producer(&mut self, group: &str, client: Client) -> Result<(), Refusal> {
        if let Some(known) = self
            .producers
            .get_mut(group)
            .and_then(|all| all.get_mut(&client.link))
        {
            *known = client;
            return Ok(());
        }
        self.take_room()?;
        let group: Arc<str> = match self.producers.get_key_value(group) {
            Some((name, _)) => Arc::clone(name),
            None => Arc::from(group),
        };
        self.links
            .entry(client.link)
            .or_default()
            .producers
            .insert(Arc::clone(&group));
        self.producers
            .entry(group)
            .or_default()
            .insert(client.link, client);
        Ok(())
    }

    /// Registers a consumer or renews its registration.
    pub fn register_consumer(
        &mut self,
        group: &str,
        client: Client,
        membership: Membership,
    ) -> Result<GroupChange, Refusal> {
        let is_known = self
            .consumers
            .get(group)
            .is_some_and(|all| all.has(client.link));
        if !is_known {
            self.take_room()?;
        }
        let group: Arc<str> = match self.consumers.get_key_value(group) {
            Some((name, _)) => Arc::clone(name),
            None => Arc::from(group),
        };
        if !is_known {
            self.links
                .entry(client.link)
                .or_default()
                .consumers
                .insert(Arc::clone(&group));
        }
        let members = self
            .consumers
            .entry(Arc::clone(&group))
            .or_insert_with(|| ConsumerGroup::new(&group));
        let change = members.register(client, membership);
        self.conflicts += members.take_new_conflicts();
        Ok(GroupChange {
            group,
            notify: change.notify,
            subscriptions: change.subscriptions,
        })
    }

    /// Takes a producer out of a group.
    pub fn unregister_producer(&mut self, group: &str, link: ClientLink) {
        if let Some(groups) = self.links.get_mut(&link) {
            groups.producers.remove(group);
        }
        self.drop_producer(group, link);
        self.forget_empty_link(link);
    }

    fn drop_producer(&mut self, group: &str, link: ClientLink) {
        let Some(members) = self.producers.get_mut(group) else {
            return;
        };
        let removed = members.remove(&link);
        if members.is_empty() {
            self.producers.remove(group);
        }
        let Some(client) = removed else {
            return;
        };
        self.registrations -= 1;
        let groups = self.links.get(&link);
        let is_last = groups.is_none_or(|groups| groups.producers.is_empty());
        if is_last && self.producer_ids.get(&client.client_id) == Some(&link) {
            self.producer_ids.remove(&client.client_id);
        }
    }

    /// Takes a consumer out of a group.
    pub fn unregister_consumer(&mut self, group: &str, link: ClientLink) -> Option<GroupChange> {
        if let Some(groups) = self.links.get_mut(&link) {
            groups.consumers.remove(group);
        }
        let change = self.drop_consumer(group, link);
        self.forget_empty_link(link);
        change
    }

    fn drop_consumer(&mut self, group: &str, link: ClientLink) -> Option<GroupChange> {
        let (name, _) = self.consumers.get_key_value(group)?;
        let name = Arc::clone(name);
        let members = self.consumers.get_mut(group)?;
        let change = members.remove(link)?;
        self.registrations -= 1;
        if members.is_empty() {
            self.consumers.remove(group);
            let offline = Arc::new(GroupSubscriptions::offline(Arc::clone(&name)));
            return Some(GroupChange {
                group: name,
                notify: false,
                subscriptions: Some(offline),
            });
        }
        Some(GroupChange {
            group: name,
            notify: true,
            subscriptions: change.subscriptions,
        })
    }

    fn forget_empty_link(&mut self, link: ClientLink) {
        let groups = self.links.get(&link);
        if groups.is_some_and(|groups| groups.consumers.is_empty() && groups.producers.is_empty()) {
            self.links.remove(&link);
        }
    }

    /// Takes a connection out of all its groups.
    pub fn remove_link(&mut self, link: ClientLink) -> Vec<GroupChange> {
        let Some(groups) = self.links.remove(&link) else {
            return Vec::new();
        };
        for group in &groups.producers {
            self.drop_producer(group, link);
        }
        groups
            .consumers
            .iter()
            .filter_map(|group| self.drop_consumer(group, link))
            .collect()
    }

    /// Takes out clients that are silent for too long, and old entries of pull-only consumers.
    pub fn expire(&mut self, now_ms: i64) -> Vec<GroupChange> {
        let is_silent = |client: &Client| now_ms - client.seen_ms > CLIENT_SILENCE_MS;
        let mut producers = Vec::new();
        for (group, members) in &self.producers {
            for client in members.values().filter(|client| is_silent(client)) {
                producers.push((Arc::clone(group), client.link));
            }
        }
        let mut consumers = Vec::new();
        for (group, members) in &self.consumers {
            for client in members.clients().filter(|client| is_silent(client)) {
                consumers.push((Arc::clone(group), client.link));
            }
        }
        for (group, link) in producers {
            self.unregister_producer(&group, link);
        }
        self.pull_only
            .retain(|_, seen_ms| now_ms - *seen_ms <= PULL_ONLY_MS);
        consumers
            .iter()
            .filter_map(|(group, link)| self.unregister_consumer(group, *link))
            .collect()
    }

    /// Remembers that a group pulled from a topic without a heartbeat.
    pub fn note_pull_only(&mut self, now_ms: i64, group: &str, topic: &str) {
        let key = (group.to_owned(), topic.to_owned());
        if self.pull_only.len() < PULL_ONLY_MAX || self.pull_only.contains_key(&key) {
            self.pull_only.insert(key, now_ms);
        } else {
            self.bound_hits += 1;
        }
    }

    /// Groups that read a topic: with members that subscribe to it, or pulling from it.
    pub fn groups_reading(&self, topic: &str) -> BTreeSet<String> {
        let subscribed = self
            .consumers
            .iter()
            .filter(|(_, members)| members.reads(topic));
        let mut groups: BTreeSet<String> = subscribed.map(|(group, _)| group.to_string()).collect();
        let pulling = self.pull_only.keys().filter(|(_, pulled)| pulled == topic);
        groups.extend(pulling.map(|(group, _)| group.clone()));
        groups
    }
}

impl Client {
    /// A client as a request shows it.
    pub fn new(
        now_ms: i64,
        origin: Origin,
        header: &wire::header::Header<'_>,
        client_id: String,
    ) -> Self {
        Self {
            link: origin.link,
            peer: origin.peer,
            client_id,
            language: header.language,
            version: header.version,
            serialization: header.serialization,
            seen_ms: now_ms,
        }
    }
}
