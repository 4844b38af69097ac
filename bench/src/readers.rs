//! Owns connections that pull: readers of the tail, of old messages, and of a range to the end.
//!
//! Invariant: each queue has at most one pull in flight; records are handed over in the order of
//! the queue, and every offset that is skipped is counted as a gap.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use mio::{Events, Poll, Registry, Token};
use wire::codes::{request, response};
use wire::header::{ExtValue, Header, encode_request};
use wire::message::RecordView;

use crate::error::BenchError;
use crate::link::Link;
use crate::plan::Plan;
use crate::session::resolve;
use crate::topology::Topology;

/// Flag of a pull that may wait for messages.
const PULL_MAY_WAIT: i64 = 2;
/// Flag of a pull that brings its own subscription.
const PULL_WITH_SUBSCRIPTION: i64 = 4;
/// How long such a pull waits at the broker.
const WAIT_MS: i64 = 15_000;
/// Pause after a refused pull.
const PAUSE_NS: u64 = 5_000_000;
/// Pulls in a row that may find nothing before the end of a range; then what is missing is missing.
const EMPTY_PULLS_MAX: u32 = 1_000;
/// Pause before a broken connection is opened again.
const REOPEN_AFTER_NS: u64 = 200_000_000;

/// How long nothing may come of a range before it is given up.
pub const STALL: Duration = Duration::from_secs(30);
/// Connections that read ranges to their ends.
const ONCE_CONNECTIONS: usize = 4;
const SLEEP: Duration = Duration::from_millis(2);

/// What is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// From the end on, waiting for what comes.
    Tail,
    /// From the start to the end, and again.
    Cold,
    /// From a start to an end, once.
    Once,
}

/// What went wrong, or slowly.
#[derive(Clone, Default, PartialEq, Debug, serde::Serialize)]
pub struct ReaderCounts {
    /// Messages read.
    pub messages: u64,
    /// Bytes of their records.
    pub bytes: u64,
    /// Offsets skipped or handed out twice.
    pub gaps: u64,
    /// Records that cannot be read.
    pub damaged: u64,
    /// Refused pulls by code.
    pub refused: BTreeMap<i32, u64>,
    /// Times a connection broke.
    pub broken: u64,
}

#[derive(Clone, Copy, Debug)]
struct Pull {
    queue: usize,
    link: usize,
    begin: i64,
    next: i64,
    end: i64,
    not_before_ns: u64,
    empty: u32,
}

/// The readers of one role.
#[derive(Debug)]
pub struct Readers<'a> {
    /// Their connections.
    pub links: Vec<Link>,
    /// What they counted.
    pub counts: ReaderCounts,
    topology: &'a Topology,
    role: Role,
    pulls: Vec<Pull>,
    idle: VecDeque<usize>,
    done: usize,
    first_token: usize,
    reopen_at_ns: Vec<u64>,
    batch: u32,
    group: String,
}

impl<'a> Readers<'a> {
    /// Readers of the ranges `begins..ends` (the ends count for [`Role::Once`] and
    /// [`Role::Cold`]); tokens of their connections begin at `first_token`.
    pub fn new(
        plan: &Plan,
        topology: &'a Topology,
        role: Role,
        connections: usize,
        first_token: usize,
        ranges: &[(i64, i64)],
    ) -> Result<Self, BenchError> {
        let brokers = topology.brokers.len().max(1);
        let connections = connections.max(brokers);
        let mut links = Vec::new();
        for number in 0..connections {
            let broker = number % brokers;
            let address = resolve(topology.address(broker))?;
            links.push(Link::new(broker, address, Token(first_token + number)));
        }
        let mut taken = vec![0; brokers];
        let mut pulls = Vec::new();
        for (queue, (place, (begin, end))) in topology.queues.iter().zip(ranges).enumerate() {
            let of_broker = (connections - place.broker).div_ceil(brokers);
            let Some(turn) = taken.get_mut(place.broker) else {
                continue;
            };
            let link = place.broker + (*turn % of_broker.max(1)) * brokers;
            *turn += 1;
            pulls.push(Pull {
                queue,
                link,
                begin: *begin,
                next: *begin,
                end: *end,
                not_before_ns: 0,
                empty: 0,
            });
        }
        let needed = |pull: &Pull| role == Role::Tail || pull.next < pull.end;
        let idle: VecDeque<usize> = (0..pulls.len())
            .filter(|at| pulls.get(*at).is_some_and(needed))
            .collect();
        Ok(Self {
            done: pulls.len() - idle.len(),
            reopen_at_ns: vec![0; links.len()],
            links,
            counts: ReaderCounts::default(),
            topology,
            role,
            pulls,
            idle,
            first_token,
            batch: plan.pull_batch,
            group: plan.group.clone(),
        })
    }

