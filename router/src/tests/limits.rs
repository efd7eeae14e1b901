//! Limits: admission, context, pools, loads.

use crate::testing::cluster::{Cluster, ask, remote};
use crate::testing::http;
use baton_proto::v1::{self, FinishReason, decode_request};
use baton_types::{InstanceRecord, Role};
use serde_json::json;
use std::time::Duration;

/// With another model, which is served all the time.
#[tokio::test]
async fn a_model_whose_worker_restarts_is_waited_for() {
    let cluster =
        Cluster::start(|c| (c.placement.local_prefill_tokens_max, c.retry.ready_ms_max) = (1_000, 4_000)).await;
    let _m = cluster.worker(Role::Decode, "m").await;
    let named = |record: &mut InstanceRecord| record.card.id = "n".into();
    let n = cluster.worker_with(Role::Decode, "n", named).await;
    let request = || v1::GenerateRequest { model: "n".into(), ..ask("x") };
    drop(n);
    let began = std::time::Instant::now();
    let away = loop {
        // Until the router learns that it left.
        match tokio::time::timeout(Duration::from_secs(20), cluster.generate_within(request(), None)).await.unwrap() {
            Err(status) => break status,
            Ok(_) => assert!(began.elapsed() < Duration::from_secs(30), "a worker that left is served"),
        }
    };
    assert_eq!(away.code(), tonic::Code::Unavailable, "{away:?}");
    let unknown = v1::GenerateRequest { model: "o".into(), ..ask("x") };
    assert_eq!(cluster.generate_within(unknown, None).await.unwrap_err().code(), tonic::Code::NotFound);
    let (answer, again) = tokio::join!(cluster.generate_within(request(), None), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cluster.worker_with(Role::Decode, "n", named).await
    });
    answer.unwrap();
    again.decode().await;
}

#[tokio::test]
async fn over_the_limit_is_refused_with_a_time_to_come_again() {
    let cluster = Cluster::start(|c| (c.limits.running_max, c.limits.queued_max) = (1, 1)).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut running = cluster.generate(ask("x")).await;
    let first = d.decode().await;
    let mut queued = cluster.generate(ask("x")).await;
    let error = cluster.generate_within(ask("x"), None).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::ResourceExhausted);
    assert_eq!(error.metadata().get("retry-after-ms").unwrap(), "1000");
    first.claimed().await;
    first.last(u32::from(b'1'), FinishReason::Length).await;
    assert_eq!(running.rest().await.0, "1");
    let second = d.decode().await;
    second.claimed().await;
    second.last(u32::from(b'2'), FinishReason::Length).await;
    assert_eq!(queued.rest().await.0, "2");
}

#[tokio::test]
async fn what_never_fits_is_refused_at_once() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker_with(Role::Decode, "d", |r| r.capacity_tokens = 64).await;
    let with_max = |text: &str, max_tokens| {
        let sampling = v1::Sampling { max_tokens, ..Default::default() };
        v1::GenerateRequest { sampling: Some(sampling), ..ask(text) }
    };
    for request in [ask(&"x".repeat(64)), with_max("xxxx", Some(61))] {
        let error = cluster.generate_within(request, None).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::OutOfRange, "{error:?}");
    }
    assert!(cluster.generate_within(with_max("xxxx", Some(60)), None).await.is_ok());
}

#[tokio::test]
async fn a_prompt_that_no_prefill_worker_takes_is_refused_where_the_policy_demands_one() {
    let cluster = Cluster::start(|c| c.retry.ready_ms_max = 600_000).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let prompt = "x".repeat(63);
    // No worker is known, so the request waits; then one joins.
    let mut answer = cluster.generate(remote(&prompt)).await;
    let p = cluster.worker_with(Role::Prefill, "p", |r| r.card.context_max = 64).await;
    let error = tokio::time::timeout(Duration::from_secs(20), answer.error()).await.expect("nobody is waited for");
    assert_eq!(error.code(), tonic::Code::InvalidArgument, "{error:?}");
    for part in ["63 tokens", "at most 62", "auto or local"] {
        assert!(error.message().contains(part), "{error:?}");
    }
    let body = json!({"model": "m", "prompt": prompt, "prefill_policy": "remote"});
    let refused = http::post(cluster.router.http_addr, "/v1/completions", &body).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json().await["error"]["param"], "prefill_policy");
    // One token less leaves room for the first token of the answer, and for another one.
    let _answer = cluster.generate(remote(&prompt[1..])).await;
    let decode = d.decode().await;
    decode.claimed().await;
    let _prefill = p.prefill().await;
    let _answer = cluster.generate(ask(&prompt)).await;
    assert!(matches!(d.decode().await.request.prefill, Some(decode_request::Prefill::Local(_))));
}

