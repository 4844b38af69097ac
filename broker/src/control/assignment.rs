//! Owns the division of queues among the members of a group where the broker makes it, and the
//! choice between pull and pop.
//!
//! Invariant: with the same members and queues every member computes the same division, and each
//! queue falls to exactly one member (in pull mode).

use wire::body::{
    MessageModel, MessageQueue, MessageQueueAssignment, MessageRequestMode, QueryAssignmentRequest,
    QueryAssignmentResponse, SetMessageRequestModeBody,
};

use super::answer::{Answer, Call, Outcome, Refusal, codes, now, to_json};
use super::effects::Effect;
use super::start::MODES_FILE;
use super::{Control, names};

/// Most entries of the table of modes.
pub const MODES_MAX: usize = 200_000;

/// The share of member `index` of `members` (sorted) in `queues` (sorted): neighbours together,
/// the first members one more when it does not divide evenly.
pub fn average<T: Clone>(queues: &[T], members: usize, index: usize) -> Vec<T> {
    let members = members.max(1);
    let (each, rest) = (queues.len() / members, queues.len() % members);
    let start = each * index + index.min(rest);
    let count = each + usize::from(index < rest);
    queues.iter().skip(start).take(count).cloned().collect()
}

/// The share when queues are dealt out one by one.
pub fn dealt<T: Clone>(queues: &[T], members: usize, index: usize) -> Vec<T> {
    queues
        .iter()
        .skip(index)
        .step_by(members.max(1))
        .cloned()
        .collect()
}

/// The queues a member pops: with others' shares, so that each queue has several members; -1 stands
/// for all of them.
fn shared(
    queues: &[i32],
    members: usize,
    index: usize,
    share: i32,
    divide: fn(&[i32], usize, usize) -> Vec<i32>,
) -> Vec<i32> {
    let Some(share) = usize::try_from(share).ok().filter(|share| *share > 0) else {
        return vec![-1];
    };
    if share + 1 >= members {
        return vec![-1];
    }
    if members > queues.len() {
        // More members than queues: each gets one all the same.
        let one = queues.get(index % queues.len().max(1));
        return one.copied().into_iter().collect();
    }
    let following = (0..=share).map(|step| (index + step) % members);
    let mut own: Vec<i32> = following
        .flat_map(|member| divide(queues, members, member))
        .collect();
    own.sort_unstable();
    own.dedup();
    own
}

impl Control {
    /// Code 400.
    pub(super) fn query_assignment(&self, call: &Call<'_>) -> Outcome {
        let asked: QueryAssignmentRequest = call.json()?;
        let modes = self.modes.message_request_mode_map.get(&asked.topic);
        let set = modes.and_then(|groups| groups.get(&asked.consumer_group));
        // A retry topic is always pulled; POP has retry topics of its own.
        let is_retry = names::is_retry_topic(&asked.topic);
        let (mode, share) = match set {
            Some(set) if !is_retry => (set.mode, set.pop_share_queue_num),
            _ if is_retry => (MessageRequestMode::Pull, -1),
            _ => (default_mode(&self.config.message_request_mode), -1),
        };
        let queues = self.assigned(&asked, mode, share)?;
        let assignment = |message_queue| MessageQueueAssignment {
            attachments: None,
            message_queue,
            mode,
        };
        let queues = queues.map(|queues| queues.into_iter().map(assignment).collect());
        now(Answer::json(&QueryAssignmentResponse {
            message_queue_assignments: queues,
        })?)
    }

    /// `None`: the client keeps what it has.
    fn assigned(
        &self,
        asked: &QueryAssignmentRequest,
        mode: MessageRequestMode,
        share: i32,
    ) -> Result<Option<Vec<MessageQueue>>, Refusal> {
        let Some(topic) = self.topics.get(&asked.topic) else {
            return Ok(None);
        };
        let queue = |queue_id| MessageQueue {
            broker_name: self.broker_name().to_owned(),
            queue_id,
            topic: asked.topic.clone(),
        };
        let queues: Vec<i32> = (0..topic.config.read_queue_nums).collect();
        if asked.message_model == MessageModel::Broadcasting {
            return Ok(Some(queues.into_iter().map(queue).collect()));
        }
        let Some(members) = self.clients.group(&asked.consumer_group) else {
            return Ok(None);
        };
        let ids: Vec<&str> = members.client_ids().into_iter().collect();
        let Some(index) = ids.iter().position(|id| *id == asked.client_id) else {
            return Ok(Some(Vec::new()));
        };
        let divide: fn(&[i32], usize, usize) -> Vec<i32> = match asked.strategy_name.as_str() {
            "" | "AVG" => average,
            "AVG_BY_CIRCLE" => dealt,
            other => {
                return Err(Refusal::error(format!(
                    "allocation strategy {other} is unknown; known are AVG and AVG_BY_CIRCLE"
                )));
            }
        };
        let own = match mode {
            MessageRequestMode::Pop => shared(&queues, ids.len(), index, share, divide),
            MessageRequestMode::Pull => divide(&queues, ids.len(), index),
        };
        Ok(Some(own.into_iter().map(queue).collect()))
    }

