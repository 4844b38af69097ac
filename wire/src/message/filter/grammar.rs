//! Owns the grammar: from tokens to a program, with RocketMQ's rules of what may stand where.
//!
//! Invariant: a program is handed out only for a text that was read to its end; nesting beyond
//! [`DEPTH_MAX`] is refused before it is followed.

use winnow::Parser;
use winnow::combinator::{delimited, opt, preceded, separated};
use winnow::error::{ErrMode, ParserError};
use winnow::stream::{Stateful, TokenSlice};
use winnow::token::any;

use super::program::{DEPTH_MAX, Find, Id, Node, Order, Program};
use super::tokens::{Keyword, Kind, Parsed, Token, Trouble, wrong};

/// What is made while tokens are read.
#[derive(Clone, Debug, Default)]
struct Builder {
    nodes: Vec<Node>,
    depth: u32,
}

type Input<'t, 's> = Stateful<TokenSlice<'t, Token<'s>>, Builder>;

/// What an operand is, as far as the rules ask.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sort {
    /// A number written down.
    Number,
    /// A text written down.
    Text,
    /// TRUE or FALSE written down.
    Bool,
    /// NULL written down.
    Null,
    /// A comparison, or several.
    Truth,
    /// The name of a property.
    Property,
    /// A sign before something.
    Signed,
}

/// A part of the expression that is complete.
#[derive(Clone, Copy, Debug)]
struct Operand {
    id: Id,
    sort: Sort,
    at: usize,
    depth: u32,
}

impl<'t, 's> ParserError<Input<'t, 's>> for Trouble {
    type Inner = Self;

    fn from_input(input: &Input<'t, 's>) -> Self {
        let (at, found) = match input.input.first() {
            Some(token) => (token.at, shown(&token.kind)),
            None => (0, String::new()),
        };
        let reason = format!("{found} cannot stand here").into();
        Self { at, reason }
    }

    fn into_inner(self) -> Result<Self::Inner, Self> {
        Ok(self)
    }
}

fn shown(kind: &Kind<'_>) -> String {
    match kind {
        Kind::Word(word) => format!("{word:?}").to_uppercase(),
        Kind::Name(name) => format!("the name {name}"),
        Kind::Text(text) => format!("the text '{}'", text.replace('\'', "''")),
        Kind::Whole(number) => format!("the number {number}"),
        Kind::Fraction(number) => format!("the number {number}"),
        Kind::Equal => "\"=\"".into(),
        Kind::NotEqual => "\"<>\"".into(),
        Kind::Less => "\"<\"".into(),
        Kind::LessEqual => "\"<=\"".into(),
        Kind::Greater => "\">\"".into(),
        Kind::GreaterEqual => "\">=\"".into(),
        Kind::Plus => "\"+\"".into(),
        Kind::Minus => "\"-\"".into(),
        Kind::Open => "\"(\"".into(),
        Kind::Close => "\")\"".into(),
        Kind::Comma => "\",\"".into(),
        Kind::End => "the end of the expression".into(),
    }
}