    /// Begins to connect.
    pub fn open(&mut self, registry: &Registry) -> Result<(), BenchError> {
        self.links
            .iter_mut()
            .try_for_each(|link| link.open(registry))
    }

    /// The connection of a token, if it is one of these.
    pub fn link_of(&self, token: Token) -> Option<usize> {
        let at = token.0.checked_sub(self.first_token)?;
        (at < self.links.len()).then_some(at)
    }

    /// Whether everything was read ([`Role::Once`]).
    pub fn is_done(&self) -> bool {
        self.done == self.pulls.len()
    }

    /// Sends the pulls that can be, and what still waits for its socket.
    pub fn pump(&mut self, now_ns: u64, registry: &Registry) {
        for _ in 0..self.idle.len() {
            let Some(at) = self.idle.pop_front() else {
                break;
            };
            if !self.send(at, now_ns) {
                self.idle.push_back(at);
            }
        }
        for at in 0..self.links.len() {
            let flushed = self.links.get_mut(at).map_or(Ok(()), Link::flush);
            if flushed.is_err() {
                self.lose(at, now_ns, registry);
            }
        }
        for (link, reopen_at_ns) in self.links.iter_mut().zip(&mut self.reopen_at_ns) {
            if *reopen_at_ns != 0 && now_ns >= *reopen_at_ns {
                let failed = link.open(registry).is_err();
                *reopen_at_ns = if failed { now_ns + REOPEN_AFTER_NS } else { 0 };
            }
        }
    }

    fn send(&mut self, at: usize, now_ns: u64) -> bool {
        let topology = self.topology;
        let Some(pull) = self.pulls.get(at).copied() else {
            return true;
        };
        let Some(link) = self.links.get_mut(pull.link) else {
            return true;
        };
        if now_ns < pull.not_before_ns || !link.takes_more() {
            return false;
        }
        let Some(queue) = topology.queues.get(pull.queue).copied() else {
            return true;
        };
        let waits = self.role == Role::Tail;
        let flags = PULL_WITH_SUBSCRIPTION + if waits { PULL_MAY_WAIT } else { 0 };
        let ext = [
            ("consumerGroup", ExtValue::Str(&self.group)),
            ("topic", ExtValue::Str(topology.topic_of(queue))),
            ("queueId", ExtValue::Int(queue.id.into())),
            ("queueOffset", ExtValue::Int(pull.next)),
            ("maxMsgNums", ExtValue::Int(self.batch.into())),
            ("sysFlag", ExtValue::Int(flags)),
            ("commitOffset", ExtValue::Int(0)),
            (
                "suspendTimeoutMillis",
                ExtValue::Int(if waits { WAIT_MS } else { 0 }),
            ),
            ("subscription", ExtValue::Str("*")),
            ("subVersion", ExtValue::Int(0)),
            ("expressionType", ExtValue::Str("TAG")),
        ];
        let opaque = at as i32 + 1;
        let json = wire::frame::Serialization::Json;
        let code = request::PULL_MESSAGE;
        encode_request(&mut link.out, json, code, opaque, false, &ext, &[]);
        true
    }

