//! A request to get KV, and the report of it.

use crate::HandoffFailure;
use baton_types::{GroupBlocks, RequestId};
use std::any::Any;
use std::fmt;
use std::time::Instant;

/// What is to be got from a peer.
pub struct GetRequest {
    /// The request, for logs and for the owner to call it back ([`crate::KvTransfer::cancel`]).
    pub request_id: RequestId,
    /// What is got, in terms that the two workers agree on; at most [`GetRequest::NAME_BYTES_MAX`].
    pub name: Vec<u8>,
    /// First position that is got; those before are left out. A multiple of both sides' block sizes, so that neither side's first block
    /// is a part of one.
    pub from: u32,
    /// Positions `from..tokens` of it are got.
    pub tokens: u32,
    /// Blocks of this instance that take them and nothing else, per group: the first one begins with position `from`.
    pub blocks: GroupBlocks,
    /// After this instant the get fails, wherever it is.
    pub deadline: Instant,
    /// Keeps the blocks from reuse; comes back with the outcome, or is dropped once nothing can write to them any more.
    pub hold: Box<dyn Any + Send>,
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

/// A get that succeeded: got whole, under a pin that still held afterwards, with the owner's checksums.
pub struct GetReport {
    /// KV bytes got.
    pub bytes: u64,
    /// [`GetRequest::hold`].
    pub hold: Box<dyn Any + Send>,
}

impl fmt::Debug for GetReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GetReport({} bytes)", self.bytes)
    }
}

/// How a get ended.
pub type GetOutcome = Result<GetReport, HandoffFailure>;
