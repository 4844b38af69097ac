//! Back end B of the log's disk port: one thread with blocking writes from the locked ring.
//!
//! Blocking direct writes are completed in the thread that waits for them; asynchronous ones on
//! ext4 need a kernel worker, which a busy core can delay by hundreds of milliseconds.
//! Invariant: commands are carried out in the order given, one at a time.

use std::io;
use std::sync::Arc;

use super::worker::{Desk, Port};
use super::{FileId, sys};
use crate::io::real::RealFile;
use crate::memory::Mapping;
use crate::mesh::BellRinger;

/// Bytes of a ring to write.
pub(super) struct Source {
    pub(super) memory: Arc<Mapping>,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) file_offset: u64,
}

/// One write (with `source`) and/or flush.
pub(super) struct WriteCommand {
    pub(super) file: Arc<RealFile>,
    pub(super) file_id: FileId,
    pub(super) source: Option<Source>,
    pub(super) flush: bool,
    pub(super) token: u64,
}

/// What became of it.
pub(super) struct WriteOutcome {
    pub(super) file_id: FileId,
    pub(super) wrote: bool,
    pub(super) token: u64,
    pub(super) result: io::Result<()>,
}

/// The core's side of the writer thread.
pub(super) type WriterPort = Port<WriteCommand, WriteOutcome>;

/// Starts the thread `disk-log-N`.
pub(super) fn start(core: usize, ringer: BellRinger) -> io::Result<WriterPort> {
    Port::start(format!("disk-log-{core}"), ringer, serve)
}

fn serve(mut desk: Desk<WriteCommand, WriteOutcome>) {
    while let Some(command) = desk.next() {
        let result = carry_out(&command);
        let WriteCommand {
            file,
            file_id,
            source,
            token,
            ..
        } = command;
        // The core may hand the file to the closing thread as soon as it sees the outcome.
        drop(file);
        desk.report(WriteOutcome {
            file_id,
            wrote: source.is_some(),
            token,
            result,
        });
    }
}

fn carry_out(command: &WriteCommand) -> io::Result<()> {
    if let Some(source) = &command.source {
        sys::write_from_mapping(
            command.file.file(),
            &source.memory,
            source.offset,
            source.len,
            source.file_offset,
        )?;
    }
    if command.flush {
        command.file.sync_data()
    } else {
        Ok(())
    }
}
