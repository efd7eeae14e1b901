//! Choosing by group gives what a scan over all pairs gives. The scan, which asks each decode worker about each prefill worker, is here.

use super::*;
use crate::placement::by_cost;
use crate::placement::choose::{Choice, Draw, least};
use crate::placement::cost::{Costs, without_room};
use crate::placement::pair_alike;
use crate::placement::pairs::decoders;
use crate::placement::without_cache;
use baton_types::{Digest, ProtocolRange};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

/// A decode worker and the prefill workers that it may take KV from.
type Scanned = (usize, Vec<usize>);

/// Every pair of workers that may run this request; `None` if none could even with empty queues.
fn scan_pairs(costs: &Costs<'_>, decoders: &[usize]) -> Option<Vec<Scanned>> {
    let Costs { workers, demand, .. } = *costs;
    let may = |p: &usize| workers[*p].has_role(Role::Prefill) && workers[*p].tokens_max() >= demand.prefill_tokens();
    let fits = |d: usize, p: usize| {
        let (decode, prefill) = (&workers[d], &workers[p]);
        decode.record.check_partner(&prefill.record).is_ok() && !prefill.not_with.contains(&decode.record.party)
    };
    let prefillers: Vec<usize> = (0..workers.len()).filter(may).collect();
    let of = |&d: &usize| {
        let roomy = prefillers.iter().copied().filter(|&p| workers[p].queue_has_room(demand.standing));
        (d, roomy.filter(|&p| fits(d, p)).collect::<Vec<_>>())
    };
    let pairs: Vec<Scanned> = decoders.iter().map(of).filter(|(_, partners)| !partners.is_empty()).collect();
    let anybody = decoders.iter().any(|&d| prefillers.iter().any(|&p| fits(d, p)));
    anybody.then_some(pairs)
}

fn smallest(costs: impl Iterator<Item = f64>) -> Option<f64> {
    costs.reduce(f64::min)
}

/// The policy `cost` over all pairs.
fn scan_by_cost(costs: &Costs<'_>, decoders: &[usize], pairs: &[Scanned], reason: Reason, draw: Draw<'_>) -> Choice {
    let step_s = costs.fastest_step_s(decoders);
    let remote_s = |d: usize, p: usize, partners: &[usize]| {
        costs.later_s(d, step_s) + costs.remote(p, costs.cached(d), costs.fastest(partners)).cost_s
    };
    let best_of = |(d, partners): &Scanned| {
        // The same sum in the same order: later tokens are added to the best of the partners.
        let fastest = costs.fastest(partners);
        let best = partners.iter().map(|&p| costs.remote(p, costs.cached(*d), fastest).cost_s);
        (*d, costs.later_s(*d, step_s) + best.fold(f64::INFINITY, f64::min))
    };
    let best: Vec<(usize, f64)> = pairs.iter().map(best_of).collect();
    let decode = least(&best, draw);
    let partners = &pairs.iter().find(|(d, _)| *d == decode).unwrap().1;
    let fastest = costs.fastest(partners);
    let plan_of = |p: usize| costs.remote(p, costs.cached(decode), fastest);
    let prefill = least(&partners.iter().map(|&p| (p, plan_of(p).cost_s)).collect::<Vec<_>>(), draw);
    let cost_s = remote_s(decode, prefill, partners);

    let beside = partners.iter().filter(|p| **p != prefill).map(|&p| remote_s(decode, p, partners));
    let elsewhere = best.iter().filter(|(d, _)| *d != decode).map(|(_, cost_s)| *cost_s);
    let remote_next = smallest(beside.chain(elsewhere));
    let short = |d: usize| costs.rest(d) <= costs.thresholds.local_prefill_tokens_max;
    let everybody = || pairs.iter().flat_map(|(_, partners)| partners);
    let most = everybody().map(|&p| costs.cached(p)).max().unwrap_or(0);
    let may_compute = |d: &usize| costs.demand.policy == Auto && (short(*d) || costs.cached(*d) > most);
    let here: Vec<usize> = decoders.iter().copied().filter(may_compute).collect();
    let local_next =
        smallest(here.iter().map(|&d| costs.later_s(d, step_s) + costs.local(d, costs.fastest_of_all()).cost_s));
    if local_next.is_some_and(|local_s| local_s < cost_s) {
        let mut chosen = by_cost::local(costs, &here, Reason::LocalCached, draw);
        if short(chosen.decode) {
            let is_prompt = costs.demand.prompt_tokens <= costs.thresholds.local_prefill_tokens_max;
            chosen.reason = if is_prompt { Reason::LocalShortPrompt } else { Reason::LocalShortRest };
        }
        chosen.runner_up_s = smallest([Some(without_room(cost_s)), chosen.runner_up_s].into_iter().flatten());
        return chosen;
    }
    let plan = plan_of(prefill);
    let most = partners.iter().map(|&p| costs.cached(p)).max().unwrap_or(0);
    let reason = match costs.cached(prefill) {
        _ if plan.get_to_tokens > 0 => Reason::RemoteGet,
        _ if most == 0 => reason,
        cached if cached < most => Reason::RemoteReplicated,
        _ => Reason::RemoteCached,
    };
    let runner_up_s = smallest(remote_next.into_iter().chain(local_next)).map(without_room);
    Choice { decode, prefill: Some(prefill), plan, reason, cost_s: without_room(cost_s), runner_up_s }
}

