//! What the control task asks its core to do after it handled a request.
//!
//! Invariant: the control task itself performs no I/O; it returns effects, in order, and the core
//! carries them out. A reply that follows a `Save` is sent only after that save is durable, and
//! says so when it is not; only what [`may_pass`] lets pass does not wait behind it.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use wire::body::{SubscriptionGroupConfig, TopicConfig};
use wire::codes::{private, request};

use super::names::{DLQ_PREFIX, RETRY_PREFIX};
use super::subscriptions::GroupSubscriptions;
use crate::config::{Config, Persist};
use crate::core::report::ReportQuery;

/// A client connection anywhere in the process: the core that owns it and the id there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ClientLink {
    /// Owning core.
    pub core: u16,
    /// Connection id on that core.
    pub connection: u64,
}

/// Who sent a control request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Where the answer goes.
    pub link: ClientLink,
    /// Remote address of the client.
    pub peer: SocketAddr,
    /// How often the request was routed again after something it lacked was created.
    pub creations: u8,
}

/// A topic with the shard of each of its queues (index = queue id).
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedTopic {
    /// RocketMQ's topic configuration.
    pub config: TopicConfig,
    /// Shard of queue `i`; as long as max(readQueueNums, writeQueueNums) ever was.
    pub shards: Vec<u16>,
}

/// One committed offset to set on the owning shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffsetSet {
    /// Consumer group.
    pub group: String,
    /// Topic.
    pub topic: String,
    /// Queue id.
    pub queue_id: i32,
    /// New committed offset; `None` forgets it.
    pub offset: Option<i64>,
}

/// The answer of a change, and what must be stored before it is true.
#[derive(Debug)]
pub struct KeptReply {
    /// Target.
    pub to: ClientLink,
    /// Whole frame.
    pub frame: Vec<u8>,
    /// Files of the change.
    pub files: Vec<&'static str>,
    /// Whether shards had to store something.
    pub shards: bool,
}

