//! Owns text that may still hold JSON escapes.
//!
//! Invariant: text marked as escaped passed the scanner, so that resolving it cannot fail.

use std::borrow::Cow;
use std::fmt;

use crate::scan::{append_unescaped, unescape};

/// Text that may hold JSON escapes, resolved only when somebody needs it.
#[derive(Clone, Copy, Default)]
pub struct Text<'a> {
    raw: &'a str,
    escaped: bool,
}

impl<'a> Text<'a> {
    /// Text without escapes.
    pub const fn plain(raw: &'a str) -> Self {
        Self {
            raw,
            escaped: false,
        }
    }

    pub(super) const fn new(raw: &'a str, escaped: bool) -> Self {
        Self { raw, escaped }
    }

    /// The text, when it holds no escapes.
    pub fn as_plain(&self) -> Option<&'a str> {
        if self.escaped { None } else { Some(self.raw) }
    }

    /// The text with escapes resolved; allocates only when there are any.
    pub fn to_cow(&self) -> Cow<'a, str> {
        if !self.escaped {
            return Cow::Borrowed(self.raw);
        }
        let mut resolved = String::with_capacity(self.raw.len());
        unescape(self.raw, |piece| resolved.push_str(piece));
        Cow::Owned(resolved)
    }

    /// Appends the text with escapes resolved.
    pub fn append_to(&self, out: &mut Vec<u8>) {
        if self.escaped {
            append_unescaped(self.raw, out);
        } else {
            out.extend_from_slice(self.raw.as_bytes());
        }
    }

    /// Most bytes [`Text::append_to`] appends.
    pub fn bytes_max(&self) -> usize {
        self.raw.len()
    }

    /// Whether the resolved text equals `other`; allocates nothing.
    pub fn eq_str(&self, other: &str) -> bool {
        if !self.escaped {
            return self.raw == other;
        }
        let mut rest = Some(other);
        unescape(self.raw, |piece| {
            rest = rest.and_then(|rest| rest.strip_prefix(piece))
        });
        rest == Some("")
    }

    /// Whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_cow(), formatter)
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.to_cow(), formatter)
    }
}

impl PartialEq for Text<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.to_cow() == other.to_cow()
    }
}

impl Eq for Text<'_> {}

impl PartialEq<str> for Text<'_> {
    fn eq(&self, other: &str) -> bool {
        self.eq_str(other)
    }
}

impl PartialEq<&str> for Text<'_> {
    fn eq(&self, other: &&str) -> bool {
        self.eq_str(other)
    }
}
