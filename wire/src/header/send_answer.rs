//! Owns the answer of a successful send, most of which is the same for every message.
//!
//! Invariant: the bytes are those [`encode_reply`](super::encode_reply) would write for the same
//! fields.

use super::encode::{decimal, finish, string};
use super::{FLAG_RESPONSE, LANGUAGE_JAVA, SERVER_VERSION};
use crate::frame::{PREFIX_BYTES, Serialization};

/// What differs between the answers of sends.
#[derive(Clone, Copy, Debug)]
pub struct SendAnswerFields<'a> {
    /// Opaque of the request.
    pub opaque: i32,
    /// Offset ids of the messages, separated by commas.
    pub message_ids: &'a [u8],
    /// Queue id.
    pub queue_id: i32,
    /// Queue offset of the first message.
    pub queue_offset: i64,
    /// Unique key of a single message; left out when empty.
    pub transaction_id: &'a str,
    /// What takes a timed message back; left out when empty.
    pub recall_handle: &'a str,
}

impl SendAnswerFields<'_> {
    /// The fields that not every answer has.
    fn texts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let texts = [
            ("transactionId", self.transaction_id),
            ("recallHandle", self.recall_handle),
        ];
        texts.into_iter().filter(|(_, value)| !value.is_empty())
    }
}

/// The parts of the answer that stay.
#[derive(Clone, Debug)]
pub struct SendAnswer {
    json_head: Vec<u8>,
    binary_ext_head: Vec<u8>,
}

/// A field of a binary header.
fn binary_field(out: &mut Vec<u8>, name: &str, value: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(&(name.len() as i16).to_be_bytes());
    out.extend_from_slice(name.as_bytes());
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    value(out);
    let bytes = (out.len() - at - 4) as u32;
    if let Some(slot) = out.get_mut(at..at + 4) {
        slot.copy_from_slice(&bytes.to_be_bytes());
    }
}

impl SendAnswer {
    /// Prepares the answers of a broker.
    #[must_use]
    pub fn new(region: &str, trace_on: bool) -> Self {
        let trace = if trace_on { "true" } else { "false" };
        let mut json_head = b"{\"code\":0,\"extFields\":{\"MSG_REGION\":".to_vec();
        string(&mut json_head, region);
        json_head.extend_from_slice(b",\"TRACE_ON\":\"");
        json_head.extend_from_slice(trace.as_bytes());
        json_head.extend_from_slice(b"\",\"msgId\":\"");
        let mut binary_ext_head = Vec::new();
        binary_field(&mut binary_ext_head, "MSG_REGION", |out| {
            out.extend_from_slice(region.as_bytes());
        });
        binary_field(&mut binary_ext_head, "TRACE_ON", |out| {
            out.extend_from_slice(trace.as_bytes());
        });
        Self {
            json_head,
            binary_ext_head,
        }
    }

    /// Appends the frame of an answer.
    pub fn encode(
        &self,
        out: &mut Vec<u8>,
        serialization: Serialization,
        fields: &SendAnswerFields<'_>,
    ) {
        let start = out.len();
        out.extend_from_slice(&[0; PREFIX_BYTES]);
        match serialization {
            Serialization::Json => self.json(out, fields),
            Serialization::Binary => self.binary(out, fields),
        }
        let header_bytes = out.len() - start - PREFIX_BYTES;
        finish(out, start, serialization, header_bytes);
    }

    fn json(&self, out: &mut Vec<u8>, fields: &SendAnswerFields<'_>) {
        out.extend_from_slice(&self.json_head);
        out.extend_from_slice(fields.message_ids);
        out.extend_from_slice(b"\",\"queueId\":\"");
        decimal(out, i64::from(fields.queue_id));
        out.extend_from_slice(b"\",\"queueOffset\":\"");
        decimal(out, fields.queue_offset);
        out.push(b'"');
        for (name, value) in fields.texts() {
            out.extend_from_slice(b",\"");
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\":");
            string(out, value);
        }
        out.extend_from_slice(b"},\"flag\":1,\"language\":\"JAVA\",\"opaque\":");
        decimal(out, i64::from(fields.opaque));
        out.extend_from_slice(b",\"serializeTypeCurrentRPC\":\"JSON\",\"version\":");
        decimal(out, i64::from(SERVER_VERSION));
        out.push(b'}');
    }

    fn binary(&self, out: &mut Vec<u8>, fields: &SendAnswerFields<'_>) {
        out.extend_from_slice(&0_i16.to_be_bytes());
        out.push(LANGUAGE_JAVA);
        out.extend_from_slice(&(SERVER_VERSION as i16).to_be_bytes());
        out.extend_from_slice(&fields.opaque.to_be_bytes());
        out.extend_from_slice(&FLAG_RESPONSE.to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        let ext_at = out.len();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.binary_ext_head);
        binary_field(out, "msgId", |out| {
            out.extend_from_slice(fields.message_ids)
        });
        binary_field(out, "queueId", |out| {
            decimal(out, i64::from(fields.queue_id))
        });
        binary_field(out, "queueOffset", |out| decimal(out, fields.queue_offset));
        for (name, value) in fields.texts() {
            binary_field(out, name, |out| out.extend_from_slice(value.as_bytes()));
        }
        let ext_bytes = (out.len() - ext_at - 4) as u32;
        if let Some(slot) = out.get_mut(ext_at..ext_at + 4) {
            slot.copy_from_slice(&ext_bytes.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::{ExtValue, Reply, encode_reply};

    #[test]
    fn prepared_answers_are_those_of_the_general_encoder() {
        for serialization in [Serialization::Json, Serialization::Binary] {
            for (region, (transaction_id, recall_handle), opaque, queue_id, queue_offset) in [
                (
                    "DefaultRegion",
                    ("7F0000010B3A18B4AAC20000000004D2", ""),
                    7,
                    3,
                    0,
                ),
                ("a \"quoted\" region", ("", ""), i32::MIN, 0, i64::MAX),
                (
                    "",
                    ("odd\\key\u{1}é", "djEg=="),
                    i32::MAX,
                    -1,
                    1_234_567_890_123,
                ),
            ] {
                let ids = "7F00000100002A9F00000000000B3A18,7F00000100002A9F00000000000B3B18";
                let ext = [
                    ("MSG_REGION", ExtValue::Str(region)),
                    ("TRACE_ON", ExtValue::Str("true")),
                    ("msgId", ExtValue::Str(ids)),
                    ("queueId", ExtValue::Int(i64::from(queue_id))),
                    ("queueOffset", ExtValue::Int(queue_offset)),
                    ("transactionId", ExtValue::Str(transaction_id)),
                    ("recallHandle", ExtValue::Str(recall_handle)),
                ];
                let texts = [transaction_id, recall_handle];
                let used = ext.len() - texts.iter().filter(|text| text.is_empty()).count();
                let reply = Reply {
                    code: 0,
                    opaque,
                    remark: None,
                    ext: &ext[..used],
                };
                let mut expected = b"before".to_vec();
                encode_reply(&mut expected, serialization, &reply, &[]);
                let fields = SendAnswerFields {
                    opaque,
                    message_ids: ids.as_bytes(),
                    queue_id,
                    queue_offset,
                    transaction_id,
                    recall_handle,
                };
                let mut out = b"before".to_vec();
                SendAnswer::new(region, true).encode(&mut out, serialization, &fields);
                assert_eq!(
                    String::from_utf8_lossy(&out),
                    String::from_utf8_lossy(&expected)
                );
                assert_eq!(out, expected);
            }
        }
    }
}
