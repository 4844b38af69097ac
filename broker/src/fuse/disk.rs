//! The fuse of one shard inside its broker: whether its disk hangs.
//!
//! A log write that takes longer than a limit opens it, the end of that write closes it. There is
//! no term and no trial: the shard is looked at in every turn of its core, and serves again in the
//! turn in which its disk does.
//!
//! Invariant: a core that was itself away (stopped, or kept from its CPU) blames no disk before it
//! has looked for the ends of writes once more.

/// A flush in the background counts when it is this many times over the limit: nobody waits for it,
/// and much may be flushed at once.
pub const FLUSH_ALLOWANCE: u64 = 5;
/// Sends that wait for a disk that hangs are told to go elsewhere when the oldest write is this
/// many times over the limit: late, because what they stored may come twice then; early enough that
/// a client has most of its three seconds left.
pub const GIVE_BACK_AFTER: u64 = 5;
/// Time between two openings that are told in the log, in microseconds.
const TELL_US: u64 = 10_000_000;

/// What waits for a shard's disk; times in monotonic microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskWait {
    /// Since when the oldest log write does.
    pub write_since_us: Option<u64>,
    /// Since when a flush in the background does.
    pub flush_since_us: Option<u64>,
}

impl DiskWait {
    /// What is over its time first: since when it waits, and when its time is over.
    fn first(self, limit_us: u64) -> Option<(u64, u64)> {
        let write = self.write_since_us.map(|since| (since, since + limit_us));
        let flush_us = limit_us.saturating_mul(FLUSH_ALLOWANCE);
        let flush = self.flush_since_us.map(|since| (since, since + flush_us));
        write.into_iter().chain(flush).min_by_key(|(_, due)| *due)
    }
}

/// A change of a shard's disk, or of the write that it holds up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskChange {
    /// Since when the oldest write waits; none: the disk works again.
    pub hangs_since_us: Option<u64>,
    /// How long the oldest write waits or had waited, in milliseconds.
    pub age_ms: u64,
    /// Whether it belongs into the log: a disk that flaps does not fill it.
    pub is_told: bool,
}

/// Whether the disk of a shard hangs.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFuse {
    hangs_since_us: Option<u64>,
    looked_us: u64,
    grace_until_us: u64,
    told_us: Option<u64>,
    is_told: bool,
    transitions: u64,
}

impl DiskFuse {
    /// Since when the disk hangs, if it does.
    #[must_use]
    pub fn hangs_since_us(&self) -> Option<u64> {
        self.hangs_since_us
    }

    /// When sends that wait for it are to go elsewhere, if it hangs.
    #[must_use]
    pub fn gives_back_at_us(&self, limit_us: u64) -> Option<u64> {
        let since_us = self.hangs_since_us?;
        Some(since_us + limit_us.saturating_mul(GIVE_BACK_AFTER))
    }

    /// Times it began or ended to hang.
    #[must_use]
    pub fn transitions(&self) -> u64 {
        self.transitions
    }

    /// Looks at what waits for the disk now, after the ends of writes were taken. A limit of 0 is
    /// no limit.
    pub fn look(&mut self, now_us: u64, wait: DiskWait, limit_us: u64) -> Option<DiskChange> {
        let looked_us = std::mem::replace(&mut self.looked_us, now_us);
        let over = wait.first(limit_us).filter(|(_, due)| now_us > *due);
        let over = over.filter(|_| limit_us > 0);
        match (self.hangs_since_us, over) {
            (None, Some((since_us, due_us))) => {
                // Woken in time it would have looked right when the time was over.
                if looked_us < due_us && now_us > due_us + limit_us / 2 {
                    self.grace_until_us = now_us + limit_us / 4;
                }
                (now_us >= self.grace_until_us).then(|| self.open(now_us, since_us))
            }
            (Some(since_us), None) => Some(self.close(now_us, since_us)),
            // The oldest write has ended, and the next one waits too long already.
            (Some(before_us), Some((since_us, _))) if since_us != before_us => {
                self.hangs_since_us = Some(since_us);
                Some(self.change(now_us, since_us, false))
            }
            _ => None,
        }
    }

    /// When it has to look again, in monotonic microseconds.
    #[must_use]
    pub fn deadline_us(&self, wait: DiskWait, limit_us: u64) -> Option<u64> {
        if limit_us == 0 || self.hangs_since_us.is_some() {
            return None;
        }
        let (_, due_us) = wait.first(limit_us)?;
        Some(self.grace_until_us.max(due_us + 1))
    }

