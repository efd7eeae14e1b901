//! One attempt at a request on chosen workers: claim, prefill, first token, tokens, end.
//!
//! Dropping the attempt drops both streams, which cancels both workers at once.

use super::answer::Answer;
use super::dial::{attempt_id, ended_early, of_worker, open_decode, open_prefill};
use super::job::Job;
use crate::workers::WorkerHandle;
use baton_proto::convert::status::stated_error;
use baton_proto::v1::{self, decode_event::Event as Decode, decode_request::Prefill, prefill_event::Event as Run};
use baton_types::{ErrorKind, FinishReason, Party, RequestError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Streaming;
use tracing::Span;

/// The prefill worker reports its transfer a moment after the decode worker goes on; a short answer may end before.
const REPORT_WAIT_MAX: Duration = Duration::from_millis(100);
/// A prefill worker that fails after its first token may have handed all KV over; the decode worker gets so long to say so.
const ADOPTION_WAIT_MAX: Duration = Duration::from_millis(500);
/// A prefill worker whose sequence ended with its first token gives the handoff up, and the decode worker's word of that may come before
/// the token does; the prefill worker gets so long to say it.
const LAST_WORD_WAIT_MAX: Duration = Duration::from_millis(500);

/// An attempt that failed.
#[derive(Debug)]
pub(super) struct Failed {
    /// What the client is told if nothing else helps.
    pub(super) error: RequestError,
    /// The worker to avoid in the next attempt; `None` where no other attempt can help.
    pub(super) culprit: Option<Party>,
}

impl From<RequestError> for Failed {
    fn from(error: RequestError) -> Self {
        Self { error, culprit: None }
    }
}

/// The failure of a worker. Another one may help where the client has seen nothing yet.
fn failed(worker: &WorkerHandle, error: RequestError, answer: &Answer<'_>) -> Failed {
    let elsewhere = error.kind.is_retryable() && !answer.has_started();
    Failed { error, culprit: elsewhere.then(|| worker.party().clone()) }
}

/// A handoff that failed between two workers, before the client has seen anything: the decode worker had taken the claim, so the next
/// attempt does without the prefill worker, if need be by prefilling where it decodes.
fn handoff_failed(prefill: &WorkerHandle, error: RequestError) -> Failed {
    let is_final = matches!(error.kind, ErrorKind::DeadlineExceeded | ErrorKind::InvalidRequest);
    Failed { error, culprit: (!is_final).then(|| prefill.party().clone()) }
}

/// Workers and spans of one attempt.
pub(super) struct Attempt<'a> {
    pub(super) job: &'a Job,
    pub(super) decode: &'a WorkerHandle,
    pub(super) prefill: Option<&'a WorkerHandle>,
    pub(super) claim_max: Duration,
}

