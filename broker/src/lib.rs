//! The processes of Pinion: a RocketMQ broker, a RocketMQ name server, and the tools around them.
//!
//! This crate owns configuration, listeners, connections, request handlers and registries. It knows
//! nothing of the disk layout, which is the business of the `shard` crate, and the name server
//! module never names `shard`.

pub mod cli;
pub mod config;
pub mod control;
pub mod core;
pub mod doctor;
pub mod explain;
pub mod fuse;
pub mod health;
pub mod inspect;
pub mod namesrv;
pub mod settings;
