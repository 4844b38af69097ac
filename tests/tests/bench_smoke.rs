//! The benchmark harness against brokers of its own: every command ends, leaves its files, and
//! tells no figures when messages are missing.
//!
//! Invariant: nothing here looks at how good a figure is; the machine of a test is busy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tests::process::{BrokerProcess, free_ports, program};
use tests::turn;

/// Status of a run whose generator was too busy to be quoted, or whose audit failed.
const NOT_QUOTABLE: i32 = 2;

/// `BENCH_BIN`, or the harness beside the program under test.
fn harness() -> PathBuf {
    let chosen = std::env::var_os("BENCH_BIN").map(PathBuf::from);
    let path = chosen.unwrap_or_else(|| program().with_file_name("pinion-bench"));
    assert!(
        path.is_file(),
        "{} is not there: run `cargo build --release -p pinion -p bench`",
        path.display()
    );
    path
}

fn bench(words: &[&str]) -> Output {
    let mut command = Command::new(harness());
    command.arg("--debug-build").args(words);
    command.output().expect("the harness runs")
}

/// Runs the harness into `out` and requires that it came to an end it is meant to come to.
fn measured(out: &Path, words: &[&str]) -> Value {
    let path = out.display().to_string();
    let mut line = words.to_vec();
    line.extend(["--out", &path]);
    let output = bench(&line);
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    let status = output.status.code();
    assert!(
        status == Some(0) || status == Some(NOT_QUOTABLE),
        "{words:?}: {status:?}\n{text}\n{errors}"
    );
    assert!(!text.is_empty(), "{words:?}");
    json(&out.join("run.json"))
}

fn json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).expect("JSON")
}

fn namesrv(broker: &BrokerProcess) -> String {
    format!("127.0.0.1:{}", broker.namesrv_port)
}

fn short<'a>(command: &'a str, namesrv: &'a str, topic: &'a str) -> Vec<&'a str> {
    let line = "--connections 4 --queues 4 --warm-up-s 0.2 --duration-s 1.2 --drain-s 5";
    let mut words = vec![command, "--namesrv", namesrv, "--topic", topic];
    words.extend(line.split(' '));
    words
}

fn all_found(run: &Value) {
    assert_eq!(run["sound"], true, "{run:#}");
    let audit = &run["audit"];
    assert!(audit["acked"].as_u64().expect("acked") > 0, "{audit}");
    assert_eq!(audit["acked"], audit["found"]);
}

#[test]
fn a_run_leaves_its_files_and_every_acknowledged_message_was_read_back() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("bench-produce");
    broker.start();
    let (address, out) = (namesrv(&broker), broker.root().join("out"));
    let root = broker.root().display().to_string();
    let mut words = short("produce", &address, "smoke");
    words.extend(["--rate", "2000", "--in-flight", "32", "--store-dir", &root]);
    let run = measured(&out, &words);
    all_found(&run);
    let loops = run["loops"].as_array().expect("loops");
    let names: Vec<&str> = loops
        .iter()
        .filter_map(|one| one["loop"].as_str())
        .collect();
    assert_eq!(names, ["open", "closed"]);
    assert_eq!(
        loops[1]["headline"], false,
        "a closed loop is never a headline"
    );
    for kind in ["latency", "service", "lateness"] {
        assert!(
            loops[0]["times_ns"][kind]["p50"].as_u64() > Some(0),
            "{kind}"
        );
    }
    for name in [
        "open.hlog",
        "closed.hlog",
        "open-timeline.svg",
        "open-curve.svg",
    ] {
        let bytes = fs::metadata(out.join(name)).expect(name).len();
        assert!(bytes > 100, "{name}");
    }
    let table = fs::read_to_string(out.join("table.md")).expect("table");
    assert!(table.contains("Open loop, 2000 msg/s asked") && table.contains("Audited"));
    let environment = json(&out.join("env.json"));
    assert!(environment["kernel"].is_string() && environment["device"]["tests"].is_array());
}

#[test]
fn every_way_of_sending_passes_the_audit() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("bench-modes");
    broker.start();
    let address = namesrv(&broker);
    for mode in ["sync", "batch", "one-way"] {
        let out = broker.root().join(mode);
        let mut words = short("produce", &address, mode);
        words.extend([
            "--rate", "800", "--mode", mode, "--batch", "8", "--topics", "2",
        ]);
        let run = measured(&out, &words);
        assert_eq!(run["sound"], true, "{mode}: {run:#}");
        if mode == "one-way" {
            let stored = run["audit"]["unacked_stored"].as_u64();
            assert!(stored > Some(0), "{run:#}");
        } else {
            all_found(&run);
        }
    }
}

#[test]
fn readers_see_every_message_beside_senders_and_old_ones_beside_new_ones() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("bench-readers");
    broker.start();
    let address = namesrv(&broker);
    for command in ["consume", "mixed", "catch-up"] {
        let out = broker.root().join(command);
        let mut words = short(command, &address, command);
        words.extend([
            "--rate",
            "500",
            "--cold-bytes",
            "4000000",
            "--consumers",
            "2",
        ]);
        let run = measured(&out, &words);
        all_found(&run);
        let loops = run["loops"].as_array().expect("loops");
        for one in loops {
            let delivered = one["delivered_rate"].as_f64().expect("delivered");
            assert!(delivered > 250.0, "{command}: {one:#}");
            assert!(one["times_ns"]["end-to-end"]["p50"].as_u64() > Some(0));
        }
        if command == "catch-up" {
            assert_eq!(loops.len(), 2);
            assert!(loops[1]["cold_bytes_per_s"].as_f64() > Some(0.0));
        }
    }
    let mut words = vec!["verify", "--namesrv", &address, "--topic", "mixed"];
    assert_eq!(bench(&words).status.code(), Some(0));
    words[4] = "no-such-broker-topic";
    assert_eq!(
        bench(&words).status.code(),
        Some(0),
        "an empty topic is sound"
    );
}