    /// Reads what came on a connection and hands over every record with its queue.
    pub fn receive(
        &mut self,
        at: usize,
        now_ns: u64,
        registry: &Registry,
        mut record: impl FnMut(usize, &RecordView<'_>),
    ) {
        let Some(link) = self.links.get_mut(at) else {
            return;
        };
        let (pulls, counts, idle) = (&mut self.pulls, &mut self.counts, &mut self.idle);
        let (role, done) = (self.role, &mut self.done);
        let result = link.receive(
            || {},
            |header, body| {
                let number = usize::try_from(header.opaque - 1).unwrap_or(usize::MAX);
                let Some(pull) = pulls.get_mut(number).filter(|pull| pull.link == at) else {
                    return;
                };
                take_answer(pull, counts, header, body, now_ns, &mut record);
                if role == Role::Cold && pull.next >= pull.end {
                    pull.next = pull.begin;
                }
                let is_over = pull.next >= pull.end || pull.empty > EMPTY_PULLS_MAX;
                if role == Role::Once && is_over {
                    *done += 1;
                } else {
                    idle.push_back(number);
                }
            },
        );
        if result.is_err() {
            self.lose(at, now_ns, registry);
        }
    }

    /// A connection may take bytes again.
    pub fn now_writable(&mut self, at: usize, now_ns: u64, registry: &Registry) {
        let result = self.links.get_mut(at).map(Link::now_writable);
        if matches!(result, Some(Err(_))) {
            self.lose(at, now_ns, registry);
        }
    }

    fn lose(&mut self, at: usize, now_ns: u64, registry: &Registry) {
        self.counts.broken += 1;
        if let (Some(link), Some(reopen)) = (self.links.get_mut(at), self.reopen_at_ns.get_mut(at))
        {
            link.close(registry);
            *reopen = now_ns + REOPEN_AFTER_NS;
        }
        let role = self.role;
        let is_over = |pull: &Pull| pull.next >= pull.end || pull.empty > EMPTY_PULLS_MAX;
        let needed = |pull: &Pull| pull.link == at && (role != Role::Once || !is_over(pull));
        self.idle.retain(|number| {
            let pull = self.pulls.get(*number);
            pull.is_some_and(|pull| pull.link != at)
        });
        for (number, pull) in self.pulls.iter().enumerate() {
            if needed(pull) {
                self.idle.push_back(number);
            }
        }
    }
}

fn take_answer(
    pull: &mut Pull,
    counts: &mut ReaderCounts,
    header: &Header<'_>,
    body: &[u8],
    now_ns: u64,
    record: &mut impl FnMut(usize, &RecordView<'_>),
) {
    match header.code {
        response::SUCCESS => {
            let mut rest = body;
            pull.empty = 0;
            while !rest.is_empty() {
                let Ok(view) = RecordView::parse(rest) else {
                    counts.damaged += 1;
                    pull.next += 1;
                    break;
                };
                counts.messages += 1;
                counts.bytes += view.total_len() as u64;
                counts.gaps += view.queue_offset().abs_diff(pull.next);
                pull.next = view.queue_offset() + 1;
                record(pull.queue, &view);
                rest = rest.get(view.total_len()..).unwrap_or_default();
            }
        }
        response::PULL_NOT_FOUND | response::PULL_RETRY_IMMEDIATELY => {
            let next = header.ext.i64("nextBeginOffset").ok().flatten();
            let next = next.unwrap_or(pull.next);
            counts.gaps += next.abs_diff(pull.next);
            pull.next = next;
            pull.empty += 1;
            pull.not_before_ns = now_ns + PAUSE_NS / 5;
        }
        response::PULL_OFFSET_MOVED => {
            let next = header.ext.i64("nextBeginOffset").ok().flatten();
            let next = next.unwrap_or(pull.next);
            // Retention may have taken the start of an old queue; that is no gap.
            if pull.next > pull.begin {
                counts.gaps += next.abs_diff(pull.next);
            }
            pull.next = next;
            pull.empty += 1;
            pull.not_before_ns = now_ns + PAUSE_NS;
        }
        code => {
            *counts.refused.entry(code).or_default() += 1;
            pull.not_before_ns = now_ns + PAUSE_NS;
        }
    }
}

/// Reads ranges to their ends and hands over every record with its queue; false in the answer when
/// nothing came any more before the ends.
pub fn read_to_end(
    plan: &Plan,
    topology: &Topology,
    ranges: &[(i64, i64)],
    mut record: impl FnMut(usize, &RecordView<'_>),
) -> Result<(bool, ReaderCounts), BenchError> {
    let mut poll = Poll::new().map_err(BenchError::io("create a poller"))?;
    let mut readers = Readers::new(plan, topology, Role::Once, ONCE_CONNECTIONS, 0, ranges)?;
    readers.open(poll.registry())?;
    let mut events = Events::with_capacity(256);
    let begun = Instant::now();
    let (mut last, mut moved) = (0, Instant::now());
    while !readers.is_done() {
        let now_ns = begun.elapsed().as_nanos() as u64;
        readers.pump(now_ns, poll.registry());
        match poll.poll(&mut events, Some(SLEEP)) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            result => result.map_err(BenchError::io("wait for sockets"))?,
        }
        for event in &events {
            let Some(at) = readers.link_of(event.token()) else {
                continue;
            };
            if event.is_writable() {
                readers.now_writable(at, now_ns, poll.registry());
            }
            if event.is_readable() || event.is_error() || event.is_read_closed() {
                readers.receive(at, now_ns, poll.registry(), &mut record);
            }
        }
        if readers.counts.messages > last {
            (last, moved) = (readers.counts.messages, Instant::now());
        } else if moved.elapsed() > STALL {
            return Ok((false, readers.counts));
        }
    }
    Ok((true, readers.counts))
}
