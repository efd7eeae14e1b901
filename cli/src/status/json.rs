//! The status for scripts: what is not known is null.

use super::{class, party, protocol, role, state};
use baton_proto::v1;
use serde_json::{Value, json};

/// The whole status.
pub(super) fn of(status: &v1::StatusResponse) -> Value {
    let problem = |p: &v1::Problem| json!({"worker": p.worker, "kind": p.kind, "text": p.text});
    json!({
        "healthy": status.problems.is_empty(),
        "problems": status.problems.iter().map(problem).collect::<Vec<_>>(),
        "router": status.router.as_ref().map(router),
        "workers": status.workers.iter().map(worker).collect::<Vec<_>>(),
    })
}

fn router(r: &v1::RouterStatus) -> Value {
    json!({
        "running": r.running, "running_max": r.running_max, "queued": r.queued, "models": r.models,
        "ttft_count": r.ttft_count, "ttft_p50_ms": r.ttft_p50_ms, "ttft_p95_ms": r.ttft_p95_ms,
        "etcd_reachable": r.etcd_reachable, "view_age_ms": r.view_age_ms,
    })
}

fn worker(w: &v1::WorkerStatus) -> Value {
    let (instance, incarnation) = party(w);
    let blocks = w.blocks.map(|b| {
        json!({"total": b.total, "free": b.free, "referenced": b.referenced, "cached": b.cached, "quarantined": b.quarantined})
    });
    json!({
        "instance": instance, "incarnation": incarnation, "role": role(w.role), "model": w.model, "pool": w.pool,
        "endpoint": w.endpoint, "state": state(w.state), "since_ms": w.since_ms, "heard_ms": w.heard_ms,
        "still_ms": w.still_ms, "running": w.running, "running_max": w.running_max, "waiting": w.waiting,
        "waiting_max": w.waiting_max, "blocks": blocks, "tokens_per_s": w.tokens_per_s,
        "kv_bytes_per_s": w.kv_bytes_per_s, "class": class(w), "protocol": protocol(w),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_null() {
        let worker = v1::WorkerStatus {
            party: Some(v1::Party { instance: "d".into(), incarnation: 7 }),
            role: v1::Role::Decode.into(),
            state: v1::WorkerState::Gone.into(),
            ..Default::default()
        };
        let problem = v1::Problem { worker: "d".into(), kind: "gone".into(), text: "gone 3 s ago".into() };
        let status = of(&v1::StatusResponse { workers: vec![worker], problems: vec![problem], router: None });
        let d = &status["workers"][0];
        assert_eq!((&d["instance"], &d["incarnation"]), (&json!("d"), &json!("0000000000000007")));
        assert_eq!((&d["state"], &d["role"], &d["running"]), (&json!("gone"), &json!("decode"), &Value::Null));
        assert_eq!((&status["healthy"], &status["problems"][0]["kind"]), (&json!(false), &json!("gone")));
        assert_eq!(of(&v1::StatusResponse::default())["healthy"], true);
    }
}
