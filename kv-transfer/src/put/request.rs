//! A request to put KV, and the report of it.

use crate::HandoffFailure;
use baton_types::{GroupBlocks, RequestId, TokenId};
use std::any::Any;
use std::fmt;
use std::time::{Duration, Instant};

/// What is to be handed off.
pub struct PutRequest {
    /// The request, for logs and for the sink to match its claim.
    pub request_id: RequestId,
    /// Positions whose KV moves: `0..tokens`.
    pub tokens: u32,
    /// Source blocks that hold them, per group.
    pub blocks: GroupBlocks,
    /// After this instant the handoff fails, wherever it is.
    pub deadline: Instant,
    /// Keeps the source blocks from reuse; dropped once nothing can read them any more.
    pub hold: Box<dyn Any + Send>,
}

impl fmt::Debug for PutRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PutRequest")
            .field("request_id", &self.request_id)
            .field("tokens", &self.tokens)
            .field("blocks", &self.blocks.total())
            .finish_non_exhaustive()
    }
}

/// What a source commits: the sequence that the moved KV belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitPayload {
    /// Prompt, followed by the tokens generated so far; at least as many as positions moved.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt.
    pub prompt_len: u32,
    /// Anything the two workers agree on beside, at most [`CommitPayload::EXTRA_BYTES_MAX`].
    pub extra: Vec<u8>,
}

impl CommitPayload {
    /// Most tokens of one sequence.
    pub const TOKENS_MAX: usize = 4 << 20;
    /// Longest `extra`.
    pub const EXTRA_BYTES_MAX: usize = 64 << 10;
}

/// How a handoff went, for the source once the sink has adopted it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutReport {
    /// KV bytes written.
    pub bytes: u64,
    /// Positions moved: those offered, without the leading ones that the sink had already.
    pub tokens_moved: u32,
    /// Writes posted.
    pub puts: u64,
    /// The grant came.
    pub granted_at: Instant,
    /// First write posted.
    pub first_put_at: Instant,
    /// Last write posted.
    pub last_put_at: Instant,
    /// The last flush completed: every byte is visible at the sink.
    pub flushed_at: Instant,
    /// How long writes, or flushes of them, were under way: without the time in which the next layer was still being computed.
    pub moving: Duration,
    /// The commit was acknowledged.
    pub acked_at: Instant,
    /// `ucx` or `tcp`.
    pub transport: &'static str,
    /// Lanes that carried it, as the transport names them.
    pub lanes: String,
}

/// How a put ended.
pub type PutOutcome = Result<PutReport, HandoffFailure>;
