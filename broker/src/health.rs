//! Answers to probes: `/live`, `/ready` and `/metrics` over HTTP/1.1, on a thread of its own.
//!
//! Invariant: no shard ever waits for this. State comes in through atomics, requests are short,
//! bounded in bytes and in time, and one is served at a time, so that a flood of probes costs one
//! thread and no more.

use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest request head that is read.
pub const REQUEST_BYTES_MAX: usize = 4_096;

/// Longest time one request may take from accept to answer.
pub const REQUEST_TIME_MAX: Duration = Duration::from_millis(500);

/// Longest reason that is kept.
pub const REASON_BYTES_MAX: usize = 512;

/// Pause after an accept that failed, so that a shortage of descriptors does not burn a core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What the broker is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Coming up; nothing was read yet.
    Starting = 0,
    /// Reading what the last run left.
    Recovering = 1,
    /// Serving clients.
    Serving = 2,
    /// Finishing what is in flight.
    Draining = 3,
    /// Serving reads only, or nothing: a write failed.
    Failed = 4,
}

impl Phase {
    fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Starting,
            1 => Self::Recovering,
            2 => Self::Serving,
            3 => Self::Draining,
            _ => Self::Failed,
        }
    }

    /// The word in answers.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Recovering => "recovering",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Failed => "failed",
        }
    }
}

/// State that the broker keeps and probes read.
#[derive(Debug)]
pub struct Health {
    phase: AtomicU8,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    started: Instant,
    reason: Mutex<String>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            phase: AtomicU8::new(0),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            started: Instant::now(),
            reason: Mutex::new(String::new()),
        }
    }
}

impl Health {
    /// Enters a phase.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    /// The phase now.
    #[must_use]
    pub fn phase(&self) -> Phase {
        Phase::from_number(self.phase.load(Ordering::Acquire))
    }

