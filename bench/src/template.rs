//! Owns the bytes of a send request: encoded once, patched for each message.
//!
//! Invariant: the fields that change (opaque, born time, message keys, stamps) have a fixed width
//! and a known place, and the frame's length never changes.

use wire::codes::request;
use wire::frame::{LENGTH_BYTES, PREFIX_BYTES, Serialization};
use wire::header::{ExtValue, encode_request};
use wire::message::batch::{self, SubMessage};

use crate::error::BenchError;
use crate::plan::{Plan, SendMode};
use crate::stamp::{self, Stamp};

/// Stand-ins that the encoder writes and that are then looked for; each occurs once.
const OPAQUE: i32 = 1_987_654_321;
const BORN_MS: i64 = 1_876_543_219_876;
const UNIQUE: &str = "FEDCBA9876543210FEDCBA9876543211";
const KEY: &str = "FEDCBA9876543210FEDCBA9876543212";
const KEY_HALF_BYTES: usize = 16;
/// Offset of the opaque in a frame with a binary header.
const BINARY_OPAQUE_AT: usize = PREFIX_BYTES + 5;

/// Where a frame's opaque is.
#[derive(Clone, Copy, Debug)]
enum OpaqueAt {
    Digits(usize),
    Bytes(usize),
}

/// What is different in every request.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Ten digits.
    pub opaque: u32,
    /// When the message is made, milliseconds since 1970.
    pub born_ms: u64,
    /// Which message it is; of a batch the first.
    pub stamp: Stamp,
}

/// The bodies of a run: one, or those of a batch; the same for every queue.
#[derive(Clone, Debug)]
pub struct Body {
    bytes: Vec<u8>,
    /// Where the stamp and the keys of each message are.
    messages: Vec<(usize, Vec<usize>)>,
}

impl Body {
    /// For a plan's messages of one run.
    pub fn new(plan: &Plan, run: u64) -> Result<Self, BenchError> {
        let body = stamp::body(run, plan.body_bytes);
        if plan.mode != SendMode::Batch {
            return Ok(Self {
                bytes: body,
                messages: vec![(0, Vec::new())],
            });
        }
        let properties = properties(plan);
        let (mut bytes, mut messages) = (Vec::new(), Vec::new());
        for _ in 0..plan.batch {
            let start = bytes.len();
            let message = SubMessage {
                flag: 0,
                body: &body,
                properties: properties.as_bytes(),
            };
            batch::append(&mut bytes, &message)
                .map_err(|error| BenchError::Option(format!("properties: {error}")))?;
            let part = bytes.get(start..).unwrap_or_default();
            let properties_at = start + part.len() - properties.len();
            let keys = keys_in(properties.as_bytes())?;
            let keys = keys.into_iter().map(|at| properties_at + at).collect();
            // The body stands between the fixed fields and the properties with their length.
            messages.push((properties_at - 2 - body.len(), keys));
        }
        Ok(Self { bytes, messages })
    }

    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Messages in it.
    pub fn messages(&self) -> u32 {
        self.messages.len() as u32
    }
}

/// A send request for one queue of one broker.
#[derive(Clone, Debug)]
pub struct Template {
    head: Vec<u8>,
    opaque_at: OpaqueAt,
    born_at: usize,
    keys_at: Vec<usize>,
}

fn properties(plan: &Plan) -> String {
    let mut text = format!("UNIQ_KEY\u{1}{UNIQUE}\u{2}WAIT\u{1}true\u{2}");
    let mut add = |name: &str, value: &str| text.push_str(&format!("{name}\u{1}{value}\u{2}"));
    if plan.keys {
        add("KEYS", KEY);
    }
    if !plan.tag.is_empty() {
        add("TAGS", &plan.tag);
    }
    for (name, value) in &plan.properties {
        add(name, value);
    }
    text
}

/// Where keys are to be patched in.
fn keys_in(text: &[u8]) -> Result<Vec<usize>, BenchError> {
    let mut found = vec![find(text, UNIQUE.as_bytes())?];
    if text.windows(KEY.len()).any(|part| part == KEY.as_bytes()) {
        found.push(find(text, KEY.as_bytes())?);
    }
    Ok(found)
}

