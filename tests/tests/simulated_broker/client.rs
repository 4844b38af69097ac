//! Simulated clients: they speak real frames over connections that break, and write down what they
//! were told.
//!
//! Invariant: every answer belongs to a request that waits for one, and is judged the moment it
//! comes.

use std::collections::BTreeMap;

use shard::io::sim::SimRandom;
use shard::runtime::sim::{SimMachine, SimPeer};
use tests::client::{code, physical_offset, pulled, sent};
use tests::frame::{Encoding, FLAG_ONEWAY, Frame};
use tests::record::encode_properties;

use super::history::{Fate, History, Topic};
use super::world::{BROKER, Trace};

/// Topics that producers use, and the queues of each.
pub const TOPICS: [&str; 3] = ["T0", "T1", "T2"];
pub const QUEUES: i32 = 2;
/// The topic that an administrator deletes and makes again.
pub const DOOMED: &str = "D0";
const CONSUMER_SEND_MSG_BACK: i32 = 36;
const LOCK_BATCH_MQ: i32 = 41;

/// What a client does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sends; so many requests at once.
    Producer { at_once: usize },
    /// Waits at the end of the queues.
    Tail,
    /// Reads old messages here and there.
    Lagging,
    /// Reads one queue in order and commits after each answer.
    Ordered { queue: i32 },
    /// Sends back some of what it reads.
    Retrying,
    /// Makes and deletes topics, looks things up.
    Admin,
}

/// A request that waits for its answer.
enum Pending {
    Send {
        numbers: Vec<usize>,
        floor: Option<i64>,
    },
    Pull {
        topic: String,
        queue: i32,
        offset: i64,
    },
    Commit {
        topic: String,
        queue: i32,
        offset: i64,
    },
    Query {
        topic: String,
        queue: i32,
    },
    Back {
        number: usize,
    },
    Lock,
    Create {
        topic: String,
        queues: i32,
    },
    Delete {
        topic: String,
    },
    Look,
}

/// One client.
pub struct Client {
    pub role: Role,
    group: String,
    peer: Option<SimPeer>,
    input: Vec<u8>,
    next_opaque: i32,
    pending: BTreeMap<i32, Pending>,
    random: SimRandom,
    encoding: Encoding,
    next: BTreeMap<(String, i32), i64>,
    locked: bool,
    positioned: bool,
    doomed_step: u32,
    /// Turns to let pass before connecting again, so that what the old connection asked for is
    /// done or dropped by then.
    away: u32,
    /// What was read last, to be sent back.
    last_read: Option<(usize, String, i64)>,
    pub answers: u64,
}

/// What a client sees of the world.
pub struct Scene<'a> {
    pub machine: &'a SimMachine,
    pub history: &'a mut History,
    pub trace: &'a mut Trace,
    pub body_bytes_max: usize,
}

impl Client {
    pub fn new(number: usize, role: Role, seed: u64) -> Self {
        let mut random = SimRandom::new(seed.wrapping_mul(31) ^ number as u64);
        let binary = random.one_in(2);
        Self {
            role,
            group: format!("g{number}"),
            peer: None,
            input: Vec::new(),
            next_opaque: 1,
            pending: BTreeMap::new(),
            random,
            encoding: if binary {
                Encoding::Binary
            } else {
                Encoding::Json
            },
            next: BTreeMap::new(),
            locked: false,
            positioned: false,
            doomed_step: 0,
            away: 0,
            last_read: None,
            answers: 0,
        }
    }

    /// The broker is gone: what waits will never be answered.
    pub fn cut_off(&mut self) {
        self.peer = None;
        self.input.clear();
        self.pending.clear();
        self.locked = false;
        self.positioned = false;
        self.doomed_step = 0;
        self.last_read = None;
    }

