//! POP from outside: every message comes until it is acknowledged, and to one consumer at a time.
//!
//! Invariant: each test fails when a message is lost, stuck, doubled inside its invisible time, or
//! comes again after its acknowledgement was answered.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tests::client::Client;
use tests::pop::{NO_MESSAGE, POLLING_TIMEOUT, Pop, Popped, code};
use tests::process::BrokerProcess;
use tests::turn;

const GROUP: &str = "pop_group";

fn broker(name: &str, topic: &str, queues: i32) -> (BrokerProcess, Client) {
    let mut broker = BrokerProcess::new(name);
    broker.set("pinion.shards", "4");
    broker.start();
    let mut client = broker.client();
    client.create_topic(topic, queues).expect("create topic");
    (broker, client)
}

fn send(client: &mut Client, topic: &str, queue_id: i32, count: usize) {
    for number in 0..count {
        let body = format!("{queue_id} {number}");
        let sent = client.send(topic, queue_id, body.as_bytes(), &[("TAGS", "a")]);
        sent.expect("send");
    }
}

fn text(message: &Popped) -> String {
    String::from_utf8_lossy(&message.record.body).into_owned()
}

/// Pops until nothing comes for a while; acknowledges nothing.
fn pop_all(client: &mut Client, asked: &Pop<'_>) -> Vec<Popped> {
    let mut all = Vec::new();
    loop {
        let answer = client.pop(asked).expect("pop");
        if answer.messages.is_empty() {
            return all;
        }
        all.extend(answer.messages);
    }
}

#[test]
fn all_queues_of_all_shards_are_popped_once_and_acknowledged_ones_stay_away() {
    let _turn = turn();
    let topic = "pop_once";
    let (mut broker, mut client) = broker("pop-once", topic, 8);
    for queue in 0..8 {
        send(&mut client, topic, queue, 20);
    }
    let asked = Pop::of(GROUP, topic).invisible(4_000);
    let all = pop_all(&mut client, &asked);
    let mut bodies: Vec<String> = all.iter().map(text).collect();
    bodies.sort_unstable();
    bodies.dedup();
    assert_eq!((all.len(), bodies.len()), (160, 160));
    let (kept, acked) = all.split_at(40);
    let frame = client.batch_ack(&acked[..60]).expect("batch ack");
    assert_eq!(frame.code, 0, "{frame:?}");
    for message in &acked[60..] {
        assert_eq!(client.ack(message).expect("ack"), 0);
    }
    // Again at once: it is known and answered the same.
    assert_eq!(client.ack(&acked[0]).expect("ack"), 0);
    sleep(Duration::from_millis(4_200));
    let mut again: Vec<String> = Vec::new();
    let until = Instant::now() + Duration::from_secs(5);
    while again.len() < kept.len() && Instant::now() < until {
        let answer = client.pop(&asked.clone().waiting(1_000)).expect("pop");
        for message in answer.messages {
            assert_eq!(message.record.reconsume_times, 1, "{message:?}");
            assert_eq!(message.record.topic, topic);
            assert!(message.topic.starts_with("%RETRY%"), "{}", message.topic);
            assert_eq!(client.ack(&message).expect("ack"), 0);
            again.push(text(&message));
        }
    }
    let mut wanted: Vec<String> = kept.iter().map(text).collect();
    wanted.sort_unstable();
    again.sort_unstable();
    assert_eq!(again, wanted);
    // Its time is over and somebody else had it.
    assert_eq!(client.ack(&kept[0]).expect("ack"), NO_MESSAGE);
    let empty = client.pop(&asked).expect("pop");
    assert_eq!((empty.code, empty.messages.len()), (POLLING_TIMEOUT, 0));
    broker.stop();
}

