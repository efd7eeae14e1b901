//! The placement decision.

use super::cost::{Costs, has_room_now, token_s, work_tokens};
use super::pairs::{Found, decoders, pairs};
use super::{
    Decision, Demand, Measured, Numbers, PlacementPolicy, Prediction, Reason, Refusal, Thresholds, Worker, WorkerRates,
    by_cost, without_cache,
};
use crate::request::PrefillPolicy;
use baton_types::Role;
use std::time::Duration;

/// A retry sooner than this only adds load.
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// A longer wait is too uncertain to state.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// Costs closer than this share are equal: load reports are not more exact, and herding is worse than a small loss.
const TIE_SHARE: f64 = 0.05;

/// Random numbers below a bound, for ties.
pub(super) type Draw<'a> = &'a mut dyn FnMut(usize) -> usize;

/// The chosen workers, and the figures behind the decision.
pub(super) struct Choice {
    pub(super) decode: usize,
    pub(super) prefill: Option<usize>,
    pub(super) plan: super::cost::Plan,
    pub(super) reason: Reason,
    pub(super) cost_s: f64,
    pub(super) runner_up_s: Option<f64>,
}

/// Chooses workers for one request among `workers`, all of one model. `draw(n)` gives a random number below `n`, for ties.
pub(crate) fn place(
    workers: &[Worker],
    demand: &Demand,
    thresholds: &Thresholds,
    draw: &mut dyn FnMut(usize) -> usize,
) -> Result<Decision, Refusal> {
    let costs = Costs { workers, demand, thresholds };
    let decoders = decoders(workers, demand)?;
    let (wanted, reason) = match demand.policy {
        PrefillPolicy::Local => (false, Reason::LocalPolicy),
        PrefillPolicy::Remote => (true, Reason::RemotePolicy),
        // Where an answer runs, it waits for each prompt that is computed beside it.
        PrefillPolicy::Auto if costs.is_short_prompt() => {
            let has_idle = || decoders.iter().any(|&d| workers[d].load.sequences() == 0);
            match thresholds.policy != PlacementPolicy::Cost || has_idle() {
                true => (false, Reason::LocalShortPrompt),
                false => (true, Reason::RemoteShortPrompt),
            }
        }
        PrefillPolicy::Auto => (true, Reason::RemoteLongPrompt),
    };
    let (found, reason) = match wanted.then(|| pairs(&costs, &decoders)) {
        None => (None, reason),
        Some(Found::Some(found)) => (Some(found), reason),
        Some(missing) if demand.policy == PrefillPolicy::Remote => return Err(missing.refusal()),
        Some(Found::Full { .. }) => (None, Reason::LocalPrefillFull),
        Some(Found::Nobody) => (None, Reason::LocalNoPrefillWorker),
    };
    let choice = match (thresholds.policy, found) {
        (PlacementPolicy::Cost, Some(pairs)) => by_cost::choose(&costs, &decoders, &pairs, reason, draw),
        (PlacementPolicy::Cost, None) => by_cost::local(&costs, &decoders, reason, draw),
        (_, Some(pairs)) => without_cache::choose(&costs, &pairs, reason, draw),
        (_, None) => without_cache::local(&costs, &decoders, reason, draw),
    };
    let predicted = predicted(&costs, &choice);
    in_time(&costs, &choice, predicted)?;
    let Choice { decode, prefill, plan, reason, cost_s, runner_up_s } = choice;
    Ok(Decision {
        decode,
        prefill,
        get_to_tokens: plan.get_to_tokens,
        work_tokens: plan.work_tokens.round() as u64,
        reason,
        numbers: Numbers {
            prefill_cached_tokens: prefill.map_or(0, |p| costs.cached(p)),
            decode_cached_tokens: costs.cached(decode),
            cost_s,
            runner_up_s,
        },
        predicted,
    })
}

/// Whether a worker with room for the prompt now would be chosen: full workers rank last.
pub(crate) fn has_room(workers: &[Worker], demand: &Demand, thresholds: &Thresholds) -> bool {
    // The round-robin policy may choose a full worker although another has room.
    let thresholds = Thresholds { policy: PlacementPolicy::Cost, ..*thresholds };
    let chosen = place(workers, demand, &thresholds, &mut |_| 0);
    chosen.is_ok_and(|decision| has_room_now(&workers[decision.decode], demand))
}

/// Behind other requests, a request is accepted only if it would be in time even if it took this factor longer. A queue
/// as long as deadlines allow does not complete more answers than a shorter one. But each answer is late as soon as
/// anything takes longer than predicted.
const BEHIND_OTHERS: f64 = 4.0 / 3.0;

