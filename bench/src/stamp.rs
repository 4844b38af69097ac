//! Owns the first bytes of every body: which run it is of and which message it is.
//!
//! Invariant: a body is known as ours only by the whole stamp, so foreign messages in a topic are
//! counted as foreign.

/// Bytes of the stamp.
pub const STAMP_BYTES: usize = 32;
const MAGIC: &[u8; 8] = b"PINBENCH";

/// Which message of which run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The run.
    pub run: u64,
    /// The message's number in it.
    pub sequence: u64,
    /// When it was due, in nanoseconds since 1970.
    pub born_ns: u64,
}

impl Stamp {
    /// Its bytes.
    pub fn bytes(self) -> [u8; STAMP_BYTES] {
        let mut bytes = [0; STAMP_BYTES];
        let parts = [
            *MAGIC,
            self.run.to_be_bytes(),
            self.sequence.to_be_bytes(),
            self.born_ns.to_be_bytes(),
        ];
        for (chunk, part) in bytes.chunks_exact_mut(8).zip(parts) {
            chunk.copy_from_slice(&part);
        }
        bytes
    }

    /// Reads it from the start of a body.
    pub fn read(body: &[u8]) -> Option<Self> {
        let (magic, rest) = body.split_first_chunk::<8>()?;
        let (run, rest) = rest.split_first_chunk::<8>()?;
        let (sequence, rest) = rest.split_first_chunk::<8>()?;
        let born_ns = rest.first_chunk::<8>()?;
        (magic == MAGIC).then(|| Self {
            run: u64::from_be_bytes(*run),
            sequence: u64::from_be_bytes(*sequence),
            born_ns: u64::from_be_bytes(*born_ns),
        })
    }
}

/// A body of `bytes` that does not compress: stamp first, then noise that depends on the run only.
pub fn body(run: u64, bytes: usize) -> Vec<u8> {
    let stamp = Stamp {
        run,
        sequence: 0,
        born_ns: 0,
    };
    let mut body = stamp.bytes().to_vec();
    let mut state = run | 1;
    while body.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        body.extend_from_slice(&state.to_be_bytes());
    }
    body.truncate(bytes.max(STAMP_BYTES));
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_back_and_foreign_bodies_have_none() {
        let stamp = Stamp {
            run: 7,
            sequence: u64::MAX,
            born_ns: 9,
        };
        assert_eq!(Stamp::read(&stamp.bytes()), Some(stamp));
        assert_eq!(Stamp::read(b"hello"), None);
        assert_eq!(Stamp::read(&[0; 64]), None);
        assert_eq!(body(3, 100).len(), 100);
        assert_eq!(
            Stamp::read(&body(3, 100)),
            Some(Stamp {
                run: 3,
                sequence: 0,
                born_ns: 0
            })
        );
    }
}
