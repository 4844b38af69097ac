//! Owns what can go wrong in a run, besides the error answers that a run counts.
//!
//! Invariant: the text says what was attempted, where, and what came back.

use thiserror::Error;

/// Why a run cannot go on.
#[derive(Error, Debug)]
pub enum BenchError {
    /// A socket, a file or the poller failed.
    #[error("{operation}: {source}")]
    Io {
        /// What was attempted.
        operation: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The peer answered with an error code.
    #[error("{operation} at {address}: answered code {code}: {remark}")]
    Answer {
        /// What was asked.
        operation: &'static str,
        /// Who was asked.
        address: String,
        /// The response code.
        code: i32,
        /// The peer's words.
        remark: String,
    },
    /// The peer sent something that is not the protocol.
    #[error("{address} sent something unreadable: {problem}")]
    Protocol {
        /// Who.
        address: String,
        /// What.
        problem: String,
    },
    /// An option makes no sense.
    #[error("{0}")]
    Option(String),
}

impl BenchError {
    /// Attaches the operation to an error of the system.
    pub fn io(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }

    /// Attaches the peer to anything unreadable.
    pub fn protocol(address: &str, problem: impl std::fmt::Display) -> Self {
        Self::Protocol {
            address: address.to_owned(),
            problem: problem.to_string(),
        }
    }
}
