//! The service over a real engine and transfer: claims whose KV never arrives, and KV that does not match its claim.

use crate::grants::claims::ClaimLimits;
use crate::handoffs::Handoffs;
use crate::service::DecodeService;
use baton_kv_cache::{PoolShape, SharedPool};
use baton_kv_transfer::{
    CommitPayload, GetRequest, HandoffFailure, KvTransfer, Peer, PutHandle, PutReport, PutRequest, ReserveOffer,
    SinkHandler, TransferConfig, TransportChoice,
};
use baton_node::TokioRuntime;
use baton_node::identity::{Authority, Identity, IdentityConfig, Role};
use baton_node::membership::Members;
use baton_node::metrics::Metrics;
use baton_proto::convert::status::to_error;
use baton_proto::v1::{self, decode_event::Event, decode_request::Prefill, decode_server::Decode};
use baton_types::fence::AlreadyDone;
use baton_types::{
    BlockId, BlockTable, BlockTables, Digest, ErrorKind, Fence, Incarnation, InstanceId, Party, RequestId,
    SamplingParams, SequenceSpec, Share, TokenId,
};
use baton_worker::bring_up::{self, Loaded};
use baton_worker::config::WorkerConfig;
use baton_worker::credentials;
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
use tonic::{Request, Status};

/// Nothing here takes long: a wait of this length counts as endless.
const FOREVER: Duration = Duration::from_secs(30);
/// The default block size of these engines.
const BLOCK_TOKENS: u32 = 16;

fn party(name: &str) -> Party {
    Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(1) }
}

fn loaded() -> Loaded {
    let mut config = WorkerConfig::default();
    config.model.model = "random:hidden=32,layers=1,heads=2,kv_heads=1,head_dim=16,ffn=64,vocab=300,context=256".into();
    config.engine.threads = 1.into();
    config.engine.kv_cache_bytes = baton_node::config::ByteSize(1 << 20);
    bring_up::load(&config.model, &config.engine, &|_, _| ()).unwrap()
}

fn transfer_config(name: &str, loaded: &Loaded, identity: &Identity) -> TransferConfig {
    let transport = TransportChoice::Tcp { bind: IpAddr::V4(Ipv4Addr::LOCALHOST), port: 0 };
    let config = TransferConfig::new(party(name), loaded.compatibility.clone(), loaded.map.clone(), transport);
    TransferConfig { credentials: credentials::of(identity), ..config }
}

fn runtime() -> Arc<TokioRuntime> {
    Arc::new(TokioRuntime::current())
}

fn service() -> DecodeService {
    service_as(&Identity::default(), Members::default())
}

fn service_as(identity: &Identity, members: Members) -> DecodeService {
    let loaded = loaded();
    let handoffs = Handoffs::new(loaded.engine.clone(), members, ClaimLimits { claims_max: 8, tokens_max: 1000 });
    let transfer = KvTransfer::start(transfer_config("d", &loaded, identity), loaded.memory, handoffs.clone()).unwrap();
    let tracer = SdkTracerProvider::builder().build().tracer("baton");
    let runtime = runtime();
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
    DecodeService { handoffs, parts }
}

/// Claims capacity for a prompt of the tokens 1 to 5, whose KV `p` is to send.
async fn claim(service: &DecodeService, id: &str, within: Duration) -> Result<Stream, Status> {
    claim_of(service, id, 5, 0, within).await
}

/// As [`claim`], for a prompt of the tokens 1 to `len` with this priority.
async fn claim_of(
    service: &DecodeService,
    id: &str,
    len: u32,
    priority: i32,
    within: Duration,
) -> Result<Stream, Status> {
    let mut request = Request::new(request(service, id, len, priority));
    request.set_timeout(within);
    service.generate(request).await.map(tonic::Response::into_inner)
}

