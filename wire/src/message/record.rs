//! Owns the layout of a stored record, which is also the layout on the wire.
//!
//! Invariant: encoding writes exactly `encoded_len` bytes in one pass without allocation; parsing
//! accepts a record only when its inner lengths add up to its total size.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use thiserror::Error;

use super::sysflag;

/// Magic of a record with a one-byte topic length.
pub const MAGIC_V1: u32 = 0xDAA3_20A7;
/// Magic of a record with a two-byte topic length.
pub const MAGIC_V2: u32 = 0xDAA3_20AB;
/// Magic of the filler at the end of a segment.
pub const MAGIC_BLANK: u32 = 0xCBD4_3194;

/// Bytes of the smallest record there can be: version 1, IPv4, one byte of topic.
pub const RECORD_BYTES_MIN: usize = FIXED_BYTES_V1 + 1;
/// Largest body a record can hold so that its size still fits a frame many times over.
pub const BODY_BYTES_MAX: usize = 1 << 30;
/// Largest topic.
pub const TOPIC_BYTES_MAX: usize = i16::MAX as usize;
/// Largest topic whose length is written in one byte.
const TOPIC_BYTES_V1_MAX: usize = i8::MAX as usize;
/// Largest properties string.
pub const PROPERTIES_BYTES_MAX: usize = i16::MAX as usize;

/// Bytes of a version 1 record with IPv4 addresses besides body, topic and properties.
const FIXED_BYTES_V1: usize = 91;
/// Bytes in front of the body with IPv4 addresses.
const HEAD_BYTES_V4: usize = 88;
/// Bytes an IPv6 address takes more than an IPv4 address.
const V6_EXTRA_BYTES: usize = 12;
/// Offset of the born host; everything before it has a fixed place.
const BORN_HOST_AT: usize = 48;

/// Why a record cannot be encoded or is not a record.
#[derive(Error, Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordError {
    /// The bytes end before the record does.
    #[error("record needs {needed} bytes but only {available} are there")]
    Truncated {
        /// Bytes of the record.
        needed: usize,
        /// Bytes present.
        available: usize,
    },
    /// The size field is smaller than the smallest record.
    #[error("record size {0} is smaller than the smallest record of {RECORD_BYTES_MIN} bytes")]
    Size(u32),
    /// This is the filler at the end of a segment.
    #[error("blank filler of {0} bytes, the segment ends here")]
    Blank(u32),
    /// Neither of the magics of a message.
    #[error("magic {0:#010x} is not that of a message")]
    Magic(u32),
    /// An inner length leads past the end of the record, or is negative.
    #[error("{field} length {length} does not fit a record of {total} bytes")]
    Length {
        /// The part with the bad length.
        field: &'static str,
        /// The length read.
        length: i64,
        /// Size of the record.
        total: u32,
    },
    /// The inner lengths add up to less than the record.
    #[error("record of {total} bytes ends after {used}")]
    Leftover {
        /// Size of the record.
        total: u32,
        /// Bytes its parts take.
        used: usize,
    },
    /// The topic is empty.
    #[error("record has no topic")]
    NoTopic,
    /// A port is not one.
    #[error("{field} has port {port}")]
    Port {
        /// Which address.
        field: &'static str,
        /// The number read.
        port: i32,
    },
    /// A part is too long to be written.
    #[error("{field} of {bytes} bytes is longer than the bound of {bytes_max}")]
    TooLong {
        /// The part.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// The checksum of the body does not match.
    #[error("body checksum is {computed:#010x}, the record says {stored:#010x}")]
    BodyCrc {
        /// Checksum of the body as it is.
        computed: u32,
        /// Checksum in the record.
        stored: u32,
    },
}

/// The checksum of a body as records carry it.
pub fn body_crc(body: &[u8]) -> u32 {
    crc32fast::hash(body) & 0x7FFF_FFFF
}

/// Size and magic at the start of `bytes`, when eight bytes are there.
pub fn peek_len(bytes: &[u8]) -> Option<(u32, u32)> {
    let [a, b, c, d, e, f, g, h] = *bytes.first_chunk::<8>()?;
    Some((
        u32::from_be_bytes([a, b, c, d]),
        u32::from_be_bytes([e, f, g, h]),
    ))
}

