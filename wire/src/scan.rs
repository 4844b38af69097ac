//! Owns the JSON scanner under the header decoder: one pass over the text, no values built.
//!
//! Invariant: the position never passes the end of the text, and a nested value is followed at
//! most [`DEPTH_MAX`] levels deep.

use memchr::memchr;

/// Deepest nesting the scanner follows in values nobody asked for.
pub(crate) const DEPTH_MAX: usize = 16;

/// What the scanner did not like, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ScanError {
    /// Byte offset in the text.
    pub at: usize,
    /// What was wrong or expected there.
    pub problem: &'static str,
}

/// A slice of the text: where it starts, its length, and whether it holds escapes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Span {
    pub at: usize,
    pub bytes: usize,
    pub escaped: bool,
}

/// A value as the header decoder sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Value {
    /// `null`.
    Null,
    /// A string; the span lies between the quotes.
    String(Span),
    /// A number or boolean; the span is its text.
    Bare(Span),
    /// An object or array; the span is its text.
    Nested(Span),
}

/// Every byte of a word the same.
const fn spread(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// The top bit of every byte that is zero; only bits above the lowest one may be wrong.
const fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(spread(1)) & !word & spread(0x80)
}

/// The top bit of every byte that a JSON string cannot hold as it is: quote, backslash, control
/// characters; only bits above the lowest one may be wrong.
const fn special_bytes(word: u64) -> u64 {
    let controls = word.wrapping_sub(spread(0x20)) & !word & spread(0x80);
    zero_bytes(word ^ spread(b'"')) | zero_bytes(word ^ spread(b'\\')) | controls
}

/// Where the first byte is that `is_hit` tells of one and `hits` of eight.
fn find(bytes: &[u8], hits: impl Fn(u64) -> u64, is_hit: impl Fn(u8) -> bool) -> Option<usize> {
    let mut rest = bytes;
    let mut at = 0;
    // The strings of a header are short: a call of `memchr` costs more than it saves.
    while let Some((chunk, after)) = rest.split_first_chunk::<8>() {
        let found = hits(u64::from_le_bytes(*chunk));
        if found != 0 {
            return Some(at + found.trailing_zeros() as usize / 8);
        }
        rest = after;
        at += 8;
    }
    let hop = rest.iter().position(|byte| is_hit(*byte))?;
    Some(at + hop)
}

/// The top bit of every quote and backslash in eight bytes; only bits above the lowest one may be
/// wrong.
#[inline(always)]
pub(crate) const fn quote_or_backslash_bits(word: u64) -> u64 {
    zero_bytes(word ^ spread(b'"')) | zero_bytes(word ^ spread(b'\\'))
}

/// Where the first quote or backslash is.
fn quote_or_backslash(bytes: &[u8]) -> Option<usize> {
    let is_hit = |byte| matches!(byte, b'"' | b'\\');
    find(bytes, quote_or_backslash_bits, is_hit)
}

/// Where the first byte is that has to be escaped in a JSON string.
pub(crate) fn to_be_escaped(bytes: &[u8]) -> Option<usize> {
    let is_special = |byte| byte < 0x20 || matches!(byte, b'"' | b'\\');
    find(bytes, special_bytes, is_special)
}

