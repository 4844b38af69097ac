//! Damage to a store that lies still: bits that flipped, blocks that are zero, old, swapped or of
//! another place, in every kind of file that is no settings file (those are in `settings_files`).
//!
//! Invariant: no reader is handed a message that was not stored like that; only messages that the
//! damage hit may be missing; `pinion inspect` names the damaged file; the next message of a queue
//! takes the next offset.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tests::client::{Client, answer};
use tests::process::{BrokerProcess, copy_directory, files_below, program};
use tests::{payload, turn};

const TOPIC: &str = "at_rest";
const QUEUES: i32 = 3;
/// They end some sixteen blocks behind the start of the ninth segment.
const MESSAGES: u64 = 3_050;
const BODY_BYTES: usize = 500;
const SEGMENT_BYTES: u64 = 256 << 10;
const BLOCK: u64 = 4_096;
/// More than a record of [`BODY_BYTES`] takes.
const RECORD_BYTES_MAX: i64 = 1_000;

/// How long a file of queues may take to be made again.
const MADE_AGAIN_MAX: Duration = Duration::from_secs(20);

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    /// One bit of it flipped.
    Flipped,
    /// It came back as zeros.
    Zeroed,
    /// It holds what another block holds: a write that went astray, or an old state.
    Misdirected,
    /// It and another block changed places.
    Swapped,
}

const DAMAGES: [Damage; 4] = [
    Damage::Flipped,
    Damage::Zeroed,
    Damage::Misdirected,
    Damage::Swapped,
];

/// One message as it was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stored {
    number: u64,
    physical_offset: i64,
}

/// By queue and offset.
type Content = BTreeMap<(i32, i64), Stored>;

/// A store at rest, and what is in it.
struct AtRest {
    broker: BrokerProcess,
    /// A copy of the store as it was.
    whole: PathBuf,
    content: Content,
}

impl AtRest {
    fn make(name: &str) -> Self {
        let mut broker = BrokerProcess::new(name);
        broker.set("mappedFileSizeCommitLog", &SEGMENT_BYTES.to_string());
        broker.arguments(&["--shards", "1"]).start();
        let mut client = broker.client();
        client.create_topic(TOPIC, QUEUES).expect("create topic");
        let mut content = Content::new();
        for number in 0..MESSAGES {
            let queue = (number % QUEUES as u64) as i32;
            let body = payload::body(number, BODY_BYTES);
            let keys = [("KEYS", "k")];
            let sent = client.send(TOPIC, queue, &body, &keys).expect("send");
            let physical_offset = tests::client::physical_offset(sent.message_id());
            let stored = Stored {
                number,
                physical_offset,
            };
            content.insert((queue, sent.queue_offset), stored);
        }
        broker.stop();
        let whole = broker.root().join("whole");
        copy_directory(&broker.data(), &whole);
        Self {
            broker,
            whole,
            content,
        }
    }

    /// Puts the whole store back.
    fn restore(&self) {
        fs::remove_dir_all(self.broker.data()).expect("the damaged store can go");
        copy_directory(&self.whole, &self.broker.data());
    }

    /// Whether `pinion inspect` finds fault with the store and names this file.
    fn is_named_by_inspect(&self, path: &Path) -> bool {
        let output = Command::new(program())
            .args(["inspect", "--data"])
            .arg(self.broker.data())
            .output()
            .expect("inspect");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        let name = path.file_name().expect("a file").to_string_lossy();
        !output.status.success() && text.contains(&*name)
    }

    /// Starts on the damaged store, reads everything, sends one more and stops. What was missing.
    fn served(&mut self) -> Vec<Stored> {
        self.broker.start();
        let mut client = self.broker.client();
        let mut missing = self.content.clone();
        for queue in 0..QUEUES {
            for (offset, number) in read_around(&mut client, queue) {
                let stored = missing.remove(&(queue, offset));
                let whole = stored.map(|stored| stored.number);
                assert_eq!(Some(number), whole, "queue {queue} offset {offset}");
            }
            let end = self.content.range((queue, 0)..(queue + 1, 0)).count() as i64;
            let body = payload::body(MESSAGES + queue as u64, BODY_BYTES);
            let sent = client.send(TOPIC, queue, &body, &[]).expect("send");
            assert_eq!(sent.queue_offset, end, "the next offset of queue {queue}");
        }
        self.broker.stop();
        missing.into_values().collect()
    }
}

/// Everything a consumer gets that goes where each answer tells it to go.
fn read_around(client: &mut Client, queue: i32) -> Vec<(i64, u64)> {
    let began = Instant::now();
    let mut got = Vec::new();
    let mut next = 0;
    loop {
        let pulled = match client.pull(TOPIC, queue, next, 64) {
            Ok(pulled) => pulled,
            // Said while a file is made again; consumers ask again.
            Err(error) if error.to_string().contains("made again") => {
                assert!(began.elapsed() < MADE_AGAIN_MAX, "still: {error}");
                thread::sleep(Duration::from_millis(20));
                continue;
            }
            Err(error) => panic!("queue {queue} at {next}: {error}"),
        };
        for record in &pulled.records {
            let number = payload::number(&record.body);
            let number = number
                .unwrap_or_else(|| panic!("queue {queue} offset {}: damaged", record.queue_offset));
            got.push((record.queue_offset, number));
        }
        if pulled.code == answer::PULL_NOT_FOUND || pulled.next_offset >= pulled.max_offset {
            return got;
        }
        let on = pulled.next_offset > next;
        assert!(on, "queue {queue} goes no further than {next}: {pulled:?}");
        next = pulled.next_offset;
    }
}

