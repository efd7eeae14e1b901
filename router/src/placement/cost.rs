//! Cost of a choice, in seconds.

use super::view::tokens_held;
use super::{Demand, Standing, Thresholds, Worker};

/// Compute time counts once for the request itself, and once more for the requests queued behind it on the same worker,
/// which it delays. Without this, every short queue elsewhere would make a request abandon its cached prefix.
const COMPUTE_COUNTS: f64 = 2.0;
/// Cost of a full batch, in seconds.
const FULL_BATCH_S: f64 = 10.0;
/// Added for a worker whose pool has no room for the prompt now, so that it ranks after all workers with room.
const NO_ROOM_S: f64 = 1e7;
/// Overhead of a get: its ticket, and the owner's confirmation that the pin was held.
const GET_S: f64 = 0.001;

/// Work of tokens `from..to` of a prompt. Each token is weighted by its compute time relative to a token without
/// context. A token with `doubles_at` tokens before it takes twice as long; 0 weights all alike.
pub(crate) fn work_tokens(from: u64, to: u64, doubles_at: f64) -> f64 {
    let (from, to) = (from.min(to) as f64, to as f64);
    let context = if doubles_at > 0.0 { (from + to) / 2.0 / doubles_at } else { 0.0 };
    (to - from) * (1.0 + context)
}

/// How a prefill worker would obtain the KV of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Plan {
    /// Prompt token at which the get from the decode worker ends; 0: no get.
    pub(super) get_to_tokens: u64,
    /// Tokens that it computes, weighted as by [`work_tokens`].
    pub(super) work_tokens: f64,
    /// Time to the first token.
    pub(super) first_token_s: f64,
    /// The cost by which plans are compared.
    pub(super) cost_s: f64,
}

/// A view, and the demand of a request.
#[derive(Clone, Copy)]
pub(super) struct Costs<'a> {
    pub(super) workers: &'a [Worker],
    pub(super) demand: &'a Demand,
    pub(super) thresholds: &'a Thresholds,
}

