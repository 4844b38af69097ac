//! Owns encoding of frames: the header in either form, the body behind it, lengths patched last.
//!
//! Invariant: nothing is allocated besides the growth of the output, and what was in the output
//! before stays untouched.

use super::{FLAG_ONEWAY, FLAG_RESPONSE, LANGUAGE_JAVA, language_name};
use crate::frame::{LENGTH_BYTES, PREFIX_BYTES, Serialization};
use crate::scan::to_be_escaped;

/// Version ordinal in every answer. SQL92 subscriptions need at least 232 there.
pub const SERVER_VERSION: i32 = 479;

/// The value of an ext field to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExtValue<'a> {
    /// Text.
    Str(&'a str),
    /// A number, written as decimal text.
    Int(i64),
    /// A boolean, written as `true` or `false`.
    Bool(bool),
}

/// The header of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    /// Response code.
    pub code: i32,
    /// Opaque of the request.
    pub opaque: i32,
    /// Text of an error.
    pub remark: Option<&'a str>,
    /// The named fields.
    pub ext: &'a [(&'a str, ExtValue<'a>)],
}

/// Everything a header holds.
struct Parts<'a> {
    code: i32,
    language: u8,
    version: i32,
    opaque: i32,
    flag: i32,
    remark: Option<&'a str>,
    ext: &'a [(&'a str, ExtValue<'a>)],
}

/// Appends the frame of an answer.
pub fn encode_reply(
    out: &mut Vec<u8>,
    serialization: Serialization,
    reply: &Reply<'_>,
    body: &[u8],
) {
    encode_reply_with(out, serialization, reply, |out| out.extend_from_slice(body));
}

/// Appends the frame of an answer whose body the closure writes straight into the output.
///
/// The closure may only append.
pub fn encode_reply_with(
    out: &mut Vec<u8>,
    serialization: Serialization,
    reply: &Reply<'_>,
    body: impl FnOnce(&mut Vec<u8>),
) {
    let parts = Parts {
        code: reply.code,
        language: LANGUAGE_JAVA,
        version: SERVER_VERSION,
        opaque: reply.opaque,
        flag: FLAG_RESPONSE,
        remark: reply.remark,
        ext: reply.ext,
    };
    encode(out, serialization, &parts, body);
}

/// Appends the frame of a request, as language Java and version [`SERVER_VERSION`].
pub fn encode_request(
    out: &mut Vec<u8>,
    serialization: Serialization,
    code: i32,
    opaque: i32,
    oneway: bool,
    ext: &[(&str, ExtValue<'_>)],
    body: &[u8],
) {
    let flag = if oneway { FLAG_ONEWAY } else { 0 };
    let (language, version) = (LANGUAGE_JAVA, SERVER_VERSION);
    encode_request_as(
        out,
        serialization,
        code,
        opaque,
        flag,
        language,
        version,
        ext,
        body,
    );
}

/// Appends the frame of a request with every header field chosen by the caller.
#[expect(
    clippy::too_many_arguments,
    reason = "one argument per header field of the protocol"
)]
pub fn encode_request_as(
    out: &mut Vec<u8>,
    serialization: Serialization,
    code: i32,
    opaque: i32,
    flag: i32,
    language: u8,
    version: i32,
    ext: &[(&str, ExtValue<'_>)],
    body: &[u8],
) {
    let parts = Parts {
        code,
        language,
        version,
        opaque,
        flag,
        remark: None,
        ext,
    };
    encode(out, serialization, &parts, |out| {
        out.extend_from_slice(body)
    });
}

fn encode(
    out: &mut Vec<u8>,
    serialization: Serialization,
    parts: &Parts<'_>,
    body: impl FnOnce(&mut Vec<u8>),
) {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX_BYTES]);
    match serialization {
        Serialization::Json => json(out, parts),
        Serialization::Binary => binary(out, parts),
    }
    let header_bytes = out.len() - start - PREFIX_BYTES;
    body(out);
    finish(out, start, serialization, header_bytes);
}

/// Fills in the lengths of the frame that begins at `start` and ends here.
pub(super) fn finish(
    out: &mut [u8],
    start: usize,
    serialization: Serialization,
    header_bytes: usize,
) {
    debug_assert!(header_bytes < 1 << 24, "header length takes three bytes");
    let header_bytes = header_bytes as u32;
    let length = (out.len() - start - LENGTH_BYTES) as u32;
    let header_field = u32::from(serialization.type_byte()) << 24 | header_bytes & 0x00FF_FFFF;
    patch(out, start, &length.to_be_bytes());
    patch(out, start + LENGTH_BYTES, &header_field.to_be_bytes());
}

/// Overwrites bytes reserved before.
fn patch(out: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(slot) = out.get_mut(at..at + bytes.len()) {
        slot.copy_from_slice(bytes);
    }
}

