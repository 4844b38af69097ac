//! Owns a blocking client on one connection: requests in flight by opaque number, answers matched
//! to them, requests of the broker kept aside.
//!
//! Invariant: an answer is given only to the request whose opaque number it carries; an answer to
//! no request is an error, not noise.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::frame::{Encoding, FLAG_ANSWER, FLAG_ONEWAY, FRAME_BYTES_MAX, Frame};
use crate::record::{Record, decode_all, encode_properties};

/// Request codes the suites use.
pub mod code {
    #![allow(missing_docs, reason = "the names are RocketMQ's own")]
    pub const SEND_MESSAGE: i32 = 10;
    pub const PULL_MESSAGE: i32 = 11;
    pub const QUERY_MESSAGE: i32 = 12;
    pub const QUERY_CONSUMER_OFFSET: i32 = 14;
    pub const UPDATE_CONSUMER_OFFSET: i32 = 15;
    pub const UPDATE_AND_CREATE_TOPIC: i32 = 17;
    pub const SEARCH_OFFSET_BY_TIMESTAMP: i32 = 29;
    pub const GET_ALL_TOPIC_CONFIG: i32 = 21;
    pub const GET_BROKER_RUNTIME_INFO: i32 = 28;
    pub const GET_MAX_OFFSET: i32 = 30;
    pub const GET_MIN_OFFSET: i32 = 31;
    pub const GET_EARLIEST_STORE_TIME: i32 = 32;
    pub const VIEW_MESSAGE_BY_ID: i32 = 33;
    pub const HEART_BEAT: i32 = 34;
    pub const GET_CONSUMER_LIST: i32 = 38;
    pub const LOCK_QUEUES: i32 = 41;
    pub const GET_ROUTE: i32 = 105;
    pub const GET_ALL_GROUPS: i32 = 201;
    pub const GET_CONSUME_STATS: i32 = 208;
    pub const DELETE_TOPIC_IN_BROKER: i32 = 215;
    pub const DELETE_TOPIC_IN_NAMESRV: i32 = 216;
    pub const SEND_MESSAGE_V2: i32 = 310;
    pub const SEND_BATCH_MESSAGE: i32 = 320;
    pub const QUERY_CONSUME_QUEUE: i32 = 321;
    pub const GET_TOPIC_CONFIG: i32 = 351;
}

/// Response codes the suites look for.
pub mod answer {
    #![allow(missing_docs, reason = "the names are RocketMQ's own")]
    pub const SUCCESS: i32 = 0;
    pub const REQUEST_CODE_NOT_SUPPORTED: i32 = 3;
    pub const SERVICE_NOT_AVAILABLE: i32 = 14;
    pub const TOPIC_NOT_EXIST: i32 = 17;
    pub const PULL_NOT_FOUND: i32 = 19;
    pub const QUERY_NOT_FOUND: i32 = 22;
}

const PULL_FLAG_SUSPEND: i32 = 2;
const PULL_FLAG_SUBSCRIPTION: i32 = 4;
const READ_TIMEOUT: Duration = Duration::from_secs(20);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A connection to a broker or a name server.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    encoding: Encoding,
    opaque_next: i32,
    waiting: HashSet<i32>,
    answers: HashMap<i32, Frame>,
    /// Requests that the broker sent to this client.
    pub pushed: VecDeque<Frame>,
    input: Vec<u8>,
}

/// What an accepted send returns.
#[derive(Clone, Debug)]
pub struct Sent {
    /// The offset ids, one per message of a batch.
    pub message_ids: Vec<String>,
    /// The queue that took it.
    pub queue_id: i32,
    /// The place of the first message in that queue.
    pub queue_offset: i64,
}

impl Sent {
    /// The only id of a send that was no batch.
    pub fn message_id(&self) -> &str {
        assert_eq!(self.message_ids.len(), 1, "{:?}", self.message_ids);
        &self.message_ids[0]
    }
}

/// The physical offset inside an offset id.
pub fn physical_offset(message_id: &str) -> i64 {
    let digits = &message_id[message_id.len() - 16..];
    i64::from_str_radix(digits, 16).unwrap_or_else(|_| panic!("offset id {message_id:?}"))
}

/// What a pull returns.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// The response code: found, or why not.
    pub code: i32,
    /// Where to go on.
    pub next_offset: i64,
    /// The oldest offset still kept.
    pub min_offset: i64,
    /// One past the newest readable offset.
    pub max_offset: i64,
    /// The records.
    pub records: Vec<Record>,
}

