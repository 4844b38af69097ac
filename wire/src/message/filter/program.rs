//! Owns a compiled expression and its evaluation against the properties of one message.
//!
//! Invariant: nodes name only nodes before them, at most [`DEPTH_MAX`] deep, so evaluation always
//! ends and never overflows the stack; it allocates nothing.

use std::cmp::Ordering;

use memchr::memmem;

use crate::message::properties;

/// Nesting of an expression at most.
pub const DEPTH_MAX: u32 = 100;

/// Place of a node.
pub(super) type Id = u32;

/// Which end of a comparison is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

/// Where a text is looked for in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Find {
    Anywhere,
    Start,
    End,
}

/// One step of a program.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    Null,
    Bool(bool),
    Text(Box<str>),
    Int(i32),
    Long(i64),
    Double(f64),
    Property(Box<str>),
    Negate(Id),
    Not(Id),
    /// A property where TRUE or FALSE is wanted. Properties are texts, so it never gives TRUE.
    Cast(Id),
    And(Vec<Id>),
    Or(Vec<Id>),
    Equal(Id, Id),
    IsNull(Id),
    Compare(Order, Id, Id),
    Find {
        how: Find,
        negated: bool,
        inside: Id,
        text: Box<str>,
    },
    In {
        name: Box<str>,
        negated: bool,
        /// Sorted.
        values: Box<[Box<str>]>,
    },
}

/// Steps, the last of which is the whole expression.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Program {
    pub nodes: Vec<Node>,
}

/// A value while a message is looked at.
#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    Null,
    Bool(bool),
    Text(&'a [u8]),
    Int(i32),
    Long(i64),
    Double(f64),
}

/// The expression has no answer for this message, which then does not match.
#[derive(Debug)]
struct NoAnswer;

/// TRUE, FALSE or, for NULL, nothing.
type Truth = Result<Option<bool>, NoAnswer>;

impl Program {
    /// Whether a message with these properties is wanted.
    pub fn matches(&self, properties: &[u8]) -> bool {
        let whole = self.nodes.len().saturating_sub(1) as Id;
        matches!(self.truth(whole, properties), Ok(Some(true)))
    }

    fn node(&self, id: Id) -> Result<&Node, NoAnswer> {
        self.nodes.get(id as usize).ok_or(NoAnswer)
    }

    fn truth(&self, id: Id, properties: &[u8]) -> Truth {
        match self.node(id)? {
            Node::Null => Ok(None),
            Node::Bool(value) => Ok(Some(*value)),
            Node::Not(of) => Ok(self.truth(*of, properties)?.map(|value| !value)),
            Node::Cast(of) => Ok(match self.value(*of, properties)? {
                Value::Null => None,
                Value::Bool(value) => Some(value),
                _ => Some(false),
            }),
            Node::And(all) => self.first_of(all, false, properties),
            Node::Or(any) => self.first_of(any, true, properties),
            Node::Equal(left, right) => equal(
                self.value(*left, properties)?,
                self.value(*right, properties)?,
            ),
            Node::IsNull(of) => Ok(Some(matches!(self.value(*of, properties)?, Value::Null))),
            Node::Compare(order, left, right) => {
                let (left, right) = (self.value(*left, properties)?, *right);
                if matches!(left, Value::Null) {
                    return Ok(None);
                }
                compare(*order, left, self.value(right, properties)?)
            }
            Node::Find {
                how,
                negated,
                inside,
                text,
            } => {
                let (inside, text) = (self.value(*inside, properties)?, text.as_bytes());
                let Value::Text(inside) = inside else {
                    return Ok(Some(false));
                };
                Ok(Some(
                    !text.is_empty() && find(*how, inside, text) != *negated,
                ))
            }
            Node::In {
                name,
                negated,
                values,
            } => Ok(properties::get(properties, name).map(|value| {
                let found = values.binary_search_by(|known| known.as_bytes().cmp(value));
                found.is_ok() != *negated
            })),
            Node::Property(_)
            | Node::Text(_)
            | Node::Int(_)
            | Node::Long(_)
            | Node::Double(_)
            | Node::Negate(_) => Err(NoAnswer),
        }
    }

    /// `decides` as soon as one of them is it, NULL if one of them is NULL, else the opposite.
    fn first_of(&self, ids: &[Id], decides: bool, properties: &[u8]) -> Truth {
        let mut answer = Some(!decides);
        for id in ids {
            match self.truth(*id, properties)? {
                Some(value) if value == decides => return Ok(Some(decides)),
                Some(_) => {}
                None => answer = None,
            }
        }
        Ok(answer)
    }

    fn value<'a>(&'a self, id: Id, properties: &'a [u8]) -> Result<Value<'a>, NoAnswer> {
        Ok(match self.node(id)? {
            Node::Text(text) => Value::Text(text.as_bytes()),
            Node::Int(number) => Value::Int(*number),
            Node::Long(number) => Value::Long(*number),
            Node::Double(number) => Value::Double(*number),
            Node::Property(name) => {
                properties::get(properties, name).map_or(Value::Null, Value::Text)
            }
            Node::Negate(of) => match self.value(*of, properties)? {
                Value::Int(number) => Value::Int(number.wrapping_neg()),
                Value::Long(number) => Value::Long(number.wrapping_neg()),
                Value::Double(number) => Value::Double(-number),
                Value::Null | Value::Bool(_) | Value::Text(_) => Value::Null,
            },
            _ => match self.truth(id, properties)? {
                Some(value) => Value::Bool(value),
                None => Value::Null,
            },
        })
    }
}

