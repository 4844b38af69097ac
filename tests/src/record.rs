//! Owns the reading of stored records, as pull answers and the log carry them.
//!
//! Invariant: a record is returned only when every length inside it adds up to its total size and
//! its body agrees with its checksum.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const MAGIC_V1: u32 = 0xDAA3_20A7;
const MAGIC_V2: u32 = 0xDAA3_20AB;
const SYS_FLAG_BORN_IPV6: i32 = 1 << 4;
const SYS_FLAG_STORE_IPV6: i32 = 1 << 5;

/// One stored message.
#[derive(Clone, Debug)]
pub struct Record {
    /// The queue it lies in.
    pub queue_id: i32,
    /// Its place in the queue.
    pub queue_offset: i64,
    /// Its place in the log.
    pub physical_offset: i64,
    /// The system flag bits.
    pub sys_flag: i32,
    /// When the broker took it, in milliseconds since the epoch.
    pub store_timestamp_ms: i64,
    /// The address of the client that sent it.
    pub born_host: SocketAddr,
    /// The address the broker advertises.
    pub store_host: SocketAddr,
    /// How often a consumer sent it back.
    pub reconsume_times: i32,
    /// The body as stored.
    pub body: Vec<u8>,
    /// The topic.
    pub topic: String,
    /// The properties.
    pub properties: BTreeMap<String, String>,
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// CRC-32 as zip files have it, over the body, without the sign bit.
pub fn body_checksum(body: &[u8]) -> u32 {
    let step =
        |crc: u32, byte: &u8| (crc >> 8) ^ CRC_TABLE[((crc ^ u32::from(*byte)) & 255) as usize];
    !body.iter().fold(u32::MAX, step) & 0x7FFF_FFFF
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0_u32; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Reads a concatenation of records, as the body of a pull answer is.
pub fn decode_all(mut bytes: &[u8]) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let size = bytes
            .first_chunk::<4>()
            .map(|size| u32::from_be_bytes(*size) as usize);
        let size = size.ok_or_else(|| bad("fewer than four bytes where a record should begin"))?;
        let Some((record, rest)) = bytes.split_at_checked(size).filter(|_| size > 0) else {
            return Err(bad(format!(
                "a record of {size} bytes with {} left",
                bytes.len()
            )));
        };
        records.push(Record::decode(record)?);
        bytes = rest;
    }
    Ok(records)
}

/// Writes properties as they travel.
pub fn encode_properties(properties: &[(&str, &str)]) -> String {
    properties
        .iter()
        .map(|(name, value)| format!("{name}\u{1}{value}\u{2}"))
        .collect()
}

impl Record {
    fn decode(bytes: &[u8]) -> io::Result<Self> {
        let mut reader = Reader { bytes };
        let total = reader.int()?;
        let magic = reader.int()? as u32;
        if magic != MAGIC_V1 && magic != MAGIC_V2 {
            return Err(bad(format!("record magic {magic:#x}")));
        }
        let crc = reader.int()? as u32;
        let queue_id = reader.int()?;
        reader.int()?;
        let queue_offset = reader.long()?;
        let physical_offset = reader.long()?;
        let sys_flag = reader.int()?;
        reader.long()?;
        let born_host = reader.host(sys_flag & SYS_FLAG_BORN_IPV6 != 0)?;
        let store_timestamp_ms = reader.long()?;
        let store_host = reader.host(sys_flag & SYS_FLAG_STORE_IPV6 != 0)?;
        let reconsume_times = reader.int()?;
        reader.long()?;
        let body_bytes = reader.int()? as usize;
        let body = reader.take(body_bytes)?.to_vec();
        let topic_bytes = if magic == MAGIC_V1 {
            reader.byte()?
        } else {
            reader.short()?
        };
        let topic = String::from_utf8_lossy(reader.take(topic_bytes)?).into_owned();
        let properties_bytes = reader.short()?;
        let properties = parse_properties(reader.take(properties_bytes)?);
        if !reader.bytes.is_empty() {
            return Err(bad(format!(
                "{} of {total} bytes left over",
                reader.bytes.len()
            )));
        }
        if crc != body_checksum(&body) {
            return Err(bad(format!(
                "body checksum {crc:#x} at queue offset {queue_offset}"
            )));
        }
        Ok(Self {
            queue_id,
            queue_offset,
            physical_offset,
            sys_flag,
            store_timestamp_ms,
            born_host,
            store_host,
            reconsume_times,
            body,
            topic,
            properties,
        })
    }

    /// A property that must be there.
    pub fn property(&self, name: &str) -> &str {
        let value = self.properties.get(name);
        value.unwrap_or_else(|| panic!("no property {name} in {:?}", self.properties))
    }
}

fn parse_properties(bytes: &[u8]) -> BTreeMap<String, String> {
    let text = String::from_utf8_lossy(bytes);
    let pairs = text
        .split('\u{2}')
        .filter_map(|pair| pair.split_once('\u{1}'));
    pairs
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> io::Result<&'a [u8]> {
        let split = self.bytes.split_at_checked(count);
        let (head, tail) = split.ok_or_else(|| bad(format!("record ends {count} bytes early")))?;
        self.bytes = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        self.take(N)?.try_into().map_err(io::Error::other)
    }

    fn byte(&mut self) -> io::Result<usize> {
        Ok(usize::from(self.array::<1>()?[0]))
    }

    fn short(&mut self) -> io::Result<usize> {
        Ok(usize::from(u16::from_be_bytes(self.array()?)))
    }

    fn int(&mut self) -> io::Result<i32> {
        Ok(i32::from_be_bytes(self.array()?))
    }

    fn long(&mut self) -> io::Result<i64> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    fn host(&mut self, ipv6: bool) -> io::Result<SocketAddr> {
        let address = if ipv6 {
            IpAddr::V6(Ipv6Addr::from(self.array::<16>()?))
        } else {
            IpAddr::V4(Ipv4Addr::from(self.array::<4>()?))
        };
        Ok(SocketAddr::new(address, self.int()? as u16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vector of the protocol notes: body `hello`, topic `T`, property TAGS=A.
    const SAMPLE: &str = "00000068daa320a73610a6860000000000000000000000000000000500000000000004\
        00000000000000018bcfe568007f0000010000c3500000018bcfe568017f00000100002a9f00000000000000\
        00000000000000000568656c6c6f0154000754414753014102";

    fn sample() -> Vec<u8> {
        let hex = |at: usize| u8::from_str_radix(&SAMPLE[at..at + 2], 16).unwrap();
        (0..SAMPLE.len()).step_by(2).map(hex).collect()
    }

    #[test]
    fn the_sample_record_reads_back() {
        let records = decode_all(&sample()).unwrap();
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].body, b"hello");
        assert_eq!(records[0].queue_offset, 5);
        assert_eq!(records[0].physical_offset, 1024);
        assert_eq!(records[0].property("TAGS"), "A");
    }

    #[test]
    fn a_flipped_body_bit_is_noticed() {
        let mut bytes = sample();
        let at = bytes
            .windows(5)
            .position(|window| window == b"hello")
            .unwrap();
        bytes[at] ^= 1;
        assert!(decode_all(&bytes).is_err());
    }
}
