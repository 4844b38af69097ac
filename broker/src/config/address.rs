//! Addresses: reading them from settings, finding the one to advertise, and trying it.
//!
//! Invariant: an address that was accepted can be written as `host:port` so that every client
//! splits it rightly: IPv6 stands in brackets, a zone stays with its address, blanks and comments
//! never get in.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::Duration;

use super::value::Value;

/// Longest host name that the domain name system knows.
pub const HOST_BYTES_MAX: usize = 253;

/// Most addresses in one list of name servers.
pub const ADDRESSES_MAX: usize = 64;

/// How long a trial connection to the own advertised address may take.
pub const DIAL_TIMEOUT: Duration = Duration::from_millis(400);

/// A host: an IPv4 or IPv6 address, or a name. Empty means that none is set.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Host {
    text: String,
}

impl Host {
    /// Host of an IP address.
    #[must_use]
    pub fn from_ip(ip: IpAddr) -> Self {
        Self {
            text: ip.to_string(),
        }
    }

    /// The host without brackets, zone included.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether nothing is set.
    #[must_use]
    pub fn is_unset(&self) -> bool {
        self.text.is_empty()
    }

    /// The address, when this is one and not a name. A zone is dropped.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        let bare = self.text.split('%').next().unwrap_or(&self.text);
        bare.parse().ok()
    }

    /// `host:port` as clients split it, IPv6 in brackets.
    #[must_use]
    pub fn with_port(&self, port: u16) -> String {
        match self.ip() {
            Some(IpAddr::V6(_)) => format!("[{}]:{port}", self.text),
            _ => format!("{}:{port}", self.text),
        }
    }

    /// The socket addresses behind host and port, IPv4 first. A name is looked up, which may block.
    ///
    /// # Errors
    /// When the name is not known or the zone is no interface of this machine.
    pub fn resolve(&self, port: u16) -> io::Result<Vec<SocketAddr>> {
        let mut found: Vec<SocketAddr> = match self.ip() {
            Some(IpAddr::V4(ip)) => vec![SocketAddr::from((ip, port))],
            Some(IpAddr::V6(ip)) => {
                let scope = zone_index(self.text.split_once('%').map_or("", |(_, zone)| zone))?;
                vec![SocketAddr::V6(std::net::SocketAddrV6::new(
                    ip, port, 0, scope,
                ))]
            }
            None => (self.text.as_str(), port).to_socket_addrs()?.collect(),
        };
        found.sort_by_key(SocketAddr::is_ipv6);
        Ok(found)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Value for Host {
    const EXPECTED: &'static str = "a host: IPv4, IPv6 (also in brackets or \
        with a %zone) or a host name, without port, blank or comment";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::default());
        }
        let bare = match text.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']')?,
            None => text,
        };
        let (address, zone) = bare.split_once('%').unwrap_or((bare, ""));
        if address.parse::<Ipv6Addr>().is_ok() {
            let zone_fine = zone.len() <= 15 && zone.bytes().all(is_zone_byte);
            let complete = zone_fine && (bare.len() == address.len() || !zone.is_empty());
            return complete.then(|| Self {
                text: bare.to_owned(),
            });
        }
        // Brackets and zones belong to IPv6 only.
        let plain = bare.len() == text.len() && bare.len() == address.len();
        (plain && is_host_name_or_ipv4(bare)).then(|| Self {
            text: bare.to_owned(),
        })
    }
    fn text(&self) -> String {
        self.text.clone()
    }
}

fn is_zone_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b'@')
}

fn is_host_name_or_ipv4(text: &str) -> bool {
    if text.len() > HOST_BYTES_MAX {
        return false;
    }
    let labels_fine = text.trim_end_matches('.').split('.').all(|label| {
        let inner = label
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
        (1..=63).contains(&label.len()) && inner && !label.starts_with('-') && !label.ends_with('-')
    });
    // Digits and dots alone are an address with a slip in it, never a host name.
    let numeric = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    labels_fine && (!numeric || text.parse::<Ipv4Addr>().is_ok())
}

