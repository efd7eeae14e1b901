//! `baton bench --simulate`: a trace under virtual time. Placement, pools, caches and the index are those that run in earnest; what
//! workers compute and send is time by a file of rates.
//!
//! ```text
//!  trace ──> Router: placement, index, loads ──> Prefill: queue, pool ──> Decode: pool, batch ──> outcomes
//!               ^──────── load reports, cache events, half a round trip later ────┴──────┘
//! ```

mod args;
mod batch;
mod clock;
mod cluster;
mod compare;
mod decode;
mod names;
mod prefill;
mod rates;
mod reports;
mod request;
mod router;
#[cfg(test)]
mod tests;
mod worker;

pub(crate) use args::SimulateArgs;
use baton_router::pure::PlacementPolicy;
use cluster::Cluster;
pub(crate) use compare::run;
use names::Names;
use rates::Rates;
use request::Request;
use std::time::Duration;

use super::report::Outcome;
use super::trace::Trace;

/// One simulation.
#[derive(Clone, Copy, Debug)]
struct Settings {
    policy: PlacementPolicy,
    /// Prefill workers.
    prefill: usize,
    /// Decode workers.
    decode: usize,
    /// Blocks of each prefill worker's pool.
    prefill_blocks: u32,
    /// Blocks of each decode worker's pool.
    decode_blocks: u32,
    /// Time after which a block that nobody uses leaves a cache, where there is such a time.
    ttl: Option<Duration>,
    /// Whether prefill workers may read from decode workers.
    gets: bool,
    seed: u64,
}

/// What came of one.
struct Simulated {
    outcomes: Vec<Outcome>,
    /// Tokens that prefill workers read from decode workers.
    got_tokens: u64,
}

/// Runs a trace to the end of its last answer.
fn simulate(settings: &Settings, rates: &Rates, trace: &Trace, names: &Names) -> anyhow::Result<Simulated> {
    let requests = Cluster::new(settings, rates, trace, names)?.run();
    let got_tokens = requests.iter().map(|request| request.got_tokens).sum();
    let infinite = trace.infinite_cache().tokens_hit_by_request;
    let told = requests.into_iter().zip(&trace.requests).zip(infinite);
    let outcome = |((request, of), infinite): ((Request, _), u32)| request.outcome(of, infinite);
    Ok(Simulated { outcomes: told.map(outcome).collect(), got_tokens })
}
