//! Measures the promises in one run: `make bench`, or `cargo bench --package baton-tests --bench cluster [-- PART …]` with the parts
//! `handoff`, `puts`, `compute`, `telemetry`, `index` and `cache`; these where none is named. `overload` takes five to nine minutes more and is only measured when named.
//!
//! Absolute figures belong to the machine of the run, ratios are to something that was measured in the same run, in turns with it.
//! A wrong answer ends the run without a figure.

mod cache;
mod compute;
mod gemm;
mod handoff;
mod index;
mod machine;
mod overload;
mod puts;
mod statistics;
mod summary;
mod telemetry;

use summary::Summary;

/// Compute threads of every process and engine: what the targets are stated for.
const THREADS: usize = 2;

fn main() -> anyhow::Result<()> {
    // Cargo adds `--bench`.
    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    const PARTS: [&str; 7] = ["handoff", "puts", "compute", "telemetry", "index", "cache", "overload"];
    if let Some(unknown) = parts.iter().find(|p| !PARTS.contains(&p.as_str())) {
        anyhow::bail!("no part {unknown:?}: {}", PARTS.join(", "));
    }
    let mut summary = Summary::default();
    // First, while memory holds nothing else.
    if wanted("index") {
        index::measure(&mut summary)?;
    }
    if wanted("compute") {
        compute::measure(&mut summary)?;
    }
    if wanted("puts") {
        puts::measure(&mut summary)?;
    }
    if wanted("handoff") {
        handoff::measure(&mut summary)?;
    }
    if wanted("cache") {
        cache::measure(&mut summary)?;
    }
    if wanted("telemetry") {
        telemetry::measure(&mut summary)?;
    }
    if parts.iter().any(|p| p == "overload") {
        overload::measure(&mut summary)?;
    }
    summary.finish()
}
