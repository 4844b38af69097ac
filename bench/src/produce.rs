//! Owns the sending run: one thread, one poller, a schedule.
//!
//! Invariant: in an open loop message n is due at n / rate, whatever happened before; nothing is
//! skipped and nothing is re-scheduled. In a closed loop a message is due when it is sent.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::{Events, Poll, Token};

use crate::cli::ProduceOptions;
use crate::error::BenchError;
use crate::link::Link;
use crate::measure::{CODE_CONNECTION, CODE_UNANSWERED, Generator, Measures};
use crate::session::{BrokerQueues, find_topic, resolve};
use crate::slots::{IN_FLIGHT_MAX, InFlight, Slots};
use crate::stamp::{self, STAMP_BYTES, Stamp};
use crate::template::{Template, Variable};
use crate::{machine, report};

/// Sends in one turn, so that answers are read in between.
const SENDS_PER_TURN_MAX: usize = 256;
/// Messages in a row for one connection when several are due at once; spares system calls.
const RUN_LENGTH_MAX: usize = 4;
/// Most connections.
const CONNECTIONS_MAX: usize = 4_096;
/// Largest body.
const BODY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// How long to wait for all connections to be there.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// Pause before a broken connection is opened again.
const REOPEN_AFTER_NS: u64 = 200_000_000;
/// Longest sleep in the poller.
const SLEEP_MAX: Duration = Duration::from_millis(20);
/// Sleeping is in milliseconds; closer to the next message than this the thread spins.
const SPIN_BELOW_NS: u64 = 2_000_000;
const SUCCESS: i32 = 0;

/// Everything of one run.
struct Producer<'a> {
    options: &'a ProduceOptions,
    poll: Poll,
    links: Vec<Link>,
    reopen_at_ns: Vec<u64>,
    next_link: usize,
    /// Messages put on `next_link` in a row.
    run_length: usize,
    /// By broker, then by queue.
    templates: Vec<Vec<Template>>,
    next_template: Vec<usize>,
    slots: Slots,
    measures: Measures,
    run: u64,
    body: Vec<u8>,
    started: Instant,
    started_ms: u64,
    sequence: u64,
    end_ns: u64,
    /// Last time the server was the reason that nothing could be sent.
    held_back_ns: u64,
    busy_ns: u64,
    idle_ns: u64,
}

/// Runs `produce`; true when the figures can be trusted and nothing failed.
pub fn run(options: &ProduceOptions) -> Result<bool, BenchError> {
    check(options)?;
    machine::pin(options.topic.core)?;
    let brokers = find_topic(&options.topic)?;
    let environment = machine::describe();
    let mut producer = Producer::new(options, &brokers)?;
    producer.connect()?;
    let delay_ns = machine::run_delay_ns();
    producer.send_all()?;
    let delay_ns = machine::run_delay_ns().saturating_sub(delay_ns);
    producer.drain()?;
    let whole_ns = (producer.busy_ns + producer.idle_ns).max(1);
    let generator = Generator {
        busy_share: producer.busy_ns as f64 / whole_ns as f64,
        delay_share: delay_ns as f64 / producer.end_ns as f64,
        can_idle: options.rate.is_none(),
        late_share: producer.measures.late_by_generator as f64
            / producer.measures.window_sent.max(1) as f64,
    };
    let report = report::Report {
        options,
        brokers: &brokers,
        measures: &producer.measures,
        generator,
        run: producer.run,
        sent_total: producer.sequence,
        environment,
    };
    report.print();
    report.write()?;
    Ok(generator.complaints().is_empty() && producer.measures.failures_total() == 0)
}