/// Everything a record is made of.
#[derive(Clone, Copy, Debug)]
pub struct RecordFields<'a> {
    /// Queue id.
    pub queue_id: i32,
    /// Flag of the user.
    pub flag: i32,
    /// Offset in the queue.
    pub queue_offset: i64,
    /// Offset in the log.
    pub physical_offset: i64,
    /// System flags; the host bits are set from the addresses.
    pub sys_flag: i32,
    /// When the message was made, in milliseconds since 1970.
    pub born_timestamp: i64,
    /// Where it came from.
    pub born_host: SocketAddr,
    /// When it was stored, in milliseconds since 1970.
    pub store_timestamp: i64,
    /// The broker's address.
    pub store_host: SocketAddr,
    /// How often it was consumed again.
    pub reconsume_times: i32,
    /// Log offset of the half message this one completes.
    pub prepared_transaction_offset: i64,
    /// Body as stored.
    pub body: &'a [u8],
    /// Topic.
    pub topic: &'a [u8],
    /// Properties string in parts, written one after the other.
    pub properties: &'a [&'a [u8]],
}

/// Writes big-endian fields one after the other; remembers when the output was too short.
struct Writer<'o> {
    rest: &'o mut [u8],
    is_full: bool,
}

impl<'o> Writer<'o> {
    fn over(out: &'o mut [u8]) -> Self {
        Self {
            rest: out,
            is_full: false,
        }
    }

    #[inline(always)]
    fn put(&mut self, bytes: &[u8]) {
        let rest = std::mem::take(&mut self.rest);
        match rest.split_at_mut_checked(bytes.len()) {
            Some((slot, after)) => {
                slot.copy_from_slice(bytes);
                self.rest = after;
            }
            None => self.is_full = true,
        }
    }

    #[inline(always)]
    fn host(&mut self, host: &SocketAddr) {
        match host.ip() {
            IpAddr::V4(ip) => self.put(&ip.octets()),
            IpAddr::V6(ip) => self.put(&ip.octets()),
        }
        self.put(&i32::from(host.port()).to_be_bytes());
    }
}

const fn host_extra_bytes(host: &SocketAddr) -> usize {
    if host.is_ipv6() { V6_EXTRA_BYTES } else { 0 }
}

impl RecordFields<'_> {
    fn properties_bytes(&self) -> usize {
        self.properties.iter().map(|part| part.len()).sum()
    }

    /// Whether the topic needs a two-byte length.
    fn is_v2(&self) -> bool {
        self.topic.len() > TOPIC_BYTES_V1_MAX
    }

    /// Bytes the record takes.
    pub fn encoded_len(&self) -> usize {
        FIXED_BYTES_V1
            + usize::from(self.is_v2())
            + host_extra_bytes(&self.born_host)
            + host_extra_bytes(&self.store_host)
            + self.body.len()
            + self.topic.len()
            + self.properties_bytes()
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.topic.is_empty() {
            return Err(RecordError::NoTopic);
        }
        for (field, bytes, bytes_max) in [
            ("body", self.body.len(), BODY_BYTES_MAX),
            ("topic", self.topic.len(), TOPIC_BYTES_MAX),
            ("properties", self.properties_bytes(), PROPERTIES_BYTES_MAX),
        ] {
            if bytes > bytes_max {
                return Err(RecordError::TooLong {
                    field,
                    bytes,
                    bytes_max,
                });
            }
        }
        Ok(())
    }

    /// System flags with the host bits as the addresses need them.
    fn sys_flag(&self) -> i32 {
        let mut sys_flag = self.sys_flag & !(sysflag::BORN_HOST_V6 | sysflag::STORE_HOST_V6);
        if self.born_host.is_ipv6() {
            sys_flag |= sysflag::BORN_HOST_V6;
        }
        if self.store_host.is_ipv6() {
            sys_flag |= sysflag::STORE_HOST_V6;
        }
        sys_flag
    }

    /// Writes everything in front of the body.
    #[inline(always)]
    fn head(&self, writer: &mut Writer<'_>, total_bytes: usize, magic: u32) {
        writer.put(&(total_bytes as u32).to_be_bytes());
        writer.put(&magic.to_be_bytes());
        writer.put(&body_crc(self.body).to_be_bytes());
        writer.put(&self.queue_id.to_be_bytes());
        writer.put(&self.flag.to_be_bytes());
        writer.put(&self.queue_offset.to_be_bytes());
        writer.put(&self.physical_offset.to_be_bytes());
        writer.put(&self.sys_flag().to_be_bytes());
        writer.put(&self.born_timestamp.to_be_bytes());
        writer.host(&self.born_host);
        writer.put(&self.store_timestamp.to_be_bytes());
        writer.host(&self.store_host);
        writer.put(&self.reconsume_times.to_be_bytes());
        writer.put(&self.prepared_transaction_offset.to_be_bytes());
        writer.put(&(self.body.len() as u32).to_be_bytes());
    }

    /// Writes the record at the start of `out` and returns its size.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, RecordError> {
        self.check()?;
        let total_bytes = self.encoded_len();
        let available = out.len();
        if available < total_bytes {
            return Err(RecordError::Truncated {
                needed: total_bytes,
                available,
            });
        }
        let is_v2 = self.is_v2();
        let magic = if is_v2 { MAGIC_V2 } else { MAGIC_V1 };
        let mut writer = Writer::over(out);
        if self.born_host.is_ipv4() && self.store_host.is_ipv4() {
            // The places are all known to the compiler here, so nothing is checked twice.
            let mut head = [0; HEAD_BYTES_V4];
            let mut whole = Writer::over(&mut head);
            self.head(&mut whole, total_bytes, magic);
            debug_assert!(whole.rest.is_empty() && !whole.is_full);
            writer.put(&head);
        } else {
            self.head(&mut writer, total_bytes, magic);
        }
        writer.put(self.body);
        if is_v2 {
            writer.put(&(self.topic.len() as u16).to_be_bytes());
        } else {
            writer.put(&[self.topic.len() as u8]);
        }
        writer.put(self.topic);
        writer.put(&(self.properties_bytes() as u16).to_be_bytes());
        for part in self.properties {
            writer.put(part);
        }
        if writer.is_full {
            return Err(RecordError::Truncated {
                needed: total_bytes,
                available,
            });
        }
        debug_assert_eq!(
            available - writer.rest.len(),
            total_bytes,
            "size as computed"
        );
        Ok(total_bytes)
    }
}

