//! Owns the POP requests of the test client: pop, acknowledge, keep longer, ask.
//!
//! Invariant: a receipt is made of the answer as RocketMQ's clients make it, so that a broker that
//! answers in another form fails here.

use std::collections::BTreeMap;
use std::io;

use crate::client::{Client, answer};
use crate::frame::Frame;
use crate::record::{Record, decode_all};

/// Request codes of POP.
pub mod code {
    #![allow(missing_docs, reason = "the names are RocketMQ's own")]
    pub const POP_MESSAGE: i32 = 200_050;
    pub const ACK_MESSAGE: i32 = 200_051;
    pub const CHANGE_INVISIBLE_TIME: i32 = 200_053;
    pub const NOTIFICATION: i32 = 200_054;
    pub const POLLING_INFO: i32 = 200_055;
    pub const BATCH_ACK_MESSAGE: i32 = 200_151;
    pub const SET_MESSAGE_REQUEST_MODE: i32 = 401;
}

/// The answer when an acknowledgement comes too late.
pub const NO_MESSAGE: i32 = 208;
/// The answer when too many requests wait.
pub const POLLING_FULL: i32 = 209;
/// The answer when nothing came in time.
pub const POLLING_TIMEOUT: i32 = 210;

/// A pop as a test asks for it.
#[derive(Clone, Debug)]
pub struct Pop<'a> {
    /// Consumer group.
    pub group: &'a str,
    /// Topic.
    pub topic: &'a str,
    /// Queue, -1 for all.
    pub queue_id: i32,
    /// Messages wanted at most.
    pub most: i32,
    /// Invisible time in milliseconds.
    pub invisible_ms: i64,
    /// Waiting time in milliseconds.
    pub poll_ms: i64,
    /// Whether in order.
    pub ordered: bool,
    /// Attempt.
    pub attempt: &'a str,
    /// Tag expression.
    pub tags: &'a str,
}

impl<'a> Pop<'a> {
    /// All queues, 32 messages, a minute, no waiting.
    pub fn of(group: &'a str, topic: &'a str) -> Self {
        Self {
            group,
            topic,
            queue_id: -1,
            most: 32,
            invisible_ms: 60_000,
            poll_ms: 0,
            ordered: false,
            attempt: "",
            tags: "*",
        }
    }

    /// The same with another invisible time.
    pub fn invisible(mut self, ms: i64) -> Self {
        self.invisible_ms = ms;
        self
    }

    /// The same with a waiting time.
    pub fn waiting(mut self, ms: i64) -> Self {
        self.poll_ms = ms;
        self
    }

    /// The same in order.
    pub fn ordered(mut self) -> Self {
        self.ordered = true;
        self
    }

    /// The same with at most so many messages.
    pub fn most(mut self, most: i32) -> Self {
        self.most = most;
        self
    }
}

/// A popped message with its receipt.
#[derive(Clone, Debug)]
pub struct Popped {
    /// The message.
    pub record: Record,
    /// Topic to be named in the acknowledgement.
    pub topic: String,
    /// Consumer group.
    pub group: String,
    /// Receipt.
    pub receipt: String,
    /// How often it was handed out before, for ordered pops.
    pub count: i64,
}

/// What a pop returns.
#[derive(Clone, Debug)]
pub struct PopAnswer {
    /// The response code.
    pub code: i32,
    /// Messages left.
    pub rest: i64,
    /// The messages.
    pub messages: Vec<Popped>,
}

/// Milliseconds since 1970.
pub fn now_ms() -> i64 {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
    since.map_or(0, |since| since.as_millis() as i64)
}

fn retry_topic(topic: &str, group: &str, mark: &str) -> String {
    match mark {
        "1" => format!("%RETRY%{group}_{topic}"),
        "2" => format!("%RETRY%{group}+{topic}"),
        _ => topic.to_owned(),
    }
}

/// `mark qid value` joined by `;`, by mark and queue.
fn by_queue(text: &str) -> BTreeMap<(String, String), String> {
    let parts = text.split(';').filter(|part| !part.is_empty());
    let parts = parts.map(|part| {
        let words: Vec<&str> = part.split(' ').collect();
        assert_eq!(words.len(), 3, "{text}");
        (
            (words[0].to_owned(), words[1].to_owned()),
            words[2].to_owned(),
        )
    });
    let all: Vec<_> = parts.collect();
    let map: BTreeMap<_, _> = all.iter().cloned().collect();
    assert_eq!(map.len(), all.len(), "a queue twice in {text}");
    map
}

fn popped(asked: &Pop<'_>, frame: &Frame, record: Record) -> Popped {
    let field = |name: &str| {
        frame
            .text(name)
            .expect("a field of a pop's answer")
            .to_owned()
    };
    let queue = record.queue_id.to_string();
    let own = record.properties.get("POP_CK").cloned();
    let receipt = own.unwrap_or_else(|| {
        let starts = by_queue(&field("startOffsetInfo"));
        let offsets = by_queue(&field("msgOffsetInfo"));
        let key = ("0".to_owned(), queue.clone());
        let listed = offsets[&key]
            .split(',')
            .any(|o| o == record.queue_offset.to_string());
        assert!(listed, "{} is not in {offsets:?}", record.queue_offset);
        format!(
            "{} {} {} {} 0 broker-a {queue} {}",
            starts[&key],
            field("popTime"),
            field("invisibleTime"),
            field("reviveQid"),
            record.queue_offset
        )
    });
    let words: Vec<&str> = receipt.split(' ').collect();
    let counts = by_queue(
        frame
            .fields
            .get("orderCountInfo")
            .map_or("", String::as_str),
    );
    let exact = ("0".to_owned(), format!("qo{queue}%{}", record.queue_offset));
    let count = counts.get(&exact).and_then(|count| count.parse().ok());
    Popped {
        topic: retry_topic(asked.topic, asked.group, words[4]),
        group: asked.group.to_owned(),
        receipt: receipt.clone(),
        count: count.unwrap_or(0),
        record,
    }
}

