//! Owns decoding of the JSON header.
//!
//! Invariant: the text is checked for UTF-8 once and scanned once; unknown fields are stepped
//! over whatever they hold.

use super::{Ext, Header, HeaderError, LANGUAGE_JAVA, LANGUAGE_OTHER, Text, language_code, quick};
use crate::frame::Serialization;
use crate::scan::{ScanError, Scanner, Span, Value};

impl From<ScanError> for HeaderError {
    fn from(error: ScanError) -> Self {
        Self::Json {
            at: error.at,
            problem: error.problem,
        }
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<Header<'_>, HeaderError> {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            return Err(HeaderError::NotUtf8 {
                at: error.valid_up_to(),
            });
        }
    };
    let mut header = empty(text);
    if quick::decode(text, &mut header).is_some() {
        return Ok(header);
    }
    scan(text)
}

fn empty(text: &str) -> Header<'_> {
    Header {
        code: 0,
        language: LANGUAGE_JAVA,
        version: 0,
        opaque: 0,
        flag: 0,
        remark: None,
        serialization: Serialization::Json,
        ext: Ext::of_text(text),
    }
}

/// The way for every header there can be.
fn scan(text: &str) -> Result<Header<'_>, HeaderError> {
    let bytes = text.as_bytes();
    let mut header = empty(text);
    let mut has_code = false;
    let mut scanner = Scanner::new(bytes);
    scanner.expect(b'{', "expected an object")?;
    if !scanner.take(b'}') {
        loop {
            let name = scanner.string()?;
            scanner.expect(b':', "expected a colon")?;
            has_code |= field(text, name, &mut scanner, &mut header)?;
            if scanner.take(b'}') {
                break;
            }
            scanner.expect(b',', "expected a comma or the end of the object")?;
        }
    }
    scanner.end()?;
    if has_code {
        Ok(header)
    } else {
        Err(HeaderError::NoCode)
    }
}

fn slice<'a>(text: &'a str, span: Span) -> Text<'a> {
    Text::new(
        text.get(span.at..span.at + span.bytes).unwrap_or_default(),
        span.escaped,
    )
}

/// Reads one top-level field; tells whether it was the code.
fn field<'a>(
    text: &'a str,
    name: Span,
    scanner: &mut Scanner<'a>,
    header: &mut Header<'a>,
) -> Result<bool, HeaderError> {
    match slice(text, name).as_plain() {
        Some("code") => match number(text, scanner, "code")? {
            Some(code) => {
                header.code = code;
                return Ok(true);
            }
            None => return Ok(false),
        },
        Some("flag") => header.flag = number(text, scanner, "flag")?.unwrap_or(0),
        Some("opaque") => header.opaque = number(text, scanner, "opaque")?.unwrap_or(0),
        Some("version") => header.version = number(text, scanner, "version")?.unwrap_or(0),
        Some("language") => header.language = language(text, scanner)?,
        Some("remark") => {
            header.remark = match scanner.value()? {
                Value::Null => None,
                Value::String(span) | Value::Bare(span) | Value::Nested(span) => {
                    Some(slice(text, span))
                }
            }
        }
        Some("extFields") => ext_fields(scanner, &mut header.ext)?,
        _ => drop(scanner.value()?),
    }
    Ok(false)
}

fn number(
    text: &str,
    scanner: &mut Scanner<'_>,
    field: &'static str,
) -> Result<Option<i32>, HeaderError> {
    let span = match scanner.value()? {
        Value::Null => return Ok(None),
        Value::String(span) | Value::Bare(span) => span,
        Value::Nested(_) => {
            return Err(HeaderError::Field {
                field,
                expected: "a 32-bit integer",
            });
        }
    };
    let parsed = slice(text, span)
        .as_plain()
        .and_then(|digits| digits.parse().ok());
    parsed.map(Some).ok_or(HeaderError::Field {
        field,
        expected: "a 32-bit integer",
    })
}

