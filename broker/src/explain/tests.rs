//! Prepared mysteries: facts in, verdict out.

use wire::body::{SubscriptionData, SubscriptionGroupConfig};
use wire::message::properties;

use super::facts::*;
use super::judge::{Kind, Verdict, judge};
use crate::control::names::{HALF_TOPIC, SCHEDULE_TOPIC};

const NOW: i64 = 1_709_251_199_999;
const STORED: i64 = NOW - 60_000;

fn stored(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in pairs {
        properties::append(&mut out, name, value);
    }
    out
}

/// A message at offset 10 of a queue with 20, whose group stands at 10 and waits for the next.
fn copy(topic: &str, more: &[(&str, &str)]) -> Copy {
    let mut pairs = vec![("UNIQ_KEY", "U1"), ("TAGS", "a")];
    pairs.extend(more);
    Copy {
        broker: "b".into(),
        topic: topic.into(),
        queue_id: 3,
        queue_offset: 10,
        physical_offset: 4_096,
        bytes: 200,
        store_ms: STORED,
        born_ms: STORED - 5,
        born_host: "10.0.0.1:4000".into(),
        offset_id: "ID".into(),
        properties: stored(&pairs),
        queue: Some(QueueFacts {
            now_ms: NOW,
            max_offset: 20,
            log_max_offset: 9_999,
            log_synced_offset: 9_999,
            committed: 10,
            pull_offset: 10,
            pulled_ms: NOW - 50,
            reset_to: -1,
            pulls_waiting: 1,
            deliveries_known_since_ms: STORED - 1_000,
            ..QueueFacts::default()
        }),
        ..Copy::default()
    }
}

fn subscription(kind: &str, text: &str) -> SubscriptionData {
    SubscriptionData {
        expression_type: kind.into(),
        sub_string: text.into(),
        topic: "T".into(),
        ..SubscriptionData::default()
    }
}

fn group() -> GroupFacts {
    GroupFacts {
        name: "g".into(),
        config: Some(SubscriptionGroupConfig::new("g")),
        may_read: true,
        members: vec![Member {
            client_id: "c1".into(),
            address: "10.0.0.9:5000".into(),
        }],
        subscriptions: [("T".to_owned(), subscription("TAG", "*"))].into(),
        ..GroupFacts::default()
    }
}

fn facts(copies: Vec<Copy>) -> Facts {
    Facts {
        asked: Asked {
            what: "id U1".into(),
            topic: Some("T".into()),
            group: Some("g".into()),
        },
        topic: "T".into(),
        now_ms: NOW,
        copies,
        topic_perm: Some(6),
        readers: vec!["g".into(), "other".into()],
        group: Some(group()),
        ..Facts::default()
    }
}

/// The mystery of a message in its own queue, after a change of what the shard and the group tell.
fn mystery(change: impl FnOnce(&mut QueueFacts, &mut GroupFacts)) -> Verdict {
    let mut facts = facts(vec![copy("T", &[])]);
    let queue = facts.copies[0].queue.as_mut().unwrap();
    change(queue, facts.group.as_mut().unwrap());
    judge(&facts)
}

fn got(queue: &mut QueueFacts, at_ms: i64) {
    queue.deliveries.push(DeliveryFacts {
        first_ms: at_ms,
        last_ms: at_ms,
        client: "10.0.0.9:5000".into(),
        popped: false,
    });
    queue.deliveries_count += 1;
}

fn says(verdict: &Verdict, kind: Kind, words: &[&str]) {
    let all = format!("{}\n{}", verdict.why, verdict.details.join("\n"));
    assert_eq!(verdict.kind, kind, "{all}");
    for word in words {
        assert!(all.contains(word), "{word:?} in\n{all}");
    }
}

#[test]
fn a_message_that_nothing_holds_up_is_on_its_way() {
    let found = mystery(|_, _| {});
    says(
        &found,
        Kind::OnItsWay,
        &["never delivered to group g", "made at", "tag a"],
    );
}

#[test]
fn tags_and_expressions_that_do_not_take_it_are_named() {
    let found = mystery(|_, group| {
        group
            .subscriptions
            .insert("T".into(), subscription("TAG", "b || c"));
    });
    says(
        &found,
        Kind::Filtered,
        &["takes tags \"b || c\", and it has tag a"],
    );
    let found = mystery(|queue, group| {
        queue.committed = 15;
        group
            .subscriptions
            .insert("T".into(), subscription("SQL92", "TAGS = 'b'"));
    });
    says(&found, Kind::Filtered, &["SQL92 \"TAGS = 'b'\"", "TAGS=a"]);
    let found = mystery(|_, group| {
        group
            .subscriptions
            .insert("T".into(), subscription("SQL92", "TAGS = 'a'"));
    });
    assert_eq!(found.kind, Kind::OnItsWay);
}

