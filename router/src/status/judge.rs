//! State and problems of one worker. Pure: an observation comes in, a state and problems go out.

use crate::workers::LastReport;
use baton_types::{InstanceRecord, WATERMARK_BLOCKS};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Workers report at least every second: after this time two reports are missing.
pub(super) const SILENT_AFTER: Duration = Duration::from_millis(2_500);
/// A step takes a fraction of a second. One that runs for this long is reported, long before the bound at which it
/// counts as hung.
pub(super) const STILL_AFTER: Duration = Duration::from_secs(2);
/// A worker registers once it can serve; if it is not admitted for this long, something prevents it.
pub(super) const STARTING_MAX: Duration = Duration::from_secs(10);

/// Whether a worker announced that it drains. Earlier observations share the flag, since an idle worker may leave
/// between two observations.
#[derive(Clone, Debug, Default)]
pub(crate) struct Draining(pub(crate) Arc<AtomicBool>);

impl Draining {
    /// Whether it has been announced by now.
    pub(super) fn is_said(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// One worker at one moment.
#[derive(Clone, Debug)]
pub(crate) struct WorkerSnapshot {
    pub(crate) record: Arc<InstanceRecord>,
    /// Whether this router would place requests on it, apart from its load.
    pub(crate) admitted: bool,
    /// Whether it announced that it drains.
    pub(crate) draining: Draining,
    /// Whether it failed recently.
    pub(crate) avoided: bool,
    /// Why its reports do not arrive, if known.
    pub(crate) trouble: Option<String>,
    /// The last report that arrived; `None` before the first.
    pub(crate) last_report: Option<LastReport>,
}

/// The state of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Registered and not admitted yet.
    Starting,
    /// Requests are placed on it.
    Ready,
    /// Accepts no more requests, as ordered.
    Draining,
    /// Failed recently: other workers are preferred.
    Avoided,
    /// Reports that it cannot serve.
    Failing,
    /// It is registered and sends no reports.
    Silent,
    /// It is no longer registered.
    Gone,
}

/// Kinds of problems, worst first; also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    /// The router refuses requests.
    NotReady,
    /// etcd does not answer.
    Etcd,
    /// The etcd nodes belong to several clusters.
    EtcdDivided,
    /// etcd raises an alarm, such as lack of space.
    EtcdAlarm,
    /// A worker vanished without a drain.
    Gone,
    /// A worker sends no reports.
    Silent,
    /// A worker cannot serve.
    Failing,
    /// An engine's loop makes no progress.
    Stalled,
    /// A pool has no room, and a sequence needs some.
    PoolFull,
    /// A worker's queue is full.
    QueueFull,
    /// A worker has no partner to exchange KV with.
    Unpaired,
    /// A worker failed recently.
    Avoided,
}

impl Kind {
    pub(crate) const ALL: [Self; 12] = [
        Self::NotReady,
        Self::Etcd,
        Self::EtcdDivided,
        Self::EtcdAlarm,
        Self::Gone,
        Self::Silent,
        Self::Failing,
        Self::Stalled,
        Self::PoolFull,
        Self::QueueFull,
        Self::Unpaired,
        Self::Avoided,
    ];

    /// Name on the wire and in metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::NotReady => "not_ready",
            Self::Etcd => "etcd",
            Self::EtcdDivided => "etcd_divided",
            Self::EtcdAlarm => "etcd_alarm",
            Self::Gone => "gone",
            Self::Silent => "silent",
            Self::Failing => "failing",
            Self::Stalled => "stalled",
            Self::PoolFull => "pool_full",
            Self::QueueFull => "queue_full",
            Self::Unpaired => "unpaired",
            Self::Avoided => "avoided",
        }
    }
}

/// A problem that an operator should look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    /// The worker; empty if the problem concerns the whole cluster.
    pub(crate) worker: String,
    /// Description for an operator.
    pub(crate) text: String,
}

/// A time for people: whole seconds, minutes or hours.
pub(crate) fn duration_text(time: Duration) -> String {
    match time.as_secs() {
        s if s < 120 => format!("{s} s"),
        s if s < 7_200 => format!("{} min", s / 60),
        s => format!("{} h", s / 3_600),
    }
}

