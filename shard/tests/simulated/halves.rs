//! Transactions: half messages, their ends, questions about them, across crashes and retention.

use std::collections::BTreeMap;

use shard::cold::{Answer, Question};
use shard::half::{GIVE_UP_TOPIC, HalfEnd, HalfLimits, OPEN_MAX, group_hash};
use shard::half_checks::HalfCheck;
use shard::half_ends::Ended;
use shard::io::sim::{Crash, SimRandom};
use shard::{AckPoint, Appended, NewMessage, Refusal, address};
use wire::message::{RecordView, properties, sysflag, tags};

use super::world::{Draft, Setup, World};

const MODES: [AckPoint; 3] = [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced];
/// Seeds per mode.
const SEEDS: u64 = 25;
const SHARD: i32 = 3;
const LIMITS: HalfLimits = HalfLimits {
    immunity_ms: 40,
    interval_ms: 30,
    checks_max: 3,
    open_max: OPEN_MAX,
};
/// Limits under which nobody is asked.
const NEVER: HalfLimits = HalfLimits {
    immunity_ms: 1 << 40,
    interval_ms: 1 << 40,
    checks_max: 3,
    open_max: OPEN_MAX,
};

/// A half message as its producer knows it.
#[derive(Clone, Debug)]
struct Half {
    position: u64,
    end: u64,
    topic: String,
    queue_id: i32,
    number: u64,
    /// How it ended, and where the log says so.
    fate: Option<(HalfEnd, u64)>,
}

fn passes(refusal: &Refusal) -> bool {
    matches!(
        refusal,
        Refusal::BufferFull { .. } | Refusal::SegmentMissing { .. } | Refusal::UnitsFull { .. }
    )
}

/// Takes note of what was just appended.
fn note(world: &mut World, end: u64) {
    world.note_deliveries();
    if world.setup.ack == AckPoint::Buffered {
        world.model.acked = world.model.acked.max(end);
    }
}

fn append_half(
    world: &mut World,
    draft: &Draft,
    more: &[(&str, &str)],
) -> Result<Appended, Refusal> {
    let live = world.live();
    let queue = live.shard.open_queue(&draft.topic, draft.queue_id).unwrap();
    let mut stored = Vec::new();
    properties::append(&mut stored, properties::TAGS, &draft.tag);
    properties::append(&mut stored, properties::REAL_TOPIC, &draft.topic);
    let queue_id = draft.queue_id.to_string();
    properties::append(&mut stored, properties::REAL_QUEUE_ID, &queue_id);
    properties::append(&mut stored, properties::PRODUCER_GROUP, "producers");
    for (name, value) in more {
        properties::append(&mut stored, name, value);
    }
    let message = NewMessage {
        queue,
        flag: 7,
        sys_flag: sysflag::TRANSACTION_PREPARED,
        born_timestamp: live.now.wall_ms,
        born_host: "10.0.0.9:4711".parse().unwrap(),
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body: &draft.body,
        properties: &[&stored],
        tags_code: tags::tags_code(Some(&draft.tag)),
        unique_key: None,
        keys: None,
    };
    live.shard.append_half(live.now, message)
}

/// Begins a transaction. `None` after a crash.
fn begin(world: &mut World, draft: &Draft, number: u64, more: &[(&str, &str)]) -> Option<Half> {
    for _ in 0..20_000 {
        match append_half(world, draft, more) {
            Ok(appended) => {
                note(world, appended.end);
                let (_, position) = address::split(appended.physical_offset).unwrap();
                let half = *world.shard().half(position).expect("open");
                assert_eq!(half.queue_offset as i64, appended.queue_offset);
                assert_eq!(half.group_hash, group_hash(b"producers"));
                return Some(Half {
                    position,
                    end: appended.end,
                    topic: draft.topic.clone(),
                    queue_id: draft.queue_id,
                    number,
                    fate: None,
                });
            }
            Err(refusal) => assert!(passes(&refusal), "{refusal}"),
        }
        if !world.step() {
            return None;
        }
    }
    panic!("refused without end");
}

