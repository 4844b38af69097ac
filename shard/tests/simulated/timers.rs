//! Timed messages: never early, never lost, never twice, whatever happens to process and clock.

use shard::io::sim::Crash;
use shard::maintain::RetentionOrder;
use shard::runtime::Driver as _;
use shard::{AckPoint, NewMessage, Refusal, SCHEDULE_TOPIC, TIMER_TOPIC, WINDOW_MAX};
use wire::message::{RecordView, properties};

use super::world::{DELAYS_MS, Draft, Setup, When, World};

const MODES: [AckPoint; 3] = [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced];

fn now_ms(world: &mut World) -> i64 {
    world.live().now.wall_ms
}

/// Runs until nothing waits, and longer than that by a second.
fn drain(world: &mut World) {
    for _ in 0..30_000 {
        world.step();
        let report = world.shard().timer_report();
        if report.complete && report.pending == 0 {
            break;
        }
    }
    world.run(1_200);
    assert_eq!(world.shard().timer_report().pending, 0);
}

fn bodies(world: &mut World, topic: &str, queue_id: i32) -> Vec<String> {
    let (_, found) = world.read(topic, queue_id).unwrap();
    let text = |raw: &Vec<u8>| {
        let view = RecordView::parse(raw).unwrap();
        String::from_utf8(view.body().to_vec()).unwrap()
    };
    found.iter().map(text).collect()
}

fn at(world: &mut World, body: &str, in_ms: i64) {
    let due = now_ms(world) + in_ms;
    let draft = Draft {
        unique: body.to_owned(),
        ..Draft::new("T0", 0, body.as_bytes())
    };
    world.append_when_patiently(&draft, When::At(due)).unwrap();
}

#[test]
fn messages_come_in_the_order_of_their_times_not_of_their_sending() {
    for ack in MODES {
        let mut world = World::new(Setup::new(30, ack));
        for (body, in_ms) in [("c", 300), ("a", 1), ("d", 1_500), ("b", 299), ("e", 1_501)] {
            at(&mut world, body, in_ms);
        }
        world.run(50);
        assert_eq!(bodies(&mut world, "T0", 0), ["a"], "{ack:?}");
        drain(&mut world);
        assert_eq!(bodies(&mut world, "T0", 0), ["a", "b", "c", "d", "e"]);
        world.check();
        world.check_delivered();
        let lateness = world.shard().timer_report().lateness;
        assert_eq!(lateness.total(), 5);
        assert!(lateness.max_ms <= 20, "{lateness:?}");
    }
}

#[test]
fn a_delivered_message_tells_its_times_and_keeps_its_properties() {
    let mut world = World::new(Setup::new(31, AckPoint::Written));
    at(&mut world, "x", 40);
    drain(&mut world);
    let (_, found) = world.read("T0", 0).unwrap();
    let view = RecordView::parse(&found[0]).unwrap();
    let number = |name| -> i64 {
        let text = properties::get_str(view.properties(), name);
        text.unwrap_or_else(|| panic!("{name} is missing"))
            .parse()
            .unwrap()
    };
    let due = number(properties::TIMER_OUT_MS);
    assert!(number(properties::TIMER_DEQUEUE_MS) >= due);
    assert_eq!(number(properties::TIMER_ENQUEUE_MS), due - 40);
    assert_eq!(number(properties::REAL_QUEUE_ID), 0);
    for (name, value) in [("REAL_TOPIC", "T0"), ("UNIQ_KEY", "x"), ("TAGS", "a")] {
        assert_eq!(properties::get_str(view.properties(), name), Some(value));
    }
}

#[test]
fn a_clock_that_steps_delivers_nothing_early_and_loses_nothing() {
    for ack in MODES {
        let mut world = World::new(Setup::new(32, ack));
        for round in 0..6 {
            for number in 0..20 {
                at(&mut world, &format!("r{round} {number}"), 1 + number * 40);
            }
            world.run(60);
            let by_ms = [400, -3_000, 2_000, -60_000, 59_000, 10][round];
            world.machine.shift_wall_ms(by_ms);
            world.run(60);
            if round % 2 == 1 {
                world.crash_and_check(Crash::Kill);
            }
        }
        world.machine.shift_wall_ms(70_000);
        drain(&mut world);
        assert_eq!(bodies(&mut world, "T0", 0).len(), 120, "{ack:?}");
        world.check();
        world.check_delivered();
    }
}

