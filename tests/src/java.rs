//! Owns a Java program of this suite (`tests/java`) that runs on the official client's jars.
//!
//! Invariant: the program ends with its harness; where there is no Java client it is said. The jars
//! are those that `scripts/kits --prepare` puts under `target/interop`; `JAVA_CLIENT_LIB` names
//! others.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};

use crate::process::{BrokerProcess, repository};
use crate::skipped;

/// A running Java program, told over its input what to do.
#[derive(Debug)]
pub struct JavaProgram {
    child: Child,
    input: ChildStdin,
    output: Option<BufReader<ChildStdout>>,
    follower: Option<JoinHandle<()>>,
}

impl JavaProgram {
    /// Starts `tests/java/{name}.java` against the name server of a broker and waits for its READY.
    pub fn start(broker: &BrokerProcess, name: &str, arguments: &[&str]) -> Option<Self> {
        let chosen = std::env::var_os("JAVA_CLIENT_LIB").map(PathBuf::from);
        let default = repository().join("target/interop/java/target/rmq5/lib");
        let jars = chosen.unwrap_or(default);
        if !jars.is_dir() {
            let jars = jars.display();
            skipped(&format!("no Java client in {jars}; see scripts/kits"));
            return None;
        }
        let mut command = Command::new("java");
        command.arg("-Xmx256m").arg("-XX:TieredStopAtLevel=1");
        command.arg(format!("-Duser.home={}", broker.root().display()));
        command.arg("-cp").arg(format!("{}/*", jars.display()));
        command.arg(repository().join(format!("tests/java/{name}.java")));
        command.arg(format!("127.0.0.1:{}", broker.namesrv_port));
        let errors = File::create(broker.root().join("java.txt")).expect("error file");
        command.args(arguments).stderr(errors);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("java");
        let input = child.stdin.take().expect("input");
        let output = BufReader::new(child.stdout.take().expect("output"));
        let mut program = Self {
            child,
            input,
            output: Some(output),
            follower: None,
        };
        while program.line() != "READY" {}
        Some(program)
    }

    /// Tells it something.
    pub fn say(&mut self, word: &str) {
        writeln!(self.input, "{word}").expect("the Java program listens");
    }

    /// The next line it prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        let output = self.output.as_mut().expect("its output");
        let count = output.read_line(&mut line).expect("a line");
        assert_ne!(count, 0, "the Java program ended by itself");
        line.trim().to_owned()
    }

    /// Gives every further line to `take`, on a thread of its own, until the program ends.
    pub fn follow(mut self, take: impl Fn(&str) + Send + 'static) -> Self {
        let output = self.output.take().expect("its output");
        let lines = move || {
            output
                .lines()
                .map_while(Result::ok)
                .for_each(|line| take(&line))
        };
        self.follower = Some(thread::spawn(lines));
        self
    }
}

impl Drop for JavaProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(follower) = self.follower.take() {
            let _ = follower.join();
        }
    }
}
