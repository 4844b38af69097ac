//! The lines printed once the broker is up.
//!
//! Invariant: pure text from values; what was not granted is said here in the same breath as what
//! was.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::config::value::{Bytes, CoreList};

/// What the lines are made of.
#[derive(Debug, Clone)]
pub struct Banner {
    /// Version of the program.
    pub version: String,
    /// Name server listening here, as `host:port`.
    pub namesrv: Option<String>,
    /// The broker, when one runs here.
    pub broker: Option<BrokerLines>,
    /// CPUs in use.
    pub cores: CoreList,
    /// CPUs of the host.
    pub cores_host: usize,
    /// Config file in use.
    pub config_file: Option<PathBuf>,
    /// Address of /live, /ready and /metrics.
    pub health: Option<String>,
    /// Time since the start, in milliseconds.
    pub start_ms: u128,
}

/// What is said of the broker.
#[derive(Debug, Clone)]
pub struct BrokerLines {
    /// Broker name, cluster name, id.
    pub name: String,
    /// Cluster.
    pub cluster: String,
    /// Broker id.
    pub id: u64,
    /// Listening address.
    pub listen: String,
    /// Address told to clients.
    pub advertised: String,
    /// Where that came from.
    pub advertised_origin: String,
    /// Name servers it registers with.
    pub name_servers: String,
    /// Shards.
    pub shards: u64,
    /// Shards the store had before, when it is not new.
    pub shards_had: Option<u64>,
    /// Shards asked for.
    pub shards_asked: u64,
    /// `SYNC_FLUSH` or `ASYNC_FLUSH`.
    pub flush: String,
    /// Whether writes go past the page cache.
    pub direct: bool,
    /// Whether buffers are locked, and their size in all.
    pub memlock: bool,
    /// Bytes of write buffers in all.
    pub buffer_bytes: u64,
    /// Whether threads are pinned.
    pub pinning: bool,
    /// How log writes reach the disk, with the reason.
    pub log_port: String,
    /// Directory of buffers that outlive the process.
    pub buffer_dir: Option<PathBuf>,
    /// Directory of the store.
    pub store: PathBuf,
    /// Bytes of the store.
    pub store_bytes: u64,
    /// Bytes of segments that are prepared ahead of the logs after the start.
    pub store_ahead_bytes: u64,
}

impl Banner {
    /// The lines, each ending in a line feed.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        line(
            &mut out,
            "pinion",
            &format!("{}, up after {} ms", self.version, self.start_ms),
        );
        if let Some(address) = &self.namesrv {
            line(&mut out, "name server", address);
        }
        if let Some(broker) = &self.broker {
            broker_text(broker, &mut out);
        }
        let cores = format!("CPU {} of {} on the host", self.cores, self.cores_host);
        let shards = self.broker.as_ref().map(shards_text);
        line(
            &mut out,
            "cores",
            &format!("{cores}{}", shards.unwrap_or_default()),
        );
        let file = self
            .config_file
            .as_ref()
            .map(|path| path.display().to_string());
        line(
            &mut out,
            "config file",
            file.as_deref().unwrap_or("none, defaults and command line"),
        );
        let health = self
            .health
            .as_ref()
            .map(|a| format!("http://{a}/live, /ready, /metrics"));
        line(
            &mut out,
            "health",
            health.as_deref().unwrap_or("closed (pinion.healthPort=0)"),
        );
        line(
            &mut out,
            "to stop",
            "Ctrl-C or SIGTERM; requests in flight are finished first",
        );
        if let Some(broker) = &self.broker {
            // Monitoring of RocketMQ waits for these words.
            let _ = writeln!(
                out,
                "The broker[{}, {}] boot success. name server is {}",
                broker.name, broker.advertised, broker.name_servers
            );
        } else if self.namesrv.is_some() {
            let _ = writeln!(out, "The Name Server boot success.");
        }
        out
    }
}

fn line(out: &mut String, what: &str, text: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{what:<13} {text}");
}

fn shards_text(broker: &BrokerLines) -> String {
    let (shards, asked) = (broker.shards, broker.shards_asked);
    match broker.shards_had {
        Some(had) if had < shards => format!(", {shards} shards ({had} before)"),
        _ if asked < shards => {
            format!(", {shards} shards ({asked} asked for; a store keeps its own)")
        }
        _ => format!(", {shards} shards"),
    }
}

