//! Spans across hops, with a real collector and with none.

mod tls;

use super::*;
use crate::metrics::Metrics;
use crate::testing::Collector;
use opentelemetry::trace::TraceId;
use tonic::metadata::MetadataMap;
use tracing::dispatcher::with_default;
use tracing::info_span;

const WAIT: Duration = Duration::from_secs(20);

fn config(url: Option<&str>) -> TelemetryConfig {
    TelemetryConfig { log: "off".into(), otlp_url: url.map(String::from), batch_ms_max: 20, ..Default::default() }
}

async fn flush(guard: TelemetryGuard, within: Duration) -> (bool, TelemetryGuard) {
    tokio::task::spawn_blocking(move || (guard.flush(within), guard)).await.unwrap()
}

#[tokio::test]
async fn one_request_is_one_trace_over_processes() {
    let collector = Collector::start().await.unwrap();
    let (router, router_guard) = build("baton-router", &config(Some(collector.url()))).unwrap();
    let (worker, worker_guard) = build("baton-decode-worker", &config(Some(collector.url()))).unwrap();

    let mut metadata = MetadataMap::new();
    let trace_id = with_default(&router, || {
        let root = info_span!("generate", request_id = "req-1", baton.cached_tokens = 7);
        let trace_id = trace_id_of(&root).unwrap();
        let inner = info_span!(parent: &root, "decode");
        inject(&inner, &mut metadata);
        trace_id
    });
    assert!(metadata.get("traceparent").unwrap().to_str().unwrap().contains(&trace_id));
    with_default(&worker, || {
        let span = info_span!("decode.generate");
        set_parent(&span, &metadata);
        assert_eq!(trace_id_of(&span).unwrap(), trace_id);
        let _noise = tracing::info_span!(target: "h2", "frame").entered();
    });

    let (flushed, router_guard) = flush(router_guard, WAIT).await;
    assert!(flushed);
    assert!(flush(worker_guard, WAIT).await.0);
    let spans = collector.wait(WAIT, |spans| spans.len() >= 3).await.unwrap();
    assert_eq!(router_guard.counters().exported.get(), 2);
    let find =
        |name: &str| spans.iter().find(|s| s.name == name).unwrap_or_else(|| panic!("no span {name} in {spans:?}"));
    let (root, decode, generate) = (find("generate"), find("decode"), find("decode.generate"));
    assert_eq!(spans.len(), 3, "spans of libraries stay out: {spans:?}");
    assert!(spans.iter().all(|s| s.trace_id == trace_id));
    assert_eq!((root.parent_id.as_ref(), decode.parent_id.as_ref()), (None, Some(&root.span_id)));
    assert_eq!(generate.parent_id.as_ref(), Some(&decode.span_id));
    assert_eq!((root.service.as_str(), generate.service.as_str()), ("baton-router", "baton-decode-worker"));
    assert_eq!(root.attributes["request_id"], "req-1");
    assert_eq!(root.attributes["baton.cached_tokens"], "7");
    assert!(root.time_ns.start <= decode.time_ns.start && decode.time_ns.end <= root.time_ns.end);
}

#[tokio::test]
async fn http_headers_carry_the_trace_and_garbage_starts_a_new_one() {
    let (dispatch, _guard) = build("baton-router", &config(None)).unwrap();
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let check = |traceparent: &str, taken: bool| {
        with_default(&dispatch, || {
            let mut headers = http::HeaderMap::new();
            headers.insert("traceparent", traceparent.parse().unwrap());
            let span = info_span!("generate");
            set_parent_http(&span, &headers);
            let id = trace_id_of(&span).unwrap();
            assert_eq!(id == "0af7651916cd43dd8448eb211c80319c", taken, "{traceparent}: {id}");
            assert!(id.len() == 32 && id.bytes().any(|b| b != b'0'), "{id}");
            let mut onward = http::HeaderMap::new();
            inject_http(&span, &mut onward);
            assert!(onward["traceparent"].to_str().unwrap().contains(&id));
        });
    };
    check(parent, true);
    check("00-00000000000000000000000000000000-b7ad6b7169203331-01", false);
    check("nonsense", false);
}

