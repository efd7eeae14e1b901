//! What prefix caches are worth: conversations over one system prompt, and eight requests at once over a new one, each with caches and
//! without, in turns, on one cluster of the default model. Answers must be the same, and clients must be told what engines counted.

use crate::THREADS;
use crate::statistics::median;
use crate::summary::{Figure, Summary, Target};
use crate::up::draw;
use anyhow::{Context, ensure};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{CacheOptions, GenerateRequest, Sampling, Segment, TokenIds, Usage, segment::Kind};
use baton_tests::processes::Up;
use baton_tests::scrape;
use futures::future::try_join_all;
use rand::{SeedableRng as _, rngs::StdRng};
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::transport::Channel;

const CONVERSATIONS: usize = 16;
const AT_A_TIME: usize = 4;
const TURNS: usize = 4;
const SYSTEM_TOKENS: usize = 1500;
const TURN_TOKENS: usize = 40;
const ANSWER_TOKENS: u32 = 32;
/// Requests that come together, over a prefix that nobody has.
const TOGETHER: usize = 8;
const PREFIX_TOKENS: usize = 1024;
const OWN_TOKENS: usize = 64;
const ROUNDS: usize = 5;
const ANSWER_MAX: Duration = Duration::from_secs(300);

struct Cluster {
    up: Up,
    client: InferenceClient<Channel>,
}

/// What a client saw of one request.
struct Seen {
    first_ms: f64,
    tokens: Vec<u32>,
    usage: Usage,
}

impl Cluster {
    async fn start() -> anyhow::Result<Self> {
        let up = Up::start(&[&format!("--threads={THREADS}")])?;
        let client = InferenceClient::connect(format!("http://{}", up.grpc()?)).await?;
        Ok(Self { up, client })
    }

    async fn ask(&self, prompt: &[u32], answer_tokens: u32, caches: bool) -> anyhow::Result<Seen> {
        timeout(ANSWER_MAX, self.answer(prompt, answer_tokens, caches)).await.context("no answer")?
    }

    async fn answer(&self, prompt: &[u32], answer_tokens: u32, caches: bool) -> anyhow::Result<Seen> {
        let sampling = Sampling {
            max_tokens: Some(answer_tokens),
            ignore_eos: true,
            temperature: Some(0.0),
            ..Sampling::default()
        };
        let request = GenerateRequest {
            prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: prompt.to_vec() })) }],
            sampling: Some(sampling),
            cache: Some(CacheOptions { off: !caches, ..CacheOptions::default() }),
            ..GenerateRequest::default()
        };
        let sent = Instant::now();
        let mut answer = self.client.clone().generate(request).await?.into_inner();
        let (mut tokens, mut first_ms, mut usage) = (Vec::new(), None, None);
        while let Some(message) = answer.message().await? {
            if !message.token_ids.is_empty() {
                first_ms.get_or_insert_with(|| sent.elapsed().as_secs_f64() * 1e3);
            }
            tokens.extend(&message.token_ids);
            usage = message.usage.or(usage);
        }
        let (first_ms, usage) = (first_ms.context("an empty answer")?, usage.context("no usage")?);
        ensure!(tokens.len() == answer_tokens as usize, "{} tokens, {answer_tokens} were asked for", tokens.len());
        ensure!(caches || usage.cached_tokens == 0, "{usage:?}");
        Ok(Seen { first_ms, tokens, usage })
    }

    /// Tokens that engines took from their caches so far.
    async fn counted(&self) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for process in ["prefill-0", "decode-0"] {
            sum += scrape::sum(&self.up.metrics(process)?, "baton_engine_cached_tokens_total", &[]).await?;
        }
        Ok(sum)
    }

    /// The turns of one conversation, each over all that was said before.
    async fn converse(&self, system: &[u32], said: &[Vec<u32>], caches: bool) -> anyhow::Result<Vec<Seen>> {
        let (mut prompt, mut turns) = (system.to_vec(), Vec::new());
        for said in said {
            prompt.extend(said);
            let seen = self.ask(&prompt, ANSWER_TOKENS, caches).await?;
            prompt.extend(&seen.tokens);
            turns.push(seen);
        }
        Ok(turns)
    }
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let cluster = Cluster::start().await?;
        let mut random = StdRng::seed_from_u64(7);
        conversations(&cluster, &mut random, summary).await?;
        together(&cluster, &mut random, summary).await?;
        cluster.up.stop().map(drop)
    })
}