/// Interface number of a zone, from its number or name.
fn zone_index(zone: &str) -> io::Result<u32> {
    if zone.is_empty() {
        return Ok(0);
    }
    if let Ok(index) = zone.parse() {
        return Ok(index);
    }
    let text = std::fs::read_to_string(format!("/sys/class/net/{zone}/ifindex"))?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// Host and port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// The host.
    pub host: Host,
    /// The port, never 0.
    pub port: u16,
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.host.with_port(self.port))
    }
}

impl HostPort {
    /// Reads `host:port`. IPv6 may stand with or without brackets, as the Java client writes it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        let port: u16 = digits.then(|| port.parse().ok())??;
        let host = Host::parse(host).filter(|host| !host.is_unset())?;
        (port != 0).then_some(Self { host, port })
    }
}

/// Addresses of name servers, `;` between them. Empty means none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AddressList(pub Vec<HostPort>);

impl Value for AddressList {
    const EXPECTED: &'static str = "host:port, several separated by ; and without \
        blank or comment, such as 10.0.0.1:9876;10.0.0.2:9876";
    fn parse(text: &str) -> Option<Self> {
        let parts = text.split(';').filter(|part| !part.is_empty());
        let all: Option<Vec<HostPort>> = parts.map(HostPort::parse).collect();
        all.filter(|all| all.len() <= ADDRESSES_MAX).map(Self)
    }
    fn text(&self) -> String {
        self.0
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(";")
    }
}

/// Finds the address other machines most likely reach this one at, and says how it was found.
///
/// The route towards the first name server is asked first, since brokers and clients share that
/// network; then the default route; then any address that is not a loopback one. No packet is sent.
#[must_use]
pub fn detect_own(name_servers: &AddressList) -> (IpAddr, String) {
    if let Some(first) = name_servers.0.first()
        && let Some(ip) = towards_name_server(first)
    {
        return (ip, format!("detected: route towards name server {first}"));
    }
    let documentation: [IpAddr; 2] = [
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    ];
    for target in documentation {
        if let Some(ip) = source_towards(SocketAddr::new(target, 9)).filter(is_usable) {
            return (ip, "detected: default route".to_owned());
        }
    }
    match interface_addresses().into_iter().find(is_usable) {
        Some(ip) => (ip, "detected: first interface with an address".to_owned()),
        None => {
            let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
            (
                loopback,
                "detected: no interface but loopback has an address".to_owned(),
            )
        }
    }
}

fn towards_name_server(server: &HostPort) -> Option<IpAddr> {
    // A name is not looked up here: a slow resolver must not hold up the start.
    let ip = server.host.ip().filter(|ip| !ip.is_loopback())?;
    source_towards(SocketAddr::new(ip, server.port)).filter(is_usable)
}

fn source_towards(target: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(target).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

fn is_usable(ip: &IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !ip.is_loopback() && !ip.is_unspecified() && !link_local
}

/// The addresses of this machine's interfaces, as the kernel lists them, IPv4 first.
#[must_use]
pub fn interface_addresses() -> Vec<IpAddr> {
    let ipv4 = std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let ipv6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let mut found: Vec<IpAddr> = Vec::new();
    for ip in local_ipv4(&ipv4)
        .into_iter()
        .map(IpAddr::V4)
        .chain(local_ipv6(&ipv6))
    {
        if !found.contains(&ip) {
            found.push(ip);
        }
    }
    found
}

/// In the route trie a local address is a leaf followed by a line `/32 host LOCAL`.
fn local_ipv4(fib_trie: &str) -> Vec<Ipv4Addr> {
    let mut leaf: Option<Ipv4Addr> = None;
    let mut found = Vec::new();
    for line in fib_trie.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            leaf = address.parse().ok();
        } else if line.starts_with("/32 host LOCAL") {
            found.extend(leaf.take());
        }
    }
    found
}

fn local_ipv6(if_inet6: &str) -> Vec<IpAddr> {
    let digits = if_inet6
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    digits
        .filter_map(|hex| u128::from_str_radix(hex, 16).ok())
        .map(|bits| IpAddr::V6(Ipv6Addr::from_bits(bits)))
        .collect()
}