fn find(how: Find, inside: &[u8], text: &[u8]) -> bool {
    match how {
        Find::Anywhere => memmem::find(inside, text).is_some(),
        Find::Start => inside.starts_with(text),
        Find::End => inside.ends_with(text),
    }
}

/// Equality as RocketMQ has it: NULL on the left gives NULL, on the right alone FALSE.
fn equal(left: Value<'_>, right: Value<'_>) -> Truth {
    match (left, right) {
        (Value::Null, Value::Null) => Ok(Some(true)),
        (Value::Null, _) => Ok(None),
        (_, Value::Null) => Ok(Some(false)),
        (Value::Text(left), Value::Text(right)) => Ok(Some(left == right)),
        (left, right) => Ok(Some(ordering(left, right)? == Some(Ordering::Equal))),
    }
}

fn compare(order: Order, left: Value<'_>, right: Value<'_>) -> Truth {
    let ordering = match (left, right) {
        (_, Value::Null) => return Ok(None),
        // Two texts are compared as numbers or not at all.
        (Value::Text(left), Value::Text(right)) => Some(double(left)?.total_cmp(&double(right)?)),
        (left, right) => ordering(left, right)?,
    };
    let ordering = ordering.unwrap_or(Ordering::Less);
    Ok(Some(match order {
        Order::Less => ordering.is_lt(),
        Order::LessEqual => ordering.is_le(),
        Order::Greater => ordering.is_gt(),
        Order::GreaterEqual => ordering.is_ge(),
    }))
}

/// Compares what is no pair of texts; a text takes the type of the other side. `None`: the two have
/// nothing in common, which counts as less.
fn ordering(left: Value<'_>, right: Value<'_>) -> Result<Option<Ordering>, NoAnswer> {
    Ok(match (left, right) {
        (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(&right)),
        (Value::Text(left), Value::Bool(right)) => {
            Some(left.eq_ignore_ascii_case(b"true").cmp(&right))
        }
        // RocketMQ has no answer for a text on the right of TRUE or FALSE either.
        (Value::Bool(_), Value::Text(_)) => return Err(NoAnswer),
        (Value::Int(left), Value::Int(right)) => Some(left.cmp(&right)),
        (Value::Text(left), Value::Int(right)) => Some(whole::<i32>(left)?.cmp(&right)),
        (Value::Int(left), Value::Text(right)) => Some(left.cmp(&whole(right)?)),
        (Value::Text(left), Value::Long(right)) => Some(whole::<i64>(left)?.cmp(&right)),
        (Value::Long(left), Value::Text(right)) => Some(left.cmp(&whole(right)?)),
        (Value::Text(left), Value::Double(right)) => Some(double(left)?.total_cmp(&right)),
        (Value::Double(left), Value::Text(right)) => Some(left.total_cmp(&double(right)?)),
        (left, right) => match (as_long(left), as_long(right)) {
            (Some(left), Some(right)) => Some(left.cmp(&right)),
            _ => match (as_double(left), as_double(right)) {
                (Some(left), Some(right)) => Some(left.total_cmp(&right)),
                _ => None,
            },
        },
    })
}

fn as_long(value: Value<'_>) -> Option<i64> {
    match value {
        Value::Int(number) => Some(i64::from(number)),
        Value::Long(number) => Some(number),
        _ => None,
    }
}

fn as_double(value: Value<'_>) -> Option<f64> {
    match value {
        Value::Double(number) => Some(number),
        other => as_long(other).map(|number| number as f64),
    }
}

/// A text as a whole number, as Java reads one: no blanks, no point.
fn whole<T: std::str::FromStr>(text: &[u8]) -> Result<T, NoAnswer> {
    let text = std::str::from_utf8(text).map_err(|_| NoAnswer)?;
    text.parse().map_err(|_| NoAnswer)
}

/// A text as a double, as Java reads one: blanks around it and a closing d or f are passed over.
fn double(text: &[u8]) -> Result<f64, NoAnswer> {
    let text = std::str::from_utf8(text).map_err(|_| NoAnswer)?;
    let text = text.trim_matches(|c| c <= ' ');
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if matches!(unsigned, "NaN" | "Infinity") {
        return text.parse().map_err(|_| NoAnswer);
    }
    let digits = text.strip_suffix(['d', 'D', 'f', 'F']).unwrap_or(text);
    let is_number = digits.ends_with(|c: char| c.is_ascii_digit() || c == '.');
    if !is_number || digits.contains(|c: char| c.is_ascii_alphabetic() && !matches!(c, 'e' | 'E')) {
        return Err(NoAnswer);
    }
    digits.parse().map_err(|_| NoAnswer)
}
