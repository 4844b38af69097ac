//! Owns the named fields of a header and their typed reading.
//!
//! Invariant: the table holds positions into the header, at most [`EXT_FIELDS_MAX`] of them, the
//! first [`EXT_FIELDS_INLINE`] without allocation. Where a name occurs twice the last one counts.

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

#[derive(Clone, Copy)]
struct Place {
    at: u32,
    bytes: u32,
}

impl Place {
    const EMPTY: Self = Self { at: 0, bytes: 0 };

    fn new(span: Span) -> Self {
        let escaped = if span.escaped { ESCAPED } else { 0 };
        Self {
            at: span.at as u32,
            bytes: span.bytes as u32 | escaped,
        }
    }

    fn text<'a>(&self, source: &'a [u8]) -> Text<'a> {
        let (at, bytes) = (self.at as usize, (self.bytes & !ESCAPED) as usize);
        let raw = source.get(at..at + bytes).unwrap_or_default();
        // The decoder checked these bytes; checking again is cheaper than carrying fat pointers.
        Text::new(
            std::str::from_utf8(raw).unwrap_or_default(),
            self.bytes & ESCAPED != 0,
        )
    }
}

#[derive(Clone, Copy)]
struct Field {
    name: Place,
    value: Place,
}

/// The named fields of a header.
#[derive(Clone)]
pub struct Ext<'a> {
    source: &'a [u8],
    inline: [Field; EXT_FIELDS_INLINE],
    inline_len: usize,
    spilled: Vec<Field>,
}

impl<'a> Ext<'a> {
    /// No fields, over the header they will be found in.
    pub(super) fn new(source: &'a [u8]) -> Self {
        let empty = Field {
            name: Place::EMPTY,
            value: Place::EMPTY,
        };
        Self {
            source,
            inline: [empty; EXT_FIELDS_INLINE],
            inline_len: 0,
            spilled: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, name: Span, value: Span) -> Result<(), HeaderError> {
        let field = Field {
            name: Place::new(name),
            value: Place::new(value),
        };
        if let Some(slot) = self.inline.get_mut(self.inline_len) {
            *slot = field;
            self.inline_len += 1;
            return Ok(());
        }
        if self.len() >= EXT_FIELDS_MAX {
            return Err(HeaderError::TooManyFields);
        }
        self.spilled.push(field);
        Ok(())
    }

    /// Forgets all fields.
    pub(super) fn clear(&mut self) {
        self.inline_len = 0;
        self.spilled.clear();
    }

    fn fields(&self) -> impl DoubleEndedIterator<Item = &Field> {
        self.inline
            .get(..self.inline_len)
            .unwrap_or_default()
            .iter()
            .chain(&self.spilled)
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
            .map(move |field| (field.name.text(source), field.value.text(source)))
    }

    /// The value of a field.
    pub fn get(&self, name: &str) -> Option<Text<'a>> {
        let found = self.fields().rev().find(|field| {
            let may_match = field.name.bytes == name.len() as u32 || field.name.bytes >= ESCAPED;
            may_match && field.name.text(self.source).eq_str(name)
        });
        found.map(|field| field.value.text(self.source))
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

pub(crate) fn parse_i32(field: &str, text: Text<'_>) -> Result<Option<i32>, FieldError> {
    parse(field, text, EXPECTED_I32, |value| value.parse().ok())
}

pub(crate) fn parse_i64(field: &str, text: Text<'_>) -> Result<Option<i64>, FieldError> {
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
