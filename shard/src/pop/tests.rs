//! Random histories against an oracle that keeps a plain list.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Take {
        queue: usize,
        count: u64,
        invisible_ms: i64,
    },
    Ack {
        pick: usize,
        stale: bool,
    },
    Change {
        pick: usize,
        invisible_ms: i64,
    },
    Wait {
        ms: i64,
    },
    Settle {
        pick: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3_usize, 1..6_u64, 1..50_i64).prop_map(|(queue, count, invisible_ms)| Step::Take {
            queue,
            count,
            invisible_ms
        }),
        (any::<usize>(), any::<bool>()).prop_map(|(pick, stale)| Step::Ack { pick, stale }),
        (any::<usize>(), 1..50_i64)
            .prop_map(|(pick, invisible_ms)| Step::Change { pick, invisible_ms }),
        (0..40_i64).prop_map(|ms| Step::Wait { ms }),
        any::<usize>().prop_map(|pick| Step::Settle { pick }),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
struct Held {
    queue: usize,
    offset: u64,
    pop_ms: i64,
    due_ms: i64,
}

fn name(queue: usize) -> PopName {
    PopName {
        topic: format!("T{}", queue / 2),
        group: "g".into(),
        queue_id: (queue % 2) as i32,
    }
}

/// Everything the table holds, taken out of it as time passes.
fn drain(table: &mut PopTable) -> Vec<Held> {
    let mut found = Vec::new();
    while let Some(due_ms) = table.next_due_ms() {
        let Some(Due::Message(message)) = table.next_due(i64::MAX) else {
            continue;
        };
        let queue_name = table.queue(message.queue).unwrap().name.clone();
        let queue = (0..3).find(|queue| name(*queue) == queue_name).unwrap();
        let (offset, pop_ms) = (message.offset, message.pop_ms);
        found.push(Held {
            queue,
            offset,
            pop_ms,
            due_ms,
        });
    }
    found.sort_unstable();
    found
}

/// A table, its records and the oracle.
#[derive(Default)]
struct World {
    table: PopTable,
    log: Vec<PopEvent>,
    held: Vec<Held>,
    due: Vec<DueMessage>,
    next: [u64; 3],
    now_ms: i64,
}

impl World {
    fn write(&mut self, event: PopEvent) {
        self.table.replay(&event);
        self.log.push(event);
    }

    fn take(&mut self, queue: usize, count: u64, invisible_ms: i64) {
        let offsets: Vec<u64> = (self.next[queue]..self.next[queue] + count).collect();
        self.next[queue] += count;
        let pop_ms = self.now_ms;
        let held = offsets.iter().map(|offset| Held {
            queue,
            offset: *offset,
            pop_ms,
            due_ms: pop_ms + invisible_ms,
        });
        self.held.extend(held);
        self.write(PopEvent::Taken {
            name: name(queue),
            ordered: false,
            fresh: false,
            pop_ms,
            invisible_ms,
            next_offset: self.next[queue] as i64,
            attempt: String::new(),
            offsets,
        });
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Take {
                queue,
                count,
                invisible_ms,
            } => self.take(*queue, *count, *invisible_ms),
            Step::Ack { pick, stale } if !self.held.is_empty() => {
                let at = pick % self.held.len();
                let held = self.held[at];
                let pop_ms = held.pop_ms - i64::from(*stale);
                if !stale {
                    self.held.swap_remove(at);
                }
                self.write(PopEvent::Acked {
                    name: name(held.queue),
                    pop_ms,
                    commit: -1,
                    offsets: vec![held.offset],
                });
            }
            Step::Change { pick, invisible_ms } if !self.held.is_empty() => {
                let at = pick % self.held.len();
                let old = self.held[at];
                let due_ms = self.now_ms + invisible_ms;
                self.held[at].pop_ms = self.now_ms;
                self.held[at].due_ms = due_ms;
                self.write(PopEvent::Changed {
                    name: name(old.queue),
                    pop_ms: old.pop_ms,
                    new_pop_ms: self.now_ms,
                    due_ms,
                    offset: old.offset,
                });
            }
            Step::Wait { ms } => self.wait(*ms),
            Step::Settle { pick } if !self.due.is_empty() => {
                let message = self.due.swap_remove(pick % self.due.len());
                let of = self.table.queue(message.queue).unwrap().name.clone();
                self.held.retain(|held| {
                    name(held.queue) != of
                        || (held.offset, held.pop_ms) != (message.offset, message.pop_ms)
                });
                self.write(PopEvent::Moved {
                    name: of,
                    pop_ms: message.pop_ms,
                    offset: message.offset,
                    commit: -1,
                });
            }
            _ => {}
        }
    }

    fn wait(&mut self, ms: i64) {
        self.now_ms += ms;
        while let Some(due) = self.table.next_due(self.now_ms) {
            let Due::Message(message) = due else { continue };
            let of = self.table.queue(message.queue).unwrap().name.clone();
            let known = self.held.iter().any(|held| {
                name(held.queue) == of
                    && (held.offset, held.pop_ms) == (message.offset, message.pop_ms)
                    && held.due_ms <= self.now_ms
            });
            assert!(known, "{message:?} of {of:?} is due and nobody holds it");
            self.due.push(message);
        }
    }
}

