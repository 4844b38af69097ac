//! POP across crashes: what is held afterwards is what the log says, and a message that was moved
//! on has exactly one copy.

use std::collections::BTreeSet;

use shard::event::Event;
use shard::io::sim::Crash;
use shard::pop::{Due, DueMessage, PopEvent, Taking};
use shard::runtime::Now;
use shard::{AckPoint, NewMessage};

use super::model::What;
use super::world::{Draft, Setup, World};

const TOPIC: &str = "T0";
const RETRY: &str = "%RETRY%g_T0";
const GROUP: &str = "g";

/// Where an internal record says that a group stands: one of POP, or an offset that was taken back
/// to the end of its queue.
pub fn commit_in(body: &[u8]) -> Option<What> {
    let event = match Event::decode(body)? {
        Event::Offset {
            topic,
            group,
            queue_id,
            offset,
        } => {
            return Some(What::Commit {
                topic,
                group,
                queue_id,
                offset,
            });
        }
        Event::Pop(event) => event,
        _ => return None,
    };
    let offset = match &event {
        PopEvent::Taken {
            ordered: false,
            next_offset,
            ..
        } => *next_offset,
        PopEvent::Acked { commit, .. } | PopEvent::Moved { commit, .. } if *commit >= 0 => *commit,
        _ => return None,
    };
    let name = event.name();
    Some(What::Commit {
        topic: name.topic.clone(),
        group: name.group.clone(),
        queue_id: name.queue_id,
        offset,
    })
}

type Key = (bool, u64, i64);

#[derive(Clone, Debug)]
enum Done {
    Taken(Vec<Key>),
    Settled(Key),
    Changed(Key, Key),
}

/// What consumers were told, with the log position it depends on.
#[derive(Default)]
struct Oracle {
    done: Vec<(u64, Done)>,
}

impl Oracle {
    fn held(&self) -> BTreeSet<Key> {
        let mut held = BTreeSet::new();
        for (_, done) in &self.done {
            match done {
                Done::Taken(keys) => held.extend(keys),
                Done::Settled(key) => {
                    held.remove(key);
                }
                Done::Changed(old, new) => {
                    held.remove(old);
                    held.insert(*new);
                }
            }
        }
        held
    }
}

/// Everything the shard says is held; it is all due afterwards.
fn held_by_shard(world: &mut World) -> BTreeSet<Key> {
    let shard = world.shard();
    let far = Now {
        monotonic_us: u64::MAX / 2,
        wall_ms: i64::MAX,
    };
    let mut held = BTreeSet::new();
    let mut all: Vec<DueMessage> = Vec::new();
    while let Some(due) = shard.pop_next_due(far) {
        let Due::Message(message) = due else { continue };
        let queue = shard.pop().queue(message.queue).unwrap();
        let is_retry = queue.name.topic == RETRY;
        held.insert((is_retry, message.offset, message.pop_ms));
        all.push(message);
    }
    all.iter()
        .for_each(|message| shard.pop_postpone(message, 0, false));
    held
}

fn take(world: &mut World, oracle: &mut Oracle, retry: bool, count: u64, invisible_ms: i64) {
    let live = world.live();
    let topic = if retry { RETRY } else { TOPIC };
    let queue = live.shard.open_queue(topic, 0).unwrap();
    let (_, end) = live.shard.bounds(queue).unwrap();
    let stands = live.shard.offsets().get(topic, GROUP, 0);
    let from = stands.map_or(0, |entry| entry.offset.max(0)) as u64;
    let offsets: Vec<u64> = (from..end.min(from + count)).collect();
    if offsets.is_empty() {
        return;
    }
    let index = live.shard.pop_open(topic, GROUP, 0).unwrap();
    let pop_ms = live.now.wall_ms;
    let taking = Taking {
        ordered: false,
        fresh: false,
        pop_ms,
        invisible_ms,
        next_offset: from + offsets.len() as u64,
        attempt: "",
        offsets: &offsets,
    };
    if let Ok(end) = live.shard.pop_take(live.now, index, &taking) {
        let keys = offsets.iter().map(|offset| (retry, *offset, pop_ms));
        oracle.done.push((end, Done::Taken(keys.collect())));
    }
}

fn pick(world: &mut World, oracle: &Oracle) -> Option<Key> {
    let held: Vec<Key> = oracle.held().into_iter().collect();
    let at = world.random.below(held.len().max(1) as u64) as usize;
    held.get(at).copied()
}

