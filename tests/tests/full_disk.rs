//! A disk that fills up and gets room again (needs root for a disk of the test's own).
//!
//! Invariant: what an operator reads of the disk is what the disk has; a trouble that lasts is said
//! at once and then rarely, and its end is said; sends go on by themselves; what an administrator
//! changes is a success only once it is saved.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tests::client::{Client, answer};
use tests::disk::LoopDisk;
use tests::process::{BrokerProcess, eventually};
use tests::{payload, turn};

const TOPIC: &str = "full_disk";
const DISK_BYTES: u64 = 4 << 30;
/// More than the hundredth of the disk that is left when sends are refused, so that the disk can
/// be too full for a segment before that.
const SEGMENT_BYTES: u64 = 64 << 20;
/// What is left for others while segments cannot be prepared.
const LEFT_BYTES: u64 = 48 << 20;
const BODY_BYTES: usize = 60_000;
/// Long enough for several tries of everything that is tried once a second.
const TROUBLE: Duration = Duration::from_secs(5);
const CANNOT: &str = "cannot prepare segment";

fn broker_on(name: &str) -> Option<(BrokerProcess, LoopDisk)> {
    let mut broker = BrokerProcess::new(name);
    let disk = LoopDisk::under(&mut broker, DISK_BYTES)?;
    broker.set("mappedFileSizeCommitLog", &SEGMENT_BYTES.to_string());
    broker.arguments(&["--shards", "1"]).start();
    Some((broker, disk))
}

/// Sends one message; the code of the answer.
fn send(client: &mut Client) -> i32 {
    let body = payload::body(7, BODY_BYTES);
    let opaque = client.start_send(TOPIC, 0, &body, &[]).expect("start");
    client.finish(opaque).expect("an answer").code
}

/// Takes the disk's space except for this much.
fn fill(disk: &LoopDisk, left: u64) -> PathBuf {
    let path = disk.path().join("filler");
    let _ = fs::remove_file(&path);
    let (_, free) = space(disk);
    let bytes = free.saturating_sub(left).to_string();
    let status = Command::new("fallocate")
        .args(["-l", &bytes])
        .arg(&path)
        .status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "fallocate {bytes}"
    );
    path
}

/// Size of the disk and what is free, as `df` sees them.
fn space(disk: &LoopDisk) -> (u64, u64) {
    let output = Command::new("df")
        .args(["-B1", "--output=size,avail"])
        .arg(disk.path())
        .output()
        .expect("df");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.split_whitespace();
    let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
    let [size, free] = numbers[..] else {
        panic!("df said {text}")
    };
    (size, free)
}

/// Lines of the log with these words.
fn lines(broker: &BrokerProcess, words: &str) -> usize {
    let output = broker.output();
    output.lines().filter(|line| line.contains(words)).count()
}

#[test]
fn a_disk_too_full_for_a_segment_is_said_once_and_its_end_too() {
    let _turn = turn();
    let Some((mut broker, disk)) = broker_on("full-segment") else {
        return;
    };
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let ready = || broker.segments().len() >= 2;
    eventually("a segment ahead", Duration::from_secs(20), ready);
    let filler = fill(&disk, LEFT_BYTES);
    let began = Instant::now();
    while lines(&broker, CANNOT) == 0 {
        let waited = began.elapsed();
        assert!(waited < Duration::from_secs(60), "{}", broker.output());
        let code = send(&mut client);
        let known = [answer::SUCCESS, answer::SERVICE_NOT_AVAILABLE];
        assert!(known.contains(&code), "code {code}");
    }
    thread::sleep(TROUBLE);
    assert_eq!(lines(&broker, CANNOT), 1, "{}", broker.output());
    client.pull(TOPIC, 0, 0, 1).expect("reads go on");
    fs::remove_file(&filler).expect("room again");
    let again = "segments can be prepared again";
    eventually("the end of the trouble", Duration::from_secs(20), || {
        lines(&broker, again) == 1
    });
    eventually("sends go on", Duration::from_secs(20), || {
        send(&mut client) == answer::SUCCESS
    });
    let end = client.max_offset(TOPIC, 0).expect("the end");
    broker.stop();
    broker.start();
    let mut client = broker.client();
    let records = client.read_queue(TOPIC, 0, 0).expect("read");
    assert_eq!(records.len() as i64, end, "nothing acknowledged is lost");
    broker.stop();
}