#[tokio::test]
async fn an_answer_is_as_long_as_the_largest_context_allows() {
    let cluster = Cluster::start(|_| ()).await;
    let small = cluster.worker_with(Role::Decode, "small", |r| r.card.context_max = 64).await;
    let large = cluster.worker_with(Role::Decode, "large", |r| r.card.context_max = 128).await;
    // Eight times, since either may be chosen if both would do.
    for max_tokens in [None, Some(124), Some(61), None, Some(61), None, Some(61), None] {
        let sampling = v1::Sampling { max_tokens, ..Default::default() };
        let _answer = cluster.generate(v1::GenerateRequest { sampling: Some(sampling), ..ask("xxxx") }).await;
        let call = tokio::select! {
            call = large.decode() => call,
            _ = small.decode() => panic!("{max_tokens:?} does not fit there"),
        };
        let sequence = call.request.sequence.as_ref().unwrap();
        assert_eq!(sequence.sampling.as_ref().unwrap().max_tokens, max_tokens.unwrap_or(124));
    }
    let sampling = v1::Sampling { max_tokens: Some(125), ..Default::default() };
    let too_long = v1::GenerateRequest { sampling: Some(sampling), ..ask("xxxx") };
    assert_eq!(cluster.generate_within(too_long, None).await.unwrap_err().code(), tonic::Code::OutOfRange);
}

#[tokio::test]
async fn workers_that_report_trouble_get_nothing() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    p.report(|load| load.draining = true);
    // The report is in transit; until it arrives, requests may still be prefilled remotely.
    loop {
        let answer = cluster.generate(ask("x")).await;
        let decode = d.decode().await;
        if matches!(decode.request.prefill, Some(decode_request::Prefill::Local(_))) {
            break;
        }
        drop(answer);
        decode.cancelled().await;
    }
    d.report(|load| load.healthy = false);
    loop {
        match cluster.generate_within(ask("x"), None).await {
            Ok(answer) => drop(answer),
            Err(error) => {
                assert_eq!(error.code(), tonic::Code::Unavailable);
                break;
            }
        }
    }
}

/// No worker would be in time, however often it is tried.
#[tokio::test]
async fn a_deadline_that_nobody_could_keep_is_missed_at_once_without_advice_to_come_again() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    d.report(|load| (load.prefill_tokens_per_s, load.decode_steps_per_s) = (1.0, 1.0));
    let body = json!({"prompt": "x".repeat(50), "max_tokens": 2}).to_string();
    let answer = loop {
        let asked = http::send(cluster.router.http_addr, "POST /v1/completions", "x-request-timeout: 10\r\n", &body);
        tokio::select! {
            answer = asked => break answer,
            // The report is in transit.
            call = d.decode() => drop(call),
        }
    };
    assert_eq!((answer.status, answer.header("retry-after")), (504, None));
    assert_eq!(answer.json().await["error"]["code"], json!("deadline_exceeded"));
}

#[tokio::test]
async fn logprobs_asked_for_must_come() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let sampling = v1::Sampling { logprobs: Some(2), ..Default::default() };
    let mut answer = cluster.generate(v1::GenerateRequest { sampling: Some(sampling), ..ask("x") }).await;
    let decode = d.decode().await;
    assert_eq!(decode.request.sequence.as_ref().unwrap().sampling.as_ref().unwrap().logprobs, Some(2));
    decode.claimed().await;
    decode.token(u32::from(b'1')).await;
    assert_eq!(answer.error().await.code(), tonic::Code::Internal);
}
