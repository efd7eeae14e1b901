//! What traces cost: processor time of all processes per request, with every request traced, held and exported, to none of it.
//!
//! A second of processor time does not do the same work each time: a core that its host shares gives more or less by the second, and where
//! a process lies in memory decides some per cent of its speed for as long as it lives. Both are more than traces cost. So each pair has
//! two fresh clusters which work at the same time, and workers of the same role share a core. The collector lives in this process, whose
//! time does not count. One figure is of the default model, the other of a model so small that traces are a large part of a request.

use crate::machine;
use crate::statistics::{mean, mean_at_most};
use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_node::testing::Collector;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{CacheOptions, GenerateRequest, PrefillPolicy, Sampling, Segment, TokenIds, segment::Kind};
use baton_tests::processes::Up;
use baton_tests::scrape::Scrape;
use futures::future::try_join;
use futures::stream::{StreamExt as _, TryStreamExt as _, iter};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;

/// What the statistics take.
const PAIRS: usize = 15;
/// Requests at the same time of each cluster: both workers have work at any moment.
const CLIENTS: usize = 8;
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// Compute threads of a worker: threads that wait for each other while other processes hold their cores would be most of the noise.
const THREADS: &str = "--threads=1";
/// What makes a process record no span at all.
const NOTHING: [(&str, &str); 2] =
    [("BATON_TELEMETRY__TRACE_SAMPLE_RATIO", "0"), ("BATON_TELEMETRY__RING_SPANS_MAX", "0")];

/// One model and what is asked of it in a round.
struct Workload {
    model: &'static str,
    requests: usize,
    prompt_tokens: usize,
    answer_tokens: u32,
    token_ids: std::ops::Range<u32>,
}

const DEFAULT: Workload = Workload {
    model: "smollm2-135m-instruct",
    requests: 24,
    prompt_tokens: 96,
    answer_tokens: 24,
    token_ids: 100..40_000,
};
const TINY: Workload = Workload {
    model: "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3",
    requests: 300,
    prompt_tokens: 48,
    answer_tokens: 16,
    token_ids: 0..250,
};

impl Workload {
    fn prompts(&self, count: usize, random: &mut StdRng) -> Vec<Vec<u32>> {
        let mut prompt = || (0..self.prompt_tokens).map(|_| random.random_range(self.token_ids.clone())).collect();
        (0..count).map(|_| prompt()).collect()
    }
}

/// A cluster of its own, and a client.
struct Cluster {
    up: Up,
    client: InferenceClient<Channel>,
}

impl Cluster {
    async fn start(work: &Workload, otlp: Option<&Collector>, variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        let model = format!("--model={}", work.model);
        let otlp = otlp.map(|collector| format!("--otlp={}", collector.url()));
        let flags = ["--grpc-port=0", "--http-port=0", THREADS, &model].into_iter().chain(otlp.as_deref());
        let mut up = Up::spawn(&flags.collect::<Vec<_>>(), variables)?;
        up.wait_serving()?;
        let client = InferenceClient::connect(format!("http://{}", up.grpc()?)).await?;
        for child in machine::descendants(up.pid()) {
            machine::pin(child, if machine::name(child)?.contains("prefill") { 0 } else { 1 })?;
        }
        Ok(Self { up, client })
    }

    /// Seconds of processor time that these prompts took of all processes, and the answers.
    async fn round(&self, prompts: &[Vec<u32>], answer: u32) -> anyhow::Result<(f64, Vec<Vec<u32>>)> {
        let pids = [vec![self.up.pid()], machine::descendants(self.up.pid())].concat();
        let before = machine::cpu_seconds(&pids)?;
        let asks = iter(prompts).map(|prompt| timeout(ANSWER_MAX, self.ask(prompt, answer)));
        let answers = asks.buffered(CLIENTS).map(|answer| answer.context("no answer")?);
        let answers: Vec<_> = answers.try_collect().await?;
        Ok((machine::cpu_seconds(&pids)? - before, answers))
    }

