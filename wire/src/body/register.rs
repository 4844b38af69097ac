//! Owns the body of a broker's registration, plain and in the binary form behind compression.
//!
//! Invariant: inflating is somebody else's task; every length of the binary form is compared with
//! the bytes left, and no table is sized by a number from the body.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::scalar::or_default;
use super::topic::{TopicConfig, TopicConfigTable, TopicFilterType};
use super::{BodyError, from_json, to_json};

/// Body of code 103.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RegisterBrokerBody {
    /// Filter servers of the broker.
    #[serde(deserialize_with = "or_default")]
    pub filter_server_list: Vec<String>,
    /// Its topics.
    #[serde(deserialize_with = "or_default")]
    pub topic_config_serialize_wrapper: TopicConfigTable,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn fail<T>(&self, field: &'static str) -> Result<T, BodyError> {
        Err(BodyError::Registration { field, at: self.at })
    }

    fn number(&mut self, field: &'static str) -> Result<usize, BodyError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let number = rest
            .first_chunk::<4>()
            .map(|chunk| i32::from_be_bytes(*chunk));
        match number.and_then(|number| usize::try_from(number).ok()) {
            Some(number) => {
                self.at += 4;
                Ok(number)
            }
            None => self.fail(field),
        }
    }

    fn block(&mut self, field: &'static str) -> Result<&'a [u8], BodyError> {
        let bytes = self.number(field)?;
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match rest.get(..bytes) {
            Some(block) => {
                self.at += bytes;
                Ok(block)
            }
            None => self.fail(field),
        }
    }

    fn json<T: DeserializeOwned + Default>(&mut self, field: &'static str) -> Result<T, BodyError> {
        let block = self.block(field)?;
        if block.is_empty() || block == b"null" {
            Ok(T::default())
        } else {
            from_json(block)
        }
    }
}

impl RegisterBrokerBody {
    /// Reads the binary form after it was inflated. Brokers from version 5.0.0 on write mappings
    /// of static topics at its end.
    pub fn decode_inflated(bytes: &[u8], has_mappings: bool) -> Result<Self, BodyError> {
        let mut reader = Reader { bytes, at: 0 };
        let mut table = TopicConfigTable {
            data_version: reader.json("data version")?,
            ..TopicConfigTable::default()
        };
        for _ in 0..reader.number("number of topics")? {
            let block = reader.block("topic")?;
            let topic = std::str::from_utf8(block).ok().and_then(decode_topic);
            match topic {
                Some(topic) => {
                    table
                        .topic_config_table
                        .insert(topic.topic_name.clone(), topic);
                }
                None => return reader.fail("topic"),
            }
        }
        let filter_server_list = reader.json("filter servers")?;
        if has_mappings && reader.at < bytes.len() {
            let mut mappings = BTreeMap::new();
            for _ in 0..reader.number("number of mappings")? {
                let mapping: Value = reader.json("mapping")?;
                let topic = mapping
                    .get("topic")
                    .and_then(Value::as_str)
                    .map(str::to_owned);
                mappings.insert(topic.unwrap_or_default(), mapping);
            }
            table.topic_queue_mapping_info_map = Some(mappings);
        }
        Ok(Self {
            filter_server_list,
            topic_config_serialize_wrapper: table,
        })
    }

    /// Writes the binary form, to be deflated by the caller.
    pub fn encode_inflated(&self, has_mappings: bool) -> Result<Vec<u8>, BodyError> {
        let table = &self.topic_config_serialize_wrapper;
        let mut out = Vec::new();
        block(&mut out, &to_json(&table.data_version)?);
        out.extend_from_slice(&(table.topic_config_table.len() as u32).to_be_bytes());
        for topic in table.topic_config_table.values() {
            block(&mut out, encode_topic(topic)?.as_bytes());
        }
        block(&mut out, &to_json(&self.filter_server_list)?);
        if has_mappings {
            let mappings = table
                .topic_queue_mapping_info_map
                .iter()
                .flat_map(BTreeMap::values);
            let mappings: Vec<_> = mappings.collect();
            out.extend_from_slice(&(mappings.len() as u32).to_be_bytes());
            for mapping in mappings {
                block(&mut out, &to_json(mapping)?);
            }
        }
        Ok(out)
    }
}

fn block(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
    out.extend_from_slice(bytes);
}

/// Reads `name read write perm filterType {attributes}`; the attributes may be missing.
fn decode_topic(text: &str) -> Option<TopicConfig> {
    let mut parts = text.splitn(6, ' ');
    let mut topic = TopicConfig {
        topic_name: parts.next().filter(|name| !name.is_empty())?.to_owned(),
        read_queue_nums: parts.next()?.parse().ok()?,
        write_queue_nums: parts.next()?.parse().ok()?,
        perm: parts.next()?.parse().ok()?,
        topic_filter_type: TopicFilterType::from_name(parts.next()?)?,
        ..TopicConfig::default()
    };
    if let Some(attributes) = parts.next()
        && !matches!(attributes.trim(), "" | "null")
    {
        topic.attributes = from_json(attributes.as_bytes()).ok()?;
    }
    Some(topic)
}

fn encode_topic(topic: &TopicConfig) -> Result<String, BodyError> {
    let attributes = to_json(&topic.attributes)?;
    Ok(format!(
        "{} {} {} {} {} {}",
        topic.topic_name,
        topic.read_queue_nums,
        topic.write_queue_nums,
        topic.perm,
        topic.topic_filter_type.name(),
        String::from_utf8_lossy(&attributes),
    ))
}