    /// Adds to the bytes recovery has to read.
    pub fn add_recovery_total(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds to the bytes recovery has read.
    pub fn add_recovery_done(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Says why the phase is what it is. Called from the control task at most, never from a shard.
    pub fn set_reason(&self, reason: &str) {
        let mut end = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let mut kept = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        kept.clear();
        kept.push_str(reason.get(..end).unwrap_or_default());
    }

    /// Recovery's progress in percent and the seconds it may still take.
    #[must_use]
    pub fn progress(&self) -> (u64, Option<u64>) {
        if matches!(self.phase(), Phase::Serving | Phase::Draining) {
            return (100, Some(0));
        }
        let elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let total = self.total_bytes.load(Ordering::Relaxed);
        let done = self.done_bytes.load(Ordering::Relaxed).min(total);
        progress_of(done, total, elapsed_ms)
    }

    fn json(&self) -> String {
        let (percent, eta) = self.progress();
        let eta = eta.map_or("null".to_owned(), |seconds| seconds.to_string());
        let reason = self
            .reason
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        // Text as JSON cannot fail.
        let reason = serde_json::to_string(&reason).unwrap_or_else(|_| "\"\"".to_owned());
        let state = self.phase().word();
        format!(
            "{{\"state\":\"{state}\",\"percent\":{percent},\"etaSeconds\":{eta},\
             \"reason\":{reason}}}\n"
        )
    }
}

fn progress_of(done: u64, total: u64, elapsed_ms: u64) -> (u64, Option<u64>) {
    if total == 0 || done == 0 {
        return (0, None);
    }
    // The last percent is for what comes after reading; 100 is said when serving only.
    let percent = (u128::from(done) * 100 / u128::from(total)).min(99);
    let left_ms = u128::from(elapsed_ms) * u128::from(total - done) / u128::from(done);
    (
        percent.try_into().unwrap_or(99),
        u64::try_from(left_ms.div_ceil(1000)).ok(),
    )
}

/// Makes the text of `/metrics`.
pub type Metrics = Arc<dyn Fn() -> String + Send + Sync>;

/// The running server. Dropping it stops the thread.
#[derive(Debug)]
pub struct HealthServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HealthServer {
    /// Binds the port and starts the thread.
    ///
    /// # Errors
    /// When the port cannot be bound or the thread not be started.
    pub fn start(address: SocketAddr, health: Arc<Health>, metrics: Metrics) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stop_seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("health".to_owned())
            .spawn(move || serve(&listener, &stop_seen, &health, &metrics))?;
        Ok(Self {
            address,
            stop,
            thread: Some(thread),
        })
    }

    /// The address it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HealthServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let mut target = self.address;
        if target.ip().is_unspecified() {
            target.set_ip(match target {
                SocketAddr::V4(_) => [127, 0, 0, 1].into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        // Wakes the thread out of its accept; it looks at the flag before anything else.
        let woken = TcpStream::connect_timeout(&target, REQUEST_TIME_MAX).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            // A thread that died has nothing left to wait for.
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, stop: &AtomicBool, health: &Health, metrics: &Metrics) {
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::Acquire) {
            return;
        }
        match accepted {
            // A client that goes away is its own loss.
            Ok((stream, _)) => drop(answer(stream, health, metrics)),
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
    }
}

fn answer(mut stream: TcpStream, health: &Health, metrics: &Metrics) -> io::Result<()> {
    let deadline = Instant::now() + REQUEST_TIME_MAX;
    let Some(head) = read_head(&mut stream, deadline)? else {
        return respond(
            &mut stream,
            deadline,
            400,
            "text/plain",
            "the request is too long\n",
            true,
        );
    };
    let line = head.lines().next().unwrap_or_default();
    let mut words = line.split(' ');
    let (method, target) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    let path = target.split('?').next().unwrap_or_default();
    if !matches!(method, "GET" | "HEAD") {
        return respond(
            &mut stream,
            deadline,
            405,
            "text/plain",
            "only GET is answered\n",
            true,
        );
    }
    let with_body = method == "GET";
    match path {
        "/live" => respond(
            &mut stream,
            deadline,
            200,
            "application/json",
            &health.json(),
            with_body,
        ),
        "/ready" => {
            let status = if health.phase() == Phase::Serving {
                200
            } else {
                503
            };
            respond(
                &mut stream,
                deadline,
                status,
                "application/json",
                &health.json(),
                with_body,
            )
        }
        "/metrics" => {
            let kind = "text/plain; version=0.0.4; charset=utf-8";
            respond(&mut stream, deadline, 200, kind, &metrics(), with_body)
        }
        _ => {
            let text = "there are /live, /ready and /metrics\n";
            respond(&mut stream, deadline, 404, "text/plain", text, with_body)
        }
    }
}

/// Reads up to the empty line; nothing when the head is longer than allowed.
fn read_head(stream: &mut TcpStream, deadline: Instant) -> io::Result<Option<String>> {
    let mut head = Vec::with_capacity(512);
    let mut chunk = [0_u8; 512];
    while !head.windows(4).any(|end| end == b"\r\n\r\n")
        && !head.windows(2).any(|end| end == b"\n\n")
    {
        if head.len() >= REQUEST_BYTES_MAX {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left_until(deadline)?))?;
        match stream.read(&mut chunk)? {
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            read => head.extend_from_slice(chunk.get(..read).unwrap_or_default()),
        }
    }
    Ok(Some(String::from_utf8_lossy(&head).into_owned()))
}

fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(io::Error::from(io::ErrorKind::TimedOut))
    } else {
        Ok(left)
    }
}

