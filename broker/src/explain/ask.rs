//! Connections to name servers and brokers, one each, and requests on them one after the other.
//!
//! Invariant: every wait has a limit, and an answer that cannot be read is an error that names the
//! server.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use serde::de::DeserializeOwned;
use thiserror::Error;
use wire::codes::response;
use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{ExtValue, decode, encode_request};

/// Longest wait for a server, for each request.
const WAIT: Duration = Duration::from_secs(3);

/// Why a server gives no answer.
#[derive(Error, Debug)]
pub enum AskError {
    /// It is not there, or silent.
    #[error("{address}: {source}; is it running, and is the address right?")]
    Reach {
        /// Its address.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Its answer makes no sense.
    #[error("{address}: the answer to request {code} cannot be read: {reason}")]
    Unreadable {
        /// Its address.
        address: String,
        /// The request.
        code: i32,
        /// What is wrong with the answer.
        reason: String,
    },
}

/// An answer.
#[derive(Debug, Default)]
pub struct Told {
    /// Response code.
    pub code: i32,
    /// Text of a refusal.
    pub remark: String,
    /// Header fields.
    pub fields: BTreeMap<String, String>,
    /// Body.
    pub body: Vec<u8>,
}

impl Told {
    /// Whether it was granted.
    #[must_use]
    pub fn is_granted(&self) -> bool {
        self.code == response::SUCCESS
    }

    /// A header field that is a number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<i64> {
        self.fields.get(name)?.parse().ok()
    }

    /// The body of a granted request, if it has the wanted form.
    #[must_use]
    pub fn json<T: DeserializeOwned>(&self) -> Option<T> {
        if !self.is_granted() {
            return None;
        }
        wire::body::from_json(&self.body).ok()
    }
}

/// Servers asked so far.
#[derive(Default)]
pub struct Servers {
    open: HashMap<String, TcpStream>,
    opaque: i32,
}

impl Servers {
    /// Asks one server.
    pub fn ask(
        &mut self,
        address: &str,
        code: i32,
        fields: &[(&str, &str)],
    ) -> Result<Told, AskError> {
        self.opaque += 1;
        let bytes = self
            .exchange(address, code, fields)
            .map_err(|source| AskError::Reach {
                address: address.to_owned(),
                source,
            })?;
        read(&bytes).map_err(|reason| AskError::Unreadable {
            address: address.to_owned(),
            code,
            reason,
        })
    }

    /// One request and its answer, whole.
    fn exchange(
        &mut self,
        address: &str,
        code: i32,
        fields: &[(&str, &str)],
    ) -> io::Result<Vec<u8>> {
        if !self.open.contains_key(address) {
            self.open.insert(address.to_owned(), connect(address)?);
        }
        let stream = self.open.get_mut(address);
        let stream = stream.ok_or_else(|| io::Error::other("not connected"))?;
        let ext: Vec<(&str, ExtValue<'_>)> = fields
            .iter()
            .map(|(name, value)| (*name, ExtValue::Str(value)))
            .collect();
        let (mut request, json) = (Vec::new(), Serialization::Json);
        encode_request(&mut request, json, code, self.opaque, false, &ext, &[]);
        stream.write_all(&request)?;
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        let bytes = u32::from_be_bytes(length) as usize;
        if bytes > FRAME_BYTES_MAX {
            return Err(io::Error::other(format!("an answer of {bytes} bytes")));
        }
        let mut answer = length.to_vec();
        answer.resize(bytes + length.len(), 0);
        let rest = answer.get_mut(length.len()..).unwrap_or_default();
        stream.read_exact(rest)?;
        Ok(answer)
    }
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::other("the name has no address");
    for resolved in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&resolved, WAIT) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(WAIT))?;
                stream.set_write_timeout(Some(WAIT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn read(bytes: &[u8]) -> Result<Told, String> {
    let (frame, _) = split(bytes, FRAME_BYTES_MAX)
        .map_err(|error| error.to_string())?
        .ok_or("it is cut off")?;
    let header = decode(&frame).map_err(|error| error.to_string())?;
    let fields = header.ext.iter();
    let fields = fields.map(|(name, value)| (name.to_string(), value.to_string()));
    Ok(Told {
        code: header.code,
        remark: header
            .remark
            .map(|text| text.to_string())
            .unwrap_or_default(),
        fields: fields.collect(),
        body: frame.body.to_vec(),
    })
}
