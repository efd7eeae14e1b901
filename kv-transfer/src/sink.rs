//! The receiving side of the API: what a worker implements to take sequences in.

use crate::service::Inbox;
use crate::{AdoptReply, HandoffFailure, Party, PinQuestion, PinReply, RefuseReason};
use baton_types::{GroupBlocks, RequestId, TicketId, TokenId};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// What a worker does with sequences that others hand to it. Every method is called on the progress thread and must return at once.
pub trait SinkHandler: Send + Sync {
    /// A source asks for room. The reply may be kept and answered later, until the deadline; dropping it refuses.
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply);
    /// All blocks are here and verified. `Ok` adopts them and acknowledges; `Err` says why not, and the source is told.
    ///
    /// On `Err` the implementation has dropped the hold: nothing writes to these blocks any more.
    fn verified(&self, handoff: VerifiedHandoff) -> Result<(), String>;
    /// As [`SinkHandler::verified`], for instances of several shards: the answer may come later, once every shard's part arrived (see
    /// [`crate::Assembly`]).
    fn arrived(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        reply.answer(self.verified(handoff));
    }
    /// A handoff that was offered here ended without adoption. Its blocks are released, or quarantined, already.
    fn failed(&self, request_id: &RequestId, reason: HandoffFailure);
    /// A peer asks to read blocks of this instance. The reply may be kept and answered later; by default there is nothing to be read.
    fn pin(&self, question: PinQuestion, reply: PinReply) {
        reply.refuse(RefuseReason::UnknownRequest, format!("{} has nothing to be read here", question.request_id));
    }
}

/// A source's question for room.
#[derive(Clone, Debug)]
pub struct ReserveOffer {
    /// The request, to be matched with its claim.
    pub request_id: RequestId,
    /// Who asks.
    pub source: Party,
    /// Positions of the sequence; those that [`BlockHold::cached_tokens`] covers are not moved.
    pub tokens: u32,
    /// Whether the source can leave out what is here already. Where not, a hold with cached tokens is a defect.
    pub partial: bool,
    /// When the handoff fails.
    pub deadline: Instant,
}

/// A handoff that arrived whole.
pub struct VerifiedHandoff {
    /// The request.
    pub request_id: RequestId,
    /// Who sent it.
    pub source: Party,
    /// The ticket it came under.
    pub ticket: TicketId,
    /// Prompt, followed by the tokens generated so far.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt.
    pub prompt_len: u32,
    /// Positions whose KV is in the blocks.
    pub kv_tokens: u32,
    /// How many of them, from the first, were here before: [`BlockHold::cached_tokens`] of the grant. Nothing of them was moved, written or
    /// verified.
    pub cached_tokens: u32,
    /// What the source's worker added, see [`crate::CommitPayload::extra`].
    pub extra: Vec<u8>,
    /// The blocks, as they were granted.
    pub hold: Box<dyn BlockHold>,
    /// KV bytes that arrived: of positions `cached_tokens..kv_tokens`.
    pub bytes: u64,
    /// When what happened here.
    pub timings: SinkTimings,
}

impl fmt::Debug for VerifiedHandoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerifiedHandoff")
            .field("request_id", &self.request_id)
            .field("ticket", &self.ticket)
            .field("kv_tokens", &self.kv_tokens)
            .field("cached_tokens", &self.cached_tokens)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Instants of one handoff on the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SinkTimings {
    /// The offer came.
    pub offered_at: Instant,
    /// The grant was given.
    pub granted_at: Instant,
    /// The commit came.
    pub committed_at: Instant,
    /// The last checksum was verified.
    pub verified_at: Instant,
}

/// Blocks under a grant. Dropping the hold gives them back to the pool, so the service drops it only behind a fence.
pub trait BlockHold: Send {
    /// The blocks, per group, covering at least the positions of the offer.
    fn blocks(&self) -> &GroupBlocks;
    /// Leading positions whose KV is in the blocks already. They are not moved, and their blocks, which others may share, are never
    /// written: the peer may write the blocks behind them only. A multiple of the pool's block size, below the positions of the offer, and 0
    /// where [`ReserveOffer::partial`] says so; asked once, with the grant. Anything else is a defect: it is logged, the offer is refused
    /// and the hold dropped.
    fn cached_tokens(&self) -> u32 {
        0
    }
    /// Turns the hold into one whose blocks a peer may still write. Only those that it could write are to be kept from use: blocks of
    /// [`BlockHold::cached_tokens`] were never open to it, and are let go at once.
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks>;
    /// The concrete hold, for the worker that made it.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// Blocks that a peer, not provably dead, may still write. Dropping without release keeps them quarantined for good.
pub trait QuarantinedBlocks: Send {
    /// Nothing writes there any more: back to the pool.
    fn release(self: Box<Self>);
}

/// The answer to one [`SinkHandler::reserve`], from any thread, now or later.
pub struct GrantReply {
    inbox: Arc<Inbox>,
    key: u64,
    answered: bool,
}

impl GrantReply {
    pub(crate) fn new(inbox: Arc<Inbox>, key: u64) -> Self {
        Self { inbox, key, answered: false }
    }

    /// Reserves these blocks. They are handed back (the hold is dropped) if the handoff ended meanwhile.
    pub fn grant(mut self, hold: Box<dyn BlockHold>) {
        self.answered = true;
        self.inbox.granted(self.key, hold);
    }

    /// Gives no room.
    pub fn refuse(mut self, reason: RefuseReason, detail: impl Into<String>) {
        self.answered = true;
        self.inbox.refused(self.key, reason, detail.into());
    }

    /// Whether the offer still stands; a worker that keeps replies waiting for room drops those that do not.
    pub fn is_wanted(&self) -> bool {
        self.inbox.is_offered(self.key)
    }
}

impl Drop for GrantReply {
    fn drop(&mut self) {
        if !self.answered {
            self.inbox.refused(self.key, RefuseReason::NoRoom, "the sink dropped the offer".into());
        }
    }
}

impl fmt::Debug for GrantReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrantReply({})", self.key)
    }
}
