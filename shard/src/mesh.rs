//! The mesh between cores: one bounded single-producer single-consumer ring per ordered pair of
//! cores, and one bell per core.
//!
//! Invariant: a core that went to sleep after its last drain is woken by every later
//! [`MeshEnd::ring_bells`] that follows a push to it. The bell is a three-state word changed only
//! by read-modify-write operations, so that the order of "I pushed" and "I sleep" is total; see
//! [`BellReader::try_sleep`].

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::runtime::sys;

/// Most cores of one mesh.
pub const CORES_MAX: usize = 256;
/// Most messages one ring may hold.
pub const RING_CAPACITY_MAX: usize = 1 << 20;

/// The core runs and nobody has rung since it last woke.
const AWAKE: u32 = 0;
/// The core sleeps (or is about to): the ringer must write the event counter.
const SLEEPING: u32 = 1;
/// Somebody rang: the core must not sleep before it has looked.
const RUNG: u32 = 2;

#[derive(Debug)]
struct Bell {
    state: AtomicU32,
    rings: AtomicU64,
    event: File,
}

/// The ringing side of a core's bell; cheap to clone.
#[derive(Clone, Debug)]
pub struct BellRinger(Arc<Bell>);

/// The sleeping side of a core's bell; one per core, given to its driver.
#[derive(Debug)]
pub struct BellReader(Arc<Bell>);

/// A bell on its own (worker threads use it without a mesh).
pub fn bell() -> io::Result<(BellRinger, BellReader)> {
    let bell = Arc::new(Bell {
        state: AtomicU32::new(AWAKE),
        rings: AtomicU64::new(0),
        event: sys::event_counter()?,
    });
    Ok((BellRinger(Arc::clone(&bell)), BellReader(bell)))
}

impl BellRinger {
    /// Tells the core that there is something to look at; wakes it if it sleeps. Everything this
    /// thread did before is visible to the core after [`BellReader::awake`].
    pub fn ring(&self) {
        // A swap, not a load: only a read-modify-write is certain to be ordered against the
        // sleeper's own.
        if self.0.state.swap(RUNG, Ordering::AcqRel) == SLEEPING {
            self.0.rings.fetch_add(1, Ordering::Relaxed);
            // The counter cannot be full (it would take 2^64 - 2 rings), so this does not fail.
            let _ = io::Write::write(&mut &self.0.event, &1u64.to_ne_bytes());
        }
    }
}

impl BellReader {
    /// Another ringer for this bell.
    #[must_use]
    pub fn ringer(&self) -> BellRinger {
        BellRinger(Arc::clone(&self.0))
    }

    /// Announces sleep. `false`: somebody has rung since the last [`BellReader::awake`]; do not
    /// sleep. `true`: any ring from now on makes [`BellReader::descriptor`] readable.
    #[must_use]
    pub fn try_sleep(&self) -> bool {
        self.0
            .state
            .compare_exchange(AWAKE, SLEEPING, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Whether somebody has rung; for spinning before sleep.
    #[must_use]
    pub fn was_rung(&self) -> bool {
        self.0.state.load(Ordering::Relaxed) == RUNG
    }

    /// Ends sleep. Must be followed by a look at everything that rings announce.
    pub fn awake(&self) {
        // The swap takes the ringer's pushes with it (acquire) before they are looked for.
        self.0.state.swap(AWAKE, Ordering::AcqRel);
    }

    /// The event counter to wait for.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }

    /// How many times a ringer had to make a system call.
    #[must_use]
    pub fn wakes(&self) -> u64 {
        self.0.rings.load(Ordering::Relaxed)
    }
}

/// One core's end of the mesh.
#[derive(Debug)]
pub struct MeshEnd<M> {
    core: usize,
    /// By target core; `None` at this core's own place.
    outgoing: Vec<Option<Outgoing<M>>>,
    /// By source core; `None` at this core's own place.
    incoming: Vec<Option<rtrb::Consumer<M>>>,
    reader: Option<BellReader>,
    /// Where the next drain starts, so that no source starves under a limit.
    next_source: usize,
    full_count: u64,
}

#[derive(Debug)]
struct Outgoing<M> {
    producer: rtrb::Producer<M>,
    ringer: BellRinger,
    must_ring: bool,
}

/// Builds meshes.
#[derive(Debug)]
pub struct Mesh;

impl Mesh {
    /// Builds the ends for a number of cores, every ring of the same capacity.
    pub fn build<M: Send>(cores: usize, capacity: usize) -> io::Result<Vec<MeshEnd<M>>> {
        if cores == 0 || cores > CORES_MAX || capacity == 0 || capacity > RING_CAPACITY_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a mesh of {cores} cores with rings of {capacity} is not possible: at most \
                     {CORES_MAX} cores, {RING_CAPACITY_MAX} messages"
                ),
            ));
        }
        let mut ends = Vec::with_capacity(cores);
        let mut ringers = Vec::with_capacity(cores);
        for core in 0..cores {
            let (ringer, reader) = bell()?;
            ringers.push(ringer);
            ends.push(MeshEnd {
                core,
                outgoing: (0..cores).map(|_| None).collect(),
                incoming: (0..cores).map(|_| None).collect(),
                reader: Some(reader),
                next_source: 0,
                full_count: 0,
            });
        }
        for from in 0..cores {
            for (to, ringer) in ringers.iter().enumerate().filter(|(to, _)| *to != from) {
                let (producer, consumer) = rtrb::RingBuffer::new(capacity);
                let ringer = ringer.clone();
                let outgoing = Outgoing {
                    producer,
                    ringer,
                    must_ring: false,
                };
                if let Some(place) = ends.get_mut(from).and_then(|e| e.outgoing.get_mut(to)) {
                    *place = Some(outgoing);
                }
                if let Some(place) = ends.get_mut(to).and_then(|e| e.incoming.get_mut(from)) {
                    *place = Some(consumer);
                }
            }
        }
        Ok(ends)
    }
}

