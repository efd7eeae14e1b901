//! Requests that name an adapter: which workers get them, and what they are told.

use crate::testing::cluster::{Cluster, ask, remote};
use crate::testing::fake::Fake;
use crate::testing::http;
use crate::testing::text::tokens;
use baton_proto::v1::{self, FinishReason};
use baton_types::{AdapterCard, Digest, InstanceRecord, Role};
use serde_json::json;
use std::time::{Duration, Instant};
use tonic::{Code, Status};

const WAIT_MAX: Duration = Duration::from_secs(30);

fn card(name: &str, content: u8) -> AdapterCard {
    AdapterCard { name: name.into(), digest: Digest([content; 32]) }
}

/// Announces adapters, and waits until the router knows them.
async fn announce(cluster: &Cluster, worker: &Fake, cards: &[AdapterCard]) {
    worker.announce(cards).await;
    let known = || {
        let all = cluster.router.core().workers.all();
        let handle = all.iter().find(|handle| *handle.party() == worker.record.party).expect("it is registered");
        let adapters = handle.adapters();
        cards.iter().all(|card| adapters.has(&card.digest)) && adapters.names().count() == cards.len()
    };
    let by = Instant::now() + WAIT_MAX;
    while !known() {
        assert!(Instant::now() < by, "the router takes the announcement");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The error of a request, before or in its stream.
async fn refusal(cluster: &Cluster, request: v1::GenerateRequest) -> Status {
    match cluster.generate_within(request, None).await {
        Ok(mut reader) => reader.error().await,
        Err(status) => status,
    }
}

fn of(model: &str, request: v1::GenerateRequest) -> v1::GenerateRequest {
    v1::GenerateRequest { model: model.into(), ..request }
}

#[tokio::test]
async fn every_attempt_has_the_content_that_was_served_when_the_request_came() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d, other) = (
        cluster.worker(Role::Prefill, "p").await,
        cluster.worker(Role::Decode, "d").await,
        cluster.worker(Role::Decode, "other").await,
    );
    for worker in [&p, &d] {
        announce(&cluster, worker, &[card("sql", 7)]).await;
    }
    // It has the same content under another name, and another one under the same.
    announce(&cluster, &other, &[card("sql", 8), card("sql-old", 7)]).await;
    let mut answer = cluster.generate(of("sql", remote("hello"))).await;
    let (mut first, second) = tokio::select! {
        call = d.decode() => (call, &other),
        call = other.decode() => (call, &d),
    };
    assert_eq!(first.sequence().adapter[..], [7; 32]);
    first.claimed().await;
    let prefill = p.prefill().await;
    assert_eq!(prefill.request.sequence.as_ref(), Some(first.sequence()));
    prefill.token(b'a'.into(), None).await;
    let begin = answer.next().await;
    assert_eq!((begin.model.as_str(), begin.text.as_str()), ("sql", "a"));
    first.adopted().await;
    prefill.done().await;
    first.say("b").await;
    answer.reads("b").await;
    // The name stands for another content now, and the answer goes on with its own.
    announce(&cluster, &p, &[card("sql", 8), card("kept", 7)]).await;
    first.fail(Status::unknown("the connection broke")).await;
    let second = second.decode().await;
    assert_eq!((&second.sequence().tokens, &second.sequence().adapter[..]), (&tokens("helloab"), &[7; 32][..]));
    second.claimed().await;
    let prefill = p.prefill().await;
    assert_eq!(prefill.request.sequence.as_ref(), Some(second.sequence()));
    prefill.token(b'c'.into(), Some(FinishReason::Length)).await;
    assert_eq!(answer.rest().await, ("c".into(), FinishReason::Length));
}