impl Template {
    /// Encodes the request once.
    pub fn new(plan: &Plan, topic: &str, queue_id: i32, body: &Body) -> Result<Self, BenchError> {
        let serialization = plan.headers.serialization();
        let is_batch = plan.mode == SendMode::Batch;
        let properties = if is_batch {
            String::new()
        } else {
            properties(plan)
        };
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
            ("m", ExtValue::Bool(is_batch)),
        ];
        let code = if is_batch {
            request::SEND_BATCH_MESSAGE
        } else {
            request::SEND_MESSAGE_V2
        };
        let oneway = plan.mode == SendMode::OneWay;
        let mut head = Vec::new();
        encode_request(&mut head, serialization, code, OPAQUE, oneway, &ext, &[]);
        let total = u32::try_from(head.len() + body.len() - LENGTH_BYTES).unwrap_or(u32::MAX);
        write_at(&mut head, 0, &total.to_be_bytes());
        let opaque_at = match serialization {
            Serialization::Json => OpaqueAt::Digits(find(&head, OPAQUE.to_string().as_bytes())?),
            Serialization::Binary => OpaqueAt::Bytes(BINARY_OPAQUE_AT),
        };
        let born_at = find(&head, BORN_MS.to_string().as_bytes())?;
        let keys_at = if is_batch {
            Vec::new()
        } else {
            keys_in(&head)?
        };
        Ok(Self {
            head,
            opaque_at,
            born_at,
            keys_at,
        })
    }

    /// Appends the frame of one request.
    pub fn append(&self, out: &mut Vec<u8>, variable: Variable, body: &Body) {
        let start = out.len();
        out.extend_from_slice(&self.head);
        let body_at = out.len();
        out.extend_from_slice(&body.bytes);
        match self.opaque_at {
            OpaqueAt::Digits(at) => {
                write_at(out, start + at, &digits::<10>(variable.opaque.into()));
            }
            OpaqueAt::Bytes(at) => write_at(out, start + at, &variable.opaque.to_be_bytes()),
        }
        write_at(out, start + self.born_at, &digits::<13>(variable.born_ms));
        let mut stamp = variable.stamp;
        for at in &self.keys_at {
            write_key(out, start + at, stamp);
        }
        for (stamp_at, keys_at) in &body.messages {
            write_at(out, body_at + stamp_at, &stamp.bytes());
            for at in keys_at {
                write_key(out, body_at + at, stamp);
            }
            stamp.sequence += 1;
        }
    }
}

fn write_key(out: &mut [u8], at: usize, stamp: Stamp) {
    write_at(out, at, &hex(stamp.run));
    write_at(out, at + KEY_HALF_BYTES, &hex(stamp.sequence));
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
            "topic or properties contain {}, which this program needs as a stand-in",
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
    use crate::plan::HeaderForm;

    const STAMP: Stamp = Stamp {
        run: 0xABC,
        sequence: 255,
        born_ns: 1_234_567,
    };
    const VARIABLE: Variable = Variable {
        opaque: 1_000_000_042,
        born_ms: 1_700_000_000_000,
        stamp: STAMP,
    };

    fn plan(headers: HeaderForm, mode: SendMode) -> Plan {
        Plan {
            headers,
            mode,
            body_bytes: 64,
            batch: 3,
            keys: true,
            tag: "red".to_owned(),
            properties: [("colour".to_owned(), "blue".to_owned())].into(),
            ..Plan::default()
        }
    }

    fn twice(plan: &Plan) -> Vec<u8> {
        let body = Body::new(plan, STAMP.run).unwrap();
        let template = Template::new(plan, "T", 13, &body).unwrap();
        let mut out = Vec::new();
        template.append(&mut out, VARIABLE, &body);
        template.append(&mut out, VARIABLE, &body);
        out
    }

    #[test]
    fn a_patched_frame_is_the_frame_the_encoder_would_have_written() {
        for headers in [HeaderForm::Json, HeaderForm::Binary] {
            let out = twice(&plan(headers, SendMode::Async));
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
            for part in [
                "UNIQ_KEY\u{1}0000000000000ABC00000000000000FF\u{2}",
                "KEYS\u{1}0000000000000ABC00000000000000FF\u{2}",
                "TAGS\u{1}red\u{2}",
                "colour\u{1}blue\u{2}",
            ] {
                assert!(properties.contains(part), "{part} in {properties}");
            }
            assert_eq!(Stamp::read(frame.body), Some(STAMP));
            assert_eq!(frame.body.len(), 64);
        }
    }

    #[test]
    fn every_message_of_a_batch_has_its_own_number_and_keys() {
        let out = twice(&plan(HeaderForm::Json, SendMode::Batch));
        let (frame, consumed) = split(&out, FRAME_BYTES_MAX).unwrap().unwrap();
        assert_eq!(consumed * 2, out.len());
        assert_eq!(decode(&frame).unwrap().code, 320);
        let messages: Vec<_> = batch::iter(frame.body).map(Result::unwrap).collect();
        assert_eq!(messages.len(), 3);
        for (number, message) in messages.iter().enumerate() {
            let stamp = Stamp::read(message.body).unwrap();
            assert_eq!(stamp.sequence, 255 + number as u64);
            let key = format!("KEYS\u{1}0000000000000ABC{:016X}\u{2}", stamp.sequence);
            let properties = String::from_utf8_lossy(message.properties);
            assert!(properties.contains(&key), "{properties}");
        }
    }

    #[test]
    fn a_one_way_send_says_so() {
        let out = twice(&plan(HeaderForm::Binary, SendMode::OneWay));
        let (frame, _) = split(&out, FRAME_BYTES_MAX).unwrap().unwrap();
        assert!(decode(&frame).unwrap().is_oneway());
    }
}
