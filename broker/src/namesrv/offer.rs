//! Owns the private words between this name server and brokers of this program: what a broker says
//! of its disks and of its automatically created topics, and what a name server tells it.
//!
//! All of it rides on requests every name server knows, in header fields and a topic attribute that
//! others ignore:
//!
//! | where | name | meaning |
//! |---|---|---|
//! | 103 header | [`TABLE_FIELD`] | `whole` or `part`: what the body holds |
//! | 103 header | [`GONE_FIELD`] | topics an administrator just deleted, commas between |
//! | 103 body, topic | [`CREATED_ATTRIBUTE`] | when a send created the topic, in milliseconds |
//! | 103 and 904 header | [`ASK_FIELD`] | `true`: the broker would create what it lacks |
//! | answer to those | [`OFFER_FIELD`] | topics it lacks; an empty text says there are none |
//! | 103 and 904 header | [`DISK_FIELD`] | how long its oldest log write waits, and which shard's |
//! | answer to those | [`PEERS_FIELD`] | how many other masters of its cluster take messages |
//!
//! Invariant: an offer is never longer than [`OFFER_TOPICS_MAX`] topics and about
//! [`OFFER_BYTES_MAX`] bytes, and a part of it that cannot be read is left out alone.

/// Header field of a registration that says whether the body is the whole table.
pub const TABLE_FIELD: &str = "pinionTable";
/// Value of [`TABLE_FIELD`] for the whole table.
pub const TABLE_WHOLE: &str = "whole";
/// Value of [`TABLE_FIELD`] for changed topics only.
pub const TABLE_PART: &str = "part";
/// Header field of a registration that names deleted topics.
pub const GONE_FIELD: &str = "pinionGone";
/// Header field of a broker that takes offers.
pub const ASK_FIELD: &str = "pinionAsk";
/// Header field of an answer that holds offers.
pub const OFFER_FIELD: &str = "pinionOffer";
/// Header field of a broker that tells of its disks.
pub const DISK_FIELD: &str = "pinionDisk";
/// Header field of an answer that counts other brokers.
pub const PEERS_FIELD: &str = "pinionPeers";
/// Topic attribute, in registrations only: when a send created the topic.
pub const CREATED_ATTRIBUTE: &str = "pinion.created";

/// Most topics in one offer.
pub const OFFER_TOPICS_MAX: usize = 500;
/// Bytes after which an offer is cut.
pub const OFFER_BYTES_MAX: usize = 32 * 1024;

/// A topic that other brokers of the cluster have because somebody sent to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Its name.
    pub topic: String,
    /// Queues to read.
    pub read_queue_nums: i32,
    /// Queues to write.
    pub write_queue_nums: i32,
    /// Topic flags.
    pub topic_sys_flag: i32,
    /// When a send created it, in milliseconds.
    pub created_ms: i64,
}

impl Offer {
    /// Appends one offer; blanks between its words, commas between offers.
    pub fn write(&self, out: &mut String) {
        if !out.is_empty() {
            out.push(',');
        }
        out.push_str(&format!(
            "{} {} {} {} {}",
            self.topic,
            self.read_queue_nums,
            self.write_queue_nums,
            self.topic_sys_flag,
            self.created_ms
        ));
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let offer = Self {
            topic: words.next().filter(|name| !name.is_empty())?.to_owned(),
            read_queue_nums: words.next()?.parse().ok()?,
            write_queue_nums: words.next()?.parse().ok()?,
            topic_sys_flag: words.next()?.parse().ok()?,
            created_ms: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(offer)
    }
}

/// What a broker tells of its disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskReport {
    /// How long the oldest log write waits on a disk that hangs, in milliseconds; 0 without one.
    pub waits_ms: u64,
    /// Its shard.
    pub shard: u16,
}

impl DiskReport {
    /// The text of [`DISK_FIELD`].
    #[must_use]
    pub fn text(&self) -> String {
        format!("{} {}", self.waits_ms, self.shard)
    }

    /// Reads that text; what a later version adds is passed over.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let (waits_ms, shard) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(Self { waits_ms, shard })
    }
}

/// The offers of an answer, at most [`OFFER_TOPICS_MAX`].
pub fn read_offers(text: &str) -> impl Iterator<Item = Offer> + '_ {
    text.split(',')
        .take(OFFER_TOPICS_MAX)
        .filter_map(Offer::read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_disks_are_read_as_written() {
        let report = DiskReport {
            waits_ms: 412,
            shard: 3,
        };
        assert_eq!(DiskReport::read(&report.text()), Some(report));
        assert_eq!(DiskReport::read("412 3 more"), Some(report));
        for damaged in ["", "412", "-1 3", "412 70000", "x 3"] {
            assert_eq!(DiskReport::read(damaged), None, "{damaged}");
        }
    }

    #[test]
    fn offers_are_read_as_written_and_damaged_ones_left_out() {
        let offer = |topic: &str| Offer {
            topic: topic.to_owned(),
            read_queue_nums: 4,
            write_queue_nums: 3,
            topic_sys_flag: 1,
            created_ms: 1_800_000_000_000,
        };
        let mut text = String::new();
        offer("T").write(&mut text);
        offer("%weird|name-_").write(&mut text);
        let read: Vec<Offer> = read_offers(&text).collect();
        assert_eq!(read, [offer("T"), offer("%weird|name-_")]);
        text.push_str(",U 4 4,V 4 4 0 x, 4 4 0 1,W 1 1 0 5 6,");
        assert_eq!(read_offers(&text).count(), 2);
        assert_eq!(read_offers("").count(), 0);
        assert_eq!(read_offers(&"T 1 1 0 1,".repeat(2_000)).count(), 500);
    }
}
