//! The source's handle of a put, as its engine uses it.

use super::request::{CommitPayload, PutOutcome};
use crate::HandoffFailure;
use crate::inbox::Inbox;
use crate::role::HandoffKey;
use baton_types::{BlockTables, Fence};
use std::fmt;
use std::sync::Arc;
use tokio::sync::oneshot;

/// The source's handle of one handoff. All methods return at once and may be called from the engine thread.
///
/// Dropping it before the outcome was received aborts the handoff; dropping it after the end has no effect.
pub struct PutHandle {
    inbox: Arc<Inbox>,
    key: HandoffKey,
    outcome: Option<oneshot::Receiver<PutOutcome>>,
}

impl PutHandle {
    pub(crate) fn new(inbox: Arc<Inbox>, key: HandoffKey, outcome: oneshot::Receiver<PutOutcome>) -> Self {
        Self { inbox, key, outcome: Some(outcome) }
    }

    /// KV of model layer `layer` is launched for positions `0..tokens_end` and may be read once `fence` is done. Whole blocks are written
    /// as soon as there is a grant; an incomplete last block waits for [`PutHandle::finish`].
    pub fn layer_launched(&self, layer: u32, tokens_end: usize, fence: &Fence) {
        self.inbox.launched(self.key, layer, tokens_end, fence.clone());
    }

    /// The blocks of the sequence from now on, before the layers that use them are launched. Blocks that leave a window are none of those
    /// that move.
    pub fn grown(&self, blocks: BlockTables) {
        self.inbox.grown(self.key, blocks);
    }

    /// No more layers will be launched: everything left is written, then the commit is sent.
    pub fn finish(&self, commit: CommitPayload) {
        self.inbox.finish(self.key, commit);
    }

    /// Aborts the handoff. The outcome becomes [`HandoffFailure::Aborted`], unless the handoff ended before.
    pub fn abort(&self, reason: impl Into<String>) {
        self.inbox.abort(self.key, reason.into());
    }

    /// Waits for the end: the sink adopted the sequence, or the reason why not. Cancelling the wait (dropping the future) does not abort;
    /// dropping `self` does. A second call returns [`HandoffFailure::Stopped`] at once.
    pub async fn outcome(&mut self) -> PutOutcome {
        let Some(receiver) = &mut self.outcome else { return Err(HandoffFailure::Stopped) };
        let result = receiver.await.unwrap_or(Err(HandoffFailure::Stopped));
        self.outcome = None;
        result
    }

    /// [`PutHandle::outcome`] for threads outside a runtime.
    pub fn wait(mut self) -> PutOutcome {
        let outcome = self.outcome.take().map(oneshot::Receiver::blocking_recv);
        outcome.and_then(Result::ok).unwrap_or(Err(HandoffFailure::Stopped))
    }
}

impl Drop for PutHandle {
    fn drop(&mut self) {
        if self.outcome.is_some() {
            self.inbox.abort(self.key, "the source dropped the handoff".into());
        }
    }
}

impl fmt::Debug for PutHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PutHandle({})", self.key)
    }
}
