//! Clients that would end a router: bodies that never end, JSON that grows in memory, half messages over gRPC, calls that stay open with
//! long headers, and answers of many samples with all their log-probabilities. On the shipped binaries, with the memory that the chart gives
//! a router. It stays below that, answers others meanwhile, and lets go of what stalls.

use anyhow::{Context, ensure};
use baton_tests::eventually::eventually;
use baton_tests::http::Api;
use baton_tests::processes::Up;
use baton_tests::scrape::{Scrape, find};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tonic::codegen::http;

const RANDOM: &str = "--model=random:vocab=300,context=1024";
/// SHA-256 of `sk-alice`, `sk-ops` and `sk-bob`, as `printf %s sk-alice | sha256sum` prints them.
const KEYS: &str = "\
099295a3784e1bd368dc348843a7398c1931b6b8ec2504c73e91ed2040bdc46c alice
c391959605db2757d87bf45d5f4c9bda42b68e95dcd157bf4f2473516c2bc9bb mallory
36c76b48bb2ee1d9d37140550e9d7ed7d395cf56f41050dc2a72e5291c0011f0 bob
";
const ALICE: &str = "sk-alice";
const MALLORY: &str = "sk-ops";
const BOB: &str = "sk-bob";
/// How long a message may take to come.
const STALL_MS: &str = "5000";
/// Longest wait for an answer on a busy machine.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// How long a connection on which no more streams may be open is given.
const ROOM_MAX: Duration = Duration::from_secs(5);
/// Requests of another client that are served during an attack.
const SERVED_MIN: usize = 11;
/// Attacks with bodies, one after the other.
const ROUNDS_MAX: usize = 6;
const MIB: usize = 1 << 20;
const BODY_MAX: usize = 16 * MIB;

/// The memory limit of a router's container, in bytes.
fn memory_limit() -> anyhow::Result<usize> {
    let values = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/baton/values.yaml");
    let values = std::fs::read_to_string(values)?;
    let router = values.split("\nrouter:\n").nth(1).context("no routers in the chart")?;
    let limit = router.split("limits: {memory: ").nth(1).and_then(|rest| rest.split('}').next());
    let gib = limit.and_then(|limit| limit.strip_suffix("Gi")).context("no limit in Gi")?;
    Ok(gib.parse::<usize>()? << 30)
}

/// The most memory that a process ever had, in bytes.
fn peak(pid: u32) -> anyhow::Result<usize> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no peak")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? << 10)
}

