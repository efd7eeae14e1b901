//! A prompt of 1,024 tokens, prefilled on one process and decoded on another, against one process that does both; concurrency 1.

use crate::machine;
use crate::statistics::{median, paired_ratio};
use crate::summary::{Figure, Summary, Target};
use crate::up::{Seen, Up, draw};
use anyhow::{Context, ensure};
use baton_proto::v1::PrefillPolicy;
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::time::Duration;

const PROMPT_TOKENS: usize = 1024;
/// Enough to see wrong KV in the answer, beyond the two tokens that are timed.
const OUTPUT_TOKENS: usize = 8;
const ROUNDS: usize = 12;
/// How long an idle cluster is watched.
const IDLE: Duration = Duration::from_secs(5);

/// The rounds of one way to serve.
#[derive(Default)]
struct Series {
    first_ms: Vec<f64>,
    second_ms: Vec<f64>,
    remote: usize,
}

impl Series {
    fn add(&mut self, seen: &Seen) {
        self.first_ms.push(seen.at_ms[0]);
        self.second_ms.push(seen.at_ms[1]);
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
    let (whole, split) = (Up::start(0).await?, Up::start(1).await?);
    let idle = machine::cpu_percent(&split.pids(), IDLE).await?;
    let (mut local, mut remote, mut auto) = (Series::default(), Series::default(), Series::default());
    let (mut exposed_ms, mut exposed_share, mut bytes) = (Vec::new(), Vec::new(), 0);
    let mut random = StdRng::seed_from_u64(1);
    for round in 0..=ROUNDS {
        let prompt = draw(&mut random, PROMPT_TOKENS);
        let mut seen = [None, None, None];
        for turn in 0..3 {
            // Each way goes first, second and last equally often.
            let way = (round + turn) % 3;
            seen[way] = Some(match way {
                0 => whole.ask(&prompt, OUTPUT_TOKENS, PrefillPolicy::Local).await?,
                1 => split.ask(&prompt, OUTPUT_TOKENS, PrefillPolicy::Remote).await?,
                _ => split.ask(&prompt, OUTPUT_TOKENS, PrefillPolicy::Auto).await?,
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
