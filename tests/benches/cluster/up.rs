//! A `baton up`, and what a client sees of its answers.

use crate::{THREADS, machine};
use anyhow::{Context, ensure};
use baton_proto::v1::{self, PrefillPolicy, inference_client::InferenceClient, segment::Kind};
use baton_tests::processes::binary;
use rand::Rng;
use rand::rngs::StdRng;
use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;
use tonic::transport::Channel;

/// The model's vocabulary from behind its control tokens to before its end.
const TOKENS: std::ops::Range<u32> = 100..49_000;
const START_MAX: Duration = Duration::from_secs(120);
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// A prompt of so many random tokens.
pub(crate) fn draw(random: &mut StdRng, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|_| random.random_range(TOKENS)).collect()
}

/// What a client saw of one request.
pub(crate) struct Seen {
    /// When each token came, from the call on.
    pub(crate) at_ms: Vec<f64>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) timings: v1::Timings,
}

impl Seen {
    pub(crate) fn was_remote(&self) -> bool {
        self.timings.transfer_bytes.is_some_and(|bytes| bytes > 0)
    }
}

/// A running cluster; it ends with this value, and everything it started with it.
pub(crate) struct Up {
    up: Child,
    /// Held, since a `baton up` that cannot print ends.
    _printed: Lines<BufReader<ChildStdout>>,
    client: InferenceClient<Channel>,
}

impl Up {
    /// With so many prefill workers; without one, a single worker does both.
    pub(crate) async fn start(prefill: usize) -> anyhow::Result<Self> {
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

    /// Asks for so many tokens behind a prompt, which is computed whole.
    pub(crate) async fn ask(&self, prompt: &[u32], tokens: usize, policy: PrefillPolicy) -> anyhow::Result<Seen> {
        self.ask_as(prompt, tokens, v1::GenerateRequest { prefill_policy: policy.into(), ..Default::default() }).await
    }

    /// The same, with what else the request says.
    pub(crate) async fn ask_as(
        &self,
        prompt: &[u32],
        tokens: usize,
        request: v1::GenerateRequest,
    ) -> anyhow::Result<Seen> {
        let answer = answer(self.client.clone(), prompt.to_vec(), tokens, request);
        timeout(ANSWER_MAX, answer).await.context("no answer")?
    }

    /// Stops in order, as Ctrl-C does. A cluster that is dropped instead is killed.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let pid = self.up.id().context("baton up ended")?;
        Command::new("kill").arg(pid.to_string()).status().await?;
        timeout(START_MAX, self.up.wait()).await.context("baton up does not stop")??;
        Ok(())
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.up.id().map(|up| [vec![up], machine::descendants(up)].concat()).unwrap_or_default()
    }
}

async fn answer(
    mut client: InferenceClient<Channel>,
    prompt: Vec<u32>,
    output: usize,
    request: v1::GenerateRequest,
) -> anyhow::Result<Seen> {
    let greedy = v1::Sampling { temperature: Some(0.0), ignore_eos: true, ..Default::default() };
    let sampling = request.sampling.clone().unwrap_or(greedy);
    let prompt_tokens = prompt.len();
    let request = v1::GenerateRequest {
        prompt: vec![v1::Segment { kind: Some(Kind::Tokens(v1::TokenIds { ids: prompt })) }],
        sampling: Some(v1::Sampling { max_tokens: Some(output as u32), ..sampling }),
        // Each round computes and moves the same prompts again.
        cache: Some(v1::CacheOptions { off: true, ..Default::default() }),
        ..request
    };
    let sent = Instant::now();
    let mut stream = client.generate(request).await?.into_inner();
    let (mut tokens, mut at_ms, mut last) = (Vec::new(), Vec::new(), None);
    while let Some(message) = stream.message().await? {
        let ms = sent.elapsed().as_secs_f64() * 1e3;
        at_ms.extend(message.token_ids.iter().map(|_| ms));
        tokens.extend(&message.token_ids);
        last = Some(message);
    }
    let last = last.context("an empty answer")?;
    let usage = last.usage.context("no usage")?;
    ensure!(tokens.len() == output, "{} tokens, {output} were asked for", tokens.len());
    ensure!(usage.prompt_tokens as usize == prompt_tokens && usage.cached_tokens == 0, "{usage:?}");
    Ok(Seen { at_ms, tokens, timings: last.timings.context("no timings")? })
}
