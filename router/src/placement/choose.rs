//! The decision.

use super::{Decision, Demand, Prediction, Reason, Refusal, Thresholds, Worker};
use crate::request::PrefillPolicy;
use baton_types::{Role, WATERMARK_BLOCKS};
use std::time::Duration;

/// A retry sooner than this only adds load.
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// A longer wait is no prediction any more.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// Costs closer than this share are equal: load reports are no more exact, and herding is worse than a small loss.
const TIE_SHARE: f64 = 0.05;

/// Chooses workers for one request among `workers`, all of one model. `draw(n)` gives a random number below `n`, for ties.
pub fn place(
    workers: &[Worker],
    demand: &Demand,
    thresholds: &Thresholds,
    draw: &mut dyn FnMut(usize) -> usize,
) -> Result<Decision, Refusal> {
    let (wanted, reason) = match demand.policy {
        PrefillPolicy::Local => (false, Reason::LocalPolicy),
        PrefillPolicy::Remote => (true, Reason::RemotePolicy),
        PrefillPolicy::Auto if demand.prompt_tokens <= thresholds.local_prefill_tokens_max => {
            (false, Reason::LocalShortPrompt)
        }
        PrefillPolicy::Auto => (true, Reason::RemoteLongPrompt),
    };
    check_fits(workers, demand)?;
    let decoders = decoders(workers, demand)?;
    let prefillers: Vec<usize> =
        with_role(workers, Role::Prefill).filter(|&p| workers[p].tokens_max() >= demand.prefill_tokens()).collect();
    let seconds = |w: usize| first_token_seconds(&workers[w], 0.0, demand, thresholds);

    let mut remote = None;
    let mut reason = reason;
    if wanted {
        // A decode worker that has a partner is preferred to one that has none.
        let pairs: Vec<usize> = decoders
            .iter()
            .copied()
            .filter(|&d| prefillers.iter().any(|&p| workers[d].pairs_with(&workers[p])))
            .collect();
        if pairs.is_empty() {
            if demand.policy == PrefillPolicy::Remote {
                return Err(Refusal::NoPrefillWorker);
            }
            reason = Reason::LocalNoPrefillWorker;
        } else {
            let roomy: Vec<usize> = prefillers.iter().copied().filter(|&p| workers[p].queue_has_room()).collect();
            let pairs: Vec<usize> =
                pairs.into_iter().filter(|&d| roomy.iter().any(|&p| workers[d].pairs_with(&workers[p]))).collect();
            if pairs.is_empty() {
                if demand.policy == PrefillPolicy::Remote {
                    let soonest = prefillers.iter().map(|&p| seconds(p)).fold(f64::INFINITY, f64::min);
                    return Err(Refusal::Full { retry_after: retry_after(duration(soonest)) });
                }
                reason = Reason::LocalPrefillFull;
            } else {
                let decode = least(&pairs, |d| decode_cost(&workers[d], demand), draw);
                let partners: Vec<usize> =
                    roomy.into_iter().filter(|&p| workers[decode].pairs_with(&workers[p])).collect();
                let fastest = partners.iter().map(|&p| workers[p].load.prefill_tokens_per_s).fold(0.0, f64::max);
                let seconds = |p: usize| first_token_seconds(&workers[p], fastest, demand, thresholds);
                let prefill = least(&partners, seconds, draw);
                remote = Some((decode, prefill, seconds(prefill)));
            }
        }
    }
    let (decode, prefill, first_seconds) = match remote {
        Some((decode, prefill, first_seconds)) => (decode, Some(prefill), first_seconds),
        // Local prefill: room first, then the batch, then the queue of prompt tokens.
        None => {
            let cost = |d: usize| decode_cost(&workers[d], demand) + seconds(d) / LOCAL_SECONDS_SCALE;
            let decode = least(&decoders, cost, draw);
            (decode, None, seconds(decode))
        }
    };
    let computes = &workers[prefill.unwrap_or(decode)];
    let measured = computes.load.prefill_tokens_per_s > 0.0;
    let predicted = measured.then(|| Prediction {
        first_token: duration(first_seconds),
        token: duration(token_seconds(&workers[decode])),
        ahead: workers[decode].load.sequences().max(computes.load.sequences()),
    });
    if let Some(predicted) = predicted {
        let others = if predicted.ahead > 0 { BEHIND_OTHERS } else { 1.0 };
        let slowness = demand.slowness.of(predicted.ahead) * others;
        let learned = |time: Duration| duration(time.as_secs_f64() * slowness);
        // What was measured a while ago, in a disturbance perhaps, refuses nobody: only a request can show what is true now.
        let fresh = |worker: &Worker, time| if worker.load.rates_are_old { Duration::ZERO } else { time };
        let first_token = fresh(computes, predicted.first_token);
        let judged = Prediction { first_token, token: fresh(&workers[decode], predicted.token), ..predicted };
        let end = learned(judged.end(u32::try_from(demand.answer_tokens).unwrap_or(u32::MAX)));
        if end > demand.time_left {
            return Err(Refusal::TooLate { first_token: learned(judged.first_token), end });
        }
    }
    Ok(Decision { decode, prefill, reason, predicted })
}

