//! Owns the rate of route queries: what a name server answers, in turns of many requests.
//!
//! Invariant: every answer counted is a success with a body; a turn writes all its requests before
//! it reads an answer, so that the server always has as many in hand as the plan says.

use std::time::{Duration, Instant};

use wire::codes::request;
use wire::header::{ExtValue, encode_request};

use crate::error::BenchError;
use crate::output::{self, RunDir};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::scenario::Summary;
use crate::session::Session;
use crate::topology::Topology;

/// Queries in flight of a plan that says nothing else.
const IN_FLIGHT_DEFAULT: usize = 64;

struct Asker {
    session: Session,
    /// The requests of one turn.
    requests: Vec<u8>,
    count: usize,
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
        ..Summary::default()
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
        let serialization = plan.headers.serialization();
        let session = Session::connect(&plan.namesrv, serialization)?;
        let mut requests = Vec::new();
        for (opaque, topic) in topics.iter().cycle().skip(number).take(count).enumerate() {
            encode_request(
                &mut requests,
                serialization,
                request::GET_ROUTEINFO_BY_TOPIC,
                opaque as i32,
                false,
                &[("topic", ExtValue::Str(topic))],
                &[],
            );
        }
        Ok(Self {
            session,
            requests,
            count,
        })
    }

    fn ask(&mut self) -> Result<(), BenchError> {
        self.session.write(&self.requests)
    }

    /// Reads the answers to one turn.
    fn take(&mut self) -> Result<(), BenchError> {
        self.session.take_successes(self.count)
    }
}
