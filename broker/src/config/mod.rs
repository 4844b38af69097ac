//! Settings of the broker and the name server: which there are, where a value came from, and how it
//! changes.
//!
//! Invariant: a configuration that was built is whole. Derived values (addresses, ports, paths,
//! cores) are filled in and every value passed its check, so the rest of the program never asks "is
//! it set".

pub mod address;
mod broker_keys;
mod java_only;
mod layers;
mod namesrv_keys;
mod not_yet;
pub mod properties;
mod resolve;
pub mod table;
mod update;
pub mod value;

#[cfg(test)]
mod tests;

pub use broker_keys::{
    BUFFER_BYTES_MAX, BUFFER_BYTES_MIN, BrokerKeys, FRAME_BYTES_MAX, HealthPort, SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN, SHARDS_MAX, SPIN_US_MAX, TOPIC_QUEUES_MAX,
};
pub use layers::{ConfigError, ENVIRONMENT_PREFIX, Layered, Origin, Setting, Sources, closest_key};
pub use namesrv_keys::NamesrvKeys;
pub use resolve::{Host as HostFacts, allowed_cores};
pub use update::{Changed, Persist, UpdateError};

/// Settings of a broker. Values are fields: `config.listen_port`.
pub type Config = Layered<BrokerKeys>;

/// Settings of a name server.
pub type NamesrvConfig = Layered<NamesrvKeys>;
