//! The interface that a worker implements to receive what peers put, and to serve what they get.

mod hold;
mod replies;

pub(crate) use hold::KeptBlocks;
pub use hold::{BlockHold, QuarantinedBlocks};
pub(crate) use replies::StandingOffer;
pub use replies::{AdoptReply, GrantReply, PinReply};

use crate::{HandoffFailure, Party, RefuseReason};
use baton_types::{RequestId, TicketId, TokenId};
use std::fmt;
use std::time::Instant;

/// A worker's handling of puts and gets of peers. All methods are called in order on one thread of the service. A method that blocks delays
/// other grants and adoptions, but no bytes.
pub trait SinkHandler: Send + Sync {
    /// A source requests blocks. The reply may be kept and answered later, until the deadline; dropping it refuses. Not called for an offer of
    /// one leg that has ended before: then [`SinkHandler::failed`] alone follows.
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply);
    /// All blocks are here and verified. The reply may be kept and answered later: `Ok` adopts the blocks and acknowledges; `Err` gives a
    /// reason, which the source receives.
    ///
    /// The implementation drops the hold before it answers `Err`: nothing writes to these blocks any more.
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply);
    /// A handoff that was offered here ended without adoption. Its blocks are quarantined, or released as soon as no write is on its way into
    /// them. The offer says which handoff of the request it was.
    fn failed(&self, offer: &ReserveOffer, reason: HandoffFailure);
    /// A peer asks for blocks of this instance. The reply may be kept and answered later. Not called for a get that has ended before. The
    /// default refuses.
    fn pin(&self, question: PinQuestion, reply: PinReply) {
        reply.refuse(RefuseReason::UnknownRequest, format!("{} has nothing to be got here", question.request_id));
    }
    /// Whether the handler accepts sequences of which several shards of the source each put a part ([`ReserveOffer::legs`]). Other handlers
    /// are never offered a part, because they would take it for the whole.
    fn joins_legs(&self) -> bool {
        false
    }
}

/// A source's request for blocks.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug)]
pub struct ReserveOffer {
    /// The request, by which the worker finds its claim.
    pub request_id: RequestId,
    pub source: Party,
    /// Positions of the sequence; those covered by [`BlockHold::cached_tokens`] are not moved.
    pub tokens: u32,
    /// Whether the source can leave out positions that are cached here. If not, a hold with cached tokens is a defect.
    pub partial: bool,
    /// When the handoff expires.
    pub deadline: Instant,
    /// The shard of the source that puts this part of the sequence.
    pub shard: u16,
    /// Number of shards of the source that put a part here.
    pub legs: u16,
}

/// A handoff that arrived complete.
#[allow(missing_docs, reason = "the names of fields say it")]
pub struct VerifiedHandoff {
    pub request_id: RequestId,
    pub source: Party,
    /// The shard of the source that sent it.
    pub shard: u16,
    /// The ticket of the handoff.
    pub ticket: TicketId,
    /// Prompt, followed by the tokens generated so far.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt.
    pub prompt_len: u32,
    /// Positions whose KV is in the blocks.
    pub kv_tokens: u32,
    /// How many of them, from the first, were cached here before: [`BlockHold::cached_tokens`] of the grant. They were not moved, written
    /// or verified.
    pub cached_tokens: u32,
    /// Data that the source's worker added, see [`crate::CommitPayload::extra`].
    pub extra: Vec<u8>,
    /// The blocks, as they were granted.
    pub hold: Box<dyn BlockHold>,
    /// KV bytes that arrived: of positions `cached_tokens..kv_tokens`.
    pub bytes: u64,
    /// Instants of the handoff at this sink.
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
    /// When the offer arrived here.
    pub offered_at: Instant,
    /// When the blocks were granted.
    pub granted_at: Instant,
    /// When the commit arrived here.
    pub committed_at: Instant,
    /// When the last checksum was verified.
    pub verified_at: Instant,
}

/// A peer's request for blocks to get.
#[derive(Clone, Debug)]
pub struct PinQuestion {
    /// The request it belongs to.
    pub request_id: RequestId,
    /// The reader, as it identifies itself.
    pub reader: Party,
    /// Whether the reader proved the role of a worker. With credentials, every reader has; without them, none has.
    pub proven: bool,
    /// What is to be got, as in [`crate::GetRequest::name`].
    pub name: Vec<u8>,
    /// First position to get: a multiple of the block size here.
    pub from: u32,
    /// Positions `from..tokens` are requested.
    pub tokens: u32,
    /// When the pin ends, unless the get has ended before.
    pub deadline: Instant,
}
