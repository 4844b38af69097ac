//! What becomes of control files when the power goes or bytes rot.

use super::*;

/// A directory under the build's own, on a real file system, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let exe = std::env::current_exe().unwrap();
        let path = exe
            .parent()
            .unwrap()
            .join(format!("settings-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const NAME: &str = "topics.json";

fn table(number: u64) -> Vec<u8> {
    format!("{{\"offsetTable\":{{\"t@g\":{{0:{number},1:\"}}\"}}}}}}").into_bytes()
}

fn saved(dir: &Dir, count: u64) {
    for number in 1..=count {
        assert_eq!(
            save(&dir.0, NAME, &table(number)).unwrap().generation,
            number
        );
    }
}

type Damage = fn(&[u8]) -> Vec<u8>;

fn damages() -> Vec<(&'static str, Damage)> {
    vec![
        ("empty", |_| Vec::new()),
        ("cut in half", |bytes| bytes[..bytes.len() / 2].to_vec()),
        ("one byte flipped", |bytes| {
            let mut bytes = bytes.to_vec();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            bytes
        }),
        ("zeros", |bytes| vec![0; bytes.len()]),
        ("longer", |bytes| [bytes, b"x"].concat()),
    ]
}

#[test]
fn nothing_saved_is_nothing_loaded() {
    let dir = Dir::new("nothing");
    assert_eq!(load(&dir.0, NAME).unwrap(), None);
    assert!(matches!(load(&dir.0, "../x"), Err(SettingsError::Name(_))));
}

#[test]
fn a_first_save_cut_off_before_its_list_is_nothing_saved() {
    for cut in [0, 7, table(1).len()] {
        let dir = Dir::new("first");
        fs::write(dir.file("topics.json.tmp"), &table(1)[..cut]).unwrap();
        fs::write(dir.file("topics.json.sum.tmp"), "generation 1 len").unwrap();
        assert_eq!(load(&dir.0, NAME).unwrap(), None, "{cut} bytes");
        assert_eq!(save(&dir.0, NAME, &table(2)).unwrap().generation, 1);
        assert_eq!(load(&dir.0, NAME).unwrap().unwrap().bytes, table(2));
    }
}

#[test]
fn the_last_saved_generation_is_loaded_and_older_ones_are_kept() {
    let dir = Dir::new("last");
    saved(&dir, 5);
    let loaded = load(&dir.0, NAME).unwrap().unwrap();
    assert_eq!(
        (loaded.bytes, loaded.generation, loaded.fallback),
        (table(5), 5, None)
    );
    assert_eq!(fs::read(dir.file("topics.json.1")).unwrap(), table(4));
    assert_eq!(fs::read(dir.file("topics.json.2")).unwrap(), table(3));
    assert!(!dir.file("topics.json.3").exists());
}

#[test]
fn a_damaged_file_falls_back_one_generation_and_says_so() {
    for (kind, damage) in damages() {
        let dir = Dir::new("fallback");
        saved(&dir, 4);
        let bytes = fs::read(dir.file(NAME)).unwrap();
        fs::write(dir.file(NAME), damage(&bytes)).unwrap();
        let loaded = load(&dir.0, NAME).unwrap().unwrap();
        assert_eq!((loaded.generation, &loaded.bytes), (3, &table(3)), "{kind}");
        let words = loaded.fallback.unwrap();
        for part in ["topics.json", "generation 3", "topics.json.1", "ago"] {
            assert!(words.contains(part), "{kind}: {words}");
        }
    }
}

#[test]
fn damage_to_any_single_file_never_costs_more_than_one_generation() {
    for victim in [
        "topics.json",
        "topics.json.1",
        "topics.json.2",
        "topics.json.sum",
        "topics.json.sum2",
    ] {
        for (kind, damage) in damages() {
            let dir = Dir::new("single");
            saved(&dir, 4);
            let bytes = fs::read(dir.file(victim)).unwrap();
            fs::write(dir.file(victim), damage(&bytes)).unwrap();
            let expected = if victim == NAME { 3 } else { 4 };
            let loaded = load(&dir.0, NAME).unwrap().unwrap();
            assert_eq!(loaded.generation, expected, "{victim} {kind}");
            // Life goes on from there, with a number that was never used.
            assert_eq!(
                save(&dir.0, NAME, &table(9)).unwrap().generation,
                5,
                "{victim} {kind}"
            );
            assert_eq!(
                load(&dir.0, NAME).unwrap().unwrap().bytes,
                table(9),
                "{victim} {kind}"
            );
        }
    }
}

#[test]
fn a_damaged_current_file_does_not_push_out_whole_generations() {
    let dir = Dir::new("push");
    saved(&dir, 3);
    fs::write(dir.file(NAME), b"garbage").unwrap();
    save(&dir.0, NAME, &table(8)).unwrap();
    assert_eq!(
        fs::read(dir.file("topics.json.damaged")).unwrap(),
        b"garbage"
    );
    assert_eq!(fs::read(dir.file("topics.json.1")).unwrap(), table(2));
}

#[test]
fn when_all_generations_are_bad_the_error_names_the_file_and_no_table_is_given() {
    for (kind, damage) in damages() {
        let dir = Dir::new("all");
        saved(&dir, 4);
        for name in ["topics.json", "topics.json.1", "topics.json.2"] {
            let bytes = fs::read(dir.file(name)).unwrap();
            fs::write(dir.file(name), damage(&bytes)).unwrap();
        }
        let error = load(&dir.0, NAME).unwrap_err();
        assert!(matches!(error, SettingsError::AllBad { .. }), "{kind}");
        assert!(error.to_string().contains("topics.json"), "{kind}: {error}");
    }
}

#[test]
fn files_that_vanished_are_not_taken_for_a_new_store() {
    let dir = Dir::new("gone");
    saved(&dir, 3);
    for name in ["topics.json", "topics.json.1", "topics.json.2"] {
        fs::remove_file(dir.file(name)).unwrap();
    }
    assert!(matches!(
        load(&dir.0, NAME),
        Err(SettingsError::AllBad { .. })
    ));
}

#[test]
fn a_save_cut_short_at_any_step_leaves_the_old_or_the_new_generation() {
    // The directory as it is after each step of a save, made from a store before and after it.
    let states: [&[(&str, u64)]; 4] = [
        &[
            ("topics.json.tmp", 5),
            ("topics.json", 4),
            ("topics.json.1", 3),
        ],
        &[
            ("topics.json.tmp", 5),
            ("topics.json", 4),
            ("topics.json.1", 4),
        ],
        &[
            ("topics.json.tmp", 5),
            ("topics.json.1", 4),
            ("topics.json.2", 3),
        ],
        &[
            ("topics.json", 5),
            ("topics.json.1", 4),
            ("topics.json.2", 3),
        ],
    ];
    for (step, state) in states.iter().enumerate() {
        for cut_of_list in [false, true] {
            let dir = Dir::new("cut");
            saved(&dir, 4);
            let list_before = fs::read(dir.file("topics.json.sum2")).unwrap();
            save(&dir.0, NAME, &table(5)).unwrap();
            for name in ["topics.json", "topics.json.1", "topics.json.2"] {
                fs::remove_file(dir.file(name)).unwrap();
            }
            for (name, number) in *state {
                fs::write(dir.file(name), table(*number)).unwrap();
            }
            if cut_of_list {
                fs::write(dir.file("topics.json.sum2"), &list_before).unwrap();
            }
            let loaded = load(&dir.0, NAME).unwrap().unwrap();
            assert_eq!(loaded.bytes, table(5), "step {step}");
            assert_eq!(
                save(&dir.0, NAME, &table(6)).unwrap().generation,
                6,
                "step {step}"
            );
            assert_eq!(
                load(&dir.0, NAME).unwrap().unwrap().bytes,
                table(6),
                "step {step}"
            );
        }
    }
}

#[test]
fn a_half_written_temporary_file_is_ignored() {
    let dir = Dir::new("half");
    saved(&dir, 2);
    fs::write(dir.file("topics.json.tmp"), &table(3)[..7]).unwrap();
    assert_eq!(load(&dir.0, NAME).unwrap().unwrap().generation, 2);
}

#[test]
fn a_file_of_the_java_broker_is_taken_as_it_is_and_kept_as_a_generation() {
    let dir = Dir::new("java");
    fs::write(dir.file(NAME), table(7)).unwrap();
    let loaded = load(&dir.0, NAME).unwrap().unwrap();
    assert_eq!(
        (loaded.bytes, loaded.generation, loaded.fallback),
        (table(7), 0, None)
    );
    save(&dir.0, NAME, &table(8)).unwrap();
    fs::write(dir.file(NAME), b"").unwrap();
    assert_eq!(load(&dir.0, NAME).unwrap().unwrap().bytes, table(7));
}

#[test]
fn a_half_file_of_the_java_broker_is_refused() {
    for (kind, damage) in damages() {
        if kind == "one byte flipped" {
            continue;
        }
        let dir = Dir::new("javahalf");
        fs::write(dir.file(NAME), damage(&table(7))).unwrap();
        assert!(
            matches!(load(&dir.0, NAME), Err(SettingsError::AllBad { .. })),
            "{kind}"
        );
    }
}

#[test]
fn both_lists_of_checksums_lost_still_starts_and_says_so() {
    let dir = Dir::new("lists");
    saved(&dir, 3);
    fs::write(dir.file("topics.json.sum"), vec![0; 100]).unwrap();
    fs::write(dir.file("topics.json.sum2"), b"").unwrap();
    let loaded = load(&dir.0, NAME).unwrap().unwrap();
    assert_eq!(loaded.bytes, table(3));
    assert!(loaded.fallback.unwrap().contains("checksums"));
}

#[test]
fn a_replaced_file_is_whole_and_the_one_before_is_kept() {
    let dir = Dir::new("replace");
    let path = dir.file("broker.conf");
    replace_file(&path, b"a=1\n").unwrap();
    replace_file(&path, b"a=2\n").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"a=2\n");
    assert_eq!(fs::read(dir.file("broker.conf.bak")).unwrap(), b"a=1\n");
}

#[test]
fn a_kill_in_the_save_after_a_cut_one_leaves_a_whole_generation() {
    let dir = Dir::new("cut-twice");
    let (current, temporary) = (dir.file(NAME), dir.file("topics.json.tmp"));
    // The first save ended behind its list of checksums, before the file was put in place.
    save(&dir.0, NAME, &table(1)).unwrap();
    fs::rename(&current, &temporary).unwrap();
    // The next one ends before its own file is in place, its temporary file half written.
    save(&dir.0, NAME, &table(2)).unwrap();
    fs::remove_file(&current).unwrap();
    fs::write(&temporary, b"{\"off").unwrap();
    let loaded = load(&dir.0, NAME).unwrap().unwrap();
    assert_eq!(loaded.bytes, table(1));
}
