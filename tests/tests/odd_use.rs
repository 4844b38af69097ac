//! What users do that nobody asked them to: two brokers on one store, a kill at any moment of a
//! start, settings that make no sense, clients that say strange things of themselves.
//!
//! Invariant: every start either serves or ends soon, without a panic and with words that name
//! what is wrong; nothing of it harms the store. `START_KILLS` is the number of killed starts.

use std::fs;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use tests::process::BrokerProcess;
use tests::{client::code, env_number, payload, turn};

const TOPIC: &str = "odd_use";
const END: Duration = Duration::from_secs(5);

/// Requires that the start ends by itself, soon, with these words and without a panic.
fn ends_with_words(broker: &mut BrokerProcess, words: &[&str], what: &str) {
    let status = broker.wait_end(END);
    let output = broker.output();
    assert_ne!(status.code(), Some(0), "{what}: {output}");
    assert!(status.code().is_some(), "{what}: {status}: {output}");
    assert!(!output.contains("panicked"), "{what}: {output}");
    for word in words {
        let has = output.to_lowercase().contains(&word.to_lowercase());
        assert!(has, "{what}: no {word:?} in:\n{output}");
    }
}

fn send_some(broker: &BrokerProcess, count: u64) {
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let first = client.max_offset(TOPIC, 0).expect("the end") as u64;
    for number in first..first + count {
        let body = payload::body(number, 500);
        client.send(TOPIC, 0, &body, &[]).expect("send");
    }
}

fn count(broker: &BrokerProcess) -> usize {
    broker.client().read_queue(TOPIC, 0, 0).expect("read").len()
}

#[test]
fn a_second_broker_on_a_store_is_refused_and_the_first_goes_on() {
    let _turn = turn();
    let mut first = BrokerProcess::new("store-first");
    first.start();
    send_some(&first, 100);
    let mut second = BrokerProcess::new("store-second");
    second.data_at(&first.data());
    second.launch();
    let data = first.data().display().to_string();
    ends_with_words(
        &mut second,
        &["in use by another process", &data],
        "a second broker",
    );
    send_some(&first, 100);
    first.kill();
    first.start();
    assert_eq!(count(&first), 200);
    first.stop();
}

#[test]
fn a_second_broker_on_the_same_ports_is_refused_by_port() {
    let _turn = turn();
    let mut first = BrokerProcess::new("ports-first");
    first.start();
    let mut second = BrokerProcess::new("ports-second");
    (second.namesrv_port, second.broker_port) = (first.namesrv_port, first.broker_port);
    second.launch();
    ends_with_words(&mut second, &["listen"], "the same ports");
    assert!(second.segments().is_empty(), "a store was made");
    send_some(&first, 10);
    first.stop();
}

/// Requires that neither a store nor a write buffer was made.
fn left_nothing(broker: &BrokerProcess, what: &str) {
    assert!(!broker.data().exists(), "{what}: {:?}", broker.data());
    let buffers = fs::read_dir(broker.buffer_directory()).map_or(0, Iterator::count);
    assert_eq!(buffers, 0, "{what}: write buffers");
}

#[test]
fn ports_of_its_own_that_clash_are_named_both_and_nothing_is_left_behind() {
    let _turn = turn();
    let second = [
        "second port",
        "listenPort - 2",
        "--broker-port",
        "--namesrv-port",
    ];
    type Change = fn(&mut BrokerProcess);
    let cases: [(&str, Change, &[&str]); 4] = [
        ("second", |b| b.namesrv_port = b.broker_port - 2, &second),
        (
            "same",
            |b| b.namesrv_port = b.broker_port,
            &["--namesrv-port", "--broker-port"],
        ),
        (
            "health",
            |b| {
                let port = (b.broker_port - 2).to_string();
                b.set("pinion.healthPort", &port);
            },
            &["pinion.healthPort", "second port", "broker.conf"],
        ),
        (
            "exporter",
            |b| {
                let port = b.namesrv_port.to_string();
                b.set("metricsExporterType", "PROM");
                b.set("metricsPromExporterPort", &port);
            },
            &["metricsPromExporterPort", "name server", "broker.conf"],
        ),
    ];
    for (what, change, words) in cases {
        let mut broker = BrokerProcess::new("own-ports");
        change(&mut broker);
        broker.launch();
        ends_with_words(&mut broker, words, what);
        left_nothing(&broker, what);
    }
}

#[test]
fn a_health_port_that_nobody_asked_for_gives_way_to_the_name_server() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("health-way");
    broker.namesrv_port = broker.broker_port + 3;
    broker.start();
    let output = broker.output();
    let said = output
        .lines()
        .find(|line| line.contains("health port not opened"));
    assert!(
        said.is_some_and(|line| line.contains("name server")),
        "{output}"
    );
    send_some(&broker, 10);
    broker.stop();
}

