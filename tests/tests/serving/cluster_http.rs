//! HTTP and gRPC in detail, against a real cluster: names and deadlines of requests, limits, and readers that stall or go.

use anyhow::{Context, ensure};
use baton_node::config::ByteSize;
use baton_proto::v1;
use baton_tests::cluster::{Cluster, ClusterSpec, worker};
use baton_tests::eventually::eventually;
use baton_tests::gates::Phase;
use baton_tests::http::{Answer, Api};
use baton_tests::logs;
use baton_tests::quiet::until_quiet;
use baton_tests::scrape::find;
use baton_types::RequestId;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep, timeout};

/// Makes some thousand tokens a second, and has a context that takes minutes to fill.
const MODEL: &str = "random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=100000,seed=11";
/// More tokens than any of these tests waits for.
const ENDLESS: u32 = 90_000;
/// Longest wait for anything that must come.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// A deadline that no endless answer meets, and that passes after the first token on however busy a machine.
const SHORT: Duration = Duration::from_secs(3);

async fn cluster() -> anyhow::Result<Cluster> {
    logs::watch();
    let mut config = worker(MODEL);
    config.engine.kv_cache_bytes = ByteSize(128 << 20);
    let mut spec = ClusterSpec::new(1, 1, &config);
    spec.router.limits.running_max = 2;
    spec.router.limits.queued_max = 1;
    spec.router.limits.client_events_max = 4;
    spec.router.limits.client_stall_ms_max = 1_000;
    spec.router.http.sse_keepalive_ms = 50;
    Cluster::start(spec).await
}

/// Checks that nothing is left, then stops.
async fn end(cluster: Cluster) -> anyhow::Result<()> {
    until_idle(&cluster).await?;
    cluster.stop().await;
    logs::no_errors()
}

/// Waits until the router has no request, and then until no worker holds a block.
async fn until_idle(cluster: &Cluster) -> anyhow::Result<()> {
    let deadline = Instant::now() + WAIT_MAX;
    while cluster.router.requests() > 0 {
        ensure!(Instant::now() < deadline, "{} requests did not end", cluster.router.requests());
        sleep(Duration::from_millis(20)).await;
    }
    until_quiet(cluster).await
}

fn prompt(tokens: u32, policy: &str) -> Value {
    json!({"prompt": [5, 6, 7, 8], "max_tokens": tokens, "ignore_eos": true, "prefill_policy": policy})
}

fn error<'a>(answer: &'a Answer, key: &str) -> &'a str {
    answer.body["error"][key].as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_have_names_deadlines_and_bounds() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let api = Api::new(cluster.http());

    let named = api.post_with("completions", prompt(4, "remote"), &[("x-request-id", "order-66")]).await?;
    ensure!(named.status == 200 && named.header("x-request-id") == "order-66", "{named:?}");
    ensure!(named.body["id"] == "cmpl-order-66" && named.header("x-baton-cache-hit") == "0", "{named:?}");
    ensure!(named.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "{named:?}");
    let drawn = api.post("completions", prompt(4, "local")).await?;
    ensure!(drawn.header("x-request-id").len() > 16, "{drawn:?}");
    let refused = api.post_with("completions", prompt(4, "local"), &[("x-request-id", "two words")]).await?;
    ensure!(refused.status == 400 && error(&refused, "param") == "x-request-id", "{refused:?}");

    for policy in ["remote", "local"] {
        for stream in [false, true] {
            let mut body = prompt(ENDLESS, policy);
            body["stream"] = json!(stream);
            let timeout = format!("{}ms", SHORT.as_millis());
            let late = api.post_with("completions", body, &[("x-request-timeout", &timeout)]).await?;
            // A stream that has begun can only say it in its last event.
            let text = late.body.to_string();
            ensure!(text.contains("deadline_exceeded") && !text.contains("[DONE]"), "{late:?}");
            ensure!(late.status == if stream { 200 } else { 504 }, "{late:?}");
            until_idle(&cluster).await?;
        }
    }
    let spent = api.post_with("completions", prompt(4, "local"), &[("x-request-timeout", "0")]).await?;
    ensure!(spent.status == 504, "{spent:?}");
    let unreadable = api.post_with("completions", prompt(4, "local"), &[("x-request-timeout", "soon")]).await?;
    ensure!(unreadable.status == 400 && error(&unreadable, "param") == "x-request-timeout", "{unreadable:?}");

    let long = json!({"prompt": vec![5; 100_001]});
    for body in [long, prompt(100_000, "auto")] {
        let refused = api.post("completions", body).await?;
        let code = error(&refused, "code");
        ensure!(refused.status == 400 && code == "context_length_exceeded", "{} {}", refused.status, refused.body);
    }
    let typed = api.post("completions", json!({"prompt": [5], "n": 129})).await?;
    ensure!(typed.status == 400 && error(&typed, "param") == "n", "{typed:?}");
    let missing = api.get("nothing").await?;
    ensure!(missing.status == 404 && error(&missing, "code") == "not_found", "{missing:?}");
    end(cluster).await
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_deadlines_and_cancels_free_everything() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let mut client = cluster.client().await?;
    let ask = |policy: v1::PrefillPolicy| v1::GenerateRequest {
        prompt: vec![v1::Segment { kind: Some(v1::segment::Kind::Tokens(v1::TokenIds { ids: vec![5, 6, 7] })) }],
        sampling: Some(v1::Sampling { max_tokens: Some(ENDLESS), ignore_eos: true, ..Default::default() }),
        prefill_policy: policy.into(),
        ..Default::default()
    };
    for policy in [v1::PrefillPolicy::Remote, v1::PrefillPolicy::Local] {
        let mut request = tonic::Request::new(ask(policy));
        request.set_timeout(SHORT);
        let mut stream = client.generate(request).await?.into_inner();
        let status = loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => anyhow::bail!("the stream ended well"),
                Err(status) => break status,
            }
        };
        ensure!(status.code() == tonic::Code::DeadlineExceeded, "{status:?}");
        until_idle(&cluster).await?;

        let mut stream = client.generate(ask(policy)).await?.into_inner();
        stream.message().await?.context("a first message")?;
        drop(stream);
        until_idle(&cluster).await?;
    }
    end(cluster).await
}

