//! What this core handed out lately: to whom, of which queue, when. It is what `pinion explain`
//! tells of a message's deliveries without help of clients.
//!
//! Invariant: a note costs no allocation and touches two lines of memory; at most
//! [`DELIVERIES_KEPT_MAX`] are kept, and [`Deliveries::known_since_ms`] says from when on nothing
//! is missing, so that "never" is only said of what is known.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use shard::half::group_hash;
use shard::queue::QueueIndex;

/// Notes one core keeps, 64 bytes each.
pub const DELIVERIES_KEPT_MAX: usize = 1 << 15;
/// Deliveries of neighbouring messages to one client within this time share a note, in
/// milliseconds.
const SHARED_MS_MAX: i64 = 1_000;
/// Places that lead to the newest note of a queue and group.
const NEWEST_PLACES: usize = 1 << 12;
/// Notes told of one message at most, the newest.
pub const DELIVERIES_TOLD_MAX: usize = 16;

/// Messages of one queue that one client got.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
#[repr(align(64))]
pub struct Delivery {
    /// First queue offset.
    pub first: u64,
    /// When the first answer left, in milliseconds.
    pub first_ms: i64,
    /// Hash of the group, see [`group_of`].
    group: u64,
    ip: [u8; 16],
    /// Offsets looked at for the client; a filter may have passed over some of them.
    pub count: u32,
    queue: QueueIndex,
    /// Time from the first to the last answer, in milliseconds.
    pub span_ms: u16,
    shard: u16,
    port: u16,
    /// Whether they were popped.
    pub popped: bool,
}

impl Delivery {
    /// Address of the client.
    #[must_use]
    pub fn client(&self) -> SocketAddr {
        let ip = IpAddr::V6(Ipv6Addr::from(self.ip)).to_canonical();
        SocketAddr::new(ip, self.port)
    }

    fn next(&self) -> u64 {
        self.first + u64::from(self.count)
    }

    fn is_of(&self, queue: (u16, QueueIndex), group: u64) -> bool {
        (self.shard, self.queue) == queue && self.group == group
    }
}

/// The number that stands for a group among deliveries.
#[must_use]
pub fn group_of(group: &str) -> u64 {
    group_hash(group.as_bytes())
}

/// Messages that leave now.
#[derive(Clone, Copy, Debug)]
pub struct HandedOut {
    /// Shard.
    pub shard: u16,
    /// Queue of the shard.
    pub queue: QueueIndex,
    /// See [`group_of`].
    pub group: u64,
    /// First queue offset.
    pub first: u64,
    /// Offsets in a row.
    pub count: u32,
    /// The client.
    pub client: SocketAddr,
    /// Whether they are popped.
    pub popped: bool,
}

/// The notes of one core.
pub struct Deliveries {
    notes: Vec<Delivery>,
    /// Notes made so far.
    made: u64,
    newest: Vec<u32>,
    known_since_ms: i64,
}

impl Deliveries {
    /// No notes yet; memory for all of them is taken and touched now.
    #[must_use]
    pub fn new(now_ms: i64) -> Self {
        Self {
            notes: vec![Delivery::default(); DELIVERIES_KEPT_MAX],
            made: 0,
            newest: vec![0; NEWEST_PLACES],
            known_since_ms: now_ms,
        }
    }

    /// From when on no delivery is missing, in milliseconds.
    #[must_use]
    pub fn known_since_ms(&self) -> i64 {
        self.known_since_ms
    }

    /// The turn's clock is first known after the core is made.
    pub fn begin(&mut self, now_ms: i64) {
        if self.made == 0 && self.known_since_ms == 0 {
            self.known_since_ms = now_ms;
        }
    }

    /// Takes note of messages that leave.
    pub fn note(&mut self, now_ms: i64, out: HandedOut) {
        let place = (out.group ^ u64::from(out.queue).wrapping_mul(0x9e37_79b9_7f4a_7c15)) as usize;
        let Some(newest) = self.newest.get_mut(place % NEWEST_PLACES) else {
            return;
        };
        let ip = match out.client.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        if let Some(last) = self.notes.get_mut(*newest as usize)
            && last.is_of((out.shard, out.queue), out.group)
            && last.next() == out.first
            && (last.ip, last.port, last.popped) == (ip, out.client.port(), out.popped)
            && (0..SHARED_MS_MAX).contains(&(now_ms - last.first_ms))
            && let Some(count) = last.count.checked_add(out.count)
        {
            last.count = count;
            last.span_ms = (now_ms - last.first_ms) as u16;
            return;
        }
        let at = self.made as usize % DELIVERIES_KEPT_MAX;
        let Some(note) = self.notes.get_mut(at) else {
            return;
        };
        if self.made >= DELIVERIES_KEPT_MAX as u64 {
            let lost_ms = note.first_ms + i64::from(note.span_ms) + 1;
            self.known_since_ms = self.known_since_ms.max(lost_ms);
        }
        *note = Delivery {
            first: out.first,
            first_ms: now_ms,
            group: out.group,
            ip,
            count: out.count,
            queue: out.queue,
            span_ms: 0,
            shard: out.shard,
            port: out.client.port(),
            popped: out.popped,
        };
        *newest = at as u32;
        self.made += 1;
    }

