//! Owns what the control task tells `pinion explain`: who has locked a queue.
//!
//! Invariant: asking changes nothing.

use wire::body::MessageQueue;

use super::Control;
use super::answer::{Answer, Call, Outcome, Refusal, now};
use super::locks::LOCK_LIVE_MS;
use crate::explain::facts::LockFacts;

impl Control {
    /// Code 900002 with the field `lock`.
    pub(super) fn explain_lock(&self, call: &Call<'_>) -> Outcome {
        let ext = &call.header.ext;
        let group = ext.need_str("consumerGroup")?;
        let queue = MessageQueue {
            broker_name: self.broker_name().to_owned(),
            queue_id: ext.need_i32("queueId")?,
            topic: ext.need_str("topic")?.into_owned(),
        };
        let owner = self.locks.owner(call.now_ms, &group, &queue);
        let facts = LockFacts {
            owner: owner.map(|(client, _)| client.to_owned()),
            renewed_ms: owner.map_or(0, |(_, renewed_ms)| renewed_ms),
            live_ms: LOCK_LIVE_MS,
        };
        let body = serde_json::to_vec(&facts).map_err(|error| Refusal::error(error.to_string()))?;
        now(Answer::body(body))
    }
}