#[test]
fn a_wrong_expression_reads_nothing() {
    let found = mystery(|_, group| {
        group
            .subscriptions
            .insert("T".into(), subscription("SQL92", "a = = 1"));
    });
    says(&found, Kind::Filtered, &["is wrong", "line 1, column 5"]);
}

#[test]
fn a_lagging_queue_tells_how_many_are_in_front() {
    let found = mystery(|queue, _| {
        queue.committed = 2;
        queue.pull_offset = 4;
    });
    says(
        &found,
        Kind::Lags,
        &["stands at offset 4, 6 messages in front of it"],
    );
}

#[test]
fn a_locked_queue_names_the_owner_that_does_not_ask() {
    let lock = |group: &mut GroupFacts, owner: &str| {
        group.lock = LockFacts {
            owner: Some(owner.into()),
            renewed_ms: NOW - 10_000,
            live_ms: 60_000,
        };
    };
    let found = mystery(|_, group| lock(group, "gone-client"));
    says(
        &found,
        Kind::Locked,
        &["by gone-client, who is no member", "in 50.0 s"],
    );
    let found = mystery(|queue, group| {
        lock(group, "c1");
        queue.pulls_waiting = 0;
        queue.pulled_ms = NOW - 600_000;
    });
    says(&found, Kind::Locked, &["by c1, who does not ask"]);
    let found = mystery(|_, group| lock(group, "c1"));
    says(&found, Kind::OnItsWay, &["the queue is locked by c1"]);
}

#[test]
fn a_paused_client_is_one_that_does_not_ask() {
    let found = mystery(|queue, _| {
        queue.pulls_waiting = 0;
        queue.pulled_ms = NOW - 600_000;
        queue.committed = 7;
    });
    let words = [
        "1 member online, but none has asked",
        "10 min ago",
        "3 messages are in front",
    ];
    says(&found, Kind::NotAsked, &words);
}

#[test]
fn a_group_without_members_is_not_one_that_nobody_knows() {
    let nobody = |queue: &mut QueueFacts, group: &mut GroupFacts| {
        group.members.clear();
        group.subscriptions.clear();
        (queue.pulls_waiting, queue.pulled_ms) = (0, 0);
    };
    let found = mystery(|queue, group| nobody(queue, group));
    says(&found, Kind::NoMember, &["no member of group g is online"]);
    let found = mystery(|queue, group| {
        nobody(queue, group);
        (queue.committed, queue.pull_offset) = (-1, -1);
    });
    says(
        &found,
        Kind::NoMember,
        &["never read this queue; groups that read the topic: other"],
    );
    let found = mystery(|queue, group| {
        nobody(queue, group);
        (queue.committed, queue.pull_offset) = (-1, -1);
        group.config = None;
    });
    says(
        &found,
        Kind::NoGroup,
        &["knows no group g; groups that read the topic: other"],
    );
}

#[test]
fn a_reader_that_never_announced_itself_is_no_missing_member() {
    let found = mystery(|_, group| group.members.clear());
    assert_eq!(found.kind, Kind::OnItsWay);
}

#[test]
fn a_group_of_another_topic_is_the_wrong_one() {
    let found = mystery(|queue, group| {
        (queue.committed, queue.pulls_waiting, queue.pulled_ms) = (-1, 0, 0);
        group.subscriptions = [("X".to_owned(), subscription("TAG", "*"))].into();
    });
    says(
        &found,
        Kind::WrongGroup,
        &["only to X; groups that read the topic: other"],
    );
}

#[test]
fn administrators_pause_groups_in_three_ways() {
    let found = mystery(|_, group| group.config.as_mut().unwrap().consume_enable = false);
    says(&found, Kind::Paused, &["consumeEnable is false"]);
    let found = mystery(|_, group| group.may_read = false);
    says(&found, Kind::Paused, &["forbade"]);
    let mut facts = facts(vec![copy("T", &[])]);
    facts.topic_perm = Some(2);
    says(&judge(&facts), Kind::Paused, &["permission lacks 4"]);
}

#[test]
fn an_unacknowledged_pop_tells_who_has_it_until_when() {
    let held = HoldingFacts {
        pop_ms: NOW - 20_000,
        due_ms: NOW + 40_000,
        ..HoldingFacts::default()
    };
    let found = mystery(|queue, _| {
        queue.committed = 11;
        queue.holding = Some(held);
        got(queue, NOW - 20_000);
    });
    let words = [
        "popped by c1 (10.0.0.9:5000)",
        "20.0 s ago",
        "nobody else",
        "in 40.0 s",
    ];
    says(&found, Kind::Invisible, &words);
    let found = mystery(|queue, _| {
        let due_ms = NOW - 1;
        queue.holding = Some(HoldingFacts { due_ms, ..held });
    });
    says(&found, Kind::Invisible, &["comes again now"]);
    let found = mystery(|queue, _| {
        let acked = true;
        queue.holding = Some(HoldingFacts { acked, ..held });
    });
    says(&found, Kind::Consumed, &["acknowledged it"]);
}

