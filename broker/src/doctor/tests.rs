//! What is said when the machine lacks something, and that a refused start leaves nothing behind.

use std::path::Path;

use super::checks::{State, buffer_bytes_needed, locked_bytes_needed, run, table};
use super::facts::{Alignment, BufferPlace, Disk, Refusal};
use super::kernel_text::Mount;
use super::*;
use crate::config::value::{Bytes, CoreList, FilePath, Need};

fn config() -> Config {
    let mut config = Config::default();
    config.keys.cores = CoreList(vec![0, 1]);
    config.keys.shards = 2;
    config
}

fn requiring() -> Config {
    let mut config = config();
    config.keys.direct = Need::Require;
    config.keys.memlock = Need::Require;
    config.keys.pinning = Need::Require;
    config
}

fn good_facts() -> Facts {
    Facts {
        kernel: "6.18.44".to_owned(),
        io_uring: Ok(()),
        io_uring_disabled: Some(0),
        memlock_limit: Some(u64::MAX),
        memlock_free: false,
        direct: Ok(Alignment {
            stated: Some((512, 512)),
        }),
        tried_dir: "/data".into(),
        file_system: Some(Mount {
            point: "/".into(),
            kind: "ext4".into(),
            options: "rw".into(),
        }),
        disk: Some(Disk {
            name: "nvme0n1".into(),
            sectors: Some((512, 4096)),
            interrupt_cpus: vec![1],
            cache: Some("write back".into()),
        }),
        disk_free: Some(1 << 40),
        cores_allowed: vec![0, 1],
        cores_host: 2,
        cpu_quota: None,
        pinning: Ok(()),
        memory_limit: Some(64 << 30),
        clock: Some("tsc".to_owned()),
        buffers: BufferPlace {
            dir: "/dev/shm".into(),
            kind: Some("tmpfs".into()),
            space: Some((8 << 30, 8 << 30)),
            used_by_us: 0,
            writable: Ok(()),
        },
        in_container: false,
        open_files: Some(1 << 20),
    }
}

fn refusal(errno: i32) -> Refusal {
    Refusal::from(std::io::Error::from_raw_os_error(errno))
}

/// Under `auto` the start goes on with one warning, under `require` it is refused with the same
/// words.
fn warns_or_refuses(facts: &Facts) -> String {
    let granted = decide(&config(), facts).unwrap();
    let refused = decide(&requiring(), facts).unwrap_err();
    assert_eq!(granted.warnings, refused.reasons);
    assert_eq!(granted.warnings.len(), 1, "{:?}", granted.warnings);
    granted.warnings[0].clone()
}

fn contains_all(words: &str, parts: &[&str]) {
    for part in parts {
        assert!(words.contains(part), "{part:?} is missing in: {words}");
    }
}

#[test]
fn a_good_machine_grants_everything_without_a_word() {
    let granted = decide(&requiring(), &good_facts()).unwrap();
    assert!(granted.direct && granted.memlock && granted.pinning);
    assert_eq!(granted.buffer_dir.as_deref(), Some(Path::new("/dev/shm")));
    assert_eq!(
        (granted.warnings, granted.interrupt_cpus),
        (vec![], vec![1])
    );
    assert!(
        run(&config(), &good_facts())
            .iter()
            .all(|check| check.state == State::Good)
    );
}

#[test]
fn too_little_lockable_memory_names_limit_value_need_and_line() {
    let facts = Facts {
        memlock_limit: Some(65_536),
        ..good_facts()
    };
    let words = warns_or_refuses(&facts);
    let need = locked_bytes_needed(&config()).to_string();
    contains_all(
        &words,
        &[
            "memlock",
            "RLIMIT_MEMLOCK",
            "65536 bytes",
            &need,
            "2 shards on 2 cores",
            "pinion.bufferBytes=67108864",
            "LimitMEMLOCK=infinity",
            "--ulimit memlock=-1:-1",
            "limits.d",
        ],
    );
    assert!(!decide(&config(), &facts).unwrap().memlock);
}

