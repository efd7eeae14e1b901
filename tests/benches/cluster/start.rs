//! Starts of a split cluster of the default model: first with an empty cache of packed weights, then with what that start kept. Each worker's
//! peak memory is compared with its weights and its pool, which prompts fill.

use crate::machine;
use crate::statistics::median;
use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_tests::http::Api;
use baton_tests::processes::Up;
use baton_tests::scrape::Scrape;
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::time::timeout;

const WARM_ROUNDS: usize = 3;
/// The pool of each worker: a quarter of the default, which takes less time to fill. What a worker needs besides is a larger share of it.
const POOL_BYTES: usize = 256 << 20;
/// Of the default model's keys and values in bf16.
const TOKEN_BYTES: usize = 23_040;
/// Of a prompt that fills a part of the pool.
const PROMPT_TOKENS: usize = 2048;
/// The share of a filled pool that may be free: blocks that the last answer has left.
const FREE_MAX: f64 = 0.01;
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// Longest wait for the packed weights to be on disk.
const KEPT_MAX: Duration = Duration::from_secs(60);
const WORKERS: [&str; 2] = ["prefill-0", "decode-0"];
const CLASSES: [&str; 3] = ["f32fma", "bf16x32", "i8x32"];

/// Fills the pools of both workers with prompts whose tokens are all cached.
async fn fill(up: &Up) -> anyhow::Result<()> {
    let api = Api::new(up.openai()?);
    for prompt in 0..POOL_BYTES.div_ceil(TOKEN_BYTES * PROMPT_TOKENS) {
        let ids: Vec<usize> = (0..PROMPT_TOKENS).map(|i| 100 + (prompt * 7919 + i * 31) % 40_000).collect();
        let asked = api.post("completions", json!({"prompt": ids, "max_tokens": 2, "temperature": 0}));
        let answer = timeout(ANSWER_MAX, asked).await.context("no answer")??;
        ensure!(answer.status == 200, "{}", answer.body);
    }
    for worker in WORKERS {
        let scrape = Scrape::of(&up.metrics(worker)?).await?;
        let (free, all) = (scrape.find("baton_kv_blocks", &["free"])?, scrape.sum("baton_kv_blocks", &[]));
        ensure!(free <= all * FREE_MAX, "{worker}: {free} of {all} blocks are free: its pool is not filled");
    }
    Ok(())
}

/// A start: seconds until it serves, and the peak memory of both workers, whose pools are filled or not.
fn start(class: &str, folder: &std::path::Path, filled: bool) -> anyhow::Result<(f64, Vec<f64>)> {
    let (folder, pool) = (folder.display().to_string(), POOL_BYTES.to_string());
    let variables = [
        ("BATON_ENGINE__PACKED_CACHE__DIR", folder.as_str()),
        ("BATON_ENGINE__NUMERICS", class),
        ("BATON_ENGINE__KV_CACHE_BYTES", pool.as_str()),
    ];
    let begin = Instant::now();
    let up = Up::start_with(&["--prefill-policy=remote"], &variables)?;
    let seconds = begin.elapsed().as_secs_f64();
    if filled {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(fill(&up))?;
    }
    let peak = |worker: &str| machine::status_bytes(up.child(&format!("--instance={worker}"))?, "VmHWM:");
    let peaks = WORKERS.into_iter().map(peak).collect::<anyhow::Result<Vec<_>>>()?;
    up.stop()?;
    Ok((seconds, peaks))
}

/// Size of the packed weights, once a start has kept them.
fn packed_bytes(folder: &std::path::Path) -> anyhow::Result<f64> {
    let begin = Instant::now();
    loop {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == "packed") {
                return Ok(path.metadata()?.len() as f64);
            }
        }
        ensure!(begin.elapsed() < KEPT_MAX, "no packed weights are kept");
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("starts of a prefill and a decode worker of the default model");
    for class in CLASSES {
        let root = tempfile::tempdir()?;
        let folder = root.path().join("packed");
        let (cold, cold_peaks) = start(class, &folder, true)?;
        let weights = packed_bytes(&folder).context("after the first start")?;
        let warm = (0..WARM_ROUNDS).map(|_| start(class, &folder, false)).collect::<anyhow::Result<Vec<_>>>()?;
        let seconds = median(warm.into_iter().map(|(seconds, _)| seconds).collect());
        let (_, warm_peaks) = start(class, &folder, true)?;
        summary.add(&format!("start_cold_{class}"), Figure::plain(cold, "s"), None);
        let figure = Figure::ratio(seconds, "s", seconds / 2.0, "2 s");
        summary.add(&format!("start_warm_{class}"), figure, Target::AtMost(1.0));
        for (name, peaks) in [("cold", cold_peaks), ("warm", warm_peaks)] {
            let whole = weights + POOL_BYTES as f64;
            let peak = peaks.into_iter().fold(0.0, f64::max);
            let of = format!(
                "{:.0} MB of packed weights and {:.0} MB of pool, filled",
                weights / 1e6,
                (whole - weights) / 1e6
            );
            let figure = Figure::ratio(peak / 1e6, "MB", peak / whole, of);
            summary.add(&format!("start_memory_{name}_{class}"), figure, Target::AtMost(1.3));
        }
    }
    Ok(())
}