    async fn ask(&self, prompt: &[u32], answer_tokens: u32) -> anyhow::Result<Vec<u32>> {
        let sampling = Sampling {
            max_tokens: Some(answer_tokens),
            ignore_eos: true,
            temperature: Some(0.0),
            ..Sampling::default()
        };
        let request = GenerateRequest {
            prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: prompt.to_vec() })) }],
            sampling: Some(sampling),
            // The most spans that a request can have.
            prefill_policy: PrefillPolicy::Remote.into(),
            // Rounds are compared, and each computes the same prompts.
            cache: Some(CacheOptions { off: true, ..CacheOptions::default() }),
            ..GenerateRequest::default()
        };
        let mut answer = self.client.clone().generate(request).await?.into_inner();
        let mut tokens = Vec::new();
        while let Some(message) = answer.message().await? {
            tokens.extend(&message.token_ids);
        }
        ensure!(tokens.len() == answer_tokens as usize, "{} tokens, {answer_tokens} were asked for", tokens.len());
        Ok(tokens)
    }

    /// Ends it; fails where a span was lost, since its cost was not paid then.
    async fn stop(self) -> anyhow::Result<()> {
        for process in ["router", "prefill-0", "decode-0"] {
            let lost = Scrape::of(&self.up.metrics(process)?).await?.sum("baton_spans_lost_total", &[]);
            ensure!(lost == 0.0, "{process} lost {lost} spans");
        }
        self.up.stop().map(drop)
    }
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        summary.add("traces_cpu", figure(&pairs(&DEFAULT).await?), Some(Target::AtMost(1.03)));
        summary.add("traces_cpu_tiny", figure(&pairs(&TINY).await?), None);
        Ok(())
    })
}

/// Processor time of a pair, seconds a request: traced, and not.
type Pair = (f64, f64);

fn figure(pairs: &[Pair]) -> Figure {
    let added: Vec<f64> = pairs.iter().map(|(traced, bare)| (traced - bare) * 1e6).collect();
    let ratios: Vec<f64> = pairs.iter().map(|(traced, bare)| traced / bare).collect();
    let of = format!("none traced; upper end of the 90% interval of {PAIRS} pairs, mean {:.4}", mean(&ratios));
    Figure::ratio(mean(&added), "us/req", mean_at_most(&ratios), of)
}

async fn pairs(work: &Workload) -> anyhow::Result<Vec<Pair>> {
    eprintln!("traces: {PAIRS} pairs of {} requests of {}, all traced and none", work.requests, work.model);
    let mut random = StdRng::seed_from_u64(6);
    let mut pairs = Vec::new();
    for number in 0..PAIRS {
        pairs.push(pair(work, number % 2 == 0, &mut random).await?);
        let (traced, bare) = pairs[number];
        eprintln!("  {:.4}", traced / bare);
    }
    Ok(pairs)
}

async fn pair(work: &Workload, traced_first: bool, random: &mut StdRng) -> anyhow::Result<Pair> {
    let collector = Collector::start().await?;
    let (with, without) = if traced_first {
        let with = Cluster::start(work, Some(&collector), &[]).await?;
        (with, Cluster::start(work, None, &NOTHING).await?)
    } else {
        let without = Cluster::start(work, None, &NOTHING).await?;
        (Cluster::start(work, Some(&collector), &[]).await?, without)
    };
    // The first requests connect, and touch all memory once.
    let warm = work.prompts(CLIENTS, random);
    try_join(with.round(&warm, work.answer_tokens), without.round(&warm, work.answer_tokens)).await?;
    let prompts = work.prompts(work.requests, random);
    let rounds = try_join(with.round(&prompts, work.answer_tokens), without.round(&prompts, work.answer_tokens));
    let ((traced, one), (bare, other)) = rounds.await?;
    ensure!(one == other, "answers differ with and without traces: no figures");
    with.stop().await?;
    without.stop().await?;
    let roots = collector.spans().iter().filter(|span| span.name == "generate").count();
    ensure!(roots == CLIENTS + work.requests, "{roots} traces for {} requests", CLIENTS + work.requests);
    Ok((traced / work.requests as f64, bare / work.requests as f64))
}
