//! Workers that register and answer as real ones do, and compute nothing: every answer is the beginning of one text.

use anyhow::Context;
use baton_node::identity::Identity;
use baton_node::membership::embedded::{EmbeddedWorker, JoinConfig};
use baton_node::membership::{RegistrationHandle, WorkerMembership as _};
use baton_proto::v1::{
    self, decode_event::Event as Decode, decode_server, decode_server::DecodeServer, prefill_event::Event as Prefill,
    prefill_server, prefill_server::PrefillServer, worker_server, worker_server::WorkerServer,
};
use baton_types::{
    Digest, Dtype, GroupKind, Incarnation, InstanceId, InstanceRecord, KvGroup, KvLayout, KvPlane, ModelCard,
    NumericsClass, Party, ProtocolRange, Role, SamplingDefaults, Shard,
};
use futures::stream::{self, BoxStream, Stream, StreamExt as _};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::{Request, Response, Status};

/// Longest wait to be admitted.
const ADMITTED_MAX: Duration = Duration::from_secs(120);
/// Load reports, as those of real workers: what changed at this pace, and all after so many of them.
const REPORT_EVERY: Duration = Duration::from_millis(50);
const QUIET_TICKS_MAX: u32 = 20;
/// Tokens that the pool of each holds: never full here.
const CAPACITY_TOKENS: u64 = 1 << 24;
const BLOCK_TOKENS: u32 = 16;

type Events<T> = BoxStream<'static, Result<T, Status>>;
type Answer<T> = Result<Response<Events<T>>, Status>;

/// What all stand-ins share.
pub(super) struct Script {
    /// Tokenizer and template, which routers fetch.
    pub(super) bundle: Vec<u8>,
    pub(super) vocab: u32,
    /// Tokens of every answer, as far as it goes.
    pub(super) answer: Vec<u32>,
    /// Between two steps; 0 answers at once. All streams of all workers share the steps, as those of a batch do.
    pub(super) step_us: AtomicU64,
    begun: Instant,
    /// Decode workers that wait for the KV of an attempt.
    awaited: Mutex<HashMap<String, oneshot::Sender<()>>>,
}

impl Script {
    pub(super) fn new(bundle: Vec<u8>, vocab: u32, answer: Vec<u32>) -> Self {
        let (step_us, awaited) = (AtomicU64::new(0), Mutex::default());
        Self { bundle, vocab, answer, step_us, begun: Instant::now(), awaited }
    }

    /// Waits for the next step.
    async fn step(&self) {
        let step_us = self.step_us.load(Ordering::Relaxed);
        if let Some(passed) = (self.begun.elapsed().as_micros() as u64).checked_div(step_us) {
            sleep_until(self.begun + Duration::from_micros((passed + 1) * step_us)).await;
        }
    }

    fn token(&self, number: usize, answer: usize) -> v1::Token {
        let first = (number == 0).then_some(0);
        let end = if number + 1 == answer { v1::FinishReason::Length } else { v1::FinishReason::Unspecified };
        v1::Token {
            id: self.answer[number % self.answer.len()],
            finish_reason: end.into(),
            prefill_us: first.map(|_| 1_000),
            cached_tokens: first,
            cache_write_tokens: first,
            ..Default::default()
        }
    }

    /// The tokens of an answer of so many from one of them on, each in a step of its own.
    fn tokens(self: Arc<Self>, from: usize, answer: usize) -> impl Stream<Item = v1::Token> {
        stream::unfold(from, move |number| {
            let script = self.clone();
            async move {
                if number >= answer {
                    return None;
                }
                script.step().await;
                Some((script.token(number, answer), number + 1))
            }
        })
    }
}

