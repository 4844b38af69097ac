//! Collects what is known of a message: ordinary requests to name server and brokers, and the one
//! of Pinion's own.
//!
//! Invariant: it only asks. A broker that does not answer is named in the facts and stops nothing;
//! a broker that is not Pinion leaves out what only Pinion tells.

use std::collections::BTreeSet;

use thiserror::Error;
use wire::body::{ClusterInfo, QueryConsumeQueueBody, TopicRouteData};
use wire::codes::{private, request, response};
use wire::message::{RecordView, ids, peek_len, properties};

use super::about_group;
use super::ask::{AskError, Servers, Told};
use super::facts::{Asked, Copy, Facts, Missing, QueueFacts};
use super::topics::{self, WAITING_TOPICS};
use crate::cli::args::ExplainArgs;

/// Copies of one message that are looked at.
const COPIES_MAX: usize = 64;
/// Records asked of one key.
const KEYS_ASKED: &str = "32";

/// Why nothing can be explained.
#[derive(Error, Debug)]
pub enum ExplainError {
    /// No name server, or a broker that had to answer did not.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The name server says nothing usable.
    #[error("name server {address} refuses to tell its brokers (code {code}): {remark}")]
    Refused {
        /// Its address.
        address: String,
        /// The code.
        code: i32,
        /// What it said.
        remark: String,
    },
    /// The topic is needed.
    #[error("{id} is a unique key, or the id of a broker that is gone; name the topic, too (-t)")]
    NeedsTopic {
        /// The id.
        id: String,
    },
    /// The broker is needed.
    #[error("queue {queue} of topic {topic} is on {brokers}; name one of them (--broker)")]
    NeedsBroker {
        /// The queue.
        queue: i32,
        /// The topic.
        topic: String,
        /// Where it is.
        brokers: String,
    },
    /// The broker is not there.
    #[error("the name server knows no broker {broker} with the topic; it knows {known}")]
    NoSuchBroker {
        /// What was asked for.
        broker: String,
        /// What there is.
        known: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Broker {
    pub(super) name: String,
    pub(super) address: String,
    /// Queues of the topic that are read.
    queues: i32,
}

pub(super) struct Gather<'a> {
    args: &'a ExplainArgs,
    servers: Servers,
    namesrv: String,
    /// Brokers of the topic; all where no topic is known.
    brokers: Vec<Broker>,
    all_brokers: Vec<Broker>,
    pub(super) facts: Facts,
}

/// Gathers everything about what the command line names.
pub fn gather(args: &ExplainArgs) -> Result<Facts, ExplainError> {
    let mut gather = Gather {
        args,
        servers: Servers::default(),
        namesrv: String::new(),
        brokers: Vec::new(),
        all_brokers: Vec::new(),
        facts: Facts {
            asked: Asked {
                what: what(args),
                topic: args.topic.clone(),
                group: args.group.clone(),
            },
            now_ms: topics::clock_ms(),
            ..Facts::default()
        },
    };
    gather.cluster()?;
    gather.route()?;
    gather.find()?;
    gather.explain_copies();
    about_group::add(&mut gather);
    Ok(gather.facts)
}

fn what(args: &ExplainArgs) -> String {
    match (&args.id, &args.key, args.queue, args.offset) {
        (Some(id), ..) => format!("id {id}"),
        (_, Some(key), ..) => format!("key {key}"),
        (_, _, Some(queue), Some(offset)) => format!("queue {queue}, offset {offset}"),
        _ => String::new(),
    }
}

fn names(brokers: &[Broker]) -> String {
    let names: Vec<&str> = brokers.iter().map(|broker| &*broker.name).collect();
    names.join(", ")
}

impl Gather<'_> {
    /// Asks a broker; one that does not answer is noted.
    pub(super) fn ask(
        &mut self,
        broker: &Broker,
        code: i32,
        fields: &[(&str, &str)],
    ) -> Option<Told> {
        match self.servers.ask(&broker.address, code, fields) {
            Ok(told) => Some(told),
            Err(error) => {
                let text = format!("broker {}: {error}", broker.name);
                if !self.facts.silent.contains(&text) {
                    self.facts.silent.push(text);
                }
                None
            }
        }
    }

