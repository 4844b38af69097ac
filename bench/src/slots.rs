//! Owns the messages in flight: which slot an opaque belongs to.
//!
//! Invariant: an opaque is never taken for another message: it holds the slot's number and a
//! generation that changes with every use. All opaques have ten digits, so that a pre-encoded frame
//! can be patched.

/// Most slots: what the slot part of an opaque can hold.
pub const IN_FLIGHT_MAX: usize = 1 << 16;
/// Smallest opaque.
pub const OPAQUE_MIN: u32 = 1_000_000_000;
/// Generations before they repeat, so that the largest opaque still has ten digits and no sign.
const GENERATIONS: u32 = 15_000;

/// One message without an answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct InFlight {
    /// When it was due, in nanoseconds since the run began.
    pub due_ns: u64,
    /// When it was handed to its connection.
    pub sent_ns: u64,
    /// Its number in the run; of a batch that of the first message.
    pub sequence: u64,
    /// The highest offset of its queue acknowledged when it was sent.
    pub behind: i64,
    /// The queue, numbered through all brokers and topics.
    pub queue: usize,
    /// The connection.
    pub link: usize,
    /// Messages in it; more than one in a batch.
    pub count: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    generation: u32,
    message: Option<InFlight>,
}

/// All messages in flight.
#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    limit: usize,
}

impl Slots {
    /// Room for `count` messages.
    pub fn new(count: usize) -> Self {
        let count = count.clamp(1, IN_FLIGHT_MAX);
        Self {
            slots: vec![Slot::default(); count],
            free: (0..count as u32).rev().collect(),
            limit: count,
        }
    }

    /// Allows only so many of them to be taken.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Messages without an answer.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether nothing more can be sent.
    pub fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// Takes a slot and returns its opaque.
    pub fn take(&mut self, message: InFlight) -> Option<u32> {
        let number = self.free.pop()?;
        let slot = self.slots.get_mut(number as usize)?;
        slot.generation = (slot.generation + 1) % GENERATIONS;
        slot.message = Some(message);
        Some(OPAQUE_MIN + (slot.generation << 16) + number)
    }

    /// Gives a slot back; none if the opaque is not in flight.
    pub fn finish(&mut self, opaque: i32) -> Option<InFlight> {
        let value = u32::try_from(opaque).ok()?.checked_sub(OPAQUE_MIN)?;
        let number = value & 0xFFFF;
        let slot = self.slots.get_mut(number as usize)?;
        if slot.generation != value >> 16 {
            return None;
        }
        let message = slot.message.take()?;
        self.free.push(number);
        Some(message)
    }

    /// Takes out everything that waits on one connection, or everything.
    pub fn abandon(&mut self, link: Option<usize>) -> Vec<InFlight> {
        let mut abandoned = Vec::new();
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let here = slot
                .message
                .is_some_and(|m| link.is_none_or(|link| link == m.link));
            if here && let Some(message) = slot.message.take() {
                self.free.push(number as u32);
                abandoned.push(message);
            }
        }
        abandoned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_is_not_taken_for_the_next_message_of_its_slot() {
        let mut slots = Slots::new(1);
        let first = slots
            .take(InFlight {
                sequence: 1,
                ..InFlight::default()
            })
            .unwrap();
        assert!(slots.is_full() && slots.take(InFlight::default()).is_none());
        assert_eq!(slots.finish(first as i32).unwrap().sequence, 1);
        let second = slots
            .take(InFlight {
                sequence: 2,
                ..InFlight::default()
            })
            .unwrap();
        assert!(slots.finish(first as i32).is_none());
        assert_eq!(slots.finish(second as i32).unwrap().sequence, 2);
        assert!(slots.finish(second as i32).is_none());
        assert!(slots.finish(-5).is_none() && slots.finish(3).is_none());
    }

    #[test]
    fn opaques_have_ten_digits_in_every_generation() {
        let mut one = Slots::new(1);
        for _ in 0..2 * GENERATIONS {
            let opaque = one.take(InFlight::default()).unwrap();
            assert_eq!(opaque.to_string().len(), 10);
            assert!(i32::try_from(opaque).is_ok());
            one.finish(opaque as i32).unwrap();
        }
        assert!(i32::try_from(OPAQUE_MIN + ((GENERATIONS - 1) << 16) + 0xFFFF).is_ok());
    }

    #[test]
    fn abandoning_a_connection_leaves_the_others_in_flight() {
        let mut slots = Slots::new(4);
        for link in [0, 1, 0] {
            slots
                .take(InFlight {
                    link,
                    ..InFlight::default()
                })
                .unwrap();
        }
        assert_eq!(slots.abandon(Some(0)).len(), 2);
        assert_eq!(slots.len(), 1);
    }
}
