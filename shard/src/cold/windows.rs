//! Windows: pieces of files that jobs read from, each in a slot of the driver's pool.
//!
//! Invariant: what a window holds was valid on disk when it was loaded, and a window that turns out
//! to be too short for a job is loaded again or fails it; it never keeps a job going round.

use std::io;

use super::{COLD_SLOT_BYTES, Halt, Job, LOADS_IN_FLIGHT_MAX, Load, Need, WINDOW, Window};
use crate::io::BLOCK_BYTES;
use crate::runtime::{ColdRead, Driver, FileId, SlotId};
use crate::shard::{Shard, TokenKind};

impl Shard {
    /// Loads the window a job needs, or lets it wait for a load that is under way.
    pub(super) fn load<D: Driver>(&mut self, job: &mut Job, need: Need, driver: &mut D) {
        job.waits_for_place = false;
        job.lacks_slot = false;
        let under_way = self.cold.loads.iter().find(|load| {
            load.file == need.file
                && load.index == need.index
                && !load.dropped
                && load.valid >= need.valid
        });
        if let Some(load) = under_way {
            job.waits_for = Some(load.number);
            return;
        }
        if self.cold.loads.len() >= LOADS_IN_FLIGHT_MAX {
            // Any load that ends lets this job try again.
            job.waits_for_place = true;
            job.waits_for = self.cold.loads.first().map(|load| load.number);
            return;
        }
        let stale = self
            .cold
            .windows
            .iter()
            .position(|window| window.file == need.file && window.index == need.index);
        if let Some(at) = stale {
            let window = self.cold.windows.swap_remove(at);
            driver.release_slot(window.slot);
        }
        let number = self.cold.next_load;
        let read = ColdRead {
            file: need.file,
            file_offset: need.index * WINDOW,
            len: COLD_SLOT_BYTES,
            token: self.token(TokenKind::Window, number),
        };
        if self.cold.neighbour_waits || !driver.cold_read(read) {
            self.evict(driver);
            if self.cold.neighbour_waits || !driver.cold_read(read) {
                job.lacks_slot = true;
                return;
            }
        }
        self.cold.next_load += 1;
        self.counters.cold_windows += 1;
        let Need {
            file,
            index,
            valid,
            least,
        } = need;
        self.cold.loads.push(Load {
            number,
            file,
            index,
            valid,
            least,
            dropped: false,
        });
        job.waits_for = Some(number);
    }

    /// Tells whether a neighbour of the same core found every slot taken and is the next to get
    /// one. Slots belong to all shards of a core and a shard keeps what it has read, so a neighbour
    /// would never get one: a shard gives up the window it used least lately, and takes no slot
    /// until the neighbour has had its turn. Whether a slot was given.
    pub fn share_cold_slots<D: Driver>(&mut self, driver: &mut D, neighbour_waits: bool) -> bool {
        self.cold.neighbour_waits = neighbour_waits;
        let had = self.cold.windows.len();
        if neighbour_waits && !self.lacks_cold_slot() {
            self.evict(driver);
        }
        self.cold.windows.len() < had
    }

    fn evict<D: Driver>(&mut self, driver: &mut D) {
        let oldest = self
            .cold
            .windows
            .iter()
            .enumerate()
            .min_by_key(|(_, window)| window.used);
        if let Some(at) = oldest.map(|(at, _)| at) {
            let window = self.cold.windows.swap_remove(at);
            driver.release_slot(window.slot);
        }
    }

    pub(crate) fn on_window<D: Driver>(
        &mut self,
        driver: &mut D,
        number: u64,
        slot: SlotId,
        result: io::Result<usize>,
    ) {
        let at = self
            .cold
            .loads
            .iter()
            .position(|load| load.number == number);
        let Some(load) = at.map(|at| self.cold.loads.swap_remove(at)) else {
            driver.release_slot(slot);
            return;
        };
        let failure = match &result {
            // The file has been dropped: the next look finds nothing of it.
            _ if load.dropped => None,
            Ok(bytes) if *bytes < load.least => Some(format!(
                "short read: {bytes} of at least {} bytes",
                load.least
            )),
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        for job in &mut self.cold.active {
            if job.waits_for == Some(number) {
                job.waits_for = None;
                if !job.waits_for_place {
                    job.failed.clone_from(&failure);
                }
            }
        }
        match result {
            Ok(bytes) if !load.dropped && failure.is_none() => {
                self.cold.tick += 1;
                let (file, index, used) = (load.file, load.index, self.cold.tick);
                let valid = load.valid.min(bytes);
                self.cold.windows.push(Window {
                    file,
                    index,
                    slot,
                    valid,
                    used,
                });
            }
            _ => driver.release_slot(slot),
        }
    }

    /// Forgets windows of a file that is about to be dropped.
    pub(crate) fn forget_windows<D: Driver>(&mut self, driver: &mut D, file: FileId) {
        let windows = &mut self.cold.windows;
        while let Some(at) = windows.iter().position(|window| window.file == file) {
            let window = windows.swap_remove(at);
            driver.release_slot(window.slot);
        }
        for load in &mut self.cold.loads {
            load.dropped |= load.file == file;
        }
    }

    /// The loaded bytes from an offset of a file to the end of its window, or what is needed.
    /// `limit` is the first byte of the file that is not valid on disk.
    pub(super) fn loaded<'d, D: Driver>(
        &mut self,
        driver: &'d D,
        file: FileId,
        offset: u64,
        limit: u64,
    ) -> Result<&'d [u8], Halt> {
        let (index, inside) = (offset / WINDOW, (offset % WINDOW) as usize);
        let valid = limit.saturating_sub(index * WINDOW).min(WINDOW) as usize;
        let least = (inside + BLOCK_BYTES).min(valid);
        self.cold.tick += 1;
        let tick = self.cold.tick;
        let window =
            self.cold.windows.iter_mut().find(|window| {
                window.file == file && window.index == index && window.valid >= least
            });
        match window {
            Some(window) => {
                window.used = tick;
                Ok(driver
                    .slot(window.slot)
                    .get(inside..window.valid)
                    .unwrap_or_default())
            }
            None => Err(Halt::Need(Need {
                file,
                index,
                valid,
                least,
            })),
        }
    }
}