#[test]
fn a_parked_pop_gets_the_message_that_comes_whatever_shard_it_is_on() {
    let _turn = turn();
    let topic = "pop_parked";
    let (mut broker, mut client) = broker("pop-parked", topic, 8);
    let mut producer = broker.client();
    let asked = Pop::of(GROUP, topic).waiting(10_000).most(1);
    for round in 0..24 {
        let opaque = client.start_pop(&asked).expect("pop");
        if round % 3 > 0 {
            sleep(Duration::from_millis(20));
        }
        let began = Instant::now();
        let body = format!("{round}");
        producer
            .send(topic, round % 8, body.as_bytes(), &[])
            .expect("send");
        let frame = client.finish(opaque).expect("answer");
        let answer = tests::pop::pop_answer(&asked, &frame).expect("pop");
        assert_eq!(answer.messages.len(), 1, "round {round}: {frame:?}");
        assert_eq!(text(&answer.messages[0]), body);
        assert!(
            began.elapsed() < Duration::from_secs(2),
            "{:?}",
            began.elapsed()
        );
        assert_eq!(client.ack(&answer.messages[0]).expect("ack"), 0);
    }
    let began = Instant::now();
    let none = client.pop(&asked.clone().waiting(700)).expect("pop");
    assert_eq!(none.code, POLLING_TIMEOUT);
    assert!(began.elapsed() > Duration::from_millis(500));
    broker.stop();
}

#[test]
fn several_waiting_pops_share_what_comes_and_no_message_lies() {
    let _turn = turn();
    let topic = "pop_shared";
    let (mut broker, mut producer) = broker("pop-shared", topic, 4);
    let mut consumers: Vec<Client> = (0..6).map(|_| broker.client()).collect();
    let asked = Pop::of(GROUP, topic).waiting(5_000).most(2);
    let opaques: Vec<i32> = consumers
        .iter_mut()
        .map(|consumer| consumer.start_pop(&asked).expect("pop"))
        .collect();
    sleep(Duration::from_millis(200));
    // One goes away while it waits: its place must not swallow a message.
    drop(consumers.pop());
    for queue in 0..4 {
        send(&mut producer, topic, queue, 3);
    }
    let mut found = 0;
    for (consumer, opaque) in consumers.iter_mut().zip(&opaques) {
        let frame = consumer.finish(*opaque).expect("answer");
        let answer = tests::pop::pop_answer(&asked, &frame).expect("pop");
        assert!(
            !answer.messages.is_empty(),
            "a pop waited in vain: {frame:?}"
        );
        found += answer.messages.len();
    }
    found += pop_all(&mut producer, &Pop::of(GROUP, topic)).len();
    assert_eq!(found, 12);
    broker.stop();
}

