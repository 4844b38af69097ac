//! Leaving out of a run what its records of POP cancel among themselves.
//!
//! Most messages are acknowledged soon after they were popped, so that both records stand in the
//! same run. A start reads all runs, and must not have to read what came to nothing.
//!
//! Invariant: replaying the result gives the same table and offsets as replaying what went in,
//! whatever stands in the runs before and behind.

use std::collections::{HashMap, HashSet};

use super::event::{PopEvent, PopName};
use crate::event::Event;

type Stored = (u64, Vec<u8>);

fn of_pop(bytes: &[u8]) -> Option<PopEvent> {
    if !PopEvent::is_kind(*bytes.first()?) {
        return None;
    }
    match Event::decode(bytes)? {
        Event::Pop(event) => Some(event),
        _ => None,
    }
}

/// What is known of the pops of a run.
#[derive(Default)]
struct Pops<'a> {
    /// The pop that a receipt is of.
    by_receipt: HashMap<(&'a PopName, u64, i64), usize>,
    /// Messages of each pop that are not settled.
    open: HashMap<usize, usize>,
    /// Receipts that are settled; a record that settles one again counts for nothing.
    settled: HashSet<(&'a PopName, u64, i64)>,
    /// Pops that have to stay.
    stays: HashSet<usize>,
}

impl<'a> Pops<'a> {
    fn take(&mut self, at: usize, event: &'a PopEvent) {
        let PopEvent::Taken {
            name,
            ordered,
            pop_ms,
            offsets,
            ..
        } = event
        else {
            return;
        };
        if *ordered {
            self.stays.insert(at);
            return;
        }
        self.open.insert(at, offsets.len());
        for offset in offsets {
            if let Some(before) = self.by_receipt.insert((name, *offset, *pop_ms), at) {
                self.stays.insert(before);
                self.stays.insert(at);
            }
        }
    }

    fn settle(&mut self, name: &'a PopName, pop_ms: i64, offsets: &[u64]) {
        for offset in offsets {
            let receipt = (name, *offset, pop_ms);
            let pop = self.by_receipt.get(&receipt);
            if let Some(open) = pop.and_then(|pop| self.open.get_mut(pop))
                && self.settled.insert(receipt)
            {
                *open = open.saturating_sub(1);
            }
        }
    }

    /// Whether a pop has come to nothing but to where its group stands.
    fn is_over(&self, at: usize) -> bool {
        !self.stays.contains(&at) && self.open.get(&at) == Some(&0)
    }

    /// Whether all these messages are of pops that are left out.
    fn all_over(&self, name: &'a PopName, pop_ms: i64, offsets: &[u64]) -> bool {
        offsets.iter().all(|offset| {
            let pop = self.by_receipt.get(&(name, *offset, pop_ms));
            pop.is_some_and(|pop| self.is_over(*pop))
        })
    }
}

fn gather(events: &[Option<PopEvent>]) -> Pops<'_> {
    let mut pops = Pops::default();
    for (at, event) in events.iter().enumerate() {
        match event {
            Some(event @ PopEvent::Taken { .. }) => pops.take(at, event),
            Some(PopEvent::Acked {
                name,
                pop_ms,
                offsets,
                ..
            }) => pops.settle(name, *pop_ms, offsets),
            Some(PopEvent::Moved {
                name,
                pop_ms,
                offset,
                ..
            }) => pops.settle(name, *pop_ms, &[*offset]),
            Some(PopEvent::Changed {
                name,
                pop_ms,
                offset,
                ..
            }) => {
                let pop = pops.by_receipt.get(&(name, *offset, *pop_ms)).copied();
                pops.stays.extend(pop);
            }
            None => {}
        }
    }
    pops
}

/// The records of a run without what cancels out.
#[must_use]
pub fn compact(events: Vec<Stored>) -> Vec<Stored> {
    let decoded: Vec<Option<PopEvent>> = events.iter().map(|(_, bytes)| of_pop(bytes)).collect();
    if decoded.iter().all(Option::is_none) {
        return events;
    }
    let pops = gather(&decoded);
    let mut out = Vec::with_capacity(events.len() / 4);
    // From the end, so that it is known which pop is the last of its queue and group.
    let mut later: HashSet<&PopName> = HashSet::new();
    for (at, (stored, event)) in events.into_iter().zip(&decoded).enumerate().rev() {
        match event {
            Some(event @ PopEvent::Taken { name, .. }) if pops.is_over(at) => {
                if later.insert(name) {
                    out.push((stored.0, without_messages(event)));
                }
            }
            Some(PopEvent::Taken { name, ordered, .. }) => {
                if *ordered {
                    later.remove(name);
                } else {
                    later.insert(name);
                }
                out.push(stored);
            }
            Some(PopEvent::Acked {
                name,
                pop_ms,
                commit: -1,
                offsets,
            }) if pops.all_over(name, *pop_ms, offsets) => {}
            Some(PopEvent::Moved {
                name,
                pop_ms,
                offset,
                commit: -1,
            }) if pops.all_over(name, *pop_ms, &[*offset]) => {}
            _ => out.push(stored),
        }
    }
    out.reverse();
    out
}

/// A pop whose messages are all settled still says where its group stands.
fn without_messages(event: &PopEvent) -> Vec<u8> {
    let mut event = event.clone();
    if let PopEvent::Taken { offsets, .. } = &mut event {
        offsets.clear();
    }
    let mut bytes = Vec::new();
    event.encode(&mut bytes);
    bytes
}
