//! `baton status`: a worker that is killed, one that stands still, a pool that is full and an engine whose loop does not move show within
//! five seconds, in the status and in metrics, and go again.

use anyhow::{Context, ensure};
use baton_engine::LogitObserver;
use baton_proto::v1::{self, admin_client::AdminClient};
use baton_tests::cluster::{Cluster, ClusterSpec, worker};
use baton_tests::http::Api;
use baton_tests::processes::{baton, binary, send};
use baton_tests::quiet::until_quiet;
use baton_tests::scrape::find;
use baton_tests::service::Service;
use baton_types::{BlockTables, RequestId};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The promise: whoever asks this long afterwards is told.
const SHOWN_MAX: Duration = Duration::from_secs(5);
/// Longest wait for anything else.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// A model with a context that takes long to fill: 384 bytes of KV a token.
const MODEL: &str = "random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=100000,seed=11";

/// A router and its workers, each a process.
struct Processes {
    router: Service,
    grpc: SocketAddr,
    http: SocketAddr,
    workers: Vec<Service>,
}

impl Processes {
    async fn start(names: &[&str], more: &[&str]) -> anyhow::Result<Self> {
        let flags = |flags: &[&str]| flags.iter().map(|f| (*f).to_owned()).collect::<Vec<_>>();
        let listen = ["--grpc-listen=127.0.0.1:0", "--log=error"];
        // A lease that outlasts the look at a worker that stands still.
        let config = tempfile::NamedTempFile::new()?;
        std::fs::write(config.path(), "[membership]\nlease_ms = 20000\n")?;
        let own = [
            format!("--config={}", config.path().display()),
            "--http-listen=127.0.0.1:0".into(),
            "--cluster-listen=127.0.0.1:0".into(),
        ];
        let mut router = Service::start("baton-router", &[flags(&listen), own.to_vec()].concat())?;
        let (grpc, http) = router.listening().await?;
        let (routers, model) = (format!("--routers={}", router.cluster().await?), format!("--model={MODEL}"));
        let mut workers = Vec::new();
        for name in names {
            let own =
                [format!("--instance={name}"), routers.clone(), model.clone(), "--admin-listen=127.0.0.1:0".into()];
            let program = format!("baton-{}-worker", name.split('-').next().unwrap_or_default());
            let all = [flags(&listen), own.to_vec(), flags(&["--threads=1"]), flags(more)].concat();
            workers.push(Service::start(&program, &all)?);
        }
        for worker in &mut workers {
            worker.ready().await?;
        }
        Ok(Self { router, grpc, http, workers })
    }

    /// Exit code and JSON of `baton status`.
    fn status(&self) -> anyhow::Result<(bool, Value)> {
        let output = baton(&["status", "--once", "--json", "--router", &format!("http://{}", self.grpc)])?;
        let text = String::from_utf8(output.stdout)?;
        let status =
            serde_json::from_str(&text).with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Ok((output.status.success(), status))
    }

