//! The policies for comparison, which ignore cached prefixes: round robin, or least loaded.

use super::choose::{Choice, Draw, least};
use super::cost::{Costs, has_room_now};
use super::pairs::Pairs;
use super::{PlacementPolicy, Reason};
use crate::request::PrefillPolicy;

/// A remote prefill, unless the tokens that the decode worker lacks are few.
pub(super) fn choose(costs: &Costs<'_>, pairs: &Pairs, reason: Reason, draw: Draw<'_>) -> Choice {
    let decoders: Vec<usize> = pairs.pairs.iter().map(|pair| pair.decode).collect();
    let decode = decode(costs, &decoders, draw);
    let is_short = costs.rest(decode) <= costs.thresholds.local_prefill_tokens_max;
    if is_short && costs.demand.policy == PrefillPolicy::Auto {
        return local(costs, &[decode], Reason::LocalShortRest, draw);
    }
    let partners = pairs.partners_of(decode);
    let fastest = costs.fastest(partners);
    let prefill = if costs.thresholds.policy == PlacementPolicy::RoundRobin {
        in_turn(partners, costs.demand.turn)
    } else {
        let cost_s = |&p: &usize| (p, costs.uncached_s(p, fastest));
        least(&partners.iter().map(cost_s).collect::<Vec<_>>(), draw)
    };
    let plan = costs.alone(prefill, fastest);
    Choice { decode, prefill: Some(prefill), plan, reason, cost_s: plan.cost_s, runner_up_s: None }
}

/// Prefill and decode on one of these.
pub(super) fn local(costs: &Costs<'_>, among: &[usize], reason: Reason, draw: Draw<'_>) -> Choice {
    let decode = decode(costs, among, draw);
    let plan = costs.alone(decode, costs.fastest_of_all());
    Choice { decode, prefill: None, plan, reason, cost_s: plan.cost_s, runner_up_s: None }
}

fn decode(costs: &Costs<'_>, among: &[usize], draw: Draw<'_>) -> usize {
    if costs.thresholds.policy == PlacementPolicy::RoundRobin {
        return in_turn(among, costs.demand.turn);
    }
    let full = |d: usize| if has_room_now(&costs.workers[d], costs.demand) { 0.0 } else { 1e6 };
    let cost = |&d: &usize| (d, costs.workers[d].fullness() + full(d));
    least(&among.iter().map(cost).collect::<Vec<_>>(), draw)
}

fn in_turn(among: &[usize], turn: u64) -> usize {
    among[(turn % among.len() as u64) as usize]
}
