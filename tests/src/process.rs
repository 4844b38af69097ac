//! Owns a `pinion` process under test: its ports, directories and configuration, its start, its end
//! by signal or kill, and what it printed.
//!
//! Invariant: everything a process writes lies under one directory of its own below
//! `target/test-data` (its surviving buffer in shared memory aside), which goes away with it unless
//! the test failed; no process outlives its harness.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::env_number;

/// How long a start may take, in seconds; `READY_SECONDS` for a machine that is busy otherwise.
const READY_SECONDS: u64 = 20;
const STOP_WAIT: Duration = Duration::from_secs(20);
const FIRST_PORT: u32 = 20_000;
const PORT_GROUPS: u32 = 1_250;
const PORT_GROUP_SIZE: u32 = 8;

static NEXT_GROUP: AtomicU32 = AtomicU32::new(0);

/// The root of the repository.
pub fn repository() -> PathBuf {
    let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .canonicalize()
        .expect("the crate");
    crate_root
        .parent()
        .expect("the tests crate lies in the repository")
        .to_path_buf()
}

/// The program under test: `PINION_BIN`, or the release build.
pub fn program() -> PathBuf {
    let chosen = std::env::var_os("PINION_BIN").map(PathBuf::from);
    let path = chosen.unwrap_or_else(|| target_directory().join("release/pinion"));
    assert!(
        path.is_file(),
        "{} is not there: run `cargo build --release`, or name the program in PINION_BIN",
        path.display()
    );
    path
}

fn target_directory() -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    chosen.unwrap_or_else(|| repository().join("target"))
}

/// A name server port and a broker port `p` with `p - 2`, `p + 1` and `p + 3` free as well.
pub fn free_ports() -> (u16, u16) {
    for _ in 0..PORT_GROUPS {
        let step = NEXT_GROUP.fetch_add(1, Ordering::Relaxed);
        let group = (std::process::id().wrapping_mul(17) + step) % PORT_GROUPS;
        let first = (FIRST_PORT + group * PORT_GROUP_SIZE) as u16;
        let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        if (first..first + 7).all(free) {
            return (first, first + 3);
        }
    }
    panic!("no seven free ports in a row from {FIRST_PORT} on");
}

/// An address on this machine.
pub fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// A process under test.
#[derive(Debug)]
pub struct BrokerProcess {
    root: PathBuf,
    data: PathBuf,
    host: SocketAddr,
    /// The port of its name server.
    pub namesrv_port: u16,
    /// The port of its broker.
    pub broker_port: u16,
    settings: Vec<(String, String)>,
    arguments: Vec<String>,
    wrapper: Vec<String>,
    environment: Vec<(String, String)>,
    child: Option<Child>,
    starts: u32,
}

impl BrokerProcess {
    /// A harness that has started nothing yet; `name` names its directory.
    pub fn new(name: &str) -> Self {
        let root = repository().join("target/test-data");
        let root = root.join(format!("{name}-{}", std::process::id()));
        fs::remove_dir_all(&root)
            .or_else(ignore_missing)
            .expect("old test data can go");
        fs::create_dir_all(&root).expect("test data can be written");
        let (namesrv_port, broker_port) = free_ports();
        let mut process = Self {
            data: root.join("data"),
            root,
            host: local(0),
            namesrv_port,
            broker_port,
            settings: Vec::new(),
            arguments: Vec::new(),
            wrapper: Vec::new(),
            environment: Vec::new(),
            child: None,
            starts: 0,
        };
        process.set("brokerIP1", "127.0.0.1");
        process.set("mappedFileSizeCommitLog", &(8 << 20).to_string());
        process.set("pinion.bufferBytes", &(16 << 20).to_string());
        // How full the file system of this machine is belongs to the tests of a full disk only.
        process.set("diskMaxUsedSpaceRatio", "98");
        process.set("diskSpaceCleanForciblyRatio", "99");
        process.set("diskSpaceWarningLevelRatio", "99");
        let buffer = process.buffer_directory().display().to_string();
        process.set("pinion.bufferDir", &buffer);
        process
    }

