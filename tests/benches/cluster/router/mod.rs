//! What the router costs: processor time of its process a request and a token, with workers that compute nothing, and its memory.
//!
//! The router is the binary under `--router-binary`, on one core, with its default configuration. Requests are chats over HTTP, answered
//! as event streams; their texts are the project's own prose, all different. Its processor time counts however long others hold the
//! core meanwhile, so a busy machine disturbs it little.

mod client;
mod stand_in;

use crate::machine;
use crate::statistics::median;
use crate::summary::{Figure, Summary, Target};
use anyhow::Context;
use baton_engine::formats::TextSource;
use baton_tests::processes::binary;
use baton_tests::service::Service;
use baton_text::{Specials, Tokenizer, bundle};
use client::{Client, Prompts};
use futures::future::try_join_all;
use stand_in::{Script, StandIn};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The model that stand-ins serve: the name of the default one, with its tokenizer and template.
const MODEL: &str = "smollm2-135m-instruct";
/// The core that the router has for itself and whoever else.
const CORE: &str = "0";
/// Requests at the same time.
const CLIENTS: usize = 8;
/// Rounds of each figure; the median is told.
const ROUNDS: usize = 5;
/// One step of a paced answer: a token of each stream.
const STEP: Duration = Duration::from_millis(10);
/// Open streams whose memory is measured.
const OPEN: usize = 256;
/// Workers of each role, from the fewest to the most.
const WORKERS: [usize; 4] = [1, 8, 32, 128];
/// The promises, as processor time on one core.
const SHORT_US: f64 = 400.0;
const LONG_US: f64 = 5_000.0;
const GROWTH: f64 = 1.3;
const START_MIB: f64 = 200.0;
const MIB: f64 = 1_048_576.0;

/// One kind of request.
#[derive(Clone, Copy)]
struct Work {
    prompt_tokens: usize,
    answer_tokens: usize,
    remote: bool,
    step: Duration,
    /// In a round, and at the same time.
    requests: usize,
    clients: usize,
}

const SHORT: Work = Work {
    prompt_tokens: 100,
    answer_tokens: 64,
    remote: false,
    step: Duration::ZERO,
    requests: 800,
    clients: CLIENTS,
};
const LONG: Work = Work { prompt_tokens: 4_170, answer_tokens: 65, step: STEP, requests: 80, clients: 16, ..SHORT };

/// A router with its workers.
struct Measured {
    router: Service,
    client: Client,
    script: Arc<Script>,
    _workers: Vec<StandIn>,
}

impl Measured {
    async fn start(binary: &Path, each: usize, script: &Arc<Script>) -> anyhow::Result<Self> {
        let binary = binary.to_owned();
        let mut router = Service::launch("baton-router", move || {
            let mut command = Command::new("taskset");
            command.args(["-c", CORE]).arg(&binary).arg("--announce");
            command.args(["--grpc-listen=127.0.0.1:0", "--cluster-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"]);
            command
        })?;
        let (workers_join, (_, http)) = (router.cluster().await?, router.listening().await?);
        let workers = StandIn::start_all(workers_join, each, script).await?;
        router.ready().await?;
        Ok(Self { router, client: Client::new(http)?, script: script.clone(), _workers: workers })
    }

    /// Processor time of one request, in microseconds, beyond the `idle` share of the core that the router takes without any: the median
    /// of the rounds, after one that does not count. Answers that last long would otherwise be charged for the workers' reports.
    async fn price(&self, work: Work, idle: f64, prompts: &mut Prompts<'_>) -> anyhow::Result<f64> {
        self.script.step_us.store(work.step.as_micros() as u64, Ordering::Relaxed);
        let asked = prompts.take(2 * work.clients, work.prompt_tokens)?;
        self.client.ask_all(&asked, work, true).await?;
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let asked = prompts.take(work.requests, work.prompt_tokens)?;
            let (began, before) = (Instant::now(), machine::cpu_seconds(&[self.router.pid()])?);
            self.client.ask_all(&asked, work, false).await?;
            let idle_seconds = idle * began.elapsed().as_secs_f64();
            let seconds = machine::cpu_seconds(&[self.router.pid()])? - before - idle_seconds;
            rounds.push(seconds * 1e6 / work.requests as f64);
        }
        eprintln!("    {rounds:.0?}");
        Ok(median(rounds))
    }

    /// The share of the core that it takes without requests.
    async fn idle(&self) -> anyhow::Result<f64> {
        Ok(machine::cpu_percent(&[self.router.pid()], Duration::from_secs(10)).await? / 100.0)
    }

    /// Most memory that was resident so far, in bytes.
    fn peak_bytes(&self) -> anyhow::Result<f64> {
        machine::status_bytes(self.router.pid(), "VmHWM:")
    }

    /// Memory that one open stream takes, in bytes: of many that have their first tokens and wait for the next.
    async fn open_stream_bytes(&self, prompts: &mut Prompts<'_>) -> anyhow::Result<f64> {
        let resident = || machine::status_bytes(self.router.pid(), "VmRSS:");
        // What was taken for one-time needs is taken before.
        self.script.step_us.store(0, Ordering::Relaxed);
        let work = Work { clients: OPEN, ..SHORT };
        self.client.ask_all(&prompts.take(2 * OPEN, work.prompt_tokens)?, work, false).await?;
        let before = resident()?;
        self.script.step_us.store(STEP.as_micros() as u64 * 100, Ordering::Relaxed);
        let asked = prompts.take(OPEN, work.prompt_tokens)?;
        let open = try_join_all(asked.iter().map(|prompt| self.client.open(prompt, work))).await?;
        Ok((resident()? - before) / open.len() as f64)
    }

    async fn stop(mut self) -> anyhow::Result<()> {
        self.router.terminate().await
    }
}