/// The request of such a call.
fn request(service: &DecodeService, id: &str, len: u32, priority: i32) -> v1::DecodeRequest {
    let sequence = SequenceSpec {
        request_id: RequestId::try_new(id).unwrap(),
        tokens: (1..=len).collect(),
        prompt_len: len as usize,
        sampling: SamplingParams::default(),
        sample_index: 0,
        priority,
        cache: None,
        share: Share::default(),
        adapter: None,
    };
    let prefill = Prefill::AwaitKv(v1::AwaitKv { source: Some(party("p").into()) });
    let party = Some(service.parts.transfer.party().clone().into());
    v1::DecodeRequest { sequence: Some(sequence.into()), prefill: Some(prefill), party }
}

#[tokio::test]
async fn a_call_for_another_start_claims_nothing() {
    let service = service();
    let another = Party { incarnation: Incarnation(2), ..service.parts.transfer.party().clone() };
    for party in [Some(another.into()), None] {
        let refused = service
            .generate(Request::new(v1::DecodeRequest { party: party.clone(), ..request(&service, "a", 5, 0) }))
            .await;
        let error = to_error(&refused.map(|_| "a stream").unwrap_err());
        let expected = if party.is_some() { ErrorKind::Unavailable } else { ErrorKind::InvalidRequest };
        assert_eq!(error.kind, expected, "{error:?}");
    }
    assert_eq!(service.handoffs.claimed().tokens, 0);
}

type Reply = Result<v1::DecodeEvent, Status>;
type Stream = Replies<v1::DecodeEvent>;

async fn next(stream: &mut Stream) -> Option<Reply> {
    tokio::time::timeout(FOREVER, stream.next()).await.expect("it does not wait for ever")
}

fn is_claimed(reply: Option<Reply>) -> bool {
    matches!(reply, Some(Ok(v1::DecodeEvent { event: Some(Event::Claimed(_)) })))
}

#[tokio::test]
async fn a_claim_whose_kv_never_comes_lapses_with_its_deadline() {
    let service = service();
    let mut stream = claim(&service, "a", Duration::from_secs(2)).await.unwrap();
    assert!(is_claimed(next(&mut stream).await));
    assert_eq!(service.handoffs.claimed().tokens, 5);
    let end = next(&mut stream).await.expect("an end").expect_err("no token can come");
    assert_eq!(to_error(&end).kind, ErrorKind::DeadlineExceeded);
    assert!(next(&mut stream).await.is_none());
    assert_eq!(service.handoffs.claimed().tokens, 0);
}

#[tokio::test]
async fn a_refused_call_leaves_the_claim_of_its_namesake_alone() {
    let service = service();
    let mut stream = claim(&service, "a", FOREVER).await.unwrap();
    assert!(is_claimed(next(&mut stream).await));
    let refused = claim(&service, "a", FOREVER).await.map(|_| "a stream").expect_err("this id is running");
    assert_eq!(to_error(&refused).kind, ErrorKind::InvalidRequest);
    assert_eq!(service.handoffs.claimed().tokens, 5, "the claim of the first call stands");
}

/// Hands over KV of five tokens from `p`, for a claim of the prompt 1 to 5, in a commit that names these tokens.
async fn hand_over(
    service: &DecodeService,
    id: &str,
    tokens: Vec<TokenId>,
) -> (Result<PutReport, HandoffFailure>, Stream) {
    let mut stream = claim(service, id, FOREVER).await.unwrap();
    assert!(is_claimed(next(&mut stream).await));
    (send(offer(&source(), service, id, 5), 5, tokens).await, stream)
}

/// The transfer of `p`.
fn source() -> KvTransfer {
    source_as(&Identity::default())
}

fn source_as(identity: &Identity) -> KvTransfer {
    let loaded = loaded();
    let handler =
        Handoffs::new(loaded.engine.clone(), Members::default(), ClaimLimits { claims_max: 0, tokens_max: 0 });
    KvTransfer::start(transfer_config("p", &loaded, identity), loaded.memory, handler).unwrap()
}

