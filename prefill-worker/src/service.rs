//! Runs a prompt, sends its first token at once, and ends when the decode worker has acknowledged the KV.

use crate::put::{PromptPut, PutObserver, PutTarget, handoff_error, prompt_put};
use baton_engine::api::{AdapterUse, Run, SequenceEvent, SequenceRequest};
use baton_engine::{EngineHandle, SequenceControl};
use baton_kv_transfer::{CommitPayload, Peer, PutHandle, PutReport};
use baton_types::{
    Digest, ErrorKind, GeneratedToken, PrefillEvent, RequestError, SequenceSpec, TokenId, TransferReport,
};
use baton_worker::call::CallContext;
use baton_worker::drain::RunningCall;
use baton_worker::hang::hung;
use baton_worker::lora::start_with;
use baton_worker::phases::WorkerPhase;
use baton_worker::prefix_get::{self, CachedPrefix, PrefixGet};
use baton_worker::role::Parts;
use baton_worker::spans::Parent;
use baton_worker::stream::{self, StreamSink};
use baton_worker::submit::{engine_request, reused, submit_error};
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::Instrument as _;

/// A prefill sends at most three messages, so its stream never waits for its reader. Log-probabilities of a prompt do, and the engine then
/// pauses the prompt.
const MESSAGES_MAX: usize = 4;

/// How long a prompt in the engine's queue holds the blocks that were got for it. After that they are left to the cache: a nearly full
/// pool may have no room for the prompt while another sequence holds even one of its blocks.
const GOT_KEPT_MAX: Duration = Duration::from_millis(250);

/// How long a committed handoff is followed after its router's stream is closed. The answer may end before the acknowledgement arrives, and
/// its spans and figures are wanted all the same. If nobody wants the KV any more, the decode worker ends the handoff.
const FOLLOWED_MAX: Duration = Duration::from_secs(3);

/// Runs prompts for routers.
#[derive(Clone)]
pub struct PrefillService {
    /// The components it uses.
    pub parts: Parts,
}

/// Messages to a router; the last one may be an error.
pub(crate) type Reply = Result<PrefillEvent, RequestError>;

/// A prompt that a router sends.
pub struct PrefillRequest {
    /// The prompt and the tokens generated so far.
    pub sequence: SequenceSpec,
    /// The decode worker that gets the KV.
    pub peer: Peer,
    /// The prefix to get from another worker's cache first.
    pub get: Option<PrefixGet>,
}

impl PrefillService {
    /// Runs a prompt and returns its events. It is cancelled when the receiver is dropped.
    ///
    /// # Errors
    /// If it can never fit here, or if too much is waiting already.
    pub fn prefill(&self, call: CallContext, request: PrefillRequest) -> Result<mpsc::Receiver<Reply>, RequestError> {
        let (replies, stream) = mpsc::channel(MESSAGES_MAX);
        let (service, parts) = (self.clone(), &self.parts);
        let (adapter, tenant) = (request.sequence.adapter, request.sequence.share.tenant);
        let start = move |call, adapter, replies| service.start(call, request, adapter, replies);
        start_with(parts.adapters.as_ref(), adapter, tenant, call, &parts.runtime, replies, start)?;
        Ok(stream)
    }

    /// Submits the prompt, or has its prefix got first, and starts the task that follows it.
    fn start(
        &self,
        call: CallContext,
        request: PrefillRequest,
        adapter: Option<AdapterUse>,
        replies: mpsc::Sender<Reply>,
    ) -> Result<(), RequestError> {
        let CallContext { since, deadline, running, parent } = call;
        let PrefillRequest { sequence, peer, get } = request;
        let transfer = self.parts.transfer.clone();
        let request_id = sequence.request_id.clone();
        let log = parent.log_span(request_id.as_str());
        let target = PutTarget { transfer, peer, request_id, tokens: sequence.tokens.len() as u32, deadline };
        let (observer, put) = prompt_put(target);
        let (sink, events) = stream::channel();
        let (tokens, prompt_len) = (sequence.tokens.clone(), sequence.prompt_len);
        let digest = adapter.as_ref().map(|adapter| adapter.digest);
        let request = engine_request(sequence, &self.parts.engine, &self.parts.model, adapter, deadline);
        let prompt = Prompt { request, observer, sink };
        // Without a get, a full queue is refused before a stream exists.
        let stage = match get {
            None => Stage::Running(prompt.submit(&self.parts.engine)?),
            Some(get) => Stage::Getting(Box::new((prompt, get))),
        };
        let call = Call {
            running,
            parts: self.parts.clone(),
            stage,
            put,
            events,
            replies,
            parent,
            since,
            queued_since: since,
            prompt: tokens,
            prompt_len,
            adapter: digest,
            started: None,
            first: None,
        };
        self.parts.runtime.spawn(Box::pin(call.run().instrument(log)));
        Ok(())
    }
}

/// A prompt on its way into the engine.
struct Prompt {
    request: SequenceRequest,
    observer: PutObserver,
    sink: StreamSink,
}

