//! Owns the bodies the suites send: each carries a number and filler computed from it.
//!
//! Invariant: a body is accepted only when every byte is the one its number demands, so a body
//! mixed up with another or cut short cannot pass.

/// A small seeded generator; the suites print their seed so that a failure can be run again.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Seeded from `TEST_SEED`, or from the clock; prints which.
    pub fn from_env() -> Self {
        let clock = std::time::UNIX_EPOCH
            .elapsed()
            .map_or(1, |time| time.as_nanos() as u64);
        let seed = crate::env_number("TEST_SEED", clock);
        eprintln!("TEST_SEED={seed}");
        Self::new(seed)
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }
}

/// The body of message `number`, at least 16 bytes, its length being part of what it says.
pub fn body(number: u64, bytes: usize) -> Vec<u8> {
    assert!(bytes >= 16, "a body has room for its number and its length");
    let mut out = Vec::with_capacity(bytes);
    out.extend(number.to_be_bytes());
    out.extend((bytes as u64).to_be_bytes());
    let mut random = Random::new(number);
    while out.len() < bytes {
        let word = random.word().to_be_bytes();
        let room = bytes - out.len();
        out.extend(&word[..room.min(8)]);
    }
    out
}

/// The number of a body made by [`body`], when every byte of it is right.
pub fn number(bytes: &[u8]) -> Option<u64> {
    let number = u64::from_be_bytes(*bytes.first_chunk::<8>()?);
    let length = u64::from_be_bytes(*bytes.get(8..)?.first_chunk::<8>()?);
    (length == bytes.len() as u64 && body(number, bytes.len()) == bytes).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_gives_its_number_back_and_no_other() {
        let mut bytes = body(42, 100);
        assert_eq!(number(&bytes), Some(42));
        bytes[99] ^= 1;
        assert_eq!(number(&bytes), None);
        assert_eq!(number(&body(42, 100)[..99]), None);
    }
}
