//! Bytes no client sends: each closes at most its own connection and disturbs nobody.
//!
//! Invariant: right after every attack a well-behaved connection that was open before it, and a new
//! one, both send and read.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tests::client::{Client, answer, code, sent};
use tests::frame::Frame;
use tests::payload::Random;
use tests::process::{BrokerProcess, local};
use tests::{procfs, turn};

const TOPIC: &str = "hostile";

/// What the attacked connection must come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Closed,
    Open,
}

fn words(total: u32, header: u32, rest: &[u8]) -> Vec<u8> {
    let mut bytes = total.to_be_bytes().to_vec();
    bytes.extend(header.to_be_bytes());
    bytes.extend(rest);
    bytes
}

fn attacks() -> Vec<(&'static str, Vec<u8>, Outcome)> {
    use Outcome::{Closed, Open};
    let good = Frame::request(code::GET_ROUTE, &[], b"").encode();
    let half = good[..good.len() / 2].to_vec();
    let deep = format!("{{\"code\":{}", "[".repeat(100_000));
    let not_utf8 = b"{\"code\":310,\"flag\":0,\"opaque\":1,\"extFields\":{\"b\":\"\xff\xfe\"}}";
    vec![
        ("a length of zero", words(0, 0, b""), Closed),
        ("a length of minus one", words(u32::MAX, 0, b""), Closed),
        (
            "a length of two GiB less one",
            words(0x7FFF_FFFF, 0, b""),
            Closed,
        ),
        (
            "a length just over the limit",
            words(16_777_213, 10, b""),
            Closed,
        ),
        (
            "a header longer than its frame",
            words(20, 100, &[0; 16]),
            Closed,
        ),
        (
            "a header of 16 MiB in a small frame",
            words(20, 0x00FF_FFFF, &[0; 16]),
            Closed,
        ),
        (
            "an unknown serialisation",
            words(20, 0x0900_0010, &[0; 16]),
            Closed,
        ),
        (
            "a JSON header that is no JSON",
            words(20, 16, &[b'x'; 16]),
            Closed,
        ),
        (
            "a JSON header that nests deeply",
            framed(0, deep.as_bytes()),
            Closed,
        ),
        ("a JSON header of other bytes", framed(0, not_utf8), Open),
        (
            "a binary header that ends early",
            framed(1, &[0, 10, 0]),
            Closed,
        ),
        (
            "binary fields longer than the header",
            framed(1, &binary_overrun()),
            Closed,
        ),
        ("half a frame", half, Open),
        ("three bytes", vec![0, 0, 1], Open),
        ("an answer to no request", stray_answer(), Open),
        (
            "TLS of a kind",
            vec![0x16, 3, 1, 0, 5, 1, 0, 0, 1, 0],
            Closed,
        ),
        (
            "an HTTP request",
            b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n".to_vec(),
            Closed,
        ),
    ]
}

fn framed(kind: u32, header: &[u8]) -> Vec<u8> {
    words(
        4 + header.len() as u32,
        kind << 24 | header.len() as u32,
        header,
    )
}

fn binary_overrun() -> Vec<u8> {
    let mut header = Frame::request(105, &[], b"");
    header.encoding = tests::frame::Encoding::Binary;
    let mut bytes = header.encode()[8..].to_vec();
    let at = bytes.len() - 4;
    bytes[at..].copy_from_slice(&0x7FFF_FFFF_u32.to_be_bytes());
    bytes
}

fn stray_answer() -> Vec<u8> {
    let mut frame = Frame::request(0, &[], b"");
    frame.flag = 1;
    frame.opaque = 123_456;
    frame.encode()
}

fn send_and_read(client: &mut Client) {
    let sent = client
        .send(TOPIC, 0, b"a good message", &[])
        .expect("a good send");
    let pulled = client
        .pull(TOPIC, 0, sent.queue_offset, 1)
        .expect("a good pull");
    assert_eq!(pulled.records[0].body, b"a good message");
}

/// Whether the other side closes within a second.
fn outcome(stream: &mut TcpStream) -> Outcome {
    stream
        .set_read_timeout(Some(Duration::from_millis(700)))
        .expect("timeout");
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Outcome::Closed,
            Ok(_) => continue,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Outcome::Open,
            Err(_) => return Outcome::Closed,
        }
    }
}

