//! What a worker implements to take in what peers put here, and to let them get what it has.

mod hold;
mod replies;

pub use hold::{BlockHold, QuarantinedBlocks};
pub(crate) use replies::StandingOffer;
pub use replies::{AdoptReply, GrantReply, PinReply};

use crate::{HandoffFailure, Party, RefuseReason};
use baton_types::{RequestId, TicketId, TokenId};
use std::fmt;
use std::time::Instant;

/// What a worker does with what peers put here and want to get. All methods are called on one thread of the service, in order: one that
/// waits keeps grants and adoptions of others waiting, and no bytes.
pub trait SinkHandler: Send + Sync {
    /// A source asks for room. The reply may be kept and answered later, until the deadline; dropping it refuses.
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply);
    /// All blocks are here and verified. `Ok` adopts them and acknowledges; `Err` says why not, and the source is told.
    ///
    /// On `Err` the implementation has dropped the hold: nothing writes to these blocks any more.
    fn verified(&self, handoff: VerifiedHandoff) -> Result<(), String>;
    /// As [`SinkHandler::verified`], for handlers that can only say later: with `None` the answer comes through the reply.
    fn arrived(&self, handoff: VerifiedHandoff, reply: AdoptReply) -> Option<Result<(), String>> {
        reply.unneeded();
        Some(self.verified(handoff))
    }
    /// A handoff that was offered here ended without adoption. Its blocks are released, or quarantined, already.
    fn failed(&self, request_id: &RequestId, reason: HandoffFailure);
    /// As [`SinkHandler::failed`], for handlers that have to know which handoff of the request it was.
    fn ended(&self, offer: &ReserveOffer, reason: HandoffFailure) {
        self.failed(&offer.request_id, reason);
    }
    /// A peer asks for blocks of this instance. The reply may be kept and answered later; by default there is nothing to be had.
    fn pin(&self, question: PinQuestion, reply: PinReply) {
        reply.refuse(RefuseReason::UnknownRequest, format!("{} has nothing to be got here", question.request_id));
    }
    /// Whether it takes sequences of which several shards of the source put a part each ([`ReserveOffer::legs`]). Others are never asked
    /// for room for a part, since they would take it for the whole.
    fn joins_legs(&self) -> bool {
        false
    }
}

/// A source's question for room.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug)]
pub struct ReserveOffer {
    /// The request, to be matched with its claim.
    pub request_id: RequestId,
    pub source: Party,
    /// Positions of the sequence; those that [`BlockHold::cached_tokens`] covers are not moved.
    pub tokens: u32,
    /// Whether the source can leave out what is here already. Where not, a hold with cached tokens is a defect.
    pub partial: bool,
    /// When the handoff fails.
    pub deadline: Instant,
    /// Which shard of the source puts this part of the sequence,
    pub shard: u16,
    /// and how many of them put one here.
    pub legs: u16,
}

/// A handoff that arrived whole.
#[allow(missing_docs, reason = "the names of fields say it")]
pub struct VerifiedHandoff {
    pub request_id: RequestId,
    pub source: Party,
    /// The shard of the source that put it.
    pub shard: u16,
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

/// A peer's question for blocks to get.
#[derive(Clone, Debug)]
pub struct PinQuestion {
    /// The request it belongs to.
    pub request_id: RequestId,
    /// Who gets, by its own word.
    pub reader: Party,
    /// Whether it proved the role of a worker. Where the service has credentials nobody else is asked for; without any nobody did.
    pub proven: bool,
    /// [`crate::GetRequest::name`].
    pub name: Vec<u8>,
    /// First position to be got: a multiple of the block size here.
    pub from: u32,
    /// Positions `from..tokens` are to be got.
    pub tokens: u32,
    /// When the pin ends, if the get has not by then.
    pub deadline: Instant,
}
