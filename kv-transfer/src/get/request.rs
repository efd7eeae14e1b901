//! The request and the report of a get.

use crate::{BlockHold, HandoffFailure};
use baton_types::{BlockTables, RequestId};
use std::fmt;
use std::time::Instant;

/// What is to be got from a peer.
pub struct GetRequest {
    /// The request, for logs and so that the owner can cancel it ([`crate::KvTransfer::cancel`]).
    pub request_id: RequestId,
    /// Name of the KV to get, in a form that the two workers agree on; at most [`GetRequest::NAME_BYTES_MAX`].
    pub name: Vec<u8>,
    /// First position to get; earlier ones are left out. A multiple of both sides' block sizes, so that no side's first block is only
    /// partly moved.
    pub from: u32,
    /// Positions `from..tokens` are moved.
    pub tokens: u32,
    /// Blocks of this instance that receive only these positions, per group: the first block begins with position `from`.
    pub blocks: BlockTables,
    /// After this instant the get fails, whatever its state.
    pub deadline: Instant,
    /// Keeps the blocks from reuse. It is returned with the report, or dropped once nothing can write to the blocks any more. Where the owner
    /// may still write to them after its connection closed, they are quarantined until it is fenced.
    pub hold: Box<dyn BlockHold>,
}

impl GetRequest {
    /// Longest name: the hashes of a few thousand blocks.
    pub const NAME_BYTES_MAX: usize = 64 << 10;
}

impl fmt::Debug for GetRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GetRequest")
            .field("request_id", &self.request_id)
            .field("from", &self.from)
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}

/// A successful get: a complete copy whose pin still held after the last read, verified with the owner's checksums.
pub struct GetReport {
    /// KV bytes that were copied.
    pub bytes: u64,
    /// The value that was passed as [`GetRequest::hold`].
    pub hold: Box<dyn BlockHold>,
}

impl fmt::Debug for GetReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GetReport({} bytes)", self.bytes)
    }
}

/// How a get ended.
pub type GetOutcome = Result<GetReport, HandoffFailure>;