    /// Takes note of popped messages, offsets ascending.
    pub fn note_each(&mut self, now_ms: i64, out: HandedOut, offsets: &[u64]) {
        let in_a_row = |a: &u64, b: &u64| a + 1 == *b;
        for row in offsets.chunk_by(in_a_row) {
            let first = row.first().copied().unwrap_or_default();
            let count = row.len() as u32;
            let out = HandedOut {
                first,
                count,
                ..out
            };
            self.note(now_ms, out);
        }
    }

    /// Deliveries of a message to a group, oldest first, and how many there were in all.
    #[must_use]
    pub fn of(&self, queue: (u16, QueueIndex), group: u64, offset: u64) -> (Vec<Delivery>, usize) {
        let made = self.made.min(DELIVERIES_KEPT_MAX as u64) as usize;
        let notes = self.notes.get(..made).unwrap_or_default().iter();
        let mut found: Vec<Delivery> = notes
            .filter(|note| note.is_of(queue, group))
            .filter(|note| (note.first..note.next()).contains(&offset))
            .copied()
            .collect();
        found.sort_by_key(|note| note.first_ms);
        let all = found.len();
        (
            found.split_off(all.saturating_sub(DELIVERIES_TOLD_MAX)),
            all,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out(first: u64, count: u32) -> HandedOut {
        HandedOut {
            shard: 1,
            queue: 7,
            group: group_of("g"),
            first,
            count,
            client: "10.0.0.9:5000".parse().unwrap(),
            popped: false,
        }
    }

    #[test]
    fn a_message_tells_who_got_it_when_and_how_often() {
        let mut kept = Deliveries::new(1_000);
        kept.note(2_000, out(0, 32));
        kept.note(5_000, out(10, 1));
        let (found, all) = kept.of((1, 7), group_of("g"), 10);
        assert_eq!(all, 2);
        assert_eq!((found[0].first_ms, found[1].first_ms), (2_000, 5_000));
        assert_eq!(found[0].client(), "10.0.0.9:5000".parse().unwrap());
        assert_eq!(kept.of((1, 7), group_of("g"), 32).1, 0);
        assert_eq!(kept.of((1, 7), group_of("h"), 10).1, 0);
        assert_eq!(kept.of((0, 7), group_of("g"), 10).1, 0);
        assert_eq!(kept.known_since_ms(), 1_000);
    }

    #[test]
    fn neighbours_within_a_second_share_a_note_and_later_ones_do_not() {
        let mut kept = Deliveries::new(0);
        for offset in 0..100 {
            kept.note(1_000 + offset as i64 * 5, out(offset, 1));
        }
        assert_eq!(kept.made, 1);
        let (found, _) = kept.of((1, 7), group_of("g"), 50);
        assert_eq!((found[0].first_ms, found[0].span_ms), (1_000, 495));
        kept.note(2_000, out(100, 1));
        kept.note(2_001, out(100, 1));
        let other = HandedOut {
            client: "10.0.0.8:5000".parse().unwrap(),
            ..out(101, 1)
        };
        kept.note(2_002, other);
        assert_eq!(kept.made, 4);
        assert_eq!(kept.of((1, 7), group_of("g"), 100).1, 2);
    }

    #[test]
    fn popped_messages_with_holes_are_noted_without_the_holes() {
        let mut kept = Deliveries::new(0);
        kept.note_each(1_000, out(0, 0), &[3, 4, 7]);
        let is_known = |offset| kept.of((1, 7), group_of("g"), offset).1 == 1;
        assert_eq!([3, 4, 5, 7].map(is_known), [true, true, false, true]);
    }

    #[test]
    fn what_was_overwritten_is_not_called_never() {
        let mut kept = Deliveries::new(500);
        for number in 0..=DELIVERIES_KEPT_MAX as u64 {
            kept.note(1_000 + number as i64, out(number * 10, 1));
        }
        assert_eq!(kept.of((1, 7), group_of("g"), 0).1, 0);
        assert_eq!(kept.of((1, 7), group_of("g"), 10).1, 1);
        assert_eq!(kept.known_since_ms(), 1_001);
    }
}
