//! The simulator is itself tested: that it forgets what it may forget, keeps what it must keep,
//! tears, lies and repeats itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::*;
use crate::io::sim::{Fault, Operation, SECTOR_BYTES};
use crate::io::{JobOutcome, OpenMode, Storage, StoreFile};
use crate::memory::RingSpec;
use crate::runtime::{CloseReason, ColdRead, Completion, Driver, RingId, RingWrite};

const DIR: &str = "/store";

fn machine(seed: u64) -> SimMachine {
    let machine = SimMachine::new(SimConfig {
        seed,
        ..SimConfig::default()
    });
    machine.storage().create_dirs(Path::new(DIR)).unwrap();
    machine
}

fn path(name: &str) -> PathBuf {
    Path::new(DIR).join(name)
}

/// The next completion; virtual time passes as needed.
fn next(driver: &mut SimDriver) -> Option<Completion> {
    for _ in 0..100 {
        if let Some(completion) = driver.next() {
            return Some(completion);
        }
        driver.wait(None);
    }
    None
}

struct Rig {
    driver: SimDriver,
    ring: LockedRing,
    ring_id: RingId,
    file: FileId,
}

/// A driver with a ring and an open, durable, empty file.
fn rig(machine: &SimMachine) -> Rig {
    let mut driver = machine.driver();
    let opened = LockedRing::open(RingSpec {
        path: None,
        bytes: 1 << 20,
        lock: false,
    })
    .unwrap();
    let ring_id = driver.register_ring(&opened.ring).unwrap();
    let job = FileJob::PrepareSegment {
        path: path("segment"),
        recycled: None,
        bytes: 1 << 20,
        zero_first_bytes: 1 << 16,
    };
    driver.file_job(job, 7);
    let Some(Completion::Job {
        token: 7,
        result: Ok(JobOutcome::File(file)),
    }) = next(&mut driver)
    else {
        panic!("no segment");
    };
    Rig {
        driver,
        ring: opened.ring,
        ring_id,
        file,
    }
}

impl Rig {
    fn write(&mut self, block: u64, fill: u8, flush: bool, token: u64) {
        self.ring.slice_mut(block * 4096, 4096).fill(fill);
        self.driver.write(RingWrite {
            ring: self.ring_id,
            ring_offset: block as usize * 4096,
            len: 4096,
            file: self.file,
            file_offset: block * 4096,
            flush,
            token,
        });
    }
    fn finish(&mut self, count: usize) -> Vec<(u64, io::Result<()>)> {
        let mut done = Vec::new();
        while done.len() < count {
            match next(&mut self.driver) {
                Some(
                    Completion::Written { token, result } | Completion::Flushed { token, result },
                ) => done.push((token, result)),
                other => panic!("{other:?}"),
            }
        }
        done
    }
}

