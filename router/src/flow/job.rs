//! One admitted request, from its turn to its end.

use super::answer::{Answer, AnswerLimits, Clocked};
use super::attempt::{Attempt, Failed};
use super::place::Chosen;
use super::{Core, end};
use crate::admission::Place;
use crate::metrics::RequestMetrics;
use crate::output::{EventResult, Finished};
use crate::placement::{Ended, Prediction};
use crate::recovery::{Avoided, Failure, GiveUp, Phase, Recovery};
use crate::request::PrefillPolicy;
use crate::workers::{ServedModel, WorkerHandle};
use baton_kv_cache::PrefixHash;
use baton_text::StopMatcher;
use baton_types::{CacheUse, ErrorKind, FinishReason, RequestError, RequestId, SamplingParams, TenantId, TokenId};
use futures::poll;
use parking_lot::Mutex;
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

/// A request with its tokens.
pub(super) struct Job {
    pub(super) id: RequestId,
    pub(super) tenant: TenantId,
    pub(super) model: ServedModel,
    pub(super) tokens: Arc<[TokenId]>,
    /// How it uses prefix caches; `None` shares nothing.
    pub(super) cache: Option<CacheUse>,
    /// What could be cached of its prompt.
    pub(super) names: Arc<[PrefixHash]>,
    pub(super) sampling: SamplingParams,
    pub(super) stops: StopMatcher,
    pub(super) policy: PrefillPolicy,
    pub(super) priority: i32,
    pub(super) received: Instant,
    pub(super) deadline: Instant,
    pub(super) span: Span,
    pub(super) metrics: RequestMetrics,
    queued: OnceLock<Duration>,
    /// When the first attempt began, and when its answer was predicted; `None` once there was another.
    predicted: Mutex<Option<(Instant, Prediction)>>,
    /// Workers that were asked, in order.
    asked: Mutex<Vec<Arc<WorkerHandle>>>,
    /// Whether it left a decode worker that had no room for one that seemed to have some.
    pub(super) moved: AtomicBool,
}

/// What [`Job::new`] takes besides what is in the request.
pub(super) struct Prepared {
    pub(super) model: ServedModel,
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) cache: Option<CacheUse>,
    pub(super) names: Arc<[PrefixHash]>,
    pub(super) sampling: SamplingParams,
    pub(super) stops: StopMatcher,
    pub(super) metrics: RequestMetrics,
    pub(super) span: Span,
}

impl Clocked for RequestMetrics {
    fn first_token(&self, after: Duration) {
        RequestMetrics::first_token(self, after);
    }

    fn next_token(&self, after: Duration) {
        self.current().inter_token.observe(after.as_secs_f64());
    }
}

impl Job {
    pub(super) fn new(request: &crate::request::GenerationRequest, policy: PrefillPolicy, prepared: Prepared) -> Self {
        let Prepared { model, tokens, cache, names, sampling, stops, metrics, span } = prepared;
        let (id, tenant, priority) = (request.id.clone(), request.tenant.clone(), request.priority);
        let (received, deadline, queued) = (request.received, request.deadline, OnceLock::new());
        let (predicted, asked) = (Mutex::default(), Mutex::default());
        Self {
            id,
            tenant,
            model,
            tokens,
            cache,
            names,
            sampling,
            stops,
            policy,
            priority,
            received,
            deadline,
            span,
            metrics,
            queued,
            predicted,
            asked,
            moved: AtomicBool::new(false),
        }
    }

    /// What the end teaches. A client that did not read stopped the workers as well, so that time is none of theirs.
    fn ended(&self, answer: &Answer<'_>, finished: bool) -> Ended {
        let took =
            |(since, predicted): (Instant, Prediction)| (since.elapsed().saturating_sub(answer.stalled()), predicted);
        Ended { tokens: answer.usage().completion_tokens, finished, took: self.predicted.lock().map(took) }
    }

    /// Remembers a worker that is asked: it holds a part of the trace. Attempts are bounded, so these are.
    pub(super) fn asks(&self, worker: &Arc<WorkerHandle>) {
        self.asked.lock().push(worker.clone());
    }

    /// Workers that were asked.
    pub(super) fn asked(&self) -> Vec<Arc<WorkerHandle>> {
        self.asked.lock().clone()
    }