/// The answer to `p` when it requests a prefix that is not cached.
async fn asks_for_a_prefix(service: &DecodeService, identity: &Identity) -> String {
    let (source, transfer) = (source_as(identity), &service.parts.transfer);
    let owner = Peer { party: transfer.party().clone(), address: transfer.address(), shard: 0 };
    let lease = SharedPool::try_new(PoolShape::full(1, 1, 16)).unwrap().try_lease(&[1]).unwrap();
    let get = GetRequest {
        request_id: RequestId::try_new("get").unwrap(),
        name: vec![0; 16],
        from: 0,
        tokens: BLOCK_TOKENS,
        blocks: lease.tables().clone(),
        deadline: Instant::now() + FOREVER,
        hold: Box::new(LeaseHold::new(lease, &owner.party, BLOCK_TOKENS as usize)),
    };
    let read = source.get(&owner, get).unwrap().outcome().await;
    read.map(|_| "the prefix").expect_err("nobody has it").to_string()
}

#[tokio::test]
async fn only_registered_workers_are_told_of_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let lasts = Duration::from_secs(86_400);
    Authority::new().unwrap().issue(folder.path(), &[Role::Worker], &[], lasts, "").unwrap();
    let config = IdentityConfig { dir: Some(folder.path().into()), ..IdentityConfig::default() };
    // With and without a certificate: a certificate does not prove that a worker is registered, because workers that have ended have one
    // too.
    for identity in [Identity::default(), Identity::start(&config, Role::Worker).await.unwrap()] {
        let asks = async |members| asks_for_a_prefix(&service_as(&identity, Members::of([members])), &identity).await;
        let stranger = asks(party("another")).await;
        assert!(stranger.contains("no worker that is registered here"), "{stranger}");
        let earlier = asks(Party { incarnation: Incarnation(9), ..party("p") }).await;
        assert!(earlier.contains("no worker that is registered here"), "{earlier}");
        let member = asks(party("p")).await;
        assert!(member.contains("not cached here"), "{member}");
    }
}

/// Offers KV of this many tokens.
fn offer(source: &KvTransfer, service: &DecodeService, id: &str, tokens: u32) -> PutHandle {
    let blocks = BlockTables(vec![BlockTable::from_start((0..tokens.div_ceil(BLOCK_TOKENS)).map(BlockId).collect())]);
    let (request_id, deadline) = (RequestId::try_new(id).unwrap(), Instant::now() + FOREVER);
    let sink = &service.parts.transfer;
    let peer = Peer { party: sink.party().clone(), address: sink.address(), shard: 0 };
    source.put(&peer, PutRequest { request_id, tokens, blocks, deadline, hold: Box::new(()) }).unwrap()
}

/// Sends what was offered.
async fn send(put: PutHandle, len: u32, tokens: Vec<TokenId>) -> Result<PutReport, HandoffFailure> {
    let done: Fence = Arc::new(AlreadyDone);
    put.layer_launched(0, len as usize, &done);
    put.finish(CommitPayload { tokens, prompt_len: len, extra: vec![] });
    tokio::task::spawn_blocking(|| put.wait()).await.unwrap()
}

async fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + FOREVER;
    while !done() {
        assert!(Instant::now() < until, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn offers_wait_by_priority_and_then_as_they_came() {
    let (service, source) = (service(), source());
    tokio::spawn(service.handoffs.grant_when_freed(service.parts.runtime.clone()));
    let (engine, transfer) = (&service.parts.engine, &service.parts.transfer);
    let mut taken: Vec<_> = std::iter::from_fn(|| engine.reserve(BLOCK_TOKENS as usize, &[])).collect();
    taken.truncate(taken.len() - 2); // Room for a short prompt, and for its answer, but not for a long one.
    let mut streams = Vec::new();
    for (id, len, priority) in [("long", 100, -10), ("short", 5, -10), ("urgent", 5, 10)] {
        streams.push(claim_of(&service, id, len, priority, FOREVER).await.unwrap());
    }
    let long = offer(&source, &service, "long", 100);
    eventually("the long one waits", || transfer.stats().sinks == 1).await;
    let short = offer(&source, &service, "short", 5);
    eventually("the short one waits behind it", || transfer.stats().sinks == 2).await;
    send(offer(&source, &service, "urgent", 5), 5, vec![1, 2, 3, 4, 5, 6]).await.unwrap();
    eventually("the others still wait", || transfer.stats().sinks == 2).await;
    assert_eq!(transfer.stats().tickets, 0, "the long one does not fit, and the short one came after it");
    drop(taken);
    send(long, 100, (1..=101).collect()).await.unwrap();
    send(short, 5, vec![1, 2, 3, 4, 5, 6]).await.unwrap();
}

/// Any worker can offer KV of any request, and end the offer before it is refused.
#[tokio::test]
async fn an_offer_of_a_worker_that_was_not_asked_ends_no_claim() {
    let (service, source) = (service(), source());
    let _stream = claim(&service, "a", FOREVER).await.unwrap();
    let ended = |id: &str, source: &str| {
        let (request_id, deadline) = (RequestId::try_new(id).unwrap(), Instant::now() + FOREVER);
        let offer =
            ReserveOffer { request_id, source: party(source), tokens: 5, partial: true, deadline, shard: 0, legs: 1 };
        service.handoffs.failed(&offer, HandoffFailure::AbortedByPeer("the test".into()));
    };
    ended("a", "q");
    send(offer(&source, &service, "a", 5), 5, vec![1, 2, 3, 4, 5, 6]).await.unwrap();
    let _other = claim(&service, "a2", FOREVER).await.unwrap();
    assert_eq!(service.handoffs.claimed().sequences, 1);
    ended("a2", "p");
    assert_eq!(service.handoffs.claimed().sequences, 0, "its own source ends it");
}

/// Nothing but the arrival itself decides again here: the task that looks again from time to time does not run.
#[tokio::test]
async fn an_offer_that_awaits_the_same_prompt_is_granted_as_soon_as_that_arrives() {
    let (service, source) = (service(), source());
    let mut streams = Vec::new();
    for id in ["first", "same"] {
        let mut request = request(&service, id, 40, 0);
        request.sequence.as_mut().unwrap().cache = Some(v1::CacheUse::default());
        streams.push(service.generate(Request::new(request)).await.unwrap().into_inner());
    }
    let transfer = &service.parts.transfer;
    let first = offer(&source, &service, "first", 40);
    eventually("the first is granted", || transfer.stats().tickets == 1).await;
    let same = offer(&source, &service, "same", 40);
    eventually("the second is offered", || transfer.stats().sinks == 2).await;
    assert_eq!(transfer.stats().tickets, 1, "it waits for the blocks that are on their way");
    send(first, 40, (1..=41).collect()).await.unwrap();
    let report = tokio::time::timeout(FOREVER, send(same, 40, (1..=41).collect()));
    report.await.expect("it is granted").unwrap();
}

#[tokio::test]
async fn kv_of_the_claimed_tokens_is_adopted() {
    let service = service();
    let (result, mut stream) = hand_over(&service, "a", vec![1, 2, 3, 4, 5, 6]).await;
    result.unwrap();
    let adopted = next(&mut stream).await;
    assert!(matches!(adopted, Some(Ok(v1::DecodeEvent { event: Some(Event::Adopted(_)) }))), "{adopted:?}");
}

#[tokio::test]
async fn kv_of_other_tokens_than_were_claimed_is_not_adopted() {
    let service = service();
    let cases = [
        ("another-prompt", vec![1, 2, 3, 4, 9, 6]),
        ("without-a-first-token", vec![1, 2, 3, 4, 5]),
        ("of-more-tokens", vec![1, 2, 3, 4, 5, 6, 7]),
    ];
    for (id, tokens) in cases {
        let (result, mut stream) = hand_over(&service, id, tokens).await;
        let failure = result.expect_err(id);
        assert!(failure.to_string().contains("not those that were claimed"), "{id}: {failure}");
        let end = next(&mut stream).await.expect("an end").expect_err("no token can come");
        assert_eq!(to_error(&end).kind, ErrorKind::Unavailable, "{id}");
        assert_eq!(service.handoffs.claimed().tokens, 0);
    }
}
