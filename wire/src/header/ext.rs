//! Owns the named fields of a header and their typed reading.
//!
//! Invariant: the table holds positions into the header, at most [`EXT_FIELDS_MAX`] of them, the
//! first [`EXT_FIELDS_INLINE`] without allocation in headers of less than 32 KiB. Where a name
//! occurs twice the last one counts.

use std::borrow::Cow;
use std::fmt;

use thiserror::Error;

use super::{HeaderError, Text};
use crate::scan::Span;

/// Ext fields held without allocation.
pub const EXT_FIELDS_INLINE: usize = 40;

/// Most ext fields a header may have.
pub const EXT_FIELDS_MAX: usize = 1024;

/// Characters of a bad value an error repeats.
const ERROR_VALUE_CHARS_MAX: usize = 64;

/// Marks a length as that of text with escapes. Headers are shorter than 2^24 bytes.
const ESCAPED: u32 = 1 << 31;
/// The same in the short form.
const SHORT_ESCAPED: u16 = 1 << 15;
/// Places up to here have a short form.
const SHORT_MAX: usize = SHORT_ESCAPED as usize - 1;

/// Where a name or value is.
#[derive(Clone, Copy)]
struct Place {
    at: u32,
    bytes: u32,
}

impl Place {
    fn new(span: Span) -> Self {
        let escaped = if span.escaped { ESCAPED } else { 0 };
        Self {
            at: span.at as u32,
            bytes: span.bytes as u32 | escaped,
        }
    }

    fn is_escaped(self) -> bool {
        self.bytes & ESCAPED != 0
    }

    fn len(self) -> usize {
        (self.bytes & !ESCAPED) as usize
    }
}

/// A place in half the bytes: the table is made and moved with every header.
#[derive(Clone, Copy)]
struct ShortPlace {
    at: u16,
    bytes: u16,
}

impl ShortPlace {
    const EMPTY: Self = Self { at: 0, bytes: 0 };

    fn new(span: Span) -> Option<Self> {
        if span.at > SHORT_MAX || span.bytes > SHORT_MAX {
            return None;
        }
        let escaped = if span.escaped { SHORT_ESCAPED } else { 0 };
        Some(Self {
            at: span.at as u16,
            bytes: span.bytes as u16 | escaped,
        })
    }

    fn long(self) -> Place {
        let escaped = if self.bytes & SHORT_ESCAPED == 0 {
            0
        } else {
            ESCAPED
        };
        Place {
            at: u32::from(self.at),
            bytes: u32::from(self.bytes & !SHORT_ESCAPED) | escaped,
        }
    }
}

/// The header that places point into.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// Text as a whole.
    Text(&'a str),
    /// Bytes whose parts have been checked one by one.
    Bytes(&'a [u8]),
}

impl<'a> Source<'a> {
    fn bytes(self, place: Place) -> &'a [u8] {
        let bytes = match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        };
        let at = place.at as usize;
        bytes.get(at..at + place.len()).unwrap_or_default()
    }

    fn text(self, place: Place) -> Text<'a> {
        let at = place.at as usize;
        let raw = match self {
            Self::Text(text) => text.get(at..at + place.len()),
            // The decoder checked these bytes; once more is cheaper than carrying fat pointers.
            Self::Bytes(_) => std::str::from_utf8(self.bytes(place)).ok(),
        };
        Text::new(raw.unwrap_or_default(), place.is_escaped())
    }
}

/// The named fields of a header.
#[derive(Clone)]
pub struct Ext<'a> {
    source: Source<'a>,
    inline: [[ShortPlace; 2]; EXT_FIELDS_INLINE],
    inline_len: usize,
    spilled: Vec<[Place; 2]>,
}

impl<'a> Ext<'a> {
    /// No fields, over the text they will be found in.
    pub(super) fn of_text(text: &'a str) -> Self {
        Self::new(Source::Text(text))
    }

    /// No fields, over the bytes they will be found in; what is pushed must be UTF-8.
    pub(super) fn of_bytes(bytes: &'a [u8]) -> Self {
        Self::new(Source::Bytes(bytes))
    }

