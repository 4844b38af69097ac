//! Owns the JSON bodies of requests and answers, in the dialect other RocketMQ programs speak.
//!
//! Invariant: fields are written in alphabetical order without white space, absent ones left out;
//! integer keys go unquoted and queue keys as objects, see [`to_json`]. Reading accepts that
//! dialect and standard JSON alike.

mod admin;
mod auth;
mod client;
mod config;
mod group;
pub mod lenient;
mod queue;
mod register;
mod route;
mod scalar;
mod topic;
mod writer;

pub use admin::*;
pub use auth::*;
pub use client::*;
pub(crate) use client::{base64_decode, base64_encode};
pub use config::*;
pub use group::*;
pub use queue::*;
pub use register::*;
pub use route::*;
pub use topic::*;

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Largest body that is read.
pub const BODY_BYTES_MAX: usize = crate::frame::FRAME_BYTES_MAX;

/// Why a body cannot be read or written.
#[derive(Error, Debug)]
pub enum BodyError {
    /// The body is larger than the bound.
    #[error("body of {bytes} bytes is larger than the bound of {bytes_max}")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// The body is not JSON in any accepted form.
    #[error("body is malformed at byte {at}: {problem}")]
    Malformed {
        /// Offset in the body.
        at: usize,
        /// What was wrong.
        problem: &'static str,
    },
    /// The body is JSON but not of the expected shape.
    #[error("body is not a {expected}: {source}")]
    Shape {
        /// What was expected.
        expected: &'static str,
        /// What was wrong, and where.
        source: serde_json::Error,
    },
    /// The value cannot be written as JSON.
    #[error("body cannot be written: {0}")]
    Write(serde_json::Error),
    /// The binary registration body ends early or holds a bad length.
    #[error("registration body is malformed at byte {at} in {field}")]
    Registration {
        /// The part that is cut or wrong.
        field: &'static str,
        /// Offset in the inflated body.
        at: usize,
    },
}

/// The last part of a type's name, for error texts.
fn short_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name)
}

/// Reads a body, standard or in the dialect.
pub fn from_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, BodyError> {
    if body.len() > BODY_BYTES_MAX {
        return Err(BodyError::TooLarge {
            bytes: body.len(),
            bytes_max: BODY_BYTES_MAX,
        });
    }
    if let Ok(value) = serde_json::from_slice(body) {
        return Ok(value);
    }
    let standard = lenient::to_standard_json(body)?;
    serde_json::from_slice(&standard).map_err(|source| BodyError::Shape {
        expected: short_name::<T>(),
        source,
    })
}

/// Writes a body in the dialect: integer keys unquoted, queue keys as objects.
pub fn to_json<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, BodyError> {
    writer::write(value, false)
}

/// Writes a body with integer keys quoted. Queue keys are objects still, for no reader accepts
/// anything else.
pub fn to_standard_json<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, BodyError> {
    writer::write(value, true)
}
