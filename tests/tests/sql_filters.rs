//! SQL92 filters out of the box (H17), read from memory and from disk.
//!
//! Invariant: exactly the messages that match are handed out, whatever has become of their place.

use std::collections::BTreeSet;
use std::io;

use tests::client::{Client, Pulled, pulled};
use tests::frame::Frame;
use tests::process::BrokerProcess;
use tests::{payload, turn};

const TOPIC: &str = "sql_filters";
const PULL_MESSAGE: i32 = 11;
const CHECK_CLIENT_CONFIG: i32 = 46;
const RETRY_IMMEDIATELY: i32 = 20;
const NOTHING_NEW: i32 = 19;
const WRONG_EXPRESSION: i32 = 23;
const MESSAGES: u64 = 4_000;

/// Properties of a message, made from its number: some lack a price, some have one in words.
fn properties_of(number: u64) -> Vec<(&'static str, String)> {
    let mut properties = vec![("a", (number % 10).to_string())];
    match number % 4 {
        0 => properties.push(("price", (number % 7).to_string())),
        1 => properties.push(("price", "cheap".to_owned())),
        _ => {}
    }
    if number.is_multiple_of(3) {
        properties.push(("color", format!("red{}", number % 4)));
    }
    if number.is_multiple_of(5) {
        properties.push(("y", "it's".to_owned()));
    }
    properties
}

fn pull(client: &mut Client, offset: i64, expression: &str) -> io::Result<Pulled> {
    let fields = [
        ("consumerGroup", "sql_reader".to_owned()),
        ("topic", TOPIC.to_owned()),
        ("queueId", "0".to_owned()),
        ("queueOffset", offset.to_string()),
        ("maxMsgNums", "32".to_owned()),
        ("sysFlag", "4".to_owned()),
        ("commitOffset", "0".to_owned()),
        ("suspendTimeoutMillis", "0".to_owned()),
        ("subscription", expression.to_owned()),
        ("subVersion", "0".to_owned()),
        ("expressionType", "SQL92".to_owned()),
    ];
    let opaque = client.start(Frame::request(PULL_MESSAGE, &fields, b""))?;
    pulled(client.finish(opaque)?)
}

/// Numbers of all messages that an expression lets through.
fn matching(client: &mut Client, expression: &str) -> BTreeSet<u64> {
    let (mut offset, mut found) = (0, BTreeSet::new());
    loop {
        let pulled = pull(client, offset, expression).expect("pull");
        for record in &pulled.records {
            assert!(found.insert(payload::number(&record.body).expect("a message of ours")));
        }
        match pulled.code {
            0 | RETRY_IMMEDIATELY => assert!(pulled.next_offset > offset, "{pulled:?}"),
            NOTHING_NEW => return found,
            other => panic!("{expression}: code {other}"),
        }
        offset = pulled.next_offset;
    }
}

fn check_all(client: &mut Client) {
    let price = |n: u64| n.is_multiple_of(4).then_some(n % 7);
    let red = |n: u64| n.is_multiple_of(3) && matches!(n % 4, 1 | 2);
    let cases: [(&str, &dyn Fn(u64) -> bool); 6] = [
        ("a between 0 and 3", &|n| n % 10 <= 3),
        ("color in ('red1','red2') and price > 3", &|n| {
            red(n) && price(n).is_some_and(|price| price > 3)
        }),
        ("color in ('red0','red2') and price > 3", &|n| {
            n.is_multiple_of(3) && price(n).is_some_and(|price| price > 3)
        }),
        ("color is null or y = 'it''s'", &|n| {
            !n.is_multiple_of(3) || n.is_multiple_of(5)
        }),
        ("price > 3", &|n| price(n).is_some_and(|price| price > 3)),
        ("nothing = 1", &|_| false),
    ];
    for (expression, wants) in cases {
        let wanted: BTreeSet<u64> = (0..MESSAGES).filter(|n| wants(*n)).collect();
        assert!(matching(client, expression) == wanted, "{expression}");
    }
}

#[test]
fn filters_work_out_of_the_box_from_memory_and_from_disk() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("sql-filters");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..MESSAGES {
        let listed = properties_of(number);
        let listed: Vec<(&str, &str)> = listed
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let body = payload::body(number, 300);
        client.send(TOPIC, 0, &body, &listed).expect("send");
    }
    check_all(&mut client);
    let wrong = pull(&mut client, 0, "a between 0 and").expect_err("refused");
    assert!(wrong.to_string().contains("line 1, column 16"), "{wrong}");
    for (expression, code) in [("a > 1", 0), ("a > AND (", WRONG_EXPRESSION)] {
        let body = serde_json::json!({
            "clientId": "c", "group": "g",
            "subscriptionData": {
                "topic": TOPIC, "subString": expression, "expressionType": "SQL92",
            },
        });
        let body = body.to_string();
        let answer = client.call(CHECK_CLIENT_CONFIG, &[], body.as_bytes());
        assert_eq!(answer.expect("an answer").code, code, "{expression}");
    }
    // After a stop nothing is in memory any more.
    broker.stop();
    broker.start();
    check_all(&mut broker.client());
}