#[test]
fn the_need_for_locked_memory_grows_with_shards_and_buffers() {
    let small = locked_bytes_needed(&config());
    let mut more = config();
    more.keys.shards = 4;
    more.keys.buffer_bytes = Bytes(128 << 20);
    assert!(locked_bytes_needed(&more) > 2 * small);
    assert!(buffer_bytes_needed(&more) >= 4 * (128 << 20));
}

#[test]
fn following_the_advice_on_locked_memory_is_enough() {
    let need = locked_bytes_needed(&config());
    let raised = need.div_ceil(1024) * 1024;
    for facts in [
        Facts {
            memlock_limit: Some(raised),
            ..good_facts()
        },
        Facts {
            memlock_limit: Some(65_536),
            memlock_free: true,
            ..good_facts()
        },
    ] {
        assert!(decide(&requiring(), &facts).unwrap().memlock);
    }
}

#[test]
fn forbidden_io_uring_is_refused_whatever_the_settings_say() {
    let by_filter = Facts {
        io_uring: Err(refusal(libc::EPERM)),
        ..good_facts()
    };
    let by_setting = Facts {
        io_uring_disabled: Some(2),
        ..by_filter.clone()
    };
    let by_kernel = Facts {
        io_uring: Err(refusal(libc::ENOSYS)),
        ..good_facts()
    };
    for config in [config(), requiring()] {
        let words = decide(&config, &by_filter).unwrap_err().to_string();
        contains_all(
            &words,
            &[
                "io_uring",
                "seccomp",
                "--security-opt",
                "SystemCallFilter=",
                "io_uring_setup",
            ],
        );
        let words = decide(&config, &by_setting).unwrap_err().to_string();
        contains_all(
            &words,
            &[
                "kernel.io_uring_disabled = 2",
                "sysctl -w kernel.io_uring_disabled=0",
            ],
        );
        let words = decide(&config, &by_kernel).unwrap_err().to_string();
        contains_all(&words, &["CONFIG_IO_URING", "6.1"]);
    }
}

#[test]
fn a_file_system_without_direct_writes_is_named_with_its_directory() {
    let mount = Mount {
        point: "/data".into(),
        kind: "ramfs".into(),
        options: "rw".into(),
    };
    let facts = Facts {
        direct: Err(refusal(libc::EINVAL)),
        file_system: Some(mount),
        ..good_facts()
    };
    contains_all(
        &warns_or_refuses(&facts),
        &["direct", "O_DIRECT", "/data", "ramfs", "ext4", "XFS"],
    );
    assert!(!decide(&config(), &facts).unwrap().direct);
}

#[test]
fn a_directory_that_cannot_be_written_refuses_whatever_the_settings_say() {
    let facts = Facts {
        direct: Err(refusal(libc::EACCES)),
        ..good_facts()
    };
    let words = decide(&config(), &facts).unwrap_err().to_string();
    contains_all(&words, &["/data", "denied", "chown"]);
}

#[test]
fn refused_pinning_is_told_with_the_cpus_in_question() {
    let facts = Facts {
        pinning: Err(Refusal {
            errno: None,
            words: "the system refused to pin".into(),
        }),
        cores_allowed: vec![1],
        cores_host: 8,
        ..good_facts()
    };
    contains_all(
        &warns_or_refuses(&facts),
        &[
            "pinning",
            "refused to pin",
            "may use 1 of 8",
            "AllowedCPUs=",
        ],
    );
}

#[test]
fn fewer_cores_than_the_host_shows_is_no_reason_to_complain() {
    let mut config = requiring();
    config.keys.cores = CoreList(vec![1]);
    config.keys.shards = 1;
    let facts = Facts {
        cores_allowed: vec![1],
        cores_host: 8,
        ..good_facts()
    };
    let granted = decide(&config, &facts).unwrap();
    assert!(granted.pinning && granted.warnings.is_empty());
    let checks = run(&config, &facts);
    let pinning = checks.iter().find(|check| check.name == "pinning").unwrap();
    contains_all(
        &pinning.value,
        &["uses CPU 1", "may use 1 of 8 on the host"],
    );
}