    /// Sets a key of the configuration file, over what it had.
    pub fn set(&mut self, key: &str, value: &str) -> &mut Self {
        self.unset(key);
        self.settings.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Takes a key out of the configuration file.
    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.settings.retain(|(name, _)| name != key);
        self
    }

    /// Replaces the further arguments of the command line.
    pub fn arguments(&mut self, arguments: &[&str]) -> &mut Self {
        self.arguments = arguments.iter().map(|text| (*text).to_owned()).collect();
        self
    }

    /// Runs the program through another one, such as `setpriv …`.
    pub fn wrapper(&mut self, words: &[&str]) -> &mut Self {
        self.wrapper = words.iter().map(|text| (*text).to_owned()).collect();
        self
    }

    /// Replaces what its environment has beyond that of the test.
    pub fn environment(&mut self, pairs: &[(&str, &str)]) -> &mut Self {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        self.environment = pairs.iter().map(owned).collect();
        self
    }

    /// Where it is reached, if that is not 127.0.0.1; the port does not matter.
    pub fn reached_at(&mut self, host: SocketAddr) -> &mut Self {
        self.host = host;
        self
    }

    /// Puts its data somewhere else, such as on a disk of the test's own.
    pub fn data_at(&mut self, directory: &Path) -> &mut Self {
        self.data = directory.to_path_buf();
        self
    }

    /// The directory of this process.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The data directory it is given.
    pub fn data(&self) -> PathBuf {
        self.data.clone()
    }

    /// Where its surviving buffer lies, unless `pinion.bufferDir` was changed.
    pub fn buffer_directory(&self) -> PathBuf {
        let name = self
            .root
            .file_name()
            .expect("a named directory")
            .to_string_lossy();
        Path::new("/dev/shm").join(format!("pinion-test-{name}"))
    }

    /// The configuration file.
    pub fn configuration(&self) -> PathBuf {
        self.root.join("broker.conf")
    }

    /// Starts `pinion standalone` and waits until the name server knows the broker.
    pub fn start(&mut self) -> &mut Self {
        self.launch();
        self.wait_ready();
        self
    }

    /// Starts `pinion standalone` and returns at once.
    pub fn launch(&mut self) -> &mut Self {
        let namesrv = self.namesrv_port.to_string();
        let broker = self.broker_port.to_string();
        let data = self.data().display().to_string();
        let ports = ["--namesrv-port", &namesrv, "--broker-port", &broker];
        let mut words = vec!["standalone".to_owned(), "--data".to_owned(), data];
        words.extend(ports.map(str::to_owned));
        words.extend(["-c".to_owned(), self.configuration().display().to_string()]);
        words.extend(self.arguments.clone());
        self.launch_as(&words)
    }

    /// Starts `pinion namesrv` and waits until it answers.
    pub fn start_namesrv(&mut self) -> &mut Self {
        let port = self.namesrv_port.to_string();
        let data = self.data().display().to_string();
        self.launch_as(&["namesrv", "--data", &data, "--port", &port].map(str::to_owned));
        let address = local(self.namesrv_port);
        // A socket of a killed process may take connections for a moment, so that only an answer
        // counts.
        let asks = || Client::connect(address).and_then(|mut client| client.route("none"));
        eventually("the name server", Duration::from_secs(5), || asks().is_ok());
        self
    }

    /// Starts `pinion broker` under that name with another process's name server.
    pub fn launch_broker(&mut self, name: &str, namesrv_port: u16) -> &mut Self {
        self.launch_broker_with(name, namesrv_port, &format!("127.0.0.1:{namesrv_port}"))
    }

