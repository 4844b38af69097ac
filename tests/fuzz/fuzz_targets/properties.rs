//! Properties strings never panic, and rewriting one keeps its entries.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::message::properties::{get, iter, needs_separator, remove};

fuzz_target!(|data: &[u8]| {
    let rewritten = remove(data, &[]);
    assert!(iter(data).eq(iter(&rewritten)));
    assert!(!needs_separator(&rewritten));
    for (name, _) in iter(data).take(8) {
        if let Ok(name) = std::str::from_utf8(name) {
            assert!(get(data, name).is_some());
            assert!(get(&remove(data, &[name]), name).is_none());
        }
    }
});
