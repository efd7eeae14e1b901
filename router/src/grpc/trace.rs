//! `Admin/Trace`: collects the spans of one recent request: this router's own, and those of the workers that it called.

use super::link::GrpcConnector;
use super::subtree::subtree;
use crate::workers::WorkerSet;
use baton_node::grpc::summaries;
use baton_node::operators::RequestTrace;
use baton_node::telemetry::{TraceId, Traces};
use baton_proto::v1::{self, telemetry_client::TelemetryClient};
use baton_types::shown;
use futures::future::join_all;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::timeout;
use tonic::{Code, Status};

/// Longest wait for a worker's spans.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// A worker's 1,024 spans with long attributes are less.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Most workers asked: far more than one request can call.
const WORKERS_MAX: usize = 64;
/// Name of this process among those of a trace.
const ROUTER: &str = "router";
/// Attributes in which the flow records the request's id, and the worker that it called.
pub(crate) const REQUEST_ID: &str = "gen_ai.response.id";
pub(crate) const WORKER: &str = "baton.worker";

/// Gathers the spans of one request or trace from this router and from the workers that took part.
pub(super) async fn trace(
    workers: &WorkerSet,
    connector: &GrpcConnector,
    traces: &Traces,
    id: &str,
) -> Result<v1::TraceResponse, Status> {
    let of_request = traces.trace_with(REQUEST_ID, id);
    let of_trace = || TraceId::from_hex(id).ok().filter(|_| id.len() == 32);
    let trace = of_request.or_else(of_trace).ok_or_else(|| unknown(traces, id))?;
    let spans = summaries(traces, trace);
    if spans.is_empty() {
        return Err(unknown(traces, id));
    }
    let asked: BTreeSet<String> = spans.iter().filter_map(|span| span.attributes.get(WORKER).cloned()).collect();
    let named = |span: &&v1::TraceSpan| span.attributes.get(REQUEST_ID).is_some_and(|named| named == id);
    // One id may occur twice in a trace: the last one is used.
    let root = spans.iter().rev().find(named).map(|span| span.span_id.clone());
    let mut processes = vec![v1::ProcessSpans { process: ROUTER.into(), spans }];
    let mut silent = Vec::new();
    let asked = asked.into_iter().take(WORKERS_MAX).map(|name| ask(workers, connector, name, trace));
    for (process, answer) in join_all(asked).await {
        match answer {
            Ok(spans) => processes.push(v1::ProcessSpans { process, spans }),
            Err(reason) => silent.push(format!("{process} {reason}")),
        }
    }
    if let Some(root) = root {
        subtree(&mut processes, &root);
    }
    processes.retain(|process| !process.spans.is_empty());
    Ok(v1::TraceResponse { trace_id: trace.to_bytes().to_vec().into(), processes, silent })
}

/// This router's own spans of the newest traces in which a request has ended, newest first.
pub(super) fn recent(traces: &Traces, max: usize) -> Vec<RequestTrace> {
    let of_router = |trace: TraceId| v1::TraceResponse {
        trace_id: trace.to_bytes().to_vec().into(),
        processes: vec![v1::ProcessSpans { process: ROUTER.into(), spans: summaries(traces, trace) }],
        silent: Vec::new(),
    };
    traces.traces_with(REQUEST_ID, max).into_iter().map(|trace| of_router(trace).into()).collect()
}

async fn ask(
    workers: &WorkerSet,
    connector: &GrpcConnector,
    name: String,
    trace: TraceId,
) -> (String, Result<Vec<v1::TraceSpan>, String>) {
    let spans = async {
        let worker = workers.named(&name).map_err(|_| "is gone, and its spans with it".to_owned())?;
        let request = v1::SpansRequest { trace_id: trace.to_bytes().to_vec().into() };
        let channel = connector.channel(&worker.record).map_err(|e| format!("cannot be asked: {e}"))?;
        let mut client = TelemetryClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
        match timeout(ANSWER_MAX, client.spans(request)).await {
            Ok(Ok(answer)) => Ok(answer.into_inner().spans),
            Ok(Err(status)) if status.code() == Code::Unimplemented => Err("is older and holds no spans".into()),
            Ok(Err(status)) => Err(format!("cannot be asked: {}", status.message())),
            Err(_) => Err(format!("did not answer within {} s", ANSWER_MAX.as_secs())),
        }
    };
    let spans = spans.await;
    (name, spans)
}

fn unknown(traces: &Traces, id: &str) -> Status {
    let id = shown(id);
    Status::not_found(match traces.held() {
        0 => format!("no request or trace {id}: this router holds no traces (telemetry.ring_spans_max)"),
        held => format!(
            "no request or trace {id} among the last {held} that ended at this router: it ran elsewhere, or longer ago \
             (telemetry.ring_spans_max)"
        ),
    })
}
