//! Owns the attributes topics can have and the text that changes them (`+key=value`, `-key`).
//!
//! Invariant: a table of attributes never holds an unknown key or a value outside the key's range.

use std::collections::{BTreeMap, BTreeSet};

use super::answer::Refusal;

/// Attribute that says what kind of messages a topic takes.
pub const MESSAGE_TYPE: &str = "message.type";
/// Attribute that says what goes when a log is cleaned up.
const CLEANUP_POLICY: &str = "cleanup.policy";
/// Its value that promises the last message of every key for ever, which is not kept yet.
const COMPACTION: &str = "COMPACTION";
/// Most changes in one request.
pub const CHANGES_MAX: usize = 64;

enum Values {
    OneOf(&'static [&'static str]),
    NumberFrom(i64),
}

struct Attribute {
    key: &'static str,
    values: Values,
    is_changeable: bool,
}

const KNOWN: [Attribute; 4] = [
    Attribute {
        key: "queue.type",
        values: Values::OneOf(&["SimpleCQ", "BatchCQ"]),
        is_changeable: false,
    },
    Attribute {
        key: CLEANUP_POLICY,
        values: Values::OneOf(&["DELETE", COMPACTION]),
        is_changeable: false,
    },
    Attribute {
        key: MESSAGE_TYPE,
        values: Values::OneOf(&[
            "UNSPECIFIED",
            "NORMAL",
            "FIFO",
            "DELAY",
            "TRANSACTION",
            "MIXED",
        ]),
        is_changeable: true,
    },
    Attribute {
        key: "reserve.time",
        values: Values::NumberFrom(-1),
        is_changeable: true,
    },
];

/// Attributes as a topic has them, or changes as a request brings them.
pub type Attributes = BTreeMap<String, String>;

/// Reads the header form `+key=value,-key`.
pub fn parse(text: &str) -> Result<Attributes, Refusal> {
    let mut changes = Attributes::new();
    for part in text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let (key, value) = (key.trim(), value.trim());
        if key.starts_with('+') && value.is_empty() {
            return Err(Refusal::parameter(format!(
                "attribute change '{part}' has no value: write {key}=VALUE"
            )));
        }
        if changes.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(Refusal::parameter(format!(
                "attribute change {key} occurs twice"
            )));
        }
    }
    Ok(changes)
}

/// Applies changes to the attributes of a topic that is new (`current` is `None`) or exists.
pub fn alter(current: Option<&Attributes>, changes: &Attributes) -> Result<Attributes, Refusal> {
    if changes.len() > CHANGES_MAX {
        return Err(Refusal::parameter(format!(
            "{} attribute changes in one request, at most {CHANGES_MAX}",
            changes.len()
        )));
    }
    let mut altered = current.cloned().unwrap_or_default();
    let mut seen = BTreeSet::new();
    for (signed_key, value) in changes {
        let key = signed_key.get(1..).unwrap_or_default();
        if !seen.insert(key) {
            return Err(Refusal::parameter(format!(
                "attribute {key} is changed twice"
            )));
        }
        match signed_key.as_bytes().first() {
            Some(b'+') => set(current, &mut altered, key, value)?,
            Some(b'-') => unset(current, &mut altered, key)?,
            _ => {
                return Err(Refusal::parameter(format!(
                    "attribute change '{signed_key}' must begin with + (set) or - (remove)"
                )));
            }
        }
    }
    Ok(altered)
}

fn known(key: &str) -> Result<&'static Attribute, Refusal> {
    KNOWN
        .iter()
        .find(|attribute| attribute.key == key)
        .ok_or_else(|| {
            let keys: Vec<&str> = KNOWN.iter().map(|attribute| attribute.key).collect();
            Refusal::parameter(format!(
                "attribute '{key}' is unknown; known are {}",
                keys.join(", ")
            ))
        })
}

