//! Unique keys for messages whose sender set none.
//!
//! Invariant: two keys of one process never agree within a month.

use std::cell::Cell;
use std::net::SocketAddr;

use shard::runtime::Now;
use wire::message::{ids, properties};

/// Milliseconds of the period after which the time part of a key starts over.
const PERIOD_MS: i64 = 30 * 86_400_000;

thread_local! {
    static COUNTER: Cell<u32> = const { Cell::new(0) };
}

/// Appends a `UNIQ_KEY` property to a property string; returns place and length of its value.
pub fn append_unique_key(stored: &mut Vec<u8>, host: SocketAddr, now: Now) -> (usize, usize) {
    let count = COUNTER.with(|counter| counter.replace(counter.get().wrapping_add(1)));
    stored.extend_from_slice(properties::UNIQ_KEY.as_bytes());
    stored.push(properties::NAME_VALUE_SEPARATOR);
    let at = stored.len();
    // Threads have their own counters, so the thread goes into the hash part.
    let thread = thread_mark() ^ (count >> 16);
    let process = (std::process::id() & 0xffff) as u16;
    let month_ms = (now.wall_ms.rem_euclid(PERIOD_MS)) as u32;
    ids::unique_key(
        stored,
        host.ip(),
        process,
        thread,
        month_ms,
        (count & 0xffff) as u16,
    );
    let len = stored.len() - at;
    stored.push(properties::ENTRY_SEPARATOR);
    (at, len)
}

fn thread_mark() -> u32 {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    // The address of a thread-local differs between the threads of a process.
    MARK.with(|mark| (std::ptr::from_ref(mark) as usize >> 4) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_are_well_formed() {
        let host: SocketAddr = "127.0.0.1:10911".parse().unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..70_000 {
            let mut stored = Vec::new();
            let (at, len) = append_unique_key(&mut stored, host, Now::default());
            assert_eq!(len, 32);
            assert!(seen.insert(stored[at..at + len].to_vec()));
        }
    }
}
