//! `baton bench --simulate`: a trace under virtual time. A cluster of the product code serves it, over simulated networks and devices
//! with the speeds of a file of rates; see [`baton_simulation::fleet`].

mod args;
mod compare;
mod rates;
#[cfg(test)]
mod tests;

pub(crate) use args::SimulateArgs;
pub(crate) use compare::run;

use super::load::{Prompts, TokenRange};
use super::report::{Ending, Outcome};
use super::trace::{Trace, TraceRequest};
use baton_simulation::fleet::{self, Ask, Fleet, Served};
use std::sync::Arc;

/// A trace with its generated prompts.
struct Traffic {
    trace: Arc<Trace>,
    prompts: Arc<Prompts>,
}

/// The results of one simulation.
struct Simulated {
    outcomes: Vec<Outcome>,
    /// Tokens that prefill workers got from decode workers.
    got_tokens: u64,
    /// The work of the simulation, in polls and calls.
    events: u64,
}

impl Traffic {
    fn new(trace: Trace, seed: u64) -> Self {
        let prompts = Prompts::new(&trace, TokenRange::of(fleet::TOKENS), seed);
        Self { trace: Arc::new(trace), prompts: Arc::new(prompts) }
    }

    /// Runs the trace to the end of its last answer.
    fn simulate(&self, fleet: &Fleet) -> anyhow::Result<Simulated> {
        let asks = self.trace.requests.iter().map(|of| Ask { at: of.at, answer_tokens: of.output_tokens });
        let (trace, prompts) = (self.trace.clone(), self.prompts.clone());
        let served = fleet.serve(asks.collect(), move |request| prompts.prompt(&trace, request));
        let served = served.map_err(|breach| anyhow::anyhow!("a defect: {:?}: {}", breach.invariant, breach.what))?;
        let infinite = self.trace.infinite_cache().tokens_hit_by_request;
        let told = served.served.into_iter().zip(&self.trace.requests).zip(infinite);
        let outcomes = told.map(|((served, of), infinite)| outcome(served, of, infinite)).collect();
        Ok(Simulated { outcomes, got_tokens: served.got_tokens, events: served.events })
    }
}

/// A request as its client saw it.
fn outcome(served: Served, of: &TraceRequest, infinite_tokens: u32) -> Outcome {
    Outcome {
        at: of.at,
        ttft: served.first_token.map(|at| at.saturating_sub(of.at)),
        output_tokens: served.gaps_us.len() as u32 + u32::from(served.first_token.is_some()),
        gaps_us: served.gaps_us,
        end: served.end,
        prompt_tokens: of.prompt_tokens,
        cached_tokens: served.cached_tokens,
        infinite_tokens,
        placement: served.placement.map(str::to_owned),
        result: served.failed.map_or(Ending::Ok, |kind| Ending::Failed(kind.name().to_owned())),
    }
}