#[test]
fn damaged_settings_of_the_name_server_are_named_before_a_store_is_made() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("damaged-kv");
    let names = broker.data().join("namesrv");
    fs::create_dir_all(&names).expect("directory");
    fs::write(names.join("kvConfig.json"), b"{\"configTable\":").expect("file");
    broker.launch();
    ends_with_words(&mut broker, &["kvConfig"], "damaged kvConfig.json");
    let made: Vec<_> = fs::read_dir(broker.data()).expect("read").collect();
    assert_eq!(made.len(), 1, "{made:?}");
}

#[test]
fn a_kill_at_any_moment_of_a_start_leaves_a_store_that_opens() {
    let _turn = turn();
    let mut random = payload::Random::from_env();
    let mut broker = BrokerProcess::new("killed-starts");
    broker.set("mappedFileSizeCommitLog", &(1 << 20).to_string());
    let mut expected = 0;
    for round in 0..env_number("START_KILLS", 8) {
        // The first rounds kill a start that makes the store.
        for _ in 0..3 {
            broker.launch();
            thread::sleep(Duration::from_millis(random.below(400)));
            let ended = broker.ended();
            assert!(ended.is_none(), "{ended:?}: {}", broker.output());
            broker.kill();
        }
        broker.start();
        if round > 0 {
            assert_eq!(count(&broker), expected, "round {round}");
        }
        send_some(&broker, 50);
        expected += 50;
        broker.kill();
    }
}

#[test]
fn settings_that_make_no_sense_end_the_start_with_their_name() {
    let _turn = turn();
    let cases: [(&str, &str); 17] = [
        ("listenPort", "0"),
        ("listenPort", "70000"),
        ("listenPort", "-1"),
        ("listenPort", ""),
        ("mappedFileSizeCommitLog", "1"),
        ("mappedFileSizeCommitLog", "99999999999999999999"),
        ("mappedFileSizeCommitLog", "1152921504606846976"),
        ("pinion.bufferBytes", "1"),
        ("pinion.bufferBytes", "1152921504606846976"),
        ("pinion.bufferDir", "/no/such/directory"),
        ("pinion.shards", "100000"),
        ("pinion.cores", "4096"),
        ("pinion.cores", "1-"),
        ("brokerId", "-1"),
        ("brokerName", "a name with blanks"),
        ("namesrvAddr", "nowhere"),
        ("messageDelayLevel", "1s 2x"),
    ];
    for (key, value) in cases {
        let what = format!("{key}={value}");
        let mut broker = BrokerProcess::new("no-sense");
        broker.set(key, value);
        if key == "listenPort" {
            let (port, data) = (broker.namesrv_port.to_string(), broker.data());
            let data = data.display().to_string();
            let conf = broker.configuration().display().to_string();
            let words = [
                "standalone",
                "--data",
                &data,
                "--namesrv-port",
                &port,
                "-c",
                &conf,
            ];
            broker.launch_as(&words.map(str::to_owned));
        } else {
            broker.launch();
        }
        ends_with_words(&mut broker, &[key], &what);
        assert!(broker.segments().is_empty(), "{what}: a store was made");
    }
}

#[test]
fn files_that_are_no_settings_end_the_start_with_their_name() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("no-file");
    let root = broker.root().to_path_buf();
    fs::create_dir_all(root.join("directory.conf")).expect("directory");
    fs::write(root.join("binary.conf"), [0_u8, 159, 146, 150, 255]).expect("file");
    for name in ["missing.conf", "directory.conf", "binary.conf"] {
        let file = root.join(name).display().to_string();
        broker.launch_as(&["standalone", "-c", &file].map(str::to_owned));
        ends_with_words(&mut broker, &[name], name);
    }
}

#[test]
fn words_on_the_command_line_that_make_no_sense_are_named() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("no-words");
    let cases: [&[&str]; 7] = [
        &["--no-such-flag"],
        &["standalone", "--broker-port", "abc"],
        &["standalone", "--broker-port", "0"],
        &["standalone", "--shards", "-3"],
        &["standalone", "--set", "nonsense"],
        &["standalone", "--set", "=5"],
        &["no-such-command"],
    ];
    for words in cases {
        let owned: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        broker.launch_as(&owned);
        let last = words.last().copied().unwrap_or_default();
        ends_with_words(
            &mut broker,
            &[last.trim_start_matches('=')],
            &words.join(" "),
        );
    }
}

