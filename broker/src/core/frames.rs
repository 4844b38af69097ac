//! Frames on their way to another core, packed into one message.
//!
//! What one turn sends to a core costs one allocation and one place in the ring for many frames.
//!
//! Invariant: frames leave in the order they came, and no pack grows beyond [`PACK_BYTES_MAX`]
//! unless its only frame does.

/// Bytes of frames in one pack, at most.
pub const PACK_BYTES_MAX: usize = 64 * 1024;

/// Whole frames, each with what the receiver has to know of it.
#[derive(Debug)]
pub struct Frames<T> {
    bytes: Vec<u8>,
    items: Vec<(T, usize)>,
}

impl<T> Frames<T> {
    /// A pack with one frame.
    pub fn one(item: T, frame: &[u8]) -> Self {
        Self {
            bytes: frame.to_vec(),
            items: vec![(item, frame.len())],
        }
    }

    /// Adds a frame; gives the item back when there is no room.
    pub fn push(&mut self, item: T, frame: &[u8]) -> Result<(), T> {
        let held = self.bytes.len();
        if held + frame.len() > PACK_BYTES_MAX {
            return Err(item);
        }
        if self.bytes.capacity() < PACK_BYTES_MAX {
            // A second frame seldom stays alone.
            self.bytes.reserve_exact(PACK_BYTES_MAX - held);
        }
        self.bytes.extend_from_slice(frame);
        self.items.push((item, frame.len()));
        Ok(())
    }

    /// Frames in the pack.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The frames in order.
    pub fn iter(&self) -> impl Iterator<Item = (&T, &[u8])> {
        let mut rest = self.bytes.as_slice();
        self.items.iter().map(move |(item, len)| {
            let (frame, after) = rest.split_at_checked(*len).unwrap_or_default();
            rest = after;
            (item, frame)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_as_they_went_in_and_a_full_pack_takes_no_more() {
        let mut pack = Frames::one(0, &[0; 100]);
        let mut count = 1;
        while pack.push(count, &vec![count as u8; 100 + count]).is_ok() {
            count += 1;
        }
        assert!(count > 200);
        assert_eq!(pack.len(), count);
        for (at, (item, frame)) in pack.iter().enumerate() {
            assert_eq!((*item, frame), (at, vec![at as u8; 100 + at].as_slice()));
        }
        let large = vec![1; 2 * PACK_BYTES_MAX];
        assert_eq!(pack.push(7, &large), Err(7));
        let alone = Frames::one((), &large);
        assert_eq!(alone.iter().next().unwrap().1, large);
    }
}
