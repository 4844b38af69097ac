//! Owns SQL92 filters: expressions over the properties of a message, compiled once and asked for
//! each message.
//!
//! Invariant: [`Filter::matches`] agrees with RocketMQ's own evaluation, allocates nothing, always
//! ends and never panics, whatever the properties are. What RocketMQ reads of an expression is read
//! here alike, with three differences, all of them where RocketMQ does something nobody means: text
//! behind a complete expression is refused and not passed over in silence, 0.0 is a number, and a
//! line comment may end the expression.

mod grammar;
mod program;
#[cfg(test)]
mod tests;
mod tokens;

use std::sync::Arc;

pub use program::DEPTH_MAX;

/// Expression type of a SQL92 filter, as clients write it.
pub const SQL92: &str = "SQL92";
/// Longest expression in bytes.
pub const EXPRESSION_BYTES_MAX: usize = 64 * 1024;

/// Why an expression cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the SQL92 expression is wrong at line {line}, column {column}: {reason}")]
pub struct FilterError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What is wrong there.
    pub reason: String,
}

impl FilterError {
    fn new(expression: &str, at: usize, reason: &str) -> Self {
        let before = expression.get(..at).unwrap_or(expression);
        let line_begin = before.rfind('\n').map_or(0, |newline| newline + 1);
        let in_line = before.get(line_begin..).unwrap_or_default();
        Self {
            line: before.matches('\n').count() + 1,
            column: in_line.chars().count() + 1,
            reason: reason.to_owned(),
        }
    }
}

/// A compiled expression; copies are cheap.
#[derive(Clone, Debug, PartialEq)]
pub struct Filter {
    program: Arc<program::Program>,
}

impl Filter {
    /// Compiles an expression.
    pub fn compile(expression: &str) -> Result<Self, FilterError> {
        if expression.len() > EXPRESSION_BYTES_MAX {
            let bytes = expression.len();
            let reason = format!("it has {bytes} bytes, at most {EXPRESSION_BYTES_MAX}");
            return Err(FilterError::new(expression, 0, &reason));
        }
        let program = tokens::split(expression).and_then(|tokens| grammar::parse(&tokens));
        match program {
            Ok(program) => Ok(Self {
                program: Arc::new(program),
            }),
            Err(trouble) => Err(FilterError::new(expression, trouble.at, &trouble.reason)),
        }
    }

    /// Whether a message with these properties (as stored) is wanted. What cannot be evaluated,
    /// such as a text compared with a number it is not, is not wanted.
    #[must_use]
    pub fn matches(&self, properties: &[u8]) -> bool {
        self.program.matches(properties)
    }

    /// Whether a stored record is wanted; one that cannot be read is not.
    #[must_use]
    pub fn matches_record(&self, record: &[u8]) -> bool {
        super::RecordView::parse(record).is_ok_and(|view| self.matches(view.properties()))
    }
}
