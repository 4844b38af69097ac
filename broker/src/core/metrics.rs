//! Figures for `/metrics`: what the cores publish, and the page made of it.
//!
//! Each core owns a fixed set of atomics and stores its running counters there once a second; the
//! control task hands over the reports it gathers anyway every ten seconds. The page is made on the
//! thread that serves it.
//!
//! Invariant: no message costs anything here, a core never waits for a reader of the page (it gives
//! a sample up rather than wait for the slot), and the page's length has a bound.

mod page;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use shard::runtime::sys;

use self::page::{Page, escaped, is_label_name, sampled};
use super::report::Report;
use super::state::{LocalShard, State};
use crate::config::Config;
use crate::control::ControlCounters;
use crate::control::members::Conflict;
use crate::health::Health;

/// How often a core publishes, in microseconds.
pub const PUBLISH_US: u64 = 1_000_000;
/// Series by topic or group on one page; what is beyond is left out and counted.
pub const NAMED_SERIES_MAX: usize = 50_000;
/// Queues of the broker above which the lag of groups is not asked for.
pub const LAG_QUEUES_MAX: usize = 20_000;
/// How long after the last look at the page the lag of groups is still asked for, in microseconds.
const WANTED_US: u64 = 300_000_000;

/// One figure: name with labels of its own, kind, help, value.
type Figure = (&'static str, &'static str, &'static str, u64);

macro_rules! figures {
    (
        $(#[$outer:meta])*
        $Name:ident { $( #[doc = $help:literal] $field:ident: $kind:ident = $metric:literal, )* }
    ) => {
        $(#[$outer])*
        #[derive(Debug, Default)]
        pub struct $Name { $( #[doc = $help] pub $field: AtomicU64, )* }

        impl $Name {
            fn list(&self) -> Vec<Figure> {
                let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
                vec![ $( ($metric, stringify!($kind), $help, read(&self.$field)), )* ]
            }
        }
    };
}

figures! {
    /// What one core publishes.
    CoreFigures {
        /// Frames taken from connections.
        frames: counter = "pinion_frames_total",
        /// Frames that could not be read; each closed its connection.
        malformed: counter = "pinion_malformed_frames_total",
        /// Brokers that the name server in this process keeps out of the write path.
        fuse_isolated: gauge = "pinion_namesrv_isolated_brokers",
        /// Times that the fuse of the name server in this process changed its mind about a broker.
        fuse_transitions: counter = "pinion_namesrv_fuse_transitions_total",
        /// Connections open.
        connections: gauge = "pinion_connections",
        /// Requests sent on to the core that owns the queue.
        forwarded: counter = "pinion_mesh_requests_total",
        /// Messages that wait for room in a ring to another core.
        mesh_waiting: gauge = "pinion_mesh_waiting",
        /// How often a ring to another core was full.
        mesh_full: counter = "pinion_mesh_ring_full_total",
        /// How often a bound was met; the request was refused or the connection closed.
        mesh_refused: counter = "pinion_bound_hits_total{bound=\"mesh\"}",
        /// How often a bound was met; the request was refused or the connection closed.
        park_refused: counter = "pinion_bound_hits_total{bound=\"parked_pulls\"}",
        /// How often a bound was met; the request was refused or the connection closed.
        slow_closed: counter = "pinion_bound_hits_total{bound=\"connection_output\"}",
        /// How often a bound was met; the request was refused or the connection closed.
        pop_park_refused: counter = "pinion_bound_hits_total{bound=\"parked_pops\"}",
        /// Pops that wait for a message.
        pop_parked: gauge = "pinion_parked_pops",
        /// Pulls by what they found.
        get_found: counter = "pinion_pulls_total{result=\"found\"}",
        /// Pulls by what they found.
        get_missed: counter = "pinion_pulls_total{result=\"none\"}",
        /// Messages handed to consumers.
        get_messages: counter = "pinion_messages_out_total",
        /// Bytes handed to consumers.
        get_bytes: counter = "pinion_bytes_out_total",
    }
}

figures! {
    /// What is published of one shard.
    ShardFigures {
        /// Messages appended.
        put_messages: counter = "pinion_messages_in_total",
        /// Bytes of records appended.
        put_bytes: counter = "pinion_bytes_in_total",
        /// Appends refused.
        put_refused: counter = "pinion_appends_refused_total",
        /// Time from append to answer since the start, in microseconds.
        latency_p50_us: gauge = "pinion_append_ack_us{quantile=\"0.5\"}",
        /// Time from append to answer since the start, in microseconds.
        latency_p99_us: gauge = "pinion_append_ack_us{quantile=\"0.99\"}",
        /// Time from append to answer since the start, in microseconds.
        latency_p999_us: gauge = "pinion_append_ack_us{quantile=\"0.999\"}",
        /// Time from append to answer since the start, in microseconds.
        latency_max_us: gauge = "pinion_append_ack_us{quantile=\"1\"}",
        /// Answers that wait for the watermark.
        replies_waiting: gauge = "pinion_answers_waiting",
        /// Group writes submitted to the disk.
        groups: counter = "pinion_log_groups_total",
        /// Bytes in the write buffer that the disk does not have yet.
        buffer_held_bytes: gauge = "pinion_write_buffer_held_bytes",
        /// Size of the write buffer.
        buffer_bytes: gauge = "pinion_write_buffer_bytes",
        /// Bytes of the log the device has not been told to flush yet.
        unsynced_bytes: gauge = "pinion_log_unsynced_bytes",
        /// Bytes of the log behind which nothing is readable yet.
        unreadable_bytes: gauge = "pinion_log_unreadable_bytes",
        /// Age of the oldest write or flush in flight, in microseconds.
        oldest_write_us: gauge = "pinion_log_oldest_write_us",
        /// Time of log writes in the last seconds, in microseconds.
        write_p50_us: gauge = "pinion_log_write_us{quantile=\"0.5\"}",
        /// Time of log writes in the last seconds, in microseconds.
        write_p99_us: gauge = "pinion_log_write_us{quantile=\"0.99\"}",
        /// 1 while a log write takes longer than pinion.fuseShardMs.
        disk_hangs: gauge = "pinion_shard_disk_hangs",
        /// Times that the disk of a shard began or ended to hang.
        disk_transitions: counter = "pinion_shard_disk_transitions_total",
        /// Sends refused because the disk of their shard hangs.
        disk_refused: counter = "pinion_shard_disk_refusals_total",
        /// Sends given back because the disk of their shard hangs; they are stored all the same.
        disk_given_back: counter = "pinion_shard_disk_given_back_total",
        /// Bytes of the log from its oldest segment to its end.
        log_bytes: gauge = "pinion_log_bytes",
        /// Pulls parked until a message comes.
        parked: gauge = "pinion_parked_pulls",
        /// 1 when a write or flush failed and the shard acknowledges nothing more.
        poisoned: gauge = "pinion_shard_poisoned",
        /// Use of the log's file system in percent.
        disk_used_percent: gauge = "pinion_disk_used_percent",
        /// Messages popped and not acknowledged.
        pop_in_flight: gauge = "pinion_pop_in_flight",
        /// Time since the oldest popped message is due to come again, in milliseconds.
        pop_overdue_ms: gauge = "pinion_pop_overdue_ms",
        /// Messages popped.
        pop_taken: counter = "pinion_pop_messages_total{what=\"taken\"}",
        /// Messages popped.
        pop_acked: counter = "pinion_pop_messages_total{what=\"acknowledged\"}",
        /// Messages popped.
        pop_late: counter = "pinion_pop_messages_total{what=\"acknowledged_late\"}",
        /// Messages popped.
        pop_changed: counter = "pinion_pop_messages_total{what=\"kept_longer\"}",
        /// Messages popped.
        pop_revived: counter = "pinion_pop_messages_total{what=\"tried_again\"}",
        /// Messages popped.
        pop_dead: counter = "pinion_pop_messages_total{what=\"dead\"}",
        /// Messages popped.
        pop_dropped: counter = "pinion_pop_messages_total{what=\"dropped_by_retention\"}",
        /// How often a bound was met; the request was refused or the connection closed.
        pop_bound_hit: counter = "pinion_bound_hits_total{bound=\"pop_in_flight\"}",
        /// Timed messages delivered.
        delayed_delivered: counter = "pinion_delayed_delivered_total",
        /// Timed messages dropped because their topic is gone.
        delayed_dropped: counter = "pinion_delayed_dropped_total",
        /// Open transactions.
        transactions_open: gauge = "pinion_transactions_open",
        /// Age of the oldest open transaction in milliseconds.
        transaction_oldest_ms: gauge = "pinion_transaction_oldest_ms",
        /// Half messages stored.
        halves_stored: counter = "pinion_half_messages_total",
        /// Half messages refused because too many transactions were open.
        halves_refused: counter = "pinion_half_messages_refused_total",
        /// Transactions committed.
        halves_committed: counter = "pinion_transactions_committed_total",
        /// Transactions rolled back.
        halves_rolled_back: counter = "pinion_transactions_rolled_back_total",
        /// Questions to producers about open transactions.
        halves_checked: counter = "pinion_transaction_checks_total",
        /// Transactions given up after transactionCheckMax questions.
        halves_given_up: counter = "pinion_transactions_given_up_total",
        /// Half messages dropped because their topic is gone or their record was damaged.
        halves_dropped: counter = "pinion_half_messages_dropped_total",
        /// Timed messages taken back before their time.
        timers_deleted: counter = "pinion_timers_deleted_total",
        /// Timed messages copied forward so that retention could drop their segment.
        timers_rolled: counter = "pinion_timers_rolled_total",
        /// Timed messages whose record was found damaged.
        timers_lost: counter = "pinion_timers_lost_total",
        /// Deletions of timed messages dropped at their bound.
        deletions_dropped: counter = "pinion_bound_hits_total{bound=\"timer_deletions\"}",
        /// Records that were damaged when read; left out of answers.
        damaged_records: counter = "pinion_damaged_records_total",
        /// Windows of older data read from the disk.
        cold_windows: counter = "pinion_cold_windows_total",
        /// Segments prepared ahead.
        segments_prepared: counter = "pinion_segments_prepared_total",
        /// Segments dropped by retention.
        segments_dropped: counter = "pinion_segments_dropped_total",
    }
}

fn set(to: &AtomicU64, value: u64) {
    to.store(value, Ordering::Relaxed);
}

/// What is published of a shard's disk.
#[derive(Clone, Copy, Debug)]
pub struct DiskFigures {
    /// 99th percentile of the last seconds' log writes, in microseconds.
    pub write_p99_us: u64,
    /// Sends refused because the disk hangs.
    pub refused: u64,
    /// Sends given back that were stored.
    pub given_back: u64,
    /// Times it began or ended to hang.
    pub transitions: u64,
}

/// What the cores publish into; made before they start.
#[derive(Debug)]
struct Cores {
    cores: Vec<CoreFigures>,
    shards: Vec<ShardFigures>,
}

/// What the control task hands over.
#[derive(Debug, Default)]
struct Sample {
    reports: Vec<Report>,
    counters: ControlCounters,
    conflicts: Vec<(Arc<str>, Conflict)>,
    permission: u32,
    at_ms: i64,
}

/// All figures of the process.
#[derive(Debug)]
pub struct Metrics {
    labels: String,
    buffer_bytes: u64,
    health: Arc<Health>,
    cores: OnceLock<Cores>,
    sample: Mutex<Sample>,
    looked_us: AtomicU64,
}

impl Metrics {
    /// Figures of a process with these settings; the cores are told later.
    #[must_use]
    pub fn new(config: &Config, health: Arc<Health>) -> Self {
        let (cluster, node) = (&config.broker_cluster_name.0, &config.broker_name.0);
        let mut labels = format!(
            "cluster=\"{}\",node_type=\"broker\",node_id=\"{}\"",
            escaped(cluster),
            escaped(node)
        );
        for (name, value) in config
            .metrics_label
            .split(',')
            .filter_map(|pair| pair.split_once(':'))
        {
            if is_label_name(name.trim()) {
                let _ = write!(labels, ",{}=\"{}\"", name.trim(), escaped(value.trim()));
            }
        }
        Self {
            labels,
            buffer_bytes: config.buffer_bytes.0,
            health,
            cores: OnceLock::new(),
            sample: Mutex::default(),
            looked_us: AtomicU64::new(0),
        }
    }

    /// Makes the places of the cores and shards, before the first of them runs.
    pub fn set_cores(&self, cores: usize, shards: usize) {
        let made = Cores {
            cores: (0..cores).map(|_| CoreFigures::default()).collect(),
            shards: (0..shards).map(|_| ShardFigures::default()).collect(),
        };
        // A second call would find the places made and in use; they stay.
        let _ = self.cores.set(made);
    }

    /// What was last published of each shard's disk.
    #[must_use]
    pub fn disk_figures(&self) -> Vec<DiskFigures> {
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let places = self.cores.get().map_or(&[][..], |cores| &cores.shards);
        let figures = places.iter().map(|place| DiskFigures {
            write_p99_us: read(&place.write_p99_us),
            refused: read(&place.disk_refused),
            given_back: read(&place.disk_given_back),
            transitions: read(&place.disk_transitions),
        });
        figures.collect()
    }

    /// Whether somebody looks at the page, so that the lag of groups is worth asking for.
    #[must_use]
    pub fn is_looked_at(&self, now_us: u64) -> bool {
        let looked = self.looked_us.load(Ordering::Relaxed);
        looked > 0 && now_us < looked.saturating_add(WANTED_US)
    }

    /// Takes a sample of the control task. Does not wait: while a page is being made of the last
    /// sample, this one is given up.
    fn take_sample(&self, sample: Sample) {
        if let Ok(mut kept) = self.sample.try_lock() {
            *kept = sample;
        }
    }

    /// The page.
    #[must_use]
    pub fn text(&self) -> String {
        set(&self.looked_us, sys::monotonic_us().max(1));
        let mut page = Page::new(&self.labels);
        self.process(&mut page);
        if let Some(cores) = self.cores.get() {
            self.published(cores, &mut page);
        }
        let sample = self.sample.lock().unwrap_or_else(PoisonError::into_inner);
        if sample.at_ms > 0 {
            sampled(&sample, &mut page);
        }
        drop(sample);
        page.finish()
    }

    fn process(&self, page: &mut Page<'_>) {
        let version = format!("version=\"{}\"", env!("CARGO_PKG_VERSION"));
        page.add("pinion_build_info", "gauge", "The program.", &version, 1);
        let phase = format!("phase=\"{}\"", self.health.phase().word());
        page.add(
            "pinion_phase",
            "gauge",
            "What the broker is doing.",
            &phase,
            1,
        );
        let percent = self.health.progress().0;
        let help = "Progress of recovery in percent; 100 once clients are served.";
        page.add("pinion_recovery_percent", "gauge", help, "", percent);
    }

    fn published(&self, cores: &Cores, page: &mut Page<'_>) {
        for (core, figures) in cores.cores.iter().enumerate() {
            page.add_all(&figures.list(), &format!("core=\"{core}\""));
        }
        let (mut log_bytes, mut unsynced, mut unreadable) = (0, 0, 0);
        for (shard, figures) in cores.shards.iter().enumerate() {
            set(&figures.buffer_bytes, self.buffer_bytes);
            page.add_all(&figures.list(), &format!("shard=\"{shard}\""));
            log_bytes += figures.log_bytes.load(Ordering::Relaxed);
            unsynced += figures.unsynced_bytes.load(Ordering::Relaxed);
            unreadable += figures.unreadable_bytes.load(Ordering::Relaxed);
        }
        let medium = "storage_type=\"local\",storage_medium=\"disk\"";
        let store = [
            (
                "rocketmq_storage_size",
                "Bytes of the commit log.",
                log_bytes,
            ),
            (
                "rocketmq_storage_flush_behind_bytes",
                "Bytes not flushed to the device.",
                unsynced,
            ),
            (
                "rocketmq_storage_dispatch_behind_bytes",
                "Bytes not readable yet.",
                unreadable,
            ),
        ];
        for (name, help, value) in store {
            page.add(name, "gauge", help, medium, value);
        }
    }
}

impl State {
    /// Publishes this core's figures when a second has passed.
    pub fn metrics_turn(&mut self) {
        if self.now.monotonic_us < self.published_us + PUBLISH_US {
            return;
        }
        self.published_us = self.now.monotonic_us;
        let Some(places) = self.metrics.cores.get() else {
            return;
        };
        if let Some(place) = places.cores.get(self.core) {
            self.publish_core(place);
        }
        for (index, local) in self.shards.iter().enumerate() {
            let number = usize::from(local.shard.number());
            if let Some(place) = places.shards.get(number) {
                publish_shard(local, self.now, place);
                let disk = self.disks.figures(index);
                set(&place.disk_hangs, u64::from(disk.hangs));
                set(&place.disk_refused, disk.refused);
                set(&place.disk_given_back, disk.given_back);
                set(&place.disk_transitions, disk.transitions);
            }
        }
    }

    fn publish_core(&self, place: &CoreFigures) {
        let counters = &self.counters;
        let waiting: usize = self
            .waiting
            .iter()
            .map(std::collections::VecDeque::len)
            .sum();
        set(&place.frames, counters.frames);
        set(&place.malformed, counters.malformed);
        set(&place.connections, self.net.len() as u64);
        if let Some(task) = &self.name_server {
            let (isolated, transitions) = task.server.fuse_figures();
            set(&place.fuse_isolated, isolated);
            set(&place.fuse_transitions, transitions);
        }
        set(&place.forwarded, counters.forwarded);
        set(&place.mesh_waiting, waiting as u64);
        set(&place.mesh_full, self.mesh.full_count());
        set(&place.pop_park_refused, self.pop.counters.park_refused);
        set(&place.pop_parked, self.pop.parked() as u64);
        set(&place.mesh_refused, counters.mesh_refused);
        set(&place.park_refused, counters.park_refused);
        set(&place.slow_closed, counters.slow_closed);
        set(&place.get_found, counters.get_found);
        set(&place.get_missed, counters.get_missed);
        set(&place.get_messages, counters.get_messages);
        set(&place.get_bytes, counters.get_bytes);
    }

    /// Whether a sample should bring queues and offsets along, for the lag of groups.
    #[must_use]
    pub fn wants_lag(&self) -> bool {
        let queues: usize = self
            .directory
            .topics
            .values()
            .map(|entry| entry.homes.len())
            .sum();
        queues <= LAG_QUEUES_MAX && self.metrics.is_looked_at(self.now.monotonic_us)
    }

    /// Hands a sample of the control task to the page.
    pub fn publish_sample(&self, reports: Vec<Report>) {
        let Some(task) = &self.control else { return };
        self.metrics.take_sample(Sample {
            reports,
            counters: task.control.counters(),
            conflicts: task.control.conflicts(),
            permission: self.config.broker_permission,
            at_ms: self.now.wall_ms,
        });
    }
}

fn publish_pop(shard: &shard::Shard, now: shard::runtime::Now, place: &ShardFigures) {
    let (counters, table) = (shard.pop_counters(), shard.pop());
    let due_ms = table.next_due_ms().unwrap_or(i64::MAX);
    let overdue_ms = u64::try_from(now.wall_ms.saturating_sub(due_ms)).unwrap_or(0);
    set(&place.pop_in_flight, table.held() as u64);
    set(&place.pop_overdue_ms, overdue_ms);
    set(&place.pop_taken, counters.taken);
    set(&place.pop_acked, counters.acked);
    set(&place.pop_late, counters.ack_missed);
    set(&place.pop_changed, counters.changed);
    set(&place.pop_revived, counters.revived);
    set(&place.pop_dead, counters.dead);
    set(&place.pop_dropped, counters.dropped);
    set(&place.pop_bound_hit, counters.bound_hit);
}

fn publish_shard(local: &LocalShard, now: shard::runtime::Now, place: &ShardFigures) {
    let (shard, log, latency) = (&local.shard, local.shard.log(), &local.latency);
    let counters = shard.counters();
    set(&place.put_messages, counters.put_messages);
    set(&place.put_bytes, counters.put_bytes);
    set(&place.put_refused, counters.put_refused);
    set(&place.latency_p50_us, latency.quantile_us(0.5));
    set(&place.latency_p99_us, latency.quantile_us(0.99));
    set(&place.latency_p999_us, latency.quantile_us(0.999));
    set(&place.latency_max_us, latency.max_us());
    publish_pop(shard, now, place);
    set(&place.replies_waiting, local.replies.len() as u64);
    set(&place.groups, log.groups_submitted());
    set(
        &place.buffer_held_bytes,
        log.tail().saturating_sub(log.written()),
    );
    set(
        &place.unsynced_bytes,
        log.tail().saturating_sub(log.synced()),
    );
    set(
        &place.unreadable_bytes,
        log.tail().saturating_sub(log.watermark()),
    );
    set(&place.oldest_write_us, log.oldest_in_flight_us(now));
    let write_us = |quantile| log.write_times().quantile_us(now.monotonic_us, quantile);
    set(&place.write_p50_us, write_us(0.5));
    set(&place.write_p99_us, write_us(0.99));
    set(
        &place.log_bytes,
        log.tail().saturating_sub(log.min_position()),
    );
    set(&place.parked, shard.parked_held() as u64);
    set(&place.poisoned, u64::from(log.poison().is_some()));
    set(
        &place.disk_used_percent,
        u64::from(shard.disk_used_percent()),
    );
    set(&place.delayed_delivered, counters.delayed_delivered);
    set(&place.delayed_dropped, counters.delayed_dropped);
    let (open, oldest_ms) = shard.halves_open();
    let age_ms = oldest_ms.map_or(0, |stored_ms| now.wall_ms.saturating_sub(stored_ms));
    set(&place.transactions_open, open);
    set(
        &place.transaction_oldest_ms,
        u64::try_from(age_ms).unwrap_or(0),
    );
    set(&place.halves_stored, counters.halves_stored);
    set(&place.halves_refused, counters.halves_refused);
    set(&place.halves_committed, counters.halves_committed);
    set(&place.halves_rolled_back, counters.halves_rolled_back);
    set(&place.halves_checked, counters.halves_checked);
    set(&place.halves_given_up, counters.halves_given_up);
    set(&place.halves_dropped, counters.halves_dropped);
    set(&place.timers_deleted, counters.timers_deleted);
    set(&place.timers_rolled, counters.timers_rolled);
    set(&place.timers_lost, counters.timers_lost);
    set(&place.deletions_dropped, counters.deletions_dropped);
    set(&place.damaged_records, counters.damaged_records);
    set(&place.cold_windows, counters.cold_windows);
    set(&place.segments_prepared, counters.segments_prepared);
    set(&place.segments_dropped, counters.segments_dropped);
}
