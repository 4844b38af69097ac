//! What a reader wants: tags or SQL92 expressions, from the request or from the group's heartbeats.
//!
//! Invariant: an expression is compiled once for as long as this core reads by it; at most
//! [`FILTERS_MAX`] are kept, those used last.

use std::collections::HashMap;

use shard::select::Wanted;
use wire::body::EXPRESSION_TAG;
use wire::codes::response;
use wire::message::filter::{Filter, SQL92};
use wire::message::sysflag;
use wire::message::tags::java_hash;
use wire::requests::PullRequest;

use super::pull::{PullRefusal, refusal};
use super::state::State;
use crate::control::effects::ClientLink;
use crate::control::subscriptions::Subscription;

/// Compiled expressions a core keeps.
pub const FILTERS_MAX: usize = 4_096;

/// Compiled expressions of one core.
#[derive(Default)]
pub struct FilterCache {
    young: HashMap<Box<str>, Filter>,
    old: HashMap<Box<str>, Filter>,
    /// How often expressions had to make room for others.
    pub dropped: u64,
}

impl FilterCache {
    /// The filter of an expression, compiled if need be; else what is wrong with the expression.
    pub fn get(&mut self, expression: &str) -> Result<Filter, String> {
        if let Some(filter) = self.young.get(expression) {
            return Ok(filter.clone());
        }
        let filter = match self.old.remove(expression) {
            Some(filter) => filter,
            None => Filter::compile(expression).map_err(|error| error.to_string())?,
        };
        if self.young.len() >= FILTERS_MAX / 2 {
            self.dropped += self.old.len() as u64;
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(expression.into(), filter.clone());
        Ok(filter)
    }

    /// Expressions kept now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl State {
    /// What a request that carries its own expression wants (pull, pop); `kind` is its type,
    /// nothing or empty for tags.
    pub(super) fn wanted_by(
        &mut self,
        kind: Option<&str>,
        expression: &str,
    ) -> Result<Wanted, PullRefusal> {
        let kind = kind.filter(|kind| !kind.is_empty());
        let kind = kind.unwrap_or(EXPRESSION_TAG);
        if kind == EXPRESSION_TAG {
            return Ok(codes_of(expression).map_or(Wanted::All, Wanted::Tags));
        }
        if kind != SQL92 {
            let remark = format!("expression type {kind} is unknown; use TAG or {SQL92}");
            return refusal(response::SUBSCRIPTION_PARSE_FAILED, remark);
        }
        if !self.hot.property_filter {
            return filters_are_off();
        }
        match self.filters.get(expression) {
            Ok(filter) => Ok(Wanted::Matching(filter)),
            Err(error) => refusal(response::SUBSCRIPTION_PARSE_FAILED, error),
        }
    }

    /// What a pull wants: by its own subscription if it carries one, else by its group's.
    pub(super) fn wanted(
        &mut self,
        link: ClientLink,
        request: &PullRequest<'_>,
        topic: &str,
        group: &str,
    ) -> Result<Wanted, PullRefusal> {
        if request.sys_flag & sysflag::PULL_SUBSCRIPTION != 0 {
            let kind = request.expression_type.map(|text| text.to_cow());
            let expression = request.subscription.map(|text| text.to_cow());
            return self.wanted_by(kind.as_deref(), &expression.unwrap_or_default());
        }
        let Some(members) = self.directory.subscriptions.get(group).filter(|s| s.online) else {
            let remark = format!("the consumer's group info not exist: {group}");
            return refusal(response::SUBSCRIPTION_NOT_EXIST, remark);
        };
        if members.is_broadcast() {
            let allowed = self.directory.groups.get(group);
            if !allowed.is_none_or(|config| config.consume_broadcast_enable) {
                let remark =
                    format!("the consumer group[{group}] can not consume by broadcast way");
                return refusal(response::NO_PERMISSION, remark);
            }
        }
        let Some(subscription) = members.of(link, topic) else {
            let remark = format!("the consumer's subscription not exist: {group} on {topic}");
            return refusal(response::SUBSCRIPTION_NOT_EXIST, remark);
        };
        if subscription.data.sub_version < request.sub_version {
            let remark = format!("the consumer's subscription not latest: {group} on {topic}");
            return refusal(response::SUBSCRIPTION_NOT_LATEST, remark);
        }
        if subscription.data.class_filter_mode {
            return Ok(Wanted::All);
        }
        if !subscription.is_tag() {
            check_filter(subscription)?;
            if !self.hot.property_filter {
                return filters_are_off();
            }
            return match self.filters.get(&subscription.data.sub_string) {
                Ok(filter) => Ok(Wanted::Matching(filter)),
                Err(error) => refusal(response::FILTER_DATA_NOT_EXIST, error),
            };
        }
        if subscription.tag_hashes.is_empty() {
            return Ok(Wanted::All);
        }
        let hashes = subscription.tag_hashes.iter();
        Ok(Wanted::Tags(hashes.map(|hash| i64::from(*hash)).collect()))
    }
}

fn filters_are_off<T>() -> Result<T, PullRefusal> {
    let remark = "The broker does not support consumer to filter message by SQL92: \
                  enablePropertyFilter is false";
    refusal(response::SYSTEM_ERROR, remark)
}

/// A subscription whose expression is wrong reads nothing. RocketMQ tells whether the group had a
/// right one before.
fn check_filter(subscription: &Subscription) -> Result<(), PullRefusal> {
    let Some(wrong) = &subscription.wrong else {
        return Ok(());
    };
    let (code, what) = if wrong.had_filter {
        (response::FILTER_DATA_NOT_LATEST, "not latest")
    } else {
        (response::FILTER_DATA_NOT_EXIST, "not exist")
    };
    let reason = &wrong.reason;
    refusal(code, format!("the consumer's filter data {what}: {reason}"))
}

/// Tag hashes of a subscription expression; `None` when it takes everything.
#[must_use]
pub fn codes_of(expression: &str) -> Option<Box<[i64]>> {
    let expression = expression.trim();
    if expression.is_empty() || expression == "*" {
        return None;
    }
    let tags = expression
        .split("||")
        .map(str::trim)
        .filter(|tag| !tag.is_empty());
    Some(tags.map(|tag| i64::from(java_hash(tag))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_kept_within_their_bound_and_those_in_use_stay() {
        let mut cache = FilterCache::default();
        for number in 0..3 * FILTERS_MAX {
            assert!(cache.get(&format!("a = {number}")).is_ok());
            assert!(cache.get("used = 'always'").is_ok());
            assert!(cache.len() <= FILTERS_MAX);
        }
        assert!(cache.dropped > 0);
        assert!(
            cache.young.contains_key("used = 'always'")
                || cache.old.contains_key("used = 'always'")
        );
        let wrong = cache.get("a = = 1").unwrap_err();
        assert!(wrong.contains("line 1, column 5"), "{wrong}");
    }
}
