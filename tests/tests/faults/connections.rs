//! Clients that come and go, in good order and in bad: nothing of them stays behind.

use anyhow::{Context, ensure};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{CacheOptions, GenerateRequest, PrefillPolicy, Sampling, Segment, TokenIds, segment::Kind};
use baton_tests::eventually::eventually;
use baton_tests::http::Api;
use baton_tests::processes::{Resources, Up, name_of};
use baton_tests::scrape::find;
use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::json;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

const MODEL: &str = "--model=random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3";
/// Idle threads of a runtime end after 10 s.
const SETTLE: Duration = Duration::from_secs(11);
/// Connections that are open at once.
const AT_ONCE: usize = 16;
/// How much more the last clients may leave than the first.
const GROWTH_MAX: f64 = 1.02;
/// Spans of recent requests are held up to a bound; this one is reached before anything is compared.
const FULL_RING: (&str, &str) = ("BATON_TELEMETRY__RING_SPANS_MAX", "256");
/// Few clients have not yet filled the free lists of allocators and runtimes, and a process without a real model is small.
const FREE_LISTS_KIB: usize = 1024;

/// One client, by its number: whole answers and broken ones over both fronts, and connections that never become a request.
async fn client(n: usize, grpc: &str, http: &str) -> anyhow::Result<()> {
    let policy = if n.is_multiple_of(2) { "local" } else { "remote" };
    let body = |max_tokens: u32, stream: bool| json!({"prompt": prompt(n), "max_tokens": max_tokens, "ignore_eos": true, "stream": stream, "prefill_policy": policy, "cache": {"off": true}});
    match n / 2 % 7 {
        0 => {
            let answer = Api::new(http).post("completions", body(3, false)).await?;
            ensure!(answer.status == 200, "{answer:?}");
        }
        1 => drop(Api::new(http).open("completions", body(400, true), &[]).await?),
        2 => generate(grpc, request(n, 3, policy), usize::MAX).await?,
        3 => generate(grpc, request(n, 400, policy), 1).await?,
        4 => drop(TcpStream::connect(host(http)?).await?),
        5 => drop(TcpStream::connect(host(grpc)?).await?),
        _ => {
            // Half a request, then a reset.
            let mut stream = TcpStream::connect(host(http)?).await?;
            stream.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"pro").await?;
            stream.set_zero_linger()?;
        }
    }
    Ok(())
}

fn prompt(n: usize) -> Vec<u32> {
    (0..20 + n % 50).map(|i| ((i * 31 + n * 7) % 251) as u32).collect()
}

fn host(url: &str) -> anyhow::Result<&str> {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split('/').next().context("an address has a host")
}

fn request(n: usize, max_tokens: u32, policy: &str) -> GenerateRequest {
    let policy = if policy == "local" { PrefillPolicy::Local } else { PrefillPolicy::Remote };
    GenerateRequest {
        prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: prompt(n) })) }],
        sampling: Some(Sampling { max_tokens: Some(max_tokens), ignore_eos: true, ..Sampling::default() }),
        prefill_policy: policy.into(),
        // A cache fills its pool over time, which is no leak and would look like one.
        cache: Some(CacheOptions { off: true, ..CacheOptions::default() }),
        ..GenerateRequest::default()
    }
}

/// Takes at most so many messages, then hangs up.
async fn generate(grpc: &str, request: GenerateRequest, messages_max: usize) -> anyhow::Result<()> {
    let mut client = InferenceClient::connect(format!("http://{}", host(grpc)?)).await?;
    let stream = client.generate(request).await?.into_inner();
    stream.take(messages_max).try_for_each(|_| async { Ok(()) }).await?;
    Ok(())
}

/// Waits until nothing runs, and until what is kept for the next request has been let go: sockets, threads for blocking work.
async fn quiet(metrics: &str) -> anyhow::Result<()> {
    eventually(async || {
        let count = find(metrics, "baton_router_requests_in_flight", &[]).await?;
        ensure!(count == 0.0, "{count} requests run on");
        Ok(())
    })
    .await?;
    tokio::time::sleep(SETTLE).await;
    Ok(())
}

/// Fails where a process holds more now than it did.
fn holds_no_more(pid: u32, first: Resources, slack_kib: usize) -> anyhow::Result<Resources> {
    let last = Resources::of(pid)?;
    let fits = |first: usize, last: usize| last as f64 <= first as f64 * GROWTH_MAX;
    let all = [(first.fds, last.fds), (first.threads, last.threads), (first.rss_kib + slack_kib, last.rss_kib)];
    let fits = all.into_iter().all(|(first, last)| fits(first, last));
    ensure!(fits, "{} keeps more: {first:?}, then {last:?}", name_of(pid));
    Ok(last)
}

async fn come_and_go(flags: &[&str], rounds: usize, per_round: usize, slack_kib: usize) -> anyhow::Result<()> {
    let up = Up::start_with(flags, &[FULL_RING])?;
    let (grpc, http, metrics) = (up.grpc()?, up.openai()?, up.metrics("router")?);
    let children = up.children()?;
    let mut first: Vec<Resources> = Vec::new();
    for round in 0..rounds {
        let clients = (0..per_round).map(|n| client(round * per_round + n, &grpc, &http));
        futures::stream::iter(clients).buffer_unordered(AT_ONCE).try_for_each(|()| async { Ok(()) }).await?;
        if round == 0 {
            quiet(&metrics).await?;
            first = children.iter().map(|&pid| Resources::of(pid)).collect::<anyhow::Result<_>>()?;
        }
    }
    quiet(&metrics).await?;
    for (&pid, &first) in children.iter().zip(&first) {
        // What is let go in time may be let go late on a busy machine.
        let last = eventually(async || holds_no_more(pid, first, slack_kib)).await?;
        println!("{}: {first:?}, then {last:?}", name_of(pid));
    }
    up.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_clients_leave_nothing_behind() -> anyhow::Result<()> {
    come_and_go(&[MODEL, "--kv-cache-bytes=64MiB"], 4, 250, FREE_LISTS_KIB).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "make test-full"]
async fn ten_thousand_clients_leave_nothing_behind() -> anyhow::Result<()> {
    // The default model.
    come_and_go(&["--kv-cache-bytes=256MiB"], 10, 1000, 0).await
}
