//! Load of one worker: its last report, and what this router placed on it since.

use crate::placement::{Measured, Own, WorkerRates};
use baton_types::{InstanceRecord, LoadReport, TenantLabel};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Content of the last report.
#[derive(Clone, Copy, Debug)]
struct Report {
    at: Instant,
    measured: Measured,
    usable: bool,
}

/// The last report as received, for the status.
#[derive(Clone, Debug)]
pub(crate) struct LastReport {
    /// When it arrived here.
    pub at: Instant,
    pub report: LoadReport,
}

/// After this time the rates of an idle worker count as old.
const RATES_AGE_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct State {
    /// When work last confirmed the rates.
    rates_at: Option<Instant>,
    report: Option<Report>,
    /// Kept after the worker is lost.
    last_report: Option<LastReport>,
    /// Number of reports so far.
    reports: u64,
    placed: u32,
    placed_prefill_tokens: u64,
    placed_kv_tokens: u64,
    /// What each tenant has there through this router; reports do not say it.
    tenants: BTreeMap<TenantLabel, Own>,
}

/// Combines reports with placements. A report replaces all earlier placements: the worker has already counted them. It does not say which
/// tenant has what, so for that all placements count.
#[derive(Debug, Default)]
pub(crate) struct Load(Arc<Mutex<State>>);

/// A placement that counts as load of a worker until the worker's next report, or until it is dropped. A worker whose load is unchanged
/// does not report for up to a second, so an attempt that failed must not count until then. It counts as its tenant's until it is dropped.
#[derive(Debug)]
#[must_use = "a dropped placement does not count"]
pub(crate) struct Placed {
    state: Arc<Mutex<State>>,
    /// Number of reports before the placement.
    reports: u64,
    tenant: TenantLabel,
    waits: AtomicBool,
    prefill_tokens: u64,
    kv_tokens: u64,
}

impl Placed {
    /// Its first token came: it waits no more.
    pub(crate) fn began(&self) {
        if self.waits.swap(false, Ordering::Relaxed)
            && let Some(own) = self.state.lock().tenants.get_mut(&self.tenant)
        {
            own.waiting -= 1;
            own.waiting_tokens -= self.prefill_tokens;
        }
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.began();
        let mut state = self.state.lock();
        if let Some(own) = state.tenants.get_mut(&self.tenant) {
            own.sequences -= 1;
            if own.sequences == 0 {
                state.tenants.remove(&self.tenant);
            }
        }
        if state.reports == self.reports {
            state.placed -= 1;
            state.placed_prefill_tokens -= self.prefill_tokens;
            state.placed_kv_tokens -= self.kv_tokens;
        }
    }
}

impl Load {
    /// Takes a report of the worker with this record.
    pub(crate) fn report(&self, report: &LoadReport, record: &InstanceRecord, now: Instant) {
        let blocks = report.blocks.unwrap_or_default();
        let block_tokens = record.capacity_tokens.checked_div(blocks.total).unwrap_or(0);
        let free_tokens = blocks.free.saturating_add(blocks.cached).saturating_mul(block_tokens);
        let mut measured = Measured {
            waiting: report.waiting,
            waiting_tokens: report.waiting_tokens,
            running: report.running,
            free_tokens: free_tokens.saturating_sub(report.claimed_tokens),
            waives_margin: blocks.total > 0 && blocks.referenced == 0 && report.claimed_tokens == 0,
            prefill_tokens_per_s: f64::from(report.prefill_tokens_per_s).max(0.0),
            decode_steps_per_s: f64::from(report.decode_steps_per_s).max(0.0),
            best: WorkerRates::default(),
            rates_are_old: false,
        };
        let usable = report.healthy && !report.draining;
        let mut state = self.0.lock();
        let recent = |r: Report| r.measured.best.after(now.saturating_duration_since(r.at));
        measured.best = state.report.map_or_else(WorkerRates::default, recent).max(measured.rates());
        let idle = report.running == 0 && report.waiting == 0;
        let same = state.report.is_some_and(|r| r.measured.rates() == measured.rates());
        let rates_at = state.rates_at.filter(|_| idle && same).or(Some(now));
        let last_report = Some(LastReport { at: now, report: report.clone() });
        let (report, reports) = (Some(Report { at: now, measured, usable }), state.reports + 1);
        let tenants = std::mem::take(&mut state.tenants);
        *state = State { rates_at, last_report, report, reports, tenants, ..State::default() };
    }

    /// The worker does not report any more.
    pub(crate) fn lost(&self) {
        self.0.lock().report = None;
    }

    /// The last report, of any age.
    pub(crate) fn last_report(&self) -> Option<LastReport> {
        self.0.lock().last_report.clone()
    }

