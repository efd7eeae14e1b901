//! Workers and routers that are taken out of a running cluster: every request ends, with the right answer.

use anyhow::{Context, ensure};
use baton_node::testing::etcd::EtcdServer;
use baton_tests::eventually::eventually;
use baton_tests::http::{Answer, Api};
use baton_tests::load::{Case, Load};
use baton_tests::processes::{Up, baton, binary};
use baton_tests::quiet::QUIET_MAX;
use baton_tests::scrape::{find, sum};
use baton_tests::service::{Service, free_addresses};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// A model that takes some milliseconds for a token: time to drain in mid-answer.
const SLOW: &str = "random:hidden=512,layers=8,heads=8,kv_heads=4,vocab=500,context=4096,seed=12";
/// Each worker in turn, so that both have requests, whatever rates were measured.
const IN_TURN: (&str, &str) = ("BATON_PLACEMENT__POLICY", "round-robin");
/// Longest wait for anything that must come.
const MAX: Duration = Duration::from_secs(60);

fn body(tokens: u64) -> Value {
    json!({"prompt": [5, 6], "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true})
}

/// Four long answers, asked for at the same time, and the right one.
async fn ask_four(up: &Up, tokens: u64) -> anyhow::Result<(Vec<JoinHandle<anyhow::Result<Answer>>>, Vec<u64>)> {
    let right = Api::new(up.openai()?).post("completions", body(tokens)).await?.tokens();
    let mut asked = Vec::new();
    for _ in 0..4 {
        let api = Api::new(up.openai()?);
        asked.push(tokio::spawn(async move { api.post("completions", body(tokens)).await }));
    }
    Ok((asked, right))
}

/// `baton drain` of a worker, to its end: whether it went well, and all that it printed.
fn drain(up: &Up, worker: &str, more: &[&str]) -> anyhow::Result<(bool, String)> {
    let server = format!("http://{}", up.grpc()?);
    let arguments: Vec<&str> = ["drain", worker, "--server", &server].into_iter().chain(more.iter().copied()).collect();
    let output = baton(&arguments)?;
    let text = String::from_utf8(output.stdout)? + &String::from_utf8(output.stderr)?;
    Ok((output.status.success(), text))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verb_waits_for_what_runs_and_says_what_became_of_it() -> anyhow::Result<()> {
    let up = Up::start_with(&[&format!("--model={SLOW}"), "--decode=2", "--prefill=1", "--threads=1"], &[IN_TURN])?;
    let (mut asked, right) = ask_four(&up, 700).await?;
    // One at each worker runs until its client leaves, so that the drain has not ended before it is asked for again.
    let mut kept = Vec::new();
    for _ in 0..2 {
        let api = Api::new(up.openai()?);
        kept.push(tokio::spawn(async move { api.post("completions", body(4_000)).await }));
    }
    let busy = async |name: &str| find(&up.metrics(name)?, "baton_sequences_running", &[]).await;
    let deadline = Instant::now() + MAX;
    while busy("decode-0").await? + busy("decode-1").await? < 6.0 {
        ensure!(Instant::now() < deadline, "they do not run");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    let unknown = drain(&up, "decode", &[])?;
    ensure!(!unknown.0 && unknown.1.contains("there are decode-0, decode-1, prefill-0"), "{}", unknown.1);
    // The first is given all the time that it needs, and asked a second time meanwhile.
    let server = format!("http://{}", up.grpc()?);
    let arguments = ["drain", "decode-0", "--timeout", "60", "--server", &server];
    let mut first = Command::new(binary("baton")?).args(arguments).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(first.stdout.take().context("it is piped")?).lines();
    let begun = lines.next().context("a line")??;
    ensure!(begun.starts_with("decode-0 drains: ") && begun.contains("request"), "{begun}");
    let again = drain(&up, "decode-0", &[])?;
    ensure!(!again.0 && again.1.contains("drains already"), "{}", again.1);
    kept.iter().for_each(JoinHandle::abort);
    let mut last = begun;
    for line in lines {
        last = line?;
    }
    ensure!(first.wait()?.success() && last.contains("is drained: ") && last.contains("0 cut off"), "{last}");
    let left = async || {
        let said = drain(&up, "decode-0", &[])?.1;
        ensure!(said.contains("there are decode-1, prefill-0"), "it is still registered: {said}");
        Ok(())
    };
    eventually(left).await?;
    for call in asked.drain(..) {
        ensure!(call.await??.tokens() == right, "another answer");
    }

    // What is new goes to the other one, and the drained one stays up until it is stopped.
    let answer = Api::new(up.openai()?).post("completions", body(700)).await?;
    ensure!(answer.tokens() == right, "{answer:?}");
    eventually(async || {
        let busy = busy("decode-0").await?;
        ensure!(busy == 0.0, "{busy} sequences run there");
        Ok(())
    })
    .await?;
    let idle = drain(&up, "prefill-0", &["--timeout=0"])?;
    ensure!(idle.0 && idle.1.contains("0 requests ended there, 0 cut off"), "{}", idle.1);
    up.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_outlasts_the_drain_goes_on_elsewhere() -> anyhow::Result<()> {
    let up = Up::start_with(&[&format!("--model={SLOW}"), "--decode=2", "--prefill=0", "--threads=1"], &[IN_TURN])?;
    // They run for seconds after they were seen to run, however long the verb takes to start on a busy machine.
    let (asked, right) = ask_four(&up, 2_800).await?;
    let deadline = Instant::now() + MAX;
    while find(&up.metrics("decode-1")?, "baton_sequences_running", &[]).await? == 0.0 {
        ensure!(Instant::now() < deadline, "nobody runs there");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (well, text) = drain(&up, "decode-1", &["--timeout=0"])?;
    ensure!(well && !text.contains(" 0 cut off"), "{text}");
    for call in asked {
        ensure!(call.await??.tokens() == right, "another answer");
    }
    ensure!(sum(&up.metrics("router")?, "baton_router_retries_total", &[]).await? > 0.0, "nothing went on elsewhere");
    up.stop()
}

/// Requests of the rolling restart: short and long, prefilled here and elsewhere.
const CASES: [Case; 4] =
    [Case::new(400, 20, false), Case::new(20, 30, true), Case::new(300, 250, true), Case::new(40, 400, false)];
const ROLLED: &str = "random:hidden=256,layers=4,heads=4,kv_heads=2,vocab=500,context=1024,seed=13";
/// Shorter than the long answers take under load, so that some go on elsewhere.
const DRAIN_MS: &str = "--drain-ms-max=50";

/// Two routers, two prefill workers and two decode workers, each a process.
struct Services {
    routers: Vec<Service>,
    workers: Vec<Service>,
    /// HTTP of the routers.
    http: Vec<String>,
}

impl Services {
    /// With `membership` among the flags of all; where gRPC of the routers listens.
    async fn start(membership: &[String]) -> anyhow::Result<(Self, Vec<String>)> {
        let (mut routers, mut grpc, mut http, mut join) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        // A router that returns is to be found where it was.
        for at in free_addresses::<6>()?.chunks(3) {
            let (a, b, c) = (at[0], at[1], at[2]);
            // Routers keep their long drain: nobody else can go on with the streams of their clients.
            let own = [format!("--grpc-listen={a}"), format!("--http-listen={b}"), format!("--cluster-listen={c}")];
            let own = [&own[..], &["--log=warn".into()]].concat();
            routers.push(Service::start("baton-router", &[&own, membership].concat())?);
            grpc.push(format!("http://{a}"));
            join.push(c.to_string());
            http.push(format!("http://{b}/metrics"));
        }
        let mut workers = Vec::new();
        for (role, name) in [("decode", "d-0"), ("decode", "d-1"), ("prefill", "p-0"), ("prefill", "p-1")] {
            let fixed =
                ["--grpc-listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--threads=1", "--log=warn", DRAIN_MS];
            let own =
                [format!("--model={ROLLED}"), format!("--routers={}", join.join(",")), format!("--instance={name}")];
            let flags: Vec<String> = fixed.into_iter().map(str::to_owned).chain(own).collect();
            workers.push(Service::start(&format!("baton-{role}-worker"), &[&flags, membership].concat())?);
        }
        let mut services = Self { routers, workers, http };
        for service in services.workers.iter_mut().chain(&mut services.routers) {
            service.ready().await?;
        }
        services.whole().await?;
        Ok((services, grpc))
    }

    /// Waits until both routers would place on all workers: an orchestrator waits so, too, before it goes on with the next.
    async fn whole(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + MAX;
        for url in &self.http {
            for role in ["prefill", "decode"] {
                while sum(url, "baton_router_ready_workers", &[role]).await? < 2.0 {
                    ensure!(Instant::now() < deadline, "{url}: not both {role} workers are ready");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        Ok(())
    }
}

async fn restart(service: &mut Service) -> anyhow::Result<()> {
    service.terminate().await?;
    *service = service.again()?;
    service.ready().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_every_role_loses_nothing() -> anyhow::Result<()> {
    rolls(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_over_etcd_loses_nothing() -> anyhow::Result<()> {
    let etcd = EtcdServer::start()?;
    rolls(&["--membership=etcd".into(), format!("--etcd={}", etcd.url())]).await
}

async fn rolls(membership: &[String]) -> anyhow::Result<()> {
    let (mut services, routers) = Services::start(membership).await?;
    let load = Load::start(&routers, &CASES).await?;
    load.goes_on("undisturbed", Duration::from_secs(1)).await?;
    let mut retries = 0.0;
    // Twice: the starts that replaced others are replaced, too.
    for _ in 0..2 {
        for worker in 0..services.workers.len() {
            let before = load.answered()?;
            restart(&mut services.workers[worker]).await?;
            services.whole().await?;
            println!("worker {worker} restarted: {} right answers meanwhile", load.answered()? - before);
        }
    }
    let moved = load.moved();
    ensure!(moved == 0, "{moved} requests were sent to another router although each one had workers throughout");
    for router in 0..services.routers.len() {
        let before = load.answered()?;
        retries += sum(&services.http[router], "baton_router_retries_total", &[]).await?;
        restart(&mut services.routers[router]).await?;
        services.whole().await?;
        println!("router {router} restarted: {} right answers meanwhile", load.answered()? - before);
    }
    load.goes_on("afterwards", Duration::from_secs(1)).await?;
    let (answers, moved) = load.stop().await?;
    println!(
        "{answers} right answers, none wrong, none failed; {retries} went on elsewhere, {moved} were sent to another router"
    );
    ensure!(retries > 0.0, "nothing ran when the workers were restarted");
    let deadline = Instant::now() + QUIET_MAX;
    for worker in &mut services.workers {
        let url = worker.metrics().await?;
        while find(&url, "baton_kv_blocks", &["referenced"]).await? > 0.0 {
            ensure!(Instant::now() < deadline, "{url}: blocks are referenced {QUIET_MAX:?} after the last request");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for service in services.workers.iter_mut().chain(&mut services.routers) {
        service.terminate().await?;
    }
    Ok(())
}
