//! Keeps the tree tidy: sizes, openings, words, and where dangerous things may stand.
//!
//! Invariant: each rule is a function from a text to complaints, tried on a breach of itself, so
//! that a rule which has stopped seeing anything fails.

use std::path::{Path, PathBuf};

use tests::source::{functions, has_word, mask, project_files, read, without_unit_tests};

const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_COLUMNS_MAX: usize = 100;
const SCRIPT_LINES_MAX: usize = 40;
/// How far above an unsafe block its reason may begin.
const SAFETY_LINES_MAX: usize = 16;

/// Files that may be longer, with the reason.
const LONG_FILES: &[(&str, &str)] = &[];
/// Functions that may be longer, as `path::name`, with the reason.
const LONG_FUNCTIONS: &[(&str, &str)] = &[];
/// Files whose lines may be longer, with the reason.
const WIDE_FILES: &[(&str, &str)] = &[];
/// Where unsafe code may stand, with the reason.
const UNSAFE_PLACES: &[(&str, &str)] = &[
    (
        "shard/src/runtime",
        "the ring, its buffers and the system calls around them",
    ),
    ("shard/src/memory.rs", "locked and shared memory"),
    ("shard/src/memory/", "locked and shared memory"),
    ("shard/tests/", "a counting allocator needs it"),
    ("wire/tests/", "a counting allocator needs it"),
];
/// Where `shard` may use locks and shared ownership, with the reason.
const SHARING_PLACES: &[(&str, &str)] = &[
    (
        "shard/src/mesh",
        "the rings between cores are shared by nature",
    ),
    (
        "shard/src/runtime",
        "set-up of threads, and the hand-over to the disk port's writers",
    ),
    (
        "shard/src/io/sim.rs",
        "the disk of the simulator outlives its shards",
    ),
    (
        "shard/src/io/real.rs",
        "whether direct I/O was refused is told to the start-up once, by every copy of the storage",
    ),
    (
        "shard/src/memory.rs",
        "the mapping of a buffer lives as long as the disk port's writer that writes from it",
    ),
];
/// Where memory may be mapped, with the reason.
const MAPPING_PLACES: &[(&str, &str)] = &[
    (
        "shard/src/memory",
        "the locked buffer that outlives the process",
    ),
    (
        "shard/src/runtime",
        "the rings that are shared with the kernel",
    ),
];

/// Words that mark unfinished work; written in halves so that this list is not found itself.
const MARKERS: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("HA", "CK"),
    concat!("unimple", "mented!"),
    concat!("to", "do!"),
];
/// Places of one machine, and registries that only a manifest's defaults should know.
const FOREIGN_WORDS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("crates", ".io"),
    concat!("registry.", "npmjs"),
    concat!("py", "pi.org"),
    concat!("repo1.", "maven"),
    concat!("proxy.", "golang"),
];
const TEXT_EXTENSIONS: &[&str] = &[
    "rs", "md", "toml", "sh", "py", "java", "go", "js", "conf", "service", "json", "yml", "",
];

fn allowed(list: &[(&str, &str)], path: &Path) -> bool {
    let path = path.to_string_lossy();
    list.iter().any(|(start, _)| path.starts_with(start))
}

fn rust_files() -> Vec<PathBuf> {
    let files = project_files(&["rs"]);
    assert!(
        files.len() > 10,
        "the project's sources were not found: {files:?}"
    );
    files
}

