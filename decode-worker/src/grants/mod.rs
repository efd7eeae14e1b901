//! Which offers of KV get room, and when. Pure: takes `now` and the room, returns decisions.
//!
//! A claim is booked for a request whose KV has yet to arrive. The source offers the KV once it starts computing. The offer then waits
//! here until it is granted. Its KV counts as arriving until it is adopted or fails. Rules:
//! - Offers are granted by priority, then those within their tenant's share, then by virtual start, then in order of arrival: see
//!   [`baton_engine::fair`] and [`Accounts`]. The share counts the sequences of the engine, the KV that arrives, and earlier offers.
//! - A grant's turn goes on with its KV: the adopted sequence has the same place. Tokens that were cached, or whose offer ended without a
//!   grant, are given back.
//! - No offer overtakes one that lacks room, so small offers do not starve a large one. The room that it waits for is also kept from
//!   sequences of the engine that come after it.
//! - An offer whose next block is already arriving waits for that block, at most [`ARRIVES_MAX`]. Meanwhile it does not count as lacking
//!   room, and other offers may overtake it.
//! - Each claim has at most one offer, so the number of claims bounds the number of waiting offers.

pub mod claims;
#[cfg(test)]
mod tests;

use baton_engine::Awaited;
use baton_engine::scheduler::{Accounts, SequenceKey, Standing};
use baton_kv_cache::{HASH_TOKENS, PrefixHash};
use baton_kv_transfer::{RefuseReason, ReserveOffer};
use baton_types::{Party, RequestError, RequestId, Share, seeded};
use claims::{Claim, ClaimLimits, Claims, OfferError};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an offer waits for KV that is already on its way. After that the KV is sent twice, which costs about as much as waiting.
pub const ARRIVES_MAX: Duration = Duration::from_millis(500);

/// The pool, as grants see it.
pub trait Room {
    /// Blocks for one offer.
    type Lease;
    /// Blocks for this many tokens, including what is cached of these prefixes; `None` if there is no room now.
    fn reserve(&mut self, tokens: usize, block_hashes: &[PrefixHash]) -> Option<Self::Lease>;
    /// Tokens of these prefixes that are cached.
    fn cached_tokens(&self, block_hashes: &[PrefixHash]) -> usize;
    /// Tokens of a block.
    fn block_tokens(&self) -> usize;
    /// What the tenants' sequences hold.
    fn accounts(&self) -> Accounts;
    /// Called when the offer with this turn is granted these blocks: cached tokens are given back to the tenant.
    fn granted(&mut self, turn: SequenceKey, share: Share, lease: &Self::Lease);
    /// Called when the offer with this turn ended without a grant: its tokens are given back to the tenant.
    fn gave_up(&mut self, turn: SequenceKey, share: Share, tokens: usize);
}

/// Where the answer to an offer goes.
pub trait Reply {
    /// Whether the source still waits for it.
    fn is_wanted(&self) -> bool;
}

/// What the stream of a claim requires of its grant.
pub trait Wanted {
    /// Higher is granted first.
    fn priority(&self) -> i32;
    /// Its tenant and weight.
    fn share(&self) -> Share;
    /// Block hashes of the prompt, to find what is cached of it.
    fn block_hashes(&self) -> Arc<[PrefixHash]>;
}

/// An offer that has room now.
#[derive(Debug)]
pub struct Granted<R, L> {
    pub offer: ReserveOffer,
    /// Sends the answer to the source.
    pub reply: R,
    /// Blocks reserved for the offered sequence.
    pub lease: L,
}

/// An offer that can never get room.
#[derive(Debug)]
pub struct Refused<R> {
    /// Sends the answer to the source.
    pub reply: R,
    /// For the source's code.
    pub reason: RefuseReason,
    /// The reason in words, for the operator.
    pub detail: String,
}

/// Decisions to carry out now.
#[derive(Debug)]
pub struct Decisions<R, L> {
    /// In the order of granting.
    pub granted: Vec<Granted<R, L>>,
    /// The offer that all offers after it wait for: room must be kept for it. `None` keeps nothing.
    pub keep_room: Option<Awaited>,
    /// When to decide again even if nothing changes; `None` if nothing waits. In the past if room may be freed without a notification.
    pub wake_at: Option<Instant>,
}