/// Reads the answer to a pop.
pub fn pop_answer(asked: &Pop<'_>, frame: &Frame) -> io::Result<PopAnswer> {
    let records = if frame.code == answer::SUCCESS {
        decode_all(&frame.body)?
    } else {
        Vec::new()
    };
    let messages = records
        .into_iter()
        .map(|record| popped(asked, frame, record));
    let known = [answer::SUCCESS, POLLING_FULL, POLLING_TIMEOUT, 19];
    if !known.contains(&frame.code) {
        return Err(io::Error::other(format!("{frame:?}")));
    }
    Ok(PopAnswer {
        code: frame.code,
        rest: frame.number("restNum").unwrap_or(0),
        messages: messages.collect(),
    })
}

fn ack_fields(message: &Popped) -> Vec<(&'static str, String)> {
    vec![
        ("consumerGroup", message.group.clone()),
        ("topic", message.topic.clone()),
        ("queueId", message.record.queue_id.to_string()),
        ("extraInfo", message.receipt.clone()),
        ("offset", message.record.queue_offset.to_string()),
    ]
}

impl Client {
    /// Starts a pop without waiting.
    pub fn start_pop(&mut self, asked: &Pop<'_>) -> io::Result<i32> {
        let fields = [
            ("consumerGroup", asked.group.to_owned()),
            ("topic", asked.topic.to_owned()),
            ("queueId", asked.queue_id.to_string()),
            ("maxMsgNums", asked.most.to_string()),
            ("invisibleTime", asked.invisible_ms.to_string()),
            ("pollTime", asked.poll_ms.to_string()),
            ("bornTime", now_ms().to_string()),
            ("initMode", "0".to_owned()),
            ("expType", "TAG".to_owned()),
            ("exp", asked.tags.to_owned()),
            ("order", asked.ordered.to_string()),
            ("attemptId", asked.attempt.to_owned()),
        ];
        self.start(Frame::request(code::POP_MESSAGE, &fields, b""))
    }

    /// Pops messages.
    pub fn pop(&mut self, asked: &Pop<'_>) -> io::Result<PopAnswer> {
        let opaque = self.start_pop(asked)?;
        let frame = self.finish(opaque)?;
        pop_answer(asked, &frame)
    }

    /// Acknowledges; returns the response code.
    pub fn ack(&mut self, message: &Popped) -> io::Result<i32> {
        let frame = self.call(code::ACK_MESSAGE, &ack_fields(message), b"")?;
        Ok(frame.code)
    }

    /// Starts an acknowledgement without waiting.
    pub fn start_ack(&mut self, message: &Popped) -> io::Result<i32> {
        let fields = ack_fields(message);
        self.start(Frame::request(code::ACK_MESSAGE, &fields, b""))
    }

    /// Acknowledges many messages in one request, which may be of many queues.
    pub fn batch_ack(&mut self, messages: &[Popped]) -> io::Result<Frame> {
        let acks: Vec<String> = messages.iter().map(batch_part).collect();
        let body = format!("{{\"brokerName\":\"b\",\"acks\":[{}]}}", acks.join(","));
        self.call(code::BATCH_ACK_MESSAGE, &[], body.as_bytes())
    }

    /// Keeps a message invisible for another time from now; returns its new receipt.
    pub fn change_invisible(&mut self, message: &Popped, ms: i64) -> io::Result<Popped> {
        let mut fields = ack_fields(message);
        fields.push(("invisibleTime", ms.to_string()));
        let frame = self.call(code::CHANGE_INVISIBLE_TIME, &fields, b"")?;
        let frame = frame.success()?;
        let mut words: Vec<String> = message.receipt.split(' ').map(str::to_owned).collect();
        words[1] = frame.text("popTime")?.to_owned();
        words[2] = frame.text("invisibleTime")?.to_owned();
        Ok(Popped {
            receipt: words.join(" "),
            ..message.clone()
        })
    }
}

fn batch_part(message: &Popped) -> String {
    let words: Vec<&str> = message.receipt.split(' ').collect();
    let start: i64 = words[0].parse().expect("a start offset");
    let bit = (message.record.queue_offset - start) as usize;
    let mut bytes = vec![0_u8; bit / 8 + 1];
    bytes[bit / 8] = 1 << (bit % 8);
    let bytes: Vec<String> = bytes.iter().map(u8::to_string).collect();
    let (group, queue_id) = (&message.group, message.record.queue_id);
    let topic = &message.record.topic;
    format!(
        "{{\"c\":\"{group}\",\"t\":\"{topic}\",\"r\":\"{}\",\"so\":{start},\"q\":{queue_id},\
         \"rq\":{},\"pt\":{},\"it\":{},\"b\":[{}]}}",
        words[4],
        words[3],
        words[1],
        words[2],
        bytes.join(",")
    )
}