/// One message of a batch: body and properties.
pub type BatchItem<'a> = (&'a [u8], &'a [(&'a str, &'a str)]);

impl Client {
    /// Connects, with JSON headers.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        stream.set_write_timeout(Some(READ_TIMEOUT))?;
        Ok(Self {
            stream,
            encoding: Encoding::Json,
            opaque_next: 1,
            waiting: HashSet::new(),
            answers: HashMap::new(),
            pushed: VecDeque::new(),
            input: Vec::new(),
        })
    }

    /// The same client with another header encoding from now on.
    pub fn with_encoding(mut self, encoding: Encoding) -> Self {
        self.encoding = encoding;
        self
    }

    /// A handle on the same socket, to close it or to change its timeouts from elsewhere.
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Writes a request and returns its opaque number.
    pub fn start(&mut self, mut request: Frame) -> io::Result<i32> {
        request.opaque = self.opaque_next;
        self.opaque_next += 1;
        request.encoding = self.encoding;
        self.stream.write_all(&request.encode())?;
        if request.flag & FLAG_ONEWAY == 0 {
            self.waiting.insert(request.opaque);
        }
        Ok(request.opaque)
    }

    /// Waits for the answer to a request that was started.
    pub fn finish(&mut self, opaque: i32) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.answers.remove(&opaque) {
                return Ok(frame);
            }
            let frame = self.read_frame()?;
            if !frame.is_answer() {
                self.pushed.push_back(frame);
            } else if self.waiting.remove(&frame.opaque) {
                assert_eq!(
                    frame.encoding, self.encoding,
                    "answered in the request's encoding"
                );
                self.answers.insert(frame.opaque, frame);
            } else {
                return Err(io::Error::other(format!("answer to no request: {frame:?}")));
            }
        }
    }

    /// Says that an answer with this number will come, for a request written by hand.
    pub fn expect_answer(&mut self, opaque: i32) {
        self.waiting.insert(opaque);
    }

    /// Waits for a request of the broker.
    pub fn next_pushed(&mut self) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.pushed.pop_front() {
                return Ok(frame);
            }
            let frame = self.read_frame()?;
            if frame.flag & FLAG_ANSWER != 0 {
                self.answers.insert(frame.opaque, frame);
            } else {
                self.pushed.push_back(frame);
            }
        }
    }

    fn read_frame(&mut self) -> io::Result<Frame> {
        let mut buffer = [0_u8; 65536];
        loop {
            if let Some(prefix) = self.input.first_chunk::<4>() {
                let total = u32::from_be_bytes(*prefix) as usize;
                if total + 4 > FRAME_BYTES_MAX {
                    return Err(io::Error::other(format!("a frame of {total} bytes")));
                }
                if self.input.len() >= total + 4 {
                    let frame = Frame::decode(&self.input[4..total + 4])?;
                    self.input.drain(..total + 4);
                    return Ok(frame);
                }
            }
            let count = self.stream.read(&mut buffer)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.input.extend(&buffer[..count]);
        }
    }

    /// A request and its answer, whatever its code.
    pub fn call(&mut self, code: i32, fields: &[(&str, String)], body: &[u8]) -> io::Result<Frame> {
        let opaque = self.start(Frame::request(code, fields, body))?;
        self.finish(opaque)
    }

    /// Sends one message; an error code is an error.
    pub fn send(
        &mut self,
        topic: &str,
        queue_id: i32,
        body: &[u8],
        properties: &[(&str, &str)],
    ) -> io::Result<Sent> {
        let opaque = self.start_send(topic, queue_id, body, properties)?;
        sent(self.finish(opaque)?)
    }

    /// Starts a send without waiting; [`Client::finish`] and [`sent`] take it from there.
    pub fn start_send(
        &mut self,
        topic: &str,
        queue_id: i32,
        body: &[u8],
        properties: &[(&str, &str)],
    ) -> io::Result<i32> {
        let fields = send_fields(topic, queue_id, properties, false);
        self.start(Frame::request(code::SEND_MESSAGE_V2, &fields, body))
    }

    /// Sends one message that wants no answer.
    pub fn send_oneway(&mut self, topic: &str, queue_id: i32, body: &[u8]) -> io::Result<()> {
        let fields = send_fields(topic, queue_id, &[], false);
        let mut request = Frame::request(code::SEND_MESSAGE_V2, &fields, body);
        request.flag = FLAG_ONEWAY;
        self.start(request).map(drop)
    }

    /// Sends a batch; `wrapper` are the properties of the request itself.
    pub fn send_batch(
        &mut self,
        topic: &str,
        queue_id: i32,
        items: &[BatchItem<'_>],
        wrapper: &[(&str, &str)],
    ) -> io::Result<Sent> {
        let mut body = Vec::new();
        for (item, properties) in items {
            let properties = encode_properties(properties);
            let total = 22 + item.len() + properties.len();
            body.extend((total as i32).to_be_bytes());
            body.extend([0_u8; 12]);
            body.extend((item.len() as i32).to_be_bytes());
            body.extend(*item);
            body.extend((properties.len() as i16).to_be_bytes());
            body.extend(properties.as_bytes());
        }
        let fields = send_fields(topic, queue_id, wrapper, true);
        sent(self.call(code::SEND_BATCH_MESSAGE, &fields, &body)?)
    }

    /// Pulls without waiting for new messages.
    pub fn pull(&mut self, topic: &str, queue: i32, offset: i64, max: i32) -> io::Result<Pulled> {
        self.pull_as("test_reader", topic, queue, offset, max)
    }

    /// The same for a group.
    pub fn pull_as(
        &mut self,
        group: &str,
        topic: &str,
        queue: i32,
        offset: i64,
        max: i32,
    ) -> io::Result<Pulled> {
        let request = pull_request(group, (topic, queue, offset), max, Duration::ZERO);
        let opaque = self.start(request)?;
        pulled(self.finish(opaque)?)
    }

    /// Starts a pull that the broker may park for `wait`.
    pub fn start_pull(
        &mut self,
        topic: &str,
        queue_id: i32,
        offset: i64,
        max: i32,
        wait: Duration,
    ) -> io::Result<i32> {
        self.start(pull_request(
            "test_reader",
            (topic, queue_id, offset),
            max,
            wait,
        ))
    }

    /// Everything readable in a queue from `offset` on; fails unless offsets follow one another.
    pub fn read_queue(&mut self, topic: &str, queue: i32, offset: i64) -> io::Result<Vec<Record>> {
        let mut records: Vec<Record> = Vec::new();
        let mut next = offset;
        loop {
            let pulled = self.pull(topic, queue, next, 64)?;
            if pulled.records.is_empty() {
                let end = pulled.code == answer::PULL_NOT_FOUND || pulled.max_offset <= next;
                assert!(end, "{topic}/{queue}: nothing at {next}, yet {pulled:?}");
                return Ok(records);
            }
            for record in pulled.records {
                assert_eq!(
                    record.queue_offset, next,
                    "{topic}/{queue}: offsets without a hole"
                );
                next += 1;
                records.push(record);
            }
        }
    }

    /// Creates a topic with as many read as write queues.
    pub fn create_topic(&mut self, topic: &str, queues: i32) -> io::Result<()> {
        let fields = [
            ("topic", topic.to_owned()),
            ("defaultTopic", "TBW102".to_owned()),
            ("readQueueNums", queues.to_string()),
            ("writeQueueNums", queues.to_string()),
            ("perm", "6".to_owned()),
            ("topicFilterType", "SINGLE_TAG".to_owned()),
            ("topicSysFlag", "0".to_owned()),
            ("order", "false".to_owned()),
        ];
        self.call(code::UPDATE_AND_CREATE_TOPIC, &fields, b"")?
            .success()
            .map(drop)
    }

    /// Deletes a topic on the broker.
    pub fn delete_topic(&mut self, topic: &str) -> io::Result<()> {
        let fields = [("topic", topic.to_owned())];
        self.call(code::DELETE_TOPIC_IN_BROKER, &fields, b"")?
            .success()
            .map(drop)
    }

    /// One past the newest readable offset.
    pub fn max_offset(&mut self, topic: &str, queue: i32) -> io::Result<i64> {
        let frame = self.call(code::GET_MAX_OFFSET, &queue_fields(topic, queue), b"")?;
        frame.success()?.number("offset")
    }

    /// The oldest offset kept.
    pub fn min_offset(&mut self, topic: &str, queue: i32) -> io::Result<i64> {
        let frame = self.call(code::GET_MIN_OFFSET, &queue_fields(topic, queue), b"")?;
        frame.success()?.number("offset")
    }

    /// The first offset stored at this time or later.
    pub fn search_offset(&mut self, topic: &str, queue: i32, time_ms: i64) -> io::Result<i64> {
        self.search_boundary(topic, queue, time_ms, "")
    }

    /// The first offset stored at this time or later, or with the boundary `upper` the last one
    /// stored at this time or earlier. An empty boundary is not sent.
    pub fn search_boundary(
        &mut self,
        topic: &str,
        queue: i32,
        time_ms: i64,
        boundary: &str,
    ) -> io::Result<i64> {
        let mut fields = queue_fields(topic, queue);
        fields.push(("timestamp", time_ms.to_string()));
        if !boundary.is_empty() {
            fields.push(("boundaryType", boundary.to_owned()));
        }
        let frame = self.call(code::SEARCH_OFFSET_BY_TIMESTAMP, &fields, b"")?;
        frame.success()?.number("offset")
    }

    /// The committed offset of a group, if there is one.
    pub fn query_offset(
        &mut self,
        group: &str,
        topic: &str,
        queue: i32,
    ) -> io::Result<Option<i64>> {
        let mut fields = queue_fields(topic, queue);
        fields.push(("consumerGroup", group.to_owned()));
        fields.push(("setZeroIfNotFound", "false".to_owned()));
        let frame = self.call(code::QUERY_CONSUMER_OFFSET, &fields, b"")?;
        if frame.code == answer::QUERY_NOT_FOUND {
            return Ok(None);
        }
        frame.success()?.number("offset").map(Some)
    }

    /// Commits an offset and waits for the answer.
    pub fn commit(&mut self, group: &str, topic: &str, queue: i32, offset: i64) -> io::Result<()> {
        let mut fields = queue_fields(topic, queue);
        fields.push(("consumerGroup", group.to_owned()));
        fields.push(("commitOffset", offset.to_string()));
        self.call(code::UPDATE_CONSUMER_OFFSET, &fields, b"")?
            .success()
            .map(drop)
    }

    /// The one message at a physical offset.
    pub fn view(&mut self, topic: &str, physical_offset: i64) -> io::Result<Record> {
        let fields = [
            ("topic", topic.to_owned()),
            ("offset", physical_offset.to_string()),
        ];
        let frame = self
            .call(code::VIEW_MESSAGE_BY_ID, &fields, b"")?
            .success()?;
        let mut records = decode_all(&frame.body)?;
        assert_eq!(
            records.len(),
            1,
            "one message at physical offset {physical_offset}"
        );
        Ok(records.remove(0))
    }

    /// The messages with the id that their producer gave them.
    pub fn query_unique(&mut self, topic: &str, id: &str) -> io::Result<Vec<Record>> {
        let fields = [
            ("topic", topic.to_owned()),
            ("key", id.to_owned()),
            ("maxNum", "32".to_owned()),
            ("beginTimestamp", "0".to_owned()),
            ("endTimestamp", i64::MAX.to_string()),
            ("_UNIQUE_KEY_QUERY", "true".to_owned()),
        ];
        let frame = self.call(code::QUERY_MESSAGE, &fields, b"")?.success()?;
        decode_all(&frame.body)
    }

    /// The one message that a send put into the log.
    pub fn view_at(&mut self, topic: &str, sent: &Sent) -> Record {
        self.view(topic, physical_offset(sent.message_id()))
            .expect("view by id")
    }

    /// Announces a consumer of one topic.
    pub fn heartbeat(&mut self, client_id: &str, group: &str, topic: &str) -> io::Result<Frame> {
        self.subscribe(client_id, group, (topic, "*"))
    }

    /// Announces a consumer of those messages of a topic that have the tags of an expression.
    pub fn subscribe(
        &mut self,
        client_id: &str,
        group: &str,
        (topic, expression): (&str, &str),
    ) -> io::Result<Frame> {
        let body = serde_json::json!({
            "clientID": client_id,
            "producerDataSet": [],
            "consumerDataSet": [{
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "consumeType": "CONSUME_PASSIVELY",
                "groupName": group,
                "messageModel": "CLUSTERING",
                "subscriptionDataSet": [{
                    "classFilterMode": false, "codeSet": [], "expressionType": "TAG",
                    "subString": expression, "subVersion": 1, "tagsSet": [], "topic": topic,
                }],
                "unitMode": false,
            }],
        });
        self.call(code::HEART_BEAT, &[], body.to_string().as_bytes())?
            .success()
    }

    /// What `brokerStatus` shows, by name.
    pub fn runtime_info(&mut self) -> io::Result<BTreeMap<String, String>> {
        let frame = self
            .call(code::GET_BROKER_RUNTIME_INFO, &[], b"")?
            .success()?;
        let json: serde_json::Value = serde_json::from_slice(&frame.body)?;
        let table = json["table"].as_object().expect("a table");
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        Ok(table
            .iter()
            .map(|(key, value)| (key.clone(), text(value)))
            .collect())
    }

    /// The route of a topic as text, if the name server knows it.
    pub fn route(&mut self, topic: &str) -> io::Result<Option<String>> {
        let frame = self.call(code::GET_ROUTE, &[("topic", topic.to_owned())], b"")?;
        if frame.code == answer::TOPIC_NOT_EXIST {
            return Ok(None);
        }
        Ok(Some(
            String::from_utf8_lossy(&frame.success()?.body).into_owned(),
        ))
    }
}

