//! A worker whose calls a test answers by hand, event by event.

use super::record;
use super::telemetry::Memory;
use baton_node::identity::Identity;
use baton_node::membership::embedded::{EmbeddedWorker, JoinConfig};
use baton_node::membership::{RegistrationHandle, WorkerMembership};
use baton_proto::v1::{
    self, decode_server, decode_server::DecodeServer, prefill_server, prefill_server::PrefillServer,
    telemetry_server::TelemetryServer, worker_server, worker_server::WorkerServer,
};
use baton_types::{AdapterCard, InstanceRecord, Role};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::AbortHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

const WAIT_MAX: Duration = Duration::from_secs(20);
/// What workers take of request headers.
const HEADER_BYTES_MAX: u32 = 8 << 10;
type Events<E> = mpsc::Sender<Result<E, Status>>;
type Answer<E> = Result<Response<ReceiverStream<Result<E, Status>>>, Status>;

/// One call of the router, held open by the test.
#[derive(Debug)]
pub(crate) struct Call<R, E> {
    pub(crate) request: R,
    pub(crate) metadata: MetadataMap,
    events: Option<Events<E>>,
}

pub(crate) type DecodeCall = Call<v1::DecodeRequest, v1::DecodeEvent>;
pub(crate) type PrefillCall = Call<v1::PrefillRequest, v1::PrefillEvent>;

impl<R, E: Send + 'static> Call<R, E> {
    /// Sends an event; `false` if the router cancelled the call, which some tests check.
    async fn send(&self, event: Result<E, Status>) -> bool {
        self.events.as_ref().expect("the stream is open").send(event).await.is_ok()
    }

    /// Ends the stream with an error.
    pub(crate) async fn fail(&mut self, status: Status) {
        self.send(Err(status)).await;
        self.events = None;
    }

    /// Ends the stream without an error.
    pub(crate) fn end(&mut self) {
        self.events = None;
    }

    /// Waits until the router cancelled this call.
    pub(crate) async fn cancelled(&self) {
        let closed = self.events.as_ref().expect("the stream is open").closed();
        tokio::time::timeout(WAIT_MAX, closed).await.expect("the router cancels the call");
    }
}

/// A token as workers send it.
pub(crate) fn token(id: u32, finish: Option<v1::FinishReason>) -> v1::Token {
    let finish_reason = finish.unwrap_or(v1::FinishReason::Unspecified) as i32;
    v1::Token { id, logprobs: None, finish_reason, prefill_us: Some(1000), ..Default::default() }
}

/// A first token, with this many prompt tokens cached and this many stored in the cache.
pub(crate) fn first(id: u32, (cached, written): (u32, u32), finish: Option<v1::FinishReason>) -> v1::Token {
    v1::Token { cached_tokens: Some(cached), cache_write_tokens: Some(written), ..token(id, finish) }
}

impl DecodeCall {
    pub(crate) async fn scored(&self, first: u32, tokens: &[u32]) {
        self.event(v1::decode_event::Event::Prompt(scored(first, tokens))).await;
    }
    pub(crate) async fn send_token(&self, token: v1::Token) {
        self.event(v1::decode_event::Event::Token(token)).await;
    }
    async fn event(&self, event: v1::decode_event::Event) -> bool {
        self.send(Ok(v1::DecodeEvent { event: Some(event) })).await
    }
    pub(crate) async fn claimed(&self) {
        self.event(v1::decode_event::Event::Claimed(v1::DecodeClaimed {})).await;
    }
    pub(crate) async fn adopted(&self) {
        self.event(v1::decode_event::Event::Adopted(v1::KvAdopted { bytes: 10, await_us: 5 })).await;
    }
    pub(crate) async fn waits(&self) {
        self.event(v1::decode_event::Event::Waits(v1::KvWaits {})).await;
    }
    /// What is to be decoded.
    pub(crate) fn sequence(&self) -> &v1::Sequence {
        self.request.sequence.as_ref().unwrap()
    }
    /// A token for each byte.
    pub(crate) async fn say(&self, text: &str) {
        for byte in text.bytes() {
            self.token(byte.into()).await;
        }
    }
    /// `false` if the router cancelled the call.
    pub(crate) async fn token(&self, id: u32) -> bool {
        self.event(v1::decode_event::Event::Token(token(id, None))).await
    }
    pub(crate) async fn last(&self, id: u32, finish: v1::FinishReason) {
        self.event(v1::decode_event::Event::Token(token(id, Some(finish)))).await;
    }
}

/// Log-probabilities of these tokens of a prompt, from the one at `first` on. They are told apart by the token.
pub(crate) fn scored(first: u32, tokens: &[u32]) -> v1::PromptLogprobs {
    let logprobs = |token: u32| v1::Logprobs { chosen: -(token as f32), top: Vec::new() };
    let token = |&token| v1::PromptLogprob { token_id: token, rank: 1, logprobs: Some(logprobs(token)) };
    v1::PromptLogprobs { first, tokens: tokens.iter().map(token).collect() }
}

