//! Owns code 28, the figures tools and dashboards show of a broker.
//!
//! Invariant: every key RocketMQ's tools read is there, with a value they can parse; what has no
//! meaning here reads as idle.

use std::collections::BTreeMap;

use wire::body::KVTable;
use wire::header::SERVER_VERSION;

use super::Control;
use super::answer::{Answer, Call, Outcome, now};
use super::effects::Effect;
use super::stats::{Totals, stores};
use crate::core::report::{Report, ReportQuery, StoreReport};

/// How full the disk of a shard's log is, between 0 and 1.
fn used_ratio(store: &StoreReport) -> f64 {
    let used = store.disk_total_bytes.saturating_sub(store.disk_free_bytes);
    used as f64 / store.disk_total_bytes.max(1) as f64
}

/// Upper bounds (milliseconds) of the text of how long puts took.
const PUT_TIME_RANGES: [&str; 13] = [
    "<=0ms",
    "0~10ms",
    "10~50ms",
    "50~100ms",
    "100~200ms",
    "200~500ms",
    "500ms~1s",
    "1~2s",
    "2~3s",
    "3~4s",
    "4~5s",
    "5~10s",
    "10s~",
];

type Table = BTreeMap<String, String>;

fn put(table: &mut Table, key: &str, value: impl ToString) {
    table.insert(key.to_owned(), value.to_string());
}

impl Control {
    /// Code 28.
    pub(super) fn runtime_info(&self, call: &Call<'_>, effects: &mut Vec<Effect>) -> Outcome {
        let query = ReportQuery {
            store: true,
            ..ReportQuery::default()
        };
        call.with_reports(query, effects)
    }

    /// Code 28 with its reports.
    pub(super) fn finish_runtime_info(&mut self, call: &Call<'_>, reports: &[Report]) -> Outcome {
        self.stats.record(call.now_ms, reports);
        let totals = Totals::of(reports);
        let mut table = Table::new();
        self.put_identity(&mut table, call.now_ms, reports);
        self.put_rates(&mut table, call.now_ms, &totals);
        self.put_totals(&mut table, &totals, reports);
        self.put_store(&mut table, reports);
        self.put_waiting(&mut table, reports);
        now(Answer::json(&KVTable { table })?)
    }

    fn put_identity(&self, table: &mut Table, now_ms: i64, reports: &[Report]) {
        let seconds = (now_ms - self.boot_ms).max(0) / 1000;
        let (days, hours) = (seconds / 86_400, seconds / 3_600 % 24);
        let (minutes, seconds) = (seconds / 60 % 60, seconds % 60);
        let is_active = stores(reports).all(|store| store.refusing.is_none());
        put(table, "brokerVersionDesc", "V5_3_3");
        put(table, "brokerVersion", SERVER_VERSION);
        put(table, "brokerActive", is_active);
        put(table, "bootTimestamp", self.boot_ms);
        put(
            table,
            "runtime",
            format!("[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"),
        );
        put(table, "startAcceptSendRequestTimeStamp", 0);
        put(table, "pinionVersion", env!("CARGO_PKG_VERSION"));
        for store in stores(reports) {
            if let Some(reason) = &store.refusing {
                put(table, &format!("refusingShard{}", store.shard), reason);
            }
        }
    }

    fn put_rates(&self, table: &mut Table, now_ms: i64, totals: &Totals) {
        let rates = |of: fn(&Totals) -> u64| self.stats.rates(now_ms, totals, of);
        put(table, "putTps", rates(|totals| totals.put));
        put(table, "getFoundTps", rates(|totals| totals.found));
        put(table, "getMissTps", rates(|totals| totals.missed));
        put(
            table,
            "getTotalTps",
            rates(|totals| totals.found + totals.missed),
        );
        put(table, "getTransferredTps", rates(|totals| totals.got));
    }

    fn put_totals(&self, table: &mut Table, totals: &Totals, reports: &[Report]) {
        let sum = |of: fn(&StoreReport) -> u64| stores(reports).map(of).sum::<u64>();
        let most = |of: fn(&StoreReport) -> u64| stores(reports).map(of).max().unwrap_or(0);
        let put_bytes = sum(|store| store.put_bytes);
        let days = &self.stats.days;
        put(table, "putMessageTimesTotal", totals.put);
        put(table, "putMessageSizeTotal", put_bytes);
        put(
            table,
            "putMessageAverageSize",
            put_bytes as f64 / totals.put.max(1) as f64,
        );
        put(
            table,
            "putMessageFailedTimes",
            sum(|store| store.put_refused),
        );
        put(
            table,
            "putMessageEntireTimeMax",
            most(|store| store.put_latency_max_us) / 1000,
        );
        put(table, "getMessageEntireTimeMax", 0);
        put(
            table,
            "putLatency99",
            most(|store| store.put_latency_p99_us) as f64 / 1000.0,
        );
        put(
            table,
            "putLatency999",
            most(|store| store.put_latency_p999_us) as f64 / 1000.0,
        );
        put(table, "putMessageDistributeTime", distribution(reports));
        put(table, "dispatchMaxBuffer", 0);
        put(table, "msgPutTotalTodayNow", totals.put);
        put(table, "msgPutTotalTodayMorning", days.today_morning.put);
        put(
            table,
            "msgPutTotalYesterdayMorning",
            days.yesterday_morning.put,
        );
        put(table, "msgGetTotalTodayNow", totals.got);
        put(table, "msgGetTotalTodayMorning", days.today_morning.got);
        put(
            table,
            "msgGetTotalYesterdayMorning",
            days.yesterday_morning.got,
        );
    }