/// Opens a stream over a bare socket with a small receive buffer.
async fn raw_stream(cluster: &Cluster, body: &Value) -> anyhow::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4096)?;
    let mut stream = socket.connect(cluster.router.http_addr).await?;
    let body = body.to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json";
    stream.write_all(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes()).await?;
    Ok(stream)
}

/// Reads on until `text` holds `wanted`.
async fn read_until(stream: &mut TcpStream, text: &mut String, wanted: impl Fn(&str) -> bool) -> anyhow::Result<()> {
    let mut buffer = [0; 4096];
    while !wanted(text) {
        let n = timeout(WAIT_MAX, stream.read(&mut buffer)).await??;
        ensure!(n > 0, "the stream ended after: {text}");
        *text += &String::from_utf8_lossy(&buffer[..n]);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_router_keeps_streams_alive_and_refuses_the_rest() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let api = Arc::new(Api::new(cluster.http()));
    let held: Vec<_> = ["one", "two"]
        .map(|id| {
            cluster.gates.hold(RequestId::try_new(id).expect("a name"), Phase::Decode);
            let api = api.clone();
            tokio::spawn(
                async move { api.post_with("completions", prompt(8, "remote"), &[("x-request-id", id)]).await },
            )
        })
        .into();
    wait_requests(&cluster, 2).await?;
    // The third waits for its turn, over a stream that says so.
    let mut body = prompt(8, "remote");
    body["stream"] = json!(true);
    let mut queued = raw_stream(&cluster, &body).await?;
    let mut text = String::new();
    read_until(&mut queued, &mut text, |t| t.matches(": keepalive").count() >= 3).await?;
    ensure!(
        text.starts_with("HTTP/1.1 200") && text.contains("text/event-stream") && !text.contains("data:"),
        "{text}"
    );
    // The fourth is told to come again.
    let full = api.post("completions", prompt(8, "remote")).await?;
    ensure!(full.status == 429 && error(&full, "code") == "overloaded", "{full:?}");
    ensure!(full.header("retry-after").parse::<u64>().is_ok_and(|s| s >= 1), "{full:?}");

    cluster.gates.open();
    read_until(&mut queued, &mut text, |t| t.contains("data: [DONE]")).await?;
    for answer in held {
        let answer = answer.await??;
        ensure!(answer.status == 200 && answer.body["usage"]["completion_tokens"] == 8, "{answer:?}");
    }
    end(cluster).await
}

async fn wait_requests(cluster: &Cluster, wanted: usize) -> anyhow::Result<()> {
    let deadline = Instant::now() + WAIT_MAX;
    while cluster.router.requests() != wanted {
        ensure!(Instant::now() < deadline, "{} requests instead of {wanted}", cluster.router.requests());
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stalls_is_paused_and_one_that_goes_is_forgotten() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    for policy in ["remote", "local"] {
        let generated = || cluster.decode[0].loaded.engine.load().generated_tokens;
        let before = generated();
        let mut body = prompt(ENDLESS, policy);
        body["stream"] = json!(true);
        // A large event a token, so that buffers on the way fill.
        body["logprobs"] = json!(20);
        let mut stalled = raw_stream(&cluster, &body).await?;
        let mut text = String::new();
        read_until(&mut stalled, &mut text, |t| t.contains("data:")).await?;
        // Its task ends only when its client is given up, long before all tokens are made: the engine was paused.
        until_idle(&cluster).await?;
        ensure!(generated() - before < u64::from(ENDLESS), "it ran to its end");
        drop(stalled);

        body["logprobs"] = Value::Null;
        let mut gone = raw_stream(&cluster, &body).await?;
        read_until(&mut gone, &mut String::new(), |t| t.contains("data:")).await?;
        drop(gone);
        until_idle(&cluster).await?;
    }
    let metrics = format!("http://{}/metrics", cluster.router.http_addr);
    eventually(async || {
        let cancelled = find(&metrics, "baton_router_requests_total", &["outcome=\"cancelled\""]).await?;
        ensure!(cancelled == 4.0, "{cancelled} requests count as cancelled");
        Ok(())
    })
    .await?;
    end(cluster).await
}
