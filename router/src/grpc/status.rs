//! Converts the status for `baton.v1.Admin/Status`.

use crate::status::{ClusterStatus, Problem, Row, State};
use baton_proto::v1;
use std::time::{Duration, Instant};

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl From<State> for v1::WorkerState {
    fn from(state: State) -> Self {
        match state {
            State::Starting => Self::Starting,
            State::Ready => Self::Ready,
            State::Draining => Self::Draining,
            State::Avoided => Self::Avoided,
            State::Failing => Self::Failing,
            State::Silent => Self::Silent,
            State::Gone => Self::Gone,
        }
    }
}

impl From<Problem> for v1::Problem {
    fn from(problem: Problem) -> Self {
        Self { worker: problem.worker, kind: problem.kind.name().into(), text: problem.text }
    }
}

impl From<Row> for v1::WorkerStatus {
    fn from(row: Row) -> Self {
        let record = row.record().clone();
        // The last report of a worker that is gone does not describe the present.
        let report = row.seen.last_report.filter(|_| row.state != State::Gone).map(|last| last.report);
        Self {
            party: Some(record.party.clone().into()),
            role: v1::Role::from(record.role).into(),
            model: record.card.id.clone(),
            pool: record.pool.clone(),
            endpoint: record.endpoint.clone(),
            state: v1::WorkerState::from(row.state).into(),
            since_ms: ms(row.since),
            heard_ms: row.report_age.map(ms),
            still_ms: row.still.map(ms),
            running: report.as_ref().map(|r| r.running),
            running_max: record.running_max,
            waiting: report.as_ref().map(|r| r.waiting),
            waiting_max: record.waiting_max,
            blocks: report.as_ref().and_then(|r| r.blocks).map(v1::BlockCounts::from),
            tokens_per_s: row.tokens_per_s,
            kv_bytes_per_s: row.kv_bytes_per_s,
            class: Some(record.class.clone().into()),
            protocol: Some(record.protocol.into()),
        }
    }
}

pub(super) fn status_response(status: &ClusterStatus, now: Instant) -> v1::StatusResponse {
    let rows = status.rows(now);
    let problems = status.problems(&rows, now).into_iter().map(Into::into).collect();
    let (running, queued) = status.core.admission.counts();
    let ttft = status.core.metrics.recent().percentiles(now);
    let mut models: Vec<String> = status.core.workers.models(now).iter().map(|model| model.card.id.clone()).collect();
    models.dedup();
    let router = v1::RouterStatus {
        running: running as u64,
        running_max: status.core.admission.running_max() as u64,
        queued: queued as u64,
        models,
        ttft_count: ttft.map_or(0, |t| t.count as u64),
        ttft_p50_ms: ttft.map(|t| t.p50.as_secs_f64() * 1e3),
        ttft_p95_ms: ttft.map(|t| t.p95.as_secs_f64() * 1e3),
        etcd_reachable: status.membership.store().map(|store| store.reachable),
        view_age_ms: status
            .membership
            .store()
            .map(|store| if store.reachable { 0 } else { ms(now.saturating_duration_since(store.since)) }),
    };
    v1::StatusResponse { problems, workers: rows.into_iter().map(Into::into).collect(), router: Some(router) }
}