#[tokio::test]
async fn a_long_trace_state_is_left_out_and_the_trace_goes_on() {
    let (dispatch, _guard) = build("baton-router", &config(None)).unwrap();
    let check = |bytes: usize, kept: bool| {
        // Members of 128 bytes with their commas, and one more for the rest.
        let member = |i: usize, bytes: usize| format!("m{i:02}={:x<1$}", "", bytes - 4);
        let (members, rest) = ((bytes - 64) / 128, (bytes - 64) % 128 + 64);
        let state: Vec<_> = (0..members).map(|i| member(i, 127)).chain([member(99, rest)]).collect();
        let state = state.join(",");
        assert_eq!(state.len(), bytes);
        let mut headers = http::HeaderMap::new();
        headers.insert("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().unwrap());
        headers.insert("tracestate", state.parse().unwrap());
        let metadata = MetadataMap::from_headers(headers.clone());
        with_default(&dispatch, || {
            let (over_http, over_grpc) = (info_span!("generate"), info_span!("generate"));
            set_parent_http(&over_http, &headers);
            set_parent(&over_grpc, &metadata);
            for request in [over_http, over_grpc] {
                let (call, mut onward) = (info_span!(parent: &request, "claim"), MetadataMap::new());
                inject_call(&call, &request, &mut onward);
                let sent = |key| onward.get(key).map_or("", |value| value.to_str().unwrap());
                assert!(sent("traceparent").contains("0af7651916cd43dd8448eb211c80319c"));
                assert_eq!(sent("tracestate"), if kept { &state } else { "" });
            }
        });
    };
    check(512, true);
    check(513, false);
    check(4_000, false);
}

#[tokio::test]
async fn without_a_collector_or_a_sample_there_is_still_a_trace_id() {
    for ratio in [0.0, 1.0] {
        let (dispatch, _guard) =
            build("baton-router", &TelemetryConfig { trace_sample_ratio: ratio, ..config(None) }).unwrap();
        let id = with_default(&dispatch, || trace_id_of(&info_span!("generate")));
        assert_eq!(id.map(|id| id.len()), Some(32));
    }
    assert_eq!(trace_id_of(&tracing::Span::none()), None);
}

#[tokio::test]
async fn a_dead_collector_costs_counters_alone() {
    let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", unused.local_addr().unwrap());
    drop(unused);
    let (dispatch, guard) = build("baton-router", &config(Some(&url))).unwrap();
    let metrics = Metrics::new("baton-router");
    metrics.register_export(&guard.counters());
    with_default(&dispatch, || (0..5).for_each(|_| drop(info_span!("generate"))));
    let (flushed, guard) = flush(guard, WAIT).await;
    assert!(flushed);
    assert_eq!((guard.counters().lost_export_failed.get(), guard.counters().exported.get()), (5, 0));
    let text = metrics.encode();
    assert!(text.contains("baton_spans_lost_total{reason=\"export_failed\"} 5"), "{text}");
}

#[tokio::test]
async fn a_full_queue_loses_spans_and_blocks_nobody() {
    // Accepts connections and never answers: the first export hangs until its deadline.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let small = TelemetryConfig {
        queue_spans_max: 4,
        batch_spans_max: 1,
        export_ms_max: 300,
        flush_ms_max: 0,
        ..config(Some(&url))
    };
    let (dispatch, guard) = build("baton-router", &small).unwrap();
    with_default(&dispatch, || (0..100).for_each(|_| drop(info_span!("generate"))));
    let counters = guard.counters();
    // Four wait, and at most one at a time is being sent, for 300 ms each.
    assert!(counters.lost_queue_full.get() > 50, "{counters:?}");
    let (flushed, guard) = flush(guard, WAIT).await;
    assert!(flushed);
    let counters = guard.counters();
    assert_eq!(counters.lost_queue_full.get() + counters.lost_export_failed.get(), 100);
}

