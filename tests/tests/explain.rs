//! `pinion explain` on prepared mysteries: a broker is brought into a state in which a message
//! waits, and the tool has to say why.
//!
//! Invariant: the tool only asks, so that it leaves no topic and no group behind; an answer takes
//! less than 100 ms.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use tests::client::{Client, Sent, code, sent};
use tests::frame::Frame;
use tests::pop::Pop;
use tests::process::{BrokerProcess, eventually, program};
use tests::record::encode_properties;
use tests::turn;

const TOPIC: &str = "mystery";
const GROUP: &str = "mystery_group";
const SEND_BACK: i32 = 36;
const END_TRANSACTION: i32 = 37;
const COMMIT: i32 = 8;
const ROLL_BACK: i32 = 12;
const UPDATE_GROUP: i32 = 200;
const DELETE_EXPIRED: i32 = 329;
const ANSWER_MS_MAX: u64 = 100;

struct Case {
    broker: BrokerProcess,
    client: Client,
}

fn case(name: &str) -> Case {
    let mut broker = BrokerProcess::new(&format!("explain-{name}"));
    broker.set("pinion.shards", "2").start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 2).expect("create topic");
    Case { broker, client }
}

struct Said {
    kind: String,
    all: String,
    took_ms: u64,
}

impl Case {
    fn run(&self, arguments: &[&str]) -> Said {
        let namesrv = format!("127.0.0.1:{}", self.broker.namesrv_port);
        let output = Command::new(program())
            .args(["explain", "--json", "-n", &namesrv])
            .args(arguments)
            .output()
            .expect("pinion explain");
        assert!(output.status.success(), "{output:?}");
        let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let details = said["details"].as_array().expect("details");
        let details: Vec<String> = details.iter().map(text).collect();
        Said {
            kind: text(&said["kind"]),
            all: format!("{}\n{}", text(&said["why"]), details.join("\n")),
            took_ms: said["tookMs"].as_u64().expect("a time"),
        }
    }

    /// Asks about a message for the group; the tool has to say this of it, with these words.
    fn says(&self, message: &[&str], kind: &str, words: &[&str]) -> Said {
        let mut arguments = vec!["-t", TOPIC, "-g", GROUP];
        arguments.extend(message);
        self.says_of(&arguments, kind, words)
    }

    fn says_of(&self, arguments: &[&str], kind: &str, words: &[&str]) -> Said {
        let said = self.run(arguments);
        println!("{kind} after {} ms: {}\n", said.took_ms, said.all);
        assert_eq!(said.kind, kind, "{arguments:?}: {}", said.all);
        for word in words {
            assert!(said.all.contains(word), "{word:?} in {}", said.all);
        }
        said
    }

    fn send(&mut self, unique: &str, more: &[(&str, &str)]) -> Sent {
        let mut properties = vec![("UNIQ_KEY", unique), ("TAGS", "a"), ("colour", "red")];
        properties.extend(more);
        let sent = self.client.send(TOPIC, 0, b"body", &properties);
        sent.expect("send")
    }

    /// A member of the group that subscribes to the topic by tag or expression.
    fn member(&self, id: &str, kind: &str, expression: &str) -> Client {
        let mut member = self.broker.client();
        let body = serde_json::json!({
            "clientID": id,
            "producerDataSet": [],
            "consumerDataSet": [{
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "consumeType": "CONSUME_PASSIVELY",
                "groupName": GROUP,
                "messageModel": "CLUSTERING",
                "subscriptionDataSet": [{
                    "classFilterMode": false, "codeSet": [], "expressionType": kind,
                    "subString": expression, "subVersion": 1, "tagsSet": [], "topic": TOPIC,
                }],
                "unitMode": false,
            }],
        });
        let beat = member.call(code::HEART_BEAT, &[], body.to_string().as_bytes());
        beat.and_then(Frame::success).expect("heartbeat");
        member
    }

    fn is_forgotten(&mut self) {
        let groups = self
            .client
            .call(code::GET_ALL_GROUPS, &[], b"")
            .expect("groups");
        let groups = String::from_utf8_lossy(&groups.body).into_owned();
        assert!(!groups.contains("nobody_at_all"), "asking makes no group");
    }
}