pub(crate) fn measure(summary: &mut Summary, router: Option<&Path>) -> anyhow::Result<()> {
    let router: PathBuf = router.map_or_else(|| binary("baton-router"), |path| Ok(path.to_owned()))?;
    eprintln!("router: {}", router.display());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let source = baton_worker::models::open(&baton_worker::settings::ModelSettings::default(), &|_, _| ())?;
        let TextSource::Gguf(gguf) = source.text() else { anyhow::bail!("the default model is a GGUF file") };
        let text = bundle::from_gguf(&gguf)?;
        let tokenizer = Tokenizer::from_bundle(&text)?;
        let prose = client::prose()?;
        let answer = tokenizer.encode(prose.get(..8_000).context("too little prose")?, Specials::AsText)?;
        let script = Arc::new(Script::new(bundle::encode(&text), source.spec().vocab as u32, answer));
        let mut prompts = Prompts::new(&tokenizer, prose);
        prices(summary, &router, &script, &mut prompts).await?;
        growth(summary, &router, &script, &mut prompts).await?;
        let many = Measured::start(&router, 32, &script).await?;
        let start = many.peak_bytes()? / MIB;
        let of = format!("{START_MIB} MiB, with 64 workers of one model");
        summary.add("router_start_64", Figure::ratio(start, "MiB", start / START_MIB, of), Target::AtMost(1.0));
        many.stop().await
    })
}

async fn prices(
    summary: &mut Summary,
    router: &Path,
    script: &Arc<Script>,
    prompts: &mut Prompts<'_>,
) -> anyhow::Result<()> {
    let one = Measured::start(router, 1, script).await?;
    let idle = one.idle().await?;
    let mut us = |name: &str, value: f64, target: f64, of: &str| {
        let of = format!("{target} us; {of}");
        summary.add(name, Figure::ratio(value, "us", value / target, of), Target::AtMost(1.0));
        value
    };
    let short = us("router_short", one.price(SHORT, idle, prompts).await?, SHORT_US, "100 tokens in, 64 out at once");
    let long =
        us("router_long", one.price(LONG, idle, prompts).await?, LONG_US, "4,170 tokens in, 65 out in steps of 10 ms");
    let more = Work { answer_tokens: 8 * SHORT.answer_tokens, requests: SHORT.requests / 4, ..SHORT };
    let tokens = (more.answer_tokens - SHORT.answer_tokens) as f64;
    let at_once = (one.price(more, idle, prompts).await? - short) / tokens;
    summary.add("router_token_at_once", Figure::plain(at_once, "us"), None);
    let less = Work { answer_tokens: 1, ..LONG };
    let prompt = one.price(less, idle, prompts).await?;
    summary.add("router_long_prompt", Figure::plain(prompt, "us"), None);
    let paced = (long - prompt) / (LONG.answer_tokens - less.answer_tokens) as f64;
    summary.add("router_token_paced", Figure::plain(paced, "us"), None);
    let open = one.open_stream_bytes(prompts).await? / 1024.0;
    summary.add("router_open_stream", Figure::plain(open, "KiB"), None);
    one.stop().await
}

/// What more workers make of the price of a request that is prefilled remotely. Long ones are, by themselves.
async fn growth(
    summary: &mut Summary,
    router: &Path,
    script: &Arc<Script>,
    prompts: &mut Prompts<'_>,
) -> anyhow::Result<()> {
    let kinds = [("router_remote", Work { remote: true, ..SHORT }), ("router_long", LONG)];
    let mut fewest = Vec::new();
    for each in WORKERS {
        let measured = Measured::start(router, each, script).await?;
        let idle = measured.idle().await?;
        summary.add(&format!("router_idle_{each}+{each}"), Figure::plain(idle * 100.0, "% of a core"), None);
        for (kind, (name, work)) in kinds.into_iter().enumerate() {
            let price = measured.price(work, idle, prompts).await?;
            if each == WORKERS[0] {
                fewest.push(price);
            }
            let target = (each == WORKERS[WORKERS.len() - 1]).then_some(Target::AtMost(GROWTH));
            let of = format!("{0} + {0}", WORKERS[0]);
            summary.add(&format!("{name}_{each}+{each}"), Figure::ratio(price, "us", price / fewest[kind], of), target);
        }
        measured.stop().await?;
    }
    Ok(())
}
