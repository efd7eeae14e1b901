//! Checks answers through the service, and their effects: KV transferred between pods, and a trace in Jaeger.

use super::Bench;
use super::cases::metrics;
use crate::http::Api;
use crate::jaeger::Trace;
use anyhow::{Context, ensure};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{ChatMessage, GenerateRequest, Sampling, Segment, segment::Kind};
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Tokens of the prompt that is prefilled on another worker.
const PROMPT: u64 = 300;
/// Keys and values of SmolLM2-135M: 30 layers, 3 heads of 64 dimensions, 2 bytes.
const KV_BYTES: u64 = 2 * 30 * 3 * 64 * 2;
/// Longest delay until a span is in Jaeger.
const EXPORT_MAX: Duration = Duration::from_secs(30);
/// Sends streamed requests over gRPC and HTTP, and checks for the KV and the trace.
pub(super) async fn answers(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let mut counts = vec![grpc(&bench.grpc().await?).await?];
    let before = adopted(bench).await?;
    let (said, trace) = http(&bench.http().await?).await?;
    counts.push(said);
    let moved = adopted(bench).await? - before;
    ensure!(
        moved == (PROMPT * KV_BYTES) as f64,
        "{moved} bytes of KV came over UCX, {PROMPT} tokens have {KV_BYTES} each"
    );
    counts.push(format!("{moved} bytes of KV crossed pods, {PROMPT} tokens of {KV_BYTES}"));
    if bench.settings.node.is_some() {
        counts.push(jaeger(bench, &trace).await?);
    }
    Ok(counts)
}

async fn grpc(url: &str) -> anyhow::Result<String> {
    let message =
        ChatMessage { role: "user".into(), content: "What is the capital of France?".into(), name: String::new() };
    let request = GenerateRequest {
        prompt: vec![Segment { kind: Some(Kind::Message(message)) }],
        sampling: Some(Sampling { temperature: Some(0.0), max_tokens: Some(32), ..Sampling::default() }),
        ..GenerateRequest::default()
    };
    let mut client = InferenceClient::connect(url.to_owned()).await?;
    let (mut text, mut messages) = (String::new(), 0);
    let mut stream = client.generate(request).await?.into_inner();
    while let Some(message) = stream.message().await? {
        text.push_str(&message.text);
        messages += 1;
    }
    ensure!(text.contains("Paris") && messages > 2, "{messages} messages say {text:?}");
    Ok(format!("gRPC through the service: {messages} messages say {text:?}"))
}

/// A prompt that must be prefilled on another worker. Returns the answer and the trace of the request.
async fn http(url: &str) -> anyhow::Result<(String, String)> {
    let prompt: Vec<u64> = (0..PROMPT).map(|i| i % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true, "stream": true,
        "prefill_policy": "remote"});
    let answer = Api::new(format!("{url}/v1")).open("completions", body, &[]).await?;
    ensure!(answer.status() == 200, "{answer:?}");
    let trace = answer.headers().get("x-trace-id").context("a trace")?.to_str()?.to_owned();
    let text = answer.text().await?;
    let events = text.lines().filter(|line| line.starts_with("data: ")).count();
    ensure!(events > 2 && text.trim_end().ends_with("data: [DONE]"), "{text}");
    Ok((format!("HTTP through the service: {events} events"), trace))
}

/// Bytes of KV that decode workers have adopted so far.
async fn adopted(bench: &Bench) -> anyhow::Result<f64> {
    let mut bytes = 0.0;
    for pod in bench.cluster.pods("decode").await? {
        let scrape = metrics(&bench.cluster, &pod).await?;
        bytes += scrape.sum("baton_kv_transfer_bytes_total", &["direction=\"adopted\""]);
    }
    Ok(bytes)
}

/// Reads the request's trace from Jaeger: checks all spans and their parents, and the transfer's bytes and transport.
async fn jaeger(bench: &Bench, trace: &str) -> anyhow::Result<String> {
    let pods = bench.cluster.get(&["pods", "--selector=app=jaeger"]).await?;
    let address = pods.first().and_then(|pod| pod["status"]["podIP"].as_str()).context("no pod of Jaeger")?;
    let api = Api::new(format!("http://{address}:16686/api"));
    let started = Instant::now();
    let tags = loop {
        let read = Trace::read(&api.get(&format!("traces/{trace}")).await?.body);
        match read {
            Ok(trace) if trace.is_whole() => break trace.tags,
            read => ensure!(started.elapsed() < EXPORT_MAX, "the trace in Jaeger: {read:#?}"),
        }
        sleep(Duration::from_millis(250)).await;
    };
    let (transfer, moved) = (&tags["kv.transfer"], (PROMPT * KV_BYTES).to_string());
    ensure!(
        transfer.get("baton.kv.bytes") == Some(&moved)
            && transfer.get("baton.kv.transport").is_some_and(|t| t == "tcp"),
        "kv.transfer, of {moved} bytes: {transfer:#?}"
    );
    Ok(format!("Jaeger has the request as one trace of {} spans; kv.transfer by TCP, {moved} bytes", tags.len()))
}
