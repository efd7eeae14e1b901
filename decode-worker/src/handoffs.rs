//! The sink of handoffs: turns claims into reservations, and verified blocks into running sequences.

use crate::claims::{Claim, ClaimLimits, Claims, OfferError};
use crate::slot::Slot;
use baton_engine::EngineHandle;
use baton_engine::api::{Run, SequenceRequest};
use baton_engine::scheduler::SequenceKey;
use baton_kv_cache::{HASH_TOKENS, PrefixHash};
use baton_kv_transfer::{
    AdoptReply, GrantReply, HandoffFailure, PinQuestion, PinReply, RefuseReason, ReserveOffer, SinkHandler,
    VerifiedHandoff,
};
use baton_node::membership::Members;
use baton_types::{ErrorKind, Party, RequestError, RequestId, Runtime};
use baton_worker::hold::LeaseHold;
use baton_worker::prefix_get;
use baton_worker::service::Claimed;
use baton_worker::stream::StreamSink;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

/// How often offers that wait are looked at without a reason.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How long an offer waits for KV that is on its way already: then it comes twice, which costs about as much.
const ARRIVES_MAX: Duration = Duration::from_millis(500);

/// What a claim's stream waits for and how its sequence will run.
pub(crate) struct ClaimStream {
    /// As it was claimed, without the token that comes with its KV.
    pub(crate) sequence: SequenceRequest,
    pub(crate) sink: StreamSink,
    pub(crate) slot: Slot,
    pub(crate) adopted: oneshot::Sender<Adopted>,
}

/// What arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adopted {
    pub(crate) bytes: u64,
}

/// An offer that waits for room.
struct Waiting {
    offer: ReserveOffer,
    reply: GrantReply,
    /// Of prefixes that may be here already.
    block_hashes: Arc<[PrefixHash]>,
    /// Waits at most until then for KV that is on its way and begins with the same.
    arrives_by: Instant,
}

impl Waiting {
    /// Whether KV that is on its way will be the next that this one lacks.
    fn awaits(&self, arriving: &HashMap<RequestId, Arc<[PrefixHash]>>, engine: &EngineHandle, now: Instant) -> bool {
        let Some(last) = self.block_hashes.len().checked_sub(1) else { return false };
        if arriving.is_empty() || now >= self.arrives_by {
            return false;
        }
        let block = engine.config().block_tokens as usize;
        // The end of the first block that is not here.
        let next = (engine.pool().cached_tokens(&self.block_hashes) + block) / HASH_TOKENS - 1;
        next < last && arriving.values().any(|hashes| hashes.get(next) == Some(&self.block_hashes[next]))
    }
}

/// All handoffs towards this instance.
pub struct Handoffs {
    engine: EngineHandle,
    runtime: Arc<dyn Runtime>,
    /// Who may read what is cached.
    members: Members,
    claims: Mutex<Claims<ClaimStream>>,
    /// By their turn among the sequences of the engine: higher priorities first, then as they came.
    waiting: Mutex<BTreeMap<SequenceKey, Waiting>>,
    /// Block hashes of what was granted and has not arrived.
    arriving: Mutex<HashMap<RequestId, Arc<[PrefixHash]>>>,
    freed: Arc<Notify>,
}

impl Handoffs {
    /// Takes handoffs in for an engine from now on: at most `claims_max` are claimed at once.
    pub fn start(engine: &EngineHandle, members: Members, claims_max: usize, runtime: Arc<dyn Runtime>) -> Arc<Self> {
        let pool_tokens = u64::from(engine.pool().blocks_per_group()) * u64::from(engine.config().block_tokens);
        // Twice the pool: while one poolful runs, the next may be on its way.
        let limits = ClaimLimits { claims_max, tokens_max: 2 * pool_tokens };
        let handoffs = Self::new(engine.clone(), members, limits, runtime.clone());
        runtime.spawn(Box::pin(handoffs.clone().grant_when_freed()));
        handoffs
    }

