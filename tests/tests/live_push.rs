//! Push consumers of the official Java client that stay up while the broker does not (H08), and
//! while their topic is deleted and made again (H09).
//!
//! Invariant: what was acknowledged to the broker never comes again, a group's offset never falls
//! and is never answered from an empty store, and nothing is passed over. `PUSH_OFFSET` is where
//! each queue stands before the restarts (100000 as reported), `RESTART_ROUNDS` how many restarts
//! of each kind (10 as reported).

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tests::client::{Client, code};
use tests::java::JavaProgram;
use tests::process::{BrokerProcess, eventually};
use tests::{StopAtEnd, env_number, payload, turn};

const TOPIC: &str = "live_push";
const GROUP: &str = "live_push_group";
const QUEUES: i32 = 4;
const PERSIST_MS: u64 = 500;
const ARRIVAL: Duration = Duration::from_secs(60);

/// What the consumers got: how often each place came.
#[derive(Debug, Default)]
struct Received {
    places: Mutex<BTreeMap<(i32, i64), u32>>,
    numbers: Mutex<BTreeMap<u64, u32>>,
}

impl Received {
    fn take(&self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["GOT", number, queue, offset, _] = words[..] else {
            return;
        };
        let number: u64 = number.parse().expect("a number");
        let place = (
            queue.parse().expect("queue"),
            offset.parse().expect("offset"),
        );
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        *places.entry(place).or_default() += 1;
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        *numbers.entry(number).or_default() += 1;
    }

    fn places(&self) -> BTreeMap<(i32, i64), u32> {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.clone()
    }

    fn has_all(&self, ends: &[i64]) -> bool {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |queue: i32| places.range((queue, 0)..(queue + 1, 0)).count() as i64;
        (0..QUEUES)
            .zip(ends)
            .all(|(queue, end)| count(queue) == *end)
    }
}

/// Starts the Java consumers; their lines go to `received` on a thread of its own.
fn consumers(broker: &BrokerProcess, received: &'static Received) -> Option<JavaProgram> {
    let persist = PERSIST_MS.to_string();
    // One member: of two, the Java client lets one commit for a queue what it had read before the
    // other took it over, and that may be less.
    let program = JavaProgram::start(broker, "LivePush", &[TOPIC, GROUP, "1", &persist])?;
    Some(program.follow(|line| received.take(line)))
}

fn received() -> &'static Received {
    Box::leak(Box::default())
}

/// Sends so many more messages to each queue; returns the ends of the queues.
fn send_more(client: &mut Client, count: usize) -> Vec<i64> {
    let ends = (0..QUEUES).map(|queue| {
        let mut end = client.max_offset(TOPIC, queue).expect("end");
        let mut left = count;
        while left > 0 {
            let size = left.min(500);
            let bodies = (0..size).map(|at| number_of(queue, end + at as i64));
            let bodies: Vec<_> = bodies.map(|number| payload::body(number, 64)).collect();
            let items = bodies.iter().map(|body| (body.as_slice(), &[][..]));
            let items: Vec<_> = items.collect();
            client.send_batch(TOPIC, queue, &items, &[]).expect("batch");
            (left, end) = (left - size, end + size as i64);
        }
        end
    });
    ends.collect()
}

fn number_of(queue: i32, offset: i64) -> u64 {
    (queue as u64) << 40 | offset as u64
}

/// The group's offsets as `consumerProgress` shows them.
fn progress(client: &mut Client) -> io::Result<BTreeMap<i32, (i64, i64)>> {
    let fields = [
        ("consumerGroup", GROUP.to_owned()),
        ("topic", TOPIC.to_owned()),
    ];
    let frame = client.call(code::GET_CONSUME_STATS, &fields, b"")?;
    if frame.code != 0 {
        return Ok(BTreeMap::new());
    }
    let text = String::from_utf8_lossy(&frame.body).into_owned();
    let number = |part: &str, name: &str| -> i64 {
        let (_, rest) = part.split_once(&format!("\"{name}\":")).expect(name);
        let end = rest.find([',', '}']).expect("an end");
        rest[..end].parse().expect("a number")
    };
    // The keys of the table are objects, as fastjson writes them: {…,"queueId":0,…}:{…}.
    let entries = text.split("\"queueId\":").skip(1);
    let entry = |part: &str| {
        let queue = part.split([',', '}']).next().expect("a queue");
        let queue = queue.parse().expect("a queue");
        (
            queue,
            (number(part, "consumerOffset"), number(part, "brokerOffset")),
        )
    };
    Ok(entries.map(entry).collect())
}

/// Asks for the group's offsets all the while, also of a broker that is just starting.
fn watch_offsets(broker_at: impl Fn() -> io::Result<Client>, stop: &AtomicBool) -> u64 {
    let mut known: BTreeMap<i32, i64> = BTreeMap::new();
    let mut asked = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut client) = broker_at() else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        while !stop.load(Ordering::Relaxed) {
            let Ok(shown) = progress(&mut client) else {
                break;
            };
            let mut seen: Vec<(i32, Option<i64>)> = Vec::new();
            seen.extend(shown.into_iter().map(|(queue, (at, _))| (queue, Some(at))));
            for queue in 0..QUEUES {
                match client.query_offset(GROUP, TOPIC, queue) {
                    Ok(offset) => seen.push((queue, offset)),
                    // A refusal that says to come again, or the connection of a killed broker.
                    Err(_) => continue,
                }
            }
            for (queue, offset) in seen {
                let before = known.get(&queue).copied().unwrap_or(-1);
                let now = offset.unwrap_or(-1);
                assert!(now >= before, "queue {queue}: from {before} to {offset:?}");
                known.insert(queue, now);
                asked += 1;
            }
            thread::sleep(Duration::from_millis(3));
        }
    }
    asked
}

