//! Measures the promises in one run: `make bench`, or `cargo bench --package baton-tests --bench cluster [-- PART …]` with the parts
//! `handoff`, `policies`, `grammars`, `puts`, `compute`, `adapters`, `gemm`, `classes`, `start`, `telemetry`, `index`, `cache` and `router`; these where none is named. `overload` takes five to nine minutes
//! more, `clients` three to six and `speculation` ten; they are only measured when named. `--router-binary PATH` is the router that `router` measures, by default that of the release profile.
//! `--work NAME` names the only work that `classes` measures, such as `pp512` or `b8_context128`.
//!
//! Absolute figures belong to the machine of the run, ratios are to something that was measured in the same run, in turns with it.
//! A wrong answer ends the run without a figure.

mod adapters;
mod cache;
mod classes;
mod clients;
mod compute;
mod gemm;
mod grammars;
mod handoff;
mod index;
mod machine;
mod overload;
mod peers;
mod policies;
mod puts;
mod router;
mod sampling;
mod speculation;
mod start;
mod statistics;
mod summary;
mod telemetry;
mod up;

use anyhow::Context;
use std::path::PathBuf;
use summary::Summary;

/// Compute threads of every process and engine: what the targets are stated for.
const THREADS: usize = 2;

fn main() -> anyhow::Result<()> {
    let (mut parts, mut works, mut router) = (Vec::new(), Vec::new(), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--router-binary" => {
                router = Some(PathBuf::from(arguments.next().context("--router-binary takes a path")?))
            }
            "--work" => works.push(arguments.next().context("--work takes a name, such as pp512")?),
            "--bench" => {} // Cargo adds it.
            _ => parts.push(argument),
        }
    }
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    const PARTS: [&str; 16] = [
        "handoff",
        "policies",
        "grammars",
        "puts",
        "compute",
        "adapters",
        "gemm",
        "classes",
        "start",
        "telemetry",
        "index",
        "cache",
        "router",
        "overload",
        "clients",
        "speculation",
    ];
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
    if wanted("adapters") {
        adapters::measure(&mut summary)?;
    }
    if wanted("gemm") {
        gemm::measure_shapes(&mut summary)?;
    }
    if wanted("classes") {
        classes::measure(&mut summary, &works)?;
    }
    if wanted("start") {
        start::measure(&mut summary)?;
    }
    if wanted("puts") {
        puts::measure(&mut summary)?;
    }
    if wanted("handoff") {
        handoff::measure(&mut summary)?;
    }
    if wanted("policies") {
        policies::measure(&mut summary)?;
    }
    if wanted("grammars") {
        grammars::measure(&mut summary)?;
    }
    if wanted("cache") {
        cache::measure(&mut summary)?;
    }
    if wanted("telemetry") {
        telemetry::measure(&mut summary)?;
    }
    if wanted("router") {
        router::measure(&mut summary, router.as_deref())?;
    }
    if parts.iter().any(|p| p == "overload") {
        overload::measure(&mut summary)?;
    }
    if parts.iter().any(|p| p == "clients") {
        clients::measure(&mut summary)?;
    }
    if parts.iter().any(|p| p == "speculation") {
        speculation::measure(&mut summary)?;
    }
    summary.finish()
}
