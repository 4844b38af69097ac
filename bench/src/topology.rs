//! Owns where the queues of a plan are.
//!
//! Invariant: queues are numbered through all brokers and topics, and everything else speaks of
//! them by that number.

use wire::codes::request;
use wire::header::ExtValue;

use crate::error::BenchError;
use crate::plan::Plan;
use crate::session::{Session, find_topic};

/// One queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queue {
    /// Its broker, as a number of [`Topology::brokers`].
    pub broker: usize,
    /// Its topic, as a number of [`Topology::topics`].
    pub topic: usize,
    /// Its id in topic and broker.
    pub id: i32,
}

/// All queues.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Topology {
    /// Name and address of each broker.
    pub brokers: Vec<(String, String)>,
    /// Topics.
    pub topics: Vec<String>,
    /// Queues.
    pub queues: Vec<Queue>,
    /// Queues of each broker.
    pub of_broker: Vec<Vec<usize>>,
}

impl Topology {
    /// Finds the topics of a plan, creating those that are nowhere.
    pub fn find(plan: &Plan) -> Result<Self, BenchError> {
        let mut found = Self {
            topics: plan.topic_names(),
            ..Self::default()
        };
        let mut session = Session::connect(&plan.namesrv, plan.headers.serialization())?;
        for (topic, name) in plan.topic_names().iter().enumerate() {
            for queues in find_topic(&mut session, plan, name)? {
                let known = found.brokers.iter().position(|(_, a)| *a == queues.address);
                let broker = known.unwrap_or_else(|| {
                    found.brokers.push((queues.name, queues.address));
                    found.of_broker.push(Vec::new());
                    found.brokers.len() - 1
                });
                for id in 0..queues.write_queues {
                    if let Some(of_broker) = found.of_broker.get_mut(broker) {
                        of_broker.push(found.queues.len());
                    }
                    found.queues.push(Queue { broker, topic, id });
                }
            }
        }
        if found.queues.is_empty() {
            return Err(BenchError::Option("the topics have no queues".to_owned()));
        }
        Ok(found)
    }

    /// Name of a queue's topic.
    pub fn topic_of(&self, queue: Queue) -> &str {
        self.topics.get(queue.topic).map_or("", String::as_str)
    }

    /// Address of a broker.
    pub fn address(&self, broker: usize) -> &str {
        self.brokers
            .get(broker)
            .map_or("", |(_, address)| address.as_str())
    }

    /// First offset (`GET_MIN_OFFSET`) or end (`GET_MAX_OFFSET`) of every queue.
    pub fn offsets(&self, plan: &Plan, code: i32) -> Result<Vec<i64>, BenchError> {
        let mut sessions = Vec::new();
        for (_, address) in &self.brokers {
            sessions.push(Session::connect(address, plan.headers.serialization())?);
        }
        let mut offsets = Vec::new();
        let operation = if code == request::GET_MIN_OFFSET {
            "first offset"
        } else {
            "end of a queue"
        };
        for queue in &self.queues {
            let place = [
                ("topic", ExtValue::Str(self.topic_of(*queue))),
                ("queueId", ExtValue::Int(queue.id.into())),
            ];
            let Some(session) = sessions.get_mut(queue.broker) else {
                continue;
            };
            let answer = session.need(operation, code, &place, &[])?;
            offsets.push(session.number(&answer, "offset")?);
        }
        Ok(offsets)
    }
}
