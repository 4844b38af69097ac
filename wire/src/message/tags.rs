//! Owns the hash of tags that queue units carry and consumers filter by.
//!
//! Invariant: the hash is that of a Java string, over UTF-16 code units.

/// The hash of a Java string.
pub fn java_hash(text: &str) -> i32 {
    let step = |hash: i32, unit: u16| hash.wrapping_mul(31).wrapping_add(i32::from(unit));
    text.encode_utf16().fold(0, step)
}

/// The code of a message's tags: 0 without tags.
pub fn tags_code(tags: Option<&str>) -> i64 {
    tags.map_or(0, |tags| i64::from(java_hash(tags)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_java() {
        assert_eq!(java_hash("A"), 65);
        assert_eq!(java_hash("TagA"), 2_598_919);
        assert_eq!(java_hash("hello"), 99_162_322);
        assert_eq!(java_hash("TopicTest#key1"), -1_655_984_460);
        // One character outside the basic plane is two code units: D83D DE00.
        assert_eq!(java_hash("😀"), 0xD83D * 31 + 0xDE00);
        assert_eq!((tags_code(None), tags_code(Some(""))), (0, 0));
    }
}