#[tokio::test]
async fn workers_without_the_adapter_get_nothing_of_it() {
    let cluster = Cluster::start(|_| ()).await;
    let _without = cluster.pair().await;
    let has = cluster.worker(Role::Decode, "has").await;
    announce(&cluster, &has, &[card("sql", 7)]).await;
    // The prefill worker lacks it, so the decode worker prefills; placement knows one candidate.
    for _ in 0..4 {
        let mut answer = cluster.generate(of("sql", ask("hello"))).await;
        let call = has.decode().await;
        assert!(matches!(call.request.prefill, Some(v1::decode_request::Prefill::Local(_))));
        call.claimed().await;
        call.last(b'a'.into(), FinishReason::Length).await;
        assert_eq!(answer.rest().await, ("a".into(), FinishReason::Length));
    }
    let refused = refusal(&cluster, of("sql", remote("hello"))).await;
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("no prefill worker"), "{refused:?}");

    let listed = http::send(cluster.router.http_addr, "GET /v1/models", "", "").await;
    let (status, models) = (listed.status, listed.json().await);
    let entry = |name: &str| models["data"].as_array().unwrap().iter().find(|entry| entry["id"] == name).cloned();
    assert_eq!(status, 200, "{models}");
    let (base, adapter) = (entry("m").unwrap(), entry("sql").unwrap());
    assert_eq!((&base["root"], &base["parent"]), (&"m".into(), &serde_json::Value::Null));
    assert_eq!((&adapter["root"], &adapter["parent"]), (&"sql".into(), &"m".into()));
    let unknown = refusal(&cluster, of("sequel", ask("hello"))).await;
    assert_eq!(unknown.code(), Code::NotFound);
    assert!(unknown.message().ends_with("served: m, sql"), "{unknown:?}");
    // The last one that has it takes it back.
    announce(&cluster, &has, &[]).await;
    assert_eq!(refusal(&cluster, of("sql", ask("hello"))).await.code(), Code::NotFound);
}

#[tokio::test]
async fn every_api_answers_with_the_name_of_the_adapter() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    announce(&cluster, &d, &[card("sql", 7)]).await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "sql", "messages": messages, "max_tokens": 1})),
        ("/v1/completions", json!({"model": "sql", "prompt": "hi", "max_tokens": 1})),
        ("/v1/responses", json!({"model": "sql", "input": "hi", "max_output_tokens": 1})),
        ("/v1/messages", json!({"model": "sql", "messages": messages, "max_tokens": 1})),
    ] {
        let worker = async {
            let decode = d.decode().await;
            decode.claimed().await;
            decode.last(u32::from(b'a'), FinishReason::Length).await;
        };
        let (answer, ()) = tokio::join!(http::post(cluster.router.http_addr, path, &body), worker);
        let answer = answer.json().await;
        assert_eq!(answer["model"], "sql", "{path}: {answer}");
    }
}

#[tokio::test]
async fn every_api_answers_with_the_first_served_name() {
    let cluster = Cluster::start(|c| c.metrics.vllm_names = true).await;
    let named = |record: &mut InstanceRecord| {
        record.card.id = "folder".into();
        record.card.served_names = vec!["folder".into(), "mine".into(), "other".into()];
    };
    let d = cluster.worker_with(Role::Decode, "d", named).await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "mine", "messages": messages, "max_tokens": 1})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})),
        ("/v1/completions", json!({"model": "other", "prompt": "hi", "max_tokens": 1})),
        ("/v1/responses", json!({"model": "mine", "input": "hi", "max_output_tokens": 1})),
        ("/v1/messages", json!({"model": "folder", "messages": messages, "max_tokens": 1})),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = stream.into();
            let worker = async {
                let decode = d.decode().await;
                decode.claimed().await;
                decode.last(u32::from(b'a'), FinishReason::Length).await;
            };
            let ask = async { http::post(to, path, &body).await.text().await };
            let (answer, ()) = tokio::join!(ask, worker);
            assert!(answer.contains(r#""model":"mine""#) && !answer.contains("folder"), "{path}: {answer}");
        }
    }
    let metrics = http::send(to, "GET /metrics", "", "").await.text().await;
    let mut vllm = metrics.lines().filter(|line| line.starts_with("vllm:") && line.contains("model_name"));
    assert!(vllm.all(|line| line.contains(r#"model_name="mine""#)), "{metrics}");
    assert!(metrics.contains(r#"vllm:generation_tokens_total{model_name="mine",engine="0"} 10"#), "{metrics}");
    assert!(metrics.contains(r#"baton_router_requests_total{model="folder","#), "{metrics}");
}
