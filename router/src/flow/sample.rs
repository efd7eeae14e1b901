//! One sample of a request, from its turn to its end: attempts, until one completes the answer.

use super::answer::Answer;
use super::attempt::{Attempt, Failed};
use super::core::Core;
use super::job::Job;
use super::prepare::PreparedPrompt;
use crate::admission::Slot;
use crate::output::Finished;
use crate::placement::{Ended, Prediction, Standing};
use crate::recovery::{Avoided, Failure, GiveUp, Recovery, Step};
use baton_types::{ErrorKind, NumericsClass, RequestError};
use futures::poll;
use parking_lot::Mutex;
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::task::Poll;
use std::time::{Duration, Instant};
use tracing::Instrument;

/// A sample of a prompt of a request.
pub(super) struct Sample<'a> {
    pub(super) job: &'a Job,
    /// Its number among the answers of all prompts.
    pub(super) index: u32,
    queued: OnceLock<Duration>,
    /// When the first attempt began, and its predicted time; `None` after a second attempt.
    predicted: Mutex<Option<(Instant, Prediction)>>,
    /// The tenant's standing at its first attempt.
    standing: OnceLock<Standing>,
    /// Whether it moved from a decode worker without room to another one.
    pub(super) moved: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Tried {
    pub(super) avoided: Avoided,
    retries: u32,
    /// The last error of a worker that failed.
    said: Option<RequestError>,
    /// The last refusal of a worker that was full.
    pub(super) full: Option<RequestError>,
}

impl<'a> Sample<'a> {
    pub(super) fn new(job: &'a Job, index: u32) -> Self {
        let (queued, standing) = (OnceLock::new(), OnceLock::new());
        let predicted = Mutex::default();
        let moved = AtomicBool::new(false);
        Self { job, index, queued, predicted, standing, moved }
    }