    /// Takes what came and asks for more.
    pub fn turn(&mut self, scene: &mut Scene<'_>) {
        let Some(peer) = self.peer.clone() else {
            self.away = self.away.saturating_sub(1);
            if self.away == 0 && self.random.one_in(3) {
                self.peer = scene.machine.connect(BROKER.parse().unwrap()).ok();
            }
            return;
        };
        self.input.extend(peer.received());
        self.take_frames(scene);
        if peer.is_closed() || self.random.one_in(600) {
            // A network that breaks: the broker sees a reset, the client forgets what it asked.
            peer.reset();
            for pending in self.pending.values() {
                if let Pending::Create { topic, .. } | Pending::Delete { topic } = pending {
                    scene.history.in_doubt.insert(topic.clone());
                }
            }
            self.cut_off();
            self.away = 60;
            return;
        }
        let at_once = match self.role {
            Role::Producer { at_once } => at_once,
            Role::Tail => QUEUES as usize,
            _ => 1,
        };
        if self.pending.len() < at_once && !self.random.one_in(3) {
            self.act(scene);
        }
    }

    fn take_frames(&mut self, scene: &mut Scene<'_>) {
        while let Some(prefix) = self.input.first_chunk::<4>() {
            let total = u32::from_be_bytes(*prefix) as usize + 4;
            if self.input.len() < total {
                return;
            }
            let frame = Frame::decode(&self.input[4..total]).expect("a frame that can be read");
            scene.trace.note(&self.input[..total]);
            self.input.drain(..total);
            if !frame.is_answer() {
                continue;
            }
            self.answers += 1;
            let pending = self.pending.remove(&frame.opaque);
            let pending = pending.expect("an answer to a request that waits");
            self.answered(pending, frame, scene);
        }
    }

    fn ask(&mut self, mut frame: Frame, pending: Pending, scene: &mut Scene<'_>) {
        frame.opaque = self.next_opaque;
        frame.encoding = self.encoding;
        self.next_opaque += 1;
        let oneway = frame.flag & FLAG_ONEWAY != 0;
        if !oneway {
            self.pending.insert(frame.opaque, pending);
        }
        let bytes = frame.encode();
        scene.trace.note(&bytes);
        if let Some(peer) = &self.peer {
            peer.send(&bytes);
        }
    }

    fn act(&mut self, scene: &mut Scene<'_>) {
        match self.role.clone() {
            Role::Producer { .. } => self.produce(scene),
            Role::Tail => self.tail(scene),
            Role::Lagging => self.lag(scene),
            Role::Ordered { queue } => self.in_order(queue, scene),
            Role::Retrying => self.retry(scene),
            Role::Admin => self.administer(scene),
        }
    }

    fn size(&mut self, most: usize) -> usize {
        let most = most as u64;
        let len = match self.random.below(10) {
            0 => 1,
            1 => 3800 + self.random.below(400),
            2 => self.random.below(most),
            _ => self.random.below(900),
        };
        len.clamp(12, most) as usize
    }

    fn produce(&mut self, scene: &mut Scene<'_>) {
        let topic = TOPICS[self.random.below(3) as usize];
        let queue = self.random.below(QUEUES as u64 + 1) as i32 - 1;
        self.send_to(topic, queue, scene);
    }

    fn send_to(&mut self, topic: &str, queue: i32, scene: &mut Scene<'_>) {
        let asked = (queue >= 0).then_some(queue);
        let floor = asked.map(|queue| scene.history.floor(topic, queue));
        let batch = self.random.one_in(8) && topic != DOOMED;
        let level = if !batch && topic != DOOMED && self.random.one_in(12) {
            1 + self.random.below(3)
        } else {
            0
        };
        let count = if batch { 2 + self.random.below(4) } else { 1 };
        let most = if batch { 600 } else { scene.body_bytes_max };
        let mut numbers = Vec::new();
        let mut body = Vec::new();
        for _ in 0..count {
            let len = self.size(most);
            let number = scene.history.new_message(topic, asked, len, level > 0);
            numbers.push(number);
            let message = &scene.history.messages[number];
            let (key, unique) = (message.key.clone(), format!("U{number:030}"));
            if batch {
                let properties = encode_properties(&[("KEYS", &key), ("UNIQ_KEY", &unique)]);
                body.extend(((22 + message.body.len() + properties.len()) as i32).to_be_bytes());
                body.extend([0_u8; 12]);
                body.extend((message.body.len() as i32).to_be_bytes());
                body.extend(&message.body);
                body.extend((properties.len() as i16).to_be_bytes());
                body.extend(properties.as_bytes());
            } else {
                body.clone_from(&message.body);
            }
        }
        let first = numbers[0];
        let key = format!("key{first}");
        let unique = format!("U{first:030}");
        let level_text = level.to_string();
        let mut properties = vec![("KEYS", &*key), ("UNIQ_KEY", &*unique)];
        if level > 0 {
            properties.push(("DELAY", &level_text));
        }
        let fields = [
            ("a", self.group.clone()),
            ("b", topic.to_owned()),
            ("c", "TBW102".to_owned()),
            ("d", QUEUES.to_string()),
            ("e", queue.to_string()),
            ("f", "0".to_owned()),
            ("g", "1700000000000".to_owned()),
            ("h", "0".to_owned()),
            (
                "i",
                if batch {
                    String::new()
                } else {
                    encode_properties(&properties)
                },
            ),
            ("j", "0".to_owned()),
            ("k", "false".to_owned()),
            ("m", batch.to_string()),
        ];
        let mut frame = Frame::request(send_code(batch), &fields, &body);
        if self.random.one_in(25) && topic != DOOMED {
            frame.flag = FLAG_ONEWAY;
        }
        self.ask(frame, Pending::Send { numbers, floor }, scene);
    }

