//! Owns one function per request code: from header fields and body to an answer.
//!
//! Invariant: a request that is refused changes nothing.

use std::fmt::Display;
use std::net::SocketAddr;

use wire::codes::response;
use wire::header::{Ext, FieldError, Header};
use wire::requests::{
    BrokerHeartbeat, BrokerIdentity, DeleteTopicInNameServer, KvEntry, KvNamespace, MemberGroup,
    RegisterBroker, RegisterTopic, RouteOf, TopicsByCluster, WritePerm,
};

use super::answers::{self, Spelling};
use super::registration::{
    read_data_version, read_queue_lists, read_registration, with_table_kind,
};
use super::routes::{BrokerRegistration, Refusal, Registered};
use super::{Answer, ConfigError, ExtText, NameServer, offer};

/// Namespace of the queue order that `updateOrderConf` writes.
const ORDER_NAMESPACE: &str = "ORDER_TOPIC_CONFIG";
/// Time between two lines about registrations that were refused, in milliseconds.
const REFUSAL_LOG_MS: i64 = 1_000;
/// First version whose clients read standard JSON (4.9.4).
const STANDARD_JSON_VERSION: i32 = 401;

/// Result of a handler; a header field that is missing or malformed is refused in one place.
type Outcome = Result<Answer, FieldError>;

/// Flag of a topic that lives in one unit.
pub(super) fn is_unit(flags: i32) -> bool {
    flags & 1 != 0
}

/// Flag of a topic that is subscribed to from units.
pub(super) fn has_unit_subscription(flags: i32) -> bool {
    flags & 2 != 0
}

fn disabled() -> Answer {
    Answer::error(response::SYSTEM_ERROR, "disable")
}

impl NameServer {
    pub(super) fn route_of(&self, now_ms: i64, version: i32, ext: &Ext<'_>) -> Outcome {
        let header = RouteOf::decode(ext)?;
        if self.config.need_wait_for_service {
            let seconds = i64::try_from(self.config.wait_seconds_for_service).unwrap_or(i64::MAX);
            let ready_ms = self
                .started_ms
                .saturating_add(seconds.saturating_mul(1_000));
            if now_ms < ready_ms {
                return Ok(Answer::error(
                    response::SYSTEM_ERROR,
                    "name server not ready",
                ));
            }
        }
        let topic = &*header.topic;
        let Some(mut route) = self.table.route(topic, self.config.support_acting_master) else {
            return Ok(Answer::error(
                response::TOPIC_NOT_EXIST,
                format!(
                    "No topic route info in name server for the topic: {topic}. No live broker has \
                     registered it: create the topic, or check that its broker is up and lists \
                     this name server in namesrvAddr"
                ),
            ));
        };
        let standard = version >= STANDARD_JSON_VERSION
            || header.accept_standard_json_only.unwrap_or_default();
        let mut spelling = if standard {
            Spelling::Standard
        } else {
            Spelling::Bare
        };
        let zone_name = header.zone_name.as_deref().unwrap_or_default().trim();
        if header.zone_mode.unwrap_or_default() && !zone_name.is_empty() {
            answers::keep_zone(&mut route, zone_name);
            // Zone-aware clients expect the rewritten body, which has always been in this form.
            spelling = Spelling::Bare;
        }
        let order = self
            .config
            .order_message_enable
            .then(|| self.kv.get(ORDER_NAMESPACE, topic));
        Ok(Answer::body(answers::route_body(
            &route,
            order.flatten(),
            spelling,
        )))
    }

    pub(super) fn register_broker(
        &mut self,
        now_ms: i64,
        connection: u64,
        peer: SocketAddr,
        request: &Header<'_>,
        body: &[u8],
    ) -> Outcome {
        let header = RegisterBroker::decode(&request.ext)?;
        let registration = match read_registration(&header, request.version, body) {
            Ok(registration) => with_table_kind(registration, &request.ext),
            Err(error) => {
                self.tell_refusal(now_ms, peer, &header.broker_name, &error);
                return Ok(Answer::refused(error));
            }
        };
        match self.register(now_ms, Some(connection), &registration) {
            Ok(registered) => {
                let mut answer = Answer::success();
                if self.config.return_order_topic_config_to_broker
                    && let Some(order) = self.kv.namespace(ORDER_NAMESPACE)
                {
                    answer.body = answers::kv_table_body(order);
                }
                if !registered.master_address.is_empty() {
                    answer = answer
                        .with("haServerAddr", ExtText::Text(registered.ha_server_address))
                        .with("masterAddr", ExtText::Text(registered.master_address));
                }
                let (cluster, name) = (&registration.cluster_name, &registration.broker_name);
                self.take_report(now_ms, &request.ext, name, registration.broker_id);
                Ok(self.with_offers(now_ms, answer, &request.ext, cluster, name))
            }
            Err(error) => {
                self.tell_refusal(now_ms, peer, &registration.broker_name, &error);
                Ok(Answer::refused(error))
            }
        }
    }

