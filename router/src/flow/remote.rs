//! Prefill on one worker, decode on another: follows both streams until the answer ends or one of the two is at fault.

use super::answer::Answer;
use super::attempt::{Failed, sound};
use super::dial::{ended_early, of_worker, out_of_order};
use super::job::Job;
use crate::recovery::Phase;
use crate::workers::WorkerHandle;
use baton_proto::convert::status::stated_error;
use baton_proto::v1::{self, decode_event::Event as Decode, prefill_event::Event as Run};
use baton_types::{ErrorKind, FinishReason};
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::{Status, Streaming};
use tracing::Span;

/// The prefill worker reports its transfer a moment after the decode worker goes on; a short answer may end before.
const REPORT_WAIT_MAX: Duration = Duration::from_millis(100);
/// A prefill worker that fails after its first token may have handed all KV over; the decode worker gets so long to say so.
const ADOPTION_WAIT_MAX: Duration = Duration::from_millis(500);
/// A prefill worker whose sequence ended with its first token gives the handoff up, and the decode worker's word of that may come before
/// the token does; the prefill worker gets so long to say it.
const LAST_WORD_WAIT_MAX: Duration = Duration::from_millis(500);

type PrefillStream = (Streaming<v1::PrefillEvent>, Span);

/// Both streams, and what is known so far.
pub(super) struct Remote<'a> {
    job: &'a Job,
    decode: &'a WorkerHandle,
    prefill: &'a WorkerHandle,
    stream: Streaming<v1::DecodeEvent>,
    run: Option<PrefillStream>,
    /// The prefill worker's token came. Whatever the decode worker says comes after it.
    first: bool,
    /// Token of the decode worker that overtook the first one: the two come over different connections.
    early: Option<v1::Token>,
    adopted: bool,
    /// The decode worker's stream ended because the prefill worker gave the handoff up.
    given_up: bool,
    /// A failure that stands unless something better is heard until then.
    doubt: Option<(Failed, Instant)>,
}

impl<'a> Remote<'a> {
    pub(super) fn new(
        job: &'a Job,
        decode: &'a WorkerHandle,
        stream: Streaming<v1::DecodeEvent>,
        prefill: &'a WorkerHandle,
        run: PrefillStream,
    ) -> Self {
        let (first, early, adopted, given_up, doubt) = (false, None, false, false, None);
        Self { job, decode, prefill, stream, run: Some(run), first, early, adopted, given_up, doubt }
    }

    /// Runs until the answer ends. The first token goes out when the prefill worker has it, whatever the transfer does.
    pub(super) async fn follow(mut self, answer: &mut Answer<'_>) -> Result<FinishReason, Failed> {
        loop {
            if self.first
                && let Some(token) = self.early.take()
                && let Some(reason) = answer.token(token).await?
            {
                return Ok(self.with_report(reason, answer).await);
            }
            // Nothing better can come of a handoff that was given up with the first token not the last.
            let until =
                self.doubt.as_ref().map(|(_, at)| if self.first && self.given_up { Instant::now() } else { *at });
            tokio::select! {
                event = next_run(&mut self.run), if self.run.is_some() => {
                    if let Some(reason) = self.on_prefill(event, answer).await? {
                        return Ok(reason);
                    }
                }
                message = self.stream.message(), if self.early.is_none() && !self.given_up => {
                    if let Some(reason) = self.on_decode(message, answer).await? {
                        return Ok(self.with_report(reason, answer).await);
                    }
                }
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                    return Err(self.doubt.expect("until comes from it").0);
                }
            }
        }
    }

    async fn on_prefill(
        &mut self,
        event: Result<Option<Run>, Status>,
        answer: &mut Answer<'_>,
    ) -> Result<Option<FinishReason>, Failed> {
        let failed = |error| Failed::at(Phase::Prefill, error);
        match event {
            Ok(Some(Run::Started(started))) => answer.queued(self.job.queued(), started.queue_us),
            Ok(Some(Run::Token(token))) if !self.first => {
                let token = sound(token).map_err(failed)?;
                self.first = true;
                answer.prefilled(token.prefill_us);
                return Ok(answer.token(token).await?);
            }
            Ok(Some(Run::Done(done))) if self.first => {
                answer.transferred(&done);
                self.run = None;
            }
            Ok(Some(Run::Token(_) | Run::Done(_))) => return Err(failed(out_of_order(self.prefill))),
            Ok(None) | Err(_) => {
                self.run = None;
                let error = event.err().map_or_else(|| ended_early(self.prefill), |s| of_worker(self.prefill, &s));
                if !self.first {
                    return Err(failed(error));
                }
                if !self.adopted {
                    self.doubt = Some((failed(error), Instant::now() + ADOPTION_WAIT_MAX));
                }
            }
        }
        Ok(None)
    }

    async fn on_decode(
        &mut self,
        message: Result<Option<v1::DecodeEvent>, Status>,
        answer: &mut Answer<'_>,
    ) -> Result<Option<FinishReason>, Failed> {
        let failed = |error| Failed::at(Phase::Decode, error);
        let event = match message {
            Ok(Some(message)) => message.event.ok_or_else(|| failed(out_of_order(self.decode)))?,
            Ok(None) => return Err(failed(ended_early(self.decode))),
            Err(status) => {
                let error = of_worker(self.decode, &status);
                // What the decode worker itself says before it adopts is about the handoff; a broken stream is about the worker.
                let Some(stated) = stated_error(&status).filter(|_| !self.adopted) else { return Err(failed(error)) };
                let may_have_ended = stated.kind == ErrorKind::Cancelled && !self.first && self.run.is_some();
                // What the prefill worker's stream said came first, and is the cause.
                let cause = self.doubt.take().map_or_else(|| Failed::at(Phase::Handoff, error), |(cause, _)| cause);
                if !may_have_ended {
                    return Err(cause);
                }
                self.given_up = true;
                self.doubt = Some((cause, Instant::now() + LAST_WORD_WAIT_MAX));
                return Ok(None);
            }
        };
        match event {
            Decode::Adopted(_) => (self.adopted, self.doubt) = (true, None),
            Decode::Token(token) => {
                let token = sound(token).map_err(failed)?;
                (self.adopted, self.doubt) = (true, None);
                if self.first {
                    return Ok(answer.token(token).await?);
                }
                self.early = Some(token);
            }
            Decode::Started(_) => {}
            Decode::Claimed(_) => return Err(failed(out_of_order(self.decode))),
        }
        Ok(None)
    }

    /// The answer ended; waits a moment for the transfer's numbers where they are not there yet.
    async fn with_report(self, reason: FinishReason, answer: &mut Answer<'_>) -> FinishReason {
        if let Some((mut run, _)) = self.run {
            let report = async {
                while let Ok(Some(event)) = run.message().await {
                    if let Some(Run::Done(done)) = event.event {
                        return Some(done);
                    }
                }
                None
            };
            if let Ok(Some(done)) = timeout(REPORT_WAIT_MAX, report).await {
                answer.transferred(&done);
            }
        }
        reason
    }
}

/// The next event of a prefill worker; `None` at the end of its stream. Never ready where there is no stream.
async fn next_run(run: &mut Option<PrefillStream>) -> Result<Option<Run>, Status> {
    match run {
        Some((stream, _)) => match stream.message().await? {
            Some(v1::PrefillEvent { event: Some(event) }) => Ok(Some(event)),
            Some(_) => Err(Status::internal("an event without content")),
            None => Ok(None),
        },
        None => std::future::pending().await,
    }
}