proptest! {
    #[test]
    fn what_is_held_is_what_was_taken_and_not_settled(
        steps in proptest::collection::vec(step(), 0..120),
        cut in any::<usize>(),
    ) {
        let mut world = World::default();
        let mut after = Vec::new();
        for step in &steps {
            world.run(step);
            after.push((world.log.len(), world.held.clone()));
        }
        prop_assert_eq!(world.table.held(), world.held.len());
        // A start after a kill anywhere finds what the records in front of it say.
        if !after.is_empty() {
            let (records, mut held) = after[cut % after.len()].clone();
            let mut table = PopTable::default();
            for event in &world.log[..records] {
                table.replay(event);
            }
            held.sort_unstable();
            prop_assert_eq!(drain(&mut table), held);
        }
        // So does one that reads runs in which what cancels out was left out.
        let mut table = PopTable::default();
        let mut stands = std::collections::BTreeMap::new();
        let bytes = |event: &PopEvent| {
            let mut bytes = Vec::new();
            event.encode(&mut bytes);
            (0, bytes)
        };
        for run in world.log.chunks(1 + cut % 40) {
            for (_, bytes) in compact(run.iter().map(bytes).collect()) {
                let Some(Event::Pop(event)) = Event::decode(&bytes) else {
                    panic!("a record of another kind");
                };
                if let Some(offset) = table.replay(&event) {
                    let of = event.name();
                    stands.insert((of.topic.clone(), of.queue_id), offset);
                }
            }
        }
        let mut held = world.held.clone();
        held.sort_unstable();
        prop_assert_eq!(drain(&mut table), held);
        for queue in 0..3_usize {
            let next = world.next[queue] as i64;
            let of = name(queue);
            let found = stands.get(&(of.topic, of.queue_id)).copied();
            prop_assert_eq!(found.unwrap_or(0), next);
        }
        for queue in 0..3 {
            let of = name(queue);
            let index = world.table.find(&of.topic, &of.group, of.queue_id);
            let held = world.held.iter().filter(|held| held.queue == queue);
            let oldest = held.clone().map(|held| held.offset).min();
            let figures = index.map(|index| world.table.figures(index)).unwrap_or_default();
            prop_assert_eq!(figures.in_flight, held.count());
            prop_assert_eq!(figures.oldest_offset, oldest);
        }
    }
}