    fn new(source: Source<'a>) -> Self {
        Self {
            source,
            inline: [[ShortPlace::EMPTY; 2]; EXT_FIELDS_INLINE],
            inline_len: 0,
            spilled: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, name: Span, value: Span) -> Result<(), HeaderError> {
        // Once one has spilled all that follow do, so that the order is kept.
        if self.spilled.is_empty()
            && let Some(slot) = self.inline.get_mut(self.inline_len)
            && let (Some(name), Some(value)) = (ShortPlace::new(name), ShortPlace::new(value))
        {
            *slot = [name, value];
            self.inline_len += 1;
            return Ok(());
        }
        if self.len() >= EXT_FIELDS_MAX {
            return Err(HeaderError::TooManyFields);
        }
        self.spilled.push([Place::new(name), Place::new(value)]);
        Ok(())
    }

    /// Forgets all fields.
    pub(super) fn clear(&mut self) {
        self.inline_len = 0;
        self.spilled.clear();
    }

    fn fields(&self) -> impl DoubleEndedIterator<Item = [Place; 2]> {
        let inline = self.inline.get(..self.inline_len).unwrap_or_default();
        let inline = inline
            .iter()
            .map(|[name, value]| [name.long(), value.long()]);
        inline.chain(self.spilled.iter().copied())
    }

    /// How many fields there are.
    pub fn len(&self) -> usize {
        self.inline_len + self.spilled.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Names and values in the order of the header.
    pub fn iter(&self) -> impl Iterator<Item = (Text<'a>, Text<'a>)> {
        let source = self.source;
        self.fields()
            .map(move |[name, value]| (source.text(name), source.text(value)))
    }

    /// The values of the fields with these names, found in one walk. `position` tells a name's
    /// place in the row.
    pub(crate) fn named<const N: usize>(
        &self,
        names: &[&'static str; N],
        position: impl Fn(&[u8]) -> Option<usize>,
    ) -> [Option<Text<'a>>; N] {
        let mut places: [Option<Place>; N] = [None; N];
        let mut note = |name: Place, value: Place| {
            // A name with escapes is legal, rare, and worth a slower look.
            let found = if name.is_escaped() {
                let name = self.source.text(name);
                names.iter().position(|known| name.eq_str(known))
            } else {
                position(self.source.bytes(name))
            };
            if let Some(slot) = found.and_then(|found| places.get_mut(found)) {
                *slot = Some(value);
            }
        };
        for [name, value] in self.inline.get(..self.inline_len).unwrap_or_default() {
            note(name.long(), value.long());
        }
        for [name, value] in &self.spilled {
            note(*name, *value);
        }
        places.map(|place| place.map(|place| self.source.text(place)))
    }

    /// The value of a field.
    pub fn get(&self, name: &str) -> Option<Text<'a>> {
        let found = self.fields().rev().find(|[found, _]| {
            if found.is_escaped() {
                self.source.text(*found).eq_str(name)
            } else {
                self.source.bytes(*found) == name.as_bytes()
            }
        });
        found.map(|[_, value]| self.source.text(value))
    }

    /// The value of a field as a string.
    pub fn str(&self, name: &str) -> Option<Cow<'a, str>> {
        self.get(name).map(|text| text.to_cow())
    }

    /// The value of a field as a 32-bit number; an empty value counts as absent.
    pub fn i32(&self, name: &str) -> Result<Option<i32>, FieldError> {
        self.get(name)
            .map_or(Ok(None), |text| parse_i32(name, text))
    }

    /// The value of a field as a 64-bit number; an empty value counts as absent.
    pub fn i64(&self, name: &str) -> Result<Option<i64>, FieldError> {
        self.get(name)
            .map_or(Ok(None), |text| parse_i64(name, text))
    }

    /// The value of a field as a boolean; an empty value counts as absent.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, FieldError> {
        self.get(name)
            .map_or(Ok(None), |text| parse_bool(name, text))
    }

