//! Eight clients at once, whose prompts begin with the same 1,024 tokens: `baton up` as users run it, and other engines in their own process on
//! as many threads, in turns. In the first half of a round nobody has the prefix (cold), in the second everybody has (warm).
//!
//! An answer that is not the one that the request gets alone, without caches, ends the run without a figure.

use crate::THREADS;
use crate::peers::{self, Clients, Peer, Times};
use crate::statistics::{median, paired_ratio_at_least};
use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_node::environment;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{CacheOptions, GenerateRequest, Sampling, Segment, TokenIds, segment::Kind};
use baton_tests::processes::Up;
use futures::future::try_join_all;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::transport::Channel;

const CLIENTS: usize = 8;
const SHARED_TOKENS: usize = 1024;
const OWN_TOKENS: usize = 64;
const ANSWER_TOKENS: usize = 64;
const ROUNDS: usize = 5;
/// What Baton should be better by than the best other engine.
const BETTER: f64 = 1.2;
const ANSWER_MAX: Duration = Duration::from_secs(300);

/// One half of a round, after which prompts are made: the same for all engines.
fn work(round: usize, warm: bool) -> Clients {
    let salt = 100 * round;
    Clients {
        count: CLIENTS,
        shared: SHARED_TOKENS,
        prefix: 1 + salt,
        own: OWN_TOKENS,
        salt: salt + if warm { 50 } else { 10 },
        length: ANSWER_TOKENS,
    }
}

struct Cluster {
    up: Up,
    client: InferenceClient<Channel>,
}

/// An answer, and the time to its first token.
struct Seen {
    first: f64,
    tokens: Vec<u32>,
}

impl Cluster {
    async fn start() -> anyhow::Result<Self> {
        let up = Up::start(&[&format!("--threads={THREADS}")])?;
        let client = InferenceClient::connect(format!("http://{}", up.grpc()?)).await?;
        Ok(Self { up, client })
    }

    async fn ask(&self, prompt: Vec<u32>, caches: bool) -> anyhow::Result<Seen> {
        timeout(ANSWER_MAX, self.answer(prompt, caches)).await.context("no answer")?
    }

    async fn answer(&self, prompt: Vec<u32>, caches: bool) -> anyhow::Result<Seen> {
        let sampling = Sampling {
            max_tokens: Some(ANSWER_TOKENS as u32),
            ignore_eos: true,
            temperature: Some(0.0),
            ..Sampling::default()
        };
        let request = GenerateRequest {
            prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: prompt })) }],
            sampling: Some(sampling),
            cache: Some(CacheOptions { off: !caches, ..CacheOptions::default() }),
            ..GenerateRequest::default()
        };
        let sent = Instant::now();
        let mut answer = self.client.clone().generate(request).await?.into_inner();
        let (mut tokens, mut first) = (Vec::new(), None);
        while let Some(message) = answer.message().await? {
            if !message.token_ids.is_empty() {
                first.get_or_insert_with(|| sent.elapsed().as_secs_f64());
            }
            tokens.extend(&message.token_ids);
        }
        ensure!(tokens.len() == ANSWER_TOKENS, "{} tokens, {ANSWER_TOKENS} were asked for", tokens.len());
        Ok(Seen { first: first.context("an empty answer")?, tokens })
    }

    /// All clients of one half of a round. The requests of one client of each half, and of all in the first round, are asked again alone.
    async fn clients(&self, work: &Clients, round: usize) -> anyhow::Result<Times> {
        let prompts: Vec<Vec<u32>> = (0..CLIENTS).map(|client| work.prompt(client)).collect();
        let begin = Instant::now();
        let seen = try_join_all(prompts.iter().map(|prompt| self.ask(prompt.clone(), true))).await?;
        let wall = begin.elapsed().as_secs_f64();
        for (client, (prompt, seen)) in prompts.into_iter().zip(&seen).enumerate() {
            if round == 0 || client == round % CLIENTS {
                let alone = self.ask(prompt, false).await?;
                ensure!(alone.tokens == seen.tokens, "client {client} of {work:?} got another answer than alone");
            }
        }
        Ok(Times { first: seen.into_iter().map(|seen| seen.first).collect(), wall })
    }
}