#[test]
fn a_changed_invisible_time_counts_from_the_change_and_voids_the_old_receipt() {
    let _turn = turn();
    let topic = "pop_changed";
    let (mut broker, mut client) = broker("pop-changed", topic, 1);
    send(&mut client, topic, 0, 2);
    let asked = Pop::of(GROUP, topic).invisible(1_500);
    let first = pop_all(&mut client, &asked);
    let longer = client.change_invisible(&first[0], 6_000).expect("change");
    let at_once = client.change_invisible(&first[1], 0).expect("change");
    let began = Instant::now();
    let wait = asked.clone().waiting(5_000);
    let again = client.pop(&wait).expect("pop").messages;
    assert!(
        began.elapsed() < Duration::from_millis(1_400),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(again.len(), 1);
    assert_eq!(text(&again[0]), text(&first[1]));
    assert_eq!(client.ack(&at_once).expect("ack"), NO_MESSAGE);
    assert_eq!(client.ack(&again[0]).expect("ack"), 0);
    sleep(Duration::from_millis(1_600));
    assert!(client.pop(&asked).expect("pop").messages.is_empty());
    assert_eq!(
        client.ack(&first[0]).expect("ack"),
        NO_MESSAGE,
        "the old receipt"
    );
    assert_eq!(client.ack(&longer).expect("ack"), 0);
    sleep(Duration::from_millis(4_000));
    assert!(client.pop(&asked).expect("pop").messages.is_empty());
    broker.stop();
}

#[test]
fn a_message_delivered_often_enough_becomes_a_dead_letter_once() {
    let _turn = turn();
    let topic = "pop_dead";
    let (mut broker, mut client) = broker("pop-dead", topic, 4);
    let group = "{\"groupName\":\"pop_group\",\"retryMaxTimes\":2,\"retryQueueNums\":1,\
                 \"consumeEnable\":true,\"brokerId\":0,\"whichBrokerWhenConsumeSlowly\":1}";
    let frame = client.call(200, &[], group.as_bytes()).expect("group");
    assert_eq!(frame.code, 0, "{frame:?}");
    for queue in 0..4 {
        send(&mut client, topic, queue, 1);
    }
    let asked = Pop::of(GROUP, topic).invisible(300).waiting(1_500);
    let mut deliveries: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    let until = Instant::now() + Duration::from_secs(6);
    while Instant::now() < until {
        for message in client.pop(&asked).expect("pop").messages {
            let times = message.record.reconsume_times;
            deliveries.entry(text(&message)).or_default().push(times);
        }
    }
    assert_eq!(deliveries.len(), 4);
    for (body, times) in &deliveries {
        assert_eq!(times, &[0, 1, 2], "{body}");
    }
    let mut dead = Vec::new();
    for queue in 0..4 {
        if let Ok(records) = client.read_queue("%DLQ%pop_group", queue, 0) {
            dead.extend(records);
        }
    }
    assert_eq!(dead.len(), 4);
    for record in dead {
        assert_eq!(record.property("DLQ_ORIGIN_TOPIC"), topic);
        assert_eq!(record.property("RETRY_TOPIC"), topic);
        assert_eq!(record.reconsume_times, 3);
    }
    broker.stop();
}

#[test]
fn in_order_a_queue_gives_nothing_more_until_all_is_acknowledged_or_its_time_is_over() {
    let _turn = turn();
    let topic = "pop_order";
    let (mut broker, mut client) = broker("pop-order", topic, 1);
    send(&mut client, topic, 0, 9);
    let asked = Pop::of(GROUP, topic).ordered().most(3).invisible(1_500);
    let attempt = Pop {
        attempt: "one",
        ..asked.clone()
    };
    let first = client.pop(&attempt).expect("pop").messages;
    let bodies: Vec<String> = first.iter().map(text).collect();
    assert_eq!(bodies, ["0 0", "0 1", "0 2"]);
    assert!(client.pop(&asked).expect("pop").messages.is_empty());
    let same: Vec<String> = client
        .pop(&attempt)
        .expect("pop")
        .messages
        .iter()
        .map(text)
        .collect();
    assert_eq!(same, bodies, "the same attempt gets the same again");
    sleep(Duration::from_millis(1_600));
    let popped_at = Instant::now();
    let asked = asked.invisible(9_000);
    let second = client.pop(&asked).expect("pop").messages;
    assert_eq!(second.iter().map(text).collect::<Vec<_>>(), bodies);
    assert_eq!(second[0].count, 2);
    assert_eq!(client.ack(&second[1]).expect("ack"), 0);
    // A kill between: what is acknowledged stays so, what is not comes again, in order.
    broker.kill();
    broker.start();
    let mut client = broker.client();
    let mut third = client.pop(&asked).expect("pop").messages;
    if popped_at.elapsed() < Duration::from_secs(9) {
        assert!(third.is_empty(), "blocked as before the kill");
    }
    if third.is_empty() {
        sleep(Duration::from_millis(9_300).saturating_sub(popped_at.elapsed()));
        third = client.pop(&asked).expect("pop").messages;
    }
    let bodies: Vec<String> = third.iter().map(text).collect();
    assert_eq!(bodies, ["0 0", "0 2"], "0 1 was acknowledged out of turn");
    let opaque = client
        .start_pop(&asked.clone().waiting(5_000))
        .expect("pop");
    let mut other = broker.client();
    for message in &third {
        assert_eq!(other.ack(message).expect("ack"), 0);
    }
    let frame = client.finish(opaque).expect("answer");
    let next = tests::pop::pop_answer(&asked, &frame)
        .expect("pop")
        .messages;
    assert_eq!(
        text(&next[0]),
        "0 3",
        "the last acknowledgement wakes the next pop"
    );
    broker.stop();
}

#[test]
fn in_order_a_message_that_always_fails_becomes_a_dead_letter_and_frees_its_queue() {
    let _turn = turn();
    let topic = "pop_order_dead";
    let (mut broker, mut client) = broker("pop-order-dead", topic, 1);
    let group = "{\"groupName\":\"pop_group\",\"retryMaxTimes\":1}";
    let frame = client.call(200, &[], group.as_bytes()).expect("group");
    assert_eq!(frame.code, 0, "{frame:?}");
    send(&mut client, topic, 0, 3);
    let asked = Pop::of(GROUP, topic).ordered().most(1).invisible(400);
    let mut seen = Vec::new();
    let until = Instant::now() + Duration::from_secs(20);
    while seen.len() < 4 && Instant::now() < until {
        for message in client
            .pop(&asked.clone().waiting(1_000))
            .expect("pop")
            .messages
        {
            seen.push(text(&message));
            if seen.last().is_some_and(|body| body != "0 0") {
                assert_eq!(client.ack(&message).expect("ack"), 0);
            }
        }
    }
    let first = seen.iter().filter(|body| *body == "0 0").count();
    assert!((2..=3).contains(&first), "{seen:?}");
    assert_eq!(&seen[first..], &["0 1", "0 2"][..seen.len() - first]);
    let dead = client
        .read_queue("%DLQ%pop_group", 0, 0)
        .expect("dead letters");
    assert_eq!(dead.len(), 1);
    assert_eq!(dead[0].body, b"0 0");
    broker.stop();
}

#[test]
fn a_tag_filter_passes_over_the_others_and_retries_are_not_filtered() {
    let _turn = turn();
    let topic = "pop_tags";
    let (mut broker, mut client) = broker("pop-tags", topic, 2);
    for number in 0..40 {
        let tag = if number % 4 == 0 { "red" } else { "green" };
        let body = format!("{tag} {number}");
        client
            .send(topic, number % 2, body.as_bytes(), &[("TAGS", tag)])
            .expect("send");
    }
    let asked = Pop {
        tags: "red || blue",
        ..Pop::of(GROUP, topic).invisible(500)
    };
    let first = pop_all(&mut client, &asked);
    assert_eq!(first.len(), 10);
    assert!(first.iter().all(|message| text(message).starts_with("red")));
    let again = client.pop(&asked.clone().waiting(3_000)).expect("pop");
    assert!(!again.messages.is_empty());
    broker.stop();
}

#[test]
fn a_group_that_switches_to_pull_finds_its_unacknowledged_messages_and_no_others() {
    let _turn = turn();
    let topic = "pop_switch";
    let (mut broker, mut client) = broker("pop-switch", topic, 2);
    for queue in 0..2 {
        send(&mut client, topic, queue, 5);
    }
    let asked = Pop::of(GROUP, topic).invisible(1_000);
    let popped = pop_all(&mut client, &asked);
    for message in &popped[..7] {
        assert_eq!(client.ack(message).expect("ack"), 0);
    }
    for queue in 0..2 {
        let stands = client.query_offset(GROUP, topic, queue).expect("offset");
        assert_eq!(stands, Some(5), "pull goes on behind what was popped");
    }
    let body = format!(
        "{{\"consumerGroup\":\"{GROUP}\",\"mode\":\"PULL\",\"popShareQueueNum\":0,\
         \"topic\":\"{topic}\"}}"
    );
    let frame = client.call(code::SET_MESSAGE_REQUEST_MODE, &[], body.as_bytes());
    assert_eq!(frame.expect("mode").code, 0);
    let retry = format!("%RETRY%{GROUP}");
    let mut found = Vec::new();
    let until = Instant::now() + Duration::from_secs(8);
    while found.len() < 3 && Instant::now() < until {
        sleep(Duration::from_millis(200));
        found.clear();
        for queue in 0..4 {
            found.extend(client.read_queue(&retry, queue, 0).unwrap_or_default());
        }
    }
    let mut bodies: Vec<String> = found
        .iter()
        .map(|record| String::from_utf8_lossy(&record.body).into_owned())
        .collect();
    let mut wanted: Vec<String> = popped[7..].iter().map(text).collect();
    bodies.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(bodies, wanted);
    assert!(
        found
            .iter()
            .all(|record| record.property("RETRY_TOPIC") == topic)
    );
    broker.stop();
}

#[test]
fn progress_shows_the_oldest_unacknowledged_message_and_what_is_in_flight() {
    let _turn = turn();
    let topic = "pop_progress";
    let (mut broker, mut client) = broker("pop-progress", topic, 1);
    send(&mut client, topic, 0, 5);
    let mut popped = pop_all(&mut client, &Pop::of(GROUP, topic));
    popped.sort_by_key(|message| message.record.queue_offset);
    let fields = [
        ("consumerGroup", GROUP.to_owned()),
        ("topic", topic.to_owned()),
    ];
    let progress = |client: &mut Client| {
        let frame = client.call(208, &fields, b"").expect("consume stats");
        let body = String::from_utf8_lossy(&frame.body).into_owned();
        ["brokerOffset", "consumerOffset", "pullOffset"].map(|name| {
            let (_, rest) = body.split_once(&format!("\"{name}\":")).expect("a field");
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse::<i64>().expect("a number")
        })
    };
    assert_eq!(progress(&mut client), [5, 0, 5]);
    for at in [0, 2] {
        assert_eq!(client.ack(&popped[at]).expect("ack"), 0);
    }
    assert_eq!(progress(&mut client), [5, 1, 5]);
    for at in [1, 3, 4] {
        assert_eq!(client.ack(&popped[at]).expect("ack"), 0);
    }
    assert_eq!(progress(&mut client)[..2], [5, 5]);
    broker.stop();
}

#[test]
fn notification_and_polling_info_tell_of_messages_and_of_those_who_wait() {
    let _turn = turn();
    let topic = "pop_notify";
    let (mut broker, mut client) = broker("pop-notify", topic, 4);
    let fields = |poll_ms: i64| {
        vec![
            ("consumerGroup", GROUP.to_owned()),
            ("topic", topic.to_owned()),
            ("queueId", "-1".to_owned()),
            ("pollTime", poll_ms.to_string()),
            ("bornTime", tests::pop::now_ms().to_string()),
        ]
    };
    let none = client
        .call(code::NOTIFICATION, &fields(0), b"")
        .expect("answer");
    assert_eq!(none.text("hasMsg").expect("hasMsg"), "false");
    let request = tests::frame::Frame::request(code::NOTIFICATION, &fields(8_000), b"");
    let opaque = client.start(request).expect("start");
    sleep(Duration::from_millis(200));
    let mut other = broker.client();
    let info = other
        .call(code::POLLING_INFO, &fields(0), b"")
        .expect("answer");
    assert_eq!(info.number("pollingNum").expect("pollingNum"), 1);
    let began = Instant::now();
    send(&mut other, topic, 2, 1);
    let some = client.finish(opaque).expect("answer");
    assert_eq!(some.text("hasMsg").expect("hasMsg"), "true");
    assert!(began.elapsed() < Duration::from_secs(2));
    let popped = pop_all(&mut client, &Pop::of(GROUP, topic));
    assert_eq!(popped.len(), 1, "asking takes nothing");
    broker.stop();
}
