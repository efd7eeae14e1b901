//! `baton bench` as a user runs it, against a real cluster behind a relay that remembers every prompt.

use anyhow::{Context, Result, ensure};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::inference_server::{Inference, InferenceServer};
use baton_proto::v1::{GenerateRequest, GenerateResponse, segment::Kind};
use baton_tests::cluster::{Cluster, ClusterSpec, worker};
use baton_tests::processes::{baton, binary, send};
use futures::stream::{BoxStream, StreamExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

const MODEL: &str = "random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=1024,seed=11";
/// Ids of that vocabulary.
const IDS: &str = "--token-ids=10-400";
/// Time for an answer that the relay has sent to be read by whoever asked, on however busy a machine.
const ARRIVES_MAX: Duration = Duration::from_secs(5);
/// Longest wait for anything.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// 512 tokens become 16.
const SCALE: &str = "--scale=0.03125";

/// Prompt tokens and blocks of 12 requests, all of which are due within a second: conversations that go on, a prompt that comes twice, one
/// that ends within a block that others fill, and strangers.
const REQUESTS: [(u32, &[u64]); 12] = [
    (1_100, &[0, 1, 2]),
    (1_100, &[0, 1, 3]),
    (2_048, &[0, 1, 3, 4]),
    (2_300, &[0, 1, 3, 4, 5]),
    (600, &[0, 6]),
    (600, &[0, 6]),
    (512, &[7]),
    (1_024, &[7, 8]),
    (40, &[9]),
    (5_000, &[7, 8, 10, 11, 12, 13, 14, 15, 16, 17]),
    (512, &[18]),
    (1_536, &[0, 1, 19]),
];

/// Tokens of the scaled prompt: 16 of each whole block, and of the last one its share, cut to whole tokens.
fn scaled((tokens, blocks): (u32, &[u64])) -> usize {
    let whole = blocks.len() - 1;
    let last = (tokens as usize - whole * 512) * 16 / 512;
    whole * 16 + last.max(1)
}

/// The trace as a file. The answers tell requests apart: the first has 2 tokens, the next 3, and so on.
fn trace(folder: &Path) -> Result<PathBuf> {
    let line = |(index, (tokens, blocks)): (usize, &(u32, &[u64]))| json!({"timestamp": index * 80, "input_length": tokens, "output_length": (index + 2) * 32, "hash_ids": blocks});
    let lines: Vec<String> = REQUESTS.iter().enumerate().map(line).map(|line| line.to_string()).collect();
    let path = folder.join("trace.jsonl");
    std::fs::write(&path, lines.join("\n"))?;
    Ok(path)
}

/// What came by: number of answer tokens, and the prompt.
type Seen = Arc<Mutex<Vec<(u32, Vec<u32>)>>>;

/// Passes requests on, each after `hold`.
struct Relay {
    to: InferenceClient<Channel>,
    seen: Seen,
    answered: Arc<AtomicUsize>,
    hold: Duration,
}

#[tonic::async_trait]
impl Inference for Relay {
    type GenerateStream = BoxStream<'static, Result<GenerateResponse, Status>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let message = request.into_inner();
        let sampling = message.sampling.clone().unwrap_or_default();
        let [Some(Kind::Tokens(prompt))] = &message.prompt.iter().map(|s| s.kind.clone()).collect::<Vec<_>>()[..]
        else {
            return Err(Status::internal("one segment of token ids is what a load sends"));
        };
        if !sampling.ignore_eos {
            return Err(Status::internal("answers must have their length"));
        }
        self.seen.lock().push((sampling.max_tokens(), prompt.ids.clone()));
        tokio::time::sleep(self.hold).await;
        let answer = self.to.clone().generate(message).await?.into_inner();
        let answered = self.answered.clone();
        let count = move |message: &Result<GenerateResponse, Status>| {
            let ends = message.as_ref().is_ok_and(|message| message.usage.is_some());
            answered.fetch_add(usize::from(ends), Ordering::SeqCst);
        };
        Ok(Response::new(answer.inspect(count).boxed()))
    }
}

