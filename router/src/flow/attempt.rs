//! One attempt at a request on chosen workers: claim, prefill, tokens, end. It continues the answer: the tokens already
//! sent to the client are prefilled after the prompt.
//!
//! Dropping the attempt drops both calls, which cancels both workers at once.

use super::answer::Answer;
use super::core::Core;
use super::end;
use super::place::Chosen;
use super::sample::Sample;
use crate::port::{CallError, CallSpans, DecodeCall, PrefillCall, WorkerEvents};
use crate::recovery::{FromDecode, FromPrefill, Next, Pair, PrefillFault, Step};
use crate::status::OpenHandoff;
use crate::workers::WorkerHandle;
use baton_types::{
    DecodeEvent, ErrorKind, FinishReason, GeneratedToken, PrefillEvent, RequestError, RequestId, Runtime,
    SamplingParams, SequenceSpec, TransferReport, seeded,
};
use futures::StreamExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::Span;
use tracing::field::Empty;

/// The prefill worker reports its transfer shortly after the decode worker continues; a short answer may end before.
const REPORT_WAIT_MAX: Duration = Duration::from_millis(100);

/// An attempt that failed.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    /// The error for the client if no retry succeeds.
    pub(super) error: RequestError,
    /// The step at which a worker failed; `None` if the request itself ended.
    pub(super) step: Option<Step>,
}

impl From<RequestError> for Failed {
    fn from(error: RequestError) -> Self {
        Self { error, step: None }
    }
}

impl Failed {
    /// The failure of a worker. A sequence that the worker cancelled was not cancelled by the client.
    pub(super) fn at(step: Step, error: RequestError) -> Self {
        let kind = if error.kind == ErrorKind::Cancelled { ErrorKind::Unavailable } else { error.kind };
        Self { error: RequestError { kind, ..error }, step: Some(step) }
    }
}

/// Workers and limits of one attempt.
pub(super) struct Attempt<'a> {
    pub(super) core: &'a Core,
    pub(super) sample: &'a Sample<'a>,
    pub(super) chosen: &'a Chosen,
    /// Number of earlier attempts.
    pub(super) number: u32,
}

/// A prefill worker that runs the prompt, and its span up to the first token. Later reports are about the handoff.
struct Prefilling<'a> {
    worker: &'a WorkerHandle,
    events: WorkerEvents<PrefillEvent>,
    span: Span,
}