/// Makes the program of an expression.
pub(super) fn parse(tokens: &[Token<'_>]) -> Result<Program, Trouble> {
    let mut input = Input {
        input: TokenSlice::new(tokens),
        state: Builder::default(),
    };
    let whole = (or_expression, is(Kind::End)).parse_next(&mut input);
    let whole = whole.and_then(|(operand, _)| truth(&mut input, operand));
    match whole {
        Ok(_) => Ok(Program {
            nodes: input.state.nodes,
        }),
        Err(ErrMode::Backtrack(trouble) | ErrMode::Cut(trouble)) => Err(trouble),
        Err(ErrMode::Incomplete(_)) => Err(Trouble::from_input(&input)),
    }
}

/// This very token.
fn is<'t, 's>(kind: Kind<'static>) -> impl Parser<Input<'t, 's>, &'t Token<'s>, ErrMode<Trouble>>
where
    's: 't,
{
    any.verify(move |token: &&Token<'s>| token.kind == kind)
}

fn word<'t, 's>(word: Keyword) -> impl Parser<Input<'t, 's>, &'t Token<'s>, ErrMode<Trouble>>
where
    's: 't,
{
    is(Kind::Word(word))
}

/// A text written down.
fn text<'t, 's>(input: &mut Input<'t, 's>) -> Parsed<&'t str> {
    let text = |token: &'t Token<'s>| match &token.kind {
        Kind::Text(text) => Some(text.as_str()),
        _ => None,
    };
    any.verify_map(text).parse_next(input)
}

fn push(
    input: &mut Input<'_, '_>,
    node: Node,
    sort: Sort,
    at: usize,
    below: u32,
) -> Parsed<Operand> {
    let depth = below + 1;
    if depth > DEPTH_MAX {
        return wrong(at, format!("nested more than {DEPTH_MAX} deep"));
    }
    let id = input.state.nodes.len() as Id;
    input.state.nodes.push(node);
    Ok(Operand {
        id,
        sort,
        at,
        depth,
    })
}

/// An operand where TRUE or FALSE is wanted.
fn truth(input: &mut Input<'_, '_>, operand: Operand) -> Parsed<Operand> {
    let at = operand.at;
    match operand.sort {
        Sort::Truth | Sort::Bool | Sort::Null => Ok(operand),
        Sort::Property => push(
            input,
            Node::Cast(operand.id),
            Sort::Truth,
            at,
            operand.depth,
        ),
        _ => wrong(at, "this is neither TRUE nor FALSE; a comparison is wanted"),
    }
}

/// Parts with the same keyword between them become one node, however many there are.
fn joined(
    input: &mut Input<'_, '_>,
    between: Keyword,
    part: fn(&mut Input<'_, '_>) -> Parsed<Operand>,
    node: fn(Vec<Id>) -> Node,
) -> Parsed<Operand> {
    let first = part(input)?;
    let mut ids = Vec::new();
    let (mut depth, at) = (0, first.at);
    while opt(word(between)).parse_next(input)?.is_some() {
        if ids.is_empty() {
            let first = truth(input, first)?;
            (ids, depth) = (vec![first.id], first.depth);
        }
        let next = part(input)?;
        let next = truth(input, next)?;
        ids.push(next.id);
        depth = depth.max(next.depth);
    }
    if ids.is_empty() {
        return Ok(first);
    }
    push(input, node(ids), Sort::Truth, at, depth)
}

fn or_expression(input: &mut Input<'_, '_>) -> Parsed<Operand> {
    joined(input, Keyword::Or, and_expression, Node::Or)
}

fn and_expression(input: &mut Input<'_, '_>) -> Parsed<Operand> {
    joined(input, Keyword::And, equality, Node::And)
}

/// `=`, `<>`, IS NULL and IS NOT NULL, from left to right.
fn equality(input: &mut Input<'_, '_>) -> Parsed<Operand> {
    let mut left = comparison(input)?;
    loop {
        let at = left.at;
        if opt(word(Keyword::Is)).parse_next(input)?.is_some() {
            let not = opt(word(Keyword::Not)).parse_next(input)?.is_some();
            word(Keyword::Null).parse_next(input)?;
            let node = Node::IsNull(left.id);
            left = push(input, node, Sort::Truth, at, left.depth)?;
            if not {
                left = push(input, Node::Not(left.id), Sort::Truth, at, left.depth)?;
            }
            continue;
        }
        let sign = opt(any.verify_map(|token: &Token<'_>| match token.kind {
            Kind::Equal => Some(false),
            Kind::NotEqual => Some(true),
            _ => None,
        }));
        let Some(not) = { sign }.parse_next(input)? else {
            return Ok(left);
        };
        let right = comparison(input)?;
        may_be_equal(left, right)?;
        let depth = left.depth.max(right.depth);
        left = push(
            input,
            Node::Equal(left.id, right.id),
            Sort::Truth,
            at,
            depth,
        )?;
        if not {
            left = push(input, Node::Not(left.id), Sort::Truth, at, left.depth)?;
        }
    }
}

fn may_be_equal(left: Operand, right: Operand) -> Parsed<()> {
    for operand in [left, right] {
        if operand.sort == Sort::Null {
            return wrong(operand.at, "NULL cannot be compared; write IS NULL");
        }
    }
    if left.sort == Sort::Bool && matches!(right.sort, Sort::Number | Sort::Text) {
        return wrong(right.at, "TRUE and FALSE cannot be compared with this");
    }
    Ok(())
}

/// What stands between a value and what it is compared with.
#[derive(Clone, Copy)]
enum Operator {
    Order(Order),
    Between,
    In,
    Find(Find),
}

fn operator<'t>(input: &mut Input<'t, '_>) -> Parsed<Operator> {
    let operator = |token: &'t Token<'_>| {
        Some(match token.kind {
            Kind::Less => Operator::Order(Order::Less),
            Kind::LessEqual => Operator::Order(Order::LessEqual),
            Kind::Greater => Operator::Order(Order::Greater),
            Kind::GreaterEqual => Operator::Order(Order::GreaterEqual),
            Kind::Word(Keyword::Between) => Operator::Between,
            Kind::Word(Keyword::In) => Operator::In,
            Kind::Word(Keyword::Contains) => Operator::Find(Find::Anywhere),
            Kind::Word(Keyword::StartsWith) => Operator::Find(Find::Start),
            Kind::Word(Keyword::EndsWith) => Operator::Find(Find::End),
            _ => return None,
        })
    };
    any.verify_map(operator).parse_next(input)
}

