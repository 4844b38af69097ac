//! Files, log writes and cold reads of the io_uring driver.
//!
//! Invariants: a file is closed, on the auxiliary thread, only when nothing is in flight on it; a
//! flush that belongs to a write is submitted after that write has completed; a cold slot belongs
//! to the kernel or to the core, never to both.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::types::FsyncFlags;
use io_uring::{opcode, types};

use super::ring::{Kind, Ring, UserData};
use super::{ColdRead, Completion, FileId, LogPort, RingId, RingWrite, SlotId};
use crate::io::FileJob;
use crate::io::real::{RealFile, RealStorage};
use crate::memory::{AlignedBuffer, LockRefused, LockedRing, Mapping};
use crate::mesh::BellRinger;
use crate::runtime::COLD_SLOT_BYTES;
use crate::runtime::auxiliary::{self, AuxiliaryCommand, AuxiliaryPort};
use crate::runtime::writer::{self, Source, WriteCommand, WriterPort};

/// Most rings one driver can register.
pub const RINGS_MAX: usize = 256;
/// Most cold slots of one driver.
pub const COLD_SLOTS_MAX: usize = 1024;
/// Files of one driver at most; the number's other bits are a generation.
pub const FILES_MAX: u32 = 1 << FILE_INDEX_BITS;
const FILE_INDEX_BITS: u32 = 20;
/// The kernel registers no larger buffer than this.
const FIXED_BYTES_MAX: usize = 1 << 30;
/// Place of the cold slots in the table of registered buffers; the rings come before it.
const SLOTS_PLACE: u16 = RINGS_MAX as u16;

/// A place in the table of files. A file's name is its place and a generation, so that a name kept
/// too long does not reach another file.
#[derive(Default)]
struct FilePlace {
    generation: u32,
    open: Option<OpenFile>,
}

struct OpenFile {
    file: Arc<RealFile>,
    in_flight: u32,
    dropping: bool,
}

struct RegisteredRing {
    memory: Arc<Mapping>,
    fixed: bool,
}

/// A write or a bare flush under way in the ring.
struct Operation {
    file: FileId,
    token: u64,
    len: usize,
    flush: bool,
    wrote: bool,
    /// Keeps the bytes alive.
    _memory: Option<Arc<Mapping>>,
}

#[derive(Clone, Copy)]
struct Slot {
    /// The read it serves, while it is not free.
    reading: Option<ColdRead>,
    lent: bool,
}

pub(super) struct DiskConfig {
    pub(super) core: usize,
    pub(super) storage: RealStorage,
    pub(super) log_port: LogPort,
    pub(super) cold_slots: usize,
    pub(super) lock_memory: bool,
    pub(super) ringer: BellRinger,
}

pub(super) struct Disk {
    files: Vec<FilePlace>,
    free_files: Vec<u32>,
    rings: Vec<RegisteredRing>,
    fixed_table: bool,
    operations: Vec<Option<Operation>>,
    free_operations: Vec<u32>,
    writes_in_flight: usize,
    writer: Option<WriterPort>,
    auxiliary: AuxiliaryPort,
    slot_memory: AlignedBuffer,
    slots_fixed: bool,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
}

type Ready = VecDeque<Completion>;

fn unknown(what: &str, number: u32) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{what} {number} is not open here"),
    )
}

impl Disk {
    pub(super) fn new(ring: &Ring, config: DiskConfig) -> io::Result<Disk> {
        let count = config.cold_slots.clamp(1, COLD_SLOTS_MAX);
        let slot_memory = AlignedBuffer::new(count * COLD_SLOT_BYTES, config.lock_memory)?;
        let submitter = ring.uring.submitter();
        let places = u32::from(SLOTS_PLACE) + 1;
        // Without the table (memlock limit, old kernel) plain writes and reads do the same work.
        let fixed_table = submitter.register_buffers_sparse(places).is_ok();
        let slots_fixed =
            fixed_table && fix(ring, SLOTS_PLACE, slot_memory.pointer(), slot_memory.len()).is_ok();
        let writer = match config.log_port {
            LogPort::Uring => None,
            LogPort::Thread => Some(writer::start(config.core, config.ringer.clone())?),
        };
        let auxiliary = auxiliary::start(config.core, config.storage, config.ringer)?;
        Ok(Disk {
            files: Vec::new(),
            free_files: Vec::new(),
            rings: Vec::new(),
            fixed_table,
            operations: Vec::new(),
            free_operations: Vec::new(),
            writes_in_flight: 0,
            writer,
            auxiliary,
            slot_memory,
            slots_fixed,
            slots: vec![
                Slot {
                    reading: None,
                    lent: false
                };
                count
            ],
            free_slots: (0..count as u32).rev().collect(),
        })
    }

