//! Owns the reading of the project's own sources for the tests that keep the tree tidy.
//!
//! Invariant: a masked source has the same lines and columns as the original, with comments,
//! strings and character literals blanked, so that what is found in it is code.

use std::path::{Path, PathBuf};

use crate::process::repository;

/// Directories that hold nothing of the project.
const FOREIGN: [&str; 6] = [
    "target",
    "data",
    ".git",
    "node_modules",
    "corpus",
    "artifacts",
];

/// The project's text files with one of these extensions, as paths relative to its root.
pub fn project_files(extensions: &[&str]) -> Vec<PathBuf> {
    let root = repository();
    let mut files = Vec::new();
    let mut open = vec![root.clone()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory)
            .expect("a directory of the project")
            .flatten()
        {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type().expect("a file type");
            // In a further work tree `.git` is a file.
            if FOREIGN.contains(&name.as_str()) {
                continue;
            }
            if kind.is_dir() {
                open.push(path);
            } else if extensions.contains(&extension(&path)) && name != "Cargo.lock" {
                files.push(
                    path.strip_prefix(&root)
                        .expect("below the root")
                        .to_path_buf(),
                );
            }
        }
    }
    files.sort();
    files
}

fn extension(path: &Path) -> &str {
    path.extension()
        .and_then(|text| text.to_str())
        .unwrap_or("")
}

/// The text of a project file.
pub fn read(path: &Path) -> String {
    let full = repository().join(path);
    std::fs::read_to_string(&full).unwrap_or_else(|error| panic!("{}: {error}", full.display()))
}

/// The part of a source before its unit tests.
pub fn without_unit_tests(text: &str) -> &str {
    let module = text.find("#[cfg(test)]\nmod ");
    &text[..module.unwrap_or(text.len())]
}

/// Blanks comments, strings and character literals of a Rust source.
pub fn mask(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < characters.len() {
        let end = literal_end(&characters, at);
        if end == at {
            out.push(characters[at]);
            at += 1;
        } else {
            let blank = |character: &char| if *character == '\n' { '\n' } else { ' ' };
            out.extend(characters[at..end].iter().map(blank));
            at = end;
        }
    }
    out
}

/// One past the end of the comment, string or character literal that begins at `at`; `at` if none.
fn literal_end(text: &[char], at: usize) -> usize {
    let next = text.get(at + 1).copied();
    match (text[at], next) {
        ('/', Some('/')) => find(text, at, |rest| rest[0] == '\n').unwrap_or(text.len()),
        ('/', Some('*')) => find(text, at + 2, |rest| rest.starts_with(&['*', '/']))
            .map_or(text.len(), |end| end + 2),
        ('"', _) => string_end(text, at + 1),
        ('r', Some('"' | '#')) if !in_word(text, at) => raw_string_end(text, at),
        ('b', Some('r')) if !in_word(text, at) => raw_string_end(text, at + 1).max(at),
        ('\'', Some('\\')) => {
            find(text, at + 3, |rest| rest[0] == '\'').map_or(text.len(), |end| end + 1)
        }
        ('\'', Some(_)) if text.get(at + 2) == Some(&'\'') => at + 3,
        _ => at,
    }
}

fn find(text: &[char], from: usize, matches: impl Fn(&[char]) -> bool) -> Option<usize> {
    (from..text.len()).find(|at| matches(&text[*at..]))
}

fn in_word(text: &[char], at: usize) -> bool {
    at > 0 && (text[at - 1].is_alphanumeric() || text[at - 1] == '_')
}

fn string_end(text: &[char], mut at: usize) -> usize {
    while at < text.len() && text[at] != '"' {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

/// The end of a raw string whose `r` stands at `at`; `at - 1` or `at` when it is none.
fn raw_string_end(text: &[char], at: usize) -> usize {
    let hashes = text[at + 1..]
        .iter()
        .take_while(|character| **character == '#')
        .count();
    if text.get(at + 1 + hashes) != Some(&'"') {
        return at;
    }
    let mut close = vec!['"'];
    close.extend(std::iter::repeat_n('#', hashes));
    let start = at + 2 + hashes;
    find(text, start, |rest| rest.starts_with(&close)).map_or(text.len(), |end| end + close.len())
}

/// Whether `word` stands in `line` as a word of its own.
pub fn has_word(line: &str, word: &str) -> bool {
    word_positions(line, word).next().is_some()
}

/// Where `word` stands in `text` as a word of its own.
pub fn word_positions<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let part = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |at| {
            let before = text[..*at].chars().next_back();
            let after = text[*at + word.len()..].chars().next();
            !before.is_some_and(part) && !after.is_some_and(part)
        })
}

/// A function of a source: its name, its first line (from 1) and its number of lines.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The line of its `fn`, counted from 1.
    pub line: usize,
    /// Lines from `fn` to the closing brace.
    pub lines: usize,
}

/// The functions of a masked source, by counting braces.
pub fn functions(masked: &str) -> Vec<Function> {
    let mut functions = Vec::new();
    for at in word_positions(masked, "fn") {
        let name = masked[at + 2..].trim_start();
        let end = name.find(|character: char| !character.is_alphanumeric() && character != '_');
        let name = &name[..end.unwrap_or(name.len())];
        if name.is_empty() {
            continue;
        }
        if let Some(end) = body_end(&masked[at..]) {
            let line = masked[..at].matches('\n').count() + 1;
            let lines = masked[at..at + end].matches('\n').count() + 1;
            functions.push(Function {
                name: name.to_owned(),
                line,
                lines,
            });
        }
    }
    functions
}

/// Where the body of the function at the start of `text` ends; none for a declaration.
fn body_end(text: &str) -> Option<usize> {
    let mut depth = 0_i32;
    let mut brackets = 0_i32;
    for (at, character) in text.char_indices() {
        match character {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            ';' if depth == 0 && brackets == 0 => return None,
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masking_keeps_code_and_blanks_the_rest() {
        let text =
            "let a = \"unsafe // {\"; // unsafe\nlet b = 'x'; /* { */ let c: &'a str = r#\"}\"#;";
        let masked = mask(text);
        assert_eq!(masked.len(), text.len());
        assert!(!masked.contains("unsafe") && !masked.contains(['{', '}', 'x']));
        assert!(masked.contains("let c: &'a str ="));
    }

    #[test]
    fn functions_are_measured_from_their_name_to_their_brace() {
        let text = "trait T { fn declared(&self); }\nfn two() {\n    if true { }\n}\n";
        let found = functions(&mask(text));
        assert_eq!(
            found,
            [Function {
                name: "two".to_owned(),
                line: 2,
                lines: 3
            }]
        );
    }
}
