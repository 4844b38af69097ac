//! Owns the sending loop: one thread, one poller, a schedule.
//!
//! Invariant: in an open loop request n is due at n / rate, whatever happened before; nothing is
//! skipped and nothing is re-scheduled. In a closed loop a message is due when it is sent.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::{Events, Poll, Token};

use crate::acks::note;
use crate::audit::Audit;
use crate::error::BenchError;
use crate::figures::quantile;
use crate::link::Link;
use crate::machine::{self, CpuReading};
use crate::measure::{CODE_CONNECTION, CODE_UNANSWERED, CODE_UNSENT, Measures};
use crate::plan::{Pace, Plan, SendMode};
use crate::progress::Progress;
use crate::readers::{Readers, Role};
use crate::session::resolve;
use crate::slots::{IN_FLIGHT_MAX, InFlight, Slots};
use crate::stamp::{self, Stamp};
use crate::template::{Body, Template, Variable};
use crate::topology::Topology;
use crate::verdict::Generator;

/// Sends in one turn, so that answers are read in between.
const SENDS_PER_TURN_MAX: usize = 256;
/// Messages in a row for one connection when several are due at once; spares system calls.
const RUN_LENGTH_MAX: usize = 4;
/// How long to wait for all connections to be there.
const CONNECT_TIME: Duration = Duration::from_secs(20);
/// Pause before a broken connection is opened again.
const REOPEN_AFTER_NS: u64 = 200_000_000;
/// Longest sleep in the poller.
const SLEEP_MAX: Duration = Duration::from_millis(20);
/// Sleeping is in milliseconds; closer to the next message than this the thread spins.
const SPIN_BELOW_NS: u64 = 2_000_000;
/// Rate from which turns keep apart, and how far: answers and due messages then come in groups, and
/// the share of time at work says how much more the generator could do.
const GROUPED_RATE_MIN: u64 = 50_000;
const GROUPED_TURN_NS: u64 = 10_000;
/// How often progress is told.
const PROGRESS_EVERY_NS: u64 = 100_000_000;
const SUCCESS: i32 = 0;

/// What one loop came to.
#[derive(Debug)]
pub struct LoopResult {
    /// What decided when messages went.
    pub pace: Pace,
    /// What was counted.
    pub measures: Measures,
    /// How the generator fared.
    pub generator: Generator,
    /// CPU time of the server in the window, for each message acknowledged in it.
    pub server_cpu_us: Option<f64>,
    /// CPU time of the generator in the window, for each message acknowledged in it.
    pub generator_cpu_us: f64,
    /// When it began.
    pub started: SystemTime,
    /// Seconds measured.
    pub duration_s: f64,
    /// Seconds before them.
    pub warm_up_s: f64,
}

impl LoopResult {
    /// Messages acknowledged in each second of the window.
    pub fn achieved(&self) -> f64 {
        self.measures.window_acked as f64 / self.duration_s
    }
}

/// Everything that sends, and what reads beside it.
pub struct Load<'a> {
    plan: &'a Plan,
    topology: &'a Topology,
    progress: &'a Progress,
    poll: Poll,
    links: Vec<Link>,
    /// Links with bytes to send.
    unsent: Vec<usize>,
    reopen_at_ns: Vec<u64>,
    broken: usize,
    next_link: usize,
    /// Requests put on `next_link` in a row.
    run_length: usize,
    /// By queue.
    templates: Vec<Template>,
    /// By broker.
    next_queue: Vec<usize>,
    body: Body,
    slots: Slots,
    measures: Measures,
    /// What is looked for afterwards.
    pub audit: Option<Audit>,
    /// Readers of the tail and of old messages.
    pub readers: Vec<(Role, Readers<'a>)>,
    run: u64,
    started: Instant,
    started_at: SystemTime,
    started_ns: u64,
    /// Number of the next message.
    pub sequence: u64,
    /// Requests of this loop.
    requests: u64,
    pace: Pace,
    end_ns: u64,
    told_ns: u64,
    /// Last time the server was the reason that nothing could be sent.
    held_back_ns: u64,
    busy_ns: u64,
    idle_ns: u64,
}