    /// Waits for its turn. Only where it waits is there a span.
    async fn turn(&self, turn: &mut Place) -> Result<(), RequestError> {
        let mut run = pin!(turn.run());
        match poll!(run.as_mut()) {
            Poll::Ready(result) => result,
            Poll::Pending => run.instrument(tracing::info_span!(parent: &self.span, "queue")).await,
        }
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
        end::record(&core, &self, &result, &answer.usage(), answer.first_token_at());
        core.experience.learn(&self.model.card.id, &self.ended(&answer, result.is_ok()), Instant::now());
        drop(answer);
        if let Some(end) = end {
            end.send(result.map(crate::output::Event::Finished));
        }
    }

    /// Waits for its turn, then places and runs; goes on elsewhere when workers fail.
    async fn attempts(&self, core: &Core, turn: &mut Place, answer: &mut Answer<'_>) -> Result<Finished, RequestError> {
        self.turn(turn).await?;
        let _ = self.queued.set(self.received.elapsed());
        let (mut recovery, mut avoided, mut retries) = (Recovery::new(core.limits.retry), Avoided::default(), 0);
        // What workers said: the last one that failed, and the last one that was full.
        let (mut worker_said, mut full): (Option<RequestError>, Option<RequestError>) = (None, None);
        loop {
            let chosen = self.place(core, (&avoided, full.as_ref()), answer);
            if retries == 0
                && let Ok(chosen) = &chosen
            {
                self.metrics.current().queue.observe(self.queued().as_secs_f64());
                *self.predicted.lock() = chosen.predicted.map(|predicted| (Instant::now(), predicted));
            }
            let result = match &chosen {
                Ok(chosen) => self.attempt(core, chosen, retries, answer).await,
                Err(failed) => Err(failed.clone()),
            };
            let Failed { error, phase } = match result {
                Ok(reason) => {
                    let cost = core.prices.cost(&self.model.card.id, &answer.usage());
                    return Ok(answer.finished(reason, cost));
                }
                Err(failed) => failed,
            };
            let Some(phase) = phase else { return Err(error) };
            let failure = Failure {
                phase,
                kind: error.kind,
                retry_after: error.retry_after,
                started: answer.has_started(),
                drained: chosen.as_ref().is_ok_and(|chosen| chosen.drains(phase)),
            };
            // What a worker said is more than that no other is left; that the others are full says when to come again.
            let said = match (phase, error.kind) {
                (Phase::Place, kind) if kind != ErrorKind::Overloaded => worker_said.clone().unwrap_or(error),
                _ => error,
            };
            let times = (Instant::now(), self.deadline);
            let retry = match recovery.after(&failure, times, &core.retries, rand::random()) {
                Ok(retry) => retry,
                Err(why) => {
                    // Early refusals are no failures.
                    if retries > 0 || chosen.is_ok() {
                        self.metrics.current().gave_up(why);
                    }
                    // What failed so shortly before the deadline mostly failed because of it.
                    return Err(if why == GiveUp::Deadline && phase != Phase::Place {
                        let message = format!("the deadline leaves no time for another attempt: {}", said.message);
                        RequestError::new(ErrorKind::DeadlineExceeded, message)
                    } else {
                        said
                    });
                }
            };
            tracing::info!(request = %self.id, tenant = %self.tenant, phase = phase.name(), error = %said, tokens = answer.tokens().len(), "places the request anew");
            if let Ok(chosen) = &chosen {
                chosen.failed(&retry, &mut avoided, &core.limits.probation);
                retries += 1;
                *self.predicted.lock() = None;
                self.metrics.current().retried(phase);
                self.span.record("baton.retries", retries);
                if failure.kind == ErrorKind::Overloaded {
                    full = Some(said.clone());
                }
                worker_said = Some(said);
            }
            tokio::time::sleep(retry.after).await;
        }
    }

    async fn attempt(
        &self,
        core: &Core,
        chosen: &Chosen,
        number: u32,
        answer: &mut Answer<'_>,
    ) -> Result<FinishReason, Failed> {
        self.metrics.current().replayed_tokens.inc_by(answer.tokens().len() as u64);
        let class = &chosen.decode.record.class;
        if let Some(began) = answer.class().filter(|began| *began != class) {
            tracing::warn!(request = %self.id, %began, goes_on = %class, "no decode worker of the answer's numerics class is left; another goes on, and the answer says so");
        }
        answer.runs_on(class);
        let reason = Attempt { core, job: self, chosen, number }.run(answer).await?;
        chosen.served();
        Ok(reason)
    }
}

/// Starts the task of a job; it lives as long as its client listens.
pub(super) fn spawn(core: &Arc<Core>, job: Job, turn: Place, out: mpsc::Sender<EventResult>) {
    let span = job.span.clone();
    // Within the span for log lines that it is started in.
    core.tasks.spawn(job.run(core.clone(), turn, out).in_current_span().instrument(span));
}
