//! A topic deleted and created again under its name (H09), as a consumer that stays up sees it.
//!
//! Invariant: every new message reaches the consumer, no backlog is ever negative, and nothing of a
//! topic comes back whose deletion was answered with success.

use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};
use std::{fs, mem, thread};

use tests::client::{Client, answer, code};
use tests::disk::LoopDisk;
use tests::frame::Frame;
use tests::process::{BrokerProcess, eventually};
use tests::procfs::written_bytes;
use tests::{is_root, payload, skipped, turn};

const TOPIC: &str = "recreated";
const GROUP: &str = "recreated_group";
const QUEUES: i32 = 2;

fn no_negative_backlog(client: &mut Client, when: &str) {
    for queue in 0..QUEUES {
        let Ok(end) = client.max_offset(TOPIC, queue) else {
            continue;
        };
        let Ok(Some(committed)) = client.query_offset(GROUP, TOPIC, queue) else {
            continue;
        };
        assert!(
            committed <= end,
            "{when}: committed {committed} of {end} in queue {queue}"
        );
    }
}

#[test]
fn everything_sent_after_the_creation_arrives_and_no_backlog_is_negative() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("recreated");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    client.heartbeat("c", GROUP, TOPIC).expect("heartbeat");
    for number in 0..2000 {
        let queue = (number % 2) as i32;
        client
            .send(TOPIC, queue, &payload::body(number, 50), &[])
            .expect("send");
    }
    for queue in 0..QUEUES {
        client.commit(GROUP, TOPIC, queue, 1000).expect("commit");
    }
    client.delete_topic(TOPIC).expect("delete");
    no_negative_backlog(&mut client, "after the deletion");
    let _ = client.commit(GROUP, TOPIC, 0, 1000);
    client.create_topic(TOPIC, QUEUES).expect("create again");
    no_negative_backlog(&mut client, "after the creation");
    // The consumer does not know yet and commits what it had.
    let _ = client.commit(GROUP, TOPIC, 0, 1000);
    no_negative_backlog(&mut client, "after a stale commit");
    for number in 5000..5500 {
        let queue = (number % 2) as i32;
        client
            .send(TOPIC, queue, &payload::body(number, 50), &[])
            .expect("send");
        if number % 50 == 0 {
            no_negative_backlog(&mut client, "while sending");
        }
    }
    let mut found = Vec::new();
    for queue in 0..QUEUES {
        let mut next = 1000;
        let started = Instant::now();
        while found.len() < 250 * (queue as usize + 1) {
            let pulled = client.pull(TOPIC, queue, next, 32).expect("pull");
            found.extend(
                pulled
                    .records
                    .iter()
                    .filter_map(|r| payload::number(&r.body)),
            );
            assert!(
                pulled.code == answer::SUCCESS || pulled.next_offset != next,
                "{pulled:?}"
            );
            next = pulled.next_offset;
            assert!(
                started.elapsed() < Duration::from_secs(5),
                "{} arrived",
                found.len()
            );
        }
    }
    found.sort_unstable();
    assert_eq!(found, (5000..5500).collect::<Vec<_>>());
    broker.kill();
    broker.start();
    no_negative_backlog(&mut broker.client(), "after a kill");
    assert_eq!(
        broker.client().read_queue(TOPIC, 0, 0).expect("read").len(),
        250
    );
}

/// The log alone lies on a disk that hangs (needs root), so that only the shards keep the answer.
#[test]
fn a_deletion_is_a_success_only_when_the_shards_have_stored_it() {
    let _turn = turn();
    if !is_root() {
        return skipped("a disk of the test's own needs root");
    }
    let mut broker = BrokerProcess::new("deleted-frozen");
    let mut disk = match LoopDisk::create(broker.root(), 1 << 30, 512) {
        Ok(disk) => disk,
        Err(reason) => return skipped(&format!("no loop disk: {reason}")),
    };
    let log = disk.path().join("commitlog");
    fs::create_dir_all(&log).expect("directory of the log");
    fs::create_dir_all(broker.data()).expect("directory of the store");
    symlink(&log, broker.data().join("commitlog")).expect("the log elsewhere");
    broker.set("flushDiskType", "SYNC_FLUSH").start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create topic");
    for number in 0..10 {
        let body = payload::body(number, 100);
        client.send(TOPIC, 0, &body, &[]).expect("send");
    }
    // What is prepared ahead of the log would keep the settings file waiting.
    let mut written = 0;
    eventually("nothing is written", Duration::from_secs(20), || {
        thread::sleep(Duration::from_secs(1));
        let before = mem::replace(&mut written, written_bytes(broker.pid()));
        before == written
    });
    disk.freeze();
    let fields = [("topic", TOPIC.to_owned())];
    let deletion = Frame::request(code::DELETE_TOPIC_IN_BROKER, &fields, b"");
    let opaque = client.start(deletion).expect("start");
    let limit = Some(Duration::from_secs(15));
    client.socket().set_read_timeout(limit).expect("timeout");
    let told = client.finish(opaque).expect("an answer");
    let why = told.remark.clone().unwrap_or_default();
    assert!(
        told.code != answer::SUCCESS && why.contains("disk"),
        "{} {why}",
        told.code
    );
    disk.thaw();
    client.delete_topic(TOPIC).expect("stored after the thaw");
    broker.kill();
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, QUEUES).expect("create again");
    let old = client.read_queue(TOPIC, 0, 0).expect("read");
    assert!(old.is_empty(), "{} old messages are back", old.len());
    broker.stop();
}
