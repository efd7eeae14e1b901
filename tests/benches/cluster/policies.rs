//! Short prompts at a concurrency that keeps both workers busy, under each policy of prefill, in turns on one split cluster.

use crate::statistics::{median, paired_ratio};
use crate::summary::{Figure, Summary, Target};
use crate::up::{Seen, Up, draw};
use anyhow::ensure;
use baton_proto::v1::PrefillPolicy;
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::sync::atomic::{AtomicUsize, Ordering};

const PROMPTS: usize = 48;
const PROMPT_TOKENS: usize = 200;
const CONCURRENCY: usize = 16;
const OUTPUT_TOKENS: usize = 32;
const ROUNDS: usize = 9;
const POLICIES: [(PrefillPolicy, &str); 3] =
    [(PrefillPolicy::Local, "local"), (PrefillPolicy::Remote, "remote"), (PrefillPolicy::Auto, "auto")];

/// One policy's figures of each round.
#[derive(Default)]
struct Series {
    first_p50_ms: Vec<f64>,
    between_p99_ms: Vec<f64>,
    seconds: Vec<f64>,
    remote: usize,
}

impl Series {
    fn add(&mut self, seen: &[Seen], seconds: f64) {
        self.first_p50_ms.push(percentile(seen.iter().map(|seen| seen.at_ms[0]).collect(), 0.50));
        let between = seen.iter().flat_map(|seen| seen.at_ms.windows(2).map(|pair| pair[1] - pair[0]));
        self.between_p99_ms.push(percentile(between.collect(), 0.99));
        self.seconds.push(seconds);
        self.remote += seen.iter().filter(|seen| seen.was_remote()).count();
    }
}

/// The smallest value that `share` of all do not exceed.
fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() as f64 * share).ceil() as usize).clamp(1, values.len()) - 1]
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(rounds(summary))
}

async fn rounds(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("{PROMPTS} prompts of {PROMPT_TOKENS} tokens at concurrency {CONCURRENCY}: local, remote, auto");
    let up = Up::start(1).await?;
    let mut random = StdRng::seed_from_u64(3);
    let mut series: [Series; 3] = Default::default();
    for round in 0..=ROUNDS {
        let prompts: Vec<Vec<u32>> = (0..PROMPTS).map(|_| draw(&mut random, PROMPT_TOKENS)).collect();
        let mut answers: Vec<Option<Vec<Seen>>> = vec![None, None, None];
        for turn in 0..POLICIES.len() {
            // Each policy goes first, second and last equally often.
            let way = (round + turn) % POLICIES.len();
            let began = std::time::Instant::now();
            let seen = all(&up, &prompts, POLICIES[way].0).await?;
            if round > 0 {
                series[way].add(&seen, began.elapsed().as_secs_f64());
            }
            answers[way] = Some(seen);
        }
        let tokens = |seen: &Option<Vec<Seen>>| -> Vec<Vec<u32>> {
            seen.iter().flatten().map(|seen| seen.tokens.clone()).collect()
        };
        ensure!(answers.iter().all(|way| tokens(way) == tokens(&answers[0])), "answers differ by policy: no figures");
    }
    up.stop().await?;
    let [local, remote, auto] = &series;
    for (name, other) in [("local", local), ("remote", remote)] {
        let of = format!("policy {name}, {:.1} ms", median(other.first_p50_ms.clone()));
        let ratio = paired_ratio(&auto.first_p50_ms, &other.first_p50_ms);
        let figure = Figure::ratio(median(auto.first_p50_ms.clone()), "ms", ratio, of);
        summary.add(&format!("auto_first_token_p50_to_{name}"), figure, Target::AtMost(1.0));
        let of = format!("policy {name}, {:.1} ms", median(other.between_p99_ms.clone()));
        let ratio = paired_ratio(&auto.between_p99_ms, &other.between_p99_ms);
        let figure = Figure::ratio(median(auto.between_p99_ms.clone()), "ms", ratio, of);
        let target = (name == "remote").then_some(Target::AtMost(1.2));
        summary.add(&format!("auto_between_tokens_p99_to_{name}"), figure, target);
        let of = format!("policy {name}, {:.2} s", median(other.seconds.clone()));
        let ratio = paired_ratio(&auto.seconds, &other.seconds);
        summary.add(
            &format!("auto_seconds_to_{name}"),
            Figure::ratio(median(auto.seconds.clone()), "s", ratio, of),
            None,
        );
    }
    let share = auto.remote as f64 / (ROUNDS * PROMPTS) as f64;
    summary.add("auto_short_sent_remote", Figure::ratio(share * 100.0, "%", share, "requests under policy auto"), None);
    Ok(())
}

/// The answers to all prompts, in their order. So many clients take the next one each.
async fn all(up: &Up, prompts: &[Vec<u32>], policy: PrefillPolicy) -> anyhow::Result<Vec<Seen>> {
    let next = AtomicUsize::new(0);
    let client = async || -> anyhow::Result<Vec<(usize, Seen)>> {
        let mut seen = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(prompt) = prompts.get(index) else { return Ok(seen) };
            seen.push((index, up.ask(prompt, OUTPUT_TOKENS, policy).await?));
        }
    };
    let clients = futures::future::try_join_all((0..CONCURRENCY).map(|_| client())).await?;
    let mut seen: Vec<(usize, Seen)> = clients.into_iter().flatten().collect();
    seen.sort_by_key(|(index, _)| *index);
    Ok(seen.into_iter().map(|(_, seen)| seen).collect())
}
