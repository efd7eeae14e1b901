//! Handles of puts and gets, for the side that began them.

use crate::inbox::Inbox;
use crate::role::HandoffKey;
use crate::{CommitPayload, GetReport, HandoffFailure, PutReport};
use baton_types::{BlockTables, Fence};
use std::fmt;
use std::sync::Arc;
use tokio::sync::oneshot;

/// The source's handle of a put.
pub type PutHandle = Handle<PutReport>;

/// The reader's handle of a get.
pub type GetHandle = Handle<GetReport>;

/// The handle of one handoff that was begun here, which ends with a report `R`. All methods but [`Handle::wait`] return at once and may be
/// called from the engine thread.
///
/// Dropping it before the outcome was received aborts the handoff; dropping it after the end has no effect.
pub struct Handle<R> {
    inbox: Arc<Inbox>,
    key: HandoffKey,
    outcome: Option<oneshot::Receiver<Result<R, HandoffFailure>>>,
}

impl<R> Handle<R> {
    pub(crate) fn new(
        inbox: Arc<Inbox>,
        key: HandoffKey,
        outcome: oneshot::Receiver<Result<R, HandoffFailure>>,
    ) -> Self {
        Self { inbox, key, outcome: Some(outcome) }
    }

    /// Aborts the handoff. The outcome becomes [`HandoffFailure::Aborted`], unless the handoff ended before.
    pub fn abort(&self, reason: impl Into<String>) {
        self.inbox.abort(self.key, reason.into());
    }

    /// Waits for the end: the report, or the reason why there is none. Cancelling the wait (dropping the future) does not abort; dropping
    /// `self` does. A second call returns [`HandoffFailure::Stopped`] at once.
    pub async fn outcome(&mut self) -> Result<R, HandoffFailure> {
        let Some(receiver) = &mut self.outcome else { return Err(HandoffFailure::Stopped) };
        let result = receiver.await.unwrap_or(Err(HandoffFailure::Stopped));
        self.outcome = None;
        result
    }

    /// [`Handle::outcome`] for threads outside a runtime.
    pub fn wait(mut self) -> Result<R, HandoffFailure> {
        let outcome = self.outcome.take().map(oneshot::Receiver::blocking_recv);
        outcome.and_then(Result::ok).unwrap_or(Err(HandoffFailure::Stopped))
    }
}

impl Handle<PutReport> {
    /// KV of model layer `layer` is launched for positions `0..tokens_end` and may be read once `fence` is done. Whole blocks are written
    /// as soon as there is a grant; an incomplete last block waits for [`PutHandle::finish`].
    pub fn layer_launched(&self, layer: u32, tokens_end: usize, fence: &Fence) {
        self.inbox.launched(self.key, layer, tokens_end, fence.clone());
    }

    /// The blocks of the sequence from now on, before the layers that use them are launched. Blocks that leave a window are none of those
    /// that move. Of states, a table has one block: the one with the state behind the positions that are launched next.
    pub fn grown(&self, blocks: BlockTables) {
        self.inbox.grown(self.key, blocks);
    }

    /// No more layers will be launched: everything left is written, then the commit is sent.
    pub fn finish(&self, commit: CommitPayload) {
        self.inbox.finish(self.key, commit);
    }
}

impl<R> Drop for Handle<R> {
    fn drop(&mut self) {
        if self.outcome.is_some() {
            self.inbox.abort(self.key, "its handle was dropped".into());
        }
    }
}

impl<R> fmt::Debug for Handle<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({})", self.key)
    }
}
