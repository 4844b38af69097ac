//! Owns one consumer group's members and what they subscribe to together.
//!
//! Invariant: the group's subscriptions are made anew from the members' whenever a member's change,
//! the newest version of each topic counting; a disagreement is named once, not at every heartbeat.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wire::body::{ConsumeFromWhere, ConsumeType, MessageModel};

use super::clients::Client;
use super::effects::ClientLink;
use super::subscriptions::{GroupSubscriptions, Subscription};

/// Most subscriptions of one member.
pub const SUBSCRIPTIONS_PER_MEMBER_MAX: usize = 10_000;

/// What a heartbeat says of a consumer.
#[derive(Clone, Debug)]
pub struct Membership {
    /// How the member gets its messages.
    pub consume_type: ConsumeType,
    /// Whether members share the messages.
    pub message_model: MessageModel,
    /// Where members without an offset begin.
    pub consume_from_where: ConsumeFromWhere,
    /// Subscriptions by topic; `None` = unchanged.
    pub subscriptions: Option<BTreeMap<String, Subscription>>,
}

/// Two members that ask for different messages of one topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// Topic.
    pub topic: String,
    /// One member.
    pub client_a: String,
    /// What it asks for.
    pub expression_a: String,
    /// The other member.
    pub client_b: String,
    /// What that one asks for.
    pub expression_b: String,
}

#[derive(Debug)]
struct Member {
    client: Client,
    subscriptions: BTreeMap<String, Subscription>,
}

/// What a registration or removal changed.
#[derive(Debug, Default)]
pub struct Change {
    /// Members or topics changed.
    pub notify: bool,
    /// New subscriptions, if they changed.
    pub subscriptions: Option<Arc<GroupSubscriptions>>,
}

/// One group with at least one member (or about to have one).
#[derive(Debug)]
pub struct ConsumerGroup {
    members: BTreeMap<ClientLink, Member>,
    current: Arc<GroupSubscriptions>,
    conflicts: BTreeSet<Conflict>,
    new_conflicts: u64,
}

/// A wrong expression is told apart by whether the group had a right one before.
fn note_earlier_filters(
    subscriptions: &mut BTreeMap<String, Subscription>,
    current: &BTreeMap<String, Subscription>,
) {
    for (topic, subscription) in subscriptions {
        if let Some(wrong) = &mut subscription.wrong {
            wrong.had_filter = current.get(topic).is_some_and(Subscription::had_filter);
        }
    }
}

impl ConsumerGroup {
    /// A group without members yet.
    pub fn new(group: &Arc<str>) -> Self {
        Self {
            members: BTreeMap::new(),
            current: Arc::new(GroupSubscriptions::offline(Arc::clone(group))),
            conflicts: BTreeSet::new(),
            new_conflicts: 0,
        }
    }

    /// Whether a connection is a member.
    pub fn has(&self, link: ClientLink) -> bool {
        self.members.contains_key(&link)
    }

    /// Whether nobody is left.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// All members.
    pub fn clients(&self) -> impl Iterator<Item = &Client> {
        self.members.values().map(|member| &member.client)
    }

    /// A member by its client id; of several connections the one heard of last.
    pub fn client(&self, client_id: &str) -> Option<&Client> {
        let named = self
            .clients()
            .filter(|client| client.client_id == client_id);
        named.max_by_key(|client| client.seen_ms)
    }

    /// Ids of the members, sorted, each once.
    pub fn client_ids(&self) -> BTreeSet<&str> {
        self.clients()
            .map(|client| client.client_id.as_str())
            .collect()
    }

    /// What the members subscribe to.
    pub fn subscriptions(&self) -> &Arc<GroupSubscriptions> {
        &self.current
    }

    /// Whether any member subscribes to a topic.
    pub fn reads(&self, topic: &str) -> bool {
        self.current.subscriptions.contains_key(topic)
    }

    /// Disagreements between members now.
    pub fn conflicts(&self) -> &BTreeSet<Conflict> {
        &self.conflicts
    }

    /// How many disagreements came up since this was asked last.
    pub fn take_new_conflicts(&mut self) -> u64 {
        std::mem::take(&mut self.new_conflicts)
    }

