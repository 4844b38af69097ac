//! The cores: threads that own connections and shards, and the life of the process around them.
//!
//! Invariant: after start-up the main thread only waits for signals; all work is done on core
//! threads, which share nothing but the mesh rings.

pub mod back;
pub mod canary;
pub mod connections;
pub mod control_task;
pub mod deliveries;
pub mod directory;
pub mod disks;
pub mod dispatch;
mod explain;
pub mod filters;
pub mod frames;
pub mod gather;
pub mod held;
pub mod jobs;
pub mod messages;
pub mod metrics;
pub mod namesrv_task;
pub mod null;
mod outside;
mod peers;
pub mod pop;
mod prober;
pub mod pull;
pub mod pulls;
pub mod queue_requests;
pub mod queue_units;
pub mod registrar;
pub mod replies;
mod reply_sends;
pub mod report;
mod resolver;
pub mod retention;
pub mod saves;
pub mod send;
pub mod settle;
pub mod start;
pub mod state;
pub mod store;
pub mod threads;
mod timed;
mod transactions;
pub mod turn;
pub mod unique;

pub use self::threads::run;
