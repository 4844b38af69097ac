//! Owns forgiving readers of single values: numbers as strings, null for a default.
//!
//! Invariant: a value that cannot be meant is an error; null and absent mean the default.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};

/// Reads null as the default of the type.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Reads a number, also from a string; null is 0.
pub(super) fn number<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64> + Default,
{
    deserializer.deserialize_any(NumberVisitor(PhantomData))
}

/// Reads a list of numbers, each of which may be a string (Go quotes its tag hashes); null is none.
pub(super) fn numbers<'de, D>(deserializer: D) -> Result<Vec<i64>, D::Error>
where
    D: Deserializer<'de>,
{
    #[derive(serde::Deserialize)]
    struct One(#[serde(deserialize_with = "number")] i64);
    let list = Option::<Vec<One>>::deserialize(deserializer)?;
    Ok(list
        .unwrap_or_default()
        .into_iter()
        .map(|One(value)| value)
        .collect())
}

struct NumberVisitor<T>(PhantomData<T>);

impl<T: TryFrom<i64> + Default> Visitor<'_> for NumberVisitor<T> {
    type Value = T;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an integer, or a string that holds one")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        T::try_from(value).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        let narrow = i64::try_from(value)
            .ok()
            .and_then(|value| T::try_from(value).ok());
        narrow.ok_or_else(|| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<T, E> {
        if value.is_empty() {
            return Ok(T::default());
        }
        let parsed = value
            .parse::<i64>()
            .ok()
            .and_then(|value| T::try_from(value).ok());
        parsed.ok_or_else(|| E::invalid_value(Unexpected::Str(value), &self))
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        Ok(T::default())
    }
}

/// Reads a boolean, also from a string or from 0 and 1; null is false.
pub(super) fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    deserializer.deserialize_any(FlagVisitor)
}

struct FlagVisitor;

impl Visitor<'_> for FlagVisitor {
    type Value = bool;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a boolean")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<bool, E> {
        Ok(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<bool, E> {
        match value {
            0 | 1 => Ok(value == 1),
            _ => Err(E::invalid_value(Unexpected::Unsigned(value), &self)),
        }
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<bool, E> {
        match value {
            "true" | "1" => Ok(true),
            "false" | "0" | "" => Ok(false),
            _ => Err(E::invalid_value(Unexpected::Str(value), &self)),
        }
    }

    fn visit_unit<E: Error>(self) -> Result<bool, E> {
        Ok(false)
    }
}

/// Reads text, also from a number; null is empty.
pub(super) fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    match serde_json::Value::deserialize(deserializer)? {
        serde_json::Value::Null => Ok(String::new()),
        serde_json::Value::String(text) => Ok(text),
        serde_json::Value::Number(number) => Ok(number.to_string()),
        _ => Err(D::Error::custom("expected a string")),
    }
}

/// Defines an enum that is written by name and read by name or by position, as clients in C++
/// send it. Null is the default.
macro_rules! java_enum {
    (
        $(#[$about:meta])*
        $name:ident, default $default:ident { $($variant:ident = $text:literal,)* }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize)]
        pub enum $name {
            $(
                #[doc = concat!("`", $text, "`.")]
                #[serde(rename = $text)]
                $variant,
            )*
        }

        impl $name {
            /// All values, in the order of their positions.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name as it travels.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// The value of a name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.name() == name)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::$default
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = $crate::body::scalar::text(deserializer)?;
                if text.is_empty() {
                    return Ok(Self::default());
                }
                let by_position = || Self::ALL.get(text.parse::<usize>().ok()?).copied();
                Self::from_name(&text).or_else(by_position).ok_or_else(|| {
                    let known: Vec<_> = Self::ALL.iter().map(|value| value.name()).collect();
                    let expected = known.join(", ");
                    serde::de::Error::custom(format!("{text:?} is none of {expected}"))
                })
            }
        }
    };
}

pub(super) use java_enum;