/// Ends a transaction. `None` after a crash.
fn end(world: &mut World, half: &Half, how: HalfEnd) -> Option<Ended> {
    for _ in 0..20_000 {
        let mut record = Vec::new();
        let held = world.shard().half_in_ring(half.position, &mut record);
        if world.shard().half(half.position).is_none() {
            return Some(world.shard().half_ended(half.position));
        }
        if how == HalfEnd::Committed && !held {
            let physical_offset = address::physical(SHARD as u16, half.position);
            let Answer::Records(records) = world.ask(Question::Record { physical_offset })? else {
                panic!("no records");
            };
            record = records.into_iter().next().expect("the half message");
        }
        let live = world.live();
        let ended = if how == HalfEnd::Committed {
            live.shard.commit_half(live.now, &record, None)
        } else {
            live.shard.roll_back_half(live.now, half.position)
        };
        match ended {
            Ok(ended) => {
                if let Ended::Now(_, at) = ended {
                    note(world, at);
                }
                return Some(ended);
            }
            Err(refusal) => assert!(passes(&refusal), "{refusal}"),
        }
        if !world.step() {
            return None;
        }
    }
    panic!("refused without end");
}

/// Numbers of the messages that came to their queues, how often.
fn arrived(world: &mut World, halves: &[Half]) -> Option<BTreeMap<u64, usize>> {
    let mut places: Vec<(String, i32)> = Vec::new();
    for half in halves {
        let place = (half.topic.clone(), half.queue_id);
        if !places.contains(&place) {
            places.push(place);
        }
    }
    let mut found = BTreeMap::new();
    for (topic, queue_id) in places {
        for raw in world.read(&topic, queue_id)?.1 {
            let view = RecordView::parse(&raw).unwrap();
            if view.prepared_transaction_offset() == 0 {
                continue;
            }
            let kind = sysflag::transaction_type(view.sys_flag());
            assert_eq!(kind, sysflag::TRANSACTION_COMMIT);
            let (_, position) = address::split(view.prepared_transaction_offset()).unwrap();
            let half = halves.iter().find(|half| half.position == position);
            let half = half.expect("a message of a transaction that was begun");
            assert_eq!((&half.topic, half.queue_id), (&topic, queue_id));
            assert!(
                view.body()
                    .starts_with(format!("1 {} ", half.number).as_bytes())
            );
            *found.entry(half.number).or_default() += 1;
        }
    }
    Some(found)
}

/// What is open is what was begun and not ended, and what was committed has come once.
fn compare(world: &mut World, halves: &[Half]) {
    let open: Vec<&Half> = halves.iter().filter(|half| half.fate.is_none()).collect();
    let seed = world.setup.seed;
    assert_eq!(
        world.shard().halves_open().0,
        open.len() as u64,
        "seed {seed}"
    );
    for half in &open {
        assert!(
            world.shard().half(half.position).is_some(),
            "seed {seed}: {half:?}"
        );
    }
    let Some(found) = arrived(world, halves) else {
        return;
    };
    for half in halves {
        let committed = matches!(half.fate, Some((HalfEnd::Committed, _)));
        let times = found.get(&half.number).copied().unwrap_or(0);
        assert_eq!(times, usize::from(committed), "seed {seed}: {half:?}");
    }
}

fn draft(random: &mut SimRandom, number: u64) -> Draft {
    let filler = "h".repeat(random.below(2500) as usize);
    let topic = format!("T{}", random.below(2));
    let body = format!("1 {number} {filler}");
    Draft::new(&topic, random.below(2) as i32, body.as_bytes())
}

fn act(world: &mut World, halves: &mut Vec<Half>) {
    let mut random = world.random.clone();
    let pick = random.below(halves.len().max(1) as u64) as usize;
    match random.below(20) {
        0..9 => {
            let number = halves.len() as u64;
            let draft = draft(&mut random, number);
            halves.extend(begin(world, &draft, number, &[]));
        }
        9..15 if !halves.is_empty() => {
            let how = [HalfEnd::Committed, HalfEnd::RolledBack][random.below(2) as usize];
            let half = halves[pick].clone();
            match end(world, &half, how) {
                Some(Ended::Now(told, at)) => {
                    assert_eq!((told, half.fate), (how, None), "ended once only");
                    halves[pick].fate = Some((how, at));
                }
                Some(Ended::Before(told, _)) => {
                    assert_eq!(half.fate.map(|(how, _)| how), Some(told), "{half:?}");
                }
                Some(Ended::Unknown) => assert!(half.fate.is_some(), "{half:?}"),
                None => {}
            }
        }
        15..17 => {
            let number = 1_000_000;
            let draft = draft(&mut random, number);
            world.append_patiently(&draft, 0);
        }
        _ => world.run(1 + random.below(30) as usize),
    }
    world.random = random;
}

