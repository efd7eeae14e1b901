//! One request in order: look up, admit, tokenize, place, prefill, decode, stream, end.
//!
//! The fronts hand in a [`GenerationRequest`] and receive a [`Generation`]: dropping that cancels the request on all workers.

mod answer;
mod attempt;
mod dial;
mod end;
mod job;
mod names;
mod place;
mod remote;
mod run;
mod sample;
mod tokenize;

use crate::admission::Admission;
use crate::cache_scope::CacheRules;
use crate::metrics::{CacheMetrics, Outcome, RouterMetrics};
use crate::models::lookup;
use crate::output::Events;
use crate::placement::{Experience, Thresholds};
use crate::prefixes::Prefixes;
use crate::prices::PricesConfig;
use crate::quotas::Quotas;
use crate::recovery::{ProbationLimits, RetryBucket, RetryLimits};
use crate::request::{
    GenerationRequest, PrefillPolicy, Prompt, check_priority, check_samples, check_stop_strings, check_tokens,
    check_vocab,
};
use crate::traces::{End, Tail};
use crate::workers::{ServedModel, WorkerSet};
use baton_node::intake::Intake;
use baton_text::StopMatcher;
use baton_types::{ErrorKind, RequestError, RequestId, TokenId};
use job::{Job, Prepared};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
pub(crate) use tokenize::Tokenizing;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span, field};

/// Bounds of every request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Where prompts are prefilled unless the request says otherwise.
    pub(crate) policy: PrefillPolicy,
    /// Thresholds of placement.
    pub(crate) placement: Thresholds,
    /// Retries of one request.
    pub(crate) retry: RetryLimits,
    /// How long workers that failed are avoided.
    pub(crate) probation: ProbationLimits,
    /// Longest wait for a decode worker's claim.
    pub(crate) claim_max: Duration,
    /// Events held for a client that does not read.
    pub(crate) client_events_max: usize,
    /// A client that takes nothing for so long is cancelled.
    pub(crate) client_stall_max: Duration,
}

/// What every request shares.
#[derive(Debug)]
pub(crate) struct Core {
    /// Bounds.
    pub(crate) limits: Limits,
    /// Running and queued requests.
    pub(crate) admission: Admission,
    /// What the bytes of requests are taken from that are not read yet.
    pub(crate) intake: Intake,
    /// What the bytes of answers are taken from that are gathered before they are sent, or wait for their reader.
    pub(crate) answers: Intake,
    /// What keys have in flight.
    pub(crate) quotas: Quotas,
    /// Retries of all requests.
    pub(crate) retries: RetryBucket,
    /// How requests use prefix caches.
    pub(crate) cache: CacheRules,
    /// What tokens cost.
    pub(crate) prices: PricesConfig,
    /// What answers so far teach.
    pub(crate) experience: Experience,
    /// Prompts that become tokens.
    pub(crate) tokenizing: Tokenizing,
    /// The workers.
    pub(crate) workers: Arc<WorkerSet>,
    /// What they have cached.
    pub(crate) prefixes: Arc<Prefixes>,
    /// Router-side metrics.
    pub(crate) metrics: RouterMetrics,
    /// What prefix caches spared.
    pub(crate) cache_metrics: CacheMetrics,
    /// What becomes of traces.
    pub(crate) tail: Tail,
    /// No new requests any more.
    pub(crate) draining: CancellationToken,
    /// Requests still running are ended.
    pub(crate) abort: CancellationToken,
    /// Placements so far.
    pub(crate) placements: AtomicU64,
    /// Times that KV without room was left to wait where it was.
    #[cfg(test)]
    pub(crate) stays: AtomicU64,
    /// Tasks of running requests.
    pub(crate) tasks: TaskTracker,
    /// Answers that their clients have not read to the end.
    pub(crate) unread: TaskTracker,
}

/// A running request.
#[derive(Debug)]
pub(crate) struct Generation {
    /// Id of the request.
    pub(crate) id: RequestId,
    /// Its model.
    pub(crate) model: Arc<ServedModel>,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: Arc<[TokenId]>,
    /// How many answers.
    pub(crate) samples: u32,
    /// Seed, given or drawn.
    pub(crate) seed: u64,
    /// Id of its trace; empty where tracing is off.
    pub(crate) trace_id: String,
    /// Deltas, then one end.
    pub(crate) events: Events,
}

/// A request that was refused before anything was queued.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Why.
    pub(crate) error: RequestError,
    /// Id of its trace; empty where tracing is off.
    pub(crate) trace_id: String,
}

impl Core {
    /// Starts a request. Errors here are those that need no worker.
    pub(crate) async fn generate(self: &Arc<Self>, request: GenerationRequest) -> Result<Generation, Refused> {
        let span = self.request_span(&request);
        let log = baton_node::telemetry::log_span(request.id.as_str(), &trace_id(&span));
        let started = self.start(&request, &span).instrument(log).await;
        started.map_err(|error| {
            end::failed(&span, &error);
            self.metrics.refused(Outcome::Failed(error.kind));
            let end = End { failed: Some(error.kind), took: request.received.elapsed(), first_token: None };
            self.tail.ended(&span, end, &[]);
            Refused { error, trace_id: trace_id(&span) }
        })
    }

