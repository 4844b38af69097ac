//! Owns how brokers come and go: registration, heartbeats, expiry and leaving.
//!
//! Invariant: a registration is applied as a whole or refused before anything changed. A topic the
//! broker sends and the table lacks is always taken, whatever the versions say; that is what keeps
//! a restarted name server from believing that a single-topic registration was the whole table.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Arc, BROKERS_MAX, BrokerGroup, BrokerRegistration, DataVersion, Expired,
    HEARTBEAT_TIMEOUT_DEFAULT_MS, LiveBroker, MASTER_ID, NAME_BYTES_MAX, PERM_WRITE, Refusal,
    Registered, RouteTable, TableKind, check_name, follows,
};

/// What the registration of an address means for the topics it brings.
struct Standing {
    /// The address, or the group, was not known under this id.
    first: bool,
    /// The version differs from the one stored for this address.
    changed: bool,
    /// All topics of the new version will be held once it is applied.
    complete: bool,
}

impl RouteTable {
    /// Takes a registration; `connection` is none for a broker in this process, which stays until
    /// it is unregistered.
    pub fn register(
        &mut self,
        now_ms: i64,
        connection: Option<u64>,
        registration: &BrokerRegistration,
    ) -> Result<Registered, Refusal> {
        self.check_registration(registration)?;
        self.forget_other_id(registration);
        if self.holder_is_newer(registration) {
            // A deposed master announces itself again: the one that holds the id now is right.
            self.live.remove(&live_key(registration));
            return Ok(Registered::default());
        }
        let standing = self.standing(registration);
        let name = self.join_group(registration);
        self.apply_topics(&name, registration, &standing);
        self.take_marks(&name, registration);
        let timeout_ms = registration
            .heartbeat_timeout_ms
            .filter(|timeout_ms| *timeout_ms > 0)
            .unwrap_or(HEARTBEAT_TIMEOUT_DEFAULT_MS);
        self.live.insert(
            live_key(registration),
            LiveBroker {
                broker_name: name,
                connection,
                last_seen_ms: now_ms,
                timeout_ms: if connection.is_some() {
                    timeout_ms
                } else {
                    i64::MAX
                },
                data_version: registration.data_version,
                complete: standing.complete,
                ha_server_address: registration.ha_server_address.clone(),
            },
        );
        Ok(self.master_of(registration))
    }

    fn check_registration(&mut self, registration: &BrokerRegistration) -> Result<(), Refusal> {
        check_name("broker name", &registration.broker_name, NAME_BYTES_MAX)?;
        check_name("cluster name", &registration.cluster_name, NAME_BYTES_MAX)?;
        check_name(
            "broker address",
            &registration.broker_address,
            NAME_BYTES_MAX,
        )?;
        if registration.ha_server_address.len() > NAME_BYTES_MAX {
            check_name(
                "HA address",
                &registration.ha_server_address,
                NAME_BYTES_MAX,
            )?;
        }
        if let Some(zone_name) = registration
            .zone_name
            .as_deref()
            .filter(|zone| !zone.is_empty())
        {
            check_name("zone name", zone_name, NAME_BYTES_MAX)?;
        }
        let new = usize::from(!self.live.contains_key(&live_key(registration)));
        self.check_bound("brokers", self.live.len() + new, BROKERS_MAX)?;
        let names = registration.topics.iter().map(|topic| topic.name.as_str());
        self.check_room(&registration.broker_name, names)
    }

    /// One address holds one id of a group: a slave that became master leaves its old id.
    fn forget_other_id(&mut self, registration: &BrokerRegistration) {
        if let Some(group) = self.groups.get_mut(registration.broker_name.as_str()) {
            group.addresses.retain(|id, address| {
                *id == registration.broker_id || *address != registration.broker_address
            });
        }
    }

    /// True when another live address holds the id with a greater state version.
    fn holder_is_newer(&self, registration: &BrokerRegistration) -> bool {
        self.groups
            .get(registration.broker_name.as_str())
            .and_then(|group| group.addresses.get(&registration.broker_id))
            .filter(|holder| **holder != registration.broker_address)
            .and_then(|holder| {
                self.live
                    .get(&(registration.cluster_name.clone(), holder.clone()))
            })
            .is_some_and(|holder| {
                holder.data_version.state_version > registration.data_version.state_version
            })
    }