fn json(out: &mut Vec<u8>, parts: &Parts<'_>) {
    out.extend_from_slice(b"{\"code\":");
    decimal(out, i64::from(parts.code));
    if !parts.ext.is_empty() {
        out.extend_from_slice(b",\"extFields\":{");
        for (index, (name, value)) in parts.ext.iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            string(out, name);
            out.push(b':');
            match value {
                ExtValue::Str(text) => string(out, text),
                other => {
                    out.push(b'"');
                    plain_value(out, other);
                    out.push(b'"');
                }
            }
        }
        out.push(b'}');
    }
    out.extend_from_slice(b",\"flag\":");
    decimal(out, i64::from(parts.flag));
    out.extend_from_slice(b",\"language\":\"");
    out.extend_from_slice(language_name(parts.language).as_bytes());
    out.extend_from_slice(b"\",\"opaque\":");
    decimal(out, i64::from(parts.opaque));
    if let Some(remark) = parts.remark {
        out.extend_from_slice(b",\"remark\":");
        string(out, remark);
    }
    out.extend_from_slice(b",\"serializeTypeCurrentRPC\":\"JSON\",\"version\":");
    decimal(out, i64::from(parts.version));
    out.push(b'}');
}

fn binary(out: &mut Vec<u8>, parts: &Parts<'_>) {
    out.extend_from_slice(&(parts.code as i16).to_be_bytes());
    out.push(parts.language);
    out.extend_from_slice(&(parts.version as i16).to_be_bytes());
    out.extend_from_slice(&parts.opaque.to_be_bytes());
    out.extend_from_slice(&parts.flag.to_be_bytes());
    let remark = parts.remark.unwrap_or_default();
    out.extend_from_slice(&(remark.len() as u32).to_be_bytes());
    out.extend_from_slice(remark.as_bytes());
    let ext_at = out.len();
    out.extend_from_slice(&[0; 4]);
    for (name, value) in parts.ext {
        let Ok(name_bytes) = i16::try_from(name.len()) else {
            debug_assert!(false, "ext field names are short");
            continue;
        };
        out.extend_from_slice(&name_bytes.to_be_bytes());
        out.extend_from_slice(name.as_bytes());
        let value_at = out.len();
        out.extend_from_slice(&[0; 4]);
        plain_value(out, value);
        let value_bytes = (out.len() - value_at - 4) as u32;
        patch(out, value_at, &value_bytes.to_be_bytes());
    }
    let ext_bytes = (out.len() - ext_at - 4) as u32;
    patch(out, ext_at, &ext_bytes.to_be_bytes());
}

fn plain_value(out: &mut Vec<u8>, value: &ExtValue<'_>) {
    match value {
        ExtValue::Str(text) => out.extend_from_slice(text.as_bytes()),
        ExtValue::Int(number) => decimal(out, *number),
        ExtValue::Bool(true) => out.extend_from_slice(b"true"),
        ExtValue::Bool(false) => out.extend_from_slice(b"false"),
    }
}

/// Appends a number as decimal text.
pub(super) fn decimal(out: &mut Vec<u8>, number: i64) {
    let mut digits = [0u8; 20];
    let mut rest = number.unsigned_abs();
    let mut used = 0;
    for slot in digits.iter_mut().rev() {
        *slot = b'0' + (rest % 10) as u8;
        rest /= 10;
        used += 1;
        if rest == 0 {
            break;
        }
    }
    if number < 0 {
        out.push(b'-');
    }
    out.extend_from_slice(digits.get(digits.len() - used..).unwrap_or_default());
}

/// Appends a JSON string with its quotes.
pub(crate) fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let mut rest = text.as_bytes();
    while let Some(hop) = to_be_escaped(rest) {
        let (plain, tail) = rest.split_at(hop);
        out.extend_from_slice(plain);
        if let Some((&byte, after)) = tail.split_first() {
            escape(out, byte);
            rest = after;
        }
    }
    out.extend_from_slice(rest);
    out.push(b'"');
}

fn escape(out: &mut Vec<u8>, byte: u8) {
    let short = match byte {
        b'"' => b'"',
        b'\\' => b'\\',
        0x08 => b'b',
        0x0C => b'f',
        b'\n' => b'n',
        b'\r' => b'r',
        b'\t' => b't',
        _ => {
            let digit = |nibble: u8| {
                if nibble < 10 {
                    b'0' + nibble
                } else {
                    b'A' + nibble - 10
                }
            };
            out.extend_from_slice(b"\\u00");
            out.push(digit(byte >> 4));
            out.push(digit(byte & 0xF));
            return;
        }
    };
    out.push(b'\\');
    out.push(short);
}