/// A registered worker. Dropping it ends it.
pub(super) struct StandIn {
    _registration: RegistrationHandle,
    server: AbortHandle,
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl StandIn {
    /// Starts `each` workers of each role, and waits until `router` has admitted them.
    pub(super) async fn start_all(router: SocketAddr, each: usize, script: &Arc<Script>) -> anyhow::Result<Vec<Self>> {
        let mut all = Vec::new();
        for number in 0..each {
            for role in [Role::Prefill, Role::Decode] {
                all.push(Self::start(router, role, &format!("{}-{number}", role.name()), script.clone()).await?);
            }
        }
        for (_, registration) in &all {
            let mut state = registration.state();
            timeout(ADMITTED_MAX, state.wait_for(|state| state.is_ready())).await.context("is not admitted")??;
        }
        Ok(all.into_iter().map(|(server, registration)| Self { _registration: registration, server }).collect())
    }

    async fn start(
        router: SocketAddr,
        role: Role,
        name: &str,
        script: Arc<Script>,
    ) -> anyhow::Result<(AbortHandle, RegistrationHandle)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let record = record(role, name, listener.local_addr()?, &script)?;
        let service = Service { script, party: record.party.clone(), running: Arc::default(), calls: Arc::default() };
        let incoming = stream::unfold(listener, async |listener| {
            let accepted = listener.accept().await.and_then(|(stream, _)| {
                stream.set_nodelay(true)?;
                Ok(stream)
            });
            Some((accepted, listener))
        });
        let server = tonic::transport::Server::builder()
            .add_service(DecodeServer::new(service.clone()))
            .add_service(PrefillServer::new(service.clone()))
            .add_service(WorkerServer::new(service))
            .serve_with_incoming(incoming);
        let server = tokio::spawn(server).abort_handle();
        let config = JoinConfig { routers: vec![router.to_string()], ..JoinConfig::default() };
        Ok((server, EmbeddedWorker::new(&config, &Identity::default()).register(record)))
    }
}

fn record(role: Role, name: &str, endpoint: SocketAddr, script: &Script) -> anyhow::Result<InstanceRecord> {
    let plane = |name| KvPlane::try_new(name, 3, 64, Dtype::Bf16);
    let group = KvGroup { kind: GroupKind::Full, layers: (0..30).collect(), planes: vec![plane("k")?, plane("v")?] };
    Ok(InstanceRecord {
        party: Party { instance: InstanceId::try_new(name)?, incarnation: Incarnation(1) },
        role,
        labels: BTreeMap::new(),
        pool: "default".into(),
        endpoint: endpoint.to_string(),
        card: ModelCard {
            id: super::MODEL.into(),
            served_names: vec![super::MODEL.into()],
            revision: String::new(),
            fingerprint: Digest([1; 32]),
            context_max: 8192,
            vocab: script.vocab,
            end_tokens: vec![2],
            defaults: SamplingDefaults::default(),
            bundle: Some(baton_text::bundle::digest(&script.bundle)),
        },
        protocol: ProtocolRange::CURRENT,
        layout: KvLayout::try_new(BLOCK_TOKENS, vec![group])?,
        class: NumericsClass {
            order: "stand-in".into(),
            weights: Dtype::Bf16.into(),
            kv: Dtype::Bf16,
            kernel_revision: 1,
        },
        capacity_tokens: CAPACITY_TOKENS,
        running_max: 256,
        waiting_max: 1024,
        shards: vec![Shard { transfer_address: vec![7; 64], layers: 0..30, kv_heads: 0..3 }],
        capabilities: Vec::new(),
    })
}

#[derive(Clone)]
struct Service {
    script: Arc<Script>,
    party: Party,
    running: Arc<AtomicU32>,
    /// Calls so far. Real workers report as often as they compute: what was placed on them counts until then.
    calls: Arc<AtomicU64>,
}

/// Counts a call as long as its stream lives.
struct Running(Arc<AtomicU32>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Service {
    fn counted<T: Send + 'static>(&self, events: impl Stream<Item = T> + Send + 'static) -> Answer<T> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.running.fetch_add(1, Ordering::Relaxed);
        let running = Running(self.running.clone());
        let events = events.map(move |event| {
            let _ = &running;
            Ok(event)
        });
        Ok(Response::new(events.boxed()))
    }

    fn load(&self) -> v1::LoadReport {
        let blocks = CAPACITY_TOKENS / u64::from(BLOCK_TOKENS);
        v1::LoadReport {
            party: Some(self.party.clone().into()),
            running: self.running.load(Ordering::Relaxed),
            steps: self.calls.load(Ordering::Relaxed),
            blocks: Some(v1::BlockCounts { total: blocks, free: blocks, ..Default::default() }),
            prefill_tokens_per_s: 50_000.0,
            decode_steps_per_s: 100.0,
            healthy: true,
            ..Default::default()
        }
    }

    /// A snapshot of an empty cache, and loads from then on.
    fn reports(self) -> impl Stream<Item = Result<v1::LoadReport, Status>> {
        let snapshot = v1::CacheSnapshot { part: 0, last: true, hashes: Vec::new().into() };
        let cache = v1::CacheUpdate { sequence: 0, change: Some(v1::cache_update::Change::Snapshot(snapshot)) };
        let first = v1::LoadReport { party: Some(self.party.clone().into()), cache: Some(cache), ..Default::default() };
        let state = (self, tokio::time::interval(REPORT_EVERY), None::<v1::LoadReport>, 0);
        let loads = stream::unfold(state, async |(service, mut ticks, mut last, mut quiet)| {
            loop {
                ticks.tick().await;
                quiet += 1;
                let load = service.load();
                if quiet >= QUIET_TICKS_MAX || last.as_ref() != Some(&load) {
                    last = Some(load.clone());
                    return Some((Ok(load), (service, ticks, last, 0)));
                }
            }
        });
        stream::once(async { Ok(first) }).chain(loads)
    }
}

