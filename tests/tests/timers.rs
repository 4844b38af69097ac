//! Messages with a delivery time of their own, as clients see them (H13), and taking them back.
//!
//! Invariant: none is readable before its time by the clock of the machine, and each comes once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tests::client::{Client, sent};
use tests::frame::Frame;
use tests::payload::{self, Random};
use tests::pop::{Pop, now_ms};
use tests::process::{BrokerProcess, eventually};
use tests::record::Record;
use tests::turn;

const TOPIC: &str = "timers";
const SEND_BACK: i32 = 36;
const RECALL_MESSAGE: i32 = 370;
const MESSAGE_ILLEGAL: i32 = 13;
const NO_PERMISSION: i32 = 16;
const ILLEGAL_OPERATION: i32 = 604;
const LATE_MS: i64 = 1_000;

fn send_at(client: &mut Client, queue: i32, number: u64, due_ms: i64) {
    let due = due_ms.to_string();
    let body = payload::body(number, 60);
    client
        .send(TOPIC, queue, &body, &[("TIMER_DELIVER_MS", &due)])
        .expect("send");
}

fn arrived(client: &mut Client, queues: i32) -> Vec<Record> {
    let read = |queue| client.read_queue(TOPIC, queue, 0).expect("read");
    (0..queues).flat_map(read).collect()
}

fn number(record: &Record) -> u64 {
    payload::number(&record.body).expect("a body")
}

/// H13: half of the times on whole seconds, the broker killed every seven seconds.
#[test]
fn no_timer_message_is_early_or_lost_when_the_broker_is_killed_again_and_again() {
    const COUNT: u64 = 5_000;
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-h13");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 4).expect("create topic");
    let mut random = Random::from_env();
    let begin = now_ms();
    let mut due = BTreeMap::new();
    for number in 0..COUNT {
        let at = begin + 5_000 + random.below(55_000) as i64;
        let at = if number % 2 == 0 {
            at / 1_000 * 1_000
        } else {
            at
        };
        due.insert(number, at);
        send_at(&mut client, (number % 4) as i32, number, at);
    }
    let last = due.values().max().copied().expect("some");
    let mut starts = vec![(begin, begin)];
    while now_ms() < last {
        let next = (last - now_ms()).clamp(0, 7_000) as u64;
        std::thread::sleep(Duration::from_millis(next));
        if now_ms() < last - 500 {
            let killed = now_ms();
            broker.kill();
            broker.start();
            starts.push((killed, now_ms()));
        }
    }
    let mut client = broker.client();
    eventually("the last messages", Duration::from_secs(10), || {
        arrived(&mut client, 4).len() as u64 >= COUNT
    });
    std::thread::sleep(Duration::from_millis(300));
    let records = arrived(&mut client, 4);
    let mut numbers: Vec<u64> = records.iter().map(number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..COUNT).collect::<Vec<_>>(), "each comes once");
    let mut latest = 0;
    for record in &records {
        let at = due[&number(record)];
        let stored = record.store_timestamp_ms;
        assert!(stored >= at, "early by {} ms", at - stored);
        // What the kill caught, or came due while the broker was down, counts from its start.
        let mut caught = starts.iter().map(|(killed, up)| (*killed - LATE_MS, *up));
        let down = caught.find(|(killed, up)| (*killed..=*up).contains(&at));
        let since = down.map_or(at, |(_, up)| up);
        latest = latest.max(stored - since);
    }
    println!("{} starts, latest {latest} ms", starts.len());
    assert!(latest <= LATE_MS, "late by {latest} ms");
}

#[test]
fn delays_and_times_are_kept_to_the_millisecond_and_properties_stay() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-kinds");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let begin = now_ms();
    let in_two = (begin + 2_345).to_string();
    for (at, (name, value)) in [
        ("TIMER_DELAY_SEC", "1"),
        ("TIMER_DELAY_MS", "1500"),
        ("TIMER_DELIVER_MS", in_two.as_str()),
        ("TIMER_DELIVER_MS", "1000"),
    ]
    .into_iter()
    .enumerate()
    {
        let body = payload::body(at as u64, 40);
        client
            .send(
                TOPIC,
                0,
                &body,
                &[(name, value), ("TAGS", "t"), ("mine", "kept")],
            )
            .expect("send");
    }
    // A delay level goes before a time.
    let both = [("DELAY", "2"), ("TIMER_DELAY_MS", "10")];
    client
        .send(TOPIC, 0, &payload::body(4, 40), &both)
        .expect("send");
    eventually("all five", Duration::from_secs(8), || {
        arrived(&mut client, 1).len() == 5
    });
    let records = arrived(&mut client, 1);
    let order: Vec<u64> = records.iter().map(number).collect();
    assert_eq!(order, [3, 0, 1, 2, 4], "in the order of their times");
    let waits = [0, 1_000, 1_500, 2_345, 5_000];
    for (record, wait_ms) in records.iter().zip(waits) {
        assert_eq!((record.topic.as_str(), record.queue_id), (TOPIC, 0));
        let late = record.store_timestamp_ms - begin - wait_ms;
        assert!((0..300).contains(&late), "{wait_ms}: {late} ms");
    }
    assert_eq!(records[1].property("mine"), "kept");
    assert_eq!(records[1].property("REAL_TOPIC"), TOPIC);
    for name in ["TIMER_OUT_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"] {
        let value: i64 = records[1].property(name).parse().expect("a number");
        assert!(value >= begin, "{name}={value}");
    }
    assert!(!records[4].properties.contains_key("TIMER_DELAY_MS"));
}