struct Fixture {
    cluster: Cluster,
    /// Of the relay.
    router: String,
    seen: Seen,
    /// Answers that went by to their end.
    answered: Arc<AtomicUsize>,
    folder: tempfile::TempDir,
}

impl Fixture {
    async fn start(hold: Duration) -> Result<Self> {
        let cluster = Cluster::start(ClusterSpec::new(1, 1, &worker(MODEL))).await?;
        let seen = Seen::default();
        let answered = Arc::<AtomicUsize>::default();
        let relay = Relay { to: cluster.client().await?, seen: seen.clone(), answered: answered.clone(), hold };
        let incoming = TcpIncoming::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let router = format!("--router=http://{}", incoming.local_addr()?);
        // Ends with the test's runtime.
        tokio::spawn(Server::builder().add_service(InferenceServer::new(relay)).serve_with_incoming(incoming));
        Ok(Self { cluster, router, seen, answered, folder: tempfile::tempdir()? })
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Runs `baton bench` to its end.
    async fn bench(&self, more: &[String]) -> Result<Output> {
        let own = ["bench".to_owned(), self.router.clone(), IDS.to_owned()];
        let all: Vec<String> = own.into_iter().chain(more.iter().cloned()).collect();
        let run = move || baton(&all.iter().map(String::as_str).collect::<Vec<_>>());
        tokio::task::spawn_blocking(run).await?
    }

    fn json(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&std::fs::read(self.file("report.json"))?)?)
    }

    fn replay(&self, more: &[&str]) -> Result<Vec<String>> {
        let trace = format!("--trace={}", trace(self.folder.path())?.display());
        let own = [trace, SCALE.to_owned(), format!("--json={}", self.file("report.json"))];
        Ok(own.into_iter().chain(more.iter().map(|flag| (*flag).to_owned())).collect())
    }
}