fn ordered(pop_ms: i64, offsets: &[u64], next_offset: u64, attempt: &'static str) -> PopEvent {
    PopEvent::Taken {
        name: name(0),
        ordered: true,
        fresh: false,
        pop_ms,
        invisible_ms: 100,
        next_offset: next_offset as i64,
        attempt: attempt.into(),
        offsets: offsets.to_vec(),
    }
}

#[test]
fn in_order_a_queue_waits_for_all_its_messages_or_their_time() {
    let mut table = PopTable::default();
    table.replay(&ordered(1000, &[4, 5, 7], 9, "a"));
    let index = table.find("T0", "g", 0).unwrap();
    assert!(table.blocked(index, "", 1099) && !table.blocked(index, "a", 1000));
    assert!(!table.blocked(index, "", 1100));
    assert_eq!(table.stands_at(index, 1000, &[4, 5]), Some(7));
    assert_eq!(table.stands_at(index, 1000, &[5]), None);
    for offset in [5, 4] {
        assert!(table.ack(index, offset, 1000));
    }
    assert!(!table.ack(index, 4, 1000) && !table.ack(index, 7, 999));
    assert_eq!(table.held(), 1);
    assert_eq!(table.stands_at(index, 1000, &[7]), Some(9));
    assert!(table.ack(index, 7, 1000));
    assert!(!table.blocked(index, "", 1000));
    assert_eq!((table.held(), table.next_due_ms()), (0, None));
}

#[test]
fn in_order_what_was_acknowledged_out_of_turn_does_not_come_again() {
    let mut table = PopTable::default();
    table.replay(&ordered(1000, &[0, 1, 2], 3, ""));
    let index = table.find("T0", "g", 0).unwrap();
    assert!(table.ack(index, 1, 1000));
    assert_eq!(table.next_due(1100), Some(Due::Unblocked(index)));
    assert!(table.is_taken(index, 1) && !table.is_taken(index, 0));
    table.replay(&ordered(1200, &[0, 2, 3], 4, ""));
    assert_eq!(table.order_count(index, 0), 1);
    assert_eq!(table.order_count(index, 3), 0);
    assert_eq!(table.held(), 3);
    assert!(!table.ack(index, 0, 1000), "the old receipt is void");
    assert_eq!(table.stands_at(index, 1200, &[0]), Some(2));
    assert_eq!(table.figures(index).oldest_offset, Some(0));
}

#[test]
fn a_run_of_settled_pops_keeps_only_where_the_group_stands() {
    let mut world = World::default();
    for _ in 0..100 {
        world.take(1, 3, 50);
        for _ in 0..3 {
            world.run(&Step::Ack {
                pick: 0,
                stale: false,
            });
        }
    }
    world.take(1, 2, 50);
    let bytes = |event: &PopEvent| {
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        (0, bytes)
    };
    let kept = compact(world.log.iter().map(bytes).collect());
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0], bytes(world.log.last().unwrap()));
}

#[test]
fn a_message_settled_twice_in_a_run_does_not_count_for_another() {
    let mut world = World::default();
    world.take(0, 2, 50);
    let ack = PopEvent::Acked {
        name: name(0),
        pop_ms: 0,
        commit: -1,
        offsets: vec![0],
    };
    world.write(ack.clone());
    world.write(ack);
    let bytes = |event: &PopEvent| {
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        (0, bytes)
    };
    let all: Vec<_> = world.log.iter().map(bytes).collect();
    assert_eq!(compact(all.clone()), all, "offset 1 is still held");
}

#[test]
fn a_removed_topic_or_group_holds_nothing() {
    let mut world = World::default();
    for queue in 0..3 {
        world.take(queue, 4, 10);
    }
    let block = ordered(1, &[90, 91], 92, "");
    world.table.replay(&block);
    world.table.remove_topic("T0");
    assert_eq!(world.table.held(), 4);
    world.take(0, 2, 10);
    world.table.remove_group("g");
    assert_eq!((world.table.held(), world.table.next_due_ms()), (0, None));
}
