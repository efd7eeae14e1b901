//! Answers that fail while other workers have no room: they wait, continue elsewhere, or are refused to the client.

use crate::PrefillPolicy;
use crate::testing::cluster::{Cluster, Reader, ask, remote};
use crate::testing::fake::{DecodeCall, Fake};
use crate::testing::http;
use crate::testing::two::{Two, either};
use baton_proto::convert::status::from_error;
use baton_proto::v1::{self, FinishReason};
use baton_types::{ErrorKind, RequestError, Role};
use std::time::Duration;
use tonic::{Code, Status};

/// A decode worker that accepts at most 64 tokens per sequence.
async fn small(cluster: &Cluster) -> Fake {
    cluster.worker_with(Role::Decode, "small", |r| r.card.context_max = 64).await
}

/// An answer of which the client has received the token `1`.
async fn started(cluster: &Cluster, d: &Fake) -> (Reader, DecodeCall) {
    let mut answer = cluster.generate(ask("x")).await;
    let call = d.decode().await;
    call.claimed().await;
    call.token(b'1'.into()).await;
    assert_eq!(answer.next().await.text, "1");
    (answer, call)
}

/// Waits until the router knows no worker that accepts more than `tokens` tokens.
async fn takes_at_most(cluster: &Cluster, tokens: u64) {
    let seen = async {
        loop {
            let models = http::send(cluster.router.http_addr, "GET /v1/models", "", "").await.json().await;
            if models["data"][0]["max_model_len"] == tokens {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), seen).await.expect("the router hears of it");
}

#[tokio::test]
async fn an_answer_waits_for_a_worker_that_is_large_enough() {
    let cluster = Cluster::start(|c| (c.retry.backoff_ms_min, c.retry.backoff_ms_max) = (1, 1)).await;
    let large = cluster.worker(Role::Decode, "large").await;
    let (mut answer, mut call) = started(&cluster, &large).await;
    let _small = small(&cluster).await;
    large.report(|load| load.draining = true);
    takes_at_most(&cluster, 64).await;
    call.fail(Status::unavailable("broken")).await;
    let next = cluster.worker(Role::Decode, "next").await;
    let call = next.decode().await;
    call.claimed().await;
    call.last(b'2'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("2".into(), FinishReason::Length));
}

#[tokio::test]
async fn an_answer_crosses_classes_where_its_own_has_only_small_workers() {
    let cluster = Cluster::start(|_| ()).await;
    let large = cluster.worker(Role::Decode, "large").await;
    let (mut answer, mut call) = started(&cluster, &large).await;
    let _small = small(&cluster).await;
    large.report(|load| load.draining = true);
    takes_at_most(&cluster, 64).await;
    let other = cluster.worker_with(Role::Decode, "other", |r| r.class.kernel_revision += 1).await;
    call.fail(Status::unavailable("broken")).await;
    let call = other.decode().await;
    call.claimed().await;
    call.last(b'2'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("2".into(), FinishReason::Length));
}

#[tokio::test]
async fn that_the_others_are_full_is_told_with_a_time_to_come_again() {
    let cluster = Cluster::start(|c| c.placement.prefill_policy = PrefillPolicy::Local).await;
    let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
    let mut answer = cluster.generate(ask("x")).await;
    let (mut call, its, other) = either(&d).await;
    its.report(|load| load.draining = true);
    other.report(|load| load.waiting = 16);
    // Until both reports have arrived, one of them receives requests.
    loop {
        let mut probe = cluster.generate(ask("x")).await;
        tokio::select! {
            error = probe.error() => break assert_eq!(error.code(), Code::ResourceExhausted),
            _ = either(&d) => {}
        }
    }
    call.fail(Status::unavailable("broken")).await;
    let error = answer.error().await;
    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
    assert_eq!(error.metadata().get("retry-after-ms").unwrap(), "1000");
}

/// Checks that a client receives the refusal of the full worker at once.
async fn is_told(answer: &mut Reader, retry_after_ms: &str) {
    let error = tokio::time::timeout(Duration::from_secs(20), answer.error()).await.expect("nobody is waited for");
    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
    assert_eq!(error.metadata().get("retry-after-ms").unwrap(), retry_after_ms);
    assert!(error.message().contains("no room here"), "{error:?}");
}

fn full(retry_after_ms: u64) -> Status {
    let retry_after = Duration::from_millis(retry_after_ms);
    from_error(&RequestError::new(ErrorKind::Overloaded, "no room here").retry_after(retry_after))
}

#[tokio::test]
async fn where_only_full_workers_are_left_nobody_is_waited_for() {
    let cluster = Cluster::start(|c| c.retry.ready_ms_max = 600_000).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = cluster.generate(ask("x")).await;
    d.decode().await.fail(full(700)).await;
    is_told(&mut answer, "700").await;
    // One that states no retry time.
    let mut answer = cluster.generate(ask("x")).await;
    d.decode().await.fail(Status::resource_exhausted("no room here")).await;
    is_told(&mut answer, "1000").await;
    // With one that could never accept it, too.
    let _small = small(&cluster).await;
    let mut answer = cluster.generate(ask("x")).await;
    d.decode().await.fail(full(700)).await;
    is_told(&mut answer, "700").await;
    // The same with a prefill worker, if the request requires one.
    let p = cluster.worker(Role::Prefill, "p").await;
    let mut answer = cluster.generate(remote("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    p.prefill().await.fail(full(700)).await;
    is_told(&mut answer, "700").await;
    // With one that could never accept the prompt, too.
    let _small = cluster.worker_with(Role::Prefill, "small-p", |r| r.card.context_max = 2).await;
    let mut answer = cluster.generate(remote("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    p.prefill().await.fail(full(700)).await;
    is_told(&mut answer, "700").await;
}

#[tokio::test]
async fn beside_a_full_worker_one_that_fails_is_not_what_is_told() {
    let cluster = Cluster::start(|c| (c.retry.backoff_ms_min, c.retry.attempts_max) = (1, 3)).await;
    let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
    let mut answer = cluster.generate(ask("x")).await;
    let (mut call, _, other) = either(&d).await;
    call.fail(full(700)).await;
    for _ in 0..2 {
        other.decode().await.fail(Status::unavailable("broken")).await;
    }
    is_told(&mut answer, "700").await;
    // Where the last one is full too, it is that one's refusal.
    let cluster = Cluster::start(|c| c.retry.attempts_max = 2).await;
    let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
    let mut answer = cluster.generate(ask("x")).await;
    let (mut call, _, other) = either(&d).await;
    call.fail(full(700)).await;
    other.decode().await.fail(full(300)).await;
    is_told(&mut answer, "300").await;
    // If the request requires a prefill worker, the same holds for those.
    let two = Two::start(|c| (c.retry.backoff_ms_min, c.retry.attempts_max) = (1, 3)).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let _first = two.claim().await;
    let (mut call, other) = two.prefill().await;
    call.fail(full(700)).await;
    let _second = two.claim().await;
    other.prefill().await.fail(Status::unavailable("broken")).await;
    let _third = two.claim().await;
    other.prefill().await.fail(Status::unavailable("broken")).await;
    is_told(&mut answer, "700").await;
}

/// Once an answer has begun, who was full would be asked again: the last failure is what ended it.
#[tokio::test]
async fn of_an_answer_that_has_begun_the_last_failure_is_told() {
    let cluster = Cluster::start(|c| c.retry.attempts_max = 2).await;
    let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
    let mut answer = cluster.generate(ask("x")).await;
    let (mut call, _, other) = either(&d).await;
    call.fail(full(700)).await;
    let mut call = other.decode().await;
    call.claimed().await;
    call.say("1").await;
    answer.reads("1").await;
    call.fail(Status::unavailable("broken")).await;
    assert_eq!(answer.error().await.code(), Code::Unavailable);
}

#[tokio::test]
async fn an_answer_goes_on_where_there_was_no_room_before_it_began() {
    let cluster = Cluster::start(|_| ()).await;
    let was_full = small(&cluster).await;
    let sampling = v1::Sampling { max_tokens: Some(8), ..Default::default() };
    let mut answer = cluster.generate(v1::GenerateRequest { sampling: Some(sampling), ..ask("x") }).await;
    let mut call = was_full.decode().await;
    let began = cluster.worker(Role::Decode, "began").await;
    call.fail(Status::resource_exhausted("no room here")).await;
    let mut call = began.decode().await;
    call.claimed().await;
    call.say("1").await;
    answer.reads("1").await;
    began.report(|load| load.draining = true);
    takes_at_most(&cluster, 64).await;
    call.fail(Status::unavailable("broken")).await;
    let call = was_full.decode().await;
    call.claimed().await;
    call.last(b'2'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("2".into(), FinishReason::Length));
}