    pub(super) fn slots_locked(&self) -> Result<(), LockRefused> {
        self.slot_memory.locked()
    }

    pub(super) fn ring_is_fixed(&self, ring: RingId) -> bool {
        self.rings
            .get(ring.0 as usize)
            .is_some_and(|ring| ring.fixed)
    }

    /// Whether writes or flushes are with the kernel or the writer thread.
    pub(super) fn writes_under_way(&self) -> bool {
        self.writes_in_flight > 0
    }

    pub(super) fn adopt(&mut self, file: RealFile) -> FileId {
        let index = match self.free_files.pop() {
            Some(index) => index,
            None => {
                self.files.push(FilePlace::default());
                (self.files.len() - 1) as u32
            }
        };
        debug_assert!(index < FILES_MAX, "more than {FILES_MAX} files on one core");
        let open = OpenFile {
            file: Arc::new(file),
            in_flight: 0,
            dropping: false,
        };
        let mut generation = 0;
        if let Some(place) = self.files.get_mut(index as usize) {
            place.generation = place.generation.wrapping_add(1);
            place.open = Some(open);
            generation = place.generation;
        }
        FileId((generation << FILE_INDEX_BITS) | index)
    }

    fn place(&mut self, id: FileId) -> Option<&mut FilePlace> {
        let place = self.files.get_mut((id.0 & (FILES_MAX - 1)) as usize)?;
        let current = (place.generation << FILE_INDEX_BITS) >> FILE_INDEX_BITS;
        (current == id.0 >> FILE_INDEX_BITS).then_some(place)
    }

    pub(super) fn drop_file(&mut self, id: FileId) {
        if let Some(open) = self.place(id).and_then(|place| place.open.as_mut()) {
            open.dropping = true;
            self.close_if_idle(id);
        }
    }

    fn close_if_idle(&mut self, id: FileId) {
        let idle = |open: &mut OpenFile| open.dropping && open.in_flight == 0;
        if let Some(open) = self.place(id).and_then(|place| place.open.take_if(idle)) {
            self.free_files.push(id.0 & (FILES_MAX - 1));
            self.auxiliary.submit(AuxiliaryCommand::Close(open.file));
        }
    }

    /// The file for one more operation.
    fn begin_on(&mut self, id: FileId) -> io::Result<Arc<RealFile>> {
        match self.place(id).and_then(|place| place.open.as_mut()) {
            Some(open) if !open.dropping => {
                open.in_flight += 1;
                Ok(Arc::clone(&open.file))
            }
            _ => Err(unknown("file", id.0)),
        }
    }

    fn end_on(&mut self, id: FileId) {
        if let Some(open) = self.place(id).and_then(|place| place.open.as_mut()) {
            open.in_flight = open.in_flight.saturating_sub(1);
        }
        self.close_if_idle(id);
    }

    fn descriptor(&mut self, id: FileId) -> Option<types::Fd> {
        let open = self.place(id)?.open.as_ref()?;
        Some(types::Fd(open.file.file().as_raw_fd()))
    }

    pub(super) fn register_ring(&mut self, ring: &Ring, locked: &LockedRing) -> io::Result<RingId> {
        let place = self.rings.len();
        if place >= RINGS_MAX {
            return Err(io::Error::other(format!(
                "more than {RINGS_MAX} rings on one core"
            )));
        }
        let memory = Arc::clone(locked.mapping());
        let fixed = self.fixed_table
            && memory.bytes() <= FIXED_BYTES_MAX
            && fix(ring, place as u16, memory.data_pointer(), memory.bytes()).is_ok();
        self.rings.push(RegisteredRing { memory, fixed });
        Ok(RingId(place as u32))
    }

    pub(super) fn write(&mut self, ring: &mut Ring, write: RingWrite, ready: &mut Ready) {
        if let Err(error) = self.start_write(ring, write) {
            let token = write.token;
            ready.push_back(Completion::Written {
                token,
                result: Err(error),
            });
        }
    }