    fn pull(&mut self, topic: &str, queue: i32, offset: i64, wait_ms: u64, scene: &mut Scene<'_>) {
        let suspend = if wait_ms > 0 { 2 } else { 0 };
        let most = 1 + self.random.below(32);
        let fields = [
            ("consumerGroup", self.group.clone()),
            ("topic", topic.to_owned()),
            ("queueId", queue.to_string()),
            ("queueOffset", offset.to_string()),
            ("maxMsgNums", most.to_string()),
            ("sysFlag", (suspend | 4).to_string()),
            ("commitOffset", "0".to_owned()),
            ("suspendTimeoutMillis", wait_ms.to_string()),
            ("subscription", "*".to_owned()),
            ("subVersion", "0".to_owned()),
            ("expressionType", "TAG".to_owned()),
        ];
        let frame = Frame::request(code::PULL_MESSAGE, &fields, b"");
        let topic = topic.to_owned();
        self.ask(
            frame,
            Pending::Pull {
                topic,
                queue,
                offset,
            },
            scene,
        );
    }

    fn tail(&mut self, scene: &mut Scene<'_>) {
        let asked: Vec<i32> = self
            .pending
            .values()
            .filter_map(|pending| match pending {
                Pending::Pull { queue, .. } => Some(*queue),
                _ => None,
            })
            .collect();
        let Some(queue) = (0..QUEUES).find(|queue| !asked.contains(queue)) else {
            return;
        };
        let next = self.next.get(&("T0".to_owned(), queue)).copied();
        let offset = next.unwrap_or_else(|| scene.history.floor("T0", queue));
        let wait_ms = 1 + self.random.below(40);
        self.pull("T0", queue, offset, wait_ms, scene);
    }

    fn lag(&mut self, scene: &mut Scene<'_>) {
        let topic = TOPICS[self.random.below(3) as usize];
        let queue = self.random.below(QUEUES as u64) as i32;
        let end = scene.history.floor(topic, queue);
        let offset = self.random.below(end as u64 + 1) as i64;
        self.pull(topic, queue, offset, 0, scene);
    }

    fn queue_fields(&self, topic: &str, queue: i32) -> Vec<(&'static str, String)> {
        vec![
            ("consumerGroup", self.group.clone()),
            ("topic", topic.to_owned()),
            ("queueId", queue.to_string()),
        ]
    }