#[test]
fn what_is_taken_back_in_time_does_not_come() {
    for ack in MODES {
        let mut world = World::new(Setup::new(33, ack));
        let due = now_ms(&mut world) / 1_000 * 1_000 + 3_400;
        let draft = |number: i32| Draft {
            unique: format!("k{number}"),
            ..Draft::new("T0", 0, format!("{number}").as_bytes())
        };
        for number in 0..6 {
            world
                .append_when_patiently(&draft(number), When::At(due + i64::from(number)))
                .unwrap();
        }
        // Known early, known late, and for another second.
        let back = |world: &mut World, number: i32, at| {
            let append = world.append_when_patiently(&draft(number), When::TakeBack(at));
            append.unwrap();
        };
        back(&mut world, 1, due);
        back(&mut world, 4, due - 100);
        back(&mut world, 5, due + 1_000);
        world.settle();
        world.crash_and_check(Crash::Kill);
        world.machine.advance_us(2_800_000);
        world.run(100);
        back(&mut world, 2, due);
        // In the middle of the second: the deletions have been seen, the messages not delivered.
        while now_ms(&mut world) < due - 100 {
            world.step();
        }
        world.crash_and_check(Crash::Kill);
        drain(&mut world);
        assert_eq!(bodies(&mut world, "T0", 0), ["0", "3", "5"], "{ack:?}");
        world.check();
        let counters = world.shard().counters();
        assert_eq!(counters.timers_deleted, 3);
        world.crash_and_check(Crash::Kill);
        world.run(2_000);
        assert_eq!(world.shard().timer_report().pending, 0, "it is durable");
        assert_eq!(world.shard().counters().timers_deleted, 0);
    }
}

/// Messages of all kinds, deletions, retention and other traffic; ends early at the crash.
fn script(world: &mut World) -> Option<()> {
    for round in 0..5i64 {
        for number in 0..4i64 {
            let body = format!("timed {round} {number}");
            let due = now_ms(world) + 1 + number * 13 + (round % 3) * 29;
            let draft = Draft {
                unique: body.clone(),
                ..Draft::new("T0", 0, body.as_bytes())
            };
            world.append_when_patiently(&draft, When::At(due))?;
            if number == 3 {
                world.append_when_patiently(&draft, When::TakeBack(due))?;
            }
            world.append_patiently(&Draft::new("T1", 0, &[b'1', round as u8, number as u8]), 1)?;
        }
        world.append_patiently(&Draft::new("T2", 0, &[b'0'; 9_000]), 0)?;
        for _ in 0..8 {
            if !world.step() {
                return None;
            }
        }
        if round >= 3 {
            world.retain(1);
        }
    }
    for _ in 0..150 {
        if !world.step() {
            return None;
        }
    }
    Some(())
}

fn small(seed: u64, ack: AckPoint) -> Setup {
    Setup {
        segment_bytes: 32 * 1024,
        ring_bytes: 128 * 1024,
        run_units: 10,
        run_log_bytes: 20_000,
        ..Setup::new(seed, ack)
    }
}

fn every_point(ack: AckPoint, kind: Crash) -> u64 {
    for at in 1.. {
        let mut world = World::new(small(40, ack));
        world.crash_at = Some((at, kind));
        if script(&mut world).is_some() {
            return at;
        }
        world.crash_at = None;
        world.crash_and_check(kind);
        drain(&mut world);
        world.check();
        world.check_delivered();
    }
    0
}

#[test]
fn a_kill_at_any_point_delivers_each_message_once() {
    for ack in MODES {
        let points = every_point(ack, Crash::Kill);
        assert!(points > 100, "{points} points in the script");
    }
}

#[test]
fn a_power_loss_at_any_point_delivers_each_message_that_is_left_once() {
    for ack in MODES {
        let points = every_point(ack, Crash::PowerLoss);
        assert!(points > 100, "{points} points in the script");
    }
}

