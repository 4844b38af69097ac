//! Requests that go through the broker to a client.

use super::*;
use crate::control::relays::OPAQUE_FIRST;

fn answer(harness: &mut Harness, connection: u64, opaque: i32, code: i32, body: &[u8]) {
    let bytes = client_answer(opaque, code, body);
    let (cut, _) = frame::split(&bytes, FRAME_BYTES_MAX).unwrap().unwrap();
    let header = header::decode(&cut).unwrap();
    let mut effects = Vec::new();
    harness
        .control
        .handle_client_answer(NOW, link(connection), &header, cut.body, &mut effects);
    harness.effects = effects;
}

fn running_info(harness: &mut Harness) -> i32 {
    let fields = [
        ("consumerGroup", "g"),
        ("clientId", "c"),
        ("jstackEnable", "false"),
    ];
    assert!(
        harness
            .send(1, request::GET_CONSUMER_RUNNING_INFO, &fields, "")
            .is_none()
    );
    let pushes = harness.pushes();
    let (to, push, opaque) = &pushes[0];
    assert_eq!((*to, push.code), (2, request::GET_CONSUMER_RUNNING_INFO));
    assert_eq!(push.field("consumerGroup"), "g");
    assert_eq!(push.field("jstackEnable"), "false");
    assert!(*opaque >= OPAQUE_FIRST);
    *opaque
}

#[test]
fn running_info_comes_from_the_client_untouched() {
    let mut harness = Harness::new();
    harness.beat(2, "c", "g", "T", "*");
    let opaque = running_info(&mut harness);
    answer(&mut harness, 3, opaque, 0, b"foreign");
    assert!(
        harness.reply().is_none(),
        "only the asked connection may answer"
    );
    answer(
        &mut harness,
        2,
        opaque,
        0,
        b"{\"mqTable\":{{\"topic\":\"T\"}:{}}}",
    );
    let reply = harness.reply().unwrap();
    assert_eq!(
        (reply.code, reply.text().as_str()),
        (0, "{\"mqTable\":{{\"topic\":\"T\"}:{}}}")
    );
    answer(&mut harness, 2, opaque, 0, b"again");
    assert!(harness.effects.is_empty(), "an answer counts once");
    let offline = [
        ("consumerGroup", "g"),
        ("clientId", "x"),
        ("jstackEnable", "false"),
    ];
    assert_eq!(
        harness
            .ask(request::GET_CONSUMER_RUNNING_INFO, &offline, "")
            .code,
        1
    );
}

#[test]
fn a_client_that_does_not_answer_is_answered_for() {
    let mut harness = Harness::new();
    harness.beat(2, "c", "g", "T", "*");
    running_info(&mut harness);
    let mut effects = Vec::new();
    harness.control.tick(NOW + 9_000, &mut effects);
    assert!(effects.is_empty());
    harness.control.tick(NOW + 10_000, &mut effects);
    harness.effects = effects;
    harness
        .effects
        .retain(|effect| matches!(effect, Effect::Reply { .. }));
    assert_eq!(harness.reply().unwrap().code, 207);
    assert_eq!(harness.control.counters().relays, 0);
    running_info(&mut harness);
    let mut effects = Vec::new();
    harness
        .control
        .connection_closed(NOW, link(2), &mut effects);
    harness.effects = effects;
    assert_eq!(harness.reply().unwrap().code, 1);
}

#[test]
fn a_message_is_read_and_consumed_by_the_client_named() {
    let mut harness = Harness::new();
    harness.beat(2, "c", "g", "T", "*");
    let fields = [
        ("consumerGroup", "g"),
        ("clientId", "c"),
        ("topic", "T"),
        ("msgId", "7F00000100002A9F0000000000000400"),
    ];
    assert!(
        harness
            .send(1, request::CONSUME_MESSAGE_DIRECTLY, &fields, "")
            .is_none()
    );
    let Some(Effect::ReadRecord {
        physical_offset: 1024,
        request,
    }) = harness.effects.pop()
    else {
        panic!("the record is asked for")
    };
    let mut effects = Vec::new();
    harness
        .control
        .finish_record(NOW, *request, Some(b"record".to_vec()), &mut effects);
    harness.effects = effects;
    let pushes = harness.pushes();
    assert_eq!(
        (pushes[0].0, pushes[0].1.code),
        (2, request::CONSUME_MESSAGE_DIRECTLY)
    );
    assert_eq!(pushes[0].1.body, b"record");
    assert_eq!(pushes[0].1.field("brokerName"), "broker-a");
    let result = b"{\"consumeResult\":\"CR_SUCCESS\"}";
    answer(&mut harness, 2, pushes[0].2, 0, result);
    assert_eq!(harness.reply().unwrap().body, result);
    harness.send(1, request::CONSUME_MESSAGE_DIRECTLY, &fields, "");
    let Some(Effect::ReadRecord { request, .. }) = harness.effects.pop() else {
        panic!("the record is asked for")
    };
    let mut effects = Vec::new();
    harness
        .control
        .finish_record(NOW, *request, None, &mut effects);
    harness.effects = effects;
    assert_eq!(harness.reply().unwrap().code, 1);
}

