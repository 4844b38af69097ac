//! What the two header targets share: the form alone differs.

use wire::frame::{FRAME_BYTES_MAX, Frame, Serialization, split};
use wire::header::{ExtValue, decode, encode_request_as};

/// Decodes a header and requires that what was decoded survives being written.
pub fn survives(data: &[u8], serialization: Serialization) {
    let frame = Frame {
        serialization,
        header: data,
        body: b"",
    };
    let Ok(header) = decode(&frame) else {
        return;
    };
    let fields: Vec<_> = header
        .ext
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let ext: Vec<_> = fields
        .iter()
        .map(|(name, value)| (name.as_str(), ExtValue::Str(value)))
        .collect();
    let mut bytes = Vec::new();
    encode_request_as(
        &mut bytes,
        serialization,
        header.code,
        header.opaque,
        header.flag,
        header.language,
        header.version,
        &ext,
        b"",
    );
    let Ok(Some((frame, _))) = split(&bytes, FRAME_BYTES_MAX) else {
        // Escapes can make a header longer than a frame may be.
        assert!(bytes.len() > FRAME_BYTES_MAX);
        return;
    };
    let again = decode(&frame).expect("a header just written");
    assert_eq!(
        (again.code, again.opaque, again.flag),
        (header.code, header.opaque, header.flag)
    );
    assert_eq!(again.version, header.version);
    assert!(again.ext.iter().eq(header.ext.iter()));
    for (name, value) in fields.iter().rev().take(8) {
        let last = header.ext.get(name).expect("a field just listed");
        assert!(
            last.to_cow() == *value || fields.iter().filter(|(known, _)| known == name).count() > 1
        );
    }
}
