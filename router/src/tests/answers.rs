//! Whole answers have a limit and a share per client until their clients have read them; other answers are served
//! meanwhile.

use super::auth::KeysFile;
use crate::RouterConfig;
use crate::testing::cluster::{Cluster, ask};
use crate::testing::fake::{DecodeCall, Fake, first, token};
use crate::testing::http::{Answer, send};
use baton_node::config::ByteSize;
use baton_proto::v1::{self, FinishReason::Length};
use baton_types::Role;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

/// Longer than any of these waits takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;
/// Log-probabilities of a token, as JSON and as they are kept, take no fewer bytes.
const TOKEN_BYTES: u64 = 1200;

fn narrow(c: &mut RouterConfig) {
    (c.limits.answers_bytes_max, c.limits.answers_share_bytes_max) = (ByteSize(4 * MIB), ByteSize(MIB));
}

/// A token with all the log-probabilities that a request can ask for.
fn heavy() -> v1::Token {
    let top = (0..20).map(|i| v1::TopLogprob { token_id: 97 + i, logprob: -0.1 - i as f32 }).collect();
    let logprobs = Some(v1::Logprobs { chosen: -0.1, top });
    v1::Token { logprobs, ..token(b'a'.into(), None) }
}

/// Sends `tokens` heavy tokens; the last one ends the answer if `ends`.
async fn say(call: &DecodeCall, tokens: usize, ends: bool) {
    for i in 1..=tokens {
        let finish_reason = if ends && i == tokens { Length as i32 } else { 0 };
        call.send_token(v1::Token { finish_reason, ..heavy() }).await;
    }
}

fn chat(more: Value) -> String {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 20});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

async fn asked(to: SocketAddr, key: &str, body: &str) -> Answer {
    let key = format!("authorization: Bearer {key}\r\n");
    timeout(LONG, send(to, "POST /v1/chat/completions", &key, body)).await.expect("an answer")
}

async fn claimed(d: &Fake) -> DecodeCall {
    let call = d.decode().await;
    call.claimed().await;
    call
}

