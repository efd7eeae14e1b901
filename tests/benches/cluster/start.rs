//! Starts of a split cluster of the default model: first with an empty cache of packed weights, then with what that start kept. Each worker's
//! peak memory is compared with its weights and its pool.

use crate::machine;
use crate::statistics::median;
use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_tests::processes::Up;
use std::time::{Duration, Instant};

const WARM_ROUNDS: usize = 3;
/// The pool of each worker: small, since its pages count only once they are used.
const POOL_BYTES: f64 = (64 << 20) as f64;
/// Longest wait for the packed weights to be on disk.
const KEPT_MAX: Duration = Duration::from_secs(60);
const CLASSES: [&str; 3] = ["f32fma", "bf16x32", "i8x32"];

/// A start: seconds until it serves, and the largest peak memory of a worker.
fn start(class: &str, folder: &std::path::Path) -> anyhow::Result<(f64, f64)> {
    let folder = folder.display().to_string();
    let variables = [
        ("BATON_ENGINE__PACKED_CACHE__DIR", folder.as_str()),
        ("BATON_ENGINE__NUMERICS", class),
        ("BATON_ENGINE__KV_CACHE_BYTES", "64MiB"),
    ];
    let begin = Instant::now();
    let up = Up::start_with(&[], &variables)?;
    let seconds = begin.elapsed().as_secs_f64();
    let peaks = ["prefill", "decode"].map(|role| machine::status_bytes(up.child(role)?, "VmHWM:"));
    let peaks = peaks.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    up.stop()?;
    Ok((seconds, peaks.into_iter().fold(0.0, f64::max)))
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
        let (cold, cold_peak) = start(class, &folder)?;
        let weights = packed_bytes(&folder).context("after the first start")?;
        let warm = (0..WARM_ROUNDS).map(|_| start(class, &folder)).collect::<anyhow::Result<Vec<_>>>()?;
        let seconds = median(warm.iter().map(|(seconds, _)| *seconds).collect());
        summary.add(&format!("start_cold_{class}"), Figure::plain(cold, "s"), None);
        let figure = Figure::ratio(seconds, "s", seconds / 2.0, "2 s");
        summary.add(&format!("start_warm_{class}"), figure, Target::AtMost(1.0));
        for (name, peak) in [("cold", cold_peak), ("warm", warm.iter().map(|(_, peak)| *peak).fold(0.0, f64::max))] {
            let of = format!("{:.0} MB of packed weights and {:.0} MB of pool", weights / 1e6, POOL_BYTES / 1e6);
            let figure = Figure::ratio(peak / 1e6, "MB", peak / (weights + POOL_BYTES), of);
            summary.add(&format!("start_memory_{name}_{class}"), figure, Target::AtMost(1.3));
        }
    }
    Ok(())
}
