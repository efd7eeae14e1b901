//! Whether a failed attempt is retried, which workers others avoid meanwhile, and the limits of both.

use crate::testing::cluster::{Reader, remote};
use crate::testing::fake::DecodeCall;
use crate::testing::two::{Two, either};
use baton_proto::convert::status::from_error;
use baton_proto::v1::FinishReason;
use baton_types::{ErrorKind, RequestError};
use std::time::Duration;
use tonic::{Code, Status};

#[tokio::test]
async fn what_cannot_succeed_is_not_tried_again() {
    let two = Two::start(|_| ()).await;
    for kind in [ErrorKind::InvalidRequest, ErrorKind::ContextLengthExceeded, ErrorKind::Unsupported] {
        let mut answer = two.cluster.generate(remote("x")).await;
        let (mut first, _, _) = either(&two.d).await;
        first.fail(from_error(&RequestError::new(kind, "never"))).await;
        assert_eq!(answer.error().await.code(), Code::from_i32(kind.grpc_code()));
    }
    // A request that breaks its workers is also not tried on the whole cluster.
    let mut answer = two.cluster.generate(remote("x")).await;
    for _ in 0..2 {
        let (mut call, _, _) = either(&two.d).await;
        call.fail(from_error(&RequestError::new(ErrorKind::Internal, "the engine broke"))).await;
    }
    assert_eq!(answer.error().await.code(), Code::Internal);
}

#[tokio::test]
async fn attempts_and_the_budget_of_all_requests_are_bounded() {
    // (attempts of one request, retries of all, attempts seen)
    for (attempts_max, burst_max, attempts) in [(3, 100, 3), (5, 1, 2), (5, 0, 1)] {
        let bounds = |c: &mut crate::RouterConfig| {
            (c.retry.attempts_max, c.retry.burst_max, c.retry.per_s) = (attempts_max, burst_max, 0.0);
        };
        let two = Two::start(bounds).await;
        let mut answer = two.cluster.generate(remote("x")).await;
        for _ in 0..attempts {
            let (mut call, _) = two.claim().await;
            call.fail(Status::unavailable("broken")).await;
        }
        let error = answer.error().await;
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.message().contains("broken"), "{error:?}");
    }
}

/// It accepts the call, but never reports whether it has room.
#[tokio::test]
async fn a_claim_that_is_not_answered_goes_to_another_worker() {
    let two = Two::start(|c| c.limits.claim_ack_ms_max = 2_000).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let (silent, _, other) = either(&two.d).await;
    let call = other.decode().await;
    silent.cancelled().await;
    call.claimed().await;
    let (prefill, _) = two.prefill().await;
    prefill.token(b'1'.into(), Some(FinishReason::Length)).await;
    assert_eq!(answer.rest().await.0, "1");
}

#[tokio::test]
async fn a_worker_that_failed_is_avoided_for_a_while() {
    let two = Two::start(|c| (c.retry.probation_ms_min, c.retry.probation_ms_max) = (60_000, 60_000)).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let (mut first, _, other) = either(&two.d).await;
    first.fail(Status::unavailable("broken")).await;
    for n in 0..8 {
        if n > 0 {
            answer = two.cluster.generate(remote("x")).await;
        }
        let call = other.decode().await;
        call.claimed().await;
        let (prefill, _) = two.prefill().await;
        prefill.token(b'1'.into(), Some(FinishReason::Length)).await;
        assert_eq!(answer.rest().await.0, "1");
    }
}

#[tokio::test]
async fn a_worker_that_serves_again_is_avoided_no_more() {
    let two = Two::start(|c| (c.retry.probation_ms_min, c.retry.probation_ms_max) = (60_000, 60_000)).await;
    let serve = async |call: DecodeCall, mut answer: Reader| {
        call.claimed().await;
        let (prefill, _) = two.prefill().await;
        prefill.token(b'1'.into(), Some(FinishReason::Length)).await;
        assert_eq!(answer.rest().await.0, "1");
    };
    let answer = two.cluster.generate(remote("x")).await;
    let (mut call, worker, other) = either(&two.d).await;
    call.fail(Status::unavailable("broken")).await;
    serve(other.decode().await, answer).await;
    let answer = two.cluster.generate(remote("x")).await;
    other.decode().await.fail(Status::unavailable("broken")).await;
    serve(worker.decode().await, answer).await;
    // Now only the other one is avoided.
    for _ in 0..8 {
        let answer = two.cluster.generate(remote("x")).await;
        let (call, called, _) = either(&two.d).await;
        assert!(std::ptr::eq(called, worker), "what it served was not forgiven");
        serve(call, answer).await;
    }
}

#[tokio::test]
async fn a_failure_too_close_to_the_deadline_counts_as_its_end() {
    // The first pause is at least half of this.
    let two = Two::start(|c| (c.retry.backoff_ms_min, c.retry.backoff_ms_max) = (60_000, 60_000)).await;
    let mut answer = two.cluster.generate_within(remote("x"), Some(Duration::from_secs(20))).await.unwrap();
    let (mut call, _) = two.claim().await;
    call.fail(Status::unavailable("broken")).await;
    let error = answer.error().await;
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("broken"), "{error:?}");
}

#[tokio::test]
async fn a_client_that_goes_while_the_router_waits_ends_the_request() {
    let two = Two::start(|c| (c.retry.backoff_ms_min, c.retry.backoff_ms_max) = (60_000, 60_000)).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let (mut first, _) = two.claim().await;
    let (prefill, _) = two.prefill().await;
    prefill.token(b'1'.into(), None).await;
    answer.reads("1").await;
    first.fail(Status::unavailable("broken")).await;
    prefill.cancelled().await;
    drop(answer);
    let gone = async {
        while two.cluster.router.requests() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("the request ends");
}
