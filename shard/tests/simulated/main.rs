//! A real shard on the simulated machine: workloads, crashes at every point, faults of the disk.
//!
//! Invariant: every check compares the shard with a model that is told only what a client is told.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation may panic in a test"
)]

mod check;
mod faults;
mod halves;
mod kept;
mod model;
mod points;
mod pop;
mod random;
mod reads;
mod timers;
mod world;
