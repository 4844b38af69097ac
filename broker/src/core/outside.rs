//! Where the process meets the outside at start: addresses to listen on, the health and metrics
//! ports, and a trial of the address it tells clients.
//!
//! Invariant: an address is used only after it was found free and no other part of the process
//! wants it, and nothing here runs on a core's
//! thread.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use shard::runtime::sys;

use super::metrics::Metrics;
use super::state::CoreError;
use super::threads::machine;
use crate::cli::{NamesrvPlan, RunPlan};
use crate::config::Config;
use crate::config::value::MetricsExporter;
use crate::health::{Health, HealthServer};

/// Addresses of the broker's listeners: the main port and the VIP port two below it.
pub(super) fn broker_addresses(config: &Config) -> Result<Vec<SocketAddr>, CoreError> {
    let addresses = broker_places(config)?;
    check_free(&addresses, "listenPort")?;
    Ok(addresses)
}

fn broker_places(config: &Config) -> Result<Vec<SocketAddr>, CoreError> {
    let mut addresses = Vec::new();
    for port in [Some(config.listen_port), config.vip_port()]
        .into_iter()
        .flatten()
    {
        let found = config.bind_address.resolve(port);
        let found = found.map_err(|source| machine("resolving bindAddress", source))?;
        addresses.extend(found.first().map(|address| both_families(*address)));
    }
    Ok(addresses)
}

/// Addresses of the name server's listeners.
pub(super) fn namesrv_addresses(plan: &NamesrvPlan) -> Result<Vec<SocketAddr>, CoreError> {
    let addresses = namesrv_places(plan)?;
    check_free(&addresses, "listenPort (--namesrv-port)")?;
    Ok(addresses)
}

fn namesrv_places(plan: &NamesrvPlan) -> Result<Vec<SocketAddr>, CoreError> {
    let keys = &plan.config;
    let addresses = keys.bind_address.resolve(keys.listen_port);
    let addresses = addresses.map_err(|source| machine("resolving bindAddress", source))?;
    Ok(addresses.into_iter().map(both_families).collect())
}

/// A port this process listens at, with where it comes from.
#[derive(Debug)]
struct OwnPort {
    address: SocketAddr,
    /// Whose port it is.
    whose: &'static str,
    /// The setting behind it and where that stands.
    from: String,
}

impl OwnPort {
    /// Whether both cannot be listened at.
    fn takes(&self, other: SocketAddr) -> bool {
        let own = self.address;
        let every = own.ip().is_unspecified() || other.ip().is_unspecified();
        own.port() != 0 && own.port() == other.port() && (every || own.ip() == other.ip())
    }
}

impl fmt::Display for OwnPort {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.address.port();
        write!(out, "{} port {port} ({})", self.whose, self.from)
    }
}

/// The ports that the process cannot do without. Those of the cores are shared among themselves, so
/// that one taken by another part of this very process would be found out only when the store is
/// open.
fn own_ports(plan: &RunPlan) -> Result<Vec<OwnPort>, CoreError> {
    let config = &plan.config;
    let from = |key: &str| {
        let origin = config.origin_of(key).map(ToString::to_string);
        format!("{key}: {}", origin.unwrap_or_default())
    };
    let mut ports = Vec::new();
    if plan.broker {
        let second = format!(
            "always listenPort - 2, for clients with the VIP channel; {}",
            from("listenPort")
        );
        let both = [
            ("the broker's", from("listenPort")),
            ("the broker's second", second),
        ];
        let places = broker_places(config)?.into_iter().zip(both);
        ports.extend(places.map(|(address, (whose, from))| OwnPort {
            address,
            whose,
            from,
        }));
    }
    if let Some(plan) = &plan.namesrv {
        let origin = plan.config.origin_of("listenPort").map(ToString::to_string);
        let from = format!("its listenPort: {}", origin.unwrap_or_default());
        ports.extend(namesrv_places(plan)?.into_iter().map(|address| OwnPort {
            address,
            whose: "the name server's",
            from: from.clone(),
        }));
    }
    if let Some((address, true)) = health_place(plan) {
        let (whose, from) = ("the health", from("pinion.healthPort"));
        ports.push(OwnPort {
            address,
            whose,
            from,
        });
    }
    if let Some(address) = exporter_place(plan)? {
        let (whose, from) = ("the exporter's", from("metricsPromExporterPort"));
        ports.push(OwnPort {
            address,
            whose,
            from,
        });
    }
    Ok(ports)
}

