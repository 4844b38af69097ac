//! Owns the rate of route queries: what a name server answers, in turns of many requests.
//!
//! Invariant: every answer counted is a success with a body; a turn writes all its requests before
//! it reads an answer, so that the server always has as many in hand as the plan says.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use wire::codes::{request, response};
use wire::frame::{FRAME_BYTES_MAX, split};
use wire::header::{ExtValue, decode, encode_request};

use crate::error::BenchError;
use crate::output::{self, RunDir};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::scenario::Summary;
use crate::session::resolve;
use crate::topology::Topology;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Queries in flight of a plan that says nothing else.
const IN_FLIGHT_DEFAULT: usize = 64;
const READ_BYTES: usize = 256 * 1024;

struct Asker {
    stream: TcpStream,
    address: String,
    requests: Vec<u8>,
    count: usize,
    input: Vec<u8>,
}

/// Measures the queries for the routes of a plan's topics.
pub fn run(plan: &Plan, progress: &Progress, dir: &RunDir) -> Result<Summary, BenchError> {
    let topology = Topology::find(plan)?;
    let in_flight = plan.in_flight.unwrap_or(IN_FLIGHT_DEFAULT);
    let each = (in_flight / plan.connections).max(1);
    let mut askers = (0..plan.connections)
        .map(|number| Asker::connect(plan, &topology.topics, number, each))
        .collect::<Result<Vec<Asker>, BenchError>>()?;
    let per_turn = (each * askers.len()) as u64;
    turns(&mut askers, plan.warm_up_s)?;
    progress.begin("routes", plan.duration_s);
    let began = Instant::now();
    let answered = turns(&mut askers, plan.duration_s)? * per_turn;
    let rate = answered as f64 / began.elapsed().as_secs_f64();
    progress.end();
    let table = format!(
        "# routes: {}\n\n{rate:.0} route queries a second, {per_turn} in flight on {} connections, \
         {} topics; {answered} answered\n",
        output::title(plan),
        askers.len(),
        topology.topics.len(),
    );
    dir.write("table.md", table.as_bytes())?;
    println!("{table}");
    Ok(Summary {
        figures: [("route queries/s".to_owned(), rate)].into(),
        sound: true,
        refusals: Vec::new(),
    })
}

/// Turns of all askers for so many seconds; how many there were.
fn turns(askers: &mut [Asker], seconds: f64) -> Result<u64, BenchError> {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let mut turns = 0;
    while Instant::now() < until {
        askers.iter_mut().try_for_each(Asker::ask)?;
        askers.iter_mut().try_for_each(Asker::take)?;
        turns += 1;
    }
    Ok(turns)
}

impl Asker {
    fn connect(
        plan: &Plan,
        topics: &[String],
        number: usize,
        count: usize,
    ) -> Result<Self, BenchError> {
        let address = plan.namesrv.clone();
        let failed = || format!("connect to {address}");
        let stream = TcpStream::connect(resolve(&address)?).map_err(BenchError::io(failed()))?;
        stream.set_nodelay(true).map_err(BenchError::io(failed()))?;
        stream
            .set_read_timeout(Some(TIMEOUT))
            .map_err(BenchError::io(failed()))?;
        let mut requests = Vec::new();
        for (opaque, topic) in topics.iter().cycle().skip(number).take(count).enumerate() {
            encode_request(
                &mut requests,
                plan.headers.serialization(),
                request::GET_ROUTEINFO_BY_TOPIC,
                opaque as i32,
                false,
                &[("topic", ExtValue::Str(topic))],
                &[],
            );
        }
        Ok(Self {
            stream,
            address,
            requests,
            count,
            input: Vec::new(),
        })
    }

    fn ask(&mut self) -> Result<(), BenchError> {
        self.stream
            .write_all(&self.requests)
            .map_err(BenchError::io(format!("ask {}", self.address)))
    }

    /// Reads the answers to one turn.
    fn take(&mut self) -> Result<(), BenchError> {
        let mut chunk = [0; READ_BYTES];
        let mut left = self.count;
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
                    let problem = format!("answer {} to a route query", header.code);
                    return Err(BenchError::protocol(&self.address, problem));
                }
                used += consumed;
                left -= 1;
            }
            self.input.drain(..used);
            if left == 0 {
                return Ok(());
            }
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
        }
    }
}