    /// The same with name servers by name, of which one is here at this port.
    pub fn launch_broker_with(
        &mut self,
        name: &str,
        namesrv_port: u16,
        servers: &str,
    ) -> &mut Self {
        let store = self.data().display().to_string();
        let port = self.broker_port.to_string();
        self.set("brokerName", name).set("listenPort", &port);
        self.set("storePathRootDir", &store);
        let configuration = self.configuration().display().to_string();
        self.launch_as(&["broker", "-c", &configuration, "-n", servers].map(str::to_owned));
        self.namesrv_port = namesrv_port;
        self
    }

    /// Starts `pinion` with exactly these words and returns at once; writes the configuration.
    pub fn launch_as(&mut self, words: &[String]) -> &mut Self {
        assert!(self.child.is_none(), "one process at a time");
        let lines = self
            .settings
            .iter()
            .map(|(key, value)| format!("{key}={value}\n"));
        fs::write(self.configuration(), lines.collect::<String>()).expect("configuration");
        if self
            .settings
            .iter()
            .any(|(_, value)| Path::new(value) == self.buffer_directory())
        {
            fs::create_dir_all(self.buffer_directory()).expect("buffer directory");
        }
        self.starts += 1;
        let output = File::create(self.output_path()).expect("output file");
        let program = program().display().to_string();
        let mut line = self.wrapper.clone();
        line.push(program);
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).args(words);
        // A process group of its own keeps a Ctrl-C at the test from reaching it twice.
        command.current_dir(&self.root).process_group(0);
        command.env_remove("NAMESRV_ADDR").stdin(Stdio::null());
        command.envs(self.environment.iter().map(|(key, value)| (key, value)));
        command
            .stdout(output.try_clone().expect("output file"))
            .stderr(output);
        self.child = Some(
            command
                .spawn()
                .unwrap_or_else(|error| panic!("{line:?}: {error}")),
        );
        self
    }

    /// Waits until a route request shows that the broker is registered.
    pub fn wait_ready(&mut self) {
        let limit = Duration::from_secs(env_number("READY_SECONDS", READY_SECONDS));
        let started = Instant::now();
        loop {
            if self.ready().unwrap_or(false) {
                return;
            }
            if let Some(status) = self.ended() {
                panic!(
                    "ended with {status} while starting; it said:\n{}",
                    self.output()
                );
            }
            let waited = started.elapsed();
            assert!(
                waited < limit,
                "not ready after {waited:?}; it said:\n{}",
                self.output()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn ready(&self) -> io::Result<bool> {
        Client::connect(self.address(self.broker_port))?;
        let route = Client::connect(self.address(self.namesrv_port))?.route("TBW102")?;
        // The broker may be registered a moment before it has said everything; what it says may
        // also go elsewhere.
        let output = self.output();
        let mut lines = output.lines();
        let has_said_all = output.is_empty() || lines.any(|line| line.starts_with("to stop"));
        let port = format!(":{}", self.broker_port);
        Ok(has_said_all && route.is_some_and(|route| route.contains(&port)))
    }

    /// The address of one of its ports.
    pub fn address(&self, port: u16) -> SocketAddr {
        match self.host {
            SocketAddr::V4(host) => SocketAddr::from((*host.ip(), port)),
            // The zone of a link-local address has to stay.
            SocketAddr::V6(host) => SocketAddrV6::new(*host.ip(), port, 0, host.scope_id()).into(),
        }
    }

    /// A connection to the broker, or none while it starts or after it was killed.
    pub fn try_client(&self) -> io::Result<Client> {
        Client::connect(self.address(self.broker_port))
    }

    /// A fresh connection to the broker.
    pub fn client(&self) -> Client {
        let address = self.address(self.broker_port);
        Client::connect(address).unwrap_or_else(|error| {
            panic!("connect to {address}: {error}; it said:\n{}", self.output())
        })
    }

    /// A fresh connection to the name server.
    pub fn namesrv(&self) -> Client {
        Client::connect(self.address(self.namesrv_port)).expect("connect to the name server")
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running process").id()
    }

    /// The exit status, if it ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child
            .as_mut()?
            .try_wait()
            .expect("status of the process")
    }

    /// Waits for the process to end by itself.
    pub fn wait_end(&mut self, limit: Duration) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                self.child = None;
                return status;
            }
            let waited = started.elapsed();
            assert!(
                waited < limit,
                "still running after {waited:?}; it said:\n{}",
                self.output()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it as a power cut of the process would: SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
    }

    /// Asks it to stop with SIGTERM and requires status 0.
    pub fn stop(&mut self) {
        self.signal("TERM");
        let status = self.wait_end(STOP_WAIT);
        assert_eq!(
            status.code(),
            Some(0),
            "SIGTERM; it said:\n{}",
            self.output()
        );
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let status = Command::new("kill")
            .args(["-s", name, &pid])
            .status()
            .expect("kill");
        assert!(status.success(), "signal {name}");
    }

    /// What the latest start printed.
    pub fn output(&self) -> String {
        let bytes = fs::read(self.output_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn output_path(&self) -> PathBuf {
        self.root.join(format!("output-{}.txt", self.starts))
    }

    /// The log segments of the store, in order of their start offsets.
    pub fn segments(&self) -> Vec<PathBuf> {
        segments_below(&self.data())
    }
}

impl Drop for BrokerProcess {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_dir_all(self.buffer_directory());
        if thread::panicking() {
            let text = self.output();
            let tail: Vec<&str> = text.lines().rev().take(40).collect();
            eprintln!(
                "data and output kept in {}; last lines:",
                self.root.display()
            );
            for line in tail.iter().rev() {
                eprintln!("  | {line}");
            }
        } else {
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}

fn ignore_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound {
        Ok(())
    } else {
        Err(error)
    }
}

/// Every file below a directory.
pub fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut open = vec![directory.to_path_buf()];
    while let Some(directory) = open.pop() {
        let Ok(entries) = fs::read_dir(&directory) else {
            continue;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path)
            } else {
                files.push(path)
            }
        }
    }
    files.sort();
    files
}

