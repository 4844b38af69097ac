//! Keeps the arrows between the crates pointing one way, by reading manifests and sources.
//!
//! Invariant: `wire` depends on nothing of ours, `shard` only on `wire` and there only on its
//! `message` module, `broker` on both, `bench` only on `wire`, the name server never on `shard`.

use std::path::Path;

use tests::source::{mask, project_files, read, word_positions};

/// The crates, each with the crates of ours it may depend on.
const EDGES: &[(&str, &[&str])] = &[
    ("wire", &[]),
    ("shard", &["wire"]),
    ("broker", &["wire", "shard"]),
    ("bench", &["wire"]),
];
/// Our crates as they are named in manifests and in code.
const OURS: &[&str] = &["wire", "shard", "broker", "pinion", "bench", "tests"];

/// Our crates that a manifest depends on, whatever the kind of dependency.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            inside = section.ends_with("dependencies");
            if let Some((_, name)) = section.split_once("dependencies.") {
                found.push(name.to_owned());
            }
        } else if inside {
            let name = line.split(['.', '=', ' ']).next().unwrap_or("");
            found.push(name.to_owned());
            if let Some((_, renamed)) = line.split_once("package = \"") {
                found.push(renamed.split('"').next().unwrap_or("").to_owned());
            }
        }
    }
    found.retain(|name| OURS.contains(&name.as_str()));
    found
}

/// Every `crate_name::next` of a source: the line (from 1) and what follows the crate's name.
fn uses(text: &str, crate_name: &str) -> Vec<(usize, String)> {
    let masked = mask(text);
    let mut found = Vec::new();
    for at in word_positions(&masked, crate_name) {
        let before = masked[..at].trim_end();
        let own_module = before.ends_with("::") && !before.ends_with("{::");
        let after = masked[at + crate_name.len()..].trim_start();
        let named = before.ends_with("use") || before.ends_with("extern crate");
        if own_module || !(after.starts_with("::") || named) {
            continue;
        }
        let line = masked[..at].matches('\n').count() + 1;
        let next = after.trim_start_matches("::").trim_start();
        let end = next
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(next.len());
        found.push((line, next[..end].to_owned()));
    }
    found
}

fn complaints_about_use(path: &Path, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut refuse = |crate_name: &str, allowed: fn(&str) -> bool| {
        for (line, next) in uses(text, crate_name) {
            if !allowed(&next) {
                complaints.push(format!("{}:{line}: {crate_name}::{next}", path.display()));
            }
        }
    };
    for (owner, allowed) in EDGES {
        if !path.starts_with(Path::new(owner).join("src")) {
            continue;
        }
        for other in OURS.iter().filter(|name| !allowed.contains(name)) {
            // The broker's own library bears the name of its package.
            let own = *other == *owner || (*owner == "broker" && *other == "pinion");
            if !own {
                refuse(other, |_| false);
            }
        }
    }
    if path.starts_with("shard/src") {
        refuse("wire", |next| next == "message");
    }
    if path.starts_with("broker/src/namesrv") || path == Path::new("broker/src/namesrv.rs") {
        refuse("shard", |_| false);
    }
    complaints
}

#[test]
fn manifests_point_one_way() {
    for (name, allowed) in EDGES {
        let manifest = read(&Path::new(name).join("Cargo.toml"));
        for dependency in dependencies(&manifest) {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{name} depends on {dependency}"
            );
        }
    }
}

#[test]
fn sources_use_only_what_their_crate_may() {
    let files = project_files(&["rs"]);
    let complaints: Vec<String> = files
        .iter()
        .flat_map(|path| complaints_about_use(path, &read(path)))
        .collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn the_rules_see_a_breach_of_themselves() {
    let shard = Path::new("shard/src/sample.rs");
    assert_eq!(
        complaints_about_use(shard, "use wire::frame::Frame;").len(),
        1
    );
    assert_eq!(
        complaints_about_use(shard, "use wire::message::Record;").len(),
        0
    );
    assert_eq!(complaints_about_use(shard, "use pinion::config;").len(), 1);
    let namesrv = Path::new("broker/src/namesrv/routes.rs");
    assert_eq!(
        complaints_about_use(namesrv, "let a = shard::open();").len(),
        1
    );
    assert_eq!(
        complaints_about_use(namesrv, "// shard::open\nlet shard = 1;").len(),
        0
    );
    let sample =
        "[dependencies]\nshard.workspace = true\n[dev-dependencies]\nbench = { path = \"\" }";
    assert_eq!(dependencies(sample), ["shard", "bench"]);
}
