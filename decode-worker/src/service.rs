//! Serves one stream per request, from its claim to its last token.

use crate::handoffs::{Adopted, Handoffs, claim};
use crate::slot::Slot;
use baton_engine::api::{AdapterUse, Run, SequenceEvent};
use baton_types::{DecodeEvent, ErrorKind, GeneratedToken, Party, RequestError, RequestId, Runtime, SequenceSpec};
use baton_worker::call::CallContext;
use baton_worker::drain::RunningCall;
use baton_worker::hang::hung;
use baton_worker::lora::start_with;
use baton_worker::phases::{Phases, WorkerPhase};
use baton_worker::role::Parts;
use baton_worker::spans::{Parent, Phase};
use baton_worker::stream;
use baton_worker::submit::{engine_request, reused, submit_error};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot::error::RecvError;
use tokio::sync::{mpsc, oneshot};
use tracing::Instrument as _;

/// Messages between a stream's task and its connection. When they are full, the engine pauses the sequence.
const MESSAGES_MAX: usize = 8;
/// How often the router is notified that there is still no room for the KV: another worker may have room by now.
const WAITS_SAID_EVERY: Duration = Duration::from_secs(1);

/// Runs sequences for routers.
#[derive(Clone)]
pub struct DecodeService {
    /// Receives the KV of its sequences.
    pub handoffs: Arc<Handoffs>,
    /// The components it uses.
    pub parts: Parts,
}

/// Messages to a router; the last one may be an error.
pub(crate) type Reply = Result<DecodeEvent, RequestError>;

/// A sequence for which a router claims room.
pub struct DecodeRequest {
    /// The prompt and the tokens generated so far.
    pub sequence: SequenceSpec,
    /// The prefill worker; `None` if this worker prefills.
    pub source: Option<Party>,
}

impl DecodeService {
    /// Runs a sequence from its claim and returns its events. It is cancelled when the receiver is dropped.
    ///
    /// # Errors
    /// If it can never fit here, or if too much is claimed or waiting already.
    pub fn decode(&self, call: CallContext, request: DecodeRequest) -> Result<mpsc::Receiver<Reply>, RequestError> {
        self.parts.engine.check_fits(request.sequence.tokens.len()).map_err(|e| submit_error(&e))?;
        let (replies, stream) = mpsc::channel(MESSAGES_MAX);
        let (service, parts) = (self.clone(), &self.parts);
        let (adapter, tenant) = (request.sequence.adapter, request.sequence.share.tenant);
        let start = move |call, adapter, replies| service.start(call, request, adapter, replies);
        start_with(parts.adapters.as_ref(), adapter, tenant, call, &parts.runtime, replies, start)?;
        Ok(stream)
    }

    /// Books or submits the sequence, and starts the task that follows it.
    fn start(
        &self,
        call: CallContext,
        request: DecodeRequest,
        adapter: Option<AdapterUse>,
        replies: mpsc::Sender<Reply>,
    ) -> Result<(), RequestError> {
        let CallContext { since, deadline, running, parent } = call;
        let DecodeRequest { sequence, source } = request;
        let (sink, events) = stream::channel();
        let slot = Slot::default();
        let (request, prompt_tokens, prefills) =
            (sequence.request_id.clone(), sequence.tokens.len() as i64, source.is_none());
        let sequence = engine_request(sequence, &self.parts.engine, &self.parts.model, adapter, deadline);
        let adopted = match source {
            Some(source) => {
                let (claim, adopted) = claim(source, sequence, sink, slot.clone());
                self.handoffs.book(request.clone(), claim)?;
                Some(adopted)
            }
            None => {
                let started = slot.start(|| self.parts.engine.submit(sequence, Run::Full, Box::new(sink)));
                let cancelled = || RequestError::new(ErrorKind::Cancelled, "cancelled");
                started.map_err(|e| e.map_or_else(cancelled, |e| submit_error(&e)))?;
                None
            }
        };
        // From here on the id is booked for this call, so the call's end may free it.
        let call = Call {
            request,
            running,
            service: self.clone(),
            slot,
            events,
            adopted,
            replies,
            parent,
            since,
            deadline,
            prompt_tokens,
            prefills,
            started: None,
            first_token_sent: false,
        };
        let log = call.parent.log_span(call.request.as_str());
        self.parts.runtime.spawn(Box::pin(call.run().instrument(log)));
        Ok(())
    }
}

/// One running stream. Dropping it at any point cancels everything that runs for the request here.
struct Call {
    request: RequestId,
    running: RunningCall,
    service: DecodeService,
    slot: Slot,
    events: mpsc::Receiver<SequenceEvent>,
    adopted: Option<oneshot::Receiver<Adopted>>,
    replies: mpsc::Sender<Reply>,
    parent: Parent,
    since: Instant,
    deadline: Instant,
    prompt_tokens: i64,
    /// Whether the prompt is prefilled here.
    prefills: bool,
    started: Option<Instant>,
    first_token_sent: bool,
}

/// The generation phase. It ends with the last token, by the router (a stop string) or with the stream; in each case it records the
/// number of tokens.
struct Generating {
    span: Option<Phase>,
    tokens: i64,
    since: Instant,
    phases: Phases,
    runtime: Arc<dyn Runtime>,
}

impl Generating {
    fn end(&mut self) {
        if let Some(span) = self.span.take() {
            self.phases.over(WorkerPhase::DecodeGenerate, self.since, self.runtime.now());
            span.attribute("gen_ai.usage.output_tokens", self.tokens).end();
        }
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.end();
    }
}