impl Costs<'_> {
    /// Cached tokens of the prompt on a worker: never the last one, which must be computed for the first token.
    pub(super) fn cached(&self, w: usize) -> u64 {
        self.workers[w].cached_tokens.min(self.demand.prompt_tokens.saturating_sub(1))
    }

    /// Tokens of the prompt that are not cached there.
    pub(super) fn rest(&self, w: usize) -> u64 {
        self.demand.prompt_tokens - self.cached(w)
    }

    /// Whether the prompt is one that an idle decode worker prefills.
    pub(super) fn is_short_prompt(&self) -> bool {
        self.demand.prompt_tokens <= self.thresholds.local_prefill_tokens_max
    }

    /// The largest measured prefill rate, in tokens per second; 0 if none is measured.
    pub(super) fn fastest(&self, among: &[usize]) -> f64 {
        fastest(among.iter().map(|&w| &self.workers[w]))
    }

    /// The same of all workers of the model.
    pub(super) fn fastest_of_all(&self) -> f64 {
        fastest(self.workers)
    }

    /// The rate of a worker. One that has measured none, or that was slow a while ago (stopped, cold, disturbed) and idle
    /// since, counts as fast as `fastest`, in tokens per second: otherwise no request would ever measure it. 0: no
    /// comparison.
    fn rate(&self, w: usize, fastest: f64) -> f64 {
        let load = &self.workers[w].load;
        let measured = load.prefill_tokens_per_s;
        let is_known = measured > 0.0 && !load.rates_are_old;
        let rate = if is_known { measured } else { measured.max(fastest) };
        if rate > 0.0 { rate } else { self.thresholds.prefill_tokens_per_s_default }
    }

    /// Time that a prompt with `work_tokens` to compute waits on a worker. Among several tenants it waits at most
    /// until its tenant's part of the rate has computed what that has there, this prompt included.
    fn queue_s(&self, w: usize, work_tokens: f64, fastest: f64) -> f64 {
        let (worker, rate) = (&self.workers[w], self.rate(w, fastest));
        let all_s = worker.load.waiting_tokens as f64 / rate;
        let Standing { share, .. } = self.demand.standing;
        if share >= 1.0 {
            return all_s;
        }
        let own_s = (worker.own.waiting_tokens as f64 + work_tokens) / (rate * share) - work_tokens / rate;
        all_s.min(own_s)
    }

    /// Time to the first token, ignoring the cache.
    pub(super) fn uncached_s(&self, w: usize, fastest: f64) -> f64 {
        self.computed(w, 0, fastest).first_token_s
    }

    /// The plan of a worker that computes the prompt and uses `cached` tokens of it from its cache.
    fn computed(&self, w: usize, cached: u64, fastest: f64) -> Plan {
        let work_tokens = work_tokens(cached, self.demand.prompt_tokens, self.thresholds.prefill_doubles_at_tokens);
        let (queue_s, compute_s) = (self.queue_s(w, work_tokens, fastest), work_tokens / self.rate(w, fastest));
        Plan {
            get_to_tokens: 0,
            work_tokens,
            first_token_s: queue_s + compute_s,
            cost_s: queue_s + COMPUTE_COUNTS * compute_s,
        }
    }

    /// The plan of a worker without a get.
    pub(super) fn alone(&self, w: usize, fastest: f64) -> Plan {
        self.computed(w, self.cached(w), fastest)
    }

    /// The plan of prefill worker `p` for a decode worker with `there` cached tokens of the prompt; it includes a get
    /// if that is cheaper. The cost includes the transfer time that compute does not hide.
    pub(super) fn remote(&self, p: usize, there: u64, fastest: f64) -> Plan {
        let have = self.cached(p);
        let mut plan = self.computed(p, have, fastest);
        if self.thresholds.gets && there > have {
            let read_s = GET_S + self.moved_s(p, there - have);
            let got = self.computed(p, there, fastest);
            if read_s + got.cost_s < plan.cost_s {
                plan = Plan {
                    get_to_tokens: there,
                    first_token_s: read_s + got.first_token_s,
                    cost_s: read_s + got.cost_s,
                    ..got
                };
            }
        }
        let compute_s = plan.work_tokens / self.rate(p, fastest);
        plan.cost_s += self.exposed_s(p, self.demand.prompt_tokens - there, compute_s);
        plan
    }

    /// The plan of a decode worker that also prefills. That delays each answer of the running batch. A short rest of a long
    /// prompt counts as no delay: elsewhere more of it would have to be computed.
    pub(super) fn local(&self, d: usize, fastest: f64) -> Plan {
        let mut plan = self.alone(d, fastest);
        if self.rest(d) > self.thresholds.local_prefill_tokens_max || self.is_short_prompt() {
            let compute_s = plan.work_tokens / self.rate(d, fastest);
            plan.cost_s += compute_s * f64::from(self.workers[d].load.running);
        }
        plan
    }

    /// Cost of later tokens on a decode worker: its step time, as measured for its batch and context, and how full it
    /// is.
    pub(super) fn later_s(&self, d: usize, fastest_step_s: f64) -> f64 {
        let worker = &self.workers[d];
        let step_s = match token_s(worker, self.demand.standing) {
            measured if measured > 0.0 && !worker.load.rates_are_old => measured,
            _ => fastest_step_s,
        };
        let room = if has_room_now(worker, self.demand) { 0.0 } else { NO_ROOM_S };
        self.demand.answer_tokens as f64 * step_s + FULL_BATCH_S * worker.fullness() + room
    }

    /// The shortest measured time from token to token; 0 if none is measured.
    pub(super) fn fastest_step_s(&self, among: &[usize]) -> f64 {
        let standing = self.demand.standing;
        let measured = among.iter().map(|&d| token_s(&self.workers[d], standing)).filter(|step_s| *step_s > 0.0);
        measured.reduce(f64::min).unwrap_or(0.0)
    }

    fn moved_s(&self, w: usize, tokens: u64) -> f64 {
        let rate = self.thresholds.transfer_bytes_per_s;
        if rate > 0.0 { tokens as f64 * self.workers[w].record.layout.bytes_per_token() as f64 / rate } else { 0.0 }
    }

    /// Transfer time that compute does not hide. KV is sent while layers compute. Cached KV is sent at once; the last
    /// layer's KV always follows all compute.
    fn exposed_s(&self, p: usize, tokens: u64, compute_s: f64) -> f64 {
        let moved_s = self.moved_s(p, tokens);
        let layers: usize = self.workers[p].record.layout.groups().iter().map(|group| group.layers.len()).sum();
        (moved_s - compute_s).max(moved_s / layers.max(1) as f64)
    }
}

fn fastest<'a>(workers: impl IntoIterator<Item = &'a Worker>) -> f64 {
    workers.into_iter().map(|worker| worker.load.prefill_tokens_per_s).fold(0.0, f64::max)
}

/// Time from one token to the next, with the wait for a place in the batch spread over all tokens; 0 while unmeasured.
/// Among several tenants, one waits for its own places at most.
pub(super) fn token_s(worker: &Worker, standing: Standing) -> f64 {
    let steps = worker.load.decode_steps_per_s;
    if steps <= 0.0 {
        return 0.0;
    }
    let places = f64::from(worker.record.running_max.max(1));
    // Sequences before it that have no place in the batch, if their answers are like this one.
    let before = |sequences: u32, places: f64| (f64::from(sequences) + 1.0 - places).max(0.0) / places;
    let all = before(worker.load.sequences(), places);
    let own = || before(worker.own.sequences, (places * standing.share).max(1.0));
    (1.0 + if standing.share < 1.0 { all.min(own()) } else { all }) / steps
}

/// Whether the worker would grant the prompt its blocks at once by its own rule: whole blocks, plus its watermark if
/// other sequences run.
pub(super) fn has_room_now(worker: &Worker, demand: &Demand) -> bool {
    let block = u64::from(worker.record.layout.block_tokens());
    let whole = tokens_held(&worker.record, demand.prompt_tokens + 1);
    let is_empty = worker.load.free_tokens >= worker.record.capacity_tokens;
    let keeps_margin = !is_empty && !worker.load.waives_margin;
    let margin = if keeps_margin { u64::from(baton_types::WATERMARK_BLOCKS) * block } else { 0 };
    worker.load.free_tokens >= whole + margin
}

/// A cost without the penalty for a pool without room.
pub(super) fn without_room(cost_s: f64) -> f64 {
    if cost_s >= NO_ROOM_S { cost_s - NO_ROOM_S } else { cost_s }
}