#[test]
fn a_sweep_finds_a_rate_and_measures_shares_of_it() {
    let _turn = turn();
    let mut broker = BrokerProcess::new("bench-sweep");
    broker.start();
    let (address, out) = (namesrv(&broker), broker.root().join("out"));
    let plan = broker.root().join("sweep.toml");
    let text = "[sweep]\ntrial_s = 0.6\nfirst_rate = 300\nresolution = 0.5\np99_max_ms = 60000\n\
                achieved_share_min = 0.5\nsteps_percent = [50, 100]\n";
    fs::write(&plan, text).expect("plan");
    let path = plan.display().to_string();
    let mut words = short("sweep", &address, "sweep");
    words.extend(["--plan", &path, "--in-flight", "16"]);
    let run = measured(&out, &words);
    let trials = run["found"]["trials"].as_array().expect("trials");
    assert!(!trials.is_empty());
    let sustained = run["found"]["sustainable"].is_u64();
    let steps = run["steps"].as_array().expect("steps").len();
    assert_eq!(steps, if sustained { 2 } else { 0 });
    assert_eq!(run["criterion"]["trial_s"], 0.6);
    assert!(out.join("table.md").is_file());
}

#[test]
fn a_broker_that_stores_nothing_gets_no_figures_unless_the_audit_is_off() {
    let _turn = turn();
    let (namesrv_port, port) = free_ports();
    let data = BrokerProcess::new("bench-null");
    let mut null = Command::new(program())
        .args(["null", "--port", &port.to_string()])
        .args(["--namesrv-port", &namesrv_port.to_string()])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the null broker starts");
    let address = format!("127.0.0.1:{namesrv_port}");
    let ready = || tests::client::Client::connect((std::net::Ipv4Addr::LOCALHOST, port).into());
    let limit = std::time::Duration::from_secs(60);
    tests::process::eventually("the null broker listens", limit, || ready().is_ok());
    std::thread::sleep(std::time::Duration::from_millis(500));
    let out = data.root().join("audited");
    let mut words = short("produce", &address, "nothing");
    words.extend(["--rate", "500"]);
    let run = measured(&out, &words);
    assert_eq!(run["sound"], false, "{run:#}");
    assert!(run["audit"]["lost"].as_u64() > Some(0), "{run:#}");
    assert!(run["loops"].is_null(), "no figures");
    let table = fs::read_to_string(out.join("table.md")).expect("table");
    assert!(table.contains("No figures"), "{table}");
    words.push("--no-audit");
    let run = measured(&data.root().join("not-audited"), &words);
    assert!(run["loops"].is_array() && run["audit"].is_null());
    let pid = null.id().to_string();
    Command::new("kill")
        .args(["-TERM", &pid])
        .status()
        .expect("kill");
    assert!(null.wait().expect("wait").success());
}

#[test]
fn two_sides_are_compared_in_turns_and_the_ceiling_is_measured() {
    let _turn = turn();
    let data = BrokerProcess::new("bench-compare");
    let sides = data.root().join("sides.toml");
    let mut text = String::new();
    for name in ["first", "second"] {
        let (namesrv_port, port) = free_ports();
        text.push_str(&format!(
            "[[side]]\nname = \"{name}\"\nnamesrv = \"127.0.0.1:{namesrv_port}\"\n\
             start = \"exec {} null --port {port} --namesrv-port {namesrv_port}\"\n",
            program().display()
        ));
    }
    fs::write(&sides, text).expect("sides");
    let (out, path) = (data.root().join("out"), sides.display().to_string());
    let out_path = out.display().to_string();
    let mut words = short("compare", "unused:1", "T");
    words.extend([
        "--sides",
        &path,
        "--rounds",
        "2",
        "--no-audit",
        "--rate",
        "500",
    ]);
    words.extend(["--out", &out_path]);
    let output = bench(&words);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() != Some(1), "{errors}");
    let compared = json(&out.join("compare.json"));
    let rate = &compared["figures"]["open achieved msg/s"];
    let ratio = &rate["ratios"][0]["median"];
    assert!(ratio.as_f64() > Some(0.0), "{compared:#}");
    for round in [
        "round-1-first",
        "round-1-second",
        "round-2-first",
        "round-2-second",
    ] {
        assert!(out.join(round).join("run.json").is_file(), "{round}");
    }
    let (_, port) = free_ports();
    let port = port.to_string();
    if harness().with_file_name("pinion").is_file() {
        let mut words = short("null", "unused:1", "T");
        words.extend(["--null-port", &port, "--null-cores", "0", "--rate", "500"]);
        let run = measured(&data.root().join("null"), &words);
        assert!(run["loops"][0]["server_cpu_us"].is_number(), "{run:#}");
    }
}

#[test]
fn the_disk_probe_tells_every_test() {
    let data = BrokerProcess::new("bench-device");
    let (root, out) = (data.root().display().to_string(), data.root().join("out"));
    let out_path = out.display().to_string();
    let words = [
        "device",
        "--dir",
        &root,
        "--bytes",
        "20000000",
        "--seconds",
        "0.05",
    ];
    let mut words = words.to_vec();
    words.extend(["--out", &out_path]);
    assert_eq!(bench(&words).status.code(), Some(0));
    let found = json(&out.join("device.json"));
    assert_eq!(
        found["tests"].as_array().expect("tests").len(),
        9,
        "{found:#}"
    );
}