    /// Like [`Ext::str`], but the field must be there.
    pub fn need_str(&self, name: &str) -> Result<Cow<'a, str>, FieldError> {
        self.str(name)
            .ok_or_else(|| FieldError::missing(name, EXPECTED_STRING))
    }

    /// Like [`Ext::i32`], but the field must be there.
    pub fn need_i32(&self, name: &str) -> Result<i32, FieldError> {
        self.i32(name)?
            .ok_or_else(|| FieldError::missing(name, EXPECTED_I32))
    }

    /// Like [`Ext::i64`], but the field must be there.
    pub fn need_i64(&self, name: &str) -> Result<i64, FieldError> {
        self.i64(name)?
            .ok_or_else(|| FieldError::missing(name, EXPECTED_I64))
    }

    /// Like [`Ext::bool`], but the field must be there.
    pub fn need_bool(&self, name: &str) -> Result<bool, FieldError> {
        self.bool(name)?
            .ok_or_else(|| FieldError::missing(name, EXPECTED_BOOL))
    }
}

impl fmt::Debug for Ext<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_map().entries(self.iter()).finish()
    }
}

pub(crate) const EXPECTED_STRING: &str = "a string";
pub(crate) const EXPECTED_I32: &str = "a 32-bit integer";
pub(crate) const EXPECTED_I64: &str = "a 64-bit integer";
pub(crate) const EXPECTED_BOOL: &str = "true, false, 1 or 0";

/// Why a field of a header cannot be used.
#[derive(Error, Clone, PartialEq, Eq, Debug)]
pub enum FieldError {
    /// The field is not there.
    #[error("header field {field} is missing, expected {expected}")]
    Missing {
        /// Name of the field.
        field: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// The field holds something else.
    #[error("header field {field} is \"{value}\", expected {expected}")]
    Invalid {
        /// Name of the field.
        field: String,
        /// Its value, cut to 64 characters.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
}

impl FieldError {
    /// The field is not there.
    pub fn missing(field: &str, expected: &'static str) -> Self {
        Self::Missing {
            field: field.to_owned(),
            expected,
        }
    }

    /// The field holds something else.
    pub fn invalid(field: &str, value: &str, expected: &'static str) -> Self {
        let value = value.chars().take(ERROR_VALUE_CHARS_MAX).collect();
        Self::Invalid {
            field: field.to_owned(),
            value,
            expected,
        }
    }
}

/// The value of up to `digits_max` digits, which must be so few that they cannot overflow.
fn number_of(text: Text<'_>, digits_max: usize) -> Option<i64> {
    let digits = text.as_plain()?.as_bytes();
    if digits.is_empty() || digits.len() > digits_max {
        return None;
    }
    let mut number = 0;
    for digit in digits {
        let digit = digit.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        number = number * 10 + i64::from(digit);
    }
    Some(number)
}

pub(crate) fn parse_i32(field: &str, text: Text<'_>) -> Result<Option<i32>, FieldError> {
    if let Some(number) = number_of(text, 9) {
        return Ok(Some(number as i32));
    }
    parse(field, text, EXPECTED_I32, |value| value.parse().ok())
}

pub(crate) fn parse_i64(field: &str, text: Text<'_>) -> Result<Option<i64>, FieldError> {
    if let Some(number) = number_of(text, 18) {
        return Ok(Some(number));
    }
    parse(field, text, EXPECTED_I64, |value| value.parse().ok())
}

pub(crate) fn parse_bool(field: &str, text: Text<'_>) -> Result<Option<bool>, FieldError> {
    parse(field, text, EXPECTED_BOOL, |value| match value {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ if value.eq_ignore_ascii_case("true") => Some(true),
        _ if value.eq_ignore_ascii_case("false") => Some(false),
        _ => None,
    })
}

fn parse<T>(
    field: &str,
    text: Text<'_>,
    expected: &'static str,
    convert: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, FieldError> {
    if text.is_empty() {
        return Ok(None);
    }
    let value = text.to_cow();
    match convert(&value) {
        Some(converted) => Ok(Some(converted)),
        None => Err(FieldError::invalid(field, &value, expected)),
    }
}