/// Everything that binds tighter than `=`, from left to right.
fn comparison(input: &mut Input<'_, '_>) -> Parsed<Operand> {
    let mut left = unary(input)?;
    loop {
        let negated = opt(word(Keyword::Not)).parse_next(input)?.is_some();
        let found = if negated {
            let named = operator.verify(|found| !matches!(found, Operator::Order(_)));
            Some({ named }.parse_next(input)?)
        } else {
            opt(operator).parse_next(input)?
        };
        left = match found {
            None => return Ok(left),
            Some(Operator::Order(order)) => {
                let right = unary(input)?;
                ordered(input, order, left, right)?
            }
            Some(Operator::Between) => between(input, left, negated)?,
            Some(Operator::In) => within(input, left, negated)?,
            Some(Operator::Find(how)) => {
                let node = Node::Find {
                    how,
                    negated,
                    inside: left.id,
                    text: text(input)?.into(),
                };
                push(input, node, Sort::Truth, left.at, left.depth)?
            }
        };
    }
}

fn ordered(
    input: &mut Input<'_, '_>,
    order: Order,
    left: Operand,
    right: Operand,
) -> Parsed<Operand> {
    for operand in [left, right] {
        if !matches!(operand.sort, Sort::Number | Sort::Property | Sort::Signed) {
            let reason = "only numbers have an order: compare a property with a number here";
            return wrong(operand.at, reason);
        }
    }
    let node = Node::Compare(order, left.id, right.id);
    push(
        input,
        node,
        Sort::Truth,
        left.at,
        left.depth.max(right.depth),
    )
}

fn between(input: &mut Input<'_, '_>, value: Operand, negated: bool) -> Parsed<Operand> {
    let low = unary(input)?;
    word(Keyword::And).parse_next(input)?;
    let high = unary(input)?;
    let (lower, upper) = if negated {
        (Order::Less, Order::Greater)
    } else {
        if is_above(&input.state.nodes, low, high) {
            return wrong(low.at, "the lower end of BETWEEN is above the upper one");
        }
        (Order::GreaterEqual, Order::LessEqual)
    };
    let lower = ordered(input, lower, value, low)?;
    let upper = ordered(input, upper, value, high)?;
    let both = vec![lower.id, upper.id];
    let node = if negated {
        Node::Or(both)
    } else {
        Node::And(both)
    };
    push(
        input,
        node,
        Sort::Truth,
        value.at,
        lower.depth.max(upper.depth),
    )
}