/// The predicted times of the answer; `None` while nothing is measured.
fn predicted(costs: &Costs<'_>, choice: &Choice) -> Option<Prediction> {
    let workers = costs.workers;
    let computes = &workers[choice.prefill.unwrap_or(choice.decode)];
    let measured = computes.load.prefill_tokens_per_s > 0.0;
    measured.then(|| Prediction {
        first_token: duration(choice.plan.first_token_s),
        token: duration(token_s(&workers[choice.decode], costs.demand.standing)),
        ahead: workers[choice.decode].load.sequences().max(computes.load.sequences()),
    })
}

/// The shortest time of the answer at these rates, on the fastest workers without other requests. A worker without recent
/// measurements counts as fast as any.
fn alone_of(costs: &Costs<'_>, rates: fn(&Measured) -> WorkerRates) -> Prediction {
    let least = |seconds: &mut dyn Iterator<Item = f64>| duration(seconds.reduce(f64::min).unwrap_or(0.0));
    let shown = |w: &Worker, rate: f64, work: f64| if w.load.rates_are_old || rate <= 0.0 { 0.0 } else { work / rate };
    let workers = || costs.workers.iter().enumerate();
    let doubles_at = costs.thresholds.prefill_doubles_at_tokens;
    let work = |w| work_tokens(costs.cached(w), costs.demand.prompt_tokens, doubles_at);
    let prefill = workers().filter(|(_, worker)| worker.load.prefill_tokens_per_s > 0.0);
    let decode = workers().filter(|(_, worker)| worker.has_role(Role::Decode));
    Prediction {
        first_token: least(
            &mut prefill.map(|(w, worker)| shown(worker, rates(&worker.load).prefill_tokens_per_s, work(w))),
        ),
        token: least(&mut decode.map(|(_, worker)| shown(worker, rates(&worker.load).decode_steps_per_s, 1.0))),
        ahead: 0,
    }
}

/// The time of the answer without other requests; `None` if it would be late even then.
pub(crate) fn alone(workers: &[Worker], demand: &Demand, thresholds: &Thresholds) -> Option<Duration> {
    let alone = alone_of(&Costs { workers, demand, thresholds }, Measured::rates);
    let end = alone.end(u32::try_from(demand.answer_tokens).unwrap_or(u32::MAX));
    Some(end).filter(|end| *end <= demand.time_left)
}

/// Refuses an answer that would be late.
fn in_time(costs: &Costs<'_>, choice: &Choice, predicted: Option<Prediction>) -> Result<(), Refusal> {
    let Some(predicted) = predicted else { return Ok(()) };
    let Costs { workers, demand, .. } = *costs;
    let computes = &workers[choice.prefill.unwrap_or(choice.decode)];
    let others = if predicted.ahead > 0 { BEHIND_OTHERS } else { 1.0 };
    let slowness = demand.slowness.of(predicted.ahead) * others;
    let learned = |time: Duration| duration(time.as_secs_f64() * slowness);
    // Old rates, perhaps measured in a disturbance, refuse no request: only a new request can measure the present rate.
    let fresh = |worker: &Worker, time| if worker.load.rates_are_old { Duration::ZERO } else { time };
    let first_token = fresh(computes, predicted.first_token);
    let judged = Prediction { first_token, token: fresh(&workers[choice.decode], predicted.token), ..predicted };
    let answer_tokens = u32::try_from(demand.answer_tokens).unwrap_or(u32::MAX);
    let alone_end = alone_of(costs, Measured::rates).end(answer_tokens);
    // Bounded, so that a request can always be accepted behind others.
    let longer = demand.longest.min(demand.time_left / 2).saturating_sub(alone_end);
    let longer = if predicted.ahead > 0 { longer } else { Duration::ZERO };
    let end = learned(judged.end(answer_tokens).saturating_add(longer));
    if end > demand.time_left {
        // The present rates may be those of workers that others disturb.
        let alone = alone_of(costs, Measured::best_rates);
        let end_alone = alone.end(answer_tokens);
        if end_alone > demand.time_left {
            return Err(Refusal::Impossible { first_token: alone.first_token, end: end_alone });
        }
        return Err(Refusal::TooLate { first_token: learned(judged.first_token), end });
    }
    Ok(())
}

/// One of the cheapest of these workers with their costs, at random. `among` is not empty.
pub(super) fn least(among: &[(usize, f64)], draw: Draw<'_>) -> usize {
    let least = among.iter().map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min);
    let ties: Vec<usize> =
        among.iter().filter(|(_, cost)| *cost <= least * (1.0 + TIE_SHARE)).map(|(w, _)| *w).collect();
    ties[draw(ties.len())]
}

pub(super) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// A retry hint while no rate is known.
pub(super) const RETRY_SOON: Duration = RETRY_AFTER_MIN;

/// A retry hint from a predicted wait.
pub(crate) fn retry_after(wait: Duration) -> Duration {
    wait.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
}
