//! The trace of one request, read back from a real Jaeger. `make test-full` builds it.

use anyhow::ensure;
use baton_tests::http::Api;
use baton_tests::jaeger::Trace;
use baton_tests::processes::Up;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MODEL: &str = "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3";
/// 2 layers of keys and values, 4 heads of 16 dimensions in 2 bytes; blocks of 16 tokens.
const BLOCK_BYTES: u64 = 512 * 16;
const PROMPT_BLOCKS: u64 = 20;
/// Longest start of Jaeger, and longest way of a span through it.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// A Jaeger that keeps traces in memory. Ends when dropped.
struct Jaeger {
    process: Child,
    otlp: String,
    query: String,
    folder: tempfile::TempDir,
}

impl Drop for Jaeger {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Jaeger {
    async fn start() -> anyhow::Result<Self> {
        let binary = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/jaeger/jaeger");
        ensure!(binary.exists(), "{} is missing: run `scripts/build-jaeger target/jaeger`", binary.display());
        // All are free at once, so they differ.
        let free: Vec<_> = (0..4).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
        let ports: Vec<u16> = free.iter().map(|l| l.local_addr().map(|a| a.port())).collect::<Result<_, _>>()?;
        drop(free);
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("jaeger.json");
        // A JSON file is a YAML file.
        std::fs::write(&config, settings(&ports).to_string())?;
        let log = std::fs::File::create(folder.path().join("log"))?;
        let mut command = Command::new(binary);
        command.arg("--config").arg(&config).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let [otlp, query] = [ports[0], ports[1]].map(|port| format!("http://127.0.0.1:{port}"));
        let mut jaeger = Self { process: command.spawn()?, otlp, query, folder };
        jaeger.serves().await?;
        Ok(jaeger)
    }

    async fn serves(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + WAIT_MAX;
        while self.get("/api/v3/services").await.is_err() {
            let ended = self.process.try_wait()?;
            let log = || std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            ensure!(ended.is_none() && Instant::now() < until, "Jaeger does not serve ({ended:?}):\n{}", log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let answer = reqwest::get(format!("{}{path}", self.query)).await?.error_for_status()?;
        Ok(answer.json().await?)
    }
}

fn settings(ports: &[u16]) -> Value {
    let at = |port: u16| json!({"endpoint": format!("127.0.0.1:{port}")});
    json!({
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
            "telemetry": {"logs": {"level": "warn"}, "metrics": {"level": "none"}},
        },
        "extensions": {
            "jaeger_query": {"storage": {"traces": "memory"}, "http": at(ports[1]), "grpc": at(ports[2])},
            "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": 1000}}}},
        },
        "receivers": {"otlp": {"protocols": {"grpc": at(ports[0]), "http": at(ports[3])}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
    })
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a Jaeger, which `make test-full` builds"]
async fn jaeger_shows_one_request_as_one_trace() -> anyhow::Result<()> {
    let jaeger = Jaeger::start().await?;
    let up = Up::start(&[&format!("--model={MODEL}"), &format!("--otlp={}", jaeger.otlp), "--kv-cache-bytes=1MiB"])?;
    let prompt: Vec<u64> = (0..PROMPT_BLOCKS * 16).map(|i| i % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 12, "ignore_eos": true, "prefill_policy": "remote"});
    let answer = Api::new(up.openai()?).post("completions", body).await?;
    ensure!(answer.status == 200, "{answer:?}");
    let path = format!("/api/traces/{}", answer.header("x-trace-id"));
    let until = Instant::now() + WAIT_MAX;
    let tags = loop {
        // Not found until the first of its spans came.
        let got = jaeger.get(&path).await.and_then(|trace| Trace::read(&trace));
        match got {
            Ok(trace) if trace.is_whole() => break trace.tags,
            got => ensure!(Instant::now() < until, "{got:#?}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let moved: u64 = tags["kv.transfer"]["baton.kv.bytes"].parse()?;
    ensure!(moved == PROMPT_BLOCKS * BLOCK_BYTES, "{moved} bytes");
    ensure!(tags["generate"]["gen_ai.response.id"] == answer.header("x-request-id"));
    up.stop()
}