    fn open(&mut self, now_us: u64, since_us: u64) -> DiskChange {
        self.hangs_since_us = Some(since_us);
        self.transitions += 1;
        self.is_told = self.told_us.is_none_or(|told| now_us >= told + TELL_US);
        if self.is_told {
            self.told_us = Some(now_us);
        }
        self.change(now_us, since_us, self.is_told)
    }

    fn close(&mut self, now_us: u64, since_us: u64) -> DiskChange {
        self.hangs_since_us = None;
        self.transitions += 1;
        self.change(now_us, since_us, self.is_told)
    }

    fn change(&self, now_us: u64, since_us: u64, is_told: bool) -> DiskChange {
        DiskChange {
            hangs_since_us: self.hangs_since_us,
            age_ms: now_us.saturating_sub(since_us) / 1000,
            is_told,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT_US: u64 = 200_000;

    fn write(since_us: u64) -> DiskWait {
        DiskWait {
            write_since_us: Some(since_us),
            flush_since_us: None,
        }
    }

    /// Looks as a core does that sleeps no longer than it is told to.
    fn run(
        fuse: &mut DiskFuse,
        from_us: u64,
        to_us: u64,
        wait: DiskWait,
    ) -> Vec<(u64, DiskChange)> {
        let (mut now_us, mut changes) = (from_us, Vec::new());
        while now_us <= to_us {
            changes.extend(
                fuse.look(now_us, wait, LIMIT_US)
                    .map(|change| (now_us, change)),
            );
            let next_us = fuse.deadline_us(wait, LIMIT_US).unwrap_or(u64::MAX);
            assert!(next_us > now_us, "a core that spins");
            now_us = next_us.min(now_us + 1_000_000);
        }
        changes
    }

    #[test]
    fn a_write_over_the_limit_opens_it_at_once_and_its_end_closes_it() {
        let mut fuse = DiskFuse::default();
        let changes = run(&mut fuse, 1_000_000, 1_500_000, write(1_000_000));
        let [(at_us, change)] = changes[..] else {
            panic!("{changes:?}");
        };
        assert_eq!(at_us, 1_200_001);
        assert_eq!(change.hangs_since_us, Some(1_000_000));
        assert_eq!((change.age_ms, change.is_told), (200, true));
        let change = fuse.look(4_000_000, DiskWait::default(), LIMIT_US);
        let change = change.expect("it works again");
        assert_eq!((change.hangs_since_us, change.age_ms), (None, 3_000));
        assert_eq!(fuse.transitions(), 2);
        assert_eq!(fuse.hangs_since_us(), None);
    }

    #[test]
    fn writes_below_the_limit_and_a_limit_of_zero_change_nothing() {
        let mut fuse = DiskFuse::default();
        for step in 0..1_000 {
            let since_us = 1_000_000 + step * 150_000;
            assert_eq!(
                run(&mut fuse, since_us, since_us + 150_000, write(since_us)),
                []
            );
        }
        let old = write(1);
        assert_eq!(fuse.look(900_000_000, old, 0), None);
        assert_eq!(fuse.deadline_us(old, 0), None);
    }

    #[test]
    fn a_limit_taken_away_closes_it() {
        let mut fuse = DiskFuse::default();
        assert_eq!(
            run(&mut fuse, 1_000_000, 1_300_000, write(1_000_000)).len(),
            1
        );
        let change = fuse.look(1_400_000, write(1_000_000), 0);
        assert_eq!(change.expect("a change").hangs_since_us, None);
    }

    #[test]
    fn a_core_that_was_away_blames_no_disk_before_it_looked_again() {
        let mut fuse = DiskFuse::default();
        assert_eq!(fuse.look(1_000_000, write(990_000), LIMIT_US), None);
        // Stopped for ten seconds; the end of the write is found a turn later.
        assert_eq!(fuse.look(11_000_000, write(990_000), LIMIT_US), None);
        let again_us = fuse
            .deadline_us(write(990_000), LIMIT_US)
            .expect("looks again");
        assert!((11_000_001..=11_050_000).contains(&again_us), "{again_us}");
        assert_eq!(fuse.look(11_000_100, DiskWait::default(), LIMIT_US), None);
        assert_eq!(fuse.transitions(), 0);
        // If it never ends, that is soon seen.
        let stuck = write(12_000_000);
        assert_eq!(fuse.look(21_000_000, stuck, LIMIT_US), None);
        assert!(fuse.look(21_050_000, stuck, LIMIT_US).is_some());
    }

    #[test]
    fn the_age_is_that_of_the_oldest_write_not_of_the_whole_trouble() {
        let mut fuse = DiskFuse::default();
        assert_eq!(
            run(&mut fuse, 1_000_000, 1_300_000, write(1_000_000)).len(),
            1
        );
        let change = fuse.look(1_500_000, write(1_250_000), LIMIT_US);
        let change = change.expect("another write");
        assert_eq!(change.hangs_since_us, Some(1_250_000));
        assert_eq!((change.age_ms, change.is_told), (250, false));
        assert_eq!(fuse.transitions(), 1);
        assert_eq!(fuse.look(1_500_001, write(1_250_000), LIMIT_US), None);
    }

    #[test]
    fn a_flush_in_the_background_has_more_time() {
        let mut fuse = DiskFuse::default();
        let wait = DiskWait {
            write_since_us: None,
            flush_since_us: Some(1_000_000),
        };
        let changes = run(&mut fuse, 1_000_000, 3_000_000, wait);
        assert_eq!(changes.first().map(|(at_us, _)| *at_us), Some(2_000_001));
    }

    #[test]
    fn a_flapping_disk_does_not_fill_the_log() {
        let mut fuse = DiskFuse::default();
        let mut told = 0;
        for round in 0..100 {
            let since_us = 1_000_000 + round * 300_000;
            let changes = run(&mut fuse, since_us, since_us + 250_000, write(since_us));
            told += changes.iter().filter(|(_, change)| change.is_told).count();
            let end = fuse.look(since_us + 299_000, DiskWait::default(), LIMIT_US);
            told += usize::from(end.expect("an end").is_told);
        }
        assert_eq!(told, 6, "three pairs in half a minute");
        assert_eq!(fuse.transitions(), 200);
    }

    proptest! {
        /// Writes that begin and end at random under a core that sleeps as long as it may: it opens
        /// for exactly those that take too long, in time, and is closed whenever none does.
        #[test]
        fn it_hangs_exactly_while_a_write_is_over_its_time(
            writes in prop::collection::vec((0_u64..400_000, 1_u64..900_000), 1..60)
        ) {
            let (mut fuse, mut now_us) = (DiskFuse::default(), 1_000_000);
            let mut expected = 0;
            for (pause_us, took_us) in writes {
                prop_assert_eq!(run(&mut fuse, now_us, now_us + pause_us, DiskWait::default()), []);
                let since_us = now_us + pause_us;
                let changes = run(&mut fuse, since_us, since_us + took_us, write(since_us));
                now_us = since_us + took_us;
                let is_over = took_us > LIMIT_US;
                prop_assert_eq!(changes.len(), usize::from(is_over));
                if let Some((at_us, change)) = changes.first() {
                    prop_assert_eq!(*at_us, since_us + LIMIT_US + 1);
                    prop_assert_eq!(change.hangs_since_us, Some(since_us));
                }
                let end = fuse.look(now_us, DiskWait::default(), LIMIT_US);
                prop_assert_eq!(end.is_some(), is_over);
                prop_assert_eq!(fuse.hangs_since_us(), None);
                expected += 2 * u64::from(is_over);
                prop_assert_eq!(fuse.transitions(), expected);
            }
        }

        /// A core that wakes at random never blames a disk whose writes all end in time.
        #[test]
        fn a_core_away_for_long_never_blames_a_disk_that_ends_its_writes(
            looks in prop::collection::vec((1_u64..5_000_000, 1_u64..150_000), 1..60)
        ) {
            let (mut fuse, mut now_us) = (DiskFuse::default(), 10_000_000);
            fuse.look(now_us, DiskWait::default(), LIMIT_US);
            for (away_us, age_us) in looks {
                // It leaves a young write behind and finds its end only after the first look.
                let wait = write(now_us - age_us);
                prop_assert_eq!(fuse.look(now_us, wait, LIMIT_US), None);
                if away_us + age_us < LIMIT_US * 2 {
                    continue;
                }
                now_us += away_us;
                prop_assert_eq!(fuse.look(now_us, wait, LIMIT_US), None);
                now_us += 10;
                prop_assert_eq!(fuse.look(now_us, DiskWait::default(), LIMIT_US), None);
            }
            prop_assert_eq!(fuse.transitions(), 0);
        }
    }
}