    /// Says that a registration was refused, at most once a second whoever goes on trying.
    fn tell_refusal(&mut self, now_ms: i64, peer: SocketAddr, broker: &str, error: &dyn Display) {
        self.refusals += 1;
        if now_ms >= self.refusal_said_ms.saturating_add(REFUSAL_LOG_MS) {
            self.refusal_said_ms = now_ms;
            let times = self.refusals;
            tracing::warn!(%peer, broker, %error, times, "registration refused");
        }
    }

    pub(super) fn register(
        &mut self,
        now_ms: i64,
        connection: Option<u64>,
        registration: &BrokerRegistration,
    ) -> Result<Registered, Refusal> {
        let whole = self.table.is_whole(registration);
        let known = self.table.knows(registration);
        let registered = self.table.register(now_ms, connection, registration)?;
        if self.config.delete_topic_with_broker_registration {
            self.table.drop_missing_topics(whole, registration);
        }
        if !known {
            tracing::info!(
                broker = registration.broker_name,
                id = registration.broker_id,
                address = registration.broker_address,
                cluster = registration.cluster_name,
                topics = registration.topics.len(),
                "broker registered"
            );
        }
        Ok(registered)
    }

    pub(super) fn unregister_broker(&mut self, ext: &Ext<'_>) -> Outcome {
        let header = BrokerIdentity::decode(ext)?;
        tracing::info!(
            broker = &*header.broker_name,
            address = &*header.broker_addr,
            "broker left: it unregistered"
        );
        self.table.unregister(
            &header.cluster_name,
            &header.broker_name,
            &header.broker_addr,
        );
        Ok(Answer::success())
    }

    pub(super) fn broker_heartbeat(&mut self, now_ms: i64, ext: &Ext<'_>) -> Outcome {
        let header = BrokerHeartbeat::decode(ext)?;
        self.table
            .seen(now_ms, &header.cluster_name, &header.broker_addr);
        let (cluster, name) = (&header.cluster_name, &header.broker_name);
        self.take_report(now_ms, ext, name, header.broker_id.unwrap_or_default());
        Ok(self.with_offers(now_ms, Answer::success(), ext, cluster, name))
    }

    /// Adds what the asking broker lacks. The field itself, even without content, tells the broker
    /// that this name server knows offers.
    fn with_offers(
        &mut self,
        now_ms: i64,
        answer: Answer,
        ext: &Ext<'_>,
        cluster_name: &str,
        broker_name: &str,
    ) -> Answer {
        let asks = matches!(ext.bool(offer::ASK_FIELD), Ok(Some(true)));
        let is_ours = asks || ext.get(offer::TABLE_FIELD).is_some();
        if !is_ours && ext.get(offer::DISK_FIELD).is_none() {
            return answer;
        }
        let peers = self.peers_of(now_ms, cluster_name, broker_name);
        let answer = answer.with(offer::PEERS_FIELD, ExtText::Number(peers));
        let mut text = String::new();
        if asks {
            // Changes may come one upon another; only what was begun is carried on with them.
            let begins = ext.str(offer::TABLE_FIELD).as_deref() != Some(offer::TABLE_PART);
            for offer in self.table.offers_for(cluster_name, broker_name, begins) {
                offer.write(&mut text);
            }
        }
        answer.with(offer::OFFER_FIELD, ExtText::Text(text))
    }

    pub(super) fn query_data_version(
        &mut self,
        now_ms: i64,
        ext: &Ext<'_>,
        body: &[u8],
    ) -> Outcome {
        let header = BrokerIdentity::decode(ext)?;
        let version = match read_data_version(body) {
            Ok(version) => version,
            Err(error) => return Ok(Answer::refused(error)),
        };
        let (cluster_name, address) = (&*header.cluster_name, &*header.broker_addr);
        self.table.seen(now_ms, cluster_name, address);
        let (changed, held) = self.table.compare_version(cluster_name, address, version);
        let body = held.map(answers::data_version_body).unwrap_or_default();
        Ok(Answer::body(body).with("changed", ExtText::Flag(changed)))
    }

