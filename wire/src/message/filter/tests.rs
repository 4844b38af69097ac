//! What expressions match, what is refused, and that nothing of either panics.

use proptest::prelude::*;

use super::*;
use crate::message::properties::append;

fn properties(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in pairs {
        append(&mut out, name, value);
    }
    out
}

fn matches(expression: &str, pairs: &[(&str, &str)]) -> bool {
    match Filter::compile(expression) {
        Ok(filter) => filter.matches(&properties(pairs)),
        Err(error) => panic!("{expression}: {error}"),
    }
}

fn refused(expression: &str) -> FilterError {
    match Filter::compile(expression) {
        Ok(_) => panic!("{expression} was taken"),
        Err(error) => error,
    }
}

/// Expression, properties, whether it matches.
type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], bool);

fn table(rows: &[Row<'_>]) {
    for (expression, pairs, wanted) in rows {
        assert_eq!(
            matches(expression, pairs),
            *wanted,
            "{expression} on {pairs:?}"
        );
    }
}

#[test]
fn numbers_are_read_from_properties() {
    table(&[
        ("a > 3", &[("a", "4")], true),
        ("a > 3", &[("a", "3")], false),
        ("a >= 3 and a <= 3L", &[("a", "3")], true),
        ("a = 3", &[("a", "3")], true),
        ("3 = a", &[("a", "3")], true),
        ("a <> 3", &[("a", "4")], true),
        ("a > 3.14", &[("a", "3.1415")], true),
        ("a > 3.1E10", &[("a", "3.1415E10")], true),
        ("a = .5", &[("a", "5e-1")], true),
        ("a > 0.0", &[("a", "1")], true),
        ("a = -7", &[("a", "-7")], true),
        ("a = +7", &[("a", "+7")], true),
        ("a > - - 6", &[("a", "7")], true),
        ("a > 3000000000", &[("a", "3000000001")], true),
        ("a > b", &[("a", "20"), ("b", "10.5")], true),
        ("a > b", &[("a", "9"), ("b", "10")], false),
        ("a < 1.5", &[("a", " 1.25d ")], true),
        ("a < 5.5", &[("a", "Infinity")], false),
        ("1 < 2.5", &[], true),
    ]);
}

#[test]
fn a_text_that_is_no_number_of_the_kind_matches_nothing_at_all() {
    table(&[
        ("a > 3", &[("a", "x")], false),
        ("not (a > 3)", &[("a", "x")], false),
        ("a > 3 or b = '1'", &[("a", "x"), ("b", "1")], false),
        ("b = '1' or a > 3", &[("a", "x"), ("b", "1")], true),
        ("a = 3", &[("a", "3.0")], false),
        ("a = 3.0", &[("a", "3")], true),
        ("a > 3", &[("a", "3000000000")], false),
        (
            "a between up and low",
            &[("a", "3.14"), ("up", "up"), ("low", "low")],
            false,
        ),
        ("a > b", &[("a", "inf"), ("b", "1")], false),
        ("TRUE = a", &[("a", "true")], false),
    ]);
}

#[test]
fn between_has_both_ends() {
    table(&[
        ("a between 2 and 10", &[("a", "2")], true),
        ("a between 2 and 10", &[("a", "10")], true),
        ("a between 2 and 10", &[("a", "11")], false),
        ("a not between 2 and 10", &[("a", "11")], true),
        ("a not between 2 and 10", &[("a", "5")], false),
        ("a not between 10 and 2", &[("a", "5")], true),
        ("a between 0 and 3", &[], false),
        ("a not between 0 and 3", &[], false),
        (
            "a between -3 and -1 and b = 'x'",
            &[("a", "-2"), ("b", "x")],
            true,
        ),
    ]);
}

#[test]
fn texts_are_compared_looked_up_and_searched() {
    table(&[
        ("y = 'it''s'", &[("y", "it's")], true),
        (
            "TAGS is not null and TAGS='''''tag'''''",
            &[("TAGS", "''tag''")],
            true,
        ),
        ("y = ''", &[("y", "x")], false),
        ("a in ('3', '4', '5')", &[("a", "4")], true),
        ("a in ('3', '4', '5')", &[("a", "40")], false),
        ("a not in ('3', '4')", &[("a", "5")], true),
        ("a not in ('3', '4')", &[("a", "3")], false),
        ("a in ('3')", &[], false),
        ("a not in ('3')", &[], false),
        ("v contains 'x'", &[("v", "axb")], true),
        ("v not contains 'x'", &[("v", "axb")], false),
        ("v not contains 'x'", &[("v", "abb")], true),
        (
            "v startswith 'ax' and v endswith 'xb'",
            &[("v", "axb")],
            true,
        ),
        (
            "v not startswith 'x' and v not endswith 'x'",
            &[("v", "abb")],
            true,
        ),
        (
            "v contains '' or v startswith '' or v endswith ''",
            &[("v", "a")],
            false,
        ),
        (
            "v not contains '' or v not startswith ''",
            &[("v", "a")],
            false,
        ),
        ("v contains 'x' or v not contains 'x'", &[], false),
        ("' ' contains ' '", &[], true),
        ("'s' endswith '\\'", &[], false),
        ("5 contains '5'", &[], false),
    ]);
}

#[test]
fn null_is_neither_true_nor_false() {
    table(&[
        ("a is null", &[], true),
        ("a is null", &[("a", "1")], false),
        ("a is not null", &[("a", "1")], true),
        ("a = 1", &[], false),
        ("a <> 1", &[], false),
        ("not (a = 1)", &[], false),
        ("1 = a", &[], false),
        ("1 <> a", &[], true),
        ("a = b", &[], true),
        ("a <> b", &[("a", "1")], true),
        ("a = 1 or b = 2", &[("b", "2")], true),
        ("a = 1 and b = 2", &[("b", "2")], false),
        ("not (a = 1 and b = 3)", &[("b", "2")], true),
        ("(a = 1) is null", &[], true),
        ("NULL is null", &[], true),
        ("NULL", &[], false),
        ("not NULL", &[], false),
        ("NULL or TRUE", &[], true),
        ("-a is null", &[("a", "1")], true),
    ]);
}

#[test]
fn truth_values_and_properties_as_such() {
    table(&[
        ("TRUE", &[], true),
        ("FALSE", &[], false),
        ("a = TRUE or b = false", &[("a", "True")], true),
        ("a = TRUE", &[("a", "yes")], false),
        ("a", &[("a", "true")], false),
        ("not a", &[("a", "true")], true),
        ("not a", &[], false),
        ("(a = 1) = TRUE", &[("a", "1")], true),
        ("1 = TRUE", &[], false),
        ("1 <> TRUE", &[], true),
    ]);
}

#[test]
fn not_binds_tighter_than_comparisons_and_and_tighter_than_or() {
    table(&[
        ("a = 1 or b = 1 and c = 1", &[("a", "1")], true),
        ("(a = 1 or b = 1) and c = 1", &[("a", "1")], false),
        ("not a = 1", &[("a", "1")], false),
        ("not (a = 2) and b = 1", &[("a", "1"), ("b", "1")], true),
        ("a = 1 = TRUE", &[("a", "1")], true),
        ("NOT a IS NULL", &[("a", "1")], false),
    ]);
}

#[test]
fn blanks_and_comments_and_capitals_do_not_matter() {
    table(&[
        (
            "a=3  aNd\n\tb<>4 -- no more\n OR /* x ** y */ FALSE",
            &[("a", "3"), ("b", "5")],
            true,
        ),
        ("a = 1 -- to the end", &[("a", "1")], true),
        ("A = 1", &[("a", "1")], false),
        ("$a_1 = 1", &[("$a_1", "1")], true),
    ]);
}

#[test]
fn wrong_expressions_are_refused_with_their_place() {
    let rows = [
        ("a > AND (", 1, 5, "AND cannot stand here"),
        ("", 1, 1, "the end of the expression cannot stand here"),
        ("a = 1 b", 1, 7, "the name b cannot stand here"),
        ("a and between 2 and 10", 1, 7, "BETWEEN cannot stand here"),
        ("a between 10 and 0", 1, 11, "above"),
        ("a > 'x'", 1, 5, "only numbers have an order"),
        ("a > TRUE", 1, 5, "only numbers have an order"),
        ("(a = 1) < 3", 1, 2, "only numbers have an order"),
        ("a between 'a' and 'b'", 1, 11, "only numbers have an order"),
        ("a = NULL", 1, 5, "IS NULL"),
        ("TRUE = 1", 1, 8, "cannot be compared"),
        ("a =\n 'é' or c = 'x", 2, 13, "no closing '"),
        ("a != 3", 1, 3, "'!' has no meaning"),
        ("a > 100000000000000000000000", 1, 5, "64 bits"),
        ("a > 1E999", 1, 5, "too large"),
        ("a = 007", 1, 5, "begin with 0"),
        ("5", 1, 1, "neither TRUE nor FALSE"),
        ("a = 1 or 'x'", 1, 10, "neither TRUE nor FALSE"),
        ("-a and b = 1", 1, 1, "neither TRUE nor FALSE"),
        ("a in (1)", 1, 7, "the number 1 cannot stand here"),
        ("a in ()", 1, 7, "cannot stand here"),
        ("1 in ('1')", 1, 1, "IN is for a property"),
        ("v contains x", 1, 12, "the name x cannot stand here"),
        ("a not > 3", 1, 7, "\">\" cannot stand here"),
        ("a is 3", 1, 6, "the number 3 cannot stand here"),
        ("(a = 1", 1, 7, "the end of the expression"),
        ("a = 1;", 1, 6, "';' has no meaning"),
        ("*", 1, 1, "'*' has no meaning"),
    ];
    for (expression, line, column, reason) in rows {
        let error = refused(expression);
        assert_eq!(
            (error.line, error.column),
            (line, column),
            "{expression}: {error}"
        );
        assert!(error.reason.contains(reason), "{expression}: {error}");
    }
}

#[test]
fn deep_and_long_expressions_are_bounded() {
    let deep = |count: usize| format!("{}a = 1{}", "(".repeat(count), ")".repeat(count));
    assert!(Filter::compile(&deep(90)).is_ok());
    assert!(refused(&deep(5_000)).reason.contains("deep"));
    assert!(
        refused(&format!("{} a", "not ".repeat(9_000)))
            .reason
            .contains("deep")
    );
    assert!(
        refused(&format!("a {}", "= a ".repeat(9_000)))
            .reason
            .contains("deep")
    );
    let wide = vec!["a = 1"; 5_000].join(" or ");
    assert!(matches(&wide, &[("a", "1")]));
    assert!(!matches(&wide, &[("a", "2")]));
    assert!(
        refused(&" ".repeat(EXPRESSION_BYTES_MAX + 1))
            .reason
            .contains("bytes")
    );
}

#[test]
fn the_last_of_two_properties_of_a_name_counts() {
    assert!(matches("a = 2", &[("a", "1"), ("a", "2")]));
}

/// An expression over `a`, `b`, `c` and what it means, evaluated the long way.
#[derive(Clone, Debug)]
enum Tree {
    Equal(&'static str, i32),
    Above(&'static str, i32),
    IsNull(&'static str),
    Not(Box<Tree>),
    And(Box<Tree>, Box<Tree>),
    Or(Box<Tree>, Box<Tree>),
}

impl Tree {
    fn text(&self) -> String {
        match self {
            Self::Equal(name, value) => format!("{name} = {value}"),
            Self::Above(name, value) => format!("{name} > {value}"),
            Self::IsNull(name) => format!("{name} IS NULL"),
            Self::Not(of) => format!("NOT ({})", of.text()),
            Self::And(left, right) => format!("({}) AND ({})", left.text(), right.text()),
            Self::Or(left, right) => format!("({}) OR ({})", left.text(), right.text()),
        }
    }

    fn truth(&self, values: &[(&str, i32)]) -> Option<bool> {
        let of = |name: &str| values.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
        match self {
            Self::Equal(name, value) => of(name).map(|found| found == *value),
            Self::Above(name, value) => of(name).map(|found| found > *value),
            Self::IsNull(name) => Some(of(name).is_none()),
            Self::Not(tree) => tree.truth(values).map(|truth| !truth),
            Self::And(left, right) => match (left.truth(values), right.truth(values)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (Some(true), Some(true)) => Some(true),
                _ => None,
            },
            Self::Or(left, right) => match (left.truth(values), right.truth(values)) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            },
        }
    }
}

fn tree() -> impl Strategy<Value = Tree> {
    let name = || prop::sample::select(vec!["a", "b", "c"]);
    let leaf = prop_oneof![
        (name(), -3..3).prop_map(|(name, value)| Tree::Equal(name, value)),
        (name(), -3..3).prop_map(|(name, value)| Tree::Above(name, value)),
        name().prop_map(Tree::IsNull),
    ];
    leaf.prop_recursive(6, 64, 2, |inner| {
        prop_oneof![
            inner.clone().prop_map(|tree| Tree::Not(Box::new(tree))),
            (inner.clone(), inner.clone())
                .prop_map(|(left, right)| Tree::And(Box::new(left), Box::new(right))),
            (inner.clone(), inner)
                .prop_map(|(left, right)| Tree::Or(Box::new(left), Box::new(right))),
        ]
    })
}

proptest! {
    #[test]
    fn any_text_and_any_properties_are_survived(
        text in "(a|b|'x'|1|2\\.5|=|<>|<|>=|\\(|\\)|not|and|or|is|null|in|between|,|- ){0,30}",
        noise in ".{0,40}",
        bytes in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        for expression in [&text, &noise] {
            if let Ok(filter) = Filter::compile(expression) {
                let _ = filter.matches(&bytes);
                let _ = filter.matches(&properties(&[("a", "1"), ("b", "x")]));
            }
        }
    }

    #[test]
    fn three_valued_logic_is_kept(
        tree in tree(),
        values in prop::collection::vec((prop::sample::select(vec!["a", "b", "c"]), -3..3), 0..3),
    ) {
        let mut known: Vec<(&str, i32)> = Vec::new();
        for (name, value) in values {
            if !known.iter().any(|(found, _)| *found == name) {
                known.push((name, value));
            }
        }
        let mut stored = Vec::new();
        for (name, value) in &known {
            append(&mut stored, name, &value.to_string());
        }
        let filter = Filter::compile(&tree.text()).expect("a generated expression is right");
        prop_assert_eq!(filter.matches(&stored), tree.truth(&known) == Some(true));
    }
}
