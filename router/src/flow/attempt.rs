//! One attempt at a request on chosen workers: claim, prefill, tokens, end. It goes on where the answer stands: what the client has
//! been sent so far is prefilled behind the prompt.
//!
//! Dropping the attempt drops both streams, which cancels both workers at once.

use super::Core;
use super::answer::Answer;
use super::dial::{Spans, attempt_id, ended_early, of_worker, open_decode, open_prefill, out_of_order};
use super::end;
use super::place::Chosen;
use super::remote::Remote;
use super::sample::Sample;
use crate::recovery::Phase;
use baton_proto::v1::{self, decode_event::Event as Decode, decode_request::Prefill};
use baton_types::{ErrorKind, FinishReason, RequestError};
use tokio::time::timeout;
use tonic::Streaming;
use tracing::Span;
use tracing::field::Empty;

/// An attempt that failed.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    /// What the client is told if nothing else helps.
    pub(super) error: RequestError,
    /// Where a worker failed; `None` where the request itself ended.
    pub(super) phase: Option<Phase>,
}

impl From<RequestError> for Failed {
    fn from(error: RequestError) -> Self {
        Self { error, phase: None }
    }
}

impl Failed {
    /// The failure of a worker. What a worker cancelled, no client did.
    pub(super) fn at(phase: Phase, error: RequestError) -> Self {
        let kind = if error.kind == ErrorKind::Cancelled { ErrorKind::Unavailable } else { error.kind };
        Self { error: RequestError { kind, ..error }, phase: Some(phase) }
    }
}

/// Workers and bounds of one attempt.
pub(super) struct Attempt<'a> {
    pub(super) core: &'a Core,
    pub(super) sample: &'a Sample<'a>,
    pub(super) chosen: &'a Chosen,
    /// Attempts before this one.
    pub(super) number: u32,
}

impl Attempt<'_> {
    /// Runs until the answer ends.
    pub(super) async fn run(&self, answer: &mut Answer<'_>) -> Result<FinishReason, Failed> {
        let decode = &self.chosen.decode;
        let span = tracing::info_span!(
            parent: &self.sample.job.span, "claim", otel.kind = "client", otel.status_code = Empty, error.type = Empty,
            baton.worker = %decode.party(), baton.attempt = self.number, baton.sample = self.sample.index, baton.replayed_tokens = answer.tokens().len(),
        );
        self.sample.job.asks(decode);
        let replayed = answer.tokens().len();
        let result = self.run_under(&span, answer).await;
        // Behind the first token, the prefill has its span behind it.
        if let Err(Failed { error, phase: Some(phase) }) = &result
            && (*phase != Phase::Prefill || answer.tokens().len() > replayed)
        {
            end::failed(&span, error);
        }
        result
    }

    async fn run_under(&self, span: &Span, answer: &mut Answer<'_>) -> Result<FinishReason, Failed> {
        let (job, decode) = (self.sample.job, &self.chosen.decode);
        let sequence = self.sequence(answer);
        let replayed = answer.tokens().len();
        let how = match &self.chosen.prefill {
            None => Prefill::Local(v1::LocalPrefill {}),
            Some(p) => Prefill::AwaitKv(v1::AwaitKv { source: Some(p.party().clone().into()) }),
        };
        let spans = Spans { call: span, request: &job.span };
        let claim = async {
            let mut stream = open_decode(decode, job.deadline, sequence.clone(), how, spans).await?;
            match stream.message().await.map_err(|s| of_worker(decode, &s))?.and_then(|e| e.event) {
                Some(Decode::Claimed(_)) => Ok(stream),
                Some(_) => Err(out_of_order(decode)),
                None => Err(ended_early(decode)),
            }
        };
        let late = |_| {
            let message = format!(
                "decode worker {} took no claim within {:?}",
                decode.party().instance,
                self.core.limits.claim_max
            );
            RequestError::new(ErrorKind::Unavailable, message)
        };
        let claimed = timeout(self.core.limits.claim_max, claim).await.map_err(late).flatten();
        let stream = claimed.map_err(|e| Failed::at(Phase::Claim, e))?;
        let Some(prefill) = &self.chosen.prefill else { return self.follow(stream, answer).await };
        let span = tracing::info_span!(
            parent: &job.span, "prefill", otel.kind = "client", otel.status_code = Empty, error.type = Empty,
            baton.worker = %prefill.party(), baton.attempt = self.number, baton.sample = self.sample.index, baton.replayed_tokens = replayed,
        );
        job.asks(prefill);
        let handover = (decode.as_ref(), self.chosen.pull_to_tokens);
        let run = open_prefill(prefill, handover, job.deadline, sequence, Spans { call: &span, ..spans }).await;
        let run = run.inspect_err(|e| end::failed(&span, e)).map_err(|e| Failed::at(Phase::Prefill, e))?;
        Remote::new((self.core, self.sample), decode, stream, prefill, (run, span)).follow(answer).await
    }

    /// The prompt and what was generated so far: samplers rebuild their state from the tokens.
    fn sequence(&self, answer: &Answer<'_>) -> v1::Sequence {
        let job = self.sample.job;
        let prompt = &job.tokens;
        baton_types::SequenceSpec {
            request_id: attempt_id(&job.id),
            tokens: [prompt, answer.tokens()].concat(),
            prompt_len: prompt.len(),
            sampling: job.sampling.clone(),
            sample_index: self.sample.index,
            priority: job.priority,
            cache: job.cache.clone(),
        }
        .into()
    }

    /// Prefill and decode on one worker.
    async fn follow(
        &self,
        mut stream: Streaming<v1::DecodeEvent>,
        answer: &mut Answer<'_>,
    ) -> Result<FinishReason, Failed> {
        let worker = &self.chosen.decode;
        let failed = |error| Failed::at(Phase::Decode, error);
        loop {
            let event = match stream.message().await.map_err(|s| failed(of_worker(worker, &s)))? {
                Some(message) => message.event.ok_or_else(|| failed(out_of_order(worker)))?,
                None => return Err(failed(ended_early(worker))),
            };
            match event {
                Decode::Started(started) => answer.queued(self.sample.queued(), started.queue_us),
                Decode::Token(token) => {
                    let token = sound(token).map_err(failed)?;
                    answer.prefilled(token.prefill_us);
                    if let Some(reason) = answer.token(token, None).await? {
                        return Ok(reason);
                    }
                }
                Decode::Claimed(_) | Decode::Adopted(_) | Decode::Waits(_) => return Err(failed(out_of_order(worker))),
            }
        }
    }
}

/// A token of the answer. One that comes with a cancel is none: the worker gave the sequence up.
pub(super) fn sound(token: v1::Token) -> Result<v1::Token, RequestError> {
    if token.finish_reason() == v1::FinishReason::Cancelled {
        return Err(RequestError::new(ErrorKind::Unavailable, "the worker cancelled the request; send it again"));
    }
    Ok(token)
}
