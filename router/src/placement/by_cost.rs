//! The policy `cost`: the cheapest pair, or the decode worker alone where that is cheaper still.

use super::Reason;
use super::choose::{Choice, Draw, least, partners_of};
use super::cost::{Costs, without_room};
use super::pairs::Pair;
use crate::request::PrefillPolicy;

/// A remote prefill, unless a decode worker has so much of the prompt cached that it should go on by itself.
pub(super) fn choose(costs: &Costs<'_>, decoders: &[usize], pairs: &[Pair], reason: Reason, draw: Draw<'_>) -> Choice {
    let step_s = costs.fastest_step_s(decoders);
    let best: Vec<(usize, f64)> = pairs.iter().map(|pair| (pair.decode, best_of(costs, pair, step_s))).collect();
    let at = |d: usize| best.iter().find(|(decode, _)| *decode == d).map_or(f64::INFINITY, |(_, cost_s)| *cost_s);
    let decode = least(&best.iter().map(|(d, _)| *d).collect::<Vec<_>>(), at, draw);
    let partners = partners_of(pairs, decode);
    let (fastest, later_s) = (costs.fastest(partners), costs.later_s(decode, step_s));
    let prefill = least(partners, |p| costs.remote(p, decode, fastest).cost_s, draw);
    let plan = costs.remote(prefill, decode, fastest);
    let cost_s = later_s + plan.cost_s;

    let beside = partners.iter().filter(|p| **p != prefill).map(|&p| later_s + costs.remote(p, decode, fastest).cost_s);
    let elsewhere = best.iter().filter(|(d, _)| *d != decode).map(|(_, cost_s)| *cost_s);
    let remote_next = least_of(beside.chain(elsewhere));
    let short = |d: usize| costs.rest(d) <= costs.thresholds.local_prefill_tokens_max;
    let mut here = Vec::new();
    if costs.demand.policy == PrefillPolicy::Auto {
        // A batch is disturbed for a short rest, or where nobody else has as much: prompts are what prefill workers are for.
        let most = most_cached(costs, pairs.iter().flat_map(|pair| &pair.prefill));
        let may = |&d: &usize| short(d) || costs.cached(d) > most;
        here.extend(decoders.iter().copied().filter(may));
    }
    let local_cost_s = |d: usize| costs.later_s(d, step_s) + costs.local(d).cost_s;
    let local_next = least_of(here.iter().map(|&d| local_cost_s(d)));
    if local_next.is_some_and(|local_s| local_s < cost_s) {
        let mut chosen = local(costs, &here, Reason::LocalCached, draw);
        if short(chosen.decode) {
            chosen.reason = Reason::LocalShortRest;
        }
        chosen.runner_up_s = least_of([Some(without_room(cost_s)), chosen.runner_up_s].into_iter().flatten());
        return chosen;
    }
    let most = most_cached(costs, partners.iter());
    let reason = match costs.cached(prefill) {
        _ if plan.pull_to_tokens > 0 => Reason::RemotePull,
        _ if most == 0 => reason,
        cached if cached < most => Reason::RemoteReplicated,
        _ => Reason::RemoteCached,
    };
    let runner_up_s = least_of(remote_next.into_iter().chain(local_next)).map(without_room);
    Choice { decode, prefill: Some(prefill), plan, reason, cost_s: without_room(cost_s), runner_up_s }
}

/// Prefill and decode on one of these.
pub(super) fn local(costs: &Costs<'_>, among: &[usize], reason: Reason, draw: Draw<'_>) -> Choice {
    let step_s = costs.fastest_step_s(among);
    let cost_s = |d: usize| costs.later_s(d, step_s) + costs.local(d).cost_s;
    let decode = least(among, cost_s, draw);
    let runner_up_s = least_of(among.iter().filter(|d| **d != decode).map(|&d| cost_s(d))).map(without_room);
    let plan = costs.local(decode);
    Choice { decode, prefill: None, plan, reason, cost_s: without_room(cost_s(decode)), runner_up_s }
}

/// Cost of a decode worker with the best of its partners.
fn best_of(costs: &Costs<'_>, pair: &Pair, step_s: f64) -> f64 {
    let fastest = costs.fastest(&pair.prefill);
    let remote = pair.prefill.iter().map(|&p| costs.remote(p, pair.decode, fastest).cost_s);
    costs.later_s(pair.decode, step_s) + remote.fold(f64::INFINITY, f64::min)
}

fn most_cached<'w>(costs: &Costs<'_>, among: impl Iterator<Item = &'w usize>) -> u64 {
    among.map(|&w| costs.cached(w)).max().unwrap_or(0)
}

fn least_of(costs: impl Iterator<Item = f64>) -> Option<f64> {
    costs.reduce(f64::min)
}
