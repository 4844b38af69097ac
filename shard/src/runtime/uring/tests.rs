//! The io_uring driver against the real kernel: loopback sockets and files below the build's
//! directory.

mod disk;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::*;
use crate::io::{JobOutcome, OpenMode, Storage, StoreFile};
use crate::memory::RingSpec;
use crate::runtime::{CloseReason, test_dir};

const LOCALHOST: &str = "127.0.0.1:0";

fn driver(config: UringConfig) -> UringDriver {
    UringDriver::new(config).unwrap()
}

fn storage() -> RealStorage {
    RealStorage::new(DirectMode::Auto)
}

/// Runs until `done` says so for a completion, at most ten seconds.
fn run(driver: &mut UringDriver, mut done: impl FnMut(&mut UringDriver, Completion) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        let until = driver.refresh_clock().monotonic_us + 50_000;
        driver.wait(Some(until));
        while let Some(completion) = driver.next() {
            if done(driver, completion) {
                return;
            }
        }
    }
    panic!("nothing happened for ten seconds");
}

fn listen(driver: &mut UringDriver) -> SocketAddr {
    let id = driver.listen(LOCALHOST.parse().unwrap(), false).unwrap();
    driver.listener_address(id).unwrap()
}

#[test]
fn eight_pipelining_clients_get_their_bytes_back_in_order() {
    const BYTES: usize = 300_000;
    let mut driver = driver(UringConfig {
        receive_buffers: 4,
        ..UringConfig::default()
    });
    let address = listen(&mut driver);
    let clients: Vec<_> = (0..8u8)
        .map(|number| {
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                let mut writer = stream.try_clone().unwrap();
                let sent: Vec<u8> = (0..BYTES)
                    .map(|i| (i as u8).wrapping_mul(31) ^ number)
                    .collect();
                let copy = sent.clone();
                let sender = std::thread::spawn(move || {
                    for part in copy.chunks(777) {
                        writer.write_all(part).unwrap();
                    }
                });
                let mut got = vec![0; BYTES];
                stream.read_exact(&mut got).unwrap();
                sender.join().unwrap();
                assert!(got == sent, "client {number} got other bytes");
            })
        })
        .collect();
    let mut waiting: std::collections::HashMap<ConnectionId, (Vec<u8>, bool)> = Default::default();
    let mut closed = 0;
    run(&mut driver, |driver, completion| {
        match completion {
            Completion::Accepted { connection, .. } => {
                waiting.insert(connection, (Vec::new(), false));
            }
            Completion::Received { connection, buffer } => {
                let state = waiting.get_mut(&connection).unwrap();
                state.0.extend_from_slice(driver.received(buffer));
                driver.release_received(buffer);
                if !state.1 {
                    state.1 = true;
                    driver.send(connection, std::mem::take(&mut state.0));
                }
            }
            Completion::Sent {
                connection, result, ..
            } => {
                result.unwrap();
                let state = waiting.get_mut(&connection).unwrap();
                state.1 = !state.0.is_empty();
                if state.1 {
                    driver.send(connection, std::mem::take(&mut state.0));
                }
            }
            Completion::Closed { reason, .. } => {
                assert!(matches!(reason, CloseReason::Peer), "{reason:?}");
                closed += 1;
            }
            other => panic!("{other:?}"),
        }
        closed == 8
    });
    for client in clients {
        client.join().unwrap();
    }
    assert_eq!(driver.open_connections(), 0);
}

#[test]
fn a_slow_reader_gets_a_large_buffer_whole() {
    let mut driver = driver(UringConfig::default());
    let address = listen(&mut driver);
    let content: Vec<u8> = (0..20_000_000u32).map(|i| (i % 251) as u8).collect();
    let expected = content.clone();
    let reader = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut got = vec![0; expected.len()];
        let (first, rest) = got.split_at_mut(1000);
        stream.read_exact(first).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        stream.read_exact(rest).unwrap();
        got == expected
    });
    let mut content = Some(content);
    run(&mut driver, |driver, completion| match completion {
        Completion::Accepted { connection, .. } => {
            driver.send(connection, content.take().unwrap());
            false
        }
        Completion::Sent { result, buffer, .. } => {
            result.unwrap();
            assert_eq!(buffer.len(), 20_000_000);
            true
        }
        other => panic!("{other:?}"),
    });
    assert!(reader.join().unwrap());
    assert!(driver.counters().short_sends > 0);
}

