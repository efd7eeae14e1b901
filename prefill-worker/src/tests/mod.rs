//! The service over a real engine and transfer: a prompt whose KV is never accepted.

mod end;
mod reports;

use crate::service::PrefillService;
use crate::sink::NoSink;
use baton_engine::{EngineHandle, SequencePhase};
use baton_kv_cache::{Fill, Reserve, SharedPool};
use baton_kv_transfer::{
    AdoptReply, GrantReply, HandoffFailure, HoldPoint, KvTransfer, NoHooks, RefuseReason, ReserveOffer, SinkHandler,
    TransferConfig, TransferHooks, TransportChoice, VerifiedHandoff,
};
use baton_memory::{HostPool, PoolMemory};
use baton_node::TokioRuntime;
use baton_node::membership::Members;
use baton_node::metrics::Metrics;
use baton_proto::convert::status::to_error;
use baton_proto::v1::{self, prefill_event::Event, prefill_server::Prefill};
use baton_types::{Digest, ErrorKind, Incarnation, InstanceId, Party, RequestId, SamplingParams, SequenceSpec, Share};
use baton_worker::bring_up;
use baton_worker::config::WorkerConfig;
use baton_worker::drain::Drain;
use baton_worker::grpc::Replies;
use baton_worker::hold::LeaseHold;
use baton_worker::phases::Phases;
use baton_worker::role::Parts;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_stream::StreamExt as _;
use tonic::Request;

/// Nothing here takes long: a wait of this length counts as endless.
const FOREVER: Duration = Duration::from_secs(30);

/// A worker's first start.
const FIRST: Incarnation = Incarnation(1);

/// Holds back every handoff before it is offered.
struct NoOffers;

impl TransferHooks for NoOffers {
    fn hold(&self, phase: HoldPoint, _: &RequestId) -> bool {
        phase == HoldPoint::Offer
    }
}

/// A prefill worker, and the transfer of another instance that refuses every offer.
fn pair() -> (PrefillService, KvTransfer) {
    pair_of(FIRST, Arc::new(NoHooks))
}

/// The same for another start; each start has weights of its own.
fn pair_of(start: Incarnation, hooks: Arc<dyn TransferHooks>) -> (PrefillService, KvTransfer) {
    pair_to(start, hooks, refusing)
}

fn refusing(engine: EngineHandle) -> Arc<dyn SinkHandler> {
    Arc::new(NoSink { engine, members: Members::default() })
}

/// The same, where the other instance answers offers as `sink` does.
fn pair_to(
    start: Incarnation,
    hooks: Arc<dyn TransferHooks>,
    sink: fn(EngineHandle) -> Arc<dyn SinkHandler>,
) -> (PrefillService, KvTransfer) {
    let mut config = WorkerConfig::default();
    config.model.model = format!(
        "random:hidden=32,layers=1,heads=2,kv_heads=1,head_dim=16,ffn=64,vocab=300,context=256,seed={}",
        start.0
    );
    config.engine.threads = 1.into();
    config.engine.kv_cache_bytes = baton_node::config::ByteSize(1 << 20);
    let loaded = bring_up::load(&config.model, &config.engine, &|_, _| ()).unwrap();
    let transfer = |name: &str, memory: Arc<dyn PoolMemory>, sink: Arc<dyn SinkHandler>| {
        let party = Party { instance: InstanceId::try_new(name).unwrap(), incarnation: start };
        let transport = TransportChoice::Tcp { bind: IpAddr::V4(Ipv4Addr::LOCALHOST), port: 0 };
        let (map, hooks) = (loaded.map.clone(), hooks.clone());
        let config =
            TransferConfig { hooks, ..TransferConfig::new(party, loaded.compatibility.clone(), map, transport) };
        KvTransfer::start(config, memory, sink).unwrap()
    };
    let other = transfer("d", HostPool::new(loaded.map.bytes()).unwrap(), sink(loaded.engine.clone()));
    let transfer = transfer("p", loaded.memory.clone(), refusing(loaded.engine.clone()));
    let tracer = SdkTracerProvider::builder().build().tracer("baton");
    let runtime = Arc::new(TokioRuntime::current());
    let parts = Parts {
        engine: loaded.engine,
        transfer,
        drain: Drain::new(runtime.clone()),
        tracer,
        phases: Metrics::new("test").register(|registry| Phases::register(registry, "m", "p")),
        call_max: FOREVER,
        message_max: 1 << 20,
        model: Digest([1; 32]),
        adapters: None,
        runtime,
    };
    (PrefillService { parts }, other)
}