    pub(super) fn broker_of(&self, copy: &Copy) -> Broker {
        Broker {
            name: copy.broker.clone(),
            address: copy.address.clone(),
            queues: 0,
        }
    }

    pub(super) fn topic_brokers(&self) -> Vec<Broker> {
        self.brokers.clone()
    }

    /// The brokers that the first name server to answer knows.
    fn cluster(&mut self) -> Result<(), ExplainError> {
        let mut failed = None;
        for address in self.args.namesrv.split(';').map(str::trim) {
            let code = request::GET_BROKER_CLUSTER_INFO;
            let told = match self.servers.ask(address, code, &[]) {
                Ok(told) => told,
                Err(error) => {
                    failed = Some(error);
                    continue;
                }
            };
            let Some(cluster) = told.json::<ClusterInfo>() else {
                return Err(ExplainError::Refused {
                    address: address.to_owned(),
                    code: told.code,
                    remark: told.remark,
                });
            };
            self.namesrv = address.to_owned();
            let brokers = cluster.broker_addr_table.iter();
            let masters = brokers.filter_map(|(name, data)| {
                let address = data.broker_addrs.values().next()?.clone();
                let name = name.clone();
                Some(Broker {
                    name,
                    address,
                    queues: 0,
                })
            });
            self.all_brokers = masters.collect();
            self.brokers = self.all_brokers.clone();
            return Ok(());
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Narrows the brokers to those of the topic.
    fn route(&mut self) -> Result<(), ExplainError> {
        let Some(topic) = self.facts.asked.topic.clone() else {
            return Ok(());
        };
        let fields = [("topic", &*topic), ("acceptStandardJsonOnly", "true")];
        let code = request::GET_ROUTEINFO_BY_TOPIC;
        let told = self.servers.ask(&self.namesrv, code, &fields)?;
        if told.code == response::TOPIC_NOT_EXIST {
            self.facts.missing = Missing::NoTopic;
            return Ok(());
        }
        let route = told.json::<TopicRouteData>().unwrap_or_default();
        let queues_of = |name: &str| {
            let queues = route.queue_datas.iter();
            let mut queues = queues.filter(|queue| queue.broker_name == name);
            queues
                .next()
                .map_or(0, |queue| queue.read_queue_nums.max(queue.write_queue_nums))
        };
        let brokers = route.broker_datas.iter().filter_map(|data| {
            Some(Broker {
                name: data.broker_name.clone(),
                address: data.broker_addrs.values().next()?.clone(),
                queues: queues_of(&data.broker_name),
            })
        });
        self.brokers = brokers.collect();
        self.facts.topic = topic;
        Ok(())
    }

    /// Finds the message and all its copies.
    fn find(&mut self) -> Result<(), ExplainError> {
        let args = self.args;
        if let (Some(queue), Some(offset)) = (args.queue, args.offset) {
            self.find_in_queue(queue, offset)?;
        } else if let Some(key) = &args.key {
            self.find_by_key(key);
        } else if let Some(id) = &args.id {
            self.find_by_id(id)?;
        }
        Ok(())
    }

    fn find_in_queue(&mut self, queue: i32, offset: i64) -> Result<(), ExplainError> {
        if self.facts.missing == Missing::NoTopic {
            return Ok(());
        }
        let known = self.brokers.clone();
        let mut having: Vec<Broker> = known.iter().filter(|b| queue < b.queues).cloned().collect();
        if let Some(name) = &self.args.broker {
            having.retain(|broker| broker.name == *name);
            if having.is_empty() {
                return Err(ExplainError::NoSuchBroker {
                    broker: name.clone(),
                    known: names(&known),
                });
            }
        }
        let broker = match having.as_slice() {
            [] => {
                let queues = known.iter().map(|broker| broker.queues).max();
                let queues = queues.unwrap_or_default();
                self.facts.missing = Missing::NoQueue { queues };
                return Ok(());
            }
            [broker] => broker.clone(),
            several => {
                return Err(ExplainError::NeedsBroker {
                    queue,
                    topic: self.facts.topic.clone(),
                    brokers: names(several),
                });
            }
        };
        let topic = self.facts.topic.clone();
        let (id, at) = (queue.to_string(), offset.to_string());
        let fields = [
            ("topic", &*topic),
            ("queueId", &id),
            ("index", &at),
            ("count", "1"),
        ];
        let told = self.ask(&broker, request::QUERY_CONSUME_QUEUE, &fields);
        let units = told.and_then(|told| told.json::<QueryConsumeQueueBody>());
        let unit = units.as_ref().and_then(|units| units.queue_data.first());
        let base = unit.and_then(|unit| self.view(&broker, unit.physic_offset));
        match base {
            Some(base) => self.take_base(base),
            None => self.no_offset(&broker, queue, offset),
        }
        Ok(())
    }

    fn no_offset(&mut self, broker: &Broker, queue: i32, offset: i64) {
        let (topic, id) = (self.facts.topic.clone(), queue.to_string());
        let group = self.facts.asked.group.clone().unwrap_or_default();
        let mut fields = vec![("topic", &*topic), ("queueId", &*id)];
        let bound = |gather: &mut Self, code| {
            let told = gather.ask(broker, code, &fields);
            told.and_then(|told| told.number("offset")).unwrap_or(-1)
        };
        let min = bound(self, request::GET_MIN_OFFSET);
        let max = bound(self, request::GET_MAX_OFFSET);
        fields.extend([("consumerGroup", &*group), ("setZeroIfNotFound", "false")]);
        let told = self.ask(broker, request::QUERY_CONSUMER_OFFSET, &fields);
        let committed = told.filter(Told::is_granted);
        let committed = committed.and_then(|told| told.number("offset"));
        self.facts.missing = Missing::NoOffset {
            offset,
            min,
            max,
            committed: committed.unwrap_or(-1),
        };
    }

    /// The record at a physical offset of a broker.
    fn view(&mut self, broker: &Broker, physical_offset: i64) -> Option<Copy> {
        let offset = physical_offset.to_string();
        let fields = [("offset", &*offset)];
        let told = self.ask(broker, request::VIEW_MESSAGE_BY_ID, &fields)?;
        let view = RecordView::parse(&told.body).ok()?;
        let copy = Copy::of(&view, &broker.name, &broker.address);
        (told.is_granted() && copy.physical_offset == physical_offset).then_some(copy)
    }

    fn find_by_id(&mut self, id: &str) -> Result<(), ExplainError> {
        let id = id.trim();
        let place = ids::parse_offset_msg_id(id).ok();
        let place = place.filter(|(host, at)| host.port() != 0 && *at >= 0);
        if let Some((host, at)) = place {
            let host = host.to_string();
            let mut brokers = self.all_brokers.iter();
            if let Some(broker) = brokers.find(|broker| broker.address == host).cloned() {
                match self.view(&broker, at) {
                    Some(base) => self.take_base(base),
                    None => self.no_place(&broker, at),
                }
                return Ok(());
            }
            if self.facts.asked.topic.is_none() {
                self.facts.missing = Missing::NoBroker { address: host };
                return Ok(());
            }
        }
        if self.facts.asked.topic.is_none() {
            return Err(ExplainError::NeedsTopic { id: id.to_owned() });
        }
        self.facts.key_made_ms = topics::made_ms(id, self.facts.now_ms);
        self.find_copies(id, true);
        Ok(())
    }

    fn no_place(&mut self, broker: &Broker, offset: i64) {
        let at = offset.to_string();
        let told = self.ask(broker, private::EXPLAIN, &[("physicalOffset", &at)]);
        let facts = told.and_then(|told| told.json::<QueueFacts>());
        self.facts.missing = Missing::NoPlace {
            offset,
            min: facts.as_ref().map_or(-1, |facts| facts.log_min_offset),
            max: facts.as_ref().map_or(-1, |facts| facts.log_max_offset),
        };
    }

    fn find_by_key(&mut self, key: &str) {
        self.find_copies(key, false);
        // Of several messages with the key the newest is explained, with all its own copies.
        let unique = |copy: &Copy| copy.property(properties::UNIQ_KEY).map(str::to_owned);
        let Some(newest) = self.facts.copies.iter().rev().find_map(unique) else {
            return;
        };
        let all: BTreeSet<String> = self.facts.copies.iter().filter_map(unique).collect();
        self.facts.others = all.into_iter().filter(|id| *id != newest).collect();
        self.facts.copies.clear();
        self.find_copies(&newest, true);
    }

    /// Takes a record that was found by its place, and looks for its other copies.
    fn take_base(&mut self, base: Copy) {
        if self.facts.topic.is_empty() {
            self.facts.topic = topics::own_topic(&base, self.args.group.as_deref());
        }
        if let Some(unique) = base.property(properties::UNIQ_KEY).map(str::to_owned) {
            self.find_copies(&unique, true);
        }
        // Another message of the topic with the same unique key is not the one that was named.
        let own = self.facts.topic.clone();
        let is_named = base.topic == own;
        self.facts
            .copies
            .retain(|copy| !(same_place(copy, &base) || is_named && copy.topic == own));
        self.facts.copies.push(base);
        sort(&mut self.facts.copies);
    }

    /// Looks for records with a key in the topic, in those that messages wait in, and in those that
    /// the group gets messages again from.
    fn find_copies(&mut self, key: &str, unique: bool) {
        let own = self.facts.topic.clone();
        let own = if own.is_empty() {
            self.facts.asked.topic.clone().unwrap_or_default()
        } else {
            own
        };
        self.facts.topic = own.clone();
        let group = self.args.group.clone();
        let mut searched = vec![own.clone()];
        searched.extend(WAITING_TOPICS.map(str::to_owned));
        searched.extend(topics::of_group(&own, group.as_deref()));
        for broker in self.brokers.clone() {
            for topic in &searched {
                self.query(&broker, topic, key, unique);
            }
        }
        let is_own = |copy: &Copy| topics::belongs(copy, &own, group.as_deref());
        self.facts.copies.retain(is_own);
        sort(&mut self.facts.copies);
        let surplus = self.facts.copies.len().saturating_sub(COPIES_MAX);
        self.facts.copies.drain(..surplus);
    }

    fn query(&mut self, broker: &Broker, topic: &str, key: &str, unique: bool) {
        let end = i64::MAX.to_string();
        let mut fields = vec![
            ("topic", topic),
            ("key", key),
            ("maxNum", KEYS_ASKED),
            ("beginTimestamp", "0"),
            ("endTimestamp", &*end),
        ];
        if unique {
            fields.push(("_UNIQUE_KEY_QUERY", "true"));
        }
        let Some(told) = self.ask(broker, request::QUERY_MESSAGE, &fields) else {
            return;
        };
        if !told.is_granted() {
            return;
        }
        let mut rest = &*told.body;
        while let Some((size, _)) = peek_len(rest) {
            let Some((record, behind)) = rest.split_at_checked(size as usize) else {
                return;
            };
            rest = behind;
            let Ok(view) = RecordView::parse(record) else {
                continue;
            };
            let copy = Copy::of(&view, &broker.name, &broker.address);
            if !self
                .facts
                .copies
                .iter()
                .any(|other| same_place(other, &copy))
            {
                self.facts.copies.push(copy);
            }
        }
    }

    /// Has each copy's shard tell how the group stands to it.
    fn explain_copies(&mut self) {
        let group = self.args.group.clone().unwrap_or_default();
        for at in 0..self.facts.copies.len() {
            let Some(copy) = self.facts.copies.get(at).cloned() else {
                return;
            };
            let broker = self.broker_of(&copy);
            let (queue, offset) = (copy.queue_id.to_string(), copy.queue_offset.to_string());
            let place = copy.physical_offset.to_string();
            let fields = [
                ("topic", &*copy.topic),
                ("queueId", &queue),
                ("queueOffset", &offset),
                ("physicalOffset", &place),
                ("consumerGroup", &group),
            ];
            let told = self.ask(&broker, private::EXPLAIN, &fields);
            let queue = told.and_then(|told| told.json::<QueueFacts>());
            if let Some(queue) = &queue {
                self.facts.now_ms = queue.now_ms;
            }
            if let Some(copy) = self.facts.copies.get_mut(at) {
                copy.queue = queue;
            }
        }
    }
}

fn same_place(a: &Copy, b: &Copy) -> bool {
    (&a.broker, a.physical_offset) == (&b.broker, b.physical_offset)
}

fn sort(copies: &mut [Copy]) {
    copies.sort_by_key(|copy| (copy.store_ms, copy.physical_offset));
}
