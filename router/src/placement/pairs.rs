//! Who could take a request at all.

use super::choose::{RETRY_SOON, duration, retry_after};
use super::cost::Costs;
use super::{Demand, Refusal, Worker};
use crate::request::PrefillPolicy;
use baton_types::Role;
use std::time::Duration;

/// A decode worker, and the prefill workers with room in their queue that KV may come from. At least one.
pub(super) struct Pair {
    pub(super) decode: usize,
    pub(super) prefill: Vec<usize>,
}

/// What a request that is to be prefilled remotely finds.
pub(super) enum Pairs {
    /// These. A decode worker that has a partner is preferred to one that has none.
    Some(Vec<Pair>),
    /// Prefill workers fit, and have no room in their queues.
    Full {
        /// Until the first of them had computed it.
        soonest: Duration,
    },
    /// No prefill worker fits.
    Nobody,
}

impl Pairs {
    /// What is said where nothing else will do.
    pub(super) fn refusal(&self) -> Refusal {
        match self {
            Self::Full { soonest } => Refusal::Full { retry_after: retry_after(*soonest) },
            _ => Refusal::NoPrefillWorker,
        }
    }
}

/// The pairs among these decode workers.
pub(super) fn pairs(costs: &Costs<'_>, decoders: &[usize]) -> Pairs {
    let Costs { workers, demand, .. } = *costs;
    let prefillers: Vec<usize> =
        with_role(workers, Role::Prefill).filter(|&p| workers[p].tokens_max() >= demand.prefill_tokens()).collect();
    let fits = |d: usize, p: usize| workers[d].pairs_with(&workers[p]);
    let roomy = |p: &usize| workers[*p].queue_has_room();
    let of = |&decode: &usize| {
        let prefill: Vec<usize> = prefillers.iter().copied().filter(roomy).filter(|&p| fits(decode, p)).collect();
        (!prefill.is_empty()).then_some(Pair { decode, prefill })
    };
    let found: Vec<Pair> = decoders.iter().filter_map(of).collect();
    if !found.is_empty() {
        return Pairs::Some(found);
    }
    if !decoders.iter().any(|&d| prefillers.iter().any(|&p| fits(d, p))) {
        return Pairs::Nobody;
    }
    let soonest = prefillers.iter().map(|&p| costs.alone(p, 0.0).first_token_s).fold(f64::INFINITY, f64::min);
    Pairs::Full { soonest: duration(soonest) }
}

/// Decode workers that take so long a sequence and have room in their queue; refuses what no worker would take if it were idle.
pub(super) fn decoders(workers: &[Worker], demand: &Demand) -> Result<Vec<usize>, Refusal> {
    let longest = |role| with_role(workers, role).map(|w| workers[w].tokens_max()).max();
    let tokens_max = longest(Role::Decode).ok_or(Refusal::NoDecodeWorker)?;
    if tokens_max < demand.total_tokens {
        return Err(Refusal::NeverFits { tokens_max });
    }
    if let Some(tokens_max) = longest(Role::Prefill)
        && demand.policy == PrefillPolicy::Remote
        && tokens_max < demand.prefill_tokens()
    {
        let prompt_tokens_max = (tokens_max + demand.prompt_tokens).saturating_sub(demand.prefill_tokens());
        return Err(Refusal::NeverPrefilled { prompt_tokens: demand.prompt_tokens, prompt_tokens_max });
    }
    let open: Vec<usize> = with_role(workers, Role::Decode)
        .filter(|&d| workers[d].tokens_max() >= demand.total_tokens && workers[d].queue_has_room())
        .collect();
    if open.is_empty() { Err(Refusal::Full { retry_after: RETRY_SOON }) } else { Ok(open) }
}

fn with_role(workers: &[Worker], role: Role) -> impl Iterator<Item = usize> {
    workers.iter().enumerate().filter(move |(_, w)| w.has_role(role)).map(|(i, _)| i)
}