    fn start_write(&mut self, ring: &mut Ring, write: RingWrite) -> io::Result<()> {
        let registered = self
            .rings
            .get(write.ring.0 as usize)
            .ok_or_else(|| unknown("ring", write.ring.0))?;
        let (memory, fixed) = (Arc::clone(&registered.memory), registered.fixed);
        let inside = write
            .ring_offset
            .checked_add(write.len)
            .is_some_and(|e| e <= memory.bytes());
        let len = u32::try_from(write.len)
            .ok()
            .filter(|_| inside)
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!(
                        "{} bytes at {} are outside the ring",
                        write.len, write.ring_offset
                    ),
                )
            })?;
        let file = self.begin_on(write.file)?;
        self.writes_in_flight += 1;
        if let Some(writer) = &mut self.writer {
            writer.submit(WriteCommand {
                file,
                file_id: write.file,
                source: Some(Source {
                    memory,
                    offset: write.ring_offset,
                    len: write.len,
                    file_offset: write.file_offset,
                }),
                flush: write.flush,
                token: write.token,
            });
            return Ok(());
        }
        let descriptor = types::Fd(file.file().as_raw_fd());
        // SAFETY: the range was checked to lie inside the mapping, which the operation keeps.
        let start = unsafe { memory.data_pointer().add(write.ring_offset) }.cast_const();
        let operation = self.begin_operation(Operation {
            file: write.file,
            token: write.token,
            len: write.len,
            flush: write.flush,
            wrote: true,
            _memory: Some(memory),
        });
        let entry = if fixed {
            opcode::WriteFixed::new(descriptor, start, len, write.ring.0 as u16)
                .offset(write.file_offset)
                .build()
        } else {
            opcode::Write::new(descriptor, start, len)
                .offset(write.file_offset)
                .build()
        };
        ring.push(entry.user_data(UserData::new(Kind::Write, 0, operation).0));
        Ok(())
    }

    pub(super) fn flush(&mut self, ring: &mut Ring, id: FileId, token: u64, ready: &mut Ready) {
        let file = match self.begin_on(id) {
            Ok(file) => file,
            Err(error) => {
                ready.push_back(Completion::Flushed {
                    token,
                    result: Err(error),
                });
                return;
            }
        };
        self.writes_in_flight += 1;
        if let Some(writer) = &mut self.writer {
            writer.submit(WriteCommand {
                file,
                file_id: id,
                source: None,
                flush: true,
                token,
            });
            return;
        }
        let operation = self.begin_operation(Operation {
            file: id,
            token,
            len: 0,
            flush: true,
            wrote: false,
            _memory: None,
        });
        push_fsync(ring, types::Fd(file.file().as_raw_fd()), operation);
    }

    fn begin_operation(&mut self, operation: Operation) -> u32 {
        match self.free_operations.pop() {
            Some(index) => {
                if let Some(place) = self.operations.get_mut(index as usize) {
                    *place = Some(operation);
                }
                index
            }
            None => {
                self.operations.push(Some(operation));
                (self.operations.len() - 1) as u32
            }
        }
    }

    pub(super) fn on_write(&mut self, ring: &mut Ring, index: u32, result: i32, ready: &mut Ready) {
        let Some(Some(operation)) = self.operations.get(index as usize) else {
            return;
        };
        let (file, flush) = (operation.file, operation.flush);
        let outcome = match usize::try_from(result) {
            Ok(count) if count == operation.len => Ok(()),
            Ok(count) => Err(io::Error::new(
                io::ErrorKind::WriteZero,
                format!("{count} of {} bytes were written", operation.len),
            )),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        if outcome.is_ok()
            && flush
            && let Some(descriptor) = self.descriptor(file)
        {
            push_fsync(ring, descriptor, index);
            return;
        }
        self.end_operation(index, outcome, ready);
    }

    pub(super) fn on_write_flush(&mut self, index: u32, result: i32, ready: &mut Ready) {
        let outcome = if result < 0 {
            Err(io::Error::from_raw_os_error(-result))
        } else {
            Ok(())
        };
        self.end_operation(index, outcome, ready);
    }

    fn end_operation(&mut self, index: u32, result: io::Result<()>, ready: &mut Ready) {
        let Some(place) = self.operations.get_mut(index as usize) else {
            return;
        };
        let Some(Operation {
            file, token, wrote, ..
        }) = place.take()
        else {
            return;
        };
        self.free_operations.push(index);
        self.finish_write(file, wrote, token, result, ready);
    }

    fn finish_write(
        &mut self,
        file: FileId,
        wrote: bool,
        token: u64,
        result: io::Result<()>,
        ready: &mut Ready,
    ) {
        self.writes_in_flight = self.writes_in_flight.saturating_sub(1);
        self.end_on(file);
        ready.push_back(if wrote {
            Completion::Written { token, result }
        } else {
            Completion::Flushed { token, result }
        });
    }

    pub(super) fn cold_read(&mut self, ring: &mut Ring, read: ColdRead, ready: &mut Ready) -> bool {
        let Some(index) = self.free_slots.pop() else {
            return false;
        };
        let place = SlotId(index);
        let started = self.start_cold_read(ring, read, index);
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.reading = started.is_ok().then_some(read);
            slot.lent = started.is_err();
        }
        if let Err(error) = started {
            let token = read.token;
            ready.push_back(Completion::ColdRead {
                token,
                slot: place,
                result: Err(error),
            });
        }
        true
    }

    fn start_cold_read(&mut self, ring: &mut Ring, read: ColdRead, slot: u32) -> io::Result<()> {
        if read.len > COLD_SLOT_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a cold read of {} bytes is larger than {COLD_SLOT_BYTES}",
                    read.len
                ),
            ));
        }
        let file = self.begin_on(read.file)?;
        let descriptor = types::Fd(file.file().as_raw_fd());
        // SAFETY: slot < number of slots, each COLD_SLOT_BYTES long in `slot_memory`.
        let start = unsafe {
            self.slot_memory
                .pointer()
                .add(slot as usize * COLD_SLOT_BYTES)
        };
        let len = read.len as u32;
        let entry = if self.slots_fixed {
            opcode::ReadFixed::new(descriptor, start, len, SLOTS_PLACE)
                .offset(read.file_offset)
                .build()
        } else {
            opcode::Read::new(descriptor, start, len)
                .offset(read.file_offset)
                .build()
        };
        ring.push(entry.user_data(UserData::new(Kind::ColdRead, 0, slot).0));
        Ok(())
    }

    pub(super) fn on_cold_read(&mut self, index: u32, result: i32, ready: &mut Ready) {
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return;
        };
        let Some(read) = slot.reading.take() else {
            return;
        };
        slot.lent = true;
        self.end_on(read.file);
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        ready.push_back(Completion::ColdRead {
            token: read.token,
            slot: SlotId(index),
            result,
        });
    }

    pub(super) fn slot(&self, slot: SlotId) -> &[u8] {
        let index = slot.0 as usize;
        match self.slots.get(index) {
            Some(place) if place.lent => {
                let start = index * COLD_SLOT_BYTES;
                self.slot_memory
                    .get(start..start + COLD_SLOT_BYTES)
                    .unwrap_or_default()
            }
            _ => &[],
        }
    }

    pub(super) fn release_slot(&mut self, slot: SlotId) {
        match self.slots.get_mut(slot.0 as usize) {
            Some(place) if place.lent => {
                place.lent = false;
                self.free_slots.push(slot.0);
            }
            _ => debug_assert!(false, "cold slot {} was not on loan", slot.0),
        }
    }

    pub(super) fn file_job(&mut self, job: FileJob<RealStorage>, token: u64) {
        self.auxiliary.submit(AuxiliaryCommand::Job(job, token));
    }

    /// Takes what the helper threads have finished.
    pub(super) fn collect_outcomes(&mut self, ready: &mut Ready) {
        while let Some(done) = self.writer.as_mut().and_then(WriterPort::take) {
            self.finish_write(done.file_id, done.wrote, done.token, done.result, ready);
        }
        while let Some(done) = self.auxiliary.take() {
            let Some((token, result)) = done else {
                continue;
            };
            let result = result.map(|outcome| outcome.adopted(|file| self.adopt(file)));
            ready.push_back(Completion::Job { token, result });
        }
    }
}

fn push_fsync(ring: &mut Ring, descriptor: types::Fd, operation: u32) {
    let entry = opcode::Fsync::new(descriptor)
        .flags(FsyncFlags::DATASYNC)
        .build();
    ring.push(entry.user_data(UserData::new(Kind::WriteFlush, 0, operation).0));
}

/// Registers memory at a place of the table.
fn fix(ring: &Ring, place: u16, start: *mut u8, bytes: usize) -> io::Result<()> {
    let range = libc::iovec {
        iov_base: start.cast(),
        iov_len: bytes,
    };
    // SAFETY: the memory stays mapped for as long as the ring lives: the driver holds the mapping
    // (rings) or the buffer (slots) and drops its ring first.
    unsafe {
        ring.uring
            .submitter()
            .register_buffers_update(u32::from(place), &[range], None)
    }
}
