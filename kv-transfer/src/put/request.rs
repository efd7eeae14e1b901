//! The request and the report of a put.

use crate::HandoffFailure;
use baton_types::{BlockTables, RequestId, TokenId};
use std::any::Any;
use std::fmt;
use std::time::{Duration, Instant};

/// A sequence to hand off.
pub struct PutRequest {
    /// The request, for logs and so that the sink finds its claim.
    pub request_id: RequestId,
    /// Positions whose KV moves: `0..tokens`.
    pub tokens: u32,
    /// Source blocks that hold them, per group.
    pub blocks: BlockTables,
    /// After this instant the handoff fails, whatever its state.
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
    /// Additional data that the two workers agree on, at most [`CommitPayload::EXTRA_BYTES_MAX`].
    pub extra: Vec<u8>,
}

impl CommitPayload {
    /// Most tokens of one sequence.
    pub const TOKENS_MAX: usize = 4 << 20;
    /// Longest `extra`, in bytes.
    pub const EXTRA_BYTES_MAX: usize = 64 << 10;
}

/// Report of a handoff, for the source once the sink has adopted it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutReport {
    /// KV bytes written to the sink.
    pub bytes: u64,
    /// Positions moved: those offered, without the leading ones that the sink had cached.
    pub tokens_moved: u32,
    /// Number of writes posted.
    pub puts: u64,
    /// When the grant came.
    pub granted_at: Instant,
    /// When the first write was posted.
    pub first_put_at: Instant,
    /// When the last flush completed: every byte is visible at the sink.
    pub flushed_at: Instant,
    /// Time during which writes or their flushes were in flight, without waits for the next layer's computation.
    pub moving: Duration,
    /// When the commit was acknowledged.
    pub acked_at: Instant,
    /// Name of the transport: `ucx` or `tcp`.
    pub transport: &'static str,
    /// Lanes of the connection, as the transport names them.
    pub lanes: String,
}

/// How a put ended.
pub type PutOutcome = Result<PutReport, HandoffFailure>;