fn shared(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_is_replayed_with_its_sharing_and_reported() -> Result<()> {
    let fixture = Fixture::start(Duration::ZERO).await?;
    let html = fixture.file("report.html");
    let flags = [&format!("--html={html}"), "--seed=5", "--slo-ttft-ms=0.0001", "--slo-itl-ms=20000", "--speed=2"];
    let output = fixture.bench(&fixture.replay(&flags)?).await?;
    ensure!(output.status.success(), "{output:?}");

    let mut seen = std::mem::take(&mut *fixture.seen.lock());
    seen.sort_by_key(|(answer, _)| *answer);
    let answers: Vec<u32> = seen.iter().map(|(answer, _)| *answer).collect();
    ensure!(answers == (2..14).collect::<Vec<u32>>(), "{answers:?}");
    for (index, (_, prompt)) in seen.iter().enumerate() {
        ensure!(prompt.len() == scaled(REQUESTS[index]), "{index}: {} tokens", prompt.len());
        ensure!(prompt.iter().all(|id| (10..=400).contains(id)), "{index}: {prompt:?}");
        for (other, (_, others)) in seen[..index].iter().enumerate() {
            let blocks = REQUESTS[index].1.iter().zip(REQUESTS[other].1).take_while(|(a, b)| a == b).count();
            let told = (blocks * 16).min(prompt.len()).min(others.len());
            ensure!(shared(prompt, others) == told, "{index} and {other} share {}, not {told}", shared(prompt, others));
        }
    }

    let report = fixture.json()?;
    ensure!(report["counts"] == json!({"requests": 12, "ok": 12, "failed": {}, "cancelled": 0, "shed": 0}), "{report}");
    let prompt_tokens: usize = REQUESTS.iter().map(|request| scaled(*request)).sum();
    let output_tokens: u32 = answers.iter().sum();
    ensure!(report["tokens"]["prompt"] == prompt_tokens && report["tokens"]["output"] == output_tokens, "{report}");
    // By hand: what each request finds of those before it, its last token aside.
    let infinite = [0, 32, 34, 64, 16, 17, 0, 16, 0, 32, 0, 32].iter().sum::<u32>();
    ensure!(report["cache"]["infinite_tokens"] == infinite, "{}", report["cache"]);
    ensure!(report["ttft_ms"]["count"] == 12 && report["itl_ms"]["count"] == output_tokens - 12, "{report}");
    ensure!(report["ttft_ms"]["p50"].as_f64() > Some(0.0), "{report}");
    ensure!(report["end_to_end_ms"]["p50"].as_f64() >= report["ttft_ms"]["p50"].as_f64(), "{report}");
    // The last arrival is 880 ms after the first, at twice the speed.
    let elapsed = report["elapsed_s"].as_f64().context("a number")?;
    ensure!((0.44..WAIT_MAX.as_secs_f64()).contains(&elapsed), "{elapsed}");
    ensure!(report["goodput"]["met"] == 0, "no first token comes within 100 ns: {}", report["goodput"]);
    let facts = &report["about"]["facts"];
    ensure!(facts["block_tokens"] == 16 && facts["seed"] == 5 && facts["speed"] == 2.0, "{facts}");

    let table = String::from_utf8(output.stdout)?;
    ensure!(table.contains("12 ok") && table.lines().any(|line| line.starts_with("TTFT ")), "{table}");
    let page = std::fs::read_to_string(html)?;
    ensure!(page.matches("<svg ").count() == 5 && page.contains("12 ok"), "{page}");
    ensure!(!page.contains("nothing was measured") && !page.contains("<script"), "{page}");
    fixture.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_due_beyond_the_bound_is_shed_and_what_does_not_fit_is_dropped() -> Result<()> {
    let fixture = Fixture::start(Duration::from_secs(12)).await?;
    // The first two are under way until long after the last is due. The tenth has 156 tokens and asks for 11.
    let flags = ["--in-flight-max=2", "--context-max=150"];
    let output = fixture.bench(&fixture.replay(&flags)?).await?;
    ensure!(output.status.success(), "{output:?}");
    let report = fixture.json()?;
    ensure!(report["counts"]["requests"] == 11 && report["counts"]["ok"] == 2, "{report}");
    ensure!(report["counts"]["shed"] == 9 && fixture.seen.lock().len() == 2, "{report}");
    ensure!(report["about"]["facts"]["dropped_beyond_context"] == 1, "{report}");
    ensure!(report["goodput"].is_null(), "{report}");
    fixture.cluster.stop().await;
    Ok(())
}

/// Replays so slowly that the second request is due after 80 s, and interrupts it once `due` holds.
async fn interrupted(fixture: &Fixture, due: impl Fn() -> bool) -> Result<Output> {
    let mut command = Command::new(binary("baton")?);
    command.args(["bench", &fixture.router, IDS]).args(fixture.replay(&["--speed=0.001"])?);
    let running = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let deadline = Instant::now() + WAIT_MAX;
    while !due() {
        ensure!(Instant::now() < deadline, "nothing happens");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // What has gone by has to arrive. Nothing tells when it has.
    tokio::time::sleep(ARRIVES_MAX).await;
    let since = Instant::now();
    send("INT", running.id())?;
    let output = tokio::task::spawn_blocking(move || running.wait_with_output()).await??;
    ensure!(since.elapsed() < WAIT_MAX, "it goes on for {:?}", since.elapsed());
    Ok(output)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_ends_a_load_and_tells_how_far_it_came() -> Result<()> {
    let fixture = Fixture::start(Duration::ZERO).await?;
    let output = interrupted(&fixture, || fixture.answered.load(Ordering::SeqCst) == 1).await?;
    ensure!(output.status.success(), "an interrupt is how a load may end: {output:?}");
    let report = fixture.json()?;
    ensure!(report["counts"]["requests"] == 1 && report["counts"]["ok"] == 1, "{report}");
    ensure!(report["about"]["facts"]["interrupted_before"] == 11, "{report}");
    fixture.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_under_way_at_an_interrupt_is_cut_off() -> Result<()> {
    let fixture = Fixture::start(2 * WAIT_MAX).await?;
    let output = interrupted(&fixture, || fixture.seen.lock().len() == 1).await?;
    ensure!(output.status.code() == Some(1), "nothing was answered: {output:?}");
    let report = fixture.json()?;
    ensure!(report["counts"]["cancelled"] == 1 && report["counts"]["ok"] == 0, "{report}");
    ensure!(String::from_utf8(output.stdout)?.contains("1 cut off"), "{report}");
    fixture.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_requests_share_what_was_asked_and_are_so_many_at_once() -> Result<()> {
    let fixture = Fixture::start(Duration::from_millis(200)).await?;
    let json = format!("--json={}", fixture.file("report.json"));
    let flags = [
        &json,
        "--requests=6",
        "--concurrency=2",
        "--prompt-tokens=100",
        "--shared-prefix-tokens=30",
        "--output-tokens=5",
    ];
    let output = fixture.bench(&flags.map(str::to_owned)).await?;
    ensure!(output.status.success(), "{output:?}");
    let seen = std::mem::take(&mut *fixture.seen.lock());
    ensure!(seen.len() == 6 && seen.iter().all(|(answer, prompt)| *answer == 5 && prompt.len() == 100), "{seen:?}");
    for (index, (_, prompt)) in seen.iter().enumerate() {
        ensure!(seen[..index].iter().all(|(_, other)| shared(prompt, other) == 30), "{index}: {seen:?}");
    }
    let report = fixture.json()?;
    ensure!(report["counts"]["ok"] == 6 && report["cache"]["infinite_tokens"] == 150, "{report}");
    let windows = report["series"]["windows"].as_array().context("a list")?;
    let most = windows.iter().filter_map(|window| window["in_flight_max"].as_u64()).max();
    ensure!(most == Some(2), "{report}");
    // Three rounds of two, 200 ms each at least.
    ensure!(report["elapsed_s"].as_f64() > Some(0.6), "{report}");

    // Another run draws other prompts.
    let again = fixture.bench(&flags.map(str::to_owned)).await?;
    ensure!(again.status.success(), "{again:?}");
    let other = std::mem::take(&mut *fixture.seen.lock());
    ensure!(other.iter().all(|(_, prompt)| seen.iter().all(|(_, old)| shared(prompt, old) < 16)), "{other:?}");
    fixture.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_every_request_would_be_refused_for_ends_the_load_at_once() -> Result<()> {
    let fixture = Fixture::start(Duration::ZERO).await?;
    let check = async |flags: &[&str], expected: &str| {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let output = fixture.bench(&flags).await?;
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1) && told.contains(expected), "{told}");
        Ok(())
    };
    check(&["--model=none-such"], "no model \"none-such\" here").await?;
    ensure!(fixture.seen.lock().len() <= 8, "so many are under way at once");
    // Longer than the context: each fails for itself, and all are told.
    check(&["--requests=3", "--prompt-tokens=2000"], "equal requests: 3 requests").await?;
    let long = ["--requests=3", "--prompt-tokens=2000"].map(str::to_owned);
    let table = String::from_utf8(fixture.bench(&long).await?.stdout)?;
    ensure!(table.contains("3 failed (context_length_exceeded)"), "{table}");
    check(&["--json=/nowhere/report.json"], "cannot write /nowhere/report.json").await?;
    let path = fixture.file("bad.jsonl");
    std::fs::write(&path, "{\"timestamp\": 0}\n")?;
    check(&[&format!("--trace={path}")], "line 1: missing field").await?;
    fixture.cluster.stop().await;
    Ok(())
}