fn check(options: &ProduceOptions) -> Result<(), BenchError> {
    let wrong = |text: String| Err(BenchError::Option(text));
    if !(STAMP_BYTES..=BODY_BYTES_MAX).contains(&options.body_bytes) {
        return wrong(format!(
            "--body-bytes must be {STAMP_BYTES} to {BODY_BYTES_MAX}"
        ));
    }
    if !(1..=CONNECTIONS_MAX).contains(&options.connections) {
        return wrong(format!("--connections must be 1 to {CONNECTIONS_MAX}"));
    }
    if !(1..=IN_FLIGHT_MAX).contains(&options.in_flight) {
        return wrong(format!("--in-flight must be 1 to {IN_FLIGHT_MAX}"));
    }
    if options.rate == Some(0) || options.rate > Some(1_000_000_000) {
        return wrong("--rate must be 1 to 1000000000".to_owned());
    }
    let times = [options.duration_s, options.warm_up_s, options.drain_s];
    if times
        .iter()
        .any(|seconds| !(0.0..=86_400.0).contains(seconds))
        || options.duration_s == 0.0
    {
        return wrong("times must be 0 to 86400 seconds, and --duration-s not 0".to_owned());
    }
    Ok(())
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

impl<'a> Producer<'a> {
    fn new(options: &'a ProduceOptions, brokers: &[BrokerQueues]) -> Result<Self, BenchError> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let run = now.as_nanos() as u64 ^ u64::from(std::process::id()) << 48;
        let mut links = Vec::new();
        for number in 0..options.connections {
            let broker = number % brokers.len().max(1);
            let address = brokers.get(broker).map(|broker| broker.address.as_str());
            links.push(Link::new(
                broker,
                resolve(address.unwrap_or_default())?,
                Token(number),
            ));
        }
        let form = options.topic.headers.serialization();
        let templates = brokers
            .iter()
            .map(|broker| {
                let queues = 0..broker.write_queues;
                queues
                    .map(|id| Template::new(form, &options.topic.topic, id, options.body_bytes))
                    .collect::<Result<Vec<_>, _>>()
            })
            .collect::<Result<Vec<_>, _>>()?;
        let from_ns = nanoseconds(options.warm_up_s);
        let end_ns = from_ns + nanoseconds(options.duration_s);
        Ok(Self {
            options,
            poll: Poll::new().map_err(BenchError::io("create a poller"))?,
            reopen_at_ns: vec![0; links.len()],
            links,
            next_link: 0,
            run_length: 0,
            next_template: vec![0; templates.len()],
            templates,
            slots: Slots::new(options.in_flight),
            measures: Measures::new(from_ns, end_ns)?,
            run,
            body: stamp::body(run, options.body_bytes),
            started: Instant::now(),
            started_ms: now.as_millis() as u64,
            sequence: 0,
            end_ns,
            held_back_ns: 0,
            busy_ns: 0,
            idle_ns: 0,
        })
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Opens all connections and waits until they are there; the run's time begins afterwards.
    fn connect(&mut self) -> Result<(), BenchError> {
        for link in &mut self.links {
            link.open(self.poll.registry())?;
        }
        let mut events = Events::with_capacity(self.links.len());
        let deadline = Instant::now() + CONNECT_TIME;
        while !self.links.iter().all(Link::takes_more) {
            if Instant::now() > deadline {
                return Err(BenchError::Option(
                    "not all connections came up in 10 s".to_owned(),
                ));
            }
            self.poll_events(&mut events, Some(SLEEP_MAX))?;
            for event in &events {
                if event.is_writable()
                    && let Some(link) = self.links.get_mut(event.token().0)
                {
                    link.now_writable()
                        .map_err(BenchError::io("connect to a broker"))?;
                }
            }
        }
        self.started = Instant::now();
        Ok(())
    }

    fn poll_events(
        &mut self,
        events: &mut Events,
        timeout: Option<Duration>,
    ) -> Result<(), BenchError> {
        match self.poll.poll(events, timeout) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            result => result.map_err(BenchError::io("wait for sockets")),
        }
    }

    fn send_all(&mut self) -> Result<(), BenchError> {
        let mut events = Events::with_capacity(1_024);
        let mut turn_ns = self.now_ns();
        while turn_ns < self.end_ns {
            let sent = self.send_due(turn_ns);
            self.flush(turn_ns);
            let timeout = self.sleep(sent);
            let asleep = timeout > Duration::ZERO;
            let before_ns = if asleep { self.now_ns() } else { turn_ns };
            self.poll_events(&mut events, Some(timeout))?;
            let after_ns = if asleep { self.now_ns() } else { turn_ns };
            self.take_events(&events);
            self.reopen(after_ns);
            let end_ns = self.now_ns();
            let slept_ns = after_ns - before_ns;
            let worked_ns = (end_ns - turn_ns).saturating_sub(slept_ns);
            if sent > 0 || !events.is_empty() {
                self.busy_ns += worked_ns;
                self.idle_ns += slept_ns;
            } else {
                self.idle_ns += worked_ns + slept_ns;
            }
            turn_ns = end_ns;
        }
        Ok(())
    }

    /// Waits for the answers that are still missing and counts those that never come.
    fn drain(&mut self) -> Result<(), BenchError> {
        let mut events = Events::with_capacity(1_024);
        let deadline_ns = self.end_ns + nanoseconds(self.options.drain_s);
        while self.slots.len() > 0 && self.now_ns() < deadline_ns {
            let now_ns = self.now_ns();
            self.flush(now_ns);
            self.poll_events(&mut events, Some(SLEEP_MAX))?;
            self.take_events(&events);
        }
        let now_ns = self.now_ns();
        for message in self.slots.abandon(None) {
            self.measures.failed(
                &message,
                now_ns,
                CODE_UNANSWERED,
                "no answer before the end",
            );
        }
        Ok(())
    }

    /// Sends what is due; returns how many.
    fn send_due(&mut self, now_ns: u64) -> usize {
        let mut sent = 0;
        self.run_length = RUN_LENGTH_MAX;
        while sent < SENDS_PER_TURN_MAX {
            let due_ns = match self.options.rate {
                Some(rate) => due_ns(self.sequence, rate),
                None => now_ns,
            };
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

    /// Appends one message to the next connection that takes it; false if none does.
    fn send(&mut self, due_ns: u64, now_ns: u64) -> bool {
        let count = self.links.len();
        let first = self.next_link + usize::from(self.run_length >= RUN_LENGTH_MAX);
        let wanted = (0..count).map(|step| (first + step) % count);
        let found = wanted
            .into_iter()
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
        let message = InFlight {
            due_ns,
            sent_ns: now_ns,
            sequence: self.sequence,
            link: at,
        };
        let (Some(templates), Some(next)) = (
            self.templates.get(link.broker),
            self.next_template.get_mut(link.broker),
        ) else {
            return false;
        };
        let Some(template) = templates.get(*next % templates.len().max(1)) else {
            return false;
        };
        let Some(opaque) = self.slots.take(message) else {
            return false;
        };
        *next += 1;
        let variable = Variable {
            opaque,
            born_ms: self.started_ms + now_ns / 1_000_000,
            stamp: Stamp {
                run: self.run,
                sequence: self.sequence,
            },
        };
        template.append(&mut link.out, variable, &self.body);
        self.sequence += 1;
        // Whatever was due before the server last held us back is late because of the server.
        self.measures
            .sent(due_ns, now_ns, due_ns <= self.held_back_ns);
        true
    }

    fn flush(&mut self, now_ns: u64) {
        for at in 0..self.links.len() {
            let result = self.links.get_mut(at).map_or(Ok(()), Link::flush);
            if let Err(error) = result {
                self.lose(at, now_ns, &error.to_string());
            }
        }
    }

    fn take_events(&mut self, events: &Events) {
        for event in events {
            let at = event.token().0;
            if event.is_writable()
                && let Some(Err(error)) = self.links.get_mut(at).map(Link::now_writable)
            {
                let now_ns = self.now_ns();
                self.lose(at, now_ns, &error.to_string());
            }
            if event.is_readable() || event.is_error() || event.is_read_closed() {
                self.receive(at);
            }
        }
    }

    fn receive(&mut self, at: usize) {
        let started = self.started;
        let (slots, measures) = (&mut self.slots, &mut self.measures);
        let Some(link) = self.links.get_mut(at) else {
            return;
        };
        let now = std::cell::Cell::new(0);
        let result = link.receive(
            || now.set(started.elapsed().as_nanos() as u64),
            |header| {
                let Some(message) = slots.finish(header.opaque) else {
                    return;
                };
                if header.code == SUCCESS {
                    measures.acked(&message, now.get());
                } else {
                    let remark = header
                        .remark
                        .map(|text| text.to_string())
                        .unwrap_or_default();
                    measures.failed(&message, now.get(), header.code, &remark);
                }
            },
        );
        if let Err(error) = result {
            let now_ns = self.now_ns();
            self.lose(at, now_ns, &error.to_string());
        }
    }

    /// A connection broke: everything on it failed, and it is opened again after a pause.
    fn lose(&mut self, at: usize, now_ns: u64, why: &str) {
        if let Some(link) = self.links.get_mut(at) {
            link.close(self.poll.registry());
        }
        if let Some(reopen) = self.reopen_at_ns.get_mut(at) {
            *reopen = now_ns + REOPEN_AFTER_NS;
        }
        for message in self.slots.abandon(Some(at)) {
            self.measures.failed(&message, now_ns, CODE_CONNECTION, why);
        }
    }

    fn reopen(&mut self, now_ns: u64) {
        for (link, reopen_at_ns) in self.links.iter_mut().zip(&mut self.reopen_at_ns) {
            if *reopen_at_ns != 0 && now_ns >= *reopen_at_ns && !link.is_open() {
                let failed = link.open(self.poll.registry()).is_err();
                *reopen_at_ns = if failed { now_ns + REOPEN_AFTER_NS } else { 0 };
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
        let Some(rate) = self.options.rate else {
            return Duration::ZERO;
        };
        let until_ns = due_ns(self.sequence, rate)
            .min(self.end_ns)
            .saturating_sub(now_ns);
        if until_ns < SPIN_BELOW_NS {
            return Duration::ZERO;
        }
        Duration::from_millis(until_ns / 1_000_000 - 1).min(SLEEP_MAX)
    }
}

/// When message n of a schedule is due.
fn due_ns(sequence: u64, rate: u64) -> u64 {
    (u128::from(sequence) * 1_000_000_000 / u128::from(rate)) as u64
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
