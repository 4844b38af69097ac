//! Owns requests that are on their way through the broker to a client and back.
//!
//! Invariant: every relay ends exactly once: by the client's answer, by its connection closing, or
//! by its deadline; and at most [`RELAYS_MAX`] are under way.

use std::collections::{BTreeMap, HashMap};

use wire::body::{ConsumerStatusBody, QueueTable};
use wire::frame::Serialization;

use super::answer::{Field, Refusal, codes, encode, to_json};
use super::effects::{ClientLink, Effect, Origin};

/// Most relayed requests under way.
pub const RELAYS_MAX: usize = 10_000;
/// How long a client may take to answer a relayed request, in milliseconds.
pub const RELAY_TIMEOUT_MS: i64 = 10_000;
/// How long clients may take to tell their offsets, in milliseconds.
pub const STATUS_TIMEOUT_MS: i64 = 5_000;
/// Opaques of the control task start here, so that they never meet those of other tasks that send
/// requests to the same client.
pub const OPAQUE_FIRST: i32 = 1 << 30;

/// Whom to answer, and how.
#[derive(Clone, Copy, Debug)]
pub struct Asker {
    /// Who asked.
    pub origin: Origin,
    /// Opaque of the request.
    pub opaque: i32,
    /// How its header was written.
    pub serialization: Serialization,
}

impl Asker {
    fn reply(&self, code: i32, remark: Option<&str>, body: &[u8]) -> Effect {
        self.reply_with(code, remark, &[], body)
    }