impl Call {
    async fn run(mut self) {
        let replies = self.replies.clone();
        let deadline = self.deadline;
        let cut_off = self.running.cut_off();
        let engine = self.service.parts.engine.clone();
        let runtime = self.service.parts.runtime.clone();
        tokio::select! {
            biased;
            () = replies.closed() => tracing::debug!(request_id = %self.request, "cancels a request whose stream is gone"),
            () = self.forward() => {}
            // If the stream has no room it ends without a message, which routers handle in the same way.
            error = cut_off => drop(replies.try_send(Err(error))),
            error = hung(&engine, &*runtime) => drop(replies.try_send(Err(error))),
            () = runtime.sleep_until(deadline) => {
                let late = RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed");
                // If the stream has no room its reader stalls; the end of the stream has the same effect.
                let _ = replies.try_send(Err(late));
            }
        }
    }

    async fn forward(&mut self) {
        if !self.say(DecodeEvent::Claimed).await {
            return;
        }
        // The generation phase begins with adopted KV, or with the first token of a prompt that is prefilled here.
        let mut generating = None;
        if let Some(adopted) = self.adopted.take() {
            let span = self.parent.span("decode.await_kv");
            // A failed handoff drops the sender and leaves the reason among the events: nothing is generated.
            if let Ok(Adopted { bytes }) = self.adoption(adopted).await {
                span.attribute("baton.kv.bytes", bytes as i64).end();
                let now = self.service.parts.runtime.now();
                self.service.parts.phases.over(WorkerPhase::DecodeAwaitKv, self.since, now);
                let await_us = now.saturating_duration_since(self.since).as_micros() as u64;
                if !self.say(DecodeEvent::Adopted { bytes, await_us }).await {
                    return;
                }
                generating = Some(self.generating());
            }
        }
        while let Some(event) = self.events.recv().await {
            if let SequenceEvent::Token { finish, at, .. } = &event {
                let generating = generating.get_or_insert_with(|| {
                    self.trace_prefill(*at);
                    self.generating()
                });
                generating.tokens += 1;
                if finish.is_some() {
                    generating.end();
                }
            }
            let (reply, ends) = self.reply(event);
            if let Some(reply) = reply
                && (self.replies.send(reply).await.is_err() || ends)
            {
                return;
            }
            if ends {
                return;
            }
        }
        let lost = RequestError::new(ErrorKind::Internal, "the engine dropped the sequence without an end");
        let _ = self.replies.send(Err(lost)).await;
    }

    /// Waits for the KV, and notifies the router while there is no room for it.
    async fn adoption(&self, mut adopted: oneshot::Receiver<Adopted>) -> Result<Adopted, RecvError> {
        loop {
            let runtime = &self.service.parts.runtime;
            if let Some(adopted) = runtime.until(runtime.now() + WAITS_SAID_EVERY, &mut adopted).await {
                return adopted;
            }
            if self.service.handoffs.has_no_room_for(&self.request) {
                // `run` notices a closed stream.
                self.say(DecodeEvent::Waits).await;
            }
        }
    }

    fn generating(&self) -> Generating {
        let phases = self.service.parts.phases.clone();
        let runtime = self.service.parts.runtime.clone();
        Generating { span: Some(self.parent.span("decode.generate")), tokens: 0, since: runtime.now(), phases, runtime }
    }

    /// Records the phases of a prompt that was prefilled here.
    fn trace_prefill(&self, first_token: Instant) {
        let started = self.started.unwrap_or(self.since);
        self.service.parts.phases.over(WorkerPhase::PrefillQueue, self.since, started);
        self.service.parts.phases.over(WorkerPhase::PrefillCompute, started, first_token);
        self.parent.record_beside("prefill.queue", self.since, started, []);
        let attributes = [("baton.prompt_tokens", self.prompt_tokens.into())];
        self.parent.record_beside("prefill.compute", started, first_token, attributes);
    }

    async fn say(&self, event: DecodeEvent) -> bool {
        self.replies.send(Ok(event)).await.is_ok()
    }

    /// The message to the router for an event, and whether it is the last.
    fn reply(&mut self, event: SequenceEvent) -> (Option<Reply>, bool) {
        match event {
            SequenceEvent::Started { at } => {
                self.started.get_or_insert(at);
                let queue_us = at.saturating_duration_since(self.since).as_micros() as u64;
                (Some(Ok(DecodeEvent::Started { queue_us })), false)
            }
            SequenceEvent::Prompt(logprobs) => (Some(Ok(DecodeEvent::Prompt(logprobs))), false),
            SequenceEvent::Token { token, logprobs, finish, reuse, at } => {
                let is_first = self.prefills && !std::mem::replace(&mut self.first_token_sent, true);
                let prefill = self.started.filter(|_| is_first).map(|started| at.saturating_duration_since(started));
                let (cached_tokens, cache_write_tokens) = reused(reuse.filter(|_| is_first));
                let token = GeneratedToken {
                    id: token,
                    logprobs,
                    finish,
                    prefill_us: prefill.map(|spent| spent.as_micros() as u64),
                    cached_tokens,
                    cache_write_tokens,
                };
                (Some(Ok(DecodeEvent::Token(token))), false)
            }
            SequenceEvent::Finished { .. } => (None, true),
            SequenceEvent::Failed { kind, message } => (Some(Err(RequestError::new(kind, message))), true),
            SequenceEvent::Prefilled { .. } => {
                let defect = RequestError::new(ErrorKind::Internal, "a decoding sequence ended as a prefill");
                (Some(Err(defect)), true)
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.slot.cancel();
        if !self.prefills {
            self.service.handoffs.forget(&self.request);
            self.service.parts.transfer.cancel(&self.request, "the stream that claimed it is gone");
        }
    }
}