#[test]
fn retention_copies_waiting_messages_forward() {
    for ack in MODES {
        let mut world = World::new(small(41, ack));
        at(&mut world, "waits", 60_000);
        at(&mut world, "waits longer", 90_000);
        at(&mut world, "soon", 5);
        for number in 0..40u8 {
            let draft = Draft::new("busy", 0, &[number; 3_000]);
            world.append_patiently(&draft, 0).unwrap();
        }
        world.settle_synced();
        world.run(200);
        for _ in 0..50 {
            world.retain(1);
            world.run(20);
            if world.shard().counters().segments_dropped >= 2 {
                break;
            }
        }
        let counters = world.shard().counters();
        assert!(counters.segments_dropped >= 2, "{ack:?}: {counters:?}");
        assert_eq!(counters.timers_rolled, 2);
        assert_eq!(world.shard().timer_report().pending, 2);
        world.crash_and_check(Crash::Kill);
        world.machine.advance_us(95_000_000);
        drain(&mut world);
        assert_eq!(
            bodies(&mut world, "T0", 0),
            ["soon", "waits", "waits longer"]
        );
        world.check();
        world.check_delivered();
    }
}

#[test]
fn a_segment_full_of_waiting_messages_is_held() {
    let mut world = World::new(small(42, AckPoint::Written));
    for number in 0..200 {
        at(
            &mut world,
            &format!("n{number} {}", "w".repeat(500)),
            40_000,
        );
    }
    world.settle_synced();
    world.run(300);
    for _ in 0..20 {
        assert_eq!(world.retain(1), 0);
        world.run(20);
    }
    assert!(world.shard().timers_held_bytes() > 16 * 1024);
    world.machine.advance_us(45_000_000);
    drain(&mut world);
    assert_eq!(bodies(&mut world, "T0", 0).len(), 200);
    world.machine.advance_us(11_000_000);
    assert!((0..20).any(|_| {
        world.run(20);
        world.retain(1) == 1
    }));
}

/// A full disk refuses what is new, but what it holds because of timed messages has to go.
#[test]
fn what_is_held_is_delivered_on_a_full_disk_so_that_retention_can_go_on() {
    let setup = Setup {
        disk_stop_percent: 50,
        ..small(44, AckPoint::Written)
    };
    let mut world = World::new(setup);
    for number in 0..200 {
        let body = format!("n{number} {}", "w".repeat(500));
        at(&mut world, &body, 200_000);
    }
    world.settle_synced();
    world.run(300);
    assert_eq!(world.retain(1), 0);
    world.run(50);
    let mut capacity_bytes = 1 << 22;
    while world.shard().refusing().is_none() {
        capacity_bytes = capacity_bytes / 16 * 15;
        let storage = world.machine.storage();
        storage.set_capacity_bytes(capacity_bytes);
        world.machine.advance_us(1_100_000);
        world.run(5);
    }
    let refused = world.append(&Draft::new("T0", 0, b"0"));
    assert!(
        matches!(refused, Err(Refusal::DiskFull { .. })),
        "{refused:?}"
    );
    assert!(world.shard().timers_held_bytes() > 0);
    world.machine.advance_us(200_000_000);
    drain(&mut world);
    assert_eq!(world.shard().counters().delayed_delivered, 200);
    world.machine.advance_us(11_000_000);
    assert!((0..20).any(|_| {
        world.run(20);
        world.retain(1) == 1
    }));
}

#[test]
fn a_message_that_could_not_be_delivered_is_refused() {
    let mut world = World::new(small(43, AckPoint::Written));
    let due = now_ms(&mut world) + 1_000;
    let most = world.shard().log().record_bytes_max() as usize;
    let draft = Draft::new("T0", 0, &vec![b'0'; most - 300]);
    let refused = world.append_when(&draft, When::At(due));
    assert!(
        matches!(refused, Err(Refusal::TooLarge { .. })),
        "{refused:?}"
    );
    let mut draft = Draft::new("T0", 0, b"0");
    draft.keys = "k".repeat(32_700);
    let refused = world.append_when(&draft, When::At(due));
    assert!(
        matches!(refused, Err(Refusal::TooLarge { .. })),
        "{refused:?}"
    );
}

