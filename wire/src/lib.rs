//! The wire crate owns everything between bytes and values: frames, both header codecs, request
//! and response codes, typed headers and bodies, the stored record, properties and ids.
//!
//! Invariant: nothing here reads a clock, does I/O or panics on input. Every length taken from
//! input is checked against a bound before it is used.

pub mod body;
pub mod codes;
pub mod frame;
pub mod header;
pub mod message;
pub mod requests;
mod scan;