#[test]
fn who_does_not_read_and_what_was_never_there_is_told() {
    let _turn = turn();
    let mut case = case("readers");
    let first = case.send("U1", &[("KEYS", "order-7")]);
    let nobody = ["-t", TOPIC, "-g", "nobody_at_all", "--id", "U1"];
    let words = ["knows no group nobody_at_all", "tag a", "stored at"];
    case.says_of(&nobody, "no-group", &words);
    case.is_forgotten();
    // Every way to name it finds the same message.
    let place = ["--queue", "0", "--offset", "0"];
    for way in [
        &["--key", "order-7"][..],
        &["--id", first.message_id()],
        &place,
    ] {
        let said = case.says(way, "no-group", &[]);
        assert!(said.all.contains("unique key U1"), "{}", said.all);
    }
    let by_id = ["--id", first.message_id()];
    case.says_of(&by_id, "stored", &["topic mystery, queue 0, offset 0"]);
    let missing = ["--queue", "0", "--offset", "1"];
    case.says(&missing, "never-arrived", &["the queue ends at 1"]);
    case.says(
        &["--id", "U2"],
        "never-arrived",
        &["no message of topic mystery has it"],
    );
    let topic = ["-t", "mystery_topic", "--key", "order-7"];
    case.says_of(
        &topic,
        "never-arrived",
        &["no broker has the topic mystery_topic"],
    );
    let mut other = case.broker.client();
    case.client.create_topic("elsewhere", 1).expect("topic");
    other
        .heartbeat("c-other", GROUP, "elsewhere")
        .expect("heartbeat");
    let mut reader = case.broker.client();
    reader
        .heartbeat("c-reader", "right_group", TOPIC)
        .expect("heartbeat");
    let words = ["only to elsewhere", "right_group"];
    case.says(&["--id", "U1"], "wrong-group", &words);
    case.broker.stop();
}

#[test]
fn a_group_without_members_that_lags_and_one_that_is_done_are_told_apart() {
    let _turn = turn();
    let mut case = case("progress");
    for number in 0..5 {
        case.send(&format!("U{number}"), &[]);
    }
    let mut member = case.member("c-1", "TAG", "*");
    case.says(
        &["--id", "U3"],
        "not-asked",
        &["1 member online", "3 messages are in front"],
    );
    let pulled = member.pull_as(GROUP, TOPIC, 0, 0, 2).expect("pull");
    assert_eq!(pulled.records.len(), 2);
    let words = ["c-1 (127.0.0.1:", "has not acknowledged it"];
    case.says(&["--id", "U1"], "delivered", &words);
    case.says(
        &["--id", "U3"],
        "lags",
        &["3 messages in front of it", "never delivered"],
    );
    let again = member.pull_as(GROUP, TOPIC, 0, 1, 1).expect("pull");
    assert_eq!(again.records.len(), 1);
    member.commit(GROUP, TOPIC, 0, 2).expect("commit");
    let words = [
        "stands at offset 2",
        "delivered to group mystery_group 2 times",
    ];
    case.says(&["--id", "U1"], "consumed", &words);
    member.commit(GROUP, TOPIC, 0, 5).expect("commit");
    case.says(&["--id", "U4"], "skipped", &["never got it"]);
    drop(member);
    case.send("U5", &[]);
    eventually("the member to go", Duration::from_secs(5), || {
        case.run(&["-t", TOPIC, "-g", GROUP, "--id", "U5"])
            .all
            .contains("queue 0 to 6")
            && !case
                .run(&["-t", TOPIC, "-g", GROUP, "--id", "U5"])
                .all
                .contains("c-1")
    });
    case.broker.kill();
    case.broker.start();
    let words = ["no member of group mystery_group is online"];
    case.says(&["--id", "U5"], "no-member", &words);
    let words = ["not recorded any more"];
    case.says(&["--id", "U1"], "consumed", &words);
    case.broker.stop();
}

#[test]
fn what_a_filter_does_not_take_is_told_with_the_filter() {
    let _turn = turn();
    let mut case = case("filter");
    case.send("U1", &[]);
    let tags = case.member("c-tag", "TAG", "b || c");
    case.says(
        &["--id", "U1"],
        "filtered",
        &["takes tags \"b || c\", and it has tag a"],
    );
    drop(tags);
    eventually("the member to go", Duration::from_secs(5), || {
        !case
            .run(&["-t", TOPIC, "-g", GROUP, "--id", "U1"])
            .all
            .contains("c-tag")
    });
    let mut sql = case.member("c-sql", "SQL92", "colour = 'blue'");
    let words = ["SQL92 \"colour = 'blue'\"", "colour=red"];
    case.says(&["--id", "U1"], "filtered", &words);
    sql.pull_as(GROUP, TOPIC, 0, 0, 8).expect("pull");
    sql.commit(GROUP, TOPIC, 0, 1).expect("commit");
    case.says(&["--id", "U1"], "filtered", &words);
    case.broker.stop();
}

