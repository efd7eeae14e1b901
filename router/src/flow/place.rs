//! Which workers an attempt runs on.

use super::answer::Answer;
use super::attempt::Failed;
use super::core::Core;
use super::sample::{Sample, Tried};
use crate::placement::{Decision, Demand, Prediction, Refusal, Standing, alone, has_room, place, retry_after};
use crate::prefixes::{Found, PrefixInProgress};
use crate::recovery::{Avoided, CandidateSet, ProbationLimits, Retry, Step};
use crate::workers::{Candidates, Placed, WorkerHandle};
use baton_kv_cache::PrefixHash;
use baton_text::grammar;
use baton_types::{
    ErrorKind, NumericsClass, PROMPT_LOGPROBS, RequestError, Role, SAMPLING_BAD_WORDS, SAMPLING_CONSTRAINTS,
    SAMPLING_MIN_P, SAMPLING_TYPICAL_P,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::Span;
use tracing::field::Empty;

/// A prompt that is not computed this long after its placement no longer counts as in progress.
const COMING_MAX: Duration = Duration::from_secs(30);
/// Added to twice the predicted time, for queues that were longer than predicted.
const COMING_MORE: Duration = Duration::from_secs(1);

/// The workers of one attempt.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) decode: Arc<WorkerHandle>,
    /// `None`: the decode worker also prefills.
    pub(super) prefill: Option<Arc<WorkerHandle>>,
    /// The prefill worker gets missing blocks from the decode worker up to this prompt token; 0: it gets none.
    pub(super) get_to_tokens: u64,
    /// The predicted time of the first token, as of now; `None` while nothing is measured.
    pub(super) predicted: Option<Prediction>,
    /// The tenant's standing then.
    pub(super) standing: Standing,
    /// Marks its prompt as being computed on the worker that prefills it.
    _coming: Option<PrefixInProgress>,
    /// Its part of the load of its workers.
    decodes: Placed,
    prefills: Option<Placed>,
}

impl Chosen {
    /// Its first token came: it waits on none of its workers any more.
    pub(super) fn began(&self) {
        self.prefills.iter().chain([&self.decodes]).for_each(Placed::began);
    }

    /// Marks the failed workers as avoided: by this request, and for a while by others.
    pub(super) fn failed(&self, retry: &Retry, avoided: &mut Avoided, probation: &ProbationLimits, now: Instant) {
        avoided.failed(self.prefill.as_ref().map(|prefill| prefill.party()), self.decode.party(), retry);
        for (worker, _) in retry.avoids(self.prefill.as_ref(), &self.decode).filter(|_| retry.probation) {
            worker.probation.failed(now, probation);
        }
    }

    /// Whether the worker that may have failed at `step` is draining.
    pub(super) fn drains(&self, step: Step) -> bool {
        let prefill = || self.prefill.as_ref().is_some_and(|p| p.is_draining());
        match step {
            Step::Place => false,
            Step::Claim | Step::Decode => self.decode.is_draining(),
            Step::Prefill => prefill(),
            Step::Handoff => prefill() || self.decode.is_draining(),
        }
    }

    /// The answer ended well: clears the failures of its workers.
    pub(super) fn served(&self) {
        for worker in self.prefill.iter().chain([&self.decode]) {
            worker.probation.served();
        }
    }
}

/// Inputs of a placement.
struct Search<'a> {
    demand: Demand,
    /// Of the prompt, as far as it may be taken from caches.
    hashes: &'a [PrefixHash],
    /// Which workers have the prompt cached.
    found: Found,
    avoided: &'a Avoided,
    now: Instant,
}

