//! Recent requests, from the spans that this router holds, and one of them with the spans of its workers.

use super::{Page, fresh};
use crate::grpc::{REQUEST_ID, WORKER};
use crate::http::error::Shape;
use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use baton_node::operators::{RequestTrace, Span, Waterfall};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Requests of one answer, where the caller does not say how many.
const LIMIT: usize = 50;
const LIMIT_MAX: usize = 200;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    limit: Option<usize>,
}

/// One request that has ended. Unknown values, and those of phases that did not happen, are null.
#[derive(Debug, Default, Serialize)]
struct Ended {
    request_id: String,
    trace_id: String,
    model: Option<String>,
    /// Milliseconds since 1970.
    started_ms: u64,
    total_ms: f64,
    queue_ms: Option<f64>,
    ttft_ms: Option<f64>,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    finish_reason: Option<String>,
    /// Kind of the error with which it failed.
    error: Option<String>,
    slow: bool,
    /// Attempts after the first one.
    retries: u64,
    placement: Option<String>,
    /// The workers of the last attempt.
    prefill: Option<String>,
    decode: Option<String>,
    kv_bytes: Option<u64>,
    transfer_ms: Option<f64>,
    exposed_ms: Option<f64>,
    /// Spans of this router below the request's own, by their start.
    phases: Vec<Phase>,
}

#[derive(Debug, Serialize)]
struct Phase {
    name: String,
    /// From the request's arrival.
    start_ms: f64,
    ms: f64,
}

/// Requests that ended lately, the newest first.
pub(super) async fn list(State(page): State<Page>, query: Result<Query<ListQuery>, QueryRejection>) -> Response {
    let limit = match query {
        Ok(Query(query)) => query.limit.unwrap_or(LIMIT),
        Err(_) => 0,
    };
    if !(1..=LIMIT_MAX).contains(&limit) {
        let message = format!("the only parameter is `limit`, 1 to {LIMIT_MAX}");
        return Shape::OpenAi.plain(StatusCode::BAD_REQUEST, &message, "invalid_parameter");
    }
    let mut ended: Vec<Ended> = page.admin.recent(limit).iter().flat_map(ended).collect();
    ended.sort_by_key(|request| std::cmp::Reverse(request.started_ms + request.total_ms as u64));
    ended.truncate(limit);
    fresh(Json(json!({"requests": ended})).into_response())
}

/// The waterfall of one request, or of a whole trace.
pub(super) async fn one(State(page): State<Page>, id: Result<Path<String>, PathRejection>) -> Response {
    let Ok(Path(id)) = id else {
        let message = "the id of a request, or of a trace, is UTF-8 text";
        return Shape::OpenAi.plain(StatusCode::BAD_REQUEST, message, "invalid_parameter");
    };
    match page.admin.request(&id).await {
        Ok(trace) => fresh(Json(Waterfall::of(trace)).into_response()),
        Err(reason) => Shape::OpenAi.plain(StatusCode::NOT_FOUND, &reason, "not_found"),
    }
}

/// The requests of one trace.
fn ended(trace: &RequestTrace) -> impl Iterator<Item = Ended> {
    let spans = trace.processes.iter().flat_map(|process| &process.spans);
    let spans: Vec<&Span> = spans.collect();
    let roots: Vec<&Span> = spans.iter().copied().filter(|span| span.attributes.contains_key(REQUEST_ID)).collect();
    roots.into_iter().map(move |root| request(&trace.trace_id, root, &spans))
}

