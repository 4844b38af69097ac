//! Owns the pre-encoded send request of one queue: per message only digits are overwritten.
//!
//! Invariant: the fields that change (opaque, born time, message key, stamp) have a fixed width and
//! a known place, and the frame's length never changes.

use wire::codes::request;
use wire::frame::{LENGTH_BYTES, PREFIX_BYTES, Serialization};
use wire::header::{ExtValue, encode_request};

use crate::error::BenchError;
use crate::stamp::{STAMP_BYTES, Stamp};

/// Stand-ins that the encoder writes and that are then looked for; each occurs once.
const OPAQUE: i32 = 1_987_654_321;
const BORN_MS: i64 = 1_876_543_219_876;
const KEY: &str = "FEDCBA9876543210FEDCBA9876543211";
const KEY_HALF_BYTES: usize = 16;
/// Offset of the opaque in a frame with a binary header.
const BINARY_OPAQUE_AT: usize = PREFIX_BYTES + 5;

/// Where a frame's opaque is.
#[derive(Clone, Copy, Debug)]
enum OpaqueAt {
    Digits(usize),
    Bytes(usize),
}

/// What is different in every message.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Ten digits.
    pub opaque: u32,
    /// When the message is made, milliseconds since 1970.
    pub born_ms: u64,
    /// Which message it is.
    pub stamp: Stamp,
}

/// A send request for one queue of one broker.
#[derive(Clone, Debug)]
pub struct Template {
    head: Vec<u8>,
    opaque_at: OpaqueAt,
    born_at: usize,
    key_at: usize,
}

impl Template {
    /// Encodes the request once.
    pub fn new(
        serialization: Serialization,
        topic: &str,
        queue_id: i32,
        body_bytes: usize,
    ) -> Result<Self, BenchError> {
        let properties = format!("UNIQ_KEY\u{1}{KEY}\u{2}WAIT\u{1}true\u{2}");
        let ext = [
            ("a", ExtValue::Str("bench-producer")),
            ("b", ExtValue::Str(topic)),
            ("c", ExtValue::Str("TBW102")),
            ("d", ExtValue::Int(4)),
            ("e", ExtValue::Int(queue_id.into())),
            ("f", ExtValue::Int(0)),
            ("g", ExtValue::Int(BORN_MS)),
            ("h", ExtValue::Int(0)),
            ("i", ExtValue::Str(&properties)),
            ("j", ExtValue::Int(0)),
            ("k", ExtValue::Bool(false)),
            ("m", ExtValue::Bool(false)),
        ];
        let mut head = Vec::new();
        let code = request::SEND_MESSAGE_V2;
        encode_request(&mut head, serialization, code, OPAQUE, false, &ext, &[]);
        let total = u32::try_from(head.len() + body_bytes - LENGTH_BYTES).unwrap_or(u32::MAX);
        write_at(&mut head, 0, &total.to_be_bytes());
        let opaque_at = match serialization {
            Serialization::Json => OpaqueAt::Digits(find(&head, OPAQUE.to_string().as_bytes())?),
            Serialization::Binary => OpaqueAt::Bytes(BINARY_OPAQUE_AT),
        };
        let born_at = find(&head, BORN_MS.to_string().as_bytes())?;
        let key_at = find(&head, KEY.as_bytes())?;
        Ok(Self {
            head,
            opaque_at,
            born_at,
            key_at,
        })
    }

    /// Appends the frame of one message.
    pub fn append(&self, out: &mut Vec<u8>, variable: Variable, body: &[u8]) {
        let start = out.len();
        out.extend_from_slice(&self.head);
        let body_at = out.len();
        out.extend_from_slice(body);
        match self.opaque_at {
            OpaqueAt::Digits(at) => {
                write_at(out, start + at, &digits::<10>(variable.opaque.into()));
            }
            OpaqueAt::Bytes(at) => write_at(out, start + at, &variable.opaque.to_be_bytes()),
        }
        write_at(out, start + self.born_at, &digits::<13>(variable.born_ms));
        let key_at = start + self.key_at;
        write_at(out, key_at, &hex(variable.stamp.run));
        write_at(out, key_at + KEY_HALF_BYTES, &hex(variable.stamp.sequence));
        debug_assert!(body.len() >= STAMP_BYTES);
        write_at(out, body_at, &variable.stamp.bytes());
    }
}

fn write_at(out: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = out.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Result<usize, BenchError> {
    let mut places = text
        .windows(wanted.len())
        .enumerate()
        .filter(|(_, part)| *part == wanted);
    match (places.next(), places.next()) {
        (Some((at, _)), None) => Ok(at),
        _ => Err(BenchError::Option(format!(
            "the topic's name contains {}, which this program needs as a stand-in",
            String::from_utf8_lossy(wanted)
        ))),
    }
}

fn digits<const N: usize>(mut value: u64) -> [u8; N] {
    let mut text = [b'0'; N];
    for place in text.iter_mut().rev() {
        *place = b'0' + (value % 10) as u8;
        value /= 10;
    }
    text
}

fn hex(mut value: u64) -> [u8; KEY_HALF_BYTES] {
    let mut text = [b'0'; KEY_HALF_BYTES];
    for place in text.iter_mut().rev() {
        let nibble = (value & 0xF) as u8;
        *place = if nibble < 10 {
            b'0' + nibble
        } else {
            b'A' + nibble - 10
        };
        value >>= 4;
    }
    text
}

#[cfg(test)]
mod tests {
    use wire::frame::{FRAME_BYTES_MAX, split};
    use wire::header::decode;
    use wire::requests::SendRequest;

    use super::*;
    use crate::stamp;

    #[test]
    fn a_patched_frame_is_the_frame_the_encoder_would_have_written() {
        for serialization in [Serialization::Json, Serialization::Binary] {
            let body = stamp::body(9, 64);
            let template = Template::new(serialization, "T", 13, body.len()).unwrap();
            let stamp = Stamp {
                run: 0xABC,
                sequence: 255,
            };
            let variable = Variable {
                opaque: 1_000_000_042,
                born_ms: 1_700_000_000_000,
                stamp,
            };
            let mut out = Vec::new();
            template.append(&mut out, variable, &body);
            template.append(&mut out, variable, &body);
            let (frame, consumed) = split(&out, FRAME_BYTES_MAX).unwrap().unwrap();
            assert_eq!(consumed * 2, out.len());
            let header = decode(&frame).unwrap();
            assert_eq!((header.code, header.opaque), (310, 1_000_000_042));
            let send = SendRequest::decode_short(&header.ext).unwrap();
            assert_eq!(
                (send.queue_id, send.born_timestamp),
                (13, 1_700_000_000_000)
            );
            let properties = send.properties.unwrap().to_string();
            assert!(properties.contains("UNIQ_KEY\u{1}0000000000000ABC00000000000000FF\u{2}"));
            assert_eq!(Stamp::read(frame.body), Some(stamp));
            assert_eq!(frame.body.len(), 64);
        }
    }
}