    /// The prompt that it answers.
    pub(super) fn prompt(&self) -> &'a PreparedPrompt {
        &self.job.prompts[self.job.choices().prompt_of(self.index)]
    }

    /// Whether it reports the log-probabilities of its prompt: the first sample does, for all.
    pub(super) fn scores(&self) -> bool {
        self.job.sampling.prompt_logprobs.is_some() && self.of_prompt() == 0
    }

    /// Its number among the answers of its prompt: with the seed, it gives the random numbers.
    pub(super) fn of_prompt(&self) -> u32 {
        self.index % self.job.samples
    }

    /// Feeds the measured times back. If the client did not read, the workers paused, so that time is not theirs.
    pub(super) fn ended(&self, answer: &Answer<'_>, finished: bool, now: Instant) -> Ended {
        let took = |(since, predicted): (Instant, Prediction)| {
            (now.saturating_duration_since(since).saturating_sub(answer.stalled()), predicted)
        };
        Ended {
            tenant: self.job.share().tenant,
            standing: self.standing.get().copied().unwrap_or(Standing::ALONE),
            tokens: answer.usage().completion_tokens,
            // What generates nothing says nothing of lengths.
            finished: finished && self.prompt().max_tokens > 0,
            // Predictions ignore priorities, so what waited behind others for its own low priority teaches nothing.
            took: self.predicted.lock().filter(|_| self.job.priority >= 0).map(took),
        }
    }

    /// How long the sample was queued in this router.
    pub(super) fn queued(&self) -> Duration {
        self.queued.get().copied().unwrap_or_default()
    }

    /// Waits for its turn, then places and runs; continues on other workers after failures.
    pub(super) async fn run(
        &self,
        core: &Core,
        mut slot: Slot,
        answer: &mut Answer<'_>,
    ) -> Result<Finished, RequestError> {
        self.turn(&mut slot).await?;
        let _ = self.queued.set(core.runtime.now().saturating_duration_since(self.job.received));
        if self.job.sampling.prompt_logprobs.is_some() && !self.scores() {
            // Answers show what the first sample reports before their own tokens.
            self.job.begun(self.job.choices().prompt_of(self.index)).await;
        }
        let mut recovery = Recovery::new(core.limits.retry);
        let mut tried = Tried::default();
        loop {
            let chosen = self.place(core, &tried, answer);
            let Failed { error, step } = match &chosen {
                Ok(chosen) => {
                    if tried.retries == 0 {
                        self.job.metrics.current().queue.observe(self.queued().as_secs_f64());
                        let _ = self.standing.set(chosen.standing);
                        *self.predicted.lock() = chosen.predicted.map(|predicted| (core.runtime.now(), predicted));
                    }
                    self.goes_on_with(&chosen.decode.record.class, answer);
                    match (Attempt { core, sample: self, chosen, number: tried.retries }).run(answer).await {
                        Ok(reason) => {
                            chosen.served();
                            return Ok(answer.finished(reason));
                        }
                        Err(failed) => failed,
                    }
                }
                Err(failed) => failed.clone(),
            };
            let Some(step) = step else { return Err(error) };
            let failure = Failure {
                step,
                kind: error.kind,
                retry_after: error.retry_after,
                started: answer.has_started(),
                drained: chosen.as_ref().is_ok_and(|chosen| chosen.drains(step)),
            };
            // A worker's error says more than "no other worker is left". But "the others are full" gives a retry time,
            // and "no time left" prevents a useless retry.
            let said = match (step, error.kind) {
                (Step::Place, ErrorKind::Overloaded | ErrorKind::DeadlineExceeded) => error,
                (Step::Place, _) => tried.said.clone().unwrap_or(error),
                _ => error,
            };
            let (now, jitter) = (core.runtime.now(), core.runtime.random_share());
            let retry = match recovery.after(&failure, now, self.job.deadline, &core.retries, jitter) {
                Ok(retry) => retry,
                Err(why) => {
                    // Early refusals do not count as failures.
                    if tried.retries > 0 || chosen.is_ok() {
                        self.job.metrics.current().gave_up(why);
                    }
                    return Err(match why {
                        // A failure this shortly before the deadline was mostly caused by it.
                        GiveUp::Deadline if step != Step::Place => {
                            let message = format!("the deadline leaves no time for another attempt: {}", said.message);
                            RequestError::new(ErrorKind::DeadlineExceeded, message)
                        }
                        // The attempts went to workers in trouble because another one was full: it is the one to come
                        // again for, and states when.
                        GiveUp::Attempts | GiveUp::Budget
                            if !failure.started && failure.kind != ErrorKind::Overloaded =>
                        {
                            self.refused_as_full(core, &tried, step.roles()).unwrap_or(said)
                        }
                        _ => said,
                    });
                }
            };
            tracing::info!(request = %self.job.id, tenant = %self.job.tenant, phase = step.name(), error = %said, tokens = answer.tokens().len(), "retries the request on other workers");
            if let Ok(chosen) = &chosen {
                chosen.failed(&retry, &mut tried.avoided, &core.limits.probation, now);
                tried.retries += 1;
                *self.predicted.lock() = None;
                self.job.metrics.current().retried(step);
                self.job.span.record("baton.retries", tried.retries);
                if failure.kind == ErrorKind::Overloaded {
                    tried.full = Some(said.clone());
                }
                tried.said = Some(said);
            }
            core.runtime.sleep(retry.after).await;
        }
    }

    /// Waits for its turn. A span is recorded only if it has to wait.
    async fn turn(&self, slot: &mut Slot) -> Result<(), RequestError> {
        let mut turn = pin!(slot.turn());
        match poll!(turn.as_mut()) {
            Poll::Ready(result) => result,
            Poll::Pending => turn.instrument(tracing::info_span!(parent: &self.job.span, "queue")).await,
        }
    }

    /// Workers of this numerics class continue the answer.
    fn goes_on_with(&self, class: &NumericsClass, answer: &mut Answer<'_>) {
        self.job.metrics.current().replayed_tokens.inc_by(answer.tokens().len() as u64);
        if let Some(began) = answer.class().filter(|began| *began != class) {
            tracing::warn!(request = %self.job.id, %began, goes_on = %class, "no decode worker of the answer's numerics class is left: another class continues the answer, which reports it");
        }
        answer.runs_on(class);
    }
}
