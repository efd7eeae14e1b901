//! A prompt of 1,024 tokens, prefilled on one process and decoded on another, against one process that does both; concurrency 1.

use crate::THREADS;
use crate::machine;
use crate::statistics::{median, paired_ratio};
use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_proto::v1::{self, PrefillPolicy, inference_client::InferenceClient, segment::Kind};
use baton_tests::processes::binary;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;
use tonic::transport::Channel;

const PROMPT_TOKENS: usize = 1024;
/// Enough to see wrong KV in the answer, beyond the two tokens that are timed.
const OUTPUT_TOKENS: usize = 8;
const ROUNDS: usize = 12;
/// The model's vocabulary from behind its control tokens to before its end.
const TOKENS: std::ops::Range<u32> = 100..49_000;
const START_MAX: Duration = Duration::from_secs(120);
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// How long an idle cluster is watched.
const IDLE: Duration = Duration::from_secs(5);

/// What a client saw of one request.
struct Seen {
    first_ms: f64,
    second_ms: f64,
    tokens: Vec<u32>,
    timings: v1::Timings,
}

impl Seen {
    fn was_remote(&self) -> bool {
        self.timings.transfer_bytes.is_some_and(|bytes| bytes > 0)
    }
}

/// A `baton up`; it ends with this value, and everything it started with it.
struct Cluster {
    up: Child,
    /// Held, since a `baton up` that cannot print ends.
    _printed: Lines<BufReader<ChildStdout>>,
    client: InferenceClient<Channel>,
}

impl Cluster {
    async fn start(prefill: usize) -> anyhow::Result<Self> {
        // Both ports are free at once, so they differ.
        let free = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
        let [grpc, http] = [free[0].local_addr()?.port(), free[1].local_addr()?.port()];
        drop(free);
        let mut command = Command::new(binary("baton")?);
        command.args(["up", "--grpc-port", &grpc.to_string(), "--http-port", &http.to_string()]);
        command.args(["--prefill", &prefill.to_string(), "--threads", &THREADS.to_string()]);
        let mut up = command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let mut lines = BufReader::new(up.stdout.take().context("stdout is piped")?).lines();
        let ready = async {
            while let Some(line) = lines.next_line().await? {
                if line.starts_with("Baton serves") {
                    return Ok(());
                }
            }
            anyhow::bail!("baton up ended before it served")
        };
        timeout(START_MAX, ready).await.context("baton up does not serve")??;
        let client = InferenceClient::connect(format!("http://127.0.0.1:{grpc}")).await?;
        Ok(Self { up, _printed: lines, client })
    }

    async fn ask(&mut self, prompt: &[u32], policy: PrefillPolicy) -> anyhow::Result<Seen> {
        timeout(ANSWER_MAX, self.answer(prompt, policy)).await.context("no answer")?
    }

    async fn answer(&mut self, prompt: &[u32], policy: PrefillPolicy) -> anyhow::Result<Seen> {
        let sampling = v1::Sampling {
            temperature: Some(0.0),
            max_tokens: Some(OUTPUT_TOKENS as u32),
            ignore_eos: true,
            ..Default::default()
        };
        let request = v1::GenerateRequest {
            prompt: vec![v1::Segment { kind: Some(Kind::Tokens(v1::TokenIds { ids: prompt.to_vec() })) }],
            sampling: Some(sampling),
            prefill_policy: policy.into(),
            // Each round computes and moves the same prompts again.
            cache: Some(v1::CacheOptions { off: true, ..Default::default() }),
            ..Default::default()
        };
        let sent = Instant::now();
        let mut stream = self.client.generate(request).await?.into_inner();
        let (mut tokens, mut at, mut last) = (Vec::new(), Vec::new(), None);
        while let Some(message) = stream.message().await? {
            let ms = sent.elapsed().as_secs_f64() * 1e3;
            at.extend(message.token_ids.iter().map(|_| ms));
            tokens.extend(&message.token_ids);
            last = Some(message);
        }
        let last = last.context("an empty answer")?;
        let usage = last.usage.context("no usage")?;
        ensure!(tokens.len() == OUTPUT_TOKENS, "{} tokens, {OUTPUT_TOKENS} were asked for", tokens.len());
        ensure!(usage.prompt_tokens as usize == PROMPT_TOKENS && usage.cached_tokens == 0, "{usage:?}");
        let timings = last.timings.context("no timings")?;
        Ok(Seen { first_ms: at[0], second_ms: at[1], tokens, timings })
    }

