//! What is advertised is what clients find, in every form an address can have, and on a machine
//! with several interfaces (H20, H24).
//!
//! Invariant: route, ids and stored records carry the same host, an id leads to its message, and
//! the start says what it advertises, why, and when nobody can dial it.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use tests::client::{Client, code, physical_offset};
use tests::network::Network;
use tests::process::{BrokerProcess, eventually};
use tests::{payload, skipped, turn};

const TOPIC: &str = "addresses";

/// Sends a hundred messages and asks for them in every way there is. `in_route` is the address as
/// clients read it, `host` the one in ids and records.
fn check(broker: &mut BrokerProcess, form: &str, in_route: &str, host: IpAddr) {
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let mut first = None;
    for number in 0..100 {
        let sent = client
            .send(TOPIC, 0, &payload::body(number, 50), &[])
            .expect("send");
        let id = sent.message_id();
        let digits = if host.is_ipv6() { 56 } else { 32 };
        assert_eq!(id.len(), digits, "{id} for {form}");
        assert_eq!(host_in(id), (host, broker.broker_port), "{id} for {form}");
        let record = client.view(TOPIC, physical_offset(id)).expect("view by id");
        assert_eq!(payload::number(&record.body), Some(number));
        assert_eq!(
            (record.store_host.ip(), record.store_host.port()),
            (host, broker.broker_port)
        );
        first.get_or_insert(record.store_timestamp_ms);
    }
    check_times_and_status(&mut client, first, form);
    assert_eq!(client.read_queue(TOPIC, 0, 0).expect("read").len(), 100);
    let route = broker.namesrv().route(TOPIC).expect("route");
    let expected = format!("\"{in_route}:{}\"", broker.broker_port);
    let route = route.expect("a known topic");
    assert!(route.contains(&expected), "no {expected} in {route}");
    broker.stop();
    broker.start();
    assert_eq!(
        broker.client().read_queue(TOPIC, 0, 0).expect("read").len(),
        100
    );
    let mut client = broker.client();
    check_times_and_status(&mut client, first, form);
    broker.stop();
}

/// The earliest time of the queue, and of the whole log as `brokerStatus` shows it.
fn check_times_and_status(client: &mut Client, first: Option<i64>, form: &str) {
    let fields = [("topic", TOPIC.to_owned()), ("queueId", "0".to_owned())];
    let frame = client.call(code::GET_EARLIEST_STORE_TIME, &fields, b"");
    let frame = frame.expect("answer").success().expect("earliest time");
    let earliest = frame.number("timestamp").expect("number");
    assert_eq!(Some(earliest), first, "earliest store time for {form}");
    let status = client.runtime_info().expect("brokerStatus");
    let told = status["earliestMessageTimeStamp"].parse().ok();
    assert_eq!(told, first, "earliest time in brokerStatus for {form}");
    assert_eq!(status["brokerActive"], "true", "{form}");
}

/// The host and the port that an offset id was made of.
fn host_in(id: &str) -> (IpAddr, u16) {
    let hex = |at: usize| u8::from_str_radix(&id[at..at + 2], 16).expect("hex");
    let bytes: Vec<u8> = (0..id.len()).step_by(2).map(hex).collect();
    let host = &bytes[..bytes.len() - 12];
    let port = u16::from_be_bytes([bytes[host.len() + 2], bytes[host.len() + 3]]);
    let address = match <[u8; 4]>::try_from(host) {
        Ok(four) => IpAddr::from(four),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(host).expect("an address")),
    };
    (address, port)
}

fn has_version_six() -> bool {
    let has = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if !has {
        skipped("no IPv6 on this machine");
    }
    has
}

#[test]
fn version_six_addresses_work_with_and_without_brackets() {
    let _turn = turn();
    if !has_version_six() {
        return;
    }
    for form in ["::1", "[::1]"] {
        let mut broker = BrokerProcess::new("address");
        broker.set("brokerIP1", form).start();
        check(&mut broker, form, "[::1]", Ipv6Addr::LOCALHOST.into());
    }
}

#[test]
fn version_four_addresses_and_host_names_work() {
    let _turn = turn();
    for form in ["127.0.0.1", "localhost"] {
        let mut broker = BrokerProcess::new("address");
        broker.set("brokerIP1", form).start();
        check(&mut broker, form, form, IpAddr::from([127, 0, 0, 1]));
    }
}

#[test]
fn a_name_server_whose_name_nobody_knows_holds_nothing_up() {
    let _turn = turn();
    let mut names = BrokerProcess::new("known-names");
    names.start();
    let mut broker = BrokerProcess::new("unknown-name");
    let port = names.namesrv_port;
    let servers = format!("no-such-host.invalid:9876;localhost:{port}");
    broker.launch_broker_with("second", port, &servers);
    broker.wait_ready();
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    eventually("it is registered", Duration::from_secs(20), || {
        let route = names.namesrv().route(TOPIC).ok().flatten();
        route.is_some_and(|route| route.contains("second"))
    });
    eventually("it is said", Duration::from_secs(30), || {
        broker.output().contains("the name has no address now")
    });
    broker.stop();
    names.stop();
}

