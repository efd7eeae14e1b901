//! State and problems of the cluster, as this router sees them: the source of `baton status` and of a metric.
//!
//! ```text
//!  workers, their reports ──> judge: state, problems ──> board: times, rates, vanished workers ──> Admin/Status
//! ```
//!
//! It only observes: placement makes its own decisions, with other bounds.

mod board;
mod handoffs;
mod judge;
mod metrics;
mod recent;

pub(crate) use board::Row;
pub(crate) use handoffs::{Handoff, Handoffs, OpenHandoff};
pub(crate) use judge::{Kind, Problem, State};
pub(crate) use metrics::StatusMetrics;
pub(crate) use recent::RecentTimes;

use crate::flow::Core;
use crate::placement::why_unpaired;
use baton_node::membership::RouterBackend;
use baton_types::{InstanceRecord, Role};
use board::Board;
use judge::{Draining, WorkerSnapshot, duration_text};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Interval between observations: far shorter than that of workers' reports, so that times of changes are accurate.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A router that switches to another etcd node has no connection for less than this.
const ETCD_AFTER: Duration = Duration::from_secs(1);

/// Observes one router's cluster. Clones share the observations.
#[derive(Clone, Debug)]
pub(crate) struct ClusterStatus {
    pub(crate) core: Arc<Core>,
    pub(crate) membership: RouterBackend,
    board: Arc<Mutex<Board>>,
}

impl ClusterStatus {
    pub(crate) fn new(core: Arc<Core>, membership: RouterBackend) -> Self {
        Self { core, membership, board: Arc::default() }
    }

    /// Observes at an interval, until `stop` is cancelled.
    pub(crate) async fn follow(self, stop: CancellationToken) {
        let looks = async {
            loop {
                self.look(Instant::now());
                sleep(LOOK_EVERY).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = looks => {}
        }
    }

    fn look(&self, now: Instant) {
        let seen = self.core.workers.all().into_iter().map(|worker| WorkerSnapshot {
            record: worker.record.clone(),
            admitted: worker.is_admitted(),
            draining: Draining(worker.drains()),
            avoided: worker.probation.lasts(now),
            trouble: worker.trouble(),
            last_report: worker.load.last_report(),
        });
        self.board.lock().look(seen.collect(), now);
    }

    /// Every worker with its problems, as of now.
    pub(crate) fn rows(&self, now: Instant) -> Vec<Row> {
        self.look(now);
        let mut rows = self.board.lock().rows(now);
        let pairs = |row: &&Row| matches!(row.state, State::Ready | State::Avoided);
        let records: Vec<Arc<InstanceRecord>> = rows.iter().filter(pairs).map(|row| row.record().clone()).collect();
        let records: Vec<&InstanceRecord> = records.iter().map(|record| &**record).collect();
        for row in rows.iter_mut().filter(|row| pairs(&&**row)) {
            if let Some(mismatch) = why_unpaired(row.record(), &records) {
                let worker = row.record().party.instance.to_string();
                let text = format!("no worker of the other role fits it, so no KV passes: {mismatch}");
                row.problems.push(Problem { kind: Kind::Unpaired, worker, text });
            }
        }
        rows
    }

    /// The public name of the model of each decode worker that reports, its blocks in use, and all of its blocks.
    pub(crate) fn decode_blocks(&self, now: Instant) -> impl Iterator<Item = (String, u64, u64)> {
        self.rows(now).into_iter().filter(|row| row.record().role == Role::Decode).filter_map(|row| {
            let blocks = row.seen.last_report.as_ref()?.report.blocks?;
            let used = blocks.total.saturating_sub(blocks.free.saturating_add(blocks.cached));
            Some((row.record().card.public_name().to_owned(), used, blocks.total))
        })
    }

    /// Problems of the whole cluster.
    fn of_whole(&self, now: Instant) -> Vec<Problem> {
        let mut found = Vec::new();
        let mut add = |kind, text| found.push(Problem { kind, worker: String::new(), text });
        if let Err(reason) = self.core.ready() {
            add(Kind::NotReady, format!("requests are refused: {reason}"));
        }
        if let Some(store) = self.membership.store().filter(|store| !store.reachable) {
            let since = now.saturating_duration_since(store.since);
            if since >= ETCD_AFTER {
                let since = duration_text(since);
                add(
                    Kind::Etcd,
                    match self.membership.unconfirmed() {
                        None => format!("etcd has not answered for {since}; the view of the workers is as of then"),
                        Some(0) => format!(
                            "etcd has not answered since this router started, {since} ago, and no worker is remembered or found \
                             (membership.cache_dir, membership.seeds)"
                        ),
                        Some(workers) => format!(
                            "etcd has not answered since this router started, {since} ago; it goes by {workers} workers that it \
                             remembers or found by their addresses"
                        ),
                    },
                );
            }
        }
        let nodes = self.membership.etcd_nodes().unwrap_or_default();
        if let Some(division) = nodes.division() {
            add(Kind::EtcdDivided, division);
        }
        nodes.complaints().for_each(|complaint| add(Kind::EtcdAlarm, format!("etcd complains: {}", complaint.trim())));
        found
    }

    /// All problems, worst first.
    pub(crate) fn problems(&self, rows: &[Row], now: Instant) -> Vec<Problem> {
        let mut all = self.of_whole(now);
        all.extend(rows.iter().flat_map(|row| row.problems.iter().cloned()));
        all.sort_by_key(|problem| problem.kind);
        all
    }
}
