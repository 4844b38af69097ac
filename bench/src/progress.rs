//! Owns the line on the terminal while a run goes on.
//!
//! Invariant: the measuring thread only stores numbers; drawing is done by a thread of its own,
//! which is started before the measuring thread is pinned and so keeps off its core where it can.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often the line is drawn.
const DRAW_EVERY: Duration = Duration::from_millis(500);
const TEMPLATE: &str = "{prefix} [{bar:30}] {msg}";

#[derive(Debug, Default)]
struct Shared {
    now_ms: AtomicU64,
    acked: AtomicU64,
    failed: AtomicU64,
    backlog: AtomicU64,
    whole_ms: AtomicU64,
    ended: AtomicBool,
    /// Changed between loops only.
    label: Mutex<String>,
}

/// What the measuring thread tells.
#[derive(Debug, Default)]
pub struct Progress {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Draws on stderr, when that is a terminal.
    pub fn start() -> Self {
        let shared = Arc::new(Shared::default());
        let drawn = shared.clone();
        let spawned = std::thread::Builder::new()
            .name("progress".to_owned())
            .spawn(move || draw(&drawn));
        Self {
            shared,
            thread: spawned.ok(),
        }
    }

    /// A loop begins.
    pub fn begin(&self, label: &str, seconds: f64) {
        let mut text = self
            .shared
            .label
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        label.clone_into(&mut text);
        self.shared
            .whole_ms
            .store((seconds * 1e3) as u64, Ordering::Relaxed);
        self.tell(0, 0, 0, 0);
    }

    /// So far.
    pub fn tell(&self, now_ns: u64, acked: u64, failed: u64, backlog: u64) {
        let shared = &self.shared;
        shared.now_ms.store(now_ns / 1_000_000, Ordering::Relaxed);
        shared.acked.store(acked, Ordering::Relaxed);
        shared.failed.store(failed, Ordering::Relaxed);
        shared.backlog.store(backlog, Ordering::Relaxed);
    }

    /// A loop is over.
    pub fn end(&self) {
        self.shared.whole_ms.store(0, Ordering::Relaxed);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn draw(shared: &Shared) {
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
        bar.set_style(style);
    }
    let (mut last_acked, mut last_ms) = (0, 0);
    while !shared.ended.load(Ordering::Relaxed) {
        std::thread::sleep(DRAW_EVERY);
        let whole_ms = shared.whole_ms.load(Ordering::Relaxed);
        if whole_ms == 0 {
            continue;
        }
        let now_ms = shared.now_ms.load(Ordering::Relaxed);
        let acked = shared.acked.load(Ordering::Relaxed);
        let elapsed_ms = now_ms.saturating_sub(last_ms).max(1);
        let rate = acked.saturating_sub(last_acked) * 1_000 / elapsed_ms;
        (last_acked, last_ms) = (acked, now_ms);
        bar.set_length(whole_ms);
        bar.set_position(now_ms.min(whole_ms));
        let label = shared.label.lock().unwrap_or_else(PoisonError::into_inner);
        bar.set_prefix(label.clone());
        bar.set_message(format!(
            "{:.0} of {:.0} s, {rate} msg/s, {} failed, backlog {}",
            now_ms as f64 / 1e3,
            whole_ms as f64 / 1e3,
            shared.failed.load(Ordering::Relaxed),
            shared.backlog.load(Ordering::Relaxed),
        ));
    }
    bar.finish_and_clear();
}
