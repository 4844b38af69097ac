//! `pinion explain`: where is my message, who got it, why does it wait?
//!
//! Facts are gathered from outside (`gather`, `about_group`; the brokers' side is `core::explain`
//! and `control::explain_requests`), judged by pure functions (`judge`, `waits`), and printed here.
//!
//! Invariant: explaining changes nothing anywhere.

mod about_group;
mod ask;
pub mod facts;
mod gather;
pub mod judge;
#[cfg(test)]
mod tests;
mod topics;
mod waits;

use std::process::ExitCode;
use std::time::Instant;

use serde::Serialize;

use crate::cli::args::ExplainArgs;
use crate::cli::{EXIT_FAILED, complain, say};
use facts::{Copy, Facts};
use judge::{Verdict, judge};

/// What `--json` prints.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Printed<'a> {
    asked: &'a str,
    topic: &'a str,
    group: Option<&'a str>,
    #[serde(flatten)]
    verdict: &'a Verdict,
    took_ms: u64,
    copies: Vec<PrintedCopy<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PrintedCopy<'a> {
    broker: &'a str,
    topic: &'a str,
    queue_id: i32,
    queue_offset: i64,
    offset_id: &'a str,
    store_ms: i64,
    facts: Option<&'a facts::QueueFacts>,
}

impl<'a> From<&'a Copy> for PrintedCopy<'a> {
    fn from(copy: &'a Copy) -> Self {
        Self {
            broker: &copy.broker,
            topic: &copy.topic,
            queue_id: copy.queue_id,
            queue_offset: copy.queue_offset,
            offset_id: &copy.offset_id,
            store_ms: copy.store_ms,
            facts: copy.queue.as_ref(),
        }
    }
}

/// Runs the command.
#[must_use]
pub fn run(args: &ExplainArgs) -> ExitCode {
    let began = Instant::now();
    let facts = match gather::gather(args) {
        Ok(facts) => facts,
        Err(error) => {
            complain(&format!("pinion: {error}"));
            return ExitCode::from(EXIT_FAILED);
        }
    };
    let verdict = judge(&facts);
    let took_ms = began.elapsed().as_millis() as u64;
    if args.json {
        let printed = Printed {
            asked: &facts.asked.what,
            topic: &facts.topic,
            group: facts.asked.group.as_deref(),
            verdict: &verdict,
            took_ms,
            copies: facts.copies.iter().map(PrintedCopy::from).collect(),
        };
        match serde_json::to_string(&printed) {
            Ok(text) => say(&format!("{text}\n")),
            Err(error) => complain(&format!("pinion: {error}")),
        }
        return ExitCode::SUCCESS;
    }
    say(&text(&facts, &verdict));
    ExitCode::SUCCESS
}

fn text(facts: &Facts, verdict: &Verdict) -> String {
    let mut out = facts.asked.what.clone();
    if !facts.topic.is_empty() {
        out.push_str(&format!(" of topic {}", facts.topic));
    }
    if let Some(group) = &facts.asked.group {
        out.push_str(&format!(", group {group}"));
    }
    out.push_str(&format!("\n  {}\n", verdict.why));
    for detail in &verdict.details {
        out.push_str(&format!("    {detail}\n"));
    }
    out
}
