//! What traces cost: processor time of all processes per request, with every request traced, held and exported, to none of it.
//!
//! Two split clusters stand side by side and are filled in turns; the collector lives in this process, whose time does not count. Half of
//! the figures are of the default model; the others of a model so small that a request costs little beside its traces.

use crate::THREADS;
use crate::machine;
use crate::statistics::{mean, mean_at_most};
use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_node::testing::Collector;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{GenerateRequest, PrefillPolicy, Sampling, Segment, TokenIds, segment::Kind};
use baton_tests::processes::Up;
use baton_tests::scrape::Scrape;
use futures::stream::{StreamExt as _, TryStreamExt as _, iter};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;

/// Rounds, of both clusters each; the statistics know this number.
const PAIRS: usize = 15;
/// Requests at the same time: both workers have work at any moment.
const CLIENTS: usize = 8;
const ANSWER_MAX: Duration = Duration::from_secs(120);

/// One model and what is asked of it in a round.
struct Workload {
    /// Added to the names of figures.
    name: &'static str,
    /// As in `--model`; the default one where empty.
    model: &'static str,
    requests: usize,
    prompt_tokens: usize,
    answer_tokens: u32,
    token_ids: std::ops::Range<u32>,
}

const DEFAULT: Workload =
    Workload { name: "", model: "", requests: 32, prompt_tokens: 96, answer_tokens: 24, token_ids: 100..40_000 };
const TINY: Workload = Workload {
    name: "_tiny",
    model: "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3",
    requests: 300,
    prompt_tokens: 48,
    answer_tokens: 16,
    token_ids: 0..250,
};

struct Side {
    up: Up,
    client: InferenceClient<Channel>,
}

impl Side {
    async fn start(model: &str, flags: &[&str], variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        let (threads, model) = (format!("--threads={THREADS}"), format!("--model={model}"));
        let mut all = vec!["--grpc-port=0", "--http-port=0", &threads];
        all.extend((model != "--model=").then_some(model.as_str()));
        all.extend(flags);
        let mut up = Up::spawn(&all, variables)?;
        up.wait_serving()?;
        let client = InferenceClient::connect(format!("http://{}", up.grpc()?)).await?;
        Ok(Self { up, client })
    }

    /// Seconds of processor time that one request took of all processes, and the answers.
    async fn round(&self, prompts: &[Vec<u32>], answer_tokens: u32) -> anyhow::Result<(f64, Vec<Vec<u32>>)> {
        let pids = [vec![self.up.pid()], machine::descendants(self.up.pid())].concat();
        let before = machine::cpu_seconds(&pids)?;
        let asks = iter(prompts).map(|prompt| timeout(ANSWER_MAX, self.ask(prompt, answer_tokens)));
        let answers = asks.buffered(CLIENTS).map(|answer| answer.context("no answer")?);
        let answers: Vec<_> = answers.try_collect().await?;
        Ok(((machine::cpu_seconds(&pids)? - before) / prompts.len() as f64, answers))
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
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        pairs(&DEFAULT, summary).await?;
        pairs(&TINY, summary).await
    })
}

async fn pairs(work: &Workload, summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("traces{}: {PAIRS} pairs of {} requests, all traced and none", work.name, work.requests);
    let collector = Collector::start().await?;
    let otlp = format!("--otlp={}", collector.url());
    let nothing = [("BATON_TELEMETRY__TRACE_SAMPLE_RATIO", "0"), ("BATON_TELEMETRY__RING_SPANS_MAX", "0")];
    let with = Side::start(work.model, &[&otlp], &[]).await?;
    let without = Side::start(work.model, &[], &nothing).await?;
    let mut random = StdRng::seed_from_u64(6);
    let (mut ratios, mut added_us) = (Vec::new(), Vec::new());
    for round in 0..=PAIRS {
        let prompt = |_| (0..work.prompt_tokens).map(|_| random.random_range(work.token_ids.clone())).collect();
        let prompts: Vec<Vec<u32>> = (0..work.requests).map(prompt).collect();
        let sides = if round % 2 == 0 { [&with, &without] } else { [&without, &with] };
        let first = sides[0].round(&prompts, work.answer_tokens).await?;
        let second = sides[1].round(&prompts, work.answer_tokens).await?;
        ensure!(first.1 == second.1, "answers differ with and without traces: no figures");
        let (traced, bare) = if round % 2 == 0 { (first.0, second.0) } else { (second.0, first.0) };
        if round > 0 {
            // The first one connects, and touches all memory once.
            ratios.push(traced / bare);
            added_us.push((traced - bare) * 1e6);
        }
    }
    for process in ["router", "prefill-0", "decode-0"] {
        let lost = Scrape::of(&with.up.metrics(process)?).await?.sum("baton_spans_lost_total", &[]);
        ensure!(lost == 0.0, "{process} lost {lost} spans: not all of the cost was paid");
    }
    with.up.stop()?;
    without.up.stop()?;
    ensure!(collector.spans().len() >= work.requests * PAIRS, "the collector got next to nothing");
    let of = format!("none traced; upper end of the 90% interval of {PAIRS} pairs, mean {:.4}", mean(&ratios));
    let figure = Figure::ratio(mean(&added_us), "us/req", mean_at_most(&ratios), of);
    summary.add(&format!("traces_cpu{}", work.name), figure, work.name.is_empty().then_some(Target::AtMost(1.03)));
    Ok(())
}
