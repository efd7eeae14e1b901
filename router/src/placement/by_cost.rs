//! The policy `cost`: the cheapest pair, or the decode worker alone where that is cheaper still.

use super::Reason;
use super::choose::{Choice, Draw, least};
use super::cost::{Costs, without_room};
use super::pairs::{Pair, Pairs};
use crate::request::PrefillPolicy;
use std::collections::HashMap;

/// A remote prefill, unless a decode worker has so large a part of the prompt cached that it should compute the rest
/// itself.
pub(super) fn choose(costs: &Costs<'_>, decoders: &[usize], pairs: &Pairs, reason: Reason, draw: Draw<'_>) -> Choice {
    let step_s = costs.fastest_step_s(decoders);
    let fastest_of: Vec<f64> = pairs.partners.iter().map(|partners| costs.fastest(partners)).collect();
    // Decode workers with the same partners and the same cached share of the prompt give the same result.
    let mut best_of: HashMap<(usize, u64), f64> = HashMap::new();
    let best = |&Pair { decode, partners }: &Pair| {
        let there = costs.cached(decode);
        let remote_s = *best_of.entry((partners, there)).or_insert_with(|| {
            let remote = pairs.partners[partners].iter().map(|&p| costs.remote(p, there, fastest_of[partners]).cost_s);
            remote.fold(f64::INFINITY, f64::min)
        });
        (decode, costs.later_s(decode, step_s) + remote_s)
    };
    let best: Vec<(usize, f64)> = pairs.pairs.iter().map(best).collect();
    let decode = least(&best, draw);
    let partners = pairs.partners_of(decode);
    let there = costs.cached(decode);
    let fastest = costs.fastest(partners);
    let later_s = costs.later_s(decode, step_s);
    let remote: Vec<(usize, f64)> = partners.iter().map(|&p| (p, costs.remote(p, there, fastest).cost_s)).collect();
    let prefill = least(&remote, draw);
    let plan = costs.remote(prefill, there, fastest);
    let cost_s = later_s + plan.cost_s;

    let beside = remote.iter().filter(|(p, _)| *p != prefill).map(|(_, remote_s)| later_s + remote_s);
    let elsewhere = best.iter().filter(|(d, _)| *d != decode).map(|(_, cost_s)| *cost_s);
    let remote_next = least_of(beside.chain(elsewhere));
    let short = |d: usize| costs.rest(d) <= costs.thresholds.local_prefill_tokens_max;
    let mut here = Vec::new();
    if costs.demand.policy == PrefillPolicy::Auto {
        // A local prefill delays the decode batch. It is worth it only for a short rest, or if no prefill worker has as
        // much cached.
        let most = most_cached(costs, pairs.partners.iter().flatten());
        let may = |&d: &usize| short(d) || costs.cached(d) > most;
        here.extend(decoders.iter().copied().filter(may));
    }
    let fastest = costs.fastest_of_all();
    let local_cost_s = |d: usize| costs.later_s(d, step_s) + costs.local(d, fastest).cost_s;
    let local_next = least_of(here.iter().map(|&d| local_cost_s(d)));
    if local_next.is_some_and(|local_s| local_s < cost_s) {
        let mut chosen = local(costs, &here, Reason::LocalCached, draw);
        if short(chosen.decode) {
            let is_prompt = costs.is_short_prompt();
            chosen.reason = if is_prompt { Reason::LocalShortPrompt } else { Reason::LocalShortRest };
        }
        chosen.runner_up_s = least_of([Some(without_room(cost_s)), chosen.runner_up_s].into_iter().flatten());
        return chosen;
    }
    let most = most_cached(costs, partners.iter());
    let reason = match costs.cached(prefill) {
        _ if plan.get_to_tokens > 0 => Reason::RemoteGet,
        _ if most == 0 => reason,
        cached if cached < most => Reason::RemoteReplicated,
        _ => Reason::RemoteCached,
    };
    let runner_up_s = least_of(remote_next.into_iter().chain(local_next)).map(without_room);
    Choice { decode, prefill: Some(prefill), plan, reason, cost_s: without_room(cost_s), runner_up_s }
}

/// Prefill and decode on one of these.
pub(super) fn local(costs: &Costs<'_>, among: &[usize], reason: Reason, draw: Draw<'_>) -> Choice {
    let (step_s, fastest) = (costs.fastest_step_s(among), costs.fastest_of_all());
    let cost_s = |d: usize| costs.later_s(d, step_s) + costs.local(d, fastest).cost_s;
    let all: Vec<(usize, f64)> = among.iter().map(|&d| (d, cost_s(d))).collect();
    let decode = least(&all, draw);
    let others = all.iter().filter(|(d, _)| *d != decode).map(|(_, cost_s)| *cost_s);
    let runner_up_s = least_of(others).map(without_room);
    let plan = costs.local(decode, fastest);
    let cost_s = without_room(costs.later_s(decode, step_s) + plan.cost_s);
    Choice { decode, prefill: None, plan, reason, cost_s, runner_up_s }
}

fn most_cached<'w>(costs: &Costs<'_>, among: impl Iterator<Item = &'w usize>) -> u64 {
    among.map(|&w| costs.cached(w)).max().unwrap_or(0)
}

fn least_of(costs: impl Iterator<Item = f64>) -> Option<f64> {
    costs.reduce(f64::min)
}