impl Attempt<'_> {
    /// Runs until the answer ends.
    pub(super) async fn run(&self, answer: &mut Answer<'_>) -> Result<FinishReason, Failed> {
        let job = self.sample.job;
        let decode = &self.chosen.decode;
        let replayed = answer.tokens().len();
        let claim = tracing::info_span!(
            parent: &job.span, "claim", otel.kind = "client", otel.status_code = Empty, error.type = Empty,
            baton.worker = %decode.party(), baton.attempt = self.number, baton.sample = self.sample.index, baton.replayed_tokens = replayed,
        );
        job.calls(decode);
        let sequence = self.sequence(answer);
        let result = async {
            let Some(prefill) = &self.chosen.prefill else {
                let events = self.claim(sequence, &claim).await?;
                return self.follow_one(events, answer).await;
            };
            let events = self.claim(sequence.clone(), &claim).await?;
            let span = tracing::info_span!(
                parent: &job.span, "prefill", otel.kind = "client", otel.status_code = Empty, error.type = Empty,
                baton.worker = %prefill.party(), baton.attempt = self.number, baton.sample = self.sample.index, baton.replayed_tokens = replayed,
            );
            let prefilling = self.prefill(prefill, sequence, span).await?;
            self.follow_two(events, prefilling, answer).await
        }
        .await;
        // After the first token, the span of the prefill has ended.
        if let Err(Failed { error, step: Some(step) }) = &result
            && (*step != Step::Prefill || answer.tokens().len() > replayed)
        {
            end::failed(&claim, error);
        }
        result
    }

    /// The prompt and what was generated so far: samplers rebuild their state from the tokens.
    fn sequence(&self, answer: &Answer<'_>) -> SequenceSpec {
        let (job, prompt) = (self.sample.job, self.sample.prompt());
        let replayed_as_prompt = if seeded!(ReplayAsPrompt) { answer.tokens().len() } else { 0 };
        SequenceSpec {
            request_id: attempt_id(&job.id, &*self.core.runtime),
            tokens: [&prompt.tokens, answer.tokens()].concat(),
            prompt_len: prompt.tokens.len() + replayed_as_prompt,
            sampling: SamplingParams {
                max_tokens: prompt.max_tokens.max(1),
                prompt_logprobs: job.sampling.prompt_logprobs.filter(|_| answer.scores()),
                ..job.sampling.clone()
            },
            sample_index: self.sample.of_prompt(),
            priority: job.priority,
            cache: job.cache.clone(),
            share: job.share(),
            adapter: job.adapter.as_ref().map(|adapter| adapter.digest),
        }
    }

    /// Opens the call that holds the claim on the decode worker. The worker must confirm the claim within a time limit.
    async fn claim(&self, sequence: SequenceSpec, span: &Span) -> Result<WorkerEvents<DecodeEvent>, Failed> {
        let job = self.sample.job;
        let worker = &self.chosen.decode;
        let runtime = &*self.core.runtime;
        let max = self.core.limits.claim_max;
        let claimed = async {
            self.check_deadline()?;
            let source = self.chosen.prefill.as_ref().map(|prefill| prefill.party());
            let spans = CallSpans { call: span, request: &job.span };
            let call = DecodeCall { sequence, source, deadline: job.deadline, spans };
            let mut events = worker.link().decode(call).await.map_err(|e| of_worker(worker, e))?;
            match events.next().await {
                Some(Ok(DecodeEvent::Claimed)) => Ok(events),
                Some(Ok(_)) => Err(out_of_order(worker)),
                Some(Err(e)) => Err(of_worker(worker, e)),
                None => Err(ended_early(worker)),
            }
        };
        let late = || {
            let message = format!("decode worker {} took no claim within {max:?}", worker.party().instance);
            Err(RequestError::new(ErrorKind::Unavailable, message))
        };
        let claimed = runtime.until(runtime.now() + max, claimed).await.unwrap_or_else(late);
        claimed.map_err(|e| Failed::at(Step::Claim, e))
    }

    /// Calls the prefill worker for the sequence that the decode worker has claimed capacity for.
    async fn prefill<'a>(
        &self,
        worker: &'a Arc<WorkerHandle>,
        sequence: SequenceSpec,
        span: Span,
    ) -> Result<Prefilling<'a>, Failed> {
        let job = self.sample.job;
        job.calls(worker);
        let call = PrefillCall {
            sequence,
            sink: &self.chosen.decode.record,
            get_to_tokens: self.chosen.get_to_tokens,
            deadline: job.deadline,
            spans: CallSpans { call: &span, request: &job.span },
        };
        let opened = async {
            self.check_deadline()?;
            worker.link().prefill(call).await.map_err(|e| of_worker(worker, e))
        };
        match opened.await {
            Ok(events) => Ok(Prefilling { worker, events, span }),
            Err(error) => {
                end::failed(&span, &error);
                Err(Failed::at(Step::Prefill, error))
            }
        }
    }

    fn check_deadline(&self) -> Result<(), RequestError> {
        if self.core.runtime.now() < self.sample.job.deadline {
            return Ok(());
        }
        Err(RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before a worker was called"))
    }

    /// Prefill and decode on one worker.
    async fn follow_one(
        &self,
        mut events: WorkerEvents<DecodeEvent>,
        answer: &mut Answer<'_>,
    ) -> Result<FinishReason, Failed> {
        let worker = &self.chosen.decode;
        let failed = |error| Failed::at(Step::Decode, error);
        loop {
            match events.next().await {
                Some(Ok(DecodeEvent::Started { queue_us })) => answer.queued(self.sample.queued(), queue_us),
                Some(Ok(DecodeEvent::Prompt(part))) => answer.prompt(part).await?,
                Some(Ok(DecodeEvent::Token(token))) => {
                    let token = sound(token).map_err(failed)?;
                    answer.prefilled(token.prefill_us);
                    if let Some(reason) = self.token(answer, token, None).await? {
                        return Ok(reason);
                    }
                }
                Some(Ok(DecodeEvent::Claimed | DecodeEvent::Adopted { .. } | DecodeEvent::Waits)) => {
                    return Err(failed(out_of_order(worker)));
                }
                Some(Err(error)) => return Err(failed(of_worker(worker, error))),
                None => return Err(failed(ended_early(worker))),
            }
        }
    }

    /// Prefill on one worker, decode on another: follows both until the answer ends or one of them fails. The first
    /// token is sent as soon as the prefill worker has it, independent of the transfer.
    async fn follow_two(
        &self,
        mut decoding: WorkerEvents<DecodeEvent>,
        Prefilling { worker: prefill, events, span }: Prefilling<'_>,
        answer: &mut Answer<'_>,
    ) -> Result<FinishReason, Failed> {
        let (runtime, decode) = (&*self.core.runtime, &self.chosen.decode);
        let (mut prefilling, mut span) = (Some(events), Some(span));
        let mut handoff = Some(self.core.handoffs.open(&prefill.party().instance, &decode.party().instance));
        let mut pair: Pair<GeneratedToken, RequestError> = Pair::new(self.core.limits.retry.adopted_max);
        let reason = loop {
            if let Some(token) = pair.early()
                && let Some(reason) = self.token(answer, token, None).await?
            {
                break reason;
            }
            let due = pair.due(runtime.now());
            tokio::select! {
                biased;
                event = next(&mut prefilling), if prefilling.is_some() => {
                    let event = match event {
                        Some(Ok(PrefillEvent::Started { queue_us })) => {
                            answer.queued(self.sample.queued(), queue_us);
                            continue;
                        }
                        Some(Ok(PrefillEvent::Prompt(part))) => {
                            answer.prompt(part).await?;
                            continue;
                        }
                        event => event,
                    };
                    let report = if let Some(Ok(PrefillEvent::Done(report))) = &event { Some(report.clone()) } else { None };
                    let fault = |fault| match fault {
                        PrefillFault::OutOfOrder => out_of_order(prefill),
                        PrefillFault::NotAdopted => not_adopted(prefill, decode),
                    };
                    let next = pair.prefill(from_prefill(prefill, event)?, fault, runtime.now());
                    if !pair.reads_prefill() {
                        prefilling = None;
                    }
                    match next {
                        Next::Nothing => {}
                        Next::Token(token) => {
                            answer.prefilled(token.prefill_us);
                            if let Some(reason) = self.token(answer, token, span.take()).await? {
                                return Ok(reason);
                            }
                        }
                        Next::Done => report.iter().for_each(|report| self.moved(handoff.take(), report, answer)),
                        Next::Failed(step, error) => {
                            span.iter().for_each(|span| end::failed(span, &error));
                            return Err(Failed::at(step, error));
                        }
                    }
                }
                event = decoding.next(), if pair.reads_decode() => {
                    match &event {
                        Some(Ok(DecodeEvent::Started { .. })) => continue,
                        Some(Ok(DecodeEvent::Waits)) => {
                            self.wait_or_move(answer)?;
                            continue;
                        }
                        _ => {}
                    }
                    match pair.decode(from_decode(decode, event)?, runtime.now()) {
                        Next::Token(token) => {
                            if let Some(reason) = self.token(answer, token, None).await? {
                                break reason;
                            }
                        }
                        Next::Failed(step, error) => return Err(Failed::at(step, error)),
                        Next::Nothing | Next::Done => {}
                    }
                }
                () = sleep_until(runtime, due), if due.is_some() => {
                    let (step, error) = pair.overdue().expect("there is something due");
                    return Err(Failed::at(step, error));
                }
            }
        };
        // The transfer's figures may not have arrived yet.
        if let Some(mut prefilling) = prefilling {
            let report = async {
                while let Some(Ok(event)) = prefilling.next().await {
                    if let PrefillEvent::Done(report) = event {
                        return Some(report);
                    }
                }
                None
            };
            let report = runtime.until(runtime.now() + REPORT_WAIT_MAX, report).await.flatten();
            report.iter().for_each(|report| self.moved(handoff.take(), report, answer));
        }
        Ok(reason)
    }

    /// The prefill worker reports its handoff.
    fn moved(&self, handoff: Option<OpenHandoff<'_>>, report: &TransferReport, answer: &mut Answer<'_>) {
        answer.transferred(report);
        handoff.into_iter().for_each(|open| open.done(&self.sample.job.id, report, self.core.runtime.now()));
    }

    /// A token of the answer; the finish reason if it is the last one.
    async fn token(
        &self,
        answer: &mut Answer<'_>,
        token: GeneratedToken,
        prefill: Option<Span>,
    ) -> Result<Option<FinishReason>, RequestError> {
        self.chosen.began();
        answer.token(token, prefill).await
    }

    /// The decode worker has no room for the KV yet. Moving loses the prefill, so the request waits unless another
    /// decode worker has room now. It moves at most once: competing requests could otherwise make it move until it has
    /// no attempts left. Waiting guarantees its turn.
    fn wait_or_move(&self, answer: &Answer<'_>) -> Result<(), Failed> {
        let (moved, decode) = (&self.sample.moved, &self.chosen.decode);
        let stays = moved.load(Ordering::Relaxed) && !seeded!(EndlessMoves);
        if stays || !self.sample.has_room_elsewhere(self.core, decode, answer) {
            #[cfg(test)]
            self.core.stays.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        moved.store(true, Ordering::Relaxed);
        let message = format!("decode worker {} had no room in time for the KV", decode.party().instance);
        Err(Failed::at(Step::Claim, RequestError::new(ErrorKind::Overloaded, message)))
    }
}

/// The next event of the prefill worker, while its stream is open.
async fn next(events: &mut Option<WorkerEvents<PrefillEvent>>) -> Option<Result<PrefillEvent, CallError>> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(runtime: &dyn Runtime, at: Option<std::time::Instant>) {
    match at {
        Some(at) => runtime.sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// An event of the prefill worker, as input of the pair's state.
fn from_prefill(
    worker: &WorkerHandle,
    event: Option<Result<PrefillEvent, CallError>>,
) -> Result<FromPrefill<GeneratedToken, RequestError>, Failed> {
    Ok(match event {
        Some(Ok(PrefillEvent::Token(token))) => {
            FromPrefill::Token(sound(token).map_err(|e| Failed::at(Step::Prefill, e))?)
        }
        Some(Ok(PrefillEvent::Done(_))) => FromPrefill::Done,
        Some(Ok(PrefillEvent::Started { .. } | PrefillEvent::Prompt(_))) => FromPrefill::Ended(out_of_order(worker)),
        // The prefill worker's own queue had room, or there would be no stream: the error is about the decode worker.
        Some(Err(error)) if error.is_no_room() => FromPrefill::NoRoom(of_worker(worker, error)),
        Some(Err(error)) => FromPrefill::Ended(of_worker(worker, error)),
        None => FromPrefill::Ended(ended_early(worker)),
    })
}

/// An event of the decode worker, as input of the pair's state.
fn from_decode(
    worker: &WorkerHandle,
    event: Option<Result<DecodeEvent, CallError>>,
) -> Result<FromDecode<GeneratedToken, RequestError>, Failed> {
    Ok(match event {
        Some(Ok(DecodeEvent::Adopted { .. })) => FromDecode::Adopted,
        Some(Ok(DecodeEvent::Token(token))) => {
            FromDecode::Token(sound(token).map_err(|e| Failed::at(Step::Decode, e))?)
        }
        Some(Ok(DecodeEvent::Claimed | DecodeEvent::Started { .. } | DecodeEvent::Waits | DecodeEvent::Prompt(_))) => {
            FromDecode::Broke(out_of_order(worker))
        }
        Some(Err(error @ CallError::Refused(_))) => {
            let cancelled = error.error().kind == ErrorKind::Cancelled;
            FromDecode::Stated { cancelled, error: of_worker(worker, error) }
        }
        Some(Err(error)) => FromDecode::Broke(of_worker(worker, error)),
        None => FromDecode::Broke(ended_early(worker)),
    })
}

/// Checks a token of the answer. A token with finish reason cancel is an error: the worker dropped the sequence.
fn sound(token: GeneratedToken) -> Result<GeneratedToken, RequestError> {
    if token.finish == Some(FinishReason::Cancelled) {
        return Err(RequestError::new(ErrorKind::Unavailable, "the worker cancelled the request; send it again"));
    }
    Ok(token)
}

/// Hex digits that make the id of an attempt unique on a worker.
const ATTEMPT_HEX: usize = 16;

/// The id of one attempt on the workers: two clients may use the same request id, and a retry may meet its own earlier
/// attempt.
fn attempt_id(request: &RequestId, runtime: &dyn Runtime) -> RequestId {
    if seeded!(OlderIncarnation) {
        return request.clone();
    }
    let kept = &request.as_str()[..request.as_str().len().min(RequestId::BYTES_MAX - ATTEMPT_HEX - 1)];
    let id = format!("{kept}.{:016x}", runtime.random());
    RequestId::try_new(id).expect("a cut name and hex digits are a name")
}

fn name_of(worker: &WorkerHandle) -> String {
    format!("{} worker {}", worker.record.role.name(), worker.party().instance)
}

/// A worker's refusal or the loss of its connection, prefixed with the worker's name.
fn of_worker(worker: &WorkerHandle, error: CallError) -> RequestError {
    let who = name_of(worker);
    let (is_gone, error) = match error {
        CallError::Refused(error) => (false, error),
        CallError::Lost(error) => (error.kind == ErrorKind::Unavailable, error),
    };
    let message = match is_gone {
        true => format!("{who} is gone or cannot be reached ({}); send the request again", error.message),
        false => format!("{who}: {}", error.message),
    };
    RequestError { message, ..error }
}

/// A worker sent its events in the wrong order.
fn out_of_order(worker: &WorkerHandle) -> RequestError {
    let message = format!("{} sent an event that does not belong here", name_of(worker));
    RequestError::new(ErrorKind::Internal, message)
}

/// A prefill worker has handed its KV over, but the decode worker does not report that it adopted it.
fn not_adopted(prefill: &WorkerHandle, decode: &WorkerHandle) -> RequestError {
    let (prefill, decode) = (&prefill.party().instance, &decode.party().instance);
    let message = format!(
        "prefill worker {prefill} has handed the KV over and decode worker {decode} did not adopt it; send the request again"
    );
    RequestError::new(ErrorKind::Unavailable, message)
}

/// The stream of a worker ended before the sequence did.
fn ended_early(worker: &WorkerHandle) -> RequestError {
    let message =
        format!("{} ended its stream before the sequence was finished; send the request again", name_of(worker));
    RequestError::new(ErrorKind::Unavailable, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::runtime::TokioRuntime;

    #[tokio::test]
    async fn attempts_of_one_id_differ_and_stay_names() {
        let attempt_id = |id: &RequestId| attempt_id(id, &TokioRuntime::current());
        for id in ["a".to_owned(), "x".repeat(128)] {
            let id = RequestId::try_new(id).unwrap();
            assert_ne!(attempt_id(&id), attempt_id(&id));
            assert!(attempt_id(&id).as_str().starts_with(&id.as_str()[..1]));
        }
    }
}
