//! History of each worker since this router knows it. Pure: observations are passed in with their time.

use super::judge::{Kind, Problem, State, WorkerSnapshot, duration_text};
use baton_types::{InstanceRecord, Party, Role};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A worker that vanished without a drain is shown for this long, or until it is back.
pub(super) const GONE_KEPT: Duration = Duration::from_secs(300);
/// Most vanished workers; the oldest are dropped first.
const GONE_MAX: usize = 64;
/// A pool that is full for less than this is just passing its blocks on.
const FULL_AFTER: Duration = Duration::from_secs(1);
/// Rates are averaged over this time: three reports of an idle worker.
const RATE_WINDOW: Duration = Duration::from_secs(3);

/// Counters of a worker since its start, and when they were reported.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    tokens: Option<u64>,
    kv_bytes: Option<u64>,
}

#[derive(Debug)]
struct WorkerHistory {
    seen: WorkerSnapshot,
    state: State,
    /// When it entered that state.
    since: Instant,
    /// When it was first seen.
    first: Instant,
    full_since: Option<Instant>,
    samples: VecDeque<Sample>,
}

/// All workers, with their recent history.
#[derive(Debug, Default)]
pub(crate) struct Board(BTreeMap<Party, WorkerHistory>);

/// A worker as it is shown.
#[derive(Debug)]
pub(crate) struct Row {
    /// The last observation of it.
    pub(crate) seen: WorkerSnapshot,
    pub(crate) state: State,
    /// How long it has been in that state.
    pub(crate) since: Duration,
    /// Age of its last report.
    pub(crate) report_age: Option<Duration>,
    /// How long the running step has taken.
    pub(crate) still: Option<Duration>,
    /// Tokens per second: prompt tokens on a prefill worker, generated tokens on a decode worker.
    pub(crate) tokens_per_s: Option<f64>,
    /// KV sent and adopted, in bytes per second.
    pub(crate) kv_bytes_per_s: Option<f64>,
    /// Problems of this worker, as the judge sees them.
    pub(crate) problems: Vec<Problem>,
}

impl WorkerHistory {
    fn new(seen: WorkerSnapshot, now: Instant) -> Self {
        let state = seen.state(now);
        Self { seen, state, since: now, first: now, full_since: None, samples: VecDeque::new() }
    }

    fn look(&mut self, seen: WorkerSnapshot, now: Instant) {
        self.full_since = if seen.pool_is_full() { self.full_since.or(Some(now)) } else { None };
        self.seen = seen;
        self.sample();
        self.become_state(self.seen.state(now), now);
    }

    fn become_state(&mut self, state: State, now: Instant) {
        if std::mem::replace(&mut self.state, state) != state {
            self.since = now;
        }
    }

    /// Records the counters of the last report.
    fn sample(&mut self) {
        let Some(last) = &self.seen.last_report else { return };
        if self.samples.back().is_some_and(|sample| sample.at >= last.at) {
            return;
        }
        let tokens = match self.seen.record.role {
            Role::Prefill => last.report.prefilled_tokens,
            Role::Decode => last.report.generated_tokens,
        };
        self.samples.push_back(Sample { at: last.at, tokens, kv_bytes: last.report.kv_bytes });
        while self.samples.front().is_some_and(|s| last.at.saturating_duration_since(s.at) > RATE_WINDOW) {
            self.samples.pop_front();
        }
    }

    /// Growth rate of a counter over the window; unknown with fewer than two reports.
    fn rate(&self, count: impl Fn(&Sample) -> Option<u64>) -> Option<f64> {
        let counted = |sample: &Sample| Some((sample.at, count(sample)?));
        let ((since, before), (at, now)) = (self.samples.iter().find_map(counted)?, counted(self.samples.back()?)?);
        let time = at.saturating_duration_since(since).as_secs_f64();
        (time > 0.0).then(|| now.saturating_sub(before) as f64 / time)
    }