#[test]
fn a_refused_connect_ends_in_closed_with_the_error() {
    let mut driver = driver(UringConfig::default());
    let free = TcpListener::bind(LOCALHOST).unwrap().local_addr().unwrap();
    let id = driver.connect(free);
    run(&mut driver, |_, completion| match completion {
        Completion::Closed {
            connection,
            reason: CloseReason::Error(error),
        } => {
            assert_eq!(connection, id);
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
            true
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(driver.open_connections(), 0);
}

#[test]
fn an_outgoing_connection_sends_and_receives() {
    let mut driver = driver(UringConfig::default());
    let listener = TcpListener::bind(LOCALHOST).unwrap();
    let address = listener.local_addr().unwrap();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut word = [0; 5];
        stream.read_exact(&mut word).unwrap();
        stream.write_all(&word).unwrap();
    });
    driver.connect(address);
    let mut got = Vec::new();
    run(&mut driver, |driver, completion| {
        match completion {
            Completion::Connected { connection } => driver.send(connection, b"hello".to_vec()),
            Completion::Received { buffer, .. } => {
                got.extend_from_slice(driver.received(buffer));
                driver.release_received(buffer);
            }
            Completion::Sent { result, .. } => result.unwrap(),
            Completion::Closed { .. } => return true,
            other => panic!("{other:?}"),
        }
        false
    });
    assert_eq!(got, b"hello");
    echo.join().unwrap();
}

#[test]
fn a_paused_connection_receives_nothing_until_it_is_resumed() {
    let mut driver = driver(UringConfig::default());
    let address = listen(&mut driver);
    let mut client = TcpStream::connect(address).unwrap();
    let mut connection = None;
    run(&mut driver, |driver, completion| match completion {
        Completion::Accepted { connection: id, .. } => {
            connection = Some(id);
            driver.pause_receiving(id, true);
            true
        }
        other => panic!("{other:?}"),
    });
    let connection = connection.unwrap();
    let turn = |driver: &mut UringDriver, ms: u64| {
        let until = driver.refresh_clock().monotonic_us + ms * 1000;
        while driver.refresh_clock().monotonic_us < until {
            driver.wait(Some(until));
            if let Some(completion) = driver.next() {
                return Some(completion);
            }
        }
        None
    };
    assert!(turn(&mut driver, 20).is_none());
    client.write_all(b"x").unwrap();
    assert!(turn(&mut driver, 50).is_none(), "received while paused");
    driver.pause_receiving(connection, false);
    assert!(matches!(
        turn(&mut driver, 2000),
        Some(Completion::Received { .. })
    ));
    // Pause and resume at once must not lose the connection either.
    driver.pause_receiving(connection, true);
    driver.pause_receiving(connection, false);
    assert!(turn(&mut driver, 20).is_none());
    client.write_all(b"y").unwrap();
    assert!(matches!(
        turn(&mut driver, 2000),
        Some(Completion::Received { .. })
    ));
}

#[test]
fn connections_over_the_bound_are_closed_at_once_and_counted() {
    let mut driver = driver(UringConfig {
        connections_max: 1,
        ..UringConfig::default()
    });
    let address = listen(&mut driver);
    let first = TcpStream::connect(address).unwrap();
    let mut accepted = 0;
    run(&mut driver, |_, completion| {
        accepted += usize::from(matches!(completion, Completion::Accepted { .. }));
        accepted == 1
    });
    let second = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.read(&mut [0; 1]).map_or(0, |n| n)
    });
    let until = Instant::now() + Duration::from_secs(5);
    while !second.is_finished() && Instant::now() < until {
        let soon = driver.refresh_clock().monotonic_us + 10_000;
        driver.wait(Some(soon));
        assert!(driver.next().is_none());
    }
    assert_eq!(second.join().unwrap(), 0);
    assert_eq!(driver.counters().connections_refused, 1);
    drop(first);
}

