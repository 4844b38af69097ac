//! Owns the quick way through a JSON header as clients write it: no white space, string values.
//!
//! Invariant: what is read here is read as the scanner would read it; anything unusual, errors
//! included, is left to the scanner.

use super::{Ext, Header, LANGUAGE_OTHER, language_code};
use crate::scan::{Span, quote_or_backslash_bits};

/// A position in the text.
struct Quick<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// Reads a header into `header`, which is to be forgotten when this is `None`.
pub(super) fn decode<'a>(text: &'a str, header: &mut Header<'a>) -> Option<()> {
    let bytes = text.as_bytes();
    let mut quick = Quick { bytes, at: 0 };
    let mut has_code = false;
    quick.take(b'{')?;
    loop {
        let name = quick.string()?;
        quick.take(b':')?;
        match quick.plain(name)? {
            b"code" => {
                header.code = quick.number()?;
                has_code = true;
            }
            b"extFields" if header.ext.is_empty() => quick.ext_fields(&mut header.ext)?,
            b"flag" => header.flag = quick.number()?,
            b"opaque" => header.opaque = quick.number()?,
            b"version" => header.version = quick.number()?,
            b"language" => {
                let name = quick.string()?;
                let code = language_code(text.get(name.at..name.at + name.bytes)?);
                if name.escaped || code == LANGUAGE_OTHER {
                    return None;
                }
                header.language = code;
            }
            b"serializeTypeCurrentRPC" => drop(quick.string()?),
            _ => return None,
        }
        match quick.next()? {
            b',' => {}
            b'}' => break,
            _ => return None,
        }
    }
    (has_code && quick.at == bytes.len()).then_some(())
}

impl<'a> Quick<'a> {
    #[inline(always)]
    fn next(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    #[inline(always)]
    fn take(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    /// The bytes of a string that holds no escapes.
    #[inline(always)]
    fn plain(&self, span: Span) -> Option<&'a [u8]> {
        if span.escaped {
            return None;
        }
        self.bytes.get(span.at..span.at + span.bytes)
    }

    /// A string with its quotes; the span lies between them.
    #[inline(always)]
    fn string(&mut self) -> Option<Span> {
        self.take(b'"')?;
        let start = self.at;
        let mut at = start;
        let mut escaped = false;
        loop {
            let rest = self.bytes.get(at..)?;
            let hop = match rest.first_chunk::<8>() {
                Some(chunk) => match quote_or_backslash_bits(u64::from_le_bytes(*chunk)) {
                    0 => {
                        at += 8;
                        continue;
                    }
                    bits => bits.trailing_zeros() as usize / 8,
                },
                None => rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))?,
            };
            at += hop;
            if *self.bytes.get(at)? == b'"' {
                self.at = at + 1;
                return Some(Span {
                    at: start,
                    bytes: at - start,
                    escaped,
                });
            }
            escaped = true;
            at += self.escape(at)?;
        }
    }

    /// Bytes of the escape at a place.
    fn escape(&self, at: usize) -> Option<usize> {
        match self.bytes.get(at + 1..)? {
            [b'u', a, b, c, d, ..] => {
                let digits = [a, b, c, d];
                digits
                    .iter()
                    .all(|digit| digit.is_ascii_hexdigit())
                    .then_some(6)
            }
            [b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't', ..] => Some(2),
            _ => None,
        }
    }

    /// A whole number.
    #[inline(always)]
    fn number(&mut self) -> Option<i32> {
        let is_negative = *self.bytes.get(self.at)? == b'-';
        self.at += usize::from(is_negative);
        let start = self.at;
        let mut number = 0_i64;
        loop {
            let digit = self.bytes.get(self.at)?.wrapping_sub(b'0');
            if digit > 9 {
                break;
            }
            number = number * 10 + i64::from(digit);
            self.at += 1;
            // Ten digits may still fit; the rest is for the one who tells what is wrong.
            if self.at - start > 10 {
                return None;
            }
        }
        if self.at == start {
            return None;
        }
        i32::try_from(if is_negative { -number } else { number }).ok()
    }

    fn ext_fields(&mut self, ext: &mut Ext<'_>) -> Option<()> {
        self.take(b'{')?;
        if *self.bytes.get(self.at)? == b'}' {
            self.at += 1;
            return Some(());
        }
        loop {
            let name = self.string()?;
            self.take(b':')?;
            let value = self.string()?;
            ext.push(name, value).ok()?;
            match self.next()? {
                b',' => {}
                b'}' => return Some(()),
                _ => return None,
            }
        }
    }
}