fn broker_text(broker: &BrokerLines, out: &mut String) {
    let BrokerLines {
        name,
        cluster,
        id,
        listen,
        ..
    } = broker;
    line(
        out,
        "broker",
        &format!("{name} (id {id}) of {cluster}, listening on {listen}"),
    );
    let advertised = format!("{} ({})", broker.advertised, broker.advertised_origin);
    line(out, "advertised", &advertised);
    let servers = if broker.name_servers.is_empty() {
        "none"
    } else {
        &broker.name_servers
    };
    line(out, "registers at", servers);
    line(out, "flush", &broker.flush);
    let direct = if broker.direct {
        "yes"
    } else {
        "no, through the page cache with a flush"
    };
    line(out, "direct", direct);
    let bytes = Bytes(broker.buffer_bytes);
    let memlock = if broker.memlock {
        format!("yes, {bytes} of write buffers")
    } else {
        format!("no, {bytes} of write buffers may be paged out")
    };
    line(out, "memlock", &memlock);
    line(
        out,
        "pinning",
        if broker.pinning {
            "yes"
        } else {
            "no, the system moves the threads"
        },
    );
    line(out, "log port", &broker.log_port);
    let survives = match &broker.buffer_dir {
        Some(dir) => format!("outlive the process, in {}", dir.display()),
        None => "end with the process; acks wait for the write".to_owned(),
    };
    line(out, "buffers", &survives);
    let store = format!(
        "{}, {}; up to {} more prepared ahead",
        broker.store.display(),
        Bytes(broker.store_bytes),
        Bytes(broker.store_ahead_bytes)
    );
    line(out, "store", &store);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn banner() -> Banner {
        Banner {
            version: "0.1.0".into(),
            namesrv: Some("0.0.0.0:9876".into()),
            broker: Some(BrokerLines {
                name: "node-1".into(),
                cluster: "DefaultCluster".into(),
                id: 0,
                listen: "0.0.0.0:10911".into(),
                advertised: "10.0.0.7:10911".into(),
                advertised_origin: "detected: default route".into(),
                name_servers: "127.0.0.1:9876".into(),
                shards: 2,
                shards_had: Some(2),
                shards_asked: 2,
                flush: "ASYNC_FLUSH".into(),
                direct: true,
                memlock: true,
                buffer_bytes: 128 << 20,
                pinning: true,
                log_port: "thread (probe: 96 µs against 110 µs)".into(),
                buffer_dir: Some("/dev/shm".into()),
                store: "./data".into(),
                store_bytes: 3 << 30,
                store_ahead_bytes: 2 << 30,
            }),
            cores: CoreList(vec![0, 1]),
            cores_host: 4,
            config_file: Some("broker.conf".into()),
            health: Some("127.0.0.1:10914".into()),
            start_ms: 312,
        }
    }

    #[test]
    fn everything_an_operator_asks_first_is_in_it() {
        let text = banner().text();
        for part in [
            "0.1.0",
            "0.0.0.0:9876",
            "0.0.0.0:10911",
            "10.0.0.7:10911 (detected: default route)",
            "CPU 0,1 of 4",
            "2 shards",
            "direct        yes",
            "memlock       yes, 128 MiB",
            "pinning       yes",
            "thread (probe",
            "outlive the process, in /dev/shm",
            "./data, 3 GiB; up to 2 GiB more prepared ahead",
            "broker.conf",
            "Ctrl-C",
            "boot success",
        ] {
            assert!(text.contains(part), "{part:?} is missing in:\n{text}");
        }
    }

    #[test]
    fn what_was_not_granted_is_said() {
        let mut banner = banner();
        let broker = banner.broker.as_mut().unwrap();
        (broker.direct, broker.memlock, broker.pinning) = (false, false, false);
        broker.buffer_dir = None;
        banner.health = None;
        banner.config_file = None;
        let text = banner.text();
        for part in [
            "direct        no",
            "memlock       no",
            "pinning       no",
            "acks wait for the write",
            "closed",
            "none, defaults",
        ] {
            assert!(text.contains(part), "{part:?} is missing in:\n{text}");
        }
    }

    #[test]
    fn a_store_with_another_number_of_shards_says_so() {
        let mut banner = banner();
        for (had, asked, words) in [
            (None, 2, ", 2 shards\n"),
            (Some(2), 2, ", 2 shards\n"),
            (Some(1), 2, ", 2 shards (1 before)\n"),
            (
                Some(2),
                1,
                ", 2 shards (1 asked for; a store keeps its own)\n",
            ),
        ] {
            let broker = banner.broker.as_mut().unwrap();
            (broker.shards_had, broker.shards_asked) = (had, asked);
            let text = banner.text();
            assert!(text.contains(words), "{had:?} {asked}: {text}");
        }
    }

    #[test]
    fn a_name_server_alone_has_no_broker_lines() {
        let banner = Banner {
            broker: None,
            ..banner()
        };
        let text = banner.text();
        assert!(
            text.contains("The Name Server boot success") && !text.contains("shards"),
            "{text}"
        );
    }
}