impl WorkerSnapshot {
    /// Whether its last report is too old, or known to be its last.
    fn is_silent(&self, now: Instant) -> bool {
        let age = |report: &LastReport| now.saturating_duration_since(report.at);
        self.last_report.as_ref().is_some_and(|report| self.trouble.is_some() || age(report) > SILENT_AFTER)
    }

    /// Its state, as far as one observation shows it.
    pub(super) fn state(&self, now: Instant) -> State {
        let Some(report) = &self.last_report else { return State::Starting };
        match () {
            () if self.is_silent(now) => State::Silent,
            () if self.draining.is_said() => State::Draining,
            () if !report.report.healthy => State::Failing,
            () if !self.admitted => State::Starting,
            () if self.avoided => State::Avoided,
            () => State::Ready,
        }
    }

    /// How long its running step has taken, as of now; unknown if the worker does not report it.
    pub(super) fn still(&self, now: Instant) -> Option<Duration> {
        let report = self.last_report.as_ref()?;
        let still = Duration::from_millis(report.report.still_ms?);
        Some(if still.is_zero() { still } else { still + now.saturating_duration_since(report.at) })
    }

    /// Whether a sequence waits for blocks of its pool, or even the smallest one would have to.
    pub(super) fn pool_is_full(&self) -> bool {
        let Some(report) = self.last_report.as_ref().map(|report| &report.report) else { return false };
        let kept = u64::from(WATERMARK_BLOCKS);
        let has_none = report.blocks.is_some_and(|b| b.total > 0 && b.free.saturating_add(b.cached) <= kept);
        has_none || report.lacks_blocks == Some(true)
    }

