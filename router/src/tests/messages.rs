//! Anthropic's API against scripted workers.

use crate::testing::cluster::Cluster;
use crate::testing::http::{post, send};
use baton_proto::v1::FinishReason;
use baton_types::Role;
use serde_json::{Value, json};

fn message(more: Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_message_in_one_body() {
    let cluster = Cluster::start(|c| c.cache.pin_ms_max = 400_000).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let to = cluster.router.http_addr;
    let control = |ttl: &str| json!({"cache_control": {"type": "ephemeral", "ttl": ttl}});
    for (more, pin_ms) in [(json!({}), None), (control("5m"), Some(300_000)), (control("1h"), Some(400_000))] {
        let worker = async {
            let decode = d.decode().await;
            decode.claimed().await;
            decode.token(u32::from(b'O')).await;
            decode.last(2, FinishReason::Stop).await;
            decode.request.sequence.unwrap()
        };
        let body = message(more).to_string();
        let (answer, sequence) =
            tokio::join!(send(to, "POST /v1/messages", "x-request-id: my-id\r\nx-api-key: any\r\n", &body), worker);
        assert_eq!((answer.status, answer.header("request-id")), (200, Some("my-id")));
        assert_eq!((answer.header("x-request-id"), answer.header("x-baton-cache-hit")), (Some("my-id"), Some("0")));
        let mut body = answer.json().await;
        for drawn in ["timings", "seed"] {
            assert!(!body[drawn].take().is_null(), "{drawn}");
        }
        expect_test::expect![[r#"{"id":"msg_my-id","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"O"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":9,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":2},"timings":null,"seed":null}"#]]
        .assert_eq(&body.to_string());
        assert_eq!(sequence.sampling.unwrap().max_tokens, 4);
        assert_eq!(sequence.cache.unwrap().pin_ms, pin_ms);
    }
}

#[tokio::test]
async fn a_stream_of_events_ends_with_the_stop_string() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let worker = async {
        let decode = d.decode().await;
        decode.claimed().await;
        for byte in "up to END".bytes() {
            decode.token(u32::from(byte)).await;
        }
    };
    let body = message(json!({"stream": true, "stop_sequences": ["no", "END"], "max_tokens": 20}));
    let (mut answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/messages", &body), worker);
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream; charset=utf-8")));
    let (mut names, mut text, mut end) = (Vec::new(), String::new(), Value::Null);
    while let Some(line) = answer.line().await {
        if let Some(name) = line.strip_prefix("event: ") {
            names.push(name.to_owned());
        } else {
            let event: Value = serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap();
            text += event["delta"]["text"].as_str().unwrap_or_default();
            if event["type"] == "message_delta" {
                end = event["delta"].clone();
            }
        }
    }
    names.dedup();
    let expected =
        "message_start content_block_start content_block_delta content_block_stop message_delta message_stop";
    assert_eq!((names.join(" "), &*text), (expected.to_owned(), "up to "));
    assert_eq!(end, json!({"stop_reason": "stop_sequence", "stop_sequence": "END"}));
}

#[tokio::test]
async fn a_queued_stream_pings_and_an_error_is_its_last_event() {
    let cluster = Cluster::start(|c| (c.http.sse_keepalive_ms, c.retry.attempts_max) = (20, 1)).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = post(cluster.router.http_addr, "/v1/messages", &message(json!({"stream": true}))).await;
    let mut lines = Vec::new();
    while lines.len() < 4 {
        lines.push(answer.line().await.unwrap());
    }
    assert_eq!(
        (&*lines[0], &*lines[2], &*lines[3]),
        ("event: message_start", "event: ping", r#"data: {"type": "ping"}"#)
    );
    let mut decode = d.decode().await;
    decode.claimed().await;
    decode.end();
    while let Some(line) = answer.line().await {
        lines.push(line);
    }
    let told: Value = serde_json::from_str(lines.pop().unwrap().strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!((&told["error"]["type"], lines.pop().as_deref()), (&json!("overloaded_error"), Some("event: error")));
}

#[tokio::test]
async fn tokens_are_counted_as_they_are_served() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let count = async |more: Value| {
        let mut body = message(more);
        body.as_object_mut().unwrap().remove("max_tokens");
        let answer = post(cluster.router.http_addr, "/v1/messages/count_tokens", &body).await;
        (answer.status, answer.json().await)
    };
    assert_eq!(count(json!({})).await, (200, json!({"input_tokens": 9})));
    let (status, told) = count(json!({"system": "x", "tools": [{"name": "get"}]})).await;
    assert!(status == 200 && told["input_tokens"].as_u64().is_some_and(|tokens| tokens > 100), "{told}");
    let (status, told) = count(json!({"model": "nobody"})).await;
    assert_eq!((status, &told["error"]["type"]), (404, &json!("not_found_error")));
}

#[tokio::test]
async fn errors_have_anthropics_envelope() {
    let cluster = Cluster::start(|c| {
        c.http.body_bytes_max = baton_node::config::ByteSize(2048);
        (c.limits.running_max, c.limits.queued_max) = (1, 0);
    })
    .await;
    let to = cluster.router.http_addr;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let long = message(json!({"system": "x".repeat(3000)}));
    let timeout = "x-request-timeout: soon\r\n";
    for (line, headers, body, status, kind) in [
        ("POST /v1/messages", "", message(json!({"max_tokens": 0})), 400, "invalid_request_error"),
        ("POST /v1/messages", "", message(json!({"max_tokens": 90_000})), 400, "invalid_request_error"),
        ("POST /v1/messages", "", message(json!({"temperature": 3})), 400, "invalid_request_error"),
        ("POST /v1/messages", timeout, message(json!({})), 400, "invalid_request_error"),
        ("POST /v1/messages", "", message(json!({"model": "other"})), 404, "not_found_error"),
        ("POST /v1/messages", "", long, 413, "request_too_large"),
        ("POST /v1/messages", "content-encoding: gzip\r\n", message(json!({})), 415, "invalid_request_error"),
        ("GET /v1/messages", "", json!({}), 405, "invalid_request_error"),
        ("GET /v1/messages/batches", "", json!({}), 404, "not_found_error"),
    ] {
        let answer = send(to, line, headers, &body.to_string()).await;
        assert_eq!(answer.status, status, "{line} {body}");
        assert_eq!(answer.header("request-id").is_some(), line.starts_with("POST"), "{line} {body}");
        let told = answer.json().await;
        assert_eq!((&told["type"], &told["error"]["type"]), (&json!("error"), &json!(kind)), "{told}");
        assert!(!told["error"]["message"].as_str().unwrap().is_empty());
    }
    let held = tokio::spawn(async move { post(to, "/v1/messages", &message(json!({}))).await.status });
    let _decode = d.decode().await;
    let answer = post(to, "/v1/messages", &message(json!({}))).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
    assert_eq!(answer.json().await["error"]["type"], "rate_limit_error");
    held.abort();
}