/// Refuses settings by which the process would stand in its own way.
pub(super) fn check_own_ports(plan: &RunPlan) -> Result<(), CoreError> {
    let ports = own_ports(plan)?;
    for (index, first) in ports.iter().enumerate() {
        let mut later = ports.iter().skip(index + 1);
        if let Some(second) = later.find(|second| first.takes(second.address)) {
            return Err(CoreError::OwnPorts {
                first: first.to_string(),
                second: second.to_string(),
            });
        }
    }
    Ok(())
}

fn health_place(plan: &RunPlan) -> Option<(SocketAddr, bool)> {
    let (port, must) = plan.config.health_port()?;
    let found = plan.config.health_address.resolve(port).ok()?;
    Some((*found.first()?, must))
}

fn exporter_place(plan: &RunPlan) -> Result<Option<SocketAddr>, CoreError> {
    let config = &plan.config;
    if !plan.broker || config.metrics_exporter != MetricsExporter::Prom {
        return Ok(None);
    }
    let found = config.metrics_host.resolve(config.metrics_port);
    let found = found.map_err(|source| machine("resolving metricsPromExporterHost", source))?;
    Ok(found.first().copied())
}

/// The address that stands for "every address of this machine" in both families, where the system
/// has both: clients of IPv4 and IPv6 then come in at one listener, as they do with Java's broker.
pub(super) fn both_families(address: SocketAddr) -> SocketAddr {
    let every = SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, address.port()));
    let separate = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only");
    let together = separate.is_ok_and(|text| text.trim() == "0");
    let any_port = SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0));
    if address.ip() == std::net::Ipv4Addr::UNSPECIFIED
        && together
        && sys::tcp_listener(any_port, false).is_ok()
    {
        return every;
    }
    address
}

/// The cores share their port among themselves; that it is not shared with another process is
/// found out here.
pub(super) fn check_free(addresses: &[SocketAddr], key: &'static str) -> Result<(), CoreError> {
    for address in addresses {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(2);
        loop {
            match sys::tcp_listener(*address, false) {
                Ok(_) => break,
                // The ports of a killed process are freed a moment after it.
                Err(error)
                    if error.kind() == std::io::ErrorKind::AddrInUse
                        && std::time::Instant::now() < deadline =>
                {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err(source) => {
                    return Err(CoreError::Listen {
                        address: *address,
                        key,
                        source,
                    });
                }
            }
        }
    }
    Ok(())
}

/// The health port.
pub(super) fn start_health(
    plan: &RunPlan,
    health: &Arc<Health>,
    metrics: &Arc<Metrics>,
) -> Result<Option<HealthServer>, CoreError> {
    let Some((address, must)) = health_place(plan) else {
        return Ok(None);
    };
    if !must && let Some(own) = own_ports(plan)?.iter().find(|own| own.takes(address)) {
        tracing::warn!(%address, "health port not opened (pinion.healthPort): it is {own}");
        return Ok(None);
    }
    let metrics = metrics.clone();
    match HealthServer::start(address, health.clone(), Arc::new(move || metrics.text())) {
        Ok(server) => Ok(Some(server)),
        Err(source) if must => Err(CoreError::Listen {
            address,
            key: "pinion.healthPort",
            source,
        }),
        Err(error) => {
            tracing::warn!(%address, %error, "health port not opened (pinion.healthPort)");
            Ok(None)
        }
    }
}

/// The page of Prometheus on RocketMQ's port, when `metricsExporterType` asks for it.
pub(super) fn start_exporter(
    plan: &RunPlan,
    health: &Arc<Health>,
    metrics: &Arc<Metrics>,
) -> Result<Option<HealthServer>, CoreError> {
    let Some(address) = exporter_place(plan)? else {
        return Ok(None);
    };
    let metrics = metrics.clone();
    match HealthServer::start(address, health.clone(), Arc::new(move || metrics.text())) {
        Ok(server) => Ok(Some(server)),
        Err(source) => Err(CoreError::Listen {
            address,
            key: "metricsPromExporterPort",
            source,
        }),
    }
}

/// Dials the advertised address from a thread of its own and warns when nobody answers there.
pub(super) fn dial_advertised(config: &Config) {
    let (host, port) = (config.broker_ip1.clone(), config.listen_port);
    let dial = move || {
        if let Err(warning) = crate::config::address::dial_advertised(&host, port) {
            tracing::warn!("{warning}");
        }
    };
    if let Err(error) = std::thread::Builder::new()
        .name("dial".to_owned())
        .spawn(dial)
    {
        tracing::warn!(%error, "the advertised address was not tried");
    }
}