/// One thing to do.
#[derive(Debug)]
pub enum Effect {
    /// Send this frame to the origin of the request (or the remembered origin of a relay).
    Reply {
        /// Target.
        to: ClientLink,
        /// Whole frame.
        frame: Vec<u8>,
    },
    /// The same for the answer of a change: a failure is sent instead when a file of it could not
    /// be saved, or (with `shards`) when shards could not store it.
    ReplyIfKept(KeptReply),
    /// Do nothing behind this before every shard has stored what it was told in front of it.
    Settle,
    /// Send a frame to some client (notifications, relayed requests).
    Push {
        /// Target.
        to: ClientLink,
        /// Whole frame.
        frame: Vec<u8>,
    },
    /// Write a control file durably before anything after this effect is done.
    Save {
        /// File name below `config/`.
        name: &'static str,
        /// Content.
        bytes: Vec<u8>,
    },
    /// Write a control file with the content it should have by then; nothing waits for it.
    SaveLater(&'static str),
    /// Tell every core about a topic.
    TopicChanged(Arc<PlacedTopic>),
    /// Tell every core that a topic is gone; shards drop its queues and its offsets.
    TopicRemoved(Arc<str>),
    /// Tell every core about a group.
    GroupChanged(Arc<SubscriptionGroupConfig>),
    /// Tell every core that a group is gone; with `offsets`, shards forget its offsets.
    GroupRemoved {
        /// Group name.
        group: Arc<str>,
        /// Whether offsets go too.
        offsets: bool,
    },
    /// Tell every core what a group may not do, as bits by topic (4: read); empty = nothing.
    ForbiddenChanged {
        /// Group name.
        group: Arc<str>,
        /// Bits by topic.
        topics: Arc<BTreeMap<String, i32>>,
    },
    /// Tell every core the current subscriptions of a group (none left: empty).
    SubscriptionsChanged(Arc<GroupSubscriptions>),
    /// Tell every core whether an administrator wants a group to pull a topic, not to pop it.
    PulledChanged {
        /// Group name.
        group: Arc<str>,
        /// Topic name.
        topic: Arc<str>,
        /// Whether it pulls.
        pulled: bool,
    },
    /// Set or forget committed offsets on their shards.
    SetOffsets(Vec<OffsetSet>),
    /// Like `SetOffsets`, and also make the next pull of each of these queues begin there (answer
    /// PULL_OFFSET_MOVED with the new offset), so that a connected consumer follows. Until that
    /// pull, commits of the group to the queue are answered but not taken.
    ResetOffsets(Vec<OffsetSet>),
    /// Tell every core the changed settings, and write them into the config file on a helper
    /// thread.
    ConfigChanged {
        /// All settings after the change.
        config: Arc<Config>,
        /// Writes the change into the file; nothing when there is no file.
        persist: Option<Persist>,
    },
    /// Ask every core for a report; then call `Control::take_sample`.
    Sample(ReportQuery),
    /// Route this request (a whole frame) again: its topic exists now.
    Redispatch {
        /// Who asked.
        origin: Origin,
        /// Whole frame.
        frame: Vec<u8>,
    },
    /// Register with the name servers now; with names, only these topics changed.
    Register {
        /// Changed topics; empty = everything.
        topics: Vec<String>,
    },
    /// Ask every core for a report; then call `Control::finish` with the same request.
    NeedReports {
        /// What to ask.
        query: ReportQuery,
        /// The request to finish.
        request: Box<PendingRequest>,
    },
    /// Resolve offsets on the owning shards by time, then call `Control::finish_search`.
    SearchOffsets {
        /// Topic.
        topic: String,
        /// Queue ids.
        queue_ids: Vec<i32>,
        /// Store time in milliseconds; -1 = end of the queue.
        timestamp: i64,
        /// The request to finish.
        request: Box<PendingRequest>,
    },
    /// Read a stored record by physical offset, then call `Control::finish_record`.
    ReadRecord {
        /// Physical offset.
        physical_offset: i64,
        /// The request to finish.
        request: Box<PendingRequest>,
    },
    /// Delete expired segments now (codes 329, 306).
    CleanExpired,
}

/// A request that waits for something before it can be answered.
#[derive(Debug)]
pub struct PendingRequest {
    /// Who asked.
    pub origin: Origin,
    /// The whole frame as received.
    pub frame: Vec<u8>,
}

/// Puts new effects behind those that wait.
///
/// A file's content holds all changes made so far, so that a save that still waits can take the
/// newest content and the new save falls away: what waits behind the earlier place waits for
/// content that holds its change. Saves that follow one another keep their order, because one is
/// merged only after those before it were.
pub fn append(waiting: &mut VecDeque<Effect>, new: Vec<Effect>) {
    let mut merges = true;
    for effect in new {
        match effect {
            Effect::Save { name, bytes } if merges => match waiting_save(waiting, name) {
                Some(earlier) => *earlier = bytes,
                None => {
                    merges = false;
                    waiting.push_back(Effect::Save { name, bytes });
                }
            },
            other => waiting.push_back(other),
        }
    }
}

/// Whether the answer to a request says nothing of topics and groups that could be taken back.
pub fn is_independent(code: i32) -> bool {
    matches!(
        code,
        request::HEART_BEAT
            | request::UNREGISTER_CLIENT
            | request::GET_CONSUMER_LIST_BY_GROUP
            | request::CHECK_CLIENT_CONFIG
            | request::LOCK_BATCH_MQ
            | request::UNLOCK_BATCH_MQ
            | request::GET_BROKER_RUNTIME_INFO
            | private::EXPLAIN
    )
}

/// Whether new effects may be done before those that wait for a save: nothing in them may build on
/// what waits. `named` are names of the request besides, the topic and the group it needs among
/// them.
pub fn may_pass(waiting: &VecDeque<Effect>, new: &[Effect], named: &[String]) -> bool {
    let concerned = |name: &str| waiting.iter().any(|effect| effect.concerns(name));
    let passes = |effect: &Effect| match effect {
        Effect::Save { .. } => false,
        Effect::TopicChanged(topic) => !concerned(&topic.config.topic_name),
        Effect::GroupChanged(group) => !concerned(&group.group_name),
        Effect::SubscriptionsChanged(members) => !concerned(&members.group),
        other => matches!(
            other,
            Effect::Reply { .. }
                | Effect::Push { .. }
                | Effect::SaveLater(_)
                | Effect::Sample(_)
                | Effect::NeedReports { .. }
                | Effect::Redispatch { .. }
                | Effect::Register { .. }
        ),
    };
    !named.iter().any(|name| concerned(name)) && new.iter().all(passes)
}

impl Effect {
    /// Whether this tells cores of the topic or group `name`, or of a group's topics for retries.
    fn concerns(&self, name: &str) -> bool {
        let told: &str = match self {
            Self::TopicChanged(topic) => &topic.config.topic_name,
            Self::TopicRemoved(topic) => topic,
            Self::GroupChanged(group) => &group.group_name,
            Self::GroupRemoved { group, .. } | Self::ForbiddenChanged { group, .. } => group,
            Self::SubscriptionsChanged(members) => &members.group,
            _ => return false,
        };
        let of_group = [RETRY_PREFIX, DLQ_PREFIX].map(|prefix| told.strip_prefix(prefix));
        told == name || of_group.contains(&Some(name))
    }
}

fn waiting_save<'a>(
    waiting: &'a mut VecDeque<Effect>,
    wanted: &'static str,
) -> Option<&'a mut Vec<u8>> {
    waiting.iter_mut().rev().find_map(|effect| match effect {
        Effect::Save { name, bytes } if *name == wanted => Some(bytes),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(name: &'static str, content: u8) -> Effect {
        let bytes = vec![content];
        Effect::Save { name, bytes }
    }

    fn register(topic: &str) -> Effect {
        let topics = vec![topic.to_owned()];
        Effect::Register { topics }
    }

    fn shown(waiting: &VecDeque<Effect>) -> Vec<String> {
        let shown = waiting.iter().map(|effect| match effect {
            Effect::Save { name, bytes } => format!("{name}{bytes:?}"),
            Effect::Register { topics } => topics.concat(),
            _ => String::new(),
        });
        shown.collect()
    }

    #[test]
    fn a_waiting_save_takes_the_newest_content_and_its_followers_keep_their_order() {
        let mut waiting = VecDeque::new();
        append(
            &mut waiting,
            vec![save("p", 1), save("t", 1), register("A")],
        );
        append(
            &mut waiting,
            vec![save("p", 2), save("t", 2), register("B")],
        );
        append(
            &mut waiting,
            vec![save("p", 3), save("t", 3), save("g", 3), register("C")],
        );
        assert_eq!(shown(&waiting), ["p[3]", "t[3]", "A", "B", "g[3]", "C"]);
    }

    #[test]
    fn a_save_never_overtakes_the_one_it_follows() {
        let mut waiting = VecDeque::new();
        // The places are being written already, only the topics wait.
        append(&mut waiting, vec![save("t", 1), register("A")]);
        append(
            &mut waiting,
            vec![save("p", 2), save("t", 2), register("B")],
        );
        assert_eq!(shown(&waiting), ["t[1]", "A", "p[2]", "t[2]", "B"]);
        append(
            &mut waiting,
            vec![save("p", 3), save("t", 3), register("C")],
        );
        assert_eq!(shown(&waiting), ["t[1]", "A", "p[3]", "t[3]", "B", "C"]);
    }

    fn topic(name: &str) -> Effect {
        let config = TopicConfig::new(name, 1, 6);
        let shards = vec![0];
        Effect::TopicChanged(Arc::new(PlacedTopic { config, shards }))
    }

    fn group(name: &str) -> Effect {
        Effect::GroupChanged(Arc::new(SubscriptionGroupConfig::new(name)))
    }

    #[test]
    fn only_what_has_nothing_to_do_with_what_waits_passes_it() {
        let removed = Effect::GroupRemoved {
            group: Arc::from("gone"),
            offsets: true,
        };
        let waiting = VecDeque::from([save("t", 1), topic("new"), topic("%RETRY%g"), removed]);
        let passes = |effects: &[Effect], named: &[&str]| {
            let named: Vec<String> = named.iter().map(|name| (*name).to_owned()).collect();
            may_pass(&waiting, effects, &named)
        };
        assert!(passes(&[Effect::SaveLater("g"), group("other")], &["T"]));
        assert!(!passes(&[save("g", 1)], &[]), "a save somebody waits for");
        assert!(!passes(&[group("gone")], &[]), "made again while it goes");
        assert!(!passes(&[], &["0", "new"]), "a topic nobody knows yet");
        assert!(!passes(&[], &["g"]), "a group whose topic nobody knows yet");
        assert!(!passes(&[Effect::CleanExpired], &[]));
    }
}
