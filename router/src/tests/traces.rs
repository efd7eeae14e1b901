//! Traces of requests: which workers are asked for them, and which are ordered to keep which.

use crate::testing::cluster::{Cluster, Reader, ask, config, remote};
use crate::testing::fake::Fake;
use crate::testing::http;
use crate::{Router, RouterConfig};
use baton_node::metrics::Metrics;
use baton_node::telemetry::{TelemetryGuard, build};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{self, FinishReason, admin_client::AdminClient};
use baton_types::{ErrorKind, RequestError, Role};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tonic::{Code, Request, Status};
use tracing::Dispatch;
use tracing::dispatcher::DefaultGuard;

/// While there is only one subscriber, tracing caches for each span whether the first thread that reached it had that
/// subscriber; other tests' threads have none. A second subscriber turns this off.
static SECOND: OnceLock<(Dispatch, TelemetryGuard)> = OnceLock::new();

/// A router that records its spans, as its binary does, but only on the test's thread.
pub(super) async fn traced(change: impl FnOnce(&mut RouterConfig)) -> (Cluster, TelemetryGuard, DefaultGuard) {
    let mut config = config();
    config.telemetry.log = "off".into();
    config.telemetry.trace_sample_ratio = 0.0;
    change(&mut config);
    SECOND.get_or_init(|| build("baton-router", &config.telemetry).unwrap());
    let (dispatch, guard) = build("baton-router", &config.telemetry).unwrap();
    let entered = tracing::dispatcher::set_default(&dispatch);
    let router = Router::start_with(config, Metrics::new("baton-router"), guard.traces()).await.unwrap();
    let client = InferenceClient::connect(format!("http://{}", router.grpc_addr)).await.unwrap();
    (Cluster { router, client }, guard, entered)
}

async fn trace(cluster: &Cluster, id: &str) -> Result<v1::TraceResponse, Status> {
    let mut admin = AdminClient::connect(format!("http://{}", cluster.router.grpc_addr)).await.unwrap();
    admin.trace(v1::TraceRequest { id: id.into() }).await.map(tonic::Response::into_inner)
}