impl Prompt {
    fn submit(self, engine: &EngineHandle) -> Result<SequenceControl, RequestError> {
        let run = Run::PrefillOnly { observer: Box::new(self.observer) };
        engine.submit(self.request, run, Box::new(self.sink)).map_err(|e| submit_error(&e))
    }
}

/// The progress of a prompt.
enum Stage {
    /// A cached prefix is got from another worker first.
    Getting(Box<(Prompt, PrefixGet)>),
    /// The engine runs it. Dropping this cancels it there.
    Running(SequenceControl),
    /// The prompt has ended.
    Over,
}

/// How the computation of a prompt ended.
enum Computed {
    /// With its last token: nothing is handed off.
    Whole(TransferReport),
    /// The handoff is committed.
    Committed(Committed),
}

struct Committed {
    handle: PutHandle,
    prefill_us: u64,
    computed_at: Instant,
}

/// One running prefill. Dropping it cancels the sequence and aborts the handoff.
struct Call {
    running: RunningCall,
    parts: Parts,
    stage: Stage,
    put: PromptPut,
    events: mpsc::Receiver<SequenceEvent>,
    replies: mpsc::Sender<Reply>,
    parent: Parent,
    since: Instant,
    /// When it joined the engine's queue.
    queued_since: Instant,
    prompt: Vec<TokenId>,
    prompt_len: usize,
    /// Digest of the adapter that computes it.
    adapter: Option<Digest>,
    started: Option<Instant>,
    first: Option<(TokenId, bool)>,
}

impl Call {
    async fn run(mut self) {
        let (replies, runtime) = (self.replies.clone(), self.parts.runtime.clone());
        let mut cut_off = pin!(self.running.cut_off());
        let computed = tokio::select! {
            biased;
            () = replies.closed() => return,
            error = &mut cut_off => Err(error),
            computed = self.forward() => computed,
        };
        let followed = async {
            replies.closed().await;
            runtime.sleep(FOLLOWED_MAX).await;
        };
        let end = match computed {
            Ok(Computed::Committed(committed)) => tokio::select! {
                biased;
                // First: on a busy host it may be there together with the end of the time.
                report = self.put_over(committed) => report,
                () = followed => return,
                error = &mut cut_off => Err(error),
            },
            Ok(Computed::Whole(report)) => Ok(report),
            Err(error) => Err(error),
        };
        let _ = self.replies.send(end.map(PrefillEvent::Done)).await;
    }

    /// Follows the prompt until it is computed.
    async fn forward(&mut self) -> Result<Computed, RequestError> {
        let mut cached = self.get_prefix().await?;
        let mut kept = self.parts.runtime.sleep(GOT_KEPT_MAX);
        let put = self.put.clone();
        let mut failure = pin!(put.failure());
        loop {
            let event = tokio::select! {
                // Events of the engine take precedence.
                biased;
                event = self.events.recv() => event,
                // This KV is no longer needed, so the rest of the prompt is not computed. Dropping the call cancels it.
                error = &mut failure, if self.first.is_none() => return Err(error),
                () = &mut kept, if cached.is_some() => {
                    cached = None;
                    continue;
                }
                // The handoff of a computed prompt does not need the engine, and continues.
                error = hung(&self.parts.engine, &*self.parts.runtime) => return Err(error),
            };
            let Some(event) = event else { break };
            match event {
                SequenceEvent::Started { at } => {
                    cached = None;
                    self.on_started(at).await;
                }
                SequenceEvent::Prompt(logprobs) => self.say(PrefillEvent::Prompt(logprobs)).await,
                SequenceEvent::Token { token, logprobs, finish, reuse, at } => {
                    self.first = Some((token, finish.is_some()));
                    let prefill_us = self.started.map(|s| micros(s, at));
                    let (cached_tokens, cache_write_tokens) = reused(reuse);
                    let token =
                        GeneratedToken { id: token, logprobs, finish, prefill_us, cached_tokens, cache_write_tokens };
                    self.say(PrefillEvent::Token(token)).await;
                }
                SequenceEvent::Prefilled { compute_us, at } => {
                    let started = self.started.unwrap_or(self.since);
                    self.parts.phases.over(WorkerPhase::PrefillCompute, started, at);
                    self.parent.record(
                        "prefill.compute",
                        started,
                        at,
                        [("baton.prompt_tokens", (self.prompt.len() as i64).into())],
                    );
                    let Some((token, false)) = self.first else {
                        self.put.abort("the sequence ended with its first token");
                        return Ok(Computed::Whole(TransferReport { prefill_us: compute_us, ..Default::default() }));
                    };
                    let tokens = self.prompt.iter().copied().chain([token]).collect();
                    // The decode worker adopts KV of the adapter that it claimed room for, and of no other.
                    let extra = self.adapter.map(|digest| digest.0.to_vec()).unwrap_or_default();
                    let commit = CommitPayload { tokens, prompt_len: self.prompt_len as u32, extra };
                    let not_open = || RequestError::new(ErrorKind::Internal, "the handoff was never opened");
                    let opened = self.put.commit(commit).ok_or_else(not_open)?;
                    let handle = opened.map_err(|e| RequestError::new(ErrorKind::Unavailable, e.to_string()))?;
                    return Ok(Computed::Committed(Committed { handle, prefill_us: compute_us, computed_at: at }));
                }
                SequenceEvent::Finished { .. } => {
                    self.put.abort("the sequence ended with its first token");
                    return Ok(Computed::Whole(TransferReport::default()));
                }
                SequenceEvent::Failed { kind, message } => {
                    self.put.abort(&message);
                    return Err(RequestError::new(kind, message));
                }
            }
        }
        drop(cached);
        self.put.abort("the engine dropped the sequence");
        Err(RequestError::new(ErrorKind::Internal, "the engine dropped the sequence without an end"))
    }