    pub(crate) fn new(
        engine: EngineHandle,
        members: Members,
        limits: ClaimLimits,
        runtime: Arc<dyn Runtime>,
    ) -> Arc<Self> {
        let freed = Arc::new(Notify::new());
        let wake = Arc::clone(&freed);
        engine.pool().on_freed(move || wake.notify_one());
        Arc::new(Self {
            engine,
            runtime,
            members,
            claims: Mutex::new(Claims::new(limits)),
            waiting: Mutex::default(),
            arriving: Mutex::default(),
            freed,
        })
    }

    /// Books a claim.
    pub(crate) fn book(&self, request: RequestId, claim: Claim<ClaimStream>) -> Result<(), RequestError> {
        self.claims.lock().book(request, claim)
    }

    /// Ends a claim whose stream is gone. Its offer, if there is one, finds no claim any more.
    pub(crate) fn forget(&self, request: &RequestId) {
        self.claims.lock().end(request);
        self.waiting.lock().retain(|_, w| w.offer.request_id != *request);
        self.over(request);
    }

    /// Whether the KV of a request is offered and waits for room.
    pub(crate) fn has_no_room_for(&self, request: &RequestId) -> bool {
        self.waiting.lock().values().any(|waiting| waiting.offer.request_id == *request)
    }

    /// What is claimed and not adopted yet.
    pub fn claimed(&self) -> Claimed {
        let claims = self.claims.lock();
        Claimed { sequences: claims.len(), tokens: claims.tokens() }
    }

    /// Grants waiting offers whenever blocks become free. Runs until it is dropped.
    pub(crate) async fn grant_when_freed(self: Arc<Self>) {
        loop {
            // The engine also keeps room back while one of its own sequences lacks blocks, and says nothing when it no longer does.
            let look_again = self.runtime.now() + LOOK_AGAIN;
            let _ = self.runtime.until(look_again, self.freed.notified()).await;
            self.grant_waiting();
        }
    }

    /// Grants in order: a large offer is not overtaken for ever by small ones of its priority, and what it waits for is kept from
    /// sequences whose turn is after its own.
    fn grant_waiting(&self) {
        let (mut waiting, now) = (self.waiting.lock(), self.engine.now());
        waiting.retain(|_, offer| offer.reply.is_wanted());
        let mut lacks_room = None;
        for turn in waiting.keys().copied().collect::<Vec<_>>() {
            let Some(offer) = waiting.get(&turn) else { continue };
            let mut arriving = self.arriving.lock();
            // One that waits for what comes anyway lacks no room, and nobody waits for it.
            if offer.awaits(&arriving, &self.engine, now) {
                continue;
            }
            let Some(hold) = self.lease(offer) else {
                lacks_room = Some((turn, offer.offer.tokens as usize));
                break;
            };
            if let Some(Waiting { offer, reply, block_hashes, .. }) = waiting.remove(&turn) {
                arriving.insert(offer.request_id, block_hashes);
                drop(arriving);
                reply.grant(Box::new(hold));
            }
        }
        self.engine.keep_room(lacks_room);
    }

    /// The KV of a request is here, or will not come.
    fn over(&self, request: &RequestId) {
        self.arriving.lock().remove(request);
        self.grant_waiting();
    }

    /// Starts what arrived, or says why not, with the stream that waits for it.
    fn take_in(&self, handoff: VerifiedHandoff) -> Result<(), (Option<Box<ClaimStream>>, String)> {
        let request = handoff.request_id.clone();
        let claim = self.claims.lock().take(&request).ok_or_else(|| (None, "the claim is gone".to_owned()))?;
        let Claim { stream, .. } = claim;
        let result = adopt(&self.engine, &stream, handoff);
        self.over(&request);
        match result {
            Ok(adopted) => {
                let _ = stream.adopted.send(adopted);
                Ok(())
            }
            Err(message) => Err((Some(Box::new(stream)), message)),
        }
    }

    fn lease(&self, waiting: &Waiting) -> Option<LeaseHold> {
        let offer = &waiting.offer;
        let lease = self.engine.reserve(offer.tokens as usize, &waiting.block_hashes)?;
        Some(LeaseHold::new(lease, &offer.source, self.engine.config().block_tokens))
    }
}