    fn standing(&self, registration: &BrokerRegistration) -> Standing {
        let known_id = self
            .groups
            .get(registration.broker_name.as_str())
            .is_some_and(|group| group.addresses.contains_key(&registration.broker_id));
        let is_whole = registration.table == TableKind::Whole;
        let Some(live) = self.live.get(&live_key(registration)) else {
            return Standing {
                first: !known_id,
                changed: true,
                complete: is_whole,
            };
        };
        let changed = live.data_version != registration.data_version;
        // A repeated version comes only with the whole table: parts are sent upon a change.
        let is_repeated = !changed && registration.table != TableKind::Part;
        let complete = is_whole
            || is_repeated
            || (live.complete
                && (!changed || follows(registration.data_version, live.data_version)));
        Standing {
            first: !known_id,
            changed,
            complete,
        }
    }

    /// Puts the address into its group and returns the group's shared name.
    fn join_group(&mut self, registration: &BrokerRegistration) -> Arc<str> {
        let name = match self.groups.get_key_value(registration.broker_name.as_str()) {
            Some((name, _)) => Arc::clone(name),
            None => Arc::from(registration.broker_name.as_str()),
        };
        let group = self
            .groups
            .entry(Arc::clone(&name))
            .or_insert_with(|| BrokerGroup {
                cluster_name: registration.cluster_name.clone(),
                zone_name: None,
                enable_acting_master: false,
                addresses: BTreeMap::new(),
            });
        let alone = group
            .addresses
            .values()
            .all(|held| *held == registration.broker_address);
        if alone && group.cluster_name != registration.cluster_name {
            let old = std::mem::replace(&mut group.cluster_name, registration.cluster_name.clone());
            self.live
                .remove(&(old, registration.broker_address.clone()));
        }
        group.enable_acting_master = registration.enable_acting_master.unwrap_or(false);
        group.zone_name = registration
            .zone_name
            .clone()
            .filter(|zone| !zone.is_empty());
        let replaced = group
            .addresses
            .insert(registration.broker_id, registration.broker_address.clone());
        if let Some(replaced) = replaced.filter(|old| *old != registration.broker_address) {
            self.live
                .remove(&(registration.cluster_name.clone(), replaced));
        }
        name
    }

    fn apply_topics(
        &mut self,
        name: &Arc<str>,
        registration: &BrokerRegistration,
        standing: &Standing,
    ) {
        let Some(group) = self.groups.get(name) else {
            return;
        };
        let master = registration.broker_id == MASTER_ID;
        // Without the header field the broker is too old to stand in for a master.
        let prime_slave = !master
            && registration.enable_acting_master.is_some()
            && group.addresses.keys().next() == Some(&registration.broker_id);
        if !master && !prime_slave {
            return;
        }
        let read_only = prime_slave && group.enable_acting_master;
        for topic in &registration.topics {
            let held = self
                .topics
                .get(&topic.name)
                .is_some_and(|entry| entry.get(name).is_some());
            if held && !standing.first && !standing.changed {
                continue;
            }
            let mut queues = topic.queues;
            if read_only {
                queues.perm &= !PERM_WRITE;
            }
            self.put_queues(&topic.name, name, queues);
        }
        if standing.first || standing.changed {
            for (topic, mapping) in &registration.mappings {
                if let Some(entry) = self.topics.get_mut(topic) {
                    entry
                        .mappings
                        .insert(registration.broker_name.clone(), mapping.clone());
                }
            }
        }
    }

    /// Forgets topics of a group that its whole table does not name any more.
    ///
    /// Call it after [`Self::register`]. Does nothing unless the registration is known to be the
    /// whole table, because a part must never take the rest away.
    pub fn drop_missing_topics(&mut self, was_whole: bool, registration: &BrokerRegistration) {
        if !was_whole || registration.broker_id != MASTER_ID || !registration.mappings.is_empty() {
            return;
        }
        let sent: BTreeSet<&str> = registration
            .topics
            .iter()
            .map(|topic| topic.name.as_str())
            .collect();
        let name = registration.broker_name.as_str();
        let mut removed = 0;
        self.topics.retain(|topic, entry| {
            if !sent.contains(topic.as_str()) && entry.remove(name) {
                removed += 1;
                self.spread.forget(topic, name);
            }
            !entry.queues.is_empty()
        });
        self.queue_entries -= removed;
    }

    /// True when the address is alive.
    pub fn knows(&self, registration: &BrokerRegistration) -> bool {
        self.live.contains_key(&live_key(registration))
    }

    /// True when this registration is known to be the whole table: it says so, or it says nothing
    /// and repeats the stored version.
    pub fn is_whole(&self, registration: &BrokerRegistration) -> bool {
        match registration.table {
            TableKind::Whole => true,
            TableKind::Part => false,
            TableKind::Unsaid => self
                .live
                .get(&live_key(registration))
                .is_some_and(|live| live.data_version == registration.data_version),
        }
    }

