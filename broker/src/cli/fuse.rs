//! `pinion fuse`: asks a name server or a broker for the state of its fuse and prints it.
//!
//! Invariant: it only asks; one that knows no fuse is told apart from one that cannot be reached.

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

/// Longest wait for the answer.
const WAIT: Duration = Duration::from_secs(3);
/// Transitions shown of each broker.
const SHOWN_MAX: usize = 5;

#[derive(Error, Debug)]
enum FuseError {
    #[error("{address}: {source}; is it running, and is the address right (-n or -b)?")]
    Reach { address: String, source: io::Error },
    #[error("{address} has no fuse (code {code}): it is not one of Pinion")]
    Unknown { address: String, code: i32 },
    #[error("{address}: its answer cannot be read: {reason}")]
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

/// What a broker says.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DiskState {
    broker: String,
    limit_ms: u64,
    has_peers: bool,
    shards: Vec<ShardState>,
    history: Vec<DiskChangeState>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ShardState {
    shard: u16,
    hangs: bool,
    waits_ms: u64,
    #[serde(rename = "writeP99Us")]
    write_p99_us: u64,
    refused: u64,
    given_back: u64,
    transitions: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DiskChangeState {
    shard: u16,
    hangs: bool,
    waited_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum AnyState {
    Broker(DiskState),
    NameServer(FuseState),
}

/// Runs the command.
pub(super) fn run(args: &FuseArgs) -> ExitCode {
    let address = args.broker.as_ref().unwrap_or(&args.namesrv);
    let body = match ask(address) {
        Ok(body) => body,
        Err(error) => return failed(&error),
    };
    if args.json {
        say(&format!("{body}\n"));
        return ExitCode::SUCCESS;
    }
    match serde_json::from_str(&body) {
        Ok(AnyState::NameServer(state)) => say(&table(&state)),
        Ok(AnyState::Broker(state)) => say(&disks(&state)),
        Err(error) => {
            return failed(&FuseError::Unreadable {
                address: address.clone(),
                reason: error.to_string(),
            });
        }
    }
    ExitCode::SUCCESS
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

fn disks(state: &DiskState) -> String {
    let limit = if state.limit_ms == 0 {
        "off (pinion.fuseShardMs)".to_owned()
    } else {
        format!("on, a disk hangs after {} ms", state.limit_ms)
    };
    let sends = if state.has_peers {
        "sends to it are refused, other brokers take them"
    } else {
        "sends to it wait, no other broker could take them"
    };
    let mut out = format!("fuse of {} {limit}; {sends}\n", state.broker);
    for shard in &state.shards {
        let now = if shard.hangs {
            format!("hangs since {} ms", shard.waits_ms)
        } else {
            "works".to_owned()
        };
        out.push_str(&format!(
            "shard {}  {now}, log writes p99 {} us, {} sends refused, {} given back, {} changes\n",
            shard.shard, shard.write_p99_us, shard.refused, shard.given_back, shard.transitions
        ));
    }
    for change in state.history.iter().rev().take(SHOWN_MAX) {
        let (shard, waited_ms) = (change.shard, change.waited_ms);
        let what = if change.hangs { "hangs" } else { "works again" };
        out.push_str(&format!(
            "    shard {shard} {what}, waited {waited_ms} ms\n"
        ));
    }
    out
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