#[test]
fn every_attack_ends_with_its_own_connection() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("hostile");
    broker.start();
    let mut good = broker.client();
    good.create_topic(TOPIC, 1).expect("create topic");
    let mut failures = Vec::new();
    for (what, bytes, expected) in attacks() {
        for port in [broker.broker_port, broker.namesrv_port] {
            let mut stream = TcpStream::connect(local(port)).expect("connect");
            // The other side may close while we still write; that is its answer.
            let _ = stream.write_all(&bytes);
            send_and_read(&mut good);
            send_and_read(&mut broker.client());
            let found = outcome(&mut stream);
            // What an implementation refuses politely or closes at once is its choice.
            if expected == Outcome::Closed && found == Outcome::Open {
                failures.push(format!(
                    "{what} on port {port}: {found:?}, not {expected:?}"
                ));
            }
        }
        assert_eq!(
            broker.ended(),
            None,
            "{what} ended the broker: {}",
            broker.output()
        );
    }
    assert!(failures.is_empty(), "{failures:#?}");
    broker.stop();
}

#[test]
fn a_frame_in_pieces_is_a_frame() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("pieces");
    broker.start();
    broker
        .client()
        .create_topic(TOPIC, 1)
        .expect("create topic");
    let fields = [
        ("b", TOPIC),
        ("a", "p"),
        ("c", "TBW102"),
        ("d", "4"),
        ("e", "0"),
        ("f", "0"),
    ];
    let mut fields = fields.map(|(key, value)| (key, value.to_owned())).to_vec();
    fields.extend([
        ("g", "1".to_owned()),
        ("h", "0".to_owned()),
        ("i", String::new()),
    ]);
    let mut client = broker.client();
    for pieces in [1, 3, 7] {
        let mut frame = Frame::request(code::SEND_MESSAGE_V2, &fields, b"in pieces");
        frame.opaque = 1000 + pieces as i32;
        let mut stream = client.socket().try_clone().expect("clone");
        for piece in frame.encode().chunks(pieces) {
            stream.write_all(piece).expect("write");
            std::thread::sleep(Duration::from_micros(300));
        }
        client.expect_answer(frame.opaque);
        let sent = sent(client.finish(frame.opaque).expect("an answer")).expect("accepted");
        assert_eq!(client.view_at(TOPIC, &sent).body, b"in pieces");
    }
}

#[test]
fn bad_fields_are_refused_by_name_and_harm_nothing() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("bad-fields");
    broker.start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 2).expect("create topic");
    let queue_id_bad = client
        .send(TOPIC, 99, b"body", &[])
        .expect_err("no such queue");
    assert!(queue_id_bad.to_string().contains("99"), "{queue_id_bad}");
    for topic in ["../../etc/passwd", "a b", "", &"x".repeat(300)] {
        assert!(
            client.send(topic, 0, b"body", &[]).is_err(),
            "topic {topic:?}"
        );
    }
    let large = vec![0; 5 << 20];
    let refused = client
        .send(TOPIC, 0, &large, &[])
        .expect_err("over maxMessageSize");
    assert!(refused.to_string().starts_with("code 13"), "{refused}");
    let pulled = client
        .pull(TOPIC, 0, i64::MAX, 32)
        .expect("a pull far beyond the end");
    assert_ne!(pulled.code, answer::SUCCESS);
    assert!(client.pull(TOPIC, 0, -5, i32::MAX).is_ok() || broker.ended().is_none());
    send_and_read(&mut broker.client());
}

#[test]
fn random_bytes_and_a_thousand_connections_leave_memory_where_it_was() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("random-bytes");
    broker.start();
    let mut good = broker.client();
    good.create_topic(TOPIC, 1).expect("create topic");
    send_and_read(&mut good);
    let before = procfs::resident_bytes(broker.pid());
    let sockets_before = procfs::open_sockets(broker.pid());
    let mut random = Random::from_env();
    for round in 0..1000 {
        let mut stream = TcpStream::connect(local(broker.broker_port)).expect("connect");
        let length = random.below(2000) as usize;
        let mut bytes: Vec<u8> = (0..length).map(|_| random.word() as u8).collect();
        if round % 2 == 0 && length > 8 {
            // A plausible length makes the rest be looked at.
            bytes[..4].copy_from_slice(&(length as u32 - 4).to_be_bytes());
            bytes[4..8].copy_from_slice(&(random.below(length as u64) as u32).to_be_bytes());
        }
        let _ = stream.write_all(&bytes);
        if round % 100 == 0 {
            send_and_read(&mut good);
        }
    }
    send_and_read(&mut good);
    let grown = procfs::resident_bytes(broker.pid()).saturating_sub(before);
    assert!(
        grown < 64 << 20,
        "resident memory grew by {} MiB",
        grown >> 20
    );
    let limit = Instant::now() + Duration::from_secs(5);
    while procfs::open_sockets(broker.pid()) > sockets_before + 4 {
        assert!(
            Instant::now() < limit,
            "closed connections keep their descriptors"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    broker.stop();
}