#[test]
fn what_is_open_follows_from_the_log_after_any_crash() {
    for ack in MODES {
        for seed in 1..=SEEDS {
            let mut world = World::new(Setup::new(seed, ack));
            let mut halves: Vec<Half> = Vec::new();
            let now = world.live().now;
            world.shard().set_half_limits(now, NEVER);
            for round in 0..4 {
                for _ in 0..60 {
                    act(&mut world, &mut halves);
                }
                let kind = [Crash::Kill, Crash::PowerLoss][world.random.below(2) as usize];
                if round == 2 {
                    world.settle_synced();
                    world.crash(kind);
                    world.remove_runs();
                    world.start();
                } else {
                    world.crash_and_check(kind);
                }
                let end = world.report.end;
                halves.retain(|half| half.end <= end);
                for half in &mut halves {
                    half.fate = half.fate.filter(|(_, told)| *told <= end);
                }
                compare(&mut world, &halves);
            }
            world.check();
        }
    }
}

/// A half message may survive while its end does not, never the other way round.
#[test]
fn a_kill_at_any_step_of_a_commit_leaves_it_open_or_stored() {
    for ack in MODES {
        for at in 1..60 {
            let mut world = World::new(Setup::new(9, ack));
            let half = begin(&mut world, &Draft::new("T", 0, b"1 0 x"), 0, &[]).unwrap();
            world.settle();
            world.crash_at = Some((world.steps + at, Crash::Kill));
            let told = end(&mut world, &half, HalfEnd::Committed);
            world.run(60);
            world.crash_at = None;
            world.crash_and_check(Crash::Kill);
            let open = world.shard().half(half.position).is_some();
            let found = arrived(&mut world, std::slice::from_ref(&half)).unwrap();
            assert_eq!(
                found.len(),
                usize::from(!open),
                "{ack:?} killed at step {at}"
            );
            if let (AckPoint::Buffered, Some(Ended::Now(..))) = (ack, told) {
                assert!(!open, "a commit that was acknowledged is kept");
            }
        }
    }
}

fn run_ms(world: &mut World, ms: i64) -> Vec<HalfCheck> {
    let until = world.live().now.wall_ms + ms;
    let mut checks = Vec::new();
    while world.live().now.wall_ms < until {
        assert!(world.step());
        world.shard().take_half_checks(&mut checks);
    }
    checks
}

fn numbers(checks: &[HalfCheck]) -> Vec<(u64, u32)> {
    let number = |check: &HalfCheck| {
        let view = RecordView::parse(&check.record).unwrap();
        let body = String::from_utf8_lossy(view.body()).into_owned();
        (
            body.split(' ').nth(1).unwrap().parse().unwrap(),
            check.number,
        )
    };
    checks.iter().map(number).collect()
}

fn start_with(setup: Setup, limits: HalfLimits) -> World {
    let mut world = World::new(setup);
    let now = world.live().now;
    world.shard().set_half_limits(now, limits);
    run_ms(&mut world, 35);
    world
}

/// H14: only what is undecided is asked about, once a round, also across a restart.
#[test]
fn producers_are_asked_about_open_transactions_only() {
    for ack in MODES {
        let mut world = start_with(Setup::new(5, ack), LIMITS);
        let mut halves = Vec::new();
        for number in 0..90 {
            let body = format!("1 {number} {}", "b".repeat(3000));
            let draft = Draft::new("T", 0, body.as_bytes());
            halves.push(begin(&mut world, &draft, number, &[]).unwrap());
            assert_eq!(numbers(&run_ms(&mut world, 0)), []);
            let how = [Some(HalfEnd::Committed), Some(HalfEnd::RolledBack), None];
            if let Some(how) = how[number as usize % 3] {
                end(&mut world, &halves[number as usize], how).unwrap();
            }
            world.settle();
        }
        let mut asked: BTreeMap<u64, u32> = BTreeMap::new();
        let mut take = |checks: &[HalfCheck]| {
            for (number, times) in numbers(checks) {
                assert_eq!(number % 3, 2, "{number} is decided");
                let before = asked.insert(number, times).unwrap_or(0);
                assert_eq!(times, before + 1);
            }
            asked.values().min().copied().unwrap_or(0) * u32::from(asked.len() == 30)
        };
        while take(&run_ms(&mut world, 5)) < 2 {}
        world.settle_synced();
        world.crash_and_check(Crash::Kill);
        let now = world.live().now;
        world.shard().set_half_limits(now, LIMITS);
        let early = run_ms(&mut world, 25);
        assert_eq!(
            numbers(&early),
            [],
            "{ack:?}: producers have time to come back"
        );
        while world.shard().halves_open().0 > 0 {
            take(&run_ms(&mut world, 5));
        }
        assert_eq!(
            asked.values().collect::<Vec<_>>(),
            vec![&3; 30],
            "three times each"
        );
        // The last ones are readable when they are written.
        world.settle();
        let given_up = world.read(GIVE_UP_TOPIC, SHARD).unwrap().1;
        assert_eq!(given_up.len(), 30, "{ack:?}");
        world.crash_and_check(Crash::Kill);
        assert_eq!(world.shard().halves_open(), (0, None));
        let late = end(&mut world, &halves[2], HalfEnd::RolledBack).unwrap();
        assert!(
            matches!(late, Ended::Before(HalfEnd::GivenUp, _)),
            "{late:?}"
        );
    }
}