/// Appends a message as a broker did that had a queue for each delay level.
fn append_old(world: &mut World, queue_id: i32, topic: &str, body: &str) {
    let live = world.live();
    let mut stored = Vec::new();
    properties::append(&mut stored, properties::TAGS, "a");
    let level = (queue_id + 1).to_string();
    properties::append(&mut stored, properties::DELAY, &level);
    properties::append(&mut stored, properties::REAL_TOPIC, topic);
    properties::append(&mut stored, properties::REAL_QUEUE_ID, "0");
    live.shard.open_queue(topic, 0).unwrap();
    let message = NewMessage {
        queue: live.shard.open_queue(SCHEDULE_TOPIC, queue_id).unwrap(),
        flag: 7,
        sys_flag: 0,
        born_timestamp: live.now.wall_ms,
        born_host: "10.0.0.9:4711".parse().unwrap(),
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body: body.as_bytes(),
        properties: &[&stored],
        tags_code: 0,
        unique_key: None,
        keys: None,
    };
    live.shard.append(live.now, &message).unwrap();
}

/// Kills the process and starts it again, without comparing with the model.
fn again(world: &mut World) {
    world.crash(Crash::Kill);
    world.start();
}

#[test]
fn what_waits_in_the_queues_of_levels_of_an_earlier_store_is_delivered_at_its_time() {
    let mut world = World::new(Setup {
        run_units: 64,
        ..Setup::new(45, AckPoint::Buffered)
    });
    for number in 0..300 {
        append_old(&mut world, number % 3, "T0", &format!("{number}"));
        if number % 50 == 0 {
            turns(&mut world, 30);
        }
    }
    append_old(&mut world, 1, "gone", "of a removed topic");
    let live = world.live();
    live.shard.remove_topic(live.now, "gone").unwrap();
    turns(&mut world, 60);
    // Killed while it moves them, and once more while it delivers.
    for count in [0, 4, 12, 40] {
        again(&mut world);
        turns(&mut world, count);
    }
    world.machine.advance_us(300_000);
    turns(&mut world, 2_000);
    again(&mut world);
    let (_, raw) = world.read("T0", 0).unwrap();
    for raw in &raw {
        let view = RecordView::parse(raw).unwrap();
        let number = |name| -> i64 {
            let text = properties::get_str(view.properties(), name).unwrap();
            text.parse().unwrap()
        };
        let due_ms = number(properties::TIMER_OUT_MS);
        let delay_ms = DELAYS_MS[number(properties::DELAY) as usize - 1];
        assert!(due_ms >= view.born_timestamp() + delay_ms);
        assert!(view.store_timestamp() >= due_ms, "none is early");
    }
    let mut found = bodies(&mut world, "T0", 0);
    let all = found.len();
    found.sort_unstable_by_key(|body| body.parse::<i32>().unwrap());
    found.dedup();
    let wanted: Vec<String> = (0..300).map(|number| number.to_string()).collect();
    assert_eq!(found, wanted);
    // A batch that was not noted yet may come again.
    assert!(all <= 300 + 4 * 64, "{all}");
    assert_eq!(readable(&mut world, "gone"), 0);
    assert_eq!(world.shard().counters().timers_lost, 0);
    turns(&mut world, 2_000);
    let report = world.shard().timer_report();
    assert_eq!((report.pending, report.complete), (0, true));
    assert_eq!(readable(&mut world, "T0"), all as u64, "moved once only");
}

/// Turns without the bookkeeping of the world, which a million messages would make slow.
fn turns(world: &mut World, count: usize) {
    let live = world.live();
    for _ in 0..count {
        let soon = live.now.monotonic_us + 1_000;
        let deadline = live.shard.deadline_us(live.now).unwrap_or(soon).min(soon);
        live.driver.wait(Some(deadline));
        live.now = live.driver.now();
        while let Some(completion) = live.driver.next() {
            let back = live
                .shard
                .on_completion(live.now, &mut live.driver, completion);
            assert!(back.is_none());
        }
        live.shard.turn(live.now, &mut live.driver);
    }
}

