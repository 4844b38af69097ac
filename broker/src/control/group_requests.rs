//! Owns the requests about consumer groups: create, change, delete, list, forbid.
//!
//! Invariant: a list of groups is taken whole or not at all.

use wire::body::{GroupForbiddenBody, SubscriptionGroupConfig, SubscriptionGroupList};
use wire::requests::{AllGroupConfig, DeleteGroup, GroupForbidden, GroupName};

use super::answer::{Answer, Call, Field, Outcome, Refusal, need, now};
use super::changes::Changes;
use super::effects::Effect;
use super::groups::check_numbers;
use super::topic_requests::{LIST_ENTRIES_MAX, page};
use super::{Control, names};

/// The one attribute groups can have.
const PRIORITY_FACTOR: &str = "priority.factor";

impl Control {
    /// Code 200.
    pub(super) fn update_group(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let config: SubscriptionGroupConfig = call.json()?;
        self.update_groups(call.now_ms, vec![config], effects)
    }

    /// Code 225.
    pub(super) fn update_group_list(
        &mut self,
        call: &Call<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let list: SubscriptionGroupList = call.json()?;
        if list.group_config_list.len() > LIST_ENTRIES_MAX {
            return Err(Refusal::parameter(format!(
                "groupConfigList has {} groups, at most {LIST_ENTRIES_MAX} in one request",
                list.group_config_list.len()
            )));
        }
        self.update_groups(call.now_ms, list.group_config_list, effects)
    }

    fn update_groups(
        &mut self,
        now_ms: i64,
        configs: Vec<SubscriptionGroupConfig>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let mut checked = Vec::with_capacity(configs.len());
        for mut config in configs {
            names::check_group(&config.group_name)?;
            check_numbers(&config)?;
            self.groups.check_room(&config.group_name)?;
            config.attributes = altered_attributes(&config, self.groups.get(&config.group_name))?;
            checked.push(config);
        }
        let mut changes = Changes::default();
        let mut outcome = now(Answer::done());
        for config in checked {
            if let Err(refusal) = self.put_group(config, &mut changes) {
                outcome = Err(refusal);
                break;
            }
        }
        self.publish(now_ms, changes, effects)?;
        outcome
    }

    /// Code 207. Clients of 4.x say `removeOffset` for `cleanOffset`.
    pub(super) fn delete_group(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let asked = DeleteGroup::decode(&call.header.ext)?;
        let group = need("groupName", Some(&asked.group_name))?;
        let offsets = match asked.clean_offset {
            Some(clean) => clean,
            None => call.header.ext.bool("removeOffset")?.unwrap_or(false),
        };
        let mut changes = Changes::default();
        match self.groups.remove(group) {
            Some(name) => changes.removed_groups.push((name, offsets)),
            // Offsets may outlive their group's settings.
            None if offsets => {
                effects.push(Effect::GroupRemoved {
                    group: group.into(),
                    offsets,
                });
            }
            None => {}
        }
        self.stats.forget_group(group);
        tracing::info!(group, offsets, "consumer group deleted");
        self.publish(call.now_ms, changes, effects)?;
        now(Answer::done())
    }

    /// Code 201.
    pub(super) fn all_groups(&self, call: &Call<'_>) -> Outcome {
        let asked = AllGroupConfig::decode(&call.header.ext)?;
        let total = self.groups.count();
        let (first, count) = page(asked.group_seq, asked.max_group_num, total);
        let body = self.groups.page(first, count)?;
        now(Answer::body(body).with("totalGroupNum", Field::Int(total as i64)))
    }

    /// Code 352.
    pub(super) fn group_config(&self, call: &Call<'_>) -> Outcome {
        let asked = GroupName::decode(&call.header.ext)?;
        match self.groups.get(&asked.group) {
            Some(config) => now(Answer::json(&**config)?),
            None => Err(Refusal::no_group(&asked.group)),
        }
    }

    /// Code 353.
    pub(super) fn group_forbidden(
        &mut self,
        call: &Call<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked = GroupForbidden::decode(&call.header.ext)?;
        let (group, topic) = (asked.group.into_owned(), asked.topic.into_owned());
        if let Some(is_readable) = asked.readable {
            names::check_group(&group)?;
            names::check_topic(&topic)?;
            if !self.groups.has(&group) {
                return Err(Refusal::no_group(&group));
            }
            if self.groups.is_readable(&group, &topic) != is_readable {
                self.groups.set_readable(&group, &topic, is_readable);
                let changes = Changes {
                    has_other_group_change: true,
                    ..Changes::default()
                };
                self.publish(call.now_ms, changes, effects)?;
                effects.push(self.forbidden_effect(&group));
            }
        }
        let readable = self.groups.is_readable(&group, &topic);
        now(Answer::json(&GroupForbiddenBody {
            group,
            readable,
            topic,
        })?)
    }
}

/// Attributes of a group travel as changes (`+key`, `-key`), or as they are from older tools.
fn altered_attributes(
    config: &SubscriptionGroupConfig,
    current: Option<&std::sync::Arc<SubscriptionGroupConfig>>,
) -> Result<std::collections::BTreeMap<String, String>, Refusal> {
    let mut altered = current
        .map(|current| current.attributes.clone())
        .unwrap_or_default();
    for (signed_key, value) in &config.attributes {
        let key = signed_key.trim_start_matches(['+', '-']);
        if key != PRIORITY_FACTOR {
            return Err(Refusal::parameter(format!(
                "attribute '{key}' of group {} is unknown; known is {PRIORITY_FACTOR}",
                config.group_name
            )));
        }
        if signed_key.starts_with('-') {
            altered.remove(key);
        } else {
            altered.insert(key.to_owned(), value.clone());
        }
    }
    Ok(altered)
}
