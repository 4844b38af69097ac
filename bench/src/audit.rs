//! Owns what was acknowledged and the comparison of it with what is read back.
//!
//! Invariant: every acknowledged message of the run is looked for, none is sampled; a message that
//! is missing from its offset, stands there with another body, is there twice, or was overtaken by
//! one sent after its acknowledgement, fails the run. Eight bytes are kept for each message.

use wire::message::RecordView;

use crate::stamp::{STAMP_BYTES, Stamp};

/// Acknowledged messages that can be kept: 1 GiB.
pub const ENTRIES_MAX: usize = 1 << 27;
/// Findings that are told in words.
const EXAMPLES_MAX: usize = 10;
const NOBODY: u32 = u32::MAX;

/// An acknowledged message at its offset.
#[derive(Clone, Copy, Debug)]
struct Entry {
    sequence: u32,
    /// The low bits of its physical offset.
    address: u32,
}

impl Entry {
    const EMPTY: Self = Self {
        sequence: NOBODY,
        address: 0,
    };
}

/// What is known of one queue.
#[derive(Clone, Debug, Default)]
struct Ledger {
    /// Its end when the run began.
    base: i64,
    /// The highest offset acknowledged so far.
    acked_to: i64,
    /// Acknowledged messages from `base` on.
    entries: Vec<Entry>,
    /// Entries that were acknowledged and not yet read back.
    open: u64,
}

/// What an audit found.
#[derive(Clone, Default, PartialEq, Debug, serde::Serialize)]
pub struct Findings {
    /// Messages acknowledged.
    pub acked: u64,
    /// Of them, found at their offsets with their bodies.
    pub found: u64,
    /// Of them, not there.
    pub lost: u64,
    /// Messages that stand at two offsets, or offsets acknowledged twice.
    pub doubled: u64,
    /// Messages that stand before one acknowledged before they were sent.
    pub reordered: u64,
    /// Records whose body or checksum is not what was sent.
    pub damaged: u64,
    /// Stored messages of the run that were not acknowledged; no fault.
    pub unacked_stored: u64,
    /// Messages of others among them; no fault.
    pub foreign: u64,
    /// Why not all could be checked; a fault.
    pub incomplete: Option<String>,
    /// The first findings in words.
    pub examples: Vec<String>,
}

impl Findings {
    /// Whether figures may be told.
    pub fn sound(&self) -> bool {
        self.lost + self.doubled + self.reordered + self.damaged == 0 && self.incomplete.is_none()
    }

    fn tell(&mut self, example: impl FnOnce() -> String) {
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(example());
        }
    }
}

/// Keeps what was acknowledged.
#[derive(Debug)]
pub struct Audit {
    run: u64,
    /// Number of the first message it is about.
    first: u64,
    queues: Vec<Ledger>,
    entries: usize,
    /// Stamped bodies end like this.
    body_tail: Vec<u8>,
    seen: Vec<u64>,
    findings: Findings,
}

impl Audit {
    /// For queues whose ends are known; `body` is a body of the run, `first` the number of the
    /// first message.
    pub fn new(run: u64, first: u64, body: &[u8], ends: &[i64]) -> Self {
        let ledger = |end: &i64| Ledger {
            base: *end,
            acked_to: *end - 1,
            ..Ledger::default()
        };
        Self {
            run,
            first,
            queues: ends.iter().map(ledger).collect(),
            entries: 0,
            body_tail: body.get(STAMP_BYTES..).unwrap_or_default().to_vec(),
            seen: Vec::new(),
            findings: Findings::default(),
        }
    }

    /// The highest offset acknowledged in a queue: what is sent from now on must come behind it.
    pub fn acked_to(&self, queue: usize) -> i64 {
        self.queues.get(queue).map_or(-1, |ledger| ledger.acked_to)
    }

    /// A message was acknowledged at an offset; `behind` is what [`Self::acked_to`] was when it was
    /// sent.
    pub fn acked(&mut self, queue: usize, offset: i64, address: i64, sequence: u64, behind: i64) {
        let findings = &mut self.findings;
        findings.acked += 1;
        if offset <= behind {
            findings.reordered += 1;
            findings.tell(|| {
                format!(
                    "message {sequence} got offset {offset} of queue {queue}, though offset \
                     {behind} was acknowledged before it was sent"
                )
            });
        }
        let Some(ledger) = self.queues.get_mut(queue) else {
            findings.incomplete = Some(format!("an answer names queue {queue}"));
            return;
        };
        ledger.acked_to = ledger.acked_to.max(offset);
        let at = usize::try_from(offset - ledger.base).unwrap_or(usize::MAX);
        let missing = at.saturating_add(1).saturating_sub(ledger.entries.len());
        if missing > 0 {
            if self.entries.saturating_add(missing) > ENTRIES_MAX {
                findings.incomplete = Some(format!(
                    "offset {offset} of queue {queue} is beyond what can be kept \
                     ({ENTRIES_MAX} messages); make the run shorter"
                ));
                return;
            }
            self.entries += missing;
            ledger.entries.resize(at + 1, Entry::EMPTY);
        }
        let number = sequence - self.first;
        let (Some(entry), Ok(number)) = (ledger.entries.get_mut(at), u32::try_from(number)) else {
            findings.incomplete = Some("more messages than can be numbered".to_owned());
            return;
        };
        if entry.sequence != NOBODY {
            findings.doubled += 1;
            findings.tell(|| format!("offset {offset} of queue {queue} was acknowledged twice"));
            return;
        }
        ledger.open += 1;
        *entry = Entry {
            sequence: number,
            address: address as u32,
        };
    }