#[test]
fn a_queue_that_a_silent_client_has_locked_and_a_paused_group_are_told() {
    let _turn = turn();
    let mut case = case("locked");
    case.send("U1", &[]);
    let mut member = case.member("c-1", "TAG", "*");
    // The broker's name is in what the tool says of the place.
    let said = case.says(&["--id", "U1"], "not-asked", &["c-1"]);
    let name = said
        .all
        .split(", on ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let body = serde_json::json!({
        "clientId": "c-gone",
        "consumerGroup": GROUP,
        "mqSet": [{ "brokerName": name.expect("a broker"), "queueId": 0, "topic": TOPIC }],
    });
    let locked = member.call(code::LOCK_QUEUES, &[], body.to_string().as_bytes());
    locked.and_then(Frame::success).expect("lock");
    case.says(
        &["--id", "U1"],
        "locked",
        &["by c-gone, who is no member", "the lock ends at"],
    );
    let config = serde_json::json!({ "groupName": GROUP, "consumeEnable": false });
    let paused = case
        .client
        .call(UPDATE_GROUP, &[], config.to_string().as_bytes());
    paused.and_then(Frame::success).expect("pause");
    case.says(&["--id", "U1"], "paused", &["consumeEnable is false"]);
    case.broker.stop();
}

#[test]
fn a_popped_message_is_invisible_until_its_time_then_comes_again() {
    let _turn = turn();
    let mut case = case("popped");
    case.send("U1", &[]);
    let asked = Pop::of(GROUP, TOPIC).invisible(3_000);
    let popped = case.client.pop(&asked).expect("pop").messages;
    assert_eq!(popped.len(), 1);
    let words = [
        "it was popped by 127.0.0.1:",
        "nobody else gets it until",
        "popped by",
    ];
    case.says(&["--id", "U1"], "invisible", &words);
    eventually("the retry", Duration::from_secs(10), || {
        case.run(&["-t", TOPIC, "-g", GROUP, "--id", "U1"])
            .all
            .contains("put in line again")
    });
    let mut again = Vec::new();
    eventually("the second pop", Duration::from_secs(10), || {
        again = case.client.pop(&asked).expect("pop").messages;
        !again.is_empty()
    });
    case.says(
        &["--id", "U1"],
        "invisible",
        &["put in line again for the group"],
    );
    assert_eq!(case.client.ack(&again[0]).expect("ack"), 0);
    case.says(
        &["--id", "U1"],
        "consumed",
        &["put in line again for the group"],
    );
    case.broker.stop();
}

fn half(client: &mut Client, unique: &str) -> Sent {
    let properties = [
        ("TRAN_MSG", "true"),
        ("PGROUP", "mystery_producers"),
        ("UNIQ_KEY", unique),
    ];
    let fields = [
        ("producerGroup", "mystery_producers".to_owned()),
        ("topic", TOPIC.to_owned()),
        ("defaultTopic", "TBW102".to_owned()),
        ("defaultTopicQueueNums", "4".to_owned()),
        ("queueId", "1".to_owned()),
        ("sysFlag", "4".to_owned()),
        ("bornTimestamp", "1700000000000".to_owned()),
        ("flag", "0".to_owned()),
        ("properties", encode_properties(&properties)),
    ];
    let frame = client
        .call(code::SEND_MESSAGE, &fields, b"half")
        .expect("half");
    sent(frame).expect("half")
}

fn end(client: &mut Client, half: &Sent, decision: i32) {
    let place = tests::client::physical_offset(half.message_id());
    let fields = [
        ("producerGroup", "mystery_producers".to_owned()),
        ("tranStateTableOffset", half.queue_offset.to_string()),
        ("commitLogOffset", place.to_string()),
        ("commitOrRollback", decision.to_string()),
        ("fromTransactionCheck", "false".to_owned()),
        ("msgId", "U".to_owned()),
    ];
    let ended = client.call(END_TRANSACTION, &fields, b"");
    ended.and_then(Frame::success).expect("end");
}

