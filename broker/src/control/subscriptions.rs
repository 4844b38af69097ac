//! Owns what the members of a consumer group subscribe to, as the data path needs it.
//!
//! Invariant: tag codes are recomputed from the tags here and never taken from a client, because
//! some clients send codes that are not Java's hash.

use std::collections::BTreeMap;
use std::sync::Arc;

use wire::body::{ConsumeFromWhere, ConsumeType, EXPRESSION_TAG, MessageModel, SubscriptionData};
use wire::message::filter::{Filter, SQL92};
use wire::message::tags::java_hash;

use super::effects::ClientLink;

/// One subscription of a group to a topic.
#[derive(Clone, Debug, PartialEq)]
pub struct Subscription {
    /// What the client sent.
    pub data: SubscriptionData,
    /// Hash of each tag, sorted; empty means every message.
    pub tag_hashes: Vec<i32>,
    /// What is wrong with the expression, so that nothing can be read by it.
    pub wrong: Option<WrongExpression>,
}

/// What is wrong with an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongExpression {
    /// What and where.
    pub reason: String,
    /// Whether the group read by a right expression before.
    pub had_filter: bool,
}

/// Looks for mistakes in an expression that is not about tags.
pub fn check_expression(data: &SubscriptionData) -> Result<(), String> {
    let (kind, topic) = (&data.expression_type, &data.topic);
    if kind != SQL92 {
        return Err(format!(
            "expression type {kind} for topic {topic} is unknown"
        ));
    }
    match Filter::compile(&data.sub_string) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("topic {topic}: {error}")),
    }
}

impl Subscription {
    /// Takes in what a client sent.
    pub fn new(mut data: SubscriptionData) -> Self {
        let is_tag = data.expression_type == EXPRESSION_TAG;
        let takes_all = matches!(data.sub_string.trim(), "" | "*");
        if is_tag && !takes_all && data.tags_set.is_empty() {
            let tags = data
                .sub_string
                .split("||")
                .map(str::trim)
                .filter(|tag| !tag.is_empty());
            data.tags_set = tags.map(str::to_owned).collect();
        }
        let mut tag_hashes: Vec<i32> = Vec::new();
        data.code_set.clear();
        if is_tag && !takes_all {
            tag_hashes = data.tags_set.iter().map(|tag| java_hash(tag)).collect();
            tag_hashes.sort_unstable();
            tag_hashes.dedup();
            data.code_set = tag_hashes.iter().map(|hash| i64::from(*hash)).collect();
        }
        let wrong = if is_tag {
            None
        } else {
            check_expression(&data).err()
        };
        let wrong = wrong.map(|reason| WrongExpression {
            reason,
            had_filter: false,
        });
        Self {
            data,
            tag_hashes,
            wrong,
        }
    }

    /// Whether there is or was an expression to read by.
    pub fn had_filter(&self) -> bool {
        !self.is_tag() && self.wrong.as_ref().is_none_or(|wrong| wrong.had_filter)
    }

    /// Whether the message with this tag code may be wanted. Only for tag filters.
    pub fn wants_tag(&self, tags_code: i64) -> bool {
        self.tag_hashes.is_empty()
            || i32::try_from(tags_code)
                .is_ok_and(|code| self.tag_hashes.binary_search(&code).is_ok())
    }

    /// Whether messages are chosen by their tags.
    pub fn is_tag(&self) -> bool {
        self.data.expression_type == EXPRESSION_TAG
    }

    /// Whether both ask for the same messages.
    pub fn same_filter(&self, other: &Self) -> bool {
        if self.is_tag() && other.is_tag() {
            return self.tag_hashes == other.tag_hashes;
        }
        self.data.expression_type == other.data.expression_type
            && self.data.sub_string == other.data.sub_string
    }
}

/// Everything the data path needs to know of the members of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSubscriptions {
    /// Group name.
    pub group: Arc<str>,
    /// How members get their messages.
    pub consume_type: ConsumeType,
    /// Whether members share the messages.
    pub message_model: MessageModel,
    /// Where members without an offset begin.
    pub consume_from_where: ConsumeFromWhere,
    /// Subscription of the group to each topic: of several members the newest.
    pub subscriptions: BTreeMap<String, Subscription>,
    /// Subscriptions of single members that differ from the group's, so that each member can be
    /// served by its own filter. Empty unless members disagree.
    pub own: BTreeMap<ClientLink, BTreeMap<String, Subscription>>,
    /// Whether any member is connected.
    pub online: bool,
}

impl GroupSubscriptions {
    /// A group without members.
    pub fn offline(group: Arc<str>) -> Self {
        Self {
            group,
            consume_type: ConsumeType::default(),
            message_model: MessageModel::default(),
            consume_from_where: ConsumeFromWhere::default(),
            subscriptions: BTreeMap::new(),
            own: BTreeMap::new(),
            online: false,
        }
    }

    /// Whether every member gets every message.
    pub fn is_broadcast(&self) -> bool {
        self.message_model == MessageModel::Broadcasting
    }

    /// The subscription that counts for a member.
    pub fn of(&self, link: ClientLink, topic: &str) -> Option<&Subscription> {
        let own = self.own.get(&link).and_then(|own| own.get(topic));
        own.or_else(|| self.subscriptions.get(topic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subscription(text: &str, tags: &[&str], codes: &[i64]) -> Subscription {
        Subscription::new(SubscriptionData {
            topic: "T".into(),
            sub_string: text.into(),
            tags_set: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            code_set: codes.to_vec(),
            ..SubscriptionData::default()
        })
    }

    #[test]
    fn tag_codes_are_recomputed_whatever_the_client_sent() {
        let wrong = subscription("A", &["A"], &[1059]);
        assert_eq!(wrong.tag_hashes, [65]);
        assert!(wrong.wants_tag(65) && !wrong.wants_tag(1059) && !wrong.wants_tag(0));
    }

    #[test]
    fn tags_missing_from_the_set_are_read_from_the_expression() {
        let bare = subscription(" TagA ||TagB ", &[], &[]);
        assert!(bare.wants_tag(i64::from(java_hash("TagB"))));
        assert!(!bare.wants_tag(i64::from(java_hash("TagC"))));
    }

    #[test]
    fn a_star_wants_everything() {
        for text in ["*", "", " * "] {
            assert!(subscription(text, &[], &[]).wants_tag(12345));
        }
        assert!(subscription("*", &["*"], &[42]).wants_tag(7));
    }
}
