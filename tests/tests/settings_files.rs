//! Settings files torn by a power cut (H07), and offsets that survive kills (H08).
//!
//! Invariant: the newest complete generation is used and the fall is said; offsets that were
//! acknowledged never go back; with no generation left the broker stops with the file's name.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tests::client::{Client, code};
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
            fall_is_said(&broker, file, &what);
            broker.stop();
        }
    }
}

/// What the log says when the newest generation is not the one used: file, generation and age.
fn fall_is_said(broker: &BrokerProcess, file: &Path, what: &str) {
    let name = file
        .file_name()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    // Older generations and lists of checksums are not read while the newest one is whole.
    if !name.ends_with(".json") {
        return;
    }
    let output = broker.output();
    let said = output
        .lines()
        .find(|line| line.contains("WARN") && line.contains(&name));
    let said = said.unwrap_or_else(|| panic!("{what}: nothing was said:\n{output}"));
    for word in ["generation", "ago"] {
        assert!(said.contains(word), "{what}: no {word} in {said}");
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

/// What a broker has acknowledged of topics and offsets.
#[derive(Default)]
struct Acknowledged {
    topics: Vec<String>,
    /// By queue: the last offset acknowledged, and the one after it that may have been taken too.
    offsets: [(i64, i64); 4],
}

/// Creates topics until the broker is gone.
fn create_topics(mut client: Client, round: u64) -> Vec<String> {
    let mut created = Vec::new();
    for number in 0.. {
        let topic = format!("{TOPIC}_{round}_{number}");
        if client.create_topic(&topic, 2).is_err() {
            break;
        }
        created.push(topic);
    }
    created
}

/// Commits further and further until the broker is gone or the queues end.
fn commit_on(mut client: Client, mut offsets: [(i64, i64); 4], end: i64) -> [(i64, i64); 4] {
    for at in 0.. {
        let queue = at % 4;
        let next = offsets[queue].1 + 1;
        // Beyond the end of the queues recovery would cut offsets back.
        if next > end {
            break;
        }
        offsets[queue].1 = next;
        if client.commit(GROUP, TOPIC, queue as i32, next).is_err() {
            break;
        }
        offsets[queue].0 = next;
    }
    offsets
}

#[test]
fn acknowledged_offsets_and_topics_survive_every_kill() {
    let _turn = turn();
    let mut random = payload::Random::from_env();
    let mut broker = BrokerProcess::new("offset-kills");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 4).expect("create topic");
    client.heartbeat("c", GROUP, TOPIC).expect("heartbeat");
    let rounds = env_number("SETTINGS_ROUNDS", 10);
    let mut known = Acknowledged::default();
    for round in 0..rounds {
        let end = known.offsets.iter().map(|(_, tried)| tried).max();
        let end = end.copied().unwrap_or(0) + 5_000;
        fill_queues(&mut broker.client(), end);
        let pause = Duration::from_millis(20 + random.below(400));
        thread::scope(|scope| {
            let creator = broker.client();
            let creator = scope.spawn(move || create_topics(creator, round));
            let (committer, offsets) = (broker.client(), known.offsets);
            let committer = scope.spawn(move || commit_on(committer, offsets, end));
            thread::sleep(pause);
            // A graceful end has to keep all of it as well.
            if round % 5 == 4 {
                broker.stop()
            } else {
                broker.kill()
            }
            known.topics.extend(creator.join().expect("creator"));
            known.offsets = committer.join().expect("committer");
        });
        broker.start();
        check_acknowledged(&broker, &mut known, round);
    }
    let topics = known.topics.len();
    println!(
        "{rounds} rounds: {topics} topics and offsets {:?}",
        known.offsets
    );
    assert!(topics > 0 && known.offsets.iter().all(|(at, _)| *at > 0));
    broker.stop();
}

fn check_acknowledged(broker: &BrokerProcess, known: &mut Acknowledged, round: u64) {
    let mut client = broker.client();
    for (queue, (acknowledged, tried)) in known.offsets.iter_mut().enumerate() {
        let found = client.query_offset(GROUP, TOPIC, queue as i32);
        let found = found.expect("query").unwrap_or(0);
        assert!(
            (*acknowledged..=*tried).contains(&found),
            "round {round}, queue {queue}: {found}, acknowledged {acknowledged}"
        );
        (*acknowledged, *tried) = (found, found);
    }
    let listed = client.call(code::GET_ALL_TOPIC_CONFIG, &[], b"");
    let listed = listed.expect("the topics").success().expect("the topics");
    let listed = String::from_utf8_lossy(&listed.body).into_owned();
    for topic in &known.topics {
        assert!(
            listed.contains(&format!("\"{topic}\"")),
            "round {round}: {topic}"
        );
    }
    let mut namesrv = broker.namesrv();
    if let Some(topic) = known.topics.last() {
        eventually(
            "a route of the newest topic",
            Duration::from_secs(5),
            || namesrv.route(topic).expect("route").is_some(),
        );
    }
}

/// Fills each of the four queues up to this offset.
fn fill_queues(client: &mut Client, end: i64) {
    let item: (&[u8], &[(&str, &str)]) = (b"x", &[]);
    for queue in 0..4 {
        let mut left = end - client.max_offset(TOPIC, queue).expect("the end");
        while left > 0 {
            let batch = vec![item; left.min(500) as usize];
            left -= batch.len() as i64;
            client.send_batch(TOPIC, queue, &batch, &[]).expect("batch");
        }
    }
}