#[test]
fn a_closed_connection_frees_its_place_under_a_new_name() {
    let mut driver = driver(UringConfig::default());
    let address = listen(&mut driver);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..3 {
        let mut client = TcpStream::connect(address).unwrap();
        run(&mut driver, |driver, completion| match completion {
            Completion::Accepted { connection, .. } => {
                assert!(seen.insert(connection));
                driver.close(connection);
                false
            }
            Completion::Closed {
                reason: CloseReason::Local,
                ..
            } => true,
            other => panic!("{other:?}"),
        });
        assert_eq!(client.read(&mut [0; 1]).unwrap_or(0), 0);
        // The old name means nothing now.
        driver.send(*seen.iter().next().unwrap(), b"late".to_vec());
        assert!(matches!(
            driver.next(),
            Some(Completion::Sent { result: Err(_), .. })
        ));
    }
    let indexes: std::collections::HashSet<u32> = seen.iter().map(|id| id.0 as u32).collect();
    assert_eq!((seen.len(), indexes.len()), (3, 1));
}

#[test]
fn a_never_reading_peer_does_not_hold_up_close() {
    let mut driver = driver(UringConfig::default());
    let address = listen(&mut driver);
    let client = TcpStream::connect(address).unwrap();
    let mut sent_back = false;
    run(&mut driver, |driver, completion| match completion {
        Completion::Accepted { connection, .. } => {
            driver.send(connection, vec![7; 64 << 20]);
            let until = driver.refresh_clock().monotonic_us + 30_000;
            driver.wait(Some(until));
            driver.close(connection);
            false
        }
        Completion::Sent { result, buffer, .. } => {
            assert!(result.is_err());
            assert_eq!(buffer.len(), 64 << 20);
            sent_back = true;
            false
        }
        Completion::Closed { reason, .. } => {
            assert!(matches!(reason, CloseReason::Local), "{reason:?}");
            true
        }
        other => panic!("{other:?}"),
    });
    assert!(sent_back, "the buffer comes back before the end");
    drop(client);
}

fn job(driver: &mut UringDriver, job: FileJob<RealStorage>) -> std::io::Result<JobOutcome> {
    driver.file_job(job, 99);
    let mut result = None;
    run(driver, |_, completion| match completion {
        Completion::Job {
            token: 99,
            result: got,
        } => {
            result = Some(got);
            true
        }
        other => panic!("{other:?}"),
    });
    result.unwrap()
}

