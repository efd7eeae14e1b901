//! Handoffs from P's engine to D's, as the workers do them, but without gRPC.

use super::case::{Case, Read};
use super::eviction::{Eviction, PRETENDED_PIN_MS};
use super::side::{Events, Place, Said, Side};
use super::world::{PATIENCE, index_of};
use baton_engine::{EngineHandle, PrefillObserver, Run, SequenceRequest};
use baton_kv_cache::Lease;
use baton_kv_transfer::{
    AdoptReply, CommitPayload, GrantReply, HandoffFailure, Hazard, KvTransfer, NoHooks, Peer, PinQuestion, PinReply,
    PutHandle, PutRequest, RefuseReason, ReserveOffer, SinkHandler, TransferConfig, TransferError, TransferHooks,
    VerifiedHandoff,
};
use baton_node::membership::Members;
use baton_types::{BlockTables, Fence, Incarnation, InstanceId, Party, RequestId, TokenId};
use baton_worker::hold::LeaseHold;
use baton_worker::prefix_get::{self, CachedPrefix, PrefixGet, PrefixGetError};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

fn party(name: &str) -> anyhow::Result<Party> {
    Ok(Party { instance: InstanceId::try_new(name)?, incarnation: Incarnation(1) })
}

/// The transfer services of a case.
pub(super) struct Link {
    p: EngineHandle,
    d_block_tokens: u32,
    pub(super) adopter: Arc<Adopter>,
    source: KvTransfer,
    sink: KvTransfer,
    peer: Peer,
    read: Read,
    /// Gets whose blocks were evicted before they were read.
    pub(super) evicted: Arc<AtomicUsize>,
    /// Gets that were refused because the blocks were evicted before they were requested.
    pub(super) gone: AtomicUsize,
}

impl Link {
    pub(super) fn start(p: &Side, d: &Side, case: &Case, events: Sender<Said>) -> anyhow::Result<Self> {
        let eviction = Eviction::of(d, case.read);
        let (evicted, owner) = (eviction.forced.clone(), eviction.owner.clone());
        let hooks: [Arc<dyn TransferHooks>; 2] = match case.read {
            Read::Undisturbed | Read::Gone => [Arc::new(NoHooks), Arc::new(NoHooks)],
            Read::Evicted | Read::Unguarded => [Arc::new(eviction), Arc::new(NoHooks)],
        };
        let [of_p, of_d] = hooks;
        let serve = |side: &Side, name: &str, hooks: Arc<dyn TransferHooks>, handler: Arc<dyn SinkHandler>| {
            let mut config =
                TransferConfig::new(party(name)?, side.compatibility.clone(), side.map.clone(), case.transport());
            config.hooks = hooks;
            if case.read == Read::Unguarded {
                config.limits.pin_ms = PRETENDED_PIN_MS;
                config.hazards = [Hazard::PretendedPins].into();
            }
            anyhow::Ok(KvTransfer::start(config, side.memory.clone(), handler)?)
        };
        let engine = d.engine.clone();
        let (claims, waiting, in_flight) = Default::default();
        let adopter =
            Arc::new(Adopter { engine, members: Members::of([party("p")?]), events, claims, waiting, in_flight });
        let (source, sink) = (serve(p, "p", of_p, Arc::new(NoSink))?, serve(d, "d", of_d, adopter.clone())?);
        owner.get_or_init(|| sink.clone());
        let peer = Peer { party: sink.party().clone(), address: sink.address(), shard: 0 };
        Ok(Self {
            p: p.engine.clone(),
            d_block_tokens: d.map.layout().block_tokens(),
            adopter,
            source,
            sink,
            peer,
            read: case.read,
            evicted,
            gone: AtomicUsize::new(0),
        })
    }

    /// Prefills `request` on P for D. Also returns the part that commits the put.
    pub(super) fn ship(&self, request: SequenceRequest) -> (Run, Shipment) {
        let shipment = Shipment::default();
        let loader = Loader {
            transfer: self.source.clone(),
            peer: self.peer.clone(),
            request_id: request.id.clone(),
            tokens: request.tokens.len() as u32,
            shipment: shipment.clone(),
        };
        self.adopter.claims.lock().insert(request.id.clone(), request);
        (Run::PrefillOnly { observer: Box::new(loader) }, shipment)
    }

    /// Gets what D has cached of `request` into P's cache. The blocks stay cached while the result lives; `None` if nothing was got.
    pub(super) fn get(&self, request: &SequenceRequest) -> anyhow::Result<Option<CachedPrefix>> {
        let names = request.block_hashes();
        let tokens = self.adopter.engine.pool().cached_tokens(&names);
        if self.read == Read::Gone {
            self.adopter.engine.pool().clear_cache();
        }
        let get = PrefixGet::try_new(self.peer.clone(), tokens as u32, self.d_block_tokens)?.patient(PATIENCE);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // A prefix that cannot be got is computed.
        let got = runtime.block_on(prefix_get::get_prefix(&self.p, &self.source, request, &get));
        let is_gone = matches!(
            &got,
            Err(PrefixGetError::Failed(HandoffFailure::Refused { reason: RefuseReason::UnknownRequest, .. }))
        );
        self.gone.fetch_add(usize::from(is_gone), Ordering::SeqCst);
        Ok(got.ok().flatten())
    }

    pub(super) fn stop(&self) {
        let by = Instant::now() + Duration::from_secs(5);
        self.source.stop(by);
        self.sink.stop(by);
    }
}

