//! What is advertised is what clients find, in every form an address can have (H20, H24).
//!
//! Invariant: route, ids and stored records carry the same host, and an id leads to its message.

use std::net::{IpAddr, Ipv6Addr, TcpListener};

use tests::client::{code, physical_offset};
use tests::process::BrokerProcess;
use tests::{payload, skipped, turn};

const TOPIC: &str = "addresses";

fn check(form: &str, in_route: &str, host: IpAddr) {
    let mut broker = BrokerProcess::new("address");
    broker.set("brokerIP1", form).start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let mut first = None;
    for number in 0..100 {
        let sent = client
            .send(TOPIC, 0, &payload::body(number, 50), &[])
            .expect("send");
        let id = sent.message_id();
        assert_eq!(
            id.len(),
            if host.is_ipv6() { 56 } else { 32 },
            "{id} for {form}"
        );
        let record = client.view(TOPIC, physical_offset(id)).expect("view by id");
        assert_eq!(payload::number(&record.body), Some(number));
        assert_eq!(
            (record.store_host.ip(), record.store_host.port()),
            (host, broker.broker_port)
        );
        first.get_or_insert(record.store_timestamp_ms);
    }
    let fields = [("topic", TOPIC.to_owned()), ("queueId", "0".to_owned())];
    let frame = client
        .call(code::GET_EARLIEST_STORE_TIME, &fields, b"")
        .expect("answer");
    let earliest = frame
        .success()
        .expect("earliest time")
        .number("timestamp")
        .expect("number");
    assert_eq!(Some(earliest), first, "earliest store time for {form}");
    assert_eq!(client.read_queue(TOPIC, 0, 0).expect("read").len(), 100);
    let route = broker
        .namesrv()
        .route(TOPIC)
        .expect("route")
        .expect("known");
    let expected = format!("\"{in_route}:{}\"", broker.broker_port);
    assert!(route.contains(&expected), "no {expected} in {route}");
    broker.stop();
    broker.start();
    assert_eq!(
        broker.client().read_queue(TOPIC, 0, 0).expect("read").len(),
        100
    );
    broker.stop();
}

#[test]
fn version_six_addresses_work_with_and_without_brackets() {
    let _turn = turn();
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        skipped("no IPv6 on this machine");
        return;
    }
    for form in ["::1", "[::1]"] {
        check(form, "[::1]", Ipv6Addr::LOCALHOST.into());
    }
}

#[test]
fn version_four_addresses_and_host_names_work() {
    let _turn = turn();
    check("127.0.0.1", "127.0.0.1", IpAddr::from([127, 0, 0, 1]));
    check("localhost", "localhost", IpAddr::from([127, 0, 0, 1]));
}
