//! Where the process meets the outside at start: addresses to listen on, the health and metrics
//! ports, and a trial of the address it tells clients.
//!
//! Invariant: an address is used only after it was found free, and nothing here runs on a core's
//! thread.

use std::net::SocketAddr;
use std::sync::Arc;

use shard::runtime::sys;

use super::metrics::Metrics;
use super::state::CoreError;
use super::threads::machine;
use crate::cli::RunPlan;
use crate::config::Config;
use crate::config::value::MetricsExporter;
use crate::health::{Health, HealthServer};

/// Addresses of the broker's listeners: the main port and the VIP port two below it.
pub(super) fn broker_addresses(config: &Config) -> Result<Vec<SocketAddr>, CoreError> {
    let mut addresses = Vec::new();
    for port in [config.listen_port, config.listen_port.saturating_sub(2)] {
        let found = config.bind_address.resolve(port);
        let found = found.map_err(|source| machine("resolving bindAddress", source))?;
        addresses.extend(found.first().map(|address| both_families(*address)));
    }
    check_free(&addresses, "listenPort")?;
    Ok(addresses)
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
    let Some((port, must)) = plan.config.health_port() else {
        return Ok(None);
    };
    let address = plan
        .config
        .health_address
        .resolve(port)
        .ok()
        .and_then(|a| a.first().copied());
    let Some(address) = address else {
        return Ok(None);
    };
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
    let config = &plan.config;
    if !plan.broker || config.metrics_exporter != MetricsExporter::Prom {
        return Ok(None);
    }
    let found = config.metrics_host.resolve(config.metrics_port);
    let found = found.map_err(|source| machine("resolving metricsPromExporterHost", source))?;
    let Some(address) = found.first().copied() else {
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