    /// Where reading back begins, and where at least it must end.
    pub fn range(&self, queue: usize) -> (i64, i64) {
        let ledger = self.queues.get(queue);
        ledger.map_or((0, 0), |ledger| {
            (ledger.base, ledger.base + ledger.entries.len() as i64)
        })
    }

    /// A record was read back.
    pub fn read(&mut self, queue: usize, record: &RecordView<'_>) {
        let offset = record.queue_offset();
        let Some(ledger) = self.queues.get_mut(queue) else {
            return;
        };
        let at = usize::try_from(offset - ledger.base).unwrap_or(usize::MAX);
        let entry = ledger.entries.get_mut(at);
        let wanted = entry.as_ref().map_or(Entry::EMPTY, |entry| **entry);
        let stamp = Stamp::read(record.body()).filter(|stamp| stamp.run == self.run);
        let findings = &mut self.findings;
        let Some(stamp) = stamp else {
            findings.foreign += u64::from(wanted.sequence == NOBODY);
            return;
        };
        let tail = record.body().get(STAMP_BYTES..).unwrap_or_default();
        if tail != self.body_tail || record.check_body_crc().is_err() {
            findings.damaged += 1;
            findings.tell(|| format!("offset {offset} of queue {queue} has another body"));
        }
        let number = stamp.sequence.wrapping_sub(self.first);
        if number >= u64::from(NOBODY) {
            return;
        }
        if first_time(&mut self.seen, number) {
            findings.unacked_stored += u64::from(wanted.sequence == NOBODY);
        } else {
            findings.doubled += 1;
            let sequence = stamp.sequence;
            findings.tell(|| {
                format!("message {sequence} stands once more at offset {offset} of queue {queue}")
            });
        }
        let here = u64::from(wanted.sequence) == number
            && wanted.address == record.physical_offset() as u32;
        if let (true, Some(entry)) = (here, entry) {
            *entry = Entry::EMPTY;
            ledger.open -= 1;
            findings.found += 1;
        }
    }

    /// Something kept the reading back from its end.
    pub fn broke_off(&mut self, why: &str) {
        self.findings.incomplete = Some(why.to_owned());
    }

    /// Everything was read back: what is still open was lost.
    pub fn finish(mut self) -> Findings {
        for (queue, ledger) in self.queues.iter().enumerate() {
            self.findings.lost += ledger.open;
            if ledger.open == 0 {
                continue;
            }
            let open = ledger
                .entries
                .iter()
                .position(|entry| entry.sequence != NOBODY);
            let offset = ledger.base + open.unwrap_or_default() as i64;
            let (number, open) = (queue, ledger.open);
            self.findings.tell(|| {
                format!(
                    "{open} acknowledged messages of queue {number} are not at their offsets, the \
                     first at {offset}"
                )
            });
        }
        self.findings
    }
}

/// Marks a number; false if it was marked before.
fn first_time(seen: &mut Vec<u64>, number: u64) -> bool {
    let (word, bit) = ((number / 64) as usize, 1_u64 << (number % 64));
    if seen.len() <= word {
        seen.resize(word + 1, 0);
    }
    let Some(bits) = seen.get_mut(word) else {
        return true;
    };
    let first = *bits & bit == 0;
    *bits |= bit;
    first
}

#[cfg(test)]
mod tests {
    use wire::message::RecordFields;

    use super::*;
    use crate::stamp;

    const RUN: u64 = 77;
    const BODY_BYTES: usize = 64;

    /// A broker in a row of bytes: messages in append order.
    struct Stored {
        records: Vec<Vec<u8>>,
    }

