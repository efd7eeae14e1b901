//! What a router tells operators, from its messages: `Admin/Status` and `Admin/Trace`.

use crate::operators::{
    BlockCounts, ClusterStatus, Problem, ProcessSpans, RequestTrace, RouterStatus, Span, WorkerStatus,
};
use baton_proto::v1;

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

impl From<v1::TraceResponse> for RequestTrace {
    fn from(trace: v1::TraceResponse) -> Self {
        let process = |v1::ProcessSpans { process, spans }| ProcessSpans {
            process,
            spans: spans.into_iter().map(span).collect(),
        };
        Self {
            trace_id: hex::encode(trace.trace_id),
            processes: trace.processes.into_iter().map(process).collect(),
            silent: trace.silent,
        }
    }
}

fn span(span: v1::TraceSpan) -> Span {
    Span {
        id: span.span_id.into(),
        parent_id: span.parent_span_id.into(),
        name: span.name,
        start_ns: span.start_ns,
        end_ns: span.end_ns,
        failed: span.failed,
        attributes: span.attributes.into_iter().collect(),
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
