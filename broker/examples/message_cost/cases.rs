//! The cases: each returns a function that handles a number of messages.

use std::hint::black_box;

use shard::runtime::Driver as _;
use shard::{AckPoint, NewMessage};
use wire::codes::response;
use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{ExtValue, Reply, decode, encode_reply};
use wire::message::properties;
use wire::requests::{PullRequest, SendRequest};

use crate::null::{self, NullDriver};
use crate::rig::{self, CONNECTIONS};

/// All cases.
pub const NAMES: &[&str] = &[
    "header_json",
    "header_binary",
    "header_pull",
    "append",
    "append_synced",
    "answer_json",
    "send",
    "send_binary",
    "send_synced",
    "send_one_in_flight",
    "send_100000_queues",
    "send_cut_frames",
    "send_mesh",
    "pull_tail_32",
    "pull_parked",
    "turn_idle",
];

type Run = Box<dyn FnMut(u64)>;

/// Frames that arrive together.
const PER_ARRIVAL: u64 = 32;

/// Makes a case ready.
pub fn prepare(name: &str) -> Run {
    match name {
        "header_json" => header(Serialization::Json),
        "header_binary" => header(Serialization::Binary),
        "header_pull" => pull_header(),
        "append" => append(AckPoint::Buffered),
        "append_synced" => append(AckPoint::Synced),
        "answer_json" => answer(),
        "send" => send(AckPoint::Buffered, 16, Serialization::Json),
        "send_binary" => send(AckPoint::Buffered, 16, Serialization::Binary),
        "send_synced" => send(AckPoint::Synced, 16, Serialization::Json),
        "send_one_in_flight" => send_one(),
        "send_100000_queues" => send(AckPoint::Buffered, 100_000, Serialization::Json),
        "send_cut_frames" => send_cut(),
        "send_mesh" => send_mesh(),
        "pull_tail_32" => pull_tail(),
        "pull_parked" => pull_parked(),
        "turn_idle" => turn_idle(),
        other => panic!("no case {other}"),
    }
}

fn header(serialization: Serialization) -> Run {
    let bytes = rig::send_frame(serialization, 3);
    Box::new(move |count| {
        for _ in 0..count {
            let (frame, _) = split(black_box(&bytes), FRAME_BYTES_MAX).unwrap().unwrap();
            let header = decode(&frame).unwrap();
            black_box(SendRequest::decode_short(&header.ext).unwrap());
        }
    })
}

fn pull_header() -> Run {
    let bytes = rig::pull_frame(3, 1_000_000);
    Box::new(move |count| {
        for _ in 0..count {
            let (frame, _) = split(black_box(&bytes), FRAME_BYTES_MAX).unwrap().unwrap();
            let header = decode(&frame).unwrap();
            black_box(PullRequest::decode(&header.ext).unwrap());
        }
    })
}

fn append(ack: AckPoint) -> Run {
    let mut driver = NullDriver::new();
    let mut shard = null::open(ack, &mut driver);
    let open = |id| shard.open_queue(rig::TOPIC, id).unwrap();
    let queues: Vec<u32> = (0..16).map(open).collect();
    let mut stored = Vec::new();
    properties::append(&mut stored, "UNIQ_KEY", "7F0000010B3A18B4AAC20000000004D2");
    properties::append(&mut stored, "WAIT", "true");
    let body = vec![b'x'; 1024];
    let mut number = 0;
    Box::new(move |count| {
        for _ in 0..count {
            let message = NewMessage {
                queue: queues[number % 16],
                flag: 0,
                sys_flag: 0,
                born_timestamp: 1,
                born_host: std::net::SocketAddr::from(([10, 0, 0, 1], 5000)),
                reconsume_times: 0,
                prepared_transaction_offset: 0,
                body: &body,
                properties: &[&stored],
                tags_code: 5,
                unique_key: Some(&stored[9..41]),
                keys: None,
            };
            black_box(shard.append(driver.now(), &message).unwrap());
            number += 1;
            if number.is_multiple_of(PER_ARRIVAL as usize) {
                driver.wait(None);
                let now = driver.now();
                while let Some(completion) = driver.next() {
                    shard.on_completion(now, &mut driver, completion);
                }
                shard.turn(now, &mut driver);
            }
        }
    })
}

fn answer() -> Run {
    let ext = [
        ("MSG_REGION", ExtValue::Str("DefaultRegion")),
        ("TRACE_ON", ExtValue::Str("true")),
        ("msgId", ExtValue::Str("7F00000100002A9F00000000000B3A18")),
        ("queueId", ExtValue::Int(3)),
        ("queueOffset", ExtValue::Int(1_234_567)),
        (
            "transactionId",
            ExtValue::Str("7F0000010B3A18B4AAC20000000004D2"),
        ),
    ];
    let mut out = Vec::new();
    Box::new(move |count| {
        for opaque in 0..count {
            out.clear();
            let reply = Reply {
                code: response::SUCCESS,
                opaque: opaque as i32,
                remark: None,
                ext: black_box(&ext),
            };
            encode_reply(&mut out, Serialization::Json, &reply, &[]);
            black_box(&out);
        }
    })
}