/// Applies a rule to the sources and fails with all its complaints.
fn check(files: &[PathBuf], rule: impl Fn(&Path, &str) -> Vec<String>) {
    let mut complaints = Vec::new();
    for path in files {
        let found = rule(path, &read(path));
        complaints.extend(
            found
                .iter()
                .map(|text| format!("{}:{text}", path.display())),
        );
    }
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// The lines (from 1) of `text` for which `found` holds, as complaints.
fn lines_where(text: &str, what: &str, found: impl Fn(&str) -> bool) -> Vec<String> {
    let lines = text.lines().enumerate().filter(|(_, line)| found(line));
    lines.map(|(at, _)| format!("{}: {what}", at + 1)).collect()
}

fn long_file(text: &str, limit: usize) -> Vec<String> {
    let lines = text.lines().count();
    if lines <= limit {
        Vec::new()
    } else {
        vec![format!("1: {lines} lines of at most {limit}")]
    }
}

fn long_functions(path: &Path, text: &str) -> Vec<String> {
    let long = |path: &Path, name: &str| {
        let name = format!("{}::{name}", path.display());
        LONG_FUNCTIONS.iter().any(|(allowed, _)| *allowed == name)
    };
    let found = functions(&mask(text)).into_iter();
    let found = found.filter(|function| function.lines > FUNCTION_LINES_MAX);
    found
        .filter(|function| !long(path, &function.name))
        .map(|function| {
            format!(
                "{}: {} has {} lines",
                function.line, function.name, function.lines
            )
        })
        .collect()
}

fn wide_lines(text: &str) -> Vec<String> {
    lines_where(text, "over 100 columns", |line| {
        line.chars().count() > LINE_COLUMNS_MAX
    })
}

fn opening(text: &str) -> Vec<String> {
    let first = text
        .lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("");
    if first.starts_with("//!") {
        return Vec::new();
    }
    vec!["1: does not open with `//!` saying what it owns".to_owned()]
}

fn words(text: &str, list: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for word in list {
        let whole = word.starts_with(char::is_alphabetic) && !word.contains('.');
        found.extend(lines_where(text, word, |line| {
            if whole {
                has_word(line, word)
            } else {
                line.contains(word)
            }
        }));
    }
    found
}

fn unsafe_code(text: &str) -> Vec<String> {
    lines_where(&mask(text), "unsafe code here", |line| {
        has_word(line, "unsafe")
    })
}

/// Unsafe blocks, functions and implementations without a reason above or beside them.
fn unsafe_without_reason(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let masked = mask(text);
    let mut complaints = Vec::new();
    for (at, code) in masked.lines().enumerate() {
        if !has_word(code, "unsafe") {
            continue;
        }
        let reason = |line: &&str| line.contains("SAFETY:") || line.contains("# Safety");
        let above = lines[..at].iter().rev().take(SAFETY_LINES_MAX);
        let above = above.take_while(|line| !line.trim().is_empty() && !ends_statement(line));
        if !reason(&lines[at]) && !above.into_iter().any(reason) {
            complaints.push(format!("{}: unsafe without `// SAFETY:`", at + 1));
        }
    }
    complaints
}

fn ends_statement(line: &str) -> bool {
    let line = line.trim();
    !line.starts_with("//") && (line.ends_with(';') || line == "}")
}

fn shared_state(text: &str) -> Vec<String> {
    let words = ["Mutex", "RwLock", "Arc"];
    let masked = mask(without_unit_tests(text));
    lines_where(&masked, "a lock or shared ownership", |line| {
        words.iter().any(|word| has_word(line, word))
    })
}

fn mappings(text: &str) -> Vec<String> {
    let masked = mask(without_unit_tests(text));
    lines_where(&masked, "maps memory", |line| {
        line.to_lowercase().contains("mmap")
    })
}

#[test]
fn files_have_a_readable_length() {
    check(&rust_files(), |path, text| {
        if allowed(LONG_FILES, path) {
            Vec::new()
        } else {
            long_file(text, FILE_LINES_MAX)
        }
    });
}

#[test]
fn functions_fit_on_a_screen() {
    check(&rust_files(), long_functions);
}

#[test]
fn lines_keep_to_their_columns() {
    check(&rust_files(), |path, text| {
        if allowed(WIDE_FILES, path) {
            Vec::new()
        } else {
            wide_lines(text)
        }
    });
}

#[test]
fn every_module_says_what_it_owns() {
    check(&rust_files(), |_, text| opening(text));
}

#[test]
fn nothing_is_left_marked_as_unfinished() {
    check(&project_files(TEXT_EXTENSIONS), |_, text| {
        words(text, MARKERS)
    });
}

#[test]
fn no_text_names_a_machine_or_a_registry() {
    check(&project_files(TEXT_EXTENSIONS), |_, text| {
        words(text, FOREIGN_WORDS)
    });
}

#[test]
fn unsafe_code_stays_in_its_rooms() {
    check(&rust_files(), |path, text| {
        if allowed(UNSAFE_PLACES, path) {
            Vec::new()
        } else {
            unsafe_code(text)
        }
    });
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    check(&rust_files(), |_, text| unsafe_without_reason(text));
}

#[test]
fn shards_share_nothing() {
    check(&rust_files(), |path, text| {
        let inside = path.starts_with("shard/src") && !allowed(SHARING_PLACES, path);
        if inside {
            shared_state(text)
        } else {
            Vec::new()
        }
    });
}

#[test]
fn only_the_buffers_are_mapped() {
    check(&rust_files(), |path, text| {
        let product = ["shard/src", "broker/src", "wire/src"]
            .iter()
            .any(|at| path.starts_with(at));
        let inside = product && !allowed(MAPPING_PLACES, path);
        if inside { mappings(text) } else { Vec::new() }
    });
}

#[test]
fn scripts_are_thin() {
    let all = project_files(&["sh", "py", ""]);
    let script = |path: &&PathBuf| path.starts_with("scripts") || path.starts_with(".ci");
    let scripts: Vec<PathBuf> = all.iter().filter(script).cloned().collect();
    assert!(!scripts.is_empty(), "the scripts were not found");
    check(&scripts, |_, text| long_file(text, SCRIPT_LINES_MAX));
}

#[test]
fn each_rule_sees_a_breach_of_itself() {
    let path = Path::new("shard/src/sample.rs");
    let long = format!("fn f() {{\n{}}}\n", "    g();\n".repeat(FUNCTION_LINES_MAX));
    assert_eq!(long_functions(path, &long).len(), 1);
    assert_eq!(
        long_file(&"\n".repeat(FILE_LINES_MAX + 1), FILE_LINES_MAX).len(),
        1
    );
    assert_eq!(wide_lines(&"x".repeat(LINE_COLUMNS_MAX + 1)).len(), 1);
    assert_eq!(opening("use std::io;\n").len(), 1);
    assert_eq!(
        words(&format!("// {}: later", MARKERS[0]), MARKERS).len(),
        1
    );
    assert_eq!(unsafe_code("let a = unsafe { b() };").len(), 1);
    assert_eq!(unsafe_without_reason("a();\nunsafe { b() };").len(), 1);
    assert_eq!(
        unsafe_without_reason("// SAFETY: b has no needs.\nunsafe { b() };").len(),
        0
    );
    assert_eq!(
        unsafe_without_reason("// SAFETY: of a.\na();\nunsafe { b() };").len(),
        1
    );
    assert_eq!(shared_state("use std::sync::Arc;").len(), 1);
    assert_eq!(shared_state("// Arc\nlet s = \"Mutex\";").len(), 0);
    assert_eq!(mappings("libc::mmap(a);").len(), 1);
}

#[test]
fn every_exception_still_has_its_file() {
    for (path, reason) in LONG_FILES.iter().chain(WIDE_FILES) {
        assert!(
            !reason.is_empty() && !read(Path::new(path)).is_empty(),
            "{path}"
        );
    }
}
