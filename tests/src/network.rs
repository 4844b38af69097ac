//! Owns a network namespace of a test's own with two interfaces, each of which leads to the test.
//!
//! Invariant: namespace and interfaces go away with it; its addresses are private ones that are
//! routed nowhere else.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::process::Command;

use crate::{is_root, skipped};

/// A namespace with the interfaces `eth0` and `eth1`.
#[derive(Debug)]
pub struct Network {
    name: String,
    /// The addresses inside.
    pub inside: [Ipv4Addr; 2],
    /// The test's own addresses on the same two links.
    pub outside: [Ipv4Addr; 2],
}

fn ip(line: &str) -> Result<String, String> {
    let output = Command::new("ip").args(line.split_whitespace()).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!("ip {line}: {}", said.trim()))
}

impl Network {
    /// Makes one; says so and gives none where it cannot.
    pub fn create() -> Option<Self> {
        if !is_root() {
            skipped("a network namespace needs root");
            return None;
        }
        let process = std::process::id();
        let (high, low) = ((process >> 6) as u8, ((process & 63) << 2) as u8);
        let address = |link: u8, host: u8| Ipv4Addr::new(10, 200 + link, high, low + host);
        let network = Self {
            name: format!("pinion{process}"),
            inside: [address(0, 2), address(1, 2)],
            outside: [address(0, 1), address(1, 1)],
        };
        match network.connect() {
            Ok(()) => Some(network),
            Err(reason) => {
                skipped(&format!("no network namespace: {reason}"));
                None
            }
        }
    }

    /// The name of the test's end of a link.
    pub fn outer_name(&self, link: usize) -> String {
        format!("pn{link}-{}", std::process::id())
    }

    fn connect(&self) -> Result<(), String> {
        let name = &self.name;
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link set lo up"))?;
        for link in 0..2 {
            let (outer, inner) = (self.outer_name(link), format!("eth{link}"));
            ip(&format!(
                "link add {outer} type veth peer name {inner} netns {name}"
            ))?;
            ip(&format!("addr add {}/30 dev {outer}", self.outside[link]))?;
            ip(&format!(
                "-n {name} addr add {}/30 dev {inner}",
                self.inside[link]
            ))?;
            // An address that is still being checked for doubles cannot be bound.
            let unchecked = format!("net.ipv6.conf.{inner}.accept_dad=0");
            ip(&format!("netns exec {name} sysctl -q -w {unchecked}"))?;
            ip(&format!("link set {outer} up"))?;
            ip(&format!("-n {name} link set {inner} up"))?;
        }
        Ok(())
    }

    /// The words that run a program inside.
    pub fn wrapper(&self) -> [&str; 4] {
        ["ip", "netns", "exec", &self.name]
    }

    /// Makes the namespace send what goes elsewhere over the second link.
    pub fn default_route_over_the_second(&self) {
        let (name, gateway) = (&self.name, self.outside[1]);
        ip(&format!("-n {name} route add default via {gateway}")).expect("a default route");
    }

    /// The link-local address inside on the first link, as the test reaches it.
    pub fn link_local(&self) -> Option<SocketAddrV6> {
        let shown = ip(&format!(
            "-n {} -6 -o addr show dev eth0 scope link",
            self.name
        ))
        .ok()?;
        let address = shown.split_whitespace().find(|word| word.contains("::"))?;
        let address: Ipv6Addr = address.split('/').next()?.parse().ok()?;
        let index =
            std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", self.outer_name(0)));
        let scope = index.ok()?.trim().parse().ok()?;
        Some(SocketAddrV6::new(address, 0, 0, scope))
    }

    /// The first link's address inside.
    pub fn first(&self) -> SocketAddr {
        SocketAddr::from((self.inside[0], 0))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The inner ends go with the namespace, the outer ones with the inner ones.
        let _ = ip(&format!("netns del {}", self.name));
    }
}
