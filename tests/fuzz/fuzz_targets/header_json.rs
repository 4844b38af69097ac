//! Decoding a header in the json form never panics, and what is decoded survives being written.
#![no_main]

mod header_form;

use libfuzzer_sys::fuzz_target;
use wire::frame::Serialization;

fuzz_target!(|data: &[u8]| header_form::survives(data, Serialization::Json));
