//! What a new user sees: start, send, read, stop, start again, and everything is still there.
//!
//! Invariant: both header encodings, all kinds of send and every offset question tell one story.

use std::time::{Duration, Instant};

use tests::client::{Client, answer, code, physical_offset};
use tests::frame::Encoding;
use tests::payload;
use tests::process::{BrokerProcess, eventually, local};
use tests::turn;

const TOPIC: &str = "first_contact";

#[test]
fn a_message_sent_in_either_encoding_is_read_back_unchanged() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("round-trip");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 4).expect("create topic");
    for encoding in [Encoding::Json, Encoding::Binary] {
        let mut client = broker.client().with_encoding(encoding);
        for number in 0..100 {
            let body = payload::body(number, 16 + number as usize * 37);
            let key = format!("k{number}");
            let properties = [("KEYS", key.as_str()), ("TAGS", "TagA"), ("p1", "v")];
            let sent = client.send(TOPIC, 1, &body, &properties).expect("send");
            let pulled = client.pull(TOPIC, 1, sent.queue_offset, 1).expect("pull");
            let record = pulled
                .records
                .first()
                .expect("readable the moment it is acknowledged");
            assert_eq!(record.body, body);
            assert_eq!(record.queue_offset, sent.queue_offset);
            assert_eq!(record.store_host, local(broker.broker_port));
            for (name, value) in properties {
                assert_eq!(record.property(name), value);
            }
            let offset = physical_offset(sent.message_id());
            assert_eq!(record.physical_offset, offset);
            assert_eq!(client.view(TOPIC, offset).expect("view").body, body);
        }
    }
    assert_eq!(client.max_offset(TOPIC, 1).expect("max"), 200);
    assert_eq!(client.read_queue(TOPIC, 1, 0).expect("read").len(), 200);
    broker.stop();
}

#[test]
fn one_way_sends_and_batches_arrive_in_order() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("oneway");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..50 {
        client
            .send_oneway(TOPIC, 0, &payload::body(number, 64))
            .expect("one-way");
    }
    let bodies: Vec<_> = (50..60).map(|number| payload::body(number, 64)).collect();
    let items: Vec<_> = bodies
        .iter()
        .map(|body| (body.as_slice(), &[][..]))
        .collect();
    let sent = client.send_batch(TOPIC, 0, &items, &[]).expect("batch");
    assert_eq!(sent.message_ids.len(), 10);
    eventually("60 messages", Duration::from_secs(5), || {
        client.max_offset(TOPIC, 0).expect("max") == 60
    });
    let records = client.read_queue(TOPIC, 0, 0).expect("read");
    let numbers: Vec<_> = records
        .iter()
        .map(|record| payload::number(&record.body))
        .collect();
    assert_eq!(numbers, (0..60).map(Some).collect::<Vec<_>>());
    assert_eq!(sent.queue_offset, 50);
}

#[test]
fn an_unknown_topic_is_created_by_the_first_message() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("auto-create");
    broker.start();
    let mut client = broker.client();
    let sent = client.send("never_seen", 0, b"a body", &[]).expect("send");
    assert_eq!(sent.queue_offset, 0);
    let mut namesrv = broker.namesrv();
    eventually("a route of the new topic", Duration::from_secs(5), || {
        namesrv.route("never_seen").expect("route").is_some()
    });
    assert_eq!(namesrv.route("still_unknown").expect("route"), None);
}

#[test]
fn offsets_and_times_of_a_queue_agree() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("offsets");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 2).expect("create topic");
    assert_eq!(
        client.max_offset(TOPIC, 0).expect("max of an empty queue"),
        0
    );
    for number in 0..20 {
        client
            .send(TOPIC, 0, &payload::body(number, 100), &[])
            .expect("send");
        std::thread::sleep(Duration::from_millis(3));
    }
    let records = client.read_queue(TOPIC, 0, 0).expect("read");
    for record in &records {
        let time = record.store_timestamp_ms;
        let first = records
            .iter()
            .position(|record| record.store_timestamp_ms >= time);
        let found = client.search_offset(TOPIC, 0, time).expect("search");
        assert_eq!(
            Some(found as usize),
            first,
            "first offset stored at {time} or later"
        );
    }
    assert_eq!(client.min_offset(TOPIC, 0).expect("min"), 0);
    assert_eq!(
        client
            .query_offset("g", TOPIC, 0)
            .expect("query")
            .unwrap_or(0),
        0
    );
    client.heartbeat("c", "g", TOPIC).expect("heartbeat");
    client.commit("g", TOPIC, 0, 7).expect("commit");
    assert_eq!(client.query_offset("g", TOPIC, 0).expect("query"), Some(7));
}