    /// Stops in order, as Ctrl-C does. A cluster that is dropped instead is killed.
    async fn stop(mut self) -> anyhow::Result<()> {
        let pid = self.up.id().context("baton up ended")?;
        Command::new("kill").arg(pid.to_string()).status().await?;
        timeout(START_MAX, self.up.wait()).await.context("baton up does not stop")??;
        Ok(())
    }

    fn pids(&self) -> Vec<u32> {
        self.up.id().map(|up| [vec![up], machine::descendants(up)].concat()).unwrap_or_default()
    }
}

/// The rounds of one way to serve.
#[derive(Default)]
struct Series {
    first_ms: Vec<f64>,
    second_ms: Vec<f64>,
    remote: usize,
}

impl Series {
    fn add(&mut self, seen: &Seen) {
        self.first_ms.push(seen.first_ms);
        self.second_ms.push(seen.second_ms);
        self.remote += usize::from(seen.was_remote());
    }

    fn report(&self, name: &str, local: &Self, most: f64, summary: &mut Summary) {
        let tokens = [("first", &self.first_ms, &local.first_ms), ("second", &self.second_ms, &local.second_ms)];
        for (token, ours, theirs) in tokens {
            let of = format!("one process doing both, {:.1} ms", median(theirs.clone()));
            let figure = Figure::ratio(median(ours.clone()), "ms", paired_ratio(ours, theirs), of);
            summary.add(&format!("{name}_{token}_token"), figure, Target::AtMost(most));
        }
    }
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(rounds(summary))
}

async fn rounds(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("prefill of {PROMPT_TOKENS} tokens: one process, remote, auto");
    let (mut whole, mut split) = (Cluster::start(0).await?, Cluster::start(1).await?);
    let idle = machine::cpu_percent(&split.pids(), IDLE).await?;
    let (mut local, mut remote, mut auto) = (Series::default(), Series::default(), Series::default());
    let (mut exposed_ms, mut exposed_share, mut bytes) = (Vec::new(), Vec::new(), 0);
    let mut random = StdRng::seed_from_u64(1);
    for round in 0..=ROUNDS {
        let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|_| random.random_range(TOKENS)).collect();
        let mut seen = [None, None, None];
        for turn in 0..3 {
            // Each way goes first, second and last equally often.
            let way = (round + turn) % 3;
            seen[way] = Some(match way {
                0 => whole.ask(&prompt, PrefillPolicy::Local).await?,
                1 => split.ask(&prompt, PrefillPolicy::Remote).await?,
                _ => split.ask(&prompt, PrefillPolicy::Auto).await?,
            });
        }
        let [Some(here), Some(there), Some(either)] = seen else { unreachable!("each way had its turn") };
        ensure!(!here.was_remote() && there.was_remote(), "prompts were not prefilled where they should be");
        ensure!(
            here.tokens == there.tokens && here.tokens == either.tokens,
            "remote and local answers differ: no figures"
        );
        if round == 0 {
            continue; // Connects, and touches all memory once.
        }
        let (exposed, prefill) = (there.timings.exposed_us, there.timings.prefill_us);
        let (exposed, prefill) = exposed.zip(prefill).context("no timings of the prefill and its transfer")?;
        exposed_ms.push(exposed as f64 / 1e3);
        exposed_share.push(exposed as f64 / prefill as f64);
        bytes = there.timings.transfer_bytes.context("no transfer")?;
        local.add(&here);
        remote.add(&there);
        auto.add(&either);
    }
    whole.stop().await?;
    split.stop().await?;
    remote.report("remote", &local, 1.10, summary);
    let of = "time of prefill compute; from its end to the commit's acknowledgement";
    let figure = Figure::ratio(median(exposed_ms), "ms", median(exposed_share), of);
    summary.add("remote_exposed_transfer", figure, Target::AtMost(0.05));
    summary.add("remote_kv", Figure::plain(bytes as f64 / f64::from(1 << 20), "MiB"), None);
    auto.report("auto", &local, 1.05, summary);
    let share = auto.remote as f64 / ROUNDS as f64;
    summary.add("auto_sent_remote", Figure::ratio(share * 100.0, "%", share, "requests under policy auto"), None);
    let of = "one core; four processes that wait for requests";
    summary.add("idle_cluster_cpu", Figure::ratio(idle, "%", idle / 100.0, of), Target::AtMost(0.05));
    Ok(())
}