    /// Code 401.
    pub(super) fn set_request_mode(
        &mut self,
        call: &Call<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let asked: SetMessageRequestModeBody = call.json()?;
        if names::is_retry_topic(&asked.topic) {
            return Err(Refusal::new(
                codes::NO_PERMISSION,
                format!("the mode of retry topic {} cannot be set", asked.topic),
            ));
        }
        if !self.topics.has(&asked.topic) {
            return Err(Refusal::no_topic(&asked.topic));
        }
        if !self.groups.has(&asked.consumer_group) {
            return Err(Refusal::no_group(&asked.consumer_group));
        }
        let map = &mut self.modes.message_request_mode_map;
        let entries: usize = map.values().map(std::collections::BTreeMap::len).sum();
        let is_known = map
            .get(&asked.topic)
            .is_some_and(|groups| groups.contains_key(&asked.consumer_group));
        if !is_known && entries >= MODES_MAX {
            return Err(Refusal::error(format!(
                "{MODES_MAX} request modes are set, the limit"
            )));
        }
        let groups = map.entry(asked.topic.clone()).or_default();
        let changed = pulled(&asked);
        groups.insert(asked.consumer_group.clone(), asked);
        effects.push(Effect::Save {
            name: MODES_FILE,
            bytes: to_json(&self.modes)?,
        });
        effects.push(changed);
        now(Answer::done())
    }

    /// What the cores have to know of the saved modes.
    pub(super) fn pulled_effects(&self) -> Vec<Effect> {
        let topics = self.modes.message_request_mode_map.values();
        let sets = topics.flat_map(|groups| groups.values());
        sets.filter(|set| set.mode == MessageRequestMode::Pull)
            .map(pulled)
            .collect()
    }

    /// Code 402.
    pub(super) fn all_request_modes(&self) -> Outcome {
        now(Answer::json(&self.modes)?)
    }
}

/// What the cores hear of a mode.
fn pulled(set: &SetMessageRequestModeBody) -> Effect {
    Effect::PulledChanged {
        group: set.consumer_group.as_str().into(),
        topic: set.topic.as_str().into(),
        pulled: set.mode == MessageRequestMode::Pull,
    }
}

fn default_mode(setting: &crate::config::value::MessageRequestMode) -> MessageRequestMode {
    match setting {
        crate::config::value::MessageRequestMode::Pull => MessageRequestMode::Pull,
        crate::config::value::MessageRequestMode::Pop => MessageRequestMode::Pop,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_falls_to_exactly_one_member() {
        for queues in 0..20 {
            let all: Vec<i32> = (0..queues).collect();
            for members in 1..8 {
                for share in [average::<i32>, dealt::<i32>] {
                    let mut taken: Vec<i32> = (0..members)
                        .flat_map(|index| share(&all, members, index))
                        .collect();
                    taken.sort_unstable();
                    assert_eq!(taken, all, "{queues} queues, {members} members");
                }
            }
        }
    }

    #[test]
    fn members_that_pop_share_the_queues_of_those_behind_them() {
        let all: Vec<i32> = (0..8).collect();
        assert_eq!(shared(&all, 4, 0, -1, average), [-1]);
        assert_eq!(shared(&all, 4, 0, 3, average), [-1], "all share all");
        assert_eq!(shared(&all, 4, 0, 1, average), [0, 1, 2, 3]);
        assert_eq!(shared(&all, 4, 3, 1, average), [0, 1, 6, 7]);
        assert_eq!(shared(&[0, 1], 5, 3, 1, average), [1]);
        assert_eq!(shared(&[], 5, 3, 1, average), [0; 0]);
    }

    #[test]
    fn the_average_division_is_the_one_clients_make() {
        let all: Vec<i32> = (0..8).collect();
        assert_eq!(average(&all, 3, 0), [0, 1, 2]);
        assert_eq!(average(&all, 3, 1), [3, 4, 5]);
        assert_eq!(average(&all, 3, 2), [6, 7]);
        assert_eq!(average(&[0, 1], 3, 2), [0; 0]);
        assert_eq!(dealt(&all, 3, 1), [1, 4, 7]);
    }
}