/// The trace of a request once all its spans have ended.
async fn ended(cluster: &Cluster, id: &str) -> v1::TraceResponse {
    let found = async {
        loop {
            match trace(cluster, id).await {
                Ok(found) => return found,
                Err(status) => assert_eq!(status.code(), Code::NotFound, "{status:?}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found).await.expect("a request that ended is found")
}

async fn answer(d: &Fake, mut reader: Reader) {
    let call = d.decode().await;
    call.claimed().await;
    call.last(b'x'.into(), FinishReason::Length).await;
    reader.rest().await;
}

fn named(id: &str, mut request: v1::GenerateRequest) -> v1::GenerateRequest {
    request.request_id = id.into();
    request
}

fn names(response: &v1::TraceResponse) -> Vec<(String, Vec<String>)> {
    let of = |process: &v1::ProcessSpans| {
        let mut names: Vec<String> = process.spans.iter().map(|span| span.name.clone()).collect();
        names.sort();
        (process.process.clone(), names)
    };
    response.processes.iter().map(of).collect()
}

fn span_id(response: &v1::TraceResponse, name: &str) -> Vec<u8> {
    response.processes[0].spans.iter().find(|span| span.name == name).unwrap().span_id.to_vec()
}

#[tokio::test]
async fn one_request_is_gathered_from_who_took_part() {
    let (cluster, _guard, _entered) = traced(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let _other = cluster.worker_with(Role::Decode, "other", |record| record.card.id = "n".into()).await;
    let nobody = trace(&cluster, "early").await.unwrap_err();
    assert_eq!(nobody.code(), Code::NotFound);
    assert!(nobody.message().contains("no request or trace \"early\""), "{nobody:?}");

    // Two requests of one caller are in one trace.
    let of_caller = |id: &str, request| {
        let mut request = Request::new(named(id, request));
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        request.metadata_mut().insert("traceparent", parent.parse().unwrap());
        request
    };
    let mut client = cluster.client.clone();
    let first = client.generate(of_caller("first", remote("x"))).await.unwrap().into_inner();
    let mut first = Reader(first);
    let decoding = d.decode().await;
    decoding.claimed().await;
    let prefilling = p.prefill().await;
    prefilling.started().await;
    prefilling.token(b'x'.into(), Some(FinishReason::Length)).await;
    prefilling.done().await;
    first.rest().await;
    let second = client.generate(of_caller("second", ask("x"))).await.unwrap().into_inner();
    drop(second);

    let alone = ended(&cluster, "first").await;
    let worker = |id: u8, parent: Vec<u8>| v1::TraceSpan {
        span_id: vec![id; 8].into(),
        parent_span_id: parent.into(),
        name: "kv.transfer".into(),
        ..Default::default()
    };
    *p.memory.spans.lock() = vec![worker(1, span_id(&alone, "prefill")), worker(2, vec![9; 8])];
    d.memory.hangs.store(true, Ordering::Relaxed);
    ended(&cluster, "second").await;
    let first = ended(&cluster, "first").await;
    let own = ["claim", "generate", "place", "prefill", "stream", "tokenize"].map(String::from).to_vec();
    let party = |worker: &Fake| worker.record.party.to_string();
    assert_eq!(names(&first), [("router".into(), own), (party(&p), vec!["kv.transfer".into()])]);
    assert_eq!(first.silent, [format!("{} did not answer within 2 s", party(&d))]);

    let id = "0af7651916cd43dd8448eb211c80319c";
    let whole = ended(&cluster, id).await;
    let roots = whole.processes[0].spans.iter().filter(|span| span.name == "generate").count();
    assert_eq!((roots, names(&whole)[1].1.len()), (2, 2), "a trace is told whole");
    d.memory.hangs.store(false, Ordering::Relaxed);
    drop(p);
    let gone = async { while !ended(&cluster, "first").await.silent.iter().any(|said| said.contains("is gone")) {} };
    tokio::time::timeout(Duration::from_secs(30), gone).await.expect("a worker that left is named");
}

#[tokio::test]
async fn workers_are_told_which_traces_are_kept() {
    let (cluster, guard, _entered) = traced(|c| c.retry.attempts_max = 1).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let fine = cluster.generate(ask("x")).await;
    answer(&d, fine).await;
    let mut failing = cluster.generate(named("bad", ask("x"))).await;
    let mut call = d.decode().await;
    call.claimed().await;
    call.fail(baton_proto::convert::status::from_error(&RequestError::new(ErrorKind::Internal, "torn"))).await;
    failing.error().await;
    let kept = d.memory.kept(1).await;
    let bad = guard.traces().trace_with("gen_ai.response.id", "bad");
    assert_eq!(kept, [bad.unwrap().to_string()], "the one that failed, and not the one before");
    let metrics = http::send(cluster.router.http_addr, "GET /metrics", "", "").await.text().await;
    for line in ["baton_router_traces_kept_errors_total 1", "baton_router_trace_verdicts_lost_total 0"] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in {metrics}");
    }
    let failed = ended(&cluster, "bad").await;
    let claim = failed.processes[0].spans.iter().find(|span| span.name == "claim").unwrap();
    assert!(claim.failed && claim.attributes["error.type"] == "internal", "{claim:?}");
}

#[tokio::test]
async fn slow_requests_are_marked_and_kept() {
    let (cluster, guard, _entered) = traced(|c| c.telemetry.slow_first_token_ms = 30).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut slow = cluster.generate(named("slow", ask("x"))).await;
    let call = d.decode().await;
    call.claimed().await;
    tokio::time::sleep(Duration::from_millis(31)).await;
    call.last(b'x'.into(), FinishReason::Length).await;
    slow.rest().await;
    let kept = d.memory.kept(1).await;
    let response = ended(&cluster, "slow").await;
    assert_eq!(kept, [guard.traces().trace_with("gen_ai.response.id", "slow").unwrap().to_string()]);
    let root = response.processes[0].spans.iter().find(|span| span.name == "generate").unwrap();
    assert_eq!(root.attributes["baton.slow"], "true");
}

#[tokio::test]
async fn what_the_head_chose_needs_no_verdict() {
    let chosen = |c: &mut RouterConfig| (c.telemetry.trace_sample_ratio, c.telemetry.slow_first_token_ms) = (1.0, 1);
    let (cluster, _guard, _entered) = traced(chosen).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut slow = cluster.generate(named("slow", ask("x"))).await;
    let call = d.decode().await;
    call.claimed().await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    call.last(b'x'.into(), FinishReason::Length).await;
    slow.rest().await;
    let response = ended(&cluster, "slow").await;
    let root = response.processes[0].spans.iter().find(|span| span.name == "generate").unwrap();
    assert_eq!(root.attributes["baton.slow"], "true", "it is marked all the same");
    let metrics = http::send(cluster.router.http_addr, "GET /metrics", "", "").await.text().await;
    assert!(metrics.contains("baton_router_traces_kept_slow_total 0"), "{metrics}");
    assert!(d.memory.kept(0).await.is_empty());
}

#[tokio::test]
async fn a_caller_s_long_trace_state_goes_to_no_worker() {
    let (cluster, _guard, _entered) = traced(|c| c.retry.attempts_max = 1).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let worker = async {
        let call = d.decode().await;
        call.claimed().await;
        let parent = call.metadata.get("traceparent").unwrap().to_str().unwrap().to_owned();
        call.last(b'x'.into(), FinishReason::Length).await;
        parent
    };
    // More than a worker takes of headers, and less than the router does.
    let state: Vec<_> = (100..120).map(|i| format!("{i:k<200}={}", "x".repeat(250))).collect();
    let headers = format!(
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00\r\ntracestate: {}\r\n",
        state.join(",")
    );
    let body = r#"{"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}"#;
    let answer = http::send(cluster.router.http_addr, "POST /v1/completions", &headers, body);
    let both = async { tokio::join!(answer, worker) };
    let (answer, parent) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("a worker gets the call");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-trace-id"), Some("0af7651916cd43dd8448eb211c80319c"));
    assert!(parent.contains("0af7651916cd43dd8448eb211c80319c"), "{parent}");
}