impl Attempt<'_> {
    /// Runs until the answer ends.
    pub(super) async fn run(&self, answer: &mut Answer<'_>) -> Result<FinishReason, Failed> {
        let id = attempt_id(&self.job.id);
        let span = tracing::info_span!(parent: &self.job.span, "decode", otel.kind = "client", baton.worker = %self.decode.party());
        let how = match self.prefill {
            None => Prefill::Local(v1::LocalPrefill {}),
            Some(p) => Prefill::AwaitKv(v1::AwaitKv { source: Some(p.party().clone().into()) }),
        };
        let claim = async {
            let mut stream = open_decode(self.decode, self.job, &id, how, &span).await?;
            match stream.message().await.map_err(|s| of_worker(self.decode, &s))?.and_then(|e| e.event) {
                Some(Decode::Claimed(_)) => Ok(stream),
                Some(_) => Err(out_of_order(self.decode)),
                None => Err(ended_early(self.decode)),
            }
        };
        let late = |_| {
            let message =
                format!("decode worker {} took no claim within {:?}", self.decode.party().instance, self.claim_max);
            RequestError::new(ErrorKind::Unavailable, message)
        };
        let claimed = timeout(self.claim_max, claim).await.map_err(late).flatten();
        let stream = claimed.map_err(|e| failed(self.decode, e, answer))?;
        match self.prefill {
            None => self.follow_decode(stream, answer).await,
            Some(prefill) => {
                let span = tracing::info_span!(parent: &self.job.span, "prefill", otel.kind = "client", baton.worker = %prefill.party());
                let run = open_prefill(prefill, self.decode, self.job, &id, &span).await;
                let run = run.map_err(|e| failed(prefill, e, answer))?;
                self.follow_both(prefill, run, stream, span, answer).await
            }
        }
    }

    /// Prefill and decode on one worker.
    async fn follow_decode(
        &self,
        mut stream: Streaming<v1::DecodeEvent>,
        answer: &mut Answer<'_>,
    ) -> Result<FinishReason, Failed> {
        loop {
            let event = self.next_decode(&mut stream).await.map_err(|e| failed(self.decode, e, answer))?;
            match event {
                Decode::Started(started) => self.add_queue(started.queue_us, answer),
                Decode::Token(token) => {
                    answer.timings.prefill_us = answer.timings.prefill_us.or(token.prefill_us);
                    if let Some(reason) = answer.token(token).await? {
                        return Ok(reason);
                    }
                }
                Decode::Claimed(_) | Decode::Adopted(_) => return Err(out_of_order(self.decode).into()),
            }
        }
    }

    /// Prefill on one worker, decode on another. The first token goes out when the prefill worker has it, whatever the transfer does.
    async fn follow_both(
        &self,
        prefill: &WorkerHandle,
        run: Streaming<v1::PrefillEvent>,
        mut stream: Streaming<v1::DecodeEvent>,
        span: Span,
        answer: &mut Answer<'_>,
    ) -> Result<FinishReason, Failed> {
        // Token of the decode worker that overtook the first one: the two come over different connections.
        let mut early: Option<v1::Token> = None;
        let mut adopted = false;
        let mut run = Some((run, span));
        let mut prefill_failed: Option<(RequestError, Instant)> = None;
        // The decode worker's stream ended because the prefill worker gave the handoff up.
        let mut given_up: Option<(RequestError, Instant)> = None;
        loop {
            if answer.has_started()
                && let Some((error, _)) = given_up
            {
                return Err(error.into());
            }
            if answer.has_started()
                && let Some(token) = early.take()
                && let Some(reason) = answer.token(token).await?
            {
                return Ok(self.with_report(reason, run.map(|(run, _)| run), answer).await);
            }
            let give_up = prefill_failed.as_ref().or(given_up.as_ref()).map(|(_, at)| *at);
            tokio::select! {
                event = next_run(&mut run), if run.is_some() => match event {
                    Ok(Some(Run::Started(started))) => self.add_queue(started.queue_us, answer),
                    Ok(Some(Run::Token(token))) if !answer.has_started() => {
                        answer.timings.prefill_us = token.prefill_us;
                        if let Some(reason) = answer.token(token).await? {
                            return Ok(reason);
                        }
                    }
                    Ok(Some(Run::Token(_))) => return Err(out_of_order(prefill).into()),
                    Ok(Some(Run::Done(done))) => {
                        add_report(&done, answer);
                        run = None;
                    }
                    Ok(None) if answer.has_started() => run = None,
                    Ok(None) => return Err(failed(prefill, ended_early(prefill), answer)),
                    Err(status) => {
                        run = None;
                        let error = of_worker(prefill, &status);
                        if !answer.has_started() {
                            return Err(failed(prefill, error, answer));
                        }
                        if !adopted {
                            prefill_failed = Some((error, Instant::now() + ADOPTION_WAIT_MAX));
                        }
                    }
                },
                message = stream.message(), if early.is_none() && given_up.is_none() => {
                    // What the decode worker itself says before it adopts is about the handoff; a broken stream is about the worker.
                    if let Err(status) = &message
                        && !adopted
                        && !answer.has_started()
                        && let Some(stated) = stated_error(status)
                    {
                        let error = of_worker(self.decode, status);
                        if stated.kind == ErrorKind::Cancelled && run.is_some() {
                            given_up = Some((error, Instant::now() + LAST_WORD_WAIT_MAX));
                            continue;
                        }
                        return Err(handoff_failed(prefill, error));
                    }
                    match self.decode_event(message).map_err(|e| failed(self.decode, e, answer))? {
                        Decode::Adopted(_) => {
                            adopted = true;
                            prefill_failed = None;
                        }
                        Decode::Token(token) if !answer.has_started() => early = Some(token),
                        Decode::Token(token) => {
                            (adopted, prefill_failed) = (true, None);
                            if let Some(reason) = answer.token(token).await? {
                                return Ok(self.with_report(reason, run.map(|(run, _)| run), answer).await);
                            }
                        }
                        Decode::Started(_) => {}
                        Decode::Claimed(_) => return Err(out_of_order(self.decode).into()),
                    }
                }
                () = sleep_until(give_up.unwrap_or_else(Instant::now)), if give_up.is_some() => {
                    return Err(match (prefill_failed, given_up) {
                        (None, Some((error, _))) => handoff_failed(prefill, error),
                        (failed, _) => failed.expect("give_up comes from one of them").0.into(),
                    });
                }
            }
        }
    }

    async fn next_decode(&self, stream: &mut Streaming<v1::DecodeEvent>) -> Result<Decode, RequestError> {
        self.decode_event(stream.message().await)
    }

    fn decode_event(&self, message: Result<Option<v1::DecodeEvent>, tonic::Status>) -> Result<Decode, RequestError> {
        match message {
            Ok(Some(v1::DecodeEvent { event: Some(event) })) => Ok(event),
            Ok(Some(_)) => Err(out_of_order(self.decode)),
            Ok(None) => Err(ended_early(self.decode)),
            Err(status) => Err(of_worker(self.decode, &status)),
        }
    }

    fn add_queue(&self, worker_us: u64, answer: &mut Answer<'_>) {
        let router_us = u64::try_from(self.job.queued().as_micros()).unwrap_or(u64::MAX);
        answer.timings.queue_us = Some(router_us.saturating_add(worker_us));
    }

    /// The answer ended; waits a moment for the transfer's numbers where they are not there yet.
    async fn with_report(
        &self,
        reason: FinishReason,
        run: Option<Streaming<v1::PrefillEvent>>,
        answer: &mut Answer<'_>,
    ) -> FinishReason {
        if let Some(mut run) = run {
            let report = async {
                while let Ok(Some(event)) = run.message().await {
                    if let Some(Run::Done(done)) = event.event {
                        return Some(done);
                    }
                }
                None
            };
            if let Ok(Some(done)) = timeout(REPORT_WAIT_MAX, report).await {
                add_report(&done, answer);
            }
        }
        reason
    }
}

/// The next event of a prefill worker; `None` at the end of its stream. Never ready where there is no stream.
async fn next_run(run: &mut Option<(Streaming<v1::PrefillEvent>, Span)>) -> Result<Option<Run>, tonic::Status> {
    match run {
        Some((stream, _)) => match stream.message().await? {
            Some(v1::PrefillEvent { event: Some(event) }) => Ok(Some(event)),
            Some(_) => Err(tonic::Status::internal("an event without content")),
            None => Ok(None),
        },
        None => std::future::pending().await,
    }
}

fn add_report(done: &v1::PrefillDone, answer: &mut Answer<'_>) {
    answer.timings.prefill_us = Some(done.prefill_us);
    answer.timings.transfer_us = Some(done.transfer_us);
    answer.timings.exposed_us = Some(done.exposed_us);
    answer.timings.transfer_bytes = Some(done.transfer_bytes);
}

fn out_of_order(worker: &WorkerHandle) -> RequestError {
    let who = format!("{} worker {}", worker.record.role.name(), worker.party().instance);
    RequestError::new(ErrorKind::Internal, format!("{who} sent an event that does not belong here"))
}