    /// Lock, ask where to begin, then pull and commit in turn.
    fn in_order(&mut self, queue: i32, scene: &mut Scene<'_>) {
        let topic = "T1";
        if !self.locked {
            let body = format!(
                "{{\"clientId\":\"{0}\",\"consumerGroup\":\"{0}\",\"mqSet\":[{{\"brokerName\":\
                 \"sim\",\"queueId\":{queue},\"topic\":\"{topic}\"}}]}}",
                self.group
            );
            let frame = Frame::request(LOCK_BATCH_MQ, &[], body.as_bytes());
            return self.ask(frame, Pending::Lock, scene);
        }
        if !self.positioned {
            let frame = Frame::request(
                code::QUERY_CONSUMER_OFFSET,
                &self.queue_fields(topic, queue),
                b"",
            );
            let topic = topic.to_owned();
            return self.ask(frame, Pending::Query { topic, queue }, scene);
        }
        let next = self
            .next
            .get(&(topic.to_owned(), queue))
            .copied()
            .unwrap_or(0);
        let key = (self.group.clone(), (topic.to_owned(), queue));
        let acked = scene
            .history
            .commits
            .get(&key)
            .and_then(|commit| commit.acked);
        if next > acked.unwrap_or(0) && self.random.one_in(2) {
            return self.commit(topic, queue, next, scene);
        }
        let wait_ms = self.random.below(20);
        self.pull(topic, queue, next, wait_ms, scene);
    }

    fn commit(&mut self, topic: &str, queue: i32, offset: i64, scene: &mut Scene<'_>) {
        let mut fields = self.queue_fields(topic, queue);
        fields.push(("commitOffset", offset.to_string()));
        let mut frame = Frame::request(code::UPDATE_CONSUMER_OFFSET, &fields, b"");
        if self.random.one_in(4) {
            frame.flag = FLAG_ONEWAY;
        }
        let topic = topic.to_owned();
        let key = (self.group.clone(), (topic.clone(), queue));
        let commit = scene.history.commits.entry(key).or_default();
        commit.maybe.push(offset);
        self.ask(
            frame,
            Pending::Commit {
                topic,
                queue,
                offset,
            },
            scene,
        );
    }

    fn retry(&mut self, scene: &mut Scene<'_>) {
        if let Some((number, topic, physical)) = self.last_read.take() {
            let fields = [
                ("group", self.group.clone()),
                ("offset", physical.to_string()),
                ("delayLevel", (1 + self.random.below(3)).to_string()),
                ("originMsgId", String::new()),
                ("originTopic", topic),
                ("unitMode", "false".to_owned()),
                ("maxReconsumeTimes", "16".to_owned()),
            ];
            let frame = Frame::request(CONSUMER_SEND_MSG_BACK, &fields, b"");
            return self.ask(frame, Pending::Back { number }, scene);
        }
        self.lag(scene);
    }

    fn administer(&mut self, scene: &mut Scene<'_>) {
        if self.random.one_in(3) {
            return self.look(scene);
        }
        self.doomed_step += 1;
        match self.doomed_step {
            1 => {
                let queues = 1 + self.random.below(3) as i32;
                self.create(DOOMED, queues, scene);
            }
            2..=5 => self.send_to(DOOMED, 0, scene),
            6 => {
                scene.history.deleting(DOOMED);
                let fields = [("topic", DOOMED.to_owned())];
                let frame = Frame::request(code::DELETE_TOPIC_IN_BROKER, &fields, b"");
                let topic = DOOMED.to_owned();
                self.ask(frame, Pending::Delete { topic }, scene);
            }
            _ => {
                self.doomed_step = 0;
                let name = format!("A{}", self.random.below(4));
                let queues = 1 + self.random.below(3) as i32;
                self.create(&name, queues, scene);
            }
        }
    }

    fn create(&mut self, topic: &str, queues: i32, scene: &mut Scene<'_>) {
        scene
            .history
            .topics
            .insert(topic.to_owned(), Topic::Unknown);
        let frame = create_topic(topic, queues);
        let topic = topic.to_owned();
        self.ask(frame, Pending::Create { topic, queues }, scene);
    }

    fn look(&mut self, scene: &mut Scene<'_>) {
        let topic = TOPICS[self.random.below(3) as usize];
        let fields = self.queue_fields(topic, 0);
        let frame = match self.random.below(4) {
            0 => Frame::request(code::GET_MAX_OFFSET, &fields, b""),
            1 => Frame::request(code::GET_MIN_OFFSET, &fields, b""),
            2 => Frame::request(21, &[], b""),
            _ => {
                let key = format!("key{}", self.random.below(200));
                query_by_key(topic, &key)
            }
        };
        self.ask(frame, Pending::Look, scene);
    }

