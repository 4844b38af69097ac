//! SQL92 expressions never panic, neither compiled nor evaluated, and tell a place inside the text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::message::filter::Filter;

fuzz_target!(|data: &[u8]| {
    // The first NUL ends the expression; the rest is what it is asked about.
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (expression, properties) = data.split_at(end);
    let Ok(expression) = std::str::from_utf8(expression) else {
        return;
    };
    match Filter::compile(expression) {
        Ok(filter) => {
            let _ = filter.matches(properties);
            let _ = filter.matches_record(properties);
            let _ = filter.matches(b"a\x011\x02b\x01x\x02");
        }
        Err(error) => {
            assert!(error.line <= expression.matches('\n').count() + 1);
            assert!(error.column <= expression.chars().count() + 1);
        }
    }
});
