//! It is what it says: `/proc` is asked whether the promises about files, memory and threads hold.
//!
//! Invariant: nothing here trusts a word the broker prints.

use std::path::Path;
use std::time::Duration;

use tests::process::BrokerProcess;
use tests::{env_number, payload, procfs, turn};

const TOPIC: &str = "what_it_says";
/// Files of the store that are settings, not data.
const SETTINGS_PLACES: [&str; 2] = ["config", "lock"];
/// How the threads that may touch a store file are called.
const CORE_PREFIX: &str = "core-";
const DISK_PREFIXES: [&str; 2] = ["disk-", "iou-"];

fn loaded(name: &str, arguments: &[&str]) -> BrokerProcess {
    let mut broker = BrokerProcess::new(name);
    broker.arguments(arguments).start();
    let mut client = broker.client();
    client.create_topic(TOPIC, 8).expect("create topic");
    for number in 0..2000 {
        let queue = (number % 8) as i32;
        client
            .send(TOPIC, queue, &payload::body(number, 8000), &[])
            .expect("send");
    }
    for queue in 0..8 {
        assert_eq!(client.read_queue(TOPIC, queue, 0).expect("read").len(), 250);
    }
    broker
}

#[test]
fn data_files_are_open_for_direct_input_and_output() {
    let _turn = turn();
    let broker = loaded("direct", &[]);
    let data = broker.data();
    let is_settings = |path: &Path| {
        let below = path.strip_prefix(&data).expect("below the data directory");
        let mut parts = below.iter().map(|part| part.to_string_lossy());
        parts.any(|part| SETTINGS_PLACES.iter().any(|name| part.starts_with(name)))
    };
    let files = procfs::open_files(broker.pid());
    let files = files
        .iter()
        .filter(|file| file.path.starts_with(&data) && file.path.is_file());
    let data_files: Vec<_> = files.filter(|file| !is_settings(&file.path)).collect();
    let segments = broker.segments();
    let open_segments = data_files
        .iter()
        .filter(|file| segments.contains(&file.path))
        .count();
    assert!(
        open_segments > 0,
        "no segment of {segments:?} is open: {data_files:?}"
    );
    for file in data_files {
        assert_ne!(
            file.flags & procfs::O_DIRECT,
            0,
            "{} is buffered",
            file.path.display()
        );
    }
}

#[test]
fn no_file_of_the_store_is_mapped() {
    let _turn = turn();
    let broker = loaded("unmapped", &[]);
    let data = broker.data().display().to_string();
    let mapped: Vec<_> = procfs::maps(broker.pid())
        .into_iter()
        .filter(|line| line.contains(&data))
        .collect();
    assert!(mapped.is_empty(), "{mapped:#?}");
}

#[test]
fn the_buffers_are_locked() {
    let _turn = turn();
    for buffer in [None, Some("none")] {
        let mut broker = BrokerProcess::new("locked");
        let (shards, buffer_bytes) = (3, 16_u64 << 20);
        broker.arguments(&["--shards", &shards.to_string()]);
        broker.set("pinion.bufferBytes", &buffer_bytes.to_string());
        if let Some(directory) = buffer {
            broker.set("pinion.bufferDir", directory);
        }
        broker.start();
        let locked = procfs::locked_bytes(broker.pid());
        let pool = shards * buffer_bytes;
        assert!(
            locked >= pool,
            "{locked} bytes locked, {pool} bytes of buffers"
        );
    }
}

#[test]
fn every_shard_thread_has_one_core_of_its_own() {
    let _turn = turn();
    let cpus = procfs::own_cpus();
    let broker = loaded("pinned", &[]);
    let threads = procfs::threads(broker.pid());
    let cores: Vec<_> = threads
        .iter()
        .filter(|thread| thread.name.starts_with(CORE_PREFIX))
        .collect();
    assert_eq!(
        cores.len(),
        cpus.len(),
        "one thread per core allowed: {threads:#?}"
    );
    let mut taken = Vec::new();
    for thread in cores {
        assert_eq!(thread.cpus_allowed.len(), 1, "{thread:?}");
        assert!(cpus.contains(&thread.cpus_allowed[0]), "{thread:?}");
        assert!(
            !taken.contains(&thread.cpus_allowed),
            "{thread:?} shares its core"
        );
        taken.push(thread.cpus_allowed.clone());
    }
}

#[test]
fn a_list_of_cores_is_kept_to() {
    let _turn = turn();
    let last = *procfs::own_cpus().last().expect("a core");
    let broker = loaded("cores-list", &["--cores", &last.to_string()]);
    let threads = procfs::threads(broker.pid());
    let cores: Vec<_> = threads
        .iter()
        .filter(|thread| thread.name.starts_with(CORE_PREFIX))
        .collect();
    assert_eq!(cores.len(), 1, "{threads:#?}");
    assert_eq!(cores[0].cpus_allowed, [last]);
}

#[test]
fn no_other_threads_than_cores_and_disk_writers_do_the_work() {
    let _turn = turn();
    for port in ["uring", "thread"] {
        let mut broker = BrokerProcess::new(&format!("threads-{port}"));
        broker.set("pinion.logPort", port).start();
        let mut client = broker.client();
        client.create_topic(TOPIC, 8).expect("create topic");
        let pid = broker.pid();
        for number in 0..3000 {
            let queue = (number % 8) as i32;
            client
                .send(TOPIC, queue, &payload::body(number, 8000), &[])
                .expect("send");
        }
        for (name, written) in write_counts(pid) {
            let disk = DISK_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            let may_write = disk || name.starts_with(CORE_PREFIX);
            // Settings are small; a thread that writes the log writes megabytes.
            assert!(
                may_write || written < 4 << 20,
                "{name} wrote {written} bytes ({port})"
            );
        }
    }
}

/// Bytes each thread sent to storage, by name.
fn write_counts(pid: u32) -> Vec<(String, u64)> {
    let mut counts = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))
        .expect("tasks")
        .flatten()
    {
        let read = |name: &str| std::fs::read_to_string(entry.path().join(name));
        let (Ok(name), Ok(io)) = (read("comm"), read("io")) else {
            continue;
        };
        let written = procfs::status_field(&io, "write_bytes")
            .parse()
            .expect("a number");
        counts.push((name.trim().to_owned(), written));
    }
    counts
}

#[test]
fn an_idle_broker_costs_nothing() {
    let _turn = turn();
    let broker = loaded("idle", &[]);
    let seconds = env_number("IDLE_SECONDS", 10);
    std::thread::sleep(Duration::from_secs(3));
    let before = procfs::cpu_ticks(broker.pid());
    std::thread::sleep(Duration::from_secs(seconds));
    let ticks = procfs::cpu_ticks(broker.pid()) - before;
    println!(
        "idle: {ticks} ticks of 10 ms in {seconds} s, {} MiB resident",
        procfs::resident_bytes(broker.pid()) >> 20
    );
    assert!(
        ticks <= seconds,
        "{ticks} ticks of 10 ms in {seconds} s: over 1 % of a core"
    );
}
