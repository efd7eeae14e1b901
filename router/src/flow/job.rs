//! One admitted request, from its turn to its end.

use super::answer::{Answer, AnswerLimits, Clocked};
use super::attempt::{Attempt, Failed};
use super::{Core, end};
use crate::admission::Place;
use crate::metrics::RequestMetrics;
use crate::output::{EventResult, Finished};
use crate::placement::{Demand, Refusal, place};
use crate::request::PrefillPolicy;
use crate::workers::{ServedModel, WorkerHandle};
use baton_text::StopMatcher;
use baton_types::{ErrorKind, Party, RequestError, RequestId, SamplingParams, TokenId};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

/// A request with its tokens.
pub(super) struct Job {
    pub(super) id: RequestId,
    pub(super) model: ServedModel,
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) sampling: SamplingParams,
    pub(super) stops: StopMatcher,
    pub(super) policy: PrefillPolicy,
    pub(super) received: Instant,
    pub(super) deadline: Instant,
    pub(super) span: Span,
    pub(super) metrics: RequestMetrics,
    queued: OnceLock<Duration>,
}

/// What [`Job::new`] takes besides what is in the request.
pub(super) struct Prepared {
    pub(super) model: ServedModel,
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) sampling: SamplingParams,
    pub(super) stops: StopMatcher,
    pub(super) metrics: RequestMetrics,
    pub(super) span: Span,
}

impl Clocked for RequestMetrics {
    fn first_token(&self, after: Duration) {
        self.current().time_to_first_token.observe(after.as_secs_f64());
    }

    fn next_token(&self, after: Duration) {
        self.current().inter_token.observe(after.as_secs_f64());
    }
}

impl Job {
    pub(super) fn new(request: &crate::request::GenerationRequest, policy: PrefillPolicy, prepared: Prepared) -> Self {
        let Prepared { model, tokens, sampling, stops, metrics, span } = prepared;
        let (id, received, deadline) = (request.id.clone(), request.received, request.deadline);
        Self { id, model, tokens, sampling, stops, policy, received, deadline, span, metrics, queued: OnceLock::new() }
    }

    /// How long the request waited for its turn in this router.
    pub(super) fn queued(&self) -> Duration {
        self.queued.get().copied().unwrap_or_default()
    }

