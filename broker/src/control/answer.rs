//! Owns the shape of requests inside the control task and of what becomes of them.
//!
//! Invariant: every request ends in exactly one answer or refusal, unless it is one-way or waits
//! for reports; a refusal always has RocketMQ's code and a remark that says what to do.

use std::fmt::Display;

use serde::de::DeserializeOwned;
use wire::frame::{self, FRAME_BYTES_MAX, Serialization};
use wire::header::{self, ExtValue, FieldError, Header, Reply};

pub(super) use wire::codes::response as codes;

use super::effects::{Effect, Origin, PendingRequest};
use crate::core::report::ReportQuery;

/// Why a request is not granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Response code.
    pub code: i32,
    /// What was wrong, where, and what to do.
    pub remark: String,
}

impl Refusal {
    /// A refusal with a code of its own.
    pub fn new(code: i32, remark: impl Into<String>) -> Self {
        Self {
            code,
            remark: remark.into(),
        }
    }

    /// A refusal for which RocketMQ has no better code than SYSTEM_ERROR.
    pub fn error(remark: impl Into<String>) -> Self {
        Self::new(codes::SYSTEM_ERROR, remark)
    }

    /// A parameter is malformed or out of range.
    pub fn parameter(remark: impl Into<String>) -> Self {
        Self::new(codes::INVALID_PARAMETER, remark)
    }

    /// A topic is unknown.
    pub fn no_topic(topic: &str) -> Self {
        let remark = format!("topic[{topic}] does not exist on this broker, create it first");
        Self::new(codes::TOPIC_NOT_EXIST, remark)
    }

    /// A group is unknown.
    pub fn no_group(group: &str) -> Self {
        let remark = format!("consumer group [{group}] does not exist on this broker");
        Self::new(codes::SUBSCRIPTION_GROUP_NOT_EXIST, remark)
    }
}

impl From<FieldError> for Refusal {
    fn from(error: FieldError) -> Self {
        Self::error(error.to_string())
    }
}

/// The value of a header field of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// Text.
    Text(String),
    /// A number.
    Int(i64),
    /// A boolean.
    Bool(bool),
}

/// A granted request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Text, rarely used.
    pub remark: Option<String>,
    /// Header fields.
    pub fields: Vec<(&'static str, Field)>,
    /// Body.
    pub body: Vec<u8>,
}

impl Answer {
    /// Plain success.
    pub fn done() -> Self {
        Self::default()
    }

    /// Success with a JSON body.
    pub fn json<T: serde::Serialize>(body: &T) -> Result<Self, Refusal> {
        Ok(Self::body(to_json(body)?))
    }

    /// Success with a body.
    pub fn body(body: impl Into<Vec<u8>>) -> Self {
        Self {
            body: body.into(),
            ..Self::default()
        }
    }

    /// Adds a header field.
    pub fn with(mut self, name: &'static str, value: Field) -> Self {
        self.fields.push((name, value));
        self
    }
}

/// Writes JSON in RocketMQ's dialect.
pub fn to_json<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, Refusal> {
    wire::body::to_json(value).map_err(|error| Refusal::error(error.to_string()))
}

/// `None`: answered later, or not at all.
pub type Outcome = Result<Option<Answer>, Refusal>;

/// Shorthand for an answer given at once.
pub fn now(answer: Answer) -> Outcome {
    Ok(Some(answer))
}

/// One request being handled.
pub struct Call<'a> {
    /// Time of the request in milliseconds.
    pub now_ms: i64,
    /// Who asked.
    pub origin: Origin,
    /// Its header.
    pub header: &'a Header<'a>,
    /// The whole frame.
    pub frame: &'a [u8],
    /// Its body.
    pub body: &'a [u8],
}

impl Call<'_> {
    /// The request as something to be finished later.
    pub fn pending(&self) -> Box<PendingRequest> {
        Box::new(PendingRequest {
            origin: self.origin,
            frame: self.frame.to_vec(),
        })
    }

    /// The request goes on when every core has reported.
    pub fn with_reports(&self, query: ReportQuery, effects: &mut Vec<Effect>) -> Outcome {
        effects.push(Effect::NeedReports {
            query,
            request: self.pending(),
        });
        Ok(None)
    }

    /// Reads the body as JSON in RocketMQ's dialect.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Refusal> {
        wire::body::from_json(self.body).map_err(|error| Refusal::error(error.to_string()))
    }
}

/// Takes a pending request apart again and lets `use_it` work on it. Frames were decoded before
/// they became pending, so that this always succeeds in practice.
pub fn with_call<T>(
    now_ms: i64,
    request: &PendingRequest,
    use_it: impl FnOnce(&Call<'_>) -> T,
) -> Option<T> {
    let (cut, _) = frame::split(&request.frame, FRAME_BYTES_MAX)
        .ok()
        .flatten()?;
    let header = header::decode(&cut).ok()?;
    let call = Call {
        now_ms,
        origin: request.origin,
        header: &header,
        frame: &request.frame,
        body: cut.body,
    };
    Some(use_it(&call))
}

/// Turns the outcome of a request into a reply, unless there is none to give.
pub fn reply(call: &Call<'_>, outcome: Outcome, effects: &mut Vec<Effect>) {
    if call.header.is_oneway() {
        if let Err(refusal) = outcome {
            let (code, remark) = (refusal.code, refusal.remark);
            tracing::debug!(
                request = call.header.code,
                code,
                remark,
                "one-way request refused"
            );
        }
        return;
    }
    let frame = match outcome {
        Ok(None) => return,
        Ok(Some(answer)) => encode(
            call.header.serialization,
            call.header.opaque,
            codes::SUCCESS,
            answer.remark.as_deref(),
            &answer.fields,
            &answer.body,
        ),
        Err(refusal) => encode(
            call.header.serialization,
            call.header.opaque,
            refusal.code,
            Some(&refusal.remark),
            &[],
            &[],
        ),
    };
    effects.push(Effect::Reply {
        to: call.origin.link,
        frame,
    });
}

/// Encodes a reply frame.
pub fn encode(
    serialization: Serialization,
    opaque: i32,
    code: i32,
    remark: Option<&str>,
    fields: &[(&'static str, Field)],
    body: &[u8],
) -> Vec<u8> {
    let ext: Vec<(&str, ExtValue<'_>)> = fields
        .iter()
        .map(|(name, value)| match value {
            Field::Text(text) => (*name, ExtValue::Str(text)),
            Field::Int(number) => (*name, ExtValue::Int(*number)),
            Field::Bool(flag) => (*name, ExtValue::Bool(*flag)),
        })
        .collect();
    let mut out = Vec::with_capacity(body.len() + 256);
    header::encode_reply(
        &mut out,
        serialization,
        &Reply {
            code,
            opaque,
            remark,
            ext: &ext,
        },
        body,
    );
    out
}

/// A field that must be a name: present and not blank.
pub fn need<'a>(name: &str, value: Option<&'a str>) -> Result<&'a str, Refusal> {
    match value.map(str::trim) {
        Some(text) if !text.is_empty() => Ok(text),
        _ => Err(Refusal::parameter(format!(
            "header field {name} is missing or blank"
        ))),
    }
}

/// An error of a lower layer as a refusal.
pub fn failed(what: &str, error: impl Display) -> Refusal {
    Refusal::error(format!("{what}: {error}"))
}
