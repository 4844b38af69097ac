//! Owns the JSON bodies the name server answers.
//!
//! Invariant: no white space anywhere. Some clients take `brokerAddrs` apart by commas and colons
//! instead of parsing it, so a blank after either would become part of an address.

use std::collections::BTreeMap;

use serde_json::Value;

use super::routes::{BrokerGroup, DataVersion, MASTER_ID, QueueData, Route, RouteTable};

/// How maps with integer keys, and text outside ASCII, are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spelling {
    /// Quoted keys and escaped text: what every JSON parser reads.
    Standard,
    /// Bare integer keys and raw UTF-8: what clients before 4.9.4 were written against.
    Bare,
}

/// Appends `text` as a JSON string.
pub fn write_string(out: &mut Vec<u8>, text: &str, spelling: Spelling) {
    out.push(b'"');
    for character in text.chars() {
        match character {
            '"' => out.extend_from_slice(b"\\\""),
            '\\' => out.extend_from_slice(b"\\\\"),
            '\n' => out.extend_from_slice(b"\\n"),
            '\r' => out.extend_from_slice(b"\\r"),
            '\t' => out.extend_from_slice(b"\\t"),
            '\u{0}'..='\u{1f}' | '\u{7f}' => write_escape(out, character as u16),
            ' '..='~' => out.push(character as u8),
            _ if spelling == Spelling::Standard => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write_escape(out, *unit);
                }
            }
            _ => out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    out.push(b'"');
}

fn write_escape(out: &mut Vec<u8>, unit: u16) {
    out.extend_from_slice(format!("\\u{unit:04X}").as_bytes());
}

fn write_number(out: &mut Vec<u8>, number: i64) {
    out.extend_from_slice(number.to_string().as_bytes());
}

/// Appends `,` unless nothing was written since the opening bracket.
fn separate(out: &mut Vec<u8>) {
    if !matches!(out.last(), Some(b'{' | b'[')) {
        out.push(b',');
    }
}

fn write_field(out: &mut Vec<u8>, name: &str) {
    separate(out);
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

fn write_text_field(out: &mut Vec<u8>, name: &str, text: &str, spelling: Spelling) {
    write_field(out, name);
    write_string(out, text, spelling);
}

fn write_number_field(out: &mut Vec<u8>, name: &str, number: i64) {
    write_field(out, name);
    write_number(out, number);
}

fn write_strings<'a>(out: &mut Vec<u8>, texts: impl IntoIterator<Item = &'a str>) {
    out.push(b'[');
    for text in texts {
        separate(out);
        write_string(out, text, Spelling::Bare);
    }
    out.push(b']');
}

fn write_addresses(out: &mut Vec<u8>, addresses: &BTreeMap<i64, String>, spelling: Spelling) {
    out.push(b'{');
    for (id, address) in addresses {
        separate(out);
        if spelling == Spelling::Standard {
            out.push(b'"');
        }
        write_number(out, *id);
        if spelling == Spelling::Standard {
            out.push(b'"');
        }
        out.push(b':');
        write_string(out, address, spelling);
    }
    out.push(b'}');
}

fn write_group(out: &mut Vec<u8>, name: &str, group: &BrokerGroup, spelling: Spelling) {
    out.push(b'{');
    write_field(out, "brokerAddrs");
    write_addresses(out, &group.addresses, spelling);
    write_text_field(out, "brokerName", name, spelling);
    write_text_field(out, "cluster", &group.cluster_name, spelling);
    write_field(out, "enableActingMaster");
    out.extend_from_slice(group.enable_acting_master.to_string().as_bytes());
    if let Some(zone_name) = &group.zone_name {
        write_text_field(out, "zoneName", zone_name, spelling);
    }
    out.push(b'}');
}

fn write_queues(out: &mut Vec<u8>, name: &str, queues: &QueueData, spelling: Spelling) {
    out.push(b'{');
    write_text_field(out, "brokerName", name, spelling);
    write_number_field(out, "perm", queues.perm.into());
    write_number_field(out, "readQueueNums", queues.read_queue_nums.into());
    write_number_field(out, "topicSysFlag", queues.topic_sys_flag.into());
    write_number_field(out, "writeQueueNums", queues.write_queue_nums.into());
    out.push(b'}');
}

/// Appends a value a broker sent; only the static mapping has integer keys, under `currIdMap`.
fn write_value(out: &mut Vec<u8>, value: &Value, spelling: Spelling) {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(flag) => out.extend_from_slice(flag.to_string().as_bytes()),
        Value::Number(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::String(text) => write_string(out, text, spelling),
        Value::Array(values) => {
            out.push(b'[');
            for value in values {
                separate(out);
                write_value(out, value, spelling);
            }
            out.push(b']');
        }
        Value::Object(fields) => {
            out.push(b'{');
            let sorted: BTreeMap<&String, &Value> = fields.iter().collect();
            for (name, value) in sorted {
                separate(out);
                if spelling == Spelling::Bare && name.parse::<i64>().is_ok() {
                    out.extend_from_slice(name.as_bytes());
                } else {
                    write_string(out, name, spelling);
                }
                out.push(b':');
                write_value(out, value, spelling);
            }
            out.push(b'}');
        }
    }
}

