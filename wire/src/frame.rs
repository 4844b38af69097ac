//! Owns the frame: a length, a serialize type with the header length, the header, the body.
//!
//! Invariant: a length outside the bound is refused before anybody sizes a buffer by it, and the
//! slices of a [`Frame`] lie inside the input it was split from.

use thiserror::Error;

/// Largest frame in bytes, counting the four bytes of the length itself.
pub const FRAME_BYTES_MAX: usize = 16_777_216;

/// Bytes of the length field.
pub const LENGTH_BYTES: usize = 4;

/// Bytes in front of the header: the length, and the serialize type with the header length.
pub const PREFIX_BYTES: usize = 8;

/// How the header of a frame is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Serialization {
    /// A JSON object (type 0).
    Json,
    /// The binary form named ROCKETMQ (type 1).
    Binary,
}

impl Serialization {
    /// The type byte in front of the header length.
    pub const fn type_byte(self) -> u8 {
        match self {
            Self::Json => 0,
            Self::Binary => 1,
        }
    }
}

/// One frame, cut but not decoded.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// How the header is written.
    pub serialization: Serialization,
    /// The bytes of the header.
    pub header: &'a [u8],
    /// The bytes after the header, possibly none.
    pub body: &'a [u8],
}

/// Why bytes are not a frame. The stream cannot be resynchronised: close the connection.
#[derive(Error, Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameError {
    /// The length is larger than the bound.
    #[error("frame of {bytes} bytes is larger than the bound of {bytes_max}")]
    TooLarge {
        /// Bytes announced, length field included.
        bytes: u64,
        /// The bound in force.
        bytes_max: usize,
    },
    /// The length leaves no room for the header length field.
    #[error("frame length {length} leaves no room for the header length field of 4 bytes")]
    TooShort {
        /// The length announced.
        length: u32,
    },
    /// The header is announced longer than the frame.
    #[error("header of {header_bytes} bytes does not fit a frame length of {length}")]
    HeaderTooLong {
        /// Header length announced.
        header_bytes: usize,
        /// Frame length announced.
        length: u32,
    },
    /// The serialize type is neither JSON nor ROCKETMQ.
    #[error("serialize type {0} is unknown, expected 0 (JSON) or 1 (ROCKETMQ)")]
    UnknownSerialization(u8),
}

/// Bytes the frame at the start of `input` takes in total, once its first four bytes are there.
///
/// The same checks as [`split`] apply as far as the bytes present allow.
pub fn needed(input: &[u8], frame_bytes_max: usize) -> Result<Option<usize>, FrameError> {
    let Some(length_bytes) = input.first_chunk::<LENGTH_BYTES>() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes(*length_bytes);
    if (length as usize) < PREFIX_BYTES - LENGTH_BYTES {
        return Err(FrameError::TooShort { length });
    }
    let bytes = u64::from(length) + LENGTH_BYTES as u64;
    if bytes > frame_bytes_max as u64 {
        return Err(FrameError::TooLarge {
            bytes,
            bytes_max: frame_bytes_max,
        });
    }
    if let Some(prefix) = input.first_chunk::<PREFIX_BYTES>() {
        header_field(prefix, length)?;
    }
    Ok(Some(length as usize + LENGTH_BYTES))
}

/// Reads and checks the serialize type and the header length.
fn header_field(
    prefix: &[u8; PREFIX_BYTES],
    length: u32,
) -> Result<(Serialization, usize), FrameError> {
    let [_, _, _, _, type_byte, high, middle, low] = *prefix;
    let serialization = match type_byte {
        0 => Serialization::Json,
        1 => Serialization::Binary,
        other => return Err(FrameError::UnknownSerialization(other)),
    };
    let header_bytes = u32::from_be_bytes([0, high, middle, low]) as usize;
    if header_bytes > length as usize - (PREFIX_BYTES - LENGTH_BYTES) {
        return Err(FrameError::HeaderTooLong {
            header_bytes,
            length,
        });
    }
    Ok((serialization, header_bytes))
}

/// Cuts the frame at the start of `input`.
///
/// `Ok(None)` means more bytes are needed; `Ok(Some((frame, consumed)))` tells how many bytes the
/// frame took. A bad length is refused before anything could be allocated for it.
pub fn split(
    input: &[u8],
    frame_bytes_max: usize,
) -> Result<Option<(Frame<'_>, usize)>, FrameError> {
    let Some(total_bytes) = needed(input, frame_bytes_max)? else {
        return Ok(None);
    };
    let (Some(prefix), Some(content)) = (
        input.first_chunk::<PREFIX_BYTES>(),
        input.get(PREFIX_BYTES..total_bytes),
    ) else {
        return Ok(None);
    };
    let length = (total_bytes - LENGTH_BYTES) as u32;
    let (serialization, header_bytes) = header_field(prefix, length)?;
    let Some((header, body)) = content.split_at_checked(header_bytes) else {
        return Err(FrameError::HeaderTooLong {
            header_bytes,
            length,
        });
    };
    Ok(Some((
        Frame {
            serialization,
            header,
            body,
        },
        total_bytes,
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_input_asks_for_more() {
        assert_eq!(needed(&[0, 0, 0], FRAME_BYTES_MAX), Ok(None));
        assert_eq!(needed(&[0, 0, 0, 5], FRAME_BYTES_MAX), Ok(Some(9)));
        assert!(
            split(&[0, 0, 0, 5, 0, 0, 0, 1], FRAME_BYTES_MAX)
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn bad_lengths_are_refused_with_four_bytes() {
        for (input, bytes_max) in [
            (vec![0xff, 0xff, 0xff, 0xff], FRAME_BYTES_MAX),
            (vec![0, 0, 0, 3], FRAME_BYTES_MAX),
            (vec![0, 0, 0, 0], FRAME_BYTES_MAX),
            (vec![0, 0xff, 0xff, 0xfd], FRAME_BYTES_MAX),
            (vec![0, 0, 0, 97], 100),
        ] {
            assert!(needed(&input, bytes_max).is_err(), "{input:?}");
            assert!(split(&input, bytes_max).is_err(), "{input:?}");
        }
        assert_eq!(
            needed(&[0, 0xff, 0xff, 0xfc], FRAME_BYTES_MAX),
            Ok(Some(FRAME_BYTES_MAX))
        );
    }

    #[test]
    fn header_longer_than_frame_and_unknown_type_are_refused_early() {
        let error = split(&[0, 0, 0, 6, 0, 0, 0, 3], FRAME_BYTES_MAX).unwrap_err();
        assert_eq!(
            error,
            FrameError::HeaderTooLong {
                header_bytes: 3,
                length: 6
            }
        );
        let error = split(&[0, 0, 0, 6, 2, 0, 0, 1], FRAME_BYTES_MAX).unwrap_err();
        assert_eq!(error, FrameError::UnknownSerialization(2));
    }

    #[test]
    fn a_frame_is_cut_and_the_rest_is_left() {
        let input = [0, 0, 0, 7, 1, 0, 0, 1, b'h', b'b', b'c', 9, 9];
        let (frame, consumed) = split(&input, FRAME_BYTES_MAX).unwrap().unwrap();
        assert_eq!(
            (frame.header, frame.body, consumed),
            (&b"h"[..], &b"bc"[..], 11)
        );
        assert_eq!(frame.serialization, Serialization::Binary);
    }
}