    fn record(sequence: u64, offset: i64, address: i64, spoil: bool) -> Vec<u8> {
        let mut body = stamp::body(RUN, BODY_BYTES);
        let stamp = Stamp {
            run: RUN,
            sequence,
            born_ns: 5,
        };
        body[..STAMP_BYTES].copy_from_slice(&stamp.bytes());
        if spoil {
            body[BODY_BYTES - 1] ^= 1;
        }
        let host = "127.0.0.1:10911".parse().unwrap();
        let fields = RecordFields {
            queue_id: 0,
            flag: 0,
            queue_offset: offset,
            physical_offset: address,
            sys_flag: 0,
            born_timestamp: 1,
            born_host: host,
            store_timestamp: 1,
            store_host: host,
            reconsume_times: 0,
            prepared_transaction_offset: 0,
            body: &body,
            topic: b"T",
            properties: &[b""],
        };
        let mut out = vec![0; fields.encoded_len()];
        fields.encode(&mut out).unwrap();
        out
    }

    /// Ten messages acknowledged in order at offsets from 100 on.
    fn ten() -> (Audit, Stored) {
        let mut audit = Audit::new(RUN, 1_000, &stamp::body(RUN, BODY_BYTES), &[100]);
        let mut records = Vec::new();
        for number in 0..10 {
            let (offset, address) = (100 + number, 4_096 * number);
            let behind = audit.acked_to(0);
            audit.acked(0, offset, address, 1_000 + number as u64, behind);
            records.push(record(1_000 + number as u64, offset, address, false));
        }
        (audit, Stored { records })
    }

    fn read_back(mut audit: Audit, stored: &Stored) -> Findings {
        for bytes in &stored.records {
            audit.read(0, &RecordView::parse(bytes).unwrap());
        }
        audit.finish()
    }

    #[test]
    fn a_broker_that_keeps_everything_passes() {
        let (audit, stored) = ten();
        assert_eq!(audit.range(0), (100, 110));
        let findings = read_back(audit, &stored);
        assert!(findings.sound(), "{findings:?}");
        assert_eq!((findings.acked, findings.found), (10, 10));
    }

    #[test]
    fn a_lost_message_is_found() {
        let (audit, mut stored) = ten();
        stored.records.remove(4);
        let findings = read_back(audit, &stored);
        assert!(!findings.sound());
        assert_eq!((findings.lost, findings.found), (1, 9));
        assert!(findings.examples[0].contains("104"), "{findings:?}");
    }

    #[test]
    fn a_lost_message_whose_place_another_took_is_found() {
        let (audit, mut stored) = ten();
        stored.records[4] = record(5_000, 104, 4 * 4_096, false);
        let findings = read_back(audit, &stored);
        assert_eq!(findings.lost, 1);
    }

    #[test]
    fn a_doubled_message_is_found() {
        let (audit, mut stored) = ten();
        stored.records.push(record(1_003, 110, 99_000, false));
        let findings = read_back(audit, &stored);
        assert_eq!((findings.doubled, findings.lost), (1, 0));
        assert!(!findings.sound());
    }

    #[test]
    fn an_offset_given_to_two_messages_is_found() {
        let (mut audit, stored) = ten();
        audit.acked(0, 109, 1, 1_010, 108);
        let findings = read_back(audit, &stored);
        assert_eq!(findings.doubled, 1);
    }

    #[test]
    fn a_message_before_one_acknowledged_earlier_is_found() {
        let mut audit = Audit::new(RUN, 0, &stamp::body(RUN, BODY_BYTES), &[0]);
        let before = audit.acked_to(0);
        audit.acked(0, 1, 0, 0, before);
        // Sent while the first was in flight, so any order will do.
        audit.acked(0, 0, 1, 1, before);
        assert_eq!(audit.findings.reordered, 0);
        // Sent after both were acknowledged, and yet before them.
        let after = audit.acked_to(0);
        audit.acked(0, 2, 2, 2, after);
        assert_eq!(audit.findings.reordered, 0);
        audit.acked(0, 1, 3, 3, audit.acked_to(0));
        assert_eq!(audit.findings.reordered, 1);
    }

    #[test]
    fn a_damaged_body_and_a_wrong_place_in_the_log_are_found() {
        let (audit, mut stored) = ten();
        stored.records[2] = record(1_002, 102, 2 * 4_096, true);
        stored.records[3] = record(1_003, 103, 7, false);
        let findings = read_back(audit, &stored);
        assert_eq!((findings.damaged, findings.lost), (1, 1));
    }

    #[test]
    fn what_was_stored_without_an_answer_and_what_is_of_others_is_no_fault() {
        let (audit, mut stored) = ten();
        stored.records.push(record(1_010, 110, 99_000, false));
        let findings = read_back(audit, &stored);
        assert!(findings.sound());
        assert_eq!(findings.unacked_stored, 1);
        let (mut audit, _) = ten();
        audit.acked(0, i64::MAX / 2, 0, 1_011, 0);
        assert!(!audit.finish().sound());
    }
}