/// A position in JSON text.
pub(crate) struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    pub fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0 }
    }

    pub fn error<T>(&self, problem: &'static str) -> Result<T, ScanError> {
        Err(ScanError {
            at: self.at,
            problem,
        })
    }

    fn byte(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn rest(&self) -> &'a [u8] {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// The next byte that is not white space, not consumed.
    #[inline]
    pub fn peek(&mut self) -> Option<u8> {
        while let Some(byte) = self.byte() {
            if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    /// Consumes `byte` after white space when it is next.
    pub fn take(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    /// Consumes `byte` or fails.
    pub fn expect(&mut self, byte: u8, problem: &'static str) -> Result<(), ScanError> {
        if self.take(byte) {
            Ok(())
        } else {
            self.error(problem)
        }
    }

    /// Only white space may follow.
    pub fn end(&mut self) -> Result<(), ScanError> {
        if self.peek().is_some() {
            self.error("bytes after the end of the object")
        } else {
            Ok(())
        }
    }

    /// Reads a string and checks its escapes; the quotes are not part of the span.
    pub fn string(&mut self) -> Result<Span, ScanError> {
        self.expect(b'"', "expected a string")?;
        let start = self.at;
        let mut escaped = false;
        loop {
            let Some(hop) = quote_or_backslash(self.rest()) else {
                return self.error("string without closing quote");
            };
            self.at += hop;
            if self.byte() == Some(b'"') {
                let span = Span {
                    at: start,
                    bytes: self.at - start,
                    escaped,
                };
                self.at += 1;
                return Ok(span);
            }
            escaped = true;
            self.escape()?;
        }
    }

    /// Steps over one escape, the position being at its backslash.
    fn escape(&mut self) -> Result<(), ScanError> {
        match self.text.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
            Some(b'u') => {
                let digits = self.text.get(self.at + 2..self.at + 6);
                if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) {
                    return self.error("\\u without four hexadecimal digits");
                }
                self.at += 6;
            }
            _ => return self.error("unknown escape"),
        }
        Ok(())
    }

    /// Reads any value.
    pub fn value(&mut self) -> Result<Value, ScanError> {
        match self.peek() {
            Some(b'"') => self.string().map(Value::String),
            Some(b'{' | b'[') => {
                let start = self.at;
                self.nested(1)?;
                Ok(Value::Nested(Span {
                    at: start,
                    bytes: self.at - start,
                    escaped: false,
                }))
            }
            Some(_) => self.bare(),
            None => self.error("expected a value"),
        }
    }

    /// Reads a number, boolean or null.
    fn bare(&mut self) -> Result<Value, ScanError> {
        let start = self.at;
        let word = self.rest();
        let is_part =
            |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.');
        let bytes = word
            .iter()
            .position(|byte| !is_part(byte))
            .unwrap_or(word.len());
        let word = word.get(..bytes).unwrap_or_default();
        let span = Span {
            at: start,
            bytes,
            escaped: false,
        };
        let value = match word {
            b"null" => Value::Null,
            b"true" | b"false" => Value::Bare(span),
            _ if is_number(word) => Value::Bare(span),
            _ => return self.error("expected a value"),
        };
        self.at += bytes;
        Ok(value)
    }

    /// Steps over an object or array.
    fn nested(&mut self, depth: usize) -> Result<(), ScanError> {
        if depth > DEPTH_MAX {
            return self.error("nested deeper than 16 levels");
        }
        let is_object = self.take(b'{');
        if !is_object {
            self.expect(b'[', "expected an object or array")?;
        }
        let close = if is_object { b'}' } else { b']' };
        if self.take(close) {
            return Ok(());
        }
        loop {
            if is_object {
                self.string()?;
                self.expect(b':', "expected a colon")?;
            }
            match self.peek() {
                Some(b'{' | b'[') => self.nested(depth + 1)?,
                _ => drop(self.value()?),
            }
            if self.take(close) {
                return Ok(());
            }
            self.expect(b',', "expected a comma or the end of the object or array")?;
        }
    }
}

/// Whether a word is a JSON number.
fn is_number(word: &[u8]) -> bool {
    let word = word.strip_prefix(b"-").unwrap_or(word);
    let integer = word.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if integer == 0 {
        return false;
    }
    let mut rest = word.get(integer..).unwrap_or_default();
    if let Some(fraction) = rest.strip_prefix(b".") {
        let digits = fraction
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        if digits == 0 {
            return false;
        }
        rest = fraction.get(digits..).unwrap_or_default();
    }
    match rest {
        [] => true,
        [b'e' | b'E', exponent @ ..] => {
            let digits = match exponent {
                [b'+' | b'-', digits @ ..] => digits,
                digits => digits,
            };
            !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
        }
        _ => false,
    }
}

/// Appends a string's text, its escapes resolved, as [`unescape`] does.
pub(crate) fn append_unescaped(text: &str, out: &mut Vec<u8>) {
    let mut rest = text.as_bytes();
    // Properties are full of the two separators, which encoders write as `\u0001` and `\u0002`.
    while let Some(hop) = memchr(b'\\', rest) {
        let (plain, escape) = rest.split_at(hop);
        out.extend_from_slice(plain);
        match escape {
            [_, b'u', b'0', b'0', b'0', digit @ b'0'..=b'9', after @ ..] => {
                out.push(*digit - b'0');
                rest = after;
            }
            _ => {
                let at = text.len() - escape.len();
                let (character, bytes) = resolve(text.get(at..).unwrap_or_default());
                out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                rest = escape.get(bytes..).unwrap_or_default();
            }
        }
    }
    out.extend_from_slice(rest);
}

/// Calls `emit` with the pieces of a string's text, its escapes resolved.
///
/// The text must have passed [`Scanner::string`]. Half a surrogate pair becomes U+FFFD.
pub(crate) fn unescape(text: &str, mut emit: impl FnMut(&str)) {
    let mut rest = text;
    while let Some(hop) = memchr(b'\\', rest.as_bytes()) {
        let (plain, escape) = rest.split_at(hop);
        if !plain.is_empty() {
            emit(plain);
        }
        let (character, bytes) = resolve(escape);
        emit(character.encode_utf8(&mut [0; 4]));
        rest = escape.get(bytes..).unwrap_or_default();
    }
    if !rest.is_empty() {
        emit(rest);
    }
}

/// The character an escape stands for, and the bytes it takes.
fn resolve(escape: &str) -> (char, usize) {
    match escape.as_bytes().get(1) {
        Some(b'b') => ('\u{8}', 2),
        Some(b'f') => ('\u{c}', 2),
        Some(b'n') => ('\n', 2),
        Some(b'r') => ('\r', 2),
        Some(b't') => ('\t', 2),
        Some(b'u') => unicode(escape),
        Some(&other) => (char::from(other), 2),
        None => (char::REPLACEMENT_CHARACTER, 1),
    }
}

/// A `\u` escape, taking the second half of a surrogate pair along.
fn unicode(escape: &str) -> (char, usize) {
    let unit = |at: usize| {
        let digits = escape.get(at..)?.strip_prefix("\\u")?.get(..4)?;
        u32::from_str_radix(digits, 16).ok()
    };
    let first = unit(0).unwrap_or(0xFFFD);
    if (0xD800..0xDC00).contains(&first)
        && let Some(second) = unit(6)
        && (0xDC00..0xE000).contains(&second)
    {
        let code = 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
        return (
            char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER),
            12,
        );
    }
    (
        char::from_u32(first).unwrap_or(char::REPLACEMENT_CHARACTER),
        6,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_found_at_every_place_and_none_else() {
        for len in 0..40 {
            for at in 0..len {
                for byte in 0..=255u8 {
                    let mut text = vec![b'a'; len];
                    text[at] = byte;
                    // What follows the hit must not matter.
                    text[at + 1..].fill(byte.wrapping_add(1));
                    let expected = text.iter().position(|b| matches!(b, b'"' | b'\\'));
                    assert_eq!(quote_or_backslash(&text), expected, "{text:?}");
                    let special = |b: &u8| *b < 0x20 || matches!(b, b'"' | b'\\');
                    assert_eq!(
                        to_be_escaped(&text),
                        text.iter().position(special),
                        "{text:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn both_ways_to_resolve_escapes_agree() {
        for text in [
            "",
            "plain",
            "KEYS\\u0001a b\\u0002TAGS\\u0001t",
            "\\u0000\\u0009\\u000a\\u001f\\u00e9\\u4e2d",
            "\\ud83d\\ude00 \\ud83d. \\n\\t\\\"\\\\\\/",
        ] {
            let mut pieces = String::new();
            unescape(text, |piece| pieces.push_str(piece));
            let mut bytes = Vec::new();
            append_unescaped(text, &mut bytes);
            assert_eq!(bytes, pieces.as_bytes(), "{text}");
        }
    }
}
