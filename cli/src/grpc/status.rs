//! The status of a cluster. As JSON, which scripts read, its fields have these names, and unknown values are null.

use baton_proto::v1;
use serde::Serialize;

/// A router's view of its cluster.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ClusterStatus {
    /// There are no problems.
    pub(crate) healthy: bool,
    /// Sorted by severity, the worst first.
    pub(crate) problems: Vec<Problem>,
    pub(crate) router: Option<RouterStatus>,
    /// Sorted by the name of the instance.
    pub(crate) workers: Vec<WorkerStatus>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Problem {
    /// Empty if the problem concerns the whole cluster.
    pub(crate) worker: String,
    /// A keyword for scripts, see `Problem.kind` of the protocol.
    pub(crate) kind: String,
    /// The problem in words, for people.
    pub(crate) text: String,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct RouterStatus {
    pub(crate) running: u64,
    pub(crate) running_max: u64,
    pub(crate) queued: u64,
    pub(crate) models: Vec<String>,
    /// Requests of the last minute in the percentiles.
    pub(crate) ttft_count: u64,
    pub(crate) ttft_p50_ms: Option<f64>,
    pub(crate) ttft_p95_ms: Option<f64>,
    /// Absent if workers register at the router.
    pub(crate) etcd_reachable: Option<bool>,
    /// Time since the router's list of workers last matched etcd.
    pub(crate) view_age_ms: Option<u64>,
}

/// Fields are as in the protocol's `WorkerStatus`.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct WorkerStatus {
    pub(crate) instance: String,
    /// Incarnation as 16 hexadecimal digits.
    pub(crate) incarnation: String,
    /// prefill, decode or unknown.
    pub(crate) role: &'static str,
    pub(crate) model: String,
    pub(crate) pool: String,
    pub(crate) endpoint: String,
    /// starting, ready, draining, avoided, failing, silent, gone or unknown.
    pub(crate) state: &'static str,
    pub(crate) since_ms: u64,
    pub(crate) heard_ms: Option<u64>,
    pub(crate) still_ms: Option<u64>,
    pub(crate) running: Option<u32>,
    pub(crate) running_max: u32,
    pub(crate) waiting: Option<u32>,
    pub(crate) waiting_max: u32,
    pub(crate) blocks: Option<BlockCounts>,
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) kv_bytes_per_s: Option<f64>,
    /// The numerics class as one string.
    pub(crate) class: String,
    /// Versions, as `1` or `1-2`.
    pub(crate) protocol: String,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct BlockCounts {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) referenced: u64,
    pub(crate) cached: u64,
    pub(crate) quarantined: u64,
}

impl From<v1::StatusResponse> for ClusterStatus {
    fn from(status: v1::StatusResponse) -> Self {
        let problem = |v1::Problem { worker, kind, text }| Problem { worker, kind, text };
        Self {
            healthy: status.problems.is_empty(),
            problems: status.problems.into_iter().map(problem).collect(),
            router: status.router.map(router),
            workers: status.workers.into_iter().map(worker).collect(),
        }
    }
}

fn router(status: v1::RouterStatus) -> RouterStatus {
    RouterStatus {
        running: status.running,
        running_max: status.running_max,
        queued: status.queued,
        models: status.models,
        ttft_count: status.ttft_count,
        ttft_p50_ms: status.ttft_p50_ms,
        ttft_p95_ms: status.ttft_p95_ms,
        etcd_reachable: status.etcd_reachable,
        view_age_ms: status.view_age_ms,
    }
}

fn worker(status: v1::WorkerStatus) -> WorkerStatus {
    let role = match status.role() {
        v1::Role::Prefill => "prefill",
        v1::Role::Decode => "decode",
        v1::Role::Unspecified => "unknown",
    };
    let state = match status.state() {
        v1::WorkerState::Starting => "starting",
        v1::WorkerState::Ready => "ready",
        v1::WorkerState::Draining => "draining",
        v1::WorkerState::Avoided => "avoided",
        v1::WorkerState::Failing => "failing",
        v1::WorkerState::Silent => "silent",
        v1::WorkerState::Gone => "gone",
        v1::WorkerState::Unspecified => "unknown",
    };
    let blocks = |v1::BlockCounts { total, free, referenced, cached, quarantined }| BlockCounts {
        total,
        free,
        referenced,
        cached,
        quarantined,
    };
    let class = |c: v1::NumericsClass| format!("{}/{}/{}/{}", c.order, c.weights, c.kv, c.kernel_revision);
    let versions = |v1::ProtocolRange { min, max }| if min == max { min.to_string() } else { format!("{min}-{max}") };
    let incarnation = status.party.as_ref().map(|party| format!("{:016x}", party.incarnation));
    WorkerStatus {
        instance: status.party.map(|party| party.instance).unwrap_or_default(),
        incarnation: incarnation.unwrap_or_default(),
        role,
        model: status.model,
        pool: status.pool,
        endpoint: status.endpoint,
        state,
        since_ms: status.since_ms,
        heard_ms: status.heard_ms,
        still_ms: status.still_ms,
        running: status.running,
        running_max: status.running_max,
        waiting: status.waiting,
        waiting_max: status.waiting_max,
        blocks: status.blocks.map(blocks),
        tokens_per_s: status.tokens_per_s,
        kv_bytes_per_s: status.kv_bytes_per_s,
        class: status.class.map(class).unwrap_or_default(),
        protocol: status.protocol.map(versions).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn as_json(status: v1::StatusResponse) -> Value {
        serde_json::to_value(ClusterStatus::from(status)).expect("plain fields")
    }

    #[test]
    fn what_is_not_known_is_null() {
        let worker = v1::WorkerStatus {
            party: Some(v1::Party { instance: "d".into(), incarnation: 7 }),
            role: v1::Role::Decode.into(),
            state: v1::WorkerState::Gone.into(),
            ..Default::default()
        };
        let problem = v1::Problem { worker: "d".into(), kind: "gone".into(), text: "gone 3 s ago".into() };
        let status = as_json(v1::StatusResponse { workers: vec![worker], problems: vec![problem], router: None });
        let d = &status["workers"][0];
        assert_eq!((&d["instance"], &d["incarnation"]), (&json!("d"), &json!("0000000000000007")));
        assert_eq!((&d["state"], &d["role"], &d["running"]), (&json!("gone"), &json!("decode"), &Value::Null));
        assert_eq!((&status["healthy"], &status["problems"][0]["kind"]), (&json!(false), &json!("gone")));
        assert_eq!(as_json(v1::StatusResponse::default())["healthy"], true);
    }

    #[test]
    fn a_worker_is_named_in_words() {
        let class =
            v1::NumericsClass { order: "avx2".into(), weights: "bf16".into(), kv: "f16".into(), kernel_revision: 1 };
        let worker = |min, max, role| {
            let protocol = Some(v1::ProtocolRange { min, max });
            worker(v1::WorkerStatus { class: Some(class.clone()), protocol, role, ..Default::default() })
        };
        let d = worker(1, 2, v1::Role::Decode.into());
        assert_eq!((&*d.class, &*d.protocol, d.role, d.state), ("avx2/bf16/f16/1", "1-2", "decode", "unknown"));
        assert_eq!((&*worker(2, 2, 77).protocol, worker(2, 2, 77).role), ("2", "unknown"));
    }
}