#[test]
fn a_full_disk_refuses_sends_and_nothing_else() {
    let _turn = turn();
    let Some((mut broker, disk)) = broker_on("full-disk") else {
        return;
    };
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    assert_eq!(send(&mut client), answer::SUCCESS);
    let filler = fill(&disk, 1 << 20);
    eventually("the stop mark", Duration::from_secs(10), || {
        send(&mut client) == answer::SERVICE_NOT_AVAILABLE
    });
    let full = Instant::now();
    while full.elapsed() < TROUBLE {
        assert_eq!(send(&mut client), answer::SERVICE_NOT_AVAILABLE);
        client.pull(TOPIC, 0, 0, 32).expect("reads go on");
        client
            .heartbeat("c", "full_group", TOPIC)
            .expect("heartbeats go on");
        client
            .commit("full_group", TOPIC, 0, 1)
            .expect("commits go on");
        thread::sleep(Duration::from_millis(100));
    }
    let status = client.runtime_info().expect("the status");
    let ratio: f64 = status["commitLogDiskRatio"].parse().expect("a ratio");
    assert!(ratio > 0.97, "a full disk is shown as {ratio}");
    // The settings that could not be saved are one trouble, whatever it keeps from being saved.
    let errors = lines(&broker, "ERROR");
    assert!(
        errors <= 2,
        "{errors} lines of trouble:\n{}",
        broker.output()
    );
    fs::remove_file(&filler).expect("room again");
    eventually("sends go on", Duration::from_secs(20), || {
        send(&mut client) == answer::SUCCESS
    });
    eventually("the group is saved", Duration::from_secs(20), || {
        let file = broker.data().join("config/subscriptionGroup.json");
        let text = fs::read_to_string(file).unwrap_or_default();
        text.contains("\"full_group\"")
    });
    broker.stop();
}

/// Takes what is left, too, so that not even a small file finds room.
fn fill_to_the_brim(disk: &LoopDisk) -> [PathBuf; 2] {
    let filler = fill(disk, 1 << 20);
    let last = disk.path().join("last");
    let mut file = File::create(&last).expect("file");
    let block = [1; 4096];
    while file.write_all(&block).is_ok() {}
    [filler, last]
}

#[test]
fn a_change_that_cannot_be_saved_is_answered_as_a_failure() {
    let _turn = turn();
    let Some((mut broker, disk)) = broker_on("full-orders") else {
        return;
    };
    let mut client = broker.client();
    client.create_topic(TOPIC, 1).expect("create topic");
    let ready = || broker.segments().len() >= 2;
    eventually("a segment ahead", Duration::from_secs(20), ready);
    let fillers = fill_to_the_brim(&disk);
    for again in [false, true] {
        let refused = client.create_topic("ordered", 3).expect_err("not saved");
        let words = refused.to_string();
        assert!(words.contains("not saved"), "again: {again}: {words}");
    }
    for filler in fillers {
        fs::remove_file(&filler).expect("room again");
    }
    eventually("orders are saved", Duration::from_secs(20), || {
        client.create_topic("ordered", 3).is_ok()
    });
    broker.kill();
    broker.start();
    let route = broker.namesrv().route("ordered").expect("route");
    assert!(route.is_some(), "what was a success is there after a kill");
    broker.stop();
}

#[test]
fn the_status_shows_the_disk_as_it_is() {
    let _turn = turn();
    let Some((mut broker, disk)) = broker_on("disk-status") else {
        return;
    };
    let mut file = File::create(disk.path().join("half")).expect("file");
    let some = vec![1; 1 << 20];
    (0..128).for_each(|_| file.write_all(&some).expect("write"));
    file.sync_all().expect("sync");
    // Measured once a second.
    let mut client = broker.client();
    let found = |status: &std::collections::BTreeMap<String, String>| -> f64 {
        status["commitLogDiskRatio"].parse().expect("a ratio")
    };
    let (size, free) = space(&disk);
    let df = (size - free) as f64 / size as f64;
    eventually(
        &format!("a ratio near {df}"),
        Duration::from_secs(5),
        || {
            let status = client.runtime_info().expect("the status");
            (found(&status) - df).abs() < 0.05
        },
    );
    let status = client.runtime_info().expect("the status");
    let directory = broker.data().join("commitlog").display().to_string();
    assert!(
        status.contains_key(&format!("commitLogDiskRatio_{directory}")),
        "{status:?}"
    );
    let capacity = &status["commitLogDirCapacity"];
    assert!(
        capacity.contains("GiB") && !capacity.contains("Total : 0"),
        "{capacity}"
    );
    broker.stop();
}