#[test]
fn a_stop_and_a_start_lose_nothing() {
    let _turn = turn();
    for buffer in ["auto", "none"] {
        let mut broker = BrokerProcess::new(&format!("restart-{buffer}"));
        broker.set("pinion.bufferDir", buffer).start();
        let mut client = broker.client();
        client.create_topic(TOPIC, 4).expect("create topic");
        for number in 0..400 {
            let queue = (number % 4) as i32;
            client
                .send(TOPIC, queue, &payload::body(number, 1000), &[])
                .expect("send");
        }
        client.heartbeat("c", "g", TOPIC).expect("heartbeat");
        client.commit("g", TOPIC, 2, 33).expect("commit");
        for _ in 0..2 {
            broker.stop();
            broker.start();
        }
        let mut client = broker.client();
        for queue in 0..4 {
            let records = client.read_queue(TOPIC, queue, 0).expect("read");
            let numbers: Vec<_> = records.iter().map(|r| payload::number(&r.body)).collect();
            let expected = (0..100)
                .map(|at| Some(at * 4 + queue as u64))
                .collect::<Vec<_>>();
            assert_eq!(numbers, expected, "queue {queue} with bufferDir={buffer}");
        }
        assert_eq!(client.query_offset("g", TOPIC, 2).expect("query"), Some(33));
        let sent = client
            .send(TOPIC, 0, &payload::body(1, 20), &[])
            .expect("send");
        assert_eq!(sent.queue_offset, 100);
        broker.stop();
    }
}

#[test]
fn a_start_says_within_a_second_what_it_got() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("banner");
    let started = Instant::now();
    broker.start();
    let waited = started.elapsed();
    assert!(waited < Duration::from_secs(1), "ready after {waited:?}");
    // The ports open a moment before the lines are written.
    eventually("the lines of the start", Duration::from_secs(1), || {
        broker.output().contains("to stop")
    });
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "said only after {:?}",
        started.elapsed()
    );
    let text = broker.output();
    let port = broker.broker_port.to_string();
    for word in [
        port.as_str(),
        "core",
        "shard",
        "direct",
        "memlock",
        "pinning",
    ] {
        assert!(text.contains(word), "nothing about {word} in:\n{text}");
    }
    broker.signal("INT");
    assert_eq!(
        broker.wait_end(Duration::from_secs(10)).code(),
        Some(0),
        "Ctrl-C"
    );
}

#[test]
fn two_brokers_do_not_open_one_store() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("one-store");
    broker.start();
    broker
        .client()
        .create_topic(TOPIC, 1)
        .expect("create topic");
    let mut second = BrokerProcess::new("one-store-second");
    let data = broker.data().display().to_string();
    let (namesrv, port) = (
        second.namesrv_port.to_string(),
        second.broker_port.to_string(),
    );
    let words = ["standalone", "--data", &data, "--namesrv-port", &namesrv];
    let mut words: Vec<String> = words.map(str::to_owned).to_vec();
    words.extend(["--broker-port".to_owned(), port]);
    second.launch_as(&words);
    let status = second.wait_end(Duration::from_secs(5));
    assert_ne!(status.code(), Some(0), "it said:\n{}", second.output());
    broker
        .client()
        .send(TOPIC, 0, b"still fine", &[])
        .expect("send");
}

#[test]
fn an_unknown_request_code_is_answered_as_unsupported() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("unknown-code");
    broker.start();
    let servers = [broker.broker_port, broker.namesrv_port];
    for address in servers.map(local) {
        let mut client = Client::connect(address).expect("connect");
        let frame = client.call(29_999, &[], b"").expect("an answer");
        assert_eq!(frame.code, answer::REQUEST_CODE_NOT_SUPPORTED, "{frame:?}");
    }
    let mut client = broker.client().with_encoding(Encoding::Binary);
    let frame = client.call(29_999, &[], b"").expect("an answer");
    assert_eq!(frame.code, answer::REQUEST_CODE_NOT_SUPPORTED);
    let frame = client
        .call(code::SEND_MESSAGE_V2, &[("b", "t".to_owned())], b"")
        .expect("answer");
    assert_ne!(frame.code, answer::SUCCESS, "a send without its fields");
}
