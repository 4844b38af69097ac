//! Probes of the name server: a small append on each broker, again and again.
//!
//! A probe is an ordinary send to the topic that every broker has under its own name, so it works
//! for Apache's brokers too and goes the way that messages go.
//!
//! Invariant: at most [`IN_FLIGHT_MAX`] probes of a broker are under way, each ends as an answer, a
//! failure or a time-out after [`TIMEOUT_US`], and a cluster too small for the fuse is not probed.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use shard::runtime::{ConnectionId, Driver};
use wire::codes::{request, response};
use wire::frame::Serialization;
use wire::header::{ExtValue, Header, encode_request};

use super::connections::Purpose;
use super::state::State;
use crate::fuse::Sample;
use crate::namesrv::watch::ProbeTarget;

/// Time between two probes of a broker, in microseconds.
const PERIOD_US: u64 = 300_000;
/// Time after which a probe has failed, in microseconds.
const TIMEOUT_US: u64 = 900_000;
/// Probes of a broker under way.
const IN_FLIGHT_MAX: usize = 4;
/// Producer group that probes name.
const GROUP: &str = "pinion_fuse_probe";
/// Answers that say a broker cannot take messages now. Any other answer shows a live broker.
const SICK_CODES: [i32; 6] = [
    response::SYSTEM_ERROR,
    response::SYSTEM_BUSY,
    response::FLUSH_DISK_TIMEOUT,
    response::SLAVE_NOT_AVAILABLE,
    response::FLUSH_SLAVE_TIMEOUT,
    response::SERVICE_NOT_AVAILABLE,
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    Down,
    Dialling { id: u64, since_us: u64 },
    Up(u64),
}

impl Link {
    fn connection(self) -> Option<u64> {
        match self {
            Self::Up(id) | Self::Dialling { id, .. } => Some(id),
            Self::Down => None,
        }
    }
}

#[derive(Debug)]
struct Probed {
    number: usize,
    address: SocketAddr,
    link: Link,
    /// Opaque number and time of the probes under way, oldest first.
    sent: VecDeque<(i32, u64)>,
}

/// The probes of a name server.
#[derive(Debug, Default)]
pub struct Prober {
    brokers: BTreeMap<String, Probed>,
    due_us: u64,
    next_number: usize,
    opaque: i32,
}

impl Prober {
    /// When it has something to do next, in monotonic microseconds.
    #[must_use]
    pub fn deadline_us(&self) -> Option<u64> {
        (!self.brokers.is_empty()).then_some(self.due_us)
    }

    fn by_number(&mut self, number: usize) -> Option<(&str, &mut Probed)> {
        self.brokers
            .iter_mut()
            .find(|(_, probed)| probed.number == number)
            .map(|(name, probed)| (name.as_str(), probed))
    }

    /// Follows the list of brokers; returns connections that are not needed any more.
    fn follow(&mut self, targets: Vec<ProbeTarget>) -> Vec<u64> {
        let mut before = std::mem::take(&mut self.brokers);
        let mut unneeded = Vec::new();
        for target in targets {
            let probed = match before.remove(&target.broker_name) {
                Some(probed) if probed.address == target.address => probed,
                moved => {
                    unneeded.extend(moved.and_then(|probed| probed.link.connection()));
                    self.next_number += 1;
                    Probed {
                        number: self.next_number,
                        address: target.address,
                        link: Link::Down,
                        sent: VecDeque::new(),
                    }
                }
            };
            self.brokers.insert(target.broker_name, probed);
        }
        let gone = before.into_values();
        unneeded.extend(gone.filter_map(|probed| probed.link.connection()));
        unneeded
    }
}

/// A send of a few bytes to queue 0 of the broker's own topic.
fn probe_frame(out: &mut Vec<u8>, opaque: i32, broker_name: &str, wall_ms: i64) {
    let ext = [
        ("a", ExtValue::Str(GROUP)),
        ("b", ExtValue::Str(broker_name)),
        ("c", ExtValue::Str("TBW102")),
        ("d", ExtValue::Int(1)),
        ("e", ExtValue::Int(0)),
        ("f", ExtValue::Int(0)),
        ("g", ExtValue::Int(wall_ms)),
        ("h", ExtValue::Int(0)),
        ("i", ExtValue::Str("")),
        ("j", ExtValue::Int(0)),
        ("k", ExtValue::Bool(false)),
        ("m", ExtValue::Bool(false)),
    ];
    let (json, code) = (Serialization::Json, request::SEND_MESSAGE_V2);
    encode_request(out, json, code, opaque, false, &ext, b"probe");
}