    /// Counts a sequence of a tenant placed now: prompt tokens to compute there, and tokens of KV to store there.
    pub(crate) fn placed(&self, tenant: TenantLabel, prefill_tokens: u64, kv_tokens: u64) -> Placed {
        let mut state = self.0.lock();
        let own = state.tenants.entry(tenant).or_default();
        own.sequences += 1;
        own.waiting += 1;
        own.waiting_tokens += prefill_tokens;
        state.placed += 1;
        state.placed_prefill_tokens += prefill_tokens;
        state.placed_kv_tokens += kv_tokens;
        let waits = AtomicBool::new(true);
        Placed { state: self.0.clone(), reports: state.reports, tenant, waits, prefill_tokens, kv_tokens }
    }

    /// What a tenant has there through this router.
    pub(crate) fn own(&self, tenant: TenantLabel) -> Own {
        self.0.lock().tenants.get(&tenant).copied().unwrap_or_default()
    }

    /// The load now; `None` if requests must not be placed on the worker: no report yet, stale, unhealthy or draining.
    pub(crate) fn measured(&self, now: Instant, stale_max: Duration) -> Option<Measured> {
        let state = self.0.lock();
        let report = state.report.filter(|r| r.usable && now.saturating_duration_since(r.at) <= stale_max)?;
        let m = report.measured;
        Some(Measured {
            waiting: m.waiting.saturating_add(state.placed),
            waiting_tokens: m.waiting_tokens.saturating_add(state.placed_prefill_tokens),
            free_tokens: m.free_tokens.saturating_sub(state.placed_kv_tokens),
            waives_margin: m.waives_margin && state.placed == 0,
            rates_are_old: state.placed == 0
                && state.rates_at.is_some_and(|at| now.saturating_duration_since(at) > RATES_AGE_MAX),
            ..m
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;
    use baton_types::{BlockCounts, Role};

    const T: TenantLabel = TenantLabel(7);

    fn report() -> LoadReport {
        LoadReport {
            waiting: 1,
            waiting_tokens: 100,
            running: 2,
            claimed_tokens: 32,
            healthy: true,
            blocks: Some(BlockCounts { total: 512, free: 10, referenced: 500, cached: 2, quarantined: 0 }),
            ..Default::default()
        }
    }

    #[test]
    fn only_a_worker_whose_blocks_nobody_refers_to_waives_its_margin() {
        let (load, record, now) = (Load::default(), record(Role::Decode, "d"), Instant::now());
        let waives = |referenced, claimed_tokens| {
            let blocks = BlockCounts { total: 512, free: 4, referenced, cached: 0, quarantined: 508 - referenced };
            load.report(&LoadReport { blocks: Some(blocks), claimed_tokens, ..report() }, &record, now);
            load.measured(now, Duration::from_secs(3)).unwrap().waives_margin
        };
        assert_eq!([(0, 0), (1, 0), (0, 1)].map(|(r, c)| waives(r, c)), [true, false, false]);
        assert!(waives(0, 0));
        let _placed = load.placed(T, 0, 16);
        assert!(!load.measured(now, Duration::from_secs(3)).unwrap().waives_margin, "it will refer to some");
    }

    #[test]
    fn placements_that_ended_count_no_more() {
        let (load, record, now) = (Load::default(), record(Role::Decode, "d"), Instant::now());
        let measured = || load.measured(now, Duration::from_secs(3)).unwrap();
        load.report(&report(), &record, now);
        let before = measured();
        let (ends, stays) = (load.placed(T, 50, 60), load.placed(T, 7, 8));
        drop(ends);
        let after = measured();
        assert_eq!((after.waiting, after.waiting_tokens, after.free_tokens), (2, 107, 12 * 16 - 32 - 8));
        load.report(&report(), &record, now);
        let _later = load.placed(T, 1, 1);
        drop(stays); // The report has counted it.
        assert_eq!((measured().waiting, measured().waiting_tokens), (before.waiting + 1, before.waiting_tokens + 1));
    }

    #[test]
    fn sums_of_reported_numbers_do_not_wrap() {
        let (load, mut record, now) = (Load::default(), record(Role::Decode, "d"), Instant::now());
        record.capacity_tokens = u64::MAX;
        let blocks = BlockCounts { total: 1, free: u64::MAX, cached: u64::MAX, ..BlockCounts::default() };
        let (waiting, waiting_tokens) = (u32::MAX, u64::MAX);
        let full = LoadReport { waiting, waiting_tokens, claimed_tokens: 0, blocks: Some(blocks), ..report() };
        load.report(&full, &record, now);
        let _placed = load.placed(T, 5, 0);
        let measured = load.measured(now, Duration::from_secs(3)).unwrap();
        let read = (measured.waiting, measured.waiting_tokens, measured.free_tokens);
        assert_eq!(read, (u32::MAX, u64::MAX, u64::MAX));
    }

    #[test]
    fn what_a_tenant_has_there_is_known_whatever_was_reported() {
        let (load, record, now) = (Load::default(), record(Role::Decode, "d"), Instant::now());
        let own = |sequences, waiting, waiting_tokens| Own { sequences, waiting, waiting_tokens };
        let (one, two) = (load.placed(T, 50, 60), load.placed(T, 7, 8));
        let _other = load.placed(TenantLabel(8), 1000, 1);
        load.report(&report(), &record, now);
        assert_eq!(load.own(T), own(2, 2, 57));
        (0..2).for_each(|_| one.began());
        assert_eq!(load.own(T), own(2, 1, 7), "each token of the answer tells it");
        drop(two);
        assert_eq!(load.own(T), own(1, 0, 0));
        drop(one);
        assert_eq!((load.own(T), load.0.lock().tenants.len()), (Own::default(), 1));
    }

    #[test]
    fn placements_count_until_the_next_report() {
        let (load, record, now) = (Load::default(), record(Role::Decode, "d"), Instant::now());
        let stale = Duration::from_secs(3);
        assert_eq!(load.measured(now, stale), None);
        load.report(&report(), &record, now);
        let before = load.measured(now, stale).unwrap();
        assert_eq!((before.waiting, before.waiting_tokens, before.free_tokens), (1, 100, 12 * 16 - 32));
        let _placed = load.placed(T, 50, 60);
        let after = load.measured(now, stale).unwrap();
        assert_eq!((after.waiting, after.waiting_tokens, after.free_tokens), (2, 150, 100));
        load.report(&report(), &record, now);
        assert_eq!(load.measured(now, stale), Some(before));
    }

    #[test]
    fn rates_of_an_idle_worker_age() {
        let (load, record, start) = (Load::default(), record(Role::Prefill, "p"), Instant::now());
        let report = |running, rate| LoadReport { running, waiting: 0, prefill_tokens_per_s: rate, ..report() };
        // (seconds, running sequences, rate, whether it is old then)
        let reports = [
            (0, 1, 100.0, false),
            (1, 0, 100.0, false),
            (2, 0, 100.0, true),
            (3, 1, 100.0, false),
            (6, 0, 90.0, false),
        ];
        for (s, running, rate, old) in reports {
            let now = start + Duration::from_secs(s);
            load.report(&report(running, rate), &record, now);
            let measured = load.measured(now, Duration::from_secs(3)).unwrap();
            assert_eq!(measured.rates_are_old, old, "after {s} s");
        }
        let (now, stale) = (start + Duration::from_secs(9), Duration::from_secs(3));
        load.report(&report(0, 90.0), &record, now);
        assert!(load.measured(now, stale).unwrap().rates_are_old);
        let _placed = load.placed(T, 1, 1);
        assert!(!load.measured(now, stale).unwrap().rates_are_old, "the next one is behind that");
    }

    #[test]
    fn the_best_rates_are_remembered_for_a_while() {
        let (load, record, start) = (Load::default(), record(Role::Decode, "d"), Instant::now());
        let best = |s: u64, rate: f32| {
            let now = start + Duration::from_secs(s);
            let (prefill_tokens_per_s, decode_steps_per_s) = (rate, rate / 10.0);
            load.report(&LoadReport { prefill_tokens_per_s, decode_steps_per_s, ..report() }, &record, now);
            let best = load.measured(now, Duration::from_secs(3)).unwrap().best;
            (best.prefill_tokens_per_s.round(), best.decode_steps_per_s.round())
        };
        assert_eq!(
            [(0, 800.0), (60, 100.0), (120, 300.0)].map(|(s, r)| best(s, r)),
            [(800.0, 80.0), (400.0, 40.0), (300.0, 30.0)]
        );
        load.lost();
        assert_eq!(best(121, 100.0), (100.0, 10.0));
    }

    #[test]
    fn unusable_workers_have_no_load() {
        let (load, record, now) = (Load::default(), record(Role::Decode, "d"), Instant::now());
        let stale = Duration::from_secs(3);
        load.report(&report(), &record, now);
        assert!(load.measured(now + stale, stale).is_some());
        assert!(load.measured(now + stale + Duration::from_millis(1), stale).is_none(), "stale");
        load.lost();
        assert!(load.measured(now, stale).is_none(), "lost");
        assert_eq!(load.last_report().unwrap().at, now, "what it said last is known all the same");
        for (healthy, draining) in [(false, false), (true, true)] {
            load.report(&LoadReport { healthy, draining, ..report() }, &record, now);
            assert!(load.measured(now, stale).is_none());
        }
    }
}
