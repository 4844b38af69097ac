//! Writes, flushes and cold reads through both ways of writing the log.

use super::*;

fn write_flush_and_read_back(log_port: LogPort) {
    let dir = test_dir("disk");
    let mut driver = driver(UringConfig {
        log_port,
        cold_slots: 2,
        ..UringConfig::default()
    });
    let file = prepare(&mut driver, &dir.join("segment"), None);
    let content = write_and_flush(&mut driver, file);
    read_back(&mut driver, file, &content);
    check_dropped(&mut driver, file, &dir.join("other"));
    drop(driver);
    std::fs::remove_dir_all(dir).unwrap();
}

/// Writes 256 KiB in four pieces, some with a flush of their own; returns what the ring held.
fn write_and_flush(driver: &mut UringDriver, file: FileId) -> Vec<u8> {
    let mut ring = LockedRing::open(RingSpec {
        path: None,
        bytes: 1 << 20,
        lock: true,
    })
    .unwrap()
    .ring;
    let content: Vec<u8> = (0..1 << 20)
        .map(|i: u32| (i / 4096) as u8 ^ i as u8)
        .collect();
    ring.slice_mut(0, 1 << 20).copy_from_slice(&content);
    let ring_id = driver.register_ring(&ring).unwrap();
    assert!(driver.ring_is_fixed(ring_id));
    for (token, flush) in [(0u64, false), (1, true), (2, false), (3, true)] {
        let offset = token as usize * 65536;
        driver.write(RingWrite {
            ring: ring_id,
            ring_offset: offset,
            len: 65536,
            file,
            file_offset: offset as u64,
            flush,
            token,
        });
    }
    driver.flush(file, 50);
    // The ring may go: what is in flight holds its memory.
    drop(ring);
    let (mut written, mut flushed) = (Vec::new(), false);
    run(driver, |_, completion| {
        match completion {
            Completion::Written { token, result } => {
                result.unwrap();
                written.push(token);
            }
            Completion::Flushed { token: 50, result } => {
                result.unwrap();
                flushed = true;
            }
            other => panic!("{other:?}"),
        }
        written.len() == 4 && flushed
    });
    written.sort_unstable();
    assert_eq!(written, [0, 1, 2, 3]);
    content
}

/// Reads what was written, with the two slots there are, and behind the end.
fn read_back(driver: &mut UringDriver, file: FileId, content: &[u8]) {
    let read = |offset: u64, token| ColdRead {
        file,
        file_offset: offset,
        len: 131072,
        token,
    };
    assert!(driver.cold_read(read(0, 1)));
    assert!(driver.cold_read(read(131072, 2)));
    assert!(!driver.cold_read(read(0, 3)), "a third slot appeared");
    let mut reads = 0;
    run(driver, |driver, completion| {
        let Completion::ColdRead {
            token,
            slot,
            result,
        } = completion
        else {
            panic!()
        };
        assert_eq!(result.unwrap(), 131072);
        let start = (token as usize - 1) * 131072;
        assert!(driver.slot(slot)[..131072] == content[start..start + 131072]);
        driver.release_slot(slot);
        reads += 1;
        reads == 2
    });
    // Past the end of the file: zero bytes, not an error.
    assert!(driver.cold_read(read(4 << 20, 4)));
    run(driver, |driver, completion| {
        let Completion::ColdRead { slot, result, .. } = completion else {
            panic!()
        };
        assert_eq!(result.unwrap(), 0);
        driver.release_slot(slot);
        true
    });
}

/// A dropped file takes nothing any more, and its number does not reach another one.
fn check_dropped(driver: &mut UringDriver, file: FileId, other: &Path) {
    driver.drop_file(file);
    driver.flush(file, 51);
    assert!(matches!(
        driver.next(),
        Some(Completion::Flushed {
            token: 51,
            result: Err(_)
        })
    ));
    // A name kept too long does not reach the file that has its place now.
    let until = driver.refresh_clock().monotonic_us + 20_000;
    driver.wait(Some(until));
    let other = prepare(driver, other, None);
    assert_ne!(other, file);
    driver.flush(file, 52);
    assert!(matches!(
        driver.next(),
        Some(Completion::Flushed {
            token: 52,
            result: Err(_)
        })
    ));
}

#[test]
fn writes_flushes_and_cold_reads_through_the_ring() {
    write_flush_and_read_back(LogPort::Uring);
}

#[test]
fn writes_flushes_and_cold_reads_through_the_writer_thread() {
    write_flush_and_read_back(LogPort::Thread);
}
