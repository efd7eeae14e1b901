//! Requests to workers and answers to clients, checked to the byte and to the token.

use crate::testing::cluster::{Cluster, ask, remote};
use crate::testing::fake::first;
use crate::testing::http;
use crate::testing::two::Two;
use baton_proto::v1::{self, FinishReason, decode_request};
use baton_types::Role;
use std::time::Duration;
use tonic::Status;

/// "é" is two tokens of a byte each: one of either worker.
#[tokio::test]
async fn a_character_is_whole_whose_bytes_come_of_two_workers() {
    let two = Two::start(|c| c.placement.prefill_policy = crate::PrefillPolicy::Local).await;
    let mut answer = two.cluster.generate(ask("hello")).await;
    let (mut one, other) = two.claim().await;
    one.say("a").await;
    one.token(0xc3).await;
    answer.reads("a").await;
    // The half that is not shown was sent.
    assert_eq!(answer.next().await.token_ids, [0xc3]);
    one.fail(Status::unavailable("gone")).await;
    let next = other.decode().await;
    assert_eq!(next.sequence().tokens.last(), Some(&0xc3));
    next.claimed().await;
    next.token(0xa9).await;
    next.last(b'z'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("éz".into(), FinishReason::Length));
}

#[tokio::test]
async fn an_answer_that_ends_within_a_character_shows_that_there_was_one() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(remote("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    p.prefill().await.token(b'a'.into(), None).await;
    decode.adopted().await;
    decode.last(0xc3, FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("a\u{fffd}".into(), FinishReason::Length));
}

/// Workers of both roles receive the remaining time of a request.
#[tokio::test]
async fn workers_get_the_time_that_is_left() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let granted = Duration::from_secs(100);
    let _answer = cluster.generate_within(remote("x"), Some(granted)).await.unwrap();
    let decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    for metadata in [&decode.metadata, &prefill.metadata] {
        let told = metadata.get(baton_node::grpc::TIMEOUT_HEADER).and_then(|v| v.to_str().ok());
        let left = baton_node::grpc::parse_timeout(told.expect("a deadline")).unwrap();
        assert!(left <= granted && left > granted / 2, "{left:?} of {granted:?}");
    }
}

/// Five prompt tokens are prefilled on the decode worker, as are up to six: with two tokens of the answer the prompt is
/// too long for that.
#[tokio::test]
async fn what_is_replayed_counts_where_it_goes_on() {
    let cluster = Cluster::start(|c| c.placement.local_prefill_tokens_max = 6).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(ask("hello")).await;
    let mut one = d.decode().await;
    assert!(matches!(one.request.prefill, Some(decode_request::Prefill::Local(_))));
    one.claimed().await;
    one.say("ab").await;
    answer.reads("ab").await;
    one.fail(Status::unavailable("gone")).await;
    let next = d.decode().await;
    assert!(matches!(next.request.prefill, Some(decode_request::Prefill::AwaitKv(_))), "{:?}", next.request.prefill);
    next.claimed().await;
    assert_eq!(p.prefill().await.request.sequence.as_ref(), Some(next.sequence()));
}

/// The value of the only series of `name` whose labels include `labels`.
fn value(metrics: &str, name: &str, labels: &str) -> f64 {
    let mut lines = metrics.lines().filter(|l| l.split(['{', ' ']).next() == Some(name) && l.contains(labels));
    let line = lines.next().unwrap_or_else(|| panic!("no {name} in {metrics}"));
    assert!(lines.next().is_none(), "{name} has several series");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// One answer of four tokens after a prompt of five, two of them cached; a worker died after two tokens.
#[tokio::test]
async fn metrics_count_what_happened() {
    let two = Two::start(|c| {
        c.placement.prefill_policy = crate::PrefillPolicy::Local;
        c.metrics.vllm_names = true;
    });
    let two = two.await;
    let mut answer = two.cluster.generate(ask("hello")).await;
    let (mut one, other) = two.claim().await;
    one.send_token(first(b'a'.into(), (2, 3), None)).await;
    one.say("b").await;
    answer.reads("ab").await;
    one.fail(Status::unavailable("gone")).await;
    let next = other.decode().await;
    next.claimed().await;
    next.send_token(first(b'c'.into(), (4, 0), None)).await;
    next.last(b'd'.into(), FinishReason::Length).await;
    let mut usage = None;
    while usage.is_none() {
        usage = answer.next().await.usage;
    }
    let expected = v1::Usage {
        prompt_tokens: 5,
        completion_tokens: 4,
        cached_tokens: 2,
        cache_write_tokens: 3,
        recomputed_tokens: 3,
        ..Default::default()
    };
    assert_eq!(usage, Some(expected));
    let metrics = http::send(two.cluster.router.http_addr, "GET /metrics", "", "").await.text().await;
    let in_pool = r#"pool="default""#;
    for (name, labels, expected) in [
        ("baton_router_requests_total", r#"outcome="ok""#, 1.0),
        ("baton_router_requests_in_flight", in_pool, 0.0),
        ("baton_router_time_to_first_token_seconds_count", in_pool, 1.0),
        ("baton_router_inter_token_seconds_count", in_pool, 3.0),
        ("baton_router_request_duration_seconds_count", in_pool, 1.0),
        ("baton_router_queue_seconds_count", in_pool, 1.0),
        ("baton_router_prompt_tokens_total", in_pool, 5.0),
        ("baton_router_completion_tokens_total", in_pool, 4.0),
        ("baton_prompt_tokens_total", "", 5.0),
        ("baton_cached_tokens_total", "", 2.0),
        ("baton_cache_write_tokens_total", "", 3.0),
        ("baton_recomputed_tokens_total", "", 3.0),
        ("baton_router_placements_total", "local_policy", 2.0),
        ("baton_router_retries_total", "decode", 1.0),
        ("baton_router_replayed_tokens_total", in_pool, 2.0),
        ("baton_router_ready_workers", r#"role="decode""#, 2.0),
        ("baton_router_registered_workers", "", 4.0),
        ("vllm:num_requests_running", "", 0.0),
        ("vllm:num_requests_waiting", "", 0.0),
        ("vllm:request_success_total", r#"finished_reason="length""#, 1.0),
        ("vllm:prompt_tokens_total", "", 5.0),
        ("vllm:generation_tokens_total", "", 4.0),
        ("vllm:prefix_cache_queries_total", "", 5.0),
        ("vllm:prefix_cache_hits_total", "", 2.0),
        ("vllm:time_to_first_token_seconds_count", "", 1.0),
        ("vllm:inter_token_latency_seconds_count", "", 3.0),
        ("vllm:request_prefill_time_seconds_count", "", 1.0),
    ] {
        assert_eq!(value(&metrics, name, labels), expected, "{name}");
    }
    let time = |name: &str| value(&metrics, name, in_pool);
    let (first, all) =
        (time("baton_router_time_to_first_token_seconds_sum"), time("baton_router_request_duration_seconds_sum"));
    assert!(0.0 < first && first < all && all < 60.0, "{first} {all}");
    let role = Role::Prefill;
    assert_eq!(value(&metrics, "baton_router_ready_workers", &format!("role=\"{}\"", role.name())), 2.0);
}