fn respond(
    stream: &mut TcpStream,
    deadline: Instant,
    status: u16,
    kind: &str,
    body: &str,
    with_body: bool,
) -> io::Result<()> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        _ => "Service Unavailable",
    };
    let mut text = String::with_capacity(body.len() + 160);
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if with_body {
        text.push_str(body);
    }
    let mut rest = text.as_bytes();
    // Written in parts, since a reader that takes its time must not renew the time it has.
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left_until(deadline)?))?;
        match stream.write(rest)? {
            0 => return Err(io::Error::from(io::ErrorKind::WriteZero)),
            written => rest = rest.get(written..).unwrap_or_default(),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(health: &Arc<Health>) -> HealthServer {
        let metrics: Metrics = Arc::new(|| "pinion_up 1\n".to_owned());
        HealthServer::start(([127, 0, 0, 1], 0).into(), Arc::clone(health), metrics).unwrap()
    }

    fn ask(server: &HealthServer, request: &str) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    fn get(server: &HealthServer, path: &str) -> String {
        ask(server, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n"))
    }

    #[test]
    fn live_answers_with_progress_while_ready_says_not_yet() {
        let health = Arc::new(Health::default());
        let server = server(&health);
        assert!(get(&server, "/live").starts_with("HTTP/1.1 200 "));
        health.set_phase(Phase::Recovering);
        health.add_recovery_total(1_000);
        health.add_recovery_done(420);
        health.set_reason("shard 1: \"tail\"");
        let live = get(&server, "/live?verbose");
        assert!(
            live.contains("\"state\":\"recovering\",\"percent\":42,\"etaSeconds\":"),
            "{live}"
        );
        assert!(live.contains("\\\"tail\\\""), "{live}");
        assert!(get(&server, "/ready").starts_with("HTTP/1.1 503 "));
        health.set_phase(Phase::Serving);
        let ready = get(&server, "/ready");
        assert!(
            ready.starts_with("HTTP/1.1 200 ") && ready.contains("\"percent\":100"),
            "{ready}"
        );
        for phase in [Phase::Draining, Phase::Failed] {
            health.set_phase(phase);
            assert!(get(&server, "/ready").starts_with("HTTP/1.1 503 "));
            assert!(get(&server, "/live").starts_with("HTTP/1.1 200 "));
        }
    }

    #[test]
    fn metrics_come_from_the_closure_and_other_requests_are_turned_away() {
        let server = server(&Arc::new(Health::default()));
        assert!(get(&server, "/metrics").ends_with("\r\n\r\npinion_up 1\n"));
        assert!(get(&server, "/other").starts_with("HTTP/1.1 404 "));
        assert!(ask(&server, "POST /live HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        let head = ask(&server, "HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(
            head.contains("Content-Length: 12\r\n") && head.ends_with("\r\n\r\n"),
            "{head}"
        );
        let long = format!("GET /live HTTP/1.1\r\nX: {}", "x".repeat(REQUEST_BYTES_MAX));
        assert!(!ask(&server, &long).contains("200 OK"));
    }

    #[test]
    fn a_client_that_says_nothing_holds_others_up_for_the_limit_only() {
        let server = server(&Arc::new(Health::default()));
        let silent = TcpStream::connect(server.address()).unwrap();
        let started = Instant::now();
        assert!(get(&server, "/live").starts_with("HTTP/1.1 200 "));
        assert!(
            started.elapsed() < REQUEST_TIME_MAX * 4,
            "{:?}",
            started.elapsed()
        );
        drop(silent);
    }

    #[test]
    fn dropping_the_server_frees_the_port() {
        let first = server(&Arc::new(Health::default()));
        let address = first.address();
        drop(first);
        assert!(TcpListener::bind(address).is_ok());
    }

    #[test]
    fn progress_is_never_said_to_be_complete_before_serving() {
        assert_eq!(progress_of(0, 0, 10), (0, None));
        assert_eq!(progress_of(0, 10, 10), (0, None));
        assert_eq!(progress_of(5, 10, 4_000), (50, Some(4)));
        assert_eq!(progress_of(10, 10, 4_000), (99, Some(0)));
        assert_eq!(progress_of(u64::MAX, u64::MAX, u64::MAX).0, 99);
    }
}
