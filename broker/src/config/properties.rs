//! Java properties text: parsed with the line of every entry, and rewritten without losing
//! comments.
//!
//! Invariant: every entry knows the line it starts on, so that a refusal can name it, and a rewrite
//! changes the lines of the keys it was given and no other.

use std::fmt::Write as _;

/// Longest config file that is read. Real ones are a few kilobytes; more is a wrong path.
pub const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;

/// One `key=value` of a properties text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Key, unescaped.
    pub key: String,
    /// Value, unescaped, without blanks around it.
    pub value: String,
    /// Line the entry starts on, from 1.
    pub line: usize,
    /// Line the entry ends on, when `\` continues it.
    pub line_last: usize,
}

/// What is wrong with a properties text, and on which line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntaxFault {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong and what to write instead.
    pub what: String,
}

/// Parses properties text: `#` and `!` comments, `\` continuation, `\uXXXX`, and the separators
/// `=`, `:` and blank.
///
/// # Errors
/// A broken `\u` escape, a control character or an entry without a key.
pub fn parse(text: &str) -> Result<Vec<Entry>, SyntaxFault> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut entries = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((index, first)) = lines.next() {
        let start = first.trim_start_matches(is_blank);
        if start.is_empty() || start.starts_with(['#', '!']) {
            continue;
        }
        let mut logical = start.to_owned();
        let mut last = index;
        while is_continued(&logical) {
            logical.pop();
            let Some((next_index, next)) = lines.next() else {
                break;
            };
            logical.push_str(next.trim_start_matches(is_blank));
            last = next_index;
        }
        entries.push(parse_entry(&logical, index + 1, last + 1)?);
    }
    Ok(entries)
}

/// Gives `text` with the values of `changes` put in place; keys the text does not have are
/// appended.
///
/// # Errors
/// As [`parse`].
pub fn rewrite(text: &str, changes: &[(String, String)]) -> Result<String, SyntaxFault> {
    let entries = parse(text)?;
    let mut out = String::with_capacity(text.len() + 64);
    let mut skip_to = 0;
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        if number <= skip_to {
            continue;
        }
        let found = entries.iter().find(|entry| entry.line == number);
        let change = found.and_then(|e| changes.iter().find(|(key, _)| *key == e.key).zip(Some(e)));
        match change {
            Some(((key, value), entry)) => {
                skip_to = entry.line_last;
                push_entry(&mut out, key, value);
            }
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    for (key, value) in changes {
        if !entries.iter().any(|entry| entry.key == *key) {
            push_entry(&mut out, key, value);
        }
    }
    Ok(out)
}

/// Appends one escaped `key=value` line.
pub fn push_entry(out: &mut String, key: &str, value: &str) {
    escape_into(out, key, true);
    out.push('=');
    escape_into(out, value, false);
    out.push('\n');
}

fn escape_into(out: &mut String, text: &str, is_key: bool) {
    for (index, c) in text.chars().enumerate() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ' ' if is_key || index == 0 => out.push_str("\\ "),
            '=' | ':' | '#' | '!' if is_key => {
                out.push('\\');
                out.push(c);
            }
            // The Java client reads these texts as ISO 8859-1, hence escapes beyond ASCII.
            c if c.is_ascii_graphic() || c == ' ' => out.push(c),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04X}");
                }
            }
        }
    }
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\u{c}')
}

fn is_continued(line: &str) -> bool {
    line.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1
}

fn parse_entry(logical: &str, line: usize, line_last: usize) -> Result<Entry, SyntaxFault> {
    let (raw_key, raw_value) = split_key(logical);
    let key = unescape(raw_key).map_err(|what| SyntaxFault { line, what })?;
    // Blanks at the end of a line cannot be seen; Java keeps them and the value stops working.
    let value = unescape(raw_value.trim_end_matches(is_blank))
        .map_err(|what| SyntaxFault { line, what })?;
    if key.is_empty() {
        let what = "a value without a key; write key=value".to_owned();
        return Err(SyntaxFault { line, what });
    }
    let is_stray = |c: &char| c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\u{c}');
    if let Some(bad) = key.chars().chain(value.chars()).find(is_stray) {
        let what = format!(
            "control character U+{:04X} in the entry of {key}",
            u32::from(bad)
        );
        return Err(SyntaxFault { line, what });
    }
    Ok(Entry {
        key,
        value,
        line,
        line_last,
    })
}

