//! Owns queue locks of orderly consumers.
//!
//! Invariant: a queue of a group has at most one owner at any time, and a lock that was not renewed
//! for [`LOCK_LIVE_MS`] belongs to nobody.

use std::collections::HashMap;

use wire::body::MessageQueue;

/// How long a lock lives without renewal, in milliseconds.
pub const LOCK_LIVE_MS: i64 = 60_000;
/// Most queue locks kept at a time.
pub const LOCKS_MAX: usize = 1_000_000;

#[derive(Debug)]
struct Lock {
    client_id: String,
    renewed_ms: i64,
}

impl Lock {
    fn is_expired(&self, now_ms: i64) -> bool {
        now_ms - self.renewed_ms > LOCK_LIVE_MS
    }
}

/// All locks, by group and queue.
#[derive(Debug, Default)]
pub struct Locks {
    groups: HashMap<String, HashMap<MessageQueue, Lock>>,
    held: usize,
    /// How often a lock was refused because [`LOCKS_MAX`] were held.
    pub bound_hits: u64,
}

impl Locks {
    /// Takes or renews locks; returns the queues that now belong to `client_id`.
    pub fn lock(
        &mut self,
        now_ms: i64,
        group: &str,
        client_id: &str,
        queues: Vec<MessageQueue>,
    ) -> Vec<MessageQueue> {
        let mut granted = Vec::with_capacity(queues.len());
        for queue in queues {
            if self.lock_one(now_ms, group, client_id, &queue) {
                granted.push(queue);
            }
        }
        granted
    }

    fn lock_one(
        &mut self,
        now_ms: i64,
        group: &str,
        client_id: &str,
        queue: &MessageQueue,
    ) -> bool {
        if let Some(lock) = self
            .groups
            .get_mut(group)
            .and_then(|locks| locks.get_mut(queue))
        {
            if lock.client_id != client_id && !lock.is_expired(now_ms) {
                return false;
            }
            if lock.client_id != client_id {
                lock.client_id = client_id.to_owned();
            }
            lock.renewed_ms = now_ms;
            return true;
        }
        if self.held >= LOCKS_MAX {
            self.bound_hits += 1;
            return false;
        }
        let lock = Lock {
            client_id: client_id.to_owned(),
            renewed_ms: now_ms,
        };
        self.groups
            .entry(group.to_owned())
            .or_default()
            .insert(queue.clone(), lock);
        self.held += 1;
        true
    }

    /// Gives locks back; those of other clients stay.
    pub fn unlock(&mut self, group: &str, client_id: &str, queues: &[MessageQueue]) {
        let Some(locks) = self.groups.get_mut(group) else {
            return;
        };
        for queue in queues {
            if locks
                .get(queue)
                .is_some_and(|lock| lock.client_id == client_id)
            {
                locks.remove(queue);
                self.held -= 1;
            }
        }
        if locks.is_empty() {
            self.groups.remove(group);
        }
    }

    /// Who has locked a queue, and when the lock was renewed.
    pub fn owner(&self, now_ms: i64, group: &str, queue: &MessageQueue) -> Option<(&str, i64)> {
        let lock = self.groups.get(group)?.get(queue)?;
        (!lock.is_expired(now_ms)).then_some((&*lock.client_id, lock.renewed_ms))
    }

    /// Forgets what is expired.
    pub fn expire(&mut self, now_ms: i64) {
        let mut held = 0;
        self.groups.retain(|_, locks| {
            locks.retain(|_, lock| !lock.is_expired(now_ms));
            held += locks.len();
            !locks.is_empty()
        });
        self.held = held;
    }

    /// Locks held now.
    pub fn held(&self) -> usize {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(queue_id: i32) -> MessageQueue {
        MessageQueue {
            topic: "T".into(),
            broker_name: "b".into(),
            queue_id,
        }
    }

    #[test]
    fn a_queue_has_one_owner_until_its_lock_expires() {
        let mut locks = Locks::default();
        assert_eq!(locks.lock(0, "g", "a", vec![queue(0), queue(1)]).len(), 2);
        assert_eq!(
            locks.lock(10, "g", "b", vec![queue(1), queue(2)]),
            vec![queue(2)]
        );
        assert_eq!(
            locks.lock(LOCK_LIVE_MS, "g", "a", vec![queue(1)]),
            vec![queue(1)],
            "renewed"
        );
        assert!(
            locks
                .lock(2 * LOCK_LIVE_MS, "g", "b", vec![queue(1)])
                .is_empty()
        );
        assert_eq!(
            locks.lock(2 * LOCK_LIVE_MS + 1, "g", "b", vec![queue(1)]),
            vec![queue(1)]
        );
        assert!(
            locks
                .lock(2 * LOCK_LIVE_MS + 2, "g", "a", vec![queue(1)])
                .is_empty()
        );
    }

    #[test]
    fn groups_do_not_share_locks() {
        let mut locks = Locks::default();
        locks.lock(0, "g", "a", vec![queue(0)]);
        assert_eq!(locks.lock(0, "h", "b", vec![queue(0)]).len(), 1);
    }

    #[test]
    fn only_the_owner_unlocks_and_expired_locks_are_forgotten() {
        let mut locks = Locks::default();
        locks.lock(0, "g", "a", vec![queue(0), queue(1)]);
        locks.unlock("g", "b", &[queue(0)]);
        assert_eq!(locks.held(), 2);
        locks.unlock("g", "a", &[queue(0)]);
        assert_eq!(locks.held(), 1);
        locks.expire(LOCK_LIVE_MS + 1);
        assert_eq!(locks.held(), 0);
        assert!(locks.groups.is_empty());
    }
}