impl SinkHandler for Handoffs {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        let claimed = self.claims.lock().offered(&offer.request_id, &offer.source, offer.tokens).map(wanted);
        let (priority, block_hashes) = match claimed {
            // A source that cannot leave anything out writes all of it: then nothing may be shared.
            Ok((priority, hashes)) => (priority, if offer.partial { hashes } else { Arc::default() }),
            Err(OfferError::NotClaimed(detail)) => return reply.refuse(RefuseReason::UnknownRequest, detail),
            Err(OfferError::Contradicts(detail)) => return reply.refuse(RefuseReason::Protocol, detail),
        };
        let turn = self.engine.take_turn(priority);
        // Bounded by the claims: each has one offer at most.
        let arrives_by = self.engine.now() + ARRIVES_MAX;
        self.waiting.lock().insert(turn, Waiting { offer, reply, block_hashes, arrives_by });
        self.grant_waiting();
    }

    fn verified(&self, handoff: VerifiedHandoff) -> Result<(), String> {
        self.take_in(handoff).map_err(|(stream, message)| {
            tell_of_refusal(stream, &message);
            message
        })
    }

    fn arrived(&self, handoff: VerifiedHandoff, reply: AdoptReply) -> Option<Result<(), String>> {
        let Err((stream, message)) = self.take_in(handoff) else {
            reply.answer(Ok(()));
            return None;
        };
        // First the source hears why: the end of the stream cancels what is left of the handoff.
        reply.answer(Err(message.clone()));
        tell_of_refusal(stream, &message);
        None
    }

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        prefix_get::pin_prefix(&self.engine, &self.members, &question, reply);
    }

    fn failed(&self, request_id: &RequestId, reason: HandoffFailure) {
        self.over(request_id);
        if let Some(claim) = self.claims.lock().take(request_id) {
            claim.stream.sink.fail(reason.kind(), format!("the handoff failed: {reason}"));
        }
    }
}

fn tell_of_refusal(stream: Option<Box<ClaimStream>>, message: &str) {
    if let Some(stream) = stream {
        stream.sink.fail(ErrorKind::Unavailable, format!("the prefilled sequence was not adopted: {message}"));
    }
}

fn wanted(claim: &Claim<ClaimStream>) -> (i32, Arc<[PrefixHash]>) {
    (claim.stream.sequence.priority, claim.stream.sequence.block_hashes())
}

/// Starts the sequence on the blocks that arrived, if they are those that were claimed.
fn adopt(engine: &EngineHandle, stream: &ClaimStream, handoff: VerifiedHandoff) -> Result<Adopted, String> {
    let claimed = &stream.sequence;
    let same_prompt = handoff.tokens.starts_with(&claimed.tokens) && handoff.kv_tokens as usize == claimed.tokens.len();
    if !same_prompt || handoff.tokens.len() != claimed.tokens.len() + 1 {
        return Err("its tokens are not those that were claimed".into());
    }
    let bytes = handoff.bytes;
    let mut lease = LeaseHold::into_lease(handoff.hold).ok_or("the blocks were granted by another worker")?;
    if let Some(keep) = engine.keep(claimed) {
        // At once, since others may wait for it.
        lease.store(&claimed.block_hashes(), claimed.tokens.len(), keep, engine.now());
        lease.let_go_of_spares();
    }
    let request = SequenceRequest { tokens: handoff.tokens, ..claimed.clone() };
    let start = || engine.submit(request, Run::Adopted { lease }, Box::new(stream.sink.clone()));
    stream
        .slot
        .start(start)
        .map(|()| Adopted { bytes })
        .map_err(|e| e.map_or("its stream is gone".into(), |e| e.to_string()))
}

/// The source of a request's KV, as the router named it.
pub(crate) fn claim(
    source: Party,
    sequence: SequenceRequest,
    sink: StreamSink,
    slot: Slot,
) -> (Claim<ClaimStream>, oneshot::Receiver<Adopted>) {
    let (adopted, arrives) = oneshot::channel();
    let (tokens, deadline) = (sequence.tokens.len() as u32, sequence.deadline);
    let stream = ClaimStream { sequence, sink, slot, adopted };
    (Claim { source, tokens, deadline, offered: false, stream }, arrives)
}