/// A pull that the broker may park for `wait`.
fn pull_request(
    group: &str,
    (topic, queue_id, offset): (&str, i32, i64),
    max: i32,
    wait: Duration,
) -> Frame {
    let suspend = if wait.is_zero() { 0 } else { PULL_FLAG_SUSPEND };
    let fields = [
        ("consumerGroup", group.to_owned()),
        ("topic", topic.to_owned()),
        ("queueId", queue_id.to_string()),
        ("queueOffset", offset.to_string()),
        ("maxMsgNums", max.to_string()),
        ("sysFlag", (suspend | PULL_FLAG_SUBSCRIPTION).to_string()),
        ("commitOffset", "0".to_owned()),
        ("suspendTimeoutMillis", wait.as_millis().to_string()),
        ("subscription", "*".to_owned()),
        ("subVersion", "0".to_owned()),
        ("expressionType", "TAG".to_owned()),
    ];
    Frame::request(code::PULL_MESSAGE, &fields, b"")
}

fn queue_fields(topic: &str, queue_id: i32) -> Vec<(&'static str, String)> {
    vec![
        ("topic", topic.to_owned()),
        ("queueId", queue_id.to_string()),
    ]
}

fn send_fields(
    topic: &str,
    queue_id: i32,
    properties: &[(&str, &str)],
    batch: bool,
) -> Vec<(&'static str, String)> {
    let now_ms = std::time::UNIX_EPOCH
        .elapsed()
        .map_or(0, |time| time.as_millis());
    vec![
        ("a", "test_producer".to_owned()),
        ("b", topic.to_owned()),
        ("c", "TBW102".to_owned()),
        ("d", "4".to_owned()),
        ("e", queue_id.to_string()),
        ("f", "0".to_owned()),
        ("g", now_ms.to_string()),
        ("h", "0".to_owned()),
        ("i", encode_properties(properties)),
        ("j", "0".to_owned()),
        ("k", "false".to_owned()),
        ("m", batch.to_string()),
    ]
}

/// Reads the answer to a send; every code but 0 is an error.
pub fn sent(answer: Frame) -> io::Result<Sent> {
    let answer = answer.success()?;
    Ok(Sent {
        message_ids: answer
            .text("msgId")?
            .split(',')
            .map(str::to_owned)
            .collect(),
        queue_id: answer.number("queueId")? as i32,
        queue_offset: answer.number("queueOffset")?,
    })
}

/// Reads the answer to a pull, found or not.
pub fn pulled(answer: Frame) -> io::Result<Pulled> {
    if !(0..=21).contains(&answer.code) || !answer.fields.contains_key("nextBeginOffset") {
        answer.success()?;
        return Err(io::Error::other(
            "a pull answered 0 without nextBeginOffset",
        ));
    }
    Ok(Pulled {
        code: answer.code,
        next_offset: answer.number("nextBeginOffset")?,
        min_offset: answer.number("minOffset")?,
        max_offset: answer.number("maxOffset")?,
        records: decode_all(&answer.body)?,
    })
}

/// Properties as a map, for comparing.
pub fn property_map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}
