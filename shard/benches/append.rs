//! What one append of 1 KiB costs: into the ring with its unit, and the turns that come with it.
//!
//! Prints nanoseconds per message for each flush mode, and what the two checksums of a record (its
//! body's and the whole one's) take of them.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a bench"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use shard::runtime::Driver as _;
use shard::{AckPoint, NewMessage, Shard};
use wire::message::properties;

use self::null::{NullDriver, open};

#[path = "../tests/support/null.rs"]
mod null;

const WARM: u64 = 20_000;
const COUNT: u64 = 200_000;
const PER_TURN: u64 = 16;
const QUEUES: u64 = 64;

struct Rig {
    driver: NullDriver,
    shard: Shard,
    queues: Vec<u32>,
    stored: Vec<u8>,
    body: Vec<u8>,
}

impl Rig {
    fn append(&mut self, number: u64) {
        let message = NewMessage {
            queue: self.queues[(number % QUEUES) as usize],
            flag: 0,
            sys_flag: 0,
            born_timestamp: 1,
            born_host: std::net::SocketAddr::from(([10, 0, 0, 1], 5000)),
            reconsume_times: 0,
            prepared_transaction_offset: 0,
            body: &self.body,
            properties: &[&self.stored],
            tags_code: 5,
            unique_key: properties::get(&self.stored, properties::UNIQ_KEY),
            keys: None,
        };
        black_box(self.shard.append(self.driver.now(), &message).unwrap());
    }

    fn turn(&mut self) {
        self.driver.wait(None);
        let now = self.driver.now();
        while let Some(completion) = self.driver.next() {
            self.shard.on_completion(now, &mut self.driver, completion);
        }
        self.shard.turn(now, &mut self.driver);
    }

    /// Time of the appends and of the turns between them.
    fn run(&mut self, count: u64) -> (Duration, Duration) {
        let (mut appends, mut turns) = (Duration::ZERO, Duration::ZERO);
        for round in 0..count / PER_TURN {
            let start = Instant::now();
            for number in 0..PER_TURN {
                self.append(round * PER_TURN + number);
            }
            let between = Instant::now();
            self.turn();
            turns += between.elapsed();
            appends += between - start;
        }
        (appends, turns)
    }
}

fn each_ns(time: Duration, count: u64) -> f64 {
    time.as_nanos() as f64 / count as f64
}

fn main() {
    let body = vec![b'x'; 1024];
    let mut stored = Vec::new();
    properties::append(
        &mut stored,
        properties::UNIQ_KEY,
        "0A0000010000000000000000000000AB",
    );
    properties::append(&mut stored, properties::TAGS, "TagA");
    let record = vec![b'y'; 1024 + 91 + 8 + stored.len()];
    let start = Instant::now();
    for _ in 0..COUNT {
        black_box(crc32fast::hash(black_box(&body)));
        black_box(crc32fast::hash(black_box(&record)));
    }
    let crc_ns = each_ns(start.elapsed(), COUNT);
    println!("mode      append ns  turn ns/message  of that CRC ns  total ns  MB/s");
    for ack in [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced] {
        let mut driver = NullDriver::new();
        let mut shard = open(ack, &mut driver);
        let ids = 0..QUEUES as i32;
        let queues = ids
            .map(|id| shard.open_queue("TopicTest", id).unwrap())
            .collect();
        let (stored, body) = (stored.clone(), body.clone());
        let mut rig = Rig {
            driver,
            shard,
            queues,
            stored,
            body,
        };
        rig.run(WARM);
        let before = rig.shard.log().tail();
        let (appends, turns) = rig.run(COUNT);
        let bytes = rig.shard.log().tail() - before;
        let (append_ns, turn_ns) = (each_ns(appends, COUNT), each_ns(turns, COUNT));
        let total_ns = append_ns + turn_ns;
        let rate = bytes as f64 / (total_ns * COUNT as f64) * 1000.0;
        println!(
            "{ack:<9} {append_ns:9.0} {turn_ns:16.0} {crc_ns:15.0} {total_ns:9.0} {rate:5.0}",
            ack = format!("{ack:?}").as_str(),
        );
    }
}