/// Waits until the bytes held for answers satisfy `is`.
async fn held(cluster: &Cluster, is: impl Fn(u64) -> bool) {
    let wait = async {
        while !is(cluster.router.core().answers.used()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let told = timeout(LONG, wait).await;
    assert!(told.is_ok(), "{} bytes are held", cluster.router.core().answers.used());
}

#[tokio::test]
async fn an_answer_beyond_its_share_is_refused_and_a_stream_of_it_passes() {
    let keys = KeysFile::new(&[("sk-mallory", "mallory"), ("sk-alice", "alice")]);
    let cluster = Cluster::with_keys(keys.path(), narrow).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    // 896 KiB of the share are for answers that are not small.
    let (whole, stream) = (chat(json!({})), chat(json!({"stream": true})));
    let (refused, ()) = tokio::join!(asked(to, "sk-mallory", &whole), async {
        let call = claimed(&d).await;
        say(&call, 900, false).await;
        call.cancelled().await;
    });
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let error = refused.json().await;
    assert_eq!(error["error"]["code"], json!("overloaded"));
    assert!(error["error"]["message"].as_str().unwrap().contains("ask for a stream"), "{error}");
    held(&cluster, |bytes| bytes == 0).await;

    let read = async {
        let mut answer = asked(to, "sk-mallory", &stream).await;
        let (mut lines, mut last) = (0, String::new());
        while let Some(line) = answer.line().await {
            (lines, last) = (lines + 1, line);
        }
        (lines, last)
    };
    let ((lines, last), ()) = tokio::join!(read, async { say(&claimed(&d).await, 900, true).await });
    assert!(lines > 900 && last == "data: [DONE]", "{lines} {last}");
    held(&cluster, |bytes| bytes == 0).await;

    // An answer that is half complete takes no room from other clients, and leaves none to its own.
    let long = tokio::spawn({
        let whole = whole.clone();
        async move { asked(to, "sk-mallory", &whole).await }
    });
    let call = claimed(&d).await;
    say(&call, 400, false).await;
    held(&cluster, |bytes| bytes > 400 * TOKEN_BYTES).await;
    let (other, ()) = tokio::join!(asked(to, "sk-alice", &whole), async { say(&claimed(&d).await, 400, true).await });
    assert_eq!(other.status, 200);
    let (refused, ()) = tokio::join!(asked(to, "sk-mallory", &whole), async {
        let call = claimed(&d).await;
        say(&call, 400, false).await;
        call.cancelled().await;
    });
    assert_eq!(refused.status, 429);
    let (small, ()) = tokio::join!(asked(to, "sk-mallory", &whole), async { say(&claimed(&d).await, 10, true).await });
    assert_eq!(small.status, 200);
    say(&call, 1, true).await;
    let whole = long.await.unwrap();
    assert_eq!(whole.status, 200);
    let length: usize = whole.header("content-length").unwrap().parse().unwrap();
    let text = whole.text().await;
    assert_eq!(text.len(), length);
    let body: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(body["choices"][0]["logprobs"]["content"].as_array().map(Vec::len), Some(401));
    drop((other, small));
    held(&cluster, |bytes| bytes == 0).await;
}

#[tokio::test]
async fn what_is_certain_before_an_answer_is_held_before_it() {
    let cluster = Cluster::start(narrow).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    // 2,000 ids of three digits and a comma, in each choice.
    let body = json!({"prompt": vec![100; 2000], "n": 128, "max_tokens": 1, "return_token_ids": true}).to_string();
    let answer = timeout(LONG, send(cluster.router.http_addr, "POST /v1/completions", "", &body)).await;
    let answer = answer.expect("nobody waits for a token");
    assert_eq!(answer.status, 429);
    let error = answer.json().await;
    assert!(error["error"]["message"].as_str().unwrap().contains("gathered whole"), "{error}");
    held(&cluster, |bytes| bytes == 0).await;
    drop(d);
}

#[tokio::test]
async fn an_answer_that_fails_or_is_left_holds_nothing() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    let asking = tokio::spawn(async move { asked(to, "", &chat(json!({}))).await });
    let mut call = claimed(&d).await;
    say(&call, 100, false).await;
    held(&cluster, |bytes| bytes > 100 * TOKEN_BYTES).await;
    call.fail(baton_proto::convert::status::from_error(&baton_types::RequestError::invalid("x", "no"))).await;
    assert_eq!(asking.await.unwrap().status, 400);
    held(&cluster, |bytes| bytes == 0).await;

    let asking = tokio::spawn(async move { asked(to, "", &chat(json!({}))).await });
    let call = claimed(&d).await;
    say(&call, 100, false).await;
    held(&cluster, |bytes| bytes > 100 * TOKEN_BYTES).await;
    asking.abort();
    held(&cluster, |bytes| bytes == 0).await;
    call.cancelled().await;
}

/// A client that reads only on request, with small buffers.
async fn slow(to: SocketAddr, body: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut stream = socket.connect(to).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn an_answer_is_held_until_its_client_has_read_it() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    for reads in [true, false] {
        let mut stream = slow(cluster.router.http_addr, &chat(json!({}))).await;
        // More than the buffers of two sockets.
        say(&claimed(&d).await, 8000, true).await;
        let mut said = [0; 12];
        timeout(LONG, stream.read_exact(&mut said)).await.expect("an answer").unwrap();
        assert_eq!(&said, b"HTTP/1.0 200");
        let bytes = cluster.router.core().answers.used();
        assert!(bytes > 8 * MIB, "{bytes} bytes are held");
        if reads {
            let mut rest = Vec::new();
            timeout(LONG, stream.read_to_end(&mut rest)).await.expect("all of it").unwrap();
            assert!(rest.len() as u64 > 8 * MIB && rest.ends_with(b"}"));
        }
        drop(stream);
        held(&cluster, |bytes| bytes == 0).await;
    }
}

#[tokio::test]
async fn a_head_over_grpc_waits_in_the_room_that_there_is() {
    let cluster = Cluster::start(|c| {
        narrow(c);
        c.limits.head_ms_max = 60_000;
    })
    .await;
    let d = cluster.worker(Role::Decode, "d").await;
    let sampling = v1::Sampling { logprobs: Some(20), ..Default::default() };
    let request = v1::GenerateRequest { n: Some(2), sampling: Some(sampling), ..ask("x") };
    let worker = async {
        let calls = [claimed(&d).await, claimed(&d).await];
        // The other one sends nothing.
        calls[0].send_token(v1::Token { logprobs: heavy().logprobs, ..first(b'a'.into(), (0, 0), None) }).await;
        say(&calls[0], 4000, false).await;
        calls
    };
    let reader = async {
        let answer = timeout(LONG, cluster.generate(request)).await;
        let mut answer = answer.expect("the head comes without the other's first token");
        for _ in 0..=4000 {
            assert_eq!(answer.next().await.text, "a");
        }
        // The memory for unread output counts until the end of the answer.
        held(&cluster, |bytes| 0 < bytes && bytes < 64 << 10).await;
    };
    tokio::join!(reader, worker);
    held(&cluster, |bytes| bytes == 0).await;
}