/// First-token times with caches over those without, and what clients were told over what engines counted.
async fn conversations(cluster: &Cluster, random: &mut StdRng, summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("{CONVERSATIONS} conversations of {TURNS} turns over {SYSTEM_TOKENS} tokens, {AT_A_TIME} at a time");
    let system = draw(random, SYSTEM_TOKENS);
    let mut later_ms = [Vec::new(), Vec::new()];
    let (mut told, before) = (0, cluster.counted().await?);
    for group in 0..CONVERSATIONS / AT_A_TIME {
        let said: Vec<Vec<Vec<u32>>> =
            (0..AT_A_TIME).map(|_| (0..TURNS).map(|_| draw(random, TURN_TOKENS)).collect()).collect();
        let mut answers = [Vec::new(), Vec::new()];
        for way in [group % 2, 1 - group % 2] {
            let talks = said.iter().map(|said| cluster.converse(&system, said, way == 1));
            for turns in try_join_all(talks).await? {
                told += turns.iter().map(|seen| u64::from(seen.usage.cached_tokens)).sum::<u64>();
                later_ms[way].extend(turns.iter().skip(1).map(|seen| seen.first_ms));
                answers[way].extend(turns.into_iter().map(|seen| seen.tokens));
            }
        }
        ensure!(answers[0] == answers[1], "answers differ with caches and without");
    }
    let counted = cluster.counted().await? - before;
    ensure!(told > 0 && counted == told as f64, "clients were told of {told} cached tokens, engines counted {counted}");
    let [without, with] = later_ms.map(median);
    let of = format!("caching off, {without:.1} ms");
    let figure = Figure::ratio(with, "ms", with / without, of);
    summary.add("cache_later_turns_first_token", figure, Target::AtMost(0.25));
    summary.add("cache_reported_tokens", Figure::plain(told as f64, "tokens, as counted"), None);
    Ok(())
}

/// Requests that come together over a prefix that nobody has: the median of their first-token times.
async fn together(cluster: &Cluster, random: &mut StdRng, summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("{TOGETHER} requests at once over {PREFIX_TOKENS} new tokens");
    let (mut all, mut quotients) = ([Vec::new(), Vec::new()], Vec::new());
    for round in 0..ROUNDS {
        let prefix = draw(random, PREFIX_TOKENS);
        let prompts: Vec<Vec<u32>> =
            (0..TOGETHER).map(|_| [prefix.as_slice(), &draw(random, OWN_TOKENS)].concat()).collect();
        let (mut of_round, mut answers) = ([0.0; 2], [Vec::new(), Vec::new()]);
        for way in [round % 2, 1 - round % 2] {
            let seen = try_join_all(prompts.iter().map(|prompt| cluster.ask(prompt, ANSWER_TOKENS, way == 1))).await?;
            of_round[way] = median(seen.iter().map(|seen| seen.first_ms).collect());
            all[way].push(of_round[way]);
            answers[way].extend(seen.into_iter().map(|seen| seen.tokens));
        }
        ensure!(answers[0] == answers[1], "answers differ with sharing and without");
        quotients.push(of_round[1] / of_round[0]);
    }
    let [without, with] = all.map(median);
    let figure = Figure::ratio(with, "ms", median(quotients), format!("without sharing, {without:.1} ms"));
    summary.add("cache_cold_prefix_first_token", figure, Target::AtMost(0.4));
    Ok(())
}
