//! Owns the spelling of keys in written bodies.
//!
//! Invariant: only keys written through [`as_object_key`] are written as objects; every other
//! string is quoted and escaped as JSON demands.

use std::cell::Cell;
use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter, Serializer};

use super::BodyError;

thread_local! {
    /// Whether the key about to be written is the text of an object. A flag beside the text, not
    /// a mark inside it, so that no name a client chooses can pass for an object.
    static KEY_IS_OBJECT: Cell<bool> = const { Cell::new(false) };
}

/// Calls `write`, which writes one key that is the JSON text of an object.
pub(super) fn as_object_key<R>(write: impl FnOnce() -> R) -> R {
    KEY_IS_OBJECT.set(true);
    let written = write();
    // Another writer than the one below leaves the flag alone and quotes the key.
    KEY_IS_OBJECT.set(false);
    written
}

pub(super) fn write<T: Serialize + ?Sized>(
    value: &T,
    quote_integers: bool,
) -> Result<Vec<u8>, BodyError> {
    let mut out = Vec::with_capacity(256);
    let formatter = Dialect {
        quote_integers,
        key: Key::None,
    };
    let mut serializer = Serializer::with_formatter(&mut out, formatter);
    value.serialize(&mut serializer).map_err(BodyError::Write)?;
    Ok(out)
}

/// Where the writer is inside a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Key {
    /// Not in a key.
    None,
    /// At its start, the opening quote not written yet.
    Start,
    /// In a key written with quotes.
    Quoted,
    /// In an integer key written without quotes.
    Bare,
    /// In a key written as an object.
    Object,
}

struct Dialect {
    quote_integers: bool,
    key: Key,
}

impl Dialect {
    /// Writes the opening quote that was held back.
    fn open<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        if self.key == Key::Start {
            self.key = Key::Quoted;
            writer.write_all(b"\"")?;
        }
        Ok(())
    }

    fn integer<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        number: impl std::fmt::Display,
    ) -> io::Result<()> {
        if self.key == Key::Start && !self.quote_integers {
            self.key = Key::Bare;
        }
        self.open(writer)?;
        write!(writer, "{number}")
    }
}

impl Formatter for Dialect {
    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.key = if KEY_IS_OBJECT.take() {
            Key::Object
        } else {
            Key::Start
        };
        if first {
            Ok(())
        } else {
            writer.write_all(b",")
        }
    }

    fn end_object_key<W: ?Sized + Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.key = Key::None;
        Ok(())
    }

    fn begin_string<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        if self.key == Key::None {
            writer.write_all(b"\"")
        } else {
            Ok(())
        }
    }

    fn end_string<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer)?;
        match self.key {
            Key::Bare | Key::Object => Ok(()),
            Key::None | Key::Start | Key::Quoted => writer.write_all(b"\""),
        }
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        self.open(writer)?;
        writer.write_all(fragment.as_bytes())
    }

    fn write_char_escape<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        self.open(writer)?;
        let is_object = self.key == Key::Object;
        let plain: &[u8] = match escape {
            // Inside an object key the text is JSON already: quotes and backslashes are its own.
            CharEscape::Quote if is_object => b"\"",
            CharEscape::ReverseSolidus if is_object => b"\\",
            CharEscape::Quote => b"\\\"",
            CharEscape::ReverseSolidus => b"\\\\",
            CharEscape::Solidus => b"\\/",
            CharEscape::Backspace => b"\\b",
            CharEscape::FormFeed => b"\\f",
            CharEscape::LineFeed => b"\\n",
            CharEscape::CarriageReturn => b"\\r",
            CharEscape::Tab => b"\\t",
            CharEscape::AsciiControl(byte) => return write!(writer, "\\u{byte:04X}"),
        };
        writer.write_all(plain)
    }

    fn write_i32<W: ?Sized + Write>(&mut self, writer: &mut W, value: i32) -> io::Result<()> {
        self.integer(writer, value)
    }

    fn write_i64<W: ?Sized + Write>(&mut self, writer: &mut W, value: i64) -> io::Result<()> {
        self.integer(writer, value)
    }

    fn write_u32<W: ?Sized + Write>(&mut self, writer: &mut W, value: u32) -> io::Result<()> {
        self.integer(writer, value)
    }

    fn write_u64<W: ?Sized + Write>(&mut self, writer: &mut W, value: u64) -> io::Result<()> {
        self.integer(writer, value)
    }
}