#[test]
fn transactions_are_followed_from_the_half_message_to_their_end() {
    let _turn = turn();
    let mut case = case("transactions");
    let (open, back) = (half(&mut case.client, "U1"), half(&mut case.client, "U2"));
    let words = [
        "undecided since",
        "group mystery_producers",
        "is asked next at",
    ];
    case.says(&["--id", "U1"], "undecided", &words);
    end(&mut case.client, &back, ROLL_BACK);
    case.says(
        &["--id", "U2"],
        "rolled-back",
        &["by producer group mystery_producers"],
    );
    end(&mut case.client, &open, COMMIT);
    case.says(
        &["--id", "U1"],
        "no-group",
        &["stored as half message", "committed at"],
    );
    case.broker.stop();
}

#[test]
fn a_delayed_message_is_told_its_time_and_arrives() {
    let _turn = turn();
    let mut case = case("delayed");
    case.send("U1", &[("DELAY", "2")]);
    case.send("U2", &[("DELAY", "9")]);
    let words = [
        "delay level 9",
        "it comes at",
        "(in ",
        "stored until its time comes",
    ];
    case.says(&["--id", "U2"], "not-yet-due", &words);
    case.says(&["--id", "U1"], "not-yet-due", &["delay level 2"]);
    let at = (tests::pop::now_ms() + 3_600_000).to_string();
    case.send("U3", &[("TIMER_DELIVER_MS", &at)]);
    case.says(
        &["--id", "U3"],
        "not-yet-due",
        &["it comes at", "(in 59 min)"],
    );
    eventually("the delivery", Duration::from_secs(10), || {
        case.client.max_offset(TOPIC, 0).expect("end") == 1
    });
    case.says(&["--id", "U1"], "no-group", &["put into its queue"]);
    case.broker.stop();
}

#[test]
fn retries_are_followed_to_the_dead_letters() {
    let _turn = turn();
    let mut case = case("retries");
    let first = case.send("U1", &[]);
    let mut member = case.member("c-1", "TAG", "*");
    member.pull_as(GROUP, TOPIC, 0, 0, 1).expect("pull");
    let place = tests::client::physical_offset(first.message_id());
    let mut back = |level: i32| {
        let fields = [
            ("group", GROUP.to_owned()),
            ("offset", place.to_string()),
            ("delayLevel", level.to_string()),
            ("originTopic", TOPIC.to_owned()),
            ("maxReconsumeTimes", "16".to_owned()),
        ];
        let told = member.call(SEND_BACK, &fields, b"");
        told.and_then(Frame::success).expect("send back");
    };
    back(9);
    let words = [
        "could not handle it (1 attempt so far)",
        "sent back by the consumer",
    ];
    case.says(&["--id", "U1"], "waits-for-retry", &words);
    sleep(Duration::from_millis(5));
    back(-1);
    let words = [
        "dead letter",
        "%DLQ%mystery_group",
        "given up to the dead letters",
    ];
    case.says(&["--id", "U1"], "dead", &words);
    case.broker.stop();
}

#[test]
fn what_retention_dropped_is_expired() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("explain-expired");
    broker
        .set("pinion.shards", "1")
        .set("fileReservedTime", "0")
        .start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let body = vec![b'x'; 1 << 20];
    let mut case = Case { broker, client };
    let mut first = None;
    for _ in 0..30 {
        let sent = case.client.send(TOPIC, 0, &body, &[]).expect("send");
        first.get_or_insert(sent);
    }
    eventually("retention", Duration::from_secs(20), || {
        let told = case.client.call(DELETE_EXPIRED, &[], b"").expect("clean");
        assert_eq!(told.code, 0);
        sleep(Duration::from_millis(200));
        case.client.min_offset(TOPIC, 0).expect("min") > 0
    });
    let place = ["--queue", "0", "--offset", "0"];
    case.says(&place, "expired", &["in front of the oldest one kept"]);
    let first = first.expect("the first");
    let by_id = ["--id", first.message_id()];
    case.says(&by_id, "expired", &["in front of the log"]);
    case.broker.stop();
}

#[test]
fn an_answer_takes_less_than_a_tenth_of_a_second() {
    let _turn = turn();
    let mut case = case("speed");
    for number in 0..2_000 {
        case.send(&format!("U{number}"), &[]);
    }
    let _member = case.member("c-1", "TAG", "*");
    let asked = ["-t", TOPIC, "-g", GROUP, "--id", "U1000"];
    let took = (0..5).map(|_| case.run(&asked).took_ms).min();
    println!("the quickest of five took {took:?} ms");
    assert!(took < Some(ANSWER_MS_MAX), "{took:?} ms");
    case.broker.stop();
}