fn head(path: &str, length: usize) -> String {
    format!(
        "POST /v1/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {MALLORY}\r\nx-request-timeout: 3600\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Sends all but the end of the largest body, and waits for what the router does about it: the status, or `None` where it only closes.
async fn upload(to: String) -> anyhow::Result<Option<u16>> {
    let mut stream = TcpStream::connect(to).await?;
    stream.write_all(head("completions", BODY_MAX).as_bytes()).await?;
    let piece = vec![b' '; MIB];
    for _ in 0..15 {
        if stream.write_all(&piece).await.is_err() {
            break;
        }
    }
    answer(stream).await
}

async fn answer(mut stream: TcpStream) -> anyhow::Result<Option<u16>> {
    let mut said = [0; 12];
    match timeout(ANSWER_MAX, stream.read_exact(&mut said)).await.context("held for ever")? {
        Ok(_) => Ok(Some(std::str::from_utf8(&said[9..])?.parse()?)),
        Err(_) => Ok(None),
    }
}

/// Bodies that are small as they come and large as what a careless reader makes of them.
fn bombs() -> Vec<(&'static str, String)> {
    let fill = |start: &str, item: &str, end: &str| {
        let count = (BODY_MAX - start.len() - end.len() - 8) / (item.len() + 1);
        format!("{start}{}{item}{end}", format!("{item},").repeat(count - 1))
    };
    let chat = r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"#;
    // A byte that a message would repeat as eight.
    let repeated =
        |start: &str, end: &str| format!("{start}{}{end}", "\u{7f}".repeat(BODY_MAX - start.len() - end.len()));
    vec![
        ("completions", repeated(r#"{"prompt":[1,2,3],"max_tokens":""#, r#""}"#)),
        ("completions", repeated(r#"{"max_tokens":1,"prompt":[1,""#, r#""]}"#)),
        ("chat/completions", repeated(r#"{"max_tokens":1,"messages":[""#, r#""]}"#)),
        ("completions", fill(r#"{"prompt":[1,2,3],"max_tokens":1,"metadata":["#, "{}", "]}")),
        ("completions", fill(r#"{"prompt":[1,2,3],"max_tokens":1,"logit_bias":["#, "[]", "]}")),
        ("completions", fill(r#"{"max_tokens":1,"prompt":["#, "1", "]}")),
        ("completions", fill(r#"{"prompt":[1],"stop":["#, r#""""#, "]}")),
        ("completions", fill(r#"{"prompt":[1],"stop_token_ids":["#, "1", "]}")),
        ("chat/completions", fill(&format!(r#"{chat}"chat_template_kwargs":{{"a":["#), "0", "]}}")),
        ("chat/completions", fill(r#"{"max_tokens":1,"messages":["#, "{}", "]}")),
        ("chat/completions", fill(r#"{"messages":[{"role":"user","content":["#, "[]", "]}]}")),
    ]
}

async fn bomb(to: String, path: &str, body: &str) -> anyhow::Result<Option<u16>> {
    let mut stream = TcpStream::connect(to).await?;
    stream.write_all(head(path, body.len()).as_bytes()).await?;
    // It may be refused while it is sent.
    let _ = stream.write_all(body.as_bytes()).await;
    answer(stream).await
}

/// Holds 7.5 of 8 MiB on each of many streams of one connection; how many of them the router ends.
async fn hold(to: String, streams: usize) -> anyhow::Result<usize> {
    let (client, connection) = h2::client::handshake(TcpStream::connect(&to).await?).await?;
    tokio::spawn(connection);
    let mut held = JoinSet::new();
    for _ in 0..streams {
        let request = http::Request::post(format!("http://{to}/baton.v1.Inference/Generate"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", format!("Bearer {MALLORY}"));
        let (answer, mut body) = client.clone().ready().await?.send_request(request.body(())?, false)?;
        held.spawn(async move {
            let length = u32::try_from(8 * MIB - 16)?.to_be_bytes();
            body.send_data([&[0][..], &length].concat().into(), false)?;
            let mut left = 7 * MIB + MIB / 2;
            let send = async {
                while left > 0 {
                    body.reserve_capacity(left.min(64 << 10));
                    let Some(Ok(room)) = std::future::poll_fn(|cx| body.poll_capacity(cx)).await else { return };
                    let piece = room.min(left);
                    if body.send_data(vec![0; piece].into(), false).is_err() {
                        return;
                    }
                    left -= piece;
                }
                std::future::pending().await
            };
            // Either the answer tells, or the stream breaks.
            let answered = async {
                tokio::select! {
                    () = send => {}
                    _ = answer => {}
                }
            };
            timeout(ANSWER_MAX, answered).await.context("a half message is held for ever")?;
            anyhow::Ok(())
        });
    }
    let mut ended = 0;
    while let Some(result) = held.join_next().await {
        result??;
        ended += 1;
    }
    Ok(ended)
}

/// A cluster whose router asks for keys, another client of it, and since when.
struct Target {
    up: Up,
    router: u32,
    grpc: String,
    /// Of OpenAI's API.
    base: String,
    /// Host and port of HTTP.
    http: String,
    began: Instant,
    over: Arc<AtomicBool>,
    /// Requests of the other client so far.
    served: Arc<AtomicUsize>,
    others: JoinHandle<anyhow::Result<Duration>>,
    _keys: TempDir,
}

impl Target {
    /// With these variables; the other client waits so long for an answer.
    fn start(variables: &[(&str, &str)], patience: Duration) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("keys");
        std::fs::write(&file, KEYS)?;
        let file = file.to_string_lossy();
        let variables = [&[("BATON_AUTH__KEYS_FILE", &*file)], variables].concat();
        let up = Up::start_with(&[RANDOM, "--prefill=0"], &variables)?;
        let (router, grpc, base) = (up.child("--http-listen")?, up.grpc()?, up.openai()?);
        let http = base.trim_start_matches("http://").trim_end_matches("/v1").to_owned();
        let (over, served) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let others = tokio::spawn(others(base.clone(), over.clone(), served.clone(), patience));
        Ok(Self { up, router, grpc, base, http, began: Instant::now(), over, served, others, _keys: folder })
    }

    fn served(&self) -> usize {
        self.served.load(Ordering::Relaxed)
    }

    /// Once the attack is over: at least so many requests of the other client were served, and the router never had more memory than the
    /// chart gives it. `what` came of the attack.
    async fn outlived(self, what: &str, served_min: usize) -> anyhow::Result<Up> {
        let served = self.served();
        self.over.store(true, Ordering::Relaxed);
        let longest = self.others.await??;
        let (peak, limit) = (peak(self.router)?, memory_limit()?);
        println!(
            "{what}; {served} others served, the slowest in {longest:?}, within {:?}; peak {} MiB",
            self.began.elapsed(),
            peak >> 20
        );
        ensure!(served >= served_min, "{served} others were served");
        ensure!(peak < limit, "{} of {} MiB", peak >> 20, limit >> 20);
        Ok(self.up)
    }
}

/// Short requests of another client, one after the other; how long the slowest took. Counts those that were served.
async fn others(
    base: String,
    over: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
    patience: Duration,
) -> anyhow::Result<Duration> {
    let (api, header, mut longest) = (Api::new(base), format!("Bearer {ALICE}"), Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        let began = Instant::now();
        let body = json!({"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": true});
        let headers = [("authorization", header.as_str())];
        let asked = api.post_with("completions", body, &headers);
        let answer = timeout(patience, asked).await.context("another client has no answer")??;
        ensure!(answer.status == 200, "another client: {answer:?}");
        longest = longest.max(began.elapsed());
        served.fetch_add(1, Ordering::Relaxed);
        sleep(Duration::from_millis(20)).await;
    }
    Ok(longest)
}

/// Answers with all their log-probabilities: two clients ask for more of them at once than their shares hold. The worker is as
/// busy as can be meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_router_gathers_answers_in_the_memory_that_it_has() -> anyhow::Result<()> {
    let target = Target::start(&[], 6 * ANSWER_MAX)?;
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "n": 48, "max_tokens": 900, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20});
    let mut attacks = JoinSet::new();
    for key in [MALLORY, BOB] {
        for _ in 0..2 {
            let (api, header, body) = (Api::new(target.base.clone()), format!("Bearer {key}"), chat.clone());
            attacks.spawn(async move {
                let headers = [("authorization", header.as_str()), ("x-request-timeout", "3600")];
                let mut answer = api.open("chat/completions", body, &headers).await?;
                let (status, mut bytes, mut begin) = (answer.status().as_u16(), 0, Vec::new());
                while let Some(chunk) = answer.chunk().await? {
                    bytes += chunk.len();
                    begin.extend(chunk.iter().take(400 - begin.len().min(400)));
                }
                let begin = String::from_utf8_lossy(&begin);
                ensure!(status == 200 || (status == 429 && begin.contains("ask for a stream")), "{status}: {begin}");
                anyhow::Ok((status, bytes))
            });
        }
    }
    let mut answers = Vec::new();
    while let Some(result) = attacks.join_next().await {
        answers.push(result??);
    }
    ensure!(answers.iter().any(|(status, _)| *status == 429), "{answers:?}");
    let up = target.outlived(&format!("{answers:?}"), 6).await?;
    let (metrics, until) = (up.metrics("router")?, Instant::now() + ANSWER_MAX);
    while find(&metrics, "baton_router_answers_bytes", &[]).await? > 0.0 {
        ensure!(Instant::now() < until, "answers that were read are held");
        sleep(Duration::from_millis(20)).await;
    }
    up.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_outlives_its_worst_clients_in_the_memory_that_it_has() -> anyhow::Result<()> {
    let variables = [("BATON_HTTP__BODY_MS_MAX", STALL_MS), ("BATON_GRPC__MESSAGE_MS_MAX", STALL_MS)];
    let target = Target::start(&variables, ANSWER_MAX)?;
    let (bombs, mut statuses) = (Arc::new(bombs()), Vec::new());
    // Again where a busy machine has served few others meanwhile.
    for round in 0..ROUNDS_MAX {
        if round > 0 && target.served() >= SERVED_MIN {
            break;
        }
        let mut attacks = JoinSet::new();
        for _ in 0..60 {
            attacks.spawn(upload(target.http.clone()));
        }
        for n in 0..3 * bombs.len() {
            let (http, bombs) = (target.http.clone(), bombs.clone());
            attacks.spawn(async move {
                let (path, body) = &bombs[n % bombs.len()];
                bomb(http, path, body).await
            });
        }
        let held = tokio::spawn(hold(target.grpc.clone(), 60));
        while let Some(result) = attacks.join_next().await {
            statuses.push(result??);
        }
        ensure!(held.await?? == 60);
    }
    statuses.sort_unstable();
    ensure!(statuses.iter().all(|s| s.is_none_or(|s| [400, 408, 429].contains(&s))), "{statuses:?}");
    ensure!(statuses.contains(&Some(429)) && statuses.contains(&Some(408)), "{statuses:?}");
    target.outlived("bodies and half messages", SERVED_MIN).await?.stop()
}

/// Connections of whoever opens calls, and calls of each.
const CONNECTIONS: usize = 60;
const CALLS: usize = 1_000;
/// Heads over HTTP/1 that never end.
const HALF_HEADS: usize = 2_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Called {
    /// With few long headers.
    Generate,
    /// The same, which is answered for ever, and needs no key.
    Health,
    /// Over HTTP/2, with many short headers.
    Completions,
}

impl Called {
    fn head(self, to: &str) -> anyhow::Result<http::Request<()>> {
        let path = match self {
            Self::Generate => "baton.v1.Inference/Generate",
            Self::Health => "grpc.health.v1.Health/Watch",
            Self::Completions => "v1/completions",
        };
        let mut head = http::Request::post(format!("http://{to}/{path}"));
        if self == Self::Completions {
            head = head.header("content-type", "application/json").header("authorization", format!("Bearer {MALLORY}"));
            return Ok((0..190).fold(head, |head, n| head.header(format!("x{n}"), "")).body(())?);
        }
        let long = "x".repeat(3500);
        let head = head.header("content-type", "application/grpc").header("te", "trailers");
        Ok(head.header("x-long", &long).header("x-longer", long).body(())?)
    }
}

/// Opens calls that say nothing more, of these in turn: how many. Counts those that are refused.
async fn open_calls(
    to: String,
    called: &'static [Called],
    over: watch::Receiver<bool>,
    refused: Arc<AtomicUsize>,
) -> anyhow::Result<usize> {
    let (client, connection) = h2::client::handshake(TcpStream::connect(&to).await?).await?;
    tokio::spawn(connection);
    let (mut open, mut opened) = (JoinSet::new(), 0);
    for called in called.iter().cycle().copied().take(CALLS) {
        if *over.borrow() {
            break;
        }
        // No more streams may be open at once.
        let Ok(Ok(mut client)) = timeout(ROOM_MAX, client.clone().ready()).await else { break };
        let Ok((answer, mut body)) = client.send_request(called.head(&to)?, false) else { break };
        opened += 1;
        let (mut over, refused) = (over.clone(), refused.clone());
        open.spawn(async move {
            if called == Called::Health {
                // An empty request: the health of everything.
                let _ = body.send_data(vec![0; 5].into(), false);
            }
            let answered = async {
                let Ok(answer) = answer.await else { return };
                let status = answer.headers().get("grpc-status").is_some_and(|status| status == "8");
                if !status && answer.status() != 429 {
                    // MessageHold open, and nothing of it read.
                    std::future::pending::<()>().await;
                }
                refused.fetch_add(1, Ordering::Relaxed);
            };
            tokio::select! {
                () = answered => {}
                _ = over.wait_for(|over| *over) => {}
            }
        });
    }
    while let Some(ended) = open.join_next().await {
        ended?;
    }
    Ok(opened)
}

/// Sends heads that do not end, one byte short of what a router takes.
async fn half_heads(to: String, mut over: watch::Receiver<bool>) -> anyhow::Result<()> {
    let mut held = Vec::new();
    for _ in 0..HALF_HEADS {
        let mut stream = TcpStream::connect(&to).await?;
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-long: {}", "x".repeat(15 << 10));
        // It may be let go already.
        let _ = stream.write_all(head.as_bytes()).await;
        held.push(stream);
    }
    over.wait_for(|over| *over).await?;
    Ok(())
}

/// Hardly anybody here has a key.
#[tokio::test(flavor = "multi_thread")]
async fn a_router_bears_calls_that_only_stay_open() -> anyhow::Result<()> {
    let target = Target::start(&[], ANSWER_MAX)?;
    let (end, over) = watch::channel(false);
    let (heads, refused) = (tokio::spawn(half_heads(target.http.clone(), over.clone())), Arc::<AtomicUsize>::default());
    let calls = (0..CONNECTIONS).map(|n| {
        let (to, called): (_, &'static [Called]) = match n % 2 {
            0 => (&target.grpc, &[Called::Generate, Called::Health]),
            _ => (&target.http, &[Called::Completions]),
        };
        tokio::spawn(open_calls(to.clone(), called, over.clone(), refused.clone()))
    });
    let calls: Vec<_> = calls.collect();
    let (metrics, until) = (target.up.metrics("router")?, Instant::now() + 3 * ANSWER_MAX);
    // Until the key has its share of 192 MiB, and the address its one of 48. Who reads the metrics is another tenant, or would be refused.
    let shares = (240 * MIB) as f64;
    while Scrape::with_key(&metrics, BOB).await?.find("baton_router_intake_bytes", &[])? < 0.8 * shares {
        ensure!(Instant::now() < until, "open calls are not counted");
        sleep(Duration::from_millis(50)).await;
    }
    eventually(async || {
        ensure!(refused.load(Ordering::Relaxed) > 0, "no call was refused");
        ensure!(target.served() >= SERVED_MIN, "{} others were served", target.served());
        Ok(())
    })
    .await?;
    end.send(true)?;
    let mut opened = 0;
    for call in calls {
        opened += call.await??;
    }
    heads.await??;
    let refused = refused.load(Ordering::Relaxed);
    let up = target.outlived(&format!("{refused} of {opened} calls refused"), SERVED_MIN).await?;
    // The scrape itself is one.
    let until = Instant::now() + 3 * ANSWER_MAX;
    while !find(&metrics, "baton_router_intake_bytes", &[]).await.is_ok_and(|bytes| bytes < f64::from(64 << 10)) {
        ensure!(Instant::now() < until, "calls that ended are counted");
        sleep(Duration::from_millis(20)).await;
    }
    up.stop()
}
