//! Decoding the header of a send and of a pull allocates nothing, whatever form it came in.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]
#![allow(
    unsafe_code,
    reason = "a counting allocator cannot be written without it"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{ExtValue, Reply, decode, encode_reply, encode_request};
use wire::requests::{PullRequest, SendRequest};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system allocator unchanged; counting touches a thread-local
// number without a destructor, which allocates nothing.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller keeps the contract of the system allocator.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the layout is the caller's, who promises it is valid.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller keeps the contract of the system allocator.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from the system allocator with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

const BOTH: [Serialization; 2] = [Serialization::Json, Serialization::Binary];

#[test]
fn the_counter_counts() {
    assert_eq!(
        allocations(|| drop(std::hint::black_box(vec![1u8; 100]))),
        1
    );
}

#[test]
fn send_headers_are_decoded_without_allocation() {
    let ext = [
        ("a", ExtValue::Str("PG")),
        ("b", ExtValue::Str("Topic")),
        ("c", ExtValue::Str("TBW102")),
        ("d", ExtValue::Int(4)),
        ("e", ExtValue::Int(-1)),
        ("f", ExtValue::Int(0)),
        ("g", ExtValue::Int(1_700_000_000_000)),
        ("h", ExtValue::Int(0)),
        ("i", ExtValue::Str("TAGS\u{1}A\u{2}KEYS\u{1}k\u{2}")),
        ("j", ExtValue::Int(0)),
        ("k", ExtValue::Bool(false)),
        ("l", ExtValue::Int(16)),
        ("m", ExtValue::Bool(false)),
        ("n", ExtValue::Str("broker-a")),
        ("AccessKey", ExtValue::Str("key")),
    ];
    for serialization in BOTH {
        let mut bytes = Vec::new();
        encode_request(&mut bytes, serialization, 310, 7, false, &ext, b"body");
        let mut properties = Vec::with_capacity(1024);
        let count = allocations(|| {
            let (frame, _) = split(&bytes, FRAME_BYTES_MAX).unwrap().unwrap();
            let header = decode(&frame).unwrap();
            let request = SendRequest::decode_short(&header.ext).unwrap();
            request.properties.unwrap().append_to(&mut properties);
            assert!(request.topic.eq_str("Topic") && request.queue_id == -1);
        });
        assert_eq!(count, 0, "{serialization:?}");
        assert_eq!(properties, b"TAGS\x01A\x02KEYS\x01k\x02");
    }
}

#[test]
fn pull_headers_are_decoded_without_allocation() {
    let ext = [
        ("consumerGroup", ExtValue::Str("CG")),
        ("topic", ExtValue::Str("Topic")),
        ("queueId", ExtValue::Int(3)),
        ("queueOffset", ExtValue::Int(99)),
        ("maxMsgNums", ExtValue::Int(32)),
        ("sysFlag", ExtValue::Int(3)),
        ("commitOffset", ExtValue::Int(98)),
        ("suspendTimeoutMillis", ExtValue::Int(15_000)),
        ("subscription", ExtValue::Str("TagA || TagB")),
        ("subVersion", ExtValue::Int(1)),
        ("expressionType", ExtValue::Str("TAG")),
    ];
    for serialization in BOTH {
        let mut bytes = Vec::new();
        encode_request(&mut bytes, serialization, 11, 7, false, &ext, b"");
        let count = allocations(|| {
            let (frame, _) = split(&bytes, FRAME_BYTES_MAX).unwrap().unwrap();
            let header = decode(&frame).unwrap();
            let request = PullRequest::decode(&header.ext).unwrap();
            assert_eq!((request.queue_offset, request.commit_offset), (99, 98));
        });
        assert_eq!(count, 0, "{serialization:?}");
    }
}

#[test]
fn answers_are_encoded_without_allocation_into_a_warm_buffer() {
    let ext = [
        ("msgId", ExtValue::Str("7F00")),
        ("queueOffset", ExtValue::Int(i64::MIN)),
    ];
    let reply = Reply {
        code: 0,
        opaque: 7,
        remark: Some("a \"quoted\" remark"),
        ext: &ext,
    };
    let mut out = Vec::with_capacity(4096);
    for serialization in BOTH {
        out.clear();
        let count = allocations(|| encode_reply(&mut out, serialization, &reply, b"body"));
        assert_eq!(count, 0, "{serialization:?}");
    }
}
