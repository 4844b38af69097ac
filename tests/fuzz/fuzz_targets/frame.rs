//! Cutting frames never panics, never takes more than is there, and agrees with `needed`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::frame::{FRAME_BYTES_MAX, needed, split};
use wire::header::decode;

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    loop {
        let wanted = needed(rest, FRAME_BYTES_MAX);
        match split(rest, FRAME_BYTES_MAX) {
            Ok(Some((frame, consumed))) => {
                assert_eq!(wanted, Ok(Some(consumed)));
                assert_eq!(frame.header.len() + frame.body.len() + 8, consumed);
                drop(decode(&frame));
                rest = &rest[consumed..];
            }
            Ok(None) => {
                assert!(wanted.is_ok_and(|bytes| bytes.is_none_or(|bytes| bytes > rest.len())));
                return;
            }
            Err(error) => {
                assert_eq!(wanted, Err(error));
                return;
            }
        }
    }
});