#[test]
fn a_queue_popped_in_order_waits_for_its_head() {
    let found = mystery(|queue, _| {
        queue.committed = 8;
        queue.held = 2;
        queue.blocked_until_ms = Some(NOW + 5_000);
    });
    says(
        &found,
        Kind::Blocked,
        &["2 messages in front of it are not acknowledged", "in 5.0 s"],
    );
}

#[test]
fn what_a_client_has_and_did_not_acknowledge_is_told() {
    let found = mystery(|queue, _| {
        got(queue, NOW - 9_000);
        got(queue, NOW - 3_000);
    });
    let words = [
        "c1 (10.0.0.9:5000) got it",
        "3.0 s ago",
        "delivered to group g 2 times",
    ];
    says(&found, Kind::Delivered, &words);
    let found = mystery(|queue, _| {
        queue.pull_offset = 12;
        queue.deliveries_known_since_ms = NOW - 10;
    });
    let words = ["asked from 12 on", "not recorded any more"];
    says(&found, Kind::Delivered, &words);
}

#[test]
fn consumed_is_told_apart_from_skipped_and_from_forgotten() {
    let found = mystery(|queue, _| {
        queue.committed = 11;
        got(queue, NOW - 9_000);
    });
    says(
        &found,
        Kind::Consumed,
        &["stands at offset 11, delivered to c1", "9.0 s ago"],
    );
    let found = mystery(|queue, _| queue.committed = 11);
    says(&found, Kind::Skipped, &["never got it"]);
    let found = mystery(|queue, _| {
        queue.committed = 11;
        queue.deliveries_known_since_ms = NOW - 10;
    });
    assert!(
        !found.details.join(" ").contains("never delivered"),
        "{found:?}"
    );
    says(&found, Kind::Consumed, &["not recorded any more"]);
}

#[test]
fn a_reset_in_front_of_it_brings_it_again() {
    let found = mystery(|queue, _| {
        queue.committed = 20;
        queue.reset_to = 10;
    });
    assert_eq!(found.kind, Kind::OnItsWay);
}

#[test]
fn broadcast_is_said_to_be_unknown() {
    let found = mystery(|_, group| group.broadcast = true);
    says(&found, Kind::Broadcast, &["keeps its own offset"]);
}

#[test]
fn what_could_be_lost_is_not_readable_yet() {
    let found = mystery(|queue, _| {
        queue.max_offset = 10;
        queue.sync_flush = true;
        queue.log_synced_offset = 4_096;
    });
    says(
        &found,
        Kind::NotReadable,
        &["readable up to 10", "its sender waits"],
    );
}

#[test]
fn an_undecided_transaction_tells_whose_it_is_and_when_it_was_asked() {
    let mut half = copy(HALF_TOPIC, &[("REAL_TOPIC", "T"), ("PGROUP", "p")]);
    let told = HalfFacts {
        state: HalfState::Open,
        checks: 2,
        checks_max: 15,
        asked_ms: NOW - 30_000,
        due_ms: Some(NOW + 30_000),
    };
    half.queue.as_mut().unwrap().half = Some(told.clone());
    let found = judge(&facts(vec![half.clone()]));
    let words = [
        "undecided since 60.0 s",
        "group p",
        "asked 2 times",
        "in 30.0 s",
        "15 questions",
    ];
    says(&found, Kind::Undecided, &words);
    let state = HalfState::RolledBack;
    half.queue.as_mut().unwrap().half = Some(HalfFacts { state, ..told });
    says(
        &judge(&facts(vec![half.clone()])),
        Kind::RolledBack,
        &["rolled back by producer group p"],
    );
    let mut end = copy("T", &[]);
    end.prepared_offset = 77;
    let found = judge(&facts(vec![half, end]));
    says(
        &found,
        Kind::OnItsWay,
        &["stored as half message", "committed at"],
    );
}

#[test]
fn messages_that_are_not_yet_due_tell_their_time() {
    let timed = copy(SCHEDULE_TOPIC, &[("REAL_TOPIC", "T"), ("DELAY", "5")]);
    let mut known = facts(vec![timed]);
    known.delays_ms = vec![1_000, 5_000, 10_000, 30_000, 90_000];
    says(
        &judge(&known),
        Kind::NotYetDue,
        &["delay level 5", "in 30.0 s"],
    );
    let at = (NOW + 7_200_000).to_string();
    let timer = copy(
        "rmq_sys_wheel_timer",
        &[("REAL_TOPIC", "T"), ("TIMER_OUT_MS", &at)],
    );
    says(
        &judge(&facts(vec![timer])),
        Kind::NotYetDue,
        &["it comes at", "in 2 h"],
    );
    let at = (NOW - 30_000).to_string();
    let lost = copy(
        "rmq_sys_wheel_timer",
        &[("REAL_TOPIC", "T"), ("TIMER_OUT_MS", &at)],
    );
    says(
        &judge(&facts(vec![lost])),
        Kind::Expired,
        &["was due at", "taken back"],
    );
}