    fn answered(&mut self, pending: Pending, frame: Frame, scene: &mut Scene<'_>) {
        let history = &mut *scene.history;
        match pending {
            Pending::Send { numbers, floor } => send_answered(&numbers, floor, frame, history),
            Pending::Pull {
                topic,
                queue,
                offset,
            } => self.pull_answered(topic, queue, offset, frame, history),
            Pending::Commit {
                topic,
                queue,
                offset,
            } if frame.code == 0 => {
                let key = (self.group.clone(), (topic, queue));
                let synced = history.synced;
                let commit = history.commits.entry(key).or_default();
                commit.acked = commit.acked.max(Some(offset));
                commit.durable = synced;
            }
            Pending::Query { topic, queue } => {
                self.positioned = frame.code == 0 || frame.code == 22;
                if frame.code == 0 {
                    let offset = frame.number("offset").unwrap();
                    self.next.insert((topic, queue), offset);
                }
            }
            Pending::Back { number } if frame.code == 0 => {
                history.backs.push((self.group.clone(), number, true));
            }
            Pending::Lock => self.locked = frame.code == 0,
            Pending::Create { topic, queues } if frame.code == 0 => {
                history.created(&topic, queues);
            }
            Pending::Delete { topic } if frame.code == 0 => history.deleted(&topic),
            Pending::Commit { .. }
            | Pending::Back { .. }
            | Pending::Create { .. }
            | Pending::Delete { .. }
            | Pending::Look => {}
        }
    }

    fn pull_answered(
        &mut self,
        topic: String,
        queue: i32,
        offset: i64,
        frame: Frame,
        history: &mut History,
    ) {
        let Ok(answer) = pulled(frame) else {
            return;
        };
        for (expected, record) in (offset..).zip(&answer.records) {
            assert_eq!(
                record.queue_offset, expected,
                "{topic}/{queue}: a hole or a double"
            );
            history.read(&topic, record);
            let number = super::history::number_of(&record.body);
            self.last_read = Some((number, topic.clone(), record.physical_offset));
        }
        let follows = matches!(self.role, Role::Tail | Role::Ordered { .. });
        if follows && matches!(answer.code, 0 | 19..=21) {
            self.next.insert((topic, queue), answer.next_offset);
        }
    }
}

fn send_code(batch: bool) -> i32 {
    if batch {
        code::SEND_BATCH_MESSAGE
    } else {
        code::SEND_MESSAGE_V2
    }
}

fn send_answered(numbers: &[usize], floor: Option<i64>, frame: Frame, history: &mut History) {
    let remark = frame.remark.clone().unwrap_or_default();
    if frame.code != 0 {
        history.refused += 1;
        // A poisoned or slow disk may still have stored what it cannot vouch for.
        if !remark.starts_with("disk:") {
            for number in numbers {
                history.messages[*number].fate = Fate::Refused;
            }
        }
        return;
    }
    let answer = sent(frame).expect("a whole answer");
    if history.messages[numbers[0]].fate == Fate::Unknown && !history.messages[numbers[0]].delayed {
        if let Some(floor) = floor {
            assert!(
                answer.queue_offset >= floor
                    || history.topics.get(&history.messages[numbers[0]].topic)
                        == Some(&Topic::Unknown),
                "message {} was sent when {floor} was next, and stands at {}",
                numbers[0],
                answer.queue_offset
            );
        }
        assert_eq!(answer.message_ids.len(), numbers.len());
    }
    for (index, number) in numbers.iter().enumerate() {
        let physical = physical_offset(&answer.message_ids[index]);
        let offset = answer.queue_offset + index as i64;
        history.acked(*number, answer.queue_id, offset, Some(physical));
    }
}

/// A request for a topic with as many read as write queues.
pub fn create_topic(topic: &str, queues: i32) -> Frame {
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
    Frame::request(code::UPDATE_AND_CREATE_TOPIC, &fields, b"")
}

/// A request for messages by key.
pub fn query_by_key(topic: &str, key: &str) -> Frame {
    let fields = [
        ("topic", topic.to_owned()),
        ("key", key.to_owned()),
        ("maxNum", "32".to_owned()),
        ("beginTimestamp", "0".to_owned()),
        ("endTimestamp", i64::MAX.to_string()),
    ];
    Frame::request(code::QUERY_MESSAGE, &fields, b"")
}
