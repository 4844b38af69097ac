//! The addresses behind the names of name servers, each looked up on a thread of its own.
//!
//! Invariant: a resolver that is slow, fails or changes its mind holds up neither the start nor a
//! core; what it said last stays in force until it says something else.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::config::address::HostPort;

/// How often names that were found are looked up again.
const AGAIN: Duration = Duration::from_secs(30);
/// How soon names that were not found are.
const RETRY: Duration = Duration::from_secs(2);

/// A name server, by its number, and its addresses from now on.
pub type Found = (usize, Vec<SocketAddr>);

struct Name {
    index: usize,
    server: HostPort,
    known: Vec<SocketAddr>,
    told_missing: bool,
}

/// Finds out the addresses of these name servers, for as long as the receiver lives. What is no
/// name never changes and is found before this returns.
pub fn follow(servers: &[HostPort]) -> std::io::Result<Receiver<Found>> {
    let (sender, receiver) = channel();
    for (index, server) in servers.iter().enumerate() {
        if server.host.ip().is_some() {
            // The receiver is held here: it takes what it is sent.
            let _ = sender.send((index, server.host.resolve(server.port)?));
            continue;
        }
        let name = Name {
            index,
            server: server.clone(),
            known: Vec::new(),
            told_missing: false,
        };
        let sender = sender.clone();
        // One for each name: one that nobody answers for may take half a minute.
        std::thread::Builder::new()
            .name(format!("resolver-{index}"))
            .spawn(move || run(name, &sender))?;
    }
    Ok(receiver)
}

fn run(mut name: Name, sender: &Sender<Found>) {
    loop {
        if let Some(found) = name.news()
            && sender.send((name.index, found)).is_err()
        {
            return;
        }
        let known = !name.known.is_empty();
        std::thread::sleep(if known { AGAIN } else { RETRY });
    }
}

impl Name {
    /// Its addresses, if they are others than before.
    fn news(&mut self) -> Option<Vec<SocketAddr>> {
        let server = &self.server;
        let mut found = match server.host.resolve(server.port) {
            Ok(found) => found,
            Err(error) => {
                if !std::mem::replace(&mut self.told_missing, true) {
                    let again_s = RETRY.as_secs();
                    tracing::warn!(%server, %error, again_s,
                        "namesrvAddr: the name has no address now; it is looked up again");
                }
                return None;
            }
        };
        found.sort_by_key(|address| (address.is_ipv6(), *address));
        found.dedup();
        self.told_missing = false;
        if found.is_empty() || found == self.known {
            return None;
        }
        tracing::info!(%server, addresses = ?found, "namesrvAddr: name looked up");
        self.known.clone_from(&found);
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(text: &str) -> HostPort {
        HostPort::parse(text).unwrap()
    }

    #[test]
    fn addresses_are_there_at_once_and_names_as_soon_as_they_are_looked_up() {
        let servers = [server("127.0.0.1:9876"), server("localhost:9877")];
        let found = follow(&servers).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], 9876));
        assert_eq!(found.try_recv().unwrap(), (0, vec![address]));
        let (index, addresses) = found.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(index, 1);
        assert!(!addresses.is_empty() && addresses.iter().all(|a| a.ip().is_loopback()));
    }

    #[test]
    fn a_name_that_stays_the_same_is_told_once_and_a_missing_one_never() {
        let mut name = Name {
            index: 0,
            server: server("localhost:9876"),
            known: Vec::new(),
            told_missing: false,
        };
        assert!(name.news().is_some());
        assert!(name.news().is_none());
        name.server = server("no-such-host.invalid:9876");
        assert!(name.news().is_none() && name.told_missing);
    }
}