/// The policies that ignore caches, over all pairs.
fn scan_blindly(costs: &Costs<'_>, pairs: &[Scanned], reason: Reason, draw: Draw<'_>) -> Choice {
    let decoders: Vec<usize> = pairs.iter().map(|(d, _)| *d).collect();
    let decode = without_cache::local(costs, &decoders, reason, draw).decode;
    if costs.rest(decode) <= costs.thresholds.local_prefill_tokens_max && costs.demand.policy == Auto {
        return without_cache::local(costs, &[decode], Reason::LocalShortRest, draw);
    }
    let partners = &pairs.iter().find(|(d, _)| *d == decode).unwrap().1;
    let fastest = costs.fastest(partners);
    let wait_s = |&p: &usize| (p, costs.uncached_s(p, fastest));
    let prefill = match costs.thresholds.policy {
        PlacementPolicy::RoundRobin => partners[costs.demand.turn as usize % partners.len()],
        _ => least(&partners.iter().map(wait_s).collect::<Vec<_>>(), draw),
    };
    let plan = costs.alone(prefill, fastest);
    Choice { decode, prefill: Some(prefill), plan, reason, cost_s: plan.cost_s, runner_up_s: None }
}

/// The parts of a decision that groups could change.
#[derive(Debug, PartialEq)]
enum Picked {
    Pair { decode: usize, prefill: Option<usize>, get_to_tokens: u64, cost_s: f64, runner_up_s: Option<f64> },
    Nobody(baton_types::ErrorKind),
}

/// The choice of the scan over all pairs, and its reason.
fn scan(costs: &Costs<'_>, draw: Draw<'_>) -> (Picked, Option<Reason>) {
    let refused = |refusal: Refusal| (Picked::Nobody(refusal.kind()), None);
    let decoders = match decoders(costs.workers, costs.demand) {
        Ok(decoders) => decoders,
        Err(refusal) => return refused(refusal),
    };
    let by_cost = costs.thresholds.policy == PlacementPolicy::Cost;
    let is_remote = costs.demand.policy == Remote;
    let alone = |reason, draw: Draw<'_>| match by_cost {
        true => by_cost::local(costs, &decoders, reason, draw),
        false => without_cache::local(costs, &decoders, reason, draw),
    };
    let is_short = costs.demand.prompt_tokens <= costs.thresholds.local_prefill_tokens_max;
    let is_idle = |d: &usize| costs.workers[*d].load.sequences() == 0;
    let stays = costs.demand.policy == Auto && is_short && (!by_cost || decoders.iter().any(is_idle));
    let choice = match scan_pairs(costs, &decoders) {
        _ if stays => alone(Reason::LocalShortPrompt, draw),
        None if is_remote => return refused(Refusal::NoPrefillWorker),
        None => alone(Reason::LocalNoPrefillWorker, draw),
        Some(pairs) if pairs.is_empty() && is_remote => {
            return refused(Refusal::Full { retry_after: Duration::ZERO });
        }
        Some(pairs) if pairs.is_empty() => alone(Reason::LocalPrefillFull, draw),
        Some(pairs) => {
            let reason = match is_remote {
                true => Reason::RemotePolicy,
                false if is_short => Reason::RemoteShortPrompt,
                false => Reason::RemoteLongPrompt,
            };
            match by_cost {
                true => scan_by_cost(costs, &decoders, &pairs, reason, draw),
                false => scan_blindly(costs, &pairs, reason, draw),
            }
        }
    };
    let Choice { decode, prefill, plan, reason, cost_s, runner_up_s } = choice;
    (Picked::Pair { decode, prefill, get_to_tokens: plan.get_to_tokens, cost_s, runner_up_s }, Some(reason))
}

/// The choice of the shipped code, and its reason.
fn pick(costs: &Costs<'_>, draw: Draw<'_>) -> (Picked, Option<Reason>) {
    match place(costs.workers, costs.demand, costs.thresholds, draw) {
        Err(refusal) => (Picked::Nobody(refusal.kind()), None),
        Ok(Decision { decode, prefill, get_to_tokens, reason, numbers, .. }) => {
            let Numbers { cost_s, runner_up_s, .. } = numbers;
            (Picked::Pair { decode, prefill, get_to_tokens, cost_s, runner_up_s }, Some(reason))
        }
    }
}