impl Sample<'_> {
    /// Chooses workers for the rest of the answer. An answer that has begun stays in its numerics class while a decode
    /// worker of that class has the capacity for it. Only then is the rest identical to what it would have been.
    ///
    /// If every worker that could serve the request was full when asked, the refusal is that of the last one. The
    /// request asks none of them again, so waiting would not help.
    pub(super) fn place(&self, core: &Core, tried: &Tried, answer: &Answer<'_>) -> Result<Chosen, Failed> {
        let span = tracing::info_span!(
            parent: &self.job.span,
            "place",
            baton.placement.reason = Empty,
            baton.placement.prefill_cached_tokens = Empty,
            baton.placement.decode_cached_tokens = Empty,
            baton.placement.get_to_tokens = Empty,
            baton.placement.cost_s = Empty,
            baton.placement.runner_up_s = Empty,
        );
        let _entered = span.enter();
        let now = core.runtime.now();
        let demand = self.demand(core, answer, now);
        // A prompt whose log-probabilities are still to come is computed whole.
        let hashes = if answer.scores() { &[] } else { &self.prompt().hashes[..] };
        let found = core.prefixes.lookup(hashes, &*core.runtime);
        let search = Search { demand, hashes, found, avoided: &tried.avoided, now };
        let mut refusal = Refusal::NoDecodeWorker;
        for class in answer.class().map(Some).into_iter().chain([None]) {
            for set in CandidateSet::WIDENING {
                match self.place_among(core, &search, set, class) {
                    Ok(chosen) => return Ok(chosen),
                    Err(refused) => refusal = refused,
                }
            }
            if refusal.missing() != Some(Role::Decode) {
                break; // Such workers exist, and may get room.
            }
        }
        let full = self.refused_as_full(core, tried, refusal.missing().as_slice());
        let lacking = || self.refused_as_lacking(core, &refusal, now);
        let error = full.or_else(lacking).unwrap_or_else(|| refused(&refusal));
        Err(Failed::at(Step::Place, error))
    }

    /// The refusal of a worker that was full, if a ready worker of one of these roles was: the request asks it no more.
    pub(super) fn refused_as_full(&self, core: &Core, tried: &Tried, roles: &[Role]) -> Option<RequestError> {
        let full = tried.full.as_ref()?;
        let ready =
            core.workers.candidates(&self.job.model.key, |worker| self.has_adapter(worker), core.runtime.now()).view;
        let is_left =
            |role: &Role| tried.avoided.excludes_missing(Some(*role), ready.iter().map(|worker| &*worker.record));
        let retry_after = full.retry_after.or(Some(retry_after(Duration::ZERO)));
        roles.iter().any(is_left).then(|| RequestError { retry_after, ..full.clone() })
    }

    /// The refusal of a request that needs what no ready decode worker of its model can do.
    fn refused_as_lacking(&self, core: &Core, refusal: &Refusal, now: Instant) -> Option<RequestError> {
        if refusal.missing() != Some(Role::Decode) {
            return None;
        }
        let ready = core.workers.candidates(&self.job.model.key, |worker| worker.record.role == Role::Decode, now);
        if let Some(adapter) = &self.job.adapter
            && !ready.handles.is_empty()
            && !ready.handles.iter().any(|worker| self.has_adapter(worker))
        {
            let message = format!(
                "no ready decode worker has the adapter {:?} any more, as it was when this request came; send it again",
                adapter.name
            );
            return Some(RequestError::new(ErrorKind::Unavailable, message));
        }
        let lacks = |name: &&str| ready.handles.iter().all(|worker| !worker.record.has_capability(name));
        let lacking = self.capabilities().find(lacks).filter(|_| !ready.handles.is_empty())?;
        let message = format!(
            "no ready decode worker of this model has the capability {lacking}, which this request needs: they are of \
             another release, or their devices have no such sampler; leave the parameter out, or ask a cluster that has it"
        );
        Some(RequestError::new(ErrorKind::Unavailable, message))
    }

    /// Whether a worker can serve the request's adapter, if it has one: of this digest, whatever its name is there.
    fn has_adapter(&self, worker: &WorkerHandle) -> bool {
        self.job.adapter.as_ref().is_none_or(|adapter| worker.adapters().has(&adapter.digest))
    }

    /// Capabilities that workers need for the request.
    fn capabilities(&self) -> impl Iterator<Item = &'static str> + Clone {
        let sampling = &self.job.sampling;
        let constraints = sampling.has_constraints().then_some(SAMPLING_CONSTRAINTS);
        let min_p = (sampling.min_p > 0.0).then_some(SAMPLING_MIN_P);
        let typical_p = (sampling.typical_p < 1.0).then_some(SAMPLING_TYPICAL_P);
        let bad_words = (!sampling.bad_words.is_empty()).then_some(SAMPLING_BAD_WORDS);
        let prompt_logprobs = sampling.prompt_logprobs.map(|_| PROMPT_LOGPROBS);
        let filters = constraints.into_iter().chain(min_p).chain(typical_p).chain(bad_words).chain(prompt_logprobs);
        filters.chain(sampling.grammar.as_ref().map(|_| grammar::REVISION))
    }

    /// What the rest of the answer needs.
    fn demand(&self, core: &Core, answer: &Answer<'_>, now: Instant) -> Demand {
        let (model, share) = (&self.job.model.card.id, self.job.share());
        let standing = core.admission.standing(share);
        let (longest, slowness) = core.experience.times(model, share.tenant, standing, now);
        Demand {
            prompt_tokens: (self.prompt().tokens.len() + answer.tokens().len()) as u64,
            total_tokens: self.prompt().tokens.len() as u64 + u64::from(self.prompt().max_tokens),
            answer_tokens: core.experience.answer_tokens(model, share.tenant, self.prompt().max_tokens),
            slowness,
            longest,
            standing,
            policy: self.job.policy,
            turn: core.placements.load(Ordering::Relaxed),
            // An answer that has begun is not refused for its predicted time.
            time_left: if answer.has_started() {
                Duration::MAX
            } else {
                self.job.deadline.saturating_duration_since(now)
            },
        }
    }

    /// Whether a decode worker other than `than` has room for the rest of the answer now.
    pub(super) fn has_room_elsewhere(&self, core: &Core, than: &WorkerHandle, answer: &Answer<'_>) -> bool {
        let now = core.runtime.now();
        let fits = |worker: &WorkerHandle| {
            let in_class = answer.class().is_none_or(|class| worker.record.class == *class);
            worker.party() != than.party() && !worker.probation.lasts(now) && in_class
        };
        let demand = self.demand(core, answer, now);
        let candidates = self.candidates(core, demand.standing, fits, now);
        has_room(&candidates.view, &demand, &core.limits.placement)
    }

    /// Workers of the model that know all parameters of the request and have its adapter, and what the tenant has on them if it is one of several.
    fn candidates(
        &self,
        core: &Core,
        standing: Standing,
        fits: impl Fn(&WorkerHandle) -> bool,
        now: Instant,
    ) -> Candidates {
        let needed = self.capabilities();
        let can = move |worker: &WorkerHandle| {
            needed.clone().all(|name| worker.record.has_capability(name)) && self.has_adapter(worker)
        };
        let mut candidates = core.workers.candidates(&self.job.model.key, |worker| can(worker) && fits(worker), now);
        if standing.share < 1.0 {
            let tenant = self.job.share().tenant;
            for (worker, handle) in candidates.view.iter_mut().zip(&candidates.handles) {
                worker.own = handle.load.own(tenant);
            }
        }
        candidates
    }

    /// Chooses among the workers of a retry scope, and of one numerics class if given.
    fn place_among(
        &self,
        core: &Core,
        search: &Search<'_>,
        set: CandidateSet,
        class: Option<&NumericsClass>,
    ) -> Result<Chosen, Refusal> {
        let Search { demand, hashes, found, avoided, now } = search;
        let fits = |worker: &WorkerHandle| {
            let on_probation = worker.probation.lasts(*now);
            avoided.admits(worker.party(), worker.record.role, on_probation, set)
                && class.is_none_or(|class| worker.record.class == *class)
        };
        let mut candidates = self.candidates(core, demand.standing, fits, *now);
        candidates.view.iter_mut().for_each(|worker| worker.not_with = avoided.not_with(&worker.record.party, set));
        core.prefixes.fill(hashes, found, &mut candidates.view, *now);
        if self.job.is_first_look()
            && let Some(alone) = alone(&candidates.view, demand, &core.limits.placement)
        {
            let tenant = self.job.share().tenant;
            core.experience.offered(&self.job.model.card.id, tenant, demand.standing, alone);
        }
        let mut draw = |n| core.runtime.random_below(n);
        let decision = place(&candidates.view, demand, &core.limits.placement, &mut draw)?;
        core.placements.fetch_add(1, Ordering::Relaxed);
        explain(&decision);
        self.job.span.record("baton.placement.reason", decision.reason.name());
        let _ = self.job.placed.set(decision.reason);
        let decode = candidates.handles[decision.decode].clone();
        self.job.metrics.placed(&decode.record.pool, decision.reason);
        let prefill = decision.prefill.map(|p| candidates.handles[p].clone());
        let decode_work_tokens = if prefill.is_some() { 0 } else { decision.work_tokens };
        let (tenant, kv_tokens) = (self.job.share().tenant, demand.prompt_tokens);
        let decodes = decode.load.placed(tenant, decode_work_tokens, kv_tokens);
        let prefills = prefill.as_ref().map(|prefill| prefill.load.placed(tenant, decision.work_tokens, kv_tokens));
        let predicted = decision.predicted;
        let time = predicted.map_or(COMING_MAX, |p| p.first_token.saturating_mul(2).saturating_add(COMING_MORE));
        let computes = prefill.as_ref().unwrap_or(&decode).party();
        let coming = core.prefixes.coming(computes, &self.prompt().hashes, *now + time.min(COMING_MAX));
        Ok(Chosen {
            decode,
            prefill,
            get_to_tokens: decision.get_to_tokens,
            predicted,
            standing: demand.standing,
            _coming: coming,
            decodes,
            prefills,
        })
    }
}