fn set(
    current: Option<&Attributes>,
    altered: &mut Attributes,
    key: &str,
    value: &str,
) -> Result<(), Refusal> {
    let attribute = known(key)?;
    let is_legal = match attribute.values {
        Values::OneOf(values) => values.contains(&value),
        Values::NumberFrom(least) => value.parse::<i64>().is_ok_and(|number| number >= least),
    };
    if !is_legal {
        let expected = match attribute.values {
            Values::OneOf(values) => format!("one of {}", values.join(", ")),
            Values::NumberFrom(least) => format!("a number from {least}"),
        };
        return Err(Refusal::parameter(format!(
            "attribute {key} cannot be '{value}': {expected}"
        )));
    }
    let has = current.and_then(|current| current.get(key));
    let has_it = has.map(String::as_str) == Some(value);
    if (key, value) == (CLEANUP_POLICY, COMPACTION) && !has_it {
        return Err(Refusal::parameter(format!(
            "attribute {key} cannot be '{value}' yet: logs are not compacted, the last message of \
             a key would go by age like any other. Create the topic without it, or with DELETE"
        )));
    }
    let is_fixed = current.is_some() && !attribute.is_changeable;
    if is_fixed && !has_it {
        return Err(unchangeable(key));
    }
    altered.insert(key.to_owned(), value.to_owned());
    Ok(())
}

fn unset(current: Option<&Attributes>, altered: &mut Attributes, key: &str) -> Result<(), Refusal> {
    let attribute = known(key)?;
    if current.is_none_or(|current| !current.contains_key(key)) {
        return Err(Refusal::parameter(format!(
            "attribute {key} is not set, nothing to remove"
        )));
    }
    if !attribute.is_changeable {
        return Err(unchangeable(key));
    }
    altered.remove(key);
    Ok(())
}

fn unchangeable(key: &str) -> Refusal {
    Refusal::parameter(format!(
        "attribute {key} is fixed when the topic is created"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alter_text(current: Option<&Attributes>, text: &str) -> Result<Attributes, Refusal> {
        alter(current, &parse(text)?)
    }

    #[test]
    fn attributes_are_set_changed_and_removed() {
        let made = alter_text(None, "+message.type=FIFO,+queue.type=SimpleCQ").unwrap();
        assert_eq!(made["message.type"], "FIFO");
        let changed = alter_text(Some(&made), "+message.type=NORMAL").unwrap();
        assert_eq!(changed["message.type"], "NORMAL");
        assert_eq!(changed["queue.type"], "SimpleCQ");
        let removed = alter_text(Some(&changed), "-message.type").unwrap();
        assert!(!removed.contains_key("message.type"));
        assert_eq!(
            alter_text(Some(&made), "").unwrap(),
            made,
            "no change keeps all"
        );
    }

    #[test]
    fn compaction_is_refused_while_nothing_is_compacted_but_known_where_it_is() {
        let refusal = alter_text(None, "+cleanup.policy=COMPACTION").unwrap_err();
        assert_eq!(refusal.code, 29);
        assert!(refusal.remark.contains("not compacted"), "{refusal:?}");
        alter_text(None, "+cleanup.policy=DELETE").unwrap();
        // A table that came from elsewhere may have it: other changes of such a topic go on.
        let has = Attributes::from([("cleanup.policy".to_owned(), "COMPACTION".to_owned())]);
        alter_text(Some(&has), "+cleanup.policy=COMPACTION,+message.type=FIFO").unwrap();
    }

    #[test]
    fn unknown_illegal_and_fixed_changes_are_refused_with_the_key() {
        let made = alter_text(None, "+queue.type=SimpleCQ").unwrap();
        for text in [
            "+no.such.attribute=x",
            "+message.type=SOME",
            "+queue.type=BatchCQ",
            "-queue.type",
            "-message.type",
            "message.type=FIFO",
            "+message.type",
            "+reserve.time=-2",
        ] {
            let refusal = alter_text(Some(&made), text).unwrap_err();
            assert_eq!(refusal.code, 29, "{text}");
            let key = text
                .trim_start_matches(['+', '-'])
                .split('=')
                .next()
                .unwrap();
            assert!(refusal.remark.contains(key), "{text}: {}", refusal.remark);
        }
    }
}