impl<M> MeshEnd<M> {
    /// This end's core.
    #[must_use]
    pub fn core(&self) -> usize {
        self.core
    }

    /// Number of cores in the mesh.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.outgoing.len()
    }

    /// Takes the bell, for the driver; `None` the second time.
    pub fn take_bell(&mut self) -> Option<BellReader> {
        self.reader.take()
    }

    /// Puts a message into the ring to another core; gives it back when that ring is full (or the
    /// target is this core or none). Nothing is woken before [`MeshEnd::ring_bells`].
    pub fn push(&mut self, to: usize, message: M) -> Result<(), M> {
        let Some(Some(outgoing)) = self.outgoing.get_mut(to) else {
            return Err(message);
        };
        match outgoing.producer.push(message) {
            Ok(()) => {
                outgoing.must_ring = true;
                Ok(())
            }
            Err(rtrb::PushError::Full(message)) => {
                self.full_count += 1;
                // The consumer may sleep on a full ring if nobody rang since; never leave it so.
                outgoing.must_ring = true;
                Err(message)
            }
        }
    }

    /// Free places towards a core right now.
    #[must_use]
    pub fn room(&self, to: usize) -> usize {
        match self.outgoing.get(to) {
            Some(Some(outgoing)) => outgoing.producer.slots(),
            _ => 0,
        }
    }

    /// Wakes the cores that were pushed to since the last call and sleep.
    pub fn ring_bells(&mut self) {
        for outgoing in self.outgoing.iter_mut().flatten() {
            if std::mem::take(&mut outgoing.must_ring) {
                outgoing.ringer.ring();
            }
        }
    }

    /// Takes up to `max` messages, round-robin over the sources; returns how many.
    pub fn drain(&mut self, mut take: impl FnMut(usize, M), max: usize) -> usize {
        let sources = self.incoming.len();
        let share = (max / sources.max(1)).max(1);
        let mut taken = 0;
        let mut idle = 0;
        while taken < max && idle < sources {
            let source = self.next_source;
            self.next_source = if source + 1 < sources { source + 1 } else { 0 };
            let mut from_here = 0;
            if let Some(Some(consumer)) = self.incoming.get_mut(source) {
                while from_here < share && taken < max {
                    let Ok(message) = consumer.pop() else { break };
                    take(source, message);
                    from_here += 1;
                    taken += 1;
                }
            }
            idle = if from_here == 0 { idle + 1 } else { 0 };
        }
        taken
    }

    /// Whether messages wait; a core must not sleep while they do.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        self.incoming
            .iter()
            .flatten()
            .any(|consumer| !consumer.is_empty())
    }

    /// How often a push met a full ring.
    #[must_use]
    pub fn full_count(&self) -> u64 {
        self.full_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn messages_reach_their_core_in_order_and_a_full_ring_gives_them_back() {
        let mut ends = Mesh::build::<(usize, u32)>(3, 4).unwrap();
        for from in [0, 2] {
            for number in 0..4 {
                ends[from].push(1, (from, number)).unwrap();
            }
            assert_eq!(ends[from].push(1, (from, 9)), Err((from, 9)));
            assert_eq!((ends[from].full_count(), ends[from].room(1)), (1, 0));
        }
        assert_eq!(ends[0].push(0, (0, 0)), Err((0, 0)), "no ring to oneself");
        assert_eq!(ends[0].push(7, (0, 0)), Err((0, 0)), "no such core");
        assert!(ends[1].has_pending() && !ends[0].has_pending());
        let mut got = Vec::new();
        assert_eq!(
            ends[1].drain(|from, message| got.push((from, message)), 3),
            3
        );
        assert!(
            got.iter().any(|m| m.0 == 0) && got.iter().any(|m| m.0 == 2),
            "{got:?}"
        );
        assert_eq!(
            ends[1].drain(|from, message| got.push((from, message)), 100),
            5
        );
        assert!(!ends[1].has_pending());
        for from in [0, 2] {
            let numbers: Vec<u32> = got.iter().filter(|m| m.0 == from).map(|m| m.1.1).collect();
            assert_eq!(numbers, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn impossible_meshes_are_refused() {
        for (cores, capacity) in [
            (0, 1),
            (CORES_MAX + 1, 1),
            (2, 0),
            (2, RING_CAPACITY_MAX + 1),
        ] {
            assert!(Mesh::build::<()>(cores, capacity).is_err());
        }
        assert_eq!(Mesh::build::<()>(1, 1).unwrap().len(), 1);
    }

    /// One step of a core or of a pusher in the model of the bell below.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    struct Model {
        state: u32,
        counter: u32,
        /// Messages pushed and not drained.
        pending: u32,
        /// Per pusher: next step (0 push, 1 swap, 2 write if it slept, 3 done) and rounds left.
        pushers: [(u8, u8, bool); 2],
        /// 0 awake swap, 1 drain, 2 try_sleep, 3 asleep, 4 stopped for good.
        core: u8,
    }

    fn successors(model: Model) -> Vec<Model> {
        let mut next = Vec::new();
        for which in 0..model.pushers.len() {
            let mut m = model;
            let (step, rounds, slept) = m.pushers[which];
            m.pushers[which] = match (step, rounds) {
                (_, 0) => continue,
                (0, _) => {
                    m.pending += 1;
                    (1, rounds, false)
                }
                (1, _) => {
                    let before = std::mem::replace(&mut m.state, RUNG);
                    (2, rounds, before == SLEEPING)
                }
                _ => {
                    m.counter += u32::from(slept);
                    (0, rounds - 1, false)
                }
            };
            next.push(m);
        }
        let mut m = model;
        match m.core {
            0 => {
                m.state = AWAKE;
                m.core = 1;
            }
            1 => {
                m.pending = 0;
                m.core = 2;
            }
            2 if m.state == AWAKE => {
                m.state = SLEEPING;
                m.core = 3;
            }
            2 => m.core = 0,
            _ if m.counter > 0 => {
                // The poll fires once per write; the counter itself is not read by the driver.
                m.counter -= 1;
                m.core = 0;
            }
            _ => return next,
        }
        next.push(m);
        next
    }

    #[test]
    fn no_interleaving_of_two_pushers_leaves_the_core_asleep_with_a_message() {
        let start = Model {
            state: AWAKE,
            counter: 0,
            pending: 0,
            pushers: [(0, 3, false); 2],
            core: 0,
        };
        let mut seen = HashSet::from([start]);
        let mut open = vec![start];
        let mut ends = 0;
        while let Some(model) = open.pop() {
            let next = successors(model);
            if next.is_empty() {
                assert_eq!(
                    (model.core, model.pending),
                    (3, 0),
                    "asleep with a message: {model:?}"
                );
                ends += 1;
            }
            open.extend(next.into_iter().filter(|m| seen.insert(*m)));
        }
        assert!(ends > 0 && seen.len() > 100, "{} states", seen.len());
    }

    #[test]
    fn a_sleeper_on_the_descriptor_is_woken_by_every_push_that_it_has_not_seen() {
        const MESSAGES: u64 = 20_000;
        let mut ends = Mesh::build::<u64>(3, 8).unwrap();
        let mut core = ends.remove(0);
        let pushers: Vec<_> = ends
            .into_iter()
            .map(|mut end| {
                std::thread::spawn(move || {
                    for number in 0..MESSAGES {
                        while end.push(0, number).is_err() {
                            end.ring_bells();
                            std::thread::yield_now();
                        }
                        end.ring_bells();
                    }
                })
            })
            .collect();
        let bell = core.take_bell().unwrap();
        assert!(core.take_bell().is_none());
        let mut taken = 0;
        while taken < 2 * MESSAGES {
            bell.awake();
            taken += core.drain(|_, _| {}, 1000) as u64;
            if taken < 2 * MESSAGES && !core.has_pending() && bell.try_sleep() {
                let woken = sys::wait_readable(bell.descriptor(), 10_000).unwrap();
                assert!(woken, "asleep with {taken} of {} taken", 2 * MESSAGES);
                let mut count = [0; 8];
                let _ = io::Read::read(&mut &bell.0.event, &mut count);
            }
        }
        for pusher in pushers {
            pusher.join().unwrap();
        }
    }
}