    pub(super) fn register_topic(&mut self, ext: &Ext<'_>, body: &[u8]) -> Outcome {
        let header = RegisterTopic::decode(ext)?;
        let queues = match read_queue_lists(body) {
            Ok(queues) => queues,
            Err(error) => return Ok(Answer::refused(error)),
        };
        Ok(match self.table.register_topic(&header.topic, &queues) {
            Ok(()) => Answer::success(),
            Err(error) => Answer::refused(error),
        })
    }

    pub(super) fn member_group(&self, ext: &Ext<'_>) -> Outcome {
        let header = MemberGroup::decode(ext)?;
        let (cluster_name, broker_name) = (&*header.cluster_name, &*header.broker_name);
        Ok(Answer::body(answers::member_group_body(
            &self.table,
            cluster_name,
            broker_name,
        )))
    }

    pub(super) fn write_permission(&mut self, ext: &Ext<'_>, writeable: bool) -> Outcome {
        let header = WritePerm::decode(ext)?;
        let topics = self
            .table
            .set_write_permission(&header.broker_name, writeable);
        tracing::info!(
            broker = &*header.broker_name,
            writeable,
            topics,
            "write permission set"
        );
        let name = if writeable {
            "addTopicCount"
        } else {
            "wipeTopicCount"
        };
        Ok(Answer::success().with(name, ExtText::Number(topics.into())))
    }

    pub(super) fn all_topics(&self) -> Answer {
        if !self.config.enable_all_topic_list {
            return disabled();
        }
        Answer::body(answers::topic_list_body(None, self.table.topic_names()))
    }

    pub(super) fn delete_topic(&mut self, ext: &Ext<'_>) -> Outcome {
        let header = DeleteTopicInNameServer::decode(ext)?;
        let cluster_name = header
            .cluster_name
            .as_deref()
            .filter(|name| !name.is_empty());
        self.table.delete_topic(&header.topic, cluster_name);
        Ok(Answer::success())
    }

    pub(super) fn topics_by_cluster(&self, ext: &Ext<'_>) -> Outcome {
        let header = TopicsByCluster::decode(ext)?;
        if !self.config.enable_topic_list {
            return Ok(disabled());
        }
        let topics = self.table.topics_of_cluster(&header.cluster);
        Ok(Answer::body(answers::topic_list_body(None, topics)))
    }

    pub(super) fn topics_by_flag(&self, wanted: impl Fn(i32) -> bool) -> Answer {
        if !self.config.enable_topic_list {
            return disabled();
        }
        Answer::body(answers::topic_list_body(
            None,
            self.table.topics_by_flag(wanted),
        ))
    }

    pub(super) fn kv_list(&self, ext: &Ext<'_>) -> Outcome {
        let header = KvNamespace::decode(ext)?;
        let namespace = &*header.namespace;
        Ok(match self.kv.namespace(namespace) {
            Some(table) => Answer::body(answers::kv_table_body(table)),
            None => Answer::error(
                response::QUERY_NOT_FOUND,
                format!("No config item, Namespace: {namespace}"),
            ),
        })
    }

    pub(super) fn kv_get(&self, ext: &Ext<'_>) -> Outcome {
        let header = KvEntry::decode(ext)?;
        let (namespace, key) = (&*header.namespace, &*header.key);
        Ok(match self.kv.get(namespace, key) {
            Some(value) => Answer::success().with("value", ExtText::Text(value.to_owned())),
            None => Answer::error(
                response::QUERY_NOT_FOUND,
                format!("No config item, Namespace: {namespace} Key: {key}"),
            ),
        })
    }

    pub(super) fn kv_put(&mut self, ext: &Ext<'_>) -> Outcome {
        let header = KvEntry::decode(ext)?;
        let value = ext.need_str("value")?;
        Ok(match self.kv.put(&header.namespace, &header.key, &value) {
            Ok(()) => Answer::success(),
            Err(error) => Answer::refused(error),
        })
    }

    pub(super) fn kv_delete(&mut self, ext: &Ext<'_>) -> Outcome {
        let header = KvEntry::decode(ext)?;
        self.kv.delete(&header.namespace, &header.key);
        Ok(Answer::success())
    }

    pub(super) fn update_config(&mut self, body: &[u8]) -> Answer {
        let Ok(text) = std::str::from_utf8(body) else {
            return Answer::refused("properties text is not UTF-8");
        };
        match self.config.update(text) {
            Ok(()) => {
                self.config_changed = true;
                Answer::success()
            }
            Err(error @ ConfigError::BlackListed(_)) => {
                Answer::error(response::NO_PERMISSION, error.to_string())
            }
            Err(error) => Answer::refused(error),
        }
    }
}