    fn row(&self, now: Instant) -> Row {
        let age = |at: Instant| now.saturating_duration_since(at);
        let is_reporting = !matches!(self.state, State::Silent | State::Gone);
        let is_full = self.full_since.is_some_and(|since| age(since) >= FULL_AFTER);
        let found = match self.state {
            State::Gone => vec![(Kind::Gone, format!("gone {} ago", duration_text(age(self.since))))],
            _ => self.seen.problems(age(self.first), is_full, now),
        };
        let worker = self.seen.record.party.instance.as_str();
        let problem = |(kind, text)| Problem { kind, worker: worker.to_owned(), text };
        Row {
            state: self.state,
            since: age(self.since),
            report_age: self.seen.last_report.as_ref().map(|last| age(last.at)),
            still: self.seen.still(now).filter(|_| is_reporting),
            tokens_per_s: self.rate(|s| s.tokens).filter(|_| is_reporting),
            kv_bytes_per_s: self.rate(|s| s.kv_bytes).filter(|_| is_reporting),
            problems: found.into_iter().map(problem).collect(),
            seen: self.seen.clone(),
        }
    }
}

impl Board {
    /// Takes an observation of all registered workers.
    pub(crate) fn look(&mut self, all: Vec<WorkerSnapshot>, now: Instant) {
        let there: BTreeMap<Party, WorkerSnapshot> =
            all.into_iter().map(|seen| (seen.record.party.clone(), seen)).collect();
        let back = |party: &Party| there.keys().any(|other| other.instance == party.instance);
        self.0.retain(|party, known| match known.state {
            _ if there.contains_key(party) => true,
            // A worker that left in order, or was replaced by a new incarnation, is not a problem.
            _ if known.seen.draining.is_said() || back(party) => false,
            State::Gone => now.saturating_duration_since(known.since) < GONE_KEPT,
            _ => {
                known.become_state(State::Gone, now);
                true
            }
        });
        for (party, seen) in there {
            self.0.entry(party).or_insert_with(|| WorkerHistory::new(seen.clone(), now)).look(seen, now);
        }
        self.forget();
    }

    fn forget(&mut self) {
        let mut gone: Vec<_> =
            self.0.iter().filter(|(_, k)| k.state == State::Gone).map(|(p, k)| (k.since, p)).collect();
        gone.sort();
        let over = gone.len().saturating_sub(GONE_MAX);
        let oldest: Vec<Party> = gone.into_iter().take(over).map(|(_, party)| party.clone()).collect();
        oldest.iter().for_each(|party| drop(self.0.remove(party)));
    }

    /// All workers, by name.
    pub(crate) fn rows(&self, now: Instant) -> Vec<Row> {
        self.0.values().map(|known| known.row(now)).collect()
    }
}

impl Row {
    pub(crate) fn record(&self) -> &Arc<InstanceRecord> {
        &self.seen.record
    }
}

#[cfg(test)]
mod tests {
    use super::super::judge::Draining;
    use super::*;
    use crate::testing::record;
    use crate::workers::LastReport;
    use baton_types::{BlockCounts, Incarnation, LoadReport};
    use std::sync::atomic::Ordering;

    struct Case {
        board: Board,
        start: Instant,
    }

    fn seen(name: &str, report: Option<LoadReport>, at: Instant) -> WorkerSnapshot {
        WorkerSnapshot {
            record: Arc::new(record(Role::Decode, name)),
            admitted: true,
            draining: Draining::default(),
            avoided: false,
            trouble: None,
            last_report: report.map(|report| LastReport { at, report }),
        }
    }

    /// Turns a healthy worker into another one.
    type Change = fn(&mut WorkerSnapshot);

    fn healthy() -> LoadReport {
        LoadReport { healthy: true, ..Default::default() }
    }

    impl Case {
        fn new() -> Self {
            Self { board: Board::default(), start: Instant::now() }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        /// Observes these workers, each with a fresh report. Returns each one's state, seconds in that state, and
        /// problems.
        fn look(&mut self, ms: u64, workers: &[(&str, Change)]) -> String {
            let now = self.at(ms);
            let all = workers.iter().map(|(name, change)| {
                let mut seen = seen(name, Some(healthy()), now);
                change(&mut seen);
                seen
            });
            self.board.look(all.collect(), now);
            let told = |row: Row| {
                let problems: Vec<_> = row.problems.iter().map(|p| format!(" {}", p.text)).collect();
                let name = row.record().party.instance.clone();
                format!("{name} {:?} {}{}", row.state, row.since.as_secs(), problems.join(","))
            };
            self.board.rows(now).into_iter().map(told).collect::<Vec<_>>().join("; ")
        }
    }

    const SAME: Change = |_| ();
    const DRAINS: Change = |s| s.draining.0.store(true, Ordering::Release);
    const NEXT_START: Change = |s| Arc::make_mut(&mut s.record).party.incarnation = Incarnation(8);

