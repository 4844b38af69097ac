//! Changes of the control task that are records of the log, and answers that are not true before
//! something is stored.
//!
//! A deleted topic, a deleted group and offsets that an administrator sets are records on every
//! shard. What stands behind them waits until all shards have them as durably as the flush mode
//! promises; what could not be stored, there or in a settings file, is answered as a failure.
//!
//! Invariant: an administrator is told of success only for what a crash cannot take back (P1). A
//! removal that a shard has no room for is tried again, but never once its topic or group was made
//! anew.

use std::sync::Arc;

use wire::codes::{request, response};
use wire::{frame, header};

use super::messages::{MeshMessage, ReplyTo, Told};
use super::state::{State, encode_plain};
use crate::control::effects::{ClientLink, Effect, KeptReply};
use crate::control::groups::GROUPS_FILE;
use crate::control::topics::{PLACEMENT_FILE, TOPICS_FILE};

/// Removals of one core that wait for room; beyond that one counts as not stored.
const REMOVALS_MAX: usize = 10_000;

/// A removal that shards store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Removal {
    /// Of a topic's queues.
    Topic(Arc<str>),
    /// Of a group's offsets.
    Group(Arc<str>),
}

/// A question of the control task that waits for the shards of this core.
#[derive(Debug)]
struct Asked {
    core: usize,
    gather: u64,
    /// Where the log of each shard must be safe; not known while removals wait.
    ends: Option<Vec<u64>>,
}

/// What waits on one core.
#[derive(Debug, Default)]
pub struct Settling {
    /// The last question: the control task gives up one before it asks the next.
    asked: Option<Asked>,
    /// Removals that a shard had no room for, with the shard's place on this core.
    removals: Vec<(usize, Removal)>,
    /// Whether a shard could not store a change that it was told.
    is_lost: bool,
}

impl Settling {
    /// A shard could not store what it was told; whoever asks next hears of it.
    pub fn note_lost(&mut self) {
        self.is_lost = true;
    }
}

/// What the file of the broker's settings is called in answers.
pub const CONFIGURATION: &str = "the configuration file";

/// Files that a change needs even when it finds its table as it wants it: the file may still lack
/// what an earlier request put there.
#[must_use]
pub fn files_of(code: i32) -> &'static [&'static str] {
    match code {
        request::UPDATE_AND_CREATE_TOPIC
        | request::UPDATE_AND_CREATE_TOPIC_LIST
        | request::DELETE_TOPIC_IN_BROKER => &[PLACEMENT_FILE, TOPICS_FILE],
        request::UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        | request::UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
        | request::DELETE_SUBSCRIPTIONGROUP => &[GROUPS_FILE],
        _ => &[],
    }
}