/// A worker of one of several kinds, not all of which are compatible.
fn any(role: Role, number: usize, kinds: u32, random: &mut StdRng) -> Worker {
    let kind = random.random_range(0..kinds);
    let is_full = random.random_bool(0.15);
    let mut worker = worker(role, &format!("{}{number}", role.name()), |record, load| {
        match kind {
            0 => {}
            1 => record.class.kernel_revision = 2,
            2 => record.card.end_tokens = vec![2, 3],
            3 => record.card.bundle = Some(Digest([3; 32])),
            4 => record.card.fingerprint = Digest([4; 32]),
            // Compatible with all that support either version; those are not all compatible with each other.
            5 => record.protocol = ProtocolRange { min: 1, max: 2 },
            _ => record.protocol = ProtocolRange { min: 2, max: 2 },
        }
        record.capacity_tokens = [2000, 8192][usize::from(random.random_bool(0.8))];
        load.free_tokens = [100, record.capacity_tokens][usize::from(random.random_bool(0.8))];
        load.waiting = if is_full { record.waiting_max } else { random.random_range(0..4) };
        load.waiting_tokens = random.random_range(0..3) * 1000;
        load.running = random.random_range(0..4);
        load.prefill_tokens_per_s = f64::from(random.random_range(0..4)) * 500.0;
        load.decode_steps_per_s = f64::from(random.random_range(0..4)) * 10.0;
        load.rates_are_old = random.random_bool(0.2);
    });
    worker.cached_tokens = random.random_range(0..5) * 300;
    let waiting = random.random_range(0..12);
    worker.own = Own { sequences: waiting + 1, waiting, waiting_tokens: u64::from(waiting) * 100 };
    worker
}

/// Some workers of both roles, in groups. Some prefill workers are not to be paired with some decode workers.
fn view(random: &mut StdRng) -> Vec<Worker> {
    let kinds = random.random_range(1..8);
    let mut all = Vec::new();
    for role in [Role::Prefill, Role::Decode] {
        let count = random.random_range(0..9);
        all.extend((0..count).map(|number| any(role, number, kinds, random)));
    }
    let parties: Vec<_> =
        all.iter().filter(|w| w.has_role(Role::Decode)).map(|worker| worker.record.party.clone()).collect();
    for worker in all.iter_mut().filter(|worker| worker.has_role(Role::Prefill)) {
        worker.not_with = parties.iter().filter(|_| random.random_bool(0.05)).cloned().collect();
    }
    for w in 0..all.len() {
        let like = (0..=w).find(|&other| pair_alike(&all[other].record, &all[w].record));
        // A worker without a group equals no other.
        all[w].group = like.map(|like| like as u32).filter(|_| random.random_bool(0.9));
    }
    all
}

#[test]
fn a_choice_by_group_is_that_of_a_scan_over_all_pairs() {
    let mut random = StdRng::seed_from_u64(7);
    let mut seen = std::collections::BTreeMap::new();
    for round in 0..20_000 {
        let workers = view(&mut random);
        let thresholds = Thresholds {
            policy: PlacementPolicy::ALL[random.random_range(0..3)],
            transfer_bytes_per_s: [0.0, 1e6, 1e9][random.random_range(0..3)],
            prefill_doubles_at_tokens: [0.0, 1000.0][random.random_range(0..2)],
            gets: random.random_bool(0.5),
            ..THRESHOLDS
        };
        let demand = Demand {
            time_left: Duration::from_secs(3600),
            turn: random.random(),
            standing: Standing { share: 0.5, is_below: random.random_bool(0.5) },
            ..demand([Auto, Remote][random.random_range(0..2)], random.random_range(257..2500))
        };
        let costs = Costs { workers: &workers, demand: &demand, thresholds: &thresholds };
        let draws = || {
            let mut draws = StdRng::seed_from_u64(round);
            move |n: usize| draws.random_range(0..n)
        };
        let expected = scan(&costs, &mut draws());
        assert_eq!(pick(&costs, &mut draws()), expected, "round {round}");
        let name = match expected {
            (Picked::Nobody(kind), _) => format!("{kind:?}"),
            (_, reason) => reason.unwrap().name().to_owned(),
        };
        *seen.entry(name).or_insert(0) += 1;
    }
    // Each reason except those without a prefill worker, and each refusal except those for lack of time.
    assert!(seen.len() >= 12 && seen.values().all(|times| *times >= 20), "{seen:?}");
}
