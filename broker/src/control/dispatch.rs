//! Owns the way of a request to its handler, of reports back to it, and the clock tick.
//!
//! Invariant: a code without a handler is answered, never dropped.

use wire::codes::{private, request};
use wire::header::Header;

use super::Control;
use super::answer::{Answer, Call, Outcome, Refusal, codes, now, reply, with_call};
use super::effects::{Effect, Origin, PendingRequest};
use super::offset_requests::Found;
use crate::core::report::{Report, ReportQuery};

/// Time between two sweeps for silent clients and expired locks, in milliseconds.
pub const SWEEP_INTERVAL_MS: i64 = 10_000;

impl Control {
    /// Handles any request the data path does not own.
    pub fn handle(
        &mut self,
        now_ms: i64,
        origin: &Origin,
        header: &Header<'_>,
        frame_bytes: &[u8],
        body: &[u8],
        effects: &mut Vec<Effect>,
    ) {
        let call = Call {
            now_ms,
            origin: *origin,
            header,
            frame: frame_bytes,
            body,
        };
        let outcome = match header.code {
            16..100 => self.client_request(&call, effects),
            200..=450 => self.table_request(&call, effects),
            _ => self.other_request(&call, effects),
        };
        reply(&call, outcome, effects);
    }

    fn client_request(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        match call.header.code {
            request::UPDATE_AND_CREATE_TOPIC => self.update_topic(call, effects),
            request::UPDATE_AND_CREATE_TOPIC_LIST => self.update_topic_list(call, effects),
            request::GET_ALL_TOPIC_CONFIG => self.all_topics(call),
            request::UPDATE_BROKER_CONFIG => self.update_config(call, effects),
            request::GET_BROKER_CONFIG => self.broker_config(),
            request::GET_BROKER_RUNTIME_INFO => self.runtime_info(call, effects),
            request::HEART_BEAT => self.heartbeat(call, effects),
            request::UNREGISTER_CLIENT => self.unregister(call, effects),
            request::GET_CONSUMER_LIST_BY_GROUP => self.consumer_list(call),
            request::LOCK_BATCH_MQ => self.lock_queues(call),
            request::UNLOCK_BATCH_MQ => self.unlock_queues(call),
            request::GET_ALL_CONSUMER_OFFSET => self.all_offsets(call, effects),
            request::GET_ALL_DELAY_OFFSET => Err(Refusal::error(
                "delayed messages wait with their queues here, there are no offsets by level",
            )),
            request::CHECK_CLIENT_CONFIG => self.check_client_config(call),
            code => unsupported(code),
        }
    }

    fn table_request(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        match call.header.code {
            request::UPDATE_AND_CREATE_SUBSCRIPTIONGROUP => self.update_group(call, effects),
            request::UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST => {
                self.update_group_list(call, effects)
            }
            request::GET_ALL_SUBSCRIPTIONGROUP_CONFIG => self.all_groups(call),
            request::GET_TOPIC_STATS_INFO => self.topic_stats(call, effects),
            request::GET_CONSUMER_CONNECTION_LIST => self.consumer_connections(call),
            request::GET_PRODUCER_CONNECTION_LIST => self.producer_connections(call),
            request::DELETE_SUBSCRIPTIONGROUP => self.delete_group(call, effects),
            request::GET_CONSUME_STATS => self.consume_stats(call, effects),
            request::DELETE_TOPIC_IN_BROKER => self.delete_topic(call, effects),
            request::INVOKE_BROKER_TO_RESET_OFFSET => self.reset_offset(call, effects),
            request::INVOKE_BROKER_TO_GET_CONSUMER_STATUS => self.consumer_status(call, effects),
            request::QUERY_TOPIC_CONSUME_BY_WHO => self.who_consumes(call, effects),
            request::QUERY_CONSUME_TIME_SPAN => self.consume_time_span(call, effects),
            request::GET_SYSTEM_TOPIC_LIST_FROM_BROKER => self.system_topic_list(),
            request::CLEAN_EXPIRED_CONSUMEQUEUE | request::DELETE_EXPIRED_COMMITLOG => {
                self.clean_expired(effects)
            }
            request::GET_CONSUMER_RUNNING_INFO => self.running_info(call, effects),
            request::QUERY_CORRECTION_OFFSET => self.correction_offset(call, effects),
            request::CONSUME_MESSAGE_DIRECTLY => self.consume_directly(call, effects),
            request::SEND_REPLY_MESSAGE | request::SEND_REPLY_MESSAGE_V2 => {
                self.push_reply(call, effects)
            }
            request::CLONE_GROUP_OFFSET => self.clone_offsets(call, effects),
            request::VIEW_BROKER_STATS_DATA => self.view_stats(call, effects),
            // Queues go with their topic here, so that no unused ones are left to clean.
            request::CLEAN_UNUSED_TOPIC => now(Answer::done()),
            request::GET_BROKER_CONSUME_STATS => self.broker_consume_stats(call, effects),
            request::GET_ALL_PRODUCER_INFO => self.all_producers(),
            request::QUERY_TOPICS_BY_CONSUMER => self.topics_of_group(call, effects),
            request::QUERY_SUBSCRIPTION_BY_CONSUMER => self.subscription_of(call),
            request::GET_TOPIC_CONFIG => self.topic_config(call),
            request::GET_SUBSCRIPTIONGROUP_CONFIG => self.group_config(call),
            request::UPDATE_AND_GET_GROUP_FORBIDDEN => self.group_forbidden(call, effects),
            request::QUERY_ASSIGNMENT => self.query_assignment(call),
            request::SET_MESSAGE_REQUEST_MODE => self.set_request_mode(call, effects),
            request::GET_ALL_MESSAGE_REQUEST_MODE => self.all_request_modes(),
            code => unsupported(code),
        }
    }