fn answer_of(sequence: &v1::Sequence) -> usize {
    sequence.sampling.as_ref().map_or(1, |sampling| sampling.max_tokens as usize)
}

fn without<T>(what: &str) -> Result<T, Status> {
    Err(Status::unimplemented(what.to_owned()))
}

#[tonic::async_trait]
impl decode_server::Decode for Service {
    type GenerateStream = Events<v1::DecodeEvent>;

    async fn generate(&self, request: Request<v1::DecodeRequest>) -> Answer<v1::DecodeEvent> {
        let v1::DecodeRequest { sequence, prefill, .. } = request.into_inner();
        let sequence = sequence.ok_or_else(|| Status::invalid_argument("no sequence"))?;
        let (script, answer) = (self.script.clone(), answer_of(&sequence));
        let is_remote = matches!(prefill, Some(v1::decode_request::Prefill::AwaitKv(_)));
        let (from, begin) = if is_remote {
            let (sent, arrives) = oneshot::channel();
            script.awaited.lock().insert(sequence.request_id, sent);
            let adopted = async move {
                // A router that goes away takes the prefill with it.
                let _ = arrives.await;
                Decode::Adopted(v1::KvAdopted { bytes: 1 << 20, await_us: 500 })
            };
            (1, stream::once(adopted).boxed())
        } else {
            let started = Decode::Started(v1::PrefillStarted { queue_us: 10 });
            (0, stream::iter([started]).boxed())
        };
        let tokens = script.tokens(from, answer).map(Decode::Token);
        let events = stream::iter([Decode::Claimed(v1::DecodeClaimed {})]).chain(begin).chain(tokens);
        self.counted(events.map(|event| v1::DecodeEvent { event: Some(event) }))
    }
}

#[tonic::async_trait]
impl prefill_server::Prefill for Service {
    type RunStream = Events<v1::PrefillEvent>;

    async fn run(&self, request: Request<v1::PrefillRequest>) -> Answer<v1::PrefillEvent> {
        let sequence = request.into_inner().sequence.ok_or_else(|| Status::invalid_argument("no sequence"))?;
        let (script, answer) = (self.script.clone(), answer_of(&sequence));
        let started = Prefill::Started(v1::PrefillStarted { queue_us: 10 });
        let first = Prefill::Token(script.token(0, answer));
        let done = async move {
            if let Some(waits) = script.awaited.lock().remove(&sequence.request_id) {
                let _ = waits.send(());
            }
            Prefill::Done(v1::PrefillDone {
                prefill_us: 1_000,
                transfer_us: 500,
                exposed_us: 100,
                transfer_bytes: 1 << 20,
                transport: "none".into(),
            })
        };
        let events = stream::iter([started, first]).chain(stream::once(done));
        self.counted(events.map(|event| v1::PrefillEvent { event: Some(event) }))
    }
}

#[tonic::async_trait]
impl worker_server::Worker for Service {
    type BundleStream = Events<v1::BundleChunk>;
    type WatchStream = Events<v1::LoadReport>;
    type DrainStream = Events<v1::DrainEvent>;

    async fn bundle(&self, _: Request<v1::BundleRequest>) -> Answer<v1::BundleChunk> {
        let chunks: Vec<_> = self.script.bundle.chunks(1 << 20).map(|chunk| chunk.to_vec().into()).collect();
        Ok(Response::new(stream::iter(chunks).map(|data| Ok(v1::BundleChunk { data })).boxed()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Answer<v1::LoadReport> {
        Ok(Response::new(self.clone().reports().boxed()))
    }

    async fn record(&self, _: Request<v1::RecordRequest>) -> Result<Response<v1::InstanceRecord>, Status> {
        without("a stand-in is asked by nobody for its record")
    }

    async fn drain(&self, _: Request<v1::DrainRequest>) -> Answer<v1::DrainEvent> {
        without("a stand-in does not drain")
    }
}