fn committed(client: &mut Client) -> Vec<i64> {
    let offset = |queue| client.query_offset(GROUP, TOPIC, queue).expect("query");
    (0..QUEUES).map(offset).map(|at| at.unwrap_or(0)).collect()
}

/// One restart under consumption, by signal or by kill.
fn restart(broker: &Mutex<BrokerProcess>, received: &Received, graceful: bool) {
    let with = || broker.lock().unwrap_or_else(PoisonError::into_inner);
    let mut client = with().client();
    let ends = if graceful {
        let ends = send_more(&mut client, 200);
        eventually("all consumed", ARRIVAL, || received.has_all(&ends));
        eventually("all committed", ARRIVAL, || committed(&mut client) == ends);
        ends
    } else {
        let ends = send_more(&mut client, 2_000);
        thread::sleep(Duration::from_millis(PERSIST_MS / 2));
        ends
    };
    let before = committed(&mut client);
    let had = received.places();
    drop(client);
    {
        let mut broker = with();
        if graceful {
            broker.stop()
        } else {
            broker.kill()
        }
        broker.start();
    }
    eventually("the rest consumed", ARRIVAL, || received.has_all(&ends));
    let more = send_more(&mut with().client(), 50);
    eventually("new messages consumed", ARRIVAL, || received.has_all(&more));
    for (place, times) in received.places() {
        let (queue, offset) = place;
        let again = times - had.get(&place).copied().unwrap_or(0);
        let is_new = !had.contains_key(&place);
        let acknowledged = offset < before[queue as usize];
        assert!(
            again == u32::from(is_new) || !acknowledged,
            "{place:?} was acknowledged and came {again} times more (graceful: {graceful})"
        );
    }
}

#[test]
fn a_restart_sends_no_push_group_back() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("live-push");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    let start = env_number("PUSH_OFFSET", 5_000) as usize;
    let ends = send_more(&mut client, start);
    let received = received();
    let Some(_consumers) = consumers(&broker, received) else {
        return;
    };
    eventually("the first messages", ARRIVAL * 4, || {
        received.has_all(&ends)
    });
    let address = broker.address(broker.broker_port);
    let broker = Mutex::new(broker);
    let stop = AtomicBool::new(false);
    let rounds = env_number("RESTART_ROUNDS", 2);
    let asked = thread::scope(|scope| {
        let watching = scope.spawn(|| watch_offsets(|| Client::connect(address), &stop));
        let end = StopAtEnd(&stop);
        for graceful in [true, false] {
            (0..rounds).for_each(|_| restart(&broker, received, graceful));
        }
        drop(end);
        watching.join().expect("no offset fell")
    });
    println!("{rounds} restarts and as many kills, {asked} offsets asked for, none fell");
    assert!(asked > 100, "{asked} offsets seen");
}

/// No backlog below zero, however it is asked for.
fn no_negative_backlog(client: &mut Client) {
    let Ok(shown) = progress(client) else { return };
    for (queue, (consumed, end)) in shown {
        assert!(
            consumed <= end,
            "queue {queue}: {consumed} of {end} consumed"
        );
    }
}

#[test]
fn a_topic_made_again_reaches_the_consumer_that_stayed_up() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("live-recreated");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    let ends = send_more(&mut client, env_number("PUSH_OFFSET", 10_000) as usize / 4);
    let received = received();
    let Some(_consumers) = consumers(&broker, received) else {
        return;
    };
    eventually("the first messages", ARRIVAL * 4, || {
        received.has_all(&ends)
    });
    let stop = AtomicBool::new(false);
    let address = broker.address(broker.broker_port);
    thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut client = Client::connect(address).expect("connect");
            while !stop.load(Ordering::Relaxed) {
                no_negative_backlog(&mut client);
                thread::sleep(Duration::from_millis(5));
            }
        });
        let end = StopAtEnd(&stop);
        client.delete_topic(TOPIC).expect("delete");
        thread::sleep(Duration::from_millis(PERSIST_MS * 2));
        client.create_topic(TOPIC, QUEUES).expect("create again");
        let first = 1_u64 << 50;
        for number in first..first + 500 {
            let body = payload::body(number, 64);
            let queue = (number % QUEUES as u64) as i32;
            client.send(TOPIC, queue, &body, &[]).expect("send");
        }
        let since = Instant::now();
        eventually("all 500 of the new topic", ARRIVAL * 2, || {
            let numbers = received
                .numbers
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            numbers.range(first..).count() == 500
        });
        println!(
            "all 500 consumed {:?} after the last was sent",
            since.elapsed()
        );
        drop(end);
        watching.join().expect("no backlog was negative");
    });
}
