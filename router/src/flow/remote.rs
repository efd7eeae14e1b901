//! Prefill on one worker, decode on another: follows both streams until the answer ends or one of the two is at fault.

use super::Core;
use super::answer::Answer;
use super::attempt::{Failed, sound};
use super::dial::{ended_early, not_adopted, of_worker, out_of_order};
use super::end;
use super::sample::Sample;
use crate::recovery::{FromDecode, FromPrefill, Pair, Phase, Says, Unlike};
use crate::workers::WorkerHandle;
use baton_proto::convert::status::stated_error;
use baton_proto::v1::{self, decode_event::Event as Decode, prefill_event::Event as Run};
use baton_types::{ErrorKind, FinishReason, RequestError};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::{Status, Streaming};
use tracing::Span;

/// The prefill worker reports its transfer a moment after the decode worker goes on; a short answer may end before.
const REPORT_WAIT_MAX: Duration = Duration::from_millis(100);
type PrefillStream = Streaming<v1::PrefillEvent>;

/// Both streams, and what is known so far.
pub(super) struct Remote<'a> {
    core: &'a Core,
    sample: &'a Sample<'a>,
    decode: &'a WorkerHandle,
    prefill: &'a WorkerHandle,
    stream: Streaming<v1::DecodeEvent>,
    run: Option<PrefillStream>,
    /// Of the prefill, up to its first token: what its stream tells then is of the handoff.
    span: Option<Span>,
    pair: Pair<v1::Token, RequestError>,
}

impl<'a> Remote<'a> {
    pub(super) fn new(
        (core, sample): (&'a Core, &'a Sample<'a>),
        decode: &'a WorkerHandle,
        stream: Streaming<v1::DecodeEvent>,
        prefill: &'a WorkerHandle,
        (run, span): (PrefillStream, Span),
    ) -> Self {
        let pair = Pair::new(core.limits.retry.adopted_max);
        Self { core, sample, decode, prefill, stream, run: Some(run), span: Some(span), pair }
    }

    /// Runs until the answer ends. The first token goes out when the prefill worker has it, whatever the transfer does.
    pub(super) async fn follow(mut self, answer: &mut Answer<'_>) -> Result<FinishReason, Failed> {
        loop {
            if let Some(token) = self.pair.early()
                && let Some(reason) = answer.token(token, None).await?
            {
                return Ok(self.with_report(reason, answer).await);
            }
            let until = self.pair.due(Instant::now().into_std()).map(Instant::from_std);
            tokio::select! {
                event = next_run(&mut self.run), if self.run.is_some() => {
                    if let Some(reason) = self.on_prefill(event, answer).await? {
                        return Ok(reason);
                    }
                }
                message = self.stream.message(), if self.pair.hears_decode() => {
                    if let Some(reason) = self.on_decode(message, answer).await? {
                        return Ok(self.with_report(reason, answer).await);
                    }
                }
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                    let (phase, error) = self.pair.overdue().expect("until comes from it");
                    return Err(Failed::at(phase, error));
                }
            }
        }
    }

    async fn on_prefill(
        &mut self,
        event: Result<Option<Run>, Status>,
        answer: &mut Answer<'_>,
    ) -> Result<Option<FinishReason>, Failed> {
        let (prefill, failed) = (self.prefill, |error| Failed::at(Phase::Prefill, error));
        let mut done_with = None;
        let event = match event {
            Ok(Some(Run::Started(started))) => {
                answer.queued(self.sample.queued(), started.queue_us);
                return Ok(None);
            }
            Ok(Some(Run::Token(token))) => FromPrefill::Token(sound(token).map_err(failed)?),
            Ok(Some(Run::Done(done))) => {
                done_with = Some(done);
                FromPrefill::Done
            }
            Ok(None) => FromPrefill::Ended(ended_early(prefill)),
            // Its own queue had room, or there were no stream.
            Err(status) if stated_error(&status).is_some_and(|stated| stated.kind == ErrorKind::Overloaded) => {
                FromPrefill::NoRoom(of_worker(prefill, &status))
            }
            Err(status) => FromPrefill::Ended(of_worker(prefill, &status)),
        };
        let decode = self.decode;
        let otherwise = |unlike| match unlike {
            Unlike::OutOfOrder => out_of_order(prefill),
            Unlike::NotAdopted => not_adopted(prefill, decode),
        };
        let said = self.pair.prefill(event, otherwise, Instant::now().into_std());
        if !self.pair.hears_prefill() {
            self.run = None;
        }
        match said {
            Says::Nothing => Ok(None),
            Says::Token(token) => {
                answer.prefilled(token.prefill_us);
                Ok(answer.token(token, self.span.take()).await?)
            }
            Says::Done => {
                done_with.iter().for_each(|done| answer.transferred(done));
                Ok(None)
            }
            Says::Failed(phase, error) => {
                self.span.iter().for_each(|span| end::failed(span, &error));
                Err(Failed::at(phase, error))
            }
        }
    }

    async fn on_decode(
        &mut self,
        message: Result<Option<v1::DecodeEvent>, Status>,
        answer: &mut Answer<'_>,
    ) -> Result<Option<FinishReason>, Failed> {
        let (decode, failed) = (self.decode, |error| Failed::at(Phase::Decode, error));
        let event = match message {
            Ok(Some(message)) => match message.event {
                Some(Decode::Adopted(_)) => FromDecode::Adopted,
                Some(Decode::Token(token)) => FromDecode::Token(sound(token).map_err(failed)?),
                Some(Decode::Started(_)) => return Ok(None),
                Some(Decode::Waits(_)) => return self.no_room_yet(answer),
                Some(Decode::Claimed(_)) | None => FromDecode::Broke(out_of_order(decode)),
            },
            Ok(None) => FromDecode::Broke(ended_early(decode)),
            Err(status) => {
                let error = of_worker(decode, &status);
                match stated_error(&status) {
                    Some(stated) => FromDecode::Stated { cancelled: stated.kind == ErrorKind::Cancelled, error },
                    None => FromDecode::Broke(error),
                }
            }
        };
        match self.pair.decode(event, Instant::now().into_std()) {
            Says::Token(token) => Ok(answer.token(token, None).await?),
            Says::Failed(phase, error) => Err(Failed::at(phase, error)),
            Says::Nothing | Says::Done => Ok(None),
        }
    }

    /// The KV is worth nothing elsewhere, so the decode worker is waited for unless another has room now; and a request moves once: what
    /// others take meanwhile could send it to and fro until it has no attempts left, where waiting brings its turn.
    fn no_room_yet(&self, answer: &Answer<'_>) -> Result<Option<FinishReason>, Failed> {
        let moved = &self.sample.moved;
        let stays = moved.load(Ordering::Relaxed) || !self.sample.has_room_elsewhere(self.core, self.decode, answer);
        if stays {
            #[cfg(test)]
            self.core.stays.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        moved.store(true, Ordering::Relaxed);
        let message = format!("decode worker {} had no room in time for the KV", self.decode.party().instance);
        Err(Failed::at(Phase::Claim, RequestError::new(ErrorKind::Overloaded, message)))
    }

    /// The answer ended; waits a moment for the transfer's numbers where they are not there yet.
    async fn with_report(self, reason: FinishReason, answer: &mut Answer<'_>) -> FinishReason {
        if let Some(mut run) = self.run {
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
        Some(stream) => match stream.message().await? {
            Some(v1::PrefillEvent { event: Some(event) }) => Ok(Some(event)),
            Some(_) => Err(Status::internal("an event without content")),
            None => Ok(None),
        },
        None => std::future::pending().await,
    }
}
