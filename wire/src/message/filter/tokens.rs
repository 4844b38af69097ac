//! Owns the words of an expression: names, keywords, literals and signs, each with its place.
//!
//! Invariant: the row of tokens ends with exactly one [`Kind::End`], and places never go back.

use std::borrow::Cow;

use winnow::Parser;
use winnow::ascii::{Caseless, digit1};
use winnow::combinator::{alt, delimited, eof, opt, preceded, repeat};
use winnow::error::{ErrMode, ParserError};
use winnow::stream::{LocatingSlice, Location, Stream};
use winnow::token::{any, one_of, take_until, take_while};

/// Why an expression is wrong, and where.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    /// Byte of the text.
    pub at: usize,
    /// What is wrong.
    pub reason: Cow<'static, str>,
}

/// What a parser of characters or tokens returns.
pub(super) type Parsed<T> = Result<T, ErrMode<Trouble>>;

/// Ends the parsing.
pub(super) fn wrong<T>(at: usize, reason: impl Into<Cow<'static, str>>) -> Parsed<T> {
    let reason = reason.into();
    Err(ErrMode::Cut(Trouble { at, reason }))
}

/// Words that are no names, in any spelling of capitals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keyword {
    Not,
    And,
    Or,
    Between,
    In,
    True,
    False,
    Null,
    Is,
    Contains,
    StartsWith,
    EndsWith,
}

const KEYWORDS: [(&str, Keyword); 12] = [
    ("NOT", Keyword::Not),
    ("AND", Keyword::And),
    ("OR", Keyword::Or),
    ("BETWEEN", Keyword::Between),
    ("IN", Keyword::In),
    ("TRUE", Keyword::True),
    ("FALSE", Keyword::False),
    ("NULL", Keyword::Null),
    ("IS", Keyword::Is),
    ("CONTAINS", Keyword::Contains),
    ("STARTSWITH", Keyword::StartsWith),
    ("ENDSWITH", Keyword::EndsWith),
];

/// What a token is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind<'s> {
    Word(Keyword),
    Name(&'s str),
    Text(String),
    Whole(i64),
    Fraction(f64),
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Plus,
    Minus,
    Open,
    Close,
    Comma,
    End,
}

/// A token and its place.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token<'s> {
    /// What it is.
    pub kind: Kind<'s>,
    /// Its first byte in the text.
    pub at: usize,
    /// The byte behind it.
    pub end: usize,
}

type Text<'s> = LocatingSlice<&'s str>;

impl<'s> ParserError<Text<'s>> for Trouble {
    type Inner = Self;

    fn from_input(input: &Text<'s>) -> Self {
        let reason = match input.chars().next() {
            Some('\'') => Cow::from("the text that begins here has no closing '"),
            Some(sign) => Cow::from(format!("{sign:?} has no meaning here")),
            None => Cow::from("the expression ends too early"),
        };
        let at = input.current_token_start();
        Self { at, reason }
    }

    fn into_inner(self) -> Result<Self::Inner, Self> {
        Ok(self)
    }
}

/// Splits an expression into its tokens.
pub(super) fn split(text: &str) -> Result<Vec<Token<'_>>, Trouble> {
    let mut input = Text::new(text);
    let tokens = repeat(0.., preceded(space, token));
    let mut tokens: Vec<Token<'_>> = match (tokens, space, eof).parse_next(&mut input) {
        Ok((tokens, (), _)) => tokens,
        Err(ErrMode::Backtrack(trouble) | ErrMode::Cut(trouble)) => return Err(trouble),
        Err(ErrMode::Incomplete(_)) => return Err(Trouble::from_input(&input)),
    };
    let (kind, at, end) = (Kind::End, text.len(), text.len());
    tokens.push(Token { kind, at, end });
    Ok(tokens)
}

/// White space and comments.
fn space(input: &mut Text<'_>) -> Parsed<()> {
    let blank = take_while(1.., [' ', '\t', '\n', '\r', '\x0c']).void();
    let line = ("--", take_while(0.., |c| c != '\n' && c != '\r')).void();
    let block = delimited("/*", take_until(0.., "*/"), "*/").void();
    repeat(0.., alt((blank, line, block))).parse_next(input)
}

fn token<'s>(input: &mut Text<'s>) -> Parsed<Token<'s>> {
    let spanned = alt((word, text, fraction, whole, sign)).with_span();
    let make = |(kind, span): (Kind<'s>, std::ops::Range<usize>)| Token {
        kind,
        at: span.start,
        end: span.end,
    };
    spanned.map(make).parse_next(input)
}

fn word<'s>(input: &mut Text<'s>) -> Parsed<Kind<'s>> {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_' || c == '$';
    let is_next = move |c: char| is_first(c) || c.is_ascii_digit();
    let name = (one_of(is_first), take_while(0.., is_next)).take();
    let mut word = name.map(|name: &str| {
        let keyword = KEYWORDS
            .iter()
            .find(|(text, _)| text.eq_ignore_ascii_case(name));
        keyword.map_or(Kind::Name(name), |(_, keyword)| Kind::Word(*keyword))
    });
    word.parse_next(input)
}

/// A text in single quotes; two of them inside stand for one.
fn text<'s>(input: &mut Text<'s>) -> Parsed<Kind<'s>> {
    let part = alt((take_while(1.., |c| c != '\''), "''".value("'")));
    let inside = repeat(0.., part).fold(String::new, |mut text, part| {
        text.push_str(part);
        text
    });
    delimited('\'', inside, '\'')
        .map(Kind::Text)
        .parse_next(input)
}

fn fraction<'s>(input: &mut Text<'s>) -> Parsed<Kind<'s>> {
    let at = input.current_token_start();
    let exponent = || (Caseless("e"), opt(one_of(['+', '-'])), digit1).void();
    let mut shape = alt((
        (digit1, '.', opt(digit1), opt(exponent())).void(),
        ('.', digit1, opt(exponent())).void(),
        (digit1, exponent()).void(),
    ))
    .take();
    let digits: &str = shape.parse_next(input)?;
    match digits.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(Kind::Fraction(number)),
        _ => wrong(at, "the number is too large for a double"),
    }
}

/// A whole number has no leading zero; it may carry an L.
fn whole<'s>(input: &mut Text<'s>) -> Parsed<Kind<'s>> {
    let at = input.current_token_start();
    let first = input.checkpoint();
    let digits: &str = digit1.parse_next(input)?;
    if digits.len() > 1 && digits.starts_with('0') {
        input.reset(&first);
        return wrong(at, "a whole number does not begin with 0");
    }
    let Ok(number) = digits.parse() else {
        return wrong(at, "the number does not fit 64 bits");
    };
    if digits != "0" {
        opt(Caseless("l")).parse_next(input)?;
    }
    Ok(Kind::Whole(number))
}

fn sign<'s>(input: &mut Text<'s>) -> Parsed<Kind<'s>> {
    let two = alt((
        "<>".value(Kind::NotEqual),
        "<=".value(Kind::LessEqual),
        ">=".value(Kind::GreaterEqual),
    ));
    let one = any.verify_map(|sign| match sign {
        '=' => Some(Kind::Equal),
        '<' => Some(Kind::Less),
        '>' => Some(Kind::Greater),
        '+' => Some(Kind::Plus),
        '-' => Some(Kind::Minus),
        '(' => Some(Kind::Open),
        ')' => Some(Kind::Close),
        ',' => Some(Kind::Comma),
        _ => None,
    });
    alt((two, one)).parse_next(input)
}
