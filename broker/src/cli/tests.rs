//! What a command line comes to.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;

use super::*;
use crate::config::address::AddressList;
use crate::config::value::{CoreList, Value as _};

fn host() -> HostFacts {
    fn detected(_: &AddressList) -> (IpAddr, String) {
        ([10, 0, 0, 7].into(), "detected: default route".to_owned())
    }
    HostFacts {
        name: "node-1".to_owned(),
        cores_allowed: vec![0, 1, 2, 3],
        detect_address: detected,
        home: PathBuf::from("/home/user"),
        environment: Vec::new(),
    }
}

fn parsed(line: &str) -> Command {
    let words = words(line.split(' ').map(OsString::from));
    let line = CommandLine::try_parse_from(words).unwrap();
    line.command.unwrap_or(Command::Standalone(line.standalone))
}

fn settings(line: &str) -> Settings {
    match parsed(line) {
        Command::Standalone(args) => Settings::standalone(&args, &host()).unwrap(),
        Command::Broker(args) => Settings::broker(&args, &host()).unwrap(),
        Command::Namesrv(args) => Settings::namesrv(&args, &host()).unwrap(),
        Command::Doctor(args) => Settings::doctor(&args, &host()).unwrap(),
        Command::Null(args) => Settings::null(&args, &host()).unwrap(),
        Command::Inspect(_) | Command::Fuse(_) | Command::Explain(_) => panic!("no settings"),
    }
}

fn temporary_file(name: &str, text: &str) -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let path = exe
        .parent()
        .unwrap()
        .join(format!("cli-{name}-{}.conf", std::process::id()));
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_command_line_is_consistent_and_its_help_names_every_command() {
    CommandLine::command().debug_assert();
    let help = CommandLine::command().render_long_help().to_string();
    for word in [
        "standalone",
        "broker",
        "namesrv",
        "doctor",
        "inspect",
        "--print-config",
        "--data",
        "--set",
        "NAMESRV_ADDR",
        "Exit status",
    ] {
        assert!(help.contains(word), "{word} is missing in:\n{help}");
    }
}

#[test]
fn no_arguments_run_name_server_and_broker_with_data_here() {
    let settings = settings("pinion");
    assert!(settings.broker);
    assert_eq!(settings.config.listen_port, 10_911);
    assert_eq!(
        settings.config.store_path_root.as_path(),
        Path::new("./data")
    );
    assert_eq!(settings.config.namesrv_addr.text(), "127.0.0.1:9876");
    let namesrv = settings.namesrv.unwrap();
    assert_eq!(namesrv.config.listen_port, 9_876);
    assert_eq!(namesrv.data, Path::new("./data/namesrv"));
}

#[test]
fn a_broker_that_stores_nothing_is_told_to_leave_nothing_behind() {
    let all = settings("pinion null --port 20911 --namesrv-port 19876 --cores 1");
    assert_eq!(all.config.listen_port, 20_911);
    assert_eq!(all.config.namesrv_addr.text(), "127.0.0.1:19876");
    assert_eq!(
        (all.config.shards, all.config.cores.0.clone()),
        (1, vec![1])
    );
    assert!(
        all.config
            .store_path_root
            .as_path()
            .starts_with(std::env::temp_dir())
    );
}

#[test]
fn standalone_options_are_over_the_file() {
    let file = temporary_file(
        "standalone",
        "listenPort=1\nstorePathRootDir=/file\nstorePathCommitLog=/file/log\npinion.shards=7\n",
    );
    let line = format!(
        "pinion standalone --data /d --namesrv-port 19876 --broker-port 20911 \
         --shards 4 --cores 1-2 -c {}",
        file.display()
    );
    let all = settings(&line);
    let config = &all.config;
    assert_eq!(
        (config.listen_port, config.ha_listen_port, config.shards),
        (20_911, 20_912, 4)
    );
    assert_eq!(config.store_path_root.as_path(), Path::new("/d"));
    assert_eq!(
        config.store_path_commit_log.as_path(),
        Path::new("/d/commitlog")
    );
    assert_eq!(config.cores, CoreList(vec![1, 2]));
    assert_eq!(config.namesrv_addr.text(), "127.0.0.1:19876");
    assert_eq!(
        config.origin_of("listenPort").unwrap().to_string(),
        "command line --broker-port"
    );
    assert_eq!(all.namesrv.unwrap().config.listen_port, 19_876);
    let without = settings(&format!("pinion -c {}", file.display()));
    assert_eq!((without.config.listen_port, without.config.shards), (1, 7));
    std::fs::remove_file(file).unwrap();
}