    fn put_store(&self, table: &mut Table, reports: &[Report]) {
        let least = stores(reports).map(|store| store.log_min_offset).min();
        // Shards have address ranges of their own: the end of "the log" that grows with every
        // message is the lowest start plus what all shards hold.
        let held = stores(reports).map(|store| store.log_max_offset - store.log_min_offset);
        let held: i64 = held.sum();
        let behind: i64 = stores(reports).map(|store| store.flush_behind_bytes).sum();
        let earliest = stores(reports).map(|store| store.earliest_store_timestamp);
        let earliest = earliest.filter(|at_ms| *at_ms >= 0).min().unwrap_or(-1);
        let least = least.unwrap_or(0);
        put(table, "commitLogMinOffset", least);
        put(table, "commitLogMaxOffset", least + held);
        put(table, "dispatchBehindBytes", 0);
        put(table, "earliestMessageTimeStamp", earliest);
        put(table, "pageCacheLockTimeMills", 0);
        put(table, "remainTransientStoreBufferNumbs", i32::MAX);
        put(table, "remainHowManyDataToCommit", 0);
        put(
            table,
            "remainHowManyDataToFlush",
            text_of_bytes(behind.max(0) as f64),
        );
        let fullest = stores(reports).max_by(|a, b| used_ratio(a).total_cmp(&used_ratio(b)));
        let ratio = fullest.map_or(0.0, used_ratio);
        put(table, "commitLogDiskRatio", ratio);
        put(table, "consumeQueueDiskRatio", ratio);
        for store in stores(reports) {
            let key = format!("commitLogDiskRatio_{}", store.log_dir);
            put(table, &key, used_ratio(store));
        }
        let text = |of: fn(&StoreReport) -> u64| text_of_bytes(fullest.map_or(0, of) as f64);
        let total = text(|store| store.disk_total_bytes);
        let free = text(|store| store.disk_free_bytes);
        put(
            table,
            "commitLogDirCapacity",
            format!("Total : {total}, Free : {free}."),
        );
    }

    fn put_waiting(&self, table: &mut Table, reports: &[Report]) {
        let parked: u64 = stores(reports).map(|store| store.parked_pulls).sum();
        let delayed = stores(reports).flat_map(|store| &store.delayed);
        let delayed: u64 = delayed.map(|(_, count)| count).sum();
        let capacities = [
            ("send", self.config.sends_waiting_max),
            ("pull", self.config.pulls_waiting_max),
            ("litePull", self.config.pulls_waiting_max),
            ("query", 20_000),
            ("ack", 100_000),
        ];
        for (name, capacity) in capacities {
            put(table, &format!("{name}ThreadPoolQueueSize"), 0);
            put(table, &format!("{name}ThreadPoolQueueCapacity"), capacity);
            put(table, &format!("{name}ThreadPoolQueueHeadWaitTimeMills"), 0);
        }
        let open: u64 = stores(reports).map(|store| store.transactions_open).sum();
        let oldest = stores(reports).map(|store| store.transaction_oldest_ms);
        let oldest_ms = oldest.filter(|ms| *ms > 0).min();
        put(table, "transactionsOpen", open);
        put(table, "transactionOldestStoreTime", oldest_ms.unwrap_or(0));
        put(table, "transactionChecksAsked", self.checks.asked);
        put(table, "transactionChecksUnasked", self.checks.unasked);
        put(table, "EndTransactionQueueSize", 0);
        put(table, "EndTransactionThreadPoolQueueCapacity", 100_000);
        put(table, "parkedPulls", parked);
        put(table, "timerReadBehind", 0);
        put(table, "timerOffsetBehind", 0);
        put(table, "timerCongestNum", delayed);
        put(table, "timerEnqueueTps", 0.0);
        put(table, "timerDequeueTps", 0.0);
        put(
            table,
            "queuesByShard",
            format!("{:?}", self.topics.load_by_shard()),
        );
    }
}

/// How long puts took, as text of ranges. Shards keep percentiles, so that the counts of the ranges
/// are estimates from these.
fn distribution(reports: &[Report]) -> String {
    let mut counts = [0u64; PUT_TIME_RANGES.len()];
    let range = |us: u64| match us / 1000 {
        0 => 0,
        1..10 => 1,
        10..50 => 2,
        50..100 => 3,
        100..200 => 4,
        200..500 => 5,
        500..1000 => 6,
        1000..2000 => 7,
        2000..3000 => 8,
        3000..4000 => 9,
        4000..5000 => 10,
        5000..10_000 => 11,
        _ => 12,
    };
    let mut add = |us: u64, count: u64| {
        if let Some(slot) = counts.get_mut(range(us)) {
            *slot += count;
        }
    };
    for store in stores(reports) {
        let (above_99, above_999) = (store.put_messages / 100, store.put_messages / 1000);
        add(store.put_latency_p99_us, store.put_messages - above_99);
        add(store.put_latency_p999_us, above_99 - above_999);
        add(store.put_latency_max_us, above_999);
    }
    let pairs = PUT_TIME_RANGES.iter().zip(counts);
    pairs
        .map(|(range, count)| format!("[{range}]:{count} "))
        .collect()
}

/// Bytes as people read them.
fn text_of_bytes(bytes: f64) -> String {
    let mut value = bytes;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return format!("{value:.1} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}