    /// Its problems, given how long it has been known and whether its pool has been full for a while.
    pub(super) fn problems(&self, known: Duration, is_full: bool, now: Instant) -> Vec<(Kind, String)> {
        let mut found = Vec::new();
        let why = self.trouble.as_ref().map(|trouble| format!(": {trouble}")).unwrap_or_default();
        let Some(report) = &self.last_report else {
            if known > STARTING_MAX {
                found.push((Kind::Silent, format!("registered {} ago and never heard{why}", duration_text(known))));
            }
            return found;
        };
        if self.is_silent(now) {
            let age = now.saturating_duration_since(report.at);
            found.push((Kind::Silent, format!("has said nothing for {}{why}", duration_text(age))));
            return found;
        }
        let still = self.still(now).filter(|still| *still >= STILL_AFTER);
        let stands = still.map(|still| format!("engine loop has not moved for {}", duration_text(still)));
        match (report.report.healthy, stands) {
            (true, None) => {}
            (true, Some(stands)) => found.push((Kind::Stalled, stands)),
            (false, Some(stands)) => found.push((Kind::Failing, format!("{stands}; it is given no work"))),
            (false, None) => found.push((Kind::Failing, "its engine or its data plane failed: restart it".into())),
        }
        let (waiting, waiting_max) = (report.report.waiting, self.record.waiting_max);
        if is_full {
            found.push((Kind::PoolFull, format!("pool full, {waiting} wait")));
        }
        if waiting_max > 0 && waiting >= waiting_max {
            found.push((Kind::QueueFull, format!("queue full, {waiting} wait")));
        }
        if self.avoided {
            found.push((Kind::Avoided, "failed a request of late; others come first".into()));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;
    use baton_types::{BlockCounts, LoadReport, Role};

    fn report() -> LoadReport {
        // 512 blocks of 16 tokens.
        let blocks = BlockCounts { total: 512, free: 500, referenced: 12, ..Default::default() };
        LoadReport { healthy: true, still_ms: Some(0), blocks: Some(blocks), ..Default::default() }
    }

    /// State and problems of a worker whose last report is `age_ms` milliseconds old.
    fn check(age_ms: u64, change: impl FnOnce(&mut WorkerSnapshot, &mut LoadReport), state: State, problems: &[&str]) {
        let now = Instant::now() + Duration::from_secs(60);
        let mut report = report();
        let mut seen = WorkerSnapshot {
            record: Arc::new(record(Role::Decode, "d")),
            admitted: true,
            draining: Draining::default(),
            avoided: false,
            trouble: None,
            last_report: None,
        };
        change(&mut seen, &mut report);
        seen.last_report = Some(LastReport { at: now - Duration::from_millis(age_ms), report });
        let is_full = seen.pool_is_full();
        let found = seen.problems(Duration::from_secs(60), is_full, now);
        let found: Vec<_> = found.iter().map(|(kind, text)| format!("{}: {text}", kind.name())).collect();
        assert_eq!(
            (seen.state(now), &*found),
            (state, &problems.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>()[..])
        );
    }

    #[test]
    fn a_worker_that_serves_has_no_problem() {
        check(1_000, |_, _| (), State::Ready, &[]);
        check(0, |s, _| s.draining = Draining(Arc::new(true.into())), State::Draining, &[]);
        check(0, |_, r| r.waiting = 3, State::Ready, &[]);
        let most = BlockCounts { total: 512, free: u64::MAX, cached: 1, ..Default::default() };
        check(0, |_, r| r.blocks = Some(most), State::Ready, &[]);
        // Of a release that did not report how long its step takes.
        check(0, |_, r| r.still_ms = None, State::Ready, &[]);
    }

    #[test]
    fn silence_is_told_before_the_load_goes_stale() {
        check(2_500, |_, _| (), State::Ready, &[]);
        check(3_100, |_, _| (), State::Silent, &["silent: has said nothing for 3 s"]);
        let trouble = |s: &mut WorkerSnapshot, _: &mut LoadReport| s.trouble = Some("its reports broke off".into());
        check(900, trouble, State::Silent, &["silent: has said nothing for 0 s: its reports broke off"]);
    }

    #[test]
    fn an_engine_that_stands_still_is_told_long_before_it_counts_as_hung() {
        check(0, |_, r| r.still_ms = Some(1_900), State::Ready, &[]);
        check(400, |_, r| r.still_ms = Some(1_600), State::Ready, &["stalled: engine loop has not moved for 2 s"]);
        let hung = |_: &mut WorkerSnapshot, r: &mut LoadReport| (r.healthy, r.still_ms) = (false, Some(61_000));
        check(0, hung, State::Failing, &["failing: engine loop has not moved for 61 s; it is given no work"]);
        let failed = ["failing: its engine or its data plane failed: restart it"];
        check(0, |_, r| r.healthy = false, State::Failing, &failed);
    }

    #[test]
    fn a_pool_is_full_where_somebody_waits_for_blocks() {
        let blocks = |free, cached| Some(BlockCounts { total: 512, free, cached, ..Default::default() });
        check(0, |_, r| r.blocks = blocks(3, 2), State::Ready, &[]);
        check(0, |_, r| r.blocks = blocks(3, 1), State::Ready, &["pool_full: pool full, 0 wait"]);
        let waits = |lacks| move |_: &mut WorkerSnapshot, r: &mut LoadReport| (r.waiting, r.lacks_blocks) = (2, lacks);
        // Two sequences that wait for rows of a step have enough blocks.
        check(0, waits(Some(false)), State::Ready, &[]);
        check(0, waits(None), State::Ready, &[]);
        check(0, waits(Some(true)), State::Ready, &["pool_full: pool full, 2 wait"]);
        check(0, |_, r| r.waiting = 16, State::Ready, &["queue_full: queue full, 16 wait"]);
        let avoided = ["avoided: failed a request of late; others come first"];
        check(0, |s, _| s.avoided = true, State::Avoided, &avoided);
    }

    #[test]
    fn a_worker_that_is_never_heard_is_told_after_a_while() {
        let now = Instant::now();
        let seen = WorkerSnapshot {
            record: Arc::new(record(Role::Decode, "d")),
            admitted: false,
            draining: Draining::default(),
            avoided: false,
            trouble: Some("it cannot be reached at 127.0.0.1:9".into()),
            last_report: None,
        };
        assert_eq!(seen.state(now), State::Starting);
        assert_eq!(seen.problems(STARTING_MAX, false, now), []);
        let told = &seen.problems(STARTING_MAX + Duration::from_secs(2), false, now)[0].1;
        assert_eq!(told, "registered 12 s ago and never heard: it cannot be reached at 127.0.0.1:9");
    }

    #[test]
    fn times_are_told_in_one_unit() {
        for (s, text) in [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "119 min"), (7_200, "2 h")] {
            assert_eq!(duration_text(Duration::from_secs(s)), text);
        }
    }
}
