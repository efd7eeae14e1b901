//! The Responses API against scripted workers.

use crate::testing::cluster::Cluster;
use crate::testing::http::post;
use baton_proto::v1::FinishReason;
use baton_types::Role;
use serde_json::{Value, json};

#[tokio::test]
async fn a_response_is_one_body_or_events() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let to = cluster.router.http_addr;
    for stream in [false, true] {
        let worker = async {
            let decode = d.decode().await;
            decode.claimed().await;
            decode.token(u32::from(b'O')).await;
            decode.last(u32::from(b'K'), FinishReason::Length).await;
            decode.request.sequence.unwrap()
        };
        let body = json!({"model": "m", "input": "hi", "max_output_tokens": 2, "temperature": 0, "stream": stream});
        let (mut answer, sequence) = tokio::join!(post(to, "/v1/responses", &body), worker);
        assert_eq!((answer.status, sequence.sampling.unwrap().max_tokens), (200, 2));
        let response = if stream {
            let mut kinds = Vec::new();
            let mut last = Value::Null;
            while let Some(line) = answer.line().await {
                match line.strip_prefix("event: response.") {
                    Some(kind) => kinds.push(kind.to_owned()),
                    None => last = serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap(),
                }
            }
            let text = ["output_text.delta", "output_text.delta", "output_text.done"];
            let begin = ["created", "in_progress", "output_item.added", "content_part.added"];
            let end = ["content_part.done", "output_item.done", "incomplete"];
            assert_eq!(kinds, [&begin[..], &text, &end].concat());
            last["response"].take()
        } else {
            answer.json().await
        };
        assert_eq!(response["output"][0]["content"][0]["text"], "OK");
        assert_eq!((&response["status"], &response["usage"]["total_tokens"]), (&json!("incomplete"), &json!(11)));
        assert!(
            response["created_at"].as_u64().is_some_and(|at| at > 1_700_000_000) && response["timings"].is_object()
        );
    }
    let answer = post(to, "/v1/responses", &json!({"input": "hi", "previous_response_id": "resp_1"})).await;
    assert_eq!((answer.status, answer.json().await["error"]["param"].take()), (400, json!("previous_response_id")));
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_a_failed_response() {
    let cluster = Cluster::start(|c| c.retry.attempts_max = 1).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let worker = async {
        let mut decode = d.decode().await;
        decode.claimed().await;
        decode.token(u32::from(b'O')).await;
        decode.end();
    };
    let body = json!({"model": "m", "input": "hi", "stream": true});
    let (mut answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/responses", &body), worker);
    let mut last = String::new();
    while let Some(line) = answer.line().await {
        last = line;
    }
    let event: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!((&event["type"], &event["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(event["response"]["error"]["code"], "unavailable");
}
