//! `pinion fuse`: asks a name server for the state of its fuse and prints it.
//!
//! Invariant: it only asks; a name server that knows no fuse is told apart from one that cannot be
//! reached.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;
use wire::codes::{private, response};
use wire::frame::{FRAME_BYTES_MAX, Serialization, split};
use wire::header::{decode, encode_request};

use super::args::FuseArgs;
use super::{EXIT_FAILED, complain, say};

/// Longest wait for the name server.
const WAIT: Duration = Duration::from_secs(3);
/// Transitions shown of each broker.
const SHOWN_MAX: usize = 5;

#[derive(Error, Debug)]
enum FuseError {
    #[error("name server {address}: {source}; is it running, and is the address right (-n)?")]
    Reach { address: String, source: io::Error },
    #[error("name server {address} has no fuse (code {code}): it is not one of Pinion")]
    Unknown { address: String, code: i32 },
    #[error("name server {address}: its answer cannot be read: {reason}")]
    Unreadable { address: String, reason: String },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FuseState {
    enabled: bool,
    slow_ms: u64,
    isolated_max: usize,
    members: Vec<MemberState>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MemberState {
    broker: String,
    state: String,
    #[serde(rename = "p99Us")]
    p99_us: Option<u64>,
    spared: bool,
    reason: String,
    history: Vec<ChangeState>,
}

#[derive(Debug, Deserialize)]
struct ChangeState {
    state: String,
    reason: String,
}

/// Runs the command.
pub(super) fn run(args: &FuseArgs) -> ExitCode {
    match ask(&args.namesrv) {
        Ok(body) if args.json => {
            say(&format!("{body}\n"));
            ExitCode::SUCCESS
        }
        Ok(body) => match serde_json::from_str(&body) {
            Ok(state) => {
                say(&table(&state));
                ExitCode::SUCCESS
            }
            Err(error) => failed(&FuseError::Unreadable {
                address: args.namesrv.clone(),
                reason: error.to_string(),
            }),
        },
        Err(error) => failed(&error),
    }
}

fn failed(error: &FuseError) -> ExitCode {
    complain(&format!("pinion: {error}"));
    ExitCode::from(EXIT_FAILED)
}

fn ask(address: &str) -> Result<String, FuseError> {
    let bytes = exchange(address).map_err(|source| FuseError::Reach {
        address: address.to_owned(),
        source,
    })?;
    let unreadable = |reason: String| FuseError::Unreadable {
        address: address.to_owned(),
        reason,
    };
    let (frame, _) = split(&bytes, FRAME_BYTES_MAX)
        .map_err(|error| unreadable(error.to_string()))?
        .ok_or_else(|| unreadable("it is cut off".to_owned()))?;
    let header = decode(&frame).map_err(|error| unreadable(error.to_string()))?;
    if header.code != response::SUCCESS {
        return Err(FuseError::Unknown {
            address: address.to_owned(),
            code: header.code,
        });
    }
    String::from_utf8(frame.body.to_vec()).map_err(|error| unreadable(error.to_string()))
}

/// One request and its answer, whole.
fn exchange(address: &str) -> io::Result<Vec<u8>> {
    let resolved = address.to_socket_addrs()?.next();
    let resolved = resolved.ok_or_else(|| io::Error::other("the name has no address"))?;
    let mut stream = TcpStream::connect_timeout(&resolved, WAIT)?;
    stream.set_read_timeout(Some(WAIT))?;
    let (mut request, json) = (Vec::new(), Serialization::Json);
    encode_request(&mut request, json, private::FUSE_STATE, 1, false, &[], &[]);
    stream.write_all(&request)?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let bytes = u64::from(u32::from_be_bytes(length)).min(FRAME_BYTES_MAX as u64);
    let mut answer = length.to_vec();
    stream.take(bytes).read_to_end(&mut answer)?;
    Ok(answer)
}

fn table(state: &FuseState) -> String {
    let mut out = format!(
        "fuse {}, at most {} of {} brokers isolated, slow above {} ms\n",
        if state.enabled {
            "on"
        } else {
            "off (pinion.fuseEnable)"
        },
        state.isolated_max,
        state.members.len(),
        state.slow_ms,
    );
    if state.enabled && state.isolated_max == 0 {
        out.push_str("with fewer than four brokers none is isolated, so none is probed\n");
    }
    for member in &state.members {
        let p99 = member.p99_us.map_or("no samples".to_owned(), |us| {
            // Failures count as slower than any answer.
            if us > 3_600_000_000 {
                "fails".to_owned()
            } else {
                format!("p99 {} us", us)
            }
        });
        let spared = if member.spared {
            ", spared: the share is used up"
        } else {
            ""
        };
        out.push_str(&format!(
            "{}  {}, {p99}{spared}\n",
            member.broker, member.state
        ));
        if member.state != "closed" || member.spared {
            out.push_str(&format!("    why: {}\n", member.reason));
        }
        for change in member.history.iter().rev().take(SHOWN_MAX) {
            out.push_str(&format!("    {}: {}\n", change.state, change.reason));
        }
    }
    out
}