impl State {
    /// Sends the probes that are due and has the fuse decide.
    pub fn probe_turn<D: Driver>(&mut self, driver: &mut D) {
        let now_us = self.now.monotonic_us;
        let Some(task) = self.name_server.as_deref_mut() else {
            return;
        };
        if now_us < task.prober.due_us || self.stopping {
            return;
        }
        task.prober.due_us = now_us + PERIOD_US;
        let targets = task.server.probe_targets();
        self.to_close.extend(task.prober.follow(targets));
        let mut opaque = task.prober.opaque;
        for (name, probed) in &mut task.prober.brokers {
            let mut failed = |reason: String| {
                let sample = Sample::Failed(reason);
                task.server.observe_probe(now_us / 1000, name, sample);
            };
            while let Some((_, at_us)) = probed.sent.front()
                && now_us >= at_us + TIMEOUT_US
            {
                probed.sent.pop_front();
                failed(format!("append not answered in {} ms", TIMEOUT_US / 1000));
            }
            match probed.link {
                Link::Down => {
                    let id = driver.connect(probed.address);
                    let purpose = Purpose::Probe(probed.number);
                    self.net.insert(id, purpose, probed.address, now_us);
                    let since_us = now_us;
                    probed.link = Link::Dialling { id: id.0, since_us };
                }
                Link::Dialling { id, since_us } if now_us >= since_us + TIMEOUT_US => {
                    self.to_close.push(id);
                    probed.link = Link::Down;
                    failed(format!("no connection in {} ms", TIMEOUT_US / 1000));
                }
                Link::Dialling { .. } => {}
                Link::Up(id) if probed.sent.len() < IN_FLIGHT_MAX => {
                    if let Some(out) = self.net.output(id) {
                        opaque = opaque.wrapping_add(1) & i32::MAX;
                        probe_frame(out, opaque, name, self.now.wall_ms);
                        probed.sent.push_back((opaque, now_us));
                    }
                }
                Link::Up(_) => {}
            }
        }
        task.prober.opaque = opaque;
        task.server.watch(now_us / 1000);
    }

    /// A connection to a probed broker is up.
    pub fn probe_up(&mut self, number: usize, connection: ConnectionId) {
        if let Some(task) = self.name_server.as_deref_mut()
            && let Some((_, probed)) = task.prober.by_number(number)
        {
            probed.link = Link::Up(connection.0);
        }
    }

    /// A connection to a probed broker is gone or could not be made.
    pub fn probe_down(&mut self, number: usize, connection: ConnectionId) {
        let now_ms = self.now.monotonic_us / 1000;
        let Some(task) = self.name_server.as_deref_mut() else {
            return;
        };
        let Some((name, probed)) = task.prober.by_number(number) else {
            return;
        };
        if probed.link.connection() == Some(connection.0) {
            probed.link = Link::Down;
            probed.sent.clear();
            let sample = Sample::Failed("connection refused or closed".to_owned());
            task.server.observe_probe(now_ms, name, sample);
        }
    }

    /// A probed broker answered.
    pub fn on_probe_answer(&mut self, number: usize, header: &Header<'_>) {
        let now_us = self.now.monotonic_us;
        let Some(task) = self.name_server.as_deref_mut() else {
            return;
        };
        let Some((name, probed)) = task.prober.by_number(number) else {
            return;
        };
        let found = probed
            .sent
            .iter()
            .position(|(opaque, _)| *opaque == header.opaque);
        let Some((_, at_us)) = found.and_then(|at| probed.sent.remove(at)) else {
            return;
        };
        let sample = if SICK_CODES.contains(&header.code) {
            let remark = header.remark.map(|text| text.to_cow().into_owned());
            let remark = remark.unwrap_or_default();
            Sample::Failed(format!("append answered code {}: {remark}", header.code))
        } else {
            Sample::Took(now_us.saturating_sub(at_us))
        };
        task.server.observe_probe(now_us / 1000, name, sample);
    }
}
