//! Owns the reading of a good answer: where the broker says the messages are.
//!
//! Invariant: an answer that names no place for every message of its request ends the audit as
//! incomplete, since what nobody can look for may be lost.

use wire::header::Header;

use crate::audit::Audit;
use crate::slots::InFlight;

/// Tells the audit what an answer says about where its messages are.
pub fn note(audit: &mut Audit, header: &Header<'_>, message: &InFlight) {
    let offset = header.ext.i64("queueOffset").ok().flatten();
    let ids = header.ext.get("msgId");
    let (Some(offset), Some(ids)) = (offset, ids) else {
        return audit.broke_off("an answer names no offset");
    };
    let ids = ids.to_cow();
    let mut told = 0;
    for (number, id) in ids.split(',').enumerate() {
        let Some(address) = physical_offset(id) else {
            return audit.broke_off("an answer has a message id that cannot be read");
        };
        let sequence = message.sequence + number as u64;
        let offset = offset + number as i64;
        audit.acked(message.queue, offset, address, sequence, message.behind);
        told += 1;
    }
    if told != message.count {
        audit.broke_off("an answer of a batch does not name as many messages as were sent");
    }
}

/// The end of a message id is the place in the log.
fn physical_offset(id: &str) -> Option<i64> {
    let digits = id.get(id.len().checked_sub(16)?..)?;
    i64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_in_the_log_is_read_from_both_forms_of_ids() {
        assert_eq!(
            physical_offset("7F00000100002A9F00000000000003E8"),
            Some(1_000)
        );
        let six = "00000000000000000000000000000001000000000000002A";
        assert_eq!(physical_offset(six), Some(42));
        assert_eq!(physical_offset("3E8"), None);
        assert_eq!(physical_offset("7F00000100002A9F00000000000003Ex"), None);
    }
}