/// Drops the groups of other zones; a group without a master stays, so that its slaves can be read.
pub fn keep_zone(route: &mut Route, zone_name: &str) {
    route.groups.retain(|(_, group)| {
        let same = group
            .zone_name
            .as_deref()
            .is_some_and(|zone| zone.eq_ignore_ascii_case(zone_name));
        same || !group.addresses.contains_key(&MASTER_ID)
    });
    let groups = &route.groups;
    route
        .queues
        .retain(|(name, _)| groups.iter().any(|(kept, _)| kept == name));
}

/// `TopicRouteData`
pub fn route_body(route: &Route, order_configuration: Option<&str>, spelling: Spelling) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + 256 * route.groups.len());
    out.push(b'{');
    write_field(&mut out, "brokerDatas");
    out.push(b'[');
    for (name, group) in &route.groups {
        separate(&mut out);
        write_group(&mut out, name, group, spelling);
    }
    out.push(b']');
    write_field(&mut out, "filterServerTable");
    out.extend_from_slice(b"{}");
    if let Some(order_configuration) = order_configuration {
        write_text_field(&mut out, "orderTopicConf", order_configuration, spelling);
    }
    write_field(&mut out, "queueDatas");
    out.push(b'[');
    for (name, queues) in &route.queues {
        separate(&mut out);
        write_queues(&mut out, name, queues, spelling);
    }
    out.push(b']');
    if !route.mappings.is_empty() {
        write_field(&mut out, "topicQueueMappingByBroker");
        out.push(b'{');
        for (name, mapping) in &route.mappings {
            separate(&mut out);
            write_string(&mut out, name, spelling);
            out.push(b':');
            write_value(&mut out, mapping, spelling);
        }
        out.push(b'}');
    }
    out.push(b'}');
    out
}

/// `ClusterInfo`; its addresses have bare keys whoever asks.
pub fn cluster_body(table: &RouteTable) -> Vec<u8> {
    let mut out = vec![b'{'];
    write_field(&mut out, "brokerAddrTable");
    out.push(b'{');
    for (name, group) in table.groups() {
        separate(&mut out);
        write_string(&mut out, name, Spelling::Bare);
        out.push(b':');
        write_group(&mut out, name, group, Spelling::Bare);
    }
    out.push(b'}');
    write_field(&mut out, "clusterAddrTable");
    out.push(b'{');
    for (cluster_name, names) in table.clusters() {
        separate(&mut out);
        write_string(&mut out, cluster_name, Spelling::Bare);
        out.push(b':');
        write_strings(&mut out, names);
    }
    out.extend_from_slice(b"}}");
    out
}

/// `GetBrokerMemberGroupResponseBody`; an unknown group has no addresses.
pub fn member_group_body(table: &RouteTable, cluster_name: &str, broker_name: &str) -> Vec<u8> {
    let none = BTreeMap::new();
    let addresses = table
        .group(broker_name)
        .map_or(&none, |group| &group.addresses);
    let mut out = b"{\"brokerMemberGroup\":{".to_vec();
    write_field(&mut out, "brokerAddrs");
    write_addresses(&mut out, addresses, Spelling::Bare);
    write_text_field(&mut out, "brokerName", broker_name, Spelling::Bare);
    write_text_field(&mut out, "cluster", cluster_name, Spelling::Bare);
    out.extend_from_slice(b"}}");
    out
}

/// `TopicList`
pub fn topic_list_body<'a>(
    broker_address: Option<&str>,
    topics: impl IntoIterator<Item = &'a str>,
) -> Vec<u8> {
    let mut out = vec![b'{'];
    if let Some(broker_address) = broker_address {
        write_text_field(&mut out, "brokerAddr", broker_address, Spelling::Bare);
    }
    write_field(&mut out, "topicList");
    write_strings(&mut out, topics);
    out.push(b'}');
    out
}

/// `TopicList` of the names clusters and brokers have as topics.
pub fn system_topic_list_body(table: &RouteTable) -> Vec<u8> {
    let mut topics: Vec<&str> = Vec::new();
    for (cluster_name, names) in table.clusters() {
        topics.push(cluster_name);
        topics.extend(names);
    }
    topics.sort_unstable();
    topics.dedup();
    let address = table
        .groups()
        .find_map(|(_, group)| group.addresses.values().next());
    topic_list_body(address.map(String::as_str), topics)
}

/// `KVTable`
pub fn kv_table_body(table: &BTreeMap<String, String>) -> Vec<u8> {
    let mut out = b"{\"table\":{".to_vec();
    for (key, value) in table {
        separate(&mut out);
        write_string(&mut out, key, Spelling::Bare);
        out.push(b':');
        write_string(&mut out, value, Spelling::Bare);
    }
    out.extend_from_slice(b"}}");
    out
}

/// `DataVersion`
pub fn data_version_body(version: DataVersion) -> Vec<u8> {
    let mut out = vec![b'{'];
    write_number_field(&mut out, "counter", version.counter);
    write_number_field(&mut out, "stateVersion", version.state_version);
    write_number_field(&mut out, "timestamp", version.timestamp);
    out.push(b'}');
    out
}
