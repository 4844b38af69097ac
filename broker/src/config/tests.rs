//! How settings are found, refused, shown and changed.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::table::{Effect, Table as _};
use super::value::{BrokerRole, Bytes, CoreList, FlushDiskType};
use super::*;

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let exe = std::env::current_exe().unwrap();
        let path = exe
            .parent()
            .unwrap()
            .join(format!("config-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, text: &str) -> PathBuf {
        let path = self.0.join("broker.conf");
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn detected(_: &address::AddressList) -> (IpAddr, String) {
    ([10, 9, 8, 7].into(), "detected: default route".to_owned())
}

fn host() -> HostFacts {
    HostFacts {
        name: "node-1".to_owned(),
        cores_allowed: vec![1, 3],
        detect_address: detected,
        home: PathBuf::from("/home/user"),
        environment: Vec::new(),
    }
}

fn from_file(name: &str, text: &str) -> Result<Config, ConfigError> {
    let dir = Dir::new(name);
    let sources = Sources {
        file: Some(dir.write(text)),
        ..Sources::default()
    };
    Config::load(&sources, &host())
}

fn refusal(text: &str) -> String {
    match from_file("refusal", text) {
        Ok(_) => panic!("{text:?} must be refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn defaults_are_those_of_rocketmq() {
    let config = Config::load(&Sources::default(), &host()).unwrap();
    let expected = [
        ("brokerClusterName", "DefaultCluster"),
        ("brokerName", "node-1"),
        ("brokerId", "0"),
        ("listenPort", "10911"),
        ("haListenPort", "10912"),
        ("brokerIP1", "10.9.8.7"),
        ("storePathRootDir", "/home/user/store"),
        ("storePathCommitLog", "/home/user/store/commitlog"),
        ("mappedFileSizeCommitLog", "1073741824"),
        ("flushDiskType", "ASYNC_FLUSH"),
        ("brokerRole", "ASYNC_MASTER"),
        ("deleteWhen", "04"),
        ("fileReservedTime", "72"),
        ("diskMaxUsedSpaceRatio", "75"),
        ("maxMessageSize", "4194304"),
        ("defaultTopicQueueNums", "8"),
        ("transactionCheckMax", "15"),
        ("waitTimeMillsInSendQueue", "200"),
        ("metricsPromExporterPort", "5557"),
        ("pinion.shards", "2"),
        ("pinion.cores", "1,3"),
        ("pinion.bufferBytes", "67108864"),
    ];
    for (key, value) in expected {
        assert_eq!(config.text_of(key).as_deref(), Some(value), "{key}");
    }
    assert_eq!(
        (config.vip_port(), config.advertised().as_str()),
        (Some(10_909), "10.9.8.7:10911")
    );
    assert!(config.notes().is_empty(), "{:?}", config.notes());
}

#[test]
fn every_default_is_a_value_its_own_parser_takes() {
    let mut keys = BrokerKeys::default();
    for info in BrokerKeys::KEYS {
        let text = keys.text_of(info.name).unwrap();
        let outcome = keys.set_text(info.name, &text);
        assert_eq!(outcome, Ok(()), "{}={text}", info.name);
        assert!(
            !BrokerKeys::IGNORED.contains(&info.name),
            "{} is in both lists",
            info.name
        );
    }
}

#[test]
fn command_line_is_over_environment_over_file_over_default() {
    let dir = Dir::new("layers");
    let file =
        dir.write("brokerName=file\nbrokerClusterName=file\nnamesrvAddr=file:1\nbrokerId=1\n");
    let environment = [
        ("BROKER_CLUSTER_NAME", "env"),
        ("NAMESRV_ADDR", "env:2"),
        ("PINION_CONF_pinion_shards", "4"),
        ("REPLICATION_MODE", "SYNC"),
        ("UNRELATED", "x # y"),
    ];
    let sources = Sources {
        file: Some(file.clone()),
        environment: environment
            .map(|(n, v)| (n.to_owned(), v.to_owned()))
            .to_vec(),
        command_line: vec![Setting {
            key: "namesrvAddr".into(),
            value: "line:3".into(),
            option: "-n".into(),
        }],
        ..Sources::default()
    };
    let config = Config::load(&sources, &host()).unwrap();
    let seen = |key: &str| {
        (
            config.text_of(key).unwrap(),
            config.origin_of(key).unwrap().to_string(),
        )
    };
    assert_eq!(
        seen("brokerName"),
        ("file".into(), format!("{} line 1", file.display()))
    );
    assert_eq!(
        seen("brokerClusterName"),
        ("env".into(), "environment BROKER_CLUSTER_NAME".into())
    );
    assert_eq!(
        seen("namesrvAddr"),
        ("line:3".into(), "command line -n".into())
    );
    assert_eq!(seen("pinion.shards").0, "4");
    assert_eq!(seen("listenPort"), ("10911".into(), "default".into()));
    assert_eq!(config.broker_role, BrokerRole::SyncMaster);
    assert!(
        config
            .notes()
            .iter()
            .any(|note| note.contains("NAMESRV_ADDR overrules"))
    );
}

#[test]
fn a_comment_after_an_address_stops_the_start_with_file_and_line() {
    let words = refusal("# head\nbrokerName=a\nbrokerIP1=10.0.0.1 # the lan side\n");
    for part in [
        "broker.conf line 3",
        "brokerIP1",
        "10.0.0.1 # the lan side",
        "line of its own",
    ] {
        assert!(words.contains(part), "{words}");
    }
}

#[test]
fn malformed_values_of_every_kind_stop_the_start_with_their_place() {
    let cases = [
        ("brokerIP1=10.0.0 .1", "host"),
        ("brokerIP1=10.0.0.1:10911", "host"),
        ("namesrvAddr=10.0.0.1", "host:port"),
        ("namesrvAddr=a:1 ; b:2", "host:port"),
        ("listenPort=0", "from 1 to 65535"),
        ("listenPort=ten", "whole number"),
        ("flushDiskType=SYNC", "SYNC_FLUSH or ASYNC_FLUSH"),
        ("autoCreateTopicEnable=yes", "true or false"),
        ("messageDelayLevel=1s 5y", "delays"),
        (
            "mappedFileSizeCommitLog=1000",
            "multiple of 4 KiB from 64 KiB to 2 GiB",
        ),
        ("deleteWhen=4am", "hours"),
        ("maxMessageSize=4 # MiB", "size in bytes"),
        ("brokerName=a b", "name"),
        ("brokerName=\"a\" # quoted", "name"),
        ("pinion.direct=maybe", "auto or require"),
        ("pinion.spinUs=99999", "from 0 to 1000"),
    ];
    for (line, expected) in cases {
        let words = refusal(&format!("\n{line}\n"));
        assert!(words.contains("broker.conf line 2"), "{line}: {words}");
        assert!(
            words.contains(line.split('=').next().unwrap()),
            "{line}: {words}"
        );
        assert!(words.contains(expected), "{line}: {words}");
    }
    assert!(refusal("a=\\u12\n").contains("broker.conf line 1"));
    let missing = Sources {
        file: Some("no/such/file".into()),
        ..Sources::default()
    };
    let words = Config::load(&missing, &host()).unwrap_err().to_string();
    assert!(words.contains("no/such/file"), "{words}");
}

#[test]
fn trailing_blanks_and_host_names_are_accepted() {
    let config = from_file(
        "blank",
        "brokerIP1=broker.example.org   \nnamesrvAddr = a:1;b:2\t\n",
    )
    .unwrap();
    assert_eq!(config.broker_ip1.as_str(), "broker.example.org");
    assert_eq!(config.namesrv_addr.0.len(), 2);
}

#[test]
fn ipv6_addresses_are_advertised_in_brackets() {
    for (text, advertised) in [
        ("::1", "[::1]:10911"),
        ("[::1]", "[::1]:10911"),
        ("fe80::2%eth0", "[fe80::2%eth0]:10911"),
    ] {
        let config = from_file("ipv6", &format!("brokerIP1={text}\n")).unwrap();
        assert_eq!(config.advertised(), advertised);
    }
}

#[test]
fn unknown_keys_are_kept_and_reported_once_with_the_nearest_known() {
    let config = from_file(
        "unknown",
        "brokerNane=x\nzzz.key=1\nserverWorkerThreads=8\n",
    )
    .unwrap();
    let notes = config.notes();
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes[0].contains("line 1") && notes[0].contains("did you mean brokerName?"));
    assert!(notes[1].contains("zzz.key") && !notes[1].contains("mean"));
    assert!(config.to_properties_text().contains("zzz.key=1\n"));
    assert!(
        config
            .to_properties_text()
            .contains("serverWorkerThreads=8\n")
    );
}

#[test]
fn both_spellings_of_the_segment_size_are_one_key_and_the_later_counts() {
    let text = "mapedFileSizeCommitLog=67108864\nmappedFileSizeCommitLog=134217728\n";
    let config = from_file("maped", text).unwrap();
    assert_eq!(config.segment_bytes, Bytes(128 << 20));
    assert!(config.notes()[0].contains("line 2"), "{:?}", config.notes());
    assert_eq!(
        from_file("maped1", "mapedFileSizeCommitLog=64MiB\n")
            .unwrap()
            .segment_bytes,
        Bytes(64 << 20)
    );
}

#[test]
fn the_configuration_of_the_comparison_broker_is_taken_without_a_word() {
    let text = "brokerClusterName=DefaultCluster\nbrokerName=broker-a\nbrokerId=0\n\
        brokerIP1=127.0.0.1\n\
        brokerIP2=127.0.0.1\nlistenPort=10911\nhaListenPort=10912\nnamesrvAddr=127.0.0.1:9876\n\
        brokerRole=ASYNC_MASTER\nflushDiskType=SYNC_FLUSH\nstorePathRootDir=/x/store\n\
        storePathCommitLog=/x/store/commitlog\ndeleteWhen=04\nfileReservedTime=48\n\
        autoCreateTopicEnable=true\nautoCreateSubscriptionGroup=true\nenablePropertyFilter=true\n\
        traceTopicEnable=true\nmappedFileSizeCommitLog=268435456\ndiskMaxUsedSpaceRatio=95\n\
        timerWheelEnable=true\n";
    let config = from_file("peer", text).unwrap();
    assert!(config.notes().is_empty(), "{:?}", config.notes());
    assert_eq!(config.flush_disk_type, FlushDiskType::SyncFlush);
}

#[test]
fn cores_outside_the_allowed_set_are_refused_with_the_allowed_ones() {
    let words = refusal("pinion.cores=0,1\n");
    assert!(words.contains("CPU 0") && words.contains("1,3"), "{words}");
    let config = from_file("cores", "pinion.cores=3\n").unwrap();
    assert_eq!(
        (config.cores.clone(), config.shards),
        (CoreList(vec![3]), 1)
    );
}

#[test]
fn printed_settings_show_value_and_origin() {
    let config = from_file(
        "printed",
        "listenPort=10921\ninitAuthenticationUser={\"password\":\"p\"}\n",
    )
    .unwrap();
    let text = config.to_printed_text();
    assert!(text.contains("broker.conf line 1\n"), "{text}");
    assert!(text.contains("haListenPort=10922  # derived from listenPort\n"));
    assert!(text.contains("brokerIP1=10.9.8.7  # detected: default route\n"));
    assert!(text.contains("maxMessageSize=4194304  # default\n"));
    assert!(text.contains("initAuthenticationUser=(hidden)"));
    assert!(!config.to_properties_text().contains("password"));
}

#[test]
fn an_update_changes_the_value_its_origin_and_the_file() {
    let dir = Dir::new("update");
    let path = dir.write("# ours\nwaitTimeMillsInSendQueue=200\nbrokerName=a\n");
    let sources = Sources {
        file: Some(path.clone()),
        ..Sources::default()
    };
    let mut config = Config::load(&sources, &host()).unwrap();
    let changed = config
        .update_all("waitTimeMillsInSendQueue=1234\nfileReservedTime=10\n")
        .unwrap();
    assert_eq!(config.send_wait_max_ms, 1234);
    assert_eq!(
        (changed[0].before.as_str(), changed[0].effect),
        ("200", Effect::Live)
    );
    assert_eq!(
        config.origin_of("fileReservedTime"),
        Some(&Origin::Administrator)
    );
    config.persist(&changed).unwrap().write().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(
        text,
        "# ours\nwaitTimeMillsInSendQueue=1234\nbrokerName=a\nfileReservedTime=10\n"
    );
    let again = Config::load(&sources, &host()).unwrap();
    assert_eq!((again.send_wait_max_ms, again.file_reserved_h), (1234, 10));
}

#[test]
fn an_update_without_config_file_is_stored_beside_the_data_and_read_at_the_next_start() {
    let dir = Dir::new("stored");
    let stored = dir.0.join("config").join("broker.properties");
    let sources = Sources {
        stored: Some(stored.clone()),
        ..Sources::default()
    };
    let mut config = Config::load(&sources, &host()).unwrap();
    let changed = config.update("longPollingEnable", "false").unwrap();
    config.persist(&[changed]).unwrap().write().unwrap();
    let again = Config::load(&sources, &host()).unwrap();
    assert!(!again.long_polling);
    assert_eq!(again.file(), Some(stored.as_path()));
}

#[test]
fn keys_that_could_open_or_break_the_broker_are_not_updated() {
    let mut config = from_file(
        "black",
        "configBlackList=configBlackList;fileReservedTime\n",
    )
    .unwrap();
    let fixed = [
        "brokerConfigPath",
        "rocketmqHome",
        "configBlackList",
        "storePathRootDir",
        "storePathCommitLog",
        "listenPort",
        "haListenPort",
        "bindAddress",
        "authConfigPath",
        "initAuthenticationUser",
        "innerClientAuthenticationCredentials",
        "authenticationEnabled",
        "aclEnable",
        "tls.server.mode",
        "pinion.bufferDir",
        "pinion.healthPort",
        "fileReservedTime",
    ];
    for key in fixed {
        let outcome = config.update(key, "1");
        assert_eq!(
            outcome,
            Err(UpdateError::NoPermission {
                key: key.to_owned()
            })
        );
    }
}

#[test]
fn a_request_with_one_bad_change_changes_nothing() {
    let mut config = from_file("whole", "").unwrap();
    for bad in ["fileReservedTime=soon", "listenPort=1", "filReservedTime=3"] {
        let outcome = config.update_all(&format!("waitTimeMillsInSendQueue=7\n{bad}\n"));
        assert!(outcome.is_err(), "{bad}");
        assert_eq!(config.send_wait_max_ms, 200, "{bad}");
    }
    assert!(
        config
            .update("filReservedTime", "3")
            .unwrap_err()
            .to_string()
            .contains("fileReservedTime")
    );
    assert!(config.update("serverWorkerThreads", "3").is_ok());
}

#[test]
fn name_server_settings_have_their_own_table() {
    let dir = Dir::new("namesrv");
    let sources = Sources {
        file: Some(dir.write("listenPort=9900\nserverWorkerThreads=8\n")),
        ..Sources::default()
    };
    let mut config = NamesrvConfig::load(&sources, Path::new("data/namesrv")).unwrap();
    assert_eq!((config.listen_port, config.notes().len()), (9_900, 0));
    assert_eq!(
        config.kv_config_path.as_path(),
        Path::new("data/namesrv/kvConfig.json")
    );
    assert!(config.update_all("kvConfigPath=/etc/passwd").is_err());
    config.update_all("orderMessageEnable=true").unwrap();
    assert!(config.order_message);
}

#[test]
fn a_promise_this_version_cannot_keep_stops_the_start_with_its_line() {
    let (ports, master) = ("firewall", "brokerRole=ASYNC_MASTER");
    let asked = [
        ("aclEnable", "true", "access control", ports),
        ("authenticationEnabled", "true", "access control", ports),
        ("authorizationEnabled", "true", "access control", ports),
        ("tls.server.mode", "enforcing", "TLS", "tunnel"),
        ("brokerRole", "SLAVE", "replication", master),
        ("inSyncReplicas", "2", "replication", "disk alone"),
        ("allAckInSyncStateSet", "true", "replication", "disk alone"),
        ("enableControllerMode", "true", "a controller", "a master"),
    ];
    for (key, value, what, advice) in asked {
        let config = from_file("promise", &format!("brokerName=a\n{key}={value}\n")).unwrap();
        let words = config.check_promises().unwrap_err().to_string();
        for part in ["line 2", key, what, advice] {
            assert!(words.contains(part), "no {part:?} in: {words}");
        }
        let of_ports = words.contains("ports") || words.contains("firewall");
        assert_eq!(
            of_ports,
            matches!(what, "access control" | "TLS"),
            "{words}"
        );
    }
    let config = from_file("promise", "brokerRole=SYNC_MASTER\naclEnable=false\n").unwrap();
    assert_eq!(
        config.check_promises().map_err(|error| error.to_string()),
        Ok(())
    );
}

#[test]
fn settings_without_effect_are_named_once() {
    let config = from_file("effect", "messageIndexEnable=false\nslaveReadEnable=true\n").unwrap();
    let notes = config.notes();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(
        notes[0].contains("slaveReadEnable, messageIndexEnable"),
        "{notes:?}"
    );
}

#[test]
fn an_empty_name_is_said_with_the_name_that_counts() {
    let config = from_file("no-name", "brokerName=\nbrokerClusterName=\n").unwrap();
    let names = [&config.broker_name.0, &config.broker_cluster_name.0];
    assert_eq!(names, ["node-1", "DefaultCluster"]);
    let notes = config.notes();
    assert_eq!(notes.len(), 2, "{notes:?}");
    for (note, parts) in notes.iter().zip([
        ["line 1", "brokerName", "empty", "node-1"],
        ["line 2", "brokerClusterName", "empty", "DefaultCluster"],
    ]) {
        assert!(parts.iter().all(|part| note.contains(part)), "{note}");
    }
    assert!(
        from_file("unset-name", "brokerId=0\n")
            .unwrap()
            .notes()
            .is_empty()
    );
}