#[test]
fn a_producer_may_wish_not_to_be_asked_for_longer() {
    let mut world = start_with(Setup::new(6, AckPoint::Synced), LIMITS);
    let wish = [(properties::CHECK_IMMUNITY_TIME_IN_SECONDS, "1")];
    begin(&mut world, &Draft::new("T", 0, b"1 0 x"), 0, &wish).unwrap();
    let started = world.live().now.wall_ms;
    assert_eq!(numbers(&run_ms(&mut world, 990)), []);
    world.crash_and_check(Crash::Kill);
    let now = world.live().now;
    world.shard().set_half_limits(now, LIMITS);
    let left = started + 1_100 - world.live().now.wall_ms;
    assert_eq!(numbers(&run_ms(&mut world, left)).first(), Some(&(0, 1)));
}

#[test]
fn a_committed_message_with_a_delay_waits_from_its_commit_on() {
    let mut world = start_with(Setup::new(7, AckPoint::Synced), NEVER);
    let more = [(properties::DELAY, "1")];
    let half = begin(&mut world, &Draft::new("T", 0, b"1 0 x"), 0, &more).unwrap();
    world.settle();
    let ended = end(&mut world, &half, HalfEnd::Committed).unwrap();
    assert!(matches!(ended, Ended::Now(HalfEnd::Committed, _)));
    world.settle();
    assert_eq!(world.shard().delayed_pending(), [(1, 1)]);
    world.crash_and_check(Crash::Kill);
    assert_eq!(world.shard().halves_open(), (0, None));
    run_ms(&mut world, 60);
    world.settle();
    assert_eq!(world.read("T", 0).unwrap().1.len(), 1);
}

#[test]
fn a_committed_message_with_a_time_comes_once_and_then_only_also_across_kills() {
    for ack in MODES {
        let mut world = start_with(Setup::new(21, ack), NEVER);
        let half = begin(&mut world, &Draft::new("T", 0, b"0 0 x"), 0, &[]).unwrap();
        world.settle();
        let due = world.live().now.wall_ms + 400;
        let mut record = Vec::new();
        assert!(world.shard().half_in_ring(half.position, &mut record));
        let live = world.live();
        let ended = live.shard.commit_half(live.now, &record, Some(due));
        let Ok(Ended::Now(HalfEnd::Committed, at)) = ended else {
            panic!("{ended:?}");
        };
        note(&mut world, at);
        world.settle();
        for _ in 0..2 {
            world.crash_and_check(Crash::Kill);
            assert_eq!(world.shard().halves_open(), (0, None), "{ack:?}");
            assert_eq!(world.shard().delayed_pending(), [(0, 1)], "{ack:?}");
            let again = world.shard().half_ended(half.position);
            assert!(matches!(again, Ended::Before(HalfEnd::Committed, _)));
        }
        while world.live().now.wall_ms < due + 20 {
            assert!(world.step());
        }
        world.settle();
        world.crash_and_check(Crash::Kill);
        run_ms(&mut world, 500);
        world.settle();
        let (_, found) = world.read("T", 0).unwrap();
        assert_eq!(found.len(), 1, "{ack:?}");
        let view = RecordView::parse(&found[0]).unwrap();
        assert!(view.store_timestamp() >= due, "{ack:?}");
        let kind = sysflag::transaction_type(view.sys_flag());
        assert_eq!(kind, sysflag::TRANSACTION_COMMIT);
        world.check();
        world.check_delivered();
    }
}

