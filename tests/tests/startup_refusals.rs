//! Starts where something is missing (H27): io_uring, lockable memory, cores, direct I/O.
//!
//! Invariant: under `require` the start is refused within two seconds with the limit's name, its
//! value now and the cure; under `auto` the same words are a warning and durability is the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tests::process::{BrokerProcess, repository};
use tests::{is_root, payload, procfs, skipped, turn};

const TOPIC: &str = "refusals";
const REFUSAL_WAIT: Duration = Duration::from_secs(2);

/// Requires a refusal in time that says these words and leaves nothing behind.
fn refused(broker: &mut BrokerProcess, words: &[&str]) {
    let started = Instant::now();
    broker.launch();
    let status = broker.wait_end(Duration::from_secs(10));
    let text = broker.output();
    assert!(
        started.elapsed() < REFUSAL_WAIT,
        "after {:?}: {text}",
        started.elapsed()
    );
    assert!(
        status.code().is_some_and(|code| code != 0),
        "{status}: {text}"
    );
    assert!(!text.contains("panicked"), "{text}");
    said(&text, words);
    assert!(
        broker.segments().is_empty(),
        "a half-made store: {:?}",
        broker.segments()
    );
}

fn said(text: &str, words: &[&str]) {
    for word in words {
        assert!(
            text.to_lowercase().contains(&word.to_lowercase()),
            "no {word:?} in:\n{text}"
        );
    }
}

/// Sends, kills, starts again and finds everything, the broker running less well equipped.
fn still_durable(broker: &mut BrokerProcess) {
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    for number in 0..200 {
        client
            .send(TOPIC, 0, &payload::body(number, 1000), &[])
            .expect("send");
    }
    broker.kill();
    broker.start();
    assert_eq!(
        broker.client().read_queue(TOPIC, 0, 0).expect("read").len(),
        200
    );
    broker.stop();
}

fn wrap<Word: AsRef<str>>(broker: &mut BrokerProcess, words: &[Word]) {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    broker.wrapper(&words);
}

#[test]
fn forbidden_io_uring_is_named_with_its_cure() {
    let _turn = turn();
    let tool = repository()
        .join("tests/tools/without_io_uring.py")
        .display()
        .to_string();
    let works = Command::new("python3").args([&tool, "true"]).status();
    if !works.is_ok_and(|status| status.success()) {
        skipped("no python3 or no seccomp to forbid io_uring with");
        return;
    }
    let mut broker = BrokerProcess::new("no-ring");
    wrap(&mut broker, &["python3", tool.as_str()]);
    refused(&mut broker, &["io_uring", "seccomp"]);
    wrap::<&str>(&mut broker, &[]);
    broker.start();
    still_durable(&mut broker);
}

/// Words that drop root and the right to lock more than this.
fn with_lockable_memory(kib: u64) -> Vec<String> {
    let script = format!(
        "ulimit -l {kib} && exec setpriv --reuid=65534 --regid=65534 --clear-groups \
         --inh-caps=-all \"$@\""
    );
    ["bash", "-c", &script, "bash"].map(str::to_owned).to_vec()
}

/// Whether the nobody user may run the program and write the test's directory.
fn open_to_nobody(broker: &BrokerProcess) -> bool {
    let own = |path: &Path| std::os::unix::fs::chown(path, Some(65534), Some(65534)).is_ok();
    fs::create_dir_all(broker.buffer_directory()).expect("buffer directory");
    if !own(broker.root()) || !own(&broker.buffer_directory()) {
        return false;
    }
    let program = tests::process::program().display().to_string();
    let mut words = with_lockable_memory(64);
    words.extend([program, "--help".to_owned()]);
    Command::new(&words[0])
        .args(&words[1..])
        .output()
        .is_ok_and(|output| output.status.success())
}

#[test]
fn too_little_lockable_memory_is_named_with_its_cure() {
    let _turn = turn();
    if !is_root() {
        skipped("dropping root needs root");
        return;
    }
    let mut broker = BrokerProcess::new("memlock");
    if !open_to_nobody(&broker) {
        skipped("an unprivileged user cannot reach the program or the test data");
        return;
    }
    let little = with_lockable_memory(64);
    wrap(&mut broker, &little);
    // As little as there can be: the limit it asks for may have to fit under the test's own.
    broker.set("pinion.bufferBytes", &(4 << 20).to_string());
    broker.arguments(&[
        "--shards",
        "1",
        "--cores",
        &procfs::own_cpus()[0].to_string(),
    ]);
    broker.set("pinion.coldBytes", &(1 << 20).to_string());
    broker.set("pinion.memlock", "require");
    let cures = ["LimitMEMLOCK", "limits.d", "--ulimit memlock", "bytes"];
    refused(&mut broker, &["memlock", "65536"]);
    said(&broker.output(), &cures);
    let output = broker.output();
    let (_, rest) = output
        .split_once("- memlock ")
        .expect("a line for a limits file");
    let kib: u64 = rest[..rest.find('`').expect("its end")]
        .parse()
        .expect("KiB");
    the_named_limit_is_enough(&mut broker, kib);
    wrap(&mut broker, &little);
    broker.set("pinion.memlock", "auto").start();
    said(&broker.output(), &["memlock", "65536"]);
    still_durable(&mut broker);
}

