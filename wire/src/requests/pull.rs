//! Owns the header of a pull (codes 11 and 361) and the readers it shares with the send header.
//!
//! Invariant: one walk over the ext fields, no allocation unless a field is wrong.

use crate::header::{EXPECTED_I32, EXPECTED_I64, parse_bool, parse_i32, parse_i64};
use crate::header::{Ext, FieldError, Text};

/// The header of a pull request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PullRequest<'a> {
    /// Consumer group.
    pub consumer_group: Text<'a>,
    /// Topic.
    pub topic: Text<'a>,
    /// Queue id.
    pub queue_id: i32,
    /// First queue offset wanted.
    pub queue_offset: i64,
    /// Most messages wanted.
    pub max_msg_nums: i32,
    /// Pull flags: 1 commit offset, 2 suspend, 4 subscription present, 8 class filter, 16 lite.
    pub sys_flag: i32,
    /// Offset to commit, when the flag says so.
    pub commit_offset: i64,
    /// How long the request may wait for messages.
    pub suspend_timeout_millis: i64,
    /// Subscription expression.
    pub subscription: Option<Text<'a>>,
    /// Version of the subscription.
    pub sub_version: i64,
    /// `TAG` or `SQL92`.
    pub expression_type: Option<Text<'a>>,
    /// Most bytes wanted.
    pub max_msg_bytes: Option<i32>,
}

/// Names in the order of [`PullRequest`]'s fields.
const NAMES: [&str; 12] = [
    "consumerGroup",
    "topic",
    "queueId",
    "queueOffset",
    "maxMsgNums",
    "sysFlag",
    "commitOffset",
    "suspendTimeoutMillis",
    "subscription",
    "subVersion",
    "expressionType",
    "maxMsgBytes",
];

fn position(name: &[u8]) -> Option<usize> {
    Some(match name {
        b"consumerGroup" => 0,
        b"topic" => 1,
        b"queueId" => 2,
        b"queueOffset" => 3,
        b"maxMsgNums" => 4,
        b"sysFlag" => 5,
        b"commitOffset" => 6,
        b"suspendTimeoutMillis" => 7,
        b"subscription" => 8,
        b"subVersion" => 9,
        b"expressionType" => 10,
        b"maxMsgBytes" => 11,
        _ => return None,
    })
}

impl<'a> PullRequest<'a> {
    /// Reads the header from its ext fields.
    pub fn decode(ext: &Ext<'a>) -> Result<Self, FieldError> {
        let [
            group,
            topic,
            queue,
            offset,
            nums,
            flag,
            commit,
            suspend,
            sub,
            version,
            kind,
            bytes,
        ] = ext.named(&NAMES, position);
        Ok(Self {
            consumer_group: need("consumerGroup", group)?,
            topic: need("topic", topic)?,
            queue_id: int("queueId", queue)?,
            queue_offset: long("queueOffset", offset)?,
            max_msg_nums: int("maxMsgNums", nums)?,
            sys_flag: int("sysFlag", flag)?,
            commit_offset: long("commitOffset", commit)?,
            suspend_timeout_millis: long("suspendTimeoutMillis", suspend)?,
            subscription: sub,
            sub_version: long("subVersion", version)?,
            expression_type: kind,
            max_msg_bytes: int_or("maxMsgBytes", bytes)?,
        })
    }
}

pub(super) fn need<'a>(name: &str, value: Option<Text<'a>>) -> Result<Text<'a>, FieldError> {
    value.ok_or_else(|| FieldError::missing(name, "a string"))
}

pub(super) fn int(name: &str, value: Option<Text<'_>>) -> Result<i32, FieldError> {
    int_or(name, value)?.ok_or_else(|| FieldError::missing(name, EXPECTED_I32))
}

pub(super) fn long(name: &str, value: Option<Text<'_>>) -> Result<i64, FieldError> {
    let parsed = value.map_or(Ok(None), |text| parse_i64(name, text))?;
    parsed.ok_or_else(|| FieldError::missing(name, EXPECTED_I64))
}

pub(super) fn int_or(name: &str, value: Option<Text<'_>>) -> Result<Option<i32>, FieldError> {
    value.map_or(Ok(None), |text| parse_i32(name, text))
}

pub(super) fn flag_or(name: &str, value: Option<Text<'_>>) -> Result<Option<bool>, FieldError> {
    value.map_or(Ok(None), |text| parse_bool(name, text))
}
