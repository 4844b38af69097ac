//! Owns reading what brokers send about themselves: registration bodies, versions, queue lists.
//!
//! Invariant: a checksum is checked before a body is believed, and a compressed body never inflates
//! past [`INFLATED_BYTES_MAX`].

use std::io::Read;

use flate2::Crc;
use flate2::read::ZlibDecoder;
use thiserror::Error;
use wire::body::{RegisterBrokerBody, TopicConfigTable, TopicRouteData, from_json};
use wire::header::Ext;
use wire::requests::RegisterBroker;

use super::offer::{CREATED_ATTRIBUTE, GONE_FIELD, TABLE_FIELD, TABLE_PART, TABLE_WHOLE};
use super::routes::{BrokerRegistration, DataVersion, QueueData, TableKind, TopicRegistration};

/// Most bytes a compressed registration may inflate to.
pub const INFLATED_BYTES_MAX: usize = 128 * 1024 * 1024;
/// Topic attribute that says what kind of messages a topic has.
const TYPE_ATTRIBUTE: &str = "message.type";
/// Version from which compressed registrations end with the mappings of static topics (5.0.0).
const MAPPINGS_VERSION: i32 = 413;

/// Why a body could not be read.
#[derive(Error, Debug)]
pub enum BodyError {
    /// The checksum differs.
    #[error("crc32 not match: header says {expected}, body has {actual}")]
    Checksum {
        /// From the header.
        expected: i64,
        /// Of the body.
        actual: i64,
    },
    /// The body is not of the expected shape.
    #[error("{what} is not readable: {source}")]
    Unreadable {
        /// Which body.
        what: &'static str,
        /// What is wrong with it.
        source: wire::body::BodyError,
    },
    /// The body is neither a JSON object nor a zlib stream.
    #[error("{what} is not a JSON object")]
    NotAnObject {
        /// Which body.
        what: &'static str,
    },
    /// The zlib stream is damaged.
    #[error("compressed registration body does not inflate: {0}")]
    Inflate(#[from] std::io::Error),
    /// The zlib stream is too large.
    #[error("compressed registration body inflates past {INFLATED_BYTES_MAX} bytes")]
    TooLarge,
}

/// Puts header and body of code 103 together.
pub fn read_registration(
    header: &RegisterBroker<'_>,
    version: i32,
    body: &[u8],
) -> Result<BrokerRegistration, BodyError> {
    check_checksum(header.body_crc32.unwrap_or_default(), body)?;
    let mut table = match body.trim_ascii_start().first() {
        None => TopicConfigTable::default(),
        Some(b'{') => read_plain(body)?,
        // The header flag is no proof either way: Java brokers may compress and deny it.
        Some(_) => read_compressed(version, body)?,
    };
    let topics = std::mem::take(&mut table.topic_config_table).into_iter();
    Ok(BrokerRegistration {
        cluster_name: header.cluster_name.to_string(),
        broker_name: header.broker_name.to_string(),
        broker_address: header.broker_addr.to_string(),
        ha_server_address: header
            .ha_server_addr
            .as_deref()
            .unwrap_or_default()
            .to_owned(),
        broker_id: header.broker_id,
        heartbeat_timeout_ms: header.heartbeat_timeout_millis,
        enable_acting_master: header.enable_acting_master,
        zone_name: header.zone_name.as_deref().map(str::to_owned),
        data_version: table.data_version,
        topics: topics
            .map(|(key, topic)| TopicRegistration {
                queues: QueueData {
                    read_queue_nums: topic.read_queue_nums,
                    write_queue_nums: topic.write_queue_nums,
                    perm: topic.perm,
                    topic_sys_flag: topic.topic_sys_flag,
                    ordered: topic.order
                        || topic
                            .attributes
                            .get(TYPE_ATTRIBUTE)
                            .is_some_and(|kind| kind == "FIFO"),
                },
                created_ms: topic
                    .attributes
                    .get(CREATED_ATTRIBUTE)
                    .and_then(|text| text.parse().ok()),
                name: if topic.topic_name.is_empty() {
                    key
                } else {
                    topic.topic_name
                },
            })
            .collect(),
        table: TableKind::Unsaid,
        gone: Vec::new(),
        mappings: table
            .topic_queue_mapping_info_map
            .unwrap_or_default()
            .into_iter()
            .collect(),
    })
}

/// Adds what brokers of this program say about the table they send.
pub fn with_table_kind(mut registration: BrokerRegistration, ext: &Ext<'_>) -> BrokerRegistration {
    registration.table = match ext.str(TABLE_FIELD).as_deref() {
        Some(TABLE_WHOLE) => TableKind::Whole,
        Some(TABLE_PART) => TableKind::Part,
        _ => TableKind::Unsaid,
    };
    let gone = ext.str(GONE_FIELD).unwrap_or_default();
    registration.gone = gone
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect();
    registration
}

/// Reads the `DataVersion` of code 322; no body is the zero version.
pub fn read_data_version(body: &[u8]) -> Result<DataVersion, BodyError> {
    if body.is_empty() {
        return Ok(DataVersion::default());
    }
    let what = "data version";
    check_object(what, body)?;
    from_json(body).map_err(|source| BodyError::Unreadable { what, source })
}

/// Reads the queue lists of code 217.
pub fn read_queue_lists(body: &[u8]) -> Result<Vec<(String, QueueData)>, BodyError> {
    if body.is_empty() {
        return Ok(Vec::new());
    }
    let what = "route body";
    check_object(what, body)?;
    let route: TopicRouteData =
        from_json(body).map_err(|source| BodyError::Unreadable { what, source })?;
    let lists = route.queue_datas.into_iter();
    Ok(lists
        .map(|list| {
            let queues = QueueData {
                read_queue_nums: list.read_queue_nums,
                write_queue_nums: list.write_queue_nums,
                perm: list.perm,
                topic_sys_flag: list.topic_sys_flag,
                ordered: false,
            };
            (list.broker_name, queues)
        })
        .collect())
}

/// CRC32 without its top bit over the body as sent; 0 in the header means none was computed.
fn check_checksum(expected: i64, body: &[u8]) -> Result<(), BodyError> {
    if expected == 0 {
        return Ok(());
    }
    let mut crc = Crc::new();
    crc.update(body);
    let actual = i64::from(crc.sum() & 0x7FFF_FFFF);
    if actual != expected {
        return Err(BodyError::Checksum { expected, actual });
    }
    Ok(())
}

/// Derived readers would take an array for the fields in order.
fn check_object(what: &'static str, body: &[u8]) -> Result<(), BodyError> {
    if body.trim_ascii_start().first() == Some(&b'{') {
        return Ok(());
    }
    Err(BodyError::NotAnObject { what })
}

fn read_plain(body: &[u8]) -> Result<TopicConfigTable, BodyError> {
    let failed = |source| BodyError::Unreadable {
        what: "registration body",
        source,
    };
    let read: RegisterBrokerBody = from_json(body).map_err(failed)?;
    let table = read.topic_config_serialize_wrapper;
    if table != TopicConfigTable::default() {
        return Ok(table);
    }
    // Brokers before 3.0.11 send the table without anything around it.
    from_json(body).map_err(failed)
}

fn read_compressed(version: i32, body: &[u8]) -> Result<TopicConfigTable, BodyError> {
    let mut inflated = Vec::new();
    ZlibDecoder::new(body)
        .take(INFLATED_BYTES_MAX as u64 + 1)
        .read_to_end(&mut inflated)?;
    if inflated.len() > INFLATED_BYTES_MAX {
        return Err(BodyError::TooLarge);
    }
    let read = RegisterBrokerBody::decode_inflated(&inflated, version >= MAPPINGS_VERSION)
        .map_err(|source| BodyError::Unreadable {
            what: "inflated registration body",
            source,
        })?;
    Ok(read.topic_config_serialize_wrapper)
}