    fn request_span(&self, request: &GenerationRequest) -> Span {
        let operation = if matches!(*request.prompt, Prompt::Chat { .. }) { "chat" } else { "text_completion" };
        let span = tracing::info_span!(
            parent: None,
            "generate",
            otel.kind = "server",
            otel.status_code = field::Empty,
            error.type = field::Empty,
            gen_ai.operation.name = operation,
            gen_ai.request.model = Some(&request.model).filter(|model| !model.is_empty()),
            gen_ai.response.model = field::Empty,
            gen_ai.request.max_tokens = field::Empty,
            gen_ai.request.temperature = field::Empty,
            gen_ai.request.top_p = field::Empty,
            gen_ai.request.seed = field::Empty,
            gen_ai.response.id = %request.id,
            baton.tenant = %request.tenant,
            gen_ai.response.finish_reasons = field::Empty,
            gen_ai.usage.input_tokens = field::Empty,
            gen_ai.usage.output_tokens = field::Empty,
            baton.cached_tokens = field::Empty,
            baton.cache_write_tokens = field::Empty,
            baton.recomputed_tokens = field::Empty,
            baton.placement.reason = field::Empty,
            baton.queue_ms = field::Empty,
            baton.ttft_ms = field::Empty,
            baton.retries = field::Empty,
            baton.slow = field::Empty,
        );
        baton_node::telemetry::set_parent_http(&span, &request.headers);
        span
    }

    /// The model that is asked for. Where nobody of it is ready, waits a moment: workers that were out of sight come back.
    async fn served_model(&self, request: &GenerationRequest) -> Result<Arc<ServedModel>, RequestError> {
        let until = request.deadline.min(Instant::now() + self.limits.retry.ready_max);
        loop {
            let now = Instant::now();
            match lookup(&self.workers.models(now), &request.model) {
                Err(error) if error.kind == ErrorKind::Unavailable && now < until => {}
                Err(error)
                    if error.kind == ErrorKind::ModelNotFound && self.workers.may_be_back(&request.model, now) =>
                {
                    if now >= until {
                        let message =
                            format!("no decode worker of {:.256?} is ready to serve; try again later", request.model);
                        return Err(RequestError::new(ErrorKind::Unavailable, message));
                    }
                }
                found => return found,
            }
            tokio::select! {
                () = tokio::time::sleep(self.limits.retry.backoff_min) => {}
                () = self.abort.cancelled() => {
                    return Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; send the request again"));
                }
            }
        }
    }

    async fn start(self: &Arc<Self>, request: &GenerationRequest, span: &Span) -> Result<Generation, RequestError> {
        if self.draining.is_cancelled() {
            return Err(RequestError::new(
                ErrorKind::Unavailable,
                "this router is draining; send the request to another",
            ));
        }
        if request.deadline <= Instant::now() {
            return Err(RequestError::new(
                ErrorKind::DeadlineExceeded,
                "the deadline had passed when the request came",
            ));
        }
        request.sampling.check()?;
        check_stop_strings(&request.stop)?;
        check_priority(request.priority)?;
        check_samples(request.samples)?;
        let cache = self.cache.resolve(&request.tenant, &request.cache)?;
        let key = request.key.as_ref();
        let mut quota = self.quotas.enter(key, request.samples, request.priority)?;
        let turns = self.admission.enter_all(request.samples, request.priority, key.map(|key| key.id))?;
        let model = self.served_model(request).await?;
        span.record("gen_ai.response.model", model.card.id.as_str());
        if model.text.is_none() && !request.stop.is_empty() {
            return Err(RequestError::invalid("stop", "this model has no text; use stop_token_ids"));
        }
        check_vocab("stop_token_ids", &request.sampling.stop_token_ids, &model.card)?;
        let tokenize = tracing::info_span!(parent: span, "tokenize");
        let tokens =
            self.tokenizing.run(&request.prompt, model.text.clone(), model.tokens_max, request.deadline, turns);
        let (tokens, turns) = tokens.instrument(tokenize).await?;
        check_tokens(&tokens, &model.card)?;
        let sampling = request.sampling.resolve(&model.card.defaults, tokens.len(), model.tokens_max)?;
        quota.add_tokens(tokens.len() as u64 + u64::from(request.samples) * u64::from(sampling.max_tokens))?;
        span.record("gen_ai.request.max_tokens", sampling.max_tokens);
        span.record("gen_ai.request.temperature", f64::from(sampling.temperature));
        span.record("gen_ai.request.top_p", f64::from(sampling.top_p));
        span.record("gen_ai.request.seed", sampling.seed);
        let stops = StopMatcher::new(&request.stop).map_err(RequestError::from)?;
        let tokens: Arc<[TokenId]> = tokens.into();
        let names = names::names_of(cache.as_ref(), &model.card.fingerprint, &tokens).await?;
        let metrics = self.metrics.of(&model.card.id);
        let (out, events) = mpsc::channel(self.limits.client_events_max + turns.len()); // Ends have slots of their own.
        let generation = Generation {
            id: request.id.clone(),
            model: model.clone(),
            prompt_tokens: tokens.clone(),
            samples: request.samples,
            seed: sampling.seed,
            trace_id: trace_id(span),
            events: Events::new(events, self.unread.token()),
        };
        let prepared = Prepared { model, tokens, cache, names, sampling, stops, metrics, span: span.clone() };
        let policy = request.prefill_policy.unwrap_or(self.limits.policy);
        run::start(self, Job::new(request, policy, prepared), (turns, quota), out);
        Ok(generation)
    }
}

fn trace_id(span: &Span) -> String {
    baton_node::telemetry::trace_id_of(span).unwrap_or_default()
}
