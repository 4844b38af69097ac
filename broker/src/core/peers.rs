//! Whether the cluster has other brokers that take messages, and what name servers hear of this
//! broker's disks.
//!
//! A name server of this program counts the other masters in its answers. Any other one is asked
//! for the whole cluster after a registration, as Apache's answers it; there every broker counts
//! that is registered with a master.
//!
//! Invariant: what was last heard counts, however long ago: a broker that loses its name servers in
//! a fault does not forget the others.

use wire::body::{ClusterInfo, from_json};
use wire::codes::{request, response};
use wire::header::Header;

use super::registrar::{Link, request_frame};
use super::state::State;
use crate::namesrv::offer::{OFFER_FIELD, PEERS_FIELD};

/// Shortest time between two questions for the whole cluster, in microseconds.
const ASK_US: u64 = 3_000_000;
/// The id of a master among the addresses of a broker.
const MASTER_ID: i64 = 0;

/// What one name server said of other brokers.
#[derive(Debug, Default)]
pub(super) struct Peers {
    count: u64,
    /// Number of the question for the cluster that is not answered yet.
    asked: Option<i32>,
    asked_at_us: Option<u64>,
}

impl Peers {
    /// Answers to what was asked will not come.
    pub(super) fn connection_lost(&mut self) {
        self.asked = None;
        self.asked_at_us = None;
    }
}

/// Other brokers of a cluster that have a master.
fn peers_in(body: &[u8], cluster_name: &str, broker_name: &str) -> Option<u64> {
    let info: ClusterInfo = from_json(body).ok()?;
    let names = info.cluster_addr_table.get(cluster_name)?.iter();
    let has_master = |name: &&String| {
        let broker = info.broker_addr_table.get(*name);
        broker.is_some_and(|broker| broker.broker_addrs.contains_key(&MASTER_ID))
    };
    let others = names.filter(|name| *name != broker_name);
    Some(others.filter(has_master).count() as u64)
}

impl State {
    /// Tells name servers that listen of disks, when it is time.
    pub(super) fn report_disks(&mut self) {
        let now_us = self.now.monotonic_us;
        let Some(task) = self.control.as_deref_mut() else {
            return;
        };
        if !self.disks.take_report_due(now_us) || task.registrar.identity.broker_id != MASTER_ID {
            return;
        }
        // One frame for all, so that all decide by the same.
        let disk = self.disks.report(now_us).text();
        let frame = task.registrar.heartbeat_frame(false, &disk);
        for server in &task.registrar.servers {
            if let Link::Up(connection) = server.link
                && server.knows_offers
                && let Some(out) = self.net.output(connection)
            {
                out.extend_from_slice(&frame);
            }
        }
    }

    /// A name server took a registration or a sign of life: it says how many other brokers there
    /// are, or is asked for the cluster.
    pub(super) fn count_peers(&mut self, index: usize, header: &Header<'_>) {
        let now_us = self.now.monotonic_us;
        let Some(task) = self.control.as_deref_mut() else {
            return;
        };
        let opaque = task.registrar.next_opaque();
        let Some(server) = task.registrar.servers.get_mut(index) else {
            return;
        };
        let told = header
            .ext
            .str(PEERS_FIELD)
            .and_then(|text| text.parse().ok());
        if let Some(count) = told {
            server.peers.count = count;
            return self.peers_changed();
        }
        let asked_at_us = server.peers.asked_at_us;
        let is_time = asked_at_us.is_none_or(|at_us| now_us >= at_us + ASK_US);
        let (Link::Up(connection), true) = (server.link, is_time) else {
            return;
        };
        if header.ext.get(OFFER_FIELD).is_some() {
            return;
        }
        server.peers.asked = Some(opaque);
        server.peers.asked_at_us = Some(now_us);
        let frame = request_frame(request::GET_BROKER_CLUSTER_INFO, opaque, &[], &[]);
        if let Some(out) = self.net.output(connection) {
            out.extend_from_slice(&frame);
        }
    }

    /// Takes the answer to a question for the cluster; `false` when it answers something else.
    pub(super) fn on_cluster(&mut self, index: usize, header: &Header<'_>, body: &[u8]) -> bool {
        let Some(task) = self.control.as_deref_mut() else {
            return false;
        };
        let identity = &task.registrar.identity;
        let Some(server) = task.registrar.servers.get_mut(index) else {
            return false;
        };
        if server.peers.asked != Some(header.opaque) {
            return false;
        }
        server.peers.asked = None;
        if header.code == response::SUCCESS
            && let Some(count) = peers_in(body, &identity.cluster_name, &identity.broker_name)
        {
            server.peers.count = count;
            self.peers_changed();
        }
        true
    }

    fn peers_changed(&mut self) {
        let task = self.control.as_deref();
        let mut servers = task.into_iter().flat_map(|task| &task.registrar.servers);
        let has_peers = servers.any(|server| server.peers.count > 0);
        self.set_peers(has_peers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_brokers_with_a_master_are_counted_as_apache_writes_them() {
        let body = br#"{"brokerAddrTable":{"a":{"brokerAddrs":{0:"1.1.1.1:1"},"brokerName":"a",
            "cluster":"C"},"b":{"brokerAddrs":{0:"1.1.1.2:1",1:"1.1.1.3:1"},"brokerName":"b",
            "cluster":"C"},"c":{"brokerAddrs":{1:"1.1.1.4:1"},"brokerName":"c","cluster":"C"},
            "d":{"brokerAddrs":{0:"1.1.1.5:1"},"brokerName":"d","cluster":"D"}},
            "clusterAddrTable":{"C":["a","b","c"],"D":["d"]}}"#;
        assert_eq!(peers_in(body, "C", "a"), Some(1));
        assert_eq!(peers_in(body, "C", "c"), Some(2));
        assert_eq!(peers_in(body, "D", "d"), Some(0));
        assert_eq!(peers_in(body, "E", "e"), None);
        assert_eq!(peers_in(b"nonsense", "C", "a"), None);
    }
}