#[test]
fn bad_settings_are_refused_by_name() {
    let error = build("baton", &TelemetryConfig { log: "info,=x=".into(), ..Default::default() }).unwrap_err();
    assert!(error.to_string().starts_with("telemetry.log:"), "{error}");
    let error =
        build("baton", &TelemetryConfig { otlp_url: Some("http://[bad".into()), ..Default::default() }).unwrap_err();
    assert!(error.to_string().starts_with("telemetry.otlp_url:"), "{error}");
}

#[tokio::test]
async fn what_was_not_chosen_waits_for_a_verdict() {
    let collector = Collector::start().await.unwrap();
    let unchosen = TelemetryConfig { trace_sample_ratio: 0.0, ..config(Some(collector.url())) };
    let (dispatch, guard) = build("baton-router", &unchosen).unwrap();
    let traces = guard.traces();
    let span_of = |name: &'static str| {
        with_default(&dispatch, || {
            let span = info_span!("generate", gen_ai.response.id = name);
            drop(info_span!(parent: &span, "tokenize"));
            let mut onward = MetadataMap::new();
            inject(&span, &mut onward);
            assert!(onward.get("traceparent").unwrap().to_str().unwrap().ends_with("-00"), "others follow the head");
            span
        })
    };
    let (good, bad) = (span_of("good"), span_of("bad"));
    let trace = |span: &tracing::Span| TraceId::from_hex(&trace_id_of(span).unwrap()).unwrap();
    let (good_trace, bad_trace) = (trace(&good), trace(&bad));
    traces.keep(bad_trace);
    drop((good, bad));
    assert_eq!(traces.trace_with("gen_ai.response.id", "good"), Some(good_trace));
    assert_eq!(traces.spans_of(good_trace).len(), 2, "it is held all the same");
    let (flushed, guard) = flush(guard, WAIT).await;
    assert!(flushed);
    let spans = collector.wait(WAIT, |spans| spans.len() >= 2).await.unwrap();
    let mut came: Vec<_> = spans.iter().map(|s| (s.name.as_str(), s.trace_id == bad_trace.to_string())).collect();
    came.sort();
    assert_eq!(came, [("generate", true), ("tokenize", true)], "before the verdict and behind it");
    assert_eq!((guard.counters().held.get(), guard.counters().exported.get()), (4, 2));
}

#[test]
fn the_ring_is_bounded_and_counts_what_left_it() {
    let small = TelemetryConfig { ring_spans_max: 3, ..config(None) };
    let (dispatch, guard) = build("baton-router", &small).unwrap();
    let metrics = Metrics::new("baton-router");
    metrics.register_export(&guard.counters());
    with_default(&dispatch, || (0..5).for_each(|_| drop(info_span!("generate"))));
    let text = metrics.encode();
    assert!(text.contains("baton_spans_held 3\n") && text.contains("baton_spans_evicted_total 2\n"), "{text}");
    let bytes = guard.counters().held_bytes.get();
    assert!(bytes > 0 && text.contains(&format!("baton_spans_held_bytes {bytes}\n")), "{text}");
}

#[test]
fn long_texts_are_cut_between_characters() {
    let (dispatch, guard) = build("baton-router", &config(None)).unwrap();
    let name = "ü".repeat(2_000) + "x";
    let trace = with_default(&dispatch, || {
        let span = info_span!("generate", gen_ai.request.model = format!("x{name}"));
        TraceId::from_hex(&trace_id_of(&span).unwrap()).unwrap()
    });
    let spans = guard.traces().spans_of(trace);
    let text = spans[0].attributes.iter().find(|pair| pair.key.as_str() == "gen_ai.request.model").unwrap();
    assert_eq!(text.value.as_str().len(), 1_023, "a cut at 1,024 bytes would fall into a character");
}
