//! Settings files torn by a power cut (H07), and offsets that survive kills (H08).
//!
//! Invariant: the newest complete generation is used and the fall is said; offsets that were
//! acknowledged never go back; with no generation left the broker stops with the file's name.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tests::client::Client;
use tests::process::{BrokerProcess, copy_directory, eventually, files_below};
use tests::{env_number, payload, turn};

const TOPIC: &str = "settings";
const GROUP: &str = "settings_group";

/// A way to spoil a file.
type Spoil = (&'static str, fn(&Path));

const SPOILS: [Spoil; 4] = [
    ("emptied", |path| fs::write(path, b"").expect("write")),
    ("cut in half", |path| {
        let bytes = fs::read(path).expect("read");
        fs::write(path, &bytes[..bytes.len() / 2]).expect("write");
    }),
    ("one byte flipped", |path| {
        let mut bytes = fs::read(path).expect("read");
        let at = bytes.len() / 2;
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 0x15;
        }
        fs::write(path, bytes).expect("write");
    }),
    ("zeroed", |path| {
        let bytes = fs::read(path).expect("read");
        fs::write(path, vec![0; bytes.len()]).expect("write");
    }),
];

/// The settings files of a store, all generations.
fn settings(data: &Path) -> Vec<PathBuf> {
    let inside = |path: &PathBuf| path.components().any(|part| part.as_os_str() == "config");
    files_below(data).into_iter().filter(inside).collect()
}

/// A stopped store whose settings files have several generations.
fn prepared(name: &str) -> BrokerProcess {
    let mut broker = BrokerProcess::new(name);
    for start in 0..3 {
        broker.start();
        let mut client = broker.client();
        client
            .create_topic(&format!("{TOPIC}{start}"), 4)
            .expect("create topic");
        client.create_topic(TOPIC, 4).expect("create topic");
        for number in 0..20 {
            client
                .send(TOPIC, 0, &payload::body(number, 100), &[])
                .expect("send");
        }
        client.heartbeat("c", GROUP, TOPIC).expect("heartbeat");
        client.commit(GROUP, TOPIC, 0, 10 + start).expect("commit");
        broker.stop();
    }
    broker
}

#[test]
fn a_spoiled_generation_costs_at_most_the_last_interval() {
    let _turn = turn();
    let mut broker = prepared("spoiled");
    let kept = broker.root().join("kept");
    copy_directory(&broker.data(), &kept);
    let files = settings(&broker.data());
    assert!(
        !files.is_empty(),
        "no settings files below {}",
        broker.data().display()
    );
    for file in &files {
        for (how, spoil) in SPOILS {
            fs::remove_dir_all(broker.data()).expect("remove");
            copy_directory(&kept, &broker.data());
            spoil(file);
            let what = format!("{} {how}", file.display());
            broker.launch();
            broker.wait_ready();
            let mut client = broker.client();
            let offset = client.query_offset(GROUP, TOPIC, 0).expect("query");
            let offset = offset.unwrap_or_else(|| panic!("{what}: the offset is forgotten"));
            assert!(offset >= 11, "{what}: the offset fell to {offset}");
            let records = client.read_queue(TOPIC, 0, 0).expect("read").len();
            assert_eq!(records, 60, "{what}");
            let route = broker.namesrv().route(&format!("{TOPIC}1")).expect("route");
            assert!(route.is_some(), "{what}: a topic is forgotten");
            broker.stop();
        }
    }
}

#[test]
fn with_no_generation_left_it_stops_by_name() {
    let _turn = turn();
    let mut broker = prepared("no-generation");
    for name in ["topics", "consumerOffset"] {
        let kept = broker.root().join(format!("kept-{name}"));
        copy_directory(&broker.data(), &kept);
        let mut spoiled = 0;
        for file in settings(&broker.data()) {
            if file
                .file_name()
                .is_some_and(|text| text.to_string_lossy().contains(name))
            {
                fs::write(&file, b"{\"half\":").expect("write");
                spoiled += 1;
            }
        }
        assert!(spoiled > 0, "no generation of {name}");
        broker.launch();
        let status = broker.wait_end(Duration::from_secs(10));
        assert_ne!(
            status.code(),
            Some(0),
            "{name}: started with an empty table"
        );
        assert!(
            broker.output().contains(name),
            "{name} is not in:\n{}",
            broker.output()
        );
        fs::remove_dir_all(broker.data()).expect("remove");
        copy_directory(&kept, &broker.data());
    }
}

/// Puts so many messages into each of the four queues.
fn fill_queues(client: &mut Client, messages: u64) {
    let item: (&[u8], &[(&str, &str)]) = (b"x", &[]);
    for queue in 0..4 {
        let mut left = messages as usize;
        while left > 0 {
            let batch = vec![item; left.min(500)];
            left -= batch.len();
            client.send_batch(TOPIC, queue, &batch, &[]).expect("batch");
        }
    }
}

#[test]
fn acknowledged_offsets_and_topics_survive_every_kill() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("offset-kills");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 4).expect("create topic");
    client.heartbeat("c", GROUP, TOPIC).expect("heartbeat");
    let rounds = env_number("SETTINGS_ROUNDS", 10);
    // Offsets are committed within the queues: beyond their end recovery would cut them back.
    let most = (0..rounds).map(|round| 200 + round * 13).sum();
    fill_queues(&mut client, most);
    let mut committed = 0;
    for round in 0..rounds {
        let mut client = broker.client();
        client
            .create_topic(&format!("{TOPIC}_{round}"), 2)
            .expect("create topic");
        for _ in 0..200 + round * 13 {
            committed += 1;
            client
                .commit(GROUP, TOPIC, (committed % 4) as i32, committed)
                .expect("commit");
        }
        if round % 3 == 2 {
            broker.stop()
        } else {
            broker.kill()
        }
        broker.start();
        let mut client = broker.client();
        for back in 0..4.min(committed) {
            let queue = ((committed - back) % 4) as i32;
            let found = client.query_offset(GROUP, TOPIC, queue).expect("query");
            assert_eq!(
                found,
                Some(committed - back),
                "queue {queue} in round {round}"
            );
        }
        let mut namesrv = broker.namesrv();
        for old in 0..=round {
            let topic = format!("{TOPIC}_{old}");
            eventually("a route of every topic", Duration::from_secs(5), || {
                namesrv.route(&topic).expect("route").is_some()
            });
        }
    }
    broker.stop();
}