/// The log segments below a directory: files of a `commitlog` named by twenty digits.
pub fn segments_below(directory: &Path) -> Vec<PathBuf> {
    let is_segment = |path: &PathBuf| {
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let digits = name
            .is_some_and(|name| name.len() == 20 && name.bytes().all(|byte| byte.is_ascii_digit()));
        digits
            && path
                .components()
                .any(|part| part.as_os_str() == "commitlog")
    };
    let mut segments: Vec<PathBuf> = files_below(directory)
        .into_iter()
        .filter(is_segment)
        .collect();
    segments.sort_by_key(|path| path.file_name().map(|name| name.to_os_string()));
    segments
}

/// Copies a directory with everything in it, keeping holes out of the question.
pub fn copy_directory(from: &Path, to: &Path) {
    let status = Command::new("cp")
        .args(["-r", "--sparse=auto"])
        .arg(from)
        .arg(to)
        .status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "copy {} failed",
        from.display()
    );
}

/// An answer of the health port: status and body; none while nobody answers there.
pub fn probe(port: u16, path: &str) -> Option<(u16, String)> {
    let limit = Duration::from_millis(500);
    let mut stream = TcpStream::connect_timeout(&local(port), limit).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let status = text.split(' ').nth(1)?.parse().ok()?;
    let (_, body) = text.split_once("\r\n\r\n")?;
    Some((status, body.to_owned()))
}

/// Waits until `check` holds, or fails naming `what`.
pub fn eventually(what: &str, limit: Duration, mut check: impl FnMut() -> bool) {
    let started = Instant::now();
    while !check() {
        assert!(started.elapsed() < limit, "{what}: not within {limit:?}");
        thread::sleep(Duration::from_millis(5));
    }
}