/// Whether one that has room for the prompt now would be chosen: what is full comes last.
pub(crate) fn has_room(workers: &[Worker], demand: &Demand, thresholds: &Thresholds) -> bool {
    let chosen = place(workers, demand, thresholds, &mut |_| 0);
    chosen.is_ok_and(|decision| has_room_now(&workers[decision.decode], demand))
}

/// Whether the worker would grant the prompt its blocks at once, by its own rule: whole blocks, and its watermark where others run.
fn has_room_now(worker: &Worker, demand: &Demand) -> bool {
    let block = u64::from(worker.record.layout.block_tokens());
    let whole = (demand.prompt_tokens + 1).next_multiple_of(block);
    let is_empty = worker.load.free_tokens >= worker.record.capacity_tokens;
    worker.load.free_tokens >= whole + if is_empty { 0 } else { u64::from(WATERMARK_BLOCKS) * block }
}

/// What finds others ahead of it is taken where it would be in time even if it took this factor longer. A queue that is as long as deadlines
/// allow brings no more answers than a shorter one, and each is then late as soon as anything takes longer than predicted.
const BEHIND_OTHERS: f64 = 4.0 / 3.0;

/// Ten seconds of queued prefill weigh as much as a full batch.
const LOCAL_SECONDS_SCALE: f64 = 10.0;

fn with_role(workers: &[Worker], role: Role) -> impl Iterator<Item = usize> {
    workers.iter().enumerate().filter(move |(_, w)| w.has_role(role)).map(|(i, _)| i)
}

/// Refuses what these workers would not take if they were idle.
fn check_fits(workers: &[Worker], demand: &Demand) -> Result<(), Refusal> {
    let longest = |role| with_role(workers, role).map(|w| workers[w].tokens_max()).max();
    let tokens_max = longest(Role::Decode).ok_or(Refusal::NoDecodeWorker)?;
    if tokens_max < demand.total_tokens {
        return Err(Refusal::NeverFits { tokens_max });
    }
    match longest(Role::Prefill) {
        Some(tokens_max) if demand.policy == PrefillPolicy::Remote && tokens_max < demand.prefill_tokens() => {
            let prompt_tokens_max = (tokens_max + demand.prompt_tokens).saturating_sub(demand.prefill_tokens());
            Err(Refusal::NeverPrefilled { prompt_tokens: demand.prompt_tokens, prompt_tokens_max })
        }
        _ => Ok(()),
    }
}

/// Those that take so long a sequence and have room in their queue.
fn decoders(workers: &[Worker], demand: &Demand) -> Result<Vec<usize>, Refusal> {
    let open: Vec<usize> = with_role(workers, Role::Decode)
        .filter(|&d| workers[d].tokens_max() >= demand.total_tokens && workers[d].queue_has_room())
        .collect();
    if open.is_empty() {
        return Err(Refusal::Full { retry_after: RETRY_AFTER_MIN });
    }
    Ok(open)
}

/// Fullness of the batch; a worker whose pool has no room for the prompt now comes after all that have.
fn decode_cost(worker: &Worker, demand: &Demand) -> f64 {
    worker.fullness() + if has_room_now(worker, demand) { 0.0 } else { 1e6 }
}

/// A worker that was slow a while ago (stopped, cold, disturbed) and has had nothing to do since counts as fast as the `fastest` that it is
/// compared with, in tokens per second: else no request would ever show that it is. 0 compares with nobody.
fn first_token_seconds(worker: &Worker, fastest: f64, demand: &Demand, thresholds: &Thresholds) -> f64 {
    let load = &worker.load;
    let measured = load.prefill_tokens_per_s.max(if load.rates_are_old { fastest } else { 0.0 });
    let rate = if measured > 0.0 { measured } else { thresholds.prefill_tokens_per_s_default };
    (load.waiting_tokens + demand.prompt_tokens) as f64 / rate
}

/// From one token to the next, the wait for a place in the batch spread over all; 0 while unmeasured.
fn token_seconds(worker: &Worker) -> f64 {
    let steps = worker.load.decode_steps_per_s;
    if steps <= 0.0 {
        return 0.0;
    }
    let places = worker.record.running_max.max(1);
    // Those before it for whom there is no place, if they too have answers like this one.
    let before = worker.load.sequences().saturating_sub(places.saturating_sub(1));
    (1.0 + f64::from(before) / f64::from(places)) / steps
}

/// One of the cheapest, at random. `among` is not empty.
fn least(among: &[usize], cost: impl Fn(usize) -> f64, draw: &mut dyn FnMut(usize) -> usize) -> usize {
    let costs: Vec<f64> = among.iter().map(|&w| cost(w)).collect();
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let ties: Vec<usize> =
        among.iter().zip(&costs).filter(|(_, c)| **c <= least * (1.0 + TIE_SHARE)).map(|(&w, _)| w).collect();
    ties[draw(ties.len())]
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// A retry hint from a predicted wait.
pub(crate) fn retry_after(wait: Duration) -> Duration {
    wait.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
}