fn ack(world: &mut World, oracle: &mut Oracle, key: Key) {
    let topic = if key.0 { RETRY } else { TOPIC };
    let live = world.live();
    let index = live.shard.pop().find(topic, GROUP, 0).unwrap();
    if let Ok((acked, end)) = live.shard.pop_ack(live.now, index, key.2, &[key.1]) {
        assert_eq!(acked, 1);
        oracle.done.push((end, Done::Settled(key)));
    }
}

fn change(world: &mut World, oracle: &mut Oracle, key: Key) {
    let topic = if key.0 { RETRY } else { TOPIC };
    let live = world.live();
    let index = live.shard.pop().find(topic, GROUP, 0).unwrap();
    let now = live.now;
    let new = (now.wall_ms, now.wall_ms + 50);
    if let Ok(end) = live.shard.pop_change(now, index, (key.1, key.2), new) {
        let changed = (key.0, key.1, new.0);
        let end = end.expect("held");
        oracle.done.push((end, Done::Changed(key, changed)));
    }
}

fn move_due(world: &mut World, oracle: &mut Oracle) {
    let live = world.live();
    let target = live.shard.open_queue(RETRY, 0).unwrap();
    while let Some(due) = live.shard.pop_next_due(live.now) {
        let Due::Message(message) = due else { continue };
        let queue = live.shard.pop().queue(message.queue).unwrap();
        let key = (queue.name.topic == RETRY, message.offset, message.pop_ms);
        let copy = NewMessage {
            queue: target,
            flag: 0,
            sys_flag: 0,
            born_timestamp: 1,
            born_host: "10.0.0.9:4711".parse().unwrap(),
            reconsume_times: 1,
            prepared_transaction_offset: 0,
            body: b"0 copy",
            properties: &[b"TAGS\x01a\x02"],
            tags_code: 0,
            unique_key: None,
            keys: None,
        };
        match live.shard.pop_move(live.now, &message, copy) {
            Ok(moved) => {
                let end = moved.expect("held").end;
                oracle.done.push((end, Done::Settled(key)));
            }
            Err(_) => {
                let again_ms = live.now.wall_ms + 1;
                live.shard.pop_postpone(&message, again_ms, true);
                return;
            }
        }
    }
}

fn history(seed: u64, ack_point: AckPoint) {
    let mut world = World::new(Setup::new(seed, ack_point));
    let mut oracle = Oracle::default();
    for round in 0..150 {
        let body = format!("0 {round} {}", "x".repeat(300));
        let draft = Draft::new(TOPIC, 0, body.as_bytes());
        world.append_patiently(&draft, 0).unwrap();
        let turns = world.random.below(4) as usize;
        world.run(turns);
        match world.random.below(6) {
            0 | 1 => {
                let count = 1 + world.random.below(4);
                let invisible_ms = 5 + world.random.below(60) as i64;
                let retry = world.random.below(3) == 0;
                take(&mut world, &mut oracle, retry, count, invisible_ms);
            }
            2 | 3 => {
                if let Some(key) = pick(&mut world, &oracle) {
                    ack(&mut world, &mut oracle, key);
                }
            }
            4 => {
                if let Some(key) = pick(&mut world, &oracle) {
                    change(&mut world, &mut oracle, key);
                }
            }
            _ => move_due(&mut world, &mut oracle),
        }
        if round % 25 == 24 {
            let kind = if world.random.below(2) == 0 {
                Crash::Kill
            } else {
                Crash::PowerLoss
            };
            // The model has to know what was appended since the last step.
            world.note_deliveries();
            world.crash_and_check(kind);
            let end = world.report.end;
            oracle.done.retain(|(at, _)| *at <= end);
        }
        let wanted = oracle.held();
        assert_eq!(
            world.shard().pop().held(),
            wanted.len(),
            "seed {seed}, round {round}"
        );
        if round % 25 == 24 {
            assert_eq!(
                held_by_shard(&mut world),
                wanted,
                "seed {seed}, round {round}"
            );
        }
    }
}

#[test]
fn after_a_crash_consumers_hold_what_they_were_told_and_not_what_they_acknowledged() {
    for seed in 0..20 {
        for ack_point in [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced] {
            history(seed, ack_point);
        }
    }
}
