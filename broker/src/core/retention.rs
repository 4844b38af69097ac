//! When old segments go: by age at the configured hours, by the use of the disk, by order.
//!
//! Invariant: the newest segment of a shard is never dropped.

use shard::maintain::RetentionOrder;
use shard::runtime::Driver;

use super::messages::MeshMessage;
use super::state::State;

/// Segments dropped per round.
const SEGMENTS_PER_ROUND_MAX: usize = 10;
/// How often retention looks, in milliseconds.
const ROUND_MS: i64 = 10_000;

/// What retention is to do on this core.
#[derive(Clone, Copy, Debug, Default)]
pub struct RetentionState {
    last_round_ms: i64,
    round_due: bool,
}

impl State {
    /// Called once a second on the first core: tells every core to look when it is time.
    pub fn retention_turn(&mut self) {
        if self.now.wall_ms < self.retention.last_round_ms + ROUND_MS {
            return;
        }
        self.retention.last_round_ms = self.now.wall_ms;
        let hour = local_hour(self.now.wall_ms);
        let due = self.config.delete_when.0.contains(&hour);
        let used = self
            .shards
            .iter()
            .map(|local| local.shard.disk_used_percent())
            .max();
        let full = used.unwrap_or(0) >= self.config.disk_used_max_percent;
        if due || full {
            for core in 0..self.mesh.cores() {
                self.send_to(core, MeshMessage::CleanExpired);
            }
        }
    }

    /// Drops expired segments in this turn.
    pub fn clean_expired_now(&mut self) {
        self.retention.round_due = true;
    }

    /// Carries out a retention round that is due.
    pub fn retain_due<D: Driver>(&mut self, driver: &mut D) {
        if !std::mem::take(&mut self.retention.round_due) {
            return;
        }
        let kept_ms = i64::try_from(self.config.file_reserved_h).unwrap_or(72) * 3_600_000;
        let forcibly = self.config.clean_forcibly;
        let limit = self.config.disk_clean_forcibly_percent;
        for local in &mut self.shards {
            let order = RetentionOrder {
                expired_before_ms: self.now.wall_ms - kept_ms,
                force_oldest: forcibly && local.shard.disk_used_percent() >= limit,
                segments_max: SEGMENTS_PER_ROUND_MAX,
            };
            local.shard.retain(driver, order);
        }
    }
}

/// Hour of the day where the broker runs.
fn local_hour(wall_ms: i64) -> u8 {
    let offset_s = shard::runtime::sys::utc_offset_s(wall_ms / 1000);
    ((wall_ms / 1000 + offset_s).rem_euclid(86_400) / 3600) as u8
}