/// Damages the block at `at`, taking `other` for the block it is mixed up with.
fn damage(path: &Path, at: u64, other: u64, what: Damage) {
    let options = OpenOptions::new().read(true).write(true).open(path);
    let file = options.expect("the file");
    let read = |at: u64| {
        let mut block = vec![0; BLOCK as usize];
        let got = file.read_at(&mut block, at).expect("read");
        block.truncate(got);
        block
    };
    let (mut here, mut there) = (read(at), read(other));
    // The last block of a file may be a short one.
    let length = here.len().min(there.len());
    here.truncate(length);
    there.truncate(length);
    match what {
        Damage::Flipped => here[length / 2] ^= 0x10,
        Damage::Zeroed => here.fill(0),
        Damage::Misdirected => here.copy_from_slice(&there),
        Damage::Swapped => {
            file.write_all_at(&here, other).expect("write");
            here.copy_from_slice(&there);
        }
    }
    file.write_all_at(&here, at).expect("write");
}

/// Whether a message lies in one of these parts of the log.
fn is_hit(stored: &Stored, parts: &[Range<i64>]) -> bool {
    let end = stored.physical_offset + RECORD_BYTES_MAX;
    let hit = |part: &Range<i64>| stored.physical_offset < part.end && end > part.start;
    parts.iter().any(hit)
}

#[test]
fn a_damaged_block_of_the_log_costs_the_messages_in_it_and_no_other() {
    let _turn = turn();
    let mut store = AtRest::make("rest-log");
    let segments = store.broker.segments();
    let end = store.content.values().map(|stored| stored.physical_offset);
    let end = end.max().expect("messages") as u64;
    let last = end / SEGMENT_BYTES;
    assert!(
        end % SEGMENT_BYTES > 10 * BLOCK,
        "the last segment ends at {end}"
    );
    // The first, one in the middle, and the one that the next message goes to.
    for (number, what) in [0, last / 2, last]
        .into_iter()
        .flat_map(|number| DAMAGES.map(|what| (number, what)))
    {
        let path = &segments[number as usize];
        let (at, other) = (8 * BLOCK, 3 * BLOCK);
        damage(path, at, other, what);
        assert!(
            store.is_named_by_inspect(path),
            "{what:?} in segment {number}"
        );
        let missing = store.served();
        let start = number * SEGMENT_BYTES;
        let part = |at: u64| (start + at) as i64..(start + at + BLOCK) as i64;
        let parts = match what {
            Damage::Swapped => vec![part(at), part(other)],
            _ => vec![part(at)],
        };
        assert!(
            !missing.is_empty(),
            "{what:?} in segment {number} hit nothing"
        );
        for stored in missing {
            assert!(
                is_hit(&stored, &parts),
                "{what:?} in segment {number}: {stored:?}"
            );
        }
        let output = store.broker.output();
        assert!(output.contains("damaged"), "said nothing:\n{output}");
        store.restore();
    }
}

#[test]
fn a_damaged_file_of_queues_costs_nothing_and_is_made_again() {
    let _turn = turn();
    let mut store = AtRest::make("rest-queues");
    let files = files_below(&store.broker.data().join("consumequeue"));
    assert!(!files.is_empty(), "no run files");
    let picked = [0, files.len() / 2, files.len() - 1];
    for what in DAMAGES {
        for at in picked {
            let path = &files[at];
            let blocks = fs::metadata(path).expect("a file").len().div_ceil(BLOCK);
            // Not the same block: that would be no damage.
            let (at, other) = (blocks / 2 * BLOCK, (blocks / 2 + 1) % blocks * BLOCK);
            if blocks < 2 && matches!(what, Damage::Misdirected | Damage::Swapped) {
                continue;
            }
            damage(path, at, other, what);
            assert!(
                store.is_named_by_inspect(path),
                "{what:?} in {}",
                path.display()
            );
            let missing = store.served();
            assert!(
                missing.is_empty(),
                "{what:?} in {}: {missing:?}",
                path.display()
            );
            store.restore();
        }
    }
}

#[test]
fn a_damaged_write_buffer_gives_back_what_is_whole_and_nothing_else() {
    let _turn = turn();
    let mut store = AtRest::make("rest-buffer");
    store.broker.start();
    let mut client = store.broker.client();
    let mut newest = Vec::new();
    for number in 0..200 {
        let body = payload::body(MESSAGES + number, BODY_BYTES);
        let sent = client.send(TOPIC, 0, &body, &[]).expect("send");
        newest.push((sent.queue_offset, MESSAGES + number));
    }
    store.broker.kill();
    let buffers = files_below(&store.broker.buffer_directory());
    assert!(!buffers.is_empty(), "no write buffer survived");
    for path in &buffers {
        let length = fs::metadata(path).expect("a file").len();
        for at in (BLOCK..length.min(64 * BLOCK)).step_by(5 * BLOCK as usize) {
            damage(path, at, 0, Damage::Flipped);
        }
    }
    store.broker.start();
    let mut client = store.broker.client();
    let got = read_around(&mut client, 0);
    for (offset, number) in got {
        let old = store.content.get(&(0, offset)).map(|stored| stored.number);
        let new = newest.iter().find(|(at, _)| *at == offset);
        let known = old.or(new.map(|(_, number)| *number));
        assert_eq!(Some(number), known, "offset {offset}");
    }
    let sent = client.send(TOPIC, 0, &payload::body(7, 100), &[]);
    let next = sent.expect("the queue goes on").queue_offset;
    let pulled = client.pull(TOPIC, 0, next, 1).expect("read");
    assert_eq!(pulled.records.len(), 1, "{pulled:?}");
    store.broker.stop();
}