    fn master_of(&self, registration: &BrokerRegistration) -> Registered {
        if registration.broker_id == MASTER_ID {
            return Registered::default();
        }
        self.groups
            .get(registration.broker_name.as_str())
            .and_then(|group| group.addresses.get(&MASTER_ID))
            .and_then(|address| {
                let key = (registration.cluster_name.clone(), address.clone());
                self.live.get(&key).map(|live| Registered {
                    master_address: address.clone(),
                    ha_server_address: live.ha_server_address.clone(),
                })
            })
            .unwrap_or_default()
    }

    /// A sign of life; an unknown broker has to register and is ignored here.
    pub fn seen(&mut self, now_ms: i64, cluster_name: &str, broker_address: &str) {
        let key = (cluster_name.to_owned(), broker_address.to_owned());
        if let Some(live) = self.live.get_mut(&key) {
            live.last_seen_ms = now_ms;
        }
    }

    /// Whether the broker should send its whole table, and the version held.
    pub fn compare_version(
        &self,
        cluster_name: &str,
        broker_address: &str,
        version: DataVersion,
    ) -> (bool, Option<DataVersion>) {
        let key = (cluster_name.to_owned(), broker_address.to_owned());
        match self.live.get(&key) {
            Some(live) => (
                live.data_version != version || !live.complete,
                Some(live.data_version),
            ),
            None => (true, None),
        }
    }

    /// Takes a broker out. The address decides; the id may have moved since.
    pub fn unregister(&mut self, cluster_name: &str, broker_name: &str, broker_address: &str) {
        self.live
            .remove(&(cluster_name.to_owned(), broker_address.to_owned()));
        self.leave_groups(&[(broker_name, broker_address)]);
    }

    /// Takes addresses out of their groups, walking the topics once however many leave.
    fn leave_groups(&mut self, leaving: &[(&str, &str)]) {
        let (mut emptied, mut headless) = (BTreeSet::new(), BTreeSet::new());
        for (broker_name, broker_address) in leaving {
            let Some(group) = self.groups.get_mut(*broker_name) else {
                continue;
            };
            group
                .addresses
                .retain(|_, address| address != broker_address);
            if group.addresses.is_empty() {
                self.groups.remove(*broker_name);
                headless.remove(broker_name);
                emptied.insert(*broker_name);
            } else if group.enable_acting_master && group.without_master() {
                headless.insert(*broker_name);
            }
        }
        if emptied.is_empty() && headless.is_empty() {
            return;
        }
        for broker_name in &emptied {
            self.spread.forget_group(broker_name);
        }
        let mut removed = 0;
        self.topics.retain(|_, entry| {
            for broker_name in &emptied {
                removed += usize::from(entry.remove(broker_name));
            }
            for broker_name in &headless {
                if let Some(queues) = entry.get_mut(broker_name) {
                    queues.perm &= !PERM_WRITE;
                }
            }
            !entry.queues.is_empty()
        });
        self.queue_entries -= removed;
    }

    /// Takes out the brokers that registered on a connection that is gone.
    pub fn connection_closed(&mut self, connection: u64) -> Vec<Expired> {
        self.take_out(|live| live.connection == Some(connection))
    }

    /// Takes out the brokers that were silent for longer than they allowed themselves.
    pub fn expire(&mut self, now_ms: i64) -> Vec<Expired> {
        self.take_out(|live| live.last_seen_ms.saturating_add(live.timeout_ms) < now_ms)
    }

    fn take_out(&mut self, gone: impl Fn(&LiveBroker) -> bool) -> Vec<Expired> {
        let leaving: Vec<((String, String), Expired)> = self
            .live
            .iter()
            .filter(|(_, live)| gone(live))
            .map(|(key, live)| {
                let expired = Expired {
                    connection: live.connection,
                    broker_address: key.1.clone(),
                    broker_name: live.broker_name.to_string(),
                };
                (key.clone(), expired)
            })
            .collect();
        let mut expired = Vec::with_capacity(leaving.len());
        for (key, broker) in leaving {
            self.live.remove(&key);
            expired.push(broker);
        }
        let addresses: Vec<(&str, &str)> = expired
            .iter()
            .map(|broker| (broker.broker_name.as_str(), broker.broker_address.as_str()))
            .collect();
        self.leave_groups(&addresses);
        expired
    }
}

fn live_key(registration: &BrokerRegistration) -> (String, String) {
    (
        registration.cluster_name.clone(),
        registration.broker_address.clone(),
    )
}
