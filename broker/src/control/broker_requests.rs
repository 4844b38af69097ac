//! Owns the requests about the broker itself: settings, cleaning, features that are off here.
//!
//! Invariant: settings change whole or not at all, and cores hear of a change before the answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::Control;
use super::answer::{Answer, Call, Field, Outcome, Refusal, codes, now, to_json};
use super::effects::Effect;
use crate::config::UpdateError;

/// Answer to code 2003.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct ColdDataInfo {
    cg_cold_read_threshold: i64,
    config_table: BTreeMap<String, i64>,
    global_acc: i64,
    global_cold_read_threshold: i64,
    runtime_table: BTreeMap<String, i64>,
}

impl Control {
    /// Code 25.
    pub(super) fn update_config(&mut self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let text = std::str::from_utf8(call.body)
            .map_err(|error| Refusal::error(format!("the settings are not UTF-8: {error}")))?;
        let permission = self.config.broker_permission;
        let changed = self.config.update_all(text).map_err(|error| {
            let code = match error {
                UpdateError::NoPermission { .. } => codes::NO_PERMISSION,
                UpdateError::Value { .. } => codes::INVALID_PARAMETER,
                UpdateError::UnknownKey { .. } | UpdateError::Malformed(_) => codes::SYSTEM_ERROR,
            };
            Refusal::new(code, error.to_string())
        })?;
        for change in &changed {
            tracing::info!(
                key = change.key,
                before = change.before,
                now = change.now,
                peer = %call.origin.peer,
                "setting changed"
            );
        }
        if !changed.is_empty() {
            let persist = self.config.persist(&changed);
            let config = Arc::new(self.config.clone());
            effects.push(Effect::ConfigChanged { config, persist });
        }
        if self.config.broker_permission != permission {
            let version = self.topics.version().next(call.now_ms);
            self.topics.set_version(version);
            self.save_topics(effects)?;
            effects.push(Effect::Register { topics: Vec::new() });
        }
        now(Answer::done())
    }

    /// Code 26.
    pub(super) fn broker_config(&self) -> Outcome {
        let version = to_json(self.topics.version())?;
        let version = String::from_utf8_lossy(&version).into_owned();
        let text = self.config.to_properties_text();
        now(Answer::body(text).with("version", Field::Text(version)))
    }

    /// Codes 306 and 329.
    pub(super) fn clean_expired(&self, effects: &mut Vec<Effect>) -> Outcome {
        effects.push(Effect::CleanExpired);
        now(Answer::done())
    }

    /// Code 2003.
    pub(super) fn cold_data_info(&self) -> Outcome {
        now(Answer::json(&ColdDataInfo::default())?)
    }

    /// Code 2004. Reads go past the page cache, so that both modes are the same here.
    pub(super) fn log_read_mode(&self, call: &Call<'_>) -> Outcome {
        match call.header.ext.str("READ_AHEAD_MODE").as_deref() {
            Some("0" | "1") => now(Answer::done()),
            other => Err(Refusal::parameter(format!(
                "READ_AHEAD_MODE is {}, must be 0 or 1",
                other.unwrap_or("missing")
            ))),
        }
    }

    /// Codes 3001 to 3010.
    pub(super) fn no_auth(&self) -> Outcome {
        Err(Refusal::error(
            "users and access lists are not kept: authenticationEnabled and \
             authorizationEnabled are off",
        ))
    }
}