/// Its copy is no timed message any more, and its original is done.
#[test]
fn a_timed_message_that_was_popped_and_not_acknowledged_comes_again_and_only_that() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-pop");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 2).expect("create topic");
    let due = now_ms() + 1_000;
    send_at(&mut client, 1, 7, due);
    let asked = Pop::of("pop_timers", TOPIC).invisible(1_500);
    let asked = asked.waiting(8_000);
    let first = client.pop(&asked).expect("pop").messages;
    let popped_ms = now_ms();
    assert_eq!(first.len(), 1);
    assert!(popped_ms >= due, "early by {} ms", due - popped_ms);
    broker.kill();
    broker.start();
    let mut client = broker.client();
    let again = client.pop(&asked).expect("pop").messages;
    assert_eq!(again.len(), 1);
    assert_eq!(number(&again[0].record), 7);
    assert_eq!(again[0].record.property("TIMER_OUT_MS"), due.to_string());
    assert!(now_ms() >= popped_ms + 1_400, "inside its invisible time");
    assert_eq!(client.ack(&again[0]).expect("ack"), 0);
    broker.kill();
    broker.start();
    let mut client = broker.client();
    let more = client.pop(&asked.waiting(2_000)).expect("pop").messages;
    assert!(more.is_empty(), "{more:?}");
    assert_eq!(arrived(&mut client, 2).len(), 1);
}

#[test]
fn a_timed_message_that_was_sent_back_waits_for_the_level_of_its_retry() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-back");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let beat = client.heartbeat("consumer", "back", TOPIC);
    beat.and_then(Frame::success).expect("heartbeat");
    send_at(&mut client, 0, 5, now_ms() + 300);
    eventually("the message", Duration::from_secs(5), || {
        arrived(&mut client, 1).len() == 1
    });
    let record = &arrived(&mut client, 1)[0];
    let fields = [
        ("offset", record.physical_offset.to_string()),
        ("group", "back".to_owned()),
        ("originTopic", TOPIC.to_owned()),
        ("delayLevel", "2".to_owned()),
    ];
    let asked = now_ms();
    let answer = client.call(SEND_BACK, &fields, b"");
    answer.and_then(Frame::success).expect("sent back");
    broker.kill();
    broker.start();
    let mut client = broker.client();
    let retries = |client: &mut Client| client.read_queue("%RETRY%back", 0, 0).expect("read");
    eventually("the retry", Duration::from_secs(12), || {
        retries(&mut client).len() == 1
    });
    let retry = &retries(&mut client)[0];
    let waited = retry.store_timestamp_ms - asked;
    assert!((5_000..7_000).contains(&waited), "after {waited} ms");
    assert_eq!((number(retry), retry.reconsume_times), (5, 1));
    assert_eq!(retry.property("RETRY_TOPIC"), TOPIC);
    assert_eq!(arrived(&mut client, 1).len(), 1, "once in its own topic");
}

#[test]
fn times_that_cannot_be_kept_are_refused_with_their_reason() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-refused");
    broker.set("timerMaxDelaySec", "100").start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for (name, value, word) in [
        ("TIMER_DELAY_SEC", "101", "timerMaxDelaySec"),
        ("TIMER_DELAY_SEC", "9223372036854775807", "timerMaxDelaySec"),
        ("TIMER_DELAY_MS", "-1", "negative"),
        ("TIMER_DELAY_MS", "soon", "not a number"),
        ("TIMER_DELIVER_MS", "99999999999999999999", "not a number"),
    ] {
        let opaque = client
            .start_send(TOPIC, 0, b"x", &[(name, value)])
            .expect("send");
        let answer = client.finish(opaque).expect("an answer");
        assert_eq!(answer.code, MESSAGE_ILLEGAL, "{name}={value}: {answer:?}");
        let remark = format!("{answer:?}");
        assert!(remark.contains(word) && remark.contains(name), "{remark}");
    }
    assert!(arrived(&mut client, 1).is_empty());
}

fn recall(client: &mut Client, handle: &str) -> (i32, String) {
    let fields = [
        ("producerGroup", "g".to_owned()),
        ("topic", TOPIC.to_owned()),
        ("recallHandle", handle.to_owned()),
    ];
    let answer = client
        .call(RECALL_MESSAGE, &fields, b"")
        .expect("an answer");
    let id = answer.fields.get("msgId").cloned().unwrap_or_default();
    (answer.code, id)
}