    fn reply_with(
        &self,
        code: i32,
        remark: Option<&str>,
        fields: &[(&'static str, Field)],
        body: &[u8],
    ) -> Effect {
        let frame = encode(self.serialization, self.opaque, code, remark, fields, body);
        Effect::Reply {
            to: self.origin.link,
            frame,
        }
    }
}

/// A message on its way to a client, and what its sender hears of success.
#[derive(Debug)]
pub struct Delivery {
    /// Who gets it.
    pub client_id: String,
    /// Header fields of the answer.
    pub fields: Vec<(&'static str, Field)>,
}

#[derive(Debug)]
enum Purpose {
    /// The client's answer is the answer.
    Forward { asker: Asker, about: String },
    /// The client's answer says whether it took the message.
    Deliver { asker: Asker, delivery: Delivery },
    /// The client's answer is one of several.
    Gather { gathering: u64, client_id: String },
}

#[derive(Debug)]
struct Relay {
    deadline_ms: i64,
    purpose: Purpose,
}

fn not_delivered(asker: &Asker, delivery: &Delivery, why: &str) -> Effect {
    let remark = format!("push reply message to {} fail: {why}", delivery.client_id);
    asker.reply(codes::SYSTEM_ERROR, Some(&remark), &[])
}

/// Offsets gathered from several clients (code 223).
#[derive(Debug)]
struct Gathering {
    asker: Asker,
    waiting: usize,
    answers: BTreeMap<String, QueueTable<i64>>,
}

/// All relays under way.
#[derive(Debug)]
pub struct Relays {
    relays: HashMap<(ClientLink, i32), Relay>,
    gatherings: HashMap<u64, Gathering>,
    next_gathering: u64,
    next_opaque: i32,
    /// How often a relay was refused because [`RELAYS_MAX`] were under way.
    pub bound_hits: u64,
}

impl Default for Relays {
    fn default() -> Self {
        Self {
            relays: HashMap::new(),
            gatherings: HashMap::new(),
            next_gathering: 0,
            next_opaque: OPAQUE_FIRST,
            bound_hits: 0,
        }
    }
}

impl Relays {
    /// An opaque for a request to a client.
    pub fn opaque(&mut self) -> i32 {
        let opaque = self.next_opaque;
        self.next_opaque = opaque.checked_add(1).unwrap_or(OPAQUE_FIRST);
        opaque
    }

    /// Relays under way.
    pub fn under_way(&self) -> usize {
        self.relays.len()
    }

    fn check_room(&mut self, more: usize) -> Result<(), Refusal> {
        if self.relays.len() + more <= RELAYS_MAX {
            return Ok(());
        }
        self.bound_hits += 1;
        Err(Refusal::new(
            codes::SYSTEM_BUSY,
            format!(
                "{} requests to clients are under way, at most {RELAYS_MAX}",
                self.relays.len()
            ),
        ))
    }

    /// Notes a request that is passed on to one client; its answer goes to the asker.
    pub fn forward(
        &mut self,
        now_ms: i64,
        to: ClientLink,
        asker: Asker,
        about: String,
    ) -> Result<i32, Refusal> {
        self.begin(now_ms, to, Purpose::Forward { asker, about })
    }

    /// Notes a message that is pushed to a client; its sender hears whether the client took it.
    pub fn deliver(
        &mut self,
        now_ms: i64,
        to: ClientLink,
        asker: Asker,
        delivery: Delivery,
    ) -> Result<i32, Refusal> {
        self.begin(now_ms, to, Purpose::Deliver { asker, delivery })
    }

    fn begin(&mut self, now_ms: i64, to: ClientLink, purpose: Purpose) -> Result<i32, Refusal> {
        self.check_room(1)?;
        let opaque = self.opaque();
        let deadline_ms = now_ms + RELAY_TIMEOUT_MS;
        let relay = Relay {
            deadline_ms,
            purpose,
        };
        self.relays.insert((to, opaque), relay);
        Ok(opaque)
    }

    /// Notes one question to each of several clients; returns the opaque for each.
    pub fn gather(
        &mut self,
        now_ms: i64,
        asker: Asker,
        clients: &[(ClientLink, String)],
    ) -> Result<Vec<i32>, Refusal> {
        self.check_room(clients.len())?;
        let gathering = self.next_gathering;
        self.next_gathering += 1;
        let waiting = clients.len();
        self.gatherings.insert(
            gathering,
            Gathering {
                asker,
                waiting,
                answers: BTreeMap::new(),
            },
        );
        let mut opaques = Vec::with_capacity(clients.len());
        for (link, client_id) in clients {
            let opaque = self.opaque();
            let purpose = Purpose::Gather {
                gathering,
                client_id: client_id.clone(),
            };
            let relay = Relay {
                deadline_ms: now_ms + STATUS_TIMEOUT_MS,
                purpose,
            };
            self.relays.insert((*link, opaque), relay);
            opaques.push(opaque);
        }
        Ok(opaques)
    }

    /// A client answered. Unknown answers are dropped.
    pub fn answered(
        &mut self,
        link: ClientLink,
        opaque: i32,
        code: i32,
        remark: Option<&str>,
        body: &[u8],
        effects: &mut Vec<Effect>,
    ) {
        let Some(relay) = self.relays.remove(&(link, opaque)) else {
            return;
        };
        match relay.purpose {
            Purpose::Forward { asker, .. } => effects.push(asker.reply(code, remark, body)),
            Purpose::Deliver { asker, delivery } if code == codes::SUCCESS => {
                effects.push(asker.reply_with(code, None, &delivery.fields, &[]));
            }
            Purpose::Deliver { asker, delivery } => {
                let why = format!("it answered {code} {}", remark.unwrap_or_default());
                effects.push(not_delivered(&asker, &delivery, &why));
            }
            Purpose::Gather {
                gathering,
                client_id,
            } => {
                let answer = Some(body).filter(|_| code == codes::SUCCESS);
                let answer = answer.and_then(|body| wire::body::from_json(body).ok());
                let table =
                    answer.and_then(|answer: ConsumerStatusBody| answer.message_queue_table);
                self.gathered(gathering, client_id, table, effects);
            }
        }
    }

    /// A connection closed: what it had to answer fails now.
    pub fn closed(&mut self, link: ClientLink, effects: &mut Vec<Effect>) {
        self.end(
            |key, _| key.0 == link,
            codes::SYSTEM_ERROR,
            "closed its connection",
            effects,
        );
    }

    /// Ends what is overdue.
    pub fn expire(&mut self, now_ms: i64, effects: &mut Vec<Effect>) {
        let is_due = |_: &(ClientLink, i32), relay: &Relay| now_ms >= relay.deadline_ms;
        self.end(
            is_due,
            codes::CONSUME_MSG_TIMEOUT,
            "did not answer in time",
            effects,
        );
    }

    fn end(
        &mut self,
        is_over: impl Fn(&(ClientLink, i32), &Relay) -> bool,
        code: i32,
        what: &str,
        effects: &mut Vec<Effect>,
    ) {
        for (_, relay) in self
            .relays
            .extract_if(|key, relay| is_over(key, relay))
            .collect::<Vec<_>>()
        {
            match relay.purpose {
                Purpose::Forward { asker, about } => {
                    effects.push(asker.reply(code, Some(&format!("{about} {what}")), &[]));
                }
                Purpose::Deliver { asker, delivery } => {
                    effects.push(not_delivered(&asker, &delivery, &format!("it {what}")));
                }
                Purpose::Gather {
                    gathering,
                    client_id,
                } => {
                    self.gathered(gathering, client_id, None, effects);
                }
            }
        }
    }

    fn gathered(
        &mut self,
        gathering: u64,
        client_id: String,
        table: Option<QueueTable<i64>>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(open) = self.gatherings.get_mut(&gathering) else {
            return;
        };
        open.waiting = open.waiting.saturating_sub(1);
        if let Some(table) = table {
            open.answers.insert(client_id, table);
        }
        if open.waiting > 0 {
            return;
        }
        if let Some(done) = self.gatherings.remove(&gathering) {
            let body = ConsumerStatusBody {
                consumer_table: Some(done.answers),
                message_queue_table: None,
            };
            let reply = match to_json(&body) {
                Ok(body) => done.asker.reply(codes::SUCCESS, None, &body),
                Err(refusal) => done.asker.reply(refusal.code, Some(&refusal.remark), &[]),
            };
            effects.push(reply);
        }
    }
}