fn request(trace_id: &str, root: &Span, spans: &[&Span]) -> Ended {
    let text = |key: &str| root.attributes.get(key).cloned();
    let number = |key: &str| root.attributes.get(key).and_then(|text| text.parse::<f64>().ok());
    let count = |key: &str| number(key).map_or(0, |number| number as u64);
    let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    let mut below: Vec<&Span> = spans.iter().copied().filter(|span| span.parent_id == root.id).collect();
    below.sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns)));
    let worker = |name: &str| {
        let call = below.iter().rev().find(|span| span.name == name)?;
        let worker = call.attributes.get(WORKER)?;
        Some(worker.rsplit_once('@').map_or(worker.as_str(), |(name, _)| name).to_owned())
    };
    Ended {
        request_id: text(REQUEST_ID).unwrap_or_default(),
        trace_id: trace_id.to_owned(),
        model: text("gen_ai.response.model"),
        started_ms: root.start_ns / 1_000_000,
        total_ms: ms(root.start_ns, root.end_ns),
        queue_ms: number("baton.queue_ms"),
        ttft_ms: number("baton.ttft_ms"),
        prompt_tokens: count("gen_ai.usage.input_tokens"),
        cached_tokens: count("baton.cached_tokens"),
        completion_tokens: count("gen_ai.usage.output_tokens"),
        finish_reason: text("gen_ai.response.finish_reasons"),
        error: text("error.type"),
        slow: root.attributes.contains_key("baton.slow"),
        retries: count("baton.retries"),
        placement: text("baton.placement.reason"),
        prefill: worker("prefill"),
        decode: worker("claim"),
        kv_bytes: number("baton.kv.bytes").map(|bytes| bytes as u64),
        transfer_ms: number("baton.kv.transfer_ms"),
        exposed_ms: number("baton.kv.exposed_ms"),
        phases: below
            .iter()
            .map(|span| Phase {
                name: span.name.clone(),
                start_ms: ms(root.start_ns, span.start_ns),
                ms: ms(span.start_ns, span.end_ns),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::operators::ProcessSpans;

    fn span(id: u8, parent: u8, name: &str, us: (u64, u64), attributes: &[(&str, &str)]) -> Span {
        let at = |us: u64| 1_700_000_000_000_000_000 + us * 1_000;
        Span {
            id: vec![id; 8],
            parent_id: vec![parent; 8],
            name: name.into(),
            start_ns: at(us.0),
            end_ns: at(us.1),
            failed: false,
            attributes: attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        }
    }

    #[test]
    fn a_request_is_told_with_its_last_workers_and_its_phases() {
        let root = [
            ("gen_ai.response.id", "r-1"),
            ("baton.ttft_ms", "12.5"),
            ("baton.retries", "1"),
            ("baton.kv.bytes", "4096"),
        ];
        let spans = vec![
            span(4, 1, "claim", (20, 90), &[("baton.worker", "decode-1@7")]),
            span(3, 1, "claim", (10, 15), &[("baton.worker", "decode-0@7")]),
            span(2, 1, "place", (5, 6), &[]),
            span(5, 4, "inner", (21, 22), &[]),
            span(1, 9, "generate", (0, 100), &root),
            span(8, 9, "generate", (50, 60), &[("gen_ai.response.id", "r-2"), ("error.type", "overloaded")]),
        ];
        let processes = vec![ProcessSpans { process: "router".into(), spans }];
        let trace = RequestTrace { trace_id: "ab".into(), processes, silent: Vec::new() };
        let told: Vec<Ended> = ended(&trace).collect();
        let first = serde_json::to_value(&told[0]).unwrap();
        assert_eq!(
            (&first["request_id"], &first["decode"], &first["prefill"]),
            (&json!("r-1"), &json!("decode-1"), &json!(null))
        );
        assert_eq!((&first["total_ms"], &first["ttft_ms"], &first["retries"]), (&json!(0.1), &json!(12.5), &json!(1)));
        assert_eq!((&first["kv_bytes"], &first["exposed_ms"]), (&json!(4096), &json!(null)));
        let names: Vec<_> = told[0].phases.iter().map(|phase| phase.name.as_str()).collect();
        assert_eq!(names, ["place", "claim", "claim"], "by their start, without what is below them");
        assert_eq!((told[1].request_id.as_str(), told[1].error.as_deref()), ("r-2", Some("overloaded")));
    }
}
