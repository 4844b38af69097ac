//! Nothing on the append path allocates once the shard is warm.
#![allow(unsafe_code, reason = "a counting allocator needs it")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use shard::runtime::Driver as _;
use shard::{AckPoint, NewMessage, Shard};
use wire::message::properties;

use self::null::{NullDriver, open};

#[path = "support/null.rs"]
mod null;

struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

fn note() {
    if COUNTS.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    // SAFETY: as `alloc`.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
    // SAFETY: as `alloc`.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        note();
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Rig {
    driver: NullDriver,
    shard: Shard,
    woken: Vec<u64>,
    stored: Vec<u8>,
    body: Vec<u8>,
}

impl Rig {
    fn append(&mut self, number: u64) {
        let queue = self.shard.open_queue("T", (number % 8) as i32).unwrap();
        let unique = properties::get(&self.stored, properties::UNIQ_KEY);
        let message = NewMessage {
            queue,
            flag: 0,
            sys_flag: 0,
            born_timestamp: 1,
            born_host: "10.0.0.1:5000".parse().unwrap(),
            reconsume_times: 0,
            prepared_transaction_offset: 0,
            body: &self.body,
            properties: &[&self.stored],
            tags_code: 5,
            unique_key: unique,
            keys: Some(b"one"),
        };
        self.shard.append(self.driver.now(), &message).unwrap();
        if number.is_multiple_of(8) {
            self.turn();
        }
        if number.is_multiple_of(64) {
            self.shard.park(queue, number);
        }
    }

    fn turn(&mut self) {
        self.driver.wait(None);
        let now = self.driver.now();
        while let Some(completion) = self.driver.next() {
            assert!(
                self.shard
                    .on_completion(now, &mut self.driver, completion)
                    .is_none()
            );
        }
        self.shard.turn(now, &mut self.driver);
        self.woken.clear();
        self.shard.take_woken(&mut self.woken);
        assert!(self.shard.deadline_us(now).is_some());
    }
}

#[test]
fn a_hundred_thousand_warm_appends_allocate_nothing() {
    for ack in [AckPoint::Buffered, AckPoint::Written, AckPoint::Synced] {
        let mut driver = NullDriver::new();
        let shard = open(ack, &mut driver);
        let mut stored = Vec::new();
        properties::append(
            &mut stored,
            properties::UNIQ_KEY,
            "0A0000010000000000000000000000AB",
        );
        properties::append(&mut stored, properties::KEYS, "one");
        let body = vec![b'x'; 1024];
        let mut rig = Rig {
            driver,
            shard,
            woken: Vec::with_capacity(64),
            stored,
            body,
        };
        for number in 0..20_000 {
            rig.append(number);
        }
        COUNTS.store(true, Ordering::Relaxed);
        for number in 20_000..120_000 {
            rig.append(number);
        }
        COUNTS.store(false, Ordering::Relaxed);
        let allocations = ALLOCATIONS.load(Ordering::Relaxed);
        assert_eq!(
            allocations, 0,
            "{ack:?}: in 100,000 appends and their turns"
        );
        assert!(rig.shard.watermark() > 100 << 20);
        assert!(
            rig.shard.log().synced() > 90 << 20,
            "the turns wrote and flushed"
        );
    }
}