/// Grants blocks of a pool to every offer.
struct Granting(SharedPool);

impl SinkHandler for Granting {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        let (tokens, fill) = (offer.tokens as usize, Fill::Received { peer_block_tokens: None });
        let wanted = Reserve { hashes: &[], reuse_tokens_max: 0, tokens, fill, keep_free: &[], now: Instant::now() };
        match self.0.try_reserve(wanted) {
            Some(lease) => reply.grant(Box::new(LeaseHold::new(lease, &offer.source, 16))),
            None => reply.refuse(RefuseReason::NoRoom, "the pool is full"),
        }
    }

    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Ok(()));
    }

    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
}

/// A call of `service` for a prompt whose KV goes to `sink`.
fn request(service: &PrefillService, sink: &KvTransfer) -> v1::PrefillRequest {
    let sequence = SequenceSpec {
        request_id: RequestId::try_new("a").unwrap(),
        tokens: vec![1, 2, 3, 4, 5],
        prompt_len: 5,
        sampling: SamplingParams::default(),
        sample_index: 0,
        priority: 0,
        cache: None,
        share: Share::default(),
        adapter: None,
    };
    v1::PrefillRequest {
        sequence: Some(sequence.into()),
        sink: Some(sink.party().clone().into()),
        sink_address: sink.address().to_bytes().into(),
        party: Some(service.parts.transfer.party().clone().into()),
        get: None,
    }
}

/// The first token of a call.
async fn first_token(service: &PrefillService, sink: &KvTransfer) -> u32 {
    first_token_of(&mut service.run(Request::new(request(service, sink))).await.unwrap().into_inner()).await
}

/// The first token of a call's stream.
async fn first_token_of(stream: &mut Replies<v1::PrefillEvent>) -> u32 {
    loop {
        let event = tokio::time::timeout(FOREVER, stream.next()).await.expect("it does not wait for ever");
        if let Some(Event::Token(token)) = event.unwrap().unwrap().event {
            return token.id;
        }
    }
}

/// Waits until something is so.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(FOREVER, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// The hazard: a worker addressed by its address alone answers with the weights that it has now.
#[tokio::test]
async fn without_the_party_another_start_answers_with_other_weights() {
    let (first, sink) = pair_of(FIRST, Arc::new(NoOffers));
    let (second, other_sink) = pair_of(Incarnation(2), Arc::new(NoOffers));
    assert_ne!(first_token(&first, &sink).await, first_token(&second, &other_sink).await);
    let refused = second.run(Request::new(request(&first, &sink))).await;
    assert_eq!(to_error(&refused.map(|_| "a stream").unwrap_err()).kind, ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_call_for_another_start_computes_nothing() {
    let (service, sink) = pair();
    let another = Party { incarnation: Incarnation(2), ..service.parts.transfer.party().clone() };
    for party in [Some(another.into()), None] {
        let refused =
            service.run(Request::new(v1::PrefillRequest { party: party.clone(), ..request(&service, &sink) })).await;
        let error = to_error(&refused.map(|_| "a stream").unwrap_err());
        let expected = if party.is_some() { ErrorKind::Unavailable } else { ErrorKind::InvalidRequest };
        assert_eq!(error.kind, expected, "{error:?}");
    }
    assert_eq!(service.parts.engine.load().waiting, 0);
}

#[tokio::test]
async fn a_refused_handoff_ends_the_prefill() {
    let (service, refusing) = pair();
    // Computing the prompt would take far too long.
    service
        .parts
        .engine
        .set_gate(Some(Arc::new(|_: &RequestId, phase: SequencePhase| phase != SequencePhase::Prefill)));
    let mut stream = service.run(Request::new(request(&service, &refusing))).await.unwrap().into_inner();
    let mut next = async || tokio::time::timeout(FOREVER, stream.next()).await.expect("it does not wait for ever");
    let started = next().await;
    assert!(matches!(started, Some(Ok(v1::PrefillEvent { event: Some(Event::Started(_)) }))), "{started:?}");
    let error = to_error(&next().await.unwrap().expect_err("no token can come"));
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error:?}");
    assert!(error.message.contains("the handoff failed"), "{error:?}");
    assert!(next().await.is_none());
    until("its blocks are free again", || service.parts.engine.pool().counts().referenced == 0).await;
}
