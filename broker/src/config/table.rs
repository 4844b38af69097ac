//! The machinery behind the tables of settings: one line for each key yields field, default, parser
//! and text.
//!
//! Invariant: whatever a table declares can be set by text, read back as text and looked up by
//! name, so that file, environment, command line and administrators all go through the same checks.

use super::value::Bytes;

/// When a changed value acts, and whether an administrator may change it over the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// At once.
    Live,
    /// At the next start.
    Start,
    /// Fixed: requests to change it are refused.
    Fixed,
}

/// What is known of one key.
#[derive(Debug, Clone, Copy)]
pub struct KeyInfo {
    /// Name in files.
    pub name: &'static str,
    /// Other spellings that mean the same.
    pub aliases: &'static [&'static str],
    /// What it sets, in a sentence.
    pub about: &'static str,
    /// What a value looks like.
    pub expected: &'static str,
    /// When a change acts.
    pub effect: Effect,
}

/// Why a value was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// No such key.
    UnknownKey,
    /// The value is not one of this type or range; this is expected.
    Expected(String),
}

/// A table of settings.
pub trait Table: Default + Clone {
    /// Every key.
    const KEYS: &'static [KeyInfo];
    /// Keys of the Java program that mean nothing here and are accepted in silence.
    const IGNORED: &'static [&'static str];

    /// Sets a key from text.
    ///
    /// # Errors
    /// When the key is unknown or the value is refused; nothing is changed then.
    fn set_text(&mut self, key: &str, text: &str) -> Result<(), Fault>;

    /// The value of a key as a file would have it.
    fn text_of(&self, key: &str) -> Option<String>;

    /// What is known of `key`, whichever spelling it has.
    fn info(key: &str) -> Option<&'static KeyInfo> {
        Self::KEYS
            .iter()
            .find(|info| info.name == key || info.aliases.contains(&key))
    }
}

/// A number must lie in a range.
pub(super) fn within(value: u64, first: u64, last: u64) -> Result<(), String> {
    if (first..=last).contains(&value) {
        return Ok(());
    }
    Err(format!("a whole number from {first} to {last}"))
}

/// A size must lie in a range and be a multiple of a unit.
pub(super) fn sized(value: u64, first: u64, last: u64, unit: u64) -> Result<(), String> {
    if (first..=last).contains(&value) && value.is_multiple_of(unit) {
        return Ok(());
    }
    let (unit, first, last) = (Bytes(unit), Bytes(first), Bytes(last));
    Err(format!("a multiple of {unit} from {first} to {last}"))
}

/// Declares a struct of settings and its [`Table`]. Each line: about, key and other spellings,
/// field, type, default, effect, and where the type alone does not say it, a check.
macro_rules! settings_table {
    (
        $(#[$outer:meta])*
        pub struct $Name:ident ignoring $ignored:path;
        $(
            #[doc = $about:literal]
            $key:literal $(| $alias:literal)* =>
                $field:ident: $Type:ty = $default:expr, $effect:ident $(, $check:expr)?;
        )*
    ) => {
        $(#[$outer])*
        #[derive(Debug, Clone)]
        pub struct $Name { $( #[doc = $about] pub $field: $Type, )* }

        impl Default for $Name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }

        impl $crate::config::table::Table for $Name {
            const KEYS: &'static [$crate::config::table::KeyInfo] = &[ $(
                $crate::config::table::KeyInfo {
                    name: $key,
                    aliases: &[$($alias),*],
                    about: $about,
                    expected: <$Type as $crate::config::value::Value>::EXPECTED,
                    effect: $crate::config::table::Effect::$effect,
                },
            )* ];
            const IGNORED: &'static [&'static str] = $ignored;

            fn set_text(
                &mut self,
                key: &str,
                text: &str,
            ) -> Result<(), $crate::config::table::Fault> {
                use $crate::config::table::Fault;
                use $crate::config::value::Value;
                match key {
                    $( $key $(| $alias)* => {
                        let expected = || Fault::Expected(<$Type as Value>::EXPECTED.to_owned());
                        let value = <$Type as Value>::parse(text).ok_or_else(expected)?;
                        $( let check: fn(&$Type) -> Result<(), String> = $check;
                           check(&value).map_err(Fault::Expected)?; )?
                        self.$field = value;
                        Ok(())
                    } )*
                    _ => Err(Fault::UnknownKey),
                }
            }

            fn text_of(&self, key: &str) -> Option<String> {
                use $crate::config::value::Value;
                match key {
                    $( $key $(| $alias)* => Some(Value::text(&self.$field)), )*
                    _ => None,
                }
            }
        }
    };
}
pub(super) use settings_table;