/// Seconds in nanoseconds.
pub fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// A number for a run that no other run has.
pub fn new_run() -> u64 {
    machine::wall_ns() ^ u64::from(std::process::id()) << 48
}

impl<'a> Load<'a> {
    /// Everything that sends for a plan; connects to nobody yet.
    pub fn new(
        plan: &'a Plan,
        topology: &'a Topology,
        progress: &'a Progress,
        run: u64,
    ) -> Result<Self, BenchError> {
        let mut links = Vec::new();
        for number in 0..plan.connections {
            let broker = number % topology.brokers.len().max(1);
            let mut link = Link::new(broker, resolve(topology.address(broker))?, Token(number));
            if plan.mode == SendMode::Sync {
                link.in_flight_max = 1;
            }
            links.push(link);
        }
        let body = Body::new(plan, run)?;
        let templates = topology
            .queues
            .iter()
            .map(|queue| Template::new(plan, topology.topic_of(*queue), queue.id, &body))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            plan,
            topology,
            progress,
            poll: Poll::new().map_err(BenchError::io("create a poller"))?,
            reopen_at_ns: vec![0; links.len()],
            broken: 0,
            unsent: Vec::new(),
            measures: Measures::new(0, 0, 0)?,
            links,
            next_link: 0,
            run_length: 0,
            templates,
            next_queue: vec![0; topology.brokers.len()],
            body,
            slots: Slots::new(IN_FLIGHT_MAX),
            audit: None,
            readers: Vec::new(),
            run,
            started: Instant::now(),
            started_at: SystemTime::now(),
            started_ns: 0,
            sequence: 0,
            requests: 0,
            pace: Pace::Closed(1),
            end_ns: 0,
            told_ns: 0,
            held_back_ns: 0,
            busy_ns: 0,
            idle_ns: 0,
        })
    }

    /// Keeps what is acknowledged from here on; `ends` are the ends of the queues now.
    pub fn begin_audit(&mut self, ends: &[i64]) {
        let body = stamp::body(self.run, self.plan.body_bytes);
        self.audit = Some(Audit::new(self.run, self.sequence, &body, ends));
    }

    /// The first token that is free for connections of readers.
    pub fn next_token(&self) -> usize {
        let readers = self.readers.iter();
        self.links.len() + readers.map(|(_, group)| group.links.len()).sum::<usize>()
    }

    /// Adds readers and connects them.
    pub fn add_readers(&mut self, role: Role, mut readers: Readers<'a>) -> Result<(), BenchError> {
        readers.open(self.poll.registry())?;
        self.readers.push((role, readers));
        self.wait_for_connections()
    }

    /// Takes readers out and closes them.
    pub fn remove_readers(&mut self, role: Role) {
        for (_, readers) in self.readers.iter_mut().filter(|(of, _)| *of == role) {
            for link in &mut readers.links {
                link.close(self.poll.registry());
            }
        }
        self.readers.retain(|(of, _)| *of != role);
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Opens all connections and waits until they are there.
    pub fn connect(&mut self) -> Result<(), BenchError> {
        for link in &mut self.links {
            link.open(self.poll.registry())?;
        }
        self.wait_for_connections()
    }

    fn wait_for_connections(&mut self) -> Result<(), BenchError> {
        let mut events = Events::with_capacity(1_024);
        let deadline = Instant::now() + CONNECT_TIME;
        loop {
            let readers = self.readers.iter().flat_map(|(_, group)| &group.links);
            if self.links.iter().chain(readers).all(Link::is_connected) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(BenchError::Option(format!(
                    "not all connections came up in {} s",
                    CONNECT_TIME.as_secs()
                )));
            }
            self.poll_events(&mut events, SLEEP_MAX)?;
            self.take_events(&events);
        }
    }

    fn poll_events(&mut self, events: &mut Events, timeout: Duration) -> Result<(), BenchError> {
        match self.poll.poll(events, Some(timeout)) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            result => result.map_err(BenchError::io("wait for sockets")),
        }
    }

    /// Runs one loop: warm-up, window, and the wait for the last answers.
    pub fn run(
        &mut self,
        pace: Pace,
        warm_up_s: f64,
        duration_s: f64,
    ) -> Result<LoopResult, BenchError> {
        let from_ns = nanoseconds(warm_up_s);
        self.end_ns = from_ns + nanoseconds(duration_s);
        self.measures = Measures::new(self.links.len(), from_ns, self.end_ns)?;
        self.slots.set_limit(match pace {
            Pace::Open(_) => IN_FLIGHT_MAX,
            Pace::Closed(in_flight) => in_flight,
        });
        (self.pace, self.requests) = (pace, 0);
        (self.busy_ns, self.idle_ns, self.held_back_ns, self.told_ns) = (0, 0, 0, 0);
        let pids = machine::pids(self.plan.server_pids.as_deref())?;
        self.started = Instant::now();
        self.started_at = SystemTime::now();
        self.started_ns = machine::wall_ns();
        let label = format!("{} {}", pace.label(), self.plan.label);
        self.progress.begin(&label, warm_up_s + duration_s);
        self.turns_until(from_ns)?;
        let before = CpuReading::now(&pids);
        (self.busy_ns, self.idle_ns) = (0, 0);
        self.turns_until(self.end_ns)?;
        let spent = CpuReading::now(&pids).since(&before);
        self.drain()?;
        let now_ns = self.now_ns();
        self.measures.close(now_ns, self.due_messages(now_ns));
        self.progress.end();
        let empty = Measures::new(0, 0, 0)?;
        let measures = std::mem::replace(&mut self.measures, empty);
        Ok(self.result(measures, &spent, warm_up_s, duration_s))
    }

    fn result(
        &self,
        measures: Measures,
        spent: &CpuReading,
        warm_up_s: f64,
        duration_s: f64,
    ) -> LoopResult {
        let whole_ns = (self.busy_ns + self.idle_ns).max(1) as f64;
        let window_ns = duration_s * 1e9;
        let per_message = |ns: u64| ns as f64 / 1e3 / measures.window_acked.max(1) as f64;
        let late = &measures.own_lateness;
        let generator = Generator {
            busy_share: self.busy_ns as f64 / whole_ns,
            cpu_share: spent.own_ns as f64 / window_ns,
            delay_share: spent.delay_ns as f64 / window_ns,
            lateness_p99_ns: quantile(late, 0.99).unwrap_or_else(|| late.max()),
            interval_ns: match self.pace {
                Pace::Open(rate) => {
                    let requests = rate as f64 / self.plan.messages_per_request() as f64;
                    Some(self.links.len() as f64 * 1e9 / requests)
                }
                Pace::Closed(_) => None,
            },
        };
        LoopResult {
            pace: self.pace,
            generator,
            server_cpu_us: spent
                .server_ns
                .filter(|_| measures.window_acked > 0)
                .map(per_message),
            generator_cpu_us: per_message(spent.own_ns),
            measures,
            started: self.started_at,
            duration_s,
            warm_up_s,
        }
    }

    fn turns_until(&mut self, end_ns: u64) -> Result<(), BenchError> {
        let mut events = Events::with_capacity(1_024);
        let mut turn_ns = self.now_ns();
        let apart_ns = match self.pace {
            Pace::Open(rate) if rate >= GROUPED_RATE_MIN => GROUPED_TURN_NS,
            _ => 0,
        };
        while turn_ns < end_ns {
            let sent = self.send_due(turn_ns);
            self.flush(turn_ns);
            self.pump_readers(turn_ns);
            let timeout = self.sleep(sent);
            let asleep = timeout > Duration::ZERO;
            let before_ns = if asleep { self.now_ns() } else { turn_ns };
            self.poll_events(&mut events, timeout)?;
            let after_ns = if asleep { self.now_ns() } else { turn_ns };
            self.take_events(&events);
            self.reopen(after_ns);
            self.tell(after_ns);
            let mut now_ns = self.now_ns();
            let slept_ns = after_ns - before_ns;
            let worked_ns = (now_ns - turn_ns).saturating_sub(slept_ns);
            if sent > 0 || !events.is_empty() {
                self.busy_ns += worked_ns;
                self.idle_ns += slept_ns;
            } else {
                self.idle_ns += worked_ns + slept_ns;
            }
            let worked_until_ns = now_ns;
            while now_ns < turn_ns + apart_ns {
                std::hint::spin_loop();
                now_ns = self.now_ns();
            }
            self.idle_ns += now_ns - worked_until_ns;
            turn_ns = now_ns;
        }
        Ok(())
    }

    /// Sends what was due before the end and has not gone, waits for the answers that are still
    /// missing, and counts what never goes or never comes: a stall must not take messages out.
    fn drain(&mut self) -> Result<(), BenchError> {
        let mut events = Events::with_capacity(1_024);
        let deadline_ns = self.end_ns + nanoseconds(self.plan.drain_s);
        while self.now_ns() < deadline_ns
            && (self.slots.len() > 0 || self.has_unsent() || self.has_due())
        {
            let now_ns = self.now_ns();
            let sent = self.send_due(now_ns);
            self.flush(now_ns);
            self.pump_readers(now_ns);
            let timeout = if sent > 0 { Duration::ZERO } else { SLEEP_MAX };
            self.poll_events(&mut events, timeout)?;
            self.take_events(&events);
        }
        let now_ns = self.now_ns();
        for message in self.slots.abandon(None) {
            let why = "no answer before the end";
            self.measures.failed(&message, now_ns, CODE_UNANSWERED, why);
        }
        for link in &mut self.links {
            link.in_flight = 0;
        }
        self.count_unsent(now_ns);
        Ok(())
    }

    /// Whether requests that were due before the end have not gone.
    fn has_due(&self) -> bool {
        self.next_due_ns()
            .is_some_and(|due_ns| due_ns < self.end_ns)
    }

    fn count_unsent(&mut self, now_ns: u64) {
        if !self.has_due() {
            return;
        }
        let messages = self.plan.messages_per_request();
        let due = self.due_messages(self.end_ns) / messages;
        let unsent = due.saturating_sub(self.requests) * messages;
        let message = InFlight {
            count: u32::try_from(unsent).unwrap_or(u32::MAX),
            ..InFlight::default()
        };
        let why = "due before the end and not sent until the last answers were waited for";
        self.measures.failed(&message, now_ns, CODE_UNSENT, why);
    }

    fn has_unsent(&self) -> bool {
        self.links.iter().any(Link::has_unsent)
    }

    /// Messages that were due before a time.
    fn due_messages(&self, now_ns: u64) -> u64 {
        match self.pace {
            Pace::Open(rate) => {
                let until_ns = u128::from(now_ns.min(self.end_ns));
                (until_ns * u128::from(rate) / 1_000_000_000) as u64
            }
            Pace::Closed(_) => self.measures.sent,
        }
    }

    fn tell(&mut self, now_ns: u64) {
        if now_ns < self.told_ns + PROGRESS_EVERY_NS {
            return;
        }
        self.told_ns = now_ns;
        let due = self.due_messages(now_ns);
        self.measures.tick(now_ns, due);
        let failed = self.measures.failures_total();
        let answered = self.measures.answered;
        self.progress.tell(
            now_ns,
            answered - failed,
            failed,
            due.saturating_sub(answered),
        );
    }

    /// When the next request is due; none when it is now.
    fn next_due_ns(&self) -> Option<u64> {
        match self.pace {
            Pace::Open(rate) => {
                let messages = self.requests * self.plan.messages_per_request();
                Some(due_ns(messages, rate))
            }
            Pace::Closed(_) => None,
        }
    }

    /// Sends what is due; returns how many.
    fn send_due(&mut self, now_ns: u64) -> usize {
        let mut sent = 0;
        self.run_length = RUN_LENGTH_MAX;
        while sent < SENDS_PER_TURN_MAX {
            let due_ns = self.next_due_ns().unwrap_or(now_ns);
            if due_ns > now_ns || due_ns >= self.end_ns {
                break;
            }
            if self.slots.is_full() || !self.send(due_ns, now_ns) {
                self.held_back_ns = now_ns;
                break;
            }
            sent += 1;
        }
        sent
    }

    /// Appends one request to the next connection that takes it; false if none does.
    fn send(&mut self, due_ns: u64, now_ns: u64) -> bool {
        let count = self.links.len();
        let first = self.next_link + usize::from(self.run_length >= RUN_LENGTH_MAX);
        let found = (0..count)
            .map(|step| (first + step) % count)
            .find(|at| self.links.get(*at).is_some_and(Link::takes_more));
        let Some(at) = found else { return false };
        self.run_length = if at == self.next_link {
            self.run_length + 1
        } else {
            1
        };
        self.next_link = at;
        let Some(link) = self.links.get_mut(at) else {
            return false;
        };
        let (Some(queues), Some(next)) = (
            self.topology.of_broker.get(link.broker),
            self.next_queue.get_mut(link.broker),
        ) else {
            return false;
        };
        let Some(queue) = queues.get(*next % queues.len().max(1)).copied() else {
            return false;
        };
        let Some(template) = self.templates.get(queue) else {
            return false;
        };
        let message = InFlight {
            due_ns,
            sent_ns: now_ns,
            sequence: self.sequence,
            behind: self
                .audit
                .as_ref()
                .map_or(-1, |audit| audit.acked_to(queue)),
            queue,
            link: at,
            count: self.body.messages(),
        };
        let Some(opaque) = self.slots.take(message) else {
            return false;
        };
        *next += 1;
        let variable = Variable {
            opaque,
            born_ms: (self.started_ns + now_ns) / 1_000_000,
            stamp: Stamp {
                run: self.run,
                sequence: self.sequence,
                born_ns: self.started_ns + due_ns,
            },
        };
        if !link.has_unsent() {
            self.unsent.push(at);
        }
        template.append(&mut link.out, variable, &self.body);
        self.sequence += u64::from(message.count);
        self.requests += 1;
        // Whatever was due before the server last held us back is late because of the server.
        self.measures.sent(&message, due_ns <= self.held_back_ns);
        if self.plan.mode == SendMode::OneWay {
            self.slots.finish(opaque as i32);
            self.measures.answered_by_nobody(&message);
        } else {
            link.in_flight += 1;
        }
        true
    }

    fn flush(&mut self, now_ns: u64) {
        let mut unsent = std::mem::take(&mut self.unsent);
        unsent.retain(|at| {
            let result = self.links.get_mut(*at).map_or(Ok(()), Link::flush);
            if let Err(error) = result {
                self.lose(*at, now_ns, &error.to_string());
            }
            self.links.get(*at).is_some_and(Link::has_unsent)
        });
        self.unsent = unsent;
    }

    fn pump_readers(&mut self, now_ns: u64) {
        for (_, readers) in &mut self.readers {
            readers.pump(now_ns, self.poll.registry());
        }
    }

    fn take_events(&mut self, events: &Events) {
        for event in events {
            let at = event.token().0;
            let readable = event.is_readable() || event.is_error() || event.is_read_closed();
            if at >= self.links.len() {
                self.reader_event(event.token(), event.is_writable(), readable);
                continue;
            }
            if event.is_writable()
                && let Some(Err(error)) = self.links.get_mut(at).map(Link::now_writable)
            {
                let now_ns = self.now_ns();
                self.lose(at, now_ns, &error.to_string());
            }
            if readable {
                self.receive(at);
            }
        }
    }

    fn reader_event(&mut self, token: Token, writable: bool, readable: bool) {
        let now_ns = self.now_ns();
        let wall_ns = self.started_ns + now_ns;
        let (measures, run) = (&mut self.measures, self.run);
        for (role, readers) in &mut self.readers {
            let Some(at) = readers.link_of(token) else {
                continue;
            };
            let registry = self.poll.registry();
            if writable {
                readers.now_writable(at, now_ns, registry);
            }
            if readable {
                let is_cold = *role == Role::Cold;
                readers.receive(at, now_ns, registry, |_, record| {
                    if is_cold {
                        measures.cold_read(now_ns, record.total_len());
                    } else if let Some(stamp) = Stamp::read(record.body())
                        && stamp.run == run
                    {
                        measures.delivered(now_ns, wall_ns.saturating_sub(stamp.born_ns));
                    }
                });
            }
        }
    }

    fn receive(&mut self, at: usize) {
        let started = self.started;
        let (slots, measures, audit) = (&mut self.slots, &mut self.measures, &mut self.audit);
        let Some(link) = self.links.get_mut(at) else {
            return;
        };
        let now = std::cell::Cell::new(0);
        let mut finished = 0;
        let result = link.receive(
            || now.set(started.elapsed().as_nanos() as u64),
            |header, _| {
                let Some(message) = slots.finish(header.opaque) else {
                    return;
                };
                finished += 1;
                if header.code == SUCCESS {
                    measures.acked(&message, now.get());
                    if let Some(audit) = audit {
                        note(audit, header, &message);
                    }
                } else {
                    let remark = header.remark.map(|text| text.to_string());
                    let remark = remark.unwrap_or_default();
                    measures.failed(&message, now.get(), header.code, &remark);
                }
            },
        );
        link.in_flight = link.in_flight.saturating_sub(finished);
        if let Err(error) = result {
            let now_ns = self.now_ns();
            self.lose(at, now_ns, &error.to_string());
        }
    }

    /// A connection broke: everything on it failed, and it is opened again after a pause.
    fn lose(&mut self, at: usize, now_ns: u64, why: &str) {
        let Some(link) = self.links.get_mut(at).filter(|link| link.is_open()) else {
            return;
        };
        link.close(self.poll.registry());
        self.broken += 1;
        if let Some(reopen) = self.reopen_at_ns.get_mut(at) {
            *reopen = now_ns + REOPEN_AFTER_NS;
        }
        for message in self.slots.abandon(Some(at)) {
            self.measures.failed(&message, now_ns, CODE_CONNECTION, why);
        }
    }

    fn reopen(&mut self, now_ns: u64) {
        if self.broken == 0 {
            return;
        }
        for (link, reopen_at_ns) in self.links.iter_mut().zip(&mut self.reopen_at_ns) {
            if *reopen_at_ns != 0 && now_ns >= *reopen_at_ns && !link.is_open() {
                let failed = link.open(self.poll.registry()).is_err();
                *reopen_at_ns = if failed { now_ns + REOPEN_AFTER_NS } else { 0 };
                self.broken -= usize::from(!failed);
            }
        }
    }

    /// How long nothing can be due.
    fn sleep(&self, sent: usize) -> Duration {
        if sent == SENDS_PER_TURN_MAX {
            return Duration::ZERO;
        }
        let now_ns = self.now_ns();
        if self.slots.is_full() || self.held_back_ns + 1_000_000 > now_ns && sent == 0 {
            return SLEEP_MAX.min(Duration::from_millis(1));
        }
        let Some(due_ns) = self.next_due_ns() else {
            return Duration::ZERO;
        };
        let until_ns = due_ns.min(self.end_ns).saturating_sub(now_ns);
        if until_ns < SPIN_BELOW_NS {
            return Duration::ZERO;
        }
        Duration::from_millis(until_ns / 1_000_000 - 1).min(SLEEP_MAX)
    }
}

/// When message n of a schedule is due.
pub fn due_ns(sequence: u64, rate: u64) -> u64 {
    (u128::from(sequence) * 1_000_000_000 / u128::from(rate)) as u64
}

/// Wall clock of a moment, in nanoseconds since 1970.
pub fn since_epoch_ns(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_is_fixed_and_does_not_drift() {
        assert_eq!(due_ns(0, 3), 0);
        assert_eq!(due_ns(1, 3), 333_333_333);
        assert_eq!(due_ns(3, 3), 1_000_000_000);
        assert_eq!(due_ns(300_000 * 86_400, 300_000), 86_400 * 1_000_000_000);
    }
}
