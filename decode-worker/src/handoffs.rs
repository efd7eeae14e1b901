//! The sink of handoffs: turns claims into reservations, and verified blocks into running sequences.

use crate::grants::claims::{Claim, ClaimLimits};
use crate::grants::{Decisions, Granted, Grants, Refused, Reply, Room, Wanted};
use crate::slot::Slot;
use baton_engine::EngineHandle;
use baton_engine::api::{Run, SequenceRequest};
use baton_engine::scheduler::{Accounts, SequenceKey};
use baton_kv_cache::{Lease, PrefixHash};
use baton_kv_transfer::{
    AdoptReply, GrantReply, HandoffFailure, PinQuestion, PinReply, ReserveOffer, SinkHandler, VerifiedHandoff,
};
use baton_node::membership::Members;
use baton_types::{ErrorKind, Party, RequestError, RequestId, Runtime, Share, seeded};
use baton_worker::hold::LeaseHold;
use baton_worker::prefix_get;
use baton_worker::service::Claimed;
use baton_worker::stream::StreamSink;
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

/// How often waiting offers are checked again without a notification.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// The data that a claim's stream needs: what it waits for, and how its sequence will run.
pub(crate) struct ClaimStream {
    /// As claimed, without the token that arrives with its KV.
    pub(crate) sequence: SequenceRequest,
    pub(crate) sink: StreamSink,
    pub(crate) slot: Slot,
    pub(crate) adopted: oneshot::Sender<Adopted>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Adopted {
    pub(crate) bytes: u64,
}

impl Wanted for ClaimStream {
    fn priority(&self) -> i32 {
        self.sequence.priority
    }

    fn share(&self) -> Share {
        self.sequence.share
    }

    fn block_hashes(&self) -> Arc<[PrefixHash]> {
        self.sequence.block_hashes()
    }
}

impl Reply for GrantReply {
    fn is_wanted(&self) -> bool {
        GrantReply::is_wanted(self)
    }
}

impl Room for &EngineHandle {
    type Lease = Lease;

    fn reserve(&mut self, tokens: usize, block_hashes: &[PrefixHash]) -> Option<Lease> {
        EngineHandle::reserve(self, tokens, block_hashes)
    }

    fn cached_tokens(&self, block_hashes: &[PrefixHash]) -> usize {
        self.pool().cached_tokens(block_hashes)
    }

    fn block_tokens(&self) -> usize {
        EngineHandle::block_tokens(self)
    }

    fn accounts(&self) -> Accounts {
        EngineHandle::accounts(self)
    }

    fn granted(&mut self, turn: SequenceKey, share: Share, lease: &Lease) {
        if !seeded!(GrantWithoutTime) {
            self.turn_came(turn);
        }
        self.give_back(turn, share, lease.cached_blocks() * EngineHandle::block_tokens(self));
    }

    fn gave_up(&mut self, turn: SequenceKey, share: Share, tokens: usize) {
        self.give_back(turn, share, tokens);
    }
}

/// All handoffs to this instance.
pub struct Handoffs {
    engine: EngineHandle,
    /// The members that may read cached KV.
    members: Members,
    grants: Mutex<Grants<ClaimStream, GrantReply>>,
    /// Notified when blocks become free, when an offer starts to wait, and when this is dropped.
    changed: Arc<Notify>,
}

impl Handoffs {
    /// Starts receiving handoffs for an engine, with at most `claims_max` claims at once.
    pub fn start(engine: &EngineHandle, members: Members, claims_max: usize, runtime: Arc<dyn Runtime>) -> Arc<Self> {
        let pool_tokens = u64::from(engine.pool().shape().limiting().blocks) * engine.block_tokens() as u64;
        // Twice the pool: while sequences that fill the pool run, as many tokens may be on their way.
        let limits = ClaimLimits { claims_max, tokens_max: 2 * pool_tokens };
        let handoffs = Self::new(engine.clone(), members, limits);
        runtime.spawn(Box::pin(handoffs.grant_when_freed(runtime.clone())));
        handoffs
    }

