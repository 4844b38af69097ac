//! Batch bodies never panic, and a whole one is written back the same but for ignored fields.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::message::batch::{append, iter};

fuzz_target!(|data: &[u8]| {
    let Ok(messages) = iter(data).collect::<Result<Vec<_>, _>>() else {
        return;
    };
    let mut body = Vec::new();
    for message in &messages {
        append(&mut body, message).expect("a message just read");
    }
    assert_eq!(body.len(), data.len());
    assert_eq!(
        iter(&body)
            .collect::<Result<Vec<_>, _>>()
            .expect("a whole batch"),
        messages
    );
});