/// An offer that waits.
#[derive(Debug)]
struct Waiting<R> {
    offer: ReserveOffer,
    reply: R,
    share: Share,
    /// Hashes of prefixes that may be cached here already.
    block_hashes: Arc<[PrefixHash]>,
    /// The offer waits at most until then for KV that is on its way and begins with the same prefix.
    arrives_by: Instant,
}

/// KV that was granted and has not arrived.
#[derive(Debug)]
struct Arriving {
    turn: SequenceKey,
    share: Share,
    tokens: usize,
    block_hashes: Arc<[PrefixHash]>,
}

/// All claims, waiting offers and arriving KV. `S` is the data that a claim's stream needs, `R` answers an offer.
#[derive(Debug)]
pub struct Grants<S, R> {
    claims: Claims<S>,
    waiting: BTreeMap<SequenceKey, Waiting<R>>,
    arriving: HashMap<RequestId, Arriving>,
}

impl<S: Wanted, R: Reply> Grants<S, R> {
    /// Starts without claims and offers.
    pub fn new(limits: ClaimLimits) -> Self {
        Self { claims: Claims::new(limits), waiting: BTreeMap::new(), arriving: HashMap::new() }
    }

    /// Books a claim, or returns why not.
    pub fn book(&mut self, request: RequestId, claim: Claim<S>) -> Result<(), RequestError> {
        self.claims.book(request, claim)
    }

    /// The stream of a claim has ended: its offer, if there is one, no longer waits and no longer matches a claim.
    pub fn end(&mut self, request: &RequestId, room: &mut impl Room) -> Option<Claim<S>> {
        self.retain(room, |waiting| waiting.offer.request_id != *request);
        self.arriving.remove(request);
        self.claims.end(request)
    }

    /// Whether a request is claimed for another source than this one, which may name it all the same.
    pub fn is_of_another(&self, request: &RequestId, source: &Party) -> bool {
        self.claims.is_of_another(request, source)
    }

    /// Takes the claim of a request whose KV has arrived or will not arrive. Offers with the same prefix still wait for its KV until
    /// [`Grants::arrived`].
    pub fn take(&mut self, request: &RequestId) -> Option<Claim<S>> {
        self.claims.take(request)
    }

    /// The turn with which a request was granted, until [`Grants::arrived`].
    pub fn granted_turn(&self, request: &RequestId) -> Option<SequenceKey> {
        self.arriving.get(request).map(|arriving| arriving.turn)
    }

    /// The KV of a request is in the cache, or will not arrive.
    pub fn arrived(&mut self, request: &RequestId) {
        self.arriving.remove(request);
    }

    /// An offer arrived. `turn` gives its place among the engine's sequences, for this priority, share and number of tokens.
    /// [`Grants::decide`] decides the rest.
    pub fn offered(
        &mut self,
        offer: ReserveOffer,
        reply: R,
        now: Instant,
        turn: impl FnOnce(i32, Share, usize) -> SequenceKey,
    ) -> Result<(), Refused<R>> {
        let claim = match self.claims.offered(&offer.request_id, &offer.source, offer.tokens) {
            Ok(claim) => claim,
            Err(OfferError::NotClaimed(detail)) => {
                return Err(Refused { reply, reason: RefuseReason::UnknownRequest, detail });
            }
            Err(OfferError::Contradicts(detail)) => {
                return Err(Refused { reply, reason: RefuseReason::Protocol, detail });
            }
        };
        // A source that cannot send only a part writes all blocks: then none may be shared.
        let block_hashes = if offer.partial { claim.stream.block_hashes() } else { Arc::default() };
        let share = claim.stream.share();
        let turn = turn(claim.stream.priority(), share, offer.tokens as usize);
        self.waiting.insert(turn, Waiting { offer, reply, share, block_hashes, arrives_by: now + ARRIVES_MAX });
        Ok(())
    }