fn content(machine: &SimMachine, blocks: usize) -> Vec<u8> {
    let file = machine
        .storage()
        .open(&path("segment"), OpenMode::Read)
        .unwrap();
    let mut bytes = vec![0; blocks * 4096];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

#[test]
fn what_was_flushed_survives_every_power_loss_and_the_rest_is_torn_somewhere() {
    let (mut kept, mut lost, mut torn) = (0, 0, 0);
    for seed in 0..200 {
        let machine = machine(seed);
        let mut rig = rig(&machine);
        rig.write(0, 1, true, 1);
        rig.write(1, 1, false, 2);
        rig.finish(2);
        rig.write(1, 2, false, 3);
        rig.finish(1);
        rig.write(2, 3, false, 4);
        machine.crash(Crash::PowerLoss);
        let bytes = content(&machine, 3);
        assert!(
            bytes[..4096].iter().all(|b| *b == 1),
            "seed {seed} lost a flushed write"
        );
        let values: BTreeSet<u8> = bytes[4096..8192].iter().copied().collect();
        assert!(values.iter().all(|v| *v <= 2), "seed {seed}: {values:?}");
        match (values.len(), values.first()) {
            (1, Some(2)) => kept += 1,
            (1, Some(0)) => lost += 1,
            _ => torn += 1,
        }
        for sector in bytes[4096..].chunks(SECTOR_BYTES) {
            assert!(sector.iter().all(|b| *b == sector[0]), "a sector is torn");
        }
    }
    assert!(
        kept > 10 && lost > 10 && torn > 10,
        "{kept} kept, {lost} lost, {torn} torn"
    );
}

#[test]
fn a_kill_keeps_what_the_kernel_has_taken_and_the_ring() {
    let mut landed = 0;
    for seed in 0..50 {
        let machine = machine(seed);
        let mut rig = rig(&machine);
        let ring = machine.open_ring("shard-0", 8192).unwrap().ring;
        ring.format([1; 16], 2, 0);
        rig.write(0, 1, false, 1);
        rig.finish(1);
        rig.write(1, 2, false, 2);
        machine.crash(Crash::Kill);
        let bytes = content(&machine, 2);
        assert!(bytes[..4096].iter().all(|b| *b == 1));
        let second = bytes[4096];
        assert!(
            bytes[4096..].iter().all(|b| *b == second),
            "half a write after a kill"
        );
        landed += usize::from(second == 2);
        // The dead driver does nothing any more.
        rig.write(5, 9, true, 3);
        assert!(next(&mut rig.driver).is_none());
        drop((rig, ring));
        let again = machine.open_ring("shard-0", 8192).unwrap();
        assert!(again.existed && again.ring.header().epoch() == 2);
        drop(again);
        machine.crash(Crash::PowerLoss);
        assert!(!machine.open_ring("shard-0", 8192).unwrap().existed);
    }
    assert!((5..45).contains(&landed), "{landed} of 50 landed");
}

#[test]
fn a_flush_covers_only_what_had_landed_when_it_began() {
    let mut lost = 0;
    for seed in 0..100 {
        let machine = machine(seed);
        let mut rig = rig(&machine);
        rig.write(0, 1, false, 1);
        rig.driver.flush(rig.file, 2);
        rig.finish(2);
        machine.crash(Crash::PowerLoss);
        lost += usize::from(content(&machine, 1)[0] == 0);
    }
    assert!(lost > 10, "a flush beside a write covered it: {lost}");
}

#[test]
fn writes_in_flight_end_in_any_order() {
    let mut orders = BTreeSet::new();
    for seed in 0..20 {
        let machine = machine(seed);
        let mut rig = rig(&machine);
        for token in 0..4 {
            rig.write(token, 1, false, token);
        }
        let order: Vec<u64> = rig.finish(4).into_iter().map(|(token, _)| token).collect();
        orders.insert(order);
    }
    assert!(orders.len() > 5, "{orders:?}");
}

#[test]
fn planned_faults_hit_the_operation_they_are_for() {
    let machine = machine(3);
    let mut rig = rig(&machine);
    let storage = machine.storage();
    let plan = |operation, skip, times, effect| {
        let path_contains = Some("segment".to_owned());
        storage.plan(Fault {
            operation,
            path_contains,
            skip,
            times,
            effect,
        });
    };
    plan(Operation::Write, 1, 1, Effect::Fail(libc::EIO));
    for token in 0..3 {
        rig.write(token, 1, false, token);
    }
    let mut done = rig.finish(3);
    done.sort_by_key(|(token, _)| *token);
    let failed: Vec<u64> = done.iter().filter(|d| d.1.is_err()).map(|d| d.0).collect();
    assert_eq!(failed, [1]);
    assert_eq!(
        done[1].1.as_ref().unwrap_err().raw_os_error(),
        Some(libc::EIO)
    );

    plan(Operation::Flush, 0, 1, Effect::Fail(libc::EIO));
    rig.write(4, 1, true, 10);
    assert!(rig.finish(1)[0].1.is_err());

    plan(Operation::Write, 0, 1, Effect::Short);
    rig.write(5, 5, false, 11);
    assert!(rig.finish(1)[0].1.is_err());
    let bytes = content(&machine, 6);
    assert_eq!((bytes[5 * 4096], bytes[5 * 4096 + 2048]), (5, 0));

    plan(Operation::Write, 0, 1, Effect::Hang);
    rig.write(6, 6, false, 12);
    assert!(next(&mut rig.driver).is_none());
    assert_eq!((machine.held(), machine.release_held()), (1, 1));
    assert!(rig.finish(1)[0].1.is_ok());

    plan(Operation::Read, 0, 1, Effect::Stale);
    let read = ColdRead {
        file: rig.file,
        file_offset: 6 * 4096,
        len: 4096,
        token: 1,
    };
    for expected in [0, 6] {
        assert!(rig.driver.cold_read(read));
        let Some(Completion::ColdRead { slot, result, .. }) = next(&mut rig.driver) else {
            panic!()
        };
        assert_eq!(
            (result.unwrap(), rig.driver.slot(slot)[0]),
            (4096, expected)
        );
        rig.driver.release_slot(slot);
    }

    plan(Operation::Write, 0, 1, Effect::PowerOff);
    rig.write(7, 7, true, 13);
    rig.write(8, 7, true, 14);
    assert!(rig.finish(2).iter().all(|(_, result)| result.is_err()));
    assert!(storage.open(&path("segment"), OpenMode::Read).is_err());
    machine.crash(Crash::PowerLoss);
    assert!(storage.open(&path("segment"), OpenMode::Read).is_ok());
}

#[test]
fn a_frozen_disk_ends_nothing_until_it_thaws() {
    let machine = machine(4);
    let mut rig = rig(&machine);
    machine.set_frozen(true);
    rig.write(0, 1, true, 1);
    let from = machine.now().monotonic_us;
    assert!(next(&mut rig.driver).is_none());
    assert!(
        machine.now().monotonic_us > from + 1_000_000,
        "time stands still"
    );
    machine.set_frozen(false);
    assert!(rig.finish(1)[0].1.is_ok());
}

#[test]
fn a_lying_flush_is_found_out_by_a_power_loss() {
    let mut lost = 0;
    for seed in 0..40 {
        let machine = machine(seed);
        let mut rig = rig(&machine);
        machine.storage().set_lying_flush(true);
        rig.write(0, 1, true, 1);
        assert!(rig.finish(1)[0].1.is_ok());
        machine.crash(Crash::PowerLoss);
        lost += usize::from(content(&machine, 1)[..4096].contains(&0));
    }
    assert!(lost > 5, "{lost}");
}

#[test]
fn names_survive_only_with_their_directory_synced() {
    let (mut created, mut renamed) = (0, 0);
    for seed in 0..60 {
        let machine = machine(seed);
        let storage = machine.storage();
        storage.write_file(&path("settings"), b"old").unwrap();
        storage.write_file(&path("settings"), b"new!").unwrap();
        storage
            .open(&path("fresh"), OpenMode::CreateNew)
            .unwrap()
            .sync()
            .unwrap();
        storage.rename(&path("settings"), &path("moved")).unwrap();
        machine.crash(Crash::PowerLoss);
        let name = if storage.read_file(&path("moved")).is_ok() {
            "moved"
        } else {
            "settings"
        };
        assert_eq!(
            storage.read_file(&path(name)).unwrap(),
            b"new!",
            "seed {seed}"
        );
        renamed += usize::from(name == "moved");
        created += usize::from(storage.open(&path("fresh"), OpenMode::Read).is_ok());
        assert!(renamed <= created, "a later change without an earlier one");
    }
    assert!(
        (5..55).contains(&created) && (5..55).contains(&renamed),
        "{created} {renamed}"
    );
}

#[test]
fn a_write_of_a_settings_file_is_all_or_nothing_wherever_the_power_goes() {
    for step in 0..12 {
        for operation in [
            Operation::Write,
            Operation::Flush,
            Operation::Rename,
            Operation::SyncDir,
        ] {
            let machine = machine(step);
            let storage = machine.storage();
            storage.write_file(&path("settings"), b"old").unwrap();
            let effect = Effect::PowerOff;
            storage.plan(Fault {
                operation,
                path_contains: None,
                skip: 0,
                times: 1,
                effect,
            });
            assert!(storage.write_file(&path("settings"), b"newer").is_err());
            machine.crash(Crash::PowerLoss);
            let bytes = storage.read_file(&path("settings")).unwrap();
            assert!(
                bytes == b"old" || bytes == b"newer",
                "{operation:?}: {bytes:?}"
            );
        }
    }
}

#[test]
fn space_and_read_only_remounts_have_the_kernels_errors() {
    let machine = machine(1);
    let storage = machine.storage();
    storage.set_capacity_bytes(1 << 16);
    let file = storage.open(&path("file"), OpenMode::CreateNew).unwrap();
    let full = file.allocate(1 << 17).unwrap_err();
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    file.allocate(1 << 15).unwrap();
    assert_eq!(
        storage.space(Path::new(DIR)).unwrap().available_bytes,
        1 << 15
    );
    assert_eq!(
        file.write_all_at(&[0; 100], 0).unwrap_err().raw_os_error(),
        Some(libc::EINVAL)
    );
    storage.set_read_only(true);
    let refused = file.write_all_at(&[0; 4096], 0).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
    assert_eq!(file.read_at(&mut [0; 4096], 0).unwrap(), 4096);
    let missing = storage.open(&path("absent"), OpenMode::Read).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
}

#[test]
fn file_jobs_run_on_the_simulated_disk() {
    let machine = machine(2);
    let mut rig = rig(&machine);
    rig.driver.drop_file(rig.file);
    let recycled = Some(path("segment"));
    let job = FileJob::PrepareSegment {
        path: path("next"),
        recycled,
        bytes: 1 << 19,
        zero_first_bytes: 0,
    };
    rig.driver.file_job(job, 1);
    let done = next(&mut rig.driver);
    assert!(matches!(
        done,
        Some(Completion::Job {
            token: 1,
            result: Ok(JobOutcome::File(_))
        })
    ));
    rig.driver
        .file_job(FileJob::Remove { path: path("next") }, 2);
    let done = next(&mut rig.driver);
    assert!(matches!(
        done,
        Some(Completion::Job {
            token: 2,
            result: Ok(JobOutcome::Done)
        })
    ));
    assert!(machine.storage().list(Path::new(DIR)).unwrap().is_empty());
    let call = FileJob::Call(Box::new(|storage: &SimStorage| {
        storage.write_file(&path("x"), b"y")?;
        Ok(JobOutcomeOf::Bytes(storage.read_file(&path("x"))?))
    }));
    rig.driver.file_job(call, 3);
    let Some(Completion::Job {
        result: Ok(JobOutcome::Bytes(bytes)),
        ..
    }) = next(&mut rig.driver)
    else {
        panic!()
    };
    assert_eq!(bytes, b"y");
}

#[test]
fn a_client_gets_its_bytes_back_in_order_and_sees_the_end() {
    let machine = machine(9);
    let mut driver = machine.driver();
    let listener = driver
        .listen("127.0.0.1:0".parse().unwrap(), false)
        .unwrap();
    let address = driver.listener_address(listener).unwrap();
    let client = machine.connect(address).unwrap();
    let content: Vec<u8> = (0..500_000u32).map(|i| (i % 251) as u8).collect();
    client.send(&content);
    client.close();
    let mut got = Vec::new();
    let mut connection = None;
    loop {
        match next(&mut driver).expect("the simulation stands still") {
            Completion::Accepted {
                connection: id,
                peer,
                ..
            } => {
                assert_eq!(Some(peer), client.address());
                connection = Some(id);
            }
            Completion::Received { buffer, .. } => {
                got.extend_from_slice(driver.received(buffer));
                driver.release_received(buffer);
            }
            Completion::Closed {
                connection: id,
                reason: CloseReason::Peer,
            } => {
                assert_eq!(Some(id), connection);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(got == content);
    assert_eq!(driver.open_connections(), 0);
}

#[test]
fn a_peer_that_does_not_read_holds_a_send_and_a_pause_holds_a_receive() {
    let machine = machine(10);
    let mut driver = machine.driver();
    let listener = driver
        .listen("127.0.0.1:0".parse().unwrap(), false)
        .unwrap();
    let client = machine
        .connect(driver.listener_address(listener).unwrap())
        .unwrap();
    let Some(Completion::Accepted { connection, .. }) = next(&mut driver) else {
        panic!()
    };
    client.set_reading(false);
    driver.pause_receiving(connection, true);
    client.send(b"ping");
    driver.send(connection, b"pong".to_vec());
    assert!(next(&mut driver).is_none());
    client.set_reading(true);
    let Some(Completion::Sent {
        result: Ok(()),
        buffer,
        ..
    }) = next(&mut driver)
    else {
        panic!()
    };
    assert_eq!(
        (buffer.as_slice(), client.received().as_slice()),
        (&b"pong"[..], &b"pong"[..])
    );
    driver.pause_receiving(connection, false);
    let Some(Completion::Received { buffer, .. }) = next(&mut driver) else {
        panic!()
    };
    assert_eq!(driver.received(buffer)[0], b'p');
    client.set_reading(false);
    driver.send(connection, b"never read".to_vec());
    driver.close(connection);
    assert!(matches!(
        next(&mut driver),
        Some(Completion::Sent { result: Err(_), .. })
    ));
    let closed = next(&mut driver);
    assert!(matches!(
        closed,
        Some(Completion::Closed {
            reason: CloseReason::Local,
            ..
        })
    ));
    client.set_reading(true);
    machine.advance_us(1000);
    assert!(client.is_closed());
}

#[test]
fn drivers_connect_to_each_other_to_tests_and_not_to_nobody() {
    let machine = machine(11);
    let (mut first, mut second) = (machine.driver(), machine.driver());
    let listener = second.listen("10.0.0.2:0".parse().unwrap(), false).unwrap();
    let address = second.listener_address(listener).unwrap();
    assert!(first.listen(address, false).is_err());
    let outgoing = first.connect(address);
    let mut events = 0;
    for _ in 0..1000 {
        first.wait(None);
        second.wait(None);
        match first.next() {
            Some(Completion::Connected { connection }) => {
                assert_eq!(connection, outgoing);
                first.send(connection, b"hello".to_vec());
            }
            Some(Completion::Sent { result: Ok(()), .. }) => events += 1,
            None => {}
            other => panic!("{other:?}"),
        }
        match second.next() {
            Some(Completion::Accepted { .. }) => events += 1,
            Some(Completion::Received { buffer, .. }) => {
                events += usize::from(second.received(buffer).ends_with(b"o"));
                second.release_received(buffer);
            }
            None => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(events, 3);
    let refused = first.connect("10.0.0.3:1".parse().unwrap());
    for _ in 0..100 {
        first.wait(None);
    }
    let Some(Completion::Closed {
        connection,
        reason: CloseReason::Error(_),
    }) = first.next()
    else {
        panic!()
    };
    assert_eq!(connection, refused);
    let server = machine.listen("10.0.0.4:0".parse().unwrap()).unwrap();
    first.connect(server.address());
    for _ in 0..100 {
        first.wait(None);
    }
    server.accept().unwrap().reset();
    first.wait(None);
    assert!(matches!(first.next(), Some(Completion::Connected { .. })));
    let closed = first.next();
    assert!(matches!(
        closed,
        Some(Completion::Closed {
            reason: CloseReason::Error(_),
            ..
        })
    ));
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let machine = machine(seed);
        let mut rig = rig(&machine);
        let mut trace = Vec::new();
        for token in 0..40 {
            rig.write(token % 7, token as u8, token % 3 == 0, token);
            if token % 4 == 3 {
                for (token, _) in rig.finish(2) {
                    trace.push((token, machine.now().monotonic_us));
                }
            }
        }
        machine.crash(Crash::PowerLoss);
        (trace, content(&machine, 7))
    };
    assert!(run(5) == run(5));
    assert!(run(5) != run(6));
}