/// The limit that a refusal names, and no more, lets the broker start, where it can be raised.
fn the_named_limit_is_enough(broker: &mut BrokerProcess, kib: u64) {
    let words = with_lockable_memory(kib);
    let raised = Command::new(&words[0])
        .args(&words[1..])
        .arg("true")
        .status();
    if !raised.is_ok_and(|status| status.success()) {
        eprintln!("the limit of lockable memory cannot be raised to {kib} KiB here");
        return;
    }
    wrap(broker, &words);
    broker.start();
    broker.stop();
    fs::remove_dir_all(broker.data()).expect("remove the store");
}

/// A file system that refuses direct I/O; none where it cannot be mounted.
struct RamDisk(PathBuf);

impl RamDisk {
    fn mount(at: PathBuf) -> Option<Self> {
        fs::create_dir_all(&at).expect("mount point");
        let status = Command::new("mount")
            .args(["-t", "ramfs", "ramfs"])
            .arg(&at)
            .status();
        status
            .is_ok_and(|status| status.success())
            .then_some(Self(at))
    }
}

impl Drop for RamDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_file_system_without_direct_input_and_output_is_named() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("no-direct");
    let disk = if is_root() {
        RamDisk::mount(broker.data())
    } else {
        None
    };
    let Some(_disk) = disk else {
        skipped("mounting ramfs needs root");
        return;
    };
    let data = broker.data().display().to_string();
    broker.set("pinion.direct", "require");
    refused(&mut broker, &["direct", &data]);
    broker.set("pinion.direct", "auto").start();
    said(&broker.output(), &["direct", &data]);
    still_durable(&mut broker);
}

/// A cpuset with one CPU in it; none where that cannot be made.
struct CpuSet(PathBuf);

impl CpuSet {
    fn create(cpu: usize) -> Option<Self> {
        let name = format!("pinion-test-{}", std::process::id());
        let at = Path::new("/sys/fs/cgroup/cpuset").join(name);
        fs::create_dir(&at).ok()?;
        let set = Self(at);
        let parent = Path::new("/sys/fs/cgroup/cpuset");
        let nodes = fs::read_to_string(parent.join("cpuset.mems")).ok()?;
        fs::write(set.0.join("cpuset.mems"), nodes.trim()).ok()?;
        fs::write(set.0.join("cpuset.cpus"), cpu.to_string()).ok()?;
        Some(set)
    }
}

impl Drop for CpuSet {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn it_runs_on_the_cores_it_may_use_and_says_which() {
    let _turn = turn();
    let cpu = *procfs::own_cpus().last().expect("a core");
    let set = if is_root() { CpuSet::create(cpu) } else { None };
    let Some(set) = set else {
        skipped("no cpuset of our own; it needs root and the first kind of control groups");
        return;
    };
    let mut broker = BrokerProcess::new("cpuset");
    let enter = format!("echo $$ > {}/tasks && exec \"$@\"", set.0.display());
    wrap(&mut broker, &["bash", "-c", enter.as_str(), "bash"]);
    broker.set("pinion.pinning", "require").start();
    let threads = procfs::threads(broker.pid());
    let cores = threads
        .iter()
        .filter(|thread| thread.name.starts_with("core-"));
    let cores: Vec<_> = cores.map(|thread| thread.cpus_allowed.clone()).collect();
    assert_eq!(cores, [[cpu]]);
    still_durable(&mut broker);
    broker.arguments(&["--cores", "0,1,2,3,4,5,6,7"]);
    broker.launch();
    let status = broker.wait_end(Duration::from_secs(5));
    assert_ne!(status.code(), Some(0));
    said(&broker.output(), &["cores", &format!("{cpu}")]);
}

#[test]
fn a_file_with_a_bad_value_stops_the_start_with_its_line() {
    let _turn = turn();
    let bad = [
        ("brokerIP1", "10.0.0.1 # the inner one"),
        ("listenPort", "eleven"),
        ("flushDiskType", "SOMETIMES"),
        ("mappedFileSizeCommitLog", "-1"),
        ("pinion.direct", "perhaps"),
    ];
    for (key, value) in bad {
        let mut broker = BrokerProcess::new("bad-value");
        broker.set(key, value);
        let file = fs::read_to_string(broker.configuration()).unwrap_or_default();
        assert!(file.is_empty(), "the file is written by the start");
        refused(&mut broker, &[key, "broker.conf"]);
        let text = fs::read_to_string(broker.configuration()).expect("configuration");
        let at = text
            .lines()
            .position(|line| line.starts_with(&format!("{key}=")))
            .expect("line");
        said(&broker.output(), &[&format!("{}", at + 1)]);
    }
}

#[test]
fn an_unknown_key_is_reported_and_blanks_do_no_harm() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("unknown-key");
    broker
        .set("brokerIP1", "127.0.0.1   ")
        .set("noSuchKeyAtAll", "1")
        .start();
    said(&broker.output(), &["noSuchKeyAtAll"]);
    let route = broker
        .namesrv()
        .route("TBW102")
        .expect("route")
        .expect("known");
    assert!(
        route.contains(&format!("\"127.0.0.1:{}\"", broker.broker_port)),
        "{route}"
    );
    still_durable(&mut broker);
}