fn send(ack: AckPoint, queues: i64, serialization: Serialization) -> Run {
    let mut core = rig::alone(ack, queues as i32);
    let arrivals = (queues as u64).div_ceil(PER_ARRIVAL).clamp(1, 512) as i64;
    let mut kept = Vec::new();
    for arrival in 0..arrivals {
        let mut bytes = Vec::new();
        for frame in 0..PER_ARRIVAL as i64 {
            let queue = (arrival * PER_ARRIVAL as i64 + frame) * 7919 % queues;
            bytes.extend(rig::send_frame(serialization, queue));
        }
        kept.push(core.driver.keep(bytes));
    }
    let mut next = 0;
    Box::new(move |count| {
        let mut left = count / PER_ARRIVAL;
        while left > 0 {
            for number in 0..CONNECTIONS.min(left) {
                core.driver
                    .arrive(rig::connection(number), kept[next % kept.len()]);
                next += 1;
                left -= 1;
            }
            rig::turn(&mut core);
        }
        rig::turn(&mut core);
        rig::turn(&mut core);
        assert!(core.driver.sent_bytes > 200 * count);
        core.driver.sent_bytes = 0;
    })
}

/// One message in each turn, synced, with the turn that sees its write end.
fn send_one() -> Run {
    let mut core = rig::alone(AckPoint::Synced, 16);
    let kept = core.driver.keep(rig::send_frame(Serialization::Json, 3));
    Box::new(move |count| {
        for _ in 0..count {
            core.driver.arrive(rig::connection(0), kept);
            rig::turn(&mut core);
            rig::turn(&mut core);
        }
        assert!(core.driver.sent_bytes > 200 * count);
        core.driver.sent_bytes = 0;
    })
}

/// Frames that lie across the ends of receive buffers.
fn send_cut() -> Run {
    let mut core = rig::alone(AckPoint::Buffered, 16);
    let mut bytes = Vec::new();
    for queue in 0..PER_ARRIVAL as i64 {
        bytes.extend(rig::send_frame(Serialization::Json, queue % 16));
    }
    let cut = bytes.len() / 2 + 100;
    let rest = bytes.split_off(cut);
    let (first, second) = (core.driver.keep(bytes), core.driver.keep(rest));
    Box::new(move |count| {
        for _ in 0..count / PER_ARRIVAL {
            core.driver.arrive(rig::connection(0), first);
            core.driver.arrive(rig::connection(0), second);
            rig::turn(&mut core);
        }
        rig::turn(&mut core);
        assert!(core.driver.sent_bytes > 200 * count);
        core.driver.sent_bytes = 0;
    })
}

/// The queue is on another core: both cores' cost.
fn send_mesh() -> Run {
    let (mut near, mut far) = rig::pair(AckPoint::Buffered, 16);
    let mut bytes = Vec::new();
    for queue in 0..PER_ARRIVAL as i64 {
        bytes.extend(rig::send_frame(Serialization::Json, queue % 16));
    }
    let kept = near.driver.keep(bytes);
    Box::new(move |count| {
        for _ in 0..count / PER_ARRIVAL {
            near.driver.arrive(rig::connection(0), kept);
            rig::turn(&mut near);
            rig::turn(&mut far);
        }
        rig::turn(&mut near);
        rig::turn(&mut near);
        assert!(near.driver.sent_bytes > 200 * count);
        near.driver.sent_bytes = 0;
    })
}

/// Pulls of 32 messages at the tail; the cost is that of one pull.
fn pull_tail() -> Run {
    let mut core = rig::alone(AckPoint::Buffered, 1);
    let mut bytes = Vec::new();
    for _ in 0..64 {
        bytes.extend(rig::send_frame(Serialization::Json, 0));
    }
    let sends = core.driver.keep(bytes);
    core.driver.arrive(rig::connection(0), sends);
    rig::turn(&mut core);
    rig::turn(&mut core);
    let pull = core.driver.keep(rig::pull_frame(0, 16));
    Box::new(move |count| {
        core.driver.sent_bytes = 0;
        for _ in 0..count {
            core.driver.arrive(rig::connection(1), pull);
            rig::turn(&mut core);
        }
        rig::turn(&mut core);
        assert!(core.driver.sent_bytes > 32 * 1024 * count);
    })
}

/// A pull that is parked and woken by the next message, with that message.
fn pull_parked() -> Run {
    let mut core = rig::alone(AckPoint::Buffered, 1);
    let send = core.driver.keep(rig::send_frame(Serialization::Json, 0));
    let pulls: Vec<u16> = (0..16_000)
        .map(|offset| core.driver.keep(rig::pull_frame(0, offset)))
        .collect();
    let mut offset = 0;
    Box::new(move |count| {
        core.driver.sent_bytes = 0;
        for _ in 0..count {
            core.driver.arrive(rig::connection(1), pulls[offset]);
            core.driver.arrive(rig::connection(0), send);
            offset += 1;
            rig::turn(&mut core);
        }
        rig::turn(&mut core);
        assert!(core.driver.sent_bytes > 1024 * count);
    })
}

/// A turn with nothing to do.
fn turn_idle() -> Run {
    let mut core = rig::alone(AckPoint::Buffered, 16);
    Box::new(move |count| {
        for _ in 0..count {
            rig::turn(&mut core);
        }
    })
}