#[test]
fn clients_of_both_families_read_each_others_messages() {
    let _turn = turn();
    if !has_version_six() {
        return;
    }
    for form in ["127.0.0.1", "::1"] {
        let mut broker = BrokerProcess::new("both-families");
        broker.set("brokerIP1", form).start();
        let port = broker.broker_port;
        let hosts = [IpAddr::from([127, 0, 0, 1]), Ipv6Addr::LOCALHOST.into()];
        let connect = |host: &IpAddr| Client::connect(SocketAddr::new(*host, port));
        let mut clients = hosts.map(|host| connect(&host).expect("connect"));
        clients[0].create_topic(TOPIC, 1).expect("create topic");
        for number in 0..20 {
            let body = payload::body(number, 50);
            let client = &mut clients[number as usize % 2];
            client.send(TOPIC, 0, &body, &[]).expect("send");
        }
        for client in &mut clients {
            let records = client.read_queue(TOPIC, 0, 0).expect("read");
            let numbers = records.iter().map(|record| payload::number(&record.body));
            assert!(numbers.eq((0..20).map(Some)), "{form}");
            let born = records.iter().map(|record| record.born_host.ip());
            assert!(born.eq(hosts.iter().copied().cycle().take(20)), "{form}");
        }
        broker.stop();
    }
}

#[test]
fn a_listener_of_version_six_alone_is_enough() {
    let _turn = turn();
    if !has_version_six() {
        return;
    }
    let mut broker = BrokerProcess::new("six-only");
    broker.set("bindAddress", "::1").unset("brokerIP1");
    broker.reached_at(SocketAddr::from((Ipv6Addr::LOCALHOST, 0)));
    broker.start();
    let banner = broker.output();
    let port = broker.broker_port;
    assert!(Client::connect(SocketAddr::from(([127, 0, 0, 1], port))).is_err());
    let (advertised, _) = advertised(&banner);
    let host = advertised.rsplit_once(':').expect("a port").0.to_owned();
    let plain: IpAddr = host.trim_matches(['[', ']']).parse().expect("an address");
    assert!(
        plain.is_ipv6(),
        "a client that follows the route cannot come: {banner}"
    );
    check(&mut broker, "none", &host, plain);
}

#[test]
fn a_link_local_address_with_its_zone_works() {
    let _turn = turn();
    let Some(network) = Network::create() else {
        return;
    };
    let Some(address) = network.link_local() else {
        skipped("no link-local address in a new network namespace");
        return;
    };
    let mut broker = BrokerProcess::new("link-local");
    broker.wrapper(&network.wrapper());
    broker.reached_at(address.into());
    let form = format!("{}%eth0", address.ip());
    broker.set("brokerIP1", &form).start();
    let (told, _) = advertised(&broker.output());
    let in_route = told.rsplit_once(':').expect("a port").0.to_owned();
    assert!(in_route.contains(&address.ip().to_string()), "{told}");
    check(&mut broker, &form, &in_route, (*address.ip()).into());
}

/// What the start says it advertises, and where that came from.
fn advertised(output: &str) -> (String, String) {
    let line = output
        .lines()
        .find_map(|line| line.strip_prefix("advertised"));
    let line = line.unwrap_or_else(|| panic!("nothing advertised in:\n{output}"));
    let (address, origin) = line.trim().split_once(' ').expect("an origin");
    (address.to_owned(), origin.to_owned())
}

#[test]
fn on_two_interfaces_the_address_that_leads_outside_is_told_and_why() {
    let _turn = turn();
    let Some(network) = Network::create() else {
        return;
    };
    network.default_route_over_the_second();
    let mut broker = BrokerProcess::new("interfaces");
    broker.unset("brokerIP1").wrapper(&network.wrapper());
    broker.reached_at(network.first());
    broker.start();
    let output = broker.output();
    let (address, origin) = advertised(&output);
    assert_eq!(
        address,
        format!("{}:{}", network.inside[1], broker.broker_port)
    );
    assert!(origin.contains("detected"), "{origin}");
    assert!(output.contains("broker.conf"), "the file in use: {output}");
    // Whoever follows the route reaches it.
    let route = broker
        .namesrv()
        .route("TBW102")
        .expect("route")
        .expect("known");
    assert!(route.contains(&format!("\"{address}\"")), "{route}");
    let mut client = Client::connect(address.parse().expect("an address")).expect("connect");
    client.send(TOPIC, 0, b"over the route", &[]).expect("send");
    broker.stop();
}

#[test]
fn an_address_nobody_can_dial_is_warned_of_with_what_to_set() {
    let _turn = turn();
    let Some(network) = Network::create() else {
        return;
    };
    let mut broker = BrokerProcess::new("undialled");
    broker
        .set("brokerIP1", "192.0.2.77")
        .wrapper(&network.wrapper());
    broker.reached_at(network.first());
    broker.start();
    eventually("a warning", Duration::from_secs(10), || {
        let output = broker.output();
        let warned = output
            .lines()
            .find(|line| line.contains("WARN") && line.contains("192.0.2.77"));
        warned.is_some_and(|line| line.contains("brokerIP1"))
    });
    broker.stop();
}

/// Environment, command line, the address expected of them and what is named as its origin.
type Step<'a> = (
    &'a [(&'a str, &'a str)],
    &'a [&'a str],
    &'static str,
    &'static str,
);

#[test]
fn of_file_environment_and_command_line_the_later_wins_and_is_named() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("origins");
    broker.set("brokerIP1", "127.0.0.2");
    let in_environment = [("PINION_CONF_brokerIP1", "127.0.0.3")];
    let on_command_line = ["--set", "brokerIP1=127.0.0.4"];
    let steps: [Step<'_>; 3] = [
        (&[], &[], "127.0.0.2", "broker.conf"),
        (&in_environment, &[], "127.0.0.3", "PINION_CONF_brokerIP1"),
        (
            &in_environment,
            &on_command_line,
            "127.0.0.4",
            "command line",
        ),
    ];
    for (environment, arguments, expected, named) in steps {
        broker.environment(environment).arguments(arguments).start();
        let (address, origin) = advertised(&broker.output());
        assert_eq!(address, format!("{expected}:{}", broker.broker_port));
        assert!(origin.contains(named), "{named} is not in {origin}");
        assert!(broker.output().contains("broker.conf"), "the file in use");
        broker.stop();
    }
}
