//! Owns the command header in both forms: decoding in place and encoding into a buffer.
//!
//! Invariant: decoding is one pass, borrows from the frame and allocates nothing for up to
//! [`EXT_FIELDS_INLINE`] ext fields; anything not understood is an error, never a panic.

mod binary;
mod encode;
mod ext;
mod json;
mod quick;
mod send_answer;
mod text;

pub(crate) use encode::string as encode_json_string;
pub use encode::{
    ExtValue, Reply, SERVER_VERSION, encode_reply, encode_reply_with, encode_request,
    encode_request_as,
};
pub(crate) use ext::{EXPECTED_I32, EXPECTED_I64, parse_bool, parse_i32, parse_i64};
pub use ext::{EXT_FIELDS_INLINE, EXT_FIELDS_MAX, Ext, FieldError};
pub use send_answer::{SendAnswer, SendAnswerFields};
pub use text::Text;

use thiserror::Error;

use crate::frame::{Frame, Serialization};

/// Flag bit of a response.
pub const FLAG_RESPONSE: i32 = 1;

/// Flag bit of a request that must not be answered.
pub const FLAG_ONEWAY: i32 = 2;

/// Language names in the order of their codes.
const LANGUAGES: [&str; 14] = [
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP",
    "OMS", "RUST", "NODE_JS",
];

/// Language code of Java, which every answer carries because every client knows it.
pub const LANGUAGE_JAVA: u8 = 0;
/// Language code of C++.
pub const LANGUAGE_CPP: u8 = 1;
/// Language code for languages without a code.
pub const LANGUAGE_OTHER: u8 = 7;
/// Language code of Go.
pub const LANGUAGE_GO: u8 = 9;
/// Language code of Rust.
pub const LANGUAGE_RUST: u8 = 12;

/// The name of a language code; unknown codes are `OTHER`.
pub fn language_name(code: u8) -> &'static str {
    LANGUAGES.get(usize::from(code)).copied().unwrap_or("OTHER")
}

/// The code of a language name; unknown names are [`LANGUAGE_OTHER`].
pub fn language_code(name: &str) -> u8 {
    let position = LANGUAGES.iter().position(|known| *known == name);
    position
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(LANGUAGE_OTHER)
}

/// A decoded header, borrowing from its frame.
#[derive(Clone, Debug)]
pub struct Header<'a> {
    /// Request or response code.
    pub code: i32,
    /// Language code of the sender.
    pub language: u8,
    /// Version ordinal of the sender.
    pub version: i32,
    /// Correlation id chosen by the requester.
    pub opaque: i32,
    /// Flag bits, see [`FLAG_RESPONSE`] and [`FLAG_ONEWAY`].
    pub flag: i32,
    /// Text of an error answer.
    pub remark: Option<Text<'a>>,
    /// How the header was written, which is how the answer is written.
    pub serialization: Serialization,
    /// The named fields.
    pub ext: Ext<'a>,
}

impl Header<'_> {
    /// Whether this is the answer to a request.
    pub fn is_response(&self) -> bool {
        self.flag & FLAG_RESPONSE != 0
    }

    /// Whether this request must not be answered.
    pub fn is_oneway(&self) -> bool {
        self.flag & FLAG_ONEWAY != 0
    }
}

/// Why a header could not be decoded.
#[derive(Error, Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeaderError {
    /// The header, or a string of a binary header, is not UTF-8.
    #[error("header is not UTF-8 from byte {at}")]
    NotUtf8 {
        /// Offset of the first bad byte.
        at: usize,
    },
    /// The JSON text is malformed.
    #[error("JSON header is malformed at byte {at}: {problem}")]
    Json {
        /// Offset in the header.
        at: usize,
        /// What was wrong.
        problem: &'static str,
    },
    /// A top-level field has a value of another kind.
    #[error("header field {field} is not {expected}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// There is no code.
    #[error("header has no code")]
    NoCode,
    /// The binary header ends early.
    #[error("binary header ends inside {field} at byte {at}")]
    Truncated {
        /// The part that is cut.
        field: &'static str,
        /// Offset in the header.
        at: usize,
    },
    /// A length of the binary header is negative.
    #[error("binary header has length {length} for {field} at byte {at}")]
    Length {
        /// The part with the bad length.
        field: &'static str,
        /// The length read.
        length: i32,
        /// Offset in the header.
        at: usize,
    },
    /// Bytes follow the end of the binary header.
    #[error("binary header ends at byte {at} but has {bytes} more bytes")]
    Trailing {
        /// Where it ends.
        at: usize,
        /// How many bytes follow.
        bytes: usize,
    },
    /// More ext fields than [`EXT_FIELDS_MAX`].
    #[error("header has more than {EXT_FIELDS_MAX} ext fields")]
    TooManyFields,
}

/// Decodes the header of a frame in one pass, borrowing from it.
pub fn decode<'a>(frame: &Frame<'a>) -> Result<Header<'a>, HeaderError> {
    match frame.serialization {
        Serialization::Json => json::decode(frame.header),
        Serialization::Binary => binary::decode(frame.header),
    }
}
