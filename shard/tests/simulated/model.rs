//! What a shard has been asked to do and what it has said, in the order of its log.

use std::collections::BTreeMap;

use wire::message::RecordView;

/// One thing in the log.
#[derive(Clone, Debug)]
pub enum What {
    /// A message as it is stored.
    Message {
        topic: String,
        queue_id: i32,
        offset: i64,
        raw: Vec<u8>,
    },
    /// A committed offset.
    Commit {
        topic: String,
        group: String,
        queue_id: i32,
        offset: i64,
    },
    /// A removed topic.
    Remove { topic: String },
}

/// One thing with the position behind it.
#[derive(Clone, Debug)]
pub struct Op {
    pub end: u64,
    pub what: What,
}

/// Everything up to the end of the log.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub ops: Vec<Op>,
    /// Position in front of which retention may have dropped messages.
    pub dropped_before: u64,
    /// Position up to which acknowledgements have been sent.
    pub acked: u64,
    /// Position up to which the last recovery handed the log over.
    pub recovered: u64,
}

/// A message of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub offset: i64,
    pub position: u64,
    pub raw: Vec<u8>,
}

impl Stored {
    pub fn stored_ms(&self) -> i64 {
        RecordView::parse(&self.raw).unwrap().store_timestamp()
    }
}

pub type Queues = BTreeMap<(String, i32), Vec<Stored>>;
pub type Commits = BTreeMap<(String, String, i32), (i64, u64)>;

impl Model {
    pub fn push(&mut self, end: u64, what: What) {
        let at = self.ops.partition_point(|op| op.end < end);
        self.ops.insert(at, Op { end, what });
    }

    /// Whether something that ends here is known.
    pub fn knows(&self, end: u64) -> bool {
        self.ops.binary_search_by_key(&end, |op| op.end).is_ok()
    }

    /// Forgets what a crash took.
    pub fn cut(&mut self, end: u64) {
        self.ops.retain(|op| op.end <= end);
    }

    /// Messages by queue, of topics as they are now.
    pub fn queues(&self) -> Queues {
        let mut queues = Queues::new();
        for op in &self.ops {
            match &op.what {
                What::Message {
                    topic,
                    queue_id,
                    offset,
                    raw,
                } => {
                    let queue = queues.entry((topic.clone(), *queue_id)).or_default();
                    assert_eq!(
                        *offset,
                        queue.len() as i64,
                        "{topic} {queue_id}: dense offsets"
                    );
                    let position = op.end - raw.len() as u64;
                    queue.push(Stored {
                        offset: *offset,
                        position,
                        raw: raw.clone(),
                    });
                }
                What::Remove { topic } => queues.retain(|(name, _), _| name != topic),
                What::Commit { .. } => {}
            }
        }
        queues
    }

    /// Committed offsets with the position behind the commit.
    pub fn commits(&self) -> Commits {
        let mut commits = Commits::new();
        for op in &self.ops {
            match &op.what {
                What::Commit {
                    topic,
                    group,
                    queue_id,
                    offset,
                } => {
                    let key = (topic.clone(), group.clone(), *queue_id);
                    commits.insert(key, (*offset, op.end));
                }
                What::Remove { topic } => commits.retain(|(name, ..), _| name != topic),
                What::Message { .. } => {}
            }
        }
        commits
    }
}
