//! Owns message ids: the offset id that brokers give, and the unique key that clients give.
//!
//! Invariant: an offset id written is read back to the same address and offset.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use thiserror::Error;

/// Characters of an offset id with an IPv4 address.
pub const OFFSET_ID_CHARS_V4: usize = 32;
/// Characters of an offset id with an IPv6 address.
pub const OFFSET_ID_CHARS_V6: usize = 56;

/// Why a text is not an offset id.
#[derive(Error, Clone, Copy, PartialEq, Eq, Debug)]
pub enum IdError {
    /// The length is neither 32 nor 56.
    #[error("message id has {0} characters, expected 32 or 56")]
    Length(usize),
    /// A character is not hexadecimal.
    #[error("message id has no hexadecimal digit at {0}")]
    Digit(usize),
    /// The port is not one.
    #[error("message id holds port {0}")]
    Port(i32),
}

/// Appends bytes as upper-case hexadecimal digits.
fn hex(out: &mut Vec<u8>, bytes: &[u8]) {
    let digit = |nibble: u8| nibble + if nibble < 10 { b'0' } else { b'A' - 10 };
    // Pairs of digits through an array of known size: no growth check for each digit.
    for part in bytes.chunks(8) {
        let mut digits = [0; 16];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(part) {
            pair.copy_from_slice(&[digit(byte >> 4), digit(byte & 0xF)]);
        }
        out.extend_from_slice(digits.get(..part.len() * 2).unwrap_or_default());
    }
}

fn hex_ip(out: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => hex(out, &ip.octets()),
        IpAddr::V6(ip) => hex(out, &ip.octets()),
    }
}

/// Appends the id of the message at a log offset of a broker: upper-case hexadecimal digits.
pub fn offset_msg_id(out: &mut Vec<u8>, host: SocketAddr, physical_offset: i64) {
    hex_ip(out, host.ip());
    hex(out, &u32::from(host.port()).to_be_bytes());
    hex(out, &physical_offset.to_be_bytes());
}

/// Reads an offset id back.
pub fn parse_offset_msg_id(id: &str) -> Result<(SocketAddr, i64), IdError> {
    let ip_bytes = match id.len() {
        OFFSET_ID_CHARS_V4 => 4,
        OFFSET_ID_CHARS_V6 => 16,
        other => return Err(IdError::Length(other)),
    };
    let mut bytes = [0u8; OFFSET_ID_CHARS_V6 / 2];
    let pairs = id.as_bytes().chunks_exact(2);
    for (index, (slot, pair)) in bytes.iter_mut().zip(pairs).enumerate() {
        let mut value = 0u32;
        for (side, byte) in pair.iter().enumerate() {
            let digit = char::from(*byte)
                .to_digit(16)
                .ok_or(IdError::Digit(index * 2 + side))?;
            value = value << 4 | digit;
        }
        *slot = value as u8;
    }
    let ip = if ip_bytes == 4 {
        IpAddr::V4(Ipv4Addr::from(part::<4>(&bytes, 0)))
    } else {
        IpAddr::V6(Ipv6Addr::from(part::<16>(&bytes, 0)))
    };
    let port = i32::from_be_bytes(part(&bytes, ip_bytes));
    let port = u16::try_from(port).map_err(|_| IdError::Port(port))?;
    let physical_offset = i64::from_be_bytes(part(&bytes, ip_bytes + 4));
    Ok((SocketAddr::new(ip, port), physical_offset))
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk::<N>())
        .copied()
        .unwrap_or([0; N])
}

/// Appends a unique key made from an address, a process id, a hash of the process, milliseconds
/// since the start of the month and a counter: 32 or 56 upper-case hexadecimal digits.
pub fn unique_key(
    out: &mut Vec<u8>,
    ip: IpAddr,
    process: u16,
    hash: u32,
    month_ms: u32,
    counter: u16,
) {
    hex_ip(out, ip);
    hex(out, &process.to_be_bytes());
    hex(out, &hash.to_be_bytes());
    hex(out, &month_ms.to_be_bytes());
    hex(out, &counter.to_be_bytes());
}
