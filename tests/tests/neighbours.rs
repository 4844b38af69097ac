//! Shards of one core that use the same things (P6).
//!
//! Invariant: what one shard does for its readers never keeps the readers of another from theirs.

use tests::client::physical_offset;
use tests::process::BrokerProcess;
use tests::{payload, turn};

const TOPIC: &str = "neighbours";
const MESSAGES: u64 = 48;
const BODY_BYTES: usize = 60_000;
/// Four windows, fewer than a queue of this test fills.
const COLD_BYTES: u64 = 1 << 20;
/// Where the number of the shard begins in a physical offset.
const SHARD_BIT: u32 = 55;

#[test]
fn a_shard_that_has_read_into_every_cold_buffer_leaves_its_neighbour_one() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("neighbours");
    broker.set("pinion.cores", "0");
    broker.set("pinion.coldBytes", &COLD_BYTES.to_string());
    broker.arguments(&["--shards", "2"]).start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 2).expect("create topic");
    let mut shards = Vec::new();
    for queue in 0..2 {
        for number in 0..MESSAGES {
            let body = payload::body(number, BODY_BYTES);
            let sent = client.send(TOPIC, queue, &body, &[]).expect("send");
            shards.push(physical_offset(sent.message_id()) >> SHARD_BIT);
        }
    }
    shards.dedup();
    assert_eq!(shards.len(), 2, "each queue on a shard of its own");
    // After a start nothing is in the write buffers any more.
    broker.stop();
    broker.start();
    let mut client = broker.client();
    for queue in [0, 1, 0] {
        let records = client.read_queue(TOPIC, queue, 0).expect("an answer");
        assert_eq!(records.len() as u64, MESSAGES, "queue {queue}");
    }
    broker.stop();
}
