//! Owns plain request and answer over a blocking connection: everything that is not measured.
//!
//! Invariant: one request at a time, and an answer with another opaque is skipped; or, for requests
//! written by hand, as many answers are taken as there were requests.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use wire::body::{ClusterInfo, TopicRouteData, from_json};
use wire::codes::{request, response};
use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{ExtValue, decode, encode_request};

use crate::error::BenchError;
use crate::plan::Plan;

const TIMEOUT: Duration = Duration::from_secs(10);
const READ_BYTES: usize = 64 * 1024;
/// How often, and how far apart, a new topic is looked for in the routes.
const ROUTE_TRIES_MAX: u32 = 50;
const ROUTE_TRY_EVERY: Duration = Duration::from_millis(100);
const MASTER_ID: i64 = 0;

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Response code.
    pub code: i32,
    /// Error text, empty if none.
    pub remark: String,
    /// Header fields.
    pub ext: BTreeMap<String, String>,
    /// Body.
    pub body: Vec<u8>,
}

/// A blocking connection.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    address: String,
    serialization: Serialization,
    opaque: i32,
    input: Vec<u8>,
}

impl Session {
    /// Connects.
    pub fn connect(address: &str, serialization: Serialization) -> Result<Self, BenchError> {
        let failed = || format!("connect to {address}");
        let stream = TcpStream::connect_timeout(&resolve(address)?, TIMEOUT)
            .map_err(BenchError::io(failed()))?;
        stream.set_nodelay(true).map_err(BenchError::io(failed()))?;
        stream
            .set_read_timeout(Some(TIMEOUT))
            .map_err(BenchError::io(failed()))?;
        let address = address.to_owned();
        Ok(Self {
            stream,
            address,
            serialization,
            opaque: 0,
            input: Vec::new(),
        })
    }