/// Splits at the first unescaped `=`, `:` or blank; blanks around the separator belong to neither
/// side.
fn split_key(logical: &str) -> (&str, &str) {
    let mut escaped = false;
    for (at, c) in logical.char_indices() {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if matches!(c, '=' | ':') || is_blank(c) {
            let (key, rest) = logical.split_at(at);
            let rest = rest.trim_start_matches(is_blank);
            let rest = rest.strip_prefix(['=', ':']).unwrap_or(rest);
            return (key, rest.trim_start_matches(is_blank));
        }
    }
    (logical, "")
}

fn unescape(raw: &str) -> Result<String, String> {
    if !raw.contains('\\') {
        return Ok(raw.to_owned());
    }
    let mut units: Vec<u16> = Vec::with_capacity(raw.len());
    let mut chars = raw.chars();
    while let Some(c) = chars.next() {
        let plain = match c {
            '\\' => match chars.next() {
                Some('u') => {
                    units.push(unicode_escape(&mut chars)?);
                    continue;
                }
                Some('n') => '\n',
                Some('r') => '\r',
                Some('t') => '\t',
                Some('f') => '\u{c}',
                Some(other) => other,
                None => continue,
            },
            other => other,
        };
        units.extend_from_slice(plain.encode_utf16(&mut [0; 2]));
    }
    String::from_utf16(&units).map_err(|_| "half of a surrogate pair in \\u escapes".to_owned())
}

fn unicode_escape(chars: &mut std::str::Chars<'_>) -> Result<u16, String> {
    let digits: String = chars.by_ref().take(4).collect();
    if digits.len() != 4 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(format!(
            "\\u{digits} is not an escape; four hexadecimal digits follow \\u"
        ));
    }
    u16::from_str_radix(&digits, 16).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        parse(text)
            .unwrap()
            .into_iter()
            .map(|e| (e.key, e.value))
            .collect()
    }

    fn one(text: &str) -> (String, String) {
        let mut all = pairs(text);
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    #[test]
    fn all_separators_of_java_properties_are_understood() {
        for text in [
            "a=b", "a:b", "a b", " a = b", "a\t:\tb", "a   b", "a=b   ", "a=b\r\n",
        ] {
            assert_eq!(one(text), ("a".into(), "b".into()), "{text:?}");
        }
        assert_eq!(one("a"), ("a".into(), String::new()));
        assert_eq!(one("a=b=c:d e"), ("a".into(), "b=c:d e".into()));
        assert_eq!(one("a\\=b=c"), ("a=b".into(), "c".into()));
    }

    #[test]
    fn comments_and_empty_lines_are_skipped_but_lines_counted() {
        let entries = parse("# one\n\n ! two\nkey=v\n#x=y\nother=w").unwrap();
        assert_eq!(entries.iter().map(|e| e.line).collect::<Vec<_>>(), [4, 6]);
    }

    #[test]
    fn continued_lines_are_one_entry_that_starts_on_the_first() {
        let entries = parse("a=1s \\\n   5s \\\n 10s\nb=c:\\\\\nd=e").unwrap();
        assert_eq!(entries[0].value, "1s 5s 10s");
        assert_eq!((entries[0].line, entries[0].line_last), (1, 3));
        assert_eq!((entries[1].value.as_str(), entries[1].line), ("c:\\", 4));
        assert_eq!(entries[2].line, 5);
    }

    #[test]
    fn escapes_are_decoded_and_broken_ones_refused_with_their_line() {
        assert_eq!(one("a=\\u4e2d\\t\\:").1.chars().next(), Some('中'));
        let fault = parse("x=1\na=\\u12").unwrap_err();
        assert_eq!(fault.line, 2);
        assert!(parse("=v").is_err());
    }

    #[test]
    fn what_is_written_reads_back_the_same() {
        for value in ["", " lead", "a b # c", "c:\\dir", "中文 😀", "k=v:w!"] {
            let mut text = String::new();
            push_entry(&mut text, "some key=x", value);
            let (key, back) = one(&text);
            assert_eq!(
                (key.as_str(), back.as_str()),
                ("some key=x", value),
                "{text:?}"
            );
            assert!(text.is_ascii());
        }
    }

    #[test]
    fn rewrite_keeps_comments_and_order_and_appends_new_keys() {
        let text = "# head\na=1\n# about b\nb = 2 \\\n  3\nc=4\n";
        let changes = [
            ("b".to_owned(), "9".to_owned()),
            ("z".to_owned(), "8".to_owned()),
        ];
        let out = rewrite(text, &changes).unwrap();
        assert_eq!(out, "# head\na=1\n# about b\nb=9\nc=4\nz=8\n");
    }
}