/// A whole record, read in place.
#[derive(Clone, Copy, Debug)]
pub struct RecordView<'a> {
    raw: &'a [u8],
    body: &'a [u8],
    topic: &'a [u8],
    properties: &'a [u8],
    born_host: SocketAddr,
    store_host: SocketAddr,
    /// Offset of the store timestamp, which follows the born host.
    store_timestamp_at: usize,
    /// Offset of the reconsume count, which follows the store host.
    reconsume_times_at: usize,
}

/// Reads the parts of a record in order, within its bounds.
struct Reader<'a> {
    raw: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], RecordError> {
        let rest = self.raw.get(self.at..).unwrap_or_default();
        let Some(array) = rest.first_chunk::<N>() else {
            let total = self.raw.len() as u32;
            return Err(RecordError::Length {
                field,
                length: N as i64,
                total,
            });
        };
        self.at += N;
        Ok(*array)
    }

    fn host(&mut self, field: &'static str, is_v6: bool) -> Result<SocketAddr, RecordError> {
        let ip = if is_v6 {
            IpAddr::V6(Ipv6Addr::from(self.array::<16>(field)?))
        } else {
            IpAddr::V4(Ipv4Addr::from(self.array::<4>(field)?))
        };
        let port = i32::from_be_bytes(self.array(field)?);
        match u16::try_from(port) {
            Ok(port) => Ok(SocketAddr::new(ip, port)),
            Err(_) => Err(RecordError::Port { field, port }),
        }
    }

    fn slice(&mut self, field: &'static str, length: i64) -> Result<&'a [u8], RecordError> {
        let rest = self.raw.get(self.at..).unwrap_or_default();
        let slice = usize::try_from(length)
            .ok()
            .and_then(|bytes| rest.get(..bytes));
        let Some(slice) = slice else {
            return Err(RecordError::Length {
                field,
                length,
                total: self.raw.len() as u32,
            });
        };
        self.at += slice.len();
        Ok(slice)
    }
}