/// A producer's handle, and the same without the place that this broker adds.
fn handles(client: &mut Client, queue: i32, number: u64, due_ms: i64) -> (String, String) {
    let due = due_ms.to_string();
    let unique = format!("UNIQUE{number}");
    let properties = [
        ("TIMER_DELIVER_MS", due.as_str()),
        ("UNIQ_KEY", unique.as_str()),
    ];
    let body = payload::body(number, 60);
    let opaque = client
        .start_send(TOPIC, queue, &body, &properties)
        .expect("send");
    let answer = client.finish(opaque).expect("an answer");
    let handle = answer.text("recallHandle").expect("a handle").to_owned();
    sent(answer).expect("sent");
    let words = base64(&handle);
    let plain: Vec<&str> = words.split(' ').take(5).collect();
    assert_eq!((plain[0], plain[1]), ("v1", TOPIC));
    assert_eq!((plain[3], plain[4]), (due.as_str(), unique.as_str()));
    (handle, encoded(&plain.join(" ")))
}

const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

fn base64(text: &str) -> String {
    let mut bits = String::new();
    for byte in text.trim_end_matches('=').bytes() {
        let value = DIGITS.iter().position(|digit| *digit == byte);
        bits += &format!("{:06b}", value.expect("a digit"));
    }
    let bytes = bits.as_bytes().chunks_exact(8).map(|bits| {
        let bits = std::str::from_utf8(bits).expect("digits");
        u8::from_str_radix(bits, 2).expect("bits")
    });
    String::from_utf8(bytes.collect()).expect("text")
}

fn encoded(text: &str) -> String {
    let bits: String = text.bytes().map(|byte| format!("{byte:08b}")).collect();
    let digits = bits.as_bytes().chunks(6).map(|bits| {
        let bits = format!("{:0<6}", std::str::from_utf8(bits).expect("digits"));
        let value = usize::from_str_radix(&bits, 2).expect("bits");
        char::from(DIGITS[value])
    });
    digits.collect()
}

#[test]
fn a_message_that_was_taken_back_does_not_come_on_any_shard() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-recall");
    broker.set("recallMessageEnable", "true").start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 4).expect("create topic");
    let due = now_ms() + 4_000;
    for number in 0..16 {
        let (own, plain) = handles(&mut client, (number % 4) as i32, number, due);
        let handle = match number / 4 {
            1 => own,
            2 => plain,
            _ => continue,
        };
        let (code, id) = recall(&mut client, &handle);
        assert_eq!((code, id), (0, format!("UNIQUE{number}")));
        if number == 6 {
            broker.kill();
            broker.start();
            client = broker.client();
        }
    }
    let (late, _) = handles(&mut client, 0, 16, now_ms() + 300);
    let wait = (due - now_ms() + 1_500).max(0) as u64;
    std::thread::sleep(Duration::from_millis(wait));
    let mut numbers: Vec<u64> = arrived(&mut client, 4).iter().map(number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 2, 3, 12, 13, 14, 15, 16]);
    assert_eq!(recall(&mut client, &late).0, ILLEGAL_OPERATION, "too late");
    assert_eq!(recall(&mut client, "bm8gaGFuZGxl").0, ILLEGAL_OPERATION);
}

#[test]
fn recall_is_forbidden_unless_it_is_switched_on() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-forbidden");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let (handle, _) = handles(&mut client, 0, 1, now_ms() + 60_000);
    assert_eq!(recall(&mut client, &handle).0, NO_PERMISSION);
}

#[test]
fn timers_under_load_are_late_by_a_tenth_of_a_second_at_most() {
    const COUNT: u64 = 3_000;
    let _turn = turn();
    let mut broker = BrokerProcess::new("timers-load");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 4).expect("create topic");
    client.create_topic("busy", 4).expect("create topic");
    let begin = now_ms();
    let due = |number: u64| begin + 4_000 + (number.wrapping_mul(7919) % 6_000) as i64;
    for number in 0..COUNT {
        send_at(&mut client, (number % 4) as i32, number, due(number));
    }
    let until = Instant::now() + Duration::from_millis((begin + 10_500 - now_ms()) as u64);
    let mut plain = 0;
    while Instant::now() < until {
        let body = payload::body(plain, 1_000);
        client
            .send("busy", (plain % 4) as i32, &body, &[])
            .expect("send");
        plain += 1;
    }
    eventually("all of them", Duration::from_secs(5), || {
        arrived(&mut client, 4).len() as u64 == COUNT
    });
    let records = arrived(&mut client, 4);
    let late = |record: &Record| record.store_timestamp_ms - due(number(record));
    let mut late: Vec<i64> = records.iter().map(late).collect();
    late.sort_unstable();
    let at = |share: f64| late[(late.len() as f64 * share) as usize - 1];
    println!(
        "{plain} plain sends beside; late: p50 {} p99 {}",
        at(0.5),
        at(0.99)
    );
    assert!(late[0] >= 0, "early by {} ms", -late[0]);
    assert!(at(0.99) <= 100, "p99 {} ms", at(0.99));
}