/// Ties the answers of a change to what must be stored before they are true; `files` besides those
/// that its effects save.
#[must_use]
pub fn tie_answers(effects: Vec<Effect>, files: &[&'static str]) -> Vec<Effect> {
    let mut files = files.to_vec();
    let mut shards = false;
    for effect in &effects {
        match effect {
            Effect::Save { name, .. } => files.push(name),
            Effect::ConfigChanged {
                persist: Some(_), ..
            } => files.push(CONFIGURATION),
            Effect::TopicRemoved(_)
            | Effect::GroupRemoved { offsets: true, .. }
            | Effect::SetOffsets(_)
            | Effect::ResetOffsets(_) => shards = true,
            _ => {}
        }
    }
    if files.is_empty() && !shards {
        return effects;
    }
    let mut tied = Vec::with_capacity(effects.len() + 1);
    let mut is_settled = !shards;
    for effect in effects {
        let Effect::Reply { to, frame } = effect else {
            tied.push(effect);
            continue;
        };
        if !std::mem::replace(&mut is_settled, true) {
            tied.push(Effect::Settle);
        }
        let files = files.clone();
        tied.push(Effect::ReplyIfKept(KeptReply {
            to,
            frame,
            files,
            shards,
        }));
    }
    tied
}

/// The same answer as a failure; `None` when it is one already or cannot be read.
fn as_failure(to: ClientLink, whole: &[u8], why: &str) -> Option<Vec<u8>> {
    let (parsed, _) = frame::split(whole, frame::FRAME_BYTES_MAX).ok()??;
    let head = header::decode(&parsed).ok()?;
    if head.code != response::SUCCESS {
        return None;
    }
    let reply = ReplyTo {
        link: to,
        opaque: head.opaque,
        serialization: head.serialization,
        oneway: false,
    };
    let mut out = Vec::with_capacity(256);
    encode_plain(&mut out, &reply, response::SYSTEM_ERROR, Some(why));
    Some(out)
}

impl State {
    /// Answers a change as it was decided, or as a failure when it could not be kept.
    pub(super) fn answer_if_kept(&mut self, reply: &KeptReply) {
        let task = self.control.as_ref();
        let why = task.and_then(|task| task.saves.unkept(&reply.files, reply.shards));
        let failure = why.and_then(|why| as_failure(reply.to, &reply.frame, &why));
        self.deliver(reply.to, failure.as_deref().unwrap_or(&reply.frame));
    }

    /// Stores a removal on the shards of this core, now or as soon as there is room.
    pub(super) fn remove_on_shards(&mut self, removal: &Removal) {
        for local in 0..self.shards.len() {
            if self.try_removal(local, removal) {
                continue;
            }
            if self.settling.removals.len() < REMOVALS_MAX {
                self.settling.removals.push((local, removal.clone()));
            } else {
                tracing::warn!(?removal, "removal not stored: too many wait");
                self.settling.note_lost();
            }
        }
    }

    /// What was removed is made anew: a removal that still waits would take the new one and has
    /// failed.
    pub(super) fn forget_removal(&mut self, removal: &Removal) {
        let removals = &mut self.settling.removals;
        let before = removals.len();
        removals.retain(|(_, waiting)| waiting != removal);
        if removals.len() < before {
            self.settling.note_lost();
        }
    }

    /// Whether the removal needs no other try.
    fn try_removal(&mut self, local: usize, removal: &Removal) -> bool {
        let Some(shard) = self.shards.get_mut(local).map(|local| &mut local.shard) else {
            return true;
        };
        let stored = match removal {
            Removal::Topic(topic) if shard.queues().of_topic(topic).next().is_none() => {
                return true;
            }
            Removal::Topic(topic) => shard.remove_topic(self.now, topic),
            Removal::Group(group) => shard.remove_group(self.now, group),
        };
        match stored {
            Ok(_) => true,
            Err(refusal) if shard.log().poison().is_some() => {
                tracing::warn!(?removal, %refusal, "removal not stored");
                self.settling.note_lost();
                true
            }
            Err(_) => false,
        }
    }

    /// Takes the question whether everything told so far is safe.
    pub(super) fn on_settle(&mut self, core: usize, gather: u64) {
        let ends = None;
        self.settling.asked = Some(Asked { core, gather, ends });
        self.settle_turn();
    }

    /// Tries removals again and answers what is safe now.
    pub fn settle_turn(&mut self) {
        if self.settling.asked.is_none() && self.settling.removals.is_empty() {
            return;
        }
        let waiting = std::mem::take(&mut self.settling.removals);
        for (local, removal) in waiting {
            if !self.try_removal(local, &removal) {
                self.settling.removals.push((local, removal));
            }
        }
        if !self.settling.removals.is_empty() {
            return;
        }
        let Some(asked) = &mut self.settling.asked else {
            return;
        };
        let shards = self.shards.iter().map(|local| &local.shard);
        let ends = asked
            .ends
            .get_or_insert_with(|| shards.clone().map(|shard| shard.log().tail()).collect());
        let late = || {
            let pairs = shards.clone().zip(&*ends);
            pairs.filter(|(shard, end)| shard.watermark() < **end)
        };
        let is_safe = late().next().is_none();
        // A log that is poisoned goes no further.
        if !late().all(|(shard, _)| shard.log().poison().is_some()) {
            return;
        }
        let (core, gather) = (asked.core, asked.gather);
        self.settling.asked = None;
        let is_lost = std::mem::take(&mut self.settling.is_lost);
        let told = Told::Settled(is_safe && !is_lost);
        self.send_to(core, MeshMessage::Told { gather, told });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: ClientLink = ClientLink {
        core: 0,
        connection: 1,
    };

    fn answer(code: i32) -> Vec<u8> {
        let to = ReplyTo {
            link: LINK,
            opaque: 42,
            serialization: frame::Serialization::Json,
            oneway: false,
        };
        let mut out = Vec::new();
        encode_plain(&mut out, &to, code, None);
        out
    }

    fn reply() -> Effect {
        let frame = answer(0);
        Effect::Reply { to: LINK, frame }
    }

    fn save() -> Effect {
        let bytes = Vec::new();
        let name = "topics.json";
        Effect::Save { name, bytes }
    }

    #[test]
    fn a_success_becomes_a_failure_with_its_reason_and_a_failure_stays() {
        let why = "disk: topics.json not saved: No space left on device";
        let failure = as_failure(LINK, &answer(0), why).unwrap();
        let (parsed, _) = frame::split(&failure, 1 << 20).unwrap().unwrap();
        let head = header::decode(&parsed).unwrap();
        assert_eq!((head.code, head.opaque), (response::SYSTEM_ERROR, 42));
        assert_eq!(head.remark.unwrap().to_string(), why);
        assert!(as_failure(LINK, &answer(17), why).is_none());
    }

    #[test]
    fn answers_of_changes_are_tied_to_their_files_and_others_are_not() {
        let tied = tie_answers(vec![save(), reply()], &[]);
        let Effect::ReplyIfKept(KeptReply { files, shards, .. }) = &tied[1] else {
            panic!("{tied:?}");
        };
        assert!(files == &["topics.json"] && !shards);
        let untied = tie_answers(vec![reply()], &[]);
        assert!(matches!(untied[0], Effect::Reply { .. }));
        // What was made before may still be unsaved when somebody makes it again.
        let again = tie_answers(vec![reply()], files_of(17));
        assert!(matches!(again[0], Effect::ReplyIfKept(_)));
    }

    #[test]
    fn answers_of_removals_and_set_offsets_come_behind_all_shards() {
        let removed = Effect::TopicRemoved("T".into());
        let tied = tie_answers(vec![save(), removed, Effect::CleanExpired, reply()], &[]);
        assert!(matches!(tied[3], Effect::Settle), "{tied:?}");
        assert!(matches!(&tied[4], Effect::ReplyIfKept(reply) if reply.shards));
        let tied = tie_answers(vec![Effect::ResetOffsets(Vec::new()), reply()], &[]);
        assert!(matches!(tied[1], Effect::Settle), "{tied:?}");
    }
}
