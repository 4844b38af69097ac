//! Messages sent as one batch keep their own ids and properties (H11).
//!
//! Invariant: position by position the ids of the answer, of the records and of the producer agree,
//! and nothing of the wrapper leaks into the messages.

use std::collections::BTreeSet;

use tests::client::{Client, Sent, physical_offset, property_map};
use tests::process::BrokerProcess;
use tests::record::Record;
use tests::{payload, turn};

const TOPIC: &str = "batch_ids";
/// What the broker itself adds to every message.
const BROKER_PROPERTIES: [&str; 3] = ["MSG_REGION", "TRACE_ON", "CLUSTER"];
const WRAPPER_ID: &str = "7F0000010000AAAAAAAA000000000000";

/// Id, key and tag of a message, made from its number.
fn texts_of(number: u64) -> [String; 3] {
    [
        format!("7F0000010000BBBBBBBB{number:012X}"),
        format!("key{number}"),
        format!("T{number}"),
    ]
}

/// The properties a message is sent with.
fn properties_of([id, key, tag]: &[String; 3]) -> [(&str, &str); 4] {
    [
        ("UNIQ_KEY", id),
        ("KEYS", key),
        ("TAGS", tag),
        ("mine", key),
    ]
}

fn send_batch(client: &mut Client, first: u64, size: u64) -> Sent {
    let texts: Vec<_> = (first..first + size).map(texts_of).collect();
    let bodies: Vec<_> = (first..first + size)
        .map(|n| payload::body(n, 40))
        .collect();
    let properties: Vec<_> = texts.iter().map(properties_of).collect();
    let items = bodies.iter().zip(&properties);
    let items: Vec<_> = items
        .map(|(body, listed)| (body.as_slice(), listed.as_slice()))
        .collect();
    let wrapper = [("UNIQ_KEY", WRAPPER_ID), ("WAIT", "true")];
    client
        .send_batch(TOPIC, 0, &items, &wrapper)
        .expect("batch")
}

/// Compares a stored message with what was sent under its number.
fn compare(record: &Record, number: u64) {
    assert_eq!(payload::number(&record.body), Some(number));
    let mut found = record.properties.clone();
    found.retain(|name, _| !BROKER_PROPERTIES.contains(&name.as_str()));
    // Waiting for the flush is a wish about the request; Apache leaves it on each message.
    found.remove("WAIT");
    assert_eq!(
        found,
        property_map(&properties_of(&texts_of(number))),
        "message {number}"
    );
}

#[test]
fn every_message_of_a_batch_keeps_its_own_id_and_properties() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("batch-ids");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let mut first = 0;
    let mut ids = BTreeSet::new();
    for size in [1_u64, 2, 10, 1000] {
        let sent = send_batch(&mut client, first, size);
        assert_eq!(sent.message_ids.len() as u64, size);
        assert_eq!(sent.queue_offset as u64, first);
        let records = client.read_queue(TOPIC, 0, first as i64).expect("read");
        assert_eq!(records.len() as u64, size);
        for ((record, id), number) in records.iter().zip(&sent.message_ids).zip(first..) {
            compare(record, number);
            assert_eq!(
                record.physical_offset,
                physical_offset(id),
                "message {number}"
            );
            assert!(ids.insert(id.clone()), "{id} was given twice");
            let viewed = client.view(TOPIC, physical_offset(id)).expect("view");
            assert_eq!(viewed.body, record.body, "the id alone finds its message");
            let [unique, ..] = texts_of(number);
            let found = client
                .query_unique(TOPIC, &unique)
                .expect("query by unique key");
            assert_eq!(found.len(), 1, "{unique} finds exactly its message");
            assert_eq!(found[0].body, record.body, "{unique}");
        }
        first += size;
    }
    broker.stop();
}
