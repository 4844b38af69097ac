//! Owns decoding of the binary (ROCKETMQ) header.
//!
//! Invariant: every length is compared with the bytes left before it is used.

use super::{Ext, Header, HeaderError, Text};
use crate::frame::Serialization;
use crate::scan::Span;

/// A position in the header.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], HeaderError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some(array) = rest.first_chunk::<N>() else {
            return Err(HeaderError::Truncated { field, at: self.at });
        };
        self.at += N;
        Ok(*array)
    }

    fn i16(&mut self, field: &'static str) -> Result<i16, HeaderError> {
        self.array(field).map(i16::from_be_bytes)
    }

    fn i32(&mut self, field: &'static str) -> Result<i32, HeaderError> {
        self.array(field).map(i32::from_be_bytes)
    }

    /// A string of a length already read.
    fn text(&mut self, length: i32, field: &'static str) -> Result<(Span, &'a str), HeaderError> {
        let at = self.at;
        let Ok(bytes) = usize::try_from(length) else {
            return Err(HeaderError::Length { field, length, at });
        };
        let Some(raw) = self.bytes.get(at..).and_then(|rest| rest.get(..bytes)) else {
            return Err(HeaderError::Truncated { field, at });
        };
        let text = match std::str::from_utf8(raw) {
            Ok(text) => text,
            Err(error) => {
                return Err(HeaderError::NotUtf8 {
                    at: at + error.valid_up_to(),
                });
            }
        };
        self.at += bytes;
        Ok((
            Span {
                at,
                bytes,
                escaped: false,
            },
            text,
        ))
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<Header<'_>, HeaderError> {
    let mut cursor = Cursor { bytes, at: 0 };
    let code = i32::from(cursor.i16("code")?);
    let [language] = cursor.array("language")?;
    let version = i32::from(cursor.i16("version")?);
    let opaque = cursor.i32("opaque")?;
    let flag = cursor.i32("flag")?;
    let remark_length = cursor.i32("remark length")?;
    let (_, remark) = cursor.text(remark_length, "remark")?;
    let remark = if remark.is_empty() {
        None
    } else {
        Some(Text::plain(remark))
    };
    let mut ext = Ext::of_bytes(bytes);
    let ext_length = cursor.i32("extFields length")?;
    let ext_end = match usize::try_from(ext_length) {
        Ok(ext_bytes) => cursor.at.saturating_add(ext_bytes),
        Err(_) => {
            let (field, length, at) = ("extFields", ext_length, cursor.at);
            return Err(HeaderError::Length { field, length, at });
        }
    };
    if ext_end > bytes.len() {
        return Err(HeaderError::Truncated {
            field: "extFields",
            at: cursor.at,
        });
    }
    if ext_end < bytes.len() {
        return Err(HeaderError::Trailing {
            at: ext_end,
            bytes: bytes.len() - ext_end,
        });
    }
    while cursor.at < ext_end {
        let name_length = cursor.i16("ext field name length")?;
        let (name, _) = cursor.text(i32::from(name_length), "ext field name")?;
        let value_length = cursor.i32("ext field value length")?;
        let (value, _) = cursor.text(value_length, "ext field value")?;
        // An empty string stands for null in this form, and null is an absent field.
        if value.bytes > 0 {
            ext.push(name, value)?;
        }
    }
    let serialization = Serialization::Binary;
    Ok(Header {
        code,
        language,
        version,
        opaque,
        flag,
        remark,
        serialization,
        ext,
    })
}
