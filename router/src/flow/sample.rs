//! One sample of a request, from its turn to its end: attempts, until one brings the answer to its end.

use super::Core;
use super::answer::{Answer, AnswerLimits, Clocked};
use super::attempt::{Attempt, Failed};
use super::job::Job;
use super::place::Chosen;
use crate::admission::Place;
use crate::output::{EventResult, Finished};
use crate::placement::{Ended, Prediction};
use crate::recovery::{Avoided, Failure, GiveUp, Phase, Recovery};
use baton_types::{ErrorKind, FinishReason, RequestError};
use futures::poll;
use parking_lot::Mutex;
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::Instrument;

/// A sample of a request.
pub(super) struct Sample<'a> {
    pub(super) job: &'a Job,
    /// Which one.
    pub(super) index: u32,
    queued: OnceLock<Duration>,
    /// When the first attempt began, and when its answer was predicted; `None` once there was another.
    predicted: Mutex<Option<(Instant, Prediction)>>,
    /// Whether it left a decode worker that had no room for one that seemed to have some.
    pub(super) moved: AtomicBool,
}

/// The request's first token is that of the sample whose first token leaves first.
impl Clocked for Sample<'_> {
    fn first_token(&self, after: Duration) {
        if self.job.starts() {
            self.job.metrics.first_token(after);
        }
    }

    fn next_token(&self, after: Duration) {
        self.job.metrics.current().inter_token.observe(after.as_secs_f64());
    }
}

impl<'a> Sample<'a> {
    pub(super) fn new(job: &'a Job, index: u32) -> Self {
        let (queued, predicted, moved) = (OnceLock::new(), Mutex::default(), AtomicBool::new(false));
        Self { job, index, queued, predicted, moved }
    }

    /// Its answer, of which there is nothing yet.
    pub(super) fn answer<'b>(&'b self, out: &'b mpsc::Sender<EventResult>, limits: AnswerLimits) -> Answer<'b> {
        let job = self.job;
        let prompt = (job.tokens.len() as u32, job.received);
        let (text, logprobs) = (job.model.text.as_deref(), job.sampling.logprobs.is_some());
        Answer::new(out, limits, (self.index, text), job.stops.clone(), logprobs, prompt, self, &job.span)
    }

    /// What the end teaches. A client that did not read stopped the workers as well, so that time is none of theirs.
    pub(super) fn ended(&self, answer: &Answer<'_>, finished: bool) -> Ended {
        let took =
            |(since, predicted): (Instant, Prediction)| (since.elapsed().saturating_sub(answer.stalled()), predicted);
        Ended { tokens: answer.usage().completion_tokens, finished, took: self.predicted.lock().map(took) }
    }

    /// Waits for its turn. Only where it waits is there a span.
    async fn turn(&self, turn: &mut Place) -> Result<(), RequestError> {
        let mut run = pin!(turn.run());
        match poll!(run.as_mut()) {
            Poll::Ready(result) => result,
            Poll::Pending => run.instrument(tracing::info_span!(parent: &self.job.span, "queue")).await,
        }
    }

    /// How long the sample waited for its turn in this router.
    pub(super) fn queued(&self) -> Duration {
        self.queued.get().copied().unwrap_or_default()
    }

    /// Waits for its turn, then places and runs; goes on elsewhere when workers fail.
    pub(super) async fn run(
        &self,
        core: &Core,
        mut turn: Place,
        answer: &mut Answer<'_>,
    ) -> Result<Finished, RequestError> {
        self.turn(&mut turn).await?;
        let _ = self.queued.set(self.job.received.elapsed());
        let (mut recovery, mut avoided, mut retries) = (Recovery::new(core.limits.retry), Avoided::default(), 0);
        // What workers said: the last one that failed, and the last one that was full.
        let (mut worker_said, mut full): (Option<RequestError>, Option<RequestError>) = (None, None);
        loop {
            let chosen = self.place(core, (&avoided, full.as_ref()), answer);
            if retries == 0
                && let Ok(chosen) = &chosen
            {
                self.job.metrics.current().queue.observe(self.queued().as_secs_f64());
                *self.predicted.lock() = chosen.predicted.map(|predicted| (Instant::now(), predicted));
            }
            let result = match &chosen {
                Ok(chosen) => self.attempt(core, chosen, retries, answer).await,
                Err(failed) => Err(failed.clone()),
            };
            let Failed { error, phase } = match result {
                Ok(reason) => return Ok(answer.finished(reason)),
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
            // What a worker said is more than that no other is left; that the others are full says when to come again, and that there is
            // no time left that nobody should.
            let said = match (phase, error.kind) {
                (Phase::Place, ErrorKind::Overloaded | ErrorKind::DeadlineExceeded) => error,
                (Phase::Place, _) => worker_said.clone().unwrap_or(error),
                _ => error,
            };
            let times = (Instant::now(), self.job.deadline);
            let retry = match recovery.after(&failure, times, &core.retries, rand::random()) {
                Ok(retry) => retry,
                Err(why) => {
                    // Early refusals are no failures.
                    if retries > 0 || chosen.is_ok() {
                        self.job.metrics.current().gave_up(why);
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
            tracing::info!(request = %self.job.id, tenant = %self.job.tenant, phase = phase.name(), error = %said, tokens = answer.tokens().len(), "places the request anew");
            if let Ok(chosen) = &chosen {
                chosen.failed(&retry, &mut avoided, &core.limits.probation);
                retries += 1;
                *self.predicted.lock() = None;
                self.job.metrics.current().retried(phase);
                self.job.span.record("baton.retries", retries);
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
        self.job.metrics.current().replayed_tokens.inc_by(answer.tokens().len() as u64);
        let class = &chosen.decode.record.class;
        if let Some(began) = answer.class().filter(|began| *began != class) {
            tracing::warn!(request = %self.job.id, %began, goes_on = %class, "no decode worker of the answer's numerics class is left; another goes on, and the answer says so");
        }
        answer.runs_on(class);
        let reason = Attempt { core, sample: self, chosen, number }.run(answer).await?;
        chosen.served();
        Ok(reason)
    }
}
