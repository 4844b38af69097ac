//! Answers to request messages (codes 324 and 325): pushed to whoever asked, and stored.
//!
//! Invariant: the answer of the sender's request is the control task's alone, which knows whether
//! the requester took the message; storing it is for the record and never answers.

use wire::codes::request;
use wire::header::Header;

use super::messages::ReplyTo;
use super::state::State;
use crate::control::effects::Origin;

impl State {
    /// Handles a reply message; `queue_id` is set when it comes here only to be stored.
    pub fn on_send_reply(
        &mut self,
        origin: &Origin,
        reply: &ReplyTo,
        header: &Header<'_>,
        whole: &[u8],
        body: &[u8],
        queue_id: Option<i32>,
    ) {
        if queue_id.is_none() {
            let has_long_names = header.code == request::SEND_REPLY_MESSAGE;
            let topic = header.ext.str(if has_long_names { "topic" } else { "b" });
            let topic = topic.unwrap_or_default();
            if !self.directory.topics.contains_key(&*topic) {
                return self.to_creation(origin, whole);
            }
            self.to_control(origin, whole);
            if !self.hot.store_replies {
                return;
            }
        }
        let silent = ReplyTo {
            oneway: true,
            ..*reply
        };
        self.on_send(origin, &silent, header, whole, body, queue_id);
    }
}