    #[test]
    fn a_worker_that_vanishes_is_told_of_until_it_is_back_or_forgotten() {
        let mut case = Case::new();
        assert_eq!(case.look(0, &[("a", SAME), ("b", SAME)]), "a Ready 0; b Ready 0");
        assert_eq!(case.look(5_000, &[("a", SAME)]), "a Ready 5; b Gone 0 gone 0 s ago");
        assert_eq!(case.look(8_000, &[("a", SAME)]), "a Ready 8; b Gone 3 gone 3 s ago");
        assert_eq!(case.look(9_000, &[("a", SAME), ("b", NEXT_START)]), "a Ready 9; b Ready 0");
        assert_eq!(case.look(10_000, &[("b", NEXT_START)]), "a Gone 0 gone 0 s ago; b Ready 1");
        let kept = 10_000 + GONE_KEPT.as_millis() as u64;
        assert!(case.look(kept - 1, &[]).contains("a Gone 299"));
        assert_eq!(case.look(kept, &[]), "b Gone 0 gone 0 s ago");
    }

    #[test]
    fn a_worker_that_drained_leaves_without_a_word() {
        let mut case = Case::new();
        case.look(0, &[("a", SAME)]);
        assert_eq!(case.look(1_000, &[("a", DRAINS)]), "a Draining 0");
        assert_eq!(case.look(2_000, &[]), "");
    }

    #[test]
    fn a_worker_that_drained_between_two_looks_leaves_without_a_word() {
        let mut case = Case::new();
        let said = Draining::default();
        let mut known = seen("a", Some(healthy()), case.at(0));
        known.draining = said.clone();
        case.board.look(vec![known], case.at(0));
        said.0.store(true, Ordering::Release);
        assert_eq!(case.look(250, &[]), "", "it had nothing to do, as in a roll-out");
    }

    #[test]
    fn those_that_vanished_are_bounded() {
        let mut case = Case::new();
        let names: Vec<String> = (0..GONE_MAX + 10).map(|n| format!("w{n:03}")).collect();
        for (ms, name) in (0..).zip(&names) {
            case.look(2 * ms, &[(name, SAME)]);
            case.look(2 * ms + 1, &[]);
        }
        let rows = case.board.rows(case.at(1_000));
        assert_eq!(rows.len(), GONE_MAX);
        assert_eq!(rows[0].record().party.instance.as_str(), "w010", "the oldest are forgotten");
    }

    #[test]
    fn a_pool_is_told_full_once_it_stays_so() {
        let mut case = Case::new();
        let full: Change = |s| {
            let blocks = BlockCounts { total: 512, free: 2, referenced: 510, ..Default::default() };
            let last = s.last_report.as_mut().expect("a report");
            (last.report.blocks, last.report.waiting) = (Some(blocks), 12);
        };
        assert_eq!(case.look(0, &[("a", full)]), "a Ready 0");
        assert_eq!(case.look(900, &[("a", SAME)]), "a Ready 0");
        assert_eq!(case.look(1_000, &[("a", full)]), "a Ready 1");
        assert_eq!(case.look(2_000, &[("a", full)]), "a Ready 2 pool full, 12 wait");
        assert_eq!(case.look(2_250, &[("a", SAME)]), "a Ready 2");
    }

    #[test]
    fn rates_are_those_of_the_last_seconds() {
        let mut case = Case::new();
        let mut rate = |ms: u64, generated: Option<u64>| {
            let (now, report) = (case.at(ms), LoadReport { generated_tokens: generated, ..healthy() });
            case.board.look(vec![seen("a", Some(report), now)], now);
            case.board.rows(now)[0].tokens_per_s
        };
        assert_eq!(rate(0, Some(1_000)), None, "one report tells no rate");
        assert_eq!(rate(1_000, Some(1_100)), Some(100.0));
        assert_eq!(rate(2_000, Some(1_400)), Some(200.0));
        assert_eq!(rate(4_000, Some(1_400)), Some(100.0), "as the first report is too old");
        assert_eq!(rate(7_500, Some(1_400)), None);
        assert_eq!(rate(8_000, None), None, "of a release that does not count");
        // A repeated report adds no sample.
        let mut case = Case::new();
        for ms in [0, 250, 500] {
            let report = LoadReport { generated_tokens: Some(5), ..healthy() };
            case.board.look(vec![seen("a", Some(report), case.at(0))], case.at(ms));
        }
        assert_eq!(case.board.rows(case.at(500))[0].tokens_per_s, None);
    }
}