    pub(crate) fn new(engine: EngineHandle, members: Members, limits: ClaimLimits) -> Arc<Self> {
        let changed = Arc::new(Notify::new());
        let wake = changed.clone();
        engine.pool().on_freed(move || wake.notify_one());
        Arc::new(Self { engine, members, grants: Mutex::new(Grants::new(limits)), changed })
    }

    pub(crate) fn book(&self, request: RequestId, claim: Claim<ClaimStream>) -> Result<(), RequestError> {
        self.grants.lock().book(request, claim)
    }

    /// Ends a claim whose stream has ended. Its offer, if there is one, no longer matches a claim.
    pub(crate) fn forget(&self, request: &RequestId) {
        let ended = self.grants.lock().end(request, &mut &self.engine);
        drop(ended);
        self.grant_waiting();
    }

    /// Whether the KV of a request has been offered and waits for room.
    pub(crate) fn has_no_room_for(&self, request: &RequestId) -> bool {
        self.grants.lock().is_waiting(request)
    }

    /// What is claimed and not yet adopted.
    pub fn claimed(&self) -> Claimed {
        let grants = self.grants.lock();
        Claimed { sequences: grants.claimed(), tokens: grants.claimed_tokens() }
    }

    /// Whether no stream is open, no offer waits and no KV is on its way.
    #[doc(hidden)] // For simulations.
    pub fn is_idle(&self) -> bool {
        self.grants.lock().is_empty()
    }

    /// Grants waiting offers whenever blocks become free. Runs until this is dropped.
    pub(crate) fn grant_when_freed(self: &Arc<Self>, runtime: Arc<dyn Runtime>) -> impl Future<Output = ()> + 'static {
        let (handoffs, changed) = (Arc::downgrade(self), self.changed.clone());
        async move {
            while let Some(wake_at) = handoffs.upgrade().map(|handoffs| handoffs.decide()) {
                // No notification between the decision and this wait is missed: `Notify` stores one.
                match wake_at {
                    // The engine also keeps room while one of its own sequences lacks blocks, and sends no notification when that ends.
                    Some(at) => {
                        let at = at.max(runtime.now() + LOOK_AGAIN);
                        let _ = runtime.until(at, changed.notified()).await;
                    }
                    None => changed.notified().await,
                }
            }
        }
    }

    /// Decides now instead of waiting for the task of [`Handoffs::grant_when_freed`]. If offers still wait, it notifies that task.
    fn grant_waiting(&self) {
        if self.decide().is_some() {
            self.changed.notify_one();
        }
    }

    /// Carries out the decisions. Returns when to decide again even if nothing changes.
    fn decide(&self) -> Option<Instant> {
        let mut grants = self.grants.lock();
        let Decisions { granted, keep_room, wake_at } = grants.decide(self.engine.now(), &mut &self.engine);
        // Under the lock, so that the engine receives the decisions in order.
        self.engine.keep_room(keep_room);
        for Granted { offer, reply, lease } in granted {
            reply.grant(Box::new(LeaseHold::new(lease, &offer.source, self.engine.block_tokens())));
        }
        wake_at
    }

    /// The KV of a request has arrived, or will not arrive.
    fn over(&self, request: &RequestId) {
        self.grants.lock().arrived(request);
        self.grant_waiting();
    }

    /// Starts the sequence whose KV arrived. An error comes with the stream that waits for it.
    fn take_in(&self, handoff: VerifiedHandoff) -> Result<(), (Option<Box<ClaimStream>>, String)> {
        let request = handoff.request_id.clone();
        let (claim, turn) = {
            let mut grants = self.grants.lock();
            (grants.take(&request), grants.granted_turn(&request))
        };
        let Claim { stream, .. } = claim.ok_or_else(|| (None, "the claim is gone".to_owned()))?;
        let result = adopt(&self.engine, &stream, handoff, turn);
        self.over(&request);
        match result {
            Ok(adopted) => {
                let _ = stream.adopted.send(adopted);
                Ok(())
            }
            Err(message) => Err((Some(Box::new(stream)), message)),
        }
    }
}

