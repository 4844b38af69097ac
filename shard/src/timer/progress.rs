//! How far the timed messages of a shard have been delivered.
//!
//! Messages are delivered in the order of their keys: time due, then place in the log. So one key
//! says it all, but for messages that came later with an earlier time. A step is therefore a claim
//! with a bound: every timed message in front of a log position, up to a key, is done. The
//! delivered record itself makes the claim, for its own position and its origin's key; that is why
//! a crash can neither lose a delivery's progress nor keep progress without the delivery.
//!
//! Invariant: steps rise in position and fall in key, so that none says what a later one says too.

/// Steps kept at most. More would take that many steps of the clock back within minutes; the
/// oldest is given up then, and what it alone spoke for may be delivered once more after a crash.
const STEPS_MAX: usize = 256;

/// The place of a timed message in the order of delivery.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    /// When it is due, in milliseconds.
    pub(crate) due_ms: i64,
    /// Position of its record in the log.
    pub(crate) position: u64,
}

impl Key {
    /// In front of every message.
    pub(crate) const FIRST: Self = Self {
        due_ms: i64::MIN,
        position: 0,
    };
    /// Behind every message.
    pub(crate) const LAST: Self = Self {
        due_ms: i64::MAX,
        position: u64::MAX,
    };
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Step {
    before: u64,
    done: Key,
}

/// The claims of a shard's log.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Progress {
    steps: Vec<Step>,
}

impl Progress {
    /// Takes the claim that messages in front of `before` are done up to `done`. Claims come in
    /// the order of the log.
    pub(crate) fn advance(&mut self, before: u64, done: Key) {
        while self.steps.last().is_some_and(|step| step.done <= done) {
            self.steps.pop();
        }
        if self.steps.len() >= STEPS_MAX {
            self.steps.remove(0);
        }
        self.steps.push(Step { before, done });
    }

    /// Whether a message at a position with a key is done.
    pub(crate) fn covers(&self, position: u64, key: Key) -> bool {
        let at = self.steps.partition_point(|step| step.before <= position);
        self.steps.get(at).is_some_and(|step| key <= step.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(due_ms: i64, position: u64) -> Key {
        Key { due_ms, position }
    }

    #[test]
    fn a_claim_speaks_only_for_messages_in_front_of_it() {
        let mut progress = Progress::default();
        progress.advance(1_000, key(50, 10));
        assert!(progress.covers(10, key(50, 10)));
        assert!(progress.covers(999, key(49, 999)));
        assert!(!progress.covers(11, key(50, 11)));
        assert!(!progress.covers(1_000, key(20, 1_000)), "came later");
    }

    #[test]
    fn an_earlier_time_sent_later_does_not_take_back_what_was_done() {
        let mut progress = Progress::default();
        progress.advance(1_000, key(500, 10));
        // The clock went back; a message of position 1500 was due at 90.
        progress.advance(2_000, key(90, 1_500));
        assert!(progress.covers(10, key(500, 10)));
        assert!(progress.covers(1_500, key(90, 1_500)));
        assert!(!progress.covers(1_600, key(91, 1_600)));
        progress.advance(3_000, key(600, 2_500));
        assert_eq!(progress.steps.len(), 1, "one claim says it all again");
        assert!(progress.covers(1_600, key(91, 1_600)));
    }

    #[test]
    fn claims_agree_with_the_plain_list_of_them() {
        let mut random = 7u64;
        let mut below = |n: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % n
        };
        let mut progress = Progress::default();
        let mut plain = Vec::new();
        for step in 1..400u64 {
            let done = key(below(60) as i64, below(step * 10));
            progress.advance(step * 10, done);
            plain.push((step * 10, done));
            for _ in 0..20 {
                let position = below(4_000);
                let asked = key(below(60) as i64, position);
                let wanted = plain
                    .iter()
                    .any(|(before, done)| position < *before && asked <= *done);
                assert_eq!(progress.covers(position, asked), wanted);
            }
        }
    }
}