const COUNT: u64 = 1_000_000;
/// They are due over this time, in an order that has nothing to do with their sending.
const SPREAD_MS: i64 = 40_000;

/// Appends the million; none of them is due for a while after `base_ms`.
fn append_many(world: &mut World, base_ms: i64) {
    let mut number = 0u64;
    while number < COUNT {
        let live = world.live();
        let queue = live.shard.open_queue("T0", 0).unwrap();
        let body = number.to_be_bytes();
        let message = NewMessage {
            queue,
            flag: 0,
            sys_flag: 0,
            born_timestamp: live.now.wall_ms,
            born_host: "10.0.0.9:4711".parse().unwrap(),
            reconsume_times: 0,
            prepared_transaction_offset: 0,
            body: &body,
            properties: &[],
            tags_code: 0,
            unique_key: None,
            keys: None,
        };
        let due_ms = base_ms + (number.wrapping_mul(48_271) % SPREAD_MS as u64) as i64;
        match live.shard.append_timed(live.now, message, due_ms) {
            Ok(_) => number += 1,
            Err(_) => turns(world, 1),
        }
        if number.is_multiple_of(500) {
            turns(world, 1);
        }
    }
    turns(world, 2_000);
    assert!(now_ms(world) < base_ms, "none is due yet");
}

fn all_wait(world: &mut World) {
    let report = world.shard().timer_report();
    assert_eq!((report.pending, report.complete), (COUNT, true));
    assert!(report.in_window as usize <= WINDOW_MAX);
}

/// Lets their time come, with three kills on the way.
fn deliver_many(world: &mut World, base_ms: i64) {
    let mut crashes = 0;
    let mut delivered = 0;
    while delivered < COUNT {
        turns(world, 1_000);
        let now = now_ms(world);
        delivered = readable(world, "T0");
        let due = (now - base_ms + 1).clamp(0, SPREAD_MS) as u64 * (COUNT / SPREAD_MS as u64);
        assert!(delivered <= due, "{delivered} delivered, {due} due");
        if delivered * 4 > COUNT * (crashes + 1) && crashes < 3 {
            crashes += 1;
            world.crash(Crash::Kill);
            world.start();
        }
        assert!(
            now < base_ms + 2 * SPREAD_MS,
            "{delivered} in twice the time"
        );
    }
    turns(world, 3_000);
    assert_eq!(crashes, 3);
}

#[test]
fn a_million_messages_wait_in_bounded_memory_and_all_come_once() {
    let setup = Setup {
        segment_bytes: 64 << 20,
        ring_bytes: 8 << 20,
        units_max: 1 << 18,
        run_units: 1 << 16,
        run_log_bytes: 1 << 30,
        cold_slots: 16,
        ..Setup::new(50, AckPoint::Buffered)
    };
    let mut world = World::new(setup);
    let base_ms = now_ms(&mut world) + 400_000;
    append_many(&mut world, base_ms);
    all_wait(&mut world);
    // Nothing of this is left but the log and its runs.
    world.crash(Crash::Kill);
    world.start();
    all_wait(&mut world);
    let wait_ms = base_ms - now_ms(&mut world) - 100;
    world.machine.advance_us(wait_ms as u64 * 1_000);
    deliver_many(&mut world, base_ms);
    assert_eq!(readable(&mut world, "T0"), COUNT, "each came once");
    let report = world.shard().timer_report();
    assert_eq!(report.pending, 0);
    println!("after the last start: {:?}", report.lateness);
    // And retention takes what is done.
    let live = world.live();
    let order = RetentionOrder {
        expired_before_ms: i64::MAX,
        force_oldest: false,
        segments_max: 1,
    };
    assert_eq!(live.shard.retain(&mut live.driver, order), 1);
    assert_eq!(readable(&mut world, TIMER_TOPIC), COUNT);
}

fn readable(world: &mut World, topic: &str) -> u64 {
    let shard = world.shard();
    let queue = shard.queues().find(topic, 0);
    queue.map_or(0, |queue| shard.bounds(queue).unwrap().1)
}
