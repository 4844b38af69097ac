//! Physical offsets: one 63-bit address space for the whole broker.
//!
//! Invariant: the shard number sits in bits 55..63 and the position in that shard's log in bits
//! 0..55, so every physical offset is a positive `i64` that names its shard (DESIGN, decision 3).

/// Bits of a physical offset that hold the position inside one shard's log.
pub const POSITION_BITS: u32 = 55;

/// Shards a broker can have; bounded by the bits above the position in a positive `i64`.
pub const SHARDS_MAX: usize = 256;

/// Largest position in one shard's log (32 PiB).
pub const POSITION_MAX: u64 = (1 << POSITION_BITS) - 1;

/// The physical offset of a position in a shard's log.
#[must_use]
pub fn physical(shard: u16, position: u64) -> i64 {
    debug_assert!(position <= POSITION_MAX);
    ((u64::from(shard) << POSITION_BITS) | (position & POSITION_MAX)) as i64
}

/// Shard and position of a physical offset; `None` for negative numbers.
#[must_use]
pub fn split(physical_offset: i64) -> Option<(u16, u64)> {
    let raw = u64::try_from(physical_offset).ok()?;
    let shard = u16::try_from(raw >> POSITION_BITS).ok()?;
    Some((shard, raw & POSITION_MAX))
}

/// RocketMQ's name of a segment: its start offset in twenty digits.
#[must_use]
pub fn segment_name(shard: u16, position: u64) -> String {
    format!("{:020}", physical(shard, position))
}

/// Shard and start position of a segment name.
#[must_use]
pub fn parse_segment_name(name: &str) -> Option<(u16, u64)> {
    if name.len() != 20 || !name.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    split(name.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_physical_offset_names_its_shard() {
        for shard in [0u16, 1, 2, 255] {
            for position in [0u64, 1, 4096, POSITION_MAX] {
                let offset = physical(shard, position);
                assert!(offset >= 0);
                assert_eq!(split(offset), Some((shard, position)));
            }
        }
        assert_eq!(split(-1), None);
    }

    #[test]
    fn segment_names_are_twenty_digits_and_come_back() {
        let name = segment_name(3, 1 << 30);
        assert_eq!(name.len(), 20);
        assert_eq!(parse_segment_name(&name), Some((3, 1 << 30)));
        assert_eq!(parse_segment_name("abc"), None);
        assert_eq!(parse_segment_name("0000000000000000000x"), None);
    }
}
