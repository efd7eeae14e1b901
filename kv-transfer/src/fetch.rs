//! The API of gets: reading a peer's blocks into one's own, and letting peers read.

use crate::service::Inbox;
use crate::{HandoffFailure, Party, RefuseReason};
use baton_types::{GroupBlocks, RequestId};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// What is to be read from a peer.
pub struct FetchRequest {
    /// The request, for logs and for the owner to call it back ([`crate::KvTransfer::cancel_incoming`]).
    pub request_id: RequestId,
    /// What is read, in terms that the two workers agree on; at most [`FetchRequest::NAME_BYTES_MAX`].
    pub name: Vec<u8>,
    /// First position that is read; those before are left out. A multiple of both sides' block sizes, so that neither side's first block
    /// is a part of one.
    pub from: u32,
    /// Positions `from..tokens` of it are read.
    pub tokens: u32,
    /// Blocks of this instance that take them and nothing else, per group: the first one begins with position `from`.
    pub blocks: GroupBlocks,
    /// After this instant the get fails, wherever it is.
    pub deadline: Instant,
    /// Keeps the blocks from reuse; comes back with the outcome, or is dropped once nothing can write to them any more.
    pub hold: Box<dyn Any + Send>,
}

impl FetchRequest {
    /// Longest name: the hashes of a few thousand blocks.
    pub const NAME_BYTES_MAX: usize = 64 << 10;
}

impl fmt::Debug for FetchRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FetchRequest")
            .field("request_id", &self.request_id)
            .field("from", &self.from)
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}

/// A get that succeeded: read whole, under a pin that still held afterwards, with the owner's checksums.
pub struct Fetched {
    /// KV bytes read.
    pub bytes: u64,
    /// [`FetchRequest::hold`].
    pub hold: Box<dyn Any + Send>,
}

impl fmt::Debug for Fetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fetched({} bytes)", self.bytes)
    }
}

/// How a get ended.
pub type FetchOutcome = Result<Fetched, HandoffFailure>;

/// The reader's end of one get. Dropped before its outcome was asked for, it gives the get up.
pub struct Fetching {
    inbox: Arc<Inbox>,
    key: u64,
    outcome: Option<oneshot::Receiver<FetchOutcome>>,
}

impl Fetching {
    pub(crate) fn new(inbox: Arc<Inbox>, key: u64, outcome: oneshot::Receiver<FetchOutcome>) -> Self {
        Self { inbox, key, outcome: Some(outcome) }
    }

    /// Gives the get up. The outcome becomes [`HandoffFailure::Aborted`], unless it ended before.
    pub fn abort(&self, reason: impl Into<String>) {
        self.inbox.abort(self.key, reason.into());
    }

    /// Waits for the end. Cancelling the wait (dropping the future) does not abort; dropping `self` does.
    pub async fn outcome(&mut self) -> FetchOutcome {
        let Some(receiver) = &mut self.outcome else { return Err(HandoffFailure::Stopped) };
        let result = receiver.await.unwrap_or(Err(HandoffFailure::Stopped));
        self.outcome = None;
        result
    }

    /// [`Fetching::outcome`] for threads outside a runtime.
    pub fn wait(mut self) -> FetchOutcome {
        let outcome = self.outcome.take().map(oneshot::Receiver::blocking_recv);
        outcome.and_then(Result::ok).unwrap_or(Err(HandoffFailure::Stopped))
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        if self.outcome.is_some() {
            self.inbox.abort(self.key, "the reader dropped the get".into());
        }
    }
}

impl fmt::Debug for Fetching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fetching({})", self.key)
    }
}

/// A peer's question for blocks to read.
#[derive(Clone, Debug)]
pub struct PinQuestion {
    /// The request it belongs to.
    pub request_id: RequestId,
    /// Who reads, by its own word.
    pub reader: Party,
    /// Whether it proved the role of a worker. Where the service has credentials nobody else is asked for; without any nobody did.
    pub proven: bool,
    /// [`FetchRequest::name`].
    pub name: Vec<u8>,
    /// First position to be read: a multiple of the block size here.
    pub from: u32,
    /// Positions `from..tokens` are to be read.
    pub tokens: u32,
    /// When the pin ends, if the get has not by then.
    pub deadline: Instant,
}

/// The answer to one [`crate::SinkHandler::pin`], from any thread, now or later. Dropping it refuses.
pub struct PinReply {
    inbox: Arc<Inbox>,
    key: u64,
    answered: bool,
}

impl PinReply {
    pub(crate) fn new(inbox: Arc<Inbox>, key: u64) -> Self {
        Self { inbox, key, answered: false }
    }

    /// Lets the peer read these blocks, which cover the positions of the question (the first one begins with [`PinQuestion::from`]) and
    /// which `hold` keeps from reuse. It is dropped as soon as the get or the pin has ended.
    pub fn pin(mut self, blocks: GroupBlocks, hold: Box<dyn Any + Send>) {
        self.answered = true;
        self.inbox.pinned(self.key, blocks, hold);
    }

    /// Has nothing to be read.
    pub fn refuse(mut self, reason: RefuseReason, detail: impl Into<String>) {
        self.answered = true;
        self.inbox.refused(self.key, reason, detail.into());
    }
}

impl Drop for PinReply {
    fn drop(&mut self) {
        if !self.answered {
            self.inbox.refused(self.key, RefuseReason::UnknownRequest, "the owner dropped the question".into());
        }
    }
}

impl fmt::Debug for PinReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinReply({})", self.key)
    }
}