#[test]
fn a_log_that_is_set_apart_stays_there_when_data_names_the_rest() {
    let all = settings("pinion standalone --data /d --set storePathCommitLog=/fast/log");
    assert_eq!(all.config.store_path_root.as_path(), Path::new("/d"));
    assert_eq!(
        all.config.store_path_commit_log.as_path(),
        Path::new("/fast/log")
    );
    assert_eq!(
        all.config
            .origin_of("storePathCommitLog")
            .unwrap()
            .to_string(),
        "command line --set"
    );
}

#[test]
fn broker_takes_the_options_of_rocketmq() {
    let file = temporary_file("broker", "brokerName=a\nnamesrvAddr=file:1\n");
    for program in ["pinion broker", "/usr/bin/mqbroker"] {
        let settings = settings(&format!(
            "{program} -c {} -n ns1:9876;ns2:9876",
            file.display()
        ));
        assert_eq!(settings.config.namesrv_addr.text(), "ns1:9876;ns2:9876");
        assert_eq!(settings.config.broker_name.0, "a");
        assert!(settings.broker && settings.namesrv.is_none());
    }
    assert!(matches!(parsed("mqbroker -p"), Command::Broker(args) if args.print_config));
    assert!(matches!(parsed("mqbroker -m"), Command::Broker(args) if args.print_important));
    std::fs::remove_file(file).unwrap();
}

#[test]
fn namesrv_takes_a_port_or_prints_when_there_is_none() {
    let named = settings("mqnamesrv -p 9900 --data /n");
    assert!(!named.broker);
    let plan = named.namesrv.unwrap();
    assert_eq!(plan.server_config().listen_port, 9_900);
    assert_eq!(plan.kv_path(), Path::new("/n/namesrv/kvConfig.json"));
    assert_eq!(named.config.cores, CoreList(vec![0]));
    assert!(matches!(parsed("mqnamesrv -p"), Command::Namesrv(args) if args.port == Some(None)));
}

#[test]
fn any_key_can_be_set_and_a_malformed_one_names_the_option() {
    let set = settings("pinion --set pinion.bufferBytes=8MiB --set flushDiskType=SYNC_FLUSH");
    assert_eq!(set.config.text_of("pinion.bufferBytes").unwrap(), "8388608");
    for (line, part) in [
        ("pinion --set flushDiskType=SOON", "command line --set"),
        ("pinion --set nothing", "KEY=VALUE"),
        ("pinion --cores 9", "CPU 9"),
        ("pinion --broker-port 0", "command line --broker-port"),
        ("pinion --shards many", "command line --shards"),
    ] {
        let Command::Standalone(args) = parsed(line) else {
            panic!("{line}")
        };
        let words = Settings::standalone(&args, &host())
            .unwrap_err()
            .to_string();
        assert!(words.contains(part), "{line}: {words}");
    }
}

#[test]
fn important_settings_are_all_known() {
    let all = settings("pinion");
    for key in IMPORTANT_KEYS {
        assert!(all.config.text_of(key).is_some(), "{key}");
    }
    let text = printed(&all, Print::Important);
    assert!(text.contains("brokerIP1=10.0.0.7\n"), "{text}");
    let text = printed(&all, Print::All);
    assert!(
        text.contains("storePathRootDir=./data  # default of standalone\n"),
        "{text}"
    );
    assert!(text.contains("# name server\n"), "{text}");
}
