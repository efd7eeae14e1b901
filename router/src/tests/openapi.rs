//! The description of the HTTP port against the port itself.

use crate::testing::cluster::Cluster;
use crate::testing::http::{post, send};
use baton_proto::v1::FinishReason;
use baton_types::Role;
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[tokio::test]
async fn each_described_path_is_there_and_answers_as_it_is_described() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    let document = send(to, "GET /openapi.json", "", "").await.json().await;
    assert_eq!(
        (&document["openapi"], &document["info"]["version"]),
        (&json!("3.1.0"), &json!(env!("CARGO_PKG_VERSION")))
    );
    let check = |answer: &Value, operation: &Value| {
        let Some(schema) = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].as_str()
        else {
            return;
        };
        let schema = &document["components"]["schemas"][schema.rsplit('/').next().unwrap()];
        let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        let has = names(answer);
        for name in &has {
            assert!(schema["properties"].get(name).is_some(), "{name} is not described: {answer}");
        }
        for name in schema["required"].as_array().unwrap() {
            assert!(has.contains(name.as_str().unwrap()), "{name} is missing: {answer}");
        }
    };
    let chat = json!([{"role": "user", "content": "hi"}]);
    let body = |path: &str| match path {
        "/v1/chat/completions" => json!({"messages": chat, "max_tokens": 1, "return_token_ids": true}),
        "/v1/completions" => json!({"prompt": "hi", "max_tokens": 1}),
        "/v1/responses" => json!({"input": "hi", "max_output_tokens": 1}),
        "/v1/messages" => json!({"messages": chat, "max_tokens": 1}),
        "/v1/messages/count_tokens" => json!({"messages": chat}),
        "/tokenize" => json!({"prompt": "hi", "return_token_strs": true}),
        "/detokenize" => json!({"tokens": [72]}),
        "/ping" => json!({}),
        other => panic!("a body for {other}"),
    };
    // What operators read is tested with the page.
    let paths = document["paths"].as_object().unwrap().iter().filter(|(path, _)| !path.starts_with("/cluster"));
    for (path, operations) in paths {
        for (method, operation) in operations.as_object().unwrap() {
            let is_post = method == "post";
            let asks = async {
                if is_post {
                    post(to, path, &body(path)).await
                } else {
                    send(to, &format!("GET {}", path.replace("{model}", "m")), "", "").await
                }
            };
            let generates = operation["responses"]["200"]["content"].get("text/event-stream").is_some();
            let works = async {
                if generates {
                    let decode = d.decode().await;
                    decode.claimed().await;
                    decode.last(u32::from(b'O'), FinishReason::Length).await;
                }
            };
            let (answer, ()) = tokio::join!(asks, works);
            assert_eq!(answer.status, 200, "{method} {path}");
            let text = answer.text().await;
            if let Ok(answer) = serde_json::from_str::<Value>(&text) {
                check(&answer, operation);
            }
        }
    }
    let page = send(to, "GET /docs", "", "").await;
    assert!(page.header("content-security-policy").is_some_and(|policy| policy.starts_with("default-src 'none'")));
    assert!(page.text().await.contains("/v1/messages/count_tokens"));
}