/// What is measured of one half of a round.
#[derive(Clone, Copy)]
enum What {
    FirstMedian,
    FirstMax,
    Wall,
    Rate,
}

impl What {
    const ALL: [(Self, &str, &str); 4] = [
        (Self::FirstMedian, "first_token", "ms"),
        (Self::FirstMax, "first_token_max", "ms"),
        (Self::Wall, "wall", "s"),
        (Self::Rate, "rate", "tokens/s"),
    ];

    fn of(self, times: &Times) -> f64 {
        match self {
            Self::FirstMedian => median(times.first.clone()) * 1e3,
            Self::FirstMax => times.first.iter().copied().fold(0.0, f64::max) * 1e3,
            Self::Wall => times.wall,
            Self::Rate => (CLIENTS * ANSWER_TOKENS) as f64 / times.wall,
        }
    }

    /// What shows in one run that the first series is at least so many times better than the second.
    fn better(self, ours: &[f64], theirs: &[f64]) -> f64 {
        match self {
            Self::Rate => paired_ratio_at_least(ours, theirs),
            _ => paired_ratio_at_least(theirs, ours),
        }
    }
}

/// The times of all rounds, cold and warm.
#[derive(Default)]
struct Series([Vec<Times>; 2]);

impl Series {
    fn values(&self, warm: bool, what: What) -> Vec<f64> {
        self.0[usize::from(warm)].iter().map(|times| what.of(times)).collect()
    }
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("{CLIENTS} clients at once, {SHARED_TOKENS} shared and {OWN_TOKENS} own tokens, {ANSWER_TOKENS} out");
    let cache = environment::cache_home().context("there is no home folder")?;
    let model = cache.join("baton/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    let mut peers = peers::some(&model, &[("llama.cpp", "q4_1"), ("openvino", "f16")])?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let cluster = runtime.block_on(Cluster::start())?;
    let (mut ours, mut theirs) = (Series::default(), Vec::new());
    theirs.resize_with(peers.len(), Series::default);
    // The first round touches memory and is not counted.
    for round in 0..=ROUNDS {
        for warm in [false, true] {
            let work = work(round, warm);
            let half = usize::from(warm);
            let times = runtime.block_on(cluster.clients(&work, round))?;
            let of_peers = peers.iter_mut().map(|peer| peer.clients(&work)).collect::<anyhow::Result<Vec<_>>>()?;
            if round > 0 {
                ours.0[half].push(times);
                theirs.iter_mut().zip(of_peers).for_each(|(series, times)| series.0[half].push(times));
            }
        }
    }
    cluster.up.stop()?;
    for (warm, half) in [(false, "cold"), (true, "warm")] {
        for (what, name, unit) in What::ALL {
            let name = format!("{name}_{half}");
            let of_peers: Vec<Vec<f64>> = theirs.iter().map(|series| series.values(warm, what)).collect();
            figures(what, &name, unit, &ours.values(warm, what), &peers, &of_peers, summary);
        }
    }
    Ok(())
}

/// Medians; of Baton also how much better it is than the peer that is best at this.
fn figures(
    what: What,
    name: &str,
    unit: &str,
    ours: &[f64],
    peers: &[Peer],
    theirs: &[Vec<f64>],
    summary: &mut Summary,
) {
    let mut figure = Figure::plain(median(ours.to_vec()), unit);
    // The best is the one that Baton is the least better than.
    let closest = theirs.iter().zip(peers).map(|(theirs, peer)| (what.better(ours, theirs), peer));
    if let Some((ratio, peer)) = closest.min_by(|a, b| a.0.total_cmp(&b.0)) {
        figure.ratio = Some(ratio);
        figure.of = Some(format!("better than {}; lower end of the 90% interval of {ROUNDS} pairs", peer.name));
    }
    summary.add(&format!("clients_{name}"), figure, Target::AtLeast(BETTER));
    for (peer, theirs) in peers.iter().zip(theirs) {
        let figure = Figure { of: Some(peer.name.clone()), ..Figure::plain(median(theirs.clone()), unit) };
        summary.add(&format!("{}_clients_{name}", peer.key), figure, None);
    }
}
