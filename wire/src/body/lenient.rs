//! Owns reading of the JSON dialect: unquoted integer keys, unquoted names and object keys.
//!
//! Invariant: the output is standard JSON when the input is the dialect; depth and size are
//! bounded, and one object key cannot hold another, so that escaping cannot multiply.

use super::{BODY_BYTES_MAX, BodyError};

/// Deepest nesting that is read.
pub const DEPTH_MAX: usize = 64;

/// Turns the dialect into standard JSON: integer keys and names get quotes, object keys become a
/// string that holds their JSON text. Values are copied as they are.
pub fn to_standard_json(body: &[u8]) -> Result<Vec<u8>, BodyError> {
    if body.len() > BODY_BYTES_MAX {
        return Err(BodyError::TooLarge {
            bytes: body.len(),
            bytes_max: BODY_BYTES_MAX,
        });
    }
    if let Err(error) = std::str::from_utf8(body) {
        return Err(BodyError::Malformed {
            at: error.valid_up_to(),
            problem: "not UTF-8",
        });
    }
    let mut reader = Reader {
        body,
        at: 0,
        is_in_key: false,
    };
    let mut out = Vec::with_capacity(body.len() + body.len() / 8);
    reader.value(&mut out, 0)?;
    if reader.peek().is_some() {
        return reader.fail("bytes after the end of the value");
    }
    Ok(out)
}

struct Reader<'a> {
    body: &'a [u8],
    at: usize,
    is_in_key: bool,
}

impl Reader<'_> {
    fn fail<T>(&self, problem: &'static str) -> Result<T, BodyError> {
        Err(BodyError::Malformed {
            at: self.at,
            problem,
        })
    }

    fn peek(&mut self) -> Option<u8> {
        while let Some(byte) = self.body.get(self.at) {
            if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                return Some(*byte);
            }
            self.at += 1;
        }
        None
    }

    fn take(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn value(&mut self, out: &mut Vec<u8>, depth: usize) -> Result<(), BodyError> {
        if depth > DEPTH_MAX {
            return self.fail("nested deeper than 64 levels");
        }
        match self.peek() {
            Some(b'{') => self.object(out, depth),
            Some(b'[') => self.array(out, depth),
            Some(b'"') => self.string(out),
            Some(_) => self.word(out, |byte| {
                byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.')
            }),
            None => self.fail("expected a value"),
        }
    }

    fn array(&mut self, out: &mut Vec<u8>, depth: usize) -> Result<(), BodyError> {
        self.at += 1;
        out.push(b'[');
        if self.take(b']') {
            out.push(b']');
            return Ok(());
        }
        loop {
            self.value(out, depth + 1)?;
            if self.take(b']') {
                out.push(b']');
                return Ok(());
            }
            if !self.take(b',') {
                return self.fail("expected a comma or the end of the array");
            }
            out.push(b',');
        }
    }

    fn object(&mut self, out: &mut Vec<u8>, depth: usize) -> Result<(), BodyError> {
        self.at += 1;
        out.push(b'{');
        if self.take(b'}') {
            out.push(b'}');
            return Ok(());
        }
        loop {
            self.key(out, depth)?;
            if !self.take(b':') {
                return self.fail("expected a colon");
            }
            out.push(b':');
            self.value(out, depth + 1)?;
            if self.take(b'}') {
                out.push(b'}');
                return Ok(());
            }
            if !self.take(b',') {
                return self.fail("expected a comma or the end of the object");
            }
            out.push(b',');
        }
    }

    fn key(&mut self, out: &mut Vec<u8>, depth: usize) -> Result<(), BodyError> {
        match self.peek() {
            Some(b'"') => self.string(out),
            Some(b'{') if self.is_in_key => self.fail("object key inside an object key"),
            Some(b'{') => {
                let mut text = Vec::new();
                self.is_in_key = true;
                self.value(&mut text, depth + 1)?;
                self.is_in_key = false;
                quote(out, &text);
                Ok(())
            }
            Some(_) => {
                out.push(b'"');
                self.word(out, |byte| {
                    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'$')
                })?;
                out.push(b'"');
                Ok(())
            }
            None => self.fail("expected a key"),
        }
    }

    /// Copies a string with its quotes and escapes.
    fn string(&mut self, out: &mut Vec<u8>) -> Result<(), BodyError> {
        let rest = self.body.get(self.at..).unwrap_or_default();
        let mut is_escaped = false;
        for (index, byte) in rest.iter().enumerate().skip(1) {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' => is_escaped = true,
                b'"' => {
                    out.extend_from_slice(rest.get(..=index).unwrap_or_default());
                    self.at += index + 1;
                    return Ok(());
                }
                _ => {}
            }
        }
        self.fail("string without closing quote")
    }

    /// Copies a number, a literal or an unquoted name.
    fn word(&mut self, out: &mut Vec<u8>, is_part: impl Fn(u8) -> bool) -> Result<(), BodyError> {
        let rest = self.body.get(self.at..).unwrap_or_default();
        let bytes = rest
            .iter()
            .position(|byte| !is_part(*byte))
            .unwrap_or(rest.len());
        if bytes == 0 {
            return self.fail("unexpected character");
        }
        out.extend_from_slice(rest.get(..bytes).unwrap_or_default());
        self.at += bytes;
        Ok(())
    }
}

/// Appends JSON text as a JSON string. Strings inside it may hold raw control characters, which
/// then are escaped here.
fn quote(out: &mut Vec<u8>, text: &[u8]) {
    match std::str::from_utf8(text) {
        Ok(text) => crate::header::encode_json_string(out, text),
        // The whole body was checked, and pieces are cut at ASCII characters only.
        Err(_) => debug_assert!(false, "pieces of UTF-8 text are UTF-8"),
    }
}
