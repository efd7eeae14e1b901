//! Several samples of one request, each with scripted workers of its own.

use crate::testing::cluster::{Cluster, ask};
use crate::testing::fake::{DecodeCall, first};
use crate::testing::http::{post, send};
use baton_proto::v1::{self, FinishReason, FinishReason::Length};
use baton_types::Role;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tonic::{Code, Status};

fn samples(n: u32) -> v1::GenerateRequest {
    let sampling = v1::Sampling { seed: Some(7), max_tokens: Some(2), ..Default::default() };
    v1::GenerateRequest { n: Some(n), sampling: Some(sampling), ..ask("hello") }
}

/// The calls for `n` samples, by their number.
async fn calls(d: &crate::testing::fake::Fake, n: usize) -> Vec<DecodeCall> {
    let mut calls = Vec::new();
    for _ in 0..n {
        calls.push(d.decode().await);
    }
    calls.sort_by_key(|call| call.sequence().sample_index);
    calls
}

#[tokio::test]
async fn samples_differ_in_their_number_alone_and_count_as_one_request() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = cluster.generate(samples(3)).await;
    let mut calls = calls(&d, 3).await;
    for (i, call) in calls.iter().enumerate() {
        let mut sequence = call.sequence().clone();
        assert_eq!(sequence.sample_index as usize, i);
        (sequence.sample_index, sequence.request_id) = (0, calls[0].sequence().request_id.clone());
        assert_eq!(&sequence, calls[0].sequence());
    }
    let ids: std::collections::BTreeSet<_> = calls.iter().map(|call| &call.sequence().request_id).collect();
    assert_eq!(ids.len(), 3, "workers tell them apart");
    // The last of them begins first, and computes only the end of the prompt.
    for (i, cached) in [(2, 4), (0, 0), (1, 4)] {
        calls[i].claimed().await;
        calls[i].send_token(first(u32::from(b'a') + i as u32, (cached, if i == 0 { 4 } else { 0 }), None)).await;
    }
    for (i, call) in calls.iter_mut().enumerate() {
        call.last(u32::from(b'x') + i as u32, Length).await;
        call.end();
    }
    let (mut texts, mut ends, mut usage) = (BTreeMap::<u32, String>::new(), Vec::new(), None);
    while let Some(message) = answer.0.message().await.unwrap() {
        assert!(usage.is_none(), "the usage comes last");
        *texts.entry(message.index).or_default() += &message.text;
        if message.finish_reason() != FinishReason::Unspecified {
            assert!(message.timings.is_some());
            ends.push(message.index);
        }
        usage = message.usage;
    }
    assert_eq!(texts, BTreeMap::from([(0, "ax".into()), (1, "by".into()), (2, "cz".into())]));
    ends.sort_unstable();
    assert_eq!(ends, [0, 1, 2]);
    let usage = usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (5, 6));
    assert_eq!((usage.cached_tokens, usage.cache_write_tokens), (0, 4), "one of them computed it");
    assert_eq!(cluster.router.requests(), 0);
    let metrics = send(cluster.router.http_addr, "GET /metrics", "", "").await.text().await;
    let first_tokens = metrics
        .lines()
        .find(|l| l.starts_with("baton_router_time_to_first_token_seconds_count{model=\"m\",pool=\"default\""));
    assert!(first_tokens.unwrap().ends_with(" 1"), "a request has one first token: {first_tokens:?}");
}

#[tokio::test]
async fn an_error_of_one_sample_ends_all() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = cluster.generate(samples(2)).await;
    let mut calls = calls(&d, 2).await;
    for call in &calls {
        call.claimed().await;
    }
    calls[0].token(u32::from(b'a')).await;
    answer.reads("a").await;
    calls[1].fail(baton_proto::convert::status::from_error(&baton_types::RequestError::invalid("x", "no"))).await;
    assert_eq!(answer.error().await.code(), Code::InvalidArgument);
    calls[0].cancelled().await;
}

#[tokio::test]
async fn a_sample_goes_on_for_itself() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = cluster.generate(samples(2)).await;
    let mut calls = calls(&d, 2).await;
    for call in &calls {
        call.claimed().await;
        call.token(u32::from(b'a')).await;
    }
    answer.reads("aa").await;
    calls[0].last(u32::from(b'b'), Length).await;
    let second = cluster.worker(Role::Decode, "d2").await;
    calls[1].fail(Status::unavailable("gone")).await;
    let again = second.decode().await;
    assert_eq!((again.sequence().sample_index, again.sequence().tokens.last()), (1, Some(&u32::from(b'a'))));
    again.claimed().await;
    again.last(u32::from(b'c'), Length).await;
    let mut texts = [String::new(), String::new()];
    while let Some(message) = answer.0.message().await.unwrap() {
        texts[message.index as usize] += &message.text;
    }
    assert_eq!(texts, ["b", "c"]);
}

#[tokio::test]
async fn samples_are_within_the_limits_of_the_router() {
    let cluster = Cluster::start(|config| (config.limits.running_max, config.limits.queued_max) = (2, 1)).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    for (n, code) in [(0, Code::InvalidArgument), (129, Code::InvalidArgument), (4, Code::InvalidArgument)] {
        let refused = cluster.generate_within(samples(n), None).await.unwrap_err();
        assert!(refused.code() == code && refused.message().contains("n must be"), "{n}: {refused}");
    }
    let _three = cluster.generate(samples(3)).await;
    let refused = cluster.generate_within(samples(1), None).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn samples_are_choices_over_http() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let workers = async {
        for (i, call) in calls(&d, 2).await.iter().enumerate() {
            call.claimed().await;
            call.send_token(first(u32::from(b'a') + i as u32, (3 * i as u32, 0), None)).await;
            call.last(u32::from(b'z'), Length).await;
        }
    };
    let to = cluster.router.http_addr;
    let body = json!({"prompt": "hello", "n": 2, "max_tokens": 2});
    let (answer, ()) = tokio::join!(post(to, "/v1/completions", &body), workers);
    assert_eq!((answer.status, answer.header("x-baton-cache-hit")), (200, Some("0")));
    let body = answer.json().await;
    let texts: Vec<_> = body["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect();
    assert_eq!((texts, &body["usage"]["completion_tokens"]), (vec![json!("az"), json!("bz")], &json!(4)));

    let workers = async {
        let calls = calls(&d, 2).await;
        calls[1].claimed().await;
        calls[1].send_token(first(u32::from(b'b'), (5, 0), None)).await;
        calls[0].claimed().await;
        calls[0].send_token(first(u32::from(b'a'), (4, 0), None)).await;
        for call in &calls {
            call.last(u32::from(b'z'), Length).await;
        }
    };
    let body = json!({"prompt": "hello", "n": 2, "max_tokens": 2, "stream": true});
    let (mut answer, ()) = tokio::join!(post(to, "/v1/completions", &body), workers);
    assert_eq!(answer.header("x-baton-cache-hit"), Some("80"), "that of the first to compute, whoever began first");
    let (mut texts, mut ends, mut done) = ([String::new(), String::new()], 0, false);
    while let Some(line) = answer.line().await {
        let data = line.strip_prefix("data: ").unwrap();
        assert!(!done, "{data} after the end");
        done = data == "[DONE]";
        let Ok(chunk) = serde_json::from_str::<Value>(data) else { continue };
        let choice = &chunk["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        ends += usize::from(choice["finish_reason"].is_string());
    }
    assert_eq!((texts, ends, done), (["az".into(), "bz".into()], 2, true));
}
