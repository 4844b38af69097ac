//! Owns the remoting frame as this suite's client writes and reads it, in both header encodings.
//!
//! Invariant: a frame is decoded only when its two lengths agree with the bytes that are there;
//! anything else is an error that says which length is wrong.

use std::collections::BTreeMap;
use std::io;

use serde_json::{Map, Value};

/// The largest frame either side may send.
pub const FRAME_BYTES_MAX: usize = 16_777_216;
/// Flag bit of an answer.
pub const FLAG_ANSWER: i32 = 1;
/// Flag bit of a request that wants no answer.
pub const FLAG_ONEWAY: i32 = 2;

/// How a header is written; the type byte of the frame says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Type 0: a JSON object.
    Json,
    /// Type 1: the compact form that RocketMQ calls ROCKETMQ.
    Binary,
}

/// One frame, request or answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The request code, or the response code of an answer.
    pub code: i32,
    /// The flag bits.
    pub flag: i32,
    /// The number that ties an answer to its request.
    pub opaque: i32,
    /// The error text of an answer.
    pub remark: Option<String>,
    /// The header fields.
    pub fields: BTreeMap<String, String>,
    /// The body.
    pub body: Vec<u8>,
    /// How the header is or was written.
    pub encoding: Encoding,
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Frame {
    /// A request; fields are given as pairs.
    pub fn request(code: i32, fields: &[(&str, String)], body: &[u8]) -> Self {
        let fields = fields
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.clone()))
            .collect();
        let body = body.to_vec();
        Self {
            code,
            flag: 0,
            opaque: 0,
            remark: None,
            fields,
            body,
            encoding: Encoding::Json,
        }
    }

    /// Whether this is an answer rather than a request of the other side.
    pub fn is_answer(&self) -> bool {
        self.flag & FLAG_ANSWER != 0
    }

    /// A header field as a number.
    pub fn number(&self, name: &str) -> io::Result<i64> {
        let text = self.text(name)?;
        text.parse()
            .map_err(|_| bad(format!("field {name} is {text:?}, not a number")))
    }

    /// A header field that must be there.
    pub fn text(&self, name: &str) -> io::Result<&str> {
        let value = self.fields.get(name).map(String::as_str);
        value.ok_or_else(|| {
            bad(format!(
                "answer {} has no field {name}: {:?}",
                self.code, self.fields
            ))
        })
    }

    /// The answer itself when its code is 0, an error naming code and remark otherwise.
    pub fn success(self) -> io::Result<Self> {
        if self.code == 0 {
            return Ok(self);
        }
        Err(io::Error::other(format!(
            "code {}: {}",
            self.code,
            self.remark.unwrap_or_default()
        )))
    }

    /// The bytes of the whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, header) = match self.encoding {
            Encoding::Json => (0_u32, self.json_header()),
            Encoding::Binary => (1_u32, self.binary_header()),
        };
        let total = 4 + header.len() + self.body.len();
        let mut out = Vec::with_capacity(4 + total);
        out.extend((total as u32).to_be_bytes());
        out.extend((kind << 24 | header.len() as u32).to_be_bytes());
        out.extend(header);
        out.extend(&self.body);
        out
    }

    fn json_header(&self) -> Vec<u8> {
        let mut fields = Map::new();
        for (key, value) in &self.fields {
            fields.insert(key.clone(), Value::String(value.clone()));
        }
        let mut header = Map::new();
        header.insert("code".into(), self.code.into());
        header.insert("extFields".into(), Value::Object(fields));
        header.insert("flag".into(), self.flag.into());
        header.insert("language".into(), "JAVA".into());
        header.insert("opaque".into(), self.opaque.into());
        header.insert("serializeTypeCurrentRPC".into(), "JSON".into());
        header.insert("version".into(), 479.into());
        Value::Object(header).to_string().into_bytes()
    }

    fn binary_header(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend((self.code as i16).to_be_bytes());
        out.push(0);
        out.extend(479_i16.to_be_bytes());
        out.extend(self.opaque.to_be_bytes());
        out.extend(self.flag.to_be_bytes());
        out.extend(0_i32.to_be_bytes());
        let mut entries = Vec::new();
        for (key, value) in &self.fields {
            entries.extend((key.len() as i16).to_be_bytes());
            entries.extend(key.as_bytes());
            entries.extend((value.len() as i32).to_be_bytes());
            entries.extend(value.as_bytes());
        }
        out.extend((entries.len() as i32).to_be_bytes());
        out.extend(entries);
        out
    }

    /// Reads what follows the total length of a frame.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let mut reader = Reader { bytes };
        let word = reader.int()? as u32;
        let header = reader.take((word & 0x00FF_FFFF) as usize)?;
        let mut frame = match word >> 24 {
            0 => Self::from_json(header)?,
            1 => Self::from_binary(header)?,
            kind => return Err(bad(format!("serialize type {kind}"))),
        };
        frame.body = reader.bytes.to_vec();
        Ok(frame)
    }

    fn from_json(header: &[u8]) -> io::Result<Self> {
        let value: Value = serde_json::from_slice(header).map_err(io::Error::other)?;
        let number = |name: &str| {
            let value = value.get(name).and_then(Value::as_i64);
            value
                .map(|n| n as i32)
                .ok_or_else(|| bad(format!("header has no number {name}")))
        };
        let mut fields = BTreeMap::new();
        if let Some(Value::Object(map)) = value.get("extFields") {
            for (key, value) in map {
                let Value::String(text) = value else {
                    return Err(bad(format!(
                        "field {key} of an answer is {value}, not a string"
                    )));
                };
                fields.insert(key.clone(), text.clone());
            }
        }
        Ok(Self {
            code: number("code")?,
            flag: number("flag")?,
            opaque: number("opaque")?,
            remark: value
                .get("remark")
                .and_then(Value::as_str)
                .map(str::to_owned),
            fields,
            body: Vec::new(),
            encoding: Encoding::Json,
        })
    }

    fn from_binary(header: &[u8]) -> io::Result<Self> {
        let mut reader = Reader { bytes: header };
        let code = i32::from(reader.short()?);
        reader.take(3)?;
        let opaque = reader.int()?;
        let flag = reader.int()?;
        let remark = reader.int()? as usize;
        let remark = String::from_utf8_lossy(reader.take(remark)?).into_owned();
        let entries = reader.int()? as usize;
        let mut entries = Reader {
            bytes: reader.take(entries)?,
        };
        let mut fields = BTreeMap::new();
        while !entries.bytes.is_empty() {
            let key = entries.short()? as usize;
            let key = String::from_utf8_lossy(entries.take(key)?).into_owned();
            let value = entries.int()? as usize;
            let value = String::from_utf8_lossy(entries.take(value)?).into_owned();
            fields.insert(key, value);
        }
        if !reader.bytes.is_empty() {
            return Err(bad(format!(
                "{} bytes after the header fields",
                reader.bytes.len()
            )));
        }
        let remark = (!remark.is_empty()).then_some(remark);
        let body = Vec::new();
        Ok(Self {
            code,
            flag,
            opaque,
            remark,
            fields,
            body,
            encoding: Encoding::Binary,
        })
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> io::Result<&'a [u8]> {
        let (head, tail) = self.bytes.split_at_checked(count).ok_or_else(|| {
            bad(format!(
                "a length of {count} with {} bytes left",
                self.bytes.len()
            ))
        })?;
        self.bytes = tail;
        Ok(head)
    }

    fn int(&mut self) -> io::Result<i32> {
        let bytes = self.take(4)?;
        Ok(i32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn short(&mut self) -> io::Result<i16> {
        let bytes = self.take(2)?;
        Ok(i16::from_be_bytes([bytes[0], bytes[1]]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_encodings_come_back_as_they_went() {
        for encoding in [Encoding::Json, Encoding::Binary] {
            let fields = [("topic", "T".to_owned()), ("queueId", "3".to_owned())];
            let mut frame = Frame::request(310, &fields, b"body");
            frame.opaque = 77;
            frame.encoding = encoding;
            assert_eq!(Frame::decode(&frame.encode()[4..]).unwrap(), frame);
        }
    }

    #[test]
    fn a_header_longer_than_its_frame_is_refused() {
        let mut bytes = Frame::request(105, &[], b"").encode();
        bytes[7] = bytes[7].wrapping_add(1);
        assert!(Frame::decode(&bytes[4..]).is_err());
    }
}