/// Connects to the advertised address from here. Run once the listeners are up, never on a shard's
/// thread.
///
/// # Errors
/// The words for the warning: what failed and which setting to change.
pub fn dial_advertised(host: &Host, port: u16) -> Result<(), String> {
    let advertised = host.with_port(port);
    let advice = "set brokerIP1 to an address or host name that clients reach";
    let targets = host.resolve(port).map_err(|error| {
        format!("the advertised address {advertised} is unknown: {error}; {advice}")
    })?;
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for target in targets {
        match TcpStream::connect_timeout(&target, DIAL_TIMEOUT) {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(format!(
        "the advertised address {advertised} cannot be dialled from the broker itself ({last}); \
         clients may time out; {advice}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn hosts_are_names_or_addresses_with_brackets_and_zones() {
        for text in [
            "10.0.0.1",
            "broker-1.example.org",
            "localhost",
            "::1",
            "fe80::1%eth0",
            "b_1",
        ] {
            assert_eq!(Host::parse(text).unwrap().as_str(), text);
        }
        assert_eq!(
            Host::parse("[::1]").unwrap().with_port(10_911),
            "[::1]:10911"
        );
        assert_eq!(
            Host::parse("[fe80::1%eth0]").unwrap().with_port(1),
            "[fe80::1%eth0]:1"
        );
        assert_eq!(Host::parse("::1").unwrap().with_port(1), "[::1]:1");
        assert_eq!(Host::parse("a.b").unwrap().with_port(1), "a.b:1");
        assert_eq!(
            Host::parse("fe80::1%eth0").unwrap().ip(),
            Some("fe80::1".parse().unwrap())
        );
    }

    #[test]
    fn malformed_hosts_are_refused() {
        let bad = [
            "10.0.0.1 # lan",
            "10.0.0.1#lan",
            "10.0.0",
            "10.0.0.256",
            "a b",
            "a:1",
            "[::1",
            "::1]",
            "[10.0.0.1]",
            "::1%",
            "::1%a b",
            "10.0.0.1%eth0",
            "-a",
            "http://a",
            "a..b",
            "a\u{a0}",
        ];
        for text in bad {
            assert_eq!(Host::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn lists_split_at_semicolons_and_write_ipv6_in_brackets() {
        let list =
            AddressList::parse("10.0.0.1:9876;ns.example:9877;::1:9878;[::2]:9879;").unwrap();
        assert_eq!(
            list.text(),
            "10.0.0.1:9876;ns.example:9877;[::1]:9878;[::2]:9879"
        );
        assert_eq!(AddressList::parse(&list.text()), Some(list));
        assert_eq!(AddressList::parse(""), Some(AddressList::default()));
        for bad in [
            "a", "a:", "a:0", "a:99999", "a:1,b:2", "a:1; b:2", "a:+1", ":1",
        ] {
            assert_eq!(AddressList::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn kernel_tables_of_addresses_are_read() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.1.2.0\n        /24 link UNICAST\n \
            |-- 10.1.2.3\n        /32 host LOCAL\n     |-- 10.1.2.255\n \
            /32 link BROADCAST\n";
        assert_eq!(local_ipv4(trie), [Ipv4Addr::new(10, 1, 2, 3)]);
        let inet6 = "fe800000000000000000000000000001 02 40 20 80     eth0\n";
        assert_eq!(local_ipv6(inet6), ["fe80::1".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn detection_always_names_an_address_and_its_origin() {
        let (ip, how) = detect_own(&AddressList::default());
        assert!(!ip.is_unspecified());
        assert!(how.starts_with("detected: "));
    }

    #[test]
    fn dialling_tells_a_live_address_from_a_dead_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let host = Host::parse("127.0.0.1").unwrap();
        assert_eq!(dial_advertised(&host, port), Ok(()));
        drop(listener);
        let words = dial_advertised(&host, port).unwrap_err();
        assert!(words.contains(&format!("127.0.0.1:{port}")), "{words}");
        assert!(words.contains("brokerIP1"), "{words}");
    }
}