#[test]
fn a_half_message_of_a_removed_topic_is_dropped_at_its_commit() {
    let mut world = start_with(Setup::new(8, AckPoint::Synced), NEVER);
    let half = begin(&mut world, &Draft::new("T", 0, b"1 0 x"), 0, &[]).unwrap();
    world.settle();
    world.remove("T");
    world.append(&Draft::new("T", 0, b"1 1 x")).unwrap();
    world.settle();
    let ended = end(&mut world, &half, HalfEnd::Committed).unwrap();
    assert!(
        matches!(ended, Ended::Now(HalfEnd::Dropped, _)),
        "{ended:?}"
    );
    assert_eq!(world.read("T", 0).unwrap().1.len(), 1);
}

/// An open half message is copied to the topic of those given up before its segment goes.
#[test]
fn retention_gives_up_what_is_open_before_it_drops_it() {
    for ack in MODES {
        let mut world = start_with(Setup::new(10, ack), NEVER);
        let mut halves = Vec::new();
        for number in 0..100 {
            let body = format!("1 {number} x");
            let draft = Draft::new("T", 0, body.as_bytes());
            halves.push(begin(&mut world, &draft, number, &[]).unwrap());
        }
        end(&mut world, &halves[1], HalfEnd::Committed).unwrap();
        world.settle();
        let until = 3 * world.setup.segment_bytes;
        while world.shard().log().tail() < until {
            let body = format!("1 0 {}", "y".repeat(1500));
            world.append_patiently(&Draft::new("busy", 0, body.as_bytes()), 0);
        }
        world.settle_synced();
        for _ in 0..100 {
            world.retain(1);
            run_ms(&mut world, 50);
        }
        assert!(world.shard().log().min_position() > halves[99].end);
        assert_eq!(world.shard().halves_open(), (0, None));
        assert_eq!(world.shard().counters().halves_given_up, 99);
        assert_eq!(world.shard().counters().halves_dropped, 0);
        let kept = world.read(GIVE_UP_TOPIC, SHARD).unwrap().1;
        assert_eq!(kept.len(), 99);
        let view = RecordView::parse(&kept[0]).unwrap();
        let topic = properties::get_str(view.properties(), properties::REAL_TOPIC);
        assert_eq!((topic, view.topic()), (Some("T"), GIVE_UP_TOPIC.as_bytes()));
        world.crash_and_check(Crash::Kill);
        assert_eq!(world.shard().halves_open(), (0, None));
    }
}

/// In a final message, 0 as the offset of its half message means none.
#[test]
fn the_first_message_of_a_store_may_be_a_half_message() {
    let mut world = start_with(Setup::new(11, AckPoint::Synced), NEVER);
    assert_eq!(world.shard().log().tail(), 0);
    let first = begin(&mut world, &Draft::new("T", 0, b"1 0 x"), 0, &[]).unwrap();
    world.settle();
    let ended = end(&mut world, &first, HalfEnd::Committed).unwrap();
    assert!(matches!(ended, Ended::Now(HalfEnd::Committed, _)));
    world.settle();
    world.crash_and_check(Crash::Kill);
    assert_eq!(world.shard().halves_open(), (0, None));
}

#[test]
fn half_messages_beyond_the_bound_are_refused_until_some_end() {
    let few = HalfLimits {
        open_max: 5,
        ..NEVER
    };
    let mut world = start_with(Setup::new(12, AckPoint::Synced), few);
    let draft = Draft::new("T", 0, b"1 0 x");
    let halves: Vec<Half> = (0..5)
        .map(|number| begin(&mut world, &draft, number, &[]).unwrap())
        .collect();
    let refused = append_half(&mut world, &draft, &[]).unwrap_err();
    assert!(matches!(
        refused,
        Refusal::TransactionsFull {
            open: 5,
            bound: 5,
            ..
        }
    ));
    assert_eq!(world.shard().counters().halves_refused, 1);
    world.append(&draft).expect("other messages are taken");
    end(&mut world, &halves[3], HalfEnd::RolledBack).unwrap();
    begin(&mut world, &draft, 5, &[]).unwrap();
}
