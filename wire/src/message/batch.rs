//! Owns the body of a batch: messages of a producer, one after the other.
//!
//! Invariant: reading never leaves the body, and the reader stops at the first error, which names
//! the message and the offset.

use thiserror::Error;

/// Most messages in a batch.
pub const SUB_MESSAGES_MAX: usize = 65_535;

/// Bytes of a sub-message besides its body and properties.
pub const SUB_MESSAGE_FIXED_BYTES: usize = 22;

/// One message of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubMessage<'a> {
    /// Flag of the user.
    pub flag: i32,
    /// Body.
    pub body: &'a [u8],
    /// Properties string.
    pub properties: &'a [u8],
}

/// Why a batch body is malformed.
#[derive(Error, Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchError {
    /// A length is negative, too small or leads past the end.
    #[error(
        "batch message {index} at offset {offset}: {field} length {length} does not fit, \
         {available} bytes are there"
    )]
    Length {
        /// Number of the message, from 0.
        index: usize,
        /// Where the message starts in the body.
        offset: usize,
        /// The part with the bad length.
        field: &'static str,
        /// The length read.
        length: i64,
        /// Bytes it could have been.
        available: usize,
    },
    /// The parts of a message do not add up to its length.
    #[error("batch message {index} at offset {offset}: its parts end {bytes} bytes too early")]
    Leftover {
        /// Number of the message, from 0.
        index: usize,
        /// Where the message starts in the body.
        offset: usize,
        /// Bytes left over.
        bytes: usize,
    },
    /// The batch has too many messages.
    #[error("batch has more than {SUB_MESSAGES_MAX} messages")]
    TooMany,
    /// The properties are too long to be written.
    #[error("batch message properties of {0} bytes are longer than the bound of 32767")]
    PropertiesTooLong(usize),
}

/// Reads the messages of a batch.
pub fn iter(body: &[u8]) -> Iter<'_> {
    Iter {
        body,
        offset: 0,
        index: 0,
        failed: false,
    }
}

/// See [`iter`].
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    body: &'a [u8],
    offset: usize,
    index: usize,
    failed: bool,
}

/// Reads the parts of one sub-message.
struct Parts<'a> {
    rest: &'a [u8],
    index: usize,
    offset: usize,
}

impl<'a> Parts<'a> {
    fn take(&mut self, field: &'static str, length: i64) -> Result<&'a [u8], BatchError> {
        let split = usize::try_from(length)
            .ok()
            .and_then(|n| self.rest.split_at_checked(n));
        let Some((taken, rest)) = split else {
            let (index, offset, available) = (self.index, self.offset, self.rest.len());
            return Err(BatchError::Length {
                index,
                offset,
                field,
                length,
                available,
            });
        };
        self.rest = rest;
        Ok(taken)
    }

    fn i32(&mut self, field: &'static str) -> Result<i32, BatchError> {
        let taken = self.take(field, 4)?;
        Ok(taken
            .first_chunk()
            .map_or(0, |chunk| i32::from_be_bytes(*chunk)))
    }

    fn i16(&mut self, field: &'static str) -> Result<i16, BatchError> {
        let taken = self.take(field, 2)?;
        Ok(taken
            .first_chunk()
            .map_or(0, |chunk| i16::from_be_bytes(*chunk)))
    }
}

impl<'a> Iter<'a> {
    fn read(&mut self) -> Result<SubMessage<'a>, BatchError> {
        let (index, offset) = (self.index, self.offset);
        if index >= SUB_MESSAGES_MAX {
            return Err(BatchError::TooMany);
        }
        let rest = self.body.get(offset..).unwrap_or_default();
        let mut whole = Parts {
            rest,
            index,
            offset,
        };
        let total = whole.i32("message")?;
        let inner = whole.take("message", i64::from(total) - 4).map_err(|_| {
            let (field, length, available) = ("message", i64::from(total), rest.len());
            BatchError::Length {
                index,
                offset,
                field,
                length,
                available,
            }
        })?;
        let mut parts = Parts {
            rest: inner,
            index,
            offset,
        };
        parts.take("magic and checksum", 8)?;
        let flag = parts.i32("flag")?;
        let body_bytes = parts.i32("body")?;
        let body = parts.take("body", i64::from(body_bytes))?;
        let properties_bytes = parts.i16("properties")?;
        let properties = parts.take("properties", i64::from(properties_bytes))?;
        if !parts.rest.is_empty() {
            return Err(BatchError::Leftover {
                index,
                offset,
                bytes: parts.rest.len(),
            });
        }
        self.offset += inner.len() + 4;
        self.index += 1;
        Ok(SubMessage {
            flag,
            body,
            properties,
        })
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = Result<SubMessage<'a>, BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.offset >= self.body.len() {
            return None;
        }
        let message = self.read();
        self.failed = message.is_err();
        Some(message)
    }
}

/// Appends a message to the body of a batch.
pub fn append(out: &mut Vec<u8>, message: &SubMessage<'_>) -> Result<(), BatchError> {
    let Ok(properties_bytes) = i16::try_from(message.properties.len()) else {
        return Err(BatchError::PropertiesTooLong(message.properties.len()));
    };
    let total = SUB_MESSAGE_FIXED_BYTES + message.body.len() + message.properties.len();
    out.extend_from_slice(&(total as u32).to_be_bytes());
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&message.flag.to_be_bytes());
    out.extend_from_slice(&(message.body.len() as u32).to_be_bytes());
    out.extend_from_slice(message.body);
    out.extend_from_slice(&properties_bytes.to_be_bytes());
    out.extend_from_slice(message.properties);
    Ok(())
}