fn language(text: &str, scanner: &mut Scanner<'_>) -> Result<u8, HeaderError> {
    let wrong = HeaderError::Field {
        field: "language",
        expected: "a language name or code",
    };
    match scanner.value()? {
        Value::Null => Ok(LANGUAGE_JAVA),
        Value::String(span) => {
            let name = slice(text, span).to_cow();
            Ok(match language_code(&name) {
                LANGUAGE_OTHER => name.parse().unwrap_or(LANGUAGE_OTHER),
                known => known,
            })
        }
        Value::Bare(span) => slice(text, span).to_cow().parse().map_err(|_| wrong),
        Value::Nested(_) => Err(wrong),
    }
}

fn ext_fields(scanner: &mut Scanner<'_>, ext: &mut Ext<'_>) -> Result<(), HeaderError> {
    ext.clear();
    if scanner.peek() != Some(b'{') {
        let expected = "an object";
        return match scanner.value()? {
            Value::Null => Ok(()),
            _ => Err(HeaderError::Field {
                field: "extFields",
                expected,
            }),
        };
    }
    scanner.expect(b'{', "expected an object")?;
    if scanner.take(b'}') {
        return Ok(());
    }
    loop {
        let name = scanner.string()?;
        scanner.expect(b':', "expected a colon")?;
        match scanner.value()? {
            Value::Null => {}
            Value::String(span) | Value::Bare(span) | Value::Nested(span) => {
                ext.push(name, span)?;
            }
        }
        if scanner.take(b'}') {
            return Ok(());
        }
        scanner.expect(b',', "expected a comma or the end of the object")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JAVA: &str = concat!(
        r#"{"code":310,"extFields":{"a":"pg","b":"T","e":"3","i":"UNIQ_KEY\u0001AB\u0002","#,
        r#""k":"false"},"flag":0,"language":"JAVA","opaque":-12,"#,
        r#""serializeTypeCurrentRPC":"JSON","version":479}"#
    );
    const GO: &str = concat!(
        r#"{"code":11,"language":"GO","version":317,"opaque":2147483647,"flag":0,"#,
        r#""remark":"","extFields":{"topic":"T","queueId":"0"}}"#
    );

    /// What both ways make of a text: `None` where the quick one leaves it to the other.
    fn both(text: &str) -> (Option<String>, Result<String, HeaderError>) {
        let mut header = empty(text);
        let quick = quick::decode(text, &mut header).map(|()| format!("{header:?}"));
        (quick, scan(text).map(|header| format!("{header:?}")))
    }

    #[test]
    fn the_quick_way_takes_what_a_java_client_writes() {
        let (quick, scanned) = both(JAVA);
        assert_eq!(quick, scanned.ok());
        assert!(quick.is_some());
    }

    #[test]
    fn the_quick_way_never_reads_anything_else_than_the_scanner() {
        let no_remark = GO.replace("\"remark\":\"\",", "");
        let odd = [
            r#"{"code":1,"extFields":{}}"#,
            r#"{"code":1,"code":2,"flag":007}"#,
            r#"{"code":1,"extFields":{"a":"1"},"extFields":{"b":"2"}}"#,
            r#"{"code":12345678901234567890}"#,
            r#"{"code":1.0} "#,
            r#"{"code":1,"language":"12"}"#,
            r#"{"code":1,"extFields":{"a\n":"\\\""}}"#,
            "{}",
            "{\"code\"",
        ];
        let mut taken = 0;
        for text in [JAVA, GO, &no_remark].into_iter().chain(odd) {
            let mut check = |text: &str| {
                let (quick, scanned) = both(text);
                if let Some(quick) = quick {
                    taken += 1;
                    assert_eq!(Ok(quick), scanned, "{text}");
                }
            };
            check(text);
            for at in 0..text.len() {
                check(&text[..at]);
                check(&format!("{}{}", &text[..at], &text[at + 1..]));
                for byte in [
                    "\"", "\\", "{", "}", ",", ":", " ", "0", "-", "u", "\u{1}", "é",
                ] {
                    check(&format!("{}{byte}{}", &text[..at], &text[at + 1..]));
                    check(&format!("{}{byte}{}", &text[..at], &text[at..]));
                }
            }
        }
        assert!(taken > 1000, "{taken}");
    }
}