#[test]
fn the_offsets_of_all_clients_are_gathered() {
    let mut harness = Harness::new();
    harness.beat(2, "c2", "g", "T", "*");
    harness.beat(3, "c3", "g", "T", "*");
    let fields = [("topic", "T"), ("group", "g"), ("clientAddr", "")];
    let code = request::INVOKE_BROKER_TO_GET_CONSUMER_STATUS;
    assert!(harness.send(1, code, &fields, "").is_none());
    let pushes = harness.pushes();
    assert_eq!(pushes.len(), 2);
    assert_eq!(pushes[0].1.code, request::GET_CONSUMER_STATUS_FROM_CLIENT);
    let body = br#"{"messageQueueTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:5}}"#;
    answer(&mut harness, 2, pushes[0].2, 0, body);
    assert!(harness.reply().is_none(), "one is still missing");
    let mut effects = Vec::new();
    harness.control.tick(NOW + 5_000, &mut effects);
    harness.effects = effects;
    harness
        .effects
        .retain(|effect| matches!(effect, Effect::Reply { .. }));
    assert_eq!(
        harness.reply().unwrap().text(),
        r#"{"consumerTable":{"c2":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:5}}}"#
    );
    let offline = [("topic", "T"), ("group", "x")];
    assert_eq!(harness.ask(code, &offline, "").code, 206);
}

/// A reply message to client `to`; the opaque of the push, or the answer when there is none.
fn reply_to(harness: &mut Harness, to: &str) -> Result<i32, Reply> {
    let properties = format!("REPLY_TO_CLIENT\u{1}{to}\u{2}CORRELATION_ID\u{1}k\u{2}");
    let fields = [
        ("a", "pg"),
        ("b", "cluster-x_REPLY_TOPIC"),
        ("c", "TBW102"),
        ("d", "4"),
        ("e", "0"),
        ("f", "0"),
        ("g", "5"),
        ("h", "0"),
        ("i", properties.as_str()),
    ];
    if let Some(answer) = harness.send(1, request::SEND_REPLY_MESSAGE_V2, &fields, "pong") {
        return Err(answer);
    }
    let pushes = harness.pushes();
    let (link, push, opaque) = &pushes[0];
    assert_eq!(
        (*link, push.code),
        (2, request::PUSH_REPLY_MESSAGE_TO_CLIENT)
    );
    assert_eq!(
        (push.text().as_str(), push.field("bornHost")),
        ("pong", "127.0.0.1:40001")
    );
    let sent = push.field("properties");
    assert!(
        sent.starts_with(&properties) && sent.contains("PUSH_REPLY_TIME"),
        "{sent:?}"
    );
    Ok(*opaque)
}

#[test]
fn a_reply_is_answered_once_its_requester_has_taken_it() {
    let mut harness = Harness::new();
    harness.beat(2, "asker", "g", "T", "*");
    let opaque = reply_to(&mut harness, "asker").unwrap();
    answer(&mut harness, 2, opaque, 0, b"");
    let taken = harness.reply().unwrap();
    assert_eq!(
        (taken.code, taken.field("msgId"), taken.field("queueOffset")),
        (0, "0", "0")
    );
    let opaque = reply_to(&mut harness, "asker").unwrap();
    answer(&mut harness, 2, opaque, 1, b"");
    assert_eq!(harness.reply().unwrap().code, 1);
    reply_to(&mut harness, "asker").unwrap();
    let mut effects = Vec::new();
    harness
        .control
        .connection_closed(NOW, link(2), &mut effects);
    harness.effects = effects;
    let gone = harness.reply().unwrap();
    assert_eq!(gone.code, 1);
    assert!(
        gone.remark.contains("push reply message to asker fail"),
        "{}",
        gone.remark
    );
    let unknown = reply_to(&mut harness, "asker").unwrap_err();
    assert_eq!(unknown.code, 1);
    assert!(
        unknown.remark.contains("<asker> not found"),
        "{}",
        unknown.remark
    );
}

#[test]
fn a_reply_goes_to_the_newest_connection_of_its_requester() {
    let mut harness = Harness::new();
    harness.beat(3, "asker", "g", "T", "*");
    harness.beat(2, "asker", "g", "T", "*");
    reply_to(&mut harness, "asker").unwrap();
    harness
        .control
        .connection_closed(NOW, link(3), &mut Vec::new());
    reply_to(&mut harness, "asker").unwrap();
}