#[test]
fn a_file_as_editors_of_other_systems_leave_it_is_read() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("editors");
    let (data, file) = (broker.data(), broker.root().join("edited.conf"));
    let buffers = broker.buffer_directory();
    fs::create_dir_all(&buffers).expect("buffer directory");
    let text = format!(
        "\u{feff}# Grüße\r\nbrokerIP1 = 127.0.0.1\r\n\r\n\tbrokerName : odd\\u0065r  \r\n\
         pinion.bufferBytes=16777216\r\nmappedFileSizeCommitLog=8388608\r\n\
         pinion.bufferDir={}\r\nbrokerName=last-wins",
        buffers.display()
    );
    fs::write(&file, text).expect("file");
    let (namesrv, port) = (
        broker.namesrv_port.to_string(),
        broker.broker_port.to_string(),
    );
    let (data, file) = (data.display().to_string(), file.display().to_string());
    let words = ["standalone", "--data", &data, "--namesrv-port", &namesrv];
    let more = ["--broker-port", &port, "-c", &file];
    let all: Vec<String> = words.iter().chain(&more).map(|w| (*w).to_owned()).collect();
    broker.launch_as(&all).wait_ready();
    let route = broker
        .namesrv()
        .route("TBW102")
        .expect("route")
        .expect("known");
    assert!(route.contains("\"last-wins\""), "{route}");
    broker.stop();
}

#[test]
fn clients_of_any_version_and_language_are_served() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("versions");
    broker.start();
    send_some(&broker, 1);
    for (language, version) in [
        ("JAVA", 0),
        ("CPP", 1),
        ("DOTNET", 65_535),
        ("PYTHON", -7),
        ("NO_SUCH_LANGUAGE", i32::MAX),
        ("", i32::MIN),
    ] {
        let header = serde_json::json!({
            "code": code::GET_MAX_OFFSET, "flag": 0, "opaque": 5, "language": language,
            "version": version, "extFields": {"topic": TOPIC, "queueId": "0"},
        });
        let header = header.to_string();
        let mut bytes = (header.len() as u32 + 4).to_be_bytes().to_vec();
        bytes.extend((header.len() as u32).to_be_bytes());
        bytes.extend(header.as_bytes());
        let mut client = broker.client();
        client.socket().write_all(&bytes).expect("write");
        client.expect_answer(5);
        let answer = client.finish(5).expect("an answer").success();
        let end = answer.and_then(|frame| frame.number("offset"));
        assert_eq!(end.expect("an offset"), 1, "{language} {version}");
    }
    broker.stop();
}

#[test]
fn two_signals_in_a_row_end_it_at_once() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("signals");
    broker.start();
    send_some(&broker, 10);
    broker.signal("INT");
    let asked = Instant::now();
    broker.signal("TERM");
    let status = broker.wait_end(END);
    assert!(asked.elapsed() < END, "{status}");
    broker.start();
    assert_eq!(count(&broker), 10);
    broker.stop();
}

#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("full-stderr");
    broker.wrapper(&["bash", "-c", "exec \"$@\" > /dev/full 2>&1", "bash"]);
    broker.start();
    send_some(&broker, 10);
    // Each of these is worth a line.
    for _ in 0..3 {
        let client = broker.client();
        client.socket().write_all(&[255; 64]).expect("write");
    }
    assert_eq!(count(&broker), 10);
    broker.stop();
}

#[test]
fn a_request_with_an_empty_group_is_refused_and_the_broker_goes_on() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("empty-group");
    broker.start();
    let mut client = broker.client();
    client.create_topic("named", 1).expect("create topic");
    let body = payload::body(1, 100);
    client.send("named", 0, &body, &[]).expect("send");
    let pop: i32 = 200_050;
    let asks: [(i32, &[(&str, &str)]); 3] = [
        (
            code::PULL_MESSAGE,
            &[
                ("queueOffset", "0"),
                ("maxMsgNums", "32"),
                ("sysFlag", "0"),
                ("commitOffset", "0"),
                ("suspendTimeoutMillis", "0"),
                ("subVersion", "0"),
            ],
        ),
        (code::UPDATE_CONSUMER_OFFSET, &[("commitOffset", "1")]),
        (
            pop,
            &[
                ("maxMsgNums", "1"),
                ("invisibleTime", "1000"),
                ("pollTime", "0"),
                ("bornTime", "0"),
                ("initMode", "0"),
            ],
        ),
    ];
    for (asked, further) in asks {
        for group in ["", " "] {
            let place = [
                ("consumerGroup", group),
                ("topic", "named"),
                ("queueId", "0"),
            ];
            let fields: Vec<(&str, String)> = place
                .iter()
                .chain(further)
                .map(|(name, value)| (*name, (*value).to_owned()))
                .collect();
            let answer = broker.client().call(asked, &fields, b"").expect("answer");
            assert_eq!(
                answer.code, 29,
                "code {asked} with group {group:?}: {answer:?}"
            );
            client.send("named", 0, &body, &[]).expect("a good send");
        }
    }
    broker.stop();
}
