//! The sending side of the API: one handoff as its engine sees it.

use crate::HandoffFailure;
use crate::service::Inbox;
use baton_types::{Fence, TokenId};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

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

/// How a handoff went, told to the source once the sink has adopted it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferReport {
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

/// The source's end of one handoff. All methods return at once and may be called from the engine thread.
///
/// Dropped before its outcome was asked for, it aborts the handoff; dropped after the end it does nothing.
pub struct Outgoing {
    inbox: Arc<Inbox>,
    key: u64,
    outcome: Option<oneshot::Receiver<Result<TransferReport, HandoffFailure>>>,
}

impl Outgoing {
    pub(crate) fn new(
        inbox: Arc<Inbox>,
        key: u64,
        outcome: oneshot::Receiver<Result<TransferReport, HandoffFailure>>,
    ) -> Self {
        Self { inbox, key, outcome: Some(outcome) }
    }

    /// KV of model layer `layer` is launched for positions `0..tokens_end` and may be read once `fence` is done. Whole blocks go out
    /// as soon as a grant is there; an incomplete last block waits for [`Outgoing::finish`].
    pub fn layer_launched(&self, layer: u32, tokens_end: usize, fence: &Fence) {
        self.inbox.launched(self.key, layer, tokens_end, fence.clone());
    }

    /// Nothing more is launched: everything left goes out, then the commit.
    pub fn finish(&self, commit: CommitPayload) {
        self.inbox.finish(self.key, commit);
    }

    /// Gives the handoff up. The outcome becomes [`HandoffFailure::Aborted`], unless it ended before.
    pub fn abort(&self, reason: impl Into<String>) {
        self.inbox.abort(self.key, reason.into());
    }

    /// Waits for the end: the sink adopted the sequence, or why not. Cancelling the wait (dropping the future) does not abort; dropping
    /// `self` does. A second call waits for nothing and says [`HandoffFailure::Stopped`].
    pub async fn outcome(&mut self) -> Result<TransferReport, HandoffFailure> {
        let Some(receiver) = &mut self.outcome else { return Err(HandoffFailure::Stopped) };
        let result = receiver.await.unwrap_or(Err(HandoffFailure::Stopped));
        self.outcome = None;
        result
    }

    /// [`Outgoing::outcome`] for threads outside a runtime.
    pub fn wait(mut self) -> Result<TransferReport, HandoffFailure> {
        let outcome = self.outcome.take().map(oneshot::Receiver::blocking_recv);
        outcome.and_then(Result::ok).unwrap_or(Err(HandoffFailure::Stopped))
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if self.outcome.is_some() {
            self.inbox.abort(self.key, "the source dropped the handoff".into());
        }
    }
}

impl fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Outgoing({})", self.key)
    }
}