/// The receiving side, D: reserves blocks, and starts the sequences whose KV arrived in them.
pub(super) struct Adopter {
    engine: EngineHandle,
    /// P, which may read.
    members: Members,
    events: Sender<Said>,
    claims: Mutex<HashMap<RequestId, SequenceRequest>>,
    waiting: Mutex<VecDeque<(ReserveOffer, GrantReply)>>,
    /// Granted, and not yet passed to the engine.
    in_flight: AtomicUsize,
}

impl Adopter {
    /// Grants the offers that have room now, in order.
    pub(super) fn grant_waiting(&self) {
        let mut waiting = self.waiting.lock();
        while let Some((offer, _)) = waiting.front() {
            let claims = self.claims.lock();
            let names = claims.get(&offer.request_id).map(SequenceRequest::block_hashes).unwrap_or_default();
            drop(claims);
            let Some(lease) = self.engine.reserve(offer.tokens as usize, &names) else { return };
            let Some((offer, reply)) = waiting.pop_front() else { return };
            self.in_flight.fetch_add(1, Ordering::SeqCst);
            let block_tokens = self.engine.block_tokens();
            reply.grant(Box::new(LeaseHold::new(lease, &offer.source, block_tokens)));
        }
    }

    fn adopt(&self, handoff: VerifiedHandoff) -> Result<(), String> {
        let mut request = self.claims.lock().remove(&handoff.request_id).ok_or("no such request")?;
        if handoff.kv_tokens as usize != request.tokens.len() || !handoff.tokens.starts_with(&request.tokens) {
            return Err("these are not its tokens".into());
        }
        request.tokens = handoff.tokens;
        let lease = LeaseHold::into_lease(handoff.hold).ok_or("these blocks were granted by another")?;
        let events = Events { place: Place::D, index: index_of(&request.id), sender: self.events.clone() };
        let control = self.engine.submit(request, Run::Adopted { lease, turn: None }, Box::new(events));
        control.map_err(|e| e.to_string())?.detach();
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    /// Whether the next offer finds no room, and the KV of all granted offers has arrived.
    pub(super) fn is_full(&self) -> bool {
        let waiting = self.waiting.lock();
        !waiting.is_empty() && self.in_flight.load(Ordering::SeqCst) == 0
    }
}

impl SinkHandler for Adopter {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        self.waiting.lock().push_back((offer, reply));
        self.grant_waiting();
    }

    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        reply.answer(self.adopt(handoff));
    }

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        prefix_get::pin_prefix(&self.engine, &self.members, &question, reply);
    }

    fn failed(&self, offer: &ReserveOffer, reason: HandoffFailure) {
        let event =
            baton_engine::SequenceEvent::Failed { kind: reason.kind(), message: format!("handoff failed: {reason}") };
        // The receiver is gone if the case has failed already.
        let _ = self.events.send(Said { place: Place::D, index: index_of(&offer.request_id), event });
    }
}

/// P refuses all puts.
struct NoSink;

impl SinkHandler for NoSink {
    fn reserve(&self, _offer: ReserveOffer, reply: GrantReply) {
        reply.refuse(RefuseReason::UnknownRequest, "P takes nothing in");
    }

    fn verified(&self, _handoff: VerifiedHandoff, reply: AdoptReply) {
        reply.answer(Err("P takes nothing in".into()));
    }

    fn failed(&self, _offer: &ReserveOffer, _reason: HandoffFailure) {}
}

/// The put of one prompt's KV. The transfer holds the lease until it no longer reads the blocks.
#[derive(Clone, Default)]
pub(super) struct Shipment {
    outgoing: Arc<Mutex<Option<Result<PutHandle, TransferError>>>>,
    pouch: Arc<Mutex<Option<Lease>>>,
}

impl Shipment {
    /// Everything is computed: commits.
    pub(super) fn commit(&self, tokens: Vec<TokenId>, prompt_len: usize) -> anyhow::Result<PutHandle> {
        let outgoing = self.outgoing.lock().take().ok_or_else(|| anyhow::anyhow!("no handoff was opened"))??;
        outgoing.finish(CommitPayload { tokens, prompt_len: prompt_len as u32, extra: Vec::new() });
        Ok(outgoing)
    }
}

/// Notifies the transfer of finished layers.
struct Loader {
    transfer: KvTransfer,
    peer: Peer,
    request_id: RequestId,
    tokens: u32,
    shipment: Shipment,
}

impl PrefillObserver for Loader {
    fn started(&mut self, blocks: &BlockTables, now: Instant) {
        let request = PutRequest {
            request_id: self.request_id.clone(),
            tokens: self.tokens,
            blocks: blocks.clone(),
            deadline: now + PATIENCE,
            hold: Box::new(self.shipment.pouch.clone()),
        };
        *self.shipment.outgoing.lock() = Some(self.transfer.put(&self.peer, request));
    }

    fn grown(&mut self, blocks: &BlockTables) {
        if let Some(Ok(outgoing)) = &*self.shipment.outgoing.lock() {
            outgoing.grown(blocks.clone());
        }
    }

    fn layer_launched(&mut self, layer: u32, tokens_end: usize, fence: &Fence) {
        if let Some(Ok(outgoing)) = &*self.shipment.outgoing.lock() {
            outgoing.layer_launched(layer, tokens_end, fence);
        }
    }

    fn prefilled(&mut self, lease: Lease) {
        *self.shipment.pouch.lock() = Some(lease);
    }

    fn ended(&mut self, lease: Lease) {
        self.prefilled(lease);
    }
}