    /// Sends a request and waits for its answer, whatever its code.
    pub fn call(
        &mut self,
        code: i32,
        ext: &[(&str, ExtValue<'_>)],
        body: &[u8],
    ) -> Result<Answer, BenchError> {
        self.opaque += 1;
        let mut out = Vec::new();
        encode_request(
            &mut out,
            self.serialization,
            code,
            self.opaque,
            false,
            ext,
            body,
        );
        let talking = || format!("request {code} to {}", self.address);
        self.stream
            .write_all(&out)
            .map_err(BenchError::io(talking()))?;
        loop {
            if let Some(answer) = self.take_answer()? {
                return Ok(answer);
            }
            self.read_more()?;
        }
    }

    /// Writes whole requests, whose answers [`Self::take_successes`] takes.
    pub fn write(&mut self, requests: &[u8]) -> Result<(), BenchError> {
        self.stream
            .write_all(requests)
            .map_err(BenchError::io(format!("write to {}", self.address)))
    }

    /// Waits for so many answers; only success with a body will do.
    pub fn take_successes(&mut self, count: usize) -> Result<(), BenchError> {
        let mut left = count;
        loop {
            let mut used = 0;
            while left > 0 {
                let rest = self.input.get(used..).unwrap_or_default();
                let found = split(rest, FRAME_BYTES_MAX)
                    .map_err(|error| BenchError::protocol(&self.address, error))?;
                let Some((frame, consumed)) = found else {
                    break;
                };
                let header =
                    decode(&frame).map_err(|error| BenchError::protocol(&self.address, error))?;
                if header.code != response::SUCCESS || frame.body.is_empty() {
                    let problem = format!("answer {} where a body is due", header.code);
                    return Err(BenchError::protocol(&self.address, problem));
                }
                used += consumed;
                left -= 1;
            }
            self.input.drain(..used);
            if left == 0 {
                return Ok(());
            }
            self.read_more()?;
        }
    }

    fn read_more(&mut self) -> Result<(), BenchError> {
        let mut chunk = [0; READ_BYTES];
        let bytes = self
            .stream
            .read(&mut chunk)
            .map_err(BenchError::io(format!("read from {}", self.address)))?;
        if bytes == 0 {
            return Err(BenchError::protocol(
                &self.address,
                "it closed the connection",
            ));
        }
        self.input
            .extend_from_slice(chunk.get(..bytes).unwrap_or_default());
        Ok(())
    }

    /// Like [`Self::call`], but only success will do.
    pub fn need(
        &mut self,
        operation: &'static str,
        code: i32,
        ext: &[(&str, ExtValue<'_>)],
        body: &[u8],
    ) -> Result<Answer, BenchError> {
        let answer = self.call(code, ext, body)?;
        if answer.code == response::SUCCESS {
            return Ok(answer);
        }
        let (code, remark) = (answer.code, answer.remark);
        Err(BenchError::Answer {
            operation,
            address: self.address.clone(),
            code,
            remark,
        })
    }

    /// A number in the header of an answer.
    pub fn number(&self, answer: &Answer, field: &str) -> Result<i64, BenchError> {
        let value = answer.ext.get(field).and_then(|value| value.parse().ok());
        value.ok_or_else(|| BenchError::protocol(&self.address, format!("answer without {field}")))
    }

    fn take_answer(&mut self) -> Result<Option<Answer>, BenchError> {
        loop {
            let split = split(&self.input, FRAME_BYTES_MAX)
                .map_err(|error| BenchError::protocol(&self.address, error))?;
            let Some((frame, consumed)) = split else {
                return Ok(None);
            };
            let header =
                decode(&frame).map_err(|error| BenchError::protocol(&self.address, error))?;
            let mine = header.is_response() && header.opaque == self.opaque;
            let answer = Answer {
                code: header.code,
                remark: header
                    .remark
                    .map(|text| text.to_string())
                    .unwrap_or_default(),
                ext: header
                    .ext
                    .iter()
                    .map(|(k, v)| (k.to_string(), v.to_string()))
                    .collect(),
                body: frame.body.to_vec(),
            };
            self.input.drain(..consumed);
            if mine {
                return Ok(Some(answer));
            }
        }
    }
}

/// Looks an address up.
pub fn resolve(address: &str) -> Result<SocketAddr, BenchError> {
    let mut found = address
        .to_socket_addrs()
        .map_err(BenchError::io(format!("look up {address}")))?;
    found
        .next()
        .ok_or_else(|| BenchError::Option(format!("{address} has no address")))
}

/// The queues of a topic on one broker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BrokerQueues {
    /// The broker's name.
    pub name: String,
    /// Its master's address.
    pub address: String,
    /// Queues that can be written.
    pub write_queues: i32,
}

/// Finds the masters that have the topic, creating it on all of them if nobody has.
pub fn find_topic(
    session: &mut Session,
    plan: &Plan,
    topic: &str,
) -> Result<Vec<BrokerQueues>, BenchError> {
    if let Some(brokers) = route(session, topic)? {
        return Ok(brokers);
    }
    create_topic(session, plan, topic)?;
    for _ in 0..ROUTE_TRIES_MAX {
        if let Some(brokers) = route(session, topic)? {
            return Ok(brokers);
        }
        std::thread::sleep(ROUTE_TRY_EVERY);
    }
    let namesrv = &plan.namesrv;
    Err(BenchError::Option(format!(
        "topic {topic} was created but {namesrv} has no route to it after 5 s"
    )))
}

fn route(session: &mut Session, topic: &str) -> Result<Option<Vec<BrokerQueues>>, BenchError> {
    let ext = [("topic", ExtValue::Str(topic))];
    let answer = session.call(request::GET_ROUTEINFO_BY_TOPIC, &ext, &[])?;
    if answer.code == response::TOPIC_NOT_EXIST {
        return Ok(None);
    }
    if answer.code != response::SUCCESS {
        return Err(BenchError::Answer {
            operation: "route of the topic",
            address: session.address.clone(),
            code: answer.code,
            remark: answer.remark,
        });
    }
    let route: TopicRouteData =
        from_json(&answer.body).map_err(|error| BenchError::protocol(&session.address, error))?;
    let mut brokers = Vec::new();
    for queues in &route.queue_datas {
        let group = route
            .broker_datas
            .iter()
            .find(|group| group.broker_name == queues.broker_name);
        let Some(address) = group.and_then(|group| group.broker_addrs.get(&MASTER_ID)) else {
            continue;
        };
        brokers.push(BrokerQueues {
            name: queues.broker_name.clone(),
            address: address.clone(),
            write_queues: queues.write_queue_nums,
        });
    }
    Ok((!brokers.is_empty()).then_some(brokers))
}

fn create_topic(session: &mut Session, plan: &Plan, topic: &str) -> Result<(), BenchError> {
    let code = request::GET_BROKER_CLUSTER_INFO;
    let answer = session.need("list of brokers", code, &[], &[])?;
    let cluster: ClusterInfo =
        from_json(&answer.body).map_err(|error| BenchError::protocol(&session.address, error))?;
    let queues = ExtValue::Int(plan.queues.into());
    let ext = [
        ("topic", ExtValue::Str(topic)),
        ("defaultTopic", ExtValue::Str("TBW102")),
        ("readQueueNums", queues),
        ("writeQueueNums", queues),
        ("perm", ExtValue::Int(6)),
        ("topicFilterType", ExtValue::Str("SINGLE_TAG")),
        ("topicSysFlag", ExtValue::Int(0)),
        ("order", ExtValue::Bool(false)),
    ];
    for group in cluster.broker_addr_table.values() {
        if let Some(address) = group.broker_addrs.get(&MASTER_ID) {
            let mut broker = Session::connect(address, plan.headers.serialization())?;
            broker.need("create topic", request::UPDATE_AND_CREATE_TOPIC, &ext, &[])?;
        }
    }
    Ok(())
}

/// Waits until a name server knows a broker: what was started is there. `ended` tells why there is
/// nothing to wait for any more.
pub fn wait_for_broker(
    namesrv: &str,
    limit: Duration,
    mut ended: impl FnMut() -> Option<String>,
) -> Result<(), BenchError> {
    let deadline = std::time::Instant::now() + limit;
    loop {
        if has_broker(namesrv).unwrap_or(false) {
            return Ok(());
        }
        if let Some(reason) = ended() {
            return Err(BenchError::Option(reason));
        }
        if std::time::Instant::now() > deadline {
            return Err(BenchError::Option(format!(
                "the name server {namesrv} knows no broker after {} s",
                limit.as_secs()
            )));
        }
        std::thread::sleep(ROUTE_TRY_EVERY);
    }
}

fn has_broker(namesrv: &str) -> Result<bool, BenchError> {
    let mut session = Session::connect(namesrv, Serialization::Json)?;
    let code = request::GET_BROKER_CLUSTER_INFO;
    let answer = session.need("list of brokers", code, &[], &[])?;
    let cluster: ClusterInfo =
        from_json(&answer.body).map_err(|error| BenchError::protocol(namesrv, error))?;
    let masters = cluster.broker_addr_table.values();
    let mut addresses = masters.filter_map(|group| group.broker_addrs.get(&MASTER_ID));
    Ok(addresses.any(|address| Session::connect(address, Serialization::Json).is_ok()))
}