    /// Runs the request to its end and tells the client about it. Ends early when the client goes, the deadline passes or the router stops.
    pub(super) async fn run(self, core: Arc<Core>, mut turn: Place, out: mpsc::Sender<EventResult>) {
        // Taken before anything else is sent: a client that stopped reading still finds out why it was cut off.
        let end = out.clone().try_reserve_owned().ok();
        let limits =
            AnswerLimits { max_tokens: self.sampling.max_tokens, client_stall_max: core.limits.client_stall_max };
        let prompt = (self.tokens.len() as u32, self.received);
        let text = self.model.text.as_deref();
        let logprobs = self.sampling.logprobs.is_some();
        let mut answer =
            Answer::new(&out, limits, text, self.stops.clone(), logprobs, prompt, &self.metrics, &self.span);
        let result = tokio::select! {
            biased;
            () = out.closed() => Err(RequestError::new(ErrorKind::Cancelled, "the client is gone")),
            () = core.abort.cancelled() => Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; send the request again")),
            () = tokio::time::sleep_until(self.deadline.into()) => {
                Err(RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before the answer was finished"))
            }
            result = self.attempts(&core, &mut turn, &mut answer) => result,
        };
        end::record(&self, &result, &answer.usage(), answer.first_token_at());
        drop(answer);
        if let Some(end) = end {
            end.send(result.map(crate::output::Event::Finished));
        }
    }

    /// Waits for its turn, then places and runs; places anew when a worker fails before the client saw anything.
    async fn attempts(&self, core: &Core, turn: &mut Place, answer: &mut Answer<'_>) -> Result<Finished, RequestError> {
        turn.run().await;
        let _ = self.queued.set(self.received.elapsed());
        let mut excluded: Vec<Party> = Vec::new();
        let mut last: Option<RequestError> = None;
        for _ in 0..core.limits.attempts_max {
            let (decode, prefill) = match self.place(core, &excluded) {
                Ok(chosen) => chosen,
                // What a worker said is more than that no other is left.
                Err(refused) => return Err(last.unwrap_or(refused)),
            };
            let claim_max = core.limits.claim_max;
            let attempt = Attempt { job: self, decode: &decode, prefill: prefill.as_deref(), claim_max };
            match attempt.run(answer).await {
                Ok(reason) => return Ok(answer.finished(reason)),
                Err(Failed { error, culprit: None }) => return Err(error),
                Err(Failed { error, culprit: Some(culprit) }) => {
                    tracing::info!(request = %self.id, worker = %culprit, %error, "places the request anew");
                    excluded.push(culprit);
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| {
            RequestError::new(ErrorKind::Unavailable, "no worker served the request; send it again")
        }))
    }

    fn place(
        &self,
        core: &Core,
        excluded: &[Party],
    ) -> Result<(Arc<WorkerHandle>, Option<Arc<WorkerHandle>>), RequestError> {
        let span = tracing::info_span!(parent: &self.span, "place", baton.placement.reason = tracing::field::Empty);
        let _entered = span.enter();
        let now = Instant::now();
        let candidates = core.workers.candidates(&self.model.key, excluded, now);
        let prompt_tokens = self.tokens.len() as u64;
        let demand = Demand {
            prompt_tokens,
            total_tokens: prompt_tokens + u64::from(self.sampling.max_tokens),
            policy: self.policy,
            time_left: self.deadline.saturating_duration_since(now),
        };
        let mut draw = |n| rand::random_range(0..n);
        let decision = place(&candidates.view, &demand, &core.limits.placement, &mut draw).map_err(|r| refused(&r))?;
        let reason = decision.reason.name();
        span.record("baton.placement.reason", reason);
        self.span.record("baton.placement.reason", reason);
        let decode = candidates.handles[decision.decode].clone();
        self.metrics.placed(&decode.record.pool, decision.reason);
        if excluded.is_empty() {
            self.metrics.current().queue.observe(self.queued().as_secs_f64());
        }
        let prefill = decision.prefill.map(|p| candidates.handles[p].clone());
        decode.load.placed(if prefill.is_some() { 0 } else { prompt_tokens }, prompt_tokens);
        if let Some(prefill) = &prefill {
            prefill.load.placed(prompt_tokens, prompt_tokens);
        }
        Ok((decode, prefill))
    }
}

fn refused(refusal: &Refusal) -> RequestError {
    match *refusal {
        Refusal::NoDecodeWorker => {
            RequestError::new(ErrorKind::Unavailable, "no decode worker of this model is ready; try again later")
        }
        Refusal::NoPrefillWorker => {
            let message = "no prefill worker fits a decode worker of this model, and the prefill policy is remote";
            RequestError::new(ErrorKind::Unavailable, message)
        }
        Refusal::NeverFits { tokens_max } => {
            let message = format!("prompt and max_tokens together exceed the largest KV pool of {tokens_max} tokens");
            RequestError::new(ErrorKind::ContextLengthExceeded, message)
        }
        Refusal::Full { retry_after } => {
            RequestError::new(ErrorKind::Overloaded, "all workers of this model are full; try again later")
                .retry_after(retry_after)
        }
        Refusal::TooLate { first_token } => {
            let message = format!(
                "the first token is predicted in {:.1} s, after the deadline; try again later",
                first_token.as_secs_f64()
            );
            RequestError::new(ErrorKind::Overloaded, message).retry_after(first_token.min(RETRY_AFTER_MAX))
        }
    }
}

/// A longer wait is no prediction any more.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Starts the task of a job; it lives as long as its client listens.
pub(super) fn spawn(core: &Arc<Core>, job: Job, turn: Place, out: mpsc::Sender<EventResult>) {
    let span = job.span.clone();
    core.tasks.spawn(job.run(core.clone(), turn, out).instrument(span));
}