    /// Waits until nothing is the matter.
    async fn until_healthy(&self) -> anyhow::Result<Value> {
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            let (success, status) = self.status()?;
            ensure!(success == (status["healthy"] == true), "the exit code tells something else: {status}");
            if success {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "{}", status["problems"]);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until a problem of this kind with a worker is told, and returns its text and the whole.
    async fn until_told(&self, kind: &str, worker: &str) -> anyhow::Result<(String, Value)> {
        let since = Instant::now();
        loop {
            let asked = since.elapsed();
            let (success, status) = self.status()?;
            let problems = status["problems"].as_array().context("a list")?;
            let told = problems.iter().find(|p| p["kind"] == kind && p["worker"] == worker);
            if let Some(text) = told.and_then(|p| p["text"].as_str()) {
                ensure!(!success, "the exit code says that nothing is the matter");
                let counted = find(&self.metrics(), "baton_router_problems", &[&format!("kind=\"{kind}\"")]).await?;
                ensure!(counted >= 1.0, "{counted} are counted");
                return Ok((text.to_owned(), status));
            }
            ensure!(asked < SHOWN_MAX, "{worker} is not told {kind} to who asks after {asked:?}: {problems:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn metrics(&self) -> String {
        format!("http://{}/metrics", self.http)
    }

    async fn ready_decode_workers(&self) -> anyhow::Result<f64> {
        find(&self.metrics(), "baton_router_ready_workers", &["role=\"decode\""]).await
    }

    async fn stop(mut self) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            worker.terminate().await?;
        }
        self.router.terminate().await
    }
}

fn row<'a>(status: &'a Value, worker: &str) -> &'a Value {
    let rows = status["workers"].as_array();
    rows.and_then(|rows| rows.iter().find(|w| w["instance"] == worker)).unwrap_or(&Value::Null)
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_are_killed_or_stand_still_show_within_seconds() -> anyhow::Result<()> {
    let mut cluster = Processes::start(&["prefill-0", "decode-0", "decode-1"], &["--kv-cache-bytes=16MiB"]).await?;
    let status = cluster.until_healthy().await?;
    for (worker, role) in [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")] {
        let row = row(&status, worker);
        ensure!(row["role"] == role && row["state"] == "ready" && row["running"] == 0, "{row}");
        ensure!(row["still_ms"] == 0 && row["blocks"]["free"] == row["blocks"]["total"], "{row}");
    }
    let table = baton(&["status", "--router", &cluster.grpc.to_string()])?;
    let table = String::from_utf8(table.stdout)?;
    ensure!(
        table.starts_with("Nothing is the matter.") && table.lines().any(|l| l.starts_with("decode-1 ")),
        "{table}"
    );

    cluster.workers[1].signal("STOP")?;
    let (text, status) = cluster.until_told("silent", "decode-0").await?;
    ensure!(text.starts_with("has said nothing for ") && row(&status, "decode-0")["state"] == "silent", "{text}");
    cluster.workers[1].signal("CONT")?;
    cluster.until_healthy().await?;

    let mut killed = cluster.workers.remove(2);
    killed.signal("KILL")?;
    let (text, status) = cluster.until_told("gone", "decode-1").await?;
    ensure!(text.starts_with("gone ") && text.ends_with(" s ago"), "{text}");
    ensure!(row(&status, "decode-1")["state"] == "gone" && cluster.ready_decode_workers().await? == 1.0, "{status}");
    let shown = baton(&["status", "--router", &format!("http://{}", cluster.grpc)])?;
    let table = String::from_utf8(shown.stdout)?;
    ensure!(!shown.status.success() && table.contains("\n  decode-1: gone "), "{table}");
    killed.ended().await?;
    // Its next start has the same name.
    let mut again = killed.again()?;
    again.ready().await?;
    cluster.workers.push(again);
    cluster.until_healthy().await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_full_shows_within_seconds() -> anyhow::Result<()> {
    // 21,845 tokens.
    let mut cluster = Processes::start(&["decode-0"], &["--kv-cache-bytes=8MiB"]).await?;
    cluster.until_healthy().await?;
    let worker_metrics = cluster.workers[0].metrics().await?;
    let api = Api::new(format!("http://{}/v1", cluster.http));
    // Both fit as they come, and either alone with all of its answer.
    let body = |id| json!({"prompt": vec![id; 10_700], "max_tokens": 11_000, "ignore_eos": true, "stream": true});
    let (one, other) = (api.open("completions", body(5), &[]), api.open("completions", body(6), &[]));
    let (one, other) = tokio::try_join!(one, other)?;
    let streams = [one.error_for_status()?, other.error_for_status()?];
    let deadline = Instant::now() + WAIT_MAX;
    while find(&worker_metrics, "baton_sequences_waiting", &[]).await? < 1.0 {
        ensure!(Instant::now() < deadline, "the pool does not fill");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (text, status) = cluster.until_told("pool_full", "decode-0").await?;
    ensure!(text.starts_with("pool full, ") && text.ends_with(" wait"), "{text}");
    let row = row(&status, "decode-0");
    ensure!(row["state"] == "ready" && row["tokens_per_s"].as_f64().is_some(), "{row}");
    drop(streams);
    let status = cluster.until_healthy().await?;
    ensure!(status["router"]["ttft_count"] == 2, "{status}");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_that_is_watched_goes_on_until_it_is_interrupted() -> anyhow::Result<()> {
    let cluster = Processes::start(&["decode-0"], &["--kv-cache-bytes=8MiB"]).await?;
    let router = format!("http://{}", cluster.grpc);
    let arguments = ["status", "--watch", "--json", "--router", &router];
    let mut watching = Command::new(binary("baton")?).args(arguments).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(watching.stdout.take().context("it is piped")?).lines();
    let since = Instant::now();
    for _ in 0..3 {
        let line = lines.next().context("a line a second")??;
        ensure!(serde_json::from_str::<Value>(&line)?["workers"].as_array().is_some_and(|w| w.len() == 1), "{line}");
    }
    ensure!(since.elapsed() < WAIT_MAX, "three took {:?}", since.elapsed());
    send("INT", watching.id())?;
    ensure!(watching.wait()?.success(), "an interrupt is how it ends");
    cluster.stop().await
}

/// The number of seconds in a text that begins so.
fn seconds_behind(text: &str, begin: &str) -> anyhow::Result<u64> {
    let rest = text.strip_prefix(begin).with_context(|| format!("not {begin:?} but {text:?}"))?;
    let (number, _) = rest.split_once(" s").with_context(|| format!("no seconds in {text:?}"))?;
    Ok(number.parse()?)
}

/// Makes the first engine hang that computes anything of a request, until its other end is dropped.
struct Hang(Mutex<Option<Receiver<()>>>, OnceLock<Instant>);

impl LogitObserver for Hang {
    fn computed(&self, _: &RequestId, _: usize, _: &BlockTables, _: &[f32]) {
        let released = self.0.lock().take();
        if let Some(released) = released {
            let _ = self.1.set(Instant::now());
            let _ = released.recv_timeout(2 * WAIT_MAX);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_loop_does_not_move_shows_long_before_it_counts_as_hung() -> anyhow::Result<()> {
    let cluster = Cluster::start(ClusterSpec::new(1, 1, &worker(MODEL))).await?;
    let mut admin = AdminClient::connect(format!("http://{}", cluster.router.grpc_addr)).await?;
    let (release, released) = channel();
    let hang = Arc::new(Hang(Mutex::new(Some(released)), OnceLock::new()));
    cluster.decode[0].loaded.engine.set_logit_observer(Some(hang.clone()));
    let api = Api::new(cluster.http());
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": true, "prefill_policy": "local"});
    let asked = tokio::spawn(async move { api.post("completions", body).await });

    let deadline = Instant::now() + WAIT_MAX;
    let since = loop {
        if let Some(since) = hang.1.get() {
            break since;
        }
        ensure!(Instant::now() < deadline, "nothing hangs");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let problem = loop {
        let asked = since.elapsed();
        let status = admin.status(v1::StatusRequest {}).await?.into_inner();
        if let Some(problem) = status.problems.first() {
            break problem.clone();
        }
        ensure!(asked < SHOWN_MAX, "nothing is told to who asks after {asked:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    ensure!(problem.kind == "stalled" && problem.worker == "decode-0", "{problem:?}");
    let still = seconds_behind(&problem.text, "engine loop has not moved for ")?;
    // It is told soon, and as it is: not before two seconds, nor of more than have passed.
    ensure!(still >= 2 && still <= since.elapsed().as_secs() + 1, "{problem:?} after {:?}", since.elapsed());
    let stands =
        find(&format!("http://{}/metrics", cluster.decode[0].http), "baton_engine_step_age_seconds", &[]).await?;
    ensure!(stands >= 2.0, "{stands}");
    ensure!(cluster.decode[0].loaded.engine.healthy(), "the bound of health is another one");
    let probe = format!("http://{}/readyz", cluster.decode[0].http);
    loop {
        let asked = since.elapsed();
        let answer = reqwest::get(&probe).await?;
        if answer.status() == 503 {
            let said = answer.text().await?;
            let still = seconds_behind(&said, "the engine's loop has not moved for ")?;
            ensure!(still >= 4 && still <= since.elapsed().as_secs() + 1, "{said} after {:?}", since.elapsed());
            break;
        }
        ensure!(asked < SHOWN_MAX, "/readyz says nothing of it to who asks after {asked:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    drop(release);
    let answer = asked.await??;
    ensure!(answer.status == 200, "{answer:?}");
    let deadline = Instant::now() + WAIT_MAX;
    while !admin.status(v1::StatusRequest {}).await?.into_inner().problems.is_empty() {
        ensure!(Instant::now() < deadline, "it is told on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}