fn prepare(driver: &mut UringDriver, path: &Path, recycled: Option<PathBuf>) -> FileId {
    let prepare = FileJob::PrepareSegment {
        path: path.to_path_buf(),
        recycled,
        bytes: 1 << 20,
        zero_first_bytes: 1 << 20,
    };
    match job(driver, prepare).unwrap() {
        JobOutcome::File(file) => file,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_write_to_a_file_that_cannot_take_it_reports_the_error() {
    for log_port in [LogPort::Uring, LogPort::Thread] {
        let dir = test_dir("refuse");
        std::fs::write(dir.join("file"), b"x").unwrap();
        let mut driver = driver(UringConfig {
            log_port,
            ..UringConfig::default()
        });
        let ring = LockedRing::open(RingSpec {
            path: None,
            bytes: 8192,
            lock: false,
        })
        .unwrap()
        .ring;
        let ring = driver.register_ring(&ring).unwrap();
        let file = storage().open(&dir.join("file"), OpenMode::Read).unwrap();
        let file = driver.adopt_file(file);
        let write = |ring_offset, token| RingWrite {
            ring,
            ring_offset,
            len: 4096,
            file,
            file_offset: 0,
            flush: true,
            token,
        };
        driver.write(write(0, 1));
        driver.write(write(8192, 2));
        let mut tokens = Vec::new();
        run(&mut driver, |_, completion| {
            let Completion::Written { token, result } = completion else {
                panic!()
            };
            assert!(result.is_err());
            tokens.push(token);
            tokens.len() == 2
        });
        tokens.sort_unstable();
        assert_eq!(tokens, [1, 2]);
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn auxiliary_jobs_do_what_they_say() {
    let dir = test_dir("jobs");
    let mut driver = driver(UringConfig::default());
    let (old, new) = (dir.join("old"), dir.join("new"));
    let file = prepare(&mut driver, &old, None);
    driver.drop_file(file);
    assert_eq!(std::fs::metadata(&old).unwrap().len(), 1 << 20);
    std::fs::write(&old, vec![1u8; 2 << 20]).unwrap();
    let file = prepare(&mut driver, &new, Some(old.clone()));
    driver.drop_file(file);
    assert!(!old.exists());
    assert!(std::fs::read(&new).unwrap() == vec![0u8; 1 << 20]);

    std::fs::write(&new, vec![5u8; 1 << 20]).unwrap();
    let zero = FileJob::Zero {
        path: new.clone(),
        from: 4096,
        bytes: 8192,
    };
    assert!(matches!(job(&mut driver, zero).unwrap(), JobOutcome::Done));
    let bytes = std::fs::read(&new).unwrap();
    assert!(bytes[..4096].iter().all(|b| *b == 5) && bytes[12288..].iter().all(|b| *b == 5));
    assert!(bytes[4096..12288].iter().all(|b| *b == 0));

    assert!(matches!(
        job(&mut driver, FileJob::Remove { path: new.clone() }),
        Ok(JobOutcome::Done)
    ));
    assert!(matches!(
        job(&mut driver, FileJob::Remove { path: new }),
        Ok(JobOutcome::Done)
    ));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);

    let blocks = dir.join("blocks");
    let write = FileJob::WriteBlocks {
        path: blocks.clone(),
        bytes: vec![9; 5000],
    };
    assert!(matches!(
        job(&mut driver, write).unwrap(),
        JobOutcome::File(_)
    ));
    let bytes = std::fs::read(&blocks).unwrap();
    assert_eq!(bytes.len(), 8192);
    assert!(bytes[..5000].iter().all(|b| *b == 9) && bytes[5000..].iter().all(|b| *b == 0));

    let space = job(&mut driver, FileJob::Space { dir: dir.clone() }).unwrap();
    assert!(matches!(
        space,
        JobOutcome::Space(s) if s.total_bytes >= s.available_bytes && s.total_bytes > 0
    ));
    let open = job(
        &mut driver,
        FileJob::Open {
            path: dir.join("absent"),
        },
    );
    assert_eq!(open.unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let call = FileJob::Call(Box::new(move |storage: &RealStorage| {
        storage
            .read_file(&blocks)
            .map(crate::io::JobOutcomeOf::Bytes)
    }));
    assert!(matches!(job(&mut driver, call).unwrap(), JobOutcome::Bytes(b) if b.len() == 8192));
    drop(driver);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn short_jobs_overtake_a_long_one() {
    let dir = test_dir("overtake");
    let mut driver = driver(UringConfig::default());
    std::fs::write(dir.join("long"), b"").unwrap();
    driver.file_job(
        FileJob::Zero {
            path: dir.join("long"),
            from: 0,
            bytes: 64 << 20,
        },
        1,
    );
    let until = driver.refresh_clock().monotonic_us + 2_000;
    driver.wait(Some(until));
    driver.file_job(FileJob::Space { dir: dir.clone() }, 2);
    let mut order = Vec::new();
    run(&mut driver, |_, completion| {
        let Completion::Job { token, result } = completion else {
            panic!()
        };
        result.unwrap();
        order.push(token);
        order.len() == 2
    });
    assert_eq!(order, [2, 1]);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_bell_wakes_a_sleeping_core_within_five_milliseconds() {
    let (ringer, reader) = crate::mesh::bell().unwrap();
    let mut driver = driver(UringConfig {
        bell: Some(reader),
        ..UringConfig::default()
    });
    // Several tries: what is measured is the bell, not the load of the machine.
    let best = (0..10)
        .map(|_| {
            let ringer = ringer.clone();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                let at = Instant::now();
                ringer.ring();
                at
            });
            let started = driver.refresh_clock().monotonic_us;
            driver.wait(Some(started + 900_000));
            let woken = Instant::now();
            woken.duration_since(thread.join().unwrap())
        })
        .min()
        .unwrap();
    assert!(best < Duration::from_millis(5), "{best:?}");
}

#[test]
fn the_deadline_ends_a_sleep_and_not_before_its_time() {
    let mut driver = driver(UringConfig::default());
    driver.wait(Some(0));
    for delay_us in [500, 5_000, 20_000] {
        let from = driver.refresh_clock().monotonic_us;
        driver.wait(Some(from + delay_us));
        let late = driver.now().monotonic_us as i64 - (from + delay_us) as i64;
        assert!(
            (-100..500_000).contains(&late),
            "{delay_us} us ended {late} us late"
        );
    }
}

#[test]
fn no_wake_up_is_lost_in_a_hundred_thousand_round_trips() {
    round_trips(100_000, 0);
}

#[test]
fn no_wake_up_is_lost_between_spinning_and_sleeping() {
    round_trips(30_000, 5);
}

fn round_trips(rounds: u64, spin_us: u64) {
    let mut ends = crate::mesh::Mesh::build::<u64>(2, 4).unwrap();
    let (second, first) = (ends.pop().unwrap(), ends.pop().unwrap());
    let core = |mut end: crate::mesh::MeshEnd<u64>, begins: bool| {
        move || {
            let bell = end.take_bell();
            let mut driver = driver(UringConfig {
                bell,
                entries: 8,
                spin_us,
                ..UringConfig::default()
            });
            let peer = 1 - end.core();
            if begins {
                end.push(peer, 0).unwrap();
                end.ring_bells();
            }
            let mut last = 0;
            let mut longest = Duration::ZERO;
            while last < rounds {
                let before = Instant::now();
                driver.wait(None);
                longest = longest.max(before.elapsed());
                let mut got = None;
                end.drain(|_, message| got = Some(message), 16);
                if let Some(message) = got {
                    last = message + 1;
                    if last <= rounds {
                        end.push(peer, last).unwrap();
                        end.ring_bells();
                    }
                }
            }
            (longest, driver.counters().sleeps)
        }
    };
    let other = std::thread::spawn(core(second, false));
    let (first_longest, first_sleeps) = core(first, true)();
    let (second_longest, second_sleeps) = other.join().unwrap();
    let longest = first_longest.max(second_longest);
    assert!(
        first_sleeps + second_sleeps > 100,
        "nobody slept: {first_sleeps} {second_sleeps}"
    );
    // A lost wake-up would have slept until the longest sleep a driver takes.
    assert!(
        longest < Duration::from_micros(SLEEP_US_MAX - 50_000),
        "slept {longest:?}"
    );
}

#[test]
fn more_entries_than_the_queue_holds_all_reach_the_kernel() {
    let dir = test_dir("many");
    let mut driver = driver(UringConfig {
        entries: 8,
        ..UringConfig::default()
    });
    let ring = LockedRing::open(RingSpec {
        path: None,
        bytes: 4096,
        lock: false,
    })
    .unwrap()
    .ring;
    let ring = driver.register_ring(&ring).unwrap();
    let file = prepare(&mut driver, &dir.join("file"), None);
    for token in 0..200 {
        driver.write(RingWrite {
            ring,
            ring_offset: 0,
            len: 4096,
            file,
            file_offset: token * 4096,
            flush: token % 10 == 0,
            token,
        });
    }
    let mut seen = std::collections::HashSet::new();
    run(&mut driver, |_, completion| {
        let Completion::Written { token, result } = completion else {
            panic!()
        };
        result.unwrap();
        assert!(seen.insert(token));
        seen.len() == 200
    });
    drop(driver);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_port_can_be_shared_among_drivers_only_when_asked() {
    let mut first = driver(UringConfig::default());
    let mut second = driver(UringConfig::default());
    let id = first.listen(LOCALHOST.parse().unwrap(), true).unwrap();
    let address = first.listener_address(id).unwrap();
    second.listen(address, true).unwrap();
    let error = second.listen(address, false).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    first.close_listener(id);
    let until = first.refresh_clock().monotonic_us + 1_000;
    first.wait(Some(until));
    assert_eq!(first.listener_address(id), None);
}

#[test]
fn settling_waits_for_writers_to_be_gone() {
    let dir = test_dir("settle");
    let path = dir.join("segment");
    std::fs::write(&path, b"x").unwrap();
    let storage = storage();
    storage.settle(&path).unwrap();
    let open = storage.open(&path, OpenMode::ReadWrite).unwrap();
    assert_eq!(open.len_bytes().unwrap(), 1);
    let waiter = {
        let (storage, path) = (storage.clone(), path.clone());
        std::thread::spawn(move || storage.settle(&path))
    };
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiter.is_finished());
    drop(open);
    waiter.join().unwrap().unwrap();
    std::fs::remove_dir_all(dir).unwrap();
}