    fn other_request(&mut self, call: &Call<'_>, _effects: &mut Vec<Effect>) -> Outcome {
        match call.header.code {
            request::GET_BROKER_HA_STATUS => Err(Refusal::error(
                "this broker has no replicas: replication is not set up",
            )),
            private::EXPLAIN => self.explain_lock(call),
            request::RESET_MASTER_FLUSH_OFFSET => now(Answer::done()),
            request::GET_BROKER_EPOCH_CACHE => Err(Refusal::error(
                "this broker keeps no epochs: it does not run under a controller",
            )),
            request::UPDATE_COLD_DATA_FLOW_CTR_CONFIG
            | request::REMOVE_COLD_DATA_FLOW_CTR_CONFIG => Err(Refusal::error(
                "reads of old data have their own buffers here, no group is throttled for them",
            )),
            request::GET_COLD_DATA_FLOW_CTR_INFO => self.cold_data_info(),
            request::SET_COMMITLOG_READ_MODE => self.log_read_mode(call),
            request::AUTH_CREATE_USER..=request::AUTH_LIST_ACL => self.no_auth(),
            code => unsupported(code),
        }
    }

    /// Every core reported.
    pub fn finish(
        &mut self,
        now_ms: i64,
        request: PendingRequest,
        reports: Vec<Report>,
        effects: &mut Vec<Effect>,
    ) {
        with_call(now_ms, &request, |call| {
            let outcome = self.finish_reported(call, &reports, effects);
            reply(call, outcome, effects);
        });
    }

    fn finish_reported(
        &mut self,
        call: &Call<'_>,
        reports: &[Report],
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        match call.header.code {
            request::GET_BROKER_RUNTIME_INFO => self.finish_runtime_info(call, reports),
            request::GET_ALL_CONSUMER_OFFSET => self.finish_all_offsets(reports),
            request::GET_TOPIC_STATS_INFO => self.finish_topic_stats(call, reports),
            request::GET_CONSUME_STATS => self.finish_consume_stats(call, reports),
            request::INVOKE_BROKER_TO_RESET_OFFSET => {
                self.reset_with_committed(call, reports, effects)
            }
            request::QUERY_TOPIC_CONSUME_BY_WHO => self.finish_who_consumes(call, reports),
            request::QUERY_CONSUME_TIME_SPAN => self.finish_consume_time_span(call, reports),
            request::QUERY_CORRECTION_OFFSET => self.finish_correction_offset(call, reports),
            request::CLONE_GROUP_OFFSET => self.finish_clone_offsets(call, reports, effects),
            request::VIEW_BROKER_STATS_DATA => self.finish_view_stats(call, reports),
            request::GET_BROKER_CONSUME_STATS => self.finish_broker_consume_stats(call, reports),
            request::QUERY_TOPICS_BY_CONSUMER => self.finish_topics_of_group(call, reports),
            code => unsupported(code),
        }
    }

    /// The offsets a request asked for were found: queue id, offset, oldest, one past the newest.
    pub fn finish_search(
        &mut self,
        now_ms: i64,
        request: PendingRequest,
        found: Vec<Found>,
        effects: &mut Vec<Effect>,
    ) {
        with_call(now_ms, &request, |call| {
            let outcome = match call.header.code {
                request::INVOKE_BROKER_TO_RESET_OFFSET => self.finish_reset(call, &found, effects),
                code => unsupported(code),
            };
            reply(call, outcome, effects);
        });
    }

    /// The record a request asked for was read, or is not there.
    pub fn finish_record(
        &mut self,
        now_ms: i64,
        request: PendingRequest,
        record: Option<Vec<u8>>,
        effects: &mut Vec<Effect>,
    ) {
        with_call(now_ms, &request, |call| {
            let outcome = match call.header.code {
                request::CONSUME_MESSAGE_DIRECTLY => {
                    self.finish_consume_directly(call, record.as_deref(), effects)
                }
                code => unsupported(code),
            };
            reply(call, outcome, effects);
        });
    }

    /// Takes in the reports of an [`Effect::Sample`].
    pub fn take_sample(&mut self, now_ms: i64, reports: &[Report]) {
        self.stats.record(now_ms, reports);
    }

    /// To be called about every second.
    pub fn tick(&mut self, now_ms: i64, effects: &mut Vec<Effect>) {
        self.relays.expire(now_ms, effects);
        if now_ms - self.last_sweep_ms >= SWEEP_INTERVAL_MS {
            self.last_sweep_ms = now_ms;
            let moved = self.clients.expire(now_ms);
            self.tell_members(moved, effects);
            self.locks.expire(now_ms);
        }
        if self.stats.is_due(now_ms) {
            effects.push(Effect::Sample(ReportQuery {
                store: true,
                ..ReportQuery::default()
            }));
        }
        if self.has_unsaved_topics {
            self.topics.bump(now_ms);
            if let Err(refusal) = self.save_topics(effects) {
                tracing::error!(remark = refusal.remark, "recovered topics not saved");
            }
            effects.push(Effect::Register { topics: Vec::new() });
        }
    }
}

fn unsupported(code: i32) -> Outcome {
    Err(Refusal::new(
        codes::REQUEST_CODE_NOT_SUPPORTED,
        format!(" request type {code} not supported"),
    ))
}