    /// Takes in a member or what is new of it.
    pub fn register(&mut self, client: Client, membership: Membership) -> Change {
        let link = client.link;
        let is_new = !self.has(link);
        let member = self.members.entry(link).or_insert_with(|| Member {
            client: client.clone(),
            subscriptions: BTreeMap::new(),
        });
        member.client = client;
        let mut is_changed = is_new;
        if let Some(mut subscriptions) = membership.subscriptions {
            note_earlier_filters(&mut subscriptions, &self.current.subscriptions);
            is_changed |= member.subscriptions != subscriptions;
            member.subscriptions = subscriptions;
        }
        let current = &self.current;
        is_changed |= current.consume_type != membership.consume_type
            || current.message_model != membership.message_model
            || current.consume_from_where != membership.consume_from_where;
        if !is_changed {
            return Change::default();
        }
        let mut next = GroupSubscriptions::offline(Arc::clone(&current.group));
        next.consume_type = membership.consume_type;
        next.message_model = membership.message_model;
        next.consume_from_where = membership.consume_from_where;
        self.renew(next, is_new)
    }

    /// Takes a member out; `None` when it was none.
    pub fn remove(&mut self, link: ClientLink) -> Option<Change> {
        self.members.remove(&link)?;
        let mut next = GroupSubscriptions::offline(Arc::clone(&self.current.group));
        next.consume_type = self.current.consume_type;
        next.message_model = self.current.message_model;
        next.consume_from_where = self.current.consume_from_where;
        Some(self.renew(next, true))
    }

    fn renew(&mut self, mut next: GroupSubscriptions, members_changed: bool) -> Change {
        next.online = !self.members.is_empty();
        next.subscriptions = self.merged();
        self.find_conflicts(&mut next);
        let topics_changed = !next
            .subscriptions
            .keys()
            .eq(self.current.subscriptions.keys());
        let is_changed = next != *self.current;
        if is_changed {
            self.current = Arc::new(next);
        }
        Change {
            notify: members_changed || topics_changed,
            subscriptions: is_changed.then(|| Arc::clone(&self.current)),
        }
    }

    /// The newest subscription to each topic any member reads.
    fn merged(&self) -> BTreeMap<String, Subscription> {
        let mut merged: BTreeMap<String, Subscription> = BTreeMap::new();
        for (topic, subscription) in self
            .members
            .values()
            .flat_map(|member| &member.subscriptions)
        {
            let is_newer = merged
                .get(topic)
                .is_none_or(|known| subscription.data.sub_version > known.data.sub_version);
            if is_newer {
                merged.insert(topic.clone(), subscription.clone());
            }
        }
        merged
    }

    fn find_conflicts(&mut self, next: &mut GroupSubscriptions) {
        let mut conflicts = BTreeSet::new();
        for (topic, subscription) in &next.subscriptions {
            let leader = self.members.values().find(|member| {
                member
                    .subscriptions
                    .get(topic)
                    .is_some_and(|own| own == subscription)
            });
            for (link, member) in &self.members {
                let Some(own) = member.subscriptions.get(topic) else {
                    continue;
                };
                if own.same_filter(subscription) {
                    continue;
                }
                next.own
                    .entry(*link)
                    .or_default()
                    .insert(topic.clone(), own.clone());
                conflicts.insert(Conflict {
                    topic: topic.clone(),
                    client_a: leader
                        .map_or("", |leader| &leader.client.client_id)
                        .to_owned(),
                    expression_a: subscription.data.sub_string.clone(),
                    client_b: member.client.client_id.clone(),
                    expression_b: own.data.sub_string.clone(),
                });
            }
        }
        for conflict in conflicts.difference(&self.conflicts) {
            self.new_conflicts += 1;
            tracing::warn!(
                group = &*next.group,
                topic = conflict.topic,
                client_a = conflict.client_a,
                expression_a = conflict.expression_a,
                client_b = conflict.client_b,
                expression_b = conflict.expression_b,
                "members of one consumer group subscribe differently; each is served by its own \
                 filter, but a message goes to one member only: give all the same subscription"
            );
        }
        self.conflicts = conflicts;
    }
}