impl PrefillCall {
    pub(crate) async fn scored(&self, first: u32, tokens: &[u32]) {
        self.event(v1::prefill_event::Event::Prompt(scored(first, tokens))).await;
    }
    pub(crate) async fn send_token(&self, token: v1::Token) {
        self.event(v1::prefill_event::Event::Token(token)).await;
    }
    async fn event(&self, event: v1::prefill_event::Event) {
        self.send(Ok(v1::PrefillEvent { event: Some(event) })).await;
    }
    pub(crate) async fn started(&self) {
        self.event(v1::prefill_event::Event::Started(v1::PrefillStarted { queue_us: 7 })).await;
    }
    pub(crate) async fn token(&self, id: u32, finish: Option<v1::FinishReason>) {
        self.event(v1::prefill_event::Event::Token(token(id, finish))).await;
    }
    pub(crate) async fn done(&self) {
        let done = v1::PrefillDone {
            prefill_us: 900,
            transfer_us: 80,
            exposed_us: 8,
            transfer_bytes: 4096,
            transport: "test".into(),
        };
        self.event(v1::prefill_event::Event::Done(done)).await;
    }
}

/// A registered worker on a real socket.
pub(crate) struct Fake {
    pub(crate) record: InstanceRecord,
    pub(crate) memory: Memory,
    decode: Mutex<mpsc::Receiver<DecodeCall>>,
    prefill: Mutex<mpsc::Receiver<PrefillCall>>,
    load: watch::Sender<v1::LoadReport>,
    watchers: Watchers,
    _registration: RegistrationHandle,
    server: AbortHandle,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Streams of reports that routers opened so far; separately those that include cache reports.
type Watchers = Arc<watch::Sender<Vec<Events<v1::LoadReport>>>>;

struct Service {
    decode: mpsc::Sender<DecodeCall>,
    prefill: mpsc::Sender<PrefillCall>,
    load: watch::Receiver<v1::LoadReport>,
    watchers: Watchers,
    bundle: Vec<u8>,
}

impl Fake {
    /// Starts a worker and joins `router`. `bundle` is the text it serves.
    pub(crate) async fn start(
        router: SocketAddr,
        (role, name): (Role, &str),
        bundle: Vec<u8>,
        change: impl FnOnce(&mut InstanceRecord),
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut record = record(role, name);
        record.endpoint = listener.local_addr().unwrap().to_string();
        record.card.bundle = (!bundle.is_empty()).then(|| baton_text::bundle::digest(&bundle));
        change(&mut record);
        let (decode, decode_calls) = mpsc::channel(64);
        let (prefill, prefill_calls) = mpsc::channel(64);
        let blocks = record.capacity_tokens / 16;
        let (load, load_seen) = watch::channel(v1::LoadReport {
            party: Some(record.party.clone().into()),
            healthy: true,
            blocks: Some(v1::BlockCounts { total: blocks, free: blocks, ..Default::default() }),
            ..Default::default()
        });
        let watchers = Watchers::default();
        let service = || Service {
            decode: decode.clone(),
            prefill: prefill.clone(),
            load: load_seen.clone(),
            watchers: watchers.clone(),
            bundle: bundle.clone(),
        };
        let memory = Memory::default();
        let server = tonic::transport::Server::builder()
            .http2_max_header_list_size(HEADER_BYTES_MAX)
            .add_service(DecodeServer::new(service()))
            .add_service(PrefillServer::new(service()))
            .add_service(WorkerServer::new(service()))
            .add_service(TelemetryServer::new(memory.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(server).abort_handle();
        let config = JoinConfig { routers: vec![router.to_string()], ..JoinConfig::default() };
        let registration = EmbeddedWorker::new(&config, &Identity::default()).register(record.clone());
        let mut state = registration.state();
        tokio::time::timeout(WAIT_MAX, state.wait_for(|s| s.is_ready())).await.expect("is admitted").unwrap();
        let (decode, prefill) = (Mutex::new(decode_calls), Mutex::new(prefill_calls));
        Self { record, memory, decode, prefill, load, watchers, _registration: registration, server }
    }

    /// The next call of `Decode/Generate`.
    pub(crate) async fn decode(&self) -> DecodeCall {
        let mut calls = self.decode.lock().await;
        tokio::time::timeout(WAIT_MAX, calls.recv()).await.expect("the router calls decode").unwrap()
    }

    /// The next call of `Prefill/Run`.
    pub(crate) async fn prefill(&self) -> PrefillCall {
        let mut calls = self.prefill.lock().await;
        tokio::time::timeout(WAIT_MAX, calls.recv()).await.expect("the router calls prefill").unwrap()
    }

    /// Announces adapters on the first stream of reports, once it is open.
    pub(crate) async fn announce(&self, cards: &[AdapterCard]) {
        let mut watchers = self.watchers.subscribe();
        let opened = watchers.wait_for(|watchers| !watchers.is_empty());
        let opened = tokio::time::timeout(WAIT_MAX, opened).await.expect("the router asks for reports").unwrap();
        let reports = opened[0].clone();
        drop(opened);
        let party = Some(self.record.party.clone().into());
        let report = v1::LoadReport { party, adapters: Some(cards.into()), ..Default::default() };
        reports.send(Ok(report)).await.expect("the router reads");
    }

    /// Sends a cache report on the `stream`th stream that asked for them, counted from 0, once that stream is open.
    pub(crate) async fn tell(&self, stream: usize, update: v1::CacheUpdate) {
        let mut watchers = self.watchers.subscribe();
        let opened = watchers.wait_for(|watchers| watchers.len() > stream);
        let opened = tokio::time::timeout(WAIT_MAX, opened).await.expect("the router asks for reports").unwrap();
        let reports = opened[stream].clone();
        drop(opened);
        let party = Some(self.record.party.clone().into());
        // A router that noticed a missing report has closed the stream already.
        let _ = reports.send(Ok(v1::LoadReport { party, cache: Some(update), ..Default::default() })).await;
    }

    /// Streams of reports so far that asked for the cache.
    pub(crate) fn streams_with_cache(&self) -> usize {
        self.watchers.borrow().len()
    }

    /// Changes the worker's load report.
    pub(crate) fn report(&self, change: impl FnOnce(&mut v1::LoadReport)) {
        self.load.send_modify(change);
    }
}

fn call<R, E>(request: Request<R>) -> (Call<R, E>, Answer<E>) {
    let (metadata, _, request) = request.into_parts();
    let (events, out) = mpsc::channel(8);
    (Call { request, metadata, events: Some(events) }, Ok(Response::new(ReceiverStream::new(out))))
}

#[tonic::async_trait]
impl decode_server::Decode for Service {
    type GenerateStream = ReceiverStream<Result<v1::DecodeEvent, Status>>;
    async fn generate(&self, request: Request<v1::DecodeRequest>) -> Answer<v1::DecodeEvent> {
        let (call, answer) = call(request);
        self.decode.send(call).await.map_err(|_| Status::unavailable("the test is over"))?;
        answer
    }
}

#[tonic::async_trait]
impl prefill_server::Prefill for Service {
    type RunStream = ReceiverStream<Result<v1::PrefillEvent, Status>>;
    async fn run(&self, request: Request<v1::PrefillRequest>) -> Answer<v1::PrefillEvent> {
        let (call, answer) = call(request);
        self.prefill.send(call).await.map_err(|_| Status::unavailable("the test is over"))?;
        answer
    }
}

#[tonic::async_trait]
impl worker_server::Worker for Service {
    type BundleStream = ReceiverStream<Result<v1::BundleChunk, Status>>;
    type WatchStream = ReceiverStream<Result<v1::LoadReport, Status>>;
    type DrainStream = ReceiverStream<Result<v1::DrainEvent, Status>>;

    /// Refuses if it reports that it drains; otherwise one call ends, and the worker is drained.
    async fn drain(&self, request: Request<v1::DrainRequest>) -> Answer<v1::DrainEvent> {
        if self.load.borrow().draining {
            return Err(Status::failed_precondition("it drains already"));
        }
        let party = request.into_inner().party;
        assert_eq!(party, self.load.borrow().party, "the router asks the start that it knows");
        let (events, out) = mpsc::channel(8);
        let drained = v1::Drained { finished: 1, cut_off: 0, deregistered: true };
        for (running, drained) in [(1, None), (0, Some(drained))] {
            events.send(Ok(v1::DrainEvent { running, drained })).await.unwrap();
        }
        Ok(Response::new(ReceiverStream::new(out)))
    }

    async fn bundle(&self, _: Request<v1::BundleRequest>) -> Answer<v1::BundleChunk> {
        let (chunks, out) = mpsc::channel(64);
        for chunk in self.bundle.chunks(1 << 10) {
            chunks.send(Ok(v1::BundleChunk { data: chunk.to_vec().into() })).await.unwrap();
        }
        Ok(Response::new(ReceiverStream::new(out)))
    }

    async fn record(&self, _: Request<v1::RecordRequest>) -> Result<Response<v1::InstanceRecord>, Status> {
        Err(Status::unimplemented("nobody asks"))
    }

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Answer<v1::LoadReport> {
        let (reports, out) = mpsc::channel(8);
        if request.into_inner().cache_events {
            self.watchers.send_modify(|watchers| watchers.push(reports.clone()));
        }
        let mut load = self.load.clone();
        tokio::spawn(async move {
            loop {
                let report = load.borrow_and_update().clone();
                if reports.send(Ok(report)).await.is_err() {
                    return;
                }
                let _ = tokio::time::timeout(Duration::from_millis(500), load.changed()).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(out)))
    }
}