impl<'a> RecordView<'a> {
    /// Reads the record at the start of `bytes`; what follows it is not looked at.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, RecordError> {
        let available = bytes.len();
        let (size, magic) = peek_len(bytes).ok_or(RecordError::Truncated {
            needed: RECORD_BYTES_MIN,
            available,
        })?;
        match magic {
            MAGIC_V1 | MAGIC_V2 => {}
            MAGIC_BLANK => return Err(RecordError::Blank(size)),
            other => return Err(RecordError::Magic(other)),
        }
        let needed = size as usize;
        if needed < RECORD_BYTES_MIN {
            return Err(RecordError::Size(size));
        }
        let raw = bytes
            .get(..needed)
            .ok_or(RecordError::Truncated { needed, available })?;
        let sys_flag = i32::from_be_bytes(fixed(raw, 36));
        let mut reader = Reader {
            raw,
            at: BORN_HOST_AT,
        };
        let born_host = reader.host("born host", sys_flag & sysflag::BORN_HOST_V6 != 0)?;
        let store_timestamp_at = reader.at;
        reader.array::<8>("store timestamp")?;
        let store_host = reader.host("store host", sys_flag & sysflag::STORE_HOST_V6 != 0)?;
        let reconsume_times_at = reader.at;
        reader.array::<12>("reconsume times")?;
        let body_bytes = i32::from_be_bytes(reader.array("body length")?);
        let body = reader.slice("body", i64::from(body_bytes))?;
        let topic_bytes = if magic == MAGIC_V2 {
            i64::from(i16::from_be_bytes(reader.array("topic length")?))
        } else {
            i64::from(i8::from_be_bytes(reader.array("topic length")?))
        };
        let topic = reader.slice("topic", topic_bytes)?;
        let properties_bytes = i16::from_be_bytes(reader.array("properties length")?);
        let properties = reader.slice("properties", i64::from(properties_bytes))?;
        if reader.at != raw.len() {
            return Err(RecordError::Leftover {
                total: size,
                used: reader.at,
            });
        }
        if topic.is_empty() {
            return Err(RecordError::NoTopic);
        }
        Ok(Self {
            raw,
            body,
            topic,
            properties,
            born_host,
            store_host,
            store_timestamp_at,
            reconsume_times_at,
        })
    }

    /// Size of the record.
    pub fn total_len(&self) -> usize {
        self.raw.len()
    }

    /// The record as stored.
    pub fn raw(&self) -> &'a [u8] {
        self.raw
    }

    /// [`MAGIC_V1`] or [`MAGIC_V2`].
    pub fn magic(&self) -> u32 {
        u32::from_be_bytes(fixed(self.raw, 4))
    }

    /// Checksum of the body as stored.
    pub fn body_crc(&self) -> u32 {
        u32::from_be_bytes(fixed(self.raw, 8))
    }

    /// Queue id.
    pub fn queue_id(&self) -> i32 {
        i32::from_be_bytes(fixed(self.raw, 12))
    }

    /// Flag of the user.
    pub fn flag(&self) -> i32 {
        i32::from_be_bytes(fixed(self.raw, 16))
    }

    /// Offset in the queue.
    pub fn queue_offset(&self) -> i64 {
        i64::from_be_bytes(fixed(self.raw, 20))
    }

    /// Offset in the log.
    pub fn physical_offset(&self) -> i64 {
        i64::from_be_bytes(fixed(self.raw, 28))
    }

    /// System flags.
    pub fn sys_flag(&self) -> i32 {
        i32::from_be_bytes(fixed(self.raw, 36))
    }

    /// When the message was made.
    pub fn born_timestamp(&self) -> i64 {
        i64::from_be_bytes(fixed(self.raw, 40))
    }

    /// Where it came from.
    pub fn born_host(&self) -> SocketAddr {
        self.born_host
    }

    /// When it was stored.
    pub fn store_timestamp(&self) -> i64 {
        i64::from_be_bytes(fixed(self.raw, self.store_timestamp_at))
    }

    /// The broker's address.
    pub fn store_host(&self) -> SocketAddr {
        self.store_host
    }

    /// How often it was consumed again.
    pub fn reconsume_times(&self) -> i32 {
        i32::from_be_bytes(fixed(self.raw, self.reconsume_times_at))
    }

    /// Log offset of the half message this one completes.
    pub fn prepared_transaction_offset(&self) -> i64 {
        i64::from_be_bytes(fixed(self.raw, self.reconsume_times_at + 4))
    }

    /// Body as stored.
    pub fn body(&self) -> &'a [u8] {
        self.body
    }

    /// Topic.
    pub fn topic(&self) -> &'a [u8] {
        self.topic
    }

    /// Properties string.
    pub fn properties(&self) -> &'a [u8] {
        self.properties
    }

    /// Its fields, to encode it again with another topic and other properties.
    pub fn fields<'b>(&self, topic: &'b [u8], properties: &'b [&'b [u8]]) -> RecordFields<'b>
    where
        'a: 'b,
    {
        RecordFields {
            queue_id: self.queue_id(),
            flag: self.flag(),
            queue_offset: self.queue_offset(),
            physical_offset: self.physical_offset(),
            sys_flag: self.sys_flag(),
            born_timestamp: self.born_timestamp(),
            born_host: self.born_host(),
            store_timestamp: self.store_timestamp(),
            store_host: self.store_host(),
            reconsume_times: self.reconsume_times(),
            prepared_transaction_offset: self.prepared_transaction_offset(),
            body: self.body(),
            topic,
            properties,
        }
    }

    /// Compares the body with its checksum.
    pub fn check_body_crc(&self) -> Result<(), RecordError> {
        let (computed, stored) = (body_crc(self.body), self.body_crc());
        if computed == stored {
            Ok(())
        } else {
            Err(RecordError::BodyCrc { computed, stored })
        }
    }
}

/// Bytes at a place that `RecordView::parse` has shown to exist.
fn fixed<const N: usize>(raw: &[u8], at: usize) -> [u8; N] {
    let found = raw.get(at..).and_then(|rest| rest.first_chunk::<N>());
    debug_assert!(found.is_some(), "parsed records have their fixed part");
    found.copied().unwrap_or([0; N])
}