#[test]
fn buffers_that_end_with_the_container_are_not_used_unless_a_path_is_named() {
    let facts = Facts {
        in_container: true,
        ..good_facts()
    };
    let granted = decide(&requiring(), &facts).unwrap();
    assert_eq!(granted.buffer_dir, None);
    contains_all(
        &granted.warnings[0],
        &[
            "bufferDir",
            "container",
            "pinion.bufferDir=",
            "as safe, slower",
        ],
    );
    let mut named = config();
    named.keys.buffer_dir = BufferDir::Path("/dev/shm".into());
    assert!(decide(&named, &facts).unwrap().buffer_dir.is_some());
    let mut none = config();
    none.keys.buffer_dir = BufferDir::None;
    let granted = decide(&none, &facts).unwrap();
    assert_eq!((granted.buffer_dir, granted.warnings.len()), (None, 0));
}

#[test]
fn a_buffer_directory_that_is_too_small_says_how_large_it_must_be() {
    let space = Some((64 << 20, 64 << 20));
    let facts = Facts {
        buffers: BufferPlace {
            space,
            ..good_facts().buffers
        },
        ..good_facts()
    };
    let granted = decide(&config(), &facts).unwrap();
    contains_all(
        &granted.warnings[0],
        &["/dev/shm", "--shm-size", "remount,size=132M"],
    );
    // What an earlier run left there is used again, not added.
    let used_by_us = 128 << 20;
    let facts = Facts {
        buffers: BufferPlace {
            space,
            used_by_us,
            ..good_facts().buffers
        },
        ..good_facts()
    };
    assert!(decide(&config(), &facts).unwrap().buffer_dir.is_some());
}

#[test]
fn a_named_buffer_directory_that_does_not_work_refuses() {
    let mut config = config();
    config.keys.buffer_dir = BufferDir::Path("/buffers".into());
    let place = BufferPlace {
        writable: Err(refusal(libc::ENOENT)),
        ..good_facts().buffers
    };
    let facts = Facts {
        buffers: place,
        ..good_facts()
    };
    assert!(
        decide(&config, &facts)
            .unwrap_err()
            .to_string()
            .contains("bufferDir")
    );
}

#[test]
fn hints_never_hold_up_a_start() {
    let facts = Facts {
        kernel: "5.15.0".into(),
        clock: Some("hpet".into()),
        open_files: Some(256),
        disk_free: Some(1 << 20),
        cpu_quota: Some(50),
        memory_limit: Some(1 << 20),
        ..good_facts()
    };
    let granted = decide(&requiring(), &facts).unwrap();
    assert!(granted.warnings.is_empty(), "{:?}", granted.warnings);
    let text = table(&run(&config(), &facts));
    contains_all(
        &text,
        &[
            "clocksource=tsc",
            "LimitNOFILE=21024",
            "hint",
            "fix:",
            "need:",
            "quota 0.50",
        ],
    );
}

#[test]
fn looking_at_this_machine_leaves_no_file_behind() {
    let exe = std::env::current_exe().unwrap();
    let dir = exe
        .parent()
        .unwrap()
        .join(format!("doctor-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut config = config();
    config.keys.store_path_commit_log = FilePath(dir.join("not/yet/made"));
    config.keys.cores = CoreList(crate::config::allowed_cores());
    let started = std::time::Instant::now();
    let checks = examine(&config);
    assert!(started.elapsed() < std::time::Duration::from_secs(2));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(
        checks
            .iter()
            .all(|check| !check.value.is_empty() && !check.need.is_empty())
    );
    assert_eq!(
        checks
            .iter()
            .find(|check| check.name == "pinning")
            .unwrap()
            .state,
        State::Good
    );
}