impl Drop for Handoffs {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

impl SinkHandler for Handoffs {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        let turn = |priority, share, tokens| self.engine.take_turn(priority, share, tokens);
        let offered = self.grants.lock().offered(offer, reply, self.engine.now(), turn);
        match offered {
            Ok(()) => self.grant_waiting(),
            Err(Refused { reply, reason, detail }) => reply.refuse(reason, detail),
        }
    }

    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        let Err((stream, message)) = self.take_in(handoff) else { return reply.answer(Ok(())) };
        // The source receives the reason first: the end of the stream cancels the rest of the handoff.
        reply.answer(Err(message.clone()));
        if let Some(stream) = stream {
            stream.sink.fail(ErrorKind::Unavailable, format!("the prefilled sequence was not adopted: {message}"));
        }
    }

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        prefix_get::pin_prefix(&self.engine, &self.members, &question, reply);
    }

    fn failed(&self, offer: &ReserveOffer, reason: HandoffFailure) {
        // A worker that offers KV of a request that is not its own cannot end it.
        if self.grants.lock().is_of_another(&offer.request_id, &offer.source) {
            return;
        }
        self.over(&offer.request_id);
        if let Some(claim) = self.grants.lock().take(&offer.request_id) {
            claim.stream.sink.fail(reason.kind(), format!("the handoff failed: {reason}"));
        }
    }
}

/// Starts the sequence on the blocks that arrived, if they match the claim.
fn adopt(
    engine: &EngineHandle,
    stream: &ClaimStream,
    handoff: VerifiedHandoff,
    turn: Option<SequenceKey>,
) -> Result<Adopted, String> {
    let claimed = &stream.sequence;
    let same_prompt = handoff.tokens.starts_with(&claimed.tokens) && handoff.kv_tokens as usize == claimed.tokens.len();
    if !same_prompt || handoff.tokens.len() != claimed.tokens.len() + 1 {
        return Err("its tokens are not those that were claimed".into());
    }
    // An older worker sends nothing, and has computed no adapter.
    let adapter = claimed.adapter.as_ref().map_or(&[][..], |adapter| &adapter.digest.0);
    if handoff.extra != adapter {
        return Err("its KV is of another adapter than was claimed".into());
    }
    let bytes = handoff.bytes;
    let mut lease = LeaseHold::into_lease(handoff.hold).ok_or("the blocks were granted by another worker")?;
    if let Some(keep) = engine.keep(claimed) {
        // At once, because other offers may wait for these blocks.
        lease.store(&claimed.block_hashes(), claimed.tokens.len(), keep, engine.now());
        lease.let_go_of_spares();
    }
    let request = SequenceRequest { tokens: handoff.tokens, ..claimed.clone() };
    let start = || engine.submit(request, Run::Adopted { lease, turn }, Box::new(stream.sink.clone()));
    stream
        .slot
        .start(start)
        .map(|()| Adopted { bytes })
        .map_err(|e| e.map_or("its stream is gone".into(), |e| e.to_string()))
}

/// A claim for a handoff from `source`, the party that the router named. The receiver gets what was adopted.
pub(crate) fn claim(
    source: Party,
    sequence: SequenceRequest,
    sink: StreamSink,
    slot: Slot,
) -> (Claim<ClaimStream>, oneshot::Receiver<Adopted>) {
    let (adopted, arrives) = oneshot::channel();
    let (tokens, share) = (sequence.tokens.len() as u32, sequence.share);
    let stream = ClaimStream { sequence, sink, slot, adopted };
    (Claim { source, tokens, share, offered: false, stream }, arrives)
}