#[test]
fn retries_and_dead_letters_are_followed() {
    let mut again = copy(
        SCHEDULE_TOPIC,
        &[("REAL_TOPIC", "%RETRY%g"), ("DELAY", "1")],
    );
    again.reconsume_times = 3;
    let mut known = facts(vec![copy("T", &[]), again]);
    known.delays_ms = vec![80_000];
    let words = [
        "3 attempts so far",
        "in 20.0 s",
        "sent back by the consumer",
    ];
    says(&judge(&known), Kind::WaitsForRetry, &words);
    let retry = copy("%RETRY%g", &[("RETRY_TOPIC", "T")]);
    let mut known = facts(vec![copy("T", &[]), retry]);
    // Only the topic itself is filtered, never what comes again.
    let narrow = subscription("TAG", "b");
    known
        .group
        .as_mut()
        .unwrap()
        .subscriptions
        .insert("T".into(), narrow);
    says(
        &judge(&known),
        Kind::OnItsWay,
        &["put in line again for the group"],
    );
    let mut dead = copy("%DLQ%g", &[("RETRY_TOPIC", "T")]);
    dead.reconsume_times = 16;
    let found = judge(&facts(vec![copy("T", &[]), dead]));
    says(
        &found,
        Kind::Dead,
        &["dead letter", "16 attempts", "%DLQ%g"],
    );
}

#[test]
fn what_is_not_there_never_arrived_or_is_expired() {
    let missing = |missing: Missing| {
        let mut facts = facts(Vec::new());
        facts.missing = missing;
        judge(&facts)
    };
    let at = |offset, committed| Missing::NoOffset {
        offset,
        min: 100,
        max: 200,
        committed,
    };
    says(
        &missing(at(200, -1)),
        Kind::NeverArrived,
        &["the queue ends at 200"],
    );
    says(
        &missing(at(99, 150)),
        Kind::Expired,
        &["oldest one kept, 100", "was done with it"],
    );
    says(
        &missing(at(99, 20)),
        Kind::Expired,
        &["had not consumed it"],
    );
    let place = |offset| Missing::NoPlace {
        offset,
        min: 1_000,
        max: 2_000,
    };
    says(&missing(place(10)), Kind::Expired, &["in front of the log"]);
    says(
        &missing(place(2_000)),
        Kind::NeverArrived,
        &["nothing was ever stored"],
    );
    says(
        &missing(place(1_001)),
        Kind::NeverArrived,
        &["not one of this broker"],
    );
    says(
        &missing(Missing::NoTopic),
        Kind::NeverArrived,
        &["no broker has the topic T"],
    );
    let queues = Missing::NoQueue { queues: 4 };
    says(&missing(queues), Kind::NeverArrived, &["only 4"]);
    let address = "10.9.9.9:10911".to_owned();
    says(
        &missing(Missing::NoBroker { address }),
        Kind::NeverArrived,
        &["10.9.9.9:10911"],
    );
}

#[test]
fn a_unique_key_that_nobody_has_tells_by_its_time_what_is_likely() {
    let mut never = facts(Vec::new());
    never.key_made_ms = Some(NOW - 5_000);
    never.earliest_ms = Some(NOW - 3_600_000);
    says(
        &judge(&never),
        Kind::NeverArrived,
        &["made at about", "went elsewhere"],
    );
    never.key_made_ms = Some(NOW - 7_200_000);
    says(&judge(&never), Kind::Expired, &["probably expired"]);
}

#[test]
fn without_a_group_it_is_told_where_it_is_and_how_safe() {
    let mut known = facts(vec![copy("T", &[])]);
    known.group = None;
    known.asked.group = None;
    says(
        &judge(&known),
        Kind::Stored,
        &["topic T, queue 3, offset 10", "the device has it"],
    );
    known.copies[0].queue.as_mut().unwrap().log_synced_offset = 0;
    says(&judge(&known), Kind::Stored, &["not a power loss yet"]);
}

#[test]
fn a_broker_that_is_not_pinion_leaves_out_what_it_does_not_tell() {
    let mut known = facts(vec![copy("T", &[])]);
    known.copies[0].queue = None;
    let found = judge(&known);
    let all = found.details.join("\n");
    assert!(
        all.contains("does not tell what only Pinion knows"),
        "{all}"
    );
    assert!(!all.contains("never delivered"), "{all}");
}