/// Whether both are numbers written down and the first is the larger.
fn is_above(nodes: &[Node], low: Operand, high: Operand) -> bool {
    let number = |operand: Operand| match nodes.get(operand.id as usize) {
        Some(Node::Int(number)) => Some((i64::from(*number), f64::from(*number))),
        Some(Node::Long(number)) => Some((*number, *number as f64)),
        Some(Node::Double(number)) => Some((*number as i64, *number)),
        _ => None,
    };
    let (Some(low), Some(high)) = (number(low), number(high)) else {
        return false;
    };
    low.1 > high.1 || (low.1 == high.1 && low.0 > high.0)
}

fn within(input: &mut Input<'_, '_>, value: Operand, negated: bool) -> Parsed<Operand> {
    let list = separated(1.., text.map(Box::<str>::from), is(Kind::Comma));
    let mut values: Vec<Box<str>> =
        delimited(is(Kind::Open), list, is(Kind::Close)).parse_next(input)?;
    values.sort_unstable();
    values.dedup();
    let Some(Node::Property(name)) = input.state.nodes.get(value.id as usize) else {
        return wrong(
            value.at,
            "IN is for a property: its name is wanted before IN",
        );
    };
    let node = Node::In {
        name: name.clone(),
        negated,
        values: values.into(),
    };
    push(input, node, Sort::Truth, value.at, value.depth)
}

fn unary(input: &mut Input<'_, '_>) -> Parsed<Operand> {
    input.state.depth += 1;
    if input.state.depth > DEPTH_MAX {
        let at = input.input.first().map_or(0, |token| token.at);
        return wrong(at, format!("nested more than {DEPTH_MAX} deep"));
    }
    let operand = signed(input);
    input.state.depth -= 1;
    operand
}

fn signed(input: &mut Input<'_, '_>) -> Parsed<Operand> {
    let sign = opt(any.verify(|token: &&Token<'_>| {
        let kind = &token.kind;
        matches!(kind, Kind::Plus | Kind::Minus | Kind::Word(Keyword::Not))
    }));
    let Some(sign) = { sign }.parse_next(input)? else {
        return primary(input);
    };
    let operand = unary(input)?;
    match sign.kind {
        Kind::Minus => {
            let node = Node::Negate(operand.id);
            push(input, node, Sort::Signed, sign.at, operand.depth)
        }
        Kind::Plus => Ok(operand),
        _ => {
            let operand = truth(input, operand)?;
            let node = Node::Not(operand.id);
            push(input, node, Sort::Truth, sign.at, operand.depth)
        }
    }
}

fn primary(input: &mut Input<'_, '_>) -> Parsed<Operand> {
    let simple = |token: &Token<'_>| {
        let (node, sort) = match &token.kind {
            Kind::Name(name) => (Node::Property((*name).into()), Sort::Property),
            Kind::Text(text) => (Node::Text(text.as_str().into()), Sort::Text),
            Kind::Whole(number) => (whole(*number), Sort::Number),
            Kind::Fraction(number) => (Node::Double(*number), Sort::Number),
            Kind::Word(Keyword::True) => (Node::Bool(true), Sort::Bool),
            Kind::Word(Keyword::False) => (Node::Bool(false), Sort::Bool),
            Kind::Word(Keyword::Null) => (Node::Null, Sort::Null),
            _ => return None,
        };
        Some((node, sort, token.at))
    };
    if let Some((node, sort, at)) = opt(any.verify_map(simple)).parse_next(input)? {
        return push(input, node, sort, at, 0);
    }
    let inside = preceded(is(Kind::Open), or_expression).parse_next(input)?;
    is(Kind::Close).parse_next(input)?;
    Ok(inside)
}

/// Java's types: what fits 32 bits is compared as such.
fn whole(number: i64) -> Node {
    i32::try_from(number).map_or(Node::Long(number), Node::Int)
}