/// Records the reason in the current span.
fn explain(decision: &Decision) {
    let (span, numbers) = (Span::current(), &decision.numbers);
    span.record("baton.placement.reason", decision.reason.name());
    span.record("baton.placement.prefill_cached_tokens", numbers.prefill_cached_tokens);
    span.record("baton.placement.decode_cached_tokens", numbers.decode_cached_tokens);
    span.record("baton.placement.get_to_tokens", decision.get_to_tokens);
    span.record("baton.placement.cost_s", numbers.cost_s);
    if let Some(runner_up_s) = numbers.runner_up_s {
        span.record("baton.placement.runner_up_s", runner_up_s);
    }
}

fn refused(refusal: &Refusal) -> RequestError {
    let ms = |time: Duration| Duration::from_millis(time.as_millis().try_into().unwrap_or(u64::MAX).max(1));
    let error = |message: &str| RequestError::new(refusal.kind(), message);
    match *refusal {
        Refusal::NoDecodeWorker => error("no decode worker of this model is ready; try again later"),
        Refusal::NoPrefillWorker => {
            error("no prefill worker fits a decode worker of this model, and the prefill policy is remote")
        }
        Refusal::NeverFits { tokens_max } => error(&format!(
            "prompt and max_tokens together exceed the {tokens_max} tokens that the largest decode worker takes"
        )),
        Refusal::NeverPrefilled { prompt_tokens, prompt_tokens_max } => error(&format!(
            "the prompt has {prompt_tokens} tokens, prefill workers take at most {prompt_tokens_max}, and the prefill \
             policy is remote; shorten the prompt, or set prefill_policy to auto or local"
        ))
        .param("prefill_policy"),
        Refusal::Full { retry_after } => {
            error("all workers of this model are full; try again later").retry_after(retry_after)
        }
        Refusal::Impossible { first_token, end } => error(&format!(
            "the deadline is too short for this request: on idle workers its first token takes {:?} and its last {:?}; \
             state a longer one",
            ms(first_token),
            ms(end)
        )),
        Refusal::TooLate { first_token, end } => {
            let (first, last) = (ms(first_token), ms(end));
            error(&format!(
                "the first token is predicted in {first:?} and the last in {last:?}, after the deadline; \
                 try again later"
            ))
            .retry_after(retry_after(first_token))
        }
    }
}