    /// If requested, gets the cached prefix of the prompt from another worker; then submits the prompt to the engine.
    async fn get_prefix(&mut self) -> Result<Option<CachedPrefix>, RequestError> {
        let (prompt, get) = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Getting(waiting) => *waiting,
            stage => {
                self.stage = stage;
                return Ok(None);
            }
        };
        let (engine, transfer) = (&self.parts.engine, &self.parts.transfer);
        let outcome = prefix_get::get_prefix(engine, transfer, &prompt.request, &get).await;
        self.queued_since = self.parts.runtime.now();
        self.parts.phases.over(WorkerPhase::PrefillGet, self.since, self.queued_since);
        let (tokens, bytes) = match &outcome {
            Ok(Some(cached)) => (cached.tokens as i64, cached.bytes as i64),
            Ok(None) | Err(_) => (0, 0),
        };
        let attributes = [("baton.get.tokens", tokens.into()), ("baton.kv.bytes", bytes.into())];
        self.parent.record("prefill.get", self.since, self.queued_since, attributes);
        let cached = outcome.unwrap_or_else(|error| {
            tracing::info!(owner = %get.owner().party, %error, "computes a prefix that could not be got");
            None
        });
        self.stage = Stage::Running(prompt.submit(engine)?);
        Ok(cached)
    }

    async fn on_started(&mut self, at: Instant) {
        self.started = Some(at);
        self.parts.phases.over(WorkerPhase::PrefillQueue, self.queued_since, at);
        self.parent.record("prefill.queue", self.queued_since, at, []);
        self.say(PrefillEvent::Started { queue_us: micros(self.since, at) }).await;
    }

    /// Waits for the decode worker's acknowledgement.
    async fn put_over(&self, committed: Committed) -> Result<TransferReport, RequestError> {
        let Committed { mut handle, prefill_us, computed_at } = committed;
        let report = handle.outcome().await.map_err(|failure| handoff_error(&failure, true))?;
        self.count(&report, computed_at);
        self.trace(&report, computed_at);
        Ok(TransferReport {
            prefill_us,
            transfer_us: micros(report.first_put_at, report.acked_at),
            exposed_us: micros(computed_at, report.acked_at),
            transfer_bytes: report.bytes,
            transport: report.transport.into(),
        })
    }

    fn count(&self, report: &PutReport, computed_at: Instant) {
        let opened = self.started.unwrap_or(self.since);
        self.parts.phases.over(WorkerPhase::DecodeReserve, opened, report.granted_at);
        self.parts.phases.over(WorkerPhase::KvTransfer, report.first_put_at, report.flushed_at);
        self.parts.phases.over(WorkerPhase::KvCommit, report.flushed_at, report.acked_at);
        self.parts.phases.put_over(report.bytes, report.moving, report.acked_at.saturating_duration_since(computed_at));
    }

    fn trace(&self, report: &PutReport, computed_at: Instant) {
        let opened = self.started.unwrap_or(self.since);
        self.parent.record_beside("decode.reserve", opened, report.granted_at, []);
        let seconds = report.moving.as_secs_f64();
        let rate = if seconds > 0.0 { report.bytes as f64 / seconds / 1e9 } else { 0.0 };
        let exposed_ms = micros(computed_at, report.acked_at) as f64 / 1e3;
        let attributes = [
            ("baton.kv.bytes", (report.bytes as i64).into()),
            ("baton.kv.puts", (report.puts as i64).into()),
            ("baton.kv.transport", report.transport.into()),
            ("baton.kv.lanes", report.lanes.clone().into()),
            ("baton.kv.gb_per_s", rate.into()),
            ("baton.kv.moving_ms", (seconds * 1e3).into()),
            ("baton.kv.exposed_ms", exposed_ms.into()),
        ];
        self.parent.record_beside("kv.transfer", report.first_put_at, report.flushed_at, attributes);
        self.parent.record_beside("kv.commit", report.flushed_at, report.acked_at, []);
        self.parent.record_beside("kv.exposed", computed_at, report.acked_at, []);
    }

    async fn say(&self, event: PrefillEvent) {
        // `run` notices a closed stream.
        let _ = self.replies.send(Ok(event)).await;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Stage::Running(control) = &self.stage {
            control.cancel();
        }
        self.put.abort("the router's stream is gone");
    }
}

fn micros(from: Instant, to: Instant) -> u64 {
    to.saturating_duration_since(from).as_micros() as u64
}