    /// Grants every offer that may be granted now. Every decision is in force when this returns.
    pub fn decide<O: Room>(&mut self, now: Instant, room: &mut O) -> Decisions<R, O::Lease> {
        self.retain(room, |waiting| waiting.reply.is_wanted());
        let (mut granted, mut keep_room, mut wake_at) = (Vec::new(), None, None);
        for turn in self.order(room) {
            let Some(waiting) = self.waiting.get(&turn) else { continue };
            if awaits(waiting, &self.arriving, room, now) {
                wake_at = wake_at.into_iter().chain([waiting.arrives_by]).min();
                continue;
            }
            let tokens = waiting.offer.tokens as usize;
            let Some(lease) = room.reserve(tokens, &waiting.block_hashes) else {
                // Some causes of a lack of room do not notify when they end.
                wake_at = Some(now);
                keep_room = keep_room.or(Some(Awaited { turn, share: waiting.share, tokens }));
                if seeded!(StarvingGrant) {
                    continue;
                }
                break;
            };
            room.granted(turn, waiting.share, &lease);
            if let Some(Waiting { offer, reply, share, block_hashes, .. }) = self.waiting.remove(&turn) {
                self.arriving.insert(offer.request_id.clone(), Arriving { turn, share, tokens, block_hashes });
                granted.push(Granted { offer, reply, lease });
            }
        }
        Decisions { granted, keep_room, wake_at }
    }

    /// Waiting offers in the order of granting.
    fn order(&self, room: &impl Room) -> Vec<SequenceKey> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let (mut accounts, size) = (room.accounts(), room.block_tokens());
        self.arriving.values().for_each(|arriving| accounts.add(arriving.share, arriving.tokens.div_ceil(size)));
        self.waiting.values().for_each(|waiting| accounts.join(waiting.share));
        let standing = |(turn, waiting): (&SequenceKey, &Waiting<R>)| {
            let blocks = (waiting.offer.tokens as usize).div_ceil(size);
            Standing::new(*turn, accounts.is_beyond(waiting.share, blocks))
        };
        let mut order: Vec<_> = self.waiting.iter().map(standing).collect();
        order.sort_unstable();
        order.into_iter().map(Standing::key).collect()
    }

    /// Drops the waiting offers that are not to be kept.
    fn retain(&mut self, room: &mut impl Room, keep: impl Fn(&Waiting<R>) -> bool) {
        self.waiting.retain(|turn, waiting| {
            let is_kept = keep(waiting);
            if !is_kept {
                room.gave_up(*turn, waiting.share, waiting.offer.tokens as usize);
            }
            is_kept
        });
    }

    /// Whether the KV of a request has been offered and waits for room.
    pub fn is_waiting(&self, request: &RequestId) -> bool {
        self.waiting.values().any(|waiting| waiting.offer.request_id == *request)
    }

    /// Whether there are no streams, offers or KV that is on its way.
    pub fn is_empty(&self) -> bool {
        !self.claims.has_streams() && self.waiting.is_empty() && self.arriving.is_empty()
    }

    /// Tokens claimed that hold no blocks yet. What was granted holds some.
    pub fn claimed_tokens(&self) -> u64 {
        let granted = self.arriving.keys().map(|request| u64::from(self.claims.tokens_of(request)));
        self.claims.tokens() - granted.sum::<u64>()
    }

    /// Number of claims not yet adopted.
    pub fn claimed(&self) -> usize {
        self.claims.len()
    }
}

/// Whether arriving KV contains the next block that an offer lacks.
fn awaits<R, O: Room>(waiting: &Waiting<R>, arriving: &HashMap<RequestId, Arriving>, room: &O, now: Instant) -> bool {
    let hashes = &waiting.block_hashes;
    let Some(last) = hashes.len().checked_sub(1) else { return false };
    if arriving.is_empty() || now >= waiting.arrives_by {
        return false;
    }
    // The end of the first block that is not cached.
    let next = (room.cached_tokens(hashes) + room.block_tokens()) / HASH_TOKENS - 1;
    next < last && arriving.values().any(|others| others.block_hashes.get(next) == Some(&hashes[next]))
}
