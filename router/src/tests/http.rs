//! The HTTP front against the same scripted workers.

use crate::testing::cluster::Cluster;
use crate::testing::fake::Fake;
use crate::testing::http::{post, send};
use crate::testing::text::{byte_bundle, tokens};
use baton_proto::v1::{FinishReason, TokenBias};
use baton_text::grammar;
use baton_types::{ErrorKind, InstanceRecord, Role};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

fn chat(more: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_answer_in_one_body() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let to = cluster.router.http_addr;
    let worker = async {
        let decode = d.decode().await;
        decode.claimed().await;
        decode.token(u32::from(b'O')).await;
        decode.last(u32::from(b'K'), FinishReason::Length).await;
        decode.request.sequence.unwrap()
    };
    let body = chat(json!({"max_tokens": 2, "return_token_ids": true, "temperature": 0})).to_string();
    let (answer, sequence) =
        tokio::join!(send(to, "POST /v1/chat/completions", "x-request-id: my-id\r\n", &body), worker);
    let sampling = sequence.sampling.unwrap();
    assert_eq!((sampling.max_tokens, sampling.temperature), (2, 0.0));
    assert_eq!(
        (answer.status, answer.header("x-request-id"), answer.header("x-baton-cache-hit")),
        (200, Some("my-id"), Some("0"))
    );
    assert_eq!(answer.header("access-control-allow-origin"), None);
    let mut body = answer.json().await;
    body["created"].take();
    body["timings"].take();
    body["seed"].take();
    body["prompt_token_ids"].take();
    expect_test::expect![[r#"{"id":"chatcmpl-my-id","object":"chat.completion","created":null,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"OK","refusal":null},"logprobs":null,"finish_reason":"length","token_ids":[79,75]}],"prompt_token_ids":null,"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":0,"cache_write_tokens":0}},"timings":null,"seed":null}"#]]
    .assert_eq(&body.to_string());
}

#[tokio::test]
async fn a_stream_ends_with_usage_and_done() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let worker = async {
        let decode = d.decode().await;
        decode.claimed().await;
        decode.token(u32::from(b'O')).await;
        decode.last(u32::from(b'K'), FinishReason::Stop).await;
    };
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let (mut answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/chat/completions", &body), worker);
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream; charset=utf-8")));
    let mut shown = Vec::new();
    while let Some(line) = answer.line().await {
        let data = line.strip_prefix("data: ").unwrap().to_owned();
        shown.push(match serde_json::from_str::<Value>(&data) {
            Ok(chunk) if chunk["choices"].as_array().unwrap().is_empty() => {
                format!("usage {}", chunk["usage"]["total_tokens"])
            }
            Ok(chunk) => format!("{} {}", chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]),
            Err(_) => data,
        });
    }
    expect_test::expect![[r#"
        {"role":"assistant","content":""} null
        {"content":"O"} null
        {} "stop"
        usage 11
        [DONE]"#]]
    .assert_eq(&shown.join("\n"));
}

#[tokio::test]
async fn a_body_that_does_not_come_is_given_up_at_the_deadline() {
    let cluster = Cluster::start(|_| ()).await;
    let mut stream = TcpStream::connect(cluster.router.http_addr).await.unwrap();
    let head = "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\
                x-request-timeout: 50ms\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_string(&mut answer)).await;
    read.expect("an answer comes although the body does not").unwrap();
    let status = ErrorKind::DeadlineExceeded.http_status().to_string();
    assert!(answer.split(' ').nth(1) == Some(&status) && answer.contains("deadline"), "{answer}");
}

#[tokio::test]
async fn a_compressed_body_is_refused() {
    let cluster = Cluster::start(|_| ()).await;
    let ask = async |coding: &str| {
        let header = format!("content-encoding: {coding}\r\n");
        let answer = send(cluster.router.http_addr, "POST /v1/completions", &header, "{}").await;
        (answer.status, answer.json().await["error"]["code"].clone())
    };
    for coding in ["gzip", "GZIP, identity", "br"] {
        assert_eq!(ask(coding).await, (415, json!("unsupported_media_type")), "{coding}");
    }
    assert_ne!(ask("identity").await.0, 415);
}

#[tokio::test]
async fn version_and_ping_are_answered() {
    let cluster = Cluster::start(|_| ()).await;
    let to = cluster.router.http_addr;
    for ping in ["GET /ping", "POST /ping"] {
        assert_eq!(send(to, ping, "", "").await.status, 200, "{ping}");
    }
    let version = send(to, "GET /version", "", "").await.json().await;
    assert_eq!(version, json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[tokio::test]
async fn unknown_fields_are_ignored_and_told_or_refused() {
    let body = json!({"model": "m", "prompt": "x", "max_tokens": 1, "no such, field": 1, "user": "u", "stream": true});
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let worker = async {
        let decode = d.decode().await;
        decode.claimed().await;
        decode.last(u32::from(b'O'), FinishReason::Length).await;
    };
    let (answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/completions", &body), worker);
    assert_eq!((answer.status, answer.header("x-baton-ignored-fields")), (200, Some("no?such??field")));
    // Of an error, too.
    let wrong = json!({"model": "nobody", "prompt": "x", "a": 1, "b": 1});
    let answer = post(cluster.router.http_addr, "/v1/completions", &wrong).await;
    assert_eq!((answer.status, answer.header("x-baton-ignored-fields")), (404, Some("a, b")));
    let strict = Cluster::start(|c| c.http.strict_fields = true).await;
    let answer = post(strict.router.http_addr, "/v1/completions", &body).await;
    assert_eq!((answer.status, answer.header("x-baton-ignored-fields")), (400, None));
    let error = answer.json().await["error"].take();
    assert_eq!(error["param"], "no?such??field", "{error}");
}

#[tokio::test]
async fn an_effort_reaches_templates_that_name_it_and_is_ignored_elsewhere() {
    for (template, shown, ignored) in [("{{ reasoning_effort }}", "high", None), ("", "", Some("reasoning_effort"))] {
        let cluster = Cluster::start(|_| ()).await;
        let to = (cluster.router.cluster_addr, (Role::Decode, "d"));
        let d = Fake::start(to.0, to.1, byte_bundle(template), |_| ()).await;
        cluster.router.ready().await;
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "high", "stream": true});
        let worker = async {
            let decode = d.decode().await;
            let mut prompt = tokens(&format!("{shown}[user]Hi"));
            prompt.push(256);
            assert_eq!(decode.sequence().tokens, prompt);
            decode.claimed().await;
            decode.last(u32::from(b'O'), FinishReason::Length).await;
        };
        let (answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/chat/completions", &body), worker);
        assert_eq!((answer.status, answer.header("x-baton-ignored-fields")), (200, ignored));
    }
    let strict = Cluster::start(|c| c.http.strict_fields = true).await;
    let _d = strict.worker(Role::Decode, "d").await;
    strict.router.ready().await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "high"});
    let answer = post(strict.router.http_addr, "/v1/chat/completions", &body).await;
    assert_eq!((answer.status, &answer.json().await["error"]["param"]), (400, &json!("reasoning_effort")));
}

#[tokio::test]
async fn prompts_are_tokenized_and_tokens_shown() {
    let cluster = Cluster::start(|_| ()).await;
    let to = cluster.router.http_addr;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let ask = async |path: &str, body: Value| post(to, path, &body).await.json().await;
    let told = ask("/tokenize", json!({"prompt": "Hi", "return_token_strs": true})).await;
    assert_eq!((&told["tokens"], &told["token_strs"]), (&json!([72, 105]), &json!(["H", "i"])), "{told}");
    assert!(told["count"] == 2 && told["max_model_len"].is_u64(), "{told}");
    let told = ask("/tokenize", chat(json!({"tools": []}))).await;
    let text = ask("/detokenize", json!({"model": "m", "tokens": told["tokens"]})).await;
    assert!(text["prompt"].as_str().is_some_and(|text| text.starts_with("[user]hi")), "{text}");
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/tokenize", json!({"prompt": "x", "model": "other"}), "model"),
        ("/detokenize", json!({"tokens": [999_999]}), "tokens"),
    ] {
        let error = ask(path, body).await["error"].take();
        assert_eq!(error["param"], param, "{path} {error}");
    }
}

#[tokio::test]
async fn calls_of_tools_are_read_from_the_answer() {
    let cluster = Cluster::start(|_| ()).await;
    let knows = |record: &mut InstanceRecord| record.capabilities.push(grammar::REVISION.to_owned());
    let d = cluster.worker_with(Role::Decode, "d", knows).await;
    let written = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": 1}}</tool_call>";
    let tool = json!({"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}});
    for choice in ["auto", "required"] {
        let body = chat(json!({"tools": [tool], "tool_choice": choice}));
        let worker = async {
            let decode = d.decode().await;
            decode.claimed().await;
            for byte in written.bytes() {
                decode.token(u32::from(byte)).await;
            }
            decode.last(2, FinishReason::Stop).await;
            decode.request.sequence.unwrap()
        };
        let (answer, sequence) = tokio::join!(post(cluster.router.http_addr, "/v1/chat/completions", &body), worker);
        let choice_0 = answer.json().await["choices"][0].take();
        let call = &choice_0["message"]["tool_calls"][0];
        assert_eq!(call["function"], json!({"name": "get", "arguments": "{\"a\": 1}"}), "{choice_0}");
        assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_")) && call["type"] == "function");
        assert_eq!((&choice_0["message"]["content"], &choice_0["finish_reason"]), (&Value::Null, &json!("tool_calls")));
        let prompt: Vec<u8> = sequence.tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
        assert!(String::from_utf8_lossy(&prompt).contains(r#"{"name":"get","parameters":{"type":"object"}}"#));
        assert_eq!(sequence.sampling.unwrap().grammar.is_some(), choice == "required");
    }
}

#[tokio::test]
async fn requests_with_constraints_go_to_workers_that_know_them() {
    let cluster = Cluster::start(|_| ()).await;
    let old = cluster.worker_with(Role::Decode, "old", |record| record.capabilities.clear()).await;
    let constrained = json!({"model": "m", "prompt": "x", "max_tokens": 1, "logit_bias": {"79": 5}, "min_tokens": 1,
        "allowed_token_ids": [79, 80]});
    let answer = post(cluster.router.http_addr, "/v1/completions", &constrained).await;
    assert_eq!(answer.status, 503, "an old worker would ignore them");
    let new = cluster.worker(Role::Decode, "new").await;
    for _ in 0..4 {
        let worker = async {
            let decode = new.decode().await;
            decode.claimed().await;
            decode.last(u32::from(b'O'), FinishReason::Length).await;
            decode.request.sequence.unwrap().sampling.unwrap()
        };
        let (answer, sampling) = tokio::join!(post(cluster.router.http_addr, "/v1/completions", &constrained), worker);
        let bias = [TokenBias { token_id: 79, bias: 5.0 }];
        assert_eq!((answer.status, sampling.min_tokens, &sampling.logit_bias[..]), (200, 1, &bias[..]));
        assert_eq!(sampling.allowed_token_ids, [79, 80]);
    }
    // A grammar needs a worker of the same revision.
    let form = json!({"model": "m", "prompt": "x", "max_tokens": 1, "guided_regex": "O"});
    let answer = post(cluster.router.http_addr, "/v1/completions", &form).await;
    let error = answer.json().await["error"].take();
    assert!(error["message"].as_str().is_some_and(|m| m.contains(grammar::REVISION)), "{error}");
    let knows = |record: &mut InstanceRecord| record.capabilities.push(grammar::REVISION.to_owned());
    let newest = cluster.worker_with(Role::Decode, "newest", knows).await;
    let worker = async {
        let decode = newest.decode().await;
        decode.claimed().await;
        decode.last(u32::from(b'O'), FinishReason::Length).await;
        decode.request.sequence.unwrap().sampling.unwrap().grammar.unwrap().kind.unwrap()
    };
    let (answer, kind) = tokio::join!(post(cluster.router.http_addr, "/v1/completions", &form), worker);
    assert_eq!((answer.status, kind), (200, baton_proto::v1::grammar::Kind::Regex("O".into())));
    drop(old);
    // Those that end the answer are the card's.
    let ends = json!({"model": "m", "prompt": "x", "min_tokens": 1, "allowed_token_ids": [2]});
    let answer = post(cluster.router.http_addr, "/v1/completions", &ends).await;
    assert_eq!((answer.status, answer.json().await["error"]["param"].take()), (400, json!("min_tokens")));
}

#[tokio::test]
async fn an_error_in_a_stream_is_its_last_event() {
    let cluster = Cluster::start(|c| c.retry.attempts_max = 1).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let worker = async {
        let mut decode = d.decode().await;
        decode.claimed().await;
        decode.token(u32::from(b'O')).await;
        decode.end();
    };
    let body = json!({"model": "m", "prompt": "x", "stream": true});
    let (mut answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/completions", &body), worker);
    assert_eq!(answer.status, 200);
    let first: Value = serde_json::from_str(answer.line().await.unwrap().strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(first["choices"][0]["text"], "O");
    let error: Value = serde_json::from_str(answer.line().await.unwrap().strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "unavailable");
    assert_eq!(answer.line().await, None, "no [DONE] after an error");
}

#[tokio::test]
async fn a_queued_stream_is_kept_alive() {
    let cluster = Cluster::start(|c| c.http.sse_keepalive_ms = 20).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = post(cluster.router.http_addr, "/v1/completions", &json!({"prompt": "x", "stream": true})).await;
    assert_eq!(answer.line().await.as_deref(), Some(": keepalive"));
    let decode = d.decode().await;
    drop(answer);
    decode.cancelled().await;
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_the_worker() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    for stream in [false, true] {
        let body = json!({"prompt": "x", "stream": stream});
        let request = post(cluster.router.http_addr, "/v1/completions", &body);
        let decode = tokio::select! {
            _ = request => panic!("nothing was answered yet"),
            decode = d.decode() => decode,
        };
        // The select dropped the connection.
        decode.cancelled().await;
    }
}

#[tokio::test]
async fn a_prompt_that_no_tokens_can_hold_is_refused_before_it_is_tokenized() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let text = "a b ".repeat(1 << 20);
    let answer = post(cluster.router.http_addr, "/v1/completions", &json!({"model": "m", "prompt": text})).await;
    let status = answer.status;
    let error = answer.json().await["error"].take();
    assert_eq!((status, &error["param"]), (400, &json!("prompt")), "{error}");
    assert!(error["message"].as_str().unwrap().starts_with("This model's maximum context length is "), "{error}");
    assert!(error["message"].as_str().unwrap().contains("The prompt's 4194304 bytes are at least"), "{error}");
}

#[tokio::test]
async fn errors_have_statuses_and_openai_shapes() {
    let cluster = Cluster::start(|c| {
        c.http.body_bytes_max = baton_node::config::ByteSize(2048);
        (c.limits.running_max, c.limits.queued_max) = (1, 0);
    })
    .await;
    let to = cluster.router.http_addr;
    assert_eq!(send(to, "GET /readyz", "", "").await.status, 503);
    assert_eq!(post(to, "/v1/completions", &json!({"prompt": "x"})).await.status, 503, "no worker");
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    for path in ["/readyz", "/healthz", "/health", "/metrics", "/v1/models", "/v1/models/m"] {
        assert_eq!(send(to, &format!("GET {path}"), "", "").await.status, 200, "{path}");
    }
    let long = "x".repeat(3000);
    let cases = [
        ("POST /v1/completions", "", json!({"prompt": "x", "n": 0}), 400, "n"),
        ("POST /v1/completions", "", json!({"prompt": "x", "temperature": 3}), 400, "temperature"),
        ("POST /v1/completions", "", json!({"prompt": "x", "priority": 101}), 400, "priority"),
        ("POST /v1/completions", "", json!({"prompt": "x", "model": "other"}), 404, "model"),
        ("POST /v1/completions", "", json!({"prompt": [99999]}), 400, "prompt"),
        ("POST /v1/completions", "", json!({"prompt": "x", "max_tokens": 9000}), 400, "max_tokens"),
        ("POST /v1/completions", "", json!({"prompt": long}), 413, ""),
        ("POST /v1/completions", "x-request-timeout: soon\r\n", json!({"prompt": "x"}), 400, "x-request-timeout"),
        ("POST /v1/completions", "x-request-timeout: 50ms\r\n", json!({"prompt": "x"}), 504, ""),
        ("POST /v1/completions", "x-request-id: a b\r\n", json!({"prompt": "x"}), 400, "x-request-id"),
        ("POST /v1/chat/completions", "", chat(json!({"tools": [{}]})), 400, "tools[0].type"),
        ("POST /v1/chat/completions", "", chat(json!({"guided_regex": "("})), 400, "guided_regex"),
        ("GET /v1/completions", "", json!({}), 405, ""),
        ("GET /v1/models/other", "", json!({}), 404, "model"),
        ("GET /nowhere", "", json!({}), 404, ""),
    ];
    for (line, headers, body, status, param) in cases {
        let answer = send(to, line, headers, &body.to_string()).await;
        assert_eq!(answer.status, status, "{line} {body}");
        assert_eq!(answer.header("x-request-id").is_some(), line.starts_with("POST"), "{line} {body}");
        let error = answer.json().await["error"].clone();
        assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{error}");
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string());
    }
    d.decode().await.cancelled().await; // The request with the deadline.
    let held = tokio::spawn(async move { post(to, "/v1/completions", &json!({"prompt": "x"})).await.status });
    let _decode = d.decode().await;
    let answer = post(to, "/v1/completions", &json!({"prompt": "x"})).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
    held.abort();
    assert_eq!(
        send(to, "OPTIONS /v1/completions", "origin: http://evil\r\n", "").await.header("access-control-allow-origin"),
        None
    );
}

#[tokio::test]
async fn pages_of_listed_origins_may_call() {
    let origins = vec!["https://chat.example.com".to_owned(), "http://localhost:3000".to_owned()];
    let key = Some("sk-one");
    let cluster = Cluster::start(|c| {
        c.http.cors_origins = origins;
        c.auth.api_key = key.map(|key| serde_json::from_value(json!(key)).unwrap());
    })
    .await;
    let to = cluster.router.http_addr;
    let preflight = async |origin: &str| {
        let headers = format!(
            "origin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type\r\n"
        );
        send(to, "OPTIONS /v1/chat/completions", &headers, "").await
    };
    let answer = preflight("http://localhost:3000").await;
    let header = |name: &str| answer.header(&format!("access-control-{name}")).map(str::to_owned);
    assert_eq!((answer.status, header("allow-origin").as_deref()), (200, Some("http://localhost:3000")));
    assert_eq!(header("allow-headers").as_deref(), Some("authorization,content-type"));
    assert!(header("allow-methods").is_some_and(|methods| methods.contains("POST")) && header("max-age").is_some());
    assert_eq!(header("allow-credentials"), None);
    assert_eq!(preflight("http://evil").await.header("access-control-allow-origin"), None);
    // A refusal can be read, too.
    let refused = send(to, "POST /v1/completions", "origin: https://chat.example.com\r\n", "{}").await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.header("access-control-allow-origin"), Some("https://chat.example.com"));
    assert!(refused.header("access-control-expose-headers").is_some_and(|names| names.contains("x-request-id")));
    let all = Cluster::start(|c| c.http.cors_origins = vec!["*".into()]).await;
    let answer = send(all.router.http_addr, "GET /v1/models", "origin: http://any\r\n", "").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some("*")));
    // What operators read is for no page of another origin.
    let answer = send(all.router.http_addr, "GET /metrics", "origin: http://any\r\n", "").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, None));
}

#[tokio::test]
async fn models_say_since_when_they_are_served() {
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let before = now();
    let cluster = Cluster::start(|_| ()).await;
    let to = cluster.router.http_addr;
    let empty = send(to, "GET /v1/models", "", "").await.json().await;
    assert_eq!(empty, json!({"object": "list", "data": [], "has_more": false, "first_id": null, "last_id": null}));
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let list = send(to, "GET /v1/models", "", "").await.json().await;
    let model = &list["data"][0];
    let created = model["created"].as_u64().unwrap();
    assert!((before..=now()).contains(&created), "{model}");
    assert_eq!((&list["first_id"], &list["last_id"], &model["type"]), (&json!("m"), &json!("m"), &json!("model")));
    let at = model["created_at"].as_str().unwrap();
    assert!(at.starts_with("20") && at.ends_with('Z'), "{at}");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(send(to, "GET /v1/models/m", "", "").await.json().await, *model, "whenever it is asked");
}
