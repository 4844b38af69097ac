//! The name server as it runs on a core: requests in, answers out, files saved.
//!
//! Invariant: the module behind it is a pure state machine and never sees a socket.

use std::path::PathBuf;

use wire::header::Header;

use super::jobs::CoreJob;
use super::prober::Prober;
use super::state::State;
use crate::control::effects::Origin;
use crate::namesrv::NameServer;

/// File of the key-value configuration.
pub const KV_FILE: &str = "kvConfig.json";
/// File of the name server's properties.
pub const PROPERTIES_FILE: &str = "namesrv.properties";

/// A running name server.
pub struct NameServerTask {
    /// Its state machine.
    pub server: NameServer,
    /// Directory of its files.
    pub dir: PathBuf,
    /// Its probes of brokers.
    pub prober: Prober,
    last_tick_ms: i64,
}

impl NameServerTask {
    /// Wraps a name server.
    #[must_use]
    pub fn new(server: NameServer, dir: PathBuf) -> Self {
        Self {
            server,
            dir,
            prober: Prober::default(),
            last_tick_ms: 0,
        }
    }
}

impl State {
    /// A request on the name server port.
    pub fn on_name_server_request(&mut self, origin: &Origin, header: &Header<'_>, body: &[u8]) {
        let connection = origin.link.connection;
        let (Some(task), Some(out)) = (&mut self.name_server, self.net.output(connection)) else {
            return;
        };
        task.server
            .handle(self.now.wall_ms, connection, origin.peer, header, body, out);
        task.server.observe_reports(self.now.monotonic_us / 1000);
        self.save_name_server_files();
    }

    /// Work of the name server that is due.
    pub fn name_server_turn(&mut self) {
        let now_ms = self.now.wall_ms;
        let Some(task) = &mut self.name_server else {
            return;
        };
        if now_ms < task.last_tick_ms + 1000 {
            return;
        }
        task.last_tick_ms = now_ms;
        task.server.tick(now_ms);
        self.to_close
            .extend(task.server.take_connections_to_close());
        self.save_name_server_files();
    }

    fn save_name_server_files(&mut self) {
        let Some(task) = &mut self.name_server else {
            return;
        };
        if let Some(bytes) = task.server.take_kv_to_save() {
            let path = task.dir.join(KV_FILE);
            self.jobs.push(CoreJob::NameServerFile { path, bytes });
        }
        if let Some(text) = task.server.take_properties_to_save() {
            let path = task.dir.join(PROPERTIES_FILE);
            self.jobs.push(CoreJob::NameServerFile {
                path,
                bytes: text.into_bytes(),
            });
        }
    }
}
