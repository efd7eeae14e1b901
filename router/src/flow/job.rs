//! One admitted request: its samples run at once and end together.

use super::answer::{Answer, AnswerLimits};
use super::sample::Sample;
use super::{Core, end};
use crate::admission::Place;
use crate::metrics::RequestMetrics;
use crate::output::{Event, EventResult, Finished, Total, usage_of_all};
use crate::request::PrefillPolicy;
use crate::workers::{ServedModel, WorkerHandle};
use baton_kv_cache::PrefixHash;
use baton_text::StopMatcher;
use baton_types::{CacheUse, ErrorKind, RequestError, RequestId, SamplingParams, TenantId, TokenId};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::mpsc::{self, OwnedPermit};
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
    /// Whether the first token of any sample left.
    started: AtomicBool,
    /// Workers that were asked, in order.
    asked: Mutex<Vec<Arc<WorkerHandle>>>,
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

impl Job {
    pub(super) fn new(request: &crate::request::GenerationRequest, policy: PrefillPolicy, prepared: Prepared) -> Self {
        let Prepared { model, tokens, cache, names, sampling, stops, metrics, span } = prepared;
        let (id, tenant, priority) = (request.id.clone(), request.tenant.clone(), request.priority);
        let (received, deadline) = (request.received, request.deadline);
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
            started: AtomicBool::new(false),
            asked: Mutex::default(),
        }
    }

    /// Remembers a worker that is asked: it holds a part of the trace. Attempts are bounded, so these are.
    pub(super) fn asks(&self, worker: &Arc<WorkerHandle>) {
        self.asked.lock().push(worker.clone());
    }

    /// Workers that were asked.
    pub(super) fn asked(&self) -> Vec<Arc<WorkerHandle>> {
        self.asked.lock().clone()
    }

    /// Whether this is the first time that a token of the request leaves.
    pub(super) fn starts(&self) -> bool {
        !self.started.swap(true, Ordering::Relaxed)
    }

    /// Runs the request to its end and tells the client about it. Ends early when the client goes, the deadline passes or the router stops.
    /// Samples run at once; the first that fails ends all.
    pub(super) async fn run(self, core: Arc<Core>, turns: Vec<Place>, out: mpsc::Sender<EventResult>) {
        // Taken before anything else is sent: a client that stopped reading still finds out why it was cut off.
        let mut ends: Vec<_> = turns.iter().filter_map(|_| out.clone().try_reserve_owned().ok()).collect();
        let samples: Vec<Sample<'_>> = (0..turns.len() as u32).map(|index| Sample::new(&self, index)).collect();
        let limits =
            AnswerLimits { max_tokens: self.sampling.max_tokens, client_stall_max: core.limits.client_stall_max };
        let mut answers: Vec<_> = samples.iter().map(|sample| sample.answer(&out, limits)).collect();
        let running = samples.iter().zip(&mut answers).zip(turns);
        let running: FuturesUnordered<_> =
            running.map(|((sample, answer), turn)| sample.run(&core, turn, answer)).collect();
        let result = tokio::select! {
            biased;
            () = out.closed() => Err(RequestError::new(ErrorKind::Cancelled, "the client is gone")),
            () = core.abort.cancelled() => Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; send the request again")),
            () = tokio::time::sleep_until(self.deadline.into()) => {
                Err(RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before the answer was finished"))
            }
            result = all(running, &mut ends) => result,
        };
        let usage = usage_of_all(answers.iter().filter(|answer| answer.has_started()).map(Answer::usage));
        let usage = usage.unwrap_or_else(|| answers.first().map(Answer::usage).unwrap_or_default());
        let cost = core.prices.cost(&self.model.card.id, &usage);
        let summary = end::Summary {
            usage,
            cost: cost.as_ref(),
            queued: samples.iter().map(Sample::queued).min().unwrap_or_default(),
            first_token: answers.iter().filter_map(Answer::first_token_at).min(),
        };
        end::record(&core, &self, &result, &summary);
        for (sample, answer) in samples.iter().zip(&answers) {
            core.experience.learn(&self.model.card.id, &sample.ended(answer, result.is_ok()), Instant::now());
        }
        drop(answers);
        if let Some(end) = ends.pop() {
            end.send(result.map(|last| Event::Finished(Finished { total: Some(Total { usage, cost }), ..last })));
        }
    }
}

/// Tells the client of each sample that ends; the last one is the result.
async fn all(
    mut running: FuturesUnordered<impl Future<Output = Result<Finished, RequestError>>>,
    ends: &mut Vec<OwnedPermit<EventResult>>,
) -> Result<Finished, RequestError> {
    loop {
        let finished = match running.next().await {
            Some(result) => result?,
            None => return Err(RequestError::new(ErrorKind::Internal, "a request without samples")),
        };
        if running.is_empty() {
            return Ok(finished);
        }
        if let Some(end) = ends.pop() {
            end.send(Ok(Event::Finished(finished)));
        }
    }
}

/// Starts the task of a job with a sample for each turn; it lives as long as its client listens.
pub(super) fn spawn(core: &Arc<Core>, job: Job, turns: Vec<Place>, out: mpsc::Sender<EventResult>) {
    let span = job.span.clone();
    // Within the span for log lines that it is started in.
    core.tasks.spawn(job.run(core.clone(), turns, out).in_current_span().instrument(span));
}
